"""partsong.FederatedNMF: parties in, shared components out."""

from __future__ import annotations

import copy
import pickle
import re
import signal
import warnings
from dataclasses import FrozenInstanceError, dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
from method_tables import EVERY, INIT_MODES, LOCAL_STEPS, METHODS, ONE_SHOT
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler
from sklearn.utils.validation import check_is_fitted

import partsong
from partsong.core.interfaces import Outcome
from partsong.core.streams import key, stream
from partsong.data.conversion import as_matrix
from partsong.data.partition import by_label, contiguous, iid
from partsong.errors import (
    CompositionError,
    DataError,
    FeatureError,
    FormatError,
    ParameterError,
    PartsongError,
    PartyError,
    ShapeError,
    UnreadableError,
)
from partsong.estimators import federated_nmf
from partsong.estimators.parties import party_names
from partsong.estimators.validation import solver_from_settings
from partsong.io.model_file import load_model, save_model
from partsong.methods import build
from partsong.methods.averaging import LocalAveraging
from partsong.methods.exact import SharedSums
from partsong.methods.game import FederatedGame
from partsong.solvers.game import Game
from partsong.solvers.normal_equations import Penalty
from partsong.training import loop, result, simulation
from partsong.training.loop import LeftOutWarning
from partsong.training.result import EmptyModelWarning


def parts(seed=0, sizes=(30, 50, 20)):
    rng = np.random.default_rng(seed)
    H = rng.gamma(0.5, size=(4, 15))
    return [rng.gamma(0.5, size=(n, 4)) @ H + 0.05 * rng.random((n, 15)) for n in sizes]


def test_exact_is_the_pooled_factorization():
    X = parts()
    split = partsong.FederatedNMF(4, method="exact", rounds=30, tol=0, random_state=0).fit(X)
    pooled = partsong.FederatedNMF(4, method="exact", rounds=30, tol=0, random_state=0).fit([np.vstack(X)])
    assert_allclose(split.components_, pooled.components_, rtol=1e-7, atol=1e-8)
    assert split.relative_error_ == pytest.approx(pooled.relative_error_, rel=1e-8)
    stacked = np.vstack(X)
    W = split.transform(stacked)
    error = np.linalg.norm(stacked - split.inverse_transform(W)) / np.linalg.norm(stacked)
    assert split.relative_error_ == pytest.approx(error, rel=1e-8)


@pytest.mark.parametrize("method", ["exact", "fedavg", build("local-only", 4, local_steps=20)])
def test_jobs_and_party_order_change_nothing(method):
    X, names = parts(), ["b", "a", "c"]
    settings = {"method": method, "rounds": 6, "random_state": 2}
    one = partsong.FederatedNMF(4, n_jobs=1, **settings).fit(X, names=names)
    for jobs in (2, None):
        other = partsong.FederatedNMF(4, n_jobs=jobs, **settings).fit(X[::-1], names=names[::-1])
        assert other.components_.tobytes() == one.components_.tobytes()


def test_history_counts_rounds_and_bytes():
    model = partsong.FederatedNMF(4, method="exact", rounds=5, tol=0, random_state=0).fit(parts())
    assert model.n_iter_ == 5
    assert model.outcome_ is Outcome.MAX_ROUNDS
    k, m, parties = 4, 15, 3
    assert {row.bytes_up for row in model.history_} == {parties * (8 * (k * k + k * m + 2) + 8)}
    assert {row.bytes_down for row in model.history_} == {8 * (k * m + 2) + 8}
    assert (np.diff([row.relative_error for row in model.history_]) <= 1e-12).all()
    average = partsong.FederatedNMF(4, method="fedavg", rounds=5, tol=0, random_state=0).fit(parts())
    assert {row.bytes_up for row in average.history_} == {parties * (8 * k * m + 8)}
    assert np.isfinite([row.relative_error for row in average.history_]).all()
    assert model.relative_error_ < average.relative_error_ * 1.5


def test_components_are_scaled_and_sorted():
    model = partsong.FederatedNMF(4, random_state=0).fit([sp.csr_array(X.astype(np.float32)) for X in parts()])
    assert model.components_.dtype == np.float32
    assert_allclose(np.linalg.norm(model.components_, axis=1), 1, rtol=1e-5)
    assert (np.diff(model.component_shares_) <= 0).all()
    assert model.explained_variance_ > 0.98


def test_mixed_precision_is_computed_in_the_larger():
    X = parts()
    single = [X[0].astype(np.float32), sp.csr_array(X[1].astype(np.float32)), X[2]]
    model = partsong.FederatedNMF(4, random_state=0, rounds=5).fit(single)
    assert model.components_.dtype == np.float64
    double = partsong.FederatedNMF(4, random_state=0, rounds=5).fit([part.astype(np.float64) for part in single])
    assert model.components_.tobytes() == double.components_.tobytes()
    chosen = partsong.FederatedNMF(4, random_state=0, rounds=5, dtype="float32").fit(single)
    assert chosen.components_.dtype == np.float32


def test_rows_are_transformed_in_the_precision_of_the_model():
    X = parts()
    model = partsong.FederatedNMF(4, random_state=0, rounds=5).fit(X)
    rows = X[0].astype(np.float32)
    assert_array_equal(model.transform(rows), model.transform(rows.astype(np.float64)))
    assert model.transform(rows).dtype == np.float64
    single = partsong.FederatedNMF(4, random_state=0, rounds=5, dtype="float32").fit(X)
    assert single.transform(X[0]).dtype == np.float32


def frames_of(X, columns=tuple(f"g{i}" for i in range(15))):
    pandas = pytest.importorskip("pandas")
    return [pandas.DataFrame(part, columns=columns) for part in X]


def test_named_columns_are_put_in_the_order_of_the_first():
    frames = frames_of(parts())
    settings = {"rounds": 4, "random_state": 0}
    ordered = partsong.FederatedNMF(3, **settings).fit(frames)
    shuffled = [frames[0], frames[1][frames[1].columns[::-1]], frames[2][sorted(frames[2].columns)]]
    mixed = partsong.FederatedNMF(3, **settings).fit(shuffled)
    assert mixed.components_.tobytes() == ordered.components_.tobytes()
    assert mixed.feature_names_in_.tolist() == list(frames[0].columns)
    behind = partsong.FederatedNMF(3, **settings).fit([parts()[0], *frames[1:]])
    assert behind.components_.tobytes() == ordered.components_.tobytes()
    assert behind.feature_names_in_.tolist() == list(frames[0].columns)
    numbered = frames_of(parts(), range(15))
    turned = partsong.FederatedNMF(3, **settings).fit([numbered[0], numbered[1][list(range(14, -1, -1))], numbered[2]])
    assert turned.components_.tobytes() == ordered.components_.tobytes()


def columns_refused(*widths, **more):
    """The refusal of parties that hold so many of the columns g0, g1, …"""
    pd, rng = pytest.importorskip("pandas"), np.random.default_rng(0)
    with pytest.raises(FeatureError) as refused:
        partsong.FederatedNMF(3, rounds=2).fit(
            [pd.DataFrame(rng.random((4, width)), columns=[f"g{i}" for i in range(width)]) for width in widths], **more
        )
    return refused.value


