"""Settings that decide the numbers of a fit: how a game is played, and what runs over ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from partsong import methods
from partsong.core.interfaces import Traits

SAFE = methods.CHOICES["step"][0]

GAME_DEFAULTS = {"play": methods.CHOICES["order"][0], "step": SAFE, "self_play": methods.CHOICES["self_play"][0]}
"""What settings of a game are where nothing is said."""

RANK_SOLVERS = {"exact": "hals", "hals": "cd", "mu": "mu", "bpp": "bpp"}
"""Names of exact sums over ranks -> the solver that does the same to a table in one process."""

OPTIONS = (
    "step", "step_decay", "self_play", "shrink", "leader", "sketch", "sketch_ratio", "local_steps", "align", "start",
)  # fmt: skip
"""Options of methods that are settings by the same name; the order of a game is called play."""


def traits_by_name(method: str) -> Traits:
    """What the program of a method over ranks asks of engines."""
    return methods.method("exact" if method in RANK_SOLVERS else method).traits


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

    def options(self, parameters: Collection[str]) -> dict[str, Any]:
        """Options of a method, as far as it takes them."""
        given = {"order": self.play, **{name: getattr(self, name, None) for name in OPTIONS}}
        return {name: value for name, value in given.items() if name in parameters and value is not None}

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
class DistributedSettings(GameSettings):
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
    method_options: Mapping[str, Any] = field(default_factory=dict)

    def options(self, parameters: Collection[str]) -> dict[str, Any]:
        return {**GameSettings.options(self, parameters), **self.method_options}

    def as_json(self) -> dict[str, Any]:
        """All of them as plain data."""
        told = asdict(self)
        return told if told["method_options"] else {name: told[name] for name in told if name != "method_options"}

    @property
    def is_sketched(self) -> bool:
        """Whether each rank needs columns beside its rows."""
        return traits_by_name(self.method).needs_columns

    @property
    def is_asynchronous(self) -> bool:
        """Whether rank 0 is a server without rows."""
        return traits_by_name(self.method).asynchronous

    @property
    def workers(self) -> range:
        """The ranks that hold rows."""
        return range(int(self.is_asynchronous), self.ranks)
