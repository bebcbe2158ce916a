"""NMF from one second moment: parties send Σ x xᵀ once, and the server computes H from it.

With noise, this is the cheapest way to privacy of rows: one release, after which any rank can be tried. Without noise
it reveals more than any other upload, so the exposure guard counts it as all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from scipy import sparse

from partsong import kernels
from partsong.aggregation.linear import Sum
from partsong.core.interfaces import Array, ArraySpec, Layout, Message, ProgramBase, Shard, State, Traits, Turn
from partsong.core.parameters import whole_number
from partsong.core.runtime import physical_memory
from partsong.core.states import state
from partsong.core.streams import stream
from partsong.data.conversion import to_values
from partsong.errors import (
    BudgetSpent,
    CompositionError,
    DataError,
    ParameterError,
    PartyError,
    ShapeError,
    format_count,
)
from partsong.methods.exact import SharedSums, accelerated_sums
from partsong.methods.private import (
    EXACT_SUM_BOUND,
    MAX_SIGMAS,
    ROWS_SHARE,
    PrivateSums,
    PrivateSumsPartyState,
)
from partsong.methods.registry import Problem, method
from partsong.privacy.accounting import Release
from partsong.privacy.exposure import ALL_ROWS
from partsong.privacy.randomness import Source, system_source
from partsong.privacy.row_level import BLOCK_ROWS
from partsong.privacy.second_moment import (
    COUNT_SHARE,
    MeanOfDirections,
    MomentOfBuckets,
    MomentOfParty,
    MomentOfRows,
    diagonal_places,
    noise_edge,
    side_of,
    sum_of_blocks,
    symmetric_matrix,
    triangle_of,
)
from partsong.solvers.initialization import random_columns
from partsong.solvers.second_moment import Spectrum, factorize, from_buckets, shrink
from partsong.solvers.squared_error import SquaredError
from partsong.solvers.update_rules import CoordinateDescent

SLACK = 2
"""Components beyond the visible directions that may still mean something."""
LOOSE, TIGHT = 0.25, 0.9
"""Shares of the energy that the row bound allows: below the first it is too large, above the second it cuts all."""
STAGE = "stage"
"""The array of a model that says which exchange it belongs to."""
BYTES_PER_ENTRY = 32
"""Memory for an entry of the moment, with its copies."""
EXACT_ROUNDS = 2
"""Exact rounds after a moment without noise: as close to the pooled fit as 10 to 20 rounds from a random start."""


class Statistic(Protocol):
    """What parties send before there is a model, and the spectrum that follows from the sums.

    `upload` answers exchange i; `finish` turns its sum into what the server keeps and broadcasts; after the last
    exchange, `spectrum` is known. `releases` has the privacy cost of each exchange, None without noise. `energy`: the
    trace of the moment in units of what one row (or party) adds at most, and the standard deviation of its noise.
    """

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def releases(self) -> tuple[Release | None, ...]: ...
    @property
    def shares(self) -> int: ...
    @property
    def clip(self) -> float | None: ...
    def size(self, exchange: int, m: int) -> int: ...
    def upload(self, exchange: int, X: Any, model: Message, source: Source) -> Any: ...
    def broadcast(self, exchange: int, total: Any, parties: float) -> Mapping[str, Array]: ...
    def spectrum(self, total: Any, parties: float, before: Mapping[str, Array]) -> Spectrum: ...
    def energy(self, total: Any, parties: float) -> tuple[float, float] | None: ...
    def largest_row(self, exchange: int, m: int) -> float: ...
    def widest_noise(self, exchange: int, m: int) -> float: ...


@dataclass(frozen=True, slots=True)
class ExactMoment:
    """XᵀX without noise, in one exchange."""

    names: tuple[str, ...] = ("moment",)
    releases: tuple[Release | None, ...] = (None,)
    shares: int = 1
    kind: str = "float"
    clip: float | None = None

    def size(self, exchange: int, m: int) -> int:
        return m * (m + 1) // 2

    def upload(self, exchange: int, X: Any, model: Message, source: Source) -> Any:
        rows: Any = X.astype(np.float64)
        product = rows.T @ rows
        return triangle_of(product.toarray() if sparse.issparse(product) else product)

    def broadcast(self, exchange: int, total: Any, parties: float) -> Mapping[str, Array]:
        return {}

    def spectrum(self, total: Any, parties: float, before: Mapping[str, Array]) -> Spectrum:
        return shrink(symmetric_matrix(np.asarray(total, np.float64), 1.0), 0.0)

    def energy(self, total: Any, parties: float) -> None:
        return None

    def largest_row(self, exchange: int, m: int) -> float:
        return 0.0

    def widest_noise(self, exchange: int, m: int) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class NoisyMoment:
    """Σ x xᵀ of bounded rows, or the clipped moments of parties, with noise, in one exchange."""

    moment: MomentOfRows | MomentOfParty
    names: tuple[str, ...] = ("moment",)
    kind: str = "int"

    @property
    def releases(self) -> tuple[Release | None, ...]:
        return (self.moment.noise.release,)

    @property
    def shares(self) -> int:
        return self.moment.noise.shares

    @property
    def clip(self) -> float:
        return self.moment.clip if isinstance(self.moment, MomentOfParty) else self.moment.bound

    def size(self, exchange: int, m: int) -> int:
        return m * (m + 1) // 2

    def upload(self, exchange: int, X: Any, model: Message, source: Source) -> Any:
        return self.moment.add_noise(self.moment.of(X), source)

    def broadcast(self, exchange: int, total: Any, parties: float) -> Mapping[str, Array]:
        return {}

    def spectrum(self, total: Any, parties: float, before: Mapping[str, Array]) -> Spectrum:
        matrix = symmetric_matrix(np.asarray(total), self.moment.unit)
        sigma = self.moment.noise.total(self.moment.sigma, parties)
        return shrink(matrix, noise_edge(sigma, len(matrix)))

    def energy(self, total: Any, parties: float) -> tuple[float, float]:
        return _energy(self.moment, total, parties)

    def largest_row(self, exchange: int, m: int) -> float:
        return self.moment.largest_row

    def widest_noise(self, exchange: int, m: int) -> float:
        return MAX_SIGMAS * self.moment.sigma / math.sqrt(self.shares) / self.moment.unit


@dataclass(frozen=True, slots=True)
class BucketedMoment:
    """Σ y xᵀ of bucket sums y and rows x, with noise, in one exchange: for many columns."""

    moment: MomentOfBuckets
    names: tuple[str, ...] = ("moment",)
    kind: str = "int"

    @property
    def releases(self) -> tuple[Release | None, ...]:
        return (self.moment.noise.release,)

    @property
    def shares(self) -> int:
        return self.moment.noise.shares

    @property
    def clip(self) -> float:
        return self.moment.bound

    def size(self, exchange: int, m: int) -> int:
        return self.moment.buckets * m

    def upload(self, exchange: int, X: Any, model: Message, source: Source) -> Any:
        return self.moment.add_noise(self.moment.of(X), source)

    def broadcast(self, exchange: int, total: Any, parties: float) -> Mapping[str, Array]:
        return {}

    def spectrum(self, total: Any, parties: float, before: Mapping[str, Array]) -> Spectrum:
        sums = np.asarray(total).reshape(self.moment.buckets, -1)
        m = sums.shape[1]
        sigma = self.moment.noise.total(self.moment.sigma(m), parties)
        return from_buckets(sums * self.moment.unit(m), self.moment.assignment(m), sigma)

    def energy(self, total: Any, parties: float) -> None:
        return None

    def largest_row(self, exchange: int, m: int) -> float:
        return self.moment.bound * self.moment.bucket_bound(m) / self.moment.unit(m)

    def widest_noise(self, exchange: int, m: int) -> float:
        return MAX_SIGMAS * self.moment.sigma(m) / math.sqrt(self.shares) / self.moment.unit(m)


@dataclass(frozen=True, slots=True)
class CentredMoment:
    """For rows that are all alike: a noisy mean direction c, then Σ r rᵀ of r = x/‖x‖ − c cut to a radius.

    M ≈ n̂ c cᵀ + Σ r rᵀ. The second exchange depends on the first through the public c only.
    """

    mean: MeanOfDirections
    residual: MomentOfRows
    names: tuple[str, ...] = ("mean", "moment")
    kind: str = "int"

    @property
    def releases(self) -> tuple[Release | None, ...]:
        return (self.mean.noise.release, self.residual.noise.release)

    @property
    def shares(self) -> int:
        return self.mean.noise.shares

    @property
    def clip(self) -> float:
        return self.residual.bound

    def size(self, exchange: int, m: int) -> int:
        return m + 1 if exchange == 0 else m * (m + 1) // 2

    def upload(self, exchange: int, X: Any, model: Message, source: Source) -> Any:
        if exchange == 0:
            sums = sum_of_blocks(X, lambda rows: self.mean.sums(self.mean.quantize(rows)))
            return self.mean.add_noise(sums, source)
        centre = np.rint(_checked_centre(model["centre"], X.shape[1]) / self.mean.unit)
        total: Any = np.zeros(self.size(1, X.shape[1]), np.int64)
        for start in range(0, X.shape[0], BLOCK_ROWS):
            rows = self.mean.quantize(X[start : start + BLOCK_ROWS])
            dense = rows.toarray() if sparse.issparse(rows) else rows
            total += self.residual.of((dense - centre) * self.mean.unit)
        return self.residual.add_noise(total, source)

    def broadcast(self, exchange: int, total: Any, parties: float) -> Mapping[str, Array]:
        centre, count = self.mean.centre(np.asarray(total))
        sigma = self.mean.noise.total(self.mean.sigma, parties)
        of_count = 3 * sigma / COUNT_SHARE if self.mean.noise.relation == "add-or-remove" else 0.0
        noise = max(math.sqrt(centre.size) * sigma, of_count)
        return {"centre": centre, "count": np.array([count]), "mean_noise": np.array([noise])}

    def spectrum(self, total: Any, parties: float, before: Mapping[str, Array]) -> Spectrum:
        matrix = symmetric_matrix(np.asarray(total), self.residual.unit)
        edge = noise_edge(self.residual.noise.total(self.residual.sigma, parties), len(matrix))
        spread = shrink(matrix, edge)
        if spread.visible == 0:
            return self.spectrum_of_mean(before)
        found = spread.plus(_long_centre(before))
        return replace(found, visible=spread.visible + int(_is_mean_visible(before)))

    def spectrum_of_mean(self, shown: Mapping[str, Array]) -> Spectrum:
        """n̂ c cᵀ: what is known after the first exchange."""
        centre = _long_centre(shown)
        found = Spectrum(np.zeros(0), np.zeros((centre.size, 0)), 0).plus(centre)
        return replace(found, visible=int(_is_mean_visible(shown)))

    def energy(self, total: Any, parties: float) -> tuple[float, float]:
        return _energy(self.residual, total, parties)

    def largest_row(self, exchange: int, m: int) -> float:
        return 1 / self.mean.unit if exchange == 0 else self.residual.largest_row

    def widest_noise(self, exchange: int, m: int) -> float:
        part = self.mean if exchange == 0 else self.residual
        share = COUNT_SHARE if exchange == 0 else 1.0  # the number of rows has the widest noise
        return MAX_SIGMAS * part.sigma / share / math.sqrt(self.shares) / part.unit


def _is_mean_visible(shown: Mapping[str, Array]) -> bool:
    """Whether the mean direction of so many rows would be longer than the noise of its sum."""
    return float(shown["count"][0]) > float(shown["mean_noise"][0])


def _long_centre(shown: Mapping[str, Array]) -> Any:
    """√n̂ c."""
    return np.asarray(shown["centre"]) * math.sqrt(float(shown["count"][0]))


def _energy(moment: MomentOfRows | MomentOfParty, total: Any, parties: float) -> tuple[float, float]:
    triangle, most = np.asarray(total), moment.bound**2 if isinstance(moment, MomentOfRows) else moment.clip
    places = diagonal_places(side_of(triangle.size))
    trace = float(triangle[places].astype(np.float64).sum()) * moment.unit
    return trace / most, moment.noise.total(moment.sigma, parties) * math.sqrt(places.size) / most


def is_invention(visible: int, rank: int) -> bool:
    """Whether a model of this rank has more components than so many visible directions justify."""
    return visible == 0 or rank > visible + SLACK


def verdict(visible: int, rank: int) -> str:
    """What so many visible directions mean for a model of this rank."""
    if visible == 0:
        return (
            "No direction is visible above the noise; the components are invention. Use a larger epsilon, or more data."
        )
    head = f"{format_count(visible, 'direction')} {'is' if visible == 1 else 'are'} visible above the noise"
    if not is_invention(visible, rank):
        return f"{head}."
    return f"{head}; components beyond about {visible + SLACK} are invention. Use fewer, or a larger epsilon."


def bound_verdict(report: Mapping[str, Any], n_rows: int | None) -> str:
    """What the energy of a release says of the row bound, from the release and a public lower bound of the rows.

    Empty where it says nothing: without an energy (buckets), or if it fits the bound.
    """
    if report.get("energy") is None:
        return ""
    energy, noise = report["energy"], report["energy_noise"]
    if report["mechanism"] == "centred":
        count = report.get("rows_counted")
        if count is None:
            return ""
        if energy + 3 * noise < LOOSE * count:
            return "Rows are much closer to their mean direction than centre_radius. A smaller one has less noise."
        if energy - noise > TIGHT * count:
            return "Nearly all rows were cut to centre_radius. A larger one keeps more of them, with more noise."
        return ""
    if energy < 3 * noise:
        return (
            "The energy of the release is within its noise. Use a smaller row_bound if rows are shorter, or more rows."
        )
    if n_rows is None:
        return (
            f"The release has the energy of {energy:.0f} ± {noise:.0f} rows at the row bound. If there are many more "
            "rows, a smaller row_bound has less noise."
        )
    if energy + 3 * noise < LOOSE * n_rows:
        return (
            f"The row bound is too large: the release has at most {(energy + 3 * noise) / n_rows:.2g} of the energy of "
            f"{n_rows} rows at the bound. A smaller row_bound has less noise."
        )
    if energy - noise > TIGHT * n_rows:
        return (
            f"The release has the energy of {n_rows} rows at the row bound. If there are no more, nearly all were cut "
            "to it, so that all have the same weight."
        )
    return ""


def _checked_centre(values: Array, m: int) -> Any:
    """The centre from the server; the check does not use the party's data, so a refusal reveals nothing about them."""
    centre = np.asarray(values, np.float64)
    if centre.shape != (m,):
        raise ShapeError(f"The centre from the server has shape {centre.shape}, not ({m},); nothing was computed.")
    if not (np.isfinite(centre).all() and (centre >= 0).all() and np.linalg.norm(centre) <= 1.01):
        raise PartyError("The centre from the server is not non-negative of norm at most 1; nothing was computed.")
    return centre


