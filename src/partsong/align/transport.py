"""Soft alignments by entropic optimal transport (Cuturi, 2013), in the log domain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from partsong.align.assignment import significant
from partsong.align.likeness import correlations, costs
from partsong.align.plan import Blend
from partsong.core import Array
from partsong.errors import ParameterError


@dataclass(frozen=True, slots=True)
class Sinkhorn:
    """min over T ≥ 0 of ⟨T, C⟩ − ε·H(T), T1 = Tᵀ1 = 1/k, with C_ab = ‖x_a − y_b‖² and ε = blur · mean(C) (SK, D₃).

    P = k·T with rows brought to sum 1. (D₃ as printed is a quadratic program that projects every row on the hull of
    the others; Sinkhorn solves this linear one, as the paper does.) `iterations` end earlier once the marginals are
    right to `tolerance` of all mass; at 10⁻³ the P·H of uploads (50 × 784) is right to less than 10⁻³.
    """

    is_partial: ClassVar[bool] = False
    blur: float = 0.05
    iterations: int = 200
    tolerance: float = 1e-3
    unit: bool = False

    def __post_init__(self) -> None:
        _check(self)

    def plan(self, target: Array, source: Array) -> Blend:
        """P with rows that sum to 1."""
        cost = costs(target, source, unit=self.unit)
        k = len(cost)
        mass = np.full(k, 1.0 / k)
        T = entropic_plan(cost, mass, mass, self.blur * _typical(cost), self.iterations, self.tolerance)
        return Blend(T / T.sum(axis=1, keepdims=True))


@dataclass(frozen=True, slots=True)
class PartialSinkhorn:
    """Sinkhorn on 1 − r_ab in which insignificant pairs are forbidden and mass may stay at home (SK_ρ).

    A row and a column are added that take what finds no partner, at the largest finite cost; rows of P sum to the
    share of their mass that did.
    """

    is_partial: ClassVar[bool] = True
    level: float = 0.05
    bonferroni: bool = False
    blur: float = 0.05
    iterations: int = 200
    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        _check(self)

    def plan(self, target: Array, source: Array) -> Blend:
        """P with rows that sum to at most 1."""
        r = correlations(target, source)
        k, is_alike = len(r), significant(r, target.shape[1], self.level, self.bonferroni)
        if not is_alike.any():
            return Blend(np.zeros((k, k)))
        distance = 1.0 - r
        cost = np.zeros((k + 1, k + 1))
        cost[:k, :k] = np.where(is_alike, distance, np.inf)
        cost[k, :k] = cost[:k, k] = float(distance[is_alike].max())
        mass = np.append(np.full(k, 1.0 / k), 1.0)
        blur = self.blur * _typical(distance[is_alike])
        T = entropic_plan(cost, mass, mass, blur, self.iterations, self.tolerance)
        P = k * T[:k, :k]
        return Blend(P / np.maximum(1.0, P.sum(axis=1, keepdims=True)))


def entropic_plan(
    cost: np.ndarray, rows: np.ndarray, columns: np.ndarray, blur: float, iterations: int, tolerance: float
) -> np.ndarray:
    """T = exp((f_a + g_b − C_ab)/ε) with the marginals given; column sums are exact, row sums to `tolerance`.

    Steps scale a kernel by factors, which is cheap. Where these become extreme, they are absorbed, and a step in the
    log domain, which cannot overflow, makes the next kernel.
    """
    from partsong.kernels.compiled_transport import NOTHING, scale

    scores = np.asarray(cost, np.float64) / -blur
    f, g, left = -_top(scores, 1)[:, 0], np.zeros(len(columns)), iterations
    while True:
        kernel = np.exp(scores + f[:, None] + g)
        kernel[kernel < NOTHING] = 0.0
        u, v = np.ones(len(rows)), np.ones(len(columns))
        done, is_right = scale(kernel, np.ascontiguousarray(kernel.T), rows, columns, u, v, left, tolerance)
        left -= done
        if is_right or left <= 0:
            return np.asarray(u[:, None] * kernel * v)
        f = np.log(rows) - _log_sum(scores + g + np.log(v), 1)
        g, left = np.log(columns) - _log_sum(scores + f[:, None], 0), left - 1


def _log_sum(values: np.ndarray, axis: int) -> np.ndarray:
    top = _top(values, axis)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.exp(values - top).sum(axis=axis)) + np.squeeze(top, axis))


def _top(values: np.ndarray, axis: int) -> np.ndarray:
    top = values.max(axis=axis, keepdims=True)
    return np.where(np.isfinite(top), top, 0.0)


def _typical(cost: np.ndarray) -> float:
    """The mean cost, or 1 where all components are the same."""
    return float(cost.mean()) or 1.0


def _check(part: Sinkhorn | PartialSinkhorn) -> None:
    if not (part.blur > 0 and part.iterations >= 1 and part.tolerance >= 0):
        raise ParameterError(f"Sinkhorn needs blur > 0, iterations ≥ 1 and tolerance ≥ 0; got {part}.")
