"""Laws of alignments: one table, every way of matching components."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from partsong.aggregation import alignment
from partsong.aggregation.alignment import (
    UNMATCHED,
    Assignment,
    Identity,
    Matching,
    Nearest,
    PartialAssignment,
    PartialSinkhorn,
    Sinkhorn,
    SoftMax,
    SoftPlan,
    correlations,
    entropic_plan,
    orthogonality_gap,
    significance_threshold,
    squared_distances,
)
from partsong.errors import ParameterError

HARD = [Assignment(), Assignment(unit=True), PartialAssignment(), PartialAssignment(bonferroni=True)]
SOFT = [Sinkhorn(), Sinkhorn(blur=0.005, iterations=2000), Sinkhorn(unit=True), PartialSinkhorn(), Nearest(), SoftMax()]
ALIGNMENTS = [Identity(), *HARD, *SOFT, Nearest(3), SoftMax(0.5)]
COMPLETE = [a for a in ALIGNMENTS if not a.is_partial]


def parts(k=6, m=40, seed=0):
    """Components that have little in common."""
    rng = np.random.default_rng(seed)
    return rng.gamma(0.3, size=(k, m))


def gap(target, plan, source):
    return float(np.square(target - plan.apply(source)).sum())


@pytest.mark.parametrize("align", ALIGNMENTS, ids=repr)
@pytest.mark.parametrize("seed", range(4))
def test_rows_of_plans_sum_to_at_most_one_and_the_input_is_untouched(align, seed):
    X, Y = parts(seed=seed), parts(seed=seed + 10)
    kept = X.copy(), Y.copy()
    plan = align.plan(X, Y)
    assert plan.matrix.shape == (6, 6)
    assert (plan.matrix >= 0).all()
    assert (plan.weights <= 1 + 1e-12).all()
    if align in COMPLETE:
        assert_allclose(plan.weights, 1, atol=1e-9)
    assert_allclose(plan.weights, plan.matrix.sum(axis=1))
    assert_allclose(plan.apply(Y), plan.matrix @ Y, atol=1e-12)
    assert_array_equal(X, kept[0])
    assert_array_equal(Y, kept[1])


@pytest.mark.parametrize("align", [*HARD, Nearest()], ids=repr)
@given(order=st.permutations(range(6)), seed=st.integers(0, 1000))
def test_hard_alignments_undo_any_permutation(align, order, seed):
    X = parts(seed=seed)
    plan = align.plan(X, X[list(order)])
    assert_array_equal(plan.apply(X[list(order)]), X)
    assert plan.is_permutation
    assert orthogonality_gap(plan) == 0


@pytest.mark.parametrize("align", SOFT, ids=repr)
@given(order=st.permutations(range(6)))
def test_soft_alignments_move_with_permutations(align, order):
    """P(X, ΠY)·Π = P(X, Y), and P is closest to the permutation that undoes Π."""
    order = list(order)
    X, Y = parts(), parts() + 0.01 * parts(seed=9)
    plain, moved = align.plan(X, Y), align.plan(X, Y[order])
    assert_allclose(moved.matrix, plain.matrix[:, order], atol=1e-7)
    assert_array_equal(np.argmax(moved.matrix, axis=1), np.argsort(order))


@pytest.mark.parametrize("align", [Assignment(), Nearest(), SoftMax(1e-4), Sinkhorn(1e-3, 5000)], ids=repr)
@pytest.mark.parametrize("seed", range(5))
def test_never_worse_than_identity(align, seed):
    X, Y = parts(seed=seed), parts(seed=seed + 50)
    assert gap(X, align.plan(X, Y), Y) <= gap(X, Matching.identity(6), Y) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_assignment_is_the_best_of_all_permutations(seed):
    X, Y = parts(5, seed=seed), parts(5, seed=seed + 50)
    best = min(float(np.square(X - Y[list(order)]).sum()) for order in itertools.permutations(range(5)))
    assert gap(X, Assignment().plan(X, Y), Y) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("blur", [0.05, 0.1, 0.5])
def test_sinkhorn_equals_pot(seed, blur):
    ot = pytest.importorskip("ot")
    X, Y = parts(seed=seed), parts(seed=seed + 50)
    cost = squared_distances(X, Y)
    assert_allclose(cost, ot.dist(X, Y), rtol=1e-9)
    mass = np.full(6, 1 / 6)
    T = ot.sinkhorn(mass, mass, cost, blur * cost.mean(), method="sinkhorn_log", numItermax=20000, stopThr=1e-12)
    ours = Sinkhorn(blur, iterations=20000, tolerance=1e-12).plan(X, Y).matrix
    assert_allclose(ours, 6 * T, atol=1e-7)


def test_sinkhorn_without_blur_is_the_assignment():
    ot = pytest.importorskip("ot")
    X = parts()
    Y = X[::-1] + 0.1 * parts(seed=50)
    sharp = Sinkhorn(blur=5e-3, iterations=50000, tolerance=1e-8).plan(X, Y).matrix
    mass = np.full(6, 1 / 6)
    assert_allclose(sharp, 6 * ot.emd(mass, mass, squared_distances(X, Y)), atol=0.02)
    assert_allclose(sharp, Assignment().plan(X, Y).matrix, atol=0.02)


@pytest.mark.parametrize("tolerance", [1e-2, 1e-3, 1e-8])
@pytest.mark.parametrize("blur", [0.5, 0.05, 0.01, 1e-4])
def test_marginals_of_transport_are_right_to_the_tolerance(blur, tolerance):
    cost = squared_distances(parts(), parts(seed=53))
    rows, columns = np.array([1, 2, 3, 4, 5, 6]) / 21, np.full(6, 1 / 6)
    T = entropic_plan(cost, rows, columns, blur * cost.mean(), 100_000, tolerance)
    assert_allclose(T.sum(axis=0), columns, rtol=1e-9)
    assert np.abs(T.sum(axis=1) - rows).sum() <= tolerance * (1 + 1e-6)


@pytest.mark.parametrize(("k", "seed", "blur"), [(6, 1, 0.05), (6, 3, 0.01), (20, 1, 0.05), (20, 2, 0.05)])
def test_leaps_save_two_thirds_of_slow_iterations(k, seed, blur):
    """The plan of Sinkhorn's iteration as it is printed, in a third of its steps."""
    cost = squared_distances(parts(k, seed=seed), parts(k, seed=seed + 50))
    mass, kernel = np.full(k, 1 / k), np.exp(-cost / (blur * cost.mean()))
    v, steps, error = np.ones(k), 0, np.inf
    while error > 1e-8:
        u = mass / (kernel @ v)
        v = mass / (kernel.T @ u)
        steps, error = steps + 1, np.abs(u * (kernel @ v) - mass).sum()
    assert steps > 500
    T = entropic_plan(cost, mass, mass, blur * cost.mean(), steps // 3, 1e-8)
    assert np.abs(T.sum(axis=1) - mass).sum() <= 1e-8
    assert_allclose(T, u[:, None] * kernel * v, atol=1e-7)


@pytest.mark.parametrize("common", [0, 10, 1e4])
def test_what_rows_have_in_common_costs_no_digits(common):
    """Distances and assignments of float32 are those of the same numbers in float64."""
    X = (common + parts()).astype(np.float32)
    Y = (X[::-1] + 0.01 * parts(seed=3)).astype(np.float32)
    exact = np.square(X[:, None].astype(np.float64) - Y).sum(axis=2)
    assert_allclose(squared_distances(X, Y), exact, atol=1e-6 * exact.mean())
    assert_allclose(Sinkhorn().plan(X, Y).matrix, Sinkhorn().plan(X.astype(float), Y.astype(float)).matrix, atol=1e-3)
    assert_array_equal(Assignment().plan(X, Y).partners, np.arange(6)[::-1])


@pytest.mark.parametrize("align", [*HARD, Nearest(), Sinkhorn(0.01)], ids=repr)
@pytest.mark.parametrize("scale", [1e-36, 1e-25, 1e25, 1e35])
def test_squares_beyond_float32_do_no_harm(align, scale):
    X = (scale * parts()).astype(np.float32)
    assert_array_equal(np.argmax(align.plan(X, X[::-1]).matrix, axis=1), np.arange(6)[::-1])


def near_twins():
    """Rows that differ in their fourth digit, and two of another kind."""
    rng = np.random.default_rng(0)
    return np.vstack([rng.random(784) + 1e-4 * rng.random((18, 784)), np.eye(2, 784)])


def high_with_a_dead_one():
    """Rows around 1000, and a component that is not in use."""
    return np.vstack([1000 + np.random.default_rng(0).random((19, 784)), np.zeros((1, 784))])


@pytest.mark.parametrize("align", [Assignment(), Assignment(unit=True), Nearest(), Nearest(unit=True)], ids=repr)
@pytest.mark.parametrize("make", [near_twins, high_with_a_dead_one])
def test_float32_tells_apart_what_its_digits_do(align, make):
    """The sums that decide have more digits than the numbers that they are sums of."""
    H = make().astype(np.float32)
    assert_array_equal(align.plan(H, H).matrix, np.eye(20))
    order = np.random.default_rng(1).permutation(20)
    assert_array_equal(align.plan(H, H[order]).apply(H[order]), H)


@pytest.mark.parametrize("align", ALIGNMENTS, ids=repr)
@pytest.mark.parametrize(
    ("dtype", "power"), [(np.float64, 500), (np.float64, -500), (np.float32, 60), (np.float32, -60)]
)
@pytest.mark.parametrize("seed", range(3))
def test_plans_do_not_depend_on_the_unit_of_measurement(align, dtype, power, seed):
    X, Y = parts(seed=seed).astype(dtype), parts(seed=seed + 20).astype(dtype)
    Y[2] = 0
    X[3] *= 1e-3
    plan, other = align.plan(X, Y), align.plan(np.ldexp(X, power), np.ldexp(Y, power))
    assert_array_equal(other.matrix, plan.matrix)


@pytest.mark.parametrize("align", ALIGNMENTS, ids=repr)
@given(data=st.data())
def test_plans_of_finite_numbers_are_finite(align, data):
    k, m = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    size = st.sampled_from([0.0, 5e-324, 1e-310, 1e-200, 1e-160, 1e-9, 1.0, 3.0, 1e9, 1e154, 1e160, 1e200, 1e300])
    factor = st.lists(st.lists(size, min_size=m, max_size=m), min_size=k, max_size=k).map(np.array)
    source = data.draw(factor)
    plan = align.plan(data.draw(factor), source)
    assert np.isfinite(plan.matrix).all()
    assert (plan.weights <= 1 + 1e-9).all()
    assert np.isfinite(plan.apply(source)).all()
    if align in COMPLETE:
        assert_allclose(plan.weights, 1, rtol=1e-9)


@pytest.mark.parametrize("align", [*HARD, Nearest()], ids=repr)
@pytest.mark.parametrize("scale", [1e-310, 1e-200, 1e160, 1e300])
def test_permutations_are_undone_at_any_scale(align, scale):
    X = scale * parts()
    assert_array_equal(align.plan(X, X[::-1]).apply(X[::-1]), X)


def test_distances_are_infinite_only_where_their_number_is():
    X = np.array([[1e200, 0.0], [1e100, 0.0]])
    assert_array_equal(squared_distances(X, X), [[0, np.inf], [np.inf, 0]])
    assert squared_distances(1e-160 * np.eye(1), np.zeros((1, 1)))[0, 0] == pytest.approx(1e-320, rel=1e-3)


def test_correlation_and_significance_equal_scipy():
    from scipy import stats

    X, Y = parts(), parts(seed=1)
    r = correlations(X, Y)
    for a, b in itertools.product(range(6), range(6)):
        found = stats.pearsonr(X[a], Y[b])
        assert r[a, b] == pytest.approx(found.statistic, abs=1e-12)
    assert significance_threshold(784, 0.05) == pytest.approx(0.0588, abs=1e-4)
    assert np.arctanh(significance_threshold(40, 0.01)) * np.sqrt(37) == pytest.approx(stats.norm.ppf(0.99))
    assert significance_threshold(3, 0.05) == 0.0
    with pytest.raises(ParameterError):
        significance_threshold(40, 0.0)


@pytest.mark.parametrize("align", [PartialAssignment(), PartialSinkhorn()], ids=repr)
def test_partial_alignments_leave_private_components_alone(align):
    """A component that exists on one side only finds no partner; all others find theirs."""
    rng = np.random.default_rng(0)
    blocks = np.kron(np.eye(6), np.ones((1, 20))) + 0.01 * rng.random((6, 120))
    X, Y = blocks[:5], blocks[1:]
    plan = align.plan(X, Y)
    assert plan.weights[0] < 1e-6
    assert_allclose(plan.matrix[1:, :4], np.eye(4), atol=1e-2)
    assert plan.matrix[:, 4].max() < 1e-6
    if isinstance(plan, Matching):
        assert plan.partners.tolist() == [UNMATCHED, 0, 1, 2, 3]
        assert_array_equal(plan.transposed().partners, [1, 2, 3, 4, UNMATCHED])
        assert_array_equal(plan.apply(Y)[0], 0)


@pytest.mark.parametrize("align", ALIGNMENTS, ids=repr)
@pytest.mark.parametrize(
    "strange",
    [
        np.zeros((4, 9)),
        np.ones((4, 9)),
        np.vstack([np.zeros((1, 9)), np.ones((1, 9)), parts(2, 9)]),
        np.repeat(parts(1, 9), 4, axis=0),
        1e-300 * parts(4, 9),
        1e150 * parts(4, 9),
        parts(4, 1),
    ],
    ids=["zero", "constant", "mixed", "duplicates", "tiny", "huge", "one feature"],
)
def test_strange_components_do_no_harm(align, strange):
    for target, source in (
        (strange, strange),
        (strange, parts(4, strange.shape[1])),
        (parts(4, strange.shape[1]), strange),
    ):
        plan = align.plan(target, source)
        assert np.isfinite(plan.matrix).all()
        assert (plan.weights <= 1 + 1e-9).all()
        assert np.isfinite(plan.apply(source)).all()


@st.composite
def odd_parts(draw, k, m):
    """Components among which there may be zeros, constant and equal ones, on scales far apart."""
    H = parts(k, m, draw(st.integers(0, 1000)))
    for row in range(k):
        kind = draw(st.sampled_from(["plain", "zero", "constant", "scaled", "like another"]))
        if kind == "zero":
            H[row] = 0
        elif kind == "constant":
            H[row] = draw(st.sampled_from([1e-9, 1.0, 1e9]))
        elif kind == "scaled":
            H[row] *= 10.0 ** draw(st.integers(-60, 60))
        elif kind == "like another":
            H[row] = H[draw(st.integers(0, k - 1))]
    return H


TABLE = {**alignment.ALIGNMENTS.values, **{repr(align): align for align in ALIGNMENTS}}


@pytest.mark.parametrize("align", [a for a in TABLE.values() if not a.is_partial], ids=repr)
@given(data=st.data())
def test_alignments_that_are_not_partial_leave_no_row_without_a_partner(align, data):
    k, m = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 12))
    plan = align.plan(data.draw(odd_parts(k, m)), data.draw(odd_parts(k, m)))
    assert_allclose(plan.weights, 1, rtol=1e-9)
    assert_allclose(plan.matrix.sum(axis=1), 1, rtol=1e-9)


