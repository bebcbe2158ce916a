"""Tables: names fit the values, and columns are found by name."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from partsong.data.table import Table
from partsong.errors import FeatureError, PartsongError, ShapeError


def table(**changes):
    given = {"X": np.arange(6.0).reshape(2, 3), "feature_names": ("a", "b", "c"), "source": "here.csv"}
    return Table(**(given | changes))


@pytest.mark.parametrize("as_kind", [np.asarray, sparse.csr_array], ids=["dense", "sparse"])
@given(order=st.permutations(["a", "b", "c", "d"]), n_kept=st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_aligning_picks_columns_by_name(as_kind, order, n_kept):
    X = np.arange(12.0).reshape(3, 4)
    wanted = tuple(order[:n_kept])
    aligned = Table(as_kind(X), ("a", "b", "c", "d"), ("r", "s", "t")).aligned_to(wanted, drop_extra=True)
    expected = X[:, ["abcd".index(name) for name in wanted]]
    held = aligned.X.toarray() if sparse.issparse(aligned.X) else aligned.X
    np.testing.assert_array_equal(held, expected)
    assert aligned.feature_names == wanted
    assert aligned.sample_names == ("r", "s", "t")


def test_aligning_to_its_own_names_copies_nothing():
    own = table()
    assert own.aligned_to(["a", "b", "c"]) is own


def test_missing_features_are_listed_with_their_number():
    with pytest.raises(FeatureError, match=r"here\.csv: 8 of the requested features .* 'f0', .*'f4' \(and 3 more\)"):
        table().aligned_to([f"f{i}" for i in range(8)])


def test_a_difference_in_case_is_pointed_out():
    with pytest.raises(FeatureError, match="'A' is 'a' here"):
        table().aligned_to(["A", "b", "c"])


def test_extra_columns_are_an_error_unless_dropped():
    with pytest.raises(FeatureError, match=r"columns 'b', 'c'.*drop_extra"):
        table().aligned_to(["a"])
    np.testing.assert_array_equal(table().aligned_to(["a"], drop_extra=True).X, [[0.0], [3.0]])


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        pytest.param(None, ["a"], id="no names"),
        pytest.param(("a", "a", "b"), ["a", "b"], id="twice in the table"),
        pytest.param(("a", "b", "c"), ["a", "a"], id="twice in the wish"),
    ],
)
def test_names_that_cannot_be_aligned(own, wanted):
    with pytest.raises(FeatureError):
        table(feature_names=own).aligned_to(wanted)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"X": np.zeros(3)}, ShapeError),
        ({"feature_names": ("a",)}, FeatureError),
        ({"sample_names": ("a",)}, ShapeError),
        ({"labels": np.zeros(5)}, ShapeError),
    ],
)
def test_sizes_must_fit(changes, error):
    with pytest.raises(error, match="here") as caught:
        table(**changes)
    assert isinstance(caught.value, PartsongError | ValueError)
