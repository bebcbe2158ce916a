"""Whether the rows of a site are sound, and are those that a run has begun with; the reason stays at the site.

What is compared is a SHA-256 of the agreed columns, in their order: n_p × m numbers with their type, or of an agreement
its words with the number of documents that have each. It is computed once in a process for a table that stays as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from partsong.data.check import require_factorizable
from partsong.errors import PartsongError
from partsong.federation.refusals import Denied
from partsong.federation.site_files import Started
from partsong.federation.site_plan import Data
from partsong.text.held_words import HeldWords

BLOCK = 1 << 23
"""Bytes that are looked at together."""


class Rows:
    """An array, known by what it is and not by what is in it."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


def require_sound(data: Data) -> None:
    """Refuse rows that `join` would refuse: negative, missing or infinite numbers, names that are none."""
    if not data.hides_names and (found := _fault(Rows(data.rows), data.columns)):
        raise Denied("data", found)


def mark_of(data: Data, order: tuple[int, ...]) -> str:
    """By which the same rows are known again."""
    return _mark(Rows(data.rows), order)


def require_same(data: Data, started: Started) -> None:
    """Refuse rows that are not those that a run has begun with."""
    order, (rows, type_) = data.order(started.columns), started.rows
    if (data.n_rows, data.type) != (rows, type_):
        found = f"{data.n_rows} of {data.type}"
        raise Denied("layout", f"The run began with {rows} rows of {type_}; now there are {found}.")
    if mark_of(data, order) != started.mark:
        raise Denied(
            "data",
            "The rows of this site are not those that the run began with: as many, with other numbers. Put the data "
            "back as they were, or let a new run begin with these.",
        )


@lru_cache(maxsize=1)
def _fault(rows: Rows, columns: tuple[str, ...]) -> str:
    try:
        require_factorizable(rows.held, columns)
    except PartsongError as error:
        return str(error)
    return ""


@lru_cache(maxsize=2)
def _mark(rows: Rows, order: tuple[int, ...]) -> str:
    found = hashlib.sha256()
    for piece in _pieces(rows.held, order):
        found.update(piece)
    return found.hexdigest()


def _pieces(rows: Any, order: tuple[int, ...]) -> Iterator[bytes]:
    if isinstance(rows, HeldWords):
        yield "\n".join(rows.words).encode("utf-8", "surrogatepass")
        yield np.asarray(rows.documents, np.int64).tobytes()
        return
    yield f"{rows.shape[0]} × {len(order)} {rows.dtype}\n".encode()
    columns = None if order == tuple(range(rows.shape[1])) else list(order)
    if hasattr(rows, "tocsr"):
        chosen = rows.tocsr() if columns is None else rows.tocsr()[:, columns]
        chosen = chosen if chosen.has_canonical_format else chosen.copy()
        chosen.sum_duplicates()
        yield np.asarray(chosen.indptr, np.int64).tobytes()
        yield np.asarray(chosen.indices, np.int64).tobytes()
        yield np.ascontiguousarray(chosen.data).tobytes()
        return
    step = max(1, BLOCK // max(1, rows.dtype.itemsize * rows.shape[1]))
    for start in range(0, rows.shape[0], step):
        block = rows[start : start + step]
        yield np.ascontiguousarray(block if columns is None else block[:, columns]).tobytes()
