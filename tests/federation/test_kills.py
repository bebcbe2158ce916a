"""Whoever is killed, and between whichever two writes: the model is the same, and nothing is charged twice."""

from __future__ import annotations

import pytest

from partsong.federation.chain import Chain
from partsong.federation.experiment import Experiment
from partsong.federation.policy import Policy, PrivacyBudget
from tests.federation.federations import NAMES, Federation, Haunted, Killed, Killer, assert_same, noisy_plan

PRIVATE = {"unit": "party", "epsilon": 8.0}


def open_run(folder):
    return Federation(folder, Experiment("fedavg", 3, 2, local_steps=1, seed=1))


def masked_run(folder):
    """A set-up, and a sum without one."""
    return Federation(folder, Experiment("exact", 3, 2, secure_aggregation=True, seed=1))


def unheard_run(folder):
    """A masked upload that has left its site and was never heard, in the middle of a batch."""
    experiment = Experiment("fedavg", 3, 4, local_steps=1, secure_aggregation=True, seed=1, on_party_error="skip")
    return Federation(folder, experiment, NAMES, unheard=1)


def anew_run(folder):
    """Keys that were never heard: the set-up is begun anew without their site, which is in that of the next round."""
    experiment = Experiment("exact", 3, 2, secure_aggregation=True, seed=1, on_party_error="skip")
    return Federation(folder, experiment, NAMES, unheard=0)


def private_run(folder, **settings):
    policy = Policy(privacy=PrivacyBudget(20.0, unit="party", insecure_noise=True))
    experiment = Experiment("fedavg", 3, 2, local_steps=1, seed=1, privacy=PRIVATE, **settings)
    return Federation(folder, experiment, policy=policy, build=noisy_plan)


def private_masked_run(folder):
    return private_run(folder, secure_aggregation=True)


RUNS = {
    "open": open_run,
    "secure_aggregation": masked_run,
    "unheard": unheard_run,
    "anew": anew_run,
    "private": private_run,
    "private and masked": private_masked_run,
}


def ran_to_the_end(federation, killer, victim):
    """All rounds of a run, in which the server is started anew where it was killed."""
    transport, rounds = Haunted(federation, killer, victim), {}
    for _ in range(3):
        try:
            killer.is_awake = victim == "server" and killer.at is not None and killer.count < killer.at
            for done in federation.rounds(transport):
                rounds[done.index] = done
            break
        except Killed:
            transport.deaths.append("server")
    killer.is_awake = False
    return transport, [rounds[index] for index in sorted(rounds)]


def points(monkeypatch, folder, make, victim):
    """How many points there are to be killed at."""
    with monkeypatch.context() as patched:
        killer = Killer(patched, 10**9)
        ran_to_the_end(make(folder), killer, victim)
    return killer.count


def charges(federation, name):
    """Rounds and attempts that a site is charged for: one each, and a second of a round whose set-up is begun anew."""
    attempts = [(index, 0) for index in range(federation.plan().exchanges)]
    is_anew = federation.unheard == 0 and name != "north"
    return sorted([*attempts, *([(0, 1)] if is_anew else [])])


def require_unharmed(federation, deaths, rounds):
    assert deaths
    assert_same(federation, rounds)
    for name in federation.names:
        site = federation.site(name)
        attempts = [line["attempt"] for line in site.ledger.chain.lines()]
        assert attempts == [["run-1", *at] for at in charges(federation, name)]
        if federation.experiment.privacy:
            assert site.ledger.books().spent.costs == federation.record().accounts.ledgers[name].costs
        sent = {}
        for line in _lines(site):
            nonce = (line["run"], line["round"], line["attempt"], line["kind"], line["phase"])
            assert sent.setdefault(nonce, line["sha256"]) == line["sha256"]


def _lines(site):
    return Chain(site.audit.path).lines()


def kill_at_each(monkeypatch, tmp_path, kind, victim, every, first=1):
    make = RUNS[kind]
    total = points(monkeypatch, tmp_path / "counted", make, victim)
    assert total > 20
    for at in range(first, total + 1, every):
        federation = make(tmp_path / f"at-{at}")
        with monkeypatch.context() as patched:
            transport, rounds = ran_to_the_end(federation, Killer(patched, at), victim)
        require_unharmed(federation, transport.deaths, rounds)


@pytest.mark.parametrize(
    ("kind", "victim", "every"),
    [
        ("private", "north", 9),
        ("secure_aggregation", "north", 29),
        ("open", "server", 9),
        ("secure_aggregation", "server", 23),
        ("unheard", "north", 127),
    ],
)
def test_a_kill_between_two_writes_loses_nothing(monkeypatch, tmp_path, kind, victim, every):
    kill_at_each(monkeypatch, tmp_path, kind, victim, every)


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("victim", ["north", "server"])
def test_a_kill_between_any_two_writes_loses_nothing(monkeypatch, tmp_path, kind, victim):
    kill_at_each(monkeypatch, tmp_path, kind, victim, 1)


@pytest.mark.parametrize("make", [private_run, private_masked_run])
def test_the_accounts_of_the_server_are_those_of_the_sites(tmp_path, make):
    federation = make(tmp_path)
    list(federation.rounds())
    accounts = federation.record().accounts
    for name in federation.names:
        assert accounts.ledgers[name].costs == federation.site(name).ledger.books().spent.costs
    assert accounts.epsilon(1e-5) == pytest.approx(8.0, rel=1e-6)
