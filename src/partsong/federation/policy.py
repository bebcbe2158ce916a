"""site.toml: what a site lets itself be asked for. It is read at the site alone, and no message can change it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unicodedata import normalize

from partsong import methods
from partsong.core.parameters import nearest, only, read_toml, whole, words
from partsong.errors import ParameterError
from partsong.federation.exposure_limit import REFUSE, ZERO, ExposureLimit
from partsong.federation.method_keys import METHODS
from partsong.federation.site.state import require_same
from partsong.federation.wire import Denied
from partsong.privacy.accounting import check_budget
from partsong.privacy.exposure import Exposure, parse_limit
from partsong.privacy.spending import USUAL_DELTA
from partsong.secure_aggregation.client import Seat
from partsong.secure_aggregation.messages import Roster

if TYPE_CHECKING:
    from partsong.federation.experiment import TextRule
    from partsong.federation.ledger import SiteLedger
    from partsong.federation.site.plan import Data, Plan
    from partsong.federation.site.state import Started


# ---- word policy ------------------------------------------------------------------------------------------------
#
# The table [words] of site.toml: whether texts of this site may be worked on, and how common a word has to be.

KEYS = ("allowed", "minimum_documents", "minimum_parties")


@dataclass(frozen=True, slots=True)
class WordPolicy:
    """A rule that asks for words in fewer documents, or at fewer sites, than these is refused."""

    allowed: bool = True
    minimum_documents: int = 1
    minimum_parties: int = 2

    @staticmethod
    def from_table(table: Mapping[str, Any]) -> WordPolicy:
        """From the table of a file; an unknown key is an error."""
        only(table, KEYS, "The table words of site.toml")
        allowed = table.get("allowed", True)
        if not isinstance(allowed, bool):
            raise ParameterError(f"words.allowed is true or false; got {allowed!r}.")
        return WordPolicy(allowed, whole(table, "minimum_documents", 1), whole(table, "minimum_parties", 2))

    def require(self, rule: TextRule) -> None:
        """Refuse a rule that asks for less than this."""
        if not self.allowed:
            raise Denied("words", "site.toml does not allow runs over texts (words.allowed).")
        for name, asked, least in (
            ("documents", rule.min_documents, self.minimum_documents),
            ("parties", rule.min_parties, self.minimum_parties),
        ):
            if asked < least:
                raise Denied(
                    "words", f"min_{name} = {asked} is asked for; site.toml asks for {least} (words.minimum_{name})."
                )


# ---- policy -----------------------------------------------------------------------------------------------------

PRIVACY_KEYS = ("epsilon", "delta", "unit", "insecure_noise", "noiseless_before")
POLICY_KEYS = (
    "recipes", "minimum_rows", "minimum_parties", "maximum_rounds", "maximum_runs", "masked", "minimum_mask_bound",
    "columns", "tell_names", "words", "privacy", "maximum_exposure", "rare_columns", "other_rows_since",
    "directions_before",
)  # fmt: skip

UNNAMED = tuple(name for name in METHODS if name != "secure-dsanls")
"""Allowed where a site names none. Sketches of two open runs by `secure-dsanls` determine rows: it must be named."""


@dataclass(frozen=True, slots=True)
class PrivacyBudget:
    """(ε, δ) about one unit over everything that the site ever releases; noise from a seed is for tests alone.

    `noiseless_before`: releases without noise, made before there was a budget, that it is known not to cover.
    """

    epsilon: float
    delta: float = USUAL_DELTA
    unit: str = "row"
    insecure_noise: bool = False
    noiseless_before: int = 0

    def __post_init__(self) -> None:
        check_budget(self.epsilon, self.delta, needs_delta=False)
        if self.unit not in ("row", "party"):
            raise ParameterError(f"privacy.unit is row or party; got {self.unit!r}.")
        if not isinstance(self.insecure_noise, bool):
            raise ParameterError(f"privacy.insecure_noise is true or false; got {self.insecure_noise!r}.")


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What an experiment asks of a site, in the words of its policy."""

    recipe: str
    rank: int
    rounds: int
    parties: int
    masked: bool


