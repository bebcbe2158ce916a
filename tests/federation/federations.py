"""What the tests of federations share: small data, sites in folders, and runs of them in and out of process."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from partsong.core.interfaces import Schedule, Shard
from partsong.core.streams import key, stream
from partsong.data.conversion import as_matrix
from partsong.engines.local import Sequential
from partsong.federation.experiment import Experiment
from partsong.federation.policy import Policy
from partsong.federation.server.launch import run_experiment
from partsong.federation.server.state import Journal
from partsong.federation.site.plan import Data, plan_of
from partsong.federation.site.service import Site
from partsong.federation.transports.base import InProcess, Lost, first_come
from partsong.federation.wire import Kind, Request
from partsong.privacy.exposure import Exposure
from partsong.privacy.randomness import InsecureSource

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
    build: object = plan_of
    run: str = "run-1"
    sites: dict = field(default_factory=dict)
    unheard: int | None = None
    exposure: Exposure = Exposure.ROWS  # tables of 16 rows: test_exposure.py is about the limit

    def site(self, name, **changes):
        policy = replace(self.policy, maximum_exposure=self.exposure)
        made = Site(name, self.folder / name, Data(rows_of(name), COLUMNS, secret_of(name)), policy)
        return replace(made, build=self.build, **changes)

    def transport(self):
        return InProcess({name: self.sites.get(name, self.site(name)).answer for name in self.names})

    def plan(self):
        return self.build(self.experiment.told(), len(self.names), None)

    def rounds(self, transport=None, **settings):
        server, transport = self.folder / "server", transport or self.transport()
        return run_experiment(self.experiment, transport, server, self.run, build=self.build, **settings)

    def record(self):
        return Journal(self.folder / "server").load()

    def in_process(self, **changes):
        """The same by the engine that defines the meaning, with the participation that was recorded."""
        plan, record = self.plan(), self.record()
        schedule = Schedule(plan.exchanges, self.experiment.seed, record.absent(), record.silent(), **changes)
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
        return first_come(waiting) if name is None else name if name in waiting else None

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
            name: Lost("cut off") if _about(request) == unheard else replies[name] for name, request in requests.items()
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
    request = Request.read(data)
    return request.party, request.nonce.kind, request.nonce.round


def noisy_plan(told, n_parties, roster):
    """The experiment's plan, with noise that can be drawn again: an openly insecure source, for tests alone."""
    plan = plan_of(told, n_parties, roster)
    return replace(plan, program=replace(plan.program, source=lambda party, count: InsecureSource(1, party, count)))
