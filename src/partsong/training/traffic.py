"""Recorded traffic of a run folder: one file of arrays per round with what parties sent, and a line per message."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from partsong.core.interfaces import Message, Round
from partsong.errors import FileError, FormatError, first_few
from partsong.io.tensor_file import FileKind, read_tensors, write_tensors
from partsong.io.write import as_json, write_text

FOLDER, LIST = "traffic", "traffic.jsonl"
KIND = FileKind("partsong-traffic", 1, is_private=True)
MAX_ROUNDS = 10**6
"""A list that names a later round is invalid."""

Lines = Mapping[int, Sequence[str]]
"""The lines of the list about each round."""
Traffic = Sequence[tuple[str, int, Message]]
"""What one round sent, as in `Round.traffic`: party, phase of the reduction, message."""


@dataclass(frozen=True, slots=True)
class TrafficRecorder:
    """Writes the traffic of a simulation round by round, so that an interrupted run leaves all of it."""

    folder: Path

    def note(self, done: Round) -> None:
        """Write the recorded traffic of a round, readable only by the owner: uploads can disclose data."""
        (self.folder / FOLDER).mkdir(exist_ok=True)
        name = _file_of(done.index + 1)
        arrays = {
            f"{party}/{phase}/{array}": np.asarray(values)
            for party, phase, message in done.traffic
            for array, values in message.arrays.items()
        }
        about = {"round": done.index + 1, "parties": sorted(done.checkpoint.parties), "n_features": _columns_of(done)}
        write_tensors(self.folder / name, KIND, arrays, about)
        self._append("".join(_line(done.index + 1, *sent, name) for sent in done.traffic))

    def _append(self, lines: str) -> None:
        try:
            with (self.folder / LIST).open("a", encoding="utf-8", newline="") as file:
                file.write(lines)
        except OSError as error:
            raise FileError(
                f"{self.folder / LIST} cannot be written: {error.strerror or error}. Check that the disk is not full."
            ) from error


def complete_rounds(folder: Path, sent: Iterable[tuple[int, str, int, int]]) -> Lines:
    """Return the rounds of `sent` (round, party, bytes up, bytes down) whose messages are all in the folder."""
    wanted: dict[int, dict[str, int]] = {}
    for index, party, up, _ in sent:
        wanted.setdefault(index, {})[party] = up
    found: dict[int, dict[str, int]] = {}
    lines: dict[int, list[str]] = {}
    for line in _known_lines(folder):
        try:
            entry = json.loads(line)
            index, party, size = int(entry["round"]), str(entry["party"]), int(entry["bytes"])
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


def clear_traffic(folder: Path, kept: Lines) -> None:
    """Remove the traffic of an earlier run, except for these rounds."""
    names = {_file_of(index) for index in kept}
    for stale in folder.glob(f"{FOLDER}/round-*.safetensors"):
        if f"{FOLDER}/{stale.name}" not in names:
            stale.unlink(missing_ok=True)
    if kept:
        write_text(folder / LIST, "".join(line for lines in kept.values() for line in lines))
    else:
        (folder / LIST).unlink(missing_ok=True)


def missing_traffic(folder: Path, kept: Lines, before: int, *, is_recorded: bool) -> str:
    """Return a warning about rounds whose traffic will be missing after a run resumes from round `before`."""
    missing = [index for index in range(1, before + 1) if index not in kept]
    if is_recorded and missing:
        rounds = first_few(missing[:5], len(missing), "round")
        return (
            f"{folder} does not hold the traffic of {rounds}: the traffic there is of another run, or these rounds "
            "were not recorded. Only later rounds are added. For all rounds, resume into the folder of the first part."
        )
    if kept and not is_recorded:
        return f"{folder} has the traffic up to round {before}, and later rounds are not recorded. Add --record."
    return ""


def _known_lines(folder: Path) -> list[str]:
    try:
        return (folder / LIST).read_text("utf-8").splitlines(keepends=True)
    except (OSError, ValueError):
        return []


def _file_of(index: int) -> str:
    return f"{FOLDER}/round-{index:04d}.safetensors"


def _columns_of(done: Round) -> int | None:
    """Return the number of columns of H, from the model or from a party's state; None if neither has H."""
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


@dataclass(frozen=True, slots=True)
class TrafficRecord:
    """The recorded traffic of a run by round, its parties, and the number of columns if known."""

    traffic: Sequence[Traffic]
    parties: tuple[str, ...]
    n_features: int | None


