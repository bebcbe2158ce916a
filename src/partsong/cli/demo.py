"""`partsong demo`: a small federation from data to report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from partsong.cli.guard import guarded
from partsong.cli.options import examples
from partsong.cli.outputs import require_writable

EPILOG = examples("partsong demo", "partsong demo --quick --output try.html")


@guarded
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="The report to write.")] = Path("report.html"),
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller data: a few seconds.")] = False,
) -> None:
    """Fit a small federation, compare it with the pooled data, and write a report."""
    require_writable("--output", output, (".html",))
    from rich.console import Console

    from partsong.demo import run_demo

    run_demo(output, seed, quick, Console())
