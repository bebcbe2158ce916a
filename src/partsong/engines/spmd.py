"""Synchronous rounds over ranks: `local` at the own shards, a sum over all ranks, `finish` everywhere."""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any, TypeVar

import numpy as np

from partsong.core import runtime
from partsong.core.codec import Buffer, forms, packed, unpacked
from partsong.core.interfaces import (
    Aggregation,
    Checkpoint,
    Layout,
    Message,
    Occasion,
    Program,
    Reducible,
    Reduction,
    Round,
    Schedule,
    Shard,
    State,
)
from partsong.engines.collective import (
    Card,
    Communicator,
    Ended,
    agree,
    as_text,
    at_the_server,
    call_the_roll,
    from_text,
    leave,
    share,
    tell,
)
from partsong.engines.rounds import WAYS_ON, Desk, Faults, Traffic, Worked, named, nobody_left, note_left_out
from partsong.engines.upload_checks import (
    KEPT_OUT,
    WAYS_ON_WITH_ALL,
    Company,
    Expected,
    check_sum,
    check_together,
    check_upload,
    fixed_company,
    require_company,
    stated_by,
)
from partsong.errors import CompositionError, ParameterError, PartsongError, PartyError, TooFewParties

# ---- sums -------------------------------------------------------------------------------------------------------
#
# Two ways from the uploads at all ranks to one aggregate at every rank.
#
# In order: the reduction as it is written, with rank 0 as its server, which hears the parties in name order; any
# reduction, any aggregation, and the same bits as in one process.
#
# All-reduce: lower(Σ lift(upload)), added by the transport in an order of its own; it takes the place of the open
# reduction, for aggregations that are sums. Sent: the arrays of Σ lift(upload) over a rank's own parties, and the
# weight.

SUMMABLE = ("float32", "float64")
"""Number types that every transport can add."""


@dataclass(frozen=True, slots=True)
class Sitting:
    """The own parties of one sum: uploads, what the reduction made of them, and from which phase on who is silent."""

    communicator: Communicator
    reduction: Reduction
    aggregation: Aggregation
    occasion: Occasion
    uploads: Mapping[str, Message]
    states: dict[str, State]
    silent: Mapping[str, int]

    def heard_in(self, phase: int) -> list[str]:
        """The own parties that send something in a phase."""
        return [name for name in self.uploads if phase < self.silent.get(name, self.reduction.phases)]


@dataclass(frozen=True, slots=True)
class Total:
    """The aggregate, whose uploads are in it, what each party has sent, and the bytes of the server's answers."""

    aggregate: Message
    names: tuple[str, ...]
    sizes: Mapping[str, int]
    answers: int = 0
    traffic: tuple[tuple[str, int, Message], ...] = ()
    server: State = None


@dataclass(slots=True)
class Clerk:
    """The server of one sum, at rank 0, and its count of what was sent."""

    sitting: Sitting
    state: State
    answers: int = 0
    sizes: dict[str, int] = field(default_factory=dict)

    def serve(self, phase: int, inbox: Mapping[str, Message]) -> tuple[Mapping[str, Message], Any]:
        """The answer to a phase; after the last one the aggregate, with names, sizes and bytes of answers."""
        reduction, occasion = self.sitting.reduction, self.sitting.occasion
        for name, message in inbox.items():
            self.sizes[name] = self.sizes.get(name, 0) + message.nbytes
        self.state, reply = reduction.hear(phase, inbox, self.state, occasion)
        self.answers += reply.nbytes if reply.arrays else 0
        if phase + 1 < reduction.phases:
            return {"": reply}, None
        self.state, aggregate, included = reduction.total(self.state, self.sitting.aggregation, occasion)
        return {"": aggregate}, [list(included), self.sizes, self.answers]


@dataclass(frozen=True, slots=True)
class Offer:
    """What the own parties send in a phase, packed unless this is rank 0, and the card that says so."""

    phase: int
    messages: Mapping[str, Message]
    parcel: Buffer
    card: Card


def first_phase(sitting: Sitting, server: State) -> int:
    """With which phase a sum begins; sent, where there are several: rank 0 says so on its card."""
    communicator, reduction = sitting.communicator, sitting.reduction
    if reduction.phases == 1:
        return 0
    first = reduction.first(server, sitting.occasion) if communicator.rank == 0 else 0
    return agree(communicator, Card(first=first))[0].first