def read_traffic(folder: str | PathLike[str]) -> list[Traffic]:
    """Read the recorded traffic of a run folder (`partsong fit --record`), round by round from the first."""
    return list(read_record(folder).traffic)


def read_record(folder: str | PathLike[str]) -> TrafficRecord:
    """Read the recorded traffic with parties and columns of the run; raise FormatError if a file is invalid."""
    path = Path(folder)
    rounds: dict[int, list[tuple[str, int, Message]]] = {}
    abouts: list[Any] = []
    opened: tuple[str, dict[str, Any]] = ("", {})
    for line in _lines_of(path):
        index, party, phase, weight, names = _message_of(path, line)
        file = f"traffic/round-{index:04d}.safetensors"
        if file != opened[0]:
            arrays, about = read_tensors(path / file, KIND)
            opened, abouts = (file, arrays), [*abouts, about]
        missing = [name for name in names if f"{party}/{phase}/{name}" not in opened[1]]
        if missing:
            raise FormatError(f"{path / file} lacks {', '.join(missing)} of party {party!r}, which {LIST} lists.")
        sent = {name: opened[1][f"{party}/{phase}/{name}"] for name in names}
        if any((party, phase) == (sender, at) for sender, at, _ in rounds.get(index, ())):
            raise FormatError(f"{path / LIST} lists two messages of party {party!r} in phase {phase} of round {index}.")
        rounds.setdefault(index, []).append((party, phase, Message(sent, weight)))
    absent = next((index for index in range(1, len(rounds) + 1) if index not in rounds), None)
    if absent is not None or not rounds:
        what = f"round {absent} is missing" if absent is not None else "there is none"
        raise FileError(f"{path} does not hold the traffic of a run from its first round on: {what}. Add --record.")
    senders = {party for sent in rounds.values() for party, _, _ in sent}
    parties, width = _parties_and_width(path, abouts)
    traffic = [rounds[index] for index in sorted(rounds)]
    return TrafficRecord(traffic, tuple(sorted(senders | parties)), width or _width_of(traffic))


def _width_of(traffic: Iterable[Traffic]) -> int | None:
    """Return the number of columns from arrays that have all of them, for files of earlier releases without it."""
    for _, _, message in (each for sent in traffic for each in sent):
        if "place" in message.arrays and message["place"].size == 3:
            return int(message["place"][2])
        for name in ("cross", "H"):
            if name in message.arrays and message[name].ndim == 2:
                return int(message[name].shape[1])
    return None


def _message_of(path: Path, line: str) -> tuple[int, str, int, float, list[str]]:
    """Parse round, party, phase, weight and names of arrays from one line of the list."""
    try:
        entry = json.loads(line)
        index, party, phase = int(entry["round"]), str(entry["party"]), int(entry["phase"])
        weight = float("nan" if entry["weight"] is None else entry["weight"])
        names = [str(array["name"]) for array in entry["arrays"]]
        is_sound = 1 <= index <= MAX_ROUNDS and phase >= 0
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise FormatError(f"{path / LIST}: a line does not describe a message: {line.strip()[:60]!r}.") from error
    if not is_sound:
        raise FormatError(f"{path / LIST}: a line has an impossible round or phase: round {index}, phase {phase}.")
    return index, party, phase, weight, names


def _parties_and_width(path: Path, abouts: Sequence[Any]) -> tuple[set[str], int | None]:
    """Return parties and columns from the files of all rounds; files of earlier releases have neither."""
    parties: set[str] = set()
    widths: set[int] = set()
    for about in abouts:
        names, width = (about.get("parties", []), about.get("n_features")) if isinstance(about, dict) else (None, None)
        is_width = width is None or (type(width) is int and width > 0)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or not is_width:
            raise FormatError(f"{path / 'traffic'}: a file has an invalid list of parties. Record the run again.")
        parties |= set(names)
        widths |= set() if width is None else {width}
    if len(widths) > 1:
        raise FormatError(f"{path / 'traffic'}: files are of runs with {sorted(widths)} columns. Record the run again.")
    return parties, next(iter(widths), None)


def _lines_of(path: Path) -> list[str]:
    try:
        return (path / LIST).read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise FileError(f"{path / LIST} is unreadable: no traffic was recorded there. Add --record.") from error
