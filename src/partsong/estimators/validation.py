"""The estimators' door: scikit-learn's conventions outside, typed errors inside."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import numpy as np
from sklearn.utils.validation import check_array, validate_data

from partsong import kernels
from partsong.aggregation.alignment import Assignment
from partsong.core.interfaces import Array, Layout, Shard
from partsong.core.streams import fresh_seed, key
from partsong.data.conversion import array_of, as_matrix, float_type, form_errors, is_tensor
from partsong.data.issues import SHOWN
from partsong.data.observed import ObservedMatrix, known_cells, observed
from partsong.data.partition import party_names
from partsong.data.table import Table, column_labels, column_names, repeated
from partsong.data.validation import cell_errors, error_of, require_factorizable, require_transformable
from partsong.errors import (
    CompositionError,
    DataError,
    DataTypeError,
    FeatureError,
    ParameterError,
    PartsongError,
    ShapeError,
    UnreadableError,
    first_few,
)
from partsong.training.loop import Columns, of_other_columns, require_same_columns, require_somebody

# ---- validation -------------------------------------------------------------------------------------------------


def validated(estimator: Any, X: Any, *, reset: bool, dtype: Any = None) -> Any:
    """X as an array or sparse matrix that can be factorized (`reset`) or transformed.

    Names and width are remembered or compared; `dtype` is the precision to compute in where it is not that of X.
    """
    rows = numbers_of(X)
    agree_on_columns(estimator, X, reset=reset)
    require = require_factorizable if reset else require_transformable
    require(rows, column_names(X), dtype)
    return rows


def validated_cells(estimator: Any, X: Any, *, reset: bool, dtype: Any = None) -> ObservedMatrix:
    """The known cells of X; columns of which nothing is known are told of in a fit."""
    rows = numbers_with_gaps(X)
    agree_on_columns(estimator, X, reset=reset)
    cells = observed(rows, dtype)
    if not cells.stored and reset:
        raise DataError("No cell of X is known. Give at least one number; NaN and what is not stored are unknown.")
    if reset and len(cells.empty_columns):
        so = "it is" if len(cells.empty_columns) == 1 else "they are"
        warn_of_unknown(cells.empty_columns, f"{so} zero in every component", stacklevel=6)
    return cells


def warn_of_unknown(columns: np.ndarray, consequence: str, *, stacklevel: int) -> None:
    """Warn of columns without a known cell, and of what follows from that."""
    shown = first_few(columns[:SHOWN].tolist(), len(columns), "column")
    warnings.warn(f"Nothing is known of {shown} (counted from 0): {consequence}.", UserWarning, stacklevel=stacklevel)


def numbers_with_gaps(X: Any) -> Any:
    """`numbers_of`, with NaN also where a masked array hides something."""
    return numbers_of(_with_gaps(X) if isinstance(X, np.ma.MaskedArray) else X)


def _with_gaps(X: Any) -> np.ndarray:
    """NaN where a masked array hides something."""
    kind = X.dtype if X.dtype.kind not in "biu" else np.dtype(np.float64)
    filled: np.ndarray = X.astype(kind, copy=False).filled(np.nan)
    return filled


def numbers_of(X: Any) -> Any:
    """Whatever holds a matrix of numbers as an array, a memory map, CSR or CSC; the values are not looked at."""
    if isinstance(X, Table):
        raise DataTypeError("This is a Table; its numbers are in .X and its names beside them: fit(table.X).")
    if isinstance(X, str | os.PathLike):
        raise UnreadableError(f"{X!r} is text, not a matrix. Read a file first: partsong.read(path).X.")
    names = column_names(X)
    held = X if column_labels(X) is not None else array_of(X)
    for finding in cell_errors(held, names):
        raise error_of(finding)
    try:
        rows = check_array(
            held,
            accept_sparse=("csr", "csc"),
            dtype="numeric",
            ensure_2d=False,
            allow_nd=True,
            ensure_all_finite=False,
            ensure_min_samples=0,
            ensure_min_features=0,
        )
    except (TypeError, ValueError) as error:
        raise UnreadableError(f"{error} Convert the data to a NumPy array of numbers first.") from error
    for finding in form_errors(rows):
        raise error_of(finding)
    return held if isinstance(held, np.memmap) else rows  # scikit-learn makes a map a plain view; maps give pages back


def agree_on_columns(estimator: Any, X: Any, *, reset: bool) -> None:
    """Remember the names and the number of columns of X (`reset`), or compare them with those of the fit."""
    try:
        validate_data(estimator, X, reset=reset, skip_check_array=True)
    except ValueError as error:
        if "feature names" not in str(error).lower():
            raise ShapeError(str(error) if reset else f"{error} {_way_to_width(estimator)}") from error
        raise FeatureError(f"{error}\n{_way_to_names(estimator, X)}") from error


def _way_to_width(estimator: Any) -> str:
    """What to do about another number of columns, where names cannot tell which of them are meant."""
    names = getattr(estimator, "feature_names_in_", None)
    if names is None:
        return (
            "Bring X to the columns of the fit, in the same order: leave out those that are new, and add those that "
            "are missing (zeros, if they were not measured)."
        )
    return (
        f"The fit had the {first_few(map(repr, names[:SHOWN]), len(names), 'column')}: bring X to these, in this "
        "order; of a data frame with names it is told which are missing and which are new."
    )


def _way_to_names(estimator: Any, X: Any) -> str:
    """What to do about names that are not those of the fit, or not in their order."""
    known, here = set(getattr(estimator, "feature_names_in_", ())), set(column_labels(X) or ())
    order = "X[list(model.feature_names_in_)]"
    if known - here:
        return f"Add the missing columns (zeros, if they were not measured), then take {order}."
    if here - known:
        return f"Leave out the columns that the fit did not have: {order}."
    return f"Put the columns in the order of the fit: {order}. An array without names is taken as it is."


def whole_seed(random_state: Any) -> int:
    """An integer seed from what scikit-learn calls random_state."""
    if random_state is None:
        return fresh_seed()
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(2**31 - 1))
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**63 - 1))
    if isinstance(random_state, int | np.integer) and not isinstance(random_state, bool) and random_state >= 0:
        return int(random_state)
    raise ParameterError(f"random_state must be None, a whole number ≥ 0, or a NumPy generator; got {random_state!r}.")


class NonNegativeTransformer:
    """What scikit-learn asks of a transformer: rows without negative numbers, dense or sparse, to one number for each
    component, in the type they came in.
    """

    components_: np.ndarray

    @property
    def _n_features_out(self) -> int:
        return int(self.components_.shape[0])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()  # type: ignore[misc]
        tags.input_tags.positive_only = True
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


# ---- parties ----------------------------------------------------------------------------------------------------
#
# A list with one matrix per party to shards that can work together: one kind, one precision, one order of columns.


def shards_of(
    estimator: Any, matrices: Any, names: Any, seed: int, dtype: np.dtype[Any] | None, *, has_gaps: bool = False
) -> list[Shard]:
    """The parties of a simulation, checked; the estimator remembers the columns of the first that names them.

    Without `dtype` all compute in float64 as soon as one of them needs it. Secrets come from the seed, so that the
    same seed gives the same federation. Where data may have gaps, parties hold their known cells alone.
    """
    labels = _labels(matrices, names)
    _require_one_kind(labels, matrices)
    parties = _in_one_order(labels, matrices)
    rows = {}
    for label, X in parties.items():
        with _at(label):
            rows[label] = _rows_of(X, has_gaps)
    chosen = dtype if dtype is not None else common_type(list(rows.values()))
    shards = []
    for label, X in parties.items():
        with _at(label):
            _require_usable(label, rows[label], column_names(X), chosen, has_gaps)
            held = X if is_tensor(X) and not has_gaps else rows[label]
            matrix = observed(held, chosen) if has_gaps else as_matrix(held, chosen)
            shards.append(Shard(label, matrix, key(seed, "secret", label)))
    Layout.of(shards, seed)
    agree_on_columns(estimator, next((X for X in parties.values() if column_names(X)), matrices[0]), reset=True)
    if has_gaps:
        _warn_of_unknown_columns(list(rows.values()))
    return shards


def sound_parties(
    matrices: Any, names: Any, dtype: np.dtype[Any] | None, *, has_gaps: bool = False
) -> tuple[list[Any], list[str], dict[str, str]]:
    """Matrices and names of the parties that `shards_of` would not refuse, and of the others why it would.

    Columns are those that most parties hold, whether or not their values can be used, and so is where they compute.
    """
    labels = _labels(matrices, names)
    parties, rows, faults = dict(zip(labels, matrices, strict=True)), {}, {}
    for label, X in parties.items():
        try:
            rows[label] = _rows_of(X, has_gaps)
        except PartsongError as error:
            faults[label] = str(error)
    faults |= _in_other_places({label: parties[label] for label in rows})
    faults |= of_other_columns({label: Columns(X.shape[1], column_labels(parties[label])) for label, X in rows.items()})
    while True:
        kept, faults = [n for n in labels if n not in faults], {n: faults[n] for n in labels if n in faults}
        require_somebody(kept, faults)
        chosen = dtype if dtype is not None else common_type([rows[label] for label in kept])
        found = {label: _fault(label, rows[label], column_names(parties[label]), chosen, has_gaps) for label in kept}
        if not any(found.values()):
            return [parties[label] for label in kept], kept, faults
        faults |= {label: fault for label, fault in found.items() if fault}


def _fault(label: str, rows: Any, names: tuple[str, ...] | None, dtype: np.dtype[Any], has_gaps: bool) -> str:
    """What keeps a party's values from being factorized, if anything does."""
    try:
        _require_usable(label, rows, names, dtype, has_gaps)
    except PartsongError as error:
        return str(error)
    return ""


