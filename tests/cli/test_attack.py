"""`partsong attack`: what a recorded run gives away, said without giving it away again."""

import json
import re
import shutil

import numpy as np
import pytest

from partsong.data.table import Table
from partsong.io.party_folder import write_parts
from partsong.io.tensor_file import read_tensors, write_tensors
from partsong.training.traffic import KIND

K, M = 3, 12
ROWS = {"clinic": 1, "large": 20, "largest": 24}
"""All but one party have at least 4k rows, and more rows than columns."""
KEYS = {
    "run", "method", "n_components", "n_features", "attacker", "secure_aggregation", "exchanges", "compared_with",
    "verdict",
    "parties", "report", "severity", "by_law", "found", "worst_party", "other_runs",
}  # fmt: skip
PARTY_KEYS = {
    "severity", "by_law", "found", "membership", "largest_share",
    "party", "attacker", "sent", "messages", "bytes_sent", "tried", "recovered", "notes", "is_sum", "verdict",
}  # fmt: skip
FINDING_KEYS = {"attack", "array", "shape", "what", "verdict", "doubt", "error", "rows_recovered", "who"}


def rows_of_all():
    draw = np.random.default_rng(5)
    n = sum(ROWS.values())
    whole = draw.gamma(0.5, size=(n, K)) @ draw.gamma(0.5, size=(K, M)) + 0.1 * draw.random((n, M))
    return whole * (draw.random((n, M)) < 0.8)


