"""Whose uploads the sums of one round are over, where nobody may see a single one: the same in all of its exchanges.

Nobody iterates between the exchanges of a round. Two sums of it, of which one lacks a party, differ by its upload.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from partsong.core import Checkpoint, Message, Program, Reduction, Schedule
from partsong.errors import ParameterError, PartsongError, PartyError

Company = frozenset[str]

WHY = (
    "Between the exchanges of a round nobody iterates, so that the difference of two of its sums would be the upload "
    "of the party that is in one of them only."
)
KEPT_OUT = "It was not in the first sum of this round, and is asked again in the next round."
WAYS_ON_WITH_ALL = (
    "To go on: the last checkpoint at the beginning of a round, with the same parties. A round that was summed with a "
    "party must not be repeated without it, which would give the same difference; it can miss rounds as a whole."
)


def exchange_of(program: Program, model: Message) -> tuple[int, int]:
    """Which exchange of its round a model is sent for, and of how many; the only one, if the program says nothing."""
    tells: Any = getattr(program, "exchange", None)
    return (0, 1) if tells is None else tells(model)


def fixed_company(
    program: Program,
    reduction: Reduction,
    schedule: Schedule,
    names: Collection[str],
    point: Checkpoint,
    before: Company | None,
) -> Company | None:
    """Who has to be in the sum that comes next, and nobody else; None where that is free.

    `before` are those in the last sum of this run (None: there was none). A schedule by which the exchanges of a round
    differ is refused before the first of them, and so before anything of that round is sent.
    """
    number, total = exchange_of(program, point.model)
    if not reduction.hides_uploads or total == 1:
        return None
    if number == 0:
        _check_ahead(schedule, names, range(point.index, min(point.index + total, schedule.rounds)))
        return None
    if before is None:
        raise ParameterError(
            f"This checkpoint lies within a round: exchange {point.index} is number {number + 1} of {total}, and it is "
            f"not known whose uploads are in the sum before, which {type(reduction).__name__} must not change. {WHY} "
            f"Resume from a checkpoint at the beginning of a round, such as that of index {point.index - number}, with "
            "the same parties."
        )
    return before


def require_company(
    fixed: Company | None, present: Collection[str], index: int, faults: Mapping[str, PartsongError] | None = None
) -> None:
    """Refuse a sum of other parties than those of the sum before it in the same round."""
    if fixed is None or fixed == set(present):
        return
    missing, new = sorted(fixed - set(present)), sorted(set(present) - fixed)
    told = [f"{_told(missing)} would be missing from it"] if missing else []
    told += [f"{_told(new)} would join"] if new else []
    first = next((error for name, error in (faults or {}).items() if name in fixed), None)
    raise PartyError(
        f"Exchange {index} continues a round under a reduction that hides uploads, but {' and '.join(told)}. {WHY} "
        f"Nothing of this exchange was summed. {WAYS_ON_WITH_ALL}{'' if first is None else f' What happened: {first}'}"
    ) from first


def _check_ahead(schedule: Schedule, names: Collection[str], exchanges: range) -> None:
    """Refuse a schedule by which the parties of these exchanges differ; a party that is silent in one misses it."""
    present = [set(schedule.participants(tuple(names), i)) - set(schedule.silent.get(i, {})) for i in exchanges]
    odd = sorted({name for some in present for name in some.symmetric_difference(present[0])})
    if odd:
        raise ParameterError(
            f"Exchanges {exchanges.start} to {exchanges.stop - 1} are one round under a reduction that hides uploads, "
            f"but by the schedule {_told(odd)} would take part in some of them only. {WHY} Keep such a party out of "
            "the whole round, or in all of it."
        )


def _told(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + ("…" if len(names) > 5 else "")
