"""The server's process: Flower's SuperLink with TLS and known nodes, behind a gate.

Flower lets everybody who reaches its port start runs, with code of their own, and take up work that is meant for the
server itself. Behind the gate sites can do what nodes do; starting and stopping needs a key that is in the
federation's folder, and the server's own work is for processes of its own machine.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from partsong.consortium.kit import require_address
from partsong.consortium.locking import held
from partsong.consortium.server_folder import ServerFolder
from partsong.flower_app.control import HEADER, ServerError, require_flower
from partsong.flower_app.doorbell import Doorbell
from partsong.flower_app.environment import set_quiet
from partsong.flower_app.leftovers import swept
from partsong.flower_app.lifelines import SERVER, keep_executor
from partsong.flower_app.listening import HERE, bound, hosts_of, run_on
from partsong.flower_app.running import FEDERATION

FOR_NODES = ("/v1/fleet/", "/health")
FOR_COORDINATOR = "/v1/control/"
Scope = dict[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Gate:
    """Who may ask for what, before Flower sees a request (an ASGI middleware)."""

    app: App
    key: str = field(repr=False, default="")

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Pass on, or answer 403."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and self.admits(scope)):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})

    def admits(self, scope: Scope) -> bool:
        """Nodes to the fleet, who has the key to the control, and this machine to the rest."""
        path = str(scope.get("path", ""))
        if path.startswith(FOR_NODES):
            return True
        if path.startswith(FOR_COORDINATOR):
            sent = dict(scope.get("headers", ())).get(HEADER.encode(), b"")
            return bool(self.key) and hmac.compare_digest(sent, self.key.encode())
        client = scope.get("client")
        return client is not None and ipaddress.ip_address(client[0]).is_loopback


def serve(server: ServerFolder, host: str | None = None, tell: Callable[[str], None] = lambda line: None) -> None:
    """Until it is told to stop; nothing is left running then. Sites call `host`, its own machine calls 127.0.0.1."""
    require_flower()
    server.require_valid()
    control_key = server.control_key
    home = server.path / "flower"
    set_quiet(home, {FEDERATION: str(server.path), SERVER: str(os.getpid())})
    reached, port = require_address(server.address)
    with held(server.path / "server.lock", "This federation is served already"):
        from flwr.superlink import extensions
        from flwr.superlink.cli.flower_superlink import flower_superlink
        from starlette.middleware import Middleware

        sockets = bound(host or reached, port)
        run_on(sockets)
        tell(f"It listens on {' and '.join(hosts_of(sockets))}, port {port}.")
        executor = keep_executor()
        extensions.get_middleware = lambda: (Middleware(Gate, key=control_key), Middleware(Doorbell))
        sys.argv = [
            "flower-superlink",
            *("--host", HERE),
            *("--port", str(port)),
            *("--database", str(home / "state.db")),
            *("--ssl-ca-certfile", str(server.path / "ca.crt")),
            *("--ssl-certfile", str(server.path / "server.crt")),
            *("--ssl-keyfile", str(server.path / "server.key")),
            "--enable-supernode-auth",
            "--disable-runtime-dependency-installation",
        ]
        with swept(home / "state.db"):
            flower_superlink()
        if executor.has_failed:
            raise ServerError(executor.told)
