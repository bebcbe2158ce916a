"""Laws of the audit: it never refutes a promise that is kept, and finds planted bugs, also in the private programs.

A transcript is all that leaves one party in two rounds, the second with the model that the first has led to; claims are
those of the program's own `release`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from partsong.core.interfaces import Layout, Message, Shard
from partsong.data.conversion import as_matrix
from partsong.errors import DataError, ParameterError
from partsong.methods import build
from partsong.methods.private import party_private, row_private
from partsong.privacy import mechanisms
from partsong.privacy.accounting import Ledger
from partsong.privacy.auditing import attack, audit, fisher_direction
from partsong.privacy.calibration import noise_multiplier_for
from partsong.privacy.mechanisms import ClippedGaussian, ClippedLaplace
from partsong.privacy.randomness import InsecureSource
from partsong.privacy.row_level import NoisyRowSums, RowBounds

DELTA, EPSILON, RUNS = 1e-5, 3.0, 2000
FAR = {"H": np.full(4, 1e3)}  # so far from zero that no clamping hides anything
ONE_WAY = np.array([1.0, 0.0, 0.0, 0.0])
KINDS = {"gaussian": ClippedGaussian, "laplace": ClippedLaplace}


def sends(mechanism, shifts, label, *, names=lambda run, number: (run, number)):
    """A transcript of one message for each shift from the reference, with noise of its own for each."""

    def transcript(run):
        sent = [
            mechanism.protect({"H": FAR["H"] + shift}, FAR, InsecureSource(17, label, *names(run, number)))["H"]
            - FAR["H"]
            for number, shift in enumerate(shifts)
        ]
        return np.concatenate(sent)

    return transcript


def neighbours(mechanism, rounds=1, size=None):
    """The two parties that differ most under the relation of a mechanism."""
    size = mechanism.clip if size is None else size
    other = -size * ONE_WAY if mechanism.relation == "replace" else 0 * ONE_WAY
    return [size * ONE_WAY] * rounds, [other] * rounds


def found(mechanism, first, second, **options):
    return audit(sends(mechanism, first, "a", **options), sends(mechanism, second, "b", **options), runs=RUNS)


def claimed(mechanism, rounds=1):
    return Ledger().after(mechanism.release, rounds).epsilon(DELTA)


def refuted(mechanism, finding, rounds=1):
    """Whether the audit finds the claim for `rounds` releases of a mechanism to be wrong, in either of its forms."""
    is_gaussian = isinstance(mechanism, ClippedGaussian)
    mu = math.sqrt(rounds) / mechanism.noise_multiplier
    return finding.refutes(claimed(mechanism, rounds)) or (is_gaussian and finding.refutes_gaussian(mu))


@pytest.mark.parametrize(
    ("kind", "rounds", "relation"),
    [
        ("gaussian", 1, "replace"),
        ("gaussian", 1, "zero-out"),
        ("gaussian", 3, "replace"),
        ("laplace", 1, "replace"),
        pytest.param("laplace", 1, "zero-out", marks=pytest.mark.slow),
        pytest.param("laplace", 3, "replace", marks=pytest.mark.slow),
    ],
)
def test_a_promise_that_is_kept_is_not_refuted_and_a_smaller_one_would_be(kind, rounds, relation):
    mechanism = KINDS[kind](2.0, noise_multiplier_for(EPSILON, DELTA, rounds, kind), relation)
    finding = found(mechanism, *neighbours(mechanism, rounds))
    assert not refuted(mechanism, finding, rounds)
    if kind == "gaussian":
        assert finding.refutes_gaussian(math.sqrt(rounds) / mechanism.noise_multiplier / 4)
    else:
        assert finding.refutes(0.5)
    assert (finding.confidence, finding.runs) == (0.999, RUNS)


def test_clipping_keeps_the_promise_for_parties_that_are_far_out():
    mechanism = ClippedGaussian(1.0, noise_multiplier_for(EPSILON, DELTA, 1))
    assert not refuted(mechanism, found(mechanism, *neighbours(mechanism, size=500.0)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_quarter_of_the_noise_is_found(kind):
    mechanism = KINDS[kind](1.0, noise_multiplier_for(EPSILON, DELTA, 1, kind))
    careless = replace(mechanism, noise_multiplier=mechanism.noise_multiplier / 4)
    assert refuted(mechanism, found(careless, *neighbours(careless)))


def test_a_sensitivity_of_one_clip_where_parties_are_replaced_is_found():
    """Noise for zero-out, promised for replace-one: half of what is needed."""
    mechanism = ClippedGaussian(1.0, noise_multiplier_for(EPSILON, DELTA, 1))
    careless = replace(mechanism, relation="zero-out")
    assert refuted(mechanism, found(careless, [ONE_WAY], [-ONE_WAY]))


def test_a_clip_that_is_skipped_is_found(monkeypatch):
    mechanism = ClippedGaussian(1.0, noise_multiplier_for(EPSILON, DELTA, 1))

    def unclipped(difference, grid, radius, order):
        return np.trunc(difference / grid).astype(np.int64)

    monkeypatch.setattr(mechanisms, "clipped_cells", unclipped)
    assert refuted(mechanism, found(mechanism, *neighbours(mechanism, size=10.0)))


def test_noise_that_is_used_in_two_rounds_is_found():
    """Each round alone is right; their difference has no noise in it."""
    mechanism = ClippedGaussian(1.0, noise_multiplier_for(EPSILON, DELTA, 2))
    first, second = [ONE_WAY, 0.9 * ONE_WAY], [-ONE_WAY, 0.9 * ONE_WAY]
    assert not refuted(mechanism, found(mechanism, first, second), 2)
    assert found(mechanism, first, second, names=lambda run, number: (run,)).refutes(claimed(mechanism, 2))


def rows_transcript(mechanism, n, label, *, exact_count=False):
    bounds = mechanism.bounds
    X, W = np.full((n, 2), bounds.row_bound / math.sqrt(2)), np.full((n, 1), bounds.weight_bound)
    sums = bounds.sums(W, bounds.quantize_rows(X))
    radius = bounds.radius

    def transcript(run):
        noisy = mechanism.add_noise(sums, InsecureSource(23, label, run))
        gram, cross = noisy.gram * bounds.weight_unit**2, noisy.cross * bounds.weight_unit * bounds.row_unit
        count = n if exact_count else noisy.count * 2.0**-20
        return np.concatenate([gram.ravel() / radius, cross.ravel() / radius, [count]])

    return transcript


@pytest.mark.parametrize("is_exact", [False, True])
def test_rows_keep_their_promise_unless_the_count_is_told(is_exact):
    mechanism = NoisyRowSums(RowBounds(0.7, 1.2), noise_multiplier_for(3.0, DELTA, 1))
    claim = Ledger().after(mechanism.release).epsilon(DELTA)
    first, second = (rows_transcript(mechanism, n, n, exact_count=is_exact) for n in (8, 9))
    finding = audit(first, second, runs=RUNS)
    assert finding.refutes(claim) == is_exact
    assert finding.epsilon > 0.5


def test_equal_inputs_look_equal():
    mechanism = ClippedGaussian(1.0, 0.1)
    finding = found(mechanism, [ONE_WAY], [ONE_WAY])
    assert finding.epsilon == 0
    assert not finding.refutes(0.0)


def test_the_bound_is_right_as_often_as_it_says():
    """Randomized response with ε = ln 3: at 90 % confidence at most one audit in ten may exceed it (and few more)."""
    rng = np.random.default_rng(0)
    wrong = 0
    for _ in range(200):
        first, second = rng.random((400, 1)) < 0.25, rng.random((400, 1)) < 0.75
        wrong += attack(first.astype(float), second.astype(float), delta=0.0, confidence=0.9).refutes(math.log(3))
    assert wrong <= 30


def test_the_direction_is_the_one_without_noise():
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(500, 1))
    first = np.hstack([noise, noise])
    direction = fisher_direction(first, first[::-1] + np.array([0.01, 0.0]))
    assert direction[0] == pytest.approx(-direction[1], rel=1e-3)


def test_bad_audits_are_refused():
    with pytest.raises(ParameterError, match="runs must be at least 40"):
        audit(lambda run: [0.0], lambda run: [1.0], runs=10)
    with pytest.raises(DataError, match="finite"):
        attack(np.full((50, 1), np.nan), np.zeros((50, 1)))
    with pytest.raises(ParameterError, match="confidence"):
        attack(np.zeros((50, 1)), np.zeros((50, 1)), confidence=1.0)


RELEASE_DELTA, RELEASE_EPSILON, ROUNDS, RELEASE_RUNS, SEED = 1e-5, 3.0, 2, 300, 3


MANY = 500
"""Runs by which to find out that noise is there, but too little of it."""
LAYOUT = Layout(("p",), 4, SEED)


@dataclass(frozen=True)
class Source:
    """Noise by run and release, or (a bug) the same in all releases of a run."""

    run: tuple
    is_reused: bool = False

    def __call__(self, party, release):
        return InsecureSource(11, *self.run, 0 if self.is_reused else release)


def transcript_of(program, X, label, *, tells_rows=False, is_reused=False):
    """All that a party sends in two rounds, as what differs from public numbers; `tells_rows` is a bug."""
    shard = Shard("p", as_matrix(X))

    def transcript(run):
        mine = replace(program, source=Source((label, run), is_reused))
        state, (server, model) = mine.start_party(shard, LAYOUT), started(mine)
        seen = []
        for _ in range(ROUNDS):
            state, sent = mine.local(shard, state, model)
            seen += [shown(mine, sent, model), [X.shape[0] if tells_rows else sent.weight]]
            server, model = mine.finish(server, Message(mine.aggregation([sent], model).arrays, 1.0))
        return np.concatenate(seen)

    return transcript


def started(program):
    """The server's start; for sums from H = e₁, at which the rows of these tests weigh most."""
    if hasattr(program, "start_from"):
        return program.start_from(np.eye(4)[:, :1])
    return program.start_server(LAYOUT)


