"""experiment.toml: method, rounds, masks and privacy, as plain values from which server and sites build one run."""

from __future__ import annotations

import codecs
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from partsong import methods
from partsong.aggregation.plaintext import InTheOpen
from partsong.core.interfaces import Program, Reduction, Schedule
from partsong.core.parameters import read_toml
from partsong.errors import ParameterError
from partsong.estimators.parties import require_privacy
from partsong.estimators.validation import stop_of
from partsong.federation.method_keys import (
    ADVICE,
    METHOD_KEYS,
    METHODS,
    ONLY_TEXTS,
    PARTICIPATION,
    check_options,
    check_topic_privacy,
    require_method,
)
from partsong.federation.participation import DrawnSchedule, drawn, masks_over
from partsong.federation.policy import RunRequest
from partsong.federation.text_rule import TextRule
from partsong.federation.toml_files import FINITE, Positive, parse_table, read_table, require_known
from partsong.methods.privacy_request import Privacy, masks_for, privacy_from
from partsong.methods.registry import Problem
from partsong.secure_aggregation.messages import Roster

SHARED = ("local_steps", "align", "start")
"""Options of methods that every experiment has, if only as none."""
ENDS = ("time_budget", "tol")


@dataclass(frozen=True, slots=True)
class PrivacyTable:
    """The keys of [privacy]; `methods.privacy_request` says which go together."""

    unit: Literal["row", "party"]
    epsilon: float
    delta: float | None = None
    relation: str | None = None
    noise_multiplier: float | None = None
    clip: float | None = None
    kind: str | None = None
    row_bound: float | None = None


