"""Rounds of a run at a site: work and the phases of a sum. Each answer is written before it is sent.

Each request is checked against the current site.toml (`consent`), also when it is repeated.
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
from partsong.privacy.exposure import counted, directions_of

DATA_INDEPENDENT = (RequestRefused, FileError, TooFewParties, OSError, MemoryError)
"""Errors of work that reveal nothing about the values in the data."""
KERNEL_THREADS = 1


@dataclass(frozen=True, slots=True)
class SiteAnswer:
    """A reply and its bytes, whether it was sent before, and its plan."""

    reply: Reply
    payload: bytes
    is_repeat: bool = False
    plan: Plan | None = None


@dataclass(frozen=True, slots=True)
class RoundHandler:
    """Handles one request of a started run at a site."""

    policy_checker: PolicyChecker
    files: RunFolder
    started: StartState
    plan: Plan
    progress: ProgressState
    audit: AuditLog

    def work(self, request: Request) -> SiteAnswer:
        """Run the program's work on the model, and the first phase of its sum, which the request names."""
        at, phase = (request.nonce.round, request.nonce.attempt), request.nonce.phase
        sent, participants = self._previous_reply(at, phase), parse_parties(request.note.get("participants"))
        self._require_allowed(request, len(participants))
        if sent is not None:
            return self._repeat(request, sent)
        if phase >= self.plan.reduction.phases or self.files.phases(at):
            raise RequestRefused(
                "out-of-turn", f"The sum of round {at[0]}, attempt {at[1]}, does not start with phase {phase}."
            )
        if self.plan.program.exchange_of(request.body) not in (None, at[0]):
            # else another exchange than this one would be charged
            raise RequestRefused("protocol", f"The model in the request of round {at[0]} is for another exchange.")
        self.policy_checker.exposure_limit.require_upload(self.plan, request, self.started)
        handler = self._synchronize(request, at)
        context, cohort = handler._context(request, participants)
        # The charge is on disk before the work: a kill in between may cost budget, but nothing leaves uncharged.
        worked = self._charge(request, at)
        with handler._close_on_failure():
            # Work that is on disk is not repeated: it may have drawn noise, which must not be drawn twice.
            worked = worked or handler._work(request, at)
            client = handler._start_sum(worked.upload, context)
        answered = handler._answer_phase(request, ReplyState("", client, b"", cohort), Message({}))
        # Only now: until the answer is on disk, earlier attempts may be needed to answer this request again.
        self.files.keep_only({at, *([handler.progress.counted] if handler.progress.counted else [])})
        return answered

    def reduce(self, request: Request) -> SiteAnswer:
        """Answer a later phase of the sum."""
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
                "out-of-turn", f"Phase {phase} of round {at[0]}, attempt {at[1]}, is not the next phase here."
            )
        return self._answer_phase(request, before, request.body)

    def advance_to(self, counted: Attempt | None) -> RoundHandler:
        """Return a handler that continues from the attempt that the server counts, with the reduction's state
        of its sum.
        """
        return self._save_progress(
            replace(self.progress, counted=counted, acknowledged=counted, unacknowledged=()), counted
        )

    def mark_finished(self, digest: str) -> RoundHandler:
        """Return a handler of the finished run. This is on disk before any file of the run is removed."""
        # The keys of masks are not kept after the run.
        tally = replace(self.progress, reduction_state=None, finish_digest=digest)
        self.files.save_progress(tally, self.plan.source)
        return replace(self, progress=tally)

    def require_unfinished(self) -> None:
        """Refuse if the run is over."""
        if self.progress.finish_digest is not None:
            raise RequestRefused("over", "The run has ended at this site.")

    def require_participation(self, in_sum: int | None = None) -> None:
        """Refuse if the policy no longer allows this run, or not with so many parties in a sum."""
        self.policy_checker.require_still_allowed(self.plan, self.started, in_sum)
        self.policy_checker.require_recorded(self.plan)

    def _require_allowed(self, request: Request, in_sum: int | None) -> None:
        """Refuse an answer, new or repeated, that the current site.toml does not allow."""
        self.require_participation(in_sum)
        self.policy_checker.require_exchange(self.plan, request.nonce.round)
        self.policy_checker.require_columns(self.started)
        self.policy_checker.exposure_limit.require_recorded(self.plan, self.started)

    def _previous_reply(self, at: Attempt, phase: int) -> ReplyState | None:
        """Load the reply of this phase, if any; refuse if the run is over or closed."""
        self.require_unfinished()
        sent = self.files.load_reply(at, phase, self.plan.source)
        if sent is None and self.progress.closed_code is not None:
            raise RequestRefused(
                self.progress.closed_code,
                "A masked upload of this run has failed before, so the run is closed at this site.",
            )
        return sent

    def _start_sum(self, upload: Message, context: ReductionContext) -> Any:
        """Start the sum. If an entry exceeds its bound, the error for the site's log has the largest entry."""
        aggregation: Any = self.plan.program.aggregation
        try:
            return self.plan.reduction.start(self.progress.reduction_state, upload, aggregation, context)
        except UploadError as error:
            if not self.plan.reduction.hides_uploads:
                raise
            lifted = aggregation.lift(upload)
            largest = max(np.abs(np.asarray(one)).max(initial=0.0) for one in (*lifted.arrays.values(), lifted.weight))
            raise UploadError(f"{error} The largest entry is {largest:.3g}.") from error

    @contextmanager
    def _close_on_failure(self) -> Iterator[None]:
        """Close the run if masked work fails. A failure reveals a comparison with the site's values; a run
        answers one.
        """
        try:
            yield
        except Exception as error:
            if self.plan.reduction.hides_uploads and not isinstance(error, DATA_INDEPENDENT):
                code = refusal_from_error(error).code if isinstance(error, PartsongError) else "failed"
                self.files.save_progress(replace(self.progress, closed_code=code), self.plan.source)
            raise

    def _charge(self, request: Request, at: Attempt) -> WorkState | None:
        """Charge this attempt, and return its work if it was done before.

        Lost work is repeated: with the earlier charge if its line is the last one (work that was cut off), else with a
        new charge.
        """
        ledger, worked = self.policy_checker.ledger, self.files.load_work(at)
        directions = counted(directions_of(self.plan.program, request.body), self.policy_checker.data.n_rows)
        of_rows = (directions, self.started.layout.seed)
        cost = AttemptCost(
            self.plan.program.traits.release_at(at[0]), self.policy_checker.policy.privacy, self.plan.limits, *of_rows
        )
        recorded = ledger.load()
        last = recorded.last_attempt
        unsent = last is not None and not self.audit.history().was_sent(last[0], last[1:])
        if ledger.charge(request, cost, previous_unsent=unsent) and worked is None:
            self._require_unsent(request.nonce, recorded)
            if last != (request.nonce.run, *at):
                ledger.charge(request, cost, previous_unsent=unsent, repeat=True)
        return worked

    def _require_unsent(self, nonce: Nonce, recorded: LedgerState) -> None:
        """Refuse to repeat lost work if anything of it may have left: by the log, or because an opening balance covers
        it.
        """
        released, (covered, _) = self.audit.run_releases(nonce.run), recorded.covered_lines
        charges = recorded.runs.get(nonce.run, ())
        at = (nonce.round, nonce.attempt)
        is_covered = any((one.round, one.attempt) == at and one.number <= covered for one in charges)
        if released is None or at in released.attempts or is_covered:
            raise RequestRefused("conflict", "This request was answered before, and the files of that answer are lost.")

    def _save_progress(self, tally: ProgressState, summed: Attempt | None) -> RoundHandler:
        """Save the progress, with the reduction's state after a sum, and return a handler with it."""
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
        """Return a handler whose progress matches the attempt that the server counts; refuse if there is none.

        Work of which shares or a masked upload have left must count: sums of the same work over other parties would
        differ by single uploads. If only the upload has left, the server may not have received it and continued without
        it; such work counts here nevertheless.
        """
        attempts, counted, tally = self.files.attempts(), parse_attempt(request.note.get("counted")), self.progress
        latest = attempts[-1] if attempts else None
        if at[0] <= tally.last_released:
            raise RequestRefused(
                "out-of-step", f"Round {tally.last_released} was released before the files of this run were lost."
            )
        if (latest is not None and at < latest) or any(one and at[0] <= one[0] for one in (counted, tally.counted)):
            raise RequestRefused(
                "out-of-step",
                f"Round {at[0]}, attempt {at[1]}, is older than {latest or counted}, the latest at this site.",
            )
        if latest not in (None, at, counted, tally.counted) and self.plan.reduction.hides_uploads:
            assert latest is not None
            phases = self.files.phases(latest)
            if phases and phases[-1] > 0:
                if at[0] == latest[0] or len(phases) > 1 or counted != tally.acknowledged:
                    raise RequestRefused(
                        "round-closed",
                        f"Shares or a masked upload for {latest} have left this site, so that attempt must count.",
                    )
                return self._save_progress(
                    replace(tally, counted=latest, unacknowledged=(*tally.unacknowledged, latest)), latest
                )
        if counted == tally.acknowledged:
            is_new_round = latest is not None and at[0] > latest[0] and latest != tally.counted
            return self._save_progress(tally, latest) if is_new_round else self
        if counted is None or counted not in attempts:
            raise RequestRefused(
                "out-of-step",
                f"The last attempt that counts is {counted} at the server, but {tally.acknowledged} at this site.",
            )
        return self.advance_to(counted)

    def _context(
        self, request: Request, participants: tuple[str, ...]
    ) -> tuple[ReductionContext, tuple[str, ...] | None]:
        """Return the context of the sum and, for later sums of a masked round, the parties that must be in it."""
        cohort, name = None, self.policy_checker.name
        if self.plan.reduction.hides_uploads and self.plan.program.turn(request.body).step > 0:
            cohort = self.progress.cohort
            if cohort is None or set(cohort) != set(participants):
                raise RequestRefused(
                    "cohort", f"The previous sum of this round was over {cohort}, this one is over {participants}."
                )
        strangers = sorted(set(participants) - set(self.started.layout.parties))
        if strangers or name not in participants:
            others = ", ".join(strangers) or f"{name!r}, which is not among the participants,"
            raise RequestRefused("protocol", f"{others} cannot be in a sum with {name!r}: the run has other parties.")
        parties, number, seed = self.started.layout.parties, request.nonce.round, self.started.experiment.get("seed", 0)
        drawn = DrawnSchedule(self.plan.exchanges, seed, fraction=self.plan.fraction).participants(parties, number)
        if not set(participants) <= set(drawn):
            raise RequestRefused(
                "protocol", f"Round {number} has the participants {participants}, but {drawn} were drawn for it."
            )
        return ReductionContext(request.nonce.round, participants, self.started.layout, request.body), cohort

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

    def _answer_phase(self, request: Request, before: ReplyState, received: Message) -> SiteAnswer:
        """Compute the answer of a phase and write it to disk."""
        nonce = request.nonce
        try:
            client, message = self.plan.reduction.client_step(nonce.phase, before.reduction_state, received)
        except PartsongError as error:
            code = refusal_from_error(error).code
            raise RequestRefused("protocol" if code == "failed" else code, str(error)) from error
        survivors: Any = getattr(client, "survivors", ())
        if before.cohort is not None and survivors and set(survivors) != set(before.cohort):
            raise RequestRefused(
                "cohort", f"The previous sum of this round was over {before.cohort}, this one is over {survivors}."
            )
        self.policy_checker.require_sum_size(client, self.started.layout.parties)
        alone = {"alone": [list(at) for at in self.progress.unacknowledged]} if self.progress.unacknowledged else {}
        reply = Reply(self.policy_checker.name, nonce, message, self.policy_checker.ledger.serial, alone)
        sent = ReplyState(request.digest, client, reply.to_bytes(), before.cohort)
        # Written before it is sent: a repeated request gets the same bytes, even if the site was killed.
        self.files.save_reply((nonce.round, nonce.attempt), nonce.phase, sent, self.plan.source)
        return SiteAnswer(reply, sent.reply, plan=self.plan)

    def _repeat(self, request: Request, sent: ReplyState) -> SiteAnswer:
        """Return the same bytes, to the same request only."""
        if sent.digest != request.digest:
            raise RequestRefused("conflict", "A different request was answered for this run, round, attempt and phase.")
        return SiteAnswer(Reply.from_bytes(sent.reply), sent.reply, is_repeat=True, plan=self.plan)
