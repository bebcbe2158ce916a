"""Laws of sketched exchange: one trajectory for every number of parties, exact HALS as a special case, Theorem 1."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
from numpy.testing import assert_allclose, assert_array_equal
from pairwise_masks import PairwiseMasks

from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Checkpoint, Layout, Message, Outcome, Schedule, Shard
from partsong.core.streams import stream
from partsong.data.blocks import TwoSided, block_range, coverage_sums, two_sided_blocks
from partsong.data.conversion import as_matrix
from partsong.engines.local import Parallel, Sequential
from partsong.errors import CompositionError, ParameterError, PartsongError, PartyError, ShapeError
from partsong.io.state_file import read_state, write_state
from partsong.methods.dsanls import SketchExchange
from partsong.methods.exact import SharedSums
from partsong.sketch.crossing import Proportion, placed_rows, transposed_times, walk
from partsong.sketch.kinds import CountSketch, Gaussian, Hadamard, Subsampling
from partsong.solvers.initialization import random_columns
from partsong.solvers.normal_equations import Penalty
from partsong.solvers.squared_error import RowState, SquaredError, constant_rows
from partsong.solvers.update_rules import (
    CoordinateDescent,
    Extrapolation,
    InertialPalm,
    Multiplicative,
    ProjectedGradient,
    ProximalDescent,
)
from partsong.training.loop import WINDOW, ResumePoint, StoppingRule
from partsong.training.loop import run as run_fit
from partsong.training.result import finish
from partsong.training.simulation import FederatedFit

KINDS = [Subsampling, CountSketch, Gaussian, Hadamard]
N, M, K, SEED = 61, 34, 3, 3
DAMPED = SquaredError(ProximalDescent(alpha=0.05, beta=0.02))


def data(seed=0, noise=0.3):
    rng = np.random.default_rng(seed)
    return rng.gamma(0.5, size=(N, K)) @ rng.gamma(0.5, size=(K, M)) + noise * rng.random((N, M))


def program(kind=Subsampling, ratio=0.3, solver=DAMPED, **more):
    more = {"iterations": 12, "every": 4, "n_rows": N} | more
    return SketchExchange(K, solver, Proportion(kind, ratio), **more)


def shards_of(X, parts, **more):
    return [Shard(f"p{i:02d}", block) for i, block in enumerate(two_sided_blocks(X, parts, **more))]


def run(some, shards, rounds=None, engine=Sequential(), **more):
    schedule = Schedule(some.exchanges(some.iterations, 1) if rounds is None else rounds, SEED, **more)
    return list(engine.run(some, shards, schedule, reduction=PlainReduction()))


def factors(done):
    """W and H as the parties hold them after an exchange."""
    states = [done.checkpoint.parties[name] for name in sorted(done.checkpoint.parties)]
    return np.vstack([state.W for state in states]), np.vstack([state.Ht_block for state in states]).T


def model_bytes(rounds):
    return [{name: np.ascontiguousarray(a).tobytes() for name, a in done.model.arrays.items()} for done in rounds]


def descent(F, A, B, weight, sweeps=1):
    """The proximal step as it is printed: for each column all the others are in the place they have reached."""
    gram, cross, centre, F = B @ B.T, A @ B.T, F.copy(), F.copy()
    for _ in range(sweeps):
        for j in range(len(gram)):
            others = F @ gram[:, j] - F[:, j] * gram[j, j]
            F[:, j] = np.maximum(0, (weight * centre[:, j] + cross[:, j] - others) / (gram[j, j] + weight))
    return F


def reference(X, some, fresh):
    """Algorithm 2 on one machine, with S as arrays; yields W and H after each iteration."""
    rule = some.solver.rule
    n, m = X.shape
    H = random_columns(m, K, stream(SEED, "start")).T
    W = np.repeat((X @ H.T).sum(axis=1, keepdims=True) / (H @ H.T).sum(), K, axis=1)
    scales = [0.0, 0.0]
    for t in range(some.iterations):
        S = some.sketch.draw(m, K, SEED, "W", t).rows(0, m)
        S2 = some.sketch.draw(n, K, SEED, "H", t).rows(0, n)
        before, B = W, H @ S
        scales[0] = scales[0] or np.trace(B @ B.T) / K
        W = descent(W, X @ S, B, (rule.alpha + rule.beta * t) * scales[0])
        B = (W if fresh else before).T @ S2
        scales[1] = scales[1] or np.trace(B @ B.T) / K
        H = descent(H.T, X.T @ S2, B, (rule.alpha + rule.beta * t) * scales[1]).T
        yield W, H


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_algorithm_as_written(kind, fresh):
    X, some = data(), program(kind, fresh=fresh)
    rounds = run(some, shards_of(X, 3))
    for t, (W, H) in enumerate(reference(X, some, fresh)):
        found_W, found_H = factors(rounds[2 * t + 1])
        assert_allclose(found_W, W, rtol=1e-9, atol=1e-11)
        assert_allclose(found_H, H, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("form", [np.asarray, sp.csr_array, np.asfortranarray], ids=lambda form: form.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_parties_changes_nothing(kind, form):
    X = form(data() * (np.random.default_rng(1).random((N, M)) < 0.6))
    some = program(kind)
    alone = run(some, [Shard("p00", as_matrix(X))])
    for parts in (1, 2, 4):
        rounds = run(some, shards_of(X, parts))
        for done, other in zip(rounds, alone, strict=True):
            for mine, known in zip(factors(done), factors(other), strict=True):
                assert_allclose(mine, known, rtol=1e-10, atol=1e-10)
            assert dict(done.metrics) == pytest.approx(dict(other.metrics), rel=1e-10)
        assert_allclose(some.components(rounds[-1].checkpoint.server), factors(rounds[-2])[1], rtol=0, atol=0)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("penalty", [Penalty(), Penalty(1e-3, 2e-3)])
def test_without_sketch_and_damping_it_is_exact_hals(parts, penalty):
    """Ratio 1 keeps all coordinates: S = I, and the factors are those of shared statistics."""
    X, solver = data(), SquaredError(CoordinateDescent(), penalty, penalty)
    shared, shards = SharedSums(K, solver), [Shard("all", as_matrix(X))]
    Ht = shared.start_server(Layout.of(shards, SEED))[0].Ht
    given = {"all": RowState(constant_rows(Ht.T @ Ht, X @ Ht))}  # a start without W settles its scale first
    begun = Checkpoint(0, given, *shared.start_from(Ht))
    exact = list(Sequential().run(shared, shards, Schedule(12, SEED), reduction=PlainReduction(), resume=begun))
    rounds = run(program(ratio=1.0, solver=solver), shards_of(X, parts))
    for t, done in enumerate(exact):
        W, H = factors(rounds[2 * t + 1])
        assert_allclose(H, done.model["H"], rtol=1e-10, atol=1e-10)
        assert_allclose(W, done.checkpoint.parties["all"].W, rtol=1e-10, atol=1e-10)
    assert rounds[-1].metrics["objective"] == pytest.approx(exact[-1].metrics["objective"], rel=1e-9)


def test_a_huge_weight_freezes_both_factors():
    solver = SquaredError(CoordinateDescent(alpha=1e14, beta=1.0))
    rounds = run(program(solver=solver), shards_of(data(), 2))
    for first, last in zip(factors(rounds[0]), factors(rounds[-1]), strict=True):
        assert_allclose(last, first, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("parts", [1, 3])
def test_the_error_is_that_of_the_factors_before_the_exchange(parts):
    X, penalty = data(), Penalty(1e-3, 2e-3)
    some = program(solver=replace(DAMPED, penalty_W=penalty, penalty_H=penalty))
    rounds = run(some, shards_of(X, parts))
    told = {done.index: done.metrics for done in rounds if done.metrics}
    assert sorted(told) == [0, 8, 16, 24], "with every fourth whole H, and with the start"
    assert [done.index for done in rounds if some.turn(done.model).ends_round] == [8, 16, 24], "the start is no round"
    for index in (8, 16, 24):
        W, H = factors(rounds[index - 1])
        assert_allclose(some.components(rounds[index].checkpoint.server), H, rtol=1e-12)
        squares = np.square(X - W @ H).sum()
        assert told[index]["relative_error"] == pytest.approx(np.sqrt(squares / np.square(X).sum()), rel=1e-9)
        sizes = [penalty.l1 * F.sum() + 0.5 * penalty.l2 * np.square(F).sum() for F in (W, H)]
        objective = 0.5 * squares + M * sizes[0] + N * sizes[1]
        assert told[index]["objective"] == pytest.approx(objective / (0.5 * np.square(X).sum()), rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_traffic_is_the_formula_and_names_are_all_that_is_sent(kind):
    some, X = program(kind), data()
    d_W, d_H = some.sketch.dimension(N, K), some.sketch.dimension(M, K)
    assert (d_W, d_H) == (19, 11)
    for done in run(some, shards_of(X, 3), engine=Sequential(record=True)):
        t, is_second = divmod(done.index, 2)
        if is_second and (t + 1) % 4 == 0:
            expected = {"H": (K, M)}
        elif is_second:
            expected = {"sketched_H": (K, d_H)}
        else:
            expected = {"sketched_W": (K, d_W)} | ({"totals": (3,)} if t % 4 == 0 else {})
            expected |= {"blocks": (2,)} if done.index == 0 else {}
        assert len(done.traffic) == 3
        for party, _, message in done.traffic:
            assert {name: shape for name, shape, _ in message.signature} == expected
            assert done.bytes_up[party] == 8 * sum(math.prod(shape) for shape in expected.values()) + 8
        assert set(done.model.arrays) == set(expected) - {"totals", "blocks"} | {"turn"}


def test_gaussian_sketches_send_no_entry_of_rows_or_weights():
    """Of X nothing, of W and H combinations of all their rows or columns; H itself only when it is whole."""
    X, some = data(), program(Gaussian)
    rounds = run(some, shards_of(X, 3), engine=Sequential(record=True))
    private = [X, *(factors(done)[0] for done in rounds)]
    entries = np.unique(np.concatenate([F[F != 0].ravel() for F in private]))
    for done in rounds:
        for _, _, message in done.traffic:
            for name, array in message.arrays.items():
                if name.startswith("sketched"):
                    assert not np.isin(array, entries).any()


def residual(X, W, H):
    """How far both factors are from a stationary point of the unsketched problem, over their sizes."""
    on_W, on_H = np.minimum(W, W @ (H @ H.T) - X @ H.T), np.minimum(H, (W.T @ W) @ H - W.T @ X)
    return math.hypot(*(np.linalg.norm(a) / np.linalg.norm(F) for a, F in ((on_W, W), (on_H, H))))


def last_residual(X, solver, iterations, kind=Subsampling):
    """The median over the last exchanges, and the residual after the first iteration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        some = program(kind, solver=SquaredError(solver), iterations=iterations, every=iterations)
    found = []
    for done in Sequential().run(
        some, [Shard("all", as_matrix(X))], Schedule(2 * iterations, SEED), reduction=PlainReduction()
    ):
        if done.index == 1 or done.index > 2 * iterations - 40:
            found.append(residual(X, *factors(done)))
    return float(np.median(found[1:])), found[0]


