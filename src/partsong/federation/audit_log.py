"""Audit log of a site: one hash-chained line per outgoing message, without values and without row or column names.

A server can repeat refused requests without limit. Of the refusals of a day (UTC), the first MAX_DISTINCT different
ones and the 1st, 2nd, 4th, 8th … have a line. Each of the others is counted in a file beside the log before it is sent,
and the next line of any kind includes the counts (`unlisted`). The file names the line that its counts follow, so that
a process killed between the two neither loses nor repeats a count.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from partsong.core.interfaces import Program, type_name
from partsong.errors import BrokenChain, FileError, FormatError, ParameterError
from partsong.federation.chain import GENESIS_HASH, Chain, Line
from partsong.federation.toml_files import Count
from partsong.federation.wire import Refusal, Reply
from partsong.io.write import write_text

REFUSALS_FILE = "refusals"
"""The file with the counts, beside the log."""
MAX_DISTINCT = 16


@dataclass(frozen=True, slots=True)
class SentAttempt:
    """An attempt of which something has left: its noise, its cost, and the first line."""

    noise: float | None
    release: Mapping[str, Any] | None
    line: int


@dataclass(frozen=True, slots=True)
class RunReleases:
    """Rounds and attempts of a run of which something has left. `has_started`: any request was answered without a
    refusal. `is_over`: so was the end of the run.
    """

    attempts: Mapping[tuple[int, int], SentAttempt] = field(default_factory=dict)
    has_started: bool = False
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class ReleaseHistory:
    """What has left, by run, without refusals; runs with nothing but refusals are included. `lines`: length
    of the log.
    """

    runs: Mapping[str, RunReleases] = field(default_factory=dict)
    lines: int = 0

    def was_sent(self, run: str, at: tuple[int, int]) -> bool:
        """Whether anything of an attempt has left."""
        return run in self.runs and at in self.runs[run].attempts

    def add_lines(self, lines: Sequence[Line]) -> ReleaseHistory:
        """Return the history after more lines."""
        works: dict[str, dict[tuple[int, int], SentAttempt]] = {}
        started = {line["run"] for line in lines if line["refusal"] is None}
        over = {line["run"] for line in lines if line["kind"] == "finish" and line["refusal"] is None}
        for line in lines:
            own = works.setdefault(line["run"], {})
            if line["refusal"] is None and line["kind"] in ("work", "reduce"):
                departure = SentAttempt(line.get("noise_multiplier"), line.get("release"), line["number"])
                own.setdefault((line["round"], line["attempt"]), departure)
        found = dict(self.runs)
        for run, own in works.items():
            before = found.get(run, RunReleases())
            has_started, is_over = before.has_started or run in started, before.is_over or run in over
            found[run] = RunReleases({**own, **before.attempts}, has_started, is_over)
        return ReleaseHistory(found, lines[-1]["number"])


@dataclass(frozen=True, slots=True)
class AuditLog:
    """The audit log of a site."""

    path: Path

    def record(self, reply: Reply, payload: bytes, *, is_repeat: bool, protection: dict[str, Any]) -> None:
        """Record a message that is about to leave. Its line, or count of a refusal, is on disk when this returns."""
        digest = hashlib.sha256(payload).hexdigest()
        if isinstance(reply.answer, Refusal):
            self._record_refusal(reply, reply.answer.code, digest, {"bytes": len(payload), **protection})
            return
        arrays = [_describe_array(name, array) for name, array in sorted(reply.answer.arrays.items())]
        entry = {"refusal": None, "again": is_repeat, "arrays": arrays, "bytes": len(payload), "sha256": digest}
        self._append({**reply.nonce.to_dict(), **entry, **protection})

    def history(self) -> ReleaseHistory:
        """Verify all lines and return what has left."""
        return Chain(self.path).fold(ReleaseHistory.add_lines, ReleaseHistory())

    def run_releases(self, run: str) -> RunReleases | None:
        """Return what has left in a run; None if the log has no line of it."""
        return self.history().runs.get(run)

    @property
    def is_intact(self) -> bool:
        """Whether each line follows from the one before."""
        try:
            self.history()
        except FormatError:
            return False
        return True

    def _record_refusal(self, reply: Reply, code: str, digest: str, more: Mapping[str, Any]) -> None:
        """Record a refusal by a line or, if there are many, by a count that the next line includes."""
        counts, last = RefusalCounts.today(self.path), Chain(self.path).number
        is_new = digest not in counts.different and len(counts.different) < MAX_DISTINCT
        has_line = is_new or (counts.count & (counts.count + 1)) == 0
        unlisted = counts.unlisted_after(last)
        if has_line:
            entry = {"refusal": code, "again": False, "arrays": [], "sha256": digest}
            self._append({**reply.nonce.to_dict(), **entry, **more})
            last, unlisted = last + 1, {}
        else:
            unlisted[code] = unlisted.get(code, 0) + 1
        different = (*counts.different, digest) if is_new else counts.different
        replace(counts, count=counts.count + 1, different=different, after=last, unlisted=unlisted).save(self.path)

    def _append(self, entry: Mapping[str, Any]) -> None:
        """Append a line with the time and the counts of refusals since the last line."""
        chain = Chain(self.path)
        unlisted = RefusalCounts.today(self.path).unlisted_after(chain.number)
        when = datetime.now(UTC).isoformat(timespec="milliseconds")
        chain.append({"time": when, **entry, **({"unlisted": unlisted} if unlisted else {})})


@dataclass(frozen=True, slots=True)
class RefusalCounts:
    """Refusals of a day: their number, hashes of the first different ones, and for each code the number without a line
    since line `after` of the log.
    """

    day: str = ""
    count: Count = 0
    different: tuple[str, ...] = ()
    after: Count = 0
    unlisted: dict[str, Count] = field(default_factory=dict)

    @staticmethod
    def today(log: Path) -> RefusalCounts:
        """Return today's counts beside a log; unlisted refusals of earlier days stay. An unreadable file is
        replaced.
        """
        try:
            found = msgspec.json.decode(log.with_name(REFUSALS_FILE).read_bytes(), type=RefusalCounts)
        except (OSError, msgspec.MsgspecError):
            found = RefusalCounts()
        day = _today()
        return found if found.day == day else RefusalCounts(day, after=found.after, unlisted=found.unlisted)

    def unlisted_after(self, last: int) -> dict[str, int]:
        """Return the counts that the line after `last` must include."""
        return dict(self.unlisted) if self.after == last else {}

    def save(self, log: Path) -> None:
        """Write the counts; they are on disk when this returns."""
        write_text(log.with_name(REFUSALS_FILE), json.dumps(asdict(self)) + "\n", private=True)


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def protection_fields(program: Program | None, epsilon: float | None, exchange: int = 0) -> dict[str, Any]:
    """Return clip, noise and cost of an exchange of a program, and ε spent; None where it has none."""
    release: Any = None if program is None else program.traits.release_at(max(exchange, 0))
    clip: Any = getattr(getattr(program, "mechanism", None), "clip", getattr(program, "row_bound", None))
    noise, cost = (None, None) if release is None else (release.noise_multiplier, release.to_json())
    return {"clip": clip, "noise_multiplier": noise, "epsilon": epsilon, "release": cost}


def _describe_array(name: str, array: Any) -> dict[str, Any]:
    values = np.asarray(array)
    norm = float(np.linalg.norm(values.astype(np.float64))) if values.dtype.kind in "fi" and values.size else None
    return {
        "name": name,
        "shape": list(values.shape),
        "type": type_name(values.dtype),
        "bytes": int(values.nbytes),
        "norm": norm if norm is None or np.isfinite(norm) else None,
    }


# ---- reading --------------------------------------------------------------------------------------------------------
#
# For the stewards of a site: verify the log, show what has left and the totals of each run; never values.

AUDIT_FILE = "audit.jsonl"
HASH_DIGITS = len(GENESIS_HASH)
COLUMNS = (
    "line", "time (UTC)", "run", "round", "kind", "bytes", "norm", "clip", "ε spent", "again", "arrays or refusal",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class VerificationResult:
    """A log whose lines are intact. `unfinished`: bytes of a last line without its end."""

    lines: int
    first: str | None
    last: str | None
    head: str
    unfinished: int
    since: int | None = None
    """Lines added since the hash that was noted elsewhere."""


def find_log(place: Path) -> Path:
    """Return the log in a site's folder, in its state folder, or the file itself."""
    tried = (place / "state" / AUDIT_FILE, place / AUDIT_FILE) if place.is_dir() else (place,)
    found = next((path for path in tried if path.is_file()), None)
    if found is None:
        raise FileError(
            f"{place}: there is no {AUDIT_FILE}. Name the folder of a site, or the file. A site that has never sent "
            "anything has no log."
        )
    return found


