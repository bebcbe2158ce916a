"""Options of `partsong fit` for games."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from partsong.cli.choices import LEADERS, MISSING, PLAYS, SAFE, SELF_PLAYS, SHRINK, finite, one_of, positive
from partsong.cli.options import OptionalFloat, OptionalText

PANEL = "Games (--solver game, --method game)"


def _step(value: str | float) -> str | float:
    """A check for --step: "safe", or a finite number of more than 0."""
    if value == SAFE:
        return SAFE
    try:
        eta = float(value)
    except ValueError:
        eta = math.nan
    if not (math.isfinite(eta) and eta > 0):
        raise typer.BadParameter(f"{value!r} is neither {SAFE} nor a finite number of more than 0.")
    return eta


Play = Annotated[
    str,
    typer.Option(
        help=f"Who plays when: {', '.join(PLAYS)}. The first is sequential play in an order that all cores can share.",
        callback=one_of(PLAYS),
        rich_help_panel=PANEL,
    ),
]
Step = Annotated[
    str,
    typer.Option(
        metavar="safe|NUMBER",
        help="How far players move: safe goes by their norms and needs no number.",
        callback=_step,
        rich_help_panel=PANEL,
    ),
]
StepDecay = Annotated[
    OptionalFloat,
    typer.Option(help="Sweep t takes --step / (1 + this · t), t = 0, 1, …", callback=positive, rich_help_panel=PANEL),
]
SelfPlay = Annotated[
    str,
    typer.Option(
        help="Once a sweep each column of H shrinks: min: its smallest entry; max: all but its largest.",
        callback=one_of(SELF_PLAYS),
        rich_help_panel=PANEL,
    ),
]
Shrink = Annotated[
    OptionalFloat,
    typer.Option(
        min=0.0,
        max=1.0,
        help="The factor of --self-play.",
        callback=finite,
        show_default=str(SHRINK),
        rich_help_panel=PANEL,
    ),
]
Leader = Annotated[
    OptionalText,
    typer.Option(
        help=f"Who moves first in a meeting, {' or '.join(LEADERS)}.",
        callback=one_of(LEADERS),
        show_default="both at once",
        rich_help_panel=PANEL,
    ),
]
Missing = Annotated[
    str,
    typer.Option(
        help="Blanks and NaN, and cells that a sparse file does not store. refuse: an error, and zeros; ignore: not "
        "known, and not played.",
        callback=one_of(MISSING),
        rich_help_panel=PANEL,
    ),
]