def offered(sitting: Sitting, phase: int, heard: Message = Message({})) -> Offer:
    """The messages of a phase; the states of the own parties move on."""
    own: dict[str, Message] = {}
    for name in sitting.heard_in(phase):
        with named(name, f"reduction phase {phase}", sitting.occasion.index):
            sitting.states[name], own[name] = sitting.reduction.send(phase, sitting.states[name], heard)
    parcel = packed(own) if sitting.communicator.rank > 0 else b""
    return Offer(phase, own, parcel, Card(size=len(parcel)))


def in_order(sitting: Sitting, server: State, offer: Offer, cards: Sequence[Card]) -> Total:
    """The phases of one sum, of which the first has been offered and all have shown their cards for it."""
    communicator, names = sitting.communicator, sitting.occasion.participants
    clerk, traffic, answer = Clerk(sitting, server), Traffic(), {"": Message({})}
    for phase in range(offer.phase, sitting.reduction.phases):
        if phase > offer.phase:
            offer = offered(sitting, phase, answer[""])
            cards = agree(communicator, offer.card)
        inbox = dict(offer.messages)
        for parcel in communicator.gather(offer.parcel, [card.size for card in cards])[1:]:
            inbox.update(unpacked(parcel, communicator.device)[0])
        inbox = {name: inbox[name] for name in names if name in inbox}
        traffic += [(name, phase, message) for name, message in inbox.items()]
        replied, note = at_the_server(communicator, partial(clerk.serve, phase, inbox))
        answer = dict(replied)
    included, sizes, answers = note
    return Total(answer[""], tuple(included), sizes, answers, tuple(traffic), clerk.state)


def check_that_sums_suffice(aggregation: Aggregation, reduction: Reduction) -> None:
    """Refuse what needs more than one sum of lifted uploads."""
    way_out = 'Use sums="in order", which works with all of them.'
    if not isinstance(aggregation, Reducible):
        kind = type(aggregation).__name__
        raise CompositionError(f"{kind} reads individual uploads, and an all-reduce has none. {way_out}")
    if reduction.phases != 1 or reduction.hides_uploads:
        raise CompositionError(f"An all-reduce cannot take the place of {type(reduction).__name__}. {way_out}")


@dataclass(frozen=True, slots=True)
class Addend:
    """Σ lift(upload) over the own parties, and the card that says what it looks like."""

    total: Message
    card: Card


def addend(sitting: Sitting, aggregation: Reducible) -> Addend:
    """What this rank adds to the sum; uploads of several sizes have no common form."""
    _check_that_uploads_go_as_they_are(sitting)
    uploads = [sitting.uploads[name] for name in sitting.heard_in(0)]
    total = reduce(_add, map(aggregation.lift, uploads)) if uploads else Message({})
    sizes = {upload.nbytes for upload in uploads}
    form = _checksum(total) if len(sizes) == 1 else 0
    return Addend(total, Card(upload_bytes=max(sizes, default=0), form=form))


def all_reduced(
    sitting: Sitting, aggregation: Reducible, own: Addend, cards: Sequence[Card], homes: Mapping[str, int]
) -> Total | None:
    """The sum, or None at all ranks where one has nothing to add, or arrays of another form than the rest."""
    communicator, arrays = sitting.communicator, own.total.arrays
    if not own.card.form or any(card.form != own.card.form for card in cards):
        return None
    sums = {name: communicator.sum(arrays[name]) for name in sorted(arrays)}
    weight = float(communicator.sum(np.array([float(own.total.weight)]))[0])
    aggregate = aggregation.lower(Message({name: sums[name] for name in arrays}, weight))
    names = tuple(name for name in sitting.occasion.participants if sitting.silent.get(name, 1) > 0)
    return Total(aggregate, names, {name: cards[homes[name]].upload_bytes for name in names})


def _check_that_uploads_go_as_they_are(sitting: Sitting) -> None:
    for name in sitting.heard_in(0):
        if sitting.reduction.send(0, sitting.states[name], Message({}))[1] is not sitting.uploads[name]:
            raise CompositionError(
                f"{type(sitting.reduction).__name__} sends something else than the upload, which an all-reduce would "
                'pass over. Use sums="in order".'
            )


def _add(a: Message, b: Message) -> Message:
    return Message({name: array + b[name] for name, array in a.arrays.items()}, a.weight + b.weight)


