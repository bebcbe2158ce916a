"""What callers of federated estimators give, checked: data by party, methods, privacy, masks."""

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
    leave_out: bool = False,
) -> tuple[list[Shard], dict[str, Any], dict[str, str]]:
    """Parties in any of the forms in which they may be given: shards, columns, and who is left out and why."""
    matrices, labels = named_parties(X, names) if parties is None else split_by_label(X, parties, names)
    away: dict[str, str] = {}
    if leave_out:
        matrices, labels, away = drop_invalid_parties(matrices, labels, dtype, has_gaps=has_gaps)
    return *shards_of(matrices, labels, seed, dtype, has_gaps=has_gaps), away


def shards_of(
    matrices: Any, names: Any, seed: int, dtype: np.dtype[Any] | None, *, has_gaps: bool = False
) -> tuple[list[Shard], dict[str, Any]]:
    """The parties of a simulation, checked, and the columns of the first that names them.

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
    columns = columns_of(next((X for X in parties.values() if column_names(X)), matrices[0]))
    if has_gaps:
        _warn_of_unknown_columns(list(rows.values()))
    return shards, columns


def drop_invalid_parties(
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
            "No cell of this party is known: all are NaN or not stored. Give it at least one number, or leave the "
            'party out: on_party_error="skip", or --on-party-error skip.'
        )
    require_factorizable(rows, names, dtype, party=label)


def _warn_of_unknown_columns(known: Sequence[Any]) -> None:
    """Warn of columns that no party knows: between parties they stay as random as they began."""
    counts = np.bincount(np.concatenate([cells.indices for cells in known]), minlength=known[0].shape[1])
    unknown = np.flatnonzero(counts == 0)
    if unknown.size:
        of = "it" if unknown.size == 1 else "them"
        warn_of_unknown(unknown, f"what the model says of {of} means nothing", stacklevel=7)


def named_parties(X: Any, names: Any) -> tuple[Any, Any]:
    """Matrices and names from a mapping of the one to the other; a generator of matrices as a list."""
    if not isinstance(X, Mapping):
        return (list(X) if isinstance(X, Iterator) else X), names
    if names is not None:
        raise ParameterError(
            "Give names or a mapping, not both: the keys of the mapping are the names of the parties.",
            parameter="names",
        )
    wrong = [key for key in X if not _is_label(key)]
    if wrong:
        raise ParameterError(f"Names of parties must be text or whole numbers; a key of this mapping is {wrong[0]!r}.")
    return list(X.values()), [str(key) for key in X]


def _is_label(label: Any) -> bool:
    return bool(label.strip()) if isinstance(label, str) else isinstance(label, int | np.integer | np.bool_)


def split_by_label(X: Any, parties: Any, names: Any) -> tuple[list[Any], list[str]]:
    """The rows of one matrix shared out by their labels, with the labels as names, in order."""
    if names is not None:
        raise ParameterError(
            "Give names or parties, not both: the labels of the rows are the names of the parties.", parameter="parties"
        )
    if len(getattr(X, "shape", ())) != 2:
        raise ShapeError(
            f"parties=labels goes with one matrix and has a label for each of its rows; this is {_told(X)}. A list "
            "with one matrix per party, [X_1, X_2, …], needs no labels: leave parties out.",
            parameter="parties",
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
        raise ShapeError(
            "parties has another index than X. Bring them to one order: parties.reindex(X.index).", parameter="parties"
        )
    given = parties.tolist() if hasattr(parties, "tolist") else parties
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise ParameterError(
            f"parties must be a list with a label for each row; got {_told(parties)}.", parameter="parties"
        )
    given = list(given)
    if len(given) != X.shape[0]:
        raise ShapeError(
            f"{len(given)} labels of parties were given for {X.shape[0]} rows. Give one for each row, in their order.",
            parameter="parties",
        )
    missing = [i for i, label in enumerate(given) if not _is_label(label)]
    if missing:
        raise ParameterError(
            f"Labels of parties must be text or whole numbers; those of {first_few(missing[:5], len(missing), 'row')} "
            f"are not ({given[missing[0]]!r}). Name the party of each of these rows, or leave the rows out.",
            parameter="parties",
        )
    labels = [str(label) for label in given]
    if len(set(labels)) < len(
        set(map(str, {(type(label).__name__ in ("str", "str_"), str(label)) for label in given}))
    ):
        raise ParameterError(
            "Labels of parties mix text and numbers that read the same. Make all of them text.", parameter="parties"
        )
    return labels


Transform = Callable[[Any], np.ndarray]


def weights_by_party(transform: Transform, X: Any, names: Any, here: Sequence[str]) -> list[Any]:
    """Every party's W_p as `transform` gives it; None for those that are not `here`."""
    everyone = dict(zip(_labels(X, names), X, strict=True))
    ordered = _in_one_order(here, [everyone[name] for name in here])
    found = {name: transform(rows) for name, rows in ordered.items()}
    return [found.get(name) for name in everyone]


