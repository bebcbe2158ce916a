"""The coordinator's hand on a running server: admit nodes, start runs, see how they really are, stop them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

from partsong import errors
from partsong.core.interfaces import Round
from partsong.errors import FileError, MissingExtra, PartsongError, PartyError
from partsong.federation.flower.environment import HERE, set_quiet
from partsong.federation.locks import holder_of, is_held
from partsong.federation.server.state import AsyncRunState, RunState
from partsong.federation.server.words import STEPS
from partsong.federation.setup.credentials import require_address, write
from partsong.federation.setup.run_place import RunPlace, number_in, result_in
from partsong.federation.setup.server_folder import ServerFolder
from partsong.federation.transports.base import Heard, Lost, Transport, all_replies

# ---- control ----------------------------------------------------------------------------------------------------

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

    names = files("partsong.federation.flower") / "app" / "pyproject.toml"
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


# ---- progress file ----------------------------------------------------------------------------------------------
#
# progress.jsonl: a line for each exchange of a run, in order, for people and for `status`; the record is elsewhere.
#
# The line is written after the record. A process that is killed between the two leaves an exchange without a line, or
# with a part of one: whoever goes on with the run first puts that right.

UNTOLD = "its process has ended before it could tell of this exchange: bytes and seconds are not known"


@dataclass(frozen=True, slots=True)
class ProgressFile:
    """That file; `rounds` is how many exchanges there will be."""

    path: Path
    rounds: int

    def note(self, done: Round) -> dict[str, Any]:
        """The line of an exchange."""
        figures = {
            "participants": list(done.participants),
            "refused": dict(done.refused),
            "bytes_up": dict(done.bytes_up),
            "bytes_down": int(done.bytes_down),
            "seconds": round(done.seconds, 3),
            "metrics": {name: float(value) for name, value in done.metrics.items()},
        }
        number = done.index + 1
        return self._append({"round": number, "rounds": max(self.rounds, number), **figures})

    def catch_up(self, record: RunState | None) -> None:
        """Take away a line without its end, and add the one of the last exchange where it is missing."""
        content = self.path.read_bytes() if self.path.exists() else b""
        size = whole_lines(content)
        if size < len(content):
            with self.path.open("r+b") as file:
                file.truncate(size)
        if record is None or record.index == 0:
            return
        lines = content[:size].splitlines()
        if not lines or json.loads(lines[-1])["round"] < record.index:
            unknown = {"refused": {}, "bytes_up": {}, "bytes_down": 0, "seconds": 0.0, "metrics": {}, "note": UNTOLD}
            number, heard = record.index, _last_heard(record)
            self._append({"round": number, "rounds": max(self.rounds, number), "participants": heard, **unknown})

    def _append(self, told: dict[str, Any]) -> dict[str, Any]:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")
        return told


@dataclass(slots=True)
class Lines:
    """Lines of a file that grows, each told once."""

    path: Path
    at: int = 0

    @staticmethod
    def to_come(path: Path) -> Lines:
        """Without those that are there; a part of a line is none."""
        return Lines(path, whole_lines(path.read_bytes()) if path.exists() else 0)

    def new(self) -> Iterator[dict[str, Any]]:
        """Those that are whole and were not told yet."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.at)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.at += len(line)
                yield json.loads(line)


def whole_lines(content: bytes) -> int:
    """Bytes up to the end of the last line that has one."""
    return content.rfind(b"\n") + 1


def _last_heard(record: RunState) -> list[str]:
    """Who was in the last exchange: one site where nobody waits for others, and nobody where its work was refused."""
    if isinstance(record, AsyncRunState):
        return [] if record.index - 1 in record.faults else [record.order[-1]]
    return sorted(record.cohort or ())


# ---- waiting ----------------------------------------------------------------------------------------------------
#
# For whom a run waits: a line when the first requests are out, later after some seconds, and then ever more seldom.
#
#     waiting.jsonl    {"waiting": names, "answered": how many of those who were asked together, "of": how many they
# are}
#
# Where nobody waits for others, there is no number of answers.

