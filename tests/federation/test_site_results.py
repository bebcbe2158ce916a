"""After a run a site has a model with its own names, and W of its rows; neither is anybody else's."""

from __future__ import annotations

import os
import stat

import numpy as np
import pytest
from method_tables import ASYNCHRONOUS, METHODS

import partsong
from partsong.core.interfaces import Message
from partsong.federation.experiment import Experiment
from partsong.federation.site.plan import SiteData
from partsong.federation.site.results import final_components
from partsong.federation.wire import RequestRefused
from tests.federation.helpers import COLUMNS, NAMES, Federation, rows_of, secret_of

pandas = pytest.importorskip("pandas")


def finished(tmp_path, method="fedavg", **settings):
    federation = Federation(tmp_path, Experiment(method, 3, 2, **settings))
    list(federation.rounds())
    return federation


def transformed(folder, name):
    """W of a site's rows by name, as anybody with the model file finds it."""
    rows = pandas.DataFrame(rows_of(name), columns=COLUMNS)
    return partsong.FederatedNMF.load(folder / "model.safetensors").transform(rows)


@pytest.mark.parametrize("method", [method for method in METHODS if method not in ASYNCHRONOUS])
def test_every_site_has_the_model_with_its_names_and_its_own_weights(tmp_path, method):
    federation = finished(tmp_path, method, local_steps=1)
    for name in federation.names:
        folder = tmp_path / name / "results" / federation.run
        model, W = partsong.load_model(folder / "model.safetensors"), np.load(folder / "weights.npy")
        assert model.feature_names == COLUMNS
        assert model.components.shape == (3, len(COLUMNS))
        assert W.shape == (16, 3)
        assert (W >= 0).all()
        np.testing.assert_allclose(transformed(folder, name), W, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("method", ["fnmf", "exact", "syn-ssd-u"])
def test_it_is_the_model_of_the_server(tmp_path, method):
    federation = Federation(tmp_path, Experiment(method, 3, 2, local_steps=1))
    last = list(federation.rounds())[-1]
    H = Experiment(method, 3, 2, local_steps=1).program(len(federation.names)).components(last.checkpoint.server)
    found = partsong.load_model(tmp_path / NAMES[0] / "results" / federation.run / "model.safetensors").components
    np.testing.assert_array_equal(found, H)


def test_all_sites_have_the_same_model(tmp_path):
    finished(tmp_path)
    models = [partsong.load_model(tmp_path / name / "results" / "run-1" / "model.safetensors") for name in NAMES[:3]]
    assert len({model.components.tobytes() for model in models}) == 1


def test_columns_in_another_order_are_the_same_columns(tmp_path):
    order = np.random.default_rng(0).permutation(len(COLUMNS))
    federation = Federation(tmp_path, Experiment("fedavg", 3, 1))
    data = SiteData(rows_of("south")[:, order], tuple(COLUMNS[at] for at in order), secret_of("south"))
    federation.sites["south"] = federation.site("south", data=data)
    list(federation.rounds())
    models = [partsong.load_model(tmp_path / name / "results" / "run-1" / "model.safetensors") for name in NAMES[:3]]
    assert {model.feature_names for model in models} == {COLUMNS}
    W = np.load(tmp_path / "south" / "results" / "run-1" / "weights.npy")
    folder = tmp_path / "east" / "results" / "run-1"
    np.testing.assert_allclose(transformed(folder, "south"), W, rtol=1e-6, atol=1e-9)


@pytest.mark.skipif(os.name != "posix", reason="permissions of files")
def test_the_result_is_for_its_owner_alone(tmp_path):
    finished(tmp_path)
    folder = tmp_path / "east" / "results" / "run-1"
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "weights.npy", "result.json"}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in folder.iterdir())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_server_s_own_components_are_taken_where_they_are_told():
    H, point = np.ones((2, 3)), np.zeros((2, 3))
    assert (final_components(Message({"H": point, "components": H}), (2, 3)) == H).all()
    assert (final_components(Message({"H": H}), (2, 3)) == H).all()


@pytest.mark.parametrize(
    "arrays", [{}, {"turn": np.ones(2)}, {"H": np.ones((3, 2))}, {"H": np.ones((2, 3), np.int64)}, {"H": np.ones(6)}]
)
def test_a_model_that_is_none_is_refused(arrays):
    with pytest.raises(RequestRefused):
        final_components(Message(arrays), (2, 3))
