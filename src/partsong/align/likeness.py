"""How much rows of two factors are alike: distances and correlations."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from partsong import kernels
from partsong.core import Array
from partsong.errors import ParameterError

ALMOST_ONE = 1.0 - 1e-12
LEAST, MOST = 1e-25, 1e30
"""Where the largest product lies between these, those in float32 neither vanish nor overflow."""
ALIKE = 0.9
"""Products that all lie between this and 1 times the largest are left to float64."""

Centred = tuple[np.ndarray, np.ndarray]


def inner_products(target: Array, source: Array, *, unit: bool = False) -> np.ndarray:
    """⟨x_a, y_b⟩ for rows of target and source, of rows scaled to norm 1 where `unit`, in float64 (k × k)."""
    X, Y = _numbers(target, unit), _numbers(source, unit)
    return np.asarray(X @ Y.T, np.float64)


def gains(target: Array, source: Array, *, unit: bool = False) -> np.ndarray:
    """⟨x_a, y_b⟩ to be compared with one another: of float32 in float32, unless its digits cannot tell them apart."""
    X, Y = (kernels.of(factor).to_numpy(factor) for factor in (target, source))
    if not unit and X.dtype == Y.dtype == np.float32:
        with np.errstate(over="ignore", invalid="ignore"):
            products = np.asarray(X @ Y.T)
        most = float(products.max())
        if LEAST < most < MOST and float(products.min()) < ALIKE * most:
            return products
    return inner_products(target, source, unit=unit)


def squared_distances(target: Array, source: Array, *, unit: bool = False) -> np.ndarray:
    """‖x_a − y_b‖² (k × k)."""
    near = None if unit else _from_one_origin(target, source)
    if near is None:
        X, Y = _numbers(target, unit), _numbers(source, unit)
        sizes = np.einsum("ij,ij->i", X, X)[:, None] + np.einsum("ij,ij->i", Y, Y)
        return np.asarray(np.maximum(0.0, sizes - 2 * (X @ Y.T)))
    (Xt, x_sizes), (Yt, y_sizes) = near
    return np.asarray(np.maximum(0.0, x_sizes[:, None] + y_sizes - 2 * (Xt.T @ Yt)))


def correlations(target: Array, source: Array) -> np.ndarray:
    """Pearson's r of rows over the features (k × k); constant rows correlate with nothing: r = 0."""
    X, Y = _standardised(_numbers(target, False)), _standardised(_numbers(source, False))
    return np.asarray(np.clip(X @ Y.T, -ALMOST_ONE, ALMOST_ONE))


def least_significant(n_features: int, level: float) -> float:
    """The correlation above which Fisher's z = atanh(r)·√(m−3) exceeds Φ⁻¹(1 − level): one-sided, against ρ = 0.

    At 784 features and 5 % that is 0.059: the test discards pairs that have practically nothing in common. Up to three
    features nothing can be tested, and any positive correlation counts.
    """
    if not 0 < level < 1:
        raise ParameterError(f"A level of significance lies between 0 and 1; got {level}.")
    if n_features <= 3:
        return 0.0
    return float(np.tanh(NormalDist().inv_cdf(1 - level) / np.sqrt(n_features - 3)))


def _from_one_origin(target: Array, source: Array) -> tuple[Centred, Centred] | None:
    """(Xᵀ − o, ‖x_a − o‖²) of both in float32, with o the mean row of the target; None where float64 is called for.

    Products in float32 take less than half the time, and without what all rows have in common, which distances do not
    see, its digits are left for what they have not.
    """
    from partsong.kernels.compiled_transport import without

    X, Y = (kernels.of(factor).to_numpy(factor) for factor in (target, source))
    if not X.dtype == Y.dtype == np.float32:
        return None
    Xt, Yt = np.ascontiguousarray(X.T), np.ascontiguousarray(Y.T)
    origin = Xt @ np.full(len(X), 1 / len(X), np.float32)
    near = without(origin, Xt), without(origin, Yt)
    return near if all(LEAST < sizes.max() < MOST for _, sizes in near) else None


def _numbers(factor: Array, unit: bool) -> np.ndarray:
    values = np.asarray(kernels.of(factor).to_numpy(factor), np.float64)
    return _at_norm_one(values) if unit else values


def _at_norm_one(values: np.ndarray) -> np.ndarray:
    sizes = np.linalg.norm(values, axis=1, keepdims=True)
    return values / np.where(sizes > 0, sizes, 1.0)


def _standardised(values: np.ndarray) -> np.ndarray:
    centred = values - values.mean(axis=1, keepdims=True)
    sizes = np.linalg.norm(centred, axis=1, keepdims=True)
    floor = (
        1e-12 * np.maximum(np.abs(values).max(axis=1, keepdims=True, initial=0.0), 1e-300) * np.sqrt(values.shape[1])
    )
    return np.where(sizes > floor, centred / np.where(sizes > floor, sizes, 1.0), 0.0)