def shown(program, sent, model):
    if "H" in sent.arrays:
        return (sent["H"] - model["H"]).ravel()
    bounds = program.noise(4).bounds
    gram = bounds.gram_scale * bounds.weight_unit**2 * sent["gram"].ravel()
    return np.concatenate([gram, bounds.weight_unit * bounds.row_unit * sent["cross"].ravel()]) / bounds.radius


def is_refuted(program, first, second, claimed=None, runs=RELEASE_RUNS, **bugs):
    """Whether two rounds of a program on two neighbouring data refute what its release, or another's, claims."""
    release = (claimed or program).release
    a, b = (transcript_of(program, X, label, **bugs) for X, label in ((first, "a"), (second, "b")))
    finding = audit(a, b, runs=runs, delta=RELEASE_DELTA)
    mu = math.sqrt(ROUNDS) / release.noise_multiplier
    return finding.refutes_gaussian(mu) or finding.refutes(Ledger().after(release, ROUNDS).epsilon(RELEASE_DELTA))


# --- a party: all its data are exchanged for others -------------------------------------------------------------------

CLIP = 0.01


def of_parties():
    consensus = build("fedavg", 1, local_steps=1)
    return party_private(consensus, epsilon=RELEASE_EPSILON, delta=RELEASE_DELTA, rounds=ROUNDS, clip=CLIP)


