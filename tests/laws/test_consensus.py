"""Laws of consensus programs: how parties join, what they upload, barycenters by sums, and proximal steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from pairwise_masks import PairwiseMasks

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
from partsong.aggregation.barycenter import FixedPoint, FromPrevious
from partsong.aggregation.linear import AlignedMean, Mean
from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Layout, Message, Outcome, Plan, Reducible, Schedule, Shard
from partsong.core.streams import key, stream
from partsong.data.conversion import as_matrix
from partsong.engines.local import Parallel, Sequential
from partsong.errors import CompositionError, DataError, ParameterError, PartyError
from partsong.evaluation.metrics import potential
from partsong.methods import build
from partsong.methods.averaging import AdoptModel, AlignedUpload, LocalAveraging, PersonalComponents, WholeUpload
from partsong.methods.init_modes import LocalInit, SharedInit
from partsong.solvers.coupling import AlignedProximalTerm, NoCoupling, ProximalAnchor, ProximalTerm
from partsong.solvers.normal_equations import NormalEquations
from partsong.solvers.squared_error import accelerated_hals
from partsong.solvers.update_rules import (
    BlockPivoting,
    CoordinateDescent,
    Extrapolation,
    InertialPalm,
    Multiplicative,
    ProjectedGradient,
    ProximalDescent,
    converges_when_sketched,
    warn_unless_convergent,
)
from partsong.training.loop import StoppingRule, run
from partsong.training.simulation import FederatedFit, SimulationMeasures, party_components

PROGRAMS = {
    "fnmf robust": build("fnmf-local", 4, local_steps=5, align="assignment"),
    "fnmf paper": build("fnmf-local", 4, variant="paper", local_steps=5, align="assignment"),
    "fnmf common": build("fnmf-local", 4, local_steps=5, init_mode="shared", align="assignment"),
    "fnmf partial": build("fnmf-local", 4, local_steps=5, client_align=PartialAssignment(), align="assignment"),
    "fnmf soft": build(
        "fnmf-local", 4, local_steps=5, client_align=Sinkhorn(), server_align=Sinkhorn(), align="assignment"
    ),
    "fnmf by sums": build("fnmf-by-sums", 4, local_steps=5),
    "fnmf personal": replace(
        build("fnmf-local", 4, local_steps=5, align="assignment"), synchronization=PersonalComponents()
    ),
    "fedprox": build("fedprox", 4, local_steps=5),
    "ipalm once": build("one-shot-ipalm", 4, local_steps=5),
    "mur once": build("one-shot-mu", 4, local_steps=5),
}


def data(rows=90, columns=24, rank=4, seed=0):
    rng = np.random.default_rng(seed)
    H = rng.gamma(0.3, size=(rank, columns))
    return rng.gamma(0.5, size=(rows, rank)) @ H + 0.02 * rng.random((rows, columns))


def shards_of(X, parties=3, seed=7):
    return [
        Shard(f"p{i:02d}", as_matrix(part), key(seed, "secret", i)) for i, part in enumerate(np.array_split(X, parties))
    ]


def run_rounds(program, shards, rounds=4, engine=Sequential(), reduction=PlainReduction(), **more):
    return list(engine.run(program, shards, Schedule(rounds, 3, **more), reduction=reduction))


@pytest.mark.parametrize("name", PROGRAMS)
def test_engines_agree_and_runs_go_on_bit_for_bit(name):
    shards, program = shards_of(data(), 5), PROGRAMS[name]
    whole = run_rounds(program, shards)
    parallel = run_rounds(program, shards[::-1], engine=Parallel(3))
    for one, other in zip(whole, parallel, strict=True):
        assert_array_equal(one.model["H"], other.model["H"])
    rest = Sequential().run(program, shards, Schedule(4, 3), reduction=PlainReduction(), resume=whole[1].checkpoint)
    for one, other in zip(whole[2:], rest, strict=True):
        assert_array_equal(one.model["H"], other.model["H"])


@pytest.mark.parametrize("name", PROGRAMS)
def test_checkpoints_of_all_programs_can_be_written_and_read(name, tmp_path):
    from partsong.io.state_file import read_state, write_state

    point = run_rounds(PROGRAMS[name], shards_of(data()), 2)[-1].checkpoint
    write_state(tmp_path / "c.ckpt", point)
    again = read_state(tmp_path / "c.ckpt")
    assert again.index == point.index
    assert_array_equal(again.server.model["H"], point.server.model["H"])
    for party, state in point.parties.items():
        assert_array_equal(again.parties[party].W, state.W)
        assert_array_equal(again.parties[party].Ht, state.Ht)


@pytest.mark.parametrize("name", PROGRAMS)
def test_only_declared_arrays_are_sent(name):
    for done in run_rounds(PROGRAMS[name], shards_of(data()), 2, Sequential(record=True)):
        for party, _, message in done.traffic:
            shapes = {array: shape for array, shape, _ in message.signature}
            expected = {"H": (4, 24), "counts": (4,)} if "sums" in name else {"H": (4, 24)}
            assert shapes == expected
            assert done.bytes_up[party] == 8 * sum(int(np.prod(shape)) for shape in expected.values()) + 8
        assert set(done.model.arrays) == {"H", "turn"}


@pytest.mark.parametrize("sweeps", [1, 2, 3])
@pytest.mark.parametrize("align", [Assignment(), PartialAssignment(), Sinkhorn()], ids=lambda a: type(a).__name__)
def test_a_barycenter_by_sums_is_that_of_the_server(sweeps, align):
    shards = shards_of(data(), 5)
    by_sums = build("fnmf-by-sums", 4, align=align, sweeps=sweeps, local_steps=20, init_mode="shared")
    at_server = replace(
        by_sums,
        upload=WholeUpload(),
        sweeps=1,
        aggregation=FixedPoint(align, FromPrevious(), sweeps=sweeps, tol=0),
    )
    many, few = run_rounds(by_sums, shards, 3 * sweeps), run_rounds(at_server, shards, 3)
    for number, done in enumerate(few):
        assert_allclose(many[(number + 1) * sweeps - 1].model["H"], done.model["H"], rtol=1e-9, atol=1e-11)


def test_a_barycenter_by_sums_can_be_masked():
    shards, program = shards_of(data(), 4), build("fnmf-by-sums", 4, local_steps=5)
    assert isinstance(program.aggregation, Reducible)
    plain, masked = run_rounds(program, shards, 6), run_rounds(program, shards, 6, reduction=PairwiseMasks())
    assert_allclose(masked[-1].model["H"], plain[-1].model["H"], rtol=1e-6, atol=1e-8)
    with pytest.raises(CompositionError):
        run_rounds(build("fnmf-local", 4, align="assignment"), shards, 1, reduction=PairwiseMasks())


def test_a_party_that_misses_the_first_sweep_adds_nothing_to_that_round():
    shards, program = shards_of(data(), 3), build("fnmf-by-sums", 4, local_steps=5, sweeps=2)
    late = run_rounds(program, shards, 4, Sequential(record=True), absent={2: frozenset({"p01"})})
    gone = run_rounds(program, shards, 4, absent={2: frozenset({"p01"}), 3: frozenset({"p01"})})
    assert_array_equal(late[3].model["H"], gone[3].model["H"])
    sent = {party: message for party, _, message in late[3].traffic}
    assert not sent["p01"]["H"].any()
    assert not sent["p01"]["counts"].any()


def test_alignment_saves_what_averaging_by_position_destroys():
    """Independent starts and long local phases: three rounds are enough for fnmf, and none for fedavg."""
    X = data(400, 40, 5, seed=3) + 0.1 * np.random.default_rng(1).random((400, 40))
    shards = shards_of(X, 8)
    errors = {}
    for name, program in {
        "exact": build("exact", 5, local_steps=5),
        "fnmf": build("fnmf-local", 5, local_steps=300, align="assignment"),
        "sums": build("fnmf-by-sums", 5, local_steps=300, sweeps=3),
        "fedavg": build("one-shot-ipalm", 5, local_steps=200),
        "fedprox": build("fedprox", 5, local_steps=200),
    }.items():
        H = run_rounds(program, shards, {"exact": 100, "sums": 6}.get(name, 2))[-1].model["H"]
        W = accelerated_hals().solve_rows(as_matrix(X), np.ascontiguousarray(H.T))
        errors[name] = np.linalg.norm(X - W @ H) / np.linalg.norm(X)
    assert errors["fnmf"] < 1.1 * errors["exact"]
    assert errors["sums"] < 1.1 * errors["exact"]
    assert errors["fedavg"] > 2 * errors["exact"]
    assert errors["fedprox"] > 2 * errors["exact"]


def joined(synchronization, own, model, W, X=None):
    shard = Shard("p", as_matrix(data() if X is None else X))
    return synchronization.begin(shard, W, own, model, accelerated_hals())


def test_weights_follow_their_components():
    rng = np.random.default_rng(0)
    model, order = rng.gamma(0.3, size=(24, 4)), [2, 0, 3, 1]
    own, W = model[:, order] + 1e-3, rng.random((90, 4))
    Ht, moved = joined(AdoptModel(follow=Assignment()), own, model, W)
    assert_array_equal(Ht, model)
    assert_allclose(moved @ model.T, W @ model[:, order].T, rtol=1e-12)
    Ht, kept = joined(AdoptModel(), own, model, W)
    assert kept is W
    _, fitted = joined(AdoptModel(follow=Sinkhorn()), own, model, W)
    assert (fitted >= 0).all()
    assert np.linalg.norm(data() - fitted @ model.T) < np.linalg.norm(data() - W @ model.T)


def test_personal_parties_keep_what_is_theirs():
    blocks = (np.kron(np.eye(6), np.ones((1, 4))) + 0.01 * np.random.default_rng(0).random((6, 24))).T
    own, model, W = blocks[:, [5, 0, 1, 2]].copy(), 2 * blocks[:, [0, 1, 2, 3]], np.ones((90, 4))
    Ht, same = joined(PersonalComponents(), own, model, W)
    assert same is W
    assert_allclose(Ht[:, 0], own[:, 0], rtol=1e-12)
    assert_allclose(Ht[:, 1:], 2 * own[:, 1:], rtol=1e-12)


def test_starts_are_what_they_say():
    layout = Layout(("a", "b", "c"), 24, 5)
    shard = Shard("a", as_matrix(data()), 11)
    assert SharedInit().model(layout, 4, stream(5, "start")).shape == (24, 4)
    assert LocalInit().model(layout, 4, stream(5, "start")) is None
    announced = LocalInit(announced=True).model(layout, 4, stream(5, "start"))
    assert 0.4 < announced.mean() < 0.6
    assert announced.std() < 0.2, "a mean of three"
    own = LocalInit().columns(shard, None, 4)
    assert_array_equal(own, LocalInit().columns(shard, announced, 4))
    assert not np.allclose(own, LocalInit().columns(replace(shard, secret=12), None, 4))
    W = LocalInit().weights(shard, own, accelerated_hals())
    assert (W @ own.T).mean() == pytest.approx(data().mean(), rel=0.2)
    server, model = build("fnmf-local", 4, align="assignment").start_server(layout)
    assert "H" not in model.arrays
    assert server.model["H"].shape == (4, 24)


def test_nothing_is_pulled_in_free_rounds():
    shards = shards_of(data())
    free = replace(build("fnmf-local", 4, local_steps=6, init_mode="shared", align="assignment"), uncoupled_rounds=1)
    alone = replace(free, coupling=AlignedProximalTerm(0.0))
    tied = replace(free, uncoupled_rounds=0, coupling=AlignedProximalTerm(5.0))
    assert_allclose(run_rounds(free, shards, 1)[0].model["H"], run_rounds(alone, shards, 1)[0].model["H"], rtol=1e-12)
    assert not np.allclose(run_rounds(tied, shards, 1)[0].model["H"], run_rounds(alone, shards, 1)[0].model["H"])


def test_rows_that_nobody_matched_stay():
    H, before = np.ones((2, 3)), np.full((2, 3), 7.0)
    aggregate = AlignedMean().lower(Message({"H": H * np.array([[4.0], [0.0]]), "counts": np.array([2.0, 0.0])}, 9.0))
    agreed = AlignedUpload().fill_unmatched(aggregate, Message({"H": before}))
    assert_array_equal(agreed["H"], [[2.0] * 3, [7.0] * 3])


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: LocalAveraging(4, steps=0), ParameterError),
        (lambda: LocalAveraging(4, uncoupled_rounds=-1), ParameterError),
        (lambda: LocalAveraging(4, sweeps=2), CompositionError),
        (lambda: LocalAveraging(4, upload=AlignedUpload(), aggregation=Mean()), CompositionError),
        (lambda: LocalAveraging(4, coupling=AlignedProximalTerm(prox="exact")), CompositionError),
        (
            lambda: replace(
                build("fedprox", 4),
                solver=replace(build("fedprox", 4).solver, momentum=Extrapolation()),
                coupling=ProximalTerm(),
            ),
            CompositionError,
        ),
        (lambda: build("fnmf-local", 4, variant="printed", align="assignment"), ParameterError),
    ],
)
def test_what_does_not_go_together_is_refused_at_once(make, error):
    with pytest.raises(error):
        make()


def test_a_late_party_has_no_whole_upload():
    with pytest.raises(PartyError, match="'p'"):
        WholeUpload().message(Shard("p", as_matrix(data())), None, None, True, 4)


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
    plain, memory, _ = NoCoupling().step(rule, own, equations_of(W, X), rule.init(own), ProximalAnchor(model))
    pulled, other, _ = coupling.step(rule, own, equations_of(W, X), rule.init(own), ProximalAnchor(model))
    assert_allclose(pulled, plain, rtol=1e-12, atol=1e-14)
    assert memory.count == other.count == 1


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("align", ALIGNMENTS, ids=repr)
def test_the_printed_form_is_a_weighted_mean_with_the_aligned_model(rule, align):
    W, X, own, model = problem()
    kept = own.copy(), model.copy()
    plain, _ = rule.step(own, equations_of(W, X), rule.init(own))
    pulled, _, anchor = AlignedProximalTerm(0.7, align).step(
        rule, own, equations_of(W, X), rule.init(own), ProximalAnchor(model)
    )
    P = align.plan(own.T, model.T).matrix
    expected = (plain.T + 0.7 * P @ model.T) / (1 + 0.7 * P.sum(axis=1, keepdims=True))
    assert_allclose(pulled.T, expected, rtol=1e-9, atol=1e-12)
    assert (pulled >= 0).all()
    assert_array_equal(own, kept[0])
    assert_array_equal(model, kept[1])
    assert_allclose(anchor.plan.matrix, P)


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
        anchor, Ht, memory = ProximalAnchor(model), own, InertialPalm().init(own)
        for _ in range(6):
            Ht, memory, anchor = AlignedProximalTerm(0.1, Counted(), every=every).step(
                InertialPalm(), Ht, equations_of(W, X), memory, anchor
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


def proximal_problem(seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    A, B, F = rng.random((20, 15)), scale * rng.random((4, 15)), rng.random((20, 4)) / scale
    return NormalEquations.of(A, B), F


def steps(rule, equations, F, count=5):
    state = rule.init(F)
    for _ in range(count):
        F, state = rule.step(F, equations, state)
    return F, state


def test_weights_are_those_of_coordinate_descent_times_the_first_mean_diagonal():
    equations, F = proximal_problem()
    size = np.trace(equations.gram) / 4
    found, state = steps(ProximalDescent(2, 0.3, 0.1), equations, F)
    known, _ = steps(CoordinateDescent(2, 0.3 * size, 0.1 * size), equations, F)
    assert_allclose(found, known, rtol=1e-12)
    assert (state.count, state.scale) == (5, pytest.approx(size))


def test_the_unit_is_that_of_the_first_problem_for_good():
    """Weights that followed each sketch would fall where components grow, and Theorem 1 would not apply."""
    equations, F = proximal_problem()
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
    plain, _ = steps(rule, *proximal_problem())
    scaled, _ = steps(rule, *proximal_problem(scale=scale))
    assert_allclose(scale * scaled, plain, rtol=1e-9)
    absolute = CoordinateDescent(alpha=0.5, beta=0.5)
    assert not np.allclose(
        scale * steps(absolute, *proximal_problem(scale=scale))[0], steps(absolute, *proximal_problem())[0], rtol=0.01
    )


def test_a_problem_without_components_leaves_the_unit_open():
    equations, F = proximal_problem()
    rule = ProximalDescent()
    nothing = NormalEquations(0 * equations.gram, 0 * equations.cross)
    kept, state = rule.step(F, nothing, rule.init(F))
    assert_array_equal(kept, F)
    assert state.scale == 0
    _, state = rule.step(F, equations, state)
    assert state.scale == pytest.approx(np.trace(equations.gram) / 4)


def test_steps_become_smaller_with_growing_weights():
    """After t steps on problems with noise the factor moves by about 1/μ_t."""
    rng, (equations, F) = np.random.default_rng(1), proximal_problem()
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
        with pytest.raises(ParameterError, match="zero or more"):
            converges_when_sketched(*pair)
    warn_unless_convergent(1.0, 0.1)
    with pytest.warns(UserWarning, match=r"alpha = 2.*Use beta > 0"):
        warn_unless_convergent(2.0, 0.0)


class PotentialMeasures(SimulationMeasures):
    """ΣΦ over ½Σ‖X_p‖² as the objective: what the parties of a program with an aligned pull minimise together."""

    def objective(self, done, error):
        states = done.checkpoint.parties
        here = [shard for shard in self.shards if getattr(states.get(shard.name), "Ht", None) is not None]
        weights, own = {n: s.W for n, s in states.items()}, party_components(done.checkpoint)
        H, pull = self.program.components(done.checkpoint.server), self.program.coupling
        found = potential(here, weights, own, H, pull.strength, pull.align)
        return 2 * found / sum(shard.matrix.squared_norm for shard in self.shards)


def following(program, shards, schedule, tol=1e-4):
    """The training of a run that stops on ΣΦ."""
    return run(FederatedFit(program, shards, schedule, StoppingRule(tol), measures=PotentialMeasures(program, shards)))


SUB_STOCHASTIC = PartialSinkhorn(level=0.4, blur=0.5)
ALIGNED = [Assignment(), PartialAssignment(), Sinkhorn(), SUB_STOCHASTIC]


def shards_of_unequal_parties(parties=4):
    rng = np.random.default_rng(2)
    H = rng.gamma(0.4, size=(3, 18))
    rows = [rng.gamma(0.5, size=(20 + i, 3)) @ H + 0.05 * rng.random((20 + i, 18)) for i in range(parties)]
    return [Shard(f"p{i}", as_matrix(X), key(7, i)) for i, X in enumerate(rows)]


def fnmf(align=Assignment(), strength=0.5, steps=15):
    return replace(
        build("fnmf-local", 3, local_steps=steps, align="assignment"),
        coupling=AlignedProximalTerm(strength, align, prox="exact"),
    )


@pytest.mark.parametrize("align", ALIGNED, ids=repr)
def test_it_is_the_sum_of_what_each_party_minimises(align):
    shards, program = shards_of_unequal_parties(), fnmf(align)
    done = list(Sequential().run(program, shards, Schedule(3, 1), reduction=PlainReduction()))[-1]
    H, own = program.components(done.checkpoint.server), party_components(done.checkpoint)
    total = 0.0
    for shard in shards:
        mine, W = own[shard.name], done.checkpoint.parties[shard.name].W
        plan = align.plan(mine, H)
        total += 0.5 * np.square(shard.matrix.X - W @ mine).sum()
        for row, goal, weight in zip(mine, plan.matrix @ H, plan.weights, strict=True):
            total += 0.5 * 0.5 * weight * np.square(row - goal / weight).sum() if weight > 0 else 0.0
    energy = sum(np.square(shard.matrix.X).sum() for shard in shards)
    assert_allclose(PotentialMeasures(program, shards).objective(done, 0.0), 2 * total / energy, rtol=1e-9)


@dataclass(frozen=True)
class Held:
    """The plan that was found before a step, for after it as well."""

    found: Plan
    is_partial = True

    def plan(self, target, source):
        return self.found


@pytest.mark.parametrize("align", ALIGNED, ids=repr)
@pytest.mark.parametrize("strength", [0.5, 2000.0])
def test_no_step_of_a_party_raises_it(align, strength):
    """With the plan of the step: alignments that do not minimise distances may raise it between steps."""
    rng = np.random.default_rng(3)
    shard, rule = shards_of_unequal_parties(1)[0], InertialPalm()
    model = np.random.default_rng(2).gamma(0.4, size=(3, 18)).T + 0.2 * rng.random((18, 3))
    W, Ht = rng.random((20, 3)), 0.1 * (model + rng.random((18, 3)))
    pull, memory, partial = AlignedProximalTerm(strength, align, prox="exact"), rule.init(Ht), []
    for _ in range(60):
        W, _ = rule.step(W, NormalEquations(Ht.T @ Ht, shard.matrix.X @ Ht), rule.init(W))
        equations = NormalEquations(W.T @ W, shard.matrix.X.T @ W)
        after, memory, anchor = pull.step(rule, Ht, equations, memory, ProximalAnchor(model))
        before, then = (
            potential([shard], {"p0": W}, {"p0": one.T}, model.T, strength, Held(anchor.plan)) for one in (Ht, after)
        )
        assert then <= before * (1 + 1e-12)
        Ht = after
        partial += [w for w in anchor.plan.weights if 0.01 < w < 0.99]
    assert bool(partial) == (align == SUB_STOCHASTIC)


def test_a_party_that_cannot_start_adds_nothing_to_it(monkeypatch):
    shards, program, plain = shards_of_unequal_parties(), fnmf(), LocalAveraging.start_party

    def start_party(self, shard, layout):
        if shard.name == "p1":
            raise DataError("The disk of p1 is gone.")
        return plain(self, shard, layout)

    absent = following(program, shards, Schedule(3, 1, absent={i: frozenset({"p1"}) for i in range(3)}))
    monkeypatch.setattr(LocalAveraging, "start_party", start_party)
    unwell = following(program, shards, Schedule(3, 1, on_party_error="skip"))
    assert [row.objective for row in unwell.history] == [row.objective for row in absent.history]


def test_it_settles_and_a_run_stops_on_it():
    shards, program = shards_of_unequal_parties(), fnmf(steps=40)
    settled = following(program, shards, Schedule(400, 1))
    assert settled.outcome is Outcome.CONVERGED
    potentials = [row.objective for row in settled.history]
    assert 6 < len(potentials) < 400
    assert potentials[-1] < potentials[0]
    assert_allclose(potentials[-5:], potentials[-1], rtol=1e-3)
    longer = following(program, shards, Schedule(len(potentials) + 20, 1), tol=0)
    assert longer.history[-1].objective <= potentials[-1] * (1 + 1e-3)
