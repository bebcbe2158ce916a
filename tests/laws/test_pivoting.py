"""Exact steps against SciPy's active-set solver, which sees B where we see B Bᵀ alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy.optimize import nnls

from partsong.solvers.normal_equations import NormalEquations
from partsong.solvers.squared_error import SUPPORT_SWEEPS, start_rows
from partsong.solvers.update_rules import BlockPivoting, CoordinateDescent


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
    flat = start_rows(equations.gram, equations.cross)
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
