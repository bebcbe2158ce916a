"""Failures: one JSON object for programs, options instead of arguments for people."""

import json

import numpy as np
import pytest

from partsong.console.output import as_options
from partsong.errors import DataError, PartsongError


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

    monkeypatch.setattr(fit_session, "fit_of", lambda *given, **more: fail())
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

    monkeypatch.setattr(fit_session, "fit_of", fail)
    result = invoke("fit", data_npy, "-k", 2, "-o", "m.safetensors", "--json", code=1)
    assert json.loads(result.stdout)["error"] == "bad (party 'x')"
    assert "(party 'x')" in result.stderr


def test_a_spoilt_clock_is_told_before_the_fit(invoke, data_npy, monkeypatch, tmp_path):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    assert "SOURCE_DATE_EPOCH" in invoke("fit", data_npy, "-o", "m.safetensors", code=1).stderr
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "9" * 30)
    assert "SOURCE_DATE_EPOCH" in invoke("fit", data_npy, "-o", "m.safetensors", code=1).stderr
    assert not (tmp_path / "m.safetensors").exists()


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("x.csv: label='site' is not a column.", "x.csv: --label 'site' is not a column."),
        ("Take it out as labels (label=), or drop it.", "Take it out as labels (--label), or drop it."),
        ("Pass one of these as key=.", "Pass one of these as --key."),
        ("Pass one of them as key=, or none for X.", "Pass one of them as --key, or none for X."),
        ("transpose=True says that columns are samples.", "--transpose says that columns are samples."),
        ("Pass drop_extra=True to leave them out.", "Pass --drop-extra to leave them out."),
        ("compute in float64 (dtype='float64').", "compute in float64 (--dtype 'float64')."),
        ("tol must be zero or more; got -1.", "--tol must be zero or more; got -1."),
        (
            "time_budget must be more than 0 seconds (or None); got -1.",
            "--time-budget must be more than 0 seconds; got -1.",
        ),
        (
            "n_components must be a whole number of at least 1, or None; got 0.",
            "--components must be a whole number of at least 1; got 0.",
        ),
        ("n_components=10 is far more than this.", "--components 10 is far more than this."),
        ("max_iter must be at least 1.", "--max-iter must be at least 1."),
        ("Raise max_iter, or tol=0.1.", "Raise --max-iter, or --tol 0.1."),
        ("header=True names, header=False does not.", "--header names, --no-header does not."),
        ("A schedule needs at least one round; rounds=0.", "A schedule needs at least one round; --rounds 0."),
        ("alpha_W must be zero or more; got -1.", "--alpha-w must be zero or more; got -1."),
        ("alpha_H must be zero or more; got -1.", "--alpha-h must be zero or more; got -1."),
        ("l1_ratio must lie between 0 and 1; got 2.", "--l1-ratio must lie between 0 and 1; got 2."),
        ("local_steps must be 1 or more.", "--local-steps must be 1 or more."),
        ("kernel_threads must be at least 1; got 0.", "--threads must be at least 1; got 0."),
        ("n_threads must be at least 1; got 0.", "--threads must be at least 1; got 0."),
        ("random_state must be a number.", "--seed must be a number."),
        ("server_rate must be a number; got 'x'.", "--server-rate must be a number; got 'x'."),
        (
            "Prune less: a smaller min_documents, or a larger max_share.",
            "Prune less: a smaller --min-documents.",
        ),
        ("x.npz: concentration must be more than 0.", "x.npz: --concentration must be more than 0."),
        ("Unknown solver 'x'; choose one of hals.", "Unknown --solver 'x'; choose one of hals."),
        ("Unknown init 'x'; choose one of auto.", "Unknown --init 'x'; choose one of auto."),
        (
            "The l2 penalty must be zero or more and finite; got inf.",
            "The L2 part of --alpha-w and --alpha-h (see --l1-ratio) must be zero or more and finite; got inf.",
        ),
    ],
)
def test_arguments_are_told_as_options(message, said):
    assert as_options(message) == said
    assert as_options(said) == said


@pytest.mark.parametrize(
    "message",
    [
        "runs/label=3/x.csv: there is no such file.",
        "max_iter.csv: there is no such file.",
        "data/n_components/x.csv: damaged.",
        "feature 'time_budget' is missing; so is 'label='.",
        "The header has the columns 'max_iter', \"tol\", 'key'.",
        "The method of the fit, its key and its label.",
        "C:\\max_iter\\x.npy: damaged.",
        "liver/experiment.toml: local_steps is for exact; rounds=3 has its place.",
    ],
)
def test_names_of_files_and_columns_stay(message):
    assert as_options(message) == message


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
        (["fit", "large.npy", "-o", "m.safetensors"], "--dtype", 1),
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

        monkeypatch.setattr(fit_session, "fit_of", fail)
        result = invoke("fit", data_npy, "-k", 2, "-o", "m.safetensors", "--json", code=1)
        assert json.loads(result.stdout)["type"] == kind.__name__
