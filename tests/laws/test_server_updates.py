"""Laws of the server's updates: adaptive ones against loops of a few lines and torch's optimisers; relaxation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from partsong.aggregation.linear import Mean
from partsong.aggregation.plaintext import PlainReduction
from partsong.aggregation.server_update import Adagrad, Adam, Relaxation, Replace, Yogi
from partsong.core.interfaces import Message, Schedule, Shard
from partsong.core.streams import key
from partsong.data.conversion import as_matrix
from partsong.engines.local import Parallel, Sequential
from partsong.errors import ParameterError
from partsong.methods.averaging import LocalAveraging
from partsong.sketch.crossing import Proportion
from partsong.solvers.squared_error import SquaredError
from partsong.solvers.update_rules import ProximalDescent

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
