"""Site process: calls the server over TLS, opens no port, and runs no code that it receives.

It implements a node of Flower 1.41 (the fleet interface), with Flower's client, keys and messages. It replaces Flower's
own node, `flower-supernode`, which

- installs and runs the app that the server sends: here the app must be, byte for byte, the one that this partsong
  builds, and even then it is neither fetched nor loaded;
- starts a process and opens a port for each request: here requests are answered in this process, one after another,
  with the data that it has loaded;
- polls for requests every three seconds: here a pull lasts until there is one (`LongPolling` at the server);
- is refused for a minute after a crash, because the server takes it for present: here it first deactivates its old
  node, whose number is stored in `node.number`;
- exits when the server no longer knows a request: here that request is dropped.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, TypeVar

from partsong.federation.flower.control import (
    ServerError,
    app_bundle,
    configure_flower,
    reject_untrusted_server,
    require_flower,
)
from partsong.federation.setup.site_folder import SiteFolder
from partsong.federation.site.state import append_to_log
from partsong.federation.transports.flower import message_bytes, reply_message
from partsong.io.write import write_text

PAUSE = 2.0
ACTIVATION_TIMEOUT = 120.0
"""Seconds; longer than a server needs to notice that a node is gone."""
HEARTBEAT = 30
"""Seconds; the server declares a node gone after two heartbeats are missing."""
PULL_TIMEOUT = 60.0
"""Seconds after which an incomplete message is dropped: the server's process was killed while it sent."""
MAX_CLOCK_AHEAD, MAX_CLOCK_BEHIND = 5, 300
"""Seconds by which a node's clock may differ from the server's; Flower rejects signatures outside this range."""
PATIENCE = 2.5
"""Seconds to wait for the server when the node ends; a server that answers needs one."""
STOPPED = "The node has stopped."
UNTRUSTED = "It has expired, or this is another server. Nothing was sent. Contact the coordinator."

Report = Callable[[str], None]
Result = TypeVar("Result")


def join(site: SiteFolder) -> None:
    """Answer requests until a signal arrives."""
    require_flower()
    configure_flower(site.path / "flower")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with site.serving():
        answer = site.answering()
        with register(site, _print_line) as node:
            try:
                while True:
                    node.answer_next(answer)
            except KeyboardInterrupt:
                _exit_soon()
                raise


@dataclass(slots=True)
class RetryInvoker:
    """Repeats calls until the server answers (a retry invoker of Flower's clients)."""

    site: SiteFolder
    report: Report
    is_reported: bool = False
    is_over: threading.Event = field(default_factory=threading.Event)

    def invoke(self, call: Callable[[], Result]) -> Result:
        """Call until the server answers; ServerError if its certificate is not trusted."""
        import httpx

        while True:
            try:
                result = call()
            except httpx.TransportError as error:
                reject_untrusted_server(error, self.site.address, UNTRUSTED)
                if self.is_over.is_set():
                    raise
                if not self.is_reported:
                    self.report(f"No server answers at {self.site.address} yet. Waiting for it.")
                self.is_reported = True
                time.sleep(PAUSE)
            except httpx.HTTPStatusError:
                self.is_reported = False
                raise
            else:
                self.is_reported = False
                return result


