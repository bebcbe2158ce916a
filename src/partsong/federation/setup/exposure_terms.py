"""What a site reads before it joins: what can be computed from its uploads, and which columns too few rows use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong.federation.exposure_limit import REFUSE, allowed, counted
from partsong.federation.policy import Policy
from partsong.federation.site.state import rare_columns, supports_of
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
