"""`partsong.compare`: the same parties alone, together and pooled; sums that add up, and errors with a name."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from contextlib import contextmanager

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from typer.testing import CliRunner

import partsong
from partsong.cli.main import app
from partsong.core.interfaces import Outcome, Shard
from partsong.data.conversion import as_matrix
from partsong.errors import CompositionError, DataError, FeatureError, ParameterError, ShapeError
from partsong.estimators.compare import COMPARABLE, IncompleteWarning, pooled
from partsong.training.loop import LeftOutWarning

BRIEF = {
    "rounds": {"local": 15, "exact": 15, "pooled": 15, "fedavg": 8, "fnmf": 3},
    "local_steps": {"fedavg": 3, "fnmf": 15},
}


@pytest.fixture(scope="module")
def federation() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    H = rng.random((4, 14)) ** 3
    return [rng.random((n, 4)) @ H + 0.05 * rng.random((n, 14)) for n in (25, 40, 12)]


@pytest.fixture(scope="module")
def found(federation: list[np.ndarray]) -> partsong.estimators.compare.Comparison:
    return partsong.compare(federation, 3, names=["x", "y", "z"], random_state=1, **BRIEF)


def row(comparison, method):
    return next(line for line in comparison.rows if line.method == method)


def test_exact_is_pooled(found):
    assert row(found, "exact").relative_error == pytest.approx(row(found, "pooled").relative_error, abs=1e-6)
    np.testing.assert_allclose(found.components["exact"], found.components["pooled"], atol=1e-6)
    for name in ("x", "y", "z"):
        exact, oracle = (found.per_party[method][name] for method in ("exact", "pooled"))
        assert exact.relative_error == pytest.approx(oracle.relative_error, abs=1e-6)
        np.testing.assert_allclose(exact.shares, oracle.shares, atol=1e-6)


@pytest.mark.parametrize("method", ["local", "fedavg", "fnmf", "exact", "pooled"])
def test_sums_over_parties_give_the_table(found, federation, method):
    line, parties = row(found, method), found.per_party[method]
    norms = {name: float(np.square(X).sum()) for name, X in zip("xyz", federation, strict=True)}
    squared = sum(parties[name].relative_error ** 2 * norms[name] for name in norms)
    assert line.relative_error == pytest.approx(math.sqrt(squared / sum(norms.values())), rel=1e-9)
    assert line.explained_variance == pytest.approx(1 - line.relative_error**2)
    assert line.party_errors == {name: at.relative_error for name, at in parties.items()}
    assert [parties[name].rows for name in "xyz"] == [25, 40, 12]
    for at in parties.values():
        assert sum(at.shares) == pytest.approx(1.0)
        assert len(at.shares) == 3


@pytest.mark.parametrize("method", ["local", "fedavg", "fnmf", "exact", "pooled"])
def test_errors_at_parties_are_those_of_the_best_weights(found, federation, method):
    from scipy.optimize import nnls

    for name, X in zip("xyz", federation, strict=True):
        at = found.per_party[method][name]
        H = at.own.components if method == "local" else found.components[method]
        residual = math.sqrt(sum(nnls(H.T.astype(float), x)[1] ** 2 for x in X))
        assert at.relative_error == pytest.approx(residual / np.linalg.norm(X), rel=1e-6)


def test_drifts_are_those_of_the_estimator(federation):
    settings = {"local_steps": 15, "random_state": 1}
    model = partsong.FederatedNMF(3, method="fnmf", rounds=1, tol=0.0, **settings).fit(federation)
    line = partsong.compare(federation, 3, ["fnmf"], rounds=1, **settings).rows[0]
    last = model.history_[-1]
    assert (line.drift, line.aligned_drift) == pytest.approx((last.drift, last.aligned_drift))
    assert line.relative_error == pytest.approx(model.relative_error_)
    assert line.bytes_up_per_party == pytest.approx(last.bytes_up / 3)


def test_parties_of_fnmf_show_what_they_had_found_themselves(federation, tmp_path):
    found = partsong.compare(federation, 3, ["fnmf"], rounds=4, local_steps=15, names=["x", "y", "z"], random_state=1)
    alone = partsong.compare(federation, 3, ["fnmf"], rounds=1, local_steps=15, names=["x", "y", "z"], random_state=1)
    assert found.rows[0].aligned_drift > 0
    for name, at in found.per_party["fnmf"].items():
        assert at.own_error == pytest.approx(alone.per_party["fnmf"][name].own_error)
        assert sorted(map(tuple, at.own.components)) == sorted(map(tuple, alone.per_party["fnmf"][name].own.components))
        assert 0 < at.aligned_drift <= at.drift * (1 + 1e-9)
    assert "Parties have no local components" not in found.save_report(tmp_path / "r.html").read_text("utf-8")


def test_one_party_alone_is_everybody(federation):
    methods = ["local", "exact", "pooled"]
    alone = partsong.compare(federation[:1], 3, methods, rounds=dict.fromkeys(methods, 10), random_state=0)
    errors = [line.relative_error for line in alone.rows]
    assert errors == pytest.approx([errors[0]] * 3, abs=1e-12)


def test_a_party_alone_does_not_know_of_the_others(federation):
    few, more = (
        partsong.compare(parties, 3, ["local"], rounds=10, random_state=0, names=names)
        for parties, names in ((federation[:1], ["a"]), (federation, ["a", "b", "c"]))
    )
    assert few.per_party["local"]["a"].relative_error == more.per_party["local"]["a"].relative_error
    assert more.rows[0].bytes_up_per_party == 0
    assert more.components == {}


def test_more_iterations_never_hurt_a_party_alone(federation):
    short, long = (
        partsong.compare(federation, 3, ["local"], rounds={"local": n}, random_state=0).rows[0] for n in (3, 30)
    )
    assert (short.local_steps, long.local_steps) == (3, 30)
    assert all(long.party_errors[name] <= short.party_errors[name] + 1e-9 for name in long.party_errors)


@pytest.mark.parametrize("rounds", [None, 2, {"exact": 2, "fnmf": 2}, {"fnmf": 2}, 130, {"exact": 130}])
def test_few_rounds_do_not_cut_the_references_short(federation, rounds):
    methods = ["local", "fnmf", "exact", "pooled"]
    found = partsong.compare(federation, 3, methods, rounds=rounds, local_steps={"fnmf": 5}, random_state=0)
    made = {m.name: len(m.curve.rounds) for m in found.findings}
    asked = rounds if isinstance(rounds, int) else (rounds or {}).get("exact", 100)
    assert made["exact"] == asked
    assert made["local"] == made["pooled"] == max(100, asked)
    assert (row(found, "local").local_steps, row(found, "pooled").rounds) == (made["local"], made["pooled"])
    assert row(found, "pooled").relative_error <= row(found, "exact").relative_error + 1e-9
    without = partsong.compare(federation, 3, ["pooled"], rounds=2, random_state=0).rows[0]
    assert without.rounds == 100, "whether exact is there or not"


def test_references_are_as_short_as_a_mapping_says(federation):
    methods = ["local", "exact", "pooled"]
    found = partsong.compare(federation, 3, methods, rounds={"local": 4, "pooled": 7}, random_state=0)
    assert [len(m.curve.rounds) for m in found.findings] == [4, 100, 7]


def test_captions_say_where_the_same_iteration_was_not_made_equally_often(federation, found):
    assert "Number of iterations" not in found.caption
    unequal = partsong.compare(federation, 3, ["local", "exact", "pooled"], rounds=3, random_state=0)
    told = "“exact” 3, “local” 100 and “pooled” 100; after as many, “exact” equals “pooled”."
    assert f"Number of iterations: {told}" in unequal.caption
    assert told in " ".join(str(unequal).split())
    alone = partsong.compare(federation, 3, ["local", "exact"], rounds=3, random_state=0)
    assert alone.caption.endswith("Number of iterations: “exact” 3, “local” 100.")


def test_the_help_says_that_references_are_not_cut_short():
    assert "at least 100" in " ".join(CliRunner().invoke(app, ["compare", "--help"]).output.replace("│", " ").split())


def test_starts_are_stated_and_common_ones_are_one(federation):
    given = partsong.compare(federation, 3, random_state=1, **BRIEF)
    assert [line.init_mode for line in given.rows] == ["shared", "shared", "local", "shared", "shared"]
    for init_mode in ("shared", "local"):
        both = partsong.compare(
            federation, 3, ["fedavg", "fnmf"], init_mode=init_mode, random_state=1, rounds=2, local_steps=2
        )
        assert {line.init_mode for line in both.rows} == {init_mode}


def test_the_same_seed_gives_the_same_numbers(found, federation):
    again = partsong.compare(federation, 3, names=["x", "y", "z"], random_state=1, **BRIEF)
    for first, second in zip(found.rows, again.rows, strict=True):
        assert repr(first._replace(seconds=0.0)) == repr(second._replace(seconds=0.0))
    for method, H in found.components.items():
        np.testing.assert_array_equal(H, again.components[method])


def test_labels_of_rows_are_as_good_as_a_list(federation):
    stacked, labels = np.vstack(federation), np.repeat(["x", "y", "z"], [len(X) for X in federation])
    listed = partsong.compare(federation, 3, ["fedavg", "exact"], names=["x", "y", "z"], rounds=4, random_state=0)
    shuffled = np.random.default_rng(0).permutation(len(labels))
    labelled = partsong.compare(
        stacked[shuffled], 3, ["fedavg", "exact"], parties=labels[shuffled], rounds=4, random_state=0
    )
    for one, other in zip(listed.rows, labelled.rows, strict=True):
        assert one.relative_error == pytest.approx(other.relative_error, abs=1e-9)
        assert one.party_errors == pytest.approx(other.party_errors, abs=1e-9)


@pytest.mark.parametrize("form", [sp.csr_array, sp.csc_array, np.asfortranarray, lambda X: X.astype(np.float32)])
def test_any_form_of_rows_is_pooled(federation, form):
    parties = [form(X) for X in federation]
    equally = {"exact": 8, "pooled": 8}
    errors = [
        line.relative_error for line in partsong.compare(parties, 3, list(equally), rounds=equally, random_state=0).rows
    ]
    assert errors[0] == pytest.approx(errors[1], abs=1e-6)
    shard = pooled([Shard(str(i), as_matrix(X)) for i, X in enumerate(parties)])
    np.testing.assert_allclose(shard.matrix.rows(np.arange(77)).times(np.eye(14)), np.vstack(federation), rtol=1e-6)


def test_sparse_and_dense_parties_are_pooled_together(federation):
    mixed = [sp.csr_array(federation[0]), *federation[1:]]
    equally = {"exact": 8, "pooled": 8}
    exact, oracle = partsong.compare(mixed, 3, list(equally), rounds=equally, random_state=0).rows
    assert exact.relative_error == pytest.approx(oracle.relative_error, abs=1e-6)


def test_tensors_are_compared_too(federation):
    torch = pytest.importorskip("torch")
    parties = [torch.from_numpy(X) for X in federation]
    ours = partsong.compare(parties, 3, random_state=1, names=["x", "y", "z"], **BRIEF)
    assert row(ours, "exact").relative_error == pytest.approx(row(ours, "pooled").relative_error, abs=1e-6)


def test_tables_tell_all_methods_and_their_treatment(found):
    text = str(found)
    lines = found.to_table().splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["local", "fedavg", "fnmf", "exact", "pooled"]
    assert "all rows" in lines[-1]
    assert "nothing" in lines[2]
    for word in ("Rank 3", "seed 1", "3 parties", "without compiling"):
        assert word in " ".join(text.split())
    assert repr(found) == text
    page = found._repr_html_()
    for line in found.rows:
        assert f">{line.method}<" in page
    assert page.count("<tr") == 6


def test_hostile_names_of_parties_stay_text(federation, tmp_path):
    hostile = "<script>alert(1)</script>"
    names = [hostile, "b", "c"]
    frames = [pd.DataFrame(X, columns=[f"{hostile}{i}" for i in range(14)]) for X in federation]
    compared = partsong.compare(frames, 3, names=names, random_state=1, **BRIEF)
    page = compared.save_report(tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<script" not in page + compared._repr_html_()
    assert page.count("&lt;script&gt;") > 5


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"methods": ()}, ParameterError, "list of names"),
        ({"methods": "fnmf"}, ParameterError, "list of names"),
        ({"methods": ("fnmf", "magic")}, ParameterError, "magic"),
        ({"methods": ("fnmf", "fnmf")}, ParameterError, "unique"),
        ({"rounds": 0}, ParameterError, "rounds"),
        ({"rounds": {"fnmf": 0}}, ParameterError, "fnmf"),
        ({"rounds": {"fedprox": 3}}, ParameterError, "fedprox"),
        ({"local_steps": 1.5}, ParameterError, "local_steps"),
        ({"start": "warm"}, ParameterError, "start"),
        ({"n_components": 0}, ParameterError, "n_components"),
        ({"random_state": "seed"}, ParameterError, "random_state"),
        ({"dtype": "int8"}, ParameterError, "dtype"),
        ({"verbose": -1}, ParameterError, "verbose"),
        ({"names": ["a"]}, ParameterError, "names"),
        ({"X": []}, ParameterError, "at least one matrix"),
        ({"X": np.ones((3, 2))}, ShapeError, "list"),
        ({"X": [np.ones((3, 2)), np.ones((3, 4))]}, CompositionError, "party-02"),
        ({"X": [np.ones((3, 2)), np.full((3, 2), np.nan)]}, DataError, "party-02"),
        ({"X": [np.ones((3, 2)), -np.ones((3, 2))]}, DataError, "party-02"),
        ({"X": [np.ones((3, 2)), np.ones((0, 2))]}, DataError, "party-02"),
        (
            {"X": [pd.DataFrame({"u": [1.0], "v": [2.0]}), pd.DataFrame({"u": [1.0], "w": [2.0]})]},
            FeatureError,
            "party-02",
        ),
    ],
)
def test_bad_input_is_refused_by_name(federation, settings, error, words):
    given = {"X": federation, "n_components": 2, "methods": ("local", "fnmf"), "random_state": 0} | settings
    with pytest.raises(error, match=words):
        partsong.compare(**given)


def test_sketches_of_rows_are_compared_where_there_are_enough_rows():
    parties = [np.random.default_rng(seed).random((60, 5)) for seed in range(3)]
    found = partsong.compare(parties, 3, ["secure-dsanls"], rounds=5, random_state=0).findings[0]
    assert {sent.array for sent in found.sent} == {"rows", "data", "weights", "weight"}
    assert sum(sent.bytes_total for sent in found.sent) == found.bytes_up_per_party


ON_FEW_ROWS = tuple(name for name in COMPARABLE if name != "secure-dsanls")


@pytest.mark.parametrize("method", ON_FEW_ROWS)
def test_every_method_copes_with_odd_parties(method):
    odd = [np.diag([0.0, 0.0, 1.0]) @ np.ones((3, 5)), np.ones((1, 5)), np.random.default_rng(0).random((2, 5))]
    line = partsong.compare(odd, 4, [method], rounds=2, local_steps=None, random_state=0).rows[0]
    assert 0 <= line.relative_error <= 1 + 1e-9
    assert all(math.isfinite(value) for value in line.party_errors.values())


@pytest.mark.parametrize("method", ON_FEW_ROWS)
def test_what_left_a_party_adds_up_to_what_it_sent(federation, method):
    found = partsong.compare(federation, 3, [method], rounds=5, local_steps=None, random_state=0).findings[0]
    assert sum(sent.bytes_total for sent in found.sent) == found.bytes_up_per_party
    exchanges = {"syn-ssd-u": 11, "syn-ssd-v": 11, "syn-ssd-uv": 11, "game": len(federation), "fnmf-by-sums": 2}.get(
        method, 1
    )
    times = sum(sent.times for sent in found.sent if sent.array == "weight")
    assert times == (found.rounds * exchanges if found.sent else 0)


@pytest.mark.parametrize("method", ON_FEW_ROWS)
def test_the_curve_knows_what_was_sent_by_each_round(federation, method):
    """Not an even share: the first round of fnmf sends H alone, the others WᵀW and WᵀX; some methods send often."""
    found = partsong.compare(federation, 3, [method], rounds=5, local_steps=None, random_state=0).findings[0]
    if found.is_oracle or not found.sent:
        assert found.curve.bytes_up == ()
        return
    sent = np.diff(found.curve.bytes_up, prepend=0.0)
    assert found.curve.bytes_up[-1] == found.bytes_up_per_party
    assert len(sent) == len(found.curve.rounds)
    columns = federation[0].shape[1]
    components, sums = 8 * 3 * columns + 8, 8 * (3 * columns + 9 + 2) + 8
    sketch = 8 * 9 + 8
    kinds = {"exact": [sums] * 5, "fnmf": [components, *[sums] * 4], "syn-ssd-v": [11 * components] * 5}
    kinds |= dict.fromkeys(("syn-ssd-u", "syn-ssd-uv"), [components + 10 * sketch] * 5)
    parties = len(federation)
    block = 8 * (3 * -(-columns // parties) + 3 + 6) + 8  # of columns, its place, totals
    kinds["game"] = [parties * block] * 5
    kinds["moment"] = [8 * (columns * (columns + 1) // 2) + 8, sums, sums]
    kinds["fnmf-by-sums"] = [2 * (components + 8 * 3)] * 5
    assert sent.tolist() == kinds.get(method, [components] * len(sent))


def test_every_kind_of_upload_is_told_with_its_rounds(federation, tmp_path):
    found = partsong.compare(federation, 3, ["fnmf"], rounds=5, local_steps=2, random_state=0)
    times = {sent.array: sent.times for sent in found.findings[0].sent if sent.array != "weight"}
    assert times == {"H": 1, "gram": 4, "cross": 4, "rows": 4, "energy": 4}
    page = found.save_report(tmp_path / "r.html").read_text(encoding="utf-8")
    assert all(f">{array}<" in page for array in times)


@pytest.mark.parametrize("form", [dict, lambda pairs: (X for _, X in pairs), lambda pairs: tuple(X for _, X in pairs)])
def test_parties_come_in_all_forms_of_the_estimator(federation, form):
    names = ["party-01", "party-02", "party-03"]
    given = form(zip(names, federation, strict=True))
    ours, listed = (partsong.compare(X, 3, ["exact"], rounds=2, random_state=0).rows[0] for X in (given, federation))
    assert ours.party_errors == listed.party_errors


@pytest.mark.parametrize("given", [{"X": np.ones((3, 2))}, {"X": [np.ones((3, 2))], "parties": [0, 0, 1]}, {"X": "x"}])
def test_other_forms_are_refused_in_words_that_fit_this_function(given):
    with pytest.raises(ShapeError, match=r"list with one matrix per party, \[X_1") as refused:
        partsong.compare(**given)
    assert "fit" not in str(refused.value)


@contextmanager
def signals_in(monkeypatch, method, *, at=3, number=signal.SIGINT, times=1):
    """The signal arrives so often after round `at` of a method."""

    @contextmanager
    def progress(verbose, rounds, time_budget, title):
        def watch(done, row):
            for _ in range(times if (title, row.iteration) == (method, at) else 0):
                signal.raise_signal(number)

        yield watch

    with monkeypatch.context() as patch:
        patch.setattr("partsong.estimators.compare.progress", progress)
        yield


def test_a_first_interrupt_keeps_what_is_there_and_says_what_is_not(federation, monkeypatch, tmp_path):
    methods = ["exact", "fedavg", "fnmf", "pooled"]
    whole = partsong.compare(federation, 3, methods, rounds=6, random_state=0)
    assert whole.is_complete
    assert not whole.missing
    assert {line.outcome for line in whole.rows} == {Outcome.MAX_ROUNDS}
    with signals_in(monkeypatch, "fedavg"), pytest.warns(IncompleteWarning, match="fedavg.*not started: fnmf, pooled"):
        part = partsong.compare(federation, 3, methods, rounds=6, random_state=0)
    assert not part.is_complete
    assert part.missing == ("fnmf", "pooled")
    assert [(line.method, line.rounds, line.outcome) for line in part.rows] == [
        ("exact", 6, Outcome.MAX_ROUNDS),
        ("fedavg", 3, Outcome.INTERRUPTED),
    ]
    assert part.rows[0].relative_error == whole.rows[0].relative_error
    page = part.save_report(tmp_path / "r.html").read_text(encoding="utf-8")
    for told in (str(part), part._repr_html_(), page):
        assert "interrupted" in told
        assert "not started: fnmf, pooled" in " ".join(told.split())


def test_an_interrupt_in_the_last_round_breaks_nothing_off(federation, monkeypatch):
    with signals_in(monkeypatch, "fedavg", at=6):
        found = partsong.compare(federation, 3, ["exact", "fedavg"], rounds=6, random_state=0)
    assert found.is_complete
    assert found.was_interrupted
    assert found.rows[1].outcome is Outcome.MAX_ROUNDS


def test_a_second_interrupt_raises(federation, monkeypatch):
    with signals_in(monkeypatch, "fedavg", times=2), pytest.raises(KeyboardInterrupt):
        partsong.compare(federation, 3, ["exact", "fedavg", "pooled"], rounds=6, random_state=0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_while_warming_up_is_not_lost(federation, monkeypatch):
    from partsong.estimators import compare as comparison

    def record(recorder, done, row):
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison.Recorder, "record", record)
    with pytest.raises(KeyboardInterrupt):
        partsong.compare(federation, 3, ["exact"], rounds=6, random_state=0)


def test_parties_alone_tell_the_steps_that_they_really_made(federation, monkeypatch):
    from partsong.estimators import compare as compare_alone

    run = compare_alone.run

    def interrupted(fit, *, interrupts=None, **more):
        if interrupts is not None and fit.shards[0].name == "b":
            os.kill(os.getpid(), signal.SIGINT)
            until = time.monotonic() + 30
            while not interrupts.count and time.monotonic() < until:
                time.sleep(0.001)
        return run(fit, interrupts=interrupts, **more)

    monkeypatch.setattr(compare_alone, "run", interrupted)
    with pytest.warns(IncompleteWarning, match="local.*not started: exact"):
        found = partsong.compare(federation, 3, ["local", "exact"], names=list("abc"), rounds=50, random_state=0)
    assert found.rows[0].outcome is Outcome.INTERRUPTED
    assert found.rows[0].local_steps == 1
    assert found.missing == ("exact",)


@pytest.fixture
def parts(federation, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.vstack(federation))
    assert CliRunner().invoke(app, ["split", "x.npy", "--parties", "3", "-o", "parts"]).exit_code == 0
    return "parts"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_command_says_so_by_its_code_and_in_words(parts, monkeypatch, number, code):
    words = ["compare", parts, "-k", "3", "--rounds", "6", "--local-steps", "2"]
    with signals_in(monkeypatch, "fedavg", number=number):
        done, plain = (CliRunner().invoke(app, [*words, *more]) for more in (["--json"], []))
    assert (done.exit_code, plain.exit_code) == (code, code)
    told = json.loads(done.stdout.splitlines()[-1])
    assert [(line["method"], line["outcome"]) for line in told["methods"]] == [
        ("local", "max-rounds"),
        ("fedavg", "interrupted"),
    ]
    assert told["methods"][1]["rounds"] == 3
    assert (told["is_complete"], told["missing"]) == (False, ["fnmf", "exact", "pooled"])
    assert "not started: fnmf, exact, pooled" in done.stderr
    assert "not started: fnmf, exact, pooled" in plain.stderr
    assert "interrupted" in plain.stdout


def test_the_command_line_compares(parts, tmp_path):
    words = ["compare", parts, "-k", "3", "--rounds", "3", "--local-steps", "2", "--report", "r.html", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout.splitlines()[-1])
    assert [line["method"] for line in told["methods"]] == ["local", "fedavg", "fnmf", "exact", "pooled"]
    assert set(told["methods"][0]["parties"]) == {"party-01", "party-02", "party-03"}
    assert (tmp_path / "r.html").read_text(encoding="utf-8").count("party-03") > 3
    assert CliRunner().invoke(app, ["compare", "x.npy"]).exit_code == 1
    assert CliRunner().invoke(app, ["compare", "parts", "--method", "magic"]).exit_code == 2
    assert CliRunner().invoke(app, ["compare", "parts", "--method", "pooled", "--method", "pooled"]).exit_code == 2
    assert told["is_complete"]
    assert {line["outcome"] for line in told["methods"]} == {"max-rounds"}


def test_parties_that_cannot_be_used_are_left_out_if_asked_for(federation):
    bad = [*federation, np.full((4, federation[0].shape[1]), np.nan), np.zeros((4, federation[0].shape[1]))]
    names = [f"p{i}" for i in range(len(bad))]
    settings = {"methods": ["local", "exact", "pooled"], "rounds": 3, "random_state": 0}
    with pytest.raises(DataError, match=r"In party .* NaN in data: .* of party"):
        partsong.compare(bad, 3, names=names, **settings)
    with pytest.warns(LeftOutWarning, match="left out of this run"):
        found = partsong.compare(bad, 3, names=names, on_party_error="skip", **settings)
    assert list(found.left_out) == names[-2:]
    assert f"Skipped because of invalid data: {', '.join(names[-2:])}." in found.caption
    expected = partsong.compare(federation, 3, names=names[:-2], **settings)
    assert [row.relative_error for row in found.rows] == [row.relative_error for row in expected.rows]
    with pytest.raises(ParameterError, match="on_party_error"):
        partsong.compare(federation, 3, on_party_error="ignore", **settings)


def test_the_command_line_leaves_out_if_asked_for(parts, tmp_path):
    (tmp_path / "parts/party-02.npz").write_bytes(b"nothing")
    words = ["compare", parts, "-k", "3", "--rounds", "2", "--method", "exact", "--json"]
    assert CliRunner().invoke(app, words).exit_code == 1
    done = CliRunner().invoke(app, [*words, "--on-party-error", "skip"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout.splitlines()[-1])
    assert list(told["left_out"]) == ["party-02"]
    assert set(told["methods"][0]["parties"]) == {"party-01", "party-03"}
    assert "Party 'party-02' is left out of this comparison." in done.stderr
