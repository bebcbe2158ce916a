import json

import numpy as np
import pytest

import partsong
from partsong.training.checkpoint import load_run


def same_model(a, b):
    a, b = partsong.load_model(a), partsong.load_model(b)
    np.testing.assert_array_equal(a.components, b.components)
    np.testing.assert_array_equal(a.shares, b.shares)
    assert a.relative_error == b.relative_error


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--solver", "ipalm", "--init", "nndsvda"],
        ["--solver", "mu", "--dtype", "float32"],
        ["--solver", "bpp", "--alpha-w", 0.01, "--l1-ratio", 0.5],
        ["--init", "random", "-k", 1],
        ["--solver", "sanls", "--sketch", "gaussian", "--sketch-ratio", 0.4],
    ],
)
def test_centralised_runs_go_on_bit_for_bit(invoke, data_npy, options):
    begin = ["fit", data_npy, "-k", 3, "--seed", 4, "--tol", 0, *options, "-q"]
    invoke(*begin, "--max-iter", 10, "-o", "whole.safetensors")
    invoke(*begin, "--max-iter", 4, "-o", "half.safetensors", "--checkpoint", "c.ckpt")
    invoke("fit", data_npy, "--resume", "c.ckpt", "--max-iter", 10, "-o", "joined.safetensors", "-q")
    same_model("whole.safetensors", "joined.safetensors")


@pytest.mark.parametrize("method", ["exact", "fedavg", "syn-sd", "syn-ssd-uv", "asyn-ssd-v"])
def test_federations_go_on_bit_for_bit(told, parts, tmp_path, method):
    begin = ["fit", parts, "-k", 3, "--seed", 4, "--tol", 0, "--method", method]
    whole = told(*begin, "--rounds", 10, "-o", "whole.safetensors", "--run-folder", "whole")
    told(*begin, "--rounds", 4, "-o", "half.safetensors", "--checkpoint", "c.ckpt", "--engine", "sequential")
    again = ["fit", parts, "--resume", "c.ckpt", "--rounds", 10, "-o", "joined.safetensors", "--run-folder", "joined"]
    joined = told(*again)
    same_model("whole.safetensors", "joined.safetensors")
    for name in ("method", "iterations", "relative_error", "bytes_up_per_party", "bytes_down_per_party"):
        assert joined[name] == whole[name]
    assert (tmp_path / "whole/bytes.csv").read_text() == (tmp_path / "joined/bytes.csv").read_text()


def test_the_best_round_may_lie_before_the_checkpoint(invoke, data_npy, monkeypatch):
    """Rounds that only get worse after the fourth: the model is the fourth's, resumed or not."""
    from partsong.solvers.squared_error import SquaredError

    plain = SquaredError.metrics

    def metrics(self, server):
        told = dict(plain(self, server))
        worse = 1.0 if server.memory.count > 4 else 0.0
        return {name: value + worse for name, value in told.items()}

    monkeypatch.setattr(SquaredError, "metrics", metrics)
    begin = ["fit", data_npy, "-k", 3, "--seed", 4, "--tol", 0, "-q"]
    invoke(*begin, "--max-iter", 9, "-o", "whole.safetensors")
    invoke(*begin, "--max-iter", 6, "-o", "half.safetensors", "--checkpoint", "c.ckpt")
    invoke("fit", data_npy, "--resume", "c.ckpt", "--max-iter", 9, "-o", "joined.safetensors", "-q")
    same_model("whole.safetensors", "joined.safetensors")
    same_model("half.safetensors", "joined.safetensors")


def test_a_run_that_had_converged_stays_where_it_is(told, data_npy):
    first = told("fit", data_npy, "-k", 3, "-o", "a.safetensors", "--checkpoint", "c.ckpt")
    again = told("fit", data_npy, "-o", "b.safetensors", "--resume", "c.ckpt")
    assert first["outcome"] == again["outcome"] == "converged"
    assert first["iterations"] == again["iterations"]
    assert again["seconds"] >= 0
    assert again["resumed_from"] == "c.ckpt"
    same_model("a.safetensors", "b.safetensors")


