"""Laws of programs and engines: exactness whatever the split, one party is centralised, engines agree bit for bit."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from pairwise_masks import PairwiseMasks

from partsong.aggregation.linear import Mean, Sum, WeightedMean, add
from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Checkpoint, Layout, Message, ProgramBase, Schedule, Shard, Traits
from partsong.core.streams import key, stream
from partsong.data.conversion import as_matrix
from partsong.engines.local import Parallel, Sequential
from partsong.errors import CompositionError, ParameterError, PartyError
from partsong.io.state_file import read_state, write_state
from partsong.methods import build
from partsong.methods.averaging import LocalAveraging
from partsong.methods.dsanls import SketchExchange
from partsong.methods.exact import SharedSums
from partsong.methods.fedlda import FederatedLDA
from partsong.methods.game import FederatedGame
from partsong.methods.init_modes import LocalInit
from partsong.methods.private import row_private
from partsong.methods.two_stage import exact_after
from partsong.solvers.game import DecayingStep, Game
from partsong.solvers.game_orders import Shuffled
from partsong.solvers.normal_equations import Penalty
from partsong.solvers.squared_error import RowState, SquaredError
from partsong.solvers.update_rules import (
    BlockPivoting,
    CoordinateDescent,
    Extrapolation,
    InertialPalm,
    Multiplicative,
    NoExtrapolation,
    ProjectedGradient,
)

RULES = [
    Multiplicative(),
    CoordinateDescent(sweeps=3),
    CoordinateDescent(alpha=0.1, beta=0.1),
    ProjectedGradient(),
    InertialPalm(inertia=0.3),
    BlockPivoting(),
]
PROGRAMS = {
    **{f"shared {rule!r}": SharedSums(4, SquaredError(rule)) for rule in RULES},
    "shared penalised": SharedSums(4, SquaredError(penalty_W=Penalty(1e-3, 1e-3), penalty_H=Penalty(2e-3, 1e-3))),
    "shared accelerated": build("exact", 4, accelerate=True, local_steps=5),
    "fedavg": build("fedavg", 4, local_steps=3),
    "fedavg uniform": build("fedavg", 4, local_steps=3, weighted=False),
    "local only": build("local-only", 4, local_steps=5),
    "consensus ipalm": LocalAveraging(4, SquaredError(InertialPalm(inertia=0.2)), 3, LocalInit()),
    "consensus of games": build("game-consensus", 4, local_steps=3),
    "game": build("game", 4),
    "game in a random order": FederatedGame(4, game=Game(order=Shuffled(), step=DecayingStep(0.01))),
    "lda": FederatedLDA(4, iterations=20),
}


def data(rows=90, columns=14, seed=0):
    rng = np.random.default_rng(seed)
    return rng.gamma(0.5, size=(rows, 4)) @ rng.gamma(0.5, size=(4, columns)) + 0.1 * rng.random((rows, columns))


def shards_of(X, cuts, seed=7):
    parts = np.split(X, cuts)
    return [Shard(f"p{i:02d}", as_matrix(part), key(seed, "secret", f"p{i:02d}")) for i, part in enumerate(parts)]


def run(program, shards, rounds=5, engine=Sequential(), **kwargs):
    schedule = Schedule(rounds, 3, **kwargs)
    return list(engine.run(program, shards, schedule, reduction=PlainReduction()))


def model_bytes(rounds):
    return [np.ascontiguousarray(done.model["H"]).tobytes() for done in rounds]


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("cuts", [[45], [1, 2, 3], [10, 20, 30, 31, 80]])
def test_shared_statistics_over_any_split_is_the_pooled_factorization(rule, cuts):
    X, program = data(), SharedSums(4, SquaredError(rule))
    pooled = run(program, shards_of(X, []), 30)[-1]
    split = run(program, shards_of(X, cuts), 30)[-1]
    assert_allclose(split.model["H"], pooled.model["H"], rtol=1e-8, atol=1e-8)
    assert split.metrics["relative_error"] == pytest.approx(pooled.metrics["relative_error"], rel=1e-8)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("form", [sp.csr_array, sp.csc_array, np.asfortranarray], ids=lambda form: form.__name__)
def test_every_rule_gives_the_same_on_every_form_of_the_data(rule, form):
    X = data() * (np.random.default_rng(1).random((90, 14)) < 0.4)
    program = SharedSums(4, SquaredError(rule))
    plain = run(program, shards_of(X, [30]), 8)[-1]
    shards = [replace(shard, matrix=as_matrix(form(shard.matrix.X))) for shard in shards_of(X, [30])]
    other = run(program, shards, 8)[-1]
    assert_allclose(other.model["H"], plain.model["H"], rtol=1e-8, atol=1e-9)
    assert other.metrics["relative_error"] == pytest.approx(plain.metrics["relative_error"], rel=1e-8)


@pytest.mark.parametrize("rule", [r for r in RULES if not isinstance(r, Multiplicative)], ids=repr)
def test_the_objective_is_error_and_penalties(rule):
    """What `metrics` tells is the formula of the estimators' docstring, from W and H as they stand, over ½‖X‖²."""
    X, on_W, on_H = data(), Penalty(2e-3, 3e-3), Penalty(4e-3, 1e-3)
    n, m = X.shape
    for done in run(SharedSums(4, SquaredError(rule, on_W, on_H)), shards_of(X, [30, 60]), 3):
        W = np.vstack([done.checkpoint.parties[name].W for name in ("p00", "p01", "p02")])
        if done.checkpoint.server.scale is not None:  # after the first sums, and never again
            W *= done.checkpoint.server.scale
        H = done.model["H"]
        size_W = m * (on_W.l1 * W.sum() + 0.5 * on_W.l2 * np.square(W).sum())
        size_H = n * (on_H.l1 * H.sum() + 0.5 * on_H.l2 * np.square(H).sum())
        objective = (0.5 * np.square(X - W @ H).sum() + size_W + size_H) / (0.5 * np.square(X).sum())
        assert done.metrics["objective"] == pytest.approx(objective, rel=1e-9)
        assert done.metrics["relative_error"] == pytest.approx(np.linalg.norm(X - W @ H) / np.linalg.norm(X), rel=1e-9)


