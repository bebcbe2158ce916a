"""partsong.FederatedNMF: parties in, shared components out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
from numpy.testing import assert_allclose, assert_array_equal

import partsong
from partsong import recipes
from partsong.core import Outcome
from partsong.data.matrix import as_matrix
from partsong.data.partition import by_label, contiguous, iid, party_names
from partsong.errors import (
    CompositionError,
    DataError,
    FeatureError,
    ParameterError,
    PartsongError,
    ShapeError,
    UnreadableError,
)
from partsong.local.equations import Penalty
from partsong.programs.consensus import Consensus
from partsong.streams import key, stream


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


@pytest.mark.parametrize("method", ["exact", "fedavg", recipes.local_only(4, steps=20)])
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
    assert {row.bytes_up for row in model.history_} == {parties * (8 * (k * k + k * m + 3) + 8)}
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


def test_named_columns_must_agree():
    frames = frames_of(parts())
    renamed = frames[1].rename(columns={"g3": "q"})
    with pytest.raises(FeatureError, match=r"party-02.*lacks column g3 and has other column q"):
        partsong.FederatedNMF(3, rounds=2).fit([frames[0], renamed, frames[2]])
    with pytest.raises(FeatureError, match=r"party-03.*lacks columns g10, g11, g12, g13, g14"):
        partsong.FederatedNMF(3, rounds=2).fit([*frames[:2], frames[2].iloc[:, :10]])
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
    with pytest.raises(DataError, match=r"party-02.*NaN.*row 4; column 2 \('g2'\)"):
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
    with pytest.raises(
        CompositionError, match=r"'party-01' would with NumPy.*'party-03' with torch on cpu.*from_numpy"
    ):
        partsong.FederatedNMF(4).fit([X[0], X[1], torch.from_numpy(X[2])])
    with pytest.raises(CompositionError, match="torch on meta"):
        partsong.FederatedNMF(4).fit([torch.from_numpy(X[0]), torch.from_numpy(X[1]).to("meta")])


def penalised(rank=4):
    program = recipes.shared_statistics(rank)
    return replace(program, solver=replace(program.solver, penalty_W=Penalty(0.03, 0.01), penalty_H=Penalty(0.0, 0.02)))


def test_a_program_keeps_its_penalties(tmp_path):
    X = np.vstack(parts())
    model = partsong.FederatedNMF(method=penalised(), rounds=30, random_state=0).fit(parts())
    W = model.transform(X)
    expected = penalised().solver.solve_rows(as_matrix(X), np.ascontiguousarray(model.components_.T))
    assert_allclose(W, expected, rtol=1e-9, atol=1e-12)
    free = recipes.shared_statistics(4).solver.solve_rows(as_matrix(X), np.ascontiguousarray(model.components_.T))
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
    [{"method": "avg"}, {"method": 3}, {"method": None}, {"method": Consensus}, {"start": "alone"},
     {"rounds": 0}, {"rounds": True}, {"local_steps": "3"}, {"n_jobs": "2"}, {"n_jobs": 0}, {"n_jobs": -3},
     {"verbose": "x"}, {"tol": "a"}, {"tol": None}, {"time_budget": "x"}, {"dtype": "foo"}, {"dtype": int},
     {"random_state": "a"}],
    ids=str,
)  # fmt: skip
def test_senseless_settings_are_refused_by_name(settings):
    (name,) = settings
    with pytest.raises(ParameterError, match=name):
        partsong.FederatedNMF(2, **settings).fit(parts())


@pytest.mark.parametrize("names", [["a", "a", "b"], [1, 2, 3], ["a", None, "b"]])
def test_senseless_names_of_parties_are_refused(names):
    with pytest.raises(ParameterError, match=r"[Nn]ames"):
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
    for settings in ({"method": "avg"}, {"start": "alone"}, {"rounds": 0}, {"local_steps": 0}, {"n_components": 0}):
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
    settings = {"method": "fedavg", "local_steps": 50, "rounds": 2, "random_state": 0, "start": "independent"}
    independent = partsong.FederatedNMF(4, **settings).fit(parts())
    assert common.relative_error_ < independent.relative_error_


METHODS = ["exact", "fnmf", "fedavg", "fedprox", "ipalm-once", "mur-once"]


def skewed(seed=0):
    rng = np.random.default_rng(seed)
    H = (rng.random((4, 30)) < 0.25) * rng.random((4, 30))
    return rng.gamma(0.5, size=(240, 4)) @ H + 0.02 * rng.random((240, 30))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("start", ["common", "independent"])
def test_every_method_by_name(method, start):
    X = skewed()
    if (method, start) == ("exact", "independent"):
        with pytest.raises(ParameterError, match="one start for all"):
            partsong.FederatedNMF(4, method=method, start=start).fit(np.array_split(X, 4))
        return
    model = partsong.FederatedNMF(4, method=method, start=start, rounds=3, local_steps=20, tol=0, random_state=0)
    model.fit(np.array_split(X, 4))
    assert model.components_.shape == (4, 30)
    assert model.n_iter_ == (1 if "once" in method else 3)
    assert set(model.party_components_) == set(model.alignments_) == set(model.parties_)
    for name in model.parties_:
        P, own = model.alignments_[name], model.party_components_[name]
        assert_allclose(P.sum(axis=0), 1)
        assert_allclose(P.sum(axis=1), 1)
        assert_allclose(np.linalg.norm(own, axis=1)[np.linalg.norm(own, axis=1) > 0], 1, rtol=1e-9)
        if method == "exact":
            assert_allclose(P @ own, model.components_)
    last = model.history_[-1]
    assert np.isnan(last.drift) == (method == "exact")
    if method != "exact":
        assert 0 <= last.aligned_drift <= last.drift * (1 + 1e-9)
    assert model.transform(X[:5]).shape == (5, 4)


def test_fnmf_needs_two_rounds_where_averages_fail():
    X = skewed(2)
    parts = np.array_split(X, 6)
    settings = {"rounds": 2, "local_steps": 300, "start": "independent", "tol": 0, "random_state": 1}
    pooled = partsong.NMF(4, random_state=0, tol=1e-6, max_iter=300).fit(X).relative_error_
    fnmf = partsong.FederatedNMF(4, method="fnmf", **settings).fit(parts)
    assert fnmf.relative_error_ < 1.1 * pooled
    assert partsong.FederatedNMF(4, method="fedavg", **settings).fit(parts).relative_error_ > 2 * pooled
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
    with pytest.raises(ParameterError, match="not both"):
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
        ([0.5] * 240, "240|235 more"),
    ):
        with pytest.raises(ParameterError, match=words):
            partsong.FederatedNMF(2).fit(X, parties=labels)
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X)
    with pytest.raises(ShapeError, match="another index"):
        partsong.FederatedNMF(2).fit(frame, parties=pandas.Series(["a", "b"] * 120, index=frame.index[::-1]))


@pytest.mark.parametrize("method", METHODS)
def test_a_method_does_as_its_name_says_unless_told_otherwise(method):
    from partsong.methods import INDEPENDENT, LOCAL_STEPS

    X = np.array_split(skewed()[:60, :12], 3)
    start = "independent" if method in INDEPENDENT else "common"
    told = partsong.FederatedNMF(
        2, method=method, rounds=2, local_steps=LOCAL_STEPS[method], start=start, random_state=0
    )
    plain = partsong.FederatedNMF(2, method=method, rounds=2, random_state=0)
    assert plain.fit(X).components_.tobytes() == told.fit(X).components_.tobytes()


def test_settings_that_would_be_ignored_are_refused():
    X = np.array_split(skewed(), 3)
    for settings in (
        {"method": "exact", "align": "sinkhorn"},
        {"method": recipes.fnmf(2), "local_steps": 5},
        {"method": recipes.fnmf(2), "start": "common"},
        {"method": recipes.fnmf(2), "align": "nearest"},
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
