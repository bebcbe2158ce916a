"""FNMF (Dalleiger & Gionis, 2025): long local phases; components are matched before they are averaged."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from partsong.aggregation.alignment import ALIGNMENTS, Assignment, Sinkhorn
from partsong.aggregation.barycenter import BARYCENTERS, FixedPoint, FromMean, FromPrevious, FuzzyCMeans, KMeans
from partsong.aggregation.linear import AlignedMean
from partsong.core.interfaces import Aggregation, Alignment
from partsong.core.parameters import AtLeast, Choice, Steps, Whole
from partsong.methods.averaging import AdoptModel, AlignedUpload, LocalAveraging, PersonalComponents
from partsong.methods.init_modes import LOCAL_INIT, InitMode, LocalInit
from partsong.methods.registry import Problem, TopicConfig, method
from partsong.methods.two_stage import TwoStageProgram, exact_after
from partsong.solvers.coupling import AlignedProximalTerm
from partsong.solvers.squared_error import SquaredError
from partsong.solvers.update_rules import InertialPalm

LONG_ROUNDS = 1
"""Rounds of "fnmf" before the exact ones (docs/results/fnmf.md, decision 11)."""

PAPER, ROBUST, PERSONAL = "paper", "robust", "personal"

Align = Annotated[Alignment, ALIGNMENTS]
OwnAlign = Annotated[Alignment | None, ALIGNMENTS]
Variant = Annotated[str, Choice.of(ROBUST, PAPER)]
Barycenters = Annotated[type, BARYCENTERS]
Synchronization = Annotated[str, Choice.of("overwrite", PERSONAL)]
Strength = Annotated[float | None, AtLeast(0)]
Every = Annotated[int | None, Whole()]


@method("fnmf-local", compared_rounds=10, privacy=("party",))
def fnmf_local(
    problem: Problem,
    *,
    align: Align = Sinkhorn(),
    client_align: OwnAlign = None,
    server_align: OwnAlign = None,
    local_steps: Steps = 100,
    strength: Strength = None,
    every: Every = None,
    variant: Variant = ROBUST,
    barycenter: Barycenters = FixedPoint,
    synchronization: Synchronization = "overwrite",
    init_mode: InitMode = LOCAL_INIT,
) -> LocalAveraging:
    """Parties iterate for long local phases; the server matches their components before averaging.

    Parties run iPALM with a proximal term of weight `strength` towards the shared H, in the order that `client_align`
    finds again after `every` steps. The server takes the `barycenter` of all H_p under `server_align`; `align` sets
    both. Parties start with components in different orders, which three details of the printed algorithm ignore.
    `variant="robust"` therefore permutes W along with its components when H is overwritten, adds the proximal term
    from the second round on, and starts the barycenter from the previous model. `"paper"` does none of these.

    With `synchronization="personal"`, components with a partner in the shared model take its values, in the party's
    order, and the others are kept: better for local models, worse for the shared one.

    Sent per round and party: H_p (k × m) and n_p. Never sent: X_p, W_p.
    """
    is_paper = variant == PAPER
    at_party, at_server = client_align or align, server_align or align
    if isinstance(init_mode, LocalInit):
        init_mode = replace(init_mode, announced=is_paper)
    pull = strength if strength is not None else 0.01 if is_paper else 0.1
    pause = every if every is not None else 1 if is_paper else 25
    overwrite = AdoptModel() if is_paper else AdoptModel(follow=at_server)
    return LocalAveraging(
        problem.rank,
        SquaredError(InertialPalm()),
        local_steps,
        init_mode,
        _barycenter(barycenter, at_server, is_paper),
        coupling=AlignedProximalTerm(pull, at_party, every=pause),
        synchronization=PersonalComponents() if synchronization == PERSONAL else overwrite,
        uncoupled_rounds=0 if is_paper else 1,
    )


def _barycenter(kind: Any, align: Alignment, is_paper: bool) -> Aggregation:
    """The aggregation of this kind; clustering needs no alignment."""
    if kind is FixedPoint:
        return FixedPoint(align, FromMean() if is_paper else FromPrevious())
    made: Aggregation = kind() if kind in (KMeans, FuzzyCMeans) else kind(align)
    return made


@method("fnmf", extends=fnmf_local, texts=TopicConfig(rounds=200))
def fnmf(problem: Problem, *, align: Align = Assignment(), **options: Any) -> TwoStageProgram:
    """One round of fnmf-local, then exact rounds.

    Sent per party: H_p (k × m) and n_p in the first round; then WᵀW (k × k), WᵀX (k × m), n_p and ‖X_p‖² per round.
    Never sent: X_p, W_p.
    """
    return exact_after(fnmf_local(problem, align=align, **options), LONG_ROUNDS)


@method("fnmf-paper", extends=fnmf_local, without=("variant",), compared_rounds=10, privacy=("party",))
def fnmf_paper(problem: Problem, *, align: Align = Assignment(), **options: Any) -> LocalAveraging:
    """Like fnmf-local, exactly as the paper prints it.

    Sent per round and party: H_p (k × m) and n_p. Never sent: X_p, W_p.
    """
    return fnmf_local(problem, align=align, variant=PAPER, **options)


@method("fnmf-personal", extends=fnmf_local, without=("synchronization", "variant"), compared_rounds=10)
def fnmf_personal(problem: Problem, **options: Any) -> LocalAveraging:
    """Like fnmf-local, but each party keeps its components without a partner in the shared model.

    Sent per round and party: H_p (k × m) and n_p. Never sent: X_p, W_p.
    """
    return fnmf_local(problem, synchronization=PERSONAL, **options)


@method(
    "fnmf-by-sums",
    extends=fnmf_local,
    without=("client_align", "server_align", "barycenter", "synchronization"),
    compared_rounds=10,
    counts_exchanges=True,
)
def fnmf_by_sums(problem: Problem, *, align: Align = Assignment(), sweeps: Steps = 2, **options: Any) -> LocalAveraging:
    """Like fnmf-local, but parties align their own H_p, so the barycenter is a sum and can be masked.

    A round takes `sweeps` exchanges; parties iterate in the first only. Sent per exchange and party: P_p H_p (k × m)
    and the counts P_p 1 (k). Never sent: X_p, W_p.
    """
    seen = fnmf_local(problem, align=align, **options)
    return replace(seen, aggregation=AlignedMean(), upload=AlignedUpload(align), sweeps=sweeps)
