"""`partsong attack`: what a recorded run gives away, and where `check`, `fit`, `join` and `run` warn of it."""

from __future__ import annotations

import json
import re
import shutil
import tomllib

import numpy as np
import pytest

from partsong.cli.main import app
from partsong.data.table import Table
from partsong.federation.experiment import Experiment, with_seed
from partsong.federation.policy import POLICY, Policy, with_rare_columns
from partsong.federation.setup.server_folder import ServerFolder
from partsong.io.party_folder import write_parts
from partsong.io.tensor_file import read_tensors, write_tensors
from partsong.training.traffic import KIND
from tests.cli.conftest import runner
from tests.cli.test_json import ATTACK, ATTACKED_PARTY, FINDING

K, M = 3, 12
ROWS = {"clinic": 1, "large": 20, "largest": 24}
"""All but one party have at least 4k rows, and more rows than columns."""


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
    assert said.keys() == ATTACK.keys()
    for each in said["parties"]:
        assert each.keys() == ATTACKED_PARTY.keys()
        for array in each["sent"]:
            assert array.keys() == {"name", "shape", "dtype", "times", "nbytes"}
        for found in each["recovered"]:
            assert found.keys() == FINDING.keys()
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


WORDS = ("bounded", "unknown", "guess", "membership", "entries", "rows")


def written(place, X, parties):
    """Parts with as many rows each."""
    rows = {f"site{number}": block for number, block in enumerate(np.array_split(np.arange(len(X)), parties))}
    write_parts(place, Table(X), rows, {})
    return place


def sparse(seed, n, m, density):
    draw = np.random.default_rng(seed)
    X = draw.random((n, m)) * (draw.random((n, m)) < density)
    X[:, 0] += 0.01
    return X


def dense(seed, n, m):
    draw = np.random.default_rng(seed)
    return draw.gamma(1.0, size=(n, 8)) @ draw.gamma(0.5, size=(8, m)) + 0.3 * draw.random((n, m))


def recorded(invoke, parts, run, k, rounds, *words, seed=0):
    fit = ("fit", parts, "-k", k, "--method", "exact", "--rounds", rounds, "--tol", 0, "--seed", seed, "-q")
    invoke(*fit, "--run-folder", run, "--record", *words)
    return run


def found(said):
    return [max((each["rows_recovered"] or 0 for each in one["recovered"]), default=0) for one in said["parties"]]


def test_check_says_how_much_may_leave(invoke, told, tmp_path):
    X = dense(0, 60, 12)
    X[7:, 3] = 0
    np.save(tmp_path / "X.npy", X)
    said = " ".join(invoke("check", "X.npy").stdout.split())
    assert "This table has 60 rows; its rarest column has a value in 7 of them." in said
    assert "Above 3, values can be computed back. Above 0, someone" in said
    exposure = told("check", "X.npy")["exposure"]
    assert exposure == {"rows": 60, "rarest_column": 7, "most_for_guess": 0, "most_for_membership": 3}


def test_a_fit_of_parts_has_a_line_about_its_exposure(invoke, told, tmp_path):
    parts = written(tmp_path / "parts", dense(0, 90, 12), 3)
    fit = ("fit", parts, "-k", 3, "--tol", 0, "-o", "model.safetensors")
    said = invoke(*fit, "--method", "exact", "--rounds", 4).stdout
    (line,) = [line for line in said.splitlines() if line.startswith("exposure")]
    assert (
        "membership. 4 rounds × 3 components sent 12 combinations of the 30 rows of site0 (rarest column: 30 rows)."
        in line
    )
    assert "At most 5 rounds" in line
    exposure = told(*fit, "--method", "exact", "--rounds", 6)["exposure"]
    assert (exposure["level"], exposure["directions"], exposure["most_rounds"]) == ("rows", 18, 5)
    assert told(*fit, "--method", "fedavg", "--rounds", 3)["exposure"]["level"] == "unknown"
    private = ("--epsilon", 1, "--unit", "row", "--row-bound", 5)
    assert told(*fit, "--method", "exact", "--rounds", 3, *private)["exposure"]["level"] == "bounded"


