"""Many turns in one compiled call are the same turns, taken singly."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from partsong.aggregation.alignment import Assignment, PartialAssignment, Sinkhorn
from partsong.aggregation.plaintext import PlainReduction
from partsong.core import runtime
from partsong.core.interfaces import Schedule, Shard
from partsong.data.conversion import as_matrix
from partsong.data.dense import DenseMatrix
from partsong.engines.local import Parallel, Sequential
from partsong.kernels import fused_steps
from partsong.kernels.fused_steps import StepRule
from partsong.methods import build
from partsong.solvers.coupling import AlignedProximalTerm, NoPull, ProximalAnchor, ProximalTerm
from partsong.solvers.fused_steps import TurnsAtOnce
from partsong.solvers.local_steps import run_local_steps, run_steps_one_by_one
from partsong.solvers.normal_equations import Penalty
from partsong.solvers.squared_error import RowState, SquaredError
from partsong.solvers.update_rules import CoordinateDescent, InertialPalm, Multiplicative, ProjectedGradient

RULES = {
    "iPALM": InertialPalm(),
    "iPALM with inertia": InertialPalm(0.3),
    "HALS": CoordinateDescent(2),
    "MU": Multiplicative(),
}
PULLS = {
    "alone": NoPull(),
    "by position": ProximalTerm(0.2),
    "by position, absolute": ProximalTerm(3.0, absolute=True),
    "assignment": AlignedProximalTerm(0.1, Assignment(), every=3),
    "partial assignment": AlignedProximalTerm(0.1, PartialAssignment(), every=2),
    "transport": AlignedProximalTerm(0.1, Sinkhorn(), every=4),
    "exact": AlignedProximalTerm(2.0, PartialAssignment(), prox="exact", every=5),
}
TURNS = 13
ROWS, COLUMNS, RANK = 90, 40, 6


def data(is_sparse, dtype):
    draw = np.random.default_rng(3)
    X = (draw.random((ROWS, RANK)) @ draw.random((RANK, COLUMNS))) * (draw.random((ROWS, COLUMNS)) < 0.6)
    X[7] = 0
    X[:, 11] = 0
    return as_matrix((sparse.csr_matrix(X) if is_sparse else X).astype(dtype))


def begun(solver, dtype):
    draw = np.random.default_rng(4)
    W, Ht = (draw.random((size, RANK)).astype(dtype) for size in (ROWS, COLUMNS))
    model = Ht[:, draw.permutation(RANK)] + dtype(0.05) * draw.random((COLUMNS, RANK)).astype(dtype)
    return RowState(W, None, solver.rule.init(W)), solver.begin(Ht), ProximalAnchor(model)


HT = np.random.default_rng(5).random((COLUMNS, RANK))


def far(a, b):
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("rule", RULES)
def test_turns_at_once_are_the_turns_taken_singly(rule, pull, dtype, is_sparse, monkeypatch):
    if pull == "exact" and not rule.startswith("iPALM"):
        pytest.skip("the exact pull is for gradient rules")
    matrix, coupling = data(is_sparse, dtype), PULLS[pull]
    monkeypatch.setattr(type(matrix), "max_steps_per_call", lambda self, rank, move: 4)
    calls = []
    taken = type(matrix).run_fused_steps
    monkeypatch.setattr(type(matrix), "run_fused_steps", lambda *given: (calls.append(given[-1].count), taken(*given)))
    near = 1e-8 if dtype is np.float64 else 3e-3
    for penalty in (Penalty(), Penalty(1e-3, 1e-2)):
        calls.clear()
        solver = SquaredError(RULES[rule], penalty, penalty)
        rows, columns, tether = begun(solver, dtype)
        kept = [F.copy() for F in (rows.W, columns.Ht, tether.Ht)]
        with runtime.limit_kernel_threads(1):
            W, H = run_local_steps(solver, matrix, rows, columns, coupling, tether, TURNS)
            assert sum(calls) == TURNS
            assert max(calls) <= min(4, getattr(coupling, "every", 4))
            W_singly, H_singly = run_steps_one_by_one(solver, matrix, rows, columns, coupling, tether, TURNS)
        assert sum(calls) == TURNS
        assert far(W.W, W_singly.W) < near
        assert far(H.Ht, H_singly.Ht) < near
        assert W.W.dtype == H.Ht.dtype == dtype
        assert H.point is H.Ht
        assert (W.memory.count, H.memory.count) == (TURNS, TURNS)
        for state, other in ((W.memory, W_singly.memory), (H.memory, H_singly.memory)):
            assert (state.previous is None) == (other.previous is None)
            assert state.previous is None or far(state.previous, other.previous) < near
        assert all((now == then).all() for now, then in zip((rows.W, columns.Ht, tether.Ht), kept, strict=True))


@pytest.mark.parametrize("rule", [CoordinateDescent(1, alpha=0.5), Multiplicative(2), ProjectedGradient()])
def test_rules_that_compiled_code_does_not_know_are_taken_singly(rule, monkeypatch):
    monkeypatch.setattr(DenseMatrix, "run_fused_steps", lambda *given: pytest.fail("not known to compiled code"))
    solver = SquaredError(rule)
    rows, columns, tether = begun(solver, np.float64)
    with runtime.limit_kernel_threads(1):
        _, H = run_local_steps(solver, data(False, np.float64), rows, columns, NoPull(), tether, 3)
    assert H.memory.count == 3


class Thresholded(CoordinateDescent):
    """A rule of one's own that changes what it inherits."""

    def step(self, factor, equations, state):
        moved, state = super().step(factor, equations, state)
        return np.where(moved > 0.5 * moved.max(), moved, 0), state


