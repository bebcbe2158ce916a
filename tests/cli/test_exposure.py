"""Exposure on the command line: `check`, `fit`, `attack` on recorded runs, `federation join` and `run`."""

from __future__ import annotations

import json
import shutil
import tomllib

import numpy as np
import pytest

from partsong.data.table import Table
from partsong.io.party_folder import write_parts
from tests.cli.conftest import runner

pytest.importorskip("cryptography")

from partsong.cli.main import app
from partsong.federation.experiment import Experiment, with_seed
from partsong.federation.policy import POLICY, Policy, with_rare_columns
from partsong.federation.setup.server_folder import ServerFolder

WORDS = ("bounded", "unknown", "guess", "membership", "entries", "rows")


def written(place, X, parties):
    """Parts with as many rows each."""
    rows = {f"site{number}": block for number, block in enumerate(np.array_split(np.arange(len(X)), parties))}
    write_parts(place, Table(X), rows, {})
    return place


def sparse(seed, n, m, density):
    draw = np.random.default_rng(seed)
    X = draw.random((n, m)) * (draw.random((n, m)) < density)
    X[:, 0] += 0.01
    return X


def dense(seed, n, m):
    draw = np.random.default_rng(seed)
    return draw.gamma(1.0, size=(n, 8)) @ draw.gamma(0.5, size=(8, m)) + 0.3 * draw.random((n, m))


def recorded(invoke, parts, run, k, rounds, *words, seed=0):
    fit = ("fit", parts, "-k", k, "--method", "exact", "--rounds", rounds, "--tol", 0, "--seed", seed, "-q")
    invoke(*fit, "--run-folder", run, "--record", *words)
    return run


def found(said):
    return [max((each["rows_recovered"] or 0 for each in one["recovered"]), default=0) for one in said["parties"]]


def test_check_says_how_much_may_leave(invoke, told, tmp_path):
    X = dense(0, 60, 12)
    X[7:, 3] = 0
    np.save(tmp_path / "X.npy", X)
    said = " ".join(invoke("check", "X.npy").stdout.split())
    assert "This table has 60 rows; its rarest column has a value in 7 of them." in said
    assert "Above 3, values can be computed back. Above 0, someone" in said
    exposure = told("check", "X.npy")["exposure"]
    assert exposure == {"rows": 60, "rarest_column": 7, "most_for_guess": 0, "most_for_membership": 3}


def test_a_fit_of_parts_has_a_line_about_its_exposure(invoke, told, tmp_path):
    parts = written(tmp_path / "parts", dense(0, 90, 12), 3)
    fit = ("fit", parts, "-k", 3, "--tol", 0, "-o", "model.safetensors")
    said = invoke(*fit, "--method", "exact", "--rounds", 4).stdout
    (line,) = [line for line in said.splitlines() if line.startswith("exposure")]
    assert (
        "membership. 4 rounds × 3 components sent 12 combinations of the 30 rows of site0 (rarest column: 30 rows)."
        in line
    )
    assert "At most 5 rounds" in line
    exposure = told(*fit, "--method", "exact", "--rounds", 6)["exposure"]
    assert (exposure["level"], exposure["directions"], exposure["most_rounds"]) == ("rows", 18, 5)
    assert told(*fit, "--method", "fedavg", "--rounds", 3)["exposure"]["level"] == "unknown"
    private = ("--epsilon", 1, "--unit", "row", "--row-bound", 5)
    assert told(*fit, "--method", "exact", "--rounds", 3, *private)["exposure"]["level"] == "bounded"


def test_rows_of_five_parties_are_computed_back_from_float32_uploads(invoke, told, tmp_path):
    """200 rows with a tenth of their cells, k = 15, 40 rounds: all of them, and the first line says so."""
    parts = written(tmp_path / "parts", sparse(0, 200, 300, 0.1).astype(np.float32), 5)
    run = recorded(invoke, parts, "run", 15, 40, "--dtype", "float32")
    said = told("attack", run, "--data", parts, "--party", "site0")
    assert (said["severity"], said["by_law"], said["found"]) == ("rows", "rows", "rows")
    assert found(said) == [40]
    whole = told("attack", run, "--data", parts, "--seconds", 600)
    assert sum(found(whole)[:5]) >= 190
    first = invoke("attack", run, "--party", "site1").stdout.splitlines()[0]
    assert first.startswith("severity    rows (by the numbers: rows; found: rows")


