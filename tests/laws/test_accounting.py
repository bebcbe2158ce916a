"""Laws of the budget: against closed forms and dp-accounting, and the arithmetic of spending."""

from __future__ import annotations

import builtins
import json
import math
from dataclasses import replace

import dp_accounting
import mpmath
import pytest
from dp_accounting import pld
from hypothesis import given, settings
from hypothesis import strategies as some

from partsong.errors import CompositionError, FormatError, MissingExtra, ParameterError
from partsong.privacy import accounting
from partsong.privacy.accounting import (
    RELATIONS,
    Accounts,
    Budget,
    Ledger,
    Release,
    composed_epsilon,
    gaussian_epsilon,
    largest_mu,
    log_delta,
    pld_epsilon,
    zcdp_epsilon,
)
from partsong.privacy.calibration import analytic_sigma, noise_multiplier_for, rounds_within

GAUSS, LAPLACE = Release("gaussian", 4.0), Release("laplace", 20.0)
DELTA = 1e-5


def by_dp_accounting(*events):
    accountant = pld.PLDAccountant()
    for event, count in events:
        accountant.compose(event, count)
    return accountant.get_epsilon(DELTA)


@pytest.mark.parametrize("epsilon", [0.0, 1e-6, 0.1, 1.0, 10.0, 1000.0])
@pytest.mark.parametrize("mu", [1e-4, 0.01, 0.5, 1.0, 5.0, 20.0, 150.0])
def test_the_curve_is_that_of_balle_and_wang(epsilon, mu):
    with mpmath.workdps(400):
        e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)
        delta = mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)
        exact = float(mpmath.log(delta))
    if exact > -600:
        assert log_delta(epsilon, mu) == pytest.approx(exact, abs=1e-10)
    else:
        assert log_delta(epsilon, mu) < -590


@pytest.mark.parametrize("mu", [1e-12, 1e-9, 1e-6, 3e-6, 1e-5, 1e-3, 0.3, 3.0, 50.0, 1e5, 1e7])
@pytest.mark.parametrize("quantile", [0.0, 0.3, 1.0, 2.0, 5.0, 9.0, 10.0, 17.0, 30.0])
def test_no_claim_is_too_small_by_its_rounding_however_little_is_released(mu, quantile):
    """In 80 digits: at the ε that is claimed, δ is no larger than what was asked for."""
    with mpmath.workdps(80):
        delta = float(exact_delta_of(mu, quantile * mu + mu * mu / 2))
        claimed = gaussian_epsilon(mu, delta)
        assert exact_delta_of(mu, claimed) <= delta
        assert claimed <= (quantile * mu + mu * mu / 2) * (1 + 1e-6) + 0.1 * mu
        if quantile:
            assert exact_delta_of(largest_mu(quantile * mu, delta), quantile * mu) <= delta


def exact_delta_of(mu, epsilon):
    e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)
    return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)


@pytest.mark.parametrize("epsilon", [0.01, 0.1, 0.5, 1.0, 3.0, 10.0, 100.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.1])
def test_sigma_is_that_of_dp_accounting_and_spends_what_it_may(epsilon, delta):
    sigma = analytic_sigma(epsilon, delta, 3.0)
    assert sigma / 3 == pytest.approx(dp_accounting.get_sigma_gaussian(epsilon, delta), rel=2e-6)
    assert gaussian_epsilon(3.0 / sigma, delta) <= epsilon
    assert gaussian_epsilon(3.0 / sigma, delta) == pytest.approx(epsilon, rel=1e-6)


def test_the_classic_sigma_is_too_small_for_large_epsilon_and_wasteful_for_small():
    def classic(epsilon):
        return math.sqrt(2 * math.log(1.25 / DELTA)) / epsilon

    assert analytic_sigma(10.0, DELTA) > 1.03 * classic(10.0)
    assert analytic_sigma(0.1, DELTA) < 0.64 * classic(0.1)


@pytest.mark.parametrize("rounds", [1, 10, 100])
def test_gaussian_rounds_cost_what_dp_accounting_says(rounds):
    expected = by_dp_accounting((dp_accounting.GaussianDpEvent(4.0), rounds))
    ours = Ledger().after(GAUSS, rounds).epsilon(DELTA)
    assert ours == pytest.approx(expected, abs=1e-6)
    costs = (("gaussian", 4.0, rounds),)
    assert pld_epsilon(costs, DELTA) == pytest.approx(expected, abs=1e-6)
    assert pld_epsilon(costs, DELTA, one_by_one=True) == pytest.approx(expected, abs=1e-6)


