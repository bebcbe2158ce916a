"""Exposure limit of a site: how many combinations of its rows may leave without noise, over all runs.

    L   combinations that have left (the ledger) plus those that a run would add (its plan)
    s   rows that use the rarest released column

`maximum_exposure = "membership"` requires L ≤ s/2 (`privacy.exposure`). With secure aggregation L is rounded up to a
power of two before the comparison, so that a server that tries many ranks and rounds learns only the number of binary
digits of s. The limit is checked before a run starts, for its maximum number of rounds, and again for each upload and
each phase of a sum.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from partsong.errors import PartsongError, format_count
from partsong.federation.site.state import column_energies, rows_per_column
from partsong.federation.wire import ALL_ROWS_KEY, RequestRefused, exposure_advice
from partsong.privacy.exposure import ALL_ROWS, Exposure, Support, directions_of, rows_per_direction

if TYPE_CHECKING:
    from partsong.federation.ledger import LedgerState, SiteLedger
    from partsong.federation.policy import Policy
    from partsong.federation.site.plan import Plan, SiteData
    from partsong.federation.site.state import StartState
    from partsong.federation.wire import Request

REFUSE, ZERO = "refuse", "zero"
"""Policies for columns that too few rows use."""
MAX_ZEROED_SHARE = 0.5
"""The largest share of ‖X‖² in columns that are set to zero. Beyond it, too little of the data would remain."""


def rounded_up(directions: int, is_masked: bool) -> int:
    """Round directions up to a power of two with secure aggregation."""
    return 1 << (directions - 1).bit_length() if is_masked and directions else directions


def rounded_down(most: int, is_masked: bool) -> int:
    """The largest number whose `rounded_up` is at most `most`."""
    return 1 << (most.bit_length() - 1) if is_masked and most else most


@dataclass(frozen=True, slots=True)
class ColumnUsage:
    """Columns of a run: the number of rows that use each (`counts`), Σ x² of each (`energies`), and the
    number of rows.
    """

    n_rows: int
    counts: np.ndarray
    energies: np.ndarray

    @staticmethod
    def from_rows(rows: Any, order: Sequence[int]) -> ColumnUsage:
        """Measure some columns of a table."""
        return ColumnUsage(int(rows.shape[0]), rows_per_column(rows)[list(order)], column_energies(rows)[list(order)])

    def rare(self, least: int) -> np.ndarray:
        """Return a mask of the columns that at least one row but fewer than `least` use."""
        return (self.counts > 0) & (self.counts < least)

    def energy_share(self, chosen: np.ndarray) -> float:
        """Return the share of ‖X‖² in these columns."""
        return float(self.energies[chosen].sum() / (self.energies.sum() or 1.0))

    def support_above(self, least: int) -> Support:
        """Return the support of the columns that at least `least` rows use."""
        return Support.from_counts(self.n_rows, self.counts[self.counts >= least])

    def max_directions(self, limit: Exposure, may_zero: bool) -> int:
        """Return the most directions within a limit. `may_zero`: rare columns may be set to zero."""
        if not (self.counts > 0).any():
            return 0
        if not may_zero:
            return self.support_above(1).max_directions(limit) or 0
        order = np.argsort(-self.counts, kind="stable")
        usage = np.cumsum(self.energies[order]) / (self.energies.sum() or 1.0)
        last = int(np.searchsorted(usage, 1 - MAX_ZEROED_SHARE))
        return int(self.counts[order[min(last, len(order) - 1)]]) // rows_per_direction(limit)


@dataclass(frozen=True, slots=True)
class ExposureLimit:
    """Checks a site's policy, data and ledger for combinations of its rows."""

    policy: Policy
    data: SiteData
    ledger: SiteLedger

    def require_run(self, plan: Plan, run: str, columns: Sequence[str], seed: int) -> int:
        """Refuse a run on these columns that would exceed the limit, or that has the seed of an earlier run.

        Returns how many rows must use a column for its values to leave; other columns are set to zero. 0: none are.
        """
        if (planned := plan.directions) == 0:
            return 0
        recorded = self.ledger.load()
        if (line := recorded.find_seed(seed, run)) is not None:
            raise RequestRefused("answered", f"Another run has used seed {seed} (ledger line {line}). {REPEATED_START}")
        if self.policy.maximum_exposure is Exposure.ROWS:
            return 0
        own = recorded.directions(self.policy.other_rows_since, run)
        is_masked, before = plan.reduction.hides_uploads, self.directions(recorded) - own
        usage, may_zero = self._columns(columns), self.policy.rare_columns == ZERO
        needed = rounded_up(before + planned, is_masked)
        least = rows_per_direction(self.policy.maximum_exposure) * needed if may_zero else 0
        support, rare = usage.support_above(max(1, least)), usage.rare(least)
        is_within = needed <= (support.max_directions(self.policy.maximum_exposure) or 0)
        if is_within and (usage.counts >= max(1, least)).any() and usage.energy_share(rare) <= MAX_ZEROED_SHARE:
            return least if rare.any() else 0
        raise self._refusal(plan, before, planned, usage, may_zero)

    def require_upload(self, plan: Plan, request: Request, started: StartState) -> None:
        """Refuse an upload that exceeds the limit, that answers a model of another run, or whose model has negative
        entries.
        """
        directions = directions_of(plan.program, request.body)
        if directions == 0:
            return
        recorded, nonce = self.ledger.load(), request.nonce
        line = recorded.find_answer(request.model_digest, request.factor_digest, nonce.run)
        if line is not None and directions < ALL_ROWS:  # all rows are asked for by one model, whatever the seed
            raise RequestRefused(
                "answered", f"This model was answered in another run (ledger line {line}). {REPEATED_START}"
            )
        if "H" in request.body.arrays and not bool((np.asarray(request.body["H"]) >= 0).all()):
            raise RequestRefused("model", "The model has negative entries or NaN. Models of partsong are non-negative.")
        is_charged = any(one.round == nonce.round for one in recorded.runs.get(nonce.run, ()))
        self._require_within(plan, started, recorded, 0 if is_charged else directions)

    def require_recorded(self, plan: Plan, started: StartState) -> None:
        """Refuse every answer of a run if what has left by now exceeds the current limit."""
        if plan.directions:
            self._require_within(plan, started, self.ledger.load(), 0)

    def _require_within(self, plan: Plan, started: StartState, recorded: LedgerState, more: int) -> None:
        if self.policy.maximum_exposure is Exposure.ROWS:
            return
        usage, before = self._columns(started.columns), self.directions(recorded)
        support = usage.support_above(max(1, started.least_support))
        needed = rounded_up(before + more, plan.reduction.hides_uploads)
        if needed > (support.max_directions(self.policy.maximum_exposure) or 0):
            raise self._refusal(plan, before, more, usage, may_zero=started.least_support > 0)

    def directions(self, recorded: LedgerState) -> int:
        """Count combinations of rows that have left without noise: from the ledger and, for lines without a count, from
        site.toml.
        """
        since, stated = self.policy.other_rows_since, self.policy.directions_before
        if since > recorded.lines:
            raise RequestRefused(
                "exposure",
                f"other_rows_since = {since} in site.toml is beyond the last line of the ledger ({recorded.lines}). "
                "Use the number of an existing line, or remove the setting.",
            )
        uncounted = recorded.uncounted(since)
        if uncounted and (stated is None or stated < uncounted):
            is_too_few = "" if stated is None else f" directions_before = {stated} is less than one for each."
            raise RequestRefused(
                "exposure",
                "The ledger does not say how many combinations of rows left in "
                f"{format_count(uncounted, 'release')} without noise, "
                f"which partsong 0.1.0 wrote.{is_too_few} Set directions_before in site.toml to the sum of rounds × "
                f"rank of these runs; or, if the rows are new since, set other_rows_since = {recorded.lines}.",
            )
        return recorded.directions(since) + ((stated or 0) if uncounted else 0)

    def _columns(self, columns: Sequence[str]) -> ColumnUsage:
        return ColumnUsage.from_rows(self.data.rows, self.data.order(columns))

    def _refusal(self, plan: Plan, before: int, planned: int, usage: ColumnUsage, may_zero: bool) -> RequestRefused:
        """Return a refusal: numbers for the site's log, and for the coordinator what is allowed, rounded if masked."""
        limit, is_masked = self.policy.maximum_exposure, plan.reduction.hides_uploads
        most = usage.max_directions(limit, may_zero)
        if planned >= ALL_ROWS:
            return RequestRefused(
                "exposure",
                f"The method sends XᵀX without noise, from which rows can be computed. It counts as all "
                f"{format_count(self.data.n_rows, 'row')} of this site, and {most} combinations of rows may leave in "
                f'all (maximum_exposure = "{limit}"; before this run: {before}). Use noise (a table privacy in the '
                'experiment) or another method; or set maximum_exposure = "rows" in site.toml.',
                {ALL_ROWS_KEY: 1},
            )
        room = rounded_down(most, is_masked) - before
        fitting = largest_within(plan, room)
        parts = [
            f"{format_count(planned, 'combination')} of rows would leave without noise (before this run: {before})."
        ]
        if may_zero:
            least = rows_per_direction(limit) * most
            parts.append(f"Columns with half of the squared norm have a value in {least} rows or more, so")
        else:
            support = usage.support_above(1)
            parts.append(f"The rarest column has a value in {support.rarest} of {support.rows} rows, so")
        parts.append(f'{most} may leave in all (maximum_exposure = "{limit}").')
        parts += ["With secure aggregation they are counted in powers of two."] if is_masked else []
        parts.append(f"{exposure_advice(fitting)}.")
        least = rows_per_direction(limit) * rounded_up(before + planned, is_masked)
        rare = usage.rare(least)
        if rare.any() and not may_zero and usage.energy_share(rare) <= MAX_ZEROED_SHARE:
            parts.append(
                f"{int(rare.sum())} of {len(rare)} columns have values in fewer than {least} rows; they hold "
                f"{usage.energy_share(rare):.2%} of the squared norm; "
                f'rare_columns = "zero" sets them to zero in the run.'
            )
        sent = {name: rounded_down(count, is_masked) for name, count in fitting.items()}
        return RequestRefused("exposure", " ".join(parts), sent)