def test_rows_of_five_parties_are_computed_back_from_float32_uploads(invoke, told, tmp_path):
    """200 rows with a tenth of their cells, k = 15, 40 rounds: all of them, and the first line says so."""
    parts = written(tmp_path / "parts", sparse(0, 200, 300, 0.1).astype(np.float32), 5)
    run = recorded(invoke, parts, "run", 15, 40, "--dtype", "float32")
    said = told("attack", run, "--data", parts, "--party", "site0")
    assert (said["severity"], said["by_law"], said["found"]) == ("rows", "rows", "rows")
    assert found(said) == [40]
    whole = told("attack", run, "--data", parts, "--seconds", 600)
    assert sum(found(whole)[:5]) >= 190
    first = invoke("attack", run, "--party", "site1").stdout.splitlines()[0]
    assert first.startswith("severity    rows (by the numbers: rows; found: rows")


@pytest.mark.parametrize("masked", [False, True])
def test_rows_are_read_from_one_upload_of_products_of_columns(told, invoke, tmp_path, masked):
    """Fewer rows than columns: all of them, from the signs; masks leave the sum, and all rows of it."""
    parts = written(tmp_path / "parts", sparse(0, 60, 100, 0.25), 3)
    words = ("--secure-aggregation",) if masked else ()
    invoke("fit", parts, "-k", 4, "--method", "moment", "--run-folder", "run", "--record", "-q", *words)
    said = told("attack", "run", "--data", parts)
    assert said["severity"] == said["by_law"] == "rows"
    assert found(said)[-1] == 60
    assert masked or found(said)[:3] == [20, 20, 20]
    blind = told("attack", "run")
    (by_signs,) = [one for one in blind["parties"][-1]["recovered"] if one["attack"] == "rows of XᵀX by their signs"]
    assert by_signs["verdict"] in ("exactly", "nearly"), "without the rows as well"


def test_rows_with_a_column_of_their_own_are_read_from_any_number_of_rows(told, invoke, tmp_path):
    """More rows than columns, as in texts: M_j is the row, if it alone has column j; nothing else is called a row."""
    draw, m = np.random.default_rng(0), 200
    frequent = np.minimum(1.0, 0.02 * m / np.log(m) / np.arange(1, m + 1))
    X = draw.random((900, m)) * (draw.random((900, m)) < frequent)
    X[:, 0] += 0.01
    parts = written(tmp_path / "parts", X, 3)
    invoke("fit", parts, "-k", 4, "--method", "moment", "--run-folder", "run", "--record", "-q")
    said = told("attack", "run", "--data", parts)
    alone = [one for each in said["parties"] for one in each["recovered"] if one["attack"] == "lone columns of XᵀX"]
    assert sum(one["rows_recovered"] for one in alone) >= 20
    assert all(one["rows_recovered"] == one["shape"][0] for one in alone)
    assert all(one["verdict"] == "exactly" for one in alone)


def test_products_of_columns_tell_who_is_a_member(told, invoke, tmp_path):
    """Two rounds of rank 4 alone span 8 of 20 directions; the products span all."""
    rows = sparse(0, 80, 100, 0.25)
    parts = written(tmp_path / "parts", rows[:60], 3)
    np.save(tmp_path / "people.npy", rows[60:])
    invoke("fit", parts, "-k", 4, "--method", "moment", "--run-folder", "run", "--record", "-q")
    words = ("--data", parts, "--candidates", "people.npy", "--party", "site0", "--seconds", 20)
    tests = told("attack", "run", *words)["parties"][0]["membership"]
    assert [test["auc"] for test in tests] == [1.0, 1.0]


def test_dense_rows_are_not_called_found_from_products_of_columns(told, invoke, tmp_path):
    parts = written(tmp_path / "parts", dense(0, 90, 12), 3)
    invoke("fit", parts, "-k", 3, "--method", "moment", "--run-folder", "run", "--record", "-q")
    said = told("attack", "run", "--data", parts)
    assert said["severity"] == "rows", "by the numbers"
    assert found(said) == [0, 0, 0, 0]


