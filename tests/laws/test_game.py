"""Laws of the game: steps and equilibria on one machine, and the same game between parties."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from pairwise_masks import PairwiseMasks
from scipy.optimize import nnls

from partsong import NMF
from partsong.aggregation.linear import block_span, block_width
from partsong.aggregation.plaintext import PlainReduction
from partsong.core import runtime
from partsong.core.interfaces import Message, Outcome, Schedule, Shard
from partsong.core.streams import key, stream
from partsong.data.conversion import as_matrix
from partsong.data.observed import observed
from partsong.engines.local import Parallel, Sequential
from partsong.errors import (
    CompositionError,
    DataError,
    DivergenceError,
    DivergenceWarning,
    ParameterError,
    PartyError,
    ShapeError,
    UploadError,
)
from partsong.evaluation.equilibrium import equilibrium
from partsong.kernels import game as compiled_game
from partsong.methods.averaging import LocalAveraging
from partsong.methods.game import FederatedGame
from partsong.solvers.game import (
    MAX_RELAXATION,
    ConstantStep,
    DecayingStep,
    Game,
    GameState,
    NoSelfPlay,
    SafeStep,
    ShrinkOthers,
    ShrinkSmallest,
    balance,
    initial_weights,
)
from partsong.solvers.game_orders import (
    LEADERS,
    Alternating,
    PairStep,
    Raster,
    Shuffled,
    Simultaneous,
    Stratified,
    build_cells,
)
from partsong.training.loop import StoppingRule, Training, measure, train
from partsong.training.loop import run as run_fit
from partsong.training.result import EmptyModelWarning
from partsong.training.simulation import FederatedFit, SimulationMeasures, finish_with_warnings

ORDERS = [Raster(), Shuffled(), Stratified(), Stratified(blocks=3), Simultaneous(), Alternating()]
MEETINGS = [order for order in ORDERS if order.plays_cells]
STEPS = [ConstantStep(0.05), DecayingStep(0.05, 0.1), SafeStep(), SafeStep(1.5)]
FORMS = ("dense", "F order", "sparse", "observed")
LEADERS_OR_NONE = (None, "rows", "columns")


def cells(n=23, m=17, seed=0, noise=0.1):
    """Values, a third of them zeros."""
    rng = np.random.default_rng(seed)
    X = rng.gamma(0.5, size=(n, 3)) @ rng.gamma(0.5, size=(3, m)) + noise * rng.random((n, m))
    return X * (rng.random((n, m)) < 0.67)


def known_of(shape, seed=1, density=0.6):
    return np.random.default_rng(seed).random(shape) < density


def matrix_of(form, X, dtype=np.float64):
    X = X.astype(dtype)
    match form:
        case "dense":
            return as_matrix(X)
        case "F order":
            return as_matrix(np.asfortranarray(X))
        case "sparse":
            return as_matrix(sp.csr_array(X))
        case "observed":
            return observed(np.where(known_of(X.shape), X, np.nan).astype(dtype))
    raise AssertionError(form)


def start(n, m, k, dtype=np.float64, seed=2):
    rng = np.random.default_rng(seed)
    return rng.random((n, k)).astype(dtype), rng.random((m, k)).astype(dtype)


def is_played(form, shape):
    return known_of(shape) if form == "observed" else np.ones(shape, bool)


def play(game, matrix, W, Ht, sweeps=1, seed=5, **more):
    """Standings after each sweep."""
    game_state, out = GameState(W, Ht), []
    for number in range(sweeps):
        game_state = game.sweep(matrix, game_state, number, generator=np.random.default_rng([seed, number]), **more)
        out.append(game_state)
    return out


def potential(X, W, Ht, known=None):
    square = np.square(X - W.astype(np.float64) @ Ht.astype(np.float64).T)
    return 0.5 * (square if known is None else square[known]).sum()


def stratified_order(order, matrix, first, last):
    """Its cells, (rows, columns), as its docstring says: stratum after stratum, block after block, row by row."""
    n = matrix.shape[0]
    cells = build_cells(matrix)
    if order.row_workers is None and order.column_workers is None:
        row_groups, cuts = order.row_groups(cells), order.column_cuts(first, last, len(order.row_groups(cells)))
        column_groups = [np.arange(a, b) for a, b in pairwise(cuts)]
    else:
        workers = np.unique([*(order.row_workers or ()), *(order.column_workers or ())])
        column_groups = [np.flatnonzero(np.array(order.column_workers) == worker) for worker in workers]
        row_groups = [np.flatnonzero(np.array(order.row_workers) == worker) for worker in workers]
    size = max(len(row_groups), len(column_groups))
    found = [
        (i, j)
        for shift in range(size)
        for b, rows in enumerate(row_groups)
        if (b + shift) % size < len(column_groups)
        for i in rows
        for j in column_groups[(b + shift) % size]
    ]
    assert len(set(found)) == len(found) == n * (last - first)
    return found


def play_list(pairs, X, W, Ht, meeting, known):
    """The same cells, one after the other, by the kernel that takes a list."""
    W, Ht = W.copy(), Ht.copy()
    rows, columns = (np.array(side, np.int64) for side in zip(*(p for p in pairs if known[p]), strict=True))
    values = X[rows, columns].astype(W.dtype)
    seen = compiled_game.play_cells(rows, columns, values, W, Ht, *meeting.compiled_args(W.dtype))
    return W, Ht, seen


@pytest.fixture
def always_threaded(monkeypatch):
    monkeypatch.setattr(runtime, "SMALL_WORK", 0)


@pytest.mark.parametrize("k", [1, 3, 8, 20, 33])
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=lambda d: d.__name__)
@pytest.mark.parametrize("form", FORMS)
def test_stratified_play_is_sequential_play_in_its_order_bit_for_bit(form, dtype, k, always_threaded):
    X, labels = cells(), np.random.default_rng(3)
    n, m = X.shape
    anyhow = Stratified(row_workers=tuple(labels.integers(0, 5, n)), column_workers=tuple(labels.integers(2, 7, m)))
    matrix, known = matrix_of(form, X, dtype), is_played(form, X.shape)
    W, Ht = start(n, m, k, dtype)
    for order in (Stratified(), Stratified(blocks=4), Stratified(blocks=50), anyhow):
        for step in (ConstantStep(0.05), SafeStep()):
            scale = balance(W, Ht) if step.is_balanced else 1.0
            meeting = PairStep(*step.pair_step(0, 1.0))
            pairs = stratified_order(order, matrix, 0, m)
            there = play_list(pairs, X, W * dtype(scale), Ht / dtype(scale), meeting, known)
            seen = set()
            for count in (1, 2, 4):
                with runtime.limit_kernel_threads(count):
                    (done,) = play(Game(order, step), matrix, W, Ht)
                assert_array_equal(done.W, there[0] / dtype(scale))
                assert_array_equal(done.Ht, there[1] * dtype(scale))
                assert done.squared_error == pytest.approx(there[2], rel=1e-12)
                seen.add(done.squared_error)
            assert len(seen) == 1, "the pace of later sweeps hangs on it"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("leader", LEADERS_OR_NONE)
def test_raster_play_is_row_by_row_and_a_range_of_columns_leaves_others_alone(form, leader):
    X = cells()
    n, m = X.shape
    matrix, known, (W, Ht) = matrix_of(form, X), is_played(form, X.shape), start(n, m, 4)
    meeting = PairStep(0.05, 0.0, leader)
    for first, last in ((0, m), (5, 11), (7, 7)):
        (done,) = play(Game(Raster(), ConstantStep(0.05), leader=leader), matrix, W, Ht, columns=(first, last))
        pairs = [(i, j) for i in range(n) for j in range(first, last)]
        there = play_list(pairs, X, W, Ht, meeting, known) if pairs else (W, Ht, 0.0)
        assert_array_equal(done.W, there[0])
        assert_array_equal(done.Ht, there[1])
        (strata,) = play(Game(Stratified(blocks=3), leader=leader), matrix, W, Ht, columns=(first, last))
        assert_array_equal(np.delete(strata.Ht, np.s_[first:last], axis=0), np.delete(Ht, np.s_[first:last], axis=0))


def by_the_formula(w, h, x, step, leader):
    """One meeting in NumPy, and e before it."""

    def eta(w, h, e):
        size = w @ w + h @ h + abs(e)
        constant, relaxation = step.pair_step(0, 1.0)
        return constant if relaxation <= 0 else (relaxation / size if size > 0 else 0.0)

    e = x - w @ h
    if leader is None:
        return np.maximum(0, w + eta(w, h, e) * e * h), np.maximum(0, h + eta(w, h, e) * e * w), e
    if leader == "rows":
        w = np.maximum(0, w + eta(w, h, e) * e * h)
        later = x - w @ h
        return w, np.maximum(0, h + eta(w, h, later) * later * w), e
    h, w, e = by_the_formula(h, w, x, step, "rows")
    return w, h, e


@pytest.mark.parametrize("step", STEPS, ids=repr)
@pytest.mark.parametrize("leader", LEADERS_OR_NONE)
@pytest.mark.parametrize("k", [1, 4, 21])
def test_a_meeting_is_its_formula(k, leader, step):
    rng = np.random.default_rng(k)
    for x in (0.0, 0.3, 7.0):
        W, Ht = rng.random((1, k)), rng.random((1, k)) * (rng.random((1, k)) < 0.7)
        meeting = PairStep(*step.pair_step(0, 1.0), leader)
        w, h, e = by_the_formula(W[0], Ht[0], x, step, leader)
        seen = compiled_game.play_cells(
            np.array([0]), np.array([0]), np.array([x]), W, Ht, *meeting.compiled_args(np.float64)
        )
        assert_allclose(W[0], w, rtol=1e-12, atol=1e-15)
        assert_allclose(Ht[0], h, rtol=1e-12, atol=1e-15)
        assert seen == pytest.approx(e * e, rel=1e-10)


@pytest.mark.parametrize("leader", LEADERS_OR_NONE)
@pytest.mark.parametrize("form", FORMS)
def test_a_sweep_is_the_loops_of_the_paper(form, leader):
    X = cells(7, 6)
    matrix, known, (W, Ht) = matrix_of(form, X), is_played(form, X.shape), start(7, 6, 3)
    step = ConstantStep(0.1)
    (done,) = play(Game(Raster(), step, leader=leader), matrix, W, Ht)
    seen = 0.0
    for i in range(7):
        for j in range(6):
            if known[i, j]:
                W[i], Ht[j], e = by_the_formula(W[i], Ht[j], X[i, j], step, leader)
                seen += e * e
    assert_allclose(done.W, W, rtol=1e-11)
    assert_allclose(done.Ht, Ht, rtol=1e-11)
    assert done.squared_error == pytest.approx(seen, rel=1e-11)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("step", [ConstantStep(0.01), DecayingStep(0.02, 1.0)], ids=repr)
def test_all_at_once_is_projected_gradient(form, step):
    X = cells()
    known, (W, Ht) = is_played(form, X.shape), start(*X.shape, 4)
    E, eta = (X - W @ Ht.T) * known, step.pair_step(3, 1.0)[0]
    matrix = matrix_of(form, X)
    both = Game(Simultaneous(), step).sweep(matrix, GameState(W, Ht), 3)
    assert_allclose(both.W, np.maximum(0, W + eta * E @ Ht), atol=1e-13)
    assert_allclose(both.Ht, np.maximum(0, Ht + eta * E.T @ W), atol=1e-13)
    turns = Game(Alternating(), step).sweep(matrix, GameState(W, Ht), 3)
    assert_allclose(turns.W, both.W, atol=1e-13)
    fresh = (X - turns.W @ Ht.T) * known
    assert_allclose(turns.Ht, np.maximum(0, Ht + eta * fresh.T @ turns.W), atol=1e-13)
    assert np.isnan(both.squared_error)


@pytest.mark.parametrize("form", FORMS)
def test_a_random_order_is_every_cell_once_and_is_drawn_from_the_seed(form):
    """With w, h = 1 and η so small that nobody notices what others did, each meeting adds η e: sums tell who met."""
    X = cells()
    matrix, known = matrix_of(form, X), is_played(form, X.shape)
    W, Ht = np.ones((X.shape[0], 1)), np.ones((X.shape[1], 1))
    eta = 1e-9
    game = Game(Shuffled(), ConstantStep(eta))
    (done,) = play(game, matrix, W, Ht)
    E = (X - 1) * known
    assert_allclose((done.W - W)[:, 0] / eta, E.sum(axis=1), atol=1e-5)
    assert_allclose((done.Ht - Ht)[:, 0] / eta, E.sum(axis=0), atol=1e-5)
    W, Ht = start(*X.shape, 4)
    strong = Game(Shuffled(), ConstantStep(0.1))
    one, again, other = (play(strong, matrix, W, Ht, seed=seed)[0].W for seed in (1, 1, 2))
    assert_array_equal(one, again)
    assert not np.array_equal(one, other)
    with pytest.raises(ParameterError, match="needs a random generator"):
        game.sweep(matrix, GameState(W, Ht), 0)


numbers = st.one_of(st.just(0.0), st.floats(1e-6, 1e6), st.floats(0, 1))


@given(
    w=st.lists(numbers, min_size=6, max_size=6),
    h=st.lists(numbers, min_size=6, max_size=6),
    x=numbers,
    relaxation=st.floats(1e-3, MAX_RELAXATION),
    leader=st.sampled_from(LEADERS_OR_NONE),
)
def test_nobody_loses_by_a_safe_meeting(w, h, x, relaxation, leader):
    for k in (1, 3, 6):
        W, Ht = np.array([w[:k]]), np.array([h[:k]])
        before, size = abs(x - W[0] @ Ht[0]), x + W[0] @ Ht[0]
        numbers = PairStep(0.0, relaxation, leader).compiled_args(np.float64)
        compiled_game.play_cells(np.array([0]), np.array([0]), np.array([x]), W, Ht, *numbers)
        assert (W >= 0).all()
        assert (Ht >= 0).all()
        assert abs(x - W[0] @ Ht[0]) <= before + 1e-14 * size


@given(seed=st.integers(0, 10**6), log_scale=st.integers(-6, 6), balance=st.integers(-4, 4))
@pytest.mark.parametrize("order", [Simultaneous(), Alternating()], ids=repr)
@pytest.mark.parametrize("form", ["dense", "observed"])
def test_safe_steps_of_all_at_once_never_raise_the_potential(form, order, seed, log_scale, balance):
    rng = np.random.default_rng(seed)
    n, m, k = rng.integers(1, 15, 3)
    X = rng.gamma(0.3, size=(n, m)) * 10.0**log_scale
    known = is_played(form, X.shape)
    if not known.any():
        return
    W, Ht = rng.random((n, k)) * 10.0**balance, rng.gamma(0.2, size=(m, k)) * 10.0 ** rng.integers(-3, 3)
    matrix, last = matrix_of(form, X), potential(X, W, Ht, known)
    for done in play(Game(order, SafeStep(rng.uniform(0.2, 1.6))), matrix, W, Ht, 4):
        latest = potential(X, done.W, done.Ht, known)
        assert latest <= last * (1 + 1e-12) + 1e-13 * np.square(X[known]).sum()
        last = latest


@pytest.mark.parametrize("power", [-20, 6, 30])
@pytest.mark.parametrize("order", ORDERS, ids=repr)
def test_safe_play_does_not_depend_on_units_or_on_how_a_scale_is_shared_out(order, power):
    """Powers of four: both factors are scaled by their root, and nothing is rounded."""
    X = cells()
    W, Ht = start(*X.shape, 4)
    unit = 2.0**power
    plain = play(Game(order), as_matrix(X), W, Ht, 3)[-1]
    scaled = play(Game(order), as_matrix(X * unit**2), W * unit, Ht * unit, 3)[-1]
    skewed = play(Game(order), as_matrix(X), W * unit, Ht / unit, 3)[-1]
    assert_allclose(scaled.W, plain.W * unit, rtol=1e-9)
    assert_allclose(scaled.Ht, plain.Ht * unit, rtol=1e-9)
    assert_allclose(skewed.W, plain.W * unit, rtol=1e-9)
    assert_allclose(skewed.Ht, plain.Ht / unit, rtol=1e-9)


@pytest.mark.parametrize("order", ORDERS, ids=repr)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=lambda d: d.__name__)
def test_play_keeps_to_numbers_that_are_not_negative_and_to_its_type_and_leaves_its_arguments(form, order, dtype):
    X = cells()
    matrix, (W, Ht) = matrix_of(form, X, dtype), start(*X.shape, 5, dtype)
    before = W.copy(), Ht.copy()
    for step in (ConstantStep(0.3), SafeStep()):
        for self_play in (NoSelfPlay(), ShrinkOthers(0.5)):
            for done in play(Game(order, step, self_play), matrix, W, Ht, 3):
                for factor in (done.W, done.Ht):
                    assert (factor >= 0).all()
                    assert factor.dtype == dtype
    assert_array_equal(W, before[0])
    assert_array_equal(Ht, before[1])


@pytest.mark.parametrize("order", ORDERS, ids=repr)
def test_unknown_cells_change_nothing_and_known_zeros_do(order):
    X = cells()
    known, (W, Ht) = known_of(X.shape), start(*X.shape, 4)
    rows, columns = np.nonzero(known)
    forms = {
        "NaN": np.where(known, X, np.nan),
        "secure_aggregation": np.ma.array(np.where(known, X, 1e6), mask=~known),
        "other values": np.ma.array(np.where(known, X, 0.0), mask=~known),
        "stored": sp.coo_array((X[known], (rows, columns)), shape=X.shape),
    }
    there = [play(Game(order), observed(form), W, Ht, 3)[-1] for form in forms.values()]
    for other in there[1:]:
        assert_array_equal(other.W, there[0].W)
        assert_array_equal(other.Ht, there[0].Ht)
    assert (X[known] == 0).any()
    without = play(Game(order), observed(sp.csr_array(np.where(known, X, 0.0))), W, Ht, 3)[-1]
    assert not np.allclose(without.W, there[0].W)


@pytest.mark.parametrize("order", ORDERS, ids=repr)
def test_a_full_table_of_known_cells_is_played_as_an_array_is(order):
    X = cells()
    W, Ht = start(*X.shape, 4)
    all_known, dense = (play(Game(order), matrix, W, Ht, 3)[-1] for matrix in (observed(X), as_matrix(X)))
    assert_allclose(all_known.W, dense.W, rtol=1e-9)
    assert_allclose(all_known.Ht, dense.Ht, rtol=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_utilities_add_up_to_the_potential(form):
    """Σ u_ij = −½‖X − W H‖², the same for the player who moves and for all: what one gains, the potential gains."""
    X = cells(9, 8)
    known, (W, Ht) = is_played(form, X.shape), start(9, 8, 3)
    utilities = np.array([[-0.5 * (X[i, j] - W[i] @ Ht[j]) ** 2 for j in range(8)] for i in range(9)]) * known
    assert utilities.sum() == pytest.approx(-0.5 * matrix_of(form, X).squared_distance(W, Ht))
    moved = W.copy()
    moved[4] += 0.1
    own = -0.5 * (np.square(X[4] - moved[4] @ Ht.T) * known[4]).sum()
    assert own - utilities[4].sum() == pytest.approx(potential(X, W, Ht, known) - potential(X, moved, Ht, known))


def test_self_play_is_its_formula():
    Ht = np.array([[3.0, 1.0, 2.0], [0.5, 0.5, 4.0], [0.0, 2.0, 2.0], [1.0, 1.0, 1.0]])
    assert_allclose(ShrinkSmallest(0.9)(Ht), Ht * [[1, 0.9, 1], [0.9, 1, 1], [0.9, 1, 1], [0.9, 1, 1]])
    assert_allclose(ShrinkOthers(0.9)(Ht), Ht * [[1, 0.9, 0.9], [0.9, 0.9, 1], [0.9, 1, 0.9], [1, 0.9, 0.9]])
    assert NoSelfPlay()(Ht) is Ht
    assert ShrinkOthers(0.0)(Ht.astype(np.float32)).dtype == np.float32
    X, (W, start_Ht) = cells(), start(23, 17, 3)
    plain, shaped = (
        play(Game(Raster(), ConstantStep(0.05), self_play), as_matrix(X), W, start_Ht, columns=(4, 9))[0]
        for self_play in (NoSelfPlay(), ShrinkOthers(0.9))
    )
    assert_array_equal(shaped.W, plain.W)
    assert_array_equal(shaped.Ht[4:9], ShrinkOthers(0.9)(plain.Ht[4:9]))
    assert_array_equal(np.delete(shaped.Ht, np.s_[4:9], axis=0), np.delete(start_Ht, np.s_[4:9], axis=0))
    for bad in (-0.1, 1.1, np.nan):
        with pytest.raises(ParameterError, match="between 0 and 1"):
            ShrinkSmallest(bad)


def overlap(Ht):
    """The mean cosine of two rows of H."""
    unit = Ht / np.linalg.norm(Ht, axis=0)
    k = unit.shape[1]
    return float((unit.T @ unit - np.eye(k)).sum() / (k * (k - 1)))


@pytest.mark.parametrize("order", ORDERS, ids=repr)
def test_j_max_drives_rows_of_H_towards_disjoint_supports(order):
    X = cells(60, 20)
    W, Ht = start(60, 20, 3)
    overlaps = {
        factor: overlap(play(Game(order, SafeStep(), ShrinkOthers(factor)), as_matrix(X), W, Ht, 150)[-1].Ht)
        for factor in (1.0, 0.8, 0.4)
    }
    assert overlaps[1.0] > overlaps[0.8] > 1.2 * overlaps[0.4], overlaps
    disjoint = play(Game(order, SafeStep(), ShrinkOthers(0.0)), as_matrix(X), W, Ht, 3)[-1].Ht
    assert ((disjoint > 0).sum(axis=1) <= 1).all()


@pytest.mark.parametrize("order", ORDERS, ids=repr)
@pytest.mark.parametrize("form", ["dense", "observed"])
def test_play_ends_in_an_equilibrium(form, order):
    """In noise: steps that stay shorter where errors are large would end elsewhere, with gains of a hundredth."""
    matrix = matrix_of(form, cells(40, 24))
    Ht = start(40, 24, 3)[1]
    game_state, pace, before, gains = GameState(initial_weights(matrix, Ht), Ht), 1.0, np.inf, []
    for sweep in range(500):
        if sweep in (0, 30, 499):
            gains.append(equilibrium(matrix, game_state.W, game_state.Ht.T).relative_epsilon)
        draw = np.random.default_rng([7, sweep])
        game_state = Game(order).sweep(matrix, game_state, sweep, pace=pace, generator=draw)
        pace, before = SafeStep().next_pace(pace, sweep, before, game_state.squared_error), game_state.squared_error
    assert gains[0] > gains[1] > 20 * gains[2]
    assert gains[2] < 3e-4


def test_first_weights_fit_every_row_by_one_number():
    X = cells()
    Ht = start(*X.shape, 4)[1]
    for form in FORMS:
        known, W = is_played(form, X.shape), initial_weights(matrix_of(form, X), Ht)
        total = Ht.sum(axis=1) * known
        assert_allclose(W, np.repeat(((X * total).sum(1) / np.square(total).sum(1))[:, None], 4, axis=1), rtol=1e-10)


def test_numbers_that_make_no_sense_are_refused():
    for bad in (0, -1.0, np.inf, np.nan):
        with pytest.raises(ParameterError, match="eta"):
            ConstantStep(bad)
        with pytest.raises(ParameterError):
            SafeStep(bad)
        with pytest.raises(ParameterError, match="decay"):
            DecayingStep(0.1, bad)
    for bad in ({"relaxation": 1.7}, {"slower": 1.1}, {"faster": 0.9}, {"least": -1.0}, {"slower": 0.0}):
        with pytest.raises(ParameterError, match="SafeStep needs"):
            SafeStep(**bad)
    for blocks in (0, -1, 1.5, True):
        with pytest.raises(ParameterError, match="blocks"):
            Stratified(blocks)
    for workers in ((-1, 0), (0.5,), ((0, 1), (1, 0)), ("a",)):
        with pytest.raises(ParameterError, match="row_workers"):
            Stratified(row_workers=workers)
    with pytest.raises(ParameterError, match="leader"):
        Game(leader="columms")
    for leader in (["rows"], 1, {}):
        with pytest.raises(ParameterError, match="leader"):
            Game(leader=leader)
    assert set(LEADERS) == set(LEADERS_OR_NONE)
    for order in (Simultaneous(), Alternating()):
        with pytest.raises(CompositionError, match="leader"):
            Game(order, leader="rows")


def test_what_is_no_number_is_refused_as_one():
    for bad in ("a", True, None, [0.1], 1j):
        for build in (ConstantStep, DecayingStep, lambda bad: DecayingStep(0.1, bad), SafeStep):
            with pytest.raises(ParameterError, match="number"):
                build(bad)
        for name in ("relaxation", "slower", "faster", "least"):
            with pytest.raises(ParameterError, match=f"{name} of SafeStep must be a number"):
                SafeStep(**{name: bad})
        for shrink in (ShrinkOthers, ShrinkSmallest):
            with pytest.raises(ParameterError, match="between 0 and 1"):
                shrink(bad)
    for workers in ([[1], [2, 3]], 3, [True, False], "ab"):
        with pytest.raises(ParameterError, match="row_workers"):
            Stratified(row_workers=workers)
    for blocks in ("a", None, np.bool_(True), 3.0):
        with pytest.raises(ParameterError, match="blocks"):
            Stratified(blocks)
    assert Stratified(blocks=np.int64(3)) == Stratified(blocks=3)
    assert type(Stratified(blocks=np.int64(3)).blocks) is int
    assert (ConstantStep(np.float32(0.5)).eta, ShrinkOthers(1).factor) == (0.5, 1)


def test_parts_of_a_game_are_looked_at():
    for order in (Raster, "raster", None, 3, SafeStep()):
        with pytest.raises(ParameterError, match=r"order must be one of Raster\(\)"):
            Game(order)
    for step in (SafeStep, "safe", None, True, Raster()):
        with pytest.raises(ParameterError, match=r"step must be one of SafeStep\(\)"):
            Game(step=step)
    with pytest.raises(ParameterError, match=r"got 0\.25\. For a fixed step, pass ConstantStep\(0\.25\)"):
        Game(step=0.25)
    for self_play in (ShrinkOthers, "shrink", None, 0.9, abs):
        with pytest.raises(ParameterError, match=r"self_play must be one of NoSelfPlay\(\)"):
            Game(self_play=self_play)


def test_games_that_diverge_name_a_way_out():
    for order in ORDERS:
        assert "scale of the data" in Game(order).divergence_advice
        assert "smaller step" in Game(order, ConstantStep(0.25)).divergence_advice


def test_maps_of_players_are_looked_at():
    X = cells()
    matrix, (W, Ht) = as_matrix(X), start(*X.shape, 3)
    with pytest.raises(ParameterError, match="row_workers must have one entry for each of 23 players; it has 3"):
        play(Game(Stratified(row_workers=(0, 1, 2))), matrix, W, Ht)
    with pytest.raises(ParameterError, match="column_workers must have one entry for each of 17 players; it has 23"):
        play(Game(Stratified(column_workers=(0,) * 23)), matrix, W, Ht)
    with pytest.raises(CompositionError, match="over all columns"):
        play(Game(Stratified(column_workers=(0,) * 17)), matrix, W, Ht, columns=(0, 3))
    far = play(Game(Stratified(row_workers=(0, 10**12) * 11 + (5,))), matrix, W, Ht)[0]
    near = play(Game(Stratified(row_workers=(0, 2) * 11 + (1,))), matrix, W, Ht)[0]
    assert_array_equal(far.W, near.W)
    for order in (Simultaneous(), Alternating()):
        with pytest.raises(CompositionError, match="over all columns"):
            play(Game(order), matrix, W, Ht, columns=(0, 3))


def test_cells_of_tensors_are_not_played_but_all_at_once_is():
    torch = pytest.importorskip("torch")
    X = cells()
    W, Ht = start(*X.shape, 3)
    tensors = as_matrix(torch.from_numpy(X)), torch.from_numpy(W), torch.from_numpy(Ht)
    with pytest.raises(CompositionError, match="Single cells can be played only"):
        play(Game(), *tensors)
    for order in (Simultaneous(), Alternating()):
        there, here = play(Game(order), *tensors, 3)[-1], play(Game(order), as_matrix(X), W, Ht, 3)[-1]
        assert_allclose(there.W.numpy(), here.W, rtol=1e-9)
        assert_allclose(there.Ht.numpy(), here.Ht, rtol=1e-9)


def profile(shape=(40, 25), rank=3, seed=0):
    """Data with zeros, W and H that have nothing to do with them, and which cells are known."""
    rng = np.random.default_rng(seed)
    X = rng.random(shape) * (rng.random(shape) > 0.3)
    return X, rng.random((shape[0], rank)), rng.random((rank, shape[1])), rng.random(shape) < 0.6


def with_gaps(X, known):
    return np.where(known, X, np.nan)


EQUILIBRIUM_FORMS = {
    "C order": np.ascontiguousarray,
    "F order": np.asfortranarray,
    "strided": lambda X: np.repeat(X, 2, axis=1)[:, ::2],
    "list": lambda X: X.tolist(),
    "csr": sp.csr_array,
    "csc": sp.csc_array,
    "dense Matrix": as_matrix,
    "sparse Matrix": lambda X: as_matrix(sp.csr_array(X)),
    "observed": observed,
    "tensor": lambda X: pytest.importorskip("torch").from_numpy(X),
}


def row_gains(X, W, Ht):
    """By SciPy, row by row over the cells that are not NaN."""
    gains = []
    for x, w in zip(X, W, strict=True):
        known = ~np.isnan(x)
        least = nnls(Ht[known], x[known])[1] if known.any() else 0.0
        gains.append(0.5 * (np.square(x[known] - Ht[known] @ w).sum() - least**2))
    return np.array(gains)


@pytest.mark.parametrize("form", EQUILIBRIUM_FORMS)
def test_gains_are_what_scipy_finds(form):
    X, W, H, _ = profile()
    found = equilibrium(EQUILIBRIUM_FORMS[form](X), W, H)
    assert_allclose(found.row_gains, row_gains(X, W, H.T), atol=1e-12)
    assert_allclose(found.column_gains, row_gains(X.T, H.T, W), atol=1e-12)
    assert found.energy == pytest.approx(0.5 * np.square(X).sum())


@given(n=st.integers(1, 20), m=st.integers(1, 20), k=st.integers(1, 6), seed=st.integers(0, 10**6), gaps=st.booleans())
def test_gains_of_any_shape(n, m, k, seed, gaps):
    X, W, H, known = profile((n, m), k, seed)
    X = with_gaps(X, known) if gaps else X
    found = equilibrium(observed(X) if gaps else X, W, H)
    assert (found.row_gains >= 0).all()
    assert (found.column_gains >= 0).all()
    assert_allclose(found.row_gains, row_gains(X, W, H.T), atol=1e-8)
    assert_allclose(found.column_gains, row_gains(X.T, H.T, W), atol=1e-8)


def test_what_is_not_known_changes_nothing():
    X, W, H, known = profile()
    others = np.where(known, X, 1e3 * np.random.default_rng(1).random(X.shape))
    one, other = (observed(np.ma.array(values, mask=~known)) for values in (X, others))
    assert_array_equal(equilibrium(one, W, H).row_gains, equilibrium(other, W, H).row_gains)
    assert_array_equal(equilibrium(one, W, H).column_gains, equilibrium(other, W, H).column_gains)
    assert equilibrium(others, W, H).epsilon > 2 * equilibrium(one, W, H).epsilon


def test_a_gain_is_what_the_error_falls_by():
    X, W, H, known = profile()
    for matrix in (as_matrix(X), observed(with_gaps(X, known))):
        before = equilibrium(matrix, W, H)
        i = int(before.row_gains.argmax())
        cells = known[i] if matrix.stored < X.size else np.ones(X.shape[1], bool)
        moved = W.copy()
        moved[i] = nnls(H.T[cells], X[i, cells])[0]
        fall = 0.5 * (matrix.squared_distance(W, H.T.copy()) - matrix.squared_distance(moved, H.T.copy()))
        assert before.row_gains[i] == pytest.approx(fall)
        after = equilibrium(matrix, moved, H)
        assert after.row_gains[i] == pytest.approx(0, abs=1e-12)
        others = np.arange(len(X)) != i
        assert_allclose(after.row_gains[others], before.row_gains[others], atol=1e-13)


@pytest.mark.parametrize("form", EQUILIBRIUM_FORMS)
def test_nobody_gains_at_an_exact_factorization(form):
    _, W, H, _ = profile()
    found = equilibrium(EQUILIBRIUM_FORMS[form](W @ H), W, H)
    assert found.holds(1e-20)
    assert not equilibrium(EQUILIBRIUM_FORMS[form](W @ H), 1.01 * W, H).holds(1e-6)


def test_nobody_gains_where_known_cells_are_met():
    _, W, H, known = profile()
    X = with_gaps(W @ H, known)
    X[4], X[:, 7] = np.nan, np.nan
    assert equilibrium(observed(X), W, H).holds(1e-20)
    filled = np.nan_to_num(X)
    assert not equilibrium(filled, W, H).holds(1e-3)


@pytest.mark.parametrize("form", ["C order", "csr", "observed"])
def test_nobody_gains_at_a_converged_factorization(form):
    X = profile((30, 20), seed=5)[0]
    model = NMF(3, solver="bpp", tol=0, max_iter=3000, random_state=0)
    W = model.fit_transform(X)
    found = equilibrium(EQUILIBRIUM_FORMS[form](X), W, model.components_)
    assert found.holds(1e-12, relative=True)
    early = NMF(3, solver="mu", tol=0, max_iter=3, random_state=0, init="random").fit(X)
    assert not equilibrium(EQUILIBRIUM_FORMS[form](X), early.transform(X), early.components_).holds(
        1e-12, relative=True
    )


def test_epsilon_is_the_largest_gain_of_all():
    X, W, H, _ = profile()
    found = equilibrium(X, W, H)
    assert found.epsilon == max(found.row_gains.max(), found.column_gains.max()) > 0
    assert found.relative_epsilon == found.epsilon / found.energy
    assert found.holds(found.epsilon)
    assert not found.holds(0.99 * found.epsilon)
    assert found.holds(found.relative_epsilon, relative=True)
    assert equilibrium(np.zeros((2, 2)), np.zeros((2, 1)), np.zeros((1, 2))).relative_epsilon == 0


def test_gains_grow_with_the_square_of_the_unit():
    X, W, H, known = profile()
    for make in (np.asarray, observed):
        data = with_gaps(X, known) if make is observed else X
        one, other = equilibrium(make(data), W, H), equilibrium(make(10 * data), 10 * W, H)
        assert_allclose(other.row_gains, 100 * one.row_gains, rtol=1e-9)
        assert other.relative_epsilon == pytest.approx(one.relative_epsilon)


def test_a_scale_moved_between_the_factors_changes_nothing():
    X, W, H, known = profile()
    scale = np.array([1e-3, 1.0, 1e4])
    for matrix in (X, observed(with_gaps(X, known))):
        one, other = equilibrium(matrix, W, H), equilibrium(matrix, W * scale, H / scale[:, None])
        assert_allclose(other.row_gains, one.row_gains, atol=1e-9)
        assert_allclose(other.column_gains, one.column_gains, atol=1e-9)


def test_arrays_in_float32_are_looked_at_in_float64():
    X, W, H, known = profile()
    X = X.astype(np.float32)
    for form in (X, sp.csr_array(X), observed(with_gaps(X, known))):
        wide = observed(with_gaps(X, known), "float64") if hasattr(form, "by_row") else X.astype(float)
        assert_allclose(equilibrium(form, W, H).row_gains, equilibrium(wide, W, H).row_gains, atol=1e-12)
    narrow = equilibrium(as_matrix(X), W, H)
    assert narrow.epsilon == pytest.approx(equilibrium(X, W, H).epsilon, rel=1e-4)


def test_threads_change_nothing(monkeypatch):
    X, W, H, known = profile((200, 60))
    matrix = observed(with_gaps(X, known))
    alone = equilibrium(matrix, W, H)
    monkeypatch.setattr(runtime, "SMALL_WORK", 0)
    with runtime.limit_kernel_threads(3):
        shared = equilibrium(matrix, W, H)
    assert_array_equal(shared.row_gains, alone.row_gains)
    assert_array_equal(shared.column_gains, alone.column_gains)


def test_what_is_no_profile_is_refused():
    X, W, H, _ = profile()
    with pytest.raises(ShapeError, match="40 × 25"):
        equilibrium(X, W, H.T)
    with pytest.raises(ShapeError):
        equilibrium(X, W[:, :2], H)
    with pytest.raises(DataError, match="W has"):
        equilibrium(X, -W, H)
    with pytest.raises(DataError, match="H has"):
        equilibrium(X, W, H * np.nan)
    with pytest.raises(DataError, match="NaN"):
        equilibrium(with_gaps(X, X > 0.5), W, H)


K, M = 4, 14
GAMES = {
    "stratified": Game(),
    "sequential": Game(Raster()),
    "random": Game(Shuffled()),
    "constant": Game(Stratified(blocks=3), ConstantStep(0.05)),
    "decaying": Game(Raster(), DecayingStep(0.05)),
    "shaped": Game(self_play=ShrinkOthers(0.9)),
    "led": Game(leader="rows"),
}


def data(rows=60, columns=M, seed=0):
    rng = np.random.default_rng(seed)
    return rng.gamma(0.5, size=(rows, K)) @ rng.gamma(0.5, size=(K, columns)) + 0.1 * rng.random((rows, columns))


def shards_of(X, parties=4, form=as_matrix):
    parts = np.array_split(X, parties)
    return [Shard(f"p{i:02d}", form(part), key(7, f"p{i:02d}")) for i, part in enumerate(parts)]


def run(program, shards, exchanges=8, engine=Sequential(), resume=None, reduction=PlainReduction(), **more):
    return list(engine.run(program, shards, Schedule(exchanges, 3, **more), reduction=reduction, resume=resume))


@pytest.mark.parametrize(("parties", "columns"), [(1, 14), (3, 14), (4, 14), (5, 14), (4, 3), (7, 2)])
def test_traffic_is_the_formula(parties, columns):
    program, shards = FederatedGame(K), shards_of(data(columns=columns), parties)
    width = block_width(parties, columns)
    for done in run(program, shards, 2 * parties, Sequential(record=True)):
        for _, _, message in done.traffic:
            assert message.signature == (
                ("H", (K, width), "float64"),
                ("place", (3,), "int64"),
                ("totals", (6,), "float64"),
            )
            assert message.nbytes == 8 * (K * width + 3 + 6) + 8
        assert set(done.bytes_up.values()) == {8 * (K * width + 9) + 8}
        assert done.bytes_down == 8 * (K * columns + 3 + 2) + 8
        assert {name: array.shape for name, array in done.model.arrays.items()} == {
            "H": (K, columns),
            "turn": (3,),
            "pace": (2,),
        }


def test_nothing_of_rows_or_weights_is_sent():
    shards = shards_of(data())
    rounds = run(FederatedGame(K), shards, 8, Sequential(record=True))
    private = np.concatenate(
        [shard.matrix.X.ravel() for shard in shards]
        + [done.checkpoint.parties[shard.name].W.ravel() for done in rounds for shard in shards]
    )
    for done in rounds:
        for _, _, message in done.traffic:
            sent = np.concatenate([np.asarray(array, np.float64).ravel() for array in message.arrays.values()])
            assert not np.isin(sent[sent != 0], private[private != 0]).any()
        assert not np.isin(done.model["H"], private[private != 0]).any()


@pytest.mark.parametrize("name", GAMES)
def test_engines_agree_to_the_bit_and_resumed_runs_are_uninterrupted(name):
    program, shards = FederatedGame(K, GAMES[name]), shards_of(data())
    whole = run(program, shards, 10)
    for engine in (Sequential(shuffle=5), Parallel(3)):
        for done, other in zip(whole, run(program, shards[::-1], 10, engine), strict=True):
            assert_array_equal(done.model["H"], other.model["H"])
    for middle in (1, 4, 6):
        rest = run(program, shards, 10, resume=whole[middle - 1].checkpoint)
        for done, other in zip(whole[middle:], rest, strict=True):
            assert_array_equal(done.model["H"], other.model["H"])


@pytest.mark.parametrize("form", [as_matrix, observed], ids=lambda f: f.__name__)
def test_a_sweep_between_parties_is_a_sequential_play_of_all_cells(form):
    """Party p plays block (p + s) mod N in exchange s: one after the other, by hand, from the same start."""
    X, parties = data(), 4
    shards, step = shards_of(X, parties, form), ConstantStep(0.05)
    program = FederatedGame(K, Game(Raster(), step))
    Ht = stream(3, "start").random((M, K))
    weights = [initial_weights(shard.matrix, Ht) for shard in shards]
    for done in run(program, shards, 8):
        stratum = done.index % parties
        for p, shard in enumerate(shards):
            span = block_span((p + stratum) % parties, parties, M)
            stood = Game(Raster(), step).sweep(shard.matrix, GameState(weights[p], Ht), 0, columns=span)
            weights[p], Ht = stood.W, stood.Ht
        assert_array_equal(done.model["H"], Ht.T)
        assert program.turn(done.model).ends_round == (stratum == parties - 1)


@pytest.mark.parametrize("order", [Stratified(), Raster(), Simultaneous(), Alternating()], ids=repr)
def test_one_party_plays_the_sweeps_of_a_game(order):
    matrix, game, step = as_matrix(data()), Game(order), SafeStep()
    rounds = run(FederatedGame(K, game), shards_of(data(), 1), 12)
    Ht = stream(3, "start").random((M, K))
    game_state, pace, before = GameState(initial_weights(matrix, Ht), Ht), 1.0, np.inf
    for done in rounds:
        error = matrix.squared_distance(game_state.W, game_state.Ht)
        game_state = game.sweep(matrix, game_state, done.index, pace=pace, residual_norm=np.sqrt(error))
        seen = game_state.squared_error if order.plays_cells else error
        pace, before = step.next_pace(pace, done.index, before, seen), seen
        assert_array_equal(done.model["H"], game_state.Ht.T)
        share = matrix.squared_distance(game_state.W, game_state.Ht) / matrix.squared_norm
        assert done.metrics["relative_error"] == pytest.approx(np.sqrt(share))
        assert done.metrics["objective"] == pytest.approx(share)


def test_repeats_play_a_block_several_times():
    shards = shards_of(data(), 1)
    game = Game(Raster(), ConstantStep(0.05))
    twice = run(FederatedGame(K, game, repeats=2), shards, 3)[-1]
    plain = run(FederatedGame(K, game), shards, 6)[-1]
    assert_array_equal(twice.model["H"], plain.model["H"])
    for bad in (0, 1.5, True):
        with pytest.raises(ParameterError, match="repeats"):
            FederatedGame(K, repeats=bad)


def test_unlike_parties_reach_an_equilibrium_of_all_rows():
    """Steps that were those of a party's own norms would give the rows of each another weight."""
    X = data(60)
    X[:15] *= 30
    shards, program = shards_of(X), FederatedGame(K)
    done = run(program, shards, 4 * 400)[-1]
    W = np.concatenate([done.checkpoint.parties[shard.name].W for shard in shards])
    assert equilibrium(X, W, done.model["H"]).relative_epsilon < 2e-6


