"""Columns that number the rows are found; measurements and counts of words are left alone."""

import numpy as np
import pytest
from scipy import sparse

from partsong.data.validation import identifier_columns, identifier_findings

RNG = np.random.default_rng(0)
N = 30


def beside(column, at=1):
    """Counts with one more column among them."""
    return np.insert(RNG.poisson(3.0, (N, 4)).astype(float), at, column, axis=1)


@pytest.mark.parametrize("first", [0, 1, 1000])
@pytest.mark.parametrize("form", [np.asarray, np.asfortranarray, sparse.csr_array, sparse.csc_array, np.float32])
def test_counting_columns_are_found_whatever_their_name(first, form):
    X = form(beside(np.arange(first, first + N)))
    assert identifier_columns(X).tolist() == [1]
    assert identifier_columns(X, ["a", "b", "c", "d", "e"]).tolist() == [1]


def test_whole_numbers_of_any_type():
    X = beside(np.arange(N)).astype(np.uint8)
    assert identifier_columns(X).tolist() == [1]
    assert identifier_columns(X.astype(bool)).tolist() == []


@pytest.mark.parametrize("title", ["Unnamed: 0", "patient_id", "sample id", "row names", "ROW_NUMBER"])
def test_whole_numbers_under_such_a_title_are_found(title):
    names = ["a", title, "c", "d", "e"]
    assert identifier_columns(beside(RNG.integers(0, 5, N)), names).tolist() == [1]
    assert identifier_columns(beside(RNG.random(N)), names).tolist() == []


@pytest.mark.parametrize("title", ["id", "ID", "index", "sample", "row", " idx "])
def test_words_must_differ_from_row_to_row(title):
    names = ["a", title, "c", "d", "e"]
    assert identifier_columns(beside(RNG.permutation(1000)[:N]), names).tolist() == [1]
    assert identifier_columns(beside(RNG.integers(0, 3, N)), names).tolist() == []  # a word, counted
    assert identifier_columns(beside(RNG.random(N)), names).tolist() == []


def test_measurements_are_left_alone():
    for column in (np.arange(N)[::-1], np.arange(N) * 2, np.arange(N) + 0.5 * (np.arange(N) == N - 1), np.zeros(N)):
        assert identifier_columns(beside(column), ["covid", "price", "idea", "rows", "indexed"]).tolist() == []
    assert identifier_columns(np.where(np.arange(N)[:, None] == N - 1, np.nan, beside(np.arange(N)))).tolist() == []


def test_few_rows_count_only_in_the_first_column():
    X = np.array([[0.0, 4, 0], [1, 2, 1], [2, 9, 2], [3, 9, 3]])
    assert identifier_columns(X).tolist() == [0]
    assert identifier_columns(X[:3]).tolist() == []


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 3), (20, 1)])
def test_nothing_to_find(shape):
    assert identifier_findings(np.zeros(shape)) == ()


def test_a_finding_names_the_column_and_the_way_out():
    (finding,) = identifier_findings(beside(np.arange(N)), ["a", "nr", "c", "d", "e"])
    assert (finding.severity, finding.columns, finding.count) == ("note", (1,), 1)
    assert "1 ('nr')" in finding.message
    assert "'nr' as the label" in finding.remedy
