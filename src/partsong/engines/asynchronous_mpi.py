"""Asynchronous runs over MPI: `mpiexec -n 3 python -m mpi4py …` is a server and two workers.

Between ranks, in the beginning: the agreement of all ranks on settings, and the names and widths of the parties. Then

    rank p → rank 0:  a party's upload
    rank 0 → rank p:  the model that it is answered with, its number, and what the server's metrics are

and in the end, to all ranks, the server's model and state. Never sent: a shard, its secret, a party's state, what a
reduction keeps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from partsong.core import Checkpoint, Layout, Program, Reduction, Round, Schedule, Shard, type_name
from partsong.engines.agreement import Card, Ended, agree, share, tell
from partsong.engines.asynchronous_server import Seat, serve
from partsong.engines.asynchronous_worker import work
from partsong.engines.communicator import Communicator
from partsong.engines.mpi import Mpi
from partsong.engines.pieces import agreed_terms, begun, started
from partsong.engines.post import MpiPost, Post
from partsong.engines.roll_call import Attendance, call_the_roll
from partsong.errors import ParameterError, PartsongError


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
    process. An error at any rank is raised at all, and a caller that raises in its own loop at one rank is a PartyError
    at the others. A caller that breaks out of its loop ends the run at all ranks, and the workers' Endings name its
    rank. If you keep the rounds in a variable, close them: `with contextlib.closing(engine.run(…)) as rounds`. `record`
    keeps what parties sent.
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
