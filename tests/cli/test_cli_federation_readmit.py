"""`partsong federation readmit`: a site that has lost its files is started again when the run is resumed."""

from __future__ import annotations

import numpy as np
import pytest

from partsong.consortium.server_folder import ServerFolder
from partsong.core import Layout, Message
from partsong.federation.record import Journal, Record

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
    assert told(*words) == {"readmitted": "south", "run": "first"}
    after = Journal(place.state).load()
    assert (after.started, after.outside) == ({"north", "west"}, {"south"})
    assert after.counted.keys() == {"north", "west"}
    assert told("federation", "readmit", "sout", "--run", "first", "--folder", "liver", code=1)["type"]


@pytest.mark.parametrize("run", ["first", "other"])
def test_a_run_that_has_not_begun_is_told_so(told, place, run):
    words = ("federation", "readmit", "south", "--run", run, "--folder", "liver")
    assert told(*words, code=1)["type"] == "FileError"
