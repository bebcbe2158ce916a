"""The exposure limit of a site: how many combinations of its rows may leave without noise, over all runs.

    L   combinations that have left (the ledger) and that a run would add (its plan)
    s   rows that use the rarest column that leaves

`maximum_exposure = "membership"` asks for L ≤ s/2 (`privacy.exposure`). Under masks L is rounded up to a power of two
before it is compared, so that a server that asks for many ranks and rounds learns how many binary digits s has, and no
more. A run is asked about before it begins, by its most rounds, and each upload and each phase of its sum again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from partsong.errors import PartsongError
from partsong.federation.site.state import column_energies, rows_per_column
from partsong.federation.wire import RequestRefused, exposure_advice
from partsong.privacy.exposure import Exposure, Support, directions_of, per_direction

if TYPE_CHECKING:
    from partsong.federation.ledger import LedgerState, SiteLedger
    from partsong.federation.policy import Policy
    from partsong.federation.site.plan import Plan, SiteData
    from partsong.federation.site.state import StartState
    from partsong.federation.wire import Request

REFUSE, ZERO = "refuse", "zero"
"""What to do about columns that too few rows use."""
MAX_ZEROED_SHARE = 0.5
"""The largest share of ‖X‖² in columns that are set to zero; beyond it the run would be about little else."""


def rounded_up(directions: int, is_masked: bool) -> int:
    """Directions as they are compared: rounded up to a power of two under masks."""
    return 1 << (directions - 1).bit_length() if is_masked and directions else directions


def rounded_down(most: int, is_masked: bool) -> int:
    """The largest number whose `rounded_up` is at most `most`."""
    return 1 << (most.bit_length() - 1) if is_masked and most else most


@dataclass(frozen=True, slots=True)
class ColumnUsage:
    """The columns of a run: how many rows use each, and Σ x² of each; `n_rows` in all."""

    n_rows: int
    counts: np.ndarray
    energies: np.ndarray

    @staticmethod
    def from_rows(rows: Any, order: Sequence[int]) -> ColumnUsage:
        """Some columns of a table."""
        return ColumnUsage(int(rows.shape[0]), rows_per_column(rows)[list(order)], column_energies(rows)[list(order)])

    def rare(self, least: int) -> np.ndarray:
        """Columns that some rows use, and fewer than `least`."""
        return (self.counts > 0) & (self.counts < least)

    def energy_share(self, chosen: np.ndarray) -> float:
        """The share of ‖X‖² in these columns."""
        return float(self.energies[chosen].sum() / (self.energies.sum() or 1.0))

    def support_above(self, least: int) -> Support:
        """The support of the columns that at least so many rows use."""
        return Support.from_counts(self.n_rows, self.counts[self.counts >= least])

    def max_directions(self, limit: Exposure, may_zero: bool) -> int:
        """The most directions within a limit, where rare columns may be set to zero or not."""
        if not (self.counts > 0).any():
            return 0
        if not may_zero:
            return self.support_above(1).most_directions(limit) or 0
        order = np.argsort(-self.counts, kind="stable")
        held = np.cumsum(self.energies[order]) / (self.energies.sum() or 1.0)
        last = int(np.searchsorted(held, 1 - MAX_ZEROED_SHARE))
        return int(self.counts[order[min(last, len(order) - 1)]]) // per_direction(limit)


@dataclass(frozen=True, slots=True)
class ExposureLimit:
    """What a site's policy, data and ledger say of combinations of its rows."""

    policy: Policy
    data: SiteData
    ledger: SiteLedger

    def require_run(self, plan: Plan, run: str, columns: Sequence[str], seed: int) -> int:
        """Refuse a run of these columns that would show more than the policy allows, or that begins with the random
        numbers of an earlier one. Returns how many rows must use a column so that it may leave; others are set to
        zero. 0: all may.
        """
        if (planned := plan.directions) == 0:
            return 0
        books = self.ledger.load()
        if (line := books.find_seed(seed, run)) is not None:
            raise RequestRefused(
                "answered", f"Seed {seed} was that of another run (ledger line {line}). {REPEATED_START}"
            )
        if self.policy.maximum_exposure is Exposure.ROWS:
            return 0
        own = books.directions(self.policy.other_rows_since, run)
        is_masked, before = plan.reduction.hides_uploads, self.directions(books) - own
        held, may_zero = self._columns(columns), self.policy.rare_columns == ZERO
        needed = rounded_up(before + planned, is_masked)
        least = per_direction(self.policy.maximum_exposure) * needed if may_zero else 0
        support, rare = held.support_above(max(1, least)), held.rare(least)
        is_within = needed <= (support.most_directions(self.policy.maximum_exposure) or 0)
        if is_within and (held.counts >= max(1, least)).any() and held.energy_share(rare) <= MAX_ZEROED_SHARE:
            return least if rare.any() else 0
        raise self._refusal(plan, before, planned, held, may_zero)

    def require_upload(self, plan: Plan, request: Request, started: StartState) -> None:
        """Refuse an upload beyond the limit, one that answers a model for the second time, or one with negative
        numbers.
        """
        directions = directions_of(plan.program, request.body)
        if directions == 0:
            return
        books, nonce = self.ledger.load(), request.nonce
        if (line := books.find_answer(request.model_digest, request.factor_digest, nonce.run)) is not None:
            raise RequestRefused(
                "answered", f"This model was answered in another run (ledger line {line}). {REPEATED_START}"
            )
        if "H" in request.body.arrays and not bool((np.asarray(request.body["H"]) >= 0).all()):
            raise RequestRefused(
                "model", "The model has entries that are negative or no numbers, which none of ours has."
            )
        is_charged = any(one.round == nonce.round for one in books.runs.get(nonce.run, ()))
        self._require_within(plan, started, books, 0 if is_charged else directions)

    def require_recorded(self, plan: Plan, started: StartState) -> None:
        """Refuse every answer of a run where what has left by now is beyond the limit, as it is now."""
        if plan.directions:
            self._require_within(plan, started, self.ledger.load(), 0)

    def _require_within(self, plan: Plan, started: StartState, books: LedgerState, more: int) -> None:
        if self.policy.maximum_exposure is Exposure.ROWS:
            return
        held, before = self._columns(started.columns), self.directions(books)
        support = held.support_above(max(1, started.least_support))
        needed = rounded_up(before + more, plan.reduction.hides_uploads)
        if needed > (support.most_directions(self.policy.maximum_exposure) or 0):
            raise self._refusal(plan, before, more, held, may_zero=started.least_support > 0)

    def directions(self, books: LedgerState) -> int:
        """Combinations of rows that have left without noise, by the ledger and, for lines that do not say it, by
        site.toml.
        """
        since, stated = self.policy.other_rows_since, self.policy.directions_before
        if since > books.lines:
            raise RequestRefused(
                "exposure",
                f"other_rows_since = {since} in site.toml is beyond the last line of the ledger ({books.lines}). Give "
                "the number of a line that is there, or leave it out.",
            )
        uncounted = books.uncounted(since)
        if uncounted and (stated is None or stated < uncounted):
            is_too_few = "" if stated is None else f" directions_before = {stated} is less than one for each."
            raise RequestRefused(
                "exposure",
                f"The ledger does not say how many combinations of rows left by {uncounted} releases without noise, "
                f"which are of partsong 0.1.0 or were made up.{is_too_few} Add up rounds × rank of these runs, and set "
                f"directions_before in site.toml; or, if the rows are others since, other_rows_since = {books.lines}.",
            )
        return books.directions(since) + ((stated or 0) if uncounted else 0)

    def _columns(self, columns: Sequence[str]) -> ColumnUsage:
        return ColumnUsage.from_rows(self.data.rows, self.data.order(columns))

    def _refusal(self, plan: Plan, before: int, planned: int, held: ColumnUsage, may_zero: bool) -> RequestRefused:
        """With the numbers for the site's log, and what would be allowed, rounded under masks, for the coordinator."""
        limit, is_masked = self.policy.maximum_exposure, plan.reduction.hides_uploads
        most = held.max_directions(limit, may_zero)
        room = rounded_down(most, is_masked) - before
        told = largest_within(plan, room)
        parts = [f"{planned} combinations of rows would leave without noise, and {before} have left before."]
        if may_zero:
            least = per_direction(limit) * most
            parts.append(f"Columns that hold half of the squared norm are used by {least} rows or more, so that")
        else:
            support = held.support_above(1)
            parts.append(f"The rarest column has a value in {support.rarest} of {support.rows} rows, so that")
        parts.append(f'{most} may leave in all (maximum_exposure = "{limit}").')
        parts += ["Under masks they are counted in powers of two."] if is_masked else []
        parts.append(f"{exposure_advice(told)}.")
        least = per_direction(limit) * rounded_up(before + planned, is_masked)
        rare = held.rare(least)
        if rare.any() and not may_zero and held.energy_share(rare) <= MAX_ZEROED_SHARE:
            parts.append(
                f"Fewer than {least} rows use {int(rare.sum())} of {len(rare)} columns, which hold "
                f"{held.energy_share(rare):.2%} of the squared norm; "
                f'rare_columns = "zero" sets them to zero in the run.'
            )
        sent = {name: rounded_down(count, is_masked) for name, count in told.items()}
        return RequestRefused("exposure", " ".join(parts), sent)


