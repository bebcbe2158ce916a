"""Traffic in a run folder: the arrays of each round in one file, and a line about each message."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partsong.cli.outputs import as_json, write_text
from partsong.core import Round
from partsong.errors import FileError, first_few

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

        from partsong.io.tensor_file import FileKind, write_tensors

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
