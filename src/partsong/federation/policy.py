"""site.toml: what a site lets itself be asked for. It is read at the site alone, and no message can change it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from unicodedata import normalize

from partsong.errors import ParameterError
from partsong.federation.keys import nearest, only, read_toml, whole, words
from partsong.federation.refusals import Denied
from partsong.federation.topic_keys import RECIPES
from partsong.federation.word_policy import WordPolicy
from partsong.privacy.gaussian_curve import check_budget
from partsong.spending import USUAL_DELTA

PRIVACY_KEYS = ("epsilon", "delta", "unit", "insecure_noise", "noiseless_before")
POLICY_KEYS = (
    "recipes", "minimum_rows", "minimum_parties", "maximum_rounds", "maximum_runs", "masked", "minimum_mask_bound",
    "columns", "tell_names", "words", "privacy",
)  # fmt: skip

UNNAMED = tuple(name for name in RECIPES if name != "secure-dsanls")
"""Allowed where a site names none. Sketches of two open runs by `secure-dsanls` determine rows: it must be named."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """(ε, δ) about one unit over everything that the site ever releases; noise from a seed is for tests alone.

    `noiseless_before`: releases without noise, made before there was a budget, that it is known not to cover.
    """

    epsilon: float
    delta: float = USUAL_DELTA
    unit: str = "row"
    insecure_noise: bool = False
    noiseless_before: int = 0

    def __post_init__(self) -> None:
        check_budget(self.epsilon, self.delta, needs_delta=False)
        if self.unit not in ("row", "party"):
            raise ParameterError(f"privacy.unit is row or party; got {self.unit!r}.")
        if not isinstance(self.insecure_noise, bool):
            raise ParameterError(f"privacy.insecure_noise is true or false; got {self.insecure_noise!r}.")


@dataclass(frozen=True, slots=True)
class Wish:
    """What an experiment asks of a site, in the words of its policy."""

    recipe: str
    rank: int
    rounds: int
    parties: int
    masked: bool


@dataclass(frozen=True, slots=True)
class Policy:
    """Which recipes, how many rows, parties, rounds and runs, whether masks are needed, which columns, what privacy.

    `minimum_rows` None: 1 where masks or noise hide uploads, else 2k, rounded up to a power of two: who may choose k
    learns no more of the number of rows than that of its binary digits. It is not for a budget about rows, which the
    comparison would break. `columns`: names, or patterns with * and ?, of those that may leave; None: all.
    `maximum_runs`: over all time; None: any number. `minimum_mask_bound`: of the largest number that a masked upload
    may hold. `tell_names`: whether another site that lacks agreed columns is told their names, sealed, so that nobody
    can read them but a site of the roster with the same shared key. `words`: about runs over texts.
    """

    recipes: tuple[str, ...] = UNNAMED
    minimum_rows: int | None = None
    minimum_parties: int = 2
    maximum_rounds: int = 1000
    masked: bool = False
    columns: tuple[str, ...] | None = None
    privacy: Allowance | None = None
    maximum_runs: int | None = None
    minimum_mask_bound: float = 0.0
    tell_names: bool = True
    words: WordPolicy = WordPolicy()

    def __post_init__(self) -> None:
        if self.minimum_rows not in (None, 1) and self.privacy is not None and self.privacy.unit == "row":
            raise ParameterError(
                f'minimum_rows = {self.minimum_rows} does not go with privacy.unit = "row": whether a run is refused '
                "would tell of one row, with certainty. Leave minimum_rows out; how many rows there are is known here."
            )

    @staticmethod
    def from_table(table: Mapping[str, Any]) -> Policy:
        """From the table of a file; an unknown key is an error."""
        only(table, POLICY_KEYS, "site.toml")
        recipes = words(table, "recipes", UNNAMED)
        for recipe in recipes:
            if recipe not in RECIPES:
                raise ParameterError(f"recipes has {recipe!r}. {nearest(recipe, RECIPES)}")
        masked = table.get("masked", False)
        if not isinstance(masked, bool):
            raise ParameterError(f"masked is true or false; got {masked!r}.")
        tells = table.get("tell_names", True)
        if not isinstance(tells, bool):
            raise ParameterError(f"tell_names is true or false; got {tells!r}.")
        bound = table.get("minimum_mask_bound", 0.0)
        if type(bound) not in (int, float) or not 0 <= bound < math.inf:
            raise ParameterError(f"minimum_mask_bound must be a number, not negative; got {bound!r}.")
        return Policy(
            recipes,
            whole(table, "minimum_rows", None),
            whole(table, "minimum_parties", 2),
            whole(table, "maximum_rounds", 1000),
            masked,
            words(table, "columns", None),
            _allowance(table.get("privacy")),
            whole(table, "maximum_runs", None),
            float(bound),
            tells,
            WordPolicy.from_table(table.get("words", {})),
        )

    @staticmethod
    def read(path: Path) -> Policy:
        """From a file."""
        return Policy.from_table(read_toml(path))

    def require(self, wish: Wish, rows: int) -> None:
        """Refuse what is more than the site allows; the reason has local values, and stays."""
        if wish.recipe not in self.recipes:
            raise Denied("recipe", f"{wish.recipe!r} is asked for; allowed: {', '.join(self.recipes)}.")
        if wish.rounds > self.maximum_rounds:
            raise Denied("rounds", f"{wish.rounds} rounds are asked for; allowed: {self.maximum_rounds}.")
        if self.masked and not wish.masked:
            raise Denied("masks", "Sums in the open are asked for; site.toml asks for masked ones.")
        least = self._least_rows(wish)
        if rows < least:
            raise Denied("rows", f"This site holds {rows} rows; at least {least} are needed for rank {wish.rank}.")
        if wish.parties < self.minimum_parties:
            raise Denied(
                "parties", f"{wish.parties} parties would be in a sum; at least {self.minimum_parties} are needed."
            )

    def require_mask_bound(self, bound: float | None) -> None:
        """Refuse masked sums whose numbers are bounded by less; None: they are not."""
        if bound is not None and bound < self.minimum_mask_bound:
            raise Denied(
                "mask-bound", f"mask_bound would be {bound:g}; at least {self.minimum_mask_bound:g} is needed."
            )

    def _least_rows(self, wish: Wish) -> int:
        if self.minimum_rows is not None:
            return self.minimum_rows
        return 1 if wish.masked or self.privacy is not None else 1 << (2 * wish.rank - 1).bit_length()

    def require_run(self, run: str, before: Collection[str]) -> None:
        """Refuse a run that is one too many; `before` are all that there ever were."""
        if self.maximum_runs is not None and run not in before and len(before) >= self.maximum_runs:
            raise Denied("runs", f"{run!r} would be run {len(before) + 1}; allowed: {self.maximum_runs}.")

    def leaving(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Those of the columns that may leave, in their order."""
        if self.columns is None:
            return tuple(columns)
        patterns = [normalize("NFC", pattern).replace("[", "[[]") for pattern in self.columns]
        return tuple(
            name for name in columns if any(fnmatchcase(normalize("NFC", name), pattern) for pattern in patterns)
        )


def _allowance(table: Any) -> Allowance | None:
    if table is None:
        return None
    only(table, PRIVACY_KEYS, "The table privacy of site.toml")
    if "epsilon" not in table:
        raise ParameterError("The table privacy of site.toml needs epsilon.")
    numbers = (table["epsilon"], table.get("delta", USUAL_DELTA))
    if not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
        raise ParameterError(f"epsilon and delta must be numbers; got {numbers}.")
    rest = (table.get("unit", "row"), table.get("insecure_noise", False), whole(table, "noiseless_before", 0, 0))
    return Allowance(float(numbers[0]), float(numbers[1]), *rest)
