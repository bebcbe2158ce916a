"""A first line of numbers that may be names: noticed where it ascends and no other does, and nowhere else."""

import numpy as np
import pytest

from partsong.data.table import header_findings

X = np.random.default_rng(0).poisson(5.0, (40, 6)).astype(float)


@pytest.mark.parametrize(
    "titles", [[1990, 1991, 1992, 1993, 1994, 1995], [0, 5, 10, 50, 100, 500], [400, 410, 420, 430, 440, 450]]
)
def test_titles_among_the_numbers_are_noticed(titles):
    (note,) = header_findings(np.vstack([titles, X]), None)
    assert (note.severity, note.rows) == ("note", (0,))
    assert ", ".join(map(str, titles[:3])) in note.message
    assert "header to true" in note.remedy


@pytest.mark.parametrize(
    "first",
    [[1990, 1991, 1992, 1993, 1994, 1994], [1995, 1994, 1993, 1992, 1991, 1990], [0.5, 1, 2, 3, 4, 5], [np.nan] * 6],
)
def test_other_rows_are_data(first):
    assert header_findings(np.vstack([first, X]), None) == ()


def test_where_all_rows_ascend_the_first_is_no_header():
    assert header_findings(np.cumsum(X + 1, axis=1), None) == ()


def test_nothing_is_said_of_names_few_columns_and_single_rows():
    table = np.vstack([np.arange(6), X])
    assert header_findings(table, list("abcdef")) == ()
    assert header_findings(table[:, :2], None) == ()
    assert header_findings(table[:1], None) == ()
    assert header_findings(np.zeros((0, 6)), None) == ()
