"""Recover rows of sparse data from few sums WᵀX: lone columns and non-negative dictionary search."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.spatial import cKDTree

from partsong.core.streams import stream
from partsong.errors import ShapeError

DIRECTIONS = {"float64": 1e-6, "float32": 2e-3}
"""Largest distance of unit vectors at which two columns of sums have the same direction."""
CHANCE = 0.01
"""Largest expected number of column pairs that agree by chance, for a group to count."""

EXACT = 1e-3
"""Relative misfit up to which a (whitened) column counts as reproduced, if by at most r/3 atoms, r the rank of C."""
HELD_OUT = 0.1
MOST_HELD_OUT, MOST_LEARNED = 500, 4000
"""Share of held-out columns, and the largest numbers of held-out and training columns."""
FOUND = 0.05
"""Rows count as found if this share of held-out columns is reproduced.

Measured with n = 60, k = 10, 3 rounds: 0 for dense columns, half-filled ones, and columns of 10 or 12 rows (one seed
each); 1 for columns of 5 rows (7 seeds, all rows to 1 %). In between the share says too much: 0.7 for columns of 8 rows
(15 rows to 10 %, none to 1 %), 0.93 where one atom was wrong (45 to 10 %, none to 1 %). All runs with `is_scaled` had
at least 47 rows to 1 %: rely on rows as numbers only there.
"""
CONFIRMED = 4
"""A row counts if its weights are in this many reproduced columns, with half of its energy."""
INIT_MODES, STUCK, FIRST, LATER, POLISH = 3, 6, 25, 6, 15
"""Searches; cycles without gain that end one; steps of the first cycle and of later ones; steps that sharpen atoms."""
GAIN, ENOUGH = 0.005, 0.97
"""Shares of reproduced columns: a gain that counts, and one that ends the search."""
TWINS, MADE_UP = 0.98, 0.2
"""Inner product above which two atoms are one; misfit up to which an atom is a combination of two others."""
FINE, SCALED = 1e-5, 1e-4
"""Misfits: of columns at which the pursuit ends, and of grams up to which the scale of rows is determined."""
REFINED, BEAM = 25, 60
"""Steps of least squares at the end, and atoms to begin with where the pursuit does not reproduce a column."""
RANK, EMPTY = 1e-5, 1e-9
"""Shares of the largest singular value, and of the largest column, that count as zero."""


@dataclass(frozen=True, slots=True)
class LoneColumns:
    """Columns with a single non-zero row, grouped by that row.

    `groups` has the indices of at least two columns for each row; `values` their entries up to one factor per row,
    of norm one: ratios are exact; `rays` (groups × Σk) the direction of the row's stacked weights, of norm one.
    Proportional columns of several rows give the same sums up to a factor and look like these.
    """

    groups: tuple[np.ndarray, ...]
    values: tuple[np.ndarray, ...]
    rays: np.ndarray


def lone_columns(crosses: Sequence[np.ndarray], tolerance: float) -> LoneColumns:
    """Group the columns of C = [C_1; …; C_T] (Σk × m) with C_t = W_tᵀX that have one direction.

    If row i has the only non-zero value in column j, C_t[:, j] = x_ij W_t[i, :]ᵀ: the column shows the direction of the
    weights. Two columns with two rows or more each agree by chance only where zeros leave few numbers free: N columns
    that have the same ν entries above zero make about N² · tolerance^(ν − 1) such pairs, and groups count up to
    `CHANCE`. Rays need not be extreme: from one round of rank 10, a tenth of those of 387 documents lay in the cone of
    others.
    """
    C, _ = _stacked(crosses)
    sizes = np.linalg.norm(C, axis=0)
    used = np.flatnonzero(sizes > 0)
    U = C[:, used] / sizes[used]
    labels = _same_directions(U, tolerance)
    order = np.argsort(labels, kind="stable")
    runs = np.split(order, np.flatnonzero(np.diff(labels[order])) + 1) if len(order) else []
    runs = sorted(runs, key=lambda run: int(run[0]))
    is_there = tolerance < U
    patterns = np.packbits(is_there, axis=0).T[[run[0] for run in runs]]
    _, kind, alike = np.unique(patterns, axis=0, return_inverse=True, return_counts=True)
    free = is_there.sum(axis=0) - 1
    groups, values, rays = [], [], []
    for run, count in zip(runs, alike[kind.ravel()], strict=True):
        least = int(free[run].min())
        if len(run) < 2 or least < 1 or float(count) ** 2 * tolerance**least > CHANCE:
            continue
        ray = U[:, run].sum(axis=1)
        ray /= np.linalg.norm(ray)
        entries = ray @ C[:, used[run]]
        groups.append(used[run])
        values.append(entries / np.linalg.norm(entries))
        rays.append(ray)
    return LoneColumns(tuple(groups), tuple(values), np.array(rays).reshape(len(rays), len(C)))


def _stacked(crosses: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """C (Σk × m) in float64, each C_t divided by its norm, and these norms, one for each row of C."""
    arrays = [np.asarray(cross, dtype=np.float64) for cross in crosses]
    if not arrays or any(array.ndim != 2 or array.shape[1] != arrays[0].shape[1] for array in arrays):
        raise ShapeError("Cross products must be matrices with the same number of columns. Pass one per round.")
    norms = [float(np.linalg.norm(array)) or 1.0 for array in arrays]
    C = np.vstack([array / norm for array, norm in zip(arrays, norms, strict=True)])
    return C, np.repeat(norms, [len(array) for array in arrays])


def _same_directions(U: np.ndarray, tolerance: float) -> np.ndarray:
    """Label the columns of U (Σk × m): one label per chain of columns within the tolerance."""
    # Equal columns share a cell of a grid: a tree of cells stays small where one row has thousands of columns.
    _, first, cell = np.unique(np.rint(U.T / tolerance), axis=0, return_index=True, return_inverse=True)
    pairs = cKDTree(U.T[first]).query_pairs(tolerance, output_type="ndarray") if len(first) else np.empty((0, 2), int)
    graph = coo_array((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(len(first), len(first)))
    return np.asarray(connected_components(graph, directed=False)[1])[cell.ravel()]


@dataclass(frozen=True, slots=True)
class FoundRows:
    """Rows that were found from sums, without knowledge of W or of the pattern of X.

    `rows` (r × m) are on the true scale if `is_scaled`, else up to one factor each; `weights` (r × Σk) are the
    matching rows of 𝒲. `exact` (m) marks columns that few atoms reproduce; entries elsewhere are guesses. `held_out`
    is the share of reproduced columns among the held-out ones, `row_shares` (r) the share of each
    row's energy in exact columns, `misfit` ‖C − 𝒲ᵀX‖ / ‖C‖ over all atoms, and `gram_misfit` that of the grams.
    """

    rows: np.ndarray
    weights: np.ndarray
    misfit: float
    gram_misfit: float
    held_out: float
    exact: np.ndarray
    row_shares: np.ndarray
    is_scaled: bool


def rows_by_dictionary(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]], n_rows: int, *, seed: int = 0, deadline: float | None = None
) -> FoundRows | None:
    """Find rows X (n × m) from pairs (G_t, C_t) = (W_tᵀW_t, W_tᵀX); None if they do not count as found (`FOUND`).

    C = 𝒲ᵀX with 𝒲 = [W_1 … W_T]: every column is a non-negative combination of few of the n stacked weights.
    K-SVD (Aharon et al., 2006) with non-negative orthogonal matching pursuit on whitened columns. Atoms that serve no
    reproduced column are replaced by residual directions. Then X by NNLS, and the scale from the grams,
    G_t = Σ_i s_i² ŵ_i ŵ_iᵀ, which is linear in s_i². The search ends at `deadline`, a value of `time.monotonic`.
    """
    end = math.inf if deadline is None else deadline
    C, norms = _stacked([cross for _, cross in pairs])
    white, back = _whitening(C)
    most, Y = len(white) // 3, white @ C
    sizes = np.linalg.norm(Y, axis=0)
    used = np.flatnonzero(sizes > EMPTY * sizes.max(initial=0.0))
    Y = Y[:, used] / sizes[used]
    random = stream(seed, "sparse rows")
    learned, held, repeated = _split(Y, random)
    if most < 2 or n_rows < 2 or len(learned) < 2 * n_rows or len(held) < CONFIRMED:
        return None
    D = _searched(Y[:, learned], n_rows, most, Y[:, repeated], random, end)
    held_out = float((_coded(D, Y[:, held], most, EXACT)[1] <= EXACT).mean())
    if held_out < FOUND:
        return None
    D = _refined(D, Y[:, learned], most, end)
    codes, is_exact = _all_coded(D, Y, most, end)
    X, exact = np.zeros((n_rows, C.shape[1])), np.zeros(C.shape[1], dtype=bool)
    X[:, used], exact[used] = codes.T * sizes[used], is_exact
    W = (back @ D).T
    misfit = float(np.linalg.norm(C - W.T @ X) / np.linalg.norm(C))
    W *= norms
    scales, gram_misfit = _scales(W, [gram for gram, _ in pairs])
    is_scaled = gram_misfit <= SCALED and bool((scales > 0).all())
    if len(white) < min(n_rows, int((C > 0).any(axis=1).sum())) and not is_scaled:
        return None  # X = A B of lower rank with sparse B: the atoms are WᵀA, and no rows
    scales = np.where(scales > 0, scales, 1.0)
    W, X = W * scales[:, None], X / scales[:, None]
    shares = (X[:, exact] ** 2).sum(axis=1) / np.maximum((X**2).sum(axis=1), 1e-300)
    kept = ((X[:, exact] > 0).sum(axis=1) >= CONFIRMED) & (shares >= 0.5)
    return FoundRows(X[kept], W[kept], misfit, gram_misfit, held_out, exact, shares[kept], is_scaled)


def _whitening(C: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """K (r × Σk) with K C Cᵀ Kᵀ = I, r the rank of C, and its inverse on the span of C (Σk × r)."""
    # Weights are positive and alike, and coherent atoms mislead a greedy search; whitened ones are nearly orthogonal.
    U, values, _ = np.linalg.svd(C, full_matrices=False)
    rank = int((values > RANK * values.max(initial=0.0)).sum())
    return (U[:, :rank] / values[:rank]).T, U[:, :rank] * values[:rank]


def _split(Y: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return training columns, held-out columns (one per direction), and columns with a repeated direction."""
    # A repeated direction would be in both sets and reproduce itself.
    _, first, counts = np.unique(_same_directions(Y, EXACT), return_index=True, return_counts=True)
    mixed = random.permutation(first)
    count = min(MOST_HELD_OUT, int(HELD_OUT * len(mixed)))
    return mixed[count : count + MOST_LEARNED], mixed[:count], first[counts > 1]


