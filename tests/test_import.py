"""`import partsong` is cheap: nothing heavy comes along before it is needed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"

HEAVY = ("numba", "torch", "sklearn", "scipy.sparse.linalg", "pandas", "typer", "rich")
SECONDS = 0.5

IMPORT_AND_TELL = """
import sys, time
start = time.perf_counter()
import partsong
print(time.perf_counter() - start)
print(*sorted(sys.modules))
"""


def import_in_a_fresh_process() -> tuple[float, set[str]]:
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", IMPORT_AND_TELL]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seconds, modules = done.stdout.splitlines()
    return float(seconds), set(modules.split())


@pytest.fixture(scope="module")
def imports() -> list[tuple[float, set[str]]]:
    return [import_in_a_fresh_process() for _ in range(5)]


@pytest.mark.parametrize("heavy", HEAVY)
def test_import_leaves_out(heavy, imports):
    assert heavy not in imports[0][1]


def test_import_is_quick(imports):
    best = min(seconds for seconds, _ in imports)
    assert best < SECONDS, f"importing partsong took {best:.2f} s at best of {len(imports)}"
