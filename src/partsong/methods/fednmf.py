"""Topics by descent at the parties and averages at the server: FedNMF and FedNMF+MI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from partsong import kernels
from partsong.aggregation.linear import WeightedMean
from partsong.aggregation.server_update import Adagrad, Adam, Replace, Yogi
from partsong.core.interfaces import Aggregation, Array, Form, Layout, Message, ServerUpdate, Shard, State
from partsong.core.streams import stream
from partsong.errors import ParameterError
from partsong.methods.mutual_information.batches import documents_of
from partsong.methods.mutual_information.critics import (
    Bound,
    ClippedBound,
    Concat,
    Critic,
    JensenShannon,
    MutualInformation,
    NoInformation,
    Separable,
)
from partsong.methods.mutual_information.descent import Descent
from partsong.solvers.initialization import random_columns
from partsong.solvers.squared_error import SquaredError

# ---- topic rounds -----------------------------------------------------------------------------------------------

CRITIC = "theta."


@dataclass(frozen=True, slots=True)
class TopicParty:
    """W (n × k) as the party last left it, in how many rounds it has worked, and its latest estimate of information.

    Before its first round there is no W. Without a critic there is no estimate (NaN).
    """

    W: Array | None = None
    rounds: int = 0
    information: float = float("nan")


@dataclass(frozen=True, slots=True)
class TopicServer:
    """The model as it stands, and the server update's own state."""

    model: Message
    memory: State


@dataclass(frozen=True, slots=True)
class TopicRounds:
    """Each party descends from the model on batches of its documents; the server averages, or steps adaptively.

        local:   (W_p, H_p, θ_p) ← descent(X_p; W_p, H, θ)             sent: H_p (k × V), θ_p, weight n_p
        finish:  H ← [server_update(H, Σ n_p H_p / Σ n_p)]₊, θ likewise, not projected; sums over those who took part

    FedNMF+MI (Si et al., 2022, Alg. 1), in rows: X is Aᵀ there, W is Hᵀ, H is Wᵀ. Without information in the descent
    there is no θ, and it is FedNMF. W_p is the party's own state, kept from round to round; a party that comes rarely
    can fit it to the model before it descends (`fits_first`). Whoever evaluates fits weights anew by `solver`.

    Start: H ~ U(0, 1)·2/V, so that a topic's words sum to about 1, and W_p ~ U(0, 1)·√(3/k), so that a document's
    weights have norm 1 or so. Neither needs data, and steps of the usual rates are stable for any V and k.
    Order of documents and start of W_p come from the party's own secret. Never sent: X_p, W_p.
    """

    rank: int
    descent: Descent = field(default_factory=Descent)
    server_update: ServerUpdate = Replace()
    solver: SquaredError = field(default_factory=SquaredError)
    aggregation: Aggregation = WeightedMean()
    fits_first: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, (int, np.integer)) or self.rank < 1:
            raise ParameterError(f"TopicRounds needs a whole number of topics ≥ 1; got {self.rank!r}.")

    def start_party(self, shard: Shard, layout: Layout) -> TopicParty:
        return TopicParty()

    def start_server(self, layout: Layout) -> tuple[TopicServer, Message]:
        """H and θ from the shared seed."""
        V = layout.n_features
        Ht = random_columns(V, self.rank, stream(layout.seed, "start"), layout.dtype) * (2.0 / V)
        theta = self.descent.information.start(V, self.rank, stream(layout.seed, "critic"), layout.dtype)
        model = _message(Ht, theta, 1.0)
        return TopicServer(model, self.server_update.init(model)), model

    def local(self, shard: Shard, party: TopicParty, model: Message) -> tuple[TopicParty, Message]:
        """All epochs from the model, and what has come of it."""
        Ht, theta = _at(shard, model)
        draw = stream(shard.secret, "batches", shard.name, party.rounds)
        learned = self.descent.run(documents_of(shard.matrix), self._weights(shard, party, Ht), Ht, theta, draw)
        after = TopicParty(learned.W, party.rounds + 1, learned.information)
        return after, _message(learned.Ht, learned.theta, float(shard.matrix.shape[0]))

    def refreshed(self, shard: Shard, party: TopicParty, model: Message) -> Array:
        """W_p for a model, information included: the fit to H, from which weights descend with H and θ as they are.

        `solver` gives the fit alone, which knows nothing of λ.
        """
        Ht, theta = _at(shard, model)
        W = self.solver.solve_rows(shard.matrix, Ht)
        if not theta:
            return W
        draw = stream(shard.secret, "refreshed", shard.name, party.rounds)
        return self.descent.settle(documents_of(shard.matrix), W, Ht, theta, draw)

    def _weights(self, shard: Shard, party: TopicParty, Ht: Array) -> Array:
        """What the party had, or U(0, 1)·√(3/k), or the fit to the model."""
        if self.fits_first and party.rounds > 0:
            return self.solver.solve_rows(shard.matrix, Ht)
        if party.W is not None:
            return party.W
        draw = stream(shard.secret, "weights", shard.name)
        return shard.matrix.native(draw.random((shard.matrix.shape[0], self.rank)) * (3.0 / self.rank) ** 0.5)

    def finish(self, server: TopicServer, aggregate: Message) -> tuple[TopicServer, Message]:
        """The aggregate moves the model, and H is projected."""
        moved, memory = self.server_update.step(server.model, aggregate, server.memory)
        model = Message({**moved.arrays, "H": moved["H"].clip(min=0)})
        return TopicServer(model, memory), model

    def components(self, server: TopicServer) -> Array:
        """H (k × V) as it stands."""
        return server.model["H"]

    def metrics(self, server: TopicServer) -> Mapping[str, float]:
        """Nothing: the server sees no error."""
        return {}

    def expects(self, layout: Layout) -> tuple[Mapping[str, Form], ...]:
        """H_p ≥ 0, and the critic's arrays."""
        sizes = self.descent.information.sizes(layout.n_features, self.rank)
        H = Form((self.rank, layout.n_features), non_negative=True, is_factor=True)
        return ({"H": H, **{CRITIC + name: Form(size.shape) for name, size in sizes.items()}},)


