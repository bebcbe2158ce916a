"""Append-only files in which every line holds the hash of the line before: what was written cannot be changed unseen.

    {"number": 3, "before": "<hash of line 2>", …, "hash": "<SHA-256 of this line without it>"}

A line may have a `version` (1 if it has none), and a newer one is refused: its meaning is not known here.

A line is on the disk before `append` returns. A last line without its end was cut off by a crash and was never acted
on: it is taken away when the next one is written. Lines that are missing from the end cannot be seen from the file
alone; `head` is the hash to note elsewhere, or to compare with.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from partsong.errors import BrokenChain, FileError, FormatError

GENESIS_HASH = "0" * 64
"""The hash before the first line."""
TAIL_BYTES = 1 << 16
HASH = re.compile(rb'"hash": "([0-9a-f]{64})", ')
"""Where a line has its own hash: never last, for "number" comes after it."""
MAX_CACHED = 16
VERSION = 1
RESTORE_BACKUP = (
    "Restore the newest sound copies of ledger.jsonl and audit.jsonl. Where there are none, state what was released "
    "before: partsong audit opening FOLDER --why REASON"
)
KEEP_EVIDENCE = f"Keep the file as it is, outside of the folder: it is the evidence. {RESTORE_BACKUP}"
"""What to do about a file that was edited."""

Line = dict[str, Any]
Folded = TypeVar("Folded")


@dataclass(frozen=True, slots=True)
class VerifiedPrefix:
    """How far a file was compared: so many bytes with this SHA-256, and number and hash of the last line in them."""

    length: int = 0
    sha256: bytes = hashlib.sha256().digest()
    number: int = 0
    head: str = GENESIS_HASH

    def matches(self, data: bytes) -> bool:
        """Whether these bytes begin with the ones that were compared."""
        return len(data) >= self.length and hashlib.sha256(memoryview(data)[: self.length]).digest() == self.sha256


_CACHE: dict[tuple[Path, Any], tuple[VerifiedPrefix, Any]] = {}
"""Of files that this process has read: how far, and what came of it."""
_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class Chain:
    """Such a file."""

    path: Path

    def append(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """One more line, flushed to the disk; returned with its number and hashes."""
        text, number, before = self._end()
        line = {"number": number + 1, "before": before, **entry}
        line["hash"] = _line_hash(line)
        written = _format_line(line) + b"\n"
        is_new = not self.path.exists()
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.ftruncate(descriptor, text)
                os.lseek(descriptor, 0, os.SEEK_END)
                while written:
                    written = written[os.write(descriptor, written) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if is_new:
                with contextlib.suppress(OSError):  # not every system can put a new name on the disk
                    sync_to_disk(self.path.parent, os.O_RDONLY)
        except OSError as error:
            raise FileError(
                f"{self.path} cannot be written: {error.strerror or error}. Nothing was sent; check that the disk is "
                "not full, and ask again."
            ) from error
        return line

    def lines(self) -> Iterator[Line]:
        """All lines, each compared with the one before and with how it is written; BrokenChain at the first that does
        not fit, and for an end that no crash leaves: more than a line, without its own end.
        """
        return self._verified(self._read(), VerifiedPrefix())

    def fold(self, fold: Callable[[Folded, Sequence[Line]], Folded], empty: Folded) -> Folded:
        """fold(…, lines) over all lines, compared: those that this process has read before are not read again where
        their bytes are the same to the last one.
        """
        data, place = self._read(), (self.path, fold)
        with _LOCK:
            mark, found = _CACHE.pop(place, (VerifiedPrefix(), empty))
        if not mark.matches(data):
            mark, found = VerifiedPrefix(), empty
        if new := list(self._verified(data, mark)):
            end = data.rfind(b"\n") + 1
            found = fold(found, new)
            mark = VerifiedPrefix(
                end, hashlib.sha256(memoryview(data)[:end]).digest(), new[-1]["number"], new[-1]["hash"]
            )
        with _LOCK:
            _CACHE[place] = (mark, found)
            while len(_CACHE) > MAX_CACHED:
                _CACHE.pop(next(iter(_CACHE)))
        return found

    def _verified(self, data: bytes, mark: VerifiedPrefix) -> Iterator[Line]:
        """The lines after those that were compared before."""
        *texts, rest = data[mark.length :].split(b"\n")
        number, before = mark.number, mark.head
        for text in texts:
            number, line = number + 1, _parse_line(text)
            if line is None or line["number"] != number or line["before"] != before:
                raise BrokenChain(
                    f"{self.path}, line {number}: it does not follow from the line before it, so that this file was "
                    f"edited, or lines were taken out. What came before it is sound. {KEEP_EVIDENCE}",
                    number,
                    before,
                )
            if line.get("version", VERSION) != VERSION:
                raise FormatError(
                    f"{self.path}, line {number}: its version is {line['version']!r}, and this partsong reads version "
                    f"{VERSION}. Update partsong: pip install --upgrade partsong"
                )
            before = line["hash"]
            yield line
        if _has_edited_end(rest):
            said = f"{self.path}, line {number + 1}: the end of this line was edited. {KEEP_EVIDENCE}"
            raise BrokenChain(said, number + 1, before)

    def head(self) -> tuple[int, str]:
        """The number of lines and the last hash, after all lines were compared."""
        number, before = 0, GENESIS_HASH
        for line in self.lines():
            number, before = line["number"], line["hash"]
        return number, before

    def partial_bytes(self) -> int:
        """Bytes of a last line that a crash has cut off, which the next line replaces."""
        return len(self._read().rpartition(b"\n")[2])

    @property
    def number(self) -> int:
        """That of the last whole line; what is before it is not read."""
        return self._end()[1]

    def _read(self) -> bytes:
        try:
            return self.path.read_bytes() if self.path.exists() else b""
        except OSError as error:
            raise FileError(f"{self.path} cannot be read: {error.strerror or error}. Check whose it is.") from error

    def _end(self) -> tuple[int, int, str]:
        """Length of all whole lines, and number and hash of the last; what is before it is not read again."""
        if not self.path.exists():
            return 0, 0, GENESIS_HASH
        with self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            tail, start = b"", size
            while start > 0 and tail.count(b"\n") < 2:
                start = max(0, start - TAIL_BYTES)
                file.seek(start)
                tail = file.read(size - start)
        length = start + tail.rfind(b"\n") + 1
        if length == 0:
            return 0, 0, GENESIS_HASH
        text = tail[: tail.rfind(b"\n")].rpartition(b"\n")[2]
        line = _parse_line(text)
        if line is None:
            raise BrokenChain(f"{self.path}: its last line was edited. Nothing can be added to it. {KEEP_EVIDENCE}")
        return length, int(line["number"]), str(line["hash"])


def _has_edited_end(rest: bytes) -> bool:
    """Whether bytes after the last whole line begin with a whole one: its end was changed, and not cut off."""
    try:
        line, length = json.JSONDecoder().raw_decode(rest.decode("latin-1"))
    except (ValueError, RecursionError):
        return False
    return isinstance(line, dict) and length < len(rest)


def _parse_line(text: bytes) -> Line | None:
    """A line whose hash is that of all else in it, written in the one way there is; None where it is not."""
    try:
        line = json.loads(text)
        if len(found := HASH.findall(text)) == 1 and list(line) == sorted(line):
            is_sound = line["hash"] == found[0].decode() == hashlib.sha256(HASH.sub(b"", text)).hexdigest()
        else:
            is_sound = line["hash"] == _line_hash(line) and text == _format_line(line)
        is_sound = is_sound and "number" in line and "before" in line
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return line if is_sound else None


def sync_to_disk(path: Path, flags: int = os.O_RDWR) -> None:
    """What another process has written to a file is on the disk."""
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _line_hash(line: Mapping[str, Any]) -> str:
    return hashlib.sha256(_format_line({name: value for name, value in line.items() if name != "hash"})).hexdigest()


def _format_line(line: Mapping[str, Any]) -> bytes:
    """The one way to write a line."""
    return json.dumps(line, sort_keys=True, allow_nan=False).encode()
