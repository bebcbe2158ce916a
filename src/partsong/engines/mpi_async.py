"""Asynchronous runs over MPI: a server at rank 0, workers at all other ranks."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from partsong.core.codec import Buffer, packed, state_of, told_state, unpacked
from partsong.core.interfaces import (
    Checkpoint,
    Layout,
    Message,
    Program,
    Reduction,
    Round,
    Schedule,
    Shard,
    State,
    type_name,
)
from partsong.engines.asynchronous import (
    Arrival,
    Midway,
    Piece,
    Terms,
    Worked,
    agreed_terms,
    attempt,
    begun,
    started,
    taken_in,
)
from partsong.engines.collective import (
    PATIENCE,
    Attendance,
    Card,
    Communicator,
    Ended,
    agree,
    as_text,
    at_the_server,
    call_the_roll,
    from_text,
    share,
    tell,
)
from partsong.engines.mpi import Letter, Mpi, MpiPost, Post, Word
from partsong.engines.rounds import Desk, named
from partsong.engines.upload_checks import check_upload
from partsong.errors import ParameterError, PartsongError, PartyError

# ---- departure --------------------------------------------------------------------------------------------------
#
# How a run ends before its time: at which rank a caller has left its loop, and whether it raised there.
#
# Python closes a generator in the same way for both. Within `with contextlib.closing(engine.run(…)) as rounds` an
# exception that leaves the loop is still being handled when the generator is closed, and all ranks hear of it. A bare
# loop that raises has broken out, as far as anybody can know.


@dataclass(frozen=True, slots=True)
class Ending(Round):
    """The end of an asynchronous run at a worker, in which nobody takes part.

    `left_at` is the rank where a caller has broken out of its loop (None: the run has come to its last arrival).
    """

    left_at: int | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """Who iterates over the rounds at this rank; made in the generator, where it begins."""

    rank: int
    handled: BaseException | None = field(default_factory=sys.exception)

    def error(self, leaving: GeneratorExit) -> PartyError | None:
        """What to tell others of a caller that has raised; None if it broke out. Called by the generator itself."""
        raised = leaving.__context__
        if raised is None or raised is self.handled:
            return None
        return PartyError(
            f"The caller at rank {self.rank} ended the run: its own loop over the rounds raised "
            f"{type(raised).__name__}: {raised}. Mend it there; to go on, resume every rank from its last checkpoint."
        )


# ---- asynchronous server ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seat:
    """What stays the same at this rank; `shards` are its own, `homes` has the rank of every party."""

    communicator: Communicator
    post: Post
    terms: Terms
    shards: Mapping[str, Shard]
    homes: Mapping[str, int]


def serve(seat: Seat, point: Midway) -> Iterator[Round]:
    """A Round for every arrival; when the last is yielded, all workers have the end of the run."""
    caller, server, done = Caller(seat.communicator.rank), _Server(seat, point), None
    try:
        server.send_out()
        while not server.is_over:
            done = server.next_arrival()
            if done is not None and not server.is_over:
                yield done
                done = None
        server.close()
    except GeneratorExit as leaving:
        error_of_caller = caller.error(leaving)
        if error_of_caller is None:
            server.leave()
        else:
            server.fail(error_of_caller)
        return
    except Ended as end:
        if end.error is not None:
            raise end.error from None
        return
    except BaseException as error:
        server.fail(error)
        raise
    if done is not None:
        yield done


@dataclass(slots=True)
class _Server:
    """Where the run stands; `unheard` are the workers from whom one more letter will come, `owed` awaits an answer.

    `left_at` is the rank whose caller ended the run, if one did.
    """

    seat: Seat
    point: Midway
    desk: Desk = field(default_factory=lambda: Desk({}))
    unheard: set[int] = field(default_factory=set)
    owed: int | None = None
    is_over: bool = False
    left_at: int | None = None
    began: float = 0.0

    def send_out(self) -> None:
        """Every worker gets the models that its parties were last sent, or hears that the run is over."""
        self.began = time.perf_counter() - self.point.clock
        self.is_over = self.point.index >= self.seat.terms.schedule.rounds
        for rank in sorted(set(self.seat.homes.values())):
            if self.is_over:
                self.seat.post.send(rank, Word.END)
            else:
                own = [name for name, home in self.seat.homes.items() if home == rank]
                self.seat.post.send(rank, Word.GO_ON, self._answer(*own))
                self.unheard.add(rank)

    def next_arrival(self) -> Round | None:
        """The next round, its sender answered; None where a worker has left or failed, which ends the run."""
        letter = self.seat.post.receive()
        assert letter is not None
        if letter.word in (Word.FAILED, Word.LEFT):
            self.unheard.discard(letter.sender)
            self.is_over = True
            self.left_at = letter.sender if letter.word is Word.LEFT else None
            return None
        self.owed = letter.sender
        done = taken_in(self.seat.terms, self.desk, self.point, self._opened(letter))
        assert isinstance(done.checkpoint, Midway)
        self.point = done.checkpoint
        self.is_over = self.point.index >= self.seat.terms.schedule.rounds
        (name,) = done.bytes_up
        self._reply(Word.END if self.is_over else Word.GO_ON, self._answer(name, done=done))
        return done

    def _opened(self, letter: Letter) -> Arrival:
        """What a letter says; uploads are looked at once more."""
        messages, note = unpacked(letter.parcel, self.seat.communicator.device)
        clock, terms = time.perf_counter() - self.began, self.seat.terms
        if letter.word is Word.REFUSED:
            name, told = note
            return Arrival(name, from_text(*told), clock)
        ((name, message),) = messages.items()
        try:
            with named(name, "arrival", self.point.index):
                check_upload(name, message, terms.expected)
        except PartsongError as error:
            if terms.schedule.faulty == "stop":
                raise
            return Arrival(name, error.with_traceback(None), clock)
        return Arrival(name, message, clock)

    def _answer(self, *names: str, done: Round | None = None) -> Buffer:
        """The models of these parties; sent with them: version and number of each piece, and what became of the last.

        That is the arrival's index, the server's metrics, why it was refused if it was, and the bytes counted for it.
        """
        pieces = {name: self.point.pieces[name] for name in names}
        numbers = {name: [piece.version, piece.number] for name, piece in pieces.items()}
        became = None if done is None else [done.index, dict(done.metrics), dict(done.refused), done.bytes_down]
        return packed({name: piece.model for name, piece in pieces.items()}, [numbers, became])

    def _reply(self, word: Word, parcel: Buffer = b"") -> None:
        assert self.owed is not None
        self.seat.post.send(self.owed, word, parcel)
        if word is Word.END:
            self.unheard.discard(self.owed)
        self.owed = None

    def close(self) -> None:
        """Hear every worker out, whose last piece is not taken in, and give all ranks the end of the run."""
        self._hear_out()
        agree(self.seat.communicator, Card())
        at_the_server(self.seat.communicator, self._ending)

    def _hear_out(self, patience: float | None = None) -> None:
        began = time.monotonic()
        while self.unheard:
            letter = self.seat.post.receive(None if patience is None else patience - (time.monotonic() - began))
            if letter is None:
                return
            if letter.word in (Word.WORK, Word.REFUSED):
                self.seat.post.send(letter.sender, Word.END)
            self.unheard.discard(letter.sender)

    def _ending(self) -> tuple[dict[str, Message], list[object]]:
        arrays, note = told_state(self.point.server)
        return {"model": self.point.model, "server": arrays}, [self.point.index, note, self.left_at]

    def leave(self) -> None:
        """The caller has seen enough: the run ends for all."""
        self.left_at = self.seat.communicator.rank
        with suppress(Exception):  # of a worker, which raises it itself, or of a transport that has ended before
            self.close()

    def fail(self, error: BaseException) -> None:
        """Tell everybody; who does not listen within a few seconds is ended."""
        with suppress(Exception):
            if self.owed is not None:
                self._reply(Word.END)
            self._hear_out(PATIENCE)
            if self.unheard:
                self.seat.communicator.abort(f"Rank 0 failed: {type(error).__name__}: {error}")
        tell(self.seat.communicator, error)


# ---- asynchronous worker ----------------------------------------------------------------------------------------
#
# A worker of an asynchronous run over ranks: its parties take turns, each with the model that it was last sent.


def work(seat: Seat, states: Mapping[str, State], standing: Mapping[str, State]) -> Iterator[Round]:
    """A Round for every contribution of an own party, and an Ending; `standing` is what its reduction keeps."""
    caller, worker = Caller(seat.communicator.rank), _Worker(seat, dict(states), dict(standing))
    try:
        while not worker.is_over:
            done = worker.hear()
            if done is not None:
                yield done
                del done
            if not worker.is_over:
                worker.contribute()
        last = worker.conclude()
    except GeneratorExit as leaving:
        error_of_caller = caller.error(leaving)
        if error_of_caller is None:
            worker.leave()
        else:
            worker.fail(error_of_caller)
        return
    except Ended as end:
        if end.error is not None:
            raise end.error from None
        return
    except BaseException as error:
        worker.fail(error)
        raise
    yield last


@dataclass(slots=True)
class _Worker:
    """States and pieces of the own parties, the latest contribution, and whether a letter of the server is awaited."""

    seat: Seat
    states: dict[str, State]
    standing: dict[str, State]
    pieces: dict[str, Piece] = field(default_factory=dict)
    sent: tuple[str, Worked | None] | None = None
    awaits_letter: bool = True
    is_over: bool = False
    began: float = field(default_factory=time.perf_counter)
    clock: float = 0.0

    def hear(self) -> Round | None:
        """The server's answer; the round that it makes of the contribution before, if there was one."""
        letter = self.seat.post.receive()
        assert letter is not None
        self.awaits_letter, self.is_over = False, letter.word is Word.END
        if not len(letter.parcel):
            return None
        models, (numbers, became) = unpacked(letter.parcel, self.seat.communicator.device)
        before = self.pieces
        self.pieces = {**before, **{name: Piece(models[name], *numbers[name]) for name in models}}
        return None if became is None else self._round(*became)

    def _round(self, index: int, metrics: Mapping[str, float], refused: Mapping[str, str], down: int) -> Round:
        assert self.sent is not None
        (name, worked), self.sent = self.sent, None
        taken = None if refused else worked
        if taken is not None:
            self.states[name] = taken.state
        model, seconds = self.pieces[name].model, self._seconds()
        after = Midway(index + 1, dict(self.states), None, model, dict(self.pieces), self.clock)
        if taken is None:
            return Round(index, model, metrics, (), {name: 0}, down, seconds, after, (), refused)
        traffic = ((name, 0, taken.message),) if self.seat.terms.record else ()
        return Round(index, model, metrics, (name,), {name: taken.message.nbytes}, down, seconds, after, traffic)

    def contribute(self) -> None:
        """One piece of work of the party whose turn it is, sent to the server; or the error, if it is left out."""
        name = min(self.pieces, key=lambda party: (self.pieces[party].number, party))
        shard, piece = self.seat.shards[name], self.pieces[name]
        worked = attempt(self.seat.terms, shard, piece, self.states.get(name), self.standing[name])
        self.awaits_letter = True
        if isinstance(worked, Worked):
            self.standing[name] = worked.standing
            self.sent = name, worked
            self.seat.post.send(0, Word.WORK, packed({name: worked.message}))
        else:
            self.sent = name, None
            self.seat.post.send(0, Word.REFUSED, packed({}, [name, as_text(worked)]))

    def conclude(self) -> Ending:
        """The end of the run: the server's last state and model, with the states of the own parties."""
        agree(self.seat.communicator, Card())
        messages, (index, note, left_at) = at_the_server(self.seat.communicator, _nothing)
        server, model = state_of(messages["server"], note), messages["model"]
        metrics, seconds = self.seat.terms.program.metrics(server), self._seconds()
        after = Midway(index, dict(self.states), server, model, dict(self.pieces), self.clock)
        return Ending(index - 1, model, metrics, (), {}, 0, seconds, after, left_at=left_at)

    def _seconds(self) -> float:
        before, self.clock = self.clock, time.perf_counter() - self.began
        return self.clock - before

    def leave(self) -> None:
        """The caller has seen enough: the run ends for all."""
        with suppress(Exception):  # of another rank, which raises it itself, or of a transport that has ended before
            if not self.is_over:
                self.seat.post.send(0, Word.LEFT)
            self.conclude()

    def fail(self, error: BaseException) -> None:
        """Let the server know that it should listen, and tell everybody; no letter is left for the next run to find."""
        with suppress(Exception):
            letter = self.seat.post.receive(PATIENCE) if self.awaits_letter else None
            if not self.is_over and (letter is None or letter.word is not Word.END):
                self.seat.post.send(0, Word.FAILED)
        tell(self.seat.communicator, error)


