"""Server process: Flower 1.41's SuperLink with TLS and registered nodes, behind an access gate.

Changes to Flower's own server, `flower-superlink`, and their reasons:

- `Gate`: Flower lets anyone who reaches its port start runs with arbitrary code, and take work that is meant for the
  server itself.
- `LongPolling`: Flower's nodes poll for messages every few seconds; most of a round would be waiting.
- `purge_messages`: SQLite leaves the bytes of deleted messages in Flower's database and its write-ahead log.
- `open_sockets`: Flower listens at one host, and its executor calls that one; but the gate knows callers of the
  server's own machine by their address, 127.0.0.1.
- `serve` ends when Flower's executor has died: Flower would silently start no more runs. Let a service manager restart
  it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import ipaddress
import os
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partsong.errors import FileError
from partsong.federation.flower.control import (
    CONTROL_HEADER,
    LOOPBACK,
    SERVER_PID,
    ServerError,
    configure_flower,
    require_flower,
)
from partsong.federation.locks import held
from partsong.federation.server.launch import FEDERATION
from partsong.federation.setup.credentials import require_address
from partsong.federation.setup.server_folder import ServerFolder

Scope = dict[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]


def serve(server: ServerFolder, host: str | None = None, tell: Callable[[str], None] = lambda line: None) -> None:
    """Serve until a signal; no process is left running. Sites call `host`, the server's own machine calls 127.0.0.1."""
    require_flower()
    server.require_valid()
    control_key = server.control_key
    configure_flower(server.path / "flower", {FEDERATION: str(server.path), SERVER_PID: str(os.getpid())})
    reached, port = require_address(server.address)
    with held(server.path / "server.lock", "This federation is already being served"):
        sockets = open_sockets(host or reached, port)
        tell(f"Listening on {' and '.join(one.getsockname()[0] for one in sockets)}, port {port}.")
        database = server.path / "flower" / "state.db"
        with purge_messages(database):
            flower, web = _flower_in(server, database, port, control_key)
            ended = threading.Event()
            threading.Thread(target=_end_with_executor, args=(flower, web, ended), daemon=True).start()
            web.run(sockets)
        if not web.started:
            raise ServerError("Flower's server did not start. See its error above.")
        if ended.is_set():
            raise ServerError(
                "Flower's executor, which starts runs, has died, so the server has ended. Restart it, then resume its "
                "runs."
            )


def _flower_in(server: ServerFolder, database: Path, port: int, control_key: str) -> tuple[Any, Any]:
    """Build Flower's application and its web server."""
    import uvicorn
    from flwr.supercore.http_logging import get_uvicorn_log_config
    from flwr.supercore.logger import console_handler
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
    from flwr.superlink.main import create_app

    certificate, key = str(server.path / "server.crt"), str(server.path / "server.key")
    sys.argv = [
        "flower-superlink",
        *("--host", LOOPBACK),
        *("--port", str(port)),
        *("--database", str(database)),
        *("--ssl-ca-certfile", str(server.path / "ca.crt")),
        *("--ssl-certfile", certificate),
        *("--ssl-keyfile", key),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
    ]
    flower = create_app(_parse_superlink_lifespan_config(), SuperLinkLifespan)
    polling = LongPolling(flower)
    log = get_uvicorn_log_config(console_handler.level)
    web = uvicorn.Server(
        uvicorn.Config(Gate(polling, control_key), ssl_certfile=certificate, ssl_keyfile=key, log_config=log)
    )
    polling.is_stopping = lambda: web.should_exit
    return flower, web


def _end_with_executor(flower: Any, web: Any, ended: threading.Event) -> None:
    """Shut the web server down when Flower's executor has died."""
    while not web.should_exit:
        executor = flower.state.superlink_lifespan.superexec_process
        if executor is not None and executor.poll() is not None:
            ended.set()
            web.should_exit = True
        time.sleep(1.0)


# ---- gate -------------------------------------------------------------------------------------------------------

FOR_NODES = ("/v1/fleet/", "/health")
FOR_COORDINATOR = "/v1/control/"


