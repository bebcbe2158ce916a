"""The agreed words, read from the sum of cells: the same for whoever has the key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from partsong.core import Message
from partsong.errors import PartyError
from partsong.text.cells import Cells
from partsong.text.keys import names_of


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class AgreedWords:
    """Words in the order of a keyed hash, which tells the server nothing of them, and at how many parties each is.

    `columns` says which word is which column; `told` are all words that were in the sum, with those that passed by
    chance and are dropped.
    """

    words: tuple[str, ...] = field(repr=False)
    holders: Any = field(repr=False)
    columns: Mapping[str, int] = field(repr=False)
    told: frozenset[bytes] = field(repr=False)

    def require_sound(self, party: str, proposed: Iterable[bytes], most_rare: float) -> None:
        """Refuse sums that lack what this party has added, or have more rare words than come by chance."""
        if not self.told.issuperset(proposed):
            raise PartyError(f"Party {party!r}: words that it proposed and that passed are not among those told back.")
        n_rare = len(self.told) - len(self.words)
        if n_rare > most_rare:
            raise PartyError(
                f"Party {party!r}: {n_rare} words have passed that are at too few parties, which chance does not do: "
                "the server did not go by its counts. The other parties have seen these words. Agree with another "
                "server, and a fresh key."
            )


@dataclass(frozen=True, slots=True)
class CellSums:
    """The two sums of cells that all parties are sent, and how they were made."""

    narrow: Cells
    wide: Cells
    sums: tuple[Any, Any] = field(repr=False)

    @classmethod
    def heard(cls, narrow: Cells, wide: Cells, model: Message, party: str) -> CellSums:
        """From what a server has sent to a party."""
        try:
            sums = model["narrow"], model["wide"]
            shapes = tuple(tuple(int(size) for size in total.shape) for total in sums)
        except (KeyError, AttributeError):
            shapes = ()
        if shapes != (narrow.shape, wide.shape):
            raise PartyError(f"Party {party!r}: the server's sums of words are not those of this step. Agree again.")
        return cls(narrow, wide, sums)

    def read(self, key: bytes, min_parties: int) -> AgreedWords | None:
        """The words at ≥ `min_parties` parties; None if a sum cannot be read to its end.

        Parties in one process are sent the same sums and have the same key: what one of them has read, and still
        keeps, is not read again.
        """
        mark = (key, min_parties, self.narrow, self.wide, *(hashlib.blake2b(total).digest() for total in self._arrays))
        known = _kept.get(mark)
        if known is not None:
            return known
        found = self._read(key, min_parties)
        if found is not None:
            _kept[mark] = found
        return found

    @property
    def _arrays(self) -> tuple[Any, Any]:
        narrow, wide = (np.ascontiguousarray(total, dtype=np.int64) for total in self.sums)
        return narrow, wide

    def _read(self, key: bytes, min_parties: int) -> AgreedWords | None:
        naming = partial(names_of, key)
        cells = (self.narrow, self.wide)
        short, others = (one.read(key, total, naming) for one, total in zip(cells, self._arrays, strict=True))
        if not (short.is_whole and others.is_whole):
            return None
        texts, holders = short.words + others.words, np.concatenate([short.holders, others.holders])
        order = np.argsort(np.concatenate([short.order, others.order]), kind="stable")
        order = order[holders[order] >= min_parties]
        words = tuple(texts[index].decode("utf-8", "surrogatepass") for index in order.tolist())
        columns = {word: column for column, word in enumerate(words)}
        return AgreedWords(words, holders[order], columns, frozenset(texts))


_kept: WeakValueDictionary[Any, AgreedWords] = WeakValueDictionary()
