"""Laws of party-level privacy: only clipped, noisy, counted releases leave a party."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Layout, Message, Schedule, Shard
from partsong.data.conversion import as_matrix
from partsong.engines.local import Parallel, Sequential
from partsong.errors import BudgetSpent, CompositionError, DivergenceError, ParameterError, PartyError, ShapeError
from partsong.evaluation.metrics import relative_error
from partsong.methods import build
from partsong.methods.averaging import LocalAveraging
from partsong.methods.private import PrivateAveraging, _row_norms, party_private, system_noise
from partsong.privacy.accounting import Ledger
from partsong.privacy.mechanisms import ClippedGaussian, ClippedLaplace, KeepAll
from partsong.privacy.randomness import InsecureSource
from partsong.solvers.game import ConstantStep, Game

RANK, COLUMNS, ROUNDS = 3, 12, 4
RECIPES = {
    "fedavg": build("fedavg", RANK, local_steps=10),
    "fedprox": build("fedprox", RANK),
    "fnmf": build("fnmf-local", RANK, local_steps=5, align="assignment"),
    "fnmf, common start": build("fnmf-local", RANK, local_steps=5, init_mode="shared", align="assignment"),
    "ipalm once": build("one-shot-ipalm", RANK, local_steps=20),
    "mur once": build("one-shot-mu", RANK, local_steps=20),
    "syn-sd": build("syn-sd", RANK),
    "game": build("game-consensus", RANK),
}


def insecure(party, release):
    return InsecureSource(7, party, release)


def shards(factor=1.0, parties=4, seed=0):
    draw = np.random.default_rng(seed)
    H = draw.random((RANK, COLUMNS)) * (draw.random((RANK, COLUMNS)) < 0.6) + 0.01
    held = [factor * draw.random((10 * (p + 1), RANK)) @ H for p in range(parties)]
    return [Shard(f"p{p}", as_matrix(X), p) for p, X in enumerate(held)]


def private(name, multiplier=1.0, clip=0.5, most=ROUNDS, kind=ClippedGaussian):
    return PrivateAveraging(RECIPES[name], kind(clip, multiplier), most, insecure)


def rounds_of(program, engine=None, rounds=ROUNDS, of=None):
    engine = engine or Sequential(record=True)
    return list(engine.run(program, of or shards(), Schedule(rounds, 1), reduction=PlainReduction()))


@pytest.mark.parametrize("kind", [ClippedGaussian, ClippedLaplace])
@pytest.mark.parametrize("name", RECIPES)
def test_nothing_but_a_noisy_H_leaves_and_the_weight_says_nothing(name, kind):
    for done in rounds_of(private(name, kind=kind)):
        assert done.metrics == {}
        for _, _, message in done.traffic:
            assert set(message.arrays) == {"H"}
            assert message.weight == 1.0
            assert message["H"].shape == (RANK, COLUMNS)
        assert (done.model["H"] >= 0).all()


def test_noise_averages_out_over_parties():
    """Cut off at the party it would not: of many parties with nothing to say the mean is the model they were sent."""
    program = replace(private("fedavg"), mechanism=ClippedGaussian(1e-3, 300.0), source=system_noise)
    shard, layout = shards()[0], Layout.of(shards(), 1)
    _, model = program.start_server(layout)
    party = program.start_party(shard, layout)
    sent = np.mean([program.local(shard, party, model)[1]["H"] for _ in range(200)], axis=0)
    error = float(np.abs(sent - model["H"]).mean())
    assert error < 3 * program.mechanism.sigma / math.sqrt(200)


@pytest.mark.parametrize("name", RECIPES)
def test_models_have_rows_of_norm_one(name):
    for done in rounds_of(private(name)):
        assert_allclose(np.linalg.norm(done.model["H"], axis=1), 1.0, rtol=1e-12)


@pytest.mark.parametrize("name", ["fedavg", "fnmf", "game"])
def test_sequential_and_parallel_agree_to_the_bit(name):
    one, other = rounds_of(private(name)), rounds_of(private(name), Parallel(2))
    assert_array_equal(one[-1].model["H"], other[-1].model["H"])


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_before_the_noise_uploads_are_within_the_radius_whatever_the_data(factor):
    clip = 0.01
    faint = PrivateAveraging(RECIPES["fedavg"], ClippedGaussian(clip, 1e-4), ROUNDS, insecure)
    before = None
    for done in rounds_of(faint, of=shards(factor)):
        if before is not None:
            for _, _, message in done.traffic:
                assert np.linalg.norm(message["H"] - before) <= clip * 1.05
        before = done.model["H"]


def test_two_releases_of_a_party_have_their_own_noise():
    uploads = [m["H"] for done in rounds_of(private("fedavg", 50.0)) for name, _, m in done.traffic if name == "p0"]
    assert len(uploads) == ROUNDS
    assert all(not np.array_equal(a, b) for i, a in enumerate(uploads) for b in uploads[:i])
    again = PrivateAveraging(RECIPES["fedavg"], ClippedGaussian(0.5, 50.0), ROUNDS)
    first, second = (rounds_of(again, rounds=1)[0].traffic[0][2]["H"] for _ in range(2))
    assert not np.array_equal(first, second), "noise from the system is never the same twice, whatever the seed"


def test_a_spent_budget_stops_before_anything_is_computed():
    run = Sequential().run(private("fedavg", most=2), shards(), Schedule(3, 1), reduction=PlainReduction())
    next(run)
    done = next(run)
    assert [party.releases for party in done.checkpoint.parties.values()] == [2] * 4
    with pytest.raises(BudgetSpent, match=r"p0.*budget"):
        next(run)


def test_absent_parties_are_not_charged():
    schedule = Schedule(3, 1, absent={1: frozenset({"p2"})})
    *_, done = Sequential().run(private("fedavg"), shards(), schedule, reduction=PlainReduction())
    assert {name: party.releases for name, party in done.checkpoint.parties.items()} == {
        "p0": 3,
        "p1": 3,
        "p2": 2,
        "p3": 3,
    }


def test_the_ledger_of_a_run_is_that_of_its_releases():
    program = private("fedavg", 4.0)
    assert not program.release.is_secure, "its noise comes from a seed"
    assert party_private(RECIPES["fedavg"], epsilon=1.0, delta=1e-5, rounds=2).release.is_secure
    assert program.release.unit == "party"
    assert program.release.relation == "replace"
    assert Ledger().after(program.release, 10).epsilon(1e-5) == pytest.approx(3.3414, rel=1e-3)


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_the_recipe_spends_its_budget_and_no_more(kind):
    program = party_private(RECIPES["fedavg"], epsilon=2.0, delta=1e-5, rounds=5, kind=kind)
    spent = Ledger().after(program.release, program.max_releases).epsilon(1e-5)
    assert 0.99 * 2.0 <= spent <= 2.0


def test_with_hardly_any_noise_it_is_the_method_itself():
    faint = PrivateAveraging(RECIPES["fedavg"], ClippedGaussian(10.0, 1e-4), 30, insecure)
    found, held = rounds_of(faint, rounds=30), shards()
    error = relative_error(faint.solver, held, faint.components(found[-1].checkpoint.server))
    openly = rounds_of(RECIPES["fedavg"], rounds=30)
    plain = relative_error(faint.solver, held, RECIPES["fedavg"].components(openly[-1].checkpoint.server))
    assert error <= plain + 0.02


def test_a_run_that_goes_on_is_the_run_that_was_not_stopped():
    program, held = private("fnmf"), shards()
    whole = rounds_of(program)
    rest = Sequential().run(program, held, Schedule(ROUNDS, 1), reduction=PlainReduction(), resume=whole[1].checkpoint)
    assert_array_equal(list(rest)[-1].model["H"], whole[-1].model["H"])


def test_what_would_leave_without_noise_is_refused():
    with pytest.raises(CompositionError, match="counts"):
        PrivateAveraging(build("fnmf-by-sums", RANK), ClippedGaussian(1.0, 1.0), 3)
    with pytest.raises(CompositionError, match="no noise"):
        PrivateAveraging(RECIPES["fedavg"], KeepAll(), 3)
    with pytest.raises(ParameterError, match="no round"):
        PrivateAveraging(RECIPES["fedavg"], ClippedGaussian(1.0, 1.0), 0)


@pytest.mark.parametrize(
    "program", [build("syn-ssd-uv", RANK), build("exact", RANK, local_steps=5), build("game", RANK)]
)
def test_what_is_no_consensus_is_refused(program):
    with pytest.raises(CompositionError, match="no consensus"):
        party_private(program, epsilon=1.0, delta=1e-5, rounds=2)


@pytest.mark.parametrize("spoil", [np.nan, np.inf, -0.1, 1e200, 3.0])
def test_a_model_that_could_make_some_data_fail_is_refused_before_data_are_looked_at(spoil):
    """A server that sends numbers of its choice would learn from who fails, without noise and without being counted."""
    program, held = private("fnmf"), shards()
    _, model = program.start_server(Layout.of(held, 1))
    H = np.array(model["H"])
    H[1, 2] = spoil
    with pytest.raises(PartyError, match="unit norm"):
        program.local(held[0], program.start_party(held[0], Layout.of(held, 1)), Message({**model.arrays, "H": H}))
    with pytest.raises(ShapeError, match="shape"):
        program.local(held[0], program.start_party(held[0], Layout.of(held, 1)), Message({**model.arrays, "H": H[:2]}))


def test_an_error_that_leaves_a_party_holds_no_number_from_its_data():
    """Engines tell everybody why a party is left out; the reason of a game says in which sweep it diverged."""
    bare = LocalAveraging(RANK, game=Game(step=ConstantStep(10.0)))
    held, schedule = [*shards(1e-3)[:2], Shard("tall", as_matrix(1234.5 * shards()[2].matrix.X))], Schedule(1, 1)
    with pytest.raises(DivergenceError, match="range of floats"):
        list(Sequential().run(bare, held, schedule, reduction=PlainReduction()))
    told = set()
    for factor in (1.0, 7.0):
        grown = [*held[:2], Shard("tall", as_matrix(factor * held[2].matrix.X))]
        program = PrivateAveraging(bare, ClippedGaussian(1.0, 1.0), 3, insecure)
        with pytest.raises(DivergenceError, match="not told") as caught:
            program.local(
                grown[2],
                program.start_party(grown[2], Layout.of(grown, 1)),
                program.start_server(Layout.of(grown, 1))[1],
            )
        assert caught.value.__cause__ is not None
        told.add(str(caught.value))
    assert len(told) == 1


@pytest.mark.parametrize("factor", [1e-250, 1e-160, 1e160, 1e250])
def test_norms_are_right_where_no_float_holds_their_squares(factor):
    H = np.array([[3.0, 4.0], [0.0, 0.0]])
    assert_allclose(_row_norms(factor * H), [5 * factor, 1.0], rtol=1e-12)
