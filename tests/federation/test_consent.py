"""Laws of consent in every phase of a run, and of the roster of a run that has begun."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from partsong.core.interfaces import Message
from partsong.errors import BudgetSpent, PartsongError, SiteRefused, TooFewParties
from partsong.federation.columns import ASK, READ, TELL, Correspondent
from partsong.federation.experiment import Experiment
from partsong.federation.ledger import SiteLedger
from partsong.federation.policy import Policy, PrivacyBudget, WordPolicy
from partsong.federation.signing import public_key
from partsong.federation.site.plan import SiteData
from partsong.federation.site.state import StartState
from partsong.federation.texts import SUFFIX
from partsong.federation.transports.base import InProcess
from partsong.federation.wire import Kind, Nonce, Reply, Request, load_state, save_state
from tests.federation.helpers import (
    COLUMNS,
    NAMES,
    Federation,
    TextFederation,
    assert_same,
    model_of,
    noisy_plan,
    rows_of,
    secret_of,
)
from tests.federation.test_asynchronous import arrivals_of, assert_replayed, federation_of
from tests.federation.test_site import code_of, of_kind, recorded
from tests.federation.test_site_limits import lines_of, request_of, said

ROSTER = {name: public_key(secret_of(name), name) for name in NAMES}
OWN = PrivacyBudget(20.0, unit="party", insecure_noise=True)
RUN = (Kind.START, Kind.WORK, Kind.REDUCE)


OF_EVERY_RUN = {
    "method": Policy(methods=("fnmf",)),
    "rounds": Policy(maximum_rounds=1),
    "rows": Policy(minimum_rows=17),
    "parties": Policy(minimum_parties=4),
}
"""Code -> a policy that forbids what the same runs are allowed without it."""
PLAIN = {**OF_EVERY_RUN, "columns": Policy(columns=("gene-1*",)), "privacy-needed": Policy(privacy=PrivacyBudget(1.0))}
UNDER_MASKS = {"mask-bound": Policy(minimum_mask_bound=1e12)}
NOISY = {
    "budget": Policy(privacy=replace(OWN, epsilon=0.5)),
    "privacy-unit": Policy(privacy=replace(OWN, unit="row")),
    "insecure-noise": Policy(privacy=replace(OWN, insecure_noise=False)),
}
OVER_TEXTS = {
    **OF_EVERY_RUN,
    "rows": Policy(minimum_rows=25),
    "masks": Policy(secure_aggregation=True),
    "mask-bound": Policy(minimum_mask_bound=1e20),
    "privacy-needed": Policy(privacy=PrivacyBudget(1.0)),
    "words": Policy(words=WordPolicy(allowed=False)),
}


class Stopped(BaseException):
    """As a process that is killed."""


@dataclass
class Wavering:
    """The site north, which forbids each request in every way before it answers, and again before it repeats that.

    `seen`: kinds and phases of requests that were refused and answered, `wrong`: what else was said. The end of a run
    is told under policies that forbid it, and only the end of an agreement on words is refused. Stopped after `upto`.
    """

    federation: object
    forbidding: dict
    upto: int = 10**9
    seen: set = field(default_factory=set)
    wrong: list = field(default_factory=list)

    def __call__(self, data):
        nonce, site = Request.from_bytes(data).nonce, self.federation.site("north")
        is_agreement = nonce.run.endswith(SUFFIX)
        if nonce.kind is Kind.FINISH:
            self.forbid(data, {} if is_agreement else dict.fromkeys(self.forbidding))
            return site.answer(data)
        if nonce.round > self.upto:
            raise Stopped
        if nonce.kind not in RUN:
            return site.answer(data)
        replies = []
        for _ in range(2):
            before = site.ledger.serial
            self.forbid(data, {})
            self.note(site.ledger.serial == before, nonce, "a refusal was charged")
            replies.append(site.answer(data))
        self.note(code_of(replies[0]) is None and replies[0] == replies[1], nonce, "not the same as before")
        self.seen.add((nonce.kind, nonce.phase))
        return replies[0]

    def forbid(self, data, but):
        """Ask under each policy; the code is what the policy is named by, but for some."""
        for code, policy in self.forbidding_in(Request.from_bytes(data).nonce.run).items():
            found = code_of(replace(self.federation.site("north"), policy=policy).answer(data))
            self.note(found == but.get(code, code), Request.from_bytes(data).nonce, f"{found} instead of {code}")

    def forbidding_in(self, run):
        """In the open no bound is too small."""
        is_masked = self.federation.experiment.secure_aggregation or run.endswith(SUFFIX)
        return {code: policy for code, policy in self.forbidding.items() if is_masked or code != "mask-bound"}

    def note(self, is_right, *told):
        if not is_right:
            self.wrong.append(told)


def between(federation, forbidding, **more):
    north = Wavering(federation, forbidding, **more)
    return north, InProcess({**federation.transport().sites, "north": north})


ALL = {(Kind.START, 0), (Kind.WORK, 0), *((Kind.REDUCE, phase) for phase in (1, 2, 3))}
WITH_A_BATCH = ALL | {(Kind.WORK, 2)}


def masked(folder):
    return Federation(folder, Experiment("exact", 3, 2, secure_aggregation=True, seed=1))


def several(folder):
    """Rounds of several exchanges."""
    return Federation(folder, Experiment("fnmf-by-sums", 3, 2, local_steps=1, secure_aggregation=True, seed=1))


def in_the_open(folder):
    return Federation(folder, Experiment("fedavg", 3, 2, local_steps=1, seed=1))


def private(folder, **settings):
    """Noise, of which one release costs more than 0.5, and two are within 20."""
    told = {"unit": "party", "epsilon": 8.0}
    experiment = Experiment("fedavg", 3, 2, local_steps=1, seed=1, privacy=told, **settings)
    return Federation(folder, experiment, policy=Policy(privacy=OWN), build=noisy_plan)


def private_masked(folder):
    return private(folder, secure_aggregation=True)


@pytest.mark.parametrize(
    ("make", "forbidding", "seen"),
    [
        (masked, PLAIN | UNDER_MASKS, WITH_A_BATCH),
        (private_masked, NOISY | UNDER_MASKS, WITH_A_BATCH),
        (in_the_open, PLAIN | {"masks": Policy(secure_aggregation=True)}, {(Kind.START, 0), (Kind.WORK, 0)}),
        pytest.param(several, PLAIN | UNDER_MASKS, WITH_A_BATCH, marks=pytest.mark.slow),
    ],
)
def test_what_is_forbidden_leaves_in_no_phase_neither_at_first_nor_again(tmp_path, make, forbidding, seen):
    """And as soon as it is allowed again, all goes on as if nothing had been: a refusal closes nothing."""
    federation = make(tmp_path)
    north, transport = between(federation, forbidding)
    rounds = list(federation.rounds(transport))
    assert north.wrong == []
    assert north.seen == seen
    assert_same(federation, rounds)


def test_where_nobody_waits_it_is_the_same(tmp_path):
    federation = federation_of(tmp_path, rounds=2)
    north, transport = between(federation, {**PLAIN, "rounds": Policy(maximum_rounds=5)})
    assert_replayed(federation, list(arrivals_of(federation, transport)))
    assert north.wrong == []
    assert north.seen == {(Kind.START, 0), (Kind.WORK, 0)}


def test_an_agreement_on_words_is_asked_about_in_the_same_way(tmp_path):
    federation = TextFederation(tmp_path)
    north, transport = between(federation, OVER_TEXTS, upto=0)
    with pytest.raises(Stopped):
        list(federation.rounds(transport))
    assert north.wrong == []
    assert north.seen == ALL


@pytest.mark.slow
def test_a_run_over_texts_is_asked_about_in_all_its_phases(tmp_path):
    """The end of its agreement too, for it compares counts with the site's own; not the end of the run."""
    federation = TextFederation(tmp_path)
    north, transport = between(federation, OVER_TEXTS)
    assert len(list(federation.rounds(transport))) == 2
    assert north.wrong == []
    assert north.seen == WITH_A_BATCH
    assert (tmp_path / "north" / "results" / "run-1" / "weights.npy").exists()


