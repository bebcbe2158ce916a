"""Sketched normal equations (for W from X S, for H from Sᵀ X) and sketched local steps.

A product of three matrices is computed in the cheaper order: X S first if S has at most one entry per row and X has
more entries than X S, otherwise S Bᵀ, which is as small as a factor, so that X S is never formed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from partsong import kernels
from partsong.core.interfaces import Array, Matrix
from partsong.sketch.operator import Operator
from partsong.sketch.placed import placed, places_of, spread
from partsong.solvers.coupling import Coupling, ProximalAnchor
from partsong.solvers.normal_equations import NormalEquations
from partsong.solvers.squared_error import ColumnState, RowState, SquaredError, constant_rows


def exact_rows(matrix: Matrix, Ht: Array) -> NormalEquations:
    """Return the equations for W without a sketch: gram = H Hᵀ, cross = X Hᵀ."""
    on = kernels.of(Ht)
    return NormalEquations(on.cast(on.gram(Ht, exactly=False), Ht), matrix.times(Ht))


def exact_columns(matrix: Matrix, W: Array) -> NormalEquations:
    """Return the equations for Hᵀ without a sketch: gram = WᵀW, cross = XᵀW."""
    on = kernels.of(W)
    return NormalEquations(on.cast(on.gram(W), W), matrix.transposed_times(W))


def sketched_rows(matrix: Matrix, S: Operator, B: Array) -> NormalEquations:
    """Return the equations for W of ½‖X S − W B‖²: gram = B Bᵀ, cross = X S Bᵀ, with S (m × d), B = H S (k × d)."""
    if places_of(S) is not None and matrix.stored > matrix.shape[0] * S.dimension:
        return NormalEquations.of(S.sketch(matrix), B)
    return NormalEquations(B @ B.T, matrix.times(spread(matrix, S, B)))


def sketched_columns(matrix: Matrix, S: Operator, W: Array) -> NormalEquations:
    """Return the equations for Hᵀ of ½‖SᵀX − SᵀW H‖², with S (n × d): gram = WᵀS SᵀW, cross = XᵀS SᵀW.

    Rows that S leaves out are not read: the cost is O(entries of the others · k).
    """
    B = S.sketch_transposed(W)
    places = places_of(S)
    if places is not None and len(places.coordinates) < S.size:
        kept = matrix.rows(places.coordinates)
        return NormalEquations(B @ B.T, kept.transposed_times(placed(matrix, places, B)))
    if places is not None and matrix.stored > matrix.shape[1] * S.dimension:
        return NormalEquations.of(S.sketch_transposed(matrix), B)
    return NormalEquations(B @ B.T, matrix.transposed_times(spread(matrix, S, B)))


def first_rows(equations: NormalEquations) -> Array:
    """Return initial W with rows c·1 from `constant_rows`; where signs in S make c negative, it becomes zero."""
    return constant_rows(equations.gram, equations.cross).clip(min=0)


def run_sketched_steps(
    solver: SquaredError,
    matrix: Matrix,
    rows: RowState,
    columns: ColumnState,
    coupling: Coupling,
    anchor: ProximalAnchor,
    draws: Iterable[Operator],
) -> tuple[RowState, ColumnState]:
    """For each sketch S: W ← rule(W; H) without a sketch, then H ← rule(H; SᵀW, SᵀX), pulled to the anchor."""
    n, m = matrix.shape
    for S in draws:
        memory = rows.memory or solver.rule.init(rows.W)
        for_W = exact_rows(matrix, columns.Ht).penalized(solver.penalty_W, m)
        W, memory = solver.rule.step(rows.W, for_W, memory)
        rows = RowState(W, None, memory)
        for_H = sketched_columns(matrix, S, W).penalized(solver.penalty_H, n)
        Ht, after, anchor = coupling.step(solver.rule, columns.Ht, for_H, columns.memory, anchor)
        columns = replace(columns, Ht=Ht, point=Ht, memory=after)
    return rows, columns
