"""Differentially private programs: averaging of noisy H_p (unit: party) and noisy sums over rows (unit: row)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from partsong import kernels
from partsong.aggregation.alignment import Assignment
from partsong.aggregation.linear import Sum
from partsong.core.interfaces import (
    Aggregation,
    Array,
    ArraySpec,
    Layout,
    Message,
    ProgramBase,
    RowSolver,
    Shard,
    Traits,
    Turn,
)
from partsong.core.parameters import whole_number
from partsong.core.states import state
from partsong.core.streams import stream
from partsong.data.conversion import to_values
from partsong.errors import (
    BudgetSpent,
    CompositionError,
    DataError,
    DivergenceError,
    ParameterError,
    PartsongError,
    PartyError,
)
from partsong.methods.averaging import AveragingPartyState, AveragingServerState, LocalAveraging, WholeUpload
from partsong.privacy.accounting import Release
from partsong.privacy.calibration import noise_multiplier_for
from partsong.privacy.mechanisms import MECHANISMS, Mechanism, NoNoise
from partsong.privacy.randomness import Source, system_source
from partsong.privacy.row_level import (
    ROW_BITS,
    WEIGHT_BITS,
    NoisyRowSums,
    RowBounds,
    RowSums,
    quantize_model,
    row_weights,
    validate_model,
)
from partsong.solvers.initialization import random_columns
from partsong.solvers.squared_error import SquaredError
from partsong.solvers.update_rules import CoordinateDescent


def system_noise(party: str, release: int) -> Source:
    """The operating system's generator, for every release of every party."""
    return system_source


@state("private.averaging-party")
@dataclass(frozen=True, slots=True)
class PrivateAveragingPartyState:
    """The party's state in the inner program, and the number of noisy messages it has sent."""

    own: AveragingPartyState
    releases: int = 0


