"""What a fit came to, for people and for programs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from partsong.cli.fit_parties import by_party
from partsong.cli.fit_settings import FitOptions, Settings
from partsong.cli.holdings import Holdings
from partsong.cli.outputs import put_json, visible, warn
from partsong.cli.run_folder import MODEL
from partsong.cli.wording import as_options
from partsong.core import Outcome
from partsong.finished import Finished
from partsong.fitting import Task, warn_of_nothing
from partsong.leaving_out import LeftOut
from partsong.methods import ASYNCHRONOUS, ONE_ROUND
from partsong.running import HistoryRow, Run
from partsong.spending import Spending

ENDINGS = {
    Outcome.CONVERGED: "converged",
    Outcome.MAX_ROUNDS: "stopped at the most iterations allowed, not converged",
    Outcome.TIME_SPENT: "stopped when the time was spent, not converged",
    Outcome.INTERRUPTED: "interrupted; the model so far was saved",
    Outcome.DIVERGED: "diverged; the best model before was saved",
    Outcome.BUDGET_SPENT: "stopped before the round that would have exceeded the privacy budget",
}
SIMULATED_HERE = (
    "relative_error", "explained_variance", "shape", "history.csv: relative_error, objective, drift, aligned_drift",
)  # fmt: skip
TROUBLE = "The fit diverged: check the data and the penalties, or take another solver."
PLAYED = "The fit diverged, and the best model before was saved."
ALL_OF_IT = "the one round that this method has"


@dataclass(frozen=True, slots=True)
class Result:
    """A fit that has ended; seconds count from the first start, resumed or not."""

    options: FitOptions
    settings: Settings
    holdings: Holdings
    run: Run
    done: Finished
    all_sent: Sequence[tuple[int, str, int, int]]
    seconds: float
    left_out: Sequence[LeftOut] = ()
    spending: Spending | None = None

    @property
    def history(self) -> tuple[HistoryRow, ...]:
        """Round by round; where nobody else takes part, nothing is sent."""
        if self.holdings.is_federation:
            return self.run.history
        return tuple(row._replace(bytes_up=0, bytes_down=0) for row in self.run.history)

    @property
    def sent(self) -> Sequence[tuple[int, str, int, int]]:
        """Iteration, party, bytes up, bytes down."""
        return self.all_sent if self.holdings.is_federation else ()

    @property
    def iterations(self) -> int:
        """Rounds of a federation, or iterations, of which sketched ones take two exchanges."""
        is_sketched = getattr(self.settings, "solver", "") == "sanls"
        return len(self.run.history) // 2 if is_sketched else self.run.rounds

    @property
    def bytes_down(self) -> int:
        """What a party that missed nothing was sent; where nobody waits for others, what the one was that was sent
        most.
        """
        if self.settings.method not in ASYNCHRONOUS:
            return sum(row.bytes_down for row in self.history)
        by_party: dict[str, int] = {}
        for _, party, _, down in self.sent:
            by_party[party] = by_party.get(party, 0) + down
        return max(by_party.values(), default=0)

    @property
    def ending(self) -> str:
        """Why it ended, in words."""
        if self.settings.method in ONE_ROUND and self.run.outcome is Outcome.MAX_ROUNDS:
            return ALL_OF_IT
        return ENDINGS[self.run.outcome]

    @property
    def model(self) -> Path | None:
        """Where the model is."""
        folder = self.options.run_folder
        return self.options.output or (None if folder is None else folder / MODEL)

    def as_dict(self) -> dict[str, Any]:
        """The JSON contract; bytes are those of all rounds together: up, the mean over the parties that have ever sent
        anything; down, what a party that missed none was sent. `left_out` tells of each party that was: of how many
        rounds, the first of them, and why.

        With privacy `epsilon_spent`, `delta`, `unit` and what goes with them are there, and `simulated` names what no
        party would have released: it is known because all of them ran in this process.

        A method of one round ends with the outcome max-rounds: it has no way to converge.
        """
        game = {"game": self.settings.rules()} if self.settings.is_game else {}
        privacy = {} if self.spending is None else {**self.spending.told(), "simulated": list(SIMULATED_HERE)}
        is_masked = getattr(self.settings, "masked", None) is not None
        masked = {"masked": is_masked} if self.holdings.is_federation else {}
        parties, senders = len(self.holdings.tables), {party for _, party, up, _ in self.sent if up}
        return {
            "model": self.model,
            "method": self.settings.method,
            **game,
            **privacy,
            **masked,
            "n_components": self.settings.n_components,
            "shape": self.holdings.shape,
            "parties": parties,
            "dtype": self.settings.dtype,
            "seed": self.settings.seed,
            "outcome": str(self.run.outcome),
            "iterations": self.iterations,
            "seconds": round(self.seconds, 6),
            "relative_error": self.done.relative_error,
            "explained_variance": 1.0 - self.done.relative_error**2,
            "bytes_up_per_party": round(sum(row.bytes_up for row in self.history) / max(1, len(senders))),
            "bytes_down_per_party": self.bytes_down,
            "left_out": by_party(self.left_out),
            "weights": self.options.weights,
            "run_folder": self.options.run_folder,
            "checkpoint": self.options.checkpoint,
            "resumed_from": self.options.resume,
        }


def report(result: Result) -> None:
    """One JSON object, or a few lines, or nothing."""
    if result.run.outcome is Outcome.DIVERGED:
        told = PLAYED if result.settings.is_game else TROUBLE
        typer.echo(visible(f"{told} {as_options(result.run.trouble)}".rstrip()), err=True)
    if result.options.as_json:
        put_json(result.as_dict())
    elif not result.options.quiet:
        for name, value in _lines(result):
            typer.echo(f"{name:<15}{value}")


def _privacy_in_words(spending: Spending) -> str:
    told = spending.told()
    spent = f"ε = {told['epsilon_spent']:.4g} spent at δ = {told['delta']:g}"
    return f"{spent}, unit {told['unit']} ({told['relation']}): {told['promise']}"


def warn_of_empty_model(task: Task, done: Finished) -> None:
    """Warn of a model that is zero, in the words of the command line."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        warn_of_nothing(task, done)
    for warning in told:
        warn(str(warning.message))


