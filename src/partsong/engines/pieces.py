"""A party's piece of work in an asynchronous run: with the model that it was last sent, whatever came of others since.

Work is a pure function of a party's state and that model, so that it does not matter when it is computed; until it
arrives, state and model are all there is to keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from partsong import threads
from partsong.core import (
    Checkpoint,
    Layout,
    Message,
    Occasion,
    Program,
    Reduction,
    Schedule,
    Shard,
    State,
)
from partsong.engines.boundary import Expected, check_together, check_upload, stated_by
from partsong.engines.company import exchange_of
from partsong.engines.rounds import WAYS_ON, named
from partsong.errors import CompositionError, ParameterError, PartsongError


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of work under way at a party: the model that it was sent and after how many arrivals that was, the
    piece's number at this party, when it arrives on a virtual clock (None: nobody knows), and why the last one was
    refused (kind and message of the error).

    The staleness of its arrival is the round's index less `version`: so many others arrived in between.
    """

    model: Message
    version: int
    number: int = 0
    due: float | None = None
    fault: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Midway(Checkpoint):
    """A checkpoint of an asynchronous run: also what is under way, and the seconds from the beginning of the run.

    To engines that run in rounds it is a Checkpoint like any other.
    """

    pieces: Mapping[str, Piece] = field(default_factory=dict)
    clock: float = 0.0


@dataclass(frozen=True, slots=True)
class Terms:
    """What stays the same in a whole run."""

    program: Program
    schedule: Schedule
    layout: Layout
    reduction: Reduction
    expected: Expected
    record: bool

    def occasion(self, name: str, piece: Piece) -> Occasion:
        """A sum over one party, by the model it was sent; both sides know as much."""
        return Occasion(piece.version, (name,), self.layout, piece.model)


@dataclass(frozen=True, slots=True)
class Worked:
    """A party's piece, done: its new state, what it sends, and what its side of the reduction keeps."""

    state: State
    message: Message
    standing: State


def agreed_terms(program: Program, schedule: Schedule, layout: Layout, reduction: Reduction, record: bool) -> Terms:
    """The terms of a run, unless it cannot be asynchronous."""
    kind = type(reduction).__name__
    if reduction.hides_uploads:
        raise CompositionError(
            f"{kind} lets the server see sums alone, but an asynchronous server takes in one upload at a time and sees "
            "each by definition. Use InTheOpen, with noise added at the parties if uploads are to be protected, or a "
            "synchronous engine."
        )
    if reduction.phases != 1:
        raise CompositionError(
            f"{kind} takes {reduction.phases} exchanges for a sum, and an asynchronous party sends once. Use "
            "InTheOpen, or a synchronous engine."
        )
    if schedule.absent or schedule.silent:
        raise ParameterError(
            "A schedule with absent or silent parties speaks of rounds that all parties share; an asynchronous run has "
            "none. Let a party be slow instead (Durations(stragglers={name: factor}) on the virtual clock), leave out "
            "its shard, or use a synchronous engine."
        )
    if getattr(program, "needs_everyone", False) and len(layout.parties) > 1:
        raise CompositionError(
            f"{type(program).__name__} needs the sum over all parties, and an asynchronous server takes in one upload "
            "at a time. Use a program whose server moves with each (Consensus with Relaxation), or another engine."
        )
    expected = stated_by(program, layout)
    check_together(program, reduction, expected)
    return Terms(program, schedule, layout, reduction, expected, record)


def begun(terms: Terms, resume: Checkpoint | None) -> Midway:
    """Where a run begins, or goes on: parties without a piece are sent the model as it stands.

    A checkpoint of a synchronous run will do. Of parties that have left, states are kept and pieces are not.
    """
    point = resume if resume is not None else Checkpoint(0, {}, *terms.program.start_server(terms.layout))
    if exchange_of(terms.program, point.model)[1] > 1:
        raise CompositionError(
            "This program's rounds take several exchanges over the same parties, and in an asynchronous run no two "
            "parties share one. Use one exchange a round (sweeps=1), or a synchronous engine."
        )
    known, clock = (point.pieces, point.clock) if isinstance(point, Midway) else ({}, 0.0)
    pieces = {name: known.get(name) or Piece(point.model, point.index) for name in terms.layout.parties}
    return Midway(point.index, dict(point.parties), point.server, point.model, pieces, clock)


def started(terms: Terms, shards: Mapping[str, Shard], states: Mapping[str, State]) -> dict[str, State]:
    """The states, with one for every shard that has none; who cannot start and is left out is asked again later."""
    found = dict(states)
    for name in sorted(shards.keys() - states.keys()):
        begun = attempt_start(terms, shards[name])
        if not isinstance(begun, PartsongError):
            found[name] = begun
    return found


def attempt_start(terms: Terms, shard: Shard) -> State | PartsongError:
    """A party's first state, or the error if it is left out."""
    try:
        with threads.kernels_on(terms.schedule.kernel_threads), named(shard.name, "start", 0):
            return terms.program.start_party(shard, terms.layout)
    except PartsongError as error:
        return _excused(terms, error)


def attempt(terms: Terms, shard: Shard, piece: Piece, state: State | None, standing: State) -> Worked | PartsongError:
    """A piece of work at its party, or the error if it is left out."""
    program, reduction, version = terms.program, terms.reduction, piece.version
    occasion = terms.occasion(shard.name, piece)
    try:
        with threads.kernels_on(terms.schedule.kernel_threads):
            if state is None:
                with named(shard.name, "start", version):
                    state = program.start_party(shard, terms.layout)
            with named(shard.name, "local", version):
                state, upload = program.local(shard, state, piece.model)
        with named(shard.name, "upload", version):
            check_upload(shard.name, upload, terms.expected)
        with named(shard.name, "reduction", version):
            sending = reduction.begin(standing, upload, program.aggregation, occasion)
            sending, message = reduction.send(0, sending, Message({}))
            return Worked(state, message, reduction.rest(sending))
    except PartsongError as error:
        return _excused(terms, error)


def _excused(terms: Terms, error: PartsongError) -> PartsongError:
    if terms.schedule.faulty == "stop":
        if len(terms.layout.parties) > 1:
            error.add_note(WAYS_ON)
        raise error
    return error.with_traceback(None)  # which holds the party's arrays