def test_missing_columns_are_named_all_up_to_thirty():
    for lacking, told, more in ((30, 30, ""), (31, 30, "(and 1 more)"), (70, 30, "(and 40 more)")):
        error = columns_refused(80, 80, 80 - lacking)
        assert str(error).count(" g") == told
        assert ("more)" in str(error)) == bool(more)
        assert more in str(error)
        assert error.missing == {"party-03": tuple(f"g{i}" for i in range(80 - lacking, 80))}
        assert error.unexpected == {}


def test_columns_are_compared_with_those_of_most_whoever_comes_first():
    for at in range(3):
        widths = [10, 10, 10]
        widths[at] = 8
        error = columns_refused(*widths)
        other = "party-02" if at == 0 else "party-01"
        assert f"Party 'party-0{at + 1}' lacks columns g8, g9, compared with '{other}' and most others." in str(error)
        assert (error.missing, error.unexpected) == ({f"party-0{at + 1}": ("g8", "g9")}, {})
    several = columns_refused(8, 10, 10, 10, 11, 10)
    assert (several.missing, several.unexpected) == ({"party-01": ("g8", "g9")}, {"party-05": ("g10",)})
    assert "Party 'party-05' has other column g10, compared with 'party-02' and most others" in str(several)


def test_without_most_both_sides_are_named():
    error = columns_refused(8, 10, names=["north", "south"])
    assert "Party 'south' has other columns g8, g9, compared with 'north'. Use the same" in str(error)
    assert (error.missing, error.unexpected) == ({}, {"south": ("g8", "g9")})
    assert "'party-03' lacks columns g6, g7, compared with 'party-01'. " in str(columns_refused(8, 10, 6))
    assert "2 more parties differ as well" in str(columns_refused(9, 9, *range(2, 9)))


def test_errors_of_columns_travel_between_processes():
    error = columns_refused(10, 10, 8)
    twin = pickle.loads(pickle.dumps(error))
    assert (str(twin), twin.missing) == (str(error), error.missing)


def test_named_columns_must_agree():
    frames = frames_of(parts())
    renamed = frames[1].rename(columns={"g3": "q"})
    with pytest.raises(FeatureError, match=r"party-02.*lacks column g3 and has other column q"):
        partsong.FederatedNMF(3, rounds=2).fit([frames[0], renamed, frames[2]])
    with pytest.raises(FeatureError, match=r"party-03.*lacks columns g10, g11, g12, g13, g14"):
        partsong.FederatedNMF(3, rounds=2).fit([*frames[:2], frames[2].iloc[:, :10]])
    with pytest.raises(
        FeatureError, match=r"^Party 'party-01' lacks column g3 and has other column q, .* 'party-02' and"
    ):
        partsong.FederatedNMF(3, rounds=2).fit([renamed, frames[0], frames[2]])
    twice = frames[1].rename(columns={"g3": "g4"})
    with pytest.raises(FeatureError, match=r"party-02.*'g4' \(columns 3, 4\)"):
        partsong.FederatedNMF(3, rounds=2).fit([frames[0], twice, frames[2]])
    with pytest.raises(FeatureError, match="used more than once"):
        partsong.FederatedNMF(3, rounds=2).fit([twice, twice])


def test_transform_knows_the_columns_of_the_fit():
    frames = frames_of(parts())
    model = partsong.FederatedNMF(3, rounds=2, random_state=0).fit(frames)
    assert_array_equal(
        model.transform(frames[0]),
        partsong.FederatedNMF(3, rounds=2, random_state=0).fit(parts()).transform(parts()[0]),
    )
    for wrong in (frames[0][frames[0].columns[::-1]], frames[0].rename(columns={"g3": "q"}), frames[0].iloc[:, 1:]):
        with pytest.raises(FeatureError, match="feature names should match"):
            model.transform(wrong)
    model.fit(parts())
    assert not hasattr(model, "feature_names_in_")
    model.transform(parts()[0])


def test_gaps_are_told_by_party_and_column_name():
    frames = frames_of(parts())
    frames[1].iloc[4, 2] = np.nan
    with pytest.raises(DataError, match=r"party-02.*NaN.*row 4 of party 'party-02'; column 2 \('g2'\)"):
        partsong.FederatedNMF(3).fit(frames)
    frames = frames_of(parts())
    frames[2]["g5"] = "x"
    with pytest.raises(UnreadableError, match=r"party-03.*20 cell\(s\).*column 5 \('g5'\): 'x'"):
        partsong.FederatedNMF(3).fit(frames)


def test_tensors_are_computed_with_torch():
    torch = pytest.importorskip("torch")
    X = parts()
    settings = {"rounds": 5, "random_state": 0}
    plain = partsong.FederatedNMF(4, **settings).fit(X)
    tensors = [torch.from_numpy(part) for part in X]
    for method in ("exact", "fedavg"):
        plain = partsong.FederatedNMF(4, method=method, **settings).fit(X)
        model = partsong.FederatedNMF(4, method=method, **settings).fit(tensors)
        assert_allclose(model.components_, plain.components_, rtol=1e-6, atol=1e-8)
    W = model.transform(tensors[0])
    assert isinstance(W, np.ndarray)
    assert_array_equal(W, model.transform(X[0]))
    with pytest.raises(DataError, match=r"party-02.*NaN"):
        partsong.FederatedNMF(4, **settings).fit([tensors[0], tensors[1] * torch.nan])


def test_tensors_share_one_precision():
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(part) for part in parts()]
    settings = {"rounds": 3, "random_state": 0}
    mixed = [tensors[0].float(), tensors[1], tensors[2].to(torch.bfloat16)]
    model = partsong.FederatedNMF(4, **settings).fit(mixed)
    assert model.components_.dtype == np.float64
    double = partsong.FederatedNMF(4, **settings).fit([part.double() for part in mixed])
    assert model.components_.tobytes() == double.components_.tobytes()
    for half in (torch.bfloat16, torch.float16):
        assert partsong.FederatedNMF(4, **settings).fit([t.to(half) for t in tensors]).components_.dtype == np.float32


def test_tensors_and_arrays_do_not_mix():
    torch = pytest.importorskip("torch")
    X = parts()
    with pytest.raises(CompositionError, match=r"'party-01' uses NumPy and.*'party-03' torch on cpu.*from_numpy"):
        partsong.FederatedNMF(4).fit([X[0], X[1], torch.from_numpy(X[2])])
    with pytest.raises(CompositionError, match="torch on meta"):
        partsong.FederatedNMF(4).fit([torch.from_numpy(X[0]), torch.from_numpy(X[1]).to("meta")])


def penalised(rank=4):
    program = build("exact", rank, local_steps=5)
    return replace(
        program, half_steps=replace(program.half_steps, penalty_W=Penalty(0.03, 0.01), penalty_H=Penalty(0.0, 0.02))
    )


