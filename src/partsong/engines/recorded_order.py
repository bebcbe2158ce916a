"""A virtual clock on which arrivals come in a given order: an asynchronous run that was recorded, run again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from partsong.core import Shard
from partsong.engines.virtual_clock import Durations


@dataclass(frozen=True, slots=True)
class RecordedOrder(Durations):
    """The i-th arrival of all is that of order[i], at second i + 1; pieces that are not in it never arrive.

    A piece of work is a function of its party's state and of the model that its last upload was answered with, and so
    the order is all that a run depends on. `Schedule.rounds` is at most the length of the order.
    """

    order: tuple[str, ...] = ()
    lasting: dict[str, list[int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        seconds: dict[str, list[int]] = {}
        for second, name in enumerate(self.order, 1):
            seconds.setdefault(name, [0]).append(second)
        lasting = {name: [late - early for early, late in pairwise(given)] for name, given in seconds.items()}
        object.__setattr__(self, "lasting", lasting)

    def check(self, names: Sequence[str]) -> None:
        """Refuse names that no party has."""
        Durations(stragglers=dict.fromkeys(self.order, 1.0)).check(names)

    def of(self, shard: Shard, number: int, seed: int) -> float:
        """Seconds from the arrival before of this party to that of its piece of this number."""
        known = self.lasting.get(shard.name, [])
        return float(known[number]) if number < len(known) else math.inf
