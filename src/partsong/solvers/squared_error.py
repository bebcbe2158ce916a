"""NMF under squared error by half-steps: rows of W at a party, columns of H from sums.

A party holds rows and needs H. The server holds the sums WᵀW and WᵀX and needs no data. One process that alternates
both is centralized NMF; many parties and one server do the same computation with a sum in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from types import ModuleType
from typing import Any, Literal

import numpy as np

from partsong import kernels
from partsong.core.interfaces import Array, ArraySpec, Layout, Matrix, Shard, Sums, Traits, UpdateRule
from partsong.core.parameters import real_number
from partsong.core.states import state
from partsong.errors import ParameterError
from partsong.solvers.fused_steps import max_fused_steps, take_fused_steps
from partsong.solvers.normal_equations import NormalEquations, Penalty, RuleState
from partsong.solvers.revival import Revival, RevivalState
from partsong.solvers.update_rules import (
    RULES,
    SWEEPS,
    CoordinateDescent,
    Extrapolation,
    MomentumState,
    NoExtrapolation,
)

DETECTABLE_ERROR = {"float64": 1e-13, "float32": 1e-8}
"""The smallest squared error, as a share of ‖X‖², that can be distinguished from zero by sums."""

RELIABLE_ERROR = {"float64": 1e-11, "float32": 1e-5}
"""The smallest squared error, as a share of ‖X‖², that sums give accurately."""

REVIVAL = Revival()

BALANCE_RANGE = 60.0
"""Scales are searched between e^−60 and e^60."""

SUPPORT_SWEEPS = 20
"""Sweeps that find most of the support before an exact solve."""


@state("squared-error.rows")
@dataclass(frozen=True, slots=True)
class RowState:
    """A party's half: W (n × k), the extrapolated point it steps from next (None: W itself), the rule's memory.

    W is None before the first step; it then starts from H and each row alone.
    """

    W: Array | None = None
    point: Array | None = None
    memory: RuleState | None = None


@state("squared-error.columns")
@dataclass(frozen=True, slots=True)
class ColumnState:
    """The shared half: Hᵀ (m × k), the extrapolated point, the rule's memory, the pace, the latest sums' error.

    `basis` identifies the rows of the latest sums by two 0-d sums, Σu and Σu‖x‖². Objectives are compared only
    on one basis. `reported` is the objective if it differs from that of the pace, which restarts with a split. Under
    penalties an initialization `is_unscaled` until its first sums show the scale on which penalties are smallest; W is
    then multiplied once by `scale`, which is None otherwise.
    """

    Ht: Array
    point: Array
    memory: RuleState
    pace: MomentumState
    squared_error: Array
    basis: tuple[Array, Array]
    trial: RevivalState = RevivalState()
    reported: Array | None = None
    is_unscaled: bool = False
    scale: Array | None = None

    @property
    def objective(self) -> Array:
        """Of the latest sums."""
        return self.pace.objective if self.reported is None else self.reported

    @property
    def squared_norm(self) -> Array:
        """‖X‖² of the latest sums."""
        return self.basis[1]

    def cast_like(self, example: Array) -> ColumnState:
        """Return this state with the dtype and device of an array: H follows the sums, unknown before the first."""
        if type(self.Ht) is type(example) and self.Ht.dtype == example.dtype and _device(self.Ht) == _device(example):
            return self
        on = kernels.of(example)
        Ht, point = on.cast(self.Ht, example), on.cast(self.point, example)
        return replace(
            self, Ht=Ht, point=point, memory=self.memory.cast_like(example), pace=self.pace.cast_like(example)
        )


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What a pass needs to know of the rows beside their products with H.

    Weights u (n) or None, Σu, Σu‖x‖², and whether the sums of W come in float64 from the first product on.
    """

    shape: tuple[int, int]
    weights: Array | None
    total_weight: float
    squared_norm: Array
    is_exact: bool

    @staticmethod
    def of(X: Matrix, k: int) -> RowFacts:
        """Of a matrix, for k components."""
        return RowFacts(X.shape, X.row_weights, X.total_weight, X.squared_norm, X.gram_is_cheap(k))


