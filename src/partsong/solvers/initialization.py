"""Initial factors for NMF: random, anchor columns (successive projection), non-negative double SVD (NNDSVD)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong import kernels
from partsong.core.interfaces import Array, Matrix
from partsong.kernels import numpy_backend
from partsong.solvers.normal_equations import Penalty
from partsong.solvers.squared_error import SquaredError, constant_rows, optimal_scale

MAX_ANCHOR_WORK = 50_000_000
"""Entries × components above which anchors are chosen on a sample of rows."""
SAMPLE_BYTES = 32 << 20
"""Limit on the sample, unless it would leave fewer than three rows per component."""
DRAW_BLOCK = 1 << 20
"""Random numbers drawn at a time."""


MOSTLY_ZERO = 0.1
SAMPLED_ENTRIES = 1 << 18

ROUNDING_LEVEL = 1e-6
"""Singular values below this share of the largest count as zero."""


@dataclass(frozen=True, slots=True)
class InitialFactors:
    """Initial Hᵀ (m × k), and W (n × k) if the initialization provides one."""

    Ht: Array
    W: Array | None = None


def balanced(matrix: Matrix, initial: InitialFactors, solver: SquaredError) -> InitialFactors:
    """Rescale each component to minimize its penalties, with W H unchanged; a no-op unless both factors are penalized.

        min over c > 0 of   c a₁ + ½ c² a₂ + b₁ / c + ½ b₂ / c²

    for c w_j and h_j / c, with a₁ = m l1_W ‖w_j‖₁, a₂ = m l2_W ‖w_j‖² and b₁, b₂ likewise for h_j. The scale of an
    initialization is arbitrary, and on a wrong scale the first penalized step sets components to zero for good.
    """
    if not solver.penalties_fix_scale:
        return initial
    plain = solver.without_penalties
    W = initial.W if initial.W is not None else plain.solve_rows(matrix, initial.Ht, exactly=False)
    n, m = matrix.shape
    a, b = _terms(W, solver.penalty_W, m), _terms(initial.Ht, solver.penalty_H, n)
    scale = optimal_scale(*a, *b)
    up, down = (kernels.of(W).cast(values, W) for values in (scale, 1 / scale))
    return InitialFactors(initial.Ht * down, W * up)


def _terms(factor: Array, penalty: Penalty, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return size · l1 ‖f_j‖₁ and size · l2 ‖f_j‖² for each column."""
    values = kernels.of(factor).to_numpy(factor)
    return (
        size * penalty.l1 * values.sum(0, dtype=np.float64),
        size * penalty.l2 * np.square(values, dtype=np.float64).sum(0),
    )