def _nothing() -> tuple[Mapping[str, Message], Any]:
    return {}, None


# ---- asynchronous mpi -------------------------------------------------------------------------------------------
#
# Asynchronous runs over MPI: `mpiexec -n 3 python -m mpi4py …` is a server and two workers.
#
# Between ranks, in the beginning: the agreement of all ranks on settings, and the names and widths of the parties. Then
#
#     rank p → rank 0:  a party's upload
#     rank 0 → rank p:  the model that it is answered with, its number, and what the server's metrics are
#
# and in the end, to all ranks, the server's model and state. Never sent: a shard, its secret, a party's state, what a
# reduction keeps.


@dataclass(frozen=True, slots=True)
class AsynchronousMpi:
    """`Asynchronous` in real processes: rank 0 is the server and holds no shard, the others work at their own pace.

    Every rank calls `run` with the same program, schedule and reduction. Rank 0 yields a Round for each arrival, its
    seconds those of the wall clock since the one before. A worker yields one for each of its own contributions (the
    checkpoint has its parties' states, and no server) and at last an `Ending`, in which nobody takes part, with the
    model and the server's state as rank 0 has them. What was under way then is not taken in. Parties of one worker take
    turns. With one worker a run is that of `Asynchronous` with equal durations, bit for bit; with several the order of
    arrivals is that of the day.

    To resume, each rank gives a checkpoint of its own, not necessarily of the same moment, or all that of a run in one
    process. An error at any rank is raised at all. Iterate within `with contextlib.closing(engine.run(…)) as rounds`:
    then a caller that raises in its own loop at one rank is a PartyError at the others. A caller that breaks out of its
    loop, or raises without that, ends the run at all ranks, and the workers' Endings name its rank. `record` keeps what
    parties sent.
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
    ) -> Iterator[Round]:
        """Arrivals at rank 0, own contributions and the end elsewhere."""
        communicator = Mpi(self.comm).communicator()
        post = MpiPost(communicator)
        return run_asynchronously(communicator, post, program, shards, schedule, reduction, resume, self.record)


def run_asynchronously(
    communicator: Communicator,
    post: Post,
    program: Program,
    shards: Sequence[Shard],
    schedule: Schedule,
    reduction: Reduction,
    resume: Checkpoint | None,
    record: bool = False,
) -> Iterator[Round]:
    """One rank's part of a run; until all have agreed to begin, exchanges are collective."""
    try:
        others = {"reduction": reduction, "resume": resume is not None}
        roll = _attendance(communicator, program, shards, schedule, others)
        terms = agreed_terms(program, schedule, roll.layout, reduction, record)
        seat = Seat(communicator, post, terms, {shard.name: shard for shard in shards}, roll.homes)
        if communicator.rank == 0:
            point = begun(terms, resume)
            pieces = {name: replace(piece, due=None) for name, piece in point.pieces.items()}
            rounds = serve(seat, replace(point, parties={}, pieces=pieces))
        else:
            known = {} if resume is None else resume.parties
            own = {name: state for name, state in known.items() if name in seat.shards}
            standing = {name: reduction.enrol(name, s.secret, roll.layout) for name, s in seat.shards.items()}
            rounds = work(seat, started(terms, seat.shards, own), standing)
        del resume
        agree(communicator, Card())
    except Ended as end:
        if end.error is not None:
            raise end.error from None
        return
    except BaseException as error:
        tell(communicator, error)
        raise
    yield from rounds


