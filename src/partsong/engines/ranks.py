"""The network over ranks: every rank runs the same rounds with its own shards, and rank 0 is also the server.

Sent between ranks in each round (what parties send and receive is counted as in every other engine):

    for each phase of the reduction
        all ranks → all ranks: a status card (49 bytes): errors, the number of bytes that follow, the norm of the model
        rank p → rank 0:       the phase's messages of p's parties
        rank 0 → all ranks:    the server's reply; after the last phase the aggregate instead, with the names in it
                               and the bytes that each party has sent

Alternatively, an all-reduce of Σ lift(upload) over the ranks replaces all phases of the plain reduction, for
aggregations that are sums. `finish` computes the same model from the same aggregate at every rank, so no model is sent.
Never sent: a shard, its secret, a party's state, what a reduction keeps.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np

from partsong.core.codec import array_types, decode, encode
from partsong.core.interfaces import (
    Aggregation,
    Answers,
    Ask,
    Checkpoint,
    Message,
    Point,
    Program,
    Reducible,
    Reduction,
    RoundAttempt,
    Schedule,
    Served,
    Shard,
    State,
)
from partsong.engines.collective import (
    Communicator,
    RunEnded,
    StatusCard,
    all_gather_status,
    all_gather_text,
    broadcast_error,
    error_from_text,
    error_to_text,
    leave,
    run_on_rank_0,
)
from partsong.engines.consistency import agree_on_run
from partsong.engines.local import LocalParties, to_point
from partsong.engines.rounds import CallerError, Rounds, run_rounds
from partsong.errors import CompositionError, ParameterError, PartsongError, PartyError

IN_ORDER, ALL_REDUCE = "in order", "all-reduce"

MAX_DRIFT = {"float64": 1e-6}
"""Largest relative difference between the norms of the ranks' models; 1e-3 for other number types."""

SUMMABLE = ("float32", "float64")
"""Number types that every transport can add."""


def run_ranks(
    communicator: Communicator,
    program: Program,
    shards: Sequence[Shard],
    schedule: Schedule,
    reduction: Reduction,
    resume: Checkpoint | None,
    reduce: str = IN_ORDER,
    record: bool = False,
) -> Rounds:
    """Return the rounds of a run, which are the same at every rank except for checkpoints and seconds.

    An error at any rank is raised at all. A caller that leaves its loop at one rank ends the run at all, after that
    round.
    """
    network = Ranks(communicator, program, shards, schedule, reduction, resume, reduce)
    point = None if resume is None else to_point(resume)
    return Rounds(run_rounds(program, network, schedule, reduction, point, record))


