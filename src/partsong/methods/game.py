"""Federated factorization game: each party plays its rows against one block of columns and passes the block on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np

from partsong import kernels
from partsong.aggregation.linear import DisjointBlocks, block_span, block_width, extract_block, merge_blocks
from partsong.core.interfaces import Array, ArraySpec, Layout, Matrix, Message, ProgramBase, Shard, Turn
from partsong.core.parameters import FACTOR, Above, Steps, whole_number
from partsong.core.states import state
from partsong.core.streams import stream
from partsong.data.conversion import transposed_factor
from partsong.errors import CompositionError, DivergenceError, ParameterError, PartyError
from partsong.methods.averaging import LocalAveraging
from partsong.methods.init_modes import SHARED_INIT, InitMode, SharedInitMode
from partsong.methods.registry import Problem, method
from partsong.solvers.game import (
    LEADER_NAMES,
    SELF_PLAYS,
    STEP_SIZES,
    Game,
    GameState,
    SelfPlay,
    compose_game,
    initial_weights,
    mean_squared_norm,
)
from partsong.solvers.game_orders import ORDERS, Order
from partsong.solvers.initialization import random_columns
from partsong.solvers.observed import ObservedRowSolver

SINGLE_PARTY_REASON = (
    "in each exchange each block of columns of H comes from one party, so a masked sum would reveal it. Remove secure "
    "aggregation, or use method='exact', whose sums have an addend from every party."
)
DIVERGED_FACTOR = 1e6
"""A game has diverged if its squared error exceeds the initial one (or ‖X‖²) by this factor."""
BLOCK = "the columns of H that the party has played"
TOTALS = "Σe², n_p, ‖W_p‖²; at first ‖X_p‖² and ‖X_p − W_p H‖²"
MAX_SQUARED_ERROR = 1e302
"""The largest squared error that can be sent."""


@state("game.party")
@dataclass(frozen=True, slots=True)
class GamePartyState:
    """W, the block the party starts with, the number of blocks, and ‖X − W H‖² if the party knows it."""

    block_index: int
    n_blocks: int
    secret: int
    W: Array | None = None
    squared_error: float = float("nan")
    has_played: bool = False


@state("game.server")
@dataclass(frozen=True, slots=True)
class GameServerState:
    """H (k × m), the next sweep and stratum, the pace, and the squared errors that players saw in the last two sweeps.

    `row_size`: mean ‖w‖² over all parties, 0 while unknown. `squared_error`: of the model, if a single party holds all
    rows, else NaN; `seen` approximates it. `first_error` and `squared_norm`: sums over parties at their start.
    `absent`: number of blocks not played in this sweep. `was_whole`: whether all blocks were played in the last sweep.
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
    absent: int = 0
    was_whole: bool = True


