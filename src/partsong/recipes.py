"""Famous names, spelled as compositions of parts."""

from __future__ import annotations

from dataclasses import replace

from partsong.aggregate.linear import Mean, WeightedMean
from partsong.core import UpdateRule
from partsong.local.alternate import Alternate
from partsong.local.coordinate import CoordinateDescent
from partsong.local.equations import Penalty
from partsong.local.gradient import InertialPalm, ProjectedGradient
from partsong.local.momentum import Extrapolation, NoExtrapolation
from partsong.local.multiplicative import Multiplicative
from partsong.local.pivoting import BlockPivoting
from partsong.programs.consensus import CommonStart, Consensus, IndependentStart
from partsong.programs.shared_statistics import SharedStatistics

SWEEPS = 5
"""Sweeps per product; chosen together with the extrapolation on generated data (benchmarks/tuning.py)."""


def accelerated_hals(penalty_W: Penalty = Penalty(), penalty_H: Penalty = Penalty()) -> Alternate:
    """HALS with several sweeps per product and extrapolation with restart: the default solver of `NMF`."""
    return Alternate(CoordinateDescent(sweeps=SWEEPS), penalty_W, penalty_H, Extrapolation())


def plain(rule: UpdateRule, penalty_W: Penalty = Penalty(), penalty_H: Penalty = Penalty()) -> Alternate:
    """One step of a rule per factor and iteration, nothing else."""
    return Alternate(rule, penalty_W, penalty_H, NoExtrapolation())


def solver_rules() -> dict[str, UpdateRule]:
    """The rules behind `NMF(solver=…)`, one step per product unless its name says otherwise."""
    return {
        "hals": CoordinateDescent(sweeps=SWEEPS),
        "cd": CoordinateDescent(),
        "mu": Multiplicative(),
        "pg": ProjectedGradient(),
        "ipalm": InertialPalm(inertia=0.3),
        "bpp": BlockPivoting(),
    }


def shared_statistics(rank: int, *, sweeps: int = SWEEPS, accelerate: bool = False) -> SharedStatistics:
    """Exactly the pooled factorization from sums of gram and cross; `accelerate` extrapolates both factors.

    Sent per round and party: WᵀW (k × k), WᵀX (k × m), three totals. Never sent: X_p, W_p.
    """
    solver = plain(CoordinateDescent(sweeps=sweeps))
    return SharedStatistics(rank, replace(solver, momentum=Extrapolation()) if accelerate else solver)


def fedavg(rank: int, *, steps: int = 10, weighted: bool = True, independent: bool = False) -> Consensus:
    """Local HALS, then the average of H by position (McMahan et al., 2017, applied to NMF).

    Sent per round and party: H_p (k × m) and the number of rows. Never sent: X_p, W_p.
    """
    return Consensus(
        rank,
        plain(CoordinateDescent()),
        steps,
        IndependentStart() if independent else CommonStart(),
        WeightedMean() if weighted else Mean(),
    )


def local_only(rank: int, *, steps: int = 100) -> Consensus:
    """Every party factorizes alone from its own start, and the H_p are averaged once: what not to do."""
    return fedavg(rank, steps=steps, independent=True)
