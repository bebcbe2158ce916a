"""The server of an asynchronous run, while it runs: every site has something to do, and who is heard is answered.

A site is first told to start, then sent one piece of work after another, each with a number of its own. What it is
asked for stays the same until it has answered, however often it is asked, so that the order of arrivals is all that
the models depend on.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np

from partsong.core import Message, Outcome, Round
from partsong.engines.arrivals import Arrival, taken_in
from partsong.engines.boundary import check_upload
from partsong.engines.pieces import Midway, Terms
from partsong.engines.rounds import Desk
from partsong.errors import DivergenceError, FormatError, PartsongError, PartyError, UploadError
from partsong.federation.arrivals_record import ArrivalsJournal, Ongoing
from partsong.federation.beginning import Agenda, start_of
from partsong.federation.errands import Errand, Errands
from partsong.federation.refusals import SiteLost, error_of
from partsong.federation.serials import Serials
from partsong.federation.transport import Lost, Transport
from partsong.federation.ways_on import way_on
from partsong.federation.wire import Kind, Nonce, Refusal, Reply, Request

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

    agenda: Agenda
    terms: Terms
    transport: Transport
    journal: ArrivalsJournal
    end: End
    record: Ongoing
    errands: Errands
    serials: Serials = Serials()
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
            return Request(name, *start_of(self.agenda, record), self._seen(name))
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
            said = error_of(name, read.answer, number)
            said.add_note(way_on(read.answer, name, self.record.run))
            raise SiteLost(str(said)) if isinstance(said, SPOILED) and read.nonce != errand.nonce else said
        if errand.nonce.kind is Kind.WORK:
            check_upload(name, read.answer, self.terms.expected)
        return read.answer

    def _taken(self, name: str, sent: Message | PartsongError) -> Round:
        """The server moves, which is on the disk before anybody is told of it."""
        before, index, desk = self.record, self.record.index, Desk({}, self.record.desk)
        done = taken_in(self.terms, desk, before.point, Arrival(name, sent, self._clock()))
        after = done.checkpoint
        assert isinstance(after, Midway)
        is_fault, number = isinstance(sent, PartsongError), before.pieces[name].number
        moves = before.moves if is_fault else (*before.moves, self._move(before.server, after.server))
        self.record = replace(
            before,
            index=after.index,
            server=after.server,
            model=after.model,
            desk=desk.server,
            pieces=after.pieces,
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
