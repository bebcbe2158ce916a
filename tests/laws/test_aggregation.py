"""Laws of aggregation: barycenters of models, and what the server does with the aggregate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from partsong.aggregation.alignment import (
    UNMATCHED,
    Assignment,
    Matching,
    Nearest,
    PartialAssignment,
    PartialSinkhorn,
    Sinkhorn,
    SoftMax,
    orthogonality_gap,
)
from partsong.aggregation.barycenter import (
    FixedPoint,
    FromMean,
    FromMedoid,
    FromPrevious,
    FuzzyCMeans,
    Hierarchical,
    KMeans,
    Streaming,
    average,
    loss_of,
)
from partsong.aggregation.linear import Mean
from partsong.aggregation.plaintext import PlainReduction
from partsong.aggregation.server_update import Adagrad, Adam, Relaxation, Replace, Yogi
from partsong.core.interfaces import Message, Reducible, Schedule, Shard
from partsong.core.streams import key
from partsong.data.conversion import as_matrix
from partsong.engines.local import Parallel, Sequential
from partsong.errors import ParameterError
from partsong.methods.averaging import LocalAveraging
from partsong.sketch.crossing import Proportion
from partsong.solvers.squared_error import SquaredError
from partsong.solvers.update_rules import ProximalDescent

INIT_MODES = [FromMean(), FromMedoid(), FromPrevious()]
ALIGNED = [
    *(FixedPoint(start=start) for start in INIT_MODES),
    FixedPoint(PartialAssignment(), FromMedoid()),
    Streaming(),
    Streaming(orders=3),
    Hierarchical(),
]
ALL = [*ALIGNED, FixedPoint(Sinkhorn(), FromMedoid()), FixedPoint(PartialSinkhorn()), KMeans(), FuzzyCMeans()]


def parts(k=5, m=60, seed=0):
    return np.random.default_rng(seed).gamma(0.3, size=(k, m))


def copies(c, noise=0.0, seed=1, H=None):
    """Permuted copies of one matrix, with noise of their own."""
    rng, H = np.random.default_rng(seed), parts() if H is None else H
    orders = [rng.permutation(len(H)) for _ in range(c)]
    return [H[order] + noise * rng.random(H.shape) for order in orders], orders


def uploads_of(matrices, weights=None):
    sizes = [1.0] * len(matrices) if weights is None else weights
    return [Message({"H": H}, weight) for H, weight in zip(matrices, sizes, strict=True)]


def distance_up_to_order(A, B):
    return np.linalg.norm(A - Assignment().plan(A, B).apply(B))


@pytest.mark.parametrize("method", ALIGNED, ids=repr)
@pytest.mark.parametrize("c", [1, 2, 3, 8, 50])
def test_the_barycenter_of_permuted_copies_is_the_copy(method, c):
    matrices, _ = copies(c)
    found = method.solve(matrices, [1.0] * c)
    assert distance_up_to_order(found.H, parts()) < 1e-9
    assert found.losses[-1] < 1e-18
    for plan, H in zip(found.plans, matrices, strict=True):
        assert plan.is_permutation
        assert orthogonality_gap(plan) == 0
        assert_allclose(plan.apply(H), found.H, atol=1e-9)


@pytest.mark.parametrize("start", INIT_MODES, ids=repr)
@pytest.mark.parametrize("seed", range(5))
def test_the_loss_of_assignments_never_rises(start, seed):
    rng = np.random.default_rng(seed)
    matrices = [rng.gamma(0.5, size=(7, 30)) for _ in range(12)]
    losses = FixedPoint(start=start, tol=0, sweeps=15).solve(matrices, [1.0] * 12).losses
    assert 2 <= len(losses) <= 15
    assert (np.diff(losses) <= 1e-12).all()


@dataclass(frozen=True)
class Counted:
    """An alignment that keeps the plans it has made."""

    inner: Any
    made: list
    is_partial = False

    def plan(self, target, source):
        self.made.append(self.inner.plan(target, source))
        return self.made[-1]


@pytest.mark.parametrize("align", [Assignment(), PartialAssignment(), Nearest()], ids=repr)
def test_plans_that_do_not_change_end_it_without_another_mean(align):
    matrices = [np.random.default_rng(seed).gamma(0.5, size=(7, 30)) for seed in range(6)]
    found = FixedPoint(align, FromMedoid(), tol=0).solve(matrices, [1.0] * 6)
    counted = Counted(align, [])
    again = FixedPoint(counted, FromPrevious(), tol=0).solve(matrices, [1.0] * 6, found.H)
    assert_array_equal(again.H, found.H)
    assert again.losses == found.losses[-1:]
    assert len(counted.made) == 12, "once to find the plans and once to see that they stay"


@pytest.mark.parametrize("align", [Assignment(), PartialAssignment(), Nearest()], ids=repr)
def test_hard_plans_reach_their_fixed_point_whatever_the_tolerance(align):
    matrices = [np.random.default_rng(seed).gamma(0.5, size=(7, 30)) for seed in range(12)]
    exact, rough = (FixedPoint(align, FromMean(), tol=tol).solve(matrices, [1.0] * 12) for tol in (0, 1))
    assert len(exact.losses) > 1
    assert rough.losses == exact.losses


@pytest.mark.parametrize("align", [Sinkhorn(), PartialSinkhorn(), SoftMax(0.5)], ids=repr)
@pytest.mark.parametrize("noise", [0.01, 0.3])
def test_soft_plans_end_with_the_first_sweep_that_moves_little_of_the_way_and_less_than_the_spread(align, noise):
    matrices, _ = copies(12, noise)
    start, tol = parts() + 0.1 * parts(seed=4), 0.1
    reached = [start]
    for sweeps in range(1, 31):
        found = FixedPoint(align, tol=0, sweeps=sweeps).solve(matrices, [1.0] * 12, start)
        reached.append(found.H)
        move, way = np.linalg.norm(found.H - reached[-2]), np.linalg.norm(found.H - start)
        if move <= tol * way and move <= np.sqrt(2 * found.losses[-1]):
            break
    assert 1 < sweeps < 30
    found = FixedPoint(align, tol=tol).solve(matrices, [1.0] * 12, start)
    assert len(found.losses) == sweeps
    assert_array_equal(found.H, reached[-1])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("c", [2, 5, 12])
@pytest.mark.parametrize("seed", range(6))
def test_soft_plans_leave_the_mean_of_copies_in_other_orders(c, seed, dtype):
    """A saddle, where the first moves are small and grow: no worse than where thirty sweeps lead."""
    H = np.random.default_rng(seed).random((10, 200))
    matrices = [one.astype(dtype) for one in copies(c, seed=seed, H=H)[0]]
    usual, long = (FixedPoint(Sinkhorn(), FromMean(), tol=tol).solve(matrices, [1.0] * c) for tol in (0.1, 0))
    size = np.linalg.norm(H)
    assert distance_up_to_order(usual.H, H) <= 1.03 * distance_up_to_order(long.H, H) + 1e-4 * size
    assert len(usual.losses) > 2
    exact = FixedPoint(Sinkhorn(), FromMedoid()).solve(matrices, [1.0] * c)
    assert distance_up_to_order(exact.H, H) < 1e-5 * size
    assert len(exact.losses) <= 3


@pytest.mark.parametrize("seed", range(2))
def test_soft_plans_of_unlike_uploads_end_before_all_components_are_the_same(seed):
    def variety(H):
        return np.linalg.norm(H - H.mean(axis=0))

    rng = np.random.default_rng(seed)
    matrices = [rng.gamma(0.4, size=(30, 600)) for _ in range(20)]
    usual, long = (FixedPoint(Sinkhorn(), FromMedoid(), tol=tol).solve(matrices, [1.0] * 20) for tol in (0.1, 0))
    assert len(usual.losses) <= 3
    assert variety(usual.H) > 100 * variety(long.H)


@dataclass(frozen=True)
class Restless:
    """The best assignment, with the first two rows exchanged at every other sweep over `count` matrices."""

    count: int
    made: list
    is_partial = False

    def plan(self, target, source):
        partners = Assignment().plan(target, source).partners.copy()
        if len(self.made) // self.count % 2:
            partners[[0, 1]] = partners[[1, 0]]
        self.made.append(partners)
        return Matching(partners)


def test_plans_that_change_without_being_better_end_it():
    """Of two components that are equal, either may be either."""
    twins = np.vstack([parts(1), parts(1), parts(3, seed=2)])
    matrices, _ = copies(4, H=twins)
    found = FixedPoint(Restless(4, [])).solve(matrices, [1.0] * 4, twins)
    assert len(found.losses) == 1
    assert_allclose(found.H, twins, rtol=1e-12)
    assert found.losses[-1] == loss_of(found.H, matrices, found.plans, np.full(4, 0.25))


@pytest.mark.parametrize("align", [Assignment(), PartialAssignment(), Nearest(), Sinkhorn()], ids=repr)
@pytest.mark.parametrize(("dtype", "power"), [("f8", 480), ("f8", -480), ("f4", 60), ("f4", -60), ("f4", 90)])
def test_barycenters_do_not_depend_on_the_unit_of_measurement(align, dtype, power):
    matrices = [np.random.default_rng(seed).gamma(0.5, size=(7, 30)).astype(dtype) for seed in range(6)]
    found = FixedPoint(align, FromMedoid()).solve(matrices, [1.0] * 6)
    other = FixedPoint(align, FromMedoid()).solve([np.ldexp(H, power) for H in matrices], [1.0] * 6)
    assert len(other.losses) == len(found.losses)
    assert_array_equal(other.H, np.ldexp(found.H, power))


@pytest.mark.parametrize("method", ALIGNED, ids=repr)
@pytest.mark.parametrize("scale", [1e-200, 1e160, 1e300])
def test_permuted_copies_of_any_size_are_found_again(method, scale):
    matrices, _ = copies(4, H=scale * parts())
    found = method.solve(matrices, [1.0] * 4)
    assert np.isfinite(found.H).all()
    if not (isinstance(method, FixedPoint) and method.start == FromMean()):
        assert_allclose(Assignment().plan(matrices[0], found.H).apply(found.H), matrices[0], rtol=1e-12)


@pytest.mark.parametrize(("common", "own"), [(0, 1e-4), (1000, 1)])
def test_copies_whose_components_are_nearly_equal_take_no_longer_in_float32(common, own):
    rng = np.random.default_rng(0)
    H = np.vstack([common + rng.random(784) + own * rng.random((18, 784)), np.eye(2, 784)])
    matrices = [one.astype(np.float32) for one in copies(5, H=H)[0]]
    found = FixedPoint().solve(matrices, [1.0] * 5)
    assert len(found.losses) == 1
    assert distance_up_to_order(found.H.astype(float), H) < 1e-6 * np.linalg.norm(H)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_losses_are_those_of_the_definition(dtype):
    matrices = [H.astype(dtype) for H in copies(4, 0.2)[0]]
    for align in (Assignment(), PartialAssignment(level=1e-9), Sinkhorn()):
        found = FixedPoint(align, FromMedoid(), weighted=True).solve(matrices, [1.0, 2.0, 3.0, 4.0])
        shares, expected = np.array([0.1, 0.2, 0.3, 0.4]), 0.0
        for share, plan, H in zip(shares, found.plans, matrices, strict=True):
            gap = found.H.astype(np.float64) - plan.matrix @ H
            expected += 0.5 * share * np.square(gap[plan.weights > 0]).sum()
        assert found.losses[-1] == pytest.approx(expected, rel=1e-5 if dtype == np.float32 else 1e-12)
        assert loss_of(found.H, matrices, found.plans, shares) == pytest.approx(found.losses[-1], rel=1e-6)


@pytest.mark.parametrize("method", ALL, ids=repr)
def test_aggregations_of_uploads_are_of_their_shape_and_type(method):
    for dtype in (np.float32, np.float64):
        matrices = [H.astype(dtype) for H in copies(6, noise=0.05)[0]]
        total = method(uploads_of(matrices), Message({}))
        assert total["H"].shape == (5, 60)
        assert total["H"].dtype == dtype
        assert (total["H"] >= 0).all()
        assert not isinstance(method, Reducible), "it reads single uploads"


@pytest.mark.parametrize("method", [*ALIGNED, KMeans()], ids=repr)
def test_noisy_copies_are_found_again(method):
    noise = 0.01
    matrices, _ = copies(20, noise)
    found = method(uploads_of(matrices), Message({}))["H"]
    assert distance_up_to_order(found, parts() + noise / 2) < 0.2 * distance_up_to_order(matrices[0], parts())


def test_averaging_by_position_destroys_what_alignment_keeps():
    matrices, _ = copies(20, 0.01)
    by_position = np.mean(matrices, axis=0)
    aligned = FixedPoint().solve(matrices, [1.0] * 20).H
    assert distance_up_to_order(aligned, parts()) < 0.05 * distance_up_to_order(by_position, parts())


def test_weights_count_where_asked_for():
    H = parts()
    matrices = [H, 3 * H]
    plain = FixedPoint(start=FromMean()).solve(matrices, [9.0, 1.0])
    assert_allclose(plain.H, 2 * H)
    for method in (FixedPoint(start=FromMean(), weighted=True), Streaming(weighted=True), Hierarchical(weighted=True)):
        assert_allclose(method.solve(matrices, [9.0, 1.0]).H, 1.2 * H)


def test_the_warm_start_keeps_the_order_of_the_model():
    H = parts()
    matrices, _ = copies(9, 0.001)
    found = FixedPoint()(uploads_of(matrices), Message({"H": H[::-1].copy()}))["H"]
    assert np.linalg.norm(found - H[::-1]) < 0.01 * np.linalg.norm(H)


def test_rows_that_nobody_has_stay_and_others_are_divided_by_those_who_have_them():
    H, other = parts(), parts(seed=8)
    plans = [Matching(np.array([0, 1, UNMATCHED, 3, UNMATCHED])), Matching(np.array([0, UNMATCHED, UNMATCHED, 3, 4]))]
    mean = average([H, 3 * H], plans, np.array([0.5, 0.5]), other)
    assert_allclose(mean[[0, 3]], 2 * H[[0, 3]])
    assert_allclose(mean[1], H[1])
    assert_allclose(mean[2], other[2])
    assert_allclose(mean[4], 3 * H[4])


ONE_PASS = [Streaming, lambda align, **more: Streaming(align, orders=3, **more), Hierarchical, FixedPoint]


@pytest.mark.parametrize("make", ONE_PASS)
@pytest.mark.parametrize("align", [Assignment(), PartialAssignment(), PartialAssignment(level=1e-3)], ids=repr)
@pytest.mark.parametrize("weights", [None, [1.0, 4.0, 0.5, 2.0, 9.0, 3.0, 1.0]], ids=["equal", "weighted"])
@pytest.mark.parametrize("seed", range(4))
def test_the_barycenter_is_the_average_under_the_plans_returned(make, align, weights, seed):
    rng = np.random.default_rng(seed)
    common = rng.gamma(0.4, size=(3, 40))
    matrices = [np.vstack([common + 0.1 * rng.random((3, 40)), rng.gamma(0.4, size=(3, 40))]) for _ in range(7)]
    matrices = [H[rng.permutation(6)] for H in matrices]
    found = make(align, weighted=weights is not None).solve(matrices, weights or [1.0] * 7)
    shares = np.array(weights or [1.0] * 7)
    assert_allclose(found.H, average(matrices, found.plans, shares / shares.sum(), found.H), rtol=1e-12, atol=1e-12)
    if align.is_partial and make is not FixedPoint:
        assert len({tuple(plan.weights) for plan in found.plans}) > 1, "some rows are matched by some parties only"


def bumps(*heights):
    """Two rows for each height: a bump that all have, and one of that height elsewhere."""
    place = np.arange(60.0)
    first, second = (np.exp(-np.square((place - centre) / 3)) for centre in (15, 45))
    return [np.vstack([first, height * second]) for height in heights]


@pytest.mark.parametrize("seed", range(8))
def test_rows_that_few_have_are_the_mean_over_those_few_when_streamed(seed):
    matrices = bumps(1.0, 0, 0, 0, 0, 3.0)
    found = Streaming(PartialAssignment(), seed=seed).solve(matrices, [1.0] * 6)
    there = [j for j, plan in enumerate(found.plans) if plan.weights[1] > 0]
    assert_allclose(found.H[0], matrices[0][0], rtol=1e-12)
    assert_allclose(found.H[1], np.mean([matrices[j][1] for j in there], axis=0), rtol=1e-12, atol=1e-15)
    assert there == [0, 5] or found.H[1].max() == 0, "an order that begins with an empty row has no place for another"


def test_rows_that_few_have_are_the_mean_over_those_few_in_a_tree():
    for method in (Hierarchical(PartialAssignment()), Hierarchical(PartialSinkhorn())):
        matrices = bumps(1.0, 0, 0, 5.0, 3.0, 0, 2.0)
        found = method.solve(matrices, [1.0] * 7)
        there = [j for j, plan in enumerate(found.plans) if plan.weights[1] > 0]
        assert there == [0, 4, 6], "party 3 was merged into a group that has no such row"
        expected = average(matrices, found.plans, np.full(7, 1 / 7), found.H)
        assert_allclose(found.H, expected, rtol=1e-12, atol=1e-15)
        assert found.H[1].max() == pytest.approx(2.0, rel=1e-3)


def test_soft_plans_weigh_every_row_by_its_mass():
    matrices = [np.random.default_rng(seed).gamma(0.4, size=(5, 30)) for seed in range(6)]
    for method in (Streaming(PartialSinkhorn()), Hierarchical(PartialSinkhorn()), Hierarchical(Sinkhorn())):
        found = method.solve(matrices, [1.0] * 6)
        expected = average(matrices, found.plans, np.full(6, 1 / 6), found.H)
        assert_allclose(found.H, expected, rtol=1e-10, atol=1e-12)


def test_private_components_do_not_blur_the_common_ones():
    """Each party has four common blocks and one of its own; partial plans leave the latter out of the average."""
    rng = np.random.default_rng(0)
    blocks = np.kron(np.eye(10), np.ones((1, 20)))
    matrices = [np.vstack([blocks[:4], blocks[4 + j]])[rng.permutation(5)] for j in range(6)]
    found = FixedPoint(PartialAssignment(), FromMedoid()).solve(matrices, [1.0] * 6)
    gaps = [np.linalg.norm(found.H - block, axis=1).min() for block in blocks[:4]]
    assert max(gaps) < 1e-9


@pytest.mark.parametrize("align", [Sinkhorn(0.02), Nearest(), PartialSinkhorn()], ids=repr)
def test_soft_plans_find_copies_again_from_a_medoid(align):
    matrices, _ = copies(30)
    found = FixedPoint(align, FromMedoid()).solve(matrices, [1.0] * 30)
    assert distance_up_to_order(found.H, parts()) < 1e-3 * np.linalg.norm(parts())


def test_tree_plans_compose():
    matrices, _ = copies(7, 0.02)
    found = Hierarchical(Nearest()).solve(matrices, [1.0] * 7)
    total = sum(plan.matrix @ H for plan, H in zip(found.plans, matrices, strict=True)) / 7
    assert_allclose(found.H, total, atol=1e-12)


def test_tensors_have_the_barycenter_of_arrays():
    torch = pytest.importorskip("torch")
    matrices, _ = copies(5, 0.05)
    for method in ALIGNED:
        ours = method.solve(matrices, [1.0] * 5).H
        theirs = method.solve([torch.from_numpy(H) for H in matrices], [1.0] * 5).H
        assert isinstance(theirs, torch.Tensor)
        assert_allclose(theirs.numpy(), ours, atol=1e-12)


def test_same_seed_same_bytes():
    matrices, _ = copies(9, 0.3)
    for method in ALL:
        first = method(uploads_of(matrices), Message({}))["H"]
        assert_array_equal(first, method(uploads_of(matrices), Message({}))["H"])


@pytest.mark.parametrize("make", [lambda: FixedPoint(sweeps=0), lambda: Streaming(orders=0), lambda: KMeans(0)])
def test_senseless_settings_are_refused(make):
    with pytest.raises(ParameterError):
        make()


@pytest.mark.parametrize("method", [FixedPoint, Streaming, Hierarchical])
@pytest.mark.parametrize("weights", [[0] * 3, [1, -1, 1], [1, np.nan, 1], [1, np.inf, 1], [1e308] * 3], ids=repr)
def test_weights_that_make_no_mean_are_refused(method, weights):
    matrices, _ = copies(3)
    with pytest.raises(ParameterError, match="positive sum"):
        method(weighted=True).solve(matrices, weights)
    assert np.isfinite(method().solve(matrices, weights).H).all(), "where they do not count they are no matter"


@pytest.mark.parametrize("method", [KMeans(), FuzzyCMeans()], ids=repr)
@pytest.mark.parametrize("scale", [2.0**-700, 2.0**700, 2.0**1000])
def test_clusterings_do_not_depend_on_the_scale(method, scale):
    matrices = [np.random.default_rng(i).random((4, 30)) for i in range(5)]
    scaled = method.solve([H * scale for H in matrices])
    np.testing.assert_array_equal(scaled, method.solve(matrices) * scale)


UPDATES = [
    Adagrad(),
    Adagrad(rate=0.1, beta_1=0.5),
    Yogi(),
    Yogi(0.1, 1e-2, 0.5, 0.9),
    Adam(),
    Adam(0.1, 1e-2, 0.5, 0.9),
]
every_update = pytest.mark.parametrize("update", UPDATES, ids=repr)
SHAPES = {"H": (3, 5), "theta.last": (4,)}


def messages(number, seed=0, dtype="float64"):
    rng = np.random.default_rng(seed)
    return [
        Message({name: rng.normal(0, 0.1, shape).astype(dtype) for name, shape in SHAPES.items()}, 7.0)
        for _ in range(number)
    ]


def ran(update, start, aggregates):
    model, state = start, update.init(start)
    for aggregate in aggregates:
        model, state = update.step(model, aggregate, state)
    return model, state


def entry_by_entry(update, x, targets):
    """One number at a time, as printed by Reddi et al."""
    m, v = 0.0, update.tau**2
    for target in targets:
        delta = target - x
        m = update.beta_1 * m + (1 - update.beta_1) * delta
        if isinstance(update, Adagrad):
            v = v + delta**2
        elif isinstance(update, Yogi):
            v = v - (1 - update.beta_2) * delta**2 * np.sign(v - delta**2)
        else:
            v = update.beta_2 * v + (1 - update.beta_2) * delta**2
        x = x + update.rate * m / (np.sqrt(v) + update.tau)
    return x


@every_update
def test_every_entry_moves_as_printed(update):
    start, *aggregates = messages(9)
    model, _ = ran(update, start, aggregates)
    for name, shape in SHAPES.items():
        for place in np.ndindex(shape):
            wanted = entry_by_entry(update, start[name][place], [a[name][place] for a in aggregates])
            assert_allclose(model[name][place], wanted, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("update", [Adagrad(), Yogi(), Adam()], ids=repr)
def test_settings_are_those_of_fedopt(update):
    assert update.tau == 1e-3
    assert update.beta_1 == (0.0 if isinstance(update, Adagrad) else 0.9)
    assert isinstance(update, Adagrad) or update.beta_2 == 0.99


@every_update
def test_a_huge_tau_leaves_an_average_with_a_step_of_its_own(update):
    """√v stays at τ (√β₂ τ for Adam): with a rate to match, the first step is the whole way, as FedAvg's."""
    start, aggregate = messages(2)
    kept = np.sqrt(update.beta_2) if isinstance(update, Adam) else 1.0
    large = replace(update, tau=1e9, rate=float((1 + kept) * 1e9 / (1 - update.beta_1)))
    model, _ = large.step(start, aggregate, large.init(start))
    for name in SHAPES:
        assert_allclose(model[name], aggregate[name], rtol=1e-6, atol=1e-9)


