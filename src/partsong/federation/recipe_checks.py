"""What each key of a recipe may be: a name, a truth, a whole number or a number within bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from partsong import recipes
from partsong.errors import ParameterError
from partsong.federation.keys import nearest
from partsong.federation.recipe_names import FIRST_LEGS
from partsong.local.board import LEADERS
from partsong.methods import ALIGNMENTS, STARTS
from partsong.settings import real_number, whole_number

Check = Callable[[str, Any], Any]
SAFE = "safe"


def chosen(known: tuple[str, ...]) -> Check:
    """One of some names, or an error with the nearest."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, str) or value not in known:
            raise ParameterError(f"{name} is {str(value)[:60]!r}. {nearest(str(value), known)}")

    return check


def true_or_false(name: str, value: Any) -> None:
    """A truth."""
    if not isinstance(value, bool):
        raise ParameterError(f"{name} is true or false; got {value!r}.")


def above_zero(name: str, value: Any) -> None:
    """A finite number above 0."""
    if not 0 < real_number(name, value) < math.inf:
        raise ParameterError(f"{name} must be a number above 0; got {value!r}.")


def not_negative(name: str, value: Any) -> None:
    """A finite number of at least 0."""
    if not 0 <= real_number(name, value) < math.inf:
        raise ParameterError(f"{name} must be a number of at least 0; got {value!r}.")


def share(name: str, value: Any) -> None:
    """A number above 0 and at most 1."""
    if not 0 < real_number(name, value) <= 1:
        raise ParameterError(f"{name} must be above 0 and at most 1; got {value!r}.")


def factor(name: str, value: Any) -> None:
    """A number from 0 to 1."""
    if not 0 <= real_number(name, value) <= 1:
        raise ParameterError(f"{name} must be from 0 to 1; got {value!r}.")


def pace(name: str, value: Any) -> None:
    """A step of a game: by the players' norms, or η."""
    if isinstance(value, str) and value != SAFE:
        raise ParameterError(f'{name} is "{SAFE}" or a number above 0; got {value[:60]!r}.')
    if value != SAFE:
        above_zero(name, value)


CHECKS: Mapping[str, Check] = {
    "local_steps": whole_number,
    "align": chosen(ALIGNMENTS),
    "start": chosen(STARTS),
    "accelerate": true_or_false,
    "variant": chosen(("paper", "robust")),
    "every": whole_number,
    "strength": not_negative,
    "client_align": chosen(ALIGNMENTS),
    "server_align": chosen(ALIGNMENTS),
    "sweeps": whole_number,
    "weighted": true_or_false,
    "rule": chosen(tuple(recipes.solver_rules())),
    "rho": above_zero,
    "sketch": chosen(tuple(recipes.sketches())),
    "sketch_ratio": share,
    "sketch_dimension": whole_number,
    "columns_sketch": chosen(tuple(recipes.sketches())),
    "columns_ratio": share,
    "order": chosen(tuple(recipes.orders())),
    "step": pace,
    "step_decay": above_zero,
    "self_play": chosen(tuple(recipes.self_plays())),
    "shrink": factor,
    "leader": chosen(tuple(name for name in LEADERS if name is not None)),
    "first": chosen(FIRST_LEGS),
    "first_rounds": whole_number,
}
"""Key -> what it may be."""
