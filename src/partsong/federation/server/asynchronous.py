"""The server of a federation in which nobody waits for others: it can be killed at any point, as any site can."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from partsong.core.interfaces import (
    Arrival,
    AsyncCheckpoint,
    Checkpoint,
    Message,
    Outcome,
    Program,
    Reduction,
    Round,
    Schedule,
)
from partsong.engines.arrivals import AsyncConfig, asynchronous, beginning, taken_in
from partsong.engines.rounds import nobody_left
from partsong.engines.upload_checks import check_upload
from partsong.errors import (
    DivergenceError,
    FormatError,
    ParameterError,
    PartsongError,
    PartyError,
    SiteLost,
    UploadError,
)
from partsong.federation.columns import SAME
from partsong.federation.locks import locked
from partsong.federation.server import setup_phase
from partsong.federation.server.setup_phase import RunPlan, start_request
from partsong.federation.server.site_client import SiteClient
from partsong.federation.server.state import ArrivalsJournal, AsyncRunState, ReleaseCounters, larger
from partsong.federation.site.state import make_folder
from partsong.federation.transports.base import Lost, Transport
from partsong.federation.wire import USUAL, Kind, Nonce, Refusal, Reply, Request, error_of, way_on

# ---- errands ----------------------------------------------------------------------------------------------------
#
# Who is asked for what in an asynchronous run, since when, who rests, and when somebody counts as lost.

NOBODY: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Errand:
    """What a site is asked for, and since when."""

    nonce: Nonce
    since: float


@dataclass(slots=True)
class Errands:
    """Errands that are out, by name; who rests until when; why the last of a site was in vain; and how often others
    were heard since a site was due.

    A site that says no is asked again after `pause` seconds, one that says nothing is lost after `timeout` of them:
    `is_strict` makes that an error, and else the others go on as long as there is one.
    """

    timeout: float
    pause: float
    is_strict: bool
    out: dict[str, Errand] = field(default_factory=dict)
    resting: dict[str, float] = field(default_factory=dict)
    faults: dict[str, PartsongError] = field(default_factory=dict)
    passed: Counter[str] = field(default_factory=Counter)

    def idle(self, names: Sequence[str]) -> list[str]:
        """Who has nothing to do, and does not rest."""
        now = time.monotonic()
        self.resting = {name: due for name, due in self.resting.items() if due > now}
        return [name for name in names if name not in self.out and name not in self.resting]

    def send(self, name: str, nonce: Nonce) -> None:
        """A site is asked."""
        self.out[name] = Errand(nonce, time.monotonic())

    def heard(self, name: str, overdue: frozenset[str], among: int) -> Errand:
        """What a site that was heard had been asked for. Somebody who was overdue before is lost once all the others
        may have been heard since: replies that have come together are handed out one by one.
        """
        errand = self.out.pop(name)
        self.passed = Counter({one: self.passed[one] + 1 for one in overdue - {name}})
        self._require(one for one in sorted(self.passed) if self.passed[one] > among)
        return errand

    def nothing_came(self, index: int) -> None:
        """Nobody has a reply: who is overdue is lost."""
        overdue = self.overdue()
        self._require(sorted(overdue))
        self.require_somebody(index, overdue)

    def failed(self, name: str, error: PartsongError, index: int) -> None:
        """A site is asked for the same again later, if there are others."""
        self.resting[name], self.faults[name] = time.monotonic() + self.pause, error
        self.require_somebody(index)

    def leave_out(self, name: str, error: PartsongError, index: int) -> None:
        """A site is asked for nothing more, if there are others."""
        self.resting[name], self.faults[name] = math.inf, error
        self.require_somebody(index)

    def require_somebody(self, index: int, overdue: frozenset[str] = NOBODY) -> None:
        """Raise where nobody is asked but those who are overdue."""
        if self.out.keys() <= overdue:
            faults = {**{name: self.lost(name) for name in overdue}, **self.faults}
            error = nobody_left({name: faults[name] for name in sorted(faults)}, index)
            error.add_note(USUAL)
            raise error

    def excused(self, name: str, error: PartsongError) -> PartsongError:
        """The error, if its site is left out; one that does not say what can be done is given the usual way on."""
        if self.is_strict:
            ways = list(getattr(error, "__notes__", ())) or [USUAL]
            error.__notes__ = [f"(site {name!r})", *ways]
            raise error
        return error

    def missing(self) -> dict[str, str]:
        """Who is not there at the moment, and why."""
        lost = {name: self.lost(name) for name in self.overdue()}
        return {name: str(why) for name, why in {**lost, **self.faults}.items()}

    def overdue(self) -> frozenset[str]:
        """Who was asked too long ago."""
        until = time.monotonic() - self.timeout
        return frozenset(name for name, errand in self.out.items() if errand.since <= until)

    def longest_wait(self, until: float | None, overdue: frozenset[str]) -> float:
        """Seconds to the next moment at which something has to be done, though nobody is heard."""
        if overdue and self.is_strict:
            return 0.0
        now, dues = time.monotonic(), [due for due in self.resting.values() if due < math.inf]
        dues += [] if until is None else [until]
        dues += [errand.since + self.timeout for name, errand in self.out.items() if name not in overdue]
        return max(0.0, min(dues, default=now) - now)

    def lost(self, name: str) -> SiteLost:
        """The error of a site that is silent."""
        number = self.out[name].nonce.round
        return SiteLost(f"Site {name!r} was not heard in its round {number}: nothing came in time.")

    def _require(self, names: Iterable[str]) -> None:
        for name in names:
            self.excused(name, self.lost(name))


# ---- reception --------------------------------------------------------------------------------------------------
#
# The server of an asynchronous run, while it runs: every site has something to do, and who is heard is answered.
#
# A site is first told to start, then sent one piece of work after another, each with a number of its own. What it is
# asked for stays the same until it has answered, however often it is asked, so that the order of arrivals is all that
# the models depend on.


class FilesLost(SiteLost):
    """A site does not know the run any more, although it was started in it."""


SPOILED = (DivergenceError, UploadError)
"""Errors of the work itself: the same work would end in them again, and so its site is sent the newest model."""

MOST_SPOILED = 3
"""Works in a row that come to nothing; after them a site is asked for no more until the run is resumed."""

PARTING = 30.0
"""Seconds that sites which are not there have, at the end, to hear that a run is over."""


@dataclass(frozen=True, slots=True)
class End:
    """When a run is over, apart from its arrivals: after so many seconds, or once as many arrivals as there are parties
    have moved H by no more than `tol` of its norm.
    """

    time_budget: float | None = None
    tol: float = 0.0


@dataclass(slots=True)
class Reception:
    """Where a run stands, and what is under way."""

    agenda: RunPlan
    terms: AsyncConfig
    transport: Transport
    journal: ArrivalsJournal
    end: End
    record: AsyncRunState
    errands: Errands
    serials: ReleaseCounters = ReleaseCounters()
    began: float = 0.0

    def __post_init__(self) -> None:
        self.began = time.monotonic() - self.record.clock

    @property
    def outcome(self) -> Outcome | None:
        """Why the run is over; None while it is not."""
        record, budget, tol = self.record, self.end.time_budget, self.end.tol
        if record.index - len(record.faults) >= self.terms.schedule.rounds:
            return Outcome.MAX_ROUNDS
        if budget is not None and self._clock() >= budget:
            return Outcome.TIME_SPENT
        is_still = len(record.moves) == len(record.layout.parties) and sum(record.moves) <= tol
        return Outcome.CONVERGED if tol > 0 and is_still else None

    def send_out(self) -> None:
        """Something to do for everybody who has nothing, and does not rest."""
        requests = {name: self._request(name) for name in self.errands.idle(self.record.layout.parties)}
        self.transport.push({name: request.written() for name, request in requests.items()}, math.inf)
        for name, request in requests.items():
            self.errands.send(name, request.nonce)

    def next_arrival(self) -> Round | None:
        """The round that the next reply makes; None where it makes none, or nothing came before somebody is due."""
        errands, record, overdue = self.errands, self.record, self.errands.overdue()
        until = None if self.end.time_budget is None else self.began + self.end.time_budget
        found = self.transport.arrived(errands.longest_wait(until, overdue))
        if found is None or found[0] not in errands.out:
            errands.nothing_came(record.index)
            return None
        name, reply = found
        errand = errands.heard(name, overdue, len(record.layout.parties))
        try:
            message = self._read(name, errand, reply)
        except FilesLost:
            self.record = self.record.without_starts({name})
            self.journal.save(self.record)
            return None
        except PartsongError as error:
            excused = errands.excused(name, error)
            if isinstance(error, SPOILED) and errand.nonce.kind is Kind.WORK:
                return self._spoiled(name, excused)
            errands.failed(name, excused, record.index)
            return None
        errands.faults.pop(name, None)
        if errand.nonce.kind is Kind.START:
            self.record = replace(self.record, started=self.record.started | {name})
            self.journal.save(self.record)
            return None
        return self._taken(name, message)

    def finish(self) -> None:
        """Tell all that the run is over. Who is at work hears it after that; who is not there is not waited for, has no
        result, and is told again when the run is resumed.
        """
        self._require_arrivals()
        started = sorted(self.record.started)
        untold = {name: f"Site {name!r} has not been told the end of the run yet." for name in started}
        self.record = replace(self.record, without_result=untold)
        self.journal.save(self.record)
        record, away, began = self.record, self.errands.missing(), time.monotonic()
        nonce, left = Nonce(record.run, record.index, kind=Kind.FINISH), set(record.started)
        requests = {name: Request(name, nonce, record.model, self._counted(name), self._seen(name)) for name in left}
        self.transport.recall()
        self.transport.push({name: requests[name].written() for name in sorted(left)}, self.errands.timeout)
        why: dict[str, str] = {}
        while left:
            patience = self.errands.timeout if left - away.keys() else min(self.errands.timeout, PARTING)
            heard = self.transport.arrived(max(0.0, began + patience - time.monotonic()))
            if heard is None:
                break
            left.discard(heard[0])
            try:
                self._read(heard[0], Errand(nonce, began), heard[1])
            except PartsongError as error:
                why[heard[0]] = str(error)
        why |= {name: f"Site {name!r} has not answered the end of the run in time." for name in sorted(left)}
        self.record = replace(self.record, without_result=why)
        self.journal.save(self.record)

    def _request(self, name: str) -> Request:
        record = self.record
        if name not in record.started:
            return Request(name, *start_request(self.agenda, record), self._seen(name))
        piece, note = record.pieces[name], {"participants": list(record.layout.parties), **self._counted(name)}
        return Request(name, Nonce(record.run, piece.number, 0, Kind.WORK), piece.model, note, self._seen(name))

    def _counted(self, name: str) -> dict[str, list[int] | None]:
        """Which work of a site is in the model."""
        counted = self.record.counted.get(name)
        return {"counted": None if counted is None else list(counted)}

    def _seen(self, name: str) -> int:
        return self.record.seen.get(name, 0)

    def _read(self, name: str, errand: Errand, reply: bytes | Lost) -> Message:
        """What was asked for, or the error instead."""
        number = errand.nonce.round
        if isinstance(reply, Lost):
            raise SiteLost(f"Site {name!r} was not heard in its round {number}: {reply.why}.")
        try:
            read = Reply.read(reply)
        except FormatError as error:
            raise SiteLost(f"Site {name!r} sent what cannot be read in its round {number}: {error}") from error
        if read.party != name or (read.nonce != errand.nonce and not isinstance(read.answer, Refusal)):
            raise SiteLost(
                f"Site {name!r} sent the answer to another request than that of its round {number}: repeated, or for "
                "somebody else. Nothing of it was used."
            )
        if read.serial > self._seen(name):
            self.record = replace(self.record, seen={**self.record.seen, name: read.serial})
            self.serials.keep({name: read.serial})
        if isinstance(read.answer, Refusal):
            if read.answer.code == "not-started" and errand.nonce.kind is Kind.WORK:
                raise FilesLost(f"Site {name!r} has lost its files of run {self.record.run!r}.")
            said = error_of(name, read.answer, number)
            said.add_note(way_on(read.answer, name, self.record.run))
            raise SiteLost(str(said)) if isinstance(said, SPOILED) and read.nonce != errand.nonce else said
        if errand.nonce.kind is Kind.WORK:
            check_upload(name, read.answer, self.terms.expected)
        return read.answer

    def _taken(self, name: str, sent: Message | PartsongError) -> Round:
        """The server moves, which is on the disk before anybody is told of it."""
        before, index = self.record, self.record.index
        arrival = Arrival(name, sent, self._clock())
        done, sums = taken_in(self.terms, before.sums, before.checkpoint, arrival)
        after = done.checkpoint
        assert isinstance(after, AsyncCheckpoint)
        is_fault, number = isinstance(sent, PartsongError), before.pieces[name].number
        moves = before.moves if is_fault else (*before.moves, self._move(before.server, after.server))
        self.record = replace(
            before,
            index=after.index,
            server=after.server,
            model=after.model,
            sums=sums,
            pieces=after.items,
            clock=after.clock,
            order=(*before.order, name),
            faults={**before.faults, **({index: str(sent)} if is_fault else {})},
            counted=before.counted if is_fault else {**before.counted, name: (number, 0)},
            moves=moves[-len(before.layout.parties) :],
        )
        self.journal.save(self.record)
        return replace(done, refused={**self.errands.missing(), **done.refused})

    def _spoiled(self, name: str, error: PartsongError) -> Round:
        """An arrival of nothing, which does not count; too many of a site in a row, and it is left out."""
        done, record = self._taken(name, error), self.record
        last = [at for at, who in enumerate(record.order) if who == name][-MOST_SPOILED:]
        if len(last) == MOST_SPOILED and record.faults.keys() >= set(last):
            self.errands.leave_out(name, error, record.index)
        return done

    def _require_arrivals(self) -> None:
        """A run in which nothing that can be used has arrived has no model, and is not over at the sites."""
        record = self.record
        if record.index > len(record.faults):
            return
        reasons = {record.order[at]: why for at, why in record.faults.items()} | self.errands.missing()
        told = "; ".join(f"{name}: {why}" for name, why in sorted(reasons.items())) or "no site has answered in time"
        raise PartyError(
            f"Nothing that can be used has arrived in run {record.run!r} ({told}). There is no model but the one that "
            "it began with. Mend these sites and resume the run, with a larger time_budget where it has one."
        )

    def _move(self, before: object, after: object) -> float:
        """‖H − H before‖ / ‖H‖."""
        old, new = (np.asarray(self.terms.program.components(server), np.float64) for server in (before, after))
        return float(np.linalg.norm(new - old) / (np.linalg.norm(new) or 1.0))

    def _clock(self) -> float:
        return time.monotonic() - self.began


# ---- asynchronous -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AsyncCoordinator:
    """`engines.virtual_clock.Asynchronous` with parties elsewhere: arrivals come in the order in which sites are heard.

    That order is in the record of the run (`AsyncRunState.order`), and with it the engine in one process gives the same
    models. `Schedule.rounds` counts arrivals that can be used; a Round is an arrival. `folder` belongs to one run; if
    there is something in it, the run goes on from there; `serials` is the file with what sites have told of their
    ledgers, for all runs of a federation.

    faulty "stop": a site that refuses, or is silent for longer than `timeout`, ends the run with an error, after which
    it can be resumed. "leave out": the others go on, and the site is asked for the same work until it has done it; work
    that itself came to nothing is an arrival that does not count, and its site is sent the newest model, unless it was
    the third in a row. The run stops only where nobody is left.
    """

    transport: Transport
    folder: Path
    name: str
    experiment: Mapping[str, Any]
    rule: str = SAME
    timeout: float = 600.0
    record: bool = False
    pause: float = 5.0
    time_budget: float | None = None
    tol: float = 0.0
    serials: Path | None = None

    def run(self, program: Program, schedule: Schedule, reduction: Reduction) -> Iterator[Round]:
        """Rounds in the order of arrival; each is on the disk, and its sender has been sent the newest model, before
        it is handed out.
        """
        make_folder(self.folder)
        with locked(self.folder / "lock", waits=False):
            reception = self._opened(program, schedule, reduction)
            try:
                while reception.outcome is None and not reception.record.without_result:
                    reception.send_out()
                    done = reception.next_arrival()
                    if done is not None:
                        if reception.outcome is None:
                            reception.send_out()
                        yield done
                        del done
                reception.finish()
            finally:
                self.transport.recall()

    def _opened(self, program: Program, schedule: Schedule, reduction: Reduction) -> Reception:
        """A run as it stands in the folder; one that has not begun begins here, with all who can be heard now."""
        agenda, journal = RunPlan(self.name, self.experiment, self.rule), ArrivalsJournal(self.folder)
        record, desk = self._found(journal), self._desk(schedule)
        if record is None:
            record = self._begun(agenda, program, schedule, reduction, desk)
            journal.save(record)
        setup_phase.require_same_sites(record, self.transport.names())
        desk.seen.update(larger(desk.seen, record.seen))
        if not record.started:
            record, _ = setup_phase.start_sites(agenda, desk, record, journal.save, record.seen.keys())
        record = replace(record, seen=dict(desk.seen))
        terms = asynchronous(program, schedule, record.layout, reduction, self.record)
        end, errands = End(self.time_budget, self.tol), Errands(self.timeout, self.pause, schedule.faulty == "stop")
        return Reception(agenda, terms, self.transport, journal, end, record, errands, desk.counters)

    def _desk(self, schedule: Schedule) -> SiteClient:
        serials = ReleaseCounters(self.serials)
        return SiteClient(self.transport, self.timeout, schedule.faulty, serials.known(self.transport.names()), serials)

    def _begun(
        self, agenda: RunPlan, program: Program, schedule: Schedule, reduction: Reduction, desk: SiteClient
    ) -> AsyncRunState:
        first = setup_phase.negotiate(agenda, program, schedule, desk)
        terms = asynchronous(program, schedule, first.layout, reduction, self.record)
        return AsyncRunState.of(first, beginning(terms, Checkpoint(0, {}, first.server, first.model)))

    def _found(self, journal: ArrivalsJournal) -> AsyncRunState | None:
        record = journal.load()
        if (record is None and (self.folder / "run").exists()) or (
            record is not None and (record.run != self.name or record.experiment != dict(self.experiment))
        ):
            raise ParameterError(
                f"{self.folder} holds another run, or this one with other settings. Resume it with its own, or take "
                "another folder."
            )
        return record
