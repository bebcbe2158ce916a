"""`partsong fit PARTS --on-party-error skip`: a fit without those who cannot take part, gone on with in every way."""

import json
from dataclasses import replace

import numpy as np
import pytest

import partsong
from partsong.core.interfaces import Message
from partsong.io.party_folder import read_parts
from partsong.methods.exact import SharedSums

FIT = ["-k", 3, "--seed", 4, "--tol", 0]
LEAVE = ["--on-party-error", "skip"]


def components(name):
    return partsong.load_model(f"{name}.safetensors").components


@pytest.fixture
def data_csv(tmp_path, X, names):
    """Without labels, so that parts can be cut as one likes."""
    lines = [",".join(["sample", *names])]
    lines += [",".join([f"patient-{i}", *map(repr, row.tolist())]) for i, row in enumerate(X)]
    path = tmp_path / "data.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def parts(invoke, data_csv, tmp_path):
    invoke("split", data_csv, "--parties", 5, "--seed", 1, "-o", "parts", "--quiet")
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
def spoil(parts, replace_part):
    """Spoil a party's file, and return what is to be said of it."""

    def change(party, fault):
        arrays, says = FAULTS[fault]
        replace_part(party, **arrays(read_parts(parts)[party]))
        return says

    return change


@pytest.mark.parametrize("party", ["party-01", "party-03"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fit_without_a_faulty_party_is_a_fit_of_the_others(invoke, told, parts, spoil, fault, party):
    tables = {name: table.X for name, table in read_parts(parts).items() if name != party}
    says = spoil(party, fault)
    for stop in ([], ["--on-party-error", "raise"]):
        assert "party-0" in invoke("fit", parts, *FIT, *stop, "-o", "m.safetensors", code=1).stderr
    result = invoke("fit", parts, *FIT, *LEAVE, "--rounds", 4, "-o", "m.safetensors")
    assert f"Warning: Party '{party}' is left out of this run. " in result.stderr
    assert says in result.stderr
    assert f"{party}: 4 of 4 rounds, first 1" in result.stdout
    said = told("fit", parts, *FIT, *LEAVE, "--rounds", 4, "-o", "m.safetensors")
    assert said["parties"] == 4
    assert {name: (one["rounds"], one["first"]) for name, one in said["left_out"].items()} == {party: (4, 1)}
    assert says in said["left_out"][party]["reason"]
    estimator = partsong.FederatedNMF(3, rounds=4, tol=0, random_state=4).fit(tables)
    np.testing.assert_array_equal(components("m"), estimator.components_)
    assert partsong.load_model("m.safetensors").settings["on_party_error"] == "skip"


def test_three_faults_at_once_a_file_that_is_gone_and_nobody_left(told, parts, spoil):
    for number, fault in enumerate(("NaN", "no rows"), start=1):
        spoil(f"party-0{number}", fault)
    (parts / "party-03.npz").unlink()
    (parts / "party-04.npz").write_bytes(b"nothing")
    said = told("fit", parts, *FIT, *LEAVE, "--rounds", 2, "-o", "m.safetensors")
    assert list(said["left_out"]) == ["party-01", "party-02", "party-03", "party-04"]
    assert said["parties"] == 1
    (parts / "party-05.npz").unlink()
    failed = told("fit", parts, *FIT, *LEAVE, "-o", "m.safetensors", code=1)
    assert failed["type"] == "PartyError"
    assert "No party is left: the data of all 5 parties are faulty. The first, 'party-01'" in failed["error"]


def test_as_many_on_either_side_are_not_told_apart(told, invoke, data_csv, tmp_path):
    invoke("split", data_csv, "--parties", 2, "--seed", 1, "-o", "two", "--quiet")
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
def test_a_run_that_leaves_out_goes_on_bit_for_bit(told, parts, spoil, method):
    spoil("party-02", "NaN")
    begin = ["fit", parts, *FIT, *LEAVE, "--method", method]
    whole = told(*begin, "--rounds", 7, "-o", "whole.safetensors")
    told(*begin, "--rounds", 3, "-o", "half.safetensors", "--checkpoint", "c.ckpt")
    joined = told("fit", parts, "--resume", "c.ckpt", "--rounds", 7, "-o", "joined.safetensors")
    np.testing.assert_array_equal(components("whole"), components("joined"))
    assert joined["left_out"] == whole["left_out"]
    assert joined["left_out"]["party-02"]["rounds"] == 7


def test_who_was_not_there_when_a_run_began_does_not_come_later(told, invoke, parts, spoil, replace_part):
    well = read_parts(parts)["party-02"].X
    spoil("party-02", "NaN")
    begin = ["fit", parts, *FIT, *LEAVE]
    told(*begin, "--rounds", 7, "-o", "whole.safetensors")
    told(*begin, "--rounds", 3, "-o", "half.safetensors", "--checkpoint", "c.ckpt")
    replace_part("party-02", X=well)
    again = ["fit", parts, "--resume", "c.ckpt", "--rounds", 7, "-o", "joined.safetensors"]
    assert "started without it" in invoke(*again).stderr
    np.testing.assert_array_equal(components("whole"), components("joined"))
    assert "another run; these differ: parties" in invoke(*again, "--on-party-error", "raise", code=1).stderr


def test_a_run_goes_on_without_a_party_that_is_ill_and_with_it_when_it_is_well(told, parts, spoil, replace_part):
    well = read_parts(parts)["party-02"].X
    told("fit", parts, *FIT, "--rounds", 3, "-o", "a.safetensors", "--checkpoint", "c.ckpt")
    spoil("party-02", "NaN")
    again = ["fit", parts, "--resume", "c.ckpt", "--checkpoint", "c.ckpt", "-o", "b.safetensors"]
    assert told(*again, code=1)["type"] == "DataError"
    ill = told(*again, "--rounds", 5, *LEAVE)
    assert ill["parties"] == 4
    assert (ill["left_out"]["party-02"]["rounds"], ill["left_out"]["party-02"]["first"]) == (2, 4)
    replace_part("party-02", X=well)
    back = told(*again, "--rounds", 8)
    assert (back["parties"], back["left_out"]) == (5, ill["left_out"])
    replace_part("party-02", X=2 * well)
    assert "party-02: other values" in told(*again, "--rounds", 9, code=1)["error"]


@pytest.mark.parametrize("method", ["exact", "fedavg", "fnmf"])
def test_a_run_that_goes_on_without_a_party_keeps_what_it_learns_then(told, parts, spoil, method):
    """From its first round on: nobody waits for a party that is gone."""
    first = told("fit", parts, *FIT, "--method", method, "--rounds", 3, "-o", "a.safetensors", "--checkpoint", "c.ckpt")
    spoil("party-02", "NaN")
    again = ["fit", parts, "--resume", "c.ckpt", *LEAVE, "--run-folder", "run", "--checkpoint", "d.ckpt"]
    for rounds in (4, 6):
        said = told(*again, "--rounds", rounds, "-o", f"b{rounds}.safetensors", "--overwrite")
        last = (parts.parent / "run/history.csv").read_text().splitlines()[-1].split(",")
        assert said["iterations"] == rounds == int(last[0])
        assert not np.array_equal(components("a"), components(f"b{rounds}"))
        if method == "exact":
            assert said["relative_error"] <= float(last[2]), "the last round is the best, and the last solve is exact"
    assert said["bytes_up_per_party"] < 2 * first["bytes_up_per_party"], "of five who sent, not of four who are left"
    told("fit", parts, "--resume", "d.ckpt", "--rounds", 6, "-o", "c6.safetensors")
    np.testing.assert_array_equal(components("b6"), components("c6"))


def test_a_refused_upload_leaves_its_party_out_of_that_round(told, invoke, parts, monkeypatch, tmp_path):
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
    result = invoke("fit", parts, *FIT, *LEAVE, "--rounds", 4, "--run-folder", "run", "--record")
    assert "Warning: Party 'party-03' is left out of round 2 and asked again in the next. " in result.stderr
    assert "party-03: 1 of 4 rounds, first 2" in result.stdout
    rows = (tmp_path / "run/bytes.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows if ",party-03,0," in row] == ["2"]
    for before, code in ((1, 1), (0, 0)):  # in the first round there is no model to keep
        seen[:] = ["party-03"] * before
        stopped = invoke("fit", parts, *FIT, "--rounds", 4, "-o", "m.safetensors", code=code).stderr
        assert "Party 'party-03' sent an invalid upload" in stopped
        assert "--on-party-error skip" in stopped


def test_a_checkpoint_of_an_older_version_knows_nothing_of_it(told, parts, monkeypatch):
    from partsong.training import checkpoint

    plain = checkpoint.save_run

    def older(path, run):
        settings = {name: value for name, value in run.about["settings"].items() if name != "on_party_error"}
        plain(path, replace(run, about={**run.about, "settings": settings, "left_out": [[1, 2]]}))

    monkeypatch.setattr(checkpoint, "save_run", older)
    told("fit", parts, *FIT, "--rounds", 2, "-o", "m.safetensors", "--checkpoint", "odd.ckpt")
    odd = told("fit", parts, "--resume", "odd.ckpt", "--rounds", 3, "-o", "m.safetensors", code=1)
    assert odd["type"] == "FormatError"
    assert "odd.ckpt" in odd["error"]

    def oldest(path, run):
        settings = {name: value for name, value in run.about["settings"].items() if name != "on_party_error"}
        kept = {name: value for name, value in run.about.items() if name != "left_out"}
        plain(path, replace(run, about={**kept, "settings": settings}))

    monkeypatch.setattr(checkpoint, "save_run", oldest)
    told("fit", parts, *FIT, "--rounds", 2, "-o", "m.safetensors", "--checkpoint", "old.ckpt")
    assert told("fit", parts, "--resume", "old.ckpt", "--rounds", 3, "-o", "m.safetensors")["left_out"] == {}


def test_other_words_and_single_files_are_refused(invoke, parts, data_csv):
    assert "skip" in invoke("fit", parts, "-o", "m.safetensors", "--on-party-error", "leave out", code=2).stderr
    assert "for a folder of parts" in invoke("fit", data_csv, "-o", "m.safetensors", *LEAVE, code=2).stderr
