"""Laws of the roster in a run that has begun: its parties stay, under their keys; who else comes does not matter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from partsong.core.interfaces import Message
from partsong.errors import SiteRefused
from partsong.federation.columns import TELL, Correspondent
from partsong.federation.experiment import Experiment
from partsong.federation.signing import public_key
from partsong.federation.site.state import Started
from partsong.federation.texts import SUFFIX
from partsong.federation.transports.base import InProcess
from partsong.federation.wire import Kind, Nonce, Reply, Request, load_state, save_state
from tests.federation.federations import NAMES, Federation, assert_same, model_of, secret_of
from tests.federation.test_asynchronous import arrivals_of, assert_replayed, federation_of
from tests.federation.test_site import code_of, of_kind, recorded
from tests.federation.test_site_limits import request_of, said
from tests.federation.word_federations import TextFederation

GROWN = {name: public_key(secret_of(name), name) for name in NAMES}
ROSTER = {name: GROWN[name] for name in NAMES[:3]}
REKEYED = {**ROSTER, "south": public_key(secret_of("another"), "south")}
WRONG = {
    "gone": {name: key for name, key in GROWN.items() if name != "south"},
    "rekeyed": REKEYED,
    "none": None,
}
"""Rosters with which a run over ROSTER does not go on."""


def masked(folder):
    return Federation(folder, Experiment("exact", 3, 2, secure_aggregation=True, seed=1))


def in_the_open(folder):
    return Federation(folder, Experiment("fedavg", 3, 2, local_steps=1, seed=1))


def changing(federation, later, where=NAMES[:3]):
    """Sites that pin one roster until they have begun, and from then on another: for each the site as it is now."""
    begun = set()

    def answer_of(name):
        def answer(data):
            nonce = Request.read(data).nonce
            reply = federation.site(name, roster=later if name in begun else ROSTER).answer(data)
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
        nonce = Request.read(data).nonce
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
        nonce, site = Request.read(data).nonce, federation.site("north", roster=ROSTER)
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
    assert "with another key there: south." in log


def test_a_run_begins_with_exactly_the_parties_of_the_roster(tmp_path):
    federation = masked(tmp_path)
    asked, site = recorded(federation, 1), federation.site("east", folder=tmp_path / "anew")
    for kind in (Kind.HELLO, Kind.START):
        for roster in (GROWN, WRONG["gone"]):
            assert said(replace(site, roster=roster), request_of(asked, kind)) == "roster"
        assert said(replace(site, roster=ROSTER), request_of(asked, kind)) is None


def test_a_run_that_an_older_version_has_begun_is_known_by_names(tmp_path):
    federation = masked(tmp_path)
    federation.sites = {name: federation.site(name, roster=ROSTER) for name in federation.names}
    asked = recorded(federation, 1)
    work, start = request_of(asked, Kind.WORK), tmp_path / "east" / "runs" / "run-1" / "start"
    assert said(federation.site("east", roster=REKEYED), work) == "roster"
    started = load_state(start, Started)
    assert started.keys == {name: key.hex() for name, key in ROSTER.items()}
    save_state(start, replace(started, keys={}))
    assert said(federation.site("east", roster=WRONG["gone"]), work) == "roster"
    for roster in (ROSTER, GROWN, REKEYED):
        assert said(federation.site("east", roster=roster), work) is None
    assert [done.index for done in federation.rounds()] == [1]


def test_names_are_told_to_parties_of_the_run_under_the_keys_it_began_with(tmp_path):
    federation = in_the_open(tmp_path)
    federation.sites = {name: federation.site(name, roster=ROSTER) for name in federation.names}
    asked = recorded(federation, 1)
    columns = Reply.read(of_kind(asked, "east", Kind.HELLO)[0][1]).answer["columns"]

    def told(to, roster):
        letter = Correspondent(to, "run-1", secret_of(to), GROWN).asks()
        body = Message({**letter.arrays, "columns": np.asarray(columns)})
        request = Request("east", Nonce("run-1", kind=Kind.NAMES, phase=TELL), body, {"for": to})
        return said(federation.site("east", roster=roster), request)

    assert told("north", ROSTER) is told("north", GROWN) is None
    assert told("north", REKEYED) == told("north", WRONG["gone"]) == "roster"
    assert told("west", GROWN) == "protocol", "it is in the roster, and not in the run"


def test_the_coordinator_is_told_what_can_be_done_about_a_roster(tmp_path):
    federation = masked(tmp_path)
    with pytest.raises(SiteRefused, match="'roster'") as caught:
        list(federation.rounds(changing(federation, REKEYED, ("north",))))
    told = caught.value.__notes__[-1]
    assert "all sites have to pin the same roster" in told
    assert "begin a new run, under another --name and with another seed" in told
    anew = replace(federation, run="run-2", folder=tmp_path, experiment=replace(federation.experiment, seed=2))
    (tmp_path / "server").rename(tmp_path / "before")
    assert len(list(anew.rounds())) == 2
