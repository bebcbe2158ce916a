"""Overhead of a federation in one process: alignment and aggregation, the parallel engine, memory over rounds."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from partsong.aggregation.alignment import Assignment, Sinkhorn
from partsong.aggregation.plaintext import PlainReduction
from partsong.core import runtime
from partsong.core.interfaces import Array, Message, Plan, Schedule, Shard
from partsong.core.streams import key
from partsong.data.conversion import as_matrix
from partsong.engines.local import Parallel, Sequential
from partsong.methods import build

ALLOWED_SHARE = 0.05
ALLOWED_RATIO = 1.15
MANY = 1000


@dataclass(slots=True)
class Clock:
    """Seconds spent in what reports to it."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TimedAlignment:
    """An alignment that is timed."""

    inner: Any
    clock: Clock = field(compare=False)

    def plan(self, target: Array, source: Array) -> Plan:
        began = time.perf_counter()
        plan: Plan = self.inner.plan(target, source)
        self.clock.seconds += time.perf_counter() - began
        return plan


@dataclass(frozen=True, slots=True)
class TimedAggregation:
    """An aggregation that is timed."""

    inner: Any
    clock: Clock = field(compare=False)

    def __call__(self, uploads: Sequence[Message], model: Message) -> Message:
        began = time.perf_counter()
        aggregate: Message = self.inner(uploads, model)
        self.clock.seconds += time.perf_counter() - began
        return aggregate


def parties_of(count: int, rows: int, columns: int, rank: int) -> list[Shard]:
    """Generated parties with common components, in float32."""
    generator = np.random.default_rng(7)
    H = generator.gamma(0.4, size=(rank, columns)).astype(np.float32)
    shards = []
    for i in range(count):
        W = generator.gamma(0.4, size=(rows, rank)).astype(np.float32)
        noise = generator.random((rows, columns), np.float32) * np.float32(0.1)
        shards.append(Shard(f"party-{i:04d}", as_matrix(W @ H + noise), key(7, i)))
    return shards


def share_of_alignment(rows: int, steps: int, align: Any, quick: bool) -> dict[str, float]:
    """Seconds of a round of `fnmf-local` (k = 50, m = 784, 50 parties), and of its alignment and aggregation."""
    rank, columns, count = (5, 60, 4) if quick else (50, 784, 50)
    at_party, at_server = Clock(), Clock()
    program = build("fnmf-local", rank, client_align=align, server_align=align, local_steps=steps, align="assignment")
    program = replace(
        program,
        coupling=replace(program.coupling, align=TimedAlignment(align, at_party)),
        aggregation=TimedAggregation(program.aggregation, at_server),
    )
    seconds, aligning, aggregating = [], [], []
    for done in Sequential().run(
        program, parties_of(count, rows, columns, rank), Schedule(4, 1), reduction=PlainReduction()
    ):
        if done.index > 1:  # the first round has no pull, and kernels are compiled by the second
            seconds.append(done.seconds)
            aligning.append(at_party.seconds)
            aggregating.append(at_server.seconds)
        at_party.seconds = at_server.seconds = 0.0
    round_seconds = statistics.median(seconds)
    parts = statistics.median(aligning), statistics.median(aggregating)
    return {"round": round_seconds, "aligning": parts[0], "aggregating": parts[1], "share": sum(parts) / round_seconds}


def parallel_round(rows: int, steps: int, cores: int, quick: bool) -> dict[str, float]:
    """Time of a round of 50 parties on the parallel engine, over the time of all `local` calls divided by the cores."""
    rank, columns, count = (5, 60, 4) if quick else (20, 784, 50)
    shards = parties_of(count, rows, columns, rank)
    program = build("fnmf-local", rank, local_steps=steps, align="assignment")
    running = Parallel(cores).run(program, shards, Schedule(8, 1), reduction=PlainReduction())
    point = next(running).checkpoint
    rounds, alone = [], []
    for done in running:
        rounds.append(done.seconds)
        with runtime.limit_kernel_threads(1):
            began = time.perf_counter()
            for shard in shards:
                program.local(shard, point.parties[shard.name], point.model)
            alone.append(time.perf_counter() - began)
        point = done.checkpoint
    ratio = statistics.median(r / (a / cores) for r, a in zip(rounds, alone, strict=True))
    return {"round": statistics.median(rounds), "alone": statistics.median(alone), "ratio": ratio}


