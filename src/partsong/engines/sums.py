"""Two ways from the uploads at all ranks to one aggregate at every rank.

In order: the reduction as it is written, with rank 0 as its server, which hears the parties in name order; any
reduction, any aggregation, and the same bits as in one process.

All-reduce: lower(Σ lift(upload)), added by the transport in an order of its own; it takes the place of the open
reduction, for aggregations that are sums. Sent: the arrays of Σ lift(upload) over a rank's own parties, and the weight.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import numpy as np

from partsong.core import Aggregation, Message, Occasion, Reducible, Reduction, State
from partsong.engines.agreement import Card, agree, at_the_server
from partsong.engines.communicator import Buffer, Communicator
from partsong.engines.parcels import forms, packed, unpacked
from partsong.engines.rounds import Traffic, named
from partsong.errors import CompositionError

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
