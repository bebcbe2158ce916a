"""`partsong topics fit`: texts to topics."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from partsong.cli.choices import MODEL_ENDINGS, one_of
from partsong.cli.guard import guarded
from partsong.cli.options import AsJson, OptionalFloat, OptionalInt, OptionalPath, OptionalText, examples
from partsong.cli.outputs import put_json, require_distinct, require_writable, warn
from partsong.cli.termination import exit_code
from partsong.cli.topics_options import TEXTS, Encoding, TextColumn, texts_of
from partsong.cli.topics_report import description, show_fit
from partsong.topic_names import ALONE, SERVERS, TOGETHER

EPILOG = examples(
    "partsong topics fit texts.csv -k 20 --text-column title -o topics.safetensors",
    "partsong topics fit a.csv b.csv c.csv -k 50 --text-column text -o topics.safetensors --html topics.html",
    "partsong topics fit a.csv b.csv c.csv d.csv -k 50 --method fednmf --server adam --participation 0.5 --rounds 100",
    "partsong topics fit a.csv b.csv c.csv -k 50 --masked --min-documents 2 --min-parties 3 --json",
)
LEARNING, WORDS, PARTIES, KEEPING = "Learning", "Words", "Parties (several files)", "Keeping"


def _option(*names: str, panel: str, help: str, **more: object) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)  # type: ignore[arg-type]


@guarded
def fit(
    texts: Annotated[
        list[Path],
        typer.Argument(metavar="TEXTS…", help=f"{TEXTS} Several: each is of one party.", show_default=False),
    ],
    n_topics: Annotated[int, _option("--topics", "-k", panel=LEARNING, min=1, help="Number of topics.")] = 20,
    text_column: TextColumn = "text",
    encoding: Encoding = "utf-8",
    method: Annotated[
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
    ] = None,
    rounds: Annotated[
        OptionalInt,
        _option(
            "--rounds", panel=LEARNING, min=1, help="Most rounds.", show_default="200 for nmf, exact, fnmf; else 50"
        ),
    ] = None,
    seed: Annotated[int, _option("--seed", panel=LEARNING, min=0, help="Random seed.")] = 0,
    server: Annotated[
        OptionalText,
        _option(
            "--server",
            panel=PARTIES,
            help=f"fednmf, fednmf-mi: how averages move the model, {', '.join(SERVERS)}.",
            callback=one_of(SERVERS),
            show_default=SERVERS[0],
        ),
    ] = None,
    participation: Annotated[
        OptionalFloat,
        _option(
            "--participation",
            panel=PARTIES,
            min=0.0,
            max=1.0,
            help="fednmf, fednmf-mi, fedlda: share of the parties that is drawn for each round.",
            show_default="1",
        ),
    ] = None,
    masked: Annotated[
        bool, _option("--masked", panel=PARTIES, help="Mask uploads of the rounds, so that only sums are seen.")
    ] = False,
    min_parties: Annotated[
        OptionalInt,
        _option("--min-parties", panel=PARTIES, min=1, help="Parties that a word is at, or more.", show_default="2"),
    ] = None,
    vocabulary: Annotated[
        OptionalText,
        _option(
            "--vocabulary",
            panel=WORDS,
            help="agree: the parties find out which words enough of them have; hash: words have no names; or a file "
            "with one word per line.",
            show_default="agree; of one file, its words",
            metavar="agree|hash|FILE",
        ),
    ] = None,
    min_documents: Annotated[
        OptionalInt,
        _option(
            "--min-documents",
            panel=WORDS,
            min=1,
            help="Documents that a word is in, or more; with several files, at each of --min-parties.",
            show_default="2; 1 with several files",
        ),
    ] = None,
    max_words: Annotated[
        OptionalInt,
        _option("--max-words", panel=WORDS, min=1, help="Keep the most frequent words.", show_default="all"),
    ] = None,
    language: Annotated[
        str, _option("--language", panel=WORDS, help="Whose stop words are left out; none: keep all words.")
    ] = "english",
    stop_words: Annotated[
        OptionalPath, _option("--stop-words", panel=WORDS, help="A file with further ones, one per line.")
    ] = None,
    output: Annotated[
        OptionalPath, _option("--output", "-o", panel=KEEPING, help="The model file to write (.safetensors).")
    ] = None,
    html: Annotated[
        OptionalPath, _option("--html", panel=KEEPING, help="Also write a page with a map of the topics (.html).")
    ] = None,
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
    between = {"server": server, "participation": participation, "masked": masked or None, "min_parties": min_parties}
    chosen = {"method": method, "vocabulary": vocabulary, "min_documents": min_documents, "rounds": rounds, **between}
    given = {name: value for name, value in chosen.items() if value is not None}
    _require_meaningful(len(texts), given, between)
    from partsong.text.words import stop_words_of

    further = () if stop_words is None else stop_words_of(stop_words)
    common = {"max_words": max_words, "language": language, "stop_words": further, "random_state": seed}
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


def _require_meaningful(n_files: int, given: dict[str, Any], between: dict[str, Any]) -> None:
    """Refuse what has no meaning for one file, or for several."""
    if n_files > 1:
        if given.get("method") in ALONE:
            raise typer.BadParameter(f"{given['method']} is for one file.", param_hint="--method")
        return
    if given.get("method") in TOGETHER:
        raise typer.BadParameter(f"{given['method']} is between parties: give several files.", param_hint="--method")
    for name in between:
        if name in given:
            hint = f"--{name.replace('_', '-')}"
            raise typer.BadParameter("This is between parties: give several files.", param_hint=hint)
    if given.get("vocabulary") == "agree":
        raise typer.BadParameter("Only several parties can agree: give several files.", param_hint="--vocabulary")


def _learned(n_topics: int, by_party: dict[str, list[str]], settings: dict[str, Any]) -> Any:
    import warnings

    from partsong import FederatedTopicModel, TopicModel

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        if len(by_party) > 1:
            model: Any = FederatedTopicModel(n_topics, **settings).fit(by_party)
        else:
            rounds = settings.pop("rounds", None)
            model = TopicModel(n_topics, max_iter=rounds, **settings).fit(next(iter(by_party.values())))
    for warning in told:
        warn(str(warning.message))
    return model
