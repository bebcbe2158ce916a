"""Runs in which no site waits for another: the recorded order of arrivals says all, whoever is killed, slow or gone."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace

import numpy as np
import pytest

from partsong.core.interfaces import Message, Schedule
from partsong.engines.virtual_clock import Asynchronous, RecordedOrder
from partsong.errors import DivergenceError, FileError, ParameterError, PartyError, SiteLost, SiteRefused
from partsong.federation.chain import Chain
from partsong.federation.experiment import Experiment
from partsong.federation.policy import Policy
from partsong.federation.server import remote_arrivals
from partsong.federation.server.launch import load_run_state, run_experiment, summarize_run
from partsong.federation.server.state import ArrivalsJournal
from partsong.federation.site.plan import build_plan
from partsong.federation.transports.base import InProcess, NoReply, ask_all
from partsong.federation.wire import Kind, Nonce, Reply, Request, load_state
from tests.federation.helpers import Federation, Killed, Killer, by_list, by_seed, model_of, shards_of

METHODS = ("asyn-sd", "asyn-ssd-v")


def federation_of(folder, method="asyn-sd", rounds=3, **settings):
    return Federation(folder, Experiment(method, 3, rounds, local_steps=2, seed=3, **settings))


def sites_of(federation):
    return federation.transport().sites


def arrivals_of(federation, transport=None, **changes):
    """The run, with short pauses; `time_budget` and `tol` are others than the experiment's."""
    ends = {name: changes.pop(name) for name in ("time_budget", "tol") if name in changes}
    federation = replace(federation, experiment=replace(federation.experiment, **ends))
    return federation.rounds(transport or InProcess(sites_of(federation)), **{"pause": 0.0, "timeout": 5.0, **changes})


def record_of(federation):
    return ArrivalsJournal(federation.folder / "server").load()


def replayed(federation, program=None):
    """The same by the engine that defines the meaning, with the order that was recorded."""
    plan, record = federation.plan(), record_of(federation)
    schedule = Schedule(len(record.order), federation.experiment.seed, on_party_error="skip")
    engine = Asynchronous(record.recorded_order())
    return list(engine.run(program or plan.program, shards_of(federation.names), schedule, reduction=plan.reduction))


def assert_replayed(federation, rounds, program=None):
    expected = replayed(federation, program)
    assert [done.bytes_up.keys() for done in expected] == [{name} for name in record_of(federation).order]
    for done in rounds:
        assert model_of(done) == model_of(expected[done.index])
        assert done.participants == expected[done.index].participants
        assert done.bytes_up == expected[done.index].bytes_up
    assert model_of(record_of(federation)) == model_of(expected[-1])


def works_of(federation, name):
    return [line["attempt"] for line in federation.site(name).ledger.chain.lines()]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_is_the_engine_of_one_process_with_the_recorded_order(tmp_path, method, seed):
    federation = federation_of(tmp_path, method)
    rounds = list(arrivals_of(federation, InProcess(sites_of(federation), by_seed(seed))))
    assert [done.index for done in rounds] == list(range(9))
    assert_replayed(federation, rounds)
    order = record_of(federation).order
    for name in federation.names:
        assert works_of(federation, name) == [["run-1", number, 0] for number in range(order.count(name))]
    assert all(not done.checkpoint.parties for done in rounds)


def test_the_order_is_the_one_in_which_sites_were_heard(tmp_path):
    order = ("south", "south", "south", "east", "north", "east")
    federation = federation_of(tmp_path, rounds=2)
    rounds = list(arrivals_of(federation, InProcess(sites_of(federation), by_list(order))))
    assert tuple(done.participants[0] for done in rounds) == order == record_of(federation).order
    assert_replayed(federation, rounds)
    other = federation_of(tmp_path / "other", rounds=2)
    list(arrivals_of(other, InProcess(sites_of(other), by_list(sorted(order)))))
    assert model_of(record_of(other)) != model_of(record_of(federation))


