"""Names of columns: how they are compared, and how a site hears of those that it lacks."""

from __future__ import annotations

import unicodedata
from dataclasses import replace

import pytest

from partsong.errors import FeatureError, ParameterError, SiteRefused
from partsong.federation.columns import Correspondent, hashed, labels_of
from partsong.federation.experiment import Experiment
from partsong.federation.policy import Policy
from partsong.federation.signing import public_key
from partsong.federation.site.plan import Data
from partsong.federation.wire import Denied
from tests.federation.federations import COLUMNS, Federation, rows_of, secret_of
from tests.federation.test_site import Recorded

MARKED = tuple(f"Größe {number}" for number in range(12))
APART = tuple(unicodedata.normalize("NFD", name) for name in MARKED)


def roster_of(names):
    return {name: public_key(secret_of(name), name) for name in names}


def test_names_that_look_the_same_are_the_same(tmp_path):
    assert MARKED != APART
    federation = Federation(tmp_path, Experiment("exact", 3, 1))
    for name in federation.names:
        own = APART if name == "south" else MARKED
        federation.sites[name] = federation.site(name, data=Data(rows_of(name), own, secret_of(name)))
    assert len(list(federation.rounds())) == 1


def test_two_columns_whose_names_differ_in_how_they_are_written_are_refused_by_their_places():
    with pytest.raises(Denied, match="Columns 1 and 3") as caught:
        hashed((MARKED[0], "b", APART[0]), "run-1")
    assert "Gr" not in str(caught.value)
    with pytest.raises(ParameterError, match="Lines 1 and 3"):
        labels_of(hashed(("b",), "run-1"), "run-1", (MARKED[0], "b", APART[0]))


def test_such_columns_are_told_as_a_matter_of_the_site_s_data_and_not_of_the_experiment(tmp_path):
    federation = Federation(tmp_path, Experiment("exact", 3, 1))
    own = Data(rows_of("north"), (MARKED[0], APART[0], *COLUMNS[2:]), secret_of("north"))
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
        less = Data(rows_of("north")[:, :10], COLUMNS[:10], secret_of("north"))
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
    less = Data(rows_of("north")[:, :11], COLUMNS[:11], secret_of("north"))
    federation.sites["north"] = replace(federation.sites["north"], data=less)
    assert len(list(federation.rounds())) == 3
    log = (tmp_path / "north" / "site.log").read_text()
    assert log.count("missing here are: gene-11.") == 1


def test_the_length_of_a_letter_tells_nothing_of_names():
    roster = roster_of(("east", "north"))
    north, east = (Correspondent(name, "run-1", secret_of(name), roster, b"k" * 32) for name in ("north", "east"))
    letters = []
    for names in (("a", "b"), ("a" * 150, "ü" * 30), ("a", "b" * 200)):
        asked = replace(north.asks(), arrays={**north.asks().arrays, "columns": hashed(names, "run-1", b"k" * 32)})
        letter = east.tells("north", asked, names)
        assert north.reads("east", letter) == list(names)
        letters.append(letter["letter"].nbytes)
    assert len(set(letters)) == 1