@dataclass(frozen=True, slots=True)
class PrivateAveraging(ProgramBase):
    """`program` with differential privacy for parties: each H_p is clipped around the model and noised.

        at a party:    (W_p, H_p) as in `program`; rows of H_p of norm 1, in the order of the model's
        sent:          mechanism(H_p; H) (k × m), weight 1                 broadcast: H (k × m) with rows of norm 1
        at the server: aggregation as in `program`, max(0, ·), rows of norm 1: post-processing, which costs nothing

    **Theorem.** Let T be the number of rounds in which a party sends, at most `max_releases`. All that it ever sends
    are T adaptive uses of the mechanism, each on a vector that depends on its data and on what was public before. Its
    data are therefore protected, in the mechanism's relation, by the composition of T releases (`accounting.Ledger`).
    Weights, numbers of rows, errors and drifts are not sent; the message weight is 1. After `max_releases` messages a
    party refuses to work. Not protected: whether and when a party takes part, its running time, its number type, and
    whether it fails. The reason of a failure is protected: the error that leaves the party contains no number from its
    data.

    A simulation also knows errors in a history and weights of all parties. The program does not release these; stopping
    or choosing rounds by them would.
    """

    program: LocalAveraging
    mechanism: Mechanism
    max_releases: int
    source: Callable[[str, int], Source] = system_noise

    def __post_init__(self) -> None:
        if (
            not isinstance(self.max_releases, (int, np.integer))
            or isinstance(self.max_releases, bool)
            or self.max_releases < 1
        ):
            raise ParameterError(f"max_releases must be a whole number ≥ 1; got {self.max_releases!r}.")
        if isinstance(self.mechanism, NoNoise):
            raise CompositionError("NoNoise adds no noise. Use another mechanism, or run the program itself.")
        if not isinstance(self.program, LocalAveraging):
            raise CompositionError(
                f"{type(self.program).__name__} is not a LocalAveraging program: its parties do not send one H_p "
                "each, which is what gets clipped and noised. Use a LocalAveraging method, or row_private for "
                "privacy of rows."
            )
        if not isinstance(self.program.upload, WholeUpload):
            raise CompositionError(
                f"{type(self.program.upload).__name__} also sends counts, which would carry no noise. Use a method "
                "whose parties send H_p only."
            )

    @property
    def rank(self) -> int:
        return self.program.rank

    @property
    def solver(self) -> RowSolver:
        return self.program.solver

    @property
    def aggregation(self) -> Aggregation:
        return self.program.aggregation

    @property
    def traits(self) -> Traits:
        return Traits(release=self.release, max_releases=self.max_releases)

    @property
    def release(self) -> Release:
        """The privacy cost of one upload; marked insecure if another noise source was passed."""
        found = self.mechanism.release
        return found if self.source is system_noise else replace(found, is_secure=False)

    def start_party(self, shard: Shard, layout: Layout) -> PrivateAveragingPartyState:
        return PrivateAveragingPartyState(self.program.start_party(shard, layout))

    def start_server(self, layout: Layout) -> tuple[AveragingServerState, Message]:
        """H from the shared seed with rows of norm 1; always broadcast, because uploads are clipped around it."""
        server, model = self.program.start_server(layout)
        server = _on_unit_rows(server, server.model["H"])
        return server, Message({**model.arrays, "H": server.model["H"]})

    def local(
        self, shard: Shard, party: PrivateAveragingPartyState, model: Message
    ) -> tuple[PrivateAveragingPartyState, Message]:
        if party.releases >= self.max_releases:
            raise BudgetSpent(
                f"Party {shard.name!r} has sent {party.releases} noisy messages, the most that its privacy budget "
                "allows. Nothing was computed or sent. End the run with the current model; more rounds cost more ε."
            )
        validate_model(shard.name, model["H"], (self.rank, shard.matrix.shape[1]))
        try:
            own, H = self._iterate(shard, party.own, model)
            reference = np.asarray(kernels.of(H).to_numpy(shard.matrix.native(model["H"])))
            ordered = Assignment().plan(reference, kernels.of(H).to_numpy(H)).apply(H)
            noisy = self.mechanism.protect({"H": ordered}, {"H": reference}, self.source(shard.name, party.releases))
        except PartsongError as error:
            raise _redacted(shard.name, error) from error
        return PrivateAveragingPartyState(own, party.releases + 1), Message(noisy, 1.0)

    def _iterate(self, shard: Shard, party: AveragingPartyState, model: Message) -> tuple[AveragingPartyState, Array]:
        """The program's own iterations, and H_p (k × m) with rows of norm 1."""
        own, upload = self.program.local(shard, party, model)
        H = upload["H"]
        if not np.isfinite(np.asarray(kernels.of(H).to_numpy(H))).all():
            raise DivergenceError("The local iteration diverged.")
        return _with_unit_rows(own, H)

    def finish(self, server: AveragingServerState, aggregate: Message) -> tuple[AveragingServerState, Message]:
        """Clip the aggregate at zero, finish as in `program`, scale rows to norm 1; zero rows keep their direction.

        The server clips, not the party: clipping noise at the party would leave a bias that no number of parties
        averages out.
        """
        H = aggregate["H"]
        positive = kernels.of(H).cast(np.maximum(kernels.of(H).to_numpy(H), 0), H)
        after, model = self.program.finish(server, Message({**aggregate.arrays, "H": positive}, aggregate.weight))
        after = _on_unit_rows(after, server.model["H"])
        return after, Message({**model.arrays, "H": after.model["H"]})

    def components(self, server: AveragingServerState) -> Array:
        return self.program.components(server)

    def upload_spec(self, layout: Layout) -> tuple[Mapping[str, ArraySpec], ...]:
        stated = self.program.upload_spec(layout)
        return tuple({name: replace(form, non_negative=False) for name, form in kind.items()} for kind in stated)

    def turn(self, model: Message) -> Turn:
        return self.program.turn(model)


def _redacted(party: str, error: PartsongError) -> PartyError:
    """The error to raise: engines send its text to everybody, so numbers in it would be released without noise."""
    kind = DivergenceError if isinstance(error, DivergenceError) else PartyError
    return kind(
        f"Party {party!r} failed in its local iterations ({type(error).__name__}); nothing was sent. The reason may "
        "contain numbers from its data, so it is only shown at the party, as the cause of this error. Try other "
        "steps, or rescale the data there."
    )


def _row_norms(H: Array) -> Any:
    """Norms of the rows of H (k), 1 for zero rows; safe against overflow of squares."""
    values = np.asarray(kernels.of(H).to_numpy(H), np.float64)
    peaks = np.abs(values).max(axis=1, initial=0.0)
    peaks = np.where(peaks > 0, peaks, 1.0)
    found = peaks * np.sqrt(np.square(values / peaks[:, None]).sum(axis=1))
    return np.where(found > 0, found, 1.0)


def _with_unit_rows(own: AveragingPartyState, H: Array) -> tuple[AveragingPartyState, Array]:
    """The party's state with rows of H of norm 1 and W scaled accordingly, and that H."""
    on = kernels.of(H)
    sizes = on.cast(_row_norms(H), H)
    return replace(own, W=own.W * sizes, Ht=own.Ht / sizes), H / sizes[:, None]