@dataclass(frozen=True, slots=True)
class Policy:
    """Which recipes, how many rows, parties, rounds and runs, whether masks are needed, which columns, what privacy.

    `minimum_rows` None: 1 where masks or noise hide uploads, else 2k, rounded up to a power of two: who may choose k
    learns no more of the number of rows than that of its binary digits. It is not for a budget about rows, which the
    comparison would break. `columns`: names, or patterns with * and ?, of those that may leave; None: all.
    `maximum_runs`: over all time; None: any number. `minimum_mask_bound`: of the largest number that a masked upload
    may hold. `tell_names`: whether another site that lacks agreed columns is told their names, sealed, so that nobody
    can read them but a site of the roster with the same shared key. `words`: about runs over texts.

    `maximum_exposure`: what may be computed from all combinations of rows that ever leave without noise
    (`privacy.exposure`); a run that would go beyond it is refused. Under masks the number of combinations is rounded up
    to a power of two, for the same reason as above. `rare_columns`: whether columns that too few rows use are a reason
    to refuse, or are set to zero in the run. `other_rows_since`: the line of the ledger after which the rows are others
    than before; only combinations after it count. `directions_before`: how many combinations have left by releases for
    which the ledger does not say it.
    """

    recipes: tuple[str, ...] = UNNAMED
    minimum_rows: int | None = None
    minimum_parties: int = 2
    maximum_rounds: int = 1000
    masked: bool = False
    columns: tuple[str, ...] | None = None
    privacy: PrivacyBudget | None = None
    maximum_runs: int | None = None
    minimum_mask_bound: float = 0.0
    tell_names: bool = True
    words: WordPolicy = WordPolicy()
    maximum_exposure: Exposure = Exposure.MEMBERSHIP
    rare_columns: str = REFUSE
    other_rows_since: int = 0
    directions_before: int | None = None

    def __post_init__(self) -> None:
        if self.rare_columns not in (REFUSE, ZERO):
            raise ParameterError(f'rare_columns is "{REFUSE}" or "{ZERO}"; got {self.rare_columns!r}.')
        if self.minimum_rows not in (None, 1) and self.privacy is not None and self.privacy.unit == "row":
            raise ParameterError(
                f'minimum_rows = {self.minimum_rows} does not go with privacy.unit = "row": whether a run is refused '
                "would tell of one row, with certainty. Leave minimum_rows out; how many rows there are is known here."
            )

    @staticmethod
    def from_table(table: Mapping[str, Any]) -> Policy:
        """From the table of a file; an unknown key is an error."""
        only(table, POLICY_KEYS, "site.toml")
        recipes = words(table, "recipes", UNNAMED)
        for recipe in recipes:
            if recipe not in METHODS:
                raise ParameterError(f"recipes has {recipe!r}. {nearest(recipe, METHODS)}")
        masked = table.get("masked", False)
        if not isinstance(masked, bool):
            raise ParameterError(f"masked is true or false; got {masked!r}.")
        tells = table.get("tell_names", True)
        if not isinstance(tells, bool):
            raise ParameterError(f"tell_names is true or false; got {tells!r}.")
        bound = table.get("minimum_mask_bound", 0.0)
        if type(bound) not in (int, float) or not 0 <= bound < math.inf:
            raise ParameterError(f"minimum_mask_bound must be a number, not negative; got {bound!r}.")
        return Policy(
            recipes,
            whole(table, "minimum_rows", None),
            whole(table, "minimum_parties", 2),
            whole(table, "maximum_rounds", 1000),
            masked,
            words(table, "columns", None),
            _privacy_budget(table.get("privacy")),
            whole(table, "maximum_runs", None),
            float(bound),
            tells,
            WordPolicy.from_table(table.get("words", {})),
            parse_limit(table.get("maximum_exposure", str(Exposure.MEMBERSHIP))),
            table.get("rare_columns", REFUSE),
            whole(table, "other_rows_since", 0, 0),
            whole(table, "directions_before", None, 0),
        )

    @staticmethod
    def read(path: Path) -> Policy:
        """From a file."""
        return Policy.from_table(read_toml(path))

    def require(self, request: RunRequest, rows: int) -> None:
        """Refuse what is more than the site allows; the reason has local values, and stays."""
        if request.recipe not in self.recipes:
            raise Denied("recipe", f"{request.recipe!r} is asked for; allowed: {', '.join(self.recipes)}.")
        if request.rounds > self.maximum_rounds:
            raise Denied("rounds", f"{request.rounds} rounds are asked for; allowed: {self.maximum_rounds}.")
        if self.masked and not request.masked:
            raise Denied("masks", "Sums in the open are asked for; site.toml asks for masked ones.")
        least = self._least_rows(request)
        if rows < least:
            raise Denied("rows", f"This site holds {rows} rows; at least {least} are needed for rank {request.rank}.")
        if request.parties < self.minimum_parties:
            raise Denied(
                "parties", f"{request.parties} parties would be in a sum; at least {self.minimum_parties} are needed."
            )

    def require_mask_bound(self, bound: float | None) -> None:
        """Refuse masked sums whose numbers are bounded by less; None: they are not."""
        if bound is not None and bound < self.minimum_mask_bound:
            raise Denied(
                "mask-bound", f"mask_bound would be {bound:g}; at least {self.minimum_mask_bound:g} is needed."
            )

    def _least_rows(self, request: RunRequest) -> int:
        if self.minimum_rows is not None:
            return self.minimum_rows
        return 1 if request.masked or self.privacy is not None else 1 << (2 * request.rank - 1).bit_length()

    def require_run(self, run: str, before: Collection[str]) -> None:
        """Refuse a run that is one too many; `before` are all that there ever were."""
        if self.maximum_runs is not None and run not in before and len(before) >= self.maximum_runs:
            raise Denied("runs", f"{run!r} would be run {len(before) + 1}; allowed: {self.maximum_runs}.")

    def leaving(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Those of the columns that may leave, in their order."""
        if self.columns is None:
            return tuple(columns)
        patterns = [normalize("NFC", pattern).replace("[", "[[]") for pattern in self.columns]
        return tuple(
            name for name in columns if any(fnmatchcase(normalize("NFC", name), pattern) for pattern in patterns)
        )


def _privacy_budget(table: Any) -> PrivacyBudget | None:
    if table is None:
        return None
    only(table, PRIVACY_KEYS, "The table privacy of site.toml")
    if "epsilon" not in table:
        raise ParameterError("The table privacy of site.toml needs epsilon.")
    numbers = (table["epsilon"], table.get("delta", USUAL_DELTA))
    if not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
        raise ParameterError(f"epsilon and delta must be numbers; got {numbers}.")
    rest = (table.get("unit", "row"), table.get("insecure_noise", False), whole(table, "noiseless_before", 0, 0))
    return PrivacyBudget(float(numbers[0]), float(numbers[1]), *rest)


# ---- consent ----------------------------------------------------------------------------------------------------
#
# Whether a site lets itself be asked for something: by site.toml as it is now, whatever was allowed when a run began.
#
#     hello, start, the key with    the plan, exactly the parties of the roster, the number of runs, and the budget for
#     which names are asked for     all of its exchanges
#     start again                   the plan, the same parties, the budget, the agreed columns and the same rows
#     work, each phase of a sum,    the plan with the parties of this sum, the same parties, the exchange, the agreed
#     the same answers again        columns, the same rows; and the books as they stand, this attempt's charge among
# them
#     names told to another site,   the plan, the same parties and the books
#     the end of an agreement
#     names read, the end of a run  nothing: they bring names or the model to the site, and nothing of the site's leaves
#
# "The same parties": each party of the run is still in the pinned roster, under the key that it had when the run began
# here; who else is in the roster by now does not matter to a run that has begun. One over texts has begun with its
# agreement on words.
#
# An answer that is asked for again may be the first that arrives, so that it is asked about like a new one. Whoever
# refuses in the middle of a sum is in it as one who falls silent there. What has left before stays out of reach.


@dataclass(frozen=True, slots=True)
class Consent:
    """What a site says now: its policy, and what that is about, which is its data, its books and its pinned roster."""

    name: str
    policy: Policy
    data: Data
    ledger: SiteLedger
    roster: Roster | None

    def require_plan(self, plan: Plan, parties: Collection[str]) -> None:
        """Refuse what is not allowed in a new run of these parties: recipe, rounds, rows, masks and their bound, and
        others than exactly those of the roster.
        """
        self._require_request(plan, None)
        if self.name not in parties or (self.roster is not None and set(self.roster) != set(parties)):
            pinned = "" if self.roster is None else f" In the pinned roster are {', '.join(sorted(self.roster))}."
            raise Denied("roster", f"The parties would be {', '.join(parties)}.{pinned}")

    def require_begun(self, plan: Plan, started: Started, in_sum: int | None = None) -> None:
        """Refuse what is not allowed any more in a run that has begun; its parties have to be the same.

        `in_sum`: how many of them can be in the sum that is asked for; None: as many as are asked in each round.
        """
        self._require_request(plan, in_sum)
        self._require_same_parties(started)

    def _require_same_parties(self, started: Started) -> None:
        """Refuse where a party of a run that has begun is not in the roster any more, or under another key than then. A
        run that was begun without a roster, or by a version that did not keep the keys, has names alone to compare.
        """
        parties, keys = started.layout.parties, started.keys
        if self.roster is None and not keys and self.name in parties:
            return
        roster = self.roster or {}
        gone = sorted({*parties, self.name} - (set(roster) & set(parties)))
        other = sorted(name for name, key in keys.items() if name in roster and roster[name].hex() != key)
        told = [f"not in the pinned roster: {', '.join(gone)}"] if gone else []
        told += [f"with another key there: {', '.join(other)}"] if other else []
        if told:
            raise Denied("roster", f"Of the parties with which this run began here are {'; '.join(told)}.")

    def require_budget(self, plan: Plan, run: str) -> None:
        """Refuse a run whose exchanges the budget does not cover. Once one of them is charged, each is asked about by
        itself, and what the books have must be covered.
        """
        self._require_within(plan, 0 if self.ledger.charges_of(run) else plan.exchanges)

    def require_booked(self, plan: Plan) -> None:
        """Refuse where the budget does not cover what the books have, or is about another promise than the plan's."""
        self._require_within(plan, 0)

    @property
    def exposure(self) -> ExposureLimit:
        """How many combinations of its rows may leave without noise."""
        return ExposureLimit(self.policy, self.data, self.ledger)

    def require_exchange(self, plan: Plan, number: int) -> None:
        """Refuse an exchange beyond those agreed on. Where nobody waits, pieces that came to nothing do not count at
        the server: as many as a run may have lines, and no more than the policy's rounds, since each has a model of its
        own.
        """
        most = plan.exchanges
        if methods.method(plan.request.recipe).traits.asynchronous:
            most = min(plan.bounds.lines, self.policy.maximum_rounds)
        if number >= most:
            raise Denied("rounds", f"Exchange {number} is beyond the {most} allowed.")

    def require_columns(self, started: Started) -> None:
        """The agreed columns are here and may leave, and the rows are those that the run began with."""
        columns = started.columns
        self.data.order(columns)
        kept = sorted(set(columns) - set(self.policy.leaving(columns)))
        if kept:
            counts = {"missing": len(kept), "extra": 0}
            raise Denied("columns", f"Columns were agreed on that may not leave: {', '.join(kept)}.", counts)
        require_same(self.data, started)

    def require_in_sum(self, seat: Any, parties: Collection[str]) -> None:
        """Refuse a sum that has fewer parties, by what was heard of it, than the policy asks for."""
        known = known_in_sum(seat)
        if known and len(known) < self.policy.minimum_parties:
            raise Denied(
                "parties",
                f"Only {len(known)} parties would be in the sum, and site.toml asks for {self.policy.minimum_parties}; "
                f"missing: {', '.join(sorted(set(parties) - set(known)))}.",
            )

    def _require_request(self, plan: Plan, in_sum: int | None) -> None:
        request = plan.request if in_sum is None else replace(plan.request, parties=in_sum)
        self.policy.require(request, self.data.n_rows)
        self.policy.require_mask_bound(plan.mask_bound)

    def _require_within(self, plan: Plan, more: int) -> None:
        if self.policy.privacy is not None:
            self.ledger.require_within(self.policy.privacy, plan.release, more)


def keys_among(roster: Roster | None, parties: Collection[str]) -> dict[str, str]:
    """The public keys of a run's parties in hexadecimal digits, as a start keeps them; none without a roster."""
    return {} if roster is None else {name: roster[name].hex() for name in sorted(parties)}


def roster_among(roster: Roster | None, started: Started | None) -> Roster | None:
    """The roster less those who are not of a run that has begun."""
    if roster is None or started is None:
        return roster
    return {name: key for name, key in roster.items() if name in started.layout.parties}


def known_in_sum(seat: Any) -> Collection[str]:
    """Who can be in a masked sum, by what a party has heard of it: the survivors, those with whom it has masked, whose
    keys were passed on, or who was asked. Nobody of a sum in the open, of which it hears no more than the request.
    """
    if not isinstance(seat, Seat):
        return ()
    admitted = None if seat.dealer is None else seat.dealer.admitted
    heard = () if admitted is None else tuple(admitted.adverts)
    return seat.survivors or seat.asked or heard or seat.draft.terms.participants
