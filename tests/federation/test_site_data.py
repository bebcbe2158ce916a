"""Laws of what a site works on and what it keeps: sound rows, the same in all of a run, and a result that is one."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse

from partsong.core.interfaces import Message
from partsong.data.conversion import as_matrix
from partsong.data.dense import DenseMatrix
from partsong.errors import ParameterError, SiteRefused
from partsong.federation.columns import TELL, Correspondent
from partsong.federation.experiment import Experiment
from partsong.federation.policy import Policy
from partsong.federation.signing import public_key
from partsong.federation.site.plan import SiteData
from partsong.federation.site.results import ResultWriter
from partsong.federation.site.state import MAX_LETTERS, MAX_LOG_BYTES, append_to_log, data_digest
from partsong.federation.transports.base import InProcess
from partsong.federation.wire import Kind, Nonce, Refusal, Reply, Request
from tests.federation.helpers import COLUMNS, NAMES, Counting, Federation, TextFederation, rows_of, secret_of
from tests.federation.test_asynchronous import arrivals_of, federation_of, record_of
from tests.federation.test_site import code_of, of_kind, recorded
from tests.federation.test_site_limits import in_the_open, masked, request_of, said


def changed(site, value):
    """The same site, where one number of its rows is another."""
    rows = rows_of(site.name)
    rows[3, 4] = value
    return replace(site, data=SiteData(rows, COLUMNS, secret_of(site.name)))


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf, 1e200])
def test_no_run_begins_over_rows_that_join_would_refuse(tmp_path, value):
    federation = in_the_open(tmp_path)
    asked = recorded(federation, 1)
    site = changed(replace(federation.site("east"), folder=tmp_path / "other"), value)
    for kind in (Kind.HELLO, Kind.START):
        reply = site.answer(request_of(asked, kind).to_bytes())
        assert code_of(reply) == "data"
        assert b"gene" not in reply
    assert "gene-4" in (tmp_path / "other" / "site.log").read_text() or value == 1e200
    assert not list((tmp_path / "other").glob("runs/*/start"))


def test_a_run_goes_on_with_the_rows_that_it_began_with_and_with_no_others(tmp_path):
    federation = masked(tmp_path)
    asked = recorded(federation, 1)
    site = federation.site("east")
    other = changed(site, 0.25)
    work = request_of(asked, Kind.WORK)
    note = {**work.note, "counted": [0, 0]}
    assert said(other, replace(work, note=note), round=1, phase=2) == "data"
    assert said(other, request_of(asked, Kind.REDUCE, 0, 3), round=1) == "data"
    finish = Request("east", Nonce("run-1", 1, kind=Kind.FINISH), Message({"components": np.ones((3, 12))}))
    assert said(other, replace(finish, note={"counted": [0, 0]})) == "data"
    assert site.ledger.serial == 1
    assert len(list(federation.rounds())) == 2


def test_rows_are_known_again_however_they_are_held():
    rows, order = np.where(rows_of("east") > 1, rows_of("east"), 0), (3, 1, 2)
    turned = np.ascontiguousarray(rows[:, ::-1])

    def mark(held, at=order):
        return data_digest(held, at)

    back = tuple(11 - at for at in order)
    assert mark(rows) == mark(np.asfortranarray(rows)) == mark(turned, back) == mark(rows[:, :4])
    stored = scipy.sparse.csr_array(rows)
    assert mark(stored) == mark(scipy.sparse.csc_array(rows)) == mark(scipy.sparse.csr_array(turned), back)
    for at in ((0, 3), (15, 1), (7, 2)):
        other = rows.copy()
        other[at] += 1e-9
        assert mark(other) != mark(rows)
        assert mark(scipy.sparse.csr_array(other)) != mark(stored)
    assert mark(rows, (1, 3, 2)) != mark(rows) != mark(rows[::-1].copy())


def test_a_run_over_texts_begins_with_those_that_sites_have_agreed_over(tmp_path):
    federation = TextFederation(tmp_path)
    others = replace(federation, texts={"north": (*federation.documents("north")[1:], "liver liver biopsy")})
    was, now = federation.site("north").answer, others.site("north").answer

    def changing(data):
        nonce = Request.from_bytes(data).nonce
        return (now if (nonce.run, nonce.kind) == ("run-1", Kind.START) else was)(data)

    sites = {**federation.transport().sites, "north": changing}
    with pytest.raises(SiteRefused, match="'data'"):
        list(federation.rounds(InProcess(sites)))


def spoiled(value):
    H = np.full((3, 12), 0.1)
    H[1, 3] = value
    return H


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, 1e155, 1e308])
def test_a_model_that_is_none_ends_nothing_and_writes_nothing(tmp_path, value):
    federation = masked(tmp_path)
    recorded(federation, 2)
    site, kept = federation.site("east"), tmp_path / "east" / "results"
    finish = Request("east", Nonce("run-1", 2, kind=Kind.FINISH), note={"counted": [0, 0]})
    assert said(site, replace(finish, body=Message({"components": spoiled(value)}))) == "model"
    assert said(site, replace(finish, body=Message({"components": spoiled(1), "more": np.array([np.nan])}))) == "model"
    assert not kept.exists()
    assert said(site, replace(finish, body=Message({"components": spoiled(1)}))) is None
    assert json.loads((kept / "run-1" / "result.json").read_text())["relative_error"] > 0


def test_a_fit_that_is_no_number_is_not_told_as_one(tmp_path, monkeypatch):
    """Whether it is one depends on the rows: the answer to the server does not."""
    federation = in_the_open(tmp_path)
    recorded(federation, 1)
    site, kept = federation.site("east"), tmp_path / "east" / "results" / "run-1"
    tiny = Message({"components": np.full((3, 12), 1e-154)})
    monkeypatch.setattr(DenseMatrix, "squared_distance", lambda self, W, Ht: float("nan"))
    assert said(site, Request("east", Nonce("run-1", 1, kind=Kind.FINISH), tiny, {"counted": [0, 0]})) is None
    assert json.loads((kept / "result.json").read_text())["relative_error"] is None
    assert np.isfinite(np.load(kept / "weights.npy")).all()


def test_weights_that_are_no_numbers_are_not_kept(tmp_path):
    solver = SimpleNamespace(solve_rows=lambda matrix, Ht: np.full((16, 3), np.nan))
    program = SimpleNamespace(rank=3, solver=solver)
    ending = ResultWriter("run-1", {"method": "fedavg", "rank": 3}, program, 3, as_matrix(rows_of("east")), COLUMNS)
    assert "weights.npy was not written" in ending.save(tmp_path / "kept", Message({"components": np.ones((3, 12))}))
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"model.safetensors", "result.json"}
    assert json.loads((tmp_path / "kept" / "result.json").read_text())["relative_error"] is None


def test_the_end_is_written_once(tmp_path):
    federation = in_the_open(tmp_path)
    [(finish, reply)] = of_kind(recorded(federation), "east", Kind.FINISH)
    weights = tmp_path / "east" / "results" / "run-1" / "weights.npy"
    before = weights.stat()
    other = changed(federation.site("east"), 5.0)
    assert other.answer(finish) == reply
    assert (weights.stat().st_mtime_ns, weights.stat().st_ino) == (before.st_mtime_ns, before.st_ino)


@pytest.mark.parametrize("on_party_error", ["raise", "skip"])
def test_who_has_not_heard_the_end_is_told_of_and_hears_it_when_the_run_is_resumed(tmp_path, on_party_error):
    federation = Federation(tmp_path, Experiment("fedavg", 3, 2, on_party_error=on_party_error))
    sites = dict(federation.transport().sites)

    def deaf(request):
        if Request.from_bytes(request).nonce.kind is Kind.FINISH:
            raise ConnectionError
        return sites["south"](request)

    assert len(list(federation.rounds(InProcess({**sites, "south": deaf})))) == 2
    assert list(federation.record().without_result) == ["south"]
    assert not (tmp_path / "south" / "results").exists()
    assert list(federation.rounds()) == []
    assert federation.record().without_result == {}
    assert (tmp_path / "south" / "results" / "run-1" / "weights.npy").exists()


def test_who_has_refused_the_end_of_arrivals_is_told_of(tmp_path):
    federation = federation_of(tmp_path)
    sites = dict(federation.transport().sites)

    def refusing(request):
        read = Request.from_bytes(request)
        if read.nonce.kind is Kind.FINISH:
            return Reply("north", read.nonce, Refusal("data")).to_bytes()
        return sites["north"](request)

    *_, last = arrivals_of(federation, InProcess({**sites, "north": refusing}), tol=1e9)
    assert last.index == 2
    assert "'data'" in record_of(federation).without_result["north"]
    assert list(arrivals_of(federation)) == [], "a run of which some have heard the end is over"
    assert record_of(federation).without_result == {}


def test_a_server_that_is_killed_while_it_tells_the_end_of_arrivals_tells_it_again_and_asks_for_no_more(tmp_path):
    federation = federation_of(tmp_path)
    sites = dict(federation.transport().sites)

    def last_heard(request):
        reply = sites["north"](request)
        if Request.from_bytes(request).nonce.kind is Kind.FINISH:
            raise KeyboardInterrupt
        return reply

    with pytest.raises(KeyboardInterrupt):
        list(arrivals_of(federation, InProcess({**sites, "north": last_heard}), time_budget=0.2))
    before = record_of(federation)
    assert set(before.without_result) == set(federation.names)
    assert list(arrivals_of(federation, time_budget=60.0)) == []
    assert record_of(federation).without_result == {}
    assert record_of(federation).order == before.order


def test_a_server_cannot_fill_the_log(tmp_path):
    federation = in_the_open(tmp_path)
    site, log = federation.site("east"), tmp_path / "east" / "site.log"
    names = ["x" * 1_000_000, "y" * 2_000_000]
    note = {"experiment": federation.experiment.to_dict(), "parties": names}
    assert said(site, Request("east", Nonce("q"), note=note)) == "roster"
    [line] = log.read_text().splitlines()
    assert len(line) < MAX_LETTERS + 200
    assert line.endswith("y.")
    for _ in range(2):
        with log.open("wb") as file:
            file.truncate(MAX_LOG_BYTES + 1)
        append_to_log(tmp_path / "east", "note", "one more")
    assert log.read_text().endswith("[note] one more\n")
    assert sum(path.stat().st_size for path in log.parent.glob("site.log*")) < 2 * MAX_LOG_BYTES + 4096


@pytest.mark.parametrize("counts", [{"\x1b[2J": 1}, {"a" * 41: 1}, {"": 1}, {chr(97 + n): n for n in range(9)}])
def test_counts_of_a_refusal_have_short_plain_names(tmp_path, counts):
    federation = Federation(tmp_path, Experiment("fedavg", 3, 1, on_party_error="skip"), NAMES)
    sites = dict(federation.transport().sites)

    def lying(data):
        read = Request.from_bytes(data)
        refusal = Reply("east", read.nonce, Refusal("failed", counts)).to_bytes()
        return refusal if read.nonce.kind is Kind.WORK else sites["east"](data)

    [done] = federation.rounds(InProcess({**sites, "east": lying}))
    assert "cannot be read" in done.refused["east"]
    assert len(done.refused["east"]) < 300


def test_the_same_question_for_names_gets_the_same_letter(tmp_path):
    federation = in_the_open(tmp_path)
    roster = {name: public_key(secret_of(name), name) for name in federation.names}
    federation.sites = {name: federation.site(name, roster=roster) for name in federation.names}
    asked, site = recorded(federation, 1), federation.sites["east"]
    columns = Reply.from_bytes(of_kind(asked, "east", Kind.HELLO)[0][1]).answer["columns"]
    north = Correspondent("north", "run-1", secret_of("north"), roster)

    def told(count):
        body = Message({**north.request_names().arrays, "columns": columns[:count]})
        nonce = Nonce("run-1", kind=Kind.NAMES, phase=TELL)
        return site.answer(Request("east", nonce, body, {"for": "north"}).to_bytes())

    assert told(3) == told(3) != told(5)
    keys = {Reply.from_bytes(told(count)).answer["letter"][:32].tobytes() for count in (3, 5)}
    assert len(keys) == 2, "no key seals two texts"
    assert north.read_names("east", Reply.from_bytes(told(3)).answer) == list(COLUMNS[:3])


def test_a_site_works_in_rounds_for_which_it_was_drawn(tmp_path):
    table = {"method": "fednmf", "rank": 2, "rounds": 4, "seed": 6, "participation": 0.5}
    federation = Counting(tmp_path, Experiment.from_table(table), NAMES)
    asked, name = recorded(federation), "east"
    schedule = federation.experiment.schedule(len(NAMES))
    drawn = [schedule.participants(NAMES, index) for index in range(4)]
    work = Request.from_bytes(of_kind(asked, name, Kind.WORK)[0][0])
    fresh = Counting(tmp_path / "fresh", federation.experiment, NAMES)
    site = fresh.site(name)
    for kind in (Kind.HELLO, Kind.START):
        assert code_of(site.answer(of_kind(asked, name, kind)[0][0])) is None
    away = next(index for index in range(4) if name not in drawn[index])
    here = next(index for index in range(4) if name in drawn[index])
    for participants in (list(NAMES), [name, *drawn[away]]):
        note = {**work.note, "participants": participants, "counted": None}
        assert said(site, replace(work, note=note), round=away) == "protocol"
    assert site.ledger.serial == 0
    note = {**work.note, "participants": list(drawn[here]), "counted": None}
    assert said(site, replace(work, note=note), round=here) is None


def test_a_budget_about_rows_is_compared_with_no_number_of_them():
    table = {"minimum_rows": 100, "privacy": {"epsilon": 1.0, "unit": "row"}}
    with pytest.raises(ParameterError, match="with certainty whether one row"):
        Policy.from_table(table)
    assert Policy.from_table({**table, "privacy": {"epsilon": 1.0, "unit": "party"}}).minimum_rows == 100
