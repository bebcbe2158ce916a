"""Federated methods by the names in the logs, their execution and their errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.shared.metrics import distances, rmsd_sum
from experiments.shared.names import INIT_MODES
from partsong.aggregation.alignment import Assignment, PartialAssignment, PartialSinkhorn, Sinkhorn
from partsong.aggregation.linear import Mean
from partsong.aggregation.plaintext import PlainReduction
from partsong.core import runtime
from partsong.core.interfaces import Round, Schedule, Shard
from partsong.core.streams import key, stream
from partsong.data.conversion import as_matrix
from partsong.data.partition import iid
from partsong.engines.local import Parallel
from partsong.estimators.parties import party_names
from partsong.methods import build
from partsong.methods.two_stage import exact_after
from partsong.solvers.coupling import AlignedProximalTerm

ALIGNMENTS = {
    "LAP": Assignment(),
    "LAP_ρ": PartialAssignment(),
    "SK": Sinkhorn(),
    "SK_ρ": PartialSinkhorn(),
}
EVERY = 25
"""Steps between alignments at a party; 5, 10 or 50 change results on three sets by less than 0.1 %."""
POLISH = 10
"""Exact rounds at the end of a mixture."""

Make = Callable[[int, int, float, str], Any]
"""Builds a program from rank, local steps, strength of the pull, and start (as in the logs)."""


def shards_of(matrices: Sequence[Any], seed: int) -> list[Shard]:
    """Build one shard per matrix."""
    names = party_names(len(matrices))
    return [Shard(name, as_matrix(X), key(seed, "secret", name)) for name, X in zip(names, matrices, strict=True)]


def shares_iid(X: Any, parties: int, seed: int) -> list[Any]:
    """Split rows into equal random shares, the same for all methods of a seed."""
    return [X[rows] for rows in iid(X.shape[0], parties, stream(seed, "split"))]


def _plain(rank: int, steps: int, strength: float, start: str) -> Any:
    return replace(build("one-shot-ipalm", rank, local_steps=steps, init_mode=INIT_MODES[start]), aggregation=Mean())


def _multiplicative(rank: int, steps: int, strength: float, start: str) -> Any:
    return replace(build("one-shot-mu", rank, local_steps=steps, init_mode=INIT_MODES[start]), aggregation=Mean())


def _prox(rank: int, steps: int, strength: float, start: str) -> Any:
    made = build("fedprox", rank, strength=strength, local_steps=steps, init_mode=INIT_MODES[start])
    return replace(made, aggregation=Mean())


def _aligned(name: str, variant: str) -> Make:
    def make(rank: int, steps: int, strength: float, start: str) -> Any:
        align, whole = ALIGNMENTS[name], ALIGNMENTS[name.removesuffix("_ρ")]
        made = build(
            "fnmf-local",
            rank,
            variant=variant,
            client_align=align,
            server_align=whole,
            strength=strength,
            local_steps=steps,
            init_mode=INIT_MODES[start],
            align="assignment",
        )
        return replace(made, coupling=AlignedProximalTerm(strength, align, every=EVERY))

    return make


ONCE: Mapping[str, Make] = {"iPALM once": _plain, "MUR once": _multiplicative}
"""Averaged once, after as many steps as all others make in all their rounds."""
IN_ROUNDS: Mapping[str, Make] = {
    "FedAvg": _plain,
    "FedProx": _prox,
    "FNMF-LAP (paper)": _aligned("LAP", "paper"),
    **{f"FNMF-{name}": _aligned(name, "robust") for name in ALIGNMENTS},
}
"""All with the same local solver (iPALM without inertia) and uniform averages, as in the paper."""
WITH_STRENGTH = tuple(name for name in IN_ROUNDS if name != "FedAvg")
MIXTURES: Mapping[str, tuple[str, int]] = {
    f"FNMF-LAP, then {POLISH} exact rounds": ("FNMF-LAP", 0),
    f"FNMF-SK, then {POLISH} exact rounds": ("FNMF-SK", 0),
    "FNMF-SK once, exact in all other rounds": ("FNMF-SK", 1),
    "FNMF-SK twice, exact in all other rounds": ("FNMF-SK", 2),
    "FNMF-LAP once, exact in all other rounds": ("FNMF-LAP", 1),
}
"""First stage of a two-stage method, and its rounds (0: all rounds, with exact ones added)."""
EXACT = ("exact, as many rounds", "exact, as many rounds as the mixture", "exact, to the end")


@dataclass(frozen=True, slots=True)
class Result:
    """Σ RMSD with weights refitted to the final H, optionally of each round, seconds, bytes per party."""

    rmsd_sum: float
    seconds: float
    bytes_up: float
    curve: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Budget:
    """Local steps per round, and number of rounds."""

    steps: int
    rounds: int

    @property
    def total(self) -> int:
        """All local steps."""
        return self.steps * self.rounds


def perform(
    method: str,
    matrices: Sequence[Any],
    rank: int,
    budget: Budget,
    *,
    strength: float,
    start: str,
    seed: int,
    with_curve: bool = False,
) -> Result:
    """Run a method by name for all its rounds, and measure its final model."""
    shards = shards_of(matrices, seed)
    if method == "pooled":
        return _pooled(matrices, shards, rank, seed)
    if method in EXACT:
        rounds = (budget.rounds, budget.rounds + POLISH, max(200, budget.total // 5))[EXACT.index(method)]
        return _measured(_rounds(_exact(rank), shards, rounds, seed), _exact(rank), shards, with_curve)
    if method in ONCE:
        program = ONCE[method](rank, budget.total, strength, start)
        return _measured(_rounds(program, shards, 1, seed), program, shards, False)
    begins_with, leg = MIXTURES.get(method, (method, 0))
    program, rounds = IN_ROUNDS[begins_with](rank, budget.steps, strength, start), budget.rounds
    if method in MIXTURES:
        program, rounds = exact_after(program, leg or rounds), rounds if leg else rounds + POLISH
    return _measured(_rounds(program, shards, rounds, seed), program, shards, with_curve)


def _exact(rank: int) -> Any:
    return build("exact", rank, accelerate=True, local_steps=5)


def _rounds(program: Any, shards: Sequence[Shard], rounds: int, seed: int) -> Iterator[tuple[Round, Any]]:
    for done in Parallel().run(program, shards, Schedule(rounds, seed), reduction=PlainReduction()):
        yield done, program.components(done.checkpoint.server)


def _measured(rounds: Iterator[tuple[Round, Any]], program: Any, shards: Sequence[Shard], with_curve: bool) -> Result:
    seconds, sent, curve, H = 0.0, 0.0, [], None
    for done, H in rounds:
        seconds += done.seconds
        sent += sum(done.bytes_up.values()) / len(shards)
        if with_curve:
            curve.append(_rmsd_sum(shards, H, program))
    return Result(_rmsd_sum(shards, H, program), seconds, sent, tuple(curve))


def _rmsd_sum(shards: Sequence[Shard], H: Any, program: Any) -> float:
    with runtime.limit_kernel_threads(runtime.available_threads()):
        return rmsd_sum(shards, distances(shards, H, program.solver))


def _pooled(matrices: Sequence[Any], shards: Sequence[Shard], rank: int, seed: int, iterations: int = 300) -> Result:
    """Pooled NMF of all rows, measured at the same parties."""
    from partsong import NMF

    began = time.perf_counter()
    model = NMF(rank, init="random", random_state=seed, max_iter=iterations, tol=1e-6).fit(_stacked(matrices))
    seconds = time.perf_counter() - began
    return Result(_rmsd_sum(shards, model.components_, _exact(rank)), seconds, 0.0)


def _stacked(matrices: Sequence[Any]) -> Any:
    import numpy as np
    from scipy import sparse

    return sparse.vstack(matrices).tocsr() if sparse.issparse(matrices[0]) else np.concatenate(list(matrices))
