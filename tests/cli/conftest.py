import hashlib
import importlib.util
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from partsong.cli.main import app

SITES = "abc"


def runner():
    """Standard output and standard error apart, which older versions have to be told."""
    try:
        return CliRunner(mix_stderr=False)
    except TypeError:
        return CliRunner()


@pytest.fixture(scope="session")
def generated(tmp_path_factory):
    """The folder of the pages that docs/generate.py writes."""
    spec = importlib.util.spec_from_file_location("generate", Path(__file__).parents[2] / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    folder = tmp_path_factory.mktemp("generated")
    generate.write(folder)
    return folder


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """Run the command line in a folder of its own; the exit code is checked, and the result given back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words, code=0):
        result = runner().invoke(app, [str(word) for word in words])
        assert result.exit_code == code, f"exit code {result.exit_code}\n{result.output}\n{result.exception!r}"
        return result

    return run


@pytest.fixture
def told(invoke):
    """The one JSON object that a command prints with --json."""

    def run(*words, code=0):
        result = invoke(*words, "--json", code=code)
        lines = result.stdout.splitlines()
        assert len(lines) == 1
        return json.loads(lines[0], parse_constant=lambda name: pytest.fail(f"{name} in JSON"))

    return run


@pytest.fixture
def X():
    rng = np.random.default_rng(0)
    return rng.random((45, 3)) @ rng.random((3, 12)) + 0.05 * rng.random((45, 12))


@pytest.fixture
def names():
    return tuple(f"gene {j}" for j in range(12))


@pytest.fixture
def data_csv(tmp_path, X, names):
    """Sample names, twelve columns, and a column of labels."""
    lines = [",".join(["sample", *names, "site"])]
    lines += [",".join([f"patient-{i}", *map(repr, row.tolist()), SITES[i % 3]]) for i, row in enumerate(X)]
    path = tmp_path / "data.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def data_npy(tmp_path, X):
    path = tmp_path / "data.npy"
    np.save(path, X)
    return path


@pytest.fixture
def parts(invoke, data_csv, tmp_path):
    invoke("split", data_csv, "--parties", 3, "--by", "site", "--seed", 1, "-o", "parts", "--quiet")
    return tmp_path / "parts"


def replace_in(parts, party, **changes):
    """Put other arrays into the file of a party of this folder, and its new hash into the list."""
    path = parts / f"{party}.npz"
    with np.load(path) as arrays:
        content = {**arrays, **changes}
    np.savez(path, **content)
    listing = json.loads((parts / "parts.json").read_text())
    entry = next(entry for entry in listing["parties"] if entry["name"] == party)
    entry["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (parts / "parts.json").write_text(json.dumps(listing))


@pytest.fixture
def replace_part(parts):
    """Put other arrays into one party's file."""
    return partial(replace_in, parts)
