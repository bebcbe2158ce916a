"""Laws of couplings: what a pull does to a step, and that the party's objective never rises with the exact form."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from partsong.aggregation.alignment import (
    UNMATCHED,
    Assignment,
    Identity,
    Matching,
    PartialAssignment,
    PartialSinkhorn,
    Sinkhorn,
    SoftMax,
)
from partsong.errors import CompositionError, ParameterError
from partsong.solvers.coupling import AlignedProximalTerm, NoPull, ProximalAnchor, ProximalTerm
from partsong.solvers.normal_equations import NormalEquations
from partsong.solvers.update_rules import (
    BlockPivoting,
    CoordinateDescent,
    InertialPalm,
    Multiplicative,
    ProjectedGradient,
)

RULES = [
    Multiplicative(), CoordinateDescent(2), ProjectedGradient(), InertialPalm(), InertialPalm(0.3), BlockPivoting(),
]  # fmt: skip
ALIGNMENTS = [Identity(), Assignment(), PartialAssignment(), Sinkhorn(), PartialSinkhorn(), SoftMax()]


def problem(n=40, m=30, k=5, seed=0):
    """W, X and two Hᵀ: the party's and the model's, in another order."""
    rng = np.random.default_rng(seed)
    H = rng.gamma(0.4, size=(k, m)) + 0.01
    W = rng.random((n, k))
    own = (H + 0.05 * rng.random((k, m))).T.copy()
    return W, W @ H + 0.1 * rng.random((n, m)), own, H[rng.permutation(k)].T.copy()


def equations_of(W, X):
    return NormalEquations(W.T @ W, X.T @ W)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize(
    "coupling", [ProximalTerm(0.0), AlignedProximalTerm(0.0), AlignedProximalTerm(0.0, prox="exact")], ids=repr
)
def test_no_strength_is_no_pull(rule, coupling):
    if coupling == AlignedProximalTerm(0.0, prox="exact") and not isinstance(rule, InertialPalm | ProjectedGradient):
        with pytest.raises(CompositionError, match="gradient step"):
            coupling.check(rule)
        return
    W, X, own, model = problem()
    plain, memory, _ = NoPull().step(rule, own, equations_of(W, X), rule.init(own), ProximalAnchor(model))
    pulled, other, _ = coupling.step(rule, own, equations_of(W, X), rule.init(own), ProximalAnchor(model))
    assert_allclose(pulled, plain, rtol=1e-12, atol=1e-14)
    assert memory.count == other.count == 1


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("align", ALIGNMENTS, ids=repr)
def test_the_printed_form_is_a_weighted_mean_with_the_aligned_model(rule, align):
    W, X, own, model = problem()
    kept = own.copy(), model.copy()
    plain, _ = rule.step(own, equations_of(W, X), rule.init(own))
    pulled, _, tether = AlignedProximalTerm(0.7, align).step(
        rule, own, equations_of(W, X), rule.init(own), ProximalAnchor(model)
    )
    P = align.plan(own.T, model.T).matrix
    expected = (plain.T + 0.7 * P @ model.T) / (1 + 0.7 * P.sum(axis=1, keepdims=True))
    assert_allclose(pulled.T, expected, rtol=1e-9, atol=1e-12)
    assert (pulled >= 0).all()
    assert_array_equal(own, kept[0])
    assert_array_equal(model, kept[1])
    assert_allclose(tether.plan.matrix, P)


@pytest.mark.parametrize("rule", [InertialPalm(), InertialPalm(0.3), ProjectedGradient()], ids=repr)
@pytest.mark.parametrize("align", ALIGNMENTS, ids=repr)
def test_the_exact_form_is_the_proximal_map(rule, align):
    """argmin over A ≥ 0 of ‖A − Z‖²/2η + γ Σ_a w_a ½‖A_a − (P H̄)_a / w_a‖², with Z the step before projection."""
    W, X, own, model = problem()
    equations, gamma = equations_of(W, X), 3.0
    pulled, _, _ = AlignedProximalTerm(gamma, align, prox="exact").step(
        rule, own, equations, rule.init(own), ProximalAnchor(model)
    )
    beta = getattr(rule, "inertia", 0.0)
    eta = (1.0 if beta == 0 else 2 * (1 - beta) / (1 + 2 * beta)) / np.linalg.norm(equations.gram, 2)
    Z = (own - eta * (own @ equations.gram - equations.cross)).T
    P = align.plan(own.T, model.T).matrix
    w = P.sum(axis=1, keepdims=True)
    expected = np.maximum(0, (Z + eta * gamma * P @ model.T) / (1 + eta * gamma * w))
    assert_allclose(pulled.T, expected, rtol=1e-8, atol=1e-10)


def test_fedprox_is_the_gradient_step_of_the_paper():
    W, X, own, model = problem()
    equations = equations_of(W, X)
    L = np.linalg.norm(equations.gram, 2)
    for pull, mu in ((ProximalTerm(0.3), 0.3 * L), (ProximalTerm(0.3, absolute=True), 0.3)):
        pulled, _, _ = pull.step(InertialPalm(), own, equations, InertialPalm().init(own), ProximalAnchor(model))
        gradient = own @ equations.gram - equations.cross + mu * (own - model)
        assert_allclose(pulled, np.maximum(0, own - gradient / (L + mu)), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("strength", [1e6, 1e9])
def test_strong_pulls_end_at_the_model_in_the_partys_order(strength):
    W, X, own, model = problem()
    equations, rule = equations_of(W, X), InertialPalm()
    aligned = Assignment().plan(own.T, model.T).apply(model.T).T
    for coupling, goal in (
        (ProximalTerm(strength), model),
        (AlignedProximalTerm(strength), aligned),
        (AlignedProximalTerm(strength * 1e3, prox="exact"), aligned),
    ):
        pulled, _, _ = coupling.step(rule, own, equations, rule.init(own), ProximalAnchor(model))
        assert_allclose(pulled, goal, atol=1e-4)


def test_components_without_a_partner_are_left_alone():
    W, X, own, model = problem()

    class Partly:
        def plan(self, target, source):
            return Matching(np.array([2, UNMATCHED, 0, UNMATCHED, 1]))

    rule, equations = InertialPalm(), equations_of(W, X)
    plain, _ = rule.step(own, equations, rule.init(own))
    for prox in ("paper", "exact"):
        pulled, _, _ = AlignedProximalTerm(50.0, Partly(), prox).step(
            rule, own, equations, rule.init(own), ProximalAnchor(model)
        )
        assert_allclose(pulled[:, [1, 3]], plain[:, [1, 3]], rtol=1e-12)
        assert (np.abs(pulled - plain)[:, [0, 2, 4]].max(axis=0) > 1e-3).all()


def test_alignments_are_found_anew_every_so_many_steps():
    W, X, own, model = problem()
    seen = []

    class Counted:
        def plan(self, target, source):
            seen.append(1)
            return Matching.identity(len(target))

    for every, expected in ((1, 6), (3, 2), (10, 1)):
        seen.clear()
        tether, Ht, memory = ProximalAnchor(model), own, InertialPalm().init(own)
        for _ in range(6):
            Ht, memory, tether = AlignedProximalTerm(0.1, Counted(), every=every).step(
                InertialPalm(), Ht, equations_of(W, X), memory, tether
            )
        assert len(seen) == expected


@pytest.mark.parametrize("inertia", [0.0, 0.1, 0.3, 0.5])
@pytest.mark.parametrize("gamma", [0.1, 3.0, 50.0])
def test_with_the_exact_form_the_partys_objective_never_rises(inertia, gamma):
    """Theorem 2 of the FNMF paper: Φ = ½‖X − WH‖² + γ D(H, H̄) over alternating iPALM steps on W and H."""
    _, X, own, model = problem()
    rng = np.random.default_rng(1)
    rule, align = InertialPalm(inertia), Assignment()
    coupling = AlignedProximalTerm(gamma, align, prox="exact")
    W, Ht = rng.random((40, 5)), own

    def objective(W, Ht):
        P = align.plan(Ht.T, model.T)
        return 0.5 * np.square(X - W @ Ht.T).sum() + gamma * 0.5 * np.square(Ht.T - P.apply(model.T)).sum()

    on_W, on_H, values = rule.init(W), rule.init(Ht), [objective(W, Ht)]
    for _ in range(300):
        W, on_W = rule.step(W, NormalEquations(Ht.T @ Ht, X @ Ht), on_W)
        Ht, on_H, _ = coupling.step(rule, Ht, equations_of(W, X), on_H, ProximalAnchor(model))
        values.append(objective(W, Ht))
    assert (np.diff(values) <= 1e-9 * values[0]).all()
    assert values[-1] < 0.9 * values[0]


@pytest.mark.parametrize(
    "coupling", [ProximalTerm(0.5), AlignedProximalTerm(0.5), AlignedProximalTerm(0.5, prox="exact")], ids=repr
)
def test_tensors_are_pulled_like_arrays(coupling):
    torch = pytest.importorskip("torch")
    W, X, own, model = problem()
    rule, equations = InertialPalm(0.3), equations_of(W, X)
    ours, _, _ = coupling.step(rule, own, equations, rule.init(own), ProximalAnchor(model))
    as_tensors = NormalEquations(torch.from_numpy(equations.gram), torch.from_numpy(equations.cross))
    start = torch.from_numpy(own)
    theirs, _, _ = coupling.step(rule, start, as_tensors, rule.init(start), ProximalAnchor(torch.from_numpy(model)))
    assert_allclose(theirs.numpy(), ours, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ProximalTerm(-1),
        lambda: AlignedProximalTerm(float("inf")),
        lambda: AlignedProximalTerm(prox="other"),
        lambda: AlignedProximalTerm(every=0),
    ],
)
def test_senseless_settings_are_refused(make):
    with pytest.raises(ParameterError):
        make()
