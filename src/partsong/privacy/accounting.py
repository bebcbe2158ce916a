"""What has been spent, what may be spent, and how much noise a plan needs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from partsong.errors import CompositionError, FormatError, ParameterError
from partsong.privacy.composition import Costs, composed_epsilon, concentrated_epsilon
from partsong.privacy.gaussian_curve import check_budget, largest_mu
from partsong.privacy.release import RELATIONS, Release

PRECISION = 1e-4
"""Relative: to which a multiplier is found by halving; rounded toward more noise."""
MOST_RELEASES = 1 << 50


@dataclass(frozen=True, slots=True)
class Ledger:
    """Releases about one unit and the number of each, in a canonical order; ledgers of several runs add up."""

    entries: tuple[tuple[Release, int], ...] = ()

    def __post_init__(self) -> None:
        counts: dict[Release, int] = {}
        for release, count in self.entries:
            if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MOST_RELEASES:
                raise ParameterError(f"A release is made a whole number of times, at most 2^50; got {count!r}.")
            counts[release] = counts.get(release, 0) + count
        kept = sorted(((r, n) for r, n in counts.items() if n), key=lambda entry: repr(entry[0]))
        promises = sorted({(r.unit, r.relation) for r, _ in kept if r.kind != "none"})
        if len(promises) > 1:
            raise CompositionError(
                "One ε cannot be about two things: "
                + " and ".join(f"{unit} ({relation})" for unit, relation in promises)
                + ". Keep a ledger for each."
            )
        object.__setattr__(self, "entries", tuple(kept))

    def after(self, release: Release, count: int = 1) -> Ledger:
        """This ledger with more releases."""
        return Ledger((*self.entries, (release, count)))

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger((*self.entries, *other.entries))

    def __len__(self) -> int:
        return sum(count for _, count in self.entries)

    @property
    def costs(self) -> Costs:
        """Kind, multiplier and count of each: what ε depends on."""
        counts: dict[tuple[str, float], int] = {}
        for release, count in self.entries:
            key = (release.kind, release.noise_multiplier)
            counts[key] = counts.get(key, 0) + count
        return tuple((*key, count) for key, count in sorted(counts.items()))

    @property
    def is_secure(self) -> bool:
        """Whether all noise came from a source that nobody can repeat."""
        return all(release.is_secure for release, _ in self.entries)

    @property
    def promise(self) -> str:
        """About whom ε is, in words."""
        if any(release.kind == "none" for release, _ in self.entries):
            return "no promise: something was sent without noise"
        words = next((RELATIONS[r.unit, r.relation] for r, _ in self.entries), "nothing was sent")
        return words if self.is_secure else f"NO PROMISE, the noise came from a seed; else: {words}"

    def epsilon(self, delta: float) -> float:
        """ε that all releases together cost, at this δ."""
        return composed_epsilon(self.costs, delta)

    def loose_epsilon(self, delta: float) -> float:
        """An upper bound of it by zCDP, without dp-accounting."""
        return concentrated_epsilon(self.costs, delta)

    def to_json(self) -> list[dict[str, Any]]:
        """Plain values for a checkpoint."""
        return [{**release.to_json(), "count": count} for release, count in self.entries]

    @staticmethod
    def from_json(values: Iterable[Mapping[str, Any]]) -> Ledger:
        """The ledger that `to_json` wrote."""
        try:
            return Ledger(tuple((Release.from_json(entry), entry["count"]) for entry in values))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise FormatError(f"This is not a list of releases ({error}); a budget cannot go on from it.") from error


@dataclass(frozen=True, slots=True)
class Accounts:
    """A ledger for each party by name: a party is charged for the rounds that it uploads in."""

    ledgers: Mapping[str, Ledger] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ledgers", MappingProxyType(dict(self.ledgers)))

    def __reduce__(self) -> tuple[type[Accounts], tuple[dict[str, Ledger]]]:
        return Accounts, (dict(self.ledgers),)

    def charge(self, names: Iterable[str], release: Release, count: int = 1) -> Accounts:
        """The accounts after these parties have sent."""
        charged = {name: self.ledgers.get(name, Ledger()).after(release, count) for name in names}
        return Accounts({**self.ledgers, **charged})

    def __add__(self, other: Accounts) -> Accounts:
        names = {*self.ledgers, *other.ledgers}
        return Accounts({n: self.ledgers.get(n, Ledger()) + other.ledgers.get(n, Ledger()) for n in sorted(names)})

    def epsilons(self, delta: float) -> dict[str, float]:
        """ε spent, by party."""
        return {name: ledger.epsilon(delta) for name, ledger in sorted(self.ledgers.items())}

    def epsilon(self, delta: float) -> float:
        """The largest of them."""
        return max(self.epsilons(delta).values(), default=0.0)

    @property
    def is_secure(self) -> bool:
        """Whether all noise of all parties came from a source that nobody can repeat."""
        return all(ledger.is_secure for ledger in self.ledgers.values())

    def to_json(self) -> dict[str, list[dict[str, Any]]]:
        """Plain values for a checkpoint."""
        return {name: ledger.to_json() for name, ledger in sorted(self.ledgers.items())}

    @staticmethod
    def from_json(values: Mapping[str, Iterable[Mapping[str, Any]]]) -> Accounts:
        """The accounts that `to_json` wrote."""
        if not isinstance(values, Mapping):
            raise FormatError(f"Accounts are ledgers by party; this is {type(values).__name__}.")
        return Accounts({name: Ledger.from_json(entries) for name, entries in values.items()})


@dataclass(frozen=True, slots=True)
class Budget:
    """The most that may be spent on one unit: (ε, δ) over everything it ever takes part in."""

    epsilon: float
    delta: float = 1e-5

    def __post_init__(self) -> None:
        check_budget(self.epsilon, self.delta, needs_delta=False)

    def allows(self, ledger: Ledger, release: Release) -> bool:
        """Whether one more release stays within; asked before anything is computed for it."""
        return ledger.after(release).epsilon(self.delta) <= self.epsilon

    def rounds(self, release: Release, spent: Ledger | None = None) -> int:
        """How many releases fit, after what was spent (at most 2⁵⁰); 0 is an answer here, see `rounds_within`."""
        before = spent or Ledger()
        if release.kind == "none" or not self.allows(before, release):
            return 0
        enough, most = 1, MOST_RELEASES - len(before)
        while 2 * enough <= most and before.after(release, 2 * enough).epsilon(self.delta) <= self.epsilon:
            enough *= 2
        low, high = enough, min(2 * enough, most + 1)
        while high - low > 1:
            middle = (low + high) // 2
            fits = before.after(release, middle).epsilon(self.delta) <= self.epsilon
            low, high = (middle, high) if fits else (low, middle)
        return low


def rounds_within(epsilon: float, delta: float, release: Release, spent: Ledger | None = None) -> int:
    """How many releases (ε, δ) allows; a budget that allows none is an error."""
    rounds = Budget(epsilon, delta).rounds(release, spent)
    if rounds == 0:
        if release.kind == "none":
            raise ParameterError("A release without noise fits in no budget: choose Gaussian or Laplace noise.")
        one = (spent or Ledger()).after(release).epsilon(delta)
        need = multiplier_for(epsilon, delta, 1, release.kind)
        raise ParameterError(
            f"A budget that allows no round: epsilon={epsilon:g} with delta={delta:g}, but after the first one "
            f"{one:.4g} would be spent. A single round from a fresh start needs a noise multiplier of {need:.4g} (now "
            f"{release.noise_multiplier:g}); or give a larger epsilon."
        )
    return rounds


def multiplier_for(epsilon: float, delta: float, rounds: int, kind: str = "gaussian") -> float:
    """The smallest noise multiplier with which `rounds` releases cost at most (ε, δ)."""
    if not isinstance(rounds, int) or rounds < 1:
        raise ParameterError(f"A plan has at least one round; got rounds={rounds!r}.")
    if kind == "gaussian":
        return math.sqrt(rounds) / largest_mu(epsilon, delta) * (1 + 1e-12)
    if kind != "laplace":
        raise ParameterError(f'Noise is "gaussian" or "laplace"; got {kind!r}.')
    check_budget(epsilon, delta, needs_delta=False)
    high = rounds / epsilon * (1 + 1e-12)
    if delta == 0:
        return high
    low = high
    while composed_epsilon((("laplace", low, rounds),), delta) <= epsilon:
        high, low = low, low / 2
    while high - low > PRECISION * high:
        middle = math.sqrt(low * high)
        fits = composed_epsilon((("laplace", middle, rounds),), delta) <= epsilon
        low, high = (low, middle) if fits else (middle, high)
    return high