def test_sparse_rows_are_found_where_the_numbers_alone_say_membership(invoke, told, tmp_path):
    """60 rows, every column in 5 of them, three rounds of rank 10."""
    draw = np.random.default_rng(1)
    X = np.zeros((120, 4000))
    for j in range(4000):
        for start in (0, 60):
            X[start + draw.choice(60, 5, replace=False), j] = draw.random(5) + 0.05
    parts = written(tmp_path / "parts", X, 2)
    run = recorded(invoke, parts, "run", 10, 3)
    said = told("attack", run, "--data", parts, "--party", "site0")
    assert said["severity"] == said["found"] == "rows"
    assert found(said)[0] >= 55
    blind = told("attack", run, "--party", "site0")
    assert (blind["by_law"], blind["found"]) == ("membership", "rows")
    assert any("assumes that no cell is zero" in note for note in blind["parties"][0]["notes"])


def test_dense_rows_at_a_tenth_are_a_guess_and_tests_of_membership_are_printed(invoke, told, tmp_path):
    X = dense(0, 900, 200)
    parts = written(tmp_path / "parts", X[:600], 2)
    np.save(tmp_path / "people.npy", X[600:])
    run = recorded(invoke, parts, "run", 5, 6)
    said = told("attack", run, "--data", parts, "--candidates", "people.npy")
    assert (said["severity"], said["found"]) == ("guess", None)
    assert found(said) == [0, 0]
    for party in said["parties"]:
        aucs = {test["test"]: test["auc"] for test in party["membership"]}
        assert 0.45 < aucs["residual"] < 0.8
        assert aucs.keys() == {"residual", "signs"}
    shown = invoke("attack", run, "--data", parts, "--candidates", "people.npy").stdout
    assert "severity    guess" in shown
    assert "AUC 0." in shown
    assert "nothing beyond that" in shown


def test_two_runs_count_together(invoke, told, tmp_path):
    """Each alone is below the law, both together are above it."""
    parts = written(tmp_path / "parts", sparse(3, 60, 120, 0.2), 3)
    runs = [recorded(invoke, parts, f"run-{seed}", 8, 4, seed=seed) for seed in (1, 2)]
    alone = told("attack", runs[0], "--data", parts, "--party", "site0")
    assert found(alone) == [0]
    both = told("attack", *runs, "--data", parts, "--party", "site0")
    assert found(both)[0] >= 19
    assert both["other_runs"] == ["run-2"]


@pytest.mark.parametrize("masked", [(), ("--secure-aggregation",)], ids=["open", "masked"])
def test_a_row_that_was_added_between_two_runs_with_one_seed_is_read(invoke, told, tmp_path, masked):
    X = dense(5, 90, 20)
    before = written(tmp_path / "before", X, 3)
    rows = {"site0": np.r_[np.arange(30), 90], "site1": np.arange(30, 60), "site2": np.arange(60, 90)}
    write_parts(tmp_path / "after", Table(np.vstack([X, X[:1] + 0.5])), rows, {})
    first = recorded(invoke, before, "first", 3, 2, *masked)
    second = recorded(invoke, tmp_path / "after", "second", 3, 2, *masked)
    said = told("attack", second, first)
    (one,) = [each for each in said["parties"] if each["is_sum"] == bool(masked) and each["found"] == "rows"]
    read = next(each for each in one["recovered"] if each["attack"] == "difference of two runs")
    assert read["verdict"] in ("exactly", "nearly")
    assert read["shape"] == [1, 20]
    assert said["severity"] == "rows"
    other = recorded(invoke, tmp_path / "after", "third", 3, 2, *masked, seed=1)
    again = told("attack", other, first)
    assert not any(e["attack"] == "difference of two runs" for one in again["parties"] for e in one["recovered"])


