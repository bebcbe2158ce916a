"""Laws of consensus programs: how parties join, what they upload, and barycenters by sums."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from pairwise_masks import PairwiseMasks

from partsong.aggregation.alignment import Assignment, PartialAssignment, Sinkhorn
from partsong.aggregation.barycenter import FixedPoint, FromPrevious
from partsong.aggregation.linear import AlignedMean, Mean
from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Layout, Message, Reducible, Schedule, Shard
from partsong.core.streams import key, stream
from partsong.data.conversion import as_matrix
from partsong.engines.local import Parallel, Sequential
from partsong.errors import CompositionError, ParameterError, PartyError
from partsong.methods import build
from partsong.methods.averaging import AdoptModel, AlignedUpload, LocalAveraging, PersonalComponents, WholeUpload
from partsong.methods.init_modes import LocalInit, SharedInit
from partsong.solvers.coupling import AlignedProximalTerm, ProximalTerm
from partsong.solvers.squared_error import accelerated_hals
from partsong.solvers.update_rules import Extrapolation

PROGRAMS = {
    "fnmf robust": build("fnmf-local", 4, local_steps=5, align="assignment"),
    "fnmf paper": build("fnmf-local", 4, variant="paper", local_steps=5, align="assignment"),
    "fnmf common": build("fnmf-local", 4, local_steps=5, init_mode="shared", align="assignment"),
    "fnmf partial": build("fnmf-local", 4, local_steps=5, client_align=PartialAssignment(), align="assignment"),
    "fnmf soft": build(
        "fnmf-local", 4, local_steps=5, client_align=Sinkhorn(), server_align=Sinkhorn(), align="assignment"
    ),
    "fnmf by sums": build("fnmf-by-sums", 4, local_steps=5),
    "fnmf personal": replace(
        build("fnmf-local", 4, local_steps=5, align="assignment"), synchronisation=PersonalComponents()
    ),
    "fedprox": build("fedprox", 4, local_steps=5),
    "ipalm once": build("one-shot-ipalm", 4, local_steps=5),
    "mur once": build("one-shot-mu", 4, local_steps=5),
}


def data(rows=90, columns=24, rank=4, seed=0):
    rng = np.random.default_rng(seed)
    H = rng.gamma(0.3, size=(rank, columns))
    return rng.gamma(0.5, size=(rows, rank)) @ H + 0.02 * rng.random((rows, columns))


def shards_of(X, parties=3, seed=7):
    return [
        Shard(f"p{i:02d}", as_matrix(part), key(seed, "secret", i)) for i, part in enumerate(np.array_split(X, parties))
    ]


def run(program, shards, rounds=4, engine=Sequential(), reduction=PlainReduction(), **more):
    return list(engine.run(program, shards, Schedule(rounds, 3, **more), reduction=reduction))


@pytest.mark.parametrize("name", PROGRAMS)
def test_engines_agree_and_runs_go_on_bit_for_bit(name):
    shards, program = shards_of(data(), 5), PROGRAMS[name]
    whole = run(program, shards)
    parallel = run(program, shards[::-1], engine=Parallel(3))
    for one, other in zip(whole, parallel, strict=True):
        assert_array_equal(one.model["H"], other.model["H"])
    rest = Sequential().run(program, shards, Schedule(4, 3), reduction=PlainReduction(), resume=whole[1].checkpoint)
    for one, other in zip(whole[2:], rest, strict=True):
        assert_array_equal(one.model["H"], other.model["H"])


@pytest.mark.parametrize("name", PROGRAMS)
def test_checkpoints_of_all_programs_can_be_written_and_read(name, tmp_path):
    from partsong.io.state_file import read_state, write_state

    point = run(PROGRAMS[name], shards_of(data()), 2)[-1].checkpoint
    write_state(tmp_path / "c.ckpt", point)
    again = read_state(tmp_path / "c.ckpt")
    assert again.index == point.index
    assert_array_equal(again.server.model["H"], point.server.model["H"])
    for party, state in point.parties.items():
        assert_array_equal(again.parties[party].W, state.W)
        assert_array_equal(again.parties[party].Ht, state.Ht)


@pytest.mark.parametrize("name", PROGRAMS)
def test_only_declared_arrays_are_sent(name):
    for done in run(PROGRAMS[name], shards_of(data()), 2, Sequential(record=True)):
        for party, _, message in done.traffic:
            shapes = {array: shape for array, shape, _ in message.signature}
            expected = {"H": (4, 24), "counts": (4,)} if "sums" in name else {"H": (4, 24)}
            assert shapes == expected
            assert done.bytes_up[party] == 8 * sum(int(np.prod(shape)) for shape in expected.values()) + 8
        assert set(done.model.arrays) == {"H", "turn"}


@pytest.mark.parametrize("sweeps", [1, 2, 3])
@pytest.mark.parametrize("align", [Assignment(), PartialAssignment(), Sinkhorn()], ids=lambda a: type(a).__name__)
def test_a_barycenter_by_sums_is_that_of_the_server(sweeps, align):
    shards = shards_of(data(), 5)
    by_sums = build("fnmf-by-sums", 4, align=align, sweeps=sweeps, local_steps=20, init_mode="shared")
    at_server = replace(
        by_sums,
        upload=WholeUpload(),
        sweeps=1,
        aggregation=FixedPoint(align, FromPrevious(), sweeps=sweeps, tol=0),
    )
    many, few = run(by_sums, shards, 3 * sweeps), run(at_server, shards, 3)
    for number, done in enumerate(few):
        assert_allclose(many[(number + 1) * sweeps - 1].model["H"], done.model["H"], rtol=1e-9, atol=1e-11)


def test_a_barycenter_by_sums_can_be_masked():
    shards, program = shards_of(data(), 4), build("fnmf-by-sums", 4, local_steps=5)
    assert isinstance(program.aggregation, Reducible)
    plain, masked = run(program, shards, 6), run(program, shards, 6, reduction=PairwiseMasks())
    assert_allclose(masked[-1].model["H"], plain[-1].model["H"], rtol=1e-6, atol=1e-8)
    with pytest.raises(CompositionError):
        run(build("fnmf-local", 4, align="assignment"), shards, 1, reduction=PairwiseMasks())


def test_a_party_that_misses_the_first_sweep_adds_nothing_to_that_round():
    shards, program = shards_of(data(), 3), build("fnmf-by-sums", 4, local_steps=5, sweeps=2)
    late = run(program, shards, 4, Sequential(record=True), absent={2: frozenset({"p01"})})
    gone = run(program, shards, 4, absent={2: frozenset({"p01"}), 3: frozenset({"p01"})})
    assert_array_equal(late[3].model["H"], gone[3].model["H"])
    sent = {party: message for party, _, message in late[3].traffic}
    assert not sent["p01"]["H"].any()
    assert not sent["p01"]["counts"].any()


def test_alignment_saves_what_averaging_by_position_destroys():
    """Independent starts and long local phases: three rounds are enough for fnmf, and none for fedavg."""
    X = data(400, 40, 5, seed=3) + 0.1 * np.random.default_rng(1).random((400, 40))
    shards = shards_of(X, 8)
    errors = {}
    for name, program in {
        "exact": build("exact", 5, local_steps=5),
        "fnmf": build("fnmf-local", 5, local_steps=300, align="assignment"),
        "sums": build("fnmf-by-sums", 5, local_steps=300, sweeps=3),
        "fedavg": build("one-shot-ipalm", 5, local_steps=200),
        "fedprox": build("fedprox", 5, local_steps=200),
    }.items():
        H = run(program, shards, {"exact": 100, "sums": 6}.get(name, 2))[-1].model["H"]
        W = accelerated_hals().solve_rows(as_matrix(X), np.ascontiguousarray(H.T))
        errors[name] = np.linalg.norm(X - W @ H) / np.linalg.norm(X)
    assert errors["fnmf"] < 1.1 * errors["exact"]
    assert errors["sums"] < 1.1 * errors["exact"]
    assert errors["fedavg"] > 2 * errors["exact"]
    assert errors["fedprox"] > 2 * errors["exact"]


def joined(synchronisation, own, model, W, X=None):
    shard = Shard("p", as_matrix(data() if X is None else X))
    return synchronisation.begin(shard, W, own, model, accelerated_hals())


def test_weights_follow_their_components():
    rng = np.random.default_rng(0)
    model, order = rng.gamma(0.3, size=(24, 4)), [2, 0, 3, 1]
    own, W = model[:, order] + 1e-3, rng.random((90, 4))
    Ht, moved = joined(AdoptModel(follow=Assignment()), own, model, W)
    assert_array_equal(Ht, model)
    assert_allclose(moved @ model.T, W @ model[:, order].T, rtol=1e-12)
    Ht, kept = joined(AdoptModel(), own, model, W)
    assert kept is W
    _, fitted = joined(AdoptModel(follow=Sinkhorn()), own, model, W)
    assert (fitted >= 0).all()
    assert np.linalg.norm(data() - fitted @ model.T) < np.linalg.norm(data() - W @ model.T)


def test_personal_parties_keep_what_is_theirs():
    blocks = (np.kron(np.eye(6), np.ones((1, 4))) + 0.01 * np.random.default_rng(0).random((6, 24))).T
    own, model, W = blocks[:, [5, 0, 1, 2]].copy(), 2 * blocks[:, [0, 1, 2, 3]], np.ones((90, 4))
    Ht, same = joined(PersonalComponents(), own, model, W)
    assert same is W
    assert_allclose(Ht[:, 0], own[:, 0], rtol=1e-12)
    assert_allclose(Ht[:, 1:], 2 * own[:, 1:], rtol=1e-12)


def test_starts_are_what_they_say():
    layout = Layout(("a", "b", "c"), 24, 5)
    shard = Shard("a", as_matrix(data()), 11)
    assert SharedInit().model(layout, 4, stream(5, "start")).shape == (24, 4)
    assert LocalInit().model(layout, 4, stream(5, "start")) is None
    announced = LocalInit(announced=True).model(layout, 4, stream(5, "start"))
    assert 0.4 < announced.mean() < 0.6
    assert announced.std() < 0.2, "a mean of three"
    own = LocalInit().columns(shard, None, 4)
    assert_array_equal(own, LocalInit().columns(shard, announced, 4))
    assert not np.allclose(own, LocalInit().columns(replace(shard, secret=12), None, 4))
    W = LocalInit().weights(shard, own, accelerated_hals())
    assert (W @ own.T).mean() == pytest.approx(data().mean(), rel=0.2)
    server, model = build("fnmf-local", 4, align="assignment").start_server(layout)
    assert "H" not in model.arrays
    assert server.model["H"].shape == (4, 24)


def test_nothing_is_pulled_in_free_rounds():
    shards = shards_of(data())
    free = replace(build("fnmf-local", 4, local_steps=6, init_mode="shared", align="assignment"), uncoupled_rounds=1)
    alone = replace(free, coupling=AlignedProximalTerm(0.0))
    tied = replace(free, uncoupled_rounds=0, coupling=AlignedProximalTerm(5.0))
    assert_allclose(run(free, shards, 1)[0].model["H"], run(alone, shards, 1)[0].model["H"], rtol=1e-12)
    assert not np.allclose(run(tied, shards, 1)[0].model["H"], run(alone, shards, 1)[0].model["H"])


def test_rows_that_nobody_matched_stay():
    H, before = np.ones((2, 3)), np.full((2, 3), 7.0)
    aggregate = AlignedMean().lower(Message({"H": H * np.array([[4.0], [0.0]]), "counts": np.array([2.0, 0.0])}, 9.0))
    agreed = AlignedUpload().fill_unmatched(aggregate, Message({"H": before}))
    assert_array_equal(agreed["H"], [[2.0] * 3, [7.0] * 3])


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: LocalAveraging(4, steps=0), ParameterError),
        (lambda: LocalAveraging(4, uncoupled_rounds=-1), ParameterError),
        (lambda: LocalAveraging(4, sweeps=2), CompositionError),
        (lambda: LocalAveraging(4, upload=AlignedUpload(), aggregation=Mean()), CompositionError),
        (lambda: LocalAveraging(4, coupling=AlignedProximalTerm(prox="exact")), CompositionError),
        (
            lambda: replace(
                build("fedprox", 4),
                solver=replace(build("fedprox", 4).solver, momentum=Extrapolation()),
                coupling=ProximalTerm(),
            ),
            CompositionError,
        ),
        (lambda: build("fnmf-local", 4, variant="printed", align="assignment"), ParameterError),
    ],
)
def test_what_does_not_go_together_is_refused_at_once(make, error):
    with pytest.raises(error):
        make()


def test_a_late_party_has_no_whole_upload():
    with pytest.raises(PartyError, match="'p'"):
        WholeUpload().message(Shard("p", as_matrix(data())), None, None, True, 4)
