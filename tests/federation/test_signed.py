"""Signed from end to end: who hands messages on can neither change, invent, repeat nor redirect one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partsong.errors import FormatError, ParameterError, SiteLost, SiteRefused, UploadError
from partsong.federation.audit_log import sound_lines
from partsong.federation.experiment import Experiment
from partsong.federation.signing import (
    ADDED_BYTES,
    COORDINATOR,
    Signed,
    SignedSite,
    Way,
    identity,
    public_key,
    signer,
    verifier,
)
from partsong.federation.transports.base import InProcess, Lost
from partsong.federation.wire import Kind, Refusal, Reply, Request
from tests.federation.federations import NAMES, Federation, assert_same, secret_of

SECRET = 4711
PARTIES = NAMES[:3]


class TwoStageProgram(InProcess):
    """Hands messages on, and does something to them on their way."""

    __slots__ = ("down", "seen", "up")

    def __init__(self, sites, down=lambda name, data: data, up=lambda name, data: data):
        super().__init__(sites)
        for attribute, value in (("down", down), ("up", up), ("seen", [])):
            object.__setattr__(self, attribute, value)

    def ask(self, requests, timeout):
        self.seen.extend(requests.items())
        changed = {name: self.down(name, request) for name, request in requests.items()}
        return {name: self.up(name, reply) for name, reply in super().ask(changed, timeout).items()}


def sealed_site(federation, name, coordinator=SECRET):
    site = federation.site(name)
    pinned = verifier(public_key(coordinator, COORDINATOR))
    return SignedSite(name, site.answer, site.refuse, signer(secret_of(name), name), pinned)


def relay_of(federation, **changes):
    return TwoStageProgram({name: sealed_site(federation, name) for name in federation.names}, **changes)


def signed(transport, secret=SECRET, keys=secret_of):
    known = {name: verifier(public_key(keys(name), name)) for name in PARTIES}
    return Signed(transport, signer(secret, COORDINATOR), known)


@pytest.fixture
def federation(tmp_path):
    return Federation(tmp_path, Experiment("fedavg", 3, 1))


def test_a_signed_run_gives_the_bits_of_one_process(federation):
    assert_same(federation, list(federation.rounds(signed(relay_of(federation)))))


def test_what_was_pushed_is_opened_as_it_arrives(federation):
    transport = signed(relay_of(federation))
    asked = recorded_requests(federation)
    transport.push({name: asked[name] for name in PARTIES}, 1.0)
    heard = {name: Reply.read(reply) for name, reply in (transport.arrived(1.0) for _ in PARTIES)}
    assert sorted(heard) == sorted(PARTIES)
    assert transport.arrived(0.0) is None
    transport.push({"east": asked["east"]}, 1.0)
    assert set(transport.recall()) == {"east"}


def recorded_requests(federation):
    """The first request to each site."""
    relay = TwoStageProgram({name: lambda data: b"" for name in PARTIES})
    with pytest.raises(UploadError, match="cannot be read"):
        list(federation.rounds(relay))
    return dict(relay.seen)


@pytest.mark.parametrize("secret", [None, SECRET + 1])
def test_a_request_that_the_coordinator_has_not_signed_is_refused_before_it_is_read(federation, secret):
    relay = relay_of(federation)
    request = recorded_requests(federation)["east"]
    sent = request if secret is None else Way("request", "east").signed(signer(secret, COORDINATOR), request)
    reply = relay.ask({"east": sent}, 1.0)["east"]
    opened = Way("reply", "east", identity(sent)).opened(verifier(public_key(secret_of("east"), "east")), reply)
    assert Reply.read(opened).answer == Refusal("unsigned")
    [line], error = sound_lines(federation.site("east").audit.path)
    assert (line["refusal"], error) == ("unsigned", None)
    assert not (federation.site("east").folder / "runs").exists()


def test_a_coordinator_with_another_key_is_told_so(federation):
    with pytest.raises(SiteRefused, match="'unsigned'"):
        list(federation.rounds(signed(relay_of(federation), secret=SECRET + 1)))


@pytest.mark.parametrize("kind", [Kind.HELLO, Kind.START, Kind.WORK])
def test_a_request_that_was_changed_on_its_way_is_not_acted_on(federation, kind):
    def changed(name, data):
        request = Request.read(data[:-ADDED_BYTES])
        if name != "east" or request.nonce.kind != kind:
            return data
        other = Request(request.party, request.nonce, request.body, {**request.note, "more": 1}, request.seen)
        return other.written() + data[-ADDED_BYTES:]

    with pytest.raises(SiteLost, match="east"):
        list(federation.rounds(signed(relay_of(federation, down=changed))))
    assert federation.site("east").ledger.serial == 0


def test_a_reply_that_was_changed_or_made_by_the_relay_is_not_used(federation):
    def changed(name, data):
        return data[:100] + bytes([data[100] ^ 1]) + data[101:] if name == "south" else data

    with pytest.raises(SiteLost, match="not signed by its key in the roster"):
        list(federation.rounds(signed(relay_of(federation, up=changed))))


def test_a_reply_to_another_request_is_not_used(federation):
    first = {}

    def repeated(name, data):
        return first.setdefault(name, data) if name == "south" else data

    with pytest.raises(SiteLost, match="south"):
        list(federation.rounds(signed(relay_of(federation, up=repeated))))


def test_a_reply_of_another_site_is_not_used(federation):
    relay = relay_of(federation)
    relay.sites["south"] = sealed_site(federation, "north")
    with pytest.raises(SiteLost, match="south"):
        list(federation.rounds(signed(relay)))


def test_a_site_whose_key_is_not_known_is_not_asked(federation):
    with pytest.raises(ParameterError, match="east"):
        Signed(relay_of(federation), signer(SECRET, COORDINATOR), {})


def test_who_is_lost_stays_lost(federation):
    relay = TwoStageProgram({"east": lambda data: 1 / 0})
    assert signed(relay).ask({"east": b"x"}, 1.0)["east"] == Lost("ZeroDivisionError")


KEY = verifier(public_key(SECRET, COORDINATOR))
WAY = Way("request", "east")
SIGNED = WAY.signed(signer(SECRET, COORDINATOR), b"some content")


@pytest.mark.parametrize("way", [Way("reply", "east"), Way("request", "north"), Way("request", "east", "x")])
def test_a_signature_serves_on_its_way_alone(way):
    assert WAY.opened(KEY, SIGNED) == b"some content"
    with pytest.raises(FormatError, match="signature"):
        way.opened(KEY, SIGNED)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_whatever_is_changed_is_found(data):
    place = data.draw(st.integers(0, len(SIGNED) - 1))
    how = data.draw(st.sampled_from(("flip", "cut", "add")))
    flipped = SIGNED[:place] + bytes([SIGNED[place] ^ 1 << data.draw(st.integers(0, 7))]) + SIGNED[place + 1 :]
    changed = {"flip": flipped, "cut": SIGNED[:place], "add": SIGNED[:place] + b"x" + SIGNED[place:]}[how]
    with pytest.raises(FormatError):
        WAY.opened(KEY, changed)
