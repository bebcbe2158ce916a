"""experiment.toml: a recipe, its rounds, its masks and its promise, in plain values that every site reads by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from partsong.aggregate.reduction import InTheOpen
from partsong.core import Program, Reduction, Schedule
from partsong.errors import ParameterError
from partsong.federation.columns import RULES, SAME
from partsong.federation.keys import nearest, only, read_toml, whole
from partsong.federation.policy import Wish
from partsong.federation.recipe_keys import RecipeKeys
from partsong.federation.recipe_names import IN_SUMS, OUTSIDE, RECIPE_KEYS
from partsong.federation.recipe_programs import Usual, exchanges_of
from partsong.federation.topic_keys import RECIPES, TOPIC_KEYS, TOPIC_METHODS, TopicKeys, require_own_names
from partsong.federation.topic_participation import DrawnSchedule, drawn, masks_over
from partsong.federation.word_rule import TextRule
from partsong.methods import ASYNCHRONOUS, ONE_ROUND
from partsong.privacy.admission import Roster
from partsong.promises import Privacy, masks_for, privacy_from
from partsong.settings import require_privacy, stop_of

KEYS = (
    "method", "rank", "rounds", "local_steps", "align", "start", "seed", "masked", "mask_bound", "faulty", "columns",
    "time_budget", "tol", "privacy", "words", *dict.fromkeys((*RECIPE_KEYS, *TOPIC_KEYS)),
)  # fmt: skip
PRIVACY_KEYS = ("unit", "epsilon", "delta", "relation", "noise_multiplier", "clip", "kind", "row_bound")
FAULTY = ("stop", "leave out")
ENDS = ("time_budget", "tol")


@dataclass(frozen=True, slots=True)
class Experiment:
    """What everybody runs; the same plain values make the same program, reduction and schedule everywhere.

    `columns`: "same" where all sites must hold the same ones, "common" to take those that all have. `mask_bound`: the
    largest number that a party adds to a masked sum. Where nobody waits for others (`is_asynchronous`), a round is as
    many arrivals as there are sites; such a run also ends after `time_budget` seconds, or once the arrivals of a round
    have moved H by no more than `tol` of its norm. `topics` are keys of methods of topics, `recipe` those of all other
    methods that not all of them have; in a file they stand beside the rest.
    `words`: sites hold texts, and agree on words by this rule before the first round; None: they hold tables.
    """

    method: str
    rank: int
    rounds: int
    local_steps: int | None = None
    align: str | None = None
    start: str | None = None
    seed: int = 0
    masked: bool = False
    mask_bound: float | None = None
    faulty: str = "stop"
    columns: str = SAME
    privacy: Mapping[str, Any] = field(default_factory=dict)
    time_budget: float | None = None
    tol: float = 0.0
    topics: TopicKeys = TopicKeys()
    words: Mapping[str, Any] | None = None
    recipe: RecipeKeys = RecipeKeys()

    def __post_init__(self) -> None:
        if (reason := OUTSIDE.get(str(self.method).replace("_", "-"))) is not None:
            raise ParameterError(f"{self.method!r} {reason}.")
        if self.method not in RECIPES:
            raise ParameterError(f"method is {str(self.method)[:60]!r}. {nearest(str(self.method), RECIPES)}")
        for name, value, known in (("faulty", self.faulty, FAULTY), ("columns", self.columns, RULES)):
            if value not in known:
                raise ParameterError(f"{name} is {str(value)[:60]!r}. {nearest(str(value), known)}")
        if not isinstance(self.masked, bool):
            raise ParameterError(f"masked is true or false; got {self.masked!r}.")
        bound = self.mask_bound
        if bound is not None and (type(bound) not in (int, float) or not 0 < bound < math.inf):
            raise ParameterError(f"mask_bound must be a positive number; got {bound!r}.")
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 63:
            raise ParameterError(f"seed must be a whole number from 0 to 2^63; got {self.seed!r}.")
        self._check_ends()
        if self.text_rule is not None and self.privacy:
            raise ParameterError(
                "Sites agree on words by sums without noise, so that no budget could be promised for a run over texts. "
                "Leave the table privacy out, or run over tables of counts whose columns are public."
            )
        self.topics.require(self.method)
        if self.is_of_topics:
            others = self.usual.given | dict(self.recipe.given)
            self.topics.require_alone(self.method, others, privacy=self.privacy, masked=self.masked)
            return
        self.recipe.require(self.method, self.rank, self.rounds, self.usual)
        self.recipe.require_plain(self.method, self.privacy)
        require_privacy(self.promise, self.masked, self.method, steps=self.local_steps, time_budget=None)

    def _check_ends(self) -> None:
        stop_of(self.tol, self.time_budget)
        early = [name for name, value in zip(ENDS, (self.time_budget, self.tol), strict=True) if value]
        if early and not self.is_asynchronous:
            raise ParameterError(
                f"{' and '.join(early)} can end a run of {', '.join(ASYNCHRONOUS)} alone, in which sites do not share "
                f"rounds; the method is {self.method!r}. Leave it out, and give a number of rounds."
            )

    @staticmethod
    def from_table(table: Mapping[str, Any]) -> Experiment:
        """From the table of a file or a message; an unknown key is an error."""
        require_own_names(table)
        only(table, KEYS, "The experiment")
        for name in ("method", "rank", "rounds"):
            if table.get(name) is None:
                raise ParameterError(f"The experiment needs {name}.")
        only(table.get("privacy") or {}, PRIVACY_KEYS, "The table privacy of the experiment")
        for name in ("rank", "rounds", "local_steps"):
            if table.get(name) is not None:
                whole(table, name, None)
        given = {name: value for name, value in table.items() if value is not None}
        of_topics = set(TOPIC_KEYS) if given["method"] in TOPIC_METHODS else set(TOPIC_KEYS) - set(RECIPE_KEYS)
        topics = TopicKeys(**{name: given.pop(name) for name in TOPIC_KEYS if name in of_topics & given.keys()})
        recipe = RecipeKeys({name: given.pop(name) for name in RECIPE_KEYS if name in given})
        return Experiment(**given, topics=topics, recipe=recipe)

    @staticmethod
    def read(path: Path) -> Experiment:
        """From a file."""
        return Experiment.from_table(read_toml(path))

    def told(self) -> dict[str, Any]:
        """Plain values, for a message; what a fault leads to, and an early end, are the server's affair."""
        told = {**asdict(self), "privacy": dict(self.privacy)}
        kept_back = ("faulty", "topics", "recipe", *ENDS, *(() if self.words is not None else ("words",)))
        plain = {name: value for name, value in told.items() if name not in kept_back}
        return plain | self.topics.given | dict(self.recipe.given)

    @property
    def is_asynchronous(self) -> bool:
        """Whether the server takes in what arrives, and nobody waits for others."""
        return self.method in ASYNCHRONOUS

    @property
    def is_of_topics(self) -> bool:
        """Whether the method is one of topics, with keys of its own."""
        return self.method in TOPIC_METHODS

    @property
    def usual(self) -> Usual:
        """What most methods can be told."""
        return Usual(self.local_steps, self.align, self.start)

    @property
    def text_rule(self) -> TextRule | None:
        """Which words of texts it is about; None where it is about tables."""
        return None if self.words is None else TextRule.from_table(self.words, self.method)

    @property
    def promise(self) -> Privacy | None:
        """Differential privacy, if it is asked for."""
        return privacy_from(self.privacy)

    def program(self, n_parties: int) -> Program:
        """The recipe, with noise where that was asked for."""
        if self.is_of_topics:
            return self.topics.program(self.method, self.rank)
        plain = self.recipe.program(self.method, self.rank, self.usual)
        if (promise := self.promise) is None:
            return plain
        return promise.program(plain, self.exchanges(plain, n_parties), n_parties, self.masked)

    def reduction(self, n_parties: int, roster: Roster | None = None) -> Reduction:
        """Sums in the open, or masked among the parties of a roster."""
        if not self.masked:
            return InTheOpen()
        masks: Reduction = replace(masks_for(self.promise, n_parties, self.mask_bound), roster=roster)
        return masks_over(masks, self.method, n_parties, self.topics.fraction) if self.is_of_topics else masks

    def schedule(self, n_parties: int) -> Schedule:
        """How the server runs it: with all sites in each round, or with some that are drawn from the seed."""
        rounds = self.exchanges(self.program(n_parties), n_parties)
        if self.topics.fraction < 1:
            return DrawnSchedule(rounds, self.seed, faulty=self.faulty, fraction=self.topics.fraction)
        return Schedule(rounds, self.seed, faulty=self.faulty)

    def exchanges(self, program: Program, n_parties: int) -> int:
        """Exchanges that the rounds take: of several each, where the program says so, and arrivals of all sites."""
        if self.is_asynchronous:
            return self.rounds * n_parties
        return exchanges_of(program, 1 if self.method in ONE_ROUND else self.rounds, n_parties)

    def wish(self, n_parties: int) -> Wish:
        """In the words of a site's policy. Where nobody waits, all arrivals may be those of one site; where sites are
        drawn, only these are in a sum; where whoever writes the experiment sets the sums of a round, these are counted.
        """
        counts_sums = self.is_asynchronous or self.method in IN_SUMS
        rounds = self.exchanges(self.program(n_parties), n_parties) if counts_sums else self.rounds
        return Wish(self.method, self.rank, rounds, drawn(n_parties, self.topics.fraction), self.masked)
