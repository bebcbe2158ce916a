"""Release ledger of a site, over all runs and restarts: a hash-chained file, written before any work is computed."""

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
"""The most releases that an opening balance can state."""


@dataclass(frozen=True, slots=True)
class OpeningBalance:
    """A site's statement of releases that are missing from its ledger.

    `epsilon` and `delta` cover all of these `releases`, for one privacy unit and relation; None: they had no noise.
    `directions`: combinations of rows that they sent without noise. `log_lines`: the length of the audit log. These
    lines, and the ledger's lines before this one, are no longer compared with each other.
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
    """Number of its ledger line."""

    def __post_init__(self) -> None:
        for name in ("releases", "directions", "log_lines"):
            whole_number(name, getattr(self, name), least=0)
        if self.releases > MAX_RELEASES:
            raise ParameterError(
                f"No site has released {self.releases} times; releases is at most {MAX_RELEASES}. If the server "
                "reports this number, ask the coordinator what it has counted."
            )
        if not self.why.strip():
            raise ParameterError("why is empty. Say why the opening balance is needed.")
        if self.epsilon is not None:
            check_budget(self.epsilon, self.delta, needs_delta=False)
        if (self.unit, self.relation) not in RELATIONS:
            known = "; ".join(f"{unit}, {relation}" for unit, relation in RELATIONS)
            raise ParameterError(
                f"There is no privacy guarantee for unit {self.unit}, relation {self.relation}. Use one of: {known}."
            )

    @property
    def noiseless(self) -> int:
        """Number of releases counted as noiseless: all, unless a privacy guarantee covers them."""
        return self.releases if self.epsilon is None or self.directions else 0


AttemptKey = tuple[str, int, int]
"""Run, round and attempt."""


@dataclass(frozen=True, slots=True)
class AttemptLimits:
    """The most attempts of one round, and of all rounds of a run together."""

    per_round: int
    per_run: int


@dataclass(frozen=True, slots=True)
class AttemptCost:
    """The cost of an attempt: its release (None: no noise), the budget and attempt limits that apply, the combinations
    of rows that it sends without noise (`directions`), and the seed of its run.
    """

    release: Release | None = None
    budget: PrivacyBudget | None = None
    limits: AttemptLimits | None = None
    directions: int = 0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Charge:
    """A ledger line: the attempt, digests of its request and model, its noise, and the combinations of rows that it
    sent without noise (`directions`; None: the version that wrote the line did not count them). If there are any,
    `factor_digest` is the digest of H and `seed` that of the run.
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
    """The content of a ledger: charges by run, releases by cost, and the number without noise.

    `serial` counts releases, `lines` counts lines: 0.1.0 could add one line for many lost releases that belong to no
    run. `reconstructed` has number and count of such lines without noise. `unsent`: numbers of lines of which nothing
    had left when the next one was written. `openings`: the opening balances.
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
        """Count combinations of rows sent without noise, in all runs or one, by lines after number `since`.

        Attempts of a round send the same combinations and count once.
        """
        rounds: dict[tuple[str, int], int] = {}
        for name, charges in self.runs.items() if run is None else [(run, self.runs.get(run, ()))]:
            for one in charges:
                if one.number > since:
                    rounds[name, one.round] = max(rounds.get((name, one.round), 0), one.directions or 0)
        stated = (one.directions for one in self.openings if run is None and one.number > since)
        return sum(rounds.values()) + sum(stated)

    def uncounted(self, since: int = 0) -> int:
        """Count releases without noise, by lines after number `since`, whose combinations of rows were not counted:
        those of partsong 0.1.0 and reconstructed lines.
        """
        own = sum(one.directions is None and one.number > since for charges in self.runs.values() for one in charges)
        return own + sum(count for number, count in self.reconstructed if number > since)

    @property
    def covered_lines(self) -> tuple[int, int]:
        """The last lines of ledger and log that the last opening balance covers; they are not compared."""
        return (self.openings[-1].number, self.openings[-1].log_lines) if self.openings else (0, 0)

    @property
    def last_attempt(self) -> AttemptKey | None:
        """The attempt of the last line; None if there is no line or it belongs to no run."""
        ends = ((run, charges[-1]) for run, charges in self.runs.items())
        return next(((run, one.round, one.attempt) for run, one in ends if one.number == self.lines), None)

    @property
    def privacy_ledger(self) -> Ledger:
        """All charged releases with noise."""
        return Ledger(tuple(self.releases.items()))

    @property
    def privacy_units(self) -> set[tuple[str, str]]:
        """Privacy units and relations of releases with noise and of opening balances."""
        stated = {(one.unit, one.relation) for one in self.openings if one.epsilon is not None}
        return {(one.unit, one.relation) for one in self.releases} | stated

    def epsilon(self, delta: float, planned: Ledger = Ledger()) -> float:
        """Return ε of all releases with noise and of those planned.

        Opening balances (ε₀, δ₀) add by basic composition: ε = Σ ε₀ + ε(other releases; δ − Σ δ₀). Infinite if Σ δ₀
        exhausts δ.
        """
        after = self.privacy_ledger + planned
        stated = [one for one in self.openings if one.epsilon is not None]
        if stated and len(self.privacy_units | {(one.unit, one.relation) for one, _ in planned.entries}) > 1:
            raise CompositionError("The opening balance has another privacy unit or relation than the other releases.")
        left = delta - sum(one.delta for one in stated)
        if stated and len(after) and (left < 0 or left == 0 < delta):
            return math.inf
        own = float(after.epsilon(left)) if len(after) or not stated else 0.0
        return own + sum(one.epsilon or 0.0 for one in stated)

    def find_answer(self, about: str, model: str | None, run: str) -> int | None:
        """Return the line of another run that answered this model with combinations of rows; None if there is none."""
        return self._find(
            run, lambda one: one.model_digest == about or (model is not None and one.factor_digest == model)
        )

    def find_seed(self, seed: int, run: str) -> int | None:
        """Return the line of another run with this seed that sent combinations of rows; None if there is none."""
        return self._find(run, lambda one: one.seed == seed)

    def _find(self, run: str, is_meant: Callable[[Charge], bool]) -> int | None:
        others = (one for name, charges in self.runs.items() if name != run for one in charges)
        return next((one.number for one in others if one.noise is None and one.directions != 0 and is_meant(one)), None)

    def add_lines(self, lines: Sequence[Line]) -> LedgerState:
        """Return the state after more lines."""
        runs, releases, noiseless, serial = dict(self.runs), dict(self.releases), self.noiseless, self.serial
        new: dict[str, list[Charge]] = {}
        reconstructed, openings = list(self.reconstructed), list(self.openings)
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
                reconstructed.append((line["number"], count))
            if release is None:
                noiseless += count
            else:
                releases[release] = releases.get(release, 0) + count
        runs |= {run: (*runs.get(run, ()), *charges) for run, charges in new.items()}
        unsent = self.unsent | {line["number"] - 1 for line in lines if line.get("unheard")}
        return LedgerState(
            serial, lines[-1]["number"], unsent, runs, releases, noiseless, tuple(reconstructed), tuple(openings)
        )


@dataclass(frozen=True, slots=True)
class SiteLedger:
    """One line for every attempt of every round of every run, with its cost; `serial` counts releases."""

    path: Path

    @property
    def chain(self) -> Chain:
        """The hash-chained file."""
        return Chain(self.path)

    def load(self) -> LedgerState:
        """Verify all lines and return their content."""
        return self.chain.fold(LedgerState.add_lines, LedgerState())

    @property
    def serial(self) -> int:
        """Number of charged releases."""
        return self.load().serial

    def charge(
        self, request: Request, cost: AttemptCost, *, previous_unsent: bool = False, repeat: bool = False
    ) -> bool:
        """Charge an attempt once. Refuse before anything is written if the budget does not allow it.

        All attempts of a round have one model and one history. Returns True if the attempt was charged before;
        `repeat`: it is charged again then. `previous_unsent`: nothing of the last line has left, which the new line
        records. Lines of which nothing has left are charged, but do not count towards the attempt limits.
        """
        nonce, before = request.nonce, self.charges(request.nonce.run)
        of_round = [one for one in before if one.round == nonce.round]
        own, digest, about = [nonce.run, nonce.round, nonce.attempt], request.digest, request.model_digest
        for one in of_round:
            if one.attempt == nonce.attempt and one.digest != digest:
                raise RequestRefused(
                    "conflict", f"The request differs from that of ledger line {one.number} for {own}."
                )
            if one.model_digest not in (None, about):
                raise RequestRefused("conflict", f"The model or history differs from that of ledger line {one.number}.")
        was_charged = any(one.attempt == nonce.attempt for one in of_round)
        if was_charged and not repeat:
            sync_to_disk(self.path)  # the process that wrote the line may have been killed before it could flush
            return True
        recorded = self.load()
        excused = recorded.unsent | ({recorded.lines} if previous_unsent else set())
        sent = [one for one in before if one.number not in excused]
        sent_of_round, limits = [one for one in sent if one.round == nonce.round], cost.limits
        if limits is not None and (len(sent_of_round) >= limits.per_round or len(sent) >= limits.per_run):
            raise RequestRefused(
                "attempts",
                f"{len(sent_of_round)} attempts of this round and {len(sent)} of the run were charged before; "
                f"the limits are {limits.per_round} and {limits.per_run}.",
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

    def require_budget(self, budget: PrivacyBudget, release: Release | None, planned: Ledger | None = None) -> None:
        """Refuse what the budget does not cover: this release, or those planned; and any if earlier ones had no noise.

        Nothing planned: check that past charges are covered and that the release has the budget's kind and unit.
        """
        recorded = self.load()
        if release is None or release.kind == "none":
            raise RequestRefused("privacy-needed", "site.toml has a privacy budget, but this program adds no noise.")
        if not release.is_secure and not budget.insecure_noise:
            raise RequestRefused(
                "insecure-noise", "The program draws noise from a seed, but privacy.insecure_noise is not set."
            )
        if release.unit != budget.unit:
            raise RequestRefused("privacy-unit", f"The program protects a {release.unit}, site.toml a {budget.unit}.")
        try:
            planned = Ledger(((release, 1),)) if planned is None else planned
            after, count = recorded.epsilon(budget.delta, planned), len(planned)
        except CompositionError as error:
            raise RequestRefused("privacy-unit", str(error)) from error
        if after > budget.epsilon:
            raise RequestRefused(
                "budget",
                f"{f'After {count} more releases, ' if count else ''}{after:.4g} of epsilon = {budget.epsilon:g} "
                f"{'would be' if count else 'is'} spent (delta "
                f"{budget.delta:g}, {recorded.serial - recorded.noiseless} releases before, over all runs).",
            )
        if recorded.noiseless > budget.noiseless_before:
            raise RequestRefused(
                "noiseless",
                f"{recorded.noiseless} releases in the ledger had no noise, so epsilon = {budget.epsilon:g} does not "
                "cover everything that has left. To accept this, set privacy.noiseless_before = "
                f"{recorded.noiseless} in site.toml.",
            )

    def charges(self, run: str) -> tuple[Charge, ...]:
        """Return the charges of a run."""
        return self.load().runs.get(run, ())

    def append_opening(self, opening: OpeningBalance) -> None:
        """Append an opening balance."""
        stated = {name: value for name, value in asdict(opening).items() if name != "number"}
        self.chain.append({"opening": stated})
