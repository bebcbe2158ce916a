"""Laws of a site's two books, ledger and audit log: each is as it was written, and covers the other."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from dataclasses import replace

import pytest
from federations import Federation, noisy_plan
from test_site import code_of, of_kind, recorded
from test_site_limits import Stopped, in_the_open, lines_of, private, request_of, said
from typer.testing import CliRunner

from partsong.cli.main import app
from partsong.errors import ParameterError
from partsong.federation import ledger as chain
from partsong.federation.audit_log import make_up
from partsong.federation.experiment import Experiment
from partsong.federation.ledger import Chain, SiteLedger
from partsong.federation.policy import Policy, PrivacyBudget
from partsong.federation.site.state import RunFolder
from partsong.federation.wire import Denied, Kind, Nonce, Request
from partsong.privacy.accounting import Ledger, Release

DELTA = 1e-5


def hello_of(federation, run="run-2"):
    note = {"experiment": federation.experiment.told(), "parties": list(federation.names)}
    return Request("east", Nonce(run), note=note)


def without_lines(path, keep):
    """An older copy of a chain."""
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:keep]))


@pytest.mark.parametrize("keep", [0, 1])
def test_a_ledger_that_lacks_what_the_log_tells_spends_nothing_twice(tmp_path, keep):
    federation = private(tmp_path)
    list(federation.rounds())
    site, copy = federation.site("east"), tmp_path / "east" / "ledger.jsonl"
    spent, lines = site.ledger.spent(), len(lines_of(site))
    without_lines(copy, keep)
    assert said(site, hello_of(federation)) == "ledger"
    assert "make-up" in (tmp_path / "east" / "site.log").read_text()
    copy.unlink()
    assert said(site, hello_of(federation)) == "ledger"
    assert (site.ledger.serial, len(lines_of(site))) == (0, lines + 2)
    made = make_up(tmp_path / "east", "the ledger is gone")
    assert made.charged == (("run-1", 0, 0), ("run-1", 1, 0))
    assert site.ledger.spent() == spent
    assert site.ledger.spent().epsilon(DELTA) == spent.epsilon(DELTA) > 0
    assert said(site, hello_of(federation)) is None
    assert make_up(tmp_path / "east", "once more").charged == ()


def test_a_ledger_with_other_noise_than_the_log_tells_is_none(tmp_path):
    federation = private(tmp_path)
    list(federation.rounds())
    site, path = federation.site("east"), tmp_path / "east" / "ledger.jsonl"
    lines, spent = list(Chain(path).lines()), site.ledger.spent()
    path.unlink()
    for line in lines:
        release = {**line["release"], "noise_multiplier": 2 * line["release"]["noise_multiplier"]}
        kept = {name: value for name, value in line.items() if name not in ("number", "before", "hash")}
        Chain(path).append({**kept, "release": release})
    assert said(site, hello_of(federation)) == "ledger"
    make_up(tmp_path / "east", "it changes nothing")
    assert said(site, hello_of(federation)) == "ledger"
    reason = (tmp_path / "east" / "site.log").read_text().splitlines()[-1]
    assert "move ledger.jsonl out of the folder" in reason
    assert f"partsong audit make-up {tmp_path / 'east'} --count 2 --why " in reason
    path.rename(tmp_path / "moved.jsonl")
    assert make_up(tmp_path / "east", "as the reason says", 2).of_no_run == 0
    assert site.ledger.spent() == spent
    assert said(site, hello_of(federation)) is None


def edited(data, place):
    lines = data.split(b"\n")
    lines[place] = lines[place].replace(b'"bytes": ', b'"bytes": 9')
    return b"\n".join(lines)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: edited(data, 1),
        lambda data: edited(data, -2),
        lambda data: data[:-1] + b" ",
        lambda data: data.split(b"\n", 1)[1],
        lambda data: b"",
    ],
    ids=["second line", "last line", "end", "first line gone", "all gone"],
)
def test_a_log_that_was_edited_or_removed_is_left_as_it_is_and_answered_for_with_a_code(tmp_path, change):
    federation = in_the_open(tmp_path)
    asked, site = recorded(federation, 2), federation.site("east")
    was = site.audit.path.read_bytes()
    now = change(was)
    site.audit.path.write_bytes(now)
    for kind in (Kind.WORK, Kind.HELLO, Kind.START):
        assert said(site, request_of(asked, kind)) == "ledger"
    if now:
        assert site.audit.path.read_bytes() == now
        assert code_of(site.refuse("unsigned", "a stranger")) == "unsigned"
        assert site.audit.path.read_bytes() == now
    assert site.ledger.serial == 2
    site.audit.path.write_bytes(was)
    assert said(site, request_of(asked, Kind.WORK, 1)) is None


def test_a_log_that_is_lost_counts_all_that_was_charged_as_left(tmp_path):
    federation = in_the_open(tmp_path)
    asked, site = recorded(federation, 2), federation.site("east")
    site.audit.path.unlink()
    made = make_up(tmp_path / "east", "the log is gone")
    assert (made.charged, made.noted) == ((), (("run-1", 0, 0), ("run-1", 1, 0)))
    shutil.rmtree(tmp_path / "east" / "runs")
    assert said(site, request_of(asked, Kind.START)) is None
    for attempt in (0, 1):
        assert said(site, request_of(asked, Kind.WORK, 1), attempt=attempt) == "out-of-step"
    assert any("made up: the log is gone" in line for line in site.audit.show())
    assert site.ledger.serial == 2


def dear_and_lost(tmp_path):
    """A site that was put back to a copy from before two releases that were dearer than any in it."""
    policy = Policy(privacy=PrivacyBudget(20.0, unit="party", insecure_noise=True))

    def run(name, noise, rounds):
        told = {"unit": "party", "epsilon": 15.0, "noise_multiplier": noise, "clip": 1.0}
        experiment = Experiment("fedavg", 3, rounds, local_steps=1, privacy=told)
        federation = Federation(tmp_path, experiment, policy=policy, build=noisy_plan, run=name)
        list(federation.rounds())
        shutil.rmtree(tmp_path / "server")
        return federation.site("east")

    run("cheap", 20.0, 1)
    shutil.copytree(tmp_path / "east", tmp_path / "copy")
    site = run("dear", 1.0, 2)
    spent = site.ledger.spent()
    shutil.rmtree(tmp_path / "east")
    shutil.move(tmp_path / "copy", tmp_path / "east")
    return site, spent


def test_releases_of_which_only_the_number_is_known_count_as_without_noise_or_as_is_stated(tmp_path):
    site, spent = dear_and_lost(tmp_path / "private")
    shutil.copytree(site.folder, tmp_path / "stated")
    assert make_up(site.folder, "restored", 2).of_no_run == 2
    books = site.ledger.books()
    assert (books.serial, books.lines, books.noiseless) == (3, 2, 2)
    with pytest.raises(Denied, match="noiseless_before = 2"):
        site.ledger.require_within(site.policy.privacy, next(iter(books.releases)))
    dearest = json.dumps(min(spent.entries, key=lambda one: one[0].noise_multiplier)[0].to_json())
    words = ["audit", "make-up", str(tmp_path / "stated"), "--count", "2", "--why", "restored", "--release", dearest]
    assert CliRunner().invoke(app, words).exit_code == 0
    stated = SiteLedger(tmp_path / "stated" / "ledger.jsonl")
    assert stated.spent().epsilon(DELTA) == spent.epsilon(DELTA) > 4
    assert (stated.serial, stated.books().noiseless) == (3, 0)
    for release in ("2.0", '{"kind": "gaussian"}', dearest.replace("1.0", "-1")):
        assert CliRunner().invoke(app, [*words[:-1], release]).exit_code == 1
    assert CliRunner().invoke(app, [*words[:3], *words[5:]]).exit_code == 1
    assert stated.serial == 3


OF_PARTY, OF_ROW = Release("gaussian", 1.0, "party", "replace"), Release("gaussian", 1.0, "row", "add-or-remove")


@pytest.mark.parametrize(
    ("stated", "known", "unit", "why"),
    [
        (OF_PARTY, [OF_ROW], None, r"party \(replace\), and ledger and log .* about a row \(add-or-remove\)"),
        (replace(OF_ROW, relation="replace"), [OF_ROW], "row", r"row \(replace\)"),
        (OF_PARTY, [], "row", "privacy.unit in .*site.toml is 'row'"),
        (Release("none", 0.0, "row", "replace"), [], None, "has no noise"),
        (OF_ROW, [OF_ROW], "row", None),
        (OF_ROW, [], None, None),
    ],
)
def test_a_cost_is_stated_about_what_books_and_policy_are_about(tmp_path, stated, known, unit, why):
    state = tmp_path / "site-east" / "state"
    state.mkdir(parents=True)
    ledger = SiteLedger(state / "ledger.jsonl")
    for release in known:
        ledger.make_up(1, release, "before")
    if unit is not None:
        (state.parent / "site.toml").write_text(f'[privacy]\nepsilon = 20.0\nunit = "{unit}"\n')
    if why is None:
        assert make_up(state, "restored", 2, stated).of_no_run == 2
        assert ledger.spent().epsilon(DELTA) == Ledger(((OF_ROW, 2 + len(known)),)).epsilon(DELTA)
        return
    with pytest.raises(ParameterError, match=f"{why}.*leave --release out"):
        make_up(state, "restored", 2, stated)
    assert ledger.serial == len(known), "nothing is written"


def test_a_cost_is_stated_about_what_a_lost_ledger_was_about(tmp_path):
    federation = private(tmp_path)
    list(federation.rounds())
    ledger = federation.site("east").ledger
    ledger.path.unlink()
    with pytest.raises(ParameterError, match="leave --release out"):
        make_up(tmp_path / "east", "the ledger is gone", 3, OF_ROW)
    assert not ledger.path.exists()
    assert make_up(tmp_path / "east", "the ledger is gone", 3, OF_PARTY).of_no_run == 1


def test_releases_that_are_made_up_are_of_no_run(tmp_path):
    policy = Policy(maximum_runs=1)
    first = Federation(tmp_path / "first", Experiment("fedavg", 3, 1), policy=policy)
    assert said(first.site("east"), Request("east", Nonce("x"))) == "unreadable"
    make_up(tmp_path / "first" / "east", "restored", 2)
    assert len(list(first.rounds())) == 1
    shutil.rmtree(tmp_path / "first" / "server")
    start = Request.read(of_kind(recorded(replace(first, policy=Policy(), run="two")), "east", Kind.START)[0][0])
    assert said(first.site("east"), replace(start, nonce=replace(start.nonce, run="three"))) == "runs"


def test_what_was_made_up_in_the_log_tells_the_cost_when_the_ledger_is_lost_after_it(tmp_path):
    federation = private(tmp_path)
    list(federation.rounds())
    site = federation.site("east")
    spent, costs = site.ledger.spent(), [line["release"] for line in Chain(site.ledger.path).lines()]
    site.audit.path.unlink()
    assert len(make_up(site.folder, "the log was lost").noted) == len(costs) == 2
    lines = list(Chain(site.audit.path).lines())
    assert [line["release"] for line in lines] == costs
    assert [line["noise_multiplier"] for line in lines] == [cost["noise_multiplier"] for cost in costs]
    site.ledger.path.unlink()
    make_up(site.folder, "and the ledger too")
    assert site.ledger.books().noiseless == 0
    assert site.ledger.spent().epsilon(DELTA) == spent.epsilon(DELTA) > 0


@pytest.mark.parametrize("rounds", [1, 2])
def test_an_older_log_and_older_runs_beside_the_newest_ledger_release_nothing_twice(tmp_path, rounds):
    """But for one attempt at the end of the ledger, which looks like work that was cut off."""
    federation, copy = private(tmp_path), tmp_path / "copy"
    asked, site = recorded(federation, 2), federation.site("east")
    shutil.copytree(site.folder, copy)
    shutil.rmtree(site.folder)
    for request in (request_of(asked, Kind.HELLO), request_of(asked, Kind.START)):
        assert said(site, request) is None
    shutil.copyfile(copy / "ledger.jsonl", site.ledger.path)
    without_lines(site.ledger.path, rounds)
    works = [request_of(asked, Kind.WORK, number) for number in range(rounds)]
    if rounds == 1:
        assert said(site, works[0]) is None
        return
    assert [said(site, work) for work in works] == ["ledger", "ledger"]
    assert "it is an older copy" in (site.folder / "site.log").read_text()
    assert make_up(site.folder, "the log was lost").noted == (("run-1", 0, 0), ("run-1", 1, 0))
    assert said(site, works[0]) == "conflict"
    assert site.ledger.serial == 2


def cut_off(site, request, monkeypatch):
    """Killed when the attempt was charged, and nothing else had happened."""
    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "save_work", lambda *args: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            site.answer(request.written())


def test_work_that_was_cut_off_is_no_fault_and_is_charged_again_where_others_were_since(tmp_path, monkeypatch):
    federation = in_the_open(tmp_path)
    asked, site = recorded(federation, 1), federation.site("east")
    work = replace(request_of(asked, Kind.WORK), nonce=replace(request_of(asked, Kind.WORK).nonce, attempt=1))
    cut_off(site, work, monkeypatch)
    assert said(site, work, attempt=2) is None
    assert [bool(line.get("unheard")) for line in site.ledger.chain.lines()] == [False, False, True]
    assert said(site, work, attempt=2) is None
    assert said(site, hello_of(federation)) is None
    assert site.ledger.serial == 3
    assert make_up(site.folder, "nothing is amiss").noted == ()
    shutil.rmtree(site.folder / "runs" / "run-1")
    assert said(site, hello_of(federation)) is None


def test_work_of_a_run_that_was_cut_off_while_another_went_on_costs_twice(tmp_path, monkeypatch):
    federation = private(tmp_path)
    asked, site = recorded(federation, 1), federation.site("east")
    work = replace(request_of(asked, Kind.WORK), nonce=replace(request_of(asked, Kind.WORK).nonce, attempt=1))
    cut_off(site, work, monkeypatch)
    shutil.rmtree(tmp_path / "server")
    recorded(replace(federation, run="other"), 1)
    assert (site.ledger.serial, len(site.ledger.spent())) == (3, 3)
    for _ in range(2):
        assert said(site, work) is said(site, hello_of(federation)) is None
        assert (site.ledger.serial, len(site.ledger.spent())) == (4, 4)


def test_one_line_stands_for_many_and_no_more_are_made_up_than_can_be(tmp_path):
    federation = in_the_open(tmp_path)
    recorded(federation, 1)
    site = federation.site("east")
    assert said(site, replace(hello_of(federation), seen=2**53 - 1)) == "behind"
    assert "make-up" not in (site.folder / "site.log").read_text()
    with pytest.raises(ParameterError, match="No site has released"):
        make_up(site.folder, "as the server says", 2**53 - 1)
    make_up(site.folder, "as the server says", 10**6)
    assert (site.ledger.serial, site.ledger.books().lines) == (10**6 + 1, 2)
    assert said(site, replace(hello_of(federation), seen=10**6 + 1)) is None


@pytest.mark.parametrize("name", ["ledger.jsonl", "audit.jsonl"])
def test_a_file_that_was_edited_is_moved_away_and_not_the_end_of_a_site(tmp_path, name):
    federation = in_the_open(tmp_path)
    list(federation.rounds())
    site = federation.site("east")
    path, spoiled = site.folder / name, b'"count": 1' if name.startswith("ledger") else b'"again": false'
    path.write_bytes(path.read_bytes().replace(spoiled, spoiled + b" "))
    assert said(site, hello_of(federation)) == "ledger"
    reason = (site.folder / "site.log").read_text().strip()
    assert f"move {name} out of the folder (do not delete it" in reason
    [command] = re.findall(r"partsong (audit make-up .*)\.$", reason)
    refused = CliRunner().invoke(app, shlex.split(command))
    assert refused.exit_code == 1
    assert f"move {name} out of the folder" in " ".join(refused.output.split())
    path.rename(tmp_path / "kept")
    assert CliRunner().invoke(app, shlex.split(command)).exit_code == 0
    assert said(site, hello_of(federation)) is None
    assert site.ledger.serial == 3


def test_a_new_file_is_on_the_disk_with_its_name(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_ino))
    path = tmp_path / "ledger.jsonl"
    Chain(path).append({"what": 1})
    assert flushed == [path.stat().st_ino, tmp_path.stat().st_ino]
    Chain(path).append({"what": 2})
    assert flushed[2:] == [path.stat().st_ino]


def test_lines_that_were_read_are_not_read_again_unless_a_byte_of_them_has_changed(tmp_path, monkeypatch):
    federation = in_the_open(tmp_path)
    asked, site = recorded(federation, 1), federation.site("east")
    for _ in range(300):
        site.ledger.make_up(1, None, "lost")
    assert said(site, request_of(asked, Kind.WORK)) is None
    read, line_in = [], chain._line_in
    monkeypatch.setattr(chain, "_line_in", lambda text: read.append(text) or line_in(text))
    assert said(site, request_of(asked, Kind.WORK)) is None
    assert len(read) < 10
    data = site.ledger.path.read_bytes()
    at = data.index(b'"count": 1', len(data) // 2) + 9
    site.ledger.path.write_bytes(data[:at] + b"2" + data[at + 1 :])
    assert said(site, request_of(asked, Kind.WORK)) == "ledger"
    site.ledger.path.write_bytes(data)
    assert said(site, request_of(asked, Kind.WORK)) is None


@pytest.mark.parametrize("later", ["refusals", "hello"])
def test_what_is_said_later_under_the_same_round_does_not_hide_what_an_attempt_has_cost(tmp_path, later):
    federation = private(tmp_path)
    asked, site = recorded(federation), federation.site("east")
    spent = site.ledger.spent()
    if later == "hello":
        assert said(site, hello_of(federation, "run-1")) is None
    else:
        assert [said(site, request_of(asked, Kind.WORK, number)) for number in (0, 1)] == ["over", "over"]
    site.ledger.path.unlink()
    make_up(tmp_path / "east", "the ledger is gone")
    assert (site.ledger.spent(), site.ledger.books().noiseless) == (spent, 0)


@pytest.mark.parametrize(("keep", "seen", "code"), [(1, 2, "behind"), (1, 0, "ledger")])
def test_the_command_in_the_log_of_a_site_is_a_way_out(tmp_path, keep, seen, code):
    federation = in_the_open(tmp_path / "with space")
    list(federation.rounds())
    site = federation.site("east")
    without_lines(site.ledger.path, keep)
    asked = replace(hello_of(federation), seen=seen)
    assert said(site, asked) == code
    [command] = re.findall(r"partsong (audit make-up .*)\.$", (site.folder / "site.log").read_text().strip())
    assert CliRunner().invoke(app, shlex.split(command)).exit_code == 0
    assert said(site, asked) is None


def test_what_the_server_has_seen_is_charged_once_where_the_log_tells_of_it(tmp_path):
    federation = private(tmp_path)
    list(federation.rounds())
    site = federation.site("east")
    spent = site.ledger.spent()
    without_lines(site.ledger.path, 1)
    assert said(site, replace(hello_of(federation), seen=2)) == "behind"
    assert "--count 1" in (tmp_path / "east" / "site.log").read_text()
    made = make_up(tmp_path / "east", "restored", 1)
    assert (made.charged, made.of_no_run) == ((("run-1", 1, 0),), 0)
    assert site.ledger.spent() == spent
    assert said(site, replace(hello_of(federation), seen=2)) is None
    without_lines(site.ledger.path, 1)
    assert make_up(tmp_path / "east", "restored", 3).of_no_run == 2
    assert site.ledger.serial == 4
