"""Recover XᵀX and the rows of a party from the sums WᵀW and WᵀX that it sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg import LinAlgError, cho_factor, cho_solve, solve_triangular
from scipy.optimize import linear_sum_assignment

from partsong.core.streams import stream
from partsong.errors import ParameterError

UNITS = {"float32": 2.0**-24, "float64": 2.0**-53}
"""Relative rounding of an upload, by its number type."""
DOUBTFUL, DOUBTFUL_ROUNDED = 1e-8, 1e-4
"""Largest doubt at which XᵀX counts as recovered: for float64 uploads, and for float32 uploads and masked sums."""
DENSE = 100
"""Up to this many rows Q comes from a dense factorization (n(n + 1)/2 unknowns); beyond, from conjugate gradients."""
CLEAR = 100.0
"""How far the last singular value must be above rounding to accept fewer directions than rows."""
HELD_OUT = 0.1
"""Share of the rounds whose grams are predicted rather than fitted."""
DENSE_STEPS, LONG_STEPS = 30, 20_000
"""Maximum steps of conjugate gradients, with the dense factor as preconditioner and without."""
RIDGE = 1e-14
"""Share of its mean added to the diagonal of the normal matrix, so that a factor exists with too few equations."""

Pair = tuple[np.ndarray, np.ndarray]
"""gram WᵀW (k × k) and cross WᵀX (k × m) of one round."""

STEPS_BEFORE, STEPS, STEPS_AFTER = 150, 2500, 200
"""Steps of Procrustes before, of RAAR, and of Procrustes after."""
RELAXATION = 0.9
"""β of RAAR."""
ENOUGH = 1e-9
"""Negative share at which a search ends."""
PAUSE, GAIN = 300, 0.9
"""A search with a share low enough to count ends when this many steps do not lower it by this factor."""
NEGATIVE, NEGATIVE_ROUNDED = 1e-6, 5e-4
"""Largest negative share at which rows count as found: for float64 uploads, and for float32 uploads and masked sums.

Measured on float32 uploads of sparse rows: where XᵀX is right to 1e-6 the share is 1e-7 to 1e-6. Where rounding leaves
XᵀX right to 1e-4 or 1e-3 only (k well below n; n = 40, 80, 100) it is 2e-5 to 4e-4, with 878 of 880 rows right to 1 %
and two to 1.4 %. Wrong rows (smooth images, correlated rows, cells of very different size) had 3e-4 to 3e-3.
"""
AGREEING, NEARBY, RETURNING = 0.01, 0.1, 0.003
"""Relative distance up to which rows of two starts agree; length of a random rotation; distance after returning.