@dataclass(frozen=True, slots=True)
class _Columns:
    """Of another rank's matrix one knows how wide it is, and its number type."""

    shape: tuple[int, int] = (0, 1)
    dtype: str = "float64"


def _attendance(
    communicator: Communicator, program: Program, shards: Sequence[Shard], schedule: Schedule, others: dict[str, Any]
) -> Attendance:
    """Settings that all ranks share, and the parties of the workers.

    Sent, as JSON: what `roll_call` sends, and the names, widths and number types of this rank's shards.
    """
    if communicator.size < 2:
        raise ParameterError(
            "An asynchronous run needs a server and at least one worker, but there is one rank. Start it with "
            "mpiexec -n 2 or more, or use the engine Asynchronous."
        )
    stand_in = Shard(f"rank {communicator.rank}", _Columns())  # type: ignore[arg-type]
    call_the_roll(communicator, program, [stand_in], schedule, others)
    own = [[shard.name, int(shard.matrix.shape[1]), type_name(shard.matrix.dtype)] for shard in shards]
    parties = [json.loads(text) for text in share(communicator, json.dumps(own))]
    try:
        return _placed(parties, schedule.seed)
    except PartsongError as error:
        raise Ended(error) from None


def _placed(parties: Sequence[Sequence[tuple[str, int, str]]], seed: int) -> Attendance:
    if parties[0]:
        raise ParameterError(
            f"Rank 0 is the server and holds no shard, but it was given {', '.join(name for name, *_ in parties[0])}. "
            "Give shards to the other ranks."
        )
    idle = [rank for rank, own in enumerate(parties) if rank and not own]
    if idle:
        raise ParameterError(
            f"Every worker needs at least one shard, but rank {idle[0]} has none. Start fewer ranks, or split the rows "
            "into more parts."
        )
    known = [Shard(name, _Columns((0, width), dtype)) for own in parties for name, width, dtype in own]  # type: ignore[arg-type]
    homes = {name: rank for rank, own in enumerate(parties) for name, *_ in own}
    return Attendance(Layout.of(known, seed), homes)
