"""Cells that are not known: blanks and NaN in tables, and what a sparse file does not store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from partsong.cli.choices import IGNORE
from partsong.cli.outputs import warn
from partsong.errors import DataError, FormatError, PartsongError, first_few

if TYPE_CHECKING:
    import numpy as np

    from partsong.data.table import Table

NOTHING_KNOWN = "No cell is known: all are blank, NaN or not stored. Give at least one number."
LEAVE_THEM_OUT = (
    "A game can leave out cells that are not known: --missing ignore (--solver game, of parts --method game)."
)
FIT_WITHOUT_THEM = "`partsong fit` can leave out cells that are not known: --solver game --missing ignore."


def with_known_cells(table: Table, missing: str | None) -> Table:
    """The table as it is, or where unknown cells are ignored as CSR of the known ones, zeros among them."""
    if missing != IGNORE:
        return table
    from partsong.data.known_cells import known_cells

    try:
        return replace(table, X=known_cells(table.X))
    except PartsongError as error:
        raise type(error)(f"{table.source}: {error}") from error


def require_known(tables: Iterable[Table]) -> None:
    """Refuse tables of known cells that have none."""
    for table in tables:
        if not table.X.nnz:
            raise DataError(f"{table.source}: {NOTHING_KNOWN}")


def known_by_column(tables: Iterable[Table]) -> np.ndarray:
    """How many cells of each column are known to anybody; the tables hold known cells alone."""
    import numpy as np

    held = [table.X for table in tables]
    return np.bincount(np.concatenate([X.indices for X in held]), minlength=held[0].shape[1])


def warn_of_unknown_columns(counts: np.ndarray, names: Sequence[str] | None, *, is_random: bool) -> None:
    """Warn of columns without a known cell: between parties and ranks they stay as random as they began."""
    from partsong.data.finding import labelled

    empty = (counts == 0).nonzero()[0]
    if empty.size:
        shown = first_few(labelled(empty, names), empty.size, "column")
        they, them = ("it is", "it") if empty.size == 1 else ("they are", "them")
        so = f"what the model says of {them} means nothing" if is_random else f"{they} zero in every component"
        warn(f"Nothing is known of {shown} (counted from 0): {so}.")


@contextmanager
def hinting_at_games(hint: str = LEAVE_THEM_OUT) -> Iterator[None]:
    """Within this block gaps in the data are told to be no hindrance to a game."""
    try:
        yield
    except (DataError, FormatError) as error:
        if any(words in str(error) for words in ("NaN in data", "look like missing values")):
            error.add_note(hint)
        raise
