"""Checks of uploads and sums: shapes and types as the program specifies, finite numbers, and fixed cohorts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from numbers import Real
from typing import Any

import numpy as np

from partsong.core.interfaces import (
    Array,
    ArraySpec,
    Checkpoint,
    Dim,
    Message,
    Point,
    Program,
    Reduction,
    Schedule,
    type_name,
)
from partsong.errors import (
    CompositionError,
    DivergenceError,
    ParameterError,
    PartsongError,
    PartyError,
    UploadError,
    first_few,
)

SHOWN = 3
"""Positions that an error shows."""

SUM_HEADROOM = 2**20
"""This many numbers of the largest allowed size can be added without overflow."""

MAX_WEIGHT = math.sqrt(np.finfo(np.float64).max)
"""The largest weight that can be multiplied by a factor without overflow."""

ANY = ArraySpec((), kind="")
"""Used if the program specifies nothing: any finite numbers."""

UploadSpec = Mapping[str, ArraySpec]
Expected = tuple[UploadSpec, ...]
"""One specification per kind of upload; empty if the program specifies none."""


def check_compatibility(program: Program, reduction: Reduction, expected: Expected) -> None:
    """Refuse a reduction that cannot form the program's sums, or cannot hide what they would disclose."""
    reduction.check(program.aggregation)
    traits = program.traits
    if traits.requires == "plain" and reduction.hides_uploads:
        raise CompositionError(f"{type(reduction).__name__} hides what single parties send, but {traits.reason}")
    if traits.requires == "secure" and not reduction.hides_uploads:
        raise CompositionError(f"{type(reduction).__name__} shows what single parties send, but {traits.reason}")
    _check_sum_sizes(program, reduction)
    for name, form in (pair for kind in expected for pair in kind.items()):
        if form.single_party_reason and reduction.hides_uploads:
            raise CompositionError(
                f"{type(reduction).__name__} hides what single parties send, but entries of the sum of {name!r} can be "
                f"those of one party alone: {form.single_party_reason}"
            )


def _check_sum_sizes(program: Program, reduction: Reduction) -> None:
    """Refuse a reduction with too few parties in a sum, or with bounds that the program's numbers exceed."""
    fewest, needed = getattr(reduction, "fewest", 1), program.traits.min_in_sum
    if fewest < needed:
        raise CompositionError(
            f"{type(reduction).__name__} forms sums over as few as {fewest} parties, but {type(program).__name__} "
            f"needs {needed} in each: fewer do not add enough noise together. Use fewest={needed} or more (only honest "
            "parties count), or fewer shares of the noise."
        )
    bound_of: Any = getattr(reduction, "bound_of", None)
    needs: Mapping[str, float] = program.traits.sum_bounds if bound_of is not None else {}
    short = {name: bound for name, bound in needs.items() if bound_of(name) < bound}
    if short:
        limits = ", ".join(f"{name!r} may reach ±{bound:g}, not ±{bound_of(name):g}" for name, bound in short.items())
        raise CompositionError(
            f"{type(reduction).__name__} refuses numbers beyond its bounds, but by {type(program).__name__} {limits}. "
            f"A refusal would depend on private data. Use bounds={short}."
        )


def check_upload(party: str, upload: Message, expected: Expected) -> None:
    """Refuse an upload with other shapes or types, or with numbers that are not finite or too large.

    Too large means above the square root of the type's largest number in a factor, and above 2⁻²⁰ of the largest number
    elsewhere; later operations would overflow. An upload that passes is not copied.
    """
    if not isinstance(upload, Message):
        raise UploadError(
            f"Party {party!r} sent an invalid upload: {type(upload).__name__}, not a Message. It has not entered a "
            "sum. Return a new state and a Message of named arrays from `local`."
        )
    kinds = expected or (None,)
    kind = next((one for one in kinds if one is not None and one.keys() == upload.arrays.keys()), kinds[0])
    if not _matches(upload, kind):
        misfits, runaways = list(_form_errors(upload, kind)), list(_value_errors(upload, kind))
        error = UploadError if misfits else DivergenceError
        raise error(
            f"Party {party!r} sent an invalid upload: {'; '.join([*misfits, *runaways])}. It has not entered a sum. "
            "Check its data and settings."
        )


