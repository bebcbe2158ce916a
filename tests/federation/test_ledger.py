"""Laws of a site's two books, ledger and audit log: each is as it was written, without values, and covers the other."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
import shutil
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from partsong.cli.main import app
from partsong.errors import FormatError, ParameterError
from partsong.federation import chain
from partsong.federation.audit_log import format_row
from partsong.federation.chain import Chain
from partsong.federation.consistency import add_opening_balance
from partsong.federation.experiment import Experiment
from partsong.federation.ledger import LedgerState, OpeningBalance, SiteLedger
from partsong.federation.policy import Policy, PrivacyBudget
from partsong.federation.site.state import RunFolder
from partsong.federation.wire import Kind, Nonce, Request, RequestRefused
from partsong.privacy.accounting import Ledger, Release
from partsong.privacy.spending import DEFAULT_DELTA
from tests.federation.helpers import COLUMNS, Federation, charge, noisy_plan, rows_of
from tests.federation.test_site import code_of, of_kind, recorded
from tests.federation.test_site_limits import Stopped, in_the_open, lines_of, private, request_of, said

DELTA = 1e-5


def hello_of(federation, run="run-2"):
    note = {"experiment": federation.experiment.to_dict(), "parties": list(federation.names)}
    return Request("east", Nonce(run), note=note)


def without_lines(path, keep):
    """An older copy of a chain."""
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:keep]))


@pytest.mark.parametrize("keep", [0, 1])
def test_an_opening_balance_takes_from_the_log_what_a_lost_ledger_knew(tmp_path, keep):
    federation = private(tmp_path)
    list(federation.rounds())
    site, copy = federation.site("east"), tmp_path / "east" / "ledger.jsonl"
    spent, lines = site.ledger.load().privacy_ledger, len(lines_of(site))
    without_lines(copy, keep)
    assert said(site, hello_of(federation)) == "ledger"
    assert "partsong audit opening FOLDER" in (tmp_path / "east" / "site.log").read_text()
    copy.unlink()
    assert said(site, hello_of(federation)) == "ledger"
    assert (site.ledger.serial, len(lines_of(site))) == (0, lines + 2)
    stated = add_opening_balance(tmp_path / "east", "the ledger is lost")
    assert (stated.releases, stated.directions, stated.delta) == (2, 0, DEFAULT_DELTA / 2)
    assert stated.epsilon == spent.epsilon(DEFAULT_DELTA / 2)
    books = site.ledger.load()
    assert (books.serial, books.noiseless) == (2, 0)
    assert books.epsilon(DELTA) == stated.epsilon > spent.epsilon(DELTA) > 0
    assert said(site, hello_of(federation)) is None
    with pytest.raises(ParameterError, match="Nothing is missing"):
        add_opening_balance(tmp_path / "east", "once more")


def test_a_ledger_with_other_noise_than_the_log_tells_is_none(tmp_path):
    federation = private(tmp_path)
    list(federation.rounds())
    site, path = federation.site("east"), tmp_path / "east" / "ledger.jsonl"
    lines, spent = list(Chain(path).lines()), site.ledger.load().privacy_ledger
    path.unlink()
    for line in lines:
        release = {**line["release"], "noise_multiplier": 2 * line["release"]["noise_multiplier"]}
        kept = {name: value for name, value in line.items() if name not in ("number", "before", "hash")}
        Chain(path).append({**kept, "release": release})
    assert said(site, hello_of(federation)) == "ledger"
    assert "with other noise than" in (tmp_path / "east" / "site.log").read_text()
    path.rename(tmp_path / "moved.jsonl")
    add_opening_balance(tmp_path / "east", "the ledger was not that of the log")
    assert site.ledger.load().epsilon(DELTA) >= spent.epsilon(DELTA)
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
    assert said(site, hello_of(federation)) == "ledger"
    assert add_opening_balance(tmp_path / "east", "the log is lost").releases == 0
    shutil.rmtree(tmp_path / "east" / "runs")
    assert said(site, request_of(asked, Kind.START)) is None
    for attempt in (0, 1):
        assert said(site, request_of(asked, Kind.WORK, 1), attempt=attempt) == "out-of-step"
    assert site.ledger.serial == 2


@pytest.mark.parametrize("name", ["ledger.jsonl", "audit.jsonl"])
def test_older_copies_are_found_after_an_opening_balance_as_before(tmp_path, name):
    federation = in_the_open(tmp_path)
    asked, site = recorded(federation, 2), federation.site("east")
    site.ledger.path.unlink()
    add_opening_balance(tmp_path / "east", "the ledger is lost", directions=0)
    kept = (site.folder / name).read_bytes()
    for number in (0, 1):
        assert said(site, request_of(asked, Kind.WORK, number)) is None
    assert said(site, hello_of(federation)) is None
    newest = (site.folder / name).read_bytes()
    (site.folder / name).write_bytes(kept[: kept.rfind(b"\n", 0, -1) + 1])
    assert said(site, hello_of(federation)) == "ledger"
    (site.folder / name).write_bytes(newest)
    assert said(site, hello_of(federation)) is None


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
    spent = site.ledger.load().privacy_ledger
    shutil.rmtree(tmp_path / "east")
    shutil.move(tmp_path / "copy", tmp_path / "east")
    return site, spent


def test_releases_that_the_log_lacks_too_count_as_is_stated(tmp_path):
    site, spent = dear_and_lost(tmp_path / "private")
    shutil.copytree(site.folder, tmp_path / "stated")
    with pytest.raises(ParameterError, match="2 of 2 missing releases had no noise, as far as is known"):
        add_opening_balance(site.folder, "restored", releases=2)
    assert add_opening_balance(site.folder, "restored", releases=2, directions=0).epsilon is None
    books = site.ledger.load()
    assert (books.serial, books.lines, books.noiseless) == (3, 2, 2)
    with pytest.raises(RequestRefused, match="noiseless_before = 2"):
        site.ledger.require_budget(site.policy.privacy, next(iter(books.releases)))
    epsilon = spent.epsilon(DELTA / 2)
    words = ["audit", "opening", str(tmp_path / "stated"), "--releases", "2", "--why", "restored"]
    words += ["--epsilon", str(epsilon), "--delta", str(DELTA / 2)]
    assert CliRunner().invoke(app, words).exit_code == 0
    stated = SiteLedger(tmp_path / "stated" / "ledger.jsonl").load()
    assert (stated.serial, stated.noiseless) == (3, 0)
    rest = stated.privacy_ledger.epsilon(DELTA - DELTA / 2)
    assert stated.epsilon(DELTA) == epsilon + rest > spent.epsilon(DELTA) > 4
    assert stated.epsilon(DELTA / 2) == math.inf
    for change in (["--epsilon", "-1"], ["--delta", "1"], ["--why", " "], ["--unit", "row", "--relation", "replace"]):
        assert CliRunner().invoke(app, [*words, *change]).exit_code == 1
    assert SiteLedger(tmp_path / "stated" / "ledger.jsonl").serial == 3


OF_PARTY, OF_ROW = Release("gaussian", 1.0, "party", "replace"), Release("gaussian", 1.0, "row", "add-or-remove")


@pytest.mark.parametrize(
    ("stated", "known", "unit", "why"),
    [
        (OF_PARTY, [OF_ROW], None, r"a party \(replace\) does not add up with .* about a row \(add-or-remove\)"),
        (replace(OF_ROW, relation="replace"), [OF_ROW], "row", r"row \(replace\)"),
        (OF_PARTY, [], "row", r"a row \(site.toml\)"),
        (OF_ROW, [OF_ROW], "row", None),
        (OF_ROW, [], None, None),
    ],
)
def test_an_opening_balance_is_about_what_books_and_policy_are_about(tmp_path, stated, known, unit, why):
    state = tmp_path / "site-east" / "state"
    state.mkdir(parents=True)
    ledger = SiteLedger(state / "ledger.jsonl")
    (state / "site.log").touch()
    for release in known:
        charge(ledger, release)
    if unit is not None:
        (state.parent / "site.toml").write_text(f'[privacy]\nepsilon = 20.0\nunit = "{unit}"\n')
    about = {"unit": stated.unit, "relation": stated.relation}
    if why is None:
        add_opening_balance(state, "restored", releases=2, epsilon=1.5, delta=1e-6, **about)
        rest = Ledger(((OF_ROW, len(known)),)).epsilon(DELTA - 1e-6) if known else 0.0
        assert ledger.load().epsilon(DELTA) == 1.5 + rest
        return
    with pytest.raises(ParameterError, match=why):
        add_opening_balance(state, "restored", releases=2, epsilon=1.5, delta=1e-6, **about)
    assert ledger.serial == len(known), "nothing is written"


def test_opening_balances_leave_some_delta_for_what_comes(tmp_path):
    state = tmp_path / "site-east" / "state"
    state.mkdir(parents=True)
    (state.parent / "site.toml").write_text("[privacy]\nepsilon = 3.0\n")
    first = add_opening_balance(state, "restored", releases=2, epsilon=0.5)
    second = add_opening_balance(state, "restored again", releases=2, epsilon=0.5)
    assert (first.delta, second.delta) == (DELTA / 2, DELTA / 4)
    assert SiteLedger(state / "ledger.jsonl").load().epsilon(DELTA, Ledger(((OF_ROW, 1),))) < 10
    with pytest.raises(ParameterError, match="leaves nothing"):
        add_opening_balance(state, "and again", releases=2, epsilon=0.5, delta=DELTA / 4)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    openings=st.lists(st.tuples(st.floats(0.01, 5), st.floats(0, 4e-6)), max_size=2),
    charged=st.integers(0, 5),
    more=st.integers(0, 5),
)
def test_what_is_stated_adds_up_with_what_is_charged_by_basic_composition(openings, charged, more):
    stated = tuple(OpeningBalance(3, "restored", epsilon, delta) for epsilon, delta in openings)
    books = LedgerState(releases={OF_ROW: charged} if charged else {}, openings=stated)
    planned, left = Ledger(((OF_ROW, more),)), DELTA - sum(delta for _, delta in openings)
    own = Ledger(((OF_ROW, charged + more),)).epsilon(left) if charged + more else 0.0
    assert books.epsilon(DELTA, planned) == pytest.approx(own + sum(epsilon for epsilon, _ in openings))
    assert books.epsilon(DELTA, planned) >= LedgerState(releases=books.releases).epsilon(DELTA, planned)


def test_an_opening_balance_is_of_no_run(tmp_path):
    policy = Policy(maximum_runs=1)
    first = Federation(tmp_path / "first", Experiment("fedavg", 3, 1), policy=policy)
    assert said(first.site("east"), Request("east", Nonce("x"))) == "unreadable"
    add_opening_balance(tmp_path / "first" / "east", "restored", releases=2, directions=0)
    assert len(list(first.rounds())) == 1
    shutil.rmtree(tmp_path / "first" / "server")
    start = Request.from_bytes(of_kind(recorded(replace(first, policy=Policy(), run="two")), "east", Kind.START)[0][0])
    assert said(first.site("east"), replace(start, nonce=replace(start.nonce, run="three"))) == "runs"


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
    assert "it is an older backup" in (site.folder / "site.log").read_text()
    assert add_opening_balance(site.folder, "the log was lost").releases == 0
    assert said(site, works[0]) == "conflict"
    assert site.ledger.serial == 2


def cut_off(site, request, monkeypatch):
    """Killed when the attempt was charged, and nothing else had happened."""
    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "save_work", lambda *args: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            site.answer(request.to_bytes())


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
    with pytest.raises(ParameterError, match="Nothing is missing"):
        add_opening_balance(site.folder, "nothing is amiss")
    shutil.rmtree(site.folder / "runs" / "run-1")
    assert said(site, hello_of(federation)) is None


def test_work_of_a_run_that_was_cut_off_while_another_went_on_costs_twice(tmp_path, monkeypatch):
    federation = private(tmp_path)
    asked, site = recorded(federation, 1), federation.site("east")
    work = replace(request_of(asked, Kind.WORK), nonce=replace(request_of(asked, Kind.WORK).nonce, attempt=1))
    cut_off(site, work, monkeypatch)
    shutil.rmtree(tmp_path / "server")
    recorded(replace(federation, run="other"), 1)
    assert (site.ledger.serial, len(site.ledger.load().privacy_ledger)) == (3, 3)
    for _ in range(2):
        assert said(site, work) is said(site, hello_of(federation)) is None
        assert (site.ledger.serial, len(site.ledger.load().privacy_ledger)) == (4, 4)


def test_no_more_is_stated_than_a_site_can_have_released(tmp_path):
    federation = in_the_open(tmp_path)
    recorded(federation, 1)
    site = federation.site("east")
    assert said(site, replace(hello_of(federation), seen=2**53 - 1)) == "behind"
    with pytest.raises(ParameterError, match="No site has released"):
        add_opening_balance(site.folder, "as the server says", releases=2**53 - 1, directions=0)
    add_opening_balance(site.folder, "as the server says", releases=10**6, directions=0)
    assert (site.ledger.serial, site.ledger.load().lines) == (10**6 + 1, 2)
    assert said(site, replace(hello_of(federation), seen=10**6 + 1)) is None


@pytest.mark.parametrize("name", ["ledger.jsonl", "audit.jsonl"])
def test_a_file_that_was_edited_is_moved_away_and_not_the_end_of_a_site(tmp_path, name):
    federation = in_the_open(tmp_path)
    list(federation.rounds())
    site = federation.site("east")
    path, spoiled = site.folder / name, b'"count": 1' if name.startswith("ledger") else b'"again": false'
    path.write_bytes(path.read_bytes().replace(spoiled, spoiled + b" "))
    assert said(site, hello_of(federation)) == "ledger"
    way_out = f"{path}, line 1: .* Keep the file unchanged outside the folder"
    assert re.search(way_out, (site.folder / "site.log").read_text())
    command = ["audit", "opening", str(site.folder), "--why", "edited", "--directions", "0"]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 1
    assert "outside the folder" in " ".join(refused.output.split())
    path.rename(tmp_path / "kept")
    assert CliRunner().invoke(app, command).exit_code == 0
    assert said(site, hello_of(federation)) is None
    assert site.ledger.serial == 3


@pytest.mark.parametrize("name", ["ledger.jsonl", "audit.jsonl"])
def test_a_file_of_a_newer_version_is_refused_and_nothing_is_charged(tmp_path, name):
    federation = in_the_open(tmp_path)
    asked, site = recorded(federation, 1), federation.site("east")
    was = {file: (site.folder / file).read_bytes() for file in ("ledger.jsonl", "audit.jsonl")}
    Chain(site.folder / name).append({"version": 2, "kind": "of tomorrow"})
    for request in (hello_of(federation), replace(request_of(asked, Kind.WORK), seen=0)):
        assert said(site, request) == "ledger"
    log = (site.folder / "site.log").read_text()
    assert re.search(rf"{name}, line \d+: its version is 2; .* pip install --upgrade partsong", log)
    refused = CliRunner().invoke(app, ["audit", "opening", str(site.folder), "--why", "newer", "--directions", "0"])
    assert (refused.exit_code, "its version is 2" in " ".join(refused.output.split())) == (1, True)
    shown = CliRunner().invoke(app, ["audit", "show", str(site.folder)])
    assert (shown.exit_code == 0) == (name == "ledger.jsonl")
    assert site.folder.joinpath("ledger.jsonl").read_bytes().startswith(was["ledger.jsonl"])
    for file, content in was.items():
        (site.folder / file).write_bytes(content)
    assert said(site, request_of(asked, Kind.WORK)) is None
    assert site.ledger.serial == 1


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
        charge(site.ledger)
    assert said(site, request_of(asked, Kind.WORK)) is None
    read, line_in = [], chain._parse_line
    monkeypatch.setattr(chain, "_parse_line", lambda text: read.append(text) or line_in(text))
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
    spent = site.ledger.load().privacy_ledger
    if later == "hello":
        assert said(site, hello_of(federation, "run-1")) is None
    else:
        assert [said(site, request_of(asked, Kind.WORK, number)) for number in (0, 1)] == ["over", "over"]
    site.ledger.path.unlink()
    stated = add_opening_balance(tmp_path / "east", "the ledger is lost", delta=DELTA)
    assert (stated.epsilon, site.ledger.load().noiseless) == (spent.epsilon(DELTA), 0)


@pytest.mark.parametrize(("keep", "seen", "code"), [(1, 2, "behind"), (1, 0, "ledger")])
def test_the_command_in_the_log_of_a_site_is_a_way_out(tmp_path, keep, seen, code):
    federation = in_the_open(tmp_path / "with space")
    list(federation.rounds())
    site = federation.site("east")
    without_lines(site.ledger.path, keep)
    asked = replace(hello_of(federation), seen=seen)
    assert said(site, asked) == code
    [command] = re.findall(r"partsong (audit opening .*)$", (site.folder / "site.log").read_text().strip())
    words = [str(site.folder) if word == "FOLDER" else word for word in shlex.split(command)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert "(directions)" in " ".join(result.output.split())
    assert CliRunner().invoke(app, [*words, "--directions", "0"]).exit_code == 0
    assert said(site, asked) is None


def test_what_the_server_has_seen_is_stated_once_where_the_log_has_it(tmp_path):
    federation = private(tmp_path)
    list(federation.rounds())
    site = federation.site("east")
    spent = site.ledger.load().privacy_ledger
    without_lines(site.ledger.path, 1)
    assert said(site, replace(hello_of(federation), seen=2)) == "behind"
    assert "--releases 1" in (tmp_path / "east" / "site.log").read_text()
    assert add_opening_balance(tmp_path / "east", "restored", releases=1).epsilon > 0
    assert site.ledger.load().epsilon(DELTA) >= spent.epsilon(DELTA)
    assert said(site, replace(hello_of(federation), seen=2)) is None
    assert site.ledger.serial == 2


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    path = tmp_path_factory.mktemp("chain") / "chain.jsonl"
    for number in range(6):
        Chain(path).append({"what": number})
    return path.read_bytes().splitlines(keepends=True)


def written(tmp_path, lines):
    path = tmp_path / "chain.jsonl"
    path.write_bytes(b"".join(lines))
    return Chain(path)


def test_every_message_out_is_in_the_log_with_its_hash(tmp_path):
    federation = Federation(tmp_path, Experiment("exact", 3, 1, secure_aggregation=True))
    asked = recorded(federation)
    log = list(Chain(federation.site("east").audit.path).lines())
    payloads = [reply for name, _, reply in asked if name == "east"]
    assert [line["sha256"] for line in log] == [hashlib.sha256(one).hexdigest() for one in payloads]
    assert [line["bytes"] for line in log] == [len(one) for one in payloads]
    upload = next(line for line in log if line["phase"] == 2)
    assert [one["name"] for one in upload["arrays"]] == ["about", "body", "signature"]


def test_the_log_has_no_values_and_no_names_of_columns(tmp_path):
    federation = Federation(tmp_path, Experiment("fedavg", 3, 1))
    list(federation.rounds())
    text = federation.site("east").audit.path.read_text()
    assert not any(name in text for name in COLUMNS)
    assert not any(repr(float(value)) in text for value in rows_of("east").ravel())
    [shown] = [
        "  ".join(format_row(line))
        for line in Chain(federation.site("east").audit.path).lines()
        if line["kind"] == "work"
    ]
    assert "H 3×12" in shown


def test_the_log_tells_clip_and_spending(tmp_path):
    policy = Policy(privacy=PrivacyBudget(20.0, unit="party", insecure_noise=True))
    experiment = Experiment("fedavg", 3, 2, local_steps=1, privacy={"unit": "party", "epsilon": 8.0, "clip": 0.5})
    federation = Federation(tmp_path, experiment, policy=policy, build=noisy_plan)
    list(federation.rounds())
    works = [line for line in Chain(federation.site("east").audit.path).lines() if line["kind"] == "work"]
    assert [line["clip"] for line in works] == [0.5, 0.5]
    assert 0 < works[0]["epsilon"] < works[1]["epsilon"] == pytest.approx(8.0, rel=1e-6)
    assert all(line["arrays"][0]["norm"] > 0 for line in works)


def test_a_sound_file_has_a_head_to_note_elsewhere(tmp_path, lines):
    assert written(tmp_path, lines).head() == (6, json.loads(lines[-1])["hash"])


@pytest.mark.parametrize("place", range(6))
def test_a_line_that_was_edited_is_found(tmp_path, lines, place):
    edited = [*lines]
    edited[place] = edited[place].replace(b'"what": ', b'"what": 1')
    with pytest.raises(FormatError, match=f"line {place + 1}"):
        written(tmp_path, edited).head()


@pytest.mark.parametrize("place", range(5))
def test_a_line_that_was_taken_out_or_moved_is_found(tmp_path, lines, place):
    with pytest.raises(FormatError):
        written(tmp_path, lines[:place] + lines[place + 1 :]).head()
    with pytest.raises(FormatError):
        written(tmp_path, [*lines[:place], lines[place + 1], lines[place], *lines[place + 2 :]]).head()


def test_lines_cut_off_at_the_end_change_the_head(tmp_path, lines):
    assert written(tmp_path, lines[:4]).head() != written(tmp_path, lines).head()


@pytest.mark.parametrize("size", [1, 20, 100])
def test_a_torn_last_line_was_never_acted_on_and_is_taken_away(tmp_path, lines, size):
    chain = written(tmp_path, [*lines[:5], lines[5][:size]])
    assert chain.head()[0] == 5
    chain.append({"what": "next"})
    assert chain.head()[0] == 6


def test_nothing_is_added_after_an_edited_last_line(tmp_path, lines):
    with pytest.raises(FormatError, match="last line"):
        written(tmp_path, [*lines[:5], lines[5].replace(b'"what": 5', b'"what": 6')]).append({})


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_flipped_bit_is_found(tmp_path_factory, lines, data):
    content = bytearray(b"".join(lines))
    place = data.draw(st.integers(0, len(content) - 2))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path_factory.mktemp("flipped") / "chain.jsonl"
    path.write_bytes(bytes(content))
    with pytest.raises(FormatError):
        Chain(path).head()
