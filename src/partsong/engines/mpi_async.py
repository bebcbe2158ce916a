"""Asynchronous runs over MPI: `mpiexec -n 3 python -m mpi4py …` is a server, at rank 0, and two workers.

At the start, all ranks exchange settings and the names and widths of the parties. Then

    rank p → rank 0:  a party's upload
    rank 0 → rank p:  the next model, its number, and the server's metrics

At the end, rank 0 sends the server's model and state to all ranks. Never sent: a shard, its secret, a party's state,
what a reduction keeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from partsong.core.codec import Buffer, decode, encode
from partsong.core.interfaces import (
    Arrival,
    AsyncCheckpoint,
    Checkpoint,
    Message,
    Program,
    Reduction,
    Round,
    Schedule,
    Shard,
    State,
    WorkItem,
)
from partsong.engines.arrivals import AsyncConfig, ask_for, async_config, run_arrivals
from partsong.engines.collective import (
    ERROR_TIMEOUT,
    Communicator,
    RunEnded,
    StatusCard,
    all_gather_status,
    broadcast_error,
    error_from_text,
    error_to_text,
    run_on_rank_0,
)
from partsong.engines.consistency import Placement, agree_on_run
from partsong.engines.local import LocalParties
from partsong.engines.mpi import Mpi, MpiChannel, Packet, PacketChannel, Tag
from partsong.engines.party import annotate_errors
from partsong.engines.rounds import CallerError, Rounds, error_note_for
from partsong.engines.upload_checks import check_upload
from partsong.errors import ParameterError, PartsongError


@dataclass(frozen=True, slots=True)
class AsynchronousMpi:
    """`Asynchronous` over real processes: rank 0 is the server and holds no shard, the others work at their own pace.

    Every rank calls `run` with the same program, schedule and reduction. Rank 0 yields a Round for each arrival;
    its `seconds` are the wall-clock time since the previous one. A worker yields a Round for each of its own
    contributions (the checkpoint has its parties' states and no server), and finally an `Ending` without participants,
    with rank 0's model and server state. Work that is in progress at the end is discarded. Parties of one worker take
    turns. With one worker, the run equals that of `Asynchronous` with equal durations bit for bit. With several, the
    order of arrivals differs from run to run.

    To resume, each rank passes its own checkpoint, not necessarily of the same moment, or all pass that of a run in one
    process. An error at any rank is raised at all. Iterate in `with engine.run(…) as rounds`: then an error that a
    caller raises in its loop at one rank is a PartyError at the others. A caller that breaks out of its loop, or raises
    without that block, ends the run at all ranks, and the workers' Endings name its rank. `record` keeps what parties
    sent.
    """

    comm: Any = None
    record: bool = False

    def run(
        self,
        program: Program,
        shards: Sequence[Shard],
        schedule: Schedule,
        *,
        reduction: Reduction,
        resume: Checkpoint | None = None,
    ) -> Rounds:
        """Yield arrivals at rank 0; own contributions and the end elsewhere."""
        communicator = Mpi(self.comm).communicator()
        channel, is_resumed = MpiChannel(communicator), resume is not None
        if communicator.rank == 0:
            arrivals = MpiArrivals(communicator, channel, program, shards, schedule, reduction, is_resumed)
            return Rounds(run_arrivals(program, arrivals, schedule, reduction, resume, self.record))
        known = {} if resume is None else resume.parties
        worker = Worker(communicator, channel, program, shards, schedule, reduction, is_resumed, known, self.record)
        return Rounds(worker.rounds())


@dataclass(frozen=True, slots=True)
class Ending(Round):
    """The end of an asynchronous run at a worker, without participants.

    `left_at` is the rank whose caller broke out of its loop (None: the run reached its last arrival).
    """

    left_at: int | None = None


@contextmanager
def _ending_at_all(rank: int, fail: Callable[[BaseException], None], leave: Callable[[], None]) -> Iterator[None]:
    """End the run at all ranks if this block raises or the caller leaves its loop; raise the error of another rank."""
    try:
        yield
    except CallerError as left:
        fail(left.as_fault(rank))
        raise
    except GeneratorExit:
        leave()
        raise
    except RunEnded as end:
        if end.error is not None:
            raise end.error from None
    except BaseException as error:
        fail(error)
        raise


class MpiArrivals:
    """The workers as rank 0 sees them.

    A worker is waiting for a packet from rank 0 (`_waiting`), or working and will send one more packet (`_working`), or
    has received the end.
    """

    def __init__(
        self,
        communicator: Communicator,
        channel: PacketChannel,
        program: Program,
        shards: Sequence[Shard],
        schedule: Schedule,
        reduction: Reduction,
        is_resumed: bool,
    ) -> None:
        self._communicator, self._post = communicator, channel
        self._program, self._shards, self._schedule = program, tuple(shards), schedule
        self._others = {"reduction": reduction, "resume": is_resumed}
        self._waiting: set[int] = set()
        self._working: set[int] = set()
        self._point: AsyncCheckpoint | None = None
        self._answered: Round | None = None
        self._left_at: int | None = None
        self._is_closed = False
        self._began = 0.0
        self.has_ended = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Check that all settings agree. An error, or a caller that leaves its loop, ends the run at all ranks."""
        with _ending_at_all(self._communicator.rank, self._fail, self._leave):
            placed = _agree_on_placement(self._communicator, self._program, self._shards, self._schedule, self._others)
            self.layout, self._homes = placed.layout, placed.homes
            self._expected = self._program.upload_spec(placed.layout)
            yield

    def _leave(self) -> None:
        self._left_at = self._communicator.rank
        with suppress(Exception):  # a worker's error, which the worker raises, or a transport that is already closed
            self.close()

    def begin(self, point: AsyncCheckpoint) -> AsyncCheckpoint:
        """Wait until the workers have started their parties. States stay at the workers, and items have no due time."""
        all_gather_status(self._communicator, StatusCard())
        self._began = time.perf_counter() - point.clock
        items = {name: replace(item, due=None) for name, item in point.items.items()}
        self._point, self._waiting = replace(point, parties={}, items=items), set(self._homes.values())
        return self._point

    def send(self, items: Mapping[str, WorkItem]) -> None:
        """Send one packet to each worker that holds these parties."""
        for rank in sorted({self._homes[name] for name in items}):
            own = {name: item for name, item in items.items() if self._homes[name] == rank}
            self._send(rank, Tag.GO_ON, self._answer(own))
            self._working.add(rank)

    def next(self) -> Arrival | None:
        """Return the next upload; None if a worker has left or failed, which ends the run."""
        packet = self._post.receive()
        assert packet is not None
        self._working.discard(packet.sender)
        if packet.tag in (Tag.FAILED, Tag.LEFT):
            self.has_ended = True
            self._left_at = packet.sender if packet.tag is Tag.LEFT else None
            return None
        self._waiting.add(packet.sender)
        return self._to_arrival(packet)

    def _to_arrival(self, packet: Packet) -> Arrival:
        """Decode a packet; uploads are checked again."""
        found = decode(packet.parcel, device=self._communicator.device)
        clock = time.perf_counter() - self._began
        if packet.tag is Tag.REFUSED:
            name, fault = found
            return Arrival(name, error_from_text(*fault), clock)
        assert self._point is not None
        ((name, message),) = found.items()
        try:
            with annotate_errors(name, "arrival", self._point.index):
                check_upload(name, message, self._expected)
        except PartsongError as error:
            if self._schedule.on_party_error == "raise":
                raise
            return Arrival(name, error.with_traceback(None), clock)
        return Arrival(name, message, clock)

    def commit(self, done: Round, arrival: Arrival, sums: State) -> Round:
        """Keep the round, for the answer to its sender."""
        assert isinstance(done.checkpoint, AsyncCheckpoint)
        self._point, self._answered = done.checkpoint, done
        return done

    def close(self) -> None:
        """Receive and discard the last packet of every worker, then send the end of the run to all ranks."""
        if self._is_closed or self._point is None:
            return
        self._end_waiting()
        self._drain()
        all_gather_status(self._communicator, StatusCard())
        run_on_rank_0(self._communicator, self._ending)
        self._is_closed = True

    def _send(self, rank: int, tag: Tag, parcel: Buffer = b"") -> None:
        self._post.send(rank, tag, parcel)
        self._waiting.discard(rank)

    def _answer(self, items: Mapping[str, WorkItem]) -> Buffer:
        """Encode the models of these parties, with version and number of each item and the outcome of the last arrival.

        The outcome is the arrival's index, the server's metrics, the reason if it was refused, and its bytes.
        """
        numbers, done = {name: (item.version, item.number) for name, item in items.items()}, self._answered
        became = None if done is None else (done.index, dict(done.metrics), dict(done.refused), done.bytes_down)
        self._answered = None
        return encode(({name: item.model for name, item in items.items()}, (numbers, became)))

    def _end_waiting(self) -> None:
        """Send the end to the waiting workers; the last sender also gets the outcome of its upload."""
        if self._answered is not None and self._point is not None:
            (name,) = self._answered.bytes_up
            self._send(self._homes[name], Tag.END, self._answer({name: self._point.items[name]}))
        for rank in sorted(self._waiting):
            self._send(rank, Tag.END)

    def _drain(self, timeout: float | None = None) -> None:
        began = time.monotonic()
        while self._working:
            packet = self._post.receive(None if timeout is None else timeout - (time.monotonic() - began))
            if packet is None:
                return
            if packet.tag in (Tag.WORK, Tag.REFUSED):
                self._post.send(packet.sender, Tag.END)
            self._working.discard(packet.sender)

    def _ending(self) -> tuple[dict[str, Message], list[object]]:
        assert self._point is not None
        return {"model": self._point.model}, [self._point.index, self._point.server, self._left_at]

    def _fail(self, error: BaseException) -> None:
        """Send an error to all ranks; abort if a worker does not respond within a few seconds."""
        if self._is_closed:
            return
        with suppress(Exception):
            # Workers that wait for a packet must leave that wait before they can take part in the status exchange.
            for rank in sorted(self._waiting):
                self._send(rank, Tag.END)
            self._drain(ERROR_TIMEOUT)
            if self._working:
                self._communicator.abort(f"Rank 0 failed: {type(error).__name__}: {error}")
        broadcast_error(self._communicator, error)


@dataclass(slots=True)
class Worker:
    """A rank with parties, which take turns, each with the model that it was last sent.

    `sent` is the latest contribution (None: it was refused). `awaits_packet` says whether the server sends next.
    """

    communicator: Communicator
    channel: PacketChannel
    program: Program
    shards: Sequence[Shard]
    schedule: Schedule
    reduction: Reduction
    is_resumed: bool
    known: Mapping[str, State]
    record: bool
    parties: LocalParties = field(init=False)
    error_note: str | None = None
    items: dict[str, WorkItem] = field(default_factory=dict)
    sent: tuple[str, Message | None] | None = None
    awaits_packet: bool = False
    is_over: bool = False
    is_running: bool = False
    began: float = field(default_factory=time.perf_counter)
    clock: float = 0.0

    def rounds(self) -> Generator[Round]:
        """Yield a Round for every contribution of an own party, then an Ending."""
        last: Ending | None = None
        with _ending_at_all(self.communicator.rank, self._fail, self._leave):
            self._join()
            while not self.is_over:
                done = self._receive()
                if done is not None:
                    yield done
                    del done
                if not self.is_over:
                    self._contribute()
            last = self._conclude()
        if last is not None:
            yield last

    def _join(self) -> None:
        """Check that all settings agree, and start the own parties."""
        others = {"reduction": self.reduction, "resume": self.is_resumed}
        layout = _agree_on_placement(self.communicator, self.program, self.shards, self.schedule, others).layout
        run: AsyncConfig = async_config(self.program, self.schedule, layout, self.reduction, self.record)
        own = {shard.name for shard in self.shards}
        known = {name: state for name, state in self.known.items() if name in own}
        self.known, self.error_note = {}, error_note_for(run.schedule, layout)
        self.parties = LocalParties(self.program, self.shards, self.schedule, self.reduction, layout, known)
        self.parties.start(0, self.error_note)
        all_gather_status(self.communicator, StatusCard())
        self.is_running = self.awaits_packet = True
        self.began = time.perf_counter()

    def _receive(self) -> Round | None:
        """Receive the server's answer; return the round of the previous contribution, if there was one."""
        packet = self.channel.receive()
        assert packet is not None
        self.awaits_packet, self.is_over = False, packet.tag is Tag.END
        if not len(packet.parcel):
            return None
        models, (numbers, became) = decode(packet.parcel, device=self.communicator.device)
        self.items = {**self.items, **{name: WorkItem(models[name], *numbers[name]) for name in models}}
        return None if became is None else self._round(*became)

    def _round(self, index: int, metrics: Mapping[str, float], refused: Mapping[str, str], down: int) -> Round:
        assert self.sent is not None
        (name, message), self.sent = self.sent, None
        taken = None if refused else message
        states = self.parties.finish_round(() if taken is None else (name,))
        model, seconds = self.items[name].model, self._seconds()
        after = AsyncCheckpoint(index + 1, states, None, model, dict(self.items), self.clock)
        if taken is None:
            return Round(index, model, metrics, (), {name: 0}, down, seconds, after, (), refused)
        traffic = ((name, 0, taken),) if self.record else ()
        return Round(index, model, metrics, (name,), {name: taken.nbytes}, down, seconds, after, traffic)

    def _contribute(self) -> None:
        """Do one work item of the party whose turn it is, and send its upload, or its error if it is left out."""
        name = min(self.items, key=lambda party: (self.items[party].number, party))
        ask = ask_for(name, self.items[name], self.error_note)
        self.parties.start(ask.index, self.error_note, [name])
        answers = self.parties.answer(ask)
        self.parties.end_sum()
        self.awaits_packet = True
        fault = answers.faults.get(name)
        self.sent = name, answers.messages.get(name)
        if fault is None:
            self.channel.send(0, Tag.WORK, encode(dict(answers.messages)))
        else:
            self.channel.send(0, Tag.REFUSED, encode((name, error_to_text(fault))))

    def _conclude(self) -> Ending:
        """Return the end of the run: the server's last state and model, with the states of the own parties."""
        self.is_over = True
        self.is_running = False
        all_gather_status(self.communicator, StatusCard())
        messages, (index, server, left_at) = run_on_rank_0(self.communicator, _nothing)
        model = messages["model"]
        metrics, seconds = self.program.metrics(server), self._seconds()
        after = AsyncCheckpoint(index, self.parties.finish_round(()), server, model, dict(self.items), self.clock)
        return Ending(index - 1, model, metrics, (), {}, 0, seconds, after, left_at=left_at)

    def _seconds(self) -> float:
        before, self.clock = self.clock, time.perf_counter() - self.began
        return self.clock - before

    def _leave(self) -> None:
        """End the run at all ranks because the caller left its loop."""
        if not self.is_running:
            return
        with suppress(Exception):  # another rank's error, which that rank raises, or a transport that is already closed
            if not self.is_over:
                self.channel.send(0, Tag.LEFT)
            self._conclude()

    def _fail(self, error: BaseException) -> None:
        """Notify the server, then send the error to all ranks; no packet is left over for a later run."""
        with suppress(Exception):
            packet = self.channel.receive(ERROR_TIMEOUT) if self.awaits_packet else None
            if self.is_running and not self.is_over and (packet is None or packet.tag is not Tag.END):
                self.channel.send(0, Tag.FAILED)
        broadcast_error(self.communicator, error)


def _nothing() -> tuple[Mapping[str, Message], Any]:
    return {}, None


def _agree_on_placement(
    communicator: Communicator, program: Program, shards: Sequence[Shard], schedule: Schedule, others: Mapping[str, Any]
) -> Placement:
    if communicator.size < 2:
        raise ParameterError(
            "An asynchronous run needs a server and at least one worker, but there is only one rank. Start it with "
            "mpiexec -n 2 or more, or use the engine Asynchronous."
        )
    return agree_on_run(communicator, program, shards, schedule, others, has_server=True)
