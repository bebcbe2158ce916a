"""State of runs at the server: between two rounds, and the exchanges of the current round.

    run              a synchronous run after its last complete round
    attempt          the sites that are asked in the current round, written before any is asked
    phase-NUMBER     the answers in one phase, written once the server has accepted them

An asynchronous run has other files:

    arrivals         the run after its last arrival, and the work item of every site
    model-VERSION    the model after VERSION arrivals, while a site works on it and it is not the newest

Party states are not stored here. Masked uploads of the current round are, until it is over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from partsong.core.interfaces import Answers, AsyncCheckpoint, Layout, Message, Point, RoundAttempt, State, WorkItem
from partsong.core.states import state
from partsong.engines.collective import error_from_text, error_to_text
from partsong.engines.virtual_clock import RecordedOrder
from partsong.errors import FormatError, PartsongError
from partsong.federation.locks import locked
from partsong.federation.site.state import Attempt, make_folder, remove_file
from partsong.federation.toml_files import Count
from partsong.federation.wire import find_state, load_state, save_state
from partsong.io.write import write_text
from partsong.privacy.accounting import Accounts

UnreceivedWork = Mapping[str, Sequence[Attempt]]
"""Attempts of earlier rounds that count at their site, although the server did not receive them."""


@state("federation.absence")
@dataclass(frozen=True, slots=True)
class Absence:
    """Sites that missed a round, and dropouts of its sum with the first phase that lacks the site."""

    absent: tuple[str, ...] = ()
    dropouts: Mapping[str, int] = field(default_factory=dict)


@state("federation.run")
@dataclass(frozen=True, slots=True)
class RunState:
    """A run between two rounds, as the server knows it.

    `sums` is the state of the reduction's server, `cohort` the sites whose uploads were in the last sum. `counted` has
    the last attempt of each site that is in the model's history, `seen` the largest serial number that it has sent.
    `restarted`: sites that have lost their files since the last set-up of masked sums. `without_result`: sites that did
    not accept the end of the run, and why.
    """

    run: str
    experiment: Mapping[str, Any]
    layout: Layout
    columns: Any
    index: int
    server: State
    model: Message
    sums: State = None
    cohort: frozenset[str] | None = None
    started: frozenset[str] = frozenset()
    counted: Mapping[str, Attempt] = field(default_factory=dict)
    seen: Mapping[str, int] = field(default_factory=dict)
    absences: Mapping[int, Absence] = field(default_factory=dict)
    accounts: Accounts = Accounts()
    restarted: frozenset[str] = frozenset()
    without_result: Mapping[str, str] = field(default_factory=dict)

    @property
    def point(self) -> Point:
        return Point(self.index, self.server, self.model, self.sums, self.cohort)

    def absent(self) -> dict[int, frozenset[str]]:
        """Return who missed which round, for a Schedule that repeats this run in one process."""
        return {index: frozenset(one.absent) for index, one in self.absences.items() if one.absent}

    def dropouts(self) -> dict[int, dict[str, int]]:
        """Return who dropped out in which round and phase, for the same Schedule."""
        return {index: dict(one.dropouts) for index, one in self.absences.items() if one.dropouts}

    def counted_notes(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return for each site which of its attempts is in the model's history."""
        return {name: {"counted": list(self.counted[name]) if name in self.counted else None} for name in names}

    def after_lost_files(self, lost: Collection[str]) -> Self:
        """Return the run after sites have lost their files. They restart before the next round."""
        counted = {name: at for name, at in self.counted.items() if name not in lost}
        return replace(
            self, started=self.started.difference(lost), counted=counted, restarted=self.restarted.union(lost)
        )

    def with_unreceived_work(self, unreceived: UnreceivedWork) -> RunState:
        """Return the run with this work: its sites dropped out of those rounds instead of missing them."""
        absences = dict(self.absences)
        for name, index in ((name, at[0]) for name, attempts in unreceived.items() for at in attempts):
            one = absences.get(index, Absence())
            if name in one.absent:
                absent = tuple(other for other in one.absent if other != name)
                absences[index] = Absence(absent, {**one.dropouts, name: 0})
        return replace(self, absences=absences)


