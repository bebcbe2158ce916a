"""A line that tells how far a long fit is and how long it will take."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from partsong.core import Round
from partsong.running import HistoryRow

Watch = Callable[[Round, HistoryRow], None]


@contextmanager
def progress(verbose: int, rounds: int, time_budget: float | None, title: str) -> Iterator[Watch]:
    """A watch that draws iteration, error, elapsed time and an estimate of the time left on standard error."""
    if not verbose:
        yield lambda done, row: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns: list[Any] = [
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("error {task.fields[error]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=False) as bar:
        task = bar.add_task(title, total=float(rounds), error="…")

        def watch(done: Round, row: HistoryRow) -> None:
            share = row.iteration / rounds
            if time_budget is not None:
                share = max(share, min(1.0, row.seconds / time_budget))
            error = f"{100 * row.relative_error:.3f} %" if row.relative_error == row.relative_error else "–"
            bar.update(task, completed=share * rounds, error=error)

        yield watch
