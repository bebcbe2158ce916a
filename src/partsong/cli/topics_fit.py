"""`partsong topics fit`: texts to topics."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from partsong.cli import topics_descent_options as descents
from partsong.cli import topics_fit_options as options
from partsong.cli.choices import MODEL_ENDINGS
from partsong.cli.guard import guarded
from partsong.cli.options import AsJson, examples
from partsong.cli.outputs import put_json, require_distinct, require_writable, warn
from partsong.cli.termination import exit_code
from partsong.cli.topics_fit_meaning import require_meaningful
from partsong.cli.topics_options import Encoding, TextColumn, texts_of
from partsong.cli.topics_report import description, show_fit
from partsong.cli.topics_wording import as_topic_options, in_options

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
    texts: options.Texts,
    n_topics: options.NTopics = 20,
    text_column: TextColumn = "text",
    encoding: Encoding = "utf-8",
    method: options.Method = None,
    rounds: options.Rounds = None,
    seed: options.Seed = 0,
    epochs: descents.Epochs = None,
    batch: descents.Batch = None,
    rate: descents.Rate = None,
    strength: descents.Strength = None,
    critic: descents.Critic = None,
    mi_gradient: descents.MiGradient = None,
    critic_rate: descents.CriticRate = None,
    fits_first: descents.FitsFirst = False,
    device: descents.Device = None,
    server: options.Server = None,
    server_rate: options.ServerRate = None,
    participation: options.Participation = None,
    masked: options.Masked = False,
    min_parties: options.MinParties = None,
    longest_word: options.LongestWord = None,
    vocabulary: options.VocabularyFrom = None,
    min_documents: options.MinDocuments = None,
    max_share: options.MaxShare = None,
    max_words: options.MaxWords = None,
    weighting: options.Weighting = None,
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
    between = {"server": server, "server_rate": server_rate, "participation": participation, "masked": masked or None}
    between |= {"min_parties": min_parties, "longest_word": longest_word}
    descent = {"epochs": epochs, "batch": batch, "rate": rate, "fits_first": fits_first or None, "device": device}
    descent |= {"strength": strength, "critic": critic, "mi_gradient": mi_gradient, "critic_rate": critic_rate}
    words = {"min_documents": min_documents, "max_share": max_share, "max_words": max_words, "weighting": weighting}
    chosen = {"method": method, "vocabulary": vocabulary, "rounds": rounds}
    given = {name: value for name, value in (chosen | descent | between | words).items() if value is not None}
    require_meaningful(len(texts), given, between, descent)
    from partsong.text.words import stop_words_of

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
    import warnings

    from partsong import FederatedTopicModel, TopicModel

    with warnings.catch_warnings(record=True) as told, in_options():
        warnings.simplefilter("always", UserWarning)
        if len(by_party) > 1:
            model: Any = FederatedTopicModel(n_topics, **settings).fit(by_party)
        else:
            rounds = settings.pop("rounds", None)
            model = TopicModel(n_topics, max_iter=rounds, **settings).fit(next(iter(by_party.values())))
    for warning in told:
        warn(as_topic_options(str(warning.message)))
    return model
