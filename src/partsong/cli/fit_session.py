"""A fit in one process, start to end: check the options, read everything, fit, save, report."""

from __future__ import annotations

import hashlib
import json
import sys
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import typer
from sklearn.exceptions import ConvergenceWarning

from partsong import methods
from partsong.cli.fit_options import (
    FOR,
    GAME,
    HERE,
    INSTEAD,
    METHODS,
    NEEDS,
    OF_SOLVERS,
    PARAMETERS,
    PARTIES,
    READING,
    SKETCHES,
    TABLE,
    FitOptions,
)
from partsong.cli.fit_report import Result, Witness, report, write_fit_report
from partsong.cli.inputs import ALONE, Holdings, read_holdings, read_sound_parties
from partsong.console import output
from partsong.console.options import MODEL_ENDINGS, WEIGHT_ENDINGS
from partsong.console.output import exit_code, option, require_distinct, require_writable, warn, warn_of_formulas
from partsong.console.tables import require_meaningful
from partsong.core import runtime
from partsong.core.interfaces import Outcome, Round
from partsong.core.parameters import SHARE
from partsong.core.runtime import graceful_interrupt
from partsong.core.streams import fresh_seed
from partsong.errors import CompositionError, FileError, FormatError, ParameterError
from partsong.estimators.federated_nmf import FederatedNMF
from partsong.estimators.nmf import NMF
from partsong.io import model_file
from partsong.io.opening import ReadOptions, resolve_path
from partsong.io.party_folder import is_parts_folder
from partsong.io.weights import write_weights
from partsong.methods.privacy_request import PartyPrivacy, Privacy, RowPrivacy
from partsong.secure_aggregation.protocol import SecureSum
from partsong.solvers.game import compose_game
from partsong.training import run_folder
from partsong.training.checkpoint import (
    RunRecorder,
    SavedRun,
    another_run,
    fingerprint,
    left_out_before,
    load_run,
    require_same_run,
)
from partsong.training.loop import SKIP, Exclusion, Fit, FitObserver, HistoryRow, ResumePoint, Training
from partsong.training.result import FitResult
from partsong.training.run_folder import RunFolder
from partsong.training.traffic import TrafficRecorder, complete_rounds, missing_traffic

FINISHING = (
    "Interrupted: the model is saved after this iteration. Press Ctrl-C again to save that of the iterations before, "
    "if there were any, and once more to give up."
)
CENTRALISED = "centralised"
MAY_CHANGE = frozenset({"tol", "max_iter", "rounds", "on_party_error"})
"""Settings of a run that may differ once it is resumed; the noise of a private one was planned for its rounds."""

Estimator = NMF | FederatedNMF


def run_fit(options: FitOptions, given: Collection[str]) -> None:
    """Fit, save and report; end with exit code 130 after Ctrl-C, with 143 after SIGTERM."""
    kind = PARTIES if is_parts_folder(resolve_path(options.data)) else TABLE
    saved = None if options.resume is None else load_run(options.resume)
    if saved is not None:
        options = inherited(options, given, saved, kind)
    require_fitting(options, given, kind)
    if kind == TABLE:
        require_meaningful(options.data, reading_of(options))
    if options.seed is None:
        options = replace(options, seed=fresh_seed() >> 32)
    with usage_errors():
        estimator = estimator_of(options, given, kind)
        estimator.check_settings()
    require_outputs(options)
    session = Session.of(options, estimator, saved)
    if session.run():
        raise typer.Exit(exit_code())


@contextmanager
def usage_errors() -> Iterator[None]:
    """Errors of parameters are errors of the command line, as long as no data have been read."""
    try:
        yield
    except (ParameterError, CompositionError) as error:
        raise typer.BadParameter(output.plain(error)) from error


# ---- before the data ---------------------------------------------------------------------------------------------


