"""Names of features: what can be wrong with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from partsong.data.finding import SHOWN, Finding
from partsong.errors import FeatureError, first_few


def repeated(names: Sequence[str]) -> list[str]:
    """Names that occur more than once, in the order of their first occurrence."""
    return [name for name, count in Counter(names).items() if count > 1]


def require_names(feature_names: Sequence[str], source: str) -> None:
    """Raise FeatureError for names that are empty or used twice."""
    for finding in name_errors(feature_names, len(feature_names)):
        raise FeatureError(f"{source}: {finding.message} {finding.remedy}")


def name_errors(names: Sequence[str], n_columns: int) -> Iterator[Finding]:
    """Findings about a wrong number of names, names used twice, and empty names."""
    if len(names) != n_columns:
        message = f"{len(names)} feature names for {n_columns} columns."
        yield Finding("name-count", "error", message, "Give one name per column, or none.", count=len(names))
    twice = [name for name in repeated(names) if str(name).strip()]
    if twice:
        shown = first_few(map(repr, twice[:SHOWN]), len(twice), "name")
        at = tuple(position for position, name in enumerate(names) if name in set(twice[:SHOWN]))[:SHOWN]
        message = f"Feature names must differ; used more than once: {shown}."
        remedy = "Rename the columns, or merge those that mean the same."
        yield Finding("duplicate-names", "error", message, remedy, columns=at, count=len(twice))
    empty = [position for position, name in enumerate(names) if not str(name).strip()]
    if empty:
        message = f"Columns without a name: {first_few(empty[:SHOWN], len(empty), 'column')}, counted from 0."
        yield Finding(
            "missing-names", "error", message, "Name them, or remove them.", (), tuple(empty[:SHOWN]), len(empty)
        )
