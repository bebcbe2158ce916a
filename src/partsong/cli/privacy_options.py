"""Options of `partsong fit` for differential privacy and masked sums between parties."""

from __future__ import annotations

from typing import Annotated

import typer

from partsong.cli.choices import NOISES, RELATIONS_OF, UNITS, finite, one_of, positive
from partsong.cli.options import OptionalFloat, OptionalPath, OptionalText

PANEL = "Privacy (DATA is a folder of parts)"
RELATIONS = tuple(dict.fromkeys(relation for several in RELATIONS_OF.values() for relation in several))

Epsilon = Annotated[
    OptionalFloat,
    typer.Option(
        help="Differential privacy: the most that the whole run may tell of one unit, as ε. Noise is planned for all "
        "rounds before the first.",
        callback=positive,
        show_default="no noise",
        rich_help_panel=PANEL,
    ),
]
Delta = Annotated[
    OptionalFloat,
    typer.Option(
        min=0.0,
        help="The δ of that promise; far below one over the number of units.",
        callback=finite,
        show_default="1e-5",
        rich_help_panel=PANEL,
    ),
]
Unit = Annotated[
    OptionalText,
    typer.Option(
        help="About whom ε is. row: any single row (--method exact); party: all data of a party (methods in which each "
        "sends its own H).",
        callback=one_of(UNITS),
        show_default="needed with --epsilon",
        rich_help_panel=PANEL,
    ),
]
RowBound = Annotated[
    OptionalFloat,
    typer.Option(
        help="--unit row: the norm beyond which rows are scaled down. Choose it without a look at the data.",
        callback=positive,
        rich_help_panel=PANEL,
    ),
]
Clip = Annotated[
    OptionalFloat,
    typer.Option(
        help="--unit party: the most that an H_p with rows of norm 1 may lie from the model.",
        callback=positive,
        show_default="1",
        rich_help_panel=PANEL,
    ),
]
Noise = Annotated[
    OptionalText,
    typer.Option(
        help=f"--unit party: {' or '.join(NOISES)}.",
        callback=one_of(NOISES),
        show_default=NOISES[0],
        rich_help_panel=PANEL,
    ),
]
Relation = Annotated[
    OptionalText,
    typer.Option(
        help="Which two worlds look alike: " + "; ".join(f"{u}: {' or '.join(r)}" for u, r in RELATIONS_OF.items()),
        callback=one_of(RELATIONS),
        show_default="the first of these",
        rich_help_panel=PANEL,
    ),
]
Masked = Annotated[
    bool,
    typer.Option(
        "--masked",
        help="Parties add masks that cancel in the sum, so that nobody sees a single upload; at least three parties.",
        rich_help_panel=PANEL,
    ),
]
MaskedBound = Annotated[
    OptionalFloat,
    typer.Option(
        help="--masked without --epsilon: a public bound of all numbers sent; a party refuses to send a larger one. "
        "Smaller is finer.",
        callback=positive,
        show_default="1e9",
        rich_help_panel=PANEL,
    ),
]
HtmlReport = Annotated[
    OptionalPath,
    typer.Option(
        "--report",
        help="Also write a page (.html) on the fit: parts, parties, what left each, its ε, and what an attacker makes "
        "of it. It is for the owner of all parts: it shows what no party would release.",
        rich_help_panel=PANEL,
    ),
]
