"""`partsong fit` of one table: what is written and said, sketched steps, resumed runs, games and known cells."""

import csv
import json
import re

import numpy as np
import pytest
from scipy import sparse

import partsong
from partsong.cli import fit_options
from partsong.console import options
from partsong.estimators.validation import MISSING
from partsong.io import weights
from partsong.io.write import as_json
from partsong.solvers.game import ConstantStep, DecayingStep, Game, ShrinkOthers, ShrinkSmallest
from partsong.solvers.game_orders import Raster, Shuffled, Simultaneous
from partsong.solvers.update_rules import RULES
from partsong.training.centralized import INITS
from partsong.training.checkpoint import load_run
from tests.cli.test_json import FIT as CONTRACT


def test_names_on_the_command_line_are_those_of_the_library():
    assert (*RULES.values, "game") == fit_options.SOLVERS
    assert fit_options.INITS == INITS
    assert set(options.WEIGHT_ENDINGS) == set(weights._WRITERS)


def test_json_contract(told, data_npy):
    said = told("fit", data_npy, "-k", 3, "-o", "m.safetensors", "--seed", 5)
    assert set(said) == set(CONTRACT)
    assert said["shape"] == [45, 12]
    assert said["seed"] == 5
    assert said["method"] == "centralized"
    assert said["bytes_up_per_party"] == 0
    assert 0 < said["relative_error"] < 0.1
    assert said["explained_variance"] == pytest.approx(1 - said["relative_error"] ** 2)


def test_json_holds_no_nan():
    assert as_json({"a": [float("nan"), np.float32("inf"), np.int64(3)]}) == {"a": [None, None, 3]}


@pytest.mark.parametrize("solver", fit_options.SOLVERS[:-1])
def test_same_bits_as_the_estimator(invoke, data_npy, X, solver):
    options = ["--alpha-w", 0.01, "--l1-ratio", 0.5, "--max-iter", 7, "--init", "random", "--threads", 2]
    invoke("fit", data_npy, "-k", 3, "-o", "m.safetensors", "--seed", 5, "--solver", solver, *options)
    estimator = partsong.NMF(
        3, solver=solver, alpha_W=0.01, l1_ratio=0.5, max_iter=7, init="random", random_state=5, n_threads=2
    ).fit(X)
    model = partsong.load_model("m.safetensors")
    np.testing.assert_array_equal(model.components, estimator.components_)
    assert model.relative_error == estimator.relative_error_


def test_weights_and_names(invoke, data_csv, X):
    invoke("fit", data_csv, "-k", 3, "-o", "m.safetensors", "--label", "site", "--seed", 1, "--weights", "W.csv")
    table = partsong.read("W.csv")
    assert table.sample_names[:2] == ("patient-0", "patient-1")
    model = partsong.load_model("m.safetensors")
    assert np.linalg.norm(X - table.X @ model.components) < 0.1 * np.linalg.norm(X)
    assert model.feature_names[0] == "gene 0"


def test_model_files_hold_neither_weights_nor_sample_names(invoke, data_csv, tmp_path):
    invoke("fit", data_csv, "-k", 3, "-o", "m.safetensors", "--label", "site", "--run-folder", "run")
    content = (tmp_path / "m.safetensors").read_bytes()
    assert b"patient" not in content
    assert str(tmp_path).encode() not in content
    assert (tmp_path / "run" / "model.safetensors").stat().st_size == len(content)
    assert len(content) < 8 * 3 * 12 + 8 * 3 + 4000  # H, shares, description: no room for 45 rows of W twice over
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "settings.json", "versions.json", "history.csv", "bytes.csv", "result.json", "model.safetensors",
    }  # fmt: skip