@pytest.mark.parametrize("seed", [1, 3, 5])
def test_growing_weights_reach_a_stationary_point_of_the_unsketched_problem(seed):
    """Theorem 1; without weights every step jumps to the solution of another sketch."""
    X = data(seed)
    reached, first = last_residual(X, ProximalDescent(alpha=0.1, beta=0.1), 400)
    assert reached < first / 30
    restless, _ = last_residual(X, CoordinateDescent(), 400)
    assert restless > 3 * reached


@pytest.mark.parametrize("kind", [Subsampling, Gaussian])
def test_projected_gradients_reach_it_too(kind):
    reached, first = last_residual(data(), ProjectedGradient(decay=0.05), 400, kind)
    assert reached < first / 8


@pytest.mark.parametrize("rule", [ProximalDescent(2), InertialPalm(0.2), ProjectedGradient(decay=0.01)], ids=repr)
def test_other_rules_fit_as_well(rule):
    X = data(noise=0.01)
    rounds = run(program(solver=SquaredError(rule), iterations=80, every=40), shards_of(X, 2))
    errors = [done.metrics["relative_error"] for done in rounds if done.metrics]
    assert errors[-1] < 0.25 * errors[0]


def test_weights_grow_once_in_an_iteration_and_scales_are_the_same_everywhere():
    states = run(program(), shards_of(data(), 3), 9)[-1].checkpoint.parties.values()
    assert {(float(state.memory_W.count), float(state.memory_H.count)) for state in states} == {(5, 4)}
    for of in ("memory_W", "memory_H"):
        scales = {float(getattr(state, of).scale) for state in states}
        assert len(scales) == 1
        assert scales.pop() > 0


