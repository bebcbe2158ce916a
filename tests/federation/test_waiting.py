"""Whom a run waits for is told after some seconds, and then ever more seldom; what is heard is the same."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from partsong.federation.server import progress
from partsong.federation.server.progress import Lines, Telling, append_line
from partsong.federation.transports.base import Lost, all_replies
from tests.federation.federations import NAMES


class Slow:
    """Sites that answer after some seconds of a clock of its own; who has none is away."""

    def __init__(self, clock, after):
        self.clock, self.after, self.out = clock, after, {}

    def names(self):
        return NAMES

    def ask(self, requests, timeout):
        return all_replies(self, requests, timeout)

    def push(self, requests, timeout):
        self.out |= {name: self.clock() + self.after.get(name, 1e9) for name in requests}

    def arrived(self, timeout):
        if not self.out:
            return None
        name = min(self.out, key=self.out.get)
        if self.out[name] > self.clock() + timeout:
            self.clock.now += timeout
            return None
        self.clock.now = max(self.clock.now, self.out.pop(name))
        return name, name.encode()

    def recall(self):
        left = dict.fromkeys(self.out, Lost("away"))
        self.out.clear()
        return left


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def test_who_has_not_answered_is_told_now_and_then(clock):
    told = []
    transport = Telling(Slow(clock, {"east": 1.0, "south": 12.0}), lambda line: told.append((clock(), line)))
    replies = transport.ask(dict.fromkeys(NAMES, b"?"), 600.0)
    assert replies == {"east": b"east", "south": b"south", "north": Lost("away"), "west": Lost("away")}
    assert clock() == 700.0
    assert told[0] == (100.0, {"waiting": [*NAMES], "answered": 0, "of": 4}), "a run that has begun says so"
    assert told[1] == (105.0, {"waiting": ["north", "south", "west"], "answered": 1, "of": 4})
    assert told[2] == (115.0, {"waiting": ["north", "west"], "answered": 2, "of": 4})
    pauses = [later - before for (before, _), (later, _) in pairwise(told)]
    assert pauses == [5.0, 10.0, 20.0, 40.0, 80.0] + [progress.SELDOM] * 3


def test_who_answers_at_once_is_not_told_of_and_arrivals_have_no_number(clock):
    told = []
    transport = Telling(Slow(clock, {"east": 1.0}), told.append)
    assert transport.ask({"east": b"?"}, 600.0) == {"east": b"east"}
    told.clear()
    assert transport.ask({"east": b"?"}, 600.0) == {"east": b"east"}
    assert told == []
    transport.push({"north": b"?"}, 600.0)
    assert transport.arrived(6.0) is None
    assert told == [{"waiting": ["north"]}]
    assert transport.recall() == {"north": Lost("away")}
    assert transport.arrived(6.0) is None
    assert len(told) == 1


def test_a_part_of_a_line_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "waiting.jsonl"
    for part in ('{"wai', '{"waiting": ["east"]}\n{"wai'):
        path.write_text(part)
        append_line(path, {"waiting": ["west"]})
        assert list(Lines(path).new())[-1] == {"waiting": ["west"]}
