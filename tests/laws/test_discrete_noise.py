"""Laws of noise: the tables are the distributions they stand for, and what is drawn is the table."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from scipy import stats

from partsong.errors import ParameterError, PartsongError
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
from partsong.privacy.randomness import InsecureSource, system_source, words

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


@pytest.fixture(autouse=True)
def _digits():
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


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_thresholds_ascend_and_probabilities_are_one_together(table):
    assert all(a <= b for a, b in zip(table.thresholds, table.thresholds[1:], strict=False))
    assert table.thresholds[0] > 0
    assert table.thresholds[-1] < ONE
    assert sum(table.probabilities()) == 1


@pytest.mark.parametrize("table", SYMMETRIC.values(), ids=SYMMETRIC)
def test_symmetric_tables_are_symmetric_to_the_last_bit(table):
    probabilities = table.probabilities()
    assert probabilities == probabilities[::-1]
    assert table.first + len(table.thresholds) == -table.first


@pytest.mark.parametrize("deviation", [1.0, 8.0, 64.0, 100.3, 1536.0])
def test_rounded_gaussian_is_the_normal_integral_to_128_bits(deviation):
    table = rounded_gaussian(deviation)
    size = len(table.thresholds)
    for i in {0, 1, size // 5, size // 3, size // 2 - 1, size // 2, 2 * size // 3, size - 1}:
        exact = mpmath.ncdf((table.first + i + mpmath.mpf(0.5)) / mpmath.mpf(deviation)) * ONE
        assert abs(exact - table.thresholds[i]) <= mpmath.mpf("0.5000001")


def test_discrete_gaussian_has_the_weights_it_stands_for():
    table = discrete_gaussian(Fraction(37, 2))
    weight = [mpmath.exp(-mpmath.mpf(j * j) / 37) for j in range(120)]
    total = 2 * sum(weight) - 1
    for j in (-40, -11, -1, 0, 1, 2, 7, 30):
        exact = weight[abs(j)] / total
        found = table.probabilities()[j - table.first]
        assert abs(exact - mpmath.mpf(found.numerator) / found.denominator) <= mpmath.mpf(2) ** -127


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


@pytest.mark.parametrize("noise", NOISES, ids=repr)
def test_every_noise_is_within_2_to_minus_100(noise):
    assert 0 < noise.distance < 2.0**-100
    assert sampling_slack(10.0, 1e9 * noise.distance) < 1e-18


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


@pytest.mark.parametrize("deviation", [64.0, 100.3, 1000.0])
@pytest.mark.parametrize(("share", "epsilon"), [(0.25, 0.3), (1.0, 0.0), (1.0, 2.0), (3.0, 8.0)])
def test_what_is_really_drawn_costs_what_the_curve_of_the_continuous_gaussian_says(deviation, share, epsilon):
    """Theorem 1 by brute force, over the probabilities of the table itself; cells are fine enough to lose little."""
    chances = np.array([float(p) for p in rounded_gaussian(deviation).probabilities()])
    shift = round(share * deviation)
    found, curve = told_apart(chances, shift, epsilon), math.exp(log_delta(epsilon, shift / deviation))
    assert 0.97 * curve <= found <= curve * (1 + 1e-9)


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


def test_fine_digits_of_wide_noise_are_uniform():
    """No lattice of a coarse part shows through: the last bits of a sum of parts."""
    drawn = RoundedGaussian(2.0**22, 1.0).draw(200_000, InsecureSource(11))
    for modulus in (2, 16, 512):
        observed = np.bincount(drawn % modulus, minlength=modulus)
        assert stats.chisquare(observed).pvalue > 1e-4


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


def test_the_extreme_words_of_a_real_table_stay_inside():
    table = rounded_gaussian(64.0)
    assert table.draw(1, words_to_bytes(0, 0))[0] == table.first
    assert table.draw(1, words_to_bytes(WORD, WORD))[0] == -table.first


def test_tails_that_round_to_nothing_are_left_out():
    table = symmetric([ONE // 4, 1, 0, 0], 0.0)
    assert table.first == -2
    assert len(table.thresholds) == 4


def test_a_source_that_gives_too_little_is_refused():
    with pytest.raises(PartsongError, match="returned 8 bytes instead of 16"):
        words(2, words_to_bytes(1))


def test_an_insecure_source_repeats_itself():
    first, again, other = InsecureSource(3, "a", 1), InsecureSource(3, "a", 1), InsecureSource(3, "a", 2)
    noise = RoundedGaussian(100.0, 1.0)
    drawn = noise.draw(50, first)
    assert (drawn == noise.draw(50, again)).all()
    assert not (drawn == noise.draw(50, other)).all()
    assert not (drawn == noise.draw(50, first)).all()


def test_the_system_source_never_repeats_itself():
    noise = RoundedGaussian(1e6, 1.0)
    assert not (noise.draw(20, system_source) == noise.draw(20, system_source)).all()


@pytest.mark.parametrize("bad", [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (math.inf, 1.0), (100.0, 3.0), (100.0, 0.0)])
@pytest.mark.parametrize("kind", [RoundedGaussian, RoundedLaplace])
def test_noise_that_cannot_be_is_refused(kind, bad):
    with pytest.raises(ParameterError):
        kind(*bad)


def test_a_grid_too_coarse_or_too_fine_is_refused():
    for scale in (63.0, 2.0**56):
        with pytest.raises(ParameterError, match="cells of the grid"):
            RoundedGaussian(scale, 1.0)
