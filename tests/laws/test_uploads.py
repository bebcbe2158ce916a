"""Laws of the boundary: what is not as stated never enters a sum, its party is named, and nothing else is lost."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from pairwise_masks import PairwiseMasks

from partsong.aggregation.alignment import Assignment, PartialAssignment, PartialSinkhorn
from partsong.aggregation.linear import AlignedMean, add
from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Layout, Message, ProgramBase, Reducible, Schedule, Shard
from partsong.core.streams import key
from partsong.data.conversion import as_matrix
from partsong.engines.local import Parallel, Sequential
from partsong.errors import (
    CompositionError,
    DataError,
    DivergenceError,
    ParameterError,
    PartsongError,
    PartyError,
    UploadError,
)
from partsong.methods import build
from partsong.methods.averaging import AlignedUpload
from partsong.methods.two_stage import exact_after
from partsong.secure_aggregation.protocol import SecureSum
from partsong.training.loop import StoppingRule, Training, measure, train

PROGRAMS = {
    "exact": build("exact", 4, local_steps=5),
    "exact accelerated": build("exact", 4, accelerate=True, local_steps=5),
    "fedavg": build("fedavg", 4, local_steps=3),
    "fedprox": build("fedprox", 4, local_steps=3),
    "consensus of games": build("game-consensus", 4, local_steps=3),
    "fnmf paper": build("fnmf-local", 4, variant="paper", local_steps=3, align="assignment"),
    "fnmf robust": build("fnmf-local", 4, local_steps=3, align="assignment"),
    "fnmf by sums": build("fnmf-by-sums", 4, local_steps=3),
    "fnmf, then exact": exact_after(build("fnmf-local", 4, local_steps=3, align="assignment"), 2),
    "by sums, then exact": exact_after(build("fnmf-by-sums", 4, local_steps=3), 2),
}
REDUCTIONS = [PlainReduction(), PairwiseMasks(), SecureSum()]
ENGINES = [Sequential(), Parallel(2)]


def data(rows=60, columns=14, seed=0):
    rng = np.random.default_rng(seed)
    return rng.gamma(0.5, size=(rows, 4)) @ rng.gamma(0.3, size=(4, columns)) + 0.05 * rng.random((rows, columns))


def shards_of(X, parties=4, seed=7):
    names = [f"p{i:02d}" for i in range(parties)]
    parts = np.array_split(X, parties)
    return [Shard(name, as_matrix(part), key(seed, name)) for name, part in zip(names, parts, strict=True)]


def run(program, shards, rounds=3, engine=Sequential(), reduction=PlainReduction(), resume=None, **more):
    return list(engine.run(program, shards, Schedule(rounds, 3, **more), reduction=reduction, resume=resume))


def main_array(message):
    """The (k × m) array of an upload."""
    return "H" if "H" in message.arrays else "cross"


def with_entry(value, *positions):
    def spoil(message):
        array = np.array(message[main_array(message)])
        for place in positions:
            array[place] = value
        return Message({**message.arrays, main_array(message): array}, message.weight)

    return spoil


def with_array(change):
    def spoil(message):
        name = main_array(message)
        return Message({**message.arrays, name: change(np.array(message[name]))}, message.weight)

    return spoil


FAULTS = {
    "one NaN": (with_entry(np.nan, (1, 2)), r"'(H|cross)' is NaN or infinite at position \(1, 2\)\."),
    "two infinite": (with_entry(np.inf, (0, 3), (2, 1)), r"positions \(0, 3\), \(2, 1\)\."),
    "minus infinity": (with_entry(-np.inf, (3, 0)), r"is NaN or infinite at position \(3, 0\)"),
    "many NaN": (with_array(lambda array: array * np.nan), r"\(0, 0\), \(0, 1\), \(0, 2\) \(and 53 more\)"),
    "negative": (with_entry(-1e-9, (2, 5)), r"is negative at position \(2, 5\)"),
    "fewer rows": (with_array(lambda array: array[1:]), "is 3 × 14, not 4 × 14"),
    "transposed": (with_array(lambda array: array.T), "is 14 × 4, not 4 × 14"),
    "flat": (with_array(lambda array: array.ravel()), "is of length 56, not 4 × 14"),
    "whole numbers": (with_array(lambda array: array.astype(np.int64)), "holds int64, not float"),
    "complex": (with_array(lambda array: array.astype(complex)), "holds complex128, not float"),
    "objects": (with_array(lambda array: array.astype(object)), "holds object, not float"),
    "no array": (with_array(lambda array: array.tolist()), "holds list, not float"),
    "one missing": (lambda m: Message({"other": m[main_array(m)]}, m.weight), r"'(H|cross)' is missing"),
    "one too many": (lambda m: Message({**m.arrays, "W": np.ones(3)}, m.weight), "'W' is unexpected"),
    "weight": (lambda m: Message(m.arrays, np.nan), "its weight is nan"),
    "huge": (with_array(lambda array: array * 1e305), r"'(H|cross)' is above 1\.[37]e\+(154|302), .* float64"),
    "huge weight": (lambda m: Message(m.arrays, 1e200), "its weight is 1e\\+200"),
    "no message": (lambda m: dict(m.arrays), "dict, not a Message"),
    "nothing": (lambda m: None, "NoneType, not a Message"),
    "negative weight": (lambda m: Message(m.arrays, -1.0), "its weight is -1.0"),
}


RUNAWAYS = {"huge", "one NaN", "two infinite", "minus infinity", "many NaN"}


@dataclass(frozen=True)
class Faulty:
    """A program whose uploads are spoiled, or whose work ends in an error, at some parties."""

    inner: Any
    fault: Any
    at: frozenset[str] = frozenset({"p01"})

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def local(self, shard, party, model):
        party, message = self.inner.local(shard, party, model)
        if shard.name not in self.at:
            return party, message
        if isinstance(self.fault, BaseException):
            raise self.fault
        return party, self.fault(message)


@dataclass(frozen=True)
class Silent:
    """A program that says nothing of its uploads."""

    inner: Any

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def upload_spec(self, layout):
        return ProgramBase.upload_spec(self, layout)


def pairs(*names):
    """Programs and the reductions that they can be summed by."""
    return [
        pytest.param(name, reduction, id=f"{name}-{type(reduction).__name__}")
        for name in names
        for reduction in REDUCTIONS
        if not reduction.hides_uploads or isinstance(PROGRAMS[name].aggregation, Reducible)
    ]


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_send_what_they_say(name):
    shards, program = shards_of(data()), PROGRAMS[name]
    kinds = program.upload_spec(Layout.of(shards, 3))
    for done in run(program, shards, 4, Sequential(record=True)):
        for _, _, message in done.traffic:
            stated = next(kind for kind in kinds if kind.keys() == message.arrays.keys())
            assert {array: shape for array, shape, _ in message.signature} == {n: f.shape for n, f in stated.items()}
            assert all(form.kind in str(message[array].dtype) for array, form in stated.items())
            assert all((message[array] >= 0).all() for array, form in stated.items() if form.non_negative)
        assert not done.refused


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("name", "reduction"), pairs("exact", "fedavg", "fnmf robust", "fnmf by sums"))
def test_an_upload_that_is_not_as_stated_is_refused_and_its_party_named(name, reduction, fault):
    program, (spoil, words) = PROGRAMS[name], FAULTS[fault]
    with pytest.raises(UploadError, match=words) as caught:
        run(Faulty(program, spoil), shards_of(data()), reduction=reduction)
    assert "Party 'p01'" in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, PartyError)
    assert isinstance(caught.value, DivergenceError) == (fault in RUNAWAYS)
    assert any("'p01'" in note and "upload" in note and "round 0" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("fault", ["one NaN", "fewer rows", "error"])
@pytest.mark.parametrize(("name", "reduction"), pairs(*PROGRAMS))
def test_a_party_that_is_left_out_is_absent_from_that_round(name, fault, reduction, engine):
    """The same bytes for everybody else, its state as before, and back in the next round."""
    shards, program = shards_of(data()), PROGRAMS[name]
    spoil, words = FAULTS.get(fault, (DataError("The disk of p01 is gone."), "disk of p01"))
    before = run(program, shards, 2, engine, reduction)[-1].checkpoint
    (round_,) = run(Faulty(program, spoil), shards, 3, engine, reduction, before, on_party_error="skip")
    (absent,) = run(program, shards, 3, engine, reduction, before, absent={2: frozenset({"p01"})})
    assert_array_equal(round_.model["H"], absent.model["H"])
    assert round_.participants == absent.participants == ("p00", "p02", "p03")
    assert round_.checkpoint.parties["p01"] is before.parties["p01"]
    assert round_.bytes_up["p01"] == 0
    assert set(round_.refused) == {"p01"}
    assert re.search(words, round_.refused["p01"])
    resumed = round_.checkpoint
    if reduction.hides_uploads and program.turn(resumed.model).step > 0:
        *_, resumed = (
            done.checkpoint
            for done in run(Faulty(program, spoil), shards, 4, engine, reduction, before, on_party_error="skip")
        )
    after = run(program, shards, resumed.index + 1, engine, reduction, resumed, on_party_error="skip")[-1]
    assert after.participants == ("p00", "p01", "p02", "p03")
    assert not after.refused


@pytest.mark.parametrize("fault", ["many NaN", "error"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_run_that_stops_has_lost_nothing(name, fault):
    """From the last round one goes on without the party, or with it when it is well again, as if nothing had been."""
    shards, program = shards_of(data()), PROGRAMS[name]
    spoil = FAULTS[fault][0] if fault in FAULTS else DataError("The disk of p01 is gone.")
    kept = run(program, shards, 2)[-1]
    bytes_before = kept.model["H"].tobytes()
    with pytest.raises(PartsongError, match="p01"):
        run(Faulty(program, spoil), shards, 4, resume=kept.checkpoint)
    assert kept.model["H"].tobytes() == bytes_before
    others = [shard for shard in shards if shard.name != "p01"]
    without = run(program, others, 4, resume=kept.checkpoint)
    absent = run(program, shards, 4, absent={2: frozenset({"p01"}), 3: frozenset({"p01"})})
    assert_array_equal(without[-1].model["H"], absent[-1].model["H"])
    mended = run(program, shards, 4, resume=kept.checkpoint)
    assert_array_equal(mended[-1].model["H"], run(program, shards, 4)[-1].model["H"])


@dataclass(frozen=True)
class Unstartable:
    """A program that some parties cannot start; each attempt is noted."""

    inner: Any
    fault: BaseException = DataError("The disk of p01 is gone.")
    at: frozenset[str] = frozenset({"p01"})
    attempts: list[str] = field(default_factory=list)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def start_party(self, shard, layout):
        if shard.name in self.at:
            self.attempts.append(shard.name)
            raise self.fault
        return self.inner.start_party(shard, layout)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(("name", "reduction"), pairs(*PROGRAMS))
def test_a_party_that_cannot_start_is_absent_until_it_can(name, reduction, engine):
    """The same bytes for everybody else, asked once a round, and a newcomer when it is well."""
    shards, program = shards_of(data()), PROGRAMS[name]
    unwell = Unstartable(program)
    rounds = run(unwell, shards, 4, engine, reduction, on_party_error="skip")
    never = {index: frozenset({"p01"}) for index in range(4)}
    absent = run(program, shards, 5, engine, reduction, absent=never)
    for done, other in zip(rounds, absent, strict=False):
        assert_array_equal(done.model["H"], other.model["H"])
        assert done.participants == other.participants == ("p00", "p02", "p03")
        assert done.refused == {"p01": "The disk of p01 is gone."}
        assert "p01" not in done.checkpoint.parties
        assert done.bytes_up["p01"] == 0
    assert unwell.attempts == ["p01"] * 4
    (joined,) = run(program, shards, 5, engine, reduction, rounds[-1].checkpoint, on_party_error="skip")
    assert_array_equal(joined.model["H"], absent[-1].model["H"])
    assert joined.participants == ("p00", "p01", "p02", "p03")
    assert not joined.refused


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
def test_what_keeps_a_party_from_starting_stops_a_run_unless_it_is_left_out(engine):
    shards, everyone = shards_of(data()), frozenset({"p00", "p01", "p02", "p03"})
    with pytest.raises(DataError, match="disk of p01") as caught:
        run(Unstartable(PROGRAMS["fedavg"]), shards, engine=engine)
    assert any("'p01'" in note and "start" in note for note in caught.value.__notes__)
    assert any('on_party_error="skip"' in note and "--on-party-error skip" in note for note in caught.value.__notes__)
    with pytest.raises(TypeError, match="a mistake"):
        run(Unstartable(PROGRAMS["fedavg"], TypeError("a mistake")), shards, engine=engine, on_party_error="skip")
    nobody = Unstartable(PROGRAMS["fedavg"], at=everyone)
    with pytest.raises(PartyError, match=r"No party is left in round 0: all 4 are faulty\. The first, 'p00'"):
        run(nobody, shards, engine=engine, on_party_error="skip")
    rest = Faulty(Unstartable(PROGRAMS["fedavg"]), FAULTS["one NaN"][0], everyone - {"p01"})
    with pytest.raises(PartyError, match=r"No party is left in round 0: all 4"):
        run(rest, shards, engine=engine, on_party_error="skip")


def test_rows_are_other_rows_while_a_party_cannot_start():
    """What the objective is over changes when it joins: the rounds before and after are not compared."""
    shards, program = shards_of(data()), PROGRAMS["exact"]
    before = run(Unstartable(program), shards, 2, on_party_error="skip")
    after = run(program, shards, 4, resume=before[-1].checkpoint)
    training = Training()
    list(train(measure(before + after), StoppingRule(0), training))
    rows = training.history
    assert [row.parties for row in rows] == [3, 3, 4, 4]
    assert rows[0].cohort == rows[1].cohort != 0
    assert rows[2].cohort == rows[3].cohort == 0


@pytest.mark.parametrize("on_party_error", ["raise", "skip"])
@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
def test_programming_errors_stop_every_run(engine, on_party_error):
    with pytest.raises(ZeroDivisionError) as caught:
        run(
            Faulty(PROGRAMS["fedavg"], ZeroDivisionError()),
            shards_of(data()),
            engine=engine,
            on_party_error=on_party_error,
        )
    assert any("'p01'" in note and "local" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("fault", "error"), [("one NaN", DivergenceError), ("fewer rows", PartyError), ("error", PartyError)]
)
def test_somebody_has_to_be_left(fault, error):
    spoil = FAULTS[fault][0] if fault in FAULTS else DataError("The disk is gone.")
    everyone = Faulty(PROGRAMS["exact"], spoil, frozenset({"p00", "p01", "p02", "p03"}))
    with pytest.raises(error, match=r"No party is left in round 0: all 4 are faulty\. The first, 'p00'") as caught:
        run(everyone, shards_of(data()), on_party_error="skip")
    assert isinstance(caught.value, DivergenceError) == (fault == "one NaN")
    one_left = replace(everyone, at=everyone.at - {"p02"})
    rounds = run(one_left, shards_of(data()), 2, on_party_error="skip")
    assert [done.participants for done in rounds] == [("p02",)] * 2
    assert set(rounds[0].refused) == {"p00", "p01", "p03"}


def test_schedules_know_two_ways():
    with pytest.raises(ParameterError, match='"raise" or "skip"; got \'ignore\''):
        Schedule(3, on_party_error="ignore")


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda r: type(r).__name__)
def test_of_a_program_that_says_nothing_finite_numbers_are_asked_for(reduction):
    shards, plain = shards_of(data()), Silent(PROGRAMS["fedavg"])
    expected = run(PROGRAMS["fedavg"], shards, reduction=reduction)[-1].model["H"]
    assert_array_equal(run(plain, shards, reduction=reduction)[-1].model["H"], expected)
    for fault in ("one NaN", "many NaN", "weight", "objects"):
        with pytest.raises(UploadError, match="Party 'p01'"):
            run(Silent(Faulty(PROGRAMS["fedavg"], FAULTS[fault][0])), shards, reduction=reduction)
    run(Silent(Faulty(PROGRAMS["fedavg"], FAULTS["negative"][0])), shards, 1, reduction=reduction)


@dataclass(frozen=True)
class Poisoned(PairwiseMasks):
    """A masked sum to which one party, past its own check, adds what it likes."""

    def client_step(self, phase, state, heard):
        state, message = super().client_step(phase, state, heard)
        if phase == 1 and state["party"] == "p01":
            message = Message({name: array * np.inf for name, array in message.arrays.items()}, message.weight)
        return state, message


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("on_party_error", ["raise", "skip"])
def test_a_sum_that_is_not_finite_is_no_model(on_party_error):
    """Nobody can be named, so that nobody can be left out; what was before stays."""
    shards, program = shards_of(data()), PROGRAMS["fnmf by sums"]
    with pytest.raises(DivergenceError, match=r"sum of round 0 over 4 parties is NaN or infinite in 'H', 'counts'"):
        run(program, shards, reduction=Poisoned(), on_party_error=on_party_error)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", ["exact", "fedavg", "fnmf robust", "fnmf by sums"])
def test_finite_uploads_that_are_too_large_for_sums_or_squares_are_refused(name, dtype):
    """Just below the bound a round goes well; just above it the party is named, or left out."""
    shards = [replace(s, matrix=as_matrix(s.matrix.X, np.dtype(dtype))) for s in shards_of(data())]
    largest = float(np.finfo(dtype).max)
    bound = largest / 2**20 if name == "exact" else np.sqrt(largest)
    program = PROGRAMS[name]
    (below,) = run(Faulty(program, with_entry(0.99 * bound, (0, 0))), shards, 1)
    assert np.isfinite(below.model["H"]).all()
    above = Faulty(program, with_entry(1.01 * bound, (0, 0)))
    with pytest.raises(DivergenceError, match=r"'p01' .* at position \(0, 0\)"):
        run(above, shards, 1)
    (done,) = run(above, shards, 1, on_party_error="skip")
    assert set(done.refused) == {"p01"}


def test_what_is_no_message_is_left_out():
    for fault in ("no message", "nothing"):
        (done,) = run(Faulty(PROGRAMS["fedavg"], FAULTS[fault][0]), shards_of(data()), 1, on_party_error="skip")
        assert "not a Message" in done.refused["p01"]


@dataclass(frozen=True)
class Matrices:
    is_partial: bool = False

    def plan(self, target, source):
        return np.eye(len(target))


def test_plans_are_more_than_matrices():
    with pytest.raises(CompositionError, match=r"Matrices\.plan returned ndarray, not a plan"):
        run(build("fnmf-by-sums", 4, align=Matrices(), local_steps=3), shards_of(data()))


def test_tensors_are_looked_at_as_arrays_are():
    torch = pytest.importorskip("torch")
    shards = [replace(s, matrix=as_matrix(torch.from_numpy(s.matrix.X))) for s in shards_of(data())]
    for name in ("exact", "fedavg", "fnmf by sums"):
        assert len(run(PROGRAMS[name], shards)) == 3
        for value, words in ((float("nan"), "is NaN or infinite"), (-1.0, "is negative")):

            def spoil(message, value=value):
                array = message[main_array(message)].clone()
                array[1, 2] = value
                return Message({**message.arrays, main_array(message): array}, message.weight)

            with pytest.raises(UploadError, match=rf"{words} at position \(1, 2\)"):
                run(Faulty(PROGRAMS[name], spoil), shards)


@dataclass(frozen=True)
class Own:
    """An alignment of a user's own, which says nothing of its plans."""

    inner: Any = Assignment()

    def plan(self, target, source):
        return self.inner.plan(target, source)