class Halfway(AlignedProximalTerm):
    """A coupling of one's own that changes what it inherits."""

    def step(self, rule, Ht, equations, state, tether):
        moved, state, tether = super().step(rule, Ht, equations, state, tether)
        return (moved + Ht) / 2, state, tether


class Named(InertialPalm):
    """A rule with words of its own."""

    def move(self):
        return "somewhere"


@pytest.mark.parametrize(
    ("rule", "coupling"), [(Thresholded(), NoPull()), (InertialPalm(), Halfway()), (Named(), NoPull())]
)
def test_what_a_subclass_inherits_does_not_speak_for_its_steps(rule, coupling):
    solver = SquaredError(rule)
    with runtime.limit_kernel_threads(1):
        found = run_local_steps(
            solver, data(False, np.float64), *begun(solver, np.float64)[:2], coupling, ProximalAnchor(HT), 5
        )
        expected = run_steps_one_by_one(
            solver, data(False, np.float64), *begun(solver, np.float64)[:2], coupling, ProximalAnchor(HT), 5
        )
    assert (found[1].Ht == expected[1].Ht).all()
    assert (found[0].W == expected[0].W).all()


def test_only_data_that_lie_ready_are_worked_on_at_once(tmp_path):
    X = np.random.default_rng(0).random((50, 20))
    np.save(tmp_path / "x.npy", X)
    mapped = DenseMatrix(np.load(tmp_path / "x.npy", mmap_mode="r"), np.dtype(np.float64))
    by_column = DenseMatrix(np.asfortranarray(X), np.dtype(np.float64))
    integers = DenseMatrix((X * 9).astype(np.int32), np.dtype(np.float64))
    ready = DenseMatrix(X, np.dtype(np.float64))
    for matrix, is_ready in ((mapped, False), (by_column, False), (integers, False), (ready, True)):
        assert isinstance(matrix, TurnsAtOnce)
        with runtime.limit_kernel_threads(1):
            assert (matrix.max_steps_per_call(5, StepRule("descend")) > 0) is is_ready


@pytest.mark.parametrize("move", [StepRule("descend"), StepRule("sweep", 20)], ids=["step", "sweeps"])
@pytest.mark.parametrize("shape", [(60000, 784, 50), (1200, 784, 20), (30, 10, 3), (100, 50, 50), (50, 30, 60)])
def test_a_call_ends_soon_enough_to_be_interrupted(shape, move):
    """Operations of one call, products and steps and what every turn has, are bounded: about a tenth of a second."""
    n, m, k = shape
    X = np.zeros((n, m), np.float32)
    with runtime.limit_kernel_threads(1):
        turns = DenseMatrix(X, X.dtype).max_steps_per_call(k, move)
        by_rows = as_matrix(sparse.csr_matrix(X)).max_steps_per_call(k, move)
    one = 4 * n * m * k + 2 * (n + m) * k**2 * move.sweeps
    assert turns >= 1
    assert turns == 1 or turns * one < 2.5e9
    assert turns < 5000
    assert by_rows < 5000


