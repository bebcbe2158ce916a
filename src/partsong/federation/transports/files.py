"""Folders as a transport, for places without a network path: requests are dropped, replies are picked up.

    FOLDER/PARTY/in/ID.request      FOLDER/PARTY/out/ID.reply        each: a signed message (`signing.Way`)

A file that is truncated, foreign or repeated is not used, and the server waits on. An ID begins with the mark of its
run, and goes on with the hash of the request: a server that was killed and asks again finds the reply to the same
request, and several runs may use one folder at the same time. Files are signed, not encrypted: whoever carries them can
read them, unless the folder or the carrier encrypts.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from partsong.errors import FileError, FormatError, PartsongError
from partsong.federation.signing import Envelope, Sign, Verify, request_digest
from partsong.federation.transports.base import MAX_MESSAGE_BYTES, NoReply, SiteReply, Transport, ask_all, require_name

if TYPE_CHECKING:
    from partsong.federation.setup.server_folder import RunPlace, ServerFolder
    from partsong.federation.setup.site_folder import SiteFolder

REQUEST = re.compile(r"([0-9a-f]{32})\.request")
REPLY = re.compile(r"([0-9a-f]{32})\.reply")
POLL = 0.5
NO_REPLY_FILE = "no reply file in time"


def request_transport(drop: Path, server: ServerFolder, place: RunPlace) -> Transport:
    """The server's side, for the process that works on a run: if Flower gave it a number, it is Flower's no more."""
    place.number.unlink(missing_ok=True)
    return server.over_files(drop, place.name)


def answer_requests(drop: Path, site: SiteFolder, tell: Callable[[str], None]) -> None:
    """A site's side, until it is told to stop; tells a word on each file."""
    party = site.answering()
    mailbox = SiteMailbox(drop, party.name, party.sign, party.coordinator)
    inbox = drop / site.site / "in"
    if not inbox.is_dir():
        missing = inbox if drop.is_dir() else drop
        tell(f"Waiting for requests in {inbox}; {missing} does not exist yet. Check the path if a run has begun.")
    with site.serving():
        for word in mailbox.serve(party.answer, math.inf, POLL):
            tell(word)


@dataclass(slots=True)
class PendingFile:
    """A request that lies in a party's folder: its ID, its file, when it was dropped, and why there is no reply yet."""

    key: str
    signed: bytes = field(repr=False)
    written_at: float
    reason: str = NO_REPLY_FILE


@dataclass(frozen=True, slots=True)
class FolderTransport:
    """The server's side: one folder for each party; `known` has the key of each, pinned beforehand. `others`: names of
    the other runs that are being worked on now, over this folder or elsewhere.
    """

    folder: Path
    sign: Sign = field(repr=False)
    verifiers: Mapping[str, Verify] = field(repr=False)
    poll: float = 0.05
    max_bytes: int = MAX_MESSAGE_BYTES
    retry_after: float = 60.0
    run: str = ""
    other_runs: Callable[[], Collection[str]] = tuple
    pending: dict[str, PendingFile] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in self.verifiers:
            require_name(name, "A site")

    def names(self) -> tuple[str, ...]:
        """All whose keys are pinned."""
        return tuple(sorted(self.verifiers))

    def ask(self, requests: Mapping[str, bytes], timeout: float) -> dict[str, bytes | NoReply]:
        """Drop all requests, then wait for the replies; what was not answered in time is taken back."""
        return ask_all(self, requests, timeout)

    def push(self, requests: Mapping[str, bytes], timeout: float) -> None:
        """Drop requests; whatever else lies in these parties' folders is taken back, unless it is of another run that
        is being worked on. A party whose folder takes none is one that does not answer.
        """
        marks = tuple(_run_prefix(run) for run in self.other_runs())
        for name, request in requests.items():
            key = _run_prefix(self.run) + _request_suffix(request)
            out = PendingFile(key, Envelope("request", name).sign(self.sign, request), time.monotonic())
            _remove_stale(self.folder / name / "in", REQUEST, (key, *marks))
            _remove_stale(self.folder / name / "out", REPLY, (key, *marks))
            try:
                _write_message(self.folder / name / "in" / f"{key}.request", out.signed)
            except FileError as error:
                out.reason = str(error)
            self.pending.pop(name, None)
            self.pending[name] = out

    def next_reply(self, timeout: float) -> SiteReply | None:
        """Look until there is a reply; who waits longest is looked at first. A request that is gone, without a reply
        that can be used, is dropped again after a while.
        """
        until = time.monotonic() + timeout
        while True:
            for name, out in self.pending.items():
                found = self._read_reply(name, out)
                if not isinstance(found, NoReply):
                    self._withdraw(name)
                    return name, found
                out.reason = out.reason if found.reason == NO_REPLY_FILE else found.reason
                self._write_again(name, out)
            left = until - time.monotonic()
            if left <= 0 or not self.pending:
                return None
            time.sleep(min(self.poll, left))

    def cancel(self) -> dict[str, NoReply]:
        """Take back all that was not answered."""
        return {name: NoReply(self._withdraw(name).reason) for name in list(self.pending)}

    def _write_again(self, name: str, out: PendingFile) -> None:
        path, now = self.folder / name / "in" / f"{out.key}.request", time.monotonic()
        if now - out.written_at > self.retry_after and not os.path.lexists(path):
            out.written_at = now
            with contextlib.suppress(FileError):
                _write_message(path, out.signed)

    def _withdraw(self, name: str) -> PendingFile:
        out = self.pending.pop(name)
        for path in (f"in/{out.key}.request", f"out/{out.key}.reply"):
            _remove(self.folder / name / path)
        return out

    def _read_reply(self, name: str, out: PendingFile) -> bytes | NoReply:
        path = self.folder / name / "out" / f"{out.key}.reply"
        try:
            return Envelope("reply", name, request_digest(out.signed)).verify(
                self.verifiers[name], _read(path, self.max_bytes)
            )
        except FileError as error:
            return NoReply(NO_REPLY_FILE if isinstance(error.__cause__, FileNotFoundError) else f"{path.name}: {error}")


