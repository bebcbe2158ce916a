"""What the tests of topics in federations share: sites that hold counts of words."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from partsong.core.interfaces import Schedule, Shard
from partsong.core.streams import key
from partsong.data.conversion import as_matrix
from partsong.engines.local import Sequential
from partsong.engines.rounds import sample_participants
from partsong.federation.site.plan import Data
from tests.federation.federations import Federation, secret_of

WORDS = ("apple", "bread", "chess", "dance", "eagle", "flute", "grape", "horse", "jacket", "kettle", "lemon", "maple")
N_DOCUMENTS = 16


def counts_of(name):
    """Two kinds of documents, by their words; the last word is nowhere, and no two sites have the same documents."""
    rng = np.random.default_rng(key(3, "counts", name) % 2**63)
    half = np.arange(len(WORDS)) % 2
    often = np.where(half == np.arange(N_DOCUMENTS)[:, None] % 2, 2.0, 0.2)
    often[:, -1] = 0.0
    return rng.poisson(often).astype(np.int64)


def texts_of(name):
    """Texts with these counts."""
    return [
        " ".join(word for word, count in zip(WORDS, row, strict=True) for _ in range(count)) for row in counts_of(name)
    ]


class Counting(Federation):
    """Sites with counts."""

    def site(self, name, **changes):
        made = Federation.site(self, name)
        return replace(made, data=Data(counts_of(name), WORDS, secret_of(name)), **changes)

    def sequentially(self):
        """The rounds of one process, with the participation that follows from the seed."""
        plan, experiment = self.plan(), self.experiment
        absent = sample_participants(self.names, plan.exchanges, experiment.fraction, experiment.seed)
        shards = [Shard(name, as_matrix(counts_of(name)), secret_of(name)) for name in self.names]
        schedule = Schedule(plan.exchanges, experiment.seed, absent)
        return list(Sequential().run(plan.program, shards, schedule, reduction=plan.reduction))
