"""Network of a synchronous federation: requests to sites, and the writes before and after each of them.

`engines.rounds.run_rounds` runs the rounds. This module adds what only a federation needs: a server that is killed
between two writes resumes with the same requests, so that sites send the same bytes and the run gives the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from partsong.core.interfaces import (
    Aggregation,
    Answers,
    Ask,
    Layout,
    Message,
    Point,
    Program,
    Reduction,
    RoundAttempt,
    Served,
)
from partsong.engines.rounds import no_party_left_error
from partsong.engines.upload_checks import check_upload
from partsong.errors import PartsongError, PartyError, TooFewParties
from partsong.federation.server.setup_phase import start_sites
from partsong.federation.server.site_client import Responses, SiteClient
from partsong.federation.server.state import Absence, Journal, RunState, UnreceivedWork
from partsong.federation.wire import Kind, Nonce

NOT_ASKED = "not asked for this sum"
SCHEDULED_ABSENCE = "The schedule with which the run was resumed leaves it out of this round."
LOST_FILES = "it has lost its files of this run, and is restarted before the next round"
STALE = ("out-of-step", "out-of-turn", "conflict")
"""Codes of a restarted site for requests that it answered before."""
RESTARTED_SITE = (
    "A site that has lost its files after it answered in this round can no longer be in its sum. If the sum needs it, "
    "start a new run with another name and another seed."
)


class RemoteRounds:
    """The sites that `client` reaches. `run` is the state after the last complete round, as in the journal.

    Party states stay at the sites. With on_error="raise" an error of a site ends the run, which can be resumed; a site
    that has lost its files of the run misses the round in any case.
    """

    def __init__(
        self, client: SiteClient, journal: Journal, run: RunState, program: Program, reduction: Reduction
    ) -> None:
        self.run = run
        self._client, self._journal, self._program, self._reduction = client, journal, program, reduction
        self._expected = program.upload_spec(run.layout)
        self._attempt = RoundAttempt(run.index, 0, ())
        self._invited: tuple[str, ...] = ()
        self._lost: frozenset[str] = frozenset()
        self._dropouts: dict[str, int] = {}
        self._unreceived: UnreceivedWork = {}
        self._reasons: dict[str, PartsongError] = {}

    @property
    def layout(self) -> Layout:
        return self.run.layout

    @contextmanager
    def running(self) -> Iterator[None]:
        """Sites are sent the end of the run by the coordinator, and no errors."""
        yield

    def open(self, attempt: RoundAttempt, first: Callable[[tuple[str, ...]], int]) -> RoundAttempt:
        """Start sites that have not started. Write the attempt, or return the unfinished one on disk.

        If nothing of that was summed, sites that the current schedule leaves out are removed from it.
        """
        if attempt.attempt > 0:
            return self._open_attempt(attempt, {}, first)
        self._invited, self._lost = attempt.asked, frozenset()
        self.run, missing = start_sites(self._client, self.run, self._journal.save)
        found = self._journal.load_attempt(attempt.index)
        if found is None:
            return self._open_attempt(attempt, missing, first)
        rest = tuple(name for name in found.asked if name in self._invited)
        is_summed = found.first > 0 or self._journal.load_answers(found, 0) is not None
        if rest != found.asked and not is_summed:
            return self._open_attempt(replace(found, attempt=found.attempt + 1, asked=rest), missing, first)
        return self._begin_attempt(found)

    def _open_attempt(
        self, attempt: RoundAttempt, missing: Mapping[str, PartsongError], first: Callable[[tuple[str, ...]], int]
    ) -> RoundAttempt:
        """Write the attempt without the sites that could not be started."""
        asked = tuple(name for name in attempt.asked if name not in missing)
        refused = {**attempt.refused, **{name: missing[name] for name in attempt.asked if name in missing}}
        if not asked:
            raise no_party_left_error(missing, attempt.index)
        fewest: int = getattr(self._reduction, "fewest", 1)
        if len(asked) < fewest:
            raise TooFewParties(
                f"The sum of round {attempt.index} needs at least {fewest} sites, and has {len(asked)} "
                f"({', '.join(asked)}). {format_missing_sites(self.layout.parties, asked, refused)} Nothing of it "
                "was sent; resume the run once the others are back."
                + (f" {RESTARTED_SITE}" if self.run.restarted - set(asked) else "")
            )
        phase = 0 if self.run.restarted & set(asked) else first(asked)  # a restarted site has no keys
        opened = replace(attempt, asked=asked, first=phase, refused=refused)
        # Before any site is asked: a restarted server sends the same requests, and sites repeat their answers.
        self._journal.save_attempt(opened)
        return self._begin_attempt(opened)

    def _begin_attempt(self, attempt: RoundAttempt) -> RoundAttempt:
        self._attempt, self._reasons = attempt, dict(attempt.refused)
        self._dropouts, self._unreceived = {}, {}
        return attempt

    def exchange(self, ask: Ask, serve: Callable[[Answers], Served]) -> Served:
        """Serve the answers on disk, or else those of the sites, which are written once accepted."""
        found = self._journal.load_answers(self._attempt, ask.phase)
        answers, unreceived = self._collect_answers(ask) if found is None else found
        self._unreceived = {**self._unreceived, **unreceived}
        self._reasons |= answers.faults
        if ask.kind == "reduce":
            self._dropouts |= {name: ask.phase for name in ask.names if name not in answers.messages}
        try:
            served = serve(answers)
        except TooFewParties as error:
            raise self._explain(error, answers) from error
        # Written after `serve`, so that a resumed run finds only answers that were accepted.
        # Uploads of a plain sum are not written: the sites can send the same bytes again.
        is_kept = self._reduction.hides_uploads or ask.phase + 1 < self._reduction.phases
        if found is None and is_kept and not served.must_restart:
            self._journal.save_answers(self._attempt, ask.phase, answers, unreceived)
        return served

    def _collect_answers(self, ask: Ask) -> tuple[Answers, UnreceivedWork]:
        """Ask the sites, except those that the current schedule leaves out."""
        names = [name for name in ask.names if name in self._invited]
        responses = self._ask(ask, names) if names else Responses(self._client.on_party_error)
        planned = {name: PartyError(SCHEDULED_ABSENCE) for name in ask.names if name not in names}
        return Answers(responses.inbox, dict(sorted({**responses.faults, **planned}.items()))), responses.unreceived

    def _ask(self, ask: Ask, names: Collection[str]) -> Responses:
        is_work = ask.kind == "work"
        kind, stage = (Kind.WORK, "work") if is_work else (Kind.REDUCE, f"phase {ask.phase} of the sum")
        nonce = Nonce(self.run.run, ask.index, ask.attempt, kind, ask.phase)
        shared = {"participants": list(ask.participants)} if is_work else {}
        counted = self.run.counted_notes(ask.participants) if is_work else {}
        responses = self._client.ask(sorted(names), nonce, ask.message, shared, counted)
        self._save_lost(responses.lost)
        if is_work and not self._reduction.hides_uploads and self._reduction.phases == 1:
            responses = responses.check_messages(lambda name, upload: check_upload(name, upload, self._expected))
        try:
            responses.require_some(stage, ask.index, self._excused_sites(responses))
        except PartyError as error:
            if is_work and self._attempt.refused:
                error.add_note(format_missing_sites(self.layout.parties, ask.participants, self._attempt.refused))
            raise
        return responses

    def _save_lost(self, lost: frozenset[str]) -> None:
        """Record sites that have lost their files: they restart before the next round, even if this one fails."""
        if lost - self._lost:
            self._lost |= lost
            self._journal.save(replace(self.run, seen=dict(self._client.seen)).after_lost_files(self._lost))

    def _excused_sites(self, responses: Responses) -> frozenset[str]:
        """Return sites that miss this round regardless of on_error, because their files and answers are lost."""
        stale = {name for name, refusal in responses.refusals.items() if refusal.code in STALE}
        return responses.lost | (self.run.restarted & stale)

    def _explain(self, error: TooFewParties, answers: Answers) -> TooFewParties:
        """Return the error with the sites that were left out, and why."""
        reasons = {**self._reasons, **dict.fromkeys(self._lost, LOST_FILES)}
        sentence = format_missing_sites(self.layout.parties, answers.messages, reasons)
        is_final = bool(self._lost | self.run.restarted)
        return TooFewParties(" ".join(filter(None, (str(error), sentence, RESTARTED_SITE if is_final else ""))))

    def sum(self, ask: Ask, aggregation: Aggregation) -> None:
        """Do nothing: sites have no collective operations."""

    def seen(self) -> Mapping[str, Message]:
        return {}  # the coordinator records no traffic

    def commit(self, after: Point, worked: tuple[str, ...], is_last: bool) -> Mapping[str, object]:
        """Write the run after this round, which completes it."""
        attempt, run = self._attempt, self.run
        # The sum has what such a site sent before it lost its files, but its new history does not.
        stale = run.restarted.intersection(worked, self._dropouts)
        absence = Absence(tuple(name for name in run.layout.parties if name not in worked), dict(self._dropouts))
        release = self._program.traits.release_at(attempt.index)
        senders = {*attempt.asked, *attempt.refused} & run.started
        charged = (
            run.accounts if release is None else run.accounts.charge(sorted(senders), release, attempt.attempt + 1)
        )
        self.run = replace(
            run.with_unreceived_work(self._unreceived),
            index=after.index,
            server=after.server,
            model=after.model,
            sums=after.sums,
            cohort=after.cohort,
            counted={**run.counted, **dict.fromkeys(worked, (attempt.index, attempt.attempt))},
            seen=dict(self._client.seen),
            accounts=charged,
            restarted=run.restarted if attempt.first > 0 else frozenset(),
        ).after_lost_files(self._lost | stale)
        if absence != Absence():
            self.run = replace(self.run, absences={**self.run.absences, attempt.index: absence})
        # The run first: until it is on disk, a restart needs the exchanges to complete this round.
        self._journal.save(self.run)
        self._journal.clear_exchanges()
        return {}


def format_missing_sites(parties: Collection[str], included: Collection[str], reasons: Mapping[str, object]) -> str:
    """Return a sentence that lists all missing sites with reasons; empty if none is missing."""
    missing = sorted(set(parties) - set(included))
    listed = "; ".join(f"{name!r} ({str(reasons.get(name, NOT_ASKED)).rstrip('.')})" for name in missing)
    return f"{len(missing)} of {len(parties)} sites were left out: {listed}." if missing else ""
