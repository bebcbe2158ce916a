"""`partsong topics`: topics of texts, in one file or of several parties."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from partsong import methods
from partsong.console.options import (
    MODEL_ENDINGS,
    WEIGHT_ENDINGS,
    AsJson,
    OptionalFloat,
    OptionalInt,
    OptionalPath,
    OptionalText,
    examples,
    one_of,
    positive,
)
from partsong.console.output import (
    exit_code,
    guarded,
    put_json,
    require_distinct,
    require_writable,
    visible,
    warn,
)
from partsong.errors import FileError
from partsong.topics import LANGUAGES, TOP
from partsong.topics.documents import read_documents
from partsong.topics.tokenizer import JOINERS, stop_words_of

# ---- topics options ---------------------------------------------------------------------------------------------
#
# Options that commands about topics share, and texts from files.

TextColumn = Annotated[
    str,
    typer.Option(
        "--text-column", help="The column (.jsonl: field) with the texts.", rich_help_panel="Reading", metavar="NAME"
    ),
]
Encoding = Annotated[
    str, typer.Option(help="How the files are written: utf-8, cp1252, latin-1, utf-16, ….", rich_help_panel="Reading")
]
TopicFile = Annotated[
    Path, typer.Argument(metavar="MODEL", help="A model that `partsong topics fit` wrote.", show_default=False)
]
TEXTS = "A .csv, .tsv, .jsonl or .txt file (also .gz), or a folder of .txt files; one text per row, line or file."


def texts_of(paths: Sequence[Path], column: str, encoding: str) -> dict[str, list[str]]:
    """Texts by the name of their party, which is that of its file as far as it tells files apart."""
    short = [path.name.removesuffix(".gz").rpartition(".")[0] or path.name for path in paths]
    names = short if len(set(short)) == len(short) else [str(path) for path in paths]
    return {
        name: read_documents(path, column=column, encoding=encoding) for name, path in zip(names, paths, strict=True)
    }


# ---- topics fit options -----------------------------------------------------------------------------------------
#
# Options of `partsong topics fit`.

LEARNING, WORDS, PARTIES, KEEPING = "Learning", "Words", "Parties (several files)", "Keeping"
TOGETHER, POOLED = methods.names(methods.TEXTS), methods.pooled_names()
ALONE, SERVERS = tuple(POOLED), methods.CHOICES["server"]


def _named(parameter: str) -> tuple[str, ...]:
    """The methods that take it, over texts of one place and between parties."""
    meant = methods.taking(parameter, TOGETHER)
    return (*(name for name, same in POOLED.items() if same in meant), *meant)


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
        help=f"One file: {', '.join(ALONE)}. Several: "
        + " ".join(f"{name}: {methods.TABLE[name].summary}" for name in TOGETHER),
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
        help=f"{', '.join(methods.taking('server'))}: how averages move the model, {', '.join(SERVERS)}.",
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


# ---- topics descent options -------------------------------------------------------------------------------------
#
# Options of `partsong topics fit` for methods that take steps on batches of texts.

DESCENT = "Descents"
DESCENTS = ", ".join(_named("epochs"))
CRITICS, GRADIENTS = methods.CHOICES["critic"], methods.CHOICES["mi_gradient"]

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


# ---- topics fit meaning -----------------------------------------------------------------------------------------
#
# Options of `partsong topics fit` that need or exclude each other.

OF_A_CRITIC = ("strength", "critic", "mi_gradient", "critic_rate")
OF_FOUND_WORDS = ("min_documents", "min_parties", "max_share", "max_words", "longest_word")
"""Which of the words of texts are taken."""


def require_meaningful(n_files: int, given: Mapping[str, Any], between: Iterable[str], descent: Iterable[str]) -> None:
    """Refuse what has no meaning for one file, or for several, for the method, or for the vocabulary."""
    method = given.get("method")
    for name in descent:
        meant = [one for one in _named(name) or _named("epochs") if one in (ALONE if n_files == 1 else TOGETHER)]
        if name in given and method not in meant:
            _refuse(name, f"This is for --method {' and '.join(meant)}.")
        if name in given and name in OF_A_CRITIC[1:] and given.get("strength") == 0:
            _refuse(name, "With --strength 0 there is no critic: give another strength, or leave this out.")
    if method in ("lda", "fedlda") and given.get("weighting", "counts") != "counts":
        _refuse("weighting", f"{method} is a model of counts: leave it out.")
    if n_files > 1:
        if method in ALONE:
            _refuse("method", f"{method} is for one file.")
        if "server_rate" in given and given.get("server", SERVERS[0]) == SERVERS[0]:
            steps = ", ".join(SERVERS[1:])
            _refuse("server_rate", f"This is for --server {steps}: an average has no rate. Give one, or leave it out.")
    else:
        _require_alone(given, between)
    _require_found_words(given)


def _require_alone(given: Mapping[str, Any], between: Iterable[str]) -> None:
    if given.get("method") in TOGETHER:
        _refuse("method", f"{given['method']} is between parties: give several files.")
    for name in between:
        if name in given:
            _refuse(name, "This is between parties: give several files.")
    if given.get("vocabulary") == "agree":
        _refuse("vocabulary", "Only several parties can agree: give several files.")


def _require_found_words(given: Mapping[str, Any]) -> None:
    """Words that are given are all taken, and hashes have as many columns as asked for."""
    source = given.get("vocabulary", "agree")
    for name in OF_FOUND_WORDS:
        if source == "agree" or name not in given or (source == "hash" and name == "max_words"):
            continue
        why = (
            "With --vocabulary hash no word is left out; --max-words is the number of columns."
            if source == "hash"
            else "A given --vocabulary is taken as it is: leave this out, or give a file with fewer words."
        )
        _refuse(name, why)


def _refuse(name: str, why: str) -> NoReturn:
    raise typer.BadParameter(why, param_hint=f"--{name.replace('_', '-')}")


# ---- topics report ----------------------------------------------------------------------------------------------
#
# Topics in plain values and on the screen.


def topics_told(words: Any, shares: Any, coherence: Any) -> list[dict[str, Any]]:
    """Each topic: number, share and coherence where they are known, and its words."""
    sizes, values = ([None] * len(words) if known is None else known.tolist() for known in (shares, coherence))
    return [
        {"topic": number, "share": share, "coherence": value, "words": list(listed)}
        for number, (listed, share, value) in enumerate(zip(words, sizes, values, strict=True), start=1)
    ]


def description(model: Any, n: int = TOP) -> dict[str, Any]:
    """All that can be said of a fit in plain values; of texts only how many there are, and how many are empty."""
    import numpy as np

    empty = model.empty_documents_
    known = (
        None if model.coherence_ is None or np.isnan(model.coherence_).all() else float(np.nanmean(model.coherence_))
    )
    by_party = (
        {name: int(flags.sum()) for name, flags in empty.items()} if isinstance(empty, dict) else int(empty.sum())
    )
    agreement = getattr(model, "agreement_", None)
    return {
        "method": model.method,
        "n_topics": model.n_topics_,
        "n_parties": getattr(model, "n_parties_", 1),
        "n_documents": model.n_documents_,
        "empty_documents": by_party,
        "n_words": model.components_.shape[1],
        "false_pass": None if agreement is None else agreement.false_pass,
        "rounds": model.n_iter_,
        "outcome": str(model.outcome_),
        "relative_error": model.relative_error_,
        "coherence": known,
        "diversity": model.diversity(n) if any(model.topics(n)) else math.nan,
        "bytes_up": sum(row.bytes_up for row in model.history_),
        "bytes_down": sum(row.bytes_down for row in model.history_),
        "agreement_bytes_up": 0 if agreement is None else sum(agreement.bytes_up.values()),
        "seed": model.seed_,
        "topics": topics_told(model.topics(n), model.topic_shares_, model.coherence_),
    }


def show_topics(topics: list[dict[str, Any]]) -> None:
    """A table for people."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("topic", "share", "coherence", "words", box=None, header_style="bold")
    for part in topics:
        share, value = part["share"], part["coherence"]
        size = "" if share is None else f"{100 * share:.1f} %"
        shown = "" if value is None or math.isnan(value) else f"{value:.3f}"
        words = ", ".join(_shown(word) for word in part["words"])
        table.add_row(Text(str(part["topic"])), Text(size), Text(shown), Text(words))
    Console(highlight=False).print(table)