@pytest.mark.parametrize("align", [a for a in TABLE.values() if a.is_partial], ids=repr)
def test_alignments_that_are_partial_do_leave_rows_without_one(align):
    """Else they could say so, and be used under masks."""
    X, Y = parts(), parts(seed=1)
    Y[2] = 0
    assert align.plan(X, Y).weights.min() < 0.5
    assert_array_equal(align.plan(0 * X, Y).weights, 0)


@pytest.mark.parametrize("align", ALIGNMENTS, ids=repr)
def test_one_component(align):
    X = parts(1, 12)
    assert_allclose(align.plan(X, X).matrix, [[1.0]], atol=1e-5)


def test_scale_does_not_matter_where_rows_are_compared_at_norm_one():
    X = parts()
    scaled = X[::-1] * np.array([1e-3, 1, 1e3, 5, 0.1, 20])[:, None]
    assert_array_equal(Assignment(unit=True).plan(X, scaled).partners, np.arange(6)[::-1])
    assert_array_equal(PartialAssignment().plan(X, scaled).partners, np.arange(6)[::-1])


def test_plans_compose_and_turn_around():
    X = parts()
    first, second = Matching(np.array([2, 0, 1, UNMATCHED, 5, 4])), Matching(np.array([1, UNMATCHED, 0, 3, 4, 5]))
    assert_array_equal(second.after(first).matrix, second.matrix @ first.matrix)
    assert_array_equal(second.after(first).apply(X), second.apply(first.apply(X)))
    assert_array_equal(first.transposed().matrix, first.matrix.T)
    soft = SoftPlan(np.full((6, 6), 1 / 6))
    assert_allclose(second.after(soft).matrix, second.matrix @ soft.matrix)
    assert_allclose(soft.after(second).matrix, soft.matrix @ second.matrix)
    assert orthogonality_gap(soft) > 1
    assert not soft.is_permutation
    assert SoftPlan(np.eye(3)).is_permutation


@pytest.mark.parametrize("align", ALIGNMENTS, ids=repr)
def test_tensors_are_aligned_like_arrays(align):
    torch = pytest.importorskip("torch")
    X, Y = parts().astype(np.float32), parts(seed=3).astype(np.float32)
    plan, other = align.plan(X, Y), align.plan(torch.from_numpy(X), torch.from_numpy(Y))
    assert_allclose(other.matrix, plan.matrix, atol=1e-9)
    moved = plan.apply(torch.from_numpy(Y))
    assert moved.dtype == torch.float32
    assert_allclose(moved.numpy(), plan.apply(Y), rtol=1e-6)
    assert plan.apply(Y).dtype == np.float32


@pytest.mark.parametrize(
    "make", [lambda: Sinkhorn(blur=0), lambda: Nearest(0), lambda: SoftMax(-1), lambda: Sinkhorn(iterations=0)]
)
def test_senseless_settings_are_refused(make):
    with pytest.raises(ParameterError):
        make()
