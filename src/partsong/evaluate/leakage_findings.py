"""What an attack has found, for people; and how far it is from the truth."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

EXACTLY, NEARLY, ROUGHLY = 1e-6, 0.05, 0.5
"""Relative errors up to which something counts as found exactly, nearly, and roughly."""
RECOVERED = 1e-3
"""The relative error up to which a row counts as recovered."""
SUPPOSED = ", if it has only one (its number of rows is not sent)"
UNCLEAR = 0.1
"""Beyond such a doubt a party of which the number of rows is not known is taken to have more than one."""
MEMBERSHIP = "by which a record that somebody brings along is known to be among them, or not to be"
SAME = 1e-6
"""Numbers that agree to this share are taken for the same."""


class Observer(enum.StrEnum):
    """Who can do it."""

    SERVER = "whoever reads the server's inbox"
    SUMS = "whoever knows the sums, masked or not,"
    OTHERS = "all other parties together, with the server or where the sum is sent back to them,"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was worked out of a run's messages.

    `error` is relative to the truth, and None where no truth was given. `doubt` is what the attacker can see without
    it: 0 where everything that was seen fits what was found, and None where nothing can be checked.
    """

    attack: str
    party: str
    array: str
    recovered: np.ndarray | None
    what: str
    doubt: float | None = None
    error: float | None = None
    observer: Observer = Observer.SERVER

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

    @property
    def told(self) -> str:
        """A sentence."""
        if self.recovered is None:
            return f"{_begun(self.observer)} learns {self.what}."
        kind = "can work out" if self.verdict in ("exactly", "nearly") else "may try to work out"
        sentence = f"{self.observer} {kind} of {self.party!r} {self.what}."
        measures = [f"relative error {self.error:.1e}"] if self.error is not None else []
        measures += [f"doubt {self.doubt:.1e}"] if self.doubt is not None and np.isfinite(self.doubt) else []
        return f"{_begun(sentence)} Found: {self.verdict} ({', '.join(measures)})."


def _begun(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def matched_error(found: np.ndarray, rows: np.ndarray) -> float:
    """‖found − X‖ / ‖X‖ with rows (n × m) in the order that fits best."""
    apart = ((found[:, None] - rows[None]) ** 2).sum(axis=-1)
    pairs = linear_sum_assignment(apart)
    return float(np.sqrt(apart[pairs].sum()) / max(float(np.linalg.norm(rows)), 1e-300))


def cosine_error(found: np.ndarray, rows: np.ndarray) -> float:
    """min over c of ‖c·found − x‖ / ‖x‖."""
    factor = float((found * rows).sum()) / max(float((found * found).sum()), 1e-300)
    return float(np.linalg.norm(factor * found - rows) / max(float(np.linalg.norm(rows)), 1e-300))


def span_error(basis: np.ndarray, rows: np.ndarray) -> float:
    """The share of X (n × m) that lies outside the span of orthonormal rows."""
    return float(np.linalg.norm(rows - rows @ basis.T @ basis) / max(float(np.linalg.norm(rows)), 1e-300))


def rows_within(array: str, found: np.ndarray, rows: np.ndarray, most: float = RECOVERED) -> int | None:
    """How many rows of X (n × m) are among those found, up to this relative error; None where no rows were found.

    Of rows that are known up to a factor the best factor is taken, and of rows in some columns these columns.
    """
    if not array.startswith("X"):
        return None
    wanted = rows[:, : found.shape[1]]
    inner, energies, sizes = wanted @ found.T, (wanted**2).sum(axis=1)[:, None], (found**2).sum(axis=1)[None]
    apart = energies - inner**2 / np.maximum(sizes, 1e-300) if "factor" in array else energies - 2 * inner + sizes
    relative = np.sqrt(np.clip(apart / np.maximum(energies, 1e-300), 0.0, 1.0))
    pairs = linear_sum_assignment(relative)
    return int((relative[pairs] <= most).sum())