def test_published_values_of_other_accountants():
    """T = 100, δ = 1e-5: 13.21 for σ = 4 by two PLD accountants, 1.95 for Laplace b = 20; RDP says 14.13."""
    assert round(Ledger().after(GAUSS, 100).epsilon(DELTA), 2) == 13.21
    assert round(Ledger().after(LAPLACE, 100).epsilon(DELTA), 2) == 1.95
    assert round(zcdp_epsilon(Ledger().after(GAUSS, 100).costs, DELTA), 2) == 14.13


@pytest.mark.parametrize("rounds", [1, 10, 100])
def test_laplace_rounds_cost_what_dp_accounting_says(rounds):
    expected = by_dp_accounting((dp_accounting.LaplaceDpEvent(20.0), rounds))
    ours = Ledger().after(LAPLACE, rounds).epsilon(DELTA)
    assert ours == pytest.approx(expected, abs=1e-6)
    assert ours <= rounds / 20
    assert Ledger().after(LAPLACE, rounds).epsilon(0.0) == pytest.approx(rounds / 20)


def test_a_mixture_costs_what_dp_accounting_says():
    ledger = Ledger().after(LAPLACE, 30).after(GAUSS, 7).after(Release("gaussian", 9.0), 5)
    expected = by_dp_accounting(
        (dp_accounting.LaplaceDpEvent(20.0), 30),
        (dp_accounting.GaussianDpEvent(4.0), 7),
        (dp_accounting.GaussianDpEvent(9.0), 5),
    )
    assert ledger.epsilon(DELTA) == pytest.approx(expected, abs=1e-4)
    assert ledger.epsilon(DELTA) < zcdp_epsilon(ledger.costs, DELTA)


def test_two_laplace_entries_tell_no_more_than_one_that_moves_as_far_in_all():
    """Lemma 4, in numbers: shifts of ½ in two entries against a shift of 1 in one."""
    split = composed_epsilon((("laplace", 2.0, 2),), 0.01)
    assert split <= composed_epsilon((("laplace", 1.0, 1),), 0.01) + 1e-4


@given(
    some.lists(
        some.tuples(some.sampled_from(["gaussian"]), some.floats(0.3, 50), some.integers(1, 50)), min_size=1, max_size=4
    )
)
@settings(max_examples=60, deadline=None)
def test_exact_composition_stays_below_concentrated(costs):
    exact = composed_epsilon(tuple(costs), DELTA)
    assert exact <= zcdp_epsilon(tuple(costs), DELTA) * (1 + 1e-6)


@given(some.floats(0.01, 100), some.integers(1, 300), some.sampled_from([1e-9, 1e-5, 1e-2]))
@settings(max_examples=60, deadline=None)
def test_a_gaussian_plan_fits_its_budget_and_not_one_round_more(epsilon, rounds, delta):
    release = Release("gaussian", noise_multiplier_for(epsilon, delta, rounds))
    assert Ledger().after(release, rounds).epsilon(delta) <= epsilon
    assert rounds_within(epsilon, delta, release) == rounds
    assert Ledger().after(Release("gaussian", 0.999 * release.noise_multiplier), rounds).epsilon(delta) > epsilon


@pytest.mark.parametrize(
    ("epsilon", "rounds", "delta"), [(1.0, 1, 0.0), (1.0, 12, 0.0), (1.0, 12, 1e-5), (8.0, 3, 1e-5)]
)
def test_a_laplace_plan_fits_its_budget_and_not_one_round_more(epsilon, rounds, delta):
    release = Release("laplace", noise_multiplier_for(epsilon, delta, rounds, "laplace"))
    assert Ledger().after(release, rounds).epsilon(delta) <= epsilon
    assert rounds_within(epsilon, delta, release) == rounds
    assert release.noise_multiplier <= rounds / epsilon * (1 + 1e-9)


def test_a_budget_stops_before_the_release_that_would_exceed_it():
    budget, ledger, rounds = Budget(3.0, DELTA), Ledger(), 0
    release = Release("gaussian", 5.0)
    while budget.allows(ledger, release):
        ledger, rounds = ledger.after(release), rounds + 1
    assert rounds == budget.rounds(release)
    assert ledger.epsilon(DELTA) <= 3.0 < ledger.after(release).epsilon(DELTA)


def test_what_was_spent_before_counts():
    release = Release("gaussian", 20.0)
    all_rounds = rounds_within(3.0, DELTA, release)
    spent = Ledger().after(release, 50)
    assert Budget(3.0, DELTA).rounds(release, spent) == all_rounds - 50
    with pytest.raises(ParameterError, match="allows no round"):
        rounds_within(3.0, DELTA, release, Ledger().after(release, all_rounds))


