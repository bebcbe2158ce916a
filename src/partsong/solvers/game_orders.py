"""Orders of play of a game (raster, shuffled, stratified, simultaneous, alternating), and the cells that it plays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch
from itertools import pairwise
from numbers import Integral
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from partsong import kernels
from partsong.core import runtime
from partsong.core.interfaces import Array, Matrix
from partsong.core.parameters import Choice
from partsong.data.dense import DenseMatrix
from partsong.data.observed import ObservedMatrix
from partsong.data.sparse import SparseMatrix
from partsong.errors import CompositionError, ParameterError
from partsong.kernels import game

if TYPE_CHECKING:
    from partsong.solvers.game import StepSize


LEADERS = {None: game.TOGETHER, "rows": game.ROW_LEADS, "columns": game.COLUMN_LEADS}
CHUNK = 1 << 20
"""Cells of a random order that are gathered at a time."""
MAX_SHUFFLED_CELLS = 1 << 28


@dataclass(frozen=True, slots=True)
class PairStep:
    """How a pair of players moves: a fixed η, or a relaxation of the step from their norms; and who moves first."""

    eta: float
    relaxation: float
    leader: str | None = None

    def compiled_args(self, dtype: Any) -> tuple[Any, Any, int]:
        """Return η, relaxation and leader as arguments of the compiled loops."""
        kind = np.dtype(dtype).type
        return kind(self.eta), kind(self.relaxation), LEADERS[self.leader]


class GameCells(Protocol):
    """The cells of a matrix, played row by row or in a random order; factors are changed in place."""

    @property
    def row_cells(self) -> np.ndarray:
        """Cumulative number of cells by row (n + 1 numbers, from 0 to all)."""

    def play(self, rows: Array, first: int, last: int, W: Array, Ht: Array, step: PairStep) -> float:
        """Play these rows against columns first … last − 1, row by row; return Σ e² as measured on the way."""

    def play_shuffled(
        self, generator: np.random.Generator, first: int, last: int, W: Array, Ht: Array, step: PairStep
    ) -> float:
        """Play all cells in columns first … last − 1 in a random order."""

    def with_column_order(self, columns: Array) -> GameCells:
        """Return the same cells with columns in another order."""


@singledispatch
def build_cells(matrix: Matrix) -> GameCells:
    """Return the cells of a matrix in memory."""
    raise CompositionError(
        f"Single cells can be played only for arrays and sparse matrices; got {type(matrix).__name__}. "
        "Use Simultaneous() or Alternating(), or convert the data to a NumPy array."
    )


@dataclass(frozen=True, slots=True)
class DenseCells:
    """All cells of an array."""

    X: np.ndarray

    @property
    def row_cells(self) -> np.ndarray:
        return np.arange(self.X.shape[0] + 1) * self.X.shape[1]

    def play(self, rows: Array, first: int, last: int, W: Array, Ht: Array, step: PairStep) -> float:
        columns = np.arange(first, last)
        return float(game.play_dense(self.X, rows, columns, W, Ht, *step.compiled_args(W.dtype)))

    def play_shuffled(
        self, generator: np.random.Generator, first: int, last: int, W: Array, Ht: Array, step: PairStep
    ) -> float:
        return _play_all_cells(self.X, generator, first, last, W, Ht, step)

    def with_column_order(self, columns: Array) -> DenseCells:
        return DenseCells(np.ascontiguousarray(self.X[:, columns]))


@dataclass(frozen=True, slots=True)
class SparseCells:
    """All cells of a CSR matrix with ascending columns; cells that are not stored are played as zeros."""

    by_row: Any

    @property
    def row_cells(self) -> np.ndarray:
        return np.arange(self.by_row.shape[0] + 1) * self.by_row.shape[1]

    def play(self, rows: Array, first: int, last: int, W: Array, Ht: Array, step: PairStep) -> float:
        side, columns = self.by_row, np.arange(first, last)
        entries = side.indptr, side.indices, side.data
        return float(game.play_sparse(*entries, rows, columns, W, Ht, *step.compiled_args(W.dtype)))

    def play_shuffled(
        self, generator: np.random.Generator, first: int, last: int, W: Array, Ht: Array, step: PairStep
    ) -> float:
        return _play_all_cells(self.by_row, generator, first, last, W, Ht, step)

    def with_column_order(self, columns: Array) -> SparseCells:
        return SparseCells(_select_columns(self.by_row, columns))


@dataclass(frozen=True, slots=True)
class ObservedCells:
    """The stored cells of a CSR matrix with ascending columns; other cells are unknown and not played."""

    by_row: Any

    @property
    def row_cells(self) -> np.ndarray:
        return np.asarray(self.by_row.indptr, np.int64)

    def play(self, rows: Array, first: int, last: int, W: Array, Ht: Array, step: PairStep) -> float:
        side = self.by_row
        entries = side.indptr, side.indices, side.data
        return float(game.play_stored(*entries, rows, first, last, W, Ht, *step.compiled_args(W.dtype)))

    def play_shuffled(
        self, generator: np.random.Generator, first: int, last: int, W: Array, Ht: Array, step: PairStep
    ) -> float:
        side = self.by_row
        rows = np.repeat(np.arange(side.shape[0]), np.diff(side.indptr))
        here = np.flatnonzero((side.indices >= first) & (side.indices < last))
        order = here[_shuffled(generator, len(here))]
        numbers = step.compiled_args(W.dtype)
        return float(game.play_cells(rows[order], side.indices[order], side.data[order], W, Ht, *numbers))

    def with_column_order(self, columns: Array) -> ObservedCells:
        return ObservedCells(_select_columns(self.by_row, columns))


@build_cells.register
def _(matrix: DenseMatrix) -> GameCells:
    is_plain = matrix.X.dtype in (np.float32, np.float64)
    return DenseCells(matrix.X if is_plain else matrix.X.astype(matrix.dtype))


@build_cells.register
def _(matrix: SparseMatrix) -> GameCells:
    return SparseCells(matrix.by_row)


@build_cells.register
def _(matrix: ObservedMatrix) -> GameCells:
    return ObservedCells(matrix.by_row)


def _play_all_cells(
    X: Any, generator: np.random.Generator, first: int, last: int, W: Array, Ht: Array, step: PairStep
) -> float:
    """Play all cells of an array or a CSR matrix in these columns, in a random order."""
    width = last - first
    order = _shuffled(generator, X.shape[0] * width)
    numbers, seen = step.compiled_args(W.dtype), 0.0
    for start in range(0, len(order), CHUNK):
        rows, columns = np.divmod(order[start : start + CHUNK], max(1, width))
        columns += first
        seen += game.play_cells(rows, columns, np.asarray(X[rows, columns]).ravel(), W, Ht, *numbers)
    return seen


def _select_columns(by_row: Any, columns: Array) -> Any:
    moved = by_row[:, columns].tocsr()
    moved.sort_indices()
    return moved


def _shuffled(generator: np.random.Generator, count: int) -> np.ndarray:
    if count > MAX_SHUFFLED_CELLS:
        raise ParameterError(
            f"A random order is limited to {MAX_SHUFFLED_CELLS:,} cells, because it is held in memory; the data have "
            f'{count:,}. Use order="stratified".'
        )
    return generator.permutation(count)


CELL_WORK = 192
"""Cost of a pair step per component, in operations of a dense product; each step waits for the previous one."""


@dataclass(frozen=True, slots=True)
class SweepContext:
    """Settings of one sweep: its number, step size and pace, ‖X − W H‖, random generator and leader.

    `size` is the mean of ‖w‖² + ‖h‖² over pairs of players.
    """

    sweep: int
    step: StepSize
    pace: float = 1.0
    residual_norm: float = float("nan")
    generator: np.random.Generator | None = None
    leader: str | None = None
    size: float = 0.0

    @property
    def pair_step(self) -> PairStep:
        """The step of a pair of players."""
        return PairStep(*self.step.pair_step(self.sweep, self.pace, self.size), self.leader)


class Order(Protocol):
    """An order of play over all cells in columns first … last − 1; W and Hᵀ are changed in place.

    A sweep returns the sum of e² as measured on the way, or NaN if all players move at once.
    """

    @property
    def plays_cells(self) -> bool:
        """Whether players move in pairs, cell by cell."""

    def sweep(self, matrix: Matrix, first: int, last: int, W: Array, Ht: Array, context: SweepContext) -> float:
        """Play one sweep."""


@dataclass(frozen=True, slots=True)
class Raster:
    """Row by row, and column by column within a row: the two loops of the paper."""

    plays_cells = True

    def sweep(self, matrix: Matrix, first: int, last: int, W: Array, Ht: Array, context: SweepContext) -> float:
        return build_cells(matrix).play(np.arange(len(W)), first, last, W, Ht, context.pair_step)


@dataclass(frozen=True, slots=True)
class Shuffled:
    """A new random order in each sweep."""

    plays_cells = True

    def sweep(self, matrix: Matrix, first: int, last: int, W: Array, Ht: Array, context: SweepContext) -> float:
        if context.generator is None:
            raise ParameterError("A random order needs a random generator. Pass sweep(…, generator=…).")
        return build_cells(matrix).play_shuffled(context.generator, first, last, W, Ht, context.pair_step)


@dataclass(frozen=True, slots=True)
class Stratified:
    """Strata of blocks that share no player and run in parallel (Latin squares: Gemulla et al., 2011).

    Rows and columns are assigned to B workers. In stratum s, the rows of worker b play the columns of worker b + s mod
    B. Within a block the order is row by row. The result equals sequential play, stratum after stratum and block after
    block, bit for bit, for any number of threads.

    By default there are at most `blocks` workers, each with a range of rows with an equal number of cells and an equal
    range of columns. `row_workers` and `column_workers` assign each player to a worker instead; any map is valid.
    """

    blocks: int = 8
    row_workers: tuple[int, ...] | None = None
    column_workers: tuple[int, ...] | None = None

    plays_cells = True

    def __post_init__(self) -> None:
        if not isinstance(self.blocks, Integral) or isinstance(self.blocks, bool) or self.blocks < 1:
            raise ParameterError(f"blocks must be a whole number, 1 or more; got {self.blocks!r}.", parameter="blocks")
        object.__setattr__(self, "blocks", int(self.blocks))
        for name in ("row_workers", "column_workers"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, _labels(name, given))

    def sweep(self, matrix: Matrix, first: int, last: int, W: Array, Ht: Array, context: SweepContext) -> float:
        """Play one stratum after another, the blocks of a stratum in parallel threads."""
        cells = build_cells(matrix)
        groups = self.row_groups(cells)
        if self.column_workers is None:
            return self._strata(cells, groups, self.column_cuts(first, last, len(groups)), W, Ht, context.pair_step)
        labels = self._worker_indices("column_workers", matrix.shape[1])
        if (first, last) != (0, matrix.shape[1]):
            raise CompositionError(
                "column_workers needs a sweep over all columns; in a federation parties play ranges of columns. "
                "Remove column_workers."
            )
        order = np.argsort(labels, kind="stable")
        cuts = np.searchsorted(labels[order], np.arange(labels.max(initial=0) + 2)).tolist()
        moved = np.ascontiguousarray(Ht[order])
        seen = self._strata(cells.with_column_order(order), groups, cuts, W, moved, context.pair_step)
        Ht[order] = moved
        return seen

    def row_groups(self, cells: GameCells) -> list[np.ndarray]:
        """Return the rows of each worker."""
        counts = cells.row_cells
        n = len(counts) - 1
        if self.row_workers is not None:
            labels = self._worker_indices("row_workers", n)
            return [np.flatnonzero(labels == worker) for worker in range(labels.max(initial=0) + 1)]
        count = max(1, min(self.blocks, n))
        goals = counts[-1] * np.arange(1, count) / count
        cuts = [0, *np.searchsorted(counts, goals).tolist(), n]
        return [np.arange(a, max(a, b)) for a, b in pairwise(cuts)]

    def column_cuts(self, first: int, last: int, count: int) -> list[int]:
        """Return the boundaries between the column ranges of workers."""
        count = max(1, min(self.blocks if self.row_workers is None else count, last - first))
        return [first + (last - first) * b // count for b in range(count + 1)]

    def _worker_indices(self, name: str, count: int) -> np.ndarray:
        """Return the worker of each player, numbered from 0 among all workers that have a player."""
        given = getattr(self, name)
        if len(given) != count:
            raise ParameterError(f"{name} must have one entry for each of {count} players; it has {len(given)}.")
        workers = np.unique([*(self.row_workers or ()), *(self.column_workers or ())])
        return np.searchsorted(workers, np.asarray(given, np.int64))

    def _strata(
        self,
        cells: GameCells,
        groups: Sequence[np.ndarray],
        cuts: Sequence[int],
        W: Array,
        Ht: Array,
        step: PairStep,
    ) -> float:
        spans = list(pairwise(cuts))
        size = max(len(groups), len(spans))
        work = CELL_WORK * W.shape[1] * float(cells.row_cells[-1]) / size
        seen = 0.0
        for shift in range(size):
            blocks = [
                (rows, spans[(b + shift) % size]) for b, rows in enumerate(groups) if (b + shift) % size < len(spans)
            ]

            def play(start: int, stop: int, blocks: list[tuple[np.ndarray, tuple[int, int]]] = blocks) -> list[float]:
                return [cells.play(rows, *span, W, Ht, step) for rows, span in blocks[start:stop]]

            for parts in runtime.map_ranges(runtime.split_range(len(blocks), work), play):
                for part in parts:
                    seen += part
        return seen


def _labels(name: str, given: object) -> tuple[int, ...]:
    """Validate and return the worker number of each player."""
    try:
        labels = np.asarray(given)
    except ValueError:  # lists of different lengths
        labels = np.empty((0, 0))
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or (labels.size and labels.min() < 0):
        raise ParameterError(f"{name} must be whole numbers, 0 or more, one for each player.")
    return tuple(int(label) for label in labels)


@dataclass(frozen=True, slots=True)
class Simultaneous:
    """All players move at once: W ← [W + η E Hᵀ]₊ and H ← [H + η Wᵀ E]₊ with E = X − W H from before the sweep.

    This is one projected gradient step of both factors.
    """

    plays_cells = False

    def sweep(self, matrix: Matrix, first: int, last: int, W: Array, Ht: Array, context: SweepContext) -> float:
        _require_all(matrix, first, last)
        residual_norm = distance(matrix, W, Ht) if np.isnan(context.residual_norm) else context.residual_norm
        eta = context.step.simultaneous_step(context.sweep, max(gram_norm(W), gram_norm(Ht)), residual_norm)
        pull_W, pull_H = row_gradient(matrix, W, Ht), column_gradient(matrix, W, Ht)
        _move(W, pull_W, eta)
        _move(Ht, pull_H, eta)
        return float("nan")


@dataclass(frozen=True, slots=True)
class Alternating:
    """All row players move while columns are fixed, then all column players against the new rows."""

    plays_cells = False

    def sweep(self, matrix: Matrix, first: int, last: int, W: Array, Ht: Array, context: SweepContext) -> float:
        _require_all(matrix, first, last)
        _move(W, row_gradient(matrix, W, Ht), context.step.alternating_step(context.sweep, gram_norm(Ht)))
        _move(Ht, column_gradient(matrix, W, Ht), context.step.alternating_step(context.sweep, gram_norm(W)))
        return float("nan")


def row_gradient(matrix: Matrix, W: Array, Ht: Array) -> Array:
    """Return E Hᵀ (n × k), E = X − W H: the potential's gradient in W, over known cells only for an ObservedMatrix."""
    if isinstance(matrix, ObservedMatrix):
        return _observed_gradient(matrix, W, Ht)
    return matrix.times(Ht) - W @ kernels.of(W).cast(kernels.of(Ht).gram(Ht), W)


