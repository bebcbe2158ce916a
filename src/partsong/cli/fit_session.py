"""One fit from the command line, start to end: look at everything first, compute, save, tell."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import typer

from partsong.aggregation.plaintext import InTheOpen
from partsong.cli.choices import GAME, MODEL_ENDINGS, WEIGHT_ENDINGS, engine_named, is_game, program_named
from partsong.cli.fit_report import (
    Result,
    Witness,
    faulty_of,
    left_out_before,
    missing_of,
    read_sound_parties,
    report,
    warn_of_empty_model,
    write_fit_report,
)
from partsong.cli.fit_settings import (
    FOR_GAMES,
    FOR_NOISE,
    FOR_PRIVACY,
    FederationSettings,
    FitOptions,
    RowSettings,
    Settings,
    may_change,
    promise_of,
    require_fitting_options,
    require_game,
    require_one_process,
    require_privacy,
    run_of,
    settle,
)
from partsong.cli.inputs import ALONE, Holdings, read_holdings
from partsong.console import output
from partsong.console.output import exit_code, require_distinct, require_writable, warn, warn_of_formulas
from partsong.console.tables import require_meaningful
from partsong.core import runtime
from partsong.core.interfaces import Matrix, Outcome, Round, Schedule, Shard
from partsong.core.runtime import Interrupts, held
from partsong.core.streams import key
from partsong.data.conversion import as_matrix
from partsong.data.observed import observed
from partsong.data.table import Table
from partsong.errors import FileError, FormatError
from partsong.estimators.validation import row_solver_of
from partsong.io import model_file
from partsong.io.model_file import Model, save_model
from partsong.io.opening import Wanted, place_of
from partsong.io.party_folder import is_parts_folder
from partsong.io.weights import write_weights
from partsong.methods.privacy_request import masks_for, privacy_told
from partsong.privacy.exposure import exposures_of, worst_party
from partsong.privacy.spending import Spending, without_names
from partsong.solvers.game import game_from
from partsong.training import run_folder
from partsong.training.centralized import CentralizedConfig
from partsong.training.checkpoint import RunRecorder, SavedRun, fingerprint, load_run, require_same_run
from partsong.training.distributed_settings import IGNORE
from partsong.training.loop import LEAVE_OUT, ExclusionLog, Fit, HistoryRow, StoppingRule, Training, Watch, progress
from partsong.training.loop import run as run_fit_to_end
from partsong.training.result import FitResult, finish
from partsong.training.run_folder import RunFolder
from partsong.training.simulation import FederatedFit, simulation_of_rounds
from partsong.training.single_party import single_party_fit
from partsong.training.traffic import TrafficRecorder, complete_rounds, missing_traffic

# ---- fit outputs ------------------------------------------------------------------------------------------------
#
# What a fit is to write, looked at before it begins: options that need each other, names, folders, earlier files.


def require_companions(options: FitOptions, given: Collection[str]) -> None:
    """Refuse options that do nothing without another one."""
    if options.output is None and options.run_folder is None:
        raise typer.BadParameter("say where the model goes: -o model.safetensors.", param_hint="--output")
    if options.record and options.run_folder is None:
        raise typer.BadParameter("needs --run-folder, where the traffic is kept.", param_hint="--record")
    if options.overwrite and options.run_folder is None:
        raise typer.BadParameter("needs --run-folder; other files are replaced anyway.", param_hint="--overwrite")
    if "checkpoint_every" in given and options.checkpoint is None:
        raise typer.BadParameter("needs --checkpoint, the file to write.", param_hint="--checkpoint-every")


def require_outputs(options: FitOptions) -> None:
    """Refuse, before anything is read, what could not be written afterwards, or would overwrite something else."""
    outputs = {"--output": options.output, "--weights": options.weights, "--checkpoint": options.checkpoint}
    require_distinct({"DATA": options.data, **outputs, "--report": options.report})
    require_distinct({"--output": options.output, "--weights": options.weights, "--resume": options.resume})
    if options.run_folder is not None:
        folder = place_of(options.run_folder)
        others = {"DATA": options.data, "--weights": options.weights, "--checkpoint": options.checkpoint}
        for name in run_folder.OWN:
            require_distinct({"--run-folder": folder / name, **others})
        run_folder.make_usable(folder, options.overwrite)
    endings = {"--output": MODEL_ENDINGS, "--weights": WEIGHT_ENDINGS, "--checkpoint": ()}
    for option, path in outputs.items():
        if path is not None:
            require_writable(option, path, endings[option])
    if options.report is not None:
        require_writable("--report", options.report, (".html",))
    if options.checkpoint is not None and place_of(options.checkpoint).exists():
        _require_checkpoint(place_of(options.checkpoint), is_resumed=options.resume is not None)


def _require_checkpoint(path: Path, *, is_resumed: bool) -> None:
    """Only a checkpoint is ever overwritten by one; what a private run has spent is never lost."""
    try:
        saved = load_run(path)
    except FormatError as error:
        raise FileError(f"--checkpoint {path}: this file is something else. Choose another name.") from error
    if saved.spent and not is_resumed:
        raise FileError(
            f"--checkpoint {path}: this file holds what an earlier run has spent on privacy, which adds up with what "
            "this one will spend. Go on with it by --resume, or choose another name and keep it."
        )


# ---- fit tasks --------------------------------------------------------------------------------------------------
#
# Settings and data to a task that can be run, and its end to a model that can be saved.

HARDWARE = {"threads", "engine", "time_budget"}
"""Settings that say nothing about a model."""


def fit_of(settings: Settings, holdings: Holdings, *, record: bool) -> Fit:
    """What is to be computed; its start is made with the first step."""
    if isinstance(settings, RowSettings):
        return single_party_fit(matrix_of(holdings.tables[ALONE], settings), _row_fit(settings))
    return federated_fit(settings, holdings, record)


def matrix_of(table: Table, settings: Settings) -> Matrix:
    """The rows in the precision of the fit; what is not known is not in it."""
    return observed(table.X, settings.dtype) if settings.knows_some else as_matrix(table.X, settings.dtype)


def _row_fit(settings: RowSettings) -> CentralizedConfig:
    return CentralizedConfig(
        rank=settings.n_components,
        solver=row_solver_of(settings.solver, settings.alpha_w, settings.alpha_h, settings.l1_ratio),
        init=settings.init,
        seed=settings.seed,
        max_iter=settings.max_iter,
        stop=StoppingRule(settings.tol, settings.time_budget),
        threads=settings.threads,
        sketch=settings.sketch if settings.solver == "sanls" else None,
        sketch_ratio=settings.sketch_ratio,
        game=game_from(settings.rules()) if settings.is_game else None,
    )


def federated_fit(settings: FederationSettings, holdings: Holdings, record: bool) -> FederatedFit:
    """The same parties, secrets and streams as FederatedNMF makes of a list of matrices."""
    shards = [
        Shard(name, matrix_of(table, settings), key(settings.seed, "secret", name))
        for name, table in holdings.tables.items()
    ]
    program, privacy, spending = program_named(settings), promise_of(settings), None
    if privacy is not None:
        noisy = privacy.program(program, settings.rounds, len(shards), settings.masked is not None)
        program, spending = noisy, Spending(noisy.release, privacy.delta, most=noisy.most)
    masks = None if settings.masked is None else masks_for(privacy, len(shards), settings.masked)
    reduction = InTheOpen() if masks is None else masks
    schedule = Schedule(settings.rounds, settings.seed, faulty=settings.faulty)
    stop = StoppingRule(settings.tol, settings.time_budget)
    engine = engine_named(settings.engine, settings.threads, record)
    fit = simulation_of_rounds(program, shards, settings.rounds, schedule, stop, engine, reduction, spending)
    return replace(fit, threads=settings.threads)


def model_of(
    settings: Settings, holdings: Holdings, done: FitResult, iterations: int, spending: Spending | None = None
) -> Model:
    """The model: H, names of features, settings, iterations made; nothing about single samples, and no paths.

    With noise it holds nothing that is not a function of what was released: no error, shares or number of rows.
    """
    told = {
        name: value
        for name, value in asdict(settings).items()
        if name not in HARDWARE and name != "seed" and not (value is None and name in FOR_GAMES | FOR_PRIVACY)
    }
    n_samples, _ = holdings.shape
    if spending is None:
        told["n_samples"] = n_samples
    else:
        told = {name: value for name, value in told.items() if name not in FOR_NOISE} | {
            "privacy": privacy_told(promise_of(settings)),  # type: ignore[arg-type]
            "privacy_spent": without_names(spending.told()),
            "dtype": str(done.H.dtype),
        }
    if getattr(settings, "unit", None) == "row":
        del told["local_steps"]
    told |= {"masked": True} if told.pop("masked", None) is not None else {}
    return Model(
        components=done.H,
        feature_names=holdings.feature_names,
        settings={**told, "parties": len(holdings.tables), "iterations": iterations},
        seed=settings.seed,
        relative_error=None if spending is not None else done.relative_error,
        shares=None if spending is not None else done.shares,
        created=model_file.now(),
        versions=model_file.package_versions(),
    )


# ---- fit session ------------------------------------------------------------------------------------------------

FINISHING = (
    "Interrupted: the model is saved after this iteration. Press Ctrl-C again to save that of the iterations before, "
    "if there were any, and once more to give up."
)


@dataclass(frozen=True, slots=True)
class Session:
    """All that is known before the first iteration."""

    options: FitOptions
    settings: Settings
    holdings: Holdings
    data: Mapping[str, Any]
    exclusions: ExclusionLog
    resumed: SavedRun | None = None
    started: str = field(default_factory=model_file.now)

    @property
    def folder(self) -> RunFolder | None:
        """The run folder, if one is wanted."""
        place = self.options.run_folder
        return None if place is None else RunFolder(place_of(place))

    @property
    def run(self) -> str | None:
        """What tells this run from others, where it can be gone on with or leaves traffic behind."""
        return run_of(self.settings, self.data) if self.data else None


def run_fit(options: FitOptions, given: Collection[str]) -> None:
    """Fit, save and tell; ends with exit code 130 where Ctrl-C was pressed, with 143 where SIGTERM came."""
    require_companions(options, given)
    require_one_process(options.method, options.solver, given)
    is_federation = is_parts_folder(place_of(options.data))
    require_fitting_options(given, is_federation, method=options.method, solver=options.solver)
    if options.resume is None:
        plays = is_game(options.method) if is_federation else options.solver == GAME
        require_game(asdict(options), given, is_game=plays, is_between_parties=is_federation)
    if not is_federation:
        require_meaningful(options.data, _wanted(options))
    require_outputs(options)
    if is_federation and options.resume is None:
        require_privacy(asdict(options), given)
    session = _prepare(options, given, is_federation)
    with runtime.using_threads(session.settings.threads):
        is_interrupted = _fit(session)
    if is_interrupted:
        raise typer.Exit(exit_code())


def _wanted(options: FitOptions) -> Wanted:
    return Wanted(options.label, options.transpose, options.key, options.header)


def _prepare(options: FitOptions, given: Collection[str], is_federation: bool) -> Session:
    resumed = load_run(options.resume) if options.resume is not None else None
    context = None if resumed is None else resumed.about
    before, known, unsound = [], {}, dict[str, str]()
    missing = missing_of(options, given, context)
    if options.resume is not None and resumed is not None:
        before = left_out_before(options.resume, resumed.about, resumed.checkpoint.index)
        known = dict(resumed.about["data"])
    if is_federation and faulty_of(options, given, context) == LEAVE_OUT:
        late = {entry.party for entry in before if entry.party not in known}
        holdings, unsound = read_sound_parties(options.data, options.dtype, late, missing)
    else:
        wanted = replace(_wanted(options), gaps=missing == IGNORE)
        holdings = read_holdings(options.data, wanted, options.dtype, missing)
    settings = settle(options, given, holdings, None if context is None else context["settings"])
    data = {}
    if options.checkpoint is not None or options.resume is not None or options.record:
        data = {name: fingerprint(table.X, table.feature_names) for name, table in holdings.tables.items()}
    if options.resume is not None and resumed is not None:
        data |= {name: print_of for name, print_of in known.items() if name in unsound}
        require_same_run(options.resume, resumed, asdict(settings), data, may_change(settings), output.option)
        if isinstance(settings, FederationSettings) and settings.epsilon is not None:
            options = replace(options, checkpoint=_same_file(options.resume, options.checkpoint))
    exclusions = ExclusionLog(unsound, warn, before)
    return Session(options, settings, holdings, data, exclusions, resumed)


def _same_file(resumed: Path, checkpoint: Path | None) -> Path:
    """Where a private run goes on: in one file, since another would be a second account of the same budget."""
    if checkpoint is not None and place_of(checkpoint).resolve() != place_of(resumed).resolve():
        raise typer.BadParameter(
            "with --epsilon a run goes on in the file that it is resumed from, which counts what was sent. Leave "
            "this out.",
            param_hint="--checkpoint",
        )
    require_writable("--checkpoint", resumed, ())
    return resumed


def _fit(session: Session) -> bool:
    """Whether Ctrl-C was pressed."""
    began = time.perf_counter()
    options, settings = session.options, session.settings
    is_seen = options.record or options.report is not None
    fit = fit_of(settings, session.holdings, record=is_seen)
    recorder, spending = _recorder(session, fit), fit.spending
    if session.folder is not None:
        _begin(session, session.folder)
    witness = Witness() if options.report is not None else None
    earlier_seconds = recorder.history[-1].seconds if recorder.history else 0.0
    with held(FINISHING) as pressed:
        with recorder:
            run = _rounds(session, fit, recorder, witness, began, pressed)
        done = finish(fit, run)
        warn_of_empty_model(fit.solver, done)
        seconds = earlier_seconds + time.perf_counter() - began
        left_out = session.exclusions.left_out
        exposure = None
        if isinstance(fit, FederatedFit) and session.holdings.is_federation:
            exposure = worst_party(exposures_of(fit.program, fit.shards, len(run.history)).values())
        end = (left_out, spending, exposure)
        result = Result(options, settings, session.holdings, run, done, recorder.sent, seconds, *end)
        _save(session, done, result)
        if witness is not None and options.report is not None and isinstance(fit, FederatedFit):
            write_fit_report(options.report, fit, result, witness)
        report(result)
    return run.outcome is Outcome.INTERRUPTED or pressed.count > 0


def _begin(session: Session, folder: RunFolder) -> None:
    """A run folder for this run; where the one that is resumed left its traffic there, that is kept so far."""
    versions = model_file.machine_versions(session.settings.threads)
    resumed = session.resumed
    kept = complete_rounds(folder.path, resumed.sent) if resumed is not None and folder.run() == session.run else {}
    folder.begin(_asked(session), versions, kept)
    if resumed is not None:
        said = missing_traffic(folder.path, kept, resumed.checkpoint.index, is_recorded=session.options.record)
        if said:
            warn(said)


def _asked(session: Session) -> dict[str, Any]:
    """What settings.json says: enough to do the same again."""
    options = session.options
    reading = {name: getattr(options, name) for name in ("data", "label", "transpose", "key", "header")}
    return {
        **reading,
        **asdict(session.settings),
        "resumed_from": options.resume,
        "started": session.started,
        "run": session.run,
    }


def _recorder(session: Session, fit: Fit) -> RunRecorder:
    options = session.options
    about = {"settings": asdict(session.settings), "data": session.data, "left_out": session.exclusions.left_out}
    return RunRecorder.of(
        fit,
        about,
        path=options.checkpoint,
        every=options.checkpoint_every,
        traffic=TrafficRecorder(session.folder.path) if options.record and session.folder is not None else None,
        resumed=session.resumed,
        warn=lambda message: typer.echo(message, err=True),
    )


def _rounds(
    session: Session,
    fit: Fit,
    recorder: RunRecorder,
    witness: Witness | None,
    began: float,
    pressed: Interrupts,
) -> Training:
    def watcher(bar: Watch) -> Watch:
        def watch(done: Round, row: HistoryRow) -> None:
            session.exclusions.note(done, row)
            recorder.watch(done, row)
            if witness is not None:
                witness.record(done, row)
            bar(done, row)

        return watch

    rows, columns = session.holdings.shape
    title = f"{len(session.holdings.tables)} parties" if session.holdings.is_federation else f"{rows} × {columns}"
    is_shown = not session.options.quiet and sys.stderr.isatty()
    with progress(int(is_shown), fit.last, session.settings.time_budget, title) as bar:
        return run_fit_to_end(fit, resume=recorder.earlier, began=began, watch=watcher(bar), interrupts=pressed)


def _save(session: Session, done: FitResult, result: Result) -> None:
    """The model first: it is what was asked for."""
    options = session.options
    model = model_of(session.settings, session.holdings, done, result.iterations, result.spending)
    places: list[Path] = [options.output] if options.output is not None else []
    if session.folder is not None:
        places.append(session.folder.path / run_folder.MODEL)
    for place in places:
        save_model(place, model)
    if options.weights is not None:
        sample_names = session.holdings.tables[ALONE].sample_names
        write_weights(options.weights, done.W, sample_names)
        warn_of_formulas(options.weights, sample_names)
    if session.folder is not None:
        session.folder.end(result.history, result.sent, result.as_dict())
