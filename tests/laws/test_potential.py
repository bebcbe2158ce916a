"""Laws of what the parties of FNMF minimise together."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.testing import assert_allclose

from partsong.aggregation.alignment import Assignment, PartialAssignment, PartialSinkhorn, Sinkhorn
from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Outcome, Plan, Schedule, Shard
from partsong.core.streams import key
from partsong.data.conversion import as_matrix
from partsong.engines.local import Sequential
from partsong.errors import DataError
from partsong.evaluation.metrics import potential
from partsong.methods import build
from partsong.methods.averaging import LocalAveraging
from partsong.solvers.coupling import AlignedProximalTerm, ProximalAnchor
from partsong.solvers.normal_equations import NormalEquations
from partsong.solvers.update_rules import InertialPalm
from partsong.training.loop import StoppingRule, run
from partsong.training.simulation import FederatedFit, SimulationMeasures, party_components


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
ALIGNMENTS = [Assignment(), PartialAssignment(), Sinkhorn(), SUB_STOCHASTIC]


def shards_of(parties=4):
    rng = np.random.default_rng(2)
    H = rng.gamma(0.4, size=(3, 18))
    rows = [rng.gamma(0.5, size=(20 + i, 3)) @ H + 0.05 * rng.random((20 + i, 18)) for i in range(parties)]
    return [Shard(f"p{i}", as_matrix(X), key(7, i)) for i, X in enumerate(rows)]


def fnmf(align=Assignment(), strength=0.5, steps=15):
    return replace(
        build("fnmf-local", 3, local_steps=steps, align="assignment"),
        coupling=AlignedProximalTerm(strength, align, prox="exact"),
    )


@pytest.mark.parametrize("align", ALIGNMENTS, ids=repr)
def test_it_is_the_sum_of_what_each_party_minimises(align):
    shards, program = shards_of(), fnmf(align)
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


@pytest.mark.parametrize("align", ALIGNMENTS, ids=repr)
@pytest.mark.parametrize("strength", [0.5, 2000.0])
def test_no_step_of_a_party_raises_it(align, strength):
    """With the plan of the step: alignments that do not minimise distances may raise it between steps."""
    rng = np.random.default_rng(3)
    shard, rule = shards_of(1)[0], InertialPalm()
    model = np.random.default_rng(2).gamma(0.4, size=(3, 18)).T + 0.2 * rng.random((18, 3))
    W, Ht = rng.random((20, 3)), 0.1 * (model + rng.random((18, 3)))
    pull, memory, partial = AlignedProximalTerm(strength, align, prox="exact"), rule.init(Ht), []
    for _ in range(60):
        W, _ = rule.step(W, NormalEquations(Ht.T @ Ht, shard.matrix.X @ Ht), rule.init(W))
        equations = NormalEquations(W.T @ W, shard.matrix.X.T @ W)
        after, memory, tether = pull.step(rule, Ht, equations, memory, ProximalAnchor(model))
        before, then = (
            potential([shard], {"p0": W}, {"p0": one.T}, model.T, strength, Held(tether.plan)) for one in (Ht, after)
        )
        assert then <= before * (1 + 1e-12)
        Ht = after
        partial += [w for w in tether.plan.weights if 0.01 < w < 0.99]
    assert bool(partial) == (align == SUB_STOCHASTIC)


def test_a_party_that_cannot_start_adds_nothing_to_it(monkeypatch):
    shards, program, plain = shards_of(), fnmf(), LocalAveraging.start_party

    def start_party(self, shard, layout):
        if shard.name == "p1":
            raise DataError("The disk of p1 is gone.")
        return plain(self, shard, layout)

    absent = following(program, shards, Schedule(3, 1, absent={i: frozenset({"p1"}) for i in range(3)}))
    monkeypatch.setattr(LocalAveraging, "start_party", start_party)
    unwell = following(program, shards, Schedule(3, 1, on_party_error="skip"))
    assert [row.objective for row in unwell.history] == [row.objective for row in absent.history]


def test_it_settles_and_a_run_stops_on_it():
    shards, program = shards_of(), fnmf(steps=40)
    settled = following(program, shards, Schedule(400, 1))
    assert settled.outcome is Outcome.CONVERGED
    potentials = [row.objective for row in settled.history]
    assert 6 < len(potentials) < 400
    assert potentials[-1] < potentials[0]
    assert_allclose(potentials[-5:], potentials[-1], rtol=1e-3)
    longer = following(program, shards, Schedule(len(potentials) + 20, 1), tol=0)
    assert longer.history[-1].objective <= potentials[-1] * (1 + 1e-3)