@dataclass(frozen=True)
class OwnPartial(Own):
    is_partial: bool = True


@dataclass(frozen=True)
class OwnWhole(Own):
    is_partial: bool = False


@pytest.mark.parametrize("align", [Own(), OwnPartial(), OwnWhole()], ids=lambda a: type(a).__name__)
def test_an_alignment_of_ones_own_runs_under_masks_if_it_says_that_every_row_has_a_partner(align):
    shards, program = shards_of(data()), build("fnmf-by-sums", 4, align=align, local_steps=3)
    ours = run(build("fnmf-by-sums", 4, local_steps=3), shards)[-1].model["H"]
    assert_array_equal(run(program, shards)[-1].model["H"], ours)
    if isinstance(align, OwnWhole):
        masked = run(program, shards, reduction=PairwiseMasks())[-1].model["H"]
        assert_allclose(masked, ours, rtol=1e-6, atol=1e-8)
    else:
        with pytest.raises(CompositionError, match=rf"{type(align).__name__} may find .* is_partial = False"):
            run(program, shards, reduction=PairwiseMasks())


@pytest.mark.parametrize("align", [PartialAssignment(), PartialSinkhorn()], ids=lambda a: type(a).__name__)
def test_partial_plans_and_masks_need_a_word_of_consent(align):
    shards, program = shards_of(data()), build("fnmf-by-sums", 4, align=align, local_steps=3)
    assert len(run(program, shards)) == 3, "in the open there is nothing to hide"
    with pytest.raises(
        CompositionError, match=rf"PairwiseMasks hides .* 'H' .* alone: {type(align).__name__}"
    ) as caught:
        run(program, shards, reduction=PairwiseMasks())
    assert "allow_single_party_rows=True" in str(caught.value)
    accepted = replace(program, upload=replace(program.upload, allow_single_party_rows=True))
    masked = run(accepted, shards, reduction=PairwiseMasks())
    assert_allclose(masked[-1].model["H"], run(program, shards)[-1].model["H"], rtol=1e-6, atol=1e-8)