def test_run_folder(told, data_npy, tmp_path):
    said = told("fit", data_npy, "-k", 3, "--run-folder", "run", "--threads", 1)
    folder = tmp_path / "run"
    assert said["model"] == "run/model.safetensors"
    assert json.loads((folder / "result.json").read_text()) == said
    settings = json.loads((folder / "settings.json").read_text())
    assert settings["seed"] == said["seed"]
    assert settings["solver"] == "hals"
    versions = json.loads((folder / "versions.json").read_text())
    wanted = {"python", "partsong", "numpy", "scipy", "numba", "sklearn", "platform", "cpu_count", "threads"}
    assert set(versions) == wanted
    rows = list(csv.DictReader((folder / "history.csv").read_text().splitlines()))
    assert len(rows) == said["iterations"]
    assert float(rows[-1]["relative_error"]) < float(rows[0]["relative_error"])


def test_run_folder_is_not_overwritten_by_accident(invoke, data_npy, tmp_path):
    invoke("fit", data_npy, "-k", 2, "--run-folder", "run")
    (tmp_path / "run" / "mine.txt").write_text("keep")
    result = invoke("fit", data_npy, "--run-folder", "run", code=1)
    assert "--run-folder 'run' is not empty" in result.stderr
    invoke("fit", data_npy, "-k", 3, "--run-folder", "run", "--overwrite")
    assert (tmp_path / "run" / "mine.txt").read_text() == "keep"
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["n_components"] == 3


@pytest.mark.parametrize(
    "others",
    [
        {"mine.txt": "keep"},
        {"history.csv": "mine"},
        {"settings.json": "{}", "versions.json": "{}", "history.csv": "mine"},
        {"settings.json": '{"method": 1, "started": 2}', "result.json": "mine"},
        {"settings.json": "[]", "versions.json": '["partsong"]'},
    ],
)
def test_a_folder_that_holds_no_run_of_ours_is_never_overwritten(invoke, data_npy, tmp_path, others):
    (tmp_path / "run").mkdir()
    for name, text in others.items():
        (tmp_path / "run" / name).write_text(text)
    for words in ([], ["--overwrite"]):
        assert "not those of a partsong run" in invoke("fit", data_npy, "--run-folder", "run", *words, code=1).stderr
        assert {path.name: path.read_text() for path in (tmp_path / "run").iterdir()} == others


def test_files_of_the_run_are_not_data_or_weights(invoke, data_npy, tmp_path):
    invoke("fit", data_npy, "-k", 2, "--run-folder", "run")
    before = (tmp_path / "run/history.csv").read_bytes()
    invoke("fit", "run/history.csv", "-k", 2, "--run-folder", "run", "--overwrite", code=2)
    invoke("fit", data_npy, "-k", 2, "--run-folder", "run", "--overwrite", "--weights", "run/bytes.csv", code=2)
    assert (tmp_path / "run/history.csv").read_bytes() == before
    invoke("fit", data_npy, "-k", 2, "--run-folder", "new", "--weights", "new/W.csv", "-o", "new/model.safetensors")


def test_a_fresh_seed_is_told_and_repeats_the_fit(told, data_npy):
    said = told("fit", data_npy, "-k", 3, "-o", "a.safetensors", "--init", "random")
    told("fit", data_npy, "-k", 3, "-o", "b.safetensors", "--init", "random", "--seed", said["seed"])
    a, b = partsong.load_model("a.safetensors"), partsong.load_model("b.safetensors")
    np.testing.assert_array_equal(a.components, b.components)
    assert a.seed == said["seed"]


