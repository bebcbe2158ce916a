"""A step that is recorded and replayed does what steps one by one do."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from partsong.errors import DivergenceError, PartsongError
from partsong.methods.mutual_information.critics import JensenShannon, MutualInformation, NoInformation, Separable
from partsong.methods.mutual_information.descent import Descent

torch = pytest.importorskip("torch")

from partsong.methods.mutual_information import replay  # noqa: E402
from partsong.methods.mutual_information.batches import to_documents  # noqa: E402
from partsong.topics.fitting import rows_on  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
PARTS = {
    "none": NoInformation(),
    "dv": MutualInformation(0.1),
    "js": MutualInformation(0.1, bound=JensenShannon(), rate=0.2),
    "separable": MutualInformation(0.1, critic=Separable(hidden=8, embedding=4)),
}
N, V, K = 23, 17, 4


def problem(device, seed=0, information=PARTS["none"]):
    draw = np.random.default_rng(seed)
    dense = draw.random((N, V)) * (draw.random((N, V)) < 0.2)
    dense[[3, 7]] = 0
    documents = to_documents(rows_on(device, dense))

    def native(array):
        return torch.from_numpy(array).to(device)

    theta = information.start(V, K, np.random.default_rng(seed), "float64")
    W, Ht = native(draw.random((N, K))), native(draw.random((V, K)))
    return documents, W, Ht, {name: native(array) for name, array in theta.items()}


def both(work, monkeypatch):
    found = []
    for is_worth_it in (False, True):
        monkeypatch.setattr(replay, "is_worth_it", lambda *_, answer=is_worth_it: answer)
        found.append(work())
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch", [1, 4, 5, 23, 40])
@pytest.mark.parametrize("name", PARTS)
def test_learning(name, batch, device, monkeypatch):
    descent = Descent(4, batch, 0.01, "document", PARTS[name])
    documents, *start = problem(device, information=PARTS[name])
    before = [array.clone() for array in (*start[:2], *start[2].values())]
    step_by_step, again = both(lambda: descent.run(documents, *start, np.random.default_rng(1)), monkeypatch)
    assert float((step_by_step.Ht - again.Ht).abs().max()) < 1e-12
    assert float((step_by_step.W - again.W).abs().max()) < 1e-12
    assert again.information == pytest.approx(step_by_step.information, abs=1e-12, nan_ok=True)
    assert set(again.theta) == set(step_by_step.theta)
    for key, array in again.theta.items():
        assert float((array - step_by_step.theta[key]).abs().max()) < 1e-12
    assert all(map(torch.equal, before, [*start[:2], *start[2].values()]))


@pytest.mark.parametrize("device", DEVICES)
def test_settling(device, monkeypatch):
    descent = Descent(4, 5, 0.01, "document", PARTS["js"])
    documents, *start = problem(device, information=PARTS["js"])
    step_by_step, again = both(lambda: descent.fit_weights(documents, *start, np.random.default_rng(1)), monkeypatch)
    assert float((step_by_step - again).abs().max()) < 1e-12
    assert float((step_by_step - start[0]).abs().max()) > 1e-3


@pytest.mark.parametrize("device", DEVICES)
def test_what_one_run_left_does_not_reach_the_next(device, monkeypatch):
    descent = Descent(3, 5, 0.01, "document", PARTS["js"])
    monkeypatch.setattr(replay, "is_worth_it", lambda *_: True)

    def learned(seed):
        documents, *start = problem(device, seed, PARTS["js"])
        return descent.run(documents, *start, np.random.default_rng(seed))

    first = learned(0)
    kept = first.Ht.clone(), first.theta["words"].clone()
    learned(1)
    assert torch.equal(kept[0], first.Ht)
    assert torch.equal(kept[1], first.theta["words"])
    again = learned(0)
    assert float((again.Ht - first.Ht).abs().max()) < 1e-12
    other = replace(descent, rate=0.02).run(*problem(device, 0, PARTS["js"]), np.random.default_rng(0))
    assert float((other.Ht - first.Ht).abs().max()) > 1e-4


def test_benches_are_few(monkeypatch):
    monkeypatch.setattr(replay, "is_worth_it", lambda *_: True)
    documents, *start = problem("cpu")
    for epochs in range(1, 9):
        Descent(epochs, 5, 0.01).run(documents, *start, np.random.default_rng(0))
    assert len(replay._kept.benches) == replay.KEPT


@pytest.mark.parametrize("device", DEVICES)
def test_divergence_is_told_and_forgotten(device, monkeypatch):
    monkeypatch.setattr(replay, "is_worth_it", lambda *_: True)
    documents, *start = problem(device)
    wild = Descent(30, 5, 1e6, "document")
    with pytest.raises(DivergenceError):
        wild.run(documents, *start, np.random.default_rng(0))
    mild = [wild.run(documents, start[0] * 0, start[1] * 0, {}, np.random.default_rng(0)) for _ in range(2)]
    assert torch.equal(mild[0].Ht, mild[1].Ht)
    assert bool(torch.isfinite(mild[0].Ht).all())


def test_one_long_document_does_not_make_all_batches_long():
    counts = np.zeros((200, 500))
    counts[:, 0] = 1
    is_cuda = type("On", (), {"is_cuda": True})
    assert replay.is_worth_it(to_documents(rows_on("cpu", counts)), is_cuda, 4, 3)
    counts[7] = 1
    assert not replay.is_worth_it(to_documents(rows_on("cpu", counts)), is_cuda, 4, 3)


def test_steps_that_were_not_taken_are_told(monkeypatch):
    monkeypatch.setattr(replay, "is_worth_it", lambda *_: True)
    monkeypatch.setattr(replay.ReplayBuffers, "_work", lambda *_: None)
    documents, *start = problem("cpu")
    with pytest.raises(PartsongError, match="0 of 5 recorded steps"):
        Descent(1, 5, 0.0123).run(documents, *start, np.random.default_rng(0))


@pytest.mark.parametrize("device", DEVICES)
def test_threads_record_for_themselves(device, monkeypatch):
    monkeypatch.setattr(replay, "is_worth_it", lambda *_: True)
    descent = Descent(6, 2, 0.01, "document", PARTS["js"])

    def learned(seed):
        documents, *start = problem(device, seed, PARTS["js"])
        return descent.run(documents, *start, np.random.default_rng(seed)).Ht.cpu()

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(learned, range(8)))
    for seed, Ht in enumerate(found):
        assert float((Ht - learned(seed)).abs().max()) < 1e-12