def _searched(
    Y: np.ndarray, n: int, most: int, given: np.ndarray, random: np.random.Generator, end: float
) -> np.ndarray:
    """D (r × n) of unit atoms that reproduces the largest share of unit columns Y (r × m), from several starts."""
    best, best_share = np.empty(0), -1.0
    for _ in range(INIT_MODES):
        D = Y[:, random.choice(Y.shape[1], n, replace=False)].copy()
        D[:, : given.shape[1]] = given[:, :n]
        kept, kept_share, kept_scores, idle = D, -1.0, np.zeros(n), 0
        while idle < STUCK:
            few = min(most, 3 + int(random.integers(2)))
            D = _sharpened(_stepped(D, Y, few, FIRST if kept_share < 0 else LATER, random, end), Y, most, random, end)
            codes, left = _coded(D, Y, most, EXACT)
            fits = left <= EXACT
            share, idle = float(fits.mean()), idle + 1
            if share > kept_share:
                idle = 0 if share > kept_share + GAIN else idle
                kept, kept_share, kept_scores = D, share, _scored(codes, fits)
            if kept_share >= ENOUGH or time.monotonic() > end:
                break
            D = _repaired(kept, kept_scores, Y, most, 1 + idle // 2, random)
        if kept_share > best_share:
            best, best_share = kept, kept_share
        if best_share >= ENOUGH or time.monotonic() > end:
            break
    return best


def _scored(codes: np.ndarray, fits: np.ndarray) -> np.ndarray:
    """The share of the uses of each atom (codes: m × n) that count: in reproduced columns of few atoms."""
    # A mixture of two rows helps to reproduce columns as one of many atoms; the mean is chosen first, and ends near 0.
    counts = codes > 10 * EXACT
    numbers = counts.sum(axis=1)
    few = fits & (numbers <= 1.5 * np.median(numbers[fits])) if fits.any() else fits
    return np.asarray(counts[few].sum(axis=0) / np.maximum((codes > 0).sum(axis=0), 1))


def _stepped(D: np.ndarray, Y: np.ndarray, few: int, steps: int, random: np.random.Generator, end: float) -> np.ndarray:
    """Alternate codes of a fixed number of atoms and updates of atoms; replace those that are unused or double."""
    for step in range(steps):
        if time.monotonic() > end:
            break
        codes, _ = _coded(D, Y, few)
        D, left = _swept(D, codes, Y, random)
        if step < steps - 3:
            uses = (codes > 0).sum(axis=0)
            D = _renewed(D, _doubles(D, uses) | (uses < CONFIRMED), left)
    return D


def _sharpened(D: np.ndarray, Y: np.ndarray, most: int, random: np.random.Generator, end: float) -> np.ndarray:
    """Update atoms from the columns that they fit, within a misfit that falls from 0.1 to `EXACT`."""
    allowed = 0.1
    for step in range(POLISH):
        if time.monotonic() > end:
            break
        codes, left = _coded(D, Y, most, allowed)
        fits = left <= allowed
        # Where few columns fit, all are taken: a handful would bend the atoms towards themselves.
        chosen = fits if fits.mean() >= 0.2 else np.ones(len(fits), dtype=bool)
        D, _ = _swept(D, codes[chosen], Y[:, chosen], random)
        if fits.mean() >= 0.4 or step % 3 == 2:
            allowed = max(allowed / 2.5, EXACT)
    return D


def _repaired(
    D: np.ndarray, scores: np.ndarray, Y: np.ndarray, most: int, more: int, random: np.random.Generator
) -> np.ndarray:
    """Replace atoms that are seldom in reproduced columns, those that two others make up, and some at random."""
    bad = _doubles(D, scores) | (scores < 0.3 * np.median(scores))
    for i in range(len(bad)):
        # Rows that share columns in one ratio also make an atom: good for few columns, and the place of a row.
        others = ~bad & (np.arange(len(bad)) != i)
        bad[i] |= _coded(D[:, others], D[:, [i]], 2, MADE_UP)[1][0] <= MADE_UP
    bad[random.choice(len(bad), min(more, len(bad)), replace=False)] = True
    if bad.all():
        return D
    codes, _ = _coded(D[:, ~bad], Y, most, EXACT)
    return _renewed(D, bad, Y - D[:, ~bad] @ codes.T)


def _coded(
    D: np.ndarray, Y: np.ndarray, most: int, allowed: float = 0.0, first: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Code Y (r × m) by at most so many atoms of D (r × n): codes (m × n) ≥ 0, and ‖y − D x‖ of each column.

    Orthogonal matching pursuit on all columns at once, each until its misfit is allowed; negative values are cut off.
    `first` (m) fixes the atom to begin with.
    """
    A, G = Y.T @ D, D.T @ D
    codes, left = np.zeros(A.shape), np.linalg.norm(Y, axis=0)
    still, chosen, pull = np.arange(len(A)), np.empty((len(A), 0), dtype=int), A.copy()
    for count in range(1, min(most, D.shape[1]) + 1):
        np.put_along_axis(pull, chosen, -np.inf, axis=1)
        best = first if first is not None and count == 1 else pull.argmax(axis=1)
        chosen = np.hstack([chosen, best[:, None]])
        products = G[chosen[:, :, None], chosen[:, None, :]] + 1e-10 * np.eye(count)
        target = np.take_along_axis(A[still], chosen, axis=1)
        x = np.zeros((len(still), D.shape[1]))
        np.put_along_axis(x, chosen, np.maximum(0.0, np.linalg.solve(products, target[:, :, None])[:, :, 0]), axis=1)
        codes[still], left[still] = x, np.linalg.norm(Y[:, still] - D @ x.T, axis=0)
        is_open = left[still] > allowed
        still, chosen, x = still[is_open], chosen[is_open], x[is_open]
        if not len(still):
            break
        pull = A[still] - x @ G
    return codes, left


def _refined(D: np.ndarray, Y: np.ndarray, most: int, end: float) -> np.ndarray:
    """Solve for all atoms at once by least squares over the columns that few atoms reproduce, again and again."""
    # The allowed misfit begins large: d − εe in place of d is exact with e beside it, and only fewer atoms undo it.
    for allowed in np.geomspace(0.1, FINE, REFINED):
        codes, left = _coded(D, Y, most, allowed)
        fits = left <= max(allowed, EXACT)
        own = (codes[fits] > 10 * EXACT).sum(axis=0) >= CONFIRMED
        fits &= ~(codes[:, ~own] > 0).any(axis=1)
        if time.monotonic() > end or not own.any() or np.linalg.matrix_rank(codes[fits][:, own]) < own.sum():
            break
        D = D.copy()
        D[:, own] = np.linalg.lstsq(codes[fits][:, own], Y[:, fits].T, rcond=None)[0].T
        D /= np.linalg.norm(D, axis=0)
    return D


def _all_coded(D: np.ndarray, Y: np.ndarray, most: int, end: float) -> tuple[np.ndarray, np.ndarray]:
    """Code all columns by few atoms where that reproduces them, else by NNLS over all; True where few atoms do."""
    codes, left = _coded(D, Y, most, FINE)
    for j in np.flatnonzero(left > FINE):
        if time.monotonic() > end:
            break
        first = np.argsort(-(D.T @ Y[:, j]))[:BEAM]
        tried, misfits = _coded(D, np.repeat(Y[:, [j]], len(first), axis=1), most + 2, FINE, first)
        one = int(misfits.argmin())
        if misfits[one] < left[j]:
            codes[j], left[j] = tried[one], misfits[one]
        if left[j] > EXACT:
            codes[j], left[j] = _solved(D, Y[:, j])
    return codes, (left <= EXACT) & ((codes > 10 * EXACT).sum(axis=1) <= most)


def _solved(A: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, float]:
    """Solve min ‖A x − b‖ over x ≥ 0; x = 0 if SciPy's active set method does not converge."""
    try:
        x, misfit = nnls(A, b)
        return np.asarray(x), float(misfit)
    except RuntimeError:
        return np.zeros(A.shape[1]), float(np.linalg.norm(b))


def _swept(
    D: np.ndarray, codes: np.ndarray, Y: np.ndarray, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Update one atom after the other with its own codes (one power step each); also return the residual of Y."""
    D, codes = D.copy(), codes.copy()
    left = Y - D @ codes.T
    for i in random.permutation(D.shape[1]):
        on = np.flatnonzero(codes[:, i])
        if len(on) < 3:
            continue
        own = left[:, on] + np.outer(D[:, i], codes[on, i])
        atom = own @ codes[on, i]
        size = float(np.linalg.norm(atom))
        if size == 0:
            continue
        D[:, i] = atom / size
        codes[on, i] = np.maximum(0.0, D[:, i] @ own)
        left[:, on] = own - np.outer(D[:, i], codes[on, i])
    return D, left


def _renewed(D: np.ndarray, bad: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Replace bad atoms by residual directions, largest first, each different from those before."""
    D, sizes = D.copy(), np.linalg.norm(left, axis=0)
    U = left / np.maximum(sizes, 1e-300)
    for i in np.flatnonzero(bad):
        j = int(sizes.argmax())
        if sizes[j] <= FINE:
            break
        D[:, i] = U[:, j]
        sizes = sizes * (1 - np.clip(U[:, j] @ U, 0.0, 1.0) ** 2)
    return D


def _doubles(D: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Mark the lower-scoring atom of each pair of nearly equal atoms."""
    bad = np.zeros(D.shape[1], dtype=bool)
    for i, j in np.argwhere(np.triu(D.T @ D, 1) > TWINS):
        if not (bad[i] or bad[j]):
            bad[i if scores[i] <= scores[j] else j] = True
    return bad


def _scales(W: np.ndarray, grams: Sequence[np.ndarray]) -> tuple[np.ndarray, float]:
    """s (n) ≥ 0 with G_t = Σ s_i² w_i w_iᵀ over all rounds by NNLS, and the relative misfit; W is n × Σk.

    The misfit is infinite if there are fewer equations than rows.
    """
    systems, targets, first = [], [], 0
    for gram in grams:
        k = len(gram)
        upper, own = np.triu_indices(k), W[:, first : first + k]
        size = float(np.linalg.norm(gram)) or 1.0
        systems.append((own[:, upper[0]] * own[:, upper[1]]).T / size)
        targets.append(np.asarray(gram, dtype=np.float64)[upper] / size)
        first += k
    A, b = np.vstack(systems), np.concatenate(targets)
    sizes = np.maximum(np.linalg.norm(A, axis=0), 1e-300)
    squares, misfit = _solved(A / sizes, b)
    is_enough = np.linalg.matrix_rank(A / sizes) == len(W)
    return np.sqrt(squares / sizes), float(misfit / np.linalg.norm(b)) if is_enough else math.inf
