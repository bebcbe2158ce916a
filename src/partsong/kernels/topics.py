"""Numba kernels for mini-batch descent: sparse updates of a factor, and element-wise steps of the critic."""

from __future__ import annotations

from partsong.kernels.compiling import FAST, compiled


@compiled(fastmath=FAST)
def add_transposed(indptr, indices, data, F, start, scale, out):  # type: ignore[no-untyped-def]
    """out += scale · XᵀF for len(F) rows of X from row `start` on."""
    for i in range(F.shape[0]):
        row = F[i]
        for p in range(indptr[start + i], indptr[start + i + 1]):
            x = scale * data[p]
            place = out[indices[p]]
            for j in range(row.shape[0]):
                place[j] += x * row[j]


@compiled()
def rectify(Z):  # type: ignore[no-untyped-def]
    """Z ← max(0, Z); NaN is kept."""
    zero = Z.dtype.type(0)
    for i in range(Z.shape[0]):
        row = Z[i]
        for j in range(row.shape[0]):
            row[j] = zero if row[j] <= zero else row[j]


@compiled(fastmath=FAST)
def pair_up(U, V, out):  # type: ignore[no-untyped-def]
    """out[i·B + j] = max(0, U_i + V_j), over all i of U and j of V."""
    zero = out.dtype.type(0)
    for i in range(U.shape[0]):
        for j in range(V.shape[0]):
            row = out[i * V.shape[0] + j]
            for c in range(U.shape[1]):
                row[c] = max(zero, U[i, c] + V[j, c])


@compiled(fastmath=FAST)
def rectify_and_weigh(Z, shift, last, scores):  # type: ignore[no-untyped-def]
    """Z ← max(0, Z + shift), scores = Z · last."""
    zero = Z.dtype.type(0)
    for p in range(Z.shape[0]):
        row = Z[p]
        total = zero
        for c in range(row.shape[0]):
            z = max(zero, row[c] + shift[c])
            row[c] = z
            total += z * last[c]
        scores[p] = total


@compiled(fastmath=FAST)
def spread(Z, slopes, last, d_last, d_shift):  # type: ignore[no-untyped-def]
    """d_last = Zᵀ slopes, Z ← (slopes ⊗ last) ∘ [Z > 0], d_shift = Σ_p Z_p."""
    zero = Z.dtype.type(0)
    d_last[:] = 0
    d_shift[:] = 0
    for p in range(Z.shape[0]):
        row, slope = Z[p], slopes[p]
        for c in range(row.shape[0]):
            z = row[c]
            d_last[c] += slope * z
            back = slope * last[c] if z > zero else zero
            row[c] = back
            d_shift[c] += back


@compiled(fastmath=FAST)
def fold(D, A, d_U, d_V):  # type: ignore[no-untyped-def]
    """d_U_i = Σ_j D_ij ∘ [A_ij > 0], d_V_j = Σ_i of the same."""
    zero = D.dtype.type(0)
    d_U[:] = 0
    d_V[:] = 0
    n = d_V.shape[0]
    for i in range(d_U.shape[0]):
        for j in range(n):
            p = i * n + j
            for c in range(D.shape[1]):
                back = D[p, c] if A[p, c] > zero else zero
                d_U[i, c] += back
                d_V[j, c] += back


@compiled(fastmath=FAST)
def mask(D, A):  # type: ignore[no-untyped-def]
    """D ← D ∘ [A > 0]."""
    zero = D.dtype.type(0)
    for i in range(D.shape[0]):
        for c in range(D.shape[1]):
            D[i, c] = D[i, c] if A[i, c] > zero else zero
