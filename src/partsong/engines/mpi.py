"""Ranks over MPI: `mpiexec -n 4 python -m mpi4py …`, with every rank holding its own shards.

Errors in a run are told to all ranks. Of one before or after it MPI does not know, and others would wait for that rank:
with `-m mpi4py` it ends them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong.core import Array, Checkpoint, Program, Reduction, Round, Schedule, Shard
from partsong.engines.communicator import Buffer
from partsong.engines.mpi_calls import TAG, have_arrived, in_pieces
from partsong.engines.parcels import memory_order
from partsong.engines.rank_round import IN_ORDER
from partsong.engines.ranks import run_ranks
from partsong.errors import MissingExtra


@dataclass(frozen=True, slots=True)
class Mpi:
    """One process per rank; agrees with Sequential bit for bit (`sums="in order"`) or to rounding (`"all-reduce"`).

    Every rank calls `run` with the same program, schedule and reduction and with its own shards. `comm` is mpi4py's
    communicator, COMM_WORLD if none is given. `record` keeps at rank 0 what all parties sent, elsewhere what the own
    ones did. What is sent: see `engines.ranks`; nothing is pickled.
    """

    comm: Any = None
    sums: str = IN_ORDER
    record: bool = False

    def run(
        self,
        program: Program,
        shards: Sequence[Shard],
        schedule: Schedule,
        *,
        reduction: Reduction,
        resume: Checkpoint | None = None,
    ) -> Iterator[Round]:
        """Rounds as they are done; checkpoints hold the states of this rank's own parties."""
        return run_ranks(self.communicator(), program, shards, schedule, reduction, resume, self.sums, self.record)

    def communicator(self) -> MpiCommunicator:
        """Also for work that comes before a run and may fail at one rank: see `engines.agreement.together`."""
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise MissingExtra(
                f'The MPI engine needs mpi4py and an MPI library ({error}): pip install "partsong[mpi]".'
            ) from error
        return MpiCommunicator(MPI.COMM_WORLD if self.comm is None else self.comm, MPI)


@dataclass(frozen=True, slots=True)
class MpiCommunicator:
    """Buffers over mpi4py's upper-case methods; its lower-case ones would pickle."""

    comm: Any
    library: Any
    device: str = ""

    @property
    def rank(self) -> int:
        """Which one this is."""
        return int(self.comm.Get_rank())

    @property
    def size(self) -> int:
        """How many there are."""
        return int(self.comm.Get_size())

    def all_gather(self, card: bytes, patience: float | None = None) -> list[bytes] | None:
        """The cards of all ranks, or None if they are not there after `patience` seconds, or MPI itself has ended."""
        if patience is not None and self.library.Is_finalized():
            return None
        if self.size == 1:
            return [card]
        shown = np.empty((self.size, len(card)), np.uint8)
        request = self.comm.Iallgather(np.frombuffer(card, np.uint8), shown)
        if not have_arrived(request, patience=patience):
            return None
        return [row.tobytes() for row in shown]

    def gather(self, parcel: Buffer, sizes: Sequence[int]) -> list[Buffer]:
        """At rank 0 the parcels of all ranks."""
        if self.rank > 0:
            for piece in in_pieces(parcel):
                have_arrived(self.comm.Isend(piece, dest=0, tag=TAG))
            return []
        parcels = [parcel, *(np.empty(size, np.uint8) for size in sizes[1:])]
        waiting = [
            self.comm.Irecv(piece, source=source, tag=TAG)
            for source in range(1, self.size)
            for piece in in_pieces(parcels[source])
        ]
        have_arrived(*waiting)
        return parcels

    def broadcast(self, parcel: Buffer | None, size: int) -> Buffer:
        """Rank 0's parcel at every rank."""
        buffer = np.empty(size, np.uint8) if parcel is None else parcel
        if self.size > 1:
            for piece in in_pieces(buffer):
                have_arrived(self.comm.Ibcast(piece, root=0))
        return buffer

    def sum(self, array: Array) -> Array:
        """Σ over the ranks by MPI_Allreduce; a tensor stays a tensor where it is."""
        if hasattr(array, "cpu"):
            total = self.sum(array.detach().cpu().numpy())
            return array.new_tensor(total) if total.flags.c_contiguous else array.new_tensor(total.T).T
        if memory_order(array) == "F":
            return self.sum(array.T).T
        total = np.array(array, order="C")
        if self.size > 1:
            for piece in in_pieces(total.reshape(-1)):
                self.comm.Allreduce(self.library.IN_PLACE, piece)
        return total

    def abort(self, message: str) -> None:
        """MPI_Abort: the launcher ends all ranks."""
        sys.stderr.write(f"{message}\n")
        sys.stderr.flush()
        self.comm.Abort(1)
