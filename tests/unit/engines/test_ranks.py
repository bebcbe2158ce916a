"""Laws of the engines over ranks, with ranks in threads: they agree with Sequential, and on what ends a run."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from pairwise_masks import PairwiseMasks

from partsong import errors
from partsong.aggregation.plaintext import PlainReduction
from partsong.core.codec import decode, encode
from partsong.core.interfaces import Message, Reducible, Schedule, Shard
from partsong.core.streams import key
from partsong.data.conversion import as_matrix
from partsong.engines import collective, consistency
from partsong.engines.collective import run_on_all
from partsong.engines.local import Sequential
from partsong.engines.ranks import run_ranks
from partsong.errors import (
    CompositionError,
    DataError,
    DataTypeError,
    FileError,
    ParameterError,
    PartyError,
    TooFewParties,
    UploadError,
)
from partsong.methods import build
from partsong.methods.fedlda import FederatedLDA
from partsong.methods.two_stage import exact_after
from partsong.secure_aggregation.protocol import SecureSum, build_roster

NAMES = ("p00", "p01", "p02", "p03", "p04")
PROGRAMS = {
    "exact": build("exact", 4, local_steps=5),
    "exact accelerated": build("exact", 4, accelerate=True, local_steps=5),
    "fedavg": build("fedavg", 4, local_steps=3),
    "fedavg uniform": build("fedavg", 4, local_steps=3, weighted=False),
    "fedprox": build("fedprox", 4, local_steps=3),
    "fnmf": build("fnmf-local", 4, local_steps=3, align="assignment"),
    "fnmf paper": build("fnmf-local", 4, variant="paper", local_steps=3, align="assignment"),
    "fnmf by sums": build("fnmf-by-sums", 4, local_steps=3),
    "fnmf, then exact": exact_after(build("fnmf-local", 4, local_steps=3, align="assignment"), 2),
    "fedlda": FederatedLDA(4, iterations=20),
}
SUMS = [name for name, program in PROGRAMS.items() if isinstance(program.aggregation, Reducible) and "then" not in name]
REDUCTIONS = {"open": PlainReduction(), "secure_aggregation": PairwiseMasks()}
MASKED = SecureSum(bound=1e5)
SEATS = {"one each": [[0], [1], [2], [3], [4]], "unequal": [[3], [0, 4, 1], [2]], "alone": [[0, 1, 2, 3, 4]]}


class Aborted(Exception):
    pass


@dataclass
class World:
    """Ranks in threads. Every exchange has a number, and all ranks must make the same kind of exchange at it."""

    size: int
    posts: dict = field(default_factory=lambda: defaultdict(dict))
    moved: threading.Condition = field(default_factory=threading.Condition)
    aborted: str = ""
    seen: list = field(default_factory=list)


@dataclass
class Thread:
    """A rank of a world."""

    world: World
    rank: int
    count: int = 0
    device: str = ""

    @property
    def size(self):
        return self.world.size

    def exchange(self, kind, value, timeout=200.0):
        world, number = self.world, self.count
        self.count += 1
        with world.moved:
            world.posts[number][self.rank] = (kind, value)
            world.seen.append((self.rank, kind, value))
            world.moved.notify_all()
            is_done = world.moved.wait_for(lambda: len(world.posts[number]) == world.size or world.aborted, timeout)
            if world.aborted:
                raise Aborted(world.aborted)
            if not is_done:
                return None
            kinds = {kind for kind, _ in world.posts[number].values()}
            assert len(kinds) == 1, f"ranks make different exchanges: {world.posts[number]}"
            return [world.posts[number][rank][1] for rank in range(world.size)]

    def all_gather(self, card, timeout=None):
        shown = self.exchange("all_gather", bytes(card), 200.0 if timeout is None else timeout)
        assert shown is not None or timeout is not None, "a hang"
        assert shown is None or len({len(one) for one in shown}) == 1
        return shown

    def gather(self, parcel, sizes):
        parcels = self.exchange("gather", bytes(parcel))
        assert [len(one) for one in parcels] == list(sizes)
        return parcels if self.rank == 0 else []

    def broadcast(self, parcel, size):
        parcel = self.exchange("broadcast", None if parcel is None else bytes(parcel))[0]
        assert len(parcel) == size
        return parcel

    def sum(self, array):
        addends = self.exchange("sum", array)
        return sum(addends[::-1][1:], addends[-1])

    def abort(self, message):
        with self.world.moved:
            self.world.aborted = message
            self.world.moved.notify_all()


def shards_of(width=16, dtype=float):
    rng = np.random.default_rng(0)
    H = rng.gamma(0.3, size=(4, width))
    rows = {name: rng.gamma(0.5, size=(12 + 3 * i, 4)) @ H + 0.02 * rng.random(width) for i, name in enumerate(NAMES)}
    return [Shard(name, as_matrix(rows[name].astype(dtype)), key(7, name)) for name in NAMES]


def seated(groups, shards=None):
    shards = shards_of() if shards is None else shards
    return [[shards[i] for i in group] for group in groups]


def at_ranks(size, work, world=None):
    """work(communicator) in a thread for each rank: what it returned or raised."""
    world = World(size) if world is None else world
    results = [None] * size

    def serve(rank):
        try:
            results[rank] = work(Thread(world, rank))
        except BaseException as error:
            results[rank] = error

    crew = [threading.Thread(target=serve, args=(rank,), daemon=True, name=f"rank {rank}") for rank in range(size)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join(240)
        assert not thread.is_alive(), "a rank hangs"
    return results


def run(
    program,
    groups,
    rounds=4,
    reduction=PlainReduction(),
    reduce="in order",
    resume=None,
    shards=None,
    world=None,
    **more,
):
    """The rounds at every rank."""
    seats, schedule = seated(groups, shards), Schedule(rounds, 3, **more)

    def work(communicator):
        point = None if resume is None else resume[communicator.rank]
        own = seats[communicator.rank]
        return list(run_ranks(communicator, program, own, schedule, reduction, point, reduce, record=True))

    return at_ranks(len(groups), work, world)


def sequential(program, rounds=4, reduction=PlainReduction(), shards=None, **more):
    shards = shards_of() if shards is None else shards
    return list(Sequential(record=True).run(program, shards, Schedule(rounds, 3, **more), reduction=reduction))


def assert_same_rounds(rounds, reference):
    for done, known in zip(rounds, reference, strict=True):
        assert done.index == known.index
        assert done.model.signature == known.model.signature
        for name in known.model.arrays:
            assert_array_equal(done.model[name], known.model[name])
        assert dict(done.metrics) == dict(known.metrics)
        assert done.participants == known.participants
        assert dict(done.bytes_up) == dict(known.bytes_up)
        assert done.bytes_down == known.bytes_down
        assert dict(done.refused) == dict(known.refused)


@pytest.mark.parametrize("seats", SEATS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_on_any_ranks_is_sequential_to_the_bit(name, seats):
    reference = sequential(PROGRAMS[name])
    for rank, rounds in enumerate(run(PROGRAMS[name], SEATS[seats])):
        assert_same_rounds(rounds, reference)
        own = {NAMES[i] for i in SEATS[seats][rank]}
        assert set(rounds[-1].checkpoint.parties) == own
        traffic = {(party, phase): m for party, phase, m in rounds[-1].traffic}
        assert set(traffic) == {(party, 0) for party in (NAMES if rank == 0 else own)}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", SUMS)
def test_an_all_reduce_is_sequential_to_rounding(name, dtype):
    shards, tolerance = shards_of(dtype=dtype), 1e-10 if dtype is np.float64 else 1e-3
    reference = sequential(PROGRAMS[name], shards=shards)
    world = World(3)
    for rounds in run(PROGRAMS[name], SEATS["unequal"], reduce="all-reduce", shards=shards, world=world):
        for done, known in zip(rounds, reference, strict=True):
            assert_allclose(done.model["H"], known.model["H"], rtol=tolerance, atol=tolerance)
            assert done.model["H"].dtype == known.model["H"].dtype
            assert dict(done.bytes_up) == dict(known.bytes_up)
            assert (done.participants, done.bytes_down) == (known.participants, known.bytes_down)
    assert not any(kind == "gather" for _, kind, _ in world.seen), "nobody collects uploads"


def test_an_all_reduce_falls_back_where_a_rank_has_nothing_to_add():
    absent, silent = {1: frozenset({"p03"})}, {2: {"p03": 0}, 3: {"p00": 0}}
    reference = sequential(PROGRAMS["exact"], absent=absent, dropouts=silent)
    for rounds in run(PROGRAMS["exact"], SEATS["unequal"], reduce="all-reduce", absent=absent, dropouts=silent):
        for done, known in zip(rounds, reference, strict=True):
            assert_allclose(done.model["H"], known.model["H"], rtol=1e-10, atol=1e-10)
            assert dict(done.bytes_up) == dict(known.bytes_up)
            assert done.participants == known.participants


class Noisy(PlainReduction):
    """Sends something else than the upload."""

    def client_step(self, phase, state, heard):
        return state, Message({name: array + 1 for name, array in state.arrays.items()}, state.weight)


@pytest.mark.parametrize(
    ("program", "reduction", "told"),
    [
        (PROGRAMS["fnmf"], PlainReduction(), "reads individual uploads"),
        (PROGRAMS["exact"], PairwiseMasks(), "replace PairwiseMasks"),
        (PROGRAMS["exact"], MASKED, 'replace SecureSum. Use reduce="in order"'),
        (PROGRAMS["exact"], Noisy(), "something other than the upload"),
    ],
)
def test_an_all_reduce_refuses_what_it_would_pass_over(program, reduction, told):
    for error in run(program, SEATS["unequal"], reduce="all-reduce", reduction=reduction):
        assert isinstance(error, CompositionError)
        assert told in str(error)


@pytest.mark.parametrize("seats", SEATS)
@pytest.mark.parametrize("name", SUMS)
def test_every_program_of_sums_runs_masked_on_any_ranks(name, seats):
    """Each rank makes the keys, shares and masks of its own parties, of which sums have no trace: the same bits."""
    pinned = replace(MASKED, roster=build_roster(shards_of())) if seats == "unequal" else MASKED
    reference, world = sequential(PROGRAMS[name], 3, pinned), World(len(SEATS[seats]))
    uploads = {}
    for rounds in run(PROGRAMS[name], SEATS[seats], 3, pinned, world=world):
        assert_same_rounds(rounds, reference)
        uploads |= {(at.index, party): message for at in rounds for party, phase, message in at.traffic if phase == 2}
    assert len(uploads) == 3 * len(NAMES)
    sent = b"".join(value for _, _, value in world.seen if isinstance(value, bytes))
    for done in sequential(PROGRAMS[name], 3):
        for party, _, message in done.traffic:
            for array in (array for array in message.arrays.values() if len(np.unique(array)) > 2):  # not by chance
                assert np.ascontiguousarray(array).tobytes() not in sent, f"{party} sends nothing as it is"


@pytest.mark.parametrize("phase", range(4))
def test_parties_that_drop_out_of_a_masked_sum_are_those_of_sequential(phase):
    more = {"dropouts": {1: {"p00": phase, "p03": phase}}, "absent": {2: frozenset({"p01"})}, "reduction": MASKED}
    reference = sequential(PROGRAMS["exact"], **more)
    assert [len(done.participants) for done in reference] == [5, 5 if phase > 2 else 3, 4, 5]
    for rounds in run(PROGRAMS["exact"], SEATS["unequal"], **more):
        assert_same_rounds(rounds, reference)
    more["dropouts"][1]["p04"] = phase
    words = rf"phase {max(phase, 2)} .*2 of 5 parties answered, and 3 are needed"
    with pytest.raises(TooFewParties, match=words) as known:
        sequential(PROGRAMS["exact"], **more)
    for error in run(PROGRAMS["exact"], SEATS["unequal"], **more):
        assert type(error) is known.type
        assert str(error) == str(known.value)


def test_parties_whose_uploads_cannot_be_masked_are_left_out_as_in_sequential():
    def scaled(*names):
        return [replace(s, matrix=as_matrix(s.matrix.X * (1e6 if s.name in names else 1))) for s in shards_of()]

    more = {"reduction": MASKED, "on_party_error": "skip"}
    for names in (("p02",), ("p00", "p02"), ("p03",)):
        reference = sequential(PROGRAMS["exact"], shards=scaled(*names), **more)
        assert all(set(done.refused) == set(names) and len(done.participants) == 5 - len(names) for done in reference)
        for rounds in run(PROGRAMS["exact"], SEATS["unequal"], shards=scaled(*names), **more):
            assert_same_rounds(rounds, reference)
            for name in names:
                known = reference[-1].checkpoint.parties[name]
                assert rounds[-1].checkpoint.parties.get(name, known) == known, "its state stands still"
    for names, kind in ((("p00", "p02", "p03"), TooFewParties), (NAMES, PartyError)):
        with pytest.raises(kind) as known:
            sequential(PROGRAMS["exact"], shards=scaled(*names), **more)
        for error in run(PROGRAMS["exact"], SEATS["unequal"], shards=scaled(*names), **more):
            assert type(error) is known.type
            assert str(error) == str(known.value)
    for error in run(PROGRAMS["exact"], SEATS["unequal"], shards=scaled("p02"), reduction=MASKED):
        assert isinstance(error, UploadError)
        assert any("p02" in note and "reduction" in note for note in error.__notes__)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["exact", "fedavg"])
def test_absent_and_silent_parties_are_those_of_sequential(name, reduction):
    absent = {0: frozenset({"p03"}), 2: frozenset({"p00", "p01", "p02", "p04"})}
    silent = {1: {"p02": 0 if reduction == "open" else 1, "p04": 0 if reduction == "open" else 1}}
    more = {"absent": absent, "dropouts": silent, "reduction": REDUCTIONS[reduction]}
    reference = sequential(PROGRAMS[name], **more)
    for rounds in run(PROGRAMS[name], SEATS["unequal"], **more):
        assert_same_rounds(rounds, reference)
    for error in run(PROGRAMS[name], SEATS["unequal"], absent={1: frozenset(NAMES)}):
        assert isinstance(error, ParameterError)
        assert "No party takes part in round 1" in str(error)


@pytest.mark.parametrize("name", ["exact", "exact accelerated", "fnmf", "fnmf, then exact"])
def test_resume_is_the_uninterrupted_run(name):
    whole = run(PROGRAMS[name], SEATS["unequal"], 5)
    points = [rounds[1].checkpoint for rounds in whole]
    for rounds, rest in zip(whole, run(PROGRAMS[name], SEATS["unequal"], 5, resume=points), strict=True):
        assert_same_rounds(rest, rounds[2:])
    everything = sequential(PROGRAMS[name], 5)[1].checkpoint
    for rank, rest in enumerate(run(PROGRAMS[name], SEATS["unequal"], 5, resume=[everything] * 3)):
        assert_same_rounds(rest, whole[rank][2:])
        assert set(rest[-1].checkpoint.parties) == {NAMES[i] for i in SEATS["unequal"][rank]}


@dataclass(frozen=True)
class Broken:
    """A program that fails at one party, or everywhere but at one rank, in a stage of a round."""

    inner: object
    stage: str
    error: BaseException = field(compare=False)
    party: str = "p02"
    rank: int = 1
    round: int = 1
    aggregation: object = PROGRAMS["exact"].aggregation

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def fail(self, stage, is_here):
        if stage == self.stage and is_here:
            raise type(self.error)(*self.error.args)

    def start_party(self, shard, layout):
        self.fail("start", shard.name == self.party)
        return Tally(0, self.inner.start_party(shard, layout))

    def local(self, shard, party, model):
        self.fail("local", shard.name == self.party and party.round == self.round)
        state, upload = self.inner.local(shard, party.inner, model)
        if self.stage == "nan" and shard.name == self.party and party.round == self.round:
            upload = Message({**upload.arrays, "gram": upload["gram"] * np.nan}, upload.weight)
        return Tally(party.round + 1, state), upload

    def start_server(self, layout):
        server, model = self.inner.start_server(layout)
        return Tally(0, server), model

    def finish(self, server, aggregate):
        is_here = threading.current_thread().name == f"rank {self.rank}" and server.round == self.round
        self.fail("finish", is_here)
        inner, model = self.inner.finish(server.inner, aggregate)
        if self.stage == "drift" and is_here:
            model = Message({**model.arrays, "H": model["H"] * 1.001}, model.weight)
        return Tally(server.round + 1, inner), model

    def metrics(self, server):
        return self.inner.metrics(server.inner)


@dataclass(frozen=True)
class Tally:
    round: int
    inner: object


@pytest.mark.parametrize("round", [0, 1, 3])
@pytest.mark.parametrize("stage", ["start", "local", "finish"])
@pytest.mark.parametrize("error", [DataError("row 3 is no good"), ZeroDivisionError("by zero")], ids=repr)
def test_an_error_at_one_rank_is_raised_at_all_in_its_own_words(stage, error, round):
    results = run(Broken(PROGRAMS["exact"], stage, error, "p02", 2, round), SEATS["unequal"])
    assert type(results[2]) is type(error)
    assert str(results[2]) == str(error)
    for other in results[:2]:
        assert type(other) is (type(error) if isinstance(error, DataError) else PartyError)
        assert str(error) in str(other)
        if stage != "finish":
            assert any("p02" in note and stage in note for note in other.__notes__)
        assert "(raised at rank 2)" in other.__notes__


def test_an_error_of_the_server_is_raised_at_all():
    class Deaf(PlainReduction):
        def server_step(self, phase, inbox, state, context):
            raise PartyError(f"Nothing was understood in round {context.index}.")

    for error in run(PROGRAMS["exact"], SEATS["unequal"], reduction=Deaf()):
        assert isinstance(error, PartyError)
        assert "understood in round 0" in str(error)


def test_a_rank_that_fails_does_not_wait_for_those_who_work_on(monkeypatch):
    monkeypatch.setattr(collective, "ERROR_TIMEOUT", 0.2)

    @dataclass(frozen=True)
    class Slow(Broken):
        def local(self, shard, party, model):
            time.sleep(2 if shard.name != self.party else 0)
            return super().local(shard, party, model)

    world, began = World(2), time.monotonic()
    results = run(Slow(PROGRAMS["exact"], "local", DataError("no"), "p01", round=0), [[0], [1]], world=world)
    assert "Rank 1 failed: DataError: no" in world.aborted
    assert isinstance(results[1], DataError)
    assert isinstance(results[0], Aborted)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("stage", ["start", "nan"])
def test_faulty_parties_are_left_out_as_in_sequential(stage):
    program = Broken(PROGRAMS["exact"], stage, DataError("row 3 is no good"))
    reference = sequential(program, on_party_error="skip")
    assert "p02" in reference[1].refused
    for rounds in run(program, SEATS["unequal"], on_party_error="skip"):
        assert_same_rounds(rounds, reference)
    alone = [shards_of()[2]]
    with pytest.raises(PartyError) as known:
        sequential(program, shards=alone, on_party_error="skip")
    for error in run(program, [[0]], shards=alone, on_party_error="skip"):
        assert type(error) is known.type
        assert str(error) == str(known.value)


def test_under_masks_the_exchanges_of_a_round_keep_their_company():
    """What Sequential refuses because two sums would differ by one party's upload, ranks refuse before any sum."""
    program, masked = PROGRAMS["fnmf by sums"], {"reduction": PairwiseMasks()}
    reference = sequential(program, **masked)
    for rounds in run(program, SEATS["unequal"], **masked):
        assert_same_rounds(rounds, reference)
    with pytest.raises(ParameterError) as known:
        sequential(program, absent={1: frozenset({"p02"})}, **masked)
    for error in run(program, SEATS["unequal"], absent={1: frozenset({"p02"})}, **masked):
        assert type(error) is known.type
        assert str(error) == str(known.value)
    late = replace(Broken(program, "local", DataError("no"), round=1), aggregation=program.aggregation)
    with pytest.raises(PartyError) as known:
        sequential(late, on_party_error="skip", **masked)
    world = World(3)
    for error in run(late, SEATS["unequal"], on_party_error="skip", world=world, **masked):
        assert type(error) is known.type
        assert str(error) == str(known.value)
    gathered = sum(kind == "gather" for rank, kind, _ in world.seen if rank == 0)
    assert gathered == 3 + 1, "three phases of one exchange, and the first one of the next, which has keys and no sum"


