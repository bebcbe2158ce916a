"""Checkpoint files of a fit: save the state of a run every few seconds, and resume it.

    resumed = load_run(path) if resume else None
    with RunRecorder(fit, {"settings": settings, "data": data}, path, resumed=resumed) as recorder:
        training = run(fit, resume=recorder.resume_point, watch=recorder.watch)

`training.run_folder` keeps a checkpoint with the other files of a run.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, get_type_hints

import numpy as np

from partsong.core.interfaces import Checkpoint, Message, Round, State
from partsong.core.renamed import translate_settings
from partsong.core.states import state
from partsong.data.scan import is_sparse
from partsong.errors import FileError, FormatError, ParameterError
from partsong.io.opening import resolve_path
from partsong.io.state_file import read_state, write_state
from partsong.io.write import as_json
from partsong.privacy.accounting import Accounts
from partsong.privacy.spending import PrivacyTracker
from partsong.training.loop import Exclusion, Fit, HistoryRow, ResumePoint, Training, start_training
from partsong.training.traffic import TrafficRecorder

Sent = tuple[int, str, int, int]
"""Iteration, party, bytes up, bytes down."""

ONE_TABLE = "all"
"""Name of the only party in a fit of one table."""

WHOLE_BYTES, SAMPLED_ROWS = 64 * 2**20, 256
"""Data up to this size are hashed completely, larger ones by this many rows."""


@state("training.run")
@dataclass(frozen=True, slots=True)
class SavedRun:
    """A run after its latest round.

    `rows` are the rows of its history, `best` is the server's best state, and `sent` the bytes by round and party.
    `about` identifies the run by plain values, among them "settings" and "data". `spent` are the privacy accounts by
    party; while the run is in progress (`is_under_way`), its parties may have sent more than the accounts say.
    """

    checkpoint: Checkpoint
    rows: tuple[tuple[Any, ...], ...] = ()
    best: State = None
    sent: tuple[Sent, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    spent: Mapping[str, Any] = field(default_factory=dict)
    is_under_way: bool = False

    @property
    def history(self) -> tuple[HistoryRow, ...]:
        """The history, one row per round."""
        return tuple(HistoryRow(*row) for row in self.rows)

    @property
    def resume_point(self) -> ResumePoint:
        """What `training.loop.run` needs to resume the run."""
        return ResumePoint(self.checkpoint, self.history, self.best)

    def charge(self, path: Path | None, spending: PrivacyTracker) -> SavedRun:
        """Return the run with what its parties may have sent charged; `spending` gets the privacy accounts.

        If the file was not closed, every party may have sent one message that the file does not record, and is charged
        for one more. (The file is written after every round of such a run.) A party sends fewer messages by the number
        it was charged for.
        """
        spending.accounts = Accounts.from_json(self.spent)
        parties = self.checkpoint.parties
        made = {name: getattr(one, "releases", None) for name, one in parties.items()}
        if not all(type(n) is int and 0 <= n <= spending.made(name) for name, n in made.items()):
            raise FormatError(
                f"{path}: its parties have sent more than its privacy accounts say, or it is not a run with noise. The "
                "privacy loss is unknown, so nothing more may be sent. Restore this file from a backup."
            )
        if self.is_under_way:
            spending.start_round({*parties, *self.about.get("data", ())}, self.checkpoint.index)
            spending.accounts_before_round = None
        states = {name: replace(one, releases=spending.made(name)) for name, one in parties.items()}
        return replace(self, checkpoint=replace(self.checkpoint, parties=states))


def save_run(path: str | PathLike[str], run: SavedRun) -> None:
    """Write a checkpoint file atomically, readable only by its owner: it holds private states such as W."""
    write_state(path, run, "checkpoint")


def load_run(path: str | PathLike[str]) -> SavedRun:
    """Read a checkpoint file; raise FormatError if it is not the checkpoint of a fit."""
    run = read_state(path, "checkpoint")
    if not isinstance(run, SavedRun) or not _is_valid(run):
        raise FormatError(f"{resolve_path(path)}: not the checkpoint of a fit. Start a new run.")
    return replace(run, about={**run.about, "settings": translate_settings(run.about["settings"])})


def fingerprint(X: Any, feature_names: Sequence[str] | None = None) -> dict[str, Any]:
    """Return a fingerprint of the data: shape, type, and a hash of all rows, or of some rows of large data."""
    digest = hashlib.sha256()
    for block in _sampled(X):
        digest.update(block)
    names = hashlib.sha256(
        "\0".join(() if feature_names is None else map(str, feature_names)).encode("utf-8", "surrogatepass")
    )
    return {
        "shape": [int(side) for side in X.shape],
        "dtype": str(X.dtype),
        "values": digest.hexdigest(),
        "feature_names": None if feature_names is None else names.hexdigest(),
    }


def stored_rows(matrix: Any) -> Any:
    """Return the stored rows of a matrix, for a fingerprint: an array or CSR."""
    rows = matrix.by_row if hasattr(matrix, "by_row") else matrix.X
    return rows.detach().cpu().numpy() if hasattr(rows, "detach") else rows


def require_same_run(
    path: str | PathLike[str],
    run: SavedRun,
    settings: Mapping[str, Any],
    data: Mapping[str, Mapping[str, Any]],
    may_change: Collection[str] = (),
    name_of: Callable[[str], str] = str,
) -> None:
    """Refuse to resume a run with other data or settings; the error lists all differences.

    `data` has a fingerprint for each party, and `name_of` returns a setting's name for users.
    """
    there, here = _flat(run.about["settings"]), _flat(settings)
    differences = [
        describe_difference(name_of(name), there.get(name), value)
        for name, value in here.items()
        if name not in may_change and there.get(name) != as_json(value)
    ]
    differences += _different_data(run.about["data"], data)
    if differences:
        raise different_run_error(path, differences)


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the nested ones of privacy and method merged in."""
    nested = [value for value in settings.values() if isinstance(value, Mapping)]
    return {name: value for one in (settings, *nested) for name, value in one.items() if not isinstance(value, Mapping)}


