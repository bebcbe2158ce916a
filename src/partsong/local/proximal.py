"""Coordinate descent that is held back more and more: what problems need that are sketched anew in every step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from partsong.core import Array, Claim
from partsong.errors import ParameterError
from partsong.local.coordinate import CoordinateDescent
from partsong.local.equations import NormalEquations
from partsong.local.rules import RuleState


@dataclass(frozen=True, slots=True)
class ProximalDescent:
    """Coordinate descent with a proximal weight in units of the first problem's own size.

        F_j ← max(0, (μ_t F⁰_j + cross_j − Σ_{l≠j} F_l gram_lj) / (gram_jj + μ_t)),   μ_t = (alpha + beta·t)·s

    s is the mean diagonal of the gram at the first step, so that nothing depends on the scale of the data. The settings
    of Qian et al. (2020), Alg. 3, are in the units of their data: `CoordinateDescent(alpha=…, beta=…)`.
    """

    sweeps: int = 1
    alpha: float = 0.01
    beta: float = 0.01

    def __post_init__(self) -> None:
        if self.sweeps < 1 or not (0 <= self.alpha < math.inf and 0 <= self.beta < math.inf):
            raise ParameterError(f"ProximalDescent needs sweeps ≥ 1, and alpha and beta ≥ 0 and finite; got {self}.")

    @property
    def claims(self) -> frozenset[Claim]:
        """Its weights scale with the problem, as the step does."""
        return frozenset({Claim.MONOTONE, Claim.ROW_SEPARABLE, Claim.SCALE_EQUIVARIANT})

    def init(self, factor: Array) -> RuleState:
        """No scale seen yet."""
        return RuleState()

    def step(self, factor: Array, equations: NormalEquations, state: RuleState) -> tuple[Array, RuleState]:
        """One application of the rule."""
        seen = replace(state, scale=state.scale or _mean_diagonal(equations.gram))
        inner = CoordinateDescent(self.sweeps, self.alpha * seen.scale, self.beta * seen.scale)
        return inner.step(factor, equations, seen)


def _mean_diagonal(gram: Array) -> float:
    """Zero for a problem without any component, whose scale is then asked for again."""
    return float(gram.diagonal().sum()) / gram.shape[0]


def converges_when_sketched(alpha: float, beta: float) -> bool:
    """Σ 1/μ_t = ∞ and Σ 1/μ_t² < ∞ for μ_t = alpha + beta·t (Qian et al., 2020, Thm. 1): true for every beta > 0.

    With beta = 0 the second sum is infinite: iterates keep moving about a stationary point, by some 1/μ.
    """
    if alpha < 0 or beta < 0:
        raise ParameterError(f"Proximal weights are not negative; got alpha={alpha}, beta={beta}.")
    return beta > 0


def warn_unless_convergent(alpha: float, beta: float) -> None:
    """A UserWarning where Theorem 1 does not hold, in the name of whoever makes a program that asks in its check."""
    if not converges_when_sketched(alpha, beta):
        warnings.warn(
            f"With beta = 0 (alpha = {alpha:g}) the proximal weights do not grow, and sketched steps are not known to "
            "converge (Σ 1/μ² is infinite): they end in noise around a stationary point. Take beta > 0.",
            UserWarning,
            stacklevel=5,
        )


def warn_if_noisy(rule: Any) -> None:
    """A UserWarning where a rule's steps do not shrink enough for Theorem 1: weights, or step sizes, that stay."""
    if hasattr(rule, "alpha") and hasattr(rule, "beta"):
        warn_unless_convergent(rule.alpha, rule.beta)
    elif getattr(rule, "decay", 1.0) == 0:
        warnings.warn(
            f"{rule} has steps that do not shrink, and sketched ones are not known to converge (Σ η² is infinite): "
            "they end in noise around a stationary point. Take decay > 0.",
            UserWarning,
            stacklevel=4,
        )


def damping_grid(values: Sequence[float] = (0.1, 1.0, 10.0), *, sweeps: int = 1) -> list[CoordinateDescent]:
    """All pairs alpha, beta of these values, in the units of the data, as Qian et al. (2020) try them."""
    return [CoordinateDescent(sweeps, alpha, beta) for alpha in values for beta in values]
