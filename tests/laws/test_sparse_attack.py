"""Sparse rows come back from few sums of the program itself; dense ones do not, nor columns that two rows share."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from scipy.optimize import linear_sum_assignment

from partsong import FederatedNMF
from partsong.aggregation.plaintext import PlainReduction
from partsong.attacks.sparse_rows import DIRECTIONS, FoundRows, lone_columns, rows_by_dictionary
from partsong.core.interfaces import Schedule, Shard
from partsong.data.conversion import as_matrix
from partsong.engines.local import Sequential
from partsong.errors import ShapeError
from partsong.methods import build
from partsong.methods.exact import SharedSums

K = 10


def recorded(X: np.ndarray, rounds: int, *, rank: int = K, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """(gram, cross) of one party in each round, as they were sent."""
    program, shards = build("exact", rank, local_steps=3), [Shard("p0", as_matrix(X))]
    rounds_done = Sequential(record=True).run(program, shards, Schedule(rounds, seed=seed), reduction=PlainReduction())
    sent = [message for done in rounds_done for _, _, message in done.traffic]
    return [(np.asarray(message["gram"]), np.asarray(message["cross"])) for message in sent]


def with_support(n: int, m: int, support: int, seed: int, dtype: str = "float64") -> np.ndarray:
    """X (n × m) with values in so many random rows of every column."""
    random = np.random.default_rng(seed)
    X = np.zeros((n, m))
    chosen = random.random((m, n)).argsort(axis=1)[:, :support]
    X[chosen, np.arange(m)[:, None]] = random.random((m, support))
    return X.astype(dtype)


def texts(n: int, m: int, least: int, seed: int) -> np.ndarray:
    """tf-idf (n × m, float32) of documents whose words follow Zipf's law; words of at least so many documents."""
    random = np.random.default_rng(seed)
    p = 1 / (np.arange(3 * m) + 10.0)
    counts = np.zeros((n, 3 * m))
    for i, length in enumerate(random.poisson(random.gamma(2, 30, n)) + 5):
        np.add.at(counts[i], random.choice(3 * m, length, p=p / p.sum()), 1)
    counts = counts[:, (counts > 0).sum(axis=0) >= least]
    X = counts[:, np.sort(random.permutation(counts.shape[1])[:m])]
    X *= np.log(n / (X > 0).sum(axis=0)) + 1
    return (X / np.maximum(np.linalg.norm(X, axis=1, keepdims=True), 1e-12)).astype("float32")


def rows_to(most: float, found: FoundRows | None, X: np.ndarray) -> int:
    """How many rows are among those found, each up to this relative error."""
    if found is None:
        return 0
    apart = np.linalg.norm(X[:, None] - found.rows[None], axis=2) / np.linalg.norm(X, axis=1)[:, None]
    return int((apart[linear_sum_assignment(np.minimum(apart, 1.0))] <= most).sum())


# ---- dictionary search ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("seed", range(3))
def test_rows_come_back_from_half_as_many_sums_as_rows(seed: int, dtype: str) -> None:
    X = with_support(60, 4000, 5, seed, dtype)
    found = rows_by_dictionary(recorded(X, 3, seed=seed), 60)
    assert found is not None
    assert found.is_scaled
    assert found.held_out > 0.9
    assert found.misfit < 1e-3
    assert rows_to(0.01, found, X) >= 55


def test_weights_come_back_with_the_rows() -> None:
    X = with_support(60, 1500, 5, 0)
    pairs = recorded(X, 3)
    found = rows_by_dictionary(pairs, 60)
    assert found is not None
    assert found.weights.shape == (60, 3 * K)
    np.testing.assert_allclose(found.weights.T @ found.rows, np.vstack([cross for _, cross in pairs]), atol=1e-5)
    np.testing.assert_allclose(found.weights[:, :K].T @ found.weights[:, :K], pairs[0][0], rtol=1e-5, atol=1e-5)


def test_the_estimator_gives_the_same_rows_away(monkeypatch: pytest.MonkeyPatch) -> None:
    X, sent, local = with_support(60, 1500, 5, 2, "float32"), [], SharedSums.local

    def recording(program: SharedSums, *given: Any) -> Any:
        party, message = local(program, *given)
        sent.append((np.asarray(message["gram"]), np.asarray(message["cross"])))
        return party, message

    monkeypatch.setattr(SharedSums, "local", recording)
    FederatedNMF(K, method="exact", rounds=3, tol=0, random_state=0).fit([X])
    assert rows_to(0.01, rows_by_dictionary(sent[:3], 60), X) >= 55


@pytest.mark.parametrize("rounds", [1, 3])
def test_nothing_is_claimed_of_dense_rows(rounds: int) -> None:
    random = np.random.default_rng(0)
    assert rows_by_dictionary(recorded(random.random((60, 1500)) + 0.01, rounds), 60) is None


