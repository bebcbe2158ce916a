"""Numba kernels for non-negative least squares of many rows with one Gram matrix: sweeps and exact solutions.

Sweeps (coordinate descent, multiplicative and gradient steps) work on tiles of 128 rows. A tile is stored transposed,
so that SIMD lanes are rows, and the loop over components is unrolled by eight; several sweeps run while the tile is in
cache. Rows are transposed in squares of 16, which compilers turn into shuffles.

Exact solutions are computed row by row. Block principal pivoting (Kim & Park, 2011) exchanges all infeasible variables
at once and usually ends after a few factorizations. A row is accepted only when its optimality conditions hold. A row
that cycles, or whose passive set is too ill-conditioned to solve, uses an active set method from its starting point
instead (Lawson & Hanson, 1974), which ends for every matrix. Each row is solved independently, so its bits do not
depend on other rows.

All kernels are serial and release the GIL.
"""

from __future__ import annotations

import numpy as np

from partsong.kernels.compiling import FAST, compiled

LANES = 128
SQUARE = 16
VANISHING = 2.0**24
"""Numbers below this many times the smallest normal number become zero: subnormal numbers are slow."""


@compiled(fastmath=FAST, inline="always")
def _load(F, f, start, rows):  # type: ignore[no-untyped-def]
    """f ← rows of F transposed, with zeros in unused lanes."""
    k = F.shape[1]
    whole = rows // SQUARE * SQUARE
    for first in range(0, whole, SQUARE):
        for j in range(k):
            for r in range(SQUARE):
                f[j, first + r] = F[start + first + r, j]
    for j in range(k):
        for r in range(whole, rows):
            f[j, r] = F[start + r, j]
        for r in range(rows, LANES):
            f[j, r] = 0


@compiled(fastmath=FAST, inline="always")
def _store(f, out, start, rows):  # type: ignore[no-untyped-def]
    """Rows of out ← f transposed."""
    k = f.shape[0]
    whole = k // SQUARE * SQUARE
    for first in range(0, whole, SQUARE):
        for r in range(rows):
            for j in range(SQUARE):
                out[start + r, first + j] = f[first + j, r]
    for r in range(rows):
        for j in range(whole, k):
            out[start + r, j] = f[j, r]


@compiled(fastmath=FAST, inline="always")
def _sweep_tile(f, c, gram, inverse, residual):  # type: ignore[no-untyped-def]
    """One pass over the components of a tile."""
    k = f.shape[0]
    zero = f.dtype.type(0)
    for j in range(k):
        if inverse[j] == zero:
            continue
        for r in range(LANES):
            residual[r] = c[j, r]
        l = 0
        while l + 8 <= k:
            g0, g1, g2, g3 = gram[j, l], gram[j, l + 1], gram[j, l + 2], gram[j, l + 3]
            g4, g5, g6, g7 = gram[j, l + 4], gram[j, l + 5], gram[j, l + 6], gram[j, l + 7]
            for r in range(LANES):
                residual[r] -= (
                    g0 * f[l, r]
                    + g1 * f[l + 1, r]
                    + g2 * f[l + 2, r]
                    + g3 * f[l + 3, r]
                    + g4 * f[l + 4, r]
                    + g5 * f[l + 5, r]
                    + g6 * f[l + 6, r]
                    + g7 * f[l + 7, r]
                )
            l += 8
        while l < k:
            g0 = gram[j, l]
            for r in range(LANES):
                residual[r] -= g0 * f[l, r]
            l += 1
        step = inverse[j]
        for r in range(LANES):
            f[j, r] = max(zero, f[j, r] + residual[r] * step)


@compiled(fastmath=FAST)
def sweep_rows(F, gram, inverse, cross, out, sweeps):  # type: ignore[no-untyped-def]
    """`sweeps` passes over the components of each tile."""
    n, k = F.shape
    f = np.empty((k, LANES), F.dtype)
    c = np.empty((k, LANES), F.dtype)
    residual = np.empty(LANES, F.dtype)
    for start in range(0, n, LANES):
        rows = min(LANES, n - start)
        _load(F, f, start, rows)
        _load(cross, c, start, rows)
        for _ in range(sweeps):
            _sweep_tile(f, c, gram, inverse, residual)
        _store(f, out, start, rows)


@compiled(fastmath=FAST)
def multiply_rows(F, product, cross, floor, out):  # type: ignore[no-untyped-def]
    """out = F ∘ max(cross, 0) / max(product, floor), with tiny values set to zero."""
    zero, least = F.dtype.type(0), F.dtype.type(VANISHING * np.finfo(F.dtype).tiny)
    for i in range(F.shape[0]):
        for j in range(F.shape[1]):
            moved = F[i, j] * max(cross[i, j], zero) / max(product[i, j], floor)
            out[i, j] = moved if moved >= least else zero


@compiled(fastmath=FAST)
def descend_rows(F, product, cross, step, out):  # type: ignore[no-untyped-def]
    """out = max(0, F − step (product − cross)), with tiny values set to zero."""
    zero, least = F.dtype.type(0), F.dtype.type(VANISHING * np.finfo(F.dtype).tiny)
    for i in range(F.shape[0]):
        for j in range(F.shape[1]):
            moved = F[i, j] - step * (product[i, j] - cross[i, j])
            out[i, j] = moved if moved >= least else zero