def test_equal_fits_are_equal_files_at_a_given_time(invoke, data_npy, tmp_path, monkeypatch):
    for name, epoch in (("a", "1700000000"), ("b", "1700000000"), ("c", "1700000001")):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)
        invoke("fit", data_npy, "-k", 2, "--seed", 1, "-o", f"{name}.safetensors", "-q")
    a, b, c = ((tmp_path / f"{name}.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c
    assert partsong.load_model("a.safetensors").created == "2023-11-14T22:13:20+00:00"


def test_summary_and_quiet(invoke, data_npy):
    shown = invoke("fit", data_npy, "-k", 3, "-o", "m.safetensors", "--seed", 77).stdout
    assert "77" in shown
    assert "m.safetensors" in shown
    assert invoke("fit", data_npy, "-k", 3, "-o", "m.safetensors", "-q").output == ""


def test_number_types(told, data_npy):
    assert told("fit", data_npy, "-k", 2, "-o", "m.safetensors", "--dtype", "float32")["dtype"] == "float32"
    assert partsong.load_model("m.safetensors").components.dtype == np.float32


def test_sparse_data(told, X, tmp_path):
    sparse.save_npz(tmp_path / "s.npz", sparse.csr_array(np.where(X > 1, X, 0)))
    assert told("fit", "s.npz", "-k", 2, "-o", "m.safetensors")["shape"] == [45, 12]


def test_time_budget(told, data_npy):
    said = told("fit", data_npy, "-k", 3, "-o", "m.safetensors", "--tol", 0, "--max-iter", 10**7, "--time-budget", 0.2)
    assert said["outcome"] == "time-limit"


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (["--solver", "halls"], "hals"),
        (["--init", "nnsvd"], "nndsvd"),
        (["--dtype", "float46"], "float64"),
    ],
)
def test_unknown_names_are_usage_errors_with_the_nearest_name(invoke, data_npy, words, nearest):
    result = invoke("fit", data_npy, "-o", "m.safetensors", *words, code=2)
    assert f"Did you mean '{nearest}'" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["-o", "m.safetensors", "-k", 0],
        ["-o", "m.safetensors", "-k", "many"],
        ["-o", "m.safetensors", "--tol", "nan"],
        ["-o", "m.safetensors", "--l1-ratio", 2],
        ["-o", "m.safetensors", "--method", "exact"],
        ["-o", "m.safetensors", "--record"],
        ["-o", "m.safetensors", "--unheard-of"],
    ],
)
def test_usage_errors(invoke, data_npy, words):
    invoke("fit", data_npy, *words, code=2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-o", "none/m.safetensors"], "no folder"),
        (["-o", "m.safetensors", "--weights", "none/W.csv"], "no folder"),
        (["-o", "m.safetensors", "--checkpoint", "none/c"], "no folder"),
        (["-o", "m.safetensors", "--run-folder", "data.npy"], "is a file"),
        (["-o", "m.safetensors", "--run-folder", "a/b/c"], "no folder"),
        (["-o", "m.safetensors", "-k", 10**6], "--components 1000000 is far too large"),
        (["-o", "m.safetensors", "--resume", "none.ckpt"], "no such file"),
        (["-o", "m.safetensors", "--resume", "data.npy"], "data.npy"),
    ],
)
def test_plain_errors(invoke, data_npy, tmp_path, words, said):
    result = invoke("fit", data_npy, *words, code=1)
    assert said in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.output
    assert not (tmp_path / "m.safetensors").exists()


def test_output_is_checked_before_the_data_are_read(invoke):
    assert "no folder" in invoke("fit", "missing.npy", "-o", "none/m.safetensors", code=1).stderr


def test_bad_data_are_named(invoke, tmp_path, X):
    X[3, 4] = -1
    np.save(tmp_path / "bad.npy", X)
    message = invoke("fit", "bad.npy", "-o", "m.safetensors", code=1).stderr
    assert "bad.npy" in message
    assert "Negative" in message
    assert "row 3" in message


def test_a_model_of_nothing_is_told(told, invoke, data_npy):
    result = invoke("fit", data_npy, "-k", 2, "-o", "m.safetensors", "--alpha-w", 1e10, "-q")
    assert result.stderr.startswith("Warning: The model is zero")
    assert "alpha_W" in result.stderr
    assert invoke("fit", data_npy, "-k", 2, "-o", "m.safetensors", "-q").stderr == ""


def test_debug_shows_where_an_error_comes_from(invoke):
    assert "Traceback" in invoke("--debug", "fit", "missing.npy", "-o", "m.safetensors", code=1).stderr
    assert "Traceback" not in invoke("fit", "missing.npy", "-o", "m.safetensors", code=1).stderr


