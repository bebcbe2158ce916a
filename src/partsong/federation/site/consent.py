"""Checks before a site answers a request, against its site.toml and roster as they are now.

    hello, start, the key that    the plan, exactly the parties of the roster, the number of runs, and the budget for
     requests column names        all of its exchanges
    start again                   the plan, the same parties, the budget, the agreed columns and the same rows
    work, each phase of a sum,    the plan with the parties of this sum, the same parties, the exchange, the agreed
     repeated answers             columns, the same rows; and the ledger, with the charge of this attempt
    names for another site,       the plan, the same parties and the ledger
     the end of an agreement
    names read, the end of a run  nothing: they bring names or the model to the site, and nothing of the site leaves

"The same parties": each party of the run is still in the pinned roster, with the key that it had when the run started
here. Parties that joined the roster later do not affect a started run. A run over texts starts with its agreement on
words.

A repeated answer may be the first that arrives, so it is checked like a new one. A site that refuses during a sum
becomes a dropout of it. What has left before cannot be recalled.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from partsong import methods
from partsong.errors import format_count
from partsong.federation.exposure_limit import ExposureLimit
from partsong.federation.policy import Policy
from partsong.federation.site.state import require_same_data
from partsong.federation.wire import RequestRefused
from partsong.secure_aggregation.client import ClientState
from partsong.secure_aggregation.messages import Roster

if TYPE_CHECKING:
    from partsong.federation.ledger import SiteLedger
    from partsong.federation.site.plan import Plan, SiteData
    from partsong.federation.site.state import StartState


@dataclass(frozen=True, slots=True)
class PolicyChecker:
    """A site's policy, with the data, the ledger and the pinned roster that it applies to."""

    name: str
    policy: Policy
    data: SiteData
    ledger: SiteLedger
    roster: Roster | None

    def require_plan(self, plan: Plan, parties: Collection[str]) -> None:
        """Refuse a new run of these parties if the policy rejects its method, rounds, rows, masks or mask bound, or if
        the parties are not exactly those of the roster.
        """
        self._require_request(plan, None)
        if self.name not in parties or (self.roster is not None and set(self.roster) != set(parties)):
            pinned = "" if self.roster is None else f" The pinned roster has {', '.join(sorted(self.roster))}."
            raise RequestRefused("roster", f"The parties of the run are {', '.join(parties)}.{pinned}")

    def require_still_allowed(self, plan: Plan, started: StartState, in_sum: int | None = None) -> None:
        """Refuse what is no longer allowed in a started run. Its parties must be the same.

        `in_sum`: how many of them can be in the requested sum; None: as many as are asked in each round. For a run that
        started without a roster only names are compared.
        """
        self._require_request(plan, in_sum)
        parties, keys = started.layout.parties, started.keys
        if self.roster is None and not keys and self.name in parties:
            return
        roster = self.roster or {}
        gone = sorted({*parties, self.name} - (set(roster) & set(parties)))
        other = sorted(name for name, key in keys.items() if name in roster and roster[name].hex() != key)
        changes = [f"not in the pinned roster: {', '.join(gone)}"] if gone else []
        changes += [f"with another key in the roster: {', '.join(other)}"] if other else []
        if changes:
            raise RequestRefused(
                "roster", f"The parties of this run have changed since it started at this site: {'; '.join(changes)}."
            )

    def require_budget(self, plan: Plan, run: str) -> None:
        """Refuse a run whose exchanges the budget does not cover. Once one of them is charged, each is checked
        separately, and the budget must cover the ledger.
        """
        self._require_within_budget(plan, 0 if self.ledger.charges(run) else plan.exchanges)

    def require_recorded(self, plan: Plan) -> None:
        """Refuse if the budget does not cover the ledger, or has another privacy unit than the plan."""
        self._require_within_budget(plan, 0)

    @property
    def exposure_limit(self) -> ExposureLimit:
        """The limit on combinations of rows that may leave without noise."""
        return ExposureLimit(self.policy, self.data, self.ledger)

    def require_exchange(self, plan: Plan, number: int) -> None:
        """Refuse an exchange beyond the agreed number.

        In an asynchronous run the server does not count failed answers, so the bound is the number of ledger lines that
        a run may have, and the policy's maximum_rounds, since each exchange has a model of its own.
        """
        most = plan.exchanges
        if methods.method(plan.request.method).traits.asynchronous:
            most = min(plan.limits.per_run, self.policy.maximum_rounds)
        if number >= most:
            raise RequestRefused("rounds", f"Exchange {number} is beyond the {most} allowed.")

    def require_columns(self, started: StartState) -> None:
        """Require that the agreed columns exist and may leave, and that the rows are those with which the run
        started.
        """
        columns = started.columns
        self.data.order(columns)
        kept = sorted(set(columns) - set(self.policy.leaving(columns)))
        if kept:
            counts = {"missing": len(kept), "extra": 0}
            raise RequestRefused("columns", f"Agreed columns may not leave: {', '.join(kept)}.", counts)
        require_same_data(self.data, started)

    def require_sum_size(self, state: Any, parties: Collection[str]) -> None:
        """Refuse a sum that is known to have fewer parties than the policy requires."""
        known = parties_in_sum(state)
        if known and len(known) < self.policy.minimum_parties:
            raise RequestRefused(
                "parties",
                f"The sum would have only {format_count(len(known), 'party', 'parties')}, and site.toml "
                f"requires {self.policy.minimum_parties}; "
                f"missing: {', '.join(sorted(set(parties) - set(known)))}.",
            )

    def _require_request(self, plan: Plan, in_sum: int | None) -> None:
        request = plan.request if in_sum is None else replace(plan.request, parties=in_sum)
        self.policy.require(request, self.data.n_rows)
        self.policy.require_mask_bound(plan.mask_bound)

    def _require_within_budget(self, plan: Plan, more: int) -> None:
        if self.policy.privacy is not None:
            self.ledger.require_budget(self.policy.privacy, plan.release, plan.planned(more))


def party_keys(roster: Roster | None, parties: Collection[str]) -> dict[str, str]:
    """Return the public keys of a run's parties in hexadecimal digits; none without a roster."""
    return {} if roster is None else {name: roster[name].hex() for name in sorted(parties)}


def restrict_roster(roster: Roster | None, started: StartState | None) -> Roster | None:
    """Restrict a roster to the parties of a started run."""
    if roster is None or started is None:
        return roster
    return {name: key for name, key in roster.items() if name in started.layout.parties}


def parties_in_sum(state: Any) -> Collection[str]:
    """Return the parties that can be in a masked sum, as far as this party knows: the survivors, those with which it
    masked, those whose keys it received, or those that were asked. Empty for a plain sum, of which it sees only the
    request.
    """
    if not isinstance(state, ClientState):
        return ()
    admitted = None if state.setup_draft is None else state.setup_draft.admitted
    advertised = () if admitted is None else tuple(admitted.adverts)
    return state.survivors or state.participants or advertised or state.draft.params.participants
