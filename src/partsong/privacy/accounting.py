"""Privacy accounting: (ε, δ) of composed Gaussian and Laplace releases, ledgers by party, budgets.

Gaussian noise has exactly the (ε, δ) curve of μ-GDP, where μ = sensitivity / σ.

    δ(ε; μ) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ)          (Balle & Wang, 2018, Theorem 8)

T adaptively chosen Gaussian releases compose to one with μ² = Σ μ_t² (Dong, Roth & Su, 2022, Corollary 3.3), without
approximation. Other mixtures are composed by privacy loss distributions. A composition is a tuple of (kind, noise
multiplier, count). Amplification by sampling is not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from scipy import optimize, special

from partsong.core.states import state
from partsong.errors import CompositionError, FormatError, MissingExtra, ParameterError

MARGIN, LOST_DIGITS = 1e-9, 2e-14
"""Relative: δ is taken as this much smaller than asked for, or LOST_DIGITS times the larger of μ and 1/μ. That covers
the rounding in its formula, where numbers of the size of μ, or as close as μ, are subtracted, and noise from tables."""
HALVINGS = 200
MIN_DELTA = 1e-300
"""A smaller δ counts as 0."""

Costs = tuple[tuple[str, float, int], ...]
FINEST_INTERVAL = 1e-4
MIN_LAPLACE_MULTIPLIER, MAX_PURE_EPSILON = 0.01, 1e5
"""Below this Laplace multiplier, or above this sum of ε, privacy loss distributions overflow."""
CELLS = 2e5
"""About how many cells the range of privacy losses is cut into; rounded up in each, so that fewer is only looser."""
KINDS = ("gaussian", "laplace", "none")
RELATIONS = {
    ("party", "replace"): "all data of one party are replaced by any other data",
    ("party", "zero-out"): "one party's contribution is replaced by none, that is, by the public reference",
    ("row", "add-or-remove"): "one row is added or removed",
    ("row", "replace"): "one row is replaced by any other row; the number of rows is public",
}
"""Unit and relation -> the change of data that (ε, δ) protects against."""
MIN_MULTIPLIER, MAX_MULTIPLIER = 1e-9, 1e15
"""Noise multipliers that can be accounted for without overflow."""
MAX_RELEASES = 1 << 50


def log_delta(epsilon: float, mu: float) -> float:
    """ln δ(ε; μ), by φ(a) (R(a) − R(a + μ)) with a = ε/μ − μ/2 and the ratio of Mills R = (1 − Φ)/φ: stable."""
    if mu <= 0:
        return -math.inf
    a = epsilon / mu - mu / 2
    if a < -5:
        second = math.exp(-a * a / 2) * float(special.erfcx((a + mu) / math.sqrt(2))) / 2  # e^ε φ(a + μ) = φ(a)
        return math.log1p(-(float(special.ndtr(a)) + second))
    mills = float(special.erfcx(a / math.sqrt(2)) - special.erfcx((a + mu) / math.sqrt(2)))
    return -a * a / 2 - math.log(2) + math.log(mills) if mills > 0 else -math.inf


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest ε with δ(ε; μ) ≤ δ, rounded up; 0 if δ alone suffices."""
    check_delta(delta)
    target = math.log(delta) + math.log1p(-_margin(mu))
    if mu <= 0 or log_delta(0.0, mu) <= target:
        return 0.0
    high = 1.0
    while log_delta(high, mu) > target:
        high *= 2
    return _bisect(lambda epsilon: log_delta(epsilon, mu) <= target, 0.0, high)