@every_update
def test_arrays_do_not_mix(update):
    start, *aggregates = messages(5)
    both, _ = ran(update, start, aggregates)
    for name in SHAPES:
        alone, _ = ran(update, Message({name: start[name]}), [Message({name: a[name]}) for a in aggregates])
        assert_array_equal(alone[name], both[name])


@every_update
def test_a_model_that_nobody_moves_stays(update):
    (start,) = messages(1)
    model, _ = ran(update, start, [start] * 3)
    for name in SHAPES:
        assert_array_equal(model[name], start[name])


@every_update
def test_arguments_are_left_alone_and_the_type_is_kept(update):
    start, *aggregates = messages(4, dtype="float32")
    copies = [{name: array.copy() for name, array in m.arrays.items()} for m in (start, *aggregates)]
    model, state = ran(update, start, aggregates)
    for message, copy in zip((start, *aggregates), copies, strict=True):
        for name in SHAPES:
            assert_array_equal(message[name], copy[name])
    assert {model[name].dtype for name in SHAPES} == {np.dtype("float32")}
    assert {held[name].dtype for held in (state.first, state.second) for name in SHAPES} == {np.dtype("float32")}


@every_update
def test_tensors_move_as_arrays_do(update):
    torch = pytest.importorskip("torch")
    start, *aggregates = messages(4)
    tensors = [Message({name: torch.from_numpy(array) for name, array in a.arrays.items()}) for a in aggregates]
    model, _ = ran(update, start, aggregates)
    moved, _ = ran(update, start, tensors)
    for name in SHAPES:
        assert_allclose(moved[name].numpy(), model[name], rtol=1e-12)


