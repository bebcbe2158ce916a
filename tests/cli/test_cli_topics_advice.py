"""Errors of `partsong topics fit` name its options, and what they advise cures them."""

from __future__ import annotations

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
        (("--method", "fednmf", "--rate", "1e9"), ("a smaller rate", "a larger batch")),
        (("--method", "fednmf", "--rate", "1e9", "--secure-aggregation"), ("a smaller rate", "a larger batch")),
        (("--method", "fednmf", "--rate", "1e9", "--weighting", "counts"), ("a smaller rate", "weighting tfidf")),
        (("--method", "fednmf-mi", "--critic-rate", "1e9"), ("a smaller critic_rate", "mi_gradient js")),
        (("--method", "fednmf", "--rate", "1e9", "--server", "yogi"), ("a smaller rate", "a smaller server_rate")),
    ],
)
def test_steps_that_are_too_large_are_told_with_the_ways_out(words, ways, files, invoke, told):
    fit = ("topics", "fit", *files, "-k", 2, "--rounds", 2)
    shown = invoke(*fit, *words, "-q", code=1).stderr
    for text in (shown, told(*fit, *words, code=1)["error"]):
        assert all(way in text for way in ways)
        assert not any(word in text for word in ("on_party_error", "checkpoint", "shards", "in place of counts"))
        assert ("tfidf" in text) == ("counts" in words)
    cured = [{"1e9": "1e-3"}.get(word, word) for word in words]
    assert told(*fit, *cured)["outcome"] == "max-rounds"


@pytest.mark.parametrize(
    ("words", "option", "code"),
    [
        (("-k", 9), "--topics", 1),
        (("-k", 2, "--min-parties", 4), "--min-parties", 1),
        (("-k", 2, "--participation", 0.5), "--participation", 1),
        (("-k", 2, "--method", "fnmf", "--secure-aggregation"), "--secure-aggregation", 2),
        (("-k", 2, "--server", "adam"), "--server", 2),
        (("-k", 2, "--method", "fednmf", "--device", "nowhere"), "--device", 2),
        (("-k", 2, "--language", "klingon"), "--language", 2),
    ],
)
def test_failures_name_the_option(words, option, code, files, told):
    """With exit code 2 where no text can make it right."""
    error = told("topics", "fit", *files, *words, code=code)["error"]
    assert re.match(rf"(Invalid value: |Invalid value for )?{option}\b", error), error
