"""What a site has released, over all runs and restarts: a chained file that is written before anything is computed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partsong.errors import CompositionError
from partsong.federation.chain import Chain
from partsong.federation.policy import Allowance
from partsong.federation.refusals import Denied
from partsong.federation.wire import Request
from partsong.privacy.accounting import Ledger
from partsong.privacy.release import Release


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many attempts a round may have, and how many all rounds of a run may have together."""

    attempts: int
    lines: int


@dataclass(frozen=True, slots=True)
class SiteLedger:
    """One line for every attempt of every round of every run, with what it costs; `serial` is their number."""

    path: Path

    @property
    def chain(self) -> Chain:
        """The file."""
        return Chain(self.path)

    @property
    def serial(self) -> int:
        """How many releases were charged."""
        return self.chain.head()[0]

    def spent(self) -> Ledger:
        """All that was charged and had noise."""
        lines = [line for line in self.chain.lines() if line["release"] is not None]
        return Ledger(tuple((Release.from_json(line["release"]), line.get("count", 1)) for line in lines))

    def charge(
        self, request: Request, release: Release | None, allowance: Allowance | None, bounds: Bounds | None = None
    ) -> bool:
        """Write an attempt down, once; refused where the budget does not allow it, before anything is written.

        All attempts of a round are about one model and one history. True where the line was there before.
        """
        nonce, before = request.nonce, self.lines_of(request.nonce.run)
        own, digest, about = [nonce.run, nonce.round, nonce.attempt], request.digest, request.about
        for line in before:
            if line["attempt"] == own and line["digest"] != digest:
                raise Denied("conflict", f"Another request than that of ledger line {line['number']} for {own}.")
            if line["attempt"][1] == nonce.round and line.get("about", about) != about:
                raise Denied("conflict", f"Another model, or history, than that of ledger line {line['number']}.")
        if any(line["attempt"] == own for line in before):
            self._flush()
            return True
        self._require_few(bounds, [line for line in before if line["attempt"][1] == nonce.round], before)
        if allowance is not None:
            self.require_within(allowance, release)
        self._append(own, digest, release, 1, {"about": about})
        return False

    def require_within(self, allowance: Allowance, release: Release | None, count: int = 1) -> None:
        """Refuse releases that the site's budget does not cover, and all where some before had no noise."""
        require_within(allowance, self.spent(), release, count)
        noiseless = sum(line["release"] is None for line in self.chain.lines())
        if noiseless > allowance.noiseless_before:
            raise Denied(
                "noiseless",
                f"{noiseless} releases of the ledger had no noise, so that epsilon = {allowance.epsilon:g} is not true "
                f"of all that has left. If that is known, set privacy.noiseless_before = {noiseless} in site.toml.",
            )

    def lines_of(self, run: str) -> list[dict[str, Any]]:
        """All attempts of a run that were charged."""
        return [line for line in self.chain.lines() if line["attempt"][0] == run]

    def make_up(self, count: int, release: Release | None, why: str) -> None:
        """Charge releases that this copy of the ledger does not know of: for sites restored from an older copy."""
        for _ in range(count):
            self._append(["", 0, 0], why, release, 1)

    def _append(
        self,
        attempt: list[Any],
        digest: str,
        release: Release | None,
        count: int,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        told: Mapping[str, Any] | None = None if release is None else release.to_json()
        self.chain.append({"attempt": attempt, "digest": digest, "release": told, "count": count, **(more or {})})

    def _require_few(self, bounds: Bounds | None, of_round: list[Any], of_run: list[Any]) -> None:
        if bounds is not None and (len(of_round) >= bounds.attempts or len(of_run) >= bounds.lines):
            raise Denied(
                "attempts",
                f"{len(of_round)} attempts of this round and {len(of_run)} of the run were charged before; allowed: "
                f"{bounds.attempts} and {bounds.lines}.",
            )

    def _flush(self) -> None:
        """A line that was found may have been written by a process that was killed before it was flushed."""
        descriptor = os.open(self.path, os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def require_within(allowance: Allowance, spent: Ledger, release: Release | None, count: int = 1) -> None:
    """Refuse releases that the site's budget does not cover."""
    if release is None or release.kind == "none":
        raise Denied("privacy-needed", "site.toml has a privacy budget, but this program adds no noise.")
    if not release.is_secure and not allowance.insecure_noise:
        raise Denied("insecure-noise", "The noise would come from a seed; privacy.insecure_noise is not set.")
    if release.unit != allowance.unit:
        raise Denied("privacy-unit", f"The promise is about a {release.unit}, site.toml about a {allowance.unit}.")
    try:
        after = spent.after(release, count).epsilon(allowance.delta)
    except CompositionError as error:
        raise Denied("privacy-unit", str(error)) from error
    if after > allowance.epsilon:
        raise Denied(
            "budget",
            f"After {count} more {after:.4g} of epsilon = {allowance.epsilon:g} would be spent (delta "
            f"{allowance.delta:g}, {len(spent)} releases before, over all runs).",
        )
