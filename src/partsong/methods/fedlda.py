"""Federated latent Dirichlet allocation: batch or online variational Bayes from sums of expected word counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.special import gammaln, psi

from partsong import kernels
from partsong.aggregation.linear import Sum
from partsong.core.interfaces import Array, ArraySpec, Layout, Matrix, Message, ProgramBase, Shard
from partsong.core.states import state
from partsong.core.streams import stream
from partsong.errors import ParameterError, ShapeError
from partsong.methods.registry import Problem, TopicConfig, method
from partsong.solvers.lda import TopicInference, expectations, require_counts

START = 100.0
"""λ starts from Gamma(100, 1/100), as in Hoffman's code and in scikit-learn."""


@state("fedlda.party")
@dataclass(frozen=True, slots=True)
class LDAPartyState:
    """The party's private state: γ (n × k) of its documents; None before its first round."""

    gamma: Array | None = None

    @property
    def W(self) -> Array | None:
        """θ = γ / Σγ."""
        return None if self.gamma is None else self.gamma / self.gamma.sum(axis=1, keepdims=True)


@state("fedlda.server")
@dataclass(frozen=True, slots=True)
class LDAServerState:
    """λᵀ (V × k), rounds so far, number of parties, number of all their documents (0: unknown).

    `perplexity`: of the documents in the last round, under the model they were sent.
    """

    totals: Array
    rounds: int
    parties: int
    documents: float = 0.0
    perplexity: float = math.nan


