"""Numba kernels that fuse several local steps of W and H into one call.

A local step consists of about sixty short calls, and parties on parallel threads compete for the interpreter at each of
them. A fused call needs the interpreter only once for many steps. Products are BLAS calls on tiles of rows; everything
is serial and releases the GIL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong.kernels.compiling import FAST, compiled
from partsong.kernels.csr_products import gather_rows
from partsong.kernels.nnls import VANISHING, descend_rows, multiply_rows, sweep_rows

LONG_CALL = 2e9
"""Floating-point operations per call, about a tenth of a second; Ctrl-C is checked between calls."""
STEP_OVERHEAD = 5e5
"""Fixed cost of a step, in floating-point operations."""
RULES = ("descend", "multiply", "sweep")
PULLS = ("alone", "damped", "damped absolutely", "mixed", "proximal")
DESCEND, MULTIPLY, SWEEP = range(3)
ALONE, DAMPED, DAMPED_ABSOLUTELY, MIXED, PROXIMAL = range(5)
CLOSE = 1e-11
"""Relative distance at which bounds of an eigenvalue have converged."""
MOST_PRODUCTS = 60
SUMMED = 256
"""Number of rows whose products are summed in the type of the factor."""


@dataclass(frozen=True, slots=True)
class StepRule:
    """The step of an update rule: "descend" (with inertia), "multiply", or "sweep" (`sweeps` times)."""

    kind: str
    sweeps: int = 1
    inertia: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Pull:
    """A proximal term on Hᵀ (m × k) that is constant for several steps; `center` is m × k, `weights` k.

    "alone"               none
    "damped"              ½μ‖H − C‖² in the equations, μ = strength · ‖gram‖₂
    "damped absolutely"   the same with μ = strength
    "mixed"               H ← (H + strength·C) / (1 + strength·weights) after the step
    "proximal"            the proximal map of strength·½‖H − C‖² with the step
    """

    kind: str = "alone"
    strength: float = 0.0
    center: Any = None
    weights: Any = None


@dataclass(frozen=True, slots=True)
class FusedSteps:
    """`count` fused steps: the rule's step, penalties in the unit of the sums, and the pull on H."""

    count: int
    rule: StepRule
    l1_W: float
    l2_W: float
    l1_H: float
    l2_H: float
    pull: Pull


def max_steps_per_call(products: float, shape: tuple[int, int], rank: int, rule: StepRule) -> int:
    """The number of steps per call, if the two products of a step take `products` operations."""
    steps = 2.0 * sum(shape) * rank**2 * rule.sweeps + 250.0 * rank**2
    return max(1, int(LONG_CALL / (products + steps + STEP_OVERHEAD)))


@compiled()
def largest_eigenvalue(gram, v):  # type: ignore[no-untyped-def]
    """‖gram‖₂ of a symmetric positive semi-definite matrix; v > 0 (k) is the starting vector and is overwritten.

    For a matrix without negative entries and v > 0, max_i (gram v)_i / v_i is never below the eigenvalue (Collatz) and
    vᵀ gram v / vᵀv never above it; power iterations bring the two together. If they do not meet, LAPACK decides.
    """
    k = gram.shape[0]
    least = 0.0
    for i in range(k):
        for j in range(k):
            if not np.isfinite(gram[i, j]):
                return np.inf
            least = min(least, gram[i, j])
    if least >= 0.0:
        u = np.empty(k)
        for _ in range(MOST_PRODUCTS):
            upper, along, length, size = 0.0, 0.0, 0.0, 0.0
            is_known = True
            for i in range(k):
                total = 0.0
                for j in range(k):
                    total += gram[i, j] * v[j]
                u[i] = total
                along += total * v[i]
                length += v[i] * v[i]
                size = max(size, total)
                if gram[i, i] > 0.0:
                    if v[i] > 1e-100:
                        upper = max(upper, total / v[i])
                    else:
                        is_known = False
            if size == 0.0:
                return 0.0
            for i in range(k):
                v[i] = u[i] / size
            if not is_known:
                break
            if upper - along / length <= CLOSE * upper:
                for i in range(k):
                    # The next call starts from this vector, and the upper bound needs v > 0.
                    v[i] = max(v[i], 1e-6)
                return upper
    # The iteration has not converged, or does not apply: the next call starts from ones.
    for i in range(k):
        v[i] = 1.0
    return np.linalg.eigvalsh(gram.astype(np.float64))[-1]