@dataclass(frozen=True, slots=True)
class Gate:
    """Access control before Flower sees a request (ASGI middleware).

    Sites can use the node interface. Starting and stopping runs needs the control key of the federation's folder. The
    rest is for processes on the server's own machine.
    """

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
        """Admit nodes to the fleet interface, holders of the key to control, and this machine to the rest."""
        path = str(scope.get("path", ""))
        if path.startswith(FOR_NODES):
            return True
        if path.startswith(FOR_COORDINATOR):
            sent = dict(scope.get("headers", ())).get(CONTROL_HEADER.encode(), b"")
            return bool(self.key) and hmac.compare_digest(sent, self.key.encode())
        client = scope.get("client")
        return client is not None and ipaddress.ip_address(client[0]).is_loopback


# ---- long polling -----------------------------------------------------------------------------------------------

PULL_PATH = "/v1/fleet/pull-messages"
PUSH_PATHS = frozenset({"/v1/runtime/push-messages", "/v1/runtime/push-object"})
PATIENCE = 20.0
"""Less than the 30 seconds after which a node's call times out."""
MOST_BYTES = 1 << 16
GLANCE = 0.5
SETTLED = 0.1
LONGEST = 5.0


@dataclass(slots=True)
class LongPolling:
    """Long polling for Flower nodes (ASGI middleware): hold each pull request until a message is available or
    `patience` seconds have passed.

    Messages are pushed piece by piece, and a node that pulls an incomplete one waits for seconds. So pull requests are
    held while pieces arrive. `open_pushes` counts push calls in progress, `last_push` is when the last of them ended.
    """

    app: App
    patience: float = PATIENCE
    is_stopping: Callable[[], bool] = lambda: False
    open_pushes: int = 0
    last_push: float = 0.0
    pushed: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Pass a call on; after a push, wake held pull requests."""
        path = scope.get("path")
        if path == PULL_PATH:
            await self._pull(scope, receive, send)
        elif path in PUSH_PATHS:
            self.open_pushes += 1
            try:
                await self.app(scope, receive, send)
            finally:
                self.open_pushes, self.last_push = self.open_pushes - 1, time.monotonic()
                self.pushed.set()
                self.pushed = asyncio.Event()
        else:
            await self.app(scope, receive, send)

    async def _pull(self, scope: Scope, receive: Any, send: Any) -> None:
        """Repeat the pull until it gives a message or an error, the node disconnects, or time is up."""
        body, until = await _body(receive), time.monotonic() + self.patience
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            while True:
                await self._wait_until_settled()
                bell, answer = self.pushed, BufferedResponse()
                scope_of_look = {**scope, "state": dict(scope.get("state") or {})}  # frameworks store values in it
                await self.app(scope_of_look, ReplayedRequest(body, gone), answer)
                if not answer.is_empty or not await self._wait_for_push(bell, gone, until):
                    break
            for message in answer.messages:
                await send(message)
        finally:
            gone.cancel()

    async def _wait_until_settled(self) -> None:
        until = time.monotonic() + LONGEST
        while (self.open_pushes or time.monotonic() - self.last_push < SETTLED) and time.monotonic() < until:
            await asyncio.sleep(SETTLED / 2)

    async def _wait_for_push(self, bell: asyncio.Event, gone: asyncio.Future[None], until: float) -> bool:
        """Wait for a push. Returns whether one came in time and the node is still connected."""
        while not (bell.is_set() or gone.done() or self.is_stopping() or time.monotonic() >= until):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(bell.wait(), min(GLANCE, max(0.0, until - time.monotonic())))
        return bell.is_set() and not gone.done()


@dataclass(slots=True)
class BufferedResponse:
    """Buffers the app's response (an ASGI send)."""

    messages: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, message: dict[str, Any]) -> None:
        self.messages.append(message)

    @property
    def is_empty(self) -> bool:
        """Whether the response is a success without content."""
        is_good = any(one.get("status") == 200 for one in self.messages)
        return is_good and not any(one.get("body") for one in self.messages)


