"""Laws of masked sums: the sum of the survivors to the printed error, and nothing else to anybody, whoever lies."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats

from partsong.aggregation.linear import AlignedMean, Mean, Sum, WeightedMean, sum_uploads
from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Layout, Message, Reducible, ReductionContext, Schedule, Shard
from partsong.core.streams import key
from partsong.data.conversion import as_matrix
from partsong.engines.local import Parallel, Sequential
from partsong.errors import (
    CompositionError,
    DivergenceError,
    MissingExtra,
    ParameterError,
    PartyError,
    PredictableMasks,
    TooFewParties,
    UploadError,
)
from partsong.methods import build
from partsong.methods.fedlda import FederatedLDA
from partsong.methods.private import EXACT_SUM_BOUND, party_private, row_private
from partsong.methods.secure_sketched import SketchedSums
from partsong.methods.two_stage import exact_after
from partsong.privacy.randomness import InsecureSource, system_source
from partsong.secure_aggregation import client, crypto, secret_sharing
from partsong.secure_aggregation import messages as secure_messages
from partsong.secure_aggregation.crypto import (
    combine,
    pair_stream,
    public_key,
    seed_stream,
    shared_secrets,
    weights_at_zero,
)
from partsong.secure_aggregation.messages import (
    KEYS,
    PHASES,
    SHARES,
    UNMASKING,
    UPLOAD,
    mask_transcript,
    names_as_array,
    sign_message,
)
from partsong.secure_aggregation.protocol import SecureSum, build_roster
from partsong.secure_aggregation.secret_sharing import Secrets, build_shares_body, shares_body_size, split_among
from partsong.sketch.kinds import Gaussian
from tests.laws.test_programs import PROGRAMS, data, shards_of
from tests.laws.test_programs import run as run_openly
from tests.laws.test_secure_sketched import program_of

SHAPE = (3, 5)


@dataclass
class Played:
    """A sum as it went: what was sent and answered, and what is left in whose hands."""

    identities: dict[str, Any]
    context: ReductionContext
    states: dict[str, Any] = field(default_factory=dict)
    drafts: dict[str, Any] = field(default_factory=dict)
    secrets: dict[str, Secrets] = field(default_factory=dict)
    dealers: dict[str, Any] = field(default_factory=dict)
    traffic: list[tuple[int, str, Message]] = field(default_factory=list)
    server: Any = None
    total: Message | None = None
    names: tuple[str, ...] = ()

    def sent(self, phase):
        return {name: message for at, name, message in self.traffic if at == phase}

    @property
    def phases(self):
        return sorted({phase for phase, _, _ in self.traffic})


@dataclass
class Play:
    """The loop of an engine, with a hand in it: `change(phase, inbox)` on the way, `lie(phase, name, heard)` after.

    `asked` are those who take part (all, if nobody is named); those before left a sum for this one to go on from.
    """

    reduction: SecureSum = field(default_factory=SecureSum)
    aggregation: Any = Sum()
    silent: dict[str, int] = field(default_factory=dict)
    change: Any = None
    lie: Any = None
    until: int = len(PHASES)
    asked: tuple[str, ...] = ()

    def __call__(self, uploads, before=None, index=0, played=None):
        shards = [Shard(name, as_matrix(np.ones((1, 2))), key(5, "secret", name)) for name in uploads]
        layout = Layout.of(shards, 0)
        identities = (
            before.identities
            if before
            else {s.name: self.reduction.setup_party(s.name, s.secret, layout) for s in shards}
        )
        done = played if played is not None else Played({}, None)
        names = self.asked or layout.parties
        done.identities, done.context = (
            dict(identities),
            ReductionContext(index, names, layout, Message({"H": np.ones(2)})),
        )
        for name in names:
            done.states[name] = self.reduction.start(identities[name], uploads[name], self.aggregation, done.context)
            done.drafts[name] = done.states[name].draft
        done.server, reply = before.server if before else None, Message({})
        for phase in range(self.reduction.first_phase(done.server, done.context), self.until):
            inbox = {}
            for name in (n for n in names if phase < self.silent.get(n, len(PHASES))):
                received = self.lie(phase, name, reply) if self.lie else reply
                place = identities[name].setup
                known = place.own if place and phase == UPLOAD and done.states[name].setup_draft is None else {}
                done.states[name], inbox[name] = self.reduction.client_step(phase, done.states[name], received)
                done.traffic.append((phase, name, inbox[name]))
                if phase == KEYS:
                    done.dealers[name] = done.states[name].setup_draft
                    done.secrets[name] = done.dealers[name].secrets[0]
                done.secrets |= {name: known[index]} if known else {}
            inbox = self.change(phase, inbox) if self.change else inbox
            done.server, reply = self.reduction.server_step(phase, inbox, done.server, done.context)
        if self.until == len(PHASES):
            done.identities |= {name: self.reduction.finish_party(state) for name, state in done.states.items()}
            done.server, done.total, done.names = self.reduction.result(done.server, self.aggregation, done.context)
        return done


def names_of(parties):
    return [f"p{i:03d}" for i in range(parties)]


def uploads_of(parties, seed=0, high=1e9, shape=SHAPE):
    rng = np.random.default_rng(seed)
    return {
        name: Message({"H": high * rng.random(shape), "counts": rng.integers(0, 10, 3).astype(float)}, float(i + 1))
        for i, name in enumerate(names_of(parties))
    }


def require_sum(total, messages, reduction):
    parties = len(messages)
    for name in messages[0].arrays:
        exact = sum(np.vectorize(Fraction, otypes=[object])(message[name]) for message in messages)
        off = abs(np.vectorize(Fraction, otypes=[object])(total[name]) - exact)
        assert (off <= Fraction(reduction.error(name, parties)) + abs(exact) * Fraction(2) ** -52).all()
    assert total.weight == sum(message.weight for message in messages)


def predictable(seed, **more):
    with pytest.warns(PredictableMasks):
        return SecureSum(source=InsecureSource(seed, "masks"), **more)


@pytest.mark.parametrize("parties", [3, 4, 5, 10, 30, pytest.param(100, marks=pytest.mark.slow)])
def test_sums_of_values_from_0_to_1e9_are_within_the_printed_error(parties):
    uploads = uploads_of(parties)
    done = Play(SecureSum(batch=2))(uploads)
    require_sum(done.total, list(uploads.values()), SecureSum())
    assert done.names == tuple(uploads)
    error = SecureSum().error("H", parties)
    assert f"off by at most {error:.2g}" in SecureSum().summary(["H"], parties)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_sums_of_any_values_and_any_dropouts_that_leave_enough(data):
    parties = data.draw(st.integers(3, 8))
    bound = data.draw(st.sampled_from([1e-2, 1.0, 1e9]))
    values = st.lists(st.floats(-bound, bound), min_size=3, max_size=3)
    uploads = {
        n: Message({"H": np.array(data.draw(values))}, data.draw(st.integers(0, 10**9))) for n in names_of(parties)
    }
    reduction = SecureSum(bound=bound, batch=2)
    spare = parties - max(reduction.threshold(parties), 3)
    lost = data.draw(st.lists(st.sampled_from(names_of(parties)), max_size=spare, unique=True))
    silent = {name: data.draw(st.integers(0, 3)) for name in lost}
    before = Play(reduction)(uploads) if data.draw(st.booleans()) else None
    done = Play(reduction, silent=silent)(uploads, before=before, index=0 if before is None else 1)
    assert done.phases == ([0, 1, 2, 3] if before is None else [2, 3])
    kept = [name for name in uploads if silent.get(name, 9) > UPLOAD]
    assert done.names == tuple(kept)
    for one in (reduction.error("H", parties),):
        exact = [sum(Fraction(float(uploads[name]["H"][i])) for name in kept) for i in range(3)]
        off = [abs(Fraction(float(done.total["H"][i])) - exact[i]) for i in range(3)]
        assert all(o <= Fraction(one) + abs(e) * Fraction(2) ** -52 for o, e in zip(off, exact, strict=True))
    assert done.total.weight == sum(uploads[name].weight for name in kept)


RECIPES = {
    "fedprox": build("fedprox", 4, local_steps=3),
    "ipalm once": build("one-shot-ipalm", 4, local_steps=3),
    "mur once": build("one-shot-mu", 4, local_steps=3),
    "syn-sd": build("syn-sd", 4, local_steps=3),
    "syn-ssd-u": build("syn-ssd-u", 4, local_steps=3),
    "syn-ssd-v": build("syn-ssd-v", 4, local_steps=3),
    "syn-ssd-uv": build("syn-ssd-uv", 4, local_steps=3),
    "secure dsanls": SketchedSums(4, Gaussian(4 * 4), is_guarded=False),
    "fnmf by sums": build("fnmf-by-sums", 4, local_steps=3),
    "by sums, then exact": exact_after(build("fnmf-by-sums", 4, local_steps=3), 2),
    "fedavg, then exact": exact_after(build("fedavg", 4, local_steps=3), 2),
    "private": party_private(build("syn-sd", 4, local_steps=3), epsilon=3.0, delta=1e-5, rounds=4),
}
PRIVATE_ROWS = row_private(
    4, epsilon=3.0, row_bound=10.0, rounds=4, source=lambda party, number: InsecureSource(1, party, number)
)
ROW_BOUNDS = {"gram": EXACT_SUM_BOUND, "cross": EXACT_SUM_BOUND}


def reducible_programs():
    return {
        name: one
        for name, one in {**PROGRAMS, **RECIPES}.items()
        if isinstance(one.aggregation, Reducible) and not shows_single_parties(one) and name != "private"
    }


def shows_single_parties(program):
    kinds = program.upload_spec(Layout(("a", "b", "c"), 12, 0)) if hasattr(program, "upload_spec") else ()
    return any(form.single_party_reason for kind in kinds for form in kind.values())


def test_programs_whose_sums_show_single_parties_are_refused():
    refused = [one for one in PROGRAMS.values() if shows_single_parties(one)]
    assert refused
    for program in refused:
        with pytest.raises(CompositionError, match="one party alone"):
            next(iter(Sequential().run(program, shards_of(data(), [20, 40, 60]), Schedule(1), reduction=SecureSum())))


@pytest.mark.parametrize("engine", [Sequential(record=True), Parallel(2, record=True)], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("name", reducible_programs())
def test_every_program_of_sums_runs_masked_on_every_engine(name, engine):
    program, shards = reducible_programs()[name], shards_of(data(), [20, 40, 60])
    openly = run_openly(program, shards, 4)
    masked = list(engine.run(program, shards, Schedule(4, 3), reduction=SecureSum(bound=1e5, batch=3)))
    assert_allclose(masked[-1].model["H"], openly[-1].model["H"], rtol=1e-6, atol=1e-8)
    phases = [sorted({phase for _, phase, _ in done.traffic}) for done in masked]
    assert phases == [[0, 1, 2, 3], [2, 3], [2, 3], [0, 1, 2, 3]]
    again = list(Sequential().run(program, shards, Schedule(4, 3), reduction=SecureSum(bound=1e5)))
    assert_array_equal(masked[-1].model["H"], again[-1].model["H"], "masks leave no trace, whatever was drawn")
    assert masked[1].bytes_up == again[1].bytes_up


@dataclass(frozen=True)
class Lifted:
    """The sum that an aggregation is in disguise, before it is lowered."""

    inner: Any

    def lift(self, upload):
        return self.inner.lift(upload)

    def lower(self, total):
        return total


TABLE = {
    **{name: (program, {}) for name, program in {**reducible_programs(), "private": RECIPES["private"]}.items()},
    "private rows": (PRIVATE_ROWS, {"bounds": ROW_BOUNDS}),
    "topics": (FederatedLDA(4), {"bounds": {"counts": 1e4}}),
}


@pytest.mark.parametrize("name", TABLE)
def test_masked_sums_of_every_recipe_are_the_open_ones_to_the_printed_error(name):
    """Σ lift(upload) of every exchange, from the very uploads that an open run has seen; integers to the last digit."""
    program, bounds = TABLE[name]
    reduction, X = SecureSum(**bounds), np.round(10 * data())
    rounds = list(
        Sequential(record=True).run(program, shards_of(X, [20, 40, 60]), Schedule(3, 3), reduction=PlainReduction())
    )
    for done in rounds:
        uploads = {party: message for party, _, message in done.traffic}
        total = Play(reduction, Lifted(program.aggregation))(uploads).total
        lifted = [program.aggregation.lift(message) for message in uploads.values()]
        assert set(total.arrays) == set(lifted[0].arrays)
        for array in total.arrays:
            exact = sum(np.vectorize(Fraction, otypes=[object])(np.asarray(message[array])) for message in lifted)
            off = abs(np.vectorize(Fraction, otypes=[object])(total[array]) - exact)
            printed = Fraction(reduction.error(array, len(uploads)))
            rounding = Fraction(2) ** -53 if total[array].dtype.kind == "f" else 0
            assert np.all(off <= printed + (abs(exact) + printed) * rounding)
            if total[array].dtype.kind == "i":
                assert not np.any(off)
        assert total.weight == sum(message.weight for message in lifted)


@pytest.mark.parametrize("engine", [Sequential(), Parallel(2)], ids=lambda e: type(e).__name__)
def test_noise_in_shares_is_summed_over_as_many_as_share_it_and_within_its_bounds(engine):
    shards, program = shards_of(data(), [20, 40, 60]), replace(PRIVATE_ROWS, shares=4)
    for reduction, words in (
        (SecureSum(bounds=ROW_BOUNDS), r"as few as 3 parties.*needs 4.*fewest=4"),
        (SecureSum(fewest=4), r"'gram' may reach ±4.5036e\+15, not ±1e\+09.*bounds=\{'gram'"),
        (SecureSum(fewest=4, bounds={"gram": EXACT_SUM_BOUND}), r"by PrivateSums 'cross' may reach"),
    ):
        with pytest.raises(CompositionError, match=words):
            next(iter(engine.run(program, shards, Schedule(2, 3), reduction=reduction)))
    masked = SecureSum(fewest=4, bounds=ROW_BOUNDS)
    assert len(list(engine.run(program, shards, Schedule(2, 3), reduction=masked))) == 2
    absent = Schedule(2, 3, absent={1: frozenset({"p01"})})
    with pytest.raises(TooFewParties, match=r"at least 4 parties, and has 3 \("):
        list(engine.run(program, shards, absent, reduction=masked))


@pytest.mark.parametrize("engine", [Sequential(), Parallel(2)], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("name", ["shared accelerated", "shared penalised"])
def test_a_party_beyond_its_bound_can_be_left_out_and_nothing_else_is_lost(name, engine):
    """What is found out before masking is that party's fault alone; a run without it has the same sums, to the bit."""
    shards, program = shards_of(data(), [20, 40, 60]), reducible_programs()[name]
    shards[1] = replace(shards[1], matrix=as_matrix(1e6 * shards[1].matrix.X))
    masked = {"reduction": SecureSum(bound=1e4)}
    with pytest.raises(UploadError, match=r"'p01'.*±10000") as caught:
        list(engine.run(program, shards, Schedule(3, 3), **masked))
    assert any('on_party_error="skip"' in note for note in caught.value.__notes__)
    without = Schedule(3, 3, absent=dict.fromkeys(range(3), frozenset({"p01"})))
    known = list(engine.run(program, shards, without, **masked))
    rounds = list(engine.run(program, shards, Schedule(3, 3, on_party_error="skip"), **masked))
    for done, other in zip(rounds, known, strict=True):
        assert_array_equal(done.model["H"], other.model["H"])
        assert done.participants == ("p00", "p02", "p03")
        assert "±10000" in done.refused["p01"]
        assert done.bytes_up["p01"] == 0
        assert done.checkpoint.parties["p01"] == other.checkpoint.parties["p01"], "its state stands still"
    with pytest.raises(TooFewParties, match=r"needs at least \d parties, and has 2 \(p00, p02\)") as caught:
        list(engine.run(program, shards[:3], Schedule(3, 3, on_party_error="skip"), **masked))
    assert any("'p01' was left out of it" in note and "±10000" in note for note in caught.value.__notes__)
    small = SecureSum(bound=1e-3)
    with pytest.raises(PartyError, match=r"No party is left in round 0: all 4 are faulty. The first, 'p00'"):
        list(engine.run(program, shards, Schedule(3, 3, on_party_error="skip"), reduction=small))