def require_fitting(options: FitOptions, given: Collection[str], kind: str) -> None:
    """Refuse options that mean nothing for this kind of DATA, or without another option."""
    at_home = OF_SOLVERS if kind == TABLE else {}
    idle = [name for name in FOR if name in given and kind not in FOR[name] and name not in at_home]
    if idle:
        where = " or ".join(FOR[idle[0]])
        hint = next((INSTEAD[name, kind] for name in idle if (name, kind) in INSTEAD), "Leave it out.")
        raise typer.BadParameter(f"for {where}; {HERE[kind]}. {hint}", param_hint=", ".join(map(option, idle)))
    for name, solver in at_home.items():
        if name in given and options.solver != solver:
            between = " (of parts: --method game)" if solver == GAME else ""
            raise typer.BadParameter(f"only for --solver {solver}{between}.", param_hint=option(name))
    if kind == PARTIES and options.method not in METHODS:
        raise typer.BadParameter(
            f"{options.method} is for --engine mpi or torch. Parts have {', '.join(METHODS)}.", param_hint="--method"
        )
    if options.output is None and options.run_folder is None:
        raise typer.BadParameter("say where the model goes: -o model.safetensors.", param_hint="--output")
    for name, other in NEEDS.items():
        other_value = getattr(options, other)
        if name in given and (other_value is None or other_value is False):
            raise typer.BadParameter(f"needs {option(other)}.", param_hint=option(name))


def reading_of(options: FitOptions) -> ReadOptions:
    """How DATA is to be read."""
    return ReadOptions(options.label, options.transpose, options.key, options.header, gaps=options.missing == "ignore")


def require_outputs(options: FitOptions) -> None:
    """Refuse, before anything is read, what could not be written afterwards, or would overwrite something else."""
    outputs = {"--output": options.output, "--weights": options.weights, "--checkpoint": options.checkpoint}
    require_distinct({"DATA": options.data, **outputs, "--report": options.report})
    require_distinct({"--output": options.output, "--weights": options.weights, "--resume": options.resume})
    if options.run_folder is not None:
        folder = resolve_path(options.run_folder)
        others = {"DATA": options.data, "--weights": options.weights, "--checkpoint": options.checkpoint}
        for name in run_folder.OWN:
            require_distinct({"--run-folder": folder / name, **others})
        run_folder.make_usable(folder, options.overwrite)
    endings = {"--output": MODEL_ENDINGS, "--weights": WEIGHT_ENDINGS, "--checkpoint": (), "--report": (".html",)}
    for name, path in {**outputs, "--report": options.report}.items():
        require_writable(name, path, endings[name])
    if options.checkpoint is not None and resolve_path(options.checkpoint).exists():
        _require_checkpoint(resolve_path(options.checkpoint), is_resumed=options.resume is not None)


def _require_checkpoint(path: Path, *, is_resumed: bool) -> None:
    """Only a checkpoint is ever overwritten by one; what a private run has spent is never lost."""
    try:
        saved = load_run(path)
    except FormatError as error:
        raise FileError(f"--checkpoint {path}: this file is something else. Choose another name.") from error
    if saved.spent and not is_resumed:
        raise FileError(
            f"--checkpoint {path}: this file holds what an earlier run has spent on privacy, which adds up with what "
            "this one will spend. Resume that run by --resume, or choose another name and keep the file."
        )


def inherited(options: FitOptions, given: Collection[str], saved: SavedRun, kind: str) -> FitOptions:
    """The options of a resumed run: as given, else as its checkpoint has them."""
    stored: Mapping[str, Any] = saved.about["settings"]
    if "threads" in stored:
        raise FormatError(
            f"{options.resume}: this checkpoint was written by another version of partsong. Resume the run with that "
            "version, or start a new one."
        )
    if (stored["method"] == CENTRALISED) != (kind == TABLE):
        here = CENTRALISED if kind == TABLE else options.method
        raise another_run(options.resume, [f"method ({stored['method']} there, {here} here)"])
    others = {name: getattr(options, name, None) for name in sorted(given) if name in stored and name not in MAY_CHANGE}
    differing = {name: here for name, here in others.items() if here != stored[name]}
    if {"method", "solver"} & differing.keys():  # whose options are others
        raise another_run(
            options.resume, [f"{option(name)} ({stored[name]} there, {here} here)" for name, here in differing.items()]
        )
    privacy = {("noise" if name == "kind" else name): value for name, value in (stored.get("privacy") or {}).items()}
    known = {**stored, **privacy, "order": stored.get("play")}
    named = {name: known[name] for name in PARAMETERS if known.get(name) is not None}
    values = {one.name: known[one.name] for one in fields(FitOptions) if one.name in known and one.name not in given}
    if kind == TABLE:
        values.pop("method", None)
    further = {**named, **stored.get("method_options", {}), **options.method_options}
    options = replace(options, **{**values, "method_options": further})
    if options.epsilon is not None:
        return replace(options, checkpoint=_same_file(options))
    return options