def exclusions_before(run: SavedRun, path: str | PathLike[str]) -> list[Exclusion]:
    """Return the parties left out of the rounds of a run so far."""
    try:
        found = [Exclusion(int(at), str(party), str(reason)) for at, party, reason in run.about.get("left_out", [])]
    except (TypeError, ValueError) as error:
        raise FormatError(f"{path}: its list of parties left out is unreadable. Start a new run.") from error
    return [entry for entry in found if entry.iteration <= run.checkpoint.index]


def describe_difference(name: str, stored: Any, now: Any) -> str:
    """Return how a setting differs, for `different_run_error`."""
    return f"{name} ({stored} in the checkpoint, {now} now)"


def different_run_error(path: str | PathLike[str] | None, differences: list[str]) -> ParameterError:
    """Return the error for a checkpoint of other data or settings."""
    return ParameterError(
        f"{path}: this checkpoint belongs to another run; these differ: {', '.join(differences)}. "
        "Use the same data and settings, or start a new run without --resume."
    )


@dataclass(slots=True)
class RunRecorder:
    """Saves a fit: a checkpoint file every `every` seconds, and recorded traffic.

    With `resumed`, it continues from that run. Pass `watch` to `training.loop.run`. Leaving the block writes the file
    once more: as closed, or after an error as still in progress. With privacy accounts, the file is written after every
    round, and a failed write ends the run. Without them, a failed write is a warning.
    """

    fit: Fit
    about: Mapping[str, Any]
    path: Path | None = None
    every: float = 60.0
    traffic: TrafficRecorder | None = None
    resumed: SavedRun | None = None
    resume_point: ResumePoint | None = field(init=False, default=None)
    checkpoint: Checkpoint | None = field(init=False, default=None)
    training: Training = field(init=False)
    sent: list[Sent] = field(init=False, default_factory=list)
    saved_at: float = field(init=False, default_factory=time.perf_counter)
    saved_index: int = field(init=False, default=-1)
    is_under_way: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        if self.resumed is not None:
            run = self.resumed if self.spending is None else self.resumed.charge(self.path, self.spending)
            self.resume_point, self.checkpoint, self.sent = run.resume_point, run.checkpoint, list(run.sent)
        self.training = start_training(self.fit, resume=self.resume_point)

    @property
    def spending(self) -> PrivacyTracker | None:
        """The privacy accounts, if there are any."""
        return self.fit.spending

    def __enter__(self) -> RunRecorder:
        if self.spending is not None:
            self.save()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.save()

    def watch(self, done: Round, row: HistoryRow) -> None:
        """Record a round. The checkpoint is written last: an interrupt before it leaves that of the previous round."""
        self.training.note(done, row)
        self.sent += [(row.iteration, party, up, row.bytes_down) for party, up in sorted(done.bytes_up.items())]
        self.checkpoint = done.checkpoint
        if self.traffic is not None:
            self.traffic.note(done)
        if self.spending is not None or time.perf_counter() - self.saved_at >= self.every:
            self.save()

    def close(self) -> None:
        """Save the run as closed: the rounds have ended, and everything that was sent is recorded."""
        self.is_under_way = False
        if self.spending is not None:
            self.saved_index = -1
        self.save()

    def save(self) -> None:
        """Save unless there is nothing new."""
        point = self.checkpoint
        if self.path is None or point is None or point.index == self.saved_index:
            return
        try:
            save_run(self.path, self._so_far(point))
            self.saved_index = point.index
        except FileError as error:
            if self.spending is not None:
                raise
            warnings.warn(
                f"The checkpoint of iteration {point.index} was not written; the fit continues. {error}", stacklevel=2
            )
        self.saved_at = time.perf_counter()

    def _so_far(self, point: Checkpoint) -> SavedRun:
        rows = tuple(_plain_row(row) for row in self.training.history[: point.index])
        sent = tuple(entry for entry in self.sent if entry[0] <= point.index)
        spent = {} if self.spending is None else self.spending.accounts.to_json()
        return SavedRun(point, rows, self.training.best, sent, as_json(self.about), spent, self.is_under_way)