@state("moment.party")
@dataclass(frozen=True, slots=True)
class MomentPartyState:
    """The number of releases made, and the party's state in later rounds."""

    releases: int = 0
    later: State = None


@state("moment.server")
@dataclass(frozen=True, slots=True)
class MomentServerState:
    """Exchanges done, Hᵀ (m × k), what earlier exchanges have shown, and the server's state in later rounds."""

    exchanges: int
    Ht: Array
    seed: int
    shown: Mapping[str, Array]
    spectrum: Spectrum | None = None
    later: State = None


@dataclass(frozen=True, slots=True)
class MomentProgram(ProgramBase):
    """H from sums that parties send once, and then, if asked for, `later_rounds` rounds of `later` from that H.

        exchanges of the statistic:  sent: sums over rows, with or without noise       broadcast: what they show
        later rounds:                as in `later` (noisy or exact sums), from H

    Never sent: X_p, W_p, and with noise the number of rows (except the noisy one of `CentredMoment`). Each party sends
    at most once per exchange; a request that would repeat a release is refused.
    """

    rank: int
    statistic: Any
    later: PrivateSums | SharedSums | None = None
    later_rounds: int = 0
    sum_bound: float = EXACT_SUM_BOUND
    source: Callable[[str, int], Source] | None = None
    aggregation: Sum = Sum()
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        whole_number("rank", self.rank, least=1)
        if self.ranks and (self.later is not None or max(self.ranks) != self.rank):
            raise ParameterError(
                "Several ranks can be tried on one release only, without later rounds. Pass one rank, or "
                'mechanism="moment".',
                parameter="n_components",
            )
        if (self.later is None) != (self.later_rounds == 0):
            raise ParameterError("later and later_rounds need each other. Pass both or neither.")

    @property
    def first_exchanges(self) -> int:
        """Exchanges of the statistic."""
        return len(self.statistic.releases)

    @property
    def mechanism(self) -> str:
        """The name of the mechanism."""
        if isinstance(self.statistic, CentredMoment):
            return "centred"
        return "hybrid" if isinstance(self.later, PrivateSums) else "moment"

    @property
    def releases(self) -> tuple[Any, ...]:
        """The privacy cost of each exchange; empty without noise."""
        own: tuple[Any, ...] = self.statistic.releases
        if own[0] is None:
            return ()
        later = [self.later.release] * self.later_rounds if isinstance(self.later, PrivateSums) else []
        return tuple(one if self.source is None else replace(one, is_secure=False) for one in (*own, *later))

    @property
    def traits(self) -> Traits:
        """All parties are needed, since a sum is released once. One share of the noise protects nothing."""
        shares, releases = self.statistic.shares, self.releases
        reason = (
            f"each party adds 1/{shares} of the noise, which suffices only in the sum. Use shares=1, or a reduction "
            "that hides uploads."
        )
        names = (*self.statistic.names, *(("gram", "cross") if isinstance(self.later, PrivateSums) else ()))
        return Traits(
            full_participation=True,
            requires="any" if shares == 1 else "secure",
            reason=reason,
            min_in_sum=shares,
            sum_bounds=dict.fromkeys(names, self.sum_bound) if releases else {},
            release=releases[0] if releases else None,
            releases=releases,
            max_releases=len(releases) or None,
        )

    @property
    def solver(self) -> Any:
        return SquaredError(CoordinateDescent(sweeps=5)) if self.later is None else self.later.solver

    def exchanges(self, rounds: int, n_parties: int) -> int:
        return self.first_exchanges + self.later_rounds

    @property
    def row_bound(self) -> float | None:
        """The norm to which rows, or the moment of a party, are cut; None without noise."""
        return self.statistic.clip

    def exchange_of(self, model: Message) -> int:
        return _stage(model)

    def turn(self, model: Message) -> Turn:
        at, first = _stage(model), self.first_exchanges
        return Turn(at, first, ends_round=at + 1 == first) if at < first else Turn()

    def start_party(self, shard: Shard, layout: Layout) -> MomentPartyState:
        self._require_room(shard, layout)
        return MomentPartyState(0, None if self.later is None else self.later.start_party(shard, layout))

    def require_memory(self, n_features: int) -> None:
        """Refuse a moment that is too large for this machine."""
        needed, memory = BYTES_PER_ENTRY * n_features**2, physical_memory()
        if isinstance(self.statistic, BucketedMoment) or memory is None or needed <= memory:
            return
        others = 'use buckets, or mechanism="rounds"' if self.releases else 'or use method="exact"'
        raise ParameterError(
            f"The second moment of {n_features} columns needs {needed / 2**30:.3g} GiB, but this machine has "
            f"{memory / 2**30:.3g} GiB of memory. Select fewer columns by public knowledge, {others}.",
            parameter="mechanism" if self.releases else "method",
        )

    def _require_room(self, shard: Shard, layout: Layout) -> None:
        """Refuse moments too large for memory, shares without enough parties, and sums that could exceed the bound of
        secure aggregation.
        """
        self.require_memory(layout.n_features)
        shares = self.statistic.shares
        if len(layout.parties) < shares:
            raise CompositionError(
                f"shares={shares} needs as many honest parties, but there are {len(layout.parties)} parties. Use fewer "
                "shares."
            )
        if shares == 1:
            return
        for exchange in range(self.first_exchanges):
            if self.statistic.widest_noise(exchange, layout.n_features) > (1 - ROWS_SHARE) * self.sum_bound:
                raise ParameterError(
                    f"The noise exceeds {self.sum_bound:.3g}, the bound of the secure sum. Use a larger epsilon, or no "
                    "secure aggregation.",
                    parameter="epsilon",
                )
            largest = self.statistic.largest_row(exchange, layout.n_features)
            if largest == 0:  # a whole party adds at most 2⁴⁰ units
                continue
            most = math.floor(ROWS_SHARE * self.sum_bound / largest)
            if shard.matrix.shape[0] > most:
                raise DataError(
                    f"Party {shard.name!r} has more than {most} rows, the most for which a secure sum of "
                    f"{len(layout.parties)} parties cannot overflow. Nothing was computed or sent. Split it into "
                    "parties with fewer rows, or run without secure aggregation."
                )

    def start_server(self, layout: Layout) -> tuple[MomentServerState, Message]:
        self.require_memory(layout.n_features)
        Ht = random_columns(layout.n_features, self.rank, stream(layout.seed, "start"))
        return MomentServerState(0, Ht, layout.seed, {}), _model({}, 0)

    def local(self, shard: Shard, party: MomentPartyState, model: Message) -> tuple[MomentPartyState, Message]:
        at, traits = _stage(model), self.traits
        if not traits.allows(party.releases, at):
            raise BudgetSpent(f"Party {shard.name!r} {_refusal(party.releases, at, len(traits.releases))}")
        if at >= self.first_exchanges:
            return self._later(shard, party, model)
        source = system_source if self.source is None else self.source(shard.name, party.releases)
        try:
            sent = self.statistic.upload(at, to_values(shard.matrix), model, source)
        except DataError as error:
            raise DataError(f"Party {shard.name!r}: {error}") from error
        return replace(party, releases=party.releases + 1), Message({self.statistic.names[at]: sent})

    def _later(self, shard: Shard, party: MomentPartyState, model: Message) -> tuple[MomentPartyState, Message]:
        assert self.later is not None
        own, inner = party.later, Message({name: one for name, one in model.arrays.items() if name != STAGE})
        later: PrivateSums | SharedSums = self.later
        if isinstance(later, PrivateSums):
            own = PrivateSumsPartyState(party.releases).with_rows(getattr(own, "rows", None))
            later = later if self.source is None else replace(later, source=self.source)
        own, upload = later.local(shard, own, inner)
        return MomentPartyState(party.releases + 1, own), upload

    def finish(self, server: MomentServerState, aggregate: Message) -> tuple[MomentServerState, Message]:
        at, done = server.exchanges, server.exchanges + 1
        if at >= self.first_exchanges:
            assert self.later is not None
            inner, model = self.later.finish(server.later, aggregate)
            return replace(server, exchanges=done, later=inner), _model(model.arrays, done)
        total, parties = aggregate[self.statistic.names[at]], aggregate.weight
        if done < self.first_exchanges:
            shown = {**server.shown, **self.statistic.broadcast(at, total, parties)}
            server = self._with_model(server, self.statistic.spectrum_of_mean(shown))
            return replace(server, exchanges=done, shown=shown), _model(shown, done)
        spectrum, energy = self.statistic.spectrum(total, parties, server.shown), self.statistic.energy(total, parties)
        shown = {**server.shown, **({} if energy is None else {"energy": np.array(energy)})}
        server = replace(self._with_model(server, spectrum), exchanges=done, shown=shown)
        if self.later is None:
            return server, _model({"H": server.Ht.T}, done)
        inner, model = self.later.start_from(server.Ht)
        return replace(server, later=inner), _model(model.arrays, done)

    def _with_model(self, server: MomentServerState, spectrum: Spectrum) -> MomentServerState:
        H = self._factors(server, spectrum, self._chosen_rank(spectrum.visible))
        return replace(server, Ht=np.ascontiguousarray(H.T), spectrum=spectrum)

    def _factors(self, server: MomentServerState, spectrum: Spectrum, rank: int) -> Any:
        """H (rank × m), from a start that depends on the seed alone."""
        start = random_columns(len(server.Ht), max(rank, self.rank), stream(server.seed, "start"))
        return factorize(spectrum, start[:, :rank])

    def _chosen_rank(self, visible: int) -> int:
        """Of several ranks the largest one of which all directions are visible, else the smallest."""
        return max((rank for rank in self.ranks if rank <= visible), default=min(self.ranks, default=self.rank))

    def components(self, server: MomentServerState) -> Array:
        if self.later is not None and server.later is not None:
            return self.later.components(server.later)
        return server.Ht.T

    def components_at(self, server: MomentServerState, rank: int) -> Any:
        """H (rank × m) from the same release, at no cost in privacy; without the later rounds."""
        if server.spectrum is None:
            raise ParameterError("No moment has been released yet. Finish the run first.")
        return self._factors(server, server.spectrum, rank)

    def report(self, server: MomentServerState) -> dict[str, Any]:
        """What the release has shown, in plain data: post-processing. `energy` is in rows at the bound."""
        visible = None if server.spectrum is None else server.spectrum.visible
        found: dict[str, Any] = {"mechanism": self.mechanism, "visible_directions": visible}
        if "energy" in server.shown:
            energy, noise = map(float, server.shown["energy"])
            found |= {"energy": energy, "energy_noise": noise}
        if "count" in server.shown and _is_mean_visible(server.shown):
            found["rows_counted"] = float(server.shown["count"][0])
        return found

    def metrics(self, server: MomentServerState) -> Mapping[str, float]:
        """The number of directions above the noise, post-processing of the release."""
        visible = {} if server.spectrum is None else {"visible": float(server.spectrum.visible)}
        if self.later is None or server.exchanges <= self.first_exchanges:
            return visible
        return {**visible, **self.later.metrics(server.later)}

    def directions(self, model: Message | None) -> int:
        """Without noise the moment counts as all rows, whatever their number: it determines XᵀX at once."""
        is_first = model is None or _stage(model) < self.first_exchanges
        return ALL_ROWS if is_first else self.rank

    def directions_after(self, exchanges: int, parties: int) -> int:
        return ALL_ROWS + (exchanges - self.first_exchanges) * self.rank if exchanges else 0

    def upload_spec(self, layout: Layout) -> tuple[Mapping[str, ArraySpec], ...]:
        m = layout.n_features
        own: list[Mapping[str, ArraySpec]] = []
        for at, name in enumerate(self.statistic.names):
            size = (
                self.statistic.size(at, m) if isinstance(m, int) else ("m (m + 1) / 2" if name == "moment" else "m + 1")
            )
            own.append({name: ArraySpec((size,), self.statistic.kind, meaning=MEANING[name, self.statistic.kind])})
        return (*own, *(() if self.later is None else self.later.upload_spec(layout)))