def test_checkpoints_are_written_on_the_way(invoke, data_npy, tmp_path, monkeypatch):
    from partsong.training import checkpoint

    saved = []
    plain = checkpoint.save_run
    monkeypatch.setattr(
        checkpoint, "save_run", lambda path, run: (saved.append(run.checkpoint.index), plain(path, run))
    )
    begin = ["fit", data_npy, "-k", 3, "-o", "m.safetensors", "--tol", 0, "--max-iter", 5, "--checkpoint", "c.ckpt"]
    invoke(*begin, "--checkpoint-every", 0)
    assert saved == [1, 2, 3, 4, 5]
    assert (tmp_path / "c.ckpt").stat().st_mode & 0o077 == 0  # private weights are inside
    saved.clear()
    invoke(*begin)
    assert saved == [5]


def test_a_checkpoint_that_cannot_be_written_does_not_end_the_fit(invoke, data_npy, tmp_path, monkeypatch):
    from partsong.errors import FileError
    from partsong.training import checkpoint

    def full(path, run):
        raise FileError("the disk is full.")

    monkeypatch.setattr(checkpoint, "save_run", full)
    result = invoke("fit", data_npy, "-k", 2, "-o", "m.safetensors", "--checkpoint", "c.ckpt")
    assert "disk is full" in result.stderr
    assert (tmp_path / "m.safetensors").exists()


def test_other_data_and_settings_are_refused_by_name(invoke, data_npy, parts, X, tmp_path):
    begin = ["-k", 3, "--seed", 4, "--max-iter", 3, "--checkpoint", "c.ckpt"]
    invoke("fit", data_npy, *begin, "-o", "m.safetensors", "-q")
    again = ["--resume", "c.ckpt", "-o", "m2.safetensors"]
    message = invoke("fit", data_npy, *again, "-k", 5, "--seed", 9, "--solver", "mu", code=1).stderr
    for name in ("--components (3 there, 5 here)", "--seed (4 there, 9 here)", "--solver (hals there, mu here)"):
        assert name in message
    np.save(tmp_path / "other.npy", X + 1)
    assert "data (other values)" in invoke("fit", "other.npy", *again, code=1).stderr
    np.save(tmp_path / "fewer.npy", X[1:])
    assert "data (other shape)" in invoke("fit", "fewer.npy", *again, code=1).stderr
    assert "method (centralised there, exact here)" in invoke("fit", parts, *again, code=1).stderr
    assert not (tmp_path / "m2.safetensors").exists()


def test_what_may_change(told, data_npy):
    begin = ["fit", data_npy, "-k", 3, "--tol", 0, "-o", "m.safetensors"]
    told(*begin, "--max-iter", 3, "--checkpoint", "c.ckpt", "--time-budget", 1e-9)
    said = told("fit", data_npy, "-o", "m.safetensors", "--resume", "c.ckpt", "--tol", 1e-2, "--threads", 1)
    assert said["outcome"] == "max-rounds"  # the most iterations are those of before, the time budget is not
    assert said["iterations"] == 3


def test_a_checkpoint_of_something_else_is_refused(invoke, data_npy, tmp_path):
    from partsong.core.interfaces import Checkpoint, Message
    from partsong.io.state_file import write_state
    from partsong.training.checkpoint import SavedRun

    point = Checkpoint(0, {}, (), Message({}))
    for other in (point, SavedRun(point), SavedRun(None), (1, 2)):
        write_state(tmp_path / "c.ckpt", other, "checkpoint")
        refused = invoke("fit", data_npy, "-o", "m.safetensors", "--resume", "c.ckpt", code=1)
        assert "not the checkpoint of a fit" in refused.stderr


def test_the_file_knows_what_it_belongs_to(invoke, data_npy, tmp_path):
    invoke("fit", data_npy, "-k", 3, "--max-iter", 3, "-o", "m.safetensors", "--checkpoint", "c.ckpt")
    saved = load_run(tmp_path / "c.ckpt")
    assert saved.checkpoint.index == len(saved.history) == 3
    assert saved.sent == (), "nobody else takes part"
    assert saved.about["data"]["all"]["shape"] == [45, 12]
    assert str(tmp_path) not in json.dumps(dict(saved.about))


