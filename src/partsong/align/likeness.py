"""How much rows of two factors are alike: distances and correlations."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import NormalDist
from typing import Any

import numpy as np

from partsong import kernels
from partsong.core import Array
from partsong.errors import ParameterError

ALMOST_ONE = 1.0 - 1e-12
LEAST, MOST = 2.0**-250, 2.0**250
"""Factors whose largest entry lies between these have sums of squares in float64 as they are."""
DEEPEST = -1000
"""The lowest power of two that is brought up to 1: the factor that does so for lower ones is not finite."""


def inner_products(target: Array, source: Array, *, unit: bool = False) -> np.ndarray:
    """⟨x_a, y_b⟩ for rows of target and source, of rows scaled to norm 1 where `unit`, in float64 (k × k)."""
    X, Y = (_at_norm_one(F) if unit else F for F in _numbers(target, source))
    return np.asarray(X @ Y.T)


def gains(target: Array, source: Array, *, unit: bool = False) -> np.ndarray:
    """c·⟨x_a, y_b⟩ with one c > 0, a power of two at which the sums are finite whatever the factors.

    In float64, as rows that are nearly the same differ in digits that the sums do not have in float32.
    """
    X, Y = (_at_norm_one(F) if unit else _times(F, _scale(F)) for F in _numbers(target, source))
    return np.asarray(X @ Y.T)


def squared_distances(target: Array, source: Array) -> np.ndarray:
    """‖x_a − y_b‖² (k × k), infinite where float64 does not reach."""
    X, Y = _numbers(target, source)
    scale = _scale(X, Y)
    with np.errstate(over="ignore"):
        return np.asarray(_distances(_times(X, scale), _times(Y, scale)) / scale / scale)


def costs(target: Array, source: Array, *, unit: bool = False) -> np.ndarray:
    """c·‖x_a − y_b‖² with one c > 0, a power of two at which the sums are finite whatever the factors."""
    X, Y = _numbers(target, source)
    if unit:
        return _distances(_at_norm_one(X), _at_norm_one(Y))
    scale = _scale(X, Y)
    return _distances(_times(X, scale), _times(Y, scale))


def correlations(target: Array, source: Array) -> np.ndarray:
    """Pearson's r of rows over the features (k × k); constant rows correlate with nothing: r = 0."""
    X, Y = (_standardised(F) for F in _numbers(target, source))
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


def _numbers(target: Array, source: Array) -> Iterator[np.ndarray]:
    return (np.asarray(kernels.of(factor).to_numpy(factor), np.float64) for factor in (target, source))


def _distances(X: np.ndarray, Y: np.ndarray) -> np.ndarray:
    distances = np.einsum("ij,ij->i", X, X)[:, None] + np.einsum("ij,ij->i", Y, Y) - 2 * (X @ Y.T)
    return np.asarray(np.maximum(distances, 0.0))


def _scale(*factors: np.ndarray) -> float:
    """1, or the power of two that the factors need for their squares to stay in float64."""
    largest = max(_largest(factor) for factor in factors)
    return 1.0 if largest == 0 or LEAST < largest < MOST else float(_to_one(largest))


def _times(factor: np.ndarray, scale: float) -> np.ndarray:
    return factor if scale == 1 else factor * scale


def _largest(values: np.ndarray) -> float:
    """max |x|."""
    return float(max(values.max(initial=0.0), -values.min(initial=0.0)))


def _to_one(largest: Any) -> Any:
    """The power of two that brings a number, or each of several, to between ½ and 1."""
    return np.ldexp(1.0, -np.maximum(np.frexp(largest)[1], DEEPEST))


def _rows_at_one(values: np.ndarray) -> np.ndarray:
    """Every row with its largest entry between ½ and 1."""
    return values * _to_one(np.abs(values).max(axis=1, keepdims=True, initial=0.0))


def _at_norm_one(factor: np.ndarray) -> np.ndarray:
    values = _rows_at_one(factor)
    sizes = np.linalg.norm(values, axis=1, keepdims=True)
    return np.asarray(values / np.where(sizes > 0, sizes, 1.0))


def _standardised(factor: np.ndarray) -> np.ndarray:
    values = _rows_at_one(factor)
    centred = values - values.mean(axis=1, keepdims=True)
    sizes = np.linalg.norm(centred, axis=1, keepdims=True)
    floor = 1e-12 * np.abs(values).max(axis=1, keepdims=True, initial=0.0) * np.sqrt(values.shape[1])
    return np.where(sizes > floor, centred / np.where(sizes > floor, sizes, 1.0), 0.0)
