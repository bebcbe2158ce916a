"""The result of a fit: summary lines, the --json object, and the page of --report."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from partsong import methods
from partsong.attacks.runner import RecordedRun, findings
from partsong.cli.fit_options import FitOptions
from partsong.cli.inputs import PartyTables
from partsong.console.options import IGNORE
from partsong.console.output import facts, put_result, visible
from partsong.core.interfaces import Layout, Message, Outcome, Round
from partsong.core.runtime import package_version
from partsong.data.observed import ObservedMatrix
from partsong.engines.virtual_clock import Asynchronous
from partsong.errors import format_count
from partsong.estimators import compare
from partsong.estimators.compare import Candidate, result_of
from partsong.estimators.federated_nmf import FederatedNMF
from partsong.methods.moment import MomentProgram
from partsong.privacy.exposure import worst_party
from partsong.reporting.html import format_percent
from partsong.reporting.run_report import PartyHoldings, Report, write_report
from partsong.solvers.game import SAFE
from partsong.training.loop import Exclusion, HistoryRow, Training
from partsong.training.result import FitResult
from partsong.training.run_folder import MODEL, rank_files
from partsong.training.simulation import FederatedFit

# ---- fit page ---------------------------------------------------------------------------------------------------
#
# `partsong fit --report`: a page on one simulated federation, for the owner of all parts.

MOST_BYTES = 2**30
"""Traffic beyond this size is not kept for attacks."""
TOO_MUCH = "The traffic is too large to be attacked here. Record it with --record, then run `partsong attack`."
MOST_NUMBERS = 2**22
"""Parties with more numbers than this are not compared with what attacks find."""
RESUMED = (
    "Attacks need all rounds, and this run was resumed from a checkpoint. Record the whole run with --record, then "
    "run `partsong attack`."
)
NEVER_SENT = "The rows X_p and the weights W_p never left a party."
OPEN = " Plain uploads reveal something about a party's rows: the fewer rows, the more."


@dataclass(slots=True)
class Witness(compare.Recorder):
    """Record the rounds of a run, and its messages as far as they fit into memory."""

    traffic: list[tuple[tuple[str, int, Message], ...]] = field(default_factory=list)
    size: int = 0

    def record(self, done: Round, row: HistoryRow) -> None:
        """Record a round."""
        compare.Recorder.record(self, done, row)
        self.size += sum(message.nbytes for _, _, message in done.traffic)
        if self.size <= MOST_BYTES:
            self.traffic.append(done.traffic)
        else:
            self.traffic.clear()


def write_fit_report(path: Path, result: Result, witness: Witness) -> None:
    """Write the page: the result, what each party sent, what it cost, and what attacks find."""
    settings, fit = result.settings, result.fit
    candidate = Candidate(
        settings["method"], "", fit.program, fit.schedule.rounds, settings.get("init_mode") or "shared"
    )
    found = result_of(candidate, result.run, result.done, fit.shards, witness)
    is_open = not fit.reduction.hides_uploads and fit.spending is None
    report = Report(
        title=f"{format_count(len(fit.shards), 'party', 'parties')}, {settings['method']}",
        lead=f"A relative error of {format_percent(found.relative_error)} with "
        f"{format_count(fit.rank, 'component')}: {result.ending}.",
        parties=tuple(PartyHoldings(shard.name, shard.matrix.shape[0], {}) for shard in fit.shards),
        methods=(found,),
        image_shape=None,
        feature_names=result.data.feature_names,
        settings={name: str(value) for name, value in settings.items() if value is not None},
        versions={"partsong": package_version(), "python": platform.python_version(), "numpy": np.__version__},
        never_sent=NEVER_SENT + (OPEN if is_open else ""),
        privacy=result.estimator.privacy_report_,
        is_masked=fit.reduction.hides_uploads,
        attacks=RESUMED if result.options.resume is not None else _attacks(fit, witness),
    )
    write_report(path, report)


def _attacks(fit: FederatedFit, witness: Witness) -> Any:
    """Attack the traffic as a curious server; the rows are at hand to measure how close it comes."""
    if witness.size > MOST_BYTES:
        return TOO_MUCH
    layout, is_asynchronous = Layout.of(fit.shards, fit.schedule.seed), isinstance(fit.engine, Asynchronous)
    run = RecordedRun(witness.traffic, fit.program, layout, fit.reduction, is_asynchronous)
    truth = {
        shard.name: _rows(shard.matrix)
        for shard in fit.shards
        if shard.matrix.shape[0] * shard.matrix.shape[1] <= MOST_NUMBERS
        and not isinstance(shard.matrix, ObservedMatrix)
    }
    return tuple(findings(run, truth=truth))


def _rows(matrix: Any) -> Any:
    return matrix.columns(np.arange(matrix.shape[1]))


# ---- result -----------------------------------------------------------------------------------------------------

ENDINGS = {
    Outcome.CONVERGED: "converged",
    Outcome.MAX_ROUNDS: "reached the maximum number of iterations, not converged",
    Outcome.TIME_LIMIT: "reached the time limit, not converged",
    Outcome.INTERRUPTED: "interrupted; the model so far was saved",
    Outcome.DIVERGED: "diverged; the best earlier model was saved",
    Outcome.PRIVACY_BUDGET_EXHAUSTED: "stopped before the round that would have exceeded the privacy budget",
}
SIMULATED_HERE = (
    "relative_error", "explained_variance", "shape", "history.csv: relative_error, objective, drift, aligned_drift",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    """A finished fit. Seconds of a resumed run include those before."""

    options: FitOptions
    estimator: Any
    data: PartyTables
    fit: Any
    settings: dict[str, Any]
    run: Training
    done: FitResult
    all_sent: Sequence[tuple[int, str, int, int]]
    seconds: float

    @property
    def is_federation(self) -> bool:
        """Whether DATA was a folder of parts."""
        return isinstance(self.estimator, FederatedNMF)

    @property
    def sent(self) -> Sequence[tuple[int, str, int, int]]:
        """Iteration, party, bytes up, bytes down."""
        return self.all_sent if self.is_federation else ()

    @property
    def bytes_down(self) -> int:
        """Bytes that a party received if it missed no round; of an asynchronous method, the maximum over parties."""
        if not (self.is_federation and methods.method(self.settings["method"]).traits.asynchronous):
            return sum(row.bytes_down for row in self.estimator.history_)
        by_party: dict[str, int] = {}
        for _, party, _, down in self.sent:
            by_party[party] = by_party.get(party, 0) + down
        return max(by_party.values(), default=0)

    @property
    def ending(self) -> str:
        """Why the fit ended, in words."""
        program = getattr(self.fit, "program", None)
        if isinstance(program, MomentProgram) and self.run.outcome is Outcome.MAX_ROUNDS:
            made, of = ("exchange", "method") if self.fit.spending is None else ("release", "mechanism")
            count = program.exchanges(1, 1)
            return f"the only {made} of this {of}" if count == 1 else f"all {count} {made}s of this {of}"
        is_one_shot = self.is_federation and methods.method(self.settings["method"]).is_one_shot
        if is_one_shot and self.run.outcome is Outcome.MAX_ROUNDS:
            return "the only round of this method"
        return ENDINGS[self.run.outcome]

    @property
    def game(self) -> dict[str, Any] | None:
        """The settings of the game, if it was one."""
        game = getattr(getattr(self.fit, "program", None), "game", None)
        return None if game is None else {**game.settings(), "missing": self.options.missing}

    def as_dict(self) -> dict[str, Any]:
        """Return the --json object. Bytes are totals over all rounds: up, the mean over parties that sent anything;
        down, what a party that missed no round received. `left_out` lists the parties that missed rounds: how many,
        the first one, and why.

        With privacy, `epsilon_spent`, `delta`, `unit` and related keys are present, and `simulated` lists what no
        party would have released; it is known because all parties ran in this process. `mechanism`, `forecast`,
        `visible_directions` and `verdict` are null for uploads of H, and all but the first for noisy rounds; `ranks`
        has the model file of each of several ranks.

        A method of one round ends with the outcome max-rounds, because it cannot converge.
        """
        folder, estimator, game = self.options.run_folder, self.estimator, self.game
        summary: dict[str, Any] = {
            "model": self.options.output or (None if folder is None else folder / MODEL),
            "method": self.settings["method"],
        }
        if game is not None:
            summary["game"] = game
        if self.is_federation:
            worst = worst_party(estimator.exposures_.values())
            summary |= {
                **({} if self.fit.spending is None else self._privacy(summary["model"])),
                "secure_aggregation": self.fit.reduction.hides_uploads,
                "exposure": worst.to_dict(),
            }
        senders = {party for _, party, up, _ in self.sent if up}
        return summary | {
            "n_components": len(self.done.H),
            "shape": self.data.shape,
            "parties": len(self.data.tables),
            "dtype": self.settings["dtype"],
            "seed": self.settings["seed"],
            "outcome": str(self.run.outcome),
            "iterations": estimator.n_iter_,
            "seconds": round(self.seconds, 6),
            "relative_error": estimator.relative_error_,
            "explained_variance": 1.0 - estimator.relative_error_**2,
            "bytes_up_per_party": round(sum(row.bytes_up for row in estimator.history_) / max(1, len(senders))),
            "bytes_down_per_party": self.bytes_down,
            "left_out": by_party(estimator.left_out_ if self.is_federation else ()),
            "weights": self.options.weights,
            "run_folder": folder,
            "checkpoint": self.options.checkpoint,
            "resumed_from": self.options.resume,
        }

    def _privacy(self, model: Path) -> dict[str, Any]:
        """Return the keys of a private run: its cost, its mechanism, and what its release has shown."""
        estimator, plan = self.estimator, self.estimator.privacy_plan(self.fit)
        shown = estimator.privacy_report_
        return {
            **self.fit.spending.to_dict(),
            "mechanism": plan.mechanism,
            "forecast": None if plan.forecast is None else plan.forecast.to_dict(),
            "visible_directions": estimator.visible_directions_,
            "verdict": shown.get("verdict"),
            "ranks": {str(rank): path for rank, path in rank_files(model, estimator.components_by_rank_).items()},
            "simulated": [*SIMULATED_HERE],
        }

    def lines(self) -> list[tuple[str, str]]:
        """Return the summary lines."""
        summary, spending = self.as_dict(), self.fit.spending
        parties = (
            f" over {format_count(summary['parties'], 'party', 'parties')}, {summary['method']}"
            if self.is_federation
            else ""
        )
        lines = common_lines(summary, parties, self.ending, self.game)
        if spending is not None:
            at = [name for name, _ in lines].index("relative error")
            lines[at] = (lines[at][0], f"{lines[at][1]}, known only in this simulation")
            spent = spending.to_dict()
            promise = f"unit {spent['unit']} ({spent['relation']}): {spent['promise']}"
            if summary["verdict"] is not None:
                lines.insert(2, ("verdict", f"{summary['mechanism']}: {summary['verdict']}"))
            lines.insert(2, ("privacy", f"ε = {spent['epsilon_spent']:.4g} spent at δ = {spent['delta']:g}, {promise}"))
        if summary.get("secure_aggregation"):
            lines.insert(
                2, ("aggregation", "secure: single uploads were visible to their senders only, sums to the server")
            )
        if self.is_federation:
            sent = f"{summary['bytes_up_per_party']:,} bytes up, {summary['bytes_down_per_party']:,} down"
            worst = worst_party(self.estimator.exposures_.values())
            lines += [("sent per party", sent), ("exposure", visible(str(worst).removeprefix("Exposure: ")))]
        for party, one in summary["left_out"].items():
            rounds = f"{one['rounds']} of {summary['iterations']} rounds, first {one['first']}"
            lines.append(("left out", f"{visible(party)}: {rounds}"))
        if summary.get("ranks"):
            at = [name for name, _ in lines].index("components")
            why = f"of {', '.join(summary['ranks'])}: the largest of which all directions are visible, or the smallest"
            lines[at] = (lines[at][0], f"{lines[at][1]}, {why}")
        ranks = ", ".join(Path(path).name for path in summary.get("ranks", {}).values())
        return lines + places(summary) + ([("all ranks", ranks)] if ranks else [])


def by_party(left_out: Iterable[Exclusion]) -> dict[str, dict[str, Any]]:
    """Return, for each party that was left out, the number of rounds, the first one, and the reason there."""
    summary: dict[str, dict[str, Any]] = {}
    for entry in left_out:
        known = summary.setdefault(entry.party, {"rounds": 0, "first": entry.iteration, "reason": entry.reason})
        known["rounds"] += 1
    return summary


def common_lines(
    summary: dict[str, Any], where: str, ending: str, game: dict[str, Any] | None
) -> list[tuple[str, str]]:
    """Return the summary lines of every kind of fit."""
    rows, columns = summary["shape"]
    return [
        ("data", f"{rows} × {columns}{where}"),
        ("components", f"{summary['n_components']}"),
        *([] if game is None else [("game", describe_game(game))]),
        ("relative error", f"{summary['relative_error']:.6f}  (explains {100 * summary['explained_variance']:.2f} %)"),
        ("iterations", f"{summary['iterations']} in {summary['seconds']:.2f} s: {ending}"),
        ("seed", f"{summary['seed']}"),
    ]


def describe_game(game: dict[str, Any]) -> str:
    """Describe a game in one line."""
    step = "safe steps" if game["step"] == SAFE else f"steps of {game['step']:g}"
    decay, leader, shrink = game["step_decay"], game["leader"], game["shrink"]
    summary = [f"{game['play']} play", step if decay is None else f"{step} / (1 + {decay:g} t)"]
    summary += [] if shrink is None else [f"self-play {game['self_play']} ({shrink:g})"]
    summary += [] if leader is None else [f"{leader} lead"]
    return ", ".join(summary + (["known cells only"] if game["missing"] == IGNORE else []))


def places(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the files that were written."""
    found = {"model": summary["model"], "weights": summary["weights"], "run folder": summary["run_folder"]}
    return [(name, str(path)) for name, path in found.items() if path is not None]


def report(summary: dict[str, Any], lines: Iterable[tuple[str, str]], options: FitOptions) -> None:
    """Print one JSON object, a few lines, or nothing."""
    put_result(summary, facts(lines, 15), options.as_json, options.quiet)
