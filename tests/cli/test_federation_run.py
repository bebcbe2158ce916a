"""`partsong federation run`: names of runs, texts, folders as the transport, and the processes of a run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cryptography")

import partsong
from partsong.core.interfaces import Schedule, Shard
from partsong.data.conversion import as_matrix
from partsong.engines.local import Sequential
from partsong.errors import FileError, ParameterError, SiteLost
from partsong.federation.commands import server as federation_server
from partsong.federation.commands.server import _discard_run, _run_to_end, format_progress
from partsong.federation.commands.status import _describe_run
from partsong.federation.experiment import Experiment
from partsong.federation.flower import control
from partsong.federation.flower import control as following
from partsong.federation.flower.control import FlowerRunStatus, ServerError
from partsong.federation.ledger import SiteLedger
from partsong.federation.locks import held, holder_of
from partsong.federation.server import launch
from partsong.federation.server.launch import load_run_state, run_experiment, run_on_transport
from partsong.federation.server.state import Journal
from partsong.federation.setup import credentials
from partsong.federation.setup.credentials import Card
from partsong.federation.setup.server_folder import RunPlace, ServerFolder, forget_failure, require_not_ended
from partsong.federation.setup.site_folder import SiteFolder
from partsong.federation.site.plan import build_plan
from partsong.federation.site.results import TOPICS_FILE, save_topic_result
from partsong.federation.transports import files
from partsong.federation.transports.base import InProcess
from partsong.federation.transports.files import request_transport
from partsong.federation.wire import Kind, Request
from partsong.io.model_file import load_model
from partsong.io.write import write_text
from partsong.secure_aggregation import crypto
from partsong.solvers.lda import TopicInference

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
    monkeypatch.setattr(files, "request_transport", lambda *places: InProcess(sites))
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
    monkeypatch.setattr(files, "request_transport", lambda *places: pytest.fail("there is nothing to ask"))
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
        if Request.from_bytes(request).nonce.kind is not Kind.HELLO:
            raise ConnectionError
        return sites["south"](request)

    monkeypatch.setattr(files, "request_transport", lambda *places: InProcess({**sites, "south": lost}))
    (tmp_path / "first.toml").write_text('method = "exact"\nrank = 2\nrounds = 1\non_party_error = "skip"\n')
    first = invoke(*WORDS)
    before, again = place.result.read_bytes(), invoke(*WORDS, "--resume")
    assert "every site in it has the result" in again.stdout
    for said in (first.stderr, again.stderr):
        assert "'south' has no result of this run: The run was never started there." in said
        assert "--resume" not in said
    assert place.result.read_bytes() == before


def test_status_tells_how_a_run_over_files_goes_on_that_was_broken_off(place, told, invoke, tmp_path, monkeypatch):
    (tmp_path / "first.toml").write_text(EXPERIMENT.format("1e6"))
    sites, opened = files.request_transport(None, None, None), []
    over = (*WORDS[:-1], "our drop")
    with monkeypatch.context() as broken:
        broken.setattr(files, "request_transport", lambda *places: (_ for _ in ()).throw(KeyboardInterrupt))
        invoke(*over, code=130)
    run = told("federation", "status", "--folder", tmp_path / "liver")["runs"]["first"]
    assert run["status"] == "interrupted"
    assert f"resume it with: {run['resume']}" in invoke("federation", "status", "--folder", tmp_path / "liver").stdout
    monkeypatch.setattr(files, "request_transport", lambda drop, *others: opened.append(drop) or sites)
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
        assert server.over_files(tmp_path / "drop", "third").other_runs() == ["second"]
    assert server.over_files(tmp_path / "drop", "third").other_runs() == []


def test_the_line_of_those_who_are_waited_for():
    told = {"waiting": ["east", "north"], "answered": 2, "of": 4}
    assert format_progress(told) == "waiting for east, north (2 of 4 have answered)"
    assert format_progress({"waiting": ["east"]}) == "waiting for east"


def test_what_is_not_given_again_is_as_it_was_before(place, told, tmp_path, monkeypatch):
    (tmp_path / "first.toml").write_text(EXPERIMENT.format("1e6"))
    (tmp_path / "public.txt").write_text("a\nb\n")

    def nobody(*places):
        raise KeyboardInterrupt

    answering = files.request_transport
    monkeypatch.setattr(files, "request_transport", nobody)
    told(*WORDS, "--timeout", "60", "--names", "public.txt", code=130)
    monkeypatch.setattr(files, "request_transport", answering)
    assert told(*WORDS, "--resume", "--timeout", "90")["status"] == "done"
    kept = json.loads(place.settings.read_text())
    assert (kept["timeout"], kept["names"]) == (90.0, ["a", "b"])


def test_names_that_no_column_has_are_told(place, told, invoke, tmp_path):
    (tmp_path / "first.toml").write_text(EXPERIMENT.format("1e6"))
    (tmp_path / "public.txt").write_text("elsewhere\n")
    said = invoke(*WORDS, "--names", "public.txt").stdout
    assert "Columns with a name in --names: 0. The others are shown as hashes." in said
    assert told(*WORDS, "--resume", "--names", "public.txt")["named_columns"] == 0
    (tmp_path / "right.txt").write_text("elsewhere\ncolumn 1\ncolumn 3\n")
    assert "Columns with a name in --names: 2." in invoke(*WORDS, "--resume", "--names", "right.txt").stdout
    assert told(*WORDS, "--resume", "--names", "right.txt")["named_columns"] == 2
    assert "named_columns" not in told(*WORDS, "--resume")


PRIVATE = """method = "exact"
rank = 2
{rounds}secure_aggregation = true
[privacy]
unit = "row"
row_bound = 1.0
epsilon = {epsilon}
{more}"""
PUBLIC = "n_rows = 24\nn_features = 4\n"


def serials_of(tmp_path):
    return {site: SiteFolder.at(tmp_path / f"site-{site}").opened().ledger.serial for site in SITES}


def test_what_a_private_moment_can_show_is_said_before_it_and_what_it_shows_after_it(place, told, invoke, tmp_path):
    (tmp_path / "first.toml").write_text(PRIVATE.format(rounds="", epsilon=200.0, more=PUBLIC))
    said = invoke(*WORDS).stdout.splitlines()
    assert said[1] == 'mechanism "moment": 1 exchange'
    assert said[2].startswith("With 24 rows, 4 columns and ε = 200, expect ")
    assert 'Mechanism "auto" takes one release' in said[2]
    assert "visible above the noise" in said[-1]
    assert not any(line.startswith("waiting") and "mechanism" in line for line in said)
    found = told(*WORDS, "--resume")["privacy"]
    assert found["verdict"] == said[-1]
    assert found["mechanism"] == "moment"
    assert (found["forecast"]["n_rows"], found["forecast"]["n_features"]) == (24, 4)
    assert isinstance(found["visible_directions"], int)
    assert json.loads(place.result.read_text())["privacy"] == found
    assert "NaN" not in place.result.read_text()


def test_without_public_numbers_there_is_no_forecast_and_the_verdict_is_the_same(place, told, invoke, tmp_path):
    (tmp_path / "first.toml").write_text(PRIVATE.format(rounds="", epsilon=200.0, more='mechanism = "hybrid"\n'))
    said = invoke(*WORDS).stdout.splitlines()
    assert said[1:3] == [
        'mechanism "hybrid": 4 exchanges',
        "No forecast: n_rows and n_features, public numbers, are not in the table privacy.",
    ]
    found = told(*WORDS, "--resume")["privacy"]
    assert (found["mechanism"], found["forecast"]) == ("hybrid", None)
    assert set(serials_of(tmp_path).values()) == {4}


@pytest.mark.parametrize(
    ("epsilon", "numbers", "match"),
    [
        (0.2, PUBLIC, "first.toml: .*the noise leaves nothing.*and nothing was spent"),
        (200.0, "n_rows = 24\nn_features = 5\n", "agree on 4 columns.*n_features = 5.*Set n_features = 4"),
    ],
)
def test_what_is_only_noise_or_for_other_columns_is_refused_before_anything_is_spent(
    place, told, tmp_path, epsilon, numbers, match
):
    (tmp_path / "first.toml").write_text(PRIVATE.format(rounds="", epsilon=epsilon, more=numbers))
    assert re.search(match, told(*WORDS, code=1)["error"])
    assert set(serials_of(tmp_path).values()) == {0}
    (tmp_path / "first.toml").write_text(PRIVATE.format(rounds="", epsilon=200.0, more=PUBLIC))
    assert told(*WORDS)["status"] == "done", "the name is free"


def test_a_private_run_of_an_older_version_is_resumed_with_its_rounds(place, told, tmp_path, monkeypatch):
    """Its experiment.toml, at the coordinator and in the folder of the run, has no mechanism."""
    older = PRIVATE.format(rounds="rounds = 3\n", epsilon=20.0, more="")
    (tmp_path / "first.toml").write_text(older + 'mechanism = "rounds"\n')
    sites = files.request_transport().sites

    class Stopping(InProcess):
        def push(self, requests, timeout):
            if any(Request.from_bytes(request).nonce.round for request in requests.values()):
                raise KeyboardInterrupt
            InProcess.push(self, requests, timeout)

    with monkeypatch.context() as patched:
        patched.setattr(files, "request_transport", lambda *places: Stopping(sites))
        told(*WORDS, code=130)
    (tmp_path / "first.toml").write_text(older)
    place.experiment.write_text(place.experiment.read_text().replace('mechanism = "rounds"\n', ""))
    (tmp_path / "other.toml").write_text(older + 'mechanism = "moment"\n')
    changed = [word.replace("first.toml", "other.toml") for word in WORDS]
    assert "other settings" in told(*changed, "--name", "first", "--resume", code=1)["error"]
    found = told(*WORDS, "--resume")
    assert (found["status"], found["rounds"]) == ("done", 3)
    assert "privacy" not in found
    assert set(serials_of(tmp_path).values()) == {3}
    assert partsong.FederatedNMF.load(place.model).privacy.mechanism == "rounds"


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
        (f'method = "exact"\nrank = {10**12}', "rank = 1000000000000 is too large.*Use a much smaller"),
        (f'method = "exact"\nrank = {10**400}', "rank = 1000.* is too large"),
        (
            f'method = "exact"\nrank = 2\n[privacy]\nunit = "row"\nrow_bound = 1\nepsilon = 1{"0" * 400}',
            "epsilon must be",
        ),
        (f'method = "asyn-sd"\nrank = 2\ntol = 1{"0" * 400}', "tol must be a number"),
        (f'method = "exact"\nrank = 1{"0" * 5000}', "is not valid TOML"),
        ('method = "exact"\nrank = 2\n[privacy]\nunit = "row"\nepsilon = 1', "needs row_bound: rows of a larger norm"),
        ('method = "exact"\nrank = 2\n[privacy]\nunit = "row"\nepsilon = 1\nclip = 2', "has no clip"),
    ],
    ids=["fnmf", "then-exact", "game", "rank", "huge rank", "epsilon", "tol", "digits", "row_bound", "clip"],
)
def test_what_cannot_be_run_is_told_with_its_file_before_any_site_is_asked(admitted, told, text, said, monkeypatch):
    monkeypatch.setattr(files, "request_transport", lambda *places: pytest.fail("nobody is asked"))
    head, _, table = text.partition("[")
    (admitted / "first.toml").write_text(f"{head}\nrounds = 3\n{'[' if table else ''}{table}\n")
    failed = told(*WORDS, code=1)
    assert failed["error"].startswith("first.toml")
    assert re.search(said, failed["error"])
    assert failed["type"] in ("ParameterError", "FormatError")


def test_memory_that_runs_out_in_a_run_is_told_in_words_of_the_experiment(admitted, told, monkeypatch):
    def much(*places):
        raise MemoryError

    monkeypatch.setattr(launch, "_run_to_end", much)
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
        launch.site_nodes(server)
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
    assert told(*status)["runs"]["first"]["status"] == "interrupted"


@pytest.mark.parametrize("number", [None, "7"])
def test_a_run_that_is_just_starting_is_not_called_over_by_stop(admitted, told, monkeypatch, number):
    class Over:
        is_over = True

    @contextmanager
    def controlling(server):
        yield SimpleNamespace(status=lambda number: Over)

    monkeypatch.setattr(control, "open_control", controlling)
    place, stop = ServerFolder.at(admitted / "liver").run("first"), ("federation", "stop", "first", "--folder", "liver")
    place.folder.mkdir()
    place.experiment.write_text(EXPERIMENT.format("1e6"))
    if number is not None:
        place.number.write_text(number)
    with held(place.command, "busy"):
        said = told(*stop, code=1)["error"]
        assert "is starting" in said
        assert f"process {os.getpid()}" in said
    assert "it was never started, has ended, or can be resumed" in told(*stop, code=1)["error"]


def test_the_name_of_a_run_is_freed_but_for_its_locks(admitted):
    """A lock whose file is removed is none: the next command makes another file, and holds that."""
    place = ServerFolder.at(admitted / "liver").run("first")
    place.state.mkdir(parents=True)
    for path in (place.experiment, place.settings, place.result, place.number, place.lock, place.command):
        path.write_text("")
    before = {path: path.stat().st_ino for path in (place.lock, place.command)}
    with held(place.command, "busy"), pytest.raises(FileError, match="another process"):
        _discard_run(place)
    assert place.settings.exists()
    _discard_run(place)
    assert {path: path.stat().st_ino for path in place.folder.iterdir()} == before


def test_the_command_that_starts_a_run_is_seen_until_it_ends(admitted, told, monkeypatch):
    def starting(server, place, drop, tell):
        assert _describe_run(place)["status"] == "starting"
        raise FileError("enough")

    monkeypatch.setattr(federation_server, "_run_to_end", starting)
    (admitted / "first.toml").write_text(EXPERIMENT.format("1e6"))
    assert told(*WORDS, code=1)["error"] == "enough"
    assert _describe_run(ServerFolder.at(admitted / "liver").run("first"))["status"] == "interrupted"


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


EXPERIMENT_FILES = 'method = "exact"\nrank = 2\nrounds = 2\nseed = 3\nsecure_aggregation = true\nmask_bound = 1e6\n'


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
    (tmp_path / "experiment.toml").write_text(EXPERIMENT_FILES)
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
    plan = build_plan(Experiment.read(tmp_path / "experiment.toml").to_dict(), 3, None)
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
    ended = run_on_transport(lambda: InProcess(sites), server, place)
    (tmp_path / "timed.toml").write_text(text + "time_budget = 60.0\n")
    over = ("--folder", "liver", "--engine", "files", "--exchange-folder", "drop")
    said = told("federation", "run", "timed.toml", *over, "--resume", code=1)
    assert said["type"] == "ParameterError"
    assert f"after {ended['rounds']} of {3 * 9999} arrivals" in said["error"]
    assert place.result.exists()
    record = load_run_state(place.state)
    require_not_ended(place, record, record.index)
    place.result.unlink()
    require_not_ended(place, record, 3 * 9999)


def test_files_and_a_folder_for_them_go_together(federation, told):
    for words in (("--engine", "files"), ("--exchange-folder", "drop")):
        said = told("federation", "run", "experiment.toml", "--folder", "liver", *words, code=1)
        assert "need each other" in said["error"]


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
    place.experiment.write_text(EXPERIMENT_FILES)
    assert "never started, has ended" in told("federation", "stop", "experiment", "--folder", "liver", code=1)["error"]
    place.number.write_text("7")
    request_transport(federation, server, place)
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
    assert f"exchange 1 of 3: {said}" in format_progress({**told, "seconds": 0.1})


HEAD = "rank = 2\nrounds = 4\nseed = 6\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('method = "exact"\nserver_rate = 0.1\n', "experiment.toml: server_rate is for fednmf, fednmf-mi"),
        ('method = "fedlda"\nlocal_steps = 2\n', "experiment.toml: local_steps is for exact, fnmf"),
        (
            'method = "fednmf"\nepoch = 2\n',
            "experiment.toml has no setting 'epoch'. Did you mean 'epochs'",
        ),
    ],
)
def test_keys_of_the_file_are_told_as_keys_and_not_as_options(told, tmp_path, text, said):
    told("federation", "init", "liver", "--name", "liver", "--address", "nmf.example.org:8443")
    (tmp_path / "experiment.toml").write_text(HEAD + text)
    found = told("federation", "run", "experiment.toml", "--folder", "liver", code=1)
    assert found["error"].startswith(said)


def test_the_result_of_a_site_is_shown_and_transforms_texts(invoke, told, tmp_path):
    H = np.array([[0.5, 0.3, 0.1, 0.1], [0.1, 0.1, 0.3, 0.5]])
    words = ("apple", "bread", "chess", "dance")
    save_topic_result(
        tmp_path / TOPICS_FILE, H, words, {"method": "fedlda", "rounds": 3, "seed": 6}, TopicInference(0.5)
    )
    shown = told("topics", "show", TOPICS_FILE)
    assert shown["topics"][0]["words"][:2] == ["apple", "bread"]
    assert (shown["settings"]["method"], shown["settings"]["weighting"]) == ("fedlda", "counts")
    (tmp_path / "new.csv").write_text("text\napple bread apple\nDANCE chess\nnothing\n")
    invoke("topics", "transform", "new.csv", TOPICS_FILE, "-o", "W.npy")
    W = np.load(tmp_path / "W.npy")
    assert W.argmax(axis=1).tolist()[:2] == [0, 1]
    np.testing.assert_allclose(W.sum(axis=1), [1, 1, 0])


@pytest.mark.parametrize("kind", [partsong.TopicModel, partsong.FederatedTopicModel])
def test_sizes_of_topics_that_nobody_has_measured_are_not_made_up(kind, invoke, told, tmp_path):
    H = np.array([[0.5, 0.3, 0.1, 0.1], [0.1, 0.1, 0.3, 0.5], [0.2, 0.4, 0.1, 0.3]])
    words = ("apple", "bread", "chess", "dance")
    save_topic_result(
        tmp_path / TOPICS_FILE, H, words, {"method": "fedlda", "rounds": 3, "seed": 6}, TopicInference(0.5)
    )
    assert [topic["share"] for topic in told("topics", "show", TOPICS_FILE)["topics"]] == [None] * 3
    shown = invoke("topics", "show", TOPICS_FILE, "--html", "shown.html").stdout
    assert "%" not in shown
    assert "apple, bread" in shown
    model = kind.load(tmp_path / TOPICS_FILE)
    assert model.topic_shares_ is None
    model.to_html(tmp_path / "loaded.html")
    for name in ("shown.html", "loaded.html"):
        page = (tmp_path / name).read_text(encoding="utf-8")
        assert re.findall(r"<figcaption><b>Topic \d</b><span>(.*?)</span>", page) == ["\N{EN DASH}"] * 3
        assert re.findall(r"<title>(Topic \d.*?): ", page) == ["Topic 1", "Topic 2", "Topic 3"]
        assert "Sizes of topics are unknown: all discs are equal." in page
        assert "The area of a disc" not in page
        assert len(set(re.findall(r'<circle[^>]* r="([0-9.]+)"', page))) == 1
    model.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / TOPICS_FILE).read_bytes()
    np.testing.assert_allclose(model.transform(["apple bread apple", "nothing"]).sum(axis=1), [1, 0])


COMMON = ("liver", "biopsy", "enzyme", "portal")
EXPERIMENT_TEXTS = (
    'method = "exact"\nrank = 2\nrounds = 1\nsecure_aggregation = true\nmask_bound = 1e6\n'
    '[words]\nweighting = "counts"\n'
)


def texts_of(site):
    return [f"{COMMON[number % 4]} {COMMON[(number + 1) % 4]} {site}ville" for number in range(8)]


def write_texts(folder):
    """As rows of a .csv, lines of a .jsonl, and files of a folder."""
    rows = "".join(f'{number},"{text}"\n' for number, text in enumerate(texts_of("east")))
    (folder / "east.csv").write_text(f"id,note\n{rows}")
    (folder / "north.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts_of("north")))
    (folder / "south").mkdir()
    for number, text in enumerate(texts_of("south")):
        (folder / "south" / f"{number}.txt").write_text(text)


@pytest.fixture
def joined(told, tmp_path):
    """Three sites with texts that have joined and were admitted, as far as that goes without a server."""
    write_texts(tmp_path)
    told("federation", "init", "notes", "--name", "notes", "--address", "nmf.example.org:8443")
    told("federation", "shared-key", "-o", "sites.key")
    places = {"east": ("east.csv", "--text-column", "note"), "north": ("north.jsonl",), "south": ("south",)}
    for site, words in places.items():
        told("federation", "invite", site, "--folder", "notes", "-o", f"{site}.zip")
        told("federation", "join", f"{site}.zip", "--data", *words, "--shared-key", "sites.key", "--yes")
        ServerFolder.at(tmp_path / "notes").admit(Card.read(tmp_path / f"site-{site}" / "card.toml"))
    return ServerFolder.at(tmp_path / "notes")


def require_steps_before_exchanges(said, place):
    """Each step of the agreement was told, and then the exchange of the run."""
    told = [line for line in said.splitlines() if " 3 sites, at most " in line]
    steps = Journal(place.state / "words").load().index
    assert steps > 2
    which = [*(f"words, step {number} of at most 24" for number in range(1, steps + 1)), "exchange 1 of 1"]
    assert [line.split(":")[0] for line in told] == which
    assert [line.endswith("; next: nothing") for line in told] == [False] * (steps - 1) + [True, False]


def test_sites_with_texts_end_with_words_and_the_server_with_hashes(joined, invoke, told, monkeypatch, tmp_path):
    sites = {}
    for site in SITES:
        place = SiteFolder.at(tmp_path / f"site-{site}")
        place.pin(joined.roster(), joined.roster().fingerprint)
        assert place.holds_texts
        sites[site] = place.opened().answer
    place = joined.run("first")
    monkeypatch.setattr(files, "request_transport", lambda *places: InProcess(sites))
    (tmp_path / "first.toml").write_text(EXPERIMENT_TEXTS)
    words = ("federation", "run", "first.toml", "--folder", "notes", "--engine", "files", "--exchange-folder", "drop")
    require_steps_before_exchanges(invoke(*words).stdout, place)
    done = json.loads(place.result.read_text())
    assert (done["status"], done["rounds"]) == ("done", 1)
    assert all(name.startswith("#") for name in load_model(place.model).feature_names)
    for site in SITES:
        results = tmp_path / f"site-{site}" / "results" / "first"
        assert sorted((results / "vocabulary.txt").read_text().split()) == sorted(COMMON)
        assert set(load_model(results / "model.safetensors").feature_names) == set(COMMON)
        runs = told("federation", "status", "--folder", f"site-{site}")["runs"]
        assert {name: run["status"] for name, run in runs.items()} == {"first": "finished", "first.words": "finished"}


def test_what_leaves_is_shown_and_no_word_of_a_text_is(joined, invoke, tmp_path):
    said = invoke("federation", "join", "east.zip", "--yes", "--no-start").output
    assert "words to the server" in said
    assert "number of texts, 8" in said
    assert "eastville" not in said
    before = SiteFolder.at(tmp_path / "site-east")
    assert before.reading == {"text_column": "note"}
    words = ("--data", "east.csv", "--text-column", "note", "--folder", "anew")
    said = invoke("federation", "join", "east.zip", *words, "--yes", "--no-start").output
    assert "will refuse every run over its texts" in said


def test_texts_are_read_again_once_they_were_changed(joined, tmp_path):
    place = SiteFolder.at(tmp_path / "site-south")
    place.pin(joined.roster(), joined.roster().fingerprint)
    assert place.opened().data.n_rows == 8
    (tmp_path / "south" / "more.txt").write_text("one more")
    assert place.opened().data.n_rows == 9


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("--data", "east.csv", "--text-column", "text"), "'text' is not among the 2 titles"),
        (("--data", "east.csv", "--text-column", "note", "--label", "id"), "--label is for tables"),
        (("--data", "east.csv"), "pass their column: --text-column"),
        (("--data", "east.csv", "--encoding", "latin-1"), "--encoding is for texts"),
        (("--data", "north.jsonl", "--encoding", "nonsense"), "nonsense"),
    ],
)
def test_what_cannot_be_meant_is_refused(told, tmp_path, words, match):
    write_texts(tmp_path)
    told("federation", "init", "notes", "--name", "notes", "--address", "nmf.example.org:8443")
    told("federation", "invite", "east", "--folder", "notes", "-o", "east.zip")
    said = told("federation", "join", "east.zip", *words, "--yes", code=1)
    assert match in said["error"]
    assert not (tmp_path / "site-east" / "joined.toml").exists()


needs_signals = pytest.mark.skipif(os.name != "posix", reason="signals and locks")

WORK = """
import signal, sys, time
from pathlib import Path
from partsong.federation.locks import held
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with held(Path(sys.argv[1]), ""):
    time.sleep(60)