@compiled(fastmath=FAST)
def _shift(gram, cross, squared, linear):  # type: ignore[no-untyped-def]
    """gram + squared·I and cross − linear, in place: penalties."""
    if squared > 0:
        for j in range(gram.shape[0]):
            gram[j, j] += gram.dtype.type(squared)
    if linear > 0:
        amount = cross.dtype.type(linear)
        for i in range(cross.shape[0]):
            for j in range(cross.shape[1]):
                cross[i, j] -= amount


@compiled(fastmath=FAST)
def _damp(gram, cross, mu, center):  # type: ignore[no-untyped-def]
    """gram + mu·I and cross + mu·center, in place."""
    for j in range(gram.shape[0]):
        gram[j, j] += mu
    for i in range(cross.shape[0]):
        for j in range(cross.shape[1]):
            cross[i, j] += mu * center[i, j]


@compiled(fastmath=FAST)
def _mix(F, strength, center, weights):  # type: ignore[no-untyped-def]
    """(F + strength·center) / (1 + strength·weights), in place; tiny values become zero."""
    zero, least = F.dtype.type(0), F.dtype.type(VANISHING * np.finfo(F.dtype).tiny)
    for i in range(F.shape[0]):
        for j in range(F.shape[1]):
            moved = (F[i, j] + strength * center[i, j]) / (1 + strength * weights[j])
            F[i, j] = moved if moved >= least else zero


@compiled(fastmath=FAST)
def _descend_towards(F, product, cross, eta, strength, center, weights):  # type: ignore[no-untyped-def]
    """max(0, (F − eta (product − cross) + eta·strength·center) / (1 + eta·strength·weights)), in place."""
    zero, least = F.dtype.type(0), F.dtype.type(VANISHING * np.finfo(F.dtype).tiny)
    pull = eta * strength
    for i in range(F.shape[0]):
        for j in range(F.shape[1]):
            moved = F[i, j] - eta * (product[i, j] - cross[i, j]) + pull * center[i, j]
            F[i, j] = moved / (1 + pull * weights[j]) if moved >= least else zero


@compiled(fastmath=FAST)
def _lean(F, before, inertia):  # type: ignore[no-untyped-def]
    """F + inertia (F − before), in place; `before` becomes the old F."""
    for i in range(F.shape[0]):
        for j in range(F.shape[1]):
            old = F[i, j]
            F[i, j] = old + inertia * (old - before[i, j])
            before[i, j] = old


@compiled(fastmath=FAST)
def _move(F, before, gram, inverse, cross, product, rule, inertia, eta, sweeps):  # type: ignore[no-untyped-def]
    """One step of a rule, in place."""
    if rule == SWEEP:
        sweep_rows(F, gram, inverse, cross, F, sweeps)
        return
    if rule == DESCEND and inertia > 0:
        _lean(F, before, inertia)
    np.dot(F, gram, product)
    if rule == MULTIPLY:
        multiply_rows(F, product, cross, np.finfo(F.dtype).tiny, F)
    else:
        descend_rows(F, product, cross, eta, F)


