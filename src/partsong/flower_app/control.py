"""The coordinator's hand on a running server: admit nodes, start runs, see how they really are, stop them."""

from __future__ import annotations

import hashlib
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

from partsong.consortium.kit import require_address
from partsong.consortium.server_folder import ServerFolder
from partsong.errors import FileError, MissingExtra, PartsongError
from partsong.flower_app.environment import set_quiet
from partsong.flower_app.listening import HERE

HEADER = "x-partsong-control"
VERSION = "1.41."
TRIES = 5
PAUSE = 1.0
PATIENCE = 10.0
UNREGISTERED = "unregistered"
"""What Flower says of a node that was taken out."""

Result = TypeVar("Result")


class ServerError(PartsongError, ConnectionError):
    """The server of a federation cannot be reached, or does not do what it was asked."""


@dataclass(frozen=True, slots=True)
class Status:
    """How a run is, in Flower's words."""

    status: str
    sub_status: str = ""
    details: str = ""

    @property
    def is_over(self) -> bool:
        """Finished, in whatever way."""
        return self.status == "finished"


@dataclass(frozen=True, slots=True)
class Node:
    """A site's node as the server sees it."""

    number: int
    status: str
    since: str
    name: str = ""
    key: bytes = b""
    """Its public key, as Flower keeps it."""


@dataclass(frozen=True, slots=True)
class Control:
    """An open connection; each call is tried some times where the connection breaks."""

    client: Any = field(repr=False)
    address: str
    folder: Path = Path()

    def register(self, public_key: str, site: str) -> int:
        """The number of a node that is known by this key from now on, or was before: an answer can get lost."""
        from flwr.proto.control_pb2 import RegisterNodeRequest

        request = RegisterNodeRequest(public_key=_key_bytes(public_key), name=site)
        try:
            return int(self._tried(lambda: self.client.RegisterNode(request)).node_id)
        except ServerError as error:
            if "412" not in str(error):
                raise
            if (known := self.known(public_key, site)) is not None:
                return known
            raise ServerError(
                f"The key of {site!r} was known here before, under another name or until it was removed, and Flower "
                "takes no key twice. The site has to join anew in a new folder (--folder), which makes new keys."
            ) from error

    def known(self, public_key: str, site: str) -> int | None:
        """The number of the node that is registered with this key and name."""
        key = _key_bytes(public_key)
        return next((node.number for node in self.nodes().values() if (node.key, node.name) == (key, site)), None)

    def unregister(self, number: int) -> None:
        """Let a node in no more."""
        from flwr.proto.control_pb2 import UnregisterNodeRequest

        self._tried(lambda: self.client.UnregisterNode(UnregisterNodeRequest(node_id=number)))

    def nodes(self) -> dict[int, Node]:
        """All that are registered."""
        from flwr.proto.control_pb2 import ListNodesRequest

        found = self._tried(lambda: self.client.ListNodes(ListNodesRequest())).nodes_info
        nodes = [Node(int(one.node_id), one.status, one.last_activated_at, one.name, one.public_key) for one in found]
        return {node.number: node for node in nodes if node.status != UNREGISTERED}

    def start(self, run: str) -> int:
        """Flower's number of a run that was started."""
        from flwr.common.serde import fab_to_proto, user_config_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.supercore.fab import Fab

        content = app_bundle()
        fab = fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {}))
        request = StartRunRequest(fab=fab, override_config=user_config_to_proto({"run": run}))
        started = self._tried(lambda: self.client.StartRun(request))
        if not started.HasField("run_id"):
            raise ServerError("Flower has not started the run. Look at the server's log.")
        return int(started.run_id)

    def status(self, number: int) -> Status:
        """How a run really is, which Flower's exit codes do not tell."""
        from flwr.proto.control_pb2 import ListRunsRequest

        found = self._tried(lambda: self.client.ListRuns(ListRunsRequest(run_id=number))).run_dict
        if number not in found:
            return Status("unknown")
        told = found[number].status
        return Status(str(told.status), str(told.sub_status), str(told.details))

    def stop(self, number: int) -> bool:
        """Whether it could be stopped."""
        from flwr.proto.control_pb2 import StopRunRequest

        return bool(self._tried(lambda: self.client.StopRun(StopRunRequest(run_id=number))).success)

    def _tried(self, call: Callable[[], Result]) -> Result:
        """Connections break for no reason that a caller could do something about; the same call is made again."""
        import httpx

        for left in reversed(range(TRIES)):
            try:
                return call()
            except httpx.TransportError as error:
                if why := distrust(error):
                    raise ServerError(
                        f"Who answers at {self.address} has no certificate by the authority of this federation "
                        f"({why}). If it has expired, renew it, then end the server, and start it again: partsong "
                        f"federation init {quote(str(self.folder))} --renew"
                    ) from error
                if not left:
                    raise ServerError(
                        f"No server answers at {self.address} ({type(error).__name__}). A run that it was at goes on "
                        "with --resume, once it is started again: partsong federation serve --folder "
                        f"{quote(str(self.folder))}"
                    ) from error
                time.sleep(PAUSE)
            except Exception as error:
                raise ServerError(f"The server at {self.address} has refused: {str(error)[:500]}") from error
        raise AssertionError


