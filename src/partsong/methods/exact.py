"""Exact federated NMF: parties send sums over rows, and the result equals the pooled factorization."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from partsong.aggregation.linear import Sum
from partsong.core.interfaces import Array, ArraySpec, HalfSteps, Layout, Message, ProgramBase, Shard, State, Traits
from partsong.core.parameters import Steps
from partsong.core.streams import stream
from partsong.errors import ParameterError
from partsong.methods.init_modes import SHARED_INIT, SharedInitMode
from partsong.methods.registry import Problem, TopicConfig, method
from partsong.solvers.initialization import random_columns
from partsong.solvers.squared_error import SquaredError
from partsong.solvers.update_rules import SWEEPS, CoordinateDescent, Extrapolation, NoExtrapolation


@dataclass(frozen=True, slots=True)
class SharedSums(ProgramBase):
    """Parties take the row steps of a loss and send sums; the server takes the column step from the totals.

        local:   W_p ← row step from H            sent: the arrays of `half_steps.sums_spec`
        finish:  H   ← column step from Σ sums    broadcast: H (k × m), and scalars of the solver

    For `SquaredError`: W_pᵀW_p (k × k), W_pᵀX_p (k × m), n_p, ‖X_p‖² and, with an L1 penalty, ΣW_p. The result equals
    factorizing the stacked rows, up to rounding. Never sent: X_p, W_p. The sums of one party reveal its rows if it has
    few of them; only a reduction that hides single uploads protects against that.
    """

    rank: int
    half_steps: HalfSteps[Any, Any] = field(default_factory=SquaredError)
    aggregation: Sum = Sum()

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ParameterError(f"The rank must be at least 1; got {self.rank}.")

    @property
    def traits(self) -> Traits:
        return self.half_steps.traits

    @property
    def solver(self) -> Any:
        return self.half_steps

    def start_party(self, shard: Shard, layout: Layout) -> State:
        """Usually no W yet: the first round starts it from H and each row alone."""
        return self.half_steps.begin_rows(shard, layout)

    def start_server(self, layout: Layout) -> tuple[State, Message]:
        Ht = random_columns(layout.n_features, self.rank, stream(layout.seed, "start"), layout.dtype)
        return self._with_model(self.half_steps.begin(Ht, is_scaled=False))

    def start_from(self, Ht: Array) -> tuple[State, Message]:
        """Start the server from a given Hᵀ."""
        return self._with_model(self.half_steps.begin(Ht))

    def local(self, shard: Shard, party: State, model: Message) -> tuple[State, Message]:
        rows, sums = self.half_steps.row_step(shard.matrix, party, model.arrays)
        return rows, Message(sums)

    def finish(self, server: State, aggregate: Message) -> tuple[State, Message]:
        sums = [aggregate.arrays]
        del aggregate  # sums are as large as H: lets the step free them early
        return self._with_model(self.half_steps.column_step(server, sums.pop()))

    def _with_model(self, columns: State) -> tuple[State, Message]:
        return columns, Message(self.half_steps.broadcast(columns))

    def components(self, server: State) -> Array:
        return self.half_steps.components(server)

    def metrics(self, server: State) -> Mapping[str, float]:
        return self.half_steps.metrics(server)

    def directions(self, model: Message | None) -> int:
        return self.rank

    def upload_spec(self, layout: Layout) -> tuple[Mapping[str, ArraySpec], ...]:
        return (self.half_steps.sums_spec(self.rank, layout.n_features),)


@method(
    "exact",
    privacy=("row",),
    over_ranks=True,
    texts=TopicConfig(200, "nmf", {"accelerate": True, "local_steps": SWEEPS}),
)
def exact(
    problem: Problem, *, local_steps: Steps = 3, accelerate: bool = False, init_mode: SharedInitMode = SHARED_INIT
) -> SharedSums:
    """Parties send WᵀW and WᵀX; the result equals as many iterations on the pooled rows.

    `local_steps`: sweeps per pass over the rows. `accelerate`: extrapolate both factors. Sent per round and party: WᵀW
    (k × k), WᵀX (k × m), n_p and ‖X_p‖². Never sent: X_p, W_p. A party with few rows is protected only by secure
    aggregation or noise, because its sums reveal its rows.
    """
    momentum = Extrapolation() if accelerate else NoExtrapolation()
    return SharedSums(problem.rank, SquaredError(CoordinateDescent(sweeps=local_steps), momentum=momentum))


def accelerated_sums(rank: int) -> SharedSums:
    """Return exact sums with several sweeps and extrapolation: the second stage of two-stage methods."""
    return exact(Problem(rank), local_steps=SWEEPS, accelerate=True)
