"""`partsong topics`: topic models of texts, in one file or at several parties."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from partsong import methods
from partsong.console.options import MODEL_ENDINGS, AsJson, Quiet, examples, opt, parameters_of, unknown, with_options
from partsong.console.output import (
    exit_code,
    handle_errors,
    option,
    plain,
    put_json,
    put_result,
    put_table,
    require_distinct,
    require_transform_files,
    require_writable,
    visible,
    warn,
)
from partsong.errors import ParameterError, format_count
from partsong.topics import LANGUAGES, TOP
from partsong.topics.documents import read_documents
from partsong.topics.tokenizer import JOINERS, stop_words_of

# ---- options ----------------------------------------------------------------------------------------------------

TEXTS = "A .csv, .tsv, .jsonl or .txt file (also .gz), or a folder of .txt files. One text per row, line or file."
LEARNING, WORDS, PARTIES, DESCENT, KEEPING = (
    "Learning",
    "Words",
    "Parties (several files)",
    "Gradient descent",
    "Output",
)
TOGETHER, POOLED = methods.names(methods.TEXTS), methods.pooled_names()
ALONE = tuple(POOLED)
SERVERS = methods.CHOICES["server"]
BETWEEN_PARTIES = ("server", "server_rate", "participation", "secure_aggregation", "min_parties", "max_word_bytes")
OF_METHODS = tuple(name for name in methods.TABLE["fednmf-mi"].parameters if name != "weight_step")
"""Options that only some methods have."""
OF_WORDS = ("vocabulary", "min_documents", "max_df", "max_words", "weighting")
PASSED_ON = dict.fromkeys(("method", "rounds", "device", *OF_METHODS, *BETWEEN_PARTIES, *OF_WORDS))
"""Arguments of the estimators that have an option of the same name."""


def takers(parameter: str, known: Sequence[str] = (*ALONE, *TOGETHER)) -> list[str]:
    """Return the methods that have a parameter."""
    return [name for name in known if parameter in methods.TABLE[POOLED.get(name, name)].parameters]


DESCENTS = ", ".join(takers("epochs"))


def _reading(help: str, **more: Any) -> Any:
    return typer.Option(help=help, rich_help_panel="Reading", **more)


TextColumn = Annotated[str, _reading("Column (.jsonl: field) with the texts.", metavar="NAME")]
Encoding = Annotated[str, _reading("Encoding of the files: utf-8, cp1252, latin-1, utf-16, ….")]
TopicFile = Annotated[
    Path, typer.Argument(metavar="MODEL", help="A model file that `partsong topics fit` wrote.", show_default=False)
]
Html = Annotated[
    Path | None, typer.Option(help="Also write a page with a map of the topics (.html).", rich_help_panel=KEEPING)
]
_METHOD = f"One file: {', '.join(ALONE)}. Several: " + " ".join(f"{n}: {methods.TABLE[n].summary}" for n in TOGETHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicOptions:
    """The command line of `partsong topics fit`; None: not given."""

    texts: Annotated[
        list[Path],
        typer.Argument(metavar="TEXTS…", help=f"{TEXTS} Of several, each belongs to one party.", show_default=False),
    ]
    n_topics: int = opt(20, LEARNING, "Number of topics.", "--topics", "-k")
    text_column: TextColumn = "text"
    encoding: Encoding = "utf-8"
    method: str | None = opt(None, LEARNING, _METHOD, show_default="nmf; exact for several files")
    rounds: int | None = opt(
        None, LEARNING, "Maximum number of rounds.", show_default="200 for nmf, exact, fnmf; else 50"
    )
    seed: int = opt(0, LEARNING, "Random seed.")
    epochs: int | None = opt(None, DESCENT, f"{DESCENTS}: passes over the texts per round.", show_default="10")
    batch: int | None = opt(None, DESCENT, "Same methods: texts per step.", show_default="64")
    rate: float | None = opt(None, DESCENT, "Same methods: step size.", show_default="0.05")
    strength: float | None = opt(
        None, DESCENT, "nmf-sgd-mi, fednmf-mi: weight of the mutual information.", show_default="0.1"
    )
    critic: str | None = opt(
        None,
        DESCENT,
        "Same two methods: the critic network, as in the paper (concat) or as a product of two networks (separable). "
        "It is sent with the topics; without --secure-aggregation it reveals exactly which words a party has.",
        metavar="|".join(methods.CHOICES["critic"]),
        show_default="concat",
    )
    mi_gradient: str | None = opt(
        None,
        DESCENT,
        "Same two methods: bound whose gradient trains the critic: dv (as in the paper; it hardly learns) or js (it "
        "learns with --critic-rate 0.2 to 0.5).",
        metavar="|".join(methods.CHOICES["mi_gradient"]),
        show_default="dv",
    )
    critic_rate: float | None = opt(
        None, DESCENT, "Same two methods: the critic's step size.", show_default="that of --rate"
    )
    warm_start_weights: bool = opt(
        False,
        DESCENT,
        f"{DESCENTS}: fit the weights to the topics before every round except the first.",
        "--warm-start-weights",
    )
    device: str | None = opt(
        None,
        DESCENT,
        f"{DESCENTS}: compute with torch on this device.",
        metavar="cpu|cuda|…",
        show_default="none: NumPy",
    )
    server: str | None = opt(
        None,
        PARTIES,
        f"{', '.join(takers('server', TOGETHER))}: the server's optimizer: {', '.join(SERVERS)}.",
        show_default=SERVERS[0],
    )
    server_rate: float | None = opt(
        None, PARTIES, f"{', '.join(SERVERS[1:])}: the server's step size.", show_default="0.03"
    )
    participation: float | None = opt(
        None, PARTIES, "fednmf, fednmf-mi, fedlda: share of the parties sampled in each round.", show_default="1"
    )
    secure_aggregation: bool = opt(
        False,
        PARTIES,
        "Hide single uploads by masks that cancel in the sum. Needs at least three parties.",
        "--secure-aggregation",
    )
    min_parties: int | None = opt(None, PARTIES, "Minimum number of parties that must have a word.", show_default="2")
    max_word_bytes: int | None = opt(
        None,
        PARTIES,
        "Maximum length of a word in UTF-8 bytes. Longer words stay at their parties and are not in the model.",
        show_default="32",
    )
    vocabulary: str | None = opt(
        None,
        WORDS,
        "agree: the parties agree on the words that enough of them have; hash: feature hashing, without words; or a "
        "file with one word per line.",
        metavar="agree|hash|FILE",
        show_default="agree; for one file, its words",
    )
    min_documents: int | None = opt(
        None,
        WORDS,
        "Minimum number of documents with a word; with several files, at each of --min-parties parties.",
        show_default="2; 1 with several files",
    )
    max_df: float | None = opt(None, WORDS, "Maximum share of all documents with a word.", show_default="1")
    max_words: int | None = opt(
        None,
        WORDS,
        "Keep this many of the most frequent words; for hash, the number of columns.",
        show_default="all; 10000 for hash",
    )
    weighting: str | None = opt(
        None,
        WORDS,
        "Weighting of words: tfidf, with rows of norm 1, or counts.",
        metavar="tfidf|counts",
        show_default="tfidf; counts for lda, fedlda",
    )
    language: str = opt("english", WORDS, f"Language of the stop words to drop: {', '.join(LANGUAGES)} (keep all).")
    stop_words: Path | None = opt(None, WORDS, "A file with further stop words, one per line.")
    output: Path | None = opt(None, KEEPING, "The model file to write (.safetensors).", "--output", "-o")
    html: Html = None
    as_json: AsJson = False
    quiet: bool = opt(False, None, "No progress and no summary.", "--quiet", "-q")


def texts_of(paths: Sequence[Path], column: str, encoding: str) -> dict[str, list[str]]:
    """Read the texts of each party; a party is named after its file."""
    short = [path.name.removesuffix(".gz").rpartition(".")[0] or path.name for path in paths]
    names = short if len(set(short)) == len(short) else [str(path) for path in paths]
    return {
        name: read_documents(path, column=column, encoding=encoding) for name, path in zip(names, paths, strict=True)
    }


# ---- fit --------------------------------------------------------------------------------------------------------

EPILOG = examples(
    "partsong topics fit texts.csv -k 20 --text-column title -o topics.safetensors",
    "partsong topics fit a.csv b.csv c.csv -k 50 --text-column text -o topics.safetensors --html topics.html",
    "partsong topics fit a.csv b.csv c.csv d.csv -k 50 --method fednmf --server adam --participation 0.5 --rounds 100",
    "partsong topics fit a.csv b.csv c.csv -k 50 --secure-aggregation --min-documents 2 --min-parties 3 --json",
    "partsong topics fit a.csv b.csv c.csv -k 50 --method fednmf-mi --strength 0.1 --epochs 5 --device cuda",
    "partsong topics fit a.csv b.csv c.csv -k 50 --method fednmf-mi --mi-gradient js --critic-rate 0.5",
)


@with_options(parameters_of(TopicOptions))
@handle_errors
def fit(**values: Any) -> None:
    """Learn topics from texts: of one file, or of several parties that keep their texts."""
    options = TopicOptions(**values)
    files = {f"TEXTS {number}": path for number, path in enumerate(options.texts, start=1)}
    require_distinct({
        **files, "--stop-words": options.stop_words, "--output": options.output, "--html": options.html,
    })  # fmt: skip
    require_writable("--output", options.output, MODEL_ENDINGS)
    require_writable("--html", options.html, (".html",))
    model = model_of(options)
    by_party = texts_of(options.texts, options.text_column, options.encoding)
    began = time.perf_counter()
    model.fit(by_party if len(by_party) > 1 else next(iter(by_party.values())))
    seconds = time.perf_counter() - began
    if options.output is not None:
        model.save(options.output)
    if options.html is not None:
        model.to_html(options.html)
    summary = {"model": options.output, "html": options.html, **description(model), "seconds": round(seconds, 6)}
    if options.as_json:
        put_json(summary)
    elif not options.quiet:
        show_fit(summary)
    if summary["outcome"] == "interrupted":
        warn("Interrupted. These are the topics so far.")
        raise typer.Exit(exit_code())


def model_of(options: TopicOptions) -> Any:
    """Build the estimator that the options describe, and check them."""
    from partsong.topics.estimators import FederatedTopicModel, TopicModel

    is_alone = len(options.texts) == 1
    asked = {name: getattr(options, name) for name in PASSED_ON}
    given = {name: value for name, value in asked.items() if value is not None and value is not False}
    known = ALONE if is_alone else TOGETHER
    method = given.get("method", known[0])
    if method not in known:
        _refuse("method", f"{'One file' if is_alone else 'Several files'}: {unknown(method, known)}")
    for name in given:
        if is_alone and name in BETWEEN_PARTIES:
            _refuse(name, "only for several parties. Pass several files.")
        if name in OF_METHODS and method not in takers(name, known):
            _refuse(name, f"only for --method {' and '.join(takers(name, known))}.")
    given |= {
        "language": options.language,
        "stop_words": () if options.stop_words is None else stop_words_of(options.stop_words),
        "random_state": options.seed,
        "verbose": 0 if options.as_json or options.quiet else 1,
    }
    if is_alone and "rounds" in given:
        given["max_iter"] = given.pop("rounds")
    try:
        model: Any = (TopicModel if is_alone else FederatedTopicModel)(options.n_topics, **given)
        model.check_settings()
    except ParameterError as error:
        raise typer.BadParameter(plain(error)) from error
    return model


def _refuse(name: str, why: str) -> NoReturn:
    raise typer.BadParameter(why, param_hint=option(name))


# ---- report -----------------------------------------------------------------------------------------------------


def topic_rows(words: Any, shares: Any, coherence: Any) -> list[dict[str, Any]]:
    """Return number, share, coherence and words of each topic."""
    sizes, values = ([None] * len(words) if known is None else known.tolist() for known in (shares, coherence))
    return [
        {"topic": number, "share": share, "coherence": value, "words": list(listed)}
        for number, (listed, share, value) in enumerate(zip(words, sizes, values, strict=True), start=1)
    ]


def description(model: Any, n: int = TOP) -> dict[str, Any]:
    """Return a fit as plain values; of the texts, only how many there are and how many are empty."""
    import numpy as np

    empty, coherence = model.empty_documents_, model.coherence_
    is_judged = coherence is not None and not np.isnan(coherence).all()
    agreement = getattr(model, "agreement_", None)
    return {
        "method": model.method,
        "n_topics": model.n_topics_,
        "n_parties": getattr(model, "n_parties_", 1),
        "n_documents": model.n_documents_,
        "empty_documents": {name: int(flags.sum()) for name, flags in empty.items()}
        if isinstance(empty, dict)
        else int(empty.sum()),
        "n_words": model.components_.shape[1],
        "false_pass": None if agreement is None else agreement.false_pass,
        "rounds": model.n_iter_,
        "outcome": str(model.outcome_),
        "relative_error": model.relative_error_,
        "coherence": float(np.nanmean(coherence)) if is_judged else None,
        "diversity": model.diversity(n) if any(model.topics(n)) else math.nan,
        "bytes_up": sum(row.bytes_up for row in model.history_),
        "bytes_down": sum(row.bytes_down for row in model.history_),
        "agreement_bytes_up": 0 if agreement is None else sum(agreement.bytes_up.values()),
        "seed": model.seed_,
        "topics": topic_rows(model.topics(n), model.topic_shares_, model.coherence_),
    }


def show_topics(topics: list[dict[str, Any]]) -> None:
    """Print the topics as a table."""
    rows = []
    for part in topics:
        share, value = part["share"], part["coherence"]
        size = "" if share is None else f"{100 * share:.1f} %"
        shown = "" if value is None or math.isnan(value) else f"{value:.3f}"
        rows.append((str(part["topic"]), size, shown, ", ".join(map(_shown, part["words"]))))
    put_table(("topic", "share", "coherence", "words"), rows)


def _shown(word: str) -> str:
    """Return a word that cannot disturb a terminal; joiners between its letters are kept."""
    return "".join(letter if letter in JOINERS else visible(letter) for letter in word)


def show_fit(summary: dict[str, Any]) -> None:
    """Print the topics and a line about the fit."""
    show_topics(summary["topics"])
    empty = summary["empty_documents"]
    n_empty = sum(empty.values()) if isinstance(empty, dict) else empty
    whose = f" of {summary['n_parties']} parties" if summary["n_parties"] > 1 else ""
    typer.echo(
        f"{format_count(summary['n_documents'], 'text')}{whose}, {n_empty} without a known word; "
        f"{format_count(summary['n_words'], 'word')}; "
        f"{format_count(summary['rounds'], 'round')} ({summary['outcome']})"
    )
    if summary["false_pass"] is not None:
        typer.echo(f"The probability that a word of too few parties left them is at most {summary['false_pass']:.1e}.")
    for name in ("model", "html"):
        if summary[name] is not None:
            typer.echo(f"{'Model' if name == 'model' else 'Page'}: {summary[name]}")


# ---- show -------------------------------------------------------------------------------------------------------

SHOW_EPILOG = examples(
    "partsong topics show topics.safetensors -n 15",
    "partsong topics show topics.safetensors --html topics.html",
    "partsong topics show topics.safetensors --json",
)


@handle_errors
def show(
    model: TopicFile,
    n: Annotated[int, typer.Option("--words", "-n", min=1, help="Words to show per topic.")] = TOP,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Show the words of each topic, and its share and coherence if the file has them."""
    require_distinct({"MODEL": model, "--html": html})
    require_writable("--html", html, (".html",))
    from partsong.evaluation.topic_quality import top_words
    from partsong.io.topic_file import load_topics
    from partsong.reporting.topic_page import TopicPage, build_facts, write_topic_page

    known = load_topics(model)
    V = known.components.shape[1]
    names = tuple(f"#{column}" for column in range(V)) if known.words is None else known.words
    topics = topic_rows(top_words(known.components, names, n), known.shares, known.coherence)
    if html is not None:
        facts = build_facts(known.settings, words=V) | {"seed": str(known.seed)}
        write_topic_page(html, TopicPage(known.components, names, known.shares, known.coherence, facts))
    if as_json:
        put_json({"model": model, "n_words": V, "settings": dict(known.settings), "topics": topics})
        return
    show_topics(topics)
    facts = build_facts(known.settings)
    typer.echo(visible(", ".join((format_count(V, "word"), *(f"{name} {value}" for name, value in facts.items())))))


