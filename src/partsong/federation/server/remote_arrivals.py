"""Network of an asynchronous federation: one pending request per site; a reply is on disk before it counts.

`engines.arrivals.run_arrivals` processes arrivals. A site first receives the start of the run, then one numbered work
item after another. Its request stays the same until it has answered. So the models depend only on the order of
arrivals, even if a process is killed.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from partsong.core.interfaces import Arrival, AsyncCheckpoint, Layout, Message, Program, Round, State, WorkItem
from partsong.engines.rounds import no_party_left_error
from partsong.engines.upload_checks import check_upload
from partsong.errors import DivergenceError, PartsongError, PartyError, SiteLost, UploadError
from partsong.federation.server.setup_phase import start_request, start_sites
from partsong.federation.server.site_client import SiteClient, no_reply_error
from partsong.federation.server.state import ArrivalsJournal, AsyncRunState
from partsong.federation.transports.base import NoReply
from partsong.federation.wire import RESUME, Kind, Nonce, Refusal, Request, error_from_refusal, recovery_advice

WORK_ERRORS = (DivergenceError, UploadError)
"""Errors of the work itself. The same work would fail again, so the site is sent the newest model."""

MAX_WORK_ERRORS = 3
"""Consecutive failed works after which a site gets no more requests until the run is resumed."""

FINISH_TIMEOUT = 30.0
"""Seconds that missing sites have to receive the end of a run."""


class RunFilesLost(SiteLost):
    """A site no longer knows the run that it had started."""


class RemoteArrivals:
    """The sites that `client` reaches. `run` is the state after the last arrival, as in the journal.

    The run ends after `uploads` uploads, after `time_budget` seconds, or once as many consecutive arrivals as there are
    sites have together moved H by at most `tol` of its norm.
    """

    has_ended = False

    def __init__(
        self,
        client: SiteClient,
        journal: ArrivalsJournal,
        run: AsyncRunState,
        program: Program,
        pending: PendingRequests,
        uploads: int,
        time_budget: float | None,
        tol: float,
    ) -> None:
        self.run = run
        self._client, self._journal, self._program, self._pending = client, journal, program, pending
        self._uploads, self._time_budget, self._tol = uploads, time_budget, tol
        self._transport, self._expected = client.transport, program.upload_spec(run.layout)
        self._began = time.monotonic() - run.clock

    @property
    def layout(self) -> Layout:
        return self.run.layout

    @contextmanager
    def running(self) -> Iterator[None]:
        """Withdraw all requests on exit."""
        try:
            yield
        finally:
            self._transport.cancel()

    def is_over(self, point: AsyncCheckpoint) -> bool:
        """Whether the run has come to its end, now or before it was resumed."""
        run = self.run
        is_full = run.index - len(run.faults) >= self._uploads
        is_late = self._time_budget is not None and self._clock() >= self._time_budget
        is_still = 0 < self._tol >= sum(run.moves) and len(run.moves) == len(run.layout.parties)
        return bool(run.without_result) or is_full or is_late or is_still

    def begin(self, point: AsyncCheckpoint) -> AsyncCheckpoint:
        """Write a new run, and start all sites that took part in its set-up."""
        if not self.run.pieces:
            self.run = replace(self.run, pieces=point.items)
            self._journal.save(self.run)
        if not self.run.started:  # `seen` has the sites of the set-up, and no others yet
            self.run, _ = start_sites(self._client, self.run, self._journal.save, self.run.seen.keys())
        return self.run.checkpoint

    def send(self, items: Mapping[str, WorkItem]) -> None:
        """Send every idle site its work item, or the start of the run."""
        requests = {name: self._request(name) for name in self._pending.idle_sites(self.run.layout.parties)}
        self._transport.push({name: request.to_bytes() for name, request in requests.items()}, math.inf)
        for name, request in requests.items():
            self._pending.send(name, request.nonce)

    def next(self) -> Arrival | None:
        """Wait for the next reply. Returns None if it is not an arrival, or if a site is due first."""
        self.send(self.run.pieces)
        pending, run, overdue = self._pending, self.run, self._pending.overdue()
        until = None if self._time_budget is None else self._began + self._time_budget
        found = self._transport.next_reply(pending.max_wait(until, overdue))
        if found is None or found[0] not in pending.pending:
            pending.expire(run.index)
            return None
        name, reply = found
        nonce = pending.complete(name, overdue, len(run.layout.parties))
        is_work = nonce.kind is Kind.WORK
        try:
            message = self._read(name, nonce, reply)
        except RunFilesLost:
            self._save(self.run.after_lost_files({name}))
            return None
        except PartsongError as error:
            excused = pending.excuse(name, error)
            if is_work and isinstance(error, WORK_ERRORS):
                return Arrival(name, excused, self._clock(), run.pieces[name])
            pending.postpone(name, excused, run.index, pending.pause)
            return None
        pending.faults.pop(name, None)
        if is_work:
            return Arrival(name, message, self._clock(), run.pieces[name])
        self._save(replace(self.run, started=self.run.started | {name}))
        return None

    def commit(self, done: Round, arrival: Arrival, sums: State) -> Round:
        """Write the run after this arrival. A site with too many consecutive failures gets no more requests."""
        before, name, after = self.run, arrival.name, done.checkpoint
        assert isinstance(after, AsyncCheckpoint)
        # Other sites keep their items of `before`, which may be new because their files were lost.
        pieces = {**before.pieces, name: after.items[name]}
        faults, counted, moves = before.faults, before.counted, before.moves
        if isinstance(arrival.sent, PartsongError):
            faults = {**faults, done.index: str(arrival.sent)}
        else:
            counted = {**counted, name: (before.pieces[name].number, 0)}
            moves = (*moves, self._move(before.server, after.server))[-len(before.layout.parties) :]
        self._save(
            replace(
                before,
                index=after.index,
                server=after.server,
                model=after.model,
                pieces=pieces,
                clock=after.clock,
                order=(*before.order, name),
                faults=faults,
                counted=counted,
                moves=moves,
            )
        )
        refused = {**self._pending.missing(), **done.refused}
        if isinstance(arrival.sent, PartsongError):
            last = [at for at, sender in enumerate(self.run.order) if sender == name][-MAX_WORK_ERRORS:]
            if len(last) == MAX_WORK_ERRORS and faults.keys() >= set(last):
                self._pending.postpone(name, arrival.sent, self.run.index, math.inf)
        return replace(done, checkpoint=replace(after, items=pieces), refused=refused)

    def close(self) -> None:
        """Send all sites the end of the run.

        A busy site receives it afterwards. A missing site is not waited for: it has no result, and is sent the end
        again when the run is resumed.
        """
        self._require_arrivals()
        started, away = sorted(self.run.started), self._pending.missing()
        # Written first: a server killed from here on resumes with the end, and accepts no further arrival.
        self._save(replace(self.run, without_result={name: f"Site {name!r} was not sent the end." for name in started}))
        run, client, why = self.run, self._client, dict[str, str]()
        nonce, notes = Nonce(run.run, run.index, kind=Kind.FINISH), run.counted_notes(started)
        self._transport.cancel()
        for is_away, timeout in ((False, client.timeout), (True, min(client.timeout, FINISH_TIMEOUT))):
            names = [name for name in started if (name in away) == is_away]
            ended = client.ask(names, nonce, run.model, notes=notes, timeout=timeout)
            why |= {name: str(error) for name, error in ended.faults.items()}
        self._save(replace(self.run, without_result=why))

    def _request(self, name: str) -> Request:
        run = self.run
        if name not in run.started:
            return self._client.request(name, *start_request(run))
        piece, counted = run.pieces[name], run.counted_notes([name])[name]
        note = {"participants": list(run.layout.parties), **counted}
        return self._client.request(name, Nonce(run.run, piece.number, 0, Kind.WORK), piece.model, note)

    def _read(self, name: str, nonce: Nonce, reply: bytes | NoReply) -> Message:
        """Return the requested message or raise the error; `WORK_ERRORS` only if the work itself failed."""
        before = dict(self._client.seen)
        try:
            read = self._client.read(name, nonce, reply)
        except UploadError as unusable:
            raise SiteLost(str(unusable)) from unusable
        # Before the reply is used: the serial number shows later whether the site was restored from a backup.
        if self._client.seen != before:
            self._client.counters.update(self._client.seen)
        if isinstance(read.answer, Refusal):
            if read.answer.code == "not-started" and nonce.kind is Kind.WORK:
                raise RunFilesLost(f"Site {name!r} has lost its files of run {self.run.run!r}.")
            error = error_from_refusal(name, read.answer, nonce.round)
            error.add_note(recovery_advice(read.answer))
            raise SiteLost(str(error)) if isinstance(error, WORK_ERRORS) and read.nonce != nonce else error
        if nonce.kind is Kind.WORK:
            check_upload(name, read.answer, self._expected)
        return read.answer

    def _save(self, run: AsyncRunState) -> None:
        self.run = replace(run, seen=dict(self._client.seen))
        self._journal.save(self.run)

    def _require_arrivals(self) -> None:
        """Raise if the run has no usable upload: it has no model then, and must not be ended at the sites."""
        run = self.run
        if run.index > len(run.faults):
            return
        reasons = {run.order[at]: why for at, why in run.faults.items()} | self._pending.missing()
        listed = "; ".join(f"{name}: {why}" for name, why in sorted(reasons.items())) or "no site has answered in time"
        raise PartyError(
            f"No usable upload has arrived in run {run.run!r} ({listed}), so it has only its first model. Fix these "
            "sites, then resume the run, with a larger time_budget if it has one."
        )

    def _move(self, before: State, after: State) -> float:
        """‖H − H before‖ / ‖H‖."""
        old, new = (np.asarray(self._program.components(server), np.float64) for server in (before, after))
        return float(np.linalg.norm(new - old) / (np.linalg.norm(new) or 1.0))

    def _clock(self) -> float:
        return time.monotonic() - self._began


@dataclass(slots=True)
class PendingRequests:
    """Pending requests, and when a site counts as lost.

    A site that refuses is asked again after `pause` seconds. A site that does not answer within `timeout` seconds is
    lost. If `is_strict`, either ends the run; otherwise it continues while a site is left. `pending`: the request of a
    site, and since when. `paused`: until when a site is not asked. `faults`: why its last request failed.
    `replies_since`: replies of other sites since it was overdue.
    """

    timeout: float
    pause: float
    is_strict: bool
    pending: dict[str, tuple[Nonce, float]] = field(default_factory=dict)
    paused: dict[str, float] = field(default_factory=dict)
    faults: dict[str, PartsongError] = field(default_factory=dict)
    replies_since: Counter[str] = field(default_factory=Counter)

    def idle_sites(self, names: Sequence[str]) -> list[str]:
        """Return sites without a pending request that are not paused."""
        now = time.monotonic()
        self.paused = {name: due for name, due in self.paused.items() if due > now}
        return [name for name in names if name not in self.pending and name not in self.paused]

    def send(self, name: str, nonce: Nonce) -> None:
        """Record a pending request."""
        self.pending[name] = nonce, time.monotonic()

    def complete(self, name: str, overdue: frozenset[str], n_sites: int) -> Nonce:
        """Remove and return the request that was answered.

        An overdue site is lost only after more replies than there are sites: replies that arrive together are processed
        one by one.
        """
        nonce, _ = self.pending.pop(name)
        self.replies_since = Counter({other: self.replies_since[other] + 1 for other in overdue - {name}})
        for other in sorted(self.replies_since):
            if self.replies_since[other] > n_sites:
                self.excuse(other, self._lost_error(other))
        return nonce

    def expire(self, index: int) -> None:
        """Declare overdue sites lost, after a wait without replies."""
        overdue = self.overdue()
        for name in sorted(overdue):
            self.excuse(name, self._lost_error(name))
        self._require_active(index, overdue)

    def postpone(self, name: str, error: PartsongError, index: int, seconds: float) -> None:
        """Pause a site for some seconds, if others are active."""
        self.paused[name], self.faults[name] = time.monotonic() + seconds, error
        self._require_active(index)

    def excuse(self, name: str, error: PartsongError) -> PartsongError:
        """Return the error of a site; raise it if errors are strict."""
        if self.is_strict:
            ways = list(getattr(error, "__notes__", ())) or [RESUME]
            error.__notes__ = [f"(site {name!r})", *ways]
            raise error
        return error

    def missing(self) -> dict[str, str]:
        """Return the sites that are missing now, and why."""
        lost = {name: self._lost_error(name) for name in self.overdue()}
        return {name: str(why) for name, why in {**lost, **self.faults}.items()}

    def overdue(self) -> frozenset[str]:
        """Return sites whose request is older than the timeout."""
        until = time.monotonic() - self.timeout
        return frozenset(name for name, (_, since) in self.pending.items() if since <= until)

    def max_wait(self, until: float | None, overdue: frozenset[str]) -> float:
        """Return the seconds until action is needed even without a reply."""
        if overdue and self.is_strict:
            return 0.0
        now, dues = time.monotonic(), [due for due in self.paused.values() if due < math.inf]
        dues += [] if until is None else [until]
        dues += [since + self.timeout for name, (_, since) in self.pending.items() if name not in overdue]
        return max(0.0, min(dues, default=now) - now)

    def _require_active(self, index: int, overdue: frozenset[str] = frozenset()) -> None:
        """Raise if no request is pending but overdue ones."""
        if self.pending.keys() <= overdue:
            faults = {**{name: self._lost_error(name) for name in overdue}, **self.faults}
            error = no_party_left_error({name: faults[name] for name in sorted(faults)}, index)
            error.add_note(RESUME)
            raise error

    def _lost_error(self, name: str) -> SiteLost:
        return no_reply_error(name, self.pending[name][0], "no reply in time")
