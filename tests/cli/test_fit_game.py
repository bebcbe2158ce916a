"""Games from the command line: the same as in Python, told, kept and gone on with; and known cells alone."""

import json
import re

import numpy as np
import pytest
from scipy import sparse

import partsong
from partsong.console import options
from partsong.estimators.validation import MISSING
from partsong.solvers.game import ConstantStep, DecayingStep, Game, ShrinkOthers, ShrinkSmallest
from partsong.solvers.game_orders import Raster, Shuffled, Simultaneous

PLAIN = {
    "play": "stratified", "step": "safe", "step_decay": None, "self_play": "none", "shrink": None, "leader": None,
    "missing": "refuse",
}  # fmt: skip
GAMES = {
    "as it comes": ([], Game(), {}),
    "raster, leader": (
        ["--game-order", "sequential", "--leader", "columns"],
        Game(Raster(), leader="columns"),
        {"play": "sequential", "leader": "columns"},
    ),
    "random, constant": (
        ["--game-order", "random", "--step", "0.05"],
        Game(Shuffled(), ConstantStep(0.05)),
        {"play": "random", "step": 0.05},
    ),
    "falling, max": (
        ["--step", 0.1, "--step-decay", 0.01, "--self-play", "max"],
        Game(step=DecayingStep(0.1, 0.01), self_play=ShrinkOthers()),
        {"step": 0.1, "step_decay": 0.01, "self_play": "max", "shrink": 0.99},
    ),
    "at once, min": (
        ["--game-order", "simultaneous", "--self-play", "min", "--shrink", 0.9],
        Game(Simultaneous(), self_play=ShrinkSmallest(0.9)),
        {"play": "simultaneous", "self_play": "min", "shrink": 0.9},
    ),
}


def same_model(a, b):
    a, b = partsong.load_model(a), partsong.load_model(b)
    np.testing.assert_array_equal(a.components, b.components)
    assert a.relative_error == b.relative_error


def test_names_are_those_of_the_library():
    assert options.MISSING == MISSING


@pytest.mark.parametrize("name", GAMES)
def test_same_bits_as_in_python_and_told_of_everywhere(told, data_npy, X, name, tmp_path):
    words, game, rules = GAMES[name]
    words = ["fit", data_npy, "-k", 3, "--solver", "game", "--seed", 5, "--max-iter", 8, "--tol", 0, *words]
    said = told(*words, "-o", "m.safetensors", "--run-folder", "run")
    estimator = partsong.NMF(3, solver=game, random_state=5, max_iter=8, tol=0).fit(X)
    model = partsong.load_model("m.safetensors")
    np.testing.assert_array_equal(model.components, estimator.components_)
    assert (said["relative_error"], said["iterations"]) == (estimator.relative_error_, 8)
    assert said["game"] == {**PLAIN, **rules}
    asked = json.loads((tmp_path / "run/settings.json").read_text())
    assert {rule: asked.get(rule, PLAIN[rule]) for rule in PLAIN} == said["game"]
    assert {rule: model.settings.get(rule, PLAIN[rule]) for rule in PLAIN} == said["game"]
    assert json.loads((tmp_path / "run/result.json").read_text())["game"] == said["game"]
    history = (tmp_path / "run/history.csv").read_text().splitlines()
    assert len(history) == 9
    shown = told("info", "m.safetensors")["settings"]
    assert (shown["solver"], shown["play"], shown["step"]) == ("game", said["game"]["play"], said["game"]["step"])


def test_other_solvers_say_nothing_of_games(told, data_npy):
    said = told("fit", data_npy, "-k", 3, "--max-iter", 3, "-o", "m.safetensors")
    assert "game" not in said
    assert not PLAIN.keys() & partsong.load_model("m.safetensors").settings.keys()


def test_a_report_for_people(invoke, data_npy):
    words = ["--max-iter", 3, "--step", 0.1, "--step-decay", 0.5, "--self-play", "max", "--leader", "rows"]
    done = invoke("fit", data_npy, "-k", 3, "--solver", "game", "-o", "m.safetensors", *words)
    assert "stratified play, steps of 0.1 / (1 + 0.5 t), self-play max (0.99), rows lead" in done.stdout


