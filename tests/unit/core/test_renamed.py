"""Names of version 0.1.0: an error for an old one has the new one; model files are translated when they are loaded."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import partsong
from partsong import methods
from partsong.core import renamed
from partsong.errors import ParameterError
from partsong.federation.experiment import Experiment
from partsong.io.topic_file import load_topics

X = np.random.default_rng(0).random((12, 5))
FILES = Path(__file__).resolve().parents[3].rglob("from_0_1_0/federated-*.safetensors")


OF_TOPICS = {"max_share", "longest_word", "fits_first"}


@pytest.mark.parametrize("old", sorted(set(renamed.PARAMETERS) - {"masked_bound", "sums"} - OF_TOPICS))
def test_an_old_argument_names_the_new_one(old):
    with pytest.raises(ParameterError, match=f"{old}= is called {renamed.PARAMETERS[old]}="):
        partsong.FederatedNMF(2, **{old: True})


def test_old_arguments_of_functions_name_the_new_ones():
    with pytest.raises(ParameterError, match="sums= is called reduce="):
        partsong.fit_distributed(X, 2, sums="in-order")
    with pytest.raises(ParameterError, match="faulty= is called on_party_error="):
        partsong.compare([X, X], 2, faulty="stop")
    with pytest.raises(ParameterError, match="masked= is called secure_aggregation="):
        partsong.FederatedTopicModel(2, masked=True)
    for old in OF_TOPICS:
        with pytest.raises(ParameterError, match=f"{old}= is called {renamed.PARAMETERS[old]}="):
            partsong.FederatedTopicModel(2, **{old: True})
    with pytest.raises(TypeError, match="unexpected keyword"):
        partsong.FederatedNMF(2, nonsense=True)


@pytest.mark.parametrize(("parameter", "old"), [(p, old) for p in renamed.VALUES for old in renamed.VALUES[p]])
def test_an_old_value_names_the_new_one(parameter, old):
    new = renamed.VALUES[parameter][old]
    if parameter in ("method", "first"):
        with pytest.raises(ParameterError, match=f"called '{new}' since"):
            methods.build(old, 2)
    elif parameter != "outcome":
        with pytest.raises(ParameterError, match=f"called '{new}' since"):
            partsong.FederatedNMF(2, method="fedavg", **{parameter: old}).fit([X, X])


@pytest.mark.parametrize("old", ["masked", "faulty", "start"])
def test_an_old_key_of_an_experiment_names_the_new_one(old):
    with pytest.raises(ParameterError, match=f"called '{renamed.PARAMETERS[old]}' since"):
        Experiment.from_table({"method": "fedavg", "rank": 2, "rounds": 1, old: "x"})


COMMANDS = [
    *(("fit", "x.npy", old) for old in renamed.OPTIONS if old != "--drop"),
    ("federation", "run", "e.toml", "--drop"),
    ("federation", "secret"),
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[-1])
def test_an_old_option_or_command_names_the_new_one(words):
    from partsong.cli.main import app

    new = {**renamed.OPTIONS, **renamed.COMMANDS}[words[-1]]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert f"{words[-1]} is called {new}" in " ".join(result.output.split())


@pytest.mark.parametrize("path", sorted(FILES), ids=lambda path: path.stem)
def test_settings_of_an_old_model_file_have_the_present_names(path):
    settings = (load_topics if "topics" in path.stem else partsong.load_model)(path).settings
    assert not set(renamed.PARAMETERS) & set(settings)
    assert settings.get("on_party_error", "raise") == "raise"
    assert settings.get("init_mode", "shared") in ("shared", "local")


def test_translation_leaves_other_settings_alone():
    settings = {"columns": "common", "method": "fnmf-alone", "start": "independent", "masked": True, "rounds": 3}
    expected = {
        "columns": "common", "method": "fnmf-local", "init_mode": "local", "secure_aggregation": True, "rounds": 3,
    }  # fmt: skip
    assert renamed.translate_settings(settings) == expected
    assert renamed.translate_settings(expected) == expected