@dataclass(frozen=True, slots=True)
class FederatedLDA(ProgramBase):
    """Parties infer the topics of their documents and send expected counts; the server adds them to the prior.

        local:   γ_p, φ ← E-step(X_p; H)      sent: S_p = Σ_d count_dw φ_dwl (k × V), totals (3), bound (1)
        finish:  λ ← η + Σ_p S_p                               all parties took part: a step of batch VB
                 λ ← (1 − ρ_t) λ + ρ_t (η + N/N_G Σ_{p∈G} S_p)   only G did: a step of online VB, ρ_t = (τ + t)^−κ, t ≥
                 1
        broadcast: H = exp E[log β] (k × V) under λ

    If all parties take part in each round, the result equals that of the pooled documents, up to rounding (Hoffman,
    Blei & Bach, 2010, Algorithm 1, on one batch). N is `documents`, or the count of the last round of all parties;
    while neither is known, N/N_G is the number of parties over that of G. Never sent: X_p, γ_p. However, S_p summed
    over topics gives the party's counts of all words, the same in each round. A reader of S_p learns which words the
    party uses and how often, and the words of a single document. Only a reduction that hides single uploads protects
    against that, and only while the same parties are in every sum: two sums that differ by one party, summed over
    topics, differ by its word counts. A word that only one party uses shows that party's count in the sum, too.

    `starts_over`: each E-step starts from γ = 1, as in scikit-learn. Otherwise it starts from the party's last γ. That
    takes fewer iterations and never lowers the bound, but leaves documents in their initial, random topics: topics of
    short texts become much worse. α and η default to 1/k.
    """

    rank: int
    alpha: float | None = None
    eta: float | None = None
    iterations: int = 100
    tolerance: float = 1e-3
    starts_over: bool = True
    documents: int | None = None
    offset: float = 10.0
    decay: float = 0.7
    aggregation: Sum = Sum()

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ParameterError(f"rank must be at least 1; got {self.rank}.")
        if not 0 < self.prior < math.inf:
            raise ParameterError(f"eta, the prior of a topic's words, must be positive and finite; got {self.prior}.")
        if not (self.offset >= 0 and 0 < self.decay <= 1):
            raise ParameterError(
                "Step sizes (offset + t)^-decay need offset ≥ 0 and 0 < decay ≤ 1; "
                f"got offset={self.offset} and decay={self.decay}."
            )
        if self.documents is not None and self.documents < 1:
            raise ParameterError(
                f"documents, the number of all parties' documents, must be at least 1; got {self.documents}."
            )
        _ = self.solver

    @property
    def prior(self) -> float:
        """The prior η of each word in each topic."""
        return 1.0 / self.rank if self.eta is None else self.eta

    @property
    def solver(self) -> TopicInference:
        alpha = 1.0 / self.rank if self.alpha is None else self.alpha
        return TopicInference(alpha, self.iterations, self.tolerance)

    def start_party(self, shard: Shard, layout: Layout) -> LDAPartyState:
        require_counts(shard.matrix)
        return LDAPartyState()

    def start_server(self, layout: Layout) -> tuple[LDAServerState, Message]:
        draw = stream(layout.seed, "start")
        totals = draw.gamma(START, 1 / START, (self.rank, layout.n_features)).T
        return self.start_from(totals, len(layout.parties))

    def start_from(self, totals: Array, parties: int) -> tuple[LDAServerState, Message]:
        """Start the server from a given λᵀ (V × k), for this number of parties."""
        given = np.ascontiguousarray(kernels.of(totals).to_numpy(totals), np.float64)
        if given.ndim != 2 or given.shape[1] != self.rank or not (np.isfinite(given).all() and (given > 0).all()):
            raise ShapeError(f"The start must have {self.rank} columns of positive numbers; got shape {given.shape}.")
        server = LDAServerState(given, 0, parties, float(self.documents or 0))
        return server, _model(server)

    def local(self, shard: Shard, party: LDAPartyState, model: Message) -> tuple[LDAPartyState, Message]:
        B = np.asarray(kernels.of(model["H"]).to_numpy(model["H"]), np.float64).T
        before = None if self.starts_over or party.gamma is None else np.asarray(party.gamma)
        done = self.solver.infer(shard.matrix, B, before)
        n, words = shard.matrix.shape[0], float(done.counts.sum())
        sent = {"counts": done.counts.T, "totals": np.array([1.0, n, words]), "bound": np.array([done.bound])}
        return LDAPartyState(done.gamma), Message(sent, float(n))

    def finish(self, server: LDAServerState, aggregate: Message) -> tuple[LDAServerState, Message]:
        parties, documents, words = (float(value) for value in aggregate["totals"])
        is_full = round(parties) >= server.parties
        known = documents if is_full else server.documents
        scale = 1.0 if is_full else known / max(1.0, documents) if known > 0 else server.parties / max(1.0, parties)
        counts = np.asarray(kernels.of(aggregate["counts"]).to_numpy(aggregate["counts"]), np.float64).T
        fresh = self.prior + scale * np.maximum(counts, 0.0)
        step = 1.0 if is_full else min(1.0, (self.offset + server.rounds + 1) ** -self.decay)
        bound = scale * float(aggregate["bound"][0]) + self._topics_bound(server.totals)
        moved = LDAServerState(
            np.ascontiguousarray(fresh if step == 1.0 else (1 - step) * server.totals + step * fresh),
            server.rounds + 1,
            server.parties,
            known,
            math.exp(min(700.0, -bound / (scale * words))) if words > 0 else math.nan,
        )
        return moved, _model(moved)

    def components(self, server: LDAServerState) -> Array:
        """E[β] = λ / Σ_w λ (k × V): the probability of each word in each topic."""
        return (server.totals / server.totals.sum(axis=0)).T

    def weights(self, server: LDAServerState, matrix: Matrix) -> Array:
        """θ (n × k) of documents under exp E[log β], as in training and in scikit-learn's transform.

        `solver` sees only `components`, which do not contain λ's total counts.
        """
        return self.solver.shares(matrix, expectations(server.totals))

    def metrics(self, server: LDAServerState) -> Mapping[str, float]:
        """exp(−bound / words): the perplexity of the participating documents, under the model they were sent."""
        return {"perplexity": server.perplexity}

    def directions(self, model: Message | None) -> int:
        """Expected word counts are k combinations of documents."""
        return self.rank

    def upload_spec(self, layout: Layout) -> tuple[Mapping[str, ArraySpec], ...]:
        """Expected counts and totals are non-negative; the bound, a logarithm, may be negative."""
        shape = (self.rank, layout.n_features)
        counts = ArraySpec(shape, non_negative=True, meaning="Σ_d count_dw φ_dwl: expected counts of words by topic")
        totals = ArraySpec((3,), non_negative=True, meaning="1, documents and words of the party")
        bound = ArraySpec((1,), meaning="the documents' terms of the bound")
        return ({"counts": counts, "totals": totals, "bound": bound},)

    def _topics_bound(self, totals: np.ndarray) -> float:
        """E_q[log p(β | η) − log q(β | λ)]."""
        sums = totals.sum(axis=0)
        expected = psi(totals) - psi(sums)
        each = (self.prior - totals) * expected + gammaln(totals) - gammaln(self.prior)
        V, k = totals.shape
        return float(each.sum() + k * gammaln(V * self.prior) - gammaln(sums).sum())


def _model(server: LDAServerState) -> Message:
    return Message({"H": expectations(server.totals).T})


@method("fedlda", rounds=50, only_texts=True, constant_sums=True, texts=TopicConfig(50, "lda"))
def fedlda(problem: Problem) -> FederatedLDA:
    """Latent Dirichlet allocation: parties infer the topics of their documents and send expected word counts.

    Hoffman, Blei & Bach (2010). The total number of documents is counted in rounds of all parties. Sent per round and
    party: expected counts of words by topic (k × V), numbers of documents and words, and one term of the bound. Never
    sent: X_p, γ_p. Summed over topics, expected counts are the party's word counts; only secure aggregation hides them.
    """
    return FederatedLDA(problem.rank)