def test_capped_entries_stay_below_the_cap():
    X = data()
    cap = math.sqrt(2 * np.linalg.norm(X))
    wild = SquaredError(ProjectedGradient(step_size=30.0, decay=1e-6))
    assert max(F.max() for done in run(program(solver=wild), shards_of(X, 2), 11) for F in factors(done)) > 2 * cap
    for done in run(program(solver=wild, capped=True), shards_of(X, 2), 11):
        W, H = factors(done)
        assert done.index < 1 or H.max() <= cap * (1 + 1e-12)
        assert done.index < 2 or W.max() <= cap * (1 + 1e-12)
    assert float(done.model["cap"][0]) == pytest.approx(cap)


@pytest.mark.parametrize("kind", KINDS)
def test_engines_agree_bit_for_bit(kind):
    shards, some = shards_of(data(), 4), program(kind)
    known = run(some, shards)
    for engine in (Sequential(shuffle=5), Parallel(3), Parallel(1)):
        other = run(some, shards[::-1], engine=engine)
        assert model_bytes(other) == model_bytes(known)
        assert [done.metrics for done in other] == [done.metrics for done in known]


@pytest.mark.parametrize("at", [0, 1, 7, 8])
def test_checkpoints_resume_bit_for_bit(at, tmp_path):
    shards, some = shards_of(data(), 3), program(capped=True)
    whole = run(some, shards)
    write_state(tmp_path / "point", whole[at].checkpoint)
    point = read_state(tmp_path / "point")
    schedule = Schedule(some.exchanges(some.iterations, 1), SEED)
    rest = list(Sequential().run(some, shards, schedule, reduction=PlainReduction(), resume=point))
    assert model_bytes(rest) == model_bytes(whole[at + 1 :])