@dataclass(frozen=True, slots=True)
class RowPass:
    """One pass over rows for one model, to be driven by `Matrix.visit`, alone or beside others.

    `step` fills A[rows] from X[rows] Hᵀ and returns addends; `done` makes of XᵀA and Σ addends the party's state and
    what is sent. The sums are those of `point` (n × k): W, extrapolated where the momentum says so. `A` is u∘point, the
    factor of XᵀA, in memory that the caller may choose, such as a column slice of a buffer that several models share.
    """

    step: Callable[[slice, Array], Sums]
    done: Callable[[Array, Sums], tuple[RowState, dict[str, Array]]]
    A: Array
    point: Array


@dataclass(frozen=True, slots=True)
class ProposedStep:
    """A step of H not yet accepted: Hᵀ (m × k), the rule's memory, ‖X − W H‖², the objective, the basis of both.

    `sizes` are all ‖w_j‖ ‖h_j‖ under penalties, on the host.
    """

    Ht: Array
    memory: RuleState
    squared_error: Array
    objective: Array
    basis: tuple[Array, Array]
    sizes: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class SquaredError:
    """‖X − W H‖² by half-steps: W from the rows and H, H from WᵀW and WᵀX.

        row_step:     W ← rule(W; H Hᵀ, X Hᵀ)      sums: gram = WᵀW (k × k), cross = WᵀX (k × m), rows n, energy ‖X‖²,
                                                         mass ΣW if it is penalized
        column_step:  H ← rule(H; WᵀW, WᵀX)        broadcast: H (k × m), how far to extrapolate, whether to restart

    The same rule serves both factors, each through its own normal equations with its own penalty. With row weights u
    each row counts u_i times: sums are of u∘w and n is Σu. The gram is in float64 whatever the data: the error is a
    small difference of large numbers.
    """

    rule: UpdateRule = field(default_factory=lambda: CoordinateDescent(sweeps=3))
    penalty_W: Penalty = Penalty()
    penalty_H: Penalty = Penalty()
    momentum: Extrapolation | NoExtrapolation = NoExtrapolation()

    @property
    def traits(self) -> Traits:
        """H is fitted to the sums only."""
        return Traits(full_participation=True)

    @property
    def scale(self) -> Literal["l2", "fixed"]:
        """Rows of H may be normalized at the end, unless penalties determine their scale."""
        return "fixed" if self.is_penalized else "l2"

    @property
    def is_penalized(self) -> bool:
        """Whether the scale of each factor matters, and components may be zero."""
        return bool(self.penalty_W or self.penalty_H)

    @property
    def penalties_fix_scale(self) -> bool:
        """Whether penalties on both factors determine how the scale of a component is split."""
        return bool(self.penalty_W and self.penalty_H)

    @property
    def without_penalties(self) -> SquaredError:
        """The same steps on the error alone."""
        return replace(self, penalty_W=Penalty(), penalty_H=Penalty())

    def begin(self, Ht: Array, *, is_scaled: bool = True) -> ColumnState:
        """The shared half before the first step; a random start is not `is_scaled`, which matters under penalties."""
        unknown = kernels.of(Ht).scalar(float("nan"), Ht)
        pace, is_unscaled = self.momentum.begin(Ht), self.penalties_fix_scale and not is_scaled
        return ColumnState(Ht, Ht, self.rule.init(Ht), pace, unknown, (unknown, unknown), is_unscaled=is_unscaled)

    def begin_rows(self, shard: Shard, layout: Layout, W: Array | None = None) -> RowState:
        """No W yet, if none is given: it starts from H and each row alone, in the first step."""
        return RowState(W)

    def broadcast(self, columns: ColumnState) -> Mapping[str, Array]:
        """The point that W steps from, how far to extrapolate W (0-d), whether to restart from W itself (0-d).

        Once, under penalties, also the `scale` (0-d) that W is multiplied by before it is stepped from.
        """
        on, pace = kernels.of(columns.point), columns.pace
        numbers = {"amount": pace.amount, "restart": pace.must_restart}
        if columns.scale is not None:
            numbers["scale"] = columns.scale
        return {"H": columns.point.T} | {name: on.scalar(value, columns.point) for name, value in numbers.items()}

    def sums_spec(self, k: Any, m: Any) -> dict[str, ArraySpec]:
        """Products and totals of non-negative matrices; the mass only where a penalty needs it."""
        spec = {
            "gram": ArraySpec(
                (k, k), non_negative=True, meaning="W_pᵀW_p: how weights vary together, summed over rows"
            ),
            "cross": ArraySpec((k, m), non_negative=True, meaning="W_pᵀX_p: rows summed up by weight"),
            "rows": ArraySpec((), non_negative=True, meaning="n_p: the number of rows"),
            "energy": ArraySpec((), non_negative=True, meaning="‖X_p‖²"),
        }
        mass = ArraySpec((), non_negative=True, meaning="ΣW_p: the sum of all weights")
        return {**spec, "mass": mass} if self.penalty_W.l1 else spec

    def row_step(self, X: Matrix, rows: RowState, model: Mapping[str, Array]) -> tuple[RowState, dict[str, Array]]:
        """One pass over the data: W ← rule(W; H), and the sums of the (extrapolated) W that H needs next."""
        H = X.native(model["H"])
        on = kernels.of(H)
        Ht = on.rows_of(H)
        if "scale" in model and rows.W is not None:
            rows = RowState(rows.W * on.cast(model["scale"], rows.W))
        amount, restart = (on.scalar(model[name], Ht) for name in ("amount", "restart"))
        run = self.row_pass(RowFacts.of(X, Ht.shape[1]), rows, Ht, amount, restart)
        return run.done(*X.visit(Ht, run.A, run.step))

    def row_pass(
        self, facts: RowFacts, rows: RowState, Ht: Array, amount: Array, restart: Array, out: Array | None = None
    ) -> RowPass:
        """The pass from a point Hᵀ (m × k); `amount` and `restart` are 0-d, and `out` (n × k) is memory for A."""
        # The scale of the initial H is arbitrary. If it is wrong, penalties would set W to zero in the first step.
        is_first = rows.W is None and self.penalties_fix_scale
        solver = self.without_penalties if is_first else self
        return solver._row_pass(facts, rows, Ht, amount, restart, out, has_mass=bool(self.penalty_W.l1))

    def _row_pass(
        self,
        facts: RowFacts,
        rows: RowState,
        Ht: Array,
        amount: Array,
        restart: Array,
        out: Array | None,
        *,
        has_mass: bool,
    ) -> RowPass:
        on, before = kernels.of(Ht), rows.W
        W = on.empty((facts.shape[0], Ht.shape[1]), Ht)
        point, beyond = self._start(on, rows, amount, restart)
        next_point = W if beyond is None else on.empty(W.shape, Ht)
        A = out
        if A is None:
            A = next_point if facts.weights is None else on.empty(W.shape, Ht)
        memory = rows.memory or self.rule.init(Ht)
        if memory.previous is not None:
            memory = replace(memory, previous=on.empty(W.shape, Ht))
        seen = [memory.scale]
        solve = self._row_solver(on.cast(on.gram(Ht, exactly=False), Ht), facts.shape[1])

        def step(at: slice, cross: Array) -> Sums:
            old = None if point is None else point[at]
            past = None if rows.memory is None else rows.memory.rows(at)
            room = W[at]
            moved, after = solve(old, cross, past, room)
            # Only some rules write into the memory that they are given.
            if moved is not room:
                W[at] = moved
            if memory.previous is not None:
                memory.previous[at] = after.previous
            seen[0] = after.scale  # the same in all blocks, which share one gram
            if beyond is not None:
                next_point[at] = on.extrapolate(W[at], before[at], beyond)  # type: ignore[index]
            ahead = next_point[at]
            if facts.weights is None:
                sums = (on.gram(ahead, facts.is_exact),)
                if A is not next_point:
                    A[at] = ahead
            else:
                counts = facts.weights[at, None]
                A[at] = counts * ahead
                sums = (on.gram(counts**0.5 * ahead, facts.is_exact),)
            return (*sums, on.total(A[at])) if has_mass else sums

        def done(cross: Array, sums: Sums) -> tuple[RowState, dict[str, Array]]:
            sent = {"gram": sums[0], "cross": cross.T}
            sent |= {"rows": on.scalar(facts.total_weight, Ht), "energy": on.scalar(facts.squared_norm, Ht)}
            sent |= {"mass": on.scalar(sums[1], Ht)} if has_mass else {}
            after = RuleState(memory.count + 1, memory.previous, seen[0])
            return RowState(W, None if next_point is W else next_point, after), sent

        return RowPass(step, done, A, next_point)

    def _start(
        self, on: ModuleType, rows: RowState, amount: Array, restart: Array
    ) -> tuple[Array | None, Array | None]:
        """The point that W steps from (None: the start of each row), and how far it is extrapolated (None: nowhere)."""
        if isinstance(self.momentum, NoExtrapolation) or rows.W is None:
            return rows.W if rows.point is None else rows.point, None
        point, is_back = rows.W, restart > 0
        if rows.point is not None:
            point = on.where(is_back, rows.W, rows.point)
        beyond = on.where(is_back, 0.0, amount)
        return point, None if on.is_known_false(beyond > 0) else beyond

    def _row_solver(
        self, gram: Array, n_features: int
    ) -> Callable[[Array | None, Array, RuleState | None, Array], tuple[Array, RuleState]]:
        """One rule step for a block of rows; all blocks share the gram and its norm."""
        bare = NormalEquations(gram, gram)
        shared = bare.penalized(self.penalty_W, n_features).gram
        norm = cache(lambda: kernels.of(shared).largest_eigenvalue(shared))
        shift = self.penalty_W.l1 * n_features

        def solve(old: Array | None, cross: Array, past: RuleState | None, out: Array) -> tuple[Array, RuleState]:
            factor = constant_rows(gram, cross) if old is None else old
            equations = NormalEquations(shared, cross - shift if shift else cross, norm, out)
            return self.rule.step(factor, equations, past if past is not None else self.rule.init(factor))

        return solve

    def column_step(self, columns: ColumnState, sums: Mapping[str, Array]) -> ColumnState:
        """H ← rule(H; WᵀW, WᵀX) from sums only; accept or revert the step, and set the next extrapolated point."""
        columns = columns.cast_like(sums["cross"])
        if columns.is_unscaled:
            return self._choose_scale(columns, sums)
        proposed = self._step_and_objective(columns, sums)
        del sums  # as large as H, and not needed for its extrapolation
        return self._accept_or_revert(columns, proposed)

    def column_equations(self, sums: Mapping[str, Array]) -> NormalEquations:
        """The problem that sums state for Hᵀ, in the type of the cross product."""
        cross = kernels.of(sums["cross"]).rows_of(sums["cross"])
        return self._equations(sums, cross)

    def _equations(self, sums: Mapping[str, Array], cross: Array) -> NormalEquations:
        gram = kernels.of(cross).cast(sums["gram"], cross)
        return NormalEquations(gram, cross).penalized(self.penalty_H, sums["rows"])

    def _step_and_objective(self, columns: ColumnState, sums: Mapping[str, Array]) -> ProposedStep:
        """The rule's step, before it is accepted; its error comes by the trace formula:

        ‖X − W H‖² = ‖X‖² − 2⟨Hᵀ, XᵀW⟩ + ⟨WᵀW, HHᵀ⟩
        """
        on = kernels.of(columns.Ht)
        cross = on.rows_of(sums["cross"])
        Ht, memory = self.rule.step(columns.point, self._equations(sums, cross), columns.memory)
        gram, basis = on.gram(Ht), (sums["rows"], sums["energy"])
        error = sums["energy"] - 2 * on.inner(Ht, cross) + on.inner(sums["gram"], gram)
        objective, sizes = 0.5 * error, None
        if self.is_penalized:
            objective, sizes = objective + self._penalties(sums, Ht, gram), _sizes(sums["gram"], gram)
        return ProposedStep(Ht, memory, error, objective, basis, sizes)

    def _penalties(self, sums: Mapping[str, Array], Ht: Array, gram: Array) -> Array:
        on_W = self.penalty_W.l1 * sums.get("mass", 0.0) + 0.5 * self.penalty_W.l2 * sums["gram"].diagonal().sum()
        on_H = self.penalty_H.l1 * kernels.of(Ht).total(Ht) + 0.5 * self.penalty_H.l2 * gram.diagonal().sum()
        return Ht.shape[0] * on_W + sums["rows"] * on_H

    def _accept_or_revert(self, columns: ColumnState, proposed: ProposedStep) -> ColumnState:
        """Accept or revert the step by the objective."""
        on, pace = kernels.of(proposed.Ht), columns.pace
        is_same = (proposed.basis[0] == columns.basis[0]) & (proposed.basis[1] == columns.basis[1])
        least = on.where(is_same, pace.objective, float("inf"))
        # Objectives over other rows (other parties in the round) cannot be compared: the first one is accepted.
        after = self.momentum.next(replace(pace, objective=least), proposed.objective)
        Ht = point = proposed.Ht
        if not isinstance(self.momentum, NoExtrapolation):
            is_back, is_plain = after.must_restart, pace.must_restart | (pace.amount == 0)
            Ht = on.where(is_back, columns.Ht, proposed.Ht)
            point = on.choose(
                is_back | is_plain, lambda: Ht, lambda: on.extrapolate(proposed.Ht, columns.Ht, pace.amount)
            )
        state = ColumnState(Ht, point, proposed.memory, after, proposed.squared_error, proposed.basis, columns.trial)
        return state if proposed.sizes is None else self._advance_trial(state, proposed, least)

    def _advance_trial(self, after: ColumnState, proposed: ProposedStep, before: Array) -> ColumnState:
        """Under penalties: start, continue or end a trial split of zero components.

        Trials are decided on the host: a penalized fit on a GPU synchronizes once per iteration.
        """
        trial, sizes = after.trial, proposed.sizes
        assert sizes is not None
        if trial.before is not None:
            if REVIVAL.is_improved(trial, float(after.pace.objective)):
                return replace(after, trial=RevivalState(count=trial.count + 1))
            if trial.steps < REVIVAL.patience:
                return replace(after, trial=replace(trial, steps=trial.steps + 1))
            return self._restart_from(after, trial.before, RevivalState(count=trial.count + 1))
        now = float(proposed.objective)
        if after.pace.must_restart or not REVIVAL.is_due(trial, sizes, float(before), now):
            return after
        split = REVIVAL.split(after.Ht, sizes, trial.count)
        return self._restart_from(after, split, RevivalState(after.Ht, now, 0, trial.count))

    def _restart_from(self, after: ColumnState, Ht: Array, trial: RevivalState) -> ColumnState:
        """Take the next step from another Hᵀ; the model stays the one of the latest sums."""
        start = self.begin(Ht)
        return replace(
            after, point=Ht, memory=start.memory, pace=_with_restart(start.pace), trial=trial, reported=after.objective
        )

    def _choose_scale(self, columns: ColumnState, sums: Mapping[str, Array]) -> ColumnState:
        """The first step of H, on the error alone, and the scale c on which penalties of c W and H / c are least."""
        moved = self.without_penalties._step_and_objective(columns, sums)
        on, n, m = kernels.of(moved.Ht), float(sums["rows"]), moved.Ht.shape[0]
        mass, squares = float(sums.get("mass", 0.0)), float(sums["gram"].diagonal().sum())
        a = m * self.penalty_W.l1 * mass, m * self.penalty_W.l2 * squares
        size, energy = float(on.total(moved.Ht)), float(on.inner(moved.Ht, moved.Ht))
        b = n * self.penalty_H.l1 * size, n * self.penalty_H.l2 * energy
        scale = float(optimal_scale(*(np.array([term]) for term in (*a, *b)))[0])
        start = self.begin(moved.Ht * on.cast(np.array(1 / scale), moved.Ht))
        penalties = scale * a[0] + 0.5 * scale**2 * a[1] + b[0] / scale + 0.5 * b[1] / scale**2
        return replace(
            start,
            pace=_with_restart(start.pace),
            squared_error=moved.squared_error,
            basis=moved.basis,
            reported=0.5 * moved.squared_error + penalties,
            scale=on.scalar(scale, moved.Ht),
        )

    def components(self, columns: ColumnState) -> Array:
        return columns.Ht.T

    def metrics(self, columns: ColumnState) -> Mapping[str, float]:
        """‖X − W H‖ / ‖X‖ over the rows that took part, and the objective over ½‖X‖², known from the sums.

        For data in float32, squares are right to some 1e-9 of ‖X‖², to some 1e-8 where few numbers of WᵀX make up most
        of it, and to 1e-7 where sparse rows have fewer entries than there are components: an error of 1e-3 to about
        1e-5 (1e-4). Values below `DETECTABLE_ERROR` cannot be distinguished by sums and are reported as that limit.
        """
        norm, error = float(columns.squared_norm), float(columns.squared_error)
        if norm <= 0:
            return {"relative_error": 0.0, "objective": 0.0}
        squared = error / norm
        stated = max(squared, DETECTABLE_ERROR["float32" if "float32" in str(columns.Ht.dtype) else "float64"])
        penalties = 2 * float(columns.objective) / norm - squared
        return {"relative_error": math.sqrt(stated), "objective": stated + penalties}

    def solve_rows(self, X: Matrix, Ht: Array, rows: RowState | None = None, *, exactly: bool = True) -> Array:
        """W for given H: the non-negative least squares solution of each row, from its own start.

        What `transform` does, and how a fit ends. A few sweeps find most of the support, pivoting the exact solution;
        without `exactly` the sweeps are all.
        """
        on = kernels.of(Ht)
        gram = on.gram(Ht)
        shared = NormalEquations(gram, gram).penalized(self.penalty_W, X.shape[1]).gram
        # The sweeps run in the type of the factors; only the exact solution uses the gram in float64.
        rough = on.cast(shared, Ht)
        shift = self.penalty_W.l1 * X.shape[1]
        W = on.empty((X.shape[0], Ht.shape[1]), Ht)

        def step(at: slice, cross: Array) -> Sums:
            target = cross - shift if shift else cross
            near = on.sweep(constant_rows(gram, cross), rough, target, SUPPORT_SWEEPS)
            W[at] = on.solve_exactly(near, shared, target) if exactly else near
            return ()

        X.walk(Ht, step)
        return W

    def loss(self, X: Matrix, W: Array, Ht: Array) -> Mapping[str, Array]:
        on = kernels.of(Ht)
        numbers = {"squared_error": X.squared_distance(W, Ht), "squared_norm": X.squared_norm}
        return {name: on.scalar(number, Ht) for name, number in numbers.items()}

    def iterate(self, X: Matrix, rows: RowState, columns: ColumnState, count: int) -> tuple[RowState, ColumnState]:
        """`count` times a row step and a column step on all rows, of which compiled code takes all but the last.

        The last one is taken separately, so that the objective is known. Extrapolated or penalized steps are not
        fused, because each depends on the objective of the previous one.
        """
        fused = count - 1
        is_plain = not self.is_penalized and isinstance(self.momentum, NoExtrapolation) and rows.W is not None
        if fused > 0 and is_plain and max_fused_steps(X, self.rule, None, columns.Ht):
            memories = rows.memory or self.rule.init(rows.W), columns.memory
            penalties, factors = (self.penalty_W, self.penalty_H), (rows.W, columns.Ht)
            W, Ht, of_W, of_H = take_fused_steps(X, self.rule, penalties, factors, memories, fused)
            rows, columns, count = RowState(W, None, of_W), replace(columns, Ht=Ht, point=Ht, memory=of_H), 1
        for _ in range(count):
            rows, sums = self.row_step(X, rows, self.broadcast(columns))
            handed_over = [sums]
            del sums  # XᵀA is as large as H: the column step lets go of it when it can
            columns = self.column_step(columns, handed_over.pop())
        return rows, columns