"""


class Control:
    """Flower's answers, one after another; the last one stays."""

    def __init__(self, *statuses):
        self.statuses, self.started, self.stopped = list(statuses), [], []

    def start(self, name):
        self.started.append(name)
        return 10 + len(self.started)

    def status(self, number):
        return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]

    def stop(self, number):
        self.stopped.append(number)
        return True


@pytest.fixture
def run_place(tmp_path, monkeypatch):
    monkeypatch.setattr(following, "POLL", 0.01)
    monkeypatch.setattr(following, "GRACE", 0.5)
    return RunPlace(tmp_path)


@pytest.fixture
def worker(run_place):
    """Starts a process that works on the run; it is gone in the end."""
    made = []

    def start(kind="mild"):
        made.append(subprocess.Popen([sys.executable, "-c", WORK, str(run_place.lock), kind]))
        until = time.monotonic() + 30
        while holder_of(run_place.lock) != made[-1].pid and time.monotonic() < until:
            time.sleep(0.02)
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.wait()


def follow(run_place, control, monkeypatch, told=None):
    @contextmanager
    def controlling(server):
        yield control

    monkeypatch.setattr(following, "open_control", controlling)
    told = [] if told is None else told
    try:
        return following.run_to_end(None, run_place, told.append), told
    finally:
        assert holder_of(run_place.lock) is None


