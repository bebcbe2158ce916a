"""`partsong topics show`: what is in a topic model."""

from __future__ import annotations

from typing import Annotated

import typer

from partsong.cli.guard import guarded
from partsong.cli.options import AsJson, OptionalPath, examples
from partsong.cli.outputs import put_json, require_distinct, require_writable, visible
from partsong.cli.topics_options import TopicFile
from partsong.cli.topics_report import show_topics, topics_told
from partsong.topic_names import TOP

EPILOG = examples(
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
    from partsong.evaluate.diversity import top_words
    from partsong.evaluate.topic_page import TopicPage, facts_of, write_topic_page
    from partsong.io.topic_file import load_topics

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
