"""Virtual time: how long pieces of work take, and synchronous runs over the same clock.

No engine sleeps, and none looks at the host's clock: the same settings give the same times everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from partsong.core import Checkpoint, Engine, Message, Program, Reduction, Round, Schedule, Shard
from partsong.errors import ParameterError
from partsong.streams import stream

LARGEST = 700.0
"""Exponents whose exponential is a finite number."""


@dataclass(frozen=True, slots=True)
class Durations:
    """Virtual seconds from the model that a party is sent to the arrival of what it makes of it.

        d(p, i) = latency + base_p · straggler_p · exp(jitter · z_pi),   base_p = seconds_p, or per_row · n_p

    for the i-th piece of party p. `seconds` names all parties or none, `stragglers` those that differ, 2 for half the
    speed. z_pi is standard normal, from a stream of the run's seed, p and i: it depends on nothing else. `latency` is
    that of both ways together.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    stragglers: Mapping[str, float] = field(default_factory=dict)
    jitter: float = 0.0
    latency: float = 0.0
    per_row: float = 1.0

    def __post_init__(self) -> None:
        named = {
            f"{what} of {name!r}": value
            for what in ("seconds", "stragglers")
            for name, value in getattr(self, what).items()
        }
        for what, value in {**named, "per_row": self.per_row}.items():
            if not 0 < value < math.inf:
                raise ParameterError(f"Durations need {what} > 0 and finite; got {value!r}.")
        for what, value in (("jitter", self.jitter), ("latency", self.latency)):
            if not 0 <= value < math.inf:
                raise ParameterError(f"Durations need {what} ≥ 0 and finite; got {value!r}.")

    def check(self, names: Sequence[str]) -> None:
        """Refuse names that no party has, and seconds for some parties only."""
        unknown = sorted((self.seconds.keys() | self.stragglers.keys()) - set(names))
        if unknown:
            raise ParameterError(
                f"The durations name parties that are not there: {', '.join(unknown[:5])}. "
                f"The parties are {', '.join(sorted(names)[:5])}{'…' if len(names) > 5 else ''}."
            )
        missing = sorted(set(names) - self.seconds.keys()) if self.seconds else []
        if missing:
            raise ParameterError(
                f"The durations say nothing of {', '.join(missing[:5])}. Name the seconds of all parties, or of none: "
                "then they are proportional to rows."
            )

    def of(self, shard: Shard, number: int, seed: int) -> float:
        """d(p, i) for a party's piece of that number, from 0."""
        name = shard.name
        base = self.seconds[name] if self.seconds else self.per_row * shard.matrix.shape[0]
        exponent = self.jitter * stream(seed, "duration", name, number).standard_normal() if self.jitter else 0.0
        scale = math.exp(exponent) if exponent < LARGEST else math.inf
        duration = self.latency + base * self.stragglers.get(name, 1.0) * scale
        if not 0 < duration < math.inf:
            raise ParameterError(
                f"A piece of work of party {name!r} would last {duration!r} virtual seconds; it must be more than 0 "
                "and finite. Name its seconds, or lower the jitter."
            )
        return duration


@dataclass(frozen=True, slots=True)
class Clocked:
    """A synchronous engine in one process, with virtual seconds: a round lasts as long as its slowest party.

        seconds = max_p d(p, round) over all that are asked

    Models and all else are the engine's. Exchanges in which nobody works last as long as the latency. With one party
    the clock is that of `Asynchronous` with the same durations.
    """

    engine: Engine
    durations: Durations = Durations()

    def run(
        self,
        program: Program,
        shards: Sequence[Shard],
        schedule: Schedule,
        *,
        reduction: Reduction,
        resume: Checkpoint | None = None,
    ) -> Iterator[Round]:
        """The rounds of the engine, timed anew."""
        self.durations.check([shard.name for shard in shards])
        by_name = {shard.name: shard for shard in shards}
        model: Message | None = None if resume is None else resume.model
        works: Any = getattr(program, "works", None)
        for done in self.engine.run(program, shards, schedule, reduction=reduction, resume=resume):
            is_work = model is None or works is None or works(model)
            lasts = [self.durations.of(by_name[name], done.index, schedule.seed) for name in done.bytes_up]
            model = done.model
            yield replace(done, seconds=max(lasts) if is_work else self.durations.latency)
            del done
