"""Laws of a site: one payload for one nonce, a ledger that only grows, and refusals that tell nothing."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest

from partsong.core.interfaces import Message
from partsong.errors import BudgetSpent, FeatureError, PartyError, SiteRefused
from partsong.federation.columns import Correspondent
from partsong.federation.experiment import Experiment
from partsong.federation.ledger import OpeningBalance
from partsong.federation.policy import Policy, PrivacyBudget
from partsong.federation.server.launch import run_experiment
from partsong.federation.signing import public_key
from partsong.federation.site.plan import SiteData
from partsong.federation.site.state import RunFolder, WorkState
from partsong.federation.transports.base import InProcess
from partsong.federation.wire import CODES, Kind, Nonce, Refusal, Reply, Request, load_state
from partsong.privacy.randomness import system_source
from tests.federation.helpers import COLUMNS, NAMES, Federation, noisy_plan, rows_of, secret_of


class Recorded(InProcess):
    """Keeps all requests and replies, in order."""

    __slots__ = ("asked", "change")

    def __init__(self, sites, change=lambda name, request: request):
        for name, value in (("sites", sites), ("asked", []), ("change", change)):
            object.__setattr__(self, name, value)

    def ask(self, requests, timeout):
        changed = {name: self.change(name, request) for name, request in requests.items()}
        replies = InProcess.ask(self, changed, timeout)
        self.asked.extend((name, changed[name], replies[name]) for name in requests)
        return replies


def recorded(federation, rounds=None, **kwargs):
    """What was asked and answered in the first rounds of a run."""
    transport = Recorded(federation.transport().sites, **kwargs)
    for done in federation.rounds(transport):
        if rounds is not None and done.index + 1 >= rounds:
            break
    return transport.asked


def of_kind(asked, name, kind, phase=0):
    return [
        (r, a) for n, r, a in asked if n == name and Request.from_bytes(r).nonce.kind is kind and phase == phase_of(r)
    ]


def phase_of(request):
    return Request.from_bytes(request).nonce.phase


def code_of(reply):
    answer = Reply.from_bytes(reply).answer
    return answer.code if isinstance(answer, Refusal) else None


@pytest.fixture
def midway(tmp_path):
    """A masked run after its first round, and all that was said in it."""
    federation = Federation(tmp_path, Experiment("exact", 3, 3, secure_aggregation=True))
    return federation, recorded(federation, 1)


@pytest.fixture
def in_the_open(tmp_path):
    federation = Federation(tmp_path, Experiment("fedavg", 3, 3))
    return federation, recorded(federation, 1)


def test_a_repeated_request_gets_the_same_bytes(midway):
    federation, asked = midway
    for phase in range(4):
        [(request, reply)] = of_kind(asked, "east", Kind.REDUCE if phase else Kind.WORK, phase)
        assert federation.site("east").answer(request) == reply
    assert federation.site("east").ledger.serial == 1


def test_another_request_under_the_same_nonce_is_refused(midway):
    federation, asked = midway
    for kind, phase in ((Kind.WORK, 0), (Kind.REDUCE, 2), (Kind.REDUCE, 3)):
        request = Request.from_bytes(of_kind(asked, "east", kind, phase)[0][0])
        other = replace(request, body=Message({**request.body.arrays, "more": np.ones(1)}))
        assert code_of(federation.site("east").answer(other.to_bytes())) == "conflict"
    assert federation.site("east").ledger.serial == 1


def test_phases_are_answered_in_order(tmp_path):
    federation = Federation(tmp_path, Experiment("exact", 3, 2, secure_aggregation=True))
    site, asked = federation.site("east"), recorded(federation, 1)
    request = Request.from_bytes(of_kind(asked, "east", Kind.REDUCE, 3)[0][0])
    for nonce in (replace(request.nonce, round=1), replace(request.nonce, phase=7), replace(request.nonce, attempt=3)):
        assert code_of(site.answer(replace(request, nonce=nonce).to_bytes())) == "out-of-turn"


@pytest.mark.parametrize("mechanism", ["centred", "hybrid"])
def test_an_exchange_is_charged_for_what_its_model_asks_for(tmp_path, mechanism):
    """The costs of exchanges differ: a model of another one would be answered for the price of this one."""
    asked = {"epsilon": 3.0, "row_bound": 1.0, "unit": "row", "mechanism": mechanism}
    federation = Federation(tmp_path, Experiment("exact", 3, 2, privacy=asked), build=noisy_plan)
    done = recorded(federation, 2)
    [first, second] = [Request.from_bytes(request) for request, _ in of_kind(done, "east", Kind.WORK)]
    again = replace(first, nonce=replace(second.nonce, attempt=1), note=second.note)
    serial = federation.site("east").ledger.serial
    assert code_of(federation.site("east").answer(again.to_bytes())) == "protocol"
    assert federation.site("east").ledger.serial == serial


def test_a_new_attempt_is_a_new_charged_release(in_the_open):
    federation, asked = in_the_open
    request = Request.from_bytes(of_kind(asked, "east", Kind.WORK)[0][0])
    again = replace(request, nonce=replace(request.nonce, attempt=1))
    reply = federation.site("east").answer(again.to_bytes())
    assert code_of(reply) is None
    assert [line["attempt"][1:] for line in federation.site("east").ledger.chain.lines()] == [[0, 0], [0, 1]]


def test_a_masked_round_is_summed_once(midway):
    federation, asked = midway
    request = Request.from_bytes(of_kind(asked, "east", Kind.WORK)[0][0])
    for nonce in (replace(request.nonce, attempt=1), replace(request.nonce, round=1)):
        others = {**request.note, "participants": ["east", "north", "south"]}
        reply = federation.site("east").answer(replace(request, nonce=nonce, note=others).to_bytes())
        assert code_of(reply) == "round-closed"
    assert federation.site("east").ledger.serial == 1


@pytest.fixture
def inside(tmp_path):
    """A masked run after its second round, which had no set-up of its own, and all that was said in it."""
    federation = Federation(tmp_path, Experiment("exact", 3, 3, secure_aggregation=True))
    return federation, recorded(federation, 2)


def test_a_round_inside_a_batch_is_summed_once(inside):
    """Neither as another attempt, nor with a set-up after all, nor for another list, nor as the next round."""
    federation, asked = inside
    site, [(work, reply)] = federation.site("east"), of_kind(asked, "east", Kind.WORK, 2)
    assert site.answer(work) == reply
    work = Request.from_bytes(work)
    for changes, code in (
        ({"attempt": 1}, "round-closed"),
        ({"attempt": 1, "phase": 0}, "round-closed"),
        ({"phase": 0}, "out-of-turn"),
        ({"round": 2}, "round-closed"),
        ({"round": 0, "attempt": 1}, "out-of-step"),
        ({"phase": 3}, "conflict"),
    ):
        assert code_of(site.answer(replace(work, nonce=replace(work.nonce, **changes)).to_bytes())) == code
    reduce = Request.from_bytes(of_kind(asked, "east", Kind.REDUCE, 3)[1][0])
    other = replace(reduce, body=Message({"survivors": np.frombuffer(b'["east", "north"]', np.uint8)}, 0.0))
    assert code_of(site.answer(other.to_bytes())) == "conflict"
    for phase in (1, 2):
        nonce = replace(reduce.nonce, phase=phase)
        assert code_of(site.answer(replace(reduce, nonce=nonce).to_bytes())) in ("out-of-turn", "conflict")
    assert site.ledger.serial == 2


@pytest.mark.parametrize("index", [0, 1])
def test_a_server_that_shows_two_lists_of_survivors_gets_no_sum_and_no_second_answer(tmp_path, index):
    federation = Federation(tmp_path, Experiment("exact", 3, 2, secure_aggregation=True), NAMES)
    lists = [
        np.frombuffer(text, np.uint8) for text in (b'["east", "north", "south", "west"]', b'["south", "west", "north"]')
    ]

    def change(name, data):
        request = Request.from_bytes(data)
        if (request.nonce.round, request.nonce.phase) != (index, 3):
            return data
        return replace(request, body=Message({"survivors": lists[name in ("south", "west")]}, 0.0)).to_bytes()

    transport = Recorded(federation.transport().sites, change)
    with pytest.raises(PartyError, match=r"phase 3 \(unmasking\).*No upload was revealed"):
        list(federation.rounds(transport))
    for name, data, reply in transport.asked[-4:]:
        request = Request.from_bytes(data)
        assert code_of(reply) is None
        other = replace(request, body=Message({"survivors": lists[name not in ("south", "west")]}, 0.0))
        assert code_of(federation.site(name).answer(other.to_bytes())) == "conflict"
        again = replace(other, nonce=replace(request.nonce, attempt=1))
        assert code_of(federation.site(name).answer(again.to_bytes())) == "out-of-turn"


def test_a_site_without_keys_for_a_sum_says_so_and_sends_nothing(midway):
    """The second round without a set-up at a site that has lost what it kept of the first, and with strangers."""
    federation, asked = midway
    request = Request.from_bytes(of_kind(asked, "east", Kind.WORK)[0][0])
    nonce, note = replace(request.nonce, round=1, phase=2), {**request.note, "counted": [0, 0]}
    strangers = {**note, "participants": ["east", "north", "south", "west"]}
    site = federation.site("east")
    assert code_of(site.answer(replace(request, nonce=nonce, note=strangers).to_bytes())) == "protocol"
    assert "cannot be in a sum with 'east'" in (federation.folder / "east" / "site.log").read_text()
    files = RunFolder(federation.folder / "east" / "runs" / "run-1")
    tally = files.load_progress(system_source)
    files.save_progress(replace(tally, reduction_state=replace(tally.reduction_state, setup=None)), system_source)
    again = replace(request, nonce=replace(nonce, attempt=1), note=note)
    assert code_of(site.answer(again.to_bytes())) == "protocol"
    assert "has no keys for this sum" in (federation.folder / "east" / "site.log").read_text()
    assert not list(files.path.glob("sent-1-*"))


def test_a_site_that_lost_its_files_gets_a_new_set_up(tmp_path):
    federation = Federation(tmp_path, Experiment("exact", 3, 4, secure_aggregation=True), NAMES)
    rounds = federation.rounds()
    next(rounds), next(rounds)
    rounds.close()
    shutil.rmtree(tmp_path / "east" / "runs")
    asked = recorded(federation)
    phases = [(Request.from_bytes(r).nonce.round, phase_of(r)) for n, r, _ in asked if n == "west"]
    assert phases == [(2, 2), (2, 3), (3, 0), (3, 1), (3, 2), (3, 3), (4, 0)]


def test_secrets_of_a_sum_are_gone_when_it_is_over(inside):
    """A site keeps what later sums of the batch need; and nothing when the run has ended."""
    federation, _ = inside
    files = RunFolder(federation.folder / "east" / "runs" / "run-1")
    kept = files.load_progress(system_source).reduction_state.setup
    assert min(kept.own) == min(kept.held) == 1, "of round 1, which the server has not counted yet here"
    list(federation.rounds())
    assert files.load_progress(system_source).reduction_state is None


def test_old_rounds_and_strange_histories_are_refused(tmp_path):
    federation = Federation(tmp_path, Experiment("fedavg", 3, 3))
    asked = recorded(federation, 3)
    works = [Request.from_bytes(request) for request, _ in of_kind(asked, "east", Kind.WORK)]
    site = federation.site("east")
    assert code_of(site.answer(works[0].to_bytes())) == "out-of-step"
    strange = replace(works[2], nonce=replace(works[2].nonce, attempt=1), note={**works[2].note, "counted": [0, 5]})
    assert code_of(site.answer(strange.to_bytes())) == "out-of-step"
    beyond = replace(works[2], nonce=replace(works[2].nonce, round=3), note={**works[2].note, "counted": [2, 0]})
    assert code_of(site.answer(beyond.to_bytes())) == "rounds"


def test_a_site_restored_from_an_older_copy_refuses_until_its_ledger_is_ahead(tmp_path):
    federation = Federation(tmp_path, Experiment("fedavg", 3, 3))
    rounds = federation.rounds()
    next(rounds)
    shutil.copytree(tmp_path / "east", tmp_path / "old")
    next(rounds)
    shutil.rmtree(tmp_path / "east")
    shutil.move(tmp_path / "old", tmp_path / "east")
    with pytest.raises(SiteRefused, match="'behind'"):
        next(rounds)
    ledger = federation.site("east").ledger
    ledger.append_opening(OpeningBalance(1, "restored from a copy"))
    assert ledger.serial == 2
    with pytest.raises(SiteRefused, match="'out-of-step'"):  # the ledger is ahead, the state is not
        list(federation.rounds())


def test_an_edited_ledger_answers_nothing(in_the_open):
    federation, asked = in_the_open
    path = federation.site("east").ledger.path
    path.write_text(path.read_text().replace('"count": 1', '"count": 0'))
    assert code_of(federation.site("east").answer(asked[0][1])) == "ledger"


def test_requests_for_others_and_unknown_runs_are_refused(in_the_open):
    federation, asked = in_the_open
    request = Request.from_bytes(of_kind(asked, "east", Kind.WORK)[0][0])
    assert code_of(federation.site("north").answer(request.to_bytes())) == "not-addressed"
    unknown = replace(request, nonce=replace(request.nonce, run="another"))
    assert code_of(federation.site("east").answer(unknown.to_bytes())) == "not-started"
    assert code_of(federation.site("east").answer(b"\x00" * 40)) == "unreadable"


@pytest.mark.parametrize("index", [0, 1])
def test_the_server_of_a_masked_run_hears_no_upload(inside, index):
    """Neither with a set-up nor without one."""
    federation, asked = inside
    heard = b"".join(reply for _, _, reply in asked)
    for name in federation.names:
        upload = load_state(federation.folder / name / "runs" / "run-1" / f"work-{index}-0", WorkState).upload
        encoded = federation.plan().reduction.encoding(3).encode(name, upload)
        assert len(encoded) > 12
        for numbers in (encoded, *upload.arrays.values()):
            assert np.ascontiguousarray(numbers).tobytes()[:16] not in heard


@pytest.mark.parametrize("asked_for", [["east", "north", "south"], ["east", "north", "south", "west", "other"]])
def test_a_hidden_round_goes_on_with_the_same_company_or_not_at_all(tmp_path, asked_for):
    federation = Federation(tmp_path, Experiment("syn-ssd-u", 3, 1, local_steps=2, secure_aggregation=True), NAMES)

    def change(name, data):
        request = Request.from_bytes(data)
        if name != "east" or request.nonce.kind is not Kind.WORK or request.nonce.round != 2:
            return data
        return replace(request, note={**request.note, "participants": asked_for}).to_bytes()

    with pytest.raises(SiteRefused, match="'cohort'"):
        recorded(federation, change=change)


POLICIES = {
    "method": Policy(methods=("fnmf",)),
    "rounds": Policy(maximum_rounds=2),
    "rows": Policy(minimum_rows=17),
    "parties": Policy(minimum_parties=4),
    "masks": Policy(secure_aggregation=True),
    "no-columns": Policy(columns=("protein-*",)),
    "columns": Policy(columns=("gene-1*",)),
    "privacy-needed": Policy(privacy=PrivacyBudget(1.0)),
}


@pytest.mark.parametrize("code", POLICIES)
def test_what_the_policy_forbids_is_refused_with_a_code_and_no_local_value(tmp_path, code):
    federation = Federation(tmp_path, Experiment("fedavg", 3, 3))
    federation.sites["north"] = federation.site("north", policy=POLICIES[code])
    transport = Recorded(federation.transport().sites)
    with pytest.raises((PartyError, FeatureError)) as caught:
        list(federation.rounds(transport))
    refused = next(reply for name, _, reply in transport.asked if code_of(reply) is not None)
    assert code_of(refused) == code
    assert code in CODES
    if code != "columns":
        assert repr(code) in str(caught.value)
    said = refused + str(caught.value).encode()
    for name in COLUMNS:
        assert name.encode() not in said
    for value in rows_of("north").ravel():
        assert value.tobytes() not in said
        assert f"{value:.4g}".encode() not in said
    assert b"16" not in refused
    log = (tmp_path / "north" / "site.log").read_text()
    assert f"[{code}]" in log


def test_a_site_signs_no_list_of_fewer_survivors_than_its_policy_asks_for(tmp_path):
    experiment = Experiment("exact", 3, 1, secure_aggregation=True, on_party_error="skip")
    federation = Federation(tmp_path, experiment, NAMES, Policy(minimum_parties=4))
    sites = dict(federation.transport().sites)

    def silent(data):
        assert phase_of(data) < 2, "it has dropped out"
        return federation.site("west").answer(data)

    with pytest.raises(PartyError, match="'parties'"):
        list(federation.rounds(InProcess({**sites, "west": silent})))


def test_the_default_asks_for_two_rows_for_each_component_unless_masks_hide_them(tmp_path):
    open_, masked = (
        Federation(tmp_path / str(m), Experiment("exact", 9, 1, secure_aggregation=m)) for m in (False, True)
    )
    with pytest.raises(SiteRefused, match="'rows'"):
        list(open_.rounds())
    assert list(masked.rounds())


def test_a_site_leaves_out_of_the_round_those_who_refuse_and_says_why(tmp_path):
    federation = Federation(tmp_path, Experiment("fedavg", 3, 2, on_party_error="skip"))
    federation.sites["north"] = federation.site("north", policy=POLICIES["rows"])
    rounds = list(federation.rounds())
    assert [done.participants for done in rounds] == [("east", "south")] * 2
    assert "'rows'" in rounds[0].refused["north"]


def test_a_roster_that_is_not_the_pinned_one_is_refused(tmp_path):
    federation = Federation(tmp_path, Experiment("exact", 3, 1, secure_aggregation=True))
    pinned = {name: bytes(32) for name in NAMES}
    federation.sites["north"] = federation.site("north", roster=pinned)
    with pytest.raises(SiteRefused, match="'roster'"):
        list(federation.rounds())


def test_the_budget_is_over_all_runs_and_attempts(tmp_path):
    policy = Policy(privacy=PrivacyBudget(1.3, unit="party", insecure_noise=True))
    experiment = Experiment("fedavg", 3, 2, local_steps=1, privacy={"unit": "party", "epsilon": 1.0})
    first = Federation(tmp_path, experiment, policy=policy, build=noisy_plan)
    asked = recorded(first, 2)
    shutil.rmtree(tmp_path / "server")
    with pytest.raises(BudgetSpent, match="'budget'"):
        list(replace(first, run="run-2").rounds())
    assert "of epsilon = 1.3" in (tmp_path / "east" / "site.log").read_text()
    work, site = Request.from_bytes(of_kind(asked, "east", Kind.WORK)[1][0]), first.site("east")
    attempts = [replace(work, nonce=replace(work.nonce, attempt=number)) for number in (1, 2)]
    codes = [code_of(site.answer(attempt.to_bytes())) for attempt in attempts]
    assert codes == [None, "budget"]
    spent = site.ledger.load().privacy_ledger
    assert len(spent) == 3
    assert spent.epsilon(1e-5) <= 1.3 < spent.after(spent.entries[0][0]).epsilon(1e-5)


def test_noise_from_a_seed_and_promises_about_others_are_refused(tmp_path):
    experiment = Experiment("fedavg", 3, 2, privacy={"unit": "party", "epsilon": 1.0})
    for code, allowance in (("insecure-noise", PrivacyBudget(9.0, unit="party")), ("privacy-unit", PrivacyBudget(9.0))):
        allowance = replace(allowance, insecure_noise=code != "insecure-noise")
        federation = Federation(tmp_path / code, experiment, policy=Policy(privacy=allowance), build=noisy_plan)
        with pytest.raises(SiteRefused, match=repr(code)):
            list(federation.rounds())


@pytest.mark.parametrize("fault", ["nan", "shape", "other round", "other party", "bytes", "huge"])
def test_what_a_site_must_not_send_is_refused_at_the_server(tmp_path, fault):
    federation = Federation(tmp_path, Experiment("fedavg", 3, 1, on_party_error="skip"))

    def spoiled(data):
        answered = federation.site("north").answer(data)
        reply = Reply.from_bytes(answered)
        if reply.nonce.kind is not Kind.WORK:
            return answered
        H = reply.answer["H"]
        match fault:
            case "nan":
                reply = replace(reply, answer=Message({"H": H * np.nan}, reply.answer.weight))
            case "shape":
                reply = replace(reply, answer=Message({"H": H[:2]}, reply.answer.weight))
            case "other round":
                reply = replace(reply, nonce=replace(reply.nonce, round=1))
            case "other party":
                reply = replace(reply, party="east")
            case "bytes":
                return answered[:-9]
            case "huge":
                reply = replace(reply, answer=Message({"H": H + 1e300}, reply.answer.weight))
        return reply.to_bytes()

    transport = federation.transport()
    transport = InProcess({**transport.sites, "north": spoiled})
    [done] = federation.rounds(transport)
    assert done.participants == ("east", "south")
    assert "north" in done.refused


def test_damaged_files_of_a_site_are_its_own_trouble(in_the_open):
    federation, asked = in_the_open
    path = federation.folder / "east" / "runs" / "run-1" / "start"
    path.write_bytes(path.read_bytes()[:-1])
    assert code_of(federation.site("east").answer(of_kind(asked, "east", Kind.WORK)[0][0])) == "storage"


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    federation = Federation(tmp_path, Experiment("fedavg", 3, 1))
    real, states = __import__("os").replace, {"left": 6}

    def full(source, target):
        states["left"] -= 1
        if states["left"] == 0:
            raise OSError(28, "No space left on device")
        return real(source, target)

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", full)
        with pytest.raises((SiteRefused, OSError)):
            list(federation.rounds())
    assert len(list(federation.rounds())) == 1


def test_columns_are_put_in_the_agreed_order(tmp_path):
    plain = Federation(tmp_path / "plain", Experiment("exact", 3, 2))
    mixed = Federation(tmp_path / "mixed", Experiment("exact", 3, 2))
    order = np.random.default_rng(0).permutation(len(COLUMNS))
    turned = SiteData(rows_of("north")[:, order], tuple(COLUMNS[at] for at in order), secret_of("north"))
    mixed.sites["north"] = mixed.site("north", data=turned)
    *_, one = plain.rounds()
    *_, other = mixed.rounds()
    np.testing.assert_allclose(one.model["H"], other.model["H"], rtol=1e-9)


def test_a_site_that_lacks_columns_is_told_which_and_the_server_how_many(tmp_path):
    federation = Federation(tmp_path, Experiment("exact", 3, 2))
    less = SiteData(rows_of("north")[:, :10], COLUMNS[:10], secret_of("north"))
    federation.sites["north"] = federation.site("north", data=less)
    transport = Recorded(federation.transport().sites)
    with pytest.raises(FeatureError, match=r"north: 0 extra, 2 missing") as caught:
        list(federation.rounds(transport))
    log = (tmp_path / "north" / "site.log").read_text()
    assert log.count("#") == 2
    assert "missing here" in log
    everything = b"".join(r + a for _, r, a in transport.asked) + str(caught.value).encode()
    assert not any(name.encode() in everything for name in COLUMNS)


@pytest.mark.parametrize("lies", [False, True])
def test_with_a_roster_another_site_tells_the_names_past_the_server(tmp_path, lies):
    federation = Federation(tmp_path, Experiment("exact", 3, 2))
    roster = {name: public_key(secret_of(name), name) for name in federation.names}
    less = SiteData(rows_of("north")[:, :10], COLUMNS[:10], secret_of("north"))
    federation.sites = {name: federation.site(name, roster=roster) for name in federation.names}
    federation.sites["north"] = federation.site("north", data=less, roster=roster)

    def change(name, data):
        """A server that puts a key of its own in place of the site's."""
        request = Request.from_bytes(data)
        if not lies or "key" not in request.body.arrays:
            return data
        own = Correspondent("north", "run-1", 99, roster).request_names()
        return replace(request, body=Message({**request.body.arrays, **own.arrays})).to_bytes()

    transport = Recorded(federation.transport().sites, change)
    with pytest.raises(FeatureError, match=r"north: 0 extra, 2 missing"):
        list(federation.rounds(transport))
    log = (tmp_path / "north" / "site.log").read_text()
    assert ("missing here are: gene-10, gene-11" in log) != lies
    everything = b"".join(request + reply for _, request, reply in transport.asked)
    assert not any(name.encode() in everything for name in COLUMNS)