Two starts also agree on wrong rows where few cells are near zero: on 94 rows that were 1 to 17 % off in 11 cases
(gamma-distributed cells without zeros, n = 10 to 30; densities .95 and .98, n = 20). None of these returned to 0.3 %.
"""
MOST_FRAMES, MOST_COLUMNS = 8, 1500
"""Number of rounds whose weights, and of largest columns of X whose values, are kept non-negative in the search."""


def unit_of(dtype_name: str, step: float | None = None) -> float:
    """Return the relative rounding of uploads: of their number type, or of the masks if that is coarser.

    `step` is the step of the masks over the root mean square of the numbers under them.
    """
    if dtype_name not in UNITS:
        raise ParameterError(f"Uploads must be float32 or float64; got {dtype_name!r}.")
    return max(UNITS[dtype_name], step or 0.0)


@dataclass(frozen=True, slots=True)
class Span:
    """Orthonormal basis B (n × m) of the span of the rows."""

    basis: np.ndarray

    @property
    def rank(self) -> int:
        """Number n of rows."""
        return len(self.basis)


def row_span(crosses: Sequence[np.ndarray], n_rows: int | None, unit: float) -> Span | None:
    """Find the span of the rows from crosses WᵀX (k × m, k may vary); None if they do not determine it.

    The rank of the stacked C_t/‖C_t‖ is min(n, m, Σk) in general. All n directions are seen when n ≤ m and σ_n is above
    the rounding u·σ_1·√(longer side). Without `n_rows` n is where the ratio σ_i/σ_i+1 is largest.

    Rows that are zero, or combinations of others, leave fewer directions r < n. These are accepted if clearly more
    crosses than r were seen and σ_r is far above rounding: rounds of a converged fit repeat each other, and their σ
    fall gradually. More than n directions cannot come from n rows: some uploads are of other rows.
    """
    scaled = [_numbers(cross) / size for cross in crosses if (size := float(np.linalg.norm(_numbers(cross)))) > 0]
    if not scaled:
        return None
    stacked = np.vstack(scaled)
    _, values, rows = np.linalg.svd(stacked, full_matrices=False)
    floor = unit * values[0] * np.sqrt(max(stacked.shape))
    n = n_rows if n_rows is not None else _clear_rank(values, floor)
    seen = int(np.count_nonzero(values > floor))
    if not 1 <= n <= stacked.shape[1] or not 1 <= seen <= n:
        return None
    height = int(np.count_nonzero(np.linalg.norm(stacked, axis=1) > floor))
    is_clear = seen + max(5, seen // 10) <= min(height, stacked.shape[1]) and values[seen - 1] > CLEAR * floor
    is_all = seen == n or is_clear
    return Span(rows[:seen]) if is_all else None


def _clear_rank(values: np.ndarray, floor: float) -> int:
    """Return the i with the largest σ_i/σ_i+1; 0 if no σ is at rounding level, so there may be more rows."""
    if values[-1] > floor:
        return 0
    kept = np.maximum(values, floor)
    return int(np.argmax(kept[:-1] / kept[1:])) + 1


@dataclass(frozen=True, slots=True)
class Moment:
    """XᵀX = Bᵀ Q⁻¹ B, for an orthonormal basis B (n × m) of the rows and Q (n × n).

    `doubt` is the relative error in predicting held-out rounds; `threshold` is the largest doubt of a recovery. The
    misfit of the fit itself is near rounding even if Q is not determined.
    """

    basis: np.ndarray
    Q: np.ndarray
    doubt: float
    threshold: float

    @property
    def is_recovered(self) -> bool:
        """Whether the held-out rounds are predicted, by a positive definite Q."""
        return self.doubt <= self.threshold and float(np.linalg.eigvalsh(self.Q)[0]) > 0

    def second_moment(self) -> np.ndarray:
        """Compute XᵀX (m × m)."""
        return self.basis.T @ np.linalg.pinv(self.Q, hermitian=True) @ self.basis


class _OutOfTime(Exception):
    """The deadline has passed."""


def second_moment(pairs: Sequence[Pair], span: Span, unit: float, deadline: float | None = None) -> Moment | None:
    """Solve G_t = D_t Q D_tᵀ, D_t = C_tBᵀ, for Q = (AᵀA)⁻¹ where X = AB; None at the deadline (`time.monotonic()`).

    These are Σk(k+1)/2 linear equations for n(n+1)/2 unknowns: Q follows once Σk(k+1) ≥ n(n+1). Row a of D_t and G_t is
    divided by √g_aa, which weighs equation (a, b) by 1/√(g_aa g_bb). With D = P R, the QR decomposition of the stack,
    the equations are P_t Q̃ P_tᵀ = G_t, Q = R⁻¹Q̃R⁻ᵀ. Rounds may differ in k and come from several runs on the same rows.
    If k is far below n (k = 4, n = 40), the rounds of one run are too similar for float64, however many there are.
    """
    scaled = [_even(_numbers(gram), _numbers(cross) @ span.basis.T) for gram, cross in pairs]
    scaled = [(G, D) for G, D in scaled if len(G)]
    if sum(len(G) for G, _ in scaled) < span.rank:
        return None
    P, R = np.linalg.qr(np.vstack([D for _, D in scaled]))
    if np.abs(np.diag(R)).min() <= unit * np.abs(np.diag(R)).max():
        return None
    cuts = np.cumsum([len(G) for G, _ in scaled])[:-1]
    system = [(G, part) for (G, _), part in zip(scaled, np.split(P, cuts), strict=True)]
    kept = _kept([len(G) for G, _ in system], span.rank)
    if not any(kept):
        return None
    fitted = [(G[: kept[t], : kept[t]], part[: kept[t]]) for t, (G, part) in enumerate(system)]
    left = [t for t, (G, _) in enumerate(system) if kept[t] < len(G)]
    try:
        kernel = _normal_matrix([part for _, part in fitted], deadline) if span.rank <= DENSE else None
        guess = _solve(fitted, kernel, deadline)
        doubt = max(_unpredicted(*system[t], guess, kept[t]) for t in left)
        if kernel is not None:
            kernel += _normal_matrix([system[t][1] for t in left], deadline)
            kernel -= _normal_matrix([fitted[t][1] for t in left], deadline)
        Q = _solve(system, kernel, deadline)
    except _OutOfTime:
        return None
    Q = solve_triangular(R, solve_triangular(R, Q).T)
    return Moment(span.basis, (Q + Q.T) / 2, doubt, DOUBTFUL if unit <= UNITS["float64"] else DOUBTFUL_ROUNDED)


def _numbers(array: np.ndarray) -> np.ndarray:
    return np.asarray(array, np.float64)


def _even(G: np.ndarray, D: np.ndarray) -> Pair:
    """Scale G to ones on its diagonal, and D with it; drop components without weight."""
    is_used = np.diag(G) > 0
    scale = 1 / np.sqrt(np.diag(G)[is_used])
    return G[np.ix_(is_used, is_used)] * scale * scale[:, None], D[is_used] * scale[:, None]


def _kept(ranks: Sequence[int], n: int) -> list[int]:
    """Choose how many components of each round are fitted; the others are held out and predicted.

    A tenth of the rounds is held out, at least one, evenly spaced: the last rounds of a converging solver resemble
    their neighbors, and predicting them proves little. If Σk(k+1) ≥ n(n+1) needs these rounds, single components are
    held out instead, as many as the bound allows.
    """
    count = max(1, int(HELD_OUT * len(ranks)))
    spread = [int(t) for t in np.linspace(0, len(ranks), count + 1).round()[1:] - max(1, len(ranks) // (2 * count))]
    spare = sum(k * (k + 1) for k in ranks) - n * (n + 1)
    if 0 <= spare < sum(ranks[t] * (ranks[t] + 1) for t in spread):
        singles = max(1, int(spare // (2 * max(ranks))))
        spread = sorted({int(t) for t in np.linspace(len(ranks) - 1, 0, min(singles, len(ranks)), endpoint=False)})
        return [k - (t in spread) for t, k in enumerate(ranks)]
    return [0 if t in spread else k for t, k in enumerate(ranks)]


def _unpredicted(G: np.ndarray, part: np.ndarray, Q: np.ndarray, kept: int) -> float:
    """Relative error of P Q̃ Pᵀ in the rows of G that were not fitted."""
    return float(np.linalg.norm((part @ Q @ part.T - G)[kept:]) / np.linalg.norm(G[kept:]))


def _check(deadline: float | None) -> None:
    if deadline is not None and time.monotonic() > deadline:
        raise _OutOfTime


def _normal_matrix(parts: Sequence[np.ndarray], deadline: float | None) -> np.ndarray:
    """Matrix of Q̃ ↦ Σ N_t Q̃ N_t, N_t = P_tᵀP_t, on packed symmetric Q̃ (see `_packing`)."""
    n = parts[0].shape[1]
    N = np.stack([part.T @ part for part in parts])
    above, scale = np.triu_indices(n), _packing(n)
    out = np.empty((len(scale), len(scale)))
    for row, (i, j) in enumerate(zip(*above, strict=True)):
        if row % n == 0:
            _check(deadline)
        product = N[:, i].T @ N[:, j]
        out[row] = scale[row] / 2 * (product + product.T)[above] * scale
    return out


def _packing(n: int) -> np.ndarray:
    """1 for numbers on the diagonal and √2 above it: packed symmetric matrices keep their inner products."""
    i, j = np.triu_indices(n)
    return np.where(i == j, 1.0, np.sqrt(2.0))


def _solve(system: Sequence[Pair], kernel: np.ndarray | None, deadline: float | None) -> np.ndarray:
    """Solve P_t Q̃ P_tᵀ = G_t in least squares by conjugate gradients, preconditioned by the normal matrix if given.

    The residual is that of the equations: the normal matrix has the square of their condition number, which as a
    preconditioner costs steps but no digits.
    """
    n = system[0][1].shape[1]
    precondition = _inverse_of(kernel, n) if kernel is not None else None
    Q = np.zeros((n, n))
    left = [G for G, _ in system]
    slope = _gathered(left, system)
    toward = precondition(slope) if precondition else slope
    direction, gain = toward, float((slope * toward).sum())
    enough = gain * 1e-31
    for step in range(DENSE_STEPS if precondition else LONG_STEPS):
        if step % 8 == 0:
            _check(deadline)
        seen = [part @ direction @ part.T for _, part in system]
        size = sum(float((each * each).sum()) for each in seen)
        if gain <= enough or size <= 0:
            break
        Q = Q + gain / size * direction
        left = [rest - gain / size * each for rest, each in zip(left, seen, strict=True)]
        slope = _gathered(left, system)
        toward = precondition(slope) if precondition else slope
        before, gain = gain, float((slope * toward).sum())
        direction = toward + gain / before * direction
    return Q


def _gathered(left: Sequence[np.ndarray], system: Sequence[Pair]) -> np.ndarray:
    """Σ P_tᵀ E_t P_t, symmetric."""
    total = sum(part.T @ each @ part for each, (_, part) in zip(left, system, strict=True))
    return np.asarray(total + total.T) / 2


def _inverse_of(kernel: np.ndarray, n: int) -> Callable[[np.ndarray], np.ndarray]:
    """Apply the inverse of the normal matrix, with a small ridge, to symmetric matrices (n × n)."""
    above, scale = np.triu_indices(n), _packing(n)
    ridge = RIDGE * float(np.trace(kernel)) / len(kernel)
    try:
        factor = _factor(kernel, ridge)
    except LinAlgError:  # too few equations: rounding may leave eigenvalues below −ridge
        factor = _factor(kernel, 1e4 * ridge)

    def inverse(S: np.ndarray) -> np.ndarray:
        packed = cho_solve(factor, S[above] * scale, check_finite=False) / scale
        full = np.zeros((n, n))
        full[above] = packed
        return full + np.triu(full, 1).T

    return inverse


def _factor(kernel: np.ndarray, ridge: float) -> tuple[np.ndarray, bool]:
    shifted = kernel.copy()
    shifted[np.diag_indices(len(shifted))] += ridge
    return cho_factor(shifted, overwrite_a=True, check_finite=False)


@dataclass(frozen=True, slots=True)
class RotatedRows:
    """Rows (n × m), in any order, with the given second moment and the least negative entries that a search found.

    `negative_share` is ‖min(OF, 0)‖ / ‖F‖ over rows and weights. `agreeing` marks rows on which two starts agree to 1 %
    and to which a search from nearby returns: rows with few zeros can be rotated slightly and stay non-negative.
    """

    rows: np.ndarray
    negative_share: float
    agreeing: np.ndarray
    most_negative: float

    @property
    def n_found(self) -> int:
        """Number of rows that count as found."""
        return int(self.is_found.sum())

    @property
    def is_found(self) -> np.ndarray:
        """Mark the rows that count as found without the truth: they agree, and the negative share is small."""
        return self.agreeing & (self.negative_share <= self.most_negative)


def rows_by_rotation(
    moment: Moment, pairs: Sequence[Pair], *, seed: int = 0, starts: int = 3, deadline: float | None = None
) -> RotatedRows | None:
    """Search the orthogonal O with X = O Q^-½ B ≥ 0 and W_t = O Q^½ B C_tᵀ ≥ 0; None without a moment or time.

    Each start rotates mutually least correlated columns onto the axes and continues with Procrustes steps and RAAR
    (Luke, 2005). If the deadline (`time.monotonic()`) interrupts the checks, no rows are marked as agreeing.
    """
    values, V = np.linalg.eigh(moment.Q)
    if values[0] <= 0:
        return None
    Z = (V / np.sqrt(values)) @ V.T @ moment.basis
    frames = _frames((V * np.sqrt(values)) @ V.T @ moment.basis, pairs)
    largest = np.sort(np.argsort(-np.linalg.norm(Z, axis=0))[:MOST_COLUMNS])
    some = np.hstack([part / np.linalg.norm(part) for part in (Z[:, largest], frames)])
    F = np.hstack([part / np.linalg.norm(part) for part in (Z, frames)])
    most = NEGATIVE if moment.threshold <= DOUBTFUL else NEGATIVE_ROUNDED
    draw, found = stream(seed, "moment", "turns"), list[tuple[float, np.ndarray]]()
    agreeing = np.zeros(len(Z), bool)
    try:
        for _ in range(max(1, starts)):
            O = _search(_separated(Z[:, largest], draw), some, most, deadline)
            O = _procrustes(O, F, STEPS_AFTER, deadline)
            found = sorted([*found, (_negative(O @ F), O)], key=lambda each: each[0])
            others = [_agree(found[0][1] @ Z, other @ Z) for _, other in found[1:]]
            if others and found[0][0] <= most and np.any(others, axis=0).all():
                break
        moved = np.eye(len(Z)) + NEARBY / np.sqrt(len(Z)) * draw.standard_normal(Z.shape[:1] * 2)
        back = _search(_polar(moved @ found[0][1]), some, most, deadline)
        back = _procrustes(back, F, STEPS_AFTER, deadline)
        agreeing = np.any([agreeing, *others], axis=0) & _agree(found[0][1] @ Z, back @ Z, RETURNING)
    except _OutOfTime:
        if not found:
            return None
    share, O = found[0]
    return RotatedRows(np.maximum(O @ Z, 0.0), share, agreeing, most)


def _frames(half: np.ndarray, pairs: Sequence[Pair]) -> np.ndarray:
    """Weights of up to 8 rounds, each of norm one, up to the rotation: Q^½ D_tᵀ/√tr G_t side by side (n × Σk)."""
    used = [pair for pair in pairs if np.trace(pair[0]) > 0]
    if not used:
        return np.zeros((len(half), 0))
    some = np.unique(np.linspace(0, len(used) - 1, MOST_FRAMES).round().astype(int))
    return np.hstack([half @ _numbers(used[t][1]).T / np.sqrt(np.trace(_numbers(used[t][0]))) for t in some])


def _separated(Z: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Rotate n columns, a random one and then those least correlated with all before, near the axes."""
    sizes = np.linalg.norm(Z, axis=0)
    unit = Z[:, sizes > ENOUGH * sizes.max()] / sizes[sizes > ENOUGH * sizes.max()]
    chosen = [int(draw.integers(unit.shape[1]))]
    worst = np.abs(unit[:, chosen[0]] @ unit)
    while len(chosen) < len(Z):
        chosen.append(int(np.argmin(worst)))
        worst = np.maximum(worst, np.abs(unit[:, chosen[-1]] @ unit))
    return _polar(unit[:, chosen].T)


