"""Split the rows of a table over parties, for simulations: contiguous, iid, by label, by size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from partsong.errors import ParameterError, format_count

CONCENTRATIONS = (1e-300, 1e300)
"""Range of Dirichlet parameters for which gamma variates stay in the range of float64."""


def contiguous(rows: int, parties: int) -> list[np.ndarray]:
    """Split rows into equal contiguous ranges; the first parties get the remainder."""
    _require_enough(rows, parties)
    return [np.asarray(part) for part in np.array_split(np.arange(rows), parties)]


def iid(rows: int, parties: int, generator: np.random.Generator) -> list[np.ndarray]:
    """Split rows into equal random shares."""
    _require_enough(rows, parties)
    return [np.sort(part) for part in np.array_split(generator.permutation(rows), parties)]


def by_label(
    labels: Sequence[object] | np.ndarray, parties: int, generator: np.random.Generator, concentration: float = 3.0
) -> list[np.ndarray]:
    """Split into equal shares with skewed labels: party p draws from q_p ~ Dir(α f), concentration α, frequencies f.

    The parameters sum to α for any number of labels (Hsu et al., 2019). Rows are drawn without replacement; exhausted
    labels are dropped and the others renormalized. Small α give parties with few labels, large α the overall mixture.
    """
    values = np.asarray(labels)
    _require_enough(len(values), parties)
    _require_concentration(concentration)
    kinds, codes = np.unique(values, return_inverse=True)
    waiting = [list(generator.permutation(np.flatnonzero(codes == c))) for c in range(len(kinds))]
    frequencies = np.bincount(codes, minlength=len(kinds)) / len(values)
    sizes = [len(part) for part in np.array_split(np.arange(len(values)), parties)]
    return [_draw(waiting, generator.dirichlet(concentration * frequencies), s, generator) for s in sizes]


def by_size(rows: int, parties: int, generator: np.random.Generator, concentration: float = 1.0) -> list[np.ndarray]:
    """Split into random shares of unequal size: sizes follow Dir(concentration), with at least one row per party.

    A small concentration gives a few large parties and many small ones, a large one nearly equal parties.
    """
    _require_enough(rows, parties)
    _require_concentration(concentration)
    shares = generator.dirichlet(np.full(parties, concentration))
    sizes = 1 + generator.multinomial(rows - parties, shares)
    order = generator.permutation(rows)
    return [np.sort(part) for part in np.split(order, np.cumsum(sizes)[:-1])]


def _draw(waiting: list[list[int]], wanted: np.ndarray, size: int, generator: np.random.Generator) -> np.ndarray:
    taken: list[int] = []
    while len(taken) < size:
        left = np.array([len(rows) for rows in waiting])
        weights = np.where(left > 0, np.maximum(wanted, 1e-12), 0)
        counts = generator.multinomial(size - len(taken), weights / weights.sum())
        for rows, count in zip(waiting, np.minimum(counts, left), strict=True):
            taken += [rows.pop() for _ in range(int(count))]
    return np.sort(np.array(taken, dtype=np.int64))


def _require_concentration(concentration: float) -> None:
    least, most = CONCENTRATIONS
    if not least <= concentration <= most:
        raise ParameterError(
            f"concentration must be from {least:g} to {most:g}; got {concentration}. For equal random shares use iid.",
            parameter="concentration",
        )


def _require_enough(rows: int, parties: int) -> None:
    if parties < 1:
        raise ParameterError(f"parties must be at least 1; got {parties}.", parameter="parties")
    if parties > rows:
        raise ParameterError(
            f"{format_count(rows, 'row')} cannot be split into {parties} parties: each needs at least one row. "
            "Use fewer parties.",
            parameter="parties",
        )
