"""`partsong demo`: ten parties learn the components of handwritten digits without pooling rows."""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from partsong import methods
from partsong.console.options import AsJson, examples
from partsong.console.output import handle_errors, put_json, require_writable
from partsong.core import runtime
from partsong.core.interfaces import Outcome, Shard
from partsong.core.runtime import graceful_interrupt
from partsong.core.streams import key, stream
from partsong.data.conversion import as_matrix
from partsong.data.partition import by_label
from partsong.estimators.compare import Candidate, run_candidate, warm_up
from partsong.estimators.parties import party_names
from partsong.privacy.exposure import summarize_simulated_runs
from partsong.reporting.run_report import MethodResult, PartyHoldings, Report, write_report
from partsong.training.loop import progress

EPILOG = examples("partsong demo", "partsong demo --quick --output try.html", "partsong demo --quick --json")


@handle_errors
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="The report to write (.html).")] = Path("report.html"),
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="20 rounds instead of 80: a few seconds.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fit a small federation, compare it with pooled data, and write a report (.html)."""
    require_writable("--output", output, (".html",))
    from rich.console import Console

    began = time.perf_counter()
    report = run_demo(output, seed, quick, Console(quiet=as_json))
    if as_json:
        seconds = round(time.perf_counter() - began, 6)
        methods = [_row(method) for method in report.methods]
        put_json({"report": output, "seed": seed, "quick": quick, "seconds": seconds, "methods": methods})


def _row(method: MethodResult) -> dict[str, Any]:
    """Return a row of the table; the oracle has all rows and sends nothing."""
    quality = ("relative_error", "explained_variance", "drift", "aligned_drift")
    names = ("name", "init_mode", *quality, "rounds", "seconds", "outcome", "is_oracle")
    sent = ("bytes_up_per_party", "bytes_down_per_party")
    row = {name: getattr(method, name) for name in names}
    return row | {name: None if method.is_oracle else round(getattr(method, name)) for name in sent}


# ---- what the demo runs ------------------------------------------------------------------------------------------

RANK, PARTIES, CONCENTRATION = 16, 10, 1.0
LOCAL = "local"


