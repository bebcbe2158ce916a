"""Options to settings for a fit over ranks: what all of them must have been given, and what each makes of it."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from partsong.cli import output
from partsong.cli.choices import GAME, MODEL_ENDINGS, RANK_METHODS, WEIGHT_ENDINGS, WITH_SKETCHES
from partsong.cli.fit_settings import FOR_PRIVACY, FOR_SKETCHES, FitOptions, complete_game, require_game
from partsong.cli.output import (
    INTERRUPTED,
    TERMINATED,
    adopt,
    exit_code,
    option,
    put_failure,
    require_distinct,
    require_writable,
    visible,
)
from partsong.core.interfaces import Engine
from partsong.core.streams import fresh_seed
from partsong.data.conversion import float_type
from partsong.engines.collective import PATIENCE, Card, Communicator, Status, _first_failure, heard, share
from partsong.engines.mpi import Mpi
from partsong.engines.torch_distributed import TorchDistributed
from partsong.errors import CompositionError, FileError, MissingExtra, ParameterError, PartsongError
from partsong.io.opening import place_of
from partsong.io.party_folder import is_parts_folder
from partsong.io.write import as_json
from partsong.training import run_folder
from partsong.training.settings import RankSettings, traits_by_name

if TYPE_CHECKING:
    from partsong.io.blocks import Source


# ---- ranks company ----------------------------------------------------------------------------------------------
#
# The processes that mpiexec or torchrun has started: how they meet, speak with one voice, and part.

Result = TypeVar("Result")

WRONG_USAGE = 2
SIGNALS = (INTERRUPTED, TERMINATED)
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""Where launchers of MPI say how many ranks they have started."""


@contextmanager
def company(engine: str, sums: str) -> Iterator[tuple[Engine, Communicator]]:
    """The engine and the way to all ranks; a process that nobody has started beside others is alone."""
    adding = sums.replace("in-order", "in order")
    if engine == "mpi":
        ranks = Mpi(sums=adding)
        communicator = ranks.communicator()
        _require_one_world(communicator)
        yield ranks, communicator
        return
    distributed = _process_group()
    try:
        others = TorchDistributed(sums=adding)
        yield others, others.communicator()
    finally:
        with suppress(Exception):  # of ranks that are gone: there is an error that matters more
            distributed.destroy_process_group()


def _require_one_world(communicator: Communicator) -> None:
    started = next((int(os.environ[name]) for name in SIZES if os.environ.get(name, "").isdigit()), 1)
    if communicator.size != started and communicator.size == 1:
        raise CompositionError(
            f"mpiexec has started {started} ranks, but each is alone: it belongs to another MPI than the one that "
            "mpi4py was built with. Take the mpiexec of that MPI; one comes with pip install 'partsong[mpi]'."
        )


def _process_group() -> Any:
    try:
        import torch.distributed as distributed
    except ImportError as error:
        raise MissingExtra('This engine needs PyTorch: pip install "partsong[torch]".') from error
    if not distributed.is_available():
        raise MissingExtra("This PyTorch was built without torch.distributed. Install another build, or use MPI.")
    try:
        if "WORLD_SIZE" in os.environ:
            distributed.init_process_group("gloo")
        else:
            distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    except (RuntimeError, ValueError) as error:
        raise CompositionError(f"The ranks cannot meet: {error}. Start all of them with torchrun.") from error
    return distributed


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


# ---- ranks files ------------------------------------------------------------------------------------------------
#
# Where a fit over ranks writes, and that it can.


def shard_path(weights: Path, rank: int, ranks: int) -> Path:
    """W.rank0of4.npy for W.npy."""
    ending = _ending(weights)
    return weights.with_name(f"{weights.name[: len(weights.name) - len(ending)]}.rank{rank}of{ranks}{ending}")


def listing_path(weights: Path) -> Path:
    """W.shards.json for W.npy."""
    return weights.with_name(f"{weights.name[: len(weights.name) - len(_ending(weights))]}.shards.json")


