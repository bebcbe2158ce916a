"""What is said of a party after an attack: measures and sentences, and none of the values that were found."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from partsong.privacy.exposure import Exposure, worst

EXACTLY, NEARLY, ROUGHLY = 1e-6, 0.05, 0.5
"""Relative errors up to which something counts as found exactly, nearly, and roughly."""
RECOVERED = 1e-2
"""The relative error up to which a row counts as recovered."""
SUPPOSED = ", if it has only one (its number of rows is not sent)"
UNCLEAR = 0.1
"""Beyond such a doubt a party of which the number of rows is not known is taken to have more than one."""
MEMBERSHIP = "by which a record that somebody brings along is known to be among them, or not to be"
SAME = 1e-6
"""Numbers that agree to this share are taken for the same."""

FOUND = ("exactly", "nearly")
SHOWN = 5
"""So many parties are named in a sentence."""
NO_GUARANTEE = "What these attacks do not find, others may."


class Observer(enum.StrEnum):
    """Who can do it, in words."""

    SERVER = "whoever reads the server's inbox"
    SUMS = "whoever knows the sums, masked or not,"
    OTHERS = "all other parties together, with the server or where the sum is sent back to them,"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was worked out of a run's messages.

    `error` is relative to the truth, and None where no truth was given. `doubt` is what the attacker can see without
    it: 0 where everything that was seen fits what was found, and None where nothing can be checked. `truth`: the rows
    that it is about, where these are not those of the party.
    """

    attack: str
    party: str
    array: str
    recovered: np.ndarray | None
    what: str
    doubt: float | None = None
    error: float | None = None
    observer: Observer = Observer.SERVER
    truth: np.ndarray | None = None

    @property
    def verdict(self) -> str:
        """How well: by the error where it is known, else by the doubt."""
        if self.recovered is None:
            return "not"
        measured = self.error if self.error is not None else self.doubt
        if measured is None or not np.isfinite(measured):
            return "perhaps"
        for verdict, most in (("exactly", EXACTLY), ("nearly", NEARLY), ("roughly", ROUGHLY)):
            if measured <= most:
                return verdict
        return "not"


def matched_error(found: np.ndarray, rows: np.ndarray) -> float:
    """‖found − X‖ / ‖X‖ with rows (n × m) in the order that fits best."""
    apart = ((found[:, None] - rows[None]) ** 2).sum(axis=-1)
    pairs = linear_sum_assignment(apart)
    return float(np.sqrt(apart[pairs].sum()) / max(float(np.linalg.norm(rows)), 1e-300))


def cosine_error(found: np.ndarray, rows: np.ndarray) -> float:
    """min over c of ‖c·found − x‖ / ‖x‖."""
    factor = float((found * rows).sum()) / max(float((found * found).sum()), 1e-300)
    return float(np.linalg.norm(factor * found - rows) / max(float(np.linalg.norm(rows)), 1e-300))


def rows_error(found: np.ndarray, rows: np.ndarray, *, is_scaled: bool = True) -> float:
    """‖found − X‖ / ‖X‖ over the rows that were found (r × m), each beside the row of X that is nearest to it."""
    at, where = linear_sum_assignment(_apart(found, rows, is_scaled=is_scaled))
    wanted, near = rows[at], found[where]
    if not is_scaled:
        near = near * ((near * wanted).sum(axis=1) / np.maximum((near**2).sum(axis=1), 1e-300))[:, None]
    return float(np.linalg.norm(near - wanted) / max(float(np.linalg.norm(wanted)), 1e-300))


def _apart(found: np.ndarray, rows: np.ndarray, *, is_scaled: bool) -> np.ndarray:
    """Relative distance of each row of X (n × m) to each that was found (r × m), up to a factor unless scaled; ≤ 1."""
    inner, energies, sizes = rows @ found.T, (rows**2).sum(axis=1)[:, None], (found**2).sum(axis=1)[None]
    apart = energies - 2 * inner + sizes if is_scaled else energies - inner**2 / np.maximum(sizes, 1e-300)
    return np.sqrt(np.clip(apart / np.maximum(energies, 1e-300), 0.0, 1.0))