def column_gradient(matrix: Matrix, W: Array, Ht: Array) -> Array:
    """Return EᵀW (m × k), the potential's gradient in Hᵀ."""
    if isinstance(matrix, ObservedMatrix):
        return _observed_gradient(matrix.transposed(), Ht, W)
    return matrix.transposed_times(W) - Ht @ kernels.of(Ht).cast(kernels.of(W).gram(W), Ht)


def _observed_gradient(matrix: ObservedMatrix, F: Array, other: Array) -> Array:
    side, out = matrix.by_row, np.empty_like(F)
    work = float(CELL_WORK) * F.shape[1] * matrix.stored
    pieces = runtime.split_range(len(F), work, np.asarray(side.indptr, np.int64).tolist())
    pull = game.pull_stored
    runtime.map_ranges(pieces, lambda a, b: pull(side.indptr, side.indices, side.data, a, b, F, other, out))
    return out


def _move(factor: Array, pull: Array, eta: float) -> None:
    factor += eta * pull
    factor[factor < 0] = 0


def distance(matrix: Matrix, W: Array, Ht: Array) -> float:
    """Return ‖X − W H‖; a squared distance below 0 by rounding counts as 0."""
    return float(np.sqrt(np.maximum(0.0, matrix.squared_distance(W, Ht))))


def gram_norm(factor: Array) -> float:
    """Return ‖FᵀF‖₂."""
    context = kernels.of(factor)
    return float(context.largest_eigenvalue(context.gram(factor)))


def _require_all(matrix: Matrix, first: int, last: int) -> None:
    if (first, last) != (0, matrix.shape[1]):
        raise CompositionError(
            "Simultaneous() and Alternating() need a sweep over all columns, not over a range of them. Use "
            "Stratified() or, between parties, SharedSums with ProjectedGradient."
        )


ORDERS = Choice(
    {
        "stratified": Stratified(),
        "sequential": Raster(),
        "random": Shuffled(),
        "simultaneous": Simultaneous(),
        "alternating": Alternating(),
    },
    needed=("sweep", "plays_cells"),
)
"""The orders of play by name. "simultaneous" and "alternating" need all rows in one process."""
