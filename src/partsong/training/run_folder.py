"""Run folders: settings, history, result, model, checkpoint and recorded traffic of one fit, as files.

    folder = RunFolder(Path("runs/liver"))
    with folder.start(fit, settings, data, record=True) as recorder:
        training = run(fit, resume=recorder.resume_point, watch=recorder.watch)
    save_model(folder.path / MODEL, model)
    folder.end(training.history, recorder.sent, result)

`start(…, resume=True)` resumes the run in the folder, from its start if it ended before the first checkpoint. The
folder can be read at any time: `load` (the checkpoint), `history`, `traffic`, `settings`, `result`, `model`.
"""

from __future__ import annotations

import csv
import io
import json
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from partsong.core import renamed
from partsong.errors import FileError, FormatError
from partsong.io.model_file import Model, load_model, machine_versions, now
from partsong.io.write import as_json, quoting_for, require_writable_folder, write_json, write_text
from partsong.training.checkpoint import (
    RunRecorder,
    SavedRun,
    Sent,
    exclusions_before,
    load_run,
    require_same_run,
)
from partsong.training.loop import Exclusion, Fit, HistoryRow
from partsong.training.traffic import (
    Lines,
    TrafficRecord,
    TrafficRecorder,
    clear_traffic,
    complete_rounds,
    missing_traffic,
    read_record,
)

MODEL, HISTORY, CHECKPOINT = "model.safetensors", "history.csv", "checkpoint"
SETTINGS, VERSIONS = "settings.json", "versions.json"
RESULT = "result.json"
RESULT_FILES = (HISTORY, "bytes.csv", RESULT, MODEL)
RUN_FILES = (SETTINGS, VERSIONS, *RESULT_FILES)


def prepare_folder(folder: Path, overwrite: bool) -> None:
    """Create the folder; refuse one that is not empty, unless it holds a run that may be overwritten."""
    if folder.exists() and not folder.is_dir():
        raise FileError(f"run_folder={str(folder)!r} is a file. Choose another name.", parameter="run_folder")
    if folder.is_dir() and any(folder.iterdir()) and not RunFolder(folder).is_unstarted:
        if not is_run_folder(folder):
            raise FileError(
                f"run_folder={str(folder)!r} holds files that are not those of a partsong run. Nothing was changed. "
                "Choose another name, or an empty folder.",
                parameter="run_folder",
            )
        if not overwrite:
            raise FileError(
                f"run_folder={str(folder)!r} is not empty: it holds a run. Choose another name, or use overwrite.",
                parameter="run_folder",
            )
    require_writable_folder("run_folder", folder if folder.is_dir() else folder.absolute().parent)
    folder.mkdir(exist_ok=True)


def is_run_folder(folder: Path) -> bool:
    """Whether a partsong run was started in this folder, by its settings and versions."""
    try:
        settings, versions = (json.loads((folder / name).read_text("utf-8")) for name in (SETTINGS, VERSIONS))
    except (OSError, ValueError, RecursionError):
        return False
    return all(isinstance(content, dict) for content in (settings, versions)) and (
        {"method", "started"} <= settings.keys() and "partsong" in versions
    )


