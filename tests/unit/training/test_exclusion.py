"""FederatedNMF(on_party_error="skip"): a fit without faulty parties is a fit of the others, and says whom it lacks."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from method_tables import METHODS
from numpy.testing import assert_array_equal

import partsong
from partsong.core.interfaces import Message
from partsong.data.party_columns import Columns, parties_with_other_columns
from partsong.errors import CompositionError, DataError, FeatureError, PartsongError, PartyError, UploadError
from partsong.methods import build
from partsong.training.loop import LeftOutWarning

SETTINGS = {"rounds": 4, "tol": 0, "random_state": 0}


def parts(seed=0, sizes=(30, 50, 20, 25)):
    rng = np.random.default_rng(seed)
    H = rng.gamma(0.5, size=(4, 15))
    return [rng.gamma(0.5, size=(n, 4)) @ H + 0.05 * rng.random((n, 15)) for n in sizes]


def with_nan(X):
    X = X.copy()
    X[3, 2] = np.nan
    return X


BAD = {
    "NaN": (with_nan, "NaN in data"),
    "negative": (lambda X: -X, "Negative values"),
    "zeros": (lambda X: 0 * X, "Every value is zero"),
    "no rows": (lambda X: X[:0], r"0 sample\(s\)"),
    "fewer columns": (lambda X: X[:, 1:], "has 14 columns, not 15, compared with 'a'"),
    "text": (lambda X: "b.csv", "is text, not a matrix"),
    "one-dimensional": (lambda X: X[0], "1"),
    "too large": (lambda X: X * 1e150, "largest value"),
}


def left_out(model):
    return [(entry.iteration, entry.party) for entry in model.left_out_]


@pytest.mark.parametrize("fault", BAD)
@pytest.mark.parametrize("method", ["exact", "fnmf"])
def test_without_usable_data_a_party_is_not_there(method, fault):
    X, (spoil, words) = dict(zip("abcd", parts(), strict=True)), BAD[fault]
    bad = {**X, "b": spoil(X["b"])}
    others = {name: X[name] for name in "acd"}
    settings = {"method": method, **SETTINGS}
    with pytest.raises(PartsongError, match=r"'b'|b: 14"):
        partsong.FederatedNMF(3, **settings).fit(bad)
    with pytest.warns(LeftOutWarning, match=f"Party 'b' is left out of this run.*({words})") as told:
        model = partsong.FederatedNMF(3, on_party_error="skip", **settings).fit(bad)
    assert len(told) == 1
    plain = partsong.FederatedNMF(3, **settings).fit(others)
    assert_array_equal(model.components_, plain.components_)
    assert model.relative_error_ == plain.relative_error_
    assert (model.parties_, model.n_samples_) == (["a", "c", "d"], 75)
    assert left_out(model) == [(i, "b") for i in (1, 2, 3, 4)]
    assert [row.parties for row in model.history_] == [3] * 4


@pytest.mark.parametrize("method", METHODS)
def test_where_nobody_is_faulty_nothing_changes(method):
    settings = {"method": method, **SETTINGS}
    model = partsong.FederatedNMF(3, on_party_error="skip", **settings).fit(parts())
    assert_array_equal(model.components_, partsong.FederatedNMF(3, **settings).fit(parts()).components_)
    assert model.left_out_ == []


def test_whose_columns_are_odd_is_no_matter_of_order():
    pd = pytest.importorskip("pandas")
    names = [f"g{i}" for i in range(15)]
    frames = {name: pd.DataFrame(X, columns=names) for name, X in zip("abcd", parts(), strict=True)}
    frames["b"] = frames["b"].rename(columns={"g3": "other"})
    frames["c"] = frames["c"][names[::-1]]
    for order in list(permutations("abcd"))[::5]:
        with pytest.warns(LeftOutWarning, match="'b' lacks column g3 and has other column other, compared with"):
            model = partsong.FederatedNMF(3, on_party_error="skip", **SETTINGS).fit(
                {name: frames[name] for name in order}
            )
        assert set(model.parties_) == set("acd")
    two = {name: frames[name] for name in "ab"}
    with pytest.raises(FeatureError, match=r"as many agree with 'a' as with 'b'.*no majority"):
        partsong.FederatedNMF(3, on_party_error="skip").fit(two)


def test_most_decide_by_number_and_then_by_name():
    plain, named, odd = Columns(3, None), Columns(3, ["u", "v", "w"]), Columns(3, ["u", "v", "x"])
    assert parties_with_other_columns({}) == {}
    assert parties_with_other_columns({"a": plain, "b": named}) == {}
    assert set(parties_with_other_columns({"a": Columns(2, None), "b": plain, "c": named})) == {"a"}
    assert set(parties_with_other_columns({"a": odd, "b": plain, "c": named, "d": named})) == {"a"}
    assert parties_with_other_columns({"a": named, "b": Columns(3, ["w", "u", "v"])}) == {}


def test_of_the_columns_that_a_party_lacks_thirty_are_named():
    names = [f"g{i}" for i in range(60)]
    for lacking, more in ((12, ""), (41, r" \(and 11 more\)")):
        (reason,) = parties_with_other_columns(
            {
                "a": Columns(60, names),
                "b": Columns(60, names),
                "c": Columns(60, [f"h{i}" for i in range(lacking)] + names[lacking:]),
            }
        ).values()
        assert re.search(
            f"lacks columns g0, g1, .*{more} and has other columns h0.* compared with 'a' and most", reason
        )
        assert reason.count(" g") == min(30, lacking)


@pytest.mark.parametrize("method", METHODS)
def test_why_zeros_are_refused_is_true_of_every_method(method):
    """Sums do not change by such a party; only averages hear of its start, and the reason says so of averages alone."""
    X = dict(zip("abcd", parts(), strict=True))
    with pytest.raises(DataError, match=r"contributes nothing to sums, and only a random start to averages"):
        partsong.FederatedNMF(3, method=method, **SETTINGS).fit({**X, "e": 0 * X["b"]})


def test_somebody_has_to_be_left():
    X = parts()
    with pytest.raises(PartyError, match=r"No party is left: the data of all 2 parties are faulty.* 'party-01': NaN"):
        partsong.FederatedNMF(3, on_party_error="skip").fit([with_nan(X[0]), X[1][:0]])


def test_the_precision_is_that_of_those_who_stay():
    X = [part.astype(np.float32) for part in parts()]
    X[1] = with_nan(X[1].astype(np.float64))
    X[2] = X[2] * np.float32(1e18)  # too large for sums of squares in float32
    with pytest.warns(LeftOutWarning) as told:
        model = partsong.FederatedNMF(3, on_party_error="skip", **SETTINGS).fit(X)
    assert sorted(str(warning.message)[:16] for warning in told) == ["Party 'party-02'", "Party 'party-03'"]
    assert model.components_.dtype == np.float32


def test_weights_are_those_of_who_is_there():
    X = parts()
    model = partsong.FederatedNMF(3, on_party_error="skip", **SETTINGS)
    bad = [X[0], with_nan(X[1]), X[2], X[3]]
    with pytest.warns(LeftOutWarning):
        listed = model.fit_transform(bad, names=iter("abcd"))
    assert listed[1] is None
    for i in (0, 2, 3):
        assert_array_equal(listed[i], model.transform(X[i]))
    with pytest.warns(LeftOutWarning):
        mapped = model.fit_transform(dict(zip("abcd", bad, strict=True)))
    assert [name for name, W in mapped.items() if W is None] == ["b"]
    labels = np.repeat(list("abcd"), [len(part) for part in X])
    order = np.random.default_rng(0).permutation(len(labels))
    stacked = np.vstack(bad)[order]
    for held in (stacked, sp.csr_array(np.nan_to_num(stacked, nan=-1.0))):
        with pytest.warns(LeftOutWarning, match="'b'"):
            W = model.fit_transform(held, parties=labels[order])
        is_here = labels[order] != "b"
        assert np.isnan(W[~is_here]).all()
        assert_array_equal(W[is_here], model.transform(held[np.flatnonzero(is_here)]))


@dataclass(frozen=True)
class Faulty:
    """A program whose uploads at party b are NaN in some rounds."""

    inner: Any
    bad: frozenset[int]
    seen: list[int]

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def local(self, shard, party, model):
        party, message = self.inner.local(shard, party, model)
        if shard.name != "b":
            return party, message
        self.seen.append(len(self.seen) + 1)
        if self.seen[-1] not in self.bad:
            return party, message
        return party, Message({name: array * np.nan for name, array in message.arrays.items()}, message.weight)


def test_a_refused_upload_is_told_once_and_listed_round_by_round():
    X = dict(zip("abcd", parts(), strict=True))
    program = Faulty(build("exact", 3, local_steps=5), frozenset({2, 4}), [])
    with pytest.warns(LeftOutWarning, match=r"'b' is left out of round 2 and asked again in the next\. .*NaN") as told:
        model = partsong.FederatedNMF(method=program, on_party_error="skip", **SETTINGS).fit(X)
    assert len(told) == 1
    assert "on_party_error=" not in str(told[0].message), "there is nothing left to ask for"
    assert left_out(model) == [(2, "b"), (4, "b")]
    assert all("sent an invalid upload" in entry.reason for entry in model.left_out_)
    assert [row.parties for row in model.history_] == [4, 3, 4, 3]
    assert model.parties_ == list("abcd")
    with pytest.raises(UploadError, match="Party 'b'") as caught:
        partsong.FederatedNMF(method=Faulty(program.inner, frozenset({1}), []), **SETTINGS).fit(X)
    assert any("--on-party-error skip" in note for note in caught.value.__notes__)


def test_rounds_one_at_a_time_tell_the_same():
    X = dict(zip("abcd", parts(), strict=True))
    X["c"] = with_nan(X["c"])
    model = partsong.FederatedNMF(
        method=Faulty(build("exact", 3, local_steps=5), frozenset({2}), []), on_party_error="skip", **SETTINGS
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for report in model.iterate(X):
            assert {entry.iteration for entry in report.result().left_out_} == set(range(1, report.iteration + 1))
    assert [str(warning.message)[:9] for warning in told] == ["Party 'c'", "Party 'b'"]
    assert left_out(model) == [(1, "c"), (2, "c"), (2, "b"), (3, "c"), (4, "c")]


def test_save_and_load_remember_it(tmp_path):
    model = partsong.FederatedNMF(3, on_party_error="skip", **SETTINGS).fit(parts())
    model.save(tmp_path / "m.safetensors")
    assert partsong.FederatedNMF.load(tmp_path / "m.safetensors").on_party_error == "skip"


def test_a_mistake_of_the_caller_is_no_fault_of_a_party():
    with pytest.raises(PartsongError, match=r"names has \d+ names? for"):
        partsong.FederatedNMF(3, on_party_error="skip").fit(parts(), names=["a"])
    with pytest.raises(DataError, match="NaN"):
        partsong.FederatedNMF(3, on_party_error="raise").fit([with_nan(parts()[0])])


@pytest.mark.parametrize("method", METHODS)
def test_a_party_of_zeros_has_nothing_to_say(method):
    X = dict(zip("abcd", parts(), strict=True))
    with pytest.raises(DataError, match=r"In party 'c': Every value is zero\. This party contributes nothing"):
        partsong.FederatedNMF(3, method=method, **SETTINGS).fit({**X, "c": sp.csr_matrix(X["c"].shape)})
    assert partsong.NMF(3).fit(0 * X["a"]).relative_error_ == 0


def test_rows_are_told_to_be_those_of_the_party():
    X, labels = np.vstack(parts()), np.repeat(list("abcd"), [30, 50, 20, 25])
    X[31, 2] = np.nan
    with pytest.raises(DataError, match="in row 1 of party 'b'; column 2"):
        partsong.FederatedNMF(3, **SETTINGS).fit(X, parties=labels)


def test_one_tensor_among_arrays_is_left_out_and_two_kinds_of_as_many_are_not_told_apart():
    torch = pytest.importorskip("torch")
    X = dict(zip("abcd", parts(), strict=True))
    odd = {**X, "b": torch.from_numpy(X["b"])}
    with pytest.warns(LeftOutWarning, match=r"'b' is left out .* torch on cpu, but most have data for NumPy"):
        model = partsong.FederatedNMF(3, on_party_error="skip", **SETTINGS).fit(odd)
    assert model.parties_ == ["a", "c", "d"]
    with pytest.raises(CompositionError, match="use one library and device"):
        partsong.FederatedNMF(3, on_party_error="skip", **SETTINGS).fit({**odd, "a": torch.from_numpy(X["a"])})
