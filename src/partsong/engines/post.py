"""Letters between one server and its workers over MPI: a word, and a parcel of any size or none."""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from partsong.engines.communicator import Buffer
from partsong.engines.mpi import MpiCommunicator
from partsong.engines.mpi_calls import TAG, have_arrived, in_pieces

LETTERS = TAG + 1
"""The tag of letters."""

HEADER = struct.Struct("<BQ")


class Word(enum.IntEnum):
    """What a letter is about: the first four come from workers, the last two from the server."""

    WORK = 0
    REFUSED = 1
    FAILED = 2
    LEFT = 3
    GO_ON = 4
    END = 5


@dataclass(frozen=True, slots=True)
class Letter:
    """Who says what."""

    sender: int
    word: Word
    parcel: Buffer


class Post(Protocol):
    """Letters from one rank to another, in the order in which they were sent."""

    def send(self, to: int, word: Word, parcel: Buffer = b"") -> None:
        """Returns once the parcel may be changed."""

    def receive(self, patience: float | None = None) -> Letter | None:
        """The next letter from anybody, or None if there is none after `patience` seconds."""


@dataclass(frozen=True, slots=True)
class MpiPost:
    """Upper-case methods of mpi4py; its lower-case ones would pickle."""

    communicator: MpiCommunicator

    def send(self, to: int, word: Word, parcel: Buffer = b"") -> None:
        """A header of nine bytes, then the parcel in pieces; all at once, so that no interrupt leaves half a letter."""
        comm = self.communicator.comm
        header = np.frombuffer(HEADER.pack(word, len(parcel)), np.uint8)
        have_arrived(*(comm.Isend(piece, dest=to, tag=LETTERS) for piece in (header, *in_pieces(parcel))))

    def receive(self, patience: float | None = None) -> Letter | None:
        """From whoever has written."""
        comm, library = self.communicator.comm, self.communicator.library
        probe = _Probe(comm, library.ANY_SOURCE, library.Status())
        if not have_arrived(probe, patience=patience):
            return None
        sender, header = probe.status.Get_source(), np.empty(HEADER.size, np.uint8)
        have_arrived(comm.Irecv(header, source=sender, tag=LETTERS))
        word, size = HEADER.unpack(header.tobytes())
        parcel = np.empty(size, np.uint8)
        have_arrived(*(comm.Irecv(piece, source=sender, tag=LETTERS) for piece in in_pieces(parcel)))
        return Letter(sender, Word(word), parcel)


@dataclass(frozen=True, slots=True)
class _Probe:
    """Whether a letter has come, asked as one asks a request."""

    comm: Any
    source: int
    status: Any

    def Test(self) -> bool:
        return bool(self.comm.Iprobe(source=self.source, tag=LETTERS, status=self.status))
