"""Explained variance of a pair of factors in float64, by the trace formula."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from partsong.core import runtime
from partsong.data.conversion import as_matrix
from partsong.solvers.squared_error import SquaredError

TILE_NUMBERS = 1 << 20


@dataclass(frozen=True)
class Problem:
    """X (n × m), dense or CSR, and the rank k."""

    X: Any
    rank: int

    @property
    def is_sparse(self) -> bool:
        return hasattr(self.X, "tocsr")

    @cached_property
    def squared_norm(self) -> float:
        """‖X‖² in float64."""
        if self.is_sparse:
            return float(np.square(self.X.data, dtype=np.float64).sum())
        return sum(float(np.square(tile, dtype=np.float64).sum()) for _, _, tile in self._tiles())

    def explained(self, W: Any, H: Any) -> float:
        """1 − ‖X − W H‖² / ‖X‖², products in float64."""
        exact_W, exact_H = np.asarray(W, np.float64), np.asarray(H, np.float64)
        if self.is_sparse:
            inner = float(np.vdot(exact_W, self.X @ np.ascontiguousarray(exact_H.T)))
        else:
            cross = np.zeros_like(exact_H, order="C")
            for start, stop, tile in self._tiles():
                cross += exact_W[start:stop].T @ tile.astype(np.float64)
            inner = float(np.vdot(cross, exact_H))
        model = float(np.vdot(exact_W.T @ exact_W, exact_H @ exact_H.T))
        return (2 * inner - model) / self.squared_norm

    def weights(self, H: Any) -> np.ndarray:
        """Fit W ≥ 0 to H, for methods that learn H from a stream and keep no W."""
        with runtime.limit_kernel_threads(runtime.available_threads()):
            return SquaredError().solve_rows(self._matrix, self._matrix.native(np.ascontiguousarray(np.asarray(H).T)))

    def random_start(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """W and H with entries √(mean of X / k)·|N(0, 1)|: the start that most libraries call random."""
        generator = np.random.default_rng([seed, 1])
        n, m = self.X.shape
        scale = np.sqrt(float(self.X.mean()) / self.rank)
        W, H = (scale * np.abs(generator.standard_normal(size)) for size in ((n, self.rank), (self.rank, m)))
        return W.astype(self.X.dtype), H.astype(self.X.dtype)

    def head(self, rows: int) -> Problem:
        """The first rows, to compile and warm up with."""
        return Problem(self.X[:rows], self.rank)

    @cached_property
    def _matrix(self) -> Any:
        return as_matrix(self.X)

    def _tiles(self) -> Any:
        height = max(1, TILE_NUMBERS // self.X.shape[1])
        for start in range(0, self.X.shape[0], height):
            stop = min(start + height, self.X.shape[0])
            yield start, stop, self.X[start:stop]
