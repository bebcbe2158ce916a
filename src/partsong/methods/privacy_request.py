"""Differential privacy that a fit can be asked for: about whom, how much of it, and at what clip or bound.

    FederatedNMF(20, method="fedavg", rounds=10, privacy=PartyPrivacy(epsilon=3)).fit(parts)
    FederatedNMF(20, rounds=10, privacy=RowPrivacy(epsilon=3, row_bound=10.0)).fit(parts)

The noise is planned for all rounds before the first one. Theorems and their assumptions: docs/reference/privacy.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any

from partsong.core.interfaces import Program
from partsong.errors import CompositionError, ParameterError
from partsong.methods.averaging import LocalAveraging
from partsong.methods.private import MAX_SIGMAS, PrivateAveraging, PrivateSums, exact_sum_bound
from partsong.privacy.accounting import Accounts, Budget, Ledger, Release, check_relation
from partsong.privacy.calibration import noise_multiplier_for, rounds_within
from partsong.privacy.mechanisms import MECHANISMS, MOST_MULTIPLIER
from partsong.privacy.spending import USUAL_DELTA
from partsong.secure_aggregation.protocol import SecureSum

UNITS = ("row", "party")
REQUIRED = {
    "epsilon": "how much may be told of one unit, over all rounds together",
    "row_bound": "the norm beyond which a row is scaled down; it must come from no data",
}
"""What has to be told of a promise, and what it is."""
PRECISION = 1e-4
"""Relative: to which a multiplier is found after earlier spending; rounded toward more noise."""
MAX_MULTIPLIER, MAX_FACTOR = 1e4, 100
"""A multiplier beyond this, and so many times that of a fresh budget, is no plan."""


@dataclass(frozen=True, slots=True)
class PartyPrivacy:
    """(ε, δ) for all data of a party, over all rounds: each H_p leaves clipped around the model, and noisy.

    `clip`: the most that an H_p with rows of norm 1 may lie from the model; it must come from no data. `kind` is
    "gaussian" or "laplace" (by the L1 norm). `relation` "replace": all data of a party are exchanged for any other;
    "zero-out": its contribution is exchanged for none, at half the noise and for half the promise. With a
    `noise_multiplier` the run has that noise, and ends before the round that would exceed ε. `spent` are the accounts
    of earlier runs on the same data (`FederatedNMF.accounts_`): ε is over them and this run together.
    """

    epsilon: float
    delta: float = USUAL_DELTA
    clip: float = 1.0
    kind: str = "gaussian"
    relation: str = "replace"
    noise_multiplier: float | None = None
    spent: Accounts = field(default_factory=Accounts, hash=False)
    unit: str = field(default="party", init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in MECHANISMS.names:
            raise ParameterError(f"Noise is {' or '.join(MECHANISMS.names)}; got {self.kind!r}.")
        _check(self, self.kind, ("epsilon", "delta", "clip"))
        MECHANISMS[self.kind](self.clip, self.noise_multiplier or 1.0, self.relation)

    def program(self, plain: Program, rounds: int, n_parties: int, is_masked: bool) -> PrivateAveraging:
        """`plain` with noise for so many rounds."""
        if not isinstance(plain, LocalAveraging):
            raise CompositionError(
                f"Privacy of parties is for methods in which each sends its own H. {type(plain).__name__} sends "
                "something else. Take one of these, or RowPrivacy with method='exact'."
            )
        multiplier, most = calibrate_noise(self, self.kind, rounds)
        return PrivateAveraging(plain, MECHANISMS[self.kind](self.clip, multiplier, self.relation), most)


@dataclass(frozen=True, slots=True)
class RowPrivacy:
    """(ε, δ) for every single row of any party, over all rounds: sums over rows leave with noise.

    `row_bound`: the norm beyond which a row is scaled down; it must come from no data. `relation` "add-or-remove": one
    row more or less; "replace": one row exchanged, the number of rows being public. In masked sums each party adds a
    share of the noise, such that half of the parties (rounded up) are enough: the promise then holds against the server
    together with the other half, who are too few to remove masks; without masks each adds all of it, and the promise
    holds against everybody else.
    `noise_multiplier` and `spent` as in `PartyPrivacy`.
    """

    epsilon: float
    row_bound: float
    delta: float = USUAL_DELTA
    relation: str = "add-or-remove"
    noise_multiplier: float | None = None
    spent: Accounts = field(default_factory=Accounts, hash=False)
    unit: str = field(default="row", init=False)

    def __post_init__(self) -> None:
        _check(self, "gaussian", ("epsilon", "delta", "row_bound"))
        PrivateSums(1, self.noise_multiplier or 1.0, self.row_bound, relation=self.relation)

    def program(self, plain: Program, rounds: int, n_parties: int, is_masked: bool) -> PrivateSums:
        """Noisy sums of the rank of `plain` for so many rounds; of what else `plain` does, nothing is taken over."""
        multiplier, most = calibrate_noise(self, "gaussian", rounds)
        hidden: Any = (
            {"shares": min_honest_parties(n_parties), "sum_bound": exact_sum_bound(n_parties)} if is_masked else {}
        )
        return PrivateSums(plain.rank, multiplier, self.row_bound, relation=self.relation, max_releases=most, **hidden)


Privacy = PartyPrivacy | RowPrivacy


def _check(privacy: Privacy, kind: str, names: tuple[str, ...]) -> None:
    """Refuse what is no promise; numbers of any kind become plain ones, as files hold them."""
    for name in (*names, "noise_multiplier"):
        value = getattr(privacy, name)
        if name == "noise_multiplier" and value is None:
            continue
        if not isinstance(value, Real) or isinstance(value, bool):
            raise ParameterError(f"{name} must be a number; got {value!r}.", parameter=name)
        try:
            object.__setattr__(privacy, name, float(value))
        except OverflowError as error:
            raise ParameterError(
                f"{name} must be a number below 1e308; got a whole number beyond that.", parameter=name
            ) from error
    Budget(privacy.epsilon, privacy.delta)
    if not isinstance(privacy.relation, str):
        raise ParameterError(f"relation must be a word; got {privacy.relation!r}.", parameter="relation")
    check_relation(privacy.unit, privacy.relation)
    if privacy.noise_multiplier is not None:
        Release(kind, privacy.noise_multiplier, privacy.unit, privacy.relation)
    if not isinstance(privacy.spent, Accounts):
        told = type(privacy.spent).__name__
        raise ParameterError(
            f"spent must be the Accounts of earlier runs (`accounts_` of a fitted model); got {told}.",
            parameter="spent",
        )


def min_honest_parties(n_parties: int) -> int:
    """⌈n/2⌉: all but those who, with the server, may work together against a masked sum of majority 1/2."""
    return math.ceil(n_parties / 2)


def build_secure_sum(privacy: Privacy | None, n_parties: int, bound: float | None = None) -> Any:
    """The masked sum of a fit; whole numbers under noise shares are summed exactly, over all parties.

    Noisy numbers are within its bounds whatever the data: a refusal would tell of them.
    """
    bounds: dict[str, Any] = {} if bound is None else {"bound": bound}
    if isinstance(privacy, RowPrivacy):
        exact = dict.fromkeys(("gram", "cross"), exact_sum_bound(n_parties))
        return SecureSum(**bounds, bounds=exact, fewest=max(3, n_parties))
    masks = SecureSum(**bounds)
    return masks if privacy is None else replace(masks, bounds={"H": max(masks.bound, upload_bound(privacy))})


def upload_bound(privacy: PartyPrivacy) -> float:
    """What no entry of a noisy H_p exceeds: 1 in the model, the clip around it, and the most noise of any plan."""
    return 1 + privacy.clip * (1 + 2 * MOST_MULTIPLIER * MAX_SIGMAS)


def calibrate_noise(privacy: Privacy, kind: str, rounds: int) -> tuple[float, int]:
    """The noise multiplier, and the most releases that each party may make with it."""
    histories = list(_ledgers(privacy.spent))
    if privacy.noise_multiplier is None:
        plans = [_multiplier_after(privacy, kind, rounds, spent) for spent in histories]
        return max(plans), rounds
    release = Release(kind, privacy.noise_multiplier, privacy.unit, privacy.relation)
    fitting = (rounds_within(privacy.epsilon, privacy.delta, release, spent) for spent in histories)
    return privacy.noise_multiplier, min(fitting)


def _ledgers(spent: Accounts) -> Iterator[Ledger]:
    """What single parties have spent before; a party that is not among them has spent nothing."""
    yield from dict.fromkeys((Ledger(), *spent.ledgers.values()))


def _multiplier_after(privacy: Privacy, kind: str, rounds: int, spent: Ledger) -> float:
    if not len(spent):
        return noise_multiplier_for(privacy.epsilon, privacy.delta, rounds, kind)

    def fits(multiplier: float) -> bool:
        release = Release(kind, multiplier, privacy.unit, privacy.relation)
        return spent.after(release, rounds).epsilon(privacy.delta) <= privacy.epsilon

    fresh = noise_multiplier_for(privacy.epsilon, privacy.delta, rounds, kind)
    low = high = fresh
    while not fits(high):
        low, high = high, 2 * high
        if high > max(MAX_MULTIPLIER, MAX_FACTOR * fresh):
            raise ParameterError(
                f"A budget that allows no round: of epsilon={privacy.epsilon:g} at delta={privacy.delta:g}, "
                f"{spent.epsilon(privacy.delta):.4g} was spent by earlier runs. Give a larger epsilon, or stop here.",
                parameter="epsilon",
            )
    while high - low > PRECISION * high:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def privacy_to_dict(privacy: Privacy | None) -> dict[str, Any]:
    """The promise as plain values for a model file; what was spent before is told by its accounts."""
    if privacy is None:
        return {}
    told: dict[str, Any] = {"unit": privacy.unit, "epsilon": privacy.epsilon, "delta": privacy.delta}
    told |= {"relation": privacy.relation, "noise_multiplier": privacy.noise_multiplier}
    if isinstance(privacy, PartyPrivacy):
        return {**told, "clip": privacy.clip, "kind": privacy.kind}
    return {**told, "row_bound": privacy.row_bound}


def privacy_from_dict(told: Any) -> Privacy | None:
    """The promise that `privacy_to_dict` wrote down."""
    if not told:
        return None
    if not isinstance(told, Mapping) or told.get("unit") not in UNITS:
        raise ParameterError("privacy is not told as a unit (row or party) with its epsilon.")
    values = {name: value for name, value in told.items() if name != "unit"}
    kind = PartyPrivacy if told["unit"] == "party" else RowPrivacy
    known = {one.name: one for one in fields(kind) if one.init}
    foreign = sorted(name for name in values if name not in known)
    if foreign:
        raise ParameterError(
            f'privacy with unit = "{told["unit"]}" has no {" and no ".join(foreign)}. Leave it out, or take the other '
            f"unit; known are {', '.join(name for name in known if name != 'spent')}."
        )
    missing = [name for name in REQUIRED if name in known and name not in values]
    if missing:
        raise ParameterError(f'privacy with unit = "{told["unit"]}" needs {missing[0]}: {REQUIRED[missing[0]]}.')
    return kind(**values)