def test_columns_without_a_party_wait_and_nothing_runs_away():
    program, shards = FederatedGame(K), shards_of(data())
    absent = {index: frozenset({"p01"}) for index in (1, 2, 5)} | {7: frozenset({"p00", "p02", "p03"})}
    before = None
    for done in run(program, shards, 12, absent=absent):
        if before is not None:
            stratum, missing = done.index % 4, absent.get(done.index, frozenset())
            for p in range(4):
                first, last = block_span((p + stratum) % 4, 4, M)
                stays = f"p{p:02d}" in missing
                same = np.array_equal(done.model["H"][:, first:last], before.model["H"][:, first:last])
                assert same == (stays or first == last)
                if stays:
                    assert done.checkpoint.parties[f"p{p:02d}"] is before.checkpoint.parties[f"p{p:02d}"]
        before = done


def test_a_given_step_is_not_called_too_large_because_somebody_comes_late():
    """The error that the game began with is that of everybody, whenever they began."""
    absent = {index: frozenset({"p02", "p03"}) for index in range(6)}
    program, shards = FederatedGame(K, Game(Raster(), ConstantStep(0.01))), shards_of(data())
    rounds = run(program, shards, 80, absent=absent)
    server = rounds[-1].checkpoint.server
    assert server.squared_norm == pytest.approx(np.square(data()).sum())
    assert server.seen_before < server.first_error


