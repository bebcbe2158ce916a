"""Local steps: several updates of W and H at one party between two exchanges."""

from __future__ import annotations

from dataclasses import replace

from partsong.core.interfaces import Matrix
from partsong.solvers.coupling import Coupling, ProximalAnchor
from partsong.solvers.fused_steps import max_fused_steps, take_fused_steps
from partsong.solvers.squared_error import ColumnState, RowState, SquaredError
from partsong.solvers.update_rules import NoExtrapolation


def run_local_steps(
    solver: SquaredError,
    matrix: Matrix,
    rows: RowState,
    columns: ColumnState,
    coupling: Coupling,
    anchor: ProximalAnchor,
    count: int,
) -> tuple[RowState, ColumnState]:
    """Repeat `count` times: W ← rule(W; H), then H ← rule(H; WᵀW, WᵀX), pulled to the anchor.

    Supported rules and couplings take many steps in one compiled call on data in memory; all others, and all tensors,
    take them one by one. Both give the same result up to rounding.
    """
    is_plain = isinstance(solver.momentum, NoExtrapolation) and rows.W is not None
    if not is_plain or not max_fused_steps(matrix, solver.rule, coupling, columns.Ht):
        return run_steps_one_by_one(solver, matrix, rows, columns, coupling, anchor, count)
    memories = rows.memory or solver.rule.init(rows.W), columns.memory
    penalties = solver.penalty_W, solver.penalty_H
    W, Ht, of_W, of_H = take_fused_steps(
        matrix, solver.rule, penalties, (rows.W, columns.Ht), memories, count, coupling, anchor
    )
    return RowState(W, None, of_W), replace(columns, Ht=Ht, point=Ht, memory=of_H)


def run_steps_one_by_one(
    solver: SquaredError,
    matrix: Matrix,
    rows: RowState,
    columns: ColumnState,
    coupling: Coupling,
    anchor: ProximalAnchor,
    count: int,
) -> tuple[RowState, ColumnState]:
    """Take the same steps one by one; the reference for fused steps."""
    for _ in range(count):
        rows, sums = solver.row_step(matrix, rows, solver.broadcast(columns))
        if not isinstance(solver.momentum, NoExtrapolation):
            columns = solver.column_step(columns, sums)
            continue
        equations = solver.column_equations(sums)
        moved, memory, anchor = coupling.step(solver.rule, columns.Ht, equations, columns.memory, anchor)
        columns = replace(columns, Ht=moved, point=moved, memory=memory)
    return rows, columns
