"""The key that sites share: names of columns cannot be tested without it, and who has another one is told so."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partsong.errors import FormatError, SiteRefused
from partsong.federation.columns import hashed, key_mark, labels_of
from partsong.federation.experiment import Experiment
from partsong.federation.setup.credentials import SharedKey
from partsong.federation.wire import Reply
from tests.federation.federations import COLUMNS, Federation
from tests.federation.test_site import recorded

KEY = SharedKey(bytes(range(16)))


def with_keys(tmp_path, on_party_error="raise", **keys):
    federation = Federation(tmp_path, Experiment("fedavg", 3, 1, on_party_error=on_party_error))
    for name, key in keys.items():
        federation.sites[name] = federation.site(name, key=b"" if key is None else key.key_for("columns"))
    return federation


def test_a_key_is_read_as_people_write_it():
    text = SharedKey.made().text
    assert re.fullmatch(r"([A-Z2-7]{4}-){7}[A-Z2-7]{4}", text)
    for written in (text, text.lower(), text.replace("-", ""), f"  {text}\n", text.replace("-", " - ")):
        assert SharedKey.read(written).text == text
    assert SharedKey.read(text.replace("O", "0").replace("I", "1")).text == text
    assert SharedKey.made() != SharedKey.made()
    assert text not in repr(SharedKey.read(text))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(place=st.integers(0, 38), letter=st.sampled_from("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"))
def test_a_letter_that_is_wrong_is_noticed(place, letter):
    text = KEY.text
    if text[place] in ("-", letter):
        return
    with pytest.raises(FormatError, match="every single one counts"):
        SharedKey.read(text[:place] + letter + text[place + 1 :])


@pytest.mark.parametrize("text", ["", "hello", KEY.text[:-1], KEY.text + "A", "é" * 32, "=" * 32])
def test_what_is_no_key_is_refused(text):
    with pytest.raises(FormatError):
        SharedKey.read(text)


def test_a_server_calls_columns_by_hashes_unless_their_names_are_public():
    hashes = hashed(COLUMNS, "r")
    labels = labels_of(hashes, "r", COLUMNS[:3])
    assert labels[:3] == COLUMNS[:3]
    assert labels[3:] == tuple(f"#{row.tobytes().hex()}" for row in hashes[3:])
    keyed = labels_of(hashed(COLUMNS, "r", KEY.key_for("columns")), "r", COLUMNS)
    assert not set(keyed) & set(COLUMNS)


def test_a_server_with_the_right_list_of_names_can_test_them_only_without_a_key(tmp_path):
    for key, is_known in ((None, True), (KEY, False)):
        federation = with_keys(tmp_path / str(is_known), east=key, north=key, south=key)
        hellos = [Reply.read(reply) for _, request, reply in recorded(federation)][:3]
        tested = {row.tobytes() for row in hashed(COLUMNS, federation.run)}
        for reply in hellos:
            assert ({row.tobytes() for row in reply.answer["columns"]} == tested) is is_known


def test_the_key_and_its_secret_never_leave(tmp_path):
    federation = with_keys(tmp_path, east=KEY, north=KEY, south=KEY)
    for _, _, reply in recorded(federation):
        for secret in (KEY.secret, KEY.key_for("columns"), KEY.text.encode(), KEY.secret.hex().encode()):
            assert secret not in reply


def test_marks_of_two_runs_or_keys_differ():
    one, other = KEY.key_for("columns"), KEY.key_for("words")
    assert len({key_mark(one, "a"), key_mark(one, "b"), key_mark(other, "a"), key_mark(b"", "a")}) == 4
    assert key_mark(b"", "a") == ""


@pytest.mark.parametrize("other", [None, SharedKey(bytes(16))])
def test_a_site_with_another_key_or_none_refuses_by_its_own_code(tmp_path, other):
    federation = with_keys(tmp_path, east=KEY, north=other, south=KEY)
    with pytest.raises(SiteRefused, match=r"'north' refuses .*'shared-key'"):
        list(federation.rounds())
    told = (tmp_path / "north" / "site.log").read_text()
    assert "[shared-key]" in told
    assert "--shared-key" in told
    assert not (tmp_path / "south" / "site.log").exists()


def test_a_site_with_a_key_does_not_go_without_it(tmp_path):
    federation = with_keys(tmp_path, north=KEY)
    with pytest.raises(SiteRefused, match=r"'north' refuses .*'shared-key'"):
        list(federation.rounds())


def test_others_go_on_where_a_site_with_another_key_is_left_out(tmp_path):
    federation = with_keys(tmp_path, "skip", east=KEY, north=SharedKey(bytes(16)), south=KEY)
    [done] = federation.rounds()
    assert done.participants == ("east", "south")
    assert np.isfinite(done.model["H"]).all()
