"""site.toml: the rules of a site for runs. Only the site reads it, and no message can change it."""

from __future__ import annotations

import codecs
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal
from unicodedata import normalize

import numpy as np
from msgspec import Meta

from partsong.core.parameters import read_toml
from partsong.errors import FileError, ParameterError, format_count
from partsong.federation.experiment import METHODS, RunRequest, TextRule
from partsong.federation.exposure_limit import REFUSE, count_rare_columns, rounded_down, rounded_up
from partsong.federation.ledger import SiteLedger
from partsong.federation.site.state import rows_per_column
from partsong.federation.toml_files import FINITE, Count, Positive, load_toml, one_of, parse_table
from partsong.federation.wire import RequestRefused
from partsong.io.write import write_text
from partsong.privacy.accounting import check_budget
from partsong.privacy.exposure import LIMITS, MEANING, Exposure, Support, rows_per_direction
from partsong.privacy.spending import DEFAULT_DELTA

UNNAMED = tuple(name for name in METHODS if name != "secure-dsanls")
"""The default methods. Sketches of two plain `secure-dsanls` runs determine rows, so a site must list it."""


@dataclass(frozen=True, slots=True)
class PrivacyBudget:
    """The table [privacy]: (ε, δ) about one unit over everything that the site ever releases.

    `insecure_noise`: whether noise may come from a seed, for tests. `noiseless_before`: releases without noise, made
    before there was a budget, which the budget does not cover.
    """

    epsilon: float
    delta: float = DEFAULT_DELTA
    unit: Literal["row", "party"] = "row"
    insecure_noise: bool = False
    noiseless_before: Count = 0

    def __post_init__(self) -> None:
        check_budget(self.epsilon, self.delta, needs_delta=False)


@dataclass(frozen=True, slots=True)
class WordPolicy:
    """The table [words]: whether runs over texts are allowed, and in how many documents and at how many sites a word
    must be.
    """

    allowed: bool = True
    minimum_documents: Positive = 1
    minimum_parties: Positive = 2

    def require(self, rule: TextRule) -> None:
        """Refuse a rule that asks for less."""
        if not self.allowed:
            raise RequestRefused("words", "site.toml does not allow runs over texts (words.allowed).")
        for name, asked, least in (
            ("documents", rule.min_documents, self.minimum_documents),
            ("parties", rule.min_parties, self.minimum_parties),
        ):
            if asked < least:
                raise RequestRefused(
                    "words", f"The run has min_{name} = {asked}; site.toml requires {least} (words.minimum_{name})."
                )


