"""Server and sites of different versions: an error that names the key and the way out; nothing is lost, or charged."""

from __future__ import annotations

import json

import pytest

from partsong.core.codec import decode, encode
from partsong.errors import DamagedState, SiteRefused
from partsong.federation.experiment import Experiment
from partsong.federation.transports.base import InProcess
from partsong.federation.wire import Kind, Reply, Request
from tests.federation.federations import Federation, assert_same
from tests.federation.test_site import Recorded

SAME_VERSION = "nstall the same version"


@pytest.fixture
def federation(tmp_path):
    return Federation(tmp_path, Experiment("exact", 3, 2, seed=1))


def require_unharmed(federation, n_rounds=2):
    """Once the versions are the same, the run goes on."""
    rounds = list(federation.rounds())
    assert len(rounds) == n_rounds
    assert_same(federation, rounds)
    for name in federation.names:
        charged = [line["attempt"] for line in federation.site(name).ledger.chain.lines()]
        assert charged == [["run-1", index, 0] for index in range(2)]


@pytest.mark.parametrize("kind", [Kind.HELLO, Kind.START])
def test_an_older_site_names_the_key_of_the_experiment_that_it_does_not_know(federation, kind):
    def newer(name, data):
        request = Request.read(data)
        if name == "north" and request.nonce.kind is kind:
            request.note["experiment"]["novel"] = 1
        return request.written()

    with pytest.raises(SiteRefused, match="'experiment'") as caught:
        list(federation.rounds(Recorded(federation.transport().sites, newer)))
    assert SAME_VERSION in caught.value.__notes__[-1]
    assert "no setting 'novel'" in (federation.folder / "north" / "site.log").read_text()
    assert federation.site("north").ledger.serial == 0
    require_unharmed(federation)


@pytest.mark.parametrize("kind", [Kind.START, Kind.WORK])
def test_a_site_that_cannot_read_the_messages_of_a_newer_server_says_so(federation, kind):
    def newer(name, data):
        format_, head, body = decode(data)
        if Request.read(data).nonce.kind is not kind:
            return data
        return encode((format_, json.dumps({**json.loads(head), "novel": 1}), body)).tobytes()

    with pytest.raises(SiteRefused, match=r"'unreadable'.*from another version") as caught:
        list(federation.rounds(Recorded(federation.transport().sites, newer)))
    assert SAME_VERSION in caught.value.__notes__[-1]
    assert "`novel`" in (federation.folder / "north" / "site.log").read_text()
    assert federation.site("north").ledger.serial == 0
    require_unharmed(federation)


def test_a_code_that_only_a_newer_site_knows_is_told_with_the_way_out(federation):
    def answer(data):
        reply = Reply.read(federation.site("north").answer(data))
        head = {"party": "north", "serial": 0, "note": {}, **reply.nonce.told(), "code": "novel", "counts": {}}
        format_, _, _ = decode(reply.written())
        return encode((format_, json.dumps(head), Request("x", reply.nonce).body)).tobytes()

    with pytest.raises(SiteRefused, match=r"'novel'.*not known here") as caught:
        list(federation.rounds(InProcess({**federation.transport().sites, "north": answer})))
    assert SAME_VERSION in caught.value.__notes__[-1]
    require_unharmed(federation)


@pytest.mark.parametrize("where", ["server/run", "north/runs/run-1/start"])
def test_files_of_a_newer_version_are_left_as_they_are(federation, where):
    rounds = federation.rounds()
    next(rounds)
    rounds.close()
    path = federation.folder / where
    own = path.read_bytes()
    newer = own[:8] + b"federation 9".ljust(24, b"\0") + own[32:]
    path.write_bytes(newer)
    with pytest.raises(DamagedState if "server" in where else SiteRefused) as caught:
        list(federation.rounds())
    log = federation.folder / "north" / "site.log"
    said = str(caught.value) if "server" in where else log.read_text()
    assert str(path) in said
    assert "version 9" in said
    assert "Use the version of partsong that wrote it" in said
    assert path.read_bytes() == newer
    path.write_bytes(own)
    require_unharmed(federation, 1)
