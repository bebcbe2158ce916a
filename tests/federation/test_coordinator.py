"""A federation of sites gives, bit for bit, what one process gives: starts, rounds, and sites that it waits for."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from partsong.core.interfaces import Message
from partsong.errors import (
    FeatureError,
    FileError,
    ParameterError,
    PartyError,
    SiteLost,
    SiteRefused,
    TooFewParties,
    UploadError,
)
from partsong.federation.experiment import Experiment
from partsong.federation.locks import locked
from partsong.federation.policy import Policy
from partsong.federation.server import progress
from partsong.federation.server.launch import has_started, run_experiment
from partsong.federation.server.progress import JsonLines, ReportingTransport, append_line
from partsong.federation.server.state import ReleaseCounters
from partsong.federation.site.state import WorkState
from partsong.federation.transports.base import InProcess, NoReply, ask_all
from partsong.federation.wire import Kind, Reply, Request, load_state
from partsong.secure_aggregation.protocol import build_roster
from tests.federation.helpers import NAMES, Federation, Killed, assert_same, model_of, shards_of

METHODS = [
    ("exact", False),
    ("fedavg", False),
    ("fnmf", False),
    ("syn-sd", False),
    ("syn-ssd-uv", False),
    ("game", False),
    ("exact", True),
    ("syn-sd", True),
    ("syn-ssd-u", True),
]


class Unreliable(InProcess):
    """Loses the sites that `is_lost(name, request)` says."""

    def __init__(self, sites, is_lost):
        object.__setattr__(self, "sites", sites)
        object.__setattr__(self, "is_lost", is_lost)

    __slots__ = ("is_lost",)

    def ask(self, requests, timeout):
        kept = {name: data for name, data in requests.items() if not self.is_lost(name, Request.from_bytes(data))}
        return {**InProcess.ask(self, kept, timeout), **{n: NoReply("cut off") for n in requests if n not in kept}}


class Deaf(Unreliable):
    """Does not hear those who `is_lost(name, request)` says, although they have answered."""

    __slots__ = ()

    def ask(self, requests, timeout):
        replies = InProcess.ask(self, requests, timeout)
        lost = {name for name, data in requests.items() if self.is_lost(name, Request.from_bytes(data))}
        return {name: NoReply("cut off") if name in lost else reply for name, reply in replies.items()}


@pytest.mark.parametrize(("method", "masked"), METHODS)
def test_a_federation_is_the_sequential_engine_bit_for_bit(tmp_path, method, masked):
    steps = 2 if method.startswith("syn-ssd") else None
    federation = Federation(tmp_path, Experiment(method, 3, 2, local_steps=steps, secure_aggregation=masked, seed=3))
    rounds = list(federation.rounds())
    assert_same(federation, rounds)
    expected = federation.in_process()
    assert [done.bytes_up for done in rounds] == [done.bytes_up for done in expected]
    assert [done.bytes_down for done in rounds] == [done.bytes_down for done in expected]
    assert all(not done.checkpoint.parties for done in rounds)


def test_every_site_has_the_model_in_the_end_and_no_reply_any_more(tmp_path):
    federation = Federation(tmp_path, Experiment("exact", 3, 2, secure_aggregation=True))
    *_, last = federation.rounds()
    for name in federation.names:
        folder = tmp_path / name / "runs" / "run-1"
        model = load_state(folder / "model", Message)
        assert np.array_equal(model["H"], last.model["H"])
        assert sorted(path.name for path in folder.iterdir()) == ["model", "start", "tally", "work-1-0"]


def test_the_server_s_checkpoint_has_no_state_of_a_party(tmp_path):
    federation = Federation(tmp_path, Experiment("fedavg", 3, 1))
    list(federation.rounds())
    weights = load_state(tmp_path / "east" / "runs" / "run-1" / "work-0-0", WorkState)
    stored = b"".join(path.read_bytes() for path in (tmp_path / "server").iterdir())
    assert np.ascontiguousarray(weights.state.W)[:2].tobytes() not in stored


@pytest.mark.parametrize("masked", [False, True])
def test_a_site_that_misses_a_round_is_left_out_of_it_and_comes_back(tmp_path, masked):
    federation = Federation(
        tmp_path, Experiment("fedavg", 3, 3, secure_aggregation=masked, on_party_error="skip"), NAMES
    )

    def is_lost(name, request):
        return name == "north" and request.nonce.kind is Kind.WORK and request.nonce.round == 1

    rounds = list(federation.rounds(Unreliable(federation.transport().sites, is_lost)))
    assert [("north" in done.participants, "north" in done.refused) for done in rounds] == [
        (True, False),
        (False, True),
        (True, False),
    ]
    assert federation.record().absent() == {1: frozenset({"north"})}
    assert_same(federation, rounds)


@pytest.mark.parametrize("transport", [Unreliable, Deaf])
@pytest.mark.parametrize(("index", "phase"), [(0, 1), (0, 2), (0, 3), (1, 3)])
def test_a_site_that_falls_silent_in_a_masked_sum_is_silent_in_process_too(tmp_path, index, phase, transport):
    federation = Federation(tmp_path, Experiment("fedavg", 3, 3, secure_aggregation=True, on_party_error="skip"), NAMES)

    def is_lost(name, request):
        return name == "west" and request.nonce.round == index and request.nonce.phase >= phase

    rounds = list(federation.rounds(transport(federation.transport().sites, is_lost)))
    assert federation.record().dropouts() == {index: {"west": phase}}
    assert ("west" in rounds[index].participants) == ("west" not in rounds[index].refused) == (phase == 3)
    assert_same(federation, rounds)


@pytest.mark.parametrize("lost", [(1,), (1, 2), (1, 3), (2,)])
@pytest.mark.parametrize("transport", [Unreliable, Deaf])
def test_a_site_that_is_lost_in_a_batch_drops_out_of_the_sum_and_goes_on_from_its_own_work(tmp_path, transport, lost):
    """No sum is begun anew. Whether the site has worked the server hears when it is back; its upload is in no sum."""
    federation = Federation(tmp_path, Experiment("fedavg", 3, 5, secure_aggregation=True, on_party_error="skip"), NAMES)

    def is_lost(name, request):
        return name == "north" and request.nonce.kind is Kind.WORK and request.nonce.round in lost

    rounds = list(federation.rounds(transport(federation.transport().sites, is_lost)))
    assert [index for index, done in enumerate(rounds) if "north" not in done.participants] == list(lost)
    assert_same(federation, rounds)
    record = federation.record()
    if transport is Unreliable:
        assert record.absent() == dict.fromkeys(lost, frozenset({"north"}))
    else:
        assert record.dropouts() == {index: {"north": 0} for index in lost}
    for name in federation.names:
        attempts = [line["attempt"] for line in federation.site(name).ledger.chain.lines()]
        missed = lost if name == "north" and transport is Unreliable else ()
        assert attempts == [["run-1", index, 0] for index in range(5) if index not in missed]


class Lossy(InProcess):
    """Loses requests and replies of sums at random."""

    __slots__ = ("draw",)

    def __init__(self, sites, draw):
        object.__setattr__(self, "sites", sites)
        object.__setattr__(self, "draw", draw)

    def ask(self, requests, timeout):
        return {name: self.asked(name, data, timeout) for name, data in requests.items()}

    def asked(self, name, data, timeout):
        is_in_sum = Request.from_bytes(data).nonce.kind in (Kind.WORK, Kind.REDUCE)
        if is_in_sum and self.draw.random() < 0.05:
            return NoReply("cut off before")
        reply = InProcess.ask(self, {name: data}, timeout)[name]
        return NoReply("cut off after") if is_in_sum and self.draw.random() < 0.05 else reply


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_lost_and_whenever_the_server_stops_masked_runs_end_with_the_bits_of_one_process(tmp_path, seed):
    experiment = Experiment("fedavg", 3, 8, local_steps=1, secure_aggregation=True, seed=seed, on_party_error="skip")
    federation, draw, rounds = Federation(tmp_path, experiment, (*NAMES, "centre")), random.Random(seed), {}
    while len(rounds) < 8:
        with contextlib.suppress(TooFewParties):
            for done in federation.rounds(Lossy(federation.transport().sites, draw)):
                rounds[done.index] = done
                if draw.random() < 0.2:
                    break
    assert_same(federation, rounds.values())


def test_a_masked_sum_takes_two_exchanges_after_a_set_up_of_two(tmp_path):
    """One set-up for all rounds, and one more for a site that was not in it."""
    federation, asked = (
        Federation(tmp_path, Experiment("fedavg", 3, 6, secure_aggregation=True, on_party_error="skip"), NAMES),
        [],
    )

    def is_lost(name, request):
        if request.nonce.kind in (Kind.WORK, Kind.REDUCE):
            asked.append((name, request.nonce.round, str(request.nonce.kind), request.nonce.phase))
        return False

    transport = Unreliable(federation.transport().sites, is_lost)
    assert_same(federation, list(federation.rounds(transport, absent={1: {"west"}, 2: {"west"}, 3: {"east"}})))
    inside, whole = [("work", 2), ("reduce", 3)], [("work", 0), ("reduce", 1), ("reduce", 2), ("reduce", 3)]
    exchanges = [[told[2:] for told in asked if told[:2] == ("north", index)] for index in range(6)]
    assert exchanges == [whole, *[inside] * 5]
    asked.clear()
    later = replace(federation, folder=tmp_path / "later")
    transport = Unreliable(later.transport().sites, is_lost)
    assert_same(later, list(later.rounds(transport, absent={0: {"west"}, 1: {"west"}})))
    exchanges = [[told[2:] for told in asked if told[:2] == ("north", index)] for index in range(6)]
    assert exchanges == [whole, inside, whole, *[inside] * 3]


def test_who_was_heard_in_a_phase_stays_decided_when_the_server_is_killed(tmp_path):
    """Others have been told who is in the sum: a site that comes back meanwhile stays out of it."""
    federation = Federation(tmp_path, Experiment("fedavg", 3, 2, secure_aggregation=True, on_party_error="skip"), NAMES)

    def is_lost(name, request):
        if request.nonce.phase == 2:
            raise Killed
        return name == "west" and request.nonce.phase == 1

    with pytest.raises(Killed):
        list(federation.rounds(Unreliable(federation.transport().sites, is_lost)))
    rounds = list(federation.rounds())
    assert federation.record().dropouts() == {0: {"west": 1}}
    assert "cut off" in rounds[0].refused["west"], "the reason is on the disk with the answers of the others"
    assert_same(federation, rounds)


def test_too_few_for_a_masked_sum_stops_before_anything_is_sent_and_can_be_resumed(tmp_path):
    federation = Federation(tmp_path, Experiment("exact", 3, 2, secure_aggregation=True, on_party_error="skip"))

    def is_lost(name, request):
        return name == "north" and request.nonce.round == 1

    rounds = federation.rounds(Unreliable(federation.transport().sites, is_lost))
    next(rounds)
    with pytest.raises(TooFewParties, match=r"phase 2 \(masked upload\): 2 of 3 .*'north'") as caught:
        next(rounds)
    assert "1 of 3 sites were left out: 'north' (Site 'north' did not reply in round 1: " in str(caught.value)
    done = list(federation.rounds())
    assert len(done) == 1
    assert_same(federation, done)


@pytest.mark.parametrize(("minimum", "kind"), [(3, TooFewParties), (4, PartyError)])
def test_where_too_few_are_left_it_is_told_how_many_and_who_was_left_out_and_why(tmp_path, minimum, kind):
    """By the reduction before anybody is asked again, or by the policies of those who are."""
    names, policy = NAMES[:minimum], Policy(minimum_parties=minimum)
    federation = Federation(
        tmp_path, Experiment("exact", 3, 2, secure_aggregation=True, on_party_error="skip"), names, policy
    )

    def is_lost(name, request):
        return name == "north" and request.nonce.kind is Kind.WORK

    with pytest.raises(kind) as caught:
        list(federation.rounds(Unreliable(federation.transport().sites, is_lost)))
    said = " ".join((str(caught.value), *getattr(caught.value, "__notes__", ())))
    assert f"1 of {minimum} sites were left out: 'north' (Site 'north' did not reply in round 0: cut off)." in said
    assert ("needs at least 3 sites, and has 2 (east, south)" if minimum == 3 else "all 3 are faulty") in said


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("phase", [2, 3])
def test_without_leaving_out_a_lost_site_stops_the_run_which_resumes_to_the_same_bits(tmp_path, masked, phase):
    federation = Federation(tmp_path, Experiment("exact", 3, 3, secure_aggregation=masked))

    def is_lost(name, request):
        return name == "south" and request.nonce.round == 1 and request.nonce.phase == phase * masked

    rounds = federation.rounds(Unreliable(federation.transport().sites, is_lost))
    first = next(rounds)
    with pytest.raises(SiteLost, match="south") as caught:
        next(rounds)
    assert any("Resume the run" in note for note in caught.value.__notes__)
    assert_same(federation, [first, *federation.rounds()][1:])
    assert federation.record().absent() == {}


@pytest.mark.parametrize(("index", "phase"), [(0, 0), (1, 2), (1, 3)])
def test_a_site_that_spoils_a_sum_can_be_left_out_by_plan(tmp_path, index, phase):
    """With its keys, its upload, or its answer to the list of survivors; then its upload stays in the sum."""
    federation = Federation(tmp_path, Experiment("exact", 3, 2, secure_aggregation=True), NAMES)

    def spoiled(data):
        reply = Reply.from_bytes(federation.site("north").answer(data))
        is_in_sum = reply.nonce.kind in (Kind.WORK, Kind.REDUCE)
        if is_in_sum and (reply.nonce.round, reply.nonce.phase) == (index, phase):
            body = reply.answer.arrays
            reply = replace(reply, answer=Message({**body, "signature": body["signature"][::-1]}, 0.0))
        return reply.to_bytes()

    transport = InProcess({**federation.transport().sites, "north": spoiled})
    with pytest.raises(PartyError, match=r"'north'.*signature"):
        list(federation.rounds(transport))
    with pytest.raises(PartyError, match=r"'north'.*signature"):
        list(federation.rounds(transport))
    done = next(federation.rounds(transport, absent={index: frozenset({"north"})}))
    assert done.participants == (NAMES if phase == 3 else ("east", "south", "west"))
    rounds = [done, *federation.rounds()]
    assert len(rounds) == 2 - index
    assert_same(federation, rounds)


def test_with_a_pinned_roster_the_bits_are_the_same(tmp_path):
    federation = Federation(tmp_path, Experiment("exact", 3, 2, secure_aggregation=True))
    roster = build_roster(shards_of(federation.names))
    federation.sites = {name: federation.site(name, roster=roster) for name in federation.names}
    rounds = list(
        run_experiment(federation.experiment, federation.transport(), tmp_path / "server", "run-1", roster=roster)
    )
    assert_same(federation, rounds)


def test_a_folder_is_used_by_one_server_at_a_time(tmp_path):
    federation = Federation(tmp_path, Experiment("fedavg", 3, 2))
    rounds = federation.rounds()
    next(rounds)
    with pytest.raises(FileError, match="in use"):
        next(federation.rounds())
    rounds.close()
    assert len(list(federation.rounds())) == 1


def test_a_folder_belongs_to_one_run(tmp_path):
    federation = Federation(tmp_path, Experiment("exact", 3, 1))
    list(federation.rounds())
    other = Federation(tmp_path, Experiment("exact", 3, 2))
    with pytest.raises(ParameterError, match="other settings"):
        list(other.rounds())


@pytest.mark.parametrize("method", ["exact", "asyn-sd"])
def test_a_site_that_was_restored_from_an_older_copy_is_noticed_in_another_run(tmp_path, method):
    federation = Federation(tmp_path, Experiment(method, 3, 2, local_steps=2 if method == "asyn-sd" else None))

    def another(seed):
        return replace(federation.experiment, seed=seed)

    shared = {"timeout": 5.0, "serials": tmp_path / "serials.json"}
    list(run_experiment(federation.experiment, federation.transport(), tmp_path / "a", "run-a", **shared))
    shutil.copytree(tmp_path / "north", tmp_path / "copy")
    list(run_experiment(another(1), federation.transport(), tmp_path / "b", "run-b", **shared))
    shutil.rmtree(tmp_path / "north")
    shutil.copytree(tmp_path / "copy", tmp_path / "north")
    with pytest.raises(SiteRefused, match=r"'north'.*'behind'"):
        list(run_experiment(another(2), federation.transport(), tmp_path / "c", "run-c", **shared))
    released = federation.site("east").ledger.serial
    without = replace(another(3), on_party_error="skip")
    rounds = list(run_experiment(without, federation.transport(), tmp_path / "d", "run-d", **shared))
    assert all("north" not in done.participants for done in rounds)
    assert federation.site("east").ledger.serial > released


def test_serials_of_a_federation_only_grow_and_what_is_no_such_file_is_refused(tmp_path):
    serials = ReleaseCounters(tmp_path / "serials.json")
    serials.update({"east": 3, "north": 1})
    serials.update({"east": 2, "south": 5})
    assert serials.load(("east", "south", "west")) == {"east": 3, "south": 5}
    for text in ("", "[]", '{"east": "3"}', '{"east": -1}'):
        serials.path.write_text(text)
        with pytest.raises(FileError, match="from a backup"):
            serials.load(("east",))


class Lying(InProcess):
    """South says something else to hello."""

    __slots__ = ("offer",)

    def __init__(self, sites, offer):
        object.__setattr__(self, "sites", sites)
        object.__setattr__(self, "offer", offer)

    def ask(self, requests, timeout):
        replies = InProcess.ask(self, requests, timeout)
        if "south" in requests and Request.from_bytes(requests["south"]).nonce.kind is Kind.HELLO:
            replies["south"] = replace(Reply.from_bytes(replies["south"]), answer=Message(self.offer)).to_bytes()
        return replies


OFFERS = {
    "nothing": {},
    "no list": {"columns": np.zeros(3, np.uint8)},
    "other numbers": {"columns": np.zeros((3, 16))},
    "one column thrice": {"columns": np.zeros((3, 16), np.uint8)},
    "no column": {"columns": np.zeros((0, 16), np.uint8)},
    "too much": {"columns": np.ones((1, 16), np.uint8), "more": np.ones(3)},
}


@pytest.mark.parametrize("rule", ["same", "common"])
@pytest.mark.parametrize("offer", OFFERS)
def test_a_site_that_says_nonsense_to_hello_is_named_and_can_be_left_out(tmp_path, rule, offer):
    federation = Federation(tmp_path, Experiment("exact", 3, 1, columns=rule, on_party_error="skip"))
    transport = Lying(federation.transport().sites, OFFERS[offer])
    (done,) = run_experiment(federation.experiment, transport, tmp_path / "server", "run-1")
    assert {"east", "north"} <= set(done.participants)
    with pytest.raises(UploadError, match="'south'"):
        list(
            run_experiment(
                replace(federation.experiment, on_party_error="raise", seed=1), transport, tmp_path / "other", "run-2"
            )
        )


@pytest.mark.parametrize("on_party_error", ["raise", "skip"])
def test_a_site_that_shares_no_column_with_others_that_do_is_named_and_can_be_left_out(tmp_path, on_party_error):
    federation = Federation(tmp_path, Experiment("exact", 3, 1, columns="common", on_party_error=on_party_error))
    transport = Lying(federation.transport().sites, {"columns": np.ones((1, 16), np.uint8)})
    rounds = run_experiment(federation.experiment, transport, tmp_path / "server", "run-1")
    if on_party_error == "raise":
        with pytest.raises(FeatureError, match="Without 'south'"):
            list(rounds)
    else:
        (done,) = rounds
        assert {"east", "north"} <= set(done.participants)


@pytest.mark.parametrize("method", ["exact", "asyn-sd"])
@pytest.mark.parametrize("now", [NAMES[:2], NAMES])
def test_a_run_does_not_go_on_with_other_sites(tmp_path, method, now):
    federation = Federation(tmp_path, Experiment(method, 3, 2, local_steps=2 if method == "asyn-sd" else None))
    rounds = run_experiment(federation.experiment, federation.transport(), tmp_path / "server", "run-1", timeout=5.0)
    next(rounds)
    rounds.close()
    federation.names = now
    with pytest.raises(ParameterError, match=r"sites have changed.*(gone: south|new: west)"):
        list(run_experiment(federation.experiment, federation.transport(), tmp_path / "server", "run-1", timeout=5.0))


def test_a_planned_absence_is_as_in_one_process(tmp_path):
    federation = Federation(tmp_path, Experiment("syn-sd", 3, 3))
    rounds = list(federation.rounds(absent={1: frozenset({"east"})}))
    assert [len(done.participants) for done in rounds] == [3, 2, 3]
    assert_same(federation, rounds)
    assert model_of(rounds[0]) != model_of(rounds[1])


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_a_lock_is_given_back_though_a_child_has_its_file_open(tmp_path):
    with locked(tmp_path / "lock", waits=False):
        mine = next(fd for fd in os.listdir("/proc/self/fd") if target_of(fd) == str(tmp_path / "lock"))
        twin = os.dup(int(mine))
    try:
        with locked(tmp_path / "lock", waits=False):
            pass
    finally:
        os.close(twin)


def target_of(descriptor):
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


class Unheard(InProcess):
    """What a site answers to its start is lost."""

    __slots__ = ()

    def ask(self, requests, timeout):
        replies = InProcess.ask(self, requests, timeout)
        is_start = {name: Request.from_bytes(request).nonce.kind is Kind.START for name, request in requests.items()}
        return {name: NoReply("cut off") if name == "west" and is_start[name] else replies[name] for name in replies}


def masked_with(bound):
    return Experiment.from_table(
        {
            "method": "exact",
            "rank": 2,
            "rounds": 2,
            "secure_aggregation": True,
            "on_party_error": "skip",
            "mask_bound": bound,
        }
    )


def test_an_experiment_that_is_written_otherwise_is_started_as_it_was(tmp_path):
    """1e6 and 1000000 are equal, and another text: a site that has begun with the one would refuse the other."""
    first = Federation(tmp_path, masked_with(1e6), NAMES)
    rounds = first.rounds(Unheard(first.transport().sites))
    assert next(rounds).participants == NAMES[:3]
    rounds.close()
    assert [done.participants for done in Federation(tmp_path, masked_with(1000000), NAMES).rounds()] == [NAMES]


def changing_its_mind(site, policy):
    """A site whose policy becomes another one between hello and start."""

    def answer(data):
        return (replace(site, policy=policy) if Request.from_bytes(data).nonce.kind is Kind.START else site).answer(
            data
        )

    return answer


def test_who_has_begun_is_kept_when_another_site_refuses_its_start(tmp_path):
    federation = Federation(tmp_path, Experiment("exact", 2, 2))
    assert not has_started(tmp_path / "server")
    south = changing_its_mind(federation.site("south"), Policy(maximum_runs=0))
    with pytest.raises(SiteRefused, match="'runs'"):
        list(federation.rounds(InProcess({**federation.transport().sites, "south": south})))
    assert federation.record().started == {"east", "north"}
    assert has_started(tmp_path / "server")


@pytest.mark.parametrize("stage", ["hello", "start"])
def test_after_a_refusal_by_policy_nobody_is_sent_to_resume(tmp_path, stage):
    federation, policy = Federation(tmp_path, Experiment("exact", 2, 2)), Policy(maximum_runs=0)
    sites = {
        name: federation.site(name, policy=policy).answer
        if stage == "hello"
        else changing_its_mind(federation.site(name), policy)
        for name in federation.names
    }
    with pytest.raises(SiteRefused, match="'runs'") as caught:
        list(federation.rounds(InProcess(sites)))
    told = " ".join(caught.value.__notes__)
    assert "Change the experiment, or ask the site to update site.toml" in told
    assert "ask the site to update site.toml, then resume" in told
    assert "once the site is back" not in told
    assert not has_started(tmp_path / "server"), "no site has answered a start"
    assert len(list(federation.rounds())) == 2, "it is allowed now"


class Slow:
    """Sites that answer after some seconds of a clock of its own; who has none is away."""

    def __init__(self, clock, after):
        self.clock, self.after, self.out = clock, after, {}

    def names(self):
        return NAMES

    def ask(self, requests, timeout):
        return ask_all(self, requests, timeout)

    def push(self, requests, timeout):
        self.out |= {name: self.clock() + self.after.get(name, 1e9) for name in requests}

    def next_reply(self, timeout):
        if not self.out:
            return None
        name = min(self.out, key=self.out.get)
        if self.out[name] > self.clock() + timeout:
            self.clock.now += timeout
            return None
        self.clock.now = max(self.clock.now, self.out.pop(name))
        return name, name.encode()

    def cancel(self):
        left = dict.fromkeys(self.out, NoReply("away"))
        self.out.clear()
        return left


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def test_who_has_not_answered_is_told_now_and_then(clock):
    told = []
    transport = ReportingTransport(Slow(clock, {"east": 1.0, "south": 12.0}), lambda line: told.append((clock(), line)))
    replies = transport.ask(dict.fromkeys(NAMES, b"?"), 600.0)
    assert replies == {"east": b"east", "south": b"south", "north": NoReply("away"), "west": NoReply("away")}
    assert clock() == 700.0
    assert told[0] == (100.0, {"waiting": [*NAMES], "answered": 0, "of": 4}), "a run that has begun says so"
    assert told[1] == (105.0, {"waiting": ["north", "south", "west"], "answered": 1, "of": 4})
    assert told[2] == (115.0, {"waiting": ["north", "west"], "answered": 2, "of": 4})
    pauses = [later - before for (before, _), (later, _) in pairwise(told)]
    assert pauses == [5.0, 10.0, 20.0, 40.0, 80.0] + [progress.MAX_PAUSE] * 3


def test_who_answers_at_once_is_not_told_of_and_arrivals_have_no_number(clock):
    told = []
    transport = ReportingTransport(Slow(clock, {"east": 1.0}), told.append)
    assert transport.ask({"east": b"?"}, 600.0) == {"east": b"east"}
    told.clear()
    assert transport.ask({"east": b"?"}, 600.0) == {"east": b"east"}
    assert told == []
    transport.push({"north": b"?"}, 600.0)
    assert transport.next_reply(6.0) is None
    assert told == [{"waiting": ["north"]}]
    assert transport.cancel() == {"north": NoReply("away")}
    assert transport.next_reply(6.0) is None
    assert len(told) == 1


def test_a_part_of_a_line_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "waiting.jsonl"
    for part in ('{"wai', '{"waiting": ["east"]}\n{"wai'):
        path.write_text(part)
        append_line(path, {"waiting": ["west"]})
        assert list(JsonLines(path).read_new())[-1] == {"waiting": ["west"]}