def test_nothing_is_claimed_of_rows_of_low_rank() -> None:
    random = np.random.default_rng(0)
    parts = random.random((15, 1500)) * (random.random((15, 1500)) < 0.2)
    assert rows_by_dictionary(recorded(random.random((60, 15)) @ parts, 3), 60) is None


def test_columns_that_repeat_do_not_confirm_themselves() -> None:
    random = np.random.default_rng(0)
    X = random.random((60, 200))[:, random.integers(0, 200, 1500)]
    assert rows_by_dictionary(recorded(X, 3), 60) is None


def test_the_search_ends_at_its_deadline() -> None:
    X = np.random.default_rng(0).random((60, 4000))
    pairs, begin = recorded(X, 3), time.monotonic()
    assert rows_by_dictionary(pairs, 60, deadline=begin + 0.5) is None
    assert time.monotonic() - begin < 3


def test_the_same_seed_finds_the_same_rows() -> None:
    pairs = recorded(with_support(60, 800, 5, 0), 3)
    one, other = rows_by_dictionary(pairs, 60, seed=3), rows_by_dictionary(pairs, 60, seed=3)
    assert one is not None
    assert other is not None
    np.testing.assert_array_equal(one.rows, other.rows)


# ---- lone columns -----------------------------------------------------------------------------------------------


def test_lone_columns_are_grouped_by_row_from_one_round() -> None:
    X = texts(2000, 6000, 1, 0)
    lone = np.flatnonzero((X > 0).sum(axis=0) == 1)
    owners = X[:, lone].argmax(axis=0)
    wanted = [lone[owners == i] for i in range(len(X)) if (owners == i).sum() >= 2]
    (_, cross) = recorded(sp.csr_matrix(X), 1)[0]
    found = lone_columns([cross], DIRECTIONS["float32"])
    groups = {tuple(group.tolist()): values for group, values in zip(found.groups, found.values, strict=True)}
    hits = [columns for columns in wanted if tuple(columns.tolist()) in groups]
    assert len(wanted) > 300
    assert len(hits) >= 0.95 * len(wanted)
    for columns in hits:
        values, truth = groups[tuple(columns.tolist())], X[X[:, columns[0]].argmax(), columns]
        np.testing.assert_allclose(values / values[0], truth / truth[0], rtol=1e-4)


@pytest.mark.parametrize("rounds", [1, 3])
def test_columns_of_two_rows_or_more_form_no_groups(rounds: int) -> None:
    X = texts(2000, 6000, 2, 1)
    X *= np.random.default_rng(1).uniform(0.5, 1.5, X.shape).astype("float32")
    crosses = [cross for _, cross in recorded(sp.csr_matrix(X), rounds)]
    assert lone_columns(crosses, DIRECTIONS["float32"]).groups == ()


def test_columns_of_two_rows_form_a_group_only_where_they_are_proportional() -> None:
    X = texts(2000, 6000, 2, 1)  # two words, each once in the same two documents
    groups = lone_columns([recorded(sp.csr_matrix(X), 1)[0][1]], DIRECTIONS["float32"]).groups
    assert len(groups) < 10
    assert all(np.linalg.svd(X[:, group], compute_uv=False)[1] < 1e-6 for group in groups)


def test_rays_are_the_directions_of_weights() -> None:
    random = np.random.default_rng(0)
    W, X = random.random((5, 4)), np.kron(np.eye(5), [[1.0, 2.0, 3.0]])
    found = lone_columns([W.T @ X], DIRECTIONS["float64"])
    assert [group.tolist() for group in found.groups] == [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(5)]
    np.testing.assert_allclose(found.rays, W / np.linalg.norm(W, axis=1, keepdims=True))
    for values in found.values:
        np.testing.assert_allclose(values / values[0], [1.0, 2.0, 3.0])


def test_one_component_shows_no_directions() -> None:
    assert lone_columns([np.ones((1, 20))], DIRECTIONS["float64"]).groups == ()


def test_many_columns_take_little_time() -> None:
    random = np.random.default_rng(0)
    crosses = [random.random((K, 20000)) for _ in range(5)]
    crosses[0][:, :9000] = crosses[0][:, :1] * np.arange(1, 9001)
    for cross in crosses[1:]:
        cross[:, :9000] = cross[:, :1] * np.arange(1, 9001)
    begin = time.monotonic()
    assert [len(group) for group in lone_columns(crosses, DIRECTIONS["float32"]).groups] == [9000]
    assert time.monotonic() - begin < 10


def test_crosses_of_different_widths_are_refused() -> None:
    with pytest.raises(ShapeError, match="same number of columns"):
        lone_columns([np.ones((2, 3)), np.ones((2, 4))], 1e-6)
