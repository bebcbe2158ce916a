"""The experiments with privacy run on small data; what they find is in docs/results/privacy.md."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from experiments.leakage import sketches as leakage_sketches
from experiments.privacy import moment_tables
from experiments.privacy import parties as privacy_parties
from experiments.privacy import report as privacy_report
from experiments.privacy import rows as privacy_rows
from experiments.privacy import secure_sums as privacy_masking
from experiments.privacy import sensitivity as privacy_sensitivity
from experiments.privacy import tables as privacy_row_tables
from experiments.privacy.methods import DATA_FREE, DELTA, SIGNED, Setting, data_free, party_program, printed_program
from experiments.privacy.rows import STUDIES
from experiments.privacy.runs import TUNING_SEED, Trial, chosen_setting, known, line_of, result_of
from experiments.shared import datasets
from experiments.shared.document import BLOCK
from partsong.privacy.accounting import Ledger

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
TABLES = ("printed-gaussian", "parties-gaussian-replace", "floors", "clips", "rows-tcga", "ridges", "moves", "masking")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Everything that the report reads, in small."""
    place = tmp_path_factory.mktemp("runs")
    draw = np.random.default_rng(0)
    for file in ("tcga_brca.npz", "zeisel_brain.npz"):
        X = draw.gamma(0.5, size=(60, 4)) @ draw.gamma(0.5, size=(4, 25))
        np.savez(place / file, X=X.astype(np.float32), y=np.zeros(60))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(datasets.FOLDER, str(place))
        privacy_parties.main(["--quick", "--output", str(place / "privacy-parties.jsonl")])
        privacy_rows.main(["--quick", "--studies", "tcga", "--output", str(place / "privacy-rows.jsonl")])
        privacy_sensitivity.main(["--quick", "--output", str(place / "privacy-sensitivity.jsonl")])
        privacy_masking.main(["--quick", "--output", str(place / "privacy-masking.jsonl")])
    return place


def test_less_noise_is_a_smaller_error(folder):
    found = known(folder / "privacy-parties.jsonl")
    for purpose, method in (("printed", "FNMF-LAP"), ("rows", "row level")):
        errors = {
            trial.setting.epsilon: record["rmsd"]
            for trial, record in found.items()
            if (trial.purpose, trial.method, trial.is_tuning) == (purpose, method, False)
        }
        assert errors[1000.0] < errors[1.0]


def test_runs_that_are_there_are_not_repeated(folder):
    place = folder / "privacy-parties.jsonl"
    before = place.read_text("utf-8")
    privacy_parties.main(["--quick", "--output", str(place)])
    assert place.read_text("utf-8") == before


def test_a_run_comes_back_from_its_line(tmp_path):
    trials = [
        Trial("free", "blocks", "pooled", 3, 60, 2, 0),
        Trial("rows", "mnist", "row level", 1, 300, 10, 4, Setting("gaussian", 0.1, "add-or-remove", 30, 0, 1.0, 10.0)),
    ]
    record = {"rmsd": 0.5, "error": 0.25, "seconds": 1.0}
    (tmp_path / "t.jsonl").write_text("\n".join(line_of(trial, record) for trial in trials))
    assert known(tmp_path / "t.jsonl") == dict.fromkeys(trials, record)


def test_settings_are_chosen_on_tuning_seeds_alone():
    cell = Trial("parties", "blocks", "FedAvg", 3, 60, 2, 0, Setting("gaussian", 1.0, "replace"))
    runs = {
        Trial(*_fields(cell), seed, Setting("gaussian", 1.0, "replace", clip=clip)): {"error": error}
        for seed, clip, error in ((TUNING_SEED, 0.1, 0.5), (TUNING_SEED, 1.0, 0.4), (0, 0.1, 0.1), (0, 3.0, 0.0))
    }
    assert chosen_setting(runs, cell).clip == 1.0
    with pytest.raises(LookupError):
        chosen_setting({trial: record for trial, record in runs.items() if not trial.is_tuning}, cell)


def _fields(trial):
    return trial.purpose, trial.data, trial.method, trial.parties, trial.rows, trial.rank


def test_party_level_costs_what_was_asked_for():
    for method, rounds in (("FedAvg", 7), ("iPALM once", 1)):
        program, turns = party_program(method, 2, Setting("gaussian", 3.0, "replace", 7, 5, 1.0), 0)
        assert turns == rounds == program.most
        spent = Ledger().after(program.mechanism.release, turns).epsilon(DELTA)
        assert 2.99 < spent <= 3.0


