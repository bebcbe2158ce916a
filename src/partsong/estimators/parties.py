"""Validation of inputs of federated estimators: data by party, methods, privacy, secure aggregation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import numpy as np

from partsong import kernels, methods
from partsong.aggregation.alignment import Assignment
from partsong.core.interfaces import Array, Layout, Shard
from partsong.core.streams import key
from partsong.data.conversion import as_matrix, float_type, is_tensor
from partsong.data.observed import known_cells, observed
from partsong.data.party_columns import Columns, parties_with_other_columns, require_any_party, require_same_columns
from partsong.data.scan import column_labels, column_names, repeated
from partsong.data.validation import require_factorizable
from partsong.errors import (
    CompositionError,
    DataError,
    ParameterError,
    PartsongError,
    ShapeError,
    first_few,
    format_count,
    with_message,
)
from partsong.estimators.validation import columns_of, numbers_of, numbers_with_gaps, one_of, stop_of, warn_of_unknown
from partsong.methods.privacy_request import PartyPrivacy, Privacy, RowPrivacy, upload_bound
from partsong.methods.registry import private_methods
from partsong.secure_aggregation.protocol import SecureSum


def read_parties(
    X: Any,
    names: Any,
    parties: Any,
    seed: int,
    dtype: np.dtype[Any] | None,
    *,
    has_gaps: bool = False,
    skip_invalid: bool = False,
) -> tuple[list[Shard], dict[str, Any], dict[str, str]]:
    """Convert parties in any accepted form; return shards, columns, and skipped parties with reasons."""
    matrices, labels = named_parties(X, names) if parties is None else split_by_label(X, parties, names)
    skipped: dict[str, str] = {}
    if skip_invalid:
        matrices, labels, skipped = drop_invalid_parties(matrices, labels, dtype, has_gaps=has_gaps)
    return *shards_of(matrices, labels, seed, dtype, has_gaps=has_gaps), skipped


def shards_of(
    matrices: Any, names: Any, seed: int, dtype: np.dtype[Any] | None, *, has_gaps: bool = False
) -> tuple[list[Shard], dict[str, Any]]:
    """Return the validated parties of a simulation, and the columns of the first that names them.

    Without `dtype`, all compute in float64 if one of them needs it. Secrets come from the seed, so the same seed gives
    the same federation. If data may have gaps, parties hold only their known cells.
    """
    labels = _labels(matrices, names)
    _require_one_kind(labels, matrices)
    parties = _in_one_order(labels, matrices)
    rows = {}
    for label, X in parties.items():
        with _naming_party(label):
            rows[label] = _rows_of(X, has_gaps)
    chosen = dtype if dtype is not None else common_type(list(rows.values()))
    shards = []
    for label, X in parties.items():
        with _naming_party(label):
            _require_usable(label, rows[label], column_names(X), chosen, has_gaps)
            held = X if is_tensor(X) and not has_gaps else rows[label]
            matrix = observed(held, chosen) if has_gaps else as_matrix(held, chosen)
            shards.append(Shard(label, matrix, key(seed, "secret", label)))
    Layout.of(shards, seed)
    columns = columns_of(next((X for X in parties.values() if column_names(X)), matrices[0]))
    if has_gaps:
        _warn_of_unknown_columns(list(rows.values()))
    return shards, columns


def drop_invalid_parties(
    matrices: Any, names: Any, dtype: np.dtype[Any] | None, *, has_gaps: bool = False
) -> tuple[list[Any], list[str], dict[str, str]]:
    """Return matrices and names of the parties that `shards_of` accepts, and the reasons for the others.

    The expected columns and device are those of most parties, including parties with invalid values.
    """
    labels = _labels(matrices, names)
    parties, rows, faults = dict(zip(labels, matrices, strict=True)), {}, {}
    for label, X in parties.items():
        try:
            rows[label] = _rows_of(X, has_gaps)
        except PartsongError as error:
            faults[label] = str(error)
    faults |= _in_other_places({label: parties[label] for label in rows})
    faults |= parties_with_other_columns(
        {label: Columns(X.shape[1], column_labels(parties[label])) for label, X in rows.items()}
    )
    while True:
        kept, faults = [n for n in labels if n not in faults], {n: faults[n] for n in labels if n in faults}
        require_any_party(kept, faults)
        chosen = dtype if dtype is not None else common_type([rows[label] for label in kept])
        found = {label: _fault(label, rows[label], column_names(parties[label]), chosen, has_gaps) for label in kept}
        if not any(found.values()):
            return [parties[label] for label in kept], kept, faults
        faults |= {label: fault for label, fault in found.items() if fault}


def _fault(label: str, rows: Any, names: tuple[str, ...] | None, dtype: np.dtype[Any], has_gaps: bool) -> str:
    """The reason why a party's values cannot be factorized, or an empty string."""
    try:
        _require_usable(label, rows, names, dtype, has_gaps)
    except PartsongError as error:
        return str(error)
    return ""