def test_a_program_keeps_its_penalties(tmp_path):
    X = np.vstack(parts())
    model = partsong.FederatedNMF(method=penalised(), rounds=30, random_state=0).fit(parts())
    W = model.transform(X)
    expected = penalised().solver.solve_rows(as_matrix(X), np.ascontiguousarray(model.components_.T))
    assert_allclose(W, expected, rtol=1e-9, atol=1e-12)
    free = build("exact", 4, local_steps=5).solver.solve_rows(as_matrix(X), np.ascontiguousarray(model.components_.T))
    assert np.abs(W - free).max() > 1e-3 * free.max()
    error = np.linalg.norm(X - model.inverse_transform(W)) / np.linalg.norm(X)
    assert model.relative_error_ == pytest.approx(error, rel=1e-8)
    model.save(tmp_path / "m.safetensors")
    settings = partsong.load_model(tmp_path / "m.safetensors").settings
    assert settings["alpha_w"] == pytest.approx(0.04)
    assert settings["alpha_h"] == pytest.approx(0.02)
    assert settings["l1_ratio"] == pytest.approx(0.75)
    assert settings["l1_ratio_h"] == 0.0
    assert_allclose(partsong.NMF.load(tmp_path / "m.safetensors").transform(X), W, rtol=1e-9, atol=1e-12)


def test_the_rank_is_that_of_the_program_or_nmfs_own():
    assert partsong.FederatedNMF(method=penalised(3), rounds=2).fit(parts()).components_.shape == (3, 15)
    assert partsong.FederatedNMF(3, method=penalised(3), rounds=2).fit(parts()).n_components_ == 3
    with pytest.raises(ParameterError, match=r"n_components=10.*rank of the program is 3"):
        partsong.FederatedNMF(10, method=penalised(3)).fit(parts())
    assert partsong.FederatedNMF(rounds=2).fit(parts()).n_components_ == 15
    assert partsong.FederatedNMF(rounds=2).fit(parts(sizes=(3, 4))).n_components_ == 7
    for k in (10**9, 0, True, "3", 2.5):
        with pytest.raises(ParameterError, match="n_components"):
            partsong.FederatedNMF(k).fit(parts())


@pytest.mark.parametrize(
    "settings",
    [{"method": "avg"}, {"method": 3}, {"method": None}, {"method": LocalAveraging}, {"init_mode": "alone"},
     {"rounds": 0}, {"rounds": True}, {"local_steps": "3"}, {"n_jobs": "2"}, {"n_jobs": 0}, {"n_jobs": -3},
     {"verbose": "x"}, {"tol": "a"}, {"tol": None}, {"time_budget": "x"}, {"dtype": "foo"}, {"dtype": int},
     {"random_state": "a"}, {"on_party_error": "leave out"}, {"on_party_error": None},
     {"on_party_error": np.array(["raise", "skip"])}],
    ids=str,
)  # fmt: skip
def test_senseless_settings_are_refused_by_name(settings):
    (name,) = settings
    with pytest.raises(ParameterError, match=name):
        partsong.FederatedNMF(2, **settings).fit(parts())


@pytest.mark.parametrize(
    ("names", "words"),
    [(["a", "a", "b"], "repeated: a.*Rename"), ([1, 2, 3], r"positions 0, 1, 2 \(1\)"),
     (["a", None, "b"], r"position 1 \(None\)"), (["a", " ", "b"], r"position 1 \(' '\)"),
     ("abc", "'abc'"), (5, "got 5"), (frozenset("abc"), "in their order"), (["a", "b"], "2 names.*3 part.*per party")],
    ids=["twice", "numbers", "None", "blank", "text", "number", "set", "too few"],
)  # fmt: skip
def test_senseless_names_of_parties_are_refused(names, words):
    with pytest.raises(ParameterError, match=f"[Nn]ames.*{words}|{words}"):
        partsong.FederatedNMF(2).fit(parts(), names=names)


def test_bad_input_names_the_party():
    X = parts()
    X[1][4, 2] = np.nan
    with pytest.raises(DataError, match=r"party-02.*NaN"):
        partsong.FederatedNMF(3).fit(X)
    good = parts()
    for bad, error in (
        ([], ParameterError), (good[0], ShapeError), ([good[0], good[1][:, 1:]], CompositionError),
        ([good[0], np.empty((0, 15))], PartsongError),
    ):  # fmt: skip
        with pytest.raises(error):
            partsong.FederatedNMF(3).fit(bad)
    with pytest.raises(ParameterError, match="2 names"):
        partsong.FederatedNMF(3).fit(good, names=["a", "b"])
    for settings in ({"method": "avg"}, {"init_mode": "alone"}, {"rounds": 0}, {"local_steps": 0}, {"n_components": 0}):
        with pytest.raises(ParameterError):
            partsong.FederatedNMF(**settings).fit(good)
    with pytest.raises(ShapeError, match="X has 14 features"):
        partsong.FederatedNMF(3, rounds=2).fit(good).transform(good[0][:, 1:])


def test_partitions_cover_every_row_once():
    labels = np.repeat(["a", "b", "c"], [50, 30, 21])
    for owned in (
        contiguous(101, 7), iid(101, 7, stream(0, "x")), by_label(labels, 7, stream(0, "x"), 0.1),
        by_label(labels, 101, stream(0, "x"), 5.0),
    ):  # fmt: skip
        assert sorted(np.concatenate(owned).tolist()) == list(range(101))
        assert max(map(len, owned)) - min(map(len, owned)) <= 1
    with pytest.raises(ParameterError):
        contiguous(3, 4)
    assert party_names(2) == ["party-01", "party-02"]
    assert sorted(party_names(120)) == party_names(120)


def test_label_skew_grows_as_concentration_falls():
    labels = np.repeat(np.arange(10), 100)

    def skew(concentration):
        owned = by_label(labels, 10, stream(1, "x"), concentration)
        return np.mean([np.max(np.bincount(labels[rows], minlength=10)) / len(rows) for rows in owned])

    assert skew(0.05) > skew(1.0) > skew(100.0)


def test_streams_are_named():
    assert stream(1, "a", 2).random() == stream(1, "a", 2).random()
    keys = {key(1, "a", 2), key(1, "a2"), key(1, "a", "2"), key(12, "a"), key(1, "2", "a"), key(1, 2, "a")}
    assert len(keys) == 6


def test_independent_starts_disagree_on_the_order_of_parts():
    common = partsong.FederatedNMF(4, method="fedavg", local_steps=50, rounds=2, random_state=0).fit(parts())
    settings = {"method": "fedavg", "local_steps": 50, "rounds": 2, "random_state": 0, "init_mode": "local"}
    independent = partsong.FederatedNMF(4, **settings).fit(parts())
    assert common.relative_error_ < independent.relative_error_


def skewed(seed=0):
    rng = np.random.default_rng(seed)
    H = (rng.random((4, 30)) < 0.25) * rng.random((4, 30))
    return rng.gamma(0.5, size=(240, 4)) @ H + 0.02 * rng.random((240, 30))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("init_mode", ["shared", "local"])
