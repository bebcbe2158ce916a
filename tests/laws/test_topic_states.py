"""States of programs about topics in files: what is read was written, and a run goes on as if uninterrupted."""

from __future__ import annotations

import numpy as np
import pytest
from method_tables import fednmf, fednmf_mi

import partsong
from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Schedule, Shard
from partsong.core.streams import key
from partsong.data.conversion import as_matrix
from partsong.engines.local import Sequential
from partsong.federation import wire
from partsong.io.state_file import read_state, write_state
from partsong.methods.counts import CooccurrenceSums, FrequencySums
from partsong.methods.fedlda import FederatedLDA

QUICK = {"epochs": 2, "batch": 8, "rate": 0.1}
PROGRAMS = {
    "fednmf": fednmf(3, **QUICK),
    "fednmf adam": fednmf(3, server="adam", **QUICK),
    "fednmf-mi yogi": fednmf_mi(3, server="yogi", **QUICK),
    "fedlda": FederatedLDA(3, iterations=10, starts_over=False),
}
COUNTS = {"pairs": CooccurrenceSums.of([(0, 1, 2), (2, 3)]), "frequencies": FrequencySums()}


def shards():
    draw = np.random.default_rng(0)
    return [Shard(name, as_matrix(draw.poisson(0.7, (20, 9)) * 1.0), key(1, name)) for name in "abc"]


def run(program, rounds, resume=None):
    return list(Sequential().run(program, shards(), Schedule(rounds, 3), reduction=PlainReduction(), resume=resume))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_run_from_a_file_is_the_uninterrupted_run(name, tmp_path):
    whole = run(PROGRAMS[name], 4)
    write_state(tmp_path / "c.ckpt", whole[1].checkpoint)
    point = read_state(tmp_path / "c.ckpt")
    rest = run(PROGRAMS[name], 4, point)
    assert [np.asarray(done.model["H"]).tobytes() for done in rest] == [
        np.asarray(done.model["H"]).tobytes() for done in whole[2:]
    ]


@pytest.mark.parametrize("name", [*PROGRAMS, *COUNTS])
def test_sites_and_servers_can_keep_their_states(name, tmp_path):
    program = (PROGRAMS | COUNTS)[name]
    point = run(program, 1)[-1].checkpoint
    for number, state in enumerate((point.server, *point.parties.values())):
        wire.save_state(tmp_path / f"{number}.state", state)
        again = wire.load_state(tmp_path / f"{number}.state", type(state))
        assert type(again) is type(state)
        assert repr(again) == repr(state)


def test_a_mixture_is_completed_without_penalties_of_least_squares():
    rows = [shard.matrix.X for shard in shards()]
    model = partsong.FederatedNMF(method=FederatedLDA(3), random_state=0, rounds=5).fit(rows)
    assert np.allclose(model.components_.sum(axis=1), 1)
    assert np.allclose(model.transform(np.vstack(rows)).sum(axis=1), 1)
