"""Laws of a site against a server that lies: how often it is answered, and what a refusal can tell."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest

from partsong.core.interfaces import Message
from partsong.errors import FileError, ParameterError, PartsongError
from partsong.federation.chain import Chain
from partsong.federation.columns import TELL, Correspondent
from partsong.federation.experiment import Experiment, RunRequest
from partsong.federation.ledger import AttemptCost, AttemptLimits, SiteLedger
from partsong.federation.policy import Policy, PrivacyBudget
from partsong.federation.signing import public_key
from partsong.federation.site.plan import SiteData, build_plan
from partsong.federation.site.state import RunFolder
from partsong.federation.transports.base import InProcess, NoReply
from partsong.federation.wire import Kind, Nonce, Reply, Request, RequestRefused
from tests.federation.helpers import COLUMNS, NAMES, Federation, noisy_plan, rows_of, secret_of
from tests.federation.test_site import code_of, of_kind, recorded

NOISY = {"unit": "party", "epsilon": 1.0}


def private(folder):
    policy = Policy(privacy=PrivacyBudget(9.0, unit="party", insecure_noise=True))
    experiment = Experiment("fedavg", 3, 2, local_steps=1, privacy=NOISY)
    return Federation(folder, experiment, policy=policy, build=noisy_plan)


def masked(folder):
    return Federation(folder, Experiment("exact", 3, 3, secure_aggregation=True))


def in_the_open(folder):
    return Federation(folder, Experiment("fedavg", 3, 3))


def request_of(asked, kind, number=0, phase=0):
    return Request.from_bytes(of_kind(asked, "east", kind, phase)[number][0])


def said(site, request, **nonce):
    """The code of a refusal, or None; `nonce`: what is asked under another one."""
    return code_of(site.answer(replace(request, nonce=replace(request.nonce, **nonce)).to_bytes()))


def lines_of(site):
    return list(Chain(site.audit.path).lines())


class Stopped(BaseException):
    """As a process that is killed."""


@pytest.mark.parametrize("make", [private, masked, in_the_open])
def test_nothing_is_worked_on_in_a_run_that_is_over(tmp_path, make):
    federation = make(tmp_path)
    asked, site = recorded(federation), federation.site("east")
    serial, model = site.ledger.serial, (tmp_path / "east" / "runs" / "run-1" / "model").read_bytes()
    [(finish, reply)] = of_kind(asked, "east", Kind.FINISH)
    for number, kind in enumerate((Kind.WORK, Kind.START, Kind.WORK)):
        assert said(site, request_of(asked, kind)) == "over"
        assert said(site, request_of(asked, kind), attempt=number + 1) == "over"
        assert site.answer(finish) == reply
    if make is masked:
        assert said(site, request_of(asked, Kind.REDUCE, 0, 3)) == "over"
    other = replace(Request.from_bytes(finish), body=Message({"components": np.ones((3, 12))}))
    assert said(site, other) == "over"
    assert site.ledger.serial == serial
    assert (tmp_path / "east" / "runs" / "run-1" / "model").read_bytes() == model


@pytest.mark.parametrize("step", ["save_model", "keep_only", "remove_replies"])
def test_a_run_is_over_before_anything_of_it_is_forgotten(tmp_path, monkeypatch, step):
    federation = masked(tmp_path)
    asked, site = recorded(federation, 2), federation.site("east")
    last = Request("east", Nonce("run-1", 2, kind=Kind.FINISH), Message({"components": np.ones((3, 12))}))
    finish = replace(last, note={"counted": [0, 0]})

    def stopped(*args):
        raise Stopped

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, step, stopped)
        with pytest.raises(Stopped):
            site.answer(finish.to_bytes())
    work = request_of(asked, Kind.WORK, 0, 2)
    assert said(site, work) == said(site, work, attempt=1) == "over"
    assert said(site, finish) is None
    assert not list((tmp_path / "east" / "runs" / "run-1").glob("sent-*"))
    assert site.ledger.serial == 2


def test_a_model_that_cannot_be_the_last_one_does_not_end_a_run(tmp_path):
    federation = in_the_open(tmp_path)
    site = federation.site("east")
    recorded(federation, 1)
    assert said(site, Request("east", Nonce("run-1", 1, kind=Kind.FINISH), note={"counted": None})) == "layout"
    assert len(list(federation.rounds())) == 2


def test_work_whose_answer_has_left_is_not_done_again_when_its_files_are_gone(tmp_path):
    federation = private(tmp_path)
    asked, site = recorded(federation, 1), federation.site("east")
    files = RunFolder(tmp_path / "east" / "runs" / "run-1")
    files.keep_only(set())
    assert said(site, request_of(asked, Kind.WORK)) == "conflict"
    shutil.rmtree(files.path)
    assert said(site, request_of(asked, Kind.START)) is None
    for attempt in (0, 1):
        assert said(site, request_of(asked, Kind.WORK), attempt=attempt) == "out-of-step"
    site.audit.path.unlink()
    shutil.rmtree(files.path)
    assert said(site, request_of(asked, Kind.START)) == "ledger"
    assert site.ledger.serial == 1


def test_a_run_that_was_over_cannot_be_started_again_when_its_files_are_gone(tmp_path):
    federation = in_the_open(tmp_path)
    asked = recorded(federation)
    shutil.rmtree(tmp_path / "east" / "runs")
    assert said(federation.site("east"), request_of(asked, Kind.START)) == "over"


@pytest.mark.parametrize("loses_all", [False, True])
def test_work_that_was_cut_off_before_anything_had_left_is_done_again(tmp_path, monkeypatch, loses_all):
    federation = private(tmp_path)
    asked, site = recorded(federation, 1), federation.site("north")
    shutil.rmtree(tmp_path / "east")
    site = federation.site("east")
    for kind in (Kind.HELLO, Kind.START):
        assert said(site, request_of(asked, kind)) is None
    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "save_work", lambda *args: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            site.answer(request_of(asked, Kind.WORK).to_bytes())
    if loses_all:
        shutil.rmtree(tmp_path / "east" / "runs")
        assert said(site, request_of(asked, Kind.START)) is None
    assert said(site, request_of(asked, Kind.WORK)) is None
    assert site.ledger.serial == 1


@pytest.mark.parametrize("make", [masked, in_the_open])
def test_all_attempts_of_a_round_are_about_one_model(tmp_path, make):
    federation = make(tmp_path)
    asked = recorded(federation, 1)
    start, work = request_of(asked, Kind.START), request_of(asked, Kind.WORK)
    shutil.rmtree(tmp_path / "east")
    site = federation.site("east")
    assert said(site, start) is said(site, work) is None
    other = Message({name: np.asarray(array) + 1 for name, array in work.body.arrays.items()}, work.body.weight)
    for attempt in range(1, 9):
        assert said(site, replace(work, body=other), attempt=attempt) == "conflict"
    assert said(site, work, attempt=1) is None
    assert site.ledger.serial == 2


def test_a_round_has_no_more_attempts_than_it_can_need(tmp_path):
    federation = in_the_open(tmp_path)
    asked, site = recorded(federation, 1), federation.site("east")
    said_to = [said(site, request_of(asked, Kind.WORK), attempt=attempt) for attempt in range(8)]
    assert said_to == [None] * 4 + ["attempts"] * 4
    assert site.ledger.serial == 4


def test_work_that_fails_in_two_runs_by_turns_uses_up_no_attempts(tmp_path, monkeypatch):
    federation = in_the_open(tmp_path)
    asked = [request_of(recorded(federation, 1), Kind.WORK)]
    shutil.rmtree(tmp_path / "server")
    asked.append(request_of(recorded(replace(federation, run="other"), 1), Kind.WORK))
    site = federation.site("east")

    def full(*_):
        raise FileError("No space is left.")

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "save_work", full)
        for _ in range(2 * len(NAMES)):
            assert [said(site, request, attempt=1) for request in asked] == ["storage", "storage"]
    assert [said(site, request, attempt=1) for request in asked] == [None, None]


def test_a_site_that_stays_away_does_not_use_up_the_attempts_of_the_others(tmp_path):
    experiment = Experiment("fedavg", 3, 6, local_steps=1, secure_aggregation=True, on_party_error="skip")
    federation = Federation(tmp_path, experiment, NAMES)

    class Away(InProcess):
        __slots__ = ()

        def ask(self, requests, timeout):
            replies = super().ask(requests, timeout)
            is_away = "west" in requests and Request.from_bytes(requests["west"]).nonce.kind is Kind.WORK
            return {**replies, "west": NoReply("away")} if is_away else replies

    rounds = list(federation.rounds(Away(federation.transport().sites)))
    assert [done.participants for done in rounds] == [NAMES[:3]] * 6
    assert federation.site("east").ledger.serial == 12


def test_a_run_has_no_more_lines_than_it_can_need(tmp_path):
    ledger = SiteLedger(tmp_path / "ledger.jsonl")
    requests = [Request("east", Nonce("run", index, attempt, Kind.WORK)) for index in range(3) for attempt in range(2)]
    few = AttemptCost(limits=AttemptLimits(2, 5))
    for request in requests[:5]:
        assert not ledger.charge(request, few)
    assert ledger.charge(requests[0], few)
    for run in ("run", "other"):
        request = replace(requests[5], nonce=replace(requests[5].nonce, run=run))
        if run == "other":
            assert not ledger.charge(request, few)
        else:
            with pytest.raises(RequestRefused) as caught:
                ledger.charge(request, few)
            assert caught.value.refusal.code == "attempts"


@pytest.mark.parametrize("code", ["upload", "diverged", "failed"])
def test_under_masks_a_refusal_that_depends_on_the_data_is_the_last_answer_of_its_run(tmp_path, code):
    federation = Federation(tmp_path, Experiment("exact", 3, 3, secure_aggregation=True, mask_bound=1e-3))
    worked, asked = [], []

    def build(told, n_parties, roster):
        plan = build_plan(told, n_parties, roster)
        return replace(plan, program=Watched(plan.program, worked, code))

    site = replace(federation.site("east"), build=build)
    federation.sites["east"] = site
    with pytest.raises(PartsongError):
        record_into(asked, federation)
    work = request_of(asked, Kind.WORK)
    assert said(site, work) == code
    assert said(site, work, attempt=1) == said(site, work, round=1) == code
    assert (site.ledger.serial, len(worked)) == (1, 1)
    assert said(site, request_of(asked, Kind.START)) is None


def test_how_large_a_number_beyond_the_bound_was_is_told_in_the_log_of_the_site_alone(tmp_path):
    federation = Federation(tmp_path, Experiment("exact", 3, 3, secure_aggregation=True, mask_bound=1e-3))
    with pytest.raises(PartsongError) as caught:
        record_into([], federation)
    site = federation.site("east")
    X = np.asarray(site.data.rows, dtype=float)
    told = f"The largest entry is {max(len(X), (X**2).sum()):.3g}."
    assert told in (site.folder / "site.log").read_text()
    assert "largest entry" not in str(caught.value)


class Watched:
    """A program that counts its works, and fails in one of the ways there are."""

    def __init__(self, program, worked, code):
        self.__dict__.update(inner=program, worked=worked, code=code)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def local(self, shard, state, model):
        self.worked.append(model)
        state, upload = self.inner.local(shard, state, model)
        if self.code == "failed":
            raise ZeroDivisionError
        if self.code == "diverged":
            upload = Message({name: np.asarray(array) * np.nan for name, array in upload.arrays.items()}, upload.weight)
        return state, upload


def record_into(asked, federation):
    """All that is said until a run fails."""
    transport = federation.transport()

    class Kept(type(transport)):
        __slots__ = ()

        def ask(self, requests, timeout):
            replies = super().ask(requests, timeout)
            asked.extend((name, requests[name], replies[name]) for name in requests)
            return replies

    list(federation.rounds(Kept(transport.sites)))


def test_masked_numbers_are_bounded_by_no_less_than_the_site_allows(tmp_path):
    policy = Policy.from_table({"minimum_mask_bound": 1e5})
    for bound, is_allowed in ((1e4, False), (1e5, True), (None, True)):
        experiment = Experiment("exact", 3, 1, secure_aggregation=True, mask_bound=bound)
        site = Federation(tmp_path, experiment, policy=policy).site("east")
        note = {"experiment": experiment.to_dict(), "parties": ["east", "north", "south"]}
        assert said(site, Request("east", Nonce("run-1"), note=note)) == (None if is_allowed else "mask-bound")
    with pytest.raises(ParameterError, match="minimum_mask_bound"):
        Policy.from_table({"minimum_mask_bound": -1})


def test_ranks_tell_of_the_number_of_rows_no_more_than_its_binary_digits():
    def least(policy, rank):
        request = RunRequest("exact", rank, 1, 3, False)
        return next(rows for rows in range(1, 300) if is_let(policy, request, rows))

    assert {least(Policy(), rank) for rank in range(1, 65)} == {2, 4, 8, 16, 32, 64, 128}
    assert all(least(Policy(), rank) >= 2 * rank for rank in range(1, 65))
    assert {least(Policy(privacy=PrivacyBudget(1.0)), rank) for rank in range(1, 65)} == {1}


def is_let(policy, request, rows):
    try:
        policy.require(request, rows)
    except RequestRefused:
        return False
    return True


def test_agreed_columns_are_found_by_name_in_every_round(tmp_path):
    federation = in_the_open(tmp_path)
    asked, site = recorded(federation, 2), federation.site("east")
    start, *works = [request_of(asked, Kind.START), request_of(asked, Kind.WORK), request_of(asked, Kind.WORK, 1)]
    shutil.rmtree(tmp_path / "east")
    assert said(site, start) is said(site, works[0]) is None
    X, secret = rows_of("east"), secret_of("east")
    turned = np.concatenate([np.full((len(X), 1), 1e6), X[:, ::-1]], axis=1)
    fewer, less, single = (
        SiteData(X[:-1], COLUMNS, secret),
        SiteData(X[:, :-1], COLUMNS[:-1], secret),
        X.astype(np.float32),
    )
    for data, code in ((fewer, "layout"), (less, "columns"), (SiteData(single, COLUMNS, secret), "layout")):
        assert said(replace(site, data=data), works[1]) == code
    assert said(replace(site, policy=Policy(columns=("gene-1*",))), works[1]) == "columns"
    assert site.ledger.serial == 1
    other = replace(site, data=SiteData(turned, ("secret", *COLUMNS[::-1]), secret))
    found = Reply.from_bytes(other.answer(works[1].to_bytes())).answer["H"]
    before = Reply.from_bytes(of_kind(asked, "east", Kind.WORK)[1][1]).answer["H"]
    np.testing.assert_array_equal(found, before)


def test_a_sum_is_of_parties_of_the_run_and_of_this_one(tmp_path):
    federation = in_the_open(tmp_path)
    asked, site = recorded(federation, 1), federation.site("east")
    work = request_of(asked, Kind.WORK)
    for names in (["east", "x", "y"], ["north", "south"]):
        request = replace(work, note={**work.note, "participants": names})
        assert said(site, request, attempt=1) == "protocol"
    assert site.ledger.serial == 1


def test_names_are_told_in_a_run_under_way_to_those_who_know_the_shared_key(tmp_path):
    federation = in_the_open(tmp_path)
    roster = {name: public_key(secret_of(name), name) for name in federation.names}

    def told(site, letter, columns):
        nonce, body = Nonce("run-1", kind=Kind.NAMES, phase=TELL), Message({**letter.arrays, "columns": columns})
        return site.answer(Request("east", nonce, body, {"for": "north"}).to_bytes())

    for key, tells in ((b"", True), (b"k" * 32, True), (b"k" * 32, False), (b"", False)):
        folder = replace(federation, folder=tmp_path / f"{key.hex()}-{tells}")
        policy = Policy(tell_names=tells, columns=("gene-*",))
        folder.sites = {name: folder.site(name, roster=roster, key=key, policy=policy) for name in federation.names}
        site, north = folder.sites["east"], Correspondent("north", "run-1", secret_of("north"), roster, key)
        stranger = replace(north, shared=b"" if key else b"other")
        asked = recorded(folder, 1)
        columns = Reply.from_bytes(of_kind(asked, "east", Kind.HELLO)[0][1]).answer["columns"]
        fresh = replace(site, folder=folder.folder / "fresh")
        if not tells:
            assert code_of(told(site, north.request_names(), columns)) == "names"
            continue
        assert code_of(told(fresh, north.request_names(), columns)) == "not-started"
        assert code_of(told(site, stranger.request_names(), columns)) == "shared-key"
        answer = told(site, north.request_names(), columns)
        assert north.read_names("east", Reply.from_bytes(answer).answer) == list(COLUMNS)
        narrow = replace(site, policy=replace(policy, columns=("gene-1*",)))
        assert north.read_names("east", Reply.from_bytes(told(narrow, north.request_names(), columns)).answer) == [
            "gene-1", "gene-10", "gene-11",
        ]  # fmt: skip


def test_a_log_has_one_line_for_each_refusal_whatever_names_hold(tmp_path):
    federation = in_the_open(tmp_path)
    site, told = federation.site("east"), federation.experiment.to_dict()
    for number, name in enumerate(("a\n2026-01-01 [note] forged", "a\ud800", "a\x1b[2J\r", "a\u2028b")):
        request = Request("east", Nonce(f"run-{number}"), note={"experiment": told, "parties": ["north", name]})
        before = len(lines_of(site)) if site.audit.path.exists() else 0
        assert said(site, request) == "roster"
        assert len(lines_of(site)) == before + 1
    path = tmp_path / "east" / "site.log"
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) == 4
    assert all(letter.isprintable() for letter in text.replace("\n", ""))
    for file in ("site.log", "lock", "audit.jsonl"):
        assert (tmp_path / "east" / file).stat().st_mode & 0o777 == 0o600


def test_brackets_in_names_of_columns_are_brackets():
    policy = Policy(columns=("dose[mg]", "x[*"))
    assert policy.leaving(("dose[mg]", "dosem", "doseg", "x[1]", "x1")) == ("dose[mg]", "x[1]")


def test_a_budget_does_not_cover_what_left_without_noise_before(tmp_path):
    recorded(Federation(tmp_path, Experiment("fedavg", 3, 1, local_steps=1)), 1)
    shutil.rmtree(tmp_path / "server")
    federation = replace(private(tmp_path), run="run-2")
    with pytest.raises(PartsongError, match="'noiseless'"):
        list(federation.rounds())
    policy = Policy.from_table({"privacy": {"epsilon": 9.0, "unit": "party", "insecure_noise": True}})
    known = replace(policy, privacy=replace(policy.privacy, noiseless_before=1))
    shutil.rmtree(tmp_path / "server", ignore_errors=True)
    assert len(list(replace(federation, policy=known).rounds())) == 2