def check_sum(aggregate: Message, names: tuple[str, ...], index: int) -> None:
    """Refuse a sum that is not finite: uploads were hidden, or too large together."""
    ruined = [repr(name) for name, array in aggregate.arrays.items() if not _is_finite(array)]
    if ruined:
        raise DivergenceError(
            f"The sum of round {index} over {len(names)} parties is NaN or infinite in {', '.join(ruined)}, although "
            "every upload was finite when it left its party. Resume from the last checkpoint, with data on a smaller "
            "scale or with fewer parties."
        )


def _matches(upload: Message, expected: UploadSpec | None) -> bool:
    if not _is_weight(upload.weight):
        return False
    if expected is None:
        return all(_is_finite(array) for array in upload.arrays.values())
    return upload.arrays.keys() == expected.keys() and all(
        _fits(array, expected[name]) and _is_finite(array, expected[name]) for name, array in upload.arrays.items()
    )


def _is_weight(weight: object) -> bool:
    return isinstance(weight, Real) and 0 <= float(weight) <= MAX_WEIGHT


def _fits(array: Array, form: ArraySpec) -> bool:
    return _kind(array) == form.kind and tuple(array.shape) == form.shape


def _is_finite(array: Array, form: ArraySpec = ANY) -> bool:
    """Whether all entries are numbers, not too large and, if required, not negative, from their minimum and maximum."""
    kind = _kind(array)
    if not kind or 0 in array.shape:
        return bool(kind)
    sizes, largest = abs(array) if kind == "complex" else array, _largest_allowed(array.dtype, form.is_factor)
    if not array.shape:
        return (0 if form.non_negative else -largest) <= float(sizes) <= largest
    least = float(sizes.min())
    return least >= (0 if form.non_negative else -largest) and float(sizes.max()) <= largest


@cache
def _largest_allowed(dtype: Any, is_factor: bool) -> float:
    """Return the largest number that may be sent."""
    if _family(dtype) not in ("float", "complex"):
        return math.inf
    name = type_name(dtype)
    largest = float(np.finfo("float32" if name == "bfloat16" else name).max)
    return math.sqrt(largest) if is_factor else largest / SUM_HEADROOM


def _form_errors(upload: Message, expected: UploadSpec | None) -> Iterator[str]:
    """Yield all errors of names, types, shapes, signs and the weight of an upload."""
    if not _is_weight(upload.weight):
        yield f"its weight is {upload.weight!r}, not a number from zero to {MAX_WEIGHT:.1g}"
    stated: Mapping[str, ArraySpec] = dict.fromkeys(upload.arrays, ANY) if expected is None else expected
    yield from (f"{name!r} is missing" for name in stated if name not in upload.arrays)
    for name, array in upload.arrays.items():
        form = stated.get(name)
        if form is None:
            yield f"{name!r} is unexpected"
        elif not _kind(array) or form.kind not in ("", _kind(array)):
            yield f"{name!r} holds {_describe_dtype(array)}, not {form.kind or 'numbers'}"
        elif form is not ANY and tuple(array.shape) != form.shape:
            yield f"{name!r} is {_size(array.shape)}, not {_size(form.shape)}"
        elif form.non_negative:
            yield from _describe_entries(name, "is negative", (array < 0) & (array > -math.inf))


def _value_errors(upload: Message, expected: UploadSpec | None) -> Iterator[str]:
    for name, array in upload.arrays.items():
        if _kind(array):
            yield from _describe_entries(name, "is NaN or infinite", ~(abs(array) < math.inf))
            largest = _largest_allowed(array.dtype, (expected or {}).get(name, ANY).is_factor)
            too_large = f"is above {largest:.1e}, so that squares or sums overflow {type_name(array.dtype)},"
            yield from _describe_entries(name, too_large, (abs(array) > largest) & (abs(array) < math.inf))


def _describe_entries(name: str, fault: str, is_so: Array) -> list[str]:
    """Describe the first few entries with a fault, and their number."""
    positions = np.argwhere(np.asarray(is_so.cpu() if hasattr(is_so, "cpu") else is_so))
    if not len(positions):
        return []
    shown = ["(" + ", ".join(map(str, place)) + ")" for place in positions[:SHOWN].tolist()]
    return [f"{name!r} {fault} at {first_few(shown, len(positions), 'position')}"]


