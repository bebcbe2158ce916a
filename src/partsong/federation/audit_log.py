"""What left a site: one line for every message out, chained, without values and without names of rows or columns.

A server can ask for what is refused as often as it likes. Of the refusals of a day (UTC) the first MOST_DIFFERENT that
differ have a line, and so have the 1st, 2nd, 4th, 8th … of all. Each of the others is counted in a file beside the log
before it leaves, and the next line of any kind has the counts (`unlisted`). A process that is killed between a line and
that file says nothing twice, and forgets nothing: counts after a line that is not the last one are in a line.
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
    """An attempt of which something has left: with how much noise, at what cost, and in which line first."""

    noise: float | None
    release: Mapping[str, Any] | None
    line: int


@dataclass(frozen=True, slots=True)
class RunReleases:
    """Rounds and attempts of a run of which something has left; whether anything but refusals was answered in it, and
    its end.
    """

    attempts: Mapping[tuple[int, int], SentAttempt] = field(default_factory=dict)
    has_started: bool = False
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class ReleaseHistory:
    """What has left, by run, as far as it was no refusal; a run with nothing but refusals is there as well. `lines`:
    how many the log has.
    """

    runs: Mapping[str, RunReleases] = field(default_factory=dict)
    lines: int = 0

    def was_sent(self, run: str, at: tuple[int, int]) -> bool:
        """Whether anything of an attempt has left."""
        return run in self.runs and at in self.runs[run].attempts

    def add_lines(self, lines: Sequence[Line]) -> ReleaseHistory:
        """With more of them."""
        works: dict[str, dict[tuple[int, int], SentAttempt]] = {}
        begun = {line["run"] for line in lines if line["refusal"] is None}
        over = {line["run"] for line in lines if line["kind"] == "finish" and line["refusal"] is None}
        for line in lines:
            own = works.setdefault(line["run"], {})
            if line["refusal"] is None and line["kind"] in ("work", "reduce"):
                departure = SentAttempt(line.get("noise_multiplier"), line.get("release"), line["number"])
                own.setdefault((line["round"], line["attempt"]), departure)
        found = dict(self.runs)
        for run, own in works.items():
            before = found.get(run, RunReleases())
            is_begun, is_over = before.has_started or run in begun, before.is_over or run in over
            found[run] = RunReleases({**own, **before.attempts}, is_begun, is_over)
        return ReleaseHistory(found, lines[-1]["number"])


@dataclass(frozen=True, slots=True)
class AuditLog:
    """The log of a site."""

    path: Path

    def record(self, reply: Reply, payload: bytes, *, is_repeat: bool, protection: dict[str, Any]) -> None:
        """A message that is about to leave; its line, or for a refusal its count, is on the disk when this returns."""
        digest = hashlib.sha256(payload).hexdigest()
        if isinstance(reply.answer, Refusal):
            self._record_refusal(reply, reply.answer.code, digest, {"bytes": len(payload), **protection})
            return
        arrays = [_describe_array(name, array) for name, array in sorted(reply.answer.arrays.items())]
        told = {"refusal": None, "again": is_repeat, "arrays": arrays, "bytes": len(payload), "sha256": digest}
        self._append({**reply.nonce.to_dict(), **told, **protection})

    def history(self) -> ReleaseHistory:
        """All that has left, after every line was compared."""
        return Chain(self.path).fold(ReleaseHistory.add_lines, ReleaseHistory())

    def run_releases(self, run: str) -> RunReleases | None:
        """What of a run has left; None where the log does not know the run."""
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
        """By a line, or where there were many by a count that the next line tells."""
        counts, last = RefusalCounts.today(self.path), Chain(self.path).number
        is_new = digest not in counts.different and len(counts.different) < MAX_DISTINCT
        has_line = is_new or (counts.count & (counts.count + 1)) == 0
        unlisted = counts.unlisted_after(last)
        if has_line:
            told = {"refusal": code, "again": False, "arrays": [], "sha256": digest}
            self._append({**reply.nonce.to_dict(), **told, **more})
            last, unlisted = last + 1, {}
        else:
            unlisted[code] = unlisted.get(code, 0) + 1
        different = (*counts.different, digest) if is_new else counts.different
        replace(counts, count=counts.count + 1, different=different, after=last, unlisted=unlisted).save(self.path)

    def _append(self, entry: Mapping[str, Any]) -> None:
        """A line, with the time and the refusals since the one before that have none."""
        chain = Chain(self.path)
        unlisted = RefusalCounts.today(self.path).unlisted_after(chain.number)
        when = datetime.now(UTC).isoformat(timespec="milliseconds")
        chain.append({"time": when, **entry, **({"unlisted": unlisted} if unlisted else {})})


@dataclass(frozen=True, slots=True)
class RefusalCounts:
    """Refusals of a day: how many, hashes of the first that differ, and of each code how many have no line yet, as of
    line `after` of the log.
    """

    day: str = ""
    count: Count = 0
    different: tuple[str, ...] = ()
    after: Count = 0
    unlisted: dict[str, Count] = field(default_factory=dict)

    @staticmethod
    def today(log: Path) -> RefusalCounts:
        """Those beside a log, for this day; what no line has stays from the days before. A file that cannot be
        understood was not written here, and is replaced.
        """
        try:
            found = msgspec.json.decode(log.with_name(REFUSALS_FILE).read_bytes(), type=RefusalCounts)
        except (OSError, msgspec.MsgspecError):
            found = RefusalCounts()
        day = _today()
        return found if found.day == day else RefusalCounts(day, after=found.after, unlisted=found.unlisted)

    def unlisted_after(self, last: int) -> dict[str, int]:
        """What the line that follows the last one has to say."""
        return dict(self.unlisted) if self.after == last else {}

    def save(self, log: Path) -> None:
        """On the disk when this returns."""
        write_text(log.with_name(REFUSALS_FILE), json.dumps(asdict(self)) + "\n", private=True)


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def protection_fields(program: Program | None, epsilon: float | None) -> dict[str, Any]:
    """Clip, noise, cost, and ε spent so far, as far as a program has them."""
    release: Any = None if program is None else program.traits.release
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
# The log for the people who answer for a site: is it whole, what has left, how much in each run; never values.

AUDIT_FILE = "audit.jsonl"
HASH_DIGITS = len(GENESIS_HASH)
COLUMNS = (
    "line", "time (UTC)", "run", "round", "kind", "bytes", "norm", "clip", "ε spent", "again", "arrays or refusal",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class VerificationResult:
    """A log whose lines follow from each other; `unfinished`: bytes of a last line without its end."""

    lines: int
    first: str | None
    last: str | None
    head: str
    unfinished: int
    since: int | None = None
    """Lines that were added since the hash that was noted elsewhere."""


def find_log(place: Path) -> Path:
    """The log in a site's folder, in its state folder, or the file itself."""
    tried = (place / "state" / AUDIT_FILE, place / AUDIT_FILE) if place.is_dir() else (place,)
    found = next((path for path in tried if path.is_file()), None)
    if found is None:
        raise FileError(
            f"{place}: there is no {AUDIT_FILE}. Name the folder of a site, or the file; where nothing was ever "
            "sent there is none."
        )
    return found


