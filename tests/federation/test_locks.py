"""Locks of servers, nodes and runs: who looks takes nothing, and who is named is who holds it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from partsong.errors import FileError
from partsong.federation.locks import held, holder_of, is_held, locked

fcntl = pytest.importorskip("fcntl")

TAKES = """
import fcntl, sys
file = open(sys.argv[1], "r+")
try:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    print("refused", flush=True)
else:
    print("taken", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path):
    """A lock whose last holder has left the number of a process that lives."""
    path = tmp_path / "lock"
    path.write_text(str(os.getpid()))
    return path


@pytest.fixture
def taker(place):
    """Another process that tries to take the lock; it is gone in the end."""
    made = []

    def start():
        words = [sys.executable, "-S", "-c", TAKES, str(place)]
        made.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return made[-1], made[-1].stdout.readline().strip()

    yield start
    for process in made:
        process.kill()
        process.communicate()


def test_the_holder_is_who_holds_it_and_not_who_has_left_a_number(place, taker):
    assert (is_held(place), holder_of(place)) == (False, None)
    other, said = taker()
    assert (said, is_held(place), holder_of(place)) == ("taken", True, other.pid)
    with pytest.raises(FileError, match=rf"Taken \(process {other.pid}\)"), held(place, "Taken"):
        pass
    other.kill()
    other.wait()
    assert (is_held(place), holder_of(place)) == (False, None)


def test_who_looks_takes_nothing(place, monkeypatch):
    def taken(*arguments):
        raise AssertionError("taken in order to look")

    monkeypatch.setattr(fcntl, "lockf", taken)
    monkeypatch.setattr(fcntl, "flock", taken)
    before = place.stat()
    place.chmod(0o400)
    assert not is_held(place)
    assert holder_of(place) is None
    assert (place.stat().st_mtime_ns, place.stat().st_size) == (before.st_mtime_ns, before.st_size)


def test_a_process_that_looks_at_its_own_lock_keeps_it(place, taker):
    with held(place, "Taken"):
        assert (is_held(place), holder_of(place)) == (True, os.getpid())
        with pytest.raises(FileError, match=rf"process {os.getpid()}"), held(place, "Taken"):
            pass
        assert taker()[1] == "refused"
    assert taker()[1] == "taken"


def test_a_file_that_cannot_be_opened_is_told_in_words(tmp_path):
    (tmp_path / "lock").mkdir()
    for lock in (held(tmp_path / "lock", "Taken"), locked(tmp_path / "lock", waits=True)):
        with pytest.raises(FileError, match=r"lock cannot be opened and locked: Is a directory\. Use a folder"), lock:
            pass


def test_a_disk_without_locks_is_told_in_words(tmp_path, monkeypatch):
    def refused(*arguments):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refused)
    monkeypatch.setattr(fcntl, "flock", refused)
    for lock in (held(tmp_path / "lock", "Taken"), locked(tmp_path / "lock", waits=False)):
        with pytest.raises(FileError, match=r"No locks available.*on a file system with locks"), lock:
            pass


def test_who_does_not_wait_is_told_that_the_folder_is_in_use(tmp_path):
    taken = pytest.raises(FileError, match="is in use by another process")
    with locked(tmp_path / "lock", waits=True), taken, locked(tmp_path / "lock", waits=False):
        pass
    with locked(tmp_path / "lock", waits=False):
        pass
