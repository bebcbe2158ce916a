"""Ranks over MPI: `mpiexec -n 4 python -m mpi4py …`, with every rank holding its own shards.

Errors during a run are sent to all ranks. MPI does not notice an error before or after the run, and the other ranks
would wait. `-m mpi4py` makes such an error abort all ranks.
"""

from __future__ import annotations

import enum
import os
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from partsong.core.codec import Buffer, memory_order
from partsong.core.interfaces import Array, Checkpoint, Program, Reduction, Schedule, Shard
from partsong.engines.ranks import IN_ORDER, run_ranks
from partsong.engines.rounds import Rounds
from partsong.errors import CompositionError, MissingExtra

COLLECTIVE_TAG = 20017
"""MPI tag of partsong's messages between two ranks. Use a duplicate communicator if you receive with ANY_TAG."""

MAX_CALL = 1 << 30
"""Bytes or numbers per call: counts in MPI are 32-bit integers."""

SPIN_SECONDS, POLL_SECONDS = 3e-4, 3e-5
"""Seconds of busy waiting for other ranks, and the polling interval after that."""


_unfinished: list[Any] = []
"""Requests that are no longer waited for; MPI may still write to their buffers, so they are kept alive."""


def wait_for(*requests: Any, timeout: float | None = None) -> bool:
    """Wait for requests: busy waiting at first, then polling, so that long waits do not occupy the core.

    Return False after `timeout` seconds. The requests continue in the background, then and after Ctrl-C.
    """
    began = time.monotonic()
    try:
        for request in requests:
            while not request.Test():
                waited = time.monotonic() - began
                if timeout is not None and waited > timeout:
                    _unfinished.extend(requests)
                    return False
                if waited > SPIN_SECONDS:
                    time.sleep(POLL_SECONDS)
    except BaseException:
        _unfinished.extend(requests)
        raise
    return True


def split_buffer(buffer: Buffer) -> Iterator[Any]:
    """Yield views of a one-dimensional buffer that are short enough for one MPI call."""
    flat = np.frombuffer(buffer, np.uint8) if isinstance(buffer, bytes) else buffer
    for start in range(0, len(flat), MAX_CALL):
        yield flat[start : start + MAX_CALL]


@dataclass(frozen=True, slots=True)
class Mpi:
    """One process per rank; agrees with Sequential bit for bit (`reduce="in order"`) or to rounding (`"all-reduce"`).

    Every rank calls `run` with the same program, schedule and reduction and with its own shards. `comm` is an mpi4py
    communicator (None: COMM_WORLD). `record` keeps what all parties sent at rank 0, and what the own parties sent at
    other ranks. What is sent: see `engines.ranks`; nothing is pickled.
    """

    comm: Any = None
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

    def communicator(self) -> MpiCommunicator:
        """Return the communicator, also for work before a run that may fail at one rank (`collective.run_on_all`)."""
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise MissingExtra(
                f'The MPI engine needs mpi4py and an MPI library ({error}). Install them: pip install "partsong[mpi]".'
            ) from error
        return MpiCommunicator(MPI.COMM_WORLD if self.comm is None else self.comm, MPI)


SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""Environment variables in which MPI launchers pass the number of ranks."""


def launched_ranks() -> int | None:
    """Return the number of ranks that mpiexec started; None if it did not start this process."""
    return next((int(os.environ[name]) for name in SIZE_VARIABLES if os.environ.get(name, "").isdigit()), None)


def require_launched_together(communicator: MpiCommunicator) -> None:
    """Raise CompositionError if mpiexec started several ranks but each is alone in its own MPI world."""
    launched = launched_ranks() or 1
    if communicator.size != launched and communicator.size == 1:
        raise CompositionError(
            f"mpiexec started {launched} ranks, but each is alone: this mpiexec belongs to another MPI than the one "
            "that mpi4py was built with. Use the mpiexec of that MPI; pip install 'partsong[mpi]' installs one."
        )


@dataclass(frozen=True, slots=True)
class MpiCommunicator:
    """Communicator over mpi4py's upper-case (buffer) methods; the lower-case ones would pickle."""

    comm: Any
    library: Any
    device: str = ""

    @property
    def rank(self) -> int:
        return int(self.comm.Get_rank())

    @property
    def size(self) -> int:
        return int(self.comm.Get_size())

    def all_gather(self, card: bytes, timeout: float | None = None) -> list[bytes] | None:
        # A run that is left at the exit of the interpreter may end after MPI.
        if timeout is not None and self.library.Is_finalized():
            return None
        if self.size == 1:
            return [card]
        shown = np.empty((self.size, len(card)), np.uint8)
        request = self.comm.Iallgather(np.frombuffer(card, np.uint8), shown)
        if not wait_for(request, timeout=timeout):
            return None
        return [row.tobytes() for row in shown]

    def gather(self, parcel: Buffer, sizes: Sequence[int]) -> list[Buffer]:
        if self.rank > 0:
            for piece in split_buffer(parcel):
                wait_for(self.comm.Isend(piece, dest=0, tag=COLLECTIVE_TAG))
            return []
        parcels = [parcel, *(np.empty(size, np.uint8) for size in sizes[1:])]
        # All receives are posted at once, so that ranks may send in any order.
        waiting = [
            self.comm.Irecv(piece, source=source, tag=COLLECTIVE_TAG)
            for source in range(1, self.size)
            for piece in split_buffer(parcels[source])
        ]
        wait_for(*waiting)
        return parcels

    def broadcast(self, parcel: Buffer | None, size: int) -> Buffer:
        buffer = np.empty(size, np.uint8) if parcel is None else parcel
        if self.size > 1:
            for piece in split_buffer(buffer):
                wait_for(self.comm.Ibcast(piece, root=0))
        return buffer

    def sum(self, array: Array) -> Array:
        """Sum over the ranks by MPI_Allreduce; a tensor stays a tensor on its device."""
        if hasattr(array, "cpu"):
            total = self.sum(array.detach().cpu().numpy())
            return array.new_tensor(total) if total.flags.c_contiguous else array.new_tensor(total.T).T
        if memory_order(array) == "F":
            return self.sum(array.T).T
        total = np.array(array, order="C")
        if self.size > 1:
            for piece in split_buffer(total.reshape(-1)):
                self.comm.Allreduce(self.library.IN_PLACE, piece)
        return total

    def abort(self, message: str) -> None:
        sys.stderr.write(f"{message}\n")
        sys.stderr.flush()
        self.comm.Abort(1)


PACKET_TAG = COLLECTIVE_TAG + 1
"""MPI tag of packets."""

HEADER = struct.Struct("<BQ")


class Tag(enum.IntEnum):
    """The kind of a packet: workers send the first four, the server the last two."""

    WORK = 0
    REFUSED = 1
    FAILED = 2
    LEFT = 3
    GO_ON = 4
    END = 5


@dataclass(frozen=True, slots=True)
class Packet:
    """A received packet: sender, kind and content."""

    sender: int
    tag: Tag
    parcel: Buffer


class PacketChannel(Protocol):
    """Point-to-point packets between ranks, in the order in which they were sent."""

    def send(self, to: int, tag: Tag, parcel: Buffer = b"") -> None:
        """Send a packet; return once the parcel may be changed."""

    def receive(self, timeout: float | None = None) -> Packet | None:
        """Return the next packet from any rank; None after `timeout` seconds."""


@dataclass(frozen=True, slots=True)
class MpiChannel:
    """Packets over mpi4py's upper-case (buffer) methods; the lower-case ones would pickle."""

    communicator: MpiCommunicator

    def send(self, to: int, tag: Tag, parcel: Buffer = b"") -> None:
        """Send a 9-byte header, then the parcel in pieces; all are posted at once, so no interrupt splits a packet."""
        comm = self.communicator.comm
        header = np.frombuffer(HEADER.pack(tag, len(parcel)), np.uint8)
        wait_for(*(comm.Isend(piece, dest=to, tag=PACKET_TAG) for piece in (header, *split_buffer(parcel))))

    def receive(self, timeout: float | None = None) -> Packet | None:
        comm, library = self.communicator.comm, self.communicator.library
        probe = _Probe(comm, library.ANY_SOURCE, library.Status())
        if not wait_for(probe, timeout=timeout):
            return None
        sender, header = probe.status.Get_source(), np.empty(HEADER.size, np.uint8)
        # From this sender only: MPI keeps the order of messages between two ranks, not across ranks.
        wait_for(comm.Irecv(header, source=sender, tag=PACKET_TAG))
        tag, size = HEADER.unpack(header.tobytes())
        parcel = np.empty(size, np.uint8)
        wait_for(*(comm.Irecv(piece, source=sender, tag=PACKET_TAG) for piece in split_buffer(parcel)))
        return Packet(sender, Tag(tag), parcel)


@dataclass(frozen=True, slots=True)
class _Probe:
    """A probe for a packet with the interface of a request."""

    comm: Any
    source: int
    status: Any

    def Test(self) -> bool:
        return bool(self.comm.Iprobe(source=self.source, tag=PACKET_TAG, status=self.status))