def spent_after(site, delta):
    return SiteLedger(site.ledger.path).load().privacy_ledger.epsilon(delta)


def test_what_was_charged_for_an_attempt_is_not_counted_twice(tmp_path):
    """A budget that the charge of this attempt has used up to the last bit lets its phases go on, and no other work."""
    federation, heard, found = private_masked(tmp_path), [], []

    def exactly(data):
        request, site = Request.from_bytes(data), federation.site("north")
        if request.nonce.kind is Kind.REDUCE:
            spent = spent_after(site, OWN.delta)
            site = replace(site, policy=Policy(privacy=replace(OWN, epsilon=spent)))
            heard.append(site.answer(data))
            less = replace(OWN, epsilon=np.nextafter(spent, 0.0))
            again = site.answer(data), replace(site, policy=Policy(privacy=less)).answer(data)
            found.append((again[0] == heard[-1], code_of(heard[-1]), code_of(again[1])))
            return heard[-1]
        if request.nonce.round == 1 and request.nonce.kind is Kind.WORK:
            site = replace(site, policy=Policy(privacy=replace(OWN, epsilon=spent_after(site, OWN.delta))))
        return site.answer(data)

    with pytest.raises(BudgetSpent, match="'budget'"):
        list(federation.rounds(InProcess({**federation.transport().sites, "north": exactly})))
    assert found == [(True, None, "budget")] * 3
    assert federation.site("north").ledger.serial == 1


