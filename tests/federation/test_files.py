"""Folders as a transport: the same bits, and no file is believed that was not meant for its place."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from partsong.core.interfaces import Schedule
from partsong.engines.virtual_clock import Asynchronous
from partsong.errors import FileError, ParameterError, SiteLost
from partsong.federation.experiment import Experiment
from partsong.federation.server.launch import run_experiment
from partsong.federation.server.state import ArrivalsJournal
from partsong.federation.signing import MAGIC, public_key, signer, verifier
from partsong.federation.transports.base import NoReply
from partsong.federation.transports.files import NO_REPLY_FILE, FolderTransport, SiteMailbox
from tests.federation.helpers import NAMES, Federation, assert_same, model_of, secret_of, shards_of
from tests.federation.site_process import SERVER_SECRET, mailbox_of

HERE = Path(__file__).parent


def folders_of(folder, names=NAMES[:3]):
    known = {name: verifier(public_key(secret_of(name), name)) for name in names}
    return FolderTransport(folder / "drop", signer(SERVER_SECRET, "server"), known, poll=0.01)


@contextmanager
def answering(mailbox, answer, tell=lambda word: None):
    """A site in a thread."""
    is_over = threading.Event()

    def serve():
        while not is_over.is_set():
            for word in mailbox.answer_all(answer):
                tell(word)
            time.sleep(0.005)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_requests_and_replies_pass_as_they_are(tmp_path):
    with answering(mailbox_of(tmp_path, "east"), lambda data: data[::-1]):
        assert folders_of(tmp_path).ask({"east": b"abc" * 1000}, 5) == {"east": b"cba" * 1000}
    assert not [path for path in (tmp_path / "drop").rglob("*") if path.is_file()]


def test_who_does_not_answer_in_time_is_lost_and_its_request_taken_back(tmp_path):
    found = folders_of(tmp_path).ask({"east": b"abc", "north": b"abc"}, 0.05)
    assert all(isinstance(one, NoReply) for one in found.values())
    assert not list((tmp_path / "drop" / "east" / "in").iterdir())


def test_runs_that_use_one_folder_at_the_same_time_leave_each_other_alone(tmp_path):
    first, mailbox = replace(folders_of(tmp_path), run="first"), mailbox_of(tmp_path, "east")
    second = replace(folders_of(tmp_path), run="second", other_runs=lambda: ["first"])
    first.push({"east": b"one"}, 60)
    second.push({"east": b"two"}, 60)
    assert len(list(mailbox.answer_all(lambda data: data[::-1]))) == 2
    second.push({"east": b"three"}, 60)
    assert first.next_reply(0) == ("east", b"eno"), "neither its request nor its reply was taken away"
    first.push({"east": b"one"}, 60)
    assert second.next_reply(0) is None
    assert len(list((tmp_path / "drop" / "east" / "in").iterdir())) == 1, "nobody works on the second run"


def test_requests_of_somebody_else_are_not_answered(tmp_path):
    foreign = SiteMailbox(
        tmp_path / "drop", "east", signer(secret_of("east"), "east"), verifier(public_key(999, "server"))
    )
    words = []
    with answering(foreign, lambda data: pytest.fail("it was believed"), words.append):
        assert isinstance(folders_of(tmp_path).ask({"east": b"abc"}, 0.3)["east"], NoReply)
    assert "signature" in words[0]


def spoiled(how, kept):
    def change(path):
        data = kept.setdefault(path, path.read_bytes())
        kept.setdefault("first", data)
        match how:
            case "cut short":
                path.write_bytes(data[:-1])
            case "changed":
                path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
            case "repeated":
                path.write_bytes(kept["first"])
            case "without a signature":
                path.write_bytes(data[: -len(MAGIC) - 64] + bytes(64) + MAGIC)

    return change


@pytest.mark.parametrize("how", ["cut short", "changed", "repeated", "without a signature", "foreign", "another party"])
def test_replies_that_were_tampered_with_are_not_used(tmp_path, how):
    folders, kept = folders_of(tmp_path), {}
    name = "north" if how == "another party" else "east"
    secret = 999 if how == "foreign" else secret_of(name)
    mailbox = SiteMailbox(
        tmp_path / "drop", "east", signer(secret, name), verifier(public_key(SERVER_SECRET, "server"))
    )
    if how in ("foreign", "another party"):
        with answering(mailbox, lambda data: data):
            assert "signature" in folders.ask({"east": b"abc"}, 0.3)["east"].reason
        return
    real, change = FolderTransport._read_reply, spoiled(how, kept)

    def meddled(self, party, out):
        path = self.folder / party / "out" / f"{out.key}.reply"
        if not path.exists():
            return NoReply(NO_REPLY_FILE)  # a reply that comes now is meddled with at the next look
        change(path)
        return real(self, party, out)

    with answering(mailbox, lambda data: data), pytest.MonkeyPatch.context() as patched:
        patched.setattr(FolderTransport, "_read_reply", meddled)
        if how == "repeated":
            assert folders.ask({"east": b"one"}, 2)["east"] == b"one"
        assert "signature" in folders.ask({"east": b"two"}, 1)["east"].reason


def test_oversized_files_and_links_are_not_read(tmp_path):
    folders = replace(folders_of(tmp_path), max_bytes=200)
    with answering(mailbox_of(tmp_path, "east"), lambda data: bytes(1000)):
        assert "longer" in folders.ask({"east": b"abc"}, 0.3)["east"].reason


def put(kind, path):
    """Something that is no file, by the name of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "full folder":
            (path / "more").mkdir(parents=True)
        case "link":
            path.symlink_to(path.parent / "elsewhere")


