"""What an error or a warning of `partsong topics fit` advises can be given to it."""

from __future__ import annotations

import ast
import csv
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
from typer.main import get_command

import partsong
from partsong.cli.main import app
from partsong.console.output import as_options, as_topic_options

SOURCE = Path(partsong.__file__).parent
PATTERNS = ("topics/*.py", "methods/fednmf.py", "cli/topics.py")
MODULES = sorted(path for pattern in PATTERNS for path in SOURCE.glob(pattern))
FIT = get_command(app).commands["topics"].commands["fit"]
OPTIONS = {name for parameter in FIT.params for name in parameter.opts if name.startswith("-")} | {"--help"}
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*\b")
ARGUMENTS = {
    name
    for kind in (partsong.TopicModel, partsong.FederatedTopicModel)
    for name in inspect.signature(kind).parameters
    if f"--{name.replace('_', '-')}" in OPTIONS or name in ("n_topics", "random_state")
}
PLANTED = (("cat", "dog", "horse", "sheep"), ("piano", "violin", "cello", "flute"))


def texts_in(path):
    """All texts but docstrings, as the command line would tell them; what is only known later is a 1."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "1" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare | parts:
            yield "" if OPTION.fullmatch(node.value) else node.value  # an option that is declared is no advice


def as_told(text):
    return as_options(as_topic_options(text))


def unknown_in(told):
    """Options that the command does not have, and arguments that it has by another name."""
    options = {found for found in OPTION.findall(told) if found not in OPTIONS}
    return options | {name for name in ARGUMENTS if re.search(rf"(?<![\w-]){name}=", told)}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_all_that_topic_models_say_is_in_options_of_the_command(path):
    assert {text: unknown_in(as_told(text)) for text in texts_in(path) if unknown_in(as_told(text))} == {}


def test_there_is_something_to_look_at():
    found = {name for path in MODULES for text in texts_in(path) for name in OPTION.findall(as_told(text))}
    assert {"--topics", "--method", "--critic-rate", "--max-words", "--rate", "--weighting"} <= found
    assert {"rate", "n_topics", "longest_word", "weighting"} <= ARGUMENTS
    assert unknown_in('Take --faulty leave-out or rate=0.1, with method="x" --rounds 3') == {
        "--faulty",
        "rate",
        "method",
    }


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
        (("--method", "fednmf", "--rate", "1e9"), ("a smaller --rate", "a larger --batch")),
        (("--method", "fednmf", "--rate", "1e9", "--masked"), ("a smaller --rate", "a larger --batch")),
        (("--method", "fednmf", "--rate", "1e9", "--weighting", "counts"), ("a smaller --rate", "--weighting tfidf")),
        (("--method", "fednmf-mi", "--critic-rate", "1e9"), ("a smaller --critic-rate", "--mi-gradient js")),
        (("--method", "fednmf", "--rate", "1e9", "--server", "yogi"), ("a smaller --rate", "a smaller --server-rate")),
    ],
)
def test_steps_that_are_too_large_are_told_with_options_of_this_command(words, ways, files, invoke, told):
    fit = ("topics", "fit", *files, "-k", 2, "--rounds", 2)
    shown = invoke(*fit, *words, "-q", code=1).stderr
    for text in (shown, told(*fit, *words, code=1)["error"]):
        assert all(way in text for way in ways)
        assert unknown_in(text) == set()
        assert not any(word in text for word in ("faulty", "checkpoint", "shards", "in place of counts"))
        assert ("tfidf" in text) == ("counts" in words)
    cured = [{"1e9": "1e-3"}.get(word, word) for word in words]
    assert told(*fit, *cured)["outcome"] == "max-rounds"


def test_other_failures_name_options_of_this_command(files, invoke):
    for words in (
        ("-k", 9),
        ("-k", 2, "--max-share", 0.001),
        ("-k", 2, "--min-parties", 4),
        ("-k", 2, "--min-documents", 1000),
        ("-k", 2, "--method", "fnmf", "--masked"),
        ("-k", 2, "--participation", 0.5),
        ("-k", 2, "--server", "adam"),
        ("-k", 2, "--method", "fednmf", "--device", "nowhere"),
        ("-k", 2, "--language", "klingon"),
    ):
        shown = invoke("topics", "fit", *files, *words, code=1).stderr
        assert unknown_in(shown) == set(), shown
