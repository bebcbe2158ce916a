"""Asynchronous runs: the rules of an arrival, and runs in one process by a virtual clock or a recorded order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from partsong.core import runtime
from partsong.core.interfaces import (
    Checkpoint,
    Engine,
    Layout,
    Message,
    Occasion,
    Program,
    Reduction,
    Round,
    Schedule,
    Shard,
    State,
    traits_of,
    turn_of,
)
from partsong.core.streams import stream
from partsong.engines.collective import as_text, from_text
from partsong.engines.rounds import WAYS_ON, Desk, named, nobody_left
from partsong.engines.upload_checks import Expected, check_sum, check_together, check_upload, stated_by
from partsong.errors import CompositionError, ParameterError, PartsongError

# ---- pieces -----------------------------------------------------------------------------------------------------
#
# A party's piece of work in an asynchronous run: with the model that it was last sent, whatever came of others since.
#
# Work is a pure function of a party's state and that model, so that it does not matter when it is computed; until it
# arrives, state and model are all there is to keep.


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
    if traits_of(program).full_participation and len(layout.parties) > 1:
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
    if turn_of(terms.program, point.model).steps > 1:
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
        with runtime.kernels_on(terms.schedule.kernel_threads), named(shard.name, "start", 0):
            return terms.program.start_party(shard, terms.layout)
    except PartsongError as error:
        return _excused(terms, error)


def attempt(terms: Terms, shard: Shard, piece: Piece, state: State | None, standing: State) -> Worked | PartsongError:
    """A piece of work at its party, or the error if it is left out."""
    program, reduction, version = terms.program, terms.reduction, piece.version
    occasion = terms.occasion(shard.name, piece)
    try:
        with runtime.kernels_on(terms.schedule.kernel_threads):
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


# ---- arrivals ---------------------------------------------------------------------------------------------------
#
# What the server of an asynchronous run does with an upload: aggregate that one, finish, answer its sender alone.
#
# One arrival is one Round.


@dataclass(frozen=True, slots=True)
class Arrival:
    """Who has sent what, or the error instead, at which second; the next piece's due time, and states that are here."""

    name: str
    sent: Message | PartsongError
    clock: float
    due: float | None = None
    states: Mapping[str, State] = field(default_factory=dict)


def taken_in(terms: Terms, desk: Desk, point: Midway, arrival: Arrival) -> Round:
    """The round that an arrival makes; its checkpoint says what the sender is answered."""
    name, sent, piece = arrival.name, arrival.sent, point.pieces[arrival.name]
    if isinstance(sent, PartsongError):
        return _refused(terms, point, arrival, sent)
    program, reduction, occasion = terms.program, terms.reduction, terms.occasion(name, piece)
    with runtime.kernels_on(terms.schedule.kernel_threads):
        state, answer = reduction.hear(0, {name: sent}, desk.server, occasion)
        desk.server, aggregate, included = reduction.total(state, program.aggregation, occasion)
        check_sum(aggregate, included, point.index)
        handed_over = [aggregate]
        del aggregate  # as large as the model; the program lets go of its copy when it can
        server, model = program.finish(point.server, handed_over.pop())
    down = piece.model.nbytes + (answer.nbytes if answer.arrays else 0)
    after = _next(replace(point, server=server, model=model), arrival, ())
    traffic = ((name, 0, sent),) if terms.record else ()
    seconds, metrics = arrival.clock - point.clock, program.metrics(server)
    return Round(point.index, model, metrics, included, {name: sent.nbytes}, down, seconds, after, traffic)


def _refused(terms: Terms, point: Midway, arrival: Arrival, error: PartsongError) -> Round:
    """Nothing arrived but the reason; the model stands still, and the party is sent it to try again."""
    name, told = arrival.name, as_text(error)
    after = _next(point, arrival, tuple(told))
    faults = {party: after.pieces[party].fault for party in terms.layout.parties}
    if all(faults.values()):
        everyone = {party: error if party == name else from_text(*fault) for party, fault in faults.items()}
        raise nobody_left(everyone, point.index) from error
    down, seconds = point.pieces[name].model.nbytes, arrival.clock - point.clock
    metrics = terms.program.metrics(point.server)
    return Round(point.index, point.model, metrics, (), {name: 0}, down, seconds, after, (), {name: str(error)})


