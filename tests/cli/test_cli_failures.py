"""Failures: one JSON object for programs, options instead of arguments for people."""

import copy
import json
import pickle
import warnings

import numpy as np
import pytest
import typer

from partsong.console.output import guarded, plain
from partsong.errors import (
    BrokenChain,
    DataError,
    FeatureError,
    MissingExtra,
    ParameterError,
    PartsongError,
    reworded,
)
from partsong.training.result import EmptyModelWarning


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["fit", "none.npy", "-o", "m.safetensors"], "FileError"),
        (["fit", "bad.npy", "-o", "m.safetensors"], "DataError"),
        (["fit", "data.npy", "-o", "m.safetensors", "-k", 10**6], "ParameterError"),
        (["transform", "data.npy", "none.safetensors", "-o", "W.csv"], "FileError"),
        (["check", "none.npy"], "FileError"),
        (["check", "data.npy", "--report", "none/x.csv"], "FileError"),
        (["split", "data.npy", "-p", 100, "-o", "parts"], "ParameterError"),
        (["info", "data.npy"], "FormatError"),
        (["demo", "-o", "none/x.html"], "FileError"),
    ],
)
def test_json_tells_of_failures(invoke, data_npy, tmp_path, words, kind):
    np.save(tmp_path / "bad.npy", -np.ones((3, 3)))
    result = invoke(*words, "--json", code=1)
    (line,) = result.stdout.splitlines()
    said = json.loads(line)
    assert (said["type"], said["exit_code"]) == (kind, 1)
    assert result.stderr == f"Error: {said['error']}\n"
    assert invoke(*words, code=1).stdout == ""


def test_json_tells_of_faults_of_our_own(invoke, data_npy, monkeypatch):
    from partsong.cli import fit_session

    def fail(*_):
        raise ZeroDivisionError("never foreseen")

    monkeypatch.setattr(fit_session, "estimator_of", lambda *given, **more: fail())
    result = invoke("fit", data_npy, "-k", 2, "-o", "m.safetensors", "--json", code=1)
    said = json.loads(result.stdout.splitlines()[-1])
    assert said == {"error": "never foreseen", "type": "ZeroDivisionError", "exit_code": 1}
    assert isinstance(result.exception, ZeroDivisionError)


def test_data_that_cannot_be_factorized_are_a_verdict_and_not_a_failure(told, tmp_path):
    np.save(tmp_path / "bad.npy", -np.ones((3, 3)))
    said = told("check", "bad.npy", code=1)
    assert said["factorizable"] is False
    assert "error" not in said


def test_what_was_added_on_the_way_is_told(invoke, data_npy, monkeypatch):
    from partsong.cli import fit_session

    def fail(*_, **__):
        error = DataError("bad")
        error.add_note("(party 'x')")
        raise error

    monkeypatch.setattr(fit_session.Session, "begin", fail)
    result = invoke("fit", data_npy, "-k", 2, "-o", "m.safetensors", "--json", code=1)
    assert json.loads(result.stdout)["error"] == "bad (party 'x')"
    assert "(party 'x')" in result.stderr


def test_a_spoilt_clock_is_told_before_the_fit(invoke, data_npy, monkeypatch, tmp_path):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    assert "SOURCE_DATE_EPOCH" in invoke("fit", data_npy, "-o", "m.safetensors", code=1).stderr
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "9" * 30)
    assert "SOURCE_DATE_EPOCH" in invoke("fit", data_npy, "-o", "m.safetensors", code=1).stderr
    assert not (tmp_path / "m.safetensors").exists()


def told_by(arguments, error):
    """The message of an error that leaves a command with these arguments."""

    @guarded
    def command(**_):
        raise error

    with pytest.raises(typer.Exit):
        command(**dict.fromkeys(arguments))
    return plain(error)