@compiled(fastmath=FAST)
def extrapolate_rows(new, old, amount, out):  # type: ignore[no-untyped-def]
    """out = max(0, new + amount (new − old))."""
    zero = new.dtype.type(0)
    for i in range(new.shape[0]):
        for j in range(new.shape[1]):
            out[i, j] = max(zero, new[i, j] + amount * (new[i, j] - old[i, j]))


@compiled(fastmath=FAST)
def inner_rows(A, B):  # type: ignore[no-untyped-def]
    """⟨A, B⟩ summed in float64."""
    total = 0.0
    for i in range(A.shape[0]):
        for j in range(A.shape[1]):
            total += np.float64(A[i, j]) * np.float64(B[i, j])
    return total


# Explicit loops instead of NumPy expressions (x[:] = z, x.sum(), x > 0): numba takes a second or more to compile each
# of those, and these kernels are compiled at the first fit.

PATIENCE = 3
"""Exchanges without fewer infeasible variables before pivoting gives up."""
SLACK, SOLVED, STEEP = 1e-13, 1e-12, 1e-14
"""Tolerances relative to the largest right-hand side: for feasibility, for residuals, and for descent slopes."""


@compiled(fastmath=FAST)
def _factorize(gram, cross, members, count, R, inverse, flat):  # type: ignore[no-untyped-def]
    """Cholesky of gram[members, members] from the last member to the first: row t of R has pivot count − 1 − t.

    Column 0 is the right-hand side, column q + 1 belongs to member q. Rows are subtracted eight at a time; rows not yet
    computed are zeros. A member whose pivot (of a diagonal near one) is at most `flat` depends on those before
    it and is left out: its row and its inverse pivot are zero.
    """
    row = np.empty(R.shape[1])
    for b in range(R.shape[1]):
        row[b] = 0.0
    for t in range(count):
        last = count - 1 - t
        own = gram[members[last]]
        row[0] = cross[members[last]]
        for q in range(last + 1):
            row[q + 1] = own[members[q]]
        width = 4 * ((last + 5) // 4)  # last + 2, rounded up to whole vectors; the rest is finite and unused
        if t % 8 == 0:
            for c in range(t, t + 8):
                for b in range(width):
                    R[c, b] = 0.0
        for c in range(0, t, 8):
            s0, s1, s2, s3 = R[c, last + 1], R[c + 1, last + 1], R[c + 2, last + 1], R[c + 3, last + 1]
            s4, s5, s6, s7 = R[c + 4, last + 1], R[c + 5, last + 1], R[c + 6, last + 1], R[c + 7, last + 1]
            for b in range(width):
                four = s0 * R[c, b] + s1 * R[c + 1, b] + s2 * R[c + 2, b] + s3 * R[c + 3, b]
                row[b] -= four + s4 * R[c + 4, b] + s5 * R[c + 5, b] + s6 * R[c + 6, b] + s7 * R[c + 7, b]
        inverse[t] = 1.0 / np.sqrt(row[last + 1]) if row[last + 1] > flat else 0.0
        for b in range(width):
            R[t, b] = row[b] * inverse[t]


@compiled(fastmath=FAST)
def _solve(gram, cross, passive, x, work):  # type: ignore[no-untyped-def]
    """Solve gram x = cross on the passive set; x is zero elsewhere."""
    members, R, inverse, right, flat = work
    count = np.int64(0)  # a literal 0 would compile another version
    for j in range(x.shape[0]):
        x[j] = 0.0
        if passive[j]:
            members[count] = j
            count += 1
    _factorize(gram, cross, members, count, R, inverse, flat)
    for q in range(count):
        t = count - 1 - q
        total = R[t, 0]
        for b in range(q):
            total -= R[t, b + 1] * right[b]
        right[q] = total * inverse[t]
        x[members[q]] = right[q]


@compiled(fastmath=FAST)
def _slope(gram, cross, x, y):  # type: ignore[no-untyped-def]
    """y = gram x − cross."""
    k = x.shape[0]
    for j in range(k):
        y[j] = -cross[j]
    for a in range(k):
        value = x[a]
        if value != 0.0:
            for j in range(k):
                y[j] += gram[a, j] * value


@compiled()
def _pivot(gram, cross, size, passive, x, y, work):  # type: ignore[no-untyped-def]
    """Exchange all infeasible variables until there are none; return False if no solution is found."""
    k = x.shape[0]
    patience, fewest = PATIENCE, k + 1
    while patience >= 0:
        _solve(gram, cross, passive, x, work)
        _slope(gram, cross, x, y)
        infeasible = 0
        for j in range(k):
            # The residual is not zero: this passive set is too ill-conditioned to solve.
            if passive[j] and abs(y[j]) > SOLVED * size:
                return False
            if (x[j] if passive[j] else y[j]) < -SLACK * size:
                infeasible += 1
        if infeasible == 0:
            return True
        if infeasible < fewest:
            fewest, patience = infeasible, PATIENCE
        else:
            patience -= 1
        for j in range(k):
            if (x[j] if passive[j] else y[j]) < -SLACK * size:
                passive[j] = not passive[j]
    return False


@compiled()
def _advance(x, z, passive):  # type: ignore[no-untyped-def]
    """Move x towards z while it stays non-negative; True if z is reached, else zeros leave the passive set."""
    step, blocking = 1.0, -1
    for j in range(x.shape[0]):
        if passive[j] and z[j] <= 0.0 and x[j] <= step * (x[j] - z[j]):
            step, blocking = x[j] / (x[j] - z[j]) if x[j] > 0.0 else 0.0, j
    for j in range(x.shape[0]):
        if passive[j]:
            x[j] = max(0.0, x[j] + step * (z[j] - x[j]))
            if blocking >= 0 and (x[j] == 0.0 or j == blocking):
                x[j], passive[j] = 0.0, False
    return blocking < 0


@compiled()
def _descend(gram, cross, size, x, y, work):  # type: ignore[no-untyped-def]
    """Lawson & Hanson's active set method from the feasible point x; the objective never rises."""
    k = x.shape[0]
    z, passive, barred = np.empty(k), np.empty(k, np.bool_), np.empty(k, np.bool_)
    for j in range(k):
        passive[j], barred[j] = x[j] > 0.0, False
    entering = -1
    for _ in range(10 * k + 50):
        _solve(gram, cross, passive, z, work)
        if entering >= 0 and z[entering] <= 0.0:
            # Only rounding lets an entering variable fall. Without the bar it would be chosen again and again.
            passive[entering], barred[entering] = False, True
        elif not _advance(x, z, passive):
            entering = -1
            continue
        else:
            for j in range(k):
                barred[j] = False
        _slope(gram, cross, x, y)
        entering, steepest = -1, -STEEP * size
        for j in range(k):
            if not passive[j] and not barred[j] and y[j] < steepest:
                entering, steepest = j, y[j]
        if entering < 0:
            break
        passive[entering] = True


@compiled()
def _take_unless_worse(gram, cross, z, precision, x):  # type: ignore[no-untyped-def]
    """x ← z, unless that raises the objective or lowers it by less than the rounding error of gram.

    The rise is ½ (z − x)·(slope at z + slope at x), its uncertainty precision·((Σz)² − (Σx)²).
    """
    k = x.shape[0]
    here, there = np.empty(k), np.empty(k)
    _slope(gram, cross, x, here)
    _slope(gram, cross, z, there)
    rise = precision * (_total(z) ** 2 - _total(x) ** 2)
    for j in range(k):
        rise += 0.5 * (z[j] - x[j]) * (here[j] + there[j])
    if rise <= 0.0:
        _copy(z, x)


@compiled(inline="always")
def _total(x):  # type: ignore[no-untyped-def]
    total = 0.0
    for j in range(x.shape[0]):
        total += x[j]
    return total


@compiled(inline="always")
def _copy(x, out):  # type: ignore[no-untyped-def]
    for j in range(x.shape[0]):
        out[j] = x[j]


@compiled(inline="always")
def _mark_positive(x, passive):  # type: ignore[no-untyped-def]
    for j in range(x.shape[0]):
        passive[j] = x[j] > 0.0


@compiled()
def solve_rows(gram, scale, cross, start, flat, out):  # type: ignore[no-untyped-def]
    """Solve every row of cross from its row of start; gram is given in units of `scale`, its diagonal near one or zero.

    Components with zero scale are zero. The active set method adds 2·flat to the diagonal, which makes solutions
    unique; pivoting from its result removes that again if the equations allow it.
    """
    n, k = cross.shape
    work = (np.empty(k, np.int64), np.empty((k + 8, k + 16)), np.empty(k), np.empty(k), flat)
    for a in range(k + 8):
        for b in range(k + 16):
            work[1][a, b] = 0.0
    c, x, y, z, passive = np.empty(k), np.empty(k), np.empty(k), np.empty(k), np.empty(k, np.bool_)
    firm = np.empty((k, k))
    for a in range(k):
        for b in range(k):
            firm[a, b] = gram[a, b] + (2.0 * flat if a == b else 0.0)
    for i in range(n):
        size = 1e-300
        for j in range(k):
            c[j] = cross[i, j] * scale[j]
            x[j] = start[i, j] / scale[j] if scale[j] > 0.0 else 0.0
            size = max(size, abs(c[j]))
        _mark_positive(x, passive)
        for attempt in range(2):  # one call of _pivot, so that it is compiled once
            is_solved = _pivot(gram, c, size, passive, z, y, work)
            if is_solved and attempt == 0 and _total(z) <= 2.0 * _total(x):
                _copy(z, x)
                break
            if not is_solved:
                if attempt == 1:
                    break
                _copy(x, z)
                _descend(firm, c, size, z, y, work)
            _take_unless_worse(gram, c, z, flat, x)
            if is_solved:
                break
            _mark_positive(x, passive)
        for j in range(k):
            out[i, j] = max(x[j], 0.0) * scale[j]