def is_mostly_zero(matrix: Any) -> bool:
    """Return whether fewer than a tenth of the entries are nonzero; for dense data, estimated from some rows."""
    n, m = matrix.shape
    if not hasattr(matrix, "X") or matrix.stored < n * m or n == 0:
        return bool(matrix.stored < MOSTLY_ZERO * n * m)
    count = max(1, min(n, SAMPLED_ENTRIES // max(1, m)))
    few = matrix.rows(np.arange(count) * n // count).X
    return float((few != 0).sum()) < MOSTLY_ZERO * few.shape[0] * m


def random_columns(n_features: int, rank: int, generator: np.random.Generator, dtype: Any = "float64") -> np.ndarray:
    """Return Hᵀ (m × k) with entries from U(0, 1); W takes up the scale of the data."""
    return _uniform((n_features, rank), generator, dtype)


def random_init(matrix: Matrix, rank: int, generator: np.random.Generator) -> InitialFactors:
    """Return a random H; each row of W starts from H and its own row of X."""
    return InitialFactors(matrix.native(random_columns(matrix.shape[1], rank, generator, _type_name(matrix))))


def _uniform(
    shape: tuple[int, int], generator: np.random.Generator, dtype: Any = "float64", scale: float = 1.0
) -> np.ndarray:
    """Return entries from U(0, scale), drawn in float64, some rows at a time."""
    out = np.empty(shape, dtype)
    height = max(1, DRAW_BLOCK // max(1, shape[1]))
    for start in range(0, shape[0], height):
        block = out[start : start + height]
        block[:] = generator.random(block.shape) * scale
    return out


def _type_name(matrix: Matrix) -> str:
    return str(matrix.dtype).removeprefix("torch.")


def anchors(matrix: Matrix, rank: int, generator: np.random.Generator) -> InitialFactors:
    """Choose columns of X as W by successive projection (Araújo et al., 2001), and fit H to them.

    Repeatedly take the column with the largest residual norm and project all columns off it. Large data are sampled by
    row. If X has a lower rank, random columns fill the rest.
    """
    chosen = _choose_anchors(_sample(matrix, rank, generator), rank)
    W = matrix.native(_uniform((matrix.shape[0], rank), generator, _type_name(matrix), 2 * matrix.mean))
    if len(chosen):
        W[:, : len(chosen)] = matrix.columns(chosen)
    on = kernels.of(W)
    gram, cross = on.cast(on.gram(W), W), matrix.transposed_times(W)
    return InitialFactors(on.sweep(constant_rows(gram, cross), gram, cross, 3), W)


def _sample(matrix: Matrix, rank: int, generator: np.random.Generator) -> Matrix:
    n = matrix.shape[0]
    share = MAX_ANCHOR_WORK / max(1, matrix.stored * rank)
    wanted = max(10 * rank, int(n * share))
    if wanted >= n:
        return matrix
    row_bytes = max(1, matrix.stored // n) * np.dtype(_type_name(matrix)).itemsize
    wanted = min(wanted, max(3 * rank, SAMPLE_BYTES // row_bytes))
    return matrix.rows(np.sort(generator.choice(n, wanted, replace=False)))


def _choose_anchors(matrix: Matrix, rank: int) -> np.ndarray:
    """Return at most `rank` column indices (fewer if X has a lower rank), by pivoted Cholesky of XᵀX."""
    n, m = matrix.shape
    residual = matrix.column_energies()
    enough = 1e-6 * float(residual.max(initial=0.0))
    size = min(rank, n, m)
    factor = np.zeros((size, m), np.float64 if 8 * size * m <= SAMPLE_BYTES else _type_name(matrix))
    chosen: list[int] = []
    for i, row in enumerate(factor):
        best = int(np.argmax(residual))
        if residual[best] <= enough:
            break
        row += matrix.gram_column(best)
        row -= factor[:i, best] @ factor[:i]
        row /= np.sqrt(residual[best])
        residual -= np.square(row)
        chosen.append(best)
        residual[chosen] = -1.0
    return np.array(chosen, dtype=np.int64)


def nndsvd(
    matrix: Matrix,
    rank: int,
    generator: np.random.Generator,
    fill: float = 0.0,
    *,
    is_random: bool = False,
    power: int = 5,
) -> InitialFactors:
    """Non-negative double SVD (Boutsidis & Gallopoulos, 2008): the stronger sign half of each singular pair.

    `fill` replaces zeros (nndsvda: the mean of X). With `is_random`, each zero becomes a uniform draw from 0 to `fill`
    (nndsvdar: a hundredth of the mean). The SVD is randomized, with `power` power iterations.
    """
    U, values, V = _randomized_svd(matrix, rank, generator, power)
    values = values[values > ROUNDING_LEVEL * values.max(initial=0.0)]
    W = np.zeros((matrix.shape[0], rank), U.dtype)
    Ht = np.zeros((matrix.shape[1], rank), U.dtype)
    for j in range(len(values)):
        u, v = U[:, j], V[:, j]
        halves = [(np.maximum(sign * u, 0), np.maximum(sign * v, 0)) for sign in (1, -1)]
        sizes = [(float(np.linalg.norm(a)), float(np.linalg.norm(b))) for a, b in halves]
        best = int(sizes[1][0] * sizes[1][1] > sizes[0][0] * sizes[0][1])
        (a, b), (size_a, size_b) = halves[best], sizes[best]
        if size_a * size_b > 0:
            scale = np.sqrt(values[j] * size_a * size_b)
            W[:, j], Ht[:, j] = a * (scale / size_a), b * (scale / size_b)
    for factor in (W, Ht) if fill > 0 else ():
        others = _uniform(factor.shape, generator, factor.dtype, fill) if is_random else fill
        np.copyto(factor, others, where=factor == 0)
    return InitialFactors(matrix.native(Ht), matrix.native(W))


def _randomized_svd(
    matrix: Matrix, rank: int, generator: np.random.Generator, power: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return leading singular triplets U, s, V by subspace iteration (Halko et al., 2011)."""
    n, m = matrix.shape
    width = min(rank + 10, n, m)

    def product(forward: bool, B: np.ndarray) -> np.ndarray:
        result = (matrix.times if forward else matrix.transposed_times)(matrix.native(B))
        return kernels.of(result).to_numpy(result)

    Q = product(True, _normal_numbers(matrix, (m, width), generator))
    for _ in range(power):
        Q = product(True, _orthonormal(product(False, _orthonormal(Q, 1)), 1))
    Q = _orthonormal(Q)
    B = product(False, Q)
    squares, right = np.linalg.eigh(numpy_backend.gram(B))
    order = np.argsort(-squares)[: min(rank, width)]
    values = np.sqrt(np.maximum(squares[order], 0.0))
    turned = right[:, order]
    left = B @ (turned / np.where(values > 0, values, 1.0)).astype(B.dtype)
    return Q @ turned.astype(Q.dtype), values, left


def _orthonormal(A: np.ndarray, passes: int = 2) -> np.ndarray:
    """Return an orthonormal basis of the columns of A from the eigenvectors of AᵀA, twice; rounding noise becomes zero.

    A factorization of A itself would copy it in float64. One pass is accurate enough between two products.
    """
    for _ in range(passes):
        values, vectors = np.linalg.eigh(numpy_backend.gram(A))
        is_sound = values > values.max(initial=0.0) * 1e-13
        scale = np.where(is_sound, 1.0 / np.sqrt(np.where(is_sound, values, 1.0)), 0.0)
        A = A @ (vectors * scale).astype(A.dtype)
    return A


def _normal_numbers(matrix: Matrix, shape: tuple[int, int], generator: np.random.Generator) -> np.ndarray:
    """Return N(0, 1) draws in the precision of the data; float64 would double the memory of float32 data."""
    is_single = str(matrix.dtype).endswith("float32")
    return generator.standard_normal(shape, np.float32) if is_single else generator.standard_normal(shape)
