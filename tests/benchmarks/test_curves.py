"""Seconds, medians, ratios and verdicts, on curves written down by hand."""

import math

import pytest

from benchmarks.speed.contestants import BUILT_IN
from benchmarks.speed.curves import Ratio, Run, fastest, median_of, median_ratio, ratio, spread
from benchmarks.speed.report import Report, shown
from benchmarks.speed.results import Results


def curve(*points, contestant="partsong", seed=0, stopped="limit", workload="mnist"):
    return Run(workload, contestant, seed, tuple(points), stopped, after=0.0)


def test_time_to_is_the_first_point_at_or_above_the_target():
    run = curve((0.1, 0.5), (0.2, 0.8), (0.4, 0.79), (0.8, 0.9))
    assert [run.time_to(target) for target in (0.4, 0.5, 0.79, 0.8, 0.85)] == [0.1, 0.1, 0.2, 0.2, 0.8]
    assert run.time_to(0.95) == math.inf
    assert run.best == 0.9
    assert run.seconds == 0.8


def test_a_run_that_was_ended_early_says_nothing_about_what_lies_beyond():
    assert math.isnan(curve((0.1, 0.5), stopped="goal").time_to(0.6))
    assert math.isnan(curve().time_to(0.6))


def test_spread_ignores_the_unknown_and_counts_never_as_the_longest():
    assert spread([3.0, math.nan, 1.0, 2.0]).median == 2.0
    found = spread([1.0, math.inf, 2.0])
    assert (found.median, found.low, found.high, found.count) == (2.0, 1.0, math.inf, 3)
    assert spread([1.0, math.inf]).median == math.inf
    assert spread([1.0, 2.0]).median == 1.5
    assert spread([]).count == 0


def test_ratio_is_the_others_time_over_ours():
    ours, other = curve((1.0, 0.5), (2.0, 0.9)), curve((3.0, 0.5), (9.0, 0.6))
    assert ratio(ours, other, 0.5) == Ratio(3.0)
    assert ratio(ours, other, 0.9) == Ratio(4.5, ">")
    assert ratio(other, ours, 0.9) == Ratio(2.0 / 9.0, "<")
    assert ratio(ours, other, 0.95) is None
    assert ratio(ours, curve((1.0, 0.7), stopped="goal"), 0.9) is None


def test_median_ratio_pairs_runs_of_the_same_seed():
    ours = [curve((seconds, 1.0), seed=seed) for seed, seconds in enumerate((1.0, 10.0, 1.0))]
    others = [curve((seconds, 1.0), seed=seed) for seed, seconds in ((2, 4.0), (0, 2.0), (1, 30.0), (7, 99.0))]
    found = median_ratio(ours, others, 1.0)
    assert (found.value, found.low, found.high, found.count) == (3.0, 2.0, 4.0, 3)
    assert median_ratio(ours, [], 1.0) is None


def test_a_bound_shows_where_it_decides_the_median():
    assert median_of([Ratio(1.0), Ratio(2.0), Ratio(9.0, ">")]).bound == ""
    assert median_of([Ratio(1.0), Ratio(5.0, ">"), Ratio(9.0, ">")]).bound == ">"
    assert shown(median_of([Ratio(12.0, ">")])) == "> 12×"
    assert shown(Ratio(0.943)) == "0.94×"


def test_fastest_takes_the_better_start_seed_by_seed():
    first = [curve((1.0, 1.0), seed=0, contestant="a"), curve((9.0, 0.1), seed=1, contestant="a")]
    second = [curve((2.0, 1.0), seed=0, contestant="b"), curve((3.0, 1.0), seed=1, contestant="b")]
    assert {run.seed: run.contestant for run in fastest([*first, *second], 1.0)} == {0: "a", 1: "b"}


def contest(ours, random, nndsvda):
    """Three seeds that all reach the best at these seconds, and half of it after a tenth of them."""
    times = {"partsong": ours, "sklearn-cd-random": random, "sklearn-cd-nndsvda": nndsvda}
    return [
        curve((0.1 * seconds, 0.45), (seconds, 0.9), contestant=name, seed=seed)
        for name, seconds in times.items()
        for seed in range(3)
    ]


@pytest.mark.parametrize(("seconds", "verdict"), [(1.0, "met, 6.0×"), (1.5, "NOT met, 4.0×")])
def test_the_target_is_judged_against_the_better_start(seconds, verdict):
    results = Results(runs=contest(seconds, 6.0, 8.0))
    text = Report(results, BUILT_IN, [("mnist", "digits")], {}).text()
    assert f"mnist, 99.9 %: at least 5× faster than the better scikit-learn cd start: {verdict}" in text
    assert "stack-overflow, 99 %: at least 3× faster than the better scikit-learn cd start: not measured." in text


def test_being_slower_than_a_peer_is_said():
    results = Results(runs=contest(1.0, 0.5, 2.0))
    text = Report(results, BUILT_IN, [("mnist", "digits")], {}).text()
    assert "nowhere below 0.95× of any listed peer: NOT met in 2 of 4 comparisons: sklearn-cd-random on mnist" in text


def test_floor_and_memory_are_judged_by_the_worst_data():
    measured = {
        "ratio": 1.2,
        "products": 1.0,
        "one sweep": 1.2,
        "one sweep, extrapolated": 1.3,
        "default": 2,
        "repeats": 20,
    }
    results = Results(
        floor={"mnist": measured, "small": {**measured, "ratio": 1.4}},
        memory={"mnist": {"data": 1e6, "peak": 50e6, "allowance": 100e6}},
    )
    text = Report(results, BUILT_IN, [], {}).text()
    assert "within 1.3× of its two products: NOT met on 1 of 2: small 1.40×." in text
    assert "memory within data + 4(n+m)k numbers + 64 MB: met on all 1; the most is 50 % of it (mnist)." in text


def test_results_survive_a_file_and_newer_runs_replace_older_ones(tmp_path):
    results = Results(runs=contest(1.0, 2.0, 3.0), shapes={"mnist": "10 × 10"})
    results.save(tmp_path / "kept.json")
    again = Results.load(tmp_path / "kept.json")
    assert again == results
    again.add([curve((0.5, 0.9), contestant="partsong", seed=0)])
    assert [run.seconds for run in again.of("mnist", "partsong")] == [0.5]
    assert len(again.of("mnist", "sklearn-cd-random")) == 3
    assert Results.load(tmp_path / "none.json") == Results()