@pytest.mark.parametrize("order", [("east",) * 3, ("south", "north", "south", "east"), ("north", "east", "north") * 2])
def test_one_process_repeats_any_order(order):
    plan, names = build_plan(Experiment("asyn-sd", 2, 3, local_steps=1).to_dict(), 3, None), ("east", "north", "south")
    engine = Asynchronous(RecordedOrder(order=order))
    done = list(engine.run(plan.program, shards_of(names), Schedule(len(order)), reduction=plan.reduction))
    assert tuple(one.participants[0] for one in done) == order
    with pytest.raises(ParameterError, match="unknown parties: south"):
        next(
            Asynchronous(RecordedOrder(order=("south",))).run(
                plan.program, shards_of(names[:2]), Schedule(1), reduction=plan.reduction
            )
        )


def test_run_experiment_runs_it_and_every_site_has_the_model_in_the_end(tmp_path):
    federation = federation_of(tmp_path)
    *_, last = run_experiment(federation.experiment, federation.transport(), tmp_path / "server", "run-1")
    for name in federation.names:
        folder = tmp_path / name / "runs" / "run-1"
        model = load_state(folder / "model", Message)
        assert np.array_equal(model["H"], last.model["H"])
        assert sorted(path.name for path in folder.iterdir()) == ["model", "start", "tally", "work-2-0"]
    assert model_of(load_run_state(tmp_path / "server")) == model_of(last)
    assert sorted(path.name for path in (tmp_path / "server").iterdir() if "model" not in path.name) == [
        "arrivals",
        "lock",
    ]


class Haunted(InProcess):
    """Wakes the killer while `victim` answers (for the server: while nobody does); who was killed is asked again."""

    def __init__(self, federation, killer, victim):
        InProcess.__init__(self, dict.fromkeys(federation.names), by_seed(5))
        for name, value in (("federation", federation), ("killer", killer), ("victim", victim), ("deaths", [])):
            object.__setattr__(self, name, value)

    __slots__ = ("deaths", "federation", "killer", "victim")

    def _ask(self, name, request):
        was_awake = self.killer.is_awake
        try:
            while True:
                self.killer.is_awake = name == self.victim and not self.deaths
                try:
                    return self.federation.site(name).answer(request)
                except Killed:
                    self.deaths.append(name)
        finally:
            self.killer.is_awake = was_awake


def ran_to_the_end(federation, killer, victim):
    """All rounds of a run; where the server was killed, a new one goes on with what is on the disk."""
    rounds, deaths = {}, []
    for _ in range(3):
        transport = Haunted(federation, killer, victim)
        try:
            killer.is_awake = victim == "server" and not deaths
            for done in arrivals_of(federation, transport):
                rounds[done.index] = done
            break
        except Killed:
            deaths.append("server")
        finally:
            killer.is_awake = False
            deaths += transport.deaths
    return deaths, list(rounds.values())


def kill_at_each(monkeypatch, tmp_path, victim, every):
    with monkeypatch.context() as patched:
        counter = Killer(patched, 10**9)
        ran_to_the_end(federation_of(tmp_path / "counted", rounds=2), counter, victim)
    assert counter.count > 20
    for at in range(1, counter.count + 1, every):
        federation = federation_of(tmp_path / f"at-{at}", rounds=2)
        with monkeypatch.context() as patched:
            deaths, rounds = ran_to_the_end(federation, Killer(patched, at), victim)
        assert deaths
        require_unharmed(federation, rounds)


def require_unharmed(federation, rounds):
    assert_replayed(federation, rounds)
    order = record_of(federation).order
    assert len(order) == federation.plan().exchanges
    for name in federation.names:
        works = works_of(federation, name)
        assert works == [["run-1", number, 0] for number in range(len(works))]
        assert len(works) - order.count(name) in (0, 1)
        sent = {}
        for line in Chain(federation.site(name).audit.path).lines():
            nonce = (line["run"], line["round"], line["attempt"], line["kind"], line["phase"])
            assert sent.setdefault(nonce, line["sha256"]) == line["sha256"]


@pytest.mark.parametrize(("victim", "every"), [("north", 29), ("server", 31)])
def test_a_kill_between_two_writes_loses_nothing(monkeypatch, tmp_path, victim, every):
    kill_at_each(monkeypatch, tmp_path, victim, every)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["north", "server"])
def test_a_kill_between_any_two_writes_loses_nothing(monkeypatch, tmp_path, victim):
    kill_at_each(monkeypatch, tmp_path, victim, 1)


