"""`partsong audit`: whatever is done to a log is found, what has left is shown, and no value of the data is in it."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partsong.core.interfaces import Message
from partsong.errors import BrokenChain
from partsong.federation.audit_log import AuditLog, verify_log
from partsong.federation.ledger import SiteLedger
from partsong.federation.wire import Kind, Nonce, Refusal, Reply

SPENT = {"clip": 0.5, "noise_multiplier": 2.0, "epsilon": 1.25}
NOTHING = {"clip": None, "noise_multiplier": None, "epsilon": None}


def replies():
    """Two runs: a hello, two rounds of which one was sent twice, and a refusal."""
    H = Message({"H": np.arange(12.0).reshape(3, 4), "totals": np.ones(3)})
    yield Reply("north", Nonce("liver-1"), Message({"columns": np.zeros((4, 16), np.uint8)})), False, NOTHING
    yield Reply("north", Nonce("liver-1", 0, 0, Kind.WORK), H), False, SPENT
    yield Reply("north", Nonce("liver-1", 0, 0, Kind.WORK), H), True, SPENT
    yield Reply("north", Nonce("liver-1", 1, 2, Kind.WORK), H), False, {**SPENT, "epsilon": 2.5}
    yield Reply("north", Nonce("liver-2", 0, 0, Kind.REDUCE, 1), Refusal("masks")), False, NOTHING


def write_log(folder):
    (folder / "state").mkdir(parents=True)
    for reply, again, protection in replies():
        AuditLog(folder / "state" / "audit.jsonl").record(
            reply, reply.to_bytes(), is_repeat=again, protection=protection
        )
    return folder / "state" / "audit.jsonl"


@pytest.fixture
def log(tmp_path):
    return write_log(tmp_path / "site-north")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The lines of a sound log, and a place for one that is not."""
    folder = tmp_path_factory.mktemp("audit")
    return write_log(folder / "site-north").read_bytes().splitlines(keepends=True), folder / "audit.jsonl"


def verdict(path, content, noted=None):
    """What the command tells of a file with this content."""
    path.write_bytes(content)
    try:
        return {"is_sound": True, **asdict(verify_log(path, noted))}
    except BrokenChain as error:
        return {"is_sound": False, "first_bad_line": error.line}


def test_a_sound_log_is_told_with_its_ends(told, log):
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for place in ("site-north", "site-north/state", log):
        said = told("audit", "verify", place)
        assert (said["is_sound"], said["lines"], said["unfinished"]) == (True, 5, 0)
        assert (said["first"], said["last"]) == (lines[0]["time"], lines[-1]["time"])
        assert said["head"] == lines[-1]["hash"]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_byte_that_was_edited_is_found(sound, data):
    lines, path = sound
    content = bytearray(b"".join(lines))
    place = data.draw(st.integers(0, len(content) - 1))
    byte = data.draw(
        st.sampled_from([b" ", b"\t", b"\n", b"0", b"1", b'"', b"\xff"]) | st.binary(min_size=1, max_size=1)
    )
    content[place : place + 1] = byte
    if bytes(content) == b"".join(lines):
        return
    said = verdict(path, bytes(content))
    assert not said["is_sound"]
    assert 1 <= said["first_bad_line"] <= content[:place].count(b"\n") + 1


def test_an_edited_end_of_the_last_line_is_found(sound):
    lines, path = sound
    accepted = [byte for byte in range(256) if verdict(path, b"".join(lines)[:-1] + bytes([byte]))["is_sound"]]
    assert bytes(accepted) == b"\n"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_byte_that_was_put_in_or_taken_out_is_found(sound, data):
    lines, path = sound
    content = b"".join(lines)
    place = data.draw(st.integers(0, len(content) - 2))
    is_in = data.draw(st.booleans())
    changed = content[:place] + b" " + content[place:] if is_in else content[:place] + content[place + 1 :]
    assert not verdict(path, changed)["is_sound"]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_lines_that_were_taken_out_or_swapped_are_found(sound, data):
    lines, path = sound
    order = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    is_beginning = order == list(range(len(order)))
    said = verdict(path, b"".join(lines[at] for at in order))
    assert said["is_sound"] == is_beginning
    if not is_beginning:
        assert said["first_bad_line"] == next(at for at, one in enumerate(order) if one != at) + 1


