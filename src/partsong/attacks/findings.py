"""Findings of attacks: measures and descriptions, without the recovered values."""

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
"""Relative errors up to which a finding counts as exact, near, and rough."""
RECOVERED = 1e-2
"""Relative error up to which a row counts as recovered."""
SUPPOSED = ", if it has only one (its number of rows is not sent)"
UNCLEAR = 0.1
"""Above this doubt, a party with an unknown number of rows is assumed to have more than one."""
MEMBERSHIP = "which shows whether a given record is among them"
SAME = 1e-6
"""Numbers with a relative difference below this count as equal."""

FOUND = ("exactly", "nearly")
SHOWN = 5
"""Number of parties named in a sentence."""
NO_GUARANTEE = "Other attacks may find more."


class Observer(enum.StrEnum):
    """Who can run an attack, in words."""

    SERVER = "a reader of the server's inbox"
    SUMS = "a reader of the sums, masked or not,"
    OTHERS = "all other parties together, if they have the sum from the server or from its broadcast,"


@dataclass(frozen=True, slots=True)
class Finding:
    """One reconstruction from the messages of a run.

    `error` is relative to the truth, None if no truth was given. `doubt` is what the attacker can measure without it: 0
    if all messages fit the reconstruction, None if nothing can be checked. `truth`: the rows it is about, if these are
    not the rows of the party.
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
        """How well it succeeded: by the error if known, otherwise by the doubt."""
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
    """Return ‖found − X‖ / ‖X‖ with rows (n × m) in the best matching order."""
    apart = ((found[:, None] - rows[None]) ** 2).sum(axis=-1)
    pairs = linear_sum_assignment(apart)
    return float(np.sqrt(apart[pairs].sum()) / max(float(np.linalg.norm(rows)), 1e-300))


def cosine_error(found: np.ndarray, rows: np.ndarray) -> float:
    """min over c of ‖c·found − x‖ / ‖x‖."""
    factor = float((found * rows).sum()) / max(float((found * found).sum()), 1e-300)
    return float(np.linalg.norm(factor * found - rows) / max(float(np.linalg.norm(rows)), 1e-300))


def rows_error(found: np.ndarray, rows: np.ndarray, *, is_scaled: bool = True) -> float:
    """Return ‖found − X‖ / ‖X‖ over the found rows (r × m), each matched to the nearest row of X."""
    at, where = linear_sum_assignment(_apart(found, rows, is_scaled=is_scaled))
    wanted, near = rows[at], found[where]
    if not is_scaled:
        near = near * ((near * wanted).sum(axis=1) / np.maximum((near**2).sum(axis=1), 1e-300))[:, None]
    return float(np.linalg.norm(near - wanted) / max(float(np.linalg.norm(wanted)), 1e-300))


def _apart(found: np.ndarray, rows: np.ndarray, *, is_scaled: bool) -> np.ndarray:
    """Relative distance of each row of X (n × m) to each found row (r × m), up to a factor unless scaled; ≤ 1."""
    inner, energies, sizes = rows @ found.T, (rows**2).sum(axis=1)[:, None], (found**2).sum(axis=1)[None]
    apart = energies - 2 * inner + sizes if is_scaled else energies - inner**2 / np.maximum(sizes, 1e-300)
    return np.sqrt(np.clip(apart / np.maximum(energies, 1e-300), 0.0, 1.0))


def moment_error(half: np.ndarray, rows: np.ndarray) -> float:
    """‖ZᵀZ − XᵀX‖ / ‖XᵀX‖ for Z (r × m) and X (n × m); neither square is formed.

    In a basis Q of all their rows, both products are small matrices, whose difference loses no digits.
    """
    Q = np.linalg.qr(np.vstack([half, rows]).T)[0]
    A, B = half @ Q, rows @ Q
    return float(np.linalg.norm(A.T @ A - B.T @ B) / max(float(np.linalg.norm(B.T @ B)), 1e-300))


def span_error(basis: np.ndarray, rows: np.ndarray) -> float:
    """Return the share of X (n × m) outside the span of orthonormal rows."""
    return float(np.linalg.norm(rows - rows @ basis.T @ basis) / max(float(np.linalg.norm(rows)), 1e-300))


def rows_within(array: str, found: np.ndarray, rows: np.ndarray, most: float = RECOVERED) -> int | None:
    """Count the rows of X (n × m) among those found, up to this relative error; None if no rows were found.

    Rows known up to a factor are scaled by the best factor; rows known in some columns are compared in these.
    """
    if not array.startswith("X"):
        return None
    relative = _apart(found, rows[:, : found.shape[1]], is_scaled="factor" not in array)
    pairs = linear_sum_assignment(relative)
    return int((relative[pairs] <= most).sum())


@dataclass(frozen=True, slots=True)
class SentArray:
    """One kind of array that a party sent: how often, and how many bytes in total."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    times: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Recovery:
    """One finding without its values: `shape` of what was found, `rows_recovered` counts rows within 1 %.

    `doubt` is what the attacker can measure without the truth (0: all messages fit); `error` is relative to the truth.
    `error` and `rows_recovered` are None if no truth was given.
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
        """Whether it was found exactly or nearly."""
        return self.verdict in FOUND

    @property
    def level(self) -> Exposure | None:
        """Its exposure level; None if it was not found."""
        if not self.is_found or (self.is_about_rows and self.rows_recovered == 0):
            return None
        if self.is_about_rows:
            return Exposure.ROWS
        return Exposure.ENTRIES if self.array.startswith("entries") else Exposure.MEMBERSHIP

    @property
    def is_about_rows(self) -> bool:
        """Whether it is about rows, possibly up to a factor, and not about their span or factors."""
        return self.array.startswith("X")

    @property
    def measured(self) -> str:
        """How well it succeeded, in numbers: those an attacker has, and those that need the truth."""
        said = [] if self.error is None else [f"relative error {self.error:.1e}"]
        if self.rows_recovered is not None:
            said.append(f"{self.rows_recovered} {'row' if self.rows_recovered == 1 else 'rows'} within {RECOVERED:g}")
        said += [] if self.doubt is None or not math.isfinite(self.doubt) else [f"doubt {self.doubt:.1e}"]
        said += [] if self.shape is None else [_sides(self.shape)]
        return f"{self.verdict}: {', '.join(said)}"


@dataclass(frozen=True, slots=True)
class PartyFindings:
    """What a party sent, which attacks were tried, and what they recovered; `is_sum`: all parties together, from sums.

    `by_law`: the exposure that follows from counting equations and unknowns (`privacy.exposure`). The severity is the
    worse of `by_law` and of what was found. `largest_share`: the largest share of one row in a sum, if the rows are
    known; near one, the sum shows that row.
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
        """The worst exposure found; None if nothing was found."""
        levels = [level for each in self.recovered if (level := each.level) is not None]
        return worst(levels) if levels else None

    @property
    def severity(self) -> Exposure:
        """The worse of `by_law` and what was found."""
        found = self.found_level
        return self.by_law if found is None else worst((self.by_law, found))

    @property
    def left(self) -> str:
        """What the party sent, in words."""
        if self.is_sum:
            return "sums over all parties"
        arrays = ", ".join(f"{each.times} {each.name} ({_sides(each.shape)})" for each in self.sent)
        return f"{self.bytes_sent:,} bytes: {arrays}" if self.sent else "nothing"

    @property
    def verdict(self) -> str:
        """The result in a few words."""
        if self.found:
            best = self.found[0]
            return f"{best.array} was found {best.verdict}"
        tried = "these attacks found nothing" if self.tried else "no attack was tried"
        return f"{tried}; by the numbers: {self.by_law}"