def _kind(array: Array) -> str:
    """Return the family of an array's numbers; empty if it holds none."""
    return _family(array.dtype) if hasattr(array, "dtype") else ""


@cache
def _family(dtype: Any) -> str:
    name = type_name(dtype)
    return next((kind for kind in ("float", "complex", "uint", "int", "bool") if kind in name), "")


def _describe_dtype(array: Array) -> str:
    return type_name(array.dtype) if hasattr(array, "dtype") else type(array).__name__


def _size(shape: tuple[Dim, ...]) -> str:
    return " × ".join(map(str, shape)) if len(shape) > 1 else f"of length {shape[0]}" if shape else "a single number"


Cohort = frozenset[str]
"""The parties whose uploads are in the sums of one round; if uploads are hidden, the same in all of its exchanges."""

WHY = (
    "No party iterates between the exchanges of a round, so the difference of two of its sums would be the upload of a "
    "party that is in only one of them."
)
NOT_IN_COHORT = "It was not in the first sum of this round, and is asked again in the next round."
FIXED_RECOVERY = (
    "Resume from the last checkpoint at the beginning of a round, with the same parties. A round that was summed with "
    "a party must not be repeated without it, which would reveal the same difference. A party can miss whole rounds."
)


def fixed_cohort(
    program: Program,
    reduction: Reduction,
    schedule: Schedule,
    names: Collection[str],
    point: Point | Checkpoint,
    before: Cohort | None,
) -> Cohort | None:
    """Return exactly the parties that must be in the next sum; None if any may be.

    `before` are the parties in the last sum of this run (None: there was none). A schedule by which parties differ
    between the exchanges of a round is refused before the first of them, so nothing of that round is sent.
    """
    turn = program.turn(point.model)
    number, total = turn.step, turn.steps
    if not reduction.hides_uploads or total == 1:
        return None
    if number == 0:
        _check_ahead(schedule, names, range(point.index, min(point.index + total, schedule.rounds)))
        return None
    if before is None:
        raise ParameterError(
            f"This checkpoint lies within a round: exchange {point.index} is number {number + 1} of {total}, and it is "
            f"unknown whose uploads are in the previous sum, which {type(reduction).__name__} must not change. {WHY} "
            f"Resume from a checkpoint at the beginning of a round, such as that of index {point.index - number}, with "
            "the same parties."
        )
    return before


def require_cohort(
    fixed: Cohort | None, present: Collection[str], index: int, faults: Mapping[str, PartsongError] | None = None
) -> None:
    """Refuse a sum over other parties than the previous sum of the same round."""
    if fixed is None or fixed == set(present):
        return
    missing, new = sorted(fixed - set(present)), sorted(set(present) - fixed)
    problems = [f"{_format_names(missing)} would be missing from it"] if missing else []
    problems += [f"{_format_names(new)} would join"] if new else []
    first = next((error for name, error in (faults or {}).items() if name in fixed), None)
    raise PartyError(
        f"Exchange {index} continues a round under a reduction that hides uploads, but {' and '.join(problems)}. {WHY} "
        f"Nothing of this exchange was summed. {FIXED_RECOVERY}{'' if first is None else f' What happened: {first}'}"
    ) from first


def _check_ahead(schedule: Schedule, names: Collection[str], exchanges: range) -> None:
    """Refuse a schedule by which the parties of these exchanges differ; a dropout in one is missing in it."""
    present = [set(schedule.participants(tuple(names), i)) - set(schedule.dropouts.get(i, {})) for i in exchanges]
    odd = sorted({name for some in present for name in some.symmetric_difference(present[0])})
    if odd:
        raise ParameterError(
            f"Exchanges {exchanges.start} to {exchanges.stop - 1} are one round under a reduction that hides uploads, "
            f"but by the schedule {_format_names(odd)} would take part in only some of them. {WHY} Exclude such a "
            "party from the whole round, or keep it in all of it."
        )


def _format_names(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + ("…" if len(names) > 5 else "")
