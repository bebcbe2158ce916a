"""Peak memory of a fit, above that of a process that has already imported, compiled and fitted something small.

Each case runs in its own process, which reads the data from a file: temporary arrays of generating or parsing data do
not count, the data themselves do. `python -m benchmarks.memory.fit` measures the large cases alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.speed.evaluation import Problem

SLACK = 64_000_000
ROUNDS = 10
SMALL_ROWS = 200
MAPPED_SHAPE = (250_000, 1_000)
MAPPED_RANK = 20


@dataclass(frozen=True, slots=True)
class Case:
    """Generated data large enough to reveal anything that grows with their size."""

    name: str
    rank: int
    make: Callable[[], Any]


def _wide(rows: int, columns: int) -> np.ndarray:
    """Generate uniform values: memory does not depend on them."""
    return np.random.default_rng(4).random((rows, columns), np.float32)


def _sparse(rows: int, columns: int, per_row: int) -> Any:
    """Generate a sparse matrix with equally many entries per row."""
    from scipy.sparse import csr_array

    generator = np.random.default_rng(5)
    spread = np.sort(generator.integers(0, columns - per_row, (rows, per_row), np.int32), axis=1)
    indices = (spread + np.arange(per_row, dtype=np.int32)).ravel()
    starts = np.arange(0, indices.size + 1, per_row, dtype=np.int32)
    return csr_array((generator.random(indices.size, np.float32), indices, starts), shape=(rows, columns))


LARGE = (
    Case("60 wide rows", 50, lambda: _wide(60, 1_000_000)),
    Case("200 wide rows", 20, lambda: _wide(200, 500_000)),
    Case("20 million entries", 50, lambda: _sparse(200_000, 5_000, 100)),
)


def measure_large(n_threads: int, cases: tuple[Case, ...] = LARGE) -> dict[str, dict[str, float]]:
    """Peak and allowance of the large cases, by name."""
    return {case.name: measure(Problem(case.make(), case.rank), n_threads) for case in cases}


def allowance(n_bytes: int, shape: tuple[int, int], rank: int, itemsize: int) -> int:
    """Data + 4 (n + m) k numbers + 64 MB."""
    return n_bytes + 4 * sum(shape) * rank * itemsize + SLACK


def measure(problem: Problem, n_threads: int) -> dict[str, float]:
    """Peak and allowance of a default fit, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        file = _written(problem.X, Path(folder) / "data")
        small = _written(problem.X[:SMALL_ROWS], Path(folder) / "small")
        found = _in_a_process("fit", file, small, problem.rank, n_threads)
    X = problem.X
    stored = X.data.nbytes + X.indices.nbytes + X.indptr.nbytes if problem.is_sparse else X.nbytes
    return {**found, "data": stored, "allowance": allowance(stored, X.shape, problem.rank, X.dtype.itemsize)}


def measure_mapped(n_threads: int, shape: tuple[int, int] = MAPPED_SHAPE) -> dict[str, float]:
    """Peak of a fit to a memory-mapped file of `shape` float32 numbers."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mapped.npy"
        _write_blocks(file, shape)
        small = _written(
            np.array(np.load(file, mmap_mode="r", allow_pickle=False)[:SMALL_ROWS]), Path(folder) / "small"
        )
        found = _in_a_process("mapped", file, small, MAPPED_RANK, n_threads)
        return {**found, "data": file.stat().st_size, "allowance": allowance(0, shape, MAPPED_RANK, 4)}


def _written(X: Any, place: Path) -> Path:
    if hasattr(X, "tocsr"):
        from scipy.sparse import save_npz

        save_npz(place.with_suffix(".npz"), X, compressed=False)
        return place.with_suffix(".npz")
    np.save(place.with_suffix(".npy"), X, allow_pickle=False)
    return place.with_suffix(".npy")


def _read(file: str, mapped: bool) -> Any:
    if file.endswith(".npz"):
        from scipy.sparse import load_npz

        return load_npz(file)
    return np.load(file, mmap_mode="r" if mapped else None, allow_pickle=False)


def _write_blocks(file: Path, shape: tuple[int, int]) -> None:
    """Write a planted matrix block by block, so that it is never in memory as a whole."""
    generator = np.random.default_rng(3)
    H = generator.gamma(0.5, size=(MAPPED_RANK, shape[1])).astype(np.float32)
    with file.open("wb") as out:
        np.lib.format.write_array_header_1_0(out, {"descr": "<f4", "fortran_order": False, "shape": tuple(shape)})
        for start in range(0, shape[0], 10_000):
            rows = min(10_000, shape[0] - start)
            block = generator.gamma(0.5, size=(rows, MAPPED_RANK)).astype(np.float32) @ H
            block += generator.random(block.shape, np.float32)
            out.write(block.astype("<f4").tobytes())


def _in_a_process(*words: Any) -> dict[str, float]:
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "benchmarks.memory.fit", *map(str, words)]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"The measuring process failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _resident(which: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(which + ":"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {which}.")


def _child(kind: str, file: str, small: str, rank: int, n_threads: int) -> dict[str, float]:
    from partsong import NMF

    settings = {"tol": 0.0, "random_state": 0, "n_threads": n_threads}
    NMF(rank, max_iter=3, **settings).fit(_read(small, kind == "mapped"))
    before = _resident("VmRSS")
    X = _read(file, kind == "mapped")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak counts from here
    model = NMF(rank, max_iter=ROUNDS, **settings).fit(X)
    return {"peak": _resident("VmHWM") - before, "before": before, "seconds": model.history_[-1].seconds}


def _main(words: list[str]) -> None:
    if words:
        kind, file, small, rank, n_threads = words
        print(json.dumps(_child(kind, file, small, int(rank), int(n_threads))))
        return
    for case in LARGE:
        held = measure_large(os.cpu_count() or 1, (case,))[case.name]
        peaks = f"peak {held['peak'] / 1e6:.0f} MB, allowance {held['allowance'] / 1e6:.0f} MB"
        print(f"{case.name}: {peaks}, {held['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    _main(sys.argv[1:])