def test_a_folder_of_neither_kind(invoke, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "neither" in invoke("fit", "empty", "-o", "m.safetensors", code=1).stderr


METHODS = ["syn-sd", "syn-ssd-u", "syn-ssd-v", "syn-ssd-uv", "asyn-sd", "asyn-ssd-v"]


@pytest.mark.parametrize("sketch", ["subsampling", "gaussian", "count", "hadamard"])
def test_a_file_by_sketched_steps(told, data_npy, X, sketch):
    words = ["fit", data_npy, "-k", 3, "--solver", "sanls", "--sketch", sketch, "--sketch-ratio", 0.5, "--seed", 1]
    said = told(*words, "--max-iter", 60, "--tol", 0, "-o", "m.safetensors")
    assert said["iterations"] == 60
    estimator = partsong.NMF(
        3, solver="sanls", sketch=sketch, sketch_ratio=0.5, random_state=1, max_iter=60, tol=0, n_threads=1
    ).fit(X)
    assert said["relative_error"] == pytest.approx(estimator.relative_error_, rel=1e-9)
    assert partsong.load_model("m.safetensors").settings["sketch"] == sketch


@pytest.mark.parametrize("method", METHODS)
def test_parts_by_the_secure_methods(told, parts, method):
    said = told(
        "fit", parts, "-k", 3, "--method", method, "--rounds", 4, "--tol", 0, "--seed", 2, "-o", "m.safetensors"
    )
    assert said["iterations"] == 4
    assert said["outcome"] == "max-rounds"
    assert said["relative_error"] < 0.5
    per_model = 3 * 12 * 8
    exchanges = {"syn-sd": 4, "asyn-sd": 4, "asyn-ssd-v": 4}.get(method, 44)
    assert said["bytes_up_per_party"] <= exchanges * (per_model + 8)
    assert np.isfinite(partsong.load_model("m.safetensors").components).all()


def test_sketches_where_nothing_is_sketched_are_a_mistake(invoke, data_npy, parts):
    refused = invoke("fit", data_npy, "-k", 3, "--sketch", "count", "-o", "m.safetensors", code=2)
    assert "--solver sanls" in refused.stderr
    refused = invoke(
        "fit", parts, "-k", 3, "--method", "asyn-sd", "--init-mode", "local", "-o", "m.safetensors", code=2
    )
    assert "All parties of this method start from one H" in refused.stderr


def same_model(a, b):
    a, b = partsong.load_model(a), partsong.load_model(b)
    np.testing.assert_array_equal(a.components, b.components)
    np.testing.assert_array_equal(a.shares, b.shares)
    assert a.relative_error == b.relative_error


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--solver", "ipalm", "--init", "nndsvda"],
        ["--solver", "mu", "--dtype", "float32"],
        ["--solver", "bpp", "--alpha-w", 0.01, "--l1-ratio", 0.5],
        ["--init", "random", "-k", 1],
        ["--solver", "sanls", "--sketch", "gaussian", "--sketch-ratio", 0.4],
    ],
)
def test_centralised_runs_go_on_bit_for_bit(invoke, data_npy, options):
    begin = ["fit", data_npy, "-k", 3, "--seed", 4, "--tol", 0, *options, "-q"]
    invoke(*begin, "--max-iter", 10, "-o", "whole.safetensors")
    invoke(*begin, "--max-iter", 4, "-o", "half.safetensors", "--checkpoint", "c.ckpt")
    invoke("fit", data_npy, "--resume", "c.ckpt", "--max-iter", 10, "-o", "joined.safetensors", "-q")
    same_model("whole.safetensors", "joined.safetensors")


@pytest.mark.parametrize("method", ["exact", "fedavg", "syn-sd", "syn-ssd-uv", "asyn-ssd-v"])
def test_federations_go_on_bit_for_bit(told, parts, tmp_path, method):
    begin = ["fit", parts, "-k", 3, "--seed", 4, "--tol", 0, "--method", method]
    whole = told(*begin, "--rounds", 10, "-o", "whole.safetensors", "--run-folder", "whole")
    told(*begin, "--rounds", 4, "-o", "half.safetensors", "--checkpoint", "c.ckpt", "--engine", "sequential")
    again = ["fit", parts, "--resume", "c.ckpt", "--rounds", 10, "-o", "joined.safetensors", "--run-folder", "joined"]
    joined = told(*again)
    same_model("whole.safetensors", "joined.safetensors")
    for name in ("method", "iterations", "relative_error", "bytes_up_per_party", "bytes_down_per_party"):
        assert joined[name] == whole[name]
    assert (tmp_path / "whole/bytes.csv").read_text() == (tmp_path / "joined/bytes.csv").read_text()