def _ending(path: Path) -> str:
    found = [ending for ending in WEIGHT_ENDINGS if path.name.lower().endswith(ending)]
    return path.name[len(path.name) - len(max(found, key=len)) :] if found else ""


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


# ---- ranks settings ---------------------------------------------------------------------------------------------

FOREIGN = {
    "solver", "align", "start", "rounds", "local_steps", "faulty", "record", "report", "checkpoint", "checkpoint_every",
    "resume", *FOR_PRIVACY,
}  # fmt: skip
MARKED_BYTES = 1 << 16
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
    with heard():
        all_given = [json.loads(text) for text in share(communicator, json.dumps(own))]
    for name in own:
        for rank, other in enumerate(all_given):
            if other.get(name) != all_given[0][name]:
                raise typer.BadParameter(
                    f"it is {all_given[0][name]} at rank 0 and {other.get(name)} at rank {rank}. Start every rank with "
                    "the same command.",
                    param_hint="DATA" if name == "data" else option(name),
                )


def require_same_file(communicator: Communicator, source: Source) -> None:
    """Refuse files that differ from rank to rank in shape, number type, size, or what they begin and end with."""
    with heard():
        seen = share(communicator, f"{source.shape[0]} × {source.shape[1]}, {source.dtype}, {_mark_of(source)}")
    for rank, other in enumerate(seen):
        if other != seen[0]:
            raise FileError(
                f"{source.path}: holds {seen[0]} at rank 0 and {other} at rank {rank}. Give all ranks the same file."
            )


def _mark_of(source: Source) -> str:
    """The size of a file and a checksum of its first and last bytes: enough to tell other data, and quickly read."""
    with source.path.open("rb") as file:
        checksum = zlib.crc32(file.read(MARKED_BYTES))
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MARKED_BYTES))
        return f"{size} bytes, checksum {zlib.crc32(file.read(MARKED_BYTES), checksum):08x}"


def require_enough(source: Source, method: str, ranks: int) -> None:
    """Each rank that works needs a row, and where both factors are distributed a column."""
    traits = traits_by_name(method)
    nouns, servers = ("rows", "columns") if traits.needs_columns else ("rows",), int(traits.asynchronous)
    over = f"{ranks - servers} workers" if servers else f"{ranks} ranks"
    for noun, size in zip(nouns, source.shape, strict=False):
        if size < ranks - servers:
            raise ParameterError(
                f"{source.path}: {size} {noun} cannot be split over {over}: each needs at least one. "
                f"Start at most {size + servers} ranks{', of which the first is the server' if servers else ''}."
            )


def common_seed(communicator: Communicator, options: FitOptions) -> int:
    """The seed given, or else one that rank 0 has drawn."""
    with heard():
        seeds = share(communicator, str(fresh_seed() >> 32 if options.seed is None else options.seed))
    return int(seeds[0])


def settle_ranks(options: FitOptions, source: Source, seed: int, ranks: int) -> RankSettings:
    """All settings; sketches need at least one row and one column for each component."""
    from partsong.estimators.validation import rank_of

    is_sketched, rank = traits_by_name(options.method).needs_columns, rank_of(options.n_components, source.shape)
    if is_sketched and rank > min(source.shape):
        raise ParameterError(
            f"n_components={rank}: a sketch of {source.shape[0]} rows or {source.shape[1]} columns has no more columns "
            f"than that, and needs one for each component. Choose at most {min(source.shape)}, or another method."
        )
    known: dict[str, Any] = {entry.name: getattr(options, entry.name, None) for entry in fields(RankSettings)}
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
    complete_game(known, (), is_between_parties=True)
    return RankSettings(**known)


def rank_settings_as_json(settings: RankSettings) -> Mapping[str, Any]:
    """What a model says of them."""
    return {
        name: value
        for name, value in asdict(settings).items()
        if name not in ("threads", "time_budget", "seed") and value is not None
    }
