"""Exposure of sums without noise: compare the linear combinations sent with the rows behind each column.

A sum WᵀX over a party's rows is k linear combinations of them. Once a party has sent more combinations than a column
has rows with a value, anyone who knows the weights can compute that column, and often others can, too. With enough
combinations, rows can be computed as well. A site can enforce the limits below over all runs together. They hold for a
coordinator that follows the protocol. Only noise protects against one that does not.

    L   directions: linear combinations of the site's rows that were sent without noise, over all runs
    s   rows of the site with a value above zero in the rarest column that has one
    s̄   mean number of such rows over the columns that have one

    guess        L ≤ s/10   someone who holds a whole record may guess that it was used
    membership   L ≤ s/2    ... can tell in most cases; no column is determined, even for someone who knows W
    entries      L ≤ s̄/2    values of rare columns may be computed
    rows         L > s̄/2    rows may be computed
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

from partsong.core.interfaces import Shard
from partsong.errors import ParameterError, format_count


class Exposure(enum.StrEnum):
    """Levels from best to worst. `BOUNDED`: every upload had noise. `UNKNOWN`: only H was sent; no bound is known."""

    BOUNDED = "bounded"
    UNKNOWN = "unknown"
    GUESS = "guess"
    MEMBERSHIP = "membership"
    ENTRIES = "entries"
    ROWS = "rows"

    @property
    def severity(self) -> int:
        """The rank of this level; larger is worse."""
        return list(Exposure).index(self)

    def within(self, limit: Exposure) -> bool:
        """Return whether this is no worse than `limit`."""
        return self.severity <= limit.severity


LIMITS = (Exposure.GUESS, Exposure.MEMBERSHIP, Exposure.ENTRIES, Exposure.ROWS)
"""What a site may set as its maximum."""

MEANING = {
    Exposure.BOUNDED: "Every upload had noise: what anyone can learn of one unit is bounded by (ε, δ).",
    Exposure.UNKNOWN: (
        "Only H was sent. No bound is known for what it reveals; membership tests reached an AUC of .53 to .85 in our "
        "measurements."
    ),
    Exposure.GUESS: "Someone who holds a person's whole record may guess that it was used.",
    Exposure.MEMBERSHIP: (
        "Someone who holds a person's whole record can tell in most cases whether it was used. No column of the table "
        "is determined; a row unlike all others can still stand out."
    ),
    Exposure.ENTRIES: "Values of rare columns may be computed back.",
    Exposure.ROWS: "Rows may be computed back.",
}


BLOCK = 1 << 22
"""Numbers processed at a time, so that a memory-mapped file is never loaded whole."""


def worst(levels: Iterable[Exposure]) -> Exposure:
    """The worst of these; `BOUNDED` where there are none."""
    return max(levels, key=lambda one: one.severity, default=Exposure.BOUNDED)


def rows_per_direction(limit: Exposure) -> int:
    """Return how many rows must use a column for each direction that is sent, to stay within a limit."""
    return 10 if limit is Exposure.GUESS else 2


def column_supports(X: Any) -> np.ndarray:
    """Count the rows with a value above zero in each column (m): of arrays, sparse arrays, tensors, or a `Matrix`."""
    for name in ("row_block", "by_row", "X"):  # what a Matrix is made of
        if hasattr(X, name):
            return column_supports(getattr(X, name))
    if sp.issparse(X):
        held = sp.coo_array(X)
        held.sum_duplicates()
        return np.bincount(held.col[held.data > 0], minlength=held.shape[1])
    if hasattr(X, "detach"):
        dense = X if str(X.layout) == "torch.strided" else X.to_dense()
        return np.asarray((dense > 0).sum(0).cpu(), dtype=np.int64)
    values = np.asarray(X)
    counts = np.zeros(values.shape[1], np.int64)
    step = max(1, BLOCK // max(1, values.shape[1]))
    for start in range(0, len(values), step):
        counts += np.count_nonzero(values[start : start + step] > 0, axis=0)
    return counts


@dataclass(frozen=True, slots=True)
class Support:
    """The number of rows, and how many have a value in the rarest column and in a column on average."""

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

    def __str__(self) -> str:
        return (
            f"This table has {format_count(self.rows, 'row')}; its rarest column has a value in {self.rarest} "
            "of them. For a "
            f"federation with exact rounds, count rounds × components over all runs. Above {self.rarest // 2}, values "
            f"can be computed back. Above {self.rarest // 10}, someone who holds a person's record can do more than "
            "guess that it was used."
        )

    def to_dict(self) -> dict[str, int]:
        """Plain values: rows, those that use the rarest column, and how many directions stay within each limit."""
        own = {"rows": self.rows, "rarest_column": self.rarest}
        return {**own, "most_for_guess": self.rarest // 10, "most_for_membership": self.rarest // 2}

    def exposure(self, directions: int) -> Exposure:
        """Return the exposure level for this many directions, by the table at the top of this module."""
        if 10 * directions <= self.rarest:
            return Exposure.GUESS
        if 2 * directions <= self.rarest:
            return Exposure.MEMBERSHIP
        return Exposure.ENTRIES if 2 * directions <= self.mean else Exposure.ROWS

    def max_directions(self, limit: Exposure) -> int | None:
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


ALL_ROWS = 1 << 40
"""Directions charged for an upload that determines XᵀX: more than any table has."""


def counted(directions: int, rows: int) -> int:
    """Directions for a ledger or a message: the number of rows where an upload shows all of them."""
    return rows if directions >= ALL_ROWS else directions


def directions_of(program: Any, model: Any = None) -> int:
    """Count the directions in the upload that answers `model`; 0 where it has noise, or is no combination of rows."""
    return 0 if program.traits.release is not None else int(program.directions(model))


def directions_after(program: Any, exchanges: int, parties: int = 1) -> int:
    """Count the directions in all uploads of one of so many parties in so many exchanges."""
    return 0 if program.traits.release is not None else int(program.directions_after(exchanges, parties))


def exposure_level(program: Any, directions: int, support: Support) -> Exposure:
    """Return the exposure of a party that has sent this many directions of rows with this support."""
    if program.traits.release is not None:
        return Exposure.BOUNDED
    return support.exposure(directions) if directions else Exposure.UNKNOWN


@dataclass(frozen=True, slots=True)
class PartyExposure:
    """What a run of `exchanges` exchanges of a rank has given away of a party, by the law alone.

    `max_exchanges` and `max_rank`: how many exchanges of this rank, or which rank with as many exchanges, would have
    stayed within `membership`; 0: none. A round has `per_round` exchanges.
    """

    party: str
    level: Exposure
    directions: int
    exchanges: int
    rank: int
    support: Support
    max_exchanges: int = 0
    max_rank: int = 0
    per_round: int = 1

    @staticmethod
    def of(party: str, program: Any, exchanges: int, support: Support, parties: int = 1) -> PartyExposure:
        """From a program, how often the party has answered, and how many parties there are."""
        rank, sent = int(program.rank), directions_after(program, exchanges, parties)
        most = support.rarest // 2
        longest = max_exchanges(program, most, parties)
        highest = 0 if not sent else min(rank, most * rank // sent)
        per_round = max(1, int(program.exchanges(2, parties) - program.exchanges(1, parties)))
        level, sent = exposure_level(program, sent, support), counted(sent, support.rows)
        return PartyExposure(party, level, sent, exchanges, rank, support, longest, highest, per_round)

    @property
    def rounds(self) -> int:
        """Rounds that were started."""
        return -(-self.exchanges // self.per_round)

    @property
    def max_rounds(self) -> int:
        """Whole rounds of this rank that stay within `membership`."""
        return self.max_exchanges // self.per_round

    def __str__(self) -> str:
        if self.level is Exposure.UNKNOWN:
            return f"Exposure: unknown. {MEANING[self.level]}"
        if self.level is Exposure.BOUNDED:
            return f"Exposure: bounded. {MEANING[self.level]}"
        return (
            f"Exposure: {self.level}. {format_count(self.rounds, 'round')} × "
            f"{format_count(self.rank, 'component')} sent "
            f"{format_count(self.directions, 'combination')} of the {format_count(self.support.rows, 'row')} of "
            f"{self.party} (rarest column: {format_count(self.support.rarest, 'row')}). {MEANING[self.level]} "
            f"{self.advice}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values; None where no law says how many rounds, or which rank, there may be."""
        own = {"level": str(self.level), "party": self.party, "directions": self.directions, "rounds": self.rounds}
        support = {"rank": self.rank, "rows": self.support.rows, "rarest_column": self.support.rarest}
        return {
            **own,
            **support,
            "most_rounds": self.max_rounds if self.directions else None,
            "most_rank": self.max_rank if self.directions else None,
        }

    @property
    def advice(self) -> str:
        """The largest run that would have stayed within `membership`."""
        most, stays = format_count(self.max_rounds, "round"), "stays" if self.max_rounds == 1 else "stay"
        if self.level.within(Exposure.MEMBERSHIP):
            return f"At most {most} of this rank {stays} at level membership."
        if not self.max_rounds and not self.max_rank:
            return "Not even one exact round stays at level membership here. Use noise."
        rank = f" (or rank {self.max_rank})" if self.max_rank else ""
        return f"At most {most}{rank} {stays} at level membership."