def test_float32_is_kept():
    X = data().astype(np.float32)
    for kind, form in itertools.product(KINDS, (np.asarray, sp.csr_array)):
        done = run(program(kind), shards_of(form(X), 2), 8)[-1]
        assert {F.dtype for F in factors(done)} == {np.dtype(np.float32)}
        assert done.model["H"].dtype == np.float32
        exact = run(program(kind), shards_of(form(X.astype(np.float64)), 2), 8)[-1]
        assert_allclose(done.model["H"], exact.model["H"], rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("kind", [Subsampling, CountSketch, Gaussian])
def test_tensors_run_the_same_program(kind):
    torch = pytest.importorskip("torch")
    X = data()
    known = run(program(kind), shards_of(X, 2))
    other = run(program(kind), shards_of(torch.from_numpy(X), 2))
    H = program(kind).components(other[-1].checkpoint.server)
    assert isinstance(H, torch.Tensor)
    assert_allclose(H.numpy(), program(kind).components(known[-1].checkpoint.server), rtol=1e-8, atol=1e-10)
    assert other[-1].metrics["relative_error"] == pytest.approx(known[-1].metrics["relative_error"], rel=1e-9)


def task_of(some, X, stop=StoppingRule(0.0), rounds=None):
    schedule = Schedule(some.exchanges(some.iterations, 1) if rounds is None else rounds, SEED)
    return FederatedFit(some, shards_of(X, 2), schedule, stop)


def test_a_run_is_followed_from_whole_model_to_whole_model():
    X, some = data(), program(iterations=40, every=10)
    task = task_of(some, X)
    ran = run_fit(task)
    assert ran.outcome is Outcome.MAX_ROUNDS
    assert len(ran.history) == 81
    known = {row.iteration - 1: row.objective for row in ran.history if not math.isnan(row.objective)}
    assert sorted(known) == [20, 40, 60, 80]
    best = min(known, key=known.get)
    rounds = run(some, shards_of(X, 2))
    assert_array_equal(some.components(ran.best), some.components(rounds[best].checkpoint.server))
    done = finish(task, ran)
    assert done.relative_error <= math.sqrt(known[best]) + 1e-12, "W is solved for that H"


def test_a_run_stops_when_whole_models_improve_no_more():
    still = program(solver=SquaredError(CoordinateDescent(alpha=1e14, beta=1.0)), iterations=100, every=2)
    ran = run_fit(task_of(still, data(), StoppingRule(1e-3)))
    assert ran.outcome is Outcome.CONVERGED
    known = [row.iteration - 1 for row in ran.history if not math.isnan(row.objective)]
    assert known == [4 * i for i in range(1, WINDOW + 2)], "so many whole models, not exchanges"


def test_a_run_goes_on_from_within_a_round():
    X, some = data(), program(iterations=10, every=5)
    whole = run_fit(task_of(some, X))
    first = run(some, shards_of(X, 2), 7)
    point = ResumePoint(first[-1].checkpoint, tuple(whole.history[:7]), first[0].checkpoint.server)
    rest = run_fit(task_of(some, X), resume=point)
    assert [row.objective for row in rest.history[7:]] == pytest.approx(
        [row.objective for row in whole.history[7:]], nan_ok=True, abs=0
    )
    assert_array_equal(some.components(rest.best), some.components(whole.best))


def test_a_given_start_is_where_it_starts():
    X, some = data(), program()
    Ht = np.random.default_rng(5).random((M, K))
    server, model = some.start_from(Ht)
    point = Checkpoint(0, {}, server, model)
    first = next(Sequential().run(some, shards_of(X, 2), Schedule(2, SEED), reduction=PlainReduction(), resume=point))
    assert_array_equal(factors(first)[1], Ht.T)
    started = np.repeat((X @ Ht).sum(axis=1, keepdims=True) / (Ht.T @ Ht).sum(), K, axis=1)
    error = np.linalg.norm(X - started @ Ht.T) / np.linalg.norm(X)
    assert first.metrics["relative_error"] == pytest.approx(error, rel=1e-9)


def test_uploads_are_held_to_their_form_where_the_number_of_rows_is_known():
    layout = Layout(("a", "b"), M, 0)
    some = program()
    kinds = {frozenset(kind): kind for kind in some.upload_spec(layout)}
    for done in run(some, shards_of(data(), 2), engine=Sequential(record=True)):
        for _, _, message in done.traffic:
            kind = kinds[frozenset(message.arrays)]
            assert {name: form.shape for name, form in kind.items()} == {n: s for n, s, _ in message.signature}
    assert program(Subsampling).upload_spec(layout)[0]["sketched_W"].non_negative
    assert not program(Gaussian).upload_spec(layout)[0]["sketched_W"].non_negative
    assert program(n_rows=None).upload_spec(layout) == ()
    free = run(program(n_rows=None), shards_of(data(), 2))
    assert model_bytes(free) == model_bytes(run(some, shards_of(data(), 2)))


def test_what_shows_single_parties_does_not_go_with_masks():
    with pytest.raises(CompositionError, match="machines of one owner"):
        next(Sequential().run(program(), shards_of(data(), 2), Schedule(2), reduction=PairwiseMasks()))


def test_rows_alone_are_refused_at_several_parties():
    X = data()
    plain = [Shard(f"p{i}", as_matrix(part)) for i, part in enumerate(np.array_split(X, 2))]
    with pytest.raises(CompositionError, match="TwoSided"):
        run(program(n_rows=None), plain, 1)


def test_blocks_have_to_cover_everything_once():
    X = data()
    a, b = two_sided_blocks(X, 2)
    cases = {
        "columns": [a, replace(b, column_block=a.column_block, first_column=0)],
        "rows": [a, replace(b, row_block=a.row_block, first_row=0)],
    }
    for noun, blocks in cases.items():
        with pytest.raises(CompositionError, match=f"do not cover the {noun} of X exactly once"):
            run(program(), [Shard(f"p{i}", block) for i, block in enumerate(blocks)], 1)
    with pytest.raises(CompositionError, match="exactly once"):
        run(program(), [Shard("p0", a)], 1)
    with pytest.raises(CompositionError, match="exactly once"):
        run(program(), [Shard("p0", TwoSided.of(as_matrix(X))), Shard("p1", TwoSided.of(as_matrix(X)))], 1)
    with pytest.raises(CompositionError, match="exactly once"):
        run(program(), shards_of(X, 3), 1, absent={0: frozenset({"p01"})})
    for parts in (1, 2, 5, 30):
        assert_allclose(sum(coverage_sums(block, parts) for block in two_sided_blocks(X, parts)), 0, atol=1e-12)


@pytest.mark.parametrize("index", [1, 2, 7, 8])
def test_nobody_may_miss_an_exchange(index):
    with pytest.raises(PartyError, match="2 of 3 parties"):
        run(program(), shards_of(data(), 3), absent={index: frozenset({"p01"})})


def test_a_program_made_for_other_rows_says_so():
    with pytest.raises(CompositionError, match=r"n_rows=10.* 61 rows"):
        run(program(n_rows=10), shards_of(data(), 2), 1)


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"rank": 0}, ParameterError, "rank must be a whole number of at least 1; got 0"),
        ({"iterations": 0}, ParameterError, "iterations must be a whole number"),
        ({"every": 1.5}, ParameterError, "every must be a whole number of at least 1; got 1.5"),
        ({"every": True}, ParameterError, "every"),
        ({"n_rows": 0}, ParameterError, "n_rows"),
        ({"solver": SquaredError(momentum=Extrapolation())}, CompositionError, "NoExtrapolation"),
        (
            {"solver": SquaredError(Multiplicative()), "sketch": Proportion(Gaussian)},
            CompositionError,
            "non-negative products",
        ),
    ],
)
def test_settings_are_checked_when_it_is_made(settings, kind, words):
    with pytest.raises(kind, match=words) as caught:
        SketchExchange(**{"rank": 3, **settings})
    assert isinstance(caught.value, PartsongError)