def _rows_of(X: Any, has_gaps: bool) -> Any:
    """A party's numbers, or its known cells as CSR."""
    return known_cells(numbers_with_gaps(X)) if has_gaps else numbers_of(X)


def _require_usable(label: str, rows: Any, names: tuple[str, ...] | None, dtype: np.dtype[Any], has_gaps: bool) -> None:
    """Require values that can be factorized, and at least one known cell."""
    if has_gaps and not rows.nnz:
        raise DataError(
            "This party has no known cell: all are NaN or not stored. Provide at least one number, or use "
            'on_party_error="skip" (--on-party-error skip).'
        )
    require_factorizable(rows, names, dtype, party=label)


def _warn_of_unknown_columns(known: Sequence[Any]) -> None:
    """Warn of columns that no party knows: in a federation they keep their random start."""
    counts = np.bincount(np.concatenate([cells.indices for cells in known]), minlength=known[0].shape[1])
    unknown = np.flatnonzero(counts == 0)
    if unknown.size:
        of = "it" if unknown.size == 1 else "them"
        warn_of_unknown(unknown, f"the model's values for {of} are meaningless", stacklevel=7)


def named_parties(X: Any, names: Any) -> tuple[Any, Any]:
    """Split a mapping into matrices and names; convert an iterator of matrices to a list."""
    if not isinstance(X, Mapping):
        return (list(X) if isinstance(X, Iterator) else X), names
    if names is not None:
        raise ParameterError(
            "X is a mapping, whose keys are the names of the parties. Remove names.",
            parameter="names",
        )
    wrong = [key for key in X if not _is_label(key)]
    if wrong:
        raise ParameterError(f"Names of parties must be text or whole numbers; a key of this mapping is {wrong[0]!r}.")
    return list(X.values()), [str(key) for key in X]


def _is_label(label: Any) -> bool:
    return bool(label.strip()) if isinstance(label, str) else isinstance(label, int | np.integer | np.bool_)


def split_by_label(X: Any, parties: Any, names: Any) -> tuple[list[Any], list[str]]:
    """Split the rows of one matrix by their labels; return the parts and the sorted labels as names."""
    if names is not None:
        raise ParameterError(
            "parties and names were both passed, but the labels in parties are the names. Remove names.",
            parameter="parties",
        )
    if len(getattr(X, "shape", ())) != 2:
        raise ShapeError(
            f"parties=labels needs one matrix X with one label per row; X is {_describe(X)}. For a list with one "
            "matrix per party, [X_1, X_2, …], remove parties.",
            parameter="parties",
        )
    labels = _row_labels(X, parties)
    held = X.tocsr() if hasattr(X, "tocsr") else X
    by_position = getattr(held, "iloc", held)
    kinds, codes = np.unique(np.array(labels), return_inverse=True)
    return [by_position[np.flatnonzero(codes == i)] for i in range(len(kinds))], [str(kind) for kind in kinds]


