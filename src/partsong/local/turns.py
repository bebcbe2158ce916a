"""Several turns of W and H at one party, between two exchanges."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, cast, runtime_checkable

from partsong import kernels
from partsong.core import Array, Matrix
from partsong.kernels.turns import Move, Turns
from partsong.local.alternate import Alternate, Columns, Rows
from partsong.local.coupling import Coupling, SteadyPull, Tether
from partsong.local.momentum import NoExtrapolation
from partsong.local.rules import PlainRule, RuleState


@runtime_checkable
class TurnsAtOnce(Protocol):
    """A matrix that can do many turns in one compiled call."""

    def most_turns(self, rank: int, move: Move) -> int:
        """How many turns one call should do at most, so that it can be interrupted after it; 0: do them singly."""

    def take_turns(self, W: Array, W_before: Array, Ht: Array, Ht_before: Array, turns: Turns) -> None:
        """All of `turns`, in place; the factors before the last step are kept where the rule looks back."""


def take_turns(
    solver: Alternate, matrix: Matrix, rows: Rows, columns: Columns, coupling: Coupling, tether: Tether, count: int
) -> tuple[Rows, Columns]:
    """`count` times: W ← rule(W; H), then H ← rule(H; WᵀW, WᵀX), pulled to the tether.

    Rules and couplings that say so take many turns in one compiled call on data in memory; all others, and all tensors,
    take them singly.
    Both are the same computation up to rounding.
    """
    move = _known(solver, coupling)
    if move is None or rows.W is None or not isinstance(matrix, TurnsAtOnce):
        return singly(solver, matrix, rows, columns, coupling, tether, count)
    most = matrix.most_turns(columns.Ht.shape[1], move)
    if not most:
        return singly(solver, matrix, rows, columns, coupling, tether, count)
    pull = cast(SteadyPull, coupling)
    n, m = matrix.shape
    W, Ht = rows.W + 0, columns.Ht + 0
    W_before, Ht_before = (_past(state, F) for state, F in ((rows.memory, W), (columns.memory, Ht)))
    on_W, on_H = solver.penalty_W, solver.penalty_H
    left = count
    while left > 0:
        towards, tether, several = pull.compiled_pull(Ht, tether, min(left, most))
        turns = Turns(several, move, on_W.l1 * m, on_W.l2 * m, on_H.l1 * n, on_H.l2 * n, towards)
        matrix.take_turns(W, W_before, Ht, Ht_before, turns)
        left -= several
    after = replace(columns, Ht=Ht, point=Ht, memory=_later(columns.memory, Ht_before, count))
    return Rows(W, None, _later(rows.memory or solver.rule.init(W), W_before, count)), after


def _known(solver: Alternate, coupling: Coupling) -> Move | None:
    """The rule's step, where compiled code knows that step, that coupling, and of nothing else that happens.

    What a subclass inherits says nothing of its own steps.
    """
    rule = solver.rule
    says = "compiled_move" in vars(type(rule)) and "compiled_pull" in vars(type(coupling))
    if not says or not isinstance(solver.momentum, NoExtrapolation):
        return None
    return cast(PlainRule, rule).compiled_move


def singly(
    solver: Alternate, matrix: Matrix, rows: Rows, columns: Columns, coupling: Coupling, tether: Tether, count: int
) -> tuple[Rows, Columns]:
    """The same, one step after the other: what many turns in one call mean."""
    for _ in range(count):
        rows, totals = solver.row_step(matrix, rows, columns)
        if not isinstance(solver.momentum, NoExtrapolation):
            columns = solver.column_step(columns, totals)
            continue
        equations = totals.equations().penalised(solver.penalty_H, totals.rows)
        moved, memory, tether = coupling.step(solver.rule, columns.Ht, equations, columns.memory, tether)
        columns = replace(columns, Ht=moved, point=moved, memory=memory)
    return rows, columns


def _past(state: RuleState | None, factor: Array) -> Array:
    """The factor one step ago where a rule looks back; else memory that nobody reads."""
    if state is None or state.previous is None:
        return kernels.of(factor).empty((0, factor.shape[1]), factor)
    return state.previous + 0


def _later(state: RuleState, before: Array, count: int) -> RuleState:
    return replace(state, count=state.count + count, previous=None if state.previous is None else before)
