"""FederatedNMF from one private moment: lists of ranks, what is said of them, memory, and files of older versions."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
from sklearn.base import clone

import partsong
from partsong.errors import InvisibleComponents, ParameterError
from partsong.estimators.federated_nmf import FederatedNMF
from partsong.io.model_file import load_model, save_model
from partsong.methods import build, moment
from partsong.methods.moment import SLACK, BucketedMoment
from partsong.methods.privacy_request import AUTO_BUCKETS, ROW_SETTINGS, PartyPrivacy, RowPrivacy
from partsong.methods.private import PrivateSums

LOUD = RowPrivacy(30.0, row_bound=1.0, mechanism="moment")


def parts(k=3, m=12, rows=(300, 400, 500)):
    rng = np.random.default_rng(0)
    H = rng.gamma(0.5, size=(k, m))
    return [rng.gamma(0.5, size=(n, k)) @ H for n in rows]


def fitted(ranks, privacy=LOUD, X=None, **settings):
    return FederatedNMF(ranks, privacy=privacy, random_state=0, **settings).fit(parts() if X is None else X)


# --- lists of ranks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [[1, 2, 3, 5], (5, 3, 2, 1), [3, 3, 2, 1, 5], np.array([1, 2, 3, 5]).tolist()])
def test_several_ranks_follow_from_one_release(ranks):
    model = fitted(ranks)
    assert model.visible_directions_ == 3
    assert sorted(model.components_by_rank_) == [1, 2, 3, 5]
    for rank, H in model.components_by_rank_.items():
        assert H.shape == (rank, 12)
        assert (H >= 0).all()
    assert model.n_components_ == len(model.components_) == 3
    assert model.epsilon_spent_ == pytest.approx(30.0, rel=1e-6)
    assert {len(ledger) for ledger in model.accounts_.ledgers.values()} == {1}


@pytest.mark.parametrize(("ranks", "chosen"), [([1, 2], 2), ([2, 4], 2), ([3], 3), ([4, 6], 4), ([1, 3, 9], 3)])
def test_the_largest_rank_of_visible_directions_is_taken_or_the_smallest(ranks, chosen):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InvisibleComponents)
        model = fitted(ranks)
    assert len(model.components_) == chosen
    same = model.components_by_rank_[chosen]
    cosines = np.sort(np.max(unit(model.components_) @ unit(same).T, axis=1))
    np.testing.assert_allclose(cosines, 1, atol=1e-9)


def unit(H):
    return H / np.linalg.norm(H, axis=1, keepdims=True)


def test_another_rank_is_a_model_at_no_cost():
    model = fitted([1, 2, 3, 9])
    for rank in (1, 2, 9):
        other = model.at_rank(rank)
        assert other.n_components_ == len(other.components_) == rank
        assert other.transform(parts()[0]).shape == (300, rank)
        assert math.isnan(other.relative_error_)
        assert other.accounts_ == model.accounts_
        assert ("invention" in other.privacy_report_["verdict"]) == (rank > 3 + SLACK)
    assert model.at_rank(3) is model
    assert len(model.components_) == 3, "the model itself stays as it is"
    with pytest.raises(ParameterError, match=r"1, 2, 3, 9.*got 4"):
        model.at_rank(4)


def test_a_model_at_another_rank_is_saved(tmp_path):
    fitted([2, 3]).at_rank(2).save(tmp_path / "two.safetensors")
    again = FederatedNMF.load(tmp_path / "two.safetensors")
    assert again.components_.shape == (2, 12)
    assert again.epsilon_spent_ == pytest.approx(30.0, rel=1e-6)


def test_a_list_of_ranks_survives_a_clone_and_a_run_folder(tmp_path):
    estimator = FederatedNMF([2, 3], privacy=LOUD, random_state=0)
    assert clone(estimator).n_components == [2, 3]
    first = estimator.fit(parts(), run_folder=tmp_path / "run")
    again = FederatedNMF([2, 3], privacy=LOUD).fit(parts(), run_folder=tmp_path / "run", resume=True)
    assert again.components_.tobytes() == first.components_.tobytes()
    assert again.epsilon_spent_ == first.epsilon_spent_
    with pytest.raises(ParameterError, match="n_components"):
        FederatedNMF([2, 4], privacy=LOUD).fit(parts(), run_folder=tmp_path / "run", resume=True)


@pytest.mark.filterwarnings("ignore::partsong.errors.InvisibleComponents")
def test_a_list_of_ranks_is_for_parties_and_masks_too():
    model = fitted([1, 2], PartyPrivacy(1e3, clip=1e5), method="moment")
    assert sorted(model.components_by_rank_) == [1, 2]
    assert sorted(fitted([1, 2], secure_aggregation=True).components_by_rank_) == [1, 2]
    centred = replace(LOUD, mechanism="centred")
    assert sorted(fitted([1, 2], centred).components_by_rank_) == [1, 2]


def test_auto_takes_one_release_for_several_ranks():
    """Also where it would take a hybrid for one."""
    public = RowPrivacy(300.0, 1.0, n_rows=1200)
    assert public.plan(3, 3, False, 12).mechanism == "hybrid"
    model = fitted([2, 3], public)
    assert model.privacy_report_["mechanism"] == "moment"
    assert len(model.history_) == 1


@pytest.mark.parametrize(
    ("ranks", "settings", "match"),
    [
        ([], {"privacy": LOUD}, "empty list"),
        ([2, 0], {"privacy": LOUD}, "n_components"),
        ([2, 2.5], {"privacy": LOUD}, "n_components"),
        ([2, "3"], {"privacy": LOUD}, "n_components"),
        ([2, True], {"privacy": LOUD}, "n_components"),
        ([2, 3], {}, "one private release"),
        ([2, 3], {"method": "moment"}, "one private release"),
        ([2, 3], {"method": "fedavg", "privacy": PartyPrivacy(1.0)}, "one private release"),
        ([2, 3], {"privacy": replace(LOUD, mechanism="rounds")}, "one private release"),
        ([2, 3], {"privacy": replace(LOUD, mechanism="hybrid")}, "one private release"),
    ],
)
def test_other_lists_and_methods_are_refused_before_anything_is_spent(ranks, settings, match):
    with pytest.raises(ParameterError, match=match) as error:
        FederatedNMF(ranks, **settings).fit(parts())
    assert error.value.parameter == "n_components"


# --- what is said ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "is_warned"), [(1, False), (3, False), (3 + SLACK, False), (4 + SLACK, True)])
def test_components_beyond_what_is_visible_are_warned_of(rank, is_warned):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", InvisibleComponents)
        model = fitted(rank)
    said = [str(one.message) for one in seen if one.category is InvisibleComponents]
    assert len(said) == is_warned
    assert model.privacy_report_["visible_directions"] == model.visible_directions_ == 3
    assert model.privacy_report_["verdict"].startswith("3 directions are visible above the noise")
    if is_warned:
        assert said == [model.privacy_report_["verdict"]]
        assert "beyond about 5 are invention" in said[0]


def test_nothing_but_noise_is_warned_of_before_and_after():
    with pytest.warns(InvisibleComponents) as seen:
        model = fitted(2, RowPrivacy(0.05, 1.0, mechanism="moment", n_rows=100), [X[:40] for X in parts()])
    assert "expect nothing but noise" in str(seen[0].message)
    assert model.visible_directions_ <= 1
    assert np.isfinite(model.components_).all()


def test_without_a_noisy_moment_nothing_is_said():
    for model in (FederatedNMF(2, method="moment"), FederatedNMF(2, privacy=replace(LOUD, mechanism="rounds"))):
        model.fit(parts())
        assert model.visible_directions_ is None
        assert model.components_by_rank_ == {}


def test_a_model_file_says_what_was_visible(tmp_path):
    model = fitted(2)
    model.save(tmp_path / "model.safetensors")
    report = load_model(tmp_path / "model.safetensors").settings["privacy_spent"]
    assert (report["mechanism"], report["visible_directions"]) == ("moment", 3)
    assert report["verdict"] == model.privacy_report_["verdict"]


# --- files of older versions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit_of_privacy", ["row", "party"])
def test_the_privacy_of_an_older_model_was_that_of_rounds(tmp_path, unit_of_privacy):
    privacy = replace(LOUD, mechanism="rounds") if unit_of_privacy == "row" else PartyPrivacy(30.0)
    method = "exact" if unit_of_privacy == "row" else "fedavg"
    fitted(2, privacy, method=method, rounds=2).save(tmp_path / "new.safetensors")
    stored = load_model(tmp_path / "new.safetensors")
    older = {name: one for name, one in stored.settings["privacy"].items() if name not in ROW_SETTINGS[1:]}
    save_model(tmp_path / "old.safetensors", replace(stored, settings={**stored.settings, "privacy": older}))
    assert FederatedNMF.load(tmp_path / "old.safetensors").privacy == privacy


@pytest.mark.parametrize("mechanism", ["auto", "moment", "centred", "hybrid"])
def test_a_mechanism_survives_its_file(tmp_path, mechanism):
    privacy = RowPrivacy(30.0, 1.0, mechanism=mechanism, centre_radius=0.3, n_rows=200)
    fitted(2, privacy).save(tmp_path / "model.safetensors")
    assert FederatedNMF.load(tmp_path / "model.safetensors").privacy == privacy


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{"privacy": LOUD}, {"method": "moment"}, {"privacy": replace(LOUD, mechanism="hybrid")}]
)
def test_a_moment_larger_than_memory_is_refused_before_anything_is_computed(monkeypatch, settings):
    monkeypatch.setattr(moment, "physical_memory", lambda: 32 * 12**2 - 1)
    monkeypatch.setattr(moment.MomentProgram, "local", lambda *given: pytest.fail("something was computed"))
    with pytest.raises(ParameterError, match=r"12 columns needs .* GiB") as error:
        FederatedNMF(2, **settings).fit(parts())
    assert "buckets" in str(error.value) or 'method="exact"' in str(error.value)


@pytest.mark.parametrize("memory", [None, 32 * 12**2])
def test_enough_memory_or_memory_that_is_not_known_is_no_obstacle(monkeypatch, memory):
    monkeypatch.setattr(moment, "physical_memory", lambda: memory)
    assert fitted(2).n_components_ == 2


def test_buckets_and_rounds_need_no_square_of_columns(monkeypatch):
    monkeypatch.setattr(moment, "physical_memory", lambda: 1)
    assert fitted(2, replace(LOUD, buckets=4)).n_components_ == 2
    assert fitted(2, replace(LOUD, mechanism="rounds"), rounds=2).n_components_ == 2


def test_very_many_columns_are_put_in_buckets():
    """By "auto"; what was asked for by name is done as asked."""
    plain = build("exact", 2)
    for m, kind in ((5000, moment.NoisyMoment), (5001, BucketedMoment)):
        made = RowPrivacy(1.0, 1.0).program(plain, 5, 3, False, m)
        assert isinstance(made.statistic, kind)
    assert isinstance(RowPrivacy(1.0, 1.0, mechanism="rounds").program(plain, 5, 3, False, 5001), PrivateSums)
    assert made.statistic.moment.buckets == AUTO_BUCKETS
    with pytest.raises(ParameterError, match="at most the number of columns, 12; got 13"):
        fitted(2, replace(LOUD, buckets=13))


def test_the_class_of_the_warning_is_public():
    assert partsong.errors.InvisibleComponents is InvisibleComponents
