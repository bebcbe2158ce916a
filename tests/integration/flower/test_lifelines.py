"""At the server: nobody outlives it, and it does not outlive what starts its apps."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")
from partsong.federation.flower.control import SERVER_PID
from partsong.federation.flower.server_process import _end_with_executor
from tests.integration.flower.flower_processes import sleeping

DEAF = """
import threading
from partsong.federation.flower.server_app import exit_with_server
exit_with_server()
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
    environment = {**os.environ, SERVER_PID: str(sleeper.pid)}
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


@pytest.mark.parametrize("is_ending", [False, True])
def test_a_server_ends_when_what_starts_runs_has_died(sleeper, is_ending):
    flower = SimpleNamespace(state=SimpleNamespace(superlink_lifespan=SimpleNamespace(superexec_process=sleeper)))
    web, ended = SimpleNamespace(should_exit=is_ending), threading.Event()
    sleeper.kill()
    sleeper.wait()
    _end_with_executor(flower, web, ended)
    assert (web.should_exit, ended.is_set()) == (True, not is_ending)
