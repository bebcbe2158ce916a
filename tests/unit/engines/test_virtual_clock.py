"""Laws of asynchronous runs over the virtual clock."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from pairwise_masks import PairwiseMasks

from partsong.aggregation.linear import Mean
from partsong.aggregation.plaintext import PlainReduction
from partsong.aggregation.server_update import Relaxation
from partsong.core.codec import decode, encode
from partsong.core.interfaces import Arrival, Checkpoint, Layout, Message, ProgramBase, Schedule, WorkItem
from partsong.engines.arrivals import async_config, process_arrival
from partsong.engines.local import Sequential
from partsong.engines.virtual_clock import Asynchronous, Durations
from partsong.errors import (
    CompositionError,
    DataError,
    DataTypeError,
    DivergenceError,
    FormatError,
    ParameterError,
    PartyError,
)
from partsong.io.state_file import read_state, write_state
from partsong.methods import build
from partsong.methods.averaging import AveragingPartyState, AveragingServerState, LocalAveraging
from tests.integration.mpi import asynchronous_cases as cases
from tests.integration.mpi.asynchronous_cases import NAMES, PROGRAM, run, shards_of

UNEVEN = Durations(seconds={"p00": 1.0, "p01": 2.5, "p02": 4.0}, jitter=0.3, latency=0.1)
EQUAL = Durations(seconds=dict.fromkeys(NAMES, 1.0))


def assert_same_rounds(rounds, reference):
    """All but the seconds."""
    for done, known in zip(rounds, reference, strict=True):
        assert done.index == known.index
        for name in known.model.arrays:
            assert_array_equal(done.model[name], known.model[name])
        assert done.model.signature == known.model.signature
        assert dict(done.metrics) == dict(known.metrics)
        assert (done.participants, done.bytes_down) == (known.participants, known.bytes_down)
        assert dict(done.bytes_up) == dict(known.bytes_up)
        assert dict(done.refused) == dict(known.refused)
        assert [(name, m.signature) for name, _, m in done.traffic] == [(n, m.signature) for n, _, m in known.traffic]
        assert done.checkpoint.index == known.checkpoint.index
        assert done.checkpoint.parties.keys() == known.checkpoint.parties.keys()
        for name, state in known.checkpoint.parties.items():
            assert_array_equal(getattr(done.checkpoint.parties[name], "W", None), getattr(state, "W", None))


def seconds_of(rounds):
    return [done.seconds for done in rounds]


def senders_of(rounds):
    return [name for done in rounds for name in done.bytes_up]


@dataclass(frozen=True)
class Versions(ProgramBase):
    """The model is its own number; a party sends the number it was sent, and the server keeps all it has heard."""

    rank: int = 1
    aggregation: Mean = Mean()

    def start_party(self, shard, layout):
        return 0

    def start_server(self, layout):
        return (), Message({"version": np.array([0.0])})

    def local(self, shard, party, model):
        return party + 1, Message({"seen": model["version"], "pieces": np.array([float(party)])})

    def finish(self, server, aggregate):
        heard = (*server, (int(aggregate["seen"][0]), int(aggregate["pieces"][0])))
        return heard, Message({"version": np.array([float(len(heard))])})

    def components(self, server):
        return np.zeros((1, 1))

    def metrics(self, server):
        return {}


@pytest.mark.parametrize(
    "program",
    [
        build("fedavg", 4, local_steps=3),
        build("exact", 4, accelerate=True, local_steps=5),
        build("fnmf-local", 4, local_steps=3, align="assignment"),
    ],
    ids=["fedavg", "exact", "fnmf"],
)
@pytest.mark.parametrize("durations", [Durations(), Durations(jitter=0.5, latency=2.0)])
def test_one_party_and_replacement_is_sequential_to_the_bit(program, durations):
    shards = shards_of(NAMES[1:2])
    reference = list(run(Sequential(record=True), program, shards, 6))
    rounds = list(run(Asynchronous(durations, record=True), program, shards, 6))
    assert_same_rounds(rounds, reference)
    assert_same_rounds(
        run(Asynchronous(durations), program, shards, 6, resume=reference[2].checkpoint),
        [replace(done, traffic=()) for done in reference[3:]],
    )


def test_each_upload_was_made_with_the_model_its_party_was_last_sent():
    for durations in (Durations(), EQUAL, UNEVEN, Durations(jitter=1.0)):
        rounds = list(run(Asynchronous(durations), Versions(), shards_of(), 60))
        heard, senders = rounds[-1].checkpoint.server, senders_of(rounds)
        last, pieces = dict.fromkeys(NAMES, -1), Counter()
        for index, (name, (seen, number)) in enumerate(zip(senders, heard, strict=True)):
            assert seen == last[name] + 1, "the model of its own last arrival, or the first of all"
            assert number == pieces[name]
            others = [other for other in senders[seen:index] if other != name]
            before = rounds[index - 1].checkpoint.items if index else {name: WorkItem(Message({}), 0)}
            assert index - before[name].version == len(others) == index - seen, "staleness"
            last[name] = index
            pieces[name] += 1


@pytest.mark.parametrize("durations", [Durations(), UNEVEN])
def test_the_virtual_clock_depends_on_nothing_but_the_settings(durations):
    reference = list(run(Asynchronous(durations), PROGRAM, shards_of()))
    again = list(run(Asynchronous(durations), PROGRAM, shards_of()))
    assert_same_rounds(again, reference)
    turned = replace(durations, seconds=dict(reversed(durations.seconds.items())))
    shuffled = random.Random(1).sample(shards_of(), 3)
    slow = cases.Slow(PROGRAM, (("p00", 0.02), ("p02", 0.0)))
    for rounds in (again, list(run(Asynchronous(turned), slow, shuffled))):
        assert_same_rounds(rounds, reference)
        assert seconds_of(rounds) == seconds_of(reference)
        assert rounds[-1].checkpoint.clock == reference[-1].checkpoint.clock


def test_ties_are_ordered_by_name():
    for shards in (shards_of(), shards_of()[::-1]):
        rounds = list(run(Asynchronous(EQUAL), PROGRAM, shards, 9))
        assert senders_of(rounds) == [*NAMES] * 3
        assert seconds_of(rounds) == [1.0, 0.0, 0.0] * 3


def test_arrivals_are_in_proportion_to_speed():
    durations = Durations(seconds={"p00": 1.0, "p01": 1.0, "p02": 1.0}, stragglers={"p02": 4.0})
    rounds = list(run(Asynchronous(durations), Versions(), shards_of(), 90))
    assert rounds[-1].checkpoint.clock == 40
    assert Counter(senders_of(rounds)) == {"p00": 40, "p01": 40, "p02": 10}
    by_rows = list(run(Asynchronous(), Versions(), shards_of(), 200))
    rows = {shard.name: shard.matrix.shape[0] for shard in shards_of()}
    clock = by_rows[-1].checkpoint.clock
    assert all(abs(count - clock / rows[name]) <= 1 for name, count in Counter(senders_of(by_rows)).items())


def test_arrivals_come_when_they_are_due_and_seconds_add_up_to_the_clock():
    rounds = list(run(Asynchronous(UNEVEN), Versions(), shards_of(), 50))
    due, number = {}, dict.fromkeys(NAMES, 0)
    shards = {shard.name: shard for shard in shards_of()}
    for name in NAMES:
        due[name] = UNEVEN.duration(shards[name], 0, 3)
    for done, clock in zip(rounds, accumulate(seconds_of(rounds)), strict=True):
        (name,) = done.participants
        assert due[name] == min(due.values()) == done.checkpoint.clock
        assert_allclose(clock, done.checkpoint.clock, rtol=1e-12)
        number[name] += 1
        due[name] += UNEVEN.duration(shards[name], number[name], 3)


def test_jitter_is_a_stream_of_seed_party_and_piece():
    durations, (first, second, _) = Durations(jitter=0.2), shards_of()
    draws = np.array([durations.duration(first, i, 3) for i in range(400)]) / first.matrix.shape[0]
    assert len(set(draws)) == 400
    assert_allclose(np.log(draws).std(), 0.2, rtol=0.15)
    assert abs(np.log(draws).mean()) < 0.05
    assert durations.duration(first, 7, 3) == durations.duration(first, 7, 3) != durations.duration(first, 7, 4)
    assert durations.duration(first, 7, 3) / 12 != durations.duration(second, 7, 3) / 15
    assert replace(durations, latency=5.0).duration(first, 7, 3) == durations.duration(first, 7, 3) + 5.0


@pytest.mark.parametrize(("rho", "offset"), [(1.0, 0), (3.0, 0), (1.0, 2)])
def test_relaxation_by_hand(rho, offset):
    program = LocalAveraging(4, steps=3, server_update=Relaxation(rho, offset))
    shards = {shard.name: shard for shard in shards_of()}
    rounds = list(run(Asynchronous(UNEVEN), program, list(shards.values()), 20))
    H = _start(program)
    sent, number = dict.fromkeys(NAMES, (H, 0)), dict.fromkeys(NAMES, 0)
    states = dict.fromkeys(NAMES, AveragingPartyState())
    due = {name: UNEVEN.duration(shards[name], 0, 3) for name in NAMES}
    for index, done in enumerate(rounds):
        name = min(NAMES, key=lambda party: (due[party], party))
        model = Message({"H": sent[name][0], "turn": np.array([sent[name][1], 0])})
        states[name], upload = program.local(shards[name], states[name], model)
        weight = rho / (rho + index + offset)
        H = (1 - weight) * H + weight * upload["H"]
        sent[name], number[name] = (H, index + 1), number[name] + 1
        due[name] += UNEVEN.duration(shards[name], number[name], 3)
        assert done.participants == (name,)
        assert_allclose(done.model["H"], H, rtol=1e-12, atol=1e-14)
    assert all(done.checkpoint.parties.keys() == set(NAMES) for done in rounds)


def _start(program):
    return program.start_server(Layout.of(shards_of(), 3))[1]["H"]


def test_with_weight_one_over_t_the_model_is_the_mean_of_all_uploads():
    program = LocalAveraging(4, steps=3, server_update=Relaxation(1.0, 1))
    rounds = list(run(Asynchronous(UNEVEN, record=True), program, shards_of(), 15))
    uploads = [message["H"] for done in rounds for _, _, message in done.traffic]
    assert_allclose(rounds[-1].model["H"], np.mean([_start(program), *uploads], axis=0), rtol=1e-12, atol=1e-14)


def test_an_asynchronous_run_gets_near_a_synchronous_one():
    program = replace(PROGRAM, server_update=Relaxation(30.0))
    asynchronous = list(run(Asynchronous(UNEVEN), program, shards_of(), 300))
    synchronous = list(run(Sequential(), build("fedavg", 4, local_steps=3), shards_of(), 30))
    error, known = (cases.relative_error(rounds[-1].model["H"]) for rounds in (asynchronous, synchronous))
    assert error < 1.5 * known < 0.1 * cases.relative_error(asynchronous[2].model["H"])


@pytest.mark.parametrize("durations", [Durations(), UNEVEN])
def test_resume_from_any_checkpoint_is_the_uninterrupted_run(durations, tmp_path):
    whole = list(run(Asynchronous(durations), PROGRAM, shards_of(), 10))
    for done in whole[:-1]:
        write_state(tmp_path / "state", done.checkpoint)
        for point in (done.checkpoint, read_state(tmp_path / "state")):
            rest = list(run(Asynchronous(durations), PROGRAM, shards_of(), 10, resume=point))
            assert_same_rounds(rest, whole[done.index + 1 :])
            assert seconds_of(rest) == seconds_of(whole[done.index + 1 :])
    assert not list(run(Asynchronous(durations), PROGRAM, shards_of(), 10, resume=whole[-1].checkpoint))


def test_runs_go_on_from_rounds_to_arrivals_and_back():
    point = list(run(Sequential(), PROGRAM, shards_of(), 3))[-1].checkpoint
    arrivals = list(run(Asynchronous(EQUAL), PROGRAM, shards_of(), 6, resume=point))
    assert [done.index for done in arrivals] == [3, 4, 5]
    assert all(done.checkpoint.items["p02"].model is point.model for done in arrivals[:2])
    back = list(run(Sequential(), PROGRAM, shards_of(), 8, resume=arrivals[-1].checkpoint))
    assert [done.participants for done in back] == [NAMES] * 2
    plain = Checkpoint(*(getattr(arrivals[-1].checkpoint, name) for name in ("index", "parties", "server", "model")))
    assert_same_rounds(back, list(run(Sequential(), PROGRAM, shards_of(), 8, resume=plain)))


def test_parties_join_and_leave_at_a_checkpoint():
    two, three = shards_of(NAMES[:2]), shards_of()
    point = list(run(Asynchronous(), PROGRAM, two, 6))[-1].checkpoint
    joined = list(run(Asynchronous(), PROGRAM, three, 12, resume=point))
    first = next(done for done in joined if done.participants == ("p02",))
    assert sum(seconds_of(joined[: first.index - 5])) == 18, "its rows, from when it was sent the model"
    left = list(run(Asynchronous(), PROGRAM, two, 18, resume=joined[-1].checkpoint))
    assert set(senders_of(left)) == set(NAMES[:2])
    assert all(done.seconds >= 0 for done in left)
    assert left[-1].checkpoint.parties.keys() == set(NAMES), "states of those who have left are kept"


@dataclass(frozen=True)
class Faulty:
    """These parties' pieces fail, from their `after`-th on."""

    inner: object
    who: tuple[str, ...]
    after: int = 0
    error: type = DataError

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def local(self, shard, party, model):
        if shard.name in self.who and party.count >= 3 * self.after:
            raise self.error("row 3 is no good")
        return self.inner.local(shard, party, model)