def count_rare_columns(rows: Any, order: Sequence[int], least: int) -> tuple[int, float]:
    """How many of these columns are used by some rows, and by fewer than `least`; and their share of ‖X‖²."""
    held = ColumnUsage.from_rows(rows, order)
    rare = held.rare(least)
    return int(rare.sum()), held.energy_share(rare)


def rare_columns_note(rows: Any, order: Sequence[int], least: int) -> str:
    """For the log of a site: what is set to zero in a run; nothing where no column is."""
    count, share = count_rare_columns(rows, order, least) if least else (0, 0.0)
    if not count:
        return ""
    return (
        f"{count} of {len(order)} columns are zero in this run, because fewer than {least} rows use them "
        f'(rare_columns = "zero"). They hold {share:.2%} of the squared norm.'
    )


REPEATED_START = (
    "Two runs with one first model differ by the rows that were added or removed in between, and would show them. "
    "Begin the run with another seed."
)


def largest_within(plan: Plan, room: int) -> dict[str, int]:
    """The most rounds of the plan's rank, and the largest rank in as many rounds, that send at most `room` combinations
    of rows; 0 where there is none.
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
        except PartsongError:  # no such experiment: sizes without one are below those that there are
            return 0

    found = bisect_right(range(1, most + 1), room, key=sent)
    return found if found and sent(found) else 0