def _on_unit_rows(server: AveragingServerState, before: Array) -> AveragingServerState:
    H = server.model["H"]
    on = kernels.of(H)
    values = np.array(on.to_numpy(H), np.float64)
    lost = ~values.any(axis=1)
    values[lost] = np.asarray(kernels.of(before).to_numpy(before), np.float64)[lost]
    values /= _row_norms(values)[:, None]
    return replace(server, model=Message({"H": on.cast(values, H)}, server.model.weight))


UNSENT_COUNT_SHARE = 1e-3
"""The number of rows is not sent and should take almost none of the noise."""
EXACT_SUM_BOUND = 2.0**52
"""Bound of arrays in a masked sum of up to 1023 parties that adds integers without rounding."""
MAX_SIGMAS = 128
"""No noise is larger than this many standard deviations: beyond 40 the probability is below 10⁻³⁰⁰."""
ROWS_SHARE = 0.5625
"""Share of the bound of a masked sum for rows; the rest is for noise. It is fixed: the noise reveals no row count."""


def exact_sum_bound(n_parties: int) -> float:
    """Return the largest power of two of which n_parties sum to less than 2⁶²: a masked sum does not round them."""
    return 2.0 ** (62 - n_parties.bit_length())


@state("private.sums-party")
@dataclass(frozen=True, slots=True)
class PrivateSumsPartyState:
    """The number of sums sent, and the rows as integers; these are cached and not part of checkpoints."""

    releases: int = 0
    rows: Any = field(default=None, init=False, compare=False, repr=False)

    def with_rows(self, rows: Any) -> PrivateSumsPartyState:
        """Return the same state with cached rows."""
        copy = PrivateSumsPartyState(self.releases)
        object.__setattr__(copy, "rows", rows)
        return copy


@state("private.sums-server")
@dataclass(frozen=True, slots=True)
class PrivateSumsServerState:
    """Hᵀ (m × k) with columns of unit norm, and how far the last round moved it."""

    Ht: Array
    movement: float = math.nan


