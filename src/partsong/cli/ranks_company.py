"""The processes that mpiexec or torchrun has started: how they meet, speak with one voice, and part."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import typer

from partsong.cli import guard
from partsong.cli.outputs import put_failure, visible
from partsong.cli.termination import exit_code
from partsong.core import Engine
from partsong.engines.agreement import PATIENCE, Card, Ended
from partsong.engines.communicator import Communicator
from partsong.engines.mpi import Mpi
from partsong.engines.torch_distributed import TorchDistributed
from partsong.errors import CompositionError, MissingExtra, PartsongError

Result = TypeVar("Result")

WRONG_USAGE = 2
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
    """work(), which fails at all ranks or at none, or the exit code; rank 0 says why, and all wait until it has."""
    try:
        return work(), 0
    except KeyboardInterrupt as error:
        if communicator.rank == 0:
            _say(guard.NOTHING_SAVED, guard.failure(error, exit_code()) if as_json else None)
        return None, exit_code()
    except typer.BadParameter as error:
        if communicator.rank == 0:
            told = {"error": error.format_message(), "type": "UsageError", "exit_code": WRONG_USAGE}
            _say(f"Error: {error.format_message()}", told if as_json else None)
        code = WRONG_USAGE
    except (PartsongError, MemoryError, OSError) as error:
        if communicator.rank == 0:
            guard.tell(error)
            if as_json:
                put_failure(guard.failure(error, guard.BAD_INPUT))
        code = guard.BAD_INPUT
    with suppress(Exception):  # a rank that is gone: there is nobody to wait for
        communicator.all_gather(Card().written(), PATIENCE)
    return None, code


def part(communicator: Communicator) -> None:
    """End MPI before an exit that is told by its code alone: a launcher would take it for a crash."""
    library = getattr(communicator, "library", None)
    if library is not None and not library.Is_finalized():
        library.Finalize()


def _say(message: str, told: dict[str, Any] | None) -> None:
    typer.echo(visible(message), err=True)
    if told is not None:
        put_failure(told)


@contextmanager
def heard() -> Iterator[None]:
    """Within this block the end of a run that another rank has told of is its error."""
    try:
        yield
    except Ended as end:
        raise (end.error or KeyboardInterrupt()) from None
