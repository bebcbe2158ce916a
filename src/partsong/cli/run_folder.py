"""A run folder: what was asked, what computed it, how it went, what came out, and, if wanted, what was sent."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partsong.cli.outputs import as_json, require_writable_folder, write_json, write_text
from partsong.core import Round
from partsong.errors import FileError
from partsong.running import HistoryRow

MODEL = "model.safetensors"
TRAFFIC = "traffic"
SETTINGS, VERSIONS = "settings.json", "versions.json"
REPLACED = ("history.csv", "bytes.csv", "result.json", MODEL)
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

    def begin(self, settings: Mapping[str, Any], versions: Mapping[str, Any]) -> None:
        """Written before the fit, so that one that fails can be traced as well."""
        for stale in (*self.path.glob(f"{TRAFFIC}/round-*.safetensors"), self.path / "traffic.jsonl"):
            stale.unlink(missing_ok=True)
        for stale_name in REPLACED:
            (self.path / stale_name).unlink(missing_ok=True)
        write_json(self.path / VERSIONS, versions)
        write_json(self.path / SETTINGS, settings)

    def end(
        self, history: Sequence[HistoryRow], sent: Iterable[tuple[int, str, int, int]], result: Mapping[str, Any]
    ) -> None:
        """Written after the fit, beside the model."""
        write_csv(self.path / "history.csv", HistoryRow._fields, history)
        write_csv(self.path / "bytes.csv", ("round", "party", "bytes_up", "bytes_down"), sent)
        write_json(self.path / "result.json", result)


@dataclass(slots=True)
class Recorder:
    """Keeps the traffic of a simulation: the arrays of each round in one file, and a line about each message."""

    folder: Path
    lines: list[str] = field(default_factory=list)

    def note(self, done: Round) -> None:
        """Write down a round whose engine recorded its traffic; readable by its owner alone, as uploads can tell."""
        import numpy as np

        from partsong.io.tensor_file import FileKind, write_tensors

        (self.folder / TRAFFIC).mkdir(exist_ok=True)
        name = f"{TRAFFIC}/round-{done.index + 1:04d}.safetensors"
        arrays = {
            f"{party}/{phase}/{array}": np.asarray(values)
            for party, phase, message in done.traffic
            for array, values in message.arrays.items()
        }
        about = {"round": done.index + 1}
        write_tensors(self.folder / name, FileKind("partsong-traffic", 1, is_private=True), arrays, about)
        self.lines += [_line(done.index + 1, *sent, name) for sent in done.traffic]

    def close(self) -> None:
        """Write the list of messages."""
        write_text(self.folder / "traffic.jsonl", "".join(self.lines))


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A CSV file, whole or not at all; NaN is left empty."""
    from partsong.io.weights import quoting_for

    cells = [["" if value is None else value for value in as_json(list(row))] for row in rows]
    text = io.StringIO(newline="")
    quoting = quoting_for(value for row in cells for value in row if isinstance(value, str))
    writer = csv.writer(text, lineterminator="\n", quoting=quoting)
    writer.writerow(header)
    writer.writerows(cells)
    write_text(path, text.getvalue())


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
