"""Laws of update rules: one table, every rule; turns in one compiled call; exact steps against SciPy's solver."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy import sparse
from scipy.optimize import nnls

from partsong.aggregation.alignment import Assignment, PartialAssignment, Sinkhorn
from partsong.aggregation.plaintext import PlainReduction
from partsong.core import runtime
from partsong.core.interfaces import Guarantee, Schedule, Shard
from partsong.data.conversion import as_matrix
from partsong.data.dense import DenseMatrix
from partsong.engines.local import Parallel, Sequential
from partsong.kernels import fused_steps
from partsong.kernels.fused_steps import StepRule
from partsong.methods import build
from partsong.solvers.coupling import AlignedProximalTerm, NoCoupling, ProximalAnchor, ProximalTerm
from partsong.solvers.fused_steps import SupportsFusedSteps
from partsong.solvers.local_steps import run_local_steps, run_steps_one_by_one
from partsong.solvers.normal_equations import NormalEquations, Penalty
from partsong.solvers.squared_error import SUPPORT_SWEEPS, RowState, SquaredError, constant_rows
from partsong.solvers.update_rules import (
    BlockPivoting,
    CoordinateDescent,
    InertialPalm,
    Multiplicative,
    ProjectedGradient,
    ProximalDescent,
)

RULES = [
    Multiplicative(),
    Multiplicative(steps=3),
    CoordinateDescent(),
    CoordinateDescent(sweeps=5),
    CoordinateDescent(alpha=1.0),
    CoordinateDescent(sweeps=2, alpha=0.1, beta=0.5),
    ProximalDescent(sweeps=2, alpha=0.1, beta=0.5),
    ProjectedGradient(),
    ProjectedGradient(step_size=1.9, decay=0.1),
    ProjectedGradient(step_size=1e-3, absolute=True),
    InertialPalm(),
    InertialPalm(inertia=0.4),
    BlockPivoting(),
]
SHAPES = [(1, 1, 1), (7, 5, 1), (5, 9, 3), (70, 20, 8), (130, 30, 17), (3, 2, 6)]


def problem(rows: int, columns: int, rank: int, seed: int = 0, dtype: type = np.float64):
    """A, B and a positive starting factor."""
    rng = np.random.default_rng(seed)
    A, B, F = rng.random((rows, columns)), rng.random((rank, columns)), rng.random((rows, rank)) + 0.1
    return A.astype(dtype), B.astype(dtype), F.astype(dtype)


def residual(A, B, F) -> float:
    return 0.5 * float(np.square(A - F @ B).sum())


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_are_non_negative_and_leave_the_input_alone(rule, shape):
    A, B, F = problem(*shape)
    equations = NormalEquations.of(A, B)
    state = rule.init(F)
    for _ in range(4):
        kept = [array.copy() for array in (F, equations.gram, equations.cross)]
        G, state = rule.step(F, equations, state)
        assert G.shape == F.shape
        assert not np.shares_memory(G, F)
        assert np.isfinite(G).all()
        assert (G >= 0).all()
        for now, then in zip((F, equations.gram, equations.cross), kept, strict=True):
            assert_array_equal(now, then)
        F = G


def by_formula(rule, F, before, gram, cross, t):
    """One step of a rule as its docstring prints it, in plain loops; `before` is the factor one step earlier."""
    L = float(np.linalg.norm(gram, 2))
    match rule:
        case Multiplicative():
            for _ in range(rule.steps):
                F = F * cross / (F @ gram)
            return F
        case CoordinateDescent():
            weight, centre, F = rule.alpha + rule.beta * t, F.copy(), F.copy()
            for _ in range(rule.sweeps):
                for j in range(len(gram)):
                    others = F @ gram[:, j] - F[:, j] * gram[j, j]
                    F[:, j] = np.maximum(0, (weight * centre[:, j] + cross[:, j] - others) / (gram[j, j] + weight))
            return F
        case ProximalDescent():
            size = np.trace(gram) / len(gram)
            inner = CoordinateDescent(rule.sweeps, rule.alpha * size, rule.beta * size)
            return by_formula(inner, F, before, gram, cross, t)
        case ProjectedGradient():
            eta = rule.step_size / (1.0 if rule.absolute else L) / (1 + rule.decay * t)
            return np.maximum(0, F - eta * (F @ gram - cross))
        case InertialPalm():
            beta = rule.inertia
            eta = (1 / L) if beta == 0 else 2 * (1 - beta) / ((1 + 2 * beta) * L)
            point = F + beta * (F - before)
            return np.maximum(0, point - eta * (point @ gram - cross))
        case BlockPivoting():
            from scipy.optimize import nnls

            root = np.linalg.cholesky(gram)
            return np.array([nnls(root.T, np.linalg.solve(root, row))[0] for row in cross])
    raise AssertionError(f"{rule!r} needs its formula here")


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_every_rule_is_its_formula(rule):
    """Six steps, so that weights and step sizes that change with t, and memory, are seen to change."""
    A, B, F = problem(13, 30, 4, seed=5)
    equations, state = NormalEquations.of(A, B), rule.init(F)
    expected, before = F, F
    for t in range(6):
        F, state = rule.step(F, equations, state)
        expected, before = by_formula(rule, expected, before, equations.gram, equations.cross, t), expected
        assert_allclose(F, expected, rtol=1e-9, atol=1e-11)
        assert state.count == t + 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_number_type_is_kept(rule, dtype):
    A, B, F = problem(40, 12, 5, dtype=dtype)
    G, _ = rule.step(F, NormalEquations.of(A, B), rule.init(F))
    assert G.dtype == dtype


@pytest.mark.parametrize("rule", [r for r in RULES if Guarantee.MONOTONE in r.guarantees], ids=repr)
@pytest.mark.parametrize("shape", SHAPES)
def test_monotone_rules_never_raise_the_objective(rule, shape):
    A, B, F = problem(*shape)
    equations, state, last = NormalEquations.of(A, B), rule.init(F), residual(A, B, F)
    for _ in range(15):
        F, state = rule.step(F, equations, state)
        now = residual(A, B, F)
        assert now <= last * (1 + 1e-12) + 1e-12
        last = now


@pytest.mark.parametrize("rule", [r for r in RULES if Guarantee.SCALE_EQUIVARIANT in r.guarantees], ids=repr)
def test_scale_equivariance(rule):
    A, B, F = problem(30, 20, 6)
    c, s = 7.0, 0.25

    def two_steps(A, B, F):
        state, equations = rule.init(F), NormalEquations.of(A, B)
        for _ in range(2):
            F, state = rule.step(F, equations, state)
        return F

    plain = two_steps(A, B, F)
    assert_allclose(two_steps(c * A, B, c * F), c * plain, rtol=1e-9, atol=1e-12)
    assert_allclose(two_steps(A, s * B, F / s), plain / s, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", [r for r in RULES if Guarantee.ROW_SEPARABLE in r.guarantees], ids=repr)
def test_row_separable_rules_treat_rows_alone(rule):
    A, B, F = problem(90, 20, 6)
    whole, _ = rule.step(F, NormalEquations.of(A, B), rule.init(F))
    for rows in (slice(0, 1), slice(10, 75), slice(89, 90)):
        part, _ = rule.step(F[rows].copy(), NormalEquations.of(A[rows], B), rule.init(F[rows].copy()))
        assert_allclose(part, whole[rows], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_kkt_point_is_a_fixed_point(rule):
    A, B, F = problem(25, 30, 5, seed=3)
    equations = NormalEquations.of(A, B)
    F, _ = BlockPivoting().step(F, equations, BlockPivoting().init(F))
    gradient = F @ equations.gram - equations.cross
    assert (gradient[F == 0] >= -1e-9).all()
    assert np.abs(gradient[F > 0]).max() < 1e-9
    G, _ = rule.step(F, equations, rule.init(F))
    assert_allclose(G, F, atol=1e-9)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_penalties_enter_the_normal_equations(rule):
    A, B, F = problem(20, 15, 4)
    penalty, size = Penalty(l1=0.02, l2=0.1), 15
    direct, _ = rule.step(F, NormalEquations.of(A, B).penalized(penalty, size), rule.init(F))
    stretched = np.vstack([B.T, np.sqrt(0.1 * size) * np.eye(4)]).T  # ½ l2 ‖F‖² as extra columns
    wide = np.hstack([A, np.zeros((20, 4))])
    by_hand = NormalEquations.of(wide, stretched)
    by_hand = NormalEquations(by_hand.gram, by_hand.cross - 0.02 * size)
    expected, _ = rule.step(F, by_hand, rule.init(F))
    assert_allclose(direct, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_torch_equals_numpy(rule):
    torch = pytest.importorskip("torch")
    A, B, F = problem(70, 20, 9)
    equations = NormalEquations.of(A, B)
    other = NormalEquations(torch.from_numpy(equations.gram), torch.from_numpy(equations.cross))
    G, state = torch.from_numpy(F.copy()), rule.init(torch.from_numpy(F))
    memory = rule.init(F)
    for _ in range(3):
        F, memory = rule.step(F, equations, memory)
        G, state = rule.step(G, other, state)
        assert isinstance(G, torch.Tensor)
        assert_allclose(G.numpy(), F, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_dead_components_and_zero_data_do_no_harm(rule):
    A, B, F = problem(10, 8, 3)
    B[1] = 0
    G, state = rule.step(F, NormalEquations.of(A, B), rule.init(F))
    assert np.isfinite(G).all()
    G, _ = rule.step(G, NormalEquations.of(np.zeros_like(A), np.zeros_like(B)), state)
    assert np.isfinite(G).all()


@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(rows=st.integers(1, 70), columns=st.integers(1, 6), rank=st.integers(1, 12), seed=st.integers(0, 10**6))
def test_any_shape_keeps_sign_and_shape(rule, rows, columns, rank, seed):
    A, B, F = problem(rows, columns, rank, seed)
    A[A < 0.3] = 0
    B[:, 0] = 0
    equations, state = NormalEquations.of(A, B), rule.init(F)
    before = residual(A, B, F)
    for _ in range(2):
        F, state = rule.step(F, equations, state)
    assert F.shape == (rows, rank)
    assert np.isfinite(F).all()
    assert (F >= 0).all()
    if Guarantee.MONOTONE in rule.guarantees:
        assert residual(A, B, F) <= before * (1 + 1e-9) + 1e-9


def test_equations_of_blocks_add_up():
    A, B, _ = problem(12, 20, 4)
    whole = NormalEquations.of(A, B)
    parts = NormalEquations.of(A[:, :7], B[:, :7]) + NormalEquations.of(A[:, 7:], B[:, 7:])
    assert_allclose(parts.gram, whole.gram)
    assert_allclose(parts.cross, whole.cross)


def test_inertial_palm_uses_the_other_factors_constant():
    """As printed in the FNMF paper (the factor's own norm) one step explodes on a badly scaled problem."""
    A, B, F = problem(30, 40, 5)
    F, B = F * 1e-4, B * 1e2
    before = residual(A, B, F)
    G, _ = InertialPalm().step(F, NormalEquations.of(A, B), InertialPalm().init(F))
    assert residual(A, B, G) <= before
    printed = F - (F @ (B @ B.T) - A @ B.T) / np.linalg.norm(F.T @ F, 2)
    assert residual(A, B, np.maximum(printed, 0)) > before


def test_inertia_looks_back_one_step_only():
    A, B, F = problem(15, 12, 3)
    rule, equations = InertialPalm(inertia=0.5), NormalEquations.of(A, B)
    first, state = rule.step(F, equations, rule.init(F))
    second, _ = rule.step(first, equations, state)
    L = np.linalg.norm(equations.gram, 2)
    Y = first + 0.5 * (first - F)
    expected = np.maximum(0, Y - 2 * 0.5 / 2.0 / L * (Y @ equations.gram - equations.cross))
    assert_allclose(second, expected, rtol=1e-10, atol=1e-13)


def test_proximal_weight_freezes_the_factor():
    A, B, F = problem(15, 12, 3)
    rule = CoordinateDescent(alpha=1e14)
    G, _ = rule.step(F, NormalEquations.of(A, B), rule.init(F))
    assert_allclose(G, F, rtol=1e-10)


TURN_RULES = {
    "iPALM": InertialPalm(),
    "iPALM with inertia": InertialPalm(0.3),
    "HALS": CoordinateDescent(2),
    "MU": Multiplicative(),
}
PULLS = {
    "alone": NoCoupling(),
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
@pytest.mark.parametrize("rule", TURN_RULES)
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
        solver = SquaredError(TURN_RULES[rule], penalty, penalty)
        rows, columns, anchor = begun(solver, dtype)
        kept = [F.copy() for F in (rows.W, columns.Ht, anchor.Ht)]
        with runtime.limit_kernel_threads(1):
            W, H = run_local_steps(solver, matrix, rows, columns, coupling, anchor, TURNS)
            assert sum(calls) == TURNS
            assert max(calls) <= min(4, getattr(coupling, "every", 4))
            W_singly, H_singly = run_steps_one_by_one(solver, matrix, rows, columns, coupling, anchor, TURNS)
        assert sum(calls) == TURNS
        assert far(W.W, W_singly.W) < near
        assert far(H.Ht, H_singly.Ht) < near
        assert W.W.dtype == H.Ht.dtype == dtype
        assert H.point is H.Ht
        assert (W.memory.count, H.memory.count) == (TURNS, TURNS)
        for state, other in ((W.memory, W_singly.memory), (H.memory, H_singly.memory)):
            assert (state.previous is None) == (other.previous is None)
            assert state.previous is None or far(state.previous, other.previous) < near
        assert all((now == then).all() for now, then in zip((rows.W, columns.Ht, anchor.Ht), kept, strict=True))


@pytest.mark.parametrize("rule", [CoordinateDescent(1, alpha=0.5), Multiplicative(2), ProjectedGradient()])
def test_rules_that_compiled_code_does_not_know_are_taken_singly(rule, monkeypatch):
    monkeypatch.setattr(DenseMatrix, "run_fused_steps", lambda *given: pytest.fail("not known to compiled code"))
    solver = SquaredError(rule)
    rows, columns, anchor = begun(solver, np.float64)
    with runtime.limit_kernel_threads(1):
        _, H = run_local_steps(solver, data(False, np.float64), rows, columns, NoCoupling(), anchor, 3)
    assert H.memory.count == 3


class Thresholded(CoordinateDescent):
    """A rule of one's own that changes what it inherits."""

    def step(self, factor, equations, state):
        moved, state = super().step(factor, equations, state)
        return np.where(moved > 0.5 * moved.max(), moved, 0), state


class Halfway(AlignedProximalTerm):
    """A coupling of one's own that changes what it inherits."""

    def step(self, rule, Ht, equations, state, anchor):
        moved, state, anchor = super().step(rule, Ht, equations, state, anchor)
        return (moved + Ht) / 2, state, anchor


class Named(InertialPalm):
    """A rule with words of its own."""

    def move(self):
        return "somewhere"


@pytest.mark.parametrize(
    ("rule", "coupling"), [(Thresholded(), NoCoupling()), (InertialPalm(), Halfway()), (Named(), NoCoupling())]
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
        assert isinstance(matrix, SupportsFusedSteps)
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
            _, columns_ = way(solver, as_matrix(X.astype(dtype)), *start, NoCoupling(), ProximalAnchor(Ht), 20)
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
    solver = SquaredError(TURN_RULES[rule])
    draw = np.random.default_rng(1)
    rows = RowState(draw.random((30, 3)).astype(dtype), None, solver.rule.init(X))
    Ht = draw.random((12, 3)).astype(dtype)
    with runtime.limit_kernel_threads(1):
        _, H = run_local_steps(solver, as_matrix(X), rows, solver.begin(Ht), NoCoupling(), ProximalAnchor(Ht), 3000)
    assert not ((H.Ht > 0) & (H.Ht < np.finfo(dtype).tiny)).any()
    assert (H.Ht[6:] == 0).any()


def solve(A, B):
    F = np.zeros((A.shape[0], B.shape[0]))
    return BlockPivoting().step(F, NormalEquations.of(A, B), BlockPivoting().init(F))[0]


@pytest.mark.parametrize(("rows", "columns", "rank"), [(1, 1, 1), (40, 12, 5), (700, 60, 30), (25, 200, 70)])
def test_equals_scipy_at_full_rank(rows, columns, rank):
    rng = np.random.default_rng(rank)
    A, B = rng.standard_normal((rows, columns)), rng.standard_normal((rank, columns))
    expected = np.array([nnls(B.T, row)[0] for row in A])
    assert_allclose(solve(A, B), expected, atol=1e-8)


@given(
    rows=st.integers(1, 12), columns=st.integers(1, 8), rank=st.integers(1, 10), seed=st.integers(0, 10**6),
    signed=st.booleans(), twin=st.booleans(),
)  # fmt: skip
def test_objective_equals_scipy_at_any_rank(rows, columns, rank, seed, signed, twin):
    rng = np.random.default_rng(seed)
    A, B = rng.random((rows, columns)) - 0.5 * signed, rng.random((rank, columns)) - 0.5 * signed
    if twin and rank > 1:
        B[-1] = B[0]
    ours = solve(A, B)
    assert (ours >= 0).all()
    for a, f in zip(A, ours, strict=True):
        assert np.linalg.norm(a - f @ B) <= nnls(B.T, a)[1] + 1e-6 * (1 + np.linalg.norm(a))


def test_warm_start_does_not_change_the_answer():
    rng = np.random.default_rng(0)
    A, B = rng.random((30, 20)), rng.random((6, 20))
    warm = rng.random((30, 6)) * (rng.random((30, 6)) > 0.5)
    rule = BlockPivoting()
    assert_allclose(rule.step(warm, NormalEquations.of(A, B), rule.init(warm))[0], solve(A, B), atol=1e-10)


def hilbert(rng):
    """Positive and as good as singular: B_ij = 1 / (i + j + 1)."""
    return 1.0 / (np.arange(40)[:, None] + np.arange(60) + 1.0)


def nearly_parallel(rng):
    return rng.random(60) + 1e-6 * rng.random((25, 60))


def of_low_rank(rng):
    return rng.random((30, 5)) @ rng.random((5, 60))


def threefold(rng):
    return np.repeat(rng.random((8, 60)), 3, axis=0)


def decays(rng):
    """Sums of exponentials, the textbook case of an ill-posed fit."""
    return np.exp(-np.outer(np.logspace(-2, 2, 40), np.linspace(0, 5, 60)))


def badly_scaled(rng):
    return rng.random((20, 60)) * 10.0 ** np.where(np.arange(20) % 3, 0, -12)[:, None]


def signed(rng):
    """Of both signs, with cond(B Bᵀ) near 1e7."""
    return rng.standard_normal((15, 5)) @ rng.standard_normal((5, 60)) + 3e-3 * rng.standard_normal((15, 60))


HARD = [hilbert, nearly_parallel, of_low_rank, threefold, decays, badly_scaled]


def hard_problem(components, dtype=np.float64, rows=30):
    """Rows that are anything, and rows that are sparse mixtures with noise; a zero start and one after sweeps."""
    rng = np.random.default_rng(7)
    B = components(rng)
    mixed = rng.random((rows, len(B))) * (rng.random((rows, len(B))) > 0.8) / np.linalg.norm(B, axis=1)
    A = np.vstack([rng.random((rows, 60)), mixed @ B + 1e-3 * rng.random((rows, 60))]).astype(dtype)
    B = B.astype(dtype)
    equations, sweeps = NormalEquations.of(A, B), CoordinateDescent(SUPPORT_SWEEPS)
    flat = constant_rows(equations.gram, equations.cross)
    near, _ = sweeps.step(flat, equations, sweeps.init(flat))
    return A.astype(np.float64), B.astype(np.float64), equations, (np.zeros_like(near), near)


def excess(A, B, F, other):
    """How far the objective of F is above a reference, row by row, as a share of ½‖a‖²."""
    error = 0.5 * np.square(A - F.astype(np.float64) @ B).sum(1)
    return (error - other) / (0.5 * np.square(A).sum(1))


def minimum(A, B):
    size = np.linalg.norm(B, axis=1)[:, None]
    return np.array([0.5 * nnls((B / size).T, a, maxiter=10_000)[1] ** 2 for a in A])


@pytest.mark.parametrize(
    ("components", "dtype", "share"),
    [(signed, np.float64, 1e-10)]
    + [(components, np.float64, 1e-12) for components in HARD]
    + [(components, np.float32, 5e-6) for components in HARD if components is not badly_scaled],
)
def test_objective_is_the_minimum_on_ill_conditioned_problems(components, dtype, share):
    A, B, equations, starts = hard_problem(components, dtype)
    best = minimum(A, B)
    for start in starts:
        F, _ = BlockPivoting().step(start, equations, BlockPivoting().init(start))
        assert (F >= 0).all()
        assert excess(A, B, F, best).max() <= share


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("components", [*HARD, signed])
def test_no_row_ends_above_its_start(components, dtype):
    A, B, equations, (_, near) = hard_problem(components, dtype, rows=300)
    F, _ = BlockPivoting().step(near, equations, BlockPivoting().init(near))
    started = 0.5 * np.square(A - near.astype(np.float64) @ B).sum(1)
    assert excess(A, B, F, started).max() <= 16 * np.finfo(dtype).eps


@pytest.mark.parametrize("exponent", [-300, -40, 1, 200])
def test_a_component_in_other_units_has_a_weight_in_those_units(exponent):
    rng = np.random.default_rng(1)
    A, B, F = rng.random((40, 30)), rng.random((8, 30)), rng.random((40, 8)) * (rng.random((40, 8)) > 0.5)
    units = np.where(np.arange(8) % 3, 1.0, np.ldexp(1.0, exponent))
    rule, plain = BlockPivoting(), NormalEquations.of(A, B)
    other = NormalEquations(plain.gram * units[:, None] * units, plain.cross * units)
    expected, _ = rule.step(F, plain, rule.init(F))
    assert (expected == 0).any()
    assert_array_equal(rule.step(F / units, other, rule.init(F))[0] * units, expected)


def test_units_that_are_no_power_of_two_do_as_well():
    rng = np.random.default_rng(2)
    A, B = rng.random((40, 30)), rng.random((8, 30))
    units = np.where(np.arange(8) % 3, 1.0, 1e-12)
    assert_allclose(solve(A, B * units[:, None]) * units, solve(A, B), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("components", [of_low_rank, hilbert, signed])
def test_neighbours_do_not_change_a_bit_of_a_row(components):
    _, _, equations, (_, near) = hard_problem(components)
    rule = BlockPivoting()
    whole, _ = rule.step(near, equations, rule.init(near))
    assert_array_equal(rule.step(near, equations, rule.init(near))[0], whole)
    for rows in (slice(0, 1), slice(7, 33), slice(59, 60)):
        alone = NormalEquations(equations.gram, equations.cross[rows].copy())
        assert_array_equal(rule.step(near[rows].copy(), alone, rule.init(near))[0], whole[rows])
