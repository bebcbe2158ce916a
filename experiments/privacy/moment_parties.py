"""The moment at party level: MNIST, many parties of 60 rows, under masks.

    PARTSONG_DATA=folder python -m experiments.privacy.moment_parties --output privacy-moment-parties.jsonl

Every party's XᵀX is cut to the clip, which is so small that nearly all are cut. The noise is drawn once for the sum,
with the variance of the shares of all parties; each adds 1/⌈N/2⌉ of the variance that is calibrated for ε.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments.privacy.moment_tables import line_of
from experiments.privacy.moments import DELTA, Cell, error_of, some_rows
from partsong.core.streams import stream
from partsong.methods.privacy_request import min_honest_parties
from partsong.privacy.accounting import largest_mu
from partsong.privacy.randomness import InsecureSource
from partsong.privacy.second_moment import MomentOfParty, Noise, noise_edge, symmetric_matrix
from partsong.solvers.initialization import random_columns
from partsong.solvers.second_moment import factorize, shrink

ROWS, PARTIES, EPSILONS, CLIP, RANK = 60, (100, 300, 1000), (1.0, 3.0, 10.0), 1.0, 10


def main() -> None:
    """Run all cells, and write a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args()
    with asked.output.open("w", encoding="utf-8") as file:
        for parties, seed in ((parties, seed) for parties in PARTIES for seed in range(asked.seeds)):
            X = some_rows(Cell("mnist", parties * ROWS, math.inf, RANK, seed, ""))
            plain = MomentOfParty(CLIP, Noise(1.0, "zero-out", protects="party"))
            total = sum(plain.of(part) for part in np.split(X, parties))
            for epsilon, relation in (
                (epsilon, relation) for epsilon in EPSILONS for relation in ("zero-out", "replace")
            ):
                multiplier = math.sqrt(parties / min_honest_parties(parties)) / largest_mu(epsilon, DELTA)
                moment = replace(plain, noise=Noise(multiplier, relation, protects="party"))
                noisy = moment.add_noise(total, InsecureSource(seed, "parties", parties, epsilon, relation))
                matrix = symmetric_matrix(noisy, moment.unit)
                edge = noise_edge(moment.sigma, len(matrix))
                spectrum = shrink(matrix, edge)
                H = factorize(spectrum, random_columns(len(matrix), RANK, stream(seed, "start")))
                record = {"data": "mnist", "parties": parties, "epsilon": epsilon, "relation": relation, "seed": seed}
                found = {"tau": edge / (CLIP * parties), "error": error_of(X, H), "visible": spectrum.visible}
                file.write(line_of({**record, **found}) + "\n")
                file.flush()


if __name__ == "__main__":
    main()
