"""Compare the columns of parties: find the parties whose columns differ from the majority, and how."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from partsong.errors import FeatureError, PartyError, first_few, format_count

MOST_NAMES, FEW_PARTIES = 30, 5
"""Maximum number of columns of a party, and of parties, that a message names."""

AGREE = "Use the same columns at all parties."


class Columns(NamedTuple):
    """The columns of a party: their number, and their names if known."""

    width: int
    names: Sequence[Any] | None


def parties_with_other_columns(parties: Mapping[str, Columns]) -> dict[str, str]:
    """Return the parties whose columns differ from those of the majority, with a description; order is ignored.

    FeatureError if there is no majority, because then no party can be singled out.
    """
    odd = _minority({name: held.width for name, held in parties.items()})
    rest = {name: held for name, held in parties.items() if name not in odd}
    named = {name: frozenset(held.names) for name, held in rest.items() if held.names is not None}
    odd += _minority(named)
    usual = next((name for name in named if name not in odd), next(iter(rest), ""))
    whom = _like(usual, len(parties) - len(odd), len(parties))
    return {name: f"{describe_difference(name, parties[name], whom, parties[usual])} {AGREE}" for name in odd}


def require_same_columns(parties: Mapping[str, Columns]) -> None:
    """Refuse parties with different named columns, and list missing and extra ones; order is ignored.

    The reference is a party with the columns of the majority, or the first party if there is no majority.
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
            f"Parties have different columns, and as many agree with {sides[0]!r} as with {sides[1]!r}, so there is no "
            "majority. Use the same columns at all parties, or pass the data of one group only."
        )
    return [name for name, value in held.items() if value != votes[0][0]] if votes else []


def describe_difference(name: str, held: Columns, whom: str, expected: Columns) -> str:
    """Describe how the columns of a party differ from the expected ones; order is ignored."""
    missing, extra = _gap(held, expected)
    said = [f"lacks {first_few(missing[:MOST_NAMES], len(missing), 'column')}"] if missing else []
    said += [f"has {first_few(extra[:MOST_NAMES], len(extra), 'other column')}"] if extra else []
    said = said or [f"has {format_count(held.width, 'column')}, not {expected.width}"]
    return f"Party {name!r} {' and '.join(said)}, compared with {whom}."


def _gap(held: Columns, expected: Columns) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Missing and extra names of a party; empty if one of the two has no names."""
    if held.names is None or expected.names is None:
        return (), ()
    here, there = set(held.names), set(expected.names)
    missing = tuple(str(column) for column in expected.names if column not in here)
    return missing, tuple(str(column) for column in held.names if column not in there)


def require_any_party(kept: Sequence[str] | Mapping[str, Any], faults: Mapping[str, str]) -> None:
    """Refuse a federation in which every party is left out."""
    if not kept:
        name, reason = next(iter(faults.items()))
        raise PartyError(
            f"No party is left: the data of all {len(faults)} parties are faulty. The first, {name!r}: {reason}"
        )
