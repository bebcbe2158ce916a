"""What a fit came to, for people and for programs."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer

from partsong import methods
from partsong.cli.fit_settings import FitOptions, Settings
from partsong.cli.inputs import Holdings, require_known, require_usable, warn_of_identifiers, with_known_cells
from partsong.console.output import put_json, visible, warn
from partsong.core.interfaces import Layout, Message, Outcome, Round
from partsong.core.runtime import package_version
from partsong.data.observed import ObservedMatrix
from partsong.data.party_columns import Columns, of_other_columns, require_somebody
from partsong.engines.virtual_clock import Asynchronous
from partsong.errors import FormatError, PartsongError
from partsong.estimators import compare
from partsong.estimators.compare import Candidate, at_parties, result_of
from partsong.io.opening import place_of
from partsong.io.party_folder import in_one_order, listed, read_part
from partsong.privacy.exposure import PartyExposure
from partsong.privacy.spending import Spending
from partsong.reporting.html import percent
from partsong.reporting.run_report import Party, Report, write_report
from partsong.training.distributed_settings import IGNORE
from partsong.training.loop import Exclusion, HistoryRow, Training
from partsong.training.result import FitResult, warn_if_ill_posed, warn_if_model_is_zero
from partsong.training.run_folder import MODEL
from partsong.training.simulation import FederatedFit

if TYPE_CHECKING:
    from partsong.data.table import Table


# ---- fit page ---------------------------------------------------------------------------------------------------
#
# `partsong fit --report`: a page on one fit between parties, for whoever holds all parts.

MOST_BYTES = 2**30
"""Traffic beyond this is not kept for attacks."""
TOO_MUCH = "More was sent than is kept for attacks. Record it with --record, and run `partsong attack`."
MOST_NUMBERS = 2**22
"""Rows of more numbers than these are not written out to be compared with what attacks find."""
RESUMED = (
    "Attacks take all rounds, and this run went on from a checkpoint. Record all of it with --record, and run "
    "`partsong attack`."
)
NEVER_SENT = "The rows X_p and the weights W_p never left a party."
OPEN = " What was sent in the open can tell of its rows, the more the fewer rows a party has."


@dataclass(slots=True)
class Witness(compare.Recorder):
    """What a run lets be seen on its way, and its messages, as far as they fit into memory."""

    traffic: list[tuple[tuple[str, int, Message], ...]] = field(default_factory=list)
    size: int = 0

    def record(self, done: Round, row: HistoryRow) -> None:
        """Note a round."""
        compare.Recorder.record(self, done, row)
        self.size += sum(message.nbytes for _, _, message in done.traffic)
        if self.size <= MOST_BYTES:
            self.traffic.append(done.traffic)
        else:
            self.traffic.clear()


def write_fit_report(path: Path, fit: FederatedFit, result: Result, witness: Witness) -> None:
    """What the fit came to, what left each party and what it cost, and what attacks make of it."""
    settings, layout = result.settings, Layout.of(fit.shards, fit.schedule.seed)
    candidate = Candidate(settings.method, "", fit.program, fit.schedule.rounds, getattr(settings, "start", "common"))
    parties = at_parties(fit.program, fit.shards, result.done, witness)
    found = result_of(candidate, result.run, result.done, parties, witness)
    is_open = not fit.reduction.hides_uploads and fit.spending is None
    report = Report(
        title=f"{len(fit.shards)} parties, {settings.method}",
        lead=f"A relative error of {percent(found.relative_error)} with {settings.n_components} components: "
        f"{result.ending}.",
        parties=tuple(Party(shard.name, shard.matrix.shape[0], {}) for shard in fit.shards),
        methods=(found,),
        image_shape=None,
        feature_names=result.holdings.feature_names,
        settings={name: str(value) for name, value in asdict(settings).items() if value is not None},
        versions={"partsong": package_version(), "python": platform.python_version(), "numpy": np.__version__},
        never_sent=NEVER_SENT + (OPEN if is_open else ""),
        privacy=None if fit.spending is None else fit.spending.told(),
        is_masked=fit.reduction.hides_uploads,
        attacks=RESUMED if result.options.resume is not None else _attacks(fit, layout, witness),
    )
    write_report(path, report)


def _attacks(fit: FederatedFit, layout: Layout, witness: Witness) -> Any:
    """What a curious server makes of the traffic; the rows are at hand to say how near it comes."""
    from partsong.attacks.runner import RecordedRun, findings

    if witness.size > MOST_BYTES:
        return TOO_MUCH
    is_asynchronous = isinstance(fit.engine, Asynchronous)
    run = RecordedRun(witness.traffic, fit.program, layout, fit.reduction, is_asynchronous)
    truth = {shard.name: _rows(shard.matrix) for shard in fit.shards if _is_small(shard.matrix)}
    return tuple(findings(run, truth=truth))


def _is_small(matrix: Any) -> bool:
    """Whether a party's rows may be written out to be compared; of one that has gaps nobody knows them."""
    return matrix.shape[0] * matrix.shape[1] <= MOST_NUMBERS and not isinstance(matrix, ObservedMatrix)


def _rows(matrix: Any) -> Any:
    return matrix.columns(np.arange(matrix.shape[1]))


# ---- fit parties ------------------------------------------------------------------------------------------------
#
# The parties of a fit in which faulty ones are left out: whose part is read, who stays away, and what is told.

LATE = "The run that is resumed began without it, and goes on so."


