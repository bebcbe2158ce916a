"""The server of a federation: set-up of a run, its rounds or arrivals, and its end. It can be killed at any point."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from partsong.core.interfaces import Message, Program, Reduction, Round, Schedule
from partsong.engines.arrivals import run_arrivals
from partsong.engines.rounds import run_rounds
from partsong.errors import ParameterError
from partsong.federation.columns import SAME
from partsong.federation.locks import locked
from partsong.federation.server.remote import Remote, counted_notes
from partsong.federation.server.remote_arrivals import EndConditions, PendingRequests, RemoteArrivals
from partsong.federation.server.setup_phase import RunPlan, negotiate, require_same_sites
from partsong.federation.server.site_client import Responses, SiteClient
from partsong.federation.server.state import ArrivalsJournal, AsyncRunState, Journal, ReleaseCounters, RunState, larger
from partsong.federation.signing import bound_to, context_of
from partsong.federation.site.state import make_folder
from partsong.federation.transports.base import Transport
from partsong.federation.wire import Kind, Nonce


@dataclass(frozen=True, slots=True)
class Coordinator:
    """Runs a program among the sites of a transport; checkpoints of its rounds hold no states of parties.

    `folder` belongs to one run; if it holds a part of that, the run is resumed. `experiment` are the plain values from
    which each site makes the program for itself; `rule` says which columns are agreed on; `serials` is the file with
    the serial numbers of sites, for all runs of a federation.
    """

    transport: Transport
    folder: Path
    name: str
    experiment: Mapping[str, Any]
    rule: str = SAME
    timeout: float = 600.0
    record: bool = False
    serials: Path | None = None

    def run(self, program: Program, schedule: Schedule, reduction: Reduction) -> Iterator[Round]:
        """Rounds as they are done; each is on the disk before it is yielded."""
        if schedule.silent:
            raise ParameterError("Dropouts of a federation cannot be scheduled: remove `silent` from the schedule.")
        make_folder(self.folder)
        with locked(self.folder / "lock", waits=False):
            journal, client = Journal(self.folder), self.client(schedule)
            run = journal.load()
            if run is None:
                run = negotiate(self.plan, program, schedule, client)
                journal.save(run)
            self.resume(run, client)
            reduction = bound_to(context_of(run.experiment, run.columns, run.layout), reduction)
            remote = Remote(self.plan, client, journal, run, program, reduction)
            yield from run_rounds(program, remote, schedule, reduction, run.point, self.record)
            ended = self.finish(program, remote.run, client)
            faults = {name: str(error) for name, error in ended.faults.items()}
            journal.save(replace(remote.run, without_result=faults, seen=dict(client.seen)))

    @property
    def plan(self) -> RunPlan:
        """What sites are sent before the first round."""
        return RunPlan(self.name, self.experiment, self.rule)

    def client(self, schedule: Schedule) -> SiteClient:
        """The sites, with the serial numbers that are known of them."""
        counters = ReleaseCounters(self.serials)
        known = counters.known(self.transport.names())
        return SiteClient(self.transport, self.timeout, schedule.faulty, known, counters)

    def resume(self, run: RunState, client: SiteClient) -> None:
        """Refuse a folder of another run, or of this one with other settings or sites."""
        if run.run != self.name or run.experiment != dict(self.experiment):
            raise ParameterError(
                f"{self.folder} holds run {run.run!r}, with other settings than these. Resume it with its own, or "
                "choose another folder."
            )
        require_same_sites(run, self.transport.names())
        client.seen.update(larger(client.seen, run.seen))

    def finish(self, program: Program, run: RunState, client: SiteClient) -> Responses:
        """Send all sites the end of the run, and the components.

        A site that does not answer has no result, and is sent the end again when the run is resumed.
        """
        names = tuple(sorted(run.started))
        last = Message({**run.model.arrays, "components": program.components(run.server)})
        return client.ask(names, Nonce(self.name, run.index, kind=Kind.FINISH), last, {}, counted_notes(run, names))


@dataclass(frozen=True, slots=True)
class AsyncCoordinator(Coordinator):
    """Runs an asynchronous program: the server accepts replies in the order in which they come.

    That order is on disk (`AsyncRunState.order`); with it `engines.virtual_clock.Asynchronous` gives the same models in
    one process. `Schedule.rounds` counts uploads, and a Round is an arrival.

    faulty "stop": a site that refuses, or does not answer for `timeout` seconds, ends the run with an error, after
    which it can be resumed. "leave out": the others go on, and the site is asked for the same work again, after `pause`
    seconds if it has refused. Work that itself failed is an arrival that does not count; its site is sent the newest
    model, unless it was the third in a row. The run stops where no site is left.
    """

    pause: float = 5.0
    time_budget: float | None = None
    tol: float = 0.0

    def run(self, program: Program, schedule: Schedule, reduction: Reduction) -> Iterator[Round]:
        """Rounds in the order of arrival; each is on the disk, and its sender is asked again, before it is yielded."""
        make_folder(self.folder)
        with locked(self.folder / "lock", waits=False):
            journal, client = ArrivalsJournal(self.folder), self.client(schedule)
            run = journal.load()
            if run is None:
                if Journal(self.folder).load() is not None:
                    raise ParameterError(f"{self.folder} holds another run. Choose another folder.")
                run = AsyncRunState.of(negotiate(self.plan, program, schedule, client))
            self.resume(run, client)
            pending = PendingRequests(self.timeout, self.pause, schedule.faulty == "stop")
            ends = EndConditions(schedule.rounds, self.time_budget, self.tol)
            remote = RemoteArrivals(self.plan, client, journal, run, program, pending, ends)
            yield from run_arrivals(program, remote, schedule, reduction, run.checkpoint, self.record, remote.is_over)
