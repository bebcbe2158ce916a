"""`partsong fit PARTS`: engines, lists of parts and columns, privacy, secure aggregation, and parties that fail."""

import hashlib
import json
import tracemalloc
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file
from scipy import sparse

import partsong
from partsong.cli import fit_report
from partsong.core.interfaces import Message
from partsong.data.conversion import as_matrix
from partsong.estimators import compare
from partsong.io.party_folder import read_parts
from partsong.methods.exact import SharedSums
from partsong.methods.privacy_request import PartyPrivacy, RowPrivacy
from partsong.methods.private import PrivateSums
from partsong.training.checkpoint import RunRecorder, load_run, save_run
from tests.cli.conftest import replace_in


@pytest.mark.parametrize("method", ["exact", "fedavg"])
def test_same_bits_as_the_estimator(told, parts, method):
    said = told("fit", parts, "-k", 3, "-o", "m.safetensors", "--seed", 2, "--method", method, "--rounds", 6)
    tables = read_parts(parts)
    estimator = partsong.FederatedNMF(3, method=method, rounds=6, random_state=2)
    estimator.fit([table.X for table in tables.values()], names=list(tables))
    np.testing.assert_array_equal(partsong.load_model("m.safetensors").components, estimator.components_)
    assert said["parties"] == 3
    assert said["shape"] == [45, 12]
    assert said["bytes_up_per_party"] == sum(row.bytes_up for row in estimator.history_) / 3
    assert said["bytes_down_per_party"] == sum(row.bytes_down for row in estimator.history_)


def test_engines_give_the_same_bits(told, parts):
    for engine in ("sequential", "parallel"):
        told("fit", parts, "-k", 3, "-o", f"{engine}.safetensors", "--seed", 2, "--engine", engine, "--rounds", 5)
    a, b = (partsong.load_model(f"{engine}.safetensors") for engine in ("sequential", "parallel"))
    np.testing.assert_array_equal(a.components, b.components)


def test_the_model_knows_names_but_no_samples(told, parts, names, tmp_path):
    told("fit", parts, "-k", 3, "-o", "m.safetensors", "--rounds", 3)
    model = partsong.load_model("m.safetensors")
    assert model.feature_names == names
    assert model.settings["method"] == "exact"
    assert b"patient" not in (tmp_path / "m.safetensors").read_bytes()


def test_local_only_has_one_round(told, invoke, parts):
    words = ["fit", parts, "-k", 3, "-o", "m.safetensors", "--method", "local-only"]
    assert told(*words)["iterations"] == 1
    shown = invoke(*words).stdout
    assert "only round" in shown
    assert "not converged" not in shown
    assert "not converged" in invoke("fit", parts, "-k", 3, "-o", "m.safetensors", "--rounds", 1).stdout
    invoke(*words, "--rounds", 5, code=2)


def test_a_part_that_changed_is_noticed(told, parts, tmp_path):
    path = parts / "party-02.npz"
    listing = json.loads((parts / "parts.json").read_text())
    assert [entry["sha256"] for entry in listing["parties"]] == [
        hashlib.sha256((parts / entry["file"]).read_bytes()).hexdigest() for entry in listing["parties"]
    ]
    with np.load(path) as arrays:
        content = dict(arrays)
    np.savez(path, **{**content, "X": 2 * content["X"]})  # as good as any other file, but not the one that was listed
    said = told("fit", parts, "-k", 2, "-o", "m.safetensors", code=1)
    assert said["type"] == "FormatError"
    assert "party-02.npz" in said["error"]
    assert "SHA-256" in said["error"]
    assert not (tmp_path / "m.safetensors").exists()


def test_a_list_without_hashes_is_read(told, invoke, parts):
    listing = json.loads((parts / "parts.json").read_text())
    hashes = [entry.pop("sha256") for entry in listing["parties"]]
    (parts / "parts.json").write_text(json.dumps(listing))
    assert told("fit", parts, "-k", 2, "-o", "m.safetensors", "--rounds", 2)["parties"] == len(hashes)
    for odd in ("", "abc", 5, "../" * 20 + "aaaa"):
        listing["parties"][0]["sha256"] = odd
        (parts / "parts.json").write_text(json.dumps(listing))
        assert "64 hexadecimal" in invoke("fit", parts, "-o", "m.safetensors", code=1).stderr