@dataclass(frozen=True, slots=True)
class Policy:
    """site.toml: which methods, how many rows, parties, rounds and runs, masks, columns, privacy.

    `minimum_rows` None: 1 where masks or noise hide uploads, else 2k, rounded up to a power of two: a server that
    chooses k learns only the number of binary digits of the number of rows. `columns`: names, or patterns with * and ?,
    of those that may leave; None: all. `maximum_runs`: over all time; None: any number. `minimum_mask_bound`: least
    bound of the numbers in a masked upload. `tell_names`: whether a site of the roster that lacks agreed columns gets
    their names, sealed under the shared key. `words`: about runs over texts.

    `maximum_exposure`: what may be computed from all combinations of rows that ever leave without noise
    (`privacy.exposure`); a run that would exceed it is refused. Under masks the number of combinations is rounded up
    to a power of two, for the same reason as above. `rare_columns`: whether columns that too few rows use are a reason
    to refuse, or are set to zero in the run. `other_rows_since`: the line of the ledger after which the rows are others
    than before; only combinations after it count. `directions_before`: combinations of releases for which the ledger
    does not record their number.
    """

    methods: tuple[Annotated[str, one_of(METHODS)], ...] = UNNAMED
    minimum_rows: Positive | None = None
    minimum_parties: Positive = 2
    maximum_rounds: Positive = 1000
    secure_aggregation: bool = False
    columns: tuple[Annotated[str, Meta(min_length=1)], ...] | None = None
    privacy: PrivacyBudget | None = None
    maximum_runs: Positive | None = None
    minimum_mask_bound: Annotated[float, Meta(ge=0, le=FINITE)] = 0.0
    tell_names: bool = True
    words: WordPolicy = WordPolicy()
    maximum_exposure: Annotated[Exposure, one_of(LIMITS)] = Exposure.MEMBERSHIP
    rare_columns: Literal["refuse", "zero"] = "refuse"
    other_rows_since: Count = 0
    directions_before: Count | None = None

    def __post_init__(self) -> None:
        # Whether a run is refused would depend on a single row, with probability 1.
        if self.minimum_rows not in (None, 1) and self.privacy is not None and self.privacy.unit == "row":
            raise ParameterError(
                f'minimum_rows = {self.minimum_rows} does not go with privacy.unit = "row": whether a run is refused '
                "would reveal with certainty whether one row is present. Remove minimum_rows."
            )

    @staticmethod
    def from_table(table: Any) -> Policy:
        """Parse the table of a site.toml."""
        return parse_table(table, Policy, "site.toml")

    @staticmethod
    def read(path: Path) -> Policy:
        """Load a site.toml."""
        return load_toml(path, Policy)

    def require(self, request: RunRequest, rows: int) -> None:
        """Refuse what the site does not allow. The reason contains local values and stays at the site."""
        if request.method not in self.methods:
            raise RequestRefused("method", f"The run uses {request.method!r}; allowed: {', '.join(self.methods)}.")
        if request.rounds > self.maximum_rounds:
            raise RequestRefused(
                "rounds", f"The run has {format_count(request.rounds, 'round')}; allowed: {self.maximum_rounds}."
            )
        if self.secure_aggregation and not request.secure_aggregation:
            raise RequestRefused("masks", "The run uses plain sums; site.toml requires secure aggregation.")
        least = self.minimum_rows
        if least is None:
            is_hidden = request.secure_aggregation or self.privacy is not None
            least = 1 if is_hidden else 1 << (2 * request.rank - 1).bit_length()
        if rows < least:
            raise RequestRefused(
                "rows",
                f"This site holds {format_count(rows, 'row')}; at least {least} are needed for rank {request.rank}.",
            )
        if request.parties < self.minimum_parties:
            raise RequestRefused(
                "parties", f"Parties in a sum: {request.parties}; at least {self.minimum_parties} are needed."
            )

    def require_mask_bound(self, bound: float | None) -> None:
        """Refuse secure sums with a smaller bound; None: plain sums."""
        if bound is not None and bound < self.minimum_mask_bound:
            raise RequestRefused(
                "mask-bound", f"mask_bound would be {bound:g}; at least {self.minimum_mask_bound:g} is needed."
            )

    def require_run(self, run: str, before: Collection[str]) -> None:
        """Refuse a run beyond `maximum_runs`; `before` are all earlier runs."""
        if self.maximum_runs is not None and run not in before and len(before) >= self.maximum_runs:
            raise RequestRefused("runs", f"{run!r} would be run {len(before) + 1}; allowed: {self.maximum_runs}.")

    def leaving(self, columns: Sequence[str]) -> tuple[str, ...]:
        """The columns that may leave, in their order."""
        if self.columns is None:
            return tuple(columns)
        patterns = [normalize("NFC", pattern).replace("[", "[[]") for pattern in self.columns]
        return tuple(
            name for name in columns if any(fnmatchcase(normalize("NFC", name), pattern) for pattern in patterns)
        )


# ---- the file -------------------------------------------------------------------------------------------------------
#
# site.toml as the first join writes it. From then on the file belongs to the site; only the answer about rare columns
# is added later.

