"""The command line as a whole: exit codes, errors in JSON, help, interrupts, and commands that pages name."""

from __future__ import annotations

import ast
import copy
import csv
import inspect
import json
import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
import warnings
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.main import get_command

import partsong
from partsong.cli import fit_session, main
from partsong.cli.main import COMMANDS as TABLE
from partsong.cli.main import app
from partsong.console.output import handle_errors, plain
from partsong.core.runtime import graceful_interrupt
from partsong.errors import (
    BrokenChain,
    DataError,
    FeatureError,
    MissingExtra,
    ParameterError,
    PartsongError,
    with_message,
)
from partsong.federation.experiment import Experiment
from partsong.federation.policy import Policy
from partsong.federation.setup.credentials import README
from partsong.training import centralized
from partsong.training.result import EmptyModelWarning

FIT = ["fit", "data.npy", "-o", "m.safetensors"]
SPLIT = ["split", "labelled.npz", "-o", "parts"]
TRANSFORM = ["transform", "data.npy", "m.safetensors"]
WRONG = [
    ["unheard-of"],
    ["--unheard-of"],
    ["fit"],
    ["fit", "data.npy"],
    [*FIT, "--unheard-of"],
    [*FIT, "more.npy"],
    [*FIT, "-k", 0],
    [*FIT, "-k", -3],
    [*FIT, "-k", 2.5],
    [*FIT, "-k", "many"],
    [*FIT, "--alpha-w", -1],
    [*FIT, "--alpha-w", "nan"],
    [*FIT, "--alpha-h", -0.1],
    [*FIT, "--alpha-h", "inf"],
    [*FIT, "--l1-ratio", 1.1],
    [*FIT, "--l1-ratio", -1],
    [*FIT, "--tol", -1],
    [*FIT, "--tol", "nan"],
    [*FIT, "--max-iter", 0],
    [*FIT, "--rounds", 0],
    [*FIT, "--time-budget", 0],
    [*FIT, "--time-budget", -1],
    [*FIT, "--time-budget", "inf"],
    [*FIT, "--seed", -1],
    [*FIT, "--threads", 0],
    [*FIT, "--solver", "none"],
    [*FIT, "--init", "none"],
    [*FIT, "--dtype", "int8"],
    [*FIT, "--engine", "steam"],
    [*FIT, "--method", "exact"],
    [*FIT, "--local-steps", 2],
    [*FIT, "--record"],
    [*FIT, "--overwrite"],
    [*FIT, "--checkpoint-every", 5],
    [*FIT, "--checkpoint", "c.ckpt", "--checkpoint-every", -1],
    [*FIT, "--checkpoint", "data.npy"],
    [*FIT, "--weights", "W.xlsx"],
    [*FIT, "--weights", "data.npy"],
    [*FIT, "--label", "y"],
    [*FIT, "--key", "y"],
    [*FIT, "--header"],
    ["fit", "data.npy", "-o", "m.pkl"],
    ["fit", "data.csv", "-o", "m.safetensors", "--key", "X"],
    ["fit", "data.csv", "-o", "m.safetensors", "--label", "site", "--transpose"],
    ["fit", "data.csv", "-o", "m.safetensors", "--label", "site", "--no-header"],
    ["fit", "parts-of-three", "-o", "m.safetensors", "--solver", "mu"],
    ["fit", "parts-of-three", "-o", "m.safetensors", "--no-header"],
    ["fit", "parts-of-three", "-o", "m.safetensors", "--align", "assignment"],
    ["fit", "parts-of-three", "-o", "m.safetensors", "--method", "exact", "--init-mode", "local"],
    [*TRANSFORM, "-o", "W.doc"],
    [*TRANSFORM, "-o", "data.npy"],
    [*TRANSFORM, "-o", "W.csv", "--threads", 0],
    [*TRANSFORM, "-o", "W.csv", "--header"],
    ["check", "data.npy", "--report", "x.txt"],
    ["check", "data.npy", "--header"],
    ["check", "labelled.npz", "--no-header"],
    [*SPLIT],
    [*SPLIT, "-p", 0],
    [*SPLIT, "-p", 2, "--seed", -1],
    [*SPLIT, "-p", 2, "--concentration", 1],
    [*SPLIT, "-p", 2, "--by", "y", "--concentration", 0],
    [*SPLIT, "-p", 2, "--by", "y", "--concentration", -1],
    [*SPLIT, "-p", 2, "--by", "y", "--concentration", "nan"],
    [*SPLIT, "-p", 2, "--by", "y", "--iid"],
    [*SPLIT, "-p", 2, "--by", "y", "--label", "z"],
    [*SPLIT, "-p", 2, "--header"],
    ["split", "data.npy", "-p", 2, "-o", "parts", "--by", ""],
    ["info", "m.safetensors", "--top", 0],
    ["demo", "-o", "x.pdf"],
    ["demo", "--seed", -1],
]
FAILED = [
    ["fit", "none.npy", "-o", "m.safetensors"],
    ["fit", "bad.npy", "-o", "m.safetensors"],
    ["fit", "data.xyz", "-o", "m.safetensors"],
    ["fit", "data.npy", "-o", "none/m.safetensors"],
    ["fit", "~nobody-of-this-name/x.npy", "-o", "m.safetensors"],
    ["fit", "data.npy", "-o", "~nobody-of-this-name/m.safetensors"],
    [*FIT, "-k", 10**6],
    [*FIT, "--resume", "none.ckpt"],
    [*FIT, "--run-folder", "data.npy"],
    ["fit", "data.csv", "-o", "m.safetensors", "--label", "none"],
    ["fit", "labelled.npz", "-o", "m.safetensors", "--label", "none"],
    ["fit", "labelled.npz", "-o", "m.safetensors", "--key", "none"],
    ["transform", "data.npy", "none.safetensors", "-o", "W.csv"],
    ["transform", "data.npy", "data.csv", "-o", "W.csv"],
    ["check", "none.npy"],
    ["check", "bad.npy"],
    [*SPLIT, "-p", 46],
    ["split", "bad.npy", "-p", 2, "-o", "parts"],
    ["info", "none.safetensors"],
    ["info", "data.npy"],
    ["demo", "-o", "none/x.html"],
]


