"""Messages between server and sites, also of different versions: as they were sent, or an error with a way out."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from partsong.core.codec import decode, encode
from partsong.core.interfaces import Message
from partsong.errors import DamagedState, FormatError, SiteRefused
from partsong.federation.experiment import Experiment
from partsong.federation.transports.base import InProcess
from partsong.federation.wire import Kind, Nonce, Refusal, Reply, Request
from tests.federation.helpers import Federation, assert_same
from tests.federation.test_site import Recorded

quick = settings(max_examples=60, deadline=None, derandomize=True)
arrays = hnp.arrays(
    st.sampled_from([np.float64, np.float32, np.int64, np.uint64, np.uint8, np.bool_]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
either_order = st.one_of(arrays, arrays.map(np.asfortranarray))
messages = st.builds(
    Message,
    st.dictionaries(st.text(min_size=1, max_size=8), either_order, max_size=3),
    st.floats(allow_nan=False, allow_infinity=False),
)


def sample():
    body = Message({"H": np.arange(6.0).reshape(2, 3), "n": np.array([3])}, 2.5)
    return Reply("north", Nonce("run-1", 3, 1, Kind.REDUCE, 2), body, 7, {"type": "float64"})


@quick
@given(message=messages, numbers=st.tuples(*[st.integers(0, 2**53 - 1)] * 4), kind=st.sampled_from(Kind))
def test_what_is_written_is_read(message, numbers, kind):
    nonce = Nonce("run.1", numbers[0], numbers[1], kind, numbers[2])
    request = Request("party ä", nonce, message, {"participants": ["a", "b"], "counted": None}, numbers[3])
    for read, sent in (
        (Request.from_bytes(request.to_bytes()), request),
        (Reply.from_bytes(Reply("x", nonce, message, numbers[3]).to_bytes()), None),
    ):
        body = read.body if isinstance(read, Request) else read.answer
        assert read.nonce == nonce
        assert body.weight == message.weight
        assert body.signature == message.signature
        for name, array in message.arrays.items():
            assert body[name].tobytes("A") == np.asarray(array).tobytes("A")
            assert np.isfortran(body[name]) == np.isfortran(np.asarray(array)) or body[name].size <= 1
        if sent is not None:
            assert (read.note, read.party, read.seen) == (sent.note, sent.party, sent.seen)
            assert read.digest == sent.digest


def test_the_digest_is_of_all_but_what_was_seen():
    request = Request("a", Nonce("r"), Message({"H": np.ones((2, 2))}), {"x": 1}, 3)
    assert replace(request, seen=4).digest == request.digest
    for other in (
        replace(request, note={"x": 2}),
        replace(request, body=Message({"H": np.ones((2, 2))}, 2.0)),
        replace(request, body=Message({"H": np.ones((2, 2), np.float32)})),
        replace(request, body=Message({"H": np.ones((4, 1))})),
        replace(request, nonce=Nonce("r", 1)),
        replace(request, party="b"),
    ):
        assert other.digest != request.digest


@quick
@given(data=st.binary(max_size=300))
def test_hostile_bytes_are_refused(data):
    for read in (Request.from_bytes, Reply.from_bytes):
        with pytest.raises(FormatError):
            read(data)


@quick
@given(place=st.integers(0, 10_000), bit=st.integers(0, 7), cut=st.integers(0, 10_000))
def test_damaged_messages_are_refused_or_another_message(place, bit, cut):
    whole = sample().to_bytes()
    flipped = bytearray(whole)
    flipped[place % len(whole)] ^= 1 << bit
    for data in (bytes(flipped), whole[: cut % len(whole)]):
        try:
            Reply.from_bytes(data)
        except FormatError:
            continue
        assert len(data) == len(whole)


leaves = st.none() | st.booleans() | st.integers(-3, 2**60) | st.text(max_size=5) | st.just([[]])


FIELDS = ["run", "round", "attempt", "kind", "phase", "party", "serial", "note", "code", "counts"]
values = leaves | st.lists(leaves, max_size=2) | st.dictionaries(st.text(max_size=3), leaves, max_size=2)


@quick
@given(field=st.sampled_from(FIELDS), value=values)
def test_fields_of_another_kind_are_refused(field, value):
    kind, head, body = decode(sample().to_bytes())
    data = encode((kind, json.dumps({**json.loads(head), field: value}), body)).tobytes()
    try:
        read = Reply.from_bytes(data)
    except FormatError:
        return
    head = {**read.nonce.to_dict(), "party": read.party, "serial": read.serial, "note": read.note}
    refusal = read.answer if isinstance(read.answer, Refusal) else Refusal("")
    assert {**head, "code": refusal.code, "counts": refusal.counts}[field] == value


def test_a_message_beyond_the_limit_is_not_looked_at():
    with pytest.raises(FormatError, match="the limit is 100"):
        Reply.from_bytes(sample().to_bytes(), 100)


@pytest.mark.parametrize("run", ["", "../up", "a/b", ".hidden", "a" * 65, "a b", "a\n"])
def test_a_run_s_name_cannot_leave_its_folder(run):
    with pytest.raises(FormatError):
        Nonce(run)


def test_arrays_of_objects_and_tensors_of_text_cannot_be_sent():
    with pytest.raises(FormatError, match="cannot be sent"):
        Request("a", Nonce("r"), Message({"H": np.array([None])})).to_bytes()


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
        request = Request.from_bytes(data)
        if name == "north" and request.nonce.kind is kind:
            request.note["experiment"]["novel"] = 1
        return request.to_bytes()

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
        if Request.from_bytes(data).nonce.kind is not kind:
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
        reply = Reply.from_bytes(federation.site("north").answer(data))
        head = {"party": "north", "serial": 0, "note": {}, **reply.nonce.to_dict(), "code": "novel", "counts": {}}
        format_, _, _ = decode(reply.to_bytes())
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
