"""`partsong federation readmit`: a site that has lost its files is started again when the run is resumed."""

from __future__ import annotations

import numpy as np
import pytest

from partsong.core.interfaces import Layout, Message
from partsong.federation.server.state import Journal, Opening, Record
from partsong.federation.setup.server_folder import ServerFolder

pytest.importorskip("cryptography")
NAMES = ("north", "south", "west")


@pytest.fixture
def place(told, tmp_path):
    told("federation", "init", "liver", "--name", "liver", "--address", "localhost:9443")
    place = ServerFolder.at(tmp_path / "liver").run("first")
    place.folder.mkdir(parents=True)
    place.experiment.write_text('method = "exact"\nrank = 2\nrounds = 3\n')
    return place


def test_a_site_begins_anew_in_a_run(told, place):
    layout, counted = Layout(NAMES, 3, 0, "float64"), dict.fromkeys(NAMES, (1, 0))
    model = Message({"H": np.ones((2, 3))})
    record = Record("first", {}, layout, None, 2, None, model, started=frozenset(NAMES), counted=counted)
    Journal(place.state).save(record)
    words = ("federation", "readmit", "south", "--run", "first", "--folder", "liver")
    assert told(*words) == {"readmitted": "south", "run": "first", "misses_rest_of_round": None}
    after = Journal(place.state).load()
    assert (after.started, after.outside, after.adrift) == ({"north", "west"}, {"south"}, set())
    assert after.counted.keys() == {"north", "west"}
    assert told("federation", "readmit", "sout", "--run", "first", "--folder", "liver", code=1)["type"]


def test_a_round_that_the_site_cannot_answer_any_more_is_told(told, place):
    journal, opening = Journal(place.state), Opening(2, 0, NAMES, first=2)
    record = Record("first", {}, Layout(NAMES, 3, 0, "float64"), None, 2, None, Message({"H": np.ones((2, 3))}))
    journal.save(record)
    journal.open(opening)
    journal.decide(opening, 2, {})
    words = ("federation", "readmit", "south", "--run", "first", "--folder", "liver")
    assert told(*words)["misses_rest_of_round"] == 2
    assert journal.load().adrift == {"south"}


@pytest.mark.parametrize("run", ["first", "other"])
def test_a_run_that_has_not_begun_is_told_so(told, place, run):
    words = ("federation", "readmit", "south", "--run", run, "--folder", "liver")
    assert told(*words, code=1)["type"] == "FileError"