WRONG = {
    "no game": (["--game-order", "random"], "only for --solver game"),
    "no game, missing": (["--solver", "mu", "--missing", "ignore"], "--missing: only for --solver game"),
    "decay alone": (["--solver", "game", "--step-decay", 0.1], "--step-decay needs a numeric step"),
    "no step": (["--solver", "game", "--step", "fast"], "or a number above 0; got 'fast'"),
    "no size": (["--solver", "game", "--step", 0], "--step must be a number above 0; got 0"),
    "endless": (["--solver", "game", "--step", "inf"], "--step must be a number above 0; got inf"),
    "shrink alone": (["--solver", "game", "--shrink", 0.5], "--shrink needs self_play"),
    "no share": (["--solver", "game", "--self-play", "min", "--shrink", 1.5], "--shrink"),
    "leader of all": (["--solver", "game", "--game-order", "alternating", "--leader", "rows"], "move at once"),
    "penalty": (["--solver", "game", "--alpha-w", 0.1], "A game has no penalties"),
    "penalty on H": (["--solver", "game", "--alpha-h", 0.1], "A game has no penalties"),
    "start": (["--solver", "game", "--missing", "ignore", "--init", "nndsvd"], "--init 'nndsvd' needs all cells"),
    "near": (["--solver", "game", "--game-order", "sequentially"], "Did you mean 'sequential'?"),
    "a method": (["--method", "game"], "Use --solver"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_makes_no_sense_is_a_usage_error(invoke, data_npy, case):
    words, why = WRONG[case]
    refused = invoke("fit", data_npy, "-k", 3, "-o", "m.safetensors", *words, code=2)
    assert why in refused.stderr


def test_what_makes_no_sense_between_parties(invoke, parts):
    fit = ["fit", parts, "-k", 3, "-o", "m.safetensors"]
    assert "Use --method" in invoke(*fit, "--solver", "game", code=2).stderr
    assert "moves all players at once" in invoke(*fit, "--method", "game", "--game-order", "alternating", code=2).stderr
    assert "--step is for game" in invoke(*fit, "--method", "fedavg", "--step", 0.1, code=2).stderr
    assert "start from one H" in invoke(*fit, "--method", "game", "--init-mode", "local", code=2).stderr


def test_help_has_all_of_it(invoke):
    text = invoke("fit", "--help-all").stdout
    for flag in ("--game-order", "--step", "--step-decay", "--self-play", "--shrink", "--leader", "--missing"):
        assert flag in text


def test_a_step_that_is_too_large_is_told_with_the_way_out(told, invoke, data_npy, X):
    words = ["fit", data_npy, "-k", 3, "--solver", "game", "--seed", 5, "--max-iter", 20, "-o", "m.safetensors"]
    assert "Use a smaller step, or a safe step." in invoke(*words, "--step", 40, code=1).stderr
    done = invoke(*words, "--step", 40, "--game-order", "simultaneous", "--json")
    assert json.loads(done.stdout)["outcome"] == "diverged"
    assert np.isfinite(partsong.load_model("m.safetensors").components).all()
    assert told(*words, "--step", "safe")["outcome"] != "diverged"


class TestGoingOn:
    @pytest.mark.parametrize(
        "words",
        [
            [],
            ["--game-order", "random", "--step", 0.1, "--step-decay", 0.1],
            ["--game-order", "alternating", "--self-play", "max"],
        ],
    )
    def test_a_file(self, invoke, data_npy, words):
        begin = ["fit", data_npy, "-k", 3, "--seed", 4, "--tol", 0, "--solver", "game", *words, "-q"]
        invoke(*begin, "--max-iter", 9, "-o", "whole.safetensors")
        invoke(*begin, "--max-iter", 4, "-o", "half.safetensors", "--checkpoint", "c.ckpt")
        invoke("fit", data_npy, "--resume", "c.ckpt", "--max-iter", 9, "-o", "joined.safetensors", "-q")
        same_model("whole.safetensors", "joined.safetensors")
        with pytest.raises(AssertionError):
            same_model("half.safetensors", "joined.safetensors")

    def test_parts_in_the_middle_of_a_sweep(self, told, parts, tmp_path, monkeypatch):
        begin = ["fit", parts, "-k", 3, "--seed", 4, "--tol", 0, "--method", "game", "--self-play", "min"]
        whole = told(*begin, "--rounds", 6, "-o", "whole.safetensors", "--run-folder", "whole")
        from partsong.training.checkpoint import RunRecorder

        plain = RunRecorder.watch

        def at_the_fifth(recorder, done, row):
            plain(recorder, done, row)
            if recorder.checkpoint.index == 5:
                RunRecorder.save(recorder)
                raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(RunRecorder, "watch", at_the_fifth)
            told(*begin, "--rounds", 6, "-o", "half.safetensors", "--checkpoint", "c.ckpt", code=130)
        again = ["fit", parts, "--resume", "c.ckpt", "--rounds", 6, "-o", "joined.safetensors"]
        joined = told(*again, "--run-folder", "joined")
        same_model("whole.safetensors", "joined.safetensors")
        assert (joined["iterations"], joined["game"]) == (6, whole["game"])
        assert (tmp_path / "whole/bytes.csv").read_text() == (tmp_path / "joined/bytes.csv").read_text()

    def test_known_cells_stay_so(self, invoke, gaps):
        begin = ["fit", gaps, "-k", 2, "--seed", 4, "--tol", 0, "--solver", "game", "--missing", "ignore", "-q"]
        invoke(*begin, "--max-iter", 6, "-o", "whole.safetensors")
        invoke(*begin, "--max-iter", 3, "-o", "half.safetensors", "--checkpoint", "c.ckpt")
        invoke("fit", gaps, "--resume", "c.ckpt", "--max-iter", 6, "-o", "joined.safetensors", "-q")
        same_model("whole.safetensors", "joined.safetensors")

    def test_another_game_is_another_run(self, invoke, data_npy):
        begin = ["fit", data_npy, "-k", 3, "--tol", 0, "--max-iter", 3, "-o", "m.safetensors", "--checkpoint", "c.ckpt"]
        invoke(*begin, "--solver", "game")
        again = ["fit", data_npy, "--resume", "c.ckpt", "-o", "m.safetensors"]
        refused = invoke(*again, "--step", 0.1, "--game-order", "random", code=1).stderr
        assert "--step (safe there, 0.1 here)" in refused
        assert "--game-order (stratified there, random here)" in refused
        invoke(*begin)
        assert "only for --solver game" in invoke(*again, "--step", 0.1, code=2).stderr


class TestParts:
    def test_same_bits_as_in_python_and_traffic(self, told, parts, tmp_path):
        words = ["fit", parts, "-k", 3, "--method", "game", "--rounds", 5, "--tol", 0, "--seed", 2]
        said = told(*words, "-o", "m.safetensors", "--record", "--run-folder", "run")
        tables = {path.stem: partsong.read(path).X for path in sorted(parts.glob("*.npz"))}
        estimator = partsong.FederatedNMF(3, method="game", rounds=5, tol=0, random_state=2).fit(tables)
        np.testing.assert_array_equal(partsong.load_model("m.safetensors").components, estimator.components_)
        assert (said["iterations"], said["outcome"], said["game"]) == (5, "max-rounds", PLAIN)
        lines = [json.loads(line) for line in (tmp_path / "run/traffic.jsonl").read_text().splitlines()]
        assert len(lines) == 5 * 3 * 3  # sweeps, exchanges of each, parties
        assert {tuple(a["shape"]) for line in lines for a in line["arrays"] if a["name"] == "H"} == {(3, 4)}
        assert said["bytes_up_per_party"] == sum(line["bytes"] for line in lines) // 3
        errors = [line.split(",")[2] for line in (tmp_path / "run/history.csv").read_text().splitlines()[1:]]
        assert [bool(error) for error in errors] == [False, False, True] * 5

    def test_options_of_the_game(self, told, parts):
        words = [
            "fit",
            parts,
            "-k",
            3,
            "--method",
            "game",
            "--rounds",
            5,
            "--tol",
            0,
            "--seed",
            2,
            "-o",
            "m.safetensors",
        ]
        plain = told(*words)["relative_error"]
        for option in (["--game-order", "random"], ["--step", 0.1], ["--self-play", "max"], ["--leader", "rows"]):
            assert told(*words, *option)["relative_error"] != plain

    def test_comparison(self, told, parts):
        said = told("compare", parts, "-k", 3, "--method", "game", "--method", "exact", "--rounds", 8)
        game, exact = said["methods"]
        assert game["relative_error"] < 1.5 * exact["relative_error"]


@pytest.fixture
def gaps(tmp_path, X, names):
    """A table in which cells are blank, say NA, or nan; the same as an array, and as a sparse file."""
    known = np.random.default_rng(3).random(X.shape) < 0.7
    written = np.where(known, X, np.nan)
    words = ["", "NA", "nan"]
    lines = [",".join(names)]
    for i, row in enumerate(written):
        lines.append(",".join(words[(i + j) % 3] if np.isnan(x) else repr(float(x)) for j, x in enumerate(row)))
    path = tmp_path / "gaps.csv"
    path.write_text("\n".join(lines) + "\n")
    np.save(tmp_path / "gaps.npy", written)
    rows, columns = np.nonzero(known)
    sparse.save_npz(tmp_path / "gaps.npz", sparse.csr_array((X[known], (rows, columns)), shape=X.shape))
    return path


class TestKnownCells:
    FIT = ("-k", 3, "--solver", "game", "--seed", 1, "--max-iter", 10, "--tol", 0)

    def test_one_model_whatever_the_file(self, told, gaps, tmp_path):
        written = np.load(tmp_path / "gaps.npy")
        estimator = partsong.NMF(3, solver="game", missing="ignore", random_state=1, max_iter=10, tol=0).fit(written)
        for name in ("gaps.csv", "gaps.npy", "gaps.npz"):
            said = told("fit", name, *self.FIT, "--missing", "ignore", "-o", "m.safetensors", "--weights", "W.npy")
            model = partsong.load_model("m.safetensors")
            np.testing.assert_array_equal(model.components, estimator.components_)
            miss = np.nan_to_num(written - np.load("W.npy") @ model.components)
            assert said["relative_error"] == pytest.approx(
                np.linalg.norm(miss) / np.linalg.norm(np.nan_to_num(written))
            )
            assert said["game"]["missing"] == "ignore"

    def test_gaps_are_refused_without_it_with_a_hint(self, invoke, gaps):
        for name in ("gaps.csv", "gaps.npy"):
            refused = invoke("fit", name, *self.FIT, "-o", "m.safetensors", code=1).stderr
            assert "--solver game --missing ignore" in refused

    def test_a_sparse_file_has_zeros_without_it(self, told, gaps, tmp_path):
        said = told("fit", "gaps.npz", *self.FIT, "-o", "m.safetensors")
        dense = np.nan_to_num(np.load(tmp_path / "gaps.npy"))
        np.save("zeros.npy", dense)
        assert said["relative_error"] == pytest.approx(
            told("fit", "zeros.npy", *self.FIT, "-o", "z.safetensors")["relative_error"]
        )

    def test_other_faults_are_refused_with_it(self, invoke, gaps, tmp_path):
        X = np.load(tmp_path / "gaps.npy")
        for name, value, why in (("low", -1.0, "Negative"), ("high", np.inf, "Infinite")):
            np.save(f"{name}.npy", np.where(np.arange(X.size).reshape(X.shape) == 5, value, X))
            refused = invoke("fit", f"{name}.npy", *self.FIT, "--missing", "ignore", "-o", "m.safetensors", code=1)
            assert f"{name}.npy: {why}" in refused.stderr
        np.save("nothing.npy", np.full((4, 3), np.nan))
        refused = invoke("fit", "nothing.npy", *self.FIT, "--missing", "ignore", "-o", "m.safetensors", code=1)
        assert "no known cell" in refused.stderr
        (tmp_path / "text.csv").write_text("a,b,c\n1,2,\n3,four,5\n")
        refused = invoke("fit", "text.csv", *self.FIT, "--missing", "ignore", "-o", "m.safetensors", code=1)
        assert "1 cell(s) are not numbers: line 3, column 'b' reads 'four'" in refused.stderr

    def test_a_column_of_which_nothing_is_known(self, invoke, gaps, tmp_path):
        X = np.load(tmp_path / "gaps.npy")
        X[:, 4] = np.nan
        np.save("x.npy", X)
        done = invoke("fit", "x.npy", *self.FIT, "--missing", "ignore", "-o", "m.safetensors")
        assert "No cell is known in column 4 (counted from 0): it is zero in every component" in done.stderr
        assert not partsong.load_model("m.safetensors").components[:, 4].any()

    def test_transform_does_as_the_fit_did(self, told, invoke, gaps, tmp_path):
        said = told("fit", gaps, *self.FIT, "--missing", "ignore", "-o", "m.safetensors", "--weights", "W.npy")
        for name, words in (("gaps.csv", ["--missing", "ignore"]), ("gaps.npz", []), ("gaps.csv", [])):
            new = told("transform", name, "m.safetensors", "-o", "T.npy", *words)
            np.testing.assert_array_equal(np.load("T.npy"), np.load("W.npy"))
            assert (new["missing"], new["relative_error"]) == ("ignore", said["relative_error"])
        told("fit", "gaps.npy", *self.FIT, "--missing", "ignore", "-o", "nameless.safetensors")
        loaded = partsong.NMF.load("nameless.safetensors")
        np.testing.assert_array_equal(loaded.transform(np.load(tmp_path / "gaps.npy")), np.load("W.npy"))
        invoke("transform", gaps, "m.safetensors", "-o", "T.npy", "--missing", "refuse", code=1)
        zeros = told("transform", "gaps.npz", "m.safetensors", "-o", "T.npy", "--missing", "refuse")
        assert zeros["relative_error"] > 2 * said["relative_error"]
        told("fit", "gaps.npz", "-k", 3, "-o", "plain.safetensors")
        invoke("transform", gaps, "plain.safetensors", "-o", "T.npy", code=1)
        assert told("transform", gaps, "plain.safetensors", "-o", "T.npy", "--missing", "ignore")["missing"] == "ignore"

    @pytest.mark.parametrize("name", ["gaps.csv", "gaps.npy"])
    def test_check_tells_of_the_way_out(self, invoke, gaps, name):
        way = "`partsong fit` can ignore unknown cells: use --solver game --missing ignore"
        done = invoke("check", name, code=1)
        assert way in done.stdout + done.stderr
        said = json.loads(invoke("check", name, "--json", code=1).stdout)
        assert any(way in finding["remedy"] for finding in said["findings"])
        assert way not in invoke("check", "gaps.npz").stdout

    def test_parts_with_gaps(self, told, invoke, gaps, tmp_path):
        """Parts of a table with gaps and of a sparse file are the same parties."""
        invoke("split", gaps, "--parties", 3, "--seed", 1, "-o", "refused", code=1)
        found = []
        for name, words in (("gaps.csv", ["--missing", "ignore"]), ("gaps.npz", [])):
            folder = f"parts-{name}"
            invoke("split", name, "--parties", 3, "--seed", 1, "-o", folder, *words)
            fit = ["fit", folder, "-k", 3, "--method", "game", "--seed", 1, "--rounds", 6, "--tol", 0]
            found.append(told(*fit, "--missing", "ignore", "-o", "m.safetensors")["relative_error"])
        assert found[0] == found[1] < 0.1
        refused = invoke("fit", "parts-gaps.csv", "-k", 3, "--method", "game", "-o", "m.safetensors", code=1)
        assert "--method game --missing ignore" in refused.stderr


def test_a_game_between_parties_needs_parts(invoke, tmp_path):
    """What is said of DATA is true of a folder without parts, and of one that is not there."""
    (tmp_path / "empty").mkdir()
    for name in ("empty", "nowhere"):
        refused = invoke("fit", name, "--method", "game", "-o", "m.safetensors", code=2)
        said = " ".join(re.sub(r"[^\w`\-;,.:]", " ", refused.stderr).split())
        assert "DATA is a file, another folder, or missing. Use --solver." in said
