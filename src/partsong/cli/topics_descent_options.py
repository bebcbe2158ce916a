"""Options of `partsong topics fit` for methods that take steps on batches of texts."""

from __future__ import annotations

from typing import Annotated

from partsong.cli.choices import one_of, positive
from partsong.cli.options import OptionalFloat, OptionalInt, OptionalText
from partsong.cli.topics_fit_options import in_panel
from partsong.topic_names import DESCENDING

DESCENT = "Descents"
DESCENTS = ", ".join(DESCENDING)
CRITICS, GRADIENTS = ("concat", "separable"), ("dv", "js")
"""Names of `partsong.topic_recipes`, which takes longer to import than to repeat."""

Epochs = Annotated[
    OptionalInt,
    in_panel("--epochs", panel=DESCENT, min=1, help=f"{DESCENTS}: passes over the texts per round.", show_default="10"),
]
Batch = Annotated[
    OptionalInt, in_panel("--batch", panel=DESCENT, min=1, help="The same: texts per step.", show_default="64")
]
Rate = Annotated[
    OptionalFloat, in_panel("--rate", panel=DESCENT, help="The same: step.", callback=positive, show_default="0.05")
]
Strength = Annotated[
    OptionalFloat,
    in_panel(
        "--strength",
        panel=DESCENT,
        min=0.0,
        help="nmf-sgd-mi, fednmf-mi: how much mutual information counts.",
        show_default="0.1",
    ),
]
Critic = Annotated[
    OptionalText,
    in_panel(
        "--critic",
        panel=DESCENT,
        help="The same two: the network that judges which weights belong to which text, as in the paper (concat) or "
        "in two halves (separable). It is sent with the topics; without --masked it tells each party's words to the "
        "letter.",
        callback=one_of(CRITICS),
        metavar="|".join(CRITICS),
        show_default=CRITICS[0],
    ),
]
MiGradient = Annotated[
    OptionalText,
    in_panel(
        "--mi-gradient",
        panel=DESCENT,
        help="The same two: slopes by which the critic learns, dv (as in the paper; it hardly learns) or js (it does, "
        "with --critic-rate 0.2 to 0.5).",
        callback=one_of(GRADIENTS),
        metavar="|".join(GRADIENTS),
        show_default=GRADIENTS[0],
    ),
]
CriticRate = Annotated[
    OptionalFloat,
    in_panel(
        "--critic-rate",
        panel=DESCENT,
        help="The same two: the critic's step.",
        callback=positive,
        show_default="that of --rate",
    ),
]
FitsFirst = Annotated[
    bool,
    in_panel(
        "--fits-first",
        panel=DESCENT,
        help=f"{DESCENTS}: fit weights to the topics before each round but the first.",
    ),
]
Device = Annotated[
    OptionalText,
    in_panel(
        "--device",
        panel=DESCENT,
        help=f"{DESCENTS}: compute with torch on this device.",
        show_default="none: NumPy",
        metavar="cpu|cuda|…",
    ),
]
