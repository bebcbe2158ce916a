"""Model to numbers, from sums of two numbers per party; no data moves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from partsong import kernels
from partsong.core import Array, Shard
from partsong.local.alternate import Alternate


def relative_error(solver: Alternate, shards: Sequence[Shard], H: Array) -> float:
    """‖X − W H‖ / ‖X‖ over all parties, with W refitted to H at each of them."""
    error = energy = 0.0
    for shard in shards:
        local = kernels.of(H).rows_of(H)
        local = shard.matrix.native(local)
        W = solver.solve_rows(shard.matrix, local)
        error += shard.matrix.squared_distance(W, local)
        energy += shard.matrix.squared_norm
    return float(np.sqrt(np.maximum(0.0, error) / energy)) if energy > 0 else 0.0