def verify_log(path: Path, noted: str | None = None) -> VerificationResult:
    """Verify all lines, and find a hash that was `noted` elsewhere; BrokenChain if no line has it."""
    wanted = None if noted is None else _parse_hash(noted)
    chain, first, last, number, head, since = Chain(path), None, None, 0, GENESIS_HASH, None
    at = 0 if wanted == GENESIS_HASH else None
    for line in chain.lines():
        number, head, last = line["number"], line["hash"], str(line.get("time"))
        first = first or last
        at = number if head == wanted else at
    unfinished = chain.partial_bytes()
    if wanted is not None:
        if at is None:
            raise BrokenChain(
                f"{path}: its {number} lines follow from each other, but none has the hash that was noted elsewhere. "
                "Lines were removed from its end, or the whole file was rewritten. Keep the file unchanged.",
                number + 1,
                head,
            )
        since = number - at
    return VerificationResult(number, first, last, head, unfinished, since)


@dataclass(frozen=True, slots=True)
class RunTotals:
    """What has left in one run: messages, bytes, repeats (the same bytes sent again), refusals."""

    messages: int = 0
    bytes: int = 0
    again: int = 0
    refusals: int = 0
    rounds: int = 0
    epsilon: float | None = None
    """Spent by the site over all its runs, after the last message of this run."""

    def add_line(self, line: Mapping[str, Any]) -> RunTotals:
        """Return the totals after one more line."""
        epsilon = line.get("epsilon")
        return RunTotals(
            self.messages + 1,
            self.bytes + int(line["bytes"]),
            self.again + bool(line["again"]),
            self.refusals + (line["refusal"] is not None),
            max(self.rounds, int(line["round"]) + (line["kind"] == "work")),
            self.epsilon if epsilon is None else float(epsilon),
        )


