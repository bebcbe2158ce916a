"""Factorize alone on sketches, and agree on a sketch of H before every step of W."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from partsong import kernels
from partsong.aggregate.linear import Mean, WeightedMean
from partsong.core import Array, Form, Layout, Message, Shard
from partsong.errors import CompositionError, ParameterError, PartyError
from partsong.local.alternate import Alternate
from partsong.local.equations import NormalEquations
from partsong.local.momentum import NoExtrapolation
from partsong.local.proximal import ProximalDescent, warn_if_noisy
from partsong.local.rules import RuleState
from partsong.local.sketched import exact_columns, exact_rows, first_rows, sketched_columns, sketched_rows
from partsong.programs.joining import CommonStart
from partsong.sketch.operator import Operator
from partsong.sketch.proportion import Proportion
from partsong.sketch.subsampling import Subsampling
from partsong.streams import stream


@dataclass(frozen=True, slots=True)
class SteppingParty:
    """The shared seed, W, the party's own Hᵀ (m × k), what the rule remembers of each, the last outer round begun."""

    seed: int
    W: Array | None = None
    Ht: Array | None = None
    rows: RuleState = RuleState()
    columns: RuleState = RuleState()
    outer: int = -1


@dataclass(frozen=True, slots=True)
class MeanServer:
    """H (k × m) as last agreed on, and the outer round and exchange that come next."""

    H: Array
    outer: int = 0
    turn: int = 0


