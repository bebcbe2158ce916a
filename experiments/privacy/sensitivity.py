"""How far an upload moves when one row, or all rows, of a party are replaced: what a bound of 1 would have to cover.

    python -m experiments.privacy.sensitivity --output privacy-sensitivity.jsonl

Generated blocks, the first round of a method without noise, the same start before and after. The new rows come from
another party of the same federation; unusual data would move uploads further. Also: how uploads grow over rounds when
noise is added as printed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.privacy.methods import METHODS, Setting, free_program, printed_program
from experiments.privacy.runs import Trial, matrices_of
from experiments.shared.federations import shards_of
from partsong.aggregation.alignment import Assignment
from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Layout, Schedule, Shard
from partsong.engines.local import Sequential

EXCHANGED = ("one row", "all rows")


def uploaded(method: str, matrix: Any, rank: int, steps: int) -> np.ndarray:
    """H_p (k × m) of a party with this matrix after the first round."""
    program, _ = free_program(method, rank, Setting(steps=steps), 0)
    (shard,) = shards_of([matrix], 0)
    layout = Layout.of([shard, Shard("other", shard.matrix)], 0)
    _, model = program.start_server(layout)
    _, upload = program.local(shard, program.start_party(shard, layout), model)
    return np.asarray(upload["H"], np.float64)


def moved(method: str, seed: int, rank: int = 10, steps: int = 100) -> list[dict[str, Any]]:
    """Distances of the uploads before and after, with and without the best reordering of components."""
    own, other = matrices_of(Trial("free", "blocks", method, 20, 2000, rank, seed))[:2]
    one = own.copy()
    one[0] = other[int(np.linalg.norm(other, axis=1).argmax())]
    before = uploaded(method, own, rank, steps)
    records = []
    for name, matrix in zip(EXCHANGED, (one, other), strict=True):
        after = uploaded(method, matrix, rank, steps)
        ordered = Assignment().plan(before, after).apply(after)
        records.append(
            {
                "method": method,
                "seed": seed,
                "exchanged": name,
                "l2": float(np.linalg.norm(after - before)),
                "l1": float(np.abs(after - before).sum()),
                "l2_aligned": float(np.linalg.norm(ordered - before)),
                "size": float(np.linalg.norm(before)),
            }
        )
    return records


def grown(method: str, epsilon: float, seed: int, steps: int = 100, rank: int = 10) -> dict[str, Any]:
    """‖H_p‖ before noise is added to it in each round, the median of all parties, with noise as printed."""
    shards = shards_of(matrices_of(Trial("printed", "blocks", method, 20, 2000, rank, seed)), seed)
    program, rounds = printed_program(method, rank, Setting("gaussian", epsilon, steps=steps), seed)
    sizes = [
        float(np.median([np.linalg.norm(party.Ht) for party in done.checkpoint.parties.values()]))
        for done in Sequential().run(program, shards, Schedule(rounds, seed), reduction=PlainReduction())
    ]
    return {"method": method, "seed": seed, "epsilon": epsilon, "sizes": [round(size, 2) for size in sizes]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one seed, one method")
    parser.add_argument("--output", type=Path, help="a JSON Lines file")
    chosen = parser.parse_args(arguments)
    methods = METHODS[:1] if chosen.quick else ("FNMF-LAP (paper)", *METHODS)
    found = [
        record
        for method in methods
        for seed in range(1 if chosen.quick else chosen.seeds)
        for record in moved(method, seed, steps=5 if chosen.quick else 1000 if method == "iPALM once" else 100)
    ]
    noises = (1.0,) if chosen.quick else (0.01, 1.0, 100.0)
    found += [
        grown(method, epsilon, seed, 5 if chosen.quick else 100)
        for method in METHODS[: 1 if chosen.quick else 2]
        for epsilon in noises
        for seed in range(1 if chosen.quick else chosen.seeds)
    ]
    lines = [json.dumps(record, ensure_ascii=False) for record in found]
    print("\n".join(lines))
    if chosen.output is not None:
        chosen.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