def _rows_of(X: Any, has_gaps: bool) -> Any:
    """A party's numbers, or the known ones of them as CSR."""
    return known_cells(numbers_with_gaps(X)) if has_gaps else numbers_of(X)


def _require_usable(label: str, rows: Any, names: tuple[str, ...] | None, dtype: np.dtype[Any], has_gaps: bool) -> None:
    """Refuse values of a party that cannot be factorized, and a party that knows no cell."""
    if has_gaps and not rows.nnz:
        raise DataError(
            "No cell of this party is known: all are NaN or not stored. Give it at least one number, leave the party "
            'out, or take faulty="leave out".'
        )
    require_factorizable(rows, names, dtype, party=label)


def _warn_of_unknown_columns(known: Sequence[Any]) -> None:
    """Warn of columns that no party knows: between parties they stay as random as they began."""
    counts = np.bincount(np.concatenate([cells.indices for cells in known]), minlength=known[0].shape[1])
    unknown = np.flatnonzero(counts == 0)
    if unknown.size:
        of = "it" if unknown.size == 1 else "them"
        warn_of_unknown(unknown, f"what the model says of {of} means nothing", stacklevel=6)


def named_parties(X: Any, names: Any) -> tuple[Any, Any]:
    """Matrices and names from a mapping of the one to the other; a generator of matrices as a list."""
    if not isinstance(X, Mapping):
        return (list(X) if isinstance(X, Iterator) else X), names
    if names is not None:
        raise ParameterError("Give names or a mapping, not both: the keys of the mapping are the names of the parties.")
    wrong = [key for key in X if not _is_label(key)]
    if wrong:
        raise ParameterError(f"Names of parties must be text or whole numbers; a key of this mapping is {wrong[0]!r}.")
    return list(X.values()), [str(key) for key in X]