_KINDS = tuple(get_type_hints(HistoryRow).values())


def _plain_row(row: HistoryRow) -> tuple[Any, ...]:
    return tuple(kind(value) for kind, value in zip(_KINDS, row, strict=True))


def _is_valid(run: SavedRun) -> bool:
    point, about = run.checkpoint, run.about
    is_point = isinstance(point, Checkpoint) and type(point.index) is int and point.index >= 0
    is_about = isinstance(about, Mapping) and all(isinstance(about.get(name), Mapping) for name in ("settings", "data"))
    return (
        is_point
        and isinstance(point.parties, Mapping)
        and isinstance(point.model, Message)
        and is_about
        and len(run.rows) == point.index
        and all(_are_numbers(row, _KINDS) for row in run.rows)
        and all(len(entry) == 4 and _are_numbers((entry[0], *entry[2:]), (int, int, int)) for entry in run.sent)
    )


def _are_numbers(row: Any, kinds: tuple[type, ...]) -> bool:
    return type(row) is tuple and len(row) <= len(kinds) and all(type(value) in (int, float) for value in row)


def _sampled(X: Any) -> Iterator[bytes]:
    n_rows = int(X.shape[0])
    n_bytes = int(X.data.nbytes if is_sparse(X) else X.nbytes)
    is_whole = n_bytes <= WHOLE_BYTES or n_rows <= SAMPLED_ROWS
    spread = np.linspace(0, n_rows - 1, SAMPLED_ROWS).astype(np.int64).tolist()
    rows = [slice(0, n_rows)] if is_whole else [slice(row, row + 1) for row in spread]
    if is_sparse(X):
        X = X.tocsr()
        yield X.indptr.astype(np.int64).tobytes()
    for chosen in rows:
        if is_sparse(X):
            part = slice(X.indptr[chosen.start], X.indptr[chosen.stop])
            yield X.indices[part].astype(np.int64).tobytes() + X.data[part].tobytes()
        else:
            yield np.ascontiguousarray(X[chosen]).tobytes()


def _different_data(there: Mapping[str, Any], here: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if set(there) != set(here):
        return [describe_difference("parties", ", ".join(there), ", ".join(here))]
    return [
        f"data ({'' if party == ONE_TABLE else f'{party}: '}other {name.replace('_', ' ')})"
        for party, own in here.items()
        for name, value in own.items()
        if there[party].get(name) != value
    ]
