"""Following a run so that it can go on later: what has happened so far, and the file that remembers it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

import typer

from partsong.cli.choices import state_types
from partsong.core import Checkpoint, Round, State
from partsong.errors import FileError, FormatError
from partsong.fitting import Earlier
from partsong.io.checkpoint_file import load_checkpoint, save_checkpoint
from partsong.privacy.accounting import Accounts
from partsong.running import Comparable, HistoryRow
from partsong.spending import Spending, releases_of

Sent = tuple[int, str, int, int]
"""Iteration, party, bytes up, bytes down."""


@dataclass(frozen=True, slots=True)
class Bookmark:
    """What a checkpoint file keeps in place of the server's state: that state, and the one at its best."""

    server: State
    best: State


@dataclass(slots=True)
class Journal:
    """A run so far: where it stands, its history, the server's state at its best, and who sent how much."""

    checkpoint: Checkpoint | None = None
    history: list[HistoryRow] = field(default_factory=list)
    best: State = None
    comparable: Comparable = field(default_factory=Comparable)
    sent: list[Sent] = field(default_factory=list)
    keeps_last: bool = False

    @staticmethod
    def after(earlier: Earlier, sent: list[Sent], present: int, keeps_last: bool = False) -> Journal:
        """The journal of a run that goes on, with so many parties."""
        comparable = Comparable.of(earlier.history, present)
        return Journal(earlier.checkpoint, list(earlier.history), earlier.best, comparable, sent, keeps_last)

    def note(self, done: Round, row: HistoryRow) -> None:
        """One more round; the best is chosen as running.Course does.

        The checkpoint comes last: an interrupt in between leaves the journal at the round before.
        """
        self.history.append(row)
        self.sent += [(row.iteration, party, up, row.bytes_down) for party, up in sorted(done.bytes_up.items())]
        is_best = self.comparable.add(row) or self.comparable.count == 0  # before a first whole round any model will do
        if is_best or self.keeps_last:
            self.best = done.checkpoint.server
        self.checkpoint = done.checkpoint


@dataclass(slots=True)
class CheckpointFile:
    """A file that is written every few seconds, and whenever asked; `context` tells what run it belongs to.

    `ledger` tells what parties have spent on privacy, if anything. While a run is under way they may have sent more
    than the file knows of: `charged` counts that in when a run goes on from such a file. No round may follow one that
    is not in it: where a ledger cannot be written the run ends.
    """

    path: Path
    every: float
    journal: Journal
    context: Mapping[str, Any]
    ledger: Callable[[], Mapping[str, Any]] | None = None
    saved_at: float = field(default_factory=time.perf_counter)
    saved_index: int = -1
    is_under_way: bool = True

    def tick(self) -> None:
        """Save if it is time."""
        if time.perf_counter() - self.saved_at >= self.every:
            self.save()

    def close(self) -> None:
        """The rounds have ended, and all that was sent is in the journal."""
        self.is_under_way = False
        if self.ledger is not None:
            self.saved_index = -1
        self.save()

    def save(self) -> None:
        """Save unless there is nothing new; a full disk is told, and the fit goes on."""
        point = self.journal.checkpoint
        if point is None or point.index == self.saved_index:
            return
        rows = [_without_nan(row) for row in self.journal.history[: point.index]]
        sent = [entry for entry in self.journal.sent if entry[0] <= point.index]
        marked = replace(point, server=Bookmark(point.server, self.journal.best))
        try:
            context = {**self.context, "history": rows, "sent": sent, "is_under_way": self.is_under_way}
            told = {} if self.ledger is None else self.ledger()
            save_checkpoint(self.path, marked, context={**context, "ledger": told})
            self.saved_index = point.index
        except FileError as error:
            if self.ledger is not None:
                raise
            typer.echo(f"The checkpoint of iteration {point.index} is missing, the fit goes on. {error}", err=True)
        self.saved_at = time.perf_counter()


def open_checkpoint(path: Path) -> tuple[Earlier, list[Sent], Mapping[str, Any]]:
    """The earlier part of a run, who sent how much in it, and the settings and data that it belongs to."""
    stored, context = load_checkpoint(path, (*state_types(), Bookmark))
    try:
        history = tuple(_row(values) for values in context["history"])
        sent = [(int(at), str(party), int(up), int(down)) for at, party, up, down in context["sent"]]
        is_sound = isinstance(context["settings"]["method"], str) and isinstance(context["data"], dict)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path}: its description is not that of a fit. Start the run anew.") from error
    mark = stored.server
    if not is_sound or not isinstance(mark, Bookmark) or len(history) != stored.index:
        raise FormatError(f"{path}: not a checkpoint that `partsong fit` wrote. Start the run anew.")
    return Earlier(replace(stored, server=mark.server), history, mark.best), sent, context


def charged(path: Path, earlier: Earlier, context: Mapping[str, Any], spending: Spending) -> Earlier:
    """Where a private run goes on; `spending` gets the accounts of what it has spent.

    If nobody had closed the file, every party may have sent a message that it does not know of, and is charged for one
    more. (The file is written after every round of such a run.) A party sends as many less as it was charged for.
    """
    point = earlier.checkpoint
    spending.accounts = Accounts.from_json(context.get("ledger") or {})
    made = {name: getattr(state, "releases", None) for name, state in point.parties.items()}
    if not all(_is_covered(count, releases_of(spending.accounts, name)) for name, count in made.items()):
        raise FormatError(
            f"{path}: its parties have sent more than its accounts say, or it is no run with noise. What was spent "
            "cannot be told, and nothing may be sent on top of it. Take an intact copy of this file."
        )
    if context.get("is_under_way", True):
        spending.begin({*point.parties, *context["data"]})
        spending.settled = None
    states = {n: replace(s, releases=releases_of(spending.accounts, n)) for n, s in point.parties.items()}
    return replace(earlier, checkpoint=replace(point, parties=states))


def _is_covered(made: Any, charged_for: int) -> bool:
    return type(made) is int and 0 <= made <= charged_for


def _without_nan(row: HistoryRow) -> list[Any]:
    return [None if math.isnan(value) else value if math.isfinite(value) else str(value) for value in row]


def _row(values: list[Any]) -> HistoryRow:
    given = zip(list(get_type_hints(HistoryRow).values())[: len(values)], values, strict=True)
    return HistoryRow(*(kind(math.nan if value is None else value) for kind, value in given))
