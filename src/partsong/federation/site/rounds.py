"""The rounds of a run at a site: which state they begin from, work, phases of a sum; each is written, then sent.

Each is asked about as site.toml is now (`consent`), the first time and again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from partsong.core.interfaces import Ask, Message, ReductionContext, Shard
from partsong.engines.party import Party, PartyState
from partsong.errors import FileError, PartsongError, TooFewParties, UploadError
from partsong.federation.audit_log import Audit
from partsong.federation.experiment import DrawnSchedule
from partsong.federation.ledger import Books, Cost
from partsong.federation.site.consent import Consent, known_in_sum
from partsong.federation.site.plan import Plan, attempt_in, names_in
from partsong.federation.site.state import Attempt, RunFolder, Sent, Started, Tally, Worked
from partsong.federation.wire import Denied, Nonce, Reply, Request, refusal_of
from partsong.privacy.exposure import directions_of

INNOCENT = (Denied, FileError, TooFewParties, OSError, MemoryError)
"""Errors of work that say nothing of the numbers in the data."""
KERNEL_THREADS = 1


@dataclass(frozen=True, slots=True)
class Answered:
    """A reply as it leaves, whether it left before, and the plan that it is about."""

    reply: Reply
    payload: bytes
    again: bool = False
    plan: Plan | None = None


@dataclass(frozen=True, slots=True)
class Workplace:
    """A run at a site, as a request finds it."""

    consent: Consent
    files: RunFolder
    started: Started
    plan: Plan
    tally: Tally
    audit: Audit

    def work(self, request: Request) -> Answered:
        """The program's work on the model, and the first phase of its sum, which the request names."""
        at, phase = (request.nonce.round, request.nonce.attempt), request.nonce.phase
        sent, participants = self._sent_before(at, phase), names_in(request.note.get("participants"))
        self._require_allowed(request, len(participants))
        if sent is not None:
            return self._again(request, sent)
        if phase >= self.plan.reduction.phases or self.files.phases(at):
            raise Denied(
                "out-of-turn", f"The sum of round {at[0]}, attempt {at[1]}, does not begin with phase {phase}."
            )
        self.consent.exposure.require_upload(self.plan, request, self.started)
        place = self._in_step(request, at)
        context, company = place._context(request, participants)
        worked = self._charged(request, at)
        with place._closing():
            worked = worked or place._worked(request, at)
            seat = place._begun(worked.upload, context)
        answered = place._sent(request, Sent("", seat, b"", company), Message({}))
        self.files.forget({at, *([place.tally.counted] if place.tally.counted else [])})
        return answered

    def reduce(self, request: Request) -> Answered:
        """A later phase of the sum."""
        at, phase = (request.nonce.round, request.nonce.attempt), request.nonce.phase
        sent, before = self._sent_before(at, phase), self.files.sent(at, phase - 1, self.plan.source)
        known = sent or before
        self._require_allowed(request, None if known is None else len(known_in_sum(known.seat)) or None)
        if sent is not None:
            return self._again(request, sent)
        latest = self.files.attempts()[-1:]
        is_next = before is not None and latest == [at] and self.files.phases(at)[-1] == phase - 1
        if before is None or not is_next or phase >= self.plan.reduction.phases:
            raise Denied("out-of-turn", f"Phase {phase} of round {at[0]}, attempt {at[1]}, is not the next one here.")
        return self._sent(request, before, request.body)

    def counting(self, counted: Attempt | None) -> Workplace:
        """The same place, going on from a work that the server counts; what the reduction has learned in the last sum
        is kept.
        """
        return self._keeping(replace(self.tally, counted=counted, agreed=counted, alone=()), counted)

    def ended(self, digest: str) -> Workplace:
        """The same place in a run that is over, which is on the disk before anything of it is forgotten."""
        tally = replace(self.tally, standing=None, over=digest)
        self.files.save_tally(tally, self.plan.source)
        return replace(self, tally=tally)

    def require_open(self) -> None:
        """Refuse where the run is over."""
        if self.tally.over is not None:
            raise Denied("over", "The run is over here.")

    def require_taking_part(self, in_sum: int | None = None) -> None:
        """Refuse where the site would not take part in this run any more, or not with so many in a sum."""
        self.consent.require_begun(self.plan, self.started, in_sum)
        self.consent.require_booked(self.plan)

    def _require_allowed(self, request: Request, in_sum: int | None) -> None:
        """Refuse an answer, new or not, that site.toml as it is now does not let leave."""
        self.require_taking_part(in_sum)
        self.consent.require_exchange(self.plan, request.nonce.round)
        self.consent.require_columns(self.started)
        self.consent.exposure.require_booked(self.plan, self.started)

    def _sent_before(self, at: Attempt, phase: int) -> Sent | None:
        """What was sent in this phase; refused where nothing more is worked on in this run."""
        self.require_open()
        sent = self.files.sent(at, phase, self.plan.source)
        if sent is None and self.tally.closed is not None:
            raise Denied(self.tally.closed, "Work under masks has failed in this run before, and it is closed here.")
        return sent

    def _begun(self, upload: Message, context: ReductionContext) -> Any:
        """The site's seat in the sum. Where a number is beyond its bound, the site's log is told how large it is."""
        aggregation: Any = self.plan.program.aggregation
        try:
            return self.plan.reduction.start(self.tally.standing, upload, aggregation, context)
        except UploadError as error:
            if not self.plan.reduction.hides_uploads:
                raise
            lifted = aggregation.lift(upload)
            largest = max(np.abs(np.asarray(one)).max(initial=0.0) for one in (*lifted.arrays.values(), lifted.weight))
            raise UploadError(f"{error} The largest of its numbers is {largest:.3g}.") from error

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """Under masks whether work fails is a comparison with the site's own numbers: one is answered in a run."""
        try:
            yield
        except Exception as error:
            if self.plan.reduction.hides_uploads and not isinstance(error, INNOCENT):
                code = refusal_of(error).code if isinstance(error, PartsongError) else "failed"
                self.files.save_tally(replace(self.tally, closed=code), self.plan.source)
            raise

    def _charged(self, request: Request, at: Attempt) -> Worked | None:
        """What was worked on before in this attempt, which is in the ledger now.

        Work that is not here is done again: as it was charged where its line is the last one, of work that was cut off,
        and for a charge of its own where there were others since.
        """
        ledger, worked = self.consent.ledger, self.files.worked(at)
        directions = directions_of(self.plan.program, request.body)
        of_rows = (directions, self.started.layout.seed)
        cost = Cost(self.plan.release, self.consent.policy.privacy, self.plan.bounds, *of_rows)
        books = ledger.books()
        last = books.last_place
        unheard = last is not None and not self.audit.departures().has_left(last[0], last[1:])
        if ledger.charge(request, cost, unheard=unheard) and worked is None:
            self._require_unheard(request.nonce, books)
            if last != (request.nonce.run, *at):
                ledger.charge(request, cost, unheard=unheard, again=True)
        return worked

    def _require_unheard(self, nonce: Nonce, books: Books) -> None:
        """Work that was charged, and is not here, is done again where nothing of it has left. What an opening balance
        covers may have left, whatever the log says.
        """
        released, (covered, _) = self.audit.released(nonce.run), books.covered
        charges = books.runs.get(nonce.run, ())
        at = (nonce.round, nonce.attempt)
        is_covered = any((one.round, one.attempt) == at and one.number <= covered for one in charges)
        if released is None or at in released.works or is_covered:
            raise Denied("conflict", "An answer to this request has left, and what it was made of is gone.")

    def _keeping(self, tally: Tally, summed: Attempt | None) -> Workplace:
        """The same place with another tally, and what the reduction has learned in a sum."""
        phases = [] if summed is None else self.files.phases(summed)
        sent = self.files.sent(summed, phases[-1], self.plan.source) if summed is not None and phases else None
        if sent is not None:
            survivors = getattr(sent.seat, "survivors", ())
            tally = replace(
                tally, standing=self.plan.reduction.finish_party(sent.seat), company=tuple(survivors) or None
            )
        self.files.save_tally(tally, self.plan.source)
        return replace(self, tally=tally)

    def _in_step(self, request: Request, at: Attempt) -> Workplace:
        """The place with the tally that the server counts on; refused where that is not here, or behind us.

        Work of which shares or a masked upload have left must count, or nothing more is done: sums of the same work
        over other parties would differ by single uploads. Where that upload was all that has left, the server may not
        have heard it, and has gone on without; such work counts here all the same.
        """
        attempts, counted, tally = self.files.attempts(), attempt_in(request.note.get("counted")), self.tally
        latest = attempts[-1] if attempts else None
        if at[0] <= tally.passed:
            raise Denied("out-of-step", f"Round {tally.passed} was released before the files of this run were lost.")
        if (latest is not None and at < latest) or any(one and at[0] <= one[0] for one in (counted, tally.counted)):
            raise Denied("out-of-step", f"Round {at[0]}, attempt {at[1]}, is behind {latest or counted}.")
        if latest not in (None, at, counted, tally.counted) and self.plan.reduction.hides_uploads:
            assert latest is not None
            phases = self.files.phases(latest)
            if phases and phases[-1] > 0:
                if at[0] == latest[0] or len(phases) > 1 or counted != tally.agreed:
                    raise Denied("round-closed", f"Shares or a masked upload of {latest} have left, and it must count.")
                return self._keeping(replace(tally, counted=latest, alone=(*tally.alone, latest)), latest)
        if counted == tally.agreed:
            is_new_round = latest is not None and at[0] > latest[0] and latest != tally.counted
            return self._keeping(tally, latest) if is_new_round else self
        if counted is None or counted not in attempts:
            raise Denied("out-of-step", f"The server counts on {counted}; here it is {tally.agreed}.")
        return self.counting(counted)

    def _context(
        self, request: Request, participants: tuple[str, ...]
    ) -> tuple[ReductionContext, tuple[str, ...] | None]:
        """Which sum this is; and, within a round that is hidden, who has to be in it."""
        company, name = None, self.consent.name
        if self.plan.reduction.hides_uploads and self.plan.program.turn(request.body).step > 0:
            company = self.tally.company
            if company is None or set(company) != set(participants):
                raise Denied("company", f"The sum before in this round was over {company}, this one: {participants}.")
        strangers = sorted(set(participants) - set(self.started.layout.parties))
        if strangers or name not in participants:
            told = ", ".join(strangers) or f"{name!r}, which is not asked,"
            raise Denied("protocol", f"{told} cannot be in a sum with {name!r}: the run is not of them.")
        parties, number, seed = self.started.layout.parties, request.nonce.round, self.started.experiment.get("seed", 0)
        drawn = DrawnSchedule(self.plan.exchanges, seed, fraction=self.plan.fraction).participants(parties, number)
        if not set(participants) <= set(drawn):
            raise Denied("protocol", f"Asked in round {number} are {participants}; drawn for it were {drawn}.")
        return ReductionContext(request.nonce.round, participants, self.started.layout, request.body), company

    def _worked(self, request: Request, at: Attempt) -> Worked:
        started, program, name, data = self.started, self.plan.program, self.consent.name, self.consent.data
        shard = Shard(name, data.matrix(data.order(started.columns), started.least_support), data.secret)
        counted = None if self.tally.counted is None else self.files.worked(self.tally.counted)
        before = started.state if counted is None else counted.state
        expected = program.upload_spec(started.layout)
        party = Party(program, shard, started.layout, self.plan.reduction, expected, KERNEL_THREADS)
        ask = Ask("work", *at, request.nonce.phase, (), (name,), request.body)
        work = party.worked(PartyState(before, has_started=True), ask).work
        assert work is not None
        assert work.upload is not None
        worked = Worked(request.digest, work.state, work.upload)
        self.files.save_work(at, worked)
        return worked

    def _sent(self, request: Request, before: Sent, heard: Message) -> Answered:
        """The answer of a phase, on the disk."""
        nonce = request.nonce
        try:
            seat, message = self.plan.reduction.client_step(nonce.phase, before.seat, heard)
        except PartsongError as error:
            code = refusal_of(error).code
            raise Denied("protocol" if code == "failed" else code, str(error)) from error
        survivors: Any = getattr(seat, "survivors", ())
        if before.company is not None and survivors and set(survivors) != set(before.company):
            raise Denied("company", f"The sum before in this round was over {before.company}, this one: {survivors}.")
        self.consent.require_in_sum(seat, self.started.layout.parties)
        alone = {"alone": [list(at) for at in self.tally.alone]} if self.tally.alone else {}
        reply = Reply(self.consent.name, nonce, message, self.consent.ledger.serial, alone)
        sent = Sent(request.digest, seat, reply.written(), before.company)
        self.files.save_sent((nonce.round, nonce.attempt), nonce.phase, sent, self.plan.source)
        return Answered(reply, sent.reply, plan=self.plan)

    def _again(self, request: Request, sent: Sent) -> Answered:
        """The same bytes, to the same request only."""
        if sent.digest != request.digest:
            raise Denied("conflict", "Another request under this run, round, attempt and phase was answered before.")
        return Answered(Reply.read(sent.reply), sent.reply, again=True, plan=self.plan)