@dataclass(frozen=True, slots=True)
class SiteMailbox:
    """A site's side; `server` is the server's key, pinned beforehand. `left` has files that it was done with and could
    not take away, and when they were made: they are not looked at again.
    """

    folder: Path
    name: str
    sign: Sign = field(repr=False)
    server: Verify = field(repr=False)
    max_bytes: int = MAX_MESSAGE_BYTES
    finished: dict[str, int] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_name(self.name, "A site")

    def serve(self, answer: Callable[[bytes], bytes], seconds: float, poll: float = 0.05) -> Iterator[str]:
        """Answer what comes for so long; yields a word on each file: answered, or why it was not used."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            yield from self.answer_all(answer)
            time.sleep(min(poll, max(0.0, until - time.monotonic())))

    def answer_all(self, answer: Callable[[bytes], bytes]) -> Iterator[str]:
        """Answer all that is there. The reply is in its place before the request goes: who is killed in between is
        asked once more.
        """
        for path, key in self._requests():
            try:
                self._answer(path, key, answer)
                word = f"{key}: answered"
            except PartsongError as error:
                word = f"{key}: not answered. {error}"
            _remove(path)
            self.finished.pop(path.name, None)
            if os.path.lexists(path):
                self.finished[path.name] = _modified_at(path)
            yield word

    def _answer(self, path: Path, key: str, answer: Callable[[bytes], bytes]) -> None:
        data = _read(path, self.max_bytes)
        request = Envelope("request", self.name).verify(self.server, data)
        if not key.endswith(_request_suffix(request)):
            raise FormatError("It is the copy of another request, and was not used.")
        reply = Envelope("reply", self.name, request_digest(data)).sign(self.sign, answer(request))
        _write_message(self.folder / self.name / "out" / f"{key}.reply", reply)

    def _requests(self) -> Iterator[tuple[Path, str]]:
        """Files by the name of a request, and their IDs."""
        try:
            paths = sorted((self.folder / self.name / "in").iterdir())
        except OSError:
            return
        for path in paths:
            found = REQUEST.fullmatch(path.name)
            if found is not None and (path.name not in self.finished or self.finished[path.name] != _modified_at(path)):
                yield path, found[1]


def _write_message(path: Path, data: bytes) -> None:
    """Write a file so that it is whole when its name appears; FileError where its folder is a link, or cannot be
    written to: somebody else may have made it.
    """
    draft = f".{secrets.token_hex(8)}.draft"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with open(os.open(draft, flags, 0o666, dir_fd=folder), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(draft, dir_fd=folder)
            os.close(folder)
    except OSError as error:
        raise FileError(
            f"{path} cannot be written: {error.strerror or error}. Its folder has to be one that both sides can write "
            "to, and no link, on a disk with space."
        ) from error


def _read(path: Path, max_bytes: int) -> bytes:
    """A file's bytes; whatever else has its name (a link, a pipe, a folder) is not read, and not waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            found = os.fstat(descriptor)
            if stat.S_ISREG(found.st_mode) and found.st_size <= max_bytes:
                with open(descriptor, "rb", closefd=False) as file:
                    return file.read(max_bytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise FileError(f"{path.name} cannot be read: {error.strerror or error}.") from error
    raise FormatError(f"{path.name} is no file, or longer than the {max_bytes} bytes that are taken; it was not read.")


def _remove_stale(folder: Path, pattern: re.Pattern[str], keep: tuple[str, ...]) -> None:
    """Take away what was left by a server that was killed; files whose IDs begin in one of these ways stay."""
    with contextlib.suppress(OSError):
        for path in () if folder.is_symlink() else list(folder.iterdir()):
            found = pattern.fullmatch(path.name)
            if found is not None and not found[1].startswith(keep):
                _remove(path)


def _remove(path: Path) -> None:
    """Remove a file, a link or an empty folder, if that can be done."""
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(path.lstat().st_mode):
            path.rmdir()
        else:
            path.unlink()


def _modified_at(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0


def _run_prefix(run: str) -> str:
    """How IDs of a run begin."""
    return hashlib.sha256(run.encode()).hexdigest()[:8]


def _request_suffix(request: bytes) -> str:
    """How the ID of a request ends."""
    return hashlib.sha256(request).hexdigest()[:24]
