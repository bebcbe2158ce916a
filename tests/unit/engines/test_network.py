"""The seam between a round and where its parties are: any Network that keeps its promises gives the same bits.

The network here is one for parties elsewhere, in small: all that crosses it is bytes, the server journals what it may
not forget, each party keeps its own replies, and both may be killed before or after any write.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from pairwise_masks import PairwiseMasks

from partsong.aggregation.plaintext import PlainReduction
from partsong.core.codec import decode, encode
from partsong.core.interfaces import Answers, Layout, Message, Point, Schedule, Shard
from partsong.core.states import state
from partsong.core.streams import key
from partsong.data.conversion import as_matrix
from partsong.engines.local import Parallel, Sequential
from partsong.engines.party import Party, PartyState
from partsong.engines.rounds import run_rounds
from partsong.errors import DataError, PartsongError, PartyError
from partsong.methods import build
from partsong.secure_aggregation.protocol import SecureSum

NAMES = ("p00", "p01", "p02", "p03")
PROGRAMS = {
    "exact": build("exact", 3, local_steps=5, accelerate=True),
    "fedavg": build("fedavg", 3, local_steps=2),
    "by sums": build("fnmf-by-sums", 3, local_steps=2),
}
REDUCTIONS = {"open": PlainReduction(), "pairwise": PairwiseMasks(), "secure_aggregation": SecureSum(bound=1e5)}


class Killed(BaseException):
    """The end of a process."""


@dataclass
class Disk:
    """What outlives a kill; `left` writes are done before the next one is cut off, before or after it."""

    left: float = np.inf
    is_after: bool = False
    writes: int = 0
    files: dict = field(default_factory=dict)

    def write(self, name, value):
        self.writes += 1
        self.left -= 1
        if self.left < 0 and not self.is_after:
            raise Killed
        self.files[name] = value
        if self.left < 0:
            raise Killed

    def read(self, name):
        return self.files.get(name)


@dataclass
class Site:
    """A party behind bytes: an ask that it has answered before gets the bytes of then."""

    party: Party
    disk: Disk
    calls: list

    def answer(self, ask, body, counted):
        name, at = self.party.shard.name, (ask.index, ask.attempt, ask.phase)
        state, replies = self.disk.read(name) or (self.party.start(self.party.set_up(), ask.index), {})
        if at in replies:
            return replies[at]
        ask = replace(ask, message=decode(body))
        if ask.kind == "work" and state.work is not None and state.work.index < ask.index:
            state = self.settled(state, counted)
        if state.work is None and ask.kind == "work":
            state = self.party.do_work(state, ask)
            self.calls.append((name, ask.index))
            self.disk.write(name, (state, replies))
        state, message = self.party.answer(state, ask)
        reply = bytes(encode(message))
        self.disk.write(name, (state, {**replies, at: reply}))
        return reply

    def settled(self, state: PartyState, counted) -> PartyState:
        counts = self.party.shard.name in counted.get(state.work.index, ())
        return self.party.finish_round(self.party.end_sum(state), counts=counts)


class Posted:
    """The server's side: the attempt is written before anybody is asked, an inbox once it was served."""

    def __init__(self, program, shards, schedule, reduction, disk, calls):
        self.layout, self.disk = Layout.of(shards, schedule.seed), disk
        expected = program.upload_spec(self.layout)
        parties = [Party(program, shard, self.layout, reduction, expected) for shard in shards]
        self.sites = {party.shard.name: Site(party, disk, calls) for party in parties}
        self.last = {}

    def running(self):
        return nullcontext()

    def open(self, attempt, first):
        written = self.disk.read("attempt")
        if written is not None and (written.index, written.attempt) >= (attempt.index, attempt.attempt):
            return written
        opened = replace(attempt, first=first(attempt.asked))
        self.disk.write("attempt", opened)
        return opened

    def exchange(self, ask, serve):
        at = ("inbox", ask.index, ask.attempt, ask.phase)
        inbox, faults = self.disk.read(at) or self._asked(ask)
        messages = {name: decode(reply) for name, reply in inbox.items()}
        served = serve(Answers(messages, faults))
        self.disk.write(at, (inbox, faults))
        self.last = messages
        return served

    def _asked(self, ask):
        inbox, faults, body = {}, {}, bytes(encode(ask.message))
        for name in ask.names:
            try:
                reply = self.sites[name].answer(replace(ask, message=None), body, self.disk.read("worked") or {})
            except PartsongError as error:
                if ask.error_note is not None:
                    raise
                faults[name] = error
                continue
            if name not in ask.dropouts:
                inbox[name] = reply
        return inbox, faults

    def sum(self, ask, aggregation):
        return None

    def seen(self):
        return self.last

    def commit(self, after, worked, is_last):
        parcel = bytes(encode((after.server, after.model)))
        known = {**(self.disk.read("worked") or {}), after.index - 1: worked}
        if self.disk.read("point") is None or self.disk.read("point")[0] < after.index:
            self.disk.write("worked", known)
            self.disk.write("point", (after.index, parcel, after.sums, after.cohort))
        return {}

    def point(self):
        """Where the run stands; work of a round that was not committed does not count yet."""
        if self.disk.read("point") is None:
            return None
        index, parcel, sums, cohort = self.disk.read("point")
        server, model = decode(parcel)
        return Point(index, server, model, sums, cohort)

    def states(self):
        worked, found = self.disk.read("worked"), {}
        for name, site in self.sites.items():
            state, _ = self.disk.read(name) or (None, {})
            if state is not None:
                found[name] = (site.settled(state, worked) if state.work is not None else state).program
        return found


