"""Following a run: one that was stopped leaves no process, one that is worked on is not begun twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from partsong.errors import SiteLost
from partsong.federation.commands.server import _run_to_end, format_progress
from partsong.federation.commands.status import _describe_run
from partsong.federation.flower import control as following
from partsong.federation.flower.control import FlowerRunStatus, ServerError
from partsong.federation.locks import holder_of
from partsong.federation.setup.server_folder import RunPlace, forget_failure
from partsong.io.write import write_text

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and locks")

WORK = """
import signal, sys, time
from pathlib import Path
from partsong.federation.locks import held
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with held(Path(sys.argv[1]), ""):
    time.sleep(60)
"""


class Control:
    """Flower's answers, one after another; the last one stays."""

    def __init__(self, *statuses):
        self.statuses, self.started, self.stopped = list(statuses), [], []

    def start(self, name):
        self.started.append(name)
        return 10 + len(self.started)

    def status(self, number):
        return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]

    def stop(self, number):
        self.stopped.append(number)
        return True


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(following, "POLL", 0.01)
    monkeypatch.setattr(following, "GRACE", 0.5)
    return RunPlace(tmp_path)


@pytest.fixture
def worker(place):
    """Starts a process that works on the run; it is gone in the end."""
    made = []

    def start(kind="mild"):
        made.append(subprocess.Popen([sys.executable, "-c", WORK, str(place.lock), kind]))
        until = time.monotonic() + 30
        while holder_of(place.lock) != made[-1].pid and time.monotonic() < until:
            time.sleep(0.02)
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.wait()


def follow(place, control, monkeypatch, told=None):
    @contextmanager
    def controlling(server):
        yield control

    monkeypatch.setattr(following, "open_control", controlling)
    told = [] if told is None else told
    try:
        return following.run_to_end(None, place, told.append), told
    finally:
        assert holder_of(place.lock) is None


def test_a_run_that_was_stopped_is_not_started_again(place, monkeypatch):
    control = Control(FlowerRunStatus("running"), FlowerRunStatus("finished", "stopped"))
    with pytest.raises(ServerError, match="was stopped"):
        follow(place, control, monkeypatch)
    assert control.started == [place.name]


def test_a_run_that_ends_without_a_word_is_started_again(place, monkeypatch):
    control, told = Control(FlowerRunStatus("finished", "failed", "why")), []
    with pytest.raises(ServerError, match=r"without a result \(why\)"):
        follow(place, control, monkeypatch, told)
    assert len(control.started) == following.MAX_STARTS
    assert told == [{"starting": place.name}], "once, however often it is started"


def test_that_a_run_is_started_is_told_before_its_process_is_up(place, monkeypatch):
    told = []

    class Slow(Control):
        def start(self, name):
            assert told == [{"starting": place.name}]
            place.result.write_text('{"status": "done"}')
            return super().start(name)

    control = Slow(FlowerRunStatus("finished", "completed"))
    follow(place, control, monkeypatch, told)
    assert len(control.started) == len(told) == 1
    assert format_progress(told[0]).startswith(f"starting the server process of run {place.name!r}")


@pytest.mark.parametrize("kind", ["mild", "stubborn"])
def test_a_run_that_is_worked_on_is_followed_and_its_process_does_not_outlive_a_stop(place, worker, monkeypatch, kind):
    place.number.write_text("7")
    process = worker(kind)
    control = Control(FlowerRunStatus("running"), FlowerRunStatus("running"), FlowerRunStatus("finished", "stopped"))
    told = []
    with pytest.raises(ServerError, match="was stopped"):
        follow(place, control, monkeypatch, told)
    assert control.started == told == []
    assert process.wait(5) != 0


def test_what_is_left_of_a_run_that_is_over_is_ended_before_it_is_started_again(place, worker, monkeypatch):
    place.number.write_text("7")
    process = worker()
    control = Control(FlowerRunStatus("finished", "failed"))
    with pytest.raises(ServerError):
        follow(place, control, monkeypatch)
    assert len(control.started) == following.MAX_STARTS
    assert process.wait(5) != 0