def test_sparse_rows_are_found_where_the_numbers_alone_say_membership(invoke, told, tmp_path):
    """60 rows, every column in 5 of them, three rounds of rank 10."""
    draw = np.random.default_rng(1)
    X = np.zeros((120, 4000))
    for j in range(4000):
        for start in (0, 60):
            X[start + draw.choice(60, 5, replace=False), j] = draw.random(5) + 0.05
    parts = written(tmp_path / "parts", X, 2)
    run = recorded(invoke, parts, "run", 10, 3)
    said = told("attack", run, "--data", parts, "--party", "site0")
    assert said["severity"] == said["found"] == "rows"
    assert found(said)[0] >= 55
    blind = told("attack", run, "--party", "site0")
    assert (blind["by_law"], blind["found"]) == ("membership", "rows")
    assert any("assumes that no cell is zero" in note for note in blind["parties"][0]["notes"])


def test_dense_rows_at_a_tenth_are_a_guess_and_tests_of_membership_are_printed(invoke, told, tmp_path):
    X = dense(0, 900, 200)
    parts = written(tmp_path / "parts", X[:600], 2)
    np.save(tmp_path / "people.npy", X[600:])
    run = recorded(invoke, parts, "run", 5, 6)
    said = told("attack", run, "--data", parts, "--candidates", "people.npy")
    assert (said["severity"], said["found"]) == ("guess", None)
    assert found(said) == [0, 0]
    for party in said["parties"]:
        aucs = {test["test"]: test["auc"] for test in party["membership"]}
        assert 0.45 < aucs["residual"] < 0.8
        assert aucs.keys() == {"residual", "signs"}
    shown = invoke("attack", run, "--data", parts, "--candidates", "people.npy").stdout
    assert "severity    guess" in shown
    assert "AUC 0." in shown
    assert "nothing beyond that" in shown


def test_two_runs_count_together(invoke, told, tmp_path):
    """Each alone is below the law, both together are above it."""
    parts = written(tmp_path / "parts", sparse(3, 60, 120, 0.2), 3)
    runs = [recorded(invoke, parts, f"run-{seed}", 8, 4, seed=seed) for seed in (1, 2)]
    alone = told("attack", runs[0], "--data", parts, "--party", "site0")
    assert found(alone) == [0]
    both = told("attack", *runs, "--data", parts, "--party", "site0")
    assert found(both)[0] >= 19
    assert both["other_runs"] == ["run-2"]


@pytest.mark.parametrize("masked", [(), ("--secure-aggregation",)], ids=["open", "masked"])
def test_a_row_that_was_added_between_two_runs_with_one_seed_is_read(invoke, told, tmp_path, masked):
    X = dense(5, 90, 20)
    before = written(tmp_path / "before", X, 3)
    rows = {"site0": np.r_[np.arange(30), 90], "site1": np.arange(30, 60), "site2": np.arange(60, 90)}
    write_parts(tmp_path / "after", Table(np.vstack([X, X[:1] + 0.5])), rows, {})
    first = recorded(invoke, before, "first", 3, 2, *masked)
    second = recorded(invoke, tmp_path / "after", "second", 3, 2, *masked)
    said = told("attack", second, first)
    (one,) = [each for each in said["parties"] if each["is_sum"] == bool(masked) and each["found"] == "rows"]
    read = next(each for each in one["recovered"] if each["attack"] == "difference of two runs")
    assert read["verdict"] in ("exactly", "nearly")
    assert read["shape"] == [1, 20]
    assert said["severity"] == "rows"
    other = recorded(invoke, tmp_path / "after", "third", 3, 2, *masked, seed=1)
    again = told("attack", other, first)
    assert not any(e["attack"] == "difference of two runs" for one in again["parties"] for e in one["recovered"])


def test_dense_columns_that_look_alike_are_not_called_entries(invoke, told, tmp_path):
    """In float32 many columns of WᵀX of alike rows point in nearly one direction."""
    draw = np.random.default_rng(0)
    X = (5 + draw.random((300, 1)) @ draw.random((1, 2000)) + 0.1 * draw.random((300, 2000))).astype(np.float32)
    X[:, 7] = 2.54 * X[:, 3]  # centimetres and inches
    run = recorded(invoke, written(tmp_path / "parts", X, 3), "run", 5, 1, "--dtype", "float32")
    assert told("attack", run)["found"] is None
    assert told("attack", run, "--data", tmp_path / "parts")["found"] is None


