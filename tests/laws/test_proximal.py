"""Laws of proximal weights in units of the problem, and of when they suffice for sketched steps."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from partsong.errors import ParameterError
from partsong.solvers.normal_equations import NormalEquations
from partsong.solvers.update_rules import (
    CoordinateDescent,
    ProximalDescent,
    converges_when_sketched,
    warn_unless_convergent,
)


def problem(seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    A, B, F = rng.random((20, 15)), scale * rng.random((4, 15)), rng.random((20, 4)) / scale
    return NormalEquations.of(A, B), F


def steps(rule, equations, F, count=5):
    state = rule.init(F)
    for _ in range(count):
        F, state = rule.step(F, equations, state)
    return F, state


def test_weights_are_those_of_coordinate_descent_times_the_first_mean_diagonal():
    equations, F = problem()
    size = np.trace(equations.gram) / 4
    found, state = steps(ProximalDescent(2, 0.3, 0.1), equations, F)
    known, _ = steps(CoordinateDescent(2, 0.3 * size, 0.1 * size), equations, F)
    assert_allclose(found, known, rtol=1e-12)
    assert (state.count, state.scale) == (5, pytest.approx(size))


def test_the_unit_is_that_of_the_first_problem_for_good():
    """Weights that followed each sketch would fall where components grow, and Theorem 1 would not apply."""
    equations, F = problem()
    rule = ProximalDescent(alpha=1.0, beta=0.0)
    _, state = rule.step(F, equations, rule.init(F))
    larger = NormalEquations(100 * equations.gram, 100 * equations.cross)
    found, after = rule.step(F, larger, state)
    known, _ = CoordinateDescent(alpha=state.scale).step(F, larger, CoordinateDescent().init(F))
    assert_array_equal(found, known)
    assert after.scale == state.scale


@pytest.mark.parametrize("scale", [1e-6, 1e3])
def test_the_scale_of_the_other_factor_does_not_matter(scale):
    rule = ProximalDescent(alpha=0.5, beta=0.5)
    plain, _ = steps(rule, *problem())
    scaled, _ = steps(rule, *problem(scale=scale))
    assert_allclose(scale * scaled, plain, rtol=1e-9)
    absolute = CoordinateDescent(alpha=0.5, beta=0.5)
    assert not np.allclose(scale * steps(absolute, *problem(scale=scale))[0], steps(absolute, *problem())[0], rtol=0.01)


def test_a_problem_without_components_leaves_the_unit_open():
    equations, F = problem()
    rule = ProximalDescent()
    nothing = NormalEquations(0 * equations.gram, 0 * equations.cross)
    kept, state = rule.step(F, nothing, rule.init(F))
    assert_array_equal(kept, F)
    assert state.scale == 0
    _, state = rule.step(F, equations, state)
    assert state.scale == pytest.approx(np.trace(equations.gram) / 4)


def test_steps_become_smaller_with_growing_weights():
    """After t steps on problems with noise the factor moves by about 1/μ_t."""
    rng, (equations, F) = np.random.default_rng(1), problem()
    moves = {}
    for rule in (ProximalDescent(alpha=0.1, beta=0.1), ProximalDescent(alpha=0.1, beta=0.0)):
        state, G = rule.init(F), F
        for _ in range(300):
            noisy = NormalEquations(equations.gram, equations.cross + 0.3 * rng.standard_normal(F.shape))
            moved, state = rule.step(G, noisy, state)
            moves[rule.beta], G = np.linalg.norm(moved - G), moved
    assert moves[0.1] < 0.1 * moves[0.0]


@pytest.mark.parametrize("wrong", [{"sweeps": 0}, {"alpha": -1.0}, {"beta": -1e-9}])
def test_settings_are_checked(wrong):
    with pytest.raises(ParameterError, match="ProximalDescent needs"):
        ProximalDescent(**wrong)


def test_only_growing_weights_converge():
    assert converges_when_sketched(0.0, 1e-9)
    assert not converges_when_sketched(10.0, 0.0)
    for pair in ((-1.0, 1.0), (1.0, -1.0)):
        with pytest.raises(ParameterError, match="not negative"):
            converges_when_sketched(*pair)
    warn_unless_convergent(1.0, 0.1)
    with pytest.warns(UserWarning, match=r"alpha = 2.*Take beta > 0"):
        warn_unless_convergent(2.0, 0.0)
