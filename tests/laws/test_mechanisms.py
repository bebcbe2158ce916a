"""Laws of what a party sends: the norm is bounded exactly, the noise is on the grid, and nothing else is in it."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from hypothesis.extra.numpy import arrays
from numpy.testing import assert_allclose, assert_array_equal
from scipy import optimize, sparse, stats

from partsong.errors import DataError, DivergenceError, ParameterError, PartsongError, ShapeError
from partsong.privacy.accounting import log_delta
from partsong.privacy.discrete_noise import (
    ONE,
    RoundedGaussian,
    RoundedLaplace,
    Table,
    bernoulli,
    discrete_gaussian,
    geometric,
    rounded_gaussian,
    sampling_slack,
    symmetric,
)
from partsong.privacy.mechanisms import ClippedGaussian, ClippedLaplace, NoNoise, clipped_cells
from partsong.privacy.randomness import InsecureSource, system_source, words
from partsong.privacy.row_level import COUNT_UNIT, NoisyRowSums, RowBounds, RowSums, project_gram

KINDS = [ClippedGaussian, ClippedLaplace]
ORDER = {ClippedGaussian: 2, ClippedLaplace: 1}
vectors = arrays(np.float64, some.integers(1, 40), elements=some.floats(-1e6, 1e6, allow_subnormal=True))
clips = some.floats(1e-6, 1e6)


def refusing(count):
    raise AssertionError("something was drawn")


def zero_bytes(count):
    return bytes(count)


def exact_power_sum(cells, order):
    return sum(abs(int(cell)) ** order for cell in cells)


@pytest.mark.parametrize("kind", KINDS)
@given(vectors, clips, some.floats(1e-3, 1e3))
@settings(max_examples=150, deadline=None)
def test_the_clipped_norm_never_exceeds_the_clip_in_exact_arithmetic(kind, vector, clip, stretch):
    mechanism, order = kind(clip, 1.0), ORDER[kind]
    cells = clipped_cells(stretch * vector, mechanism.grid, clip / mechanism.grid, order)
    assert Fraction(mechanism.grid) ** order * exact_power_sum(cells, order) <= Fraction(clip) ** order


def test_a_clip_that_floats_would_overstep_by_their_last_bit_is_kept():
    """Two equal entries and a radius just below K√2: in float64 radius / √2 is K, and 2 K² > radius²."""
    overstepping = 0
    for K in range(800_000, 800_200):
        radius = K * math.sqrt(2)
        while Fraction(radius) ** 2 >= 2 * K * K:
            radius = math.nextafter(radius, 0.0)
        overstepping += radius / float(np.linalg.norm([1.0, 1.0])) >= K
        cells = clipped_cells(np.array([3.0, 3.0]), 2.0**-25, radius, 2)
        assert exact_power_sum(cells, 2) <= Fraction(radius) ** 2
    assert overstepping > 0


@pytest.mark.parametrize("kind", KINDS)
@given(vectors, clips)
@settings(max_examples=80, deadline=None)
def test_cutting_goes_toward_the_reference_and_keeps_what_fits(kind, vector, clip):
    mechanism, order = kind(clip, 1.0), ORDER[kind]
    norm = np.linalg.norm(vector, order)
    cells = clipped_cells(vector, mechanism.grid, clip / mechanism.grid, order)
    assert (np.abs(cells) * mechanism.grid <= np.abs(vector)).all()
    assert (np.sign(cells) * np.sign(vector) >= 0).all()
    scale = min(1.0, clip / norm) if norm else 1.0
    assert_allclose(cells * mechanism.grid, scale * vector, atol=1.01 * mechanism.grid, rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_on_the_grid_and_within_the_clip_stays_as_it_is(kind):
    mechanism = kind(4.0, 1.0)
    vector = mechanism.grid * np.array([3.0, -1.0, 0.0, 1e5])
    assert_array_equal(clipped_cells(vector, mechanism.grid, 4.0 / mechanism.grid, ORDER[kind]), [3, -1, 0, 100000])


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_of_a_message_share_one_clip(kind):
    arrays = {"H": np.full((2, 3), 5.0), "mass": np.full(2, 7.0)}
    reference = {"H": np.ones((2, 3)), "mass": np.zeros(2)}
    sent = noiseless(kind(1.0, 1e-4), arrays, reference)
    whole = np.concatenate([(sent[name] - reference[name]).ravel() for name in sorted(arrays)])
    wanted = np.concatenate([(arrays[name] - reference[name]).ravel() for name in sorted(arrays)])
    assert_allclose(whole, wanted / np.linalg.norm(wanted, ORDER[kind]), atol=1e-4)  # five standard errors


def noiseless(mechanism, arrays, reference):
    """The mean over many draws of a mechanism with very little noise."""
    runs = [mechanism.protect(arrays, reference, InsecureSource(1, "run", i)) for i in range(200)]
    return {name: np.mean([run[name] for run in runs], axis=0) for name in arrays}


@pytest.mark.parametrize("relation", ["replace", "zero-out"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sent_is_the_clipped_value_and_noise_of_the_stated_scale(kind, relation):
    mechanism = kind(2.0, 0.7, relation)
    reference = {"H": np.full(50_000, 100.0)}
    sent = mechanism.protect({"H": reference["H"]}, reference, InsecureSource(3, relation))["H"] - 100.0
    assert_array_equal(sent / mechanism.grid, np.rint(sent / mechanism.grid))
    scale = 0.7 * 2.0 * (2 if relation == "replace" else 1)
    law = stats.norm(0, scale) if kind is ClippedGaussian else stats.laplace(0, scale)
    assert stats.kstest(sent, law.cdf).pvalue > 1e-3
    assert mechanism.sensitivity == (4.0 if relation == "replace" else 2.0)
    assert mechanism.release.noise_multiplier == 0.7
    assert (mechanism.release.unit, mechanism.release.relation) == ("party", relation)


@given(arrays(np.float64, 6, elements=some.floats(0, 1e9)), arrays(np.float64, 6, elements=some.floats(0, 1e9)), clips)
@settings(max_examples=80, deadline=None)
def test_two_parties_never_differ_by_more_than_the_sensitivity(first, second, clip):
    """Exactly, in the norm of the mechanism, whatever the data."""
    for kind in KINDS:
        mechanism, order = kind(clip, 1.0), ORDER[kind]
        a, b = (clipped_cells(x, mechanism.grid, clip / mechanism.grid, order) for x in (first, second))
        moved = Fraction(mechanism.grid) ** order * exact_power_sum(a - b, order)
        assert moved <= Fraction(mechanism.sensitivity) ** order


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sent_depends_on_the_data_through_whole_cells_alone(kind):
    """Two inputs that are cut to the same cells give the same bits, with the same noise."""
    mechanism = kind(1.0, 1.0)
    reference = {"H": np.random.default_rng(0).random(20)}
    first = reference["H"] + 5.2 * mechanism.grid
    second = reference["H"] + 5.8 * mechanism.grid
    sent = [mechanism.protect({"H": H}, reference, InsecureSource(2))["H"] for H in (first, second)]
    assert_array_equal(*sent)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_type_and_shape_are_kept_and_noise_goes_both_ways(kind, dtype):
    H = np.random.default_rng(0).random((4, 5)).astype(dtype)
    kept = H.copy()
    sent = kind(1.0, 1.0).protect({"H": H}, {"H": np.zeros((4, 5), dtype)})["H"]
    assert sent.dtype == dtype
    assert sent.shape == (4, 5)
    assert sent.min() < 0 < sent.max()
    assert_array_equal(H, kept)


def test_tensors_stay_tensors():
    torch = pytest.importorskip("torch")
    H = torch.ones((3, 2), dtype=torch.float32)
    sent = ClippedGaussian(1.0, 1.0).protect({"H": H}, {"H": torch.zeros((3, 2))}, InsecureSource(0))["H"]
    assert isinstance(sent, torch.Tensor)
    assert sent.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_none_are_refused_before_anything_is_drawn(kind, bad):
    with pytest.raises(DivergenceError, match="nothing was drawn"):
        kind(1.0, 1.0).protect({"H": np.array([1.0, bad])}, {"H": np.zeros(2)}, refusing)
    with pytest.raises(DivergenceError, match="nothing was drawn"):
        kind(1.0, 1.0).protect({"H": np.zeros(2)}, {"H": np.array([1.0, bad])}, refusing)


@pytest.mark.parametrize("kind", KINDS)
def test_huge_and_tiny_numbers_are_clipped_like_others(kind):
    for values in ([1e308, 1e308], [5e-324, 0.0], [1e308, -1e-308]):
        cells = clipped_cells(np.array(values), kind(1.0, 1.0).grid, 1.0 / kind(1.0, 1.0).grid, ORDER[kind])
        assert exact_power_sum(cells, ORDER[kind]) * Fraction(kind(1.0, 1.0).grid) ** ORDER[kind] <= 1
    with pytest.raises(DivergenceError):
        kind(1.0, 1.0).protect({"H": np.array([1.7e308])}, {"H": np.array([-1.7e308])}, refusing)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reference_that_does_not_fit_is_refused(kind):
    for reference in ({}, {"H": np.zeros(3)}):
        with pytest.raises(ShapeError, match="reference"):
            kind(1.0, 1.0).protect({"H": np.zeros(2)}, reference, refusing)
    with pytest.raises(ShapeError, match="nothing to protect"):
        kind(1.0, 1.0).protect({}, {}, refusing)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "bad", [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (math.inf, 1.0), (1.0, 0.0), (1.0, math.nan), (1.0, 1e7)]
)
def test_settings_out_of_range_are_refused(kind, bad):
    with pytest.raises(ParameterError):
        kind(*bad)
    with pytest.raises(ParameterError, match="relation"):
        kind(1.0, 1.0, "add-or-remove")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("multiplier", [1e-4, 1e6])
@pytest.mark.parametrize("clip", [1e-100, 1.0, 3.7, 1e100])
def test_the_ends_of_all_ranges_work(kind, clip, multiplier):
    sent = kind(clip, multiplier).protect({"H": np.ones(3)}, {"H": np.ones(3)}, zero_bytes)["H"]
    assert np.isfinite(sent).all()


def test_keeping_all_keeps_all_and_promises_nothing():
    H = np.ones(3)
    assert NoNoise().protect({"H": H}, {}, refusing)["H"] is H
    assert NoNoise().release.kind == "none"


# --- rows -------------------------------------------------------------------------------------------------------------

BOUNDS = [
    RowBounds(1.0, 1.0),
    RowBounds(0.3, 2.5),
    RowBounds(2.0, 0.1, 0.2),
    RowBounds.balanced(1.0, 3.0, 5, 40),
]
factors = some.tuples(
    arrays(np.float64, (3, 4), elements=some.floats(0, 100, allow_subnormal=False)),
    arrays(np.float64, (3, 6), elements=some.floats(0, 100, allow_subnormal=False)),
)


def contribution(bounds, W, X):
    """What each row adds, exactly: (λ c w wᵀ, c w xᵀ) as fractions, and its squared norm."""
    rows = bounds.quantize_rows(X)
    V, U = bounds.quantize_weights(W, rows)
    unit, row_unit, scale = (Fraction(x) for x in (bounds.weight_unit, bounds.row_unit, bounds.gram_scale))
    for v, u, y in zip(V, U, rows, strict=True):
        v, u, y = ([int(value) for value in part] for part in (v, u, y))
        gram = sum(a * a for a in v) ** 2 * unit**4 * scale**2
        yield gram + sum(a * a for a in u) * sum(b * b for b in y) * (unit * row_unit) ** 2


@pytest.mark.parametrize("bounds", BOUNDS, ids=repr)
@given(factors)
@settings(max_examples=60, deadline=None)
def test_no_row_adds_more_than_the_radius_in_exact_arithmetic(bounds, W_and_X):
    for squared in contribution(bounds, *W_and_X):
        assert squared <= Fraction(bounds.radius) ** 2


@pytest.mark.parametrize("bounds", BOUNDS, ids=repr)
def test_the_radius_is_the_norm_of_a_row_at_both_bounds(bounds):
    w, x = np.zeros(4), np.zeros(6)
    w[1], x[2] = bounds.weight_bound, bounds.row_bound
    gram, cross = bounds.gram_scale * np.outer(w, w), np.outer(w, x)
    assert math.sqrt((gram**2).sum() + (cross**2).sum()) == pytest.approx(bounds.radius)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_sums_are_those_of_weighted_rows(is_sparse):
    rng = np.random.default_rng(0)
    X, W = rng.random((300, 20)) * rng.integers(0, 2, (300, 20)), rng.random((300, 4)) * rng.gamma(1, size=(300, 1))
    bounds = RowBounds(0.8, 1.5)
    rows = bounds.quantize_rows(sparse.csr_array(X) if is_sparse else X)
    assert sparse.issparse(rows) == is_sparse
    clipped = X * np.minimum(1, 1.5 / np.linalg.norm(X, axis=1))[:, None]
    lengths = np.linalg.norm(W, axis=1)
    weight = np.minimum(1, bounds.radius / (lengths * np.hypot(lengths, np.linalg.norm(clipped, axis=1))))
    assert 0.05 < (weight < 1).mean() < 0.95
    sums = bounds.sums(W, rows)
    assert sums.gram.dtype == sums.cross.dtype == np.int64
    assert_allclose(sums.gram * bounds.weight_unit**2, (weight[:, None] * W).T @ W, rtol=1e-3)
    assert_allclose(sums.cross * bounds.weight_unit * bounds.row_unit, (weight[:, None] * W).T @ clipped, rtol=1e-3)
    assert sums.count == 300


def test_sums_do_not_depend_on_the_order_and_split_exactly():
    """So that adding one row changes the sums by that row, to the last bit."""
    rng = np.random.default_rng(1)
    X, W, bounds = rng.gamma(0.3, size=(400, 9)), rng.gamma(0.3, size=(400, 3)), RowBounds(1.0, 2.0)
    whole = bounds.sums(W, bounds.quantize_rows(X))
    order = rng.permutation(400)
    parts = [bounds.sums(W[part], bounds.quantize_rows(X[part])) for part in np.array_split(order, 7)]
    total = sum(parts[1:], parts[0])
    assert_array_equal(total.gram, whole.gram)
    assert_array_equal(total.cross, whole.cross)
    assert total.count == 400


def test_replacing_a_row_moves_the_sums_by_no_more_than_root_two_radii():
    """Contributions only add, so that two of them are never more than a right angle apart."""
    rng = np.random.default_rng(2)
    bounds = RowBounds(1.0, 1.0)
    worst = 0.0
    for _ in range(200):
        X = rng.gamma(0.1, size=(2, 5)) * 10
        W = rng.gamma(0.1, size=(2, 3)) * 10
        one, two = (bounds.sums(W[i : i + 1], bounds.quantize_rows(X[i : i + 1])) for i in (0, 1))
        gram = (one.gram - two.gram) * bounds.weight_unit**2
        cross = (one.cross - two.cross) * bounds.weight_unit * bounds.row_unit
        worst = max(worst, math.sqrt((gram**2).sum() + (cross**2).sum()))
    assert 1.2 * bounds.radius < worst <= math.sqrt(2) * bounds.radius
    assert NoisyRowSums(bounds, 1.0, "replace").sensitivity == pytest.approx(math.sqrt(2) * bounds.radius)


def test_unit_components_and_exact_weights_need_no_larger_weight_bound():
    """‖w‖ ≤ ‖w H‖ ≤ ‖x‖ for w = argmin ‖x − w H‖ over w ≥ 0 and rows of H ≥ 0 of unit norm."""
    rng = np.random.default_rng(3)
    for _ in range(50):
        H = rng.gamma(0.5, size=(4, 12))
        H /= np.linalg.norm(H, axis=1, keepdims=True)
        x = rng.gamma(0.5, size=12)
        w = optimize.nnls(H.T, x)[0]
        assert np.linalg.norm(w) <= np.linalg.norm(w @ H) + 1e-12 <= np.linalg.norm(x) + 2e-12


def test_rows_that_cannot_be_bounded_are_refused():
    bounds = RowBounds(1.0, 1.0)
    rows = bounds.quantize_rows(np.ones((2, 3)))
    for bad in (np.nan, np.inf, -1.0):
        with pytest.raises(DataError):
            bounds.quantize_rows(np.array([[1.0, bad]]))
        with pytest.raises(DataError):
            bounds.sums(np.full((2, 2), bad), rows)
    with pytest.raises(ShapeError):
        bounds.sums(np.ones((3, 2)), rows)
    with pytest.raises(ShapeError):
        bounds.quantize_rows(np.ones(3))
    with pytest.raises(ParameterError, match="quantize_rows"):
        bounds.sums(np.ones((2, 2)), np.full((2, 3), 0.5))
    with pytest.raises(ParameterError, match="quantize_rows"):
        bounds.sums(np.ones((2, 2)), np.full((2, 3), 2.0**21))
    for setting in ((0.0, 1.0), (1.0, math.nan), (1.0, 1.0, -1.0)):
        with pytest.raises(ParameterError):
            RowBounds(*setting)


def test_rows_of_any_size_and_rows_of_nothing_are_bounded():
    bounds = RowBounds(1.0, 1.0)
    rows = bounds.quantize_rows(np.array([[1e200, 1e200], [0.0, 0.0], [1e-300, 0.0]]))
    sums = bounds.sums(np.array([[1e200], [0.0], [1e-300]]), rows)
    assert (sums.gram >= 0).all()


def just_at_half_a_unit(bounds, seed):
    """Long rows whose largest entry, scaled down, lies within a few last bits of the middle between two units."""
    row = 10 * np.random.default_rng(seed).gamma(0.5, size=20)
    j, middle = int(row.argmax()), None
    for _ in range(40):
        scaled = row[j] * bounds.row_bound / np.linalg.norm(row) / bounds.row_unit
        middle = math.floor(scaled) + 0.5 if middle is None else middle
        row[j] *= middle / scaled
    for step in range(-12, 13):
        yield np.concatenate([row[:j], [row[j] + step * np.spacing(row[j])], row[j + 1 :]])


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_row_becomes_the_same_whole_row_with_any_others_beside_it_in_any_order_of_memory(order):
    """NumPy adds up the squares of a lone row in another order than those of two in columns."""
    bounds = RowBounds(1.0, 1.0)
    for seed in range(12):
        for row in just_at_half_a_unit(bounds, seed):
            alone = bounds.quantize_rows(np.asarray(row[None], order=order))[0]
            beside = bounds.quantize_rows(np.asarray(np.vstack([row, np.ones((2, 20))]), order=order))[0]
            assert_array_equal(alone, beside)
            weights = [np.asarray(W, order=order) for W in (row[None], np.vstack([row, np.ones((2, 20))]))]
            one = bounds.sums(weights[0], bounds.quantize_rows(np.ones((1, 3))))
            three = bounds.sums(weights[1], bounds.quantize_rows(np.ones((3, 3))))
            rest = bounds.sums(weights[1][1:], bounds.quantize_rows(np.ones((2, 3))))
            assert_array_equal(three.gram, (one + rest).gram)


def test_a_refusal_does_not_tell_how_many_rows_there_are(monkeypatch):
    monkeypatch.setattr("partsong.privacy.row_level.MAX_ROWS", 100)
    with pytest.raises(ParameterError) as caught:
        RowBounds(1.0, 1.0).sums(np.zeros((137, 2)), np.zeros((137, 3)))
    assert "137" not in str(caught.value)


def noisy_runs(mechanism, sums, count=4000):
    return [mechanism.add_noise(sums, InsecureSource(4, "run", i)) for i in range(count)]


def test_noise_on_rows_has_the_stated_scales():
    bounds = RowBounds(1.0, 2.0, 0.5)
    mechanism = NoisyRowSums(bounds, 1.5, count_share=0.2)
    runs = noisy_runs(mechanism, RowSums(np.zeros((3, 3), np.int64), np.zeros((3, 4), np.int64), 0))
    sigma = 1.5 * bounds.radius * math.hypot(1, 0.2)
    assert mechanism.sigma == pytest.approx(sigma)
    gram = np.array([run.gram for run in runs]) * bounds.weight_unit**2
    cross = np.array([run.cross for run in runs]) * bounds.weight_unit * bounds.row_unit
    count = np.array([run.count for run in runs]) * COUNT_UNIT
    assert_array_equal(gram, gram.transpose(0, 2, 1))
    diagonal, above = np.diagonal(gram, axis1=1, axis2=2), gram[:, *np.triu_indices(3, 1)]
    for values, scale in (
        (diagonal, sigma / 0.5),
        (above, sigma / 0.5 / math.sqrt(2)),
        (cross, sigma),
        (count, sigma / (0.2 * bounds.radius)),
    ):
        assert stats.kstest(values.ravel(), stats.norm(0, scale).cdf).pvalue > 1e-3


def test_the_released_vector_has_the_frobenius_norm():
    """Diagonal once and √2 times what is above it: the norm in which rows are bounded and noise is calibrated."""
    G = np.random.default_rng(0).normal(size=(5, 5))
    G += G.T
    released = np.concatenate([np.diagonal(G), math.sqrt(2) * G[np.triu_indices(5, 1)]])
    assert np.linalg.norm(released) == pytest.approx(np.linalg.norm(G))


def test_shares_add_up_to_the_whole_noise():
    whole = NoisyRowSums(RowBounds(1.0, 1.0), 1.0)
    share, zero = replace(whole, shares=4), RowSums(np.zeros((1, 1), np.int64), np.zeros((1, 50), np.int64), 0)
    parties = [[share.add_noise(zero, InsecureSource(5, p, i)) for i in range(400)] for p in range(4)]
    total = np.array([sum(p[i].cross for p in parties) for i in range(400)])
    unit = whole.bounds.weight_unit * whole.bounds.row_unit
    assert stats.kstest(total.ravel() * unit, stats.norm(0, whole.sigma).cdf).pvalue > 1e-3
    assert share.release == whole.release


def test_a_public_number_of_rows_is_not_noised_and_a_private_one_is():
    sums = RowSums(np.zeros((2, 2), np.int64), np.zeros((2, 3), np.int64), 70)
    public, private = NoisyRowSums(RowBounds(1, 1), 1.0, "replace"), NoisyRowSums(RowBounds(1, 1), 1.0)
    assert public.postprocess(public.add_noise(sums, InsecureSource(0)))[2] == 70
    counts = [private.postprocess(private.add_noise(sums, InsecureSource(0, i)))[2] for i in range(200)]
    assert np.std(counts) == pytest.approx(math.hypot(1, 0.1) / 0.1, rel=0.2)
    assert np.mean(counts) == pytest.approx(70, abs=4)
    assert all(count >= 0 for count in counts)


@given(arrays(np.float64, (5, 5), elements=some.floats(-10, 10, width=32)))
@settings(max_examples=80, deadline=None)
def test_a_repaired_gram_could_be_one(noisy):
    gram = project_gram(noisy)
    assert (gram >= 0).all()
    assert_array_equal(gram, gram.T)
    assert np.linalg.eigvalsh(gram)[0] >= -1e-12 * max(1.0, np.abs(noisy).max())


def test_repair_leaves_a_true_gram_alone_and_helps_a_noisy_one():
    rng = np.random.default_rng(0)
    W = rng.gamma(0.5, size=(50, 6))
    true = W.T @ W
    assert_allclose(project_gram(true), true, atol=1e-9)
    for _ in range(20):
        noise = rng.normal(size=(6, 6)) * 20
        noisy = true + (noise + noise.T) / 2
        assert np.linalg.norm(project_gram(noisy) - true) <= np.linalg.norm(noisy - true) * (1 + 1e-3)


def test_what_rows_release_is_about_rows():
    for relation in ("add-or-remove", "replace"):
        release = NoisyRowSums(RowBounds(1.0, 1.0), 2.0, relation).release
        assert (release.kind, release.noise_multiplier, release.unit) == ("gaussian", 2.0, "row")
        assert release.relation == relation
    for bad in ({"relation": "zero-out"}, {"count_share": 0.0}, {"shares": 0}, {"noise_multiplier": 0.0}):
        with pytest.raises(ParameterError):
            replace(NoisyRowSums(RowBounds(1.0, 1.0), 1.0), **bad)


def test_a_balanced_gram_scale_makes_the_noise_in_the_normal_equations_least():
    rank, n_features, a, b = 5, 200, 1.0, 1.3

    def noise(scale):
        """E‖cross − gram H‖² per row of H, over σ per unit multiplier: rows of H have unit norm."""
        bounds = RowBounds(a, b, scale)
        return bounds.radius**2 * (n_features + rank / scale**2)

    best = RowBounds.balanced(a, b, rank, n_features).gram_scale
    assert all(noise(best) <= noise(best * factor) for factor in (0.5, 0.9, 1.1, 2.0))


SYMMETRIC = {
    "rounded 1": rounded_gaussian(1.0),
    "rounded 64": rounded_gaussian(64.0),
    "rounded 100.3": rounded_gaussian(100.3),
    "discrete 1": discrete_gaussian(Fraction(1)),
    "discrete 16.1²": discrete_gaussian(Fraction(16.1) ** 2),
}
TABLES = SYMMETRIC | {
    "geometric": geometric(Fraction(1, 100)),
    "digit": geometric(Fraction(1, 100), 512),
    "bernoulli": bernoulli(Fraction(1, 3)),
}
NOISES = [
    *(RoundedGaussian(sigma, 1.0) for sigma in (64.0, 1000.0, 1025.0, 1e5, 2.0**22 + 0.3, 3e12)),
    *(RoundedLaplace(scale, 1.0) for scale in (64.0, 257.3, 1e5, 3e12)),
]
WORD = (1 << 64) - 1


@pytest.fixture
def many_digits():
    with mpmath.workdps(70):
        yield


def exact_rounded_gaussian(deviation, j):
    x = [(mpmath.mpf(j) + side) / mpmath.mpf(deviation) for side in (mpmath.mpf(-0.5), mpmath.mpf(0.5))]
    if j > 0:  # mirrored, so that small numbers are differences of small numbers
        x = [-x[1], -x[0]]
    return mpmath.ncdf(x[1]) - mpmath.ncdf(x[0])


def exact_laplace(scale, j):
    q = 1 / mpmath.mpf(scale)
    return 1 - mpmath.exp(-q / 2) if j == 0 else mpmath.exp(-(abs(j) - 0.5) * q) * (1 - mpmath.exp(-q)) / 2


def words_to_bytes(*values):
    """A source that hands out these 64-bit words and then no more."""
    left = b"".join(int(value).to_bytes(8, "little") for value in values)

    def source(count):
        nonlocal left
        given, left = left[:count], left[count:]
        return given

    return source


@pytest.mark.usefixtures("many_digits")
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_thresholds_ascend_and_probabilities_are_one_together(table):
    assert all(a <= b for a, b in zip(table.thresholds, table.thresholds[1:], strict=False))
    assert table.thresholds[0] > 0
    assert table.thresholds[-1] < ONE
    assert sum(table.probabilities()) == 1


@pytest.mark.usefixtures("many_digits")
@pytest.mark.parametrize("table", SYMMETRIC.values(), ids=SYMMETRIC)
def test_symmetric_tables_are_symmetric_to_the_last_bit(table):
    probabilities = table.probabilities()
    assert probabilities == probabilities[::-1]
    assert table.first + len(table.thresholds) == -table.first


@pytest.mark.usefixtures("many_digits")
@pytest.mark.parametrize("deviation", [1.0, 8.0, 64.0, 100.3, 1536.0])
def test_rounded_gaussian_is_the_normal_integral_to_128_bits(deviation):
    table = rounded_gaussian(deviation)
    size = len(table.thresholds)
    for i in {0, 1, size // 5, size // 3, size // 2 - 1, size // 2, 2 * size // 3, size - 1}:
        exact = mpmath.ncdf((table.first + i + mpmath.mpf(0.5)) / mpmath.mpf(deviation)) * ONE
        assert abs(exact - table.thresholds[i]) <= mpmath.mpf("0.5000001")


@pytest.mark.usefixtures("many_digits")
def test_discrete_gaussian_has_the_weights_it_stands_for():
    table = discrete_gaussian(Fraction(37, 2))
    weight = [mpmath.exp(-mpmath.mpf(j * j) / 37) for j in range(120)]
    total = 2 * sum(weight) - 1
    for j in (-40, -11, -1, 0, 1, 2, 7, 30):
        exact = weight[abs(j)] / total
        found = table.probabilities()[j - table.first]
        assert abs(exact - mpmath.mpf(found.numerator) / found.denominator) <= mpmath.mpf(2) ** -127


@pytest.mark.usefixtures("many_digits")
@pytest.mark.parametrize("deviation", [1.0, 8.0, 64.0])
def test_the_stated_distance_bounds_the_true_one(deviation):
    table = rounded_gaussian(deviation)
    probabilities = table.probabilities()
    total = mpmath.mpf(0)
    for i, found in enumerate(probabilities):
        exact = exact_rounded_gaussian(deviation, table.first + i)
        total += abs(exact - mpmath.mpf(found.numerator) / found.denominator)
    beyond = 2 * mpmath.ncdf((table.first - mpmath.mpf(0.5)) / mpmath.mpf(deviation))
    assert (total + beyond) / 2 <= table.distance < 2.0**-110


@pytest.mark.usefixtures("many_digits")
@pytest.mark.parametrize("noise", NOISES, ids=repr)
def test_every_noise_is_within_2_to_minus_100(noise):
    assert 0 < noise.distance < 2.0**-100
    assert sampling_slack(10.0, 1e9 * noise.distance) < 1e-18


@pytest.mark.usefixtures("many_digits")
@pytest.mark.parametrize("deviation", [1025.0, 2000.7])
def test_a_gaussian_in_two_parts_is_the_rounded_gaussian(deviation):
    """Lemma 2: the convolution of the parts, summed in 70 digits, against the normal integral."""
    (fine, one), (coarse, unit) = RoundedGaussian(deviation, 1.0).parts
    assert one == 1
    chances = [mpmath.mpf(p.numerator) / p.denominator for p in fine.probabilities()]
    heavy = [mpmath.mpf(p.numerator) / p.denominator for p in coarse.probabilities()]
    for j in (0, 1, unit // 2, -unit, 777, -3 * int(deviation)):
        at = ((j - unit * (coarse.first + i) - fine.first, p) for i, p in enumerate(heavy))
        found = sum(p * chances[index] for index, p in at if 0 <= index < len(chances))
        exact = exact_rounded_gaussian(deviation, j)
        assert abs(found / exact - 1) < 1e-24  # 2⁻¹²⁸ over the smallest of the probabilities asked for


@pytest.mark.usefixtures("many_digits")
@pytest.mark.parametrize("scale", [64.0, 300.0, 70000.0])
def test_laplace_digits_multiply_to_the_rounded_laplace(scale):
    noise = RoundedLaplace(scale, 1.0)
    away = bernoulli(Fraction(1) / Fraction(scale) / 2).probabilities()[1]
    for j in (1, 2, 511, 512, 513, int(4 * scale)):
        chance, rest = mpmath.mpf(away.numerator) / away.denominator / 2, j - 1
        for number, (table, unit) in enumerate(noise.parts):
            is_last = number == len(noise.parts) - 1
            digit = rest // unit if is_last else rest // unit % 512
            p = table.probabilities()[digit]
            chance *= mpmath.mpf(p.numerator) / p.denominator
        assert abs(chance / exact_laplace(scale, j) - 1) < 1e-25


def told_apart(chances, shift, epsilon):
    """Σ max(0, P(J = j) − e^ε P(J + shift = j)): what δ has to be for whole numbers that are moved by `shift`."""
    here, there = np.pad(chances, (0, shift)), np.pad(chances, (shift, 0))
    return float(np.maximum(here - math.exp(epsilon) * there, 0.0).sum())


@pytest.mark.usefixtures("many_digits")
@pytest.mark.parametrize("deviation", [64.0, 100.3, 1000.0])
@pytest.mark.parametrize(("share", "epsilon"), [(0.25, 0.3), (1.0, 0.0), (1.0, 2.0), (3.0, 8.0)])
def test_what_is_really_drawn_costs_what_the_curve_of_the_continuous_gaussian_says(deviation, share, epsilon):
    """Theorem 1 by brute force, over the probabilities of the table itself; cells are fine enough to lose little."""
    chances = np.array([float(p) for p in rounded_gaussian(deviation).probabilities()])
    shift = round(share * deviation)
    found, curve = told_apart(chances, shift, epsilon), math.exp(log_delta(epsilon, shift / deviation))
    assert 0.97 * curve <= found <= curve * (1 + 1e-9)


@pytest.mark.usefixtures("many_digits")
@pytest.mark.parametrize(("share", "epsilon"), [(0.25, 0.1), (1.0, 0.5), (3.0, 2.9), (3.0, 3.0)])
def test_what_is_really_drawn_costs_what_continuous_laplace_noise_does(share, epsilon):
    scale = 64.0
    ((table, _),) = RoundedLaplace(scale, 1.0).parts
    away = float(bernoulli(Fraction(1) / Fraction(scale) / 2).probabilities()[1])
    side = [away / 2 * float(p) for p in table.probabilities()]
    shift = round(share * scale)
    found = told_apart(np.array([*side[::-1], 1 - away, *side]), shift, epsilon)
    exact = 1 - math.exp((epsilon - shift / scale) / 2)
    assert 0.97 * exact - 1e-12 <= found <= exact + 1e-12


@pytest.mark.usefixtures("many_digits")
@pytest.mark.parametrize("noise", NOISES, ids=repr)
def test_draws_have_the_distribution(noise):
    """Chi-square over cells of equal probability, on fixed seeds; variance and mean within five standard errors."""
    count = 200_000
    drawn = noise.draw(count, InsecureSource(5, repr(noise)))
    law = stats.norm(0, noise.sigma) if isinstance(noise, RoundedGaussian) else stats.laplace(0, noise.scale)
    edges = np.rint(law.ppf(np.linspace(0, 1, 65)[1:-1])) + 0.5
    expected = np.diff(np.concatenate([[0.0], law.cdf(edges), [1.0]])) * count
    observed = np.bincount(np.searchsorted(edges, drawn), minlength=64)
    assert stats.chisquare(observed, expected).pvalue > 1e-4
    variance = law.var() + 1 / 12
    kurtosis = 3 if isinstance(noise, RoundedGaussian) else 6
    assert abs(drawn.astype(float).var() / variance - 1) < 5 * math.sqrt((kurtosis - 1) / count)
    assert abs(drawn.mean()) < 5 * math.sqrt(variance / count)


@pytest.mark.usefixtures("many_digits")
def test_fine_digits_of_wide_noise_are_uniform():
    """No lattice of a coarse part shows through: the last bits of a sum of parts."""
    drawn = RoundedGaussian(2.0**22, 1.0).draw(200_000, InsecureSource(11))
    for modulus in (2, 16, 512):
        observed = np.bincount(drawn % modulus, minlength=modulus)
        assert stats.chisquare(observed).pvalue > 1e-4


@pytest.mark.usefixtures("many_digits")
def test_a_draw_is_the_inverse_of_the_table_and_ties_ask_for_more_bits():
    cut = (5 << 64) + 1000
    table = Table(-1, (3 << 64, cut, cut + 7, 9 << 64))
    assert table.draw(1, words_to_bytes(2))[0] == -1
    assert table.draw(1, words_to_bytes(4))[0] == 0
    assert table.draw(1, words_to_bytes(5, 999))[0] == 0
    assert table.draw(1, words_to_bytes(5, 1000))[0] == 1
    assert table.draw(1, words_to_bytes(5, 1006))[0] == 1
    assert table.draw(1, words_to_bytes(5, 1007))[0] == 2
    assert table.draw(1, words_to_bytes(3, 0))[0] == 0
    assert table.draw(1, words_to_bytes(WORD))[0] == 3
    assert list(table.draw(3, words_to_bytes(2, 5, 6, 1001))) == [-1, 1, 2]


@pytest.mark.usefixtures("many_digits")
def test_the_extreme_words_of_a_real_table_stay_inside():
    table = rounded_gaussian(64.0)
    assert table.draw(1, words_to_bytes(0, 0))[0] == table.first
    assert table.draw(1, words_to_bytes(WORD, WORD))[0] == -table.first


@pytest.mark.usefixtures("many_digits")
def test_tails_that_round_to_nothing_are_left_out():
    table = symmetric([ONE // 4, 1, 0, 0], 0.0)
    assert table.first == -2
    assert len(table.thresholds) == 4


@pytest.mark.usefixtures("many_digits")
def test_a_source_that_gives_too_little_is_refused():
    with pytest.raises(PartsongError, match="returned 8 bytes instead of 16"):
        words(2, words_to_bytes(1))


@pytest.mark.usefixtures("many_digits")
def test_an_insecure_source_repeats_itself():
    first, again, other = InsecureSource(3, "a", 1), InsecureSource(3, "a", 1), InsecureSource(3, "a", 2)
    noise = RoundedGaussian(100.0, 1.0)
    drawn = noise.draw(50, first)
    assert (drawn == noise.draw(50, again)).all()
    assert not (drawn == noise.draw(50, other)).all()
    assert not (drawn == noise.draw(50, first)).all()


@pytest.mark.usefixtures("many_digits")
def test_the_system_source_never_repeats_itself():
    noise = RoundedGaussian(1e6, 1.0)
    assert not (noise.draw(20, system_source) == noise.draw(20, system_source)).all()


@pytest.mark.usefixtures("many_digits")
@pytest.mark.parametrize("bad", [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (math.inf, 1.0), (100.0, 3.0), (100.0, 0.0)])
@pytest.mark.parametrize("kind", [RoundedGaussian, RoundedLaplace])
def test_noise_that_cannot_be_is_refused(kind, bad):
    with pytest.raises(ParameterError):
        kind(*bad)


@pytest.mark.usefixtures("many_digits")
def test_a_grid_too_coarse_or_too_fine_is_refused():
    for scale in (63.0, 2.0**56):
        with pytest.raises(ParameterError, match="cells of the grid"):
            RoundedGaussian(scale, 1.0)