@dataclass(frozen=True, slots=True)
class Experiment:
    """What server and sites run: the same values build the same program, reduction and schedule everywhere.

    `columns`: "same" if all sites must hold the same ones, "common" to take those that all have. `mask_bound`: the
    largest number that a party adds to a masked sum. In an asynchronous run (`is_asynchronous`), a round is as many
    arrivals as there are sites; such a run also ends after `time_budget` seconds, or once the arrivals of a round have
    moved H by at most `tol` of its norm. `words`: sites hold texts, and agree on words by this rule before the first
    round; None: they hold tables. `options`: further parameters of the method, and `participation` for topics. In a
    file they stand beside the other keys.
    """

    method: str
    rank: Positive
    rounds: Positive
    local_steps: Positive | None = None
    align: str | None = None
    start: str | None = None
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    masked: bool = False
    mask_bound: Annotated[float, Meta(gt=0, le=FINITE)] | None = None
    faulty: Literal["stop", "leave out"] = "stop"
    columns: Literal["same", "common"] = "same"
    privacy: Mapping[str, Any] = field(default_factory=dict)
    time_budget: float | None = None
    tol: float = 0.0
    words: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_method(self.method)
        self._check_ends()
        if self.privacy:
            parse_table(self.privacy, PrivacyTable, "privacy")
        if self.text_rule is not None and self.privacy:
            raise ParameterError(
                "Sites agree on words by sums without noise, so that no budget could be promised for a run over texts. "
                "Leave the table privacy out, or run over tables of counts whose columns are public."
            )
        method = methods.method(self.method)
        check_options(method, {**self._own_options, **self.options})
        if self.is_of_topics:
            check_topic_privacy(method, self.options, privacy=self.privacy, masked=self.masked)
        else:
            require_privacy(self.promise, self.masked, self.method, options=self._own_options, time_budget=None)
        method.build(Problem(self.rank, rounds=self.rounds), self._own_options)

    def _check_ends(self) -> None:
        stop_of(self.tol, self.time_budget)
        early = [name for name, value in zip(ENDS, (self.time_budget, self.tol), strict=True) if value]
        if early and not self.is_asynchronous:
            asynchronous = (name for name in METHODS if methods.method(name).traits.asynchronous)
            raise ParameterError(
                f"{' and '.join(early)} can end a run of {', '.join(asynchronous)} alone, in which sites do not share "
                f"rounds; the method is {self.method!r}. Leave it out, and give a number of rounds."
            )

    @staticmethod
    def from_table(table: Mapping[str, Any], where: str = "The experiment") -> Experiment:
        """Parse the table of a file or a message; `where` begins every error."""
        require_known(table, KEYS, where, ADVICE)
        given = {name: value for name, value in table.items() if value is not None}
        options = {name: given.pop(name) for name in METHOD_KEYS if name in given and name not in SHARED}
        return parse_table({**given, "options": options}, Experiment, where)

    @staticmethod
    def read(path: Path) -> Experiment:
        """Load an experiment.toml."""
        return Experiment.from_table(read_table(path, Experiment), str(path))

    def told(self) -> dict[str, Any]:
        """Plain values for a message. How faults are handled, and when a run ends early, stays at the server."""
        kept_back = ("faulty", "options", *ENDS, *(() if self.words is not None else ("words",)))
        plain = {name: value for name, value in asdict(self).items() if name not in kept_back}
        return plain | dict(self.options)

    @property
    def is_asynchronous(self) -> bool:
        """Whether the server takes answers as they arrive."""
        return methods.method(self.method).traits.asynchronous

    @property
    def is_of_topics(self) -> bool:
        """Whether the method is one of topics, with keys of its own."""
        return self.method in ONLY_TEXTS

    @property
    def fraction(self) -> float:
        """C, the share of sites that are drawn for each round."""
        return float(self.options.get(PARTICIPATION, 1.0))

    @property
    def _own_options(self) -> dict[str, Any]:
        """Options of the method itself."""
        shared = {name: getattr(self, name) for name in SHARED}
        given = {name: value for name, value in shared.items() if value is not None}
        return given | {name: value for name, value in self.options.items() if name != PARTICIPATION}

    @property
    def text_rule(self) -> TextRule | None:
        """The words of texts that the run is about; None for a run over tables."""
        return None if self.words is None else TextRule.from_table(self.words, self.method)

    @property
    def promise(self) -> Privacy | None:
        """Differential privacy, if it is asked for."""
        return privacy_from(self.privacy)

    def program(self, n_parties: int) -> Program:
        """Build the program, with noise if the experiment asks for privacy."""
        plain = methods.method(self.method).build(Problem(self.rank, n_parties, self.rounds), self._own_options)
        if (promise := self.promise) is None:
            return plain
        return promise.program(plain, self.exchanges(plain, n_parties), n_parties, self.masked)

    def reduction(self, n_parties: int, roster: Roster | None = None) -> Reduction:
        """Build plain sums, or masked sums among the parties of a roster."""
        if not self.masked:
            return InTheOpen()
        masks: Reduction = replace(masks_for(self.promise, n_parties, self.mask_bound), roster=roster)
        return masks_over(masks, self.method, n_parties, self.fraction) if self.is_of_topics else masks

    def schedule(self, n_parties: int) -> Schedule:
        """Build the schedule: all sites in each round, or some that are drawn from the seed."""
        rounds = self.exchanges(self.program(n_parties), n_parties)
        if self.fraction < 1:
            return DrawnSchedule(rounds, self.seed, faulty=self.faulty, fraction=self.fraction)
        return Schedule(rounds, self.seed, faulty=self.faulty)

    def exchanges(self, program: Program, n_parties: int) -> int:
        """Count the exchanges of all rounds: several a round if the program says so, or the arrivals of all sites."""
        return program.exchanges(1 if methods.method(self.method).is_one_shot else self.rounds, n_parties)

    def request(self, n_parties: int) -> RunRequest:
        """Describe the run in the terms of a site's policy.

        In an asynchronous run, all arrivals may be those of one site. If sites are drawn, only these are in a sum. If
        options of the method set the number of sums in a round, the sums are counted.
        """
        counts_sums = self.is_asynchronous or methods.method(self.method).counts_exchanges
        rounds = self.exchanges(self.program(n_parties), n_parties) if counts_sums else self.rounds
        return RunRequest(self.method, self.rank, rounds, drawn(n_parties, self.fraction), self.masked)


KEYS = tuple(dict.fromkeys((*(one.name for one in fields(Experiment) if one.name != "options"), *METHOD_KEYS)))
"""All keys of experiment.toml."""

SEED_BITS = 53
"""Of a seed that is drawn: any program reads such a number exactly."""


def with_seed(path: Path, before: Experiment | None) -> tuple[Experiment, bytes]:
    """Read an experiment and its file, with a seed: as given, as in the run that is resumed, or a new one.

    No two runs may begin with one model: sites refuse the second, because two answers to it differ by the rows that
    were added in between.
    """
    wanted, text = Experiment.read(path), path.read_bytes()
    if "seed" in read_toml(path):
        return wanted, text
    seed = secrets.randbits(SEED_BITS) if before is None else before.seed
    return replace(wanted, seed=seed), f"seed = {seed}\n".encode() + text.removeprefix(codecs.BOM_UTF8)
