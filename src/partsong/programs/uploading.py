"""What a party sends when it has iterated: its H as it is, or in the order of the shared model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from partsong import kernels
from partsong.aggregate.linear import AlignedMean
from partsong.align.assignment import Assignment
from partsong.core import Aggregation, Alignment, Array, Form, Layout, Message, Shard
from partsong.errors import CompositionError, PartyError

LONE = (
    "Take an alignment in which every row has a partner, P 1 = 1, and which says so by is_partial = False (Assignment, "
    "Sinkhorn), or accept that such a row is seen: AlignedUpload(…, shows_lone_rows=True)."
)


@dataclass(frozen=True, slots=True)
class WholeUpload:
    """H_p (k × m) and the number of rows; whoever aggregates finds out which component is which."""

    def check(self, aggregation: Aggregation, sweeps: int) -> None:
        """One exchange a round."""
        if sweeps > 1:
            raise CompositionError(
                "Several sweeps per round need AlignedUpload: without it the second says nothing new."
            )

    def message(self, shard: Shard, Ht: Array | None, model_Ht: Array | None, is_late: bool, rank: int) -> Message:
        """H_p and n_p."""
        if Ht is None or is_late:
            raise PartyError(f"Party {shard.name!r} has nothing to send: it missed the beginning of this round.")
        return Message({"H": Ht.T}, weight=float(shard.matrix.shape[0]))

    def expected(self, rank: int, layout: Layout) -> Mapping[str, Form]:
        """H_p ≥ 0."""
        return {"H": Form((rank, layout.n_features), non_negative=True, is_factor=True)}

    def agreed(self, aggregate: Message, model: Message) -> Message:
        """The aggregate itself."""
        return aggregate


@dataclass(frozen=True, slots=True)
class AlignedUpload:
    """P_p H_p (k × m) and the counts P_p 1 (k), with P_p = align(H, H_p): a sweep of the barycenter is one sum.

    So no single H_p is needed by anybody, and the sum can be masked. The same as `aggregate.barycenter.FixedPoint`
    from the same start, sweep by sweep. Where there is no model yet the first sum is by position.

    Where the count of a row is 1, its sum is one party's row as it is. Plans without partners for every row can lead to
    that, so masked reductions refuse an alignment that is partial, or does not say that it is not (`is_partial`),
    unless `shows_lone_rows` says that it is known and accepted.
    """

    align: Alignment = Assignment()
    shows_lone_rows: bool = False

    def check(self, aggregation: Aggregation, sweeps: int) -> None:
        """Needs the aggregation that divides by the counts."""
        if not isinstance(aggregation, AlignedMean):
            raise CompositionError(
                f"AlignedUpload sends sums and counts, which {aggregation} cannot read: use AlignedMean."
            )

    def message(self, shard: Shard, Ht: Array | None, model_Ht: Array | None, is_late: bool, rank: int) -> Message:
        """P_p H_p and P_p 1; zeros from a party that did not iterate in this round."""
        rows = float(shard.matrix.shape[0])
        if Ht is None or is_late:
            zeros = shard.matrix.native(np.zeros((rank, shard.matrix.shape[1])))
            return Message({"H": zeros, "counts": np.zeros(rank)}, 0.0)
        if model_Ht is None:
            return Message({"H": kernels.of(Ht).rows_of(Ht), "counts": np.ones(rank)}, rows)
        plan = self.align.plan(model_Ht.T, Ht.T)
        if not hasattr(plan, "apply") or not hasattr(plan, "weights"):
            raise CompositionError(
                f"{type(self.align).__name__}.plan returned {type(plan).__name__}, which is no plan: it needs matrix "
                "(k × k), weights = P 1 and apply (see core.Plan). Wrap a matrix P as align.plan.Blend(P)."
            )
        return Message({"H": plan.apply(Ht.T), "counts": plan.weights}, rows)

    def expected(self, rank: int, layout: Layout) -> Mapping[str, Form]:
        """P_p H_p ≥ 0 and P_p 1 ≥ 0."""
        H = Form((rank, layout.n_features), non_negative=True, is_factor=True)
        counts = Form((rank,), non_negative=True)
        if self.shows_lone_rows or not getattr(self.align, "is_partial", True):
            return {"H": H, "counts": counts}
        lone = f"{type(self.align).__name__} may find a partner for a row at one party only. {LONE}"
        return {"H": replace(H, lone=lone), "counts": counts}

    def agreed(self, aggregate: Message, model: Message) -> Message:
        """The mean; rows that nobody has matched stay as they were."""
        empty = np.flatnonzero(aggregate["counts"] <= 0)
        H = aggregate["H"]
        if len(empty):
            H = H + 0
            before = kernels.of(H).like(kernels.of(model["H"]).to_numpy(model["H"]), H)
            for row in empty.tolist():
                H[row] = before[row]
        return Message({"H": H}, aggregate.weight)
