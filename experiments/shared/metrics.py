"""Reconstruction errors at each party, Σ RMSD of the FNMF paper, and mean ± standard deviation over seeds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from partsong import kernels
from partsong.core.interfaces import Array, RowSolver, Shard


def distances(shards: Sequence[Shard], H: Array, solver: RowSolver) -> np.ndarray:
    """‖X_j − W_j H‖ at each party in the order given, with W_j refitted to H (k × m)."""
    found = []
    for shard in shards:
        Ht = shard.matrix.native(kernels.of(H).rows_of(H))
        found.append(shard.matrix.squared_distance(solver.solve_rows(shard.matrix, Ht), Ht))
    return np.sqrt(np.maximum(0.0, np.array(found, np.float64)))


def rmsd_sum(shards: Sequence[Shard], far: np.ndarray) -> float:
    """Σ_j ‖X_j − W_j H‖ / √(n_j m), from these distances."""
    return float(sum(far / np.sqrt([shard.matrix.shape[0] * shard.matrix.shape[1] for shard in shards])))


def spread(values: Sequence[float], digits: int = 3) -> str:
    """mean ± standard deviation over seeds."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{np.mean(values):.{digits}f} ± {np.std(values, ddof=1):.{digits}f}"
