"""What an error of `partsong topics fit` advises can be given to it."""

import csv
import re

import numpy as np
import pytest

PLANTED = (("cat", "dog", "horse", "sheep"), ("piano", "violin", "cello", "flute"))


@pytest.fixture
def files(tmp_path):
    for seed, name in enumerate("abc"):
        draw = np.random.default_rng(seed)
        with (tmp_path / f"{name}.csv").open("w", encoding="utf-8", newline="") as stream:
            rows = csv.writer(stream)
            rows.writerow(["text"])
            rows.writerows([" ".join(draw.choice(PLANTED[draw.integers(2)], 4))] for _ in range(20))
    return ["a.csv", "b.csv", "c.csv"]


@pytest.mark.parametrize(
    ("words", "ways"),
    [
        (("--method", "fednmf", "--rate", "1e9"), ("rate", "batch")),
        (("--method", "fednmf", "--rate", "1e9", "--masked"), ("rate", "batch")),
        (("--method", "fednmf", "--rate", "1e9", "--weighting", "counts"), ("rate", "tfidf")),
        (("--method", "fednmf-mi", "--critic-rate", "1e9"), ("critic.rate", "mi.gradient")),
        (("--method", "fednmf", "--rate", "1e9", "--server", "yogi"), ("rate", "server.rate")),
    ],
)
def test_steps_that_are_too_large_are_told_with_settings_of_this_command(words, ways, files, invoke, told):
    fit = ("topics", "fit", *files, "-k", 2, "--rounds", 2)
    shown = invoke(*fit, *words, "-q", code=1).stderr
    for text in (shown, told(*fit, *words, code=1)["error"]):
        assert all(re.search(rf"Take .*{way}", text) for way in ways)
        assert not any(word in text for word in ("faulty", "checkpoint", "shards", "in place of counts"))
        assert ("tfidf" in text) == ("counts" in words)
    cured = [{"1e9": "1e-3"}.get(word, word) for word in words]
    assert told(*fit, *cured)["outcome"] == "max-rounds"
