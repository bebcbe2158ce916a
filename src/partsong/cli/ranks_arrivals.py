"""An asynchronous fit over ranks: rank 0 follows the arrivals, the others work, and all agree on how it has ended."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from partsong.cli.ranks_company import heard
from partsong.cli.ranks_reports import ERROR
from partsong.core import Checkpoint, Layout, Outcome, Round
from partsong.engines.agreement import share, together
from partsong.engines.communicator import Communicator
from partsong.errors import DivergenceError
from partsong.fitting import ClosingTime, Task, Watch
from partsong.interrupts import Interrupts
from partsong.running import PERFECT, WINDOW, Course, Follower, Progress, Run, Stop


@dataclass(frozen=True, slots=True)
class Settled(Stop):
    """Converged once the reported squared error changes by less than `tol` of itself per turn, over a few turns.

    Whichever way: a report is of the model as its party has just moved it, which at first is far from that of the
    others. Such errors begin too low and rise to the common one, so that the least of them says nothing.
    """

    def outcome(self, progress: Progress, seconds: float) -> Outcome | None:
        """Why to stop now, or None to go on."""
        if progress.is_lost():
            return Outcome.DIVERGED
        if self.tol == 0 or progress.count <= WINDOW:
            return None
        least, most = min(progress.values), max(progress.values)
        return Outcome.CONVERGED if most - least <= WINDOW * self.tol * least or most < PERFECT else None


@dataclass(slots=True)
class Attention:
    """What rank 0 goes by while uploads come in.

    A turn is over when every worker has been heard since the last one: then the reports are of one time, and `tol` is
    about the error from turn to turn. Signals and the clock are looked at after each arrival: once there is no time for
    another piece of work of the slowest and the end of the fit (`closing` seconds), no more are waited for.
    """

    pressed: Interrupts
    workers: int
    began: float
    budget: float | None = None
    closing: float = 0.0
    heard: set[str] = field(default_factory=set)
    latest: dict[str, float] = field(default_factory=dict)
    lasted: dict[str, float] = field(default_factory=dict)
    ends_turn: bool = False
    is_late: bool = False

    def arrivals(self, rounds: Iterator[Round]) -> Generator[Round]:
        """The same, until there is a reason to end."""
        for done in rounds:
            for name in done.bytes_up:
                self._note(name, time.perf_counter() - self.began)
            yield done
            del done
            if self.pressed.count or self.is_late:
                return

    def _note(self, name: str, now: float) -> None:
        self.lasted[name] = now - self.latest.get(name, 0.0)
        self.latest[name] = now
        self.heard.add(name)
        self.ends_turn = len(self.heard) == self.workers
        if self.ends_turn:
            self.heard.clear()
        if self.budget is not None:
            self.is_late = now + max(self.lasted.values()) + self.closing >= self.budget

    def follow(self, task: Task, rounds: Iterator[Round], watch: Watch) -> Run:
        """The course of the run, as rank 0 sees it; its model is the last one, unless the run has lost its way."""
        follower, course = self._follower(task, watch), Course.after()
        with closing(self.arrivals(rounds)) as noted:
            for _ in follower.attend(noted, course):
                pass
        run = course.run()
        return run if run.outcome is Outcome.DIVERGED else replace(run, best=course.latest)

    def _follower(self, task: Task, watch: Watch) -> Follower:
        return Follower(
            Settled(task.stop.tol),
            self.began,
            error_of=lambda done: done.metrics[ERROR],
            is_whole=lambda done: self.ends_turn,
            watch=watch,
            last=task.schedule.rounds,
        )


def pursued_by_arrivals(task: Task, communicator: Communicator, attention: Attention, watch: Watch) -> Run:
    """The run to its end, whose outcome is the same at all ranks; only rank 0 has its history and its model."""
    attention.closing = _closing_time(task, communicator, attention)
    rounds: Any = task.engine.run(task.program, task.shards, task.schedule, reduction=task.reduction)
    run, trouble = Run(Outcome.MAX_ROUNDS, (), None), None
    with closing(rounds):
        try:
            if communicator.rank == 0:
                run = attention.follow(task, rounds, watch)
            else:
                _work(rounds, attention.pressed)
        except DivergenceError as error:
            trouble = error
    if attention.pressed.count > 1:
        raise KeyboardInterrupt
    return _agreed(task, communicator, attention, run, trouble)


def _work(rounds: Iterator[Round], pressed: Interrupts) -> None:
    for done in rounds:
        del done  # as large as the rows of W
        if pressed.count:
            return


def _agreed(
    task: Task, communicator: Communicator, attention: Attention, run: Run, trouble: DivergenceError | None
) -> Run:
    """The outcome that rank 0 knows of, unless somebody's signal or the clock has ended the run; sent: five facts."""
    is_full = bool(run.history) and run.history[-1].iteration >= task.schedule.rounds
    own = [str(run.outcome), is_full, run.best is not None, bool(attention.pressed.count), attention.is_late]
    with heard():
        every = [json.loads(text) for text in share(communicator, json.dumps(own))]
    told, is_full, has_model, _, is_late = every[0]
    if not has_model:
        raise trouble or KeyboardInterrupt
    outcome = Outcome(told)
    if outcome is Outcome.MAX_ROUNDS and not is_full:
        is_pressed = any(one[3] for one in every)
        outcome = Outcome.TIME_SPENT if is_late and not is_pressed else Outcome.INTERRUPTED
    return replace(run, outcome=outcome)


def _closing_time(task: Task, communicator: Communicator, attention: Attention) -> float:
    """How long the slowest worker will need for the end of the fit, tried on a few of its rows; sent: that number."""
    if attention.budget is None:
        return 0.0

    def tried() -> float:
        if not task.shards:
            return 0.0
        start = task.program.start_server(Layout.of(task.shards, task.schedule.seed))
        point = Round(0, start[1], {}, (), {}, 0, 0.0, Checkpoint(0, {}, *start))
        trial = ClosingTime(task)
        return min(trial.reserve(point, 0.0) for _ in range(2))  # the first may have to compile

    seconds = together(communicator, tried)
    with heard():
        return max(map(float, share(communicator, repr(seconds))))
