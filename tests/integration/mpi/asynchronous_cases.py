"""What one rank does in tests with real processes; run under mpiexec as a script: asynchronous_cases.py CASE FOLDER.

Rank 0 is the server; the worker at rank r holds party r − 1, or all parties where it is the only one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "laws"))

from pairwise_masks import PairwiseMasks

from partsong.aggregation.plaintext import PlainReduction
from partsong.aggregation.server_update import Relaxation
from partsong.core.interfaces import Schedule, Shard
from partsong.core.streams import key
from partsong.data.conversion import as_matrix
from partsong.engines.local import Sequential
from partsong.errors import DataError, PartsongError
from partsong.methods import build
from partsong.methods.averaging import LocalAveraging

NAMES = ("p00", "p01", "p02")
ARRIVALS = 12


PROGRAM = LocalAveraging(4, steps=3, server_update=Relaxation(3.0))


def shards_of(names=NAMES, width=16):
    rng = np.random.default_rng(0)
    H = rng.gamma(0.3, size=(4, width))
    rows = {name: rng.gamma(0.5, size=(12 + 3 * i, 4)) @ H + 0.02 * rng.random(width) for i, name in enumerate(NAMES)}
    return [Shard(name, as_matrix(rows[name]), key(7, name)) for name in names]


@dataclass(frozen=True)
class Failing:
    """At `where`, a party or the server, an error or the end of the process: at the third piece or arrival.

    With `slow`, p00 is slow from its third piece on, and nothing fails before that.
    """

    inner: object
    where: str
    how: str
    folder: str = "."
    slow: float = 0.0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def local(self, shard, party, model):
        if self.slow and shard.name == "p00" and party.count >= 6:
            Path(self.folder, "asleep").touch()
            time.sleep(self.slow)
        if shard.name == self.where and self.is_time(party.count >= 6):
            self.fail()
        time.sleep(0.01 if self.slow else 0.0)
        return self.inner.local(shard, party, model)

    def finish(self, server, aggregate):
        if self.where == "server" and self.is_time(server.round == 2):
            self.fail()
        return self.inner.finish(server, aggregate)

    def is_time(self, otherwise):
        return Path(self.folder, "asleep").exists() if self.slow else otherwise

    def fail(self):
        Path(self.folder, "failed-at").write_text(str(time.time()))
        if self.how == "exit":
            os._exit(3)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise {"ours": DataError, "bug": ZeroDivisionError}[self.how]("row 3 is no good")


@dataclass(frozen=True)
class Refusing:
    """Party p01 has no good piece but its first."""

    inner: object

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def local(self, shard, party, model):
        if shard.name == "p01" and party.count:
            raise DataError("row 3 is no good")
        return self.inner.local(shard, party, model)


@dataclass(frozen=True)
class Slow:
    """Pieces of work last so many seconds, by party."""

    inner: object
    seconds: tuple[tuple[str, float], ...]

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def local(self, shard, party, model):
        time.sleep(dict(self.seconds).get(shard.name, 0.0))
        return self.inner.local(shard, party, model)


@dataclass(frozen=True)
class SlowServer:
    """Workers wait for their answers."""

    inner: object

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def finish(self, server, aggregate):
        time.sleep(0.2)
        return self.inner.finish(server, aggregate)


class Unwilling(PlainReduction):
    """Takes nobody in."""

    def setup_party(self, name, secret, layout):
        raise DataError("row 3 is no good")


def run(engine, program, own, arrivals=ARRIVALS, reduction=PlainReduction(), resume=None, seed=3, **more):
    return engine.run(program, own, Schedule(arrivals, seed, **more), reduction=reduction, resume=resume)


def relative_error(H, shards=None):
    """How well all rows are fitted by H."""
    from scipy.optimize import nnls

    rows = np.vstack([shard.matrix.times(np.eye(H.shape[1])) for shard in shards or shards_of()])
    residual = [nnls(H.T, row)[1] for row in rows]
    return float(np.linalg.norm(residual) / np.linalg.norm(rows))


def told(rounds):
    """Of rounds all but seconds, as JSON can hold it."""
    return [
        {
            "index": done.index,
            "H": listed(done.model["H"]),
            "participants": list(done.participants),
            "bytes": [dict(done.bytes_up), done.bytes_down],
            "refused": dict(done.refused),
            "states": {name: listed(state.W) for name, state in done.checkpoint.parties.items() if state.count},
            "server": told_server(done.checkpoint.server),
            "traffic": [[name, phase, message.nbytes] for name, phase, message in done.traffic],
        }
        for done in rounds
    ]


def told_server(server):
    return None if server is None else [server.round, server.sweep, server.memory, listed(server.model["H"])]


def listed(array):
    return np.asarray(array).tolist()


def own_shards(rank, size, **more):
    if rank == 0:
        return []
    return shards_of(**more) if size == 2 else shards_of(NAMES[rank - 1 : rank], **more)


def attempted(attempt):
    try:
        return [done.index for done in attempt()]
    except (PartsongError, ZeroDivisionError) as error:
        return [type(error).__name__, str(error), getattr(error, "__notes__", [])]


def agreeing(make, rank, size):
    """Whole runs, resumed and abandoned ones; then what ranks must refuse; all in one job."""
    own = own_shards(rank, size)
    rounds = list(run(make(record=True), PROGRAM, own))
    results = {"whole": told(rounds), "seconds": [done.seconds for done in rounds]}
    results["error"] = relative_error(np.asarray(rounds[-1].model["H"]))
    first = list(run(make(record=True), PROGRAM, own, 5))
    results["resumed"] = told(run(make(record=True), PROGRAM, own, resume=first[-1].checkpoint))
    results["over"] = told(run(make(record=True), PROGRAM, own, 5, resume=first[-1].checkpoint))
    results["one party"] = told(run(make(), PROGRAM, own[:1])) if size == 2 else []
    results["refused"] = told(run(make(), Refusing(PROGRAM), own, on_party_error="skip"))
    for leaver in (0, size - 1):
        left = []
        for done in run(make(), PROGRAM, own, 500):
            left.append(done)
            if rank == leaver and len(left) == 2:
                break
        results[f"left at {leaver}"] = told(left)
    results.update(refusals(make, rank, size, own))
    return results


def refusals(make, rank, size, own):
    wide = own_shards(rank, size, width=15 if rank == size - 1 else 16)
    twin = shards_of(NAMES[:1]) if rank else []
    other = replace(PROGRAM, steps=2 if rank else 3)
    attempts = {
        "seed": lambda: run(make(), PROGRAM, own, seed=3 + (rank == 1)),
        "program": lambda: run(make(), other, own),
        "columns": lambda: run(make(), PROGRAM, wide),
        "no shard": lambda: run(make(), PROGRAM, [] if rank == 1 else own),
        "shard at rank 0": lambda: run(make(), PROGRAM, own or shards_of(NAMES[:1])),
        "twin": lambda: run(make(), PROGRAM, twin),
        "masked": lambda: run(make(), PROGRAM, own, reduction=PairwiseMasks()),
        "enrol": lambda: run(make(), PROGRAM, own, reduction=Unwilling()),
        "absent": lambda: run(make(), PROGRAM, own, absent={1: frozenset({"p00"})}),
        "sweeps": lambda: run(make(), build("fnmf-by-sums", 4, local_steps=3), own),
        "ours": lambda: run(make(), Failing(PROGRAM, "p00", "ours"), own, 500),
        "bug": lambda: run(make(), Failing(PROGRAM, "p00", "bug"), own, 500),
        "ours at the server": lambda: run(make(), Failing(PROGRAM, "server", "ours"), own),
        "bug at the server": lambda: run(make(), Failing(PROGRAM, "server", "bug"), own),
    }
    return {what: attempted(attempt) for what, attempt in attempts.items()}


class Tired(Exception):
    """What a caller raises in its own loop."""


def plain(start, has_enough):
    for done in start():
        if has_enough(done):
            break


def closed(start, has_enough):
    with start() as rounds:
        for done in rounds:
            if has_enough(done):
                break


def passed_on(start, has_enough):
    def again():
        for done in start():  # noqa: UP028
            yield done

    plain(again, has_enough)


def leaving(make, rank, size):
    """Callers that leave their loops at one rank after another, in every way, and whole runs in between; in one job."""
    own, results = own_shards(rank, size), {}
    for leaver in range(size):
        for loop in (plain, closed, passed_on):
            for how in ("break", "raise"):
                told = left(lambda: run(make(), PROGRAM, own, 5000), loop, rank == leaver, how)
                results[f"{loop.__name__} {how} {leaver}"] = told
                check_a_whole_run(make, own)
    results["interrupted"] = interrupted(make, rank, own)
    check_a_whole_run(make, own)
    return results


def left(start, loop, is_leaver, how):
    """How a run has ended here, where the leaver has had enough after its second round; and the seconds it took."""
    count, marks, began = 0, [], time.monotonic()

    def has_enough(done):
        nonlocal count
        count += 1
        marks[:] = [type(done).__name__, getattr(done, "left_at", None)]
        if is_leaver and count == 2 and how == "raise":
            raise Tired("of it all")
        return is_leaver and count == 2

    try:
        loop(start, has_enough)
    except (PartsongError, Tired) as error:
        marks = [type(error).__name__, str(error)]
    return [*marks, time.monotonic() - began]


def tired(make, rank, own, folder):
    """The caller at rank 0 raises while p00 is busy for a minute."""
    with run(make(), Failing(PROGRAM, "nowhere", "ours", folder, 60.0), own, 5000) as rounds:
        for _ in rounds:
            if rank == 0 and Path(folder, "asleep").exists():
                Path(folder, "failed-at").write_text(str(time.time()))
                raise Tired("of it all")


def check_a_whole_run(make, own):
    last = list(run(make(), PROGRAM, own, ARRIVALS))[-1]
    assert last.index == ARRIVALS - 1
    assert getattr(last, "left_at", None) is None


def interrupted(make, rank, own):
    """Ctrl-C at rank 1, while it waits for a server that takes its time."""

    def press(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, press)
    try:
        for count, _ in enumerate(run(make(), SlowServer(PROGRAM), own, 5000)):
            if rank == 1 and count == 1:
                signal.setitimer(signal.ITIMER_REAL, 0.5)
    except (PartsongError, KeyboardInterrupt) as error:
        return [type(error).__name__, str(error)]
    finally:
        signal.signal(signal.SIGALRM, before)


def main(make, rank, size, case, folder):
    """One rank of a case; writes what came of it."""
    os.chdir(folder)
    own = own_shards(rank, size)
    if own:
        list(run(Sequential(), PROGRAM, own, 2))  # loads kernels, so that nobody begins late
    if case in ("agree", "leave"):
        results = {"agree": agreeing, "leave": leaving}[case](make, rank, size)
    elif case == "speeds":
        results = told(run(make(), Slow(PROGRAM, (("p00", 0.02), ("p01", 0.12))), own, 60))
    elif case == "straggler":
        began = time.monotonic()
        results = told(run(make(), Slow(PROGRAM, (("p01", 2.0),)), own, 40))
        results = {"rounds": results, "seconds": time.monotonic() - began}
    elif case == "tired caller":
        results = tired(make, rank, own, folder)
    else:
        where, how, slow = case.split("-")
        results = told(run(make(), Failing(PROGRAM, where, how, folder, float(slow)), own, 1000))
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    from partsong.engines import mpi
    from partsong.engines.mpi_async import AsynchronousMpi

    world = mpi.Mpi().communicator()
    mpi.MAX_CALL = 300
    main(AsynchronousMpi, world.rank, world.size, *sys.argv[1:])
    left_open = run(AsynchronousMpi(), PROGRAM, own_shards(world.rank, world.size), 50)
    next(left_open)