def _checksum(total: Message) -> int:
    """Of names, shapes and number types, never 0; 0 where a transport may be unable to add an array."""
    described = list(forms(total))
    is_summable = all(kind in SUMMABLE for _, _, kind, _, _ in described)
    return zlib.crc32(repr(described).encode()) | 1 << 32 if is_summable else 0


# ---- rank round -------------------------------------------------------------------------------------------------

Result = TypeVar("Result")

IN_ORDER, ALL_REDUCE = "in order", "all-reduce"

DRIFT = {"float64": 1e-6}
"""How far, relative to themselves, the norms of the ranks' models may differ; 1e-3 for other number types."""


@dataclass(frozen=True, slots=True)
class Seat:
    """What stays the same in all rounds at this rank; `shards` are its own, `homes` has the rank of every party."""

    communicator: Communicator
    program: Program
    shards: Mapping[str, Shard]
    schedule: Schedule
    layout: Layout
    homes: Mapping[str, int]
    reduction: Reduction
    expected: Expected
    sums: str
    record: bool


@dataclass(frozen=True, slots=True)
class Turn:
    """Where an exchange begins, who is asked, who must be in its sum (None: free), and own parties without a start."""

    point: Checkpoint
    asked: tuple[str, ...]
    fixed: Company | None
    missing: Faults


def one_round(seat: Seat, desk: Desk, point: Checkpoint) -> Round:
    """A round, the same at every rank but for checkpoint, seconds and traffic."""
    began, program, schedule = time.perf_counter(), seat.program, seat.schedule
    fixed = fixed_company(program, seat.reduction, schedule, seat.layout.parties, point, desk.company)
    names = schedule.participants(seat.layout.parties, point.index)
    asked = names if fixed is None else tuple(name for name in names if name in fixed)
    with runtime.kernels_on(schedule.kernel_threads):
        begun, missing = _joined(seat, point)
        point = replace(point, parties={**point.parties, **begun})
        turn = Turn(point, asked, fixed, missing)
        worked = _work(seat, turn)
        total, faults = _summed(seat, desk, turn, worked)
        refused = {name: KEPT_OUT for name in names if name not in asked} | faults
        states = {name: state for name, state in worked.states.items() if name not in faults}
        check_sum(total.aggregate, total.names, point.index)
        sent = {name: total.sizes.get(name, 0) for name in names}
        included, down, handed_over = total.names, point.model.nbytes + total.answers, [total.aggregate]
        traffic = total.traffic if seat.record else ()
        del worked, total  # as large as the model; the program lets go of its copy when it can
        server, model = program.finish(point.server, handed_over.pop())
    metrics = program.metrics(server)
    if point.index + 1 == schedule.rounds:
        agree(seat.communicator, Card())
    after = Checkpoint(point.index + 1, {**point.parties, **states}, server, model)
    seconds = time.perf_counter() - began
    return Round(point.index, model, metrics, included, sent, down, seconds, after, traffic, refused)


def _joined(seat: Seat, point: Checkpoint) -> tuple[dict[str, State], Faults]:
    """A state for every own party that has none yet."""

    def begin(name: str) -> State:
        with named(name, "start", point.index):
            return seat.program.start_party(seat.shards[name], seat.layout)

    return _visited(seat, begin, [name for name in sorted(seat.shards) if name not in point.parties])


def _work(seat: Seat, turn: Turn) -> Worked:
    """`local` at the own parties that are asked: states, uploads that passed, and errors of the others."""
    point = turn.point

    def work(name: str) -> tuple[State, Message]:
        with named(name, "local", point.index):
            state, upload = seat.program.local(seat.shards[name], point.parties[name], point.model)
        with named(name, "upload", point.index):
            check_upload(name, upload, seat.expected)
        return state, upload

    names = [name for name in turn.asked if name in seat.shards and name not in turn.missing]
    done, faults = _visited(seat, work, names, WAYS_ON if turn.fixed is None else WAYS_ON_WITH_ALL)
    states, uploads = ({name: pair[i] for name, pair in done.items()} for i in range(2))
    return Worked(states, uploads, faults)


def _visited(
    seat: Seat, work: Callable[[str], Result], names: Sequence[str], ways_on: str = WAYS_ON
) -> tuple[dict[str, Result], dict[str, PartsongError]]:
    done: dict[str, Result] = {}
    faults: dict[str, PartsongError] = {}
    for name in names:
        try:
            done[name] = work(name)
        except PartsongError as error:
            if seat.schedule.faulty == "stop":
                if len(seat.homes) > 1:
                    error.add_note(ways_on)
                raise
            if isinstance(error, TooFewParties):  # which is about the sum, and about no party in it
                raise
            faults[name] = error.with_traceback(None)  # which holds the party's arrays
    return done, faults


