"""Laws of the forecast: what a release can show, from public numbers, against what releases show."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partsong import methods
from partsong.errors import ParameterError
from partsong.methods.moment import SLACK, is_invention, verdict
from partsong.methods.privacy_request import AUTO_BUCKETS, RowPrivacy
from partsong.methods.registry import Problem
from partsong.privacy.forecast import (
    HYBRID_TAU,
    MAX_COLUMNS,
    MAX_TAU,
    NOISE_TAU,
    Forecast,
    guessed_shares,
)
from partsong.privacy.randomness import InsecureSource
from partsong.privacy.second_moment import MomentOfBuckets, MomentOfRows, Noise, noise_edge, symmetric_matrix
from partsong.solvers.second_moment import from_buckets, shrink


def spiked(m, shares, seed=0):
    """A moment of energy 1 with these eigenvalues."""
    vectors = np.linalg.qr(np.random.default_rng(seed).normal(size=(m, len(shares))))[0]
    return (vectors * shares) @ vectors.T


def forecast(tau, n=1000, m=200, **settings):
    """With this τ."""
    return Forecast(n, m, tau * n / math.sqrt(2 * m), 1.0, **settings)


# --- visible directions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("multiplier", [2.0, 5.0, 20.0, 60.0])
def test_as_many_directions_are_visible_as_the_forecast_says(multiplier, seed):
    """Of a moment with known shares of the energy; at the threshold, give or take one."""
    m, n = 300, 2000
    shares = 0.55 ** np.arange(1, 12)
    shares[0] += 1 - shares.sum()
    moment = MomentOfRows(1.0, Noise(multiplier))
    noise = moment.add_noise(np.zeros(m * (m + 1) // 2, np.int64), InsecureSource(5, seed, int(multiplier)))
    released = n * spiked(m, shares, seed) + symmetric_matrix(noise, moment.unit)
    asked = Forecast(n, m, moment.sigma, 1.0)
    found = shrink(released, noise_edge(moment.sigma, m)).visible
    is_clear = (np.abs(shares / asked.least_share - 1) > 0.3).all()
    assert abs(found - asked.visible(shares)) <= (0 if is_clear else 1)


@pytest.mark.parametrize("seed", range(3))
def test_as_many_directions_of_buckets_are_visible_as_the_forecast_says(seed):
    """σ (l m)^¼ over the energy; here of sums whose singular values are known."""
    m, buckets, n = 300, 60, 2000
    moment = MomentOfBuckets(1.0, buckets, Noise(6.0))
    draw = np.random.default_rng(seed)
    left, right = (np.linalg.qr(draw.normal(size=(side, 8)))[0] for side in (buckets, m))
    asked = Forecast(n, m, Noise(6.0).scale(1.0), 1.0, buckets=buckets)
    shares = asked.least_share * np.array([20, 10, 5, 3, 1.6, 0.6, 0.4, 0.1])
    kappa = moment.bucket_bound(m) * moment.bound
    noise = moment.add_noise(np.zeros(buckets * m, np.int64), InsecureSource(6, seed)) * moment.unit(m)
    sums = kappa * n * (left * shares) @ right.T + noise.reshape(buckets, m)
    found = from_buckets(sums, moment.assignment(m), moment.sigma(m)).visible
    assert abs(found - 5) <= 1
    assert asked.visible(shares) == 5


def test_the_forecast_has_the_noise_of_the_program():
    """σ in units of a row at the bound; in the sum over all parties, with shares and without."""
    plain = methods.method("moment").build(Problem(3))
    for relation in ("add-or-remove", "replace"):
        for parties, is_masked in ((1, False), (5, False), (5, True)):
            request = RowPrivacy(2.0, 0.7, mechanism="moment", relation=relation)
            asked = request.forecast(50, parties, is_masked=is_masked, n_rows=900)
            moment = request.program(plain, 1, parties, is_masked, 50).statistic.moment
            sigma = moment.noise.total(moment.sigma, parties) / 0.7**2
            assert asked.sigma == pytest.approx(sigma)
            assert asked.tau == pytest.approx(math.sqrt(100) * sigma / 900)


def test_the_forecast_of_a_hybrid_is_of_its_moment():
    of_all, of_half = (RowPrivacy(2.0, 1.0, mechanism=one).forecast(50, n_rows=900) for one in ("moment", "hybrid"))
    assert of_half.tau == pytest.approx(math.sqrt(2) * of_all.tau)


# --- thresholds ------------------------------------------------------------------------------------------------------


@given(tau=st.floats(1e-4, 10), n=st.integers(1, 10**6), m=st.integers(1, 5000), rank=st.integers(1, 30))
def test_more_than_one_component_is_refused_above_the_threshold_and_all_in_noise_alone(tau, n, m, rank):
    asked = forecast(tau, n, m)
    is_refused = asked.tau > NOISE_TAU or (rank > 1 and asked.tau > MAX_TAU)
    if not is_refused:
        asked.require(rank)
        return
    with pytest.raises(ParameterError, match="nothing was spent") as error:
        asked.require(rank)
    assert error.value.parameter == ("epsilon" if asked.tau > NOISE_TAU else "n_components")
    assert str(asked.least_rows) in str(error.value)
    assert asked.is_mean


@given(sigma=st.floats(0.01, 1e4), m=st.integers(1, 5000))
def test_the_least_rows_are_the_threshold(sigma, m):
    least = Forecast(10, m, sigma, 1.0).least_rows
    assert least == Forecast(None, m, sigma, 1.0).least_rows, "their number is not needed"
    Forecast(least, m, sigma, 1.0).require(5)
    if least > 1:
        with pytest.raises(ParameterError):
            Forecast(least - 1, m, sigma, 1.0).require(5)


def test_auto_takes_what_tau_says():
    def plan(n, m=100, rank=4, epsilon=1.0, **settings):
        return RowPrivacy(epsilon, 1.0, n_rows=n, **settings).plan(rank, 1, False, m)

    sigma = RowPrivacy(1.0, 1.0).forecast(100).sigma
    rows = {tau: math.ceil(noise_edge(sigma, 100) / tau) for tau in (HYBRID_TAU, MAX_TAU)}
    assert plan(rows[HYBRID_TAU] + 1).mechanism == "hybrid"
    assert plan(rows[HYBRID_TAU] - 1).mechanism == "moment"
    assert plan(rows[MAX_TAU]).mechanism == "moment"
    with pytest.raises(ParameterError, match="n_components=1"):
        plan(rows[MAX_TAU] - 1)
    assert plan(rows[MAX_TAU] - 1, rank=1).mechanism == "moment"
    assert plan(None).mechanism == "moment"
    assert "n_rows" in str(plan(None))
    for mechanism in ("moment", "centred", "hybrid", "rounds"):
        assert plan(10, mechanism=mechanism).mechanism == mechanism, "what was asked for is not refused"


def test_auto_takes_buckets_with_very_many_columns():
    request = RowPrivacy(3.0, 1.0)
    few, many = (request.plan(4, 1, False, m) for m in (MAX_COLUMNS, MAX_COLUMNS + 1))
    assert (few.mechanism, few.buckets) == ("moment", None)
    assert (many.mechanism, many.buckets) == ("moment", AUTO_BUCKETS)
    made = request.program(methods.build("exact", 4), 9, 1, False, MAX_COLUMNS + 1)
    assert isinstance(made.statistic.moment, MomentOfBuckets)
    assert made.statistic.size(0, MAX_COLUMNS + 1) == AUTO_BUCKETS * (MAX_COLUMNS + 1)


@pytest.mark.parametrize(
    ("tau", "said"),
    [
        (3.0, "nothing but noise"),
        (1.0, "mean profile alone"),
        (0.1, "each direction with more than 5 % of the energy"),
    ],
)
def test_the_sentence_is_that_of_the_number(tau, said):
    assert said in str(forecast(tau))
    assert f"τ = {tau:g}" in str(forecast(tau))
    assert "on" in str(Forecast(None, 10, 1.0, 1.0))
    assert "τ" not in str(Forecast(None, 10, 1.0, 1.0))


# --- guesses ---------------------------------------------------------------------------------------------------------

GUESSES = [
    (100, 5, 0.7, 0.5),
    (784, 10, 0.754, 0.59),
    (1000, 10, 0.135, 0.106),
    (30, 2, 0.9, 0.85),
    (5000, 20, 0.99, 0.9),
]


@pytest.mark.parametrize(("m", "rank", "mean", "pooled"), GUESSES)
def test_guessed_shares_are_those_of_a_model_with_these_errors(m, rank, mean, pooled):
    shares = guessed_shares(m, rank, mean, pooled)
    assert shares.sum() == pytest.approx(1)
    assert (np.diff(shares) <= 0).all()
    assert (shares >= 0).all()
    if 1 - mean**2 >= shares[0] - 1e-12:  # the mean profile is the largest
        assert shares[:rank].sum() == pytest.approx(1 - pooled**2, abs=0.02)


@pytest.mark.parametrize(("m", "rank", "mean", "pooled"), GUESSES)
def test_the_expected_error_is_between_the_pooled_one_and_one_and_grows_with_the_noise(m, rank, mean, pooled):
    errors = [forecast(tau, m=m).expected_error(rank, mean, pooled) for tau in (1e-9, 1e-3, 1e-2, 0.1, 0.4, 10.0)]
    assert errors == sorted(errors)
    assert errors[-1] == pytest.approx(1.0)
    assert pooled - 0.02 <= errors[0] <= mean


@pytest.mark.parametrize(("m", "rank", "mean", "pooled"), GUESSES)
def test_expected_directions_are_at_most_the_rank_and_fewer_with_more_noise(m, rank, mean, pooled):
    seen = [forecast(tau, m=m).expected_directions(rank, mean, pooled) for tau in (1e-9, 1e-3, 1e-2, 0.1, 0.4, 10.0)]
    assert seen == sorted(seen, reverse=True)
    assert seen[0] == rank
    assert seen[-1] == 0


@pytest.mark.parametrize("wrong", [(0.5, 0.6), (1.2, 0.5), (0.5, 0.0), (0.5, -1.0), (math.nan, 0.5), (0.5, math.nan)])
def test_impossible_guesses_are_refused(wrong):
    mean, pooled = wrong
    with pytest.raises(ParameterError, match="Guesses of errors"):
        guessed_shares(100, 5, mean, pooled)
    with pytest.raises(ParameterError, match="Guesses of errors"):
        RowPrivacy(1.0, 1.0).forecast(100, n_rows=10, rank=5, mean_error=mean, pooled_error=pooled)


def test_guesses_belong_together():
    with pytest.raises(ParameterError, match="belong together"):
        RowPrivacy(1.0, 1.0).forecast(100, n_rows=10, mean_error=0.5)


@pytest.mark.parametrize(("m", "rank"), [(1, 5), (5, 1), (2, 2), (2, 5)])
def test_few_columns_and_components_have_shares_too(m, rank):
    shares = guessed_shares(m, rank, 0.6, 0.5)
    assert shares[0] == pytest.approx(0.64)
    assert len(shares) <= m


# --- after the release -----------------------------------------------------------------------------------------------


@given(visible=st.integers(0, 30), rank=st.integers(1, 40))
def test_the_verdict_is_that_of_the_count(visible, rank):
    said = verdict(visible, rank)
    assert is_invention(visible, rank) == ("invention" in said) == (visible == 0 or rank > visible + SLACK)
    assert said[0].isupper() or said[0].isdigit()
    assert said.endswith(".")
    if visible:
        assert said.startswith(f"{visible} direction")
