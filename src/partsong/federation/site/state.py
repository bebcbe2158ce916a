"""The folder of a run at a site. A file is the old one or the new one, and what is not finished is not there.

    start                     what was agreed on, and the party's first state
    tally                     which work counts, and what the reduction keeps between sums
    work-ROUND-ATTEMPT        the state after the work, and its upload
    sent-ROUND-ATTEMPT-PHASE  the state of the sum, and the reply as it left
    model                     what the run has ended with
    vocabulary                of an agreement on words: those agreed on, and in how many documents of all sites they are

All are for their owner alone: W is in them, and in a masked sum keys that must not leave.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from partsong.core.interfaces import Layout, Message, State
from partsong.core.states import state
from partsong.data.conversion import as_matrix
from partsong.data.validation import require_factorizable
from partsong.errors import FileError, PartsongError
from partsong.federation.wire import Denied, load_state, save_state
from partsong.privacy.exposure import column_supports
from partsong.topics.agreement.tables import HeldWords
from partsong.topics.vocabulary import Vocabulary

if TYPE_CHECKING:
    from partsong.federation.site.plan import Data


# ---- site files -------------------------------------------------------------------------------------------------

Attempt = tuple[int, int]
"""Round and attempt."""
VOCABULARY = "vocabulary"
WORK = re.compile(r"work-(\d+)-(\d+)")
SENT = re.compile(r"sent-(\d+)-(\d+)-(\d+)")


@state("federation.site-start")
@dataclass(frozen=True, slots=True)
class Started:
    """What was agreed on: the request's digest, the experiment, the layout, its columns by name, how many rows of which
    type they had, the first state, the mark by which the same rows are known again (`data_state`), the context of
    masks (`told_alike`), and the parties' public keys in hexadecimal digits (none where no roster was pinned, and in
    runs that an older version has begun). `least_support`: columns that fewer rows use are set to zero in this run.
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
class Tally:
    """The last work that counts here (None: none yet), what the reduction keeps between sums, and who was in the last
    one, where that is known. `agreed`: the last work that the server has counted; `alone`: those after it, whose masked
    uploads have left and were not heard in time: they count here, and the server is told. `over`: the digest of the
    request that has ended the run; `closed`: the code of a refusal that depended on the data, and is the last answer of
    this run; `passed`: the last round that was released before the folder of the run was lost.
    """

    counted: Attempt | None
    standing: State
    company: tuple[str, ...] | None = None
    agreed: Attempt | None = None
    alone: tuple[Attempt, ...] = ()
    over: str | None = None
    closed: str | None = None
    passed: int = -1


@state("federation.site-work")
@dataclass(frozen=True, slots=True)
class Worked:
    """An attempt that was worked on: the digest of its request, the state after it, and the upload."""

    digest: str
    state: State
    upload: Message


@state("federation.site-reply")
@dataclass(frozen=True, slots=True)
class Sent:
    """A phase that was answered: the digest of its request, the reduction's state after it, and the reply's bytes;
    `company`: who has to be in the sum, where it continues a round.
    """

    digest: str
    seat: State
    reply: bytes
    company: tuple[str, ...] | None = None