def _same_file(options: FitOptions) -> Path:
    """Where a private run goes on: in one file, since another would be a second account of the same budget."""
    assert options.resume is not None
    place = resolve_path(options.resume)
    if options.checkpoint is not None and resolve_path(options.checkpoint).resolve() != place.resolve():
        raise typer.BadParameter(
            "with --epsilon a run is resumed in its own checkpoint, which counts what was sent. Leave this out.",
            param_hint="--checkpoint",
        )
    require_writable("--checkpoint", options.resume, ())
    return options.resume


# ---- options to an estimator -------------------------------------------------------------------------------------


def estimator_of(options: FitOptions, given: Collection[str], kind: str) -> Estimator:
    """The estimator that the options describe."""
    common = {**common_arguments(options), "random_state": options.seed}
    if kind == TABLE:
        solver: Any = compose_game(**game_options(options)) if options.solver == GAME else options.solver
        sketch: dict[str, Any] = {
            name: options.method_options[name] for name in SKETCHES if name in options.method_options
        }
        if "sketch_ratio" in sketch:
            sketch["sketch_ratio"] = SHARE.read(str(sketch["sketch_ratio"]))
        return NMF(
            solver=solver,
            init=options.init,
            max_iter=options.max_iter,
            n_threads=options.threads,
            **penalty_arguments(options),
            **sketch,
            **common,
        )
    if "rounds" in given and options.rounds != 1 and methods.method(options.method).is_one_shot:
        raise typer.BadParameter(f"{options.method} exchanges once: it has one round.", param_hint="--rounds")
    return FederatedNMF(
        method=options.method,
        rounds=options.rounds,
        on_party_error=options.on_party_error.replace("-", " "),
        privacy=privacy_of(options, given),
        secure_aggregation=options.secure_aggregation if options.mask_bound is None else SecureSum(options.mask_bound),
        method_options=method_options_of(options, options.method),
        n_jobs=1 if options.engine == "sequential" else options.threads,
        **common,
    )


def common_arguments(options: FitOptions) -> dict[str, Any]:
    """What every kind of fit takes."""
    told: dict[str, Any] = {
        name: getattr(options, name) for name in ("n_components", "tol", "time_budget", "dtype", "missing")
    }
    return {**told, "verbose": int(not options.quiet and sys.stderr.isatty())}


def penalty_arguments(options: FitOptions) -> dict[str, Any]:
    """Those of a fit of one table, here or over ranks."""
    alpha_H = "same" if options.alpha_h is None else options.alpha_h
    return {"alpha_W": options.alpha_w, "alpha_H": alpha_H, "l1_ratio": options.l1_ratio}


def game_options(options: FitOptions) -> dict[str, Any]:
    """The parts of a game over one table."""
    return methods.method(GAME).parse(method_options_of(options, GAME))


def method_options_of(options: FitOptions, method: str) -> dict[str, Any]:
    """The options of a method as plain data."""
    parameters = methods.method(method).parameters_with(options.method_options)
    return {
        name: parameters[name].read(value) if isinstance(value, str) and name in parameters else value
        for name, value in options.method_options.items()
    }


