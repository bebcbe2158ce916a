"""What the tests of runs over texts share: sites with texts, of which each has words of its own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from partsong.core.interfaces import Schedule, Shard
from partsong.engines.local import Sequential
from partsong.federation.experiment import Experiment
from partsong.federation.policy import Policy
from partsong.federation.server.launch import record_in, run_experiment
from partsong.federation.setup.credentials import SharedKey
from partsong.federation.signing import public_key
from partsong.federation.site.plan import plan_of
from partsong.federation.site.service import Site
from partsong.federation.texts import SUFFIX, Texts, run_key
from partsong.federation.transports.base import InProcess
from partsong.privacy.exposure import Exposure
from partsong.topics.agreement.protocol import agree, secure_sum_for_words
from partsong.topics.agreement.tables import word_shards
from partsong.topics.vocabulary import rows_as_matrix
from tests.federation.federations import NAMES, secret_of

KEY = SharedKey(bytes(range(16)))
SHARED = ("liver", "biopsy", "enzyme", "fibrosis", "portal", "vein", "bile", "duct")
RARE = {"east": "eastbournia", "north": "northumbria", "south": "southamptonia", "west": "westphalia"}
"""A word that one site alone has, in half of its texts."""
WORDS = {"min_documents": 2, "weighting": "counts"}


def texts_of(name, n_texts=24):
    """Common words by turns, and the site's own word in every second text."""
    shift, listed = NAMES.index(name), []
    for number in range(n_texts):
        own = [SHARED[(number + shift + step * (number % 3 + 1)) % len(SHARED)] for step in range(4)]
        listed.append(" ".join([*own, *([RARE[name]] if number % 2 else []), "and the"]))
    return tuple(listed)


@dataclass
class TextFederation:
    """Sites in folders and a server in another; everything but the folders can be thrown away at any time."""

    folder: Path
    experiment: Experiment = field(default_factory=lambda: Experiment("exact", 3, 2, seed=5, words=WORDS))
    names: tuple[str, ...] = NAMES[:3]
    policies: dict = field(default_factory=dict)
    keys: dict = field(default_factory=dict)
    texts: dict = field(default_factory=dict)
    sites: dict = field(default_factory=dict)
    run: str = "run-1"
    unheard: int | None = None
    exposure: Exposure = Exposure.ROWS  # most words are in few texts

    def documents(self, name):
        return self.texts.get(name, texts_of(name))

    def roster(self):
        return {name: public_key(secret_of(name), name) for name in self.names}

    def site(self, name, **changes):
        key = self.keys.get(name, KEY)
        columns, words = (b"", b"") if key is None else (key.key_for("columns"), key.key_for("words"))
        texts = Texts(self.documents(name), words, secret_of(name))
        policy = replace(self.policies.get(name, Policy()), maximum_exposure=self.exposure)
        own = (texts.unread, policy, self.roster(), columns)
        return replace(Site(name, self.folder / name, *own, texts=texts), **changes)

    def transport(self):
        return InProcess({name: self.sites.get(name, self.site(name)).answer for name in self.names})

    def plan(self):
        return plan_of(self.experiment.told(), len(self.names), self.roster())

    def rounds(self, transport=None):
        own = (self.experiment, transport or self.transport(), self.folder / "server", self.run)
        return run_experiment(*own, roster=self.roster(), timeout=60.0)

    def record(self):
        return record_in(self.folder / "server")

    def log(self, name):
        place = self.folder / name / "site.log"
        return place.read_text() if place.exists() else ""

    def vocabulary(self, name):
        return (self.folder / name / "results" / self.run / "vocabulary.txt").read_text().splitlines()

    def agreed_in_process(self):
        """The words as the estimator finds them, with the key of this run."""
        rule, secrets = self.experiment.text_rule, {name: secret_of(name) for name in self.names}
        key = run_key(KEY.key_for("words"), f"{self.run}{SUFFIX}", self.roster())
        shards = word_shards({name: self.documents(name) for name in self.names}, rule.words, key, secrets)
        masks = secure_sum_for_words(len(self.names))
        return agree(shards, Sequential(), rule.rounds, reduction=masks, seed=self.experiment.seed).vocabulary

    def shards_in_process(self):
        weighing = self.experiment.text_rule.weighing(self.agreed_in_process())
        rows = {name: weighing.weighed(weighing.counted(self.documents(name))).rows for name in self.names}
        return [Shard(name, rows_as_matrix(own, "float64"), secret_of(name)) for name, own in rows.items()]

    def in_process(self):
        """The same by the engine that defines the meaning."""
        plan, record = self.plan(), self.record()
        schedule = Schedule(plan.exchanges, self.experiment.seed, record.absent(), record.silent())
        return list(Sequential().run(plan.program, self.shards_in_process(), schedule, reduction=plan.reduction))
