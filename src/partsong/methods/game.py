"""The game between parties: each plays its rows against one block of columns at a time, and passes the block on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from partsong import kernels
from partsong.aggregation.linear import DisjointBlocks, breadth, cut_out, joined, span_of
from partsong.core.interfaces import Array, Form, Layout, Matrix, Message, Shard, Turn
from partsong.core.streams import stream
from partsong.errors import CompositionError, ParameterError, PartyError, StepTooLarge
from partsong.solvers.game import NOTHING, TWICE, Game, Standing, first_weights, mean_size
from partsong.solvers.initialization import random_columns
from partsong.solvers.observed import ObservedRows

LONE = (
    "in each exchange a block of columns of H comes from one party alone, so that a masked sum would show it as it is. "
    "Play in the open, or use shared statistics, whose sums have an addend from everybody."
)
RISES = 5
"""Sweeps in a row in which the error rises before a step is called too large."""
SETTLED = 2 * RISES
"""Sweeps in a row with an error above where it began after which that is no passing."""
WANDERING = 1.05
"""Meetings wander about by less than this where they settle."""
BEYOND = 1e302
"""No larger squared error can be sent."""


@dataclass(frozen=True, slots=True)
class PlayParty:
    """W, which of the blocks this party begins with, how many there are, and ‖X − W H‖² where it knows that.

    `curvature` is 1/η of a constant step that was safe where it began; 0 where no step is given.
    """

    seat: int
    seats: int
    secret: int
    W: Array | None = None
    squared_error: float = float("nan")
    curvature: float = 0.0
    has_played: bool = False


@dataclass(frozen=True, slots=True)
class PlayServer:
    """H (k × m), the sweep and stratum that come next, the pace, and what players saw in this sweep and the last.

    `row_size` is ‖w‖² on average over all parties, 0 while nobody has told.

    `squared_error` is that of the model, where a single party knows it, else NaN; players see about as much. `least` is
    the smallest so far, `first_error` and `squared_norm` sums over parties when they began. `rises` counts sweeps in a
    row after which it was larger than before, `above` those after which it was larger than at the start, `absent` the
    blocks that nobody has played in this sweep, `was_whole` tells whether there were none in the last.
    """

    H: Array
    blocks: int
    sweep: int = 0
    stratum: int = 0
    pace: float = 1.0
    seen: float = 0.0
    seen_before: float = float("inf")
    first_error: float = 0.0
    squared_error: float = float("nan")
    squared_norm: float = 0.0
    row_size: float = 0.0
    curvature: float = 0.0
    least: float = float("inf")
    rises: int = 0
    absent: int = 0
    was_whole: bool = True
    above: int = 0


@dataclass(frozen=True, slots=True)
class PlayInStrata:
    """NMF as a game of row players, who live at parties, and column players, who travel (Singh, 2021; docs/game.md).

        exchange s of a sweep: party p plays its rows against block (p + s) mod N of the columns
        sent: that block of H (k × m/N), its place (3), totals (7)       broadcast: H (k × m), turn (3), pace (2)

    Blocks of an exchange share no player, so that a sweep of N exchanges is a sequential play in another order. With
    one party an exchange is a sweep. A party plays its block `repeats` times before it passes it on. Seats are dealt
    once, at the start; a block whose party is absent waits. Totals are Σ e² as players saw it; n_p and ‖W_p‖², so that
    steps are alike at all parties (SafeStep only); and in a party's first exchange ‖X_p‖², ‖X_p − W_p H‖² and, where a
    step is given, how small it must be (by max ‖w‖², max ‖h‖² and max x).

    Never sent: X_p, W_p. What a column player looked like before and after a party's rows have played it tells of these
    rows, and more with each sweep: with one row the difference is a multiple of its w. Parties who must hide that use
    shared statistics under masks.
    """

    rank: int
    game: Game = field(default_factory=Game)
    solver: ObservedRows = field(default_factory=ObservedRows)
    repeats: int = 1
    aggregation: DisjointBlocks = DisjointBlocks()

    def __post_init__(self) -> None:
        for name in ("rank", "repeats"):
            value = getattr(self, name)
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
                raise ParameterError(f"PlayInStrata needs a whole number {name} ≥ 1; got {value!r}.")

    def directions(self, model: Message | None) -> int:
        """Each column is played once a sweep, and moves along k numbers: k in all exchanges of a sweep together."""
        blocks = 1 if model is None else max(1, int(model["turn"][2]))
        return -(-self.rank // blocks)

    def directions_after(self, exchanges: int, parties: int) -> int:
        """As many in each exchange."""
        return exchanges * -(-self.rank // parties)

    def exchanges_among(self, parties: int) -> int:
        """A sweep takes an exchange for each party."""
        return parties

    def start_party(self, shard: Shard, layout: Layout) -> PlayParty:
        seats = len(layout.parties)
        if seats > 1 and not self.game.order.plays_cells:
            raise CompositionError(
                f"{type(self.game.order).__name__} moves all players at once, which takes all rows. Between parties "
                "play single cells (Raster, Shuffled, Stratified), or take SharedSums with ProjectedGradient."
            )
        return PlayParty(layout.parties.index(shard.name), seats, shard.secret)

    def start_server(self, layout: Layout) -> tuple[PlayServer, Message]:
        """Random H from the shared seed."""
        Ht = random_columns(layout.n_features, self.rank, stream(layout.seed, "start"), layout.dtype)
        return self.start_from(Ht, len(layout.parties))

    def start_from(self, Ht: Array, parties: int = 1) -> tuple[PlayServer, Message]:
        """The server's start from a given Hᵀ."""
        server = PlayServer(Ht.T, parties)
        return server, _model(server)

    def local(self, shard: Shard, party: PlayParty, model: Message) -> tuple[PlayParty, Message]:
        """The party's rows against one block of columns."""
        matrix, (sweep, stratum, blocks) = shard.matrix, (int(value) for value in model["turn"])
        if blocks != party.seats:
            raise PartyError(
                f"Columns were dealt out among {blocks} parties, and {shard.name!r} has a seat among {party.seats}. "
                "Parties may miss exchanges, but nobody joins a game that has begun: start again with all of them."
            )
        H = matrix.native(model["H"])
        Ht = kernels.of(H).rows_of(H)
        block, is_alone = (party.seat + stratum) % blocks, blocks == 1
        is_new = not party.has_played
        party = self._begun(matrix, party, Ht) if is_new else party
        before = party.squared_error if is_new or is_alone else float("nan")
        draw, standing = stream(party.secret, "play", shard.name, sweep, stratum), Standing(party.W, Ht, 0.0)
        pace, row_size = (float(value) for value in model["pace"])
        how: dict[str, Any] = {"pace": pace, "miss": _root(before), "row_size": row_size or None}
        span = span_of(block, blocks, len(Ht))
        for _ in range(self.repeats if span[0] < span[1] else 0):
            standing = self.game.sweep(matrix, standing, sweep, draw=draw, columns=span, **how)
        seen = standing.seen if self.game.order.plays_cells else before
        after = _squared_distance(matrix, standing.W, standing.Ht) if is_alone else 0.0
        sent = cut_out(standing.Ht, block, blocks)
        if not (seen <= BEYOND and after <= BEYOND and _can_be_squared(sent)):
            told = f"in sweep {sweep + 1} numbers at party {shard.name!r} grew beyond all measure"
            raise self.game.too_large(told, party.curvature)
        start, energy = (before, matrix.squared_norm) if is_new else (0.0, 0.0)
        rows, sizes = (len(standing.W), len(standing.W) * mean_size(standing.W)) if self._evens(blocks) else (0, 0.0)
        totals = np.array([seen, after, energy, start, rows, sizes, party.curvature if is_new else 0.0])
        place = np.array([block, blocks, len(Ht)], np.int64)
        moved = replace(party, W=standing.W, squared_error=after if is_alone else float("nan"))
        return moved, Message({"H": sent, "place": place, "totals": totals})

    def _evens(self, blocks: int) -> bool:
        """Whether parties tell how large their rows are, so that steps are alike at all of them."""
        return blocks > 1 and self.game.step.is_balanced

    def _begun(self, matrix: Matrix, party: PlayParty, Ht: Array) -> PlayParty:
        """A party with weights, and with how far they are from its data."""
        W = first_weights(matrix, Ht) if party.W is None else party.W
        error = _squared_distance(matrix, W, Ht)
        curvature = 0.0 if self.game.step.is_balanced else self.game.curvature(matrix, W, Ht)
        return replace(party, W=W, squared_error=error, curvature=curvature, has_played=True)

    def finish(self, server: PlayServer, aggregate: Message) -> tuple[PlayServer, Message]:
        """Blocks that have arrived take their places; after the last stratum of a sweep the pace is set anew."""
        arrived = np.asarray(aggregate["arrived"])
        if (arrived > 1).any():
            raise PartyError(
                "Two parties have sent the same block of columns; each has a seat of its own. Start again."
            )
        seen, after, energy, start, rows, sizes = (float(value) for value in aggregate["totals"])
        H = joined(server.H, aggregate["H"], arrived)
        moved = replace(
            server,
            H=H,
            seen=server.seen + seen,
            first_error=server.first_error + start,
            squared_norm=server.squared_norm + energy,
            curvature=max(server.curvature, float(np.max(aggregate["curvatures"]))),
            row_size=sizes / rows if rows else server.row_size,
            absent=server.absent + int((arrived < 1).sum()),
        )
        if _has_any(server.H) and not _has_any(H) and moved.squared_norm > 0:
            told = f"after sweep {moved.sweep + 1} all players have fallen to zero"
            raise self.game.too_large(told, moved.curvature, has_collapsed=True)
        if server.stratum + 1 < server.blocks:
            moved = replace(moved, stratum=server.stratum + 1)
        else:
            moved = self._after_sweep(moved, after if server.blocks == 1 else float("nan"))
        return moved, _model(moved)

    def _after_sweep(self, server: PlayServer, error: float) -> PlayServer:
        """The next sweep, unless the step was too large; sweeps of other companies are not compared."""
        latest, before = (server.seen, server.seen_before) if np.isnan(error) else (error, server.squared_error)
        is_comparable = server.was_whole and not server.absent
        rises = server.rises + 1 if is_comparable and latest > before else 0
        above = server.above + 1 if is_comparable and self._is_above(server, latest) else 0
        is_lost = above >= SETTLED or self._is_lost(server, latest, rises)
        if is_comparable and not self.game.step.is_balanced and is_lost:
            raise self._too_large(server, f"the squared error has risen to {latest:.4g}")
        pace = server.pace
        if is_comparable:
            pace = self.game.step.paced(pace, server.sweep, server.seen_before, server.seen)
        return replace(
            server,
            sweep=server.sweep + 1,
            stratum=0,
            pace=pace,
            seen=0.0,
            seen_before=server.seen,
            squared_error=error,
            least=min(server.least, latest) if is_comparable else server.least,
            rises=rises,
            absent=0,
            was_whole=not server.absent,
            above=above,
        )

    def _is_lost(self, server: PlayServer, latest: float, rises: int) -> bool:
        """Whether a step that was given has raised the error by more than meetings, or self-play, do where they settle.

        Self-play may raise it for long, up to where it is.
        """
        is_climbing = rises >= RISES and latest > TWICE * server.least + NOTHING * server.squared_norm
        is_beyond = latest > self.game.most_error(server.first_error, server.squared_norm)
        return is_beyond or (is_climbing and not self.game.shapes_columns)

    def _is_above(self, server: PlayServer, latest: float) -> bool:
        """Whether a step beyond what is safe has left an error above the first by more than meetings wander about."""
        if self.game.shapes_columns or not self.game.oversteps(server.sweep, server.curvature):
            return False
        return latest > WANDERING * server.first_error + NOTHING * server.squared_norm

    def _too_large(self, server: PlayServer, what: str) -> StepTooLarge:
        told = f"after sweep {server.sweep + 1} {what} (it began with {server.first_error:.4g})"
        return self.game.too_large(told, server.curvature)

    def components(self, server: PlayServer) -> Array:
        """H (k × m) as it stands."""
        return server.H

    def turn(self, model: Message) -> Turn:
        """A round ends with a sweep."""
        return Turn(ends_round=int(model["turn"][1]) == 0)

    def metrics(self, server: PlayServer) -> Mapping[str, float]:
        """‖X − W H‖ / ‖X‖ over the cells that are played, where one party holds all of them."""
        if np.isnan(server.squared_error):
            return {}
        share = max(0.0, server.squared_error) / server.squared_norm if server.squared_norm > 0 else 0.0
        return {"relative_error": float(np.sqrt(share)), "objective": share}

    def expects(self, layout: Layout) -> tuple[Mapping[str, Form], ...]:
        """A block of columns, its place, and totals."""
        width = breadth(len(layout.parties), layout.n_features)
        H = Form((self.rank, width), non_negative=True, lone=LONE, is_factor=True)
        place, totals = Form((3,), "int", non_negative=True), Form((7,), non_negative=True)
        return ({"H": H, "place": place, "totals": totals},)


def _model(server: PlayServer) -> Message:
    turn = np.array([server.sweep, server.stratum, server.blocks], np.int64)
    return Message({"H": server.H, "turn": turn, "pace": np.array([server.pace, server.row_size])})


def _can_be_squared(H: Array) -> bool:
    """Whether these are numbers whose squares can be told in their type."""
    values = kernels.of(H).to_numpy(H)
    return bool(values.max(initial=0) < np.sqrt(np.finfo(values.dtype).max))


def _has_any(H: Array) -> bool:
    return bool(kernels.of(H).to_numpy(H).any())


def _squared_distance(matrix: Matrix, W: Array, Ht: Array) -> float:
    """‖X − W H‖², which rounding may not make negative."""
    return float(np.maximum(0.0, matrix.squared_distance(W, Ht)))


def _root(square: float) -> float:
    return float(np.sqrt(np.maximum(0.0, square)))