class Watched:
    """A program that notes its work, and fails where `fails(name, model)` says so."""

    def __init__(self, program, noted, fails):
        self.program, self.noted, self.fails = program, noted, fails

    def __getattr__(self, name):
        return getattr(self.program, name)

    def local(self, shard, party, model):
        self.noted.append(shard.name)
        if self.fails(shard.name, int(model["turn"][0])):
            raise DivergenceError("Numbers have grown beyond all measure.")
        return self.program.local(shard, party, model)


def watched(federation, fails=lambda name, turn: False):
    noted = []

    def build(told, n_parties, roster):
        plan = build_plan(told, n_parties, roster)
        return replace(plan, program=Watched(plan.program, noted, fails))

    federation.build = build
    return noted


class Forgetful(InProcess):
    """A transport that loses replies of some names after they were made; its server is killed then."""

    __slots__ = ()

    def _ask(self, name, request):
        InProcess._ask(self, name, request)
        if Request.from_bytes(request).nonce == Nonce("run-1", 1, 0, Kind.WORK):
            raise Killed
        return InProcess._ask(self, name, request)


def test_work_that_was_done_but_not_taken_is_sent_again_and_not_done_again(tmp_path):
    federation = federation_of(tmp_path)
    noted = watched(federation)
    with pytest.raises(Killed):
        list(arrivals_of(federation, Forgetful(sites_of(federation), by_seed(1))))
    done = len(record_of(federation).order)
    assert len(noted) == done + 1
    rounds = list(arrivals_of(federation))
    assert len(noted) == 9
    again = [line for name in federation.names for line in Chain(federation.site(name).audit.path).lines()]
    assert [line["round"] for line in again if line["again"] and line["kind"] == "work"].count(1) == 1
    require_unharmed(federation, rounds)


class Absent(InProcess):
    """Nothing is heard of sites while `is_away(name, request)`: they are lost, or stay silent."""

    __slots__ = ("is_away", "is_silent")

    def __init__(self, sites, is_away, *, is_silent=False):
        InProcess.__init__(self, sites)
        object.__setattr__(self, "is_away", is_away)
        object.__setattr__(self, "is_silent", is_silent)

    def next_reply(self, timeout):
        there = tuple(name for name in self.pending if not (self.is_silent and self._is_away(name, self.pending[name])))
        if not there:
            time.sleep(min(timeout, 0.02))
            return None
        return there[0], self._ask(there[0], self.pending.pop(there[0]))

    def _is_away(self, name, request):
        return self.is_away(name, Request.from_bytes(request))

    def _ask(self, name, request):
        return NoReply("cut off") if self._is_away(name, request) else InProcess._ask(self, name, request)


def away_while(federation, name, first, last):
    """Whether a site is away: from one arrival of the run to another."""

    def is_away(asked, request):
        record = record_of(federation)
        return asked == name and record is not None and first <= record.index < last

    return is_away


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_site_that_is_gone_holds_up_nobody_and_goes_on_when_it_is_back(tmp_path, is_silent):
    federation = federation_of(tmp_path, on_party_error="skip", rounds=4)
    transport = Absent(sites_of(federation), away_while(federation, "north", 2, 8), is_silent=is_silent)
    rounds = list(arrivals_of(federation, transport))
    order = record_of(federation).order
    assert "north" not in order[2:8]
    assert "north" in order[8:]
    assert record_of(federation).faults == {}
    require_unharmed(federation, rounds)


def test_one_site_that_is_there_is_enough(tmp_path):
    federation = federation_of(tmp_path, on_party_error="skip", rounds=4)
    transport = Absent(
        sites_of(federation), lambda name, request: name != "east" and request.nonce.kind is Kind.WORK, is_silent=True
    )
    rounds = list(arrivals_of(federation, transport, timeout=0.02))
    assert record_of(federation).order == ("east",) * 12
    assert rounds[-1].refused.keys() == {"north", "south"}
    assert_replayed(federation, rounds)


@pytest.mark.parametrize("is_silent", [True, False])
def test_without_leaving_out_a_lost_site_stops_the_run_which_resumes(tmp_path, is_silent):
    federation = federation_of(tmp_path, rounds=10)
    transport = Absent(sites_of(federation), away_while(federation, "north", 2, 99), is_silent=is_silent)
    with pytest.raises(SiteLost, match="north") as caught:
        list(arrivals_of(federation, transport, timeout=0.02))
    assert any("Resume the run" in note for note in caught.value.__notes__)
    before = record_of(federation).order
    rounds = list(arrivals_of(federation))
    assert record_of(federation).order[: len(before)] == before
    require_unharmed(federation, rounds)


