"""A table: one party's rows as they were read, with the names that go with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from partsong.data.issues import SHOWN, Finding, is_sparse
from partsong.errors import FeatureError, ShapeError, first_few

_MISSING = ("None", "nan", "NaT", "<NA>")
_FEWEST_TITLES = 3  # two numbers ascend in every other row
_LOOKED_AT = 100


def column_labels(X: Any) -> list[Any] | None:
    """What a data frame calls its columns; None for anything else."""
    if hasattr(X, "iloc") and hasattr(X, "columns"):
        return list(X.columns)
    return list(X.__dataframe__().column_names()) if hasattr(X, "__dataframe__") else None


def column_names(X: Any) -> tuple[str, ...] | None:
    """The names of a data frame's columns, checked; labels without any text among them (numbers) are not names.

    Labels must differ in either case.
    """
    labels = column_labels(X) or []
    has_names = any(isinstance(label, str) for label in labels)
    for finding in name_errors(labels, len(labels)):
        if has_names or finding.kind == "duplicate-names":
            raise FeatureError(f"{finding.message} {finding.remedy}")
    return tuple(labels) if has_names else None


def repeated(names: Sequence[str]) -> list[str]:
    """Names that occur more than once, in the order of their first occurrence."""
    return [name for name, count in Counter(names).items() if count > 1]


def require_names(feature_names: Sequence[str], source: str) -> None:
    """Raise FeatureError for names that are empty, used twice, or no text."""
    for finding in name_errors(feature_names, len(feature_names)):
        raise FeatureError(f"{source}: {finding.message} {finding.remedy}")


def name_errors(names: Sequence[str], n_columns: int) -> Iterator[Finding]:
    """Findings about a wrong number of names, names used twice, empty names, and names that are no text."""
    if len(names) != n_columns:
        message = f"{len(names)} feature names for {n_columns} columns."
        yield Finding("name-count", "error", message, "Give one name per column, or none.", count=len(names))
    empty = [position for position, name in enumerate(names) if _is_missing(name)]
    twice = [name for name in repeated(names) if not _is_missing(name)]
    if twice:
        at = {name: [place for place, other in enumerate(names) if other == name] for name in twice[:SHOWN]}
        told = [f"{name!r} ({first_few(places[:SHOWN], len(places), 'column')})" for name, places in at.items()]
        message = f"Feature names must differ; used more than once: {first_few(told, len(twice), 'name')}."
        remedy = "Columns are counted from 0. Rename the columns, or merge those that mean the same."
        columns = tuple(sorted(place for places in at.values() for place in places)[:SHOWN])
        yield Finding("duplicate-names", "error", message, remedy, columns=columns, count=len(twice))
    if empty:
        message = f"Columns without a name: {first_few(empty[:SHOWN], len(empty), 'column')}, counted from 0."
        remedy = "Name them, or remove them."
        yield Finding("missing-names", "error", message, remedy, columns=tuple(empty[:SHOWN]), count=len(empty))
    others = [place for place, name in enumerate(names) if not isinstance(name, str) and place not in set(empty)]
    if others:
        told = [f"{place} ({names[place]!r})" for place in others[:SHOWN]]
        message = f"Feature names must be text; they are not in {first_few(told, len(others), 'column')}."
        remedy = "Make all of them text: X.columns = X.columns.astype(str)."
        yield Finding("name-type", "error", message, remedy, columns=tuple(others[:SHOWN]), count=len(others))


def header_findings(X: Any, feature_names: Sequence[str] | None) -> tuple[Finding, ...]:
    """A note where names may be among the numbers of a text file, such as years.

    The first row ascends in whole numbers, and none of those below does.
    """
    if feature_names is not None or X.shape[0] < 2 or X.shape[1] < _FEWEST_TITLES:
        return ()
    top = np.asarray(X[:_LOOKED_AT], dtype=np.float64)
    is_whole = (np.isfinite(top) & (top == np.floor(top))).all(axis=1)
    ascends = is_whole & (top[:, 1:] > top[:, :-1]).all(axis=1)
    if not ascends[0] or ascends[1:].any():
        return ()
    titles = ", ".join(f"{title:.0f}" for title in top[0, :_FEWEST_TITLES])
    message = f"The first line was read as data, but may be a header: whole numbers that ascend ({titles}, …)."
    remedy = "Say which: header=True if it names the columns, header=False if it is data."
    return (Finding("header-or-data", "note", message, remedy, rows=(0,), count=1),)


def _is_missing(name: Any) -> bool:
    return not name.strip() if isinstance(name, str) else str(name) in _MISSING


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Values and their names; rows are samples, columns are features.

    X is a 2-D ndarray, a memmap or CSR. `source` says where the rows came from, for messages only.
    """

    X: Any
    feature_names: tuple[str, ...] | None = None
    sample_names: tuple[str, ...] | None = None
    labels: npt.NDArray[Any] | None = None
    source: str = "memory"

    def __post_init__(self) -> None:
        if self.X.ndim != 2:
            raise ShapeError(
                f"{self.source}: a table has rows and columns, but this array has {self.X.ndim} dimension(s) "
                f"(shape {tuple(self.X.shape)}). Reshape it to samples x features."
            )
        n_rows, n_columns = self.X.shape
        if self.feature_names is not None and len(self.feature_names) != n_columns:
            raise FeatureError(
                f"{self.source}: {len(self.feature_names)} feature names for {n_columns} columns. "
                "Give one name per column, or none at all."
            )
        for what, values in (("sample names", self.sample_names), ("labels", self.labels)):
            if values is not None and len(values) != n_rows:
                raise ShapeError(
                    f"{self.source}: {len(values)} {what} for {n_rows} rows. Give one per row, or none at all."
                )

    def aligned_to(self, feature_names: Sequence[str], *, drop_extra: bool = False) -> Table:
        """The same rows with columns picked by name, in the order given; a reordered memmap is read into memory.

        Columns that were not asked for are an error, so that nothing is lost by accident; `drop_extra` drops them.
        """
        wanted = tuple(feature_names)
        own = self._names_to_align(wanted)
        place = {name: position for position, name in enumerate(own)}
        missing = [name for name in wanted if name not in place]
        if missing:
            raise FeatureError(_missing_message(self.source, missing, own))
        extra = sorted(set(own).difference(wanted), key=place.__getitem__)
        if extra and not drop_extra:
            raise FeatureError(
                f"{self.source}: {len(extra)} column(s) are not among the features asked for: "
                f"{first_few(map(repr, extra[:SHOWN]), len(extra), 'column')}. "
                "Pass drop_extra=True to leave them out."
            )
        if wanted == own:
            return self
        order = np.array([place[name] for name in wanted], dtype=np.intp)
        X = self.X[:, order] if is_sparse(self.X) else np.take(self.X, order, axis=1)
        return replace(self, X=X, feature_names=wanted)

    def _names_to_align(self, wanted: tuple[str, ...]) -> tuple[str, ...]:
        if self.feature_names is None:
            raise FeatureError(
                f"{self.source}: the columns have no names, so they cannot be matched with {len(wanted)} names. "
                "Add a header line, or a list of feature names, to the data."
            )
        for whose, names in ((f"{self.source}: the table", self.feature_names), ("The features asked for", wanted)):
            twice = repeated(names)
            if twice:
                shown = first_few(map(repr, twice[:SHOWN]), len(twice), "name")
                raise FeatureError(f"{whose} use more than once the {shown}. Make the names unique before aligning.")
        return self.feature_names


def _missing_message(source: str, missing: list[str], own: tuple[str, ...]) -> str:
    folded = {name.casefold(): name for name in own}
    twins = [(name, folded[name.casefold()]) for name in missing if name.casefold() in folded]
    hint = "Add these columns (zeros, if they were not measured), or agree on the features all parties have."
    if twins:
        asked, held = twins[0]
        hint = f"{len(twins)} of them differ only in upper and lower case ({asked!r} is {held!r} here): rename these. "
    shown = first_few(map(repr, missing[:SHOWN]), len(missing), "feature")
    return f"{source}: {len(missing)} of the features asked for are not in the table: {shown}. {hint}".rstrip()