@pytest.mark.parametrize("is_lasting", [False, True])
def test_work_that_was_charged_and_cut_off_is_not_done_after_the_budget_was_cut(tmp_path, monkeypatch, is_lasting):
    federation = private(tmp_path)
    asked = recorded(federation, 1)
    site, start, work = federation.site("east"), request_of(asked, Kind.START), request_of(asked, Kind.WORK)
    shutil.rmtree(tmp_path / "east")
    assert said(site, start) is None

    def stopped(*args):
        raise Stopped

    with monkeypatch.context() as patched:
        patched.setattr("partsong.federation.site.rounds.RoundHandler._work", stopped)
        with pytest.raises(Stopped):
            site.answer(work.to_bytes())
    assert site.ledger.serial == 1
    less = replace(site, policy=NOISY["budget"])
    assert said(less, work) == said(less, start) == "budget"
    assert said(less if is_lasting else site, work) == ("budget" if is_lasting else None)
    assert site.ledger.serial == 1


@pytest.mark.parametrize("phase", [2, 3])
def test_who_withdraws_in_the_middle_of_a_sum_is_in_it_as_one_who_falls_silent(tmp_path, phase):
    """Before its masked upload has left it is not in the sum; after that it is, if enough others answer."""
    experiment = Experiment("exact", 3, 2, secure_aggregation=True, on_party_error="skip", seed=1)
    federation = Federation(tmp_path, experiment, NAMES)

    def withdrawing(data):
        nonce, site = Request.from_bytes(data).nonce, federation.site("north")
        is_now = nonce.kind is Kind.REDUCE and (nonce.round, nonce.phase) == (0, phase)
        return (replace(site, policy=OF_EVERY_RUN["method"]) if is_now else site).answer(data)

    rounds = list(federation.rounds(InProcess({**federation.transport().sites, "north": withdrawing})))
    assert ("north" in rounds[0].participants) == (phase == 3)
    assert federation.record().dropouts() == {0: {"north": phase}}
    assert_same(federation, rounds)


def test_no_masked_upload_leaves_for_a_sum_that_has_too_few_parties_already(tmp_path):
    federation = Federation(tmp_path, Experiment("exact", 3, 1, secure_aggregation=True, on_party_error="skip"), NAMES)
    sites = dict(federation.transport().sites)
    strict = federation.site("north", policy=Policy(minimum_parties=4))

    def silent(data):
        if Request.from_bytes(data).nonce.kind is Kind.REDUCE:
            raise ConnectionError
        return sites["west"](data)

    with pytest.raises(TooFewParties, match="'parties'"):
        list(federation.rounds(InProcess({**sites, "west": silent, "north": strict.answer})))
    left = [(line["kind"], line["phase"]) for line in lines_of(strict) if line["refusal"] is None]
    assert left[2:] == [("work", 0), ("reduce", 1)], "keys and shares, after hello and start"


