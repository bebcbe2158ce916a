"""Control a running server for the coordinator's commands: register nodes; start, follow and stop runs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

from partsong import errors
from partsong.errors import FileError, MissingExtra, PartsongError, PartyError
from partsong.federation.locks import holder_of, is_held
from partsong.federation.server.progress import AGREEMENT, STEPS, WAITING, JsonLines, Report
from partsong.federation.setup.credentials import require_address
from partsong.federation.setup.server_folder import RunPlace, ServerFolder, number_in, result_in
from partsong.io.write import write_text

LOOPBACK = "127.0.0.1"
"""Address at which the server's own machine calls it."""
CONTROL_HEADER = "x-partsong-control"
SERVER_PID = "PARTSONG_SERVER_PROCESS"
"""Environment variable by which `serve` passes its process number to its children."""
FLOWER_VERSION = "1.41."
FLOWER_SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
}
"""Settings by which Flower sends no telemetry, checks for no updates and installs nothing."""
MAX_TRIES = 5
PAUSE = 1.0
PATIENCE = 10.0
UNREGISTERED = "unregistered"
"""Flower's status of a removed node."""
STOPPED = "stopped"
"""Flower's sub-status of a run that was stopped."""

Result = TypeVar("Result")


class ServerError(PartsongError, ConnectionError):
    """The server of a federation cannot be reached, or has failed or refused a call."""


def require_flower() -> None:
    """Require the supported version of Flower."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("flwr")
    except PackageNotFoundError as error:
        raise MissingExtra("This needs Flower. Install it with: pip install 'partsong[flower]'") from error
    if not found.startswith(FLOWER_VERSION):
        raise MissingExtra(
            f"This needs Flower {FLOWER_VERSION}x, and {found} is installed. Install 'partsong[flower]'."
        )


def configure_flower(home: Path, variables: dict[str, str] | None = None) -> None:
    """Set environment variables for this process and its children, before Flower is imported. `home`: Flower's files.

    Flower starts its helper programs by name, so PATH must list those of this Python first.
    """
    own = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", "")
    if path.split(os.pathsep)[0] != own:
        os.environ["PATH"] = os.pathsep.join((own, path))
    os.environ.update({**FLOWER_SETTINGS, "FLWR_HOME": str(home), **(variables or {})})


def app_bundle() -> bytes:
    """Return the Flower app of every run: a file that names two components, with the same bytes on every machine."""
    from flwr.cli.build import build_fab_from_files

    names = files("partsong.federation.flower") / "app" / "pyproject.toml"
    if not names.is_file():
        raise FileError(f"{names} is missing: the installation of partsong is incomplete. Reinstall it.")
    return bytes(build_fab_from_files({"pyproject.toml": names.read_bytes()})[0])


def reject_untrusted_server(error: BaseException, address: str, way_out: str) -> None:
    """Raise ServerError if a connection failed because of the server's certificate."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY_FAILED" in str(seen):
            why = getattr(seen, "verify_message", "") or str(seen)
            raise ServerError(
                f"The server at {address} has no certificate by the authority of this federation ({why}). {way_out}"
            ) from error
        seen = seen.__cause__ or seen.__context__


def served_certificate(server: ServerFolder) -> bytes:
    """Return the certificate of the running server, as PEM, without checking it."""
    try:
        text = ssl.get_server_certificate((LOOPBACK, require_address(server.address)[1]), timeout=PATIENCE)
    except OSError as error:
        raise ServerError(f"The server does not present a certificate ({error}). Check its log.") from error
    return text.encode()


