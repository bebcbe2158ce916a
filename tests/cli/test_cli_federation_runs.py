"""`partsong federation run`: a name is used up once a site has begun, and a run that is done stays so."""

from __future__ import annotations

import json
import shlex

import numpy as np
import pytest

pytest.importorskip("cryptography")

from partsong.cli.federation_runs import _line
from partsong.consortium import file_drop
from partsong.consortium.locking import held
from partsong.consortium.roster import Card
from partsong.consortium.server_folder import ServerFolder
from partsong.consortium.site_folder import SiteFolder
from partsong.federation.transport import InProcess
from partsong.federation.wire import Kind, Request

SITES = ("east", "north", "south")
EXPERIMENT = 'method = "exact"\nrank = 2\nrounds = 1\nmasked = true\nmask_bound = {}\n'
WORDS = ("federation", "run", "first.toml", "--folder", "liver", "--engine", "files", "--drop", "drop")


@pytest.fixture
def place(told, tmp_path, monkeypatch):
    """Three sites whose policy asks for a bound of masks of 1e6, all of them in this process."""
    told("federation", "init", "liver", "--name", "liver", "--address", "nmf.example.org:8443")
    server, sites = ServerFolder.at(tmp_path / "liver"), {}
    for number, site in enumerate(SITES):
        np.save(tmp_path / f"{site}.npy", np.random.default_rng(number).random((8, 4)))
        told("federation", "invite", site, "--folder", "liver", "-o", f"{site}.zip")
        told("federation", "join", f"{site}.zip", "--data", f"{site}.npy", "--yes")
        server.admit(Card.read(tmp_path / f"site-{site}" / "card.toml"))
    for site in SITES:
        folder = SiteFolder.at(tmp_path / f"site-{site}")
        folder.pin(server.roster(), server.roster().fingerprint)
        (folder.path / "site.toml").write_text("masked = true\nminimum_parties = 3\nminimum_mask_bound = 1e6\n")
        sites[site] = folder.opened().answer
    monkeypatch.setattr(file_drop, "requests_in", lambda *places: InProcess(sites))
    return server.run("first")


def test_an_experiment_that_was_refused_is_corrected_under_its_name(place, told, invoke, tmp_path, monkeypatch):
    experiment = tmp_path / "first.toml"
    experiment.write_text(EXPERIMENT.format("1e3"))
    said = told(*WORDS, code=1)
    assert "'mask-bound'" in said["error"]
    with held(place.lock, "busy"):
        experiment.write_text(EXPERIMENT.format("1e6"))
        assert "another process" in told(*WORDS, code=1)["error"]
    assert "1e3" in place.experiment.read_text()
    assert told(*WORDS)["status"] == "done"
    experiment.write_text(EXPERIMENT.format("1e7"))
    assert "already" in told(*WORDS, code=1)["error"]
    assert "other settings" in told(*WORDS, "--resume", code=1)["error"]
    experiment.write_text(EXPERIMENT.format("1000000"))
    monkeypatch.setattr(file_drop, "requests_in", lambda *places: pytest.fail("there is nothing to ask"))
    before = place.result.read_bytes()
    said = invoke(*WORDS, "--resume", "-o", "model.safetensors")
    assert "is done" in said.stdout
    assert (tmp_path / "model.safetensors").read_bytes() == place.model.read_bytes()
    assert place.result.read_bytes() == before


def test_a_corrected_experiment_may_be_resumed_where_nobody_has_begun(place, told, tmp_path):
    (tmp_path / "first.toml").write_text(EXPERIMENT.format("1e3"))
    told(*WORDS, code=1)
    place.result.unlink()
    (tmp_path / "first.toml").write_text(EXPERIMENT.format("1e6"))
    assert "--resume" in told(*WORDS, code=1)["error"], "it may just have been started"
    assert told(*WORDS, "--resume")["status"] == "done"
    assert json.loads(place.result.read_text())["rounds"] == 1


def test_a_site_where_a_run_was_never_started_is_not_promised_its_end(place, invoke, tmp_path, monkeypatch):
    sites = {}
    for site in SITES:
        (tmp_path / f"site-{site}" / "site.toml").write_text("minimum_parties = 2\n")
        sites[site] = SiteFolder.at(tmp_path / f"site-{site}").opened().answer

    def lost(request):
        if Request.read(request).nonce.kind is not Kind.HELLO:
            raise ConnectionError
        return sites["south"](request)

    monkeypatch.setattr(file_drop, "requests_in", lambda *places: InProcess({**sites, "south": lost}))
    (tmp_path / "first.toml").write_text('method = "exact"\nrank = 2\nrounds = 1\nfaulty = "leave out"\n')
    first = invoke(*WORDS)
    before, again = place.result.read_bytes(), invoke(*WORDS, "--resume")
    assert "every site that was in it has been told" in again.stdout
    for said in (first.stderr, again.stderr):
        assert "'south' has no result of this run: The run was never started there." in said
        assert "--resume" not in said
    assert place.result.read_bytes() == before


def test_status_tells_how_a_run_over_files_goes_on_that_was_broken_off(place, told, invoke, tmp_path, monkeypatch):
    (tmp_path / "first.toml").write_text(EXPERIMENT.format("1e6"))
    sites, opened = file_drop.requests_in(None, None, None), []
    over = (*WORDS[:-1], "our drop")
    with monkeypatch.context() as broken:
        broken.setattr(file_drop, "requests_in", lambda *places: (_ for _ in ()).throw(KeyboardInterrupt))
        invoke(*over, code=130)
    run = told("federation", "status", "--folder", tmp_path / "liver")["runs"]["first"]
    assert run["status"] == "broken off"
    assert f"it goes on with: {run['resume']}" in invoke("federation", "status", "--folder", tmp_path / "liver").stdout
    monkeypatch.setattr(file_drop, "requests_in", lambda drop, *others: opened.append(drop) or sites)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert told(*shlex.split(run["resume"])[1:])["status"] == "done"
    assert opened == [tmp_path / "our drop"]
    assert "resume" not in told("federation", "status", "--folder", tmp_path / "liver")["runs"]["first"]


def test_runs_that_are_worked_on_may_use_one_folder_for_files(place, tmp_path):
    server = ServerFolder.at(tmp_path / "liver")
    for name in ("second", "third"):
        server.run(name).folder.mkdir()
        server.run(name).experiment.write_text("")
    with held(server.run("second").lock, "busy"), held(server.run("third").lock, "busy"):
        assert server.over_files(tmp_path / "drop", "third").transport.others() == ["second"]
    assert server.over_files(tmp_path / "drop", "third").transport.others() == []


def test_the_line_of_those_who_are_waited_for():
    told = {"waiting": ["east", "north"], "answered": 2, "of": 4}
    assert _line(told) == "waiting for east, north (2 of 4 have answered)"
    assert _line({"waiting": ["east"]}) == "waiting for east"


def test_what_is_not_given_again_is_as_it_was_before(place, told, tmp_path, monkeypatch):
    (tmp_path / "first.toml").write_text(EXPERIMENT.format("1e6"))
    (tmp_path / "public.txt").write_text("a\nb\n")

    def nobody(*places):
        raise KeyboardInterrupt

    answering = file_drop.requests_in
    monkeypatch.setattr(file_drop, "requests_in", nobody)
    told(*WORDS, "--timeout", "60", "--names", "public.txt", code=130)
    monkeypatch.setattr(file_drop, "requests_in", answering)
    assert told(*WORDS, "--resume", "--timeout", "90")["status"] == "done"
    kept = json.loads(place.settings.read_text())
    assert (kept["timeout"], kept["names"]) == (90.0, ["a", "b"])