@pytest.mark.parametrize("momentum", [NoExtrapolation(), Extrapolation()], ids=lambda one: type(one).__name__)
def test_components_that_are_zero_are_tried_again_whatever_the_split_and_wherever_a_run_goes_on(momentum, tmp_path):
    """Two of four begin as zero. A trial splits others into them, at every place to the same bits after a break."""
    X, penalty = data(), Penalty(1e-3, 1e-3)
    program = SharedSums(4, SquaredError(CoordinateDescent(sweeps=3), penalty, penalty, momentum))
    Ht = np.random.default_rng(2).random((14, 4)) * [1, 1, 0, 0]

    def rounds_of(shards, resume=None, n_rounds=80):
        start = Checkpoint(0, {}, *program.start_from(Ht)) if resume is None else resume
        return list(Sequential().run(program, shards, Schedule(n_rounds, 3), reduction=PlainReduction(), resume=start))

    rounds = rounds_of(shards_of(X, [30, 60]))
    on_trial = [done for done in rounds if done.checkpoint.server.trial.before is not None]
    assert on_trial, "a trial was made"
    assert (np.linalg.norm(rounds[-1].checkpoint.server.Ht, axis=0) > 0).all(), "and it was won"
    assert rounds[-1].metrics["objective"] < 0.6 * on_trial[0].metrics["objective"]
    pooled = rounds_of(shards_of(X, []))
    assert rounds[-1].metrics["objective"] == pytest.approx(pooled[-1].metrics["objective"], rel=1e-6)
    for done in (on_trial[0], on_trial[len(on_trial) // 2]):
        write_state(tmp_path / "c.ckpt", done.checkpoint)
        point = read_state(tmp_path / "c.ckpt")
        assert model_bytes(rounds_of(shards_of(X, [30, 60]), point)) == model_bytes(rounds[done.index + 1 :])


@pytest.mark.parametrize("momentum", [NoExtrapolation(), Extrapolation()], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("penalty", [Penalty(0.05, 0.0), Penalty(0.0, 0.05)], ids=["l1", "l2"])
def test_penalties_do_not_collapse_a_random_start_whatever_the_units_and_the_split(momentum, penalty):
    """Objectives over ½‖X‖² are the same in all units, if l1 goes with unit^1.5 and l2 with the unit."""
    X, found = data(), []
    for unit in (1e-6, 1.0, 1e6):
        both = Penalty(penalty.l1 * unit**1.5, penalty.l2 * unit)
        program = SharedSums(4, SquaredError(CoordinateDescent(sweeps=3), both, both, momentum))
        for cuts in ([], [30, 60]):
            found.append(min(done.metrics["objective"] for done in run(program, shards_of(unit * X, cuts), 80)))
    assert max(found) < 0.9, "zero has 1"
    assert max(found) <= min(found) * (1 + 1e-3)


def test_a_restart_steps_from_the_weights_and_not_from_the_extrapolated_point():
    X = as_matrix(data())
    solver = SquaredError(CoordinateDescent(), momentum=Extrapolation())
    rng = np.random.default_rng(2)
    W, point, Ht = rng.random((90, 4)), rng.random((90, 4)), rng.random((14, 4))

    def model(amount, restart):
        return {"H": Ht.T, "amount": np.array(amount), "restart": np.array(restart)}

    rows, _ = solver.row_step(X, RowState(W, point), model(0.5, 1.0))
    plain, _ = solver.row_step(X, RowState(W, None), model(0.0, 0.0))
    assert_array_equal(rows.W, plain.W)
    assert rows.point is None
    ahead, sums = solver.row_step(X, RowState(W, point), model(0.5, 0.0))
    stepped, _ = solver.row_step(X, RowState(point, None), model(0.0, 0.0))
    assert_array_equal(ahead.W, stepped.W)
    assert_allclose(ahead.point, np.maximum(0, ahead.W + 0.5 * (ahead.W - W)), rtol=1e-12)
    assert_allclose(sums["gram"], ahead.point.T @ ahead.point, rtol=1e-10)


@given(cuts=st.lists(st.integers(1, 39), max_size=6, unique=True), seed=st.integers(0, 1000))
def test_exactness_for_random_splits(cuts, seed):
    X, program = data(40, 6, seed), build("exact", 3, local_steps=5)
    pooled = run(program, shards_of(X, []), 10)[-1].model["H"]
    assert_allclose(run(program, shards_of(X, sorted(cuts)), 10)[-1].model["H"], pooled, rtol=1e-8, atol=1e-8)


def test_one_party_is_centralised():
    """An independent loop in plain NumPy, with the same start, gives the same H."""
    X = data()
    program = build("exact", 4, local_steps=2)
    H = stream(3, "start").random((14, 4)).T.copy()
    W = np.repeat((X @ H.T).sum(axis=1, keepdims=True) / (H @ H.T).sum(), 4, axis=1)
    for done in run(program, shards_of(X, []), 6):
        for F, gram, cross in ((W, H @ H.T, X @ H.T),):
            for _ in range(2):
                for j in range(4):
                    F[:, j] = np.maximum(0, F[:, j] + (cross[:, j] - F @ gram[:, j]) / gram[j, j])
        gram, cross = W.T @ W, W.T @ X
        for _ in range(2):
            for j in range(4):
                H[j] = np.maximum(0, H[j] + (cross[j] - gram[j] @ H) / gram[j, j])
        assert_allclose(done.model["H"], H, rtol=1e-9, atol=1e-12)
        error = np.linalg.norm(X - W @ H) / np.linalg.norm(X)
        assert done.metrics["relative_error"] == pytest.approx(error, rel=1e-9)


def test_one_party_consensus_is_centralised():
    """With a single party FedAvg of T steps in R rounds is T·R iterations, W fitted to the common H first."""
    X = data()
    rounds = run(build("fedavg", 4, local_steps=2), shards_of(X, []), 3)
    solver = build("fedavg", 4, local_steps=10).solver
    matrix = as_matrix(X)
    columns = solver.begin(stream(3, "start").random((14, 4)))
    rows = RowState(solver.solve_rows(matrix, columns.Ht))
    for _ in range(6):
        rows, sums = solver.row_step(matrix, rows, solver.broadcast(columns))
        columns = solver.column_step(columns, sums)
    assert_allclose(rounds[-1].model["H"], columns.Ht.T, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", PROGRAMS)
def test_shuffled_and_parallel_parties_change_no_bit(name):
    shards = shards_of(data(), [10, 20, 50, 77])
    reference = run(PROGRAMS[name], shards)
    for engine in (Sequential(shuffle=5), Parallel(3), Parallel(1)):
        other = run(PROGRAMS[name], shards[::-1], engine=engine)
        assert model_bytes(other) == model_bytes(reference)
        assert [dict(o.bytes_up) for o in other] == [dict(r.bytes_up) for r in reference]


@pytest.mark.parametrize("engine", [Sequential(), Parallel(2)], ids=repr)
@pytest.mark.parametrize("name", PROGRAMS)
def test_resume_is_the_uninterrupted_run(name, engine):
    shards, program = shards_of(data(), [30, 60]), PROGRAMS[name]
    whole = run(program, shards, 6, engine)
    middle = whole[2].checkpoint
    assert middle.index == 3
    rest = list(engine.run(program, shards, Schedule(6, 3), reduction=PlainReduction(), resume=middle))
    assert model_bytes(rest) == model_bytes(whole[3:])


@pytest.mark.parametrize("name", PROGRAMS)
def test_only_declared_arrays_are_sent(name):
    """The whole disclosure: names and shapes, and bytes that equal the formula; W and X are never among them."""
    shards, k, m = shards_of(data(), [30, 60]), 4, 14
    for done in run(PROGRAMS[name], shards, 2, Sequential(record=True)):
        for party, phase, message in done.traffic:
            names = {array: shape for array, shape, _ in message.signature}
            if name.startswith("shared"):
                numbers = {"rows": (), "energy": ()} | ({"mass": ()} if "penalised" in name else {})
                assert names == {"gram": (k, k), "cross": (k, m), **numbers}
                assert message.nbytes == 8 * (k * k + k * m + len(numbers)) + 8
            elif name.startswith("game"):
                assert names == {"H": (k, -(-m // 3)), "place": (3,), "totals": (6,)}
                assert message.nbytes == 8 * (k * -(-m // 3) + 3 + 6) + 8
            elif name == "lda":
                assert names == {"counts": (k, m), "totals": (3,), "bound": (1,)}
                assert message.nbytes == 8 * (k * m + 3 + 1) + 8
            else:
                assert names == {"H": (k, m)}
                assert message.nbytes == 8 * k * m + 8
            assert phase == 0
            assert done.bytes_up[party] == message.nbytes
        assert set(done.model.arrays) <= {"H", "amount", "restart", "scale", "pace", "turn"}


def test_a_party_that_misses_a_round_is_absent_from_that_sum():
    X = data()
    shards = shards_of(X, [30, 60])
    absent = {1: frozenset({"p01"})}
    rounds = run(build("exact", 4, local_steps=5), shards, 3, Sequential(record=True), absent=absent)
    assert rounds[1].participants == ("p00", "p02")
    assert set(rounds[1].bytes_up) == {"p00", "p02"}
    assert rounds[1].checkpoint.parties["p01"] is rounds[0].checkpoint.parties["p01"]
    assert rounds[2].participants == ("p00", "p01", "p02")
    alone = run(build("exact", 4, local_steps=5), [shards[0], shards[2]], 1)[0]
    everyone_but = run(build("exact", 4, local_steps=5), shards, 1, absent={0: frozenset({"p01"})})[0]
    assert_array_equal(alone.model["H"], everyone_but.model["H"])
    with pytest.raises(ParameterError, match="No party takes part in round 0"):
        run(build("exact", 4, local_steps=5), shards, 1, absent={0: frozenset({"p00", "p01", "p02"})})


@pytest.mark.parametrize("engine", [Sequential(record=True), Parallel(2, record=True)], ids=repr)
@pytest.mark.parametrize(
    "name", ["shared CoordinateDescent(sweeps=3, alpha=0.0, beta=0.0)", "fedavg", "fedavg uniform"]
)
def test_a_reduction_of_several_phases_is_invisible_to_programs(name, engine):
    shards, program = shards_of(data(), [30, 60]), PROGRAMS[name]
    plain = run(program, shards, 4)
    masked = list(engine.run(program, shards, Schedule(4, 3), reduction=PairwiseMasks()))
    assert_allclose(masked[-1].model["H"], plain[-1].model["H"], rtol=1e-7, atol=1e-9)
    sent = {party: message for party, phase, message in masked[0].traffic if phase == 1}
    open_sums = {p: m for p, _, m in run(program, shards, 1, Sequential(record=True))[0].traffic}
    name_of_array = "cross" if "shared" in name else "H"
    assert not np.allclose(sent["p00"][name_of_array], open_sums["p00"][name_of_array], atol=0.1)
    assert {phase for _, phase, _ in masked[0].traffic} == {0, 1, 2}


@pytest.mark.parametrize("reduction", [PlainReduction(), PairwiseMasks()], ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("phase", [0, 1])
def test_a_party_that_falls_silent_is_left_out_and_the_sum_goes_on(reduction, phase):
    """Heard or not before its upload, the sum is that of the others; it comes back with the state it had reached."""
    shards, program = shards_of(data(), [30, 60]), build("exact", 4, local_steps=5)
    if phase >= reduction.phases:
        pytest.skip("has fewer phases")
    schedule = Schedule(3, 3, dropouts={1: {"p01": phase}})
    rounds = list(Sequential(record=True).run(program, shards, schedule, reduction=reduction))
    assert [done.participants for done in rounds] == [("p00", "p01", "p02"), ("p00", "p02"), ("p00", "p01", "p02")]
    assert {sent for name, sent, _ in rounds[1].traffic if name == "p01"} == set(range(phase))
    assert (rounds[1].bytes_up["p01"] == 0) == (phase == 0)
    absent = run(program, shards, 2, absent={1: frozenset({"p01"})})
    assert_allclose(rounds[1].model["H"], absent[1].model["H"], rtol=1e-7, atol=1e-9)


def test_a_party_that_falls_silent_after_its_upload_is_in_the_sum():
    shards, program = shards_of(data(), [30, 60]), build("exact", 4, local_steps=5)
    schedule = Schedule(2, 3, dropouts={1: {"p01": 2}})
    rounds = list(Sequential().run(program, shards, schedule, reduction=PairwiseMasks()))
    assert rounds[1].participants == ("p00", "p01", "p02")
    assert_allclose(rounds[1].model["H"], run(program, shards, 2)[1].model["H"], rtol=1e-7, atol=1e-9)


def test_schedules_name_parties_that_are_there():
    shards = shards_of(data(), [30])
    for schedule in (Schedule(1, absent={0: frozenset({"p9"})}), Schedule(1, dropouts={0: {"p9": 0}})):
        with pytest.raises(ParameterError, match="unknown parties: p9"):
            next(Sequential().run(build("exact", 4, local_steps=5), shards, schedule, reduction=PlainReduction()))
    everyone = Schedule(1, dropouts={0: {"p00": 0, "p01": 0}})
    with pytest.raises(PartyError, match="No upload arrived in round 0"):
        next(Sequential().run(build("exact", 4, local_steps=5), shards, everyone, reduction=PlainReduction()))


def test_messages_can_be_copied():
    message = Message({"H": np.arange(6.0).reshape(2, 3)}, 2.5)
    for again in (copy.deepcopy(message), copy.copy(message)):
        assert again.weight == 2.5
        assert_array_equal(again["H"], message["H"])
        with pytest.raises(TypeError):
            again.arrays["H"] = 0


@dataclass(frozen=True)
class Medoid:
    def __call__(self, uploads, model):
        return uploads[0]


def test_composition_fails_at_once():
    program = replace(build("fedavg", 4, local_steps=10), aggregation=Medoid())
    with pytest.raises(CompositionError):
        next(Sequential().run(program, shards_of(data(), [30]), Schedule(1), reduction=PairwiseMasks()))


@pytest.mark.parametrize("aggregation", [Sum(), Mean(), WeightedMean()], ids=repr)
def test_aggregations_are_sums_in_disguise(aggregation):
    rng = np.random.default_rng(0)
    uploads = [Message({"H": rng.random((2, 3))}, weight=w) for w in (1.0, 5.0, 2.0)]
    total = aggregation.lift(uploads[0])
    for upload in uploads[1:]:
        total = add(total, aggregation.lift(upload))
    assert_allclose(aggregation(uploads)["H"], aggregation.lower(total)["H"])
    weights = {Sum: [1, 1, 1], Mean: [1 / 3] * 3, WeightedMean: [1 / 8, 5 / 8, 2 / 8]}[type(aggregation)]
    expected = sum(w * u["H"] for w, u in zip(weights, uploads, strict=True))
    assert_allclose(aggregation(uploads)["H"], expected)


@dataclass(frozen=True)
class Broken:
    """A program whose local step fails, or sends nonsense, at one party."""

    inner: SharedSums
    fault: str
    aggregation: Sum = Sum()

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def local(self, shard, party, model):
        party, message = self.inner.local(shard, party, model)
        if shard.name != "p01":
            return party, message
        if self.fault == "raise":
            raise ZeroDivisionError("by zero")
        wrong = {"nan": message["gram"] * np.nan, "shape": message["gram"][:1]}[self.fault]
        return party, Message({**message.arrays, "gram": wrong})


@pytest.mark.parametrize("engine", [Sequential(), Parallel(2)], ids=repr)
def test_faults_name_the_party(engine):
    shards = shards_of(data(), [30, 60])
    for fault in ("nan", "shape"):
        with pytest.raises(PartyError, match="'p01'"):
            list(
                engine.run(
                    Broken(build("exact", 4, local_steps=5), fault), shards, Schedule(2), reduction=PlainReduction()
                )
            )
    with pytest.raises(ZeroDivisionError) as caught:
        list(
            engine.run(
                Broken(build("exact", 4, local_steps=5), "raise"), shards, Schedule(2), reduction=PlainReduction()
            )
        )
    assert any("p01" in note and "local" in note and "round 0" in note for note in caught.value.__notes__)


def test_layouts_refuse_twins_and_other_columns():
    X = data()
    with pytest.raises(ParameterError, match="more than once: a"):
        Layout.of([Shard("a", as_matrix(X)), Shard("a", as_matrix(X))], 0)
    with pytest.raises(CompositionError, match="b: 13"):
        Layout.of([Shard("a", as_matrix(X)), Shard("b", as_matrix(X[:, 1:]))], 0)
    with pytest.raises(ParameterError):
        Layout.of([], 0)


def test_torch_shards_run_the_same_programs():
    torch = pytest.importorskip("torch")
    X = data()
    for program in (build("exact", 4, accelerate=True, local_steps=5), build("fedavg", 4, local_steps=3)):
        shards = shards_of(X, [30, 60])
        tensors = [replace(s, matrix=as_matrix(torch.from_numpy(s.matrix.X))) for s in shards]
        H = run(program, tensors)[-1].model["H"]
        assert isinstance(H, torch.Tensor)
        assert_allclose(H.numpy(), run(program, shards)[-1].model["H"], rtol=1e-8, atol=1e-10)


def test_parties_with_fewer_rows_than_components_zero_rows_and_zero_columns():
    X = data(12, 9)
    X[3] = 0
    X[:, 2] = 0
    program = build("exact", 7, local_steps=5)
    pooled = run(program, shards_of(X, []), 10)[-1].model["H"]
    assert_allclose(run(program, shards_of(X, [1, 3, 4]), 10)[-1].model["H"], pooled, rtol=1e-8, atol=1e-8)
    assert np.isfinite(run(build("fedavg", 7, local_steps=10), shards_of(X, [1, 3, 4]), 3)[-1].model["H"]).all()


def test_extrapolation_restarts_after_a_rise():
    pace = Extrapolation().begin(np.ones(1))
    pace = Extrapolation().next(pace, 10.0)
    grown = Extrapolation().next(pace, 9.0)
    assert grown.amount > pace.amount
    fallen = Extrapolation().next(grown, 9.5)
    assert fallen.must_restart
    assert fallen.amount < grown.amount
    assert fallen.objective == 9.0, "the least objective so far is what counts"
    assert Extrapolation().next(fallen, 9.4).must_restart
    assert not Extrapolation().next(fallen, 8.9).must_restart


@pytest.mark.parametrize("seed", range(8))
def test_extrapolation_reaches_what_plain_alternation_reaches(seed):
    """A step that goes up is taken back, so that no component is lost on the way."""
    X = data(60, 12, seed)
    plain = run(build("exact", 4, local_steps=5), shards_of(X, []), 150)[-1].metrics["relative_error"]
    fast = run(build("exact", 4, accelerate=True, local_steps=5), shards_of(X, []), 150)
    least = min(done.metrics["relative_error"] for done in fast)
    assert least <= plain * 1.02
    kept = [done.checkpoint.server for done in fast]
    for before, after in itertools.pairwise(kept):
        if after.pace.must_restart:
            assert_array_equal(after.Ht, before.Ht)


def test_checkpoints_hold_every_state():
    done = run(build("exact", 4, local_steps=5), shards_of(data(), [30]), 2)[-1]
    assert isinstance(done.checkpoint, Checkpoint)
    assert set(done.checkpoint.parties) == {"p00", "p01"}
    assert done.checkpoint.parties["p00"].W.shape == (30, 4)


def test_a_program_without_traits_asks_for_nothing_and_traits_are_what_engines_go_by():
    """What a program asks for is one value; engines look at nothing else."""
    assert ProgramBase().traits == Traits()
    exact, sketched = build("exact", 3, local_steps=5), SketchExchange(3, n_rows=20)
    assert exact.traits == Traits(full_participation=True)
    assert exact_after(build("fnmf-local", 3, align="assignment"), 1).traits == exact.traits
    assert (sketched.traits.requires, bool(sketched.traits.reason)) == ("plain", True)
    private = row_private(3, epsilon=1.0, row_bound=2.0, rounds=4)
    assert private.traits.release == private.release
    assert private.traits.max_releases == 4
    assert build("fedavg", 3, local_steps=10).traits.release is None
