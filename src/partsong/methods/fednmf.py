"""FedNMF and FedNMF+MI (Si et al., 2022): mini-batch descent at parties, averaging or FedOpt steps at the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from partsong import kernels
from partsong.aggregation.linear import WeightedMean
from partsong.aggregation.server_update import SERVER_UPDATES, Replace
from partsong.core.interfaces import (
    Aggregation,
    Array,
    ArraySpec,
    Layout,
    Message,
    ProgramBase,
    ServerUpdate,
    Shard,
    State,
)
from partsong.core.parameters import Above, AtLeast, Choice, Steps, whole_number
from partsong.core.states import state
from partsong.core.streams import stream
from partsong.errors import ParameterError
from partsong.methods.averaging import OWN_COMPONENTS
from partsong.methods.mutual_information.batches import to_documents
from partsong.methods.mutual_information.critics import (
    BOUNDS,
    CRITICS,
    Bound,
    ClippedBound,
    Concat,
    Critic,
    MutualInformation,
)
from partsong.methods.mutual_information.descent import Descent
from partsong.methods.registry import Problem, TopicConfig, method
from partsong.solvers.initialization import random_columns
from partsong.solvers.squared_error import SquaredError

CRITIC = "theta."


@state("fednmf.party")
@dataclass(frozen=True, slots=True)
class DescentPartyState:
    """W (n × k), the number of rounds the party has worked in, and its latest estimate of mutual information.

    W is None before its first round. Without a critic the estimate is NaN.
    """

    W: Array | None = None
    rounds: int = 0
    information: float = float("nan")


@state("fednmf.server")
@dataclass(frozen=True, slots=True)
class DescentServerState:
    """The current model and the state of the server update."""

    model: Message
    memory: State


@dataclass(frozen=True, slots=True)
class FederatedDescent(ProgramBase):
    """Parties take mini-batch descent steps from the model; the server averages the results or takes adaptive steps.

        local:   (W_p, H_p, θ_p) ← descent(X_p; W_p, H, θ)             sent: H_p (k × V), θ_p, weight n_p
        finish:  H ← [server_update(H, Σ n_p H_p / Σ n_p)]₊, θ likewise, not projected; sums over participants

    FedNMF+MI (Si et al., 2022, Alg. 1), with rows as documents: X is their Aᵀ, W their Hᵀ, H their Wᵀ. Without mutual
    information in the descent there is no θ, and this is FedNMF. W_p is party state, kept from round to round; a party
    that takes part rarely can fit it to the model before each descent (`warm_start_weights`). For evaluation, weights
    are refitted with `solver`.

    Start: H ~ U(0, 1)·2/V, so a topic's words sum to about 1, and W_p ~ U(0, 1)·√(3/k), so a document's weights have
    norm of about 1. Neither needs data, and the usual learning rates are stable for any V and k. The order of documents
    and the start of W_p come from the party's own secret. Never sent: X_p, W_p.
    """

    rank: int
    descent: Descent = field(default_factory=Descent)
    server_update: ServerUpdate = Replace()
    solver: SquaredError = field(default_factory=SquaredError)
    aggregation: Aggregation = WeightedMean()
    warm_start_weights: bool = False

    def __post_init__(self) -> None:
        whole_number("FederatedDescent: rank", self.rank)

    def start_party(self, shard: Shard, layout: Layout) -> DescentPartyState:
        return DescentPartyState()

    def start_server(self, layout: Layout) -> tuple[DescentServerState, Message]:
        V = layout.n_features
        Ht = random_columns(V, self.rank, stream(layout.seed, "start"), layout.dtype) * (2.0 / V)
        theta = self.descent.information.start(V, self.rank, stream(layout.seed, "critic"), layout.dtype)
        model = _message(Ht, theta, 1.0)
        return DescentServerState(model, self.server_update.init(model)), model

    def local(self, shard: Shard, party: DescentPartyState, model: Message) -> tuple[DescentPartyState, Message]:
        Ht, theta = _at(shard, model)
        draw = stream(shard.secret, "batches", shard.name, party.rounds)
        learned = self.descent.run(to_documents(shard.matrix), self._weights(shard, party, Ht), Ht, theta, draw)
        after = DescentPartyState(learned.W, party.rounds + 1, learned.information)
        return after, _message(learned.Ht, learned.theta, float(shard.matrix.shape[0]))

    def refreshed(self, shard: Shard, party: DescentPartyState, model: Message) -> Array:
        """W_p for a model with mutual information: fit to H, then descend with H and θ fixed.

        `solver` gives the first step only, without λ.
        """
        Ht, theta = _at(shard, model)
        W = self.solver.solve_rows(shard.matrix, Ht)
        if not theta:
            return W
        draw = stream(shard.secret, "refreshed", shard.name, party.rounds)
        return self.descent.fit_weights(to_documents(shard.matrix), W, Ht, theta, draw)

    def _weights(self, shard: Shard, party: DescentPartyState, Ht: Array) -> Array:
        """The party's previous W, U(0, 1)·√(3/k), or the fit to the model."""
        if self.warm_start_weights and party.rounds > 0:
            return self.solver.solve_rows(shard.matrix, Ht)
        if party.W is not None:
            return party.W
        draw = stream(shard.secret, "weights", shard.name)
        return shard.matrix.native(draw.random((shard.matrix.shape[0], self.rank)) * (3.0 / self.rank) ** 0.5)

    def finish(self, server: DescentServerState, aggregate: Message) -> tuple[DescentServerState, Message]:
        moved, memory = self.server_update.step(server.model, aggregate, server.memory)
        model = Message({**moved.arrays, "H": moved["H"].clip(min=0)})
        return DescentServerState(model, memory), model

    def components(self, server: DescentServerState) -> Array:
        return server.model["H"]

    def upload_spec(self, layout: Layout) -> tuple[Mapping[str, ArraySpec], ...]:
        sizes = self.descent.information.sizes(layout.n_features, self.rank)
        H = ArraySpec((self.rank, layout.n_features), non_negative=True, is_factor=True, meaning=OWN_COMPONENTS)
        return (
            {
                "H": H,
                **{
                    CRITIC + name: ArraySpec(size.shape, meaning="parameters θ_p of the critic")
                    for name, size in sizes.items()
                },
            },
        )


