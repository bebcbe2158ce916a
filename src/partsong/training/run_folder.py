"""Run folders and checkpoints: settings, history, results and recorded traffic of a fit."""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

import typer

from partsong.core.interfaces import Checkpoint, Round, State
from partsong.errors import FileError, FormatError, first_few
from partsong.io.model_file import FileKind, load_checkpoint, save_checkpoint, write_tensors
from partsong.io.write import as_json, quoting_for, require_writable_folder, write_json, write_text
from partsong.methods.registry import state_types
from partsong.privacy.accounting import Accounts
from partsong.privacy.ledger import Spending, releases_of
from partsong.training.loop import Earlier
from partsong.training.stopping import Comparable, HistoryRow

# ---- checkpoints ------------------------------------------------------------------------------------------------
#
# Following a run so that it can go on later: what has happened so far, and the file that remembers it.

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


# ---- traffic ----------------------------------------------------------------------------------------------------
#
# Traffic in a run folder: the arrays of each round in one file, and a line about each message.

FOLDER, LIST = "traffic", "traffic.jsonl"
Lines = Mapping[int, Sequence[str]]
"""What the list says about the messages of each round."""


@dataclass(frozen=True, slots=True)
class Recorder:
    """Keeps the traffic of a simulation as it goes, so that a run which is broken off has left all of it."""

    folder: Path

    def note(self, done: Round) -> None:
        """Write down a round whose engine recorded its traffic; readable by its owner alone, as uploads can tell."""
        import numpy as np

        (self.folder / FOLDER).mkdir(exist_ok=True)
        name = _file_of(done.index + 1)
        arrays = {
            f"{party}/{phase}/{array}": np.asarray(values)
            for party, phase, message in done.traffic
            for array, values in message.arrays.items()
        }
        about = {"round": done.index + 1, "parties": sorted(done.checkpoint.parties), "n_features": _columns_of(done)}
        write_tensors(self.folder / name, FileKind("partsong-traffic", 1, is_private=True), arrays, about)
        self._append("".join(_line(done.index + 1, *sent, name) for sent in done.traffic))

    def _append(self, lines: str) -> None:
        try:
            with (self.folder / LIST).open("a", encoding="utf-8", newline="") as file:
                file.write(lines)
        except OSError as error:
            raise FileError(
                f"{self.folder / LIST} cannot be written: {error.strerror or error}. Check that the disk is not full."
            ) from error


def recorded(folder: Path, sent: Iterable[tuple[int, str, int, int]]) -> Lines:
    """The rounds of `sent` (round, party, bytes up, bytes down) whose messages are all in the folder."""
    wanted: dict[int, dict[str, int]] = {}
    for index, party, up, _ in sent:
        wanted.setdefault(index, {})[party] = up
    found: dict[int, dict[str, int]] = {}
    lines: dict[int, list[str]] = {}
    for line in _lines_of(folder):
        try:
            told = json.loads(line)
            index, party, size = int(told["round"]), str(told["party"]), int(told["bytes"])
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        sizes = found.setdefault(index, {})
        sizes[party] = sizes.get(party, 0) + size
        lines.setdefault(index, []).append(line)
    return {
        index: lines[index]
        for index, sizes in sorted(wanted.items())
        if found.get(index) == sizes and (folder / _file_of(index)).is_file()
    }


def clear(folder: Path, kept: Lines) -> None:
    """Remove the traffic of an earlier run, but for these rounds."""
    names = {_file_of(index) for index in kept}
    for stale in folder.glob(f"{FOLDER}/round-*.safetensors"):
        if f"{FOLDER}/{stale.name}" not in names:
            stale.unlink(missing_ok=True)
    if kept:
        write_text(folder / LIST, "".join(line for lines in kept.values() for line in lines))
    else:
        (folder / LIST).unlink(missing_ok=True)


def gap(folder: Path, kept: Lines, before: int, *, is_recorded: bool) -> str:
    """What is to be said of rounds whose traffic the folder will lack after a run goes on from round `before`."""
    missing = [index for index in range(1, before + 1) if index not in kept]
    if is_recorded and missing:
        rounds = first_few(missing[:5], len(missing), "round")
        return (
            f"{folder} does not hold the traffic of {rounds}: what was there is not that of the resumed run, or it was "
            "not recorded. Only later rounds are added. To have all of it, resume into the folder of the first part."
        )
    if kept and not is_recorded:
        return f"{folder}: traffic is kept up to round {before} and not recorded after it. Add --record for the rest."
    return ""


