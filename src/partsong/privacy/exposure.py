"""What sums without noise give away, by counting: combinations of rows that were sent, against rows behind a column.

A sum WᵀX over a party's rows is k linear combinations of them. Once a party has sent more combinations than a column
has rows with a value, that column can be computed back by somebody who knows the weights, and often by somebody who
does not; with enough of them, so can the rows. The counts below are what a site can keep to, over all runs together.
They hold for a coordinator that follows the protocol. Only noise protects against one that does not.

    L   directions: linear combinations of the site's rows that were sent without noise, over all runs
    s   rows of the site with a value above zero in the rarest column that has one
    s̄   mean number of such rows over the columns that have one

    guess        L ≤ s/10   somebody who holds a whole record may guess that it was used
    membership   L ≤ s/2    ... can tell in most cases; no column is determined, even by somebody who knows W
    entries      L ≤ s̄/2    values of rare columns may be computed
    rows         L > s̄/2    rows may be computed
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

from partsong.errors import ParameterError


class Exposure(enum.StrEnum):
    """From least to worst. `BOUNDED`: all that left had noise. `UNKNOWN`: H was sent, for which no law is known."""

    BOUNDED = "bounded"
    UNKNOWN = "unknown"
    GUESS = "guess"
    MEMBERSHIP = "membership"
    ENTRIES = "entries"
    ROWS = "rows"

    @property
    def severity(self) -> int:
        """A number that grows with what may be computed."""
        return list(Exposure).index(self)

    def within(self, limit: Exposure) -> bool:
        """Whether this is no worse than `limit`."""
        return self.severity <= limit.severity


LIMITS = (Exposure.GUESS, Exposure.MEMBERSHIP, Exposure.ENTRIES, Exposure.ROWS)
"""What a site may set as its maximum."""

MEANING = {
    Exposure.BOUNDED: "Every upload had noise: what anyone can learn of one unit is bounded by (ε, δ).",
    Exposure.UNKNOWN: (
        "Only H was sent. No law is known for it; membership tests reached an AUC of .53 to .69 in our measurements."
    ),
    Exposure.GUESS: "Somebody who holds a person's whole record may guess that it was used.",
    Exposure.MEMBERSHIP: (
        "Somebody who holds a person's whole record can tell in most cases whether it was used. No column of the table "
        "is determined."
    ),
    Exposure.ENTRIES: "Values of rare columns may be computed back.",
    Exposure.ROWS: "Rows may be computed back.",
}


def worst(levels: Iterable[Exposure]) -> Exposure:
    """The worst of these; `BOUNDED` where there are none."""
    return max(levels, key=lambda one: one.severity, default=Exposure.BOUNDED)


def parse_limit(value: Any, name: str = "maximum_exposure") -> Exposure:
    """A limit by its name."""
    if isinstance(value, str) and value in tuple(LIMITS):
        return Exposure(value)
    raise ParameterError(f"{name} must be one of {', '.join(LIMITS)}; got {value!r}.")


def column_supports(X: Any) -> np.ndarray:
    """For each column, the number of rows with a value above zero (m), whatever the storage format."""
    if sp.issparse(X):
        held = sp.coo_array(X)
        held.sum_duplicates()
        return np.bincount(held.col[held.data > 0], minlength=held.shape[1])
    if hasattr(X, "detach"):  # a tensor
        return np.asarray((X > 0).sum(0).cpu(), dtype=np.int64)
    return np.count_nonzero(np.asarray(X) > 0, axis=0)


@dataclass(frozen=True, slots=True)
class Support:
    """How many rows there are, and how many have a value in the rarest column and in the mean column."""

    rows: int
    rarest: int
    mean: float

    @staticmethod
    def of(X: Any) -> Support:
        """Of a table, dense or sparse. Columns of zeros do not count; a table of zeros has the support of its rows."""
        return Support.from_counts(int(X.shape[0]), column_supports(X))

    @staticmethod
    def from_counts(rows: int, counts: np.ndarray) -> Support:
        """From the number of rows and `column_supports`."""
        used = counts[counts > 0]
        if not len(used):
            return Support(rows, rows, float(rows))
        return Support(rows, int(used.min()), float(used.mean()))

    def least(self, other: Support) -> Support:
        """The smaller of each number: the support that counts where two tables were used."""
        return Support(min(self.rows, other.rows), min(self.rarest, other.rarest), min(self.mean, other.mean))

    def exposure(self, directions: int) -> Exposure:
        """What may be computed from so many directions, by the table at the top of this module."""
        if 10 * directions <= self.rarest:
            return Exposure.GUESS
        if 2 * directions <= self.rarest:
            return Exposure.MEMBERSHIP
        return Exposure.ENTRIES if 2 * directions <= self.mean else Exposure.ROWS

    def most_directions(self, limit: Exposure) -> int | None:
        """The largest number of directions that stays within a limit; None: any number does."""
        match limit:
            case Exposure.GUESS:
                return self.rarest // 10
            case Exposure.MEMBERSHIP:
                return self.rarest // 2
            case Exposure.ENTRIES:
                return math.floor(self.mean / 2)
            case Exposure.ROWS:
                return None
        raise ParameterError(f"maximum_exposure must be one of {', '.join(LIMITS)}; got {limit!r}.")


def directions_of(program: Any, model: Any = None) -> int:
    """Directions in the upload that answers `model` (None: the most that any upload of this program has).

    0 where every upload has noise or none is a combination of rows, as for H.
    """
    if getattr(program, "release", None) is not None:
        return 0
    hook = getattr(program, "directions", None)
    return 0 if hook is None else int(hook(model))


def planned_directions(program: Any, exchanges: int) -> int:
    """Directions in all uploads of a run of so many exchanges."""
    if getattr(program, "release", None) is not None:
        return 0
    hook = getattr(program, "planned_directions", None)
    return exchanges * directions_of(program) if hook is None else int(hook(exchanges))
