"""The server process: Flower's SuperLink with long polling, message purging and supervised restarts.

A bell at the server: Flower's nodes look for requests every three seconds, and here a look lasts until there is one.

A look that has found nothing is not answered but made again, for the same node, when the server has handed something
over; after `PATIENCE` seconds it is answered as it is. Messages are handed over piece by piece, and who finds one that
is not whole waits for seconds: so nobody looks before all pieces are there.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import math
import os
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partsong.errors import CompositionError
from partsong.federation.flower.control import HEADER, ServerError, require_flower
from partsong.federation.flower.environment import HERE, bound, hosts_of, run_on, set_quiet
from partsong.federation.locks import held
from partsong.federation.server.launch import FEDERATION
from partsong.federation.setup.credentials import require_address
from partsong.federation.setup.server_folder import ServerFolder

# ---- doorbell ---------------------------------------------------------------------------------------------------

LOOK = "/v1/fleet/pull-messages"
HANDED_OVER = frozenset({"/v1/runtime/push-messages", "/v1/runtime/push-object"})
PATIENCE = 20.0
"""Less than the 30 seconds after which a node's call breaks off."""
MOST_BYTES = 1 << 16
GLANCE = 0.5
SETTLED = 0.1
LONGEST = 5.0

Scope = dict[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]


@dataclass(slots=True)
class Doorbell:
    """An ASGI middleware; `rings` counts what was handed over, `open` what is being handed over."""

    app: App
    patience: float = PATIENCE
    rings: int = 0
    open: int = 0
    last: float = -math.inf
    waiting: set[asyncio.Event] = field(default_factory=set)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Pass on; ring after what nodes may be waiting for."""
        path = scope.get("path") if scope["type"] == "http" else None
        if path == LOOK:
            await self._look(scope, receive, send)
            return
        if path not in HANDED_OVER:
            await self.app(scope, receive, send)
            return
        self.open += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.open -= 1
            self.rings, self.last = self.rings + 1, time.monotonic()
            for one in self.waiting:
                one.set()

    async def _look(self, scope: Scope, receive: Any, send: Any) -> None:
        """Until something is found, somebody refuses, the node has gone, or time is up."""
        body = await _whole(receive)
        until = time.monotonic() + self.patience
        gone = asyncio.ensure_future(_gone(receive))
        try:
            while True:
                await self._whole_messages()
                before, answer = self.rings, Answer()
                await self.app(_copied(scope), Replayed(body, gone), answer)
                if self.rings == before and answer.is_empty:
                    await self._rung(gone, until)
                if not answer.is_empty or time.monotonic() >= until or gone.done() or is_ending():
                    break
            for message in answer.messages:
                await send(message)
        finally:
            gone.cancel()

    async def _whole_messages(self) -> None:
        until = time.monotonic() + LONGEST
        while (self.open or time.monotonic() - self.last < SETTLED) and time.monotonic() < until:
            await asyncio.sleep(SETTLED / 2)

    async def _rung(self, gone: asyncio.Future[None], until: float) -> None:
        bell = asyncio.Event()
        ringing = asyncio.ensure_future(bell.wait())
        self.waiting.add(bell)
        try:
            while time.monotonic() < until and not is_ending():
                left = min(GLANCE, max(0.0, until - time.monotonic()))
                done, _ = await asyncio.wait((ringing, gone), timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    return
        finally:
            self.waiting.discard(bell)
            ringing.cancel()


@dataclass(slots=True)
class Answer:
    """What the app has sent, kept back."""

    messages: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, message: dict[str, Any]) -> None:
        """As ASGI's send."""
        self.messages.append(message)

    @property
    def is_empty(self) -> bool:
        """A good answer with nothing in it."""
        is_good = any(one.get("status") == 200 for one in self.messages)
        return is_good and not any(one.get("body") for one in self.messages)


@dataclass(slots=True)
class Replayed:
    """A request that is read once more."""

    body: bytes
    gone: asyncio.Future[None]
    is_read: bool = False

    async def __call__(self) -> dict[str, Any]:
        """As ASGI's receive."""
        if not self.is_read:
            self.is_read = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(self.gone)
        return {"type": "http.disconnect"}


def is_ending() -> bool:
    """Whether this process was told to stop: its web server waits for open calls."""
    server = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return bool(getattr(server, "should_exit", False))


async def _whole(receive: Any) -> bytes:
    """The body of a request; what is longer than a look can be is cut off, and then refused by the app."""
    body, more = b"", True
    while more and len(body) <= MOST_BYTES:
        message = await receive()
        body += message.get("body", b"")
        more = message["type"] == "http.request" and message.get("more_body", False)
    return body


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _copied(scope: Scope) -> Scope:
    """Frameworks keep things in a scope; each look has its own."""
    return {**scope, "state": dict(scope.get("state") or {})}


# ---- leftovers --------------------------------------------------------------------------------------------------
#
# What Flower's server leaves of messages in its files: nothing that was delivered more than some seconds ago.
#
# Flower keeps messages in SQLite, and takes them out once they are delivered. SQLite leaves the bytes of what is taken
# out where they were, and a copy in the write-ahead log. So they are overwritten when they are taken out, and the log
# is
# emptied every few seconds. What was never fetched goes when the server ends, or is started again after it was killed:
# no
# run of Flower's outlives it.