def test_a_row_that_one_party_alone_has_matched_is_seen_in_the_sum():
    """What is consented to: where the count is 1, the sum is a row of one H_p as it is."""
    blocks = np.kron(np.eye(5), np.ones((1, 8)))
    model, own = blocks[:4].T.copy(), {"a": 2 * blocks[[0, 1, 2, 4]].T, "b": 3 * blocks[[0, 1, 4, 3]].T}
    upload, aggregation = AlignedUpload(PartialAssignment(), allow_single_party_rows=True), AlignedMean()
    sent = [upload.message(Shard(name, as_matrix(data(6, 40))), Ht, model, False, 4) for name, Ht in own.items()]
    total = reduce(add, map(aggregation.lift, sent))
    assert_array_equal(total["counts"], [2, 2, 1, 1])
    assert_array_equal(total["H"][2], 2 * blocks[2])
    assert_array_equal(total["H"][3], 3 * blocks[3])


def sent_in(done):
    return {party: message for party, _, message in done.traffic}


@pytest.mark.parametrize("rows", [1, 3, 10])
def test_gram_and_cross_disclose_what_the_docs_say(rows):
    """Cᵀ G⁺ C = Xᵀ Π X: for one row that row itself, for up to k rows their inner products, and else a part of them."""
    shards = [Shard("p00", as_matrix(data(rows))), Shard("p01", as_matrix(data(30, seed=1)))]
    done = run(PROGRAMS["exact"], shards, 3, Sequential(record=True))[-1]
    sent, X, W = sent_in(done)["p00"], shards[0].matrix.X, done.checkpoint.parties["p00"].W
    found = sent["cross"].T @ np.linalg.pinv(sent["gram"]) @ sent["cross"]
    assert_allclose(found, X.T @ (W @ np.linalg.pinv(W)) @ X, rtol=1e-6, atol=1e-9)
    if np.linalg.matrix_rank(W) == rows:
        assert_allclose(found, X.T @ X, rtol=1e-6, atol=1e-9)
    if rows == 1:
        assert_allclose(np.sqrt(np.diagonal(found)), X[0], rtol=1e-6)