def test_weights_that_do_not_grow_are_warned_of_where_there_is_a_sketch():
    for rule in (CoordinateDescent(alpha=1.0), CoordinateDescent(), ProximalDescent(beta=0.0)):
        with pytest.warns(UserWarning, match="Use beta > 0") as caught:
            program(solver=SquaredError(rule))
        assert caught[0].filename == __file__
        program(solver=SquaredError(rule), ratio=1.0)
    program(solver=SquaredError(Multiplicative()))


def test_zero_data_and_zero_columns_do_no_harm():
    X = data()
    X[:, 5], X[7] = 0, 0
    done = run(program(), shards_of(X, 2))[-1]
    assert np.isfinite(done.metrics["relative_error"])
    nothing = run(program(), shards_of(np.zeros((N, M)), 2))[-1]
    assert dict(nothing.metrics) == {"relative_error": 0.0, "objective": 0.0}


@pytest.mark.parametrize("parts", [1, 3, 7, 34])
def test_blocks_are_near_equal_and_hold_the_matrix(parts, tmp_path):
    X = data()
    np.save(tmp_path / "X.npy", X)
    mapped = np.load(tmp_path / "X.npy", mmap_mode="r")
    for form, more in ((X, {}), (sp.csr_array(X), {}), (mapped, {}), (X, {"rows_by_column": True})):
        blocks = two_sided_blocks(form, parts, **more)
        heights = [block.shape[0] for block in blocks]
        assert heights == sorted(heights, reverse=True)
        assert max(heights) - min(heights) <= 1
        for number, block in enumerate(blocks):
            a, b = block_range(N, parts, number)
            c, d = block_range(M, parts, number)
            assert (block.first_row, block.first_column, block.n_rows) == (a, c, N)
            assert_allclose(block.row_block.times(np.eye(M)), X[a:b])
            assert_allclose(block.column_block.times(np.eye(d - c)), X[:, c:d])
        assert (b, d) == (N, M)


