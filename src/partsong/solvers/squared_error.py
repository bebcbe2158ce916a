"""The two half-steps of a factorization: rows of W at a party, columns of H from sums.

A party holds rows and needs H; whoever holds the sums WᵀW and WᵀX needs no data. One process doing both in turn is
centralised NMF; many parties and one server are the same computation with a sum in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Protocol, cast, runtime_checkable

import numpy as np

from partsong import kernels
from partsong.core.interfaces import Array, Matrix, UpdateRule
from partsong.core.streams import stream
from partsong.errors import ParameterError
from partsong.kernels.fused_steps import Move, Turns
from partsong.solvers.coupling import Coupling, ProximalAnchor, SteadyPull
from partsong.solvers.normal_equations import NormalEquations, Penalty, PlainRule, RuleState
from partsong.solvers.update_rules import CoordinateDescent

# ---- momentum ---------------------------------------------------------------------------------------------------
#
# Extrapolation of both factors between half-steps, with restart.


@dataclass(frozen=True, slots=True)
class MomentumState:
    """How far to extrapolate next, the largest amount allowed, the last amount that helped, the least objective so far.

    `must_restart`: the last step raised the objective and was taken back.
    """

    amount: float
    ceiling: float
    trusted: float
    objective: float = float("inf")
    must_restart: bool = False


@dataclass(frozen=True, slots=True)
class Extrapolation:
    """Y = max(0, F + β (F − F⁻)), with β grown while the objective falls and cut when it rises (Ang & Gillis, 2019).

    A step that rises above the least objective so far is taken back: H returns to its last accepted value, W is fitted
    to that once without extrapolation, and β is divided by `cut`. (The paper goes on from the worse point, where
    components pushed to zero may never come back. It begins with β = 0.5; from a good start, smaller first steps end in
    better minima.)
    """

    start: float = 0.3
    growth: float = 1.05
    ceiling_growth: float = 1.01
    cut: float = 1.5

    def __post_init__(self) -> None:
        if not (0 < self.start < 1 and self.cut > self.growth > self.ceiling_growth >= 1):
            raise ParameterError(
                f"Extrapolation needs 0 < start < 1 and cut > growth > ceiling_growth ≥ 1; got {self}."
            )

    def begin(self) -> MomentumState:
        """The pace of the first iteration."""
        return MomentumState(self.start, 1.0, self.start)

    def next(self, pace: MomentumState, objective: float) -> MomentumState:
        """The pace after an iteration that ended at `objective`."""
        if objective > pace.objective:
            return MomentumState(pace.amount / self.cut, pace.trusted, pace.trusted, pace.objective, must_restart=True)
        return MomentumState(
            min(pace.ceiling, pace.amount * self.growth),
            min(1.0, pace.ceiling * self.ceiling_growth),
            pace.amount,
            objective,
        )


@dataclass(frozen=True, slots=True)
class NoExtrapolation:
    """Plain alternation."""

    def begin(self) -> MomentumState:
        """At rest."""
        return MomentumState(0.0, 0.0, 0.0)

    def next(self, pace: MomentumState, objective: float) -> MomentumState:
        """Still at rest."""
        return replace(pace, objective=objective)


# ---- trials -----------------------------------------------------------------------------------------------------
#
# Components that a penalised step has set to zero in both factors cannot come back by themselves.


@dataclass(frozen=True, slots=True)
class Trial:
    """A split that is being tried: Hᵀ before it (None: no trial is on), its objective, steps so far, trials so far."""

    before: Array | None = None
    objective: float = float("inf")
    steps: int = 0
    count: int = 0


@dataclass(frozen=True, slots=True)
class Revival:
    """Split the strongest components into those that are zero, go on, and return if that is no better.

    A split halves the features of h_a at random: h_j takes some of them and h_a keeps the others, so that W can fit
    both as before. It is tried once steps gain less than `slow`, for `patience` steps; whether zero components are a
    loss or what the penalties want is then known. H alone is looked at: it works wherever H is updated from sums.
    """

    slow: float = 2e-4
    patience: int = 15
    most: int = 3

    def is_due(self, trial: Trial, sizes: np.ndarray, before: float, now: float) -> bool:
        """Whether to split now; `sizes` (k) are ‖w_j‖ ‖h_j‖, and the objective has fallen from `before` to `now`."""
        is_slow = before - now <= self.slow * abs(now)
        some_are_zero = 0 < int((sizes == 0).sum()) < len(sizes)
        return trial.before is None and trial.count < self.most and is_slow and some_are_zero

    def split(self, Ht: Array, sizes: np.ndarray, count: int) -> Array:
        """Hᵀ (m × k) with the strongest components shared out to those that are zero."""
        values = np.array(kernels.of(Ht).to_numpy(Ht))
        strong = [j for j in np.argsort(-sizes, kind="stable") if sizes[j] > 0]
        for place, j in enumerate(np.flatnonzero(sizes == 0)):
            source = strong[place % len(strong)]
            goes = stream(0, "split", count, int(j)).random(len(values)) < 0.5
            values[:, j] = values[:, source] * goes
            values[:, source] *= ~goes
        return kernels.of(Ht).like(values, Ht)

    def is_won(self, trial: Trial, now: float) -> bool:
        """Whether the split has led below where it began, by more than such steps gain."""
        return now < trial.objective - self.slow * abs(trial.objective)


def least_penalised(a1: np.ndarray, a2: np.ndarray, b1: np.ndarray, b2: np.ndarray) -> np.ndarray:
    """Where c a₁ + ½ c² a₂ + b₁ / c + ½ b₂ / c² is least: the slope in log c rises, and bisection finds its zero."""
    has_both = ((a1 + a2) > 0) & ((b1 + b2) > 0)
    low, high = np.full(len(a1), -BALANCE_RANGE), np.full(len(a1), BALANCE_RANGE)
    for _ in range(60):
        middle = (low + high) / 2
        c = np.exp(middle)
        rises = c * a1 + c**2 * a2 > b1 / c + b2 / c**2
        low, high = np.where(rises, low, middle), np.where(rises, middle, high)
    return np.where(has_both, np.exp((low + high) / 2), 1.0)


# ---- alternate --------------------------------------------------------------------------------------------------

REVIVAL = Revival()

BALANCE_RANGE = 60.0
"""Scales between e^−60 and e^60 are looked at."""

SUPPORT_SWEEPS = 20
"""Sweeps that find most of the support before an exact solve."""


@dataclass(frozen=True, slots=True)
class RowState:
    """A party's half: W (n × k), the extrapolated point it steps from next (None: W itself), the rule's memory.

    W is None before the first step; it then starts from H and each row alone.
    """

    W: Array | None = None
    point: Array | None = None
    memory: RuleState | None = None


@dataclass(frozen=True, slots=True)
class ColumnState:
    """The shared half: Hᵀ (m × k), the extrapolated point, the rule's memory, the pace, the latest sums' objective.

    `reported` is the objective where it is not that of the pace, which begins again with a split. Under penalties a
    start `is_unscaled` until its first sums tell on which scale they are least; W is then multiplied by `scale`.
    """

    Ht: Array
    point: Array
    memory: RuleState
    pace: MomentumState
    squared_error: float = float("nan")
    squared_norm: float = float("nan")
    trial: Trial = Trial()
    reported: float = float("nan")
    is_unscaled: bool = False
    scale: float = 1.0

    @property
    def objective(self) -> float:
        """Of the latest sums."""
        return self.pace.objective if math.isnan(self.reported) else self.reported


@dataclass(frozen=True, slots=True)
class Totals:
    """What a party adds to the sums: gram = WᵀW (k × k), cross = XᵀW (m × k), rows n, energy ‖X‖², mass ΣW.

    The gram is in float64 whatever the data: the error is a small difference of large numbers.
    """

    gram: Array
    cross: Array
    rows: float
    energy: float
    mass: float

    def equations(self) -> NormalEquations:
        """The problem that they state for H, in the type of the cross product."""
        return NormalEquations(rounded(self.gram, self.cross), self.cross)


@dataclass(frozen=True, slots=True)
class ProposedStep:
    """A step of H not yet accepted: Hᵀ (m × k), the rule's memory, ‖X − W H‖², the objective, ‖X‖², all ‖w_j‖ ‖h_j‖."""

    Ht: Array
    memory: RuleState
    squared_error: float
    objective: float
    energy: float
    sizes: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class SquaredError:
    """X ≈ W H by turns: W from the rows and H, H from WᵀW and WᵀX.

    The same rule serves both factors, each through its own normal equations with its own penalty.
    """

    rule: UpdateRule = field(default_factory=lambda: CoordinateDescent(sweeps=3))
    penalty_W: Penalty = Penalty()
    penalty_H: Penalty = Penalty()
    momentum: Extrapolation | NoExtrapolation = NoExtrapolation()

    @property
    def is_penalised(self) -> bool:
        """Whether the scale of each factor matters, and components may be zero."""
        return bool(self.penalty_W or self.penalty_H)

    @property
    def has_scale(self) -> bool:
        """Whether penalties on both factors tell how to share out the scale of a component."""
        return bool(self.penalty_W and self.penalty_H)

    @property
    def without_penalties(self) -> SquaredError:
        """The same steps on the error alone."""
        return replace(self, penalty_W=Penalty(), penalty_H=Penalty())

    def begin(self, Ht: Array) -> ColumnState:
        """The shared half before the first step."""
        return ColumnState(Ht, Ht, self.rule.init(Ht), self.momentum.begin())

    def row_step(self, matrix: Matrix, rows: RowState, columns: ColumnState) -> tuple[RowState, Totals]:
        """One pass over the data: W ← rule(W; H), and the sums of the (extrapolated) W that H needs next."""
        return self.row_step_at(matrix, rows, columns.point, columns.pace.amount, columns.pace.must_restart)

    def row_step_at(
        self, matrix: Matrix, rows: RowState, Ht: Array, amount: float, must_restart: bool
    ) -> tuple[RowState, Totals]:
        """`row_step` from what a server sends: the point Hᵀ, how far to extrapolate, whether to start again from W."""
        if rows.W is None and self.has_scale:  # the scale of a start says nothing, and on a wrong one W would be zero
            return self.without_penalties._row_step(matrix, rows, Ht, amount, must_restart, has_mass=True)
        return self._row_step(matrix, rows, Ht, amount, must_restart, has_mass=bool(self.penalty_W.l1))

    def _row_step(
        self, matrix: Matrix, rows: RowState, Ht: Array, amount: float, must_restart: bool, *, has_mass: bool
    ) -> tuple[RowState, Totals]:
        on = kernels.of(Ht)
        point = rows.W if must_restart or rows.point is None else rows.point
        W = on.empty((matrix.shape[0], Ht.shape[1]), Ht)
        ahead = on.empty_like(W) if amount > 0 and rows.W is not None and not must_restart else W
        looks_back = self.rule.init(Ht).previous is not None
        memory = replace(rows.memory or RuleState(), previous=on.empty_like(W) if looks_back else None)
        scales = [memory.scale]
        solve = self._row_solver(rounded(on.gram(Ht, exactly=False), Ht), matrix.shape[1])

        def update(start: int, stop: int, cross: Array) -> None:
            old = None if point is None else point[start:stop]
            past = None if rows.memory is None else rows.memory.rows(start, stop)
            place = W[start:stop]
            moved, after = solve(old, cross, past, place)
            if moved is not place:
                place[:] = moved
            if looks_back:
                memory.previous[start:stop] = after.previous  # type: ignore[index]
            scales[0] = after.scale  # the same in all blocks, which share one gram
            if ahead is not W:
                ahead[start:stop] = on.extrapolate(W[start:stop], rows.W[start:stop], amount)  # type: ignore[index]

        gram, cross = matrix.visit(Ht, update, ahead)
        mass = float(ahead.sum()) if has_mass else 0.0
        totals = Totals(gram, cross, float(matrix.shape[0]), matrix.squared_norm, mass)
        return RowState(
            W, None if ahead is W else ahead, replace(memory, count=memory.count + 1, scale=scales[0])
        ), totals

    def _row_solver(
        self, gram: Array, n_features: int
    ) -> Callable[[Array | None, Array, RuleState | None, Array], tuple[Array, RuleState]]:
        """One rule step for a block of rows; all blocks share the gram and its norm."""
        bare = NormalEquations(gram, gram)
        shared = bare.penalised(self.penalty_W, n_features).gram
        norm = cache(lambda: float(kernels.of(shared).largest_eigenvalue(shared)))
        shift = self.penalty_W.l1 * n_features

        def solve(old: Array | None, cross: Array, past: RuleState | None, place: Array) -> tuple[Array, RuleState]:
            factor = start_rows(gram, cross) if old is None else old
            equations = NormalEquations(shared, cross - shift if shift else cross, norm, place)
            return self.rule.step(factor, equations, past if past is not None else self.rule.init(factor))

        return solve

    def settle_scale(self, columns: ColumnState, totals: Totals) -> ColumnState:
        """The first step of H, on the error alone, and the scale c on which penalties of c W and H / c are least."""
        moved = self.without_penalties.move_columns(columns, totals)
        on, n, m = kernels.of(moved.Ht), totals.rows, moved.Ht.shape[0]
        a = m * self.penalty_W.l1 * totals.mass, m * self.penalty_W.l2 * float(totals.gram.diagonal().sum())
        b = n * self.penalty_H.l1 * float(moved.Ht.sum()), n * self.penalty_H.l2 * on.inner(moved.Ht, moved.Ht)
        scale = float(least_penalised(*(np.array([term]) for term in (*a, *b)))[0])
        start = self.begin(moved.Ht * on.like(np.array(1 / scale), moved.Ht))
        penalties = scale * a[0] + 0.5 * scale**2 * a[1] + b[0] / scale + 0.5 * b[1] / scale**2
        return replace(
            start,
            pace=replace(start.pace, must_restart=start.pace.amount > 0),
            squared_error=moved.squared_error,
            squared_norm=moved.energy,
            reported=0.5 * moved.squared_error + penalties,
            scale=scale,
        )

    def column_step(self, columns: ColumnState, totals: Totals) -> ColumnState:
        """H ← rule(H; WᵀW, WᵀX), from sums alone, and the point to step from next."""
        return self.settle(columns, self.move_columns(columns, totals))

    def move_columns(self, columns: ColumnState, totals: Totals) -> ProposedStep:
        """The rule's step, before it is accepted; its error comes by the trace formula:

        ‖X − W H‖² = ‖X‖² − 2⟨Hᵀ, XᵀW⟩ + ⟨WᵀW, HHᵀ⟩
        """
        on = kernels.of(columns.Ht)
        equations = totals.equations().penalised(self.penalty_H, totals.rows)
        Ht, memory = self.rule.step(columns.point, equations, columns.memory)
        gram = on.gram(Ht)
        error = totals.energy - 2 * on.inner(Ht, totals.cross) + on.inner(totals.gram, gram)
        sizes = _sizes(totals.gram, gram) if self.is_penalised else None
        return ProposedStep(Ht, memory, error, 0.5 * error + self._penalties(totals, Ht, gram), totals.energy, sizes)

    def settle(self, columns: ColumnState, moved: ProposedStep) -> ColumnState:
        """The step taken or taken back, as the objective says; the sums are not needed any more."""
        before = columns.pace
        if moved.energy != columns.squared_norm:  # other parties than last time: objectives cannot be compared
            before = replace(before, objective=float("inf"))
        pace = self.momentum.next(before, moved.objective)
        if pace.must_restart:
            Ht = point = columns.Ht
        elif columns.pace.must_restart or columns.pace.amount == 0:
            Ht = point = moved.Ht
        else:
            Ht = moved.Ht
            point = kernels.of(Ht).extrapolate(Ht, columns.Ht, columns.pace.amount)
        after = ColumnState(Ht, point, moved.memory, pace, moved.squared_error, moved.energy, columns.trial)
        return after if moved.sizes is None else self._tried(after, moved.sizes, before.objective, moved.objective)

    def _tried(self, after: ColumnState, sizes: np.ndarray, before: float, now: float) -> ColumnState:
        """Under penalties: begin a trial of components that are zero, go on with it, or end it."""
        trial = after.trial
        if trial.before is not None:
            if REVIVAL.is_won(trial, after.pace.objective):
                return replace(after, trial=Trial(count=trial.count + 1))
            if trial.steps < REVIVAL.patience:
                return replace(after, trial=replace(trial, steps=trial.steps + 1))
            return self._begun_again(after, trial.before, Trial(count=trial.count + 1))
        if after.pace.must_restart or not REVIVAL.is_due(trial, sizes, before, now):
            return after
        split = REVIVAL.split(after.Ht, sizes, trial.count)
        return self._begun_again(after, split, Trial(after.Ht, now, 0, trial.count))

    def _begun_again(self, after: ColumnState, Ht: Array, trial: Trial) -> ColumnState:
        """Step from another Hᵀ next; the model stays what the sums were about."""
        start = self.begin(Ht)
        pace = replace(start.pace, must_restart=start.pace.amount > 0)
        return replace(after, point=Ht, memory=start.memory, pace=pace, trial=trial, reported=after.objective)

    def _penalties(self, totals: Totals, Ht: Array, gram: Array) -> float:
        n, m = totals.rows, Ht.shape[0]
        on_W = self.penalty_W.l1 * totals.mass + 0.5 * self.penalty_W.l2 * float(totals.gram.diagonal().sum())
        on_H = self.penalty_H.l1 * float(Ht.sum()) + 0.5 * self.penalty_H.l2 * float(gram.diagonal().sum())
        return m * on_W + n * on_H

    def solve_rows(self, matrix: Matrix, Ht: Array, *, exactly: bool = True) -> Array:
        """W for given H: the non-negative least squares solution of each row, from its own start.

        What `transform` does, and how a fit ends. A few sweeps find most of the support, pivoting the exact solution;
        without `exactly` the sweeps are all.
        """
        on = kernels.of(Ht)
        gram = on.gram(Ht)
        shared = NormalEquations(gram, gram).penalised(self.penalty_W, matrix.shape[1]).gram
        rough = rounded(shared, Ht)
        shift = self.penalty_W.l1 * matrix.shape[1]
        W = on.empty((matrix.shape[0], Ht.shape[1]), Ht)

        def update(start: int, stop: int, cross: Array) -> None:
            target = cross - shift if shift else cross
            near = on.sweep(start_rows(gram, cross), rough, target, SUPPORT_SWEEPS)
            W[start:stop] = on.solve_exactly(near, shared, target) if exactly else near

        matrix.walk(Ht, update)
        return W


