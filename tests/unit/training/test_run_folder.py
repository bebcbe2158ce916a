"""Run folders from Python: begun, resumed to the same bits, read at any time, and told from other runs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from partsong.attacks.transcript import transcript
from partsong.core.interfaces import Layout, Schedule, Shard, Traits
from partsong.core.streams import key
from partsong.data.conversion import as_matrix
from partsong.engines.local import Sequential
from partsong.errors import FileError, FormatError, ParameterError
from partsong.io.model_file import Model, machine_versions, now, save_model
from partsong.methods import build
from partsong.privacy.accounting import Release
from partsong.privacy.spending import PrivacyTracker
from partsong.training.checkpoint import SavedRun, fingerprint, load_run, save_run
from partsong.training.loop import StoppingRule
from partsong.training.loop import run as run_fit
from partsong.training.result import finish
from partsong.training.run_folder import MODEL, RunFolder
from partsong.training.simulation import simulate_rounds

SETTINGS = {"method": "fedavg", "n_components": 3, "seed": 4}


@pytest.fixture(scope="module")
def rows():
    draw = np.random.default_rng(0)
    return {name: draw.random((20, 3)) @ draw.random((3, 7)) + 0.1 * draw.random((20, 7)) for name in "abc"}


def task_of(rows, rounds, *, record=True):
    shards = [Shard(name, as_matrix(X), key(4, "secret", name)) for name, X in rows.items()]
    schedule, engine = Schedule(rounds, 4), Sequential(record=record)
    return simulate_rounds(build("fedavg", 3, local_steps=10), shards, rounds, schedule, StoppingRule(0.0), engine)


def data_of(rows):
    return {name: fingerprint(X) for name, X in rows.items()}


def fit(folder, rows, rounds, **options):
    task = task_of(rows, rounds)
    with folder.start(task, SETTINGS, data_of(rows), record=True, every=0, **options) as recorder:
        training = run_fit(task, resume=recorder.resume_point, watch=recorder.watch)
    done = finish(task, training)
    model = Model(done.H, None, SETTINGS, 4, done.relative_error, None, now(), {})
    save_model(folder.path / MODEL, model)
    folder.end(training.history, recorder.sent, {"rounds": len(training.history)})
    return done


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "run")


def without_seconds(history):
    return [repr(row._replace(seconds=0.0)) for row in history]


def test_a_resumed_run_is_the_uninterrupted_one(folder, rows, tmp_path):
    whole = RunFolder(tmp_path / "whole")
    expected = fit(whole, rows, 6)
    fit(folder, rows, 3)
    done = fit(folder, rows, 6, resume=True)
    np.testing.assert_array_equal(done.H, expected.H)
    np.testing.assert_array_equal(folder.model().components, whole.model().components)
    assert without_seconds(folder.history()) == without_seconds(whole.history())
    assert folder.result() == {"rounds": 6}
    assert folder.settings()["method"] == "fedavg"
    for one, other in zip(folder.traffic().traffic, whole.traffic().traffic, strict=True):
        for (*who, message), (*also, same) in zip(one, other, strict=True):
            assert who == also
            np.testing.assert_array_equal(message["H"], same["H"])


def test_recorded_traffic_is_that_of_the_run(folder, rows):
    task = task_of(rows, 3)
    fit(folder, rows, 3)
    traffic, layout = folder.traffic(), Layout.of(task.shards, 4)
    assert traffic.parties == ("a", "b", "c")
    exchanges = transcript(traffic.traffic, task.program, layout, asynchronous=False)
    assert [sorted(one.uploads) for one in exchanges] == [["a", "b", "c"]] * 3


def test_a_run_that_failed_can_be_read_and_resumed(folder, rows, tmp_path):
    expected = fit(RunFolder(tmp_path / "whole"), rows, 5)
    task = task_of(rows, 5)
    recorder = folder.start(task, SETTINGS, data_of(rows), record=True, every=math.inf)

    def watch(done, row):
        recorder.watch(done, row)
        if row.iteration == 2:
            raise MemoryError

    with pytest.raises(MemoryError), recorder:
        run_fit(task, watch=watch)
    assert len(folder.history()) == folder.load().checkpoint.index == 2
    with pytest.raises(FileError):
        folder.result()
    np.testing.assert_array_equal(fit(folder, rows, 5, resume=True).H, expected.H)


def test_other_runs_are_not_resumed(folder, rows):
    fit(folder, rows, 2)
    task, other = task_of(rows, 3), {**rows, "a": rows["a"] + 1}
    with pytest.raises(ParameterError, match=r"seed \(4 in the checkpoint, 5 now\)"):
        folder.start(task, {**SETTINGS, "seed": 5}, data_of(rows), resume=True)
    folder.start(task, {**SETTINGS, "seed": 5}, data_of(rows), resume=True, may_change={"seed"}, record=True)
    with pytest.raises(ParameterError, match=r"data \(a: other values\)"):
        folder.start(task, SETTINGS, data_of(other), resume=True)
    with pytest.raises(ParameterError, match="parties"):
        folder.start(task, SETTINGS, data_of({"a": rows["a"]}), resume=True)


def test_a_folder_is_overwritten_only_when_asked(folder, rows):
    fit(folder, rows, 2)
    with pytest.raises(FileError, match="use overwrite"):
        fit(folder, rows, 2)
    fit(folder, rows, 1, overwrite=True)
    assert len(folder.history()) == len(folder.traffic().traffic) == 1
    (folder.path / "settings.json").unlink()
    with pytest.raises(FileError, match="holds files that are not those of a partsong run"):
        fit(folder, rows, 2, overwrite=True)


def test_what_was_spent_is_not_thrown_away(folder, rows):
    """A run with accounts in its checkpoint is resumed, or its folder left alone."""
    fit(folder, rows, 1)
    spending = PrivacyTracker(Traits(release=Release("gaussian", 2.0, "party", "replace")))
    spending.start_round("abc", 0)
    save_run(folder.path / "checkpoint", replace(folder.load(), spent=spending.accounts.to_json()))
    with pytest.raises(FileError, match="privacy accounts"):
        fit(folder, rows, 1, overwrite=True)
    assert folder.load().spent


def test_without_traffic_there_is_a_warning(folder, rows):
    fit(folder, rows, 2)
    task = task_of(rows, 3, record=False)
    with pytest.warns(UserWarning, match="has the traffic up to round 2"):
        folder.start(task, SETTINGS, data_of(rows), resume=True)


def test_what_is_no_run_is_refused(folder, rows, tmp_path):
    with pytest.raises(FileError):
        folder.load()
    fit(folder, rows, 2)
    run = folder.load()
    for bad in (
        replace(run, rows=run.rows[:1]),
        replace(run, rows=(("x",),) * 2),
        replace(run, sent=((1, 2),)),
        replace(run, about={}),
        replace(run, checkpoint=replace(run.checkpoint, index=-1)),
        SavedRun(None),
    ):
        save_run(tmp_path / "c", bad)
        with pytest.raises(FormatError, match="not the checkpoint of a fit"):
            load_run(tmp_path / "c")
    (folder.path / "history.csv").write_text("iteration\n1\n")
    with pytest.raises(FormatError, match="not the history"):
        folder.history()


def test_data_are_told_apart(rows):
    X = rows["a"]
    assert fingerprint(X) == fingerprint(X.copy())
    assert fingerprint(X) != fingerprint(X.astype(np.float32))
    assert fingerprint(X, tuple("abcdefg")) != fingerprint(X)
    assert machine_versions(2)["threads"] == 2
