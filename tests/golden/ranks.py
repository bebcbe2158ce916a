"""One rank of a job that runs programs of `cases`, each with its own parties: ranks.py FOLDER, under mpiexec."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cases import IN_MASKS, N_PARTIES, RANKED, run

from partsong.errors import CompositionError

N_RANKS = 2


def work(make, rank: int, folder: str) -> None:
    """Every program, summed in order, and by all-reduce where that is enough; rank 0 writes."""
    each = N_PARTIES // N_RANKS
    own = slice(each * rank, each * (rank + 1))
    names = (*RANKED, *(f"{name}, masked" for name in IN_MASKS if name in RANKED))
    found = {"in order": {name: run(name, make(), own).tolist() for name in names}, "all-reduce": {}}
    for name in RANKED:
        with contextlib.suppress(CompositionError):  # it reads single uploads, and an all-reduce has none
            found["all-reduce"][name] = run(name, make(reduce="all-reduce"), own).tolist()
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    from partsong.engines.mpi import Mpi

    work(Mpi, Mpi().communicator().rank, sys.argv[1])