@contextmanager
def controlling(server: ServerFolder) -> Iterator[Control]:
    """A connection to the server of a federation, from its own machine."""
    require_flower()
    set_quiet(server.path / "flower")
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    _, port = require_address(server.address)
    address = f"{HERE}:{port}"
    client = ControlHttpClient.from_server_address(
        server_address=address,
        insecure=False,
        root_certificates=server.authority,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI"), _Key(server.control_key)],
    )
    try:
        yield Control(client, address, server.path)
    finally:
        client.close()


def shown_certificate(server: ServerFolder) -> bytes:
    """The certificate, as PEM, that the running server of a federation shows; not whether it is valid."""
    try:
        text = ssl.get_server_certificate((HERE, require_address(server.address)[1]), timeout=PATIENCE)
    except OSError as error:
        raise ServerError(f"The server shows no certificate ({error}). Look at its log.") from error
    return text.encode()


def distrust(error: BaseException) -> str:
    """Why a certificate was not accepted, where that is behind an error of a connection; else nothing."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY_FAILED" in str(seen):
            return getattr(seen, "verify_message", "") or str(seen)
        seen = seen.__cause__ or seen.__context__
    return ""


def app_bundle() -> bytes:
    """What Flower hands out to sites: a file that names two components, the same bytes on every machine."""
    from flwr.cli.build import build_fab_from_files

    names = files("partsong.flower_app") / "app" / "pyproject.toml"
    if not names.is_file():
        raise FileError(f"{names} is not there: partsong was not installed whole. Install it again.")
    return bytes(build_fab_from_files({"pyproject.toml": names.read_bytes()})[0])


def require_flower() -> None:
    """Flower, in the version that this was written for."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("flwr")
    except PackageNotFoundError as error:
        raise MissingExtra("This needs Flower. Install it with: pip install 'partsong[flower]'") from error
    if not found.startswith(VERSION):
        raise MissingExtra(f"This needs Flower {VERSION}x, and {found} is installed. Install 'partsong[flower]'.")


def _key_bytes(public_key: str) -> bytes:
    """A node's key of a card, as Flower keeps it."""
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    key: Any = load_ssh_public_key(public_key.encode())
    return public_key_to_bytes(key)


@dataclass(frozen=True, slots=True)
class _Key:
    """Adds the key to every call."""

    key: str = field(repr=False)

    def intercept(self, context: Any, call_next: Callable[[Any], Any]) -> Any:
        """As Flower calls it."""
        context.request.headers[HEADER] = self.key
        return call_next(context)
