"""The experiment on invertible sums runs on small generated data; what it finds is in docs/results/leakage.md."""

import json

import numpy as np
import pytest

from experiments.leakage import invertibility as leakage_invertibility
from experiments.leakage.invertibility import PARTS, is_worse, rank_and_rounds, ratio_of, report
from experiments.shared import datasets


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """All parts in small, as they are written down."""
    place = tmp_path_factory.mktemp("runs")
    draw = np.random.default_rng(0)
    X = draw.poisson(3.0, size=(160, 4)) @ draw.poisson(1.0, size=(4, 60)) * (draw.random((160, 60)) < 0.5)
    np.savez(place / "zeisel_brain.npz", X=X.astype(np.uint16), y=np.zeros(160))
    output = place / "invertibility.jsonl"
    leakage_invertibility.table.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(datasets.FOLDER, str(place))
        leakage_invertibility.main(["--quick", "--output", str(output)])
        before = output.read_text("utf-8")
        leakage_invertibility.main(["--quick", "--parts", "odd", "--output", str(output)])
    leakage_invertibility.table.cache_clear()
    assert output.read_text("utf-8") == before
    return [json.loads(line) for line in before.splitlines()]


def test_every_part_is_written_down_with_the_word_of_the_law(rows):
    assert {row["part"] for row in rows} == set(PARTS)
    assert all({"law", "found", "seed"} <= row.keys() for row in rows if row["part"] != "factors")
    assert all(0 <= row["residual"] <= 1 for row in rows if row["part"] == "factors")


def test_sums_above_the_ratio_give_rows_away_and_below_it_do_not(rows):
    ratios = {row["wanted"]: row for row in rows if row["kind"] == "ratio"}
    assert ratios[0.8]["moment_error"] > 0.1
    assert ratios[0.8]["within_1"] == 0
    assert ratios[1.5]["moment_error"] < 1e-8
    assert ratios[1.5]["within_1"] == ratios[1.5]["rows"]


def test_a_row_that_was_added_is_read_where_the_seed_is_the_same(rows):
    found = [row for row in rows if row["kind"] == "difference"]
    assert {row["masked"] for row in found} == {False, True}
    assert all(row["error"] < 1e-6 for row in found if row["same_seed"])
    assert all(row["error"] is None for row in found if not row["same_seed"])
    assert any(is_worse(row) for row in found)


@pytest.mark.parametrize("n", [20, 40])
@pytest.mark.parametrize("ratio", [0.8, 0.95, 1.05, 1.5, 3.0])
def test_rank_and_rounds_are_on_the_same_side_of_the_law(n, ratio):
    rank, rounds = rank_and_rounds(ratio, n)
    assert ratio_of(rank, rounds, n) == pytest.approx(ratio, rel=0.06)
    assert rank * rounds >= n


def test_the_report_has_a_table_for_every_part(rows):
    text = report(rows)
    for head in (
        "phase, 1 %",
        "ratio",
        "real",
        "dictionary",
        "lone",
        "membership",
        "difference",
        "limit",
        "odd",
        "law",
    ):
        assert f"### {head}\n\n| " in text
    assert "| level |" in text
