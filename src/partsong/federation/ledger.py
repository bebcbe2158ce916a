"""What a site has released, over all runs and restarts: a chained file that is written before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partsong.errors import CompositionError
from partsong.federation.chain import Chain
from partsong.federation.policy import Allowance
from partsong.federation.refusals import Denied
from partsong.federation.wire import Nonce
from partsong.privacy.accounting import Ledger
from partsong.privacy.release import Release


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

    def charge(self, nonce: Nonce, digest: str, release: Release | None, allowance: Allowance | None) -> None:
        """Write an attempt down, once; refused where the budget does not allow it, before anything is written."""
        own = [nonce.run, nonce.round, nonce.attempt]
        for line in self.chain.lines():
            if line["attempt"] == own:
                if line["digest"] != digest:
                    raise Denied("conflict", f"Another request than that of ledger line {line['number']} for {own}.")
                return
        if allowance is not None:
            require_within(allowance, self.spent(), release)
        self._append(own, digest, release, 1)

    def make_up(self, count: int, release: Release | None, why: str) -> None:
        """Charge releases that this copy of the ledger does not know of: for sites restored from an older copy."""
        for _ in range(count):
            self._append(["", 0, 0], why, release, 1)

    def _append(self, attempt: list[Any], digest: str, release: Release | None, count: int) -> None:
        told: Mapping[str, Any] | None = None if release is None else release.to_json()
        self.chain.append({"attempt": attempt, "digest": digest, "release": told, "count": count})


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
