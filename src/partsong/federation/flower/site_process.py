"""A site's process: Flower's SuperNode, which calls the server and is called by nobody, and one answering thread.

Flower's nodes install and run the app that the server sends. This one does not: such an app must be, byte for byte, the
bundle that the site's own partsong makes (two names, no code), and even then it is neither installed nor loaded.
Requests are answered in this process, so that nothing is started or compiled for each of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

from partsong.errors import CompositionError
from partsong.federation.flower.control import ServerError, app_bundle, distrust, require_flower
from partsong.federation.flower.environment import set_quiet
from partsong.federation.locks import held
from partsong.federation.setup.credentials import write
from partsong.federation.setup.site_folder import SiteFolder

# ---- leaving ----------------------------------------------------------------------------------------------------
#
# How a site's node ends: Flower takes leave of the server, and a server that hangs is not waited for.

PATIENCE = 2.5
"""Seconds that Flower has for it once a signal has come; it takes one where the server answers."""
STOPPED = "The node has stopped."


def run_to_a_signal(node: Callable[[], None]) -> None:
    """Flower's node, until a signal ends it; SystemExit where it has ended by itself, with an error."""
    try:
        node()
    except SystemExit as ended:
        if ended.code:
            raise


def leave_soon() -> None:
    """From now on a signal that ends Flower's node ends this process within PATIENCE, with exit code 0. All that a
    site has to keep is on its disk before it sends anything, and the next start ends what the server still believes.
    """
    from flwr.supernode import start_client_internal as node

    try:
        original = node.register_signal_handlers
    except AttributeError as error:
        raise CompositionError("Flower's node is not the one that this was written for. Install flwr 1.41.") from error

    def registered(*words: Any, **settings: Any) -> None:
        original(*words, **settings)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _with_an_end(signal.getsignal(number)))

    node.register_signal_handlers = registered


def _with_an_end(handler: Any) -> Callable[[int, Any], None]:
    def handle(number: int, frame: Any) -> None:
        threading.Thread(target=_end, daemon=True, name="leaving").start()
        handler(number, frame)

    return handle


def _end() -> None:
    time.sleep(PATIENCE)
    sys.stderr.write(f"{STOPPED}\n")
    sys.stderr.flush()
    os._exit(0)


# ---- presence ---------------------------------------------------------------------------------------------------
#
# Before a site's node begins: is the server the right one, are we known there, and is our last life over?
#
# Flower lets no node in that it believes to be there still, which it does for a minute after a crash. A site that knows
# the number of its node ends that life itself; and it learns the number whenever it is let in.

PAUSE = 2.0
LAPSE = 120.0
"""Longer than a server takes to notice that a node is gone."""
AHEAD, BEHIND = 5, 300
"""Seconds by which the clock of a node may differ from the server's: Flower takes no signature of another time."""


def announce(site: SiteFolder, tell: Callable[[str], None]) -> int:
    """The number of the site's node, which can begin now; waits for a server that does not answer yet."""
    import httpx
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    key: Any = load_ssh_private_key((site.path / "node").read_bytes(), None)
    guards = [RuntimeVersionHttpInterceptor(component_name="SuperNode"), NodeAuthHttpInterceptor(key, key.public_key())]
    authority = (site.path / "ca.crt").read_bytes()
    told, until = False, time.monotonic() + LAPSE
    with FleetHttpClient.from_server_address(site.address, False, authority, interceptors=guards) as client:
        while True:
            try:
                return _let_in(client, key, site)
            except httpx.TransportError as error:
                _require_trust(error, site)
                if not told:
                    tell(f"No server answers at {site.address} yet; waiting for it.")
                told, until = True, time.monotonic() + LAPSE
            except httpx.HTTPStatusError as error:
                if error.response.status_code in (401, 403) or not (site.path / "node.number").exists():
                    raise ServerError(unknown(site, seconds_ahead(error.response.headers.get("date")))) from error
                if time.monotonic() > until:
                    raise ServerError(f"The server at {site.address} does not let this site in: {error}") from error
            time.sleep(PAUSE)