def test_ledgers_add_up_in_any_order_and_survive_a_checkpoint():
    a, b = Ledger().after(GAUSS, 3).after(LAPLACE), Ledger().after(GAUSS, 2)
    assert a + b == b + a == Ledger(((LAPLACE, 1), (GAUSS, 5)))
    assert len(a + b) == 6
    assert Ledger.from_json(json.loads(json.dumps((a + b).to_json()))) == a + b
    assert Ledger() + a == a
    assert Ledger(((GAUSS, 0),)) == Ledger()


def test_every_party_is_charged_for_its_own_rounds():
    accounts = Accounts().charge(["a", "b"], GAUSS).charge(["b"], GAUSS, 9)
    assert accounts.epsilons(DELTA) == {
        "a": Ledger().after(GAUSS).epsilon(DELTA),
        "b": Ledger().after(GAUSS, 10).epsilon(DELTA),
    }
    assert accounts.epsilon(DELTA) == accounts.epsilons(DELTA)["b"]
    assert Accounts.from_json(json.loads(json.dumps(accounts.to_json()))) == accounts
    assert (accounts + accounts).ledgers["b"] == Ledger().after(GAUSS, 20)
    assert Accounts().epsilon(DELTA) == 0


def test_nothing_sent_costs_nothing_and_no_noise_costs_everything():
    assert Ledger().epsilon(DELTA) == 0
    assert Ledger().after(GAUSS).after(Release("none", 0.0)).epsilon(DELTA) == math.inf
    assert "no promise" in Ledger().after(Release("none", 0.0)).promise


def test_noise_from_a_seed_is_marked_and_stays_marked():
    marked = Ledger().after(GAUSS, 5).after(replace(GAUSS, is_secure=False))
    assert not marked.is_secure
    assert "NO PROMISE" in marked.promise
    assert not Ledger.from_json(marked.to_json()).is_secure
    assert marked.epsilon(DELTA) == Ledger().after(GAUSS, 6).epsilon(DELTA)
    assert Ledger().after(GAUSS).is_secure
    assert not Accounts({"a": marked}).is_secure


def test_one_epsilon_is_about_one_unit():
    with pytest.raises(CompositionError, match="cannot cover several units or relations"):
        Ledger().after(GAUSS).after(Release("gaussian", 4.0, "row", "replace"))
    for unit, relation in RELATIONS:
        assert Ledger().after(Release("gaussian", 4.0, unit, relation)).promise == RELATIONS[unit, relation]
    with pytest.raises(ParameterError, match="has no relation"):
        Release("gaussian", 4.0, "party", "add-or-remove")


@pytest.mark.parametrize("epsilon", [0, -1.0, math.nan, math.inf, "3"])
def test_an_epsilon_that_allows_nothing_is_refused(epsilon):
    for call in (Budget, analytic_sigma, largest_mu):
        with pytest.raises(ParameterError, match="epsilon must be a positive number"):
            call(epsilon, DELTA)
    for kind in ("gaussian", "laplace"):
        with pytest.raises(ParameterError, match="epsilon must be"):
            noise_multiplier_for(epsilon, DELTA, 3, kind)


@pytest.mark.parametrize("delta", [1, 1.5, -1e-9, math.nan])
def test_a_delta_out_of_range_is_refused(delta):
    for call in (Budget, analytic_sigma):
        with pytest.raises(ParameterError, match="delta must be from 0 to below 1"):
            call(1.0, delta)
    with pytest.raises(ParameterError, match="delta must be"):
        Ledger().after(GAUSS).epsilon(delta)


def test_gaussian_noise_needs_a_delta_and_laplace_does_not():
    for call in (lambda: analytic_sigma(1.0, 0.0), lambda: Ledger().after(GAUSS).epsilon(0.0)):
        with pytest.raises(ParameterError, match="Gaussian noise needs delta > 0"):
            call()
    assert rounds_within(1.0, 0.0, LAPLACE) == 20
    assert Ledger().after(LAPLACE, 3).epsilon(1e-305) == pytest.approx(0.15)


def test_a_budget_that_allows_no_round_says_what_would():
    with pytest.raises(ParameterError, match="allows no round") as caught:
        rounds_within(0.1, DELTA, GAUSS)
    need = noise_multiplier_for(0.1, DELTA, 1)
    assert f"{need:.4g}" in str(caught.value)
    with pytest.raises(ParameterError, match="without noise"):
        rounds_within(1.0, DELTA, Release("none", 0.0))


