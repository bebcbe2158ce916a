"""Before the first round: who has begun is kept, a start is the same each time, and an error says what can be done."""

from __future__ import annotations

from dataclasses import replace

import pytest

from partsong.errors import SiteRefused
from partsong.federation.experiment import Experiment
from partsong.federation.policy import Policy
from partsong.federation.server.launch import has_begun
from partsong.federation.transports.base import InProcess, Lost
from partsong.federation.wire import Kind, Request
from tests.federation.federations import NAMES, Federation


class Unheard(InProcess):
    """What a site answers to its start is lost."""

    __slots__ = ()

    def ask(self, requests, timeout):
        replies = InProcess.ask(self, requests, timeout)
        is_start = {name: Request.read(request).nonce.kind is Kind.START for name, request in requests.items()}
        return {name: Lost("cut off") if name == "west" and is_start[name] else replies[name] for name in replies}


def masked_with(bound):
    return Experiment.from_table(
        {
            "method": "exact",
            "rank": 2,
            "rounds": 2,
            "secure_aggregation": True,
            "on_party_error": "skip",
            "mask_bound": bound,
        }
    )


def test_an_experiment_that_is_written_otherwise_is_started_as_it_was(tmp_path):
    """1e6 and 1000000 are equal, and another text: a site that has begun with the one would refuse the other."""
    first = Federation(tmp_path, masked_with(1e6), NAMES)
    rounds = first.rounds(Unheard(first.transport().sites))
    assert next(rounds).participants == NAMES[:3]
    rounds.close()
    assert [done.participants for done in Federation(tmp_path, masked_with(1000000), NAMES).rounds()] == [NAMES]


def changing_its_mind(site, policy):
    """A site whose policy becomes another one between hello and start."""

    def answer(data):
        return (replace(site, policy=policy) if Request.read(data).nonce.kind is Kind.START else site).answer(data)

    return answer


def test_who_has_begun_is_kept_when_another_site_refuses_its_start(tmp_path):
    federation = Federation(tmp_path, Experiment("exact", 2, 2))
    assert not has_begun(tmp_path / "server")
    south = changing_its_mind(federation.site("south"), Policy(maximum_runs=0))
    with pytest.raises(SiteRefused, match="'runs'"):
        list(federation.rounds(InProcess({**federation.transport().sites, "south": south})))
    assert federation.record().started == {"east", "north"}
    assert has_begun(tmp_path / "server")


@pytest.mark.parametrize("stage", ["hello", "start"])
def test_after_a_refusal_by_policy_nobody_is_sent_to_resume(tmp_path, stage):
    federation, policy = Federation(tmp_path, Experiment("exact", 2, 2)), Policy(maximum_runs=0)
    sites = {
        name: federation.site(name, policy=policy).answer
        if stage == "hello"
        else changing_its_mind(federation.site(name), policy)
        for name in federation.names
    }
    with pytest.raises(SiteRefused, match="'runs'") as caught:
        list(federation.rounds(InProcess(sites)))
    told = " ".join(caught.value.__notes__)
    assert "change the experiment, or ask the steward" in told
    assert "Once that allows the run, resume it as it is" in told
    assert "once the site is back" not in told
    assert not has_begun(tmp_path / "server"), "no site has answered a start"
    assert len(list(federation.rounds())) == 2, "it is allowed now"