def test_the_best_round_may_lie_before_the_checkpoint(invoke, data_npy, monkeypatch):
    """Rounds that only get worse after the fourth: the model is the fourth's, resumed or not."""
    from partsong.solvers.squared_error import SquaredError

    plain = SquaredError.metrics

    def metrics(self, server):
        told = dict(plain(self, server))
        worse = 1.0 if server.memory.count > 4 else 0.0
        return {name: value + worse for name, value in told.items()}

    monkeypatch.setattr(SquaredError, "metrics", metrics)
    begin = ["fit", data_npy, "-k", 3, "--seed", 4, "--tol", 0, "-q"]
    invoke(*begin, "--max-iter", 9, "-o", "whole.safetensors")
    invoke(*begin, "--max-iter", 6, "-o", "half.safetensors", "--checkpoint", "c.ckpt")
    invoke("fit", data_npy, "--resume", "c.ckpt", "--max-iter", 9, "-o", "joined.safetensors", "-q")
    same_model("whole.safetensors", "joined.safetensors")
    same_model("half.safetensors", "joined.safetensors")


def test_a_run_that_had_converged_stays_where_it_is(told, data_npy):
    first = told("fit", data_npy, "-k", 3, "-o", "a.safetensors", "--checkpoint", "c.ckpt")
    again = told("fit", data_npy, "-o", "b.safetensors", "--resume", "c.ckpt")
    assert first["outcome"] == again["outcome"] == "converged"
    assert first["iterations"] == again["iterations"]
    assert again["seconds"] >= 0
    assert again["resumed_from"] == "c.ckpt"
    same_model("a.safetensors", "b.safetensors")


def test_checkpoints_are_written_on_the_way(invoke, data_npy, tmp_path, monkeypatch):
    from partsong.training import checkpoint

    saved = []
    plain = checkpoint.save_run
    monkeypatch.setattr(
        checkpoint, "save_run", lambda path, run: (saved.append(run.checkpoint.index), plain(path, run))
    )
    begin = ["fit", data_npy, "-k", 3, "-o", "m.safetensors", "--tol", 0, "--max-iter", 5, "--checkpoint", "c.ckpt"]
    invoke(*begin, "--checkpoint-every", 0)
    assert saved == [1, 2, 3, 4, 5]
    assert (tmp_path / "c.ckpt").stat().st_mode & 0o077 == 0  # private weights are inside
    saved.clear()
    invoke(*begin)
    assert saved == [5]


def test_a_checkpoint_that_cannot_be_written_does_not_end_the_fit(invoke, data_npy, tmp_path, monkeypatch):
    from partsong.errors import FileError
    from partsong.training import checkpoint

    def full(path, run):
        raise FileError("the disk is full.")

    monkeypatch.setattr(checkpoint, "save_run", full)
    result = invoke("fit", data_npy, "-k", 2, "-o", "m.safetensors", "--checkpoint", "c.ckpt")
    assert "disk is full" in result.stderr
    assert (tmp_path / "m.safetensors").exists()


def test_other_data_and_settings_are_refused_by_name(invoke, data_npy, parts, X, tmp_path):
    begin = ["-k", 3, "--seed", 4, "--max-iter", 3, "--checkpoint", "c.ckpt"]
    invoke("fit", data_npy, *begin, "-o", "m.safetensors", "-q")
    again = ["--resume", "c.ckpt", "-o", "m2.safetensors"]
    message = invoke("fit", data_npy, *again, "-k", 5, "--seed", 9, "--solver", "mu", code=1).stderr
    for name in (
        "--components (3 in the checkpoint, 5 now)",
        "--seed (4 in the checkpoint, 9 now)",
        "--solver (hals in the checkpoint, mu now)",
    ):
        assert name in message
    np.save(tmp_path / "other.npy", X + 1)
    assert "data (other values)" in invoke("fit", "other.npy", *again, code=1).stderr
    np.save(tmp_path / "fewer.npy", X[1:])
    assert "data (other shape)" in invoke("fit", "fewer.npy", *again, code=1).stderr
    assert "method (centralized in the checkpoint, exact now)" in invoke("fit", parts, *again, code=1).stderr
    assert not (tmp_path / "m2.safetensors").exists()


