"""Laws of attacks on sums: when rows follow from moments, and sparse rows from few sums, and when they do not."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from scipy.optimize import linear_sum_assignment

from partsong import FederatedNMF
from partsong.aggregation.plaintext import PlainReduction
from partsong.attacks import moment as attack
from partsong.attacks.runner import RecordedRun, findings
from partsong.attacks.sparse_rows import DIRECTIONS, FoundRows, lone_columns, rows_by_dictionary
from partsong.core.interfaces import Layout, Schedule, Shard
from partsong.core.streams import key
from partsong.data.conversion import as_matrix
from partsong.engines.local import Sequential
from partsong.errors import ParameterError, ShapeError
from partsong.methods import build
from partsong.methods.exact import SharedSums
from partsong.methods.privacy_request import RowPrivacy
from partsong.privacy.exposure import Exposure
from partsong.secure_aggregation.protocol import SecureSum


def sparse(n, m, density, seed=0):
    rng = np.random.default_rng(seed)
    return rng.gamma(1.0, size=(n, m)) * (rng.random((n, m)) < density)


def recorded(parts, rank, rounds, *, seed=3, dtype=np.float64):
    """(gram, cross) of every round, by party, as the program sends them."""
    names = [f"p{i:02d}" for i in range(len(parts))]
    shards = [Shard(name, as_matrix(part.astype(dtype)), key(7, name)) for name, part in zip(names, parts, strict=True)]
    program = build("exact", rank, local_steps=3)
    sent = {name: [] for name in names}
    for done in Sequential(record=True).run(program, shards, Schedule(rounds, seed), reduction=PlainReduction()):
        for name, _, upload in done.traffic:
            sent[name].append((np.asarray(upload["gram"]), np.asarray(upload["cross"])))
    return [sent[name] for name in names]


def summed(parties):
    return [
        tuple(np.sum(arrays, axis=0) for arrays in zip(*pairs, strict=True)) for pairs in zip(*parties, strict=True)
    ]


def moment_of(pairs, n, unit, **more):
    span = attack.row_span([cross for _, cross in pairs], n, unit)
    return None if span is None else attack.second_moment(pairs, span, unit, **more)


def error_of(moment, X):
    return np.linalg.norm(moment.second_moment() - X.T @ X) / np.linalg.norm(X.T @ X)


def right(rows, X):
    """Mark rows that are rows of X to 1 %."""
    apart = np.linalg.norm(rows[:, None] - X[None], axis=2) / np.linalg.norm(X, axis=1)
    found, true = linear_sum_assignment(apart)
    return apart[found, true] <= 0.01


def ratio(pairs, n):
    return sum(len(gram) * (len(gram) + 1) for gram, _ in pairs) / (n * (n + 1))


DOUBLE, SINGLE = attack.unit_of("float64"), attack.unit_of("float32")


# ---- XᵀX --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("density", [0.1, 0.3])
@pytest.mark.parametrize(("n", "below", "above"), [(20, 3, 4), (40, 12, 16)])
def test_the_second_moment_follows_exactly_from_enough_equations(n, below, above, density):
    X = sparse(n, 300, density)
    few = recorded([X, sparse(n, 300, density, 1)], 10, below)[0]
    moment = moment_of(few, n, DOUBLE)
    assert ratio(few, n) < 0.85
    assert not moment.is_recovered
    assert moment.doubt > 1e-3
    assert error_of(moment, X) > 0.1
    for rounds in (above, 2 * above):
        enough = recorded([X, sparse(n, 300, density, 1)], 10, rounds)[0]
        moment = moment_of(enough, n, DOUBLE)
        assert ratio(enough, n) > 1.04
        assert moment.is_recovered
        assert error_of(moment, X) < 1e-8


def test_a_moment_at_the_least_number_of_equations_is_recognised():
    X = sparse(40, 300, 0.1)
    pairs = recorded([X, sparse(40, 300, 0.1, 1)], 11, 13)[0]
    moment = moment_of(pairs, 40, DOUBLE)
    assert 1.04 < ratio(pairs, 40) < 1.05
    assert moment.is_recovered
    assert error_of(moment, X) < 1e-8


def test_two_runs_of_different_rank_add_up():
    X = sparse(30, 200, 0.2)
    others = sparse(30, 200, 0.2, 1)
    one, two = recorded([X, others], 8, 8, seed=1)[0], recorded([X, others], 9, 8, seed=2)[0]
    for alone in (one, two):
        assert not moment_of(alone, 30, DOUBLE).is_recovered
    both = moment_of([*one, *two], 30, DOUBLE)
    assert both.is_recovered
    assert error_of(both, X) < 1e-8


def test_one_round_is_enough_for_fewer_rows_than_components():
    X = sparse(6, 50, 0.5)
    pairs = recorded([X, sparse(20, 50, 0.5, 1)], 10, 1)[0]
    moment = moment_of(pairs, 6, DOUBLE)
    assert moment.is_recovered
    assert error_of(moment, X) < 1e-8


@pytest.mark.parametrize("bits", [25, 30])
def test_sums_under_masks_give_the_rows_of_all_parties_together(bits):
    parts = [sparse(10, 200, 0.2, seed) for seed in range(3)]
    X = np.vstack(parts)
    sums = summed(recorded(parts, 15, 8))
    sizes = [np.sqrt(np.mean(np.square(array))) for pair in sums for array in pair]
    step = 2.0**-bits * max(sizes)  # masks hide whole multiples of a step
    rounded = [tuple(step * np.round(array / step) for array in pair) for pair in sums]
    moment = moment_of(rounded, 30, attack.unit_of("float64", step / min(sizes)))
    assert moment.is_recovered
    assert error_of(moment, X) < 1e-3
    assert right(attack.rows_by_rotation(moment, rounded).rows, X).sum() >= 28


def test_the_number_of_rows_is_seen_in_the_crosses():
    for dtype, unit in ((np.float64, DOUBLE), (np.float32, SINGLE)):
        crosses = [
            cross for _, cross in recorded([sparse(20, 100, 0.3), sparse(20, 100, 0.3, 1)], 10, 4, dtype=dtype)[0]
        ]
        assert attack.row_span(crosses, None, unit).rank == 20
        assert attack.row_span(crosses[:1], None, unit) is None
        assert attack.row_span(crosses, 21, unit).rank == 20, "one row is zero, or a combination of others"
        assert attack.row_span(crosses, 19, unit) is None, "not of 19 rows"


def test_few_combinations_of_many_dense_rows_give_nothing():
    n, m = 100, 300
    X = np.random.default_rng(0).gamma(2.0, size=(n, m))
    pairs = recorded([X, X[::-1] + 1], 5, 2)[0]  # T·k = n/10
    assert moment_of(pairs, n, DOUBLE) is None
    taken = attack.row_span([cross for _, cross in pairs], 10, DOUBLE)
    assert not attack.second_moment(pairs, taken, DOUBLE).is_recovered


def test_more_rows_than_columns_have_no_span():
    crosses = [cross for _, cross in recorded([sparse(40, 30, 0.3), sparse(40, 30, 0.3, 1)], 10, 8)[0]]
    assert attack.row_span(crosses, 40, DOUBLE) is None


def test_conjugate_gradients_agree_with_the_dense_solution(monkeypatch):
    X = sparse(24, 120, 0.3)
    pairs = recorded([X, sparse(24, 120, 0.3, 1)], 12, 8)[0]
    dense = moment_of(pairs, 24, DOUBLE)
    monkeypatch.setattr(attack, "DENSE", 0)
    iterative = moment_of(pairs, 24, DOUBLE)
    assert iterative.is_recovered
    np.testing.assert_allclose(iterative.second_moment(), dense.second_moment(), atol=1e-8 * np.linalg.norm(X) ** 2)


# ---- rows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("density", [0.3, 0.5, 0.7])
def test_rows_with_zeros_are_found(density):
    X = sparse(20, 300, density)
    pairs = recorded([X, sparse(20, 300, density, 1)], 10, 6)[0]
    turned = attack.rows_by_rotation(moment_of(pairs, 20, DOUBLE), pairs)
    assert right(turned.rows, X).sum() >= 19
    assert turned.n_found >= 19
    assert right(turned.rows, X)[turned.is_found].all()


@pytest.mark.parametrize("density", [0.1, 0.45])
def test_float32_hides_no_rows(density):
    X = sparse(30, 300, density)
    pairs = recorded([X, sparse(30, 300, density, 1)], 15, 8, dtype=np.float32)[0]
    turned = attack.rows_by_rotation(moment_of(pairs, 30, SINGLE), pairs)
    assert right(turned.rows, X).sum() >= 28
    assert right(turned.rows, X)[turned.is_found].sum() >= 28


@pytest.mark.parametrize("m", [120, 300])
def test_rows_are_found_from_forty_rounds_of_a_solver_that_converges(m):
    parts = [sparse(40, m, 0.1, seed) for seed in range(5)]
    pairs = recorded(parts, 15, 40, dtype=np.float32)[0]
    turned = attack.rows_by_rotation(moment_of(pairs, 40, SINGLE), pairs)
    assert right(turned.rows, parts[0]).sum() >= 38
    assert turned.n_found >= 38


@pytest.mark.parametrize("size", [(30, 60), (30, 324)])
def test_rows_that_may_turn_do_not_count_as_found(size):
    rng = np.random.default_rng(1)
    X, others = rng.gamma(1.0, size=size), rng.gamma(1.0, size=size)
    pairs = recorded([X, others], 15, 8)[0]
    moment = moment_of(pairs, len(X), DOUBLE)
    assert moment.is_recovered
    turned = attack.rows_by_rotation(moment, pairs)
    assert right(turned.rows, X)[turned.is_found].all()
    assert turned.n_found <= len(X) / 10


def test_a_share_of_negative_numbers_is_not_found():
    turned = attack.RotatedRows(np.ones((2, 3)), 1e-3, np.array([True, True]), attack.NEGATIVE)
    assert turned.n_found == 0


# ---- limits -----------------------------------------------------------------------------------------------------


def test_a_deadline_ends_the_search():
    X = sparse(40, 120, 0.3)
    pairs = recorded([X, sparse(40, 120, 0.3, 1)], 15, 10)[0]
    assert moment_of(pairs, 40, DOUBLE, deadline=time.monotonic() - 1) is None
    moment = moment_of(pairs, 40, DOUBLE)
    assert attack.rows_by_rotation(moment, pairs, deadline=time.monotonic() - 1) is None


def test_units_are_those_of_the_number_type_or_the_masks():
    assert attack.unit_of("float32") == 2.0**-24
    assert attack.unit_of("float64") == 2.0**-53
    assert attack.unit_of("float64", 1e-7) == 1e-7
    with pytest.raises(ParameterError, match="float16"):
        attack.unit_of("float16")


# ---- XᵀX as it is sent ------------------------------------------------------------------------------------------


def found_in_moments(parts, program, reduction=None):
    """What the attacks find in a run of a moment, by party."""
    shards = [Shard(name, as_matrix(X), key(7, name)) for name, X in parts.items()]
    reduction = PlainReduction() if reduction is None else reduction
    schedule = Schedule(program.exchanges(1, len(parts)), 3)
    done = list(Sequential(record=True).run(program, shards, schedule, reduction=reduction))
    run = RecordedRun([one.traffic for one in done], program, Layout.of(shards, 3), reduction, truth=parts)
    return {one.party: one for one in findings(run)}


def recovered(found):
    return {one.attack: one for one in found.recovered}


@pytest.mark.parametrize("n", [10, 15])
def test_rows_follow_from_the_moment_by_their_signs(n):
    parts = {"few": sparse(n, 40, 0.4), "many": sparse(60, 40, 0.4, 1)}
    found = found_in_moments(parts, build("moment", 3))
    assert recovered(found["few"])["second moment"].error < 1e-12
    assert recovered(found["few"])["rows of XᵀX by their signs"].rows_recovered == n
    assert recovered(found["many"]).keys() == {"second moment"}
    assert found["many"].by_law is Exposure.ROWS


@pytest.mark.parametrize("n", [300, 3000])
def test_rows_with_a_column_of_their_own_follow_from_the_moment_whatever_their_number(n):
    X = sparse(n, 60, 6 / n)
    X[:5] = sparse(5, 60, 0.3, 2)
    X[:, :5] = 0.0
    X[np.arange(5), np.arange(5)] = 1.0
    found = found_in_moments({"many": X, "other": sparse(60, 60, 0.3, 1)}, build("moment", 3))
    lone = recovered(found["many"])["lone columns of XᵀX"]
    assert lone.rows_recovered == lone.shape[0] >= 5
    assert found["many"].by_law is Exposure.ROWS


def test_a_single_row_follows_from_the_moment():
    found = found_in_moments({"one": sparse(1, 40, 0.4), "many": sparse(60, 40, 0.4, 1)}, build("moment", 3))
    assert any(one.array == "X_p" and one.error < 1e-12 for one in found["one"].recovered)


def test_masks_show_the_moment_of_all_rows_together():
    parts = {name: sparse(5, 40, 0.4, seed) for seed, name in enumerate("abc")}
    *single, together = found_in_moments(parts, build("moment", 3), SecureSum(bound=1e4)).values()
    assert not any(one.recovered for one in single)
    assert together.is_sum
    assert recovered(together)["second moment"].error < 1e-6


@pytest.mark.parametrize("mechanism", ["moment", "centred", "hybrid"])
@pytest.mark.parametrize("epsilon", [1.0, 10.0])
def test_noise_of_rows_hides_the_moment(mechanism, epsilon):
    privacy = RowPrivacy(epsilon, row_bound=1.0, mechanism=mechanism)
    parts = {"one": sparse(1, 40, 0.4), "few": sparse(10, 40, 0.4, 1), "many": sparse(60, 40, 0.4, 2)}
    parts["many"][:, 0] = 0.0
    parts["many"][0, 0] = 1.0
    for found in found_in_moments(parts, privacy.program(build("moment", 3), 1, 3, False)).values():
        assert not found.recovered
        assert found.by_law is Exposure.BOUNDED
        assert any("noise for the privacy of each row" in note for note in found.notes)


K = 10


def recorded_sums(X: np.ndarray, rounds: int, *, rank: int = K, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
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
    found = rows_by_dictionary(recorded_sums(X, 3, seed=seed), 60)
    assert found is not None
    assert found.is_scaled
    assert found.held_out > 0.9
    assert found.misfit < 1e-3
    assert rows_to(0.01, found, X) >= 55


def test_weights_come_back_with_the_rows() -> None:
    X = with_support(60, 1500, 5, 0)
    pairs = recorded_sums(X, 3)
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
    assert rows_by_dictionary(recorded_sums(random.random((60, 1500)) + 0.01, rounds), 60) is None


def test_nothing_is_claimed_of_rows_of_low_rank() -> None:
    random = np.random.default_rng(0)
    parts = random.random((15, 1500)) * (random.random((15, 1500)) < 0.2)
    assert rows_by_dictionary(recorded_sums(random.random((60, 15)) @ parts, 3), 60) is None


def test_columns_that_repeat_do_not_confirm_themselves() -> None:
    random = np.random.default_rng(0)
    X = random.random((60, 200))[:, random.integers(0, 200, 1500)]
    assert rows_by_dictionary(recorded_sums(X, 3), 60) is None


def test_the_search_ends_at_its_deadline() -> None:
    X = np.random.default_rng(0).random((60, 4000))
    pairs, begin = recorded_sums(X, 3), time.monotonic()
    assert rows_by_dictionary(pairs, 60, deadline=begin + 0.5) is None
    assert time.monotonic() - begin < 3


def test_the_same_seed_finds_the_same_rows() -> None:
    pairs = recorded_sums(with_support(60, 800, 5, 0), 3)
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
    (_, cross) = recorded_sums(sp.csr_matrix(X), 1)[0]
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
    crosses = [cross for _, cross in recorded_sums(sp.csr_matrix(X), rounds)]
    assert lone_columns(crosses, DIRECTIONS["float32"]).groups == ()


def test_columns_of_two_rows_form_a_group_only_where_they_are_proportional() -> None:
    X = texts(2000, 6000, 2, 1)  # two words, each once in the same two documents
    groups = lone_columns([recorded_sums(sp.csr_matrix(X), 1)[0][1]], DIRECTIONS["float32"]).groups
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