@needs_signals
def test_a_run_that_was_stopped_is_not_started_again(run_place, monkeypatch):
    control = Control(FlowerRunStatus("running"), FlowerRunStatus("finished", "stopped"))
    with pytest.raises(ServerError, match="was stopped"):
        follow(run_place, control, monkeypatch)
    assert control.started == [run_place.name]


@needs_signals
def test_a_run_that_ends_without_a_word_is_started_again(run_place, monkeypatch):
    control, told = Control(FlowerRunStatus("finished", "failed", "why")), []
    with pytest.raises(ServerError, match=r"without a result \(why\)"):
        follow(run_place, control, monkeypatch, told)
    assert len(control.started) == following.MAX_STARTS
    assert told == [{"starting": run_place.name}], "once, however often it is started"


@needs_signals
def test_that_a_run_is_started_is_told_before_its_process_is_up(run_place, monkeypatch):
    told = []

    class Slow(Control):
        def start(self, name):
            assert told == [{"starting": run_place.name}]
            run_place.result.write_text('{"status": "done"}')
            return super().start(name)

    control = Slow(FlowerRunStatus("finished", "completed"))
    follow(run_place, control, monkeypatch, told)
    assert len(control.started) == len(told) == 1
    assert format_progress(told[0]).startswith(f"starting the server process of run {run_place.name!r}")


