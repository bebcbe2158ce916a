"""What one noisy message costs: the kind of noise, how much of it, and about whom the promise is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from partsong.errors import ParameterError
from partsong.privacy.randomness import Source, is_secure

KINDS = ("gaussian", "laplace", "none")
RELATIONS = {
    ("party", "replace"): "all data of one party are exchanged for any other data",
    ("party", "zero-out"): "one party's contribution is exchanged for none, that is for the public reference",
    ("row", "add-or-remove"): "one row is added or taken away",
    ("row", "replace"): "one row is exchanged for any other row; the number of rows is public",
}
"""Unit and relation -> which two worlds look alike."""
LEAST, MOST = 1e-9, 1e15
"""Between which multipliers lie that can be accounted for without running out of numbers."""


@dataclass(frozen=True, slots=True)
class Release:
    """One use of a mechanism; `noise_multiplier` is the scale of the noise over the sensitivity in its norm.

    σ/Δ₂ for Gaussian noise, b/Δ₁ for Laplace. `kind` "none": sent as it is. Not secure: the noise came from a seed.
    """

    kind: str
    noise_multiplier: float
    unit: str = "party"
    relation: str = "replace"
    is_secure: bool = True

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ParameterError(f"A release is one of {', '.join(KINDS)}; got {self.kind!r}.")
        check_relation(self.unit, self.relation)
        is_some = LEAST <= self.noise_multiplier <= MOST
        if not is_some and not (self.kind == "none" and self.noise_multiplier == 0):
            raise ParameterError(
                f"A noise multiplier must be a positive number, from {LEAST:g} to {MOST:g}; got "
                f"{self.noise_multiplier!r}. `multiplier_for` finds one for a budget."
            )

    def drawn_from(self, source: Source) -> Release:
        """This release, marked if its noise came from an insecure source."""
        return replace(self, is_secure=self.is_secure and is_secure(source))

    def to_json(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "kind": self.kind,
            "noise_multiplier": self.noise_multiplier,
            "unit": self.unit,
            "relation": self.relation,
            "is_secure": self.is_secure,
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Release:
        """The release that `to_json` wrote; a flag that is no flag is not taken for one."""
        if not isinstance(values["is_secure"], bool):
            raise ParameterError(f"is_secure is true or false; got {values['is_secure']!r}.")
        return Release(
            str(values["kind"]),
            float(values["noise_multiplier"]),
            str(values["unit"]),
            str(values["relation"]),
            values["is_secure"],
        )


def check_relation(unit: str, relation: str) -> None:
    """Refuse a relation that the unit does not have."""
    if (unit, relation) not in RELATIONS:
        known = ", ".join(f"{a}: {b}" for a, b in RELATIONS)
        raise ParameterError(f"No promise is made for unit {unit!r} with relation {relation!r}. Known are {known}.")