@pytest.fixture
def files(data_npy, data_csv, parts, X, tmp_path):
    np.savez(tmp_path / "labelled.npz", X=X, y=np.arange(45) % 3)
    np.save(tmp_path / "bad.npy", -X)
    parts.rename(tmp_path / "parts-of-three")
    return {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("words", "code"),
    [*((words, 2) for words in WRONG), *((words, 1) for words in FAILED)],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else None,
)
def test_one_rule_for_exit_codes(invoke, files, tmp_path, words, code):
    shown = invoke(*words, code=code)
    assert "Traceback" not in shown.output
    told = invoke(*words, "--json", code=code)
    said = json.loads(told.stdout.splitlines()[-1])
    assert len(told.stdout.splitlines()) == 1
    if said.get("factorizable") is not False or "error" in said:
        assert said["exit_code"] == code
        assert (said["type"] == "UsageError") is (code == 2)
        assert said["error"]
    assert {path.name for path in tmp_path.iterdir()} == files


def test_usage_errors_say_the_same_to_programs_and_people(invoke, data_npy):
    result = invoke("fit", data_npy, "-o", "m.safetensors", "--alpha-w", -1, "--json", code=2)
    said = json.loads(result.stdout)
    for word in said["error"].split():
        assert word in result.stderr
    assert "--alpha-w" in said["error"]


def test_a_word_after_two_dashes_is_no_option(invoke, tmp_path):
    assert invoke("check", "--", "--json", code=1).stdout == ""
    assert invoke("fit", "--", "--json", code=2).stdout == ""


def test_the_object_is_the_last_line_of_all(files, tmp_path):
    words = [sys.executable, "-m", "partsong.cli.main", "fit", "data.npy", "--json"]
    done = subprocess.run(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == json.loads(done.stdout.splitlines()[-1])["exit_code"] == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full is a Linux affair")
@pytest.mark.parametrize(("words", "code"), [(FIT, 1), (["fit", "data.npy"], 2), (["check", "none.npy"], 1)])
def test_where_nothing_can_be_told_the_exit_code_is(files, tmp_path, words, code):
    command = [sys.executable, "-m", "partsong.cli.main", *words, "--json"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_help_tells_of_the_object(invoke):
    for command in ("fit", "transform", "check", "split", "info", "demo"):
        assert "exit_code" in re.sub(r"[\s│]+", " ", invoke(command, "--help").stdout)


def test_the_list_of_commands_has_what_commands_say_of_themselves():
    for name, place in main.COMMANDS.items():
        first = inspect.cleandoc(place.load(name).help).split("\n\n")[0].replace("\n", " ")
        assert place.summary == first, name


def test_the_list_of_commands_loads_none_of_them():
    script = "import sys; from partsong.cli.main import app\ntry: app(['--help'])\nfinally: print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert "Factorize data" in done.stdout, done.stderr
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not loaded & {place.module for place in main.COMMANDS.values()}
    assert "numpy" not in loaded


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["fit", "none.npy", "-o", "m.safetensors"], "FileError"),
        (["fit", "bad.npy", "-o", "m.safetensors"], "DataError"),
        (["fit", "data.npy", "-o", "m.safetensors", "-k", 10**6], "ParameterError"),
        (["transform", "data.npy", "none.safetensors", "-o", "W.csv"], "FileError"),
        (["check", "none.npy"], "FileError"),
        (["check", "data.npy", "--report", "none/x.csv"], "FileError"),
        (["split", "data.npy", "-p", 100, "-o", "parts"], "ParameterError"),
        (["info", "data.npy"], "FormatError"),
        (["demo", "-o", "none/x.html"], "FileError"),
    ],
)
def test_json_tells_of_failures(invoke, data_npy, tmp_path, words, kind):
    np.save(tmp_path / "bad.npy", -np.ones((3, 3)))
    result = invoke(*words, "--json", code=1)
    (line,) = result.stdout.splitlines()
    said = json.loads(line)
    assert (said["type"], said["exit_code"]) == (kind, 1)
    assert result.stderr == f"Error: {said['error']}\n"
    assert invoke(*words, code=1).stdout == ""