def test_where_nobody_is_left_the_run_stops_and_resumes(tmp_path):
    federation = federation_of(tmp_path, on_party_error="skip")
    transport = Absent(sites_of(federation), lambda name, request: request.nonce.round == 1, is_silent=True)
    with pytest.raises(PartyError, match="No party is left"):
        list(arrivals_of(federation, transport, timeout=0.05))
    assert len(record_of(federation).order) == 3
    require_unharmed(federation, list(arrivals_of(federation)))


def test_a_site_that_was_not_there_in_the_beginning_joins(tmp_path):
    federation = federation_of(tmp_path, on_party_error="skip")

    def is_away(name, request):
        record = record_of(federation)
        return name == "north" and (record is None or record.index < 4)

    class Slow(Absent):
        __slots__ = ()

        def ask(self, requests, timeout):
            asked.extend((name, Request.from_bytes(request).nonce.kind) for name, request in requests.items())
            return {name: self._ask(name, request) for name, request in requests.items()}

    asked = []
    (tmp_path / "serials.json").write_text('{"north": 0}')  # it was heard in another run
    transport = Slow(sites_of(federation), is_away)
    rounds = list(arrivals_of(federation, transport, serials=tmp_path / "serials.json"))
    assert ("north", Kind.HELLO) in asked
    assert ("north", Kind.START) not in asked, "it was waited for, though it had not been heard before"
    assert "north" in record_of(federation).order
    assert "cut off" in rounds[2].refused["north"]
    require_unharmed(federation, rounds)


def test_work_that_comes_to_nothing_is_an_arrival_of_nothing_as_in_one_process(tmp_path):
    federation = federation_of(tmp_path, on_party_error="skip")
    watched(federation, lambda name, turn: name == "north" and turn in (0, 2))
    rounds = list(arrivals_of(federation, InProcess(sites_of(federation), by_seed(3))))
    faults = record_of(federation).faults
    assert faults
    assert all(record_of(federation).order[place] == "north" for place in faults)
    assert [place for place, done in enumerate(rounds) if not done.participants] == list(faults)
    assert "north" in [done.participants[0] for done in rounds if done.participants]
    assert_replayed(federation, rounds)
    strict = federation_of(tmp_path / "strict")
    watched(strict, lambda name, turn: name == "north")
    with pytest.raises(DivergenceError, match="'north'"):
        list(arrivals_of(strict))


def spoiling(federation, name, change):
    """Sites, of which one has its replies to work changed."""

    def answer(data):
        reply = Reply.from_bytes(federation.site(name).answer(data))
        return change(reply).to_bytes() if reply.nonce.kind is Kind.WORK else reply.to_bytes()

    return InProcess({**sites_of(federation), name: answer})


@pytest.mark.parametrize("number", [np.nan, np.inf, -1.0, 1e300])
def test_numbers_that_are_none_do_not_enter_the_model(tmp_path, number):
    federation = federation_of(tmp_path, on_party_error="skip")

    def change(reply):
        spoiled = Message({"H": np.full_like(reply.answer["H"], number)}, reply.answer.weight)
        return replace(reply, answer=spoiled) if reply.nonce.round == 0 else reply

    rounds = list(arrivals_of(federation, spoiling(federation, "north", change)))
    assert list(record_of(federation).faults) == [1]
    assert np.isfinite(rounds[-1].model["H"]).all()
    assert record_of(federation).order.count("north") > 1


class Hasty(InProcess):
    """North is always heard first, if it was asked."""

    __slots__ = ()

    def next_reply(self, timeout):
        if "north" not in self.pending:
            return InProcess.next_reply(self, timeout)
        return "north", self._ask("north", self.pending.pop("north"))


def not_a_number(reply):
    return replace(reply, answer=Message({"H": np.full_like(reply.answer["H"], np.nan)}, reply.answer.weight))


