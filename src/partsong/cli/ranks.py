"""`partsong fit` over ranks: options checked and agreed on, then `training.distributed`, then what rank 0 says."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any, TypeVar

import typer

from partsong import methods
from partsong.cli.choices import GAME, MODEL_ENDINGS, RANK_METHODS, WEIGHT_ENDINGS, WITH_SKETCHES
from partsong.cli.fit_report import ENDINGS, PLAYED, warn_of_empty_model
from partsong.cli.fit_settings import (
    FOR_PRIVACY,
    FOR_SKETCHES,
    NAMED,
    FitOptions,
    complete_game,
    refusing,
    require_game,
)
from partsong.cli.inputs import header_notes, warn_of, warn_of_identifiers, warn_of_unknown_columns, with_known_cells
from partsong.console import output
from partsong.console.output import (
    INTERRUPTED,
    TERMINATED,
    adopt,
    exit_code,
    option,
    put_failure,
    put_json,
    require_distinct,
    require_writable,
    visible,
    warn_of_formulas,
)
from partsong.console.tables import require_meaningful
from partsong.core.interfaces import Engine, Outcome
from partsong.core.parameters import read_settings
from partsong.core.runtime import using_threads
from partsong.data.conversion import float_type
from partsong.data.table import Table
from partsong.engines.collective import PATIENCE, Card, Communicator, Status, _first_failure, together
from partsong.errors import ParameterError, PartsongError
from partsong.estimators.validation import rank_of
from partsong.io.blocks import Source
from partsong.io.opening import Wanted, place_of
from partsong.io.party_folder import is_parts_folder
from partsong.io.weights import listing_path, shard_path
from partsong.io.write import as_json
from partsong.training import run_folder
from partsong.training.distributed import (
    DistributedFit,
    common_seed,
    first_difference,
    fit_over_ranks,
    open_engine,
    open_on_all_ranks,
    read_rows,
    require_enough,
    require_sketchable,
)
from partsong.training.distributed_settings import IGNORE, RANK_SOLVERS, DistributedSettings, traits_by_name
from partsong.training.run_folder import MODEL, RunFolder

Result = TypeVar("Result")

WRONG_USAGE = 2
SIGNALS = (INTERRUPTED, TERMINATED)


def with_one_voice(communicator: Communicator, as_json: bool, work: Callable[[], Result]) -> tuple[Result | None, int]:
    """work(), which fails at all ranks or at none, or the exit code of all; rank 0 says why, and all wait for that.

    Where a signal has ended one rank, the others know of an error there, and end as it does.
    """
    try:
        return work(), 0
    except KeyboardInterrupt as error:
        failed: BaseException = error
        code = exit_code()
    except typer.BadParameter as error:
        failed, code = error, WRONG_USAGE
    except (PartsongError, MemoryError, OSError) as error:
        failed, code = error, output.BAD_INPUT
    code, _ = agreed_code(communicator, code)
    is_signal = code in SIGNALS
    if communicator.rank == 0:
        _tell(KeyboardInterrupt() if is_signal else failed, code, as_json)
    _, are_all_here = agreed_code(communicator, code)
    if is_signal and are_all_here:
        part(communicator)
    return None, code


def agreed_code(communicator: Communicator, code: int) -> tuple[int, bool]:
    """The exit code for all ranks, and whether all are here to take it: that of a signal at any of them goes first.

    Sent: a card, by which a rank that has not heard of the end yet is told that this one has left.
    """
    with suppress(Exception):  # a rank that is gone: there is nobody to agree with
        shown = communicator.all_gather(Card(Status.LEFT, faults=code).written(), PATIENCE)
        if shown is not None:
            cards = [Card.read(one) for one in shown]
            if any(card.status is Status.FAILED for card in cards):
                _first_failure(communicator, cards, b"")
            code = max(code, *(card.faults for card in cards if card.status is Status.LEFT))
            if code in SIGNALS:
                adopt(code)
            return code, True
    return code, False


def _tell(error: BaseException, code: int, as_json: bool) -> None:
    if isinstance(error, typer.BadParameter):
        message = error.format_message()
        told = {"error": message, "type": "UsageError", "exit_code": code}
        typer.echo(visible(f"Error: {message}"), err=True)
    elif isinstance(error, KeyboardInterrupt):
        told = output.failure(error, code)
        typer.echo(output.NOTHING_SAVED, err=True)
    else:
        told = output.failure(error, code)
        output.tell(error)
    if as_json:
        put_failure(told)


def part(communicator: Communicator) -> None:
    """End MPI before an exit that is told by its code alone: a launcher would take it for a crash."""
    library = getattr(communicator, "library", None)
    if library is not None and not library.Is_finalized():
        library.Finalize()


def require_rank_outputs(options: FitOptions, rank: int, ranks: int) -> None:
    """Refuse, before anything is read, what this rank could not write afterwards."""
    if options.output is None and options.run_folder is None:
        raise typer.BadParameter("say where the model goes: -o model.safetensors.", param_hint="--output")
    if options.overwrite and options.run_folder is None:
        raise typer.BadParameter("needs --run-folder; other files are replaced anyway.", param_hint="--overwrite")
    if options.weights is not None:
        shard = shard_path(options.weights, rank, ranks)
        others = {"--weights": shard, "--weights (the list of shards)": listing_path(options.weights)}
        require_distinct({"DATA": options.data, "--output": options.output, **others})
        require_writable("--weights", shard, WEIGHT_ENDINGS)
    if rank > 0:
        return
    require_distinct({"DATA": options.data, "--output": options.output})
    if options.output is not None:
        require_writable("--output", options.output, MODEL_ENDINGS)
    if options.run_folder is not None:
        folder = place_of(options.run_folder)
        for name in run_folder.OWN:
            require_distinct({"--run-folder": folder / name, "DATA": options.data, "--weights": options.weights})
        run_folder.make_usable(folder, options.overwrite)


FOREIGN = {
    "solver", "align", "start", "rounds", "local_steps", "faulty", "record", "report", "checkpoint", "checkpoint_every",
    "resume", *FOR_PRIVACY,
}  # fmt: skip
OWN = {"as_json", "quiet"}
"""Options that ranks may be given differently."""


def require_fitting(options: FitOptions, given: Collection[str], ranks: int) -> None:
    """Refuse options that mean nothing over ranks, or over so many."""
    engine = f"--engine {options.engine}"
    if is_parts_folder(place_of(options.data)):
        raise typer.BadParameter(
            f"{options.data} is a folder of parts, and {engine} splits one file over the ranks. Fit the folder with "
            "--engine parallel, or name one file; in Python partsong.engines.mpi.Mpi takes shards of your own.",
            param_hint="--engine",
        )
    if options.method not in RANK_METHODS:
        raise typer.BadParameter(
            f"{options.method} is for folders of parts; {engine} has {', '.join(RANK_METHODS)}.", param_hint="--method"
        )
    if traits_by_name(options.method).asynchronous:
        _require_server_and_workers(options, given, ranks)
    foreign = sorted(FOREIGN.intersection(given))
    if foreign:
        flags = ", ".join(map(option, foreign))
        hint = " Choose by --method instead." if "solver" in foreign else ""
        raise typer.BadParameter(f"not with {engine}.{hint}", param_hint=flags)
    if options.init not in ("auto", "random"):
        raise typer.BadParameter("ranks start from random numbers: leave it out, or say random.", param_hint="--init")
    require_game(asdict(options), given, is_game=options.method == GAME, is_between_parties=True)
    idle = sorted(FOR_SKETCHES.intersection(given)) if options.method not in WITH_SKETCHES else []
    if idle:
        raise typer.BadParameter(
            f"only for --method {', '.join(WITH_SKETCHES)}.", param_hint=", ".join(map(option, idle))
        )


def _require_server_and_workers(options: FitOptions, given: Collection[str], ranks: int) -> None:
    method = options.method
    if options.engine != "mpi":
        raise typer.BadParameter(
            f"{method} needs --engine mpi: its server waits for any rank, and --engine {options.engine} only has "
            "exchanges of all. Start it with mpiexec, take syn-sd, or fit a folder of parts with --engine parallel.",
            param_hint="--method",
        )
    if ranks < 2:
        raise typer.BadParameter(
            f"{method} needs a server and at least one worker, but there is one rank. Start it with mpiexec -n 2 or "
            "more.",
            param_hint="--method",
        )
    if "sums" in given:
        raise typer.BadParameter(f"not with {method}: its server takes in one rank at a time.", param_hint="--sums")


def require_same_options(communicator: Communicator, options: FitOptions) -> None:
    """Refuse ranks that were started with other options, at all of them."""
    own = {entry.name: as_json(getattr(options, entry.name)) for entry in fields(options) if entry.name not in OWN}
    found = first_difference(communicator, own)
    if found is not None:
        name, rank, first, other = found
        raise typer.BadParameter(
            f"it is {first} at rank 0 and {other} at rank {rank}. Start every rank with the same command.",
            param_hint="DATA" if name == "data" else option(name),
        )


def settle_ranks(
    options: FitOptions, given: Collection[str], source: Source, seed: int, ranks: int
) -> DistributedSettings:
    """All settings, once the shape of the data is known."""
    rank = rank_of(options.n_components, source.shape)
    require_sketchable(rank, source.shape, options.method)
    known: dict[str, Any] = {entry.name: getattr(options, entry.name, None) for entry in fields(DistributedSettings)}
    further = method_options_of(options, given)
    known |= {
        "n_components": rank,
        "init": "random",
        "alpha_h": options.alpha_w if options.alpha_h is None else options.alpha_h,
        "sketch": options.sketch if options.method in WITH_SKETCHES else None,
        "sketch_ratio": options.sketch_ratio if options.method in WITH_SKETCHES else None,
        "seed": seed,
        "dtype": options.dtype or str(float_type(source.dtype)),
        "threads": options.threads or 1,
        "sums": None if traits_by_name(options.method).asynchronous else options.sums,
        "ranks": ranks,
    }
    known |= {OWN_OPTIONS[name]: further.pop(name) for name in OWN_OPTIONS.keys() & further.keys()}
    known["method_options"] = further
    complete_game(known, (), is_between_parties=True)
    return DistributedSettings(**known)


OWN_OPTIONS = {**NAMED, "sketch": "sketch", "sketch_ratio": "sketch_ratio"}
"""Options of methods that have an option of the command line -> its name."""


def method_options_of(options: FitOptions, given: Collection[str]) -> dict[str, Any]:
    """Further options of the method, as plain data; exact sums over ranks have none."""
    with refusing("method_options"):
        texts = read_settings(options.method_options, option("method_options"))
        if not texts:
            return {}
        if options.method in RANK_SOLVERS:
            raise ParameterError(f"{options.method} over ranks has no further options. Leave {', '.join(texts)} out.")
        method = methods.method(options.method)
        parameters = method.parameters_with(texts)
        read = {
            name: parameters[name].read(value) if isinstance(value, str) and name in parameters else value
            for name, value in texts.items()
        }
        method.parse(read)
        if twice := [name for name in read if OWN_OPTIONS.get(name) in given]:
            raise ParameterError(f"{' and '.join(twice)}: there is an option for it, which was given as well.")
    return {name: method.value(name, read) for name in read}


FINISHING_ALL = (
    "Interrupted: all ranks end after this iteration, and the model is saved. A second Ctrl-C gives up, and nothing is."
)
TROUBLE = "The fit diverged: check the data and the penalties, or take another method."


def run_over_ranks(options: FitOptions, given: Collection[str]) -> None:
    """Fit, save and say what came of it; exit codes are those of a fit in one process, the same at all ranks."""
    with open_engine(options.engine, options.sums) as (engine, communicator):
        work = partial(_run, options, given, engine, communicator)
        fit, code = with_one_voice(communicator, options.as_json, work)
        if fit is not None and communicator.rank == 0:
            report(fit, options)
        if fit is not None and fit.outcome is Outcome.INTERRUPTED:
            code, _ = agreed_code(communicator, exit_code())
            part(communicator)
    if code:
        raise typer.Exit(code)


def _run(options: FitOptions, given: Collection[str], engine: Engine, communicator: Communicator) -> DistributedFit:
    wanted, is_first = Wanted(options.label, options.transpose, options.key, options.header), communicator.rank == 0
    together(communicator, lambda: _require_usage(options, given, wanted, communicator.size))
    require_same_options(communicator, options)
    together(communicator, lambda: require_rank_outputs(options, communicator.rank, communicator.size))
    readable = replace(wanted, gaps=options.missing == IGNORE)
    source = open_on_all_ranks(options.data, communicator, readable)
    require_enough(str(source.path), source.shape, options.method, communicator.size)
    seed = common_seed(communicator, options.seed)
    settings = together(communicator, partial(settle_ranks, options, given, source, seed, communicator.size))

    def look(table: Table) -> None:
        warn_of(table, header_notes(table, wanted))
        warn_of_identifiers([with_known_cells(table, settings.missing)])

    folder = None if options.run_folder is None else RunFolder(place_of(options.run_folder))
    reading = {name: getattr(options, name) for name in ("data", "label", "transpose", "key", "header")}
    with using_threads(settings.threads):
        data = read_rows(source, settings, communicator, look)
        if data.known is not None and is_first:
            warn_of_unknown_columns(data.known, data.feature_names, is_random=True)
        del source  # a table that was read whole
        is_shown = not options.quiet and sys.stderr.isatty()
        words: dict[str, Any] = {"asked": reading, "verbose": int(is_shown), "note": FINISHING_ALL}
        fit = fit_over_ranks(data, settings, engine, communicator, folder=folder, **words)
        said = summary_of(fit, options)
        fit.save(communicator, model=options.output, weights=options.weights, folder=folder, summary=said)
        if options.weights is not None and fit.W is not None:
            warn_of_formulas(shard_path(options.weights, communicator.rank, communicator.size), data.sample_names)
        if is_first:
            warn_of_empty_model(fit.solver, fit.result)
        return fit


def _require_usage(options: FitOptions, given: Collection[str], wanted: Wanted, ranks: int) -> None:
    require_fitting(options, given, ranks)
    require_meaningful(options.data, wanted)


def summary_of(fit: DistributedFit, options: FitOptions) -> dict[str, Any]:
    """The JSON contract of a fit, with paths as they were given."""
    folder = options.run_folder
    kept = None if folder is None else RunFolder(place_of(folder))
    place = options.output or (None if folder is None else folder / MODEL)
    return {**fit.summary(place, options.weights, kept), "run_folder": folder}


def report(fit: DistributedFit, options: FitOptions) -> None:
    """One JSON object, or a few lines, or nothing; for rank 0 alone."""
    if fit.outcome is Outcome.DIVERGED:
        why = PLAYED if fit.settings.is_game else TROUBLE
        typer.echo(visible(f"{why} {fit.training.trouble}".rstrip()), err=True)
    said = summary_of(fit, options)
    if options.as_json:
        put_json(said)
    elif not options.quiet:
        lines = _lines(said, ENDINGS[fit.outcome])
        if fit.settings.is_game:
            lines.insert(2, ("game", fit.settings.in_words()))
        for name, value in lines:
            typer.echo(f"{name:<15}{value}")


def _lines(said: dict[str, Any], ending: str) -> list[tuple[str, str]]:
    rows, columns = said["shape"]
    how = ", ".join(filter(None, (said["engine"], said["sums"])))
    lines = [
        ("data", f"{rows} × {columns} over {said['ranks']} rank(s), {said['method']} ({how})"),
        ("components", f"{said['n_components']}"),
        ("relative error", f"{said['relative_error']:.6f}  (explains {100 * said['explained_variance']:.2f} %)"),
        ("iterations", f"{said['iterations']} in {said['seconds']:.2f} s: {ending}"),
        ("seed", f"{said['seed']}"),
        ("sent per rank", f"{said['bytes_up_per_rank']:,} bytes up, {said['bytes_down_per_rank']:,} down"),
    ]
    outputs = {"model": said["model"], "weights": said["weights"], "run folder": said["run_folder"]}
    return lines + [(name, str(path)) for name, path in outputs.items() if path is not None]
