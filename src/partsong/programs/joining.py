"""How a party begins: its first round, and every round after a new model has come."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partsong import kernels
from partsong.align.assignment import PartialAssignment
from partsong.align.plan import Matching
from partsong.core import Alignment, Array, Layout, Shard
from partsong.local.alternate import Alternate
from partsong.local.start import random_columns
from partsong.streams import stream


@dataclass(frozen=True, slots=True)
class CommonStart:
    """All parties begin with the server's H, and fit W to it before they move."""

    def model(self, layout: Layout, rank: int, draw: np.random.Generator) -> Array | None:
        """Hᵀ (m × k) from U(0, 1)."""
        return random_columns(layout.n_features, rank, draw, layout.dtype)

    def columns(self, shard: Shard, model_Ht: Array | None, rank: int) -> Array:
        """The server's."""
        assert model_Ht is not None
        return model_Ht

    def weights(self, shard: Shard, Ht: Array, solver: Alternate) -> Array:
        """The non-negative least squares fit to H."""
        return solver.solve_rows(shard.matrix, Ht)


@dataclass(frozen=True, slots=True)
class IndependentStart:
    """Every party draws a W and an H of its own, as the FNMF paper does; components come out in different orders.

    `announced`: the server first sends the mean of as many draws from U(0, 1) as there are parties. That is what the
    paper's mean of all H_p before the first round looks like, without an exchange for it; it pulls towards noise.
    """

    announced: bool = False

    def model(self, layout: Layout, rank: int, draw: np.random.Generator) -> Array | None:
        """The mean of draws, or nothing."""
        if not self.announced:
            return None
        total = np.zeros((layout.n_features, rank))
        for _ in layout.parties:
            total += draw.random(total.shape)
        return (total / len(layout.parties)).astype(layout.dtype, copy=False)

    def columns(self, shard: Shard, model_Ht: Array | None, rank: int) -> Array:
        """The party's own Hᵀ, U(0, 1), from its private stream."""
        draw = stream(shard.secret, "start", shard.name)
        return shard.matrix.native(random_columns(shard.matrix.shape[1], rank, draw))

    def weights(self, shard: Shard, Ht: Array, solver: Alternate) -> Array:
        """The party's own W, uniform, on a scale where W H has the mean of X (the paper takes U(0, 1) as it is)."""
        rank = Ht.shape[1]
        draw = stream(shard.secret, "start", shard.name, "W")
        return shard.matrix.native(draw.random((shard.matrix.shape[0], rank)) * (4.0 * shard.matrix.mean / rank))


@dataclass(frozen=True, slots=True)
class Overwrite:
    """H_p ← H. With `follow`, the party finds where its components went, from its own last H_p, and W goes with them.

    P = follow(H, H_p) puts H_p in the order of H, so W ← W Pᵀ. Soft plans have no such order: W is fitted anew by
    sweeps instead. Without `follow` W stays in the order it had, as printed in the FNMF paper.
    """

    follow: Alignment | None = None

    def begin(
        self, shard: Shard, W: Array, own_Ht: Array | None, model_Ht: Array | None, solver: Alternate
    ) -> tuple[Array, Array]:
        """Hᵀ and W to go on from."""
        assert model_Ht is not None
        if self.follow is None or own_Ht is None:
            return model_Ht, W
        plan = self.follow.plan(model_Ht.T, own_Ht.T)
        if isinstance(plan, Matching) and plan.is_permutation:
            on = kernels.of(W)
            order = plan.partners
            is_same = (order == np.arange(len(order))).all()
            return model_Ht, W if is_same else on.rows_of(plan.apply(W.T))
        return model_Ht, solver.solve_rows(shard.matrix, model_Ht, exactly=False)


@dataclass(frozen=True, slots=True)
class Personal:
    """Components that have a partner in the shared model take its values, in the party's own order; others are kept."""

    align: Alignment = PartialAssignment()

    def begin(
        self, shard: Shard, W: Array, own_Ht: Array | None, model_Ht: Array | None, solver: Alternate
    ) -> tuple[Array, Array]:
        """Hᵀ and W to go on from; W is in the party's order already."""
        assert model_Ht is not None
        assert own_Ht is not None
        plan = self.align.plan(own_Ht.T, model_Ht.T)
        on = kernels.of(own_Ht)
        kept = on.like(1.0 - plan.weights, own_Ht)
        return own_Ht * kept + on.rows_of(plan.apply(model_Ht.T)), W
