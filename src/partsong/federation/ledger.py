"""What a site has released, over all runs and restarts: a chained file that is written before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partsong.core.parameters import whole_number
from partsong.errors import CompositionError, ParameterError
from partsong.federation.chain import Chain, Line, sync_to_disk
from partsong.federation.wire import Request, RequestRefused
from partsong.privacy.accounting import RELATIONS, Ledger, Release, check_budget

if TYPE_CHECKING:
    from partsong.federation.policy import PrivacyBudget

MAX_RELEASES = 1_000_000
"""Releases that an opening balance can state: more than any site has."""


@dataclass(frozen=True, slots=True)
class OpeningBalance:
    """What a site has released that its ledger does not know of, as the site states it.

    `epsilon` and `delta` cover all of these `releases` where they had noise, about one unit and relation; None: they
    had none. `directions`: combinations of rows that they sent without noise. `log_lines`: how long the audit log was;
    these lines, and those of the ledger before this one, are not compared with each other any more.
    """

    releases: int
    why: str
    epsilon: float | None = None
    delta: float = 0.0
    unit: str = "row"
    relation: str = "add-or-remove"
    directions: int = 0
    log_lines: int = 0
    number: int = field(default=0, compare=False)
    """Its line in the ledger."""

    def __post_init__(self) -> None:
        for name in ("releases", "directions", "log_lines"):
            whole_number(name, getattr(self, name), least=0)
        if self.releases > MAX_RELEASES:
            raise ParameterError(
                f"No site has released {self.releases} times; at most {MAX_RELEASES} can be stated. If a server says "
                "so, ask there what it has counted."
            )
        if not self.why.strip():
            raise ParameterError("An opening balance says why it was needed, for those who read the ledger later.")
        if self.epsilon is not None:
            check_budget(self.epsilon, self.delta, needs_delta=False)
        if (self.unit, self.relation) not in RELATIONS:
            known = "; ".join(f"{unit}, {relation}" for unit, relation in RELATIONS)
            raise ParameterError(f"There is no promise about {self.unit}, {self.relation}. Use one of: {known}.")

    @property
    def noiseless(self) -> int:
        """How many of the releases are taken to be without noise: all, unless a promise covers them."""
        return self.releases if self.epsilon is None or self.directions else 0


AttemptKey = tuple[str, int, int]
"""Run, round and attempt."""


@dataclass(frozen=True, slots=True)
class AttemptLimits:
    """How many attempts a round may have, and how many all rounds of a run may have together."""

    per_round: int
    per_run: int


@dataclass(frozen=True, slots=True)
class AttemptCost:
    """What an attempt costs (None: no noise), out of which budget, how many there may be, how many combinations of rows
    it sends without noise, and from which seed its run began.
    """

    release: Release | None = None
    budget: PrivacyBudget | None = None
    limits: AttemptLimits | None = None
    directions: int = 0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Charge:
    """A line: which attempt of a round it is for, of which request and model, how much noise that had, and how many
    combinations of rows it sent without noise (None: the line is of a version that did not count them). `model`: a mark
    of H, and `seed` that of the run, where combinations were sent.
    """

    number: int
    round: int
    attempt: int
    digest: str
    model_digest: str | None
    noise: float | None
    directions: int | None = 0
    factor_digest: str | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class LedgerState:
    """All lines together: charges by run, releases by what they cost, and how many had no noise. `made_up`: number and
    count of lines without noise that are of no run.

    Lines of 0.1.0 that were made up, for releases of which no more is known, are of no run, and one can stand for many:
    `serial` is the number of releases, `lines` that of lines. `unheard`: the numbers of those of which nothing had left
    when the next one was written. `openings`: what the site has stated besides.
    """

    serial: int = 0
    lines: int = 0
    unsent: frozenset[int] = frozenset()
    runs: Mapping[str, tuple[Charge, ...]] = field(default_factory=dict)
    releases: Mapping[Release, int] = field(default_factory=dict)
    noiseless: int = 0
    reconstructed: tuple[tuple[int, int], ...] = ()
    openings: tuple[OpeningBalance, ...] = ()

    def directions(self, since: int = 0, run: str | None = None) -> int:
        """Combinations of rows that were sent without noise, in all runs or in one, by lines after number `since`.
        Attempts of a round send the same combinations, and count once.
        """
        rounds: dict[tuple[str, int], int] = {}
        for name, charges in self.runs.items() if run is None else [(run, self.runs.get(run, ()))]:
            for one in charges:
                if one.number > since:
                    rounds[name, one.round] = max(rounds.get((name, one.round), 0), one.directions or 0)
        stated = (one.directions for one in self.openings if run is None and one.number > since)
        return sum(rounds.values()) + sum(stated)

    def uncounted(self, since: int = 0) -> int:
        """Releases without noise, by lines after number `since`, of which it is not known how many combinations of rows
        they sent: those of partsong 0.1.0, and lines that were made up.
        """
        own = sum(one.directions is None and one.number > since for charges in self.runs.values() for one in charges)
        return own + sum(count for number, count in self.reconstructed if number > since)

    @property
    def covered_lines(self) -> tuple[int, int]:
        """Up to which lines of ledger and log the last opening balance covers all: these are not compared."""
        return (self.openings[-1].number, self.openings[-1].log_lines) if self.openings else (0, 0)

    @property
    def last_attempt(self) -> AttemptKey | None:
        """What the last line is for; None where there is none, or it is of no run."""
        ends = ((run, charges[-1]) for run, charges in self.runs.items())
        return next(((run, one.round, one.attempt) for run, one in ends if one.number == self.lines), None)

    @property
    def privacy_ledger(self) -> Ledger:
        """All that was charged and had noise."""
        return Ledger(tuple(self.releases.items()))

    @property
    def privacy_units(self) -> set[tuple[str, str]]:
        """Units and relations that releases with noise, and opening balances, are about."""
        stated = {(one.unit, one.relation) for one in self.openings if one.epsilon is not None}
        return {(one.unit, one.relation) for one in self.releases} | stated

    def epsilon(self, delta: float, release: Release | None = None, count: int = 0) -> float:
        """ε of all releases with noise, and of `count` more like this one: opening balances at what they state, by
        basic composition, and the rest as it composes, ε = Σ ε₀ + ε(rest; δ − Σ δ₀). Infinite where Σ δ₀ uses up δ.
        """
        after = self.privacy_ledger if release is None else self.privacy_ledger.after(release, count)
        stated = [one for one in self.openings if one.epsilon is not None]
        if (
            stated
            and len(self.privacy_units | ({(release.unit, release.relation)} if release and count else set())) > 1
        ):
            raise CompositionError("The opening balance is about another unit or relation than the other releases.")
        left = delta - sum(one.delta for one in stated)
        if stated and len(after) and (left < 0 or left == 0 < delta):
            return math.inf
        own = float(after.epsilon(left)) if len(after) or not stated else 0.0
        return own + sum(one.epsilon or 0.0 for one in stated)

    def find_answer(self, about: str, model: str | None, run: str) -> int | None:
        """The line by which a model was answered with combinations of rows in another run; None: it never was."""
        return self._find(
            run, lambda one: one.model_digest == about or (model is not None and one.factor_digest == model)
        )

    def find_seed(self, seed: int, run: str) -> int | None:
        """The line of another run that sent combinations of rows and began from this seed; None: there is none."""
        return self._find(run, lambda one: one.seed == seed)

    def _find(self, run: str, is_meant: Callable[[Charge], bool]) -> int | None:
        others = (one for name, charges in self.runs.items() if name != run for one in charges)
        return next((one.number for one in others if one.noise is None and one.directions != 0 and is_meant(one)), None)

    def add_lines(self, lines: Sequence[Line]) -> LedgerState:
        """With more of them."""
        runs, releases, noiseless, serial = dict(self.runs), dict(self.releases), self.noiseless, self.serial
        new: dict[str, list[Charge]] = {}
        made_up, openings = list(self.reconstructed), list(self.openings)
        for line in lines:
            if "opening" in line:
                opening = OpeningBalance(**line["opening"], number=line["number"])
                openings.append(opening)
                serial, noiseless = serial + opening.releases, noiseless + opening.noiseless
                continue
            release = None if line["release"] is None else Release.from_json(line["release"])
            (run, number, attempt), noise = line["attempt"], None if release is None else release.noise_multiplier
            count = int(line.get("count", 1))
            serial += count
            directions = 0 if release is not None else line.get("directions")
            if run:
                of_model = (line.get("about"), noise, directions, line.get("model"), line.get("seed"))
                charge = Charge(line["number"], number, attempt, line["digest"], *of_model)
                new.setdefault(run, []).append(charge)
            elif release is None:
                made_up.append((line["number"], count))
            if release is None:
                noiseless += count
            else:
                releases[release] = releases.get(release, 0) + count
        runs |= {run: (*runs.get(run, ()), *charges) for run, charges in new.items()}
        unheard = self.unsent | {line["number"] - 1 for line in lines if line.get("unheard")}
        return LedgerState(
            serial, lines[-1]["number"], unheard, runs, releases, noiseless, tuple(made_up), tuple(openings)
        )


@dataclass(frozen=True, slots=True)
class SiteLedger:
    """One line for every attempt of every round of every run, with what it costs; `serial` counts releases."""

    path: Path

    @property
    def chain(self) -> Chain:
        """The file."""
        return Chain(self.path)

    def load(self) -> LedgerState:
        """All that was charged, after every line was compared."""
        return self.chain.fold(LedgerState.add_lines, LedgerState())

    @property
    def serial(self) -> int:
        """How many releases were charged."""
        return self.load().serial

    def charge(
        self, request: Request, cost: AttemptCost, *, previous_unsent: bool = False, repeat: bool = False
    ) -> bool:
        """Write an attempt down, once; refused where the budget does not allow it, before anything is written.

        All attempts of a round are about one model and one history. True where the line was there before; `again`: one
        more is written then. `unheard`: nothing of the last line has left, and this one says so. Lines of which nothing
        has left are charged, and are none of the attempts that a round may have.
        """
        nonce, before = request.nonce, self.charges(request.nonce.run)
        of_round = [one for one in before if one.round == nonce.round]
        own, digest, about = [nonce.run, nonce.round, nonce.attempt], request.digest, request.model_digest
        for one in of_round:
            if one.attempt == nonce.attempt and one.digest != digest:
                raise RequestRefused("conflict", f"Another request than that of ledger line {one.number} for {own}.")
            if one.model_digest not in (None, about):
                raise RequestRefused("conflict", f"Another model, or history, than that of ledger line {one.number}.")
        was_charged = any(one.attempt == nonce.attempt for one in of_round)
        if was_charged and not repeat:
            sync_to_disk(self.path)  # the process that wrote it may have been killed before it did so
            return True
        books = self.load()
        excused = books.unsent | ({books.lines} if previous_unsent else set())
        heard = [one for one in before if one.number not in excused]
        heard_of_round, bounds = [one for one in heard if one.round == nonce.round], cost.limits
        if bounds is not None and (len(heard_of_round) >= bounds.per_round or len(heard) >= bounds.per_run):
            raise RequestRefused(
                "attempts",
                f"{len(heard_of_round)} attempts of this round and {len(heard)} of the run were charged before; "
                f"allowed: {bounds.per_round} and {bounds.per_run}.",
            )
        if cost.budget is not None:
            self.require_budget(cost.budget, cost.release)
        more = {"about": about, **({"unheard": True} if previous_unsent else {})}
        counted: dict[str, Any] = {} if cost.release is not None else {"directions": cost.directions}
        if counted and cost.directions:
            counted |= {"model": request.factor_digest, "seed": cost.seed}
        release = None if cost.release is None else cost.release.to_json()
        entry = {"attempt": own, "digest": digest, "count": 1, **counted, **more}
        self.chain.append({**entry, "release": release})
        return was_charged

    def require_budget(self, allowance: PrivacyBudget, release: Release | None, count: int = 1) -> None:
        """Refuse releases that the site's budget does not cover, and all where some before had no noise. `count` 0:
        what was charged already has to be covered, and the release be of a kind that the budget is about.
        """
        books = self.load()
        if release is None or release.kind == "none":
            raise RequestRefused("privacy-needed", "site.toml has a privacy budget, but this program adds no noise.")
        if not release.is_secure and not allowance.insecure_noise:
            raise RequestRefused(
                "insecure-noise", "The noise would come from a seed; privacy.insecure_noise is not set."
            )
        if release.unit != allowance.unit:
            raise RequestRefused(
                "privacy-unit", f"The promise is about a {release.unit}, site.toml about a {allowance.unit}."
            )
        try:
            after = books.epsilon(allowance.delta, release, count)
        except CompositionError as error:
            raise RequestRefused("privacy-unit", str(error)) from error
        if after > allowance.epsilon:
            raise RequestRefused(
                "budget",
                f"{f'After {count} more ' if count else ''}{after:.4g} of epsilon = {allowance.epsilon:g} "
                f"{'would be' if count else 'is'} spent (delta {allowance.delta:g}, {books.serial - books.noiseless} "
                "releases before, over all runs).",
            )
        if books.noiseless > allowance.noiseless_before:
            raise RequestRefused(
                "noiseless",
                f"{books.noiseless} releases of the ledger had no noise, so that epsilon = {allowance.epsilon:g} is "
                "not true of all that has left. If that is known, set privacy.noiseless_before = "
                f"{books.noiseless} in site.toml.",
            )

    def charges(self, run: str) -> tuple[Charge, ...]:
        """All attempts of a run that were charged."""
        return self.load().runs.get(run, ())

    def append_opening(self, opening: OpeningBalance) -> None:
        """Write an opening balance down."""
        stated = {name: value for name, value in asdict(opening).items() if name != "number"}
        self.chain.append({"opening": stated})
