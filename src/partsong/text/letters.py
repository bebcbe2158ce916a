"""Words as rows of bytes: short ones of plain letters in five bits each, all others as UTF-8."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

LETTERS = 11
NARROW_BYTES = 7
"""Up to 11 letters from a to z, in five bits each."""

_NARROW = re.compile(rb"[a-z]{1,%d}" % LETTERS)
_SHIFTS = 5 * np.arange(LETTERS, dtype=np.uint64)


def are_wide(words: Sequence[bytes]) -> Any:
    """Which words are not short ones of plain letters."""
    return np.array([_NARROW.fullmatch(word) is None for word in words], dtype=bool)


def rows_of(words: Sequence[bytes], longest: int | None) -> Any:
    """Words as an array (n × bytes), zeros behind; None: for narrow words."""
    width = LETTERS if longest is None else longest
    letters = np.array(words, dtype=f"S{width}").view(np.uint8).reshape(len(words), width)
    if longest is not None:
        return letters
    coded = ((letters & 31).astype(np.uint64) << _SHIFTS).sum(axis=1, dtype=np.uint64)
    return coded.astype("<u8")[:, None].view(np.uint8)[:, :NARROW_BYTES]


def words_of(rows: Any, longest: int | None) -> tuple[list[bytes], Any]:
    """The words again, and which rows look like one at all."""
    letters = np.ascontiguousarray(rows)
    is_one: Any = np.ones(len(rows), dtype=bool)
    if longest is None:
        coded = np.zeros((len(rows), 8), dtype=np.uint8)
        coded[:, :NARROW_BYTES] = rows
        letters = ((coded.view("<u8") >> _SHIFTS) & np.uint64(31)).astype(np.uint8)
        is_one = (letters <= 26).all(axis=1)
        letters[letters > 0] += 96
    is_behind = letters == 0
    is_one &= ~is_behind[:, 0] & (is_behind[:, 1:] >= is_behind[:, :-1]).all(axis=1)
    return letters[is_one].view(f"S{letters.shape[1]}").reshape(-1).tolist(), is_one