def _lines(result: Result) -> list[tuple[str, str]]:
    said, rows, columns = result.as_dict(), *result.holdings.shape
    parties = f" over {said['parties']} parties, {said['method']}" if result.holdings.is_federation else ""
    lines = [
        ("data", f"{rows} × {columns}{parties}"),
        ("components", f"{said['n_components']}"),
        ("relative error", f"{said['relative_error']:.6f}  (explains {100 * said['explained_variance']:.2f} %)"),
        ("iterations", f"{said['iterations']} in {result.seconds:.2f} s: {result.ending}"),
        ("seed", f"{said['seed']}"),
    ]
    if result.spending is not None:
        lines[2] = (lines[2][0], f"{lines[2][1]}, known in this simulation only")
        lines.insert(2, ("privacy", _privacy_in_words(result.spending)))
    if said.get("masked"):
        lines.insert(2, ("masked", "single uploads were seen by nobody but their senders; sums were"))
    if result.settings.is_game:
        lines.insert(2, ("game", result.settings.in_words()))
    if result.holdings.is_federation:
        lines.append(
            ("sent per party", f"{said['bytes_up_per_party']:,} bytes up, {said['bytes_down_per_party']:,} down")
        )
    for party, told in said["left_out"].items():
        rounds = f"{told['rounds']} of {said['iterations']} rounds, first {told['first']}"
        lines.append(("left out", f"{visible(party)}: {rounds}"))
    outputs = {"model": said["model"], "weights": said["weights"], "run folder": said["run_folder"]}
    return lines + [(name, str(path)) for name, path in outputs.items() if path is not None]
