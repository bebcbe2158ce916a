"""Who owns which rows: splits of a table into parties, for simulations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from partsong.errors import ParameterError

CONCENTRATIONS = (1e-300, 1e300)
"""Between these the parameters of a Dirichlet distribution, and the gamma variates it is made of, stay in float64."""


def contiguous(rows: int, parties: int) -> list[np.ndarray]:
    """Equal runs of neighbouring rows; the first parties take the remainder."""
    _require_enough(rows, parties)
    return [np.asarray(part) for part in np.array_split(np.arange(rows), parties)]


def iid(rows: int, parties: int, generator: np.random.Generator) -> list[np.ndarray]:
    """Equal random shares."""
    _require_enough(rows, parties)
    return [np.sort(part) for part in np.array_split(generator.permutation(rows), parties)]


def by_label(
    labels: Sequence[object] | np.ndarray, parties: int, generator: np.random.Generator, concentration: float = 3.0
) -> list[np.ndarray]:
    """Equal shares with skewed labels: party p draws rows from q_p ~ Dir(α f), α the concentration, f the frequencies.

    The parameters add up to α, whatever the number of labels (Hsu et al., 2019). Rows are drawn without replacement;
    a label that has run out is dropped and the rest renormalised. Small α give parties with few labels, large α the
    overall mixture.
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
    """Random shares of unequal size: sizes follow Dir(concentration), and every party has at least one row.

    Small concentrations give a few large parties and many small ones, large ones nearly equal parties.
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
            f"concentration must be more than 0 and finite ({least:g} to {most:g}); got {concentration}. Large ones "
            "come near to equal random shares: for those themselves use iid.",
            parameter="concentration",
        )


def _require_enough(rows: int, parties: int) -> None:
    if parties < 1:
        raise ParameterError(f"A split needs at least one party; got {parties}.", parameter="parties")
    if parties > rows:
        raise ParameterError(
            f"{rows} rows cannot be split into {parties} parties: each needs at least one row.", parameter="parties"
        )