def read_intact_lines(path: Path) -> tuple[list[dict[str, Any]], BrokenChain | None]:
    """Return all lines before the first broken one, and the error of that line."""
    found: list[dict[str, Any]] = []
    try:
        for line in Chain(path).lines():
            found.append(line)
    except BrokenChain as error:
        return found, error
    return found, None


def totals_by_run(lines: Iterable[Mapping[str, Any]]) -> dict[str, RunTotals]:
    """Return totals by run, in the order in which the runs started."""
    found: dict[str, RunTotals] = {}
    for line in lines:
        found[line["run"]] = found.get(line["run"], RunTotals()).add_line(line)
    return found


def count_unlisted(path: Path, lines: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Count refusals without a line of their own, by code: those counted in lines, and those since the last line."""
    last = int(lines[-1]["number"]) if lines else 0
    found = Counter(RefusalCounts.today(path).unlisted_after(last))
    for line in lines:
        found.update(line.get("unlisted", {}))
    return dict(sorted(found.items()))


def format_row(line: Mapping[str, Any]) -> tuple[str, ...]:
    """Format a line as cells of a table."""
    norms = [format_cell(one["norm"]) for one in line["arrays"] if one["norm"] is not None]
    arrays = ", ".join(f"{one['name']} {'×'.join(map(str, one['shape'])) or 'number'}" for one in line["arrays"])
    kind = f"{line['kind']} {line['phase']}" if line["kind"] in ("reduce", "names") else line["kind"]
    attempt = f", attempt {line['attempt']}" if line["attempt"] else ""
    what = f"refused: {line['refusal']}" if line["refusal"] else arrays or "nothing"
    what = f"reconstructed: {line['made_up']}" if "made_up" in line else what
    what += f" (before it {sum(line['unlisted'].values())} refusals without a line)" if "unlisted" in line else ""
    words = (line["number"], str(line["time"])[:19].replace("T", " "), line["run"], f"{line['round']}{attempt}", kind)
    numbers = (line["bytes"], " ".join(norms), format_cell(line.get("clip")), format_cell(line.get("epsilon")))
    return (*map(str, words), *map(str, numbers), "again" if line["again"] else "", what)


def format_cell(value: Any) -> str:
    """Format a value as a cell of a table."""
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _parse_hash(text: str) -> str:
    letters = "".join(letter for letter in text.lower() if letter not in "- \t\n:")
    if len(letters) != HASH_DIGITS or set(letters) - set("0123456789abcdef"):
        raise ParameterError(
            f"A line's hash has {HASH_DIGITS} hexadecimal digits; got {text[:80]!r}. Copy it from `partsong audit "
            "verify FOLDER`."
        )
    return letters