# ---- transform --------------------------------------------------------------------------------------------------

TRANSFORM_EPILOG = examples("partsong topics transform new.csv topics.safetensors --text-column title -o W.csv")


@handle_errors
def transform(
    texts: Annotated[Path, typer.Argument(metavar="TEXTS", help=TEXTS, show_default=False)],
    model: TopicFile,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The weights to write: .csv, .tsv, .npy, .parquet or .h5ad.")
    ],
    text_column: TextColumn = "text",
    encoding: Encoding = "utf-8",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compute the topic weights of new texts, one row per text; zeros for a text without a known word."""
    from partsong.io.weights import write_weights
    from partsong.topics.estimators import TopicModel

    require_transform_files("partsong topics transform", texts, model, output)
    known = TopicModel.load(model)
    (documents,) = texts_of([texts], text_column, encoding).values()
    began = time.perf_counter()
    W = known.transform(documents)
    write_weights(output, W, component_names=[f"topic_{number}" for number in range(1, known.n_topics_ + 1)])
    n_empty = int((~W.any(axis=1)).sum())
    summary = {"output": output, "model": model, "n_documents": len(W), "n_topics": known.n_topics_, "n_zero": n_empty}
    summary["seconds"] = round(time.perf_counter() - began, 6)
    line = f"{W.shape[0]} × {W.shape[1]} weights in {output}; {format_count(n_empty, 'text')} without a known word"
    put_result(summary, (line,), as_json, quiet)


app = typer.Typer(
    help="Fit, show and apply topic models of texts, in one file or at several parties that keep their texts.",
    epilog="Start with: partsong topics fit texts.csv -k 20 --text-column text -o topics.safetensors",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.command("fit", epilog=EPILOG)(fit)
app.command("show", epilog=SHOW_EPILOG)(show)
app.command("transform", epilog=TRANSFORM_EPILOG)(transform)
