"""What left a site: one line for every message out, chained, without values and without names of rows or columns.

Refusals that come by the thousand are the exception: they are counted, and later lines have the count
(`refusal_count`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from partsong.core.interfaces import Program, type_name
from partsong.errors import FormatError
from partsong.federation.chain import Chain, Line
from partsong.federation.refusal_count import RefusalCount
from partsong.federation.wire import Refusal, Reply


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
        counter, last = RefusalCount.beside(self.path), Chain(self.path).number
        before = counter.today()
        after, unlisted = before.with_one(digest), before.unlisted_after(last)
        if before.has_line(digest):
            told = {"refusal": code, "again": False, "arrays": [], "sha256": digest}
            self._append({**reply.nonce.told(), **told, **more})
            counter.keep(replace(after, after=last + 1, unlisted={}))
        else:
            counter.keep(replace(after, after=last, unlisted={**unlisted, code: unlisted.get(code, 0) + 1}))

    def _append(self, entry: Mapping[str, Any]) -> None:
        """A line, with the time and the refusals since the one before that have none."""
        chain = Chain(self.path)
        unlisted = RefusalCount.beside(self.path).today().unlisted_after(chain.number)
        when = datetime.now(UTC).isoformat(timespec="milliseconds")
        chain.append({"time": when, **entry, **({"unlisted": unlisted} if unlisted else {})})


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
