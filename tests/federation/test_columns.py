"""Names of columns: how they are compared, what a site learns of those that it lacks, and the shared key."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partsong.errors import FeatureError, FormatError, ParameterError, SiteRefused
from partsong.federation.columns import Correspondent, hashed, key_mark, labels_of
from partsong.federation.experiment import Experiment
from partsong.federation.policy import Policy
from partsong.federation.setup.credentials import SharedKey
from partsong.federation.signing import public_key
from partsong.federation.site.plan import SiteData
from partsong.federation.wire import Reply, RequestRefused
from tests.federation.helpers import COLUMNS, Federation, rows_of, secret_of
from tests.federation.test_site import Recorded, recorded

MARKED = tuple(f"Größe {number}" for number in range(12))
APART = tuple(unicodedata.normalize("NFD", name) for name in MARKED)


def roster_of(names):
    return {name: public_key(secret_of(name), name) for name in names}


def test_names_that_look_the_same_are_the_same(tmp_path):
    assert MARKED != APART
    federation = Federation(tmp_path, Experiment("exact", 3, 1))
    for name in federation.names:
        own = APART if name == "south" else MARKED
        federation.sites[name] = federation.site(name, data=SiteData(rows_of(name), own, secret_of(name)))
    assert len(list(federation.rounds())) == 1


def test_two_columns_whose_names_differ_in_how_they_are_written_are_refused_by_their_places():
    with pytest.raises(RequestRefused, match="Columns 1 and 3") as caught:
        hashed((MARKED[0], "b", APART[0]), "run-1")
    assert "Gr" not in str(caught.value)
    with pytest.raises(ParameterError, match="Lines 1 and 3"):
        labels_of(hashed(("b",), "run-1"), "run-1", (MARKED[0], "b", APART[0]))


def test_such_columns_are_told_as_a_matter_of_the_site_s_data_and_not_of_the_experiment(tmp_path):
    federation = Federation(tmp_path, Experiment("exact", 3, 1))
    own = SiteData(rows_of("north"), (MARKED[0], APART[0], *COLUMNS[2:]), secret_of("north"))
    federation.sites["north"] = federation.site("north", data=own)
    with pytest.raises(SiteRefused, match=r"'north' refuses .*'data'"):
        list(federation.rounds())
    assert "Columns 1 and 2" in (tmp_path / "north" / "site.log").read_text()


def test_patterns_of_site_toml_mean_names_however_they_are_written():
    assert Policy(columns=(unicodedata.normalize("NFD", "Größe*"),)).leaving((*MARKED, "x", *APART)) == (
        *MARKED,
        *APART,
    )


@pytest.mark.parametrize("key", [b"", b"k" * 32])
def test_a_site_that_lacks_columns_reads_their_names_in_its_log_unless_nobody_tells(tmp_path, key):
    """The first site that may be asked does not tell, the second one does; then none."""
    for tellers, is_told in ((("south",), True), ((), False)):
        federation = Federation(tmp_path / str(is_told), Experiment("exact", 3, 2))
        for name in federation.names:
            own = {"roster": roster_of(federation.names), "key": key, "policy": Policy(tell_names=name in tellers)}
            federation.sites[name] = federation.site(name, **own)
        less = SiteData(rows_of("north")[:, :10], COLUMNS[:10], secret_of("north"))
        federation.sites["north"] = replace(federation.sites["north"], data=less)
        transport = Recorded(federation.transport().sites)
        with pytest.raises(FeatureError, match="north: 0 extra, 2 missing"):
            list(federation.rounds(transport))
        log = (federation.folder / "north" / "site.log").read_text()
        assert ("By 'south', missing here are: gene-10, gene-11." in log) == is_told
        everything = b"".join(request + reply for _, request, reply in transport.asked)
        assert not any(name.encode() in everything for name in COLUMNS)


def test_a_site_that_is_left_out_for_a_column_is_told_its_name_once(tmp_path):
    federation = Federation(tmp_path, Experiment("exact", 3, 3, on_party_error="skip"))
    federation.sites = {name: federation.site(name, roster=roster_of(federation.names)) for name in federation.names}
    less = SiteData(rows_of("north")[:, :11], COLUMNS[:11], secret_of("north"))
    federation.sites["north"] = replace(federation.sites["north"], data=less)
    assert len(list(federation.rounds())) == 3
    log = (tmp_path / "north" / "site.log").read_text()
    assert log.count("missing here are: gene-11.") == 1


def test_the_length_of_a_letter_tells_nothing_of_names():
    roster = roster_of(("east", "north"))
    north, east = (Correspondent(name, "run-1", secret_of(name), roster, b"k" * 32) for name in ("north", "east"))
    letters = []
    for names in (("a", "b"), ("a" * 150, "ü" * 30), ("a", "b" * 200)):
        asked = replace(
            north.request_names(), arrays={**north.request_names().arrays, "columns": hashed(names, "run-1", b"k" * 32)}
        )
        letter = east.send_names("north", asked, names)
        assert north.read_names("east", letter) == list(names)
        letters.append(letter["letter"].nbytes)
    assert len(set(letters)) == 1


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
    with pytest.raises(FormatError, match="with a checksum"):
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
        hellos = [Reply.from_bytes(reply) for _, request, reply in recorded(federation)][:3]
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
