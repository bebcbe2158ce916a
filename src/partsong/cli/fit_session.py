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
    OF_MECHANISMS,
    OF_SOLVERS,
    PARAMETERS,
    PARTIES,
    READING,
    ROW_ONLY,
    SKETCHES,
    TABLE,
    FitOptions,
)
from partsong.cli.fit_report import Result, Witness, report, write_fit_report
from partsong.cli.inputs import ALONE, PartyTables, read_data, read_valid_parties
from partsong.console import output
from partsong.console.options import MODEL_ENDINGS, WEIGHT_ENDINGS
from partsong.console.output import exit_code, option, require_distinct, require_writable, warn, warn_about_formulas
from partsong.console.tables import require_applicable_options
from partsong.core import runtime
from partsong.core.interfaces import Outcome, Round
from partsong.core.parameters import SHARE
from partsong.core.runtime import graceful_interrupt
from partsong.core.streams import fresh_seed
from partsong.errors import CompositionError, FileError, FormatError, InvisibleComponents, ParameterError
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
    describe_difference,
    different_run_error,
    exclusions_before,
    fingerprint,
    load_run,
    require_same_run,
)
from partsong.training.loop import SKIP, Exclusion, Fit, FitObserver, HistoryRow, ResumePoint, Training
from partsong.training.result import FitResult
from partsong.training.run_folder import RunFolder, rank_files
from partsong.training.simulation import FederatedFit
from partsong.training.traffic import TrafficRecorder, complete_rounds, missing_traffic

FINISHING = (
    "Interrupted: the model is saved after this iteration. Press Ctrl-C again to save the model of the previous "
    "iteration, if there is one, and a third time to quit."
)
CENTRALIZED = "centralized"
AUTO, CENTRED = "auto", "centred"
MAY_CHANGE = frozenset({"tol", "max_iter", "rounds", "on_party_error"})
"""Settings that may change when a run is resumed. The noise of a private run is calibrated to its rounds."""

Estimator = NMF | FederatedNMF


