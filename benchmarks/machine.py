"""Describe the machine: processor, threads, versions; no paths and no host names."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "PARTSONG_NUM_THREADS",
)
PACKAGES = (
    "partsong",
    "numpy",
    "scipy",
    "scikit-learn",
    "numba",
    "threadpoolctl",
    "torch",
    "nmf-torch",
    "torchnmf",
    "tensorly",
    "nimfa",
    "gensim",
)


def cores() -> int:
    """Number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start_again_with(threads: int) -> None:
    """Restart this command with the thread variables set, since libraries read them when they are loaded."""
    wanted = {name: str(threads) for name in THREAD_VARIABLES}
    if all(os.environ.get(name) == value for name, value in wanted.items()):
        return
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]], {**os.environ, **wanted})


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def memory_gigabytes() -> float:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    except (ValueError, OSError):
        return float("nan")


def versions() -> dict[str, str]:
    """Versions of the installed libraries."""
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def blas() -> str:
    """The BLAS behind NumPy and how many threads it uses."""
    import numpy  # noqa: F401
    from threadpoolctl import threadpool_info

    loaded = [entry for entry in threadpool_info() if entry["user_api"] == "blas"]
    named = {f"{e['internal_api']} {e['version'] or ''} ({e.get('architecture', '?')})" for e in loaded}
    return ", ".join(sorted(named)) or "unknown"


def command(arguments: list[str]) -> str:
    """The command line, without the folders of file names."""
    data = ["PARTSONG_DATA=…"] if os.environ.get("PARTSONG_DATA") else []
    return " ".join([*data, "python -m benchmarks", *map(_without_folder, arguments)])


def _without_folder(word: str) -> str:
    option, is_given, value = word.rpartition("=")
    return option + is_given + (os.path.basename(value) if os.path.isabs(value) else value)
