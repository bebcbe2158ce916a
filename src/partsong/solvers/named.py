"""Solvers by name: a rule, penalties and momentum to the half-steps that `NMF(solver=…)` and programs use."""

from __future__ import annotations

from typing import Any

from partsong.core.interfaces import UpdateRule
from partsong.core.parameters import real_number
from partsong.errors import ParameterError
from partsong.solvers.extrapolation import Extrapolation, NoExtrapolation
from partsong.solvers.normal_equations import Penalty
from partsong.solvers.squared_error import SquaredError
from partsong.solvers.update_rules import RULES, SWEEPS, CoordinateDescent


def accelerated_hals(penalty_W: Penalty = Penalty(), penalty_H: Penalty = Penalty()) -> SquaredError:
    """HALS with several sweeps per product and extrapolation with restart: the default solver of `NMF`."""
    return SquaredError(CoordinateDescent(sweeps=SWEEPS), penalty_W, penalty_H, Extrapolation())


def solver_of(rule: Any, alpha_W: Any = 0.0, alpha_H: Any = "same", l1_ratio: Any = 0.0) -> SquaredError:
    """Both half-steps with their penalties; the rule named "hals" extrapolates, all others are plain."""
    chosen = _rule_of(rule)
    is_same = isinstance(alpha_H, str) and alpha_H == "same"
    if isinstance(alpha_H, str) and not is_same:
        raise ParameterError(f"alpha_H must be a number or 'same'; got {alpha_H!r}.")
    on_W = _penalty_weight("alpha_W", alpha_W)
    on_H = on_W if is_same else _penalty_weight("alpha_H", alpha_H)
    l1 = real_number("l1_ratio", l1_ratio)
    if not 0 <= l1 <= 1:
        raise ParameterError(f"l1_ratio must lie between 0 and 1; got {l1_ratio!r}.")
    momentum = Extrapolation() if isinstance(rule, str) and rule == "hals" else NoExtrapolation()
    return SquaredError(chosen, Penalty(on_W * l1, on_W * (1 - l1)), Penalty(on_H * l1, on_H * (1 - l1)), momentum)


def _rule_of(rule: Any) -> UpdateRule:
    known = ", ".join((*RULES.names, "game"))
    if isinstance(rule, str) and rule not in RULES.values:
        raise ParameterError(f"Unknown solver {rule!r}; choose one of {known}.")
    is_rule = not isinstance(rule, type) and all(callable(getattr(rule, name, None)) for name in RULES.needed)
    if not isinstance(rule, str) and not is_rule:
        raise ParameterError(
            f"solver must be one of {known}, or an update rule such as CoordinateDescent(sweeps=2), or a Game; "
            f"got {rule!r}."
        )
    chosen: UpdateRule = RULES.parse("solver", rule)
    return chosen


def _penalty_weight(name: str, value: Any) -> float:
    weight = real_number(name, value)
    if not 0 <= weight < float("inf"):
        raise ParameterError(f"{name} must be zero or more, and finite; got {value!r}.")
    return weight
