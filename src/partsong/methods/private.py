"""Differentially private programs: averaging of noisy H (unit: party), and noisy sums over rows (unit: row)."""

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
from partsong.privacy.mechanisms import MECHANISMS, KeepAll, Mechanism
from partsong.privacy.randomness import Source, system_source
from partsong.privacy.row_level import (
    ROW_BITS,
    WEIGHT_BITS,
    BoundedRows,
    NoisyRows,
    RowSums,
    row_weights,
    sound_model,
    whole_model,
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
    """A party of the consensus within, and how many noisy messages it has sent."""

    own: AveragingPartyState
    releases: int = 0


@dataclass(frozen=True, slots=True)
class PrivateAveraging(ProgramBase):
    """`program` with differential privacy for parties: each H_p is seen only clipped around the model, and noisy.

        at a party:    (W_p, H_p) as in `program`; rows of H_p of norm 1, in the order of the model's
        sent:          mechanism(H_p; H) (k × m), weight 1                 broadcast: H (k × m) with rows of norm 1
        at the server: aggregation as in `program`, max(0, ·), rows of norm 1: post-processing, which costs nothing

    **Theorem.** Let T be the number of rounds that a party sends in, at most `most`. All that it ever sends is T
    adaptive uses of the mechanism, each on a vector that depends on its data and on what was public before. Its data
    are therefore protected, in the mechanism's relation, by the composition of T releases (`accounting.Ledger`).
    Weights, numbers of rows, errors and drifts are not sent: the weight is 1. A party that has sent `most` times
    refuses to work. What is not protected: that a party takes part and when, the time it takes, its number type, and
    that it fails; not why it does: the error that leaves it has no number from its data.

    What a simulation knows beside this (errors in a history, weights of all parties) is not released by it; stopping or
    choosing rounds by such numbers would be.
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
            raise ParameterError(
                f"A budget that allows no round: most must be a whole number ≥ 1; got {self.max_releases!r}."
            )
        if isinstance(self.mechanism, KeepAll):
            raise CompositionError("KeepAll adds no noise: run the program itself, or give a mechanism that protects.")
        if not isinstance(self.program, LocalAveraging):
            raise CompositionError(
                f"{type(self.program).__name__} is no consensus: what its parties send is not one H each, which is all "
                "that is clipped and noised here. Take a method that is one, or row_private for privacy of rows."
            )
        if not isinstance(self.program.upload, WholeUpload):
            raise CompositionError(
                f"{type(self.program.upload).__name__} sends counts beside H, which would leave without noise. "
                "Use a method whose parties send H alone."
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
        """What one upload costs the party that sends it; not secure where somebody has given another source."""
        found = self.mechanism.release
        return found if self.source is system_noise else replace(found, is_secure=False)

    def start_party(self, shard: Shard, layout: Layout) -> PrivateAveragingPartyState:
        return PrivateAveragingPartyState(self.program.start_party(shard, layout))

    def start_server(self, layout: Layout) -> tuple[AveragingServerState, Message]:
        """H from the shared seed with rows of norm 1; always sent, as uploads are clipped around it."""
        server, model = self.program.start_server(layout)
        server = _on_unit_rows(server, server.model["H"])
        return server, Message({**model.arrays, "H": server.model["H"]})

    def local(
        self, shard: Shard, party: PrivateAveragingPartyState, model: Message
    ) -> tuple[PrivateAveragingPartyState, Message]:
        if party.releases >= self.max_releases:
            raise BudgetSpent(
                f"Party {shard.name!r} has sent {party.releases} noisy messages, which is all that its budget allows. "
                "Nothing was computed or sent. End the run with the model there is; more rounds cost more ε."
            )
        sound_model(shard.name, model["H"], (self.rank, shard.matrix.shape[1]))
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
            raise DivergenceError("The iteration has run away.")
        return _with_unit_rows(own, H)

    def finish(self, server: AveragingServerState, aggregate: Message) -> tuple[AveragingServerState, Message]:
        """As within, from what is not below zero; then rows of norm 1, and a row of zeros keeps the direction it had.

        Cut off at the party, noise would leave a bias that no number of parties averages out.
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
    """The error as it may leave: engines tell everybody its text, and numbers in it would be sent without noise."""
    kind = DivergenceError if isinstance(error, DivergenceError) else PartyError
    return kind(
        f"Party {party!r} failed in its own iterations ({type(error).__name__}); nothing was sent. The reason may hold "
        "numbers from its data and is not told: it is the cause of this error, at the party. Try other steps or data "
        "on another scale there."
    )


def _row_norms(H: Array) -> Any:
    """Norms of the rows of H (k), 1 for a row of zeros; of numbers whose squares no float holds, too."""
    values = np.asarray(kernels.of(H).to_numpy(H), np.float64)
    peaks = np.abs(values).max(axis=1, initial=0.0)
    peaks = np.where(peaks > 0, peaks, 1.0)
    found = peaks * np.sqrt(np.square(values / peaks[:, None]).sum(axis=1))
    return np.where(found > 0, found, 1.0)


def _with_unit_rows(own: AveragingPartyState, H: Array) -> tuple[AveragingPartyState, Array]:
    """The party's factors with rows of H of norm 1, and W in their units."""
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
"""The number of rows is not sent, and should take next to nothing of the noise."""
EXACT_SUM_BOUND = 2.0**52
"""Of arrays under a masked sum of up to 1023 parties, which then adds up whole numbers without rounding them."""
MAX_SIGMAS = 128
"""So many standard deviations from zero there is no noise: beyond 40 the chance is below 10⁻³⁰⁰."""
ROWS_SHARE = 0.5625
"""Of the bound of a masked sum; the rest is for noise. Fixed, so that a choice of noise tells nothing of how many."""


def exact_sum_bound(n_parties: int) -> float:
    """The largest power of two of which so many add up to less than 2⁶²: a masked sum does not round them."""
    return 2.0 ** (62 - n_parties.bit_length())


@state("private.sums-party")
@dataclass(frozen=True, slots=True)
class PrivateSumsPartyState:
    """How often a party has sent sums, and its rows in whole units, made once and in no checkpoint."""

    releases: int = 0
    rows: Any = field(default=None, init=False, compare=False, repr=False)

    def with_rows(self, rows: Any) -> PrivateSumsPartyState:
        """The same count, with the rows at hand."""
        copy = PrivateSumsPartyState(self.releases)
        object.__setattr__(copy, "rows", rows)
        return copy


@state("private.sums-server")
@dataclass(frozen=True, slots=True)
class PrivateSumsServerState:
    """Hᵀ (m × k) with columns of unit norm, and how far the last sums have moved it."""

    Ht: Array
    movement: float = math.nan


@dataclass(frozen=True, slots=True)
class PrivateSums(ProgramBase):
    """`SharedSums` for rows of bounded weight, with Gaussian noise on every sum (docs, Theorem 6).

        local:   w_i ← `row_sweeps` sweeps on (H Hᵀ, x_i Hᵀ) from c_i·1, each row by itself
                 sent: Σ c w wᵀ (k × k), Σ c w xᵀ (k × m), whole numbers of public units, + N(0, σ²)
        finish:  G ← near the noisy gram, semidefinite and ≥ 0;   C ← max(0, noisy cross);   ρ = ridge·σ√k / λ
                 H ← `sweeps` sweeps on (G + ρI, C + ρH) from H; rows to unit norm     broadcast: H (k × m)

    Bounds are public and come from no data: ‖x‖ ≤ row_bound, ‖w‖ ≤ weight_bound (None: row_bound); λ from k and m.
    Never sent: X_p, W_p, the number of rows, errors, norms. A party sends `most` times at most.

    `shares` > 1: each party adds a variance of σ²/shares, for sums that hide single uploads and are over at least so
    many honest parties (SecureSum(fewest=…), with bounds of `sum_bound` for gram and cross). A party with more rows
    than are certain to stay within that bound does not begin: a refusal later would depend on what is in them. That
    number of rows follows from the bound alone, and noise that does not fit beside it is refused by every party, so
    that who chooses the noise cannot search for a number of rows.
    `source`: bytes for a party and the number of releases before, for tests; noise from a given source counts as
    insecure.
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
            raise ParameterError(f"ridge must be a number, zero or more and finite; got {self.ridge!r}.")
        self.noise(1)

    @property
    def traits(self) -> Traits:
        """H is fitted to the sums alone. `shares` parties add up to the whole noise, and a share of it protects nothing
        by itself. A reduction with bounds has to let all sums pass: a refusal would tell of the rows.
        """
        reason = (
            f"each party adds 1/{self.shares} of the noise, which is enough in their sum alone. Take shares=1, or a "
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
        """How many rows of a party are within `sum_bound` whatever is in them; 0 where noise does not fit beside."""
        noise = self.noise(n_features)
        widest = max(1 / noise.bounds.gram_scale / noise.bounds.weight_unit, 1 / noise.bounds.row_unit)
        reach = MAX_SIGMAS * noise.sigma / math.sqrt(self.shares) * widest / noise.bounds.weight_unit
        if reach > (1 - ROWS_SHARE) * self.sum_bound:
            return 0
        return math.floor(ROWS_SHARE * self.sum_bound / 2 ** (WEIGHT_BITS + ROW_BITS))

    @property
    def solver(self) -> SquaredError:
        """For rows of a finished model, at their party; without penalties."""
        return SquaredError(CoordinateDescent(sweeps=self.sweeps))

    @property
    def release(self) -> Release:
        """What one round costs every row of a party."""
        return Release("gaussian", self.noise_multiplier, "row", self.relation, is_secure=self.source is None)

    def noise(self, n_features: int) -> NoisyRows:
        """Bounds and noise for so many columns."""
        weight_bound = self.row_bound if self.weight_bound is None else self.weight_bound
        for name, value in (("row_bound", self.row_bound), ("weight_bound", weight_bound)):
            if not 1e-20 <= value <= 1e20:
                raise ParameterError(
                    f"{name} must be a number from 1e-20 to 1e20, chosen from no data; got {value!r}.", parameter=name
                )
        bounds = BoundedRows.balanced(weight_bound, self.row_bound, self.rank, n_features)
        return NoisyRows(bounds, self.noise_multiplier, self.relation, UNSENT_COUNT_SHARE, self.shares)

    def start_party(self, shard: Shard, layout: Layout) -> PrivateSumsPartyState:
        if len(layout.parties) < self.shares:
            raise CompositionError(
                f"Noise in {self.shares} shares needs as many honest parties, and there are {len(layout.parties)}. "
                "Take fewer shares."
            )
        most = self.max_rows(layout.n_features)
        if self.shares > 1 and most < 1:
            raise ParameterError(
                f"Noise of {self.noise_multiplier:.3g} times the sensitivity does not fit into numbers up to "
                f"{self.sum_bound:.3g}, the bound of the masked sum. Take a larger epsilon, or no masks.",
                parameter="epsilon",
            )
        if self.shares > 1 and shard.matrix.shape[0] > most:
            raise DataError(
                f"Party {shard.name!r} has more than {most} rows, beyond which a masked sum of {len(layout.parties)} "
                "parties may not hold their sums. Nothing was computed or sent. Split it into parties of fewer rows, "
                "or run without masks."
            )
        return PrivateSumsPartyState().with_rows(self._integer_rows(shard))

    def start_server(self, layout: Layout) -> tuple[PrivateSumsServerState, Message]:
        Ht = random_columns(layout.n_features, self.rank, stream(layout.seed, "start"))
        return self.start_from(Ht)

    def start_from(self, Ht: Array) -> tuple[PrivateSumsServerState, Message]:
        """The server's start from a given Hᵀ, which must come from no data of the parties."""
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
        H = whole_model(shard.name, model["H"], (self.rank, shard.matrix.shape[1]))
        noise = self.noise(H.shape[1])
        rows = self._integer_rows(shard) if party.rows is None else party.rows
        W = row_weights(rows, H, noise.bounds.row_unit, self.row_sweeps)
        source = system_source if self.source is None else self.source(shard.name, party.releases)
        sent = noise.noisy(noise.bounds.sums(W, rows), source)
        return PrivateSumsPartyState(party.releases + 1).with_rows(rows), Message(
            {"gram": sent.gram, "cross": sent.cross}
        )

    def finish(self, server: PrivateSumsServerState, aggregate: Message) -> tuple[PrivateSumsServerState, Message]:
        """H from the noisy sums and public numbers; the weight of the sum is the number of parties."""
        noise = self.noise(server.Ht.shape[0])
        gram, cross, _ = noise.usable(RowSums(np.asarray(aggregate["gram"]), np.asarray(aggregate["cross"]), 0))
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
        """‖H − H before‖ / ‖H‖: all that the released sums tell; an error would cost privacy."""
        return {"movement": server.movement}

    def upload_spec(self, layout: Layout) -> tuple[Mapping[str, ArraySpec], ...]:
        k = self.rank
        gram = ArraySpec((k, k), "int", meaning="W_pᵀW_p with noise, in whole units")
        cross = ArraySpec((k, layout.n_features), "int", meaning="W_pᵀX_p with noise, in whole units")
        return ({"gram": gram, "cross": cross},)

    def _integer_rows(self, shard: Shard) -> Any:
        try:
            return self.noise(shard.matrix.shape[1]).bounds.whole_rows(to_values(shard.matrix))
        except DataError as error:
            raise DataError(f"Party {shard.name!r}: {error}") from error


def _of_unit_norm(Ht: Any, before: Any) -> Any:
    """Columns scaled to unit norm; one that is zero, or beyond measure, is again what it was before."""
    peaks = Ht.max(axis=0)
    is_alive = np.isfinite(peaks) & (peaks > 0)
    scaled = Ht / np.where(is_alive, peaks, 1.0)
    norms = np.linalg.norm(scaled, axis=0)
    return np.where(is_alive, scaled / np.where(is_alive, norms, 1.0), before)


def row_private(
    rank: int, *, epsilon: float, row_bound: float, delta: float = 1e-5, rounds: int = 10, **settings: Any
) -> PrivateSums:
    """Shared sums with noise on every sum: (ε, δ) for each row over `rounds` rounds, after which parties refuse.

    `row_bound` is the norm beyond which rows are scaled down; like everything else here it must come from no data.
    Sent per round and party: WᵀW (k × k) and WᵀX (k × m) with noise. Never sent: X_p, W_p, the number of rows.
    """
    multiplier = noise_multiplier_for(epsilon, delta, rounds)
    return PrivateSums(rank, multiplier, row_bound, max_releases=rounds, **settings)


def party_private(
    program: LocalAveraging, *, epsilon: float, delta: float, rounds: int, clip: float = 1.0, kind: str = "gaussian"
) -> PrivateAveraging:
    """A consensus with (ε, δ)-differential privacy of each party's data over `rounds` uploads in all.

    Relation: all data of one party are exchanged for any other. `clip` is the most that an H_p with rows of norm 1 may
    lie from the model; choose it from what is public. "laplace" needs no δ, and clips and adds noise by the L1 norm.
    Sent: H_p with noise (k × m). Never: X_p, W_p, n_p.
    """
    made: Mechanism = MECHANISMS.parse("kind", kind)(clip, noise_multiplier_for(epsilon, delta, rounds, kind))
    return PrivateAveraging(program, made, rounds)
