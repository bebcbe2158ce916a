"""How a node ends, what it works with until then, and what is said where no server answers; without a server."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

import httpx

from partsong.federation.commands.demo import site_of
from partsong.federation.flower import control, site_process
from partsong.federation.flower.control import ServerControl, ServerError
from partsong.federation.setup.server_folder import ServerFolder
from partsong.federation.transports.base import InProcess
from partsong.federation.wire import Kind, Nonce, Reply, Request

NODE = """
import contextlib, sys, time
from pathlib import Path
from partsong.federation.commands import site as federation_site
from partsong.federation.flower import site_process
from partsong.federation.setup.site_folder import SiteFolder

class Node:
    def answer_next(self, answer):
        print("ready", flush=True)
        time.sleep(60)

@contextlib.contextmanager
def register(site, tell):
    try:
        yield Node()
    finally:
        time.sleep(float(sys.argv[1]))

site_process.register = register
SiteFolder.answering = lambda site: None
federation_site._start(SiteFolder(Path(sys.argv[2]), "liver", "north", "a.b:1", ""), None)
"""


@pytest.mark.parametrize(("seconds", "number"), [(0, signal.SIGINT), (30, signal.SIGTERM)])
def test_a_node_says_that_it_has_stopped_and_does_not_wait_for_a_server_that_hangs(tmp_path, seconds, number):
    words = [sys.executable, "-c", NODE, str(seconds), str(tmp_path)]
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


class Away:
    """A server's answers to calls, one after another."""

    def __init__(self, *answers):
        self.answers, self.said = list(answers), []

    def __call__(self):
        found = self.answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


def refusal(code):
    request = httpx.Request("POST", "https://127.0.0.1/v1/fleet/pull-messages")
    return httpx.HTTPStatusError("refused", request=request, response=httpx.Response(code, request=request))


def test_a_server_that_is_away_is_waited_for_and_told_of_once(monkeypatch):
    monkeypatch.setattr(site_process, "PAUSE", 0.0)
    said = []
    patience = site_process.RetryInvoker(SimpleNamespace(address="a.b:1"), said.append)
    assert patience.invoke(Away(httpx.ConnectError("gone"), httpx.ReadError("gone"), "done")) == "done"
    assert said == ["No server answers at a.b:1 yet. Waiting for it."]
    with pytest.raises(httpx.HTTPStatusError):
        patience.invoke(Away(refusal(403)))
    patience.is_over.set()
    with pytest.raises(httpx.ConnectError):
        patience.invoke(Away(httpx.ConnectError("gone")))


def test_a_request_that_the_server_does_not_know_any_more_is_dropped_and_a_node_that_it_does_not_know_ends(monkeypatch):
    monkeypatch.setattr(site_process, "PAUSE", 0.0)
    answers, said = Away(refusal(403), ValueError("half a message"), refusal(401)), []
    client = SimpleNamespace(PullMessages=lambda request: answers())
    site = SimpleNamespace(address="a.b:1", path=Path("site"))
    node = site_process.SiteNode(site, client, 7, said.append)
    for _ in range(2):
        node.answer_next(lambda data: data)
    assert len(said) == 2
    with pytest.raises(ServerError, match="does not know the key"):
        node.answer_next(lambda data: data)


def test_a_node_over_flower_answers_with_what_it_was_started_with(tmp_path):
    server = ServerFolder.made(tmp_path / "server", "demo", "127.0.0.1:1")
    site = site_of(tmp_path, server, "east")
    server.admit(site.card())
    site.pin(server.roster())
    request, joined = Request("east", Nonce("r", kind=Kind.FINISH)).to_bytes(), site.path / "joined.toml"

    answer = site.answering()

    def answered():
        replies = server.signed(InProcess({"east": answer})).ask({"east": request}, 1.0)
        return Reply.from_bytes(replies["east"]).answer.code

    assert answered() == "not-started"
    joined.write_text(joined.read_text().replace("east.npy", "other.npy"))
    assert answered() == "settings"


def test_where_no_server_answers_the_command_that_starts_it_is_told(monkeypatch):
    def unanswered():
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(control, "PAUSE", 0.0)
    with pytest.raises(ServerError, match=r"--resume.*: partsong federation serve --folder 'my liver'$"):
        ServerControl(None, "127.0.0.1:1", Path("my liver"))._with_retries(unanswered)
