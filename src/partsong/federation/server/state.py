"""The server's folder: runs between two rounds, and the exchanges of the round under way.

    run              a synchronous run after its last whole round
    attempt          who is asked in the round under way, written before anybody is asked
    phase-NUMBER     the answers in one phase of it, written once the server has accepted them

An asynchronous run has other files:

    arrivals         the run after its last arrival, and the piece of work of every site
    model-VERSION    the model after so many arrivals, while a site works on it and it is not the newest

States of parties are not here. Masked uploads of the round under way are, until it is over.
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
"""Works of earlier rounds that count at their site, although the server did not receive them."""


@state("federation.absence")
@dataclass(frozen=True, slots=True)
class Absence:
    """Who missed a round, and who dropped out of its sum, with the first phase that lacks the site."""

    absent: tuple[str, ...] = ()
    silent: Mapping[str, int] = field(default_factory=dict)


@state("federation.run")
@dataclass(frozen=True, slots=True)
class RunState:
    """A run between two rounds, as the server knows it.

    `sums` is what the reduction's server keeps, `cohort` whose uploads were in the last sum. `counted` has the last
    attempt of each site that is in the model's history, `seen` the largest serial number that it has sent. `restarted`:
    sites that have lost their files since the last set-up of masked sums, and are started again. `without_result`:
    sites that did not accept the end of the run, and why.
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
        """Who missed which round, for a Schedule that repeats this run in one process."""
        return {index: frozenset(one.absent) for index, one in self.absences.items() if one.absent}

    def dropouts(self) -> dict[int, dict[str, int]]:
        """Who dropped out in which round and phase, for the same Schedule."""
        return {index: dict(one.silent) for index, one in self.absences.items() if one.silent}

    def counted_notes(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """For each site, which of its works is in the history of the model."""
        return {name: {"counted": list(self.counted[name]) if name in self.counted else None} for name in names}

    def after_lost_files(self, lost: Collection[str]) -> Self:
        """The run after sites have lost their files: they are started again before the next round."""
        counted = {name: at for name, at in self.counted.items() if name not in lost}
        return replace(
            self, started=self.started.difference(lost), counted=counted, restarted=self.restarted.union(lost)
        )

    def with_unreceived_work(self, unheard: UnreceivedWork) -> RunState:
        """The run with these works: their sites dropped out of those rounds, and did not miss them."""
        absences = dict(self.absences)
        for name, index in ((name, at[0]) for name, attempts in unheard.items() for at in attempts):
            one = absences.get(index, Absence())
            if name in one.absent:
                absent = tuple(other for other in one.absent if other != name)
                absences[index] = Absence(absent, {**one.silent, name: 0})
        return replace(self, absences=absences)


@dataclass(frozen=True, slots=True)
class Journal:
    """Files of a synchronous run. Those of an earlier round or attempt are known by their numbers, and ignored."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "run"

    def load(self) -> RunState | None:
        """The run; None where none has begun here."""
        return find_state(self.path, RunState)

    def save(self, run: RunState) -> None:
        make_folder(self.folder)
        save_state(self.path, run)

    def clear_exchanges(self) -> None:
        """Remove the exchanges of a round that is over."""
        for path in self.folder.iterdir():
            if re.fullmatch(r"attempt|phase-\d+", path.name):
                remove_file(path)

    def load_attempt(self, index: int) -> RoundAttempt | None:
        """The attempt that is under way in a round."""
        if (found := find_state(self.folder / "attempt", tuple)) is None:
            return None
        at, number, asked, first, refused = found
        return RoundAttempt(at, number, asked, first, _from_texts(refused)) if at == index else None

    def save_attempt(self, attempt: RoundAttempt) -> None:
        """Write an attempt, before anybody is asked."""
        one = (attempt.index, attempt.attempt, attempt.asked, attempt.first, _to_texts(attempt.refused))
        save_state(self.folder / "attempt", one)

    def load_answers(self, attempt: RoundAttempt, phase: int) -> tuple[Answers, UnreceivedWork] | None:
        """What was accepted in a phase of this attempt; None where nothing was yet."""
        if (found := find_state(self.folder / f"phase-{phase}", tuple)) is None:
            return None
        index, number, messages, faults, unheard = found
        is_this = (index, number) == (attempt.index, attempt.attempt)
        return (Answers(messages, _from_texts(faults)), unheard) if is_this else None

    def save_answers(self, attempt: RoundAttempt, phase: int, answers: Answers, unheard: UnreceivedWork) -> None:
        """Write what was accepted in a phase, before anybody is asked for the next one."""
        one = (attempt.index, attempt.attempt, dict(answers.messages), _to_texts(answers.faults), dict(unheard))
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

    `order` names the senders one after another, `faults` the arrivals that held an error instead of an upload. `pieces`
    is what each site works on, `clock` the seconds that the run has taken, `moves` how far the last few arrivals have
    moved the model.
    """

    order: tuple[str, ...] = ()
    faults: Mapping[int, str] = field(default_factory=dict)
    pieces: Mapping[str, WorkItem] = field(default_factory=dict)
    clock: float = 0.0
    moves: tuple[float, ...] = ()

    @staticmethod
    def of(run: RunState) -> AsyncRunState:
        """A run in which nothing has arrived yet."""
        return AsyncRunState(**{one.name: getattr(run, one.name) for one in fields(run)})

    @property
    def checkpoint(self) -> AsyncCheckpoint:
        return AsyncCheckpoint(self.index, {}, self.server, self.model, self.pieces, self.clock)

    def recorded_order(self) -> RecordedOrder:
        """For `Asynchronous(durations=…)`, which then gives the same models in one process."""
        return RecordedOrder(order=self.order)

    def after_lost_files(self, lost: Collection[str]) -> AsyncRunState:
        """The run after sites have lost their files: each is started again, with a new piece of work.

        One process cannot repeat such a run from its order.
        """
        new = {name: WorkItem(self.model, self.index, self.pieces[name].number + 1) for name in lost}
        return replace(RunState.after_lost_files(self, lost), pieces={**self.pieces, **new})


@dataclass(frozen=True, slots=True)
class ArrivalsJournal:
    """Files of an asynchronous run. A model is written before the run that needs it, and removed after."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "arrivals"

    def load(self) -> AsyncRunState | None:
        """The run; None where none has begun here."""
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
    """The largest serial number that each site has sent, over all runs of a federation; kept nowhere without a path.

    A site whose ledger is shorter was restored from an older copy, whichever run it has released in.
    """

    path: Path | None = None

    def load(self, names: Iterable[str]) -> dict[str, int]:
        """The numbers of these sites, as far as they were heard before."""
        kept = self._read()
        return {name: kept[name] for name in names if name in kept}

    def update(self, seen: Mapping[str, int]) -> None:
        """Add what was seen; on the disk when this returns. Concurrent runs take turns."""
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
                f"{self.path} does not hold the number of releases of each site. Restore it from a copy: without it "
                "the server does not notice a site that was restored from an older one."
            ) from error


def larger_counts(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """The larger number of each name."""
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in {**one, **other}}