@needs_signals
@pytest.mark.parametrize("kind", ["mild", "stubborn"])
def test_a_run_that_is_worked_on_is_followed_and_its_process_does_not_outlive_a_stop(
    run_place, worker, monkeypatch, kind
):
    run_place.number.write_text("7")
    process = worker(kind)
    control = Control(FlowerRunStatus("running"), FlowerRunStatus("running"), FlowerRunStatus("finished", "stopped"))
    told = []
    with pytest.raises(ServerError, match="was stopped"):
        follow(run_place, control, monkeypatch, told)
    assert control.started == told == []
    assert process.wait(5) != 0


@needs_signals
def test_what_is_left_of_a_run_that_is_over_is_ended_before_it_is_started_again(run_place, worker, monkeypatch):
    run_place.number.write_text("7")
    process = worker()
    control = Control(FlowerRunStatus("finished", "failed"))
    with pytest.raises(ServerError):
        follow(run_place, control, monkeypatch)
    assert len(control.started) == following.MAX_STARTS
    assert process.wait(5) != 0


@needs_signals
def test_the_result_of_a_run_that_is_done_stays_until_there_is_another(run_place, monkeypatch):
    """The server is down, or the run ends without a word: what was known of it before is still known."""

    class Down(Control):
        def start(self, name):
            raise ServerError("No server answers")

    run_place.result.write_text('{"status": "done", "rounds": 3}')
    with pytest.raises(ServerError, match="No server answers"):
        follow(run_place, Down(FlowerRunStatus("unknown")), monkeypatch)
    with pytest.raises(ServerError, match="without a result"):
        follow(run_place, Control(FlowerRunStatus("finished", "failed")), monkeypatch)
    assert run_place.result.read_text() == '{"status": "done", "rounds": 3}'