def test_an_arrival_may_bring_another_piece_than_the_checkpoint_has():
    """A site that was started again meanwhile has a new one."""
    shards = shards_of(NAMES)
    *_, last = run(Asynchronous(), PROGRAM, shards, 3)
    point, name = last.checkpoint, NAMES[0]
    config = async_config(PROGRAM, Schedule(9), Layout.of(shards, 0), PlainReduction(), record=False)
    piece = WorkItem(point.model, point.index, point.items[name].number + 5)
    done, _ = process_arrival(config, None, point, Arrival(name, PartyError("Nothing came of it."), 99.0, piece))
    assert done.checkpoint.items[name].number == piece.number + 1
    assert all(done.checkpoint.items[other] == point.items[other] for other in NAMES[1:])


def test_a_fault_stops_the_run_with_the_party_named():
    rounds = run(Asynchronous(EQUAL), Faulty(PROGRAM, ("p01",), 1), shards_of())
    done = [next(rounds) for _ in range(4)]
    with pytest.raises(DataError, match="row 3") as caught:
        next(rounds)
    assert any("'p01'" in note and "'local'" in note for note in caught.value.__notes__)
    assert any("skip" in note for note in caught.value.__notes__)
    assert senders_of(done) == [*NAMES, "p00"]


def test_a_faulty_party_is_left_out_and_asked_again():
    rounds = list(run(Asynchronous(EQUAL), Faulty(PROGRAM, ("p01",), 1), shards_of(), 12, on_party_error="skip"))
    refused = [done for done in rounds if done.refused]
    assert [done.index for done in refused] == [4, 7, 10]
    for done in refused:
        assert done.participants == ()
        assert dict(done.bytes_up) == {"p01": 0}
        assert dict(done.refused) == {"p01": "row 3 is no good"}
        assert done.model is rounds[done.index - 1].model
        assert done.checkpoint.items["p01"].model is done.model
        assert done.checkpoint.parties["p01"].count == 3
    for done in rounds[:-1]:
        again = run(
            Asynchronous(EQUAL),
            Faulty(PROGRAM, ("p01",), 1),
            shards_of(),
            12,
            resume=done.checkpoint,
            on_party_error="skip",
        )
        assert_same_rounds(again, rounds[done.index + 1 :])


