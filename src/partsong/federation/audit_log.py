"""What left a site: one line for every message out, chained, without values and without names of rows or columns.

A server can ask for what is refused as often as it likes. Of the refusals of a day (UTC) the first MOST_DIFFERENT that
differ have a line, and so have the 1st, 2nd, 4th, 8th … of all. Each of the others is counted in a file beside the log
before it leaves, and the next line of any kind has the counts (`unlisted`). A process that is killed between a line and
that file says nothing twice, and forgets nothing: counts after a line that is not the last one are in a line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from partsong.core.interfaces import Program, type_name
from partsong.errors import FormatError
from partsong.federation.chain import Chain, Line
from partsong.federation.toml_files import Count
from partsong.federation.wire import Refusal, Reply
from partsong.io.write import replacing

REFUSALS = "refusals"
"""The file with the counts, beside the log."""
MOST_DIFFERENT = 16


@dataclass(frozen=True, slots=True)
class Departure:
    """An attempt of which something has left: with how much noise, at what cost, and in which line first."""

    noise: float | None
    release: Mapping[str, Any] | None
    line: int


@dataclass(frozen=True, slots=True)
class Released:
    """Rounds and attempts of a run of which something has left; whether anything but refusals was answered in it, and
    its end.
    """

    works: Mapping[tuple[int, int], Departure] = field(default_factory=dict)
    is_begun: bool = False
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Departures:
    """What has left, by run, as far as it was no refusal; a run with nothing but refusals is there as well. `lines`:
    how many the log has.
    """

    runs: Mapping[str, Released] = field(default_factory=dict)
    lines: int = 0

    def has_left(self, run: str, at: tuple[int, int]) -> bool:
        """Whether anything of an attempt has left."""
        return run in self.runs and at in self.runs[run].works

    def with_lines(self, lines: Sequence[Line]) -> Departures:
        """With more of them."""
        works: dict[str, dict[tuple[int, int], Departure]] = {}
        begun = {line["run"] for line in lines if line["refusal"] is None}
        over = {line["run"] for line in lines if line["kind"] == "finish" and line["refusal"] is None}
        for line in lines:
            own = works.setdefault(line["run"], {})
            if line["refusal"] is None and line["kind"] in ("work", "reduce"):
                departure = Departure(line.get("noise_multiplier"), line.get("release"), line["number"])
                own.setdefault((line["round"], line["attempt"]), departure)
        found = dict(self.runs)
        for run, own in works.items():
            before = found.get(run, Released())
            is_begun, is_over = before.is_begun or run in begun, before.is_over or run in over
            found[run] = Released({**own, **before.works}, is_begun, is_over)
        return Departures(found, lines[-1]["number"])


@dataclass(frozen=True, slots=True)
class Audit:
    """The log of a site."""

    path: Path

    def note(self, reply: Reply, payload: bytes, *, again: bool, protection: dict[str, Any]) -> None:
        """A message that is about to leave; its line, or for a refusal its count, is on the disk when this returns."""
        digest = hashlib.sha256(payload).hexdigest()
        if isinstance(reply.answer, Refusal):
            self._note_refusal(reply, reply.answer.code, digest, {"bytes": len(payload), **protection})
            return
        arrays = [_described(name, array) for name, array in sorted(reply.answer.arrays.items())]
        told = {"refusal": None, "again": again, "arrays": arrays, "bytes": len(payload), "sha256": digest}
        self._append({**reply.nonce.told(), **told, **protection})

    def departures(self) -> Departures:
        """All that has left, after every line was compared."""
        return Chain(self.path).folded(Departures.with_lines, Departures())

    def released(self, run: str) -> Released | None:
        """What of a run has left; None where the log does not know the run."""
        return self.departures().runs.get(run)

    @property
    def is_sound(self) -> bool:
        """Whether each line follows from the one before."""
        try:
            self.departures()
        except FormatError:
            return False
        return True

    def _note_refusal(self, reply: Reply, code: str, digest: str, more: Mapping[str, Any]) -> None:
        """By a line, or where there were many by a count that the next line tells."""
        counts, last = RefusalCounts.today(self.path), Chain(self.path).number
        is_new = digest not in counts.different and len(counts.different) < MOST_DIFFERENT
        has_line = is_new or (counts.count & (counts.count + 1)) == 0
        unlisted = counts.unlisted_after(last)
        if has_line:
            told = {"refusal": code, "again": False, "arrays": [], "sha256": digest}
            self._append({**reply.nonce.told(), **told, **more})
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
            found = msgspec.json.decode(log.with_name(REFUSALS).read_bytes(), type=RefusalCounts)
        except (OSError, msgspec.MsgspecError):
            found = RefusalCounts()
        day = _today()
        return found if found.day == day else RefusalCounts(day, after=found.after, unlisted=found.unlisted)

    def unlisted_after(self, last: int) -> dict[str, int]:
        """What the line that follows the last one has to say."""
        return dict(self.unlisted) if self.after == last else {}

    def save(self, log: Path) -> None:
        """On the disk when this returns."""
        with replacing(log.with_name(REFUSALS), private=True) as draft:
            draft.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def protection_of(program: Program | None, epsilon: float | None) -> dict[str, Any]:
    """Clip, noise, cost, and ε spent so far, as far as a program has them."""
    release: Any = None if program is None else program.traits.release
    clip: Any = getattr(getattr(program, "mechanism", None), "clip", getattr(program, "row_bound", None))
    noise, cost = (None, None) if release is None else (release.noise_multiplier, release.to_json())
    return {"clip": clip, "noise_multiplier": noise, "epsilon": epsilon, "release": cost}


def _described(name: str, array: Any) -> dict[str, Any]:
    values = np.asarray(array)
    norm = float(np.linalg.norm(values.astype(np.float64))) if values.dtype.kind in "fi" and values.size else None
    return {
        "name": name,
        "shape": list(values.shape),
        "type": type_name(values.dtype),
        "bytes": int(values.nbytes),
        "norm": norm if norm is None or np.isfinite(norm) else None,
    }