FILE = "waiting.jsonl"
FIRST, SELDOM = 5.0, 120.0
"""Seconds before the first line, and the longest between two; each pause is twice the one before."""

Tell = Callable[[Mapping[str, Any]], None]


@dataclass(slots=True)
class WaitingLines:
    """That file."""

    path: Path

    def note(self, told: Mapping[str, Any]) -> None:
        """One more line, in the place of a part of one that a process has left which was killed."""
        content = self.path.read_bytes() if self.path.exists() else b""
        with self.path.open("r+b" if content else "wb") as file:
            file.seek(whole_lines(content))
            file.truncate()
            file.write(json.dumps(told).encode() + b"\n")


@dataclass(slots=True)
class Telling:
    """A transport that tells for whom it waits. `before`: called before anything is sent; `pause`: until the next line
    but one, 0 before the first request.
    """

    transport: Transport
    tell: Tell
    before: Callable[[], None] = lambda: None
    first: float = FIRST
    out: set[str] = field(default_factory=set)
    together: int = 0
    due: float = 0.0
    pause: float = 0.0

    def names(self) -> tuple[str, ...]:
        """Those of the transport."""
        return self.transport.names()

    def ask(self, requests: Mapping[str, bytes], timeout: float) -> Mapping[str, bytes | Lost]:
        """As the transport does."""
        self.together = len(requests)
        try:
            return all_replies(self, requests, timeout)
        finally:
            self.together = 0

    def push(self, requests: Mapping[str, bytes], timeout: float) -> None:
        """Hand requests over."""
        self.before()
        self.transport.push(requests, timeout)
        if requests:
            self.out |= requests.keys()
            is_first = self.pause == 0
            self.due = time.monotonic() + (0.0 if is_first else self.first)
            self.pause = self.first if is_first else 2 * self.first

    def arrived(self, timeout: float) -> Heard | None:
        """The next reply; whom it waits for is told meanwhile."""
        until = time.monotonic() + timeout
        while True:
            end = min(until, self.due) if self.out else until
            heard = self.transport.arrived(max(0.0, end - time.monotonic()))
            if heard is not None:
                self.out.discard(heard[0])
                return heard
            now = time.monotonic()
            if now >= until or now < end:
                return None
            self.due, self.pause = now + self.pause, min(2 * self.pause, SELDOM)
            answered = {"answered": self.together - len(self.out), "of": self.together} if self.together else {}
            self.tell({"waiting": sorted(self.out), **answered})

    def recall(self) -> Mapping[str, Lost]:
        """As the transport does."""
        self.out.clear()
        return self.transport.recall()


# ---- following --------------------------------------------------------------------------------------------------
#
# A run from the coordinator's side: started, followed by its own files and Flower's real status, started anew.

STARTS = 3
POLL = 2.0
GRACE = 15.0
STOPPED = "stopped"
"""What Flower says of a run that somebody has stopped."""


@dataclass(frozen=True, slots=True)
class News:
    """What comes of a run from now on: lines of its steps, its exchanges and of whom it waits for, and a result, which
    is known by its file. One that is there already is not this one: it stays until there is another, or, where it
    tells of a failure, until the run is started again.
    """

    place: RunPlace
    files: tuple[Lines, ...]
    before: tuple[int, int] | None

    @staticmethod
    def from_now(place: RunPlace) -> News:
        """Without what is there."""
        paths = (place.state / "words" / STEPS, place.progress, place.state / FILE)
        return News(place, tuple(Lines.to_come(path) for path in paths), _identity(place.result))

    @property
    def is_over(self) -> bool:
        """Whether there is a result."""
        return _identity(self.place.result) not in (None, self.before)

    def forget_failure(self) -> None:
        """Once the run is started again: how it has failed before is no news of it. What is done stays done, and a
        result that has come meanwhile stays too.
        """
        result, aside = self.place.result, self.place.result.with_name(f".{self.place.result.name}.before")
        try:
            if self.before is None or result_in(self.place)["status"] != "failed":
                return
            result.replace(aside)
        except FileNotFoundError:
            return
        if _identity(aside) == self.before:
            aside.unlink()
        else:
            aside.replace(result)

    def lines(self) -> Iterator[Mapping[str, Any]]:
        """Those that have come."""
        for file in self.files:
            yield from file.new()