@pytest.mark.parametrize("settings", [{"rate": 0.0}, {"tau": -1.0}, {"beta_1": 1.0}, {"rate": float("nan")}])
@pytest.mark.parametrize("kind", [Adagrad, Yogi, Adam])
def test_settings_out_of_range_are_refused(kind, settings):
    with pytest.raises(ParameterError, match=next(iter(settings))):
        kind(**settings)


PARTIES = ("p0", "p1", "p2")


def data(rows=90, columns=24, rank=4, seed=0):
    rng = np.random.default_rng(seed)
    H = rng.gamma(0.3, size=(rank, columns))
    return rng.gamma(0.5, size=(rows, rank)) @ H + 0.02 * rng.random((rows, columns))


def shards_of(X):
    parts = np.array_split(X, len(PARTIES))
    return [Shard(name, as_matrix(part), key(7, name)) for name, part in zip(PARTIES, parts, strict=True)]


def one_at_a_time(rounds):
    """A schedule with one participant in each round, as an asynchronous server would see them."""
    order = [PARTIES[(i * i + i // 3) % 3] for i in range(rounds)]
    return order, Schedule(rounds, 3, {i: frozenset(PARTIES) - {name} for i, name in enumerate(order)})


def asyn(sketch=None, **settings):
    update = Relaxation(**settings)
    return LocalAveraging(
        4, SquaredError(ProximalDescent()), 3, aggregation=Mean(), server_update=update, sketch=sketch
    )


def folded(update, start, arrivals):
    model, state = Message({"H": start}), update.init(Message({"H": start}))
    for arrival in arrivals:
        model, state = update.step(model, Message({"H": arrival}), state)
    return model["H"]


def test_with_rho_one_the_model_is_the_mean_of_all_that_has_come():
    rng = np.random.default_rng(0)
    start, *arrivals = rng.random((30, 4, 6))
    assert_allclose(folded(Relaxation(), start, arrivals), np.mean(arrivals, axis=0), rtol=1e-12)
    assert_array_equal(folded(Relaxation(rho=7.0), start, arrivals[:1]), arrivals[0])


@pytest.mark.parametrize(("rho", "offset"), [(1.0, 0), (1.0, 2), (3.0, 0), (10.0, 5)])
def test_weights_are_those_of_the_formula_and_their_sum_is_without_bound(rho, offset):
    """From a start of zeros, arrivals of ones: 1 − model = Π (1 − ω_t)."""
    left = 1.0
    for t in range(1, 40):
        left *= 1.0 - rho / (rho + offset + t - 1)
        model = folded(Relaxation(rho, offset), np.zeros((2, 3)), [np.ones((2, 3))] * t)
        assert_allclose(model, 1.0 - left, rtol=1e-12)
    turns = np.arange(offset, 10**6)
    assert (rho / (rho + turns)).sum() > rho * np.log(10**6 / (rho + offset + 1))


def test_the_published_count_gives_the_start_two_shares():
    rng = np.random.default_rng(0)
    start, *arrivals = rng.random((10, 4, 6))
    expected = (2 * start + sum(arrivals)) / (2 + len(arrivals))
    assert_allclose(folded(Relaxation(offset=2), start, arrivals), expected, rtol=1e-12)


@pytest.mark.parametrize("sketch", [None, Proportion(ratio=0.4)], ids=["Asyn-SD", "Asyn-SSD-V"])
def test_one_party_at_a_time_is_the_asynchronous_server(sketch):
    program, (order, schedule) = asyn(sketch, rho=3.0), one_at_a_time(12)
    shards = shards_of(data())
    rounds = list(Sequential(record=True).run(program, shards, schedule, reduction=PlainReduction()))
    assert [done.participants for done in rounds] == [(name,) for name in order]
    arrivals = [done.traffic[0][2]["H"] for done in rounds]
    assert_allclose(rounds[-1].model["H"], folded(Relaxation(3.0), np.zeros((4, 24)), arrivals), rtol=1e-10)
    again = list(Parallel(2).run(program, shards[::-1], schedule, reduction=PlainReduction()))
    assert_array_equal(again[-1].model["H"], rounds[-1].model["H"])
    rest = Sequential().run(program, shards, schedule, reduction=PlainReduction(), resume=rounds[6].checkpoint)
    assert_array_equal(list(rest)[-1].model["H"], rounds[-1].model["H"])


@pytest.mark.parametrize("sketch", [None, Proportion(ratio=0.4)], ids=["Asyn-SD", "Asyn-SSD-V"])
def test_the_asynchronous_methods_get_somewhere(sketch):
    X = data()
    program, (_, schedule) = asyn(sketch, rho=3.0), one_at_a_time(90)
    errors = []
    for done in Sequential().run(program, shards_of(X), schedule, reduction=PlainReduction()):
        H = done.model["H"]
        W = program.solver.solve_rows(as_matrix(X), np.ascontiguousarray(H.T))
        errors.append(np.linalg.norm(X - W @ H) / np.linalg.norm(X))
    assert errors[-1] < 0.05
    assert errors[-1] < 0.3 * errors[0]


def test_relaxation_without_a_past_is_replacement():
    shards, X = shards_of(data()), Schedule(1, 3)
    relaxed = next(Sequential().run(asyn(rho=2.0), shards, X, reduction=PlainReduction()))
    plain = replace(asyn(), server_update=Replace())
    assert_array_equal(
        relaxed.model["H"], next(Sequential().run(plain, shards, X, reduction=PlainReduction())).model["H"]
    )


def test_a_start_on_another_device_is_moved_to_where_uploads_are():
    torch = pytest.importorskip("torch")
    start, arrival = np.ones((2, 3)), torch.full((2, 3), 4.0, dtype=torch.float32)
    moved = folded(Relaxation(offset=2), start, [arrival])
    assert isinstance(moved, torch.Tensor)
    assert moved.dtype == torch.float32
    assert_allclose(moved.numpy(), 2.0)


@pytest.mark.parametrize(
    "settings",
    [{"rho": 0.0}, {"rho": -1.0}, {"rho": float("inf")}, {"rho": float("nan")}, {"offset": -1}, {"offset": 0.5}],
)
def test_settings_outside_their_range_are_refused(settings):
    with pytest.raises(ParameterError):
        Relaxation(**settings)