def test_no_shares_leave_for_a_set_up_that_has_too_few_parties_already(tmp_path):
    """Four were asked, and keys of three are passed on: a site hears that before it has dealt."""
    federation = Federation(tmp_path, Experiment("exact", 3, 1, secure_aggregation=True), NAMES)
    federation.sites = {"north": federation.site("north", policy=Policy(minimum_parties=4))}

    def without_west(name, data):
        request = Request.from_bytes(data)
        if (request.nonce.kind, request.nonce.phase) != (Kind.REDUCE, 1):
            return data
        heard = {one: body for one, body in request.body.arrays.items() if one != "west"}
        assert len(heard) == 3
        return replace(request, body=Message(heard)).to_bytes()

    with pytest.raises(PartsongError, match=r"'north' refuses.*'parties'"):
        recorded(federation, change=without_west)
    told = [(line["kind"], line["phase"], line["refusal"]) for line in lines_of(federation.sites["north"])]
    assert told[-1] == ("reduce", 1, "parties")


def test_a_budget_that_covers_one_run_and_no_more_lets_it_be_begun_and_resumed(tmp_path):
    whole = private(tmp_path / "whole")
    list(whole.rounds())
    exactly = Policy(privacy=replace(OWN, epsilon=spent_after(whole.site("east"), OWN.delta)))
    federation = replace(private(tmp_path / "exact"), policy=exactly)
    asked, site = recorded(federation, 1), federation.site("east")
    for kind in (Kind.HELLO, Kind.START):
        assert said(site, request_of(asked, kind)) is None, "what is charged of this run is not asked for again"
    assert said(site, request_of(asked, Kind.HELLO), run="run-2") == "budget"
    assert [done.index for done in federation.rounds()] == [1]


def test_no_answer_leaves_again_after_the_roster_or_the_rows_were_changed(tmp_path):
    federation = masked(tmp_path)
    asked, site = recorded(federation, 1), federation.site("east")
    fewer = SiteData(rows_of("east")[1:], COLUMNS, secret_of("east"))
    without_south = {name: key for name, key in ROSTER.items() if name != "south"}
    others = {"roster": replace(site, roster=without_south), "layout": replace(site, data=fewer)}
    for request in (request_of(asked, Kind.WORK), request_of(asked, Kind.REDUCE, 0, 3), request_of(asked, Kind.START)):
        assert {code: said(other, request) for code, other in others.items()} == {code: code for code in others}
        assert said(site, request) is None


def test_names_of_columns_are_not_told_in_a_run_that_is_not_allowed_any_more(tmp_path):
    federation = in_the_open(tmp_path)
    roster = {name: ROSTER[name] for name in federation.names}
    federation.sites = {name: federation.site(name, roster=roster) for name in federation.names}
    asked, site = recorded(federation, 1), federation.sites["east"]
    letter = Correspondent("north", "run-1", secret_of("north"), roster).request_names()
    columns = Reply.from_bytes(of_kind(asked, "east", Kind.HELLO)[0][1]).answer["columns"]
    nonce, body = Nonce("run-1", kind=Kind.NAMES, phase=TELL), Message({**letter.arrays, "columns": columns})
    request = Request("east", nonce, body, {"for": "north"})
    for code in (*OF_EVERY_RUN, "privacy-needed"):
        assert said(replace(site, policy=PLAIN[code]), request) == code
    assert said(site, request) is None


def test_names_are_asked_for_in_a_run_that_the_site_would_begin(tmp_path):
    federation = in_the_open(tmp_path)
    roster = {name: ROSTER[name] for name in federation.names}
    federation.sites = {name: federation.site(name, roster=roster) for name in federation.names}
    hello, site = request_of(recorded(federation, 1), Kind.HELLO), federation.sites["east"]
    request = replace(hello, nonce=Nonce("run-2", kind=Kind.NAMES, phase=ASK))
    for code in (*OF_EVERY_RUN, "privacy-needed"):
        assert said(replace(site, policy=PLAIN[code]), request) == code
    assert said(replace(site, policy=Policy(maximum_runs=1)), request) == "runs"
    assert said(replace(site, roster=ROSTER), request) == "roster"
    assert said(site, replace(request, note={})) == "unreadable", "of a run of which nothing is known"
    assert said(site, request) is None


