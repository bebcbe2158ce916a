"""The processes that mpiexec or torchrun has started: how they meet, speak with one voice, and part."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import typer

from partsong.cli import guard
from partsong.cli.outputs import put_failure, visible
from partsong.cli.termination import INTERRUPTED, TERMINATED, adopt, exit_code
from partsong.core import Engine
from partsong.engines.agreement import PATIENCE, Card, Ended, Status, _first_failure
from partsong.engines.communicator import Communicator
from partsong.engines.mpi import Mpi
from partsong.engines.torch_distributed import TorchDistributed
from partsong.errors import CompositionError, MissingExtra, PartsongError

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
        failed, code = error, guard.BAD_INPUT
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
        told = guard.failure(error, code)
        typer.echo(guard.NOTHING_SAVED, err=True)
    else:
        told = guard.failure(error, code)
        guard.tell(error)
    if as_json:
        put_failure(told)


def part(communicator: Communicator) -> None:
    """End MPI before an exit that is told by its code alone: a launcher would take it for a crash."""
    library = getattr(communicator, "library", None)
    if library is not None and not library.Is_finalized():
        library.Finalize()


@contextmanager
def heard() -> Iterator[None]:
    """Within this block the end of a run that another rank has told of is its error."""
    try:
        yield
    except Ended as end:
        raise (end.error or KeyboardInterrupt()) from None