@compiled(fastmath=FAST)
def _prepare(gram, inverse, v, rule, inertia):  # type: ignore[no-untyped-def]
    """Prepare a rule for a gram: reciprocals of its diagonal, or the step size of a gradient step."""
    if rule == SWEEP:
        least = np.finfo(gram.dtype).tiny * 4
        for j in range(gram.shape[0]):
            inverse[j] = 1 / gram[j, j] if gram[j, j] > least else 0
    if rule != DESCEND:
        return 0.0
    largest = largest_eigenvalue(gram, v)
    scale = 1.0 if inertia == 0 else 2 * (1 - inertia) / (1 + 2 * inertia)
    return scale / largest if largest > 0 else scale


@compiled(fastmath=FAST)
def _step_columns(Ht, before, gram, inverse, cross, product, v, method, pull, center, weights):  # type: ignore[no-untyped-def]
    """One step of Hᵀ with its pull, in place; gram and cross are overwritten."""
    rule, sweeps, inertia = method
    kind, strength = pull
    amount = Ht.dtype.type(strength)
    if kind == DAMPED or kind == DAMPED_ABSOLUTELY:
        size = 1.0 if kind == DAMPED_ABSOLUTELY else largest_eigenvalue(gram, v)
        _damp(gram, cross, Ht.dtype.type(strength * size), center)
    eta = Ht.dtype.type(_prepare(gram, inverse, v, rule, inertia))
    if kind == PROXIMAL:
        if inertia > 0:
            _lean(Ht, before, Ht.dtype.type(inertia))
        np.dot(Ht, gram, product)
        _descend_towards(Ht, product, cross, eta, amount, center, weights)
        return
    _move(Ht, before, gram, inverse, cross, product, rule, Ht.dtype.type(inertia), eta, sweeps)
    if kind == MIXED:
        _mix(Ht, amount, center, weights)


@compiled(fastmath=FAST, inline="always")
def _copy(A, out):  # type: ignore[no-untyped-def]
    """out ← A; numba compiles out[:] = A for about a second, with all its errors."""
    for i in range(A.shape[0]):
        for j in range(A.shape[1]):
            out[i, j] = A[i, j]


@compiled(fastmath=FAST)
def _gram(F, out, piece, sums):  # type: ignore[no-untyped-def]
    """out ← FᵀF, with products of row blocks in the type of F and their sums in float64."""
    sums[:] = 0.0
    for a in range(0, F.shape[0], SUMMED):
        rows = F[a : min(a + SUMMED, F.shape[0])]
        np.dot(rows.T, rows, piece)
        sums += piece
    _copy(sums, out)


@compiled(fastmath=FAST)
def steps_on_dense(X, W, W_before, Ht, Ht_before, steps, method, penalties, pull, center, weights, height):  # type: ignore[no-untyped-def]
    """`steps` times: a step of W (n × k) from X Hᵀ, then one of Hᵀ (m × k) from XᵀW, in place.

    `method` is a rule, its sweeps and its inertia, `pull` a kind and a strength; tiles have `height` rows.
    """
    rule, sweeps, inertia = method
    (n, m), k = X.shape, W.shape[1]
    kind = W.dtype.type
    longest = max(m, height)
    product, cross = np.empty((longest, k), W.dtype), np.empty((longest, k), W.dtype)
    total, part = np.empty((k, m)), np.empty((k, m), W.dtype)
    gram, piece, inverse = np.empty((k, k), W.dtype), np.empty((k, k), W.dtype), np.empty(k, W.dtype)
    sums = np.empty((k, k))
    v_W, v_H = np.ones(k), np.ones(k)
    none = np.empty((0, 0), W.dtype)
    for _ in range(steps):
        _gram(Ht, gram, piece, sums)
        _shift(gram, none, penalties[1], 0.0)
        eta = kind(_prepare(gram, inverse, v_W, rule, inertia))
        sums[:] = 0.0
        total[:] = 0.0
        for a in range(0, n, height):
            b = min(a + height, n)
            tile, target, rows = X[a:b], cross[: b - a], W[a:b]
            np.dot(tile, Ht, target)
            _shift(none, target, 0.0, penalties[0])
            _move(rows, W_before[a:b], gram, inverse, target, product[: b - a], rule, kind(inertia), eta, sweeps)
            np.dot(rows.T, rows, piece)
            sums += piece
            np.dot(rows.T, tile, part)
            total += part
        _copy(sums, gram)
        _transpose(total, cross[:m])
        _shift(gram, cross[:m], penalties[3], penalties[2])
        _step_columns(Ht, Ht_before, gram, inverse, cross[:m], product[:m], v_H, method, pull, center, weights)


