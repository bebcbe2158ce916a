"""What a node does between two exchanges of sketches: a step of its rows of W, or of its columns of H."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from partsong import kernels
from partsong.core import Array, Matrix
from partsong.data.two_sided import TwoSided
from partsong.local.alternate import Alternate, rounded, start_rows
from partsong.local.equations import NormalEquations, Penalty
from partsong.local.rules import RuleState
from partsong.sketch import crossing
from partsong.sketch.operator import Operator
from partsong.sketch.proportion import Proportion


@dataclass(frozen=True, slots=True)
class SketchParty:
    """The shared seed, the number of parties; W_r (|I_r| × k), H_rᵀ (|J_r| × k), and what the rules remember of each.

    Factors are None before the first exchange.
    """

    seed: int
    parties: int
    W: Array | None = None
    Ht_block: Array | None = None
    memory_W: RuleState | None = None
    memory_H: RuleState | None = None


@dataclass(frozen=True, slots=True)
class Turns:
    """One iteration at a party: all that its two steps need; `cap` bounds what comes of them."""

    rank: int
    solver: Alternate
    sketch: Proportion
    matrix: TwoSided
    iteration: int
    cap: float

    def measured(self, party: SketchParty, Ht: Array) -> tuple[SketchParty, np.ndarray]:
        """‖X_r − W_r H‖², ‖X_r‖² and the party's share of the penalties, from one pass over X_r.

        Before the first step it makes the factors too: W_r from H and each row alone, H_r from H.
        """
        W, gram = party.W, kernels.of(Ht).gram(Ht)
        new = kernels.of(Ht).empty((self.matrix.shape[0], self.rank), Ht) if W is None else W
        products: dict[int, float] = {}

        def update(start: int, stop: int, cross: Array) -> None:
            if W is None:
                new[start:stop] = start_rows(gram, cross)
            products[start] = kernels.of(cross).inner(new[start:stop], cross)

        self.matrix.walk(Ht, update)
        crossed = sum(products[start] for start in sorted(products))
        energy = self.matrix.squared_norm
        error = energy - 2 * crossed + kernels.of(new).inner(kernels.of(new).gram(new), gram)
        first, last = self._columns
        Ht_block = party.Ht_block if party.Ht_block is not None else Ht[first:last] + 0
        penalties = self.matrix.shape[1] * _size(self.solver.penalty_W, new)
        penalties += self.matrix.n_rows * _size(self.solver.penalty_H, Ht_block)
        return replace(party, W=new, Ht_block=Ht_block), np.array([error, energy, penalties])

    def row_step(self, party: SketchParty, B: Array) -> SketchParty:
        """W_r ← rule(W_r; B Bᵀ, X[I_r] S Bᵀ) for B = H S (k × d), a block of rows after another."""
        (gram, Bt), penalty, m = _gram(self.matrix.native(B)), self.solver.penalty_W, self.matrix.shape[1]
        shared, shift = NormalEquations(gram, gram).penalised(penalty, m).gram, penalty.l1 * m
        on, rule = kernels.of(Bt), self.solver.rule
        norm = cache(lambda: float(on.largest_eigenvalue(shared)))
        memory = rule.init(party.W) if party.memory_W is None else party.memory_W
        W, states = on.empty_like(party.W), {}
        previous = None if memory.previous is None else on.empty_like(W)

        def update(start: int, stop: int, cross: Array) -> None:
            place, factor = W[start:stop], party.W[start:stop]  # type: ignore[index]
            equations = NormalEquations(shared, cross - shift if shift else cross, norm, place)
            moved, states[start] = rule.step(factor, equations, memory.rows(start, stop))
            if moved is not place:
                place[:] = moved
            if previous is not None:
                previous[start:stop] = states[start].previous

        crossing.walk(self._S("W", party), self.matrix.row_block, Bt, update)
        after = replace(states[0], previous=previous)  # all else is the same in all blocks, which share one gram
        return replace(party, W=self._capped(W), memory_W=after)

    def column_step(self, party: SketchParty, B: Array) -> SketchParty:
        """H_r ← rule(H_r; B'B'ᵀ, X[:, J_r]ᵀ S' B'ᵀ) for B' = Wᵀ S' (k × d')."""
        gram, Bt = _gram(self.matrix.native(B))
        cross = crossing.transposed_times(self._S("H", party), self.matrix.column_block, Bt)
        equations = NormalEquations(gram, cross).penalised(self.solver.penalty_H, self.matrix.n_rows)
        memory = self.solver.rule.init(party.Ht_block) if party.memory_H is None else party.memory_H
        Ht, after = self.solver.rule.step(party.Ht_block, equations, memory)
        return replace(party, Ht_block=self._capped(Ht), memory_H=after)

    def _capped(self, factor: Array) -> Array:
        return factor if self.cap == np.inf else factor.clip(max=self.cap)

    def sketch_of_whole(self, party: SketchParty, Ht: Array) -> Array:
        """H S (k × d) from all of H."""
        return crossing.placed_rows(self._S("W", party), Ht, 0)

    def sketched_W(self, party: SketchParty) -> Array:
        """W_rᵀ S'[I_r] (k × d')."""
        return crossing.placed_rows(self._S("H", party), party.W, self.matrix.first_row)

    def sketched_H(self, party: SketchParty) -> Array:
        """H_r S[J_r] (k × d), for the next iteration."""
        following = replace(self, iteration=self.iteration + 1)
        return crossing.placed_rows(following._S("W", party), party.Ht_block, self.matrix.first_column)

    def whole_H(self, party: SketchParty) -> Array:
        """H_r where it belongs in all of H (k × m), which is zero elsewhere."""
        first, last = self._columns
        whole = kernels.of(party.Ht_block).empty((self.matrix.shape[1], self.rank), party.Ht_block)
        whole[:first], whole[first:last], whole[last:] = 0, party.Ht_block, 0
        return whole.T

    @property
    def _columns(self) -> tuple[int, int]:
        return self.matrix.first_column, self.matrix.first_column + self.matrix.column_block.shape[1]

    def _S(self, factor: str, party: SketchParty) -> Operator:
        """S for the step of a factor: of the columns of X for W, of its rows for H."""
        size = self.matrix.shape[1] if factor == "W" else self.matrix.n_rows
        return self.sketch.draw(size, self.rank, party.seed, factor, self.iteration)


def _gram(B: Array) -> tuple[Array, Array]:
    """B Bᵀ (k × k) and Bᵀ (d × k)."""
    on = kernels.of(B)
    Bt = on.rows_of(B)
    return rounded(on.gram(Bt, exactly=False), Bt), Bt


def _size(penalty: Penalty, factor: Array) -> float:
    """l1 ‖F‖₁ + ½ l2 ‖F‖²."""
    return penalty.l1 * float(factor.sum()) + 0.5 * penalty.l2 * kernels.of(factor).inner(factor, factor)


def whole_columns(matrix: Matrix, H: Array) -> Array:
    """Hᵀ (m × k) as a party computes with it."""
    native = matrix.native(H)
    return kernels.of(native).rows_of(native)
