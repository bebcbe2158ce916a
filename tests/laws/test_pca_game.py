"""Laws of the PCA game: utilities, gradients on the sphere, safe steps, and what players see of each other."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from partsong.core.interfaces import Outcome
from partsong.data.centered import CenteredMatrix
from partsong.errors import ParameterError
from partsong.solvers.pca_game import PLAYS, EigenGame, GameRun, Profile

SAFE = [EigenGame(play) for play in PLAYS]
STEPS = [EigenGame(play, step, decay) for play in PLAYS for step in (None, 1e-3, 1.0, 1e6) for decay in (0.0, 0.5)]


@st.composite
def games(draw):
    """Data (n × d) of any spread, perhaps of low rank, and a profile of k players, some of whom may be close."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, d = draw(st.integers(2, 12)), draw(st.integers(2, 8))
    rank, k = draw(st.integers(1, min(n, d))), draw(st.integers(1, min(n, d)))
    X = rng.standard_normal((n, rank)) * np.logspace(0, -draw(st.integers(0, 2)), rank)
    V = rng.standard_normal((d, k)) + draw(st.sampled_from([0.0, 1.0, 10.0])) * rng.standard_normal((d, 1))
    return X @ rng.standard_normal((rank, d)), V / np.linalg.norm(V, axis=0)


def matrix_of(X):
    return X.T @ X / len(X)


def profile_of(X, V):
    return Profile(V, matrix_of(X) @ V)


def moved(game, X, V, time=0):
    return game.move(profile_of(X, V), lambda U: matrix_of(X) @ U, time)


def printed_utility(M, V, i, v):
    parents = sum((v @ M @ V[:, l]) ** 2 / (V[:, l] @ M @ V[:, l]) for l in range(i))
    return v @ M @ v - parents


def own_matrix(M, V, i):
    """A_i."""
    return M - sum(np.outer(M @ V[:, l], M @ V[:, l]) / (V[:, l] @ M @ V[:, l]) for l in range(i))


@given(games())
def test_utilities_and_gradients_are_those_printed(game):
    X, V = game
    M, profile = matrix_of(X), profile_of(X, V)
    scale = profile.variances.max()
    for i in range(V.shape[1]):
        v = V[:, i]
        inner = X @ v - sum((X @ v) @ (X @ V[:, l]) / np.sum((X @ V[:, l]) ** 2) * (X @ V[:, l]) for l in range(i))
        printed = 2 * X.T @ inner / len(X)
        utility, gradient = profile.view(i).gradient()
        assert_allclose(utility, printed_utility(M, V, i, v), atol=1e-9 * scale)
        assert_allclose(gradient, printed - (printed @ v) * v, atol=1e-8 * scale)
        assert abs(gradient @ v) <= 1e-9 * scale, "tangent to the sphere"
    assert_allclose(profile.utilities(), [profile.view(i).gradient()[0] for i in range(V.shape[1])])


@given(games(), st.integers(0, 2**32 - 1))
def test_gradient_is_the_slope_of_the_utility_along_the_sphere(game, seed):
    X, V = game
    M, profile = matrix_of(X), profile_of(X, V)
    for i in range(V.shape[1]):
        v = V[:, i]
        direction = np.random.default_rng(seed).standard_normal(len(v))
        direction -= (direction @ v) * v
        direction /= np.linalg.norm(direction)
        ahead, behind = (np.cos(t) * v + np.sin(t) * direction for t in (1e-5, -1e-5))
        slope = (printed_utility(M, V, i, ahead) - printed_utility(M, V, i, behind)) / 2e-5
        assert_allclose(profile.view(i).gradient()[1] @ direction, slope, atol=1e-5 * profile.variances.max())


@pytest.mark.parametrize("game", STEPS, ids=repr)
@given(data=games())
def test_vectors_are_unit_after_every_move_and_arguments_untouched(game, data):
    X, V = data
    before = V.copy()
    for time in range(3):
        V = moved(game, X, V, time).V
        assert_allclose(np.linalg.norm(V, axis=0), 1, rtol=1e-12)
    assert_array_equal(before, data[1])


@given(games())
def test_the_shift_makes_a_players_matrix_semidefinite(game):
    X, V = game
    M, profile = matrix_of(X), profile_of(X, V)
    scale = np.linalg.norm(M, 2)
    for i in range(V.shape[1]):
        safe_shift = profile.view(i).safe_shift()
        assert safe_shift >= -np.linalg.eigvalsh(own_matrix(M, V, i))[0] - 1e-6 * scale
        assert safe_shift == 0 or i >= 2, "one parent overlaps with nobody"


def test_parents_that_are_singular_vectors_need_no_shift():
    X = np.random.default_rng(0).standard_normal((30, 6)) * np.arange(6, 0, -1)
    V = np.linalg.svd(X)[2].T
    assert profile_of(X, V).view(5).safe_shift() <= 1e-13 * np.linalg.norm(matrix_of(X), 2)


