"""Signed from end to end, and masks only among sites that received the same messages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partsong.core.interfaces import Layout, Message
from partsong.errors import FileError, FormatError, ParameterError, PartyError, SiteLost, SiteRefused, UploadError
from partsong.federation.audit_log import read_intact_lines
from partsong.federation.experiment import Experiment
from partsong.federation.policy import Policy
from partsong.federation.signing import (
    COORDINATOR,
    SIGNATURE_OVERHEAD,
    Envelope,
    SignedSite,
    SignedTransport,
    bind_context,
    public_key,
    request_digest,
    run_context,
    signer,
    verifier,
    vocabulary_context,
)
from partsong.federation.site.plan import SiteData, build_plan
from partsong.federation.transports.base import InProcess, NoReply
from partsong.federation.wire import Kind, Refusal, Reply, Request
from tests.federation.helpers import (
    COLUMNS,
    NAMES,
    Federation,
    TextFederation,
    assert_same,
    rows_of,
    secret_of,
    texts_of,
)
from tests.federation.test_site import Recorded

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
    return SignedTransport(transport, signer(secret, COORDINATOR), known)


@pytest.fixture
def federation(tmp_path):
    return Federation(tmp_path, Experiment("fedavg", 3, 1))


def test_a_signed_run_gives_the_bits_of_one_process(federation):
    assert_same(federation, list(federation.rounds(signed(relay_of(federation)))))


def test_what_was_pushed_is_opened_as_it_arrives(federation):
    transport = signed(relay_of(federation))
    asked = recorded_requests(federation)
    transport.push({name: asked[name] for name in PARTIES}, 1.0)
    heard = {name: Reply.from_bytes(reply) for name, reply in (transport.next_reply(1.0) for _ in PARTIES)}
    assert sorted(heard) == sorted(PARTIES)
    assert transport.next_reply(0.0) is None
    transport.push({"east": asked["east"]}, 1.0)
    assert set(transport.cancel()) == {"east"}


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
    sent = request if secret is None else Envelope("request", "east").sign(signer(secret, COORDINATOR), request)
    reply = relay.ask({"east": sent}, 1.0)["east"]
    opened = Envelope("reply", "east", request_digest(sent)).verify(
        verifier(public_key(secret_of("east"), "east")), reply
    )
    assert Reply.from_bytes(opened).answer == Refusal("unsigned")
    [line], error = read_intact_lines(federation.site("east").audit.path)
    assert (line["refusal"], error) == ("unsigned", None)
    assert not (federation.site("east").folder / "runs").exists()


def test_a_coordinator_with_another_key_is_told_so(federation):
    with pytest.raises(SiteRefused, match="'unsigned'"):
        list(federation.rounds(signed(relay_of(federation), secret=SECRET + 1)))


@pytest.mark.parametrize("kind", [Kind.HELLO, Kind.START, Kind.WORK])
def test_a_request_that_was_changed_on_its_way_is_not_acted_on(federation, kind):
    def changed(name, data):
        request = Request.from_bytes(data[:-SIGNATURE_OVERHEAD])
        if name != "east" or request.nonce.kind != kind:
            return data
        other = Request(request.party, request.nonce, request.body, {**request.note, "more": 1}, request.seen)
        return other.to_bytes() + data[-SIGNATURE_OVERHEAD:]

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
        SignedTransport(relay_of(federation), signer(SECRET, COORDINATOR), {})


def test_who_is_lost_stays_lost(federation):
    relay = TwoStageProgram({"east": lambda data: 1 / 0})
    assert signed(relay).ask({"east": b"x"}, 1.0)["east"] == NoReply("ZeroDivisionError")


KEY = verifier(public_key(SECRET, COORDINATOR))
WAY = Envelope("request", "east")
SIGNED = WAY.sign(signer(SECRET, COORDINATOR), b"some content")


@pytest.mark.parametrize(
    "way", [Envelope("reply", "east"), Envelope("request", "north"), Envelope("request", "east", "x")]
)
def test_a_signature_serves_on_its_way_alone(way):
    assert WAY.verify(KEY, SIGNED) == b"some content"
    with pytest.raises(FormatError, match="signature"):
        way.verify(KEY, SIGNED)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_whatever_is_changed_is_found(data):
    place = data.draw(st.integers(0, len(SIGNED) - 1))
    how = data.draw(st.sampled_from(("flip", "cut", "add")))
    flipped = SIGNED[:place] + bytes([SIGNED[place] ^ 1 << data.draw(st.integers(0, 7))]) + SIGNED[place + 1 :]
    changed = {"flip": flipped, "cut": SIGNED[:place], "add": SIGNED[:place] + b"x" + SIGNED[place:]}[how]
    with pytest.raises(FormatError):
        WAY.verify(KEY, changed)


ROSTER = {name: public_key(secret_of(name), name) for name in NAMES[:3]}
MASKED = Policy(secure_aggregation=True, minimum_parties=3)
SETTINGS = {"rank": 2, "rounds": 2, "secure_aggregation": True, "mask_bound": 1e6}


class Pinned(Federation):
    def site(self, name, **changes):
        data = SiteData(rows_of(name), COLUMNS, secret_of(name))
        return replace(super().site(name), roster=ROSTER, data=data, **changes)

    def plan(self):
        return build_plan(self.experiment.to_dict(), 3, ROSTER)


def lied_to(tmp_path, change, **experiment):
    federation = Pinned(tmp_path, Experiment.from_table({**SETTINGS, **experiment}), policy=MASKED)
    transport = Recorded(federation.transport().sites, change)
    with pytest.raises(PartyError, match=r"phase 0 \(keys\).*other settings"):
        list(federation.rounds(transport))
    assert {Request.from_bytes(request).nonce.phase for _, request, _ in transport.asked} == {0}, (
        "nothing has been masked"
    )


def test_a_server_that_tells_others_another_experiment_gets_no_sum(tmp_path):
    """Pulled to the model by force, the others would send nothing but that, and the sum would be one site's upload."""

    def change(name, request):
        read = Request.from_bytes(request)
        if name == "east" or read.note.get("experiment") is None:
            return request
        read.note["experiment"]["strength"] = 1e9
        return Request(name, read.nonce, read.body, read.note, read.seen).to_bytes()

    lied_to(tmp_path, change, method="fedprox", strength=0.0, local_steps=2)


