"""A line that tells how far a long fit is and how long it will take."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from partsong.core.interfaces import Round
from partsong.training.stopping import HistoryRow

Watch = Callable[[Round, HistoryRow], None]


FOR_EVER = 1e12


@contextmanager
def progress(verbose: int, rounds: int, time_budget: float | None, title: str) -> Iterator[Watch]:
    """A watch that draws iteration, error, elapsed time and an estimate of the time left on standard error."""
    if not verbose:
        yield lambda done, row: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns: list[Any] = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[number]}/{task.total:.0f}"),
        TextColumn("error {task.fields[error]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]} left"),
    ]
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=False, redirect_stdout=False) as bar:
        task = bar.add_task(title, total=float(rounds), number=0, error="…", left="…")
        began, rounds_here = time.perf_counter(), 0

        def watch(done: Round, row: HistoryRow) -> None:
            nonlocal rounds_here
            rounds_here += 1
            share = row.iteration / rounds
            if time_budget is not None:
                share = max(share, min(1.0, row.seconds / time_budget))
            error = f"{100 * row.relative_error:.3f} %" if row.relative_error == row.relative_error else "–"
            left = (time.perf_counter() - began) / rounds_here * (rounds - row.iteration)
            left = left if time_budget is None else min(left, time_budget - row.seconds)
            bar.update(task, completed=share * rounds, number=row.iteration, error=error, left=_clock(left))

        yield watch
        bar.update(task, left=_clock(0))


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=math.ceil(min(max(0.0, seconds), FOR_EVER))))