@pytest.mark.parametrize("body", [{}, {"letter": np.zeros(3)}, {"letter": np.zeros(3), "signature": np.zeros(2)}])
def test_what_is_no_letter_is_told_as_that(tmp_path, body):
    federation = in_the_open(tmp_path)
    roster = {name: ROSTER[name] for name in federation.names}
    federation.sites = {name: federation.site(name, roster=roster) for name in federation.names}
    recorded(federation, 1)
    for phase in (TELL, READ):
        nonce, note = Nonce("run-1", kind=Kind.NAMES, phase=phase), {"for": "north", "from": "north"}
        assert said(federation.sites["east"], Request("east", nonce, Message(body), note)) == "protocol"


def test_hello_tells_no_hashes_where_a_start_would_be_refused(tmp_path):
    federation = private(tmp_path)
    asked, site = recorded(federation, 2), federation.site("east")
    hello = request_of(asked, Kind.HELLO)
    assert said(site, hello) is said(site, hello, run="run-2") is None
    for code, policy in NOISY.items():
        assert said(replace(site, policy=policy), hello, run="run-2") == code
    most = replace(site, policy=replace(site.policy, maximum_runs=1))
    assert said(most, hello, run="run-2") == "runs"
    assert said(most, hello) is None


GROWN = {name: public_key(secret_of(name), name) for name in NAMES}
ROSTER_OF_THREE = {name: GROWN[name] for name in NAMES[:3]}
REKEYED = {**ROSTER_OF_THREE, "south": public_key(secret_of("another"), "south")}


WRONG = {
    "gone": {name: key for name, key in GROWN.items() if name != "south"},
    "rekeyed": REKEYED,
    "none": None,
}
"""Rosters with which a run over ROSTER does not go on."""


def changing(federation, later, where=NAMES[:3]):
    """Sites that pin one roster until they have begun, and from then on another: for each the site as it is now."""
    begun = set()

    def answer_of(name):
        def answer(data):
            nonce = Request.from_bytes(data).nonce
            reply = federation.site(name, roster=later if name in begun else ROSTER_OF_THREE).answer(data)
            if nonce.kind is Kind.START and name in where:
                begun.add(name)
            return reply

        return answer

    return InProcess({name: answer_of(name) for name in federation.names})


@pytest.mark.parametrize("where", [("north",), NAMES[:3]])
@pytest.mark.parametrize("make", [masked, in_the_open])
def test_a_run_under_way_goes_on_while_the_roster_grows(tmp_path, make, where):
    federation = make(tmp_path)
    rounds = list(federation.rounds(changing(federation, GROWN, where)))
    assert len(rounds) == 2
    assert_same(federation, rounds)


def test_where_nobody_waits_it_does_so_too(tmp_path):
    federation = federation_of(tmp_path, rounds=2)
    assert_replayed(federation, list(arrivals_of(federation, changing(federation, GROWN))))


def test_a_run_over_texts_has_begun_with_its_agreement(tmp_path):
    """Pads of words follow from the keys of its parties, not of those who came later."""
    federation = TextFederation(tmp_path)
    rounds = list(federation.rounds(changing(federation, GROWN, ("north",))))
    assert [model_of(done) for done in rounds] == [model_of(done) for done in federation.in_process()]


def test_another_key_ends_a_run_over_texts_in_its_agreement_and_after_it(tmp_path):
    federation, found = TextFederation(tmp_path), []

    def north(data):
        nonce = Request.from_bytes(data).nonce
        is_first = nonce.kind in (Kind.HELLO, Kind.START) and nonce.run.endswith(SUFFIX)
        is_end = nonce.kind is Kind.FINISH and not nonce.run.endswith(SUFFIX)
        if not is_first and not is_end:
            found.append(code_of(federation.site("north", roster=REKEYED).answer(data)))
        return federation.site("north").answer(data)

    assert len(list(federation.rounds(InProcess({**federation.transport().sites, "north": north})))) == 2
    assert len(found) > 10
    assert set(found) == {"roster"}


