"""Laws of the bound of mutual information and its critics: values by hand, slopes against differences."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy import sparse

from partsong.data.conversion import as_matrix
from partsong.errors import ParameterError
from partsong.methods.mutual_information.batches import operations, to_documents
from partsong.methods.mutual_information.critics import (
    ClippedBound,
    Concat,
    JensenShannon,
    MutualInformation,
    Separable,
    draw_parameters,
)

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")

V, K, B = 13, 4, 7
CRITICS = [Concat(5, 6), Separable(hidden=6, embedding=3, layers=2), Separable(hidden=4, embedding=2, layers=1)]
BOUNDS = [ClippedBound(), ClippedBound(0.4), JensenShannon()]
both = pytest.mark.parametrize("kind", ["numpy", "torch"])


def by_hand(s, clip):
    """Pair by pair, as printed in the paper with its clip put right."""
    b = len(s)
    apart = [np.exp(min(max(s[i, j], -clip), clip)) for i in range(b) for j in range(b) if i != j]
    return sum(s[i, i] for i in range(b)) / b - np.log(sum(apart) / (b * (b - 1)))


def jensen_shannon(s):
    b = len(s)
    together = sum(-np.log1p(np.exp(-s[i, i])) for i in range(b)) / b
    apart = sum(np.log1p(np.exp(s[i, j])) for i in range(b) for j in range(b) if i != j)
    return together - apart / (b * (b - 1))


def objective(bound):
    return (lambda s: by_hand(s, bound.clip)) if isinstance(bound, ClippedBound) else jensen_shannon


def differences(f, x, step=1e-6):
    out = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        above, below = x.copy(), x.copy()
        above[place] += step
        below[place] -= step
        out[place] = (f(above) - f(below)) / (2 * step)
    return out


def batch(kind="numpy", seed=0):
    """Sparse documents, one of which is empty, weights, and a way to this kind of array."""
    rng = np.random.default_rng(seed)
    X = np.where(rng.random((B, V)) < 0.4, rng.integers(1, 4, (B, V)), 0).astype(float)
    X[2], X[:, 5] = 0, 0
    W = rng.random((B, K))
    if kind == "torch":
        torch = pytest.importorskip("torch")
        (bag,) = to_documents(as_matrix(torch.from_numpy(X).to_sparse_csr())).batches(B)
        return X, bag, W, lambda array: torch.from_numpy(array.copy())
    (bag,) = to_documents(as_matrix(sparse.csr_array(X))).batches(B)
    return X, bag, W, np.copy


def lively(critic, seed=0):
    """Parameters several times larger than a start, so that scores differ and some are clipped."""
    theta = draw_parameters(critic, V, K, np.random.default_rng(seed), "float64")
    return {name: 2.5 * array for name, array in theta.items()}


def scores_by_hand(critic, theta, X, W):
    """T(x_i, w_j) on dense vectors: for each pair on its own where they meet in the first layer."""
    if isinstance(critic, Concat):
        return np.array([[concatenated(theta, np.concatenate([x, w])) for w in W] for x in X])
    ends = []
    for side, rows in (("document", X), ("weights", W)):
        for i in range(critic.depth):
            rows = rows @ theta[f"{side}.{i}"] + theta[f"{side}.{i}.shift"]
            rows = np.maximum(0, rows) if i + 1 < critic.depth else rows
        ends.append(rows)
    return ends[0] @ ends[1].T


def concatenated(theta, pair):
    first = np.maximum(0, pair @ np.vstack([theta["words"], theta["weights"]]) + theta["shift"])
    second = np.maximum(0, first @ theta["middle"] + theta["middle_shift"])
    return second @ theta["last"] + theta["last_shift"][0]


@both
@pytest.mark.parametrize("bound", BOUNDS, ids=repr)
def test_the_value_is_that_of_the_printed_sum_with_its_clip_put_right(bound, kind):
    scores = 4 * np.random.default_rng(1).standard_normal((B, B))
    assert np.abs(scores).max() > 5
    _, _, _, native = batch(kind)
    assert_allclose(float(bound.value(native(scores))), by_hand(scores, bound.clip), rtol=1e-12)


def test_scores_of_pairs_that_belong_together_are_not_clipped():
    scores = np.zeros((4, 4))
    np.fill_diagonal(scores, 40.0)
    assert_allclose(ClippedBound(5.0).value(scores), 40.0)


def test_the_other_scores_are_clipped_on_both_sides_and_the_printed_clip_would_make_them_all_the_same():
    low, high = np.full((3, 3), -50.0), np.full((3, 3), 50.0)
    np.fill_diagonal(low, 0)
    np.fill_diagonal(high, 0)
    assert_allclose(ClippedBound(5.0).value(low), 5.0)
    assert_allclose(ClippedBound(5.0).value(high), -5.0)


@pytest.mark.parametrize("clip", [0.0, -1.0, float("nan"), float("inf")])
def test_a_clip_is_a_number_above_zero(clip):
    with pytest.raises(ParameterError, match="clip"):
        ClippedBound(clip)


@both
@pytest.mark.parametrize("bound", BOUNDS, ids=repr)
def test_slopes_are_those_of_the_objective(bound, kind):
    scores = 2 * np.random.default_rng(2).standard_normal((B, B))
    _, _, _, native = batch(kind)
    found = np.asarray(bound.slopes(native(scores)))
    assert_allclose(found, differences(objective(bound), scores), atol=1e-7)


@pytest.mark.parametrize("bound", [ClippedBound(), JensenShannon()], ids=repr)
def test_scores_far_out_have_finite_slopes(bound):
    scores = 1e4 * np.random.default_rng(2).standard_normal((B, B)).astype(np.float32)
    assert np.isfinite(bound.slopes(scores)).all()
    assert bound.slopes(scores).dtype == np.float32


@both
@pytest.mark.parametrize("critic", CRITICS, ids=repr)
def test_scores_of_a_batch_are_those_of_each_pair(critic, kind):
    X, bag, W, native = batch(kind)
    theta = lively(critic)
    here = {name: native(array) for name, array in theta.items()}
    scores, _ = critic.scores(here, critic.read(here, bag), native(W))
    assert_allclose(np.asarray(scores), scores_by_hand(critic, theta, X, W), rtol=1e-10, atol=1e-12)


@both
@pytest.mark.parametrize("bound", BOUNDS, ids=repr)
@pytest.mark.parametrize("critic", CRITICS, ids=repr)
def test_the_pull_on_weights_is_the_gradient_of_the_objective(critic, bound, kind):
    X, bag, W, native = batch(kind)
    theta = lively(critic)
    here = {name: native(array) for name, array in theta.items()}
    information = MutualInformation(0.3, critic, bound)
    found = information.pull(here, information.read(here, bag), native(W))
    J = objective(bound)
    wanted = differences(lambda W: 0.3 * J(scores_by_hand(critic, theta, X, W)), W)
    assert np.abs(wanted).max() > 1e-4
    assert_allclose(np.asarray(found), wanted, atol=1e-7)


@both
@pytest.mark.parametrize("bound", BOUNDS, ids=repr)
@pytest.mark.parametrize("critic", CRITICS, ids=repr)
def test_the_critic_climbs_along_the_gradient_of_the_objective(critic, bound, kind):
    X, bag, W, native = batch(kind)
    theta = lively(critic)
    here = {name: native(array) for name, array in theta.items()}
    information = MutualInformation(0.3, critic, bound)
    estimate = information.learn(here, bag, information.read(here, bag), native(W), 1.0)
    J = objective(bound)
    assert_allclose(float(estimate), by_hand(scores_by_hand(critic, theta, X, W), bound.clip), rtol=1e-9)
    for name, array in theta.items():
        wanted = differences(lambda a, name=name: J(scores_by_hand(critic, {**theta, name: a}, X, W)), array)
        assert_allclose(np.asarray(here[name]) - array, wanted, atol=2e-7, err_msg=name)


@pytest.mark.parametrize("critic", CRITICS, ids=repr)
def test_words_that_no_document_has_do_not_move(critic):
    X, bag, W, _ = batch()
    theta = lively(critic)
    here = {name: array.copy() for name, array in theta.items()}
    information = MutualInformation(0.3, critic)
    information.learn(here, bag, information.read(here, bag), W, 1.0)
    name = "words" if isinstance(critic, Concat) else "document.0"
    is_new = ~X.any(0)
    assert is_new.any()
    assert_array_equal(here[name][is_new], theta[name][is_new])


@pytest.mark.parametrize("critic", [Concat(), Separable()], ids=repr)
def test_sizes_and_start_are_those_of_linear_layers(critic):
    sizes = critic.sizes(V, K)
    theta = draw_parameters(critic, V, K, np.random.default_rng(0), "float32")
    assert {name: array.shape for name, array in theta.items()} == {name: size.shape for name, size in sizes.items()}
    for name, array in theta.items():
        assert array.dtype == np.float32
        assert np.abs(array).max() <= sizes[name].inputs ** -0.5
    if isinstance(critic, Concat):
        assert sum(a.size for a in theta.values()) == 32 * (V + K + 1) + 32 * 256 + 256 + 257


def test_a_learned_critic_tells_documents_that_share_no_word():
    """Weights that say which document it is have more information than weights that say nothing."""
    X = np.kron(np.eye(4), np.ones((4, 3)))
    W_telling, W_dull = np.kron(np.eye(4), np.ones((4, 1))), np.ones((16, 4)) / 4
    (bag,) = to_documents(as_matrix(sparse.csr_array(X))).batches(16)
    critic = Concat(8, 16)
    information, seen = MutualInformation(1.0, critic, JensenShannon()), {}
    for name, W in (("telling", W_telling), ("dull", W_dull)):
        theta = draw_parameters(critic, 12, 4, np.random.default_rng(0), "float64")
        for _ in range(300):
            seen[name] = float(information.learn(theta, bag, information.read(theta, bag), W, 0.5))
    assert seen["telling"] > 0.8, "at most log 4 = 1.39"
    assert abs(seen["dull"]) < 0.1


def test_products_with_a_bag_are_those_with_its_rows():
    rng = np.random.default_rng(3)
    for kind in ("numpy", "torch"):
        X, _, _, native = batch(kind)
        source = as_matrix(sparse.csr_array(X)) if kind == "numpy" else as_matrix(native(X))
        order = rng.permutation(B)
        shuffled, F, out = to_documents(source).reordered(order), rng.random((V, 3)), rng.random((V, 2))
        for bag in shuffled.batches(3):
            rows, G = X[order][bag.first : bag.last], rng.random((len(bag), 2))
            on, before = operations(native(F)), native(out)
            assert_allclose(np.asarray(on.times(bag, native(F))), rows @ F, rtol=1e-12)
            on.add_transposed(bag, native(G), 0.7, before)
            assert_allclose(np.asarray(before), out + 0.7 * rows.T @ G, rtol=1e-12)


def test_batches_are_nearly_equal_and_hold_every_document_once():
    for n in (1, 5, 64, 65, 130):
        bags = list(to_documents(as_matrix(sparse.csr_array(np.eye(n)))).batches(64))
        assert [bag.first for bag in bags[1:]] == [bag.last for bag in bags[:-1]]
        assert (bags[0].first, bags[-1].last) == (0, n)
        sizes = [len(bag) for bag in bags]
        assert max(sizes) <= 64
        assert max(sizes) - min(sizes) <= 1