MEANING = {
    ("moment", "float"): "X_pᵀX_p, the upper triangle",
    ("moment", "int"): "X_pᵀX_p of bounded rows with noise, the upper triangle in integer units",
    ("mean", "int"): "Σ x/‖x‖ and the number of rows, with noise, in integer units",
}


def _refusal(made: int, at: int, most: int) -> str:
    """Why a party that has made so many noisy uploads makes none in exchange `at`, and the way out."""
    if made >= most:
        return (
            f"has sent {made} noisy messages, the most that its privacy budget allows. Nothing was computed or sent. "
            "End the run with the current model."
        )
    if made > at:
        return (
            f"may have sent its answer to exchange {at + 1} already, and its privacy budget covers one. Nothing was "
            "computed or sent. Start a new run with a budget of its own."
        )
    return (
        f"has sent nothing in exchange {made + 1}, and its privacy budget covers exchange {at + 1} only after it. "
        "Nothing was computed or sent. Start a new run."
    )


def _model(arrays: Mapping[str, Array], stage: int) -> Message:
    return Message({**arrays, STAGE: np.array([stage], np.int16)})


def _stage(model: Message) -> int:
    """The exchange that a model asks for; the check does not use the party's data."""
    values = np.asarray(kernels.of(model[STAGE]).to_numpy(model[STAGE])) if STAGE in model.arrays else np.empty(0)
    if values.shape != (1,) or values.dtype.kind not in "iu" or values[0] < 0:
        raise PartyError("The model from the server does not say which exchange it is for; nothing was computed.")
    return int(values[0])


@method("moment", privacy=("row", "party"), rounds=1)
def moment(problem: Problem) -> MomentProgram:
    """Parties send XᵀX once; the server computes H from it, and two exact rounds finish.

    For simulations and trusted settings: without noise, XᵀX reveals more than any other upload, and a site refuses it
    unless its policy allows exposure "rows". With `RowPrivacy` or `PartyPrivacy` it is the most useful private method.
    Sent per party: the upper triangle of X_pᵀX_p (m (m + 1) / 2), then twice WᵀW (k × k), WᵀX (k × m), n_p and ‖X_p‖².
    Never sent: X_p, W_p.
    """
    return MomentProgram(problem.rank, ExactMoment(), accelerated_sums(problem.rank), EXACT_ROUNDS)
