"""Settings of a run of a topic model: method, corpus, and everything that its results depend on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from experiments.topics.methods import BAYESIAN, CENTRALISED, MI, OURS, SERVERS, Settings

READINGS = ("after", "before")
"""Test documents are chosen after topics were learned from all documents, or before, so that topics never saw them."""

COUNTS, TFIDF = "counts", "tf-idf"
WORDS = "words"
"""Baseline: a classifier on tf-idf of all words."""


@dataclass(frozen=True, slots=True)
class Run:
    """Settings of one run; `looks`: number of intermediate classifications, `shown`: number of topics to keep.

    Settings that a method does not use have their defaults, so that equal runs have equal records.
    """

    data: str
    method: str
    rank: int
    seed: int
    weighting: str = COUNTS
    reading: str = READINGS[0]
    parties: int = 10
    alpha: float = 1.0
    fraction: float = 0.2
    settings: Settings = field(default_factory=Settings)
    looks: int = 0
    shown: int = 0

    @property
    def key(self) -> str:
        """Identifies the run."""
        return json.dumps(asdict(self), sort_keys=True)


def build_run(data: str, method: str, rank: int, seed: int, settings: Settings | None = None, **more: Any) -> Run:
    """Build a run with only the settings that the method uses."""
    given, plain = settings or Settings(), Settings()
    if method == WORDS:
        rank, more = 50, {**more, "weighting": TFIDF}
    priors = {"topic_prior": given.topic_prior, "word_prior": given.word_prior} if method in BAYESIAN else {}
    if method in ("LDA", "NMF", WORDS):
        given, more = replace(plain, **priors), {**more, "parties": 1, "alpha": 1.0, "looks": 0}
    elif method in ("FedLDA", *OURS):
        given = replace(plain, rounds=given.rounds, **priors)
    else:
        given = replace(given, topic_prior=0.0, word_prior=0.0)
        if not method.endswith(MI):
            free = {name: getattr(plain, name) for name in ("strength", "mi_gradient", "critic", "critic_rate")}
            given = replace(given, **free)
        if method.removesuffix(MI) not in SERVERS or method.startswith("FedAvg"):
            given = replace(given, server_rate=plain.server_rate)
    if method in CENTRALISED:
        more = {**more, "parties": 1, "alpha": 1.0}
    if method in BAYESIAN:
        more["weighting"] = COUNTS
    return Run(data, method, rank, seed, settings=given, **more)


def parse_run(record: Mapping[str, Any]) -> Run:
    """Read the settings of a run from its record."""
    own = {name: record[name] for name in Run.__slots__ if name != "settings"}
    return Run(**own, settings=Settings(**record["settings"]))
