"""What is said of a party after an attack: measures and sentences, and none of the values that were found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from partsong.evaluate.leakage_findings import RECOVERED

FOUND = ("exactly", "nearly")
SHOWN = 5
"""So many parties are named in a sentence."""
NO_GUARANTEE = "What these attacks do not find, others may."


@dataclass(frozen=True, slots=True)
class SentArray:
    """One kind of array that left a party: how often, and how many bytes in all."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    times: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Recovery:
    """One finding without its values: `shape` is that of what was found, `rows_recovered` counts rows within 1e-3.

    `doubt` is what the attacker sees without the truth (0: all that was seen fits); `error` is relative to the truth.
    Both `error` and `rows_recovered` are None where no truth was given.
    """

    attack: str
    array: str
    shape: tuple[int, ...] | None
    what: str
    verdict: str
    doubt: float | None
    error: float | None
    rows_recovered: int | None
    who: str

    @property
    def is_found(self) -> bool:
        """Exactly or nearly."""
        return self.verdict in FOUND

    @property
    def is_about_rows(self) -> bool:
        """Rows themselves, also up to a factor; in contrast to their span, or to factors."""
        return self.array.startswith("X")

    @property
    def measured(self) -> str:
        """How well, in numbers: those that an attacker has, and those that only the truth gives."""
        said = [] if self.error is None else [f"relative error {self.error:.1e}"]
        if self.rows_recovered is not None:
            said.append(f"{self.rows_recovered} {'row' if self.rows_recovered == 1 else 'rows'} within {RECOVERED:g}")
        said += [] if self.doubt is None or not math.isfinite(self.doubt) else [f"doubt {self.doubt:.1e}"]
        said += [] if self.shape is None else [_sides(self.shape)]
        return f"{self.verdict}: {', '.join(said)}"


@dataclass(frozen=True, slots=True)
class PartyFindings:
    """What left a party, what was tried on it, and what was recovered; `is_sum`: of all parties together, from sums."""

    party: str
    attacker: str
    sent: tuple[SentArray, ...]
    messages: int
    bytes_sent: int
    tried: tuple[str, ...]
    recovered: tuple[Recovery, ...]
    notes: tuple[str, ...] = ()
    is_sum: bool = False

    @property
    def found(self) -> tuple[Recovery, ...]:
        """What was recovered exactly or nearly, rows first."""
        return tuple(
            sorted((each for each in self.recovered if each.is_found), key=lambda each: not each.is_about_rows)
        )

    @property
    def left(self) -> str:
        """What left the party, in words."""
        if self.is_sum:
            return "sums over all parties"
        arrays = ", ".join(f"{each.times} {each.name} ({_sides(each.shape)})" for each in self.sent)
        return f"{self.bytes_sent:,} bytes: {arrays}" if self.sent else "nothing"

    @property
    def verdict(self) -> str:
        """In a few words."""
        if self.found:
            best = self.found[0]
            return f"{best.array} was found {best.verdict}"
        return "nothing was found by these attacks" if self.tried else "no attack was tried"


def _sides(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "one number"


def verdict_of(found: Sequence[PartyFindings]) -> str:
    """All of it in one line."""
    parties = [each for each in found if not each.is_sum]
    best = {each.party: each.found[0] for each in parties if each.found}
    with_rows = [f"{party} {one.verdict}" for party, one in best.items() if one.is_about_rows]
    with_less = [party for party, one in best.items() if not one.is_about_rows]
    untried = [each.party for each in parties if not each.tried]
    said = [f"Rows of {_counted(with_rows, parties)} were found." if with_rows else "No rows of a party were found."]
    said += [f"Of {_counted(with_less, parties)} something short of rows was."] if with_less else []
    said += [f"On {_counted(untried, parties)} no attack was tried."] if untried else []
    is_sum_found = any(each.is_sum and each.found for each in found)
    said += ["Of all rows together something was found from sums alone."] if is_sum_found else []
    return " ".join([*said, NO_GUARANTEE])


def first_names(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _counted(names: Sequence[str], parties: Sequence[PartyFindings]) -> str:
    return f"{len(names)} of {len(parties)} {'party' if len(parties) == 1 else 'parties'} ({first_names(names)})"
