"""Privacy accounting of a run: each party is charged round by round."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from partsong.core.interfaces import Round, Traits
from partsong.errors import ParameterError
from partsong.privacy.accounting import RELATIONS, Accounts, Release

SIMULATION_ONLY = (
    "relative_error_", "explained_variance_", "component_shares_", "n_samples_", "party_components_", "alignments_",
    "history_.relative_error", "history_.objective", "history_.drift", "history_.aligned_drift",
)  # fmt: skip
"""Attributes of a fit that only a simulation has; parties with differential privacy would not release them."""

DEFAULT_DELTA = 1e-5
"""The default δ at which ε is reported."""


@dataclass(slots=True)
class PrivacyTracker:
    """Charges parties for every requested upload, even if it fails or is lost; ε is reported at `delta`.

    When a round starts, all parties are charged, because an interrupted round may have been sent. When it ends, only
    its senders stay charged. A party is charged for uploads that `traits.allows` only: it makes no others.
    """

    traits: Traits
    delta: float = DEFAULT_DELTA
    accounts: Accounts = field(default_factory=Accounts)
    initial_accounts: Accounts = field(init=False)
    accounts_before_round: Accounts | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.initial_accounts = self.accounts

    @property
    def release(self) -> Release:
        """The cost of the first upload, which has the unit and relation of all."""
        release: Release = self.traits.release
        return release

    def start_round(self, names: Iterable[str], index: int) -> None:
        """Charge these parties for an exchange in which they may send."""
        self.accounts_before_round, self.accounts = self.accounts, self._charged(names, index)

    def cancel_round(self) -> None:
        """Undo the charge of a round that did not take place."""
        if self.accounts_before_round is not None:
            self.accounts, self.accounts_before_round = self.accounts_before_round, None

    def record_round(self, done: Round) -> float:
        """Charge the senders of a finished round; return the largest ε that a party has spent so far."""
        self.cancel_round()
        self.accounts = self._charged(senders(done), done.index)
        return self.accounts.epsilon(self.delta)

    def _charged(self, names: Iterable[str], index: int) -> Accounts:
        some = sorted(name for name in names if self.traits.allows(self.made(name), index))
        return self.accounts.charge(some, self.traits.release_at(index))

    def made(self, name: str) -> int:
        """The number of uploads that a party was charged for in this run."""
        return count_releases(self.accounts, name) - count_releases(self.initial_accounts, name)

    @property
    def promise(self) -> str:
        """The unit and relation that ε protects, in words."""
        words = RELATIONS[self.release.unit, self.release.relation]
        is_secure = self.release.is_secure and self.accounts.is_secure
        return words if is_secure else f"NO PROMISE, noise came from a seed; else: {words}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a report, a model file or a script."""
        return {
            "epsilon_spent": self.accounts.epsilon(self.delta),
            "delta": self.delta,
            "unit": self.release.unit,
            "relation": self.release.relation,
            "promise": self.promise,
            "noise": self.release.kind,
            "noise_multiplier": self.release.noise_multiplier,
            "epsilon_by_party": self.accounts.epsilons(self.delta),
        }


def senders(done: Round) -> set[str]:
    """Return the parties that sent, or may have sent, an upload in a round, including refused uploads."""
    return {*done.participants, *done.refused, *(name for name, sent in done.bytes_up.items() if sent)}


def charge_rounds(
    rounds: Iterator[Round], tracker: PrivacyTracker, names: Collection[str], first: int = 0
) -> Iterator[Round]:
    """Charge each exchange, from number `first` on, before it starts, and yield it; the caller then calls
    `tracker.record_round`.
    """
    for index in count(first):
        tracker.start_round(names, index)
        done = next(rounds, None)
        if done is None:
            tracker.cancel_round()
            return
        yield done
        del done


def count_releases(accounts: Accounts, party: str) -> int:
    """Return the number of uploads that a party was charged for."""
    return len(accounts.ledgers.get(party, ()))


def remove_names(values: Mapping[str, Any] | None) -> dict[str, Any]:
    """`PrivacyTracker.to_dict` for a model file, which names no party."""
    return {name: value for name, value in (values or {}).items() if name != "epsilon_by_party"}


def parse_spent(values: Any) -> dict[str, Any] | None:
    """What `remove_names` wrote into a model file, and None where there is nothing."""
    if values is None:
        return None
    epsilon = values.get("epsilon_spent") if isinstance(values, Mapping) else None
    if not isinstance(epsilon, int | float) or isinstance(epsilon, bool) or not epsilon >= 0:
        raise ParameterError("privacy_spent has no valid epsilon_spent. Restore the file, or fit the model again.")
    return dict(values)
