"""Options of `partsong topics fit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from partsong.cli.choices import one_of, positive
from partsong.cli.options import OptionalFloat, OptionalInt, OptionalPath, OptionalText
from partsong.cli.topics_options import TEXTS
from partsong.topic_names import ALONE, DESCENDING, LANGUAGES, SERVERS, TOGETHER

LEARNING, DESCENT, WORDS, PARTIES, KEEPING = "Learning", "Descents", "Words", "Parties (several files)", "Keeping"
DESCENTS = ", ".join(DESCENDING)


def _option(*names: str, panel: str, help: str, **more: object) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)  # type: ignore[arg-type]


Texts = Annotated[
    list[Path], typer.Argument(metavar="TEXTS…", help=f"{TEXTS} Several: each is of one party.", show_default=False)
]
NTopics = Annotated[int, _option("--topics", "-k", panel=LEARNING, min=1, help="Number of topics.")]
Method = Annotated[
    OptionalText,
    _option(
        "--method",
        panel=LEARNING,
        help=f"One file: {', '.join(ALONE)}. Several: exact, as if the texts were pooled; fnmf: local models, "
        "matched, then exact; fednmf: descent at the parties, averages; fednmf-mi: the same with mutual "
        "information; fedlda: latent Dirichlet allocation.",
        callback=one_of((*ALONE, *TOGETHER)),
        show_default="nmf; exact for several files",
    ),
]
Rounds = Annotated[
    OptionalInt,
    _option("--rounds", panel=LEARNING, min=1, help="Most rounds.", show_default="200 for nmf, exact, fnmf; else 50"),
]
Seed = Annotated[int, _option("--seed", panel=LEARNING, min=0, help="Random seed.")]

Epochs = Annotated[
    OptionalInt,
    _option("--epochs", panel=DESCENT, min=1, help=f"{DESCENTS}: passes over the texts per round.", show_default="10"),
]
Batch = Annotated[
    OptionalInt, _option("--batch", panel=DESCENT, min=1, help="The same: texts per step.", show_default="64")
]
Rate = Annotated[
    OptionalFloat, _option("--rate", panel=DESCENT, help="The same: step.", callback=positive, show_default="0.05")
]
Strength = Annotated[
    OptionalFloat,
    _option(
        "--strength",
        panel=DESCENT,
        min=0.0,
        help="nmf-sgd-mi, fednmf-mi: how much mutual information counts.",
        show_default="0.1",
    ),
]
Device = Annotated[
    OptionalText,
    _option(
        "--device",
        panel=DESCENT,
        help=f"{DESCENTS}: compute with torch on this device.",
        show_default="none: NumPy",
        metavar="cpu|cuda|…",
    ),
]

Server = Annotated[
    OptionalText,
    _option(
        "--server",
        panel=PARTIES,
        help=f"fednmf, fednmf-mi: how averages move the model, {', '.join(SERVERS)}.",
        callback=one_of(SERVERS),
        show_default=SERVERS[0],
    ),
]
ServerRate = Annotated[
    OptionalFloat,
    _option(
        "--server-rate",
        panel=PARTIES,
        help="adagrad, yogi, adam: the server's step.",
        callback=positive,
        show_default="0.03",
    ),
]
Participation = Annotated[
    OptionalFloat,
    _option(
        "--participation",
        panel=PARTIES,
        min=0.0,
        max=1.0,
        help="fednmf, fednmf-mi, fedlda: share of the parties that is drawn for each round.",
        show_default="1",
    ),
]
Masked = Annotated[
    bool, _option("--masked", panel=PARTIES, help="Mask uploads of the rounds, so that only sums are seen.")
]
MinParties = Annotated[
    OptionalInt,
    _option("--min-parties", panel=PARTIES, min=1, help="Parties that a word is at, or more.", show_default="2"),
]

VocabularyFrom = Annotated[
    OptionalText,
    _option(
        "--vocabulary",
        panel=WORDS,
        help="agree: the parties find out which words enough of them have; hash: words have no names; or a file "
        "with one word per line.",
        show_default="agree; of one file, its words",
        metavar="agree|hash|FILE",
    ),
]
MinDocuments = Annotated[
    OptionalInt,
    _option(
        "--min-documents",
        panel=WORDS,
        min=1,
        help="Documents that a word is in, or more; with several files, at each of --min-parties.",
        show_default="2; 1 with several files",
    ),
]
MaxWords = Annotated[
    OptionalInt, _option("--max-words", panel=WORDS, min=1, help="Keep the most frequent words.", show_default="all")
]
Language = Annotated[
    str, _option("--language", panel=WORDS, help=f"Whose stop words are left out: {', '.join(LANGUAGES)} (keep all).")
]
StopWords = Annotated[
    OptionalPath, _option("--stop-words", panel=WORDS, help="A file with further ones, one per line.")
]
Output = Annotated[
    OptionalPath, _option("--output", "-o", panel=KEEPING, help="The model file to write (.safetensors).")
]
Html = Annotated[
    OptionalPath, _option("--html", panel=KEEPING, help="Also write a page with a map of the topics (.html).")
]