@pytest.mark.parametrize(("error", "kind"), [(DataError, PartyError), (DivergenceError, DivergenceError)])
def test_when_nobodys_latest_piece_was_good_the_run_ends(error, kind):
    program, done = Faulty(PROGRAM, NAMES, 1, error), []
    with pytest.raises(PartyError, match="No party is left in round 5: all 3") as caught:
        done.extend(run(Asynchronous(EQUAL), program, shards_of(), on_party_error="skip"))
    assert type(caught.value) is kind
    assert [bool(one.refused) for one in done] == [False] * 3 + [True] * 2
    with pytest.raises(PartyError, match="No party is left in round 5: all 3"):
        list(run(Asynchronous(EQUAL), program, shards_of(), on_party_error="skip", resume=done[-1].checkpoint))


@dataclass(frozen=True)
class LateStart:
    """p01 cannot start until p00 has been at work."""

    inner: object
    log: list

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def start_party(self, shard, layout):
        if shard.name == "p01" and not self.log:
            raise DataError("not yet")
        return self.inner.start_party(shard, layout)

    def local(self, shard, party, model):
        if party.count:
            self.log.append(shard.name)
        return self.inner.local(shard, party, model)


def test_who_cannot_start_is_asked_again():
    with pytest.raises(DataError, match="not yet"):
        next(run(Asynchronous(EQUAL), LateStart(PROGRAM, []), shards_of()))
    rounds = list(run(Asynchronous(EQUAL), LateStart(PROGRAM, []), shards_of(), 6, on_party_error="skip"))
    assert [done.participants for done in rounds] == [("p00",), (), ("p02",), ("p00",), ("p01",), ("p02",)]
    assert "p01" not in rounds[1].checkpoint.parties