def test_as_a_matrix_it_is_its_rows():
    X = data()
    block = two_sided_blocks(X, 3)[1]
    part, rng = X[block.first_row :][: block.shape[0]], np.random.default_rng(0)
    rows, W, Ht = as_matrix(part), rng.random((len(part), K)), rng.random((M, K))
    assert block.shape == part.shape
    assert (block.dtype, block.stored, block.mean, block.squared_norm) == (
        rows.dtype, rows.stored, rows.mean, rows.squared_norm,
    )  # fmt: skip
    assert_array_equal(block.times(Ht), rows.times(Ht))
    assert_array_equal(block.transposed_times(W), rows.transposed_times(W))
    assert_array_equal(block.columns(np.array([1, 4])), part[:, [1, 4]])
    assert_array_equal(block.rows(np.array([0, 2])).X, part[[0, 2]])
    assert_array_equal(block.column_energies(), rows.column_energies())
    assert_array_equal(block.gram_column(2), rows.gram_column(2))
    assert block.squared_distance(W, Ht) == rows.squared_distance(W, Ht)
    assert block.native(Ht) is Ht
    solver = SquaredError()
    assert_array_equal(solver.solve_rows(block, Ht), solver.solve_rows(rows, Ht))
    mine, other = (
        solver.row_step(matrix, RowState(W), solver.broadcast(solver.begin(Ht)))[1] for matrix in (block, rows)
    )
    assert_array_equal(mine["cross"], other["cross"])


