"""How many are in a cell and what they are, in few whole numbers whose sums over all parties stay exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

EXACT_BITS = 52
"""Whole numbers below 2⁵³ are exact in the float64 that sums come back in."""
MOST_IN_A_CELL = 32
"""Words of one party in one cell: two or three are there on average."""
MOST_CHECKED = 4
"""Bytes of a check, at most; one at least."""


@dataclass(frozen=True, slots=True)
class Packing:
    """A cell as numbers: the first has how many words are in it above some bytes of their codes, others have codes.

    Sums outgrow a code by `count_bits`, which are left free above each.
    """

    text_bytes: int
    parties: int

    @property
    def count_bits(self) -> int:
        """Bits of how many are in a cell, over all parties."""
        return (MOST_IN_A_CELL * self.parties).bit_length()

    @property
    def width(self) -> int:
        """Bytes of a code in a number of its own."""
        return (EXACT_BITS - self.count_bits) // 8

    @property
    def beside(self) -> int:
        """Bytes of a code in the first number."""
        return max(0, EXACT_BITS - 2 * self.count_bits) // 8

    @property
    def numbers(self) -> int:
        """Numbers of a cell."""
        return 1 + -(-max(0, self.text_bytes + 1 - self.beside) // self.width)

    @property
    def code_bytes(self) -> int:
        """Bytes of a word, of its check, and of nothing."""
        return self.beside + (self.numbers - 1) * self.width

    @property
    def check_bytes(self) -> int:
        """What is left for a check; whether a cell holds one word shows also in where it lies."""
        return min(MOST_CHECKED, self.code_bytes - self.text_bytes)

    @property
    def most(self) -> Any:
        """What each part of a code is below."""
        return 1 << 8 * np.array([self.beside, *[self.width] * (self.numbers - 1)])

    def packed(self, table: Any) -> Any:
        """From (cells × 1 + numbers), how many and sums of codes, to (cells × numbers)."""
        sums = table[:, 1:].copy()
        sums[:, 0] += table[:, 0] << self._above
        return sums

    def unpacked(self, total: Any) -> Any:
        """The way back, also from a sum over parties."""
        sums = np.asarray(total, dtype=np.int64)
        first = sums[:, :1]
        return np.concatenate([first >> self._above, first & ((1 << self._above) - 1), sums[:, 1:]], axis=1)

    def as_numbers(self, payload: Any) -> Any:
        """Bytes (… × code_bytes) as the parts of a code (… × numbers)."""
        rest = payload[..., self.beside :].reshape(*payload.shape[:-1], self.numbers - 1, self.width)
        return np.concatenate([_joined(payload[..., None, : self.beside]), _joined(rest)], axis=-1)

    def as_bytes(self, codes: Any) -> Any:
        """Parts of codes (n × numbers) as bytes (n × code_bytes)."""
        first, rest = _apart(codes[:, :1], self.beside), _apart(codes[:, 1:], self.width)
        return np.concatenate([first, rest], axis=1)

    @property
    def _above(self) -> int:
        return EXACT_BITS - self.count_bits


def _joined(parts: Any) -> Any:
    """Bytes along the last axis as one number, the lowest first."""
    return (parts.astype(np.int64) << (8 * np.arange(parts.shape[-1]))).sum(axis=-1)


def _apart(numbers: Any, width: int) -> Any:
    parts = (numbers[..., None] >> (8 * np.arange(width))) & 255
    return parts.astype(np.uint8).reshape(len(numbers), numbers.shape[1] * width)
