"""What a run, or a comparison of runs, found: plain values, ready to be written down."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy.typing as npt

from partsong.errors import ShapeError
from partsong.evaluate.at_party import AtParty, OwnParts
from partsong.evaluate.leakage_recovered import PartyFindings


@dataclass(frozen=True, slots=True)
class Curve:
    """Relative error along a run: one entry per recorded round, `seconds` and `bytes_up` since the start.

    Bytes are those that a party sent, as a mean over parties; none where nothing is sent.
    """

    label: str
    rounds: tuple[int, ...]
    seconds: tuple[float, ...]
    errors: tuple[float, ...]
    bytes_up: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.bytes_up and len(self.bytes_up) != len(self.rounds):
            raise ShapeError(
                f"Curve {self.label!r} has {len(self.rounds)} rounds and {len(self.bytes_up)} numbers of bytes. Give "
                "one per recorded round, or none where nothing is sent."
            )
        if not len(self.rounds) == len(self.seconds) == len(self.errors):
            raise ShapeError(
                f"Curve {self.label!r} has {len(self.rounds)} rounds, {len(self.seconds)} seconds and "
                f"{len(self.errors)} errors. Give one of each per recorded round."
            )


@dataclass(frozen=True, slots=True)
class Sent:
    """One kind of array that a party sent: its size, how often it left, and what it tells the receiver."""

    array: str
    shape: tuple[int, ...]
    dtype: str
    bytes_each: int
    times: int
    meaning: str

    @property
    def bytes_total(self) -> int:
        """Bytes of all the times it left."""
        return self.bytes_each * self.times


@dataclass(frozen=True, slots=True, eq=False)
class MethodFindings:
    """One method's result: its quality, its cost, its parts `components` (k, m), and all that a party sent.

    Errors, variances and shares are fractions (0.3 is 30 %). Components are shown in the order given, so align
    them across methods to compare them. An oracle is a reference that saw all rows in one place. A method without
    components shares nothing. `found_alone` are the parties' parts after the first round, before they heard of others.
    """

    name: str
    description: str
    relative_error: float
    explained_variance: float
    bytes_up_per_party: float
    bytes_down_per_party: float
    rounds: int
    seconds: float
    outcome: str
    curve: Curve
    components: npt.NDArray[Any]
    shares: tuple[float, ...]
    sent: tuple[Sent, ...]
    is_oracle: bool = False
    start: str = ""
    parties: tuple[AtParty, ...] = ()
    found_alone: Mapping[str, OwnParts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.components.ndim != 2 or len(self.components) != len(self.shares):
            raise ShapeError(
                f"Method {self.name!r} has components of shape {self.components.shape} and {len(self.shares)} shares. "
                "Give a (k, m) array and one share per component."
            )

    @property
    def drift(self) -> float:
        """Σ_p ‖H_p − H‖² / ‖H‖², by position; NaN where parties have no H of their own."""
        return sum(party.drift for party in self.parties) if self.parties else math.nan

    @property
    def aligned_drift(self) -> float:
        """The same after alignment."""
        return sum(party.aligned_drift for party in self.parties) if self.parties else math.nan

    def in_order(self, order: Sequence[int]) -> MethodFindings:
        """The same with component order[a] in place a, here and at every party."""
        return replace(
            self,
            components=self.components[list(order)],
            shares=tuple(self.shares[i] for i in order),
            parties=tuple(party.in_order(order) for party in self.parties),
            found_alone={name: parts.in_order(order) for name, parts in self.found_alone.items()},
        )


@dataclass(frozen=True, slots=True)
class Party:
    """A data owner: how many rows it holds, and how many of each label (empty: not known, or not to be shown)."""

    name: str
    rows: int
    labels: Mapping[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """All that the page shows; `lead` is one paragraph, `never_sent` one sentence on what stayed with its owner.

    `privacy` is what a fit with noise has spent (`Spending.told`). `attacks` are what was tried on its messages, or why
    nothing was; None for comparisons, which have no section on either.
    """

    title: str
    lead: str
    parties: tuple[Party, ...]
    methods: tuple[MethodFindings, ...]
    image_shape: tuple[int, int] | None
    feature_names: tuple[str, ...] | None
    settings: Mapping[str, str]
    versions: Mapping[str, str]
    never_sent: str
    privacy: Mapping[str, Any] | None = None
    is_masked: bool = False
    attacks: tuple[PartyFindings, ...] | str | None = None

    def __post_init__(self) -> None:
        for method in self.methods:
            n_features = method.components.shape[1]
            if self.image_shape is not None and self.image_shape[0] * self.image_shape[1] != n_features:
                raise ShapeError(
                    f"Pictures of {self.image_shape} pixels do not fit the {n_features} "
                    f"features of method {method.name!r}. Correct image_shape, or leave it out."
                )
            if self.feature_names is not None and len(self.feature_names) != n_features:
                raise ShapeError(
                    f"{len(self.feature_names)} feature names do not fit the {n_features} features of method "
                    f"{method.name!r}. Give one name per column, or leave them out."
                )