def moment_error(half: np.ndarray, rows: np.ndarray) -> float:
    """‖ZᵀZ − XᵀX‖ / ‖XᵀX‖ for Z (r × m) and X (n × m); neither square is formed.

    In a basis Q of all their rows both squares are small matrices, whose difference does not cancel.
    """
    Q = np.linalg.qr(np.vstack([half, rows]).T)[0]
    A, B = half @ Q, rows @ Q
    return float(np.linalg.norm(A.T @ A - B.T @ B) / max(float(np.linalg.norm(B.T @ B)), 1e-300))


def span_error(basis: np.ndarray, rows: np.ndarray) -> float:
    """The share of X (n × m) that lies outside the span of orthonormal rows."""
    return float(np.linalg.norm(rows - rows @ basis.T @ basis) / max(float(np.linalg.norm(rows)), 1e-300))


def rows_within(array: str, found: np.ndarray, rows: np.ndarray, most: float = RECOVERED) -> int | None:
    """How many rows of X (n × m) are among those found, up to this relative error; None where no rows were found.

    Of rows that are known up to a factor the best factor is taken, and of rows in some columns these columns.
    """
    if not array.startswith("X"):
        return None
    relative = _apart(found, rows[:, : found.shape[1]], is_scaled="factor" not in array)
    pairs = linear_sum_assignment(relative)
    return int((relative[pairs] <= most).sum())


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
    """One finding without its values: `shape` is that of what was found, `rows_recovered` counts rows within 1 %.

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
    def level(self) -> Exposure | None:
        """What it means on the ladder of exposures; None where it was not found."""
        if not self.is_found or (self.is_about_rows and self.rows_recovered == 0):
            return None
        if self.is_about_rows:
            return Exposure.ROWS
        return Exposure.ENTRIES if self.array.startswith("entries") else Exposure.MEMBERSHIP

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
    """What left a party, what was tried on it, and what was recovered; `is_sum`: of all parties together, from sums.

    `by_law`: what follows from the numbers alone (`privacy.exposure`). The severity is the worse of that and what was
    found. `largest_share`: of one row in a sum, where the rows are known; near one, that row is read as it is.
    """

    party: str
    attacker: str
    sent: tuple[SentArray, ...]
    messages: int
    bytes_sent: int
    tried: tuple[str, ...]
    recovered: tuple[Recovery, ...]
    notes: tuple[str, ...] = ()
    is_sum: bool = False
    by_law: Exposure = Exposure.UNKNOWN
    membership: tuple[Any, ...] = ()
    largest_share: float | None = None

    @property
    def found(self) -> tuple[Recovery, ...]:
        """What was recovered exactly or nearly, rows first."""
        return tuple(
            sorted((each for each in self.recovered if each.is_found), key=lambda each: not each.is_about_rows)
        )

    @property
    def found_level(self) -> Exposure | None:
        """The worst that was found; None: nothing was."""
        levels = [level for each in self.recovered if (level := each.level) is not None]
        return worst(levels) if levels else None

    @property
    def severity(self) -> Exposure:
        """The worse of what follows from the numbers and what was found."""
        found = self.found_level
        return self.by_law if found is None else worst((self.by_law, found))

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
        tried = "nothing was found by these attacks" if self.tried else "no attack was tried"
        return f"{tried}; by the numbers: {self.by_law}"


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
    return " ".join([*said, f"By the numbers alone: {worst(each.by_law for each in found)}.", NO_GUARANTEE])


def severity_of(found: Sequence[PartyFindings]) -> PartyFindings:
    """The party, or all of them together, that it is worst for."""
    return max(found, key=lambda each: each.severity.severity)


def format_names(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _counted(names: Sequence[str], parties: Sequence[PartyFindings]) -> str:
    return f"{len(names)} of {len(parties)} {'party' if len(parties) == 1 else 'parties'} ({format_names(names)})"
