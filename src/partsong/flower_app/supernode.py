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
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from partsong.consortium.locking import held
from partsong.consortium.site_folder import SiteFolder
from partsong.consortium.toml_text import write
from partsong.errors import CompositionError
from partsong.flower_app.control import app_bundle, require_flower
from partsong.flower_app.environment import set_quiet
from partsong.flower_app.leaving import leave_soon, run_to_a_signal
from partsong.flower_app.presence import announce
from partsong.flower_app.unsignalled import heartbeat, retrying

POLL = 0.3
ACQUIRE = frozenset({"/flwr.proto.Runtime/AcquireTask"})


def join(site: SiteFolder) -> None:
    """Until it is told to stop; nothing is left running then."""
    require_flower()
    home = site.path / "flower"
    set_quiet(home)
    with held(site.path / "node.lock", "The node of this site runs already"):
        from partsong.flower_app.client import party_in

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

        from partsong.flower_app.client import app

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