def test_dense_columns_that_look_alike_are_not_called_entries(invoke, told, tmp_path):
    """In float32 many columns of WᵀX of alike rows point in nearly one direction."""
    draw = np.random.default_rng(0)
    X = (5 + draw.random((300, 1)) @ draw.random((1, 2000)) + 0.1 * draw.random((300, 2000))).astype(np.float32)
    X[:, 7] = 2.54 * X[:, 3]  # centimetres and inches
    run = recorded(invoke, written(tmp_path / "parts", X, 3), "run", 5, 1, "--dtype", "float32")
    assert told("attack", run)["found"] is None
    assert told("attack", run, "--data", tmp_path / "parts")["found"] is None


def test_rank_one_is_attacked_as_well(invoke, told, tmp_path):
    run = recorded(invoke, written(tmp_path / "parts", sparse(0, 60, 40, 0.3), 3), "run", 1, 5)
    assert told("attack", run)["severity"] in WORDS


def test_an_empty_and_a_repeated_row_do_not_blind_the_search(invoke, told, tmp_path):
    X = sparse(0, 80, 120, 0.2)
    X[3] = 0
    X[7] = X[8]
    parts = written(tmp_path / "parts", X, 2)
    run = recorded(invoke, parts, "run", 15, 20)
    said = told("attack", run, "--data", parts, "--party", "site0")
    assert found(said)[0] >= 36
    assert "2 of them are zero or combinations of others" in said["parties"][0]["recovered"][0]["what"]


def test_the_order_of_runs_and_their_noise_do_not_hide_a_run_without_noise(invoke, told, tmp_path):
    parts = written(tmp_path / "parts", sparse(0, 60, 120, 0.2), 3)
    plain = recorded(invoke, parts, "plain", 10, 8)
    noisy = recorded(invoke, parts, "noisy", 10, 3, "--epsilon", 1, "--unit", "row", "--row-bound", 5)
    invoke("fit", parts, "-k", 5, "--method", "fedavg", "--rounds", 2, "-q", "--run-folder", "factors", "--record")
    assert told("attack", noisy)["severity"] == "bounded"
    for runs in ((noisy, plain), (plain, noisy), ("factors", plain), (plain, "factors")):
        said = told("attack", *runs, "--data", parts, "--party", "site0")
        assert (said["by_law"], said["found"]) == ("rows", "rows"), runs
        assert found(said)[0] >= 19


def test_a_row_that_was_replaced_between_two_runs_does_not_hide_the_others(invoke, told, tmp_path):
    X = sparse(0, 60, 120, 0.2)
    first = recorded(invoke, written(tmp_path / "a", X, 3), "first", 10, 8)
    X[4] = sparse(9, 1, 120, 0.2)
    second = recorded(invoke, written(tmp_path / "b", X, 3), "second", 10, 8, seed=1)
    said = told("attack", first, second, "--data", tmp_path / "a", "--party", "site0")
    assert found(said)[0] >= 19


def test_a_search_that_was_cut_off_says_so(invoke, told, tmp_path):
    parts = written(tmp_path / "parts", sparse(0, 80, 120, 0.2), 2)
    run = recorded(invoke, parts, "run", 15, 20)
    said = told("attack", run, "--seconds", 0)
    assert any("time limit (0 s in total)" in note for party in said["parties"] for note in party["notes"])
    assert said["severity"] == said["by_law"] == "rows"


def test_runs_of_other_data_are_refused(invoke, told, tmp_path):
    first = recorded(invoke, written(tmp_path / "a", dense(0, 60, 20), 3), "first", 3, 2)
    narrow = recorded(invoke, written(tmp_path / "b", dense(0, 60, 19), 3), "narrow", 3, 2)
    assert "differ in their columns" in told("attack", first, narrow, code=1)["error"]
    write_parts(tmp_path / "c", Table(dense(0, 60, 20)), {"x": np.arange(30), "y": np.arange(30, 60)}, {})
    strangers = recorded(invoke, tmp_path / "c", "strangers", 3, 2)
    assert "no party in common" in told("attack", first, strangers, code=1)["error"]
    shutil.rmtree(tmp_path / "narrow" / "traffic")
    assert told("attack", first, "narrow", code=1)["type"] in ("FileError", "FormatError")
    np.save(tmp_path / "people.npy", dense(0, 5, 19))
    assert told("attack", first, "--candidates", "people.npy", code=1)["type"] in ("ShapeError", "FeatureError")