@pytest.mark.parametrize("lies_in", [range(99), range(0, 99, 2)], ids=["always", "every other time"])
def test_work_that_cannot_be_used_uses_up_nothing_of_a_run_and_is_on_record(tmp_path, lies_in):
    federation = federation_of(tmp_path, on_party_error="skip", rounds=4)

    def change(reply):
        return not_a_number(reply) if reply.nonce.round in lies_in else reply

    transport = Hasty(spoiling(federation, "north", change).sites)
    rounds = list(arrivals_of(federation, transport, pause=0.1))
    record = record_of(federation)
    assert sum(bool(done.participants) for done in rounds) == 12
    told = summarize_run(record)
    assert told["faults"] == {"north": len(record.faults)}
    assert told["rounds"] == len(rounds) == 12 + len(record.faults)
    if lies_in == range(99):
        assert record.order.count("north") == len(record.faults) == 3
        assert "NaN" in rounds[-1].refused["north"]


@pytest.mark.parametrize("most", [1000, 8, 7])
def test_pieces_that_came_to_nothing_are_made_good_within_the_rounds_that_a_site_allows(tmp_path, most):
    federation = replace(federation_of(tmp_path, on_party_error="skip", rounds=2), policy=Policy(maximum_rounds=most))

    def change(reply):
        return not_a_number(reply) if reply.nonce.round in (2, 3) else reply

    transport = Absent(
        spoiling(federation, "east", change).sites,
        lambda name, request: name != "east" and request.nonce.kind is Kind.WORK,
    )
    rounds = arrivals_of(federation, transport, pause=30.0)
    if most < 8:
        with pytest.raises(PartyError, match="'rounds'"):
            list(rounds)
    else:
        assert sum(bool(done.participants) for done in rounds) == 6
    assert works_of(federation, "east") == [["run-1", number, 0] for number in range(min(most, 8))]


def test_a_run_in_which_nothing_that_can_be_used_arrives_ends_with_an_error_and_can_go_on(tmp_path):
    federation = federation_of(tmp_path, on_party_error="skip", time_budget=0.2)
    transport = Absent(
        spoiling(federation, "north", not_a_number).sites,
        lambda name, request: name != "north" and request.nonce.kind is Kind.WORK,
        is_silent=True,
    )
    with pytest.raises(PartyError, match=r"No usable upload has arrived.*north: .*NaN.*larger time_budget"):
        list(arrivals_of(federation, transport))
    assert not [name for name in federation.names if (tmp_path / name / "runs" / "run-1" / "model").exists()]
    assert sum(bool(done.participants) for done in arrivals_of(federation, time_budget=60.0)) == 9


def test_a_repeated_reply_is_counted_once(tmp_path):
    federation, kept = federation_of(tmp_path, on_party_error="skip", rounds=4), []

    def change(reply):
        kept.append(reply)
        return kept[0] if len(kept) in (2, 3) else reply

    rounds = list(arrivals_of(federation, spoiling(federation, "north", change)))
    assert len(kept) > 4
    require_unharmed(federation, rounds)


def test_what_a_site_does_not_allow_it_does_not_do_and_others_go_on(tmp_path):
    """All arrivals may be those of one site, and so its policy is about as many."""
    federation = federation_of(tmp_path)
    assert federation.plan().request.rounds == 9
    few = {"policy": Policy(maximum_rounds=8)}
    federation.sites = {"north": federation.site("north", **few)}
    with pytest.raises(SiteRefused, match="'rounds'"):
        list(arrivals_of(federation))
    other = federation_of(tmp_path / "other", on_party_error="skip")
    other.sites = {"north": other.site("north", **few)}
    rounds = list(arrivals_of(other, other.transport()))
    assert len(rounds) == 9
    assert "'rounds'" in rounds[-1].refused["north"]
    assert not works_of(other, "north")
    assert_replayed(other, rounds)


def test_a_site_restored_from_an_older_copy_answers_nothing_and_others_go_on(tmp_path):
    federation = federation_of(tmp_path, on_party_error="skip")
    ledger = tmp_path / "north" / "ledger.jsonl"
    kept = {}
    for done in arrivals_of(federation):
        if done.index == 2:
            kept["older"] = ledger.read_bytes()
        if done.index == 5:
            ledger.write_bytes(kept["older"])
            kept["order"] = record_of(federation).order
    assert "north" not in record_of(federation).order[len(kept["order"]) :]
    assert "'behind'" in done.refused["north"]


