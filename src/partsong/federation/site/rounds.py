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
from partsong.federation.audit_log import AuditLog
from partsong.federation.experiment import DrawnSchedule
from partsong.federation.ledger import AttemptCost, LedgerState
from partsong.federation.site.consent import PolicyChecker, parties_in_sum
from partsong.federation.site.plan import Plan, parse_attempt, parse_parties
from partsong.federation.site.state import Attempt, ProgressState, ReplyState, RunFolder, StartState, WorkState
from partsong.federation.wire import Nonce, Reply, Request, RequestRefused, refusal_from_error
from partsong.privacy.exposure import directions_of

DATA_INDEPENDENT = (RequestRefused, FileError, TooFewParties, OSError, MemoryError)
"""Errors of work that say nothing of the numbers in the data."""
KERNEL_THREADS = 1


@dataclass(frozen=True, slots=True)
class SiteAnswer:
    """A reply as it leaves, whether it left before, and the plan that it is about."""

    reply: Reply
    payload: bytes
    is_repeat: bool = False
    plan: Plan | None = None


@dataclass(frozen=True, slots=True)
class RoundHandler:
    """A run at a site, as a request finds it."""

    policy_checker: PolicyChecker
    files: RunFolder
    started: StartState
    plan: Plan
    progress: ProgressState
    audit: AuditLog

    def work(self, request: Request) -> SiteAnswer:
        """The program's work on the model, and the first phase of its sum, which the request names."""
        at, phase = (request.nonce.round, request.nonce.attempt), request.nonce.phase
        sent, participants = self._previous_reply(at, phase), parse_parties(request.note.get("participants"))
        self._require_allowed(request, len(participants))
        if sent is not None:
            return self._repeat(request, sent)
        if phase >= self.plan.reduction.phases or self.files.phases(at):
            raise RequestRefused(
                "out-of-turn", f"The sum of round {at[0]}, attempt {at[1]}, does not begin with phase {phase}."
            )
        self.policy_checker.exposure_limit.require_upload(self.plan, request, self.started)
        place = self._synchronize(request, at)
        context, company = place._context(request, participants)
        worked = self._charge(request, at)
        with place._close_on_failure():
            worked = worked or place._work(request, at)
            seat = place._start_sum(worked.upload, context)
        answered = place._answer_phase(request, ReplyState("", seat, b"", company), Message({}))
        self.files.keep_only({at, *([place.progress.counted] if place.progress.counted else [])})
        return answered

    def reduce(self, request: Request) -> SiteAnswer:
        """A later phase of the sum."""
        at, phase = (request.nonce.round, request.nonce.attempt), request.nonce.phase
        sent, before = self._previous_reply(at, phase), self.files.load_reply(at, phase - 1, self.plan.source)
        known = sent or before
        self._require_allowed(request, None if known is None else len(parties_in_sum(known.reduction_state)) or None)
        if sent is not None:
            return self._repeat(request, sent)
        latest = self.files.attempts()[-1:]
        is_next = before is not None and latest == [at] and self.files.phases(at)[-1] == phase - 1
        if before is None or not is_next or phase >= self.plan.reduction.phases:
            raise RequestRefused(
                "out-of-turn", f"Phase {phase} of round {at[0]}, attempt {at[1]}, is not the next one here."
            )
        return self._answer_phase(request, before, request.body)

    def advance_to(self, counted: Attempt | None) -> RoundHandler:
        """The same place, going on from a work that the server counts; what the reduction has learned in the last sum
        is kept.
        """
        return self._save_progress(
            replace(self.progress, counted=counted, acknowledged=counted, unacknowledged=()), counted
        )

    def mark_finished(self, digest: str) -> RoundHandler:
        """The same place in a run that is over, which is on the disk before anything of it is forgotten."""
        tally = replace(self.progress, reduction_state=None, finish_digest=digest)
        self.files.save_progress(tally, self.plan.source)
        return replace(self, progress=tally)

    def require_unfinished(self) -> None:
        """Refuse where the run is over."""
        if self.progress.finish_digest is not None:
            raise RequestRefused("over", "The run is over here.")

    def require_participation(self, in_sum: int | None = None) -> None:
        """Refuse where the site would not take part in this run any more, or not with so many in a sum."""
        self.policy_checker.require_still_allowed(self.plan, self.started, in_sum)
        self.policy_checker.require_recorded(self.plan)

    def _require_allowed(self, request: Request, in_sum: int | None) -> None:
        """Refuse an answer, new or not, that site.toml as it is now does not let leave."""
        self.require_participation(in_sum)
        self.policy_checker.require_exchange(self.plan, request.nonce.round)
        self.policy_checker.require_columns(self.started)
        self.policy_checker.exposure_limit.require_recorded(self.plan, self.started)

    def _previous_reply(self, at: Attempt, phase: int) -> ReplyState | None:
        """What was sent in this phase; refused where nothing more is worked on in this run."""
        self.require_unfinished()
        sent = self.files.load_reply(at, phase, self.plan.source)
        if sent is None and self.progress.closed_code is not None:
            raise RequestRefused(
                self.progress.closed_code, "Work under masks has failed in this run before, and it is closed here."
            )
        return sent

    def _start_sum(self, upload: Message, context: ReductionContext) -> Any:
        """The site's seat in the sum. Where a number is beyond its bound, the site's log is told how large it is."""
        aggregation: Any = self.plan.program.aggregation
        try:
            return self.plan.reduction.start(self.progress.reduction_state, upload, aggregation, context)
        except UploadError as error:
            if not self.plan.reduction.hides_uploads:
                raise
            lifted = aggregation.lift(upload)
            largest = max(np.abs(np.asarray(one)).max(initial=0.0) for one in (*lifted.arrays.values(), lifted.weight))
            raise UploadError(f"{error} The largest of its numbers is {largest:.3g}.") from error

    @contextmanager
    def _close_on_failure(self) -> Iterator[None]:
        """Under masks whether work fails is a comparison with the site's own numbers: one is answered in a run."""
        try:
            yield
        except Exception as error:
            if self.plan.reduction.hides_uploads and not isinstance(error, DATA_INDEPENDENT):
                code = refusal_from_error(error).code if isinstance(error, PartsongError) else "failed"
                self.files.save_progress(replace(self.progress, closed_code=code), self.plan.source)
            raise

    def _charge(self, request: Request, at: Attempt) -> WorkState | None:
        """What was worked on before in this attempt, which is in the ledger now.

        Work that is not here is done again: as it was charged where its line is the last one, of work that was cut off,
        and for a charge of its own where there were others since.
        """
        ledger, worked = self.policy_checker.ledger, self.files.load_work(at)
        directions = directions_of(self.plan.program, request.body)
        of_rows = (directions, self.started.layout.seed)
        cost = AttemptCost(self.plan.release, self.policy_checker.policy.privacy, self.plan.limits, *of_rows)
        books = ledger.load()
        last = books.last_attempt
        unsent = last is not None and not self.audit.history().was_sent(last[0], last[1:])
        if ledger.charge(request, cost, previous_unsent=unsent) and worked is None:
            self._require_unsent(request.nonce, books)
            if last != (request.nonce.run, *at):
                ledger.charge(request, cost, previous_unsent=unsent, repeat=True)
        return worked

    def _require_unsent(self, nonce: Nonce, books: LedgerState) -> None:
        """Work that was charged, and is not here, is done again where nothing of it has left. What an opening balance
        covers may have left, whatever the log says.
        """
        released, (covered, _) = self.audit.run_releases(nonce.run), books.covered_lines
        charges = books.runs.get(nonce.run, ())
        at = (nonce.round, nonce.attempt)
        is_covered = any((one.round, one.attempt) == at and one.number <= covered for one in charges)
        if released is None or at in released.attempts or is_covered:
            raise RequestRefused("conflict", "An answer to this request has left, and what it was made of is gone.")

    def _save_progress(self, tally: ProgressState, summed: Attempt | None) -> RoundHandler:
        """The same place with another tally, and what the reduction has learned in a sum."""
        phases = [] if summed is None else self.files.phases(summed)
        sent = self.files.load_reply(summed, phases[-1], self.plan.source) if summed is not None and phases else None
        if sent is not None:
            survivors = getattr(sent.reduction_state, "survivors", ())
            tally = replace(
                tally,
                reduction_state=self.plan.reduction.finish_party(sent.reduction_state),
                cohort=tuple(survivors) or None,
            )
        self.files.save_progress(tally, self.plan.source)
        return replace(self, progress=tally)

    def _synchronize(self, request: Request, at: Attempt) -> RoundHandler:
        """The place with the tally that the server counts on; refused where that is not here, or behind us.

        Work of which shares or a masked upload have left must count, or nothing more is done: sums of the same work
        over other parties would differ by single uploads. Where that upload was all that has left, the server may not
        have heard it, and has gone on without; such work counts here all the same.
        """
        attempts, counted, tally = self.files.attempts(), parse_attempt(request.note.get("counted")), self.progress
        latest = attempts[-1] if attempts else None
        if at[0] <= tally.last_released:
            raise RequestRefused(
                "out-of-step", f"Round {tally.last_released} was released before the files of this run were lost."
            )
        if (latest is not None and at < latest) or any(one and at[0] <= one[0] for one in (counted, tally.counted)):
            raise RequestRefused("out-of-step", f"Round {at[0]}, attempt {at[1]}, is behind {latest or counted}.")
        if latest not in (None, at, counted, tally.counted) and self.plan.reduction.hides_uploads:
            assert latest is not None
            phases = self.files.phases(latest)
            if phases and phases[-1] > 0:
                if at[0] == latest[0] or len(phases) > 1 or counted != tally.acknowledged:
                    raise RequestRefused(
                        "round-closed", f"Shares or a masked upload of {latest} have left, and it must count."
                    )
                return self._save_progress(
                    replace(tally, counted=latest, unacknowledged=(*tally.unacknowledged, latest)), latest
                )
        if counted == tally.acknowledged:
            is_new_round = latest is not None and at[0] > latest[0] and latest != tally.counted
            return self._save_progress(tally, latest) if is_new_round else self
        if counted is None or counted not in attempts:
            raise RequestRefused("out-of-step", f"The server counts on {counted}; here it is {tally.acknowledged}.")
        return self.advance_to(counted)

    def _context(
        self, request: Request, participants: tuple[str, ...]
    ) -> tuple[ReductionContext, tuple[str, ...] | None]:
        """Which sum this is; and, within a round that is hidden, who has to be in it."""
        company, name = None, self.policy_checker.name
        if self.plan.reduction.hides_uploads and self.plan.program.turn(request.body).step > 0:
            company = self.progress.cohort
            if company is None or set(company) != set(participants):
                raise RequestRefused(
                    "company", f"The sum before in this round was over {company}, this one: {participants}."
                )
        strangers = sorted(set(participants) - set(self.started.layout.parties))
        if strangers or name not in participants:
            told = ", ".join(strangers) or f"{name!r}, which is not asked,"
            raise RequestRefused("protocol", f"{told} cannot be in a sum with {name!r}: the run is not of them.")
        parties, number, seed = self.started.layout.parties, request.nonce.round, self.started.experiment.get("seed", 0)
        drawn = DrawnSchedule(self.plan.exchanges, seed, fraction=self.plan.fraction).participants(parties, number)
        if not set(participants) <= set(drawn):
            raise RequestRefused("protocol", f"Asked in round {number} are {participants}; drawn for it were {drawn}.")
        return ReductionContext(request.nonce.round, participants, self.started.layout, request.body), company

    def _work(self, request: Request, at: Attempt) -> WorkState:
        started, program, name, data = (
            self.started,
            self.plan.program,
            self.policy_checker.name,
            self.policy_checker.data,
        )
        shard = Shard(name, data.matrix(data.order(started.columns), started.least_support), data.secret)
        counted = None if self.progress.counted is None else self.files.load_work(self.progress.counted)
        before = started.state if counted is None else counted.state
        expected = program.upload_spec(started.layout)
        party = Party(program, shard, started.layout, self.plan.reduction, expected, KERNEL_THREADS)
        ask = Ask("work", *at, request.nonce.phase, (), (name,), request.body)
        work = party.do_work(PartyState(before, has_started=True), ask).work
        assert work is not None
        assert work.upload is not None
        worked = WorkState(request.digest, work.state, work.upload)
        self.files.save_work(at, worked)
        return worked

    def _answer_phase(self, request: Request, before: ReplyState, heard: Message) -> SiteAnswer:
        """The answer of a phase, on the disk."""
        nonce = request.nonce
        try:
            seat, message = self.plan.reduction.client_step(nonce.phase, before.reduction_state, heard)
        except PartsongError as error:
            code = refusal_from_error(error).code
            raise RequestRefused("protocol" if code == "failed" else code, str(error)) from error
        survivors: Any = getattr(seat, "survivors", ())
        if before.cohort is not None and survivors and set(survivors) != set(before.cohort):
            raise RequestRefused(
                "company", f"The sum before in this round was over {before.cohort}, this one: {survivors}."
            )
        self.policy_checker.require_sum_size(seat, self.started.layout.parties)
        alone = {"alone": [list(at) for at in self.progress.unacknowledged]} if self.progress.unacknowledged else {}
        reply = Reply(self.policy_checker.name, nonce, message, self.policy_checker.ledger.serial, alone)
        sent = ReplyState(request.digest, seat, reply.to_bytes(), before.cohort)
        self.files.save_reply((nonce.round, nonce.attempt), nonce.phase, sent, self.plan.source)
        return SiteAnswer(reply, sent.reply, plan=self.plan)

    def _repeat(self, request: Request, sent: ReplyState) -> SiteAnswer:
        """The same bytes, to the same request only."""
        if sent.digest != request.digest:
            raise RequestRefused(
                "conflict", "Another request under this run, round, attempt and phase was answered before."
            )
        return SiteAnswer(Reply.from_bytes(sent.reply), sent.reply, is_repeat=True, plan=self.plan)