def candidates(rounds: int) -> tuple[Candidate, ...]:
    """Return the methods of the demo, from the worst to the oracle; FedAvg and FNMF iterate equally often."""
    exact = methods.build("exact", RANK, local_steps=5)
    seldom, long, alone = max(2, rounds // 10), 100, 3 * rounds
    return (
        Candidate(
            "local, averaged once",
            f"Each party factorizes alone from its own initialization, {alone} iterations; "
            "then components are averaged by position.",
            methods.build("local-only", RANK, local_steps=alone),
            1,
            LOCAL,
        ),
        Candidate(
            "FedAvg, long rounds",
            f"From local initializations, {long} local iterations and an average of H by position in each of {seldom} "
            "rounds.",
            methods.build("fedavg", RANK, local_steps=long, init_mode="local"),
            seldom,
            LOCAL,
        ),
        Candidate(
            "FNMF, long rounds",
            "The same initializations, iterations and bytes, but components are aligned before they are averaged, and "
            "a proximal term pulls parties towards the model (iPALM; the others use coordinate descent).",
            methods.build("fnmf-local", RANK, local_steps=long, align="assignment"),
            seldom,
            LOCAL,
        ),
        Candidate(
            "FedAvg, short rounds",
            f"From a shared initialization, 10 local iterations and an average of H by position in each of {rounds} "
            "rounds.",
            methods.build("fedavg", RANK, local_steps=10),
            rounds,
        ),
        Candidate(
            "exact shared statistics",
            "From a shared initialization, parties send WᵀW and WᵀX. The sums give exactly the pooled factorization, "
            "for any split.",
            exact,
            rounds,
        ),
        Candidate(
            "pooled oracle",
            "All rows in one place: same iteration and initialization as the exact method, for comparison only.",
            exact,
            rounds,
            is_oracle=True,
        ),
    )


def run_demo(output: Path, seed: int, quick: bool, console: Any) -> Report:
    """Run all methods with progress bars, print a table, write the report."""
    from rich.markup import escape
    from sklearn.datasets import load_digits

    X, labels = load_digits(return_X_y=True)
    owned = by_label(labels, PARTIES, stream(seed, "split"), CONCENTRATION)
    names = party_names(PARTIES)
    shards = [Shard(n, as_matrix(X[rows]), key(seed, "secret", n)) for n, rows in zip(names, owned, strict=True)]
    console.print(
        f"{len(X)} handwritten digits of 8 × 8 pixels, held by {PARTIES} parties with skewed labels; rank {RANK}."
    )
    entered = candidates(20 if quick else 80)
    console.print("Compiling kernels; later runs reuse them …")
    warm_up((candidate.program for candidate in entered), shards)
    found = _run_all(entered, shards, seed, verbose=0 if console.quiet else 1)
    parties = tuple(
        PartyHoldings(name, len(rows), {str(d): int((labels[rows] == d).sum()) for d in range(10)})
        for name, rows in zip(names, owned, strict=True)
    )
    report = _report(parties, found, seed, quick)
    _print_table(found, console)
    sending = ((one.name, one.program, one.rounds) for one in entered if not one.is_oracle)
    for line in summarize_simulated_runs(sending, shards):
        console.print(line, highlight=False, soft_wrap=True)
    write_report(output, report)
    console.print(
        f"Report with shared and per-party components and every message sent: [bold]{escape(str(output))}[/bold]"
    )
    return report


def _run_all(entered: tuple[Candidate, ...], shards: list[Shard], seed: int, verbose: int) -> tuple[MethodResult, ...]:
    found: list[MethodResult] = []
    with graceful_interrupt() as interrupts:
        for candidate in entered:
            with progress(verbose, candidate.rounds, None, candidate.name) as watch:
                found.append(run_candidate(candidate, shards, seed, watch, interrupts))
            if interrupts.count or found[-1].outcome == Outcome.INTERRUPTED:
                raise KeyboardInterrupt
    reference = next(method for method in found if method.is_oracle)
    return tuple(method.aligned_with(reference) for method in found)


def _report(parties: tuple[PartyHoldings, ...], found: tuple[MethodResult, ...], seed: int, quick: bool) -> Report:
    return Report(
        title="Shared components, no pooled rows",
        lead=f"Ten parties hold {sum(p.rows for p in parties)} handwritten digits and never pool them. Each finds "
        "the components in its own order, so averages by position fail after many local iterations. Aligning the "
        "components first helps. Summing small statistics gives exactly the model of the pooled data.",
        parties=parties,
        methods=found,
        image_shape=(8, 8),
        feature_names=None,
        settings={
            "command": f"partsong demo --seed {seed}" + (" --quick" if quick else ""),
            "data": "scikit-learn load_digits, pixel values 0…16",
            "rank": str(RANK),
            "split": f"{PARTIES} parties, label mixtures drawn from Dirichlet({CONCENTRATION:g} · label frequencies)",
            "seed": str(seed),
            "threads": str(runtime.available_threads()),
        },
        versions={"partsong": runtime.package_version(), "python": platform.python_version(), "numpy": np.__version__},
        never_sent="The rows X_p and the weights W_p never left a party. Plain sums still reveal something about a "
        "party's rows: the fewer rows, the more. They are not anonymous.",
    )


def _print_table(found: tuple[MethodResult, ...], console: Any) -> None:
    from rich.table import Table

    caption = (
        "pooled oracle: all rows in one place, as a reference; it is not federated. init_mode: parties start "
        "from one H "
        "(shared), or each from its own (local). Errors here are after a last fit of all weights W to the final H; "
        "progress lines show the error within the rounds. Seconds are those of the rounds on this machine; "
        "compilation, once per installation, is not counted."
    )
    table = Table(title="Error and cost of each method", caption=caption)
    table.add_column("method", no_wrap=True)
    table.add_column("init_mode", no_wrap=True)
    for heading in ("rounds", "relative error", "bytes sent per party", "seconds"):
        table.add_column(heading, justify="right")
    for method in found:
        sent = "all rows" if method.is_oracle else f"{method.bytes_up_per_party:,.0f}"
        cells = (str(method.rounds), f"{100 * method.relative_error:.2f} %", sent, f"{method.seconds:.2f}")
        table.add_row(method.name, method.init_mode, *cells)
    console.print(table)