@pytest.mark.parametrize("make", [masked, in_the_open])
def test_nothing_leaves_without_a_party_or_with_another_key_of_it(tmp_path, make):
    """In no phase, neither at first nor again; and with the keys that it began with all goes on."""
    federation, found, seen = make(tmp_path), [], set()

    def asked_of(data):
        return {why: code_of(federation.site("north", roster=roster).answer(data)) for why, roster in WRONG.items()}

    def north(data):
        nonce, site = Request.from_bytes(data).nonce, federation.site("north", roster=ROSTER_OF_THREE)
        if nonce.kind in (Kind.WORK, Kind.REDUCE):
            found.append(asked_of(data))
        reply = site.answer(data)
        if nonce.kind in (Kind.START, Kind.WORK, Kind.REDUCE):
            found.append(asked_of(data))
            seen.add((nonce.kind, nonce.phase))
        return reply

    rounds = list(federation.rounds(InProcess({**federation.transport().sites, "north": north})))
    assert all(codes == dict.fromkeys(WRONG, "roster") for codes in found)
    assert seen >= {(Kind.START, 0), (Kind.WORK, 0)}
    assert (Kind.REDUCE, 3) in seen or make is in_the_open
    assert_same(federation, rounds)
    log = (tmp_path / "north" / "site.log").read_text()
    assert "not in the pinned roster: south." in log
    assert "with another key in the roster: south." in log


def test_a_run_begins_with_exactly_the_parties_of_the_roster(tmp_path):
    federation = masked(tmp_path)
    asked, site = recorded(federation, 1), federation.site("east", folder=tmp_path / "anew")
    for kind in (Kind.HELLO, Kind.START):
        for roster in (GROWN, WRONG["gone"]):
            assert said(replace(site, roster=roster), request_of(asked, kind)) == "roster"
        assert said(replace(site, roster=ROSTER_OF_THREE), request_of(asked, kind)) is None


def test_a_run_that_an_older_version_has_begun_is_known_by_names(tmp_path):
    federation = masked(tmp_path)
    federation.sites = {name: federation.site(name, roster=ROSTER_OF_THREE) for name in federation.names}
    asked = recorded(federation, 1)
    work, start = request_of(asked, Kind.WORK), tmp_path / "east" / "runs" / "run-1" / "start"
    assert said(federation.site("east", roster=REKEYED), work) == "roster"
    started = load_state(start, StartState)
    assert started.keys == {name: key.hex() for name, key in ROSTER_OF_THREE.items()}
    save_state(start, replace(started, keys={}))
    assert said(federation.site("east", roster=WRONG["gone"]), work) == "roster"
    for roster in (ROSTER_OF_THREE, GROWN, REKEYED):
        assert said(federation.site("east", roster=roster), work) is None
    assert [done.index for done in federation.rounds()] == [1]


def test_names_are_told_to_parties_of_the_run_under_the_keys_it_began_with(tmp_path):
    federation = in_the_open(tmp_path)
    federation.sites = {name: federation.site(name, roster=ROSTER_OF_THREE) for name in federation.names}
    asked = recorded(federation, 1)
    columns = Reply.from_bytes(of_kind(asked, "east", Kind.HELLO)[0][1]).answer["columns"]

    def told(to, roster):
        letter = Correspondent(to, "run-1", secret_of(to), GROWN).request_names()
        body = Message({**letter.arrays, "columns": np.asarray(columns)})
        request = Request("east", Nonce("run-1", kind=Kind.NAMES, phase=TELL), body, {"for": to})
        return said(federation.site("east", roster=roster), request)

    assert told("north", ROSTER_OF_THREE) is told("north", GROWN) is None
    assert told("north", REKEYED) == told("north", WRONG["gone"]) == "roster"
    assert told("west", GROWN) == "protocol", "it is in the roster, and not in the run"


def test_the_coordinator_is_told_what_can_be_done_about_a_roster(tmp_path):
    federation = masked(tmp_path)
    with pytest.raises(SiteRefused, match="'roster'") as caught:
        list(federation.rounds(changing(federation, REKEYED, ("north",))))
    told = caught.value.__notes__[-1]
    assert "let all sites pin the same roster" in told
    assert "start a new run with another --name and another seed" in told
    anew = replace(federation, run="run-2", folder=tmp_path, experiment=replace(federation.experiment, seed=2))
    (tmp_path / "server").rename(tmp_path / "before")
    assert len(list(anew.rounds())) == 2
