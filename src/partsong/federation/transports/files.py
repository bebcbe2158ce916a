"""Folders as a transport, for places without a network path: requests are dropped, replies are picked up.

    FOLDER/PARTY/in/ID.request      FOLDER/PARTY/out/ID.reply        each: "PARTSONG" | Ed25519 signature | bytes

A signature is for one direction, party, request (its ID, which follows from its run and content) and content, so that a
file serves nowhere else: truncated, foreign and repeated ones are not used. A server that was killed and asks again
finds the reply to the same request. Several runs may use one folder at the same time: an ID begins with the mark of its
run, and what belongs to a run that is being worked on is left alone. What is in the bytes is nobody's business here.
Files are signed, not encrypted: whoever carries them can read them, unless the folder or the carrier encrypts.
"""

from __future__ import annotations

import contextlib
import errno
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

from partsong.errors import FileError, FormatError, ParameterError, PartsongError
from partsong.federation.locks import held
from partsong.federation.setup.run_place import RunPlace
from partsong.federation.signing import Signed, signer, verifier
from partsong.federation.transports.base import Heard, Lost, all_replies

if TYPE_CHECKING:
    from partsong.federation.setup.server_folder import ServerFolder
    from partsong.federation.setup.site_folder import SiteFolder


# ---- signed files -----------------------------------------------------------------------------------------------
#
# Files that are whole when their name appears, each signed for its place: "PARTSONG" | Ed25519 signature | bytes.

MAGIC = b"PARTSONG"
SIGNATURE_BYTES = 64
MOST_BYTES = 1 << 31
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
MISPLACED = {errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.EACCES, errno.EPERM}
"""Errors of a place that somebody else can have made; all others are of the disk."""

Sign = Callable[[bytes], bytes]
Verify = Callable[[bytes, bytes], bool]
"""Signature and text -> whether the holder of the key has signed it."""


