"""What left a site: one line for every message out, chained, without values and without names of rows or columns.

Refusals that come by the thousand are the exception: they are counted, and later lines tell how many (`refusal_count`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from partsong.core import Program, type_name
from partsong.errors import FormatError
from partsong.federation.audit_report import Verified, row_of, verified
from partsong.federation.chain import Chain, Line
from partsong.federation.refusal_count import RefusalCount
from partsong.federation.wire import Kind, Nonce, Refusal, Reply
from partsong.privacy.release import Release


@dataclass(frozen=True, slots=True)
class Released:
    """Rounds and attempts of a run of which something has left, with how much noise; whether anything but refusals was
    answered in it, and its end.
    """

    works: Mapping[tuple[int, int], float | None] = field(default_factory=dict)
    is_begun: bool = False
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Departures:
    """What has left, by run, as far as it was no refusal; a run with nothing but refusals is there as well."""

    runs: Mapping[str, Released] = field(default_factory=dict)

    def with_lines(self, lines: Sequence[Line]) -> Departures:
        """With more of them."""
        works: dict[str, dict[tuple[int, int], float | None]] = {}
        begun = {line["run"] for line in lines if line["refusal"] is None}
        over = {line["run"] for line in lines if line["kind"] == "finish" and line["refusal"] is None}
        for line in lines:
            own = works.setdefault(line["run"], {})
            if line["refusal"] is None and line["kind"] in ("work", "reduce"):
                own.setdefault((line["round"], line["attempt"]), line.get("noise_multiplier"))
        found = dict(self.runs)
        for run, own in works.items():
            before = found.get(run, Released())
            is_begun, is_over = before.is_begun or run in begun, before.is_over or run in over
            found[run] = Released({**own, **before.works}, is_begun, is_over)
        return Departures(found)


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

    def make_up(self, place: tuple[str, int, int], release: Release | None, why: str) -> None:
        """An attempt that was charged, of whose message nothing is known but that it may have left, and what it was
        charged at; `release` None: without noise, as in all other lines.
        """
        run, number, attempt = place
        nonce = Nonce(run, number, attempt, Kind.WORK).told()
        known: dict[str, Any] = {"refusal": None, "again": False, "arrays": [], "bytes": 0, "sha256": None}
        self._append({**nonce, **known, **_protection(release, clip=None, epsilon=None), "made_up": why})

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

    def verify(self, noted: str | None = None) -> Verified:
        """The number of lines, times and the last hash, if each follows from the one before; BrokenChain else."""
        return verified(self.path, noted)

    def show(self) -> Iterator[str]:
        """For people, one line each."""
        return ("  ".join(row_of(line)) for line in Chain(self.path).lines())

    def _note_refusal(self, reply: Reply, code: str, digest: str, more: Mapping[str, Any]) -> None:
        """By a line, or where there were many by a count that the next line tells."""
        counter, last = RefusalCount.beside(self.path), Chain(self.path).number
        before = counter.today()
        after, unlisted = before.with_one(digest), before.told_after(last)
        if before.has_line(digest):
            told = {"refusal": code, "again": False, "arrays": [], "sha256": digest}
            self._append({**reply.nonce.told(), **told, **more})
            counter.keep(replace(after, after=last + 1, unlisted={}))
        else:
            counter.keep(replace(after, after=last, unlisted={**unlisted, code: unlisted.get(code, 0) + 1}))

    def _append(self, entry: Mapping[str, Any]) -> None:
        """A line, with the time and the refusals since the one before that have none."""
        chain = Chain(self.path)
        unlisted = RefusalCount.beside(self.path).today().told_after(chain.number)
        when = datetime.now(UTC).isoformat(timespec="milliseconds")
        chain.append({"time": when, **entry, **({"unlisted": unlisted} if unlisted else {})})


def protection_of(program: Program | None, epsilon: float | None) -> dict[str, Any]:
    """Clip, noise and ε spent so far, as far as a program has them."""
    release: Any = getattr(program, "release", None)
    clip: Any = getattr(getattr(program, "mechanism", None), "clip", getattr(program, "row_bound", None))
    return _protection(release, clip, epsilon)


def _protection(release: Release | None, clip: Any, epsilon: float | None) -> dict[str, Any]:
    """As lines of the log have it."""
    noise = None if release is None else release.noise_multiplier
    told = None if release is None else release.to_json()
    return {"clip": clip, "noise_multiplier": noise, "epsilon": epsilon, "release": told}


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
