"""What a site works on, and what a request's plain values mean to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from partsong.core.interfaces import Layout, Matrix, Program, Reduction
from partsong.data.conversion import as_matrix
from partsong.errors import FormatError
from partsong.federation.experiment import Experiment, RunRequest
from partsong.federation.ledger import AttemptLimits
from partsong.federation.site.state import Attempt, zero_rare_columns
from partsong.federation.wire import RequestRefused
from partsong.privacy.exposure import directions_after
from partsong.secure_aggregation.messages import Roster
from partsong.secure_aggregation.protocol import SecureSum

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SiteData:
    """Rows (dense or sparse) with named columns, and the secret behind this party's random streams and signatures."""

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

    def main_run(self, name: str) -> str:
        """The run that counts, of the name under which something is asked for."""
        return name

    def order(self, columns: Sequence[str]) -> tuple[int, ...]:
        """Where these columns are now; refused where one is not here."""
        places = {name: at for at, name in enumerate(self.columns)}
        missing = [name for name in columns if name not in places]
        if missing:
            named = f"{len(missing)} of them" if self.hides_names else ", ".join(missing)
            told = f"Columns were agreed on that are no longer here: {named}."
            raise RequestRefused("columns", told, {"missing": len(missing), "extra": 0})
        return tuple(places[name] for name in columns)

    def matrix(self, order: tuple[int, ...] | None = None, least: int = 0) -> Matrix:
        """Some of the columns, in this order; the rows as they are where that is all of them. Columns that fewer than
        `least` rows use are zero.
        """
        whole = tuple(range(len(self.columns)))
        order = whole if order is None else order
        if least:
            return as_matrix(zero_rare_columns(self.rows, order, least))
        return as_matrix(self.rows if order == whole else self.rows[:, list(order)])


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
    resize: Callable[[int, int], Plan] | None = None

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
        return self.reduction.bound if isinstance(self.reduction, SecureSum) else None

    @property
    def limits(self) -> AttemptLimits:
        """Attempts that a round, and a run, can need: each one more has at least one party less, and while somebody is
        away, every round with a set-up has two.
        """
        return AttemptLimits(self.request.parties + 1, 2 * self.exchanges + self.request.parties + 1)


PlanBuilder = Callable[[Mapping[str, Any], int, Roster | None], Plan]


def build_plan(told: Mapping[str, Any], n_parties: int, roster: Roster | None) -> Plan:
    """The program and reduction of an experiment's plain values, with the site's own roster."""
    experiment = Experiment.from_table(told)
    program = experiment.program(n_parties)
    exchanges = experiment.exchanges(program, n_parties)
    reduction, request = experiment.reduction(n_parties, roster), experiment.request(n_parties)

    def resized(rounds: int, rank: int) -> Plan:
        return build_plan({**told, "rounds": rounds, "rank": rank}, n_parties, roster)

    return Plan(program, reduction, request, exchanges, experiment.rounds, experiment.fraction, resized)


def parse_layout(note: Mapping[str, Any]) -> Layout:
    """The layout that the start of a run names."""
    layout = _convert(note.get("layout"), Layout, "layout")
    parse_parties(layout.parties)
    return layout


def parse_experiment(note: Mapping[str, Any]) -> Mapping[str, Any]:
    """The plain values of an experiment, which are looked at when a plan is made of them."""
    return _convert(note.get("experiment"), dict[str, Any], "experiment")


def parse_parties(value: Any) -> tuple[str, ...]:
    """A list of parties, each named once."""
    names = _convert(value, tuple[str, ...], "list of parties")
    if len(set(names)) < len(names):
        raise FormatError(f"The request names a party twice: {', '.join(names)}.")
    return names


def parse_attempt(value: Any) -> Attempt | None:
    """The last attempt that counted."""
    return None if value is None else _convert(value, tuple[int, int], "last attempt that counted")


def _convert(value: Any, kind: type[T], what: str) -> T:
    """A value of a note that has this type; FormatError where it has not."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise FormatError(f"The request has no {what} that can be used: {error}.") from error
