"""`partsong demo`: a small federation from data to report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from partsong.cli.options import AsJson, examples
from partsong.cli.output import guarded, put_json, require_writable

if TYPE_CHECKING:
    from partsong.reporting.run_report import MethodFindings

EPILOG = examples("partsong demo", "partsong demo --quick --output try.html", "partsong demo --quick --json")


@guarded
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="The report to write (.html).")] = Path("report.html"),
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="20 rounds instead of 80: a few seconds.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fit a small federation, compare it with the pooled data, and write a report (.html)."""
    require_writable("--output", output, (".html",))
    from rich.console import Console

    from partsong.cli.demo_run import run_demo

    began = time.perf_counter()
    report = run_demo(output, seed, quick, Console(quiet=as_json))
    if as_json:
        seconds = round(time.perf_counter() - began, 6)
        methods = [_row(method) for method in report.methods]
        put_json({"report": output, "seed": seed, "quick": quick, "seconds": seconds, "methods": methods})


def _row(method: MethodFindings) -> dict[str, Any]:
    """A line of the table; the oracle sends nothing, as it has all rows."""
    quality = ("relative_error", "explained_variance", "drift", "aligned_drift")
    names = ("name", "start", *quality, "rounds", "seconds", "outcome", "is_oracle")
    sent = ("bytes_up_per_party", "bytes_down_per_party")
    told = {name: getattr(method, name) for name in names}
    return told | {name: None if method.is_oracle else round(getattr(method, name)) for name in sent}
