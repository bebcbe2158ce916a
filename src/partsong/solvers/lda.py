"""Topic inference for latent Dirichlet allocation (LDA): the variational E-step for given topics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from scipy import sparse

from partsong import kernels
from partsong.core import runtime
from partsong.core.interfaces import Array, Matrix, type_name
from partsong.data.conversion import to_values
from partsong.errors import DataError, ParameterError, ShapeError
from partsong.kernels import lda as compiled_lda

TYPICAL_ITERATIONS = 10
"""Typical iterations per document, used to decide whether threads pay off."""
DIGAMMA_COST = 12
"""Cost of exp ψ in multiply-adds."""


@dataclass(frozen=True, slots=True)
class InferenceResult:
    """γ (n × k), expected word counts by topic Σ_d count_dw φ_dwl (V × k), and the documents' terms of the bound."""

    gamma: np.ndarray
    counts: np.ndarray
    bound: float


@dataclass(frozen=True, slots=True)
class TopicInference:
    """q(θ_d) = Dirichlet(γ_d) of each document, from its own words and B alone (Blei, Ng & Jordan, 2003, eq. 6 and 7):

        φ_dw ∝ exp(E[log θ_d]) ∘ B_w,      γ_d ← α + Σ_w count_dw φ_dw,      from γ_d = 1

    until the mean change of γ_d is below `tolerance`, at most `iterations` times. B_w = exp E[log β_w] during training,
    as in scikit-learn, and β_w itself for a finished model. A document without words has γ = α.
    """

    alpha: float
    iterations: int = 100
    tolerance: float = 1e-3
    is_mixture: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (0 < self.alpha < math.inf):
            raise ParameterError(
                f"alpha (the prior of a document's topics) must be above zero and finite; got {self.alpha}.",
                parameter="alpha",
            )
        if self.iterations < 1 or not self.tolerance >= 0:
            raise ParameterError(
                "The E-step needs iterations ≥ 1 and tolerance ≥ 0; got "
                f"iterations={self.iterations} and tolerance={self.tolerance}."
            )

    def infer(self, matrix: Matrix, B: np.ndarray, gamma: np.ndarray | None = None) -> InferenceResult:
        """Infer γ from an initial one, and the sums over documents that update the topics; B is (V × k)."""
        rows, B = _kernel_args(matrix, B)
        start = np.ones((rows.shape[0], B.shape[1])) if gamma is None else np.array(gamma, np.float64)
        if start.shape != (rows.shape[0], B.shape[1]):
            raise ShapeError(
                f"gamma must have shape ({rows.shape[0]}, {B.shape[1]}) for {rows.shape[0]} documents and {B.shape[1]} "
                f"topics; got {start.shape}. Pass gamma=None to start from 1."
            )

        def work(first: int, last: int) -> tuple[np.ndarray, float]:
            sums = np.zeros(B.shape)
            return sums, self._infer_piece(rows, B, start, sums, (first, last))

        (counts, bound), *others = runtime.map_ranges(self._pieces(rows, B.shape[1]), work)
        for more, part in others:
            counts += more
            bound += part
        counts *= B
        return InferenceResult(start, counts, bound)

    def solve_rows(self, matrix: Matrix, Ht: Array, *, exactly: bool = True) -> Array:
        """Return θ (n × k), each row γ_d over its sum, for topics H whose rows are first scaled to sum to one.

        H is used as β itself, because its rows do not record how many words they were learned from.
        """
        words = np.asarray(kernels.of(Ht).to_numpy(Ht), np.float64)
        mass = words.sum(axis=0)
        return matrix.native(self.shares(matrix, words / np.where(mass > 0, mass, 1.0)))

    def shares(self, matrix: Matrix, B: np.ndarray) -> np.ndarray:
        """Return θ = γ / Σγ (n × k) for B (V × k), without rescaling B."""
        rows, B = _kernel_args(matrix, B)
        gamma, nothing = np.ones((rows.shape[0], B.shape[1])), np.empty((0, B.shape[1]))
        runtime.map_ranges(
            self._pieces(rows, B.shape[1]), lambda a, b: self._infer_piece(rows, B, gamma, nothing, (a, b))
        )
        return gamma / gamma.sum(axis=1, keepdims=True)

    def _infer_piece(
        self, rows: Any, B: np.ndarray, gamma: np.ndarray, sums: np.ndarray, piece: tuple[int, int]
    ) -> float:
        first, last = piece
        settings = (int(self.iterations), float(self.tolerance))
        entries = rows.indptr, rows.indices, rows.data
        _, bound = compiled_lda.infer_rows(*entries, B, float(self.alpha), settings, first, gamma[first:last], sums)
        return float(bound)

    def _pieces(self, rows: Any, k: int) -> list[tuple[int, int]]:
        effort = rows.indptr.astype(np.int64) * 4 + np.arange(rows.shape[0] + 1, dtype=np.int64) * DIGAMMA_COST
        return runtime.split_range(rows.shape[0], float(TYPICAL_ITERATIONS * k) * float(effort[-1]), effort)


def _kernel_args(matrix: Matrix, B: np.ndarray) -> tuple[Any, np.ndarray]:
    """Return documents and B (V × k) as arguments of the kernels, which do not check sizes."""
    rows, topics = word_counts(matrix), np.ascontiguousarray(B, np.float64)
    if topics.ndim != 2 or topics.shape[0] != rows.shape[1]:
        raise ShapeError(
            f"Topics have {topics.shape[0]} words, but documents have {rows.shape[1]}. Use the topics' vocabulary."
        )
    return rows, topics


def word_counts(matrix: Matrix) -> Any:
    """Return a party's documents as a CSR array of counts."""
    values = to_values(matrix)
    return values if sparse.issparse(values) else sparse.csr_array(np.asarray(values, type_name(matrix.dtype)))


def require_counts(matrix: Matrix) -> None:
    """Raise if counts are negative, infinite or NaN."""
    data = word_counts(matrix).data
    if not (np.isfinite(data).all() and (data >= 0).all()):
        raise DataError("Word counts must be finite and zero or more; nothing was computed. Check the documents.")


def expectations(totals: np.ndarray) -> np.ndarray:
    """Return exp E[log β] (V × k) for β_l ~ Dirichlet(λ_l), from λᵀ (V × k)."""
    out = np.empty(totals.shape)
    compiled_lda.expectations(np.ascontiguousarray(totals, np.float64), out)
    return out