def test_columns_that_all_have_can_be_agreed_on(tmp_path):
    federation = Federation(tmp_path, Experiment("exact", 3, 2, columns="common"))
    less = SiteData(rows_of("north")[:, :10], COLUMNS[:10], secret_of("north"))
    federation.sites["north"] = federation.site("north", data=less)
    *_, done = run_experiment(federation.experiment, federation.transport(), tmp_path / "server", "run-1")
    assert done.model["H"].shape == (3, 10)
    assert "gene-11" in (tmp_path / "east" / "site.log").read_text()


def test_a_site_that_has_lost_everything_but_its_ledger_can_begin_anew(tmp_path):
    federation = Federation(tmp_path, Experiment("fedavg", 3, 3))
    next(federation.rounds())
    shutil.rmtree(tmp_path / "east" / "runs")
    missed, last = federation.rounds()
    assert "east" not in missed.participants
    assert "'not-started'" in missed.refused["east"]
    assert last.participants == federation.names
    assert federation.site("east").ledger.serial == 2


def test_a_policy_that_was_tightened_holds_at_once(tmp_path):
    federation = Federation(tmp_path, Experiment("fedavg", 3, 3))
    next(federation.rounds())
    federation.sites["east"] = federation.site("east", policy=Policy(methods=("exact",)))
    with pytest.raises(SiteRefused, match="'method'"):
        list(federation.rounds())


def test_a_key_of_the_sites_changes_all_hashes_and_so_does_the_run(tmp_path):
    federation = Federation(tmp_path, Experiment("exact", 3, 2))
    note = {"experiment": federation.experiment.to_dict(), "parties": list(federation.names)}
    hello = Request("east", Nonce("run-1"), note=note)
    other = replace(hello, nonce=Nonce("run-2"))
    keyed = federation.site("east", key=b"shared among sites")
    found = [Reply.from_bytes(site.answer(r.to_bytes())).answer["columns"].tobytes() for site, r in
             ((federation.site("east"), hello), (federation.site("east"), other), (keyed, hello))]  # fmt: skip
    assert len(set(found)) == 3
