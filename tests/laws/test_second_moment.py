"""Laws of one noisy second moment: what a row can change, exact sums, the noise drawn, and audits that find bugs."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.testing import assert_allclose, assert_array_equal

from partsong import methods
from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Layout, Message, Schedule, Shard
from partsong.data.conversion import as_matrix
from partsong.engines.local import Parallel, Sequential
from partsong.errors import BudgetSpent, CompositionError, DataError, ParameterError, PartyError, ShapeError
from partsong.methods.moment import CentredMoment, ExactMoment, MomentProgram, NoisyMoment
from partsong.methods.privacy_request import PartyPrivacy, RowPrivacy, build_secure_sum
from partsong.methods.registry import Problem
from partsong.privacy import second_moment
from partsong.privacy.accounting import Ledger, composed_epsilon
from partsong.privacy.auditing import audit
from partsong.privacy.discrete_noise import RoundedGaussian
from partsong.privacy.randomness import InsecureSource
from partsong.privacy.second_moment import (
    COUNT_SHARE,
    COUNT_UNIT,
    MeanOfDirections,
    MomentOfBuckets,
    MomentOfParty,
    MomentOfRows,
    Noise,
    diagonal_places,
    noise_edge,
    side_of,
    symmetric_matrix,
    triangle_of,
)

BOUND, MULTIPLIER, DELTA = 1.5, 2.0, 1e-5
RELATIONS = ("add-or-remove", "replace")
ROWS = [MomentOfRows(BOUND, Noise(MULTIPLIER, relation), is_signed=True) for relation in RELATIONS]
"""Moments of rows, for both relations; signed, which includes rows ≥ 0."""


def norm(triangle):
    """The norm that counts the diagonal once and √2 times what is above it."""
    return float(np.linalg.norm(symmetric_matrix(np.asarray(triangle, np.float64), 1.0)))


def rows(n, m, seed=0, density=1.0):
    draw = np.random.default_rng(seed)
    return draw.random((n, m)) * (draw.random((n, m)) < density)


# --- what one row can change -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ROWS, ids=RELATIONS)
def test_no_row_of_small_integers_changes_more_than_the_sensitivity(moment):
    """All rows with entries −3 … 3 in three columns, in pairs: as they are cut by the mechanism."""
    every = np.array(list(itertools.product(range(-3, 4), repeat=3)), np.float64)
    cut = [moment.of(row[None]) * moment.unit for row in every]
    if moment.noise.relation == "add-or-remove":
        assert max(map(norm, cut)) <= moment.sensitivity
        assert max(map(norm, cut)) > 0.999 * moment.sensitivity, "the bound is not loose"
    else:
        matrices = np.array([symmetric_matrix(one, 1.0).ravel() for one in cut])
        apart = np.linalg.norm(matrices[:, None] - matrices[None], axis=2)
        assert apart.max() <= moment.sensitivity
        assert apart.max() > 0.999 * moment.sensitivity, "orthogonal rows reach it"


@given(
    X=hnp.arrays(np.float64, (2, 4), elements=st.floats(-1e6, 1e6)),
    bound=st.floats(1e-3, 1e3),
    relation=st.sampled_from(RELATIONS),
)
def test_no_row_at_all_changes_more_than_the_sensitivity(X, bound, relation):
    moment = MomentOfRows(bound, Noise(1.0, relation), is_signed=True)
    first, second = (moment.of(row[None]) * moment.unit for row in X)
    assert norm(first) <= moment.sensitivity * (1 if relation == "add-or-remove" else 1 / math.sqrt(2)) * (1 + 1e-15)
    assert norm(first - second) <= moment.sensitivity * (1 + 1e-15) or relation == "add-or-remove"


@given(X=hnp.arrays(np.float64, (2, 4), elements=st.floats(0, 1e6)), relation=st.sampled_from(RELATIONS))
def test_no_row_changes_the_mean_of_directions_more_than_its_sensitivity(X, relation):
    mean = MeanOfDirections(Noise(1.0, relation))
    first, second = (mean.sums(mean.quantize(row[None])) * np.append(np.full(4, mean.unit), COUNT_UNIT) for row in X)
    first[-1], second[-1] = first[-1] * COUNT_SHARE, second[-1] * COUNT_SHARE
    change = first if relation == "add-or-remove" else (first - second)[:-1]
    assert np.linalg.norm(change) <= mean.sensitivity * (1 + 1e-15)


@given(X=hnp.arrays(np.float64, (5, 4), elements=st.floats(0, 1e6)), clip=st.floats(1e-3, 1e3))
def test_no_party_changes_more_than_its_clip(X, clip):
    moment = MomentOfParty(clip, Noise(1.0, "zero-out", protects="party"))
    assert norm(moment.of(X) * moment.unit) <= clip
    assert replace(moment, noise=replace(moment.noise, relation="replace")).sensitivity == 2 * clip


def test_a_party_at_its_clip_is_not_above_it():
    """By exact arithmetic: sums of floats may be a little smaller than what they are sums of."""
    moment = MomentOfParty(1.0, Noise(1.0, "zero-out", protects="party"))
    for seed in range(20):
        triangle = moment.of(rows(300, 40, seed) * 10.0**seed)
        at = set(diagonal_places(40).tolist())
        squares = sum(int(one) ** 2 * (1 if i in at else 2) for i, one in enumerate(triangle))
        assert squares <= Fraction(moment.clip / moment.unit) ** 2
        assert squares > 0.999 * float(moment.clip / moment.unit) ** 2


@pytest.mark.parametrize("size", [2.7e-162, 1e-160, 1e-151, 1e-149, 5e-324, 1e160])
def test_rows_of_extreme_length_have_a_direction_or_none(size):
    """Where squares underflow or overflow; without hundreds of millions of attempts to shorten the row."""
    mean = MeanOfDirections(Noise(1.0))
    found = mean.quantize(np.array([[size, size, 0.0]])) * mean.unit
    assert np.linalg.norm(found) <= 1
    assert found.any() == (1e-150 < size < 1e150)


# --- buckets ---------------------------------------------------------------------------------------------------------

BUCKETS = [MomentOfBuckets(BOUND, 3, Noise(MULTIPLIER, relation)) for relation in RELATIONS]


def bucketed(moment, X):
    """The sums (l × m) without noise, as they are released."""
    m = X.shape[1]
    return (moment.of(X) * moment.unit(m)).reshape(moment.buckets, m)


@pytest.mark.parametrize("moment", BUCKETS, ids=RELATIONS)
def test_no_row_of_small_integers_changes_buckets_more_than_the_sensitivity(moment):
    """All rows with entries 0 … 2 in five columns, in pairs; three buckets, of which one has a single column."""
    m, most = 5, moment.sigma(5) / MULTIPLIER
    assert most == pytest.approx(moment.bucket_bound(m) * BOUND * (math.sqrt(2) if moment is BUCKETS[1] else 1))
    every = np.array(list(itertools.product(range(3), repeat=m)), np.float64)
    cut = np.array([bucketed(moment, row[None]).ravel() for row in every])
    if moment.noise.relation == "add-or-remove":
        sizes = np.linalg.norm(cut, axis=1)
    else:
        sizes = np.linalg.norm(cut[:, None] - cut[None], axis=2).ravel()
    assert sizes.max() <= most
    assert sizes.max() > 0.999 * most, "the bound is not loose"


@given(
    X=hnp.arrays(np.float64, (2, 7), elements=st.floats(0, 1e6)),
    bound=st.floats(1e-3, 1e3),
    buckets=st.integers(1, 7),
    relation=st.sampled_from(RELATIONS),
)
def test_no_row_at_all_changes_buckets_more_than_the_sensitivity(X, bound, buckets, relation):
    moment = MomentOfBuckets(bound, buckets, Noise(1.0, relation))
    first, second = (bucketed(moment, row[None]) for row in X)
    most = moment.bucket_bound(7) * bound
    assert max(np.linalg.norm(first), np.linalg.norm(second)) <= most * (1 + 1e-15)
    assert np.linalg.norm(first - second) <= math.sqrt(2) * most * (1 + 1e-15)
    assert moment.sigma(7) >= (most if relation == "add-or-remove" else math.sqrt(2) * most)


@given(
    X=hnp.arrays(np.float64, (1, 11), elements=st.floats(0, 1e3)).filter(lambda X: np.linalg.norm(X) > 1e-3),
    buckets=st.integers(1, 11),
)
def test_every_row_of_the_bound_has_buckets_of_norm_kappa(X, buckets):
    """‖Bᵀx‖ ≥ ‖x‖ / √(largest bucket) for x ≥ 0, so that every row at the bound counts for κ, and no row for more."""
    moment = MomentOfBuckets(float(np.linalg.norm(X)) / 2, buckets, Noise(1.0))
    B = moment.assignment(11)
    x = X[0] / 2
    assert np.linalg.norm(x @ B) >= moment.bucket_bound(11) * (1 - 1e-12)
    assert np.linalg.norm(bucketed(moment, X)) == pytest.approx(moment.bucket_bound(11) * moment.bound, rel=1e-4)


def test_short_rows_are_not_cut_in_buckets():
    moment, x = BUCKETS[0], np.array([[0.1, 0.0, 0.2, 0.0, 0.0]])
    y = x @ moment.assignment(5)
    assert np.linalg.norm(y) < moment.bucket_bound(5)
    assert_allclose(bucketed(moment, x), y.T @ x, atol=1e-5)


def test_buckets_hold_the_moment_of_weighted_rows():
    """Σ y xᵀ = Bᵀ M for M = Σ w x xᵀ, w = κ/‖Bᵀx‖, and so Z B is symmetric."""
    moment, X = MomentOfBuckets(0.1, 4, Noise(1.0)), rows(50, 9)
    B, x = moment.assignment(9).toarray(), 0.1 * X / np.linalg.norm(X, axis=1, keepdims=True)
    weights = moment.bucket_bound(9) / np.linalg.norm(x @ B, axis=1)
    assert (weights <= 1).all()
    wanted = B.T @ (x.T * weights) @ x
    found = bucketed(moment, X)
    assert_allclose(found, wanted, rtol=1e-4)
    assert_allclose(found @ B, (found @ B).T, rtol=1e-4)


@pytest.mark.parametrize(("m", "buckets"), [(5, 3), (10, 10), (100, 7), (3, 1)])
def test_columns_are_in_buckets_of_nearly_equal_size(m, buckets):
    B = MomentOfBuckets(1.0, buckets, Noise(1.0)).assignment(m).toarray()
    assert_allclose(B.T @ B, np.eye(buckets), atol=1e-12)
    assert set((B > 0).sum(axis=0)) <= {m // buckets, -(-m // buckets)}
    assert ((B > 0).sum(axis=1) == 1).all()
    assert_array_equal(B, MomentOfBuckets(9.0, buckets, Noise(2.0)).assignment(m).toarray())


@pytest.mark.parametrize("form", [np.asarray, sp.csr_array, sp.csc_array])
def test_sums_of_buckets_are_exact_in_any_order_split_and_form(form, monkeypatch):
    moment, X = BUCKETS[0], rows(500, 7, density=0.5)
    whole = moment.of(form(X))
    one_by_one = [moment.of(row[None]).astype(object) for row in X]
    assert_array_equal(whole, sum(one_by_one).astype(np.int64))
    order = np.random.default_rng(1).permutation(500)
    assert_array_equal(whole, moment.of(form(X[order])))
    assert_array_equal(whole, moment.of(form(X[:123])) + moment.of(form(X[123:])))
    monkeypatch.setattr(second_moment, "BLOCK", 64)
    assert_array_equal(whole, moment.of(form(X)))


@pytest.mark.parametrize("shares", [1, 3])
@pytest.mark.parametrize("relation", RELATIONS)
def test_noise_of_buckets_is_the_same_in_every_entry(relation, shares):
    moment, m = MomentOfBuckets(BOUND, 100, Noise(MULTIPLIER, relation, shares)), 300
    nothing = np.zeros(100 * m, np.int64)
    drawn = sum(moment.add_noise(nothing, InsecureSource(3, relation, one)) for one in range(shares)) * moment.unit(m)
    assert np.std(drawn) / moment.sigma(m) == pytest.approx(1, abs=0.02)
    expected = MULTIPLIER * BOUND**2 / math.sqrt(3) * (math.sqrt(2) if relation == "replace" else 1)
    assert moment.sigma(m) == pytest.approx(expected)


def test_more_rows_than_sums_can_hold_are_refused(monkeypatch):
    """By their number alone, before anything is computed, in every kind of moment."""
    monkeypatch.setattr(second_moment, "MAX_ROWS", 10)
    few, many = rows(10, 4), rows(11, 4)
    mean = MeanOfDirections(Noise(1.0))
    for of in (ROWS[0].of, BUCKETS[0].of, lambda X: mean.sums(mean.quantize(X))):
        assert of(few).size
        with pytest.raises(ParameterError, match="at most 10 rows"):
            of(many)


# --- whole numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [np.asarray, sp.csr_array, sp.csc_array])
def test_sums_are_exact_in_any_order_split_and_form(form, monkeypatch):
    moment, X = ROWS[0], rows(500, 7, density=0.5)
    expected = [
        [sum(Fraction(int(a)) * int(b) for a, b in zip(x, y, strict=True)) for y in moment.quantize(X).T]
        for x in moment.quantize(X).T
    ]
    whole = moment.of(form(X))
    assert_array_equal(whole, triangle_of(np.array(expected, dtype=object).astype(np.int64)))
    order = np.random.default_rng(1).permutation(500)
    assert_array_equal(whole, moment.of(form(X[order])))
    assert_array_equal(whole, moment.of(form(X[:123])) + moment.of(form(X[123:])))
    monkeypatch.setattr(second_moment, "BLOCK", 64)
    assert_array_equal(whole, moment.of(form(X)))


@given(size=st.integers(1, 40))
def test_a_triangle_is_the_matrix(size):
    matrix = np.random.default_rng(size).integers(-99, 99, (size, size))
    matrix = matrix + matrix.T
    triangle = triangle_of(matrix)
    assert side_of(triangle.size) == size
    assert_array_equal(symmetric_matrix(triangle, 1.0), matrix)
    assert_array_equal(triangle[diagonal_places(size)], np.diagonal(matrix))


def test_rows_are_cut_to_the_bound_and_no_further():
    moment = ROWS[0]
    short, long = np.array([[0.3, 0.4, 0.0]]), np.array([[30.0, 40.0, 0.0]])
    assert_allclose(moment.quantize(short) * moment.row_unit, short, atol=moment.row_unit)
    assert_allclose(moment.quantize(long) * moment.row_unit, BOUND * long / 50, atol=moment.row_unit)


# --- noise -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [1, 3])
@pytest.mark.parametrize("relation", RELATIONS)
def test_noise_has_the_variances_of_the_formula(relation, shares):
    """σ² on the diagonal and σ²/2 above it, in the sum over the shares."""
    m, noise = 300, Noise(MULTIPLIER, relation, shares)
    moment = MomentOfRows(BOUND, noise)
    nothing = np.zeros(m * (m + 1) // 2, np.int64)
    drawn = sum(moment.add_noise(nothing, InsecureSource(3, relation, one)) for one in range(shares)) * moment.unit
    on, at = moment.sigma, diagonal_places(m)
    above = np.delete(drawn, at)
    assert np.var(drawn[at]) / on**2 == pytest.approx(1, abs=0.35)
    assert np.var(above) / (on**2 / 2) == pytest.approx(1, abs=0.03)
    assert on == pytest.approx(MULTIPLIER * BOUND**2 * (math.sqrt(2) if relation == "replace" else 1))
    assert abs(np.corrcoef(above[:-1], above[1:])[0, 1]) < 0.02


def test_the_largest_eigenvalue_of_noise_is_at_the_edge():
    m = 400
    moment = MomentOfRows(1.0, Noise(5.0))
    drawn = moment.add_noise(np.zeros(m * (m + 1) // 2, np.int64), InsecureSource(4))
    largest = float(np.linalg.eigvalsh(symmetric_matrix(drawn, moment.unit)).max())
    assert largest / noise_edge(moment.sigma, m) == pytest.approx(1, abs=0.03)


def test_noise_is_drawn_from_the_sampler_with_a_proof(monkeypatch):
    """Every number of noise comes from `RoundedGaussian`, on the grid of the sums, and none is drawn twice."""
    seen = []

    def draw(self, count, source):
        seen.append((self.sigma, self.grid, count))
        return np.zeros(count, np.int64)

    monkeypatch.setattr(RoundedGaussian, "draw", draw)
    moment = ROWS[0]
    moment.add_noise(np.zeros(10, np.int64), InsecureSource(1))
    assert [one[1] for one in seen] == [moment.unit] * 2
    assert seen[0][0] == pytest.approx(moment.sigma / math.sqrt(2))
    assert seen[1][0] == pytest.approx(moment.sigma)
    assert (seen[0][2], seen[1][2]) == (10, 4)


# --- programs --------------------------------------------------------------------------------------------------------


def insecure(party, release):
    return InsecureSource(7, party, release)


PLAIN = methods.method("moment").build(Problem(3))
MECHANISMS = ("moment", "centred", "hybrid")


def request(mechanism, epsilon=30.0, **settings):
    return RowPrivacy(epsilon, 1.0, mechanism=mechanism, **settings)


def program(mechanism, parties=4, is_masked=False, **settings):
    return replace(request(mechanism, **settings).program(PLAIN, 10, parties, is_masked), source=insecure)


def shards(parties=4, m=9):
    H = rows(3, m, seed=9, density=0.5)
    return [Shard(f"p{p}", as_matrix(rows(60 + 10 * p, 3, seed=p) @ H + 1e-3), p) for p in range(parties)]


def run(made, held, reduction=None, engine=None):
    schedule = Schedule(made.exchanges(10, len(held)), seed=5)
    reduction = PlainReduction() if reduction is None else reduction
    return list((engine or Sequential(record=True)).run(made, held, schedule, reduction=reduction))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_the_cost_of_a_run_is_the_budget(mechanism):
    """ε by the accountant, over the releases of all exchanges, is the one that was asked for."""
    for epsilon in (0.3, 1.0, 10.0):
        releases = request(mechanism, epsilon).program(PLAIN, 10, 4, False).releases
        costs = tuple((one.kind, one.noise_multiplier, 1) for one in releases)
        assert composed_epsilon(costs, DELTA) == pytest.approx(epsilon, rel=1e-6)
        assert composed_epsilon(costs, DELTA) <= epsilon
        assert Ledger(tuple((one, 1) for one in releases)).epsilon(DELTA) <= epsilon


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_shares_add_up_under_masks_and_engines_agree(mechanism):
    made, held = program(mechanism, is_masked=True), shards()
    masks = build_secure_sum(request(mechanism), 4)
    first, second = (run(made, held, masks, engine)[-1] for engine in (Sequential(), Parallel(2)))
    assert_array_equal(made.components(first.checkpoint.server), made.components(second.checkpoint.server), strict=True)
    with pytest.raises(CompositionError, match="1/2 of the noise"):
        run(made, held)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_only_what_is_declared_is_sent_once(mechanism):
    """One exchange of m (m + 1) / 2 whole numbers, and what the mechanism adds to it; then the party refuses."""
    made, held = program(mechanism), shards()
    m = held[0].matrix.shape[1]
    sizes = {"moment": {"moment": m * (m + 1) // 2}, "centred": {"mean": m + 1}, "hybrid": {"moment": m * (m + 1) // 2}}
    done = run(made, held)
    sent = done[0].traffic[0][2]
    assert {name: one.size for name, one in sent.arrays.items()} == sizes[mechanism]
    assert all(one.dtype == np.int64 for one in sent.arrays.values())
    assert sent.weight == 1.0
    assert len(done) == {"moment": 1, "centred": 2, "hybrid": 4}[mechanism]
    point = done[-1].checkpoint
    with pytest.raises(BudgetSpent, match="the most that its privacy budget allows"):
        made.local(held[0], point.parties["p0"], done[0].model)


def test_the_number_of_rows_is_not_sent():
    made = program("moment")
    few, many = (Shard("p0", as_matrix(np.zeros((n, 5)))) for n in (3, 30))
    state, model = made.start_party(few, Layout(("p0", "p1"), 5, 1)), made.start_server(Layout(("p0",), 5, 1))[1]
    one, other = (made.local(held, state, model)[1] for held in (few, many))
    assert_array_equal(one["moment"], other["moment"])
    assert one.weight == other.weight


def test_any_rank_follows_from_the_release():
    made, held = program("moment", epsilon=1e4), shards()
    server = run(made, held)[-1].checkpoint.server
    for rank in (1, 2, 3, 5):
        H = made.components_at(server, rank)
        assert H.shape == (rank, 9)
        assert (H >= 0).all()
        assert_allclose(np.linalg.norm(H, axis=1), 1)
    assert_allclose(made.components_at(server, 3), made.components(server))


def test_without_noise_the_moment_finds_the_pooled_components():
    held = shards()
    made = PLAIN
    done = run(made, held)
    H = made.components(done[-1].checkpoint.server)
    X = np.vstack([one.matrix.times(np.eye(9)) for one in held])
    W = made.solver.solve_rows(as_matrix(X), np.ascontiguousarray(H.T))
    assert np.linalg.norm(X - W @ H) / np.linalg.norm(X) < 0.05
    assert isinstance(made.statistic, ExactMoment)
    assert made.traits.release is None


def test_a_crafted_centre_is_refused_without_a_look_at_the_rows():
    made, held = program("centred"), shards()[0]
    state = replace(made.start_party(held, Layout(("p0", "p1"), 9, 1)), releases=1)
    for centre, error in ((np.ones(3), ShapeError), (np.full(9, np.nan), PartyError), (np.full(9, 7.0), PartyError)):
        model = Message({"centre": centre, "count": np.ones(1), "stage": np.array([1], np.int16)})
        with pytest.raises(error, match="nothing was computed"):
            made.local(held, state, model)


@pytest.mark.parametrize("mechanism", ["centred", "hybrid"])
def test_a_release_whose_cost_differs_is_not_repeated(mechanism):
    """After an interrupted first exchange: a second mean or moment would cost more than the budget."""
    made, held = program(mechanism), shards()[0]
    model = made.start_server(Layout(("p0",), 9, 1))[1]
    state = replace(made.start_party(held, Layout(("p0", "p1"), 9, 1)), releases=1)
    with pytest.raises(BudgetSpent, match="exchange 1 already"):
        made.local(held, state, model)


@pytest.mark.parametrize("stage", [None, np.array([-1], np.int16), np.array([0.5]), np.array([0, 0], np.int16)])
def test_a_model_of_no_exchange_is_refused_without_a_look_at_the_rows(stage):
    made, held = program("centred"), shards()[0]
    state = made.start_party(held, Layout(("p0", "p1"), 9, 1))
    with pytest.raises(PartyError, match="which exchange"):
        made.local(held, state, Message({} if stage is None else {"stage": stage}))


def test_laplace_noise_for_the_moment_of_a_party_is_refused():
    with pytest.raises(CompositionError, match="Gaussian noise only"):
        PartyPrivacy(1.0, kind="laplace").program(PLAIN, 10, 3, False)


def test_a_secure_sum_that_could_overflow_is_refused_before_anything_is_sent():
    made = replace(program("moment", is_masked=True), sum_bound=2.0**37)
    with pytest.raises((DataError, ParameterError), match=r"bound of the secure sum|cannot overflow"):
        made.start_party(shards()[0], Layout(("p0", "p1"), 9, 1))


@pytest.mark.parametrize("relation", ["zero-out", "replace"])
def test_parties_are_protected_by_the_same_release(relation):
    asked = PartyPrivacy(5.0, clip=1.0, relation=relation)
    made = asked.program(PLAIN, 10, 3, False)
    assert isinstance(made.statistic.moment, MomentOfParty)
    (release,) = made.releases
    assert (release.unit, release.relation) == ("party", relation)
    assert Ledger(((release, 1),)).epsilon(DELTA) == pytest.approx(5.0, rel=1e-6)


@pytest.mark.parametrize("relation", ["zero-out", "replace"])
def test_parties_add_shares_of_the_noise_under_masks(relation):
    """Of C or 2 C in the sum of the honest half; without masks each adds all of it."""
    asked, held = PartyPrivacy(30.0, clip=1.0, relation=relation), shards()
    masked, alone = (replace(asked.program(PLAIN, 10, 4, is_masked), source=insecure) for is_masked in (True, False))
    assert (masked.traits.min_in_sum, alone.traits.min_in_sum) == (2, 1)
    assert masked.releases == alone.releases
    nothing = np.zeros(45, np.int64)
    drawn = [one.statistic.moment.add_noise(nothing, InsecureSource(5, relation)) for one in (masked, alone)]
    assert_allclose(np.var(drawn[1]) / np.var(drawn[0]), 2, rtol=0.8)
    first = run(masked, held, build_secure_sum(asked, 4, in_shares=True))[-1]
    assert masked.statistic.moment.sigma == alone.statistic.moment.sigma
    assert masked.report(first.checkpoint.server)["visible_directions"] >= 0
    with pytest.raises(CompositionError, match="1/2 of the noise"):
        run(masked, held)


# --- audits: each planted bug of the mechanism is found --------------------------------------------------------------

RUNS = 400
NOTHING, ONE_MORE = np.zeros((2, 3)), np.vstack([np.zeros((2, 3)), [[0.0, 2.0, 0.0]]])
MIXED = np.vstack([np.zeros((2, 3)), [[1.0, 1.0, 1.0]]])


def seen(moment, X, label):
    """What leaves in a run, in the coordinates of the norm: the diagonal once, and √2 times what is above it."""
    weight = np.full(6, math.sqrt(2))
    weight[diagonal_places(3)] = 1.0

    def transcript(number):
        return weight * moment.add_noise(moment.of(X), InsecureSource(13, label, number)) * moment.unit

    return transcript


def is_refuted(moment, second, first=NOTHING):
    finding = audit(seen(moment, first, "a"), seen(moment, second, "b"), runs=RUNS, delta=DELTA)
    mu = 1 / moment.noise.multiplier
    return finding.refutes_gaussian(mu) or finding.refutes(Ledger().after(moment.noise.release).epsilon(DELTA))


LOUD = MomentOfRows(1.0, Noise(0.7))


@pytest.mark.parametrize("second", [ONE_MORE, MIXED], ids=["on the diagonal", "everywhere"])
def test_the_mechanism_keeps_its_promise(second):
    assert not is_refuted(LOUD, second)


def test_too_little_noise_on_the_diagonal_is_found(monkeypatch):
    """σ/√2 on the diagonal as well."""
    monkeypatch.setattr(second_moment, "_noisy_triangle", lambda moment, triangle, source: triangle + moment.noise.draw(
        triangle.size, moment.sigma / math.sqrt(2), moment.unit, source
    ))  # fmt: skip
    assert is_refuted(replace(LOUD, noise=Noise(0.4)), ONE_MORE)


def test_a_missing_clip_is_found(monkeypatch):
    moment = LOUD
    monkeypatch.setattr(MomentOfRows, "quantize", lambda self, X: np.rint(np.asarray(X) / self.row_unit))
    assert is_refuted(moment, ONE_MORE)


@pytest.mark.parametrize("is_cut", [True, False])
def test_buckets_that_are_not_cut_are_found(monkeypatch, is_cut):
    """κ is what bounds a row: without it, a row of all columns of one bucket has a larger sum."""
    m, moment = 6, MomentOfBuckets(1.0, 2, Noise(0.7))
    row = (moment.assignment(m).toarray()[:, 0] > 0).astype(np.float64)[None]

    def sums(X):
        with monkeypatch.context() as patch:
            if not is_cut:
                patch.setattr(MomentOfBuckets, "bucket_bound", lambda self, columns: self.bound)
            assert moment.bucket_unit(m) == moment.row_unit
            return moment.of(X)

    def seen(X, label):
        clean = sums(X)

        def transcript(number):
            return moment.add_noise(clean, InsecureSource(19, label, number)) * moment.unit(m)

        return transcript

    empty = np.zeros((2, m))
    finding = audit(seen(empty, "a"), seen(np.vstack([empty, row]), "b"), runs=RUNS, delta=DELTA)
    assert finding.refutes_gaussian(1 / moment.noise.multiplier) == (not is_cut)


def test_half_the_noise_is_found():
    quiet = MomentOfRows(1.0, Noise(LOUD.noise.multiplier / 2))
    finding = audit(seen(quiet, NOTHING, "a"), seen(quiet, ONE_MORE, "b"), runs=RUNS, delta=DELTA)
    assert finding.refutes_gaussian(1 / LOUD.noise.multiplier)


def test_a_square_with_independent_noise_is_found():
    """The whole square, with noise of its own below the diagonal, costs more: the two halves average out noise."""
    moment, m, runs = LOUD, 8, 1500
    nothing, one_more = np.zeros((2, m)), np.vstack([np.zeros((2, m)), np.ones((1, m))])

    def square(X, label):
        clean, at = moment.of(X), diagonal_places(m)

        def transcript(number):
            above, below = (moment.add_noise(clean, InsecureSource(17, label, number, copy)) for copy in (0, 1))
            seen = math.sqrt(2) * (above + below) / 2
            seen[at] = above[at]
            return seen * moment.unit

        return transcript

    finding = audit(square(nothing, "a"), square(one_more, "b"), runs=runs, delta=DELTA)
    assert finding.refutes_gaussian(1 / moment.noise.multiplier)


def test_parts_of_a_program_are_values():
    """Programs of equal parts are equal, and print their parts."""
    assert program("centred") == program("centred") != program("moment")
    assert isinstance(program("centred").statistic, CentredMoment)
    assert isinstance(program("hybrid").statistic, NoisyMoment)
    assert "CentredMoment" in repr(program("centred"))
    assert isinstance(program("hybrid"), MomentProgram)