def _is_label(label: Any) -> bool:
    return bool(label.strip()) if isinstance(label, str) else isinstance(label, int | np.integer | np.bool_)


def by_party(X: Any, parties: Any, names: Any) -> tuple[list[Any], list[str]]:
    """The rows of one matrix shared out by their labels, with the labels as names, in order."""
    if names is not None:
        raise ParameterError("Give names or parties, not both: the labels of the rows are the names of the parties.")
    if len(getattr(X, "shape", ())) != 2:
        raise ShapeError(
            f"parties=labels goes with one matrix and has a label for each of its rows; this is {_told(X)}. A list "
            "with one matrix per party, [X_1, X_2, …], needs no labels: leave parties out."
        )
    labels = _row_labels(X, parties)
    held = X.tocsr() if hasattr(X, "tocsr") else X
    by_position = getattr(held, "iloc", held)
    kinds, codes = np.unique(np.array(labels), return_inverse=True)
    return [by_position[np.flatnonzero(codes == i)] for i in range(len(kinds))], [str(kind) for kind in kinds]


def _row_labels(X: Any, parties: Any) -> list[str]:
    """A label for each row as text, in the order of the rows."""
    is_same = getattr(getattr(parties, "index", None), "equals", None)  # lists have an index as well, which is another
    if is_same is not None and hasattr(X, "index") and not is_same(X.index):
        raise ShapeError("parties has another index than X. Bring them to one order: parties.reindex(X.index).")
    given = parties.tolist() if hasattr(parties, "tolist") else parties
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise ParameterError(f"parties must be a list with a label for each row; got {_told(parties)}.")
    given = list(given)
    if len(given) != X.shape[0]:
        raise ShapeError(
            f"{len(given)} labels of parties were given for {X.shape[0]} rows. Give one for each row, in their order."
        )
    missing = [i for i, label in enumerate(given) if not _is_label(label)]
    if missing:
        raise ParameterError(
            f"Labels of parties must be text or whole numbers; those of {first_few(missing[:5], len(missing), 'row')} "
            f"are not ({given[missing[0]]!r}). Name the party of each of these rows, or leave the rows out."
        )
    labels = [str(label) for label in given]
    if len(set(labels)) < len(
        set(map(str, {(type(label).__name__ in ("str", "str_"), str(label)) for label in given}))
    ):
        raise ParameterError("Labels of parties mix text and numbers that read the same. Make all of them text.")
    return labels


