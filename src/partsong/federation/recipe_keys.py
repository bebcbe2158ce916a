"""Keys of experiment.toml for recipes of `partsong.recipes`: what was told, and what cannot be meant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from partsong.core import Program
from partsong.errors import ParameterError
from partsong.federation.recipe_checks import CHECKS, SAFE
from partsong.federation.recipe_names import (
    AT_ONCE,
    BESIDE,
    FIRST_LEGS,
    PRIVATE_SKETCHES,
    SECURE,
    SHARED,
    TAKEN_BY,
    THEN_EXACT,
)
from partsong.federation.recipe_programs import Usual, made
from partsong.federation.topic_keys import refuse_key
from partsong.methods import COMMON_ONLY


@dataclass(frozen=True, slots=True)
class RecipeKeys:
    """What a recipe was told, beside what most methods share; a key that was not given is as the recipe has it."""

    given: Mapping[str, Any] = field(default_factory=dict)

    def require(self, method: str, rank: int, rounds: int, usual: Usual) -> None:
        """Refuse what the method does not take, or what it cannot mean, by its name."""
        if method == THEN_EXACT:
            self._require_legs(rounds)
        for name, value in {**usual.given, **self.given}.items():
            self._require_taken(name, method)
            CHECKS[name](name, value)
        self._require_meaning(self._leg(method), usual.start)
        self._require_pairs()
        if self.given or method in BESIDE:
            self.program(method, rank, usual)

    def require_plain(self, method: str, privacy: Mapping[str, Any]) -> None:
        """Refuse a key of which noisy sums over rows would take nothing over."""
        if privacy.get("unit") == "row" and self.given:
            told = " and ".join(self.given)
            raise ParameterError(f"{told} of {method} has no place in noisy sums over rows: leave it out.")

    def program(self, method: str, rank: int, usual: Usual) -> Program:
        """The recipe, with these keys."""
        return made(method, rank, usual, self.given)

    def _leg(self, method: str) -> str:
        """The method whose keys these are: of "then-exact" that of its first leg."""
        return str(self.given["first"]) if method == THEN_EXACT else method

    def _require_taken(self, name: str, method: str) -> None:
        takes = SHARED[name] if name in SHARED else TAKEN_BY[name]
        first = self.given.get("first") if method == THEN_EXACT else None
        if method in takes or first in takes:
            return
        if (method, name) == ("exact", "sweeps"):
            raise ParameterError('The sweeps of "exact" are its local_steps: give these.')
        refuse_key(name, method, of=f'"{THEN_EXACT}" with first = "{first}"' if first else "")

    def _require_legs(self, rounds: int) -> None:
        missing = [name for name in ("first", "first_rounds") if name not in self.given]
        if missing:
            raise ParameterError(
                f'"{THEN_EXACT}" needs {" and ".join(missing)}: with which method it begins ({", ".join(FIRST_LEGS)}), '
                "and for how many rounds; all others are exact."
            )
        for name in ("first", "first_rounds"):
            CHECKS[name](name, self.given[name])
        if self.given["first_rounds"] >= rounds:
            raise ParameterError(
                f"first_rounds = {self.given['first_rounds']} leaves none of {rounds} rounds to be exact. Take fewer, "
                f'or method = "{self.given["first"]}".'
            )

    def _require_meaning(self, leg: str, start: str | None) -> None:
        """Refuse what the method takes, but not with this value."""
        order, sketch = self.given.get("order"), self.given.get("sketch", PRIVATE_SKETCHES[0])
        if leg in COMMON_ONLY and start == "independent":
            raise ParameterError(f'method="{leg}" has one start for all parties: start must be None or "common".')
        if leg == "game" and order in AT_ONCE:
            raise ParameterError(
                f'order = "{order}" moves all players at once, which takes all rows in one place. Take another, or '
                'method = "game-consensus".'
            )
        if leg == SECURE and sketch not in PRIVATE_SKETCHES:
            raise ParameterError(
                f'sketch = "{sketch}" would send rows of a site as they are. Take {" or ".join(PRIVATE_SKETCHES)}.'
            )

    def _require_pairs(self) -> None:
        """Refuse keys that mean nothing without another."""
        if "step_decay" in self.given and self.given.get("step", SAFE) == SAFE:
            raise ParameterError("step_decay needs a number as step: safe steps set their own pace.")
        if "shrink" in self.given and self.given.get("self_play", "none") == "none":
            raise ParameterError('shrink needs self_play = "min" or "max".')
        if "columns_ratio" in self.given and "columns_sketch" not in self.given:
            raise ParameterError("columns_ratio needs columns_sketch: without one, steps of W are exact.")