def traffic_of(folder):
    lines = [json.loads(line) for line in (folder / "traffic.jsonl").read_text().splitlines()]
    assert {line["file"] for line in lines} == {f"traffic/{path.name}" for path in (folder / "traffic").iterdir()}
    return {(line["round"], line["party"]): line["bytes"] for line in lines}


def sent_of(folder):
    rows = [row.split(",") for row in (folder / "bytes.csv").read_text().splitlines()[1:]]
    return {(int(index), party): int(up) for index, party, up, _ in rows}


FIRST = ["-k", 4, "--rounds", 3, "--tol", 0, "--seed", 1, "--run-folder", "run", "--checkpoint", "r.ckpt", "-q"]
REST = ["-k", 4, "--rounds", 6, "--tol", 0, "--resume", "r.ckpt", "--overwrite", "-q"]


@pytest.mark.parametrize("further", [False, True], ids=["from-its-end", "from-before-its-end"])
def test_a_resumed_run_keeps_the_traffic_of_its_first_part(invoke, parts, tmp_path, further):
    """The same files as a run in one go; rounds after the checkpoint are replaced."""
    invoke("fit", parts, *FIRST, "--record")
    if further:
        first = [word for word in FIRST if word not in ("--checkpoint", "r.ckpt")]
        invoke("fit", parts, *first, "--rounds", 5, "--record", "--overwrite")
        (tmp_path / "run/traffic/round-0005.safetensors").write_text("stale")
    result = invoke("fit", parts, *REST, "--run-folder", "run", "--record")
    assert result.stderr == ""
    assert traffic_of(tmp_path / "run") == sent_of(tmp_path / "run")
    assert {index for index, _ in traffic_of(tmp_path / "run")} == set(range(1, 7))
    invoke("fit", parts, "-k", 4, "--rounds", 6, "--tol", 0, "--seed", 1, "--run-folder", "whole", "--record", "-q")
    for path in (tmp_path / "whole/traffic").iterdir():
        assert path.read_bytes() == (tmp_path / "run/traffic" / path.name).read_bytes()
    assert (tmp_path / "whole/traffic.jsonl").read_text() == (tmp_path / "run/traffic.jsonl").read_text()


def test_a_run_that_was_killed_has_left_its_traffic(invoke, parts, tmp_path, monkeypatch):
    from partsong.training.checkpoint import RunRecorder

    plain = RunRecorder.watch

    def killed(self, done, row):
        if row.iteration == 3:
            raise MemoryError
        plain(self, done, row)

    with monkeypatch.context() as patched:
        patched.setattr(RunRecorder, "watch", killed)
        invoke("fit", parts, *FIRST, "--record", code=1)
    with (tmp_path / "run/traffic.jsonl").open("a") as file:
        file.write('{"round": 3, "party": "par')
    assert invoke("fit", parts, *REST, "--run-folder", "run", "--record").stderr == ""
    assert traffic_of(tmp_path / "run") == sent_of(tmp_path / "run")


def test_traffic_that_is_missing_or_ends_is_told(invoke, parts, tmp_path):
    invoke("fit", parts, *FIRST, "--record")
    elsewhere = invoke("fit", parts, *REST, "--run-folder", "other", "--record").stderr
    assert "does not hold the traffic of rounds 1, 2, 3" in elsewhere
    assert {index for index, _ in traffic_of(tmp_path / "other")} == {4, 5, 6}
    invoke("fit", parts, "-k", 4, "--rounds", 3, "--seed", 2, "--run-folder", "foreign", "--record", "-q")
    foreign = invoke("fit", parts, *REST, "--run-folder", "foreign", "--record").stderr
    assert "not that of the resumed run" in foreign
    assert {index for index, _ in traffic_of(tmp_path / "foreign")} == {4, 5, 6}
    stopped = invoke("fit", parts, *REST, "--run-folder", "run").stderr
    assert "kept up to round 3 and not recorded after it. Add --record" in " ".join(stopped.split())
    assert {index for index, _ in traffic_of(tmp_path / "run")} == {1, 2, 3}
    quiet = invoke("fit", parts, *REST, "--run-folder", "plain").stderr
    assert quiet == "", "who records nothing misses nothing"