FAILED = '{"status": "failed", "type": "SiteLost", "error": "east", "notes": []}'


@needs_signals
def test_how_a_run_has_failed_is_told_until_it_is_started_again(run_place, monkeypatch):
    """Killed after that without a word, it was broken off, and says how it goes on."""

    class Down(Control):
        def start(self, name):
            raise ServerError("No server answers")

    run_place.result.write_text(FAILED)
    with pytest.raises(ServerError, match="No server answers"):
        follow(run_place, Down(FlowerRunStatus("unknown")), monkeypatch)
    assert _describe_run(run_place)["status"] == "failed"

    class Killed(Control):
        def start(self, name):
            forget_failure(run_place)  # as the process that works on a run does first
            return super().start(name)

    with pytest.raises(ServerError, match="without a result"):
        follow(run_place, Killed(FlowerRunStatus("finished", "failed")), monkeypatch)
    told = _describe_run(run_place)
    assert told["status"] == "interrupted"
    assert told["resume"].endswith("--resume")
    assert [path.name for path in run_place.folder.iterdir()] == [run_place.number.name]


@needs_signals
def test_a_failure_that_has_come_since_the_start_is_kept(run_place, monkeypatch):
    class Failing(Control):
        def start(self, name):
            write_text(run_place.result, FAILED.replace("east", "north"))
            return super().start(name)

    run_place.result.write_text(FAILED)
    with pytest.raises(SiteLost, match="north"):
        follow(run_place, Failing(FlowerRunStatus("finished", "completed")), monkeypatch)
    assert "north" in run_place.result.read_text()


