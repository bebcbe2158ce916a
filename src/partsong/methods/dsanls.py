"""DSANLS: both factors are distributed over nodes, which exchange sketches (Qian et al., 2020)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated

import numpy as np

from partsong import kernels
from partsong.aggregation.linear import Sum
from partsong.core.interfaces import (
    Array,
    ArraySpec,
    Layout,
    Message,
    ProgramBase,
    Shard,
    Sums,
    Traits,
    Turn,
    UpdateRule,
)
from partsong.core.parameters import SHARE, Whole, whole_number
from partsong.core.states import state
from partsong.core.streams import stream
from partsong.data.blocks import TwoSided, coverage_sums, require_cover
from partsong.data.conversion import transposed_factor
from partsong.errors import CompositionError, PartyError
from partsong.methods.registry import Problem, method
from partsong.sketch import crossing
from partsong.sketch.crossing import Proportion
from partsong.sketch.kinds import SKETCHES, Subsampling
from partsong.sketch.operator import Operator, Sketch
from partsong.solvers.initialization import random_columns
from partsong.solvers.normal_equations import NormalEquations, Penalty, RuleState
from partsong.solvers.squared_error import SquaredError, constant_rows
from partsong.solvers.update_rules import RULES, Multiplicative, NoExtrapolation, ProximalDescent, warn_if_noisy


@state("dsanls.party")
@dataclass(frozen=True, slots=True)
class DsanlsPartyState:
    """The shared seed, the number of parties, W_r (|I_r| × k), H_rᵀ (|J_r| × k), and the update rules' state for each.

    Factors are None before the first exchange.
    """

    seed: int
    parties: int
    W: Array | None = None
    Ht_block: Array | None = None
    memory_W: RuleState | None = None
    memory_H: RuleState | None = None


@dataclass(frozen=True, slots=True)
class DsanlsIteration:
    """One iteration at a party: inputs of its two steps; `cap` bounds their results."""

    rank: int
    solver: SquaredError
    sketch: Proportion
    matrix: TwoSided
    iteration: int
    cap: float

    def measured(self, party: DsanlsPartyState, Ht: Array) -> tuple[DsanlsPartyState, np.ndarray]:
        """‖X_r − W_r H‖², ‖X_r‖² and the party's share of the penalties, from one pass over X_r.

        Before the first step it also initializes the factors: W_r from H and each row alone, H_r from H.
        """
        W, gram = party.W, kernels.of(Ht).gram(Ht)
        new = kernels.of(Ht).empty((self.matrix.shape[0], self.rank), Ht) if W is None else W
        on = kernels.of(new)

        def step(at: slice, cross: Array) -> Sums:
            if W is None:
                new[at] = constant_rows(gram, cross)
            return (on.inner(new[at], cross),)

        (crossed,) = self.matrix.walk(Ht, step)
        energy = self.matrix.squared_norm
        error = energy - 2 * float(crossed) + float(on.inner(on.gram(new), gram))
        first, last = self._columns
        Ht_block = party.Ht_block if party.Ht_block is not None else Ht[first:last] + 0
        penalties = self.matrix.shape[1] * _size(self.solver.penalty_W, new)
        penalties += self.matrix.n_rows * _size(self.solver.penalty_H, Ht_block)
        return replace(party, W=new, Ht_block=Ht_block), np.array([error, energy, penalties])

    def row_step(self, party: DsanlsPartyState, B: Array) -> DsanlsPartyState:
        """W_r ← rule(W_r; B Bᵀ, X[I_r] S Bᵀ) for B = H S (k × d), one block of rows at a time."""
        (gram, Bt), penalty, m = _gram(self.matrix.native(B)), self.solver.penalty_W, self.matrix.shape[1]
        shared, shift = NormalEquations(gram, gram).penalized(penalty, m).gram, penalty.l1 * m
        on, rule = kernels.of(Bt), self.solver.rule
        norm = cache(lambda: on.largest_eigenvalue(shared))
        memory = rule.init(party.W) if party.memory_W is None else party.memory_W
        W, states = on.empty(party.W.shape, Bt), [memory]  # type: ignore[union-attr]
        previous = None if memory.previous is None else on.empty(W.shape, Bt)

        def step(at: slice, cross: Array) -> Sums:
            place, factor = W[at], party.W[at]  # type: ignore[index]
            equations = NormalEquations(shared, cross - shift if shift else cross, norm, place)
            moved, states[0] = rule.step(factor, equations, memory.rows(at))
            if moved is not place:
                place[:] = moved
            if previous is not None:
                previous[at] = states[0].previous
            return ()

        crossing.walk(self._S("W", party), self.matrix.row_block, Bt, step)
        after = replace(states[0], previous=previous)  # the rest is the same in all blocks, which share one gram
        return replace(party, W=self._capped(W), memory_W=after)

    def column_step(self, party: DsanlsPartyState, B: Array) -> DsanlsPartyState:
        """H_r ← rule(H_r; B'B'ᵀ, X[:, J_r]ᵀ S' B'ᵀ) for B' = Wᵀ S' (k × d')."""
        gram, Bt = _gram(self.matrix.native(B))
        cross = crossing.transposed_times(self._S("H", party), self.matrix.column_block, Bt)
        equations = NormalEquations(gram, cross).penalized(self.solver.penalty_H, self.matrix.n_rows)
        memory = self.solver.rule.init(party.Ht_block) if party.memory_H is None else party.memory_H
        Ht, after = self.solver.rule.step(party.Ht_block, equations, memory)
        return replace(party, Ht_block=self._capped(Ht), memory_H=after)

    def _capped(self, factor: Array) -> Array:
        return factor if self.cap == np.inf else factor.clip(max=self.cap)

    def sketch_of_whole(self, party: DsanlsPartyState, Ht: Array) -> Array:
        """H S (k × d) from all of H."""
        return crossing.placed_rows(self._S("W", party), Ht, 0)

    def sketched_W(self, party: DsanlsPartyState) -> Array:
        """W_rᵀ S'[I_r] (k × d')."""
        return crossing.placed_rows(self._S("H", party), party.W, self.matrix.first_row)

    def sketched_H(self, party: DsanlsPartyState) -> Array:
        """H_r S[J_r] (k × d), for the next iteration."""
        following = replace(self, iteration=self.iteration + 1)
        return crossing.placed_rows(following._S("W", party), party.Ht_block, self.matrix.first_column)

    def whole_H(self, party: DsanlsPartyState) -> Array:
        """H_r in its place in all of H (k × m), zero elsewhere."""
        first, last = self._columns
        whole = kernels.of(party.Ht_block).empty((self.matrix.shape[1], self.rank), party.Ht_block)
        whole[:first], whole[first:last], whole[last:] = 0, party.Ht_block, 0
        return whole.T

    @property
    def _columns(self) -> tuple[int, int]:
        return self.matrix.first_column, self.matrix.first_column + self.matrix.column_block.shape[1]

    def _S(self, factor: str, party: DsanlsPartyState) -> Operator:
        """S for the step of a factor: it sketches columns of X for W, rows of X for H."""
        size = self.matrix.shape[1] if factor == "W" else self.matrix.n_rows
        return self.sketch.draw(size, self.rank, party.seed, factor, self.iteration)


def _gram(B: Array) -> tuple[Array, Array]:
    """B Bᵀ (k × k) and Bᵀ (d × k)."""
    on = kernels.of(B)
    Bt = on.rows_of(B)
    return on.cast(on.gram(Bt, exactly=False), Bt), Bt


def _size(penalty: Penalty, factor: Array) -> float:
    """l1 ‖F‖₁ + ½ l2 ‖F‖²."""
    return penalty.l1 * float(factor.sum()) + 0.5 * penalty.l2 * float(kernels.of(factor).inner(factor, factor))


SINGLE_PARTY_REASON = (
    "each node holds columns of all parties' rows, and some of its addends appear unmixed in the sum. DSANLS is for "
    "the machines of one owner. Between parties, use method='exact'."
)


@state("dsanls.server")
@dataclass(frozen=True, slots=True)
class DsanlsServerState:
    """The latest whole H (k × m), the next exchange, and the sums of the latest error.

    `parties`: number of parties in the first sum; all must be in every sum. `cap`: bound of the entries of both factors
    (0: none).
    """

    H: Array
    turn: int = 0
    parties: float = 0.0
    cap: float = 0.0
    squared_error: float = float("nan")
    squared_norm: float = float("nan")
    penalties: float = 0.0


@dataclass(frozen=True, slots=True)
class SketchExchange(ProgramBase):
    """DSANLS: node r holds rows W_r and columns H_r, and sees only sketches of the rest (Qian et al., 2020, Alg. 2).

        exchange 2t      W_r ← rule(W_r; B Bᵀ, X[I_r] S Bᵀ)        sent: W_rᵀ S'[I_r]  (k × d'),   B' = Σ
        exchange 2t + 1  H_r ← rule(H_r; B'B'ᵀ, X[:, J_r]ᵀ S' B'ᵀ)  sent: H_r S[J_r]   (k × d),    B = Σ

    Every node draws fresh S (m × d) and S' (n × d') in every iteration t from the shared seed. An iteration sends
    k·d + k·d' numbers, whatever the size of X. Parties hold `data.blocks.TwoSided` blocks that cover X once; a single
    party may hold a plain matrix. Never sent: X. A subsampling sends rows of W and columns of H unchanged.

    Every `every` iterations, and at the last, H is sent whole (k × m) instead; only then is there a model. The exchange
    after it adds ‖X − W H‖² for this H and the W that H was fitted to, the one from before that exchange. So there is
    one exchange more than two per iteration: it gives the error of the last H.

    `fresh=False`: exchange 2t sketches the W from before its update, as printed in the paper but not in its code; W and
    H then move at the same time. `capped`: entries stay below √(2‖X‖_F), (22) in the paper, from exchange 1 on, when
    ‖X‖_F is known. It assumes factors of one scale, so data on a scale of about 1: here H starts there, and W takes the
    units of X. `n_rows`: the rows of all parties; with it engines check the sizes of uploads, otherwise only that
    numbers are finite.
    """

    rank: int
    solver: SquaredError = field(default_factory=lambda: SquaredError(ProximalDescent()))
    sketch: Proportion = Proportion()
    iterations: int = 100
    every: int = 10
    fresh: bool = True
    capped: bool = False
    n_rows: int | None = None
    aggregation: Sum = Sum()

    def __post_init__(self) -> None:
        for name in ("rank", "iterations", "every", *(() if self.n_rows is None else ("n_rows",))):
            whole_number(f"SketchExchange: {name}", getattr(self, name))
        if not isinstance(self.solver.momentum, NoExtrapolation):
            raise CompositionError("Sketched steps cannot be extrapolated. Use a solver with NoExtrapolation.")
        rule = self.solver.rule
        if isinstance(rule, Multiplicative) and not self.has_no_signs:
            raise CompositionError(
                "Multiplicative updates need non-negative products, which only subsampling keeps non-negative. "
                "Use kind=Subsampling, or ProximalDescent."
            )
        if not (self.sketch.ratio == 1 and self.has_no_signs):  # S = I
            warn_if_noisy(rule)

    @property
    def traits(self) -> Traits:
        """Every node holds a part of both factors; masks would not hide what its blocks already reveal."""
        return Traits(
            full_participation=True,
            needs_columns=True,
            requires="plain",
            reason=SINGLE_PARTY_REASON,
            measured_every=self.every,
        )

    @property
    def has_no_signs(self) -> bool:
        """Whether sketches of non-negative factors are non-negative."""
        return self.sketch.kind is Subsampling

    def exchanges(self, rounds: int, n_parties: int) -> int:
        """Two per iteration, and one for the error of the last H."""
        return 2 * rounds + 1

    def start_party(self, shard: Shard, layout: Layout) -> DsanlsPartyState:
        """No W or H yet; with several parties, data must be two-sided blocks."""
        if len(layout.parties) > 1 and not isinstance(shard.matrix, TwoSided):
            raise CompositionError(
                f"Party {shard.name!r} holds rows only, but each of {len(layout.parties)} parties also updates columns "
                "of H from columns of X. Pass a data.blocks.TwoSided for every party, or use another method."
            )
        n_rows = TwoSided.of(shard.matrix).n_rows
        if self.n_rows not in (None, n_rows):
            raise CompositionError(
                f"The program was built for n_rows={self.n_rows}, but party {shard.name!r} has a block of {n_rows} "
                "rows. Build it with the total number of rows."
            )
        return DsanlsPartyState(layout.seed, len(layout.parties))

    def start_server(self, layout: Layout) -> tuple[DsanlsServerState, Message]:
        return self.start_from(random_columns(layout.n_features, self.rank, stream(layout.seed, "start"), layout.dtype))

    def start_from(self, Ht: Array) -> tuple[DsanlsServerState, Message]:
        """Start the server from a given Hᵀ."""
        server = DsanlsServerState(Ht.T)
        return server, self._model(server, {"H": server.H})

    def local(self, shard: Shard, party: DsanlsPartyState, model: Message) -> tuple[DsanlsPartyState, Message]:
        iteration, is_second = divmod(int(model["turn"][0]), 2)
        turns = DsanlsIteration(self.rank, self.solver, self.sketch, TwoSided.of(shard.matrix), iteration, _cap(model))
        if is_second:
            party = turns.column_step(party, model["sketched_W"])
            if self.is_whole(iteration + 1):
                return party, Message({"H": turns.whole_H(party)})
            return party, Message({"sketched_H": turns.sketched_H(party)})
        arrays = {}
        if "H" in model.arrays:
            Ht = transposed_factor(turns.matrix, model["H"])
            is_first = party.Ht_block is None
            party, arrays["totals"] = turns.measured(party, Ht)
            if is_first:
                arrays["blocks"] = coverage_sums(turns.matrix, party.parties)
            moved = turns.row_step(party, turns.sketch_of_whole(party, Ht))
        else:
            moved = turns.row_step(party, model["sketched_H"])
        arrays["sketched_W"] = turns.sketched_W(moved if self.fresh else party)
        return moved, Message(arrays)

    def finish(self, server: DsanlsServerState, aggregate: Message) -> tuple[DsanlsServerState, Message]:
        """Broadcast the sum; keep its error, coverage and size."""
        server = self._checked(server, aggregate)
        sums = {name: array for name, array in aggregate.arrays.items() if name not in ("totals", "blocks")}
        after = replace(server, turn=server.turn + 1, H=sums.get("H", server.H))
        error, energy, penalties = (float(v) for v in aggregate.arrays.get("totals", (np.nan, np.nan, 0.0)))
        after = replace(after, squared_error=error, squared_norm=energy, penalties=penalties)
        if self.capped and server.turn == 0:
            after = replace(after, cap=float(np.sqrt(2 * np.sqrt(energy))))
        return after, self._model(after, sums)

    def _checked(self, server: DsanlsServerState, aggregate: Message) -> DsanlsServerState:
        if "blocks" in aggregate.arrays:
            require_cover(aggregate["blocks"])
            return replace(server, parties=aggregate.weight)
        if aggregate.weight != server.parties:
            raise PartyError(
                f"{aggregate.weight:g} of {server.parties:g} parties are in the sum of exchange {server.turn}. No "
                "party may be missing, because each holds rows of W and columns of H that no other has. Resume from "
                "the last checkpoint with all parties."
            )
        return server

    def _model(self, server: DsanlsServerState, sums: Mapping[str, Array]) -> Message:
        cap = {"cap": np.array([server.cap])} if server.cap > 0 else {}
        return Message({**sums, **cap, "turn": np.array([server.turn], np.int64)})

    def components(self, server: DsanlsServerState) -> Array:
        return server.H

    def is_whole(self, iteration: int) -> bool:
        """Whether H is whole at the start of an iteration."""
        return iteration % self.every == 0 or iteration == self.iterations

    def turn(self, model: Message) -> Turn:
        """A round ends when the exchange before this model has given the error of a whole H."""
        iteration, is_second = divmod(int(model["turn"][0]), 2)
        return Turn(ends_round=bool(is_second) and iteration > 0 and self.is_whole(iteration))

    def metrics(self, server: DsanlsServerState) -> Mapping[str, float]:
        """‖X − W H‖ / ‖X‖ of the latest whole H and the objective over ½‖X‖², after the exchange that measured them."""
        if np.isnan(server.squared_norm):
            return {}
        if server.squared_norm <= 0:
            return {"relative_error": 0.0, "objective": 0.0}
        squares = np.array([np.maximum(0.0, server.squared_error), server.squared_error + 2 * server.penalties])
        error, objective = squares / server.squared_norm
        return {"relative_error": float(np.sqrt(error)), "objective": float(objective)}

    def upload_spec(self, layout: Layout) -> tuple[Mapping[str, ArraySpec], ...]:
        """Sketches of one factor each, with totals after a whole H; empty if the number of rows is unknown."""
        if self.n_rows is None:
            return ()
        k, m, size = self.rank, layout.n_features, self.sketch.dimension
        of_W, of_H = (
            ArraySpec(
                (k, size(n, k)),
                non_negative=self.has_no_signs,
                single_party_reason=SINGLE_PARTY_REASON,
                meaning=meaning,
            )
            for n, meaning in ((self.n_rows, "W_rᵀ S'"), (m, "H_r S"))
        )
        W = {"sketched_W": of_W}
        totals = {"totals": ArraySpec((3,), meaning="‖X_r − W_r H‖², ‖X_r‖² and penalties")}
        blocks = {"blocks": ArraySpec((2,), meaning="evidence that the blocks cover X once")}
        whole = "the node's own columns of H, in their place"
        H = ArraySpec((k, m), non_negative=True, single_party_reason=SINGLE_PARTY_REASON, is_factor=True, meaning=whole)
        return W, {**W, **totals}, {**W, **totals, **blocks}, {"sketched_H": of_H}, {"H": H}


def _cap(model: Message) -> float:
    return float(model["cap"][0]) if "cap" in model.arrays else np.inf


@method("dsanls", over_ranks=True)
def dsanls(
    problem: Problem,
    *,
    sketch: Annotated[Callable[[int], Sketch], SKETCHES] = Subsampling,
    sketch_ratio: Annotated[float, SHARE] = 0.1,
    rule: Annotated[UpdateRule, RULES] = ProximalDescent(),
    every: Annotated[int, Whole()] = 10,
) -> SketchExchange:
    """Nodes hold blocks of both factors and exchange sketches: for the machines of one owner.

    Qian et al. (2020), Alg. 2. Sent per iteration and node: W_rᵀS' (k × d') and H_rS (k × d); every `every` iterations
    its columns of H whole, and totals. Never sent: X. Not private: each node reads columns of all rows.
    """
    return SketchExchange(
        problem.rank,
        SquaredError(rule),
        Proportion(sketch, sketch_ratio),
        problem.rounds or 100,
        every,
        n_rows=problem.n_rows,
    )