def test_signed_uploads_cost_the_same_and_may_be_negative():
    cut, signed = (
        party_program("FedAvg", 2, Setting("gaussian" + kind, 3.0, "replace", 2, 5, 1.0), 0)[0] for kind in ("", SIGNED)
    )
    assert cut.mechanism.release == signed.mechanism.release
    H = {"H": np.full((2, 40), 0.1)}
    sent = [program.mechanism.protect(H, H, program.source("p", 0))["H"] for program in (cut, signed)]
    assert sent[1].min() < 0
    np.testing.assert_array_equal(sent[0], np.maximum(0.0, sent[1]))


def test_noise_as_printed_has_the_printed_deviation():
    program, _ = printed_program("FedAvg", 2, Setting("gaussian", 2.0, steps=5), 0)
    assert program.scale == pytest.approx(math.sqrt(2 * math.log(1.25 / DELTA)) / 2)
    assert printed_program("FedAvg", 2, Setting("laplace", 2.0, steps=5), 0)[0].scale == 0.5
    assert not hasattr(program, "mechanism"), "nothing bounds what is sent"


@pytest.mark.parametrize("name", DATA_FREE)
@pytest.mark.parametrize("rank", [1, 6, 10])
def test_models_of_no_data_cover_every_column(name, rank):
    H = data_free(name, rank, 36, np.random.default_rng(0))
    assert H.shape == (rank, 36)
    assert (H >= 0).all()
    assert H.any(axis=0).all()
    if name.endswith(("pieces", "tiles")):
        np.testing.assert_array_equal(H.sum(axis=0), 1.0)


def test_pooled_is_the_floor(folder):
    base = {"data": "blocks", "parties": 3, "rows": 60, "rank": 10, "seed": 0}
    pooled = result_of(Trial("free", method="pooled", **base))["error"]
    assert pooled < min(result_of(Trial("free", method=name, **base))["error"] for name in DATA_FREE)


def test_useful_is_half_of_the_way_to_the_best_that_needs_no_factorization():
    study, setting = STUDIES["tcga"], Setting("gaussian", 1.0, "add-or-remove", 1, 0, 1.0, 1.0)

    def found(alone, private):
        runs = {
            Trial("rows", data, "row level", 1, study.whole, rank, seed, setting): error
            for data, seed in ((study.other, TUNING_SEED), (study.data, 0))
            for rank, error in ((1, alone), (10, private))
        }
        runs[Trial("free", study.data, "pooled", 1, study.whole, 10, 0)] = 0.2
        runs |= {Trial("free", study.data, name, 1, study.whole, 10, 0): 0.8 for name in DATA_FREE}
        return {trial: {"error": error} for trial, error in runs.items()}

    for alone, halfway in ((0.9, 0.5), (0.4, 0.3)):
        assert privacy_row_tables.halfway(found(alone, 0.0), study, study.whole, 1.0, 10) == pytest.approx(halfway)
        for private, is_useful in ((halfway - 0.01, True), (halfway + 0.01, False)):
            table = privacy_row_tables.by_epsilon(found(alone, private), study)
            assert (f"**{private:.3f}**" in table) == is_useful


def test_one_row_moves_an_upload_further_than_one(folder):
    moved = [json.loads(line) for line in (folder / "privacy-sensitivity.jsonl").read_text("utf-8").splitlines()]
    assert {record.get("exchanged") for record in moved} == {"one row", "all rows", None}
    assert all(record["l2"] <= record["l1"] for record in moved if "l1" in record)


def test_masks_cost_what_the_protocol_says(folder):
    runs = [json.loads(line) for line in (folder / "privacy-masking.jsonl").read_text("utf-8").splitlines()]
    up = {(run["parties"], run["masked"]): run["bytes_up"] for run in runs if not run["dropped"]}
    assert up[3, False] == up[10, False] == 20 * 1000 * 8 + 8
    set_up = (64 * 16 + 66 * 16 + 16) // 16
    assert up[10, True] - up[3, True] == 7 * (set_up + 33 + 81)