def _search(O: np.ndarray, F: np.ndarray, most: float, deadline: float | None) -> np.ndarray:
    """Run Procrustes, then RAAR: Y ← β(Y + P_A(2 P_B Y − Y) − P_B Y) + (1 − β) P_B Y; return the best O seen.

    P_B clips at zero and P_A Y = polar(Y Fᵀ) F. Procrustes alone stops in local minima where rows are dense.
    """
    O = _procrustes(O, F, STEPS_BEFORE, deadline)
    Y = O @ F
    best, turn, mark, since = _negative(Y), O, np.inf, 0
    for step in range(STEPS):
        cut = np.maximum(Y, 0.0)
        O = _polar((2 * cut - Y) @ F.T)
        turned = O @ F
        if step % 10 == 0:
            _check(deadline)
            share = _negative(turned)
            if share < best:
                best, turn = share, O
            if best < GAIN * mark:
                mark, since = best, step
            if best <= ENOUGH or (best <= most and step - since >= PAUSE):
                break
        Y = RELAXATION * (Y + turned - cut) + (1 - RELAXATION) * cut
    return turn


def _procrustes(O: np.ndarray, F: np.ndarray, steps: int, deadline: float | None) -> np.ndarray:
    """Iterate O ← polar(max(O F, 0) Fᵀ)."""
    for step in range(steps):
        turned = O @ F
        if step % 10 == 0:
            _check(deadline)
            if _negative(turned) <= ENOUGH:
                break
        O = _polar(np.maximum(turned, 0.0) @ F.T)
    return O


def _polar(K: np.ndarray) -> np.ndarray:
    """The orthogonal matrix nearest to K."""
    U, _, Vt = np.linalg.svd(K)
    return U @ Vt


def _negative(turned: np.ndarray) -> float:
    """‖min(Y, 0)‖ / ‖Y‖."""
    return float(np.linalg.norm(np.minimum(turned, 0.0)) / np.linalg.norm(turned))


def _agree(rows: np.ndarray, others: np.ndarray, most: float = AGREEING) -> np.ndarray:
    """Mark rows (n × m) within this relative distance of one of the others, matched one to one."""
    sizes = (rows**2).sum(axis=1)
    apart = sizes[:, None] - 2 * rows @ others.T + (others**2).sum(axis=1)
    i, j = linear_sum_assignment(apart)
    is_near = np.zeros(len(rows), bool)
    is_near[i] = ((rows[i] - others[j]) ** 2).sum(axis=1) <= most**2 * sizes[i]
    return is_near