EVERY = 10.0
"""Seconds."""
OVERWRITES = (("secure_delete", "ON"),)
"""What every connection to the database is told first."""
MESSAGES = ("object_children", "run_objects", "objects", "message_res", "message_ins")
"""Flower's tables of them."""


@contextlib.contextmanager
def swept(database: Path, every: float = EVERY) -> Iterator[None]:
    """While the server runs, and around that."""
    overwrite_deleted()
    sweep(database, entirely=True)
    is_over = threading.Event()

    def keep_sweeping() -> None:
        while not is_over.wait(every):
            sweep(database)

    thread = threading.Thread(target=keep_sweeping, daemon=True, name="leftovers")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        sweep(database, entirely=True)


def overwrite_deleted() -> None:
    """From now on Flower's connections overwrite what they take out."""
    from flwr.supercore import sql_mixin

    sql_mixin.SQLITE_PRAGMAS = tuple(dict((*sql_mixin.SQLITE_PRAGMAS, *OVERWRITES)).items())


def sweep(database: Path, *, entirely: bool = False) -> None:
    """Empty the log, if nobody is in the middle of something. `entirely`: take out all messages before, and write the
    database anew, without gaps.
    """
    log = Path(f"{database}-wal")
    if not database.exists() or not (entirely or (log.exists() and log.stat().st_size)):
        return
    try:
        with contextlib.closing(sqlite3.connect(database, timeout=5.0 if entirely else 0.2)) as own:
            for name, value in OVERWRITES:
                own.execute(f"PRAGMA {name} = {value}")
            if entirely:
                known = {row[0] for row in own.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
                for table in (name for name in MESSAGES if name in known):
                    own.execute(f"DELETE FROM {table}")
                own.commit()
                own.execute("VACUUM")
            own.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error as error:
        if entirely:
            sys.stderr.write(f"Messages of runs that are over may be left in {database}: {error}.\n")


# ---- lifelines --------------------------------------------------------------------------------------------------
#
# Who ends with whom at the server: nobody outlives it, and what starts its apps is started again, some times.
#
# Flower asks the server's app to end when its parent has gone, by a signal that an app does not hear while it waits for
# a
# reply; and a server whose executor has died takes up no run any more, without a word.

SERVER = "PARTSONG_SERVER_PROCESS"
"""The variable in which `serve` tells its children its number."""
RESTART_GLANCE = 1.0
DEATHS = 6
LIFE = 60.0
"""An executor that has lived for so many seconds dies for another reason than the one before it."""


@dataclass(slots=True)
class Executor:
    """How often in a row it has died young, and whether it was given up."""

    deaths: int = 0
    has_failed: bool = False

    @property
    def told(self) -> str:
        """For people."""
        return (
            f"What starts runs here has died {self.deaths} times in a row, each time within {LIFE:.0f} seconds: the "
            "server has ended. What it has said is above; all runs can be resumed."
        )

    def died(self, seconds: float) -> float:
        """After a life of so many seconds; how long to wait before the next: 1, 2, 4, … of them."""
        self.deaths = 1 if seconds >= LIFE else self.deaths + 1
        self.has_failed = self.deaths > DEATHS
        return float(RESTART_GLANCE * 2 ** (self.deaths - 1))


def end_with_the_server() -> None:
    """From now on this process ends when the server has gone. It can be ended at any point, as by a power cut."""
    number = os.environ.get(SERVER, "")
    if not number.isdigit() or os.name == "nt":
        return

    def watch() -> None:
        while is_there(int(number)):
            time.sleep(RESTART_GLANCE)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="lifeline").start()


def is_there(process: int) -> bool:
    """Whether a process with this number lives."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def keep_executor() -> Executor:
    """From now on the executor of the server in this process is started again when it has died; one that dies at once,
    whenever it is started, ends the server.
    """
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan

    try:
        start = SuperLinkLifespan._start_superexec_if_needed
    except AttributeError as error:
        raise CompositionError(
            "Flower's server is not the one that this was written for. Install flwr 1.41."
        ) from error

    seen = Executor()

    def started(lifespan: Any) -> None:
        start(lifespan)
        threading.Thread(target=keep, args=(lifespan, start, seen), daemon=True, name="executor").start()

    SuperLinkLifespan._start_superexec_if_needed = started
    return seen


def keep(lifespan: Any, start: Any, seen: Executor) -> None:
    """Until the server ends, or the executor is given up."""
    while (process := lifespan.superexec_process) is not None:
        began = time.monotonic()
        process.wait()
        pause = seen.died(time.monotonic() - began)
        time.sleep(RESTART_GLANCE if seen.has_failed else pause)
        if is_ending() or lifespan.superexec_process is not process:
            seen.has_failed = False
            return
        if seen.has_failed:
            end_server()
            return
        sys.stderr.write("What starts runs here has died; it is started again.\n")
        sys.stderr.flush()
        start(lifespan)


def end_server() -> None:
    """As its web server ends when it is told to, in order."""
    server = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    if server is not None:
        server.should_exit = True


# ---- superlink --------------------------------------------------------------------------------------------------
#
# The server's process: Flower's SuperLink with TLS and known nodes, behind a gate.
#
# Flower lets everybody who reaches its port start runs, with code of their own, and take up work that is meant for the
# server itself. Behind the gate sites can do what nodes do; starting and stopping needs a key that is in the
# federation's folder, and the server's own work is for processes of its own machine.

FOR_NODES = ("/v1/fleet/", "/health")
FOR_COORDINATOR = "/v1/control/"


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