def _at(shard: Shard, model: Message) -> tuple[Array, dict[str, Array]]:
    """Hᵀ (V × k) and θ in the type and place of a party's documents."""
    Ht = shard.matrix.native(kernels.of(model["H"]).rows_of(model["H"]))
    critic = ((name, array) for name, array in model.arrays.items() if name.startswith(CRITIC))
    return Ht, {name.removeprefix(CRITIC): shard.matrix.native(array) for name, array in critic}


def _message(Ht: Array, theta: Mapping[str, Array], weight: float) -> Message:
    return Message({"H": Ht.T, **{CRITIC + name: array for name, array in theta.items()}}, weight)


# ---- topic recipes ----------------------------------------------------------------------------------------------
#
# Federated topic models by name, spelled as compositions of parts.

SERVER_RATE = 0.03
SERVERS = ("average", "adagrad", "yogi", "adam")
CRITICS: dict[str, Critic] = {"concat": Concat(), "separable": Separable()}
BOUNDS: dict[str, Bound] = {"dv": ClippedBound(), "js": JensenShannon()}


def fednmf(
    rank: int,
    *,
    server: str = "average",
    server_rate: float = SERVER_RATE,
    fits_first: bool = False,
    **descent: Any,
) -> TopicRounds:
    """NMF by projected SGD at the parties; the server averages (FedAvg) or steps adaptively (Si et al., 2022; FedOpt).

    Further settings are those of `Descent`: epochs, batch, rate, weight_step. Sent per round and party: H_p (k × V) and
    the number of documents. Never sent: X_p, W_p.
    """
    return TopicRounds(rank, Descent(**descent), server_named(server, server_rate), fits_first=fits_first)


def fednmf_mi(
    rank: int,
    *,
    strength: float = 0.1,
    critic: str = "concat",
    mi_gradient: str = "dv",
    critic_rate: float | None = None,
    **settings: Any,
) -> TopicRounds:
    """`fednmf` whose weights also keep mutual information with the documents, by a critic that is learned with them.

    λ is `strength`; 0 is `fednmf` itself. As printed ("dv", at the rate of W) the critic hardly learns by averages;
    mi_gradient="js" with a critic_rate of 0.2 to 0.5 does (docs/results/topics.md). Sent per round and party: H_p
    (k × V), the critic's θ_p (for "concat" 32(V + k + 1) + 8705 numbers), the number of documents. Never sent: X_p,
    W_p. In the open θ_p tells which words the party has, to the letter (docs/what-leaves-a-party.md).
    """
    _require("critic", critic, CRITICS)
    _require("mi_gradient", mi_gradient, BOUNDS)
    if strength == 0:
        return fednmf(rank, **settings, information=NoInformation())
    information = MutualInformation(strength, CRITICS[critic], BOUNDS[mi_gradient], critic_rate)
    return fednmf(rank, **settings, information=information)


def server_named(name: str, rate: float = SERVER_RATE) -> ServerUpdate:
    """FedAvg, FedAdagrad, FedYogi or FedAdam; an average has no rate."""
    _require("server", name, SERVERS)
    if name == "average":
        return Replace()
    return {"adagrad": Adagrad, "yogi": Yogi, "adam": Adam}[name](rate)


def _require(what: str, name: str, known: Any) -> None:
    if not isinstance(name, str) or name not in known:
        raise ParameterError(f"{what} is one of {', '.join(known)}; got {name!r}.")
