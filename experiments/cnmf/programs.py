"""Gene programs of cNMF with partsong's factorization in place of scikit-learn's.

    PARTSONG_DATA=folder python -m experiments.cnmf.programs

Needs `pip install cnmf`. The whole pipeline (prepare, factorize, combine, consensus) runs on the mouse brain cells of
zeisel_brain.npz, with each factorization and each seed. Consensus programs of two runs are matched by cosine
similarity; the smallest cosine counts. Pairs of scikit-learn's runs with different seeds are the noise floor. Seconds
are those of `factorize`, medians over seeds; the factorizations take turns, and kernels are compiled before.
"""

from __future__ import annotations

import argparse
import io
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
from scipy.optimize import linear_sum_assignment
from sklearn.decomposition import non_negative_factorization as of_scikit_learn

import partsong
from experiments.shared.datasets import path_of

Factorization = Callable[..., tuple[np.ndarray, np.ndarray, int]]


def recommended(X: Any, **settings: Any) -> tuple[np.ndarray, np.ndarray, int]:
    """Replace the solver and the tolerance that cNMF chooses for scikit-learn."""
    return partsong.non_negative_factorization(X, **{**settings, "solver": "hals", "tol": 1e-6})


FACTORIZATIONS: dict[str, Factorization] = {
    "scikit-learn": of_scikit_learn,
    "partsong, hals, 1e-6": recommended,
    "partsong, as called": partsong.non_negative_factorization,
}


@dataclass(frozen=True, slots=True)
class Programs:
    """Consensus spectra (k × genes), medians of normalized counts and in TPM, and the seconds of `factorize`."""

    medians: np.ndarray
    tpm: np.ndarray
    seconds: float


def run_pipeline(counts: Path, k: int, factorize: Factorization, asked: argparse.Namespace, seed: int) -> Programs:
    """Run cNMF once, from counts to k consensus programs."""
    import cnmf.cnmf as library

    with (
        TemporaryDirectory() as folder,
        mock.patch.object(library, "non_negative_factorization", factorize),
        redirect_stdout(io.StringIO()),  # cNMF prints a line per replicate
    ):
        run = library.cNMF(output_dir=folder, name="run")
        run.prepare(str(counts), components=[k], n_iter=asked.replicates, seed=seed, num_highvar_genes=1000)
        began = time.perf_counter()
        run.factorize()
        seconds = time.perf_counter() - began
        run.combine()
        run.consensus(k, density_threshold=asked.threshold, show_clustering=False)
        wanted = k, str(asked.threshold).replace(".", "_")
        medians, tpm = (
            library.load_df_from_npz(run.paths[kind] % wanted).to_numpy()
            for kind in ("consensus_spectra", "gene_spectra_tpm")
        )
    return Programs(medians, tpm, seconds)


def matched_cosines(programs: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Cosine similarities (k) of the pairs with the largest total, smallest first."""
    found, wanted = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (programs, reference))
    cosines = found @ wanted.T
    return np.sort(cosines[linear_sum_assignment(cosines, maximize=True)])


def smallest(pairs: Iterable[tuple[Programs, Programs]]) -> str:
    """Median and minimum, over pairs of runs, of the smallest cosine."""
    cosines = [matched_cosines(one.medians, other.medians)[0] for one, other in pairs]
    return f"{median(cosines):.4f} ({min(cosines):.4f})"


def write_counts(place: Path) -> None:
    """Write the UMI counts as the h5ad file that cNMF reads."""
    import anndata
    import pandas as pd

    with np.load(path_of("zeisel_brain.npz"), allow_pickle=False) as held:
        counts, genes = held["X"].astype(np.float64), held["genes"]
    cells = pd.DataFrame(index=[f"cell {i}" for i in range(len(counts))])
    anndata.AnnData(X=counts, obs=cells, var=pd.DataFrame(index=genes)).write_h5ad(place)


def compile_kernels() -> None:
    """Call partsong once per solver, so that no timed call compiles."""
    X = np.random.default_rng(0).random((30, 20))
    for solver in ("hals", "cd"):
        partsong.non_negative_factorization(X, n_components=3, init="random", solver=solver)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, nargs="+", default=[5, 6, 7, 8, 9], metavar="K")
    parser.add_argument("--replicates", type=int, default=20, help="n_iter of cNMF; at least 4")
    parser.add_argument("--seeds", type=int, nargs="+", default=[14, 15, 16, 17, 18], help="at least two")
    parser.add_argument("--threshold", type=float, default=0.5, help="density_threshold of cNMF")
    asked = parser.parse_args(arguments)
    if len(asked.seeds) < 2:
        parser.error("--seeds needs at least two seeds.")
    for message in ("Setting element `.X` of view", "Modifying `X` on a view"):  # how cNMF uses anndata
        warnings.filterwarnings("ignore", message=message)
    compile_kernels()
    rows, details = [], []
    with TemporaryDirectory() as folder:
        counts = Path(folder) / "counts.h5ad"
        write_counts(counts)
        for k in asked.programs:
            found: dict[str, list[Programs]] = {name: [] for name in FACTORIZATIONS}
            for seed in asked.seeds:
                for name, factorize in FACTORIZATIONS.items():
                    found[name].append(run_pipeline(counts, k, factorize, asked, seed))
            reference = found["scikit-learn"]
            for name, runs in found.items():
                pairs = combinations(reference, 2) if runs is reference else product(runs, reference)
                seconds = median(run.seconds for run in runs)
                rows.append(f"| {k} | {name} | {seconds:.1f} | {smallest(pairs)} |")
                run, first = (runs[1] if runs is reference else runs[0]), reference[0]
                for kind, cosines in (
                    ("medians", matched_cosines(run.medians, first.medians)),
                    ("TPM", matched_cosines(run.tpm, first.tpm)),
                ):
                    details.append(f"{k}, {name}, {kind}: {' '.join(f'{cosine:.4f}' for cosine in cosines)}")
    print(f"Smallest cosine with scikit-learn's programs: median (minimum) over pairs of {len(asked.seeds)} seeds")
    print("| K | factorization | seconds | smallest cosine |", "|---|---|---|---|", *rows, sep="\n")
    first, second = asked.seeds[:2]
    print(f"\nEvery cosine with scikit-learn, seed {first} (scikit-learn itself: seed {second})", *details, sep="\n")


if __name__ == "__main__":
    main()