def rounded(gram: Array, factor: Array) -> Array:
    """A gram, which is summed in float64, in the type and place of a factor: what a rule works with."""
    return kernels.of(factor).like(kernels.of(gram).to_numpy(gram), factor)


def _sizes(*grams: Array) -> np.ndarray:
    """‖w_j‖ ‖h_j‖ of each component, from WᵀW and HHᵀ."""
    squares = [np.maximum(0.0, kernels.of(gram).to_numpy(gram).diagonal()) for gram in grams]
    return np.sqrt(squares[0] * squares[1])


def start_rows(gram: Array, cross: Array) -> Array:
    """w = c·1 with the c ≥ 0 that fits the row best: Σ_j cross_j / Σ_jl gram_jl. From H and the row alone."""
    total = float(gram.sum())
    scale = cross.sum(1) / total if total > 0 else cross.sum(1) * 0
    return kernels.of(cross).tile(scale, cross.shape[1])


# ---- turns ------------------------------------------------------------------------------------------------------
#
# Several turns of W and H at one party, between two exchanges.


@runtime_checkable
class TurnsAtOnce(Protocol):
    """A matrix that can do many turns in one compiled call."""

    def most_turns(self, rank: int, move: Move) -> int:
        """How many turns one call should do at most, so that it can be interrupted after it; 0: do them singly."""

    def take_turns(self, W: Array, W_before: Array, Ht: Array, Ht_before: Array, turns: Turns) -> None:
        """All of `turns`, in place; the factors before the last step are kept where the rule looks back."""


