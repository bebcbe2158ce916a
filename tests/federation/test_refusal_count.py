"""However often a server asks for what is refused: the audit log grows by few lines, which tell of every refusal."""

from __future__ import annotations

import json

import pytest

from partsong.federation import audit_log
from partsong.federation.audit_log import MAX_DISTINCT, REFUSALS_FILE, verify_log
from partsong.federation.wire import Kind, Nonce, Request
from tests.federation.helpers import Killed, Killer, depart
from tests.federation.test_ledger import hello_of
from tests.federation.test_site import code_of
from tests.federation.test_site_limits import in_the_open, lines_of, said

MANY = 200


@pytest.fixture(autouse=True)
def day(monkeypatch):
    """It is the same day in a whole test, unless the test says another."""

    def set_day(name):
        monkeypatch.setattr(audit_log, "_today", lambda: name)

    set_day("2026-05-03")
    return set_day


def told_of(site):
    """Refusals that the lines of a log tell of, by code: each of its own, and those before it without one."""
    found = {}
    for line in lines_of(site):
        codes = {line["refusal"]: 1} if line["refusal"] else {}
        for told in (codes, line.get("unlisted", {})):
            found |= {code: found.get(code, 0) + count for code, count in told.items()}
    return found


def asked(number):
    return Request("east", Nonce(f"run-{number}", number, kind=Kind.WORK))


def test_a_thousand_refusals_of_one_request_have_a_dozen_lines_that_tell_of_all(tmp_path):
    federation = in_the_open(tmp_path)
    site = federation.site("east")
    assert {code_of(site.refuse("unsigned", "by a stranger")) for _ in range(1000)} == {"unsigned"}
    assert len(lines_of(site)) <= 12
    assert verify_log(site.audit.path).lines == len(lines_of(site))
    assert said(site, hello_of(federation)) is None
    assert told_of(site) == {"unsigned": 1000}


def test_many_different_refusals_have_few_lines_as_well(tmp_path):
    site = in_the_open(tmp_path).site("east")
    for number in range(MANY // 2):
        assert code_of(site.answer(asked(number).to_bytes())) == "not-started"
        assert code_of(site.refuse("unsigned", "by a stranger")) == "unsigned"
    assert len(lines_of(site)) <= MAX_DISTINCT + 8
    assert len({line["sha256"] for line in lines_of(site)}) >= MAX_DISTINCT
    depart(site.audit, ("run-1", 0, 0))  # a line of another kind has the counts too
    assert told_of(site) == {"unsigned": MANY // 2, "not-started": MANY // 2}


def test_every_day_begins_with_lines_and_tells_what_the_day_before_has_not(tmp_path, day):
    federation = in_the_open(tmp_path)
    site = federation.site("east")
    for name, count in (("2026-05-03", 7), ("2026-05-04", 3)):
        day(name)
        for _ in range(count):
            assert said(site, asked(0)) == "not-started"
    unlisted = [line.get("unlisted", {}) for line in lines_of(site)]
    assert unlisted == [{}, {}, {"not-started": 1}, {"not-started": 3}, {}]
    assert said(site, asked(1)) == "not-started"
    assert lines_of(site)[-1]["unlisted"] == {"not-started": 1}


def test_who_is_killed_between_two_writes_forgets_no_refusal_and_tells_none_twice(tmp_path, monkeypatch):
    """Of a refusal that was cut off it is not known whether it has left: it may be told of, once."""

    def flooded(folder, killer):
        federation, left, deaths = in_the_open(folder), 0, 0
        requests = [asked(0).to_bytes()] * 11 + [hello_of(federation).to_bytes(), asked(0).to_bytes()] * 2
        killer.is_awake = True
        for request in requests:
            try:
                left += code_of(federation.site("east").answer(request)) == "not-started"
            except Killed:
                deaths += 1
        killer.is_awake = False
        assert said(federation.site("east"), hello_of(federation)) is None
        site = federation.site("east")
        assert verify_log(site.audit.path).unfinished == 0
        assert left <= told_of(site)["not-started"] <= left + deaths
        return len(lines_of(site))

    with monkeypatch.context() as patched:
        counter = Killer(patched, 10**9)
        lines = flooded(tmp_path / "counted", counter)
    assert counter.count > 100
    for at in range(1, counter.count + 1, 5):
        with monkeypatch.context() as patched:
            assert flooded(tmp_path / f"at-{at}", Killer(patched, at)) <= lines + 2


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"count": "x"}', '{"count": -1}', '{"unlisted": [1]}'])
def test_a_count_that_cannot_be_understood_is_begun_anew(tmp_path, content):
    site = in_the_open(tmp_path).site("east")
    assert said(site, asked(0)) == "not-started"
    place = site.audit.path.with_name(REFUSALS_FILE)
    assert place.stat().st_mode & 0o777 == 0o600
    place.write_text(content)
    assert [said(site, asked(0)) for _ in range(3)] == ["not-started"] * 3
    assert json.loads(place.read_text())["count"] == 3
