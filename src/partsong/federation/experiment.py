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
from partsong.methods import ASYNCHRONOUS, LOCAL_STEPS, METHODS, ONE_ROUND, alignment_for, start_of
from partsong.privacy.admission import Roster
from partsong.promises import Privacy, masks_for, privacy_from
from partsong.settings import alignment_of, program_of, require_method, require_privacy, stop_of

KEYS = (
    "method", "rank", "rounds", "local_steps", "align", "start", "seed", "masked", "mask_bound", "faulty", "columns",
    "time_budget", "tol", "privacy",
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
    have moved H by no more than `tol` of its norm.
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

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ParameterError(f"method is {str(self.method)[:60]!r}. {nearest(str(self.method), METHODS)}")
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
        require_method(self.method, align=self.align, start=self.start, local_steps=self.local_steps)
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
        only(table, KEYS, "The experiment")
        for name in ("method", "rank", "rounds"):
            if name not in table:
                raise ParameterError(f"The experiment needs {name}.")
        only(table.get("privacy") or {}, PRIVACY_KEYS, "The table privacy of the experiment")
        for name in ("rank", "rounds", "local_steps"):
            if table.get(name) is not None:
                whole(table, name, None)
        return Experiment(**{name: value for name, value in table.items() if value is not None})

    @staticmethod
    def read(path: Path) -> Experiment:
        """From a file."""
        return Experiment.from_table(read_toml(path))

    def told(self) -> dict[str, Any]:
        """Plain values, for a message; what a fault leads to, and an early end, are the server's affair."""
        told = {**asdict(self), "privacy": dict(self.privacy)}
        return {name: value for name, value in told.items() if name not in ("faulty", *ENDS)}

    @property
    def is_asynchronous(self) -> bool:
        """Whether the server takes in what arrives, and nobody waits for others."""
        return self.method in ASYNCHRONOUS

    @property
    def promise(self) -> Privacy | None:
        """Differential privacy, if it is asked for."""
        return privacy_from(self.privacy)

    def program(self, n_parties: int) -> Program:
        """The recipe, with noise where that was asked for."""
        plain = program_of(
            self.method,
            self.rank,
            steps=LOCAL_STEPS[self.method] if self.local_steps is None else self.local_steps,
            align=alignment_of(alignment_for(self.method, self.align)),
            start=start_of(self.method, self.start),
        )
        if (promise := self.promise) is None:
            return plain
        return promise.program(plain, self.exchanges(plain, n_parties), n_parties, self.masked)

    def reduction(self, n_parties: int, roster: Roster | None = None) -> Reduction:
        """Sums in the open, or masked among the parties of a roster."""
        if not self.masked:
            return InTheOpen()
        masks: Reduction = replace(masks_for(self.promise, n_parties, self.mask_bound), roster=roster)
        return masks

    def schedule(self, n_parties: int) -> Schedule:
        """How the server runs it."""
        return Schedule(self.exchanges(self.program(n_parties), n_parties), self.seed, faulty=self.faulty)

    def exchanges(self, program: Program, n_parties: int) -> int:
        """Exchanges that the rounds take: of several each, where the program says so, and arrivals of all sites."""
        if self.is_asynchronous:
            return self.rounds * n_parties
        rounds = 1 if self.method in ONE_ROUND else self.rounds
        counts: Any = getattr(program, "rounds_for", None)
        among: Any = getattr(program, "exchanges_among", None)
        if among is not None:
            return rounds * int(among(n_parties))
        return rounds if counts is None else int(counts(rounds))

    def wish(self, n_parties: int) -> Wish:
        """In the words of a site's policy. Where nobody waits, all arrivals may be those of one site."""
        rounds = self.rounds * n_parties if self.is_asynchronous else self.rounds
        return Wish(self.method, self.rank, rounds, n_parties, self.masked)
