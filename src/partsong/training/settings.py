"""Settings that decide the numbers of a fit: how a game is played, and what runs over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from partsong.methods.registry import ASYNCHRONOUS, DSANLS, SAFE

IGNORE = "ignore"
"""Cells that are not there are unknown, and not zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GameSettings:
    """How a game is played; all of it None where there is none. `step` is "safe" or η."""

    play: str | None = None
    step: str | float | None = None
    step_decay: float | None = None
    self_play: str | None = None
    shrink: float | None = None
    leader: str | None = None
    missing: str | None = None

    @property
    def is_game(self) -> bool:
        """Whether there is one."""
        return self.play is not None

    @property
    def knows_some(self) -> bool:
        """Whether cells may be unknown."""
        return self.missing == IGNORE

    def rules(self) -> dict[str, Any]:
        """What is said of it in JSON."""
        return {name: getattr(self, name) for name in GameSettings.__dataclass_fields__}

    def in_words(self) -> str:
        """The same in one line."""
        step = "safe steps" if self.step == SAFE else f"steps of {self.step:g}"
        told = [f"{self.play} play", step if self.step_decay is None else f"{step} / (1 + {self.step_decay:g} t)"]
        told += [] if self.shrink is None else [f"self-play {self.self_play} ({self.shrink:g})"]
        told += [] if self.leader is None else [f"{self.leader} lead"]
        return ", ".join(told + (["known cells only"] if self.knows_some else []))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings(GameSettings):
    """What decides the numbers of a fit over ranks, and how it was run."""

    method: str
    n_components: int
    init: str
    alpha_w: float
    alpha_h: float
    l1_ratio: float
    sketch: str | None
    sketch_ratio: float | None
    seed: int
    dtype: str
    tol: float
    max_iter: int
    time_budget: float | None
    threads: int
    engine: str
    sums: str | None
    ranks: int

    @property
    def is_sketched(self) -> bool:
        """Whether each rank needs columns beside its rows."""
        return self.method == DSANLS

    @property
    def is_asynchronous(self) -> bool:
        """Whether rank 0 is a server without rows."""
        return self.method in ASYNCHRONOUS

    @property
    def workers(self) -> range:
        """The ranks that hold rows."""
        return range(int(self.is_asynchronous), self.ranks)
