"""The server of an asynchronous run over ranks: it waits for anybody, takes in what came, and answers its sender."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from partsong.core import Message, Round, Shard
from partsong.engines.agreement import PATIENCE, Card, Ended, agree, at_the_server, from_text, tell
from partsong.engines.arrivals import Arrival, taken_in
from partsong.engines.boundary import check_upload
from partsong.engines.communicator import Buffer, Communicator
from partsong.engines.departure import Caller
from partsong.engines.parcels import packed, unpacked
from partsong.engines.pieces import Midway, Terms
from partsong.engines.post import Letter, Post, Word
from partsong.engines.rounds import Desk, named
from partsong.engines.state_parcels import told_state
from partsong.errors import PartsongError


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
