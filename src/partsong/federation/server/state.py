"""The server's folder: the run after its last whole round, and the exchanges of the round that is under way.

    run              model, server's state, keys of the reduction, round, seed, accounts, who counted in which round
    opening          attempt of the current round, and who was asked
    phase-NUMBER     who was heard in a phase, and with what: decided once it is here, whoever is killed later

States of parties are not here. Uploads of the current round are, as the server has seen them, until it is over.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from partsong.core.interfaces import AsyncCheckpoint, Layout, Message, State, WorkItem
from partsong.core.states import state
from partsong.engines.virtual_clock import RecordedOrder
from partsong.federation.site.state import Attempt, make_folder
from partsong.federation.wire import load_state, save_state
from partsong.privacy.accounting import Accounts

# ---- record -----------------------------------------------------------------------------------------------------


@state("federation.absence")
@dataclass(frozen=True, slots=True)
class Absence:
    """Who was not in a round at all, and who fell silent from which phase of its sum on."""

    absent: tuple[str, ...] = ()
    silent: Mapping[str, int] = field(default_factory=dict)


@state("federation.run")
@dataclass(frozen=True, slots=True)
class Record:
    """A run between two rounds, as the server knows it.

    `counted` has the last attempt of each party that is in the model's history, `seen` the largest serial number that
    it has told, `company` who was in the last sum, `restarted` who has lost its files, and is started again, since the
    last set-up of masked sums.
    `without_result`: who has not answered, or not accepted, the end of the run, and why.
    """

    run: str
    experiment: Mapping[str, Any]
    layout: Layout
    columns: Any
    index: int
    server: State
    model: Message
    desk: State = None
    company: frozenset[str] | None = None
    started: frozenset[str] = frozenset()
    counted: Mapping[str, Attempt] = field(default_factory=dict)
    seen: Mapping[str, int] = field(default_factory=dict)
    absences: Mapping[int, Absence] = field(default_factory=dict)
    accounts: Accounts = Accounts()
    restarted: frozenset[str] = frozenset()
    without_result: Mapping[str, str] = field(default_factory=dict)

    def absent(self) -> dict[int, frozenset[str]]:
        """Who missed which round, for a Schedule that repeats this run in one process."""
        return {index: frozenset(one.absent) for index, one in self.absences.items() if one.absent}

    def silent(self) -> dict[int, dict[str, int]]:
        """Who fell silent in which round and phase, for the same."""
        return {index: dict(one.silent) for index, one in self.absences.items() if one.silent}

    def without_starts(self, lost: Collection[str]) -> Self:
        """The same, where sites have lost their files of the run: they are started again before the next round."""
        counted = {name: at for name, at in self.counted.items() if name not in lost}
        return replace(
            self, started=self.started.difference(lost), counted=counted, restarted=self.restarted.union(lost)
        )

    def amended(self, alone: Mapping[str, Sequence[Attempt]]) -> Record:
        """The same, where parties were not heard in rounds in which they have worked: silent there, and not absent."""
        absences = dict(self.absences)
        for name, index in ((name, at[0]) for name, attempts in alone.items() for at in attempts):
            one = absences.get(index, Absence())
            if name in one.absent:
                absent = tuple(other for other in one.absent if other != name)
                absences[index] = Absence(absent, {**one.silent, name: 0})
        return replace(self, absences=absences)


@state("federation.round-attempt")
@dataclass(frozen=True, slots=True)
class Opening:
    """An attempt: its round and number, who was asked, and why others were not; with which phase its sum begins, and
    which works of earlier rounds, by party, count although they were not heard.
    """

    index: int
    attempt: int
    asked: tuple[str, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    first: int = 0
    alone: Mapping[str, Sequence[Attempt]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Journal:
    """That folder."""

    folder: Path

    def load(self) -> Record | None:
        """None where no run has begun here."""
        if not (self.folder / "run").exists():
            return None
        return load_state(self.folder / "run", Record)

    def save(self, record: Record) -> None:
        """Atomically."""
        make_folder(self.folder)
        save_state(self.folder / "run", record)

    def clear(self) -> None:
        """Let go of the exchanges of a round that is over; what stays behind is known by its round, and ignored."""
        for path in self.folder.iterdir():
            if re.fullmatch(r"opening|phase-\d+", path.name):
                with contextlib.suppress(OSError):
                    path.unlink()

    def opening(self, index: int) -> Opening | None:
        """The attempt that is under way in a round."""
        if not (self.folder / "opening").exists():
            return None
        found = load_state(self.folder / "opening", Opening)
        return found if found.index == index else None

    def open(self, opening: Opening) -> None:
        """Before anybody is asked."""
        save_state(self.folder / "opening", opening)

    def phase(self, opening: Opening, phase: int) -> dict[str, Message] | None:
        """Who was heard in a phase of this attempt; None where that is not decided yet."""
        path = self.folder / f"phase-{phase}"
        if not path.exists():
            return None
        index, attempt, inbox = load_state(path, tuple)
        return inbox if (index, attempt) == (opening.index, opening.attempt) else None

    def decide(self, opening: Opening, phase: int, inbox: Mapping[str, Message]) -> None:
        """Before anybody is asked for the next phase."""
        save_state(self.folder / f"phase-{phase}", (opening.index, opening.attempt, dict(inbox)))


# ---- arrivals record --------------------------------------------------------------------------------------------
#
# The server's folder in an asynchronous run: the run after its last arrival, and what each site is working on.
#
#     arrivals         model, server's state, the order of arrivals, number and version of every site's piece, who has
#                      started, largest serials
#     model-VERSION    the model after so many arrivals, as long as a site works with it and it is not the newest
#
# A model is there before the record that needs it, and goes after the record that does not. States of parties are not
# here, nor are uploads.

MODEL = re.compile(r"model-(\d+)")


@state("federation.arrivals")
@dataclass(frozen=True, slots=True)
class Ongoing(Record):
    """A run between two arrivals; `index` is their number.

    `order` is who arrived, one after another, and `faults` says at which places nothing but a reason came; `pieces` is
    what each site works on, `clock` the seconds that the run has taken, `moves` how far the last few arrivals have
    moved the model.
    """

    order: tuple[str, ...] = ()
    faults: Mapping[int, str] = field(default_factory=dict)
    pieces: Mapping[str, WorkItem] = field(default_factory=dict)
    clock: float = 0.0
    moves: tuple[float, ...] = ()

    @staticmethod
    def of(record: Record, point: AsyncCheckpoint) -> Ongoing:
        """A run of which nothing has arrived yet."""
        known = {one.name: getattr(record, one.name) for one in fields(record)}
        return Ongoing(**known, pieces=point.items)

    @property
    def point(self) -> AsyncCheckpoint:
        """As the engines know it."""
        return AsyncCheckpoint(self.index, {}, self.server, self.model, self.pieces, self.clock)

    def recorded_order(self) -> RecordedOrder:
        """For `Asynchronous(durations=…)`, which then gives the same models in one process."""
        return RecordedOrder(order=self.order)

    def without_starts(self, lost: Collection[str]) -> Ongoing:
        """The same, where sites have lost their files of the run: each is started again, with a new piece of work. What
        one process makes of the order is then no longer this run.
        """
        new = {name: WorkItem(self.model, self.index, self.pieces[name].number + 1) for name in lost}
        return replace(Record.without_starts(self, lost), pieces={**self.pieces, **new})


@dataclass(frozen=True, slots=True)
class ArrivalsJournal:
    """That folder."""

    folder: Path

    @property
    def path(self) -> Path:
        """The record."""
        return self.folder / "arrivals"

    def load(self) -> Ongoing | None:
        """None where no run has begun here."""
        if not self.path.exists():
            return None
        record, order = load_state(self.path, tuple)
        names, models = record.layout.parties, {record.index: record.model}
        for version in {piece.version for piece in record.pieces.values()} - models.keys():
            models[version] = load_state(self.folder / f"model-{version}", Message)
        pieces = {name: replace(piece, model=models[piece.version]) for name, piece in record.pieces.items()}
        return replace(record, order=tuple(names[number] for number in order.tolist()), pieces=pieces)

    def save(self, record: Ongoing) -> None:
        """Atomically."""
        make_folder(self.folder)
        kept: dict[int, Message] = {piece.version: piece.model for piece in record.pieces.values()}
        kept.pop(record.index, None)
        for version, model in kept.items():
            if not (self.folder / f"model-{version}").exists():
                save_state(self.folder / f"model-{version}", model)
        places = {name: number for number, name in enumerate(record.layout.parties)}
        order = np.array([places[name] for name in record.order], np.int32)
        pieces = {name: replace(piece, model=Message({})) for name, piece in record.pieces.items()}
        save_state(self.path, (replace(record, order=(), pieces=pieces), order))
        self._forget(kept)

    def _forget(self, kept: Mapping[int, Message]) -> None:
        for path in self.folder.iterdir():
            found = MODEL.fullmatch(path.name)
            if found is not None and int(found[1]) not in kept:
                with contextlib.suppress(OSError):
                    path.unlink()