def test_a_server_that_tells_one_other_columns_gets_no_sum(tmp_path):
    """In columns that are zero at all others, the sum would be one site's own."""

    def change(name, request):
        read = Request.from_bytes(request)
        if name != "east" or read.nonce.kind is not Kind.START:
            return request
        turned = Message({"columns": np.ascontiguousarray(np.asarray(read.body["columns"])[::-1])})
        return Request(name, read.nonce, turned, read.note, read.seen).to_bytes()

    lied_to(tmp_path, change, method="exact")


def of_texts(folder):
    experiment = Experiment("exact", 3, 2, secure_aggregation=True, mask_bound=1e6, words={"min_documents": 2})
    return TextFederation(folder, experiment, policies=dict.fromkeys(NAMES, MASKED))


def told_other_frequencies(tmp_path, lie):
    """A run over texts by tf-idf, masked, and all that was asked for after the agreement on words; `lie(name, m)`: df
    of each of m words, and n.
    """
    federation = of_texts(tmp_path)

    def change(name, request):
        read = Request.from_bytes(request)
        if read.nonce.kind is not Kind.FINISH or not read.nonce.run.endswith(".words"):
            return request
        documents, n_documents = lie(name, len(read.body["documents"]))
        told = {"documents": np.asarray(documents), "n_documents": np.array([n_documents])}
        body = Message({**read.body.arrays, **told}, read.body.weight)
        return Request(name, read.nonce, body, read.note, read.seen).to_bytes()

    transport = Recorded(federation.transport().sites, change)

    def rounds():
        list(federation.rounds(transport))

    return federation, transport, rounds