class WeightsByParty:
    """`fit_transform` for data that come by party.

    Apart from the estimator, because scikit-learn makes one table of all that a method of that name returns there.
    """

    def fit_transform(self, X: Any, y: Any = None, *, names: Any = None, parties: Any = None) -> Any:
        """Learn the shared components and return W as the data came: a list or mapping of every party's W_p, or one W
        in the order of the rows of one matrix with labels.

        Weights are private: only a simulation has those of all parties. They are what `transform` gives. Of a party
        whose data cannot be used and that was left out there are none: None, or NaN in the rows of one W.
        """
        estimator: Any = self
        held, labels = named_parties(X, names)
        labels, parties = (list(given) if isinstance(given, Iterator) else given for given in (labels, parties))
        estimator.fit(held, names=labels, parties=parties)
        if parties is not None:
            return self._weights_by_row(held, parties)
        everyone = dict(zip(_labels(held, labels), held, strict=True))
        ordered = _in_one_order(estimator.parties_, [everyone[name] for name in estimator.parties_])
        found = {name: estimator.transform(rows) for name, rows in ordered.items()}
        weights = [found.get(name) for name in everyone]
        return dict(zip(X, weights, strict=True)) if isinstance(X, Mapping) else weights

    def _weights_by_row(self, X: Any, parties: Any) -> Any:
        estimator: Any = self
        is_here = np.isin(np.array(_row_labels(X, parties)), estimator.parties_)
        if is_here.all():
            return estimator.transform(X)
        held = X.tocsr() if hasattr(X, "tocsr") else X
        found = np.asarray(estimator.transform(getattr(held, "iloc", held)[np.flatnonzero(is_here)]))
        weights = np.full((len(is_here), found.shape[1]), np.nan, found.dtype)
        weights[is_here] = found
        return weights


