"""What only a process of its own can show: exit codes, Ctrl-C, and how long help takes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import partsong
from partsong.cli.main import app

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
