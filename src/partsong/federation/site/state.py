"""State of a run at a site: a folder whose files are written atomically.

    start                     what was agreed on, and the party's first state
    tally                     which work counts, and the state of the reduction between sums
    work-ROUND-ATTEMPT        the state after the work, and its upload
    sent-ROUND-ATTEMPT-PHASE  the state of the sum, and the reply as sent
    model                     the final model
    vocabulary                of an agreement on words: the words and their document frequencies over all sites

All files are readable by their owner only: they have W and, in a masked sum, keys that must not leave.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from partsong.core.interfaces import Layout, Message, State
from partsong.core.states import state
from partsong.data.conversion import as_matrix
from partsong.data.validation import require_factorizable
from partsong.errors import FileError, PartsongError
from partsong.federation.wire import RequestRefused, find_state, load_state, save_state
from partsong.privacy.exposure import column_supports
from partsong.topics.agreement.tables import PartyWords
from partsong.topics.vocabulary import Vocabulary

if TYPE_CHECKING:
    from partsong.federation.site.plan import SiteData


Attempt = tuple[int, int]
"""Round and attempt."""
VOCABULARY_FILE = "vocabulary"
WORK_FILE = re.compile(r"work-(\d+)-(\d+)()")
REPLY_FILE = re.compile(r"sent-(\d+)-(\d+)-(\d+)")

Stored = TypeVar("Stored")
Found = TypeVar("Found")


@state("federation.site-start")
@dataclass(frozen=True, slots=True)
class StartState:
    """What was agreed on at the start: the request's digest, the experiment, the layout, column names, number and dtype
    of rows, the first state, the digest of the data (`mark`), the context of masks (`signing.run_context`), and the
    parties' public keys in hexadecimal digits (none without a pinned roster, and in runs that an older version has
    started). `least_support`: columns that fewer rows use are set to zero in this run.
    """

    digest: str
    experiment: Mapping[str, Any]
    layout: Layout
    columns: tuple[str, ...]
    rows: tuple[int, str]
    state: State
    mark: str
    context: str
    keys: Mapping[str, str] = field(default_factory=dict)
    least_support: int = 0


@state("federation.site-tally")
@dataclass(frozen=True, slots=True)
class ProgressState:
    """The last attempt that counts here (None: none yet), the reduction's state between sums, and the parties of the
    last sum (`cohort`), if known.

    `acknowledged`: the last attempt that the server has counted. `unacknowledged`: later ones whose masked uploads have
    left but were not received in time; they count here, and replies name them. `finish_digest`: the digest of the
    request that ended the run. `closed_code`: the code of a refusal that depended on the data, the last answer of this
    run. `last_released`: the last round released before the folder of the run was lost.
    """

    counted: Attempt | None
    reduction_state: State
    cohort: tuple[str, ...] | None = None
    acknowledged: Attempt | None = None
    unacknowledged: tuple[Attempt, ...] = ()
    finish_digest: str | None = None
    closed_code: str | None = None
    last_released: int = -1


@state("federation.site-work")
@dataclass(frozen=True, slots=True)
class WorkState:
    """The work of an attempt: the digest of its request, the state after it, and the upload."""

    digest: str
    state: State
    upload: Message


@state("federation.site-reply")
@dataclass(frozen=True, slots=True)
class ReplyState:
    """An answered phase: the digest of its request, the reduction's state after it, and the reply's bytes. `cohort`:
    the parties that must be in the sum, if it continues a round.
    """

    digest: str
    reduction_state: State
    reply: bytes
    cohort: tuple[str, ...] | None = None


@state("federation.site-vocabulary")
@dataclass(frozen=True, slots=True)
class VocabularyState:
    """Agreed words with their document frequencies over all sites, the experiment, and the number of texts here."""

    vocabulary: Vocabulary
    experiment: Mapping[str, Any]
    rows: int


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Files of one run. Loading a missing file returns None; saved files are on disk when the call returns."""

    path: Path

    def load_start(self) -> StartState | None:
        """Load what was agreed on at the start."""
        return self._load("start", StartState)

    def save_start(self, started: StartState) -> None:
        """Save the start, after the progress: a start without progress would be invalid."""
        self._save("start", started)

    def load_progress(self, source: Any) -> ProgressState:
        """Load the progress."""
        return load_state(self.path / "tally", ProgressState, {"source": source})

    def save_progress(self, tally: ProgressState, source: Any) -> None:
        """Save the progress, which decides which work counts."""
        self._save("tally", tally, source)

    def load_work(self, at: Attempt) -> WorkState | None:
        """Load the work of an attempt."""
        return self._load(f"work-{at[0]}-{at[1]}", WorkState)

    def save_work(self, at: Attempt, worked: WorkState) -> None:
        """Save the work of an attempt, before anything of it is sent."""
        self._save(f"work-{at[0]}-{at[1]}", worked)

    def attempts(self) -> list[Attempt]:
        """Return the attempts whose work is still here, in order."""
        return sorted(at for _, at, _ in self._matching(WORK_FILE))

    def load_reply(self, at: Attempt, phase: int, source: Any) -> ReplyState | None:
        """Load the answer of a phase."""
        return self._load(f"sent-{at[0]}-{at[1]}-{phase}", ReplyState, source)

    def save_reply(self, at: Attempt, phase: int, sent: ReplyState, source: Any) -> None:
        """Save the answer of a phase, before it is sent."""
        self._save(f"sent-{at[0]}-{at[1]}-{phase}", sent, source)

    def phases(self, at: Attempt) -> list[int]:
        """Return the answered phases of an attempt, in order."""
        return sorted(phase for _, one, phase in self._matching(REPLY_FILE) if one == at)

    def save_model(self, model: Message) -> None:
        """Save the final model."""
        self._save("model", model)

    def load_vocabulary(self) -> VocabularyState | None:
        """Load the agreed words."""
        return self._load(VOCABULARY_FILE, VocabularyState)

    def save_vocabulary(self, agreed: VocabularyState) -> None:
        """Save the agreed words for the run that follows."""
        self._save(VOCABULARY_FILE, agreed)

    def keep_only(self, keep: set[Attempt]) -> None:
        """Remove work and replies of all other attempts."""
        for path, at, _ in [*self._matching(WORK_FILE), *self._matching(REPLY_FILE)]:
            if at not in keep:
                remove_file(path)

    def remove_replies(self) -> None:
        """Remove all replies after the run is over."""
        for path, _, _ in self._matching(REPLY_FILE):
            remove_file(path)

    def _load(self, name: str, kind: type[Stored], source: Any = None) -> Stored | None:
        return find_state(self.path / name, kind, {"source": source})

    def _save(self, name: str, value: Any, source: Any = None) -> None:
        make_folder(self.path)
        save_state(self.path / name, value, {"source": source})

    def _matching(self, pattern: re.Pattern[str]) -> list[tuple[Path, Attempt, int]]:
        """Return files of work or of replies, with their attempts and phases (0 for work)."""
        if not self.path.is_dir():
            return []
        found = [(path, pattern.fullmatch(path.name)) for path in self.path.iterdir()]
        return [(path, (int(one[1]), int(one[2])), int(one[3] or 0)) for path, one in found if one]