def _shown(word: str) -> str:
    """A word that cannot disturb a terminal; joiners between its letters are part of it."""
    return "".join(letter if letter in JOINERS else visible(letter) for letter in word)


def show_fit(told: dict[str, Any]) -> None:
    """Topics, and a line on the fit."""
    show_topics(told["topics"])
    empty = told["empty_documents"]
    n_empty = sum(empty.values()) if isinstance(empty, dict) else empty
    whose = f" of {told['n_parties']} parties" if told["n_parties"] > 1 else ""
    typer.echo(
        f"{told['n_documents']} texts{whose}, {n_empty} without a known word; {told['n_words']} words; "
        f"{told['rounds']} rounds ({told['outcome']})"
    )
    if told["false_pass"] is not None:
        typer.echo(f"A word at too few parties left them with a probability of at most {told['false_pass']:.1e}.")
    if told["model"] is not None:
        typer.echo(f"Model: {told['model']}")
    if told["html"] is not None:
        typer.echo(f"Page: {told['html']}")


# ---- topics fit -------------------------------------------------------------------------------------------------
#
# `partsong topics fit`: texts to topics.

EPILOG = examples(
    "partsong topics fit texts.csv -k 20 --text-column title -o topics.safetensors",
    "partsong topics fit a.csv b.csv c.csv -k 50 --text-column text -o topics.safetensors --html topics.html",
    "partsong topics fit a.csv b.csv c.csv d.csv -k 50 --method fednmf --server adam --participation 0.5 --rounds 100",
    "partsong topics fit a.csv b.csv c.csv -k 50 --masked --min-documents 2 --min-parties 3 --json",
    "partsong topics fit a.csv b.csv c.csv -k 50 --method fednmf-mi --strength 0.1 --epochs 5 --device cuda",
    "partsong topics fit a.csv b.csv c.csv -k 50 --method fednmf-mi --mi-gradient js --critic-rate 0.5 --masked",
)


