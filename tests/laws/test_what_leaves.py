"""docs/reference/exposure.md is what really leaves: its tables are read here and held against recorded traffic."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partsong import methods
from partsong.aggregation.plaintext import PlainReduction
from partsong.attacks.runner import attack
from partsong.core.interfaces import Layout, Schedule, Shard
from partsong.core.streams import key
from partsong.data.blocks import two_sided_blocks
from partsong.data.conversion import as_matrix
from partsong.engines.local import Sequential
from partsong.engines.virtual_clock import Asynchronous, Durations
from partsong.errors import PartyError
from partsong.methods import build
from partsong.methods.dsanls import SketchExchange
from partsong.methods.private import party_private, row_private
from partsong.methods.two_stage import exact_after

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "exposure.md").read_text("utf-8")
K, M, ROWS, SEED = 3, 59, (37, 41, 43), 11
SIZES = {
    "k": K,
    "m": M,
    "w": -(-M // len(ROWS)),
    "d": 6,  # ⌈m/10⌉
    "e": 13,  # ⌈Σn/10⌉
    "g": 4 * K,
}
NEARLY, ROUGHLY = 0.1, 0.5
EQUALLY_FAST = Durations({"p0": 1.0, "p1": 1.0, "p2": 1.0})


@dataclass(frozen=True)
class Case:
    """A recipe as it is run here: how many exchanges, and by which engine."""

    program: Any
    rounds: int = 3
    engine: Any = Sequential(record=True)
    is_two_sided: bool = False

    @property
    def is_asynchronous(self) -> bool:
        return isinstance(self.engine, Asynchronous)


CASES = {
    "exact": Case(build("exact", K, local_steps=5)),
    "row-private": Case(row_private(K, epsilon=1.0, row_bound=1.0, rounds=3)),
    "party-private": Case(party_private(build("fedavg", K, local_steps=10), epsilon=1.0, delta=1e-5, rounds=3)),
    "then-exact": Case(exact_after(build("fedavg", K, local_steps=10), 2), 4),
    "fedavg": Case(build("fedavg", K, local_steps=10)),
    "fedprox": Case(build("fedprox", K)),
    "fnmf-local": Case(build("fnmf-local", K, align="assignment")),
    "fnmf-paper": Case(build("fnmf-paper", K)),
    "fnmf-personal": Case(build("fnmf-personal", K)),
    "fnmf": Case(build("fnmf", K), 4),
    "fnmf-by-sums": Case(build("fnmf-by-sums", K), 6),
    "local-only": Case(build("local-only", K), 1),
    "one-shot-ipalm": Case(build("one-shot-ipalm", K, local_steps=200), 1),
    "one-shot-mu": Case(build("one-shot-mu", K, local_steps=200), 1),
    "game-consensus": Case(build("game-consensus", K)),
    "syn-sd": Case(build("syn-sd", K)),
    "syn-ssd-u": Case(build("syn-ssd-u", K), 33),
    "syn-ssd-v": Case(build("syn-ssd-v", K), 33),
    "syn-ssd-uv": Case(build("syn-ssd-uv", K), 33),
    "asyn-sd": Case(build("asyn-sd", K), 12, Asynchronous(EQUALLY_FAST, record=True)),
    "asyn-ssd-v": Case(build("asyn-ssd-v", K), 12, Asynchronous(EQUALLY_FAST, record=True)),
    "secure-dsanls": Case(build("secure-dsanls", K), 4),
    "dsanls": Case(SketchExchange(K, iterations=4, every=2, n_rows=sum(ROWS)), 9, is_two_sided=True),
    "game": Case(build("game", K), 6),
}


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the table below a heading of the page, without its head."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


SIZE = r"number|(?:\d+|[a-z])(?: × (?:\d+|[a-z]))*"
SENT = [
    (method, array, size, weight)
    for methods_, arrays, weight, *_ in rows_of("What is sent")
    for method in re.findall(r"`([\w-]+)`", methods_)
    for array, size in re.findall(rf"`(\w+)` ({SIZE})(?=,|$)", arrays)
]
"""Method, array, size and weight: a row of the table is about several of each."""

ALONE = {
    method: (found, error)
    for found, methods_, _ in rows_of("A party with a single row")
    for method, error in re.findall(r"`([\w-]+)` ?([\d.e-]*)", methods_)
}


def data(rows: tuple[int, ...]) -> list[np.ndarray]:
    draw = np.random.default_rng(4)
    X = draw.gamma(0.4, size=(sum(rows), K)) @ draw.gamma(0.4, size=(K, M)) + 0.05 * draw.random((sum(rows), M))
    return np.split(X * (draw.random(X.shape) < 0.7), np.cumsum(rows)[:-1])


def shards_of(case: Case, rows: tuple[int, ...]) -> list[Shard]:
    parts = data(rows)
    blocks = two_sided_blocks(np.vstack(parts), len(rows)) if case.is_two_sided else map(as_matrix, parts)
    return [Shard(f"p{i}", block, key(5, f"p{i}")) for i, block in enumerate(blocks)]


@cache
def recorded(recipe: str, rows: tuple[int, ...] = ROWS) -> tuple[Any, ...]:
    case = CASES[recipe]
    shards = shards_of(case, rows)
    done = case.engine.run(case.program, shards, Schedule(case.rounds, SEED), reduction=PlainReduction())
    return tuple(done)


def messages(recipe: str) -> list[Any]:
    return [message for done in recorded(recipe) for _, _, message in done.traffic]


WITH_NOISE = {"row-private", "party-private"}
"""Rows about methods with `privacy=…`."""


def test_the_page_is_about_every_method():
    named = {*methods.names(), *methods.names(methods.RANKS)} | WITH_NOISE
    assert named == set(CASES) == {name for name, *_ in SENT} == set(ALONE)
    assert len({(name, array) for name, array, *_ in SENT}) == len(SENT), "an array is listed twice"
    for _, arrays, *_ in rows_of("What is sent"):
        assert len(re.findall(rf"`\w+` (?:{SIZE})(?=,|$)", arrays)) == arrays.count("`") / 2, "an array without a size"


@pytest.mark.parametrize("recipe", CASES)
def test_every_array_that_leaves_is_listed_with_its_size_and_nothing_else_leaves(recipe):
    listed = {
        array: () if size == "number" else tuple(SIZES.get(part) or int(part) for part in size.split(" × "))
        for name, array, size, *_ in SENT
        if name == recipe
    }
    seen = {name: tuple(array.shape) for message in messages(recipe) for name, array in message.arrays.items()}
    assert seen == listed


@pytest.mark.parametrize("recipe", CASES)
def test_a_message_is_as_large_as_its_arrays_and_one_number_more(recipe):
    for message in messages(recipe):
        assert message.nbytes == 8 * sum(int(np.prod(array.shape)) for array in message.arrays.values()) + 8


@pytest.mark.parametrize("recipe", CASES)
def test_the_weight_is_what_the_page_says(recipe):
    told = {weight for name, _, _, weight, *_ in SENT if name == recipe}
    seen = {(party, message.weight) for done in recorded(recipe) for party, _, message in done.traffic}
    counts = {f"p{i}": float(n) for i, n in enumerate(ROWS)}
    kinds = {"n_p" if weight == counts[party] else "1" if weight == 1 else "?" for party, weight in seen}
    assert kinds == told


@pytest.mark.parametrize("recipe", [name for name, case in CASES.items() if not case.is_two_sided])
def test_no_row_of_the_data_and_nothing_with_an_entry_for_each_row_leaves(recipe):
    parts = dict(zip(("p0", "p1", "p2"), data(ROWS), strict=True))
    for done in recorded(recipe):
        for party, _, message in done.traffic:
            for array in (np.asarray(array) for array in message.arrays.values()):
                assert len(parts[party]) not in array.shape
                if array.ndim == 2 and M in array.shape:
                    vectors = array if array.shape[1] == M else array.T
                    assert (
                        np.abs(np.corrcoef(parts[party], vectors)[: len(parts[party]), len(parts[party]) :]).max()
                        < 1 - 1e-6
                    )


@pytest.mark.parametrize("recipe", [name for name, case in CASES.items() if not case.is_two_sided])
def test_what_a_party_with_a_single_row_discloses_is_what_the_page_says(recipe):
    rows, (told, stated) = (1, *ROWS[1:]), ALONE[recipe]
    if told.startswith("it refuses to send"):
        with pytest.raises(PartyError, match="sends no more"):
            recorded(recipe, rows)
        return
    case, shards = CASES[recipe], shards_of(CASES[recipe], rows)
    found = attack(
        [done.traffic for done in recorded(recipe, rows)],
        case.program,
        Layout.of(shards, SEED),
        truth=dict(zip(("p0", "p1", "p2"), data(rows), strict=True)),
        asynchronous=case.is_asynchronous,
    )
    errors = {finding.array: finding.error for finding in found if finding.party == "p0" and "X_p" in finding.array}
    if told.startswith("nothing by"):
        assert not errors
        return
    least = min(errors.values())
    bound = {"exactly": 1e-6, "nearly": NEARLY, "roughly": ROUGHLY}[told.split(",")[0]]
    assert least < bound
    assert ("up to a factor" in told) == (set(errors) == {"X_p up to a factor"})
    assert least < 10 * float(stated)
    assert told.startswith("exactly") or least > 1e-9, "the page could say more"
