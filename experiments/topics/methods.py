"""Topic models by the names of the paper's tables: their topics, traffic and document weights."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix, vstack

from partsong import kernels
from partsong.aggregation.plaintext import PlainReduction
from partsong.core import runtime
from partsong.core.interfaces import Round, Schedule, Shard
from partsong.core.streams import key
from partsong.data.conversion import as_matrix
from partsong.engines.local import Sequential
from partsong.engines.rounds import sample_participants
from partsong.methods import build
from partsong.methods.fedlda import FederatedLDA
from partsong.methods.fednmf import DescentPartyState, FederatedDescent

MI = "+MI"
SERVERS = {"FedAvg": "average", "FedAdagrad": "adagrad", "FedYogi": "yogi", "FedAdam": "adam"}
CENTRALISED = ("LDA", "NMF", "NMF+SGD", "NMF+SGD+MI")
FEDERATED = ("FedLDA", *(name + extra for name in SERVERS for extra in ("", MI)))
OURS = ("exact", "FNMF")
METHODS = (*CENTRALISED, *FEDERATED, *OURS)
NUMPY = "numpy"
"""Device of the descents: NumPy with compiled loops; or a device of torch ("cuda", "cpu")."""

BAYESIAN = ("LDA", "FedLDA")
DESCENTS = tuple(name for name in METHODS if name.startswith("NMF+SGD") or name.removesuffix(MI) in SERVERS)
LDA_PASSES, LDA_BATCH, NMF_PASSES = 10, 256, 200
"""Passes and batch size of scikit-learn's online LDA, and iterations of its NMF by coordinate descent."""


@dataclass(frozen=True, slots=True)
class Settings:
    """E, B, η, λ of the paper, the server's rate, and choices that the paper leaves open; `critic_rate` 0 is η.

    `topic_prior` and `word_prior` are the priors of LDA; 0 is 1/k.
    """

    rounds: int = 30
    epochs: int = 10
    batch: int = 64
    rate: float = 0.05
    strength: float = 0.0
    server_rate: float = 0.03
    weight_step: str = "document"
    mi_gradient: str = "dv"
    critic: str = "concat"
    critic_rate: float = 0.0
    fits_first: bool = False
    topic_prior: float = 0.0
    word_prior: float = 0.0


@dataclass(frozen=True, slots=True)
class Learned:
    """H (k × V), rounds, bytes both ways, seconds; `weights` of some parties' rows, `fitted` without information."""

    H: np.ndarray
    weights: Callable[[Mapping[str, csr_matrix]], Mapping[str, np.ndarray]]
    fitted: Callable[[csr_matrix], np.ndarray]
    rounds: int = 0
    bytes: int = 0
    seconds: float = 0.0
    information: float = float("nan")


Watch = Callable[[Learned], None]


def learn(method: str, rows: Mapping[str, csr_matrix], rank: int, settings: Settings, **how: Any) -> Learned:
    """Learn topics from the rows of all parties; `how`: seed, fraction C of parties per round, device, callback."""
    if method in ("LDA", "NMF"):
        return _by_sklearn(method, rows, rank, settings, int(how.get("seed", 0)))
    return _Federation(method, rows, rank, settings, **how).run()


def _by_sklearn(method: str, rows: Mapping[str, csr_matrix], rank: int, own: Settings, seed: int) -> Learned:
    from sklearn.decomposition import NMF, LatentDirichletAllocation

    X = _stacked(rows)
    if method == "LDA":
        online = {"learning_method": "online", "max_iter": LDA_PASSES, "batch_size": LDA_BATCH}
        priors = {"doc_topic_prior": own.topic_prior or None, "topic_word_prior": own.word_prior or None}
        model = LatentDirichletAllocation(rank, random_state=seed, **priors, **online)
    else:
        model = NMF(rank, max_iter=NMF_PASSES, random_state=seed)
    began = time.perf_counter()
    with runtime.limit_kernel_threads(1), _unconverged():
        model.fit(X)
    seconds = time.perf_counter() - began

    def fitted(asked: csr_matrix) -> np.ndarray:
        with runtime.limit_kernel_threads(1), _unconverged():
            return np.asarray(model.transform(asked))

    def weights(given: Mapping[str, csr_matrix]) -> Mapping[str, np.ndarray]:
        return {name: fitted(own) for name, own in given.items()}

    return Learned(np.asarray(model.components_), weights, fitted, seconds=seconds)