def test_the_result_of_a_run_that_is_done_stays_until_there_is_another(place, monkeypatch):
    """The server is down, or the run ends without a word: what was known of it before is still known."""

    class Down(Control):
        def start(self, name):
            raise ServerError("No server answers")

    place.result.write_text('{"status": "done", "rounds": 3}')
    with pytest.raises(ServerError, match="No server answers"):
        follow(place, Down(FlowerRunStatus("unknown")), monkeypatch)
    with pytest.raises(ServerError, match="without a result"):
        follow(place, Control(FlowerRunStatus("finished", "failed")), monkeypatch)
    assert place.result.read_text() == '{"status": "done", "rounds": 3}'


FAILED = '{"status": "failed", "type": "SiteLost", "error": "east", "notes": []}'


def test_how_a_run_has_failed_is_told_until_it_is_started_again(place, monkeypatch):
    """Killed after that without a word, it was broken off, and says how it goes on."""

    class Down(Control):
        def start(self, name):
            raise ServerError("No server answers")

    place.result.write_text(FAILED)
    with pytest.raises(ServerError, match="No server answers"):
        follow(place, Down(FlowerRunStatus("unknown")), monkeypatch)
    assert _describe_run(place)["status"] == "failed"

    class Killed(Control):
        def start(self, name):
            forget_failure(place)  # as the process that works on a run does first
            return super().start(name)

    with pytest.raises(ServerError, match="without a result"):
        follow(place, Killed(FlowerRunStatus("finished", "failed")), monkeypatch)
    told = _describe_run(place)
    assert told["status"] == "interrupted"
    assert told["resume"].endswith("--resume")
    assert [path.name for path in place.folder.iterdir()] == [place.number.name]


def test_a_failure_that_has_come_since_the_start_is_kept(place, monkeypatch):
    class Failing(Control):
        def start(self, name):
            write_text(place.result, FAILED.replace("east", "north"))
            return super().start(name)

    place.result.write_text(FAILED)
    with pytest.raises(SiteLost, match="north"):
        follow(place, Failing(FlowerRunStatus("finished", "completed")), monkeypatch)
    assert "north" in place.result.read_text()


@pytest.mark.parametrize("before", ["failed", "done"])
def test_over_files_too_what_has_failed_goes_once_it_is_worked_on(place, monkeypatch, before):
    file_drop = pytest.importorskip("partsong.federation.transports.files", exc_type=ImportError)

    def killed(*places):
        assert holder_of(place.lock) == os.getpid()
        raise KeyboardInterrupt

    monkeypatch.setattr(file_drop, "request_transport", killed)
    place.result.write_text(FAILED.replace("failed", before))
    with pytest.raises(KeyboardInterrupt):
        _run_to_end(None, place, place.folder / "drop", lambda line: None)
    assert _describe_run(place)["status"] == ("done" if before == "done" else "interrupted")


def test_steps_exchanges_and_whom_a_run_waits_for_are_told_from_its_files(place, monkeypatch):
    class Ending(Control):
        def start(self, name):
            (place.state / "words").mkdir(parents=True, exist_ok=True)
            for path, line in (("waiting.jsonl", '{"waiting": ["east"]}'), ("words/steps.jsonl", '{"step": 1}')):
                with (place.state / path).open("a") as file:
                    file.write(f"{line}\n")
            place.progress.write_text('{"round": 1}\n')
            place.result.write_text('{"status": "done"}')
            return super().start(name)

    _, told = follow(place, Ending(FlowerRunStatus("finished", "completed")), monkeypatch)
    assert told == [{"starting": place.name}, {"step": 1}, {"round": 1}, {"waiting": ["east"]}]
    place.result.unlink()
    _, told = follow(place, Ending(FlowerRunStatus("finished", "completed")), monkeypatch)
    assert told[1:] == [{"step": 1}, {"waiting": ["east"]}], "what was there before is not told again"


def test_the_result_and_the_error_of_a_run_are_told(place, monkeypatch):
    def ending(content):
        class Ending(Control):
            def start(self, name):
                place.result.write_text(json.dumps(content))
                place.progress.write_text('{"round": 1}\n{"rou')
                return super().start(name)

        place.progress.unlink(missing_ok=True)
        return follow(place, Ending(FlowerRunStatus("finished", "completed")), monkeypatch)

    result, told = ending({"status": "done", "rounds": 1})
    assert (result, told[1:]) == ({"status": "done", "rounds": 1}, [{"round": 1}])
    with pytest.raises(SiteLost, match="east") as caught:
        ending({"status": "failed", "type": "SiteLost", "error": "east", "notes": ["resume"]})
    assert caught.value.__notes__ == ["resume"]