def run_local_steps(
    solver: SquaredError,
    matrix: Matrix,
    rows: RowState,
    columns: ColumnState,
    coupling: Coupling,
    tether: ProximalAnchor,
    count: int,
) -> tuple[RowState, ColumnState]:
    """`count` times: W ← rule(W; H), then H ← rule(H; WᵀW, WᵀX), pulled to the tether.

    Rules and couplings that say so take many turns in one compiled call on data in memory; all others, and all tensors,
    take them singly.
    Both are the same computation up to rounding.
    """
    move = _known(solver, coupling)
    if move is None or rows.W is None or not isinstance(matrix, TurnsAtOnce):
        return run_steps_one_by_one(solver, matrix, rows, columns, coupling, tether, count)
    most = matrix.most_turns(columns.Ht.shape[1], move)
    if not most:
        return run_steps_one_by_one(solver, matrix, rows, columns, coupling, tether, count)
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
    return RowState(W, None, _later(rows.memory or solver.rule.init(W), W_before, count)), after


def _known(solver: SquaredError, coupling: Coupling) -> Move | None:
    """The rule's step, where compiled code knows that step, that coupling, and of nothing else that happens.

    What a subclass inherits says nothing of its own steps.
    """
    rule = solver.rule
    says = "compiled_move" in vars(type(rule)) and "compiled_pull" in vars(type(coupling))
    if not says or not isinstance(solver.momentum, NoExtrapolation):
        return None
    return cast(PlainRule, rule).compiled_move


def run_steps_one_by_one(
    solver: SquaredError,
    matrix: Matrix,
    rows: RowState,
    columns: ColumnState,
    coupling: Coupling,
    tether: ProximalAnchor,
    count: int,
) -> tuple[RowState, ColumnState]:
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
