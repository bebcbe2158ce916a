"""What a run costs its parties in privacy, counted round by round."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from partsong.core.interfaces import Round
from partsong.errors import ParameterError
from partsong.privacy.accounting import RELATIONS, Accounts, Release

SIMULATED = (
    "relative_error_", "explained_variance_", "component_shares_", "n_samples_", "party_components_", "alignments_",
    "history_.relative_error", "history_.objective", "history_.drift", "history_.aligned_drift",
)  # fmt: skip
"""What a simulation knows of a fit, and parties with differential privacy would not release."""

USUAL_DELTA = 1e-5
"""The δ at which ε is told where nobody has chosen one."""


@dataclass(slots=True)
class Spending:
    """Accounts that are charged for every upload that was asked for, whatever became of it; ε is told at `delta`.

    A round is charged to everybody when it begins, and to those who were in it once it is over: one that is broken off
    may have been sent. Nobody is charged for more than `most` uploads of a run, as no party sends more.
    """

    release: Release
    delta: float = USUAL_DELTA
    accounts: Accounts = field(default_factory=Accounts)
    most: int | None = None
    before: Accounts = field(init=False)
    settled: Accounts | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.before = self.accounts

    def begin(self, names: Iterable[str]) -> None:
        """A round begins in which these parties may send."""
        self.settled, self.accounts = self.accounts, self._charged(names)

    def drop(self) -> None:
        """There was no such round."""
        if self.settled is not None:
            self.accounts, self.settled = self.settled, None

    def note(self, done: Round) -> float:
        """Charge a round; returns what the party has spent by now that has spent most."""
        self.drop()
        self.accounts = self._charged(senders(done))
        return self.accounts.epsilon(self.delta)

    def _charged(self, names: Iterable[str]) -> Accounts:
        made = {name: releases_of(self.accounts, name) - releases_of(self.before, name) for name in names}
        some = sorted(name for name, count in made.items() if self.most is None or count < self.most)
        return self.accounts.charge(some, self.release)

    @property
    def promise(self) -> str:
        """About whom ε is, in words."""
        words = RELATIONS[self.release.unit, self.release.relation]
        is_secure = self.release.is_secure and self.accounts.is_secure
        return words if is_secure else f"NO PROMISE, noise came from a seed; else: {words}"

    def told(self) -> dict[str, Any]:
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


def accounted(rounds: Iterator[Round], spending: Spending, names: Collection[str]) -> Iterator[Round]:
    """The same rounds, each charged before it begins; whoever gets it has `spending` note it."""
    while True:
        spending.begin(names)
        done = next(rounds, None)
        if done is None:
            spending.drop()
            return
        yield done
        del done


def releases_of(accounts: Accounts, party: str) -> int:
    """How many uploads a party was charged for."""
    return len(accounts.ledgers.get(party, ()))


def without_names(told: Mapping[str, Any] | None) -> dict[str, Any]:
    """`Spending.told` for a model file, which names no party."""
    return {name: value for name, value in (told or {}).items() if name != "epsilon_by_party"}


def spent_from(told: Any) -> dict[str, Any] | None:
    """What `without_names` wrote into a model file, and None where there is nothing."""
    if told is None:
        return None
    epsilon = told.get("epsilon_spent") if isinstance(told, Mapping) else None
    if not isinstance(epsilon, int | float) or isinstance(epsilon, bool) or not epsilon >= 0:
        raise ParameterError("privacy_spent does not tell an epsilon_spent.")
    return dict(told)