@dataclass(frozen=True, slots=True)
class PrivateSums(ProgramBase):
    """`SharedSums` for rows of bounded weight, with Gaussian noise on every sum (docs, Theorem 6).

        local:   w_i ← `row_sweeps` sweeps on (H Hᵀ, x_i Hᵀ) from c_i·1, each row alone
                 sent: Σ c w wᵀ (k × k), Σ c w xᵀ (k × m), integers in public units, + N(0, σ²)
        finish:  G ← near the noisy gram, semidefinite and ≥ 0;   C ← max(0, noisy cross);   ρ = ridge·σ√k / λ
                 H ← `sweeps` sweeps on (G + ρI, C + ρH) from H; rows to unit norm     broadcast: H (k × m)

    Bounds are public and independent of the data: ‖x‖ ≤ row_bound, ‖w‖ ≤ weight_bound (None: row_bound); λ from k and
    m. Never sent: X_p, W_p, the number of rows, errors, norms. A party sends at most `max_releases` times.

    `shares` > 1: each party adds noise of variance σ²/shares. That needs a reduction that hides single uploads, over at
    least this many honest parties (SecureSum(fewest=…), with bounds of `sum_bound` for gram and cross). A party does
    not start if it has more rows than are certain to stay within that bound: a refusal later would depend on their
    values. The row limit follows from the bound alone, and every party refuses noise that does not fit beside it, so
    nobody can probe a party's number of rows by choosing the noise. `source`: bytes for a party and its number of
    earlier releases, for tests; noise from such a source is marked insecure.
    """

    rank: int
    noise_multiplier: float
    row_bound: float
    weight_bound: float | None = None
    relation: str = "add-or-remove"
    shares: int = 1
    max_releases: int | None = None
    row_sweeps: int = 20
    sweeps: int = 5
    ridge: float = 3.0
    source: Callable[[str, int], Source] | None = None
    aggregation: Sum = Sum()
    sum_bound: float = EXACT_SUM_BOUND

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("row_sweeps", 1), ("sweeps", 1), ("max_releases", 1)):
            value = getattr(self, name)
            if not (name == "max_releases" and value is None):
                whole_number(name, value, least=least)
        if not 0 <= self.ridge < math.inf:
            raise ParameterError(f"ridge must be finite and ≥ 0; got {self.ridge!r}.")
        self.noise(1)

    @property
    def traits(self) -> Traits:
        """H is fitted to the sums only. The noise of `shares` parties adds up to all of it; one share protects nothing.
        A reduction with bounds must accept all sums, because a refusal would reveal something about the rows.
        """
        reason = (
            f"each party adds 1/{self.shares} of the noise, which suffices only in the sum. Use shares=1, or a "
            "reduction that hides uploads."
        )
        return Traits(
            full_participation=True,
            requires="any" if self.shares == 1 else "secure",
            reason=reason,
            min_in_sum=self.shares,
            sum_bounds={"gram": self.sum_bound, "cross": self.sum_bound},
            release=self.release,
            max_releases=self.max_releases,
        )

    def max_rows(self, n_features: int) -> int:
        """Return how many rows fit within `sum_bound` whatever their values; 0 if the noise does not fit."""
        noise = self.noise(n_features)
        widest = max(1 / noise.bounds.gram_scale / noise.bounds.weight_unit, 1 / noise.bounds.row_unit)
        reach = MAX_SIGMAS * noise.sigma / math.sqrt(self.shares) * widest / noise.bounds.weight_unit
        if reach > (1 - ROWS_SHARE) * self.sum_bound:
            return 0
        return math.floor(ROWS_SHARE * self.sum_bound / 2 ** (WEIGHT_BITS + ROW_BITS))

    @property
    def solver(self) -> SquaredError:
        """The solver for rows under a finished model, at their party; without penalties."""
        return SquaredError(CoordinateDescent(sweeps=self.sweeps))

    @property
    def release(self) -> Release:
        """The privacy cost of one round for every row of a party."""
        return Release("gaussian", self.noise_multiplier, "row", self.relation, is_secure=self.source is None)

    def noise(self, n_features: int) -> NoisyRowSums:
        """Return bounds and noise for this number of columns."""
        weight_bound = self.row_bound if self.weight_bound is None else self.weight_bound
        for name, value in (("row_bound", self.row_bound), ("weight_bound", weight_bound)):
            if not 1e-20 <= value <= 1e20:
                raise ParameterError(
                    f"{name} must be from 1e-20 to 1e20, and independent of the data; got {value!r}.", parameter=name
                )
        bounds = RowBounds.balanced(weight_bound, self.row_bound, self.rank, n_features)
        return NoisyRowSums(bounds, self.noise_multiplier, self.relation, UNSENT_COUNT_SHARE, self.shares)

    def start_party(self, shard: Shard, layout: Layout) -> PrivateSumsPartyState:
        if len(layout.parties) < self.shares:
            raise CompositionError(
                f"shares={self.shares} needs as many honest parties, but there are {len(layout.parties)} parties. Use "
                "fewer shares."
            )
        most = self.max_rows(layout.n_features)
        if self.shares > 1 and most < 1:
            raise ParameterError(
                f"Noise of {self.noise_multiplier:.3g} times the sensitivity exceeds {self.sum_bound:.3g}, the bound "
                "of the secure sum. Use a larger epsilon, or no secure aggregation.",
                parameter="epsilon",
            )
        if self.shares > 1 and shard.matrix.shape[0] > most:
            raise DataError(
                f"Party {shard.name!r} has more than {most} rows, the most for which a secure sum of "
                f"{len(layout.parties)} parties cannot overflow. Nothing was computed or sent. Split it into parties "
                "with fewer rows, or run without secure aggregation."
            )
        return PrivateSumsPartyState().with_rows(self._integer_rows(shard))

    def start_server(self, layout: Layout) -> tuple[PrivateSumsServerState, Message]:
        Ht = random_columns(layout.n_features, self.rank, stream(layout.seed, "start"))
        return self.start_from(Ht)

    def start_from(self, Ht: Array) -> tuple[PrivateSumsServerState, Message]:
        """Start the server from a given Hᵀ, which must not depend on data of the parties."""
        flat = np.full(Ht.shape, 1 / math.sqrt(Ht.shape[0]))
        server = PrivateSumsServerState(_of_unit_norm(np.asarray(kernels.of(Ht).to_numpy(Ht), np.float64), flat))
        return server, Message({"H": server.Ht.T})

    def local(
        self, shard: Shard, party: PrivateSumsPartyState, model: Message
    ) -> tuple[PrivateSumsPartyState, Message]:
        if self.max_releases is not None and party.releases >= self.max_releases:
            raise BudgetSpent(
                f"Party {shard.name!r} has sent noisy sums {party.releases} times; its privacy budget allows "
                f"{self.max_releases}. Nothing was computed or sent. End the run here, or start one with more rounds "
                "and more noise."
            )
        H = quantize_model(shard.name, model["H"], (self.rank, shard.matrix.shape[1]))
        noise = self.noise(H.shape[1])
        rows = self._integer_rows(shard) if party.rows is None else party.rows
        W = row_weights(rows, H, noise.bounds.row_unit, self.row_sweeps)
        source = system_source if self.source is None else self.source(shard.name, party.releases)
        sent = noise.add_noise(noise.bounds.sums(W, rows), source)
        return PrivateSumsPartyState(party.releases + 1).with_rows(rows), Message(
            {"gram": sent.gram, "cross": sent.cross}
        )

    def finish(self, server: PrivateSumsServerState, aggregate: Message) -> tuple[PrivateSumsServerState, Message]:
        """Update H from the noisy sums and public numbers; the weight of the sum is the number of parties."""
        noise = self.noise(server.Ht.shape[0])
        gram, cross, _ = noise.postprocess(RowSums(np.asarray(aggregate["gram"]), np.asarray(aggregate["cross"]), 0))
        sigma = noise.sigma * math.sqrt(max(1.0, aggregate.weight / self.shares)) / noise.bounds.gram_scale
        weight = self.ridge * sigma * math.sqrt(self.rank)
        damped = gram + weight * np.eye(self.rank)
        moved = kernels.of(server.Ht).sweep(server.Ht, damped, cross.T + weight * server.Ht, self.sweeps)
        Ht = _of_unit_norm(moved, server.Ht)
        movement = float(np.linalg.norm(Ht - server.Ht)) / math.sqrt(self.rank)
        return PrivateSumsServerState(Ht, movement), Message({"H": Ht.T})

    def components(self, server: PrivateSumsServerState) -> Array:
        return server.Ht.T

    def metrics(self, server: PrivateSumsServerState) -> Mapping[str, float]:
        """‖H − H before‖ / ‖H‖, post-processing of the released sums; an error would cost privacy."""
        return {"movement": server.movement}

    def upload_spec(self, layout: Layout) -> tuple[Mapping[str, ArraySpec], ...]:
        k = self.rank
        gram = ArraySpec((k, k), "int", meaning="W_pᵀW_p with noise, in integer units")
        cross = ArraySpec((k, layout.n_features), "int", meaning="W_pᵀX_p with noise, in integer units")
        return ({"gram": gram, "cross": cross},)

    def _integer_rows(self, shard: Shard) -> Any:
        try:
            return self.noise(shard.matrix.shape[1]).bounds.quantize_rows(to_values(shard.matrix))
        except DataError as error:
            raise DataError(f"Party {shard.name!r}: {error}") from error