def test_traffic_is_recorded(told, parts, tmp_path):
    said = told("fit", parts, "-k", 3, "--run-folder", "run", "--record", "--rounds", 2, "--tol", 0)
    lines = [json.loads(line) for line in (tmp_path / "run/traffic.jsonl").read_text().splitlines()]
    assert [(line["round"], line["party"], line["phase"]) for line in lines] == [
        (index, f"party-0{party}", 0) for index in (1, 2) for party in (1, 2, 3)
    ]
    assert sum(line["bytes"] for line in lines) == 3 * said["bytes_up_per_party"]
    assert {entry["name"] for entry in lines[0]["arrays"]} == {"gram", "cross", "rows", "energy"}
    arrays = load_file(tmp_path / "run/traffic/round-0001.safetensors")
    for line in lines[:3]:
        for entry in line["arrays"]:
            sent = arrays[f"{line['party']}/0/{entry['name']}"]
            assert list(sent.shape) == entry["shape"]
            assert str(sent.dtype) == entry["dtype"]
            assert sent.nbytes == entry["bytes"]
    told("fit", parts, "-k", 3, "--run-folder", "run", "--rounds", 2, "--overwrite")
    assert not list((tmp_path / "run").glob("traffic*/*"))


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--solver", "mu"], "for one table"),
        (["--max-iter", 5], "--rounds"),
        (["--weights", "W.csv"], "transform"),
        (["--label", "site"], "for one table"),
        (["--method", "exac"], "Did you mean 'exact'"),
        (["--record"], "--run-folder"),
    ],
)
def test_options_that_mean_nothing_here(invoke, parts, words, hint):
    result = invoke("fit", parts, "-o", "m.safetensors", *words, code=2)
    assert hint in " ".join(result.stderr.replace("│", " ").split())


def test_a_folder_with_a_matrix_is_data(told, tmp_path, X):
    from scipy import io, sparse

    (tmp_path / "tenx").mkdir()
    io.mmwrite(tmp_path / "tenx/matrix.mtx", sparse.coo_matrix(X))
    (tmp_path / "tenx/parts.json").write_text("{}")
    assert told("fit", "tenx", "-k", 2, "-o", "m.safetensors")["method"] == "centralized"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"format": "partsong-parts", "version": 2, "parties": [{"name": "a", "file": "a.npz"}]}',
        '{"format": "partsong-parts", "version": 1, "parties": []}',
        '{"format": "partsong-parts", "version": 1, "parties": [{"name": "a", "file": "../data.npz"}]}',
        '{"format": "partsong-parts", "version": 1, "parties": [{"name": "a", "file": "/etc/passwd"}]}',
        '{"format": "partsong-parts", "version": 1, "parties": [{"name": 1, "file": 2}]}',
        '{"format": "partsong-parts", "version": 1, "parties": [{"name": "a", "file": "none.npz"}]}',
    ],
)
def test_damaged_lists_of_parts(invoke, parts, content):
    (parts / "parts.json").write_text(content)
    result = invoke("fit", parts, "-o", "m.safetensors", code=1)
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("name", 3, "party 2: name must be text in quotes; got 3"),
        ("name", "", 'party 2: name must be text in quotes; got ""'),
        ("name", "party-01", "same name, 'party-01'"),
        ("file", 3, "party 2: file must be text in quotes; got 3"),
        ("file", "party-01.npz", "same file, 'party-01.npz'"),
        ("file", "../party-02.npz", "not the name of a file in the same folder"),
        ("rows", "15", 'party 2: rows must be a whole number of at least 1; got "15"'),
        ("rows", 0, "party 2: rows must be a whole number of at least 1; got 0"),
        ("rows", True, "party 2: rows must be a whole number of at least 1; got true"),
        ("rows", None, "party 2: rows must be a whole number of at least 1; got null"),
        ("rows", ..., "party 2: has no 'rows'"),
    ],
)
def test_a_list_with_a_wrong_field_is_told_which(told, parts, field, value, says):
    listing = json.loads((parts / "parts.json").read_text())
    listing["parties"][1][field] = value
    if value is ...:
        del listing["parties"][1][field]
    (parts / "parts.json").write_text(json.dumps(listing))
    said = told("fit", parts, "-o", "m.safetensors", code=1)
    assert says in said["error"]
    assert said["type"] == "FormatError"
    assert "version" not in said["error"]


def test_a_party_with_bad_values_is_named(invoke, parts, replace_part):
    X = read_parts(parts)["party-02"].X
    X[0, 0] = np.nan
    replace_part("party-02", X=X)
    message = invoke("fit", parts, "-o", "m.safetensors", code=1).stderr
    assert "party-02" in message
    assert "NaN" in message


def test_columns_are_matched_by_name(told, parts, replace_part):
    words = ["fit", parts, "-k", 3, "--seed", 1, "--rounds", 3]
    told(*words, "-o", "a.safetensors")
    table = read_parts(parts)["party-02"]
    replace_part("party-02", X=table.X[:, ::-1], feature_names=np.array(table.feature_names[::-1]))
    told(*words, "-o", "b.safetensors")
    a, b = partsong.load_model("a.safetensors"), partsong.load_model("b.safetensors")
    np.testing.assert_array_equal(a.components, b.components)


def test_rounds_and_iterations_are_told_as_the_estimator_does(told, parts):
    said = told("fit", parts, "-k", 2, "-o", "m.safetensors", "--seed", 2, "--rounds", 60, "--tol", 0.05)
    tables = read_parts(parts)
    estimator = partsong.FederatedNMF(2, rounds=60, tol=0.05, random_state=2)
    estimator.fit([table.X for table in tables.values()], names=list(tables)).save("e.safetensors")
    ours, theirs = (partsong.load_model(f"{name}.safetensors").settings for name in "me")
    assert said["iterations"] < 60
    for settings in (ours, theirs):
        assert (settings["rounds"], settings["iterations"]) == (60, said["iterations"])
    loaded = partsong.FederatedNMF.load("m.safetensors")
    assert (loaded.rounds, loaded.n_iter_) == (60, said["iterations"])