def unknown(site: SiteFolder, ahead: float | None) -> str:
    """Why a server may not know a site, the clock first; `ahead` is by how many seconds ours is, if that is known."""
    limits = f"it may be {AHEAD} seconds ahead, and {BEHIND} behind"
    admitted = f"Send the coordinator {site.path / 'card.toml'}, to be admitted; then join again."
    if ahead is None:
        return (
            f"The server at {site.address} does not let this site in. Compare the clock of this machine with the "
            f"server's: {limits}. If it is right, the server does not know the key of this site. {admitted}"
        )
    way = "ahead of" if ahead > 0 else "behind"
    if not -BEHIND < ahead < AHEAD:
        return (
            f"The clock of this machine is {abs(ahead):.0f} seconds {way} that of the server at {site.address}, and "
            f"{limits}. Set both by a time server (NTP), then join again."
        )
    return (
        f"The clock of this machine is right ({abs(ahead):.0f} seconds {way} the server's), but the server at "
        f"{site.address} does not know the key of this site. {admitted}"
    )


def seconds_ahead(date: str | None) -> float | None:
    """By how much the clock of this machine is ahead of that of whoever has dated a reply of now, in whole seconds."""
    try:
        return round(time.time() - parsedate_to_datetime(date or "").timestamp())
    except ValueError:
        return None


def _let_in(client: Any, key: Any, site: SiteFolder) -> int:
    """Begin, which tells our number, and end at once: Flower's own node begins after this."""
    import httpx
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    place = site.path / "node.number"
    if place.exists():
        try:
            client.DeactivateNode(DeactivateNodeRequest(node_id=int(place.read_text())))
        except httpx.HTTPStatusError as error:
            if error.response.status_code in (401, 403):
                raise
    public = public_key_to_bytes(key.public_key())
    number = int(client.ActivateNode(ActivateNodeRequest(public_key=public, heartbeat_interval=30)).node_id)
    write(place, str(number))
    client.DeactivateNode(DeactivateNodeRequest(node_id=number))
    return number


def _require_trust(error: BaseException, site: SiteFolder) -> None:
    """A server with the wrong certificate is not waited for."""
    if why := distrust(error):
        raise ServerError(
            f"Who answers at {site.address} has no certificate by the authority of this federation ({why}): it has "
            "expired, or this is somebody else. Nothing was sent; call the coordinator."
        ) from error


# ---- unsignalled ------------------------------------------------------------------------------------------------
#
# Calls that Flower makes in a process for each request, made in the node's own process.
#
# Where the node does not know a request any more (a server was killed while the request came in), such a call sends its
# process a signal to end. Here that would end the node: the call fails instead, and the node goes on.


def retrying() -> Any:
    """Flower's way to try calls again, but for a request that is refused as unknown (401): that is an error."""
    import httpx
    from flwr.supercore.retry import make_simple_http_retry_invoker

    invoker = make_simple_http_retry_invoker()
    original = invoker.should_giveup

    def is_given_up(error: Exception) -> bool:
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code == httpx.codes.UNAUTHORIZED:
            return True
        return bool(original(error)) if original is not None else False

    invoker.should_giveup = is_given_up
    return invoker


def heartbeat(client: Any) -> Callable[[], bool]:
    """Tells the node that a request is being worked on; whether the node was reached, whatever it thinks of that."""
    import httpx
    from flwr.supercore.heartbeat import SendTaskHeartbeatRequest

    def told() -> bool:
        try:
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        except httpx.TransportError:
            return False
        except httpx.HTTPStatusError:
            return True
        return True

    return told


# ---- supernode --------------------------------------------------------------------------------------------------

POLL = 0.3
ACQUIRE = frozenset({"/flwr.proto.Runtime/AcquireTask"})


def join(site: SiteFolder) -> None:
    """Until it is told to stop; nothing is left running then."""
    require_flower()
    home = site.path / "flower"
    set_quiet(home)
    with held(site.path / "node.lock", "The node of this site runs already"):
        from partsong.federation.flower.client_app import party_in

        party_in(site.path)
        bundle = app_bundle()
        admit_only(bundle)
        leave_soon()
        announce(site, _tell)
        answering = Answering(f"127.0.0.1:{free_port()}", secrets.token_bytes(32), hashlib.sha256(bundle).hexdigest())
        write(home / "answering.key", answering.secret, private=True)
        threading.Thread(target=answering.forever, daemon=True, name="answering").start()
        from flwr.supernode.cli.flower_supernode import flower_supernode

        sys.argv = [
            "flower-supernode",
            *("--superlink", site.address),
            *("--host", "127.0.0.1"),
            *("--port", answering.address.rpartition(":")[2]),
            *("--root-certificates", str(site.path / "ca.crt")),
            *("--auth-supernode-private-key", str(site.path / "node")),
            *("--node-config", f"site={quoted(str(site.path))}"),
            *("--isolation", "process"),
            *("--superexec-auth-secret-file", str(home / "answering.key")),
        ]
        run_to_a_signal(flower_supernode)