@pytest.mark.parametrize(
    ("message", "parameter", "said"),
    [
        ("n_components must be at least 1; got 0.", "n_components", "--components must be at least 1; got 0."),
        ("n_components=10 is far more than this.", "n_components", "--components 10 is far more than this."),
        ("x.csv: label='site' is not a column.", "label", "x.csv: --label 'site' is not a column."),
        ("In party 'a': x.csv: label='b'", "label", "In party 'a': x.csv: --label 'b'"),
        ("There is no column 'y'.", "label", "--label: There is no column 'y'."),
        ("labels must be text.", "label", "--label: labels must be text."),
        ("runs/label=3/x.csv: no column.", "label", "--label: runs/label=3/x.csv: no column."),
        ("alpha_W must be zero or more; got -1.", "alpha_W", "--alpha-w must be zero or more; got -1."),
        ("random_state must be a number.", "random_state", "--seed must be a number."),
        ("n_threads must be at least 1; got 0.", "n_threads", "--threads must be at least 1; got 0."),
        ("method_options must be a mapping.", "method_options", "--method-options must be a mapping."),
        ("max_iter must be at least 1.", "max_iter", "--max-iter must be at least 1."),
        ("strength must be above 0.", "strength", "strength must be above 0."),
        ("label must be text.", None, "label must be text."),
    ],
)
def test_options_stand_in_the_place_of_parameters(message, parameter, said):
    arguments = ("n_components", "label", "alpha_w", "seed", "threads", "method_options", "max_iter")
    assert told_by(arguments, ParameterError(message, parameter=parameter)) == said


@pytest.mark.parametrize(
    "error",
    [
        ParameterError("tol must be zero or more.", parameter="tol"),
        FeatureError("x", missing={"a": ("b",)}),
        MissingExtra("x", parameter="engine"),
        BrokenChain("x", 3, "hash"),
    ],
)
def test_an_error_keeps_what_it_carries(error):
    for again in (reworded(error, "a.csv: y"), pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert vars(again) == vars(error)
    assert str(reworded(error, "a.csv: y")) == "a.csv: y"


def test_warnings_of_a_command_are_lines(capsys):
    @guarded
    def command():
        for _ in range(2):
            warnings.warn("The model is zero.", EmptyModelWarning, stacklevel=1)

    command()
    assert capsys.readouterr().err == "Warning: The model is zero.\n"


@pytest.mark.parametrize(
    ("words", "option", "code"),
    [
        (["fit", "data.npy", "-o", "m.safetensors", "--time-budget", 0], "--time-budget", 2),
        (["fit", "data.npy", "-o", "m.safetensors", "-k", 10**6], "--components", 1),
        (["fit", "data.npy", "-o", "m.safetensors", "--key", "x"], "--key", 2),
        (["fit", "data.npy", "-o", "m.safetensors", "--label", "x"], "--label", 2),
        (["fit", "data.npy", "-o", "m.safetensors", "--no-header"], "--header", 2),
        (["split", "labelled.npz", "-p", 2, "--by", "y", "--concentration", 0, "-o", "parts"], "--concentration", 2),
        (["split", "data.npy", "-p", 2, "--by", "y", "-o", "parts"], "--by", 2),
        (["fit", "large.npy", "-o", "m.safetensors"], "float64", 1),
    ],
)
def test_commands_speak_of_options(invoke, data_npy, X, tmp_path, words, option, code):
    np.savez(tmp_path / "labelled.npz", X=X, y=np.arange(45) % 3)
    np.save(tmp_path / "large.npy", np.full((3, 3), 1e20, np.float32))
    message = invoke(*words, code=code).stderr
    assert option in message
    for name in ("n_components", "time_budget", "label=", "key=", "dtype=", "header=", "None"):
        assert name not in message


def test_names_used_twice_are_told_with_their_places(invoke, X, tmp_path):
    names = np.array([f"g{j}" for j in range(10)] + ["g3", "g3"])
    np.savez(tmp_path / "twice.npz", X=X, feature_names=names)
    (tmp_path / "twice.csv").write_text("a,b,a\n1,2,3\n4,5,6\n")
    assert "columns 3, 10, 11" in invoke("fit", "twice.npz", "-o", "m.safetensors", code=1).stderr
    assert "columns 0, 2" in invoke("fit", "twice.csv", "-o", "m.safetensors", code=1).stderr


def test_every_error_of_ours_is_told_with_its_class(invoke, data_npy, monkeypatch):
    from partsong.cli import fit_session

    for kind in PartsongError.__subclasses__():

        def fail(*_, kind=kind, **__):
            raise kind("no")

        monkeypatch.setattr(fit_session.Session, "begin", fail)
        result = invoke("fit", data_npy, "-k", 2, "-o", "m.safetensors", "--json", code=1)
        assert json.loads(result.stdout)["type"] == kind.__name__
