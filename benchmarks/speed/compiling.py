"""Time of the first call, without compiled kernels on disk and with those of an earlier process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

KINDS = ("dense float64", "dense float32", "sparse float64", "sparse float32")


def first_fits(times: int = 3) -> dict[str, list[float]]:
    """Seconds of the first fit of each kind, without imports, in processes without compiled kernels."""
    return {kind: [_alone(kind) for _ in range(times)] for kind in KINDS}


def _alone(kind: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return float(next(iter(_run(folder, kind).values())))


def _run(cache: str, *words: str) -> dict[str, float]:
    root = Path(__file__).resolve().parents[2]
    paths = os.pathsep.join([str(root), *filter(None, sys.path)])
    environment = {**os.environ, "NUMBA_CACHE_DIR": cache, "PYTHONPATH": paths}
    command = [sys.executable, "-m", "benchmarks.speed.compiling", *words]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure() -> dict[str, dict[str, float]]:
    """Seconds of imports, first and second dense and sparse fits, with and without compiled kernels."""
    with tempfile.TemporaryDirectory() as folder:
        return {name: _run(folder) for name in ("nothing compiled yet", "compiled by an earlier process")}


def _first(kind: str) -> dict[str, float]:
    import numpy as np
    from scipy.sparse import random_array

    from partsong import NMF

    form, precision = kind.split()
    held = random_array((200, 50), density=0.08, rng=np.random.default_rng(0), dtype=precision).tocsr()
    X = held if form == "sparse" else held.toarray() + np.array(0.1, precision)
    began = time.perf_counter()
    NMF(5, random_state=0).fit(X)
    return {kind: time.perf_counter() - began}


def _child() -> dict[str, float]:
    began = time.perf_counter()
    import numpy as np
    from scipy.sparse import random_array

    others = time.perf_counter()
    from partsong import NMF

    imported = time.perf_counter()
    found = {"import numpy, scipy": others - began, "import NMF, with scikit-learn and numba": imported - others}
    generator = np.random.default_rng(0)
    dense = generator.random((200, 50), np.float32)
    sparse = random_array((200, 50), density=0.1, rng=generator, dtype=np.float32).tocsr()
    for turn in ("first", "second"):
        for name, X in (("dense", dense), ("sparse", sparse)):
            began = time.perf_counter()
            NMF(5, max_iter=3, tol=0, random_state=0).fit(X)
            found[f"{turn} {name} fit"] = time.perf_counter() - began
    return found


if __name__ == "__main__":
    print(json.dumps(_first(sys.argv[1]) if sys.argv[1:] else _child()))
