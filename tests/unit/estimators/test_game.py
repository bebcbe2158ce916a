"""Games through the estimators: NMF(solver="game"), missing values, and steps that are too large."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import scipy.sparse as sp
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import clone
from sklearn.exceptions import SkipTestWarning
from sklearn.utils.estimator_checks import parametrize_with_checks

import partsong
from partsong.core.interfaces import Outcome
from partsong.errors import (
    CompositionError,
    DataError,
    DivergenceError,
    DivergenceWarning,
    ParameterError,
    PartsongError,
)
from partsong.evaluation.equilibrium import equilibrium
from partsong.methods.game import FederatedGame
from partsong.solvers.game import ConstantStep, DecayingStep, Game, SafeStep, ShrinkOthers, ShrinkSmallest
from partsong.solvers.game_orders import Alternating, Raster, Shuffled, Simultaneous, Stratified
from partsong.training.result import EmptyModelWarning

ORDERS = [Raster(), Shuffled(), Stratified(), Simultaneous(), Alternating()]


def planted(n=60, m=20, k=3, noise=0.05, seed=0):
    rng = np.random.default_rng(seed)
    return rng.gamma(0.5, size=(n, k)) @ rng.gamma(0.5, size=(k, m)) + noise * rng.random((n, m))


def holes(shape, seed=1, density=0.7):
    return np.random.default_rng(seed).random(shape) >= density


def model_of(rank=3, **settings):
    return partsong.NMF(rank, **{"solver": "game", "random_state": 0, "max_iter": 200, **settings})


@parametrize_with_checks([partsong.NMF(n_components=2, solver="game", max_iter=20)])
@pytest.mark.filterwarnings(f"ignore::{SkipTestWarning.__module__}.{SkipTestWarning.__name__}")
def test_scikit_learn_checks(estimator, check):
    check(estimator)


@pytest.mark.parametrize("order", ORDERS, ids=repr)
@pytest.mark.parametrize("form", [np.asarray, np.asfortranarray, sp.csr_array, sp.csc_matrix], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=lambda d: d.__name__)
def test_every_order_explains_planted_data_in_every_form(order, form, dtype):
    X = planted().astype(dtype)
    model = model_of(solver=Game(order), max_iter=100)
    W = model.fit_transform(form(X))
    assert (W.dtype, model.components_.dtype) == (dtype, dtype)
    assert model.relative_error_ < 3 * partsong.NMF(3, random_state=0).fit(X).relative_error_
    error = np.linalg.norm(X - W @ model.components_) / np.linalg.norm(X)
    assert model.relative_error_ == pytest.approx(error, rel=1e-3)
    assert [row.iteration for row in model.history_] == [*range(1, model.n_iter_ + 1)]
    assert_allclose(model.transform(form(X)), W, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("solver", ["game", Game(), Game(Shuffled()), Game(Simultaneous())], ids=repr)
def test_the_same_seed_gives_the_same_bytes(solver):
    X = planted()
    one, again = (model_of(solver=solver, max_iter=30).fit(X) for _ in range(2))
    assert_array_equal(one.components_, again.components_)
    threaded = model_of(solver=solver, max_iter=30, n_threads=2).fit(X)
    assert_allclose(threaded.components_, one.components_, rtol=1e-9)


def test_whole_numbers_and_narrow_types_are_played():
    X = np.round(planted() * 10)
    there = model_of(max_iter=30).fit(X.astype(np.float64)).components_
    for dtype in (np.int64, np.uint8, np.int16):
        assert_allclose(model_of(max_iter=30, dtype="float64").fit(X.astype(dtype)).components_, there, rtol=1e-9)


@pytest.mark.parametrize("solver", ["game", Game(Alternating())], ids=repr)
def test_a_fit_comes_near_an_equilibrium(solver):
    X = planted()
    model = model_of(solver=solver, max_iter=400, tol=0)
    W = model.fit_transform(X)
    assert equilibrium(X, W, model.components_).relative_epsilon < 1e-4


def test_penalties_and_other_nonsense_are_refused():
    X = planted()
    for solver in ("game", Game(Raster())):
        with pytest.raises(ParameterError, match="no penalties"):
            model_of(solver=solver, alpha_W=0.1).fit(X)
        with pytest.raises(ParameterError, match="alpha_W must be zero or more"):
            model_of(solver=solver, alpha_W=-1.0).fit(X)
    with pytest.raises(ParameterError, match=r"Unknown solver 'games'.*game"):
        model_of(solver="games").fit(X)
    with pytest.raises(ParameterError, match="or a Game"):
        model_of(solver=Game).fit(X)
    with pytest.raises(ParameterError, match="Unknown missing"):
        model_of(missing="mean").fit(X)
    with pytest.raises(ParameterError, match='missing="ignore" needs solver="game"'):
        partsong.NMF(3, missing="ignore").fit(X)
    with pytest.raises(ParameterError, match=r"row_workers must have one entry for each of \d+ players; it has 3"):
        model_of(solver=Game(Stratified(row_workers=(0, 1, 2)))).fit(X)


def forms_of(values, unknown):
    pandas = pytest.importorskip("pandas")
    filled = np.where(unknown, np.nan, values)
    rows, columns = np.nonzero(~unknown)
    stored = sp.csr_array((values[~unknown], (rows, columns)), shape=values.shape)
    return {
        "NaN": filled,
        "frame": pandas.DataFrame(filled, columns=[f"g{j}" for j in range(values.shape[1])]),
        "csr": stored,
        "csc": stored.tocsc(),
        "coo": stored.tocoo(),
        "secure_aggregation": np.ma.array(values, mask=unknown),
    }


@pytest.mark.parametrize("order", ORDERS, ids=repr)
def test_cells_that_are_not_known_change_nothing(order):
    values = planted() * (np.random.default_rng(3).random((60, 20)) > 0.1)
    unknown = holes(values.shape)
    found = {}
    for name, X in forms_of(values, unknown).items():
        model = model_of(solver=Game(order), missing="ignore", max_iter=40)
        W = model.fit_transform(X)
        found[name] = model.components_
        error = np.linalg.norm((values - W @ model.components_)[~unknown]) / np.linalg.norm(values[~unknown])
        assert model.relative_error_ == pytest.approx(error, rel=1e-6)
        assert_array_equal(model.transform(X), W)
    for other in found.values():
        assert_array_equal(other, found["NaN"])
    moved = np.where(unknown, 1e3 * values + 5, values)
    again = model_of(solver=Game(order), missing="ignore", max_iter=40).fit(np.ma.array(moved, mask=unknown))
    assert_array_equal(again.components_, found["NaN"])


def test_known_cells_predict_those_that_are_not():
    values = planted(200, 40, noise=0.0)
    unknown = holes(values.shape)
    model = model_of(missing="ignore", max_iter=600, tol=0)
    W = model.fit_transform(np.where(unknown, np.nan, values))
    missed = np.linalg.norm((W @ model.components_ - values)[unknown]) / np.linalg.norm(values[unknown])
    assert missed < 0.1
    as_zeros = model_of(max_iter=100)
    guess = as_zeros.fit_transform(np.where(unknown, 0.0, values)) @ as_zeros.components_
    assert np.linalg.norm((guess - values)[unknown]) > 3 * missed * np.linalg.norm(values[unknown])


def test_a_table_without_holes_is_played_as_it_is():
    X = planted()
    whole = model_of(missing="ignore", init="random", max_iter=30).fit(X)
    plain = model_of(init="random", max_iter=30).fit(X)
    assert_allclose(whole.components_, plain.components_, rtol=1e-6, atol=1e-9)


def test_rows_and_columns_of_which_nothing_is_known():
    X = np.where(holes((30, 12)), np.nan, planted(30, 12))
    X[4], X[:, [2, 7]] = np.nan, np.nan
    model = model_of(missing="ignore")
    with pytest.warns(UserWarning, match="No cell is known in columns 2, 7"):
        W = model.fit_transform(X)
    assert not W[4].any()
    assert not model.components_[:, [2, 7]].any()
    assert model.components_[:, [0, 1, 3]].any(axis=0).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone = model.transform(np.full((2, 12), np.nan))
        sparse = model.transform(sp.csr_array((1, 12)))
    assert not alone.any()
    assert not sparse.any()
    for nothing in (np.full((4, 3), np.nan), sp.csr_array((4, 3))):
        with pytest.raises(DataError, match="X has no known cell"):
            model_of(missing="ignore").fit(nothing)


def test_bad_cells_are_bad_whether_or_not_others_are_missing():
    X = planted()
    for value, words in ((-1.0, "Negative"), (np.inf, r"[Ii]nfinite")):
        spoiled = np.where(holes(X.shape), np.nan, X)
        spoiled[3, 2] = value
        with pytest.raises(PartsongError, match=words):
            model_of(missing="ignore").fit(spoiled)
    with pytest.raises(PartsongError, match=r"NaN|[Mm]issing"):
        model_of().fit(np.where(holes(X.shape), np.nan, X))
    with pytest.raises(ParameterError, match="init='anchors' needs all cells"):
        model_of(missing="ignore", init="anchors").fit(np.where(holes(X.shape), np.nan, X))


def test_a_start_may_be_given_for_known_cells():
    X = np.where(holes((60, 20)), np.nan, planted())
    good = model_of(missing="ignore", max_iter=400)
    W = good.fit_transform(X)
    model = model_of(missing="ignore", init="custom", max_iter=1, tol=0).fit(X, W=W, H=good.components_)
    assert model.relative_error_ < 2 * good.relative_error_, "one sweep at full pace, in noise"


GAMES = {
    "name": "game",
    "usual": Game(),
    "constant": Game(Raster(), ConstantStep(0.01)),
    "decaying": Game(Shuffled(), DecayingStep(0.01, 0.5), ShrinkOthers(0.9)),
    "led": Game(Stratified(), SafeStep(), ShrinkSmallest(), "columns"),
    "at once": Game(Alternating()),
}


@pytest.mark.parametrize("name", GAMES)
@pytest.mark.parametrize("missing", ["refuse", "ignore"])
def test_a_saved_game_comes_back(name, missing, tmp_path):
    X = planted()
    X = np.where(holes(X.shape), np.nan, X) if missing == "ignore" else X
    model = model_of(solver=GAMES[name], missing=missing, max_iter=10, tol=1e-5).fit(X)
    model.save(tmp_path / "m.safetensors")
    again = partsong.NMF.load(tmp_path / "m.safetensors")
    assert again.missing == missing
    assert again.solver == ("game" if name in ("name", "usual") else GAMES[name])
    assert_array_equal(again.transform(X), model.transform(X))
    assert (again.tol, again.max_iter) == (1e-5, 10)
    refit = clone(again).set_params(random_state=0).fit(X)
    assert_array_equal(refit.components_, model.components_)


def test_a_game_of_parts_without_a_name_can_be_saved_and_transforms(tmp_path):
    X = np.where(holes((60, 20)), np.nan, planted())
    for solver in (Game(Stratified(blocks=3)), Game(step=SafeStep(1.5))):
        model = model_of(solver=solver, missing="ignore", max_iter=5).fit(X)
        model.save(tmp_path / "m.safetensors")
        again = partsong.NMF.load(tmp_path / "m.safetensors")
        assert again.solver == "game"
        assert_array_equal(again.transform(X), model.transform(X))


def test_a_federated_game_with_gaps_transforms_rows_with_gaps(tmp_path):
    X = np.where(holes((60, 20)), np.nan, planted())
    model = partsong.FederatedNMF(3, method="game", missing="ignore", rounds=3, random_state=0)
    model.fit({"north": X[:30], "south": X[30:]}).save(tmp_path / "m.safetensors")
    again = partsong.NMF.load(tmp_path / "m.safetensors")
    assert_allclose(again.transform(X), model.transform(X), rtol=1e-9, atol=1e-12)


def test_games_are_cloned_and_compared():
    model = model_of(solver=Game(Raster(), ConstantStep(0.1)), missing="ignore")
    other = clone(model)
    assert other.get_params() == model.get_params()
    assert other.solver == Game(Raster(), ConstantStep(0.1)) != Game()


@pytest.mark.parametrize("missing", ["refuse", "ignore"])
@pytest.mark.parametrize("step", [ConstantStep, DecayingStep], ids=lambda s: s.__name__)
@pytest.mark.parametrize("order", ORDERS, ids=repr)
@pytest.mark.parametrize("eta", [0.1, 3.0, 1e100])
def test_a_step_too_large_ends_as_every_fit_that_diverges(order, step, missing, eta):
    """With the best model before, or, in the first sweep, with an error: there is none."""
    X = 20 * planted()
    X = np.where(holes(X.shape), np.nan, X) if missing == "ignore" else X
    model = model_of(solver=Game(order, step(eta)), missing=missing, tol=0, max_iter=80)
    told = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model.fit(X)
        except DivergenceError as error:
            told = str(error)
    if told:
        assert "Use a smaller step, or a safe step" in told
        assert not hasattr(model, "components_")
        return
    assert model.outcome_ is Outcome.DIVERGED
    assert DivergenceWarning in {one.category for one in caught}
    assert np.isfinite(model.components_).all()
    assert model.relative_error_ <= 1 + 1e-9


@pytest.mark.parametrize("order", ORDERS, ids=repr)
def test_in_single_precision_as_well(order):
    model = model_of(solver=Game(order, ConstantStep(1e30)))
    with pytest.raises(DivergenceError, match="Use a smaller step"):
        model.fit(planted().astype(np.float32))


def test_exact_data_end_at_rest_and_not_in_a_refusal():
    """‖X − W H‖² by the trace formula may come out below zero."""
    rng = np.random.default_rng(0)
    X = np.outer(rng.random(30), rng.random(12))
    for order in ORDERS:
        for step in (SafeStep(), ConstantStep(0.05)):
            model = model_of(1, solver=Game(order, step), max_iter=400).fit(X)
            assert model.outcome_ is not Outcome.DIVERGED
            assert model.relative_error_ < 1e-3
    good = partsong.NMF(1, random_state=0).fit(X)
    model = model_of(1, solver=Game(Raster(), ConstantStep(0.05)), init="custom", max_iter=50, tol=0)
    model.fit(X, W=good.transform(X), H=good.components_)
    assert model.outcome_ is Outcome.MAX_ROUNDS, "rounding is no run-away"


def test_a_start_of_zeros_is_refused():
    X = planted()
    for step in (SafeStep(), ConstantStep(0.01)):
        model = model_of(solver=Game(step=step), init="custom", max_iter=5)
        with pytest.raises(ParameterError, match="full of zeros"):
            model.fit(X, W=np.zeros((60, 3)), H=np.zeros((3, 20)))


def test_units_do_not_matter():
    X = planted()
    plain = model_of(init="random", max_iter=30, tol=0).fit(X)
    for power in (-80, -20, 30, 120):
        scaled = model_of(init="random", max_iter=30, tol=0).fit(X * 2.0**power)
        assert_allclose(scaled.components_, plain.components_, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (9, 1), (2, 3)])
@pytest.mark.parametrize("order", ORDERS, ids=repr)
def test_small_tables_and_ranks_beyond_them(order, shape):
    X = np.random.default_rng(0).random(shape)
    for k in (1, 5):
        model = model_of(k, solver=Game(order), max_iter=50)
        W = model.fit_transform(X)
        assert np.isfinite(W).all()
        assert model.relative_error_ < 0.6


def test_cells_of_tensors_become_arrays():
    torch = pytest.importorskip("torch")
    X = planted()
    there = model_of(max_iter=5).fit(torch.from_numpy(X)).components_
    assert_array_equal(there, model_of(max_iter=5).fit(X).components_)


def test_federations_play():
    X = planted(120)
    parts = np.array_split(X, 4)
    model = partsong.FederatedNMF(3, method="game", rounds=100, tol=0, random_state=0).fit(parts)
    assert (model.n_iter_, len(model.history_)) == (100, 400)
    assert model.relative_error_ < 1.5 * partsong.NMF(3, random_state=0).fit(X).relative_error_
    sent = {row.bytes_up for row in model.history_}
    assert sent == {4 * (8 * (3 * 5 + 3 + 6) + 8)}
    together = partsong.FederatedNMF(3, method="game", rounds=20, tol=0, random_state=0, n_jobs=1).fit([X])
    assert len(together.history_) == 20
    known = [row for row in model.history_ if not np.isnan(row.relative_error)]
    assert len(known) == 100


def test_a_federation_that_runs_away_says_so():

    parts = np.array_split(planted(120), 4)
    too_fast = FederatedGame(3, game=Game(step=ConstantStep(1e30)))
    with pytest.raises(DivergenceError, match="Use a smaller step"):
        partsong.FederatedNMF(method=too_fast, rounds=80, random_state=0).fit(parts)
    with pytest.raises(CompositionError, match="all players at once"):
        partsong.FederatedNMF(method=FederatedGame(3, game=Game(order=Simultaneous()))).fit(parts)


@pytest.mark.parametrize("step", [SafeStep(), ConstantStep(1e-3), ConstantStep(0.5)], ids=repr)
def test_self_play_that_shrinks_everything_away_leaves_an_empty_model_and_says_so(step):
    model = model_of(1, solver=Game(Raster(), step, ShrinkSmallest(0)))
    with pytest.warns(EmptyModelWarning):
        model.fit(planted())
    assert not model.components_.any()