def quoted(text: str) -> str:
    """As Flower reads texts in the words of its commands: of TOML, but without quotation marks in them."""
    return '"' + json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', "\\u0022").replace("\x7f", "\\u007f") + '"'


@dataclass(frozen=True, slots=True)
class Answering:
    """Takes requests from the node in this process, at its local address, each in a thread.

    Flower hands over one after another; but one whose run was broken off while it was fetched never becomes whole.
    """

    address: str
    secret: bytes = field(repr=False)
    bundle: str

    def forever(self) -> None:
        """As long as this process lives. One that cannot go on ends the process: a site that is silent helps nobody."""
        from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor

        self._wait()
        guard = SuperExecAuthHttpInterceptor(master_secret=self.secret, protected_methods=ACQUIRE)
        client = self._client(guard)
        misses = 0
        while misses < 100:
            try:
                is_answered = self._next(client)
                misses = 0
            except Exception as error:
                _tell(f"A request could not be taken ({type(error).__name__}).")
                is_answered, misses = False, misses + 1
            if not is_answered:
                time.sleep(POLL)
        os._exit(1)

    def _next(self, client: Any) -> bool:
        """Whether there was a request."""
        from flwr.proto.runtime_pb2 import AcquireTaskRequest
        from flwr.supercore.constant import TaskType

        found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
        if not found.HasField("task") or not found.token:
            return False
        threading.Thread(target=self._tried, args=(found.token,), daemon=True, name="request").start()
        return True

    def _tried(self, token: str) -> None:
        try:
            self._answer(token)
        except Exception as error:
            _tell(f"A request could not be answered ({type(error).__name__}).")

    def _answer(self, token: str) -> None:
        from flwr.common.constant import SubStatus
        from flwr.supercore.heartbeat import HeartbeatSender
        from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
        from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

        from partsong.federation.flower.client_app import app

        client = self._client(RuntimeTokenHttpInterceptor(token))
        heart = HeartbeatSender(heartbeat(client))
        heart.start()
        context, outcome = None, SubStatus.FAILED
        try:
            message, context, _, fab = pull_task_input(client)
            if hashlib.sha256(fab.content).hexdigest() != self.bundle:
                raise CompositionError("An app came that this site has not pinned.")
            push_message(client, _answered(app, message, context), context)
            outcome = SubStatus.COMPLETED
        finally:
            push_task_output(client, context, outcome, "")
            heart.stop()
            client.close()

    def _client(self, guard: Any) -> Any:
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
        from flwr.supercore.runtime import RuntimeHttpClient

        return RuntimeHttpClient.from_server_address(
            server_address=self.address,
            insecure=True,
            root_certificates=None,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec"), guard],
            retry_invoker=retrying(),
        )

    def _wait(self) -> None:
        host, _, port = self.address.rpartition(":")
        while True:
            try:
                socket.create_connection((host, int(port)), 1).close()
                return
            except OSError:
                time.sleep(POLL)


def _answered(app: Any, message: Any, context: Any) -> Any:
    """The app's reply, or an error that says nothing but that there was one."""
    from flwr.app import Error, Message
    from flwr.common.constant import ErrorCode

    try:
        return app(message=message, context=context)
    except Exception:
        return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=""), reply_to=message)


def admit_only(bundle: bytes) -> None:
    """From now on runs of other apps are dropped in this process, as if they were over."""
    from flwr.supernode import start_client_internal as node

    try:
        original, over = node.get_fused_config_from_fab, node.RunNotRunningException
    except AttributeError as error:
        raise CompositionError("Flower's node is not the one that this was written for. Install flwr 1.41.") from error
    pinned = hashlib.sha256(bundle).hexdigest()

    def checked(content: Any, run: Any) -> Any:
        if not isinstance(content, bytes) or hashlib.sha256(content).hexdigest() != pinned:
            _tell("The server has sent an app that this site has not pinned; it was dropped.")
            raise over("not pinned")
        return original(content, run)

    node.get_fused_config_from_fab = checked


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