def _sides(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "one number"


def verdict_of(found: Sequence[PartyFindings]) -> str:
    """Return a one-line summary of all findings."""
    parties = [each for each in found if not each.is_sum]
    best = {each.party: each.found[0] for each in parties if each.found}
    with_rows = [f"{party} {one.verdict}" for party, one in best.items() if one.is_about_rows]
    with_less = [party for party, one in best.items() if not one.is_about_rows]
    untried = [each.party for each in parties if not each.tried]
    said = [f"Rows of {_counted(with_rows, parties)} were found." if with_rows else "No rows of a party were found."]
    said += [f"Of {_counted(with_less, parties)} something less than rows was found."] if with_less else []
    said += [f"On {_counted(untried, parties)} no attack was tried."] if untried else []
    is_sum_found = any(each.is_sum and each.found for each in found)
    said += ["From sums alone, something was found about all rows together."] if is_sum_found else []
    return " ".join([*said, f"By the numbers alone: {worst(each.by_law for each in found)}.", NO_GUARANTEE])


def severity_of(found: Sequence[PartyFindings]) -> PartyFindings:
    """Return the findings with the highest severity: of a party, or of all parties together."""
    return max(found, key=lambda each: each.severity.severity)


def format_names(names: Sequence[str]) -> str:
    """Format the first few names and the number of the rest."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _counted(names: Sequence[str], parties: Sequence[PartyFindings]) -> str:
    return f"{len(names)} of {len(parties)} {'party' if len(parties) == 1 else 'parties'} ({format_names(names)})"