def test_json_tells_of_faults_of_our_own(invoke, data_npy, monkeypatch):
    from partsong.cli import fit_session

    def fail(*_):
        raise ZeroDivisionError("never foreseen")

    monkeypatch.setattr(fit_session, "build_estimator", lambda *given, **more: fail())
    result = invoke("fit", data_npy, "-k", 2, "-o", "m.safetensors", "--json", code=1)
    said = json.loads(result.stdout.splitlines()[-1])
    assert said == {"error": "never foreseen", "type": "ZeroDivisionError", "exit_code": 1}
    assert isinstance(result.exception, ZeroDivisionError)


def test_data_that_cannot_be_factorized_are_a_verdict_and_not_a_failure(told, tmp_path):
    np.save(tmp_path / "bad.npy", -np.ones((3, 3)))
    said = told("check", "bad.npy", code=1)
    assert said["factorizable"] is False
    assert "error" not in said


def test_what_was_added_on_the_way_is_told(invoke, data_npy, monkeypatch):
    from partsong.cli import fit_session

    def fail(*_, **__):
        error = DataError("bad")
        error.add_note("(party 'x')")
        raise error

    monkeypatch.setattr(fit_session.Session, "begin", fail)
    result = invoke("fit", data_npy, "-k", 2, "-o", "m.safetensors", "--json", code=1)
    assert json.loads(result.stdout)["error"] == "bad (party 'x')"
    assert "(party 'x')" in result.stderr


def test_a_spoilt_clock_is_told_before_the_fit(invoke, data_npy, monkeypatch, tmp_path):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    assert "SOURCE_DATE_EPOCH" in invoke("fit", data_npy, "-o", "m.safetensors", code=1).stderr
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "9" * 30)
    assert "SOURCE_DATE_EPOCH" in invoke("fit", data_npy, "-o", "m.safetensors", code=1).stderr
    assert not (tmp_path / "m.safetensors").exists()


def told_by(arguments, error):
    """The message of an error that leaves a command with these arguments."""

    @handle_errors
    def command(**_):
        raise error

    with pytest.raises(typer.Exit):
        command(**dict.fromkeys(arguments))
    return plain(error)


@pytest.mark.parametrize(
    ("message", "parameter", "said"),
    [
        ("n_components must be at least 1; got 0.", "n_components", "--components must be at least 1; got 0."),
        ("n_components=10 is far more than this.", "n_components", "--components 10 is far more than this."),
        ("x.csv: label='site' is not a column.", "label", "x.csv: --label 'site' is not a column."),
        ("In party 'a': x.csv: label='b'", "label", "In party 'a': x.csv: --label 'b'"),
        ("There is no column 'y'.", "label", "--label: There is no column 'y'."),
        ("labels must be text.", "label", "--label: labels must be text."),
        ("runs/label=3/x.csv: no column.", "label", "--label: runs/label=3/x.csv: no column."),
        ("alpha_W must be zero or more; got -1.", "alpha_W", "--alpha-w must be zero or more; got -1."),
        ("random_state must be a number.", "random_state", "--seed must be a number."),
        ("n_threads must be at least 1; got 0.", "n_threads", "--threads must be at least 1; got 0."),
        ("method_options must be a mapping.", "method_options", "--method-options must be a mapping."),
        ("max_iter must be at least 1.", "max_iter", "--max-iter must be at least 1."),
        ("strength must be above 0.", "strength", "strength must be above 0."),
        ("label must be text.", None, "label must be text."),
    ],
)
def test_options_stand_in_the_place_of_parameters(message, parameter, said):
    arguments = ("n_components", "label", "alpha_w", "seed", "threads", "method_options", "max_iter")
    assert told_by(arguments, ParameterError(message, parameter=parameter)) == said


