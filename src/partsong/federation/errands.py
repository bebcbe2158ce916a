"""Who is asked for what in an asynchronous run, since when, who rests, and when somebody counts as lost."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from partsong.engines.rounds import nobody_left
from partsong.errors import PartsongError
from partsong.federation.refusals import SiteLost
from partsong.federation.ways_on import USUAL
from partsong.federation.wire import Nonce

NOBODY: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Errand:
    """What a site is asked for, and since when."""

    nonce: Nonce
    since: float


@dataclass(slots=True)
class Errands:
    """Errands that are out, by name; who rests until when; why the last of a site was in vain; and how often others
    were heard since a site was due.

    A site that says no is asked again after `pause` seconds, one that says nothing is lost after `timeout` of them:
    `is_strict` makes that an error, and else the others go on as long as there is one.
    """

    timeout: float
    pause: float
    is_strict: bool
    out: dict[str, Errand] = field(default_factory=dict)
    resting: dict[str, float] = field(default_factory=dict)
    faults: dict[str, PartsongError] = field(default_factory=dict)
    passed: Counter[str] = field(default_factory=Counter)

    def idle(self, names: Sequence[str]) -> list[str]:
        """Who has nothing to do, and does not rest."""
        now = time.monotonic()
        self.resting = {name: due for name, due in self.resting.items() if due > now}
        return [name for name in names if name not in self.out and name not in self.resting]

    def send(self, name: str, nonce: Nonce) -> None:
        """A site is asked."""
        self.out[name] = Errand(nonce, time.monotonic())

    def heard(self, name: str, overdue: frozenset[str], among: int) -> Errand:
        """What a site that was heard had been asked for. Somebody who was overdue before is lost once all the others
        may have been heard since: replies that have come together are handed out one by one.
        """
        errand = self.out.pop(name)
        self.passed = Counter({one: self.passed[one] + 1 for one in overdue - {name}})
        self._require(one for one in sorted(self.passed) if self.passed[one] > among)
        return errand

    def nothing_came(self, index: int) -> None:
        """Nobody has a reply: who is overdue is lost."""
        overdue = self.overdue()
        self._require(sorted(overdue))
        self.require_somebody(index, overdue)

    def failed(self, name: str, error: PartsongError, index: int) -> None:
        """A site is asked for the same again later, if there are others."""
        self.resting[name], self.faults[name] = time.monotonic() + self.pause, error
        self.require_somebody(index)

    def leave_out(self, name: str, error: PartsongError, index: int) -> None:
        """A site is asked for nothing more, if there are others."""
        self.resting[name], self.faults[name] = math.inf, error
        self.require_somebody(index)

    def require_somebody(self, index: int, overdue: frozenset[str] = NOBODY) -> None:
        """Raise where nobody is asked but those who are overdue."""
        if self.out.keys() <= overdue:
            faults = {**{name: self.lost(name) for name in overdue}, **self.faults}
            error = nobody_left({name: faults[name] for name in sorted(faults)}, index)
            error.add_note(USUAL)
            raise error

    def excused(self, name: str, error: PartsongError) -> PartsongError:
        """The error, if its site is left out; one that does not say what can be done is given the usual way on."""
        if self.is_strict:
            ways = list(getattr(error, "__notes__", ())) or [USUAL]
            error.__notes__ = [f"(site {name!r})", *ways]
            raise error
        return error

    def missing(self) -> dict[str, str]:
        """Who is not there at the moment, and why."""
        lost = {name: self.lost(name) for name in self.overdue()}
        return {name: str(why) for name, why in {**lost, **self.faults}.items()}

    def overdue(self) -> frozenset[str]:
        """Who was asked too long ago."""
        until = time.monotonic() - self.timeout
        return frozenset(name for name, errand in self.out.items() if errand.since <= until)

    def longest_wait(self, until: float | None, overdue: frozenset[str]) -> float:
        """Seconds to the next moment at which something has to be done, though nobody is heard."""
        if overdue and self.is_strict:
            return 0.0
        now, dues = time.monotonic(), [due for due in self.resting.values() if due < math.inf]
        dues += [] if until is None else [until]
        dues += [errand.since + self.timeout for name, errand in self.out.items() if name not in overdue]
        return max(0.0, min(dues, default=now) - now)

    def lost(self, name: str) -> SiteLost:
        """The error of a site that is silent."""
        number = self.out[name].nonce.round
        return SiteLost(f"Site {name!r} was not heard in its round {number}: nothing came in time.")

    def _require(self, names: Iterable[str]) -> None:
        for name in names:
            self.excused(name, self.lost(name))