def test_rank_one_is_attacked_as_well(invoke, told, tmp_path):
    run = recorded(invoke, written(tmp_path / "parts", sparse(0, 60, 40, 0.3), 3), "run", 1, 5)
    assert told("attack", run)["severity"] in WORDS


def test_an_empty_and_a_repeated_row_do_not_blind_the_search(invoke, told, tmp_path):
    X = sparse(0, 80, 120, 0.2)
    X[3] = 0
    X[7] = X[8]
    parts = written(tmp_path / "parts", X, 2)
    run = recorded(invoke, parts, "run", 15, 20)
    said = told("attack", run, "--data", parts, "--party", "site0")
    assert found(said)[0] >= 36
    assert "2 of them are zero or combinations of others" in said["parties"][0]["recovered"][0]["what"]


def test_the_order_of_runs_and_their_noise_do_not_hide_a_run_without_noise(invoke, told, tmp_path):
    parts = written(tmp_path / "parts", sparse(0, 60, 120, 0.2), 3)
    plain = recorded(invoke, parts, "plain", 10, 8)
    noisy = recorded(invoke, parts, "noisy", 10, 3, "--epsilon", 1, "--unit", "row", "--row-bound", 5)
    invoke("fit", parts, "-k", 5, "--method", "fedavg", "--rounds", 2, "-q", "--run-folder", "factors", "--record")
    assert told("attack", noisy)["severity"] == "bounded"
    for runs in ((noisy, plain), (plain, noisy), ("factors", plain), (plain, "factors")):
        said = told("attack", *runs, "--data", parts, "--party", "site0")
        assert (said["by_law"], said["found"]) == ("rows", "rows"), runs
        assert found(said)[0] >= 19


def test_a_row_that_was_replaced_between_two_runs_does_not_hide_the_others(invoke, told, tmp_path):
    X = sparse(0, 60, 120, 0.2)
    first = recorded(invoke, written(tmp_path / "a", X, 3), "first", 10, 8)
    X[4] = sparse(9, 1, 120, 0.2)
    second = recorded(invoke, written(tmp_path / "b", X, 3), "second", 10, 8, seed=1)
    said = told("attack", first, second, "--data", tmp_path / "a", "--party", "site0")
    assert found(said)[0] >= 19


def test_a_search_that_was_cut_off_says_so(invoke, told, tmp_path):
    parts = written(tmp_path / "parts", sparse(0, 80, 120, 0.2), 2)
    run = recorded(invoke, parts, "run", 15, 20)
    said = told("attack", run, "--seconds", 0)
    assert any("time limit (0 s in total)" in note for party in said["parties"] for note in party["notes"])
    assert said["severity"] == said["by_law"] == "rows"


def test_runs_of_other_data_are_refused(invoke, told, tmp_path):
    first = recorded(invoke, written(tmp_path / "a", dense(0, 60, 20), 3), "first", 3, 2)
    narrow = recorded(invoke, written(tmp_path / "b", dense(0, 60, 19), 3), "narrow", 3, 2)
    assert "differ in their columns" in told("attack", first, narrow, code=1)["error"]
    write_parts(tmp_path / "c", Table(dense(0, 60, 20)), {"x": np.arange(30), "y": np.arange(30, 60)}, {})
    strangers = recorded(invoke, tmp_path / "c", "strangers", 3, 2)
    assert "no party in common" in told("attack", first, strangers, code=1)["error"]
    shutil.rmtree(tmp_path / "narrow" / "traffic")
    assert told("attack", first, "narrow", code=1)["type"] in ("FileError", "FormatError")
    np.save(tmp_path / "people.npy", dense(0, 5, 19))
    assert told("attack", first, "--candidates", "people.npy", code=1)["type"] in ("ShapeError", "FeatureError")


def test_no_text_of_an_attack_says_nothing_without_a_word_of_the_law(invoke, told, tmp_path):
    parts = written(tmp_path / "parts", dense(0, 90, 20), 3)
    for method in ("exact", "fedavg", "fnmf", "game"):
        invoke("fit", parts, "-k", 2, "--method", method, "--rounds", 2, "-q", "--run-folder", method, "--record")
        shown = invoke("attack", method).stdout
        assert shown.startswith("severity")
        assert any(word in shown.splitlines()[0] for word in WORDS)
        said = told("attack", method)
        for text in (said["verdict"], *(each["verdict"] for each in said["parties"])):
            assert "nothing" not in text or any(word in text for word in WORDS)