@pytest.mark.parametrize(
    "error",
    [
        ParameterError("tol must be zero or more.", parameter="tol"),
        FeatureError("x", missing={"a": ("b",)}),
        MissingExtra("x", parameter="engine"),
        BrokenChain("x", 3, "hash"),
    ],
)
def test_an_error_keeps_what_it_carries(error):
    for again in (with_message(error, "a.csv: y"), pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert vars(again) == vars(error)
    assert str(with_message(error, "a.csv: y")) == "a.csv: y"


def test_warnings_of_a_command_are_lines(capsys):
    @handle_errors
    def command():
        for _ in range(2):
            warnings.warn("The model is zero.", EmptyModelWarning, stacklevel=1)

    command()
    assert capsys.readouterr().err == "Warning: The model is zero.\n"


@pytest.mark.parametrize(
    ("words", "option", "code"),
    [
        (["fit", "data.npy", "-o", "m.safetensors", "--time-budget", 0], "--time-budget", 2),
        (["fit", "data.npy", "-o", "m.safetensors", "-k", 10**6], "--components", 1),
        (["fit", "data.npy", "-o", "m.safetensors", "--key", "x"], "--key", 2),
        (["fit", "data.npy", "-o", "m.safetensors", "--label", "x"], "--label", 2),
        (["fit", "data.npy", "-o", "m.safetensors", "--no-header"], "--header", 2),
        (["split", "labelled.npz", "-p", 2, "--by", "y", "--concentration", 0, "-o", "parts"], "--concentration", 2),
        (["split", "data.npy", "-p", 2, "--by", "y", "-o", "parts"], "--by", 2),
        (["fit", "large.npy", "-o", "m.safetensors"], "float64", 1),
    ],
)
def test_commands_speak_of_options(invoke, data_npy, X, tmp_path, words, option, code):
    np.savez(tmp_path / "labelled.npz", X=X, y=np.arange(45) % 3)
    np.save(tmp_path / "large.npy", np.full((3, 3), 1e20, np.float32))
    message = invoke(*words, code=code).stderr
    assert option in message
    for name in ("n_components", "time_budget", "label=", "key=", "dtype=", "header=", "None"):
        assert name not in message


def test_names_used_twice_are_told_with_their_places(invoke, X, tmp_path):
    names = np.array([f"g{j}" for j in range(10)] + ["g3", "g3"])
    np.savez(tmp_path / "twice.npz", X=X, feature_names=names)
    (tmp_path / "twice.csv").write_text("a,b,a\n1,2,3\n4,5,6\n")
    assert "columns 3, 10, 11" in invoke("fit", "twice.npz", "-o", "m.safetensors", code=1).stderr
    assert "columns 0, 2" in invoke("fit", "twice.csv", "-o", "m.safetensors", code=1).stderr


def test_every_error_of_ours_is_told_with_its_class(invoke, data_npy, monkeypatch):
    from partsong.cli import fit_session

    for kind in PartsongError.__subclasses__():

        def fail(*_, kind=kind, **__):
            raise kind("no")

        monkeypatch.setattr(fit_session.Session, "begin", fail)
        result = invoke("fit", data_npy, "-k", 2, "-o", "m.safetensors", "--json", code=1)
        assert json.loads(result.stdout)["type"] == kind.__name__


YEARS = tuple(str(1990 + j) for j in range(6))


@pytest.fixture
def years(tmp_path):
    X = np.random.default_rng(3).integers(0, 50, (30, 6))
    lines = [",".join(YEARS), *(",".join(map(str, row)) for row in X.tolist())]
    (tmp_path / "years.csv").write_text("\n".join(lines) + "\n")
    return X


def test_fit_transform_and_split_take_the_years_for_names(told, invoke, years, tmp_path):
    said = told("fit", "years.csv", "--header", "-k", 2, "--run-folder", "run", "--weights", "W.npy")
    assert said["shape"] == [30, 6]
    assert json.loads((tmp_path / "run/settings.json").read_text())["header"] is True
    assert partsong.load_model("run/model.safetensors").feature_names == YEARS
    invoke("transform", "years.csv", "run/model.safetensors", "--header", "-o", "V.npy")
    np.testing.assert_array_equal(np.load("V.npy"), np.load("W.npy"))
    invoke("transform", "years.csv", "run/model.safetensors", "-o", "U.npy")  # the model knows these names
    np.testing.assert_array_equal(np.load("U.npy"), np.load("W.npy"))
    said = told("split", "years.csv", "--header", "-p", 2, "-o", "parts")
    assert (said["header"], said["n_samples"]) == (True, 30)
    assert partsong.read("parts/party-01.npz").feature_names == YEARS


def test_without_a_header_they_are_data(told, years, tmp_path):
    said = told("fit", "years.csv", "--no-header", "-k", 2, "--run-folder", "run")
    assert said["shape"] == [31, 6]
    assert json.loads((tmp_path / "run/settings.json").read_text())["header"] is False
    assert told("split", "years.csv", "--no-header", "-p", 2, "-o", "parts")["n_samples"] == 31


def test_a_guess_is_told(told, invoke, years):
    (note,) = (finding for finding in told("check", "years.csv")["findings"] if finding["kind"] == "header-or-data")
    assert note["severity"] == "note"
    assert "1990, 1991, 1992" in note["message"]
    assert "header to true" in note["remedy"]
    for words in (["fit", "years.csv", "-k", 2, "-o", "m.safetensors"], ["split", "years.csv", "-p", 2, "-o", "parts"]):
        assert "may be a header" in invoke(*words).stderr
    assert "may be a header" in invoke("transform", "years.csv", "m.safetensors", "-o", "W.npy").stderr


@pytest.mark.parametrize("how", ["--header", "--no-header"])
def test_what_was_said_is_not_told(told, invoke, years, how):
    assert [f["kind"] for f in told("check", "years.csv", how)["findings"]].count("header-or-data") == 0
    assert invoke("fit", "years.csv", how, "-k", 2, "-o", "m.safetensors", "-q").stderr == ""


def test_arrays_have_no_first_line(told, tmp_path):
    X = np.random.default_rng(3).integers(0, 50, (30, 6))
    np.save(tmp_path / "x.npy", np.vstack([np.arange(1990, 1996), X]))
    assert told("check", "x.npy")["findings"] == []


def test_years_over_columns_of_samples(told, years, tmp_path):
    rows = (tmp_path / "years.csv").read_text()
    (tmp_path / "turned.csv").write_text(rows)
    assert told("check", "turned.csv", "--transpose")["findings"][-1]["kind"] == "header-or-data"
    assert told("check", "turned.csv", "--transpose", "--header")["summary"]["shape"] == [6, 30]


def test_a_resumed_run_has_to_read_alike(told, years, invoke):
    words = ["fit", "years.csv", "-k", 2, "-o", "m.safetensors", "--seed", 1, "--max-iter", 5, "--tol", 0]
    told(*words, "--header", "--checkpoint", "c.ckpt")
    assert "shape" in invoke(*words, "--no-header", "--resume", "c.ckpt", code=1).stderr


PARTSONG = [sys.executable, "-m", "partsong.cli.main"]
SOURCE = str(Path(partsong.__file__).parents[1])
ENVIRONMENT = {**os.environ, "PYTHONPATH": SOURCE, "COLUMNS": "200"}
needs_signals = pytest.mark.skipif(os.name == "nt", reason="Ctrl-C of another process is a POSIX affair")


def run(*words, cwd):
    command = [*PARTSONG, *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)


def test_version_and_help(invoke):
    assert invoke("--version").stdout == f"partsong {partsong.__version__}\n"
    shown = invoke("--help").stdout
    for command in ("fit", "transform", "check", "split", "info", "demo"):
        assert command in shown
        page = invoke(command, "--help").stdout
        assert "Examples:" in page


def test_help_loads_nothing_heavy(tmp_path):
    heavy = "{'numpy', 'scipy', 'sklearn', 'numba', 'pandas', 'torch'}"
    code = f"import sys, partsong.cli.main; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_exit_codes(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((4, 3)))
    done = run("fit", "x.npy", "-k", 1, "-o", "m.safetensors", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["outcome"] == "converged"
    done = run("fit", "y.npy", "-k", 1, "-o", "m.safetensors", "--json", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    said = json.loads(done.stdout)
    assert said == {"error": done.stderr.removeprefix("Error: ").strip(), "type": "FileError", "exit_code": 1}
    done = run("fit", "y.npy", "-k", 1, "-o", "m.safetensors", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")


def start_long_fit(folder, *words, sigint=signal.SIG_DFL):
    """A fit that would take hours, once its first checkpoint is there."""
    rng = np.random.default_rng(0)
    X = rng.random((300, 60))
    if "parts" in words:
        (folder / "parts").mkdir()
        for name, rows in (("a", X[:150]), ("b", X[150:])):
            np.savez(folder / "parts" / f"{name}.npz", X=rows)
        parties = [{"name": name, "file": f"{name}.npz", "rows": 150} for name in "ab"]
        listing = {"format": "partsong-parts", "version": 1, "parties": parties}
        (folder / "parts" / "parts.json").write_text(json.dumps(listing))
    np.save(folder / "x.npy", X)
    options = ["-k", 5, "--tol", 0, "--seed", 1, "-o", "m.safetensors", "--run-folder", "run", "--json"]
    command = [*PARTSONG, "fit", *words, *map(str, options), "--checkpoint", "c.ckpt", "--checkpoint-every", "0.3"]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, sigint),  # whatever the shell does with it
    )
    deadline = time.monotonic() + 40
    while not (folder / "c.ckpt").exists() and time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    return process


@needs_signals
@pytest.mark.parametrize(
    "words", [["x.npy", "--max-iter", "100000000"], ["parts", "--rounds", "100000000"]], ids=["file", "parts"]
)
def test_interrupt_saves_the_model_and_the_run_can_go_on(tmp_path, words, monkeypatch):
    process = start_long_fit(tmp_path, *words)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    said = json.loads(output)
    assert said["outcome"] == "interrupted"
    assert json.loads((tmp_path / "run/result.json").read_text()) == said
    assert partsong.load_model(tmp_path / "m.safetensors").components.shape == (5, 60)
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]
    further = str(said["iterations"] + 3)
    done = run("fit", words[0], words[1], further, "--resume", "c.ckpt", "-o", "m2.safetensors", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["iterations"] == said["iterations"] + 3
    anew = ["-k", 5, "--tol", 0, "--seed", 1, "-o", "m3.safetensors"]
    done = run("fit", words[0], words[1], further, *anew, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    joined, whole = (partsong.load_model(tmp_path / name) for name in ("m2.safetensors", "m3.safetensors"))
    np.testing.assert_array_equal(joined.components, whole.components)


@needs_signals
@pytest.mark.parametrize("gap", [0.0, 0.03, 0.2])
def test_three_interrupts_in_a_row_have_the_same_exit_code(tmp_path, gap):
    """Wherever the later ones come: while the model is saved, told (then perhaps it is not), or on the way out."""
    process = start_long_fit(tmp_path, "x.npy", "--max-iter", "100000000")
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(gap)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    for line in output.splitlines()[-1:]:
        json.loads(line)


@needs_signals
@pytest.mark.parametrize("sigint", [signal.SIG_DFL, signal.SIG_IGN], ids=["heard", "ignored"])
def test_sigterm_saves_the_model(tmp_path, sigint):
    process = start_long_fit(tmp_path, "x.npy", "--max-iter", "100000000", sigint=sigint)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 143, errors
    assert "Traceback" not in errors
    assert json.loads(output)["outcome"] == "interrupted"
    assert partsong.load_model(tmp_path / "m.safetensors").components.shape == (5, 60)


def test_demo_in_json(told, tmp_path):
    said = told("demo", "--quick", "-o", "x.html")
    assert said["report"] == "x.html"
    assert (tmp_path / "x.html").stat().st_size > 1000
    methods = {method["name"]: method for method in said["methods"]}
    exact, oracle = methods["exact shared statistics"], methods["pooled oracle"]
    assert exact["relative_error"] == pytest.approx(oracle["relative_error"], rel=0.05)
    averaged = next(method for name, method in methods.items() if name.startswith("local"))
    assert exact["relative_error"] < averaged["relative_error"]
    assert exact["bytes_up_per_party"] > 0
    assert oracle["bytes_up_per_party"] is None
    assert sum(method["seconds"] for method in methods.values()) <= said["seconds"]


def test_demo_is_wired(invoke, monkeypatch):
    import partsong.cli.demo

    calls = []
    monkeypatch.setattr(partsong.cli.demo, "run_demo", lambda *given: calls.append(given))
    invoke("demo", "--output", "x.html", "--seed", 3, "--quick")
    (output, seed, quick, console) = calls[0]
    assert (output, seed, quick) == (Path("x.html"), 3, True)
    assert hasattr(console, "print")
    assert ".html" in invoke("demo", "--output", "x.pdf", code=2).stderr


def test_every_command_has_a_summary():
    for command in app.registered_commands:
        assert command.callback.__doc__.splitlines()[0].endswith(".")
        assert command.epilog.startswith("Examples:")


needs_posix_signals = pytest.mark.skipif(os.name == "nt", reason="signals to oneself are a POSIX affair")


@pytest.fixture
def interrupts_work():
    """Also under a shell that ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press():
    signal.raise_signal(signal.SIGINT)


@needs_posix_signals
@pytest.mark.usefixtures("interrupts_work")
def test_the_first_is_held_back_and_the_second_is_not(capsys):
    with graceful_interrupt("wait") as pressed:
        press()
        assert pressed.count == 1
        with pytest.raises(KeyboardInterrupt):
            press()
    assert capsys.readouterr().err == "wait\n"
    with pytest.raises(KeyboardInterrupt):
        press()


@needs_posix_signals
@pytest.mark.usefixtures("interrupts_work")
def test_while_the_model_is_finished(invoke, data_npy, monkeypatch):
    plain = centralized.finish

    def finish(*given):
        press()
        return plain(*given)

    monkeypatch.setattr(centralized, "finish", finish)
    result = invoke("fit", data_npy, "-k", 3, "-o", "m.safetensors", "--json", code=130)
    assert json.loads(result.stdout)["outcome"] == "converged"
    assert "again" in result.stderr
    assert partsong.load_model("m.safetensors").components.shape == (3, 12)


@needs_posix_signals
@pytest.mark.usefixtures("interrupts_work")
def test_before_the_first_iteration_is_done_there_is_nothing_to_save(told, data_npy, monkeypatch, tmp_path):
    from partsong.solvers.squared_error import SquaredError

    monkeypatch.setattr(SquaredError, "row_step", lambda *given: (press(), press()))
    said = told("fit", data_npy, "-k", 3, "-o", "m.safetensors", "--checkpoint", "c.ckpt", code=130)
    assert said == {"error": "Interrupted; no result was saved.", "type": "KeyboardInterrupt", "exit_code": 130}
    assert not (tmp_path / "m.safetensors").exists()
    assert not (tmp_path / "c.ckpt").exists()


@needs_posix_signals
@pytest.mark.usefixtures("interrupts_work")
def test_a_resumed_run_has_a_model_before_its_first_iteration(told, data_npy, monkeypatch):
    from partsong.solvers.squared_error import SquaredError

    begin = ["fit", data_npy, "-k", 3, "--tol", 0]
    told(*begin, "--max-iter", 3, "-o", "m.safetensors", "--checkpoint", "c.ckpt")
    monkeypatch.setattr(SquaredError, "row_step", lambda *given: (press(), press()))
    said = told("fit", data_npy, "--resume", "c.ckpt", "--max-iter", 5, "-o", "again.safetensors", code=130)
    assert (said["iterations"], said["outcome"]) == (3, "interrupted")
    first, again = (partsong.load_model(f"{name}.safetensors").components for name in ("m", "again"))
    assert (first == again).all()


@needs_posix_signals
@pytest.mark.usefixtures("interrupts_work")
def test_the_first_lets_the_iteration_finish(told, data_npy, monkeypatch):
    from partsong.solvers.squared_error import SquaredError

    plain = SquaredError.row_step

    def local(self, *given):
        press()
        return plain(self, *given)

    monkeypatch.setattr(SquaredError, "row_step", local)
    said = told("fit", data_npy, "-k", 3, "-o", "m.safetensors", code=130)
    assert (said["iterations"], said["outcome"]) == (1, "interrupted")


@needs_posix_signals
@pytest.mark.usefixtures("interrupts_work")
def test_sigterm_goes_the_same_way(told, data_npy, monkeypatch):
    from partsong.solvers.squared_error import SquaredError

    plain = SquaredError.row_step

    def local(self, *given):
        signal.raise_signal(signal.SIGTERM)
        return plain(self, *given)

    monkeypatch.setattr(SquaredError, "row_step", local)
    said = told("fit", data_npy, "-k", 3, "-o", "m.safetensors", code=143)
    assert (said["iterations"], said["outcome"]) == (1, "interrupted")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@needs_posix_signals
@pytest.mark.usefixtures("interrupts_work")
def test_sigterm_while_the_data_are_read(told, data_npy, monkeypatch, tmp_path):
    monkeypatch.setattr(fit_session, "read_data", lambda *given, **more: signal.raise_signal(signal.SIGTERM))
    said = told("fit", data_npy, "-k", 3, "-o", "m.safetensors", code=143)
    assert said == {"error": "Interrupted; no result was saved.", "type": "KeyboardInterrupt", "exit_code": 143}
    assert not (tmp_path / "m.safetensors").exists()
    monkeypatch.setattr(fit_session, "read_data", lambda *given, **more: press())
    assert told("fit", data_npy, "-k", 3, "-o", "m.safetensors", code=130)["exit_code"] == 130


@needs_posix_signals
@pytest.mark.usefixtures("interrupts_work")
def test_somebody_elses_handler_of_sigterm_stays(invoke, data_npy, monkeypatch):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *given: heard.append(given))
    try:
        monkeypatch.setattr(fit_session, "report", lambda *given: signal.raise_signal(signal.SIGTERM))
        invoke("fit", data_npy, "-k", 3, "-o", "m.safetensors")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(heard) == 1


@needs_posix_signals
@pytest.mark.usefixtures("interrupts_work")
def test_while_the_data_are_read(invoke, data_npy, monkeypatch, tmp_path):
    monkeypatch.setattr(fit_session, "read_data", lambda *given, **more: press())
    result = invoke("fit", data_npy, "-k", 3, "-o", "m.safetensors", code=130)
    assert "Interrupted" in result.stderr
    assert not (tmp_path / "m.safetensors").exists()


@needs_posix_signals
@pytest.mark.usefixtures("interrupts_work")
def test_divergence_is_an_outcome(told, data_npy, monkeypatch, tmp_path):
    from partsong.solvers.squared_error import SquaredError

    nan = float("nan")
    monkeypatch.setattr(SquaredError, "metrics", lambda *given: {"relative_error": nan, "objective": nan})
    said = told("fit", data_npy, "-k", 3, "-o", "m.safetensors", "--run-folder", "run", "--checkpoint", "c.ckpt")
    assert said["outcome"] == "diverged"
    assert said["relative_error"] is not None
    rows = list(csv.DictReader((tmp_path / "run/history.csv").read_text().splitlines()))
    assert rows[0]["relative_error"] == ""


PACKAGE = Path(partsong.__file__).parent
PATTERNS = ("federation/**/*.py", "cli/federation*.py", "cli/audit.py")
NO_ADVICE = ("credentials.py",)
"""Names of certificates look like commands."""
MODULES = sorted(path for pattern in PATTERNS for path in PACKAGE.glob(pattern) if path.name not in NO_ADVICE)
COMMANDS = get_command(app)
NAMED = re.compile(
    rf"partsong (?:{'|'.join(COMMANDS.commands)})\b" + r"""(?:"[^"]*"|[^`)\n"])*?(?=[`)\n]|[.,;:](?:\s|$)|$)"""
)
"""Up to the end of a sentence, a part of one, or what stands in brackets; texts in quotes may have all that in them."""


def texts_in(tree):
    """All texts but docstrings; a value that is only known later is a 1, which can be a number, a name or a path."""
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "1" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare | parts:
            yield node.value


def named_commands():
    for path in MODULES:
        for text in texts_in(ast.parse(path.read_text(encoding="utf-8"))):
            yield from ((path.name, found) for found in NAMED.findall(text))


def require_usable(line):
    """Read by the command line's own parser, without being run."""
    command, words = COMMANDS, shlex.split(line)[1:]
    assert "…" not in words
    while hasattr(command, "commands"):
        _, command, words = command.resolve_command(None, words)
    command.make_context("partsong", words)


@pytest.mark.parametrize(("module", "line"), sorted(set(named_commands())))
def test_a_command_that_a_text_names_can_be_given_as_it_is_printed(module, line):
    require_usable(line)


def test_there_are_such_commands():
    found = {module for module, _ in named_commands()}
    assert {"consistency.py", "site_folder.py", "texts.py", "server.py"} <= found


@pytest.mark.parametrize(
    "line", ["partsong audit opening FOLDER --releases 2", "partsong audit verify", "partsong federation join"]
)
def test_a_command_without_what_it_needs_cannot(line):
    with pytest.raises(Exception, match="Missing"):
        require_usable(line)


SECTION = re.compile(r"^#+ partsong ((?:federation|audit) [\w-]+)\n(.*?)(?=^#|\Z)", re.MULTILINE | re.DOTALL)
OPTIONS = re.compile(r"^\| ((?:`-[\w-]+`(?:, )?)+)", re.MULTILINE)


def commands():
    for group in ("federation", "audit"):
        for name, command in TABLE[group].load(group).commands.items():
            yield f"{group} {name}", command


def options_of(command):
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


@pytest.fixture(scope="module")
def sections(generated):
    return dict(SECTION.findall((generated / "cli.md").read_text(encoding="utf-8")))


@pytest.mark.parametrize(("name", "command"), list(commands()), ids=[name for name, _ in commands()])
def test_the_page_has_all_options_of_a_command_and_no_others(name, command, sections):
    named = {option for row in OPTIONS.findall(sections[name]) for option in re.findall(r"`(-[\w-]+)`", row)}
    assert named == {option for option in options_of(command) if option.startswith("-")}


def test_the_page_has_no_other_commands(sections):
    assert set(sections) == dict(commands()).keys()


DOCS = Path(__file__).parents[2] / "docs"
GUIDES = tuple(f"guide/{page.name}" for page in sorted((DOCS / "guide").glob("*.md")))
TUTORIALS = tuple(f"tutorials/{page.name}" for page in sorted((DOCS / "tutorials").glob("*.md")))
PAGES = (*GUIDES, *TUTORIALS, "reference/security.md", "reference/protocol.md")


def command_lines():
    for page in PAGES:
        text = (DOCS / page).read_text(encoding="utf-8")
        blocks = "\n".join(re.findall(r"```\n(.*?)```", text, re.DOTALL))
        yield from ((page, line) for line in blocks.splitlines() if line.startswith("partsong "))
        quoted = re.findall(r"`(partsong (?:federation|audit|info|check|transform)[^`]*)`", text)
        yield from ((page, line) for line in quoted)
    yield from (("README of a kit", line.strip()) for line in re.findall(r"partsong federation .*", README))


@pytest.mark.parametrize(("page", "line"), sorted(set(command_lines())))
def test_a_command_in_a_page_is_one(page, line):
    words = shlex.split(line, comments=True)[1:]
    command = get_command(app)
    while words and hasattr(command, "commands"):
        name = words.pop(0).rstrip(".,")
        assert name in command.commands, f"{page}: {line}"
        _, command, _ = command.resolve_command(None, [name])
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    used = {word for word in words if word.startswith("-") and word != "-"}
    assert used <= known, f"{page}: {line}"


@pytest.mark.parametrize("page", GUIDES)
def test_an_option_in_a_guide_is_one(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", re.sub(r"`python -m experiments[^`]*`", "", text)))
    assert named - {"--nproc-per-node"} <= {"--help", *options_of_page(get_command(app))}  # torchrun has the other one


def options_of_page(command):
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for name in getattr(command, "commands", {}):
        yield from options_of_page(command.resolve_command(None, [name])[1])


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page, generated):
    text = (DOCS / page).read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", text):
        other = (DOCS / page).parent / target if target else DOCS / page
        other = generated / other.name if other.parent.name == "generated" else other
        assert other.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", other.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{target}#{anchor}"


def test_every_table_in_the_guide_is_an_experiment_or_a_policy():
    text = (DOCS / "guide" / "federation.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    experiments = [block for block in blocks if block.startswith("# experiment.toml")]
    assert len(experiments) == 5
    for block in blocks:
        (Experiment if block in experiments else Policy).from_table(tomllib.loads(block))
        if block not in experiments:
            keys = tomllib.loads(re.sub(r"^# (?=\w+ = |\[)", "", block, flags=re.MULTILINE))
            Policy.from_table(keys)
