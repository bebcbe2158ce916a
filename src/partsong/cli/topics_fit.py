"""`partsong topics fit`: texts to topics."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from partsong.cli import topics_fit_options as options
from partsong.cli.choices import MODEL_ENDINGS
from partsong.cli.guard import guarded
from partsong.cli.options import AsJson, examples
from partsong.cli.outputs import put_json, require_distinct, require_writable, warn
from partsong.cli.termination import exit_code
from partsong.cli.topics_options import Encoding, TextColumn, texts_of
from partsong.cli.topics_report import description, show_fit
from partsong.topic_names import ALONE, DESCENDING, TOGETHER

EPILOG = examples(
    "partsong topics fit texts.csv -k 20 --text-column title -o topics.safetensors",
    "partsong topics fit a.csv b.csv c.csv -k 50 --text-column text -o topics.safetensors --html topics.html",
    "partsong topics fit a.csv b.csv c.csv d.csv -k 50 --method fednmf --server adam --participation 0.5 --rounds 100",
    "partsong topics fit a.csv b.csv c.csv -k 50 --masked --min-documents 2 --min-parties 3 --json",
    "partsong topics fit a.csv b.csv c.csv -k 50 --method fednmf-mi --strength 0.1 --epochs 5 --device cuda",
)


@guarded
def fit(
    texts: options.Texts,
    n_topics: options.NTopics = 20,
    text_column: TextColumn = "text",
    encoding: Encoding = "utf-8",
    method: options.Method = None,
    rounds: options.Rounds = None,
    seed: options.Seed = 0,
    epochs: options.Epochs = None,
    batch: options.Batch = None,
    rate: options.Rate = None,
    strength: options.Strength = None,
    device: options.Device = None,
    server: options.Server = None,
    server_rate: options.ServerRate = None,
    participation: options.Participation = None,
    masked: options.Masked = False,
    min_parties: options.MinParties = None,
    vocabulary: options.VocabularyFrom = None,
    min_documents: options.MinDocuments = None,
    max_words: options.MaxWords = None,
    language: options.Language = "english",
    stop_words: options.StopWords = None,
    output: options.Output = None,
    html: options.Html = None,
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
    between = {"server": server, "server_rate": server_rate, "participation": participation, "min_parties": min_parties}
    between |= {"masked": masked or None}
    descent = {"epochs": epochs, "batch": batch, "rate": rate, "strength": strength, "device": device}
    chosen = {"method": method, "vocabulary": vocabulary, "min_documents": min_documents, "rounds": rounds}
    given = {name: value for name, value in (chosen | descent | between).items() if value is not None}
    _require_meaningful(len(texts), given, between, descent)
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


def _require_meaningful(n_files: int, given: dict[str, Any], between: Any, descent: Any) -> None:
    """Refuse what has no meaning for one file, or for several, or for the method."""
    for name in descent:
        meant = tuple(one for one in DESCENDING if name != "strength" or one.endswith("-mi"))
        if name in given and given.get("method") not in meant:
            raise typer.BadParameter(f"This is for --method {', '.join(meant)}.", param_hint=f"--{name}")
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