@pytest.mark.parametrize(("rows", "columns", "rank", "offset"), [(100_000, 8, 4, 100), (60_000, 5, 3, 0)])
def test_sums_over_many_rows_keep_their_digits(rows, columns, rank, offset):
    """Turns in float32 stay as near to float64 as single ones do."""
    draw = np.random.default_rng(0)
    X = draw.random((rows, rank)) @ draw.random((rank, columns)) + offset
    W, Ht = draw.random((rows, rank)) + offset, draw.random((columns, rank))
    solver, found = SquaredError(CoordinateDescent()), {}
    with runtime.limit_kernel_threads(1):
        for dtype, way in (
            (np.float64, run_local_steps),
            (np.float32, run_local_steps),
            (np.float32, run_steps_one_by_one),
        ):
            start = RowState(W.astype(dtype), None, solver.rule.init(W)), solver.begin(Ht.astype(dtype))
            _, columns_ = way(solver, as_matrix(X.astype(dtype)), *start, NoPull(), ProximalAnchor(Ht), 20)
            found[dtype, way] = columns_.Ht
    exact = found[np.float64, run_local_steps]
    assert (
        far(found[np.float32, run_local_steps], exact) < 10 * far(found[np.float32, run_steps_one_by_one], exact) + 1e-6
    )


def test_engines_agree_to_the_bit_whatever_the_calls(monkeypatch):
    draw = np.random.default_rng(1)
    parts = draw.random((5, 30))
    shards = [Shard(f"p{i}", as_matrix(draw.random((40 + i, 5)) @ parts), i) for i in range(4)]
    program = build("fnmf-local", 5, local_steps=12, align="assignment")

    def model(engine):
        *_, last = engine.run(program, shards, Schedule(3, 0), reduction=PlainReduction())
        return program.components(last.checkpoint.server)

    once = model(Sequential())
    assert (model(Parallel(3)) == once).all()
    monkeypatch.setattr(DenseMatrix, "max_steps_per_call", lambda self, rank, move: 0)
    assert far(model(Sequential()), once) < 1e-8


grams = st.builds(
    lambda seed, rows, k, zeros, share: _factor(seed, rows, k, zeros, share),
    st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 12), st.integers(0, 3), st.floats(0.05, 1),
)  # fmt: skip


def _factor(seed, rows, k, zeros, share):
    draw = np.random.default_rng(seed)
    F = draw.gamma(0.3, size=(rows, k)) * (draw.random((rows, k)) < share) * 10.0 ** draw.integers(-8, 8, k)
    F[:, :zeros] = 0
    return F.T @ F


@settings(max_examples=300, deadline=None)
@given(gram=grams, is_signed=st.booleans(), warm=st.booleans())
def test_the_largest_eigenvalue_is_never_too_small(gram, is_signed, warm):
    k = len(gram)
    if is_signed:
        signs = np.where(np.arange(k) % 2, -1.0, 1.0)
        gram = signs[:, None] * gram * signs
    v = np.ones(k)
    expected = max(0.0, float(np.linalg.eigvalsh(gram)[-1]))
    for _ in range(2 if warm else 1):
        found = fused_steps.largest_eigenvalue(gram, v)
        assert found == pytest.approx(expected, rel=1e-10, abs=1e-300)
        assert (v > 0).all() or expected == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gram_that_is_not_finite_has_an_infinite_eigenvalue(bad):
    gram = np.eye(3)
    gram[0, 1] = gram[1, 0] = bad
    assert fused_steps.largest_eigenvalue(gram, np.ones(3)) == np.inf


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rule", ["iPALM", "MU"])
def test_what_vanishes_becomes_zero(rule, dtype):
    """Columns that nobody has anything in decay by a factor a turn; numbers below the normal ones slow down all."""
    X = np.zeros((30, 12), dtype)
    X[:, :6] = np.random.default_rng(0).random((30, 6))
    solver = SquaredError(RULES[rule])
    draw = np.random.default_rng(1)
    rows = RowState(draw.random((30, 3)).astype(dtype), None, solver.rule.init(X))
    Ht = draw.random((12, 3)).astype(dtype)
    with runtime.limit_kernel_threads(1):
        _, H = run_local_steps(solver, as_matrix(X), rows, solver.begin(Ht), NoPull(), ProximalAnchor(Ht), 3000)
    assert not ((H.Ht > 0) & (H.Ht < np.finfo(dtype).tiny)).any()
    assert (H.Ht[6:] == 0).any()
