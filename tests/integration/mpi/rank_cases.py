"""What one rank does in the tests with real processes; run under mpiexec as a script: rank_cases.py CASE FOLDER."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "laws"))

from pairwise_masks import PairwiseMasks

from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Schedule, Shard
from partsong.core.streams import key
from partsong.data.blocks import two_sided_blocks
from partsong.data.conversion import as_matrix
from partsong.engines.collective import run_on_all
from partsong.engines.local import Sequential
from partsong.errors import DataError, FileError, PartsongError
from partsong.methods import build
from partsong.methods.dsanls import SketchExchange
from partsong.methods.secure_sketched import SketchedAveraging, SketchedSums
from partsong.secure_aggregation.protocol import SecureSum
from partsong.sketch.crossing import Proportion
from partsong.sketch.kinds import CountSketch, Gaussian

ROUNDS = 4
PROGRAMS = {
    "exact": build("exact", 4, accelerate=True, local_steps=5),
    "fedavg": build("fedavg", 4, local_steps=3),
    "fnmf": build("fnmf-local", 4, local_steps=3, align="assignment"),
    "syn-sd": build("syn-sd", 4, local_steps=3),
}
SKETCHED = {
    "dsanls": SketchExchange(4, sketch=Proportion(ratio=0.3), iterations=6, every=3, n_rows=40),
    "dsanls by count": SketchExchange(4, sketch=Proportion(CountSketch, 0.4), iterations=6, every=3, n_rows=40),
    "syn-ssd-uv": build("syn-ssd-uv", 4, local_steps=3, sketch_ratio=0.4),
    "secure dsanls": SketchedSums(4, Gaussian(4 * 4), is_guarded=False),
}


def shards_of(n_parties, width=16, as_tensors=False):
    rng = np.random.default_rng(0)
    H = rng.gamma(0.3, size=(4, width))
    rows = [rng.gamma(0.5, size=(12 + 3 * i, 4)) @ H + 0.02 * rng.random(width) for i in range(n_parties)]
    if as_tensors:
        import torch

        rows = [torch.from_numpy(part) for part in rows]
    return [Shard(f"p{i:02d}", as_matrix(part), key(7, f"p{i:02d}")) for i, part in enumerate(rows)]


@dataclass(frozen=True)
class Failing:
    """At party p01 in the second round: an error, or the end of the process; the other parties may be slow there."""

    inner: object
    how: str
    folder: str = ""
    slow: float = 0.0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def local(self, shard, party, model):
        is_second = party.W is not None
        if is_second and shard.name != "p01":
            time.sleep(self.slow)
        if is_second and shard.name == "p01":
            Path(self.folder, "failed-at").write_text(str(time.time()))
            if self.how == "exit":
                os._exit(3)
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise {"ours": DataError, "bug": ZeroDivisionError}[self.how]("row 3 is no good")
        return self.inner.local(shard, party, model)


def run(engine, program, own, reduction=PlainReduction(), seed=3, resume=None, rounds=ROUNDS):
    return engine.run(program, own, Schedule(rounds, seed), reduction=reduction, resume=resume)


def told(rounds):
    """Of rounds what has to be the same everywhere, as JSON can hold it."""
    return [
        {
            "index": done.index,
            "H": np.asarray(done.model["H"]).tolist(),
            "kind": type(done.model["H"]).__name__,
            "metrics": dict(done.metrics),
            "participants": list(done.participants),
            "bytes": [dict(done.bytes_up), done.bytes_down],
        }
        for done in rounds
    ]


def two_sided_shards(n_parties, as_tensors=False):
    rng = np.random.default_rng(1)
    X = rng.gamma(0.5, size=(40, 4)) @ rng.gamma(0.3, size=(4, 16)) + 0.02 * rng.random((40, 16))
    if as_tensors:
        import torch

        X = torch.from_numpy(X)
    return [Shard(f"p{i:02d}", block, key(7, f"p{i:02d}")) for i, block in enumerate(two_sided_blocks(X, n_parties))]


def told_sketches(engine, program, shards):
    """Of a sketched run what has to be the same everywhere; most of its models have no H."""
    rounds = list(
        run(
            engine,
            program,
            shards,
            rounds=program.exchanges(2, 1) if isinstance(program, SketchedAveraging | SketchExchange) else 5,
        )
    )
    return [
        {
            "index": done.index,
            "arrays": {name: np.asarray(array).tolist() for name, array in done.model.arrays.items()},
            "H": np.asarray(program.components(done.checkpoint.server)).tolist(),
            "metrics": dict(done.metrics),
            "bytes": [dict(done.bytes_up), done.bytes_down],
        }
        for done in rounds
    ]


def masked(make, communicator, as_tensors):
    """Sums under masks, of two parties at each rank: the same as in one process, at every rank and to the bit."""
    rank, shards = communicator.rank, shards_of(2 * communicator.size, as_tensors=as_tensors)
    for name in ("exact", "fedavg"):
        reduction, program = SecureSum(bound=1e5), PROGRAMS[name]
        known = told(run(Sequential(), program, shards, reduction))
        assert told(run(make(), program, shards[2 * rank : 2 * rank + 2], reduction)) == known, name


def agreeing(make, communicator, as_tensors):
    """Programs, sums, reductions, resumed and abandoned runs; then what ranks must refuse; all in one job."""
    rank, size = communicator.rank, communicator.size
    own = shards_of(size, as_tensors=as_tensors)[rank : rank + 1]
    results = {name: told(run(make(), program, own)) for name, program in PROGRAMS.items()}
    results["all-reduce exact"] = told(run(make(reduce="all-reduce"), PROGRAMS["exact"], own))
    results["all-reduce fedavg"] = told(run(make(reduce="all-reduce"), PROGRAMS["fedavg"], own))
    blocks = two_sided_shards(size, as_tensors)[rank : rank + 1]
    for name, program in SKETCHED.items():
        results[name] = told_sketches(make(), program, blocks)
        results[f"all-reduce {name}"] = told_sketches(make(reduce="all-reduce"), program, blocks)
    masked(make, communicator, as_tensors)
    if not as_tensors:
        results["secure_aggregation"] = told(run(make(), PROGRAMS["exact"], own, PairwiseMasks()))
    middle = next(done.checkpoint for done in run(make(), PROGRAMS["exact"], own, rounds=2) if done.index == 1)
    results["own states"] = sorted(middle.parties)
    results["resumed"] = told(run(make(), PROGRAMS["exact"], own, resume=middle))
    indices = []
    for done in run(make(), PROGRAMS["exact"], own, rounds=50):
        indices.append(done.index)
        if rank == 1 and done.index == 1:
            break
    results["left"] = indices

    wide = shards_of(size, 15 if rank == 1 else 16)[rank : rank + 1]
    refusals = {
        "seed": lambda: run(make(), PROGRAMS["exact"], own, seed=3 + (rank == 1)),
        "program": lambda: run(make(), PROGRAMS["fnmf" if rank == 1 else "exact"], own),
        "columns": lambda: run(make(), PROGRAMS["exact"], wide),
        "no shard": lambda: run(make(), PROGRAMS["exact"], [] if rank == 1 else own),
        "twin": lambda: run(make(), PROGRAMS["exact"], shards_of(1)),
        "ours": lambda: run(make(), Failing(PROGRAMS["exact"], "ours", "."), own),
        "bug": lambda: run(make(), Failing(PROGRAMS["exact"], "bug", "."), own),
        "file": lambda: run_on_all(communicator, unreadable if rank == 1 else list),
    }
    for what, attempt in refusals.items():
        try:
            results[what] = [done.index for done in attempt()]
        except (PartsongError, ZeroDivisionError) as error:
            results[what] = [type(error).__name__, str(error), error.__notes__ if hasattr(error, "__notes__") else []]
    return results


def unreadable():
    raise FileError("b.npz cannot be read.")


def main(make, communicator, case, folder, as_tensors=False):
    """One rank of a case; writes what came of it."""
    os.chdir(folder)
    if case == "agree":
        results = agreeing(make, communicator, as_tensors)
        Path(folder, f"rank-{communicator.rank}.json").write_text(json.dumps(results))
        return
    how, _, slow = case.partition("-")
    own = shards_of(communicator.size)[communicator.rank : communicator.rank + 1]
    list(run(make(), Failing(PROGRAMS["exact"], how, folder, float(slow or 0)), own, rounds=1000))


if __name__ == "__main__":
    from partsong.engines import mpi

    communicator = mpi.Mpi().communicator()
    if communicator.size == 3:
        mpi.MAX_CALL = 1000
    main(mpi.Mpi, communicator, *sys.argv[1:])
    left_open = run(mpi.Mpi(), PROGRAMS["exact"], shards_of(communicator.size)[communicator.rank :][:1])
    next(left_open)