@dataclass(frozen=True, slots=True)
class _Federation:
    """Run a program over parties; a single party that takes part in every round is the centralized method."""

    method: str
    rows: Mapping[str, csr_matrix]
    rank: int
    settings: Settings
    seed: int = 0
    fraction: float = 0.2
    watch: Watch | None = None
    device: str = NUMPY
    shards: tuple[Shard, ...] = field(init=False)

    def __post_init__(self) -> None:
        pooled = self.method in CENTRALISED
        held = {"all": _stacked(self.rows)} if pooled else self.rows
        object.__setattr__(self, "shards", tuple(self._shard(name, own) for name, own in held.items()))

    def run(self) -> Learned:
        program = self.program()
        names, rounds = [shard.name for shard in self.shards], self._rounds()
        absent = (
            {} if self.method in (*CENTRALISED, *OURS) else sample_participants(names, rounds, self.fraction, self.seed)
        )
        schedule = Schedule(rounds, self.seed, absent=absent)
        sent, spent = 0, 0.0
        began = time.perf_counter()
        for done in Sequential().run(program, self.shards, schedule, reduction=PlainReduction()):
            spent += time.perf_counter() - began
            sent += sum(done.bytes_up.values()) + done.bytes_down * len(done.participants)
            learned = self._learned(program, done, sent, spent)
            if self.watch is not None:
                self.watch(learned)
            began = time.perf_counter()
        return learned

    def program(self) -> Any:
        """Build the program of parties and server."""
        own = self.settings
        if self.method == "FedLDA":
            documents = sum(rows.shape[0] for rows in self.rows.values())
            return FederatedLDA(self.rank, own.topic_prior or None, own.word_prior or None, documents=documents)
        if self.method in OURS:
            return build(self.method.lower(), self.rank)
        base = self.method.removesuffix(MI)
        asked = {
            "server": SERVERS.get(base, "average"), "warm_start_weights": own.fits_first,
            "server_rate": own.server_rate if base in SERVERS and SERVERS[base] != "average" else None,
            "epochs": own.epochs, "batch": own.batch, "rate": own.rate, "weight_step": own.weight_step,
        }  # fmt: skip
        if base == self.method:
            return build("fednmf", self.rank, **asked)
        critic = {"critic": own.critic, "mi_gradient": own.mi_gradient, "critic_rate": own.critic_rate or None}
        return build("fednmf-mi", self.rank, strength=own.strength, **critic, **asked)

    def _rounds(self) -> int:
        """Number of rounds; C times as many for a centralized method, so that documents are seen equally often."""
        if self.method not in CENTRALISED:
            return self.settings.rounds
        return max(1, round(self.settings.rounds * self.fraction))

    def _learned(self, program: Any, done: Round, sent: int, spent: float) -> Learned:
        server, states = done.checkpoint.server, done.checkpoint.parties
        H = _to_numpy(program.components(server))
        pooled = self.method in CENTRALISED

        def fitted(asked: csr_matrix) -> np.ndarray:
            with runtime.limit_kernel_threads(1):
                if isinstance(program, FederatedLDA):
                    return np.asarray(program.weights(server, as_matrix(asked)))
                return np.asarray(program.solver.solve_rows(as_matrix(asked), np.ascontiguousarray(H.T)))

        def weights(given: Mapping[str, csr_matrix]) -> Mapping[str, np.ndarray]:
            if not self.method.endswith(MI):
                return {name: fitted(own) for name, own in given.items()}
            made = {name: self._shard(name, own) for name, own in given.items()}
            with runtime.limit_kernel_threads(1):
                return {
                    name: _to_numpy(program.refreshed(one, DescentPartyState(), done.model))
                    for name, one in made.items()
                }

        seen = [s.information for s in states.values() if isinstance(s, DescentPartyState) and s.rounds]
        information = float(np.mean(seen)) if seen and isinstance(program, FederatedDescent) else float("nan")
        rounds, traffic = (0, 0) if pooled else (done.index + 1, sent)
        return Learned(H, weights, fitted, rounds, traffic, spent, information)

    def _shard(self, name: str, own: csr_matrix) -> Shard:
        on_host = self.device == NUMPY or self.method not in DESCENTS
        return Shard(name, as_matrix(own if on_host else _tensor(own, self.device)), key(self.seed, "secret", name))


def _to_numpy(values: Any) -> np.ndarray:
    return np.asarray(kernels.of(values).to_numpy(values))


def _tensor(rows: csr_matrix, device: str) -> Any:
    """The same rows as a sparse tensor on a device."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that its sparse tensors are in beta
        parts = (torch.from_numpy(part) for part in (rows.indptr.astype(np.int64), rows.indices.astype(np.int64)))
        return torch.sparse_csr_tensor(*parts, torch.from_numpy(rows.data), rows.shape, device=device)


def _stacked(rows: Mapping[str, csr_matrix]) -> csr_matrix:
    return csr_matrix(vstack(list(rows.values()), format="csr"))


@contextmanager
def _unconverged() -> Iterator[None]:
    """Suppress convergence warnings: the number of passes is limited on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
