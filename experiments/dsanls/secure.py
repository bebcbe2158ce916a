"""Fig. 6 and 7 of the DSANLS paper: the secure methods at 10 parties, in equal shares and with half of the rows at one.

    python -m experiments.dsanls.secure --output dsanls-secure.jsonl

Parties hold rows here (the paper splits columns: its M is our Xᵀ). All runs share a virtual clock that uses
measured times: a synchronous exchange lasts as long as its slowest party; a task of an asynchronous party lasts as
long as the median of its first ones. LATENCY is added to every exchange. Errors use the parties' W and the server's
H, off the clock. Every method uses the proximal weight with the least error on another seed after a quarter of the
time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from experiments.dsanls.datasets import QUICK, SETS
from partsong import kernels
from partsong.aggregation.plaintext import PlainReduction
from partsong.core import runtime
from partsong.core.interfaces import Message, Round, Schedule, Shard
from partsong.core.streams import key, stream
from partsong.data.conversion import as_matrix
from partsong.engines.local import Sequential
from partsong.engines.virtual_clock import Asynchronous, Durations
from partsong.methods import build
from partsong.solvers.update_rules import ProximalDescent

FOREVER = 10**9
LATENCY = 1e-3
STEPS = 10
WEIGHTS = (1e-3, 1e-2, 1e-1, 1.0)
TUNING_SEED = 1000
LATER = 1.1
PIECES = 3
"""Number of tasks by which an asynchronous party is timed."""

Make = Callable[[int, Any], Any]
SYNCHRONOUS: Mapping[str, Make] = {
    "Syn-SD": lambda rank, rule: build("syn-sd", rank, local_steps=STEPS, rule=rule),
    "Syn-SSD-U": lambda rank, rule: build("syn-ssd-u", rank, local_steps=STEPS, rule=rule),
    "Syn-SSD-V": lambda rank, rule: build("syn-ssd-v", rank, local_steps=STEPS, rule=rule),
    "Syn-SSD-UV": lambda rank, rule: build("syn-ssd-uv", rank, local_steps=STEPS, rule=rule),
}
ASYNCHRONOUS: Mapping[str, Make] = {
    "Asyn-SD": lambda rank, rule: build("asyn-sd", rank, local_steps=STEPS, rule=rule),
    "Asyn-SSD-V": lambda rank, rule: build("asyn-ssd-v", rank, local_steps=STEPS, rule=rule),
}
METHODS = {**SYNCHRONOUS, **ASYNCHRONOUS}


@dataclass(frozen=True)
class Timed:
    """A program whose `local` is timed per party; everything else is delegated."""

    program: Any
    taken: dict[str, list[float]] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.program, name)

    def local(self, shard: Shard, party: Any, model: Message) -> Any:
        """Delegate to the program, and time it."""
        began = time.perf_counter()
        done = self.program.local(shard, party, model)
        self.taken.setdefault(shard.name, []).append(time.perf_counter() - began)
        return done


def shares(n_rows: int, parties: int, split: str, seed: int) -> list[np.ndarray]:
    """Split rows at random into equal shares, or half at the first party and the rest equally."""
    rows = stream(seed, "rows").permutation(n_rows)
    if split == "equal":
        return [np.sort(part) for part in np.array_split(rows, parties)]
    first, others = rows[: n_rows // 2], rows[n_rows // 2 :]
    return [np.sort(first), *(np.sort(part) for part in np.array_split(others, parties - 1))]


def shards_of(X: Any, parties: int, split: str, seed: int) -> list[Shard]:
    """Build the shards of the parties, each with its own secret."""
    found = shares(X.shape[0], parties, split, seed)
    names = [f"p{i:02d}" for i in range(len(found))]
    return [Shard(n, as_matrix(X[rows]), key(seed, "secret", n)) for n, rows in zip(names, found, strict=True)]


def error_of(program: Any, shards: Sequence[Shard], done: Round) -> float:
    """‖X − W H‖ / ‖X‖ with the parties' own W; parties that have none yet count with W = 0."""
    H = program.components(done.checkpoint.server)
    Ht = kernels.of(H).rows_of(H)
    on, gram, square = kernels.of(Ht), kernels.of(Ht).gram(Ht), 0.0
    for shard in shards:
        state = done.checkpoint.parties.get(shard.name)
        W = getattr(state, "W", None)
        square += shard.matrix.squared_norm
        if W is None:
            continue
        (crossed,) = shard.matrix.walk(Ht, lambda rows, cross, W=W: (on.inner(W[rows], cross),))
        square += float(on.inner(on.gram(W), gram) - 2 * crossed)
    return float(max(0.0, square) / sum(shard.matrix.squared_norm for shard in shards)) ** 0.5