def _lines_of(folder: Path) -> list[str]:
    try:
        return (folder / LIST).read_text("utf-8").splitlines(keepends=True)
    except (OSError, ValueError):
        return []


def _file_of(index: int) -> str:
    return f"{FOLDER}/round-{index:04d}.safetensors"


def _columns_of(done: Round) -> int | None:
    """The number of columns of H, from the model that was sent or from what a party holds; None if neither tells."""
    if "H" in done.model.arrays:
        return int(done.model["H"].shape[1])
    held = (getattr(state, "Ht", None) for state in done.checkpoint.parties.values())
    return next((int(Ht.shape[0]) for Ht in held if Ht is not None), None)


def _line(index: int, party: str, phase: int, message: Any, file: str) -> str:
    content = {
        "round": index,
        "party": party,
        "phase": phase,
        "bytes": message.nbytes,
        "weight": message.weight,
        "arrays": [
            {"name": name, "shape": shape, "dtype": dtype, "bytes": int(message[name].nbytes)}
            for name, shape, dtype in message.signature
        ],
        "file": file,
    }
    return json.dumps(as_json(content), allow_nan=False) + "\n"


# ---- run folder -------------------------------------------------------------------------------------------------

MODEL = "model.safetensors"
SETTINGS, VERSIONS = "settings.json", "versions.json"
RESULT = "result.json"
REPLACED = ("history.csv", "bytes.csv", RESULT, MODEL)
OWN = (SETTINGS, VERSIONS, *REPLACED)


def make_usable(folder: Path, overwrite: bool) -> None:
    """Make the folder; refuse one with anything in it, unless it holds a run that may be overwritten."""
    if folder.exists() and not folder.is_dir():
        raise FileError(f"--run-folder {folder}: this is a file. Choose another name.")
    if folder.is_dir() and any(folder.iterdir()):
        if not is_run_folder(folder):
            raise FileError(
                f"--run-folder {folder} holds files, but not those of a run of partsong; nothing was touched. "
                "Choose another name, or an empty folder."
            )
        if not overwrite:
            raise FileError(f"--run-folder {folder} is not empty. Choose another name, or add --overwrite.")
    require_writable_folder("--run-folder", folder if folder.is_dir() else folder.absolute().parent)
    folder.mkdir(exist_ok=True)


def is_run_folder(folder: Path) -> bool:
    """Whether a run of ours began in this folder: its settings and versions are there, and say so."""
    try:
        settings, versions = (json.loads((folder / name).read_text("utf-8")) for name in (SETTINGS, VERSIONS))
    except (OSError, ValueError, RecursionError):
        return False
    return all(isinstance(told, dict) for told in (settings, versions)) and (
        {"method", "started"} <= settings.keys() and "partsong" in versions
    )


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run; those of an earlier run are replaced one by one."""

    path: Path

    def begin(self, settings: Mapping[str, Any], versions: Mapping[str, Any], kept: Lines) -> None:
        """Written before the fit, so that one that fails can be traced as well; traffic is removed but for `kept`."""
        clear(self.path, kept)
        for stale_name in REPLACED:
            (self.path / stale_name).unlink(missing_ok=True)
        write_json(self.path / VERSIONS, versions)
        write_json(self.path / SETTINGS, settings)

    def run(self) -> str | None:
        """Which run began here, where its settings tell: the `run_of` it."""
        try:
            found = json.loads((self.path / SETTINGS).read_text("utf-8"))["run"]
        except (OSError, ValueError, RecursionError, KeyError, TypeError):
            return None
        return found if isinstance(found, str) else None

    def end(
        self, history: Sequence[HistoryRow], sent: Iterable[tuple[int, str, int, int]], result: Mapping[str, Any]
    ) -> None:
        """Written after the fit, beside the model."""
        write_csv(self.path / "history.csv", HistoryRow._fields, history)
        write_csv(self.path / "bytes.csv", ("round", "party", "bytes_up", "bytes_down"), sent)
        write_json(self.path / RESULT, result)


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A CSV file, whole or not at all; NaN is left empty."""
    cells = [["" if value is None else value for value in as_json(list(row))] for row in rows]
    text = io.StringIO(newline="")
    quoting = quoting_for(value for row in cells for value in row if isinstance(value, str))
    writer = csv.writer(text, lineterminator="\n", quoting=quoting)
    writer.writerow(header)
    writer.writerows(cells)
    write_text(path, text.getvalue())
