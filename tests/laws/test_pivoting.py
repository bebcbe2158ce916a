"""Block principal pivoting against SciPy's active-set solver."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy.optimize import nnls

from partsong.local.equations import NormalEquations
from partsong.local.pivoting import BlockPivoting


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
