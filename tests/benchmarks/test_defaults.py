"""The benchmark of defaults: what it measures, and what it says."""

import numpy as np
import pytest
import scipy.sparse as sp

from benchmarks.speed import defaults


def test_objectives_are_those_of_the_formula():
    rng = np.random.default_rng(0)
    X, W, H = rng.random((9, 7)), rng.random((9, 3)), rng.random((3, 7))
    sizes = sum(size * 0.3 * (0.4 * F.sum() + 0.5 * 0.6 * np.square(F).sum()) for size, F in ((7, W), (9, H)))
    expected = (0.5 * np.square(X - W @ H).sum() + sizes) / (0.5 * np.square(X).sum())
    for form in (np.asarray, sp.csr_array):
        assert defaults.objective(form(X), W, H, 0.3, 0.4) == pytest.approx(expected)


def test_a_set_that_is_left_out_has_no_vote():
    rows = {"a": (0.9, 0.5, 0.1), "b": (0.9, 0.5, 0.1), "odd": (0.1, 0.5, 0.9)}
    found = {
        "starts": {
            name: {"set": name, "is_sparse": True, **dict(zip(defaults.STARTS, values, strict=True))}
            for name, values in rows.items()
        }
    }
    chosen = {name: start for name, _, start, _, _ in defaults.left_out(found)}
    assert chosen["odd"] == "anchors", "by the two others"
    assert [ratio for name, _, _, ratio, _ in defaults.left_out(found) if name == "odd"] == [pytest.approx(0.1 / 0.9)]


def test_the_page_says_what_was_measured(monkeypatch, tmp_path):
    few = tuple(data for data in defaults.SETS if data.name in ("digits", "wine"))
    monkeypatch.setattr(defaults, "SETS", (*few, *(d for d in defaults.SETS if d.name == "spam" and d.is_there)))
    monkeypatch.setattr(defaults, "GRID_SETS", ())
    monkeypatch.setattr(defaults.compiling, "first_fits", lambda: {"dense float64": [3.0, 1.0, 2.0]})
    kept = tmp_path / "kept.json"
    defaults.measure(1, ranks=(3,), keep=kept, say=lambda line: None)
    found = defaults.measure(1, ranks=(3,), keep=kept, say=pytest.fail)  # kept, and not measured again
    text = {**found["pairs"]["digits 3"], "kind": "text", "set": "some"}
    dense = {**found["pairs"]["digits 3"]}
    page = defaults.report({**found, "pairs": {"a": text, "b": dense, "c": found["pairs"]["wine 3"]}}, "command", 1)
    assert "| digits | 3 |" in page
    assert "| wine * | 3 |" in page
    assert "on average: " in page
    assert "Within 2% of the best: 0 of 0." in page
    assert "- dense float64: 2.00 (3.00, 1.00, 2.00)" in page
