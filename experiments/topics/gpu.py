"""Steps of a descent recorded as a CUDA graph, against single calls, on a GPU: `python -m experiments.topics.gpu`.

Both run over the same documents of one of ten parties, in turns; medians in milliseconds per batch.
Needs the prepared corpora (`experiments.topics.corpora --prepare`).
"""

from __future__ import annotations

import argparse
import time
from itertools import product
from statistics import median

import numpy as np
import torch

from experiments.topics.corpora import corpus, shares
from partsong.methods.mutual_information import replay
from partsong.methods.mutual_information.batches import to_documents
from partsong.methods.mutual_information.critics import JensenShannon, MutualInformation, NoInformation
from partsong.methods.mutual_information.descent import Descent
from partsong.topics.fitting import rows_on

EPOCHS = 5
CRITICS = {"without": NoInformation(), "with a critic": MutualInformation(bound=JensenShannon(), rate=0.2)}


def milliseconds(descent: Descent, data: str, rank: int, device: str, turns: int) -> tuple[float, float]:
    """Milliseconds of a batch, step by step and recorded."""
    one = corpus(data)
    rows = next(iter(shares(one.labels, 10, 1.0, 0).values()))
    matrix, draw = rows_on(device, one.counts[rows]), np.random.default_rng(0)
    n, V = matrix.shape
    W = matrix.native(draw.random((n, rank)) * (3.0 / rank) ** 0.5)
    Ht = matrix.native(draw.random((V, rank)) * (2.0 / V))
    theta = descent.information.start(V, rank, draw, "float32")
    start = W, Ht, {name: matrix.native(array) for name, array in theta.items()}
    documents, batches = to_documents(matrix), EPOCHS * -(-n // descent.batch)

    def taken(is_recorded: bool) -> float:
        replay.WORTH = 1 if is_recorded else batches + 1
        began = time.perf_counter()
        descent.run(documents, *start, np.random.default_rng(0))
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began) / batches

    both = [(taken(False), taken(True)) for _ in range(turns + 1)][1:]
    plain, recorded = (median(column) for column in zip(*both, strict=True))
    return plain, recorded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--turns", type=int, default=5)
    asked = parser.parse_args()
    print("| corpus | k | B | critic | one by one, ms | recorded, ms | ratio |\n|---|---|---|---|---|---|---|")
    for (data, rank), batch, critic in product((("so", 50), ("rt", 200)), (16, 64, 128), CRITICS):
        descent = Descent(EPOCHS, batch, 0.01, "document", CRITICS[critic])
        plain, recorded = milliseconds(descent, data, rank, asked.device, asked.turns)
        print(f"| {data} | {rank} | {batch} | {critic} | {plain:.2f} | {recorded:.2f} | {plain / recorded:.1f} |")


if __name__ == "__main__":
    main()
