"""Ranks over torch.distributed: gloo on CPUs, NCCL on GPUs; tensors stay on their device."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

import numpy as np

from partsong.core.codec import Buffer, memory_order
from partsong.core.interfaces import Array, Checkpoint, Program, Reduction, Schedule, Shard
from partsong.engines.ranks import IN_ORDER, run_ranks
from partsong.engines.rounds import Rounds
from partsong.errors import CompositionError, MissingExtra, PartyError

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class TorchDistributed:
    """One process per rank, as `torchrun` starts them; agrees with Sequential bit for bit (all-reduce: to rounding).

    Create the process group first (`torch.distributed.init_process_group`). `group` is a process group (None: the
    default group). `device` is where this rank computes; empty means the host under gloo and the current GPU under
    NCCL. Every rank calls `run` with the same program, schedule and reduction and with its own shards. `reduce` and
    `record` are as in `Mpi`. What is sent: see `engines.ranks`.
    """

    group: Any = None
    device: str = ""
    reduce: str = IN_ORDER
    record: bool = False

    def run(
        self,
        program: Program,
        shards: Sequence[Shard],
        schedule: Schedule,
        *,
        reduction: Reduction,
        resume: Checkpoint | None = None,
    ) -> Rounds:
        return run_ranks(self.communicator(), program, shards, schedule, reduction, resume, self.reduce, self.record)

    def communicator(self) -> TorchCommunicator:
        """Return the communicator, also for work before a run that may fail at one rank (`collective.run_on_all`)."""
        try:
            torch: Any = import_module("torch")
        except ImportError as error:
            raise MissingExtra('This engine needs PyTorch: pip install "partsong[torch]".') from error
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            raise CompositionError(
                "There is no process group. Start the ranks with torchrun, and call "
                "torch.distributed.init_process_group before the run."
            )
        is_nccl = torch.distributed.get_backend(self.group) == "nccl"
        place = f"cuda:{torch.cuda.current_device()}" if is_nccl and not self.device else self.device
        return TorchCommunicator(torch, self.group, place, place if is_nccl else "cpu")


def is_launched() -> bool:
    """Whether torchrun started this process."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


@contextmanager
def process_group() -> Iterator[None]:
    """Provide a process group in this block: the existing one, that of torchrun, or one of a single rank.

    A torchrun group stays until the process ends, because its ranks cannot meet a second time over the same store.
    """
    try:
        import torch.distributed as distributed
    except ImportError as error:
        raise MissingExtra('This engine needs PyTorch: pip install "partsong[torch]".') from error
    if not distributed.is_available():
        raise MissingExtra("This PyTorch was built without torch.distributed. Install another build, or use MPI.")
    if distributed.is_initialized():
        yield
        return
    is_lone = "WORLD_SIZE" not in os.environ
    try:
        if is_lone:
            distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        else:
            distributed.init_process_group("gloo")
            atexit.register(_end_group, distributed)
    except (RuntimeError, ValueError) as error:
        raise CompositionError(f"The ranks cannot connect: {error}. Start all of them with torchrun.") from error
    try:
        yield
    finally:
        if is_lone:
            _end_group(distributed)


def _end_group(distributed: Any) -> None:
    with suppress(Exception):  # other ranks may be gone; their error matters more
        distributed.destroy_process_group()


@dataclass(frozen=True, slots=True)
class TorchCommunicator:
    """Communicator with buffers as byte tensors; `carrier` is the device that the backend can send from."""

    torch: Any
    group: Any
    device: str
    carrier: str

    @property
    def rank(self) -> int:
        return int(self.torch.distributed.get_rank(self.group))

    @property
    def size(self) -> int:
        return int(self.torch.distributed.get_world_size(self.group))

    def all_gather(self, card: bytes, timeout: float | None = None) -> list[bytes] | None:
        if self.size == 1:
            return [card]
        own = self._tensor(card)
        shown = [self.torch.empty_like(own) for _ in range(self.size)]
        work = self._exchange(lambda: self.torch.distributed.all_gather(shown, own, group=self.group, async_op=True))
        until = time.monotonic() + (timeout or 0)
        while timeout is not None and not work.is_completed():
            if time.monotonic() > until:
                return None
            time.sleep(0.002)
        self._exchange(work.wait)
        return [one.cpu().numpy().tobytes() for one in shown]

    def gather(self, parcel: Buffer, sizes: Sequence[int]) -> list[Buffer]:
        distributed = self.torch.distributed
        if self.rank > 0:
            tensor = self._tensor(parcel)
            self._exchange(lambda: distributed.send(tensor, self._global(0), group=self.group))
            return []
        arrived = [self._empty(size) for size in sizes]
        for source in range(1, self.size):
            self._exchange(partial(distributed.recv, arrived[source], self._global(source), group=self.group))
        return [parcel, *(tensor.cpu().numpy() for tensor in arrived[1:])]

    def broadcast(self, parcel: Buffer | None, size: int) -> Buffer:
        if self.size == 1:
            return parcel
        tensor = self._empty(size) if parcel is None else self._tensor(parcel)
        self._exchange(lambda: self.torch.distributed.broadcast(tensor, self._global(0), group=self.group))
        return tensor.cpu().numpy() if parcel is None else parcel

    def sum(self, array: Array) -> Array:
        """Sum over the ranks by all_reduce: a tensor on its device if the backend can, an array on the carrier."""
        is_turned = memory_order(array) == "F"
        turned = array.T if is_turned else array
        if isinstance(array, np.ndarray):
            total = self._all_reduced(self.torch.from_numpy(np.array(turned, order="C"))).numpy()
        else:
            total = self._all_reduced(turned.detach().contiguous().clone())
        return total.T if is_turned else total

    def _all_reduced(self, tensor: Any) -> Any:
        """Sum in place if the tensor is on the carrier."""
        carried = tensor.to(self.carrier)
        if self.size > 1:
            self._exchange(lambda: self.torch.distributed.all_reduce(carried, group=self.group))
        return carried.to(tensor.device)

    def abort(self, message: str) -> None:
        """End this process at once, and torchrun ends the others; an orderly exit would wait for them."""
        sys.stderr.write(f"{message}\n")
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(1)

    def _tensor(self, parcel: Buffer) -> Any:
        # bytes are read-only, and torch warns of tensors over read-only memory.
        data = np.frombuffer(bytearray(parcel), np.uint8) if isinstance(parcel, bytes) else parcel
        return self.torch.from_numpy(data).to(self.carrier)

    def _empty(self, size: int) -> Any:
        return self.torch.empty(size, dtype=self.torch.uint8, device=self.carrier)

    def _global(self, rank: int) -> int:
        return rank if self.group is None else int(self.torch.distributed.get_global_rank(self.group, rank))

    def _exchange(self, exchange: Callable[[], Result]) -> Result:
        try:
            return exchange()
        except RuntimeError as error:
            raise PartyError(
                f"Rank {self.rank} lost the connection to another rank, which has ended or is unreachable: {error}"
            ) from error