@pytest.fixture
def X():
    return rows_of_all()


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Parts, and recorded runs of methods on them, each of which is made once; they are copied before use."""
    place = tmp_path_factory.mktemp("original")
    X, ends = rows_of_all(), np.cumsum([0, *ROWS.values()])
    rows = {name: np.arange(first, last) for name, first, last in zip(ROWS, ends[:-1], ends[1:], strict=True)}
    table = Table(X, tuple(f"gene {j}" for j in range(M)), tuple(f"patient-{i}" for i in range(len(X))))
    write_parts(place / "parts", table, rows, {})
    return place


@pytest.fixture
def parts(original, tmp_path):
    shutil.copytree(original / "parts", tmp_path / "parts")
    return tmp_path / "parts"


@pytest.fixture
def fitted(invoke, original, parts, tmp_path):
    """A recorded run of a method, in a folder of its name."""

    def fit(method="exact", *words):
        made = original / "-".join(["run", method, *map(str, words)])
        if not made.exists():
            rounds = () if method.endswith(("-once", "-only")) else ("--rounds", 4)
            run = ("fit", original / "parts", "-k", K, "--method", method, "--run-folder", made, "--record", *rounds)
            invoke(*run, "--tol", 0, "--seed", 3, "-q", *words)
        shutil.copytree(made, tmp_path / method)
        return tmp_path / method

    return fit


def of(said, party):
    (found,) = [each for each in said["parties"] if each["party"] == party]
    return found


def test_a_single_row_is_found_and_four_rows_for_each_component_are_not(told, fitted, parts):
    said = told("attack", fitted(), "--data", parts)
    (found,) = of(said, "clinic")["recovered"]
    assert found["array"] == "X_p"
    assert found["error"] < 1e-6
    assert found["rows_recovered"] == 1
    for party in ("large", "largest"):
        assert not of(said, party)["recovered"]
        assert of(said, party)["tried"]
    assert "clinic exactly" in said["verdict"]
    assert "1 of 3 parties" in said["verdict"]


def test_the_record_alone_is_enough_and_says_what_nobody_has_compared(told, invoke, fitted, tmp_path):
    run = fitted()
    (run / "model.safetensors").unlink()
    for name in ("history.csv", "bytes.csv", "result.json", "versions.json"):
        (run / name).unlink()
    shutil.rmtree(tmp_path / "parts")
    said = told("attack", run)
    (found,) = of(said, "clinic")["recovered"]
    assert (found["error"], found["rows_recovered"]) == (None, None)
    assert found["doubt"] < 1e-6
    assert found["shape"] == [1, M]
    assert said["compared_with"] == []
    assert "not compared" in invoke("attack", run).stdout


@pytest.mark.parametrize("attacker", ["server", "colluders"])
@pytest.mark.parametrize(
    ("method", "most"),
    [("exact", 1e-6), ("fnmf", 1e-6), ("game", 1e-6), ("fedavg", 1e-6), ("syn-sd", 0.1), ("syn-ssd-uv", 0.2)],
)
def test_the_row_is_found_in_every_method_of_which_the_page_says_so(told, fitted, parts, method, most, attacker):
    said = told("attack", fitted(method), "--data", parts, "--attacker", attacker)
    found = [each["error"] for each in of(said, "clinic")["recovered"] if each["array"].startswith("X_p")]
    assert min(found) < most


@pytest.mark.parametrize("method", ["fnmf-local", "fedprox", "syn-ssd-u", "asyn-sd", "asyn-ssd-v", "local-only"])
@pytest.mark.parametrize("attacker", ["server", "colluders"])
def test_where_nothing_can_be_tried_that_is_said(told, fitted, method, attacker):
    said = told("attack", fitted(method), "--attacker", attacker)
    assert len(said["parties"]) == len(ROWS)
    for each in said["parties"]:
        assert each["tried"] or any("not a guarantee" in note or "sent nothing" in note for note in each["notes"])
        assert bool(each["sent"]) == (each["bytes_sent"] > 0)


def test_bytes_and_arrays_are_those_of_the_record(told, fitted):
    run = fitted()
    lines = [json.loads(line) for line in (run / "traffic.jsonl").read_text().splitlines()]
    for each in told("attack", run)["parties"]:
        own = [line for line in lines if line["party"] == each["party"]]
        assert each["messages"] == len(own) == 4
        assert each["bytes_sent"] == sum(line["bytes"] for line in own)
        assert {entry["name"]: entry["times"] for entry in each["sent"]} == {
            "gram": 4,
            "cross": 4,
            "rows": 4,
            "energy": 4,
        }


def test_masks_leave_sums_and_colluders(told, fitted, parts):
    run = fitted("exact", "--secure-aggregation")
    said = told("attack", run, "--data", parts)
    assert said["secure_aggregation"]
    assert not any(each["recovered"] for each in said["parties"])
    assert "only sums were visible" in of(said, "clinic")["notes"][0]
    assert said["parties"][-1]["is_sum"]
    assert said["parties"][-1]["tried"]
    others = told("attack", run, "--data", parts, "--attacker", "colluders")
    assert of(others, "clinic")["recovered"][0]["error"] < 1e-5
    without = of(told("attack", run, "--attacker", "colluders"), "clinic")
    assert not without["tried"]
    assert "were not passed" in without["notes"][0]


def test_noise_is_named(told, fitted, parts):
    run = fitted("exact", "--epsilon", 1, "--unit", "row", "--row-bound", 5)
    for attacker in ("server", "colluders"):
        clinic = of(told("attack", run, "--data", parts, "--attacker", attacker), "clinic")
        assert not [each for each in clinic["recovered"] if each["verdict"] in ("exactly", "nearly")]
        assert "noise for the privacy of each row" in clinic["notes"][0]


def test_one_party_and_its_own_file(told, fitted, parts, X, tmp_path):
    run = fitted()
    lines = [",".join(["sample", *(f"gene {j}" for j in reversed(range(M)))])]
    lines += [",".join(["patient-0", *map(repr, X[0, ::-1].tolist())])]
    (tmp_path / "own.csv").write_text("\n".join(lines) + "\n")
    said = told("attack", run, "--party", "clinic", "--data", "own.csv")
    assert [each["party"] for each in said["parties"]] == ["clinic"]
    assert of(said, "clinic")["recovered"][0]["rows_recovered"] == 1, "columns go by name"
    wrong = told("attack", run, "--party", "large", "--data", "own.csv")
    assert not of(wrong, "large")["recovered"]


def test_the_same_as_data_in_json(told, fitted, parts):
    said = told("attack", fitted(), "--data", parts, "--report", "page.html")
    assert said.keys() == KEYS
    for each in said["parties"]:
        assert each.keys() == PARTY_KEYS
        for array in each["sent"]:
            assert array.keys() == {"name", "shape", "dtype", "times", "nbytes"}
        for found in each["recovered"]:
            assert found.keys() == FINDING_KEYS
    assert (said["attacker"], said["method"], said["exchanges"], said["n_features"]) == ("server", "exact", 4, M)


def test_none_of_the_values_is_shown(invoke, fitted, parts, X, tmp_path):
    """Neither those of the truth nor those that were found, which are the same."""
    run = fitted()
    words = ("attack", run, "--data", parts, "--report", "page.html")
    shown = [invoke(*words).stdout, invoke(*words, "--json").stdout]
    shown.append((tmp_path / "page.html").read_text().partition("<main")[2])
    numbers = {float(text) for page in shown for text in re.findall(r"\d+\.\d+(?:e[+-]?\d+)?", page)}
    for value in X[X > 0]:
        assert not any(abs(number - value) < 1e-3 * value for number in numbers if number > 1e-3)
    assert not any("patient" in page or "gene" in page for page in shown)


def test_a_page(invoke, fitted, tmp_path):
    invoke("attack", fitted(), "--report", "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "clinic" in page
    assert "What attacks recover" in page
    invoke("attack", "exact", "--report", "page.txt", code=2)


# --- records ---------------------------------------------------------------------------------------------------------


def test_a_record_says_who_took_part_and_nothing_of_the_rows(fitted, X):
    run = fitted("syn-ssd-u")
    for path in sorted((run / "traffic").iterdir()):
        _, about = read_tensors(path, KIND)
        assert about.keys() == {"round", "parties", "n_features"}
        assert about["parties"] == sorted(ROWS)
        assert about["n_features"] == M


def test_what_is_no_record_is_told(told, invoke, fitted, parts, data_npy, tmp_path):
    assert "no such folder" in told("attack", "nowhere", code=1)["error"]
    (tmp_path / "empty").mkdir()
    assert told("attack", "empty", code=1)["type"] == "FileError"
    invoke("fit", parts, "-k", K, "--run-folder", "silent", "--rounds", 2, "-q")
    said = told("attack", "silent", code=1)
    assert said["type"] == "FileError"
    assert "--record" in said["error"]
    invoke("fit", data_npy, "-k", K, "--run-folder", "alone", "--max-iter", 2, "-q")
    (tmp_path / "alone/traffic.jsonl").write_text("")
    assert "one table" in told("attack", "alone", code=1)["error"]


def cut(run):
    file = run / "traffic/round-0002.safetensors"
    file.write_bytes(file.read_bytes()[:-40])


def changed(run):
    file = run / "traffic/round-0002.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")


def gone(run):
    (run / "traffic/round-0002.safetensors").unlink()


def edited(**changes):
    def edit(run):
        lines = [json.loads(line) for line in (run / "traffic.jsonl").read_text().splitlines()]
        lines[1] |= changes
        (run / "traffic.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    return edit


def set_to(**changes):
    def edit(run):
        told = json.loads((run / "settings.json").read_text()) | changes
        (run / "settings.json").write_text(json.dumps(told))

    return edit


def without(name):
    def edit(run):
        told = json.loads((run / "settings.json").read_text())
        del told[name]
        (run / "settings.json").write_text(json.dumps(told))

    return edit


def filled(file, text):
    return lambda run: (run / file).write_text(text)


HOSTILE = {
    "file cut off": cut,
    "bit flipped": changed,
    "file gone": gone,
    "list of nothing": filled("traffic.jsonl", ""),
    "list of bytes": filled("traffic.jsonl", "\x00\x01"),
    "list nested deeply": filled("traffic.jsonl", "[" * 100_000),
    "two messages of one party": edited(party="clinic"),
    "another party's": edited(party="../../large"),
    "round of the far future": edited(round=10**15),
    "round before the first": edited(round=-1),
    "no number of a round": edited(round="one"),
    "infinite round": edited(round=1e999),
    "weight that is none": edited(weight=None),
    "another phase": edited(phase=1),
    "array that is not there": edited(arrays=[{"name": "rows"}]),
    "fewer arrays": edited(arrays=[{"name": "gram"}]),
    "settings cut off": filled("settings.json", '{"method": "exa'),
    "settings of another kind": filled("settings.json", "[1]"),
    "settings nested deeply": filled("settings.json", "[" * 100_000),
    "another method": set_to(method="fedavg"),
    "method with sketches": set_to(method="syn-ssd-u"),
    "unknown method": set_to(method="__import__"),
    "method that is a list": set_to(method=["exact"]),
    "more components": set_to(n_components=K + 1),
    "no end of components": set_to(n_components=10**12),
    "no component": set_to(n_components=0),
    "components in words": set_to(n_components="3"),
    "truth as a number": set_to(local_steps=True),
    "objects as numbers": set_to(dtype="object"),
    "no seed": without("seed"),
}


@pytest.mark.parametrize("harm", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_records_are_refused_in_words(told, fitted, harm):
    run = fitted()
    harm(run)
    said = told("attack", run, code=1)
    assert said["type"] in ("FormatError", "FileError")
    assert str(run.name) in said["error"]


@pytest.mark.parametrize("method", ["exact", "game", "fedavg"])
def test_records_of_earlier_releases_are_read_as_far_as_their_arrays_tell(told, fitted, method):
    run = fitted(method)
    for path in (run / "traffic").iterdir():
        arrays, about = read_tensors(path, KIND)
        write_tensors(path, KIND, arrays, {"round": about["round"]})
    assert told("attack", run)["n_features"] == M


def test_masked_records_that_were_changed_are_refused(told, fitted):
    run = fitted("exact", "--secure-aggregation")
    set_to(seed=4)(run)
    assert told("attack", run, code=1)["type"] == "FormatError"


# --- usage -----------------------------------------------------------------------------------------------------------


def test_words_that_mean_nothing(told, invoke, fitted, parts, X, tmp_path):
    run = fitted()
    assert "Did you mean 'server'" in told("attack", run, "--attacker", "serve", code=2)["error"]
    np.save(tmp_path / "rows.npy", X[:1])
    np.save(tmp_path / "narrow.npy", X[:1, :4])
    assert "--party" in told("attack", run, "--data", "rows.npy", code=2)["error"]
    assert "'nobody'" in told("attack", run, "--party", "nobody", code=1)["error"]
    assert told("attack", run, "--party", "clinic", "--data", "narrow.npy", code=1)["type"] == "ShapeError"
    assert told("attack", run, "--data", "none.npy", "--party", "clinic", code=1)["type"] == "FileError"
    invoke("attack", code=2)


def test_parts_of_others_are_no_truth(told, fitted, tmp_path, X):
    write_parts(tmp_path / "other", Table(X), {"stranger": np.arange(3)}, {})
    assert "stranger" in told("attack", fitted(), "--data", "other", code=1)["error"]