# ---- control ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FlowerRunStatus:
    """Flower's status of a run."""

    status: str
    sub_status: str = ""
    details: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the run has finished, with or without success."""
        return self.status == "finished"


@dataclass(frozen=True, slots=True)
class RegisteredNode:
    """A site's node at the server; `key` is its public key in Flower's encoding."""

    number: int
    status: str
    since: str
    name: str = ""
    key: bytes = b""


@dataclass(frozen=True, slots=True)
class ServerControl:
    """An open connection to the server. A call is retried a few times if the connection breaks."""

    client: Any = field(repr=False)
    address: str
    folder: Path = Path()

    def register(self, public_key: str, site: str) -> int:
        """Register a node by its key, and return its number; a registered node keeps its number."""
        from flwr.proto.control_pb2 import RegisterNodeRequest

        request = RegisterNodeRequest(public_key=_key_bytes(public_key), name=site)
        try:
            return int(self._with_retries(lambda: self.client.RegisterNode(request)).node_id)
        except ServerError as error:
            if "412" not in str(error):
                raise
            if (known := self.find_node(public_key, site)) is not None:
                return known
            raise ServerError(
                f"The key of {site!r} was registered before, under another name or until it was removed, and Flower "
                "takes no key twice. Let the site join again in a new folder (--folder), which creates new keys."
            ) from error

    def find_node(self, public_key: str, site: str) -> int | None:
        """Return the number of the node with this key and name; None if there is none."""
        key = _key_bytes(public_key)
        return next((node.number for node in self.nodes().values() if (node.key, node.name) == (key, site)), None)

    def unregister(self, number: int) -> None:
        """Remove a node."""
        from flwr.proto.control_pb2 import UnregisterNodeRequest

        self._with_retries(lambda: self.client.UnregisterNode(UnregisterNodeRequest(node_id=number)))

    def nodes(self) -> dict[int, RegisteredNode]:
        """Return all registered nodes by number."""
        from flwr.proto.control_pb2 import ListNodesRequest

        found = self._with_retries(lambda: self.client.ListNodes(ListNodesRequest())).nodes_info
        nodes = [
            RegisteredNode(int(one.node_id), one.status, one.last_activated_at, one.name, one.public_key)
            for one in found
        ]
        return {node.number: node for node in nodes if node.status != UNREGISTERED}

    def start(self, run: str) -> int:
        """Start a run, and return Flower's number for it."""
        from flwr.common.serde import fab_to_proto, user_config_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.supercore.fab import Fab

        content = app_bundle()
        fab = fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {}))
        request = StartRunRequest(fab=fab, override_config=user_config_to_proto({"run": run}))
        started = self._with_retries(lambda: self.client.StartRun(request))
        if not started.HasField("run_id"):
            raise ServerError("Flower has not started the run. Check the server's log.")
        return int(started.run_id)

    def status(self, number: int) -> FlowerRunStatus:
        """Return the status of a run; Flower's exit codes do not have it."""
        from flwr.proto.control_pb2 import ListRunsRequest

        found = self._with_retries(lambda: self.client.ListRuns(ListRunsRequest(run_id=number))).run_dict
        if number not in found:
            return FlowerRunStatus("unknown")
        status = found[number].status
        return FlowerRunStatus(str(status.status), str(status.sub_status), str(status.details))

    def stop(self, number: int) -> bool:
        """Stop a run, and return whether it could be stopped."""
        from flwr.proto.control_pb2 import StopRunRequest

        return bool(self._with_retries(lambda: self.client.StopRun(StopRunRequest(run_id=number))).success)

    def _with_retries(self, call: Callable[[], Result]) -> Result:
        import httpx

        for left in reversed(range(MAX_TRIES)):
            try:
                return call()
            except httpx.TransportError as error:
                renewing = f"partsong federation init {quote(str(self.folder))} --renew"
                way_out = f"If it has expired, renew it ({renewing}), then restart the server."
                reject_untrusted_server(error, self.address, way_out)
                if not left:
                    raise ServerError(
                        f"No server answers at {self.address} ({type(error).__name__}). Resume its run with --resume "
                        "after starting the server: partsong federation serve --folder "
                        f"{quote(str(self.folder))}"
                    ) from error
                time.sleep(PAUSE)
            except Exception as error:
                raise ServerError(f"The server at {self.address} has refused the call: {str(error)[:500]}") from error
        raise AssertionError


@contextmanager
def open_control(server: ServerFolder) -> Iterator[ServerControl]:
    """Connect to the server of a federation from its own machine."""
    require_flower()
    configure_flower(server.path / "flower")
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    _, port = require_address(server.address)
    address = f"{LOOPBACK}:{port}"
    client = ControlHttpClient.from_server_address(
        server_address=address,
        insecure=False,
        root_certificates=server.authority,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI"), _ControlKey(server.control_key)],
    )
    try:
        yield ServerControl(client, address, server.path)
    finally:
        client.close()


@dataclass(frozen=True, slots=True)
class _ControlKey:
    """Flower client interceptor that adds the control key to every call."""

    key: str = field(repr=False)

    def intercept(self, context: Any, call_next: Callable[[Any], Any]) -> Any:
        context.request.headers[CONTROL_HEADER] = self.key
        return call_next(context)