def test_where_nobody_is_left_all_ranks_say_so():
    class Nobody(Broken):
        def local(self, shard, party, model):
            raise DataError(f"no data at {shard.name}")

    for error in run(Nobody(PROGRAMS["exact"], "", DataError()), SEATS["unequal"], on_party_error="skip"):
        assert isinstance(error, PartyError)
        assert "all 5 are faulty. The first, 'p00': no data at p00" in str(error)


def test_ranks_that_drift_apart_are_noticed():
    program = Broken(PROGRAMS["exact"], "drift", DataError(), rank=2)
    for error in run(program, SEATS["unequal"]):
        assert isinstance(error, PartyError)
        assert "Before round 2 the ranks hold different models" in str(error)


DIFFERENCES = {
    "seed": (ParameterError, "same seed, but it is 3 at ranks 0 and 2, and 4 at rank 1", {"seed": 4}),
    "rounds": (ParameterError, "same schedule", {"rounds": 7}),
    "program": (CompositionError, "same program.*rank=5.* at rank 1", {"program": build("exact", 5, local_steps=5)}),
    "reduction": (CompositionError, "same reduction.*PairwiseMasks", {"reduction": PairwiseMasks()}),
    "sums": (CompositionError, "same reduce.*'all-reduce' at rank 1", {"reduce": "all-reduce"}),
    "columns": (CompositionError, "16 columns at ranks 0 and 2, and 15 columns at rank 1", {"width": 15}),
    "twin": (ParameterError, "'p02' is at ranks 1 and 2", {"group": [0, 4, 2]}),
    "nothing": (ParameterError, "at least one shard, but rank 1 has none", {"group": []}),
    "unknown sums": (ParameterError, "reduce must be", {"reduce": "by post"}),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_differ_are_told_so_everywhere(what):
    kind, told, change = DIFFERENCES[what]

    def work(communicator):
        odd = change if communicator.rank == 1 else {}
        group = odd.get("group", SEATS["unequal"][communicator.rank])
        own = seated([group], shards_of(odd.get("width", 16)))[0]
        schedule = Schedule(odd.get("rounds", 4), odd.get("seed", 3))
        program, reduction = odd.get("program", PROGRAMS["exact"]), odd.get("reduction", PlainReduction())
        return list(run_ranks(communicator, program, own, schedule, reduction, None, odd.get("reduce", "in order")))

    for error in at_ranks(3, work):
        assert type(error) is kind
        with pytest.raises(kind, match=told):
            raise error


def test_ranks_of_other_versions_and_other_checkpoints_are_refused(monkeypatch):
    points = [rounds[1].checkpoint for rounds in run(PROGRAMS["exact"], SEATS["unequal"])]
    for error in run(PROGRAMS["exact"], SEATS["unequal"], resume=[points[0], None, points[2]]):
        assert isinstance(error, ParameterError)
        assert "same resume, but it is 2 at ranks 0 and 2, and 0 at rank 1" in str(error)
    monkeypatch.setattr(consistency, "version", lambda _: f"0.{threading.current_thread().name == 'rank 2'}")
    for error in run(PROGRAMS["exact"], SEATS["unequal"]):
        assert isinstance(error, CompositionError)
        assert "same version" in str(error)


def test_programs_are_told_in_the_same_words_everywhere():
    program = replace(build("exact", 4, local_steps=5))
    assert consistency.describe(program) == consistency.describe(build("exact", 4, local_steps=5))
    assert consistency.describe({"a": object()}) == consistency.describe({"a": object()})
    big = np.zeros(5000)
    assert consistency.describe(big) != consistency.describe(np.where(np.arange(5000) == 2500, 1.0, big))
    assert consistency.describe({"b", "a"}) == consistency.describe({"a", "b"})


@pytest.mark.parametrize("leavers", [[1], [0, 2], [0, 1, 2]])
def test_a_loop_that_is_left_at_one_rank_ends_at_all_after_that_round(leavers):
    def work(communicator):
        own, seen = seated(SEATS["unequal"])[communicator.rank], []
        for done in run_ranks(communicator, PROGRAMS["exact"], own, Schedule(6, 3), PlainReduction(), None):
            seen.append(done.index)
            if done.index == 2 and communicator.rank in leavers:
                break
        again = run_ranks(communicator, PROGRAMS["exact"], own, Schedule(2, 3), PlainReduction(), None)
        return seen, len(list(again))

    assert at_ranks(3, work) == [([0, 1, 2], 2)] * 3


def test_leaving_after_the_last_round_waits_for_nobody():
    def work(communicator):
        own = seated(SEATS["unequal"])[communicator.rank]
        for done in run_ranks(communicator, PROGRAMS["exact"], own, Schedule(2, 3), PlainReduction(), None):
            if done.index == 1 and communicator.rank == 1:
                break
        return communicator.count

    assert len(set(at_ranks(3, work))) == 1


def test_a_file_that_one_rank_cannot_read_is_told_to_all():
    def work(communicator):
        def read():
            if communicator.rank == 1:
                raise FileError("b.npz cannot be read.")
            return communicator.rank

        return run_on_all(communicator, read)

    for error in at_ranks(3, work):
        assert isinstance(error, FileError)
        assert str(error) == "b.npz cannot be read."
    assert at_ranks(2, lambda communicator: run_on_all(communicator, lambda: communicator.rank)) == [0, 1]


@pytest.mark.parametrize("sums", ["in order", "all-reduce"])
def test_rows_weights_and_secrets_are_in_nothing_that_is_sent(sums):
    world = World(3)
    rounds = run(PROGRAMS["exact"], SEATS["unequal"], reduce=sums, world=world)
    sent = b"".join(
        v if isinstance(v, bytes) else np.ascontiguousarray(v).tobytes() for _, _, v in world.seen if v is not None
    )
    states = {name: state for at in rounds for name, state in at[-1].checkpoint.parties.items()}
    for shard in shards_of():
        assert str(shard.secret).encode() not in sent
        for row in (*shard.matrix.X, *states[shard.name].W):
            assert row.tobytes() not in sent
    assert np.ascontiguousarray(rounds[0][-1].model["H"]).tobytes() not in sent, "the model is made at every rank"


def test_errors_travel_with_their_class():
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.PartsongError):
            again = collective.error_from_text(*collective.error_to_text(kind("what, where")))
            assert type(again) is kind
            assert str(again) == "what, where"
    own = type("Own", (DataError,), {})("mine")
    assert type(collective.error_from_text(*collective.error_to_text(own))) is DataError
    assert type(collective.error_from_text("Warning", "?")) is PartyError