def program_of(method: str, rank: int, rule: Any) -> Timed:
    """Build the method's program with a record of the seconds of its tasks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return Timed(METHODS[method](rank, rule))


def is_whole(program: Timed, done: Round) -> bool:
    """Whether H is that of a finished outer round."""
    return program.program.turn(done.model).ends_round


def iterations_in(program: Timed, pieces: int) -> int:
    """Iterations in that many tasks: STEPS in each, or in the STEPS + 1 exchanges of a round of Syn-SSD."""
    return pieces * STEPS // program.program.exchanges(1, 1)


def rounds_of(method: str, program: Timed, shards: Sequence[Shard], seed: int) -> Iterator[tuple[Round, float]]:
    """Exchanges with the virtual seconds of each."""
    schedule, reduction = Schedule(FOREVER, seed), PlainReduction()
    if method in SYNCHRONOUS:
        for done in Sequential().run(program, shards, schedule, reduction=reduction):
            yield done, LATENCY + max(times[-1] for times in program.taken.values())
        return
    trial = Timed(program.program)
    for done in Sequential().run(trial, shards, Schedule(PIECES, seed), reduction=reduction):
        del done
    seconds = {name: statistics.median(times) for name, times in trial.taken.items()}
    engine = Asynchronous(Durations(seconds, latency=LATENCY))
    for done in engine.run(program, shards, schedule, reduction=reduction):
        yield done, done.seconds


def curve(method: str, rule: Any, shards: Sequence[Shard], rank: int, seconds: float, seed: int) -> list[list[float]]:
    """Record (iterations of the fastest party, virtual seconds, error) at growing intervals."""
    program = program_of(method, rank, rule)
    points: list[list[float]] = []
    clock, due = 0.0, 0.0
    for done, taken in rounds_of(method, program, shards, seed):
        clock += taken
        if is_whole(program, done) and (clock >= due or clock >= seconds):
            iterations = iterations_in(program, max(len(times) for times in program.taken.values()))
            with runtime.limit_kernel_threads(runtime.available_threads()):
                points.append([iterations, clock, error_of(program, shards, done)])
            due = clock * LATER
            if clock >= seconds:
                return points
    raise AssertionError("the schedule has no end")


def best_weight(method: str, X: Any, rank: int, parties: int, split: str, seconds: float) -> float:
    """Choose the proximal weight with the least error on another seed after a quarter of the time."""
    shards = shards_of(X, parties, split, TUNING_SEED)
    found = {
        weight: curve(method, ProximalDescent(1, weight, weight), shards, rank, seconds / 4, TUNING_SEED)[-1][2]
        for weight in WEIGHTS
    }
    return min(found, key=lambda weight: found[weight])


def main(arguments: Sequence[str] | None = None) -> None:
    """Tune, measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default="face,mnist,gisette-twin", help="comma-separated names")
    parser.add_argument("--splits", default="equal,half")
    parser.add_argument("--parties", default="10", help="comma-separated numbers of parties")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rank", type=int, default=20, help="k (the paper has 100)")
    parser.add_argument("--rows", type=int, default=10_000, help="use the first rows, up to this number (0: all)")
    parser.add_argument("--seconds", type=float, default=1.0, help="virtual seconds per run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="small generated sets, few parties")
    parser.add_argument("--output", type=Path, help="a JSON Lines file; runs that it holds are not repeated")
    chosen = parser.parse_args(arguments)
    sets = QUICK if chosen.quick else SETS
    names = list(sets) if chosen.quick else chosen.sets.split(",")
    if chosen.quick:
        chosen.parties, chosen.rank, chosen.seconds, chosen.seeds = "3", 4, 0.05, 1
    seeds = range(chosen.first_seed, chosen.first_seed + chosen.seeds)
    there: dict[tuple[Any, ...], dict[str, Any]] = {}
    if chosen.output is not None and chosen.output.exists():
        for line in chosen.output.read_text("utf-8").splitlines():
            found = json.loads(line)
            there[tuple(found[part] for part in ("data", "split", "parties", "method", "seed"))] = found
    for name in names:
        X = sets[name].load()
        X = X[: chosen.rows] if chosen.rows else X
        for split in chosen.splits.split(","):
            for parties in (int(number) for number in chosen.parties.split(",")):
                for method in chosen.methods.split(","):
                    wanted = [s for s in seeds if (name, split, parties, method, s) not in there]
                    if not wanted:
                        continue
                    weight = best_weight(method, X, chosen.rank, parties, split, chosen.seconds)
                    for seed in wanted:
                        shards, rule = shards_of(X, parties, split, seed), ProximalDescent(1, weight, weight)
                        points = curve(method, rule, shards, chosen.rank, chosen.seconds, seed)
                        record = {
                            "data": name, "split": split, "parties": parties, "method": method, "seed": seed,
                            "rank": chosen.rank, "weight": weight, "points": points,
                        }  # fmt: skip
                        iterations, clock, error = points[-1]
                        summary = f"{error:.4f} after {iterations} iterations, {clock:.2f} virtual seconds"
                        print(
                            f"{name:14s} {split:6s} {parties:3d} {method:11s} weight {weight:g} seed {seed}: {summary}"
                        )
                        if chosen.output is not None:
                            with chosen.output.open("a", encoding="utf-8") as lines:
                                lines.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
