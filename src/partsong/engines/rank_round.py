"""One round at one rank: `local` at its own shards, a sum over all ranks, `finish`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from partsong import threads
from partsong.core import (
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
from partsong.engines.agreement import Card, Ended, agree, as_text, from_text, share
from partsong.engines.boundary import Expected, check_sum, check_upload
from partsong.engines.communicator import Communicator
from partsong.engines.company import KEPT_OUT, WAYS_ON_WITH_ALL, Company, fixed_company, require_company
from partsong.engines.rounds import WAYS_ON, Desk, Faults, Worked, named, nobody_left, note_left_out
from partsong.engines.sums import Addend, Offer, Sitting, Total, addend, all_reduced, first_phase, in_order, offered
from partsong.errors import PartsongError, PartyError, TooFewParties

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
    with threads.kernels_on(schedule.kernel_threads):
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
