"""Topics by torch on a device: the same as by NumPy, and nothing reads a tensor that is not on the host."""

import sys

import numpy as np
import pytest
from method_tables import fednmf_mi
from sklearn.base import clone

import partsong
from partsong.errors import MissingExtra, ParameterError

PLANTED = (("cat", "dog", "horse", "sheep", "goat"), ("piano", "violin", "cello", "flute", "oboe"))
QUICK = {"epochs": 2, "batch": 16, "rate": 0.5}


def texts_about(seed, n=30):
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(PLANTED[draw.integers(2)], 4)) for _ in range(n)] + [""]


PARTIES = {name: texts_about(seed) for seed, name in enumerate(("north", "south", "east", "west"))}
POOLED = [text for texts in PARTIES.values() for text in texts]


@pytest.fixture
def far(monkeypatch):
    """Tensors behave as on a device of their own: NumPy cannot look at them before `.cpu()`."""
    torch = pytest.importorskip("torch")
    read = torch.Tensor.numpy

    class Host(torch.Tensor):
        def numpy(self):
            return read(self.as_subclass(torch.Tensor))

    def refuse(*args, **kwargs):
        raise TypeError("can't convert device type tensor to numpy. Use Tensor.cpu() first.")

    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: self.detach().clone().as_subclass(Host))
    monkeypatch.setattr(torch.Tensor, "numpy", refuse)
    monkeypatch.setattr(torch.Tensor, "__array__", refuse)
    with pytest.raises(TypeError, match="device type"):
        np.asarray(torch.ones(2))
    return torch


@pytest.mark.parametrize("method", ["nmf-sgd", "nmf-sgd-mi"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_alone_as_by_numpy(method, dtype, far):
    def fitted(**more):
        settings = {"method": method, "dtype": dtype, "random_state": 0, "max_iter": 3, **QUICK, **more}
        return partsong.TopicModel(2, **settings).fit(POOLED)

    here, there = fitted(), fitted(device="cpu")
    near = 1e-10 if dtype == "float64" else 1e-4
    assert there.components_.dtype == here.components_.dtype == np.dtype(dtype)
    assert np.abs(there.components_ - here.components_).max() < near
    assert there.relative_error_ == pytest.approx(here.relative_error_, abs=near)
    assert there.topic_shares_ == pytest.approx(here.topic_shares_, abs=near)
    assert there.topics() == here.topics()
    assert np.abs(there.transform(POOLED) - here.transform(POOLED)).max() < 100 * near


@pytest.mark.parametrize("server", ["average", "adagrad", "yogi", "adam"])
def test_together_as_by_numpy_with_every_server(server, far):
    def fitted(**more):
        settings = {"method": "fednmf-mi", "server": server, "participation": 0.75, "random_state": 0, "rounds": 3}
        return partsong.FederatedTopicModel(2, **settings, **QUICK, **more).fit(PARTIES)

    here, there = fitted(), fitted(device="cpu")
    assert np.abs(there.components_ - here.components_).max() < 1e-9
    assert [row.bytes_up for row in there.history_] == [row.bytes_up for row in here.history_]


def test_programs_masks_and_files_as_by_numpy(far, tmp_path):
    program = fednmf_mi(2, critic="separable", mi_gradient="js", warm_start_weights=True, **QUICK)

    def fitted(**more):
        return partsong.FederatedTopicModel(
            method=program, secure_aggregation=True, random_state=0, rounds=2, **more
        ).fit(PARTIES)

    here, there = fitted(), fitted(device="cpu")
    assert np.abs(there.components_ - here.components_).max() < 1e-6
    there.save(tmp_path / "m.safetensors")
    there.to_html(tmp_path / "m.html")
    assert partsong.FederatedTopicModel.load(tmp_path / "m.safetensors").topics() == there.topics()


@pytest.mark.parametrize("device", ["cuda:99", "nowhere", "", "meta", 0])
def test_devices_that_are_not_there_are_refused_before_anything_is_counted(device):
    pytest.importorskip("torch")
    model = partsong.FederatedTopicModel(2, method="fednmf", device=device)
    with pytest.raises(ParameterError, match="device"):
        model.fit(object())
    assert clone(model).get_params()["device"] == device


def test_devices_are_for_descents():
    for kind, method in ((partsong.TopicModel, "lda"), (partsong.FederatedTopicModel, "exact")):
        with pytest.raises(ParameterError, match="is for nmf-sgd, nmf-sgd-mi, fednmf"):
            kind(2, method=method, device="cpu").fit(object())


def test_a_device_needs_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=r"partsong\[torch\]"):
        partsong.TopicModel(2, method="nmf-sgd", device="cpu").fit(POOLED)


def test_the_host_is_not_waited_for_batch_by_batch(far, monkeypatch):
    waits = []

    def counted(name):
        honest = getattr(far.Tensor, name)
        return lambda self, *args: (waits.append(name), honest(self, *args))[1]

    for name in ("item", "tolist", "cpu", "__float__", "__int__", "__bool__", "__index__"):
        monkeypatch.setattr(far.Tensor, name, counted(name))

    def waits_with(batch):
        waits.clear()
        settings = {"epochs": 2, "batch": batch, "rate": 0.1, "max_iter": 1, "random_state": 0, "device": "cpu"}
        partsong.TopicModel(2, method="nmf-sgd-mi", **settings).fit(POOLED)
        return len(waits)

    few, many = waits_with(124), waits_with(4)
    assert 0 < few == many