@pytest.mark.parametrize("variant", ["UV", "V"])
def test_sketched_programs_run_masked(variant):
    program, shards = program_of(variant), shards_of(data(), [30, 60])
    openly = run_openly(program, shards, 8)[-1].model["H"]
    masked = list(Sequential().run(program, shards, Schedule(8, 3), reduction=SecureSum(bound=1e5)))[-1]
    assert_allclose(masked.model["H"], openly, rtol=1e-6, atol=1e-8)
    hidden = SketchedSums(4, Gaussian(9), budget="total")
    in_the_open = run_openly(replace(hidden, is_guarded=False), shards, 5)[-1].model["H"]
    masked = list(Sequential().run(hidden, shards, Schedule(5, 3), reduction=SecureSum()))[-1]
    assert_allclose(masked.model["H"], in_the_open, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_tensors_run_masked(kind):
    torch = pytest.importorskip("torch")
    parts, program = np.array_split(data(), 4), build("exact", 4, local_steps=5)
    shards = [Shard(f"p{i}", as_matrix(torch.tensor(x, dtype=getattr(torch, kind))), i) for i, x in enumerate(parts)]
    openly = run_openly(program, shards, 3)[-1].model["H"]
    masked = list(Sequential().run(program, shards, Schedule(3, 3), reduction=SecureSum(bound=1e5)))[-1].model["H"]
    assert masked.dtype == openly.dtype
    tolerance = 1e-4 if kind == "float32" else 1e-7
    assert_allclose(masked.numpy(), openly.numpy(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("phase", range(4))
@pytest.mark.parametrize("aggregation", [Sum(), Mean(), WeightedMean(), AlignedMean(weighted=True)], ids=repr)
def test_dropouts_in_each_phase_leave_the_sum_of_the_survivors(aggregation, phase):
    uploads = uploads_of(7, high=10.0)
    silent = {"p001": phase, "p006": max(0, phase - 1), "p003": phase}
    reduction = SecureSum(bound=1e6)
    alone = Play(reduction, aggregation, silent)(uploads)
    inside = Play(reduction, aggregation, silent)(uploads, before=Play(reduction, aggregation)(uploads), index=1)
    kept = [name for name in uploads if silent.get(name, 9) > UPLOAD]
    expected = sum_uploads(aggregation, [uploads[name] for name in kept])
    for done in (alone, inside):
        assert done.names == tuple(kept)
        for name in expected.arrays:
            assert_allclose(done.total[name], expected[name], rtol=1e-12, atol=1e-9)
        assert done.total.weight == expected.weight


def test_a_party_that_drops_out_of_a_run_is_left_out_and_comes_back():
    shards, program = shards_of(data(), [20, 40, 60]), build("exact", 4, local_steps=5)
    for phase in range(4):
        schedule = Schedule(3, 3, dropouts={1: {"p01": phase}})
        rounds = list(Sequential().run(program, shards, schedule, reduction=SecureSum()))
        everyone = ("p00", "p01", "p02", "p03")
        kept = everyone if phase > UPLOAD else ("p00", "p02", "p03")
        assert [done.participants for done in rounds] == [everyone, kept, everyone]
        absent = {1: frozenset({"p01"})} if phase <= UPLOAD else {}
        openly = run_openly(program, shards, 2, absent=absent)
        assert_allclose(rounds[1].model["H"], openly[1].model["H"], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("engine", [Sequential(), Parallel(2)], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("name", ["shared accelerated", "fedavg", "syn-sd"])
def test_a_masked_run_that_is_resumed_is_the_uninterrupted_one(name, engine):
    """Keys are made anew, and sums have no trace of them; a checkpoint holds none."""
    shards, program = shards_of(data(), [20, 40, 60]), reducible_programs()[name]
    whole = list(engine.run(program, shards, Schedule(4, 3), reduction=SecureSum()))
    rest = list(engine.run(program, shards, Schedule(4, 3), reduction=SecureSum(), resume=whole[1].checkpoint))
    for done, known in zip(rest, whole[2:], strict=True):
        assert_array_equal(done.model["H"], known.model["H"])
        assert (done.index, done.participants) == (known.index, known.participants)
    assert rest[1].bytes_up == whole[3].bytes_up
    more = {name: size - whole[2].bytes_up[name] for name, size in rest[0].bytes_up.items()}
    assert set(more.values()) == {set_up_bytes(4, 16)}, "a set-up of its own"


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("phase", range(4))
def test_too_many_dropouts_end_the_sum_and_reveal_nothing(phase, inside):
    played, silent = Played({}, None), dict.fromkeys(names_of(7)[:4], phase)
    before, at = Play()(uploads_of(7)) if inside else None, max(phase, UPLOAD) if inside else phase
    with pytest.raises(PartyError, match=rf"phase {at} \({PHASES[at]}\).*3 of 7.*4 are needed.*'p000'"):
        Play(silent=silent)(uploads_of(7), before=before, index=int(inside), played=played)
    assert played.total is None
    answers = played.sent(UNMASKING)
    assert len(answers) < SecureSum().threshold(7), "less than t have answered, and no answer can be read"
    assert phase == UNMASKING or not answers


def test_less_than_three_are_refused_wherever_they_are_counted():
    with pytest.raises(ParameterError, match=r"at least 3 parties, and there are 2: p000, p001"):
        Play()(uploads_of(2))
    for fewest in (2, 3.5, float("nan"), "4", None):
        with pytest.raises(ParameterError, match=f"fewest={fewest!r}"):
            SecureSum(fewest=fewest)
    shards, program = shards_of(data(), [20, 40]), build("exact", 4, local_steps=5)
    absent = Schedule(2, 3, absent={1: frozenset({"p01"})})
    with pytest.raises(PartyError, match=r"round 1 needs .* and has 2 \(p00, p02\).*Nothing was sent"):
        list(Sequential().run(program, shards, absent, reduction=SecureSum()))
    silent = Schedule(2, 3, dropouts={1: {"p01": 2}})
    with pytest.raises(PartyError, match=r"phase 2.*2 of 3.*3 are needed.*'p01'"):
        list(Sequential().run(program, shards, silent, reduction=SecureSum()))
    later = Schedule(2, 3, dropouts={1: {"p01": UNMASKING}})
    rounds = list(Sequential().run(program, shards, later, reduction=SecureSum()))
    assert rounds[1].participants == ("p00", "p01", "p02"), "it is in the sum, and two can remove the masks"


@pytest.mark.parametrize(
    ("majority", "thresholds"),
    [(0.5, {3: 2, 4: 3, 5: 3, 100: 51}), (2 / 3, {3: 3, 4: 3, 6: 5, 9: 7, 99: 67, 100: 67})],
)
def test_a_threshold_is_more_than_its_part_of_all(majority, thresholds):
    assert {n: SecureSum(majority=majority).threshold(n) for n in thresholds} == thresholds
    for bad in (0.0, 0.49, 1.0, np.nan):
        with pytest.raises(ParameterError, match="majority"):
            SecureSum(majority=bad)


@pytest.mark.parametrize("content", ["zeros", "one value", "largest"])
def test_a_masked_upload_looks_uniform(content):
    """χ² over the bytes, and over the numbers' leading bits, of single uploads of the plainest content there is."""
    value = {"zeros": 0.0, "one value": 12.5, "largest": 1e9}[content]
    done = Play(predictable(11))({name: Message({"H": np.full(20_000, value)}, 7.0) for name in names_of(4)})
    vectors = [message["body"] for message in done.sent(UPLOAD).values()]
    for vector in [*vectors, vectors[0] - vectors[1], vectors[0] + vectors[1]]:
        counts = np.bincount(np.frombuffer(vector.tobytes(), np.uint8), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-4
        leading = np.bincount((vector >> np.uint64(56)).astype(int), minlength=256)
        assert stats.chisquare(leading).pvalue > 1e-4
    plain = done.drafts["p000"].vector
    assert stats.chisquare(np.bincount(np.frombuffer(plain.tobytes(), np.uint8), minlength=256)).pvalue < 1e-10


def mask(key, count):
    """The stream of a key, drawn at once."""
    ciphers = pytest.importorskip("cryptography.hazmat.primitives.ciphers")
    stream = ciphers.Cipher(ciphers.algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(8 * count))
    return np.frombuffer(stream, "<u8")


@pytest.mark.parametrize("count", [0, 1, 16383, 16384, 16385, 50000])
def test_a_mask_is_the_stream_of_its_key(count):
    total = np.arange(count, dtype=np.uint64)
    crypto.add_mask(total, bytes(range(32)))
    np.testing.assert_array_equal(total, np.arange(count, dtype=np.uint64) + mask(bytes(range(32)), count))
    crypto.add_mask(total, bytes(range(32)), negated=True)
    np.testing.assert_array_equal(total, np.arange(count, dtype=np.uint64))


def test_no_key_is_used_for_two_texts(monkeypatch):
    """One nonce is enough then: over two sums, with a dropout, each key makes one stream or seals one text."""
    streams, sealed = {}, {}

    def mask_and_note(total, key, *, negated=False):
        streams.setdefault(key, []).append(len(total))
        crypto.add_mask(total, key, negated=negated)

    def seal_and_note(key, text):
        sealed.setdefault(key, []).append(text)
        return crypto.seal(key, text)

    monkeypatch.setattr(client, "add_mask", mask_and_note)
    monkeypatch.setattr(secret_sharing, "seal", seal_and_note)
    first = Play(silent={"p003": UPLOAD + 1})(uploads_of(5))
    Play(silent={"p001": UPLOAD})(uploads_of(5), before=first, index=1)
    assert all(len(texts) == 1 for texts in sealed.values())
    shares, parts, own = 5 * 4, 4 * 4 + 4 * 3, 4 + 4
    assert len(sealed) == shares + parts + own, "to each other party, in a set-up and in each answer; and each answer"
    assert sorted(map(len, streams.values())) == [1] * (5 + 4) + [1] * 4 + [2] * (10 + 6), "own, with p001, of two"
    assert not streams.keys() & sealed.keys()


def test_what_is_sent_holds_no_plain_number():
    uploads = {name: Message({"H": np.full((4, 4), 12.5 + i)}, 100.0 + i) for i, name in enumerate(names_of(5))}
    done = Play(silent={"p002": UPLOAD + 1, "p004": UPLOAD})(uploads)
    recorded = b"|".join(array.tobytes() for _, _, message in done.traffic for array in message.arrays.values())
    for name, draft in done.drafts.items():
        plain = [uploads[name]["H"].tobytes()[:8], np.float64(uploads[name].weight).tobytes()]
        plain += [draft.vector[-1:].tobytes(), draft.vector[:1].tobytes()]
        plain += [text for one in done.dealers[name].secrets for text in (one.seed, one.key)]
        plain += [done.dealers[name].share_key.private, done.identities[name].signing]
        assert not any(text in recorded for text in plain)
    assert {message.weight for _, _, message in done.traffic} == {0.0}, "no plain weight"
    assert {name for _, _, message in done.traffic for name in message.arrays} == {"about", "body", "signature"}


def test_secrets_are_not_shown_and_not_kept_longer_than_for_their_sum():
    first = Play(SecureSum(batch=2))(uploads_of(4))
    second = Play(SecureSum(batch=2))(uploads_of(4), before=first, index=1)
    for done, kept in ((first, {1}), (second, set())):
        for name, state in done.states.items():
            shown = repr(done.drafts[name]) + repr(state) + repr(done.identities[name])
            for secret in (done.secrets[name].seed, done.secrets[name].key, done.identities[name].signing):
                assert repr(secret) not in shown
            for identity in (state.identity, done.identities[name]):
                assert (set(identity.setup.own) if identity.setup else set()) == kept
                assert (set(identity.setup.held) if identity.setup else set()) == kept
            assert state.setup_draft is None
            assert len(state.draft.vector) == 0


def test_keys_and_masks_are_fresh_in_every_sum():
    first = Play()(uploads_of(4))
    second = Play()(uploads_of(4), before=first, index=1)
    assert second.phases == [UPLOAD, UNMASKING]
    for name in first.states:
        one, other = first.secrets[name], second.secrets[name]
        assert one.key != other.key
        assert one.seed != other.seed
        assert (first.sent(UPLOAD)[name]["body"] != second.sent(UPLOAD)[name]["body"]).mean() > 0.9
    require_sum(second.total, list(uploads_of(4).values()), SecureSum())
    drawn = [text for dealer in first.dealers.values() for one in dealer.secrets for text in (one.seed, one.key)]
    assert len(set(drawn)) == 4 * 16 * 2


def test_randomness_comes_from_the_system_and_everything_else_is_loud():
    assert SecureSum().source is system_source
    with pytest.warns(PredictableMasks, match="hide nothing"):
        SecureSum(source=InsecureSource(1))
    one, other = (Play(predictable(3))(uploads_of(3)) for _ in range(2))
    assert_array_equal(one.sent(UPLOAD)["p000"]["body"], other.sent(UPLOAD)["p000"]["body"])


BAD_VALUES = {
    "too large": (UploadError, 1.5e9, r"'p001'.*'H'.*±1e\+09.*Nothing was sent, and nothing is clipped"),
    "too small": (UploadError, -1.5e9, "'p001'.*'H'"),
    "NaN": (DivergenceError, np.nan, "'p001'.*NaN"),
    "infinite": (DivergenceError, np.inf, "'p001'.*'H'"),
}


@pytest.mark.parametrize("fault", BAD_VALUES)
def test_a_bad_value_is_refused_at_its_party_before_anything_is_sent(fault):
    error, value, words = BAD_VALUES[fault]
    uploads, played = uploads_of(4), Played({}, None)
    uploads["p001"] = Message({**uploads["p001"].arrays, "H": np.full(SHAPE, value)})
    with pytest.raises(error, match=words):
        Play()(uploads, played=played)
    assert not played.traffic
    weighty = {name: replace(message, weight=2e9) for name, message in uploads_of(4).items()}
    with pytest.raises(UploadError, match=r"'p000'.*weight.*±1e\+09"):
        Play()(weighty)
    assert Play(SecureSum(bounds={"H": 2e9}))({**uploads_of(4), "p001": replace_H(1.5e9)}).names


class Liar:
    """A reduction that has one party add any numbers modulo 2⁶⁴ instead of its own."""

    def __init__(self, lie):
        self.inner, self.lie = SecureSum(), lie

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def start(self, standing, upload, aggregation, context):
        state = self.inner.start(standing, upload, aggregation, context)
        if standing.party != "p001":
            return state
        return replace(state, draft=replace(state.draft, vector=self.lie(state.draft.vector.copy())))


def garbage(vector):
    return np.random.default_rng(1).integers(0, 2**64, len(vector), np.uint64)


def one_number_far_off(vector):
    vector[0] = 2**63 - 1
    return vector


def a_negative_weight(vector):
    vector[-1] = 2**64 - 2**60
    return vector


@pytest.mark.parametrize("lie", [garbage, one_number_far_off, a_negative_weight])
@pytest.mark.parametrize("aggregation", [Sum(), WeightedMean()], ids=["sum", "mean"])
def test_a_sum_that_parties_within_their_bounds_cannot_have_is_refused_and_nobody_named(lie, aggregation):
    with pytest.raises(
        UploadError, match=r"round 0 over p000, p001, p002.*nobody can be named.*start a new run"
    ) as caught:
        Play(Liar(lie), aggregation)(uploads_of(3, high=1e6))
    assert "'p001'" not in str(caught.value)


def test_a_lie_within_the_reach_of_all_parties_is_not_noticed():
    """docs/reference/security.md: a liar adds more than its own bound, and the sum stays below n times that."""

    def more_than_its_bound(vector):
        vector[0] = np.uint64(2 * SecureSum().encoding(3).grid_of("H").max_sum(1))
        return vector

    assert Play(Liar(more_than_its_bound))(uploads_of(3, high=1.0)).total["H"][0, 0] > 1.9e9


def replace_H(value):
    return Message({**uploads_of(4)["p001"].arrays, "H": np.full(SHAPE, value)}, 2.0)


def test_arrays_that_cannot_be_added_stay_masked():
    uploads, played = uploads_of(4), Played({}, None)
    uploads["p002"] = Message({**uploads["p002"].arrays, "H": np.ones((5, 3))})
    words = r"'p002', phase 2 \(masked upload\).*H 5×3.*'p000'.*H 3×5.*All uploads stay masked"
    with pytest.raises(PartyError, match=words):
        Play()(uploads, played=played)
    assert not played.sent(UNMASKING)
    first = {**uploads_of(4), "p000": Message({"H": np.ones(SHAPE)})}
    with pytest.raises(PartyError, match=r"'p000', phase 2 \(masked upload\).*but 'p001' H 3×5, counts 3"):
        Play()(first)
    with pytest.raises(UploadError, match=r"'p003'.*'H' holds complex128.*Nothing was sent"):
        Play()({**uploads_of(4), "p003": Message({"H": np.ones(SHAPE, complex), "counts": np.ones(3)})})


@pytest.mark.parametrize("arrays", [{}, {"H": np.empty((0, 4))}, {"H": np.ones(())}], ids=["none", "empty", "one"])
def test_sums_of_next_to_nothing(arrays):
    total = Play()({name: Message(arrays, 2.0) for name in names_of(3)}).total
    assert {name: array.shape for name, array in total.arrays.items()} == {n: a.shape for n, a in arrays.items()}
    assert total.weight == 6.0


def flipped(message, place=0):
    body = np.frombuffer(message["body"].tobytes(), np.uint8).copy()
    body[place] ^= 1
    return Message({**message.arrays, "body": body.view(message["body"].dtype)}, message.weight)


def unsigned(message):
    return Message({**message.arrays, "signature": np.roll(message["signature"], 1)}, message.weight)


@pytest.mark.parametrize("phase", range(4))
@pytest.mark.parametrize("spoil", [flipped, unsigned, lambda m: flipped(m, -1)], ids=["body", "signature", "end"])
def test_whatever_is_changed_on_the_way_is_noticed_and_its_party_named(phase, spoil):
    def change(at, inbox):
        return {**inbox, "p002": spoil(inbox["p002"])} if at == phase else inbox

    played = Played({}, None)
    with pytest.raises(PartyError, match=rf"'p002', phase {phase} \({PHASES[phase]}\) .* round 0"):
        Play(change=change)(uploads_of(5), played=played)
    assert played.total is None


NO_SENSE = [b"", b"5", b"null", b'"p000"', b'{"p000": 1}', b"[[1]]", b"[" * 100_000, bytes(200), b"\xff" * 500]


@pytest.mark.parametrize("text", NO_SENSE, ids=lambda text: repr(text[:8]))
@pytest.mark.parametrize("phase", range(4))
def test_what_another_one_would_say_is_an_error_of_ours(phase, text):
    """Whatever bytes a party is sent, or the server is: a typed error that names who and where, and no other one."""

    def lie(at, name, reply):
        if at != phase or not reply.arrays:
            return reply
        return Message(dict.fromkeys(reply.arrays, np.frombuffer(text, np.uint8)), reply.weight)

    def change(at, inbox):
        if at != phase:
            return inbox
        return {**inbox, "p002": signed_by("p002", played, at, text, b"?" * 40 if at == UPLOAD else b"")}

    for hand in [{"change": change}] + ([{"lie": lie}] if phase > KEYS else []):
        played = Played({}, None)
        with pytest.raises(PartyError, match=r"Party '.*', phase \d \(.*\) of the masked sum of round 0"):
            Play(**hand)(uploads_of(5), played=played)
        assert played.total is None


def signed_by(party, played, phase, body, about=b""):
    """What a party would have sent, had it said something else."""
    state = played.states[party]
    message_context = state.draft.params.message_context(
        phase, state.setup_draft.admitted.transcript if phase == SHARES else b""
    )
    message_context = state.sum_context.message_context(phase) if state.participants else message_context
    return sign_message(message_context, party, state.identity.signing, body, about)


@pytest.mark.parametrize("contents", [b"[" * 100_000, b'[["H", [Infinity], "float64", "numpy"]]', b"5", b"[[1]]"])
def test_contents_that_are_none_are_an_error_of_ours(contents):
    def change(at, inbox):
        if at != UPLOAD:
            return inbox
        message = inbox["p002"]
        return {**inbox, "p002": signed_by("p002", played, at, message["body"], bytes(32) + contents)}

    played = Played({}, None)
    with pytest.raises(PartyError, match=r"'p002', phase 2 \(masked upload\).*unreadable"):
        Play(change=change)(uploads_of(5), played=played)


@pytest.mark.parametrize(
    ("phase", "batch"), [(KEYS, 1), (SHARES, 1), (UPLOAD, 1), (UNMASKING, 1), (UPLOAD, 16), (UNMASKING, 16)]
)
def test_a_message_of_another_round_or_party_is_refused(phase, batch):
    """Of another set-up, and of another sum of the same one."""
    first = Play(SecureSum(batch=batch))(uploads_of(5))
    words = rf"'p002', phase {phase} \({PHASES[phase]}\) .* round 1: .*(forged|repeated|a key that|signing key)"

    def repeated(at, inbox):
        return {**inbox, "p002": first.sent(phase)["p002"]} if at == phase else inbox

    def borrowed(at, inbox):
        return {**inbox, "p002": inbox["p001"]} if at == phase else inbox

    for change in (repeated, borrowed):
        with pytest.raises(PartyError, match=words):
            Play(SecureSum(batch=batch), change=change)(uploads_of(5), before=first, index=1)


def test_an_upload_of_the_same_round_of_an_earlier_run_is_refused():
    first = Play()(uploads_of(5))

    def change(at, inbox):
        return {**inbox, "p002": first.sent(UPLOAD)["p002"]} if at == UPLOAD else inbox

    with pytest.raises(PartyError, match=r"'p002', phase 2 \(masked upload\).*repeated"):
        Play(change=change)(uploads_of(5))


def test_keys_of_an_earlier_run_put_nobody_into_a_sum():
    """The keys of phase 0 alone could be sent again for somebody who is not there; its shares could not."""
    first = Play()(uploads_of(5))

    def again(at, inbox):
        return {**inbox, "p002": first.sent(at)["p002"]} if at <= last else inbox

    last = KEYS
    done = Play(silent={"p002": 0}, change=again)(uploads_of(5))
    assert done.names == ("p000", "p001", "p003", "p004")
    require_sum(done.total, [uploads_of(5)[name] for name in done.names], SecureSum())
    last = SHARES
    with pytest.raises(PartyError, match=r"'p002', phase 1 \(shares\).*repeated"):
        Play(silent={"p002": 0}, change=again)(uploads_of(5))


def test_a_party_takes_part_in_a_round_once():
    first = Play()(uploads_of(4), index=3)
    for index in (3, 2):
        with pytest.raises(PartyError, match=rf"'p000'.*round {index} after that of round 3"):
            Play()(uploads_of(4), before=first, index=index)


@pytest.mark.parametrize("phase", [SHARES, UPLOAD])
def test_parties_notice_a_server_that_changes_what_it_passes_on(phase):
    """Keys before shares are dealt, shares before the upload."""

    def lie(at, name, reply):
        if at != phase:
            return reply
        body = reply["p002"].copy()
        body[40] ^= 1
        return Message({**reply.arrays, "p002": body}, reply.weight)

    played = Played({}, None)
    with pytest.raises(PartyError, match=rf"'p002', phase {phase - 1} \({PHASES[phase - 1]}\)"):
        Play(lie=lie)(uploads_of(5), played=played)
    assert not played.sent(phase)


def test_the_server_cannot_put_itself_between_two_parties():
    """Other keys under a party's name are noticed by that party, and by all others if its key is known."""
    false = Play(predictable(8))(uploads_of(5))
    forged = false.sent(KEYS)["p002"]
    blob = np.concatenate([forged["body"], forged["signature"]])

    def lie(at, name, reply):
        return Message({**reply.arrays, "p002": blob}, reply.weight) if at == SHARES and name == victim else reply

    victim = "p002"
    with pytest.raises(PartyError, match=r"'p002', phase 1 .*other keys as those of this party"):
        Play(lie=lie)(uploads_of(5))
    victim = "p000"
    with pytest.raises(PartyError, match=r"phase 1 \(shares\)"):
        Play(lie=lie)(uploads_of(5))


def other_list(reply, *without):
    survivors = [name for name in names_of(5) if name not in without]
    return Message({"survivors": names_as_array(survivors)}, reply.weight)


def listed_by(state, survivors):
    """The list that an answer of this party would be for, as it sees the sum."""
    masks = mask_transcript(state.sum_context, state.draft.header.common)
    return secret_sharing.SurvivorList(
        state.sum_context, tuple(survivors), secure_messages.survivors_transcript(masks, survivors)
    )


def answers_to(played, lists):
    """What parties say to lists of survivors, each to the one that it is shown: list and answer by name."""
    said = {}
    for name, survivors in lists.items():
        reply = Message({"survivors": names_as_array(survivors)}, 0.0)
        _, message = SecureSum().client_step(UNMASKING, played.states[name], reply)
        said[name] = (tuple(survivors), message["body"].tobytes())
    return said


def read_by_a_liar(played, said, accomplices=()):
    """Whose shares a server can read that keeps to nothing, with all that some parties know; and of which list."""
    found = {}
    read = {n: secret_sharing._read(n, body, listed_by(played.states[n], names)) for n, (names, body) in said.items()}
    for name, (survivors, _) in said.items():
        listed, numbers = (
            listed_by(played.states[name], survivors),
            played.states[name].sum_context.group.admitted.numbers,
        )
        points = {numbers[name]: read[name].own}
        for other in (one for one in survivors if one != name):
            tokens = [read[other].tokens.get(name)] if other in read else []
            if other in accomplices:
                pairs = played.states[other].identity.setup.pairs
                tokens.append(secret_sharing.token(pairs[name], (name, other), listed))
            parts = [crypto.unseal(one, read[name].parts[other]) for one in tokens if one is not None]
            for part in filter(None, parts):
                points[numbers[other]] = part
        threshold = listed.sum_context.params.threshold
        if len(points) >= threshold:
            weights = weights_at_zero(sorted(points)[:threshold])
            secret = combine({x: int.from_bytes(text, "big") for x, text in points.items()}, weights)
            shares = crypto.unseal(secret.to_bytes(33, "big")[1:], read[name].sealed)
            found |= {} if shares is None else {name: (survivors, shares)}
    return found


def at_the_list(parties, reduction=None, index=0):
    played = Played({}, None)
    Play(reduction or SecureSum(), until=UNMASKING)(uploads_of(parties), index=index, played=played)
    return played


def require_that_one_list_is_read(parties, reduction, accomplices=()):
    """Two lists, shown to two groups of any sizes; with accomplices in both: t that were shown one list, or nothing."""
    played, names = at_the_list(parties, reduction), names_of(parties)
    honest, threshold = [name for name in names if name not in accomplices], reduction.threshold(parties)
    lost = names[-1] if names[-1] in honest else honest[-1]
    for cut in range(len(honest) + 1):
        groups = (honest[:cut], [name for name in honest[cut:] if name != lost])
        lists = {
            name: names if name in groups[0] else [n for n in names if n != lost] for group in groups for name in group
        }
        read = read_by_a_liar(played, answers_to(played, lists), accomplices)
        assert len({survivors for survivors, _ in read.values()}) <= 1
        for group in groups:
            is_enough = len(group) + len(accomplices) >= threshold
            assert all((name in read) == is_enough for name in group)


@pytest.mark.parametrize("parties", range(4, 9))
def test_a_server_that_shows_two_lists_reads_one_at_most_and_of_halves_none(parties):
    """It wants the seed of the last party from some and its mask key from others."""
    require_that_one_list_is_read(parties, SecureSum(batch=1))
    strict = SecureSum(majority=2 / 3, batch=1)
    for count in range(1, parties):
        if 2 * strict.threshold(parties) > parties + count:
            require_that_one_list_is_read(parties, strict, tuple(names_of(parties)[1 : count + 1]))
    played, names = at_the_list(4), names_of(4)
    halves = {"p000": names, "p001": names, "p002": names[:3], "p003": [n for n in names if n != "p000"]}
    assert not read_by_a_liar(played, answers_to(played, halves))


def not_bound_to_the_list(secret, route, listed):
    return crypto.derive_key(secret, "answer", *route)


@pytest.mark.parametrize("fault", ["tokens for any list", "a threshold of half", "too many accomplices"])
def test_the_law_of_one_list_finds_planted_faults(fault, monkeypatch):
    reduction, accomplices = SecureSum(batch=1), ()
    if fault == "tokens for any list":
        monkeypatch.setattr(secret_sharing, "token", not_bound_to_the_list)
    elif fault == "a threshold of half":
        monkeypatch.setattr(SecureSum, "threshold", lambda self, parties: parties // 2)
    else:
        accomplices = ("p001", "p002")
    with pytest.raises(AssertionError):
        require_that_one_list_is_read(7, reduction, accomplices)


def test_two_lists_end_a_sum_and_reveal_nothing():
    def lie(at, name, reply):
        return other_list(reply, "p004") if at == UNMASKING and name in ("p000", "p001") else reply

    played = Played({}, None)
    with pytest.raises(PartyError, match=r"phase 3 \(unmasking\).*(do not match|bytes, not).*No upload was revealed"):
        Play(lie=lie)(uploads_of(5), played=played)
    assert played.total is None


@pytest.mark.parametrize("fooled", [("p000",), ("p000", "p001"), ("p000", "p001", "p002")])
def test_different_dropouts_shown_to_different_parties_reveal_nothing(fooled):
    """Some mask without p004 and others with it: theirs are different sums, and the server is told so."""

    def lie(at, name, reply):
        if name in fooled and at == UPLOAD:
            return Message({n: text for n, text in reply.arrays.items() if n != "p004"}, reply.weight)
        return reply

    played = Played({}, None)
    with pytest.raises(PartyError, match=r"'p000', phase 2 .*who takes part"):
        Play(lie=lie, silent={"p004": UNMASKING})(uploads_of(5), played=played)
    assert not played.sent(UNMASKING)


@pytest.mark.parametrize("what", ["participants", "model"])
def test_parties_of_different_sums_do_not_answer_for_each_other(what):
    """A server that tells some of them about other participants, or another model, and asks all for the same list."""
    reduction, uploads = SecureSum(), uploads_of(6)
    before, played = Play(reduction)(uploads), Played({}, None)
    Play(reduction, until=UPLOAD)(uploads, before=before, index=1, played=played)
    names = names_of(6)[:5]
    others = replace(played.context, participants=tuple(names))
    other = others if what == "participants" else replace(played.context, model=Message({"H": np.zeros(2)}))
    for name in names:
        context = other if name in names[:2] else played.context
        state = reduction.start(before.identities[name], uploads[name], Sum(), context)
        played.states[name], _ = reduction.client_step(UPLOAD, state, Message({}))
    said = answers_to(played, dict.fromkeys(names[:2] + names[3:], names))
    assert not read_by_a_liar(played, said), "four were shown this list, for two different sums"
    said = answers_to(played, dict.fromkeys(names[1:], names))
    assert not read_by_a_liar(played, {name: said[name] for name in names[1:]}).keys() & {names[1]}


def test_a_server_that_asks_twice_is_refused():
    played = at_the_list(5)
    reduction, state = SecureSum(), played.states["p000"]
    state, _ = reduction.client_step(UNMASKING, state, other_list(Message({})))
    for phase in (*range(4), 4, 9, -1):
        with pytest.raises(PartyError, match=rf"'p000'.*phase {phase} out of turn.*both secrets"):
            reduction.client_step(phase, state, other_list(Message({}), "p004"))
    fresh = reduction.start(played.identities["p000"], uploads_of(5)["p000"], Sum(), played.context)
    with pytest.raises(PartyError, match=r"'p000', phase 2 .*has no keys for this sum.*Nothing was sent"):
        reduction.client_step(UPLOAD, fresh, Message({}))


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        (["p000", "p001"], r"2 of 5 parties answered, and 3 are needed"),
        (["p001", "p002", "p003"], r"'p000'.*lists this party as dropped"),
        (["p000", "p001", "p002", "p009"], r"'p009'.*not in this sum"),
        (["p000", "p000", "p001", "p002"], r"not in this sum exactly once"),
    ],
)
def test_a_party_answers_no_list_that_would_single_somebody_out(listed, words):
    with pytest.raises(PartyError, match=words):
        SecureSum().client_step(
            UNMASKING, at_the_list(5).states["p000"], Message({"survivors": names_as_array(listed)}, 0.0)
        )


def revealed_in(played):
    """Each party's secret that the server of a sum knows after it, from what was sent in the open."""
    said = {n: (played.names, message["body"].tobytes()) for n, message in played.sent(UNMASKING).items()}
    shares = read_by_a_liar(played, said)
    sum_context = played.states[min(said)].sum_context
    params, numbers, found = sum_context.params, sum_context.group.admitted.numbers, {}
    weights = weights_at_zero([numbers[name] for name in sorted(shares)[: params.threshold]])
    for place, dealer in enumerate(params.participants):
        points = {numbers[n]: int.from_bytes(text[33 * place :][:33], "big") for n, (_, text) in shares.items()}
        found[dealer] = combine(points, weights).to_bytes(33, "big")[1:]
    return found


@pytest.mark.parametrize("inside", [False, True])
def test_one_secret_of_each_party_is_revealed_and_never_both(inside):
    """From all that is sent in the open: the seeds of survivors and the keys of the dropped, and no other secret."""
    before = Play()(uploads_of(5)) if inside else None
    done = Play(silent={"p003": UPLOAD})(uploads_of(5), before=before, index=int(inside))
    own = before.dealers["p003"].secrets[1] if inside else done.secrets["p003"]
    for dealer, secret in revealed_in(done).items():
        assert secret == (own.key if dealer == "p003" else done.secrets[dealer].seed)
    expected = {33 * 5 + 16 + 33 + 81 * 3}
    assert {len(m["body"]) for m in done.sent(UNMASKING).values()} == expected, "no room for another share"


def require_that_sums_do_not_help_each_other(reduction):
    """p003 drops out of the second of three sums, which gives away its mask key; the third gives away its seed."""
    first = Play(reduction)(uploads_of(5))
    second = Play(reduction, silent={"p003": UPLOAD})(uploads_of(5), before=first, index=1)
    third = Play(reduction)(uploads_of(5), before=second, index=2)
    assert third.phases == [UPLOAD, UNMASKING]
    require_sum(third.total, list(uploads_of(5).values()), reduction)
    key_known, seeds = revealed_in(second)["p003"], revealed_in(third)
    sum_context, vector = third.states["p000"].sum_context, third.sent(UPLOAD)["p003"]["body"].copy()
    transcript = mask_transcript(sum_context, third.drafts["p003"].header.common)
    vector = vector - mask(seed_stream(seeds["p003"], transcript), len(vector))
    publics = {name: sum_context.mask_key(name) for name in third.names if name != "p003"}
    for other, secret in shared_secrets(key_known, publics).items():
        stream = mask(pair_stream(secret, "p003", other, transcript), len(vector))
        vector = vector - stream if other > "p003" else vector + stream
    assert (vector != third.drafts["p003"].vector).mean() > 0.9


def test_a_key_that_was_given_away_is_of_no_use_in_the_next_sum(monkeypatch):
    require_that_sums_do_not_help_each_other(SecureSum())
    drawn = client._advertise

    def reused(state, reply):
        state, _ = drawn(state, reply)
        secrets = (state.setup_draft.secrets[0],) * len(state.setup_draft.secrets)
        state = replace(state, setup_draft=replace(state.setup_draft, secrets=secrets))
        body = client._advertised_keys(state.identity, state.setup_draft.share_key, secrets).to_bytes()
        message_context = state.draft.params.message_context(KEYS)
        return state, sign_message(message_context, state.identity.party, state.identity.signing, body)

    monkeypatch.setattr(client, "_advertise", reused)
    with pytest.raises(PartyError, match="has sent as well"):
        require_that_sums_do_not_help_each_other(SecureSum())
    monkeypatch.setattr(secure_messages, "_check_keys", lambda message_context, adverts: None)
    with pytest.raises(AssertionError):
        require_that_sums_do_not_help_each_other(SecureSum())


def test_a_late_upload_of_a_party_declared_dropped_stays_hidden():
    """The server knows its mask key by then and can remove what it shares with others; its own mask remains."""
    late = {}

    def change(at, inbox):
        if at == UPLOAD:
            late.update(p003=inbox["p003"])
            return {name: message for name, message in inbox.items() if name != "p003"}
        return inbox

    uploads = {name: Message({"H": np.full(20_000, 12.5)}, 7.0) for name in names_of(5)}
    done = Play(predictable(4), silent={"p003": UNMASKING}, change=change)(uploads)
    assert done.names == ("p000", "p001", "p002", "p004")
    draft, vector, secrets = done.drafts["p003"], late["p003"]["body"].copy(), done.secrets
    transcript = mask_transcript(done.states["p000"].sum_context, draft.header.common)
    publics = {name: public_key(secrets[name].key) for name in done.names}
    for other, secret in shared_secrets(secrets["p003"].key, publics).items():
        stream = mask(pair_stream(secret, "p003", other, transcript), len(vector))
        vector = vector - stream if other > "p003" else vector + stream
    own = mask(seed_stream(secrets["p003"].seed, transcript), len(vector))
    assert_array_equal(vector - own, draft.vector, "the seed alone is missing")
    assert (vector != draft.vector).mean() > 0.99
    assert stats.chisquare(np.bincount(np.frombuffer(vector.tobytes(), np.uint8), minlength=256)).pvalue > 1e-4

    def after(at, inbox):
        inbox = change(at, inbox)
        return {**inbox, "p003": late["p003"]} if at > UPLOAD else inbox

    with pytest.raises(PartyError, match=r"'p003', phase 3 .*dropped out of this sum before.*stays masked"):
        Play(silent={"p003": UNMASKING}, change=after)(uploads)


@pytest.mark.parametrize(
    ("phase", "place", "words"),
    [
        (UNMASKING, 40, r"'p002', phase 3 .*shares are unreadable"),
        (UNMASKING, 33 * 5 + 16 + 5, r"'p002', phase 3 .*shares are unreadable"),
        (UNMASKING, 33 * 5 + 16 + 33 + 5, r"'p002', phase 3 .*and that of 'p000' do not match"),
        (UNMASKING, -1, r"'p004', phase 3 .*and that of 'p002' do not match"),
        (UNMASKING, range(33 * 5 + 16 + 33, 33 * 5 + 16 + 33 + 4 * 81), r"Party 'p002', phase 3 .*'p000', 'p001'"),
        (SHARES, 5, r"'p002', phase 1 .*for 'p000' do not match its commitments"),
        (SHARES, -1, r"'p002', phase 1 .*for 'p004' cannot be opened"),
    ],
)
def test_a_party_that_sends_other_shares_than_it_has_or_promised_is_named(phase, place, words):
    """Properly signed, and still noticed; of two whose answers do not fit, one may be honest, and both are named."""

    def change(at, inbox):
        if at != phase:
            return inbox
        body = bytearray(inbox["p002"]["body"].tobytes())
        for one in place if isinstance(place, range) else (place,):
            body[one] ^= 1
        return {**inbox, "p002": signed_by("p002", played, at, bytes(body))}

    played = Played({}, None)
    with pytest.raises(PartyError, match=words):
        Play(change=change)(uploads_of(5), played=played)
    assert played.total is None


def test_a_holder_that_gives_away_another_share_than_it_got_is_named():
    def change(at, inbox):
        if at == UPLOAD:
            state = played.states["p002"]
            place, shares = state.setup, state.setup.held[0]
            place = replace(place, held={**place.held, 0: shares[:66] + shares[:66] + shares[132:]})
            played.states["p002"] = replace(state, identity=replace(state.identity, setup=place))
        return inbox

    played = Played({}, None)
    with pytest.raises(PartyError, match=r"'p002', phase 3 .*share of a secret of 'p001' is not the one"):
        Play(change=change)(uploads_of(5), played=played)


def test_what_is_no_share_is_an_error_of_ours_even_where_two_have_agreed_on_it(monkeypatch):
    """p002 deals it to p001, with a commitment that fits, and p001 does not mind."""

    def change(at, inbox):
        if at != SHARES:
            return inbox
        dealer = played.states["p002"].setup_draft
        honest = split_among(dealer.admitted, 3, system_source, dealer.secrets)
        false = {**honest, "p001": b"\xff" * len(honest["p001"])}
        played.states["p002"] = replace(played.states["p002"], setup_draft=replace(dealer, held=honest["p002"]))
        return {**inbox, "p002": signed_by("p002", played, at, build_shares_body("p002", false, dealer.keys))}

    with monkeypatch.context() as patched:
        honest = secret_sharing.parse_share
        patched.setattr(secret_sharing, "parse_share", lambda text: honest(text) if text.strip(b"\xff") else 0)
        played = Played({}, None)
        with pytest.raises(PartyError, match=r"'p002', phase 3 .*dealt an invalid share to 'p001'"):
            Play(change=change)(uploads_of(5), played=played)


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_dealer_whose_shares_do_not_give_its_secret_back_is_named(is_dropped):
    """All shares fit their commitments, and each other; the secret is another than was announced."""

    def change(at, inbox):
        if at != SHARES:
            return inbox
        state = played.states["p002"]
        dealer, params = state.setup_draft, state.draft.params
        false = [Secrets(bytes(32), bytes(range(32)))] * params.batch
        wrong = split_among(dealer.admitted, params.threshold, system_source, false)
        played.states["p002"] = replace(state, setup_draft=replace(dealer, held=wrong["p002"]))
        return {**inbox, "p002": signed_by("p002", played, at, build_shares_body("p002", wrong, dealer.keys))}

    played = Played({}, None)
    with pytest.raises(PartyError, match=r"'p002', phase 3 .*do not reconstruct the secret.*no upload was revealed"):
        Play(change=change, silent={"p002": UPLOAD} if is_dropped else {})(uploads_of(5), played=played)


def test_a_key_that_is_sent_twice_is_refused():
    """By two parties, or by one for two sums."""

    def change(at, inbox):
        dealer, state = played.dealers["p001"], played.states["p001"]
        secrets = (dealer.secrets[0], played.dealers[owner].secrets[0], *dealer.secrets[2:])
        body = client._advertised_keys(state.identity, dealer.share_key, secrets).to_bytes()
        return {**inbox, "p001": signed_by("p001", played, at, body)}

    for owner in ("p000", "p001"):
        played = Played({}, None)
        with pytest.raises(PartyError, match=rf"'p001', phase 0 .*a key that '{owner}' has sent as well"):
            Play(change=change)(uploads_of(4), played=played)


def set_up_bytes(parties, batch):
    """What a party sends in a set-up: docs/reference/secure-aggregation.md."""
    return (64 + 64 * batch) + (64 * batch * parties + (parties - 1) * (66 * batch + 16)) + 2 * (64 + 8)


@pytest.mark.parametrize("batch", [1, 3])
def test_bytes_are_those_of_the_formula(batch):
    parties, reduction = 6, SecureSum(batch=batch)
    first = Play(reduction)(uploads_of(parties))
    second = Play(reduction, silent={"p001": UPLOAD, "p004": UNMASKING})(uploads_of(parties), before=first, index=1)
    about = 32 + len(secure_messages.contents_to_json(first.drafts["p000"].header.contents))
    numbers = 8 * (15 + 3 + 1)
    for done, survivors in ((first, 6), (second, 5)):
        sent = dict.fromkeys(uploads_of(parties), 0)
        for _, name, message in done.traffic:
            sent[name] += message.nbytes
        upload = numbers + about + 64 + 8
        answer = 33 * parties + 16 + 33 + 81 * (survivors - 1) + 64 + 8
        beginning = set_up_bytes(parties, batch) if done is first or batch == 1 else 0
        silent = {"p001": beginning, "p004": beginning + upload} if done is second else {}
        assert sent == {name: silent.get(name, beginning + upload + answer) for name in sent}
    assert shares_body_size(parties, batch) == 64 * batch * parties + (parties - 1) * (66 * batch + 16)


def phases_of(rounds):
    return [sorted({phase for _, phase, _ in done.traffic}) for done in rounds]


WHOLE, INSIDE = [KEYS, SHARES, UPLOAD, UNMASKING], [UPLOAD, UNMASKING]


@pytest.mark.parametrize(
    ("batch", "absent", "silent", "expected"),
    [
        (16, {}, {}, [WHOLE, INSIDE, INSIDE, INSIDE, INSIDE]),
        (2, {}, {}, [WHOLE, INSIDE, WHOLE, INSIDE, WHOLE]),
        (1, {}, {}, [WHOLE] * 5),
        (16, {1: {"p00"}, 2: {"p01", "p02"}}, {}, [WHOLE, INSIDE, INSIDE, INSIDE, INSIDE]),
        (16, {0: {"p00"}, 1: {"p00"}}, {}, [WHOLE, INSIDE, WHOLE, INSIDE, INSIDE]),
        (16, {1: {"p00", "p01", "p02"}}, {}, [WHOLE, WHOLE, WHOLE, INSIDE, INSIDE]),
        (16, {}, {1: {"p00": 2}, 2: {"p01": 3}}, [WHOLE, INSIDE, INSIDE, INSIDE, INSIDE]),
        (16, {}, {0: {"p00": 1}}, [WHOLE, WHOLE, INSIDE, INSIDE, INSIDE]),
        (16, {}, {0: {"p00": 2}}, [WHOLE, WHOLE, INSIDE, INSIDE, INSIDE]),
        (16, {}, {0: {"p00": 3}}, [WHOLE, INSIDE, INSIDE, INSIDE, INSIDE]),
    ],
)
def test_a_sum_takes_two_exchanges_inside_a_batch_and_four_with_its_set_up(batch, absent, silent, expected):
    """A set-up when the batch is used up, for somebody who was not in it, and for fewer than can remove its masks."""
    shards, program = shards_of(data(), [15, 30, 45, 60, 75]), build("exact", 4, local_steps=5)
    schedule = Schedule(5, 3, {index: frozenset(names) for index, names in absent.items()}, silent)
    rounds = list(Sequential(record=True).run(program, shards, schedule, reduction=SecureSum(batch=batch)))
    assert phases_of(rounds) == expected
    missing = {**absent, **{index: {n for n, at in some.items() if at <= UPLOAD} for index, some in silent.items()}}
    openly = run_openly(
        program, shards, 5, absent={index: frozenset(names) for index, names in missing.items() if names}
    )
    assert_allclose(rounds[0].model["H"], openly[0].model["H"], rtol=1e-6, atol=1e-8)


def test_bad_batches_are_refused():
    for batch in (0, -1, 1025, 2.5, "16", None):
        with pytest.raises(ParameterError, match=f"batch={batch!r}"):
            SecureSum(batch=batch)


def test_who_was_not_in_the_set_up_is_not_summed_with_those_who_were():
    """The server cannot have it otherwise: whom a party has no keys of, it does not mask with."""
    reduction, uploads, names = SecureSum(), uploads_of(5), tuple(names_of(5))
    before = Play(reduction, asked=names[:4])(uploads)
    context = replace(before.context, index=1, participants=names)
    assert reduction.first_phase(before.server, context) == KEYS
    state = reduction.start(before.identities["p000"], uploads["p000"], Sum(), context)
    with pytest.raises(PartyError, match=r"'p004', phase 2 .*cannot be in a sum with 'p000' without a set-up"):
        reduction.client_step(UPLOAD, state, Message({}))
    few = replace(context, participants=names[:3])
    assert reduction.first_phase(before.server, few) == UPLOAD
    assert reduction.first_phase(before.server, replace(few, index=16)) == KEYS
    assert reduction.first_phase(before.server, replace(few, index=0)) == KEYS, "each once"
    other = replace(few, layout=replace(few.layout, seed=8))
    assert reduction.first_phase(before.server, other) == KEYS


def test_a_roster_is_pinned_or_learnt_once():
    names, uploads = names_of(4), uploads_of(4)
    shards = [Shard(name, as_matrix(np.ones((1, 2))), key(5, "secret", name)) for name in names]
    pinned = SecureSum(roster=build_roster(shards))
    done = Play(pinned)(uploads)
    require_sum(done.total, list(uploads.values()), pinned)
    with pytest.raises(ParameterError, match=r"'p000' is not in the roster with the key"):
        Play(SecureSum(roster={**build_roster(shards), "p000": bytes(32)}))(uploads)
    with pytest.raises(ParameterError, match=r"'p003' is not in the roster"):
        Play(SecureSum(roster={name: k for name, k in build_roster(shards).items() if name != "p003"}))(uploads)
    with pytest.raises(ParameterError, match=r"'p000' has no secret, so anyone could sign for it"):
        pinned.setup_party("p000", 0, done.context.layout)
    learnt = Play(SecureSum(batch=1))(uploads)
    stranger = SecureSum(batch=1).setup_party("p002", 12345, learnt.context.layout)
    learnt.identities["p002"] = stranger
    with pytest.raises(PartyError, match=r"'p002', phase 0 .*signing key is not the one that it is known by"):
        Play(SecureSum(batch=1))(uploads, before=learnt, index=1)


def play_with(reduction, states, context):
    """All phases with these seats."""
    server, reply = None, Message({})
    for phase in range(4):
        said = {name: reduction.client_step(phase, state, reply) for name, state in states.items()}
        states = {name: state for name, (state, _) in said.items()}
        server, reply = reduction.server_step(
            phase, {name: message for name, (_, message) in said.items()}, server, context
        )
    return reduction.result(server, Sum(), context)


def test_parties_that_were_sent_different_models_are_not_summed():
    """Else a server could send one party a model of its own, and see what it alone does to the sum."""
    reduction, played = SecureSum(), Played({}, None)
    Play(until=0)(uploads_of(4), played=played)
    for model in (Message({"H": np.zeros(2)}), Message({"H": np.ones(2)}, 2.0), Message({"G": np.ones(2)})):
        for victim, usual in (("p001", "p000"), ("p000", "p001")):
            other = replace(played.context, model=model)
            state = reduction.start(played.identities[victim], uploads_of(4)[victim], Sum(), other)
            states = {**played.states, victim: state}
            words = rf"'{victim}', phase 2 .*another model than '{usual}'.*all uploads stay masked"
            with pytest.raises(PartyError, match=words):
                play_with(reduction, states, played.context)


def test_parties_with_other_bounds_are_not_summed():
    played = Played({}, None)
    Play(until=0)(uploads_of(4), played=played)
    wide = SecureSum(bound=1e12)
    played.states["p001"] = wide.start(played.identities["p001"], uploads_of(4)["p001"], Sum(), played.context)
    inbox = {n: SecureSum().client_step(KEYS, played.states[n], Message({}))[1] for n in names_of(4)}
    with pytest.raises(PartyError, match=r"'p001', phase 0.*other settings \(bounds"):
        SecureSum().server_step(KEYS, inbox, None, played.context)
    same = SecureSum(bound=10**9, weight_bound=np.float64(1e9), fewest=np.int64(3))
    played.states["p001"] = same.start(played.identities["p001"], uploads_of(4)["p001"], Sum(), played.context)
    inbox = {n: SecureSum().client_step(KEYS, played.states[n], Message({}))[1] for n in names_of(4)}
    assert SecureSum().server_step(KEYS, inbox, None, played.context), "the same bounds in other number types"


def test_parties_that_were_told_something_else_are_not_summed_and_find_out_themselves():
    """The server need not look: a party reads the keys of others as they were signed, for what *it* was told."""
    played = Played({}, None)
    Play(until=0)(uploads_of(4), played=played)
    inbox = {n: SecureSum().client_step(KEYS, played.states[n], Message({}))[1] for n in names_of(4)}
    _, received = SecureSum().server_step(KEYS, inbox, None, played.context)
    other = SecureSum(context=b"another experiment")
    state = other.start(played.identities["p001"], uploads_of(4)["p001"], Sum(), played.context)
    state, said = other.client_step(KEYS, state, Message({}))
    with pytest.raises(PartyError, match=r"phase 0.*other settings"):
        other.client_step(SHARES, state, received)
    with pytest.raises(PartyError, match=r"'p001', phase 0.*other settings"):
        SecureSum().server_step(KEYS, {**inbox, "p001": said}, None, played.context)


def test_a_key_of_small_order_is_refused():
    with pytest.raises(PartyError, match=r"'p001'.*small order"):
        shared_secrets(bytes(range(32)), {"p001": bytes(32)})


def test_only_sums_can_be_masked():
    with pytest.raises(CompositionError, match=r"reads individual uploads.*fnmf-by-sums"):
        next(
            Sequential().run(
                build("fnmf-local", 4, align="assignment"),
                shards_of(data(), [20, 40]),
                Schedule(1),
                reduction=SecureSum(),
            )
        )


def test_without_the_extra_it_is_said_at_once(monkeypatch):
    crypto._module.cache_clear()
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.hashes", None)
    with pytest.raises(MissingExtra, match=re.escape('pip install "partsong[privacy]"')):
        SecureSum()
