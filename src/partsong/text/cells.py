"""The agreed words themselves, told to all parties by a sum: nobody learns who holds which, and the server no word.

A word goes into three cells, by keyed hash. What a holder adds to each: 1, and the word as numbers under a pad for this
cell that whoever has the key can compute. Of a cell with one word only, c holders leave (c, c·code): the word is read,
and taken out of its other two cells, and so on (an invertible Bloom lookup table; Goodrich and Mitzenmacher, 2011).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong.errors import PartyError
from partsong.text.keys import lanes, pad, within
from partsong.text.letters import NARROW_BYTES, rows_of, words_of
from partsong.text.packing import MOST_IN_A_CELL, Packing

Naming = Callable[[Sequence[bytes]], Any]
"""Words to their names (n × 16)."""

COPIES = 3


@dataclass(frozen=True, slots=True)
class Reading:
    """Words, at how many parties each is, numbers to sort them by, and whether these are all words.

    The order follows from keyed hashes, and says nothing to whoever lacks the key.
    """

    words: list[bytes]
    holders: Any
    order: Any
    is_whole: bool


@dataclass(frozen=True, slots=True)
class Told:
    """Of each word its three cells (n × 3), what is told of it (n × bytes: text and a check), and its order."""

    places: Any
    payload: Any
    order: Any

    def some(self, indices: list[int]) -> Told:
        """Of some of the words."""
        return Told(self.places[indices], self.payload[indices], self.order[indices])


@dataclass(frozen=True, slots=True)
class Cells:
    """Three times `size` cells in exchange `number`, for words of up to `longest` bytes; None: for narrow ones."""

    number: int
    size: int
    longest: int | None
    parties: int

    @staticmethod
    def enough_for(words: float) -> int:
        """The size for about so many words: fewer than 1.222 cells per word could not be read."""
        return int(1.26 * words + 8 * words**0.5 + 48) // COPIES

    @property
    def is_wide(self) -> bool:
        """Whether words are told letter by letter in bytes."""
        return self.longest is not None

    @property
    def text_bytes(self) -> int:
        """Bytes of a word."""
        return NARROW_BYTES if self.longest is None else self.longest

    @property
    def packing(self) -> Packing:
        """How a cell is written."""
        return Packing(self.text_bytes, self.parties)

    @property
    def shape(self) -> tuple[int, int]:
        """Of what a party adds."""
        return COPIES * self.size, self.packing.numbers

    def filled(self, key: bytes, words: Sequence[bytes], names: Any) -> Any:
        """What a party adds for its words, which have these names."""
        told = self._told(key, words, names)
        table = np.zeros((self.shape[0], self.packing.numbers + 1), dtype=np.int64)
        codes = self.packing.as_numbers(told.payload[:, None, :] ^ self._pads(key)[told.places])
        self._add(table, told.places, codes, np.ones(len(words), dtype=np.int64))
        if table[:, 0].max(initial=0) > MOST_IN_A_CELL:
            raise PartyError(
                f"More than {MOST_IN_A_CELL} words of a party met in one cell, which chance does not do. Nothing was "
                "sent. Check that all parties have the same key, and agree again with a fresh one."
            )
        return self.packing.packed(table)

    def read(self, key: bytes, total: Any, naming: Naming) -> Reading:
        """The words in the sum of what was added; `naming` gives the names of words under the same key."""
        left = self.packing.unpacked(np.reshape(total, self.shape))
        pads = self._pads(key)
        words: list[bytes] = []
        holders, orders = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for found, told, counts in self._alone(key, left, pads, naming):
            words += found
            holders.append(counts)
            orders.append(told.order)
            self._add(left, told.places, self.packing.as_numbers(told.payload[:, None, :] ^ pads[told.places]), -counts)
            if len(words) > len(left):
                break
        return Reading(words, np.concatenate(holders), np.concatenate(orders), not left.any())

    def _alone(self, key: bytes, left: Any, pads: Any, naming: Naming) -> Iterator[tuple[list[bytes], Told, Any]]:
        """Words that are by themselves in a cell, then those in cells that others were taken out of, and so on."""
        changed = np.arange(len(left))
        while True:
            at = changed[left[changed, 0] > 0]
            at = at[(left[at, 1:] % left[at, :1] == 0).all(axis=1)]
            codes = left[at, 1:] // left[at, :1]
            fits = ((codes >= 0) & (codes < self.packing.most)).all(axis=1)
            at, payload = at[fits], self.packing.as_bytes(codes[fits]) ^ pads[at[fits]]
            words, are_words = words_of(payload[:, : self.text_bytes], self.longest)
            at, payload = at[are_words], payload[are_words]
            told = self._told(key, words, naming(words))
            genuine = (payload == told.payload).all(axis=1) & (told.places == at[:, None]).any(axis=1)
            first = list({words[index]: index for index in np.flatnonzero(genuine).tolist()}.values())
            if not first:
                return
            found = told.some(first)
            yield [words[index] for index in first], found, left[at[first], 0]
            changed = np.unique(found.places)

    def _told(self, key: bytes, words: Sequence[bytes], names: Any) -> Told:
        numbers, checked = lanes(key, self._purpose, names, COPIES + 3), self.packing.check_bytes
        payload = np.zeros((len(words), self.packing.code_bytes), dtype=np.uint8)
        payload[:, : self.text_bytes] = rows_of(words, self.longest)
        check = np.ascontiguousarray(numbers[:, COPIES : COPIES + 1]).view(np.uint8)
        payload[:, self.text_bytes : self.text_bytes + checked] = check[:, :checked]
        order = np.ascontiguousarray(numbers[:, COPIES + 1 :]).view("<i8").reshape(-1)
        return Told(within(numbers[:, :COPIES], self.size) + np.arange(COPIES) * self.size, payload, order)

    @property
    def _purpose(self) -> str:
        return f"{'wide' if self.is_wide else 'narrow'} cells {self.number}"

    def _pads(self, key: bytes) -> Any:
        cells, width = self.shape[0], self.packing.code_bytes
        return pad(key, self._purpose, cells * width).reshape(cells, width)

    def _add(self, table: Any, places: Any, codes: Any, counts: Any) -> None:
        """Add each word's count, and count times code, to its three cells."""
        at = places.reshape(-1)
        np.add.at(table[:, 0], at, np.repeat(counts, COPIES))
        weighted = (codes * counts[:, None, None]).reshape(len(at), codes.shape[-1])
        for number in range(weighted.shape[1]):
            np.add.at(table[:, number + 1], at, weighted[:, number])
