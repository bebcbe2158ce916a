"""Differential privacy of a fit: the unit (row or party), the budget (ε, δ), and the clip or row bound.

    FederatedNMF(20, method="fedavg", rounds=10, privacy=PartyPrivacy(epsilon=3)).fit(parts)
    FederatedNMF(20, rounds=10, privacy=RowPrivacy(epsilon=3, row_bound=10.0)).fit(parts)

The noise is calibrated for all rounds before the first one. Theorems and their assumptions: docs/reference/privacy.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any, Literal, get_args

from partsong.core.interfaces import Program
from partsong.core.parameters import whole_number
from partsong.errors import CompositionError, ParameterError
from partsong.methods.averaging import LocalAveraging
from partsong.methods.moment import BucketedMoment, CentredMoment, MomentProgram, NoisyMoment
from partsong.methods.private import EXACT_SUM_BOUND, MAX_SIGMAS, PrivateAveraging, PrivateSums, exact_sum_bound
from partsong.privacy.accounting import Accounts, Budget, Ledger, Release, check_relation
from partsong.privacy.calibration import noise_multiplier_for, rounds_within
from partsong.privacy.forecast import HYBRID_TAU, MAX_COLUMNS, Forecast, guessed_shares
from partsong.privacy.mechanisms import MAX_NOISE_MULTIPLIER, MECHANISMS
from partsong.privacy.second_moment import MeanOfDirections, MomentOfBuckets, MomentOfParty, MomentOfRows, Noise
from partsong.privacy.spending import DEFAULT_DELTA
from partsong.secure_aggregation.protocol import SecureSum

UNITS = ("row", "party")
REQUIRED = {
    "epsilon": "the privacy budget of one unit, over all rounds together",
    "row_bound": "rows of a larger norm are scaled down to it; it must not depend on the data",
}
"""Required settings, and what they mean."""
ROW_SETTINGS = ("row_bound", "mechanism", "centre_radius", "buckets", "n_rows", "n_features")
"""Settings of privacy of rows alone."""
Mechanism = Literal["auto", "moment", "centred", "hybrid", "rounds"]
ROW_MECHANISMS: tuple[str, ...] = get_args(Mechanism)
HYBRID_SHARE, HYBRID_ROUNDS = 0.5, 3
"""Share of μ² that a hybrid spends on the moment, and its noisy rounds afterwards."""
AUTO_BUCKETS = 200
"""Buckets that "auto" takes with more than MAX_COLUMNS columns: better than noisy rounds on all data tried."""
MEAN_SHARE = 0.3
"""Share of μ² that the centred moment spends on the mean direction."""
PRECISION = 1e-4
"""Relative precision of a multiplier after earlier spending; rounded towards more noise."""
MAX_MULTIPLIER, MAX_FACTOR = 1e4, 100
"""Refuse a multiplier above the first, and above this many times that of a fresh budget."""


@dataclass(frozen=True, slots=True)
class PrivacyPlan:
    """What a private run will do: its mechanism (None: noisy H_p), why "auto" chose it, and a forecast, if any."""

    mechanism: str | None
    reason: str = ""
    forecast: Forecast | None = None
    buckets: int | None = None

    def is_too_little(self, rank: int) -> bool:
        """Whether the forecast is less than a model of this rank needs."""
        return self.forecast is not None and (self.forecast.is_noise or (rank > 1 and self.forecast.is_mean))

    def __str__(self) -> str:
        return " ".join(part for part in ("" if self.forecast is None else str(self.forecast), self.reason) if part)


@dataclass(frozen=True, slots=True)
class PartyPrivacy:
    """(ε, δ)-differential privacy of all data of a party, over all rounds: each H_p is clipped and noised.

    With the method "moment", each X_pᵀX_p is clipped and noised instead, once; with secure aggregation each party then
    adds a share of the noise, as with `RowPrivacy`. A noisy H_p carries all of the noise in any case.

    Parameters
    ----------
    epsilon : float
        Budget of each party over all rounds together.
    delta : float, default=1e-5
        Probability with which the guarantee may fail.
    clip : float, default=1.0
        Largest distance of an H_p with rows of norm 1 from the model, or for the method "moment" the largest norm of
        X_pᵀX_p. It must not depend on the data.
    kind : {"gaussian", "laplace"}, default="gaussian"
        Noise mechanism; "laplace" clips and adds noise by the L1 norm.
    relation : {"replace", "zero-out"}, default="replace"
        Neighboring datasets: all data of one party are replaced by any other data, or its contribution by zero. The
        second needs half the noise and is half the guarantee.
    noise_multiplier : float or None, default=None
        Use this noise, and end before the round that would exceed `epsilon`. None calibrates the noise to the rounds.
    spent : Accounts, default=Accounts()
        What earlier runs on the same data have spent (`FederatedNMF.accounts_`); `epsilon` covers them and this run.
    """

    epsilon: float
    delta: float = DEFAULT_DELTA
    clip: float = 1.0
    kind: str = "gaussian"
    relation: str = "replace"
    noise_multiplier: float | None = None
    spent: Accounts = field(default_factory=Accounts, hash=False)
    unit: str = field(default="party", init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in MECHANISMS.names:
            raise ParameterError(f"kind must be {' or '.join(MECHANISMS.names)}; got {self.kind!r}.", parameter="kind")
        _check(self, self.kind, ("epsilon", "delta", "clip"))
        MECHANISMS[self.kind](self.clip, self.noise_multiplier or 1.0, self.relation)

    def program(
        self,
        plain: Program,
        rounds: int,
        n_parties: int,
        is_masked: bool,
        n_features: int | None = None,
        *,
        one_release: bool = False,
    ) -> PrivateAveraging | MomentProgram:
        """Return `plain` with noise for this number of rounds; for the method "moment", one noisy release."""
        if isinstance(plain, MomentProgram):
            noise = self._moment_noise(min_honest_parties(n_parties) if is_masked else 1)
            bound = exact_sum_bound(n_parties) if is_masked else EXACT_SUM_BOUND
            return MomentProgram(plain.rank, NoisyMoment(MomentOfParty(self.clip, noise)), sum_bound=bound)
        if not isinstance(plain, LocalAveraging):
            raise CompositionError(
                f"PartyPrivacy needs a method whose parties send H_p; {type(plain).__name__} sends other arrays. Use "
                "such a method, or RowPrivacy with method='exact'."
            )
        multiplier, most = calibrate_noise(self, self.kind, rounds)
        return PrivateAveraging(plain, MECHANISMS[self.kind](self.clip, multiplier, self.relation), most)

    def require_moment(self) -> None:
        """Refuse settings that the method "moment" does not have."""
        if self.kind != "gaussian":
            raise CompositionError(
                f'method="moment" releases with Gaussian noise only; got kind={self.kind!r}. Use kind="gaussian".'
            )

    def _moment_noise(self, shares: int) -> Noise:
        self.require_moment()
        return Noise(calibrate_noise(self, self.kind, 1)[0], self.relation, shares, "party")

    def plan(
        self, rank: int, n_parties: int, is_masked: bool, n_features: int, *, one_release: bool = False
    ) -> PrivacyPlan:
        """Return the mechanism of a run and its forecast, for the method "moment" (`one_release`)."""
        if not one_release:
            return PrivacyPlan(None)
        noise = self._moment_noise(min_honest_parties(n_parties) if is_masked else 1)
        sigma = noise.total(MomentOfParty(1.0, noise).sigma, n_parties)
        about: dict[str, Any] = {"protects": "party", "in_shares": is_masked}
        return PrivacyPlan("moment", "", Forecast(n_parties, n_features, sigma, self.epsilon, **about))


@dataclass(frozen=True, slots=True)
class RowPrivacy:
    """(ε, δ)-differential privacy of every single row of any party over the whole run: sums over rows carry noise.

    With secure aggregation each party adds a share of the noise; the shares of half of the parties (rounded up) give
    all of it. The guarantee then holds against the server together with the other half, who are too few to remove
    masks. Without secure aggregation each party adds all of the noise, and the guarantee holds against everybody else.

    Parameters
    ----------
    epsilon : float
        Budget of each row over the whole run.
    row_bound : float
        Rows of a larger norm are scaled down to it. It must not depend on the data. For "moment" and "hybrid" it may be
        so small that nearly all rows are cut: only their directions matter for H.
    delta : float, default=1e-5
        Probability with which the guarantee may fail.
    relation : {"add-or-remove", "replace"}, default="add-or-remove"
        Neighboring datasets: one row more or less, or one row replaced, with a public number of rows.
    noise_multiplier : float or None, default=None
        Use this noise: of each round for "rounds", of a single release for the others, which divide it among theirs.
        "rounds" ends before the round that would exceed `epsilon`. None calibrates the noise to the budget.
    spent : Accounts, default=Accounts()
        What earlier runs on the same data have spent (`FederatedNMF.accounts_`); `epsilon` covers them and this run.
    mechanism : {"auto", "moment", "centred", "hybrid", "rounds"}, default="auto"
        "moment" releases Σ x xᵀ once, and H follows from it; any rank can then be tried at no cost. "hybrid" spends
        half of the budget on it, and half on three noisy rounds. "centred" first releases a mean direction; for data
        with one dominant direction, such as expression profiles. "rounds" sends noisy WᵀW and WᵀX in each of `rounds`
        rounds. "auto" takes the moment, or, with `n_rows`, what public numbers say is best; never "centred".
    centre_radius : float, default=0.1
        "centred" only: rows of norm 1 are cut to this distance from the mean direction. Use 0.2 below ε = 1.
    buckets : int or None, default=None
        "moment" with many columns: release sums over this number of buckets of columns instead of all products.
    n_rows : int or None, default=None
        A public lower bound of the number of rows of all parties, for "auto" and the forecast. It must not be computed
        from the data.
    n_features : int or None, default=None
        The number of columns, for "auto" and the forecast before the data are known, as in experiment.toml.
    """

    epsilon: float
    row_bound: float
    delta: float = DEFAULT_DELTA
    relation: str = "add-or-remove"
    noise_multiplier: float | None = None
    spent: Accounts = field(default_factory=Accounts, hash=False)
    mechanism: str = "auto"
    centre_radius: float = 0.1
    buckets: int | None = None
    n_rows: int | None = None
    n_features: int | None = None
    unit: str = field(default="row", init=False)

    def __post_init__(self) -> None:
        _check(self, "gaussian", ("epsilon", "delta", "row_bound", "centre_radius"))
        PrivateSums(1, self.noise_multiplier or 1.0, self.row_bound, relation=self.relation)
        if self.mechanism not in ROW_MECHANISMS:
            raise ParameterError(
                f"mechanism must be one of {', '.join(ROW_MECHANISMS)}; got {self.mechanism!r}.", parameter="mechanism"
            )
        if not 0 < self.centre_radius <= 2:
            raise ParameterError(
                f"centre_radius must be above 0 and at most 2, the largest distance of two rows of norm 1; got "
                f"{self.centre_radius!r}. Use 0.1.",
                parameter="centre_radius",
            )
        for name in ("n_rows", "n_features", "buckets"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        if self.buckets is not None and self.mechanism != "moment":
            raise ParameterError(
                f'buckets needs mechanism="moment"; got mechanism={self.mechanism!r}. Use that one, or remove it.',
                parameter="buckets",
            )

    @property
    def sets_exchanges(self) -> bool:
        """Whether the mechanism alone says how many exchanges there are, whatever `rounds` is."""
        return self.mechanism != "rounds"

    def forecast(
        self,
        n_features: int,
        n_parties: int = 1,
        *,
        is_masked: bool = False,
        n_rows: int | None = None,
        mean_error: float | None = None,
        pooled_error: float | None = None,
        rank: int | None = None,
    ) -> Forecast:
        """Return what to expect of the first release, from public numbers alone, before anything is spent.

        With public guesses of `mean_error` and `pooled_error`, the relative errors of the mean profile alone and of a
        pooled NMF of this `rank`, it says how many directions will be visible.
        """
        multiplier, _ = calibrate_noise(self, "gaussian", 1)
        shares = min_honest_parties(n_parties) if is_masked else 1
        guesses = (rank, mean_error, pooled_error)
        guess: Any = None if None in guesses else guesses
        if guess is None and guesses != (None, None, None):
            raise ParameterError(
                "mean_error, pooled_error and rank belong together. Pass all three, or none.", parameter="mean_error"
            )
        if guess is not None:
            guessed_shares(n_features, *guess)

        def sigma(share: float, sensitivity: float) -> float:
            noise = Noise(multiplier / math.sqrt(share), self.relation, shares)
            return noise.total(noise.scale(sensitivity), n_parties)

        n_rows, replaced = self.n_rows if n_rows is None else n_rows, math.sqrt(2) if self.relation == "replace" else 1
        asked: dict[str, Any] = {"n_rows": n_rows, "n_features": n_features, "epsilon": self.epsilon, "guess": guess}
        if self.mechanism == "centred":
            radius, mean = self.centre_radius**2, MeanOfDirections(Noise(1.0, self.relation)).sensitivity
            asked["mean_noise"] = math.sqrt(n_features) * sigma(MEAN_SHARE, mean)
            return Forecast(sigma=sigma(1 - MEAN_SHARE, replaced * radius), largest_share=min(1.0, radius), **asked)
        share = HYBRID_SHARE if self.mechanism == "hybrid" else 1.0
        return Forecast(sigma=sigma(share, replaced), buckets=self.buckets, **asked)

    def plan(
        self,
        rank: int,
        n_parties: int,
        is_masked: bool,
        n_features: int | None,
        *,
        one_release: bool = False,
    ) -> PrivacyPlan:
        """Return the mechanism of a run, with the reason if "auto" chose it, and its forecast.

        "auto" refuses what the forecast says is only noise. `one_release`: it takes no noisy rounds, as for several
        ranks.
        """
        n_features = self.n_features if n_features is None else n_features
        if self.mechanism == "auto" and n_features is not None and n_features > MAX_COLUMNS:
            wide = replace(self, mechanism="moment", buckets=AUTO_BUCKETS)
            of_buckets = wide.forecast(n_features, n_parties, is_masked=is_masked)
            if of_buckets.n_rows is not None:
                of_buckets.require(rank)
            why = f"over {AUTO_BUCKETS} buckets of columns, since {n_features} columns are more than {MAX_COLUMNS}"
            return PrivacyPlan("moment", f'Mechanism "auto" takes one release {why}.', of_buckets, AUTO_BUCKETS)
        forecast = None if n_features is None else self.forecast(n_features, n_parties, is_masked=is_masked)
        if self.mechanism != "auto":
            plain = None if self.mechanism == "rounds" else forecast
            return PrivacyPlan(self.mechanism, "", plain, self.buckets)
        moment = 'Mechanism "auto" takes one release of the second moment'
        if forecast is None or forecast.n_rows is None:
            why = "n_rows, a public lower bound of the number of rows, would let it choose and make a forecast"
            return PrivacyPlan("moment", f"{moment}; {why}.", forecast)
        forecast.require(rank)
        if forecast.mechanism == "moment":
            return PrivacyPlan("moment", f"{moment}, since τ is at least {HYBRID_TAU}.", forecast)
        if one_release:
            return PrivacyPlan("moment", f"{moment}, from which all ranks follow.", forecast)
        masked, hybrid = {"is_masked": is_masked}, replace(self, mechanism="hybrid")
        why = f'Mechanism "auto" takes one release and {HYBRID_ROUNDS} noisy rounds, since τ is below {HYBRID_TAU}.'
        return PrivacyPlan("hybrid", why, hybrid.forecast(forecast.n_features, n_parties, **masked))

    def program(
        self,
        plain: Program,
        rounds: int,
        n_parties: int,
        is_masked: bool,
        n_features: int | None = None,
        *,
        one_release: bool = False,
    ) -> PrivateSums | MomentProgram:
        """Return the noisy program with the rank of `plain`; its other options are ignored.

        `rounds` is for "rounds" only. `n_features`: the number of columns, if it is known already. `one_release`:
        "auto" takes no noisy rounds.
        """
        shares = min_honest_parties(n_parties) if is_masked else 1
        hidden: Any = {"sum_bound": exact_sum_bound(n_parties)} if is_masked else {}
        one_release = one_release or isinstance(plain, MomentProgram)
        plan = self.plan(plain.rank, n_parties, is_masked, n_features, one_release=one_release)
        name, buckets = plan.mechanism, plan.buckets
        if isinstance(plain, MomentProgram):
            self.require_moment()
        if buckets is not None and n_features is not None and buckets > n_features:
            raise ParameterError(
                f"buckets must be at most the number of columns, {n_features}; got {buckets}. Use fewer, or none.",
                parameter="buckets",
            )
        if name == "rounds":
            multiplier, most = calibrate_noise(self, "gaussian", rounds)
            return self._rounds(plain.rank, multiplier, most, shares=shares, **hidden)
        multiplier, _ = calibrate_noise(self, "gaussian", 1)

        def noise(share: float) -> Noise:
            return Noise(multiplier / math.sqrt(share), self.relation, shares)

        if name == "centred":
            residual = MomentOfRows(self.centre_radius, noise(1 - MEAN_SHARE), is_signed=True)
            return MomentProgram(plain.rank, CentredMoment(MeanOfDirections(noise(MEAN_SHARE)), residual), **hidden)
        if buckets is not None:
            bucketed = BucketedMoment(MomentOfBuckets(self.row_bound, buckets, noise(1.0)))
            return MomentProgram(plain.rank, bucketed, **hidden)
        if name == "moment":
            return MomentProgram(plain.rank, NoisyMoment(MomentOfRows(self.row_bound, noise(1.0))), **hidden)
        first = NoisyMoment(MomentOfRows(self.row_bound, noise(HYBRID_SHARE)))
        per_round = multiplier / math.sqrt((1 - HYBRID_SHARE) / HYBRID_ROUNDS)
        later = self._rounds(plain.rank, per_round, None, shares=shares, **hidden)
        return MomentProgram(plain.rank, first, later, HYBRID_ROUNDS, **hidden)

    def require_moment(self) -> None:
        """Refuse settings that the method "moment" does not have."""
        if self.mechanism == "rounds":
            raise ParameterError(
                'mechanism="rounds" needs method="exact": method="moment" has no rounds. Use that method, or '
                'mechanism="moment".',
                parameter="mechanism",
            )

    def _rounds(self, rank: int, multiplier: float, most: int | None, **hidden: Any) -> PrivateSums:
        return PrivateSums(rank, multiplier, self.row_bound, relation=self.relation, max_releases=most, **hidden)


Privacy = PartyPrivacy | RowPrivacy


def _check(privacy: Privacy, kind: str, names: tuple[str, ...]) -> None:
    """Validate settings; numbers of any type become Python floats, as in files."""
    for name in (*names, "noise_multiplier"):
        value = getattr(privacy, name)
        if name == "noise_multiplier" and value is None:
            continue
        if not isinstance(value, Real) or isinstance(value, bool):
            raise ParameterError(f"{name} must be a number; got {value!r}.", parameter=name)
        try:
            object.__setattr__(privacy, name, float(value))
        except OverflowError as error:
            raise ParameterError(f"{name} must be below 1e308; got a larger whole number.", parameter=name) from error
    Budget(privacy.epsilon, privacy.delta)
    if not isinstance(privacy.relation, str):
        raise ParameterError(f"relation must be a string; got {privacy.relation!r}.", parameter="relation")
    check_relation(privacy.unit, privacy.relation)
    if privacy.noise_multiplier is not None:
        Release(kind, privacy.noise_multiplier, privacy.unit, privacy.relation)
    if not isinstance(privacy.spent, Accounts):
        found = type(privacy.spent).__name__
        raise ParameterError(
            f"spent must be the Accounts of earlier runs (`accounts_` of a fitted model); got {found}.",
            parameter="spent",
        )


def min_honest_parties(n_parties: int) -> int:
    """⌈n/2⌉: the parties that remain if as many as a masked sum tolerates collude with the server."""
    return math.ceil(n_parties / 2)


def build_secure_sum(
    privacy: Privacy | None, n_parties: int, bound: float | None = None, *, in_shares: bool = False
) -> Any:
    """Build the secure sum of a fit; with shares of noise, integers are summed exactly over all parties.

    `in_shares`: parties add shares of the noise to what they send, as with RowPrivacy, or PartyPrivacy of a moment.
    Its bounds hold noisy numbers whatever the data are, because a refusal would reveal something about the data.
    """
    bounds: dict[str, Any] = {} if bound is None else {"bound": bound}
    if isinstance(privacy, RowPrivacy):
        exact = dict.fromkeys(("gram", "cross", "moment", "mean"), exact_sum_bound(n_parties))
        return SecureSum(**bounds, bounds=exact, fewest=max(3, n_parties))
    masks = SecureSum(**bounds)
    if privacy is None:
        return masks
    bounded = {"H": max(masks.bound, upload_bound(privacy)), "moment": exact_sum_bound(n_parties)}
    return replace(masks, bounds=bounded, fewest=max(3, n_parties) if in_shares else masks.fewest)


def upload_bound(privacy: PartyPrivacy) -> float:
    """Return a bound of the entries of a noisy H_p: 1 for the model, the clip, and the largest possible noise."""
    return 1 + privacy.clip * (1 + 2 * MAX_NOISE_MULTIPLIER * MAX_SIGMAS)


def calibrate_noise(privacy: Privacy, kind: str, rounds: int) -> tuple[float, int]:
    """Return the noise multiplier and the most releases each party may make with it."""
    histories = list(_ledgers(privacy.spent))
    if privacy.noise_multiplier is None:
        plans = [_multiplier_after(privacy, kind, rounds, spent) for spent in histories]
        return max(plans), rounds
    release = Release(kind, privacy.noise_multiplier, privacy.unit, privacy.relation)
    fitting = (rounds_within(privacy.epsilon, privacy.delta, release, spent) for spent in histories)
    return privacy.noise_multiplier, min(fitting)


def _ledgers(spent: Accounts) -> Iterator[Ledger]:
    """The ledgers of single parties; a party without one has spent nothing."""
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
                "The privacy budget allows no further round: earlier runs have spent "
                f"{spent.epsilon(privacy.delta):.4g} of epsilon={privacy.epsilon:g} at delta={privacy.delta:g}. Use a "
                "larger epsilon, or stop here.",
                parameter="epsilon",
            )
    while high - low > PRECISION * high:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def privacy_to_dict(privacy: Privacy | None) -> dict[str, Any]:
    """Return the request as plain data for a model file; earlier spending is stored in its accounts."""
    if privacy is None:
        return {}
    plain: dict[str, Any] = {"unit": privacy.unit, "epsilon": privacy.epsilon, "delta": privacy.delta}
    plain |= {"relation": privacy.relation, "noise_multiplier": privacy.noise_multiplier}
    if isinstance(privacy, PartyPrivacy):
        return {**plain, "clip": privacy.clip, "kind": privacy.kind}
    own = {name: getattr(privacy, name) for name in ROW_SETTINGS}
    return {**plain, **{name: value for name, value in own.items() if value is not None}}


def privacy_from_dict(plain: Any) -> Privacy | None:
    """Return the request that `privacy_to_dict` has written."""
    if not plain:
        return None
    if not isinstance(plain, Mapping) or plain.get("unit") not in UNITS:
        raise ParameterError("privacy must be a mapping with unit (row or party) and epsilon.")
    values = {name: value for name, value in plain.items() if name != "unit"}
    kind = PartyPrivacy if plain["unit"] == "party" else RowPrivacy
    known = {one.name: one for one in fields(kind) if one.init}
    foreign = sorted(name for name in values if name not in known)
    if foreign:
        raise ParameterError(
            f'privacy with unit = "{plain["unit"]}" has no {" and no ".join(foreign)}. Remove it, or use the other '
            f"unit. Known settings: {', '.join(name for name in known if name != 'spent')}."
        )
    missing = [name for name in REQUIRED if name in known and name not in values]
    if missing:
        raise ParameterError(f'privacy with unit = "{plain["unit"]}" needs {missing[0]}: {REQUIRED[missing[0]]}.')
    return kind(**values)
