"""The server of a federation: it runs a program over any transport, and can be killed at any point."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from partsong.core import runtime
from partsong.core.interfaces import (
    Checkpoint,
    Message,
    Occasion,
    Program,
    Reduction,
    Round,
    Schedule,
    Shard,
    State,
)
from partsong.engines.rounds import nobody_left
from partsong.engines.upload_checks import (
    KEPT_OUT,
    Cohort,
    Expected,
    check_sum,
    check_together,
    check_upload,
    fixed_cohort,
    require_cohort,
)
from partsong.errors import ParameterError, PartsongError, PartyError, TooFewParties
from partsong.federation.columns import SAME
from partsong.federation.locks import locked
from partsong.federation.server import setup_phase
from partsong.federation.server.setup_phase import Agenda, Asked, Desk, Serials, larger
from partsong.federation.server.state import Absence, Journal, Opening, Record
from partsong.federation.signing import bound_to, context_of
from partsong.federation.site.state import make_folder
from partsong.federation.transports.base import Transport
from partsong.federation.wire import Kind, Nonce

# ---- left out ---------------------------------------------------------------------------------------------------
#
# Who is not in a sum of a federation, and why: by names of sites and what they have told, never by their values.

NOT_ASKED = "not asked for this sum"
LOST_FILES = "it has lost its files of this run, and is started again before the next round"
STALE = ("out-of-step", "out-of-turn", "conflict")
"""Codes of a site that was started again, for what it has answered before."""
NOT_WITHOUT = (
    "A site that has lost its files after it had answered in this round cannot be in its sum any more: if there is "
    "none without it, begin a new run, under another name and with another seed."
)


def told_left_out(parties: Collection[str], heard: Collection[str], why: Mapping[str, str]) -> str:
    """A sentence on all who are missing; empty where nobody is."""
    missing = sorted(set(parties) - set(heard))
    listed = "; ".join(f"{name!r} ({why.get(name, NOT_ASKED).rstrip('.')})" for name in missing)
    return f"{len(missing)} of {len(parties)} sites were left out: {listed}." if missing else ""


def with_left_out(error: TooFewParties, told: str) -> TooFewParties:
    """The same error, which says who was left out."""
    return TooFewParties(f"{error} {told}") if told else error


# ---- coordinator ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """What stays the same in all rounds of a run."""

    program: Program
    schedule: Schedule
    reduction: Reduction
    expected: Expected
    desk: Desk
    journal: Journal


@dataclass(slots=True)
class Course:
    """A round as it goes: the attempt, who may be asked, who has worked, who is still heard, who has fallen silent and
    why, and what was sent. `lost`: who has lost its files of the run.
    """

    opening: Opening
    occasion: Occasion
    invited: tuple[str, ...]
    worked: tuple[str, ...]
    active: tuple[str, ...]
    silent: dict[str, int] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    traffic: list[tuple[str, int, Message]] = field(default_factory=list)
    answers: int = 0
    lost: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Coordinator:
    """An engine whose parties are elsewhere: `run` takes no shards, and its checkpoints hold no states of parties.

    `folder` belongs to one run; if there is something in it, the run goes on from there. `experiment` are the plain
    values from which each site makes the program for itself; `rule` says which columns are agreed on; `serials` is the
    file with what sites have told of their ledgers, for all runs of a federation.
    """

    transport: Transport
    folder: Path
    name: str
    experiment: Mapping[str, Any]
    rule: str = SAME
    timeout: float = 600.0
    record: bool = False
    serials: Path | None = None

    @property
    def agenda(self) -> Agenda:
        """What sites are told before the first round."""
        return Agenda(self.name, self.experiment, self.rule)

    def run(
        self,
        program: Program,
        shards: Sequence[Shard],
        schedule: Schedule,
        *,
        reduction: Reduction,
        resume: Checkpoint | None = None,
    ) -> Iterator[Round]:
        """Rounds as they are done; each is on the disk before it is handed out."""
        if shards or resume is not None or schedule.silent:
            raise ParameterError(
                "The parties of a federation are on their own machines: give no shards and no checkpoint (the folder "
                "of the run has it), and no plan of who falls silent."
            )
        make_folder(self.folder)
        with locked(self.folder / "lock", waits=False):
            setting, record = self._opened_run(program, schedule, reduction)
            while not self._is_over(setting, record):
                record, done = self._one_round(setting, record)
                yield done
                del done
            asked = self._finish(setting, record)
            faults = {name: str(error) for name, error in asked.faults.items()}
            setting.journal.save(replace(record, without_result=faults, seen=dict(setting.desk.seen)))

    def _is_over(self, setting: Setting, record: Record) -> bool:
        return record.index >= setting.schedule.rounds

    def _opened_run(self, program: Program, schedule: Schedule, reduction: Reduction) -> tuple[Setting, Record]:
        """A run as it stands in the folder; one that has not begun begins here."""
        journal, serials, names = Journal(self.folder), Serials(self.serials), self.transport.names()
        desk = Desk(self.transport, self.timeout, schedule.faulty, serials.known(names), serials)
        record = journal.load()
        if record is None:
            record = setup_phase.begun(self.agenda, program, schedule, desk)
            journal.save(record)
        elif record.run != self.name or record.experiment != dict(self.experiment):
            raise ParameterError(
                f"{self.folder} holds run {record.run!r}, with other settings than these. Resume it with its own, or "
                "take another folder."
            )
        setup_phase.require_same_sites(record, names)
        desk.seen.update(larger(desk.seen, record.seen))
        expected = program.upload_spec(record.layout)
        check_together(program, reduction, expected)
        schedule.check(record.layout.parties)
        masks = bound_to(context_of(record.experiment, record.columns, record.layout), reduction)
        return Setting(program, schedule, masks, expected, desk, journal), record

    def _one_round(self, setting: Setting, record: Record) -> tuple[Record, Round]:
        began, program, index = time.perf_counter(), setting.program, record.index
        point = Checkpoint(index, {}, record.server, record.model)
        parties = record.layout.parties
        fixed = fixed_cohort(program, setting.reduction, setting.schedule, parties, point, record.company)
        record, missing = setup_phase.joined(self.agenda, setting.desk, record, setting.journal.save)
        names = setting.schedule.participants(parties, index)
        expected = names if fixed is None else tuple(name for name in names if name in fixed)
        with runtime.kernels_on(setting.schedule.kernel_threads):
            course, inbox = self._worked(setting, record, expected, missing, fixed)
            state, aggregate, included = self._summed(setting, record, course, inbox)
            require_cohort(fixed, included, index)
            check_sum(aggregate, included, index)
            sent = {name: sum(m.nbytes for sender, _, m in course.traffic if sender == name) for name in names}
            kept_out = {name: KEPT_OUT for name in names if name not in expected}
            refused = {**kept_out, **course.opening.refused}
            handed_over = [aggregate]
            traffic = tuple(course.traffic) if self.record else ()
            del aggregate, inbox
            server, model = program.finish(record.server, handed_over.pop())
        opening = course.opening
        # Found lost before the server was killed: what it sent is in the sum, and no history of the site as it is now.
        stale = record.restarted.intersection(course.worked, course.silent)
        absence = Absence(tuple(name for name in parties if name not in course.worked), dict(course.silent))
        after = replace(
            self._charged(program, record, course).amended(opening.alone),
            index=index + 1,
            server=server,
            model=model,
            desk=state,
            company=frozenset(included),
            counted={**record.counted, **dict.fromkeys(course.worked, (index, opening.attempt))},
            seen=dict(setting.desk.seen),
            restarted=record.restarted if opening.first > 0 else frozenset(),
        ).without_starts(course.lost | stale)
        if absence != Absence():
            after = replace(after, absences={**after.absences, index: absence})
        setting.journal.save(after)
        setting.journal.clear()
        down, seconds = point.model.nbytes + course.answers, time.perf_counter() - began
        checkpoint = Checkpoint(index + 1, {}, server, model)
        metrics = program.metrics(server)
        return after, Round(index, model, metrics, included, sent, down, seconds, checkpoint, traffic, refused)

    def _worked(
        self,
        setting: Setting,
        record: Record,
        invited: tuple[str, ...],
        missing: Mapping[str, PartsongError],
        fixed: Cohort | None,
    ) -> tuple[Course, dict[str, Message]]:
        """Work and first phase. Under a reduction that hides uploads a sum is begun anew without those who failed, as
        long as no upload has left a site; later it goes on without them.
        """
        faults, journal, index, lost = dict(missing), setting.journal, record.index, set[str]()
        opening = journal.opening(index)
        if opening is None:
            opening = self._opened(setting, record, Opening(index, 0, invited), faults)
        elif opening.first == 0 and journal.phase(opening, 0) is None and not set(opening.asked) <= set(invited):
            rest = tuple(name for name in opening.asked if name in invited)
            opening = self._opened(setting, record, Opening(index, opening.attempt + 1, rest, opening.refused), faults)
        while True:
            inbox = journal.phase(opening, opening.first)
            if inbox is None:
                asked = self._asked_to_work(setting, record, opening, invited)
                lost |= asked.lost
                inbox, faults = asked.inbox, {**faults, **asked.faults}
                require_cohort(fixed, inbox, index, faults)
                refused = {**opening.refused, **{name: str(error) for name, error in asked.faults.items()}}
                if asked.faults and setting.reduction.hides_uploads and opening.first == 0:
                    again = Opening(index, opening.attempt + 1, tuple(inbox), refused)
                    opening = self._opened(setting, record, again, faults)
                    continue
                before, opening = opening, replace(opening, refused=refused, alone=asked.alone)
                if opening != before:
                    journal.open(opening)
            worked = tuple(sorted(inbox))
            occasion = Occasion(index, worked if opening.first == 0 else opening.asked, record.layout, record.model)
            return Course(opening, occasion, invited, worked, worked, lost=lost), inbox

    def _opened(
        self, setting: Setting, record: Record, opening: Opening, faults: Mapping[str, PartsongError]
    ) -> Opening:
        """An attempt that is on the disk before anybody is asked; those without a start are not asked."""
        refused = {**opening.refused, **{name: str(error) for name, error in faults.items() if name in opening.asked}}
        kept = tuple(name for name in opening.asked if name not in faults)
        if not kept:
            raise nobody_left(faults, opening.index)
        fewest: int = getattr(setting.reduction, "fewest", 1)
        if len(kept) < fewest:
            told = told_left_out(record.layout.parties, kept, refused)
            raise TooFewParties(
                f"Only {len(kept)} sites ({', '.join(kept)}) could be asked for the sum of round {opening.index}, and "
                f"{fewest} are needed. {told} Nothing of it was sent; resume the run once the others are back."
                + (f" {NOT_WITHOUT}" if record.restarted - set(kept) else "")
            )
        occasion = Occasion(opening.index, kept, record.layout, record.model)
        first = 0 if record.restarted & set(kept) else setting.reduction.first(record.desk, occasion)
        opened = Opening(opening.index, opening.attempt, kept, refused, first)
        setting.journal.open(opened)
        return opened

    def _asked_to_work(self, setting: Setting, record: Record, opening: Opening, invited: tuple[str, ...]) -> Asked:
        nonce = Nonce(self.name, opening.index, opening.attempt, Kind.WORK, opening.first)
        counted = {name: list(record.counted[name]) for name in opening.asked if name in record.counted}
        notes = {name: {"counted": counted.get(name)} for name in opening.asked}
        shared = {"participants": list(opening.asked)}
        names = tuple(name for name in opening.asked if name in invited)
        asked = setting.desk.ask(names, nonce, record.model, shared, notes)
        self._keep_lost(setting, record, asked.lost)
        if not setting.reduction.hides_uploads and setting.reduction.phases == 1:
            asked = asked.checked(lambda name, upload: check_upload(name, upload, setting.expected))
        try:
            asked.require_some("work", opening.index, _missed(record, asked))
        except PartyError as error:
            if opening.refused:
                error.add_note(told_left_out(record.layout.parties, opening.asked, opening.refused))
            raise
        return asked

    def _summed(
        self, setting: Setting, record: Record, course: Course, inbox: dict[str, Message]
    ) -> tuple[State, Message, tuple[str, ...]]:
        """The phases of one sum; who was heard in one is decided before the next begins."""
        reduction, occasion, opening = setting.reduction, course.occasion, course.opening
        server, heard = record.desk, Message({})
        for phase in range(opening.first, reduction.phases):
            decided = setting.journal.phase(opening, phase)
            heard_in = decided or (
                inbox if phase == opening.first else self._phase(setting, record, course, phase, heard)
            )
            course.silent |= {name: phase for name in course.active if name not in heard_in}
            course.active = tuple(sorted(heard_in))
            try:
                server, heard = reduction.hear(phase, heard_in, server, occasion)
            except TooFewParties as error:
                told = self._told_left_out(record, course)
                is_final = bool(course.lost | record.restarted)
                raise with_left_out(error, f"{told} {NOT_WITHOUT}" if is_final else told) from error
            if decided is None and (reduction.hides_uploads or phase + 1 < reduction.phases):
                setting.journal.decide(opening, phase, heard_in)
            course.traffic += [(name, phase, heard_in[name]) for name in course.active]
            course.answers += heard.nbytes if heard.arrays else 0
        return reduction.total(server, setting.program.aggregation, occasion)

    def _phase(
        self, setting: Setting, record: Record, course: Course, phase: int, heard: Message
    ) -> dict[str, Message]:
        nonce = Nonce(self.name, course.opening.index, course.opening.attempt, Kind.REDUCE, phase)
        asked = setting.desk.ask([name for name in course.active if name in course.invited], nonce, heard)
        course.lost |= asked.lost
        self._keep_lost(setting, record, course.lost)
        asked.require_some(f"phase {phase} of the sum", course.opening.index, _missed(record, asked))
        course.why |= {name: str(error) for name, error in asked.faults.items()}
        return asked.inbox

    def _keep_lost(self, setting: Setting, record: Record, lost: Collection[str]) -> None:
        """A site that has lost its files is started again before the next round, also if this one ends in an error."""
        if lost:
            setting.journal.save(replace(record, seen=dict(setting.desk.seen)).without_starts(lost))

    def _told_left_out(self, record: Record, course: Course) -> str:
        """Of this sum so far; why somebody was not heard before the server was killed is not known any more."""
        unheard = {name: f"not heard in phase {phase}" for name, phase in course.silent.items()}
        why = {**unheard, **course.opening.refused, **course.why, **dict.fromkeys(course.lost, LOST_FILES)}
        return told_left_out(record.layout.parties, course.active, why)

    def _charged(self, program: Program, record: Record, course: Course) -> Record:
        """Everybody who may have released something is charged, once for each attempt of the round."""
        release: Any = program.traits.release
        if release is None:
            return record
        senders = {*course.opening.asked, *course.opening.refused} & record.started
        return replace(record, accounts=record.accounts.charge(sorted(senders), release, course.opening.attempt + 1))

    def _finish(self, setting: Setting, record: Record) -> Asked:
        """Tell all that the run is over, and with which components; who does not hear it has no result, and is told
        again when the run is resumed.
        """
        names = tuple(sorted(record.started))
        notes = {name: {"counted": list(record.counted[name]) if name in record.counted else None} for name in names}
        last = Message({**record.model.arrays, "components": setting.program.components(record.server)})
        return setting.desk.ask(names, Nonce(self.name, record.index, kind=Kind.FINISH), last, {}, notes)


def _missed(record: Record, asked: Asked) -> frozenset[str]:
    """Who has lost its files misses this round, also where it was started again and had sent something of it."""
    told = {name for name, refusal in asked.refusals.items() if refusal.code in STALE}
    return asked.lost | (record.restarted & told)
