"""`partsong fit` over ranks: `fit_distributed`, with messages at rank 0 and one exit code for all ranks."""

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
from partsong.cli.inputs import header_notes, warn_of, warn_of_identifiers, with_known_cells
from partsong.console import output
from partsong.console.output import (
    INTERRUPTED,
    TERMINATED,
    adopt,
    exit_code,
    option,
    put_failure,
    require_distinct,
    warn_of_formulas,
)
from partsong.console.tables import require_meaningful
from partsong.core.interfaces import Engine, Outcome
from partsong.data.table import Table
from partsong.engines.collective import PATIENCE, Card, Communicator, Status, _first_failure, together
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
"""Options that ranks may be given differently."""
SIGNALS = (INTERRUPTED, TERMINATED)
FINISHING_ALL = (
    "Interrupted: all ranks end after this iteration, and the model is saved. A second Ctrl-C gives up, and nothing is."
)


def run_over_ranks(options: FitOptions, given: Collection[str]) -> None:
    """Fit, save and report; exit codes are those of a fit in one process, the same at all ranks."""
    with open_engine(options.engine, options.reduce) as (network, communicator):
        work = partial(_run, options, given, network, communicator)
        fit, code = with_one_voice(communicator, options.as_json, work)
        if fit is not None and communicator.rank == 0:
            _report(fit, options)
        if fit is not None and fit.outcome is Outcome.INTERRUPTED:
            code, _ = agreed_code(communicator, exit_code())
            part(communicator)
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
        warn_of(table, header_notes(table, wanted))
        warn_of_identifiers([with_known_cells(table, options.missing)])

    together(communicator, check)
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
        look=look,
        note=FINISHING_ALL,
    )
    if options.weights is not None and fit.W is not None:
        warn_of_formulas(shard_path(options.weights, rank, ranks), fit.data.sample_names)
    return fit


def _arguments(options: FitOptions) -> dict[str, Any]:
    """The arguments of `fit_distributed`."""
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
    """Refuse options that mean nothing over ranks."""
    if is_parts_folder(resolve_path(options.data)):
        raise typer.BadParameter(
            f"{options.data} is a folder of parts, and --engine {options.engine} splits one file over the ranks. Fit "
            "the folder with --engine parallel, or name one file; in Python fit_distributed takes rows of each rank.",
            param_hint="--engine",
        )
    if options.method not in RANK_METHODS:
        raise typer.BadParameter(
            f"{options.method} is for folders of parts; --engine {options.engine} has {', '.join(RANK_METHODS)}.",
            param_hint="--method",
        )
    require_fitting(options, given, RANKS)
    require_meaningful(options.data, wanted)
    if options.init not in ("auto", "random"):
        raise typer.BadParameter("ranks start from random numbers: leave it out, or use random.", param_hint="--init")


def _require_outputs(options: FitOptions, rank: int, ranks: int) -> None:
    """Refuse, before anything is read, files that this rank could not write afterwards."""
    own = options if rank == 0 else replace(options, output=None, run_folder=None)
    if options.weights is not None:
        listing = listing_path(options.weights)
        require_distinct({"DATA": own.data, "--output": own.output, "--weights (the list of shards)": listing})
        own = replace(own, weights=shard_path(options.weights, rank, ranks))
    require_outputs(own)


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


def _report(fit: DistributedFit, options: FitOptions) -> None:
    """One JSON object, or a few lines, or nothing; for rank 0 alone."""
    folder = None if options.run_folder is None else run_folder.RunFolder(options.run_folder)
    told = fit.summary(options.output, options.weights, folder)
    how = ", ".join(filter(None, (told["engine"], told["reduce"])))
    game = told.get("game")
    lines = common_lines(told, f" over {told['ranks']} rank(s), {told['method']} ({how})", ENDINGS[fit.outcome], game)
    sent = f"{told['bytes_up_per_rank']:,} bytes up, {told['bytes_down_per_rank']:,} down"
    report(told, [*lines, ("sent per rank", sent), *places(told)], options)


# ---- one exit code -----------------------------------------------------------------------------------------------


def with_one_voice(communicator: Communicator, as_json: bool, work: Callable[[], Made]) -> tuple[Made | None, int]:
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
        shown = KeyboardInterrupt() if is_signal else failed
        output.tell(shown)
        if as_json:
            put_failure(output.failure(shown, code))
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


def part(communicator: Communicator) -> None:
    """End MPI before an exit that is told by its code alone: a launcher would take it for a crash."""
    library = getattr(communicator, "library", None)
    if library is not None and not library.Is_finalized():
        library.Finalize()