def test_what_may_change(told, data_npy):
    begin = ["fit", data_npy, "-k", 3, "--tol", 0, "-o", "m.safetensors"]
    told(*begin, "--max-iter", 3, "--checkpoint", "c.ckpt", "--time-budget", 1e-9)
    said = told("fit", data_npy, "-o", "m.safetensors", "--resume", "c.ckpt", "--tol", 1e-2, "--threads", 1)
    assert said["outcome"] == "max-rounds"  # the most iterations are those of before, the time budget is not
    assert said["iterations"] == 3


def test_a_checkpoint_of_something_else_is_refused(invoke, data_npy, tmp_path):
    from partsong.core.interfaces import Checkpoint, Message
    from partsong.io.state_file import write_state
    from partsong.training.checkpoint import SavedRun

    point = Checkpoint(0, {}, (), Message({}))
    for other in (point, SavedRun(point), SavedRun(None), (1, 2)):
        write_state(tmp_path / "c.ckpt", other, "checkpoint")
        refused = invoke("fit", data_npy, "-o", "m.safetensors", "--resume", "c.ckpt", code=1)
        assert "not the checkpoint of a fit" in refused.stderr


def test_the_file_knows_what_it_belongs_to(invoke, data_npy, tmp_path):
    invoke("fit", data_npy, "-k", 3, "--max-iter", 3, "-o", "m.safetensors", "--checkpoint", "c.ckpt")
    saved = load_run(tmp_path / "c.ckpt")
    assert saved.checkpoint.index == len(saved.history) == 3
    assert saved.sent == (), "nobody else takes part"
    assert saved.about["data"]["all"]["shape"] == [45, 12]
    assert str(tmp_path) not in json.dumps(dict(saved.about))


def traffic_of(folder):
    lines = [json.loads(line) for line in (folder / "traffic.jsonl").read_text().splitlines()]
    assert {line["file"] for line in lines} == {f"traffic/{path.name}" for path in (folder / "traffic").iterdir()}
    return {(line["round"], line["party"]): line["bytes"] for line in lines}


def sent_of(folder):
    rows = [row.split(",") for row in (folder / "bytes.csv").read_text().splitlines()[1:]]
    return {(int(index), party): int(up) for index, party, up, _ in rows}


FIRST = ["-k", 4, "--rounds", 3, "--tol", 0, "--seed", 1, "--run-folder", "run", "--checkpoint", "r.ckpt", "-q"]
REST = ["-k", 4, "--rounds", 6, "--tol", 0, "--resume", "r.ckpt", "--overwrite", "-q"]


@pytest.mark.parametrize("further", [False, True], ids=["from-its-end", "from-before-its-end"])
def test_a_resumed_run_keeps_the_traffic_of_its_first_part(invoke, parts, tmp_path, further):
    """The same files as a run in one go; rounds after the checkpoint are replaced."""
    invoke("fit", parts, *FIRST, "--record")
    if further:
        first = [word for word in FIRST if word not in ("--checkpoint", "r.ckpt")]
        invoke("fit", parts, *first, "--rounds", 5, "--record", "--overwrite")
        (tmp_path / "run/traffic/round-0005.safetensors").write_text("stale")
    result = invoke("fit", parts, *REST, "--run-folder", "run", "--record")
    assert result.stderr == ""
    assert traffic_of(tmp_path / "run") == sent_of(tmp_path / "run")
    assert {index for index, _ in traffic_of(tmp_path / "run")} == set(range(1, 7))
    invoke("fit", parts, "-k", 4, "--rounds", 6, "--tol", 0, "--seed", 1, "--run-folder", "whole", "--record", "-q")
    for path in (tmp_path / "whole/traffic").iterdir():
        assert path.read_bytes() == (tmp_path / "run/traffic" / path.name).read_bytes()
    assert (tmp_path / "whole/traffic.jsonl").read_text() == (tmp_path / "run/traffic.jsonl").read_text()


