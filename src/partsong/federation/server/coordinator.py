"""Coordinator of a run: set-up, rounds or arrivals, and end. It can be killed and resumed at any point."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from partsong.core.interfaces import Message, Program, Reduction, Round, Schedule
from partsong.engines.arrivals import run_arrivals
from partsong.engines.rounds import run_rounds
from partsong.errors import ParameterError
from partsong.federation.locks import locked
from partsong.federation.server.remote import RemoteRounds
from partsong.federation.server.remote_arrivals import PendingRequests, RemoteArrivals
from partsong.federation.server.setup_phase import negotiate, require_same_sites
from partsong.federation.server.site_client import Responses, SiteClient
from partsong.federation.server.state import (
    ArrivalsJournal,
    AsyncRunState,
    Journal,
    ReleaseCounters,
    RunState,
    larger_counts,
)
from partsong.federation.signing import bind_context, run_context
from partsong.federation.site.state import make_folder
from partsong.federation.transports.base import Transport
from partsong.federation.wire import Kind, Nonce


@dataclass(frozen=True, slots=True)
class Coordinator:
    """Runs a program on the sites of a transport. Checkpoints of its rounds have no party states.

    `folder` belongs to one run, which is resumed if it has started. `experiment` has the plain values from which each
    site builds the program itself. `serials` is the file with the serial numbers of sites, over all runs of a
    federation.
    """

    transport: Transport
    folder: Path
    name: str
    experiment: Mapping[str, Any]
    timeout: float = 600.0
    serials: Path | None = None

    def rounds(
        self,
        program: Program,
        schedule: Schedule,
        reduction: Reduction,
        require_end: Callable[[Message], None] | None = None,
    ) -> Iterator[Round]:
        """Run synchronous rounds; each is on disk before it is yielded.

        `require_end` checks the last model before sites receive it, and every site must then answer the end.
        """
        if schedule.dropouts:
            raise ParameterError("Dropouts of a federation cannot be scheduled: remove `dropouts` from the schedule.")
        with self._clients(schedule) as client:
            journal = Journal(self.folder)
            run = journal.load()
            if run is None:
                run = negotiate(self.name, self.experiment, program, schedule, client)
                journal.save(run)
            self._require_same(run, client)
            reduction = bind_context(run_context(run.experiment, run.columns, run.layout), reduction)
            remote = RemoteRounds(client, journal, run, program, reduction)
            yield from run_rounds(program, remote, schedule, reduction, run.point)
            if require_end is not None:
                require_end(remote.run.model)
            ended = self._finish(program, remote.run, client)
            if require_end is not None:
                ended.require("the end", remote.run.index)
            faults = {name: str(error) for name, error in ended.faults.items()}
            journal.save(replace(remote.run, without_result=faults, seen=dict(client.seen)))

    def arrivals(
        self,
        program: Program,
        schedule: Schedule,
        reduction: Reduction,
        *,
        pause: float = 5.0,
        time_budget: float | None = None,
        tol: float = 0.0,
    ) -> Iterator[Round]:
        """Run an asynchronous program: replies are accepted in the order of arrival.

        `Schedule.rounds` counts uploads, and a Round is one arrival, on disk before it is yielded.

        The order is stored (`AsyncRunState.order`); with it `engines.virtual_clock.Asynchronous` gives the same models
        in one process. With on_party_error="raise", a site that refuses or does not answer for `timeout` seconds ends
        the run with an error; it can be resumed. With "skip" the others continue, and the site is asked again for the
        same work, after `pause` seconds if it refused. Failed work is an arrival that does not count; its site is sent
        the newest model, unless it was the third failure in a row. The run stops when no site is left.
        """
        with self._clients(schedule) as client:
            journal = ArrivalsJournal(self.folder)
            run = journal.load()
            if run is None:
                run = AsyncRunState.of(negotiate(self.name, self.experiment, program, schedule, client))
            self._require_same(run, client)
            pending = PendingRequests(self.timeout, pause, schedule.on_party_error == "raise")
            remote = RemoteArrivals(client, journal, run, program, pending, schedule.rounds, time_budget, tol)
            yield from run_arrivals(program, remote, schedule, reduction, run.checkpoint, is_over=remote.is_over)

    @contextmanager
    def _clients(self, schedule: Schedule) -> Iterator[SiteClient]:
        """Lock the folder and yield a client for the sites, with their known serial numbers."""
        make_folder(self.folder)
        with locked(self.folder / "lock", waits=False):
            counters = ReleaseCounters(self.serials)
            known = counters.load(self.transport.names())
            yield SiteClient(self.transport, self.timeout, schedule.on_party_error, known, counters)

    def _require_same(self, run: RunState, client: SiteClient) -> None:
        """Refuse a folder of another run, or of this one with other settings or sites."""
        if run.run != self.name or run.experiment != dict(self.experiment):
            raise ParameterError(
                f"{self.folder} has run {run.run!r} with other settings. Resume it with its own settings, or "
                "choose another folder."
            )
        require_same_sites(run, self.transport.names())
        client.seen.update(larger_counts(client.seen, run.seen))

    def _finish(self, program: Program, run: RunState, client: SiteClient) -> Responses:
        """Send all sites the end of the run and the components.

        A site that does not answer has no result, and is sent the end again when the run is resumed.
        """
        names = tuple(sorted(run.started))
        last = Message({**run.model.arrays, "components": program.components(run.server)})
        return client.ask(names, Nonce(self.name, run.index, kind=Kind.FINISH), last, {}, run.counted_notes(names))