@dataclass(frozen=True, slots=True)
class FederatedGame(ProgramBase):
    """NMF as a game: row players stay at their parties, column players travel between them (Singh, 2021).

    Theorems: docs/reference/game.md.

        exchange s of a sweep: party p plays its rows against block (p + s) mod N of the columns
        sent: that block of H (k × m/N), its place (3), totals (6)       broadcast: H (k × m), turn (3), pace (2)

    The blocks of an exchange share no player, so a sweep of N exchanges equals sequential play in another order. With
    one party an exchange is a sweep. A party plays its block `repeats` times before it passes it on. Blocks are
    assigned once, at the start; a block waits while its party is absent. Totals are Σ e² as players saw it; n_p and
    ‖W_p‖², to balance steps over parties (SafeStep only); and, in a party's first exchange, ‖X_p‖² and ‖X_p − W_p H‖².

    Never sent: X_p, W_p. The change of a column while a party plays it reveals something about that party's rows, and
    more with each sweep: for a single row, the change is a multiple of its w. To hide that, use SharedSums with secure
    aggregation.
    """

    rank: int
    game: Game = field(default_factory=Game)
    solver: ObservedRowSolver = field(default_factory=ObservedRowSolver)
    repeats: int = 1
    aggregation: DisjointBlocks = DisjointBlocks()

    def __post_init__(self) -> None:
        for name in ("rank", "repeats"):
            whole_number(f"FederatedGame: {name}", getattr(self, name))

    def directions(self, model: Message | None) -> int:
        """Each column is played once per sweep and reveals k directions over all exchanges of a sweep."""
        blocks = 1 if model is None else max(1, int(model["turn"][2]))
        return -(-self.rank // blocks)

    def directions_after(self, exchanges: int, parties: int) -> int:
        return exchanges * -(-self.rank // parties)

    def exchanges(self, rounds: int, n_parties: int) -> int:
        return rounds * n_parties

    def start_party(self, shard: Shard, layout: Layout) -> GamePartyState:
        n_blocks = len(layout.parties)
        if n_blocks > 1 and not self.game.order.plays_cells:
            raise CompositionError(
                f"{type(self.game.order).__name__} moves all players at once, which needs all rows. With several "
                "parties, use Raster, Shuffled or Stratified, or SharedSums with ProjectedGradient."
            )
        return GamePartyState(layout.parties.index(shard.name), n_blocks, shard.secret)

    def start_server(self, layout: Layout) -> tuple[GameServerState, Message]:
        Ht = random_columns(layout.n_features, self.rank, stream(layout.seed, "start"), layout.dtype)
        return self.start_from(Ht, len(layout.parties))

    def start_from(self, Ht: Array, parties: int = 1) -> tuple[GameServerState, Message]:
        """Start the server from a given Hᵀ."""
        server = GameServerState(Ht.T, parties)
        return server, _model(server)

    def local(self, shard: Shard, party: GamePartyState, model: Message) -> tuple[GamePartyState, Message]:
        matrix, (sweep, stratum, blocks) = shard.matrix, (int(value) for value in model["turn"])
        if blocks != party.n_blocks:
            raise PartyError(
                f"The model has {blocks} blocks of columns, but party {shard.name!r} started with {party.n_blocks}. "
                "Parties may miss exchanges, but cannot join a running game. Start a new run with all parties."
            )
        Ht = transposed_factor(matrix, model["H"])
        block, is_alone = (party.block_index + stratum) % blocks, blocks == 1
        is_new = not party.has_played
        party = self._with_weights(matrix, party, Ht) if is_new else party
        before = party.squared_error if is_new or is_alone else float("nan")
        draw, game_state = stream(party.secret, "play", shard.name, sweep, stratum), GameState(party.W, Ht, 0.0)
        pace, row_size = (float(value) for value in model["pace"])
        how: dict[str, Any] = {"pace": pace, "residual_norm": _root(before), "row_size": row_size or None}
        span = block_span(block, blocks, len(Ht))
        for _ in range(self.repeats if span[0] < span[1] else 0):
            game_state = self.game.sweep(matrix, game_state, sweep, generator=draw, columns=span, **how)
        seen = game_state.squared_error if self.game.order.plays_cells else before
        after = _squared_distance(matrix, game_state.W, game_state.Ht) if is_alone else 0.0
        sent = extract_block(game_state.Ht, block, blocks)
        if not (seen <= MAX_SQUARED_ERROR and after <= MAX_SQUARED_ERROR and _can_be_squared(sent)):
            raise DivergenceError(
                f"The game diverged at party {shard.name!r} in sweep {sweep + 1} (overflow). "
                f"{self.game.divergence_advice}"
            )
        start, energy = (before, matrix.squared_norm) if is_new else (0.0, 0.0)
        rows, sizes = (
            (len(game_state.W), len(game_state.W) * mean_squared_norm(game_state.W))
            if self._balances_steps(blocks)
            else (0, 0.0)
        )
        totals = np.array([seen, after, energy, start, rows, sizes])
        place = np.array([block, blocks, len(Ht)], np.int64)
        moved = replace(party, W=game_state.W, squared_error=after if is_alone else float("nan"))
        return moved, Message({"H": sent, "place": place, "totals": totals})

    def _balances_steps(self, blocks: int) -> bool:
        """Whether parties send n_p and ‖W_p‖² to balance steps."""
        return blocks > 1 and self.game.step.is_balanced

    def _with_weights(self, matrix: Matrix, party: GamePartyState, Ht: Array) -> GamePartyState:
        """Initialize the party's weights and its squared error."""
        W = initial_weights(matrix, Ht) if party.W is None else party.W
        return replace(party, W=W, squared_error=_squared_distance(matrix, W, Ht), has_played=True)

    def finish(self, server: GameServerState, aggregate: Message) -> tuple[GameServerState, Message]:
        """Insert the blocks that arrived; after the last stratum of a sweep, update the pace."""
        arrived = np.asarray(aggregate["arrived"])
        if (arrived > 1).any():
            raise PartyError(
                "Two parties have sent the same block of columns. Start a new run in which each party has its own "
                "block."
            )
        seen, after, energy, start, rows, sizes = (float(value) for value in aggregate["totals"])
        H = merge_blocks(server.H, aggregate["H"], arrived)
        moved = replace(
            server,
            H=H,
            seen=server.seen + seen,
            first_error=server.first_error + start,
            squared_norm=server.squared_norm + energy,
            row_size=sizes / rows if rows else server.row_size,
            absent=server.absent + int((arrived < 1).sum()),
        )
        if server.stratum + 1 < server.blocks:
            moved = replace(moved, stratum=server.stratum + 1)
        else:
            moved = self._after_sweep(moved, after if server.blocks == 1 else float("nan"))
        return moved, _model(moved)

    def _after_sweep(self, server: GameServerState, error: float) -> GameServerState:
        """Start the next sweep; the pace changes only if all blocks were played in this sweep and the last."""
        if not server.seen <= DIVERGED_FACTOR * max(server.first_error, server.squared_norm):
            raise DivergenceError(
                f"The game diverged: the squared error reached {server.seen:.4g} in sweep {server.sweep + 1} "
                f"(initially {server.first_error:.4g}). {self.game.divergence_advice}"
            )
        pace = server.pace
        if server.was_whole and not server.absent:
            pace = self.game.step.next_pace(pace, server.sweep, server.seen_before, server.seen)
        return replace(
            server,
            sweep=server.sweep + 1,
            stratum=0,
            pace=pace,
            seen=0.0,
            seen_before=server.seen,
            squared_error=error,
            absent=0,
            was_whole=not server.absent,
        )

    def components(self, server: GameServerState) -> Array:
        return server.H

    def turn(self, model: Message) -> Turn:
        return Turn(ends_round=int(model["turn"][1]) == 0)

    def metrics(self, server: GameServerState) -> Mapping[str, float]:
        """‖X − W H‖ / ‖X‖ over all played cells, if one party holds them all."""
        if np.isnan(server.squared_error):
            return {}
        share = max(0.0, server.squared_error) / server.squared_norm if server.squared_norm > 0 else 0.0
        return {"relative_error": float(np.sqrt(share)), "objective": share}

    def upload_spec(self, layout: Layout) -> tuple[Mapping[str, ArraySpec], ...]:
        """A block of columns, its position, and totals."""
        width = block_width(len(layout.parties), layout.n_features)
        H = ArraySpec(
            (self.rank, width),
            non_negative=True,
            single_party_reason=SINGLE_PARTY_REASON,
            is_factor=True,
            meaning=BLOCK,
        )
        place = ArraySpec((3,), "int", non_negative=True, meaning="which columns these are, and of how many")
        totals = ArraySpec((6,), non_negative=True, meaning=TOTALS)
        return ({"H": H, "place": place, "totals": totals},)


def _model(server: GameServerState) -> Message:
    turn = np.array([server.sweep, server.stratum, server.blocks], np.int64)
    return Message({"H": server.H, "turn": turn, "pace": np.array([server.pace, server.row_size])})


def _can_be_squared(H: Array) -> bool:
    """Whether squares of these numbers fit their number type."""
    values = kernels.of(H).to_numpy(H)
    return bool(values.max(initial=0) < np.sqrt(np.finfo(values.dtype).max))


def _squared_distance(matrix: Matrix, W: Array, Ht: Array) -> float:
    """‖X − W H‖², clipped at zero against rounding."""
    return float(np.maximum(0.0, matrix.squared_distance(W, Ht)))


def _root(square: float) -> float:
    return float(np.sqrt(np.maximum(0.0, square)))


GameOrder = Annotated[Order | None, ORDERS]
Pace = Annotated[str | float | None, STEP_SIZES]
Decay = Annotated[float | None, Above(0)]
SelfPlayOption = Annotated[SelfPlay | None, SELF_PLAYS]
Shrink = Annotated[float | None, FACTOR]
Leader = Annotated[str | None, LEADER_NAMES]


@method("game", over_ranks=True)
def game(
    problem: Problem,
    *,
    order: GameOrder = None,
    step: Pace = None,
    step_decay: Decay = None,
    self_play: SelfPlayOption = None,
    shrink: Shrink = None,
    leader: Leader = None,
    local_steps: Steps = 1,
    init_mode: SharedInitMode = SHARED_INIT,
) -> FederatedGame:
    """Rows and columns play a game over single cells; blocks of columns travel between parties; a round is a sweep.

    Singh (2021). Defaults: order "stratified", step "safe", no self-play, and both players of a cell move at once.
    `step_decay`: steps are divided by 1 + decay · t in sweep t. `shrink`: the factor of self-play. `leader` ("rows" or
    "columns"): that player moves first in each cell. A round takes one exchange per party. Sent per exchange and party:
    a block of columns of H (k × m/N), its position (3) and totals (6). Never sent: X_p, W_p. The change of a column
    reveals something about the rows that played it.
    """
    made = compose_game(order, step, step_decay, self_play, shrink, leader)
    if not made.order.plays_cells:
        raise ParameterError(
            f'order = "{ORDERS.plain(made.order)}" moves all players at once, which needs all rows in one place. Use '
            'another order, or method = "game-consensus".',
            parameter="order",
        )
    return FederatedGame(problem.rank, made, repeats=local_steps)


@method("game-consensus", extends=game)
def game_consensus(
    problem: Problem, *, local_steps: Steps = 10, init_mode: InitMode = SHARED_INIT, **parts: Any
) -> LocalAveraging:
    """Like fedavg, with sweeps of the game over a party's own rows as local steps.

    Sent per round and party: H_p (k × m) and n_p. Never sent: X_p, W_p.
    """
    return LocalAveraging(problem.rank, steps=local_steps, init_mode=init_mode, game=compose_game(**parts))
