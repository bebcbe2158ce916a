"""Folders as a transport, for places without a network path: requests are dropped, replies are picked up.

    FOLDER/PARTY/in/ID.request      FOLDER/PARTY/out/ID.reply        each: "PARTSONG" | Ed25519 signature | bytes

A signature is for one direction, party, request (its ID, which follows from its content) and content, so that a file
serves nowhere else: truncated, foreign and repeated ones are not used. A server that was killed and asks again finds
the reply to the same request. What is in the bytes is nobody's business here. Files are
signed, not encrypted: whoever carries them can read them, unless the folder or the carrier encrypts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from partsong.errors import FileError, FormatError, ParameterError

MAGIC = b"PARTSONG"
SIGNATURE_BYTES = 64
MOST_BYTES = 1 << 31
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
REQUEST = re.compile(r"([0-9a-f]{32})\.request")

Sign = Callable[[bytes], bytes]
Verify = Callable[[bytes, bytes], bool]
"""Signature and text -> whether the holder of the key has signed it."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Why there is no reply of a party that can be used."""

    why: str


@dataclass(frozen=True, slots=True)
class Folders:
    """The server's side: one folder for each party; `known` has the key of each, pinned beforehand."""

    folder: Path
    sign: Sign = field(repr=False)
    known: Mapping[str, Verify] = field(repr=False)
    poll: float = 0.05
    most: int = MOST_BYTES

    def __post_init__(self) -> None:
        _require_names(self.known)

    def names(self) -> tuple[str, ...]:
        """All whose keys are pinned."""
        return tuple(sorted(self.known))

    def ask(self, requests: Mapping[str, bytes], timeout: float) -> dict[str, bytes | Lost]:
        """Drop all requests, then wait for the replies; what was not answered in time is taken back."""
        ids = {name: hashlib.sha256(request).hexdigest()[:32] for name, request in requests.items()}
        for name, request in requests.items():
            inbox = self.folder / name / "in"
            _sweep(inbox)
            drop(inbox / f"{ids[name]}.request", _signed(self.sign, "request", name, ids[name], request))
        found: dict[str, bytes | Lost] = {name: Lost("no reply file in time") for name in requests}
        waiting, until = set(requests), time.monotonic() + timeout
        while waiting and time.monotonic() < until:
            for name in sorted(waiting):
                found[name] = self._reply(name, ids[name])
            waiting = {name for name in waiting if isinstance(found[name], Lost)}
            if waiting:
                time.sleep(min(self.poll, max(0.0, until - time.monotonic())))
        for name, key in ids.items():
            for path in (self.folder / name / "in" / f"{key}.request", self.folder / name / "out" / f"{key}.reply"):
                path.unlink(missing_ok=True)
        return found

    def _reply(self, name: str, key: str) -> bytes | Lost:
        path = self.folder / name / "out" / f"{key}.reply"
        if not path.exists():
            return Lost("no reply file in time")
        try:
            return _opened(path, self.known[name], ("reply", name, key), self.most)
        except FileError as error:
            return Lost(str(error))


@dataclass(frozen=True, slots=True)
class Mailbox:
    """A site's side; `server` is the server's key, pinned beforehand."""

    folder: Path
    name: str
    sign: Sign = field(repr=False)
    server: Verify = field(repr=False)
    most: int = MOST_BYTES

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
        inbox, outbox = (self.folder / self.name / side for side in ("in", "out"))
        for path in sorted(inbox.iterdir()) if inbox.is_dir() else ():
            found = REQUEST.fullmatch(path.name)
            if found is None:
                continue
            try:
                request = _opened(path, self.server, ("request", self.name, found[1]), self.most)
                reply = answer(request)
                drop(outbox / f"{found[1]}.reply", _signed(self.sign, "reply", self.name, found[1], reply))
                told = f"{found[1]}: answered"
            except FileError as error:
                told = f"{found[1]}: not answered. {error}"
            with contextlib.suppress(OSError):
                path.unlink()
            yield told


def drop(path: Path, data: bytes) -> None:
    """Write a file so that it is whole when its name appears."""
    draft = path.with_name(f".{secrets.token_hex(8)}.draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror or error}. Check folder and disk.") from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def _sweep(inbox: Path) -> None:
    """Take back requests that were left by a server that was killed: whoever asks is the only one who does."""
    for path in inbox.iterdir() if inbox.is_dir() else ():
        if REQUEST.fullmatch(path.name):
            with contextlib.suppress(OSError):
                path.unlink()


def _signed(sign: Sign, direction: str, party: str, key: str, content: bytes) -> bytes:
    return MAGIC + sign(_statement(direction, party, key, content)) + content


def _opened(path: Path, verify: Verify, where: tuple[str, str, str], most: int) -> bytes:
    """The content, if it was signed for this place by the one who is known for it."""
    try:
        if path.is_symlink() or path.stat().st_size > most:
            raise FormatError(
                f"{path.name} is a link, or longer than the {most} bytes that are taken; it was not read."
            )
        data = path.read_bytes()
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


def _statement(direction: str, party: str, key: str, content: bytes) -> bytes:
    parts = (b"partsong file drop", direction.encode(), party.encode(), key.encode(), hashlib.sha256(content).digest())
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def _require_names(names: Mapping[str, Verify] | tuple[str, ...]) -> None:
    for name in names:
        if not NAME.fullmatch(name):
            raise ParameterError(
                f"{name[:60]!r} cannot be the name of a folder for everybody. Use letters, digits, dots and dashes."
            )