def run_to_end(server: ServerFolder, place: RunPlace, tell: Tell) -> dict[str, Any]:
    """Start it, follow it, and give back how it ended; one that ends without a word is started again, and goes on.

    One that is being worked on is followed, and not started a second time. That it is started is told before its
    process is up, which takes seconds, and once: {"starting": its name}.
    """
    told, is_told = News.from_now(place), False
    with controlling(server) as control:
        status = Status("unknown")
        for _ in range(STARTS):
            number = _at_work(control, place)
            if number is None:
                if not is_told:
                    tell({"starting": place.name})
                is_told, number = True, _started(control, told)
            try:
                status = _watched(control, number, told, tell)
            except KeyboardInterrupt:
                control.stop(number)
                end_work(place)
                raise
            if told.is_over:
                return _result(place)
            if status.sub_status == STOPPED:
                end_work(place)
                raise ServerError(f"Run {place.name!r} was stopped. Nothing is lost: --resume goes on with it.")
        raise ServerError(
            f"Run {place.name!r} has ended {STARTS} times without a word ({status.details or 'no details'}). Look at "
            "the server's log; it can be resumed."
        )


def end_work(place: RunPlace) -> None:
    """End the process that works on a run. A run that Flower has stopped is not told so, and would wait for sites."""
    for how, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
        holder, until = holder_of(place.lock), time.monotonic() + patience
        if holder is None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.kill(holder, how)
        while is_held(place.lock) and time.monotonic() < until:
            time.sleep(0.1)
    if is_held(place.lock):
        raise FileError(f"Run {place.name!r} is still worked on, by a process that cannot be ended from here.")


def _at_work(control: Control, place: RunPlace) -> int | None:
    """Flower's number of a run that a process is at work on; what is left of one that is over is ended."""
    number = number_in(place) if is_held(place.lock) else None
    if number is None:
        return None
    if not control.status(number).is_over:
        return number
    end_work(place)
    return None


def _started(control: Control, told: News) -> int:
    """Flower's number of the run, a new one."""
    place = told.place
    number = control.start(place.name)
    write(place.number, str(number))
    told.forget_failure()
    return number


def _watched(control: Control, number: int, told: News, tell: Tell) -> Status:
    """Until it is over; what Flower says of it. A process that has died is not waited for."""
    was_seen, gone, ended = False, 0.0, 0.0
    while True:
        for line in told.lines():
            tell(line)
        status = control.status(number)
        if status.is_over:
            break
        is_there = is_held(told.place.lock)
        was_seen = was_seen or is_there
        if told.is_over:
            ended = ended or time.monotonic()
        elif was_seen and not is_there:
            gone = gone or time.monotonic()
        if (gone and time.monotonic() - gone > GRACE / 3) or (ended and time.monotonic() - ended > GRACE):
            control.stop(number)
            break
        time.sleep(POLL)
    for line in told.lines():
        tell(line)
    return status


def _identity(path: Path) -> tuple[int, int] | None:
    """Of a file that is never changed but replaced; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _result(place: RunPlace) -> dict[str, Any]:
    """The result; or the error that the run ended with, of its own class."""
    found = result_in(place)
    if found["status"] == "done":
        return found
    kind = vars(errors).get(found["type"])
    is_ours = isinstance(kind, type) and issubclass(kind, PartsongError)
    error = kind(found["error"]) if is_ours and kind is not None else PartyError(f"{found['type']}: {found['error']}")
    for note in found["notes"]:
        error.add_note(note)
    raise error
