"""Ctrl-C at awkward moments, and numbers that go wrong on the way."""

import csv
import json
import os
import signal

import pytest

import partsong
from partsong.cli import fit_session
from partsong.core.runtime import graceful_interrupt
from partsong.training import centralized

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals to oneself are a POSIX affair")


@pytest.fixture(autouse=True)
def interrupts_work():
    """Also under a shell that ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press():
    signal.raise_signal(signal.SIGINT)


def test_the_first_is_held_back_and_the_second_is_not(capsys):
    with graceful_interrupt("wait") as pressed:
        press()
        assert pressed.count == 1
        with pytest.raises(KeyboardInterrupt):
            press()
    assert capsys.readouterr().err == "wait\n"
    with pytest.raises(KeyboardInterrupt):
        press()


def test_while_the_model_is_finished(invoke, data_npy, monkeypatch):
    plain = centralized.finish

    def finish(*given):
        press()
        return plain(*given)

    monkeypatch.setattr(centralized, "finish", finish)
    result = invoke("fit", data_npy, "-k", 3, "-o", "m.safetensors", "--json", code=130)
    assert json.loads(result.stdout)["outcome"] == "converged"
    assert "again" in result.stderr
    assert partsong.load_model("m.safetensors").components.shape == (3, 12)


def test_before_the_first_iteration_is_done_there_is_nothing_to_save(told, data_npy, monkeypatch, tmp_path):
    from partsong.solvers.squared_error import SquaredError

    monkeypatch.setattr(SquaredError, "row_step", lambda *given: (press(), press()))
    said = told("fit", data_npy, "-k", 3, "-o", "m.safetensors", "--checkpoint", "c.ckpt", code=130)
    assert said == {"error": "Interrupted; no result was saved.", "type": "KeyboardInterrupt", "exit_code": 130}
    assert not (tmp_path / "m.safetensors").exists()
    assert not (tmp_path / "c.ckpt").exists()


def test_a_resumed_run_has_a_model_before_its_first_iteration(told, data_npy, monkeypatch):
    from partsong.solvers.squared_error import SquaredError

    begin = ["fit", data_npy, "-k", 3, "--tol", 0]
    told(*begin, "--max-iter", 3, "-o", "m.safetensors", "--checkpoint", "c.ckpt")
    monkeypatch.setattr(SquaredError, "row_step", lambda *given: (press(), press()))
    said = told("fit", data_npy, "--resume", "c.ckpt", "--max-iter", 5, "-o", "again.safetensors", code=130)
    assert (said["iterations"], said["outcome"]) == (3, "interrupted")
    first, again = (partsong.load_model(f"{name}.safetensors").components for name in ("m", "again"))
    assert (first == again).all()


def test_the_first_lets_the_iteration_finish(told, data_npy, monkeypatch):
    from partsong.solvers.squared_error import SquaredError

    plain = SquaredError.row_step

    def local(self, *given):
        press()
        return plain(self, *given)

    monkeypatch.setattr(SquaredError, "row_step", local)
    said = told("fit", data_npy, "-k", 3, "-o", "m.safetensors", code=130)
    assert (said["iterations"], said["outcome"]) == (1, "interrupted")


def test_sigterm_goes_the_same_way(told, data_npy, monkeypatch):
    from partsong.solvers.squared_error import SquaredError

    plain = SquaredError.row_step

    def local(self, *given):
        signal.raise_signal(signal.SIGTERM)
        return plain(self, *given)

    monkeypatch.setattr(SquaredError, "row_step", local)
    said = told("fit", data_npy, "-k", 3, "-o", "m.safetensors", code=143)
    assert (said["iterations"], said["outcome"]) == (1, "interrupted")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_while_the_data_are_read(told, data_npy, monkeypatch, tmp_path):
    monkeypatch.setattr(fit_session, "read_data", lambda *given, **more: signal.raise_signal(signal.SIGTERM))
    said = told("fit", data_npy, "-k", 3, "-o", "m.safetensors", code=143)
    assert said == {"error": "Interrupted; no result was saved.", "type": "KeyboardInterrupt", "exit_code": 143}
    assert not (tmp_path / "m.safetensors").exists()
    monkeypatch.setattr(fit_session, "read_data", lambda *given, **more: press())
    assert told("fit", data_npy, "-k", 3, "-o", "m.safetensors", code=130)["exit_code"] == 130


def test_somebody_elses_handler_of_sigterm_stays(invoke, data_npy, monkeypatch):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *given: heard.append(given))
    try:
        monkeypatch.setattr(fit_session, "report", lambda *given: signal.raise_signal(signal.SIGTERM))
        invoke("fit", data_npy, "-k", 3, "-o", "m.safetensors")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(heard) == 1


def test_while_the_data_are_read(invoke, data_npy, monkeypatch, tmp_path):
    monkeypatch.setattr(fit_session, "read_data", lambda *given, **more: press())
    result = invoke("fit", data_npy, "-k", 3, "-o", "m.safetensors", code=130)
    assert "Interrupted" in result.stderr
    assert not (tmp_path / "m.safetensors").exists()


def test_divergence_is_an_outcome(told, data_npy, monkeypatch, tmp_path):
    from partsong.solvers.squared_error import SquaredError

    nan = float("nan")
    monkeypatch.setattr(SquaredError, "metrics", lambda *given: {"relative_error": nan, "objective": nan})
    said = told("fit", data_npy, "-k", 3, "-o", "m.safetensors", "--run-folder", "run", "--checkpoint", "c.ckpt")
    assert said["outcome"] == "diverged"
    assert said["relative_error"] is not None
    rows = list(csv.DictReader((tmp_path / "run/history.csv").read_text().splitlines()))
    assert rows[0]["relative_error"] == ""
