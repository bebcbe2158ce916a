"""A game by the names that model files and the command line have for its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from partsong import recipes
from partsong.errors import ParameterError
from partsong.local.game import Game
from partsong.local.step_sizes import ConstantStep, DecayingStep, SafeStep, StepSize

SAFE = "safe"


def names_of(game: Game) -> dict[str, Any]:
    """What a file says of a game: its parts by name, or all of it as text where a part has none."""
    step, alone = game.step, game.self_play
    told = {
        "play": next((name for name, order in recipes.orders().items() if order == game.order), None),
        "step": getattr(step, "eta", SAFE),
        "step_decay": getattr(step, "decay", None),
        "self_play": next((name for name, one in recipes.self_plays().items() if type(one) is type(alone)), None),
        "shrink": getattr(alone, "factor", None),
        "leader": game.leader,
    }
    try:
        is_told = game_named(told) == game
    except (ParameterError, TypeError):
        is_told = False
    return told if is_told else {"game": repr(game)}


def game_named(told: Mapping[str, Any]) -> Game:
    """The game that a file tells of; parts that it leaves out are those of any game."""
    order, self_play = told.get("play") or "stratified", told.get("self_play") or "none"
    eta, decay, shrink = told.get("step"), told.get("step_decay"), told.get("shrink")
    if order not in recipes.orders() or self_play not in recipes.self_plays():
        raise ParameterError(f"There is no play {order!r} with self-play {self_play!r}.")
    step: StepSize = SafeStep()
    if eta not in (SAFE, None):
        step = ConstantStep(eta) if decay is None else DecayingStep(eta, decay)
    alone: Any = recipes.self_plays()[self_play]
    alone = alone if shrink is None else replace(alone, factor=shrink)
    return Game(recipes.orders()[order], step, alone, told.get("leader"))


def game_told(settings: Mapping[str, Any]) -> Game | str:
    """The solver of a model that was learned by a game: "game" for the usual one, and where it cannot be told."""
    try:
        game = game_named(settings)
    except (ParameterError, TypeError):
        return "game"
    return "game" if game == Game() else game
