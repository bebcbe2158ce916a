"""Hash-chained append-only files: each line has the hash of the line before, so that edits are detected.

    {"number": 3, "before": "<hash of line 2>", …, "hash": "<SHA-256 of this line without it>"}

A line may have a `version` (default 1). Newer versions are refused.

A line is on disk before `append` returns. A last line without a line end was cut off by a crash and never acted on; the
next `append` replaces it. Lines removed from the end do not show in the file itself: note `head`, the last hash,
elsewhere and compare.
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
"""A line's own hash, which is never its last key: "number" follows it."""
MAX_CACHED = 16
VERSION = 1
RESTORE_BACKUP = (
    "Restore the newest intact backups of ledger.jsonl and audit.jsonl. If there are none, state what was released "
    "before: partsong audit opening FOLDER --why REASON"
)
KEEP_EVIDENCE = f"Keep the file unchanged outside the folder, as evidence. {RESTORE_BACKUP}"
"""Advice on an edited file."""

Line = dict[str, Any]
Folded = TypeVar("Folded")


@dataclass(frozen=True, slots=True)
class VerifiedPrefix:
    """The verified start of a file: its length in bytes, its SHA-256, and the number and hash of its last line."""

    length: int = 0
    sha256: bytes = hashlib.sha256().digest()
    number: int = 0
    head: str = GENESIS_HASH

    def matches(self, data: bytes) -> bool:
        """Whether these bytes start with the verified ones."""
        return len(data) >= self.length and hashlib.sha256(memoryview(data)[: self.length]).digest() == self.sha256


_CACHE: dict[tuple[Path, Any], tuple[VerifiedPrefix, Any]] = {}
"""For files and folds that this process has read: the verified start, and the folded value."""
_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class Chain:
    """A hash-chained file."""

    path: Path

    def append(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Append a line, flushed to disk, and return it with its number and hashes."""
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
                with contextlib.suppress(OSError):  # not every system can sync a folder
                    sync_to_disk(self.path.parent, os.O_RDONLY)
        except OSError as error:
            raise FileError(
                f"{self.path} cannot be written: {error.strerror or error}. Nothing was sent. Check that the disk is "
                "not full, then ask again."
            ) from error
        return line

    def lines(self) -> Iterator[Line]:
        """Yield all lines, each verified. BrokenChain at the first line that does not follow from the one before, and
        for an end that no crash can leave: a whole line followed by other bytes.
        """
        return self._verified(self._read(), VerifiedPrefix())

    def fold(self, fold: Callable[[Folded, Sequence[Line]], Folded], empty: Folded) -> Folded:
        """Fold all verified lines. Lines that this process has verified before are skipped if their bytes are
        unchanged.
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
        """Yield the lines after the verified start."""
        *texts, rest = data[mark.length :].split(b"\n")
        number, before = mark.number, mark.head
        for text in texts:
            number, line = number + 1, _parse_line(text)
            if line is None or line["number"] != number or line["before"] != before:
                raise BrokenChain(
                    f"{self.path}, line {number}: it does not follow from the line before. The file was edited, or "
                    f"lines were removed. The lines before it are intact. {KEEP_EVIDENCE}",
                    number,
                    before,
                )
            if line.get("version", VERSION) != VERSION:
                raise FormatError(
                    f"{self.path}, line {number}: its version is {line['version']!r}; this partsong reads version "
                    f"{VERSION}. Update partsong: pip install --upgrade partsong"
                )
            before = line["hash"]
            yield line
        if _has_edited_end(rest):
            message = f"{self.path}, line {number + 1}: the end of this line was edited. {KEEP_EVIDENCE}"
            raise BrokenChain(message, number + 1, before)

    def head(self) -> tuple[int, str]:
        """Verify all lines; return their number and the last hash."""
        number, before = 0, GENESIS_HASH
        for line in self.lines():
            number, before = line["number"], line["hash"]
        return number, before

    def partial_bytes(self) -> int:
        """Return the length in bytes of a last line that a crash has cut off."""
        return len(self._read().rpartition(b"\n")[2])

    @property
    def number(self) -> int:
        """Number of the last complete line; the lines before it are not read."""
        return self._end()[1]

    def _read(self) -> bytes:
        try:
            return self.path.read_bytes() if self.path.exists() else b""
        except OSError as error:
            raise FileError(
                f"{self.path} cannot be read: {error.strerror or error}. Check its owner and permissions."
            ) from error

    def _end(self) -> tuple[int, int, str]:
        """Return the length of all complete lines, and number and hash of the last, reading only the end of
        the file.
        """
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
    """Whether the bytes after the last complete line start with a whole record: then its end was edited, not
    cut off.
    """
    try:
        line, length = json.JSONDecoder().raw_decode(rest.decode("latin-1"))
    except (ValueError, RecursionError):
        return False
    return isinstance(line, dict) and length < len(rest)


def _parse_line(text: bytes) -> Line | None:
    """Parse a line in canonical form whose hash matches; None if it is not one."""
    try:
        line = json.loads(text)
        if len(found := HASH.findall(text)) == 1 and list(line) == sorted(line):
            is_intact = line["hash"] == found[0].decode() == hashlib.sha256(HASH.sub(b"", text)).hexdigest()
        else:
            is_intact = line["hash"] == _line_hash(line) and text == _format_line(line)
        is_intact = is_intact and "number" in line and "before" in line
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return line if is_intact else None


def sync_to_disk(path: Path, flags: int = os.O_RDWR) -> None:
    """Flush what any process has written to a file to disk."""
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _line_hash(line: Mapping[str, Any]) -> str:
    return hashlib.sha256(_format_line({name: value for name, value in line.items() if name != "hash"})).hexdigest()


def _format_line(line: Mapping[str, Any]) -> bytes:
    """Format a line in canonical form."""
    return json.dumps(line, sort_keys=True, allow_nan=False).encode()