@pytest.mark.parametrize("kept", range(5))
def test_a_log_without_its_end_is_found_by_a_hash_that_was_noted(sound, kept):
    lines, path = sound
    head = json.loads(lines[-1])["hash"]
    assert verdict(path, b"".join(lines[:kept]))["is_sound"]
    assert not verdict(path, b"".join(lines[:kept]), head)["is_sound"]


@pytest.mark.parametrize("noted", range(6))
def test_a_log_that_has_grown_since_a_hash_was_noted_is_sound(sound, noted):
    lines, path = sound
    head = json.loads(lines[noted - 1])["hash"] if noted else "0" * 64
    said = verdict(path, b"".join(lines), "-".join((head[:8], head[8:].upper())))
    assert (said["is_sound"], said["since"]) == (True, 5 - noted)


def test_a_log_that_was_written_anew_is_found_by_a_hash_that_was_noted(sound, tmp_path):
    lines, path = sound
    AuditLog(tmp_path / "forged").record(
        Reply("north", Nonce("x"), Message({})), b"", is_repeat=False, protection=NOTHING
    )
    forged = (tmp_path / "forged").read_bytes()
    assert verdict(path, forged)["is_sound"]
    assert not verdict(path, forged, json.loads(lines[0])["hash"])["is_sound"]


@pytest.mark.parametrize("size", [1, 40, -1])
def test_a_last_line_that_a_crash_cut_off_is_no_forgery(sound, size):
    lines, path = sound
    said = verdict(path, b"".join(lines[:4]) + lines[4][:size])
    assert (said["is_sound"], said["lines"], said["unfinished"]) == (True, 4, len(lines[4][:size]))


def test_of_a_last_line_without_its_end_no_more_is_said_than_is_known(invoke, log):
    log.write_bytes(log.read_bytes()[:-5])
    said = invoke("audit", "verify", "site-north").stdout
    assert "If somebody cut it, the message was sent" in said


def test_what_a_lost_ledger_knew_is_stated_by_command(invoke, told, log):
    ledger = SiteLedger(log.with_name("ledger.jsonl"))
    words = ("audit", "opening", "site-north", "--why", "the ledger is lost")
    assert "(directions)" in told(*words, code=1)["error"]
    said = told(*words, "--releases", 3, "--directions", 12)
    assert (said["releases"], said["directions"], said["epsilon"]) == (3, 12, None)
    assert (ledger.serial, list(ledger.load().runs), ledger.load().directions()) == (3, [], 12)
    assert "1.5" in invoke(*words, "--releases", 1, "--epsilon", 1.5, "--delta", 1e-6).stdout
    assert told("audit", "opening", "site-north", "--why", " ", "--releases", 1, "--directions", 0, code=1)["type"]
    assert told("audit", "opening", "nowhere", "--why", "it", code=1)["type"] == "FileError"
    assert ledger.serial == 4


def test_an_opening_balance_is_that_of_a_site(told, log):
    server = log.parents[2] / "liver" / "runs" / "exp2" / "state"
    server.mkdir(parents=True)
    (server / "lock").touch()
    words = ("--why", "all is lost", "--releases", 2, "--directions", 0)
    assert told("audit", "opening", server.parent, *words, code=1)["type"] == "FileError"
    assert [path.name for path in server.iterdir()] == ["lock"]
    log.with_name("lock").touch()
    log.unlink()
    assert told("audit", "opening", log.parents[1], *words, code=1)["type"] == "FileError"
    (log.parents[1] / "site.toml").touch()
    assert told("audit", "opening", log.parents[1], *words)["releases"] == 2