def test_a_server_that_tells_one_other_frequencies_of_words_gets_no_sum(tmp_path):
    """Weights of 1 and of 37 by turns: in some columns nearly all of a sum would be one site's own."""
    n, here = 2**52, len(texts_of("east"))
    _, transport, rounds = told_other_frequencies(
        tmp_path, lambda name, m: (np.where((np.arange(m) < 2) == (name == "east"), 3 * here, n - here), n)
    )
    with pytest.raises(PartyError, match=r"phase 0 \(keys\).*other settings"):
        rounds()
    nonces = [Request.from_bytes(request).nonce for _, request, _ in transport.asked]
    assert {nonce.phase for nonce in nonces if nonce.run == "run-1"} == {0}, "nothing has been masked"
    assert any(nonce.run == "run-1" and nonce.kind is Kind.WORK for nonce in nonces)


@pytest.mark.parametrize(
    "lie",
    [lambda m: (np.full(m, 2), 72), lambda m: (np.full(m, 71), 72), lambda m: (np.full(m, 23), 23)],
    ids=["below own", "above others", "fewer than here"],
)
def test_frequencies_that_cannot_be_sums_with_a_site_in_them_end_the_agreement_at_one_answer(tmp_path, lie):
    """Whether they can be is a comparison with what masks hide: no second one is answered, not of the true sums."""
    federation, _, rounds = told_other_frequencies(tmp_path, lambda name, m: lie(m))
    with pytest.raises(SiteRefused, match="'protocol'"):
        rounds()
    assert "cannot be the sums" in federation.log("east")
    assert not any(word in federation.log("east") for text in texts_of("east") for word in text.split()[:4])
    with pytest.raises(SiteRefused, match="'protocol'"):
        list(federation.rounds())
    assert "This agreement on words is closed at this site" in federation.log("east")
    assert not list(tmp_path.glob("*/runs/run-1.words/vocabulary"))


def test_frequencies_that_are_none_are_refused_whatever_a_site_holds(tmp_path):
    lies = [(73, 72), (60, 2**53), (np.nan, 72), (60, np.inf), (60, -1)]
    federation, _, _ = told_other_frequencies(tmp_path, lambda name, m: None)
    for told in lies:
        _, _, rounds = told_other_frequencies(tmp_path, lambda name, m, told=told: (np.full(m, told[0]), told[1]))
        with pytest.raises(SiteRefused, match="'protocol'"):
            rounds()
    assert federation.log("east").count("is invalid") == len(lies)
    assert len(list(federation.rounds())) == 2


def test_the_server_of_a_masked_run_over_texts_goes_on_with_the_record_of_their_words(tmp_path):
    federation = of_texts(tmp_path)
    rounds = federation.rounds()
    next(rounds)
    rounds.close()
    words = tmp_path / "server" / "words"
    words.rename(tmp_path / "moved")
    with pytest.raises(FileError, match="no record of the agreement on words"):
        list(federation.rounds())
    (tmp_path / "moved").rename(words)
    assert len(list(federation.rounds())) == 1


def test_the_context_is_that_of_all_that_a_start_tells():
    columns, layout = np.arange(32, dtype=np.uint8).reshape(2, 16), Layout(("a", "b", "c"), 2, 5, "float64")
    same = run_context({"x": 1, "y": [2]}, columns, layout)
    assert same == run_context({"y": [2], "x": 1}, columns.copy(), layout)
    others = [({"x": 1, "y": [3]}, columns, layout), ({"x": 1, "y": [2]}, columns[::-1], layout)]
    others += [({"x": 1, "y": [2]}, columns, replace(layout, seed=6))]
    assert len({same, *(run_context(*other) for other in others)}) == 4
    masks = Experiment.from_table({**SETTINGS, "method": "exact"}).reduction(3, ROSTER)
    assert bind_context(same, masks).context == same.encode()
    open_sums = Experiment.from_table({"method": "exact", "rank": 2, "rounds": 1}).reduction(3)
    assert bind_context(same, open_sums) == open_sums
    words = [vocabulary_context(*told) for told in (([1, 2], 3), ([2, 1], 3), ([1, 2], 4))]
    assert words[0] == vocabulary_context(np.array([1.0, 2.0]), np.float64(3))
    assert len({*words, same}) == 4
    assert bind_context(same, bind_context(words[0], masks)).context == (words[0] + same).encode()