def faulty_of(options: FitOptions, given: Collection[str], context: Mapping[str, Any] | None) -> str:
    """What a faulty party leads to: as given, else as in the run that is resumed."""
    stored = {} if context is None else context["settings"]
    return options.faulty if "faulty" in given else str(stored.get("faulty", options.faulty))


def missing_of(options: FitOptions, given: Collection[str], context: Mapping[str, Any] | None) -> str:
    """What unknown cells lead to: as given, else as in the run that is resumed."""
    stored = {} if context is None else context["settings"]
    return options.missing if "missing" in given else str(stored.get("missing") or options.missing)


def read_sound_parties(
    path: Path, dtype: str | None, late: Collection[str], missing: str = "refuse"
) -> tuple[Holdings, dict[str, str]]:
    """The parties whose files can be used, and of the others why not; the list of parts itself has to be right.

    Those who are `late` are left out, whatever has become of their files: the run that is resumed began without them.
    """
    folder, faults = place_of(path), dict[str, str]()
    tables: dict[str, Table] = {}
    parts = listed(folder)
    for part in parts:
        try:
            tables[part.name] = read_part(folder, part)
        except PartsongError as error:
            faults[part.name] = str(error)
    faults |= of_other_columns({name: Columns(t.X.shape[1], t.feature_names) for name, t in tables.items()})
    for name in tables.keys() - faults.keys():
        try:
            tables[name] = with_known_cells(tables[name], missing)
            if missing == IGNORE:
                require_known([tables[name]])
            require_usable(tables[name], dtype, party=name)
        except PartsongError as error:
            faults[name] = str(error)
    faults |= {name: LATE for name in tables if name in late and name not in faults}
    faults = {part.name: faults[part.name] for part in parts if part.name in faults}
    kept = {name: table for name, table in tables.items() if name not in faults}
    require_somebody(kept, faults)
    warn_of_identifiers(kept.values())
    return Holdings(in_one_order(kept), is_federation=True), faults


def left_out_before(path: Path, context: Mapping[str, Any], rounds: int) -> list[Exclusion]:
    """Who was left out of the first rounds of a run, as its checkpoint tells; those of older versions do not."""
    try:
        found = [Exclusion(int(at), str(party), str(reason)) for at, party, reason in context.get("left_out", [])]
    except (TypeError, ValueError) as error:
        raise FormatError(f"{path}: does not tell who was left out of which round. Start the run anew.") from error
    return [entry for entry in found if entry.iteration <= rounds]


def by_party(left_out: Iterable[Exclusion]) -> dict[str, dict[str, Any]]:
    """For each party the number of rounds that it was left out of, the first of them, and the reason given there."""
    told: dict[str, dict[str, Any]] = {}
    for entry in left_out:
        known = told.setdefault(entry.party, {"rounds": 0, "first": entry.iteration, "reason": entry.reason})
        known["rounds"] += 1
    return told


# ---- fit report -------------------------------------------------------------------------------------------------

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
    run: Training
    done: FitResult
    all_sent: Sequence[tuple[int, str, int, int]]
    seconds: float
    left_out: Sequence[Exclusion] = ()
    spending: Spending | None = None
    exposure: PartyExposure | None = None

    @property
    def history(self) -> tuple[HistoryRow, ...]:
        """Round by round; where nobody else takes part, nothing is sent."""
        if self.holdings.is_federation:
            return tuple(self.run.history)
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
        if not (self.holdings.is_federation and methods.method(self.settings.method).traits.asynchronous):
            return sum(row.bytes_down for row in self.history)
        by_party: dict[str, int] = {}
        for _, party, _, down in self.sent:
            by_party[party] = by_party.get(party, 0) + down
        return max(by_party.values(), default=0)

    @property
    def ending(self) -> str:
        """Why it ended, in words."""
        is_one_shot = self.holdings.is_federation and methods.method(self.settings.method).is_one_shot
        if is_one_shot and self.run.outcome is Outcome.MAX_ROUNDS:
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
        masked: dict[str, Any] = {"masked": is_masked} if self.holdings.is_federation else {}
        masked |= {} if self.exposure is None else {"exposure": self.exposure.as_dict()}
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
        typer.echo(visible(f"{told} {result.run.trouble}".rstrip()), err=True)
    if result.options.as_json:
        put_json(result.as_dict())
    elif not result.options.quiet:
        for name, value in _lines(result):
            typer.echo(f"{name:<15}{value}")


def _privacy_in_words(spending: Spending) -> str:
    told = spending.told()
    spent = f"ε = {told['epsilon_spent']:.4g} spent at δ = {told['delta']:g}"
    return f"{spent}, unit {told['unit']} ({told['relation']}): {told['promise']}"


def warn_of_empty_model(solver: Any, done: FitResult) -> None:
    """Warn of a model that is zero, and of an objective without a minimum, in the words of the command line."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        warn_if_ill_posed(solver)
        warn_if_model_is_zero(solver, done)
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
    if result.exposure is not None:
        lines.append(("exposure", visible(str(result.exposure).removeprefix("Exposure: "))))
    for party, told in said["left_out"].items():
        rounds = f"{told['rounds']} of {said['iterations']} rounds, first {told['first']}"
        lines.append(("left out", f"{visible(party)}: {rounds}"))
    outputs = {"model": said["model"], "weights": said["weights"], "run folder": said["run_folder"]}
    return lines + [(name, str(path)) for name, path in outputs.items() if path is not None]