def largest_mu(epsilon: float, delta: float) -> float:
    """Return the largest μ with δ(ε; μ) ≤ δ, rounded down: the budget for the composition of Gaussian releases.

    The margin is doubled, so that `gaussian_epsilon` of the result never exceeds ε by rounding.
    """
    check_budget(epsilon, delta)

    def fits(mu: float) -> bool:
        return log_delta(epsilon, mu) <= math.log(delta) + math.log1p(-2 * _margin(mu))

    low, high = 0.0, 1.0
    while fits(high):
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def check_budget(epsilon: float, delta: float, *, needs_delta: bool = True) -> None:
    """Raise if ε or δ is out of range."""
    if not (isinstance(epsilon, (int, float)) and math.isfinite(epsilon) and epsilon > 0):
        raise ParameterError(
            f"epsilon must be a positive number; got {epsilon!r}. Smaller is more private: 1 is strong, 10 is weak, "
            "and 0 would allow nothing to be sent.",
            parameter="epsilon",
        )
    check_delta(delta, needs_delta=needs_delta)


def check_delta(delta: float, *, needs_delta: bool = True) -> None:
    """Raise if δ is out of range; δ = 0 needs Laplace noise."""
    if not (isinstance(delta, (int, float)) and 0 <= delta < 1):
        raise ParameterError(
            f"delta must be from 0 to below 1; got {delta!r}. "
            "It should be well below 1 / (number of units), such as 1e-5.",
            parameter="delta",
        )
    if needs_delta and delta < MIN_DELTA:
        raise ParameterError(
            f"Gaussian noise needs delta > 0; got {delta!r}. "
            "Use a value such as 1e-5, or Laplace noise with delta = 0.",
            parameter="delta",
        )


def _margin(mu: float) -> float:
    return min(0.4, max(MARGIN, LOST_DIGITS * max(mu, 1 / mu))) if mu > 0 else MARGIN