def test_every_method_by_name(method, init_mode):
    X = skewed()
    if init_mode not in INIT_MODES[method]:
        with pytest.raises(ParameterError, match=r"All parties of this method start|draw their own start"):
            partsong.FederatedNMF(4, method=method, init_mode=init_mode).fit(np.array_split(X, 4))
        return
    model = partsong.FederatedNMF(
        4, method=method, init_mode=init_mode, rounds=3, local_steps=20, tol=0, random_state=0
    )
    model.fit(np.array_split(X, 4))
    has_own = method not in ("exact", "game")
    assert model.components_.shape == (4, 30)
    assert model.n_iter_ == (1 if method in ONE_SHOT else 3)
    assert set(model.party_components_) == set(model.alignments_) == set(model.parties_)
    for name in model.parties_:
        P, own = model.alignments_[name], model.party_components_[name]
        assert_allclose(P.sum(axis=0), 1)
        assert_allclose(P.sum(axis=1), 1)
        assert_allclose(np.linalg.norm(own, axis=1)[np.linalg.norm(own, axis=1) > 0], 1, rtol=1e-9)
        if not has_own:  # parties have no components of their own
            assert_allclose(P @ own, model.components_)
        else:
            assert np.abs(P @ own - model.components_).max() > 1e-9
    last = model.history_[-1]
    assert np.isnan(last.drift) == (not has_own)
    if has_own:
        assert 0 <= last.aligned_drift <= last.drift * (1 + 1e-9)
    assert model.transform(X[:5]).shape == (5, 4)


@pytest.mark.parametrize("method", ["fnmf", "fnmf-local"])
def test_fnmf_needs_two_rounds_where_averages_fail(method):
    X = skewed(2)
    parts = np.array_split(X, 6)
    settings = {"rounds": 2, "local_steps": 300, "init_mode": "local", "tol": 0, "random_state": 1}
    pooled = partsong.NMF(4, random_state=0, tol=1e-6, max_iter=300).fit(X).relative_error_
    fnmf = partsong.FederatedNMF(4, method=method, **settings).fit(parts)
    assert fnmf.relative_error_ < 1.1 * pooled
    assert partsong.FederatedNMF(4, method="fedavg", **settings).fit(parts).relative_error_ > 2 * pooled
    if method == "fnmf-local":
        assert fnmf.history_[-1].aligned_drift < 0.05


def test_rows_can_be_shared_out_by_label():
    X = skewed()
    labels = np.array(["north", "south", "west"])[np.arange(240) % 3]
    by_label = partsong.FederatedNMF(4, rounds=4, random_state=0).fit(X, parties=labels)
    assert by_label.parties_ == ["north", "south", "west"]
    listed = partsong.FederatedNMF(4, rounds=4, random_state=0).fit(
        [X[labels == name] for name in by_label.parties_], names=by_label.parties_
    )
    assert by_label.components_.tobytes() == listed.components_.tobytes()
    import scipy.sparse as sp

    sparse = partsong.FederatedNMF(4, rounds=4, random_state=0).fit(sp.csc_array(X), parties=labels.tolist())
    assert_allclose(sparse.components_, listed.components_, atol=1e-6)
    with pytest.raises(ShapeError, match="239 labels"):
        partsong.FederatedNMF(4).fit(X, parties=labels[1:])
    with pytest.raises(ShapeError, match="one matrix"):
        partsong.FederatedNMF(4).fit([X, X], parties=labels)
    with pytest.raises(ParameterError, match="Remove names"):
        partsong.FederatedNMF(4).fit(X, parties=labels, names=["a"])


@pytest.mark.parametrize(
    "align", ["assignment", "partial-assignment", "sinkhorn", "partial-sinkhorn", "nearest", "softmax", "identity"]
)
def test_alignments_by_name(align):
    X = skewed()
    model = partsong.FederatedNMF(4, method="fnmf", align=align, rounds=2, local_steps=10, random_state=0)
    assert np.isfinite(model.fit(np.array_split(X, 3)).components_).all()


def test_unknown_alignments_are_refused():
    for align in ("lap", 3, dict):
        with pytest.raises(ParameterError, match="align"):
            partsong.FederatedNMF(4, method="fnmf", align=align).fit(np.array_split(skewed(), 3))


def test_labels_of_parties_are_taken_literally():
    X = skewed()
    for labels, words in (
        ([1] * 120 + ["1"] * 120, "mix text and numbers"),
        (["a"] * 239 + [None], "row 239"),
        (["a"] * 239 + [np.nan], r"row 239 are not \(nan\).*Set a party"),
        (["a"] * 239 + [" "], "row 239"),
        (np.zeros((240, 2)), "rows 0, 1, 2, 3, 4"),
        ("a" * 240, "got str"),
        (3, "got int"),
        (np.array(3), r"shape \(\)"),
        ({"a": 1}, "got dict"),
        ([0.5] * 240, "240|235 more"),
    ):
        with pytest.raises(ParameterError, match=words):
            partsong.FederatedNMF(2).fit(X, parties=labels)
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X)
    named = [partsong.FederatedNMF(2, rounds=2).fit(frame, parties=form(["b", "a"] * 120)).parties_ for form in (
        list, tuple, iter, np.array, pandas.Series, pandas.Categorical)]  # fmt: skip
    assert named == [["a", "b"]] * 6
    with pytest.raises(ShapeError, match="indexes of parties and X differ"):
        partsong.FederatedNMF(2).fit(frame, parties=pandas.Series(["a", "b"] * 120, index=frame.index[::-1]))


@pytest.mark.parametrize("method", METHODS)
def test_a_method_does_as_its_name_says_unless_told_otherwise(method):
    X = np.array_split(skewed()[:60, :12], 3)
    init_mode = EVERY[method].value("init_mode", {})
    told = partsong.FederatedNMF(
        2, method=method, rounds=2, local_steps=LOCAL_STEPS[method], init_mode=init_mode, random_state=0
    )
    plain = partsong.FederatedNMF(2, method=method, rounds=2, random_state=0)
    assert plain.fit(X).components_.tobytes() == told.fit(X).components_.tobytes()


def test_settings_that_would_be_ignored_are_refused():
    X = np.array_split(skewed(), 3)
    for settings in (
        {"method": "exact", "align": "sinkhorn"},
        {"method": build("fnmf-local", 2, align="assignment"), "local_steps": 5},
        {"method": build("fnmf-local", 2, align="assignment"), "init_mode": "shared"},
        {"method": build("fnmf-local", 2, align="assignment"), "align": "nearest"},
    ):
        with pytest.raises(ParameterError):
            partsong.FederatedNMF(2, **settings).fit(X)


def test_names_of_components_and_features():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(skewed(), columns=[f"g{i}" for i in range(30)])
    model = partsong.FederatedNMF(3, rounds=3, random_state=0).fit([frame[:100], frame[100:]])
    assert model.get_feature_names_out().tolist() == ["federatednmf0", "federatednmf1", "federatednmf2"]
    best = model.top_features(2)
    assert [row[0] for row in best] == [f"g{j}" for j in model.components_.argmax(axis=1)]
    with pytest.raises(ParameterError):
        model.top_features(0)