class Ranks:
    """The network of all ranks; `shards` are those of this rank, and `reduce` is how uploads are added.

    `seen` returns what all parties sent at rank 0, what the own parties sent elsewhere, and nothing of an all-reduce.
    """

    def __init__(
        self,
        communicator: Communicator,
        program: Program,
        shards: Sequence[Shard],
        schedule: Schedule,
        reduction: Reduction,
        resume: Checkpoint | None,
        reduce: str = IN_ORDER,
    ) -> None:
        self._communicator, self._reduction, self._reduce = communicator, reduction, reduce
        self._settings = program, tuple(shards), schedule
        self._start, self._states = (0, {}) if resume is None else (resume.index, dict(resume.parties))
        self._seen: dict[str, Message] = {}
        self._answered: Answers | None = None
        self._is_over = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Check that all settings agree. An error, or a rank that leaves its loop, ends the run at all ranks."""
        try:
            self._join()
            yield
        except RunEnded as end:
            if end.error is not None:
                raise end.error from None
        except CallerError as left:
            if not self._is_over:
                broadcast_error(self._communicator, left.as_fault(self._communicator.rank))
            raise
        except GeneratorExit:
            if not self._is_over:
                leave(self._communicator)
            raise
        except BaseException as error:
            broadcast_error(self._communicator, error)
            raise

    def _join(self) -> None:
        program, shards, schedule = self._settings
        if self._reduce not in (IN_ORDER, ALL_REDUCE):
            raise ParameterError(
                f'reduce must be "{IN_ORDER}" or "{ALL_REDUCE}"; got {self._reduce!r}.', parameter="reduce"
            )
        others = {"reduction": self._reduction, "reduce": self._reduce, "resume": self._start}
        placement = agree_on_run(self._communicator, program, shards, schedule, others)
        self.layout, self._homes = placement.layout, placement.homes
        if self._reduce == ALL_REDUCE:
            require_plain_sums(program.aggregation, self._reduction)
        elsewhere = self._homes.keys() - {shard.name for shard in shards}
        known = {name: state for name, state in self._states.items() if name not in elsewhere}
        self._parties = LocalParties(program, shards, schedule, self._reduction, self.layout, known)
        self._states = {}

    def open(self, attempt: RoundAttempt, first: Callable[[tuple[str, ...]], int]) -> RoundAttempt:
        """Return the attempt with rank 0's first phase, which is sent if the reduction has several phases."""
        if self._reduction.phases == 1:
            return attempt
        phase = first(attempt.asked) if self._communicator.rank == 0 else 0
        return replace(attempt, first=all_gather_status(self._communicator, StatusCard(first=phase))[0].first)

    def exchange(self, ask: Ask, serve: Callable[[Answers], Served]) -> Served:
        """Send the answers of all ranks to rank 0, and its result to all."""
        communicator, own = self._communicator, self._answered or self._answer(ask)
        self._answered = None
        parcel = encode(dict(own.messages)) if communicator.rank > 0 else b""
        cards = self._agree(ask, StatusCard(size=len(parcel), faults=len(own.faults)))
        faults = self._all_faults(own) if any(card.faults for card in cards) else {}
        inbox = dict(own.messages)
        for other in communicator.gather(parcel, [card.size for card in cards])[1:]:
            inbox.update(decode(other, device=communicator.device))
        answers = Answers({name: inbox[name] for name in ask.names if name in inbox}, faults)
        here: list[Served] = []

        def work() -> tuple[Mapping[str, Message], list[object]]:
            here.append(serve(answers))
            return _encode_served(here[0])

        messages, note = run_on_rank_0(communicator, work)
        served = here[0] if here else _decode_served(messages[""], note)
        self._seen = dict(answers.messages)
        if ask.phase + 1 == self._reduction.phases and not served.must_restart:
            self._parties.end_sum()
        return served

    def sum(self, ask: Ask, aggregation: Aggregation) -> Served | None:
        """Sum by all-reduce; return None if a party is faulty, or a rank has nothing to add or differing arrays."""
        if self._reduce != ALL_REDUCE or not isinstance(aggregation, Reducible):
            return None
        communicator, own = self._communicator, self._answer(ask)
        self._answered = own  # for `exchange`, if there is no all-reduce
        total, card = self._addend(own, aggregation)
        cards = self._agree(ask, card)
        if any(other.faults or not other.form or other.form != card.form for other in cards):
            return None
        sums = {name: communicator.sum(total[name]) for name in sorted(total.arrays)}
        weight = float(communicator.sum(np.array([float(total.weight)]))[0])
        aggregate = aggregation.lower(Message({name: sums[name] for name in total.arrays}, weight))
        names = tuple(name for name in ask.names if name not in ask.dropouts)
        self._parties.end_sum()
        return Served(
            aggregate, names, ask.names, sizes={name: cards[self._homes[name]].upload_bytes for name in names}
        )

    def _answer(self, ask: Ask) -> Answers:
        if ask.kind == "work" and ask.attempt == 0:
            self._parties.start(ask.index, ask.error_note)
        return self._parties.answer(ask)

    def _addend(self, own: Answers, aggregation: Reducible) -> tuple[Message, StatusCard]:
        """Return Σ lift(upload) over the own parties, and its status card; uploads of different sizes have no form."""
        for name, message in own.messages.items():
            work = self._parties.states[name].work
            if work is None or message is not work.upload:
                raise CompositionError(
                    f"{type(self._reduction).__name__} sends something other than the upload, which an all-reduce "
                    'would ignore. Use reduce="in order".',
                    parameter="reduce",
                )
        uploads, sizes = own.messages.values(), {message.nbytes for message in own.messages.values()}
        total = reduce(_add, map(aggregation.lift, uploads)) if uploads else Message({})
        form = _checksum(total) if len(sizes) == 1 else 0
        return total, StatusCard(upload_bytes=max(sizes, default=0), form=form, faults=len(own.faults))

    def _agree(self, ask: Ask, card: StatusCard) -> list[StatusCard]:
        """Exchange status cards; at the start of a round they also show whether the ranks' models agree."""
        if ask.kind == "reduce":
            return all_gather_status(self._communicator, card)
        norm = _norm(ask.message) if self._communicator.size > 1 else 0.0
        cards = all_gather_status(self._communicator, replace(card, norm=norm))
        self._check_drift(ask.index, [card.norm for card in cards])
        return cards

    def _all_faults(self, own: Answers) -> dict[str, PartsongError]:
        """Return the faults of all ranks. Sent: for each faulty party its name, and its error's class and message."""
        texts = all_gather_text(
            self._communicator, json.dumps({name: error_to_text(error) for name, error in own.faults.items()})
        )
        pairs = sorted(pair for text in texts for pair in json.loads(text).items())
        return {name: own.faults.get(name) or error_from_text(*fault) for name, fault in pairs}

    def _check_drift(self, index: int, norms: Sequence[float]) -> None:
        apart = max(norms) - min(norms)
        if apart > MAX_DRIFT.get(self.layout.dtype, 1e-3) * max(norms):
            shown = ", ".join(f"{norm:.6g} at rank {rank}" for rank, norm in enumerate(norms))
            raise RunEnded(
                PartyError(
                    f"Before round {index} the ranks hold different models (norms: {shown}), although each received "
                    "the same sums. Resume all ranks from checkpoints of one run, on machines of one kind."
                )
            )

    def seen(self) -> Mapping[str, Message]:
        """Return what all parties sent, at rank 0, or what the own ones sent."""
        seen, self._seen = self._seen, {}
        return seen

    def commit(self, after: Point, worked: tuple[str, ...], is_last: bool) -> Mapping[str, State]:
        """Return the states of the own parties. After the last round, ranks exchange status cards once more."""
        if is_last:
            all_gather_status(self._communicator, StatusCard())
            self._is_over = True
        return self._parties.finish_round(worked)