def test_people_and_programs_are_told_the_line_and_the_way_out(invoke, told, log):
    lines = log.read_text().splitlines(keepends=True)
    head = json.loads(lines[4])["hash"]
    assert told("audit", "verify", "site-north", "--head", head)["since"] == 0
    log.write_text("".join(lines[:4]))
    assert told("audit", "verify", "site-north")["is_sound"]
    assert "removed from its end" in told("audit", "verify", "site-north", "--head", head, code=1)["error"]
    log.write_text("".join([lines[0], lines[2], *lines[3:]]))
    said = told("audit", "verify", "site-north", code=1)
    assert (said["is_sound"], said["first_bad_line"], said["exit_code"]) == (False, 2, 1)
    shown = invoke("audit", "verify", "site-north", code=1).stderr
    assert "line 2" in shown
    assert "Keep the file unchanged" in shown


@pytest.mark.parametrize("head", ["", "abc", "g" * 64, "0" * 63])
def test_a_hash_is_64_letters(told, log, head):
    assert told("audit", "verify", "site-north", "--head", head, code=1)["type"] == "ParameterError"


@pytest.mark.parametrize("command", ["verify", "show"])
def test_a_folder_without_a_log_is_told_so(told, tmp_path, command):
    (tmp_path / "empty").mkdir()
    for place in ("empty", "nowhere"):
        assert told("audit", command, place, code=1)["type"] == "FileError"


def test_what_has_left_is_shown_with_totals(invoke, log):
    rows = invoke("audit", "show", "site-north").stdout.splitlines()
    work = next(row for row in rows if "work" in row)
    for word in ("liver-1", "H 3×4, totals 3", "22.49 1.732", "0.5", "1.25"):
        assert word in work
    assert any("attempt 2" in row and "again" not in row for row in rows)
    assert sum("refused: masks" in row for row in rows) == 1
    total = next(row.split() for row in rows if row.startswith("liver-1"))
    sizes = [json.loads(line)["bytes"] for line in log.read_text().splitlines()][:4]
    assert total == ["liver-1", "4", str(sum(sizes)), "1", "0", "2", "2.5"]


def test_refusals_without_a_line_are_shown_as_well(invoke, told, log):
    for _ in range(5):
        reply = Reply("north", Nonce("liver-2", 0, 0, Kind.REDUCE, 1), Refusal("masks"))
        AuditLog(log).record(reply, reply.to_bytes(), is_repeat=False, protection=NOTHING)
    said = told("audit", "show", "site-north")
    assert len(said["lines"]) == 5 + 2
    assert [line.get("unlisted") for line in said["lines"]][-2:] == [None, {"masks": 1}]
    assert said["unlisted_refusals"] == {"masks": 3}
    shown = invoke("audit", "show", "site-north").stdout
    assert "refused: masks (before it 1 refusals without a line)" in shown
    assert "without a line of their own: masks 3." in shown


def test_a_run_and_the_last_lines_can_be_asked_for(told, log):
    said = told("audit", "show", "site-north", "--run", "liver-1", "--last", 2)
    assert [line["number"] for line in said["lines"]] == [3, 4]
    assert said["runs"]["liver-1"]["messages"] == 4
    assert list(said["runs"]) == ["liver-1"]
    assert "liver-1" in told("audit", "show", "site-north", "--run", "liver", code=1)["error"]


def test_no_value_is_shown(invoke, told, tmp_path):
    """The same shapes and norms, other values: nothing that is shown can tell them apart."""
    outputs = []
    for sign in (1.0, -1.0):
        folder = tmp_path / f"site{sign}"
        reply = Reply("north", Nonce("r", 0, 0, Kind.WORK), Message({"H": sign * np.arange(6.0).reshape(2, 3)}))
        AuditLog(folder.with_suffix(".jsonl")).record(reply, b"the same", is_repeat=False, protection=NOTHING)
        rows = invoke("audit", "show", folder.with_suffix(".jsonl")).stdout.splitlines()
        line = told("audit", "show", folder.with_suffix(".jsonl"))["lines"][0]
        outputs.append((rows[1][30:], {key: line[key] for key in line if key not in ("time", "hash")}))
    assert outputs[0] == outputs[1]


def test_what_is_sound_before_an_edit_is_shown_and_the_edit_is_told(invoke, told, log):
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*lines[:3], lines[3].replace("liver", "river"), lines[4]]))
    result = invoke("audit", "show", "site-north", code=1)
    assert "line 4" in result.stderr
    assert result.stdout.count("work") == 2