def test_a_mapping_names_the_parties_and_a_generator_is_a_list():
    X = parts()
    settings = {"rounds": 3, "random_state": 0}
    named = partsong.FederatedNMF(3, **settings).fit(X, names=["b", "a", "7"])
    mapped = partsong.FederatedNMF(3, **settings).fit({"b": X[0], "a": X[1], 7: X[2]})
    assert mapped.parties_ == named.parties_ == ["b", "a", "7"]
    assert mapped.components_.tobytes() == named.components_.tobytes()
    listed = partsong.FederatedNMF(3, **settings).fit(X)
    assert partsong.FederatedNMF(3, **settings).fit(part for part in X).components_.tobytes() == (
        listed.components_.tobytes()
    )
    for wrong, words in (({None: X[0]}, "None"), ({1: X[0], "1": X[1]}, "repeated: 1"), ({}, "at least one")):
        with pytest.raises(ParameterError, match=words):
            partsong.FederatedNMF(3).fit(wrong)
    with pytest.raises(ParameterError, match="Remove names"):
        partsong.FederatedNMF(3).fit({"a": X[0]}, names=["b"])
    with pytest.raises(DataError, match=r"party 'a'.*NaN"):
        partsong.FederatedNMF(3).fit({"a": X[0] * np.nan})


@pytest.mark.parametrize("X", [np.ones((4, 3)), np.ones((2, 4, 3)), None, "abc", {1, 2}, 3, np.array(1.0)], ids=repr)
def test_what_is_no_list_of_parties_is_told_all_ways_to_give_them(X):
    for call in (
        partsong.FederatedNMF(2).fit,
        partsong.FederatedNMF(2).iterate,
        partsong.FederatedNMF(2).fit_transform,
    ):
        with pytest.raises(ShapeError, match=r"\[X_1, X_2, …\].*mapping.*parties=labels.*use NMF") as caught:
            call(X)
        assert "fit" not in str(caught.value), "whoever was called"


def without_time(rows):
    return [tuple(np.nan_to_num(row._replace(seconds=0.0), nan=-1.0)) for row in rows]


@pytest.mark.parametrize("method", [*METHODS, build("fnmf-by-sums", 3, local_steps=5, sweeps=2)], ids=str)
def test_iterating_rounds_is_the_fit(method):
    X = np.array_split(skewed(), 3)
    settings = {"method": method, "rounds": 40, "tol": 1e-2, "random_state": 0}
    settings |= {"local_steps": 5} if isinstance(method, str) else {}
    plain = partsong.FederatedNMF(3, **settings).fit(X)
    model = partsong.FederatedNMF(3, **settings)
    reports = list(model.iterate(X))
    assert model.components_.tobytes() == plain.components_.tobytes()
    assert without_time(model.history_) == without_time(plain.history_)
    whole = [row for row in model.history_ if not np.isnan(row.objective)]
    assert [report.row for report in reports] == whole
    assert [report.iteration for report in reports] == list(range(1, plain.n_iter_ + 1))
    assert [report.outcome for report in reports] == [None] * (plain.n_iter_ - 1) + [plain.outcome_]
    assert model.outcome_ is plain.outcome_
    for name in plain.parties_:
        assert model.party_components_[name].tobytes() == plain.party_components_[name].tobytes()
    assert vars(model).keys() == vars(plain).keys(), "nothing is left over"


def test_reports_are_values_and_components_are_copies():
    model = partsong.FederatedNMF(3, rounds=4, tol=0, random_state=0)
    reports = list(model.iterate(parts()))
    assert all(report.components.shape == (3, 15) for report in reports)
    again = [report.components for report in partsong.FederatedNMF(**model.get_params()).iterate(parts())]
    assert_array_equal([report.components for report in reports], again, "of their own round, also later")
    reports[0].components[:] = 7
    assert (reports[0].components != 7).any()
    with pytest.raises(FrozenInstanceError):
        reports[0].iteration = 5
    unit = reports[-1].components / np.linalg.norm(reports[-1].components, axis=1, keepdims=True)
    assert_allclose(np.sort(unit, axis=0), np.sort(model.components_, axis=0), rtol=1e-9)


@pytest.mark.parametrize("method", ["exact", "fedavg"])
def test_a_report_gives_the_model_of_the_rounds_so_far(method):
    """However the loop is left: by break, by an error, by closing it; between rounds, and of earlier rounds as well."""
    X = parts()
    settings = {"method": method, "tol": 0, "random_state": 0}
    shorter = [partsong.FederatedNMF(3, rounds=i, **settings).fit(X) for i in (1, 2, 3)]
    model = partsong.FederatedNMF(3, rounds=50, **settings).fit([part[:, :9] for part in X])
    for report, expected in zip(model.iterate(X), shorter, strict=False):
        assert report.result() is model
        check_is_fitted(model)
        assert model.components_.tobytes() == expected.components_.tobytes(), "no trace of an earlier fit"
        assert model.relative_error_ == expected.relative_error_
        assert model.n_iter_ == report.iteration
        assert_array_equal(model.transform(X[0]), expected.transform(X[0]))
    assert model.outcome_ is Outcome.INTERRUPTED

    model, reports = clone(model), []
    for report in model.iterate(X):
        reports.append(report)
        if report.iteration == 3:
            break
    assert not hasattr(model, "components_"), "it is fitted when asked"
    for report, expected in zip(reports, shorter, strict=True):
        assert report.result().components_.tobytes() == expected.components_.tobytes()
        assert model.history_[-1].iteration == model.n_iter_ == report.iteration
        assert model.outcome_ is Outcome.INTERRUPTED

    def fail(trouble):
        for report in model.iterate(X):
            reports.append(report)
            if report.iteration == 3:
                raise trouble

    for trouble in (ZeroDivisionError, KeyboardInterrupt):
        with pytest.raises(trouble):
            fail(trouble)
        assert reports[-1].result().components_.tobytes() == shorter[2].components_.tobytes()

    waiting = model.iterate(X)
    next(waiting)
    second = next(waiting)
    assert copy.deepcopy(second.result()).components_.tobytes() == shorter[1].components_.tobytes()
    waiting.close()
    assert model.history_[-1].iteration == 2


def test_the_best_round_is_the_model_that_a_loop_leaves():
    """Averages of parties that iterate for long may get worse: here from the third round to the fourth."""
    X = np.array_split(skewed(2), 6)
    settings = {"method": "fedavg", "local_steps": 300, "tol": 0, "random_state": 1}
    model = partsong.FederatedNMF(4, rounds=9, **settings)
    for report in model.iterate(X):
        if report.iteration == 4:
            break
    report.result()
    errors = [row.relative_error for row in model.history_]
    assert errors[3] > errors[2] * (1 + 1e-3)
    best = partsong.FederatedNMF(4, rounds=3, **settings).fit(X)
    assert model.components_.tobytes() == best.components_.tobytes()
    assert model.relative_error_ == pytest.approx(errors[2], rel=1e-9)


def test_a_model_that_is_left_does_not_carry_data(tmp_path):
    X = [np.random.default_rng(0).random((4000, 15)) for _ in range(2)]
    model = partsong.FederatedNMF(2, rounds=5, random_state=0)
    next(model.iterate(X)).result()
    stored = pickle.dumps(model)
    assert len(stored) < X[0].nbytes / 10
    assert pickle.loads(stored).components_.tobytes() == model.components_.tobytes()
    next(model.iterate(X)).result()
    model.save(tmp_path / "m.safetensors")
    assert load_model(tmp_path / "m.safetensors").relative_error == model.relative_error_