# --- federations -----------------------------------------------------------------------------------------------------


def test_a_seed_is_drawn_for_each_run_and_kept_when_it_is_resumed(tmp_path):
    path = tmp_path / "experiment.toml"
    path.write_bytes(
        b'\xef\xbb\xbfmethod = "exact"\nrank = 2\nrounds = 2\n[privacy]\nunit = "row"\nepsilon = 1\nrow_bound = 1\n'
    )
    first, text = with_seed(path, None)
    second, _ = with_seed(path, None)
    assert first.seed != second.seed
    (tmp_path / "written.toml").write_bytes(text)
    assert Experiment.read(tmp_path / "written.toml") == first
    assert with_seed(path, first)[0] == first
    path.write_text('method = "exact"\nrank = 2\nrounds = 2\nseed = 7\n')
    given, as_it_is = with_seed(path, first)
    assert given.seed == 7
    assert as_it_is == path.read_bytes()


@pytest.fixture
def kit(tmp_path, monkeypatch):
    pytest.importorskip("cryptography")
    monkeypatch.chdir(tmp_path)
    server = ServerFolder.made(tmp_path / "liver", "liver", "nmf.example.org:8443")
    server.invite("north", tmp_path / "north.zip")
    X = dense(0, 200, 12)
    X[5:, 3] = 0
    np.save(tmp_path / "rows.npy", X)
    return ["federation", "join", "north.zip", "--data", "rows.npy"]


@pytest.mark.parametrize(("answer", "rule"), [("y", "zero"), ("n", "refuse")])
def test_join_says_how_much_may_leave_and_asks_once_about_rare_columns(kit, tmp_path, answer, rule):
    result = runner().invoke(app, kit, input=f"y\n{answer}\n")
    said = " ".join(result.output.split())
    assert result.exit_code == 0, said
    assert "At most 2 combinations of your rows may leave; 0 have left. A run that needs more is refused." in said
    assert "One that sends crafted models can read single rows; only noise (epsilon) prevents that." in said
    assert "Here, secure aggregation hides only which site a row comes from." in said
    assert 'XᵀX without noise, as method "moment" sends it, counts as all rows.' in said
    assert "a private moment sends 78 noisy sums of products of columns, once." in said
    assert "For 40 more, 1 of 12 columns have values in fewer than 128 rows; they hold" in said
    assert "May runs set columns with values in too few rows to zero?" in said
    policy = Policy.read(tmp_path / "site-north" / "site.toml")
    assert (policy.rare_columns, policy.maximum_exposure) == (rule, "membership")
    again = runner().invoke(app, kit, input="y\n")
    assert again.exit_code == 0
    assert "May runs set columns" not in again.output


def test_scripts_answer_by_an_option_and_yes_changes_no_data(kit, tmp_path):
    assert runner().invoke(app, [*kit, "--yes"]).exit_code == 0
    assert Policy.read(tmp_path / "site-north" / "site.toml").rare_columns == "refuse"
    assert runner().invoke(app, [*kit, "--yes", "--rare-columns", "drop"]).exit_code == 1
    assert runner().invoke(app, [*kit, "--yes", "--rare-columns", "zero"]).exit_code == 0
    assert Policy.read(tmp_path / "site-north" / "site.toml").rare_columns == "zero"
    result = runner().invoke(app, [*kit, "--yes", "--rare-columns", "refuse", "--json"])
    assert result.exit_code == 1
    assert "Remove --rare-columns" in json.loads(result.stdout)["error"]


def test_the_answer_is_written_into_policies_old_and_new():
    assert Policy.from_table(tomllib.loads(with_rare_columns(POLICY, "zero"))).rare_columns == "zero"
    old = "minimum_parties = 3\n[words]\nallowed = false\n"
    changed = Policy.from_table(tomllib.loads(with_rare_columns(old, "zero")))
    assert (changed.rare_columns, changed.minimum_parties, changed.words.allowed) == ("zero", 3, False)
