"""Options that several commands share."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from partsong.cli.choices import (
    LEADERS,
    MISSING,
    NOISES,
    PLAYS,
    RELATIONS_OF,
    SELF_PLAYS,
    SHRINK,
    UNITS,
    finite,
    one_of,
    positive,
)
from partsong.console.options import OptionalFloat, OptionalPath, OptionalText
from partsong.training.distributed_settings import SAFE

# ---- game options -----------------------------------------------------------------------------------------------
#
# Options of `partsong fit` for games.

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


# ---- privacy options --------------------------------------------------------------------------------------------
#
# Options of `partsong fit` for differential privacy and masked sums between parties.

PRIVACY_PANEL = "Privacy (DATA is a folder of parts)"
RELATIONS = tuple(dict.fromkeys(relation for several in RELATIONS_OF.values() for relation in several))

Epsilon = Annotated[
    OptionalFloat,
    typer.Option(
        help="Differential privacy: the most that the whole run may tell of one unit, as ε. Noise is planned for all "
        "rounds before the first.",
        callback=positive,
        show_default="no noise",
        rich_help_panel=PRIVACY_PANEL,
    ),
]
Delta = Annotated[
    OptionalFloat,
    typer.Option(
        min=0.0,
        help="The δ of that promise; far below one over the number of units.",
        callback=finite,
        show_default="1e-5",
        rich_help_panel=PRIVACY_PANEL,
    ),
]
Unit = Annotated[
    OptionalText,
    typer.Option(
        help="About whom ε is. row: any single row (--method exact); party: all data of a party (methods in which each "
        "sends its own H).",
        callback=one_of(UNITS),
        show_default="needed with --epsilon",
        rich_help_panel=PRIVACY_PANEL,
    ),
]
RowBound = Annotated[
    OptionalFloat,
    typer.Option(
        help="--unit row: the norm beyond which rows are scaled down. Choose it without a look at the data.",
        callback=positive,
        rich_help_panel=PRIVACY_PANEL,
    ),
]
Clip = Annotated[
    OptionalFloat,
    typer.Option(
        help="--unit party: the most that an H_p with rows of norm 1 may lie from the model.",
        callback=positive,
        show_default="1",
        rich_help_panel=PRIVACY_PANEL,
    ),
]
Noise = Annotated[
    OptionalText,
    typer.Option(
        help=f"--unit party: {' or '.join(NOISES)}.",
        callback=one_of(NOISES),
        show_default=NOISES[0],
        rich_help_panel=PRIVACY_PANEL,
    ),
]
Relation = Annotated[
    OptionalText,
    typer.Option(
        help="Which two worlds look alike: " + "; ".join(f"{u}: {' or '.join(r)}" for u, r in RELATIONS_OF.items()),
        callback=one_of(RELATIONS),
        show_default="the first of these",
        rich_help_panel=PRIVACY_PANEL,
    ),
]
Masked = Annotated[
    bool,
    typer.Option(
        "--masked",
        help="Parties add masks that cancel in the sum, so that nobody sees a single upload; at least three parties.",
        rich_help_panel=PRIVACY_PANEL,
    ),
]
MaskedBound = Annotated[
    OptionalFloat,
    typer.Option(
        help="--masked without --epsilon: a public bound of all numbers sent; a party refuses to send a larger one. "
        "Smaller is finer.",
        callback=positive,
        show_default="1e9",
        rich_help_panel=PRIVACY_PANEL,
    ),
]
HtmlReport = Annotated[
    OptionalPath,
    typer.Option(
        "--report",
        help="Also write a page (.html) on the fit: parts, parties, what left each, its ε, and what an attacker makes "
        "of it. It is for the owner of all parts: it shows what no party would release.",
        rich_help_panel=PRIVACY_PANEL,
    ),
]