def weights_by_row(transform: Transform, X: Any, parties: Any, here: Sequence[str]) -> Any:
    """W in the order of the rows of one matrix with a label for each; NaN for parties that are not `here`."""
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
    """Each party's H_p with the norms of its partners in H, and the permutation that puts it in the order of H.

    Parties that have none, or one that has diverged, are given H.
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
        raise ParameterError(
            f"names must be a list with a name for each party, in their order; got {names!r}.", parameter="names"
        )
    labels = list(names) if names is not None else party_names(len(matrices))
    if len(labels) != len(matrices):
        raise ParameterError(
            f"{len(labels)} names were given for {len(matrices)} parties. Give one for each, in their order, or none.",
            parameter="names",
        )
    wrong = [i for i, label in enumerate(labels) if not isinstance(label, str) or not label.strip()]
    if wrong:
        at = first_few(wrong[:5], len(wrong), "position")
        raise ParameterError(
            f"Names of parties must be text, and are not at {at} ({labels[wrong[0]]!r}). Give each a name.",
            parameter="names",
        )
    twice = repeated(labels)
    if twice:
        raise ParameterError(
            f"Party names must differ; used more than once: {', '.join(twice[:5])}. "
            "Rename them, or put the rows of a party into one matrix.",
            parameter="names",
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
        raise with_message(error, f"In party {label!r}: {error}") from error


PROGRAM = (
    "rank", "solver", "aggregation", "traits", "turn", "upload_spec", "exchanges",
    "start_party", "start_server", "local", "finish", "components", "metrics",
)  # fmt: skip
"""What a Program has."""


def require_method(method: Any, options: Mapping[str, Any]) -> None:
    """A federated method and its options, refused by their names; one that would be ignored is a mistake as well."""
    known = methods.names()
    if isinstance(method, str):
        if method in methods.TABLE and method not in known:
            raise ParameterError(
                f"method={method!r} is for {' and '.join(methods.TABLE[method].tasks)}; between parties there are "
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
            f"{' and '.join(options)} are part of a Program: set them there, or leave them out.",
            parameter=next(iter(options)),
        )


def usable_options(method: str, told: Any) -> dict[str, Any] | None:
    """Options of a method from a file, without those that were values of no name: the file has their text alone."""
    if not isinstance(told, Mapping):
        return None
    parameters = methods.method(method).parameters_with(told)
    return {
        name: value
        for name, value in told.items()
        if not (name in parameters and parameters[name].names and str(value).endswith(")"))
    } or None


def method_options_of(given: Any, **named: Any) -> dict[str, Any]:
    """Options of a method: those with a name of their own that are not None, and all others; each once."""
    if given is not None and not isinstance(given, Mapping):
        raise ParameterError(
            f"method_options must be a mapping of names to values; got {given!r}.", parameter="method_options"
        )
    named = {name: value for name, value in named.items() if value is not None}
    if twice := sorted(named.keys() & (given or {}).keys()):
        raise ParameterError(
            f"{' and '.join(twice)}: give it once, and not in method_options as well.", parameter=twice[0]
        )
    return {**named, **(given or {})}


def require_privacy(
    privacy: Any, secure_aggregation: Any, method: Any, *, options: Mapping[str, Any], time_budget: Any
) -> None:
    """Refuse a promise that the method cannot keep, and masks over what is no sum."""
    if not isinstance(secure_aggregation, bool | SecureSum):
        raise ParameterError(
            f"secure_aggregation must be True, False or a SecureSum; got {secure_aggregation!r}.",
            parameter="secure_aggregation",
        )
    if secure_aggregation and isinstance(method, str) and methods.method(method).traits.asynchronous:
        raise ParameterError(
            f'"{method}" hears one party at a time, and masks need several. Take "syn-sd".',
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
            "privacy is for methods by name. To a Program noise is added by partsong.methods.private.party_private, or "
            "take partsong.methods.private.row_private as the method.",
            parameter="privacy",
        )
    _require_private_method(privacy, method, secure_aggregation, options)


def _require_private_method(privacy: Privacy, method: str, secure_aggregation: Any, options: Mapping[str, Any]) -> None:
    if isinstance(privacy, RowPrivacy):
        if "row" not in methods.method(method).privacy:
            raise ParameterError(
                f"Privacy of rows is for method={' or '.join(private_methods('row'))!r}, whose messages are sums over "
                f'rows; the method is "{method}". Take that, or PartyPrivacy.',
                parameter="method",
            )
        if idle := [name for name in options if name != "init_mode"]:
            raise ParameterError(
                f"{' and '.join(idle)} of {method} has no place in noisy sums over rows: leave it out.",
                parameter=idle[0],
            )
        if not isinstance(secure_aggregation, bool):
            raise ParameterError(
                "Masks over noisy sums are made for them: give secure_aggregation=True.", parameter="secure_aggregation"
            )
    elif "party" not in methods.method(method).privacy:
        raise ParameterError(
            "Privacy of parties is for methods in which each sends its own H: "
            f"{', '.join(private_methods('party'))}; the method is {method!r}. Take one of these, or RowPrivacy with "
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
    """party-01, party-02, …: names that sort in their order."""
    digits = max(2, len(str(parties)))
    return [f"party-{i + 1:0{digits}d}" for i in range(parties)]