def rank_files(model: Path, ranks: Collection[int]) -> dict[int, Path]:
    """Return the files, next to that of the chosen model, of the models of several ranks: model-k05.safetensors."""
    width = len(str(max(ranks, default=0)))
    return {rank: model.with_name(f"{model.stem}-k{rank:0{width}}{model.suffix}") for rank in ranks}


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run; they replace those of an earlier run one by one."""

    path: Path

    @property
    def is_unstarted(self) -> bool:
        """Whether a run ended before it saved anything, so that there is nothing to resume or to lose."""
        return is_run_folder(self.path) and not any((self.path / name).exists() for name in (CHECKPOINT, *RESULT_FILES))

    def begin(
        self,
        settings: Mapping[str, Any],
        versions: Mapping[str, Any],
        kept: Lines | None = None,
        *,
        resumes: bool = False,
    ) -> None:
        """Write what is known before the fit, so that a failed fit can be traced as well.

        Traffic of an earlier run is removed except for the rounds in `kept`. Its checkpoint is removed too, unless the
        run `resumes` it. A checkpoint with privacy accounts is never removed.
        """
        if not resumes and (self.path / CHECKPOINT).exists():
            if self.load().spent:
                raise FileError(
                    f"{self.path / CHECKPOINT} holds the privacy accounts of an earlier run, which add up with those "
                    "of this one. Resume that run, or use another folder and keep this one."
                )
            (self.path / CHECKPOINT).unlink()
        clear_traffic(self.path, kept or {})
        stem, ending = Path(MODEL).stem, Path(MODEL).suffix
        ranks = (path for path in self.path.glob(f"{stem}-k*{ending}") if path.stem.removeprefix(f"{stem}-k").isdigit())
        for stale in (*(self.path / name for name in RESULT_FILES), *ranks):
            stale.unlink(missing_ok=True)
        write_json(self.path / VERSIONS, versions)
        write_json(self.path / SETTINGS, settings)

    def start(
        self,
        fit: Fit,
        settings: Mapping[str, Any],
        data: Mapping[str, Mapping[str, Any]],
        *,
        resume: bool = False,
        overwrite: bool = False,
        every: float = 60.0,
        record: bool = False,
        may_change: Collection[str] = (),
        left_out: list[Exclusion] | None = None,
    ) -> RunRecorder:
        """Start a run in this folder, or `resume` the one in it; return the recorder that saves it here.

        `settings` (with the method's name as "method") and `data` (a `checkpoint.fingerprint` for each party) identify
        the run: a run with others is not resumed, except for settings in `may_change`. To `record` traffic, the fit's
        engine must record it as well.
        """
        saved, place = None, self.path / CHECKPOINT
        resume = resume and not self.is_unstarted
        if resume:
            saved = self.load()
            require_same_run(place, saved, settings, data, may_change)
        else:
            prepare_folder(self.path, overwrite)
        kept = {} if saved is None else complete_rounds(self.path, saved.sent)
        self.begin({**settings, "started": now()}, machine_versions(fit.threads), kept, resumes=resume)
        missing = "" if saved is None else missing_traffic(self.path, kept, saved.checkpoint.index, is_recorded=record)
        if missing:
            warnings.warn(missing, stacklevel=2)
        about: dict[str, Any] = {"settings": settings, "data": data}
        traffic = TrafficRecorder(self.path) if record else None
        if left_out is not None:
            left_out[:0] = [] if saved is None else exclusions_before(saved, place)
            about["left_out"] = left_out
        return RunRecorder(fit, about, place, every, traffic, saved)

    def load(self) -> SavedRun:
        """Load the run from its checkpoint; `require_same_run` checks whether a fit may resume it."""
        return load_run(self.path / CHECKPOINT)

    def run(self) -> str | None:
        """Return the identifier of the run, if its settings have one."""
        try:
            found = self._json(SETTINGS).get("run")
        except FileError:
            return None
        return found if isinstance(found, str) else None

    def settings(self) -> dict[str, Any]:
        """Return the settings of the run, with the present names."""
        return renamed.translate_settings(self._json(SETTINGS))

    def result(self) -> dict[str, Any]:
        """Return the result of a run that has ended."""
        return self._json(RESULT)

    def model(self) -> Model:
        """Return the model of a run that has ended."""
        return load_model(self.path / MODEL)

    def history(self) -> tuple[HistoryRow, ...]:
        """Return a row for each round: of the whole run if it has ended, else up to the checkpoint."""
        path = self.path / HISTORY
        if not path.exists():
            return self.load().history
        with path.open(encoding="utf-8", newline="") as file:
            try:
                return tuple(_history_row(row) for row in csv.DictReader(file))
            except (KeyError, TypeError, ValueError) as error:
                raise FormatError(f"{path}: not the history of a fit. Copy it from the run again.") from error

    def traffic(self) -> TrafficRecord:
        """Return what parties sent in a run with recorded traffic."""
        return read_record(self.path)

    def end(self, history: Sequence[HistoryRow], sent: Iterable[Sent], result: Mapping[str, Any]) -> None:
        """Write what is known after the fit; the model is already here."""
        write_csv(self.path / HISTORY, HistoryRow._fields, history)
        write_csv(self.path / "bytes.csv", ("round", "party", "bytes_up", "bytes_down"), sent)
        write_json(self.path / RESULT, result)

    def _json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            found = json.loads(path.read_text("utf-8"))
        except OSError as error:
            raise FileError(f"{path} cannot be read: {error.strerror or error}. Check the folder.") from error
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{path}: not valid JSON. Copy it from the run again.") from error
        if not isinstance(found, dict):
            raise FormatError(f"{path}: not a file of a partsong run. Copy it from the run again.")
        return found


def _history_row(row: Mapping[str, str]) -> HistoryRow:
    kinds = get_type_hints(HistoryRow)
    if any(name not in (column, "cohort") for name, column in zip(kinds, row, strict=True)):
        raise KeyError(*row)  # only the column of cohorts had another name in 0.1.0
    return HistoryRow(*(kind(cell or "nan") for kind, cell in zip(kinds.values(), row.values(), strict=True)))


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a CSV file atomically; NaN cells are empty."""
    cells = [["" if value is None else value for value in as_json(list(row))] for row in rows]
    text = io.StringIO(newline="")
    quoting = quoting_for(value for row in cells for value in row if isinstance(value, str))
    writer = csv.writer(text, lineterminator="\n", quoting=quoting)
    writer.writerow(header)
    writer.writerows(cells)
    write_text(path, text.getvalue())
