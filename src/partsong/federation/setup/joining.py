"""Joining: the folder of a site as it would be, and what can be computed from its uploads, for the site to read first.

Nothing is written before the site has agreed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong.core.parameters import read_toml
from partsong.federation.exposure_limit import REFUSE, allowed, counted, rare_columns
from partsong.federation.ledger import SiteLedger
from partsong.federation.policy import Policy
from partsong.federation.setup.credentials import Kit, SharedKey, write
from partsong.federation.setup.site_folder import SiteFolder
from partsong.federation.setup.site_policy import POLICY, has_policy, require_policy, with_rare_columns
from partsong.federation.site.state import supports_of
from partsong.privacy.exposure import MEANING, Exposure, Support, per_direction

LIMITED = """  Of {most} combinations of your rows that may leave, {sent} have left; a run that needs more is refused.
  (A round of rank k sends k of them{masked}. The rarest column has a value in {rarest} of {rows} rows.)
  This holds for a coordinator that follows the protocol. One that sends models it crafted can read single rows, and
  only noise (epsilon) prevents that. Masks hide which site a row is from, and nothing else here.
  Exposure {level}"""
UNLIMITED = """  site.toml sets no limit (maximum_exposure = "rows"): from enough rounds your rows can be computed
  back, with masks too. {sent} combinations of them have left. Only noise (epsilon) prevents that."""
OF_TEXTS = """  Most words are in few texts, so that sums of texts without noise give the texts away. Methods that send
  sums ("exact", "fnmf", "fedlda") are refused unless site.toml says maximum_exposure = "rows"; "fednmf" sends H alone,
  for which no law is known."""
PLANS = (10, 40, 100)
"""Rounds × rank for which a site reads how many of its columns too few rows use."""


@dataclass(frozen=True, slots=True)
class Terms:
    """A site's policy, the combinations of rows that have left, and releases that the ledger has not counted."""

    policy: Policy
    sent: int
    uncounted: int

    def of_texts(self) -> str:
        """For a site that holds texts."""
        if self.policy.maximum_exposure is Exposure.ROWS:
            return UNLIMITED.format(sent=self.sent)
        return OF_TEXTS

    def of_table(self, X: Any, columns: Sequence[int]) -> tuple[str, bool]:
        """For a site that holds a table of which these columns may leave; and whether too few rows use some of them."""
        if self.policy.privacy is not None:
            return f"  site.toml has a budget: uploads without noise are refused. {MEANING[Exposure.BOUNDED]}", False
        counts, limit = supports_of(X)[list(columns)], self.policy.maximum_exposure
        support = Support.from_counts(int(X.shape[0]), counts)
        if (most := support.most_directions(limit)) is None:
            return UNLIMITED.format(sent=self.sent), False
        now = support.exposure(self.sent)
        level = f"now: {now}. {MEANING[now]}" if self.sent else f"now: {now} at most, because no sum has left yet."
        masked = "; under masks their number is rounded up to a power of two" if self.policy.masked else ""
        numbers = {"most": allowed(most, self.policy.masked), "sent": self.sent, "rarest": support.rarest}
        said = [LIMITED.format(**numbers, rows=support.rows, masked=masked, level=level)]
        rare = self._of_rare(X, columns, counts)
        if rare:
            refuses = self.policy.rare_columns == REFUSE
            said += [*rare, f"  Such columns {'make this site refuse the run' if refuses else 'are zero in runs'}."]
        if self.uncounted:
            said.append(
                f"  {self.uncounted} releases of partsong 0.1.0 are in the ledger, which does not say how many "
                "combinations they\n  sent. Runs without noise are refused until site.toml says it (directions_before)."
            )
        return "\n".join(said), bool(rare)

    def _of_rare(self, X: Any, columns: Sequence[int], counts: np.ndarray) -> list[str]:
        """A line for each plan for which some columns, and not all of them, are used by too few rows."""
        said, each = [], per_direction(self.policy.maximum_exposure)
        for plan in PLANS:
            least = each * counted(self.sent + plan, self.policy.masked)
            count, share = rare_columns(X, tuple(columns), least)
            if count and bool((counts >= least).any()):
                said.append(
                    f"  For {plan} more, fewer than {least} rows use {count} of {len(counts)} columns, which hold "
                    f"{share:.2%} of the squared norm."
                )
        return said


@dataclass(frozen=True, slots=True)
class Joining:
    """`site`: the folder as it would be. `shared`: a key that it would keep; None: the one that it has stays.
    `rare_columns`: what site.toml will say of columns that few rows use; None: what it says already.
    """

    site: SiteFolder
    kit: Kit
    shared: SharedKey | None = None
    rare_columns: str | None = None

    def __post_init__(self) -> None:
        require_policy(self.site.path)
        self.site.require_idle(self.shared)

    def policy(self) -> Policy:
        """The one that is there, or would be made."""
        if has_policy(self.site.path):
            return Policy.read(self.site.path / "site.toml")
        return Policy.from_table(tomllib.loads(POLICY))

    @property
    def asks_of_rare_columns(self) -> bool:
        """Whether site.toml does not say yet what to do about columns that few rows use."""
        place = self.site.path
        return not has_policy(place) or "rare_columns" not in read_toml(place / "site.toml")

    def terms(self) -> Terms:
        """What can be computed from its uploads, for the site to read."""
        policy, books = self.policy(), SiteLedger(self.site.path / "state" / "ledger.jsonl").books()
        stated = policy.directions_before
        sent = books.directions(policy.other_rows_since) + (stated or 0)
        return Terms(policy, sent, books.uncounted(policy.other_rows_since) if stated is None else 0)

    def shared_key(self) -> SharedKey | None:
        """The one that would be used."""
        return self.shared or self.site.shared_key()

    def agreed(self) -> SiteFolder:
        """Write all of it down."""
        made = self.site.make(self.kit.authority, self.shared)
        if self.rare_columns is not None and self.asks_of_rare_columns:
            place = self.site.path / "site.toml"
            write(place, with_rare_columns(place.read_text(encoding="utf-8-sig"), self.rare_columns))
        return made
