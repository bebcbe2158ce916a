"""File transport for sites without a network path: requests and replies are files in an exchange folder.

    FOLDER/PARTY/in/ID.request      FOLDER/PARTY/out/ID.reply        each: a signed message (`signing.Envelope`)

A truncated, foreign or replayed file is ignored, and the server keeps waiting. An ID is a prefix for its run followed
by the hash of the request. So a server that was killed finds the reply to the same request when it asks again, and
several runs can share one folder. Files are signed, not encrypted: anyone who can access the folder can read them,
unless the folder or the carrier encrypts.
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


def request_transport(folder: Path, server: ServerFolder, place: RunPlace) -> Transport:
    """Return the server's file transport for a run. Flower's number of the run, if any, is dropped."""
    place.number.unlink(missing_ok=True)
    return server.over_files(folder, place.name)


def answer_requests(folder: Path, site: SiteFolder, report: Callable[[str], None]) -> None:
    """Answer requests of a site until interrupted; report a line for each file."""
    party = site.answering()
    mailbox = SiteMailbox(folder, party.name, party.sign, party.coordinator)
    inbox = folder / site.site / "in"
    if not inbox.is_dir():
        missing = inbox if folder.is_dir() else folder
        report(f"Waiting for requests in {inbox}; {missing} does not exist yet. If a run has started, check the path.")
    with site.serving():
        for line in mailbox.serve(party.answer, math.inf, POLL):
            report(line)


@dataclass(slots=True)
class PendingFile:
    """A request in a party's folder: its ID (`key`), its bytes, when it was written, and why there is no reply yet."""

    key: str
    signed: bytes = field(repr=False)
    written_at: float
    reason: str = NO_REPLY_FILE


@dataclass(frozen=True, slots=True)
class FolderTransport:
    """The server's side: one folder per party. `verifiers` check signatures with the pinned key of each party.

    `other_runs` returns the names of other active runs, in this folder or elsewhere.
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
        """Return the parties whose keys are pinned."""
        return tuple(sorted(self.verifiers))

    def ask(self, requests: Mapping[str, bytes], timeout: float) -> dict[str, bytes | NoReply]:
        """Write all requests, wait for the replies, and withdraw the requests that were not answered in time."""
        return ask_all(self, requests, timeout)

    def push(self, requests: Mapping[str, bytes], timeout: float) -> None:
        """Write requests, and remove stale files of these parties, except those of other active runs.

        A party whose folder cannot be written to counts as one that does not reply.
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
        """Poll for a reply, longest pending first. A request that disappears without a usable reply is written again
        after `retry_after` seconds.
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
        """Withdraw all pending requests."""
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
    """A site's side. `server` verifies signatures with the pinned key of the server.

    `finished` has the modification times of handled files that could not be removed; they are skipped.
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
        """Answer requests for some seconds. Yields a line for each file: answered, or why it was not used."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            yield from self.answer_all(answer)
            time.sleep(min(poll, max(0.0, until - time.monotonic())))

    def answer_all(self, answer: Callable[[bytes], bytes]) -> Iterator[str]:
        """Answer all requests that are there.

        The reply is written before the request is removed: a site that is killed in between answers once more.
        """
        for path, key in self._requests():
            try:
                self._answer(path, key, answer)
                line = f"{key}: answered"
            except PartsongError as error:
                line = f"{key}: not answered. {error}"
            _remove(path)
            self.finished.pop(path.name, None)
            if os.path.lexists(path):
                self.finished[path.name] = _modified_at(path)
            yield line

    def _answer(self, path: Path, key: str, answer: Callable[[bytes], bytes]) -> None:
        data = _read(path, self.max_bytes)
        request = Envelope("request", self.name).verify(self.server, data)
        if not key.endswith(_request_suffix(request)):
            raise FormatError("It is a copy of another request, and was not used.")
        reply = Envelope("reply", self.name, request_digest(data)).sign(self.sign, answer(request))
        _write_message(self.folder / self.name / "out" / f"{key}.reply", reply)

    def _requests(self) -> Iterator[tuple[Path, str]]:
        """Yield request files with their IDs."""
        try:
            paths = sorted((self.folder / self.name / "in").iterdir())
        except OSError:
            return
        for path in paths:
            found = REQUEST.fullmatch(path.name)
            if found is not None and (path.name not in self.finished or self.finished[path.name] != _modified_at(path)):
                yield path, found[1]


def _write_message(path: Path, data: bytes) -> None:
    """Write a file atomically. FileError if its folder is a symbolic link (someone else may have made it) or cannot be
    written to.
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
            f"{path} cannot be written: {error.strerror or error}. Use a folder, not a link, that both sides can "
            "write to, on a disk with free space."
        ) from error


def _read(path: Path, max_bytes: int) -> bytes:
    """Return a file's bytes. Links, pipes and folders of that name are not read, and cannot block the caller."""
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
    raise FormatError(
        f"{path.name} is not a regular file, or longer than the limit of {max_bytes} bytes. It was not read."
    )


def _remove_stale(folder: Path, pattern: re.Pattern[str], keep: tuple[str, ...]) -> None:
    """Remove files that a killed server has left. Files whose IDs start with one of `keep` stay."""
    with contextlib.suppress(OSError):
        for path in () if folder.is_symlink() else list(folder.iterdir()):
            found = pattern.fullmatch(path.name)
            if found is not None and not found[1].startswith(keep):
                _remove(path)


def _remove(path: Path) -> None:
    """Remove a file, a link or an empty folder, if possible."""
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
    """The prefix of the IDs of a run."""
    return hashlib.sha256(run.encode()).hexdigest()[:8]


def _request_suffix(request: bytes) -> str:
    """The suffix of the ID of a request."""
    return hashlib.sha256(request).hexdigest()[:24]
