"""From the last round to a model, with the rows of W where they are: `finished.complete` among ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from partsong import kernels
from partsong.cli.ranks_company import heard
from partsong.core import Array, Layout, Message, Program, Shard
from partsong.engines.agreement import at_the_server, together
from partsong.engines.communicator import Communicator
from partsong.finished import Finished, complete
from partsong.running import Run

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks that complete a model together. Sent: sums (k × k, and two numbers), as rank 0 has them."""

    communicator: Communicator

    def jointly(self, work: Callable[[], Result]) -> Result:
        """work() at this rank, or the error of the first rank where it failed."""
        return together(self.communicator, work)

    def total(self, array: np.ndarray) -> np.ndarray:
        """Σ over the ranks, as rank 0 has it, so that orders agree."""
        return np.asarray(self.of_rank_0(self.communicator.sum(np.ascontiguousarray(array))))

    def of_rank_0(self, array: Array | None) -> Any:
        """Rank 0's array, at every rank."""
        with heard():
            messages, _ = at_the_server(self.communicator, lambda: ({"": Message({"": array})}, None))
        return messages[""][""]


def _best(program: Program, run: Run, shards: Sequence[Shard], seed: int) -> Array:
    """H where the objective was smallest, or where all began if not even one exchange was done."""
    server = program.start_server(Layout.of(shards, seed))[0] if run.best is None else run.best
    return program.components(server)


def completed(program: Program, run: Run, shards: Sequence[Shard], communicator: Communicator, seed: int) -> Finished:
    """Put rank 0's best H on its scale and in order, solve for the own rows of W exactly, and add up the errors."""
    solver: Any = program.solver
    ranks = Ranks(communicator)
    H = ranks.of_rank_0(_best(program, run, shards, seed) if communicator.rank == 0 else None)
    rescale = not (solver.penalty_W or solver.penalty_H)
    return complete(solver, shards, kernels.of(H).rows_of(H), rescale, ranks)
