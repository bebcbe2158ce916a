"""The report about processes and Flower: formulas of bytes are those of real messages, and slopes are slopes."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import federation_flower, flower_report
from benchmarks.flower_arms import COLUMNS, RANK
from partsong.core import Message
from partsong.federation.wire import Kind, Nonce, Reply, Request


def test_the_formula_of_a_plain_upload_is_that_of_a_message():
    arrays = {"cross": np.zeros((RANK, COLUMNS)), "gram": np.zeros((RANK, RANK)), "totals": np.zeros(3)}
    sent = Reply("site-01", Nonce("run-1", 7, 0, Kind.WORK), Message(arrays, 200.0), 8).written()
    assert len(sent) == pytest.approx(federation_flower.up_of(), rel=0.05)


def test_the_formula_of_a_request_is_that_of_a_message():
    names = [f"site-{number:02d}" for number in range(10)]
    note = {"participants": names, "counted": [6, 0]}
    asked = Request("site-01", Nonce("run-1", 7, 0, Kind.WORK), Message({"H": np.zeros((RANK, COLUMNS))}), note, 7)
    assert len(asked.written()) == pytest.approx(federation_flower.down_of(10), rel=0.05)


def test_slopes():
    slope, error = federation_flower.slope_of([3.0 + 0.5 * at for at in range(20)])
    assert (slope, error) == (pytest.approx(0.5), pytest.approx(0.0, abs=1e-12))


def test_a_report_says_how_far_off_bytes_are_and_what_our_layer_costs():
    about = {"command": "c", "processor": "p", "load": "l"}
    seconds = {"Flower alone": [4.0], "our processes, Flower's messages": [2.0], "plain sums": [3.0]}
    up, down = federation_flower.up_of(), federation_flower.down_of(3)
    long = {"sites": 3, "rounds": 9, "killed after": 3, "participants": [3] * 9, "seconds": [1.0] * 9, "up": 1.1 * up}
    long |= {"up by Flower": up, "down by Flower": down, "resident": [5.0] * 9}
    overhead = {"sites": 3, "blocks": 1, "count": 1, "seconds": seconds, "masked up": None}
    text = flower_report.written({"long": long | about, "overhead": overhead | about})
    assert text.startswith(flower_report.HEADING)
    assert f"| up, in the audit logs | {1.1 * up:.0f} | {up} | +10.0 % |" in text
    assert "| plain sums | 3.0 (3.0–3.0) | -25 % | +50 % |" in text
