"""One noisy second moment: Σ x xᵀ over rows of bounded norm, released once, and what its eigenvalues can show.

    released:   Σ x_i x_j + N(0, σ²) on the diagonal,   + N(0, σ²/2) above it,   σ = noise multiplier × sensitivity

The norm of the release counts the diagonal once and what is above it √2 times, so that it equals the Frobenius norm of
the whole matrix. In it one row more or less changes the sum by ‖x xᵀ‖ = ‖x‖² ≤ b². One row replaced changes it by

    ‖x xᵀ − y yᵀ‖² = ‖x‖⁴ + ‖y‖⁴ − 2 ⟨x, y⟩² ≤ 2 b⁴,

for signed rows as well. Entries are whole numbers of a public unit, so that sums are exact in any order, and one row
changes exactly what the bound states. Everything that follows from the release is post-processing and costs nothing.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse

from partsong.core.streams import stream
from partsong.errors import ParameterError
from partsong.privacy.accounting import Release, check_relation
from partsong.privacy.discrete_noise import RoundedGaussian
from partsong.privacy.mechanisms import MAX_NOISE_MULTIPLIER, MIN_NOISE_MULTIPLIER
from partsong.privacy.randomness import Source, system_source
from partsong.privacy.row_level import BLOCK, BLOCK_ROWS, MAX_ROWS, bounded_rows, power_of_two_unit

ROW_BITS = 18
"""Products of entries stay below 2³⁶, and their sums over a block of 2¹⁶ rows below 2⁵³: exact in float64."""
DRAWS = 1 << 20
"""Noise drawn at a time."""
MEAN_BITS = 20
PARTY_BITS = 40
COUNT_SHARE = 0.3
"""The number of rows, in units of the largest row, released with a noisy mean."""
COUNT_UNIT = 2.0**-20
ROUNDING = 1 + 2.0**-50
"""Covers the rounding in the formula of a sensitivity."""


@dataclass(frozen=True, slots=True)
class Noise:
    """Gaussian noise for a sum: its multiplier, the neighboring relation, the number of shares, and the unit.

    `shares`: the noise is that of one of so many honest parties of whom only the sum is seen; each adds a variance of
    σ² / shares.
    """

    multiplier: float
    relation: str = "add-or-remove"
    shares: int = 1
    protects: str = "row"

    def __post_init__(self) -> None:
        check_relation(self.protects, self.relation)
        if not MIN_NOISE_MULTIPLIER <= self.multiplier <= MAX_NOISE_MULTIPLIER:
            raise ParameterError(
                f"noise_multiplier must be a number from {MIN_NOISE_MULTIPLIER:g} to {MAX_NOISE_MULTIPLIER:g}; "
                f"got {self.multiplier!r}. `noise_multiplier_for` finds one for a budget.",
                parameter="noise_multiplier",
            )
        if not isinstance(self.shares, int) or not 1 <= self.shares <= 100_000:
            raise ParameterError(
                f"shares must be a whole number from 1 to 100000; got {self.shares!r}.", parameter="shares"
            )

    @property
    def release(self) -> Release:
        """The privacy cost of one use for each row, or each party."""
        return Release("gaussian", self.multiplier, self.protects, self.relation)

    def scale(self, sensitivity: float) -> float:
        """σ in the sum over all shares."""
        return math.nextafter(self.multiplier * sensitivity * ROUNDING, math.inf)

    def draw(self, count: int, sigma: float, unit: float, source: Source) -> Any:
        """`count` numbers of noise, in whole units, for one party: of variance σ² / shares each."""
        own = RoundedGaussian(math.nextafter(sigma / math.sqrt(self.shares), math.inf), unit)
        drawn = np.empty(count, np.int64)
        for start in range(0, count, DRAWS):
            drawn[start : start + DRAWS] = own.draw(min(DRAWS, count - start), source)
        return drawn

    def total(self, sigma: float, parties: float) -> float:
        """σ of the noise in the sum over so many parties, each with one share."""
        return sigma * math.sqrt(max(1.0, parties / self.shares))


@dataclass(frozen=True, slots=True)
class MomentOfRows:
    """Σ x xᵀ over rows cut to ‖x‖ ≤ bound, as its upper triangle in whole units; `is_signed` if rows may be negative.

    Only directions of rows matter for H, so the bound may be so small that nearly all rows are cut to it.
    """

    bound: float
    noise: Noise
    is_signed: bool = False

    @property
    def row_unit(self) -> float:
        """A power of two: x is a whole multiple of it."""
        return power_of_two_unit(self.bound, ROW_BITS)

    @property
    def unit(self) -> float:
        """The unit of the release."""
        return self.row_unit**2

    @property
    def sensitivity(self) -> float:
        """The most that one row can change the release: b², or √2 b² if it is replaced."""
        return self.bound**2 * (math.sqrt(2) if self.noise.relation == "replace" else 1.0)

    @property
    def sigma(self) -> float:
        """Of the noise on the diagonal, in the sum over all shares."""
        return self.noise.scale(self.sensitivity)

    @property
    def largest_row(self) -> float:
        """The most that one row adds to an entry, in whole units."""
        return (self.bound / self.row_unit) ** 2

    def of(self, X: Any) -> Any:
        """The triangle of Σ x xᵀ over the bounded rows of X, without noise; some rows at a time."""
        _require_exact(X.shape[0])
        return sum_of_blocks(X, lambda rows: self.sums(self.quantize(rows)))

    def quantize(self, X: Any) -> Any:
        """The rows in whole units, none longer than the bound; each from itself alone."""
        return bounded_rows(X, self.bound, self.row_unit, is_signed=self.is_signed)

    def sums(self, quantized_rows: Any) -> Any:
        """The upper triangle of Σ x xᵀ, row by row, in whole units (int64); never an object of n × m × m."""
        n, m = quantized_rows.shape
        _require_exact(n)
        total = np.zeros((m, m), np.int64)
        for start in range(0, n, BLOCK):
            rows = quantized_rows[start : start + BLOCK]
            product = rows.T @ rows
            total += (product.toarray() if sparse.issparse(product) else product).astype(np.int64)
        return triangle_of(total)

    def add_noise(self, triangle: Any, source: Source = system_source) -> Any:
        """The triangle with noise, still in whole units: σ on the diagonal, σ/√2 above it."""
        return _noisy_triangle(self, triangle, source)


@dataclass(frozen=True, slots=True)
class MomentOfParty:
    """M_p · min(1, C/‖M_p‖) for M_p = X_pᵀX_p, as its upper triangle in whole units: one party changes it by at most C
    in the Frobenius norm, or 2 C if all its data are replaced.
    """

    clip: float
    noise: Noise

    @property
    def unit(self) -> float:
        return power_of_two_unit(self.clip, PARTY_BITS)

    @property
    def sensitivity(self) -> float:
        return self.clip * (2.0 if self.noise.relation == "replace" else 1.0)

    @property
    def sigma(self) -> float:
        return self.noise.scale(self.sensitivity)

    @property
    def largest_row(self) -> float:
        """A party adds at most C to an entry, however many rows it has."""
        return 0.0

    def of(self, X: Any) -> Any:
        """The clipped triangle of X, cut toward zero to whole units, without noise."""
        with np.errstate(over="ignore", invalid="ignore"):
            product = X.T.astype(np.float64) @ X.astype(np.float64)
        triangle = triangle_of(product.toarray() if sparse.issparse(product) else product)
        with np.errstate(over="ignore", invalid="ignore"):
            all_squares, on_diagonal = (
                float(part @ part) for part in (triangle, triangle[diagonal_places(X.shape[1])])
            )
            size = math.sqrt(max(0.0, 2 * all_squares - on_diagonal)) if math.isfinite(2 * all_squares) else math.inf
        if not math.isfinite(size):  # too large to be measured: zero, since a refusal would depend on the data
            return np.zeros(triangle.size, np.int64)
        # rounding in the sums of N squares makes them at most 3 N 2⁻⁵³ too small
        largest = size * (1 + (triangle.size + 8) * 2.0**-51)
        return np.trunc(triangle * (self.clip / max(largest, self.clip) / self.unit)).astype(np.int64)

    def add_noise(self, triangle: Any, source: Source = system_source) -> Any:
        """The triangle with noise, still in whole units: σ on the diagonal, σ/√2 above it."""
        return _noisy_triangle(self, triangle, source)


def _noisy_triangle(moment: MomentOfRows | MomentOfParty, triangle: Any, source: Source) -> Any:
    noise, at = moment.noise, diagonal_places(side_of(triangle.size))
    noisy = triangle + noise.draw(triangle.size, moment.sigma / math.sqrt(2), moment.unit, source)
    noisy[at] = triangle[at] + noise.draw(at.size, moment.sigma, moment.unit, source)
    return noisy


@dataclass(frozen=True, slots=True)
class MomentOfBuckets:
    """Σ y xᵀ (l × m) for y = Bᵀx, the sums of x over l buckets of columns divided by the root of their size; x cut to
    ‖x‖ ≤ b, y to ‖y‖ ≤ κ = b / √(largest bucket), which every row of norm b reaches.

    One row more or less changes it by ‖y‖ ‖x‖ ≤ κ b, one replaced by at most √2 κ b, for rows ≥ 0. Since y is cut, the
    sum is Bᵀ M for a moment M in which every row has the weight κ/‖y‖.
    """

    bound: float
    buckets: int
    noise: Noise

    @property
    def row_unit(self) -> float:
        return power_of_two_unit(self.bound, ROW_BITS)

    def bucket_bound(self, m: int) -> float:
        """κ for m columns."""
        return self.bound / math.sqrt(-(-m // self.buckets))

    def bucket_unit(self, m: int) -> float:
        return power_of_two_unit(self.bucket_bound(m), ROW_BITS)

    def unit(self, m: int) -> float:
        """The unit of the release."""
        return self.row_unit * self.bucket_unit(m)

    def sigma(self, m: int) -> float:
        """Of the noise of each entry, in the sum over all shares."""
        replaced = math.sqrt(2) if self.noise.relation == "replace" else 1.0
        return self.noise.scale(replaced * self.bucket_bound(m) * self.bound)

    def assignment(self, m: int) -> Any:
        """B (m × l, sparse): a public random assignment of columns to buckets of nearly equal size."""
        places = np.arange(m) % self.buckets
        stream(0, "buckets", m, self.buckets).shuffle(places)
        sizes = np.bincount(places, minlength=self.buckets)
        return sparse.csr_array((1 / np.sqrt(sizes[places]), (np.arange(m), places)), (m, self.buckets))

    def of(self, X: Any) -> Any:
        """The sums over the rows of X, in whole units (int64, l m numbers), without noise."""
        m = X.shape[1]
        _require_exact(X.shape[0])
        B, total = self.assignment(m), np.zeros((self.buckets, m), np.int64)
        member, scale = (B > 0).astype(np.float64), B.max(axis=0).toarray().ravel() * self.row_unit
        for start in range(0, X.shape[0], BLOCK_ROWS):
            rows = bounded_rows(X[start : start + BLOCK_ROWS], self.bound, self.row_unit)
            sums = rows @ member  # of whole numbers, and so exact: y depends on its own row alone, to the last bit
            dense = sums.toarray() if sparse.issparse(sums) else np.ascontiguousarray(sums)
            short = bounded_rows(dense * scale, self.bucket_bound(m), self.bucket_unit(m))
            product = rows.T @ short
            total += np.asarray(product).T.astype(np.int64)
        return total.ravel()

    def add_noise(self, sums: Any, source: Source = system_source) -> Any:
        """The sums with noise, still in whole units."""
        m = sums.size // self.buckets
        return sums + self.noise.draw(sums.size, self.sigma(m), self.unit(m), source)


@dataclass(frozen=True, slots=True)
class MeanOfDirections:
    """Σ x/‖x‖ over rows ≥ 0, and under add-or-remove their number: of joint sensitivity √(1 + κ²), κ = COUNT_SHARE.

    Replacing a row changes the sum by at most √2, since x, y ≥ 0; the number of rows is then public.
    """

    noise: Noise

    @property
    def unit(self) -> float:
        return power_of_two_unit(1.0, MEAN_BITS)

    @property
    def sensitivity(self) -> float:
        return math.sqrt(2) if self.noise.relation == "replace" else math.hypot(1.0, COUNT_SHARE)

    @property
    def sigma(self) -> float:
        return self.noise.scale(self.sensitivity)

    def quantize(self, X: Any) -> Any:
        """x/‖x‖ in whole units; zero rows stay zero."""
        return bounded_rows(X, 1.0, self.unit, is_unit=True)

    def sums(self, quantized_rows: Any) -> Any:
        """Σ x/‖x‖ in whole units, and then the number of rows in units of 2⁻²⁰ (m + 1, int64)."""
        _require_exact(quantized_rows.shape[0])
        total = np.asarray(quantized_rows.sum(axis=0)).ravel().astype(np.int64)
        return np.append(total, np.int64(round(quantized_rows.shape[0] / COUNT_UNIT)))

    def add_noise(self, sums: Any, source: Source = system_source) -> Any:
        noisy = sums.copy()
        noisy[:-1] += self.noise.draw(sums.size - 1, self.sigma, self.unit, source)
        if self.noise.relation == "add-or-remove":
            noisy[-1] += self.noise.draw(1, self.sigma / COUNT_SHARE, COUNT_UNIT, source)[0]
        return noisy

    def centre(self, noisy: Any) -> tuple[Any, float]:
        """c = max(0, Σ x/‖x‖) / n̂, at most of norm 1, and n̂ ≥ 1."""
        count = max(1.0, float(noisy[-1]) * COUNT_UNIT)
        mean = np.maximum(noisy[:-1] * self.unit, 0.0) / count
        return mean / max(1.0, float(np.linalg.norm(mean))), count


def _require_exact(n_rows: int) -> None:
    """Refuse more rows than sums are exact for; the message must not reveal their number."""
    if n_rows > MAX_ROWS:
        raise ParameterError(f"Sums are exact for at most {MAX_ROWS} rows per party; there are more. Split the party.")


def sum_of_blocks(X: Any, sums: Callable[[Any], Any]) -> Any:
    """Σ sums(rows) over blocks of the rows of X, whose float64 copies would not fit in memory at once."""
    starts = range(0, max(1, X.shape[0]), BLOCK_ROWS)
    return functools.reduce(operator.iadd, (sums(X[start : start + BLOCK_ROWS]) for start in starts))


def triangle_of(matrix: Any) -> Any:
    """The upper triangle of a symmetric matrix, row by row."""
    m = len(matrix)
    triangle, start = np.empty(m * (m + 1) // 2, matrix.dtype), 0
    for i in range(m):
        triangle[start : start + m - i] = matrix[i, i:]
        start += m - i
    return triangle


def symmetric_matrix(triangle: Any, unit: float) -> Any:
    """The symmetric matrix (float64) with this upper triangle, times `unit`."""
    m = side_of(triangle.size)
    matrix, start = np.empty((m, m)), 0
    for i in range(m):
        matrix[i, i:] = triangle[start : start + m - i]
        matrix[i, i:] *= unit
        matrix[i:, i] = matrix[i, i:]
        start += m - i
    return matrix


def diagonal_places(m: int) -> Any:
    """Where the diagonal lies in a triangle."""
    rows = np.arange(m)
    return rows * m - rows * (rows - 1) // 2


def side_of(size: int) -> int:
    """m for a triangle of m (m + 1) / 2 numbers."""
    return (math.isqrt(8 * size + 1) - 1) // 2


def noise_edge(sigma: float, m: int) -> float:
    """σ√(2m): the largest eigenvalue that the noise alone has (Wigner)."""
    return sigma * math.sqrt(2 * m)
