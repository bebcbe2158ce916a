"""A finding: one thing worth knowing about a matrix, with its place and its remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from partsong.data.scan import Indices

SHOWN = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing worth knowing about a matrix. Errors keep it from being factorized; notes do not.

    `rows` and `columns` are the first few concerned, counted from 0; `count` is the number of cells, rows, columns or
    names in all, whichever the message speaks of.
    """

    kind: str
    severity: Literal["error", "note"]
    message: str
    remedy: str
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    count: int = 0


def labelled(indices: Indices, names: Sequence[str] | None) -> list[str]:
    """The first few as text, with their names where these are known."""
    shown = few(indices)
    if names is None or any(index >= len(names) for index in shown):
        return [str(index) for index in shown]
    return [f"{index} ({str(names[index])!r})" for index in shown]


def few(indices: Indices) -> tuple[int, ...]:
    """The first few, as plain numbers."""
    return tuple(int(index) for index in indices[:SHOWN])
