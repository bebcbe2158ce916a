"""Files that version 0.1.0 wrote: models load to the same numbers; ledgers and audit logs are read in full."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from partsong import NMF, FederatedNMF, FederatedTopicModel, TopicModel, load_model
from partsong.core.renamed import translate_settings
from partsong.errors import DamagedState, FormatError
from partsong.federation.audit_log import AuditLog, verify_log
from partsong.federation.consistency import compare
from partsong.federation.ledger import SiteLedger
from partsong.federation.server.state import RunState
from partsong.federation.wire import load_state
from partsong.training.checkpoint import load_run

FOLDER = Path(__file__).parent / "from_0_1_0"
FACTORS = {
    "nmf": NMF,
    "nmf-mu-float32": NMF,
    "federated-exact": FederatedNMF,
    "federated-fnmf": FederatedNMF,
    "federated-fedprox": FederatedNMF,
    "federated-syn-ssd-uv": FederatedNMF,
    "federated-asyn-sd": FederatedNMF,
    "federated-game": FederatedNMF,
    "federated-masked": FederatedNMF,
}
TOPICS = {
    "topics-nmf": TopicModel,
    "topics-lda": TopicModel,
    "federated-topics-exact": FederatedTopicModel,
    "federated-topics-fedlda": FederatedTopicModel,
}
SITES = {"site-exact-masked": 2, "site-private": 0}


@pytest.fixture(scope="module")
def expected():
    with np.load(FOLDER / "expected.npz") as arrays:
        return dict(arrays)


@pytest.mark.parametrize("name", FACTORS)
def test_model_files_of_0_1_0_still_load(name, expected):
    path = FOLDER / f"{name}.safetensors"
    model, H = FACTORS[name].load(path), expected[f"{name}/H"]
    np.testing.assert_array_equal(model.components_, H)
    np.testing.assert_array_equal(load_model(path).components, H)
    assert model.components_.dtype == H.dtype
    rows = expected["rows"].astype(H.dtype)
    if name == "nmf":
        rows = pd.DataFrame(rows, columns=model.feature_names_in_)
    close = {"rtol": 1e-4, "atol": 1e-5} if H.dtype == np.float32 else {"rtol": 1e-8, "atol": 1e-10}
    np.testing.assert_allclose(model.transform(rows), expected[f"{name}/W"], **close)


@pytest.mark.parametrize("name", TOPICS)
def test_topic_files_of_0_1_0_still_load(name, expected):
    model = TOPICS[name].load(FOLDER / f"{name}.safetensors")
    np.testing.assert_array_equal(model.components_, expected[f"{name}/H"])
    found = model.transform([str(text) for text in expected["texts"]])
    np.testing.assert_allclose(found, expected[f"{name}/W"], rtol=1e-8, atol=1e-10)


def parts_of(path):
    """The arrays of a model file as bytes, and what it says of its fit."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    written = json.loads(header.pop("__metadata__")["partsong"])
    return header, data[8 + size :], written


@pytest.mark.parametrize("name", FACTORS | TOPICS)
def test_model_files_of_0_1_0_are_saved_with_the_present_names(name, tmp_path):
    """Loaded and saved again, a file is the same but for settings that have other names now; once more, it stays."""
    path, again, twice = FOLDER / f"{name}.safetensors", tmp_path / "again.safetensors", tmp_path / "twice.safetensors"
    (FACTORS | TOPICS)[name].load(path).save(again)
    (FACTORS | TOPICS)[name].load(again).save(twice)
    assert again.read_bytes() == twice.read_bytes()
    (header, arrays, before), (new_header, new_arrays, after) = parts_of(path), parts_of(again)
    assert (header, arrays) == (new_header, new_arrays)
    settings = before["content"]["settings"]
    assert after["content"] == {**before["content"], "settings": translate_settings(settings)}
    if translate_settings(settings) == settings:
        assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", SITES)
def test_ledgers_and_audit_logs_of_0_1_0_are_always_read(name, tmp_path):
    known = json.loads((FOLDER / "sites.json").read_text())[name]
    for file in ("ledger.jsonl", "audit.jsonl"):
        shutil.copy(FOLDER / name / file, tmp_path / file)
    ledger, audit = SiteLedger(tmp_path / "ledger.jsonl"), AuditLog(tmp_path / "audit.jsonl")
    books, left = ledger.load(), audit.history()
    assert list(ledger.chain.head()) == known["ledger head"]
    assert books.serial == known["serial"]
    assert books.noiseless == SITES[name]
    assert sum(books.releases.values()) == known["serial"] - SITES[name]
    found = verify_log(audit.path)
    assert (found.lines, found.head) == (known["audit lines"], known["audit head"])
    found = compare(books, left)
    assert not any((found.uncharged, found.other_noise, found.unlogged))


@pytest.mark.parametrize("name", SITES)
def test_chains_of_0_1_0_grow(name, tmp_path):
    """A line that is written today follows from those of 0.1.0."""
    shutil.copy(FOLDER / name / "ledger.jsonl", tmp_path / "ledger.jsonl")
    ledger = SiteLedger(tmp_path / "ledger.jsonl")
    lines, last = ledger.chain.head()
    assert ledger.chain.append({"count": 0})["before"] == last
    assert ledger.chain.head()[0] == lines + 1


def test_runs_of_0_1_0_are_refused_with_a_sentence():
    """Their states name classes by module and class, which have moved since then."""
    with pytest.raises(FormatError, match=r"fit\.ckpt: partsong 0\.1\.0 wrote .* or start a new run"):
        load_run(FOLDER / "fit.ckpt")
    with pytest.raises(DamagedState, match=r"server-run\.state: partsong 0\.1\.0 wrote .* or start a new run"):
        load_state(FOLDER / "server-run.state", RunState)
