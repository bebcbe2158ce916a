"""What the first call costs: with no compiled kernels on disk, and with those of an earlier process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def measure() -> dict[str, dict[str, float]]:
    """Seconds of a process for each of: import, first dense fit, first sparse fit, and both once more."""
    root = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "NUMBA_CACHE_DIR": folder,
            "PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)]),
        }
        found = {}
        for name in ("nothing compiled yet", "compiled by an earlier process"):
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.compiling"],
                cwd=root,
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            )
            found[name] = json.loads(done.stdout.splitlines()[-1])
        return found


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
    print(json.dumps(_child()))
