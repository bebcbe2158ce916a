"""A worker of an asynchronous run over ranks: its parties take turns, each with the model that it was last sent."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from partsong.core import Message, Round, State
from partsong.engines.agreement import PATIENCE, Card, Ended, agree, as_text, at_the_server, tell
from partsong.engines.asynchronous_server import Seat
from partsong.engines.departure import Caller, Ending
from partsong.engines.parcels import packed, unpacked
from partsong.engines.pieces import Midway, Piece, Worked, attempt
from partsong.engines.post import Word
from partsong.engines.state_parcels import state_of


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