@needs_signals
@pytest.mark.parametrize("before", ["failed", "done"])
def test_over_files_too_what_has_failed_goes_once_it_is_worked_on(run_place, monkeypatch, before):
    file_drop = pytest.importorskip("partsong.federation.transports.files", exc_type=ImportError)

    def killed(*places):
        assert holder_of(run_place.lock) == os.getpid()
        raise KeyboardInterrupt

    monkeypatch.setattr(file_drop, "request_transport", killed)
    run_place.result.write_text(FAILED.replace("failed", before))
    with pytest.raises(KeyboardInterrupt):
        _run_to_end(None, run_place, run_place.folder / "drop", lambda line: None)
    assert _describe_run(run_place)["status"] == ("done" if before == "done" else "interrupted")


@needs_signals
def test_steps_exchanges_and_whom_a_run_waits_for_are_told_from_its_files(run_place, monkeypatch):
    class Ending(Control):
        def start(self, name):
            (run_place.state / "words").mkdir(parents=True, exist_ok=True)
            for path, line in (("waiting.jsonl", '{"waiting": ["east"]}'), ("words/steps.jsonl", '{"step": 1}')):
                with (run_place.state / path).open("a") as file:
                    file.write(f"{line}\n")
            run_place.progress.write_text('{"round": 1}\n')
            run_place.result.write_text('{"status": "done"}')
            return super().start(name)

    _, told = follow(run_place, Ending(FlowerRunStatus("finished", "completed")), monkeypatch)
    assert told == [{"starting": run_place.name}, {"step": 1}, {"round": 1}, {"waiting": ["east"]}]
    run_place.result.unlink()
    _, told = follow(run_place, Ending(FlowerRunStatus("finished", "completed")), monkeypatch)
    assert told[1:] == [{"step": 1}, {"waiting": ["east"]}], "what was there before is not told again"


@needs_signals
def test_the_result_and_the_error_of_a_run_are_told(run_place, monkeypatch):
    def ending(content):
        class Ending(Control):
            def start(self, name):
                run_place.result.write_text(json.dumps(content))
                run_place.progress.write_text('{"round": 1}\n{"rou')
                return super().start(name)

        run_place.progress.unlink(missing_ok=True)
        return follow(run_place, Ending(FlowerRunStatus("finished", "completed")), monkeypatch)

    result, told = ending({"status": "done", "rounds": 1})
    assert (result, told[1:]) == ({"status": "done", "rounds": 1}, [{"round": 1}])
    with pytest.raises(SiteLost, match="east") as caught:
        ending({"status": "failed", "type": "SiteLost", "error": "east", "notes": ["resume"]})
    assert caught.value.__notes__ == ["resume"]
