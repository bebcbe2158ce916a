"""Error of a model when rare columns are set to zero: sites with 300 rows each, `fnmf`, five rounds of rank 10.

    PARTSONG_DATA=… python -m experiments.leakage.rare_columns [--document docs/results/leakage.md]

Sites have a policy, a ledger and a folder; the coordinator runs in this process. By default a site refuses the run,
because few rows use its rarest column. With rare_columns = "zero" it accepts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.shared.datasets import path_of
from experiments.shared.document import replace_tables
from partsong.data.conversion import as_matrix
from partsong.errors import PartsongError
from partsong.federation.experiment import Experiment
from partsong.federation.exposure_limit import count_rare_columns
from partsong.federation.policy import Policy
from partsong.federation.server.launch import run_experiment
from partsong.federation.site.plan import SiteData
from partsong.federation.site.service import Site
from partsong.federation.site.state import rows_per_column
from partsong.federation.transports.base import InProcess
from partsong.privacy.exposure import Exposure
from partsong.solvers.squared_error import SquaredError

SITES, ROWS, RANK, ROUNDS, SEEDS = 2, 300, 10, 5, 3
SETS = {
    "tcga_brca": ("tcga_brca.npz", "X", 1.0),
    "mnist": ("mnist.npz", "X_train", 255.0),
    "fashion_mnist": ("fashion_mnist.npz", "X_train", 255.0),
    "faces": ("faces.npz", "X_train", 1.0),
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One federation: columns set to zero, their share of ‖X‖², errors of H on all cells with and without the limit."""

    rarest: int
    n_rare: int
    share: float
    refusal: str
    error: float
    unlimited: float


def rows_of(name: str, seed: int) -> list[np.ndarray]:
    """Different rows for each site."""
    file, key, divisor = SETS[name]
    with np.load(path_of(file), allow_pickle=False) as held:
        X = np.asarray(held[key if key in held else held.files[0]], np.float64) / divisor
    chosen = np.random.default_rng(seed).permutation(len(X))[: SITES * ROWS]
    return [X[part].reshape(ROWS, -1) for part in np.array_split(chosen, SITES)]


def federation(folder: Path, parts: list[np.ndarray], policy: Policy, seed: int) -> np.ndarray:
    """Run a federation of sites with this policy, and return H."""
    columns = tuple(f"column {number}" for number in range(parts[0].shape[1]))
    sites = {
        f"site-{at}": Site(f"site-{at}", folder / f"site-{at}", SiteData(X, columns, at + 1), policy)
        for at, X in enumerate(parts)
    }
    transport = InProcess({name: site.answer for name, site in sites.items()})
    experiment = Experiment("fnmf", RANK, ROUNDS, seed=seed)
    *_, last = run_experiment(experiment, transport, folder / "server", "run")
    program: Any = experiment.program(len(parts))
    return np.asarray(program.components(last.checkpoint.server))


def error_of(H: np.ndarray, X: np.ndarray) -> float:
    """‖X − W H‖ / ‖X‖ over all cells, W the best weights."""
    W = SquaredError().solve_rows(as_matrix(X), np.ascontiguousarray(H.T))
    return float(np.linalg.norm(X - np.asarray(W) @ H) / np.linalg.norm(X))


def trial(name: str, seed: int) -> Trial:
    """The run by default, with rare columns set to zero, and without a limit."""
    parts = rows_of(name, seed)
    least = 2 * RANK * (ROUNDS - 1)
    found = [count_rare_columns(X, tuple(range(X.shape[1])), least) for X in parts]
    counts = [rows_per_column(X) for X in parts]
    pooled, usual = np.vstack(parts), Policy()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            federation(Path(scratch, "usual"), parts, usual, seed)
            refusal = "runs"
        except PartsongError as error:
            refusal = str(error).partition("(")[2].partition(")")[0]
        zero = federation(Path(scratch, "zero"), parts, replace(usual, rare_columns="zero"), seed)
        free = federation(Path(scratch, "free"), parts, replace(usual, maximum_exposure=Exposure.ROWS), seed)
    rarest = min(int(each[each > 0].min()) for each in counts)
    n_rare, share = max(each[0] for each in found), max(each[1] for each in found)
    return Trial(rarest, n_rare, share, refusal, error_of(zero, pooled), error_of(free, pooled))


def page() -> str:
    """The table, with medians over seeds."""
    lines = [
        "| set | columns | rarest | by default | set to zero | share of ‖X‖² | relative error | without the limit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in SETS:
        trials = [trial(name, seed) for seed in range(SEEDS)]
        width = rows_of(name, 0)[0].shape[1]
        middle = statistics.median
        errors, free = [each.error for each in trials], [each.unlimited for each in trials]
        lines.append(
            f"| {name} | {width} | {min(each.rarest for each in trials)} | {trials[0].refusal} | "
            f"{middle(each.n_rare for each in trials):g} | {middle(each.share for each in trials):.2%} | "
            f"{middle(errors):.4f} ({_listed(errors)}) | {middle(free):.4f} ({_listed(free)}) |"
        )
    return "\n".join(lines)


def _listed(numbers: list[float]) -> str:
    return ", ".join(f"{number:.4f}" for number in numbers)


def main() -> None:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--document", type=Path, help="the page whose table of rare columns is replaced")
    document, text = parser.parse_args().document, page()
    if document is None:
        print(text)
    else:
        replace_tables(document, {"rare-columns": text})


if __name__ == "__main__":
    main()