@pytest.mark.parametrize("name", ["exact", "fedavg"])
def test_a_feature_that_nobody_at_a_party_has_is_seen_to_be_missing(name):
    X = data(20)
    X[:, [3, 8]] = 0
    shards = [Shard("p00", as_matrix(X)), Shard("p01", as_matrix(data(30, seed=1)))]
    sent = sent_in(run(PROGRAMS[name], shards, 1, Sequential(record=True))[-1])
    for party, missing in (("p00", [3, 8]), ("p01", [])):
        assert_array_equal(np.flatnonzero(sent[party][main_array(sent[party])].sum(axis=0) == 0), missing)


def test_a_party_that_is_missing_from_the_second_sweep_is_the_difference_of_the_two_sums():
    shards, program = shards_of(data()), build("fnmf-by-sums", 4, local_steps=3, sweeps=2, init_mode="shared")
    rounds = run(program, shards, 6, Sequential(record=True), absent={5: frozenset({"p01"})})
    first, second = sent_in(rounds[4]), sent_in(rounds[5])
    assert all((first[party]["H"] == second[party]["H"]).all() for party in second), "plans are at rest"
    difference = sum(m["H"] for m in first.values()) - sum(m["H"] for m in second.values())
    assert_allclose(difference, first["p01"]["H"], rtol=1e-9, atol=1e-12)