def test_blocks_that_do_not_fit_are_refused():
    X = data()
    rows, columns = as_matrix(X[:10]), as_matrix(X[:, :5])
    sound = {"row_block": rows, "column_block": columns, "first_row": 0, "first_column": 0, "n_rows": N}
    for wrong in (
        {"n_rows": 60},
        {"first_row": 52},
        {"first_row": -1},
        {"first_column": 30},
        {"row_block": as_matrix(X[:0])},
    ):
        with pytest.raises(ShapeError):
            TwoSided(**sound | wrong)
    with pytest.raises(CompositionError, match="float64 and columns float32"):
        TwoSided(rows, as_matrix(X[:, :5].astype(np.float32)), 0, 0, N)
    for parts in (0, 35, -1):
        with pytest.raises(ParameterError):
            two_sided_blocks(X, parts)
    with pytest.raises(ParameterError):
        two_sided_blocks(X[0], 1)
    for size, parts, number in ((5, 6, 0), (5, 2, 2), (5, 0, 0), (5, 2, -1)):
        with pytest.raises(ParameterError):
            block_range(size, parts, number)


@pytest.mark.parametrize("form", ["C", "F", "mapped", "int", "wide", "csr", "tensor"])
@pytest.mark.parametrize("kind", KINDS)
def test_products_for_the_equations_are_those_of_the_sketched_matrix(kind, form, tmp_path, monkeypatch):
    X = np.round(10 * data()).astype(np.int16 if form == "int" else np.float64)
    if form == "wide":
        monkeypatch.setattr("partsong.data.scan.TILE_BYTES", 4096)
    if form == "tensor":
        import_torch = pytest.importorskip("torch")
        matrix = as_matrix(import_torch.from_numpy(X))
    elif form == "mapped":
        np.save(tmp_path / "X.npy", X)
        matrix = as_matrix(np.load(tmp_path / "X.npy", mmap_mode="r"))
    else:
        matrix = as_matrix({"F": np.asfortranarray, "csr": sp.csr_array}.get(form, np.asarray)(X))
    rng = np.random.default_rng(0)
    S, S2 = Proportion(kind, 0.3).draw(M, K, 1, "W"), Proportion(kind, 0.3).draw(N, K, 1, "H")
    C, C2, F = rng.random((S.dimension, K)), rng.random((S2.dimension, K)), rng.random((20, K))
    rtol = 1e-4 if form == "int" else 1e-11
    product = np.full((N, K), np.nan)

    def update(rows, block):
        assert np.isnan(product[rows]).all(), "every row once"
        product[rows] = block
        return ()

    walk(S, matrix, matrix.native(C), update)
    assert_allclose(product, X @ S.rows(0, M) @ C, rtol=rtol, atol=rtol)
    found = transposed_times(S2, matrix, matrix.native(C2))
    assert_allclose(found, X.T @ S2.rows(0, N) @ C2, rtol=rtol, atol=rtol)
    assert_allclose(placed_rows(S2, F, 30), F.T @ S2.rows(30, 50), rtol=1e-12, atol=1e-12)


def test_models_say_whose_turn_it_is():
    some = program(every=5)
    assert some.exchanges(some.iterations, 1) == 25
    assert some.exchanges(7, 1) == 15
    ends = [some.turn(Message({"turn": np.array([turn])})).ends_round for turn in range(1, 26)]
    assert [turn for turn, is_end in enumerate(ends) if is_end] == [10, 20, 24]
