"""Faults over real processes of Flower: whatever is killed, cut off, full, expired or hostile, nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from partsong.errors import FileError
from partsong.federation.commands import demo
from partsong.federation.setup import credentials
from partsong.federation.setup.credentials import Pair

pytest.importorskip("flwr")
from partsong.federation.flower.control import ServerError, open_control
from tests.integration.flower import flower_processes as processes
from tests.integration.flower.flower_kills import KINDS, Killer
from tests.integration.flower.flower_processes import PLAIN, SITES, federation, limit_files

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")
LIES = {
    "NaN": "NaN or infinite",
    "shape": "3 × 59, not 3 × 60",
    "large": "3 × 1048576, not 3 × 60",
    "replayed": "not signed by its key in the roster for this request",
    "garbage": "cannot be read",
    "oversized": "longer than the limit",
}


@pytest.fixture(scope="module")
def haunted(tmp_path_factory):
    with federation(tmp_path_factory.mktemp("haunted"), SITES) as found:
        yield found


@pytest.mark.parametrize(("kind", "rounds"), [("plain", 3), ("masked", 3), ("asynchronous", 12)])
def test_two_kills_lose_nothing(haunted, kind, rounds):
    haunt = replace(KINDS[kind], rounds=(rounds,))
    assert len(Killer(haunted, 3, haunt, kind).runs(2)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_hundred_kills_lose_nothing(tmp_path, kind, seed):
    """Ten for each, at any process; under masks in every stage of a sum."""
    haunt = KINDS[kind]
    with haunt.federation(tmp_path) as found:
        killed = Killer(found, seed, haunt).runs(10)
    assert len(killed) == 10
    assert {stage for _, stage, _ in killed} >= set(haunt.stages)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Four sites, one of which can be told to lie."""
    with federation(tmp_path_factory.mktemp("faults"), demo.NAMES, odd={"west": "lying"}) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("how", LIES)
def test_what_a_hostile_site_sends_is_not_used_and_the_site_is_named(made, how):
    made.lie(how)
    text = PLAIN + 'rounds = 2\non_party_error = "skip"\n'
    code, told = made.run(f"out-{how}", text, "--timeout", "60")
    assert (code, told["status"]) == (0, "done")
    assert told["absent"] in ({"0": ["west"], "1": ["west"]}, *([{"1": ["west"]}] if how == "replayed" else []))
    line = json.loads(made.server.run(f"out-{how}").progress.read_text().splitlines()[1])
    assert LIES[how] in line["refused"]["west"]
    assert made.is_same(f"out-{how}")


@pytest.mark.slow
def test_a_hostile_site_stops_a_run_that_leaves_nobody_out_and_it_goes_on_once_the_site_is_sound(made):
    made.lie("NaN")
    code, told = made.run("stop", PLAIN + "rounds = 2\n")
    assert (code, told["type"]) == (1, "DivergenceError")
    assert "'west'" in told["error"]
    made.lie(None)
    code, told = made.run("stop", PLAIN + "rounds = 2\n", "--resume")
    assert (code, told["absent"]) == (0, {})
    assert made.is_same("stop")


@pytest.mark.slow
def test_a_site_that_is_cut_off_for_a_while_is_waited_for(made):
    made.lie(None)
    made.begin("cut", PLAIN + "rounds = 4\n")
    made.wait(lambda: made.done("cut") >= 1)
    process = made.running.running["south"].pid
    os.kill(process, signal.SIGSTOP)
    time.sleep(8.0)
    os.kill(process, signal.SIGCONT)
    code, told = made.ended("cut")
    assert (code, told["absent"]) == (0, {})
    assert made.is_same("cut")
    assert made.charged("cut") == {name: [(index, 0) for index in range(4)] for name in demo.NAMES}


@pytest.mark.slow
@pytest.mark.parametrize(("size", "kind", "words"), [(60_000, "SiteRefused", "storage"), (0, "SiteLost", "failed")])
def test_a_full_disk_sends_nothing_and_the_run_goes_on_once_there_is_space(made, size, kind, words):
    """Where not even the line of the audit log can be written, no code can leave."""
    made.lie(None)
    run, process = f"full-{size}", made.running.running["east"].pid
    limit_files(process, size)
    try:
        code, told = made.run(run, PLAIN + "rounds = 2\n")
        assert (code, told["type"]) == (1, kind)
        assert words in told["error"]
        assert made.charged(run)["east"] in ([], [(0, 0)])
    finally:
        limit_files(process, None)
    code, told = made.run(run, PLAIN + "rounds = 2\n", "--resume")
    assert (code, told["status"], told["absent"]) == (0, "done", {})
    assert made.is_same(run)
    assert made.charged(run)["east"] == [(0, 0), (1, 0)]


@pytest.mark.slow
def test_a_site_that_was_not_admitted_is_told_so_and_starts_nothing(made):
    stranger = demo.site_of(made.folder, made.server, "stranger")
    made.server.admit(stranger.card())
    stranger.pin(made.server.roster())
    (made.server.path / "sites" / "stranger.toml").unlink()
    made.server.roster()
    demo.start_node(made.running, stranger)
    assert made.running.running.pop("stranger").wait(120) == 1
    assert "does not know the key" in (made.folder / "stranger.log").read_text()


def expired(server):
    """The server's certificate, made anew with a date that has passed."""
    authority = Pair(server.authority, (server.path / "ca.key").read_bytes())
    before, credentials.datetime = credentials.datetime, Yesterday
    try:
        made = credentials.new_server_certificate(authority, "127.0.0.1")
    finally:
        credentials.datetime = before
    (server.path / "server.crt").write_bytes(made.certificate)
    (server.path / "server.key").write_bytes(made.key)


class Yesterday:
    @staticmethod
    def now(zone):
        return datetime.now(UTC) - timedelta(days=credentials.SERVER_DAYS + 2)


class Impatient:
    """A TLS server with the federation's certificate, which says nothing."""

    def __init__(self, server):
        host, _, port = server.address.rpartition(":")
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(server.path / "server.crt", server.path / "server.key")
        self.socket = socket.create_server((host, int(port)))
        threading.Thread(target=self.answer, daemon=True).start()

    def answer(self):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            try:
                self.context.wrap_socket(connection, server_side=True).close()
            except (OSError, ssl.SSLError):
                connection.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def test_an_expired_certificate_is_named_at_the_server_at_sites_and_by_those_who_start_runs(tmp_path):
    from partsong.federation.flower import server_process as superlink
    from partsong.federation.flower.site_process import register

    server, sites = demo.set_up(tmp_path, SITES)
    expired(server)
    with pytest.raises(FileError, match=r"expired 2 days ago.*--renew"):
        superlink.serve(server)
    with Impatient(server):
        with pytest.raises(ServerError, match=r"expired.*Contact the coordinator"):
            register(sites["east"], lambda line: None).__enter__()
        with open_control(server) as control, pytest.raises(ServerError, match=r"expired.*--renew"):
            control.nodes()
    server.renewed()
    assert server.require_valid() > 300


def test_nobody_is_left_behind_is_seen(tmp_path):
    """The check itself: a process that names the folder in its words, its variables or its place is found."""
    named, place = str(tmp_path), {**os.environ, "PLACE": str(tmp_path)}
    with (
        processes.sleeping(named) as one,
        processes.sleeping(env=place) as other,
        processes.sleeping(cwd=tmp_path) as third,
    ):
        time.sleep(0.2)
        assert set(processes.naming(tmp_path)) == {one.pid, other.pid, third.pid}
    assert processes.left_behind(tmp_path) == {}
