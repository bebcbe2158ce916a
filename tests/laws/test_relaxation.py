"""Laws of the relaxing server, and of consensus where parties come one at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from partsong.aggregation.linear import Mean
from partsong.aggregation.plaintext import PlainReduction
from partsong.aggregation.server_update import Relaxation, Replace
from partsong.core.interfaces import Message, Schedule, Shard
from partsong.core.streams import key
from partsong.data.conversion import as_matrix
from partsong.engines.local import Parallel, Sequential
from partsong.errors import ParameterError
from partsong.methods.averaging import LocalAveraging
from partsong.sketch.crossing import Proportion
from partsong.solvers.squared_error import SquaredError
from partsong.solvers.update_rules import ProximalDescent

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