def test_no_text_of_an_attack_says_nothing_without_a_word_of_the_law(invoke, told, tmp_path):
    parts = written(tmp_path / "parts", dense(0, 90, 20), 3)
    for method in ("exact", "fedavg", "fnmf", "game"):
        invoke("fit", parts, "-k", 2, "--method", method, "--rounds", 2, "-q", "--run-folder", method, "--record")
        shown = invoke("attack", method).stdout
        assert shown.startswith("severity")
        assert any(word in shown.splitlines()[0] for word in WORDS)
        said = told("attack", method)
        for text in (said["verdict"], *(each["verdict"] for each in said["parties"])):
            assert "nothing" not in text or any(word in text for word in WORDS)


# --- federations -----------------------------------------------------------------------------------------------------


def test_a_seed_is_drawn_for_each_run_and_kept_when_it_is_resumed(tmp_path):
    path = tmp_path / "experiment.toml"
    path.write_bytes(
        b'\xef\xbb\xbfmethod = "exact"\nrank = 2\nrounds = 2\n[privacy]\nunit = "row"\nepsilon = 1\nrow_bound = 1\n'
    )
    first, text = with_seed(path, None)
    second, _ = with_seed(path, None)
    assert first.seed != second.seed
    (tmp_path / "written.toml").write_bytes(text)
    assert Experiment.read(tmp_path / "written.toml") == first
    assert with_seed(path, first)[0] == first
    path.write_text('method = "exact"\nrank = 2\nrounds = 2\nseed = 7\n')
    given, as_it_is = with_seed(path, first)
    assert given.seed == 7
    assert as_it_is == path.read_bytes()


@pytest.fixture
def kit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    server = ServerFolder.made(tmp_path / "liver", "liver", "nmf.example.org:8443")
    server.invite("north", tmp_path / "north.zip")
    X = dense(0, 200, 12)
    X[5:, 3] = 0
    np.save(tmp_path / "rows.npy", X)
    return ["federation", "join", "north.zip", "--data", "rows.npy"]


@pytest.mark.parametrize(("answer", "rule"), [("y", "zero"), ("n", "refuse")])
def test_join_says_how_much_may_leave_and_asks_once_about_rare_columns(kit, tmp_path, answer, rule):
    result = runner().invoke(app, kit, input=f"y\n{answer}\n")
    said = " ".join(result.output.split())
    assert result.exit_code == 0, said
    assert "At most 2 combinations of your rows may leave; 0 have left. A run that needs more is refused." in said
    assert "One that sends crafted models can read single rows; only noise (epsilon) prevents that." in said
    assert "Here, secure aggregation hides only which site a row comes from." in said
    assert "For 40 more, 1 of 12 columns have values in fewer than 128 rows; they hold" in said
    assert "May runs set columns with values in too few rows to zero?" in said
    policy = Policy.read(tmp_path / "site-north" / "site.toml")
    assert (policy.rare_columns, policy.maximum_exposure) == (rule, "membership")
    again = runner().invoke(app, kit, input="y\n")
    assert again.exit_code == 0
    assert "May runs set columns" not in again.output


def test_scripts_answer_by_an_option_and_yes_changes_no_data(kit, tmp_path):
    assert runner().invoke(app, [*kit, "--yes"]).exit_code == 0
    assert Policy.read(tmp_path / "site-north" / "site.toml").rare_columns == "refuse"
    assert runner().invoke(app, [*kit, "--yes", "--rare-columns", "drop"]).exit_code == 1
    assert runner().invoke(app, [*kit, "--yes", "--rare-columns", "zero"]).exit_code == 0
    assert Policy.read(tmp_path / "site-north" / "site.toml").rare_columns == "zero"
    result = runner().invoke(app, [*kit, "--yes", "--rare-columns", "refuse", "--json"])
    assert result.exit_code == 1
    assert "Remove --rare-columns" in json.loads(result.stdout)["error"]


def test_the_answer_is_written_into_policies_old_and_new():
    assert Policy.from_table(tomllib.loads(with_rare_columns(POLICY, "zero"))).rare_columns == "zero"
    old = "minimum_parties = 3\n[words]\nallowed = false\n"
    changed = Policy.from_table(tomllib.loads(with_rare_columns(old, "zero")))
    assert (changed.rare_columns, changed.minimum_parties, changed.words.allowed) == ("zero", 3, False)