@dataclass(frozen=True)
class FaultyIn:
    """A program that spoils the uploads of one party in some exchanges, which it counts."""

    inner: Any
    exchanges: frozenset[int]
    fault: Any = FAULTS["one NaN"][0]
    asked: list[int] = field(default_factory=list)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def local(self, shard, party, model):
        party, message = self.inner.local(shard, party, model)
        if shard.name != "p01":
            return party, message
        index = 2 * int(model["turn"][0]) + int(model["turn"][1])
        self.asked.append(index)
        return party, self.fault(message) if index in self.exchanges else message


@dataclass(frozen=True)
class Counting(PairwiseMasks):
    """Masks that note which sums were begun and served, and can lose a party that nobody expected to lose."""

    begun: list[int] = field(default_factory=list)
    served: list[int] = field(default_factory=list)
    loses: frozenset[int] = frozenset()

    def start(self, standing, upload, aggregation, context):
        self.begun.append(context.index)
        return super().start(standing, upload, aggregation, context)

    def server_step(self, phase, inbox, state, context):
        self.served.append(context.index)
        if phase > 0 and context.index in self.loses:
            inbox = {name: message for name, message in inbox.items() if name != "p01"}
        return super().server_step(phase, inbox, state, context)


BY_SUMS = PROGRAMS["fnmf by sums"]
WITHIN = {
    "leaves": {"absent": {3: frozenset({"p01"})}},
    "joins": {"absent": {2: frozenset({"p01"})}},
    "silent at once": {"dropouts": {3: {"p01": 0}}},
    "silent later": {"dropouts": {3: {"p01": 2}}},
    "silent before": {"dropouts": {2: {"p01": 1}}},
}


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("change", WITHIN)
@pytest.mark.parametrize("name", ["fnmf by sums", "by sums, then exact"])
def test_schedules_keep_a_masked_round_together(name, change, engine):
    """Refused before anything of that round is summed; in the open, and as whole rounds, everybody comes and goes."""
    program = replace(PROGRAMS[name], rounds=4) if "then" in name else PROGRAMS[name]
    shards, masks, told = shards_of(data()), Counting(), []
    with pytest.raises(ParameterError, match=r"Exchanges 2 to 3 .* 'p01' .* difference .* whole round"):
        told.extend(engine.run(program, shards, Schedule(6, 3, **WITHIN[change]), reduction=masks))
    assert set(masks.begun) == {0, 1}
    if "silent" not in change:
        assert len(run(program, shards, 6, engine, **WITHIN[change])) == 6
    whole = {"absent": {2: frozenset({"p01"}), 3: frozenset({"p01"})}}
    masked, plain = (run(program, shards, 6, engine, one, **whole) for one in (PairwiseMasks(), PlainReduction()))
    assert_allclose(masked[-1].model["H"], plain[-1].model["H"], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("fault", ["one NaN", "fewer rows", "error"])
@pytest.mark.parametrize("on_party_error", ["raise", "skip"])
def test_a_party_that_fails_within_a_masked_round_ends_the_run_before_anything_is_summed(on_party_error, fault):
    def fail(message):
        raise DataError("The disk of p01 is gone.")

    spoil = FAULTS[fault][0] if fault in FAULTS else fail
    shards, masks, done = shards_of(data()), Counting(), []
    with pytest.raises(PartyError if on_party_error == "skip" else PartsongError, match="p01") as caught:
        done.extend(
            run(FaultyIn(BY_SUMS, frozenset({3}), spoil), shards, 6, reduction=masks, on_party_error=on_party_error)
        )
    assert max(masks.served) == 2
    told = " ".join((str(caught.value), *caught.value.__notes__)) if on_party_error == "raise" else str(caught.value)
    assert "the last checkpoint at the beginning of a round, with the same parties" in told
    assert 'on_party_error="skip"' not in told
    if on_party_error == "skip":
        assert re.search(r"Exchange 3 continues a round .* 'p01' would be missing .* difference", told)
        open_ = run(FaultyIn(BY_SUMS, frozenset({3}), spoil), shards, 6, on_party_error=on_party_error)
        assert [len(one.participants) for one in open_] == [4, 4, 4, 3, 4, 4]


def test_a_party_that_missed_the_first_masked_sum_of_a_round_is_asked_again_in_the_next():
    program = FaultyIn(BY_SUMS, frozenset({2}))
    rounds = run(program, shards_of(data()), 6, reduction=PairwiseMasks(), on_party_error="skip")
    assert [len(done.participants) for done in rounds] == [4, 4, 3, 3, 4, 4]
    assert program.asked == [0, 1, 2, 4, 5]
    assert "asked again in the next round" in rounds[3].refused["p01"]
    assert rounds[3].checkpoint.parties["p01"] is rounds[1].checkpoint.parties["p01"]
    whole = {"absent": {2: frozenset({"p01"}), 3: frozenset({"p01"})}}
    absent = run(BY_SUMS, shards_of(data()), 6, reduction=PairwiseMasks(), **whole)
    assert_array_equal(rounds[-1].model["H"], absent[-1].model["H"])


def test_a_masked_sum_that_lost_a_party_on_the_way_is_not_used_within_a_round():
    shards = shards_of(data())
    with pytest.raises(PartyError, match=r"Exchange 3 .* 'p01' would be missing"):
        run(BY_SUMS, shards, 6, reduction=Counting(loses=frozenset({3})))
    assert run(BY_SUMS, shards, 3, reduction=Counting(loses=frozenset({2})))[-1].participants == ("p00", "p02", "p03")


def test_a_masked_run_is_resumed_at_the_beginning_of_a_round():
    shards, masks = shards_of(data()), PairwiseMasks()
    rounds = run(BY_SUMS, shards, 6, reduction=masks)
    with pytest.raises(ParameterError, match=r"exchange 3 is number 2 of 2, .* index 2, with the same parties"):
        run(BY_SUMS, shards, 6, reduction=masks, resume=rounds[2].checkpoint)
    assert_array_equal(
        run(BY_SUMS, shards, 6, reduction=masks, resume=rounds[1].checkpoint)[-1].model["H"], rounds[-1].model["H"]
    )
    in_the_open = run(BY_SUMS, shards, 6)
    assert_array_equal(
        run(BY_SUMS, shards, 6, resume=in_the_open[2].checkpoint)[-1].model["H"], in_the_open[-1].model["H"]
    )


def test_two_sums_of_a_round_that_is_repeated_without_a_party_give_its_upload():
    """Nothing is drawn anew, so that the way on from within a round is with the same parties."""
    shards, program = shards_of(data()), PROGRAMS["fedavg"]
    start = run(program, shards, 2)[-1].checkpoint
    rounds = [
        run(program, some, 3, Sequential(record=True), resume=start)[0] for some in (shards, shards[:1] + shards[2:])
    ]
    everyone, others = (sum(message["H"] for message in sent_in(done).values()) for done in rounds)
    assert_allclose(everyone - others, sent_in(rounds[0])["p01"]["H"], rtol=1e-9, atol=1e-12)
