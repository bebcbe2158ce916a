"""Runs over real processes of Flower in which any of them is killed at any moment, and what holds of each then."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import pytest

from partsong.errors import PartsongError
from partsong.federation.chain import Chain
from partsong.federation.commands import demo
from partsong.federation.experiment import Experiment
from partsong.federation.server.state import AsyncRunState, Journal
from partsong.federation.site.plan import build_plan
from partsong.federation.wire import load_state
from partsong.privacy.accounting import Ledger, Release
from partsong.secure_aggregation.protocol import SecureSum
from tests.federation.helpers import noisy_plan
from tests.integration.flower.flower_processes import PATIENCE, PLAIN, SITES, federation, kill, naming

MASKED = ("set-up", "upload", "unmasking")
EPSILON = 8.0
BATCH = SecureSum().batch
"""Sums of a set-up; a run with more has two."""


@dataclass(frozen=True)
class Haunt:
    """A kind of run: texts and numbers of rounds, which runs take in turn; in which stages of a round they are killed
    (none: at any moment); what makes their program in one process; the sites, their policy, and their node. Where the
    server waits for `patience` seconds alone, a site that was killed may stay away for longer, and is left out.
    """

    texts: tuple[str, ...]
    rounds: tuple[int, ...]
    stages: tuple[str, ...] = ()
    build: object = build_plan
    policy: str = "minimum_parties = 3\n"
    node: str | None = None
    names: tuple[str, ...] = SITES
    patience: float | None = None

    def experiment(self, number):
        """Text and rounds of a run."""
        rounds = self.rounds[number % len(self.rounds)]
        return self.texts[number % len(self.texts)].format(rounds=rounds), rounds

    def federation(self, folder):
        """For such runs."""
        return federation(folder, self.names, policy=self.policy, odd=dict.fromkeys(self.names, self.node))


ROUNDS = "rounds = {rounds}\n"
MASKS = PLAIN + ROUNDS + "secure_aggregation = true\nmask_bound = 1e6\n"
NOISE = 'method = "fedavg"\nrank = 3\nseed = 5\nlocal_steps = 2\nsecure_aggregation = true\n' + ROUNDS
PROMISE = f'[privacy]\nunit = "party"\nepsilon = {EPSILON}\n'
ALLOWANCE = '[privacy]\nunit = "party"\nepsilon = 1000.0\ninsecure_noise = true\n'
ARRIVALS = 'method = "asyn-sd"\nrank = 3\nlocal_steps = 3\nseed = 5\n' + ROUNDS

KINDS = {
    "plain": Haunt((PLAIN + ROUNDS,), (4,)),
    "masked": Haunt((MASKS,), (4, BATCH + 2), MASKED),
    "private": Haunt((NOISE + PROMISE,), (6,), MASKED, noisy_plan, "minimum_parties = 3\n" + ALLOWANCE, "seeded"),
    "left out": Haunt((MASKS + 'on_party_error = "skip"\n',), (8,), MASKED, names=demo.NAMES, patience=8.0),
    "asynchronous": Haunt((ARRIVALS + 'on_party_error = "skip"\n', ARRIVALS + 'on_party_error = "raise"\n'), (24,)),
}


class Killer:
    """Kills one process after another, starts again what somebody would start again, and resumes the run."""

    def __init__(self, made, seed, haunt, name="run"):
        self.made, self.haunt, self.name, self.first = made, haunt, name, seed
        self.random, self.killed, self.rounds = random.Random(seed), [], 1

    def runs(self, kills):
        """Runs until there were enough kills; each is held to the laws of its kind."""
        number = self.first
        while len(self.killed) < kills:
            text, self.rounds = self.haunt.experiment(number)
            run, number, rounds = f"{self.name}-{number}", number + 1, self.rounds
            told = self.ended(run, text, kills)
            if self.haunt.patience is None:
                require_unharmed(self.made, run, told, rounds, self.haunt.build)
            else:
                require_recorded(self.made, run, told, rounds)
        return self.killed

    def ended(self, run, text, kills):
        """What is told of a run that is done, however often it has to be resumed; at most so many kills in all."""
        made, again, until = self.made, [], time.monotonic() + 2 * PATIENCE
        limits = [] if self.haunt.patience is None else ["--timeout", str(self.haunt.patience)]
        while time.monotonic() < until:
            made.begin(run, text, *limits, *again)
            again = ["--resume"]
            while made.is_running(run) and len(self.killed) < kills:
                self.strike(run)
            code, told = made.ended(run)
            if code == 0:
                return told
        raise AssertionError(f"The run did not end; killed: {self.killed}")

    def strike(self, run):
        """One of all processes that there are, at a moment of its choice; then the server or node is started again."""
        self.wait_for_the_moment(run)
        victim = self.random.choice(["server", "app", "executor", *self.made.names])
        process, stage, done = self.process(victim, run), self.stage(run), self.made.done(run)
        if process is None or not self.made.is_running(run):
            return
        kill(process)
        self.killed.append((victim, stage, done))
        with (self.made.folder / "kills.log").open("a") as log:
            log.write(f"{time.strftime('%H:%M:%S')} {run}, {done} exchanges done, {stage}: {victim}\n")
        if victim in ("server", "executor"):
            self.made.running.running.pop("server").wait(30)  # it ends when its executor has died
            demo.start_server(self.made.running, self.made.server)
        elif victim in self.made.names:
            self.made.running.running.pop(victim).wait(30)
            time.sleep(self.random.uniform(0.0, 2 * (self.haunt.patience or 0.0)))
            self.made.start_node(victim)

    def wait_for_the_moment(self, run):
        """The stage that was hit least, or after some seconds; now and then exchanges may end first: kills of what is
        only being started could go on for ever.
        """
        made, until = self.made, time.monotonic() + 60.0
        enough = made.done(run) + self.random.choice((0, 0, max(1, self.rounds // 4)))
        while made.done(run) < enough and made.is_running(run) and time.monotonic() < until:
            time.sleep(0.1)
        aim = self.aim(made.done(run))
        if aim is None or self.random.random() < 0.3:
            time.sleep(self.random.uniform(0.0, 6.0))
            return
        until = time.monotonic() + 60.0
        while made.is_running(run) and time.monotonic() < until:
            if self.stage(run) == aim:
                time.sleep(self.random.uniform(0.0, 0.3))
                if self.stage(run) == aim:
                    return
            time.sleep(0.01)

    def aim(self, done):
        """The stage that was hit least in the batch of sums that this exchange is in, or that will begin soon."""
        batch = (done + 4) // BATCH
        is_to_come = done <= batch * BATCH < self.rounds
        hits = [stage for _, stage, at in self.killed if (at + 4) // BATCH == batch]
        left = [stage for stage in self.haunt.stages if stage != "set-up" or is_to_come]
        return min(left, key=hits.count, default=None)

    def stage(self, run):
        """What the server waits for, by its folder."""
        folder = self.made.server.run(run).state
        if not self.haunt.stages or not (folder / "run").exists():
            return "under way" if any((folder / name).exists() for name in ("run", "arrivals")) else "beginning"
        for phase, name in ((2, "unmasking"), (1, "upload"), (0, "set-up")):
            if (folder / f"phase-{phase}").exists():
                return name
        try:
            attempt = Journal(folder).load_attempt(load_state(folder / "attempt", tuple)[0])
        except PartsongError:
            return "between rounds"
        return "upload" if attempt is not None and attempt.first else "set-up"

    def process(self, victim, run):
        if victim == "app":
            return self.made.app(run)
        if victim == "executor":
            found = [one for one, words in naming(self.made.server.path).items() if "flower-superexec" in words]
            return found[0] if found else None
        return self.made.running.running[victim].pid


def require_unharmed(made, run, told, rounds, build=build_plan):
    """Nobody was left out of any round, and each release was charged once."""
    record = require_same(made, run, told, rounds, build)
    assert (told["absent"], told["dropouts"]) == ({}, {})
    for site in made.sites.values():
        assert (site.path / "results" / run).is_dir()
    if isinstance(record, AsyncRunState):
        require_each_arrival_once(made, run, told, record)
        return
    assert made.charged(run) == {name: [(index, 0) for index in range(rounds)] for name in made.names}
    if Experiment.read(made.server.run(run).experiment).promise is not None:
        require_same_epsilon(made, run, record)


def require_recorded(made, run, told, rounds):
    """Whoever was in a sum was charged for it, and for an attempt once."""
    require_same(made, run, told, rounds)
    for name, lines in made.charged(run).items():
        assert len(set(lines)) == len(lines)
        summed = {line["round"] - 1 for line in made.progress(run) if name in line["participants"]}
        assert summed <= {index for index, _ in lines}


def require_same(made, run, told, rounds, build=build_plan):
    """Nothing is lost, one nonce covers one payload, and one process gives the same bits."""
    record = made.record(run)
    exchanges = rounds * (len(made.names) if isinstance(record, AsyncRunState) else 1)
    assert (told["status"], told["rounds"], record.index) == ("done", exchanges, exchanges)
    assert [line["round"] for line in made.progress(run)] == list(range(1, exchanges + 1))
    assert made.is_same(run, build)
    require_one_payload_a_nonce(made, run)
    return record


def require_one_payload_a_nonce(made, run):
    """By the log of each site; a refusal covers nothing."""
    for site in made.sites.values():
        payloads = {}
        for line in Chain(site.opened().audit.path).lines():
            if line["run"] == run and line["refusal"] is None:
                nonce = (line["round"], line["attempt"], line["kind"], line["phase"])
                assert payloads.setdefault(nonce, line["sha256"]) == line["sha256"], (site.site, nonce)


def require_each_arrival_once(made, run, told, record):
    """The order has every piece of a site once, and its ledger too; the last of each may not have been waited for."""
    assert told["arrivals"] == list(record.order)
    assert [line["participants"] for line in made.progress(run)] == [[name] for name in record.order]
    for name, works in made.charged(run).items():
        assert works == [(number, 0) for number in range(len(works))]
        assert len(works) - record.order.count(name) in (0, 1)


def lines_of(site, run):
    """Lines of a run in the ledger of a site."""
    return [line for line in site.opened().ledger.chain.lines() if line.get("attempt", [None])[0] == run]


def require_same_epsilon(made, run, record):
    """What was promised is spent, at each site and by the server's accounts."""
    assert sorted(record.accounts.ledgers) == sorted(made.names)
    for name, site in made.sites.items():
        lines = lines_of(site, run)
        spent = Ledger(tuple((Release.from_json(line["release"]), line["count"]) for line in lines))
        assert spent.costs == record.accounts.ledgers[name].costs
        assert spent.epsilon(1e-5) == pytest.approx(EPSILON, rel=1e-3)