@dataclass(frozen=True, slots=True)
class SketchedConsensus:
    """Syn-SSD (Qian et al., 2020, Alg. 5), with H for their U and W for their V: one round is one exchange.

        exchange 0:               H_p ← H;                                  H_p ← step_H
        exchange i = 1 … inner:   W_p ← rule(W_p; B Bᵀ, X_p S2 Bᵀ);         H_p ← step_H, but not after the last
        step_H:                   rule(H_p; S1ᵀW_p, S1ᵀX_p)
        sent:        H_p S2 (k × d2) in exchanges 0 … inner − 1, H_p (k × m) in exchange `inner`
        broadcast:   B = mean of H_p S2, or H = mean of H_p, and the outer round and exchange (2)

    So W always fits the mean of all H_p, and copies cannot turn away from each other between two outer means. S2
    (m × d2) is everybody's, from the shared seed; S1 (n_p × d1) the party's own, from its secret; both are drawn anew
    in every iteration. Syn-SSD-U has `columns_sketch` alone, -V `rows_sketch` alone, -UV both; where one is None that
    step is exact, and without S2 all of H_p is sent in every exchange. The first W is one step of the rule from
    w = c·1, which the rule does not count.

    Never sent: X_p, W_p, or anything with a row per row of X_p. What the server sees of H_p without masks are H_p S2
    and H_p themselves; the other party of two, or all others together, know H_p from the mean.

    A party that was not in exchange 0 of an outer round has no H to go on from: it is refused until the next one. One
    that misses a later exchange goes on from where it was.
    """

    rank: int
    solver: Alternate = field(default_factory=lambda: Alternate(ProximalDescent()))
    inner: int = 10
    rows_sketch: Proportion | None = Proportion()
    columns_sketch: Proportion | None = Proportion()
    aggregation: Mean | WeightedMean = Mean()
    start: CommonStart = CommonStart()

    def __post_init__(self) -> None:
        for name in ("rank", "inner"):
            value = getattr(self, name)
            if not isinstance(value, (int, np.integer)) or value < 1:
                raise ParameterError(f"SketchedConsensus needs a whole number {name} ≥ 1; got {value!r}.")
        if self.rows_sketch is not None or self.columns_sketch is not None:
            warn_if_noisy(self.solver.rule)
        if not isinstance(self.solver.momentum, NoExtrapolation):
            raise CompositionError("Sketched steps and extrapolation do not go together; use NoExtrapolation.")
        if not isinstance(self.aggregation, (Mean, WeightedMean)):
            raise CompositionError(
                f"A sketch of H can be averaged and not aligned, so {self.aggregation} cannot be used: take Mean or "
                "WeightedMean."
            )

    @property
    def needs_everyone(self) -> bool:
        """W fits the mean of all H_p."""
        return True

    def rounds_for(self, outer: int) -> int:
        """Exchanges that so many outer rounds take."""
        return outer * (self.inner + 1)

    def start_party(self, shard: Shard, layout: Layout) -> SteppingParty:
        """Neither W nor H yet, but the seed of S2."""
        return SteppingParty(layout.seed)

    def start_server(self, layout: Layout) -> tuple[MeanServer, Message]:
        """H from the shared seed."""
        Ht = self.start.model(layout, self.rank, stream(layout.seed, "start"))
        assert Ht is not None
        return MeanServer(Ht.T), Message({"H": Ht.T, "turn": np.array([0, 0], np.int64)})

    def local(self, shard: Shard, party: SteppingParty, model: Message) -> tuple[SteppingParty, Message]:
        """The step of W that the model is for, and the next step of H."""
        outer, turn = (int(value) for value in model["turn"])
        step = outer * self.inner + turn
        if turn == 0:
            party = self._begin(shard, party, _columns(shard, model["H"]), outer)
        else:
            _require_begun(shard, party, outer)
            party = self._row_step(shard, party, model, step - 1)
        S = None
        if turn < self.inner:
            party = self._column_step(shard, party, step)
            S = self._shared_sketch(party, shard.matrix.shape[1], step)
        Ht: Array = party.Ht
        sent = {"H": Ht.T} if S is None else {"sketch": S.sketch_transposed(Ht)}
        weight = float(shard.matrix.shape[0]) if isinstance(self.aggregation, WeightedMean) else 1.0
        return party, Message(sent, weight)

    def _begin(self, shard: Shard, party: SteppingParty, Ht: Array, outer: int) -> SteppingParty:
        rule = self.solver.rule
        memory = replace(rule.init(Ht), count=party.columns.count, scale=party.columns.scale)
        party = replace(party, Ht=Ht, columns=memory, outer=outer)
        if party.W is not None:
            return party
        S = self._shared_sketch(party, shard.matrix.shape[1], "start")
        equations = _for_rows(shard, S, Ht.T if S is None else S.sketch_transposed(Ht))
        W = first_rows(equations)
        W, rows = rule.step(W, equations.penalised(self.solver.penalty_W, shard.matrix.shape[1]), rule.init(W))
        return replace(party, W=W, rows=replace(rows, count=0))

    def _row_step(self, shard: Shard, party: SteppingParty, model: Message, step: int) -> SteppingParty:
        m = shard.matrix.shape[1]
        S = self._shared_sketch(party, m, step)
        equations = _for_rows(shard, S, model["H" if S is None else "sketch"]).penalised(self.solver.penalty_W, m)
        W, rows = self.solver.rule.step(party.W, equations, party.rows)
        return replace(party, W=W, rows=rows)

    def _column_step(self, shard: Shard, party: SteppingParty, step: int) -> SteppingParty:
        matrix, n = shard.matrix, shard.matrix.shape[0]
        if self.rows_sketch is None:
            equations = exact_columns(matrix, party.W)
        else:
            S = self.rows_sketch.draw(n, self.rank, shard.secret, "S1", shard.name, step)
            equations = sketched_columns(matrix, S, party.W)
        Ht, columns = self.solver.rule.step(party.Ht, equations.penalised(self.solver.penalty_H, n), party.columns)
        return replace(party, Ht=Ht, columns=columns)

    def _shared_sketch(self, party: SteppingParty, m: int, step: int | str) -> Operator | None:
        """S2 (m × d2) of an iteration, the same at all parties."""
        sketch = self.columns_sketch
        return None if sketch is None else sketch.draw(m, self.rank, party.seed, "S2", step)

    def finish(self, server: MeanServer, aggregate: Message) -> tuple[MeanServer, Message]:
        """The mean goes back as it is; after the last exchange it is the new H."""
        if server.turn == self.inner:
            H = aggregate["H"].clip(min=0)  # rounding under masks
            after = MeanServer(H, server.outer + 1, 0)
            mean = {"H": H}
        else:
            after = replace(server, turn=server.turn + 1)
            mean = dict(aggregate.arrays)
        return after, Message({**mean, "turn": np.array([after.outer, after.turn], np.int64)})

    def components(self, server: MeanServer) -> Array:
        """H (k × m) of the last outer round."""
        return server.H

    def metrics(self, server: MeanServer) -> Mapping[str, float]:
        """Nothing: the server sees no error."""
        return {}

    def expects(self, layout: Layout) -> tuple[Mapping[str, Form], ...]:
        """H_p ≥ 0, and H_p S2, which is non-negative where S2 only chooses columns."""
        m = layout.n_features
        whole = {"H": Form((self.rank, m), non_negative=True, is_factor=True)}
        if self.columns_sketch is None:
            return (whole,)
        d = self.columns_sketch.dimension(m, self.rank)
        chooses = isinstance(self.columns_sketch.kind(d), Subsampling)
        return {"sketch": Form((self.rank, d), non_negative=chooses, is_factor=True)}, whole

    def ends_round(self, model: Message) -> bool:
        """Whether the exchange before this model was the last of an outer round."""
        return int(model["turn"][1]) == 0

    def exchange(self, model: Message) -> tuple[int, int]:
        """The last two exchanges of an outer round belong together under masks, and no others do.

        Between them H_p does not move: with another company the sums of H_p S2 and of H_p would differ by one party's.
        Between all others every H_p takes a step, and S2 is another one.
        """
        turn = int(model["turn"][1])
        return (max(0, turn - self.inner + 1), 2) if turn >= self.inner - 1 else (0, 1)


def _columns(shard: Shard, H: Array) -> Array:
    native = shard.matrix.native(H)
    return kernels.of(native).rows_of(native)


def _for_rows(shard: Shard, S: Operator | None, B: Array) -> NormalEquations:
    """The equations for W from H S, or from H where there is no S."""
    if S is None:
        return exact_rows(shard.matrix, _columns(shard, B))
    return sketched_rows(shard.matrix, S, shard.matrix.native(B))


def _require_begun(shard: Shard, party: SteppingParty, outer: int) -> None:
    if party.outer != outer:
        raise PartyError(
            f"Party {shard.name!r} missed the first exchange of outer round {outer} and has no H to go on from. It can "
            'join in the next outer round: keep it absent until then, or go on without it by faulty="leave out".'
        )