def max_exchanges(program: Any, most: int, parties: int = 1, ceiling: int = 1 << 20) -> int:
    """Find the largest number of exchanges of a program whose directions are at most `most`."""
    if directions_after(program, ceiling, parties) <= most:
        return ceiling
    low, high = 0, ceiling
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if directions_after(program, middle, parties) <= most else (low, middle)
    return low


def party_exposures(program: Any, shards: Sequence[Shard], exchanges: int) -> dict[str, PartyExposure]:
    """What a run of a program has given away of each party, by name; as if none had missed an exchange."""
    return {
        shard.name: PartyExposure.of(shard.name, program, exchanges, Support.of(shard.matrix), len(shards))
        for shard in shards
    }


def worst_party(parties: Iterable[PartyExposure]) -> PartyExposure:
    """Return the most exposed party; in a tie, the one with the most directions relative to its rarest column."""
    return max(parties, key=lambda one: (one.level.severity, one.directions / max(1, one.support.rarest)))


def summarize_simulated_runs(runs: Iterable[tuple[str, Any, int]], shards: Sequence[Shard]) -> list[str]:
    """Describe simulated runs (name, program, exchanges), each by the party that it exposes most; those that send H
    alone share a line.
    """
    lines, unknown = [], []
    for name, program, exchanges in runs:
        worst_one = worst_party(party_exposures(program, shards, exchanges).values())
        if worst_one.level is Exposure.UNKNOWN:
            unknown.append(name)
            continue
        is_refused = not worst_one.level.within(Exposure.MEMBERSHIP)
        why = " This is a simulation in one process; between institutions a site refuses such a run."
        lines.append(f"{name}. {worst_one}{why if is_refused else ''}")
    return ([f"{'; '.join(unknown)}. Exposure: unknown. {MEANING[Exposure.UNKNOWN]}"] if unknown else []) + lines