def require_plain_sums(aggregation: Aggregation, reduction: Reduction) -> None:
    """Raise CompositionError unless one sum of lifted uploads is enough."""
    way_out = 'Use reduce="in order".'
    if not isinstance(aggregation, Reducible):
        kind = type(aggregation).__name__
        raise CompositionError(f"{kind} reads individual uploads, which an all-reduce does not provide. {way_out}")
    if reduction.phases != 1 or reduction.hides_uploads:
        raise CompositionError(f"An all-reduce cannot replace {type(reduction).__name__}. {way_out}")


def _encode_served(served: Served) -> tuple[Mapping[str, Message], list[object]]:
    faults = {name: error_to_text(error) for name, error in served.faults.items()}
    names = [list(served.included), list(served.worked)]
    return {"": served.message}, [*names, faults, dict(served.sizes), served.reply_bytes, served.must_restart]


def _decode_served(message: Message, note: Sequence[Any]) -> Served:
    included, worked, faults, *others = note
    errors = {name: error_from_text(*fault) for name, fault in faults.items()}
    return Served(message, tuple(included), tuple(worked), errors, *others)


def _add(a: Message, b: Message) -> Message:
    sums = {
        name: (array + b[name])[...] for name, array in a.arrays.items()
    }  # [...] keeps 0-d arrays, which NumPy would turn into scalars
    return Message(sums, a.weight + b.weight)


def _checksum(total: Message) -> int:
    """Return a checksum of names, shapes and number types, never 0; 0 if a transport may be unable to add an array."""
    described = list(array_types(total.arrays))
    is_summable = all(kind in SUMMABLE for _, _, kind, _, _ in described)
    return zlib.crc32(repr(described).encode()) | 1 << 32 if is_summable else 0


def _norm(model: Message) -> float:
    """Return √Σ‖array‖², which differs between different models; a single rank does not need it."""
    arrays = model.arrays.values()
    norms = [array.double().norm() if hasattr(array, "double") else np.linalg.norm(array) for array in arrays]
    return math.hypot(*map(float, norms))
