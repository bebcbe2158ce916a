"""Columns that number the rows instead of measuring them: an identifier or an index that came along with the data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from partsong.data.finding import Finding, few, labelled
from partsong.data.scan import Indices, is_sparse
from partsong.errors import first_few

TITLES = re.compile(r"unnamed: ?\d+|.+[ _.-]id|(row|sample)[ _.-]?(id|index|number|names?)")
"""Titles under which whole numbers are no measurements; pandas makes the first of an index that was saved twice."""

WORDS = frozenset({"id", "idx", "index", "sample", "row", "#"})
"""Titles that may be words counted in texts as well: here the numbers must also differ from row to row."""

FEWEST_ROWS = 10  # shorter columns of counts may ascend by chance
FEWEST_TO_DIFFER = 4  # in the first column, where an index stands, and under a title that says so


def identifier_columns(X: Any, feature_names: Sequence[str] | None = None) -> Indices:
    """Columns of whole numbers that are titled like an identifier, and columns with x_i = x_0 + i."""
    n_rows, n_columns = X.shape
    if X.dtype.kind not in "iuf" or n_rows < 2 or n_columns < 2:
        return np.zeros(0, dtype=np.intp)
    titled = [at for at, name in enumerate(feature_names or ()) if _is_titled(X, at, str(name).strip().casefold())]
    return np.union1d(np.array(titled, dtype=np.intp), _counting(X))


def identifier_findings(X: Any, feature_names: Sequence[str] | None = None) -> tuple[Finding, ...]:
    """A note on such columns, with the ways to leave them out; nothing where there are none."""
    found = identifier_columns(X, feature_names)
    if not found.size:
        return ()
    shown = first_few(labelled(found, feature_names), found.size, "column")
    message = f"Looks like numbers of rows rather than measurements: {shown}, counted from 0."
    name = "…" if feature_names is None else feature_names[int(found[0])]
    remedy = (
        f"A fit takes it for a feature. Leave it out (label={name!r}, say), or, in text files, put it first under the "
        "title 'sample' so that it names the rows."
    )
    return (Finding("identifier-columns", "note", message, remedy, columns=few(found), count=int(found.size)),)


def _is_titled(X: Any, at: int, title: str) -> bool:
    if TITLES.fullmatch(title):
        return _are_whole(_column(X, at))
    if title not in WORDS or X.shape[0] < FEWEST_TO_DIFFER:
        return False
    values = _column(X, at)
    return _are_whole(values) and len(np.unique(values)) == len(values)


def _counting(X: Any) -> Indices:
    """Columns with x_i = x_0 + i for all i; few rows decide for nearly all columns, and only the rest is read on."""
    n_rows = X.shape[0]
    top = _dense(X[: min(n_rows, FEWEST_ROWS)])
    steps = (np.diff(top, axis=0) == 1).all(axis=0)
    if n_rows < FEWEST_ROWS:
        steps[1:] = False
    if n_rows < FEWEST_TO_DIFFER:
        steps[0] = False
    return np.array([at for at in np.flatnonzero(steps).tolist() if _counts_up(_column(X, at))], dtype=np.intp)


def _counts_up(values: npt.NDArray[Any]) -> bool:
    return bool((values == values[0] + np.arange(len(values))).all())


def _are_whole(values: npt.NDArray[Any]) -> bool:
    return bool((np.isfinite(values) & (values == np.floor(values))).all())


def _column(X: Any, at: int) -> npt.NDArray[np.float64]:
    return _dense(X[:, [at]]).ravel()


def _dense(block: Any) -> npt.NDArray[np.float64]:
    return np.asarray(block.toarray() if is_sparse(block) else block, dtype=np.float64)