@state("federation.site-vocabulary")
@dataclass(frozen=True, slots=True)
class Agreed:
    """The words of an agreement, in how many documents of all sites each is; for which experiment, and over how many
    texts of this site.
    """

    vocabulary: Vocabulary
    experiment: Mapping[str, Any]
    rows: int


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Files of one run."""

    path: Path

    def started(self) -> Started | None:
        """None before the start."""
        if not (self.path / "start").exists():
            return None
        return load_state(self.path / "start", Started)

    def save_start(self, started: Started) -> None:
        """The tally comes first: a start without one would be none."""
        make_folder(self.path)
        save_state(self.path / "start", started)

    def tally(self, source: Any) -> Tally:
        """Which work counts."""
        return load_state(self.path / "tally", Tally, {"source": source})

    def save_tally(self, tally: Tally, source: Any) -> None:
        """From here on another work counts."""
        make_folder(self.path)
        save_state(self.path / "tally", tally, {"source": source})

    def worked(self, at: Attempt) -> Worked | None:
        """None where this attempt was not worked on."""
        path = self.path / f"work-{at[0]}-{at[1]}"
        return load_state(path, Worked) if path.exists() else None

    def save_work(self, at: Attempt, worked: Worked) -> None:
        """Before anything of it is sent."""
        save_state(self.path / f"work-{at[0]}-{at[1]}", worked)

    def attempts(self) -> list[Attempt]:
        """All that were worked on and are still here, in order."""
        return sorted((int(found[1]), int(found[2])) for found in self._matching(WORK))

    def sent(self, at: Attempt, phase: int, source: Any) -> Sent | None:
        """None where this phase was not answered."""
        path = self.path / f"sent-{at[0]}-{at[1]}-{phase}"
        if not path.exists():
            return None
        return load_state(path, Sent, {"source": source})

    def save_sent(self, at: Attempt, phase: int, sent: Sent, source: Any) -> None:
        """Before it is sent."""
        save_state(self.path / f"sent-{at[0]}-{at[1]}-{phase}", sent, {"source": source})

    def save_model(self, model: Message) -> None:
        """The model that the run has ended with."""
        save_state(self.path / "model", model)

    def agreed(self) -> Agreed | None:
        """The words that were agreed on; None where that is not known here."""
        if not (self.path / VOCABULARY).exists():
            return None
        return load_state(self.path / VOCABULARY, Agreed)

    def save_agreed(self, agreed: Agreed) -> None:
        """For the run that it was agreed on for."""
        save_state(self.path / VOCABULARY, agreed)

    def phases(self, at: Attempt) -> list[int]:
        """The phases of an attempt that were answered, in order."""
        return sorted(int(found[3]) for found in self._matching(SENT) if (int(found[1]), int(found[2])) == at)

    def forget(self, keep: set[Attempt]) -> None:
        """Remove works and replies of other attempts than these."""
        for pattern in (WORK, SENT):
            for found in list(self._matching(pattern)):
                if (int(found[1]), int(found[2])) not in keep:
                    with contextlib.suppress(OSError):
                        (self.path / found[0]).unlink()

    def forget_replies(self) -> None:
        """Remove all replies: the run is over."""
        for found in list(self._matching(SENT)):
            with contextlib.suppress(OSError):
                (self.path / found[0]).unlink()

    def _matching(self, pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
        if self.path.is_dir():
            yield from (found for path in self.path.iterdir() if (found := pattern.fullmatch(path.name)))


def make_folder(path: Path) -> None:
    """A folder that its owner alone can read."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{path} cannot be made: {error.strerror or error}. Check the folder above.") from error


# ---- data state -------------------------------------------------------------------------------------------------
#
# Whether the rows of a site are sound, and are those that a run has begun with; the reason stays at the site.
#
# What is compared is a SHA-256 of the agreed columns, in their order: n_p × m numbers with their type, or of an
# agreement
# its words with the number of documents that have each. It is computed once in a process for a table that stays as it
# is.

BLOCK = 1 << 23
"""Bytes that are looked at together."""