POLICY = """# The rules of this site for runs. Only the site reads this file, and no message can change it.
# Remove the leading # to set a line. An unknown key is an error.

# methods = ["exact", "fedavg"]     # methods allowed; default: all but secure-dsanls
# minimum_rows = 100                # default: twice the rank where uploads are visible one by one;
                                    # not allowed with a row-level budget: a refusal would reveal the row count
minimum_parties = 3                 # sums over fewer sites are refused
maximum_rounds = 1000               # per run
# maximum_runs = 20                 # in total; default: no limit
secure_aggregation = true           # the server sees only sums
minimum_mask_bound = 1e6            # a smaller mask_bound is refused: a refused upload reveals that a number exceeds it
maximum_exposure = "membership"     # what may be computed from all sums that ever leave without noise: "guess",
                                    # "membership", "entries" or "rows" (docs/reference/exposure.md).
                                    # By default, rounds × rank of all runs together is at most
                                    # half the rows behind the rarest column; "moment" without noise
                                    # counts as all rows and needs "rows"
# rare_columns = "refuse"           # "zero": columns with values in too few rows are set to zero in runs
# other_rows_since = 120            # the line of state/ledger.jsonl after which the rows changed
# directions_before = 0             # rounds × rank of runs by partsong 0.1.0, whose ledger does not record it
# columns = ["gene-*"]              # names or patterns of columns that may leave; default: all
# tell_names = false                # default: true. A site of the roster that lacks columns and has the shared key
                                    # gets their names, encrypted so that the server cannot read them.
                                    # Not for words of texts: all sites learn the words they agree on

# [words]                           # runs over texts
# allowed = true                    # false: refuse them
# minimum_documents = 5             # refuse experiments that ask for words in fewer texts of a site; default: 1
# minimum_parties = 3               # or at fewer sites; default: 2

# [privacy]                         # budget over everything that this site releases from now on
# epsilon = 3.0
# unit = "row"
# noiseless_before = 0              # earlier releases without noise, which epsilon does not cover
"""

LEFT = ("joined.toml", "card.toml", "roster.toml", "results")


def is_used(folder: Path) -> bool:
    """Return whether the site has joined here or has ever answered.

    An interrupted first join leaves only keys and empty folders.
    """
    state = folder / "state"
    return any((folder / name).exists() for name in LEFT) or (state.is_dir() and any(state.iterdir()))


def has_policy(folder: Path) -> bool:
    """Return whether site.toml has any text; an empty file would allow more than the default policy."""
    place = folder / "site.toml"
    return place.exists() and bool(place.read_bytes().removeprefix(codecs.BOM_UTF8).strip())


def require_policy(folder: Path) -> None:
    """Refuse a used folder without site.toml: a new policy would have no budget."""
    if not has_policy(folder) and is_used(folder):
        place = folder / "site.toml"
        raise FileError(
            f"{place} is {'empty' if place.exists() else 'missing'}, but this site has taken part before: its "
            "rules and budget are unknown. Restore your backup, or write a new policy there yourself."
        )


def with_rare_columns(policy: str, answer: str) -> str:
    """Add the answer about rare columns to the text of a site.toml."""
    line, commented = f'rare_columns = "{answer}"', '# rare_columns = "refuse"'
    return policy.replace(commented, line, 1) if commented in policy else f"{line}\n{policy}"


def policy_in(folder: Path) -> Policy:
    """Return the policy of a site, or the default before the first join; FileError if it was lost."""
    require_policy(folder)
    if has_policy(folder):
        return Policy.read(folder / "site.toml")
    return Policy.from_table(tomllib.loads(POLICY))


def says_rare_columns(folder: Path) -> bool:
    """Return whether site.toml sets rare_columns."""
    return has_policy(folder) and "rare_columns" in read_toml(folder / "site.toml")


def answer_rare_columns(folder: Path, answer: str) -> None:
    """Write the answer into a site.toml that does not set rare_columns yet."""
    if not says_rare_columns(folder):
        place = folder / "site.toml"
        write_text(place, with_rare_columns(place.read_text(encoding="utf-8-sig"), answer))


# ---- terms ------------------------------------------------------------------------------------------------------

LIMITED = """  At most {most} of your rows may leave; {sent} have left. A run that needs more is refused.
  (A round of rank k sends k of them{masked}. The rarest column has a value in {rarest} of {rows} rows.
  XᵀX without noise, as method "moment" sends it, counts as all rows.)
  This holds for a coordinator that follows the protocol. One that sends crafted models can read single rows; only
  noise (epsilon) prevents that. Here, secure aggregation hides only which site a row comes from.
  Exposure {level}"""
