"""Topics in plain values and on the screen."""

from __future__ import annotations

import math
from typing import Any

import typer

from partsong.cli.outputs import visible
from partsong.text.letter_runs import JOINERS
from partsong.topic_names import TOP


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
