"""What a site has released, over all runs and restarts: a chained file that is written before anything is computed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partsong.errors import CompositionError
from partsong.federation.chain import Chain, Line
from partsong.federation.policy import Allowance
from partsong.federation.refusals import Denied
from partsong.federation.wire import Request
from partsong.privacy.accounting import Ledger
from partsong.privacy.release import Release

MOST_MADE_UP = 1_000_000
"""Releases that a ledger can lack: more than any site has."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many attempts a round may have, and how many all rounds of a run may have together."""

    attempts: int
    lines: int


@dataclass(frozen=True, slots=True)
class Cost:
    """What an attempt costs (None: no noise), out of which budget, and how many there may be."""

    release: Release | None = None
    allowance: Allowance | None = None
    bounds: Bounds | None = None


@dataclass(frozen=True, slots=True)
class Charge:
    """A line: which attempt of a round it is for, of which request and model, and how much noise that had."""

    number: int
    round: int
    attempt: int
    digest: str
    about: str | None
    noise: float | None


@dataclass(frozen=True, slots=True)
class Books:
    """All lines together: charges by run, releases by what they cost, and how many had no noise.

    Lines that were made up, for releases of which no more is known, are of no run, and one can stand for many: `serial`
    is the number of releases, `lines` that of lines. `unheard`: the numbers of those of which nothing had left when the
    next one was written.
    """

    serial: int = 0
    lines: int = 0
    unheard: frozenset[int] = frozenset()
    runs: Mapping[str, tuple[Charge, ...]] = field(default_factory=dict)
    releases: Mapping[Release, int] = field(default_factory=dict)
    noiseless: int = 0

    def with_lines(self, lines: Sequence[Line]) -> Books:
        """With more of them."""
        runs, releases, noiseless, serial = dict(self.runs), dict(self.releases), self.noiseless, self.serial
        new: dict[str, list[Charge]] = {}
        for line in lines:
            release = None if line["release"] is None else Release.from_json(line["release"])
            (run, number, attempt), noise = line["attempt"], None if release is None else release.noise_multiplier
            count = int(line.get("count", 1))
            serial += count
            if run:
                charge = Charge(line["number"], number, attempt, line["digest"], line.get("about"), noise)
                new.setdefault(run, []).append(charge)
            if release is None:
                noiseless += count
            else:
                releases[release] = releases.get(release, 0) + count
        runs |= {run: (*runs.get(run, ()), *charges) for run, charges in new.items()}
        unheard = self.unheard | {line["number"] - 1 for line in lines if line.get("unheard")}
        return Books(serial, lines[-1]["number"], unheard, runs, releases, noiseless)


@dataclass(frozen=True, slots=True)
class SiteLedger:
    """One line for every attempt of every round of every run, with what it costs; `serial` counts releases."""

    path: Path

    @property
    def chain(self) -> Chain:
        """The file."""
        return Chain(self.path)

    def books(self) -> Books:
        """All that was charged, after every line was compared."""
        return self.chain.folded(Books.with_lines, Books())

    @property
    def serial(self) -> int:
        """How many releases were charged."""
        return self.books().serial

    def spent(self) -> Ledger:
        """All that was charged and had noise."""
        return Ledger(tuple(self.books().releases.items()))

    def charge(self, request: Request, cost: Cost, *, unheard: bool = False, again: bool = False) -> bool:
        """Write an attempt down, once; refused where the budget does not allow it, before anything is written.

        All attempts of a round are about one model and one history. True where the line was there before; `again`: one
        more is written then. `unheard`: nothing of the last line has left, and this one says so. Lines of which nothing
        has left are charged, and are none of the attempts that a round may have.
        """
        nonce, before = request.nonce, self.charges_of(request.nonce.run)
        of_round = [one for one in before if one.round == nonce.round]
        own, digest, about = [nonce.run, nonce.round, nonce.attempt], request.digest, request.about
        for one in of_round:
            if one.attempt == nonce.attempt and one.digest != digest:
                raise Denied("conflict", f"Another request than that of ledger line {one.number} for {own}.")
            if one.about not in (None, about):
                raise Denied("conflict", f"Another model, or history, than that of ledger line {one.number}.")
        was_charged = any(one.attempt == nonce.attempt for one in of_round)
        if was_charged and not again:
            self._flush()
            return True
        books = self.books()
        excused = books.unheard | ({books.lines} if unheard else set())
        heard = [one for one in before if one.number not in excused]
        self._require_few(cost.bounds, [one for one in heard if one.round == nonce.round], heard)
        if cost.allowance is not None:
            self.require_within(cost.allowance, cost.release)
        more = {"about": about, **({"unheard": True} if unheard else {})}
        self._append({"attempt": own, "digest": digest, "count": 1, **more}, cost.release)
        return was_charged

    def require_within(self, allowance: Allowance, release: Release | None, count: int = 1) -> None:
        """Refuse releases that the site's budget does not cover, and all where some before had no noise. `count` 0:
        what was charged already has to be covered, and the release be of a kind that the budget is about.
        """
        books = self.books()
        require_within(allowance, books.releases, release, count)
        if books.noiseless > allowance.noiseless_before:
            raise Denied(
                "noiseless",
                f"{books.noiseless} releases of the ledger had no noise, so that epsilon = {allowance.epsilon:g} is "
                "not true of all that has left. If that is known, set privacy.noiseless_before = "
                f"{books.noiseless} in site.toml.",
            )

    def charges_of(self, run: str) -> tuple[Charge, ...]:
        """All attempts of a run that were charged."""
        return self.books().runs.get(run, ())

    def lines_of(self, run: str) -> list[Line]:
        """The lines of these, as they are written."""
        return [line for line in self.chain.lines() if line["attempt"][0] == run]

    def make_up(
        self, count: int, release: Release | None, why: str, attempt: tuple[str, int, int] = ("", 0, 0)
    ) -> None:
        """Charge releases that this copy of the ledger does not know of, in one line: for sites restored from an older
        copy. `attempt`: run, round and attempt, where that is known; else they are of no run.
        """
        self._append({"attempt": list(attempt), "digest": why, "count": count}, release)

    def _append(self, entry: Mapping[str, Any], release: Release | None) -> None:
        self.chain.append({**entry, "release": None if release is None else release.to_json()})

    def _require_few(self, bounds: Bounds | None, of_round: Sequence[Charge], of_run: Sequence[Charge]) -> None:
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


def require_within(
    allowance: Allowance, before: Mapping[Release, int], release: Release | None, count: int = 1
) -> None:
    """Refuse releases that the site's budget does not cover, after those before."""
    if release is None or release.kind == "none":
        raise Denied("privacy-needed", "site.toml has a privacy budget, but this program adds no noise.")
    if not release.is_secure and not allowance.insecure_noise:
        raise Denied("insecure-noise", "The noise would come from a seed; privacy.insecure_noise is not set.")
    if release.unit != allowance.unit:
        raise Denied("privacy-unit", f"The promise is about a {release.unit}, site.toml about a {allowance.unit}.")
    try:
        spent = Ledger(tuple(before.items()))
        after = spent.after(release, count).epsilon(allowance.delta)
    except CompositionError as error:
        raise Denied("privacy-unit", str(error)) from error
    if after > allowance.epsilon:
        raise Denied(
            "budget",
            f"{f'After {count} more ' if count else ''}{after:.4g} of epsilon = {allowance.epsilon:g} "
            f"{'would be' if count else 'is'} spent (delta {allowance.delta:g}, {len(spent)} releases before, over all "
            "runs).",
        )
