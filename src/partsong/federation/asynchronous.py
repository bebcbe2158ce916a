"""The server of a federation in which nobody waits for others: it can be killed at any point, as any site can."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from partsong.core import Checkpoint, Program, Reduction, Round, Schedule, Shard
from partsong.engines.pieces import agreed_terms
from partsong.engines.pieces import begun as begun_pieces
from partsong.errors import ParameterError
from partsong.federation import beginning
from partsong.federation.arrivals_record import ArrivalsJournal, Ongoing
from partsong.federation.asking import Desk
from partsong.federation.beginning import Agenda
from partsong.federation.columns import SAME
from partsong.federation.errands import Errands
from partsong.federation.locks import locked
from partsong.federation.reception import End, Reception
from partsong.federation.serials import Serials, larger
from partsong.federation.site_files import make_folder
from partsong.federation.transport import Transport


@dataclass(frozen=True, slots=True)
class AsynchronousCoordinator:
    """`engines.asynchronous.Asynchronous` with parties elsewhere: arrivals come in the order in which sites are heard.

    That order is in the record of the run (`Ongoing.order`), and with it the engine in one process gives the same
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

    def run(
        self,
        program: Program,
        shards: Sequence[Shard],
        schedule: Schedule,
        *,
        reduction: Reduction,
        resume: Checkpoint | None = None,
    ) -> Iterator[Round]:
        """Rounds in the order of arrival; each is on the disk, and its sender has been sent the newest model, before
        it is handed out.
        """
        if shards or resume is not None:
            raise ParameterError(
                "The parties of a federation are on their own machines: give no shards and no checkpoint (the folder "
                "of the run has it)."
            )
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
        agenda, journal = Agenda(self.name, self.experiment, self.rule), ArrivalsJournal(self.folder)
        record, desk = self._found(journal), self._desk(schedule)
        if record is None:
            record = self._begun(agenda, program, schedule, reduction, desk)
            journal.save(record)
        beginning.require_same_sites(record, self.transport.names())
        desk.seen.update(larger(desk.seen, record.seen))
        if not record.started:
            record, _ = beginning.joined(agenda, desk, record, journal.save, record.seen.keys())
        record = replace(record, seen=dict(desk.seen))
        terms = agreed_terms(program, schedule, record.layout, reduction, self.record)
        end, errands = End(self.time_budget, self.tol), Errands(self.timeout, self.pause, schedule.faulty == "stop")
        return Reception(agenda, terms, self.transport, journal, end, record, errands, desk.serials)

    def _desk(self, schedule: Schedule) -> Desk:
        serials = Serials(self.serials)
        return Desk(self.transport, self.timeout, schedule.faulty, serials.known(self.transport.names()), serials)

    def _begun(self, agenda: Agenda, program: Program, schedule: Schedule, reduction: Reduction, desk: Desk) -> Ongoing:
        first = beginning.begun(agenda, program, schedule, desk)
        terms = agreed_terms(program, schedule, first.layout, reduction, self.record)
        return Ongoing.of(first, begun_pieces(terms, Checkpoint(0, {}, first.server, first.model)))

    def _found(self, journal: ArrivalsJournal) -> Ongoing | None:
        record = journal.load()
        if (record is None and (self.folder / "run").exists()) or (
            record is not None and (record.run != self.name or record.experiment != dict(self.experiment))
        ):
            raise ParameterError(
                f"{self.folder} holds another run, or this one with other settings. Resume it with its own, or take "
                "another folder."
            )
        return record