ROW = ["--epsilon", 3, "--delta", 1e-5, "--unit", "row", "--row-bound", 4, "--mechanism", "rounds"]
PARTY = ["--epsilon", 3, "--unit", "party", "--method", "fedavg"]


@pytest.mark.parametrize(("options", "unit"), [(ROW, "row"), (PARTY, "party"), ([*ROW, "--secure-aggregation"], "row")])
def test_what_is_told(told, parts, options, unit, tmp_path):
    said = told("fit", parts, "-k", 3, "-o", "m.safetensors", "--rounds", 4, "--run-folder", "run", *options)
    assert said["unit"] == unit
    assert said["delta"] == 1e-5
    assert 2.99 < said["epsilon_spent"] <= 3
    assert len(said["epsilon_by_party"]) == said["parties"]
    assert said["iterations"] == 4
    assert said["secure_aggregation"] is ("--secure-aggregation" in options)
    assert "relative_error" in said["simulated"]
    assert json.loads((tmp_path / "run/result.json").read_text())["epsilon_spent"] == said["epsilon_spent"]
    header, *rows = (tmp_path / "run/history.csv").read_text().splitlines()
    spent = [float(line.split(",")[header.split(",").index("epsilon")]) for line in rows]
    assert spent == sorted(spent)
    assert spent[-1] == said["epsilon_spent"]


def test_people_are_told_too(invoke, parts):
    out = invoke("fit", parts, "-k", 3, "-o", "m.safetensors", *ROW, "--secure-aggregation").stdout
    assert "ε = 3 spent at δ = 1e-05, unit row (add-or-remove)" in out
    assert "known only in this simulation" in out
    assert "single uploads were visible to their senders only" in out


def test_ten_rounds_unless_told_otherwise(told, parts):
    assert told("fit", parts, "-k", 3, "-o", "m.safetensors", *ROW)["iterations"] == 10


def test_the_model_holds_nothing_that_was_not_released(invoke, parts, data_csv):
    invoke("fit", parts, "-k", 3, "-o", "m.safetensors", *ROW, "--rounds", 2)
    stored = partsong.load_model("m.safetensors")
    assert (stored.relative_error, stored.shares) == (None, None)
    assert "n_samples" not in stored.settings
    assert stored.settings["privacy_spent"]["unit"] == "row"
    assert partsong.FederatedNMF.load("m.safetensors").privacy == RowPrivacy(3.0, row_bound=4.0, mechanism="rounds")
    invoke("transform", data_csv, "m.safetensors", "-o", "W.csv", "--drop-extra")


def test_a_model_of_noisy_sums_does_not_tell_the_precision_of_the_data(invoke):
    np.save("X.npy", np.random.default_rng(1).random((12, 5)).astype(np.float32))
    invoke("split", "X.npy", "--parties", 3, "-o", "sites")
    invoke("fit", "sites", "-k", 2, "-o", "m.safetensors", *ROW, "--rounds", 1)
    stored = partsong.load_model("m.safetensors")
    assert stored.settings["dtype"] == str(stored.components.dtype)


def test_party_settings_survive(invoke, parts):
    invoke("fit", parts, "-k", 3, "-o", "m.safetensors", *PARTY, "--clip", 0.5, "--noise", "laplace", "--rounds", 2)
    assert partsong.FederatedNMF.load("m.safetensors").privacy == PartyPrivacy(3.0, 1e-5, 0.5, "laplace")


def test_masks_alone_give_the_model_in_the_open(told, parts):
    begin = ["fit", parts, "-k", 3, "--seed", 4, "--tol", 0, "--rounds", 5]
    plain = told(*begin, "-o", "plain.safetensors")
    masked = told(*begin, "-o", "masked.safetensors", "--secure-aggregation", "--mask-bound", 1e6)
    a, b = (partsong.load_model(f"{name}.safetensors") for name in ("plain", "masked"))
    np.testing.assert_allclose(a.components, b.components, atol=1e-7)
    assert "epsilon_spent" not in masked
    assert masked["bytes_up_per_party"] > plain["bytes_up_per_party"]
    assert partsong.FederatedNMF.load("masked.safetensors").secure_aggregation is True