UNLIMITED = """  site.toml sets no limit (maximum_exposure = "rows"): after enough rounds your rows can be
  reconstructed, also under secure aggregation. Combinations of them that have left: {sent}. Only noise
  (epsilon) prevents that."""
OF_TEXTS = """  Most words occur in few texts, so sums of texts without noise reveal the texts. Methods that send sums
  ("exact", "fnmf", "fedlda") are refused unless site.toml has maximum_exposure = "rows". "fednmf" sends only H; no
  bound is known for what H reveals."""
PLANS = (10, 40, 100)
"""Values of rounds × rank for which a site is shown how many of its columns have values in too few rows."""


def terms_in(folder: Path) -> Terms:
    """Return the terms of the site in a folder."""
    policy, books = policy_in(folder), SiteLedger(folder / "state" / "ledger.jsonl").load()
    stated = policy.directions_before
    sent = books.directions(policy.other_rows_since) + (stated or 0)
    return Terms(policy, sent, books.uncounted(policy.other_rows_since) if stated is None else 0)


@dataclass(frozen=True, slots=True)
class Terms:
    """A site's policy, the combinations of rows that have left, and releases that the ledger has not counted."""

    policy: Policy
    sent: int
    uncounted: int

    def of_texts(self) -> str:
        """Describe the exposure of a site with texts."""
        if self.policy.maximum_exposure is Exposure.ROWS:
            return UNLIMITED.format(sent=self.sent)
        return OF_TEXTS

    def of_table(self, X: Any, columns: Sequence[int]) -> tuple[str, bool]:
        """Describe the exposure of a table whose given columns may leave; return whether some of them are rare."""
        if self.policy.privacy is not None:
            return f"  site.toml has a budget: uploads without noise are refused. {MEANING[Exposure.BOUNDED]}", False
        counts, limit = rows_per_column(X)[list(columns)], self.policy.maximum_exposure
        support = Support.from_counts(int(X.shape[0]), counts)
        if (most := support.max_directions(limit)) is None:
            return UNLIMITED.format(sent=self.sent), False
        now = support.exposure(self.sent)
        level = f"now: {now}. {MEANING[now]}" if self.sent else f"now: {now} or less; no sum has left yet."
        masked = (
            "; under secure aggregation their number is rounded up to a power of two"
            if self.policy.secure_aggregation
            else ""
        )
        numbers = {
            "most": format_count(rounded_down(most, self.policy.secure_aggregation), "combination"),
            "sent": self.sent,
            "rarest": support.rarest,
        }
        said = [LIMITED.format(**numbers, rows=support.rows, masked=masked, level=level)]
        rare = self._of_rare(X, columns, counts)
        if rare:
            refuses = self.policy.rare_columns == REFUSE
            said += [
                *rare,
                f"  Such columns {'make this site refuse the run' if refuses else 'are set to zero in runs'}.",
            ]
        if self.uncounted:
            said.append(
                f"  The ledger has {format_count(self.uncounted, 'release')} of partsong 0.1.0 without the "
                "number of combinations "
                "they sent.\n  Runs without noise are refused until site.toml states it (directions_before)."
            )
        return "\n".join(said), bool(rare)

    def _of_rare(self, X: Any, columns: Sequence[int], counts: np.ndarray) -> list[str]:
        """Return a line for each plan for which some but not all columns have values in too few rows."""
        said, each = [], rows_per_direction(self.policy.maximum_exposure)
        for plan in PLANS:
            least = each * rounded_up(self.sent + plan, self.policy.secure_aggregation)
            count, share = count_rare_columns(X, tuple(columns), least)
            if count and bool((counts >= least).any()):
                said.append(
                    f"  For {plan} more, {count} of {len(counts)} columns have values in fewer than {least} rows; they "
                    f"hold {share:.2%} of the squared norm."
                )
        return said
