"""`partsong federation run`: a name is used up once a site has begun, and a run that is done stays so."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cryptography")

from partsong.errors import FileError, ParameterError
from partsong.federation.commands import server as federation_server
from partsong.federation.commands.server import _forget, line_of
from partsong.federation.commands.status import _run_told
from partsong.federation.flower import control
from partsong.federation.locks import held
from partsong.federation.server import launch
from partsong.federation.setup import credentials
from partsong.federation.setup.credentials import Card
from partsong.federation.setup.server_folder import ServerFolder
from partsong.federation.setup.site_folder import SiteFolder
from partsong.federation.transports import files
from partsong.federation.transports.base import InProcess
from partsong.federation.wire import Kind, Request
from partsong.secure_aggregation import crypto

SITES = ("east", "north", "south")
EXPERIMENT = 'method = "exact"\nrank = 2\nrounds = 1\nsecure_aggregation = true\nmask_bound = {}\n'
WORDS = ("federation", "run", "first.toml", "--folder", "liver", "--engine", "files", "--exchange-folder", "drop")


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
        (folder.path / "site.toml").write_text(
            "secure_aggregation = true\nminimum_parties = 3\nminimum_mask_bound = 1e6\n"
        )
        sites[site] = folder.opened().answer
    monkeypatch.setattr(files, "requests_in", lambda *places: InProcess(sites))
    return server.run("first")


@pytest.fixture(scope="module")
def cards(tmp_path_factory):
    """A federation with the cards of three sites that do not answer."""
    folder = tmp_path_factory.mktemp("cards")
    server = ServerFolder.made(folder / "liver", "liver", "nmf.example.org:8443")
    for site in SITES:
        node = credentials.public_node_key(credentials.new_node_key())
        server.admit(Card("liver", site, node, crypto.verifying_key(crypto.signing_key(len(site), site)).hex()))
    return folder


@pytest.fixture
def admitted(cards, invoke, tmp_path):
    """A copy of it, in the folder that commands are given in."""
    shutil.copytree(cards, tmp_path, dirs_exist_ok=True)
    return tmp_path


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
    monkeypatch.setattr(files, "requests_in", lambda *places: pytest.fail("there is nothing to ask"))
    before = place.result.read_bytes()
    said = invoke(*WORDS, "--resume", "-o", "model.safetensors")
    assert "is done" in said.stdout
    assert (tmp_path / "model.safetensors").read_bytes() == place.model.read_bytes()
    assert place.result.read_bytes() == before


def test_a_name_is_free_as_long_as_nobody_has_begun(place, told, tmp_path):
    (tmp_path / "first.toml").write_text(EXPERIMENT.format("1e3"))
    told(*WORDS, code=1)
    place.result.unlink()
    (tmp_path / "first.toml").write_text(EXPERIMENT.format("1e6"))
    assert "other settings" in told(*WORDS, "--resume", code=1)["error"]
    with held(place.command, "busy"):
        assert "another process" in told(*WORDS, code=1)["error"], "it may just have been started"
    assert told(*WORDS)["status"] == "done"
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

    monkeypatch.setattr(files, "requests_in", lambda *places: InProcess({**sites, "south": lost}))
    (tmp_path / "first.toml").write_text('method = "exact"\nrank = 2\nrounds = 1\non_party_error = "skip"\n')
    first = invoke(*WORDS)
    before, again = place.result.read_bytes(), invoke(*WORDS, "--resume")
    assert "every site that was in it has been told" in again.stdout
    for said in (first.stderr, again.stderr):
        assert "'south' has no result of this run: The run was never started there." in said
        assert "--resume" not in said
    assert place.result.read_bytes() == before


def test_status_tells_how_a_run_over_files_goes_on_that_was_broken_off(place, told, invoke, tmp_path, monkeypatch):
    (tmp_path / "first.toml").write_text(EXPERIMENT.format("1e6"))
    sites, opened = files.requests_in(None, None, None), []
    over = (*WORDS[:-1], "our drop")
    with monkeypatch.context() as broken:
        broken.setattr(files, "requests_in", lambda *places: (_ for _ in ()).throw(KeyboardInterrupt))
        invoke(*over, code=130)
    run = told("federation", "status", "--folder", tmp_path / "liver")["runs"]["first"]
    assert run["status"] == "broken off"
    assert f"it goes on with: {run['resume']}" in invoke("federation", "status", "--folder", tmp_path / "liver").stdout
    monkeypatch.setattr(files, "requests_in", lambda drop, *others: opened.append(drop) or sites)
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
        assert server.over_files(tmp_path / "drop", "third").others() == ["second"]
    assert server.over_files(tmp_path / "drop", "third").others() == []


def test_the_line_of_those_who_are_waited_for():
    told = {"waiting": ["east", "north"], "answered": 2, "of": 4}
    assert line_of(told) == "waiting for east, north (2 of 4 have answered)"
    assert line_of({"waiting": ["east"]}) == "waiting for east"


def test_what_is_not_given_again_is_as_it_was_before(place, told, tmp_path, monkeypatch):
    (tmp_path / "first.toml").write_text(EXPERIMENT.format("1e6"))
    (tmp_path / "public.txt").write_text("a\nb\n")

    def nobody(*places):
        raise KeyboardInterrupt

    answering = files.requests_in
    monkeypatch.setattr(files, "requests_in", nobody)
    told(*WORDS, "--timeout", "60", "--names", "public.txt", code=130)
    monkeypatch.setattr(files, "requests_in", answering)
    assert told(*WORDS, "--resume", "--timeout", "90")["status"] == "done"
    kept = json.loads(place.settings.read_text())
    assert (kept["timeout"], kept["names"]) == (90.0, ["a", "b"])


def test_names_that_no_column_has_are_told(place, told, invoke, tmp_path):
    (tmp_path / "first.toml").write_text(EXPERIMENT.format("1e6"))
    (tmp_path / "public.txt").write_text("elsewhere\n")
    said = invoke(*WORDS, "--names", "public.txt").stdout
    assert "0 columns have one of the 1 names in --names; the others keep their hashes." in said
    assert told(*WORDS, "--resume", "--names", "public.txt")["named_columns"] == 0
    (tmp_path / "right.txt").write_text("elsewhere\ncolumn 1\ncolumn 3\n")
    assert "2 columns have one of the 3 names" in invoke(*WORDS, "--resume", "--names", "right.txt").stdout
    assert told(*WORDS, "--resume", "--names", "right.txt")["named_columns"] == 2
    assert "named_columns" not in told(*WORDS, "--resume")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('method = "fnmf"\nrank = 2\nsecure_aggregation = true', '"fnmf" cannot be masked.*fnmf-by-sums'),
        (
            'method = "then-exact"\nfirst = "fnmf-local"\nfirst_rounds = 1\nrank = 2\nsecure_aggregation = true',
            "^.*first = .*by-sums",
        ),
        (
            'method = "game"\nrank = 2\nsecure_aggregation = true',
            'method = "game" with secure_aggregation = true: .* alone',
        ),
        (f'method = "exact"\nrank = {10**12}', "rank = 1000000000000 is too large.*Choose far less"),
        (f'method = "exact"\nrank = {10**400}', "rank = 1000.* is too large"),
        (
            f'method = "exact"\nrank = 2\n[privacy]\nunit = "row"\nrow_bound = 1\nepsilon = 1{"0" * 400}',
            "epsilon must be",
        ),
        (f'method = "asyn-sd"\nrank = 2\ntol = 1{"0" * 400}', "tol must be a number"),
        (f'method = "exact"\nrank = 1{"0" * 5000}', "is not TOML"),
        ('method = "exact"\nrank = 2\n[privacy]\nunit = "row"\nepsilon = 1', "needs row_bound: the norm"),
        ('method = "exact"\nrank = 2\n[privacy]\nunit = "row"\nepsilon = 1\nclip = 2', "has no clip"),
    ],
    ids=["fnmf", "then-exact", "game", "rank", "huge rank", "epsilon", "tol", "digits", "row_bound", "clip"],
)
def test_what_cannot_be_run_is_told_with_its_file_before_any_site_is_asked(admitted, told, text, said, monkeypatch):
    monkeypatch.setattr(files, "requests_in", lambda *places: pytest.fail("nobody is asked"))
    head, _, table = text.partition("[")
    (admitted / "first.toml").write_text(f"{head}\nrounds = 3\n{'[' if table else ''}{table}\n")
    failed = told(*WORDS, code=1)
    assert failed["error"].startswith("first.toml")
    assert re.search(said, failed["error"])
    assert failed["type"] in ("ParameterError", "FormatError")


def test_memory_that_runs_out_in_a_run_is_told_in_words_of_the_experiment(admitted, told, monkeypatch):
    def much(*places):
        raise MemoryError

    monkeypatch.setattr(launch, "_finished", much)
    (admitted / "first.toml").write_text(EXPERIMENT.format("1e6"))
    failed = told(*WORDS, code=1)
    assert "rank = 2" in failed["error"]
    assert "dtype" not in failed["error"]


@pytest.mark.parametrize("content", ["", "[]", '{"status": "failed", "timeout": ""}'])
@pytest.mark.parametrize("name", ["result", "settings"])
def test_a_damaged_file_of_a_run_is_named_with_the_way_out(admitted, told, name, content):
    place = ServerFolder.at(admitted / "liver").run("first")
    place.folder.mkdir()
    (admitted / "first.toml").write_text(EXPERIMENT.format("1e6"))
    place.experiment.write_text(EXPERIMENT.format("1e6"))
    file = getattr(place, name)
    file.write_text(content)
    failed = told(*WORDS, "--resume", code=1)
    assert failed["type"] == "FormatError"
    assert str(file) in failed["error"]
    assert "Remove it" in failed["error"]
    file.unlink()
    told("federation", "status", "--folder", "liver")


@pytest.mark.parametrize("name", ["result", "settings"])
def test_a_damaged_file_of_one_run_hides_no_other(admitted, told, invoke, name):
    server, status = ServerFolder.at(admitted / "liver"), ("federation", "status", "--folder", "liver")
    for run in ("first", "second", "third"):
        server.run(run).folder.mkdir()
        server.run(run).experiment.write_text(EXPERIMENT.format("1e6"))
        server.run(run).progress.write_text("{}\n{}\n")
    server.run("third").result.write_text('{"status": "done"}')
    file, whole = getattr(server.run("second"), name), told(*status)
    file.write_text("{}x")
    said, damaged = told(*status, code=1), told(*status, code=1)["runs"]["second"]
    assert {**said, "runs": {**said["runs"], "second": whole["runs"]["second"]}} == whole
    assert (damaged["status"], damaged["rounds_done"]) == ("damaged", 2)
    assert str(file) in damaged["error"]
    assert "Remove it" in damaged["error"]
    text = invoke(*status, code=1).stdout
    assert damaged["error"] in text
    assert re.search("run  third +done", text)


def test_a_number_that_is_damaged_is_as_one_that_was_never_written_down(admitted, told):
    server = ServerFolder.at(admitted / "liver")
    for name in SITES:
        server.set_node(name, 7)
    (server.path / "sites" / "north.node").write_text("x")
    with pytest.raises(ParameterError, match="No node is registered for north"):
        launch.nodes_of(server)
    place = server.run("first")
    place.folder.mkdir()
    place.experiment.write_text(EXPERIMENT.format("1e6"))
    place.number.write_text("x")
    assert "it was never started" in told("federation", "stop", "first", "--folder", "liver", code=1)["error"]


def test_a_run_that_is_just_starting_is_not_broken_off(admitted, told, invoke):
    place = ServerFolder.at(admitted / "liver").run("first")
    place.folder.mkdir()
    place.experiment.write_text(EXPERIMENT.format("1e6"))
    place.number.write_text("7")
    status = ("federation", "status", "--folder", "liver")
    with held(place.command, "busy"):
        assert told(*status)["runs"]["first"] == {"status": "starting", "rounds_done": 0}
        assert "starting" in invoke(*status).stdout
        (admitted / "first.toml").write_text(EXPERIMENT.format("1e6"))
        assert "Another command follows run 'first'" in told(*WORDS, "--resume", code=1)["error"]
    assert told(*status)["runs"]["first"]["status"] == "broken off"


@pytest.mark.parametrize("number", [None, "7"])
def test_a_run_that_is_just_starting_is_not_called_over_by_stop(admitted, told, monkeypatch, number):
    class Over:
        is_over = True

    @contextmanager
    def controlling(server):
        yield SimpleNamespace(status=lambda number: Over)

    monkeypatch.setattr(control, "controlling", controlling)
    place, stop = ServerFolder.at(admitted / "liver").run("first"), ("federation", "stop", "first", "--folder", "liver")
    place.folder.mkdir()
    place.experiment.write_text(EXPERIMENT.format("1e6"))
    if number is not None:
        place.number.write_text(number)
    with held(place.command, "busy"):
        said = told(*stop, code=1)["error"]
        assert "is just starting" in said
        assert f"process {os.getpid()}" in said
    assert "it was never started, is over, or was broken off" in told(*stop, code=1)["error"]


def test_the_name_of_a_run_is_freed_but_for_its_locks(admitted):
    """A lock whose file is removed is none: the next command makes another file, and holds that."""
    place = ServerFolder.at(admitted / "liver").run("first")
    place.state.mkdir(parents=True)
    for path in (place.experiment, place.settings, place.result, place.number, place.lock, place.command):
        path.write_text("")
    before = {path: path.stat().st_ino for path in (place.lock, place.command)}
    with held(place.command, "busy"), pytest.raises(FileError, match="another process"):
        _forget(place)
    assert place.settings.exists()
    _forget(place)
    assert {path: path.stat().st_ino for path in place.folder.iterdir()} == before


def test_the_command_that_starts_a_run_is_seen_until_it_ends(admitted, told, monkeypatch):
    def starting(server, place, drop, tell):
        assert _run_told(place)["status"] == "starting"
        raise FileError("enough")

    monkeypatch.setattr(federation_server, "_run_to_end", starting)
    (admitted / "first.toml").write_text(EXPERIMENT.format("1e6"))
    assert told(*WORDS, code=1)["error"] == "enough"
    assert _run_told(ServerFolder.at(admitted / "liver").run("first"))["status"] == "broken off"


def test_status_says_why_a_run_has_failed_and_what_can_be_done(admitted, told, invoke):
    place = ServerFolder.at(admitted / "liver").run("first")
    place.folder.mkdir()
    place.experiment.write_text(EXPERIMENT.format("1e6"))
    failed = {
        "status": "failed",
        "type": "SiteLost",
        "error": "Site 'east' was not heard\x1b[2J.",
        "notes": ["Do this."],
    }
    place.result.write_text(json.dumps(failed))
    status = ("federation", "status", "--folder", "liver")
    assert told(*status)["runs"]["first"] == {
        **{name: failed[name] for name in ("status", "error", "notes")},
        "rounds_done": 0,
    }
    text = invoke(*status).stdout
    assert "Site 'east' was not heard" in text
    assert "Do this." in text
    assert "\x1b" not in text
