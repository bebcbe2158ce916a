"""One fit from the command line, start to end: look at everything first, compute, save, tell."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import typer

from partsong.cli import run_folder, traffic
from partsong.cli.checkpoints import CheckpointFile, Journal, Sent, charged, open_checkpoint
from partsong.cli.choices import GAME, IGNORE
from partsong.cli.fit_outputs import require_companions, require_outputs
from partsong.cli.fit_page import Witness, write_fit_report
from partsong.cli.fit_parties import faulty_of, left_out_before, missing_of, read_sound_parties
from partsong.cli.fit_report import Result, report, warn_of_empty_model
from partsong.cli.fit_settings import (
    FederationSettings,
    FitOptions,
    Settings,
    require_fitting_options,
    require_one_process,
    require_same_run,
    run_of,
    settle,
)
from partsong.cli.fit_tasks import model_of, task_of, using_threads
from partsong.cli.game_settings import require_game
from partsong.cli.holdings import ALONE, Holdings, fingerprint, read_holdings, require_meaningful
from partsong.cli.outputs import require_writable, warn, warn_of_formulas
from partsong.cli.parts_folder import is_parts_folder
from partsong.cli.privacy_settings import require_privacy
from partsong.cli.run_folder import RunFolder
from partsong.cli.termination import exit_code
from partsong.cli.traffic import Recorder
from partsong.core import Outcome, Round
from partsong.finished import Finished
from partsong.fitting import Earlier, Task, conclude, pursue
from partsong.interrupts import Interrupts, held
from partsong.io import provenance
from partsong.io.model_file import save_model
from partsong.io.opening import Wanted, place_of
from partsong.io.weights import write_weights
from partsong.leaving_out import LEAVE_OUT, Attendance
from partsong.progress import Watch, progress
from partsong.running import HistoryRow, Run
from partsong.spending import Spending

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
    attendance: Attendance
    earlier: Earlier | None = None
    sent: list[Sent] = field(default_factory=list)
    context: Mapping[str, Any] = field(default_factory=dict)
    started: str = field(default_factory=provenance.now)

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
        is_game = (options.method if is_federation else options.solver) == GAME
        require_game(asdict(options), given, is_game=is_game, is_between_parties=is_federation)
    if not is_federation:
        require_meaningful(options.data, _wanted(options))
    require_outputs(options)
    if is_federation and options.resume is None:
        require_privacy(asdict(options), given)
    session = _prepare(options, given, is_federation)
    with using_threads(session.settings.threads):
        is_interrupted = _fit(session)
    if is_interrupted:
        raise typer.Exit(exit_code())


def _wanted(options: FitOptions) -> Wanted:
    return Wanted(options.label, options.transpose, options.key, options.header)


def _prepare(options: FitOptions, given: Collection[str], is_federation: bool) -> Session:
    earlier, sent, context = open_checkpoint(options.resume) if options.resume is not None else (None, [], None)
    before, known, unsound = [], {}, dict[str, str]()
    missing = missing_of(options, given, context)
    if options.resume is not None and context is not None and earlier is not None:
        before, known = left_out_before(options.resume, context, earlier.checkpoint.index), context["data"]
    if is_federation and faulty_of(options, given, context) == LEAVE_OUT:
        late = {entry.party for entry in before if entry.party not in known}
        holdings, unsound = read_sound_parties(options.data, options.dtype, late, missing)
    else:
        wanted = replace(_wanted(options), gaps=missing == IGNORE)
        holdings = read_holdings(options.data, wanted, options.dtype, missing)
    settings = settle(options, given, holdings, None if context is None else context["settings"])
    data = {}
    if options.checkpoint is not None or options.resume is not None or options.record:
        data = {name: fingerprint(table) for name, table in holdings.tables.items()}
    if options.resume is not None and context is not None:
        data |= {name: print_of for name, print_of in known.items() if name in unsound}
        require_same_run(options.resume, context, settings, data)
        if isinstance(settings, FederationSettings) and settings.epsilon is not None:
            options = replace(options, checkpoint=_same_file(options.resume, options.checkpoint))
    attendance = Attendance(unsound, warn, before)
    return Session(options, settings, holdings, data, attendance, earlier, sent, context or {})


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
    task = task_of(settings, session.holdings, record=is_seen)
    spending = task.spending
    if session.earlier is not None and spending is not None:
        assert options.resume is not None
        session = replace(session, earlier=charged(options.resume, session.earlier, session.context, spending))
    if session.folder is not None:
        _begin(session, session.folder)
    journal = Journal(keeps_last=task.is_private)
    if session.earlier is not None:
        journal = Journal.after(session.earlier, session.sent, len(task.shards), task.is_private)
    file, witness = _checkpoint_file(session, journal, spending), Witness() if options.report is not None else None
    recorder = Recorder(session.folder.path) if options.record and session.folder is not None else None
    if file is not None and spending is not None:
        file.save()
    with held(FINISHING) as pressed:
        run = _rounds(session, task, journal, file, (recorder, witness), began, pressed)
        if file is not None:
            file.close()
        done = conclude(task, run)
        warn_of_empty_model(task, done)
        earlier_seconds = session.earlier.history[-1].seconds if session.earlier and session.earlier.history else 0.0
        seconds = earlier_seconds + time.perf_counter() - began
        left_out = session.attendance.left_out
        result = Result(options, settings, session.holdings, run, done, journal.sent, seconds, left_out, spending)
        _save(session, done, result)
        if witness is not None and options.report is not None:
            write_fit_report(options.report, task, result, witness)
        report(result)
    return run.outcome is Outcome.INTERRUPTED or pressed.count > 0


def _begin(session: Session, folder: RunFolder) -> None:
    """A run folder for this run; where the one that is resumed left its traffic there, that is kept so far."""
    versions = provenance.machine_versions(session.settings.threads)
    is_same = session.earlier is not None and folder.run() == session.run
    kept = traffic.recorded(folder.path, session.sent) if is_same else {}
    folder.begin(_asked(session), versions, kept)
    if session.earlier is not None:
        said = traffic.gap(folder.path, kept, session.earlier.checkpoint.index, is_recorded=session.options.record)
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


def _checkpoint_file(session: Session, journal: Journal, spending: Spending | None) -> CheckpointFile | None:
    options = session.options
    if options.checkpoint is None:
        return None
    context = {"settings": asdict(session.settings), "data": session.data, "left_out": session.attendance.left_out}
    if spending is None:
        return CheckpointFile(options.checkpoint, options.checkpoint_every, journal, context)
    return CheckpointFile(options.checkpoint, 0.0, journal, context, lambda: spending.accounts.to_json())


def _rounds(
    session: Session,
    task: Task,
    journal: Journal,
    file: CheckpointFile | None,
    observers: tuple[Recorder | None, Witness | None],
    began: float,
    pressed: Interrupts,
) -> Run:
    """All rounds; whatever ends them, the checkpoint is up to date."""

    def watcher(bar: Watch) -> Watch:
        def watch(done: Round, row: HistoryRow) -> None:
            session.attendance.note(done, row)
            journal.note(done, row)
            recorder, witness = observers
            if recorder is not None and session.options.record:
                recorder.note(done)
            if witness is not None:
                witness.see(done, row)
            if file is not None:
                file.tick()
            bar(done, row)

        return watch

    rows, columns = session.holdings.shape
    title = f"{len(session.holdings.tables)} parties" if session.holdings.is_federation else f"{rows} × {columns}"
    is_shown = not session.options.quiet and sys.stderr.isatty()
    try:
        with progress(int(is_shown), task.schedule.rounds, session.settings.time_budget, title) as bar:
            return pursue(task, earlier=session.earlier, began=began, watch=watcher(bar), interrupts=pressed)
    except BaseException:
        if file is not None:
            file.save()
        raise


def _save(session: Session, done: Finished, result: Result) -> None:
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