@contextmanager
def register(site: SiteFolder, tell: Report) -> Iterator[SiteNode]:
    """Activate the site's node at the server for the duration of the block; wait for a server that is down."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    key: Any = load_ssh_private_key((site.path / "node").read_bytes(), None)
    guards = [RuntimeVersionHttpInterceptor(component_name="SuperNode"), NodeAuthHttpInterceptor(key, key.public_key())]
    patience = RetryInvoker(site, tell)
    with FleetHttpClient.from_server_address(
        site.address, False, (site.path / "ca.crt").read_bytes(), interceptors=guards, retry_invoker=patience
    ) as client:
        node = SiteNode(site, client, _activate(client, key.public_key(), site), tell)
        heart = threading.Thread(target=node.send_heartbeats, args=(patience.is_over,), daemon=True, name="heartbeat")
        heart.start()
        try:
            yield node
        finally:
            patience.is_over.set()
            heart.join(PATIENCE)
            leaving = threading.Thread(target=node.deactivate, daemon=True, name="leaving")
            leaving.start()
            leaving.join(PATIENCE)


def _activate(client: Any, public_key: Any, site: SiteFolder) -> int:
    """Activate the node, after deactivating its previous activation, and return its number."""
    import httpx
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    request = ActivateNodeRequest(public_key=public_key_to_bytes(public_key), heartbeat_interval=HEARTBEAT)
    place, until = site.path / "node.number", time.monotonic() + ACTIVATION_TIMEOUT
    while True:
        try:
            if place.exists() and (last := place.read_text()).isdecimal():
                with _ignoring_refusal():
                    client.DeactivateNode(DeactivateNodeRequest(node_id=int(last)))
            number = int(client.ActivateNode(request).node_id)
        except httpx.HTTPStatusError as error:
            if error.response.status_code in (401, 403) or not place.exists():
                raise ServerError(rejection_message(site, clock_offset(error.response.headers.get("date")))) from error
            if time.monotonic() > until:
                raise ServerError(f"The server at {site.address} rejects this site: {error}") from error
            time.sleep(PAUSE)
        else:
            write_text(place, str(number))
            return number


@contextmanager
def _ignoring_refusal() -> Iterator[None]:
    """Ignore a refused deactivation: the server knows that it is over. An unknown node is an error."""
    import httpx

    try:
        yield
    except httpx.HTTPStatusError as error:
        if error.response.status_code in (401, 403):
            raise


@dataclass(slots=True)
class SiteNode:
    """An activated node: pulls messages of Flower, gets them answered, and pushes replies."""

    site: SiteFolder
    client: Any = field(repr=False)
    number: int
    report: Report
    apps: dict[int, bool] = field(default_factory=dict)
    """Whether the app of a run is the pinned one."""

    def send_heartbeats(self, is_over: threading.Event) -> None:
        """Send heartbeats to the server. Errors are ignored, since pulling messages shows them too."""
        from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

        request = SendNodeHeartbeatRequest(node=self._node(), heartbeat_interval=HEARTBEAT)
        while not is_over.wait(HEARTBEAT / 3):
            with suppress(Exception):
                self.client.SendNodeHeartbeat(request)

    def deactivate(self) -> None:
        """Notify the server that the node ends."""
        from flwr.proto.fleet_pb2 import DeactivateNodeRequest

        with suppress(Exception):
            self.client.DeactivateNode(DeactivateNodeRequest(node_id=self.number))

    def answer_next(self, answer: Callable[[bytes], bytes]) -> None:
        """Wait for a message and answer it. Failed messages are dropped, and the server asks again.

        ServerError if the server no longer knows the node.
        """
        import httpx
        from flwr.proto.fleet_pb2 import PullMessagesRequest

        try:
            pulled = self.client.PullMessages(PullMessagesRequest(node=self._node()))
            if not pulled.messages_list:
                time.sleep(PAUSE / 10)
            else:
                message = self._fetch(pulled.messages_list[0], pulled.message_object_trees[0])
                is_pinned = self._is_pinned(message.metadata.run_id)
                self._push(self._answer(message, answer) if is_pinned else _refusal(message))
        except httpx.HTTPStatusError as error:
            if error.response.status_code == httpx.codes.UNAUTHORIZED:
                ahead = clock_offset(error.response.headers.get("date"))
                raise ServerError(rejection_message(self.site, ahead)) from error
            self.report(f"The server has refused a call ({error.response.status_code}). Its run may be over.")
            time.sleep(PAUSE)
        except ServerError:
            raise
        except Exception as error:
            self.report(f"A message could not be processed ({type(error).__name__}: {str(error)[:200]}).")
            time.sleep(PAUSE)

    def _node(self) -> Any:
        from flwr.proto.node_pb2 import Node as FlowerNode

        return FlowerNode(node_id=self.number)

    def _is_pinned(self, run: int) -> bool:
        from flwr.proto.run_pb2 import GetRunRequest

        if run not in self.apps:
            found = self.client.GetRun(GetRunRequest(node=self._node(), run_id=run)).run
            self.apps[run] = found.fab_hash == hashlib.sha256(app_bundle()).hexdigest()
        if not self.apps[run]:
            self.report("The server has sent an app that this site has not pinned. Its request was refused.")
        return self.apps[run]

    def _fetch(self, message: Any, tree: Any) -> Any:
        from flwr.app import Message
        from flwr.supercore.inflatable import inflatable_protobuf_utils as calls
        from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree

        of_run = (self._node(), message.metadata.run_id)
        pull = calls.make_pull_object_fn_protobuf(self.client.PullObject, *of_run)
        confirm = calls.make_confirm_message_received_fn_protobuf(self.client.ConfirmMessageReceived, *of_run)
        whole = pull_and_inflate_object_from_tree(tree, pull, confirm, return_type=Message, max_time=PULL_TIMEOUT)
        whole.metadata.__dict__["_message_id"] = tree.object_id
        return whole

    def _answer(self, message: Any, answer: Callable[[bytes], bytes]) -> Any:
        """Build the reply. Of an error the server learns only that there was one; its text stays here."""
        from flwr.app import Error, Message
        from flwr.common.constant import ErrorCode

        try:
            return reply_message(message, answer(message_bytes(message)))
        except Exception:
            append_to_log(self.site.path / "state", "failed", traceback.format_exc())
            return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=""), reply_to=message)

    def _push(self, reply: Any) -> None:
        from flwr.app.message import remove_content_from_message
        from flwr.common.serde import message_to_proto
        from flwr.proto.fleet_pb2 import PushMessagesRequest
        from flwr.supercore.inflatable import inflatable_object as objects
        from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf
        from flwr.supercore.inflatable.inflatable_utils import push_objects

        reply.metadata.__dict__["_message_id"] = reply.object_id
        with objects.no_object_id_recompute():
            request = PushMessagesRequest(
                node=self._node(),
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[objects.get_object_tree(reply)],
            )
            pushed = self.client.PushMessages(request)
            push = partial(make_push_object_fn_protobuf, self.client.PushObject, self._node())
            push_objects(
                objects.get_all_nested_objects(reply),
                push(reply.metadata.run_id, pushed.session_id),
                object_ids_to_push=set(pushed.objects_to_push),
            )


def _refusal(message: Any) -> Any:
    """Build the reply to a request for another app; the coordinator sees that this site refused the app."""
    from flwr.app import Error, Message
    from flwr.common.constant import ErrorCode

    return Message(Error(code=ErrorCode.INVALID_FAB, reason=""), reply_to=message)


def rejection_message(site: SiteFolder, ahead: float | None) -> str:
    """Explain why a server rejects a site: first the clock (`ahead`: seconds ahead of the server's), then its key."""
    limits = f"it may be {MAX_CLOCK_AHEAD} seconds ahead or {MAX_CLOCK_BEHIND} behind"
    admitted = f"Send {site.path / 'card.toml'} to the coordinator to be admitted, then join again."
    if ahead is None:
        return (
            f"The server at {site.address} rejects this site. Compare the clock of this machine with the server's: "
            f"{limits}. If it is right, the server does not know the key of this site. {admitted}"
        )
    way = "ahead of" if ahead > 0 else "behind"
    if not -MAX_CLOCK_BEHIND < ahead < MAX_CLOCK_AHEAD:
        return (
            f"The clock of this machine is {abs(ahead):.0f} seconds {way} that of the server at {site.address}, and "
            f"{limits}. Synchronize both with a time server (NTP), then join again."
        )
    return (
        f"The clock of this machine is right ({abs(ahead):.0f} seconds {way} the server's), but the server at "
        f"{site.address} does not know the key of this site. {admitted}"
    )


def clock_offset(date: str | None) -> float | None:
    """Return by how many whole seconds this machine's clock is ahead of the date of a current reply; None if
    unknown.
    """
    try:
        return round(time.time() - parsedate_to_datetime(date or "").timestamp())
    except ValueError:
        return None


def _exit_soon() -> None:
    """Exit within PATIENCE seconds, even if a call to the server hangs.

    Everything a site needs is on its disk before it sends anything, and its next start deactivates the old node.
    """

    def end() -> None:
        _print_line(STOPPED)
        os._exit(0)

    timer = threading.Timer(PATIENCE, end)
    timer.daemon = True
    timer.start()


def _print_line(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
