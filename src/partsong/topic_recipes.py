"""Federated topic models by name, spelled as compositions of parts."""

from __future__ import annotations

from typing import Any

from partsong.aggregate.adaptive import Adagrad, Adam, Yogi
from partsong.aggregate.server import Replace
from partsong.core import ServerUpdate
from partsong.errors import ParameterError
from partsong.mutual.critics import Concat, Critic
from partsong.mutual.descent import Descent
from partsong.mutual.information import MutualInformation, NoInformation
from partsong.mutual.separable import Separable
from partsong.mutual.smile import Bound, ClippedBound, JensenShannon
from partsong.programs.topic_rounds import TopicRounds

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