def _with_restart(pace: MomentumState) -> MomentumState:
    """A pace whose next step begins from W itself, if it is extrapolated at all."""
    return replace(pace, must_restart=pace.amount > 0)


def _device(array: Array) -> str:
    return str(getattr(array, "device", "cpu"))


def optimal_scale(a1: np.ndarray, a2: np.ndarray, b1: np.ndarray, b2: np.ndarray) -> np.ndarray:
    """Where c a₁ + ½ c² a₂ + b₁ / c + ½ b₂ / c² is least: the slope in log c rises, and bisection finds its zero."""
    has_both = ((a1 + a2) > 0) & ((b1 + b2) > 0)
    low, high = np.full(len(a1), -BALANCE_RANGE), np.full(len(a1), BALANCE_RANGE)
    for _ in range(60):
        middle = (low + high) / 2
        c = np.exp(middle)
        rises = c * a1 + c**2 * a2 > b1 / c + b2 / c**2
        low, high = np.where(rises, low, middle), np.where(rises, middle, high)
    return np.where(has_both, np.exp((low + high) / 2), 1.0)


def _sizes(*grams: Array) -> np.ndarray:
    """‖w_j‖ ‖h_j‖ of each component, from WᵀW and HHᵀ."""
    squares = [np.maximum(0.0, kernels.of(gram).to_numpy(gram).diagonal()) for gram in grams]
    return np.sqrt(squares[0] * squares[1])