@dataclass(slots=True)
class ReplayedRequest:
    """Replays a request body (an ASGI receive)."""

    body: bytes
    gone: asyncio.Future[None]
    is_read: bool = False

    async def __call__(self) -> dict[str, Any]:
        if not self.is_read:
            self.is_read = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(self.gone)
        return {"type": "http.disconnect"}


async def _body(receive: Any) -> bytes:
    """Read the body of a pull request. A longer body is cut off, and then refused by the app."""
    body, more = b"", True
    while more and len(body) <= MOST_BYTES:
        message = await receive()
        body += message.get("body", b"")
        more = message["type"] == "http.request" and message.get("more_body", False)
    return body


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# ---- purge ------------------------------------------------------------------------------------------------------

PURGE_SECONDS = 10.0
"""Seconds."""
OVERWRITES = (("secure_delete", "ON"),)
"""PRAGMAs of every database connection: overwrite deleted data."""
MESSAGE_TABLES = ("object_children", "run_objects", "objects", "message_res", "message_ins")
"""Flower's tables of messages."""


@contextlib.contextmanager
def purge_messages(database: Path, every: float = PURGE_SECONDS) -> Iterator[None]:
    """Remove delivered messages from the files of Flower's database within seconds.

    Flower deletes them once delivered. Here they are also overwritten, and the write-ahead log is emptied regularly.
    Messages that were never fetched are deleted when the server ends or restarts: no Flower run outlives it.
    """
    from flwr.supercore import sql_mixin

    sql_mixin.SQLITE_PRAGMAS = tuple({**dict(sql_mixin.SQLITE_PRAGMAS), **dict(OVERWRITES)}.items())
    purge_database(database, entirely=True)
    is_over = threading.Event()

    def keep_purging() -> None:
        while not is_over.wait(every):
            purge_database(database)

    thread = threading.Thread(target=keep_purging, daemon=True, name="purge")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        purge_database(database, entirely=True)


def purge_database(database: Path, *, entirely: bool = False) -> None:
    """Empty the write-ahead log, unless the database is busy. `entirely`: first delete all messages and rewrite the
    database without gaps.
    """
    if not database.exists():
        return
    try:
        with contextlib.closing(sqlite3.connect(database, timeout=5.0 if entirely else 0.2)) as own:
            for name, value in OVERWRITES:
                own.execute(f"PRAGMA {name} = {value}")
            if entirely:
                known = {row[0] for row in own.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
                for table in (name for name in MESSAGE_TABLES if name in known):
                    own.execute(f"DELETE FROM {table}")
                own.commit()
                own.execute("VACUUM")
            own.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error as error:
        if entirely:
            sys.stderr.write(f"Messages of finished runs may be left in {database}: {error}.\n")


# ---- listening --------------------------------------------------------------------------------------------------

ANY_ADDRESS = "0.0.0.0"
NOT_LOCAL = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def open_sockets(host: str, port: int) -> list[socket.socket]:
    """Open sockets for a host, and for 127.0.0.1 unless included; FileError if one cannot be opened.

    Of a host name with several addresses, those of this machine are used. `::` listens on all addresses, IPv4 included.
    """
    ways = f"Use an address of this machine, or all: partsong federation serve --host {ANY_ADDRESS}"
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise FileError(f"This machine cannot resolve {host[:100]!r} ({error}). {ways}") from error
    where = list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))
    asked = {address for _, address in where}
    if not {LOOPBACK, ANY_ADDRESS} & asked:
        where.append((socket.AF_INET, ANY_ADDRESS if "::" in asked else LOOPBACK))
    sockets: list[socket.socket] = []
    with contextlib.ExitStack() as opened:
        for family, address in where:
            try:
                sockets.append(opened.enter_context(socket.create_server((address, port), family=family)))
            except OSError as error:
                if error.errno not in NOT_LOCAL:
                    raise FileError(
                        f"Port {port} of {address} cannot be opened: {error.strerror or error}. End the process that "
                        "listens there."
                    ) from error
        if not any(one.getsockname()[0] in asked for one in sockets):
            raise FileError(f"{host} is not an address of this machine. {ways}")
        opened.pop_all()
    return sockets
