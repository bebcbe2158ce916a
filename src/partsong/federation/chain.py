"""Append-only files in which every line holds the hash of the line before: what was written cannot be changed unseen.

    {"number": 3, "before": "<hash of line 2>", …, "hash": "<SHA-256 of this line without it>"}

A line is on the disk before `append` returns. A last line without its end was cut off by a crash and was never acted
on: it is taken away when the next one is written. Lines that are missing from the end cannot be seen from the file
alone; `head` is the hash to note elsewhere, or to compare with.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partsong.errors import BrokenChain, FileError, FormatError

NOTHING = "0" * 64
"""The hash before the first line."""
TAIL = 1 << 16


@dataclass(frozen=True, slots=True)
class Chain:
    """Such a file."""

    path: Path

    def append(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """One more line, flushed to the disk; returned with its number and hashes."""
        text, number, before = self._end()
        line = {"number": number + 1, "before": before, **entry}
        line["hash"] = _hash(line)
        written = _text(line) + b"\n"
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
        except OSError as error:
            raise FileError(
                f"{self.path} cannot be written: {error.strerror or error}. Nothing was sent; check that the disk is "
                "not full, and ask again."
            ) from error
        return line

    def lines(self) -> Iterator[dict[str, Any]]:
        """All lines, each compared with the one before and with how it is written; BrokenChain at the first that does
        not fit.
        """
        before = NOTHING
        for number, text in enumerate(self._whole_lines(), 1):
            try:
                line = json.loads(text)
                is_sound = line["number"] == number and line["before"] == before and line["hash"] == _hash(line)
                is_sound = is_sound and text == _text(line)
            except (ValueError, KeyError, TypeError, RecursionError):
                is_sound = False
            if not is_sound:
                raise BrokenChain(
                    f"{self.path}, line {number}: it does not follow from the line before it, so that this file was "
                    "edited, or lines were taken out. What came before it is sound. Keep the file as it is, and ask "
                    "who could write to it.",
                    number,
                    before,
                )
            before = line["hash"]
            yield line

    def head(self) -> tuple[int, str]:
        """The number of lines and the last hash, after all lines were compared."""
        number, before = 0, NOTHING
        for line in self.lines():
            number, before = line["number"], line["hash"]
        return number, before

    def unfinished(self) -> int:
        """Bytes of a last line that a crash has cut off, which the next line replaces; BrokenChain where no crash
        leaves such bytes: more than a line, without its end.
        """
        rest = self._read().rpartition(b"\n")[2]
        try:
            line, length = json.JSONDecoder().raw_decode(rest.decode("latin-1"))
            is_whole = isinstance(line, dict) and length < len(rest)
        except (ValueError, RecursionError):
            is_whole = False
        if is_whole:
            number, last = self.head()
            raise BrokenChain(f"{self.path}, line {number + 1}: the end of this line was edited.", number + 1, last)
        return len(rest)

    def _whole_lines(self) -> list[bytes]:
        return self._read().split(b"\n")[:-1]

    def _read(self) -> bytes:
        return self.path.read_bytes() if self.path.exists() else b""

    def _end(self) -> tuple[int, int, str]:
        """Length of all whole lines, and number and hash of the last; what is before it is not read again."""
        if not self.path.exists():
            return 0, 0, NOTHING
        with self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            tail, start = b"", size
            while start > 0 and tail.count(b"\n") < 2:
                start = max(0, start - TAIL)
                file.seek(start)
                tail = file.read(size - start)
        length = start + tail.rfind(b"\n") + 1
        if length == 0:
            return 0, 0, NOTHING
        text = tail[: tail.rfind(b"\n")].rpartition(b"\n")[2]
        try:
            line = json.loads(text)
            number, last, is_sound = int(line["number"]), str(line["hash"]), line["hash"] == _hash(line)
        except (ValueError, KeyError, TypeError, RecursionError):
            is_sound = False
        if not is_sound:
            raise FormatError(f"{self.path}: its last line was edited. Nothing can be added to it; keep it as it is.")
        return length, number, last


def _hash(line: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text({name: value for name, value in line.items() if name != "hash"})).hexdigest()


def _text(line: Mapping[str, Any]) -> bytes:
    """The one way to write a line."""
    return json.dumps(line, sort_keys=True, allow_nan=False).encode()