def _row_labels(X: Any, parties: Any) -> list[str]:
    """Return the label of each row as text."""
    is_same = getattr(getattr(parties, "index", None), "equals", None)  # lists have another index
    if is_same is not None and hasattr(X, "index") and not is_same(X.index):
        raise ShapeError(
            "The indexes of parties and X differ. Align them with parties.reindex(X.index).", parameter="parties"
        )
    given = parties.tolist() if hasattr(parties, "tolist") else parties
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise ParameterError(
            f"parties must be a list with one label per row; got {_describe(parties)}.", parameter="parties"
        )
    given = list(given)
    if len(given) != X.shape[0]:
        raise ShapeError(
            f"parties has {format_count(len(given), 'label')}, but X has {format_count(X.shape[0], 'row')}. "
            "Pass one label per row, in their order.",
            parameter="parties",
        )
    missing = [i for i, label in enumerate(given) if not _is_label(label)]
    if missing:
        raise ParameterError(
            f"Labels in parties must be text or whole numbers; those of {first_few(missing[:5], len(missing), 'row')} "
            f"are not ({given[missing[0]]!r}). Set a party for each of these rows, or remove the rows.",
            parameter="parties",
        )
    labels = [str(label) for label in given]
    if len(set(labels)) < len(
        set(map(str, {(type(label).__name__ in ("str", "str_"), str(label)) for label in given}))
    ):
        raise ParameterError(
            "Labels in parties mix text and numbers that read the same. Convert all of them to text.",
            parameter="parties",
        )
    return labels


Transform = Callable[[Any], np.ndarray]


def weights_by_party(transform: Transform, X: Any, names: Any, here: Sequence[str]) -> list[Any]:
    """Return W_p of every party from `transform`; None for parties that are not `here`."""
    everyone = dict(zip(_labels(X, names), X, strict=True))
    ordered = _in_one_order(here, [everyone[name] for name in here])
    found = {name: transform(rows) for name, rows in ordered.items()}
    return [found.get(name) for name in everyone]


def weights_by_row(transform: Transform, X: Any, parties: Any, here: Sequence[str]) -> Any:
    """Return W in the order of the rows of one labeled matrix; NaN for parties that are not `here`."""
    is_here = np.isin(np.array(_row_labels(X, parties)), here)
    if is_here.all():
        return transform(X)
    rows = X.tocsr() if hasattr(X, "tocsr") else X
    found = np.asarray(transform(getattr(rows, "iloc", rows)[np.flatnonzero(is_here)]))
    weights = np.full((len(is_here), found.shape[1]), np.nan, found.dtype)
    weights[is_here] = found
    return weights