@guarded
def fit(
    texts: Texts,
    n_topics: NTopics = 20,
    text_column: TextColumn = "text",
    encoding: Encoding = "utf-8",
    method: Method = None,
    rounds: Rounds = None,
    seed: Seed = 0,
    epochs: Epochs = None,
    batch: Batch = None,
    rate: Rate = None,
    strength: Strength = None,
    critic: Critic = None,
    mi_gradient: MiGradient = None,
    critic_rate: CriticRate = None,
    fits_first: FitsFirst = False,
    device: Device = None,
    server: Server = None,
    server_rate: ServerRate = None,
    participation: Participation = None,
    masked: Masked = False,
    min_parties: MinParties = None,
    longest_word: LongestWord = None,
    vocabulary: VocabularyFrom = None,
    min_documents: MinDocuments = None,
    max_share: MaxShare = None,
    max_words: MaxWords = None,
    weighting: Weighting = None,
    language: Language = "english",
    stop_words: StopWords = None,
    output: Output = None,
    html: Html = None,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no summary.")] = False,
) -> None:
    """Learn topics from texts: of one file, or of several parties that keep their texts."""
    files = {f"TEXTS {number}": path for number, path in enumerate(texts, start=1)}
    stop_file: dict[str, Path | None] = {"--stop-words": stop_words}
    require_distinct({**files, **stop_file, "--output": output, "--html": html})
    if output is not None:
        require_writable("--output", output, MODEL_ENDINGS)
    if html is not None:
        require_writable("--html", html, (".html",))
    between = {"server": server, "server_rate": server_rate, "participation": participation, "masked": masked or None}
    between |= {"min_parties": min_parties, "longest_word": longest_word}
    descent = {"epochs": epochs, "batch": batch, "rate": rate, "fits_first": fits_first or None, "device": device}
    descent |= {"strength": strength, "critic": critic, "mi_gradient": mi_gradient, "critic_rate": critic_rate}
    words = {"min_documents": min_documents, "max_share": max_share, "max_words": max_words, "weighting": weighting}
    chosen = {"method": method, "vocabulary": vocabulary, "rounds": rounds}
    given = {name: value for name, value in (chosen | descent | between | words).items() if value is not None}
    require_meaningful(len(texts), given, between, descent)

    further = () if stop_words is None else stop_words_of(stop_words)
    common = {"language": language, "stop_words": further, "random_state": seed}
    by_party = texts_of(texts, text_column, encoding)
    began = time.perf_counter()
    model = _learned(n_topics, by_party, {**given, **common, "verbose": 0 if as_json or quiet else 1})
    seconds = time.perf_counter() - began
    if output is not None:
        model.save(output)
    if html is not None:
        model.to_html(html)
    told = {"model": output, "html": html, **description(model), "seconds": round(seconds, 6)}
    if as_json:
        put_json(told)
    elif not quiet:
        show_fit(told)
    if told["outcome"] == "interrupted":
        warn("Interrupted; these are the topics so far.")
        raise typer.Exit(exit_code())


