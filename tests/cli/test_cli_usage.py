"""One rule for exit codes: 2 for a command line that is wrong whatever the files hold, 1 for data, files and runs."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from partsong.cli import main

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
    for name, place in main.PLACES.items():
        first = inspect.cleandoc(place.load(name).help).split("\n\n")[0].replace("\n", " ")
        assert place.summary == first, name


def test_the_list_of_commands_loads_none_of_them():
    script = "import sys; from partsong.cli.main import app\ntry: app(['--help'])\nfinally: print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert "Learn parts from data" in done.stdout, done.stderr
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not loaded & {place.module for place in main.PLACES.values()}
    assert "numpy" not in loaded