@compiled(fastmath=FAST)
def _transpose(A, out):  # type: ignore[no-untyped-def]
    for first in range(0, A.shape[1], 16):
        for j in range(A.shape[0]):
            for i in range(first, min(first + 16, A.shape[1])):
                out[i, j] = A[j, i]


@compiled(fastmath=FAST)
def steps_on_sparse(by_row, by_column, W, W_before, Ht, Ht_before, steps, method, penalties, pull, center, weights):  # type: ignore[no-untyped-def]
    """The same for rows in CSR form, with the CSR form of the transpose: index pointers, indices, values."""
    rule, sweeps, inertia = method
    (n, k), m = W.shape, Ht.shape[0]
    kind = W.dtype.type
    product, cross = np.empty((max(n, m), k), W.dtype), np.empty((max(n, m), k), W.dtype)
    gram, piece, inverse = np.empty((k, k), W.dtype), np.empty((k, k), W.dtype), np.empty(k, W.dtype)
    sums = np.empty((k, k))
    v_W, v_H = np.ones(k), np.ones(k)
    for _ in range(steps):
        _gram(Ht, gram, piece, sums)
        gather_rows(by_row[0], by_row[1], by_row[2], Ht, 0, cross[:n])
        _shift(gram, cross[:n], penalties[1], penalties[0])
        eta = kind(_prepare(gram, inverse, v_W, rule, inertia))
        _move(W, W_before, gram, inverse, cross[:n], product[:n], rule, kind(inertia), eta, sweeps)
        _gram(W, gram, piece, sums)
        gather_rows(by_column[0], by_column[1], by_column[2], W, 0, cross[:m])
        _shift(gram, cross[:m], penalties[3], penalties[2])
        _step_columns(Ht, Ht_before, gram, inverse, cross[:m], product[:m], v_H, method, pull, center, weights)


def run_on_dense(
    X: np.ndarray,
    W: np.ndarray,
    W_before: np.ndarray,
    Ht: np.ndarray,
    Ht_before: np.ndarray,
    steps: FusedSteps,
    height: int,
) -> None:
    """Run fused steps on dense rows, in place."""
    steps_on_dense(X, W, W_before, Ht, Ht_before, *_as_numbers(steps, Ht), height)


def run_on_sparse(
    by_row: tuple[np.ndarray, ...],
    by_column: tuple[np.ndarray, ...],
    W: np.ndarray,
    W_before: np.ndarray,
    Ht: np.ndarray,
    Ht_before: np.ndarray,
    steps: FusedSteps,
) -> None:
    """Run fused steps on sparse rows, in place."""
    steps_on_sparse(by_row, by_column, W, W_before, Ht, Ht_before, *_as_numbers(steps, Ht))


def _as_numbers(steps: FusedSteps, Ht: np.ndarray) -> tuple[Any, ...]:
    """The steps as numbers and arrays of fixed types, so that numba compiles one version."""
    rule, pull = steps.rule, steps.pull
    method = RULES.index(rule.kind), rule.sweeps, float(rule.inertia)
    penalties = float(steps.l1_W), float(steps.l2_W), float(steps.l1_H), float(steps.l2_H)
    center = np.empty((0, 0), Ht.dtype) if pull.center is None else np.array(pull.center, Ht.dtype, order="C")
    weights = np.empty(0, Ht.dtype) if pull.weights is None else np.array(pull.weights, Ht.dtype)
    return steps.count, method, penalties, (PULLS.index(pull.kind), float(pull.strength)), center, weights