def own_components(
    H: np.ndarray, own: Mapping[str, Array], names: Sequence[str]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return each party's H_p, scaled to the norms of its partners in H, and the permutation to the order of H.

    Parties without an H_p, or with a diverged one, get H.
    """
    components = {name: H.copy() for name in names}
    alignments = {name: np.eye(len(H)) for name in names}
    sizes = np.linalg.norm(H, axis=1, keepdims=True)
    for name in own.keys() & components.keys():
        found = np.asarray(kernels.of(own[name]).to_numpy(own[name]))
        with np.errstate(over="ignore"):
            has_diverged = not np.isfinite(np.square(found, dtype=np.float64).sum())
        if has_diverged:
            continue
        plan = Assignment(unit=True).plan(H, found)
        exact = found.astype(np.float64)
        theirs = np.linalg.norm(exact, axis=1, keepdims=True)
        scaled = exact / np.where(theirs > 0, theirs, 1.0) * plan.transposed().apply(sizes)
        components[name] = scaled.astype(H.dtype)
        alignments[name] = plan.matrix
    return components, alignments


def common_type(matrices: Sequence[Any]) -> np.dtype[Any]:
    """Return the smallest number type that represents all of them."""
    return max((float_type(X.dtype) for X in matrices), key=lambda kind: kind.itemsize)


def _labels(matrices: Any, names: Any) -> list[str]:
    if hasattr(matrices, "shape") or isinstance(matrices, str) or not isinstance(matrices, Sequence):
        raise ShapeError(
            "X must be a list with one matrix per party, [X_1, X_2, …], a mapping of names to matrices, or one matrix "
            f"with parties=labels; got {_describe(matrices)}. For the rows of one party, use NMF."
        )
    if len(matrices) == 0:
        raise ParameterError("X is an empty list. Pass at least one matrix.")
    if isinstance(names, str | Set) or not (names is None or isinstance(names, Iterable)):
        raise ParameterError(
            f"names must be a list with one name per party, in their order; got {names!r}.", parameter="names"
        )
    labels = list(names) if names is not None else party_names(len(matrices))
    if len(labels) != len(matrices):
        raise ParameterError(
            f"names has {format_count(len(labels), 'name')} for "
            f"{format_count(len(matrices), 'party', 'parties')}. Pass one per party, in their order, or none.",
            parameter="names",
        )
    wrong = [i for i, label in enumerate(labels) if not isinstance(label, str) or not label.strip()]
    if wrong:
        at = first_few(wrong[:5], len(wrong), "position")
        raise ParameterError(
            f"names must be non-empty text, but is not at {at} ({labels[wrong[0]]!r}). Pass a name for each party.",
            parameter="names",
        )
    twice = repeated(labels)
    if twice:
        raise ParameterError(
            f"Names of parties must be unique; repeated: {', '.join(twice[:5])}. "
            "Rename them, or put all rows of a party into one matrix.",
            parameter="names",
        )
    return [str(label) for label in labels]


def _describe(X: Any) -> str:
    shape = getattr(X, "shape", None)
    return type(X).__name__ if shape is None else f"{type(X).__name__} of shape {tuple(shape)}"


def _place(X: Any) -> str:
    return f"torch on {X.device}" if is_tensor(X) else "NumPy"


def _in_other_places(parties: Mapping[str, Any]) -> dict[str, str]:
    """Parties on another device than most, with the reason; empty without a majority."""
    places = {label: _place(X) for label, X in parties.items()}
    votes = Counter(places.values()).most_common(2)
    if len(votes) < 2 or votes[0][1] == votes[1][1]:
        return {}
    usual = votes[0][0]
    return {
        label: f"Party {label!r} has data for {place}, but most have data for {usual}. Convert all data to one kind."
        for label, place in places.items()
        if place != usual
    }


def _require_one_kind(labels: Sequence[str], matrices: Sequence[Any]) -> None:
    """Require that all parties use torch on one device, or none does."""
    places = [_place(X) for X in matrices]
    if len(set(places)) > 1:
        other = next(i for i, place in enumerate(places) if place != places[0])
        raise CompositionError(
            f"Parties must use one library and device, but party {labels[0]!r} uses {places[0]} and party "
            f"{labels[other]!r} {places[other]}. Convert all data to one kind, with X.cpu().numpy() or "
            "torch.from_numpy(X).to(device)."
        )


def _in_one_order(labels: Sequence[str], matrices: Sequence[Any]) -> dict[str, Any]:
    """Reorder columns of data frames to those of the first; other data are unchanged."""
    parties = dict(zip(labels, matrices, strict=True))
    held = {label: found for label, X in parties.items() if (found := column_labels(X)) is not None}
    for label in held:
        with _naming_party(label):
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
def _naming_party(label: str) -> Iterator[None]:
    """Add the name of the party to errors."""
    try:
        yield
    except PartsongError as error:
        raise with_message(error, f"In party {label!r}: {error}") from error


PROGRAM = (
    "rank", "solver", "aggregation", "traits", "turn", "upload_spec", "exchanges",
    "start_party", "start_server", "local", "finish", "components", "metrics",
)  # fmt: skip
"""Attributes that a Program must have."""


def require_method(method: Any, options: Mapping[str, Any]) -> None:
    """Validate a federated method and its options; an option that would be ignored is an error, too."""
    known = methods.names()
    if isinstance(method, str):
        if method in methods.TABLE and method not in known:
            raise ParameterError(
                f"method={method!r} is for {' and '.join(methods.TABLE[method].tasks)}, not for parties. Use one of "
                f"{', '.join(known)}.",
                parameter="method",
            )
        one_of("method", method, known)
        methods.method(method).parse(options)
        return
    if isinstance(method, type) or not all(hasattr(method, name) for name in PROGRAM):
        raise ParameterError(
            f"method must be one of {', '.join(known)}, or a Program; got {method!r}.", parameter="method"
        )
    if options:
        raise ParameterError(
            f"{' and '.join(options)} cannot be combined with a Program. Set them in the Program, and remove them "
            "here.",
            parameter=next(iter(options)),
        )


def usable_options(method: str, stored: Any) -> dict[str, Any] | None:
    """Return options of a method from a file, without unnamed objects, of which the file has only the repr."""
    if not isinstance(stored, Mapping):
        return None
    parameters = methods.method(method).parameters_with(stored)
    return {
        name: value
        for name, value in stored.items()
        if not (name in parameters and parameters[name].names and str(value).endswith(")"))
    } or None


def method_options_of(given: Any, **named: Any) -> dict[str, Any]:
    """Merge named options that are not None with method_options; duplicates are an error."""
    if given is not None and not isinstance(given, Mapping):
        raise ParameterError(
            f"method_options must be a mapping of names to values; got {given!r}.", parameter="method_options"
        )
    named = {name: value for name, value in named.items() if value is not None}
    if twice := sorted(named.keys() & (given or {}).keys()):
        raise ParameterError(f"{' and '.join(twice)} is also in method_options. Pass it once.", parameter=twice[0])
    return {**named, **(given or {})}


def require_privacy(
    privacy: Any, secure_aggregation: Any, method: Any, *, options: Mapping[str, Any], time_budget: Any
) -> None:
    """Validate that the method supports the requested privacy and secure aggregation."""
    if not isinstance(secure_aggregation, bool | SecureSum):
        raise ParameterError(
            f"secure_aggregation must be True, False or a SecureSum; got {secure_aggregation!r}.",
            parameter="secure_aggregation",
        )
    if secure_aggregation and isinstance(method, str) and methods.method(method).traits.asynchronous:
        raise ParameterError(
            f'method={method!r} is asynchronous and cannot use secure aggregation. Use method="syn-sd".',
            parameter="secure_aggregation",
        )
    if privacy is None:
        return
    if not isinstance(privacy, PartyPrivacy | RowPrivacy):
        raise ParameterError(
            f"privacy must be None, PartyPrivacy(…) or RowPrivacy(…); got {privacy!r}.", parameter="privacy"
        )
    if time_budget is not None:
        stop_of(0.0, time_budget).without_metrics()
    if not isinstance(method, str):
        raise ParameterError(
            "privacy needs a method given by name. For a Program, use partsong.methods.private.party_private, or "
            "method=partsong.methods.private.row_private(…).",
            parameter="privacy",
        )
    _require_private_method(privacy, method, secure_aggregation, options)


def _require_private_method(privacy: Privacy, method: str, secure_aggregation: Any, options: Mapping[str, Any]) -> None:
    if method == "moment":
        privacy.require_moment()
    if isinstance(privacy, RowPrivacy):
        if "row" not in methods.method(method).privacy:
            raise ParameterError(
                f"RowPrivacy needs method={' or '.join(map(repr, private_methods('row')))}, which send sums over rows; "
                f"the method is {method!r}. Use one of these, or PartyPrivacy.",
                parameter="method",
            )
        if unsupported := [name for name in options if name != "init_mode"]:
            raise ParameterError(
                f"{' and '.join(unsupported)} of {method} cannot be combined with RowPrivacy. Remove it.",
                parameter=unsupported[0],
            )
        if not isinstance(secure_aggregation, bool):
            raise ParameterError(
                "With privacy, the masks are chosen to fit the noisy sums. Pass secure_aggregation=True.",
                parameter="secure_aggregation",
            )
    elif "party" not in methods.method(method).privacy:
        raise ParameterError(
            "PartyPrivacy needs a method in which each party sends H_p: "
            f"{', '.join(private_methods('party'))}; the method is {method!r}. Use one of these, or RowPrivacy with "
            "method='exact'.",
            parameter="method",
        )
    elif not isinstance(secure_aggregation, bool) and secure_aggregation.bound_of("H") < upload_bound(privacy):
        raise ParameterError(
            f"With this noise H may reach {upload_bound(privacy):.4g}, and the masks refuse numbers beyond "
            f"{secure_aggregation.bound_of('H'):.4g}: whether one is refused would depend on the data. "
            "Pass secure_aggregation=True or "
            f'SecureSum(bounds={{"H": {upload_bound(privacy):.4g}}}).',
            parameter="secure_aggregation",
        )


def party_names(parties: int) -> list[str]:
    """Return default names in sorted order: party-01, party-02, …"""
    digits = max(2, len(str(parties)))
    return [f"party-{i + 1:0{digits}d}" for i in range(parties)]
