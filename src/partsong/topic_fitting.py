"""From parties' rows to topics: run the program, put topics in order, and count which words occur together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong import kernels, threads
from partsong.aggregate.reduction import InTheOpen
from partsong.core import Engine, Outcome, Reduction, Round, Schedule, Shard
from partsong.engines.parallel import Parallel
from partsong.engines.sequential import Sequential
from partsong.evaluate.cooccurrence import Cooccurrence, count_pairs
from partsong.evaluate.diversity import top_columns
from partsong.fitting import Task, conclude, pursue, warn_of_divergence
from partsong.interrupts import held
from partsong.programs.cooccurrence_sums import CooccurrenceSums
from partsong.running import HistoryRow, Run, Stop
from partsong.simulation import simulation_by_name
from partsong.streams import key
from partsong.text.counts import Counted
from partsong.topic_advice import Advising, warn_of_no_topics
from partsong.topic_device import rows_on
from partsong.topic_methods import followed, is_mixture
from partsong.topic_names import TOP
from partsong.topic_vocabulary import only_round
from partsong.topic_words import matrix_of

NEGLIGIBLE = 1e-6
"""A share of a topic's strongest word below which a word does not belong to it: iterations end with such traces."""

Watch = Callable[[Round, HistoryRow], None]


@dataclass(frozen=True, slots=True)
class Course:
    """How a program is run: how often, by whom, over what sums, on which device, and when it may stop.

    `weighting` is what the rows are, for advice.
    """

    rounds: int
    seed: int
    stop: Stop = Stop()
    absent: Mapping[int, frozenset[str]] | None = None
    reduction: Reduction = InTheOpen()
    engine: Engine | None = None
    device: str | None = None
    weighting: str = ""

    def engine_for(self, n_parties: int) -> Engine:
        """Parties take turns on a device, and run side by side without one."""
        takes_turns = n_parties == 1 or self.device is not None
        return Advising(self.engine or (Sequential() if takes_turns else Parallel()), self.weighting)


@dataclass(frozen=True, slots=True)
class Topics:
    """H (k × V) with its largest topics first, and how large they are; how the run ended.

    Shares are of what topics explain, or for mixtures of the documents; they add up to one.
    """

    H: np.ndarray
    shares: np.ndarray
    relative_error: float | None
    outcome: Outcome
    history: tuple[HistoryRow, ...]
    n_rounds: int


def learn(program: Any, rows: Mapping[str, Counted], course: Course, dtype: Any, watch: Watch) -> Topics:
    """Run to the end; the first Ctrl-C keeps the model so far."""
    shards = [
        Shard(name, rows_on(course.device, own.rows, dtype), key(course.seed, "secret", name))
        for name, own in rows.items()
    ]
    workers = threads.available() if len(shards) == 1 else 1
    absent = course.absent or {}
    schedule = Schedule(course.rounds, course.seed, absent=absent, kernel_threads=workers)
    engine = course.engine_for(len(shards))
    named = (program, program, shards, course.rounds, schedule, course.stop, engine, course.reduction)
    task = followed(simulation_by_name(*named), is_sampled=bool(absent))
    with held() as interrupts:
        run = pursue(task, watch=watch, interrupts=interrupts)
        return _mixture(task, run, rows, dtype) if is_mixture(program.solver) else _factors(task, run, course)


def counted_together(H: np.ndarray, rows: Mapping[str, Any], seed: int, n: int = TOP) -> Cooccurrence | None:
    """In how many rows (n × V by party) the n strongest words of each topic occur together; None without any pair."""
    topics = top_columns(H, n)
    if not any(len(topic) > 1 for topic in topics):
        return None
    program = CooccurrenceSums.of(topics)
    if len(rows) == 1:
        return count_pairs(next(iter(rows.values())), program.asked)
    shards = [Shard(name, matrix_of(own), key(seed, "secret", name)) for name, own in rows.items()]
    return program.counts(only_round(Advising(Parallel()), program, shards, seed).checkpoint.server)


def _factors(task: Task, run: Run, course: Course) -> Topics:
    warn_of_divergence(run)
    done = conclude(task, run)
    warn_of_no_topics(task, done, course.weighting)
    least = NEGLIGIBLE * done.H.max(axis=1, keepdims=True)
    H = np.where(least < done.H, done.H, np.zeros((), done.H.dtype))
    return Topics(H, done.shares, done.relative_error, run.outcome, run.history, run.rounds)


def _mixture(task: Task, run: Run, rows: Mapping[str, Counted], dtype: Any) -> Topics:
    """Topics as probabilities of words, by the documents that they make up; without a word there is no topic."""
    warn_of_divergence(run)
    program = task.program
    topics = program.components(run.best)
    H = np.asarray(kernels.of(topics).to_numpy(topics))
    Ht = np.ascontiguousarray(H.T)
    with threads.kernels_on(task.threads):
        found = {shard.name: program.solver.solve_rows(shard.matrix, Ht) for shard in task.shards}
    weights = [without_empty(own, rows[name]) for name, own in found.items()]
    totals = np.sum([W.sum(axis=0, dtype=np.float64) for W in weights], axis=0)
    order = np.argsort(-totals, kind="stable")
    kept = H[order].astype(H.dtype if dtype is None else dtype, copy=False)
    return Topics(kept, totals[order] / totals.sum(), None, run.outcome, run.history, run.rounds)


def without_empty(W: Any, counted: Counted) -> Any:
    """W with zeros for documents without a known word."""
    return np.where(np.asarray(counted.is_empty)[:, None], np.zeros((), W.dtype), W)
