"""What the tests of federations share: small data, sites in folders with rows, counts or texts, and runs of them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from partsong.core.interfaces import Schedule, Shard
from partsong.core.streams import key, stream
from partsong.data.conversion import as_matrix
from partsong.engines.local import Sequential
from partsong.engines.rounds import sample_participants
from partsong.federation.audit_log import AuditLog
from partsong.federation.experiment import Experiment
from partsong.federation.ledger import SiteLedger
from partsong.federation.policy import Policy
from partsong.federation.server.launch import load_run_state, run_experiment
from partsong.federation.server.state import Journal
from partsong.federation.setup.credentials import SharedKey
from partsong.federation.signing import public_key
from partsong.federation.site.plan import SiteData, build_plan
from partsong.federation.site.service import Site
from partsong.federation.texts import SUFFIX, Texts, run_key
from partsong.federation.transports.base import InProcess, NoReply, first_in_first_out
from partsong.federation.wire import Kind, Nonce, Request
from partsong.privacy.exposure import Exposure
from partsong.privacy.randomness import InsecureSource
from partsong.topics.agreement.protocol import agree, secure_sum_for_words
from partsong.topics.agreement.tables import word_shards
from partsong.topics.vocabulary import rows_as_matrix

COLUMNS = tuple(f"gene-{number}" for number in range(12))
NAMES = ("east", "north", "south", "west")


def rows_of(name, rows=16, seed=0):
    """Numbers that can be told from others: no two sites have one in common."""
    rng = np.random.default_rng(key(seed, "rows", name) % 2**63)
    return rng.gamma(0.5, size=(rows, 3)) @ rng.gamma(0.5, size=(3, len(COLUMNS))) + 0.1 * rng.random(
        (rows, len(COLUMNS))
    )


def secret_of(name):
    return key(7, "secret", name)


def shards_of(names):
    return [Shard(name, as_matrix(rows_of(name)), secret_of(name)) for name in names]


@dataclass
class Federation:
    """Sites in folders and a server in another; everything but the folders can be thrown away at any time."""

    folder: Path
    experiment: Experiment
    names: tuple[str, ...] = NAMES[:3]
    policy: Policy = field(default_factory=Policy)
    build: object = build_plan
    run: str = "run-1"
    sites: dict = field(default_factory=dict)
    unheard: int | None = None
    exposure: Exposure = Exposure.ROWS  # tables of 16 rows: test_exposure.py is about the limit

    def site(self, name, **changes):
        policy = replace(self.policy, maximum_exposure=self.exposure)
        made = Site(name, self.folder / name, SiteData(rows_of(name), COLUMNS, secret_of(name)), policy)
        return replace(made, build=self.build, **changes)

    def transport(self):
        return InProcess({name: self.sites.get(name, self.site(name)).answer for name in self.names})

    def plan(self):
        return self.build(self.experiment.to_dict(), len(self.names), None)

    def rounds(self, transport=None, **settings):
        server, transport = self.folder / "server", transport or self.transport()
        return run_experiment(self.experiment, transport, server, self.run, build=self.build, **settings)

    def record(self):
        return Journal(self.folder / "server").load()

    def in_process(self, **changes):
        """The same by the engine that defines the meaning, with the participation that was recorded."""
        plan, record = self.plan(), self.record()
        schedule = Schedule(plan.exchanges, self.experiment.seed, record.absent(), record.dropouts(), **changes)
        return list(Sequential().run(plan.program, shards_of(self.names), schedule, reduction=plan.reduction))


def by_seed(seed):
    """The turns of sites in an order that a seed decides."""
    draw = stream(seed, "turns")
    return lambda waiting: waiting[int(draw.integers(len(waiting)))] if waiting else None


def by_list(names):
    """The turns of sites in this order; after its end as they were asked."""
    left = iter(tuple(names))

    def turn(waiting):
        name = next(left, None)
        return first_in_first_out(waiting) if name is None else name if name in waiting else None

    return turn


def model_of(done):
    return {name: np.asarray(array).tobytes() for name, array in done.model.arrays.items()}


def assert_same(federation, rounds):
    """Bit for bit: each of these rounds, and the model that the server has in the end."""
    expected = federation.in_process()
    for done in rounds:
        assert model_of(done) == model_of(expected[done.index])
        assert done.participants == expected[done.index].participants
    assert model_of(federation.record()) == model_of(expected[-1])


class Killed(BaseException):
    """As a process that is killed: nothing catches it."""


class Killer:
    """Kills at the n-th write to the disk while it is awake: before it, after it, and in the middle of a line."""

    calls = ("fsync", "replace", "ftruncate", "unlink", "write")

    def __init__(self, monkeypatch, at=None):
        self.count, self.at, self.is_awake = 0, at, False
        for name in self.calls:
            monkeypatch.setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name, call):
        def watched(*args, **kwargs):
            self._step()
            if name == "write":
                self._step(lambda: call(args[0], args[1][: len(args[1]) // 2]))
            result = call(*args, **kwargs)
            self._step()
            return result

        return watched

    def _step(self, last=lambda: None):
        if not self.is_awake:
            return
        self.count += 1
        if self.count == self.at:
            self.is_awake = False
            last()
            raise Killed


class Haunted(InProcess):
    """Wakes the killer while `victim` answers (for the server: while nobody does); who was killed is asked again.

    What north answers to the work of the round `federation.unheard` is lost.
    """

    __slots__ = ("deaths", "federation", "killer", "victim")

    def __init__(self, federation, killer, victim):
        object.__setattr__(self, "sites", dict.fromkeys(federation.names))
        for name, value in (("federation", federation), ("killer", killer), ("victim", victim), ("deaths", [])):
            object.__setattr__(self, name, value)

    def ask(self, requests, timeout):
        was_awake, self.killer.is_awake = self.killer.is_awake, False
        replies = {name: self.asked(name, request) for name, request in requests.items()}
        self.killer.is_awake = was_awake
        unheard = ("north", Kind.WORK, self.federation.unheard)
        return {
            name: NoReply("cut off") if _about(request) == unheard else replies[name]
            for name, request in requests.items()
        }

    def asked(self, name, request):
        while True:
            self.killer.is_awake = name == self.victim and not self.deaths
            try:
                return self.federation.site(name).answer(request)
            except Killed:
                self.deaths.append(name)
            finally:
                self.killer.is_awake = False


def _about(data):
    request = Request.from_bytes(data)
    return request.party, request.nonce.kind, request.nonce.round


def noisy_plan(told, n_parties, roster):
    """The experiment's plan, with noise that can be drawn again: an openly insecure source, for tests alone."""
    plan = build_plan(told, n_parties, roster)
    return replace(plan, program=replace(plan.program, source=lambda party, count: InsecureSource(1, party, count)))


