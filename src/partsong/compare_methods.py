"""`partsong.compare`: local-only, federated and pooled models of the same parties, in simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong import recipes
from partsong.compare_alone import contest_alone
from partsong.compare_result import Comparison
from partsong.comparison import Contestant, contest, warm_up
from partsong.core import Outcome, Shard
from partsong.data.form import is_tensor
from partsong.data.matrix import as_matrix
from partsong.data.sparse import SparseMatrix
from partsong.errors import ParameterError
from partsong.evaluate.findings import MethodFindings
from partsong.federated import FederatedNMF
from partsong.methods import ALIGNMENT, LOCAL_STEPS, METHODS, ONE_ROUND, STARTS, start_of
from partsong.parties import by_party, shards_of
from partsong.progress import progress
from partsong.settings import alignment_of, one_of, precision_of, program_of, rank_of, require_verbosity, whole_number
from partsong.streams import key
from partsong.validation import whole_seed

LOCAL, POOLED = "local", "pooled"
COMPARABLE = (LOCAL, *METHODS, POOLED)
ROUNDS = {"fnmf-alone": 10}
"""Rounds of methods that do not take 100: its parties iterate long in each."""

DESCRIPTIONS = {
    LOCAL: "Every party factorizes its own rows and shares nothing: one model for each.",
    "fedavg": "Parties iterate from the shared H, which is then averaged by position.",
    "fedprox": "As fedavg, while parties are pulled to the shared H.",
    "fnmf-alone": "Parties iterate long and alone; which component is which is found out before averaging.",
    "fnmf": "One round as fnmf-alone, then WᵀW and WᵀX as exact.",
    "ipalm-once": "Every party iterates alone; components are averaged once, by position.",
    "mur-once": "As ipalm-once, by multiplicative updates.",
    "exact": "Parties send WᵀW and WᵀX; the sums give exactly the pooled factorization.",
    POOLED: "All rows in one place: what nobody is allowed to do.",
}

SAME_ITERATION = (LOCAL, "exact", POOLED)
"""One iteration on the rows of each party, of all, and of all in one place; asked for by the name "exact"."""

PerMethod = int | Mapping[str, int] | None


@dataclass(frozen=True, slots=True)
class Numbers:
    """Rounds and local steps of the methods that do not take their own."""

    rounds: Mapping[str, int]
    local_steps: Mapping[str, int]

    def rounds_of(self, name: str) -> int:
        """Exchanges, or iterations where nothing is exchanged."""
        iteration = "exact" if name in SAME_ITERATION else name
        return 1 if name in ONE_ROUND else self.rounds.get(iteration, ROUNDS.get(iteration, 100))

    def steps_of(self, name: str) -> int:
        """Sweeps or iterations between two exchanges."""
        iteration = "exact" if name in SAME_ITERATION else name
        return self.local_steps.get(iteration, LOCAL_STEPS[iteration])


def compare(
    X: Any,
    n_components: int | None = None,
    methods: Sequence[str] = (LOCAL, "fedavg", "fnmf", "exact", POOLED),
    *,
    parties: Sequence[Any] | None = None,
    names: Sequence[str] | None = None,
    rounds: PerMethod = None,
    local_steps: PerMethod = None,
    start: str | None = None,
    random_state: Any = None,
    dtype: Any = None,
    verbose: int = 0,
) -> Comparison:
    """What parties would reach alone, together, and if they pooled their rows.

    All methods have the same rank, the same seed and all their rounds, without early stopping. "local", "exact" and
    "pooled" are the same iteration on each party's own, all and stacked rows, from the same H; methods with a common
    start begin with that H as well. With independent starts ("fnmf" and "fnmf-alone" unless told otherwise) every party
    draws its own, the same for every such method. Pooling needs memory for a second copy of all rows.

    Parameters
    ----------
    X, parties, names :
        As in `FederatedNMF.fit`: a list with one matrix per party, or one matrix and a label for each row.
    n_components : int or None
        The rank of every model; None is min(n, m, 20) over all rows.
    methods : sequence of names
        Of "local", "pooled" and the methods of `FederatedNMF`.
    rounds, local_steps : int, mapping from methods to int, or None
        As in `FederatedNMF`; None is 100 rounds ("fnmf-alone": 10), and the method's own local steps. One number of
        rounds is for all methods, one number of local steps for those that average. "local" and "pooled" iterate as
        "exact" does.
    start : {"common", "independent"} or None
        For methods that average; None: as the method does.
    random_state, dtype, verbose :
        As in `FederatedNMF`.
    """
    _require_methods(methods)
    numbers = Numbers(_each("rounds", rounds, methods), _each("local_steps", local_steps, methods))
    if start is not None:
        one_of("start", start, STARTS)
    require_verbosity(verbose)
    seed, precision = whole_seed(random_state), precision_of(dtype)
    if parties is not None:
        X, names = by_party(X, parties, names)
    columns = FederatedNMF()
    shards = shards_of(columns, X, names, seed, precision)
    rank = rank_of(n_components, (sum(s.matrix.shape[0] for s in shards), shards[0].matrix.shape[1]))
    entered = [_contestant(name, rank, numbers, start) for name in methods]
    warm_up((contestant.program for contestant in entered), shards)
    found = _contest_all(entered, shards, seed, verbose)
    feature_names = getattr(columns, "feature_names_in_", None)
    steps = {name: numbers.rounds_of(name) if name == LOCAL else numbers.steps_of(name) for name in methods}
    return Comparison(found, rank, seed, steps, None if feature_names is None else tuple(map(str, feature_names)))


def _contest_all(
    entered: Sequence[Contestant], shards: list[Shard], seed: int, verbose: int
) -> tuple[MethodFindings, ...]:
    """Method by method; those after an interrupt are left out."""
    found: list[MethodFindings] = []
    for contestant in entered:
        with progress(verbose, contestant.rounds, None, contestant.name) as watch:
            if contestant.name == LOCAL:
                found.append(contest_alone(contestant, shards, seed))
            else:
                found.append(contest(contestant, shards, seed, watch, pooled(shards) if contestant.is_oracle else None))
        if found[-1].outcome == Outcome.INTERRUPTED:
            break
    return tuple(found)


def _contestant(name: str, rank: int, numbers: Numbers, start: str | None) -> Contestant:
    steps, rounds = numbers.steps_of(name), numbers.rounds_of(name)
    if name in SAME_ITERATION:
        program: Any = recipes.shared_statistics(rank, sweeps=steps)
        return Contestant(name, DESCRIPTIONS[name], program, rounds, is_oracle=name == POOLED)
    begun = start_of(name, start)
    align = alignment_of(ALIGNMENT)
    program = program_of(name, rank, steps=steps, align=align, independent=begun == "independent")
    return Contestant(name, DESCRIPTIONS[name], program, rounds, begun)


def pooled(shards: Sequence[Shard]) -> Shard:
    """All rows in one place, in the order of the parties; sparse where one of them is."""
    matrices: list[Any] = [shard.matrix for shard in shards]
    dtype = None if is_tensor(matrices[0].X if hasattr(matrices[0], "X") else None) else matrices[0].dtype
    if any(isinstance(matrix, SparseMatrix) for matrix in matrices):
        from scipy.sparse import csr_array, vstack

        stacked: Any = vstack([m.by_row if isinstance(m, SparseMatrix) else csr_array(m.X) for m in matrices], "csr")
    elif dtype is None:
        import torch

        stacked = torch.cat([matrix.X for matrix in matrices])
    else:
        stacked = np.concatenate([matrix.X for matrix in matrices])
    return Shard("everyone", as_matrix(stacked, dtype), key(0, "secret", "everyone"))


def _require_methods(methods: Any) -> None:
    if isinstance(methods, str) or not isinstance(methods, Sequence) or not methods:
        raise ParameterError(f"methods must be a list of names such as {COMPARABLE[:3]}; got {methods!r}.")
    for name in methods:
        one_of("method", name, COMPARABLE)
    if len(set(methods)) < len(methods):
        raise ParameterError(f"Methods can be compared once each; got {tuple(methods)!r}.")


def _each(setting: str, value: Any, methods: Sequence[str]) -> dict[str, int]:
    """A number for every method that it is for, checked."""
    if value is None:
        return {}
    known = dict.fromkeys("exact" if name in SAME_ITERATION else name for name in methods)
    if not isinstance(value, Mapping):
        number = whole_number(setting, value, " (or a number for each method)")
        return {name: number for name in known if setting == "rounds" or name != "exact"}
    unknown = [str(name) for name in value if name not in known]
    if unknown:
        raise ParameterError(
            f"{setting} names {', '.join(unknown)}; the methods here are {', '.join(known)} "
            '("exact" is for local and pooled as well).'
        )
    return {name: whole_number(f"{setting}[{name!r}]", number) for name, number in value.items()}
