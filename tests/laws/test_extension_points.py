"""Laws of extension points, each used in a way that the library does not need yet.

A loss that is not squared error, models of different rank in one pass over X, rows that count several times, a backend
with other strides, and an iteration on a device that nobody looks at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from numpy.testing import assert_allclose, assert_array_equal

from partsong import kernels
from partsong.core import runtime
from partsong.core.interfaces import ArraySpec, RowBlock, Schedule, Traits
from partsong.core.streams import stream
from partsong.data import csr, scan
from partsong.data.conversion import as_matrix
from partsong.data.observed import observed
from partsong.engines.local import Sequential
from partsong.kernels import numpy_backend
from partsong.methods.exact import SharedSums
from partsong.secure_aggregation.protocol import SecureSum
from partsong.solvers.normal_equations import Penalty
from partsong.solvers.squared_error import RowFacts, RowState, SquaredError
from partsong.solvers.update_rules import (
    CoordinateDescent,
    Extrapolation,
    InertialPalm,
    Multiplicative,
    NoExtrapolation,
    ProjectedGradient,
    ProximalDescent,
)
from tests.laws.test_programs import data, run, shards_of

K = 4


def zeroed(seed=0):
    return data(seed=seed) * (np.random.default_rng(seed).random((90, 14)) < 0.6)


# Blocks: cells as they are stored, each once.

FORMS = {
    "C order": np.ascontiguousarray,
    "F order": np.asfortranarray,
    "csr": sp.csr_array,
    "csc": sp.csc_array,
    "torch": lambda X: pytest.importorskip("torch").from_numpy(X),
    "torch csr": lambda X: pytest.importorskip("torch").from_numpy(X).to_sparse_csr(),
}
beta = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")


def dense(block: RowBlock) -> np.ndarray:
    if block.tile is not None:
        return np.asarray(block.tile)
    parts = tuple(np.asarray(part) for part in (block.data, block.indices, block.indptr))
    return sp.csr_array(parts, shape=(block.rows.stop - block.rows.start, block.n_columns)).toarray()


@beta
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_blocks_hold_every_row_once(form, threads, monkeypatch):
    monkeypatch.setattr(runtime, "SMALL_WORK", 0)
    monkeypatch.setattr(scan, "TILE_BYTES", 1024)
    monkeypatch.setattr(csr, "TILE_ROWS", 7)
    X, times = zeroed(), np.zeros(90)
    matrix, found = as_matrix(FORMS[form](X)), np.zeros(X.shape)

    def work(block):
        times[block.rows] += 1
        found[block.rows] = dense(block)
        return found[block.rows].sum(axis=0), np.array(1.0)

    with runtime.limit_kernel_threads(threads):
        sums, count = matrix.blocks(work, per_cell=10.0)
    assert (times == 1).all()
    assert_array_equal(found, X)
    assert_allclose(sums, X.sum(axis=0))
    assert count >= 1
    assert_allclose(np.asarray(matrix.row_energies()), np.square(X).sum(axis=1))
    assert matrix.total_weight == 90
    assert matrix.row_weights is None
    turned = matrix.transposed()
    if turned is not None:
        assert_allclose(np.asarray(turned.times(matrix.native(np.eye(90)))), X.T)


def test_blocks_of_known_cells_hold_known_cells():
    X = np.where(zeroed() > 0, zeroed(), np.nan)
    matrix = observed(X)
    (known,) = matrix.blocks(lambda block: (np.array(float(len(block.data))),))
    assert known == matrix.stored == np.isfinite(X).sum()
    assert_allclose(matrix.row_energies(), np.nansum(np.square(X), axis=1))


@pytest.mark.parametrize("form", [np.asarray, sp.csr_array], ids=["dense", "sparse"])
def test_a_pass_over_no_rows_is_one_step_on_nothing(form):
    matrix = as_matrix(form(zeroed())).rows(np.empty(0, np.int64))
    Ht, seen = np.ones((14, K)), []

    def step(at, cross):
        seen.append((at, cross.shape))
        return (np.zeros((K, K)),)

    cross, (gram,) = matrix.visit(Ht, np.empty((0, K)), step)
    matrix.walk(Ht, step)
    matrix.blocks(lambda block: (np.array(seen.append((block.rows, (0, K)))),))
    assert seen == [(slice(0, 0), (0, K))] * 3
    assert cross.shape == (14, K)
    assert not cross.any()
    assert not gram.any()


# A loss whose half-steps are not normal equations.


@dataclass(frozen=True, slots=True)
class Columns:
    Ht: Any
    divergence: Any


@dataclass(frozen=True, slots=True)
class KullbackLeibler:
    """Σ x log(x / wh) − x + wh by multiplicative updates (Lee & Seung, 2001), from cells that are not zero and sums.

    W ← W ∘ (X / WH) Hᵀ / H1, and H ← H ∘ Wᵀ(X / WH) / Wᵀ1 from the sums of the new W.
    """

    traits: Traits = Traits(full_participation=True)
    scale: str = "l1"

    def begin(self, Ht, *, is_scaled=True):
        return Columns(Ht, kernels.of(Ht).scalar(np.nan, Ht))

    def begin_rows(self, shard, layout, W=None):
        return W

    def broadcast(self, columns):
        return {"H": columns.Ht.T}

    def row_step(self, X, rows, model):
        H = X.native(model["H"])
        Ht = kernels.of(H).rows_of(H)
        W, sizes = kernels.of(H).empty((X.shape[0], len(H)), H), Ht.sum(0)

        def work(block):
            old = np.ones((block.rows.stop - block.rows.start, len(H))) if rows is None else rows[block.rows]
            cells = self._cells(block)
            W[block.rows] = moved = old * (self._quotients(cells, old, Ht) @ Ht) / sizes
            quotients = self._quotients(cells, moved, Ht)
            x = cells.data
            gain = (x * np.log(np.where(x > 0, quotients.data, 1.0)) - x).sum()
            return (quotients.T @ moved).T, moved.sum(axis=0), np.array(gain + moved.sum(axis=0) @ sizes)

        names = "cross", "sizes", "divergence"
        return W, dict(zip(names, X.blocks(work, per_cell=6.0 * len(H)), strict=True))

    @staticmethod
    def _cells(block):
        if block.tile is not None:
            return sp.csr_array(block.tile)
        shape = block.rows.stop - block.rows.start, block.n_columns
        return sp.csr_array((block.data, block.indices, block.indptr), shape=shape)

    @staticmethod
    def _quotients(cells, W, Ht):
        rows = np.repeat(np.arange(cells.shape[0]), np.diff(cells.indptr))
        fitted = np.einsum("ij,ij->i", W[rows], Ht[cells.indices])
        return sp.csr_array((cells.data / np.maximum(fitted, 1e-300), cells.indices, cells.indptr), shape=cells.shape)

    def column_step(self, columns, sums):
        return Columns(columns.Ht * (sums["cross"].T / np.maximum(sums["sizes"], 1e-300)), sums["divergence"])

    def sums_spec(self, k, m):
        return {
            "cross": ArraySpec((k, m), non_negative=True),
            "sizes": ArraySpec((k,), non_negative=True),
            "divergence": ArraySpec(()),
        }

    def components(self, columns):
        return columns.Ht.T

    def metrics(self, columns) -> Mapping[str, float]:
        return {"divergence": float(columns.divergence)}

    def solve_rows(self, X, Ht, rows=None, *, exactly=True):
        for _ in range(50):
            rows = self.row_step(X, rows, {"H": Ht.T})[0]
        return rows

    def loss(self, X, W, Ht):
        return {"divergence": self.row_step(X, W, {"H": Ht.T})[1]["divergence"]}

    def iterate(self, X, rows, columns, count):
        for _ in range(count):
            rows, sums = self.row_step(X, rows, self.broadcast(columns))
            columns = self.column_step(columns, sums)
        return rows, columns


def pooled_kl(X, rounds):
    half_steps = KullbackLeibler()
    columns = half_steps.begin(stream(3, "start").random((14, K)))
    return half_steps.iterate(as_matrix(X), None, columns, rounds)


@pytest.mark.parametrize("form", [np.asarray, sp.csr_array], ids=["dense", "sparse"])
@pytest.mark.parametrize("cuts", [[45], [1, 2, 30, 80]])
def test_any_loss_is_federated_by_its_sums(cuts, form):
    """The one program, unchanged, gives the pooled factorization of another loss."""
    X = zeroed()
    W, columns = pooled_kl(X, 25)
    shards = [replace(shard, matrix=as_matrix(form(shard.matrix.X))) for shard in shards_of(X, cuts)]
    rounds = run(SharedSums(K, KullbackLeibler()), shards, 25)
    assert_allclose(rounds[-1].model["H"], columns.Ht.T, rtol=1e-12, atol=1e-12)
    own = [rounds[-1].checkpoint.parties[shard.name] for shard in shards]
    assert_allclose(np.vstack(own), W, rtol=1e-12, atol=1e-12)
    divergences = [done.metrics["divergence"] for done in rounds]
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(divergences))
    WH = W @ columns.Ht.T
    told = KullbackLeibler().loss(as_matrix(X), W, columns.Ht)["divergence"]
    exact = np.where(X > 0, X * np.log(np.where(X > 0, X / WH, 1)), 0).sum() - X.sum() + WH.sum()
    assert told <= exact, "`loss` takes one more step of W"
    assert told == pytest.approx(exact, rel=0.05)


def test_any_loss_can_be_masked():
    pytest.importorskip("cryptography")
    X, program = zeroed(), SharedSums(K, KullbackLeibler())
    masked = SecureSum(bound=1e5)
    *_, last = Sequential().run(program, shards_of(X, [30, 60]), Schedule(10, 3), reduction=masked)
    assert_allclose(last.model["H"], pooled_kl(X, 10)[1].Ht.T, rtol=1e-9, atol=1e-11)


# Lanes: models of different rank in one pass over X.


def one_by_one(X, solver, rank, rounds):
    columns = solver.begin(X.native(np.random.default_rng(rank).random((X.shape[1], rank))))
    return solver.iterate(X, RowState(), columns, rounds)


def in_one_pass(X, solver, ranks, rounds):
    """Each lane has a range of columns of one stacked Hᵀ, of X Hᵀ, and of the buffer that goes into XᵀA."""
    ends = np.cumsum([0, *ranks])
    lanes = [slice(a, b) for a, b in pairwise(ends)]
    begun = [solver.begin(X.native(np.random.default_rng(k).random((X.shape[1], k)))) for k in ranks]
    states = [(RowState(), columns) for columns in begun]
    on = kernels.of(begun[0].Ht)
    for _ in range(rounds):
        Ht = on.empty((X.shape[1], ends[-1]), begun[0].Ht)
        A = on.empty((X.shape[0], ends[-1]), Ht)
        passes = []
        for lane, (rows, columns) in zip(lanes, states, strict=True):
            Ht[:, lane] = columns.point
            model = solver.broadcast(columns)
            facts = RowFacts.of(X, Ht[:, lane].shape[1])
            passes.append(solver.row_pass(facts, rows, columns.point, model["amount"], model["restart"], A[:, lane]))

        def step(at, cross, passes=passes):
            addends = [one.step(at, cross[:, lane]) for one, lane in zip(passes, lanes, strict=True)]
            return tuple(addend for several in addends for addend in several)

        cross, sums = X.visit(Ht, A, step)
        each = len(sums) // len(lanes)
        for at, lane in enumerate(lanes):
            rows, sent = passes[at].done(cross[:, lane], sums[each * at : each * (at + 1)])
            states[at] = rows, solver.column_step(states[at][1], sent)
    return states


@pytest.mark.parametrize("solver", [
    SquaredError(CoordinateDescent(sweeps=2), momentum=Extrapolation()),
    SquaredError(InertialPalm(0.3)),
    SquaredError(CoordinateDescent(), Penalty(1e-3, 1e-3), Penalty(1e-3, 1e-3)),
], ids=["hals", "ipalm", "penalised"])  # fmt: skip
@pytest.mark.parametrize("form", ["C order", "csr", "torch"])
def test_models_of_different_rank_share_a_pass(form, solver):
    X = as_matrix(FORMS[form](zeroed()))
    lanes = in_one_pass(X, solver, (3, 5), 12)
    for rank, (rows, columns) in zip((3, 5), lanes, strict=True):
        alone, alone_columns = one_by_one(X, solver, rank, 12)
        assert_allclose(np.asarray(rows.W), np.asarray(alone.W), rtol=1e-9, atol=1e-11)
        assert_allclose(np.asarray(columns.Ht), np.asarray(alone_columns.Ht), rtol=1e-9, atol=1e-11)
        assert solver.metrics(columns) == pytest.approx(solver.metrics(alone_columns), rel=1e-9)


# Rows that count several times.


class Weighted:
    """Rows X of which each counts u_i times; products stay those of X."""

    def __init__(self, matrix, weights):
        self.matrix, self.row_weights, self.total_weight = matrix, weights, float(weights.sum())
        self.squared_norm = float(weights @ matrix.row_energies())

    def __getattr__(self, name):
        return getattr(self.matrix, name)


@pytest.mark.parametrize("penalty", [Penalty(), Penalty(1e-3, 1e-3)], ids=["plain", "penalised"])
@pytest.mark.parametrize("momentum", [NoExtrapolation(), Extrapolation()], ids=lambda one: type(one).__name__)
def test_a_row_of_weight_three_is_that_row_three_times(momentum, penalty):
    X, solver = zeroed(), SquaredError(CoordinateDescent(2), penalty, penalty, momentum)
    counts = np.random.default_rng(0).integers(1, 4, len(X))
    weighted, columns = one_by_one(Weighted(as_matrix(X), counts.astype(float)), solver, K, 15)
    repeated, others = one_by_one(as_matrix(np.repeat(X, counts, axis=0)), solver, K, 15)
    assert_allclose(columns.Ht, others.Ht, rtol=1e-8, atol=1e-10)
    assert_allclose(np.repeat(weighted.W, counts, axis=0), repeated.W, rtol=1e-8, atol=1e-10)
    assert solver.metrics(columns) == pytest.approx(solver.metrics(others), rel=1e-8)


def test_objectives_over_other_rows_are_not_compared():
    """The basis of a step is Σu and Σu‖x‖²: with other rows nothing is taken back, however large the error."""
    solver = SquaredError(momentum=Extrapolation())
    small, large = as_matrix(zeroed()), as_matrix(100 * zeroed(1))
    rows, columns = one_by_one(small, solver, K, 8)
    _, sums = solver.row_step(large, RowState(), solver.broadcast(columns))
    after = solver.column_step(columns, sums)
    assert not after.pace.must_restart
    assert after.basis != columns.basis
    _, sums = solver.row_step(small, rows, solver.broadcast(columns))
    assert solver.column_step(columns, sums).basis == columns.basis


# Many iterations in one call.


@pytest.mark.parametrize("form", ["C order", "csr"])
@pytest.mark.parametrize("solver", [
    SquaredError(CoordinateDescent(sweeps=2), momentum=Extrapolation()),
    SquaredError(Multiplicative()),
    SquaredError(InertialPalm(0.2)),
    SquaredError(ProjectedGradient()),
], ids=lambda solver: repr(solver.rule))  # fmt: skip
def test_iterations_at_once_are_iterations_one_by_one(solver, form):
    X = as_matrix(FORMS[form](zeroed()))
    with runtime.limit_kernel_threads(1):
        rows, columns = one_by_one(X, solver, K, 1)
        many = solver.iterate(X, rows, columns, 9)
        for _ in range(9):
            rows, columns = solver.iterate(X, rows, columns, 1)
    assert_allclose(many[0].W, rows.W, rtol=1e-9, atol=1e-12)
    assert_allclose(many[1].Ht, columns.Ht, rtol=1e-9, atol=1e-12)
    assert solver.metrics(many[1]) == pytest.approx(solver.metrics(columns), rel=1e-9)
    assert float(many[0].memory.count) == float(columns.memory.count) == 10


# Memory order belongs to the backend.


@pytest.mark.parametrize("rule", [CoordinateDescent(2), Multiplicative(), InertialPalm(0.3)], ids=repr)
@pytest.mark.parametrize("form", ["C order", "csr"])
def test_factors_may_lie_by_component(form, rule, monkeypatch):
    """A device wants k × n in memory: with such strides a fit is the same."""
    X, solver = as_matrix(FORMS[form](zeroed())), SquaredError(rule, momentum=Extrapolation())
    rows, columns = one_by_one(X, solver, K, 8)
    monkeypatch.setattr(numpy_backend, "empty", lambda shape, like: np.empty(shape[::-1], like.dtype).T)
    monkeypatch.setattr(numpy_backend, "rows_of", lambda H: np.ascontiguousarray(H).T)
    other, other_columns = one_by_one(X, solver, K, 8)
    assert other.W.flags.f_contiguous
    assert_allclose(other.W, rows.W, rtol=1e-12, atol=1e-12)
    assert_allclose(other_columns.Ht, columns.Ht, rtol=1e-12, atol=1e-12)


# An iteration without a look from the host.

ON_A_DEVICE = {
    "hals": SquaredError(CoordinateDescent(sweeps=2), momentum=Extrapolation()),
    "mu": SquaredError(Multiplicative()),
    "gradient": SquaredError(ProjectedGradient(decay=0.1), momentum=Extrapolation()),
    "ipalm": SquaredError(InertialPalm(0.3)),
    "proximal": SquaredError(ProximalDescent()),
    "damped": SquaredError(CoordinateDescent(1, 0.1, 0.1)),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ON_A_DEVICE)
def test_an_iteration_on_tensors_never_looks_at_a_number(name, dtype):
    """FakeTensorMode knows shapes and types alone, and raises where a value is asked for."""
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    from partsong.data.tensor import TensorMatrix

    solver, kind = ON_A_DEVICE[name], getattr(torch, dtype)
    with FakeTensorMode():
        X = TensorMatrix(torch.empty((50, 9), dtype=kind))
        vars(X)["squared_norm"] = 3.0  # worked out once, before the first iteration
        rows, columns = RowState(), solver.begin(torch.empty((9, K), dtype=kind))
        for _ in range(3):
            rows, sums = solver.row_step(X, rows, solver.broadcast(columns))
            columns = solver.column_step(columns, sums)
        rows, columns = solver.iterate(X, rows, columns, 2)
        assert (rows.W.shape, columns.Ht.shape) == ((50, K), (9, K))
        assert rows.W.dtype == columns.Ht.dtype == columns.point.dtype == kind
        assert {name: (tuple(a.shape), a.dtype) for name, a in sums.items()} == {
            "gram": ((K, K), torch.float64),
            "cross": ((K, 9), kind),
            "rows": ((), torch.float64),
            "energy": ((), torch.float64),
        }
        with pytest.raises(DataDependentOutputException):
            solver.metrics(columns)


def test_what_a_backend_can_do_is_asked_of_an_array():
    assert "compiled" in kernels.capabilities(np.ones(1))
    torch = pytest.importorskip("torch")
    assert "compiled" not in kernels.capabilities(torch.ones(1))
