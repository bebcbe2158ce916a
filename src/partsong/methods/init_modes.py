"""Initialization of parties: `init_mode="shared"` (one H for all) or `"local"` (each party draws its own)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from partsong.core.interfaces import Array, Layout, Shard
from partsong.core.parameters import Choice
from partsong.core.streams import stream
from partsong.solvers.initialization import random_columns
from partsong.solvers.squared_error import SquaredError


@dataclass(frozen=True, slots=True)
class SharedInit:
    """All parties start from the server's H and fit W to it first."""

    def model(self, layout: Layout, rank: int, draw: np.random.Generator) -> Array | None:
        """Hᵀ (m × k) from U(0, 1)."""
        return random_columns(layout.n_features, rank, draw, layout.dtype)

    def columns(self, shard: Shard, model_Ht: Array | None, rank: int) -> Array:
        assert model_Ht is not None
        return model_Ht

    def weights(self, shard: Shard, Ht: Array, solver: SquaredError) -> Array:
        """The non-negative least squares fit to H."""
        return solver.solve_rows(shard.matrix, Ht)


@dataclass(frozen=True, slots=True)
class LocalInit:
    """Every party draws its own W and H, as in the FNMF paper; components end up in different orders.

    `announced`: the server first sends the mean of one U(0, 1) draw per party. It stands for the paper's mean of all
    H_p before the first round, without an exchange; a proximal term then pulls towards noise.
    """

    announced: bool = False

    def model(self, layout: Layout, rank: int, draw: np.random.Generator) -> Array | None:
        """The mean of the draws, or None."""
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

    def weights(self, shard: Shard, Ht: Array, solver: SquaredError) -> Array:
        """The party's own W, uniform, on a scale where W H has the mean of X (the paper takes U(0, 1) as it is)."""
        rank = Ht.shape[1]
        draw = stream(shard.secret, "start", shard.name, "W")
        return shard.matrix.native(draw.random((shard.matrix.shape[0], rank)) * (4.0 * shard.matrix.mean / rank))


SHARED_INIT, LOCAL_INIT = SharedInit(), LocalInit()

INIT_MODES = Choice({"shared": SHARED_INIT, "local": LOCAL_INIT}, needed=("model", "columns", "weights"))
ONLY_LOCAL = Choice({"local": LOCAL_INIT}, reason="Parties of this method draw their own start.")
ONLY_SHARED = Choice({"shared": SHARED_INIT}, reason="All parties of this method start from one H.")

InitMode = Annotated[SharedInit | LocalInit, INIT_MODES]
LocalInitMode = Annotated[LocalInit, ONLY_LOCAL]
SharedInitMode = Annotated[SharedInit, ONLY_SHARED]
"""For methods whose parties must start from one H."""