@pytest.mark.parametrize(
    "bad",
    [
        ("gaussian", 0.0),
        ("gaussian", -1.0),
        ("laplace", math.nan),
        ("uniform", 1.0),
        ("gaussian", 1e-200),
        ("laplace", 1e200),
    ],
)
def test_releases_that_cannot_be_are_refused(bad):
    with pytest.raises(ParameterError):
        Release(*bad)


@pytest.mark.parametrize(
    "text",
    [
        [{}],
        [{"kind": "gaussian"}],
        [1],
        *([{**GAUSS.to_json(), "count": count}] for count in (-1, 1.9, "3", True, None, 10**400)),
        *([{**GAUSS.to_json(), "count": 1, "is_secure": flag}] for flag in ("false", 0, None)),
        *([{**GAUSS.to_json(), "count": 1, "noise_multiplier": z}] for z in (1e-200, 1e200, "wide")),
    ],
)
def test_a_damaged_ledger_is_refused(text):
    with pytest.raises(FormatError, match="list of releases is invalid"):
        Ledger.from_json(text)


@pytest.mark.parametrize("rounds", [0, -1, 1.5])
def test_a_plan_of_no_rounds_is_refused(rounds):
    with pytest.raises(ParameterError, match="rounds must be a whole number, 1 or more"):
        noise_multiplier_for(1.0, DELTA, rounds)


def test_without_dp_accounting_gaussian_ledgers_work_and_others_say_what_to_install(monkeypatch):
    ordinary = builtins.__import__

    def absent(name, *args, **kwargs):
        if name.split(".")[0] == "dp_accounting":
            raise ImportError(name)
        return ordinary(name, *args, **kwargs)

    accounting.pld_epsilon.cache_clear()
    monkeypatch.setattr(builtins, "__import__", absent)
    assert Ledger().after(GAUSS, 100).epsilon(DELTA) < 13.21
    with pytest.raises(MissingExtra, match=r"partsong\[privacy\]"):
        Ledger().after(LAPLACE, 3).epsilon(DELTA)
    assert Ledger().after(LAPLACE, 3).epsilon(0.0) == pytest.approx(0.15)
    assert zcdp_epsilon(Ledger().after(LAPLACE, 3).costs, DELTA) > 0


def test_accounts_that_are_none_are_refused():
    with pytest.raises(FormatError, match="must map parties to ledgers"):
        Accounts.from_json([1])


def test_the_faintest_and_the_widest_noise_have_an_epsilon_and_a_number_of_rounds():
    for kind in ("gaussian", "laplace"):
        assert Ledger().after(Release(kind, 1e-4), 100).epsilon(DELTA) > 1e5
        assert Ledger().after(Release(kind, 1e-9)).epsilon(DELTA) > 1e8
    assert Ledger().after(Release("laplace", 3.0), 2**50).epsilon(DELTA) > 1e13
    many = Ledger().after(Release("laplace", 1000.0), 10**6)
    assert many.epsilon(DELTA) <= zcdp_epsilon(many.costs, DELTA) * (1 + 1e-9), (
        "cells of the loss are wider than the losses"
    )
    mixed = Ledger().after(Release("laplace", 1e-4)).after(Release("gaussian", 2.0))
    assert mixed.epsilon(DELTA) <= 1e4 + Ledger().after(Release("gaussian", 2.0)).epsilon(DELTA)
    assert rounds_within(1.0, DELTA, Release("gaussian", 1e15)) == 2**50
    assert rounds_within(1.0, DELTA, Release("gaussian", 1e15), Ledger().after(GAUSS, 1)) == 2**50 - 1


@pytest.mark.parametrize(("scale", "multiplier", "delta"), [(1.0, 1.0, 1e-5), (5.0, 2.0, 1e-6), (0.5, 3.0, 1e-3)])
def test_a_mixture_costs_what_its_integral_says(scale, multiplier, delta):
    """δ = E δ_Gauss(ε − L) over the privacy loss L of Laplace noise: ±1/b at its ends, between them 1/b − 2x/b."""
    claimed = Ledger().after(Release("laplace", scale)).after(Release("gaussian", multiplier)).epsilon(delta)
    mu, end = mpmath.mpf(1) / multiplier, mpmath.mpf(1) / scale

    def inner(x):
        return mpmath.exp(-x / scale) / (2 * scale) * exact_delta_of(mu, claimed - end + 2 * x / scale)

    ends = exact_delta_of(mu, claimed - end) / 2 + mpmath.exp(-end) / 2 * exact_delta_of(mu, claimed + end)
    exact = ends + mpmath.quad(inner, [0, 0.25, 0.5, 0.75, 1])
    assert 0.999 * delta <= exact <= delta
