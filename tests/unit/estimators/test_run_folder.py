"""`FederatedNMF.fit(run_folder=…)`: runs that are kept, resumed to the same bits, and recorded, from Python alone."""

import numpy as np
import pytest

import partsong
from partsong.errors import FileError, ParameterError
from partsong.training.run_folder import RunFolder


def parts(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.random((n, 3)) @ rng.random((3, 12)) + 0.01 for n in (30, 20, 25)]


def model(rounds=6, method="fnmf-local", **more):
    settings = {"method": method, "local_steps": 5, "rounds": rounds, "tol": 0, **more}
    return partsong.FederatedNMF(3, **settings)


@pytest.mark.parametrize("method", ["exact", "fnmf-local", "fnmf", "syn-ssd-uv", "asyn-sd", "game"])
def test_a_resumed_run_is_the_uninterrupted_one(method, tmp_path):
    steps = None if method == "exact" else 5
    whole = model(6, method, local_steps=steps, random_state=3).fit(parts(), run_folder=tmp_path / "whole")
    model(2, method, local_steps=steps, random_state=3).fit(parts(), run_folder=tmp_path / "run")
    again = model(6, method, local_steps=steps).fit(parts(), run_folder=tmp_path / "run", resume=True)
    assert again.components_.tobytes() == whole.components_.tobytes()
    assert [row.objective for row in again.history_] == pytest.approx(
        [row.objective for row in whole.history_], nan_ok=True, abs=0
    )
    assert again.seed_ == 3, "the run has its own"
    for name in whole.parties_:
        assert again.party_components_[name].tobytes() == whole.party_components_[name].tobytes()
    assert RunFolder(tmp_path / "run").model().components.tobytes() == whole.components_.tobytes()


def test_what_a_folder_holds(tmp_path):
    fitted = model(4, random_state=0).fit(parts(), run_folder=tmp_path / "run", record=True)
    folder = RunFolder(tmp_path / "run")
    assert folder.settings()["method"] == "fnmf-local"
    assert folder.settings()["seed"] == 0
    assert folder.result()["iterations"] == 4
    assert folder.result()["relative_error"] == fitted.relative_error_
    assert [row.iteration for row in folder.history()] == [1, 2, 3, 4]
    assert len(folder.traffic().traffic) == 4
    sent = sum(message.nbytes for messages in folder.traffic().traffic for _, _, message in messages)
    assert sent == sum(row.bytes_up for row in fitted.history_)
    loaded = partsong.FederatedNMF.load(folder.path / "model.safetensors")
    assert loaded.components_.tobytes() == fitted.components_.tobytes()


def test_nothing_is_replaced_by_accident(tmp_path):
    model(2, random_state=0).fit(parts(), run_folder=tmp_path / "run")
    with pytest.raises(FileError, match="not empty"):
        model(2, random_state=0).fit(parts(), run_folder=tmp_path / "run")
    with pytest.raises(ParameterError, match="another run"):
        model(4).fit(parts(1), run_folder=tmp_path / "run", resume=True)
    with pytest.raises(ParameterError, match="local_steps"):
        model(4, local_steps=7).fit(parts(), run_folder=tmp_path / "run", resume=True)
    with pytest.raises(ParameterError, match="another run"):
        model(4, random_state=1).fit(parts(), run_folder=tmp_path / "run", resume=True)
    with pytest.raises(ParameterError, match="run_folder"):
        model(4).fit(parts(), resume=True)


def test_an_error_leaves_a_checkpoint_to_resume_from(tmp_path, monkeypatch):
    whole = model(5, "fedavg", random_state=1).fit(parts())
    program = type(partsong.methods.build("fedavg", 3))
    plain, seen = program.finish, []

    def finish(self, server, aggregate):
        seen.append(None)
        if len(seen) == 4:
            raise MemoryError("the machine is full")
        return plain(self, server, aggregate)

    with monkeypatch.context() as patched:
        patched.setattr(program, "finish", finish)
        broken = model(5, "fedavg", random_state=1)
        with pytest.raises(MemoryError):
            broken.fit(parts(), run_folder=tmp_path / "run")
        assert broken.n_iter_ == 3
    again = model(5, "fedavg").fit(parts(), run_folder=tmp_path / "run", resume=True)
    assert again.components_.tobytes() == whole.components_.tobytes()


def test_accounts_of_privacy_go_on(tmp_path):
    promise = partsong.PartyPrivacy(epsilon=50.0)
    private = {"method": "fedavg", "privacy": promise, "local_steps": 2, "rounds": 3, "random_state": 0}
    first = partsong.FederatedNMF(3, **private).fit(parts(), run_folder=tmp_path / "run")
    again = partsong.FederatedNMF(3, **private).fit(parts(), run_folder=tmp_path / "run", resume=True)
    assert again.epsilon_spent_ == pytest.approx(first.epsilon_spent_), "nothing more was sent"
    with pytest.raises(FileError):
        partsong.FederatedNMF(3, **private).fit(parts(), run_folder=tmp_path / "run")


def test_parties_with_names_of_columns(tmp_path):
    pandas = pytest.importorskip("pandas")
    frames = [pandas.DataFrame(X, columns=[f"c{j}" for j in range(12)]) for X in parts()]
    model(2, random_state=0).fit(frames, run_folder=tmp_path / "run")
    again = model(4).fit(frames, run_folder=tmp_path / "run", resume=True)
    assert list(again.feature_names_in_) == [f"c{j}" for j in range(12)]
    with pytest.raises(ParameterError, match="resume"):
        model(6).fit([frame.rename(columns={"c0": "x"}) for frame in frames], run_folder=tmp_path / "run", resume=True)


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path, resume):
    whole = model(4, random_state=5).fit(parts(), run_folder=tmp_path / "run")
    for name in ("checkpoint", "history.csv", "bytes.csv", "result.json", "model.safetensors"):
        (tmp_path / "run" / name).unlink()
    seed = None if resume else 5
    again = model(4, random_state=seed).fit(parts(), run_folder=tmp_path / "run", resume=resume)
    assert again.components_.tobytes() == whole.components_.tobytes()


def test_options_may_be_numbers_of_numpy(tmp_path):
    settings = {"local_steps": np.int64(5), "method_options": {"strength": np.float32(0.25)}}
    fitted = model(3, "fedprox", random_state=0, **settings).fit(parts(), run_folder=tmp_path / "run")
    assert RunFolder(tmp_path / "run").settings()["local_steps"] == 5
    again = partsong.FederatedNMF.load(tmp_path / "run" / "model.safetensors")
    assert (again.local_steps, again.method_options) == (5, {"strength": 0.25})
    assert fitted.components_.tobytes() == again.components_.tobytes()


@pytest.mark.parametrize("method", ["exact", "asyn-sd"])
def test_one_party_after_another_or_all_at_once_the_record_is_the_same(method, tmp_path):
    for n_jobs in (1, 2):
        model(2, method, n_jobs=n_jobs, random_state=0).fit(parts(), run_folder=tmp_path / str(n_jobs), record=True)
    one, two = (RunFolder(tmp_path / str(n_jobs)).traffic().traffic for n_jobs in (1, 2))
    assert len(one) == len(two) > 0
    for sent, other in zip(one, two, strict=True):
        assert [(party, phase) for party, phase, _ in sent] == [(party, phase) for party, phase, _ in other]
        assert all(a.signature == b.signature for (_, _, a), (_, _, b) in zip(sent, other, strict=True))