@dataclass(frozen=True, slots=True)
class Journal:
    """Files of a synchronous run. Files of an earlier round or attempt are recognized by their numbers and ignored."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "run"

    def load(self) -> RunState | None:
        """Load the run; None if none has started here."""
        return find_state(self.path, RunState)

    def save(self, run: RunState) -> None:
        make_folder(self.folder)
        save_state(self.path, run)

    def clear_exchanges(self) -> None:
        """Remove the exchanges of a finished round."""
        for path in self.folder.iterdir():
            if re.fullmatch(r"attempt|phase-\d+", path.name):
                remove_file(path)

    def load_attempt(self, index: int) -> RoundAttempt | None:
        """Load the unfinished attempt of a round."""
        if (found := find_state(self.folder / "attempt", tuple)) is None:
            return None
        at, number, asked, first, refused = found
        return RoundAttempt(at, number, asked, first, _from_texts(refused)) if at == index else None

    def save_attempt(self, attempt: RoundAttempt) -> None:
        """Write an attempt before any site is asked."""
        one = (attempt.index, attempt.attempt, attempt.asked, attempt.first, _to_texts(attempt.refused))
        save_state(self.folder / "attempt", one)

    def load_answers(self, attempt: RoundAttempt, phase: int) -> tuple[Answers, UnreceivedWork] | None:
        """Load what was accepted in a phase of this attempt; None if nothing was."""
        if (found := find_state(self.folder / f"phase-{phase}", tuple)) is None:
            return None
        index, number, messages, faults, unreceived = found
        is_this = (index, number) == (attempt.index, attempt.attempt)
        return (Answers(messages, _from_texts(faults)), unreceived) if is_this else None

    def save_answers(self, attempt: RoundAttempt, phase: int, answers: Answers, unreceived: UnreceivedWork) -> None:
        """Write what was accepted in a phase before any site is asked for the next one."""
        one = (attempt.index, attempt.attempt, dict(answers.messages), _to_texts(answers.faults), dict(unreceived))
        save_state(self.folder / f"phase-{phase}", one)


def _to_texts(faults: Mapping[str, PartsongError]) -> dict[str, list[str]]:
    return {name: error_to_text(error) for name, error in faults.items()}


def _from_texts(texts: Mapping[str, Sequence[str]]) -> dict[str, PartsongError]:
    return {name: error_from_text(*text) for name, text in texts.items()}


MODEL_FILE = re.compile(r"model-(\d+)")


@state("federation.arrivals")
@dataclass(frozen=True, slots=True)
class AsyncRunState(RunState):
    """An asynchronous run between two arrivals; `index` is their number.

    `order` has the sender of each arrival, `faults` the arrivals with an error instead of an upload. `pieces` has the
    work item of each site, `clock` the seconds that the run has taken, `moves` the relative changes of the model by the
    last arrivals.
    """

    order: tuple[str, ...] = ()
    faults: Mapping[int, str] = field(default_factory=dict)
    pieces: Mapping[str, WorkItem] = field(default_factory=dict)
    clock: float = 0.0
    moves: tuple[float, ...] = ()

    @staticmethod
    def of(run: RunState) -> AsyncRunState:
        """Return the asynchronous state of a run without arrivals."""
        return AsyncRunState(**{one.name: getattr(run, one.name) for one in fields(run)})

    @property
    def checkpoint(self) -> AsyncCheckpoint:
        return AsyncCheckpoint(self.index, {}, self.server, self.model, self.pieces, self.clock)

    def recorded_order(self) -> RecordedOrder:
        """Return the order for `Asynchronous(durations=…)`, which then gives the same models in one process."""
        return RecordedOrder(order=self.order)

    def after_lost_files(self, lost: Collection[str]) -> AsyncRunState:
        """Return the run after sites have lost their files: each restarts with a new work item.

        One process cannot repeat such a run from its order.
        """
        new = {name: WorkItem(self.model, self.index, self.pieces[name].number + 1) for name in lost}
        return replace(RunState.after_lost_files(self, lost), pieces={**self.pieces, **new})


@dataclass(frozen=True, slots=True)
class ArrivalsJournal:
    """Files of an asynchronous run. A model is written before the run that needs it, and removed afterwards."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "arrivals"

    def load(self) -> AsyncRunState | None:
        """Load the run; None if none has started here."""
        if (kept := find_state(self.path, tuple)) is None:
            return None
        run, order = kept
        names, models = run.layout.parties, {run.index: run.model}
        for version in {piece.version for piece in run.pieces.values()} - models.keys():
            models[version] = load_state(self.folder / f"model-{version}", Message)
        pieces = {name: replace(piece, model=models[piece.version]) for name, piece in run.pieces.items()}
        return replace(run, order=tuple(names[number] for number in order.tolist()), pieces=pieces)

    def save(self, run: AsyncRunState) -> None:
        make_folder(self.folder)
        kept: dict[int, Message] = {piece.version: piece.model for piece in run.pieces.values()}
        kept.pop(run.index, None)
        for version, model in kept.items():
            if not (self.folder / f"model-{version}").exists():
                save_state(self.folder / f"model-{version}", model)
        places = {name: number for number, name in enumerate(run.layout.parties)}
        order = np.array([places[name] for name in run.order], np.int32)
        pieces = {name: replace(piece, model=Message({})) for name, piece in run.pieces.items()}
        save_state(self.path, (replace(run, order=(), pieces=pieces), order))
        for path in self.folder.iterdir():
            found = MODEL_FILE.fullmatch(path.name)
            if found is not None and int(found[1]) not in kept:
                remove_file(path)


@dataclass(frozen=True, slots=True)
class ReleaseCounters:
    """The largest serial number that each site has sent, over all runs of a federation. Without a path
    nothing is stored.

    A site whose ledger is shorter was restored from an older backup.
    """

    path: Path | None = None

    def load(self, names: Iterable[str]) -> dict[str, int]:
        """Return the numbers of these sites, as far as they are known."""
        kept = self._read()
        return {name: kept[name] for name in names if name in kept}

    def update(self, seen: Mapping[str, int]) -> None:
        """Add new numbers; they are on disk when this returns. Concurrent runs take turns."""
        if self.path is None:
            return
        with locked(self.path.with_name(f"{self.path.name}.lock"), waits=True):
            kept = self._read()
            after = larger_counts(kept, seen)
            if after != kept:
                write_text(self.path, json.dumps(after, sort_keys=True) + "\n", private=True)

    def _read(self) -> dict[str, int]:
        if self.path is None or not self.path.exists():
            return {}
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=dict[str, Count])
        except ValueError as error:
            raise FormatError(
                f"{self.path} does not have the number of releases of each site. Restore it from a backup: the server "
                "needs it to detect a site that was restored from an older backup."
            ) from error


def larger_counts(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Return the larger count of each name."""
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in {**one, **other}}
