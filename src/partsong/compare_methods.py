"""`partsong.compare`: local-only, federated and pooled models of the same parties, in simulation."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partsong import recipes
from partsong.compare_alone import contest_alone, pooled
from partsong.compare_result import Comparison, IncompleteWarning
from partsong.comparison import Contestant, contest, warm_up
from partsong.core import Outcome, Round, Shard
from partsong.errors import ParameterError, ShapeError
from partsong.evaluate.findings import MethodFindings
from partsong.federated import FederatedNMF
from partsong.interrupts import Interrupts, held
from partsong.leaving_out import FAULTY, LEAVE_OUT, STOP, Attendance
from partsong.methods import LOCAL_STEPS, METHODS, ONE_ROUND, STARTS, alignment_for, start_of
from partsong.parties import by_party, named_parties, shards_of, sound_parties
from partsong.progress import Watch, progress
from partsong.running import HistoryRow
from partsong.settings import alignment_of, one_of, precision_of, program_of, rank_of, require_verbosity, whole_number
from partsong.validation import whole_seed

LOCAL, POOLED = "local", "pooled"
COMPARABLE = (LOCAL, *METHODS, POOLED)
ROUNDS = {"fnmf-alone": 10}
"""Rounds of methods that do not take 100: its parties iterate long in each."""
BASELINE_ITERATIONS = 100
"""The fewest of "local" and "pooled" where nobody names their own: few rounds of others do not cut references short."""

DESCRIPTIONS = {
    LOCAL: "Every party factorizes its own rows and shares nothing: one model for each.",
    "fedavg": "Parties iterate from the shared H, which is then averaged by position.",
    "fedprox": "As fedavg, while parties are pulled to the shared H.",
    "fnmf-alone": "Parties iterate long and alone; which component is which is found out before averaging.",
    "fnmf": "One round as fnmf-alone, then WᵀW and WᵀX as exact.",
    "ipalm-once": "Every party iterates alone; components are averaged once, by position.",
    "mur-once": "As ipalm-once, by multiplicative updates.",
    "syn-sd": "As fedavg, with steps that are held back more and more.",
    "syn-ssd-u": "As syn-sd, while W fits a sketch of the mean of all H in every step.",
    "syn-ssd-v": "As syn-sd, while W fits the mean of all H in every step, and steps of H are sketched.",
    "syn-ssd-uv": "As syn-sd, while W fits a sketch of the mean of all H in every step, and steps of H are sketched.",
    "asyn-sd": "As syn-sd, but no party waits for another: the server moves towards each H as it comes.",
    "asyn-ssd-v": "As asyn-sd, with sketched steps of H.",
    "game": "Rows play single cells with columns, which travel from party to party; a round is a sweep.",
    "exact": "Parties send WᵀW and WᵀX; the sums give exactly what as many iterations on pooled rows would.",
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
        if name in (LOCAL, POOLED) and name not in self.rounds:
            return max(BASELINE_ITERATIONS, self.rounds_of("exact"))
        return 1 if name in ONE_ROUND else self.rounds.get(name, ROUNDS.get(name, 100))

    def steps_of(self, name: str) -> int:
        """Sweeps or iterations between two exchanges."""
        iteration = "exact" if name in SAME_ITERATION else name
        return self.local_steps.get(iteration, LOCAL_STEPS[iteration])


def compare(
    X: Any,
    n_components: int | None = None,
    methods: Sequence[str] = (LOCAL, "fedavg", "fnmf", "exact", POOLED),
    *,
    parties: Any = None,
    names: Sequence[str] | None = None,
    rounds: PerMethod = None,
    local_steps: PerMethod = None,
    start: str | None = None,
    random_state: Any = None,
    dtype: Any = None,
    faulty: str = STOP,
    verbose: int = 0,
) -> Comparison:
    """What parties would reach alone, together, and if they pooled their rows.

    All methods have the same rank, the same seed and all their rounds, without early stopping. "local", "exact" and
    "pooled" are the same iteration on each party's own, all and stacked rows, from the same H, so that "exact" is
    "pooled" after equally many; methods with a common start begin with that H as well. With independent starts
    ("fnmf" and "fnmf-alone" unless told otherwise) every party draws its own, the same for every such method. Pooling
    needs memory for a second copy of all rows.

    The first Ctrl-C ends the round, and what was found so far is returned with an `IncompleteWarning`: `missing` names
    the methods that were not begun, and the `outcome` of a row that was broken off is "interrupted". A second one, or
    one before the first method, raises KeyboardInterrupt.

    Parameters
    ----------
    X, parties, names :
        As in `FederatedNMF.fit`: a list with one matrix per party, a mapping of names to matrices, or one matrix and a
        label for each row.
    n_components : int or None
        The rank of every model; None is min(n, m, 20) over all rows.
    methods : sequence of names
        Of "local", "pooled" and the methods of `FederatedNMF`.
    rounds, local_steps : int, mapping from methods to int, or None
        As in `FederatedNMF`; None is 100 rounds ("fnmf-alone": 10), and the method's own local steps. One number of
        rounds is for all methods, one number of local steps for those that average. "local" and "pooled" are what
        others are measured by: they iterate as often as "exact" and at least 100 times, so that few rounds do not cut
        them short, unless a mapping of rounds names them; their local steps are those of "exact".
    start : {"common", "independent"} or None
        For methods that average; None: as the method does.
    random_state, dtype, verbose, faulty :
        As in `FederatedNMF`; with faulty="leave out" a party whose data cannot be used takes part in no method, and
        `left_out` says why.
    """
    _require_methods(methods)
    numbers = Numbers(_each("rounds", rounds, methods), _each("local_steps", local_steps, methods))
    if start is not None:
        one_of("start", start, STARTS)
    require_verbosity(verbose)
    one_of("faulty", faulty, FAULTY)
    seed, precision = whole_seed(random_state), precision_of(dtype)
    columns, missing = FederatedNMF(), dict[str, str]()
    matrices, labels = _parties(X, parties, names)
    if faulty == LEAVE_OUT:
        matrices, labels, missing = sound_parties(matrices, labels, precision)
    attendance = Attendance(missing)
    shards = shards_of(columns, matrices, labels, seed, precision)
    rank = rank_of(n_components, (sum(s.matrix.shape[0] for s in shards), shards[0].matrix.shape[1]))
    entered = [_contestant(name, rank, numbers, start) for name in methods]
    warm_up((contestant.program for contestant in entered), shards)
    with held() as interrupts:
        found = _contest_all(entered, shards, seed, verbose, interrupts, attendance, faulty)
    named = getattr(columns, "feature_names_in_", None)
    feature_names = None if named is None else tuple(map(str, named))
    steps = {m.name: len(m.curve.rounds) if m.name == LOCAL else numbers.steps_of(m.name) for m in found}
    was_interrupted = interrupts.count > 0 or found[-1].outcome == Outcome.INTERRUPTED
    not_begun = tuple(methods[len(found) :])
    result = Comparison(found, rank, seed, steps, feature_names, not_begun, was_interrupted, missing)
    if not result.is_complete:
        warnings.warn(result.notice, IncompleteWarning, stacklevel=2)
    return result


def _parties(X: Any, parties: Any, names: Any) -> tuple[list[Any], Any]:
    """Matrices and names, from any of the forms in which parties may be given."""
    if parties is not None and len(getattr(X, "shape", ())) == 2:
        return by_party(X, parties, names)
    matrices, labels = named_parties(X, names)
    if parties is None and isinstance(matrices, Sequence) and not isinstance(matrices, str):
        return list(matrices), labels
    raise ShapeError(
        "compare takes a list with one matrix per party, a mapping of names to matrices, or one matrix with a label "
        f"for each of its rows, compare(X, k, parties=labels); this is {type(X).__name__} "
        f"{'without' if parties is None else 'with'} labels."
    )


def _contest_all(
    entered: Sequence[Contestant],
    shards: list[Shard],
    seed: int,
    verbose: int,
    interrupts: Interrupts,
    attendance: Attendance,
    faulty: str,
) -> tuple[MethodFindings, ...]:
    """Method by method; those after an interrupt are left out."""
    found: list[MethodFindings] = []
    for contestant in entered:
        if interrupts.count or (found and found[-1].outcome == Outcome.INTERRUPTED):
            break
        with progress(verbose, contestant.rounds, None, contestant.name) as bar:

            def watch(done: Round, row: HistoryRow, bar: Watch = bar) -> None:
                attendance.note(done, row)
                bar(done, row)

            if contestant.name == LOCAL:
                found.append(contest_alone(contestant, shards, seed, interrupts))
            else:
                all_rows = pooled(shards) if contestant.is_oracle else None
                found.append(contest(contestant, shards, seed, watch, all_rows, interrupts, faulty))
    if not found:
        raise KeyboardInterrupt
    return tuple(found)


def _contestant(name: str, rank: int, numbers: Numbers, start: str | None) -> Contestant:
    steps, rounds = numbers.steps_of(name), numbers.rounds_of(name)
    if name in SAME_ITERATION:
        program: Any = recipes.shared_statistics(rank, sweeps=steps)
        return Contestant(name, DESCRIPTIONS[name], program, rounds, is_oracle=name == POOLED)
    begun = start_of(name, start)
    align = alignment_of(alignment_for(name))
    program = program_of(name, rank, steps=steps, align=align, start=begun)
    return Contestant(name, DESCRIPTIONS[name], program, rounds, begun)


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
    if setting == "rounds":
        known |= dict.fromkeys(methods)
    unknown = [str(name) for name in value if name not in known]
    if unknown:
        raise ParameterError(
            f"{setting} names {', '.join(unknown)}; the methods here are {', '.join(known)} "
            '("exact" is for local and pooled as well).'
        )
    return {name: whole_number(f"{setting}[{name!r}]", number) for name, number in value.items()}
