"""Names of version 0.1.0: an error for an old one has the new one; model files are translated when they are loaded."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import partsong
from partsong import methods
from partsong.core import renamed
from partsong.core.interfaces import Schedule
from partsong.errors import FormatError, ParameterError
from partsong.federation.experiment import Experiment
from partsong.federation.policy import Policy
from partsong.io.topic_file import load_topics
from partsong.training.run_folder import RunFolder

X = np.random.default_rng(0).random((12, 5))
FILES = Path(__file__).resolve().parents[3].rglob("from_0_1_0/federated-*.safetensors")


OF_TOPICS = {"max_share", "longest_word", "fits_first"}


@pytest.mark.parametrize(
    "old", sorted(set(renamed.PARAMETERS) - {"masked_bound", "sums", "synchronisation"} - OF_TOPICS)
)
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


def test_nested_options_are_translated():
    settings = {"method": "then-exact", "method_options": {"first": "ipalm-once", "rate": 0.1}}
    assert renamed.translate_settings(settings)["method_options"] == {"first": "one-shot-ipalm", "rate": 0.1}


@pytest.mark.parametrize("old", ["stop", "leave out"])
def test_an_old_value_in_an_experiment_names_the_new_one(old):
    new = renamed.VALUES["on_party_error"][old]
    with pytest.raises(ParameterError, match=f"called '{new}' since"):
        Experiment.from_table({"method": "fedavg", "rank": 2, "rounds": 1, "on_party_error": old})
    with pytest.raises(ParameterError, match=f"called '{new}' since"):
        Schedule(1, on_party_error=old)


def test_an_old_option_of_a_method_names_the_new_one():
    with pytest.raises(ParameterError, match="called 'synchronization' since"):
        partsong.FederatedNMF(2, method="fnmf", method_options={"synchronisation": "personal"}).fit([X, X])
    with pytest.raises(ParameterError, match="called 'local' since"):
        partsong.FederatedNMF(2, method="exact", init_mode="independent").fit([X, X])


def test_an_old_key_of_a_policy_names_the_new_one():
    with pytest.raises(ParameterError, match="called 'methods' since"):
        Policy.from_table({"recipes": ["exact"]})


def test_set_params_names_the_new_parameter():
    model = partsong.FederatedNMF(2)
    with pytest.raises(ParameterError, match="masked= is called secure_aggregation="):
        model.set_params(masked=True)
    assert model.set_params(secure_aggregation=True).secure_aggregation is True


def test_run_folders_have_the_present_names(tmp_path):
    """Settings of a run, its history and its checkpoint, as version 0.1.0 named them."""
    folder = tmp_path / "run"
    model = partsong.FederatedNMF(2, rounds=2, random_state=0).fit([X, X], run_folder=folder)
    settings = json.loads((folder / "settings.json").read_text())
    old = {new: old for old, new in renamed.PARAMETERS.items()}
    written = {old.get(name, name): value for name, value in settings.items()} | {"faulty": "leave out"}
    (folder / "settings.json").write_text(json.dumps(written))
    history = (folder / "history.csv").read_text()
    (folder / "history.csv").write_text(history.replace("cohort", "group", 1))
    read = RunFolder(folder)
    assert read.settings() == settings | {"on_party_error": "skip"}
    assert [row.cohort for row in read.history()] == [row.cohort for row in model.history_]
    (folder / "history.csv").write_text(history.replace("seconds", "hours", 1))
    with pytest.raises(FormatError, match="not the history of a fit"):
        read.history()
