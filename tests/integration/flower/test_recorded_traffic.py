"""All bytes that the server's processes receive over Flower: under masks none of them is of an upload, or of rows."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")
from partsong.core.interfaces import Schedule, Shard
from partsong.engines.local import Sequential
from partsong.federation.commands import demo
from partsong.federation.experiment import Experiment
from partsong.federation.site.plan import build_plan
from tests.integration.flower.flower_processes import PLAIN, Federation, left_behind

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")

HERE = Path(__file__).parent / "recorded_process"
MASKED = PLAIN + "rounds = 2\nsecure_aggregation = true\nmask_bound = 1e6\n"
OPEN = PLAIN + "rounds = 2\n"


@contextlib.contextmanager
def recorded_federation(folder, monkeypatch):
    """Whose server, with all its children, keeps what it receives; nodes do not."""
    made, record = Federation(folder / "federation"), folder / "record"
    for place in (made.folder, record):
        place.mkdir()
    made.set_up()
    with demo.processes(made.folder) as running:
        made.running = running
        with monkeypatch.context() as patched:
            patched.setenv("PARTSONG_TEST_RECORD", str(record))
            patched.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
            demo.start_server(running, made.server)
        with made.open_control() as control:
            demo.register(control, made.server)
        for name in made.names:
            made.start_node(name)
        made.wait_for_nodes()
        yield made, record
    assert left_behind(made.folder) == {}


class Noting:
    """A reduction, or a program, that notes what a party would add to a sum."""

    def __init__(self, inner, noted):
        self.inner, self.noted = inner, noted

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def local(self, shard, state, model):
        state, upload = self.inner.local(shard, state, model)
        self.noted.extend(np.asarray(array) for array in upload.arrays.values())
        return state, upload

    def start(self, *given):
        seat = self.inner.start(*given)
        self.noted.append(seat.draft.vector[:-1].copy() if hasattr(seat, "draft") else np.zeros(0))
        return seat


def uploads_of(made, run):
    """By one process: what each site has added in each round, as numbers and, under masks, as fixed point; and rows."""
    place, noted = made.server.run(run), []
    plan = build_plan(Experiment.read(place.experiment).to_dict(), len(made.names), dict(made.server.roster().keys))
    data = {name: site.opened().data for name, site in sorted(made.sites.items())}
    shards = [Shard(name, own.matrix(), own.secret) for name, own in data.items()]
    program, reduction = Noting(plan.program, noted), Noting(plan.reduction, noted)
    assert len(list(Sequential().run(program, shards, Schedule(2, made.record(run).layout.seed), reduction=reduction)))
    assert made.is_same(run)
    return noted, [np.asarray(own.rows) for own in data.values()]


def words_of(arrays):
    """All numbers, in 8 bytes as they are, and pairs of them in float32: any 16 bytes of an array hold a whole word.

    Those that are whole numbers are left out: they could be anywhere.
    """
    words = []
    for array in arrays:
        flat = array.reshape(-1)
        if flat.dtype == np.uint64:
            words.append(flat[np.abs(flat.view(np.int64)) > 1 << 32])
            continue
        told = flat[flat != np.rint(flat)].astype(np.float64)
        words += [told.view(np.uint64), np.ascontiguousarray(told[: len(told) // 2 * 2], np.float32).view(np.uint64)]
    return np.unique(np.concatenate(words))


def found_in(folder, words):
    """How many of them are in files of a folder, at any place."""
    found = set()
    for path in sorted(folder.iterdir()):
        content = path.read_bytes() if path.is_file() else b""
        for shift in range(8):
            here = np.frombuffer(content[shift : shift + (len(content) - shift) // 8 * 8], np.uint64)
            found |= set(here[np.isin(here, words)].tolist())
    return len(found)


def test_no_upload_is_in_what_the_server_receives_under_masks_nor_left_on_its_disk(tmp_path, monkeypatch):
    """With a run in the open beside it, whose uploads are all found in the same record: it misses nothing."""
    with recorded_federation(tmp_path, monkeypatch) as (made, record):
        assert made.run("secure_aggregation", MASKED)[0] == 0
        uploads, rows = uploads_of(made, "secure_aggregation")
        assert sum(array.dtype == np.uint64 for array in uploads) == 6
        received = sum(path.stat().st_size for path in record.iterdir())
        assert received > 100_000
        assert found_in(record, words_of([*uploads, *rows])) == 0

        assert made.run("open", OPEN)[0] == 0
        uploads, rows = uploads_of(made, "open")
        words = words_of([array.astype(np.float64) for array in uploads])
        assert found_in(record, words) >= 0.49 * len(words)
        assert found_in(record, words_of(rows)) == 0
        until, flower = time.monotonic() + 40, made.server.path / "flower"
        assert (flower / "state.db").stat().st_size > 0
        while found_in(flower, words) and time.monotonic() < until:
            time.sleep(1)
        assert found_in(flower, words) == 0