def drop(path: Path, data: bytes) -> None:
    """Write a file so that it is whole when its name appears; FormatError where its folder is a link, or none that can
    be written to: it may be somebody else who has made it.
    """
    draft = f".{secrets.token_hex(8)}.draft"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            with open(os.open(draft, NEW, 0o666, dir_fd=folder), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(draft, dir_fd=folder)
            os.close(folder)
    except OSError as error:
        told = f"{path} cannot be written: {error.strerror or error}."
        if error.errno in MISPLACED:
            raise FormatError(f"{told} Make its folder one that both sides can write to, and no link.") from error
        raise FileError(f"{told} Check folder and disk.") from error


def sweep(folder: Path, pattern: re.Pattern[str], keep: tuple[str, ...]) -> None:
    """Take away what was left by a server that was killed; files whose IDs begin in one of these ways stay."""
    with contextlib.suppress(OSError):
        for path in () if folder.is_symlink() else list(folder.iterdir()):
            found = pattern.fullmatch(path.name)
            if found is not None and not found[1].startswith(keep):
                take_away(path)


def take_away(path: Path) -> None:
    """Remove a file, a link or an empty folder, if that can be done."""
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(path.lstat().st_mode):
            path.rmdir()
        else:
            path.unlink()


def signed(sign: Sign, direction: str, party: str, key: str, content: bytes) -> bytes:
    """A file's bytes, for one direction, party, request and content."""
    return MAGIC + sign(_statement(direction, party, key, content)) + content


def opened(path: Path, verify: Verify, where: tuple[str, str, str], most: int) -> bytes:
    """The content, if it was signed for this place by the one who is known for it."""
    try:
        data = _read(path, most)
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{path.name} cannot be read: {error.strerror or error}.") from error
    start = len(MAGIC) + SIGNATURE_BYTES
    signature, content = data[len(MAGIC) : start], data[start:]
    if data[: len(MAGIC)] != MAGIC or not verify(signature, _statement(*where, content)):
        raise FormatError(
            f"{path.name} has not the signature that is known for its place: cut short, changed, from somebody else, "
            "or repeated from another request. It was not used."
        )
    return content


def _read(path: Path, most: int) -> bytes:
    """A file's bytes; whatever else has its name (a link, a pipe, a folder) is not read, and not waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > most:
            raise FormatError(
                f"{path.name} is no file, or longer than the {most} bytes that are taken; it was not read."
            )
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(most)
    finally:
        os.close(descriptor)


def _statement(direction: str, party: str, key: str, content: bytes) -> bytes:
    parts = (b"partsong file drop", direction.encode(), party.encode(), key.encode(), hashlib.sha256(content).digest())
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


# ---- files ------------------------------------------------------------------------------------------------------

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
REQUEST = re.compile(r"([0-9a-f]{32})\.request")
REPLY = re.compile(r"([0-9a-f]{32})\.reply")
NO_REPLY = "no reply file in time"


@dataclass(slots=True)
class Out:
    """A request that lies in a party's folder: its ID, its file, when it was dropped, and why there is no reply yet."""

    key: str
    signed: bytes = field(repr=False)
    dropped: float
    why: str = NO_REPLY


@dataclass(frozen=True, slots=True)
class Folders:
    """The server's side: one folder for each party; `known` has the key of each, pinned beforehand. `others`: names of
    the other runs that are being worked on now, over this folder or elsewhere.
    """

    folder: Path
    sign: Sign = field(repr=False)
    known: Mapping[str, Verify] = field(repr=False)
    poll: float = 0.05
    most: int = MOST_BYTES
    again: float = 60.0
    run: str = ""
    others: Callable[[], Collection[str]] = tuple
    out: dict[str, Out] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        _require_names(self.known)

    def names(self) -> tuple[str, ...]:
        """All whose keys are pinned."""
        return tuple(sorted(self.known))

    def ask(self, requests: Mapping[str, bytes], timeout: float) -> dict[str, bytes | Lost]:
        """Drop all requests, then wait for the replies; what was not answered in time is taken back."""
        return all_replies(self, requests, timeout)

    def push(self, requests: Mapping[str, bytes], timeout: float) -> None:
        """Drop requests; whatever else lies in these parties' folders is taken back, unless it is of another run that
        is being worked on. A party whose folder takes none is one that does not answer.
        """
        marks = tuple(_mark(run) for run in self.others())
        for name, request in requests.items():
            key = _mark(self.run) + hashlib.sha256(request).hexdigest()[:24]
            out = Out(key, signed(self.sign, "request", name, key, request), time.monotonic())
            inbox, outbox = (self.folder / name / side for side in ("in", "out"))
            sweep(inbox, REQUEST, (key, *marks))
            sweep(outbox, REPLY, (key, *marks))
            try:
                drop(inbox / f"{key}.request", out.signed)
            except FormatError as error:
                out.why = str(error)
            self.out.pop(name, None)
            self.out[name] = out

    def arrived(self, timeout: float) -> Heard | None:
        """Look until there is a reply; who waits longest is looked at first. A request that is gone, without a reply
        that can be used, is dropped again after a while.
        """
        until = time.monotonic() + timeout
        while True:
            for name, out in self.out.items():
                found = self._reply(name, out.key)
                if not isinstance(found, Lost):
                    self._take_back(name)
                    return name, found
                out.why = out.why if found.why == NO_REPLY else found.why
                self._drop_again(name, out)
            left = until - time.monotonic()
            if left <= 0 or not self.out:
                return None
            time.sleep(min(self.poll, left))

    def recall(self) -> dict[str, Lost]:
        """Take back all that was not answered."""
        return {name: Lost(self._take_back(name).why) for name in list(self.out)}

    def _drop_again(self, name: str, out: Out) -> None:
        path, now = self.folder / name / "in" / f"{out.key}.request", time.monotonic()
        if now - out.dropped > self.again and not os.path.lexists(path):
            out.dropped = now
            with contextlib.suppress(FileError):
                drop(path, out.signed)

    def _take_back(self, name: str) -> Out:
        out = self.out.pop(name)
        for path in (f"in/{out.key}.request", f"out/{out.key}.reply"):
            take_away(self.folder / name / path)
        return out

    def _reply(self, name: str, key: str) -> bytes | Lost:
        path = self.folder / name / "out" / f"{key}.reply"
        try:
            return opened(path, self.known[name], ("reply", name, key), self.most)
        except FileError as error:
            return Lost(NO_REPLY if isinstance(error.__cause__, FileNotFoundError) else str(error))


@dataclass(frozen=True, slots=True)
class Mailbox:
    """A site's side; `server` is the server's key, pinned beforehand. `left` has files that it was done with and could
    not take away, and when they were made: they are not looked at again.
    """

    folder: Path
    name: str
    sign: Sign = field(repr=False)
    server: Verify = field(repr=False)
    most: int = MOST_BYTES
    left: dict[str, int] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        _require_names((self.name,))

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
        outbox = self.folder / self.name / "out"
        for path, key in self._requests():
            try:
                request = opened(path, self.server, ("request", self.name, key), self.most)
                reply = answer(request)
                drop(outbox / f"{key}.reply", signed(self.sign, "reply", self.name, key, reply))
                told = f"{key}: answered"
            except PartsongError as error:
                told = f"{key}: not answered. {error}"
            self._done_with(path)
            yield told

    def _requests(self) -> Iterator[tuple[Path, str]]:
        """Files by the name of a request, and their IDs."""
        try:
            paths = sorted((self.folder / self.name / "in").iterdir())
        except OSError:
            return
        for path in paths:
            found = REQUEST.fullmatch(path.name)
            if found is not None and (path.name not in self.left or self.left[path.name] != _made(path)):
                yield path, found[1]

    def _done_with(self, path: Path) -> None:
        take_away(path)
        self.left.pop(path.name, None)
        if os.path.lexists(path):
            self.left[path.name] = _made(path)


def _mark(run: str) -> str:
    """How IDs of a run begin."""
    return hashlib.sha256(run.encode()).hexdigest()[:8]


def _made(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0


def _require_names(names: Mapping[str, Verify] | tuple[str, ...]) -> None:
    for name in names:
        if not NAME.fullmatch(name):
            raise ParameterError(
                f"{name[:60]!r} cannot be the name of a folder for everybody. Use letters, digits, dots and dashes."
            )


# ---- file drop --------------------------------------------------------------------------------------------------
#
# Requests and replies through a folder that server and sites both reach, or that is carried between them.

POLL = 0.5


def requests_in(drop: Path, server: ServerFolder, place: RunPlace) -> Signed:
    """The server's side, for the process that works on a run: if Flower gave it a number, it is Flower's no more."""
    place.number.unlink(missing_ok=True)
    return server.over_files(drop, place.name)


def answer_in(drop: Path, site: SiteFolder, tell: Callable[[str], None]) -> None:
    """A site's side, until it is told to stop; tells a word on each file."""
    mailbox = Mailbox(drop, site.site, signer(site.secret(), site.site), verifier(site.coordinator))
    inbox = drop / site.site / "in"
    if not inbox.is_dir():
        missing = inbox if drop.is_dir() else drop
        tell(f"Waiting for requests in {inbox}; {missing} does not exist yet. Check the path if a run has begun.")
    with held(site.path / "node.lock", "The node of this site runs already"):
        for word in mailbox.serve(site.answering(), math.inf, POLL):
            tell(word)