class TestGoingOn:
    def test_a_finished_part_is_charged_once(self, told, parts):
        """A run that was ended by its owner after 2 of 6 rounds spends, in the end, what was planned."""
        begin = ["fit", parts, "-k", 3, *ROW, "--rounds", 6, "--checkpoint", "c.ckpt"]
        _cut_after(2, told, *begin, "-o", "half.safetensors")
        _mark_closed("c.ckpt")
        said = told("fit", parts, "--resume", "c.ckpt", "-o", "whole.safetensors")
        assert said["iterations"] == 6
        assert 2.99 < said["epsilon_spent"] <= 3

    def test_one_that_was_killed_is_charged_for_what_may_have_been_sent(self, told, parts):
        begin = ["fit", parts, "-k", 3, *ROW, "--rounds", 6, "--checkpoint", "c.ckpt"]
        _cut_after(2, told, *begin, "-o", "half.safetensors")
        said = told("fit", parts, "--resume", "c.ckpt", "-o", "whole.safetensors")
        assert said["outcome"] == "privacy-budget-exhausted"
        assert said["iterations"] == 5
        assert 2.99 < said["epsilon_spent"] <= 3

    def test_noise_was_planned_for_the_rounds(self, invoke, told, parts):
        told("fit", parts, "-k", 3, *ROW, "--rounds", 3, "--checkpoint", "c.ckpt", "-o", "m.safetensors")
        result = invoke("fit", parts, "--resume", "c.ckpt", "--rounds", 9, "-o", "m.safetensors", code=1)
        assert "--rounds (3 in the checkpoint, 9 now)" in result.stderr

    def test_another_epsilon_is_another_run(self, invoke, told, parts):
        told("fit", parts, "-k", 3, *ROW, "--rounds", 3, "--checkpoint", "c.ckpt", "-o", "m.safetensors")
        result = invoke("fit", parts, "--resume", "c.ckpt", "--epsilon", 9, "-o", "m.safetensors", code=1)
        assert "--epsilon (3.0 in the checkpoint, 9.0 now)" in result.stderr

    def test_a_round_that_a_second_interrupt_breaks_off_is_charged_and_not_sent_again(self, invoke, told, parts):
        """The file is closed; it says that every party may have sent in a round that is not in it."""
        begin = ["fit", parts, "-k", 3, *ROW, "--rounds", 6, "--checkpoint", "c.ckpt"]
        with _failing("finish", after=2, error=KeyboardInterrupt()):
            half = json.loads(invoke(*begin, "-o", "half.safetensors", "--json", code=130).stdout)
        assert half["iterations"] == 2
        said = told("fit", parts, "--resume", "c.ckpt", "-o", "whole.safetensors")
        assert (said["outcome"], said["iterations"]) == ("privacy-budget-exhausted", 5)
        assert half["epsilon_spent"] < said["epsilon_spent"] <= 3

    def test_going_on_is_noted_before_anything_is_sent(self, told, parts):
        """A closed file, a run that goes on from it and dies within a round: the next one knows."""
        begin = ["fit", parts, "-k", 3, *ROW, "--rounds", 6, "--checkpoint", "c.ckpt"]
        _cut_after(2, told, *begin, "-o", "half.safetensors")
        _mark_closed("c.ckpt")
        with _failing("finish", after=0, error=Killed()), pytest.raises(Killed):
            told("fit", parts, "--resume", "c.ckpt", "-o", "whole.safetensors")
        said = told("fit", parts, "--resume", "c.ckpt", "-o", "whole.safetensors")
        assert (said["outcome"], said["iterations"]) == ("privacy-budget-exhausted", 5)
        assert 2.99 < said["epsilon_spent"] <= 3

    def test_a_run_goes_on_in_its_own_file(self, invoke, told, parts):
        """Twice from one file is not twice the budget, and there is no second file."""
        begin = ["fit", parts, "-k", 3, *ROW, "--rounds", 4, "--checkpoint", "c.ckpt"]
        _cut_after(2, told, *begin, "-o", "half.safetensors")
        result = invoke("fit", parts, "--resume", "c.ckpt", "--checkpoint", "d.ckpt", "-o", "m.safetensors", code=2)
        assert "--checkpoint" in result.stderr
        first = told("fit", parts, "--resume", "c.ckpt", "-o", "one.safetensors")
        again = told("fit", parts, "--resume", "c.ckpt", "-o", "two.safetensors")
        one, two = (partsong.load_model(f"{name}.safetensors") for name in ("one", "two"))
        np.testing.assert_array_equal(one.components, two.components, "nothing was sent a second time")
        assert first["epsilon_spent"] == again["epsilon_spent"] <= 3
        assert first["checkpoint"] == "c.ckpt"

    def test_after_the_last_round_nothing_more_can_have_been_sent(self, told, parts):
        begin = ["fit", parts, "-k", 3, *PARTY, "--rounds", 3, "--checkpoint", "c.ckpt"]
        _cut_after(3, told, *begin, "-o", "m.safetensors")
        said = told("fit", parts, "--resume", "c.ckpt", "-o", "m.safetensors")
        assert 2.99 < said["epsilon_spent"] <= 3

    def test_no_round_follows_one_that_could_not_be_noted(self, invoke, parts, monkeypatch):
        from partsong.errors import FileError
        from partsong.training import checkpoint

        def full(path, run):
            if run.checkpoint.index >= 2:
                raise FileError("The disk is full.")
            save_run(path, run)

        monkeypatch.setattr(checkpoint, "save_run", full)
        begin = ["fit", parts, "-k", 3, *ROW, "--rounds", 6, "--checkpoint", "c.ckpt"]
        assert "disk is full" in invoke(*begin, "-o", "m.safetensors", code=1).stderr
        assert load_run("c.ckpt").checkpoint.index == 1

    @pytest.mark.parametrize("ledger", [{}, [], {"party-01": "x"}])
    def test_accounts_that_say_too_little_are_refused(self, invoke, told, parts, ledger):
        told("fit", parts, "-k", 3, *ROW, "--rounds", 3, "--checkpoint", "c.ckpt", "-o", "m.safetensors")
        save_run("c.ckpt", replace(load_run("c.ckpt"), spent=ledger))
        invoke("fit", parts, "--resume", "c.ckpt", "-o", "m.safetensors", code=1)

    def test_another_bound_of_masks_is_another_run(self, invoke, told, parts):
        begin = ["fit", parts, "-k", 3, "--secure-aggregation", "--rounds", 2]
        told(*begin, "--checkpoint", "c.ckpt", "-o", "m.safetensors")
        result = invoke("fit", parts, "--resume", "c.ckpt", "--mask-bound", 5, "-o", "m.safetensors", code=1)
        assert "--mask-bound" in result.stderr