def _key_bytes(public_key: str) -> bytes:
    """Convert the node key of a card to Flower's encoding."""
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    key: Any = load_ssh_public_key(public_key.encode())
    return public_key_to_bytes(key)


# ---- following --------------------------------------------------------------------------------------------------

MAX_STARTS = 3
"""Flower's app of a run can fail before the run starts (TLS connections break under load); it is retried."""
POLL = 2.0
GRACE = 15.0


@dataclass(frozen=True, slots=True)
class RunFollower:
    """Follows a run from now on: new lines of its files, and a result other than `previous_result`."""

    place: RunPlace
    files: tuple[JsonLines, ...]
    previous_result: tuple[int, int] | None

    @staticmethod
    def from_end(place: RunPlace) -> RunFollower:
        """Skip existing lines and an existing result."""
        paths = (place.state / AGREEMENT / STEPS, place.progress, place.state / WAITING)
        return RunFollower(place, tuple(JsonLines.from_end(path) for path in paths), _identity(place.result))

    @property
    def is_over(self) -> bool:
        """Whether there is a new result."""
        return _identity(self.place.result) not in (None, self.previous_result)

    def report_new(self, tell: Report) -> None:
        """Report new lines."""
        for file in self.files:
            for line in file.read_new():
                tell(line)


def run_to_end(server: ServerFolder, place: RunPlace, tell: Report) -> dict[str, Any]:
    """Start a run, or follow an active one, and return its result. Ctrl-C stops it.

    The start is reported at once ({"starting": name}), because the process takes seconds to come up.
    """
    follower, status, is_reported = RunFollower.from_end(place), FlowerRunStatus("unknown"), False
    with open_control(server) as control:
        for _ in range(MAX_STARTS):
            number = _active_run(control, place)
            if number is None:
                if not is_reported:
                    tell({"starting": place.name})
                is_reported, number = True, control.start(place.name)
                write_text(place.number, str(number))
            try:
                status = _watch(control, number, follower, tell)
            except KeyboardInterrupt:
                control.stop(number)
                end_run_process(place)
                raise
            if follower.is_over:
                return _result(place)
            if status.sub_status == STOPPED:
                end_run_process(place)
                raise ServerError(f"Run {place.name!r} was stopped. Nothing is lost: resume it with --resume.")
    raise ServerError(
        f"Run {place.name!r} has ended {MAX_STARTS} times without a result ({status.details or 'no details'}). Check "
        "the server's log, then resume the run."
    )


def end_run_process(place: RunPlace) -> None:
    """End the process of a run. Flower does not notify it when its run is stopped."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        holder, until = holder_of(place.lock), time.monotonic() + GRACE
        if holder is None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.kill(holder, how)
        while is_held(place.lock) and time.monotonic() < until:
            time.sleep(0.1)
    if is_held(place.lock):
        raise FileError(f"The process of run {place.name!r} cannot be ended. End it by hand, then try again.")


def _active_run(control: ServerControl, place: RunPlace) -> int | None:
    """Return Flower's number of a run with an active process; end the process of a finished run."""
    number = number_in(place) if is_held(place.lock) else None
    if number is not None and control.status(number).is_over:
        end_run_process(place)
        return None
    return number


def _watch(control: ServerControl, number: int, follower: RunFollower, tell: Report) -> FlowerRunStatus:
    """Wait until a run is over, and return its status.

    Flower notices only after a minute that the process of a run has died, and a process can hang after its result.
    """
    was_at_work, until = False, 0.0
    while not (status := control.status(number)).is_over:
        follower.report_new(tell)
        is_at_work = is_held(follower.place.lock)
        was_at_work = was_at_work or is_at_work
        if not until and (follower.is_over or (was_at_work and not is_at_work)):
            until = time.monotonic() + GRACE / 3
        if until and time.monotonic() > until:
            control.stop(number)
            break
        time.sleep(POLL)
    follower.report_new(tell)
    return status


def _identity(path: Path) -> tuple[int, int] | None:
    """Identify a version of a file that is only ever replaced; None if there is no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _result(place: RunPlace) -> dict[str, Any]:
    """Return the result, or raise the error of the run, with its own class."""
    found = result_in(place)
    if found["status"] == "done":
        return found
    kind = vars(errors).get(found["type"])
    is_ours = isinstance(kind, type) and issubclass(kind, PartsongError)
    error = kind(found["error"]) if is_ours and kind is not None else PartyError(f"{found['type']}: {found['error']}")
    for note in found["notes"]:
        error.add_note(note)
    raise error