def remove_file(path: Path) -> None:
    """Remove a file of a run, if possible; a file that stays is ignored."""
    with contextlib.suppress(OSError):
        path.unlink()


def make_folder(path: Path) -> None:
    """Create a folder that only its owner can read."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{path} cannot be created: {error.strerror or error}. Check the parent folder.") from error


# ---- data state -------------------------------------------------------------------------------------------------
#
# Check that the rows of a site are valid and are those with which a run started. The reason stays at the site.
#
# Compared is the SHA-256 of the agreed columns, in order: n_p × m numbers with their dtype; for an agreement on words,
# of the words with their document frequencies.

BLOCK_BYTES = 1 << 23
"""Bytes that are hashed together."""


class _IdentityKey:
    """Makes a table a cache key, by identity instead of content."""

    __slots__ = ("rows",)

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _IdentityKey) and self.rows is other.rows

    def __hash__(self) -> int:
        return id(self.rows)


def _cache_per_table(size: int) -> Callable[[Callable[..., Found]], Callable[..., Found]]:
    """Cache a function of a table and other arguments, by identity of the table."""

    def decorate(function: Callable[..., Found]) -> Callable[..., Found]:
        cached = lru_cache(maxsize=size)(lambda held, *more: function(held.rows, *more))
        return wraps(function)(lambda rows, *more: cached(_IdentityKey(rows), *more))

    return decorate


def require_valid_data(data: SiteData) -> None:
    """Refuse rows that `join` would refuse: negative, missing or infinite values, or invalid names."""
    if not data.hides_names and (found := _find_fault(data.rows, data.columns)):
        raise RequestRefused("data", found)


@_cache_per_table(2)
def rows_per_column(rows: Any) -> np.ndarray:
    """Count the rows with a value in each column."""
    return column_supports(rows)


@_cache_per_table(2)
def column_energies(rows: Any) -> np.ndarray:
    """Return Σ x² of each column."""
    return np.asarray(as_matrix(rows).column_energies(), np.float64)


@_cache_per_table(1)
def zero_rare_columns(rows: Any, order: tuple[int, ...], least: int) -> Any:
    """Return these columns, in this order, with zeros in those that fewer than `least` rows use."""
    rare = rows_per_column(rows)[list(order)] < least
    chosen = rows[:, list(order)]
    if hasattr(chosen, "tocsr"):
        kept = chosen.tocsr().copy()
        kept.data[rare[kept.indices]] = 0
        kept.eliminate_zeros()
        return kept
    kept = np.array(chosen, order="C")
    kept[:, rare] = 0
    return kept


def require_same_data(data: SiteData, started: StartState) -> None:
    """Refuse rows other than those with which a run started."""
    order, (rows, type_) = data.order(started.columns), started.rows
    if (data.n_rows, data.type) != (rows, type_):
        found = f"{data.n_rows} of {data.type}"
        raise RequestRefused(
            "layout",
            f"The run started with {rows} rows of {type_}; now there are {found}. Restore the data, or start a new run "
            "with the new rows.",
        )
    if data_digest(data.rows, order) != started.mark:
        raise RequestRefused(
            "data",
            "The rows of this site have changed since the run started: their number is the same, but values differ. "
            "Restore the data, or start a new run with the new rows.",
        )


@_cache_per_table(1)
def _find_fault(rows: Any, columns: tuple[str, ...]) -> str:
    try:
        require_factorizable(rows, columns)
    except PartsongError as error:
        return str(error)
    return ""


@_cache_per_table(2)
def data_digest(rows: Any, order: tuple[int, ...]) -> str:
    """Return the SHA-256 that identifies the same rows."""
    found = hashlib.sha256()
    for piece in _pieces(rows, order):
        found.update(piece)
    return found.hexdigest()


def _pieces(rows: Any, order: tuple[int, ...]) -> Iterator[bytes]:
    if isinstance(rows, PartyWords):
        yield "\n".join(rows.words).encode("utf-8", "surrogatepass")
        yield np.asarray(rows.documents, np.int64).tobytes()
        return
    yield f"{rows.shape[0]} × {len(order)} {rows.dtype}\n".encode()
    columns = None if order == tuple(range(rows.shape[1])) else list(order)
    if hasattr(rows, "tocsr"):
        chosen = rows.tocsr() if columns is None else rows.tocsr()[:, columns]
        # Equal matrices may store their entries differently. sum_duplicates works in place, so on a copy.
        chosen = chosen if chosen.has_canonical_format else chosen.copy()
        chosen.sum_duplicates()
        yield np.asarray(chosen.indptr, np.int64).tobytes()
        yield np.asarray(chosen.indices, np.int64).tobytes()
        yield np.ascontiguousarray(chosen.data).tobytes()
        return
    step = max(1, BLOCK_BYTES // max(1, rows.dtype.itemsize * rows.shape[1]))
    for start in range(0, rows.shape[0], step):
        block = rows[start : start + step]
        yield np.ascontiguousarray(block if columns is None else block[:, columns]).tobytes()


# ---- site log ---------------------------------------------------------------------------------------------------
#
# The log of a site, readable by its owner only: reasons with names and values, which never leave.
#
# A server can repeat refused requests without limit, and reasons may quote what it sent. So lines are cut, and a full
# log replaces the one before it (site.log.1): both stay below MAX_LOG_BYTES plus one line.

LOG_FILE = "site.log"
MAX_LETTERS = 8192
"""Letters of a text that are logged: half of them from its end, where a traceback has the error."""
MAX_LOG_BYTES = 1 << 23
"""Bytes."""


def append_to_log(folder: Path, code: str, text: str) -> None:
    """Append one line to the site's log. Failure to write it is ignored."""
    when = datetime.now(UTC).isoformat(timespec="seconds")
    line = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in _cut(text))
    with contextlib.suppress(OSError, ValueError):
        place = folder / LOG_FILE
        if place.exists() and place.stat().st_size > MAX_LOG_BYTES:
            os.replace(place, folder / f"{LOG_FILE}.1")
        descriptor = os.open(place, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with open(descriptor, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{when} [{code}] {line}\n")


def _cut(text: str) -> str:
    half, more = MAX_LETTERS // 2, len(text) - MAX_LETTERS
    return text if more <= 0 else f"{text[:half]} […{more} letters left out…] {text[-half:]}"
