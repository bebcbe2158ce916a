"""Options of `partsong topics fit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from partsong.cli.choices import one_of, positive
from partsong.cli.options import OptionalFloat, OptionalInt, OptionalPath, OptionalText
from partsong.cli.topics_options import TEXTS
from partsong.topic_names import ALONE, LANGUAGES, SERVERS, TOGETHER

LEARNING, WORDS, PARTIES, KEEPING = "Learning", "Words", "Parties (several files)", "Keeping"
WEIGHTINGS = ("tfidf", "counts")
"""Names of topic models, which take longer to import than to repeat."""


def in_panel(*names: str, panel: str, help: str, **more: object) -> Any:
    """An option that --help lists under a title."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)  # type: ignore[arg-type]


Texts = Annotated[
    list[Path], typer.Argument(metavar="TEXTS…", help=f"{TEXTS} Several: each is of one party.", show_default=False)
]
NTopics = Annotated[int, in_panel("--topics", "-k", panel=LEARNING, min=1, help="Number of topics.")]
Method = Annotated[
    OptionalText,
    in_panel(
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
    in_panel("--rounds", panel=LEARNING, min=1, help="Most rounds.", show_default="200 for nmf, exact, fnmf; else 50"),
]
Seed = Annotated[int, in_panel("--seed", panel=LEARNING, min=0, help="Random seed.")]

Server = Annotated[
    OptionalText,
    in_panel(
        "--server",
        panel=PARTIES,
        help=f"fednmf, fednmf-mi: how averages move the model, {', '.join(SERVERS)}.",
        callback=one_of(SERVERS),
        show_default=SERVERS[0],
    ),
]
ServerRate = Annotated[
    OptionalFloat,
    in_panel(
        "--server-rate",
        panel=PARTIES,
        help="adagrad, yogi, adam: the server's step.",
        callback=positive,
        show_default="0.03",
    ),
]
Participation = Annotated[
    OptionalFloat,
    in_panel(
        "--participation",
        panel=PARTIES,
        min=0.0,
        max=1.0,
        help="fednmf, fednmf-mi, fedlda: share of the parties that is drawn for each round.",
        show_default="1",
    ),
]
Masked = Annotated[
    bool, in_panel("--masked", panel=PARTIES, help="Mask uploads of the rounds, so that only sums are seen.")
]
MinParties = Annotated[
    OptionalInt,
    in_panel("--min-parties", panel=PARTIES, min=1, help="Parties that a word is at, or more.", show_default="2"),
]
LongestWord = Annotated[
    OptionalInt,
    in_panel(
        "--longest-word",
        panel=PARTIES,
        min=1,
        max=1024,
        help="Bytes of UTF-8 that a word has at most; longer ones stay at their parties and are not in the model.",
        show_default="32",
    ),
]

VocabularyFrom = Annotated[
    OptionalText,
    in_panel(
        "--vocabulary",
        panel=WORDS,
        help="agree: the parties find out which words enough of them have; hash: words have no names; or a file "
        "with one word per line, which is taken as it is.",
        show_default="agree; of one file, its words",
        metavar="agree|hash|FILE",
    ),
]
MinDocuments = Annotated[
    OptionalInt,
    in_panel(
        "--min-documents",
        panel=WORDS,
        min=1,
        help="Documents that a word is in, or more; with several files, at each of --min-parties.",
        show_default="2; 1 with several files",
    ),
]
MaxShare = Annotated[
    OptionalFloat,
    in_panel(
        "--max-share",
        panel=WORDS,
        min=0.0,
        max=1.0,
        help="Share of all documents that a word is in, or less.",
        callback=positive,
        show_default="1",
    ),
]
MaxWords = Annotated[
    OptionalInt,
    in_panel(
        "--max-words",
        panel=WORDS,
        min=1,
        help="Keep the most frequent words; of hash, the number of columns.",
        show_default="all; 10000 of hash",
    ),
]
Weighting = Annotated[
    OptionalText,
    in_panel(
        "--weighting",
        panel=WORDS,
        help="What a word weighs in a text: tfidf, in rows of norm 1, or counts.",
        callback=one_of(WEIGHTINGS),
        metavar="|".join(WEIGHTINGS),
        show_default="tfidf; counts for lda, fedlda",
    ),
]
Language = Annotated[
    str, in_panel("--language", panel=WORDS, help=f"Whose stop words are left out: {', '.join(LANGUAGES)} (keep all).")
]
StopWords = Annotated[
    OptionalPath, in_panel("--stop-words", panel=WORDS, help="A file with further ones, one per line.")
]
Output = Annotated[
    OptionalPath, in_panel("--output", "-o", panel=KEEPING, help="The model file to write (.safetensors).")
]
Html = Annotated[
    OptionalPath, in_panel("--html", panel=KEEPING, help="Also write a page with a map of the topics (.html).")
]