def constant_rows(gram: Array, cross: Array) -> Array:
    """Return w = c·1 with the best c ≥ 0 for each row: c = Σ_j cross_j / Σ_jl gram_jl, from H and the row only."""
    on, sums = kernels.of(cross), cross.sum(1)
    total = on.cast(gram.sum(), sums)
    return on.tile(on.choose(total > 0, lambda: sums / total, lambda: sums * 0), cross.shape[1])


def accelerated_hals(penalty_W: Penalty = Penalty(), penalty_H: Penalty = Penalty()) -> SquaredError:
    """HALS with several sweeps per product and extrapolation with restart: the default solver of `NMF`."""
    return SquaredError(CoordinateDescent(sweeps=SWEEPS), penalty_W, penalty_H, Extrapolation())


def build_solver(rule: Any, alpha_W: Any = 0.0, alpha_H: Any = "same", l1_ratio: Any = 0.0) -> SquaredError:
    """Both half-steps with their penalties; the rule named "hals" extrapolates, all others are plain."""
    chosen = _parse_rule(rule)
    is_same = isinstance(alpha_H, str) and alpha_H == "same"
    if isinstance(alpha_H, str) and not is_same:
        raise ParameterError(f"alpha_H must be a number or 'same'; got {alpha_H!r}.", parameter="alpha_H")
    on_W = _penalty_weight("alpha_W", alpha_W)
    on_H = on_W if is_same else _penalty_weight("alpha_H", alpha_H)
    l1 = real_number("l1_ratio", l1_ratio)
    if not 0 <= l1 <= 1:
        raise ParameterError(f"l1_ratio must lie between 0 and 1; got {l1_ratio!r}.", parameter="l1_ratio")
    momentum = Extrapolation() if isinstance(rule, str) and rule == "hals" else NoExtrapolation()
    return SquaredError(chosen, Penalty(on_W * l1, on_W * (1 - l1)), Penalty(on_H * l1, on_H * (1 - l1)), momentum)


def _parse_rule(rule: Any) -> UpdateRule:
    known = ", ".join((*RULES.names, "game"))
    if isinstance(rule, str) and rule not in RULES.values:
        raise ParameterError(f"Unknown solver {rule!r}; choose one of {known}.", parameter="solver")
    is_rule = not isinstance(rule, type) and all(callable(getattr(rule, name, None)) for name in RULES.needed)
    if not isinstance(rule, str) and not is_rule:
        raise ParameterError(
            f"solver must be one of {known}, or an update rule such as CoordinateDescent(sweeps=2), or a Game; "
            f"got {rule!r}.",
            parameter="solver",
        )
    chosen: UpdateRule = RULES.parse("solver", rule)
    return chosen


def _penalty_weight(name: str, value: Any) -> float:
    weight = real_number(name, value)
    if not 0 <= weight < float("inf"):
        raise ParameterError(f"{name} must be zero or more, and finite; got {value!r}.", parameter=name)
    return weight
