"""Run every method once per seed, in rotated order, so that a slow minute of the machine affects all alike.

The first round runs every method to the time limit (or until it stagnates) and thus finds the best explained variance.
Later rounds end a run once it passes its level. A method that missed 99.9 % in the first round is run to 99 %, and one
that missed that too is not run again, unless a target depends on it. A run that cannot reach its next level within the
limit, at twice its recent pace, ends. `thorough` runs everything to the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.speed.clock import Recorder
from benchmarks.speed.contestants import Contestant, run
from benchmarks.speed.curves import LEVELS, Run
from benchmarks.speed.evaluation import Problem

BEYOND = 0.7
"""A later run ends when its distance from the best is this share of the required one."""
WARM_ROWS = 256
WARM_SECONDS = 0.02


@dataclass(slots=True)
class Rounds:
    """Measure one workload; `known` are earlier runs of it."""

    workload: str
    problem: Problem
    limit: float
    threads: int
    thorough: bool = False
    known: Sequence[Run] = ()
    say: Callable[[str], None] = print
    runs: list[Run] = field(default_factory=list)

    def warm_up(self, contestants: Sequence[Contestant]) -> None:
        """Compile, load and allocate on the first few rows; measured by `benchmarks.speed.compiling`, not here."""
        head = self.problem.head(WARM_ROWS)
        for contestant in contestants:
            run(contestant, head, 0, self.threads, Recorder(head, WARM_SECONDS))

    def measure(self, contestants: Sequence[Contestant], seeds: int) -> list[Run]:
        able = [contestant for contestant in contestants if contestant.takes(self.problem)]
        self.warm_up(able)
        for turn in range(seeds):
            shift = turn % max(1, len(able))
            for contestant in [*able[shift:], *able[:shift]]:
                goal, hint = self._goal(contestant, turn)
                if goal is not None:
                    self._one(contestant, turn, goal, hint)
        return self.runs

    def _goal(self, contestant: Contestant, turn: int) -> tuple[float | None, float]:
        """The explained variance to reach in this run (None: skip it), and roughly how long that takes."""
        if turn == 0 or self.thorough:
            return math.inf, math.inf
        best = self._best()
        first = next((run for run in self.runs if run.contestant == contestant.name), None)
        if first is None or first.stopped == "failed":
            return None, math.inf
        for level in sorted(LEVELS, reverse=True):
            goal = best * (1 - BEYOND * (1 - level))
            if contestant.always_asked or math.isfinite(first.time_to(level * best)):
                return goal, 2 * first.time_to(goal) + 0.2
        return None, math.inf

    def _best(self) -> float:
        return max((run.best for run in (*self.known, *self.runs)), default=math.inf)

    def _one(self, contestant: Contestant, seed: int, goal: float, hint: float) -> None:
        best = math.inf if self.thorough else self._best()
        targets = tuple(level * best for level in LEVELS) if math.isfinite(best) else ()
        recorder = Recorder(self.problem, self.limit, goal, hint, targets)
        run(contestant, self.problem, seed, self.threads, recorder)
        done = Run(
            self.workload,
            contestant.name,
            seed,
            tuple(recorder.points),
            recorder.stopped,
            recorder.after,
            recorder.note,
        )
        self.runs.append(done)
        note = f" ({done.note})" if done.note else ""
        self.say(
            f"{self.workload:15s} {contestant.name:22s} seed {seed}: {done.best:9.6f} after {done.seconds:6.2f} s, "
            f"{done.stopped}{note}"
        )