def in_time(work, seconds=5):
    """What it returns, unless it hangs."""
    found = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "it hangs"
    return found[0]


@pytest.mark.parametrize("kind", ["pipe", "folder", "full folder", "link"])
def test_a_site_is_not_held_up_by_what_is_no_request_and_tells_of_it_once(tmp_path, kind):
    mailbox = mailbox_of(tmp_path, "east")
    put(kind, tmp_path / "drop" / "east" / "in" / f"{'0' * 32}.request")
    words = in_time(lambda: list(mailbox.answer_all(lambda data: data)))
    assert len(words) == 1
    assert "not answered" in words[0]
    assert in_time(lambda: list(mailbox.answer_all(lambda data: data))) == []
    folders_of(tmp_path).push({"east": b"abc"}, 60)
    assert ["answered" in word for word in in_time(lambda: list(mailbox.answer_all(lambda data: data)))] == [True]


@pytest.mark.parametrize(
    ("place", "kind"),
    [(place, kind) for place in ("in", "out") for kind in ("pipe", "link")]
    + [("out/KEY.reply", kind) for kind in ("pipe", "folder", "full folder", "link")],
)
def test_a_coordinator_is_not_held_up_by_what_is_no_reply_or_no_folder(tmp_path, kind, place):
    key = hashlib.sha256(b"").hexdigest()[:8] + hashlib.sha256(b"abc").hexdigest()[:24]
    put(kind, tmp_path / "drop" / "east" / place.replace("KEY", key))
    with answering(mailbox_of(tmp_path, "north"), lambda data: data[::-1]):
        found = in_time(lambda: folders_of(tmp_path).ask({"east": b"abc", "north": b"abc"}, 0.2))
    assert isinstance(found["east"], NoReply)
    assert found["north"] == b"cba"


@pytest.mark.parametrize("side", ["in", "out"])
def test_nothing_is_written_through_a_link(tmp_path, side):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "drop" / "east").mkdir(parents=True)
    (tmp_path / "drop" / "east" / side).symlink_to(elsewhere)
    folders = folders_of(tmp_path)
    folders.push({"east": b"abc"}, 60)
    words = list(mailbox_of(tmp_path, "east").answer_all(lambda data: b"secret"))
    assert not list(elsewhere.iterdir())
    if side == "in":
        assert "not a link" in folders.cancel()["east"].reason
    else:
        assert "not a link" in words[0]


def test_replies_are_heard_as_they_come_and_who_waits_longest_is_first(tmp_path):
    folders, boxes = folders_of(tmp_path), {name: mailbox_of(tmp_path, name) for name in NAMES[:3]}
    folders.push(dict.fromkeys(boxes, b"abc"), 60)
    assert folders.next_reply(0) is None
    list(boxes["south"].answer_all(lambda data: b"first"))
    assert folders.next_reply(5) == ("south", b"first")
    folders.push({"south": b"next"}, 60)
    for name in boxes:
        list(boxes[name].answer_all(lambda data: data[::-1]))
    assert [folders.next_reply(5) for _ in range(3)] == [("east", b"cba"), ("north", b"cba"), ("south", b"txen")]
    assert folders.next_reply(5) is None
    assert not [path for path in (tmp_path / "drop").rglob("*") if path.is_file()]


def test_a_new_request_takes_the_place_of_the_one_before_whose_reply_is_never_used(tmp_path):
    folders, mailbox = folders_of(tmp_path), mailbox_of(tmp_path, "east")
    folders.push({"east": b"old"}, 60)
    list(mailbox.answer_all(lambda data: data))
    folders.push({"east": b"new"}, 60)
    assert folders.next_reply(0) is None
    list(mailbox.answer_all(lambda data: data))
    assert folders.next_reply(5) == ("east", b"new")
    folders.push({"east": b"last"}, 60)
    assert isinstance(folders.cancel()["east"], NoReply)
    assert list(mailbox.answer_all(lambda data: data)) == []


def test_a_server_that_was_killed_finds_the_reply_to_the_same_request(tmp_path):
    folders_of(tmp_path).push({"east": b"abc"}, 60)
    list(mailbox_of(tmp_path, "east").answer_all(lambda data: b"done before"))
    again = folders_of(tmp_path)
    again.push({"east": b"abc"}, 60)
    assert again.next_reply(0) == ("east", b"done before")


