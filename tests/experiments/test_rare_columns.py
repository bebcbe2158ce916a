"""The experiment with rare columns runs on small data."""

from __future__ import annotations

import numpy as np

from experiments.leakage import rare_columns as experiment


def test_a_run_that_is_refused_by_default_goes_through_without_rare_columns(monkeypatch):
    draw = np.random.default_rng(0)
    parts = [draw.random((40, 12)) + 0.1 for _ in range(2)]
    for part in parts:
        part[4:, 5] = 0
    monkeypatch.setattr(experiment, "rows_of", lambda name, seed: parts)
    for name, value in (("RANK", 3), ("SETS", {"tcga_brca": experiment.SETS["tcga_brca"]}), ("SEEDS", 1)):
        monkeypatch.setattr(experiment, name, value)
    found = experiment.trial("tcga_brca", 0)
    assert found.refusal.startswith("code 'exposure'")
    assert (found.rarest, found.n_rare) == (4, 1)
    assert 0 < found.share < 0.05
    assert found.unlimited < found.error < 1
    assert "| tcga_brca | 12 | 4 | code 'exposure'" in experiment.page()