class Rows:
    """An array, known by what it is and not by what is in it."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


def require_sound(data: Data) -> None:
    """Refuse rows that `join` would refuse: negative, missing or infinite numbers, names that are none."""
    if not data.hides_names and (found := _fault(Rows(data.rows), data.columns)):
        raise Denied("data", found)


def mark_of(data: Data, order: tuple[int, ...]) -> str:
    """By which the same rows are known again."""
    return _mark(Rows(data.rows), order)


def supports_of(rows: Any) -> np.ndarray:
    """How many rows have a value in each column; counted once in a process for a table that stays as it is."""
    return _supports(Rows(rows))


def without_rare(rows: Any, order: tuple[int, ...], least: int) -> Any:
    """These columns, in this order, with zeros in those that fewer rows use; made once in a process."""
    return _without_rare(Rows(rows), order, least)


@lru_cache(maxsize=2)
def _supports(rows: Rows) -> np.ndarray:
    return column_supports(rows.held)


@lru_cache(maxsize=1)
def _without_rare(rows: Rows, order: tuple[int, ...], least: int) -> Any:
    rare = supports_of(rows.held)[list(order)] < least
    chosen = rows.held[:, list(order)]
    if hasattr(chosen, "tocsr"):
        kept = chosen.tocsr().copy()
        kept.data[rare[kept.indices]] = 0
        kept.eliminate_zeros()
        return kept
    kept = np.array(chosen, order="C")
    kept[:, rare] = 0
    return kept


def rare_columns(rows: Any, order: tuple[int, ...], least: int) -> tuple[int, float]:
    """How many of these columns are used by some rows, and by fewer than `least`; and their share of ‖X‖²."""
    counts, energies = supports_of(rows)[list(order)], energies_of(rows)[list(order)]
    rare = (counts > 0) & (counts < least)
    return int(rare.sum()), float(energies[rare].sum() / (energies.sum() or 1.0))


def energies_of(rows: Any) -> np.ndarray:
    """Σ x² of each column; computed once in a process for a table that stays as it is."""
    return _energies(Rows(rows))


@lru_cache(maxsize=2)
def _energies(rows: Rows) -> np.ndarray:
    matrix = rows.held if hasattr(rows.held, "column_energies") else as_matrix(rows.held)
    return np.asarray(matrix.column_energies(), np.float64)


def told_of_rare(data: Data, order: tuple[int, ...], least: int) -> str:
    """For the log of a site: what is set to zero in a run; nothing where no column is."""
    count, share = rare_columns(data.rows, order, least)
    if not count:
        return ""
    return (
        f"{count} of {len(order)} columns are zero in this run, because fewer than {least} rows use them "
        f'(rare_columns = "zero"). They hold {share:.2%} of the squared norm.'
    )


def require_same(data: Data, started: Started) -> None:
    """Refuse rows that are not those that a run has begun with."""
    order, (rows, type_) = data.order(started.columns), started.rows
    if (data.n_rows, data.type) != (rows, type_):
        found = f"{data.n_rows} of {data.type}"
        raise Denied("layout", f"The run began with {rows} rows of {type_}; now there are {found}.")
    if mark_of(data, order) != started.mark:
        raise Denied(
            "data",
            "The rows of this site are not those that the run began with: as many, with other numbers. Put the data "
            "back as they were, or let a new run begin with these.",
        )


@lru_cache(maxsize=1)
def _fault(rows: Rows, columns: tuple[str, ...]) -> str:
    try:
        require_factorizable(rows.held, columns)
    except PartsongError as error:
        return str(error)
    return ""


@lru_cache(maxsize=2)
def _mark(rows: Rows, order: tuple[int, ...]) -> str:
    found = hashlib.sha256()
    for piece in _pieces(rows.held, order):
        found.update(piece)
    return found.hexdigest()


def _pieces(rows: Any, order: tuple[int, ...]) -> Iterator[bytes]:
    if isinstance(rows, HeldWords):
        yield "\n".join(rows.words).encode("utf-8", "surrogatepass")
        yield np.asarray(rows.documents, np.int64).tobytes()
        return
    yield f"{rows.shape[0]} × {len(order)} {rows.dtype}\n".encode()
    columns = None if order == tuple(range(rows.shape[1])) else list(order)
    if hasattr(rows, "tocsr"):
        chosen = rows.tocsr() if columns is None else rows.tocsr()[:, columns]
        chosen = chosen if chosen.has_canonical_format else chosen.copy()
        chosen.sum_duplicates()
        yield np.asarray(chosen.indptr, np.int64).tobytes()
        yield np.asarray(chosen.indices, np.int64).tobytes()
        yield np.ascontiguousarray(chosen.data).tobytes()
        return
    step = max(1, BLOCK // max(1, rows.dtype.itemsize * rows.shape[1]))
    for start in range(0, rows.shape[0], step):
        block = rows[start : start + step]
        yield np.ascontiguousarray(block if columns is None else block[:, columns]).tobytes()


# ---- site log ---------------------------------------------------------------------------------------------------
#
# The log of a site, for its owner alone: reasons with names and values, which never leave.
#
# A server can ask for what is refused as often as it likes, and its own words may be in a reason: lines are cut, and a
# log that is full takes the place of the one before it (site.log.1), so that both stay below FULL and a line.

LOG = "site.log"
LONGEST = 8192
"""Letters of a text that are kept: half of them from its end, where an error says what it is."""
FULL = 1 << 23
"""Bytes."""


def write_down(folder: Path, code: str, text: str) -> None:
    """One line, whatever is in the text; a log that cannot be written changes nothing else."""
    when = datetime.now(UTC).isoformat(timespec="seconds")
    line = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in _cut(text))
    with contextlib.suppress(OSError, ValueError):
        place = folder / LOG
        if place.exists() and place.stat().st_size > FULL:
            os.replace(place, folder / f"{LOG}.1")
        descriptor = os.open(place, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with open(descriptor, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{when} [{code}] {line}\n")


def _cut(text: str) -> str:
    half, more = LONGEST // 2, len(text) - LONGEST
    return text if more <= 0 else f"{text[:half]} […{more} letters left out…] {text[-half:]}"