def test_report_replaces_tables_and_nothing_else(folder):
    document = folder / "privacy.md"
    blocks = "\n".join(f"<!-- table: {name} -->\nold\n<!-- end -->" for name in TABLES)
    document.write_text(f"# Before\n\n{blocks}\n\nAfter.\n")
    privacy_report.main([str(folder), "--document", str(document)])
    text = document.read_text("utf-8")
    assert text.startswith("# Before\n\n<!-- table: printed-gaussian -->\n| method |")
    assert text.endswith("<!-- end -->\n\nAfter.\n")
    assert "old" not in text
    assert (folder / "privacy-printed-gaussian.svg").read_text("utf-8").startswith("<svg")
    privacy_report.main([str(folder), "--document", str(document)])
    assert document.read_text("utf-8") == text


@pytest.fixture(scope="module")
def moments():
    """The committed runs of the second moment."""
    return moment_tables.read(RESULTS / "privacy-moments.jsonl")


def test_a_line_of_the_moment_has_what_the_tables_need():
    record = {"data": "mnist", "n": 300, "epsilon": math.inf, "rank": 10, "seed": 0, "how": "pooled"}
    line = moment_tables.line_of({**record, "error": 0.123456789, "visible": -1, "seconds": 1.5})
    assert json.loads(line) == {**record, "error": 0.12346}
    assert json.loads(moment_tables.line_of({**record, "error": 0.5, "visible": 0}))["visible"] == 0


def test_the_page_has_the_tables_of_the_recorded_moments(moments):
    rows = known(RESULTS / "privacy-rows.jsonl")
    made = moment_tables.tables(moments, lambda data, n, e: privacy_report.tuned_errors(rows, data, n, e))
    page = {block["name"]: block[3].strip() for block in BLOCK.finditer((RESULTS / "privacy.md").read_text("utf-8"))}
    assert len(made) == 5
    assert all(page[name] == table for name, table in made.items())
    assert (RESULTS / "privacy-moments.svg").read_text("utf-8") == moment_tables.picture(moments)


@pytest.mark.parametrize(
    ("data", "n", "epsilon", "how", "most"),
    [
        ("mnist", 1000, 3.0, "moment", 0.69),
        ("mnist", 3000, 1.0, "moment", 0.68),
        ("mnist", 10000, 1.0, "moment", 0.62),
        ("mnist", 60000, 1.0, "hybrid", 0.60),
        ("fashion", 3000, 1.0, "moment", 0.48),
        ("tcga", 844, 1.0, "centred", 0.145),
        ("tcga", 844, 10.0, "centred", 0.118),
    ],
)
def test_the_moment_passes_its_gates(moments, data, n, epsilon, how, most):
    assert len(moment_tables.values(moments, "error", data, n, epsilon, how)) == 5
    error = moment_tables.mean(moments, "error", data, n, epsilon, how)
    assert error <= most
    assert f"| {error:.3f} |" in (RESULTS / "privacy.md").read_text("utf-8")


def test_useful_keeps_half_of_the_gain_of_ten_components():
    one = {"seed": 0, "visible": 3}
    runs = {
        ("mnist", 300, math.inf, 1, "pooled"): [{**one, "error": 0.8}],
        ("mnist", 300, math.inf, 10, "pooled"): [{**one, "error": 0.4}],
        ("mnist", 300, 1.0, 1, "mean"): [{**one, "error": 0.9}],
        ("mnist", 300, 1.0, 10, "moment"): [{**one, "error": 0.59}],
        ("mnist", 300, 1.0, 10, "rounds"): [{**one, "error": 0.61}],
    }
    *_, line = moment_tables.tables(runs, lambda data, n, epsilon: [])["moments-mnist"].splitlines()
    assert line == "| 300 | 1 | 0.49 | 3 | 0.900 | **0.590** | 0.610 | 0.400 |"


def test_attacks_on_sketches_are_written_down(tmp_path, capsys):
    place = tmp_path / "leakage.jsonl"
    leakage_sketches.main(["--quick", "--output", str(place)])
    records = [json.loads(line) for line in place.read_text("utf-8").splitlines()]
    assert {record["kind"] for record in records} == {"sketches", "small party", "span of sums"}
    whole = next(record for record in records if record["kind"] == "sketches" and record["share"] == 1.0)
    assert whole["linear"] < 1e-6
    single = [record for record in records if record["kind"] == "small party" and record["method"] == "exact"]
    assert all(record["X_p"] < 1e-6 for record in single)