def _summed(seat: Seat, desk: Desk, turn: Turn, worked: Worked) -> tuple[Total, dict[str, str]]:
    """The sum over all ranks, and why parties were left out of it.

    A rank's first messages are made as if no other rank had faults, so that one exchange of cards is enough; where
    there were some, they are told, and the messages are made again: nothing was sent yet.
    """
    own: dict[str, PartsongError] = dict(worked.faults)
    at_fault: Faults = {**turn.missing, **own}
    sitting, new = _sitting(seat, desk, turn, worked.uploads, at_fault)
    opening, faults, norm = _opening(seat, desk, sitting), len(at_fault) + len(new), _norm(seat, turn.point.model)
    cards = agree(seat.communicator, replace(opening.card, faults=faults, norm=norm))
    _check_drift(seat, turn.point, [card.norm for card in cards])
    while any(card.faults for card in cards):
        own |= new
        at_fault = _told_faults(seat, turn, own)
        present = [name for name in turn.asked if name not in at_fault]
        require_company(turn.fixed, present, turn.point.index, at_fault)
        sitting, new = _sitting(seat, desk, turn, worked.uploads, at_fault)
        opening = _opening(seat, desk, sitting)
        cards = agree(seat.communicator, replace(opening.card, faults=len(new)))
    require_company(turn.fixed, sitting.occasion.participants, turn.point.index)
    total = _concluded(seat, desk, sitting, opening, cards)
    require_company(turn.fixed, total.names, turn.point.index)
    desk.parties.update({name: seat.reduction.rest(state) for name, state in sitting.states.items()})
    desk.server, desk.company = total.server, frozenset(total.names)
    return total, {name: str(error) for name, error in at_fault.items()}


def _sitting(
    seat: Seat, desk: Desk, turn: Turn, uploads: Mapping[str, Message], at_fault: Faults
) -> tuple[Sitting, dict[str, PartsongError]]:
    """`begin` at the own parties that are well, and the errors of those that turn out not to be."""
    reduction, aggregation = seat.reduction, seat.program.aggregation
    present = tuple(name for name in turn.asked if name not in at_fault)
    occasion = Occasion(turn.point.index, present, seat.layout, turn.point.model)

    def begin(name: str) -> State:
        with named(name, "reduction", occasion.index):
            return reduction.begin(desk.parties[name], uploads[name], aggregation, occasion)

    names = [name for name in uploads if name not in at_fault]
    try:
        states, faults = _visited(seat, begin, names, WAYS_ON if turn.fixed is None else WAYS_ON_WITH_ALL)
    except TooFewParties as error:
        note_left_out(error, at_fault)
        raise
    silent, entered = seat.schedule.silent.get(occasion.index, {}), {name: uploads[name] for name in states}
    return Sitting(seat.communicator, reduction, aggregation, occasion, entered, states, silent), faults


def _opening(seat: Seat, desk: Desk, sitting: Sitting) -> Offer | Addend:
    aggregation = sitting.aggregation
    if seat.sums == ALL_REDUCE and isinstance(aggregation, Reducible):
        return addend(sitting, aggregation)
    return offered(sitting, first_phase(sitting, desk.server))


def _concluded(seat: Seat, desk: Desk, sitting: Sitting, opening: Offer | Addend, cards: Sequence[Card]) -> Total:
    if isinstance(opening, Addend):
        assert isinstance(sitting.aggregation, Reducible)
        total = all_reduced(sitting, sitting.aggregation, opening, cards, seat.homes)
        if total is not None:
            return total
        opening = offered(sitting, first_phase(sitting, desk.server))
        cards = agree(seat.communicator, opening.card)
    return in_order(sitting, desk.server, opening, cards)


def _told_faults(seat: Seat, turn: Turn, faults: Faults) -> dict[str, PartsongError]:
    """Everybody's faults; sent: for each such party its name, and the kind and message of its error."""
    told = [{name: as_text(error) for name, error in some.items()} for some in (turn.missing, faults)]
    heard = [json.loads(text) for text in share(seat.communicator, json.dumps(told))]
    late, ill = (
        {name: from_text(*pair) for name, pair in sorted(pair for one in heard for pair in one[i].items())}
        for i in range(2)
    )
    everyone = {**late, **ill}
    if everyone.keys() >= set(turn.asked):
        error = nobody_left({name: everyone[name] for name in turn.asked}, turn.point.index)
        error.__cause__ = everyone[turn.asked[0]]
        raise Ended(error)
    return everyone


