"""At the server: nobody outlives it, and what starts its apps is started again."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
from flower_processes import sleeping

from partsong.federation.flower import server_process

DEAF = """
import threading
from partsong.federation.flower.server_process import end_with_the_server
end_with_the_server()
print("here", flush=True)
lock = threading.Lock()
lock.acquire()
lock.acquire()
"""


@pytest.fixture
def sleeper():
    with sleeping() as made:
        yield made


@pytest.mark.skipif(os.name == "nt", reason="no signals of this kind")
def test_an_app_that_hears_nothing_ends_with_its_server(sleeper):
    environment = {**os.environ, server_process.SERVER: str(sleeper.pid)}
    app = subprocess.Popen([sys.executable, "-c", DEAF], env=environment, stdout=subprocess.PIPE)
    try:
        assert app.stdout.readline() == b"here\n"
        assert app.poll() is None
        sleeper.kill()
        sleeper.wait()
        assert app.wait(20) == 1
    finally:
        app.kill()
        app.stdout.close()
        app.wait()


def test_without_a_server_there_is_nothing_to_end_with(monkeypatch):
    monkeypatch.delenv(server_process.SERVER, raising=False)
    before = threading.active_count()
    server_process.end_with_the_server()
    assert threading.active_count() == before


class Lifespan:
    """As Flower's: one process that takes up runs."""

    def __init__(self, sleeper):
        self.superexec_process, self.starts = sleeper, 0

    def start(self):
        self.starts += 1
        self.superexec_process = None


def test_what_starts_runs_is_started_again_when_it_has_died(sleeper, monkeypatch, capsys):
    monkeypatch.setattr(server_process, "RESTART_GLANCE", 0.01)
    lifespan = Lifespan(sleeper)
    keeping = threading.Thread(target=server_process.keep, args=(lifespan, Lifespan.start, server_process.Executor()))
    keeping.start()
    sleeper.kill()
    keeping.join(10)
    assert (keeping.is_alive(), lifespan.starts) == (False, 1)
    assert "started again" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["stopping", "shut down"])
def test_nothing_is_started_again_by_a_server_that_ends(sleeper, monkeypatch, how):
    monkeypatch.setattr(server_process, "RESTART_GLANCE", 0.01)
    lifespan = Lifespan(sleeper)
    if how == "stopping":
        monkeypatch.setattr(server_process, "is_ending", lambda: True)
    keeping = threading.Thread(target=server_process.keep, args=(lifespan, Lifespan.start, server_process.Executor()))
    if how == "shut down":
        wait = sleeper.wait

        def shut_down():
            wait()
            lifespan.superexec_process = None

        monkeypatch.setattr(sleeper, "wait", shut_down)
    keeping.start()
    sleeper.kill()
    keeping.join(10)
    assert (keeping.is_alive(), lifespan.starts) == (False, 0)


class Dying(Lifespan):
    """Its process ends at once, whenever it is started."""

    def start(self):
        self.starts += 1
        self.superexec_process = subprocess.Popen([sys.executable, "-S", "-c", ""])


def test_what_dies_whenever_it_is_started_ends_the_server(sleeper, monkeypatch, capsys):
    monkeypatch.setattr(server_process, "RESTART_GLANCE", 0.001)
    ended = []
    monkeypatch.setattr(server_process, "end_server", lambda: ended.append(True))
    sleeper.kill()
    lifespan, seen = Dying(sleeper), server_process.Executor()
    server_process.keep(lifespan, Dying.start, seen)
    assert (lifespan.starts, seen.has_failed, ended) == (server_process.DEATHS, True, [True])
    assert f"died {server_process.DEATHS + 1} times in a row" in seen.told
    assert capsys.readouterr().err.count("started again") == server_process.DEATHS