def test_more_parties_than_columns():
    rounds = run(FederatedGame(K), shards_of(data(30, 3), 6), 30)
    first, last = rounds[0].model["H"], rounds[-1].model["H"]
    assert last.shape == (K, 3)
    assert (last >= 0).all()
    assert not np.array_equal(first, last)


@pytest.mark.parametrize("name", ["stratified", "random", "constant", "shaped"])
def test_who_has_no_columns_in_an_exchange_does_not_play(name):
    shards, before = shards_of(data(30, 3), 6), None
    for done in run(FederatedGame(K, GAMES[name]), shards, 18, Sequential(record=True)):
        for sender, _, message in done.traffic:
            first, last = block_span(int(message["place"][0]), 6, 3)
            if first == last:
                assert message["totals"][0] == 0
                if before is not None:
                    assert done.checkpoint.parties[sender].W is before.parties[sender].W
        before = done.checkpoint


def test_masks_would_hide_nothing_and_say_so():
    with pytest.raises(CompositionError, match=r"one party alone.*method='exact'"):
        run(FederatedGame(K), shards_of(data()), reduction=PairwiseMasks())


@pytest.mark.parametrize("order", [Simultaneous(), Alternating()], ids=repr)
def test_all_at_once_takes_all_rows(order):
    with pytest.raises(CompositionError, match=r"needs all rows.*ProjectedGradient"):
        run(FederatedGame(K, Game(order)), shards_of(data()))