def privacy_of(options: FitOptions, given: Collection[str]) -> Privacy | None:
    """The differential privacy that was asked for."""
    if options.epsilon is None:
        return None
    if options.unit is None:
        raise typer.BadParameter("say whom ε protects: row or party.", param_hint="--unit")
    foreign = {"row": ("clip", "noise"), "party": ("row_bound",)}[options.unit]
    if idle := [name for name in foreign if name in given]:
        raise typer.BadParameter(f"not for --unit {options.unit}.", param_hint=output.option(idle[0]))
    if measured := [name for name in ("time_budget", "tol") if name in given and getattr(options, name)]:
        raise typer.BadParameter(
            "with --epsilon no measurement may end a run. Use --rounds.", param_hint=output.option(measured[0])
        )
    if "mask_bound" in given:
        raise typer.BadParameter("follows from --epsilon. Leave it out.", param_hint="--mask-bound")
    asked: dict[str, Any] = {"delta": options.delta, "relation": options.relation}
    if options.unit == "party":
        asked |= {"clip": options.clip, "kind": options.noise}
        return PartyPrivacy(options.epsilon, **_set(asked))
    if options.row_bound is None:
        raise typer.BadParameter("needed for --unit row: the norm of a large row.", param_hint="--row-bound")
    return RowPrivacy(options.epsilon, options.row_bound, **_set(asked))


def _set(asked: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in asked.items() if value is not None}


