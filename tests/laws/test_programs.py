"""Laws of programs and engines: exactness whatever the split, equal engines, and parties that come and go."""

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

from partsong import FederatedNMF
from partsong.aggregation.alignment import Assignment, PartialAssignment
from partsong.aggregation.linear import Mean, Sum, WeightedMean, add
from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Checkpoint, Layout, Message, ProgramBase, Reducible, Schedule, Shard, Traits
from partsong.core.streams import key, stream
from partsong.data.conversion import as_matrix
from partsong.engines.local import Parallel, Sequential
from partsong.errors import CompositionError, ParameterError, PartyError
from partsong.evaluation.metrics import compute_drift, relative_error
from partsong.io.state_file import read_state, write_state
from partsong.methods import build
from partsong.methods.averaging import LocalAveraging
from partsong.methods.dsanls import SketchExchange
from partsong.methods.exact import SharedSums
from partsong.methods.fedlda import FederatedLDA
from partsong.methods.game import FederatedGame
from partsong.methods.init_modes import LocalInit
from partsong.methods.private import party_private, row_private
from partsong.methods.two_stage import exact_after
from partsong.solvers.game import ConstantStep, DecayingStep, Game
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
from partsong.training.simulation import SimulationMeasures, party_components

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


NAMES = ("p00", "p01", "p02", "p03", "p04")
ROUNDS = 6
PROGRAMS_WITH_ABSENCES = {
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
WITHOUT_A_COUNT_OF_PARTIES = [
    name for name in PROGRAMS_WITH_ABSENCES if name != "fnmf paper" and not name.startswith("game")
]
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


def named_shards(names=NAMES):
    rng = np.random.default_rng(0)
    H = rng.gamma(0.3, size=(4, 16))
    rows = {name: rng.gamma(0.5, size=(12 + 3 * i, 4)) @ H + 0.02 * rng.random(16) for i, name in enumerate(NAMES)}
    return [Shard(name, as_matrix(rows[name]), key(7, name)) for name in names]


def run_named(program, shards, rounds=ROUNDS, engine=Sequential(), resume=None, **more):
    return list(engine.run(program, shards, Schedule(rounds, 3, **more), reduction=PlainReduction(), resume=resume))


def same_models(some, others):
    for one, other in zip(some, others, strict=True):
        assert_array_equal(one.model["H"], other.model["H"])
        assert one.participants == other.participants


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", PROGRAMS_WITH_ABSENCES)
def test_whoever_comes_there_is_a_model_and_engines_and_resumed_runs_agree_on_it(name, pattern):
    program, absent, before = PROGRAMS_WITH_ABSENCES[name], PATTERNS[pattern], None
    rounds = run_named(program, named_shards(), absent=absent)
    for done in rounds:
        missing = absent.get(done.index, frozenset())
        assert done.participants == tuple(sorted(set(NAMES) - missing))
        assert np.isfinite(done.model["H"]).all()
        assert (done.model["H"] >= 0).all()
        assert done.model["H"].any()
        for party in missing if before is not None else ():
            assert done.checkpoint.parties[party] is before.checkpoint.parties[party]
        before = done
    same_models(rounds, run_named(program, named_shards()[::-1], engine=Parallel(3), absent=absent))
    for middle in (1, 3):
        same_models(
            rounds[middle:], run_named(program, named_shards(), absent=absent, resume=rounds[middle - 1].checkpoint)
        )


@pytest.mark.parametrize("name", WITHOUT_A_COUNT_OF_PARTIES)
def test_a_party_that_never_comes_is_not_there(name):
    never = {index: frozenset({"p02"}) for index in range(ROUNDS)}
    present = [party for party in NAMES if party != "p02"]
    same_models(
        run_named(PROGRAMS_WITH_ABSENCES[name], named_shards(), absent=never),
        run_named(PROGRAMS_WITH_ABSENCES[name], named_shards(present)),
    )


@pytest.mark.parametrize("name", WITHOUT_A_COUNT_OF_PARTIES)
def test_a_party_may_join_a_run_that_has_begun_without_it(name):
    """Nobody had to know of it before: as if it had been there and absent."""
    absent = {index: frozenset({"p02"}) for index in range(3)}
    known = run_named(PROGRAMS_WITH_ABSENCES[name], named_shards(), absent=absent)
    before = run_named(PROGRAMS_WITH_ABSENCES[name], named_shards([party for party in NAMES if party != "p02"]), 3)
    same_models(known, before + run_named(PROGRAMS_WITH_ABSENCES[name], named_shards(), resume=before[-1].checkpoint))


@pytest.mark.parametrize("name", PROGRAMS_WITH_ABSENCES)
def test_a_party_may_leave_for_good_and_come_back(name):
    """Its shard is taken away, its last state stays in the checkpoint."""
    away = {index: frozenset({"p04"}) for index in (2, 3)}
    known = run_named(PROGRAMS_WITH_ABSENCES[name], named_shards(), absent=away)
    all_here = run_named(PROGRAMS_WITH_ABSENCES[name], named_shards(), 2)
    without = run_named(PROGRAMS_WITH_ABSENCES[name], named_shards(NAMES[:4]), 4, resume=all_here[-1].checkpoint)
    again = run_named(PROGRAMS_WITH_ABSENCES[name], named_shards(), resume=without[-1].checkpoint)
    same_models(known, all_here + without + again)


@pytest.mark.parametrize("variant", ["robust", "paper"])
def test_latecomers_begin_from_the_model_that_there_is(variant):
    program = build("fnmf-local", 4, variant=variant, local_steps=1, align="assignment")
    late = Schedule(9, 3, absent={index: frozenset({"p02", "p03"}) for index in range(8)})
    rounds = list(Sequential().run(program, named_shards(), late, reduction=PlainReduction()))
    model, joined = rounds[-2].model["H"], rounds[-1].checkpoint.parties
    for name in ("p02", "p03"):
        own = joined[name].Ht.T
        assert np.linalg.norm(own - model) < 0.5 * np.linalg.norm(model), "one step from the model, not from a draw"


STAGE = 3
FIRST = {
    "fnmf": build("fnmf-local", 4, local_steps=10, align="assignment"),
    "fnmf common": build("fnmf-local", 4, local_steps=10, init_mode="shared", align="assignment"),
    "fedavg": build("fedavg", 4, local_steps=10, init_mode="local"),
    "by sums": build("fnmf-by-sums", 4, local_steps=10),
}


def unequal_shards(parties=4):
    rng = np.random.default_rng(1)
    H = rng.gamma(0.3, size=(4, 24))
    rows = [rng.gamma(0.5, size=(15 + 5 * i, 4)) @ H + 0.05 * rng.random((15 + 5 * i, 24)) for i in range(parties)]
    return [Shard(f"p{i}", as_matrix(X), key(7, i)) for i, X in enumerate(rows)]


def run_stages(program, shards, rounds, reduction=PlainReduction(), **more):
    return list(Sequential().run(program, shards, Schedule(rounds, 3), reduction=reduction, **more))


@pytest.mark.parametrize("name", FIRST)
def test_the_first_leg_is_the_first_program_and_the_second_starts_where_it_ended(name):
    shards, first = unequal_shards(), FIRST[name]
    relay = exact_after(first, STAGE)
    whole, alone = run_stages(relay, shards, STAGE + 4), run_stages(first, shards, STAGE)
    for one, other in zip(whole[:STAGE], alone, strict=True):
        assert_allclose(relay.components(one.checkpoint.server), first.components(other.checkpoint.server), rtol=0)
    H = first.components(alone[-1].checkpoint.server)
    exact = relay.second
    server, model = exact.start_from(np.ascontiguousarray(H.T))
    parties = {s.name: RowState(exact.solver.solve_rows(s.matrix, np.ascontiguousarray(H.T))) for s in shards}
    rest = run_stages(exact, shards, 4, resume=Checkpoint(0, parties, server, model))
    for one, other in zip(whole[STAGE:], rest, strict=True):
        assert_array_equal(one.model["H"], other.model["H"])
        assert one.metrics == other.metrics


@pytest.mark.parametrize("name", FIRST)
def test_exact_rounds_never_lose_what_the_first_leg_has_won(name):
    shards = unequal_shards()
    relay = exact_after(FIRST[name], STAGE)
    rounds = run_stages(relay, shards, STAGE + 12)
    handed_over = relay.components(rounds[STAGE - 1].checkpoint.server)
    errors = [
        relative_error(relay.solver, shards, handed_over),
        *(done.metrics["relative_error"] for done in rounds[STAGE:]),
    ]
    assert min(errors[1:]) < errors[0]
    assert errors[1] <= errors[0] * (1 + 1e-9)


def test_a_relay_of_sums_is_a_sum_and_can_be_masked():
    shards, relay = unequal_shards(), exact_after(FIRST["by sums"], STAGE)
    assert isinstance(relay.aggregation, Reducible)
    assert not isinstance(exact_after(FIRST["fnmf"], STAGE).aggregation, Reducible)
    for one, other in zip(run_stages(relay, shards, 7), run_stages(relay, shards, 7, PairwiseMasks()), strict=True):
        assert_allclose(one.model["H"], other.model["H"], rtol=1e-6, atol=1e-9)


def test_a_run_goes_on_from_a_file_in_either_leg(tmp_path):
    shards, relay = unequal_shards(), exact_after(FIRST["fnmf"], STAGE)
    whole = run_stages(relay, shards, STAGE + 3)
    for stop in (1, STAGE - 1, STAGE, STAGE + 1):
        write_state(tmp_path / "c.safetensors", whole[stop].checkpoint)
        point = read_state(tmp_path / "c.safetensors")
        for party, H in party_components(whole[stop].checkpoint).items():
            assert_array_equal(party_components(point)[party], H)
        rest = run_stages(relay, shards, STAGE + 3, resume=point)
        for one, other in zip(whole[stop + 1 :], rest, strict=True):
            assert_array_equal(one.model["H"], other.model["H"])


def test_only_the_leg_is_added_to_what_is_broadcast():
    shards = unequal_shards()
    relay, first = exact_after(FIRST["fnmf"], STAGE), FIRST["fnmf"]
    layout = Layout.of(shards, 3)
    assert relay.start_server(layout)[1].nbytes == first.start_server(layout)[1].nbytes + 1
    legs = [int(done.model["leg"][0]) for done in run_stages(relay, shards, STAGE + 2)]
    assert legs == [0] * (STAGE - 1) + [1] * 3


def test_legs_that_do_not_fit_are_refused():
    with pytest.raises(ParameterError, match="rounds ≥ 1"):
        exact_after(build("fnmf-local", 4, align="assignment"), 0)
    from partsong.methods.two_stage import TwoStageProgram

    with pytest.raises(ParameterError, match="same rank"):
        TwoStageProgram(build("fnmf-local", 4, align="assignment"), build("exact", 5, local_steps=5), 2)


def test_an_estimator_runs_a_relay_to_convergence():
    parts = [shard.matrix.X for shard in unequal_shards()]
    relay = exact_after(FIRST["fnmf"], STAGE)
    model = FederatedNMF(method=relay, random_state=3, rounds=200, tol=1e-6).fit(parts)
    pooled = FederatedNMF(4, method="exact", random_state=3, rounds=400, tol=1e-8).fit([np.concatenate(parts)])
    assert model.relative_error_ <= pooled.relative_error_ * 1.02
    assert model.n_iter_ > STAGE
    assert np.isfinite([row.aligned_drift for row in model.history_]).all()


@pytest.mark.parametrize("name", FIRST)
def test_parties_keep_what_they_had_found_themselves(name):
    shards, relay = unequal_shards(), exact_after(FIRST[name], STAGE)
    rounds = run_stages(relay, shards, STAGE + 3)
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
    shards, relay = unequal_shards(), exact_after(FIRST["fnmf"], STAGE)
    schedule = Schedule(STAGE + 2, 3, absent={i: frozenset({"p1"}) for i in range(STAGE)})
    last = list(Sequential().run(relay, shards, schedule, reduction=PlainReduction()))[-1]
    assert set(party_components(last.checkpoint)) == {"p0", "p2", "p3"}


def test_the_estimator_tells_what_parties_had_found():
    parts = dict(zip("abcd", (shard.matrix.X for shard in unequal_shards()), strict=True))
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