def test_a_run_that_was_killed_has_left_its_traffic(invoke, parts, tmp_path, monkeypatch):
    from partsong.training.checkpoint import RunRecorder

    plain = RunRecorder.watch

    def killed(self, done, row):
        if row.iteration == 3:
            raise MemoryError
        plain(self, done, row)

    with monkeypatch.context() as patched:
        patched.setattr(RunRecorder, "watch", killed)
        invoke("fit", parts, *FIRST, "--record", code=1)
    with (tmp_path / "run/traffic.jsonl").open("a") as file:
        file.write('{"round": 3, "party": "par')
    assert invoke("fit", parts, *REST, "--run-folder", "run", "--record").stderr == ""
    assert traffic_of(tmp_path / "run") == sent_of(tmp_path / "run")


def test_traffic_that_is_missing_or_ends_is_told(invoke, parts, tmp_path):
    invoke("fit", parts, *FIRST, "--record")
    elsewhere = invoke("fit", parts, *REST, "--run-folder", "other", "--record").stderr
    assert "does not hold the traffic of rounds 1, 2, 3" in elsewhere
    assert {index for index, _ in traffic_of(tmp_path / "other")} == {4, 5, 6}
    invoke("fit", parts, "-k", 4, "--rounds", 3, "--seed", 2, "--run-folder", "foreign", "--record", "-q")
    foreign = invoke("fit", parts, *REST, "--run-folder", "foreign", "--record").stderr
    assert "the traffic there is of another run" in " ".join(foreign.split())
    assert {index for index, _ in traffic_of(tmp_path / "foreign")} == {4, 5, 6}
    stopped = invoke("fit", parts, *REST, "--run-folder", "run").stderr
    assert "has the traffic up to round 3, and later rounds are not recorded. Add --record" in " ".join(stopped.split())
    assert {index for index, _ in traffic_of(tmp_path / "run")} == {1, 2, 3}
    quiet = invoke("fit", parts, *REST, "--run-folder", "plain").stderr
    assert quiet == "", "who records nothing misses nothing"


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


def same_components(a, b):
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
        same_components("whole.safetensors", "joined.safetensors")
        with pytest.raises(AssertionError):
            same_components("half.safetensors", "joined.safetensors")

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
        same_components("whole.safetensors", "joined.safetensors")
        assert (joined["iterations"], joined["game"]) == (6, whole["game"])
        assert (tmp_path / "whole/bytes.csv").read_text() == (tmp_path / "joined/bytes.csv").read_text()

    def test_known_cells_stay_so(self, invoke, gaps):
        begin = ["fit", gaps, "-k", 2, "--seed", 4, "--tol", 0, "--solver", "game", "--missing", "ignore", "-q"]
        invoke(*begin, "--max-iter", 6, "-o", "whole.safetensors")
        invoke(*begin, "--max-iter", 3, "-o", "half.safetensors", "--checkpoint", "c.ckpt")
        invoke("fit", gaps, "--resume", "c.ckpt", "--max-iter", 6, "-o", "joined.safetensors", "-q")
        same_components("whole.safetensors", "joined.safetensors")

    def test_another_game_is_another_run(self, invoke, data_npy):
        begin = ["fit", data_npy, "-k", 3, "--tol", 0, "--max-iter", 3, "-o", "m.safetensors", "--checkpoint", "c.ckpt"]
        invoke(*begin, "--solver", "game")
        again = ["fit", data_npy, "--resume", "c.ckpt", "-o", "m.safetensors"]
        refused = invoke(*again, "--step", 0.1, "--game-order", "random", code=1).stderr
        assert "--step (safe in the checkpoint, 0.1 now)" in refused
        assert "--game-order (stratified in the checkpoint, random now)" in refused
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