def parties(size=0.3, rows=(3, 3)):
    """Data whose H lie opposite to each other as seen from the first model, farther away than the clip."""
    h = of_parties().start_server(LAYOUT)[1]["H"][0]
    u = np.array([h[1], -h[0], h[3], -h[2]]) * size / np.linalg.norm(h)
    return [np.maximum(0, np.tile(h + sign * u, (n, 1))) for sign, n in zip((1, -1), rows, strict=True)]


def with_noise(program, factor):
    mechanism = program.mechanism
    return replace(program, mechanism=replace(mechanism, noise_multiplier=factor * mechanism.noise_multiplier))


def test_a_private_consensus_keeps_its_promise_about_parties():
    assert not is_refuted(of_parties(), *parties(), runs=MANY)
    assert is_refuted(with_noise(of_parties(), 0.25), *parties(), of_parties(), MANY), "a quarter of the noise"


def test_a_clip_that_is_skipped_in_a_consensus_is_found(monkeypatch):
    def unclipped(difference, grid, radius, order):
        return np.trunc(difference / grid).astype(np.int64)

    monkeypatch.setattr(mechanisms, "clipped_cells", unclipped)
    assert is_refuted(of_parties(), *parties())


@pytest.mark.slow
def test_noise_that_a_consensus_uses_twice_is_found():
    assert is_refuted(of_parties(), *parties(), is_reused=True)


@pytest.mark.slow
def test_a_number_of_rows_that_leaves_with_a_consensus_is_found():
    assert not is_refuted(of_parties(), *parties(rows=(3, 4)))
    assert is_refuted(of_parties(), *parties(rows=(3, 4)), tells_rows=True)


# --- a row: one more, or one less -------------------------------------------------------------------------------------

NOTHING = np.zeros((4, 4))
ONE_MORE = np.vstack([NOTHING, np.eye(4)[:1]])


def of_rows(**settings):
    return row_private(1, epsilon=RELEASE_EPSILON, delta=RELEASE_DELTA, rounds=ROUNDS, row_bound=1.0, **settings)


def test_private_sums_keep_their_promise_about_rows():
    assert not is_refuted(of_rows(), NOTHING, ONE_MORE, runs=MANY)
    few = replace(of_rows(), noise_multiplier=of_rows().noise_multiplier / 4)
    assert is_refuted(few, NOTHING, ONE_MORE, of_rows(), MANY), "a quarter of the noise"


def test_a_weight_that_is_not_bounded_is_found_in_private_sums(monkeypatch):
    def unbounded(self, W, quantized_rows):
        return (np.rint(W / self.weight_unit),) * 2

    program = of_rows(weight_bound=0.1)
    assert not is_refuted(program, NOTHING, ONE_MORE)
    monkeypatch.setattr(RowBounds, "quantize_weights", unbounded)
    assert is_refuted(program, NOTHING, ONE_MORE)


@pytest.mark.slow
def test_noise_that_private_sums_use_twice_is_found():
    assert is_refuted(of_rows(), NOTHING, ONE_MORE, is_reused=True)


@pytest.mark.slow
def test_a_number_of_rows_that_leaves_with_private_sums_is_found():
    assert is_refuted(of_rows(), NOTHING, ONE_MORE, tells_rows=True)


@pytest.mark.slow
def test_with_rows_beside_it_a_row_is_protected_as_well():
    rows = np.random.default_rng(0).random((20, 4))
    assert not is_refuted(of_rows(), rows, np.vstack([rows, 1e3 * np.eye(4)[:1]]))