def count_rare_columns(rows: Any, order: Sequence[int], least: int) -> tuple[int, float]:
    """Return the number of columns that some but fewer than `least` rows use, and their share of ‖X‖²."""
    usage = ColumnUsage.from_rows(rows, order)
    rare = usage.rare(least)
    return int(rare.sum()), usage.energy_share(rare)


def rare_columns_note(rows: Any, order: Sequence[int], least: int) -> str:
    """Describe for the site's log which columns are set to zero in a run; empty if none are."""
    count, share = count_rare_columns(rows, order, least) if least else (0, 0.0)
    if not count:
        return ""
    return (
        f"{count} of {len(order)} columns are zero in this run, because they have values in fewer than {least} rows "
        f'(rare_columns = "zero"). They hold {share:.2%} of the squared norm.'
    )


REPEATED_START = (
    "Two runs with the same first model would reveal the rows that were added or removed in between. Start the run "
    "with another seed."
)


def largest_within(plan: Plan, room: int) -> dict[str, int]:
    """Return the most rounds at the plan's rank, and the largest rank with its rounds, that send at most `room`
    combinations of rows; 0 if none does.
    """
    resized, rounds, rank = plan.resize, plan.rounds, plan.request.rank
    if resized is None:
        return {"rounds": 0, "rank": 0}
    return {
        "rounds": _largest(lambda number: resized(number, rank), rounds, room),
        "rank": _largest(lambda number: resized(rounds, number), rank, room),
    }


def _largest(plan_of: Callable[[int], Plan], most: int, room: int) -> int:
    def sent(number: int) -> int:
        try:
            return plan_of(number).directions
        except PartsongError:  # an invalid experiment: invalid sizes lie below the valid ones
            return 0

    found = bisect_right(range(1, most + 1), room, key=sent)
    return found if found and sent(found) else 0