def _norm(seat: Seat, model: Message) -> float:
    """A number that tells models apart: √Σ‖array‖²; of no use to a rank alone."""
    if seat.communicator.size == 1:
        return 0.0
    arrays = model.arrays.values()
    norms = [array.double().norm() if hasattr(array, "double") else np.linalg.norm(array) for array in arrays]
    return math.hypot(*map(float, norms))


def _check_drift(seat: Seat, point: Checkpoint, norms: Sequence[float]) -> None:
    apart = max(norms) - min(norms)
    if apart > DRIFT.get(seat.layout.dtype, 1e-3) * max(norms):
        shown = ", ".join(f"{norm:.6g} at rank {rank}" for rank, norm in enumerate(norms))
        raise Ended(
            PartyError(
                f"Before round {point.index} the ranks hold different models (norms: {shown}), although each had the "
                "same sums. Resume all ranks from checkpoints of one run, on machines of one kind."
            )
        )


# ---- ranks ------------------------------------------------------------------------------------------------------
#
# The loop that every rank runs: `local` at its own shards, the reduction with rank 0 as server, `finish` everywhere.
#
# In each round, between ranks (what parties send and hear is counted as in every other engine):
#
#     for each phase of the reduction
#         everybody → everybody: a card (49 bytes): all is well, or not; how many bytes follow; the norm of the model
#         rank p → rank 0:       the phase's messages of p's parties
#         rank 0 → everybody:    the server's answer; after the last phase the aggregate instead, with the names in it
# and
#                                the bytes that each party has sent
#
# and `finish` turns the same aggregate into the same model at every rank, so that no model has to be sent. Never sent:
# a
# shard, its secret, a party's state, what a reduction keeps.


def run_ranks(
    communicator: Communicator,
    program: Program,
    shards: Sequence[Shard],
    schedule: Schedule,
    reduction: Reduction,
    resume: Checkpoint | None,
    sums: str = IN_ORDER,
    record: bool = False,
) -> Iterator[Round]:
    """Yield one Round after another, the same at every rank but for checkpoints and seconds.

    An error at any rank is raised at all. A caller that leaves its loop at one rank ends it at all, after that round.
    """
    try:
        if sums not in (IN_ORDER, ALL_REDUCE):
            raise ParameterError(f'sums must be "{IN_ORDER}" or "{ALL_REDUCE}"; got {sums!r}.')
        seat = _seated(communicator, program, shards, schedule, reduction, resume, sums, record)
        point = _begun(seat, resume)
        del resume
        desk = Desk({name: reduction.enrol(name, s.secret, seat.layout) for name, s in seat.shards.items()})
        while point.index < schedule.rounds:
            done = one_round(seat, desk, point)
            point = done.checkpoint
            try:
                yield done
            except GeneratorExit:
                if point.index < schedule.rounds:
                    leave(communicator)
                return
            del done
    except Ended as end:
        if end.error is not None:
            raise end.error from None
    except BaseException as error:
        tell(communicator, error)
        raise


def _seated(
    communicator: Communicator,
    program: Program,
    shards: Sequence[Shard],
    schedule: Schedule,
    reduction: Reduction,
    resume: Checkpoint | None,
    sums: str,
    record: bool,
) -> Seat:
    others = {"reduction": reduction, "sums": sums, "resume": 0 if resume is None else resume.index}
    roll = call_the_roll(communicator, program, shards, schedule, others)
    expected = stated_by(program, roll.layout)
    check_together(program, reduction, expected)
    if sums == ALL_REDUCE:
        check_that_sums_suffice(program.aggregation, reduction)
    schedule.check(roll.layout.parties)
    own = {shard.name: shard for shard in shards}
    return Seat(communicator, program, own, schedule, roll.layout, roll.homes, reduction, expected, sums, record)


def _begun(seat: Seat, resume: Checkpoint | None) -> Checkpoint:
    """The first point; of a checkpoint of several ranks' parties, what belongs to others is let go."""
    if resume is None:
        return Checkpoint(0, {}, *seat.program.start_server(seat.layout))
    elsewhere = seat.homes.keys() - seat.shards.keys()
    return replace(resume, parties={name: s for name, s in resume.parties.items() if name not in elsewhere})
