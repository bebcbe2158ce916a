"""`partsong demo`: ten parties with handwritten digits learn one set of parts without pooling a single row."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import partsong
from partsong import recipes, threads
from partsong.comparison import Contestant, contest, in_the_order_of
from partsong.core import Shard
from partsong.data.matrix import as_matrix
from partsong.data.partition import by_label, party_names
from partsong.evaluate.findings import MethodFindings, Party, Report
from partsong.evaluate.report import write_report
from partsong.running import Stop
from partsong.streams import key, stream

RANK, PARTIES, CONCENTRATION = 16, 10, 1.0


def contestants(rounds: int) -> tuple[Contestant, ...]:
    """The methods of the demo, from the worst idea to the oracle."""
    exact = recipes.shared_statistics(RANK)
    return (
        Contestant(
            "local only, averaged once",
            "Every party factorizes alone from its own start; the components are then averaged by position.",
            recipes.local_only(RANK, steps=5 * rounds),
            1,
        ),
        Contestant(
            "federated average",
            "From a common start, ten local iterations and an average of H in every round.",
            recipes.fedavg(RANK, steps=10),
            rounds,
        ),
        Contestant(
            "exact shared statistics",
            "Parties send WᵀW and WᵀX; the sums give exactly the pooled factorization, whatever the split.",
            exact,
            rounds,
        ),
        Contestant(
            "pooled oracle",
            "All rows in one place: the same iteration as the exact method, for comparison only.",
            exact,
            rounds,
            is_oracle=True,
        ),
    )


def run_demo(output: Path, seed: int, quick: bool, console: Any) -> Report:
    """Run all methods with progress bars, print a table, write the report."""
    from sklearn.datasets import load_digits

    X, labels = load_digits(return_X_y=True)
    owned = by_label(labels, PARTIES, stream(seed, "split"), CONCENTRATION)
    names = party_names(PARTIES)
    shards = [Shard(n, as_matrix(X[rows]), key(seed, "secret", n)) for n, rows in zip(names, owned, strict=True)]
    pooled = [Shard("everyone", as_matrix(X), key(seed, "secret", "everyone"))]
    console.print(
        f"{len(X)} handwritten digits of 8 × 8 pixels, held by {PARTIES} parties with skewed labels; rank {RANK}."
    )
    found = _contest_all(shards, pooled, seed, 20 if quick else 100, console)
    parties = tuple(
        Party(name, len(rows), {str(d): int((labels[rows] == d).sum()) for d in range(10)})
        for name, rows in zip(names, owned, strict=True)
    )
    report = _report(parties, found, seed, quick)
    _print_table(found, console)
    write_report(output, report)
    console.print(f"Report with the learned parts, the curves and what left each party: [bold]{output}[/bold]")
    return report


def _contest_all(
    shards: list[Shard], pooled: list[Shard], seed: int, rounds: int, console: Any
) -> tuple[MethodFindings, ...]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    found: list[MethodFindings] = []
    columns = (
        TextColumn("{task.description:<26}"),
        BarColumn(),
        TextColumn("{task.fields[error]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        for contestant in contestants(rounds):
            task = bar.add_task(contestant.name, total=contestant.rounds, error="")

            def watch(done: Any, row: Any, task: Any = task) -> None:
                bar.update(task, completed=row.iteration, error=f"error {100 * row.relative_error:5.1f} %")

            at = pooled if contestant.is_oracle else shards
            found.append(contest(contestant, at, seed, Stop(tol=0.0), watch))
    return tuple(_aligned(found))


def _aligned(found: list[MethodFindings]) -> list[MethodFindings]:
    """Every method's parts in the order of the oracle's, so that the eye can compare them."""
    reference = next(method.components for method in found if method.is_oracle)
    orders = [in_the_order_of(reference, method.components) for method in found]
    return [
        replace(m, components=m.components[order], shares=tuple(m.shares[i] for i in order))
        for m, order in zip(found, orders, strict=True)
    ]


def _report(parties: tuple[Party, ...], found: tuple[MethodFindings, ...], seed: int, quick: bool) -> Report:
    exact, oracle = (next(m for m in found if m.name == name) for name in ("exact shared statistics", "pooled oracle"))
    gap = abs(exact.relative_error - oracle.relative_error) / oracle.relative_error
    lead = (
        f"Ten parties hold {sum(p.rows for p in parties)} handwritten digits and never pool them. Summing small "
        f"statistics gives the model that pooling would have given (errors differ by {100 * gap:.2g} %); averaging "
        "components by position does not."
    )
    settings = {
        "command": f"partsong demo --seed {seed}" + (" --quick" if quick else ""),
        "data": "scikit-learn load_digits, pixel values 0…16",
        "rank": str(RANK),
        "split": f"{PARTIES} parties, label mixtures drawn from Dirichlet({CONCENTRATION:g} · label frequencies)",
        "seed": str(seed),
        "threads": str(threads.available()),
    }
    versions = {"partsong": partsong.__version__, "python": platform.python_version(), "numpy": np.__version__}
    return Report(
        title="One set of parts, no pooled rows",
        lead=lead,
        parties=parties,
        methods=found,
        image_shape=(8, 8),
        feature_names=None,
        settings=settings,
        versions=versions,
        never_sent="The rows X_p and the weights W_p never left a party. Sums that a party sends in the open still "
        "tell about its rows, the more the fewer rows it has: they are not anonymous.",
    )


def _print_table(found: tuple[MethodFindings, ...], console: Any) -> None:
    from rich.table import Table

    table = Table(title="What each method reached, and what it cost")
    table.add_column("method")
    for heading in ("relative error", "bytes sent per party", "seconds"):
        table.add_column(heading, justify="right")
    for method in found:
        sent = "all rows" if method.is_oracle else f"{method.bytes_up_per_party:,.0f}"
        table.add_row(method.name, f"{100 * method.relative_error:.2f} %", sent, f"{method.seconds:.2f}")
    console.print(table)
