"""Tables: the rows of one party as read from a file, with feature names, sample names and labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from partsong.data.scan import SHOWN, Finding, is_sparse, repeated
from partsong.errors import FeatureError, ShapeError, first_few, format_count

_FEWEST_TITLES = 3  # two numbers ascend in half of all rows by chance
_LOOKED_AT = 100


def header_findings(X: Any, feature_names: Sequence[str] | None) -> tuple[Finding, ...]:
    """Return a note if the first line of a text file may be a header of numbers, such as years.

    That is the case if the first row has ascending whole numbers and no other row does.
    """
    if feature_names is not None or X.shape[0] < 2 or X.shape[1] < _FEWEST_TITLES:
        return ()
    top = np.asarray(X[:_LOOKED_AT], dtype=np.float64)
    is_whole = (np.isfinite(top) & (top == np.floor(top))).all(axis=1)
    ascends = is_whole & (top[:, 1:] > top[:, :-1]).all(axis=1)
    if not ascends[0] or ascends[1:].any():
        return ()
    titles = ", ".join(f"{title:.0f}" for title in top[0, :_FEWEST_TITLES])
    message = f"The first line was read as data, but may be a header: ascending whole numbers ({titles}, …)."
    remedy = "Set header to true if it names the columns, to false if it is data."
    return (Finding("header-or-data", "note", message, remedy, rows=(0,), count=1),)


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Values and their names; rows are samples, columns are features.

    X is a 2-D ndarray, a memmap or CSR. `source` is the origin of the rows, for messages only.
    """

    X: Any
    feature_names: tuple[str, ...] | None = None
    sample_names: tuple[str, ...] | None = None
    labels: npt.NDArray[Any] | None = None
    source: str = "memory"

    def __post_init__(self) -> None:
        if self.X.ndim != 2:
            raise ShapeError(
                f"{self.source}: a table has 2 dimensions, but this array has {self.X.ndim} dimension(s) "
                f"(shape {tuple(self.X.shape)}). Reshape it to samples x features."
            )
        n_rows, n_columns = self.X.shape
        if self.feature_names is not None and len(self.feature_names) != n_columns:
            raise FeatureError(
                f"{self.source}: {format_count(len(self.feature_names), 'feature name')} for "
                f"{format_count(n_columns, 'column')}. "
                "Pass one name per column, or none."
            )
        for what, values in (("sample names", self.sample_names), ("labels", self.labels)):
            if values is not None and len(values) != n_rows:
                raise ShapeError(
                    f"{self.source}: {len(values)} {what} for {format_count(n_rows, 'row')}. Pass one per row, or none."
                )

    def aligned_to(self, feature_names: Sequence[str], *, drop_extra: bool = False) -> Table:
        """Return the same rows with columns selected by name, in the given order; a reordered memmap is read to memory.

        Extra columns are an error, so that nothing is lost by accident; `drop_extra` drops them.
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
                f"{self.source}: {len(extra)} column(s) are not among the requested features: "
                f"{first_few(map(repr, extra[:SHOWN]), len(extra), 'column')}. "
                "Set drop_extra to leave them out.",
                parameter="drop_extra",
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
                "Add a header line or feature names to the data."
            )
        for whose, names in ((f"{self.source}: the table", self.feature_names), ("The requested features", wanted)):
            twice = repeated(names)
            if twice:
                shown = first_few(map(repr, twice[:SHOWN]), len(twice), "name")
                raise FeatureError(f"{whose} use these names more than once: {shown}. Make the names unique.")
        return self.feature_names


def _missing_message(source: str, missing: list[str], own: tuple[str, ...]) -> str:
    folded = {name.casefold(): name for name in own}
    twins = [(name, folded[name.casefold()]) for name in missing if name.casefold() in folded]
    hint = "Add these columns (zeros if they were not measured), or use the features that all parties have."
    if twins:
        asked, held = twins[0]
        hint = f"{len(twins)} of them differ only in case ({asked!r} is {held!r} here). Rename these. "
    shown = first_few(map(repr, missing[:SHOWN]), len(missing), "feature")
    return f"{source}: {len(missing)} of the requested features are not in the table: {shown}. {hint}".rstrip()
