"""Recipes of `partsong.recipes` by the names of methods, from plain values; law: without keys, as `FederatedNMF`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from partsong import recipes
from partsong.core import Program
from partsong.federation.recipe_names import ALIGNING, BY_SUMS, GAMES, PLAYED, SECURE, THEN_EXACT
from partsong.game_names import game_named
from partsong.methods import LOCAL_ONLY, LOCAL_STEPS, LONG_ROUNDS, SKETCHED, alignment_for, start_of
from partsong.programs.consensus import Consensus
from partsong.programs.relay import Relay
from partsong.settings import alignment_of
from partsong.sketch.proportion import Proportion

USUAL_STEPS = {**LOCAL_STEPS, BY_SUMS: 100, PLAYED: 10}
USUAL_START = {BY_SUMS: recipes.INDEPENDENT}
AS_THEY_ARE = ("accelerate", "variant", "strength", "every", "sweeps", "weighted", "rho")
"""Keys whose values recipes take as they are."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A function of `partsong.recipes`: what it calls local_steps, whether it takes a start, what the name settles."""

    make: Callable[..., Program]
    steps: str | None = "steps"
    has_start: bool = False
    settled: Mapping[str, Any] = field(default_factory=dict)


RECIPE_OF: Mapping[str, Recipe] = {
    "exact": Recipe(recipes.shared_statistics, "sweeps"),
    "fnmf": Recipe(recipes.fnmf, has_start=True),
    "fnmf-alone": Recipe(recipes.fnmf, has_start=True),
    BY_SUMS: Recipe(recipes.fnmf_by_sums, has_start=True),
    "fedavg": Recipe(recipes.fedavg, has_start=True),
    "fedprox": Recipe(recipes.fedprox, has_start=True),
    "ipalm-once": Recipe(recipes.ipalm_once, has_start=True),
    "mur-once": Recipe(recipes.mur_once, has_start=True),
    LOCAL_ONLY: Recipe(recipes.local_only),
    "syn-sd": Recipe(recipes.syn_sd),
    **{name: Recipe(recipes.syn_ssd, settled={"variant": name.removeprefix("syn-ssd-")}) for name in SKETCHED},
    "asyn-sd": Recipe(recipes.asyn_sd),
    "asyn-ssd-v": Recipe(recipes.asyn_ssd_v),
    SECURE: Recipe(recipes.secure_dsanls, None),
    "game": Recipe(recipes.game, "repeats"),
    PLAYED: Recipe(recipes.game_consensus, has_start=True),
}
"""Method -> its recipe; "then-exact" is `recipes.then_exact` of another one of these."""


@dataclass(frozen=True, slots=True)
class Usual:
    """local_steps, align and start as they were told; None: as the method does."""

    local_steps: int | None = None
    align: str | None = None
    start: str | None = None

    @property
    def given(self) -> dict[str, Any]:
        """Those that were set, by name."""
        told = {"local_steps": self.local_steps, "align": self.align, "start": self.start}
        return {name: value for name, value in told.items() if value is not None}

    def arguments(self, method: str) -> dict[str, Any]:
        """For the recipe of a method, by its own names."""
        recipe = RECIPE_OF[method]
        found: dict[str, Any] = {}
        if recipe.steps is not None:
            found[recipe.steps] = USUAL_STEPS[method] if self.local_steps is None else self.local_steps
        if recipe.has_start:
            found["start"] = self.start or USUAL_START.get(method) or start_of(method, None)
        if method in ALIGNING:
            align = alignment_of(alignment_for(method, self.align))
            found |= {"align": align} if method == BY_SUMS else {"client_align": align, "server_align": align}
        return found


def made(method: str, rank: int, usual: Usual, keys: Mapping[str, Any]) -> Program:
    """The program of a method; what is sent is in the docstring of its recipe."""
    if method == THEN_EXACT:
        first = made(keys["first"], rank, usual, keys)
        return recipes.then_exact(first, keys["first_rounds"] * sweeps_of(first))
    recipe = RECIPE_OF[method]
    program = recipe.make(rank, **recipe.settled, **{**usual.arguments(method), **_arguments(method, rank, keys)})
    return recipes.then_exact(program, LONG_ROUNDS) if method == "fnmf" else program


def sweeps_of(program: Program) -> int:
    """Exchanges that a round of it takes, where it is a consensus."""
    return program.sweeps if isinstance(program, Consensus) else 1


def exchanges_of(program: Program, rounds: int, n_parties: int) -> int:
    """Exchanges of so many rounds: of a relay, the first leg's as they are, and one for each exact round."""
    if isinstance(program, Relay):
        return program.rounds + rounds - program.rounds // sweeps_of(program.first)
    counts: Any = getattr(program, "rounds_for", None)
    among: Any = getattr(program, "exchanges_among", None)
    if among is not None:
        return rounds * int(among(n_parties))
    return rounds * sweeps_of(program) if counts is None else int(counts(rounds))


def _arguments(method: str, rank: int, keys: Mapping[str, Any]) -> dict[str, Any]:
    """What keys mean to the recipe of a method."""
    found: dict[str, Any] = {name: keys[name] for name in AS_THEY_ARE if name in keys}
    found |= {name: alignment_of(keys[name]) for name in ("client_align", "server_align") if name in keys}
    if "rule" in keys:
        found["rule"] = recipes.solver_rules()[keys["rule"]]
    if method == SECURE:
        return found | _secure(rank, keys)
    if {"sketch", "sketch_ratio"} & keys.keys():
        found["sketch"] = _proportion(keys, "sketch", "sketch_ratio")
    if method in GAMES:
        game = game_named({**keys, "play": keys.get("order")})
        parts = {name: getattr(game, name) for name in ("order", "step", "self_play", "leader")}
        found |= {"game": game} if method == PLAYED else parts
    return found


def _secure(rank: int, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Sketches of rows have a dimension, by default as the recipe has it; of columns, a share of their number."""
    found: dict[str, Any] = {}
    if {"sketch", "sketch_dimension"} & keys.keys():
        kind = recipes.sketches()[keys.get("sketch", "gaussian")]
        found["sketch"] = kind(keys.get("sketch_dimension", 4 * rank))
    if "columns_sketch" in keys:
        found["columns_sketch"] = _proportion(keys, "columns_sketch", "columns_ratio")
    return found


def _proportion(keys: Mapping[str, Any], kind: str, ratio: str) -> Proportion:
    usual = Proportion()
    chosen = recipes.sketches()[keys[kind]] if kind in keys else usual.kind
    return Proportion(chosen, keys.get(ratio, usual.ratio))