def run_fit(options: FitOptions, given: Collection[str]) -> None:
    """Fit, save and report. The exit code is 130 after Ctrl-C and 143 after SIGTERM."""
    kind = PARTIES if is_parts_folder(resolve_path(options.data)) else TABLE
    saved = None if options.resume is None else load_run(options.resume)
    if saved is not None:
        options = resume_options(options, given, saved, kind)
    require_fitting(options, given, kind)
    if kind == TABLE:
        require_applicable_options(options.data, reading_of(options))
    if options.seed is None:
        options = replace(options, seed=fresh_seed() >> 32)
    with usage_errors():
        estimator = build_estimator(options, given, kind)
        estimator.check_settings()
    # After all other checks, so that this message does not hide another mistake.
    if options.output is None and options.run_folder is None:
        raise typer.BadParameter("no output file. Pass -o model.safetensors.", param_hint="--output")
    require_outputs(options)
    session = Session.of(options, estimator, saved)
    if session.run():
        raise typer.Exit(exit_code())


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn errors of parameters into usage errors, as long as no data have been read."""
    try:
        yield
    except (ParameterError, CompositionError) as error:
        raise typer.BadParameter(output.plain(error)) from error


# ---- before the data ---------------------------------------------------------------------------------------------


def require_fitting(options: FitOptions, given: Collection[str], kind: str) -> None:
    """Refuse options that this kind of DATA does not have, or that need another option."""
    at_home = OF_SOLVERS if kind == TABLE else {}
    idle = [name for name in FOR if name in given and kind not in FOR[name] and name not in at_home]
    if idle:
        where = " or ".join(FOR[idle[0]])
        hint = next((INSTEAD[name, kind] for name in idle if (name, kind) in INSTEAD), "Leave it out.")
        raise typer.BadParameter(
            f"only for {where}; here {HERE[kind]}. {hint}", param_hint=", ".join(map(option, idle))
        )
    for name, solver in at_home.items():
        if name in given and options.solver != solver:
            between = " (of parts: --method game)" if solver == GAME else ""
            raise typer.BadParameter(f"only for --solver {solver}{between}.", param_hint=option(name))
    if kind == PARTIES and options.method not in METHODS:
        raise typer.BadParameter(
            f"{options.method} needs --engine mpi or torch. A folder of parts takes {', '.join(METHODS)}.",
            param_hint="--method",
        )
    if isinstance(options.n_components, list) and options.epsilon is None:
        raise typer.BadParameter(
            "several ranks follow from one private release only. Pass one rank, or a folder of parts with --epsilon.",
            param_hint="--components",
        )
    for name, other in NEEDS.items():
        other_value = getattr(options, other)
        if name in given and (other_value is None or other_value is False):
            raise typer.BadParameter(f"needs {option(other)}.", param_hint=option(name))


def reading_of(options: FitOptions) -> ReadOptions:
    """Return the reading options."""
    return ReadOptions(options.label, options.transpose, options.key, options.header, gaps=options.missing == "ignore")


def require_outputs(options: FitOptions) -> None:
    """Refuse, before anything is read, outputs that cannot be written or would overwrite another file."""
    outputs = {"--output": options.output, "--weights": options.weights, "--checkpoint": options.checkpoint}
    ranks = options.n_components if isinstance(options.n_components, list) else []
    models = {} if options.output is None else rank_files(options.output, ranks)
    more = {f"--output (rank {rank})": path for rank, path in models.items()}
    require_distinct({"DATA": options.data, **outputs, **more, "--report": options.report})
    require_distinct({"--output": options.output, "--weights": options.weights, "--resume": options.resume})
    if options.run_folder is not None:
        folder = resolve_path(options.run_folder)
        others = {"DATA": options.data, "--weights": options.weights, "--checkpoint": options.checkpoint}
        for name in run_folder.RUN_FILES:
            require_distinct({"--run-folder": folder / name, **others})
        run_folder.prepare_folder(folder, options.overwrite)
    endings = {"--output": MODEL_ENDINGS, "--weights": WEIGHT_ENDINGS, "--checkpoint": (), "--report": (".html",)}
    for name, path in {**outputs, "--report": options.report}.items():
        require_writable(name, path, endings[name])
    if options.checkpoint is not None and resolve_path(options.checkpoint).exists():
        _require_checkpoint(resolve_path(options.checkpoint), is_resumed=options.resume is not None)


def _require_checkpoint(path: Path, *, is_resumed: bool) -> None:
    """Refuse to overwrite a file that is no checkpoint, or the record of what a private run has spent."""
    try:
        saved = load_run(path)
    except FormatError as error:
        raise FileError(
            f"--checkpoint {path}: this file exists and is not a checkpoint. Choose another name."
        ) from error
    if saved.spent and not is_resumed:
        raise FileError(
            f"--checkpoint {path}: this file records the privacy budget that an earlier run has spent, which adds to "
            "what this run will spend. Resume that run with --resume, or keep the file and choose another name."
        )


def resume_options(options: FitOptions, given: Collection[str], saved: SavedRun, kind: str) -> FitOptions:
    """Complete the options of a resumed run by those in its checkpoint."""
    stored: Mapping[str, Any] = saved.about["settings"]
    if "threads" in stored:
        raise FormatError(
            f"{options.resume}: another version of partsong wrote this checkpoint. Resume the run with that "
            "version, or start a new run."
        )
    if (stored["method"] == CENTRALIZED) != (kind == TABLE):
        here = CENTRALIZED if kind == TABLE else options.method
        raise different_run_error(options.resume, [describe_difference("method", stored["method"], here)])
    others = {name: getattr(options, name, None) for name in sorted(given) if name in stored and name not in MAY_CHANGE}
    differing = {name: here for name, here in others.items() if here != stored[name]}
    if {"method", "solver"} & differing.keys():  # they have other options
        raise different_run_error(
            options.resume, [describe_difference(option(name), stored[name], here) for name, here in differing.items()]
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
    """Return the checkpoint of a private run. A second file would be a second record of the same budget."""
    assert options.resume is not None
    place = resolve_path(options.resume)
    if options.checkpoint is not None and resolve_path(options.checkpoint).resolve() != place.resolve():
        raise typer.BadParameter(
            "a private run continues in its own checkpoint, which counts what was spent. Remove this option.",
            param_hint="--checkpoint",
        )
    require_writable("--checkpoint", options.resume, ())
    return options.resume


# ---- options to an estimator -------------------------------------------------------------------------------------


def build_estimator(options: FitOptions, given: Collection[str], kind: str) -> Estimator:
    """Build the estimator that the options describe."""
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
        raise typer.BadParameter(f"{options.method} has exactly one round. Remove this option.", param_hint="--rounds")
    return FederatedNMF(
        method=options.method,
        rounds=options.rounds,
        on_party_error=options.on_party_error,
        privacy=privacy_of(options, given),
        secure_aggregation=options.secure_aggregation if options.mask_bound is None else SecureSum(options.mask_bound),
        method_options=method_options_of(options, options.method),
        n_jobs=1 if options.engine == "sequential" else options.threads,
        **common,
    )


def common_arguments(options: FitOptions) -> dict[str, Any]:
    """Return the arguments of every kind of fit."""
    settings: dict[str, Any] = {
        name: getattr(options, name) for name in ("n_components", "tol", "time_budget", "dtype", "missing")
    }
    return {**settings, "verbose": int(not options.quiet and sys.stderr.isatty())}


def penalty_arguments(options: FitOptions) -> dict[str, Any]:
    """Return the penalties of a fit of one table, in one process or over ranks."""
    alpha_H = "same" if options.alpha_h is None else options.alpha_h
    return {"alpha_W": options.alpha_w, "alpha_H": alpha_H, "l1_ratio": options.l1_ratio}


def game_options(options: FitOptions) -> dict[str, Any]:
    """Return the parts of a game on one table."""
    return methods.method(GAME).parse(method_options_of(options, GAME))


def method_options_of(options: FitOptions, method: str) -> dict[str, Any]:
    """Return the parameters of a method as plain data."""
    parameters = methods.method(method).parameters_with(options.method_options)
    return {
        name: parameters[name].read(value) if isinstance(value, str) and name in parameters else value
        for name, value in options.method_options.items()
    }


def privacy_of(options: FitOptions, given: Collection[str]) -> Privacy | None:
    """Return the requested differential privacy."""
    if options.epsilon is None:
        return None
    if options.unit is None:
        raise typer.BadParameter(
            "--epsilon needs the unit it protects. Pass --unit row or --unit party.", param_hint="--unit"
        )
    foreign = {"row": ("clip", "noise"), "party": ROW_ONLY}[options.unit]
    if idle := [name for name in foreign if name in given]:
        raise typer.BadParameter(
            f"does not apply to --unit {options.unit}. Remove it.", param_hint=output.option(idle[0])
        )
    if measured := [name for name in ("time_budget", "tol") if name in given and getattr(options, name)]:
        raise typer.BadParameter(
            "with --epsilon no measurement may end a run: its noise is calibrated to the rounds. Use --rounds.",
            param_hint=output.option(measured[0]),
        )
    if "mask_bound" in given:
        raise typer.BadParameter("follows from --epsilon. Remove it.", param_hint="--mask-bound")
    asked: dict[str, Any] = {"delta": options.delta, "relation": options.relation}
    if options.unit == "party":
        asked |= {"clip": options.clip, "kind": options.noise}
        return PartyPrivacy(options.epsilon, **_set(asked))
    mechanism = options.mechanism or AUTO
    for name, other in OF_MECHANISMS.items():
        if name in given and mechanism != other and (name, mechanism) != ("rounds", AUTO):
            raise typer.BadParameter(
                f"only for --mechanism {other}; here it is {mechanism}. Remove it, or pass --mechanism {other}.",
                param_hint=output.option(name),
            )
    own = {name: getattr(options, name) for name in ROW_ONLY}
    if mechanism == CENTRED:
        if "row_bound" in given:
            raise typer.BadParameter(
                "--mechanism centred scales every row to norm 1. Remove it.", param_hint="--row-bound"
            )
        own["row_bound"] = 1.0
    elif options.row_bound is None:
        raise typer.BadParameter(
            "--unit row needs a bound on the norm of a row. Pass one that was chosen without looking at the data.",
            param_hint="--row-bound",
        )
    return RowPrivacy(options.epsilon, **_set({**asked, **own}))


def _set(asked: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in asked.items() if value is not None}


# ---- the fit -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Session(FitObserver):
    """One fit: its data, the records of its run, and its outputs."""

    options: FitOptions
    estimator: Estimator
    data: PartyTables
    invalid: Mapping[str, str] = field(default_factory=dict)
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
        """Read DATA; with --on-party-error skip, leave out parties whose files are unusable."""
        invalid: dict[str, str] = {}
        if isinstance(estimator, FederatedNMF) and estimator.on_party_error == SKIP:
            known = set() if saved is None else saved.about["data"].keys()
            before = [] if saved is None else exclusions_before(saved, options.resume or "")
            late = {entry.party for entry in before if entry.party not in known}
            data, invalid = read_valid_parties(options.data, options.dtype, late, options.missing)
        else:
            data = read_data(options.data, reading_of(options), options.dtype, options.missing)
        for name, reason in invalid.items():
            warn(f"Party {name!r} is left out of this run. {reason}")
        witness = None if options.report is None else Witness()
        return Session(options, estimator, data, invalid, saved, witness=witness)

    @property
    def folder(self) -> RunFolder | None:
        """The run folder, if there is one."""
        place = self.options.run_folder
        return None if place is None else RunFolder(resolve_path(place))

    def run(self) -> bool:
        """Fit, save and report. Return whether Ctrl-C was pressed."""
        began, options = time.perf_counter(), self.options
        earlier = self.saved.history[-1].seconds if self.saved is not None and self.saved.history else 0.0
        with (
            runtime.limit_threads(options.threads or runtime.available_threads()),
            graceful_interrupt(FINISHING) as pressed,
        ):
            W = self._fit()
            seconds = earlier + time.perf_counter() - began
            result = Result(self.options, self.estimator, self.data, self.fit, self.settings, self.training,
                            self.result, self.recorder.sent, seconds)  # fmt: skip
            self._save(W, result)
            report(result.as_dict(), result.lines(), options)
            if self.witness is not None and options.report is not None:
                write_fit_report(options.report, result, self.witness)
        return self.training.outcome is Outcome.INTERRUPTED or pressed.count > 0

    def _fit(self) -> np.ndarray | None:
        tables, W = {name: table.X for name, table in self.data.tables.items()}, None
        if isinstance(self.estimator, NMF):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)  # the summary says how the fit ended
                W = self.estimator.fit_transform(tables[ALONE], observer=self)
        else:
            is_seen = self.options.record or self.witness is not None
            with warnings.catch_warnings():
                if not self.options.quiet:  # the summary has the verdict
                    warnings.filterwarnings("ignore", ".*above the noise", InvisibleComponents)
                self.estimator.fit(tables, record=is_seen, observer=self)
        if self.data.feature_names is not None:
            self.estimator.feature_names_in_ = np.array(self.data.feature_names, dtype=object)
        return W

    @contextmanager
    def begin(self, fit: Fit, left_out: list[Exclusion]) -> Iterator[ResumePoint | None]:
        """Open the checkpoint and the run folder."""
        options, saved = self.options, self.saved
        self.fit, self.left_out = fit, left_out
        self.settings = self.estimator.run_settings(fit)  # type: ignore[arg-type]
        self._forecast(fit)
        data = {}
        if options.checkpoint is not None or saved is not None or options.record:
            data = {name: fingerprint(table.X, table.feature_names) for name, table in self.data.tables.items()}
        if saved is not None and options.resume is not None:
            data |= {name: there for name, there in saved.about["data"].items() if name in self.invalid}
            change = MAY_CHANGE - {"rounds"} if fit.is_private else MAY_CHANGE
            require_same_run(options.resume, saved, self.settings, data, {*change, "parties"}, output.option)
            left_out[:0] = exclusions_before(saved, options.resume)
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
            yield self.recorder.resume_point

    def _forecast(self, fit: Fit) -> None:
        """Say what to expect before anything is spent; the estimator warns of too little, and speaks if verbose."""
        if not isinstance(self.estimator, FederatedNMF) or not isinstance(fit, FederatedFit):
            return
        plan = self.estimator.privacy_plan(fit)
        if plan is None or self.options.quiet:
            return
        if plan.mechanism not in (None, "rounds") and self.options.rounds is not None and self.saved is None:
            warn(f"--rounds has no effect on mechanism {plan.mechanism!r}. Use --mechanism rounds for noisy rounds.")
        if str(plan) and not plan.is_too_little(fit.rank) and not self.estimator.verbose:
            typer.echo(f"Forecast: {plan}", err=True)

    def watch(self, done: Round, row: HistoryRow) -> None:
        """Record a round."""
        self.left_out += [Exclusion(row.iteration, name, reason) for name, reason in self.invalid.items()]
        self.recorder.watch(done, row)
        if self.witness is not None:
            self.witness.record(done, row)

    def end(self, training: Training, result: FitResult) -> None:
        """Record how the fit ended."""
        self.training, self.result = training, result

    @property
    def _ranks(self) -> list[int]:
        """Several ranks that follow from one release; empty for one rank."""
        return list(getattr(self.estimator, "components_by_rank_", ()))

    def _open_folder(self, folder: RunFolder, data: Mapping[str, Any]) -> None:
        """Open the run folder; traffic that the resumed run recorded there is kept."""
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
        """Write the model first, then weights and the run folder."""
        options, folder = self.options, self.folder
        for place in (options.output, None if folder is None else folder.path / run_folder.MODEL):
            if place is not None:
                self.estimator.save(resolve_path(place))
                for rank, path in rank_files(resolve_path(place), self._ranks).items():
                    self.estimator.at_rank(rank).save(path)
        if options.weights is not None and W is not None:
            sample_names = self.data.tables[ALONE].sample_names
            write_weights(options.weights, W, sample_names)
            warn_about_formulas(options.weights, sample_names)
        if folder is not None:
            folder.end(self.estimator.history_, result.sent, result.as_dict())