def _at(shard: Shard, model: Message) -> tuple[Array, dict[str, Array]]:
    """Hᵀ (V × k) and θ with the number type and device of a party's documents."""
    Ht = shard.matrix.native(kernels.of(model["H"]).rows_of(model["H"]))
    critic = ((name, array) for name, array in model.arrays.items() if name.startswith(CRITIC))
    return Ht, {name.removeprefix(CRITIC): shard.matrix.native(array) for name, array in critic}


def _message(Ht: Array, theta: Mapping[str, Array], weight: float) -> Message:
    return Message({"H": Ht.T, **{CRITIC + name: array for name, array in theta.items()}}, weight)


SERVER_RATE = 0.03

Rate = Annotated[float, Above(0)]
WeightStep = Annotated[str, Choice.of("document", "batch")]
Server = Annotated[Any, SERVER_UPDATES]


@method("fednmf", rounds=50, only_texts=True, texts=TopicConfig(50, "nmf-sgd"))
def fednmf(
    problem: Problem,
    *,
    epochs: Steps = 10,
    batch: Steps = 64,
    rate: Rate = 0.05,
    weight_step: WeightStep = "document",
    warm_start_weights: bool = False,
    server: Server = Replace,
    server_rate: Annotated[float | None, Above(0)] = None,
) -> FederatedDescent:
    """Parties descend on mini-batches of documents; the server averages, or takes adaptive steps.

    Si et al. (2022); the server's steps are those of FedOpt (Reddi et al., 2021). With `weight_step="document"` each
    document moves by its own error, which gives better topics in as many epochs (docs/guide/topics.md).
    `warm_start_weights`: fit weights to the model before each round but the first. Sent per round and party: H_p
    (k × V) and n_p. Never sent: X_p, W_p.
    """
    if server is Replace and server_rate is not None:
        steps = ", ".join(SERVER_UPDATES.names[1:])
        raise ParameterError(
            f"server_rate is for server = {steps}; an average has no rate. Set server to one of them, or remove "
            "server_rate.",
            parameter="server_rate",
        )
    update = Replace() if server is Replace else server(SERVER_RATE if server_rate is None else server_rate)
    return FederatedDescent(
        problem.rank, Descent(epochs, batch, rate, weight_step), update, warm_start_weights=warm_start_weights
    )


@method("fednmf-mi", extends=fednmf, rounds=50, only_texts=True, texts=TopicConfig(50, "nmf-sgd-mi"))
def fednmf_mi(
    problem: Problem,
    *,
    strength: Annotated[float, AtLeast(0)] = 0.1,
    critic: Annotated[Critic, CRITICS] = Concat(),
    mi_gradient: Annotated[Bound, BOUNDS] = ClippedBound(),
    critic_rate: Annotated[float | None, Above(0)] = None,
    **options: Any,
) -> FederatedDescent:
    """Like fednmf, with a term that keeps mutual information between weights and documents, estimated by a critic.

    λ is `strength`; 0 is fednmf. As printed ("dv", at the rate of W) an averaged critic hardly learns;
    `mi_gradient="js"` with a `critic_rate` of 0.2 to 0.5 does (docs/results/topics.md). Sent per round and party: H_p
    (k × V), the critic's parameters θ_p, and n_p. Never sent: X_p, W_p. Without secure aggregation, θ_p reveals exactly
    which words a party has (docs/reference/exposure.md).
    """
    plain = fednmf(problem, **options)
    if strength == 0:
        return plain
    information = MutualInformation(strength, critic, mi_gradient, critic_rate)
    return replace(plain, descent=replace(plain.descent, information=information))
