"""Factorize alone, then agree on H."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from partsong import kernels
from partsong.aggregate.linear import WeightedMean
from partsong.aggregate.server import Replace
from partsong.core import Aggregation, Array, Layout, Message, ServerUpdate, Shard, State
from partsong.errors import ParameterError
from partsong.local.alternate import Alternate, Rows
from partsong.local.rules import RuleState
from partsong.local.start import random_columns
from partsong.streams import stream


@dataclass(frozen=True, slots=True)
class CommonStart:
    """All parties begin with the server's H, and fit W to it before they move."""

    def columns(self, shard: Shard, Ht: Array) -> Array:
        """The server's."""
        return Ht


@dataclass(frozen=True, slots=True)
class IndependentStart:
    """Every party draws an H of its own, as the FNMF paper does; components then come out in different orders."""

    def columns(self, shard: Shard, Ht: Array) -> Array:
        """The party's own, U(0, 1), from its private stream."""
        own = random_columns(Ht.shape[0], Ht.shape[1], stream(shard.secret, "start", shard.name))
        return shard.matrix.native(own)


@dataclass(frozen=True, slots=True)
class ConsensusParty:
    """W and how often the rules have stepped; before the first round there is no W."""

    W: Array | None = None
    count: int = 0


@dataclass(frozen=True, slots=True)
class ConsensusServer:
    """The model as last broadcast, and the server update's own state."""

    model: Message
    memory: State


@dataclass(frozen=True, slots=True)
class Consensus:
    """Each party runs `steps` local iterations from the broadcast H and sends its H_p; the server aggregates them.

        local:   (W_p, H_p) ← solver(X_p; W_p, H)^steps      sent: H_p (k × m), weight n_p
        finish:  H ← server_update(H, aggregation(H_p))      broadcast: H (k × m)

    FedAvg-NMF and Syn-SD are this with a mean. Never sent: X_p, W_p.
    """

    rank: int
    solver: Alternate = field(default_factory=Alternate)
    steps: int = 10
    start: CommonStart | IndependentStart = CommonStart()
    aggregation: Aggregation = WeightedMean()
    server_update: ServerUpdate = Replace()

    def __post_init__(self) -> None:
        if self.rank < 1 or self.steps < 1:
            raise ParameterError(f"Consensus needs rank ≥ 1 and steps ≥ 1; got rank={self.rank}, steps={self.steps}.")

    def start_party(self, shard: Shard, layout: Layout) -> ConsensusParty:
        """No W yet."""
        return ConsensusParty()

    def start_server(self, layout: Layout) -> tuple[ConsensusServer, Message]:
        """Random H from the shared seed."""
        Ht = random_columns(layout.n_features, self.rank, stream(layout.seed, "start"), layout.dtype)
        model = Message({"H": Ht.T})
        return ConsensusServer(model, self.server_update.init(model)), model

    def local(self, shard: Shard, party: ConsensusParty, model: Message) -> tuple[ConsensusParty, Message]:
        """A few local iterations from the model."""
        H = shard.matrix.native(model["H"])
        Ht = kernels.of(H).rows_of(H)
        if party.W is None:
            Ht = self.start.columns(shard, Ht)
        W = party.W if party.W is not None else self.solver.solve_rows(shard.matrix, Ht)
        rows, columns = Rows(W, None, _counted(self.solver.rule.init(W), party.count)), self.solver.begin(Ht)
        columns = replace(columns, memory=_counted(columns.memory, party.count))
        for _ in range(self.steps):
            rows, totals = self.solver.row_step(shard.matrix, rows, columns)
            columns = self.solver.column_step(columns, totals)
        sent = Message({"H": columns.Ht.T}, weight=float(shard.matrix.shape[0]))
        return ConsensusParty(rows.W, party.count + self.steps), sent

    def finish(self, server: ConsensusServer, aggregate: Message) -> tuple[ConsensusServer, Message]:
        """The aggregate moves the model."""
        model, memory = self.server_update.step(server.model, aggregate, server.memory)
        return ConsensusServer(model, memory), model

    def components(self, server: ConsensusServer) -> Array:
        """H (k × m) as it stands."""
        return server.model["H"]

    def metrics(self, server: ConsensusServer) -> Mapping[str, float]:
        """Nothing: the server sees no error. `evaluate.metrics` computes it from sums of two numbers per party."""
        return {}


def _counted(memory: RuleState, count: int) -> RuleState:
    return replace(memory, count=count)