@dataclass(frozen=True)
class BadUpload:
    """p02 sends what is no number."""

    inner: object

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def local(self, shard, party, model):
        party, upload = self.inner.local(shard, party, model)
        if shard.name == "p02":
            upload = Message({"H": upload["H"] * math.nan}, upload.weight)
        return party, upload


def test_uploads_are_held_to_their_form():
    rounds = run(Asynchronous(EQUAL), BadUpload(PROGRAM), shards_of())
    next(rounds), next(rounds)
    with pytest.raises(DivergenceError, match="'p02' sent an invalid upload"):
        next(rounds)
    done = list(run(Asynchronous(EQUAL), BadUpload(PROGRAM), shards_of(), 6, on_party_error="skip"))
    assert [one.participants for one in done] == [("p00",), ("p01",), ()] * 2
    assert done[-1].checkpoint.parties["p02"].W is None, "its state stands still"


class Noisy(PlainReduction):
    """Sends something else than the upload."""

    def client_step(self, phase, state, heard):
        return state, Message({name: array + 1 for name, array in state.arrays.items()}, state.weight)


def in_two_phases():
    reduction = PlainReduction()
    object.__setattr__(reduction, "phases", 2)
    return reduction


def test_what_a_reduction_sends_is_what_is_taken_in():
    shards = shards_of(NAMES[:1])
    plain = next(run(Asynchronous(record=True), build("fedavg", 4, local_steps=10), shards, 1))
    noisy = next(run(Asynchronous(record=True), build("fedavg", 4, local_steps=10), shards, 1, reduction=Noisy()))
    assert_allclose(noisy.model["H"], plain.model["H"] + 1, rtol=1e-14)
    assert_array_equal(noisy.traffic[0][2]["H"], plain.traffic[0][2]["H"] + 1)


