"""docs/what-leaves-a-party.md is what really leaves: its tables are read here and held against recorded traffic."""

from __future__ import annotations

import inspect
import typing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partsong.aggregation.plaintext import InTheOpen
from partsong.attacks.runner import attack
from partsong.core.interfaces import Layout, Schedule, Shard
from partsong.core.streams import key
from partsong.data.blocks import two_sided_blocks
from partsong.data.conversion import as_matrix
from partsong.engines.asynchronous import Asynchronous, Durations
from partsong.engines.local import Sequential
from partsong.errors import PartyError
from partsong.methods import recipes

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "what-leaves-a-party.md").read_text("utf-8")
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
    "shared_statistics": Case(recipes.shared_statistics(K)),
    "row_private": Case(recipes.row_private(K, epsilon=1.0, row_bound=1.0, rounds=3)),
    "party_private": Case(recipes.party_private(recipes.fedavg(K), epsilon=1.0, delta=1e-5, rounds=3)),
    "then_exact": Case(recipes.then_exact(recipes.fedavg(K), 2), 4),
    "fedavg": Case(recipes.fedavg(K)),
    "fedprox": Case(recipes.fedprox(K)),
    "fnmf": Case(recipes.fnmf(K)),
    "fnmf_by_sums": Case(recipes.fnmf_by_sums(K), 6),
    "local_only": Case(recipes.local_only(K), 1),
    "ipalm_once": Case(recipes.ipalm_once(K, steps=200), 1),
    "mur_once": Case(recipes.mur_once(K, steps=200), 1),
    "game_consensus": Case(recipes.game_consensus(K)),
    "syn_sd": Case(recipes.syn_sd(K)),
    "syn_ssd u": Case(recipes.syn_ssd(K, variant="u"), 33),
    "syn_ssd v": Case(recipes.syn_ssd(K, variant="v"), 33),
    "syn_ssd uv": Case(recipes.syn_ssd(K, variant="uv"), 33),
    "asyn_sd": Case(recipes.asyn_sd(K), 12, Asynchronous(EQUALLY_FAST, record=True)),
    "asyn_ssd_v": Case(recipes.asyn_ssd_v(K), 12, Asynchronous(EQUALLY_FAST, record=True)),
    "secure_dsanls": Case(recipes.secure_dsanls(K), 4),
    "dsanls": Case(recipes.dsanls(K, iterations=4, every=2, n_rows=sum(ROWS)), 9, is_two_sided=True),
    "game": Case(recipes.game(K), 6),
}


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the table below a heading of the page, without its head."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[2:]]


SENT = rows_of("Array by array")
ALONE = {recipe: (told, error) for recipe, told, error, _ in rows_of("A party with a single row")}


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
    done = case.engine.run(case.program, shards, Schedule(case.rounds, SEED), reduction=InTheOpen())
    return tuple(done)


def messages(recipe: str) -> list[Any]:
    return [message for done in recorded(recipe) for _, _, message in done.traffic]


def test_the_page_is_about_every_recipe():
    def is_program(function: Any) -> bool:
        returned = typing.get_type_hints(function).get("return")
        return hasattr(returned, "start_server")

    functions = {
        name
        for name, found in vars(recipes).items()
        if inspect.isfunction(found) and found.__module__ == recipes.__name__ and is_program(found)
    }
    listed = {name.split()[0] for name, *_ in SENT}
    assert functions == listed == {name.split()[0] for name in CASES} == {name.split()[0] for name in ALONE}
    assert {name for name, *_ in SENT} == set(CASES) == set(ALONE)


@pytest.mark.parametrize("recipe", CASES)
def test_every_array_that_leaves_is_listed_with_its_size_and_nothing_else_leaves(recipe):
    listed = {
        array: tuple(SIZES.get(part) or int(part) for part in size.split(" × "))
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
