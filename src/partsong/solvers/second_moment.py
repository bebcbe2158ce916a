"""NMF from a second moment M ≈ Σ x xᵀ alone: eigenvalues above the noise, then H ≥ 0 whose cone holds the rows.

    shrink:     λ ≤ e → 0,   λ > e → √(λ² − e²)                  e: the largest eigenvalue of the noise alone
    factorize:  H from NMF of S = max(0, V √λ Vᵀ), since S Sᵀ ≈ M and ‖S − W H‖² over free W stands for the rows;
                then M ≈ Hᵀ A H with A, H ≥ 0, from A = WᵀW, by multiplicative steps

The shrinkage is the best one in the Frobenius norm for a low rank plus Wigner noise: ℓ cos², with cos² = 1 − e²/4ℓ² and
ℓ = (λ + √(λ² − e²))/2 (Gavish & Donoho, 2017; here for symmetric matrices). All of it uses the release only, so the
rank may be chosen afterwards, as often as wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import linalg
from scipy.sparse.linalg import ArpackNoConvergence, eigsh

from partsong import kernels
from partsong.core.states import state

PASSES, EXACT_PASSES, STEPS = 80, 300, 50
"""Passes of coordinate descent over S, with and without noise, and multiplicative steps on M."""
DENSE_SIDE = 2000
"""Up to this side all eigenvalues are computed; beyond it the largest ones, by Lanczos iteration."""
EXACT_DIRECTIONS = 256
"""Beyond that side, so many eigenvalues of a moment without noise are computed, and no others."""
FIRST_DIRECTIONS, MAX_DIRECTIONS = 64, 1024
"""Lanczos asks for so many eigenvalues at first, doubles the number until the noise begins, and stops at the second."""
MAX_FORMED = 2000
"""Up to so many columns S is formed, which lets it be cut at zero."""
TINY = 1e-300
SMALLEST_SHARE = 1e-3


@state("moment.spectrum")
@dataclass(frozen=True, slots=True)
class Spectrum:
    """Shrunk eigenvalues (r, descending) and eigenvectors (m × r) of a moment; `visible` of them were above the noise.

    r is at least 1: without a visible direction the largest one is kept.
    """

    values: Any
    vectors: Any
    visible: int
    is_exact: bool = False

    def plus(self, direction: Any) -> Spectrum:
        """The spectrum with direction · directionᵀ added; still a factorization of the sum, no longer orthogonal."""
        size = float(np.linalg.norm(direction))
        if size == 0:
            return self
        vectors = np.column_stack([direction / size, self.vectors * np.sqrt(self.values)])
        vectors[:, 0] *= size
        left, singular, _ = linalg.svd(vectors, full_matrices=False)
        kept = singular > 1e-12 * singular[0]
        return Spectrum(singular[kept] ** 2, left[:, kept], self.visible + 1)


def shrink(matrix: Any, edge: float) -> Spectrum:
    """The eigenvalues of a noisy moment above `edge`, shrunk, with their eigenvectors."""
    values, vectors = _largest(matrix, edge)
    above = values > edge
    visible = int(above.sum())
    if visible:
        values, vectors = values[above], vectors[:, above]
        return Spectrum(np.sqrt(values**2 - edge**2), vectors, visible, edge == 0)
    return Spectrum(np.maximum(values[:1], TINY), vectors[:, :1], 0)


def from_buckets(sums: Any, B: Any, sigma: float) -> Spectrum:
    """The spectrum of M from noisy Z = Bᵀ M (l × m): singular values above the noise, shrunk, then M ≈ Zᵀ (Z B)⁺ Z.

    The shrinkage is that of Gavish and Donoho (2017) for rectangular noise. Nyström's approximation uses that Z B is
    symmetric; directions of Z B of less than a thousandth of the largest are left out.
    """
    rows, columns = sums.shape
    left, values, right = linalg.svd(sums, full_matrices=False)
    visible = int((values > sigma * (np.sqrt(rows) + np.sqrt(columns))).sum())
    kept = max(1, visible)
    values, noise = values[:kept], sigma**2
    square = (values**2 - (rows + columns) * noise) ** 2 - 4 * rows * columns * noise**2
    shrunk = np.sqrt(np.maximum(square, 0.0)) / np.maximum(values, TINY) if visible else values
    Z = (left[:, :kept] * shrunk) @ right[:kept]
    core = np.asarray(Z @ B)
    weights, turn = linalg.eigh((core + core.T) / 2)
    large = (weights > SMALLEST_SHARE * weights.max(initial=TINY)) & (np.arange(rows) >= rows - kept)
    _, singular, vectors = linalg.svd((turn[:, large] / np.sqrt(weights[large])).T @ Z, full_matrices=False)
    if not singular.size:
        return Spectrum(values[:1], right[:1].T, visible)
    return Spectrum(singular**2, vectors.T, visible)


def _largest(matrix: Any, edge: float) -> tuple[Any, Any]:
    """Eigenvalues in descending order, and eigenvectors: at least all above the edge, and at least one."""
    m = len(matrix)
    if edge == 0 and m > DENSE_SIDE:  # of a null space, Lanczos would resolve rounding errors
        values, vectors = linalg.eigh(matrix, subset_by_index=(max(0, m - EXACT_DIRECTIONS), m - 1))
        above = values[::-1] > m * np.finfo(np.float64).eps * values.max(initial=0.0)
        above[:1] = True
        return values[::-1][above], vectors[:, ::-1][:, above]
    if m <= DENSE_SIDE:
        values, vectors = linalg.eigh(matrix)
        return values[::-1], vectors[:, ::-1]
    count, start = FIRST_DIRECTIONS, np.full(m, 1 / np.sqrt(m))
    while True:
        try:
            values, vectors = eigsh(matrix, k=count, which="LA", v0=start, tol=1e-7)
        except ArpackNoConvergence:
            values, vectors = linalg.eigh(matrix, subset_by_index=(max(0, m - count), m - 1))
        order = np.argsort(-values)
        if values.min() <= edge or count >= min(MAX_DIRECTIONS, m // 2):
            return values[order], vectors[:, order]
        count *= 2


@dataclass(frozen=True, slots=True)
class _RootOfMoment:
    """S = max(0, V √λ Vᵀ); with very many columns V √λ Vᵀ itself, which is never formed."""

    spectrum: Spectrum
    matrix: Any = None

    @staticmethod
    def of(spectrum: Spectrum) -> _RootOfMoment:
        if len(spectrum.vectors) > MAX_FORMED:
            return _RootOfMoment(spectrum)
        product = (spectrum.vectors * np.sqrt(spectrum.values)) @ spectrum.vectors.T
        return _RootOfMoment(spectrum, np.maximum(product, 0.0, out=product))

    def times(self, F: Any) -> Any:
        if self.matrix is not None:
            return self.matrix @ F
        V = self.spectrum.vectors
        return V @ (np.sqrt(self.spectrum.values)[:, None] * (V.T @ F))


def factorize(spectrum: Spectrum, Ht: Any) -> Any:
    """H (k × m) ≥ 0 with rows of norm 1, from a start Hᵀ (m × k) that does not depend on data."""
    Ht = np.array(Ht, np.float64)
    root = _RootOfMoment.of(spectrum)
    sweep, W = kernels.of(Ht).sweep, np.array(Ht)
    for _ in range(EXACT_PASSES if spectrum.is_exact else PASSES):
        W = sweep(W, Ht.T @ Ht, root.times(Ht), 1)
        Ht = sweep(Ht, W.T @ W, root.times(W), 1)
    H = _fit_moment(spectrum, W.T @ W, np.ascontiguousarray(Ht.T))
    norms = np.linalg.norm(H, axis=1)
    flat = np.full(H.shape[1], 1 / np.sqrt(H.shape[1]))
    return np.where((norms > TINY)[:, None], H / np.maximum(norms, TINY)[:, None], flat)


def _fit_moment(spectrum: Spectrum, A: Any, H: Any) -> Any:
    """M ≈ Hᵀ A H: A ← A ∘ √(H M Hᵀ / H Hᵀ A H Hᵀ),   H ← H ∘ (A H M / A H Hᵀ A H)^¼."""
    for _ in range(STEPS):
        HM = np.maximum((H @ spectrum.vectors * spectrum.values) @ spectrum.vectors.T, 0.0)
        gram = H @ H.T
        A = A * np.sqrt(HM @ H.T / np.maximum(gram @ A @ gram, TINY))
        H = H * (A @ HM / np.maximum((A @ gram @ A) @ H, TINY)) ** 0.25
    return H
