"""What left a site is written down, without values, and cannot be changed unseen."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partsong.errors import FormatError
from partsong.federation.audit_log import row_of
from partsong.federation.chain import Chain
from partsong.federation.experiment import Experiment
from partsong.federation.policy import Policy, PrivacyBudget
from tests.federation.federations import COLUMNS, Federation, noisy_plan, rows_of
from tests.federation.test_site import recorded


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    path = tmp_path_factory.mktemp("chain") / "chain.jsonl"
    for number in range(6):
        Chain(path).append({"what": number})
    return path.read_bytes().splitlines(keepends=True)


def written(tmp_path, lines):
    path = tmp_path / "chain.jsonl"
    path.write_bytes(b"".join(lines))
    return Chain(path)


def test_every_message_out_is_in_the_log_with_its_hash(tmp_path):
    federation = Federation(tmp_path, Experiment("exact", 3, 1, secure_aggregation=True))
    asked = recorded(federation)
    log = list(Chain(federation.site("east").audit.path).lines())
    payloads = [reply for name, _, reply in asked if name == "east"]
    assert [line["sha256"] for line in log] == [hashlib.sha256(one).hexdigest() for one in payloads]
    assert [line["bytes"] for line in log] == [len(one) for one in payloads]
    upload = next(line for line in log if line["phase"] == 2)
    assert [one["name"] for one in upload["arrays"]] == ["about", "body", "signature"]


def test_the_log_has_no_values_and_no_names_of_columns(tmp_path):
    federation = Federation(tmp_path, Experiment("fedavg", 3, 1))
    list(federation.rounds())
    text = federation.site("east").audit.path.read_text()
    assert not any(name in text for name in COLUMNS)
    assert not any(repr(float(value)) in text for value in rows_of("east").ravel())
    [shown] = [
        "  ".join(row_of(line)) for line in Chain(federation.site("east").audit.path).lines() if line["kind"] == "work"
    ]
    assert "H 3×12" in shown


def test_the_log_tells_clip_and_spending(tmp_path):
    policy = Policy(privacy=PrivacyBudget(20.0, unit="party", insecure_noise=True))
    experiment = Experiment("fedavg", 3, 2, local_steps=1, privacy={"unit": "party", "epsilon": 8.0, "clip": 0.5})
    federation = Federation(tmp_path, experiment, policy=policy, build=noisy_plan)
    list(federation.rounds())
    works = [line for line in Chain(federation.site("east").audit.path).lines() if line["kind"] == "work"]
    assert [line["clip"] for line in works] == [0.5, 0.5]
    assert 0 < works[0]["epsilon"] < works[1]["epsilon"] == pytest.approx(8.0, rel=1e-6)
    assert all(line["arrays"][0]["norm"] > 0 for line in works)


def test_a_sound_file_has_a_head_to_note_elsewhere(tmp_path, lines):
    assert written(tmp_path, lines).head() == (6, json.loads(lines[-1])["hash"])


@pytest.mark.parametrize("place", range(6))
def test_a_line_that_was_edited_is_found(tmp_path, lines, place):
    edited = [*lines]
    edited[place] = edited[place].replace(b'"what": ', b'"what": 1')
    with pytest.raises(FormatError, match=f"line {place + 1}"):
        written(tmp_path, edited).head()


@pytest.mark.parametrize("place", range(5))
def test_a_line_that_was_taken_out_or_moved_is_found(tmp_path, lines, place):
    with pytest.raises(FormatError):
        written(tmp_path, lines[:place] + lines[place + 1 :]).head()
    with pytest.raises(FormatError):
        written(tmp_path, [*lines[:place], lines[place + 1], lines[place], *lines[place + 2 :]]).head()


def test_lines_cut_off_at_the_end_change_the_head(tmp_path, lines):
    assert written(tmp_path, lines[:4]).head() != written(tmp_path, lines).head()


@pytest.mark.parametrize("size", [1, 20, 100])
def test_a_torn_last_line_was_never_acted_on_and_is_taken_away(tmp_path, lines, size):
    chain = written(tmp_path, [*lines[:5], lines[5][:size]])
    assert chain.head()[0] == 5
    chain.append({"what": "next"})
    assert chain.head()[0] == 6


def test_nothing_is_added_after_an_edited_last_line(tmp_path, lines):
    with pytest.raises(FormatError, match="last line"):
        written(tmp_path, [*lines[:5], lines[5].replace(b'"what": 5', b'"what": 6')]).append({})


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_flipped_bit_is_found(tmp_path_factory, lines, data):
    content = bytearray(b"".join(lines))
    place = data.draw(st.integers(0, len(content) - 2))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path_factory.mktemp("flipped") / "chain.jsonl"
    path.write_bytes(bytes(content))
    with pytest.raises(FormatError):
        Chain(path).head()
