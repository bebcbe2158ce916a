"""`partsong topics`: topics of texts, in one file or of several parties."""

from __future__ import annotations

import typer

from partsong.cli import topics_fit, topics_show, topics_transform

app = typer.Typer(
    help="Topics of texts, in one file or spread over parties that keep their texts.",
    epilog="Start with: partsong topics fit texts.csv -k 20 --text-column text -o topics.safetensors",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.command("fit", epilog=topics_fit.EPILOG)(topics_fit.fit)
app.command("show", epilog=topics_show.EPILOG)(topics_show.show)
app.command("transform", epilog=topics_transform.EPILOG)(topics_transform.transform)
