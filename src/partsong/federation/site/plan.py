"""What a site works on, and what a request's plain values mean to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from partsong.core.interfaces import Layout, Matrix, Program, Reduction
from partsong.data.conversion import as_matrix
from partsong.errors import FormatError
from partsong.federation.experiment import Experiment, RunRequest
from partsong.federation.exposure_limit import largest
from partsong.federation.ledger import Bounds
from partsong.federation.site.state import Attempt, energies_of, supports_of, without_rare
from partsong.federation.wire import Denied
from partsong.privacy.exposure import directions_after
from partsong.secure_aggregation.messages import Roster
from partsong.secure_aggregation.protocol import MaskedSum


@dataclass(frozen=True, slots=True)
class Data:
    """Rows with named columns, and the secret behind this party's random streams and signatures."""

    rows: Any = field(repr=False)
    columns: tuple[str, ...] = field(repr=False)
    secret: int = field(repr=False, default=0)

    @property
    def n_rows(self) -> int:
        """How many."""
        return int(self.rows.shape[0])

    @property
    def type(self) -> str:
        """The number type of the rows as they are held."""
        return str(getattr(self.rows, "dtype", ""))

    @property
    def hides_names(self) -> bool:
        """Whether names of columns are kept out of the site's own log as well."""
        return False

    def run_of(self, name: str) -> str:
        """The run that counts, of the name under which something is asked for."""
        return name

    def order(self, columns: Sequence[str]) -> tuple[int, ...]:
        """Where these columns are now; refused where one is not here."""
        places = {name: at for at, name in enumerate(self.columns)}
        missing = [name for name in columns if name not in places]
        if missing:
            told = f"Columns were agreed on that are no longer here: {', '.join(missing)}."
            raise Denied("columns", told, {"missing": len(missing), "extra": 0})
        return tuple(places[name] for name in columns)

    def supports(self, columns: Sequence[str]) -> np.ndarray:
        """How many rows have a value above zero in each of these columns."""
        return supports_of(self.rows)[list(self.order(columns))]

    def energies(self, columns: Sequence[str]) -> np.ndarray:
        """Σ x² of each of these columns."""
        return energies_of(self.rows)[list(self.order(columns))]

    def matrix(self, order: tuple[int, ...] | None = None, least: int = 0) -> Matrix:
        """Some of the columns, in this order; the rows as they are where that is all of them. Columns that fewer than
        `least` rows use are zero.
        """
        is_matrix = hasattr(self.rows, "squared_norm")
        if least and is_matrix:
            raise Denied("layout", "Rare columns of these rows cannot be set to zero; give them as a table.")
        whole = tuple(range(len(self.columns)))
        if least:
            return as_matrix(without_rare(self.rows, whole if order is None else order, least))
        if order is None or order == whole:
            return self.rows if is_matrix else as_matrix(self.rows)
        if is_matrix:
            raise Denied("layout", "These rows cannot be rearranged; bring the columns to the agreed order.")
        return as_matrix(self.rows[:, list(order)])


@dataclass(frozen=True, slots=True)
class Plan:
    """What an experiment means at a site; `fraction` of the parties are drawn for each round, of which there are
    `rounds`. `resized`: the plan of the same experiment with other rounds and another rank.
    """

    program: Program
    reduction: Reduction
    request: RunRequest
    exchanges: int
    rounds: int = 0
    fraction: float = 1.0
    resized: Callable[[int, int], Plan] | None = None

    def most_rounds(self, room: int) -> int:
        """The most rounds of this rank, up to those asked for, that send at most `room` combinations of rows."""
        return self._largest(lambda rounds: (rounds, self.request.rank), self.rounds, room)

    def most_rank(self, room: int) -> int:
        """The largest rank, up to the one asked for, with which as many rounds send at most `room` of them."""
        return self._largest(lambda rank: (self.rounds, rank), self.request.rank, room)

    def _largest(self, size: Callable[[int], tuple[int, int]], most: int, room: int) -> int:
        resized = self.resized
        return 0 if resized is None else largest(lambda number: resized(*size(number)).directions, most, room)

    @property
    def source(self) -> Any:
        """Where the reduction draws from, which is not written to files."""
        return getattr(self.reduction, "source", None)

    @property
    def release(self) -> Any:
        """What one upload costs in privacy; None without noise."""
        return self.program.traits.release

    @property
    def directions(self) -> int:
        """Combinations of rows that all exchanges together send without noise."""
        return directions_after(self.program, self.exchanges, self.request.parties)

    @property
    def mask_bound(self) -> float | None:
        """The largest number that an upload may hold under masks; None in the open."""
        return self.reduction.bound if isinstance(self.reduction, MaskedSum) else None

    @property
    def bounds(self) -> Bounds:
        """Attempts that a round, and a run, can need: each one more has at least one party less, and while somebody is
        away, every round with a set-up has two.
        """
        return Bounds(self.request.parties + 1, 2 * self.exchanges + self.request.parties + 1)


Build = Callable[[Mapping[str, Any], int, Roster | None], Plan]


def plan_of(told: Mapping[str, Any], n_parties: int, roster: Roster | None) -> Plan:
    """The program and reduction of an experiment's plain values, with the site's own roster."""
    experiment = Experiment.from_table(told)
    program = experiment.program(n_parties)
    exchanges = experiment.exchanges(program, n_parties)
    reduction, request = experiment.reduction(n_parties, roster), experiment.request(n_parties)

    def resized(rounds: int, rank: int) -> Plan:
        return plan_of({**told, "rounds": rounds, "rank": rank}, n_parties, roster)

    return Plan(program, reduction, request, exchanges, experiment.rounds, experiment.fraction, resized)


def layout_in(note: Mapping[str, Any]) -> Layout:
    """The layout that the start of a run names."""
    try:
        told = note["layout"]
        layout = Layout(names_in(told["parties"]), told["n_features"], told["seed"], told["dtype"])
        np.dtype(layout.dtype)
        is_sound = type(layout.n_features) is int and type(layout.seed) is int
    except (KeyError, TypeError) as error:
        raise FormatError("The start of a run names no layout.") from error
    if not is_sound:
        raise FormatError("The start of a run has a layout that is none.")
    return layout


def experiment_in(note: Mapping[str, Any]) -> Mapping[str, Any]:
    """The plain values of an experiment, which are looked at when a plan is made of them."""
    told = note.get("experiment")
    if not isinstance(told, dict):
        raise FormatError("A run is told without its experiment.")
    return told


def names_in(names: Any) -> tuple[str, ...]:
    """A list of parties."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise FormatError("A list of parties is none.")
    return tuple(names)


def attempt_in(value: Any) -> Attempt | None:
    """The last attempt that counted."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(number) is int for number in value):
        raise FormatError("The last attempt that counted is no pair of numbers.")
    return value[0], value[1]
