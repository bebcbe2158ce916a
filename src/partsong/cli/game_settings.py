"""A game from the command line: which of its options need each other, and what is said of it afterwards."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import typer

from partsong.cli.choices import AT_ONCE, GAME, IGNORE, MISSING, PLAYS, SAFE, SELF_PLAYS, SHRINK
from partsong.cli.wording import option

FOR_GAMES = {"play", "step", "step_decay", "self_play", "shrink", "leader", "missing"}
PENALTIES = ("alpha_w", "alpha_h", "l1_ratio")
DEFAULTS = {"play": PLAYS[0], "step": SAFE, "self_play": SELF_PLAYS[0], "missing": MISSING[0]}


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


def complete_game(known: dict[str, Any], given: Collection[str], *, is_between_parties: bool) -> None:
    """Settings of the game that was asked for, or None for each; refuses those that make no sense."""
    is_game = GAME in (known.get("solver"), known["method"])
    require_game(known, given, is_game=is_game, is_between_parties=is_between_parties)
    if not is_game:
        known |= dict.fromkeys(FOR_GAMES)
        return
    known |= {name: default for name, default in DEFAULTS.items() if known[name] is None}
    known["shrink"] = shrink_of(known)


def shrink_of(known: Mapping[str, Any]) -> float | None:
    """The factor of self-play, where there is any."""
    if known["self_play"] == SELF_PLAYS[0]:
        return None
    return SHRINK if known["shrink"] is None else float(known["shrink"])


def require_game(known: Mapping[str, Any], given: Collection[str], *, is_game: bool, is_between_parties: bool) -> None:
    """Refuse options of games where nobody plays, and those that make no sense together."""
    if not is_game:
        idle = sorted(FOR_GAMES.intersection(given))
        if idle:
            flags = ", ".join(map(option, idle))
            raise typer.BadParameter(
                f"only for games: --solver {GAME} for a file, --method {GAME} for a folder of parts or over ranks.",
                param_hint=flags,
            )
        return
    for name, is_wrong, why in _conflicts(known, given, is_between_parties):
        if is_wrong:
            raise typer.BadParameter(why, param_hint=option(name))


def _conflicts(
    known: Mapping[str, Any], given: Collection[str], is_between_parties: bool
) -> list[tuple[str, bool, str]]:
    """Option, whether it is wrong here, and why."""
    play, missing = known["play"], known["missing"]
    cells = ", ".join(name for name in PLAYS if name not in AT_ONCE)
    penalty = next((name for name in PENALTIES if known.get(name)), PENALTIES[0])
    is_decay_idle = known["step_decay"] is not None and known["step"] in (SAFE, None)
    is_shrink_idle = "shrink" in given and known["self_play"] in (SELF_PLAYS[0], None)
    is_partial = missing == IGNORE and known.get("init") not in (None, "auto", "random")
    return [
        ("step_decay", is_decay_idle, f"needs a number as --step: steps by norms ({SAFE}) set their own pace."),
        ("shrink", is_shrink_idle, f"needs --self-play {' or '.join(SELF_PLAYS[1:])}."),
        (
            "leader",
            known["leader"] is not None and play in AT_ONCE,
            f"for players who meet in pairs; with --play {play} all players of a side move at once.",
        ),
        (
            "play",
            is_between_parties and play in AT_ONCE,
            f"{play} moves all players at once, which takes all rows in one place. Between parties: {cells}.",
        ),
        (penalty, bool(known.get(penalty)), "a game has no penalties. Leave it out; --self-play shapes H instead."),
        ("init", is_partial, "needs all cells, and --missing ignore leaves some out. Say random, or nothing."),
    ]
