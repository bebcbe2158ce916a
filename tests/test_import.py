"""`import partsong` is cheap: nothing heavy comes along before it is needed. And it works where nothing can be kept."""

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


@pytest.mark.parametrize("module", ["partsong.cli.main", "partsong.cli.fit", "partsong.cli.topics", "partsong.methods"])
def test_options_and_helps_need_no_numerics(module):
    """Who asks for a help text does not wait for compilers and statistics."""
    program = f"import sys, {module}; print(*sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert not {"numba", "scipy", "sklearn", "torch"} & set(done.stdout.split())


def test_methods_are_there_without_an_import_of_their_own():
    program = "import partsong; print(partsong.methods.build('fedprox', 10, strength=0.2).rank)"
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["10"]


FIT_WITHOUT_A_CACHE = """
import numba, numba.core.caching as caching, numpy, warnings
warnings.simplefilter("error")
caching.CacheImpl._locator_classes = []
try:
    numba.njit(cache=True)(lambda: None)
except RuntimeError as error:
    assert "no locator available" in str(error)
else:
    raise AssertionError("numba still finds a place for its cache")
import importlib, partsong.kernels, pathlib
names = {path.stem for path in pathlib.Path(partsong.kernels.__file__).parent.glob("[!_]*.py")} - {"torch_backend"}
assert len(names) > 5
for name in names:
    importlib.import_module(f"partsong.kernels.{name}")
X = numpy.random.default_rng(0).random((30, 12))
print(partsong.NMF(3, max_iter=5, tol=0, random_state=0).fit_transform(X).shape)
"""


def test_a_fit_needs_no_place_for_compiled_code():
    """As in a read-only installation without a home, where numba refuses `cache=True`."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", FIT_WITHOUT_A_CACHE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["(30,", "3)"]
    assert not done.stderr
