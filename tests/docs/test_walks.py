"""docs/reference/architecture.md names every step of five fits: they run, in that order, in those files."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import partsong

SOURCE = Path(partsong.__file__).parent
PAGE = Path(__file__).resolve().parents[2] / "docs/reference/architecture.md"

WATCHED = """
import json, os, sys, tempfile, warnings
from pathlib import Path
import numpy as np
import partsong

package, order = os.path.dirname(partsong.__file__) + os.sep, {}
X = np.random.default_rng(0).random((30, 8))
np.save("x.npy", X)


def partsong_fit():
    from partsong.cli.main import main

    if not Path("parts").exists():
        sys.argv[1:] = ["split", "x.npy", "--parties", "2", "-o", "parts", "-q"]
        call(main)
    sys.argv[1:] = ["fit", "parts", "-k", "2", "--rounds", "3", "-o", "m.safetensors", "-q"]
    call(main)


def call(main):
    try:
        main()
    except SystemExit as end:
        assert not end.code


def federation():
    from partsong.federation.experiment import Experiment
    from partsong.federation.policy import Policy
    from partsong.federation.server.launch import run_experiment
    from partsong.federation.site.plan import SiteData
    from partsong.federation.site.service import Site
    from partsong.federation.transports.base import InProcess

    folder, columns = Path(tempfile.mkdtemp(dir=".")), tuple(f"column {number}" for number in range(8))
    tables = {"east": X[:15], "west": X[15:]}
    sites = {name: Site(name, folder / name, SiteData(rows, columns, 7), Policy()) for name, rows in tables.items()}
    transport = InProcess({name: site.answer for name, site in sites.items()})
    list(run_experiment(Experiment("exact", 2, 3), transport, folder / "server", "first"))


fits = {
    "NMF.fit": lambda: partsong.NMF(2, max_iter=3, random_state=0).fit(X),
    "FederatedNMF.fit": lambda: partsong.FederatedNMF(2, rounds=3, n_jobs=1).fit([X[:15], X[15:]]),
    "a fit over ranks": lambda: partsong.fit_distributed("x.npy", 2, engine="mpi", max_iter=3, reduce="in-order"),
    "a federation": federation,
    "partsong fit": partsong_fit,
}
title = sys.argv[1]

def watch(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(package):
        order.setdefault(f"{code.co_filename[len(package):]} {code.co_qualname}", len(order))

warnings.simplefilter("ignore")
fits[title]()  # imports and caches
sys.setprofile(watch)
fits[title]()
sys.setprofile(None)
print(json.dumps(order))
"""


def steps(title):
    """File and function of each line of a table."""
    section = PAGE.read_text("utf-8").split(f"through {title}", 1)[1].split("\n## ")[0]
    return re.findall(r"^\| \d+ \| `([^`]+)` \| `([^`]+)`", section, re.M)


@pytest.mark.parametrize(
    "title", ["`NMF.fit`", "`FederatedNMF.fit`", "a fit over ranks", "a federation", "`partsong fit`"]
)
def test_a_row_goes_this_way(title, tmp_path):
    if title == "a fit over ranks" and importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(SOURCE.parent)}
    command = [sys.executable, "-c", WATCHED, title.strip("`")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    order = json.loads(done.stdout.splitlines()[-1])
    told = [" ".join(step) for step in steps(title)]
    assert len(told) >= 15
    assert set(told) <= order.keys(), "steps that this fit does not take"
    assert told == sorted(told, key=order.__getitem__), "steps in another order"


def test_all_that_the_page_names_is_there():
    for file in re.findall(r"`((?:\w+/)+\w*\.?\w*)`", PAGE.read_text("utf-8")):
        assert (SOURCE / file).exists() or (PAGE.parents[2] / file).exists(), file


def imports_in_docs():
    """Every name of ours that a page imports."""
    root = PAGE.parents[2]
    pages = [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").rglob("*.md")]
    text = "\n".join(page.read_text("utf-8") for page in pages)
    found = re.findall(r"^\s*from (partsong[\w.]*) import (\(?[\w, ]+\)?)$", text, re.M)
    return sorted({(module, name.strip(" ()")) for module, names in found for name in names.split(",") if name.strip()})


@pytest.mark.parametrize(("module", "name"), imports_in_docs())
def test_what_a_page_imports_is_there(module, name):
    home = importlib.import_module(module)
    assert hasattr(home, name) or hasattr(home, "__path__"), f"{module} has no {name}"
    if not hasattr(home, name):
        importlib.import_module(f"{module}.{name}")
