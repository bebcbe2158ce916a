"""Laws of one program after another."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from pairwise_masks import PairwiseMasks

from partsong import FederatedNMF
from partsong.aggregation.alignment import Assignment
from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Checkpoint, Layout, Reducible, Schedule, Shard
from partsong.core.streams import key
from partsong.data.conversion import as_matrix
from partsong.engines.local import Sequential
from partsong.errors import CompositionError, ParameterError
from partsong.evaluation.metrics import compute_drift, relative_error
from partsong.io.state_file import read_state, write_state
from partsong.methods import build
from partsong.methods.private import party_private
from partsong.methods.two_stage import exact_after
from partsong.solvers.squared_error import RowState
from partsong.training.simulation import SimulationMeasures, party_components

STAGE = 3
FIRST = {
    "fnmf": build("fnmf-local", 4, local_steps=10, align="assignment"),
    "fnmf common": build("fnmf-local", 4, local_steps=10, init_mode="shared", align="assignment"),
    "fedavg": build("fedavg", 4, local_steps=10, init_mode="local"),
    "by sums": build("fnmf-by-sums", 4, local_steps=10),
}


def shards_of(parties=4):
    rng = np.random.default_rng(1)
    H = rng.gamma(0.3, size=(4, 24))
    rows = [rng.gamma(0.5, size=(15 + 5 * i, 4)) @ H + 0.05 * rng.random((15 + 5 * i, 24)) for i in range(parties)]
    return [Shard(f"p{i}", as_matrix(X), key(7, i)) for i, X in enumerate(rows)]


def run(program, shards, rounds, reduction=PlainReduction(), **more):
    return list(Sequential().run(program, shards, Schedule(rounds, 3), reduction=reduction, **more))


@pytest.mark.parametrize("name", FIRST)
def test_the_first_leg_is_the_first_program_and_the_second_starts_where_it_ended(name):
    shards, first = shards_of(), FIRST[name]
    relay = exact_after(first, STAGE)
    whole, alone = run(relay, shards, STAGE + 4), run(first, shards, STAGE)
    for one, other in zip(whole[:STAGE], alone, strict=True):
        assert_allclose(relay.components(one.checkpoint.server), first.components(other.checkpoint.server), rtol=0)
    H = first.components(alone[-1].checkpoint.server)
    exact = relay.second
    server, model = exact.start_from(np.ascontiguousarray(H.T))
    parties = {s.name: RowState(exact.solver.solve_rows(s.matrix, np.ascontiguousarray(H.T))) for s in shards}
    rest = run(exact, shards, 4, resume=Checkpoint(0, parties, server, model))
    for one, other in zip(whole[STAGE:], rest, strict=True):
        assert_array_equal(one.model["H"], other.model["H"])
        assert one.metrics == other.metrics


@pytest.mark.parametrize("name", FIRST)
def test_exact_rounds_never_lose_what_the_first_leg_has_won(name):
    shards = shards_of()
    relay = exact_after(FIRST[name], STAGE)
    rounds = run(relay, shards, STAGE + 12)
    handed_over = relay.components(rounds[STAGE - 1].checkpoint.server)
    errors = [
        relative_error(relay.solver, shards, handed_over),
        *(done.metrics["relative_error"] for done in rounds[STAGE:]),
    ]
    assert min(errors[1:]) < errors[0]
    assert errors[1] <= errors[0] * (1 + 1e-9)


def test_a_relay_of_sums_is_a_sum_and_can_be_masked():
    shards, relay = shards_of(), exact_after(FIRST["by sums"], STAGE)
    assert isinstance(relay.aggregation, Reducible)
    assert not isinstance(exact_after(FIRST["fnmf"], STAGE).aggregation, Reducible)
    for one, other in zip(run(relay, shards, 7), run(relay, shards, 7, PairwiseMasks()), strict=True):
        assert_allclose(one.model["H"], other.model["H"], rtol=1e-6, atol=1e-9)


def test_a_run_goes_on_from_a_file_in_either_leg(tmp_path):
    shards, relay = shards_of(), exact_after(FIRST["fnmf"], STAGE)
    whole = run(relay, shards, STAGE + 3)
    for stop in (1, STAGE - 1, STAGE, STAGE + 1):
        write_state(tmp_path / "c.safetensors", whole[stop].checkpoint)
        point = read_state(tmp_path / "c.safetensors")
        for party, H in party_components(whole[stop].checkpoint).items():
            assert_array_equal(party_components(point)[party], H)
        rest = run(relay, shards, STAGE + 3, resume=point)
        for one, other in zip(whole[stop + 1 :], rest, strict=True):
            assert_array_equal(one.model["H"], other.model["H"])


def test_only_the_leg_is_added_to_what_is_broadcast():
    shards = shards_of()
    relay, first = exact_after(FIRST["fnmf"], STAGE), FIRST["fnmf"]
    layout = Layout.of(shards, 3)
    assert relay.start_server(layout)[1].nbytes == first.start_server(layout)[1].nbytes + 1
    legs = [int(done.model["leg"][0]) for done in run(relay, shards, STAGE + 2)]
    assert legs == [0] * (STAGE - 1) + [1] * 3


def test_legs_that_do_not_fit_are_refused():
    with pytest.raises(ParameterError, match="rounds ≥ 1"):
        exact_after(build("fnmf-local", 4, align="assignment"), 0)
    from partsong.methods.two_stage import TwoStageProgram

    with pytest.raises(ParameterError, match="same rank"):
        TwoStageProgram(build("fnmf-local", 4, align="assignment"), build("exact", 5, local_steps=5), 2)


def test_an_estimator_runs_a_relay_to_convergence():
    parts = [shard.matrix.X for shard in shards_of()]
    relay = exact_after(FIRST["fnmf"], STAGE)
    model = FederatedNMF(method=relay, random_state=3, rounds=200, tol=1e-6).fit(parts)
    pooled = FederatedNMF(4, method="exact", random_state=3, rounds=400, tol=1e-8).fit([np.concatenate(parts)])
    assert model.relative_error_ <= pooled.relative_error_ * 1.02
    assert model.n_iter_ > STAGE
    assert np.isfinite([row.aligned_drift for row in model.history_]).all()


@pytest.mark.parametrize("name", FIRST)
def test_parties_keep_what_they_had_found_themselves(name):
    shards, relay = shards_of(), exact_after(FIRST[name], STAGE)
    rounds = run(relay, shards, STAGE + 3)
    found = party_components(rounds[STAGE - 1].checkpoint)
    assert set(found) == {shard.name for shard in shards}
    for done in rounds[STAGE:]:
        for party, H in party_components(done.checkpoint).items():
            assert_array_equal(H, found[party])
        states = done.checkpoint.parties.values()
        assert all(state.own.shape == (24, 4) and isinstance(state.inner, RowState) for state in states), (
            "one m × k more"
        )
    drifts = [SimulationMeasures(relay, ()).drift(done) for done in rounds[STAGE:]]
    for done, drift in zip(rounds[STAGE:], drifts, strict=True):
        H = relay.components(done.checkpoint.server)
        expected = compute_drift(list(found.values()), H)
        assert drift == pytest.approx(np.array([expected.regular, expected.aligned]) / np.square(H).sum())


def test_a_party_that_comes_in_the_second_leg_alone_has_found_nothing():
    shards, relay = shards_of(), exact_after(FIRST["fnmf"], STAGE)
    schedule = Schedule(STAGE + 2, 3, absent={i: frozenset({"p1"}) for i in range(STAGE)})
    last = list(Sequential().run(relay, shards, schedule, reduction=PlainReduction()))[-1]
    assert set(party_components(last.checkpoint)) == {"p0", "p2", "p3"}


def test_the_estimator_tells_what_parties_had_found():
    parts = dict(zip("abcd", (shard.matrix.X for shard in shards_of()), strict=True))
    settings = {"method": "fnmf", "random_state": 3, "tol": 0.0, "local_steps": 20}
    brief, long = (FederatedNMF(4, rounds=n, **settings).fit(parts) for n in (1, 12))
    for party in parts:
        P, own = long.alignments_[party], long.party_components_[party]
        assert np.abs(own - long.components_).max() > 1e-3
        assert_array_equal(P, Assignment(unit=True).plan(long.components_, own).matrix)
        there = brief.party_components_[party]
        assert_allclose(own, there / np.linalg.norm(there, axis=1, keepdims=True), rtol=1e-9, atol=1e-12)


def test_a_private_leg_is_refused():
    private = party_private(build("fedavg", 3, local_steps=10), epsilon=3, delta=1e-5, rounds=2)
    with pytest.raises(CompositionError, match="differentially private"):
        exact_after(private, 1)
