"""`partsong fit` over MPI or torch ranks: messages come from rank 0, and all ranks exit with one code."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import typer

from partsong import methods
from partsong.cli.fit_options import RANK_METHODS, RANKS, FitOptions
from partsong.cli.fit_report import ENDINGS, common_lines, places, report
from partsong.cli.fit_session import (
    common_arguments,
    method_options_of,
    penalty_arguments,
    reading_of,
    require_fitting,
    require_outputs,
    usage_errors,
)
from partsong.cli.inputs import header_notes, warn_about, warn_about_identifiers, with_known_cells
from partsong.console import output
from partsong.console.output import (
    INTERRUPTED,
    TERMINATED,
    adopt,
    exit_code,
    option,
    put_failure,
    require_distinct,
    warn_about_formulas,
)
from partsong.console.tables import require_applicable_options
from partsong.core.interfaces import Engine, Outcome
from partsong.data.table import Table
from partsong.engines.collective import ERROR_TIMEOUT, Communicator, Status, StatusCard, _first_failure, run_on_all
from partsong.errors import PartsongError
from partsong.estimators.distributed import fit_on_ranks, settings_of
from partsong.io.opening import ReadOptions, resolve_path
from partsong.io.party_folder import is_parts_folder
from partsong.io.weights import listing_path, shard_path
from partsong.io.write import as_json
from partsong.training import run_folder
from partsong.training.distributed import DistributedFit, first_difference, open_engine

Made = TypeVar("Made")

WRONG_USAGE = 2
OWN = {"as_json", "quiet"}
"""Options that may differ between ranks."""
SIGNALS = (INTERRUPTED, TERMINATED)
FINISHING_ALL = (
    "Interrupted: all ranks stop after this iteration and save the model. Press Ctrl-C again to quit without saving."
)


def run_over_ranks(options: FitOptions, given: Collection[str]) -> None:
    """Fit, save and report. Exit codes are those of a fit in one process, and equal at all ranks."""
    with open_engine(options.engine, options.reduce) as (network, communicator):
        work = partial(_run, options, given, network, communicator)
        fit, code = run_on_all_ranks(communicator, options.as_json, work)
        if fit is not None and communicator.rank == 0:
            _report(fit, options)
        if fit is not None and fit.outcome is Outcome.INTERRUPTED:
            code, _ = agree_on_exit_code(communicator, exit_code())
            finalize_mpi(communicator)
    if code:
        raise typer.Exit(code)


def _run(options: FitOptions, given: Collection[str], network: Engine, communicator: Communicator) -> DistributedFit:
    wanted, rank, ranks = reading_of(options), communicator.rank, communicator.size
    asked, files = _arguments(options), dict[str, Path | None]()
    for name, path in (("model", options.output), ("weights", options.weights), ("run_folder", options.run_folder)):
        files[name] = None if path is None else resolve_path(path)

    def check() -> None:
        _require_usage(options, given, wanted)
        with usage_errors():
            settings_of(asked, options.engine, ranks)
        _require_outputs(options, rank, ranks)

    def look(table: Table) -> None:
        warn_about(table, header_notes(table, wanted))
        warn_about_identifiers([with_known_cells(table, options.missing)])

    run_on_all(communicator, check)
    require_same_options(communicator, options)
    fit = fit_on_ranks(
        network,
        communicator,
        options.data,
        asked,
        files,
        engine=options.engine,
        random_state=options.seed,
        overwrite=options.overwrite,
        reading=wanted,
        inspect=look,
        note=FINISHING_ALL,
    )
    if options.weights is not None and fit.W is not None:
        warn_about_formulas(shard_path(options.weights, rank, ranks), fit.data.sample_names)
    return fit


def _arguments(options: FitOptions) -> dict[str, Any]:
    """Return the arguments of `fit_distributed`."""
    named = options.method_options
    if options.method not in methods.RANK_SOLVERS:
        named = method_options_of(options, options.method)
    return {
        **common_arguments(options),
        **penalty_arguments(options),
        **{name: getattr(options, name) for name in ("method", "engine", "reduce", "max_iter")},
        "method_options": named,
        "n_threads": options.threads or 1,
    }


def _require_usage(options: FitOptions, given: Collection[str], wanted: ReadOptions) -> None:
    """Refuse options that do not apply over ranks."""
    if is_parts_folder(resolve_path(options.data)):
        raise typer.BadParameter(
            f"{options.data} is a folder of parts, and --engine {options.engine} splits one file over the ranks. Use "
            "--engine parallel or pass one file. In Python, fit_distributed accepts the rows of each rank.",
            param_hint="--engine",
        )
    if options.method not in RANK_METHODS:
        raise typer.BadParameter(
            f"{options.method} needs a folder of parts. --engine {options.engine} takes {', '.join(RANK_METHODS)}.",
            param_hint="--method",
        )
    require_fitting(options, given, RANKS)
    require_applicable_options(options.data, wanted)
    if options.init not in ("auto", "random"):
        raise typer.BadParameter(
            "ranks start from random factors. Remove this option or use random.", param_hint="--init"
        )


def _require_outputs(options: FitOptions, rank: int, ranks: int) -> None:
    """Refuse, before anything is read, files that this rank cannot write."""
    own = options if rank == 0 else replace(options, output=None, run_folder=None)
    if options.weights is not None:
        listing = listing_path(options.weights)
        require_distinct({"DATA": own.data, "--output": own.output, "--weights (the list of shards)": listing})
        own = replace(own, weights=shard_path(options.weights, rank, ranks))
    require_outputs(own)


def require_same_options(communicator: Communicator, options: FitOptions) -> None:
    """Refuse, at all ranks, options that differ between ranks."""
    own = {entry.name: as_json(getattr(options, entry.name)) for entry in fields(options) if entry.name not in OWN}
    found = first_difference(communicator, own)
    if found is not None:
        name, rank, first, other = found
        raise typer.BadParameter(
            f"{first} at rank 0, but {other} at rank {rank}. Start every rank with the same command.",
            param_hint="DATA" if name == "data" else option(name),
        )


def _report(fit: DistributedFit, options: FitOptions) -> None:
    """Print one JSON object, a few lines, or nothing; at rank 0 only."""
    folder = None if options.run_folder is None else run_folder.RunFolder(options.run_folder)
    summary = fit.summary(options.output, options.weights, folder)
    how = ", ".join(filter(None, (summary["engine"], summary["reduce"])))
    game = summary.get("game")
    lines = common_lines(
        summary, f" over {summary['ranks']} rank(s), {summary['method']} ({how})", ENDINGS[fit.outcome], game
    )
    sent = f"{summary['bytes_up_per_rank']:,} bytes up, {summary['bytes_down_per_rank']:,} down"
    report(summary, [*lines, ("sent per rank", sent), *places(summary)], options)


# ---- one exit code -----------------------------------------------------------------------------------------------


def run_on_all_ranks(communicator: Communicator, as_json: bool, work: Callable[[], Made]) -> tuple[Made | None, int]:
    """Return the result of work(), which fails at all ranks or at none, and the exit code for all ranks.

    Rank 0 prints the error while the others wait. If a signal ended one rank, all ranks exit with its code.
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
    code, _ = agree_on_exit_code(communicator, code)
    is_signal = code in SIGNALS
    if communicator.rank == 0:
        shown = KeyboardInterrupt() if is_signal else failed
        output.tell(shown)
        if as_json:
            put_failure(output.failure(shown, code))
    _, are_all_here = agree_on_exit_code(communicator, code)
    if is_signal and are_all_here:
        finalize_mpi(communicator)
    return None, code


def agree_on_exit_code(communicator: Communicator, code: int) -> tuple[int, bool]:
    """Agree on one exit code, and return whether all ranks were there; the code of a signal at any rank wins.

    Sent: a status card, which tells ranks that are still running that this one has left.
    """
    with suppress(Exception):  # another rank may be gone
        shown = communicator.all_gather(StatusCard(Status.LEFT, faults=code).to_bytes(), ERROR_TIMEOUT)
        if shown is not None:
            cards = [StatusCard.from_bytes(one) for one in shown]
            if any(card.status is Status.FAILED for card in cards):
                _first_failure(communicator, cards, b"")
            code = max(code, *(card.faults for card in cards if card.status is Status.LEFT))
            if code in SIGNALS:
                adopt(code)
            return code, True
    return code, False


def finalize_mpi(communicator: Communicator) -> None:
    """Finalize MPI before exiting with a non-zero code; otherwise the launcher reports a crash."""
    library = getattr(communicator, "library", None)
    if library is not None and not library.Is_finalized():
        library.Finalize()
