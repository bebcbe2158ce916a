"""Laws of parties that come and go: stragglers, leavers, latecomers and rotation, for every program alike."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from partsong.aggregation.alignment import PartialAssignment
from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Schedule, Shard
from partsong.core.streams import key
from partsong.data.conversion import as_matrix
from partsong.engines.local import Parallel, Sequential
from partsong.methods import build
from partsong.methods.game import FederatedGame
from partsong.methods.two_stage import exact_after
from partsong.solvers.game import ConstantStep, Game

NAMES = ("p00", "p01", "p02", "p03", "p04")
ROUNDS = 6
PROGRAMS = {
    "exact": build("exact", 4, local_steps=5),
    "exact accelerated": build("exact", 4, accelerate=True, local_steps=5),
    "fedavg": build("fedavg", 4, local_steps=4),
    "fedavg independent": build("fedavg", 4, local_steps=4, init_mode="local"),
    "fedprox": build("fedprox", 4, local_steps=4),
    "fnmf paper": build("fnmf-local", 4, variant="paper", local_steps=4, align="assignment"),
    "fnmf robust": build("fnmf-local", 4, local_steps=4, align="assignment"),
    "fnmf partial": build(
        "fnmf-local",
        4,
        local_steps=4,
        client_align=PartialAssignment(),
        server_align=PartialAssignment(),
        align="assignment",
    ),
    "fnmf by sums": build("fnmf-by-sums", 4, local_steps=4),
    "fnmf by sums common": build("fnmf-by-sums", 4, local_steps=4, sweeps=3, init_mode="shared"),
    "fnmf, then exact": exact_after(build("fnmf-local", 4, local_steps=4, align="assignment"), 3),
    "syn-sd": build("syn-sd", 4, local_steps=4),
    "asyn-ssd-v": build("asyn-ssd-v", 4, local_steps=4),
    "game": build("game", 4),
    "game with a given step": FederatedGame(4, game=Game(step=ConstantStep(0.01))),
    "consensus of games": build("game-consensus", 4, local_steps=4),
}
WITHOUT_A_COUNT_OF_PARTIES = [name for name in PROGRAMS if name != "fnmf paper" and not name.startswith("game")]
"""The paper's start is a mean over as many draws as there are parties, so those who never come count in it; games deal
out the columns among all parties.
"""


def everyone_but(*present):
    return frozenset(NAMES) - set(present)


PATTERNS = {
    "stragglers": {1: frozenset({"p01"}), 3: frozenset({"p01", "p03"}), 4: frozenset({"p00"})},
    "one leaves": {index: frozenset({"p04"}) for index in range(2, ROUNDS)},
    "two come late": {index: frozenset({"p02", "p03"}) for index in range(3)},
    "rotation": {index: everyone_but(NAMES[index % 5], NAMES[(index + 1) % 5]) for index in range(ROUNDS)},
    "one at a time": {index: everyone_but(NAMES[index % 5]) for index in range(ROUNDS)},
}


def shards_of(names=NAMES):
    rng = np.random.default_rng(0)
    H = rng.gamma(0.3, size=(4, 16))
    rows = {name: rng.gamma(0.5, size=(12 + 3 * i, 4)) @ H + 0.02 * rng.random(16) for i, name in enumerate(NAMES)}
    return [Shard(name, as_matrix(rows[name]), key(7, name)) for name in names]


def run(program, shards, rounds=ROUNDS, engine=Sequential(), resume=None, **more):
    return list(engine.run(program, shards, Schedule(rounds, 3, **more), reduction=PlainReduction(), resume=resume))


def same_models(some, others):
    for one, other in zip(some, others, strict=True):
        assert_array_equal(one.model["H"], other.model["H"])
        assert one.participants == other.participants


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_whoever_comes_there_is_a_model_and_engines_and_resumed_runs_agree_on_it(name, pattern):
    program, absent, before = PROGRAMS[name], PATTERNS[pattern], None
    rounds = run(program, shards_of(), absent=absent)
    for done in rounds:
        missing = absent.get(done.index, frozenset())
        assert done.participants == tuple(sorted(set(NAMES) - missing))
        assert np.isfinite(done.model["H"]).all()
        assert (done.model["H"] >= 0).all()
        assert done.model["H"].any()
        for party in missing if before is not None else ():
            assert done.checkpoint.parties[party] is before.checkpoint.parties[party]
        before = done
    same_models(rounds, run(program, shards_of()[::-1], engine=Parallel(3), absent=absent))
    for middle in (1, 3):
        same_models(rounds[middle:], run(program, shards_of(), absent=absent, resume=rounds[middle - 1].checkpoint))


@pytest.mark.parametrize("name", WITHOUT_A_COUNT_OF_PARTIES)
def test_a_party_that_never_comes_is_not_there(name):
    never = {index: frozenset({"p02"}) for index in range(ROUNDS)}
    present = [party for party in NAMES if party != "p02"]
    same_models(run(PROGRAMS[name], shards_of(), absent=never), run(PROGRAMS[name], shards_of(present)))


@pytest.mark.parametrize("name", WITHOUT_A_COUNT_OF_PARTIES)
def test_a_party_may_join_a_run_that_has_begun_without_it(name):
    """Nobody had to know of it before: as if it had been there and absent."""
    absent = {index: frozenset({"p02"}) for index in range(3)}
    known = run(PROGRAMS[name], shards_of(), absent=absent)
    before = run(PROGRAMS[name], shards_of([party for party in NAMES if party != "p02"]), 3)
    same_models(known, before + run(PROGRAMS[name], shards_of(), resume=before[-1].checkpoint))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_party_may_leave_for_good_and_come_back(name):
    """Its shard is taken away, its last state stays in the checkpoint."""
    away = {index: frozenset({"p04"}) for index in (2, 3)}
    known = run(PROGRAMS[name], shards_of(), absent=away)
    all_here = run(PROGRAMS[name], shards_of(), 2)
    without = run(PROGRAMS[name], shards_of(NAMES[:4]), 4, resume=all_here[-1].checkpoint)
    again = run(PROGRAMS[name], shards_of(), resume=without[-1].checkpoint)
    same_models(known, all_here + without + again)


@pytest.mark.parametrize("variant", ["robust", "paper"])
def test_latecomers_begin_from_the_model_that_there_is(variant):
    program = build("fnmf-local", 4, variant=variant, local_steps=1, align="assignment")
    late = Schedule(9, 3, absent={index: frozenset({"p02", "p03"}) for index in range(8)})
    rounds = list(Sequential().run(program, shards_of(), late, reduction=PlainReduction()))
    model, joined = rounds[-2].model["H"], rounds[-1].checkpoint.parties
    for name in ("p02", "p03"):
        own = joined[name].Ht.T
        assert np.linalg.norm(own - model) < 0.5 * np.linalg.norm(model), "one step from the model, not from a draw"