TOPIC_WORDS = (
    "apple",
    "bread",
    "chess",
    "dance",
    "eagle",
    "flute",
    "grape",
    "horse",
    "jacket",
    "kettle",
    "lemon",
    "maple",
)
N_DOCUMENTS = 16


def counts_of(name):
    """Two kinds of documents, by their words; the last word is nowhere, and no two sites have the same documents."""
    rng = np.random.default_rng(key(3, "counts", name) % 2**63)
    half = np.arange(len(TOPIC_WORDS)) % 2
    often = np.where(half == np.arange(N_DOCUMENTS)[:, None] % 2, 2.0, 0.2)
    often[:, -1] = 0.0
    return rng.poisson(often).astype(np.int64)


def topic_texts_of(name):
    """Texts with these counts."""
    return [
        " ".join(word for word, count in zip(TOPIC_WORDS, row, strict=True) for _ in range(count))
        for row in counts_of(name)
    ]


class Counting(Federation):
    """Sites with counts."""

    def site(self, name, **changes):
        made = Federation.site(self, name)
        return replace(made, data=SiteData(counts_of(name), TOPIC_WORDS, secret_of(name)), **changes)

    def sequentially(self):
        """The rounds of one process, with the participation that follows from the seed."""
        plan, experiment = self.plan(), self.experiment
        absent = sample_participants(self.names, plan.exchanges, experiment.fraction, experiment.seed)
        shards = [Shard(name, as_matrix(counts_of(name)), secret_of(name)) for name in self.names]
        schedule = Schedule(plan.exchanges, experiment.seed, absent)
        return list(Sequential().run(plan.program, shards, schedule, reduction=plan.reduction))


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
        return build_plan(self.experiment.to_dict(), len(self.names), self.roster())

    def rounds(self, transport=None):
        own = (self.experiment, transport or self.transport(), self.folder / "server", self.run)
        return run_experiment(*own, roster=self.roster(), timeout=60.0)

    def record(self):
        return load_run_state(self.folder / "server")

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
        schedule = Schedule(plan.exchanges, self.experiment.seed, record.absent(), record.dropouts())
        return list(Sequential().run(plan.program, self.shards_in_process(), schedule, reduction=plan.reduction))


def charge(ledger: SiteLedger, release=None, *, place=("", 0, 0), count=1):
    """A charge, as partsong 0.1.0 wrote for releases of which it knew no more; of no run, as a rule."""
    written = None if release is None else release.to_json()
    ledger.chain.append({"attempt": list(place), "digest": "for the test", "count": count, "release": written})


def depart(audit: AuditLog, place, release=None):
    """A message that has left."""
    run, number, attempt = place
    known = {"refusal": None, "again": False, "arrays": [], "bytes": 0, "sha256": None, "clip": None, "epsilon": None}
    noise = None if release is None else release.noise_multiplier
    cost = None if release is None else release.to_json()
    line = {**Nonce(run, number, attempt, Kind.WORK).to_dict(), **known, "noise_multiplier": noise, "release": cost}
    audit._append(line)