ARRAYS = {
    "C": np.arange(12.0).reshape(3, 4),
    "F": np.arange(12.0).reshape(3, 4).T,
    "strided": np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::3],
    "empty": np.empty((0, 4)),
    "single": np.float64(3.5),
    "complex": np.array([1 + 2j]),
    "integers": np.array([2**60, -1]),
    "small": np.array([True, False]),
    "big end": np.arange(3, dtype=">f8"),
    "cube": np.arange(24.0).reshape(2, 3, 4).T,
}


def test_parcels_hold_what_was_put_in():
    messages = {"a": Message(ARRAYS, 1 / 3), "é": Message({}, 2)}
    again, note = decode(encode((messages, [1, "x", {"y": 2.5}])))
    assert note == [1, "x", {"y": 2.5}]
    assert list(again) == ["a", "é"]
    assert again["a"].weight == 1 / 3
    assert list(again["a"].arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert_array_equal(again["a"][name], array)
        assert again["a"][name].dtype == array.dtype
        if array.size and (array.flags.c_contiguous or array.flags.f_contiguous):
            assert again["a"][name].strides == array.strides, "sums of transposed arrays keep their bits"
    with pytest.raises(DataTypeError, match="Use arrays of numbers"):
        encode({"a": Message({"x": np.array([None])})})


def test_parcels_cannot_hold_objects():
    parcel = encode({"a": Message({"x": np.arange(4.0)})})
    forged = bytes(parcel).replace(b'"<f8"', b'"|O8"')
    with pytest.raises(errors.FormatError, match="unknown number type"):
        decode(forged)


def test_tensors_stay_tensors():
    torch = pytest.importorskip("torch")
    tensors = {
        "H": torch.arange(6.0).reshape(2, 3).T,
        "half": torch.ones(3, dtype=torch.bfloat16),
        "one": torch.tensor(2.0),
        "n": np.ones(2),
    }
    again = decode(encode({"a": Message(tensors)}))["a"]
    for name, tensor in tensors.items():
        assert type(again[name]) is type(tensor)
        assert again[name].dtype == tensor.dtype
        assert (again[name] == tensor).all()
    shards = [replace(s, matrix=as_matrix(torch.from_numpy(s.matrix.X))) for s in shards_of()]
    for name in ("exact", "fedavg"):
        reference = sequential(PROGRAMS[name], shards=shards)
        for rounds in run(PROGRAMS[name], SEATS["unequal"], shards=shards):
            assert isinstance(rounds[-1].model["H"], torch.Tensor)
            assert torch.equal(rounds[-1].model["H"], reference[-1].model["H"])
