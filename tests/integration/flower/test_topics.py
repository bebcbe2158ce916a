"""Topics over real processes of Flower: sites that are drawn from the seed, and the bits of one process."""

from __future__ import annotations

import numpy as np
import pytest

import partsong
from partsong.engines.rounds import sample_participants
from partsong.federation.commands import demo

pytest.importorskip("flwr")
from tests.integration.flower.flower_processes import SITES, federation

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")
ROUNDS = 3
EXPERIMENT = f"""
method = "fednmf-mi"
rank = 3
rounds = {ROUNDS}
seed = 5
participation = 0.7
epochs = 2
batch = 20
server = "adam"
strength = 0.2
mi_gradient = "js"
"""


def given_counts(made):
    for name, site in made.sites.items():
        np.save(site.data, np.random.default_rng(len(name)).poisson(demo.rows_of(name)).astype(np.float64))


def test_topics_with_mutual_information_have_the_bits_of_one_process(tmp_path):
    policy = 'methods = ["fednmf-mi"]\nminimum_parties = 2\n'
    with federation(tmp_path, prepare=given_counts, policy=policy) as made:
        code, told = made.run("topics", EXPERIMENT)
    assert (code, told["status"], told["rounds"]) == (0, "done", ROUNDS), told
    away = sample_participants(SITES, ROUNDS, 0.7, 5)
    assert told["absent"] == {str(index): sorted(names) for index, names in away.items()}
    assert made.is_same("topics")
    for name, site in made.sites.items():
        works = [line["attempt"][1] for line in site.opened().ledger.chain.lines()]
        assert works == [index for index in range(ROUNDS) if name not in away[index]]
        model = partsong.FederatedTopicModel.load(site.path / "results" / "topics" / "topics.safetensors")
        assert (model.method, model.n_topics_) == ("fednmf-mi", 3)
