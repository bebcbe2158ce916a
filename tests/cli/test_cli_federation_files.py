"""`partsong federation … --engine files`: the same federation, with sites that reach a folder and no server."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pytest

pytest.importorskip("cryptography")

from partsong.core.interfaces import Schedule, Shard
from partsong.data.conversion import as_matrix
from partsong.engines.local import Sequential
from partsong.federation.commands.server import line_of
from partsong.federation.experiment import Experiment
from partsong.federation.ledger import SiteLedger
from partsong.federation.locks import holder_of
from partsong.federation.server.launch import record_in, run_experiment, run_over
from partsong.federation.setup.server_folder import ServerFolder, require_not_ended
from partsong.federation.setup.site_folder import SiteFolder
from partsong.federation.site.plan import plan_of
from partsong.federation.transports.base import InProcess
from partsong.federation.transports.files import requests_in
from partsong.io.model_file import load_model

SITES = ("east", "north", "south")
EXPERIMENT = 'method = "exact"\nrank = 2\nrounds = 2\nseed = 3\nsecure_aggregation = true\nmask_bound = 1e6\n'


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
    more = ("--roster", "liver/roster.toml", "--yes", "--exchange-folder", "drop")
    nodes = [subprocess.Popen([*words, f"{site}.zip", *more], stderr=subprocess.DEVNULL) for site in SITES]
    try:
        over = ("--folder", "liver", "--engine", "files", "--exchange-folder", "drop", "--timeout", "60")
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
    over = ("--folder", "liver", "--engine", "files", "--exchange-folder", "drop", "--timeout", "1")
    told("federation", "run", "experiment.toml", *over, code=1)
    experiment, place = Experiment.read(tmp_path / "experiment.toml"), server.run("experiment")
    roster = dict(server.roster().keys)
    next(run_experiment(experiment, InProcess(sites), place.state, "experiment", roster=roster))
    told("federation", "remove", "south", "--folder", "liver")
    said = told("federation", "run", "experiment.toml", *over, "--resume", code=1)
    assert said["type"] == "ParameterError"
    assert "sites have changed" in said["error"]
    assert "gone: south" in said["error"]


def test_a_run_that_has_ended_by_its_time_is_over_and_one_that_was_broken_off_may_have_more(federation, told, tmp_path):
    server, sites, text = ServerFolder.at(federation), {}, 'method = "asyn-sd"\nrank = 2\nrounds = 9999\n'
    for site in SITES:
        place = SiteFolder.at(tmp_path / f"site-{site}")
        place.pin(server.roster(), server.roster().fingerprint)
        (place.path / "site.toml").write_text(
            "minimum_parties = 3\nsecure_aggregation = false\nmaximum_rounds = 99999\n"
        )
        sites[site] = place.opened().answer
    place = server.run("timed")
    place.folder.mkdir()
    place.experiment.write_text(text + "time_budget = 1.0\n")
    place.settings.write_text("{}")
    ended = run_over(lambda: InProcess(sites), server, place)
    (tmp_path / "timed.toml").write_text(text + "time_budget = 60.0\n")
    over = ("--folder", "liver", "--engine", "files", "--exchange-folder", "drop")
    said = told("federation", "run", "timed.toml", *over, "--resume", code=1)
    assert said["type"] == "ParameterError"
    assert f"after {ended['rounds']} of {3 * 9999} arrivals" in said["error"]
    assert place.result.exists()
    record = record_in(place.state)
    require_not_ended(place, record, record.index)
    place.result.unlink()
    require_not_ended(place, record, 3 * 9999)


def test_files_and_a_folder_for_them_go_together(federation, told):
    for words in (("--engine", "files"), ("--exchange-folder", "drop")):
        said = told("federation", "run", "experiment.toml", "--folder", "liver", *words, code=1)
        assert "go together" in said["error"]


def test_a_site_that_answers_nothing_over_files_is_lost_and_the_run_can_be_resumed(federation, told):
    over = ("--folder", "liver", "--engine", "files", "--exchange-folder", "drop", "--timeout", "1")
    assert told("federation", "run", "experiment.toml", *over, code=1)["type"] == "SiteLost"
    assert told("federation", "run", "experiment.toml", *over, "--resume", code=1)["type"] == "SiteLost"


HOLDS = """
import sys, time
from pathlib import Path
from partsong.federation.locks import held
with held(Path(sys.argv[1]), ""):
    time.sleep(60)
"""


@pytest.mark.skipif(os.name != "posix", reason="signals and locks")
def test_stop_ends_the_process_that_works_on_a_run_over_files_also_where_flower_had_it_before(federation, told):
    server = ServerFolder.at(federation)
    place = server.run("experiment")
    place.folder.mkdir()
    place.experiment.write_text(EXPERIMENT)
    assert "never started, is over" in told("federation", "stop", "experiment", "--folder", "liver", code=1)["error"]
    place.number.write_text("7")
    requests_in(federation, server, place)
    process = subprocess.Popen([sys.executable, "-c", HOLDS, place.lock])
    try:
        until = time.monotonic() + 30
        while holder_of(place.lock) != process.pid and time.monotonic() < until:
            time.sleep(0.01)
        said = told("federation", "stop", "experiment", "--folder", "liver")
        assert said == {"stopped": "experiment"}
        assert process.wait(5) != 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals and locks")
def test_a_run_over_files_that_was_stopped_goes_on(federation, told, tmp_path):
    words = (sys.executable, "-m", "partsong", "federation")
    over = ("--folder", "liver", "--engine", "files", "--exchange-folder", "drop", "--timeout", "60")
    run = subprocess.Popen([*words, "run", "experiment.toml", *over], stderr=subprocess.PIPE, text=True)
    more = ("--roster", "liver/roster.toml", "--yes", "--exchange-folder", "drop")
    nodes = []
    try:
        until = time.monotonic() + 60
        while not list(tmp_path.glob("drop/*/in/*.request")) and time.monotonic() < until:
            time.sleep(0.05)
        told("federation", "stop", "experiment", "--folder", "liver")
        assert "--resume goes on" in run.communicate(timeout=30)[1]
        assert run.returncode == 143
        nodes += [subprocess.Popen([*words, "join", f"{site}.zip", *more], stderr=subprocess.DEVNULL) for site in SITES]
        assert told("federation", "run", "experiment.toml", *over, "--resume")["rounds"] == 2
    finally:
        for process in (run, *nodes):
            process.kill()
            process.wait()


@pytest.mark.parametrize(("heard", "said"), [(["east"], "1 site,"), (["east", "north"], "2 sites,")])
def test_one_site_is_not_several(heard, said):
    told = {"round": 1, "rounds": 3, "participants": heard, "refused": {}, "bytes_up": {"east": 8}, "bytes_down": 8}
    assert f"exchange 1 of 3: {said}" in line_of({**told, "seconds": 0.1})