def verify_log(path: Path, noted: str | None = None) -> VerificationResult:
    """Compare all lines, and look for a hash that was `noted` elsewhere: BrokenChain where no line has it."""
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
                f"{path}: each of its {number} lines follows from the one before, but none has the hash that was noted "
                "elsewhere: lines were taken from its end, or all of it was written anew. Keep the file as it is.",
                number + 1,
                head,
            )
        since = number - at
    return VerificationResult(number, first, last, head, unfinished, since)


@dataclass(frozen=True, slots=True)
class RunTotals:
    """What has left in one run: messages, bytes, repeated ones (sent before with the same bytes), refusals."""

    messages: int = 0
    bytes: int = 0
    again: int = 0
    refusals: int = 0
    rounds: int = 0
    epsilon: float | None = None
    """Spent by the site over all its runs, after the last message of this one."""

    def add_line(self, line: Mapping[str, Any]) -> RunTotals:
        """With one line more."""
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
    """All lines up to the first that does not fit, and what is wrong with that one."""
    found: list[dict[str, Any]] = []
    try:
        for line in Chain(path).lines():
            found.append(line)
    except BrokenChain as error:
        return found, error
    return found, None


def totals_by_run(lines: Iterable[Mapping[str, Any]]) -> dict[str, RunTotals]:
    """By run, in the order in which they began."""
    found: dict[str, RunTotals] = {}
    for line in lines:
        found[line["run"]] = found.get(line["run"], RunTotals()).add_line(line)
    return found


def count_unlisted(path: Path, lines: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Refusals by code that have no line of their own: those that lines tell of, and those since the last line."""
    last = int(lines[-1]["number"]) if lines else 0
    found = Counter(RefusalCounts.today(path).unlisted_after(last))
    for line in lines:
        found.update(line.get("unlisted", {}))
    return dict(sorted(found.items()))


def format_row(line: Mapping[str, Any]) -> tuple[str, ...]:
    """One line for people."""
    norms = [format_cell(one["norm"]) for one in line["arrays"] if one["norm"] is not None]
    arrays = ", ".join(f"{one['name']} {'×'.join(map(str, one['shape'])) or 'number'}" for one in line["arrays"])
    kind = f"{line['kind']} {line['phase']}" if line["kind"] in ("reduce", "names") else line["kind"]
    attempt = f", attempt {line['attempt']}" if line["attempt"] else ""
    what = f"refused: {line['refusal']}" if line["refusal"] else arrays or "nothing"
    what = f"made up: {line['made_up']}" if "made_up" in line else what
    what += f" (before it {sum(line['unlisted'].values())} refusals without a line)" if "unlisted" in line else ""
    words = (line["number"], str(line["time"])[:19].replace("T", " "), line["run"], f"{line['round']}{attempt}", kind)
    numbers = (line["bytes"], " ".join(norms), format_cell(line.get("clip")), format_cell(line.get("epsilon")))
    return (*map(str, words), *map(str, numbers), "again" if line["again"] else "", what)


def format_cell(value: Any) -> str:
    """A cell of a table."""
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _parse_hash(text: str) -> str:
    letters = "".join(letter for letter in text.lower() if letter not in "- \t\n:")
    if len(letters) != HASH_DIGITS or set(letters) - set("0123456789abcdef"):
        raise ParameterError(
            f"A hash of a line has {HASH_DIGITS} hexadecimal letters; got {text[:80]!r}. `partsong audit verify "
            "FOLDER` prints it."
        )
    return letters