def _of_unit_norm(Ht: Any, before: Any) -> Any:
    """Scale columns to unit norm; a zero or non-finite column keeps its previous value."""
    peaks = Ht.max(axis=0)
    is_alive = np.isfinite(peaks) & (peaks > 0)
    scaled = Ht / np.where(is_alive, peaks, 1.0)
    norms = np.linalg.norm(scaled, axis=0)
    return np.where(is_alive, scaled / np.where(is_alive, norms, 1.0), before)


def row_private(
    rank: int, *, epsilon: float, row_bound: float, delta: float = 1e-5, rounds: int = 10, **settings: Any
) -> PrivateSums:
    """Build noisy shared sums: (ε, δ)-differential privacy of each row over `rounds` rounds; then parties refuse.

    Rows of a norm above `row_bound` are scaled down to it; like all settings here it must not depend on the data. Sent
    per round and party: WᵀW (k × k) and WᵀX (k × m) with noise. Never sent: X_p, W_p, the number of rows.
    """
    multiplier = noise_multiplier_for(epsilon, delta, rounds)
    return PrivateSums(rank, multiplier, row_bound, max_releases=rounds, **settings)


def party_private(
    program: LocalAveraging, *, epsilon: float, delta: float, rounds: int, clip: float = 1.0, kind: str = "gaussian"
) -> PrivateAveraging:
    """Add (ε, δ)-differential privacy of each party's data to a LocalAveraging program, over `rounds` uploads in all.

    Relation: all data of one party are replaced by any other data. `clip` is the largest distance of an H_p with rows
    of norm 1 from the model; choose it from public knowledge. "laplace" needs no δ, and clips and adds noise by the L1
    norm. Sent per round and party: H_p with noise (k × m). Never sent: X_p, W_p, n_p.
    """
    made: Mechanism = MECHANISMS.parse("kind", kind)(clip, noise_multiplier_for(epsilon, delta, rounds, kind))
    return PrivateAveraging(program, made, rounds)
