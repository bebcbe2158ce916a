"""Folders as a transport: the same bits, and no file is believed that was not meant for its place."""

from __future__ import annotations

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
from federations import NAMES, Federation, assert_same, secret_of
from site_process import SERVER_SECRET, mailbox_of

from partsong.engines.files import MAGIC, Folders, Lost, Mailbox
from partsong.errors import ParameterError
from partsong.federation.experiment import Experiment
from partsong.federation.refusals import SiteLost
from partsong.federation.signatures import public_key, signer, verifier

HERE = Path(__file__).parent


def folders_of(folder, names=NAMES[:3]):
    known = {name: verifier(public_key(secret_of(name), name)) for name in names}
    return Folders(folder / "drop", signer(SERVER_SECRET, "server"), known, poll=0.01)


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
    assert all(isinstance(one, Lost) for one in found.values())
    assert not list((tmp_path / "drop" / "east" / "in").iterdir())


def test_requests_of_somebody_else_are_not_answered(tmp_path):
    foreign = Mailbox(tmp_path / "drop", "east", signer(secret_of("east"), "east"), verifier(public_key(999, "server")))
    words = []
    with answering(foreign, lambda data: pytest.fail("it was believed"), words.append):
        assert isinstance(folders_of(tmp_path).ask({"east": b"abc"}, 0.3)["east"], Lost)
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
                path.write_bytes(MAGIC + bytes(64) + data[72:])

    return change


@pytest.mark.parametrize("how", ["cut short", "changed", "repeated", "without a signature", "foreign", "another party"])
def test_replies_that_were_tampered_with_are_not_used(tmp_path, how):
    folders, kept = folders_of(tmp_path), {}
    name = "north" if how == "another party" else "east"
    secret = 999 if how == "foreign" else secret_of(name)
    mailbox = Mailbox(tmp_path / "drop", "east", signer(secret, name), verifier(public_key(SERVER_SECRET, "server")))
    if how in ("foreign", "another party"):
        with answering(mailbox, lambda data: data):
            assert "signature" in folders.ask({"east": b"abc"}, 0.3)["east"].why
        return
    real, change = Folders._reply, spoiled(how, kept)

    def meddled(self, party, key):
        path = self.folder / party / "out" / f"{key}.reply"
        if path.exists():
            change(path)
        return real(self, party, key)

    with answering(mailbox, lambda data: data), pytest.MonkeyPatch.context() as patched:
        patched.setattr(Folders, "_reply", meddled)
        if how == "repeated":
            assert folders.ask({"east": b"one"}, 2)["east"] == b"one"
        assert "signature" in folders.ask({"east": b"two"}, 0.3)["east"].why


def test_oversized_files_and_links_are_not_read(tmp_path):
    folders = replace(folders_of(tmp_path), most=200)
    with answering(mailbox_of(tmp_path, "east"), lambda data: bytes(1000)):
        assert "longer" in folders.ask({"east": b"abc"}, 0.3)["east"].why


@pytest.mark.parametrize("name", ["../up", "", "a/b", ".x"])
def test_a_party_s_name_is_a_folder_s_name(tmp_path, name):
    with pytest.raises(ParameterError, match="name of a folder"):
        Folders(tmp_path, lambda text: b"", {name: lambda signature, text: True})


class Sites:
    """Processes by name, of which each can be killed; a new one is there at once."""

    def __init__(self, folder, names):
        command = [sys.executable, str(HERE / "site_process.py"), str(folder)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.nursery = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(HERE)}, **pipes)
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
    federation = Federation(tmp_path, Experiment("exact", 3, 2, masked=True, seed=4))
    with closing(Sites(tmp_path, federation.names)) as sites:
        rounds = []
        for done in federation.rounds(folders_of(tmp_path)):
            rounds.append(done)
            sites.kill("north")
    assert len(rounds) == 2
    assert_same(federation, rounds)
    assert all(federation.site(name).ledger.serial == 2 for name in federation.names)


def finished(federation):
    """A run that is started anew wherever the server gave up for want of a site."""
    plan, schedule = federation.plan(), federation.experiment.schedule(3)
    while True:
        coordinator = replace(federation.coordinator(folders_of(federation.folder)), timeout=20.0)
        try:
            return list(coordinator.run(plan.program, (), schedule, reduction=plan.reduction))
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
                experiment = Experiment("exact", 3, 5, masked=True, seed=runs)
                federation = Federation(tmp_path, experiment, names, run=f"run-{runs}")
                finished(federation)
                runs += 1
                assert_same(federation, [])
                assert all(federation.site(name).ledger.serial == 5 * runs for name in names)
                shutil.rmtree(tmp_path / "server")
        finally:
            is_over.set()
            ghost.join()
