"""From a noisy second moment to H: shrinkage, Lanczos and dense eigenvalues, buckets, and planted components."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from partsong.privacy.second_moment import MomentOfBuckets, Noise, noise_edge
from partsong.solvers import second_moment
from partsong.solvers.second_moment import Spectrum, factorize, from_buckets, shrink


def wigner(m, sigma, seed):
    """Noise as it is released: σ on the diagonal, σ/√2 above it."""
    draw = np.random.default_rng(seed).normal(size=(m, m))
    upper = np.triu(draw, 1) * sigma / math.sqrt(2)
    return upper + upper.T + np.diag(np.diagonal(draw)) * sigma


def spiked(m, energies, seed=0):
    vectors = np.linalg.qr(np.random.default_rng(seed).normal(size=(m, len(energies))))[0]
    return (vectors * energies) @ vectors.T, vectors


def planted(m=60, k=4, n=400, seed=0):
    """Components of separate and of shared columns, and the moment of rows in their cone."""
    draw = np.random.default_rng(seed)
    H = np.zeros((k, m))
    for i in range(k):
        H[i, i * m // k : (i + 1) * m // k] = 0.2 + draw.random(m // k)
    H[:, ::7] = 0.3
    H /= np.linalg.norm(H, axis=1, keepdims=True)
    W = draw.gamma(0.3, size=(n, k))
    return H, (W @ H).T @ (W @ H)


def alike(H, found):
    """The least cosine of a planted component with the found one nearest to it."""
    return float((H @ found.T).max(axis=1).min())


# --- shrinkage -------------------------------------------------------------------------------------------------------


def test_eigenvalues_are_shrunk_as_the_formula_says():
    """√(λ² − e²) = ℓ cos², with cos² = 1 − e²/4ℓ² and ℓ = (λ + √(λ² − e²))/2."""
    edge, values = 2.0, np.array([9.0, 5.0, 2.5, 2.0001, 1.9, 0.3, -8.0])
    found = shrink(np.diag(values), edge)
    above = values[values > edge]
    spike = (above + np.sqrt(above**2 - edge**2)) / 2
    assert found.visible == 4
    assert_allclose(found.values, spike * (1 - edge**2 / (4 * spike**2)), rtol=1e-12)
    assert_allclose(np.abs(found.vectors), np.eye(7)[:, :4], atol=1e-12)
    assert not found.is_exact


def test_without_a_visible_direction_the_largest_one_is_kept():
    found = shrink(np.diag([0.5, 1.0, -3.0]), 2.0)
    assert (found.visible, found.values.tolist()) == (0, [1.0])
    assert_allclose(np.abs(found.vectors[:, 0]), [0, 1, 0])
    assert (shrink(-np.eye(3), 2.0).values > 0).all()


@pytest.mark.parametrize("seed", range(3))
def test_eigenvalues_and_directions_of_spikes_are_those_of_the_theory(seed):
    """ℓ becomes λ = ℓ + e²/4ℓ, at an angle of cos² = 1 − e²/4ℓ²; and what is below e/2 is lost in the noise."""
    m, edge = 500, 2.0
    energies = np.array([4.0, 2.5, 1.6, 0.8, 0.3])
    clean, vectors = spiked(m, energies, seed)
    found = shrink(clean + wigner(m, edge / math.sqrt(2 * m), seed + 10), edge)
    assert found.visible == 3
    seen = energies[:3]
    assert_allclose(found.values, seen - edge**2 / (4 * seen), atol=0.25)
    cosines = np.abs(np.sum(found.vectors * vectors[:, :3], axis=0)) ** 2
    assert_allclose(cosines, 1 - edge**2 / (4 * seen**2), atol=0.08)


def test_the_shrunk_moment_is_nearer_than_others():
    """Than eigenvalues as they are, all spikes as they were, and a cut at another place."""
    m, edge = 400, 2.0
    clean, _ = spiked(m, [5.0, 3.0, 1.8, 1.3])
    noisy = clean + wigner(m, edge / math.sqrt(2 * m), 3)
    values, vectors = np.linalg.eigh(noisy)

    def error(of):
        return np.linalg.norm((vectors * of) @ vectors.T - clean)

    found = shrink(noisy, edge)
    best = np.linalg.norm((found.vectors * found.values) @ found.vectors.T - clean)
    hard = np.where(values > edge, values, 0)
    spikes = np.where(values > edge, (values + np.sqrt(np.maximum(values**2 - edge**2, 0))) / 2, 0)
    assert best < min(error(values), error(hard), error(spikes), error(np.maximum(values - edge, 0)))


def test_noise_alone_has_seldom_a_visible_direction():
    """Its largest eigenvalue is about the edge, and above it in less than a third of all draws; never two by chance."""
    seen = [shrink(wigner(120, 1.0, seed), noise_edge(1.0, 120)).visible for seed in range(60)]
    assert sum(one > 0 for one in seen) <= 20
    assert max(seen) <= 1


# --- Lanczos ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spikes", [0, 3, 20])
def test_the_largest_eigenvalues_by_iteration_are_those_of_the_dense_solver(monkeypatch, spikes):
    """Twenty are more than it asks for at first, so that the number is doubled."""
    m, edge = 300, 2.0
    matrix = spiked(m, np.linspace(3, 9, spikes))[0] if spikes else np.zeros((m, m))
    matrix = matrix + wigner(m, 0.9 * edge / math.sqrt(2 * m), 1)
    dense = shrink(matrix, edge)
    monkeypatch.setattr(second_moment, "DENSE_SIDE", 100)
    monkeypatch.setattr(second_moment, "FIRST_DIRECTIONS", 8)
    found = shrink(matrix, edge)
    assert found.visible == dense.visible == spikes
    assert_allclose(found.values, dense.values, rtol=1e-6)
    parts = [(one.vectors * one.values) @ one.vectors.T for one in (found, dense)]
    assert_allclose(*parts, atol=1e-5 * abs(parts[1]).max())
    again = shrink(matrix, edge)
    assert_array_equal(found.vectors, again.vectors)


def test_iteration_ends_where_every_direction_is_visible(monkeypatch):
    """It keeps as many as it may have, which are the largest."""
    monkeypatch.setattr(second_moment, "DENSE_SIDE", 10)
    monkeypatch.setattr(second_moment, "FIRST_DIRECTIONS", 4)
    monkeypatch.setattr(second_moment, "MAX_DIRECTIONS", 8)
    found = shrink(np.diag(np.arange(40.0, 0, -1)), 1e-9)
    assert_allclose(found.values, np.arange(40.0, 32, -1), rtol=1e-6)
    assert not found.is_exact


# --- factors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [2000, 10], ids=["formed", "not formed"])
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_planted_components_are_found(monkeypatch, most, noise):
    monkeypatch.setattr(second_moment, "MAX_FORMED", most)
    H, moment = planted()
    sigma = noise * np.linalg.norm(moment, 2) / math.sqrt(2 * len(moment))
    spectrum = shrink(moment + wigner(60, sigma, 5), noise_edge(sigma, 60))
    found = factorize(spectrum, np.random.default_rng(1).random((60, 4)))
    assert (found >= 0).all()
    assert_allclose(np.linalg.norm(found, axis=1), 1)
    assert alike(H, found) > (0.97 if noise else 0.98)


def test_components_hold_the_rows():
    """W ≥ 0 fitted to H leaves little more of the rows than the planted components do."""
    H, moment = planted(seed=3)
    found = factorize(shrink(moment, 0.0), np.random.default_rng(2).random((60, 4)))
    captured = [np.trace(moment @ np.linalg.pinv(one) @ one) / np.trace(moment) for one in (H, found)]
    assert captured[1] > 0.99 * captured[0]


@pytest.mark.parametrize("values", [[], [0.0], [second_moment.TINY], [1.0]], ids=str)
@pytest.mark.parametrize("rank", [1, 6])
def test_a_poor_spectrum_still_gives_finite_components(values, rank):
    vectors = np.linalg.qr(np.random.default_rng(0).normal(size=(12, max(1, len(values)))))[0][:, : len(values)]
    found = factorize(Spectrum(np.array(values), vectors, 0), np.random.default_rng(1).random((12, rank)))
    assert found.shape == (rank, 12)
    assert np.isfinite(found).all()
    assert (found >= 0).all()
    assert_allclose(np.linalg.norm(found, axis=1), 1)


def test_the_start_is_not_changed():
    start = np.random.default_rng(1).random((60, 4))
    kept = start.copy()
    factorize(shrink(planted()[1], 0.0), start)
    assert_array_equal(start, kept)


@pytest.mark.parametrize("size", [0.0, 1e-6, 1.0, 1e6])
def test_a_direction_is_added_to_the_spectrum(size):
    clean, _ = spiked(20, [3.0, 1.0])
    spectrum, direction = shrink(clean, 0.1), size * np.random.default_rng(4).random(20)
    found = spectrum.plus(direction)
    wanted = (spectrum.vectors * spectrum.values) @ spectrum.vectors.T + np.outer(direction, direction)
    assert_allclose((found.vectors * found.values) @ found.vectors.T, wanted, atol=1e-9 * wanted.max())
    assert found.visible == spectrum.visible + (size > 0)
    assert_allclose(found.vectors.T @ found.vectors, np.eye(len(found.values)), atol=1e-9)
    assert (np.diff(found.values) <= 0).all()


# --- buckets ---------------------------------------------------------------------------------------------------------


def assignment(m, buckets):
    return MomentOfBuckets(1.0, buckets, Noise(1.0)).assignment(m)


def test_a_moment_of_low_rank_follows_from_its_buckets():
    _, moment = planted()
    B = assignment(60, 12)
    found = from_buckets(B.T @ moment, B, 1e-9 * np.linalg.norm(moment))
    assert found.visible == 4
    assert_allclose((found.vectors * found.values) @ found.vectors.T, moment, atol=1e-6 * moment.max())


def test_planted_components_are_found_in_noisy_buckets():
    H, moment = planted(n=4000)
    B = assignment(60, 30)
    sums = B.T @ moment
    sigma = 2e-3 * np.linalg.norm(sums, 2) / (math.sqrt(30) + math.sqrt(60))
    found = from_buckets(sums + sigma * np.random.default_rng(8).normal(size=sums.shape), B, sigma)
    assert found.visible == 4
    assert alike(H, factorize(found, np.random.default_rng(1).random((60, 4)))) > 0.95


def test_singular_values_of_buckets_are_shrunk_as_the_formula_says():
    """√((y² − l − m)² − 4 l m) / y in units of σ; here l = m, and B = 1, so that Nyström's approximation is exact."""
    m, sigma = 30, 0.1
    clean, vectors = spiked(m, np.array([9.0, 5.0, 3.0]))
    found = from_buckets(clean, np.eye(m), sigma)
    y = np.array([9.0, 5.0, 3.0]) / sigma
    assert found.visible == 3
    assert_allclose(found.values, sigma * np.sqrt((y**2 - 2 * m) ** 2 - 4 * m * m) / y, rtol=1e-9)
    assert_allclose(np.abs(np.sum(found.vectors * vectors, axis=0)), 1, rtol=1e-9)


@pytest.mark.parametrize("scale", [0.0, 1e-3])
def test_buckets_of_noise_alone_leave_one_direction(scale):
    B = assignment(40, 8)
    sums = scale * np.random.default_rng(1).normal(size=(8, 40))
    found = from_buckets(sums, B, 1e-3)
    assert found.visible == 0
    assert found.vectors.shape == (40, len(found.values))
    assert np.isfinite(factorize(found, np.random.default_rng(1).random((40, 3)))).all()


def test_a_null_space_without_noise_has_no_directions(monkeypatch):
    """Fewer rows than columns: the eigenvalues that are rounding errors are left out, beyond the dense side as well."""
    X = np.random.default_rng(5).random((6, 40))
    for side in (100, 10):
        monkeypatch.setattr(second_moment, "DENSE_SIDE", side)
        found = shrink(X.T @ X, 0.0)
        assert (found.values[6:] < 1e-10 * found.values[0]).all()
    assert len(found.values) == 6
