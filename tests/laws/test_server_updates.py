"""Laws of adaptive server updates: against loops of a few lines, torch's optimisers, and plain averages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from partsong.aggregation.server_update import Adagrad, Adam, Yogi
from partsong.core.interfaces import Message
from partsong.errors import ParameterError

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
