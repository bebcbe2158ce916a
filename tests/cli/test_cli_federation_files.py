"""`partsong federation … --engine files`: the same federation, with sites that reach a folder and no server."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("cryptography")

from partsong.consortium.server_folder import ServerFolder
from partsong.consortium.site_folder import SiteFolder
from partsong.core import Schedule, Shard
from partsong.data.matrix import as_matrix
from partsong.engines.sequential import Sequential
from partsong.federation.conducting import conduct
from partsong.federation.experiment import Experiment
from partsong.federation.ledger import SiteLedger
from partsong.federation.site_plan import plan_of
from partsong.federation.transport import InProcess
from partsong.io.model_file import load_model

SITES = ("east", "north", "south")
EXPERIMENT = 'method = "exact"\nrank = 2\nrounds = 2\nseed = 3\nmasked = true\nmask_bound = 1e6\n'


@pytest.fixture
def federation(told, tmp_path):
    """Three sites that were admitted while no server runs, each with rows of its own."""
    told("federation", "init", "liver", "--name", "liver", "--address", "nmf.example.org:8443")
    for number, site in enumerate(SITES):
        np.save(tmp_path / f"{site}.npy", np.random.default_rng(number).random((20, 6)))
        told("federation", "invite", site, "--folder", "liver", "-o", f"{site}.zip")
        told("federation", "join", f"{site}.zip", "--data", f"{site}.npy", "--yes")
    cards = [f"site-{site}/card.toml" for site in SITES]
    said = told("federation", "admit", *cards, "--folder", "liver", "--engine", "files")
    assert said["sites"] == list(SITES)
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    return tmp_path / "liver"


@pytest.mark.slow
def test_a_run_over_files_between_processes_is_that_of_one_process_bit_for_bit(federation, told, tmp_path):
    words = (sys.executable, "-m", "partsong", "federation", "join")
    more = ("--roster", "liver/roster.toml", "--yes", "--drop", "drop")
    nodes = [subprocess.Popen([*words, f"{site}.zip", *more], stderr=subprocess.DEVNULL) for site in SITES]
    try:
        over = ("--folder", "liver", "--engine", "files", "--drop", "drop", "--timeout", "60")
        told("federation", "run", "experiment.toml", *over, "-o", "model.safetensors")
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    plan = plan_of(Experiment.read(tmp_path / "experiment.toml").told(), 3, None)
    shards = [Shard(site, as_matrix(np.load(tmp_path / f"{site}.npy"))) for site in SITES]
    *_, last = Sequential().run(plan.program, shards, Schedule(plan.exchanges, 3), reduction=plan.reduction)
    expected = np.asarray(plan.program.components(last.checkpoint.server))
    assert load_model(tmp_path / "model.safetensors").components.tobytes() == np.ascontiguousarray(expected).tobytes()
    for site in SITES:
        assert SiteLedger(tmp_path / f"site-{site}" / "state" / "ledger.jsonl").serial == plan.exchanges
        assert (tmp_path / f"site-{site}" / "results" / "experiment" / "model.safetensors").exists()
    assert (federation / "serials.json").read_text() == '{"east": 2, "north": 2, "south": 2}\n'


def test_a_run_is_not_resumed_once_a_site_was_removed(federation, told, tmp_path):
    server, sites = ServerFolder.at(federation), {}
    for site in SITES:
        place = SiteFolder.at(tmp_path / f"site-{site}")
        place.pin(server.roster(), server.roster().fingerprint)
        sites[site] = place.opened().answer
    over = ("--folder", "liver", "--engine", "files", "--drop", "drop", "--timeout", "1")
    told("federation", "run", "experiment.toml", *over, code=1)
    experiment, place = Experiment.read(tmp_path / "experiment.toml"), server.run("experiment")
    roster = dict(server.roster().keys)
    next(conduct(experiment, InProcess(sites), place.state, "experiment", roster=roster))
    told("federation", "remove", "south", "--folder", "liver")
    said = told("federation", "run", "experiment.toml", *over, "--resume", code=1)
    assert said["type"] == "ParameterError"
    assert "sites have changed" in said["error"]
    assert "gone: south" in said["error"]


def test_files_and_a_folder_for_them_go_together(federation, told):
    for words in (("--engine", "files"), ("--drop", "drop")):
        said = told("federation", "run", "experiment.toml", "--folder", "liver", *words, code=1)
        assert "go together" in said["error"]


def test_a_site_that_answers_nothing_over_files_is_lost_and_the_run_can_be_resumed(federation, told):
    over = ("--folder", "liver", "--engine", "files", "--drop", "drop", "--timeout", "1")
    assert told("federation", "run", "experiment.toml", *over, code=1)["type"] == "SiteLost"
    assert told("federation", "run", "experiment.toml", *over, "--resume", code=1)["type"] == "SiteLost"
