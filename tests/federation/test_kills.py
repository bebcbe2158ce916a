"""A process that is killed between any two writes, and a site that has lost its files: the model stays the same."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from partsong.errors import PartyError, TooFewParties
from partsong.federation.chain import Chain
from partsong.federation.consistency import require_consistent
from partsong.federation.experiment import Experiment
from partsong.federation.policy import Policy, PrivacyBudget
from partsong.federation.server.state import Journal
from partsong.federation.transports.base import InProcess
from partsong.federation.wire import Kind, Request
from tests.federation.helpers import NAMES, Federation, Haunted, Killed, Killer, assert_same, noisy_plan
from tests.federation.test_site import recorded
from tests.federation.test_site_limits import request_of, said

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


def moment_run(folder, mechanism="moment", **settings):
    """Exchanges of different costs, with a budget that covers them once."""
    policy = Policy(privacy=PrivacyBudget(8.0 * (1 + 1e-9), insecure_noise=True))
    asked = {"unit": "row", "epsilon": 8.0, "row_bound": 2.0, "mechanism": mechanism}
    experiment = Experiment("exact", 3, seed=1, privacy=asked, **settings)
    return Federation(folder, experiment, policy=policy, build=noisy_plan)


def masked_moment_run(folder):
    return moment_run(folder, secure_aggregation=True)


def centred_run(folder):
    return moment_run(folder, "centred")


def hybrid_run(folder):
    return moment_run(folder, "hybrid")


def masked_hybrid_run(folder):
    return moment_run(folder, "hybrid", secure_aggregation=True)


RUNS = {
    "open": open_run,
    "secure_aggregation": masked_run,
    "unheard": unheard_run,
    "anew": anew_run,
    "private": private_run,
    "private and masked": private_masked_run,
    "moment": moment_run,
    "moment and masked": masked_moment_run,
    "centred": centred_run,
    "hybrid": hybrid_run,
    "hybrid and masked": masked_hybrid_run,
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
            charged = site.ledger.load().privacy_ledger
            assert charged.costs == federation.record().accounts.ledgers[name].costs
            assert charged.epsilon(1e-5) <= federation.experiment.privacy["epsilon"] * (1 + 1e-9)
            require_consistent(site.ledger, site.audit)
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
        ("moment", "north", 7),
        ("moment and masked", "server", 17),
        ("hybrid", "north", 23),
        ("hybrid", "server", 13),
        ("hybrid and masked", "north", 61),
    ],
)
def test_a_kill_between_two_writes_loses_nothing(monkeypatch, tmp_path, kind, victim, every):
    kill_at_each(monkeypatch, tmp_path, kind, victim, every)


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("victim", ["north", "server"])
def test_a_kill_between_any_two_writes_loses_nothing(monkeypatch, tmp_path, kind, victim):
    kill_at_each(monkeypatch, tmp_path, kind, victim, 1)


@pytest.mark.parametrize("make", [private_run, private_masked_run, centred_run, hybrid_run, masked_hybrid_run])
def test_the_accounts_of_the_server_are_those_of_the_sites(tmp_path, make):
    federation = make(tmp_path)
    list(federation.rounds())
    accounts = federation.record().accounts
    for name in federation.names:
        assert accounts.ledgers[name].costs == federation.site(name).ledger.load().privacy_ledger.costs
    assert accounts.epsilon(1e-5) == pytest.approx(8.0, rel=1e-6)


WITHOUT = tuple(name for name in NAMES if name != "east")


class Cut(InProcess):
    """The server is killed in a phase of a round: before its requests are answered, or before it hears the replies."""

    __slots__ = ("is_answered", "where")

    def __init__(self, sites, where, is_answered):
        InProcess.__init__(self, sites)
        object.__setattr__(self, "where", where)
        object.__setattr__(self, "is_answered", is_answered)

    def ask(self, requests, timeout):
        nonces = [Request.from_bytes(request).nonce for request in requests.values()]
        is_here = any((one.round, one.phase) == self.where and one.kind in ("work", "reduce") for one in nonces)
        replies = InProcess.ask(self, requests, timeout) if self.is_answered or not is_here else {}
        if is_here:
            raise Killed
        return replies


def broken_off(folder, where, is_answered, names=NAMES, **settings):
    """A run that was killed there, at whose site east nothing is left of it."""
    federation = Federation(folder, Experiment("exact", 2, 4, **settings), names)
    with pytest.raises(Killed):
        list(federation.rounds(Cut(federation.transport().sites, where, is_answered)))
    shutil.rmtree(folder / "east" / "runs")
    return federation


@pytest.mark.parametrize(
    ("where", "is_answered", "heard"),
    [
        ((0, 0), True, WITHOUT),
        ((0, 3), False, NAMES),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ((0, 0), False, WITHOUT),
                ((0, 1), True, WITHOUT),
                ((0, 2), False, WITHOUT),
                ((0, 3), True, NAMES),
                ((2, 2), False, WITHOUT),
                ((2, 2), True, WITHOUT),
                ((2, 3), False, NAMES),
            )
        ),
    ],
)
def test_it_is_back_in_the_next_round_under_masks(tmp_path, where, is_answered, heard):
    federation = broken_off(tmp_path, where, is_answered, secure_aggregation=True)
    first, *later = federation.rounds()
    assert (first.index, first.participants) == (where[0], heard)
    assert [done.participants for done in later] == [NAMES] * (3 - where[0])
    record = federation.record()
    assert (dict(record.without_result), record.counted["east"][0]) == ({}, 3)


def test_a_log_that_tells_of_keys_alone_does_not_open_a_round_again(tmp_path):
    """It can be older than the masked upload: site, ledger and server (by its count of releases) take it for whole."""
    federation = Federation(tmp_path, Experiment("exact", 2, 4, secure_aggregation=True))
    asked, site = recorded(federation, 1), federation.site("east")
    lines = list(Chain(site.audit.path).lines())
    keys = next(line["number"] for line in lines if (line["kind"], line["phase"]) == ("work", 0))
    assert ("reduce", 2) in [(line["kind"], line["phase"]) for line in lines[keys:]], "a masked upload has left"
    seen = site.ledger.serial
    site.audit.path.write_bytes(b"".join(site.audit.path.read_bytes().splitlines(keepends=True)[:keys]))
    shutil.rmtree(site.folder / "runs")
    require_consistent(site.ledger, site.audit)
    start, work = (request_of(asked, kind) for kind in (Kind.START, Kind.WORK))
    assert said(site, replace(start, seen=seen)) is None
    for attempt in (0, 1):
        again = replace(work, nonce=replace(work.nonce, attempt=attempt), seen=seen)
        assert said(site, again) == "out-of-step"


@pytest.mark.parametrize("is_answered", [False, True])
def test_it_is_back_in_the_next_round_in_the_open(tmp_path, is_answered):
    federation = broken_off(tmp_path, (1, 0), is_answered)
    assert [done.participants for done in federation.rounds()] == [WITHOUT, NAMES, NAMES]
    assert not federation.record().without_result


def test_of_three_sites_what_the_lost_one_has_sent_ends_the_round(tmp_path):
    federation = broken_off(tmp_path, (2, 3), True, NAMES[:3], secure_aggregation=True)
    assert [done.participants for done in federation.rounds()] == [NAMES[:3]] * 2
    assert not federation.record().without_result


@pytest.mark.parametrize("where", [(2, 2), *(pytest.param(at, marks=pytest.mark.slow) for at in ((0, 0), (0, 1)))])
def test_a_round_that_is_none_without_the_site_says_that_a_new_run_is_needed(tmp_path, where):
    federation = broken_off(tmp_path, where, True, NAMES[:3], secure_aggregation=True)
    with pytest.raises(TooFewParties):
        list(federation.rounds())
    with pytest.raises(TooFewParties, match="start a new run with another name"):
        list(federation.rounds())


def test_a_run_whose_sites_have_all_lost_their_files_goes_on_when_it_is_resumed(tmp_path):
    """Nobody is left in the round: all sites are started again when the run is resumed."""
    federation = Federation(tmp_path, Experiment("exact", 2, 3), NAMES[:2])
    next(rounds := federation.rounds())
    for name in NAMES[:2]:
        shutil.rmtree(tmp_path / name / "runs")
    with pytest.raises(PartyError, match="'not-started'"):
        list(rounds)
    assert [done.index for done in federation.rounds()] == [1, 2]


@pytest.mark.parametrize("phase", [1, 2, 3])
def test_a_server_that_is_killed_once_it_knows_remembers_nothing_of_the_lost_work(tmp_path, monkeypatch, phase):
    """The files go before a phase, and the server after that phase was decided: the round ends by what was written."""
    federation = Federation(tmp_path, Experiment("exact", 2, 4, secure_aggregation=True), NAMES)
    ask, decide = InProcess.ask, Journal.save_answers

    def losing(self, requests, timeout):
        nonces = [Request.from_bytes(request).nonce for request in requests.values()]
        if any((one.round, one.phase, one.kind) == (0, phase, Kind.REDUCE) for one in nonces):
            shutil.rmtree(tmp_path / "east" / "runs", ignore_errors=True)
        return ask(self, requests, timeout)

    def killed(self, attempt, number, *accepted):
        decide(self, attempt, number, *accepted)
        if number == phase:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(InProcess, "ask", losing)
        patched.setattr(Journal, "save_answers", killed)
        with pytest.raises(Killed):
            list(federation.rounds())
    first, *later = federation.rounds()
    assert first.index == 0
    assert [done.participants for done in later] == [NAMES] * 3
    assert federation.record().counted["east"][0] == 3
