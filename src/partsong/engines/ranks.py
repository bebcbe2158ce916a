"""The loop that every rank runs: `local` at its own shards, the reduction with rank 0 as server, `finish` everywhere.

In each round, between ranks (what parties send and hear is counted as in every other engine):

    for each phase of the reduction
        everybody → everybody: a card (49 bytes): all is well, or not; how many bytes follow; the norm of the model
        rank p → rank 0:       the phase's messages of p's parties
        rank 0 → everybody:    the server's answer; after the last phase the aggregate instead, with the names in it and
                               the bytes that each party has sent

and `finish` turns the same aggregate into the same model at every rank, so that no model has to be sent. Never sent: a
shard, its secret, a party's state, what a reduction keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from partsong.core import Checkpoint, Program, Reduction, Round, Schedule, Shard
from partsong.engines.agreement import Ended, leave, tell
from partsong.engines.boundary import check_together, stated_by
from partsong.engines.communicator import Communicator
from partsong.engines.rank_round import ALL_REDUCE, IN_ORDER, Seat, one_round
from partsong.engines.roll_call import call_the_roll
from partsong.engines.rounds import Desk
from partsong.engines.sums import check_that_sums_suffice
from partsong.errors import ParameterError


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
