"""How a node ends, what it works with until then, and what is said where no server answers; without a server."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import httpx

from partsong.federation.commands.demo import site_of
from partsong.federation.flower import client_app, control, site_process
from partsong.federation.flower.control import Control, ServerError
from partsong.federation.setup.server_folder import ServerFolder
from partsong.federation.transports.base import InProcess
from partsong.federation.wire import Kind, Nonce, Reply, Request

NODE = """
import sys, time
from flwr.supercore.exit import add_exit_handler
from flwr.supernode import start_client_internal as node
from flwr.supercore.telemetry import EventType
from partsong.federation.commands import site as federation_site
from partsong.federation.setup.site_folder import SiteFolder
from partsong.federation.flower import site_process as leaving, site_process as supernode

def flower(site):
    def work():
        node.register_signal_handlers(EventType.RUN_SUPERNODE_LEAVE, exit_message="bye")
        add_exit_handler(lambda: time.sleep(float(sys.argv[1])))
        print("ready", flush=True)
        time.sleep(60)
    leaving.leave_soon()
    leaving.run_to_a_signal(work)

supernode.join = flower
federation_site._start(SiteFolder("", "liver", "north", "a.b:1", ""), None)
"""


@pytest.mark.parametrize(("seconds", "number"), [(0, signal.SIGINT), (30, signal.SIGTERM)])
def test_a_node_says_that_it_has_stopped_and_does_not_wait_for_a_server_that_hangs(seconds, number):
    words = [sys.executable, "-c", NODE, str(seconds)]
    node = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert node.stdout.readline() == "ready\n"
        began = time.monotonic()
        node.send_signal(number)
        said = node.communicate(timeout=20)[1]
        assert time.monotonic() - began < site_process.PATIENCE + 2
        assert node.returncode == 0
        assert said.splitlines()[-1] == site_process.STOPPED
    finally:
        node.kill()
        node.wait()


def test_an_error_of_flower_s_node_stays_one():
    def failing():
        sys.exit(1)

    with pytest.raises(SystemExit):
        site_process.run_to_a_signal(failing)


def test_a_node_over_flower_answers_with_what_it_was_started_with(tmp_path):
    server = ServerFolder.made(tmp_path / "server", "demo", "127.0.0.1:1")
    site = site_of(tmp_path, server, "east")
    server.admit(site.card())
    site.pin(server.roster())
    request, joined = Request("east", Nonce("r", kind=Kind.FINISH)).written(), site.path / "joined.toml"

    def answered():
        replies = server.signed(InProcess({"east": client_app.party_in(site.path)})).ask({"east": request}, 1.0)
        return Reply.read(replies["east"]).answer.code

    assert answered() == "not-started"
    joined.write_text(joined.read_text().replace("east.npy", "other.npy"))
    assert answered() == "settings"


def test_where_no_server_answers_the_command_that_starts_it_is_told(monkeypatch):
    def unanswered():
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(control, "PAUSE", 0.0)
    with pytest.raises(ServerError, match=r"--resume.*: partsong federation serve --folder 'my liver'$"):
        Control(None, "127.0.0.1:1", Path("my liver"))._tried(unanswered)
