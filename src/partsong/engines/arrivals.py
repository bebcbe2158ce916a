"""What the server of an asynchronous run does with an upload: aggregate that one, finish, answer its sender alone.

One arrival is one Round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from partsong import threads
from partsong.core import Message, Round, State
from partsong.engines.agreement import as_text, from_text
from partsong.engines.boundary import check_sum
from partsong.engines.pieces import Midway, Piece, Terms
from partsong.engines.rounds import Desk, nobody_left
from partsong.errors import PartsongError


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
    with threads.kernels_on(terms.schedule.kernel_threads):
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
