"""At the server: nobody outlives it, and what starts its apps is started again."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from partsong.flower_app import lifelines

DEAF = """
import threading
from partsong.flower_app.lifelines import end_with_the_server
end_with_the_server()
print("here", flush=True)
lock = threading.Lock()
lock.acquire()
lock.acquire()
"""


@pytest.fixture
def sleeper():
    made = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield made
    made.kill()
    made.wait()


@pytest.mark.skipif(os.name == "nt", reason="no signals of this kind")
def test_an_app_that_hears_nothing_ends_with_its_server(sleeper):
    environment = {**os.environ, lifelines.SERVER: str(sleeper.pid)}
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
    monkeypatch.delenv(lifelines.SERVER, raising=False)
    before = threading.active_count()
    lifelines.end_with_the_server()
    assert threading.active_count() == before


class Lifespan:
    """As Flower's: one process that takes up runs."""

    def __init__(self, sleeper):
        self.superexec_process, self.starts = sleeper, 0

    def start(self):
        self.starts += 1
        self.superexec_process = None


def test_what_starts_runs_is_started_again_when_it_has_died(sleeper, monkeypatch, capsys):
    monkeypatch.setattr(lifelines, "GLANCE", 0.01)
    lifespan = Lifespan(sleeper)
    keeping = threading.Thread(target=lifelines.keep, args=(lifespan, Lifespan.start))
    keeping.start()
    sleeper.kill()
    keeping.join(10)
    assert (keeping.is_alive(), lifespan.starts) == (False, 1)
    assert "started again" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["stopping", "shut down"])
def test_nothing_is_started_again_by_a_server_that_ends(sleeper, monkeypatch, how):
    monkeypatch.setattr(lifelines, "GLANCE", 0.01)
    lifespan = Lifespan(sleeper)
    if how == "stopping":
        monkeypatch.setattr(lifelines, "is_ending", lambda: True)
    keeping = threading.Thread(target=lifelines.keep, args=(lifespan, Lifespan.start))
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