@contextmanager
def _failing(stage, *, after, error):
    """Noisy sums whose server fails at a stage of the round after so many."""
    plain, done = getattr(PrivateSums, stage), []

    def fail(self, *given):
        if len(done) >= after:
            raise error
        done.append(stage)
        return plain(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrivateSums, stage, fail)
        yield


class Killed(BaseException):
    """What nobody catches: the end of a process."""


def _cut_after(rounds, told, *words):
    """Run until a checkpoint of so many rounds is written, and die there as a killed process would: nothing after."""
    plain = RunRecorder.save

    def save(self):
        if self.saved_index < rounds:
            plain(self)
        if self.saved_index >= rounds:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunRecorder, "save", save)
        with pytest.raises(Killed):
            told(*words)
    assert load_run("c.ckpt").checkpoint.index == rounds


def _mark_closed(path):
    """The same file as its owner's Ctrl-C would have left it."""
    save_run(path, replace(load_run(path), is_under_way=False))


def test_accounts_are_not_overwritten(invoke, parts):
    begin = ["fit", parts, "-k", 3, "-o", "m.safetensors", *ROW, "--rounds", 2, "--checkpoint", "c.ckpt"]
    invoke(*begin)
    assert "privacy budget" in invoke(*begin, code=1).stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--epsilon", 3], "needs the unit it protects"),
        (["--epsilon", 0, "--unit", "row", "--row-bound", 4], "--epsilon must be"),
        (["--epsilon", "nan", "--unit", "row", "--row-bound", 4], "--epsilon must be"),
        (["--epsilon", 3, "--unit", "row"], "--row-bound"),
        (["--epsilon", 3, "--unit", "cell"], "not one of row, party"),
        ([*ROW, "--method", "fedavg"], "sums over rows"),
        (["--epsilon", 3, "--unit", "party"], "each party sends H_p"),
        ([*ROW[:2], *ROW[4:], "--delta", 1], "below 1"),
        ([*ROW, "--clip", 1], "does not apply to --unit row"),
        ([*PARTY, "--row-bound", 1], "does not apply to --unit party"),
        ([*ROW, "--relation", "zero-out"], "--relation"),
        ([*ROW, "--time-budget", 5], "no measurement"),
        ([*ROW, "--tol", 0.1], "no measurement"),
        ([*ROW, "--local-steps", 5], "cannot be combined with RowPrivacy"),
        (["--clip", 1], "needs --epsilon"),
        (["--delta", 1e-6], "needs --epsilon"),
        (["--mask-bound", 1e6], "needs --secure-aggregation"),
        ([*ROW, "--secure-aggregation", "--mask-bound", 1e6], "follows from --epsilon"),
        (["--secure-aggregation", "--method", "asyn-sd"], "is asynchronous and cannot use secure aggregation"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_read(invoke, parts, options, words):
    result = invoke("fit", parts, "-k", 3, "-o", "m.safetensors", *options, code=2)
    assert words in result.stderr


def test_one_table_has_no_parties(invoke, data_npy):
    assert "for a folder of parts" in invoke("fit", data_npy, "-o", "m.safetensors", *ROW, code=2).stderr


def test_what_is_no_sum_cannot_be_masked(invoke, parts):
    result = invoke(
        "fit", parts, "-k", 3, "-o", "m.safetensors", "--secure-aggregation", "--method", "fnmf-local", code=1
    )
    assert "individual uploads" in result.stderr


class TestReport:
    @pytest.mark.parametrize(
        "options", [[], ["--secure-aggregation"], ROW, [*ROW, "--secure-aggregation"], PARTY, ["--method", "game"]]
    )
    def test_it_says_what_left_what_it_cost_and_what_an_attacker_makes_of_it(self, told, parts, tmp_path, options):
        said = told("fit", parts, "-k", 3, "--rounds", 3, "-o", "m.safetensors", "--report", "r.html", *options)
        page = (tmp_path / "r.html").read_text()
        for anchor in ("privacy", "attacks", "disclosure", "results"):
            assert f'id="{anchor}"' in page
        if "epsilon_spent" in said:
            assert f"unit {said['unit']}" in page
            assert said["promise"] in page
            assert "In this simulation only" in page
        else:
            assert "No noise was added" in page
        assert ("Single uploads were masked" in page) is ("--secure-aggregation" in options)

    def test_a_party_of_one_row_is_found_and_said_to_be(self, told, tmp_path):
        np.save("X.npy", np.random.default_rng(1).random((3, 8)))
        told("split", "X.npy", "--parties", 3, "-o", "sites")
        told("fit", "sites", "-k", 2, "--rounds", 3, "-o", "m.safetensors", "--report", "r.html")
        page = (tmp_path / "r.html").read_text()
        assert "its only row, number by number" in page

    def test_names_are_text_and_no_markup(self):
        from partsong.reporting.run_report import privacy

        told = {"epsilon_spent": 1.0, "delta": 1e-5, "unit": "row", "relation": "replace", "promise": "<i>one</i>"}
        told |= {"noise": "gaussian", "noise_multiplier": 2.0, "epsilon_by_party": {"<script>x</script>": 1.0}}
        page = "".join(map(str, privacy(SimpleNamespace(privacy=told, is_masked=True))))
        assert "<script>" not in page
        assert "<i>" not in page
        assert "&lt;script&gt;" in page

    @pytest.mark.parametrize("form", [np.asarray, sparse.csr_array])
    def test_rows_to_compare_with_take_no_more_room_than_they_have(self, form):
        X = np.random.default_rng(0).random((2, 6000))
        matrix = as_matrix(form(X))
        tracemalloc.start()
        rows = fit_report._rows(matrix)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        np.testing.assert_array_equal(rows, X)
        assert peak < 20 * X.nbytes

    def test_traffic_that_is_too_much_is_let_go(self, told, parts, tmp_path, monkeypatch):
        monkeypatch.setattr(fit_report, "MOST_BYTES", 1000)
        told("fit", parts, "-k", 3, "--rounds", 3, "-o", "m.safetensors", "--report", "r.html")
        assert "The traffic is too large" in (tmp_path / "r.html").read_text()
        witness, message = fit_report.Witness(), Message({"H": np.zeros(60)})
        monkeypatch.setattr(compare.Recorder, "record", lambda self, done, row: None)
        for _ in range(3):
            witness.record(SimpleNamespace(traffic=(("p", 0, message),)), None)
        assert witness.traffic == []

    def test_a_name_that_is_no_page(self, invoke, parts):
        result = invoke("fit", parts, "-k", 3, "-o", "m.safetensors", "--report", "r.pdf", code=2)
        assert ".html" in result.stderr


FIT = ["-k", 3, "--seed", 4, "--tol", 0]
LEAVE = ["--on-party-error", "skip"]


def components(name):
    return partsong.load_model(f"{name}.safetensors").components


@pytest.fixture
def unlabelled_csv(tmp_path, X, names):
    """Without labels, so that parts can be cut as one likes."""
    lines = [",".join(["sample", *names])]
    lines += [",".join([f"patient-{i}", *map(repr, row.tolist())]) for i, row in enumerate(X)]
    path = tmp_path / "data.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def five_parts(invoke, unlabelled_csv, tmp_path):
    invoke("split", unlabelled_csv, "--parties", 5, "--seed", 1, "-o", "parts", "--quiet")
    return tmp_path / "parts"


def with_nan(table):
    X = table.X.copy()
    X[2, 3] = np.nan
    return {"X": X}


FAULTS = {
    "NaN": (with_nan, "NaN in data: 1 cell(s), in row 2 ("),
    "other names": (lambda t: {"feature_names": np.array(["other", *t.feature_names[1:]])}, "lacks column gene 0"),
    "fewer columns": (
        lambda t: {"X": t.X[:, 1:], "feature_names": np.array(t.feature_names[1:])},
        "lacks column gene 0, compared with",
    ),
    "zeros": (lambda t: {"X": 0 * t.X}, "Every value is zero. This party contributes nothing to sums"),
    "no rows": (lambda t: {"X": t.X[:0], "sample_names": np.array([], dtype=str)}, "has 0 rows, but parts.json lists"),
}


@pytest.fixture
def replace_one_of_five(five_parts):
    return partial(replace_in, five_parts)


@pytest.fixture
def spoil(five_parts, replace_one_of_five):
    """Spoil a party's file, and return what is to be said of it."""

    def change(party, fault):
        arrays, says = FAULTS[fault]
        replace_one_of_five(party, **arrays(read_parts(five_parts)[party]))
        return says

    return change


@pytest.mark.parametrize("party", ["party-01", "party-03"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fit_without_a_faulty_party_is_a_fit_of_the_others(invoke, told, five_parts, spoil, fault, party):
    tables = {name: table.X for name, table in read_parts(five_parts).items() if name != party}
    says = spoil(party, fault)
    for stop in ([], ["--on-party-error", "raise"]):
        assert "party-0" in invoke("fit", five_parts, *FIT, *stop, "-o", "m.safetensors", code=1).stderr
    result = invoke("fit", five_parts, *FIT, *LEAVE, "--rounds", 4, "-o", "m.safetensors")
    assert f"Warning: Party '{party}' is left out of this run. " in result.stderr
    assert says in result.stderr
    assert f"{party}: 4 of 4 rounds, first 1" in result.stdout
    said = told("fit", five_parts, *FIT, *LEAVE, "--rounds", 4, "-o", "m.safetensors")
    assert said["parties"] == 4
    assert {name: (one["rounds"], one["first"]) for name, one in said["left_out"].items()} == {party: (4, 1)}
    assert says in said["left_out"][party]["reason"]
    estimator = partsong.FederatedNMF(3, rounds=4, tol=0, random_state=4).fit(tables)
    np.testing.assert_array_equal(components("m"), estimator.components_)
    assert partsong.load_model("m.safetensors").settings["on_party_error"] == "skip"


def test_three_faults_at_once_a_file_that_is_gone_and_nobody_left(told, five_parts, spoil):
    for number, fault in enumerate(("NaN", "no rows"), start=1):
        spoil(f"party-0{number}", fault)
    (five_parts / "party-03.npz").unlink()
    (five_parts / "party-04.npz").write_bytes(b"nothing")
    said = told("fit", five_parts, *FIT, *LEAVE, "--rounds", 2, "-o", "m.safetensors")
    assert list(said["left_out"]) == ["party-01", "party-02", "party-03", "party-04"]
    assert said["parties"] == 1
    (five_parts / "party-05.npz").unlink()
    failed = told("fit", five_parts, *FIT, *LEAVE, "-o", "m.safetensors", code=1)
    assert failed["type"] == "PartyError"
    assert "No party is left: the data of all 5 parties are faulty. The first, 'party-01'" in failed["error"]


def test_as_many_on_either_side_are_not_told_apart(told, invoke, unlabelled_csv, tmp_path):
    invoke("split", unlabelled_csv, "--parties", 2, "--seed", 1, "-o", "two", "--quiet")
    for number, names in (("01", "abcdefghijkl"), ("02", "abcdefghijkm")):
        path = tmp_path / f"two/party-{number}.npz"
        with np.load(path) as arrays:
            content = {**arrays, "feature_names": np.array(list(names))}
        np.savez(path, **content)
    listing = json.loads((tmp_path / "two/parts.json").read_text())
    for entry in listing["parties"]:
        del entry["sha256"]
    (tmp_path / "two/parts.json").write_text(json.dumps(listing))
    failed = told("fit", "two", *FIT, *LEAVE, "-o", "m.safetensors", code=1)
    assert failed["type"] == "FeatureError"
    assert "so there is no majority" in failed["error"]


@pytest.mark.parametrize("method", ["exact", "fnmf"])
def test_a_run_that_leaves_out_goes_on_bit_for_bit(told, five_parts, spoil, method):
    spoil("party-02", "NaN")
    begin = ["fit", five_parts, *FIT, *LEAVE, "--method", method]
    whole = told(*begin, "--rounds", 7, "-o", "whole.safetensors")
    told(*begin, "--rounds", 3, "-o", "half.safetensors", "--checkpoint", "c.ckpt")
    joined = told("fit", five_parts, "--resume", "c.ckpt", "--rounds", 7, "-o", "joined.safetensors")
    np.testing.assert_array_equal(components("whole"), components("joined"))
    assert joined["left_out"] == whole["left_out"]
    assert joined["left_out"]["party-02"]["rounds"] == 7


def test_who_was_not_there_when_a_run_began_does_not_come_later(told, invoke, five_parts, spoil, replace_one_of_five):
    well = read_parts(five_parts)["party-02"].X
    spoil("party-02", "NaN")
    begin = ["fit", five_parts, *FIT, *LEAVE]
    told(*begin, "--rounds", 7, "-o", "whole.safetensors")
    told(*begin, "--rounds", 3, "-o", "half.safetensors", "--checkpoint", "c.ckpt")
    replace_one_of_five("party-02", X=well)
    again = ["fit", five_parts, "--resume", "c.ckpt", "--rounds", 7, "-o", "joined.safetensors"]
    assert "started without it" in invoke(*again).stderr
    np.testing.assert_array_equal(components("whole"), components("joined"))
    assert "another run; these differ: parties" in invoke(*again, "--on-party-error", "raise", code=1).stderr


def test_a_run_goes_on_without_a_party_that_is_ill_and_with_it_when_it_is_well(
    told, five_parts, spoil, replace_one_of_five
):
    well = read_parts(five_parts)["party-02"].X
    told("fit", five_parts, *FIT, "--rounds", 3, "-o", "a.safetensors", "--checkpoint", "c.ckpt")
    spoil("party-02", "NaN")
    again = ["fit", five_parts, "--resume", "c.ckpt", "--checkpoint", "c.ckpt", "-o", "b.safetensors"]
    assert told(*again, code=1)["type"] == "DataError"
    ill = told(*again, "--rounds", 5, *LEAVE)
    assert ill["parties"] == 4
    assert (ill["left_out"]["party-02"]["rounds"], ill["left_out"]["party-02"]["first"]) == (2, 4)
    replace_one_of_five("party-02", X=well)
    back = told(*again, "--rounds", 8)
    assert (back["parties"], back["left_out"]) == (5, ill["left_out"])
    replace_one_of_five("party-02", X=2 * well)
    assert "party-02: other values" in told(*again, "--rounds", 9, code=1)["error"]


@pytest.mark.parametrize("method", ["exact", "fedavg", "fnmf"])
def test_a_run_that_goes_on_without_a_party_keeps_what_it_learns_then(told, five_parts, spoil, method):
    """From its first round on: nobody waits for a party that is gone."""
    first = told(
        "fit", five_parts, *FIT, "--method", method, "--rounds", 3, "-o", "a.safetensors", "--checkpoint", "c.ckpt"
    )
    spoil("party-02", "NaN")
    again = ["fit", five_parts, "--resume", "c.ckpt", *LEAVE, "--run-folder", "run", "--checkpoint", "d.ckpt"]
    for rounds in (4, 6):
        said = told(*again, "--rounds", rounds, "-o", f"b{rounds}.safetensors", "--overwrite")
        last = (five_parts.parent / "run/history.csv").read_text().splitlines()[-1].split(",")
        assert said["iterations"] == rounds == int(last[0])
        assert not np.array_equal(components("a"), components(f"b{rounds}"))
        if method == "exact":
            assert said["relative_error"] <= float(last[2]), "the last round is the best, and the last solve is exact"
    assert said["bytes_up_per_party"] < 2 * first["bytes_up_per_party"], "of five who sent, not of four who are left"
    told("fit", five_parts, "--resume", "d.ckpt", "--rounds", 6, "-o", "c6.safetensors")
    np.testing.assert_array_equal(components("b6"), components("c6"))


def test_a_refused_upload_leaves_its_party_out_of_that_round(told, invoke, five_parts, monkeypatch, tmp_path):
    plain, seen = SharedSums.local, []

    def local(self, shard, party, model):
        party, message = plain(self, shard, party, model)
        if shard.name == "party-03":
            seen.append(shard.name)
            if len(seen) == 2:
                spoiled = {name: array * np.nan for name, array in message.arrays.items()}
                return party, Message(spoiled, message.weight)
        return party, message

    monkeypatch.setattr(SharedSums, "local", local)
    result = invoke("fit", five_parts, *FIT, *LEAVE, "--rounds", 4, "--run-folder", "run", "--record")
    assert "Warning: Party 'party-03' is left out of round 2 and asked again in the next. " in result.stderr
    assert "party-03: 1 of 4 rounds, first 2" in result.stdout
    rows = (tmp_path / "run/bytes.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows if ",party-03,0," in row] == ["2"]
    for before, code in ((1, 1), (0, 0)):  # in the first round there is no model to keep
        seen[:] = ["party-03"] * before
        stopped = invoke("fit", five_parts, *FIT, "--rounds", 4, "-o", "m.safetensors", code=code).stderr
        assert "Party 'party-03' sent an invalid upload" in stopped
        assert "--on-party-error skip" in stopped


def test_a_checkpoint_of_an_older_version_knows_nothing_of_it(told, five_parts, monkeypatch):
    from partsong.training import checkpoint

    plain = checkpoint.save_run

    def older(path, run):
        settings = {name: value for name, value in run.about["settings"].items() if name != "on_party_error"}
        plain(path, replace(run, about={**run.about, "settings": settings, "left_out": [[1, 2]]}))

    monkeypatch.setattr(checkpoint, "save_run", older)
    told("fit", five_parts, *FIT, "--rounds", 2, "-o", "m.safetensors", "--checkpoint", "odd.ckpt")
    odd = told("fit", five_parts, "--resume", "odd.ckpt", "--rounds", 3, "-o", "m.safetensors", code=1)
    assert odd["type"] == "FormatError"
    assert "odd.ckpt" in odd["error"]

    def oldest(path, run):
        settings = {name: value for name, value in run.about["settings"].items() if name != "on_party_error"}
        kept = {name: value for name, value in run.about.items() if name != "left_out"}
        plain(path, replace(run, about={**kept, "settings": settings}))

    monkeypatch.setattr(checkpoint, "save_run", oldest)
    told("fit", five_parts, *FIT, "--rounds", 2, "-o", "m.safetensors", "--checkpoint", "old.ckpt")
    assert told("fit", five_parts, "--resume", "old.ckpt", "--rounds", 3, "-o", "m.safetensors")["left_out"] == {}


def test_other_words_and_single_files_are_refused(invoke, five_parts, unlabelled_csv):
    assert "skip" in invoke("fit", five_parts, "-o", "m.safetensors", "--on-party-error", "leave out", code=2).stderr
    assert "for a folder of parts" in invoke("fit", unlabelled_csv, "-o", "m.safetensors", *LEAVE, code=2).stderr