def test_a_request_that_was_taken_and_not_answered_is_dropped_again(tmp_path):
    folders, mailbox = replace(folders_of(tmp_path), retry_after=0.05), mailbox_of(tmp_path, "east")

    def full(data):
        raise FileError("The disk is full.")

    folders.push({"east": b"abc"}, 60)
    assert "not answered" in next(mailbox.answer_all(full))
    with answering(mailbox, lambda data: data[::-1]):
        assert folders.next_reply(5) == ("east", b"cba")


def test_an_error_of_ours_is_told_and_the_next_request_is_answered(tmp_path):
    folders, mailbox = folders_of(tmp_path), mailbox_of(tmp_path, "east")

    def mistaken(data):
        raise ParameterError("site.toml has no such setting.")

    folders.push({"east": b"abc"}, 60)
    assert "no such setting" in next(mailbox.answer_all(mistaken))
    folders.push({"east": b"abc"}, 60)
    assert "answered" in next(mailbox.answer_all(lambda data: data))


@pytest.mark.parametrize("name", ["../up", "", "a/b", ".x"])
def test_a_party_s_name_is_a_folder_s_name(tmp_path, name):
    with pytest.raises(ParameterError, match="cannot be called"):
        FolderTransport(tmp_path, lambda text: b"", {name: lambda signature, text: True})


class Sites:
    """Processes by name, of which each can be killed; a new one is there at once."""

    def __init__(self, folder, names):
        command = [sys.executable, str(HERE / "site_process.py"), str(folder)]
        path = os.pathsep.join((str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.nursery = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, **pipes)
        self.running = {name: self.started(name) for name in names}

    def started(self, name):
        self.nursery.stdin.write(f"{name}\n")
        self.nursery.stdin.flush()
        return int(self.nursery.stdout.readline())

    def kill(self, name):
        os.kill(self.running[name], signal.SIGKILL)
        self.running[name] = self.started(name)

    def close(self):
        """Whoever is left is stopped."""
        self.nursery.communicate()


def test_processes_that_are_killed_and_come_back_give_the_same_bits(tmp_path):
    federation = Federation(tmp_path, Experiment("exact", 3, 2, secure_aggregation=True, seed=4))
    with closing(Sites(tmp_path, federation.names)) as sites:
        rounds = []
        for done in federation.rounds(folders_of(tmp_path)):
            rounds.append(done)
            sites.kill("north")
    assert len(rounds) == 2
    assert_same(federation, rounds)
    assert all(federation.site(name).ledger.serial == 2 for name in federation.names)


@pytest.mark.slow
def test_sites_that_are_killed_in_an_asynchronous_run_hold_up_nobody(tmp_path):
    """Processes: one is killed again and again, and another is not there for a while."""
    experiment = Experiment("asyn-sd", 3, 5, local_steps=2, seed=4, on_party_error="skip")
    federation = Federation(tmp_path, experiment)
    with closing(Sites(tmp_path, federation.names)) as sites:
        transport, rounds = folders_of(tmp_path), []
        for done in run_experiment(experiment, transport, tmp_path / "server", "run-1", timeout=20):
            rounds.append(done)
            if done.index == 3:
                os.kill(sites.running["south"], signal.SIGKILL)
            elif done.index == 9:
                sites.running["south"] = sites.started("south")
            elif done.index % 3 == 1:
                sites.kill("north")
    record = ArrivalsJournal(tmp_path / "server").load()
    assert record.order[4:10].count("south") <= 1
    plan, schedule = federation.plan(), Schedule(15, 4)
    engine = Asynchronous(record.recorded_order())
    expected = list(engine.run(plan.program, shards_of(federation.names), schedule, reduction=plan.reduction))
    assert [model_of(done) for done in rounds] == [model_of(done) for done in expected]
    for name in federation.names:
        works = [line["attempt"] for line in federation.site(name).ledger.chain.lines()]
        assert works == [["run-1", number, 0] for number in range(len(works))]
        assert len(works) - record.order.count(name) in (0, 1)


def finished(federation):
    """A run that is started anew wherever the server gave up for want of a site."""
    while True:
        try:
            return list(federation.rounds(folders_of(federation.folder), timeout=20.0))
        except SiteLost:
            continue


@pytest.mark.slow
def test_fifty_random_kills_of_sites_lose_nothing(tmp_path):
    """Sites are killed at any time, also in the middle of an answer, in run after run."""
    chance, kills, is_over, runs = random.Random(5), [], threading.Event(), 0
    names = NAMES[:3]
    with closing(Sites(tmp_path, names)) as sites:

        def haunt():
            while not is_over.is_set():
                time.sleep(chance.uniform(0.05, 0.8))
                kills.append(chance.choice(names))
                sites.kill(kills[-1])

        ghost = threading.Thread(target=haunt)
        ghost.start()
        try:
            while len(kills) < 50:
                experiment = Experiment("exact", 3, 5, secure_aggregation=True, seed=runs)
                federation = Federation(tmp_path, experiment, names, run=f"run-{runs}")
                finished(federation)
                runs += 1
                assert_same(federation, [])
                assert all(federation.site(name).ledger.serial == 5 * runs for name in names)
                shutil.rmtree(tmp_path / "server")
        finally:
            is_over.set()
            ghost.join()