def shards_of():
    rng = np.random.default_rng(0)
    H = rng.gamma(0.3, size=(3, 9))
    rows = {name: rng.gamma(0.5, size=(8 + 2 * i, 3)) @ H + 0.02 * rng.random(9) for i, name in enumerate(NAMES)}
    return [Shard(name, as_matrix(rows[name]), key(7, name)) for name in NAMES]


@dataclass(frozen=True)
class Failing:
    """At p01, from its third exchange on."""

    inner: object

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def local(self, shard, party, model):
        state, upload = self.inner.local(shard, getattr(party, "inner", party), model)
        count = getattr(party, "count", 0)
        if shard.name == "p01" and count == 2:
            raise DataError("row 3 is no good")
        return Counted(state, count + 1), upload

    def start_party(self, shard, layout):
        return Counted(self.inner.start_party(shard, layout), 0)


@state("test-network.counted")
@dataclass(frozen=True)
class Counted:
    inner: object
    count: int


def assert_same(rounds, reference):
    by_index = {done.index: done for done in reference}
    for done in rounds:
        known = by_index[done.index]
        assert done.model.signature == known.model.signature
        for name in known.model.arrays:
            assert_array_equal(done.model[name], known.model[name])
        assert dict(done.metrics) == dict(known.metrics)
        assert (done.participants, done.bytes_down) == (known.participants, known.bytes_down)
        assert dict(done.bytes_up) == dict(known.bytes_up)
        assert dict(done.refused) == dict(known.refused)
        assert [(name, phase, m.nbytes) for name, phase, m in done.traffic] == [
            (name, phase, m.nbytes) for name, phase, m in known.traffic
        ]


def setting(name, reduction, case):
    program, more = PROGRAMS[name], {}
    if case == "absent and silent":
        more = {"absent": {0: frozenset({"p03"})}, "dropouts": {2: {"p02": REDUCTIONS[reduction].phases - 1}}}
    if case == "left out":
        program, more = Failing(program), {"on_party_error": "skip"}
    return program, REDUCTIONS[reduction], Schedule(4, 3, **more)


def posted(program, reduction, schedule, disk, calls):
    network = Posted(program, shards_of(), schedule, reduction, disk, calls)
    return network, list(run_rounds(program, network, schedule, reduction, network.point(), record=True))


CASES = [
    (name, reduction, case)
    for name in PROGRAMS
    for reduction in REDUCTIONS
    for case in ("whole", "absent and silent", "left out")
    if not (name == "by sums" and reduction != "open" and case == "absent and silent")  # such a schedule is refused
]


