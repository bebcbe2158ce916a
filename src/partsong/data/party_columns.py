"""Whether parties hold the same columns, and how those of one differ from those of most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from partsong.errors import FeatureError, PartyError, first_few

MOST_NAMES, FEW_PARTIES = 30, 5
"""How many columns of a party, and how many parties, a message names."""

AGREE = "Agree on one list of columns."


class Columns(NamedTuple):
    """The columns of a party: how many they are, and their names where they have some."""

    width: int
    names: Sequence[Any] | None


def parties_with_other_columns(parties: Mapping[str, Columns]) -> dict[str, str]:
    """Who does not hold the columns that most parties hold, and how they differ; the order of columns is no matter.

    Refused where no columns are those of the most: nobody can tell then who is to be left out.
    """
    odd = _minority({name: held.width for name, held in parties.items()})
    rest = {name: held for name, held in parties.items() if name not in odd}
    named = {name: frozenset(held.names) for name, held in rest.items() if held.names is not None}
    odd += _minority(named)
    usual = next((name for name in named if name not in odd), next(iter(rest), ""))
    whom = _like(usual, len(parties) - len(odd), len(parties))
    return {name: f"{describe_difference(name, parties[name], whom, parties[usual])} {AGREE}" for name in odd}


def require_same_columns(parties: Mapping[str, Columns]) -> None:
    """Refuse parties whose named columns are not the same, in whatever order, and say who lacks, or has besides, what.

    Compared with a party whose columns most parties hold; with the first, where there are no such columns.
    """
    held = {name: frozenset(one.names) for name, one in parties.items() if one.names is not None}
    votes = Counter(held.values()).most_common(2)
    if len(votes) < 2:
        return
    is_tie = votes[0][1] == votes[1][1]
    usual = next(name for name, names in held.items() if is_tie or names == votes[0][0])
    odd = [name for name, names in held.items() if names != held[usual]]
    whom = _like(usual, len(held) - len(odd), len(held))
    said = [describe_difference(name, parties[name], whom, parties[usual]) for name in odd[:FEW_PARTIES]]
    said += [f"{len(odd) - FEW_PARTIES} more parties differ as well."] if len(odd) > FEW_PARTIES else []
    gaps = {name: _gap(parties[name], parties[usual]) for name in odd}
    raise FeatureError(
        " ".join([*said, AGREE]),
        missing={name: missing for name, (missing, _) in gaps.items() if missing},
        unexpected={name: extra for name, (_, extra) in gaps.items() if extra},
    )


def _like(usual: str, alike: int, parties: int) -> str:
    return f"{usual!r} and most others" if alike > 1 and 2 * alike > parties else f"{usual!r}"


def _minority(held: Mapping[str, Hashable]) -> list[str]:
    votes = Counter(held.values()).most_common(2)
    if len(votes) == 2 and votes[0][1] == votes[1][1]:
        sides = [next(name for name, value in held.items() if value == vote) for vote, _ in votes]
        raise FeatureError(
            f"Parties do not hold the same columns, and there are as many like {sides[0]!r} as like {sides[1]!r}: it "
            "cannot be told whom to leave out. Agree on one list of columns, or give the data of one side only."
        )
    return [name for name, value in held.items() if value != votes[0][0]] if votes else []


def describe_difference(name: str, held: Columns, whom: str, expected: Columns) -> str:
    """How the columns of a party differ from those of others; the order of columns is no matter."""
    missing, extra = _gap(held, expected)
    said = [f"lacks {first_few(missing[:MOST_NAMES], len(missing), 'column')}"] if missing else []
    said += [f"has {first_few(extra[:MOST_NAMES], len(extra), 'other column')}"] if extra else []
    said = said or [f"has {held.width} columns, not {expected.width}"]
    return f"Party {name!r} {' and '.join(said)}, compared with {whom}."


def _gap(held: Columns, expected: Columns) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names that a party lacks, and those that it has besides; none where one of the two has no names."""
    if held.names is None or expected.names is None:
        return (), ()
    here, there = set(held.names), set(expected.names)
    missing = tuple(str(column) for column in expected.names if column not in here)
    return missing, tuple(str(column) for column in held.names if column not in there)


def require_any_party(kept: Sequence[str] | Mapping[str, Any], faults: Mapping[str, str]) -> None:
    """Refuse a federation in which everybody is left out."""
    if not kept:
        name, reason = next(iter(faults.items()))
        raise PartyError(
            f"Nobody is left: the data of all {len(faults)} parties are faulty. The first, {name!r}: {reason}"
        )
