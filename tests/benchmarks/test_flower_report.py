"""The report about processes and Flower: formulas of bytes are those of real messages, and slopes are slopes."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from benchmarks.flower import processes as federation_flower
from benchmarks.flower import report as flower_report
from benchmarks.flower.arms import COLUMNS, RANK
from benchmarks.flower.clock import Clock, layer_in, watch_server, watch_site
from benchmarks.flower.layer_report import verdict_of
from partsong.core.interfaces import Message
from partsong.federation.wire import Kind, Nonce, Reply, Request


def test_the_formula_of_a_plain_upload_is_that_of_a_message():
    arrays = {
        "cross": np.zeros((RANK, COLUMNS)),
        "gram": np.zeros((RANK, RANK)),
        "rows": np.zeros(()),
        "energy": np.zeros(()),
    }
    sent = Reply("site-01", Nonce("run-1", 7, 0, Kind.WORK), Message(arrays, 200.0), 8).to_bytes()
    assert len(sent) == pytest.approx(federation_flower.up_of(), rel=0.05)


def test_the_formula_of_a_request_is_that_of_a_message():
    names = [f"site-{number:02d}" for number in range(10)]
    note = {"participants": names, "counted": [6, 0]}
    asked = Request("site-01", Nonce("run-1", 7, 0, Kind.WORK), Message({"H": np.zeros((RANK, COLUMNS))}), note, 7)
    assert len(asked.to_bytes()) == pytest.approx(federation_flower.down_of(10), rel=0.05)


def test_slopes():
    slope, error = federation_flower.slope_of([3.0 + 0.5 * at for at in range(20)])
    assert (slope, error) == (pytest.approx(0.5), pytest.approx(0.0, abs=1e-12))


def test_a_report_says_how_far_off_bytes_are_and_how_rounds_compare_with_those_of_flower():
    about = {"command": "c", "processor": "p", "load": "l"}
    up, down = federation_flower.up_of(), federation_flower.down_of(3)
    long = {"sites": 3, "rounds": 9, "killed after": 3, "participants": [3] * 9, "seconds": [1.0] * 9, "up": 1.1 * up}
    long |= {"up by Flower": up, "down by Flower": down, "resident": [5.0] * 9}
    seconds = {"Flower alone": [4.0], "plain sums": [3.0]}
    overhead = {"sites": 3, "blocks": 1, "count": 1, "seconds": seconds, "masked up": None}
    text = flower_report.written({"long": long | about, "overhead": overhead | about})
    assert text.startswith(flower_report.HEADING)
    assert f"| up, in the audit logs | {1.1 * up:.0f} | {up} | +10.0 % |" in text
    assert "| plain sums | 3.0 (3.0–3.0) | -25 % |" in text


@pytest.mark.parametrize(
    ("added", "clock", "verdict"), [(0.1, 0.1, "met"), (0.3, 0.1, "NOT met"), (0.1, 0.3, "NOT met")]
)
def test_what_our_layer_costs_is_the_mean_of_pairs_and_what_its_own_clock_says(added, clock, verdict):
    echo = [1.5, 2.0, 2.5]
    part = {"command": "c", "processor": "p", "load": "l", "sites": 4, "rounds": 3, "sizes": [8, 9], "work": 0.01}
    part["ledger"] = 4e-5
    part |= {"objects": [[3, 3], [3, 3]], "server": {"fsync": clock / 2, "rest": 0.0, "together": clock / 2}}
    part |= {"site": {"fsync": clock / 2, "rest": 0.0, "together": clock / 2}}
    part["seconds"] = {"echo": echo, "work": echo, "ours": [one + added for one in echo]}
    text = flower_report.written({"layer": part})
    assert f"{50 * added:+.1f} ± 0.0 %" in text
    assert f"over bare rounds: {verdict}" in text
    assert f"{50 * clock:.1f} % by the layer's clock" in text
    assert "adds 40 ms for 1000 of them" in text
    with pytest.raises(ValueError, match="objects of Flower"):
        flower_report.written({"layer": part | {"objects": [[3, 3], [6, 6]]}})


def test_a_clock_counts_each_part_without_those_inside_it_and_this_thread_alone():
    clock, inner = Clock(), 0.02

    class Parts:
        @staticmethod
        def within() -> None:
            time.sleep(inner)

        def around(self) -> None:
            time.sleep(inner)
            self.within()

    clock.watch(Parts, "within", "inside")
    clock.watch(Parts, "around", "outside")
    Parts().around()
    assert clock.taken() == {}, "nobody was watching"
    began = time.perf_counter()
    with clock.watching():
        other = threading.Thread(target=Parts().around)
        other.start()
        Parts().around()
        other.join()
    whole, spent = time.perf_counter() - began, clock.taken()
    assert set(spent) == {"inside", "outside"}
    assert all(inner <= one for one in spent.values())
    assert sum(spent.values()) <= whole
    assert sum(layer_in(whole, spent | {"Flower": 0.0}).values()) == pytest.approx(whole)


def test_what_is_watched_is_there():
    class Names(Clock):
        def watch(self, owner, names, label):
            assert set(names.split()) <= vars(owner).keys(), owner

    watch_site(Names())
    watch_server(Names())


@pytest.mark.parametrize(
    ("share", "error", "by_clock", "verdict"),
    [
        (0.02, 0.03, 0.05, "met"),
        (0.07, 0.04, 0.05, "not decided"),
        (0.2, 0.04, 0.05, "NOT met"),
        (0, 0, 0.2, "NOT met"),
    ],
)
def test_rounds_that_differ_too_much_decide_nothing(share, error, by_clock, verdict):
    said = verdict_of(share, error, by_clock)
    assert said.endswith("by so few rounds") if verdict == "not decided" else said == verdict
