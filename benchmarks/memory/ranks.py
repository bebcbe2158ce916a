"""Peak memory of each process of `partsong fit` over two ranks on a large sparse file.

Data + 4 (n + m) k numbers, as for one process, is one copy of everything; ranks share it, except for H.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.memory.fit import _sparse

SHAPE, PER_ROW, RANK = (300_000, 50_000), 33, 50
QUICK_SHAPE = (3_000, 500)
RANKS, ITERATIONS = 2, 5
METHODS = ("hals", "exact", "dsanls")
ALLOWED = 4 * 1024**3
"""Bytes allowed for all ranks together."""

AT_A_RANK = """
import atexit, os, sys
from pathlib import Path
from mpi4py import MPI
place = Path(sys.argv.pop(1)) / f"peak-{MPI.COMM_WORLD.Get_rank()}"
def write_peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    place.write_text(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))
atexit.register(write_peak)
from partsong.cli.main import main
main()
"""
"""The command line at one rank, which writes its peak memory in kB at exit."""


def measure(quick: bool, say: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Peaks of the ranks in bytes, seconds and error, by method."""
    mpiexec = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
    if mpiexec is None:
        raise SystemExit('Ranks need mpiexec: pip install "partsong[mpi]".')
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        entries = _write(Path(folder) / "X.npz", QUICK_SHAPE if quick else SHAPE)
        for method in METHODS:
            found[method] = {**_over_ranks(mpiexec, Path(folder), method), "entries": entries}
            peaks = " + ".join(f"{found[method][f'peak {rank}'] / 1e9:.2f}" for rank in range(RANKS))
            say(f"{method}: {peaks} GB, allowed {ALLOWED / 1e9:.2f} GB in all")
    return found


def _write(file: Path, shape: tuple[int, int]) -> int:
    """Write float32 data in which a third of the rows has one entry more; return the number of entries."""
    from scipy import sparse

    rows, columns = shape
    third = rows // 3
    X = sparse.vstack([_sparse(third, columns, PER_ROW + 1), _sparse(rows - third, columns, PER_ROW)], format="csr")
    sparse.save_npz(file, X, compressed=False)
    return int(X.nnz)


def _over_ranks(mpiexec: str, folder: Path, method: str) -> dict[str, float]:
    script = folder / "at_a_rank.py"
    script.write_text(AT_A_RANK, encoding="utf-8")
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=False).stdout
    more = ["--oversubscribe"] if "Open MPI" in version or "PRRTE" in version else []
    words = ["fit", "X.npz", "-k", RANK, "--method", method, "--engine", "mpi", "--max-iter", ITERATIONS, "--tol", 0]
    words += ["--seed", 0, "-o", "model.safetensors", "--weights", "W.npy", "--json"]
    done = subprocess.run(
        [mpiexec, "-n", str(RANKS), *more, sys.executable, str(script), str(folder), *map(str, words)],
        cwd=folder,
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"The ranks failed: {done.stderr.strip().splitlines()[-1:]}")
    said = json.loads(done.stdout)
    peaks = {f"peak {rank}": 1024 * int((folder / f"peak-{rank}").read_text()) for rank in range(RANKS)}
    return {**peaks, "total": sum(peaks.values()), "seconds": said["seconds"], "error": said["relative_error"]}


def _environment() -> dict[str, str]:
    source = str(Path(__file__).resolve().parents[2] / "src")
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {
        **os.environ,
        **allowed,
        "PYTHONPATH": os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH")))),
    }


def written(found: dict[str, dict[str, float]], shape: Sequence[int]) -> str:
    """Format a Markdown table."""
    entries = next(iter(found.values()))["entries"]
    heads = ["method", *(f"rank {rank}" for rank in range(RANKS)), "in all", "allowed", "seconds of the fit"]
    lines = [f"{shape[0]} × {shape[1]} with {entries:.0f} entries (float32), k = {RANK}, {ITERATIONS} iterations.", ""]
    lines += [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for method, one in found.items():
        sizes = [one[f"peak {rank}"] for rank in range(RANKS)] + [one["total"], ALLOWED]
        lines.append(f"| {method} | {' | '.join(f'{size / 1e9:.2f} GB' for size in sizes)} | {one['seconds']:.0f} |")
    return "\n".join(lines) + "\n"