# ---- the fit -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Session(FitObserver):
    """One fit: what it reads, keeps on its way, and saves at its end."""

    options: FitOptions
    estimator: Estimator
    holdings: Holdings
    unsound: Mapping[str, str] = field(default_factory=dict)
    saved: SavedRun | None = None
    started: str = field(default_factory=model_file.now)
    settings: dict[str, Any] = field(default_factory=dict)
    left_out: list[Exclusion] = field(default_factory=list)
    witness: Witness | None = None
    fit: Any = None
    recorder: Any = None
    training: Any = None
    result: Any = None

    @staticmethod
    def of(options: FitOptions, estimator: Estimator, saved: SavedRun | None) -> Session:
        """Read DATA; with --on-party-error skip, without parties whose files are unusable."""
        unsound: dict[str, str] = {}
        if isinstance(estimator, FederatedNMF) and estimator.on_party_error == SKIP:
            known = set() if saved is None else saved.about["data"].keys()
            before = [] if saved is None else left_out_before(saved, options.resume or "")
            late = {entry.party for entry in before if entry.party not in known}
            holdings, unsound = read_sound_parties(options.data, options.dtype, late, options.missing)
        else:
            holdings = read_holdings(options.data, reading_of(options), options.dtype, options.missing)
        for name, reason in unsound.items():
            warn(f"Party {name!r} is left out of this run. {reason}")
        witness = None if options.report is None else Witness()
        return Session(options, estimator, holdings, unsound, saved, witness=witness)

    @property
    def folder(self) -> RunFolder | None:
        """The run folder, if one is wanted."""
        place = self.options.run_folder
        return None if place is None else RunFolder(resolve_path(place))

    def run(self) -> bool:
        """Fit, save and report; whether Ctrl-C was pressed."""
        began, options = time.perf_counter(), self.options
        earlier = self.saved.history[-1].seconds if self.saved is not None and self.saved.history else 0.0
        with (
            runtime.limit_threads(options.threads or runtime.available_threads()),
            graceful_interrupt(FINISHING) as pressed,
        ):
            W = self._fit()
            seconds = earlier + time.perf_counter() - began
            result = Result(self.options, self.estimator, self.holdings, self.fit, self.settings, self.training,
                            self.result, self.recorder.sent, seconds)  # fmt: skip
            self._save(W, result)
            report(result.as_dict(), result.lines(), options)
            if self.witness is not None and options.report is not None:
                write_fit_report(options.report, result, self.witness)
        return self.training.outcome is Outcome.INTERRUPTED or pressed.count > 0

    def _fit(self) -> np.ndarray | None:
        tables, W = {name: table.X for name, table in self.holdings.tables.items()}, None
        if isinstance(self.estimator, NMF):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)  # the report says how the fit ended
                W = self.estimator.fit_transform(tables[ALONE], observer=self)
        else:
            is_seen = self.options.record or self.witness is not None
            self.estimator.fit(tables, record=is_seen, observer=self)
        if self.holdings.feature_names is not None:
            self.estimator.feature_names_in_ = np.array(self.holdings.feature_names, dtype=object)
        return W

    @contextmanager
    def begin(self, fit: Fit, left_out: list[Exclusion]) -> Iterator[ResumePoint | None]:
        """Open the checkpoint, and the run folder."""
        options, saved = self.options, self.saved
        self.fit, self.left_out = fit, left_out
        self.settings = self.estimator.run_settings(fit)  # type: ignore[arg-type]
        data = {}
        if options.checkpoint is not None or saved is not None or options.record:
            data = {name: fingerprint(table.X, table.feature_names) for name, table in self.holdings.tables.items()}
        if saved is not None and options.resume is not None:
            data |= {name: there for name, there in saved.about["data"].items() if name in self.unsound}
            change = MAY_CHANGE - {"rounds"} if fit.is_private else MAY_CHANGE
            require_same_run(options.resume, saved, self.settings, data, {*change, "parties"}, output.option)
            left_out[:0] = left_out_before(saved, options.resume)
        self.recorder = RunRecorder(
            fit,
            {"settings": self.settings, "data": data, "left_out": left_out},
            path=options.checkpoint,
            every=options.checkpoint_every,
            traffic=TrafficRecorder(self.folder.path) if options.record and self.folder is not None else None,
            resumed=saved,
        )
        if self.folder is not None:
            self._open_folder(self.folder, data)
        with self.recorder:
            yield self.recorder.earlier

    def watch(self, done: Round, row: HistoryRow) -> None:
        """Keep one more round."""
        self.left_out += [Exclusion(row.iteration, name, reason) for name, reason in self.unsound.items()]
        self.recorder.watch(done, row)
        if self.witness is not None:
            self.witness.record(done, row)

    def end(self, training: Training, result: FitResult) -> None:
        """Keep how it ended."""
        self.training, self.result = training, result

    def _open_folder(self, folder: RunFolder, data: Mapping[str, Any]) -> None:
        """A run folder for this run; if the resumed run left its traffic there, that is kept."""
        options, saved = self.options, self.saved
        fixed = {name: value for name, value in self.settings.items() if name not in MAY_CHANGE}
        run = hashlib.sha256(json.dumps([fixed, data], sort_keys=True).encode()).hexdigest() if data else None
        kept = complete_rounds(folder.path, saved.sent) if saved is not None and folder.run() == run else {}
        asked = {
            **{name: getattr(options, name) for name in ("data", *READING, "engine", "time_budget")},
            **self.settings,
            "resumed_from": options.resume,
            "started": self.started,
            "run": run,
        }
        own = folder.path / run_folder.CHECKPOINT
        resumes = options.resume is not None and resolve_path(options.resume).resolve() == own.resolve()
        folder.begin(
            asked, model_file.machine_versions(options.threads or runtime.available_threads()), kept, resumes=resumes
        )
        missing = "" if saved is None else missing_traffic(
            folder.path, kept, saved.checkpoint.index, is_recorded=options.record
        )  # fmt: skip
        if missing:
            warn(missing)

    def _save(self, W: np.ndarray | None, result: Result) -> None:
        """The model first: it is what was asked for."""
        options, folder = self.options, self.folder
        for place in (options.output, None if folder is None else folder.path / run_folder.MODEL):
            if place is not None:
                self.estimator.save(resolve_path(place))
        if options.weights is not None and W is not None:
            sample_names = self.holdings.tables[ALONE].sample_names
            write_weights(options.weights, W, sample_names)
            warn_of_formulas(options.weights, sample_names)
        if folder is not None:
            folder.end(self.estimator.history_, result.sent, result.as_dict())