@dataclass(frozen=True, slots=True)
class Troubled(SharedSums):
    """The server has a bad time in its third round."""

    trouble: str = "error"

    def finish(self, server, aggregate):
        if server.memory.count == 2:
            if self.trouble == "error":
                raise PartyError("the disk is full")
            for _ in range(1 if self.trouble == "ctrl-c" else 2):
                signal.raise_signal(signal.SIGINT)
        return SharedSums.finish(self, server, aggregate)


@pytest.mark.parametrize("way", ["fit", "iterate"])
@pytest.mark.parametrize("trouble", ["error", "ctrl-c", "ctrl-c twice"])
def test_trouble_within_a_round_loses_no_round_before(trouble, way):
    X = parts()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    model = partsong.FederatedNMF(method=Troubled(3, trouble=trouble), rounds=9, tol=0, random_state=0)
    rounds = 0

    def run():
        nonlocal rounds
        if way == "fit":
            model.fit(X)
        else:
            for _ in model.iterate(X):
                rounds += 1

    try:
        if trouble == "error":
            with pytest.raises(PartyError, match="disk"):
                run()
        else:
            run()
    finally:
        signal.signal(signal.SIGINT, before)
    expected = 3 if trouble == "ctrl-c" else 2
    assert model.n_iter_ == expected
    assert rounds == (expected if way == "iterate" else 0)
    assert model.outcome_ is Outcome.INTERRUPTED
    shorter = partsong.FederatedNMF(method=SharedSums(3), rounds=expected, tol=0, random_state=0).fit(X)
    assert model.components_.tobytes() == shorter.components_.tobytes()


def test_what_is_refused_is_refused_before_the_first_round():
    model = partsong.FederatedNMF(3, rounds=2, random_state=0).fit(parts())
    kept = model.components_
    for wrong in ({"rounds": 0}, {"method": "avg"}):
        with pytest.raises(ParameterError):
            clone(model).set_params(**wrong).iterate(parts())
    with pytest.raises(ShapeError):
        model.iterate(parts()[0])
    assert model.components_ is kept


def test_fit_transform_gives_weights_as_the_data_came():
    X = parts()
    model = partsong.FederatedNMF(3, rounds=4, random_state=0)
    listed = model.fit_transform(X, names=iter("abc"))
    assert [W.shape for W in listed] == [(30, 3), (50, 3), (20, 3)]
    for W, rows in zip(listed, X, strict=True):
        assert_array_equal(W, model.transform(rows))
    mapped = model.fit_transform({"a": X[0], 2: X[1]})
    assert list(mapped) == ["a", 2]
    assert_array_equal(mapped[2], model.transform(X[1]))
    labels = np.random.default_rng(0).permutation(np.repeat(["u", "v"], 50))
    stacked = np.vstack(X)
    W = model.fit_transform(stacked, parties=labels)
    assert_array_equal(W, model.transform(stacked))
    error = np.linalg.norm(stacked - model.inverse_transform(W)) / np.linalg.norm(stacked)
    assert error == pytest.approx(model.relative_error_, rel=1e-9)
    sparse = model.fit_transform([sp.csr_array(part) for part in X])
    assert [W.shape for W in sparse] == [(30, 3), (50, 3), (20, 3)]


def test_output_containers_are_scikit_learns():
    pandas = pytest.importorskip("pandas")
    frames = frames_of(parts())
    for i, frame in enumerate(frames):
        frame.index = [f"{i}-{j}" for j in range(len(frame))]
    turned = [frames[0], frames[1][frames[1].columns[::-1]], frames[2]]
    model = partsong.FederatedNMF(3, rounds=4, random_state=0).set_output(transform="pandas")
    for weights in (model.fit_transform(turned), model.fit_transform(dict(enumerate(turned))).values()):
        for W, frame in zip(weights, frames, strict=True):
            assert W.columns.tolist() == ["federatednmf0", "federatednmf1", "federatednmf2"]
            assert W.index.equals(frame.index)
            pandas.testing.assert_frame_equal(W, model.transform(frame))
    whole = pandas.concat(frames)
    W = model.fit_transform(whole, parties=["a", "b"] * 50)
    assert W.index.equals(whole.index)
    assert isinstance(model.set_output(transform="default").transform(whole), np.ndarray)
    assert_allclose(model.inverse_transform(W), W.to_numpy() @ model.components_)


def reconstruction(model, X, y=None):
    scaled = model[:-1].transform(X)
    return -float(np.linalg.norm(scaled - model[-1].inverse_transform(model.transform(X))))


def test_pipelines_searches_and_clones():
    X = skewed()
    labels = np.array(["u", "v", "w"])[np.arange(240) % 3]
    pipe = make_pipeline(MaxAbsScaler(), partsong.FederatedNMF(rounds=5, random_state=0))
    assert pipe.fit_transform(X, federatednmf__parties=labels).shape == (240, 20)
    assert pipe.get_feature_names_out()[:2].tolist() == ["federatednmf0", "federatednmf1"]
    search = GridSearchCV(
        pipe, {"federatednmf__n_components": [1, 4]}, scoring=reconstruction, cv=2, error_score="raise"
    )
    search.fit(X, federatednmf__parties=labels)
    assert search.best_params_ == {"federatednmf__n_components": 4}
    assert search.best_estimator_[-1].parties_ == ["u", "v", "w"]
    split_by_label = GridSearchCV(
        partsong.FederatedNMF(rounds=5, random_state=0),
        {"n_components": [1, 4]},
        scoring=lambda model, held: -sum(np.linalg.norm(Y - model.inverse_transform(model.transform(Y))) for Y in held),
        cv=3,
        error_score="raise",
    )
    assert split_by_label.fit(np.array_split(X, 6)).best_params_ == {"n_components": 4}, "folds of whole parties"
    model = partsong.FederatedNMF(
        3, method=build("fnmf-local", 3, local_steps=5, align="assignment"), rounds=2, random_state=0
    )
    fitted = clone(model).fit(np.array_split(X, 3))
    assert clone(fitted).get_params() == model.get_params()
    with pytest.raises(AttributeError):
        clone(fitted).components_  # noqa: B018
    again = pickle.loads(pickle.dumps(fitted))
    assert_array_equal(again.transform(X), fitted.transform(X))