def own_components(
    H: np.ndarray, own: Mapping[str, Array], names: Sequence[str]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Each party's H_p with the norms of its partners in H, and the permutation that puts it in the order of H.

    Parties that have none, or one that has run away from all measure, are given H.
    """
    components, alignments = {}, {}
    sizes = np.linalg.norm(H, axis=1, keepdims=True)
    for name in names:
        found = np.asarray(kernels.of(own[name]).to_numpy(own[name])) if name in own else H
        with np.errstate(over="ignore"):
            has_run_away = not np.isfinite(np.square(found, dtype=np.float64).sum())
        found = H if has_run_away else found
        plan = Assignment(unit=True).plan(H, found)
        exact = found.astype(np.float64)
        theirs = np.linalg.norm(exact, axis=1, keepdims=True)
        scaled = exact / np.where(theirs > 0, theirs, 1.0) * plan.transposed().apply(sizes)
        components[name] = scaled.astype(H.dtype)
        alignments[name] = plan.matrix
    return components, alignments


def common_type(matrices: Sequence[Any]) -> np.dtype[Any]:
    """The precision that loses nothing of any of them."""
    return max((float_type(X.dtype) for X in matrices), key=lambda kind: kind.itemsize)


def _labels(matrices: Any, names: Any) -> list[str]:
    if hasattr(matrices, "shape") or isinstance(matrices, str) or not isinstance(matrices, Sequence):
        raise ShapeError(
            "Data of parties are a list with one matrix per party, [X_1, X_2, …], a mapping of names to matrices, or "
            f"one matrix with a label for each row, parties=labels; this is {_told(matrices)}. For rows that are all "
            "in one place, use NMF."
        )
    if len(matrices) == 0:
        raise ParameterError("A federation needs at least one party; the list is empty. Give at least one matrix.")
    if isinstance(names, str | Set) or not (names is None or isinstance(names, Iterable)):
        raise ParameterError(f"names must be a list with a name for each party, in their order; got {names!r}.")
    labels = list(names) if names is not None else party_names(len(matrices))
    if len(labels) != len(matrices):
        raise ParameterError(
            f"{len(labels)} names were given for {len(matrices)} parties. Give one for each, in their order, or none."
        )
    wrong = [i for i, label in enumerate(labels) if not isinstance(label, str) or not label.strip()]
    if wrong:
        at = first_few(wrong[:5], len(wrong), "position")
        raise ParameterError(
            f"Names of parties must be text, and are not at {at} ({labels[wrong[0]]!r}). Give each a name."
        )
    twice = repeated(labels)
    if twice:
        raise ParameterError(
            f"Party names must differ; used more than once: {', '.join(twice[:5])}. "
            "Rename them, or put the rows of a party into one matrix."
        )
    return [str(label) for label in labels]


def _told(X: Any) -> str:
    shape = getattr(X, "shape", None)
    return type(X).__name__ if shape is None else f"{type(X).__name__} of shape {tuple(shape)}"


def _place(X: Any) -> str:
    return f"torch on {X.device}" if is_tensor(X) else "NumPy"


def _in_other_places(parties: Mapping[str, Any]) -> dict[str, str]:
    """Who would not compute where most do; nobody, where there is no such place."""
    places = {label: _place(X) for label, X in parties.items()}
    votes = Counter(places.values()).most_common(2)
    if len(votes) < 2 or votes[0][1] == votes[1][1]:
        return {}
    usual = votes[0][0]
    return {
        label: f"Party {label!r} would compute with {place}, and most with {usual}. Bring all data to one kind."
        for label, place in places.items()
        if place != usual
    }


def _require_one_kind(labels: Sequence[str], matrices: Sequence[Any]) -> None:
    """All parties compute with torch on one device, or none does."""
    places = [_place(X) for X in matrices]
    if len(set(places)) > 1:
        other = next(i for i, place in enumerate(places) if place != places[0])
        raise CompositionError(
            f"Parties must compute in one place, but party {labels[0]!r} would with {places[0]} and party "
            f"{labels[other]!r} with {places[other]}. Bring all data to one kind: X.cpu().numpy() makes a tensor an "
            "array, torch.from_numpy(X).to(device) an array a tensor."
        )


def _in_one_order(labels: Sequence[str], matrices: Sequence[Any]) -> dict[str, Any]:
    """Data frames with their columns in the order of the first of them; anything else as it is."""
    parties = dict(zip(labels, matrices, strict=True))
    held = {label: found for label, X in parties.items() if (found := column_labels(X)) is not None}
    for label in held:
        with _at(label):
            column_names(parties[label])
    if not held:
        return parties
    require_same_columns({label: Columns(len(columns), columns) for label, columns in held.items()})
    expected = next(iter(held.values()))
    for label, columns in held.items():
        if columns != expected:
            parties[label] = parties[label][expected]
    return parties


@contextmanager
def _at(label: str) -> Iterator[None]:
    """An error says whose data it is about."""
    try:
        yield
    except PartsongError as error:
        raise type(error)(f"In party {label!r}: {error}") from error