@pytest.mark.parametrize("game", SAFE, ids=repr)
@given(data=games())
def test_safe_steps_gain_half_of_what_they_promise(game, data):
    X, V = data
    for _ in range(4):
        after = moved(game, X, V)
        for i in range(V.shape[1]):
            seen = np.column_stack([after.V[:, :i], V[:, i:]]) if game.play == "sequential" else V
            view = profile_of(X, seen).view(i)
            utility, gradient = view.gradient()
            way = np.linalg.norm(gradient) / (2 * max(utility + view.safe_shift(), view.floor))
            promise = way * np.linalg.norm(gradient) / (1 + way * way)
            gain = view.utility(after.V[:, i], after.MV[:, i]) - utility
            assert gain >= 0.499 * promise - 1e-9 * after.variances.max()
        V = after.V


@given(games())
def test_a_safe_move_of_the_first_player_is_a_turn_of_power_iteration(game):
    X, V = game
    M = matrix_of(X)
    expected = M @ V[:, 0] / np.linalg.norm(M @ V[:, 0])
    for rules in SAFE:
        assert_allclose(moved(rules, X, V).V[:, 0], expected, atol=1e-7)


@given(games())
def test_children_see_where_their_parents_went_or_where_they_stood(game):
    X, V = game
    in_turn, at_once = (moved(EigenGame(play, step=0.01), X, V).V for play in PLAYS)
    for i in range(V.shape[1]):
        parents_gone = np.column_stack([in_turn[:, :i], V[:, i:]])
        assert_allclose(in_turn[:, i], moved(EigenGame("simultaneous", step=0.01), X, parents_gone).V[:, i])
        alone = np.column_stack([V[:, : i + 1]])
        assert_allclose(at_once[:, i], moved(EigenGame("simultaneous", step=0.01), X, alone).V[:, i])


@pytest.mark.parametrize("game", STEPS, ids=repr)
def test_singular_vectors_are_an_equilibrium(game):
    X = np.random.default_rng(0).standard_normal((30, 6)) * np.arange(6, 0, -1)
    V = np.linalg.svd(X)[2][:4].T
    assert profile_of(X, V).residuals().max() < 1e-12
    if game.step != 1e6:  # at which rounding is blown up
        assert_allclose(moved(game, X, V).V, V, atol=1e-10)


def test_decay_divides_steps():
    rng = np.random.default_rng(1)
    X, V = rng.standard_normal((9, 5)), np.linalg.qr(rng.standard_normal((5, 3)))[0]
    late = moved(EigenGame(step=0.3, decay=0.25), X, V, time=8).V
    assert_allclose(late, moved(EigenGame(step=0.1), X, V).V, rtol=1e-12)


def test_players_do_not_depend_on_their_children():
    X = np.random.default_rng(2).standard_normal((40, 7))
    few, more = (GameRun(EigenGame(), k, seed=5, max_iter=9, tol=0).play(CenteredMatrix.of(X)) for k in (2, 5))
    assert_allclose(few.profile.V, more.profile.V[:, :2], atol=1e-12)
    assert_allclose([row.utilities for row in few.history], [row.utilities[:2] for row in more.history])


def test_one_batch_of_all_rows_is_no_batch():
    X = np.random.default_rng(3).standard_normal((40, 7))
    whole, batch = (
        GameRun(EigenGame(), 3, max_iter=9, tol=0, batch_size=b).play(CenteredMatrix.of(X)) for b in (None, 40)
    )
    assert_allclose(batch.profile.V, whole.profile.V, atol=1e-12)
    assert batch.outcome is Outcome.MAX_ROUNDS


@pytest.mark.parametrize("size", [3, 7, 19, 20, 39, 40])
def test_every_row_is_in_one_batch_and_none_is_small(size):
    match = GameRun(EigenGame(), 3, batch_size=size)
    first, second = (list(match._batches(40, 40 // size, index)) for index in (0, 1))
    assert sorted(np.concatenate(first)) == list(range(40))
    assert min(map(len, first)) >= size
    assert size >= 20 + 1 or [list(rows) for rows in first] != [list(rows) for rows in second]


@pytest.mark.parametrize("form", [np.asarray, np.asfortranarray, sp.csr_array, sp.csc_array])
@pytest.mark.parametrize("offset", [0.0, 1e7])
def test_centring_is_done_in_products(form, offset):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((50, 8)) + offset
    data, C, V = CenteredMatrix.of(form(X)), X - X.mean(axis=0), rng.standard_normal((8, 2))
    assert_allclose(data.mean, X.mean(axis=0), rtol=1e-14)
    assert_allclose(data.energy, np.square(C).sum(), rtol=1e-8)
    assert_allclose(data.times(V), C @ V, atol=1e-15 * offset * 50 + 1e-12)
    assert_allclose(data.covariance_times(V), C.T @ C @ V / 50, atol=1e-15 * offset * 50 + 1e-12)
    some = data.rows(np.array([3, 4, 11]))
    assert_allclose(some.times(V), C[[3, 4, 11]] @ V, atol=1e-15 * offset * 50 + 1e-12)


@pytest.mark.parametrize("settings", [{"play": "both"}, {"step": 0.0}, {"step": np.inf}, {"decay": -1.0}])
def test_rules_that_make_no_sense_are_refused(settings):
    with pytest.raises(ParameterError):
        EigenGame(**settings)