@pytest.mark.parametrize(
    ("more", "kind", "words"),
    [
        ({"reduction": PairwiseMasks()}, CompositionError, "uploads one at a time"),
        ({"reduction": in_two_phases()}, CompositionError, "2 exchanges"),
        ({"absent": {1: frozenset({"p00"})}}, ParameterError, "stragglers"),
        ({"dropouts": {1: {"p00": 0}}}, ParameterError, "stragglers"),
        ({"program": build("fnmf-by-sums", 4, sweeps=2)}, CompositionError, "sweeps=1"),
        ({"durations": Durations(seconds={"p00": 1.0})}, ParameterError, "lack the seconds of p01, p02"),
        ({"durations": Durations(stragglers={"p07": 2.0})}, ParameterError, "unknown parties: p07"),
        ({"durations": Durations(jitter=1e6)}, ParameterError, "lower jitter"),
    ],
)
def test_what_cannot_be_asynchronous_is_refused_with_a_way_out(more, kind, words):
    more = {"program": PROGRAM, "durations": Durations(), **more}
    engine, program = Asynchronous(more.pop("durations")), more.pop("program")
    with pytest.raises(kind, match=words):
        next(run(engine, program, shards_of(), **more))


@pytest.mark.parametrize(
    "settings",
    [
        {"seconds": {"p00": 0.0}},
        {"seconds": {"p00": math.nan}},
        {"stragglers": {"p00": -1.0}},
        {"jitter": -0.1},
        {"latency": math.inf},
        {"latency": -1.0},
        {"per_row": 0.0},
    ],
    ids=str,
)
def test_durations_are_positive_and_finite(settings):
    with pytest.raises(ParameterError, match=f"Durations: {next(iter(settings))}"):
        Durations(**settings)


def test_states_travel_without_loss():
    state = AveragingServerState(
        Message({"H": np.eye(3)[:, :2].T, "n": np.array(3)}, 2.5), ((), math.inf, None, "a"), 7
    )
    mixed = {"server": state, 3: (np.float32(0.1), True, np.arange(3, dtype=np.int8))}
    again = decode(encode(mixed))
    assert_array_equal(again["server"].model["H"], state.model["H"])
    assert again["server"].model.weight == 2.5
    assert again["server"].model.signature == state.model.signature
    assert (again["server"].memory, again["server"].round) == (state.memory, 7)
    assert again[3][:2] == (np.float32(0.1), True)
    assert type(again[3][0]) is np.float32
    assert_array_equal(again[3][2], mixed[3][2])
    with pytest.raises(DataTypeError, match=r"value\[1\] is a object, which cannot be stored or sent"):
        encode((1, object()))
    for foreign in ("os.system", "nowhere.thing", "subprocess.popen"):
        forged = bytes(encode(WorkItem(Message({}), 0))).replace(
            b'"asynchronous.work-item"', f'"{foreign}"'.ljust(24).encode()
        )
        with pytest.raises(FormatError, match="has no state"):
            decode(forged)