def _next(point: Midway, arrival: Arrival, fault: tuple[str, ...]) -> Midway:
    name, index = arrival.name, point.index + 1
    answer = Piece(point.model, index, point.pieces[name].number + 1, arrival.due, fault)
    states, pieces = {**point.parties, **arrival.states}, {**point.pieces, name: answer}
    return replace(point, index=index, parties=states, pieces=pieces, clock=arrival.clock)


# ---- virtual clock ----------------------------------------------------------------------------------------------
#
# Virtual time: how long pieces of work take, and synchronous runs over the same clock.
#
# No engine sleeps, and none looks at the host's clock: the same settings give the same times everywhere.

LARGEST = 700.0
"""Exponents whose exponential is a finite number."""


@dataclass(frozen=True, slots=True)
class Durations:
    """Virtual seconds from the model that a party is sent to the arrival of what it makes of it.

        d(p, i) = latency + base_p · straggler_p · exp(jitter · z_pi),   base_p = seconds_p, or per_row · n_p

    for the i-th piece of party p. `seconds` names all parties or none, `stragglers` those that differ, 2 for half the
    speed. z_pi is standard normal, from a stream of the run's seed, p and i: it depends on nothing else. `latency` is
    that of both ways together.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    stragglers: Mapping[str, float] = field(default_factory=dict)
    jitter: float = 0.0
    latency: float = 0.0
    per_row: float = 1.0

    def __post_init__(self) -> None:
        named = {
            f"{what} of {name!r}": value
            for what in ("seconds", "stragglers")
            for name, value in getattr(self, what).items()
        }
        for what, value in {**named, "per_row": self.per_row}.items():
            if not 0 < value < math.inf:
                raise ParameterError(f"Durations need {what} > 0 and finite; got {value!r}.")
        for what, value in (("jitter", self.jitter), ("latency", self.latency)):
            if not 0 <= value < math.inf:
                raise ParameterError(f"Durations need {what} ≥ 0 and finite; got {value!r}.")

    def check(self, names: Sequence[str]) -> None:
        """Refuse names that no party has, and seconds for some parties only."""
        unknown = sorted((self.seconds.keys() | self.stragglers.keys()) - set(names))
        if unknown:
            raise ParameterError(
                f"The durations name parties that are not there: {', '.join(unknown[:5])}. "
                f"The parties are {', '.join(sorted(names)[:5])}{'…' if len(names) > 5 else ''}."
            )
        missing = sorted(set(names) - self.seconds.keys()) if self.seconds else []
        if missing:
            raise ParameterError(
                f"The durations say nothing of {', '.join(missing[:5])}. Name the seconds of all parties, or of none: "
                "then they are proportional to rows."
            )

    def of(self, shard: Shard, number: int, seed: int) -> float:
        """d(p, i) for a party's piece of that number, from 0."""
        name = shard.name
        base = self.seconds[name] if self.seconds else self.per_row * shard.matrix.shape[0]
        exponent = self.jitter * stream(seed, "duration", name, number).standard_normal() if self.jitter else 0.0
        scale = math.exp(exponent) if exponent < LARGEST else math.inf
        duration = self.latency + base * self.stragglers.get(name, 1.0) * scale
        if not 0 < duration < math.inf:
            raise ParameterError(
                f"A piece of work of party {name!r} would last {duration!r} virtual seconds; it must be more than 0 "
                "and finite. Name its seconds, or lower the jitter."
            )
        return duration


@dataclass(frozen=True, slots=True)
class Clocked:
    """A synchronous engine in one process, with virtual seconds: a round lasts as long as its slowest party.

        seconds = max_p d(p, round) over all that are asked

    Models and all else are the engine's. Exchanges in which nobody works last as long as the latency. With one party
    the clock is that of `Asynchronous` with the same durations.
    """

    engine: Engine
    durations: Durations = Durations()

    def run(
        self,
        program: Program,
        shards: Sequence[Shard],
        schedule: Schedule,
        *,
        reduction: Reduction,
        resume: Checkpoint | None = None,
    ) -> Iterator[Round]:
        """The rounds of the engine, timed anew."""
        self.durations.check([shard.name for shard in shards])
        by_name = {shard.name: shard for shard in shards}
        model: Message | None = None if resume is None else resume.model
        for done in self.engine.run(program, shards, schedule, reduction=reduction, resume=resume):
            is_work = model is None or turn_of(program, model).works
            lasts = [self.durations.of(by_name[name], done.index, schedule.seed) for name in done.bytes_up]
            model = done.model
            yield replace(done, seconds=max(lasts) if is_work else self.durations.latency)
            del done