def test_a_run_ends_when_its_time_is_spent_or_the_model_moves_no_more(tmp_path):
    timed = federation_of(tmp_path / "timed", rounds=50, time_budget=0.2)
    transport = Absent(sites_of(timed), away_while(timed, "north", 3, 10**6), is_silent=True)
    rounds = list(arrivals_of(timed, transport, timeout=60.0))
    assert 3 <= len(rounds) < 150
    assert_replayed(timed, rounds)
    still = federation_of(tmp_path / "still", rounds=50, tol=0.5)
    rounds = list(arrivals_of(still))
    assert 3 <= len(rounds) < 150
    assert sum(record_of(still).moves) <= 0.5
    assert list(arrivals_of(still)) == []


class Leaving(InProcess):
    """North is lost from the second arrival on; when the run ends, south is at work for a while."""

    __slots__ = ("began",)

    def ask(self, requests, timeout):
        kinds = {Request.from_bytes(request).nonce.kind for request in requests.values()}
        return ask_all(self, requests, timeout) if kinds == {Kind.FINISH} else InProcess.ask(self, requests, timeout)

    def push(self, requests, timeout):
        InProcess.push(self, requests, timeout)
        object.__setattr__(self, "began", time.monotonic())

    def next_reply(self, timeout):
        if all(Request.from_bytes(request).nonce.kind is not Kind.FINISH for request in self.pending.values()):
            name = next(iter(self.pending))
            lost = name == "north" and Request.from_bytes(self.pending[name]).nonce.round > 0
            return (
                (self.pending.pop(name) and (name, NoReply("cut off"))) if lost else InProcess.next_reply(self, timeout)
            )
        dues = {"east": 0.0, "south": 0.3, "north": 60.0}
        name = min(self.pending, key=dues.get)
        wait = self.began + dues[name] - time.monotonic()
        time.sleep(max(0.0, min(wait, timeout)))
        return None if wait > timeout else (name, self._ask(name, self.pending.pop(name)))


def test_who_is_at_work_when_a_run_ends_hears_it_and_who_is_gone_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_arrivals, "FINISH_TIMEOUT", 0.1)
    federation = federation_of(tmp_path, on_party_error="skip", rounds=2)
    rounds = list(arrivals_of(federation, Leaving(sites_of(federation)), timeout=30.0))
    assert "cut off" in rounds[-1].refused["north"]
    models = {name: (tmp_path / name / "runs" / "run-1" / "model").exists() for name in federation.names}
    assert models == {"east": True, "south": True, "north": False}


def test_models_that_nobody_works_with_are_not_kept(tmp_path):
    federation = federation_of(tmp_path, rounds=4)
    for done in arrivals_of(federation, InProcess(sites_of(federation), by_seed(4))):
        kept = {path.name for path in (tmp_path / "server").glob("model-*")}
        versions = {piece.version for piece in record_of(federation).pieces.values()}
        assert kept == {f"model-{version}" for version in versions if version <= done.index}
        assert len(kept) < len(federation.names)


def test_a_folder_belongs_to_one_run(tmp_path):
    federation = federation_of(tmp_path)
    rounds = arrivals_of(federation)
    next(rounds)
    with pytest.raises(FileError, match="in use"):
        next(arrivals_of(federation))
    rounds.close()
    federation.experiment = replace(federation.experiment, rank=2)
    with pytest.raises(ParameterError, match="other settings"):
        next(arrivals_of(federation))
    synchronous = Federation(tmp_path / "synchronous", Experiment("syn-sd", 3, 1))
    list(synchronous.rounds())
    synchronous.experiment = Experiment("asyn-sd", 3, 1)
    with pytest.raises(ParameterError, match="another run"):
        next(arrivals_of(synchronous))
    with pytest.raises(ParameterError, match="asynchronous run"):
        next(run_experiment(Experiment("syn-sd", 3, 1), federation.transport(), tmp_path / "server", "run-1"))


def test_a_site_that_has_lost_its_states_is_started_again(tmp_path):
    federation = federation_of(tmp_path)
    rounds = arrivals_of(federation)
    for _ in range(4):
        next(rounds)
    rounds.close()
    shutil.rmtree(tmp_path / "north" / "runs")
    list(arrivals_of(federation))
    assert len(record_of(federation).order) == 9
    assert len({tuple(work) for work in works_of(federation, "north")}) == len(works_of(federation, "north"))