def memory_over_rounds(quick: bool) -> dict[str, float]:
    """Resident megabytes after the third and after the last round of 1000 parties × (100 × 500), k = 20, 20 rounds."""
    count, rounds = (20, 6) if quick else (MANY, 20)
    shards = parties_of(count, 100, 500, 20)
    program = build("fnmf-local", 20, local_steps=10, align="assignment")
    held, began = [], time.perf_counter()
    for _ in Parallel().run(program, shards, Schedule(rounds, 1), reduction=PlainReduction()):
        held.append(_resident())
    data = sum(shard.matrix.stored * shard.matrix.dtype.itemsize for shard in shards) / 1e6
    seconds = time.perf_counter() - began
    return {"data": data, "third": held[2], "last": held[-1], "most": max(held), "seconds": seconds}


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def measure(cores: int, quick: bool, say: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Run all three measurements."""
    steps = 3 if quick else 30
    found = {}
    for rows, many in ((200, 30), (200, 100), (1200, 100)):
        for name, align in (("assignment", Assignment()), ("Sinkhorn", Sinkhorn())):
            label = f"share: {rows} rows a party, {many} steps, {name}"
            found[label] = share_of_alignment(20 if quick else rows, steps if quick else many, align, quick)
            say(f"{label}: {100 * found[label]['share']:.1f} %")
    for rows in (200, 1200):
        label = f"parallel: {rows} rows a party"
        found[label] = parallel_round(20 if quick else rows, steps, cores, quick)
        say(f"{label}: {found[label]['ratio']:.2f}")
    found["memory"] = memory_over_rounds(quick)
    say(f"memory: {found['memory']['third']:.0f} to {found['memory']['last']:.0f} MB")
    return found


def written(found: dict[str, dict[str, float]]) -> str:
    """The first half of docs/results/federation.md."""
    shares = {label.removeprefix("share: "): one for label, one in found.items() if label.startswith("share")}
    ratios = {label.removeprefix("parallel: "): one for label, one in found.items() if label.startswith("parallel")}
    held = found["memory"]
    lines = [
        "",
        "## In one process: alignment and aggregation",
        "",
        "One round of `fnmf-local`, k = 50, m = 784, 50 parties, float32. Parties align every 25 local steps (default: "
        f"100). Target: at most {100 * ALLOWED_SHARE:g} % of the round. Timed one party at a time.",
        "",
        "| parties and alignment | round, s | alignment at parties, s | barycenter at the server, s | share |",
        "|---|---|---|---|---|",
        *(
            f"| {label} | {one['round']:.2f} | {one['aligning']:.3f} | {one['aggregating']:.3f} | "
            f"{100 * one['share']:.1f} % |"
            for label, one in shares.items()
        ),
        "",
        "## In one process: the parallel engine",
        "",
        "Time of a round of 50 parties, k = 20, m = 784, 30 local steps, divided by that of the same work without an "
        f"engine, party by party, per core. Target: at most {ALLOWED_RATIO}. Medians of seven, in turns.",
        "",
        "| parties | round, s | alone, s | ratio |",
        "|---|---|---|---|",
        *(
            f"| {label} | {one['round']:.2f} | {one['alone']:.2f} | {one['ratio']:.2f} |"
            for label, one in ratios.items()
        ),
        "",
        "## In one process: memory over rounds",
        "",
        f"1000 parties × (100 × 500), k = 20, 20 rounds of `fnmf-local` with 10 local steps: data {held['data']:.0f} "
        "MB; "
        f"resident {held['third']:.0f} MB after the third round, {held['last']:.0f} MB after the last, at most "
        f"{held['most']:.0f} MB; {held['seconds']:.0f} s.",
        "",
    ]
    return "\n".join(lines)
