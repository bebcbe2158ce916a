"""site.toml: what a site accepts to be asked for. It is read at the site alone, and no message can change it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal
from unicodedata import normalize

from msgspec import Meta

from partsong.errors import ParameterError
from partsong.federation.experiment import METHODS, RunRequest
from partsong.federation.text_rule import TextRule
from partsong.federation.toml_files import FINITE, Count, Positive, load_toml, one_of, parse_table
from partsong.federation.wire import Denied
from partsong.privacy.accounting import check_budget
from partsong.privacy.exposure import LIMITS, Exposure
from partsong.privacy.spending import USUAL_DELTA

UNNAMED = tuple(name for name in METHODS if name != "secure-dsanls")
"""Allowed where a site names none. Sketches of two open runs by `secure-dsanls` determine rows: it must be named."""


@dataclass(frozen=True, slots=True)
class PrivacyBudget:
    """The table [privacy]: (ε, δ) about one unit over everything that the site ever releases.

    `insecure_noise`: whether noise may come from a seed, for tests. `noiseless_before`: releases without noise, made
    before there was a budget, which the budget does not cover.
    """

    epsilon: float
    delta: float = USUAL_DELTA
    unit: Literal["row", "party"] = "row"
    insecure_noise: bool = False
    noiseless_before: Count = 0

    def __post_init__(self) -> None:
        check_budget(self.epsilon, self.delta, needs_delta=False)


@dataclass(frozen=True, slots=True)
class WordPolicy:
    """The table [words]: whether runs over texts are allowed, and in how many documents and at how many sites a word
    must be.
    """

    allowed: bool = True
    minimum_documents: Positive = 1
    minimum_parties: Positive = 2

    def require(self, rule: TextRule) -> None:
        """Refuse a rule that asks for less."""
        if not self.allowed:
            raise Denied("words", "site.toml does not allow runs over texts (words.allowed).")
        for name, asked, least in (
            ("documents", rule.min_documents, self.minimum_documents),
            ("parties", rule.min_parties, self.minimum_parties),
        ):
            if asked < least:
                raise Denied(
                    "words", f"min_{name} = {asked} is asked for; site.toml asks for {least} (words.minimum_{name})."
                )


@dataclass(frozen=True, slots=True)
class Policy:
    """site.toml: which methods, how many rows, parties, rounds and runs, masks, columns, privacy.

    `minimum_rows` None: 1 where masks or noise hide uploads, else 2k, rounded up to a power of two: a server that
    chooses k learns only the number of binary digits of the number of rows. `columns`: names, or patterns with * and ?,
    of those that may leave; None: all. `maximum_runs`: over all time; None: any number. `minimum_mask_bound`: least
    bound of the numbers in a masked upload. `tell_names`: whether a site of the roster that lacks agreed columns gets
    their names, sealed under the shared key. `words`: about runs over texts.

    `maximum_exposure`: what may be computed from all combinations of rows that ever leave without noise
    (`privacy.exposure`); a run that would exceed it is refused. Under masks the number of combinations is rounded up
    to a power of two, for the same reason as above. `rare_columns`: whether columns that too few rows use are a reason
    to refuse, or are set to zero in the run. `other_rows_since`: the line of the ledger after which the rows are others
    than before; only combinations after it count. `directions_before`: combinations of releases for which the ledger
    does not record their number.
    """

    recipes: tuple[Annotated[str, one_of(METHODS)], ...] = UNNAMED
    minimum_rows: Positive | None = None
    minimum_parties: Positive = 2
    maximum_rounds: Positive = 1000
    masked: bool = False
    columns: tuple[Annotated[str, Meta(min_length=1)], ...] | None = None
    privacy: PrivacyBudget | None = None
    maximum_runs: Positive | None = None
    minimum_mask_bound: Annotated[float, Meta(ge=0, le=FINITE)] = 0.0
    tell_names: bool = True
    words: WordPolicy = WordPolicy()
    maximum_exposure: Annotated[Exposure, one_of(LIMITS)] = Exposure.MEMBERSHIP
    rare_columns: Literal["refuse", "zero"] = "refuse"
    other_rows_since: Count = 0
    directions_before: Count | None = None

    def __post_init__(self) -> None:
        # Whether a run is refused would depend on a single row, with probability 1.
        if self.minimum_rows not in (None, 1) and self.privacy is not None and self.privacy.unit == "row":
            raise ParameterError(
                f'minimum_rows = {self.minimum_rows} does not go with privacy.unit = "row": whether a run is refused '
                "would tell of one row, with certainty. Remove minimum_rows."
            )

    @staticmethod
    def from_table(table: Any) -> Policy:
        """Parse the table of a site.toml."""
        return parse_table(table, Policy, "site.toml")

    @staticmethod
    def read(path: Path) -> Policy:
        """Load a site.toml."""
        return load_toml(path, Policy)

    def require(self, request: RunRequest, rows: int) -> None:
        """Refuse what the site does not allow. The reason has local values and does not leave the site."""
        if request.recipe not in self.recipes:
            raise Denied("recipe", f"{request.recipe!r} is asked for; allowed: {', '.join(self.recipes)}.")
        if request.rounds > self.maximum_rounds:
            raise Denied("rounds", f"{request.rounds} rounds are asked for; allowed: {self.maximum_rounds}.")
        if self.masked and not request.masked:
            raise Denied("masks", "Sums in the open are asked for; site.toml asks for masked ones.")
        least = self.minimum_rows
        if least is None:
            is_hidden = request.masked or self.privacy is not None
            least = 1 if is_hidden else 1 << (2 * request.rank - 1).bit_length()
        if rows < least:
            raise Denied("rows", f"This site holds {rows} rows; at least {least} are needed for rank {request.rank}.")
        if request.parties < self.minimum_parties:
            raise Denied(
                "parties", f"{request.parties} parties would be in a sum; at least {self.minimum_parties} are needed."
            )

    def require_mask_bound(self, bound: float | None) -> None:
        """Refuse masked sums with a smaller bound; None: sums in the open."""
        if bound is not None and bound < self.minimum_mask_bound:
            raise Denied(
                "mask-bound", f"mask_bound would be {bound:g}; at least {self.minimum_mask_bound:g} is needed."
            )

    def require_run(self, run: str, before: Collection[str]) -> None:
        """Refuse a run beyond `maximum_runs`; `before` are all that there ever were."""
        if self.maximum_runs is not None and run not in before and len(before) >= self.maximum_runs:
            raise Denied("runs", f"{run!r} would be run {len(before) + 1}; allowed: {self.maximum_runs}.")

    def leaving(self, columns: Sequence[str]) -> tuple[str, ...]:
        """The columns that may leave, in their order."""
        if self.columns is None:
            return tuple(columns)
        patterns = [normalize("NFC", pattern).replace("[", "[[]") for pattern in self.columns]
        return tuple(
            name for name in columns if any(fnmatchcase(normalize("NFC", name), pattern) for pattern in patterns)
        )