# ---- asynchronous -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asynchronous:
    """No party waits for another: each begins anew with the model that its own last upload was answered with.

    `Schedule.rounds` counts arrivals; a Round is one of them, with its sender as the only participant. Arrivals come in
    the order of (virtual time, name), so that a run depends on `durations` and not on the host. `Round.seconds` is the
    virtual time since the arrival before: their sum is the clock, and `Round.checkpoint.clock` tells it. A party that
    is left out for a fault uses up an arrival too, and tries again with the model as it stands then; the run ends when
    nobody's latest piece was good. Checkpoints hold what is under way (`pieces.Midway`), and a resumed run is the
    uninterrupted one to the bit. With one party and a server that takes over what it is sent this is Sequential.
    """

    durations: Durations = Durations()
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
        """Rounds in the order of arrival."""
        layout = Layout.of(shards, schedule.seed)
        terms = agreed_terms(program, schedule, layout, reduction, self.record)
        self.durations.check(layout.parties)
        by_name = {shard.name: shard for shard in shards}
        point = begun(terms, resume)
        del resume  # as large as the parties' states, and soon behind us
        point = replace(point, parties=started(terms, by_name, point.parties))
        point = self._on_the_clock(point, by_name, schedule.seed)
        desk = Desk({name: reduction.enrol(name, shard.secret, layout) for name, shard in by_name.items()})
        while point.index < schedule.rounds:
            done = self._one_arrival(terms, desk, point, by_name)
            point = done.checkpoint  # type: ignore[assignment]
            yield done
            del done

    def _on_the_clock(self, point: Midway, shards: dict[str, Shard], seed: int) -> Midway:
        """A due time for pieces that have none."""
        pieces = {
            name: replace(piece, due=point.clock + self.durations.of(shards[name], piece.number, seed))
            if piece.due is None
            else piece
            for name, piece in point.pieces.items()
        }
        return replace(point, pieces=pieces)

    def _one_arrival(self, terms: Terms, desk: Desk, point: Midway, shards: dict[str, Shard]) -> Round:
        name = min(point.pieces, key=lambda party: (point.pieces[party].due, party))
        piece, shard = point.pieces[name], shards[name]
        assert piece.due is not None
        due = piece.due + self.durations.of(shard, piece.number + 1, terms.schedule.seed)
        worked = attempt(terms, shard, piece, point.parties.get(name), desk.parties[name])
        if not isinstance(worked, Worked):
            return taken_in(terms, desk, point, Arrival(name, worked, piece.due, due))
        desk.parties[name] = worked.standing
        return taken_in(terms, desk, point, Arrival(name, worked.message, piece.due, due, {name: worked.state}))


# ---- recorded order ---------------------------------------------------------------------------------------------
#
# A virtual clock on which arrivals come in a given order: an asynchronous run that was recorded, run again.


@dataclass(frozen=True, slots=True)
class RecordedOrder(Durations):
    """The i-th arrival of all is that of order[i], at second i + 1; pieces that are not in it never arrive.

    A piece of work is a function of its party's state and of the model that its last upload was answered with, and so
    the order is all that a run depends on. `Schedule.rounds` is at most the length of the order.
    """

    order: tuple[str, ...] = ()
    lasting: dict[str, list[int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        seconds: dict[str, list[int]] = {}
        for second, name in enumerate(self.order, 1):
            seconds.setdefault(name, [0]).append(second)
        lasting = {name: [late - early for early, late in pairwise(given)] for name, given in seconds.items()}
        object.__setattr__(self, "lasting", lasting)

    def check(self, names: Sequence[str]) -> None:
        """Refuse names that no party has."""
        Durations(stragglers=dict.fromkeys(self.order, 1.0)).check(names)

    def of(self, shard: Shard, number: int, seed: int) -> float:
        """Seconds from the arrival before of this party to that of its piece of this number."""
        known = self.lasting.get(shard.name, [])
        return float(known[number]) if number < len(known) else math.inf
