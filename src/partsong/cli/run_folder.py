"""A run folder: what was asked, what computed it, how it went, and what came out; `traffic` adds what was sent."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partsong.cli import traffic
from partsong.cli.outputs import as_json, require_writable_folder, write_json, write_text
from partsong.errors import FileError
from partsong.running import HistoryRow

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

    def begin(self, settings: Mapping[str, Any], versions: Mapping[str, Any], kept: traffic.Lines) -> None:
        """Written before the fit, so that one that fails can be traced as well; traffic is removed but for `kept`."""
        traffic.clear(self.path, kept)
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
    from partsong.io.weights import quoting_for

    cells = [["" if value is None else value for value in as_json(list(row))] for row in rows]
    text = io.StringIO(newline="")
    quoting = quoting_for(value for row in cells for value in row if isinstance(value, str))
    writer = csv.writer(text, lineterminator="\n", quoting=quoting)
    writer.writerow(header)
    writer.writerows(cells)
    write_text(path, text.getvalue())