@pytest.mark.parametrize(("name", "reduction", "case"), CASES)
def test_a_network_of_bytes_is_sequential_to_the_bit(name, reduction, case):
    program, masks, schedule = setting(name, reduction, case)
    reference = list(Sequential(record=True).run(program, shards_of(), schedule, reduction=masks))
    calls = []
    network, rounds = posted(program, masks, schedule, Disk(), calls)
    assert_same(rounds, reference)
    assert len(rounds) == len(reference) == 4
    assert len(calls) == len(set(calls)), "one piece of work a round, however often its sum begins"
    assert_same_states(network, reference[-1].checkpoint)


def assert_same_states(network, checkpoint):
    for party, one in network.states().items():
        assert_array_equal(encode(one), encode(checkpoint.parties[party]))


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize(
    ("name", "reduction", "case"),
    [("exact", "open", "left out"), ("fedavg", "secure_aggregation", "left out"), ("by sums", "pairwise", "whole")],
)
def test_a_run_killed_between_any_two_writes_goes_on_to_the_same_bits(name, reduction, case, is_after):
    program, masks, schedule = setting(name, reduction, case)
    reference = list(Sequential(record=True).run(program, shards_of(), schedule, reduction=masks))
    whole = Disk()
    posted(program, masks, schedule, whole, [])
    for left in range(whole.writes):
        disk, calls = Disk(left, is_after), []
        with pytest.raises(Killed):
            posted(program, masks, schedule, disk, calls)
        disk.left = np.inf
        network, rounds = posted(program, masks, schedule, disk, calls)
        assert_same(rounds, reference)
        done = network.point()
        assert done.index == 4
        assert_array_equal(done.model["H"], reference[-1].model["H"])
        assert_same_states(network, reference[-1].checkpoint)


def test_what_serve_refuses_is_not_written():
    """An answer that ends the run must not block it for good: once the party is mended, it is asked again."""

    class Spoiled(PlainReduction):
        def client_step(self, phase, state, heard):
            return state, Message({}) if next(spoiled, False) else state

    program, schedule, disk = PROGRAMS["fedavg"], Schedule(2, 3), Disk()
    spoiled = iter([False, True])
    with pytest.raises(PartyError, match="All parties must run the same program"):
        posted(program, Spoiled(), schedule, disk, [])
    assert disk.read("attempt").index == 0
    assert not [name for name in disk.files if name[0] == "inbox"]
    for name in NAMES:
        disk.files[name] = disk.files[name][0], {}
    _, rounds = posted(program, PlainReduction(), schedule, disk, [])
    reference = list(Sequential(record=True).run(program, shards_of(), schedule, reduction=PlainReduction()))
    assert_same(rounds, reference)
    assert_array_equal(rounds[-1].model["H"], reference[-1].model["H"])


def test_nothing_but_messages_crosses():
    """A party's answers are Messages of an ask's own making: nothing of its state or its rows is in them."""
    program, disk = PROGRAMS["exact"], Disk()
    posted(program, PlainReduction(), Schedule(3, 3), disk, [])
    sent = b"".join(reply for name in NAMES for reply in disk.files[name][1].values())
    for shard in shards_of():
        for row in (*shard.matrix.X, *disk.files[shard.name][0].program.W):
            assert row.tobytes() not in sent


@dataclass(frozen=True)
class Watched:
    """Notes at each `finish` how many uploads are still in memory."""

    inner: object
    uploads: list = field(default_factory=list)
    alive: list = field(default_factory=list)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def local(self, shard, party, model):
        state, upload = self.inner.local(shard, party, model)
        copied = Message({name: np.array(array) for name, array in upload.arrays.items()}, upload.weight)
        self.uploads.extend(weakref.ref(array) for array in copied.arrays.values())
        return state, copied

    def finish(self, server, aggregate):
        self.alive.append(sum(one() is not None for one in self.uploads))
        return self.inner.finish(server, aggregate)


@pytest.mark.parametrize("engine", [Sequential(), Parallel(2)], ids=lambda engine: type(engine).__name__)
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_upload_is_in_memory_while_the_server_finishes(name, engine):
    watched = Watched(PROGRAMS[name])
    for _ in engine.run(watched, shards_of(), Schedule(4, 3), reduction=PlainReduction()):
        pass
    assert watched.alive == [0, 0, 0, 0]
