"""Laws of the private programs under attack: what they send keeps its promise, and planted bugs are found in it.

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
from partsong.methods import build
from partsong.methods.private import party_private, row_private
from partsong.privacy import mechanisms
from partsong.privacy.accounting import Ledger
from partsong.privacy.auditing import audit
from partsong.privacy.randomness import InsecureSource
from partsong.privacy.row_level import BoundedRows

DELTA, EPSILON, ROUNDS, RUNS, SEED = 1e-5, 3.0, 2, 300, 3
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


def is_refuted(program, first, second, claimed=None, runs=RUNS, **bugs):
    """Whether two rounds of a program on two neighbouring data refute what its release, or another's, claims."""
    release = (claimed or program).release
    a, b = (transcript_of(program, X, label, **bugs) for X, label in ((first, "a"), (second, "b")))
    finding = audit(a, b, runs=runs, delta=DELTA)
    mu = math.sqrt(ROUNDS) / release.noise_multiplier
    return finding.refutes_gaussian(mu) or finding.refutes(Ledger().after(release, ROUNDS).epsilon(DELTA))


# --- a party: all its data are exchanged for others -------------------------------------------------------------------

CLIP = 0.01


def of_parties():
    consensus = build("fedavg", 1, local_steps=1)
    return party_private(consensus, epsilon=EPSILON, delta=DELTA, rounds=ROUNDS, clip=CLIP)


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
    return row_private(1, epsilon=EPSILON, delta=DELTA, rounds=ROUNDS, row_bound=1.0, **settings)


def test_private_sums_keep_their_promise_about_rows():
    assert not is_refuted(of_rows(), NOTHING, ONE_MORE, runs=MANY)
    few = replace(of_rows(), noise_multiplier=of_rows().noise_multiplier / 4)
    assert is_refuted(few, NOTHING, ONE_MORE, of_rows(), MANY), "a quarter of the noise"


def test_a_weight_that_is_not_bounded_is_found_in_private_sums(monkeypatch):
    def unbounded(self, W, whole_rows):
        return (np.rint(W / self.weight_unit),) * 2

    program = of_rows(weight_bound=0.1)
    assert not is_refuted(program, NOTHING, ONE_MORE)
    monkeypatch.setattr(BoundedRows, "whole_weights", unbounded)
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