@pytest.mark.parametrize("method", METHODS)
def test_save_and_load(method, tmp_path):
    frames = frames_of(parts())
    settings = {"method": method, "rounds": 2, "local_steps": 5, "random_state": 0}
    model = partsong.FederatedNMF(3, align="sinkhorn" if "fnmf" in method else None, **settings).fit(frames)
    path = tmp_path / "m.safetensors"
    model.save(path)
    assert load_model(path).settings["n_samples"] == 100
    assert load_model(path).settings["parties"] == 3
    again = partsong.FederatedNMF.load(path)
    assert_array_equal(again.components_, model.components_)
    assert_allclose(again.transform(frames[0]), model.transform(frames[0]), rtol=1e-9, atol=1e-12)
    assert again.top_features(2) == model.top_features(2)
    assert (again.method, again.local_steps, again.align) == (method, 5, model.align)
    assert again.relative_error_ == model.relative_error_
    with pytest.raises(FeatureError):
        again.transform(frames[0][frames[0].columns[::-1]])
    again.save(tmp_path / "again.safetensors")
    assert load_model(tmp_path / "again.safetensors").settings == load_model(path).settings
    assert clone(again).set_params(random_state=0).fit(frames).components_.tobytes() == model.components_.tobytes()


def test_load_refuses_what_no_federation_has_written(tmp_path):
    path = tmp_path / "m.safetensors"
    partsong.NMF(2, max_iter=2).fit(parts()[0]).save(path)
    with pytest.raises(ParameterError, match=r"'centralized'.*NMF\.load"):
        partsong.FederatedNMF.load(path)
    partsong.FederatedNMF(method=penalised(), rounds=2).fit(parts()).save(path)
    with pytest.raises(ParameterError, match=r"'SharedSums.*NMF\.load"):
        partsong.FederatedNMF.load(path)
    partsong.FederatedNMF(2, rounds=2).fit(parts()).save(path)
    model = load_model(path)
    for wrong in (
        {"rounds": "many"},
        {"init_mode": "late"},
        {"local_steps": -1},
        {"tol": None},
        {"parties": 0},
        {"on_party_error": [1]},
    ):
        save_model(path, replace(model, settings={**model.settings, **wrong}))
        with pytest.raises(FormatError, match=next(iter(wrong))):
            partsong.FederatedNMF.load(path)


@pytest.mark.parametrize("method", [*METHODS, build("fnmf-local", 3, local_steps=5, align="assignment")], ids=str)
def test_progress_tells_method_error_and_time_left(method, capsys):
    settings = {"local_steps": 5} if isinstance(method, str) else {}
    model = partsong.FederatedNMF(3, method=method, rounds=3, tol=0, verbose=1, random_state=0, **settings).fit(parts())
    captured = capsys.readouterr()
    assert captured.out == ""
    shown = re.sub(r"\s+", " ", captured.err)
    assert f"{method if isinstance(method, str) else 'program'}, 3 parties" in shown
    assert f"{len(model.history_)}/{len(model.history_)} error {100 * model.history_[-1].relative_error:.3f} %" in shown
    assert "0:00:00 left" in shown
    for _ in model.iterate(parts()):
        print("mine")
        break
    assert capsys.readouterr().out == "mine\n", "standard output is the caller's"


def test_gaps_in_weights_are_refused_by_position():
    model = partsong.FederatedNMF(3, rounds=2, random_state=0).fit(parts())
    W = model.transform(parts()[0])
    W[4, 1] = np.nan
    with pytest.raises(ParameterError, match=r"W must be finite.*\(4, 1\): nan"):
        model.inverse_transform(W)


def test_penalties_that_leave_nothing_are_told():
    program = build("exact", 3, local_steps=5)
    both = Penalty(1e3, 0.0)
    program = replace(program, half_steps=replace(program.half_steps, penalty_W=both, penalty_H=both))
    with pytest.warns(EmptyModelWarning, match=r"model is zero.*l1=1000.0.*Lower"):
        model = partsong.FederatedNMF(method=program, rounds=3, random_state=0).fit(parts())
    assert model.relative_error_ == pytest.approx(1, abs=1e-12)


def test_a_federated_model_goes_through_nmf_unchanged(tmp_path):
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    partsong.FederatedNMF(3, method="fnmf", rounds=4, local_steps=5, random_state=0).fit(parts()).save(first)
    for load in (partsong.NMF.load, partsong.FederatedNMF.load):
        load(first).save(second)
        assert second.read_bytes() == first.read_bytes()
    loaded = partsong.FederatedNMF.load(first).set_params(rounds=2, method="exact", align=None, init_mode=None)
    loaded.fit(parts()).save(second)
    assert load_model(second).settings["method"] == "exact"
    assert load_model(second).settings["rounds"] == 2
    loaded = partsong.FederatedNMF.load(first)
    next(loaded.iterate(parts())).result()
    loaded.save(second)
    assert load_model(second).settings["iterations"] == 1, "from the first round on it is another model"


def test_all_penalties_come_back(tmp_path):
    path, X = tmp_path / "m.safetensors", np.vstack(parts())
    model = partsong.FederatedNMF(method=penalised(), rounds=5, random_state=0).fit(parts())
    model.save(path)
    told = load_model(path).settings
    loaded = partsong.NMF.load(path)
    loaded.save(path)
    assert load_model(path).settings == told
    assert_allclose(partsong.NMF.load(path).transform(X), model.transform(X), rtol=1e-9, atol=1e-12)
    solver = solver_from_settings(told)
    for name in ("penalty_W", "penalty_H"):
        restored, own = getattr(solver, name), getattr(model.solver_, name)
        assert (restored.l1, restored.l2) == pytest.approx((own.l1, own.l2))


@pytest.mark.parametrize("method", ["exact", "one-shot-ipalm"])
def test_rounds_are_those_allowed_and_iterations_those_made(method, tmp_path):
    path = tmp_path / "m.safetensors"
    allowed = 60 if method == "exact" else 1
    model = partsong.FederatedNMF(2, method=method, rounds=60, tol=0.05, random_state=0).fit(parts())
    assert model.n_iter_ < 60
    model.save(path)
    stored = load_model(path)
    assert (stored.settings["rounds"], stored.settings["iterations"]) == (allowed, model.n_iter_)
    again = partsong.FederatedNMF.load(path)
    assert (again.rounds, again.n_iter_) == (allowed, model.n_iter_)
    assert partsong.NMF.load(path).n_iter_ == model.n_iter_
    older = {name: value for name, value in stored.settings.items() if name != "iterations"}
    save_model(path, replace(stored, settings=older))
    assert partsong.FederatedNMF.load(path).n_iter_ is None


