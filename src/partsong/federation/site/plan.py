"""Data and plan of a site: what it works on, and how it parses the plain values of a request."""

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
from partsong.privacy.accounting import Ledger
from partsong.privacy.exposure import directions_after
from partsong.secure_aggregation.messages import Roster
from partsong.secure_aggregation.protocol import SecureSum

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SiteData:
    """Rows (dense or sparse) with named columns, and the secret of this party's random streams and signatures."""

    rows: Any = field(repr=False)
    columns: tuple[str, ...] = field(repr=False)
    secret: int = field(repr=False, default=0)

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return int(self.rows.shape[0])

    @property
    def type(self) -> str:
        """Dtype of the rows."""
        return str(getattr(self.rows, "dtype", ""))

    @property
    def hides_names(self) -> bool:
        """Whether column names are kept out of the site's own log too."""
        return False

    def main_run(self, name: str) -> str:
        """Return the run to which a run of this name belongs."""
        return name

    def order(self, columns: Sequence[str]) -> tuple[int, ...]:
        """Return the positions of these columns; refuse if one is missing."""
        places = {name: at for at, name in enumerate(self.columns)}
        missing = [name for name in columns if name not in places]
        if missing:
            named = f"{len(missing)} of them" if self.hides_names else ", ".join(missing)
            reason = f"Agreed columns are no longer here: {named}."
            raise RequestRefused("columns", reason, {"missing": len(missing), "extra": 0})
        return tuple(places[name] for name in columns)

    def matrix(self, order: tuple[int, ...] | None = None, least: int = 0) -> Matrix:
        """Return these columns, in this order; the rows unchanged if that is all of them. Columns that fewer than
        `least` rows use are set to zero.
        """
        whole = tuple(range(len(self.columns)))
        order = whole if order is None else order
        if least:
            return as_matrix(zero_rare_columns(self.rows, order, least))
        return as_matrix(self.rows if order == whole else self.rows[:, list(order)])


@dataclass(frozen=True, slots=True)
class Plan:
    """Program and reduction of an experiment at a site. A `fraction` of the parties is drawn for each of the `rounds`.

    `resize(rounds, rank)` builds the plan of the same experiment with other sizes.
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
        """The reduction's source of randomness, which is not written to files."""
        return getattr(self.reduction, "source", None)

    @property
    def release(self) -> Any:
        """Privacy cost of one upload; None without noise."""
        return self.program.traits.release

    def planned(self, exchanges: int) -> Ledger:
        """Privacy costs of the first exchanges, as many as given; nothing without noise."""
        if self.release is None:
            return Ledger()
        return Ledger(tuple((self.program.traits.release_at(exchange), 1) for exchange in range(exchanges)))

    @property
    def directions(self) -> int:
        """Number of combinations of rows that all exchanges together send without noise."""
        return directions_after(self.program, self.exchanges, self.request.parties)

    @property
    def mask_bound(self) -> float | None:
        """Bound on the entries of a masked upload; None for plain sums."""
        return self.reduction.bound if isinstance(self.reduction, SecureSum) else None

    @property
    def limits(self) -> AttemptLimits:
        """Attempts that a round and a run can need: each further attempt has at least one party less, and while a party
        is missing, every round with a set-up needs two.
        """
        return AttemptLimits(self.request.parties + 1, 2 * self.exchanges + self.request.parties + 1)


PlanBuilder = Callable[[Mapping[str, Any], int, Roster | None], Plan]


def build_plan(values: Mapping[str, Any], n_parties: int, roster: Roster | None) -> Plan:
    """Build program and reduction from an experiment's plain values, with the site's own roster."""
    experiment = Experiment.from_message(values)
    program = experiment.program(n_parties)
    exchanges = experiment.exchanges(program, n_parties)
    reduction, request = experiment.reduction(n_parties, roster), experiment.request(n_parties)

    def resized(rounds: int, rank: int) -> Plan:
        return build_plan({**values, "rounds": rounds, "rank": rank}, n_parties, roster)

    return Plan(program, reduction, request, exchanges, experiment.rounds, experiment.fraction, resized)


def parse_layout(note: Mapping[str, Any]) -> Layout:
    """Parse the layout in a start request."""
    layout = _convert(note.get("layout"), Layout, "layout")
    parse_parties(layout.parties)
    return layout


def parse_experiment(note: Mapping[str, Any]) -> Mapping[str, Any]:
    """Parse the experiment table; its values are checked when a plan is built."""
    return _convert(note.get("experiment"), dict[str, Any], "experiment")


def parse_parties(value: Any) -> tuple[str, ...]:
    """Parse a list of distinct parties."""
    names = _convert(value, tuple[str, ...], "list of parties")
    if len(set(names)) < len(names):
        raise FormatError(f"The request names a party twice: {', '.join(names)}.")
    return names


def parse_attempt(value: Any) -> Attempt | None:
    """Parse the last attempt that counts; None if there is none."""
    return None if value is None else _convert(value, tuple[int, int], "last attempt that counted")


def _convert(value: Any, kind: type[T], what: str) -> T:
    """Convert a value of a note to a type; else raise FormatError."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise FormatError(f"The request has no usable {what}: {error}.") from error
