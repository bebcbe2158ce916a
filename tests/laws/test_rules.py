"""Laws of update rules: one table, every rule; each claim is tested for those that make it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from partsong.core.interfaces import Guarantee
from partsong.solvers.normal_equations import NormalEquations, Penalty
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
    direct, _ = rule.step(F, NormalEquations.of(A, B).penalised(penalty, size), rule.init(F))
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