def test_what_a_caller_does_between_rounds_is_not_in_the_time_budget(monkeypatch):
    """On a clock by which a round takes a second, and the caller a hundred before each of them."""
    now = [100.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    for module in (federated_nmf, loop, result, simulation):
        monkeypatch.setattr(module, "time", clock)
    own_work = SharedSums.finish

    def finish(self, *given):
        now[0] += 1.0
        return own_work(self, *given)

    monkeypatch.setattr(SharedSums, "finish", finish)
    settings = {"rounds": 20, "tol": 0, "time_budget": 5.0, "n_jobs": 1, "random_state": 0}
    plain = partsong.FederatedNMF(3, **settings).fit(parts())
    model = partsong.FederatedNMF(3, **settings)
    rounds = model.iterate(parts())
    now[0] += 100.0
    for _ in rounds:
        now[0] += 100.0
    assert model.outcome_ is plain.outcome_ is Outcome.TIME_LIMIT
    assert [row.seconds for row in model.history_] == [row.seconds for row in plain.history_] == [1, 2, 3, 4]


def gapped(seed=0, sizes=(40, 60, 30)):
    """Parties of whose cells three in four are known, the known ones as sparse rows (zeros among them), and all."""
    rng = np.random.default_rng(seed)
    whole = parts(seed, sizes)
    whole[0][0, 0] = 0.0
    known = [rng.random(X.shape) < 0.75 for X in whole]
    dense = [np.where(is_known, X, np.nan) for X, is_known in zip(whole, known, strict=True)]
    cells = [sp.coo_array((X[k], np.nonzero(k)), X.shape).tocsr() for X, k in zip(whole, known, strict=True)]
    return dense, cells, whole


GAME = {"method": "game", "missing": "ignore", "rounds": 40, "tol": 0, "random_state": 0}


def test_parties_play_what_they_know():
    """Unknown cells are found again: the error over them is that of the model, far below that of zeros in the gaps."""
    dense, _, whole = gapped()
    model = partsong.FederatedNMF(4, **GAME)
    weights = model.fit_transform(dense)
    X, truth = np.vstack(dense), np.vstack(whole)
    found, is_known = np.vstack(weights) @ model.components_, ~np.isnan(X)
    error = np.linalg.norm((found - truth)[is_known]) / np.linalg.norm(truth[is_known])
    assert model.relative_error_ == pytest.approx(error, rel=1e-6)
    assert error < 0.05
    unknown = np.linalg.norm((found - truth)[~is_known]) / np.linalg.norm(truth[~is_known])
    zeros = partsong.FederatedNMF(4, **{**GAME, "missing": "refuse"}).fit([np.nan_to_num(part) for part in dense])
    filled = zeros.inverse_transform(zeros.transform(np.nan_to_num(X)))
    assert unknown < 0.3 * np.linalg.norm((filled - truth)[~is_known]) / np.linalg.norm(truth[~is_known])


def test_gaps_are_the_same_in_every_form():
    pandas = pytest.importorskip("pandas")
    dense, cells, _ = gapped()
    settings = {**GAME, "rounds": 5}
    reference = partsong.FederatedNMF(3, **settings).fit(dense)
    masked = [np.ma.masked_invalid(part) for part in dense]
    frames = [pandas.DataFrame(part, columns=[f"g{j}" for j in range(15)]) for part in dense]
    for form in (cells, masked, frames, [dense[0], cells[1], masked[2]]):
        model = partsong.FederatedNMF(3, **settings).fit(form)
        assert_array_equal(model.components_, reference.components_)
        assert_array_equal(model.transform(form[1]), reference.transform(dense[1]))
    labels = np.repeat(["party-01", "party-02", "party-03"], [len(part) for part in dense])
    one = partsong.FederatedNMF(3, **settings).fit(np.vstack(dense), parties=labels)
    assert one.n_parties_ == 3
    program = partsong.FederatedNMF(**{**settings, "method": build("game", 3)}).fit(dense)
    assert_array_equal(program.components_, reference.components_)
    assert clone(reference).get_params()["missing"] == "ignore"
    assert reference.__sklearn_tags__().input_tags.allow_nan
    assert partsong.FederatedNMF(3, **settings, dtype="float32").fit(cells).components_.dtype == np.float32


def test_gaps_are_for_games():
    dense, _, _ = gapped()
    for method in ("exact", "fnmf", build("exact", 3, local_steps=5)):
        with pytest.raises(ParameterError, match='missing="ignore" needs method="game"'):
            partsong.FederatedNMF(3, method=method, missing="ignore").fit(dense)
    with pytest.raises(ParameterError, match="Unknown missing 'drop'; choose one of refuse, ignore"):
        partsong.FederatedNMF(3, method="game", missing="drop").fit(dense)
    with pytest.raises(DataError, match="NaN in data"):
        partsong.FederatedNMF(3, method="game").fit(dense)


def test_a_party_that_knows_nothing_is_named():
    dense, _, _ = gapped()
    for nothing in (np.full((4, 15), np.nan), sp.csr_array((4, 15))):
        with pytest.raises(DataError, match="In party 'b': This party has no known cell"):
            partsong.FederatedNMF(3, **GAME).fit([dense[0], nothing], names=["a", "b"])
    with pytest.warns(LeftOutWarning, match="This party has no known cell"):
        model = partsong.FederatedNMF(3, **{**GAME, "rounds": 3}, on_party_error="skip").fit([*dense, nothing])
    assert model.n_parties_ == 3
    for value, why in ((-1.0, "Negative"), (np.inf, "Infinite")):
        bad = np.where(np.arange(dense[1].size).reshape(dense[1].shape) == 7, value, dense[1])
        with pytest.raises(DataError, match=f"In party 'b': {why}"):
            partsong.FederatedNMF(3, **GAME).fit([dense[0], bad], names=["a", "b"])


def test_columns_that_no_party_knows_are_told():
    dense, _, _ = gapped()
    settings = {**GAME, "rounds": 3}
    dense[0][:, 2] = np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        partsong.FederatedNMF(3, **settings).fit(dense)
    for part in dense:
        part[:, 2] = np.nan
    with pytest.warns(UserWarning, match=r"in column 2 \(counted from 0\): the model's values for it are") as told:
        partsong.FederatedNMF(3, **settings).fit(dense)
    assert told[0].filename == __file__
    for part in dense:
        part[:, 7] = np.nan
    with pytest.warns(UserWarning, match=r"in columns 2, 7 \(counted from 0\): the model's values for them are"):
        partsong.FederatedNMF(3, **settings).fit(dense)


def test_a_model_of_known_cells_comes_back(tmp_path):
    path, (dense, _, _) = tmp_path / "m.safetensors", gapped()
    model = partsong.FederatedNMF(3, **{**GAME, "rounds": 5}).fit(dense)
    model.save(path)
    assert load_model(path).settings["missing"] == "ignore"
    loaded = partsong.FederatedNMF.load(path)
    assert loaded.missing == "ignore"
    rows = np.vstack([dense[1], np.full((1, 15), np.nan)])
    assert_allclose(loaded.transform(rows), model.transform(rows), rtol=1e-9, atol=1e-12)
    assert not model.transform(rows)[-1].any()
    told = load_model(path)
    save_model(path, replace(told, settings={**told.settings, "missing": "drop"}))
    with pytest.raises(FormatError, match="missing"):
        partsong.FederatedNMF.load(path)
    partsong.FederatedNMF(3, method="game", rounds=2, random_state=0).fit(parts()).save(path)
    assert "missing" not in load_model(path).settings
    assert partsong.FederatedNMF.load(path).missing == "refuse"


def test_a_game_between_parties_may_have_a_leader():
    both, led = (
        partsong.FederatedNMF(method=FederatedGame(3, game=Game(leader=leader)), rounds=3, tol=0, random_state=0).fit(
            parts()
        )
        for leader in (None, "rows")
    )
    assert FederatedGame(3, game=Game(leader="rows")).game.leader == "rows"
    assert np.abs(led.components_ - both.components_).max() > 1e-9
    with pytest.raises(ParameterError, match="leader"):
        FederatedGame(3, game=Game(leader="nobody"))
