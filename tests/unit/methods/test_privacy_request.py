"""FederatedNMF with differential privacy and masked sums: what is promised, spent, kept back and refused."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
from method_tables import METHODS, SENDS_H

import partsong
from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Layout, Outcome, Schedule, Shard
from partsong.data.conversion import as_matrix
from partsong.engines.local import Sequential
from partsong.errors import (
    BudgetSpent,
    CompositionError,
    DataError,
    DivergenceError,
    DivergenceWarning,
    FormatError,
    ParameterError,
    PartyError,
)
from partsong.estimators.federated_nmf import FederatedNMF
from partsong.io.model_file import load_model, save_model
from partsong.methods import build
from partsong.methods.privacy_request import (
    PartyPrivacy,
    RowPrivacy,
    build_secure_sum,
    calibrate_noise,
    privacy_from_dict,
    privacy_to_dict,
)
from partsong.methods.private import PrivateAveraging, PrivateSums, party_private
from partsong.privacy.accounting import Accounts, Ledger, Release
from partsong.training.loop import LeftOutWarning

ROWS = RowPrivacy(3.0, row_bound=3.0, mechanism="rounds")
PARTIES = PartyPrivacy(3.0)


@pytest.fixture(scope="module")
def parts():
    rng = np.random.default_rng(5)
    H = rng.random((4, 9))
    return [rng.random((n, 4)) @ H for n in (30, 40, 25, 35)]


def fitted(parts, privacy, *, method="exact", rounds=4, **settings):
    return FederatedNMF(3, method=method, rounds=rounds, privacy=privacy, random_state=1, **settings).fit(parts)


class TestSpending:
    @pytest.mark.parametrize("method", SENDS_H)
    def test_a_planned_run_spends_its_epsilon_and_not_more(self, parts, method):
        model = fitted(parts, PARTIES, method=method, local_steps=2)
        assert 2.99 <= model.epsilon_spent_ <= 3.0
        assert set(model.accounts_.ledgers) == set(model.parties_)
        assert all(len(ledger) == model.n_iter_ for ledger in model.accounts_.ledgers.values())

    @pytest.mark.parametrize("masked", [False, True])
    def test_rows_too_with_and_without_masks(self, parts, masked):
        model = fitted(parts, ROWS, secure_aggregation=masked)
        assert 2.99 <= model.epsilon_spent_ <= 3.0
        assert model.privacy_report_["unit"] == "row"
        assert model.privacy_report_["relation"] == "add-or-remove"

    def test_history_tells_what_was_spent_by_each_round(self, parts):
        spent = [row.epsilon for row in fitted(parts, ROWS, rounds=6).history_]
        release = Release("gaussian", calibrate_noise(ROWS, "gaussian", 6)[0], "row", "add-or-remove")
        assert spent == [Ledger().after(release, t).epsilon(ROWS.delta) for t in range(1, 7)]

    def test_without_privacy_nothing_is_promised(self, parts):
        model = fitted(parts, None)
        assert model.epsilon_spent_ == math.inf
        assert (model.accounts_, model.privacy_report_, model.simulated_) == (None, None, ())
        assert all(math.isnan(row.epsilon) for row in model.history_)

    def test_given_noise_ends_the_run_before_the_round_that_would_exceed_the_budget(self, parts):
        privacy = PartyPrivacy(3.0, noise_multiplier=5.0)
        model = fitted(parts, privacy, method="fedavg", rounds=50)
        release = Release("gaussian", 5.0)
        assert model.outcome_ is Outcome.PRIVACY_BUDGET_EXHAUSTED
        assert model.epsilon_spent_ <= 3.0 < Ledger().after(release, model.n_iter_ + 1).epsilon(1e-5)

    def test_leaving_out_does_not_change_that(self, parts):
        privacy = PartyPrivacy(3.0, noise_multiplier=5.0)
        model = fitted(parts, privacy, method="fedavg", rounds=50, on_party_error="skip")
        assert model.outcome_ is Outcome.PRIVACY_BUDGET_EXHAUSTED
        assert model.epsilon_spent_ <= 3.0

    def test_earlier_runs_count(self, parts):
        first = fitted(parts, PartyPrivacy(2.0), method="fedavg")
        second = fitted(parts, PartyPrivacy(3.0, spent=first.accounts_), method="fedprox")
        alone = fitted(parts, PartyPrivacy(3.0), method="fedprox")
        assert 2.99 <= second.epsilon_spent_ <= 3.0
        assert second.privacy_report_["noise_multiplier"] > alone.privacy_report_["noise_multiplier"]
        assert all(len(ledger) == 8 for ledger in second.accounts_.ledgers.values())

    def test_a_budget_that_is_spent_allows_no_round(self, parts):
        first = fitted(parts, PARTIES, method="fedavg")
        with pytest.raises(ParameterError, match=r"allows no( further)? round"):
            fitted(parts, PartyPrivacy(3.0, spent=first.accounts_), method="fedavg")
        with pytest.raises(ParameterError, match=r"allows no( further)? round"):
            fitted(parts, PartyPrivacy(0.1, noise_multiplier=1.0), method="fedavg")

    def test_spending_on_rows_and_on_parties_is_not_added_up(self, parts):
        first = fitted(parts, ROWS)
        with pytest.raises(CompositionError, match="cannot cover several units or relations"):
            fitted(parts, PartyPrivacy(9.0, spent=first.accounts_), method="fedavg")

    def test_a_party_refuses_by_itself(self, parts):
        program = party_private(build("fedavg", 3, local_steps=10), epsilon=3, delta=1e-5, rounds=2)
        model = FederatedNMF(method=program, rounds=9, random_state=0).fit(parts)
        assert model.outcome_ is Outcome.PRIVACY_BUDGET_EXHAUSTED
        assert model.n_iter_ == 2
        assert issubclass(BudgetSpent, RuntimeError)

    def test_earlier_noise_from_a_seed_is_no_promise(self, parts):
        seeded = Accounts({"party-01": Ledger().after(Release("gaussian", 50.0, is_secure=False))})
        model = fitted(parts, PartyPrivacy(3.0, spent=seeded), method="fedavg", rounds=2)
        assert "NO PROMISE" in model.privacy_report_["promise"]
        assert "NO PROMISE" not in fitted(parts, PARTIES, method="fedavg", rounds=2).privacy_report_["promise"]

    def test_earlier_runs_of_others_count_as_if_they_were_here(self, parts):
        elsewhere = Accounts({"another": Ledger().after(Release("gaussian", 2.0))})
        model = fitted(parts, PartyPrivacy(3.0, spent=elsewhere), method="fedavg")
        assert model.epsilon_spent_ <= 3.0
        assert model.privacy_report_["noise_multiplier"] > calibrate_noise(PARTIES, "gaussian", 4)[0]

    @pytest.mark.parametrize(("privacy", "method"), [(ROWS, "exact"), (PARTIES, "fedavg")])
    @pytest.mark.parametrize("broken", [KeyboardInterrupt, DivergenceError])
    def test_a_round_that_is_broken_off_may_have_been_sent(self, parts, monkeypatch, privacy, method, broken):
        """All parties have worked, and the server never gets to the end of it."""
        break_off(monkeypatch, after=2, error=broken("broken off"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DivergenceWarning)
            model = fitted(parts, privacy, method=method, rounds=4)
        assert model.n_iter_ == len(model.history_) == 2
        assert {len(ledger) for ledger in model.accounts_.ledgers.values()} == {3}
        assert model.history_[-1].epsilon < model.epsilon_spent_ < 3.0

    def test_leaving_a_loop_between_rounds_costs_no_more(self, parts):
        estimator = FederatedNMF(3, rounds=5, privacy=ROWS)
        for report in estimator.iterate(parts):
            if report.iteration == 2:
                break
        assert report.result() is estimator
        assert {len(ledger) for ledger in estimator.accounts_.ledgers.values()} == {2}
        assert estimator.epsilon_spent_ == report.row.epsilon

    def test_one_that_refuses_since_its_budget_is_spent_is_not_charged(self, parts, monkeypatch):
        """One party fails once, and so has a release left when all others have none: they refuse, and pay nothing."""
        plain, failed = PrivateAveraging.local, []

        def local(self, shard, party, model):
            if shard.name == "party-02" and not failed:
                failed.append(shard.name)
                raise PartyError("Not today.")
            return plain(self, shard, party, model)

        monkeypatch.setattr(PrivateAveraging, "local", local)
        with pytest.warns(LeftOutWarning):
            model = fitted(
                parts,
                PartyPrivacy(3.0, noise_multiplier=5.0),
                method="fedavg",
                rounds=50,
                on_party_error="skip",
                n_jobs=1,
            )
        assert model.outcome_ is Outcome.PRIVACY_BUDGET_EXHAUSTED
        assert model.epsilon_spent_ <= 3.0


def break_off(monkeypatch, *, after, error):
    """The server of a private program fails in the round after so many."""
    for program in (PrivateAveraging, PrivateSums):
        plain, done = program.finish, []

        def finish(self, server, aggregate, plain=plain, done=done):
            if len(done) >= after:
                raise error
            done.append(aggregate.weight)
            return plain(self, server, aggregate)

        monkeypatch.setattr(program, "finish", finish)


class TestNothingElseLeaves:
    """What is measured without noise chooses nothing, and is in nothing that is released."""

    def test_all_rounds_are_run_whatever_tol(self, parts):
        assert fitted(parts, ROWS, rounds=12, tol=0.9).n_iter_ == 12

    def test_the_model_is_that_of_the_last_round_in_the_order_of_the_run(self, parts):
        was_better_before = []
        for _ in range(12):
            estimator = FederatedNMF(
                3, rounds=5, privacy=RowPrivacy(0.5, row_bound=3.0, mechanism="rounds"), random_state=3
            )
            reports = list(estimator.iterate(parts))
            errors = [report.row.relative_error for report in reports]
            was_better_before.append(min(errors) < errors[-1])
            np.testing.assert_allclose(estimator.components_, reports[-1].components, rtol=1e-12)
        assert any(was_better_before)

    def test_rows_of_the_model_are_not_sorted_by_shares(self, parts):
        sorted_by_chance = [bool((np.diff(fitted(parts, ROWS).component_shares_) <= 0).all()) for _ in range(12)]
        assert not all(sorted_by_chance)

    def test_a_time_budget_is_refused(self, parts):
        with pytest.raises(ParameterError, match="time_budget"):
            fitted(parts, ROWS, time_budget=5)

    def test_the_default_rank_does_not_depend_on_the_number_of_rows(self, parts):
        few = [rows[:1] for rows in parts]
        assert FederatedNMF(privacy=ROWS, rounds=1).fit(few).n_components_ == 9

    def test_what_exists_in_simulation_only_is_named_and_in_no_file(self, parts, tmp_path):
        model = fitted(parts, ROWS)
        model.save(tmp_path / "model.safetensors")
        stored = load_model(tmp_path / "model.safetensors")
        assert {"relative_error_", "component_shares_", "n_samples_", "history_.relative_error"} <= set(
            model.simulated_
        )
        assert (stored.relative_error, stored.shares) == (None, None)
        assert "n_samples" not in stored.settings
        assert stored.settings["privacy_spent"]["epsilon_spent"] == pytest.approx(model.epsilon_spent_)
        assert "epsilon_by_party" not in stored.settings["privacy_spent"]

    def test_settings_that_are_changed_after_a_fit_do_not_let_anything_out(self, parts, tmp_path):
        model = fitted(parts, ROWS).set_params(privacy=None)
        model.save(tmp_path / "model.safetensors")
        stored = load_model(tmp_path / "model.safetensors")
        assert (stored.relative_error, stored.shares) == (None, None)
        assert "n_samples" not in stored.settings

    def test_equal_models_of_other_rows_are_equal_files(self, parts, tmp_path, monkeypatch):
        """All that a file says is a function of H, of settings and of the plan."""
        monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
        one, other = fitted(parts, ROWS), fitted([rows[::2] for rows in parts], ROWS)
        other.components_ = one.components_
        for name, model in (("one", one), ("other", other)):
            model.save(tmp_path / f"{name}.safetensors")
        assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "other.safetensors").read_bytes()

    def test_traffic_of_a_private_fit_holds_noisy_arrays_alone(self, parts):
        weights = set()
        program = party_private(build("fedavg", 3, local_steps=10), epsilon=3, delta=1e-5, rounds=2)
        shards = [Shard(f"p{i}", as_matrix(rows)) for i, rows in enumerate(parts)]
        for done in Sequential(record=True).run(program, shards, Schedule(2), reduction=PlainReduction()):
            weights |= {message.weight for _, _, message in done.traffic}
        assert weights == {1.0}


class TestRefused:
    @pytest.mark.parametrize("method", [m for m in METHODS if m not in SENDS_H])
    def test_parties_where_something_else_than_h_is_sent(self, parts, method):
        with pytest.raises(ParameterError, match="each party sends H_p"):
            fitted(parts, PARTIES, method=method)

    @pytest.mark.parametrize("method", [m for m in METHODS if m != "exact"])
    def test_rows_where_no_sums_over_rows_are_sent(self, parts, method):
        with pytest.raises(ParameterError, match="exact"):
            fitted(parts, ROWS, method=method)

    @pytest.mark.parametrize("wrong", [0, -1, math.nan, math.inf, "3", True, None, [3]])
    def test_no_epsilon(self, wrong):
        with pytest.raises(ParameterError):
            RowPrivacy(wrong, row_bound=1.0)
        with pytest.raises(ParameterError):
            PartyPrivacy(wrong)

    @pytest.mark.parametrize("name", ["noise_multiplier", "clip", "relation", "kind", "spent"])
    @pytest.mark.parametrize("wrong", [0, -1, math.nan, "x", True, [1], {"a": 1}])
    def test_what_else_is_no_promise(self, name, wrong):
        with pytest.raises(ParameterError):
            PartyPrivacy(1.0, **{name: wrong})
        if name not in ("clip", "kind"):
            with pytest.raises(ParameterError):
                RowPrivacy(1.0, 1.0, **{name: wrong})

    @pytest.mark.parametrize("wrong", [1.0, 2.0, -0.1, math.nan])
    def test_no_delta(self, wrong):
        with pytest.raises(ParameterError):
            PartyPrivacy(1.0, wrong)

    def test_gaussian_noise_needs_a_delta(self, parts):
        with pytest.raises(ParameterError):
            fitted(parts, PartyPrivacy(1.0, 0.0), method="fedavg")

    def test_other_things(self, parts):
        with pytest.raises(ParameterError, match="privacy must be"):
            fitted(parts, 3.0)
        with pytest.raises(ParameterError, match="by name"):
            FederatedNMF(method=build("fedavg", 3, local_steps=10), privacy=PARTIES).fit(parts)
        with pytest.raises(ParameterError, match="local_steps"):
            fitted(parts, ROWS, local_steps=3)
        with pytest.raises(ParameterError, match="kind must be"):
            PartyPrivacy(1.0, kind="uniform")
        with pytest.raises(ParameterError, match="relation"):
            RowPrivacy(1.0, row_bound=1.0, relation="zero-out")
        with pytest.raises(ParameterError, match="row_bound"):
            RowPrivacy(1.0, row_bound=-1.0)


class TestMasks:
    @pytest.mark.parametrize("method", ["exact", "fedavg", "fedprox", "syn-sd", "one-shot-ipalm"])
    def test_the_same_model_as_in_the_open(self, parts, method):
        plain = fitted(parts, None, method=method, tol=0, local_steps=3)
        masked = fitted(parts, None, method=method, tol=0, local_steps=3, secure_aggregation=True)
        np.testing.assert_allclose(masked.components_, plain.components_, atol=1e-6)

    def test_bounds_of_ones_own(self, parts):
        from partsong.secure_aggregation.protocol import SecureSum

        masked = fitted(parts, None, tol=0, secure_aggregation=SecureSum(bound=2.0**20))
        np.testing.assert_allclose(masked.components_, fitted(parts, None, tol=0).components_, atol=1e-8)

    @pytest.mark.filterwarnings("ignore::partsong.errors.InvisibleComponents")
    @pytest.mark.parametrize(
        ("privacy", "method"),
        [
            (PartyPrivacy(1.0, clip=1e9), "fedavg"),
            (PartyPrivacy(1e-5, clip=1e3), "fedavg"),
            (RowPrivacy(1e-6, row_bound=3.0, mechanism="rounds"), "exact"),
            (RowPrivacy(1e-4, row_bound=3.0, mechanism="hybrid"), "exact"),
        ],
    )
    def test_no_noise_is_beyond_the_bounds(self, parts, privacy, method):
        assert fitted(parts, privacy, method=method, rounds=2, secure_aggregation=True).n_iter_ == 2 * (
            1 + (getattr(privacy, "mechanism", "") == "hybrid")
        )

    def test_bounds_that_noise_may_exceed_are_refused_at_once(self, parts):
        from partsong.secure_aggregation.protocol import SecureSum

        with pytest.raises(ParameterError, match="depend on the data"):
            fitted(parts, PARTIES, method="fedavg", secure_aggregation=SecureSum(bound=100.0))

    @pytest.mark.parametrize("n_parties", [3, 4, 5, 8, 100, 512, 1023])
    def test_sums_of_noise_shares_are_not_rounded_and_leave_enough_honest_parties(self, n_parties):
        masks, program = (
            build_secure_sum(ROWS, n_parties),
            ROWS.program(build("exact", 3, local_steps=5), 4, n_parties, True),
        )
        grid = masks.encoding(n_parties).grid_of("cross")
        assert grid.exponent >= 0
        assert masks.bound_of("gram") == masks.bound_of("cross") == program.sum_bound
        assert masks.fewest == n_parties
        assert n_parties - (masks.threshold(n_parties) - 1) >= program.shares == math.ceil(n_parties / 2)

    @pytest.mark.parametrize("n_parties", [3, 32, 1023])
    def test_who_chooses_the_noise_cannot_search_for_the_number_of_rows(self, n_parties):
        program = ROWS.program(build("exact", 2, local_steps=5), 2, n_parties, True)
        most = {replace(program, noise_multiplier=float(one)).max_rows(4) for one in np.geomspace(1e-4, 1e6, 300)}
        assert len(most) == 2
        assert min(most) == 0
        assert max(most) > 2**15

    def test_a_party_of_too_many_rows_is_refused_by_their_number_alone_before_anything_is_sent(self):
        program = replace(ROWS.program(build("exact", 2, local_steps=5), 2, 3, True), sum_bound=2.0**46)
        most, layout = program.max_rows(4), Layout(("a", "b", "c"), 4, 0)
        assert 0 < most < 2**10
        X = np.full((most, 4), 1e9)
        state = program.start_party(Shard("a", as_matrix(X)), layout)
        _, sent = program.local(Shard("a", as_matrix(X)), state, program.start_server(layout)[1])
        assert max(abs(sent[name]).max() for name in ("gram", "cross")) <= program.sum_bound
        for rows in (np.zeros((most + 1, 4)), np.vstack([X, X[:1]])):
            with pytest.raises(DataError, match=r"'a' has more than \d+ rows"):
                program.start_party(Shard("a", as_matrix(rows)), layout)
        with pytest.raises(ParameterError, match=r"exceeds .*the bound"):
            replace(program, noise_multiplier=1e6).start_party(Shard("a", as_matrix(X)), layout)
        assert replace(program, shares=1).start_party(Shard("a", as_matrix(np.ones((most + 1, 4)))), layout)

    def test_three_parties_of_a_million_rows_are_not_too_many(self):
        assert ROWS.program(build("exact", 3, local_steps=5), 10, 3, True).max_rows(1000) > 2**23

    def test_two_parties_are_too_few(self, parts):
        with pytest.raises(ParameterError, match="at least 3"):
            fitted(parts[:2], None, secure_aggregation=True)

    def test_what_is_no_sum_cannot_be_masked(self, parts):
        with pytest.raises(CompositionError, match="individual uploads"):
            fitted(parts, None, method="fnmf-local", secure_aggregation=True, local_steps=2)
        with pytest.raises(ParameterError, match="is asynchronous and cannot use secure aggregation"):
            fitted(parts, None, method="asyn-sd", secure_aggregation=True)
        with pytest.raises(ParameterError, match="secure_aggregation must be"):
            fitted(parts, None, secure_aggregation="yes")


class TestKeeping:
    @pytest.mark.parametrize(
        "privacy",
        [ROWS, PARTIES, PartyPrivacy(2, 1e-6, 0.5, "laplace", "zero-out", 3.0), RowPrivacy(1, 2.0, relation="replace")],
    )
    def test_a_promise_survives_its_file(self, privacy):
        assert privacy_from_dict(privacy_to_dict(privacy)) == privacy
        assert privacy_from_dict(privacy_to_dict(None)) is None

    @pytest.mark.parametrize(
        "told", [{"unit": "cell"}, {"unit": "row", "x": 1}, {"unit": "party", "epsilon": -1}, "row"]
    )
    def test_a_hostile_one_is_refused(self, told):
        with pytest.raises(ParameterError):
            privacy_from_dict(told)

    def test_load_and_save_again(self, parts, tmp_path):
        model = fitted(parts, PARTIES, method="fedavg")
        model.save(tmp_path / "a.safetensors")
        loaded = partsong.FederatedNMF.load(tmp_path / "a.safetensors")
        loaded.save(tmp_path / "b.safetensors")
        assert (loaded.privacy, loaded.relative_error_) == (PARTIES, None)
        assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()

    @pytest.mark.parametrize(
        "told",
        [
            {"privacy_spent": "x"},
            {"privacy_spent": {"epsilon_spent": "3"}},
            {"secure_aggregation": "no"},
            {"privacy": {"unit": []}},
        ],
    )
    def test_a_hostile_file_is_refused(self, parts, tmp_path, told):
        fitted(parts, PARTIES, method="fedavg", rounds=1).save(tmp_path / "a.safetensors")
        stored = load_model(tmp_path / "a.safetensors")
        save_model(tmp_path / "b.safetensors", replace(stored, settings={**stored.settings, **told}))
        with pytest.raises(FormatError, match="Fit the model again"):
            FederatedNMF.load(tmp_path / "b.safetensors")

    def test_a_loaded_model_tells_what_it_has_cost(self, parts, tmp_path):
        model = fitted(parts, PARTIES, method="fedavg", rounds=1)
        model.save(tmp_path / "a.safetensors")
        assert FederatedNMF.load(tmp_path / "a.safetensors").epsilon_spent_ == model.epsilon_spent_

    def test_numbers_of_any_kind_are_kept(self, parts, tmp_path):
        model = fitted(parts, PartyPrivacy(np.float32(3), clip=np.int64(1)), method="fedavg", rounds=1)
        model.save(tmp_path / "a.safetensors")
        assert FederatedNMF.load(tmp_path / "a.safetensors").privacy == PARTIES
        assert len({PARTIES, PartyPrivacy(3.0), ROWS}) == 2

    def test_clones(self, parts):
        from sklearn.base import clone

        estimator = FederatedNMF(3, privacy=PARTIES, secure_aggregation=True)
        assert clone(estimator).get_params() == estimator.get_params()
        assert PartyPrivacy(1.0).spent == Accounts()