def _learned(n_topics: int, by_party: dict[str, list[str]], settings: dict[str, Any]) -> Any:
    from partsong.topics.estimators import FederatedTopicModel, TopicModel

    if len(by_party) > 1:
        return FederatedTopicModel(n_topics, **settings).fit(by_party)
    rounds = settings.pop("rounds", None)
    return TopicModel(n_topics, max_iter=rounds, **settings).fit(next(iter(by_party.values())))


# ---- topics show ------------------------------------------------------------------------------------------------
#
# `partsong topics show`: what is in a topic model.

SHOW_EPILOG = examples(
    "partsong topics show topics.safetensors -n 15",
    "partsong topics show topics.safetensors --html topics.html",
    "partsong topics show topics.safetensors --json",
)


@guarded
def show(
    model: TopicFile,
    n: Annotated[int, typer.Option("--words", "-n", min=1, help="Words to show per topic.")] = TOP,
    html: Annotated[OptionalPath, typer.Option(help="Also write a page with a map of the topics (.html).")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the words of each topic, and its size and coherence where the file knows them."""
    require_distinct({"MODEL": model, "--html": html})
    if html is not None:
        require_writable("--html", html, (".html",))
    from partsong.evaluation.topic_quality import top_words
    from partsong.io.topic_file import load_topics
    from partsong.reporting.topic_page import TopicPage, facts_of, write_topic_page

    known = load_topics(model)
    V = known.components.shape[1]
    names = tuple(f"#{column}" for column in range(V)) if known.words is None else known.words
    topics = topics_told(top_words(known.components, names, n), known.shares, known.coherence)
    if html is not None:
        facts = facts_of(known.settings, words=V) | {"seed": str(known.seed)}
        write_topic_page(html, TopicPage(known.components, names, known.shares, known.coherence, facts))
    if as_json:
        put_json({"model": model, "n_words": V, "settings": dict(known.settings), "topics": topics})
        return
    show_topics(topics)
    told = facts_of(known.settings)
    typer.echo(visible(", ".join((f"{V} words", *(f"{name} {value}" for name, value in told.items())))))


# ---- topics transform -------------------------------------------------------------------------------------------
#
# `partsong topics transform`: new texts and a topic model to weights.

TRANSFORM_EPILOG = examples("partsong topics transform new.csv topics.safetensors --text-column title -o W.csv")


@guarded
def transform(
    texts: Annotated[Path, typer.Argument(metavar="TEXTS", help=TEXTS, show_default=False)],
    model: TopicFile,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The weights to write: .csv, .tsv, .npy, .parquet or .h5ad.")
    ],
    text_column: TextColumn = "text",
    encoding: Encoding = "utf-8",
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No summary.")] = False,
) -> None:
    """Weights of topics in new texts, a row for each; zeros for a text without a known word."""
    from partsong.io.weights import write_weights
    from partsong.topics.estimators import TopicModel

    require_distinct({"TEXTS": texts, "MODEL": model, "--output": output})
    require_writable("--output", output, WEIGHT_ENDINGS)
    if texts.name.endswith(MODEL_ENDINGS) and not model.name.endswith(MODEL_ENDINGS):
        raise FileError(
            f"{texts}: this looks like the model. Name the texts first: partsong topics transform {model} {texts}."
        )
    known = TopicModel.load(model)
    (documents,) = texts_of([texts], text_column, encoding).values()
    began = time.perf_counter()
    W = known.transform(documents)
    write_weights(output, W, component_names=[f"topic_{number}" for number in range(1, known.n_topics_ + 1)])
    n_empty = int((~W.any(axis=1)).sum())
    told = {"output": output, "model": model, "n_documents": len(W), "n_topics": known.n_topics_, "n_zero": n_empty}
    if as_json:
        put_json({**told, "seconds": round(time.perf_counter() - began, 6)})
    elif not quiet:
        typer.echo(f"{W.shape[0]} × {W.shape[1]} weights in {output}; {n_empty} texts have none")


# ---- topics -----------------------------------------------------------------------------------------------------

app = typer.Typer(
    help="Topics of texts, in one file or spread over parties that keep their texts.",
    epilog="Start with: partsong topics fit texts.csv -k 20 --text-column text -o topics.safetensors",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.command("fit", epilog=EPILOG)(fit)
app.command("show", epilog=SHOW_EPILOG)(show)
app.command("transform", epilog=TRANSFORM_EPILOG)(transform)