def test_nobody_joins_a_game_that_has_begun():
    shards = shards_of(data())
    begun = run(FederatedGame(K), shards[:3], 3)[-1].checkpoint
    with pytest.raises(PartyError, match=r"has 3 blocks of columns, but party 'p03' started with 4|not 4 ×"):
        run(FederatedGame(K), shards, 5, resume=begun)


@dataclass(frozen=True)
class Hostile:
    """A program one of whose parties sends something else."""

    inner: Any
    change: Any

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def local(self, shard, party, model):
        party, message = self.inner.local(shard, party, model)
        arrays = {name: np.array(array) for name, array in message.arrays.items()}
        if shard.name == "p01":
            self.change(arrays)
        return party, Message(arrays, message.weight)


def put(name, place, value):
    def change(arrays):
        arrays[name][place] = value

    return change


HOSTILE = {
    "another's block": (put("place", 0, 0), PartyError, "same block"),
    "no block": (put("place", 0, 4), PartyError, "does not fit"),
    "a negative block": (put("place", 0, -1), UploadError, "negative"),
    "more blocks": (put("place", 1, 10**15), PartyError, "in 4 blocks. Restart"),
    "more columns": (put("place", 2, 10**15), PartyError, "the model has 14 columns in 4 blocks"),
    "other columns": (put("place", 2, 16), PartyError, "the model has 14 columns in 4 blocks"),
    "NaN": (put("H", (0, 1), np.nan), DivergenceError, "NaN"),
    "infinite totals": (put("totals", 0, np.inf), DivergenceError, "infinite"),
    "negative": (put("H", (0, 1), -1.0), UploadError, "negative"),
    "negative totals": (put("totals", 2, -1.0), UploadError, "negative"),
}


