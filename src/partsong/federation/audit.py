"""What left a site: one line for every message out, chained, without values and without names of rows or columns."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from partsong.core import Message, Program, type_name
from partsong.errors import FormatError
from partsong.federation.audit_report import Verified, row_of, verified
from partsong.federation.chain import Chain
from partsong.federation.refusals import Denied
from partsong.federation.wire import Refusal, Reply


@dataclass(frozen=True, slots=True)
class Released:
    """Rounds and attempts of a run of which something has left, and whether its end was answered."""

    works: frozenset[tuple[int, int]]
    is_over: bool


@dataclass(frozen=True, slots=True)
class Audit:
    """The log of a site."""

    path: Path

    def note(self, reply: Reply, payload: bytes, *, again: bool, protection: dict[str, Any]) -> None:
        """A message that is about to leave; the line is on the disk when this returns."""
        refusal = reply.answer.code if isinstance(reply.answer, Refusal) else None
        body = Message({}) if isinstance(reply.answer, Refusal) else reply.answer
        Chain(self.path).append(
            {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                **reply.nonce.told(),
                "refusal": refusal,
                "again": again,
                "arrays": [_described(name, array) for name, array in sorted(body.arrays.items())],
                "bytes": len(payload),
                "sha256": hashlib.sha256(payload).hexdigest(),
                **protection,
            }
        )

    def released(self, run: str) -> Released | None:
        """What of a run has left, as far as it was no refusal; None where the log does not know the run."""
        try:
            lines = [line for line in Chain(self.path).lines() if line["run"] == run]
        except FormatError as error:
            raise Denied("ledger", str(error)) from error
        answers = [line for line in lines if line["refusal"] is None]
        works = frozenset((line["round"], line["attempt"]) for line in answers if line["kind"] in ("work", "reduce"))
        return Released(works, any(line["kind"] == "finish" for line in answers)) if lines else None

    def verify(self, noted: str | None = None) -> Verified:
        """The number of lines, times and the last hash, if each follows from the one before; BrokenChain else."""
        return verified(self.path, noted)

    def show(self) -> Iterator[str]:
        """For people, one line each."""
        return ("  ".join(row_of(line)) for line in Chain(self.path).lines())


def protection_of(program: Program | None, epsilon: float | None) -> dict[str, Any]:
    """Clip, noise and ε spent so far, as far as a program has them."""
    release: Any = getattr(program, "release", None)
    clip: Any = getattr(getattr(program, "mechanism", None), "clip", getattr(program, "row_bound", None))
    noise = None if release is None else release.noise_multiplier
    return {"clip": clip, "noise_multiplier": noise, "epsilon": epsilon}


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