def _bisect(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Return by bisection the smallest number in (low, high] from which on `holds`, rounded up."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def composed_epsilon(costs: Costs, delta: float) -> float:
    """Return the smallest provable ε for which `costs` together are (ε, δ)-private; ∞ if a release has no noise.

    Gaussian only: exact. Laplace only with δ = 0: the sum of ε. Otherwise the minimum of dp-accounting's pessimistic
    estimate, the sum of ε of all Laplace and of all Gaussian releases, and the zCDP bound.
    """
    if any(kind == "none" for kind, _, _ in costs):
        return math.inf
    mu, pure = gaussian_mu(costs), pure_epsilon(costs)
    check_delta(delta, needs_delta=mu > 0)
    if pure == 0:
        return gaussian_epsilon(mu, delta) if mu > 0 else 0.0
    if delta < MIN_DELTA:
        return pure
    if mu == 0 and sum(count for _, _, count in costs) == 1:
        return laplace_epsilon(pure, delta)
    kept = delta * (1 - MARGIN)
    simple = min(pure + (gaussian_epsilon(mu, delta) if mu > 0 else 0.0), zcdp_epsilon(costs, kept))
    is_faint = any(kind == "laplace" and multiplier < MIN_LAPLACE_MULTIPLIER for kind, multiplier, _ in costs)
    return simple if is_faint or pure > MAX_PURE_EPSILON else min(pld_epsilon(costs, kept), simple)


def gaussian_mu(costs: Costs) -> float:
    """μ of all Gaussian releases together: μ² = Σ 1 / multiplier²."""
    return math.sqrt(math.fsum(n / z**2 for kind, z, n in costs if kind == "gaussian"))


def pure_epsilon(costs: Costs) -> float:
    """Σ 1 / multiplier of all Laplace releases."""
    return math.fsum(n / z for kind, z, n in costs if kind == "laplace")


def laplace_epsilon(pure: float, delta: float) -> float:
    """ε of one Laplace release with δ > 0: from δ(ε) = 1 − exp((ε − 1/multiplier) / 2)."""
    return max(0.0, pure + 2 * math.log1p(-delta * (1 - MARGIN)))


@lru_cache(maxsize=4096)
def pld_epsilon(costs: Costs, delta: float, *, one_by_one: bool = False) -> float:
    """Return ε by the PLD accountant of dp-accounting.

    Gaussian releases are composed to a single one first, unless `one_by_one`.
    """
    events, accounting = _dp_accounting()
    mu, pure = gaussian_mu(costs), pure_epsilon(costs)
    interval = max(FINEST_INTERVAL, (pure + mu * mu / 2 + 8 * mu) / CELLS)
    accountant = accounting.PLDAccountant(value_discretization_interval=interval)
    for kind, multiplier, count in costs:
        if kind == "laplace":
            accountant.compose(events.LaplaceDpEvent(multiplier), count)
        elif one_by_one:
            accountant.compose(events.GaussianDpEvent(multiplier), count)
    if mu > 0 and not one_by_one:
        accountant.compose(events.GaussianDpEvent(1 / mu))
    return float(accountant.get_epsilon(delta))


def zcdp_epsilon(costs: Costs, delta: float) -> float:
    """Return a looser ε without dependencies: zCDP with ρ = Σ 1 / (2 multiplier²) for Gaussian and Laplace noise.

    δ = min_α exp((α − 1)(αρ − ε)) / (α − 1) · (1 − 1/α)^α          (Canonne, Kamath & Steinke, 2020)
    """
    check_delta(delta)
    if any(kind == "none" for kind, _, _ in costs):
        return math.inf
    rho = math.fsum(n / (2 * z * z) for _, z, n in costs)
    if rho == 0:
        return 0.0

    def epsilon_at(log_order: float) -> float:
        excess = math.exp(log_order)  # α − 1
        order = 1 + excess
        return order * rho + (math.log(1 / delta) - math.log(excess) + order * math.log1p(-1 / order)) / excess

    best = optimize.minimize_scalar(epsilon_at, bounds=(-20.0, 20.0), method="bounded")
    return max(0.0, float(best.fun))


def _dp_accounting() -> tuple[Any, Any]:
    try:
        import dp_accounting
        from dp_accounting import pld
    except ImportError as error:
        raise MissingExtra(
            'Composing Laplace noise over rounds needs dp-accounting. Install it with pip install "partsong[privacy]", '
            "or use Gaussian noise."
        ) from error
    return dp_accounting, pld


@state("privacy.release")
@dataclass(frozen=True, slots=True)
class Release:
    """One use of a mechanism; `noise_multiplier` is the scale of the noise over the sensitivity in its norm.

    It is σ/Δ₂ for Gaussian noise and b/Δ₁ for Laplace. `kind` "none" means no noise. `is_secure` is False for noise
    from a seed.
    """

    kind: str
    noise_multiplier: float
    unit: str = "party"
    relation: str = "replace"
    is_secure: bool = True

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ParameterError(f"kind must be one of {', '.join(KINDS)}; got {self.kind!r}.", parameter="kind")
        check_relation(self.unit, self.relation)
        is_some = MIN_MULTIPLIER <= self.noise_multiplier <= MAX_MULTIPLIER
        if not is_some and not (self.kind == "none" and self.noise_multiplier == 0):
            raise ParameterError(
                f"A noise multiplier must be a positive number, from {MIN_MULTIPLIER:g} to {MAX_MULTIPLIER:g}; got "
                f"{self.noise_multiplier!r}. `noise_multiplier_for` finds one for a budget.",
                parameter="noise_multiplier",
            )

    def to_json(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Release:
        """Return the release that `to_json` wrote; `is_secure` must be a bool."""
        if not isinstance(values["is_secure"], bool):
            raise ParameterError(f"is_secure must be true or false; got {values['is_secure']!r}.")
        return Release(
            str(values["kind"]),
            float(values["noise_multiplier"]),
            str(values["unit"]),
            str(values["relation"]),
            values["is_secure"],
        )


def check_relation(unit: str, relation: str) -> None:
    """Raise if the unit does not have this relation."""
    if (unit, relation) not in RELATIONS:
        known = ", ".join(f"{a}: {b}" for a, b in RELATIONS)
        raise ParameterError(f"Unit {unit!r} has no relation {relation!r}. Use one of {known}.", parameter="relation")


@state("privacy.ledger")
@dataclass(frozen=True, slots=True)
class Ledger:
    """Releases for one unit with their counts, in canonical order; ledgers of several runs can be added."""

    entries: tuple[tuple[Release, int], ...] = ()

    def __post_init__(self) -> None:
        counts: dict[Release, int] = {}
        for release, count in self.entries:
            if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MAX_RELEASES:
                raise ParameterError(f"The count of a release must be a whole number from 0 to 2^50; got {count!r}.")
            counts[release] = counts.get(release, 0) + count
        kept = sorted(((r, n) for r, n in counts.items() if n), key=lambda entry: repr(entry[0]))
        promises = sorted({(r.unit, r.relation) for r, _ in kept if r.kind != "none"})
        if len(promises) > 1:
            raise CompositionError(
                "One ε cannot cover several units or relations: "
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
        """Whether all noise came from a secure source, not from a seed."""
        return all(release.is_secure for release, _ in self.entries)

    @property
    def promise(self) -> str:
        """The unit and relation that ε protects, in words."""
        if any(release.kind == "none" for release, _ in self.entries):
            return "no promise: something was sent without noise"
        words = next((RELATIONS[r.unit, r.relation] for r, _ in self.entries), "nothing was sent")
        return words if self.is_secure else f"NO PROMISE, the noise came from a seed; else: {words}"

    def epsilon(self, delta: float) -> float:
        """ε that all releases together cost, at this δ."""
        return composed_epsilon(self.costs, delta)

    def to_json(self) -> list[dict[str, Any]]:
        """Plain values for a checkpoint."""
        return [{**release.to_json(), "count": count} for release, count in self.entries]

    @staticmethod
    def from_json(values: Iterable[Mapping[str, Any]]) -> Ledger:
        """The ledger that `to_json` wrote."""
        try:
            return Ledger(tuple((Release.from_json(entry), entry["count"]) for entry in values))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise FormatError(f"The list of releases is invalid ({error}). Restore the file from a backup.") from error


@state("privacy.accounts")
@dataclass(frozen=True, slots=True)
class Accounts:
    """A ledger for each party by name; a party is charged for the rounds in which it uploads."""

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
        """Whether all noise of all parties came from a secure source, not from a seed."""
        return all(ledger.is_secure for ledger in self.ledgers.values())

    def to_json(self) -> dict[str, list[dict[str, Any]]]:
        """Plain values for a checkpoint."""
        return {name: ledger.to_json() for name, ledger in sorted(self.ledgers.items())}

    @staticmethod
    def from_json(values: Mapping[str, Iterable[Mapping[str, Any]]]) -> Accounts:
        """The accounts that `to_json` wrote."""
        if not isinstance(values, Mapping):
            raise FormatError(
                f"Accounts must map parties to ledgers; got {type(values).__name__}. Restore the file from a backup."
            )
        return Accounts({name: Ledger.from_json(entries) for name, entries in values.items()})


@dataclass(frozen=True, slots=True)
class Budget:
    """A privacy budget: the maximum (ε, δ) of one unit over all runs."""

    epsilon: float
    delta: float = 1e-5

    def __post_init__(self) -> None:
        check_budget(self.epsilon, self.delta, needs_delta=False)

    def allows(self, ledger: Ledger, release: Release) -> bool:
        """Return whether one more release stays within the budget; call it before the release is computed."""
        return ledger.after(release).epsilon(self.delta) <= self.epsilon

    def rounds(self, release: Release, spent: Ledger | None = None) -> int:
        """Return how many more releases fit (at most 2⁵⁰); may be 0, unlike `rounds_within`."""
        before = spent or Ledger()
        if release.kind == "none" or not self.allows(before, release):
            return 0
        enough, most = 1, MAX_RELEASES - len(before)
        while 2 * enough <= most and before.after(release, 2 * enough).epsilon(self.delta) <= self.epsilon:
            enough *= 2
        low, high = enough, min(2 * enough, most + 1)
        while high - low > 1:
            middle = (low + high) // 2
            fits = before.after(release, middle).epsilon(self.delta) <= self.epsilon
            low, high = (middle, high) if fits else (low, middle)
        return low