@pytest.mark.parametrize("engine", [Sequential(), Parallel(2)], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_uploads_are_refused(name, engine):
    change, error, words = HOSTILE[name]
    with pytest.raises(error, match=words):
        run(Hostile(FederatedGame(K), change), shards_of(data()), engine=engine)


@pytest.mark.parametrize("name", ["NaN", "negative"])
def test_a_party_that_is_left_out_is_absent(name):
    program, shards = FederatedGame(K), shards_of(data())
    before = run(program, shards, 3)[-1].checkpoint
    spoiled = run(Hostile(program, HOSTILE[name][0]), shards, 6, resume=before, on_party_error="skip")
    absent = run(program, shards, 6, resume=before, absent={i: frozenset({"p01"}) for i in (3, 4, 5)})
    for done, other in zip(spoiled, absent, strict=True):
        assert_array_equal(done.model["H"], other.model["H"])
        assert set(done.refused) == {"p01"}


@pytest.mark.parametrize("parties", [1, 3])
@pytest.mark.parametrize("step", [ConstantStep, DecayingStep], ids=lambda s: s.__name__)
@pytest.mark.parametrize("order", [Raster(), Shuffled(), Stratified()], ids=repr)
@pytest.mark.parametrize("eta", [300.0, 1e30])
def test_a_step_too_large_ends_a_run(order, step, parties, eta):
    with pytest.raises(DivergenceError, match="Use a smaller step, or a safe step"):
        run(FederatedGame(K, Game(order, step(eta))), shards_of(100 * data(), parties), 50 * parties)


def test_a_run_away_is_an_outcome():
    """After the first sweep there is a model to keep."""
    task = FederatedGame(K, Game(Shuffled(), ConstantStep(0.1)))
    shards = shards_of(20 * data(), 1)
    rounds = Sequential().run(task, shards, Schedule(20, 3), reduction=PlainReduction())
    training = Training()
    steps = measure(rounds, ends_round=lambda done: task.turn(done.model).ends_round)
    list(train(steps, StoppingRule(0.0), training))
    assert training.outcome is Outcome.DIVERGED
    fit = FederatedFit(task, shards, Schedule(20, 3), StoppingRule(0.0))
    with pytest.warns(DivergenceWarning):
        finish_with_warnings(fit, run_fit(fit))


@pytest.mark.parametrize("order", [Raster(), Shuffled(), Stratified()], ids=repr)
def test_meetings_that_settle_in_noise_are_no_run_away(order):
    """With a constant step the error wanders about where it settles, for as long as one likes, even from a solution."""
    X = data() * (np.random.default_rng(1).random((60, M)) < 0.7)
    shards = shards_of(X, 1)
    for eta in (0.02, 0.1):
        program = FederatedGame(K, Game(order, ConstantStep(eta)))
        done = run(program, shards, 400)[-1]
        settled = done.checkpoint
        again = FederatedGame(K, Game(order, ConstantStep(eta)))
        server, model = again.start_from(done.model["H"].T)
        weights = type(settled.parties["p00"])(0, 1, 5, settled.parties["p00"].W)
        resume = type(settled)(0, {"p00": weights}, server, model)
        assert len(run(again, shards, 100, resume=resume)) == 100


@pytest.mark.parametrize("parties", [1, 3])
@pytest.mark.parametrize("step", [SafeStep(), ConstantStep(1e-3)], ids=repr)
def test_a_collapse_by_self_play_leaves_an_empty_model_and_says_so(step, parties):
    game = Game(step=step, self_play=ShrinkSmallest(0))
    for program in (FederatedGame(1, game), LocalAveraging(1, game=game)):
        shards = shards_of(data(), parties)
        measures = SimulationMeasures(program, shards)
        fit = FederatedFit(program, shards, Schedule(10, 3), StoppingRule(0.0), measures=measures)
        with pytest.warns(EmptyModelWarning):
            finish_with_warnings(fit, run_fit(fit))


def test_nothing_at_all_is_no_collapse():
    rounds = run(FederatedGame(K), [Shard("p00", as_matrix(np.zeros((5, 4))))], 5)
    assert not np.isnan(rounds[-1].model["H"]).any()


@pytest.mark.parametrize("name", ["stratified", "random", "constant", "shaped"])
def test_consensus_of_a_game_is_play_and_the_mean(name):
    shards, game, steps = shards_of(data(), 3), GAMES[name], 3
    program = LocalAveraging(K, game=game, steps=steps)
    assert isinstance(program, LocalAveraging)
    Ht, own, paces = stream(3, "start").random((M, K)), {}, {}
    for done in run(program, shards, 3):
        mean = np.zeros((K, M))
        for shard in shards:
            W = own.get(shard.name)
            W = program.solver.solve_rows(shard.matrix, Ht) if W is None else W
            game_state, pace, before = GameState(W, Ht), paces.get(shard.name, 1.0), np.inf
            for i in range(done.index * steps, done.index * steps + steps):
                draw = stream(shard.secret, "play", shard.name, i)
                game_state = game.sweep(shard.matrix, game_state, i, pace=pace, generator=draw)
                pace, before = game.step.next_pace(pace, i, before, game_state.squared_error), game_state.squared_error
            own[shard.name], paces[shard.name] = game_state.W, pace
            mean += shard.matrix.shape[0] * game_state.Ht.T / len(data())
        Ht = np.ascontiguousarray(mean.T)
        assert_allclose(done.model["H"], mean, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("order", [Raster(), Stratified(), Simultaneous()], ids=repr)
def test_consensus_of_a_game_with_too_large_a_step_ends(order):
    with pytest.raises(DivergenceError, match="Use a smaller step"):
        run(LocalAveraging(K, game=Game(order, ConstantStep(1e9)), steps=60), shards_of(data(), 3))


def test_a_game_has_neither_sketch_nor_pull():
    from partsong.solvers.coupling import ProximalTerm

    with pytest.raises(CompositionError, match="no proximal term"):
        LocalAveraging(K, game=Game(), coupling=ProximalTerm(0.1))
