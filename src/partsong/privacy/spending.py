"""What a run costs its parties in privacy, counted round by round."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from partsong.core.interfaces import Round
from partsong.errors import ParameterError
from partsong.privacy.accounting import RELATIONS, Accounts, Release

SIMULATION_ONLY = (
    "relative_error_", "explained_variance_", "component_shares_", "n_samples_", "party_components_", "alignments_",
    "history_.relative_error", "history_.objective", "history_.drift", "history_.aligned_drift",
)  # fmt: skip
"""What a simulation knows of a fit, and parties with differential privacy would not release."""

DEFAULT_DELTA = 1e-5
"""The δ at which ε is told where nobody has chosen one."""


@dataclass(slots=True)
class PrivacyTracker:
    """Accounts that are charged for every upload that was asked for, whatever became of it; ε is told at `delta`.

    A round is charged to everybody when it begins, and to those who were in it once it is over: one that is broken off
    may have been sent. Nobody is charged for more than `most` uploads of a run, as no party sends more.
    """

    release: Release
    delta: float = DEFAULT_DELTA
    accounts: Accounts = field(default_factory=Accounts)
    max_releases: int | None = None
    initial_accounts: Accounts = field(init=False)
    accounts_before_round: Accounts | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.initial_accounts = self.accounts

    def start_round(self, names: Iterable[str]) -> None:
        """A round begins in which these parties may send."""
        self.accounts_before_round, self.accounts = self.accounts, self._charged(names)

    def cancel_round(self) -> None:
        """There was no such round."""
        if self.accounts_before_round is not None:
            self.accounts, self.accounts_before_round = self.accounts_before_round, None

    def record_round(self, done: Round) -> float:
        """Charge a round; returns what the party has spent by now that has spent most."""
        self.cancel_round()
        self.accounts = self._charged(senders(done))
        return self.accounts.epsilon(self.delta)

    def _charged(self, names: Iterable[str]) -> Accounts:
        made = {
            name: count_releases(self.accounts, name) - count_releases(self.initial_accounts, name) for name in names
        }
        some = sorted(name for name, count in made.items() if self.max_releases is None or count < self.max_releases)
        return self.accounts.charge(some, self.release)

    @property
    def promise(self) -> str:
        """About whom ε is, in words."""
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
    """Who has sent, or may have sent, something in a round: a refused upload has been made, too."""
    return {*done.participants, *done.refused, *(name for name, sent in done.bytes_up.items() if sent)}


def charge_rounds(rounds: Iterator[Round], tracker: PrivacyTracker, names: Collection[str]) -> Iterator[Round]:
    """The same rounds, each charged before it begins; whoever gets it has `spending` note it."""
    while True:
        tracker.start_round(names)
        done = next(rounds, None)
        if done is None:
            tracker.cancel_round()
            return
        yield done
        del done


def count_releases(accounts: Accounts, party: str) -> int:
    """How many uploads a party was charged for."""
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
        raise ParameterError("privacy_spent does not tell an epsilon_spent.")
    return dict(values)
