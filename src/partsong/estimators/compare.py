"""`partsong.compare`: compare local, federated and pooled factorization of several parties, in a simulation."""

from __future__ import annotations

import itertools
import math
import os
import platform
import textwrap
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from partsong import methods as registry
from partsong.core import runtime
from partsong.core.interfaces import Array, Layout, Message, Outcome, Round, Schedule, Shard, State
from partsong.core.parameters import whole_number
from partsong.core.runtime import InterruptCounter, graceful_interrupt, package_version
from partsong.core.streams import key
from partsong.data.conversion import as_matrix, is_tensor
from partsong.data.sparse import SparseMatrix
from partsong.engines.local import Parallel, run_in_threads
from partsong.errors import ParameterError, PartsongError
from partsong.estimators.parties import read_parties
from partsong.estimators.validation import (
    one_of,
    precision_of,
    rank_of,
    refuse_old_names,
    require_verbosity,
    whole_seed,
)
from partsong.evaluation.metrics import (
    LocalComponents,
    PartyResult,
    add_local_model,
    align_local_components,
    evaluate_party,
    is_finite,
    overall_error,
)
from partsong.methods.init_modes import INIT_MODES
from partsong.methods.registry import Problem
from partsong.reporting.html import Column, Markup, element, format_bytes, format_number, format_percent, row
from partsong.reporting.run_report import ArrayTraffic, Curve, MethodResult, PartyHoldings, Report, write_report
from partsong.training.loop import (
    ON_PARTY_ERROR,
    RAISE,
    SKIP,
    ExclusionLog,
    HistoryRow,
    StoppingRule,
    Training,
    Watch,
    progress,
    run,
)
from partsong.training.result import FitResult, finish
from partsong.training.simulation import FederatedFit, finish_with_warnings, party_components, simulate_rounds

Signature = tuple[tuple[str, tuple[int, ...], str], ...]

FEW_ROWS = 64
"""Rows per party for warming up compiled code before timing."""

WORST_FIRST = (Outcome.INTERRUPTED, Outcome.DIVERGED, Outcome.TIME_LIMIT, Outcome.MAX_ROUNDS, Outcome.CONVERGED)
HEADINGS = (
    "method", "init_mode", "rounds", "steps", "relative error", "explained", "worst party", "sent per party", "seconds",
    "drift", "aligned", "outcome",
)  # fmt: skip
NEVER_SENT = (
    "The rows X_p and the weights W_p never left a party. Sums and components that a party sends unmasked still reveal "
    "something about its rows, and more if it has few rows: they are not anonymous."
)
LOCAL, POOLED = "local", "pooled"
COMPARABLE = (LOCAL, *(name for name in registry.names() if not registry.TABLE[name].required), POOLED)
BASELINE_ITERATIONS = 100
"""Minimum iterations of "local" and "pooled" by default, so that few rounds of other methods do not limit them."""
DESCRIPTIONS = {
    LOCAL: "Every party factorizes its own rows and shares nothing: one model per party.",
    POOLED: "All rows in one place: the reference that parties cannot compute.",
}
SAME_ITERATION = (LOCAL, "exact", POOLED)
"""Methods with the same iteration: on the rows of each party, on sums, on pooled rows; options use the name "exact"."""
PerMethod = int | Mapping[str, int] | None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A method in a comparison: its program, rounds, initialization, and a description."""

    name: str
    description: str
    program: Any
    rounds: int
    init_mode: str = "shared"
    is_oracle: bool = False


@dataclass(slots=True)
class Recorder:
    """Records a run: counts of uploads by the signature of their arrays, and H_p after the first and the best round."""

    meanings: Mapping[str, str] = field(default_factory=dict)
    sent: dict[Signature, list[ArrayTraffic]] = field(default_factory=dict)
    after_first_round: dict[str, Array] = field(default_factory=dict)
    own: dict[str, Array] = field(default_factory=dict)
    server: State = None
    least: float = math.inf

    def record(self, done: Round, row: HistoryRow) -> None:
        """Record a round; of equally good rounds the last is the best, as in `training.loop.train`."""
        if not self.sent and done.traffic:
            self.after_first_round = party_components(done.checkpoint)
        for _, _, upload in done.traffic:
            known = self.sent.get(upload.signature) or self._arrays_of(upload)
            self.sent[upload.signature] = [replace(one, times=one.times + 1) for one in known]
        if row.objective <= self.least:
            self.least, self.server, self.own = row.objective, done.checkpoint.server, party_components(done.checkpoint)

    def _arrays_of(self, upload: Message) -> list[ArrayTraffic]:
        arrays = [
            ArrayTraffic(name, shape, dtype, int(upload[name].nbytes), 0, self.meanings.get(name, ""))
            for name, shape, dtype in upload.signature
        ]
        return [
            *arrays,
            ArrayTraffic("weight", (), "float64", 8, 0, "the number of rows, where the aggregation uses it"),
        ]

    def sent_by_each(self, parties: int) -> tuple[ArrayTraffic, ...]:
        """Return mean counts of uploads per party: asynchronous parties send different numbers."""
        every = itertools.chain.from_iterable(self.sent.values())
        return tuple(replace(one, times=max(1, round(one.times / parties))) for one in every)


def warm_up(programs: Iterable[Any], shards: Sequence[Shard]) -> None:
    """Run two rounds of every program on a few rows, so that timings exclude compiling and importing."""
    few = [replace(s, matrix=s.matrix.rows(np.arange(min(FEW_ROWS, s.matrix.shape[0])))) for s in shards[:2]]
    for program in programs:
        brief = replace(program, steps=1) if hasattr(program, "steps") else program
        fit = FederatedFit(brief, few, Schedule(2), StoppingRule(tol=0.0), Parallel())
        with suppress(PartsongError):  # the run itself reports errors in the data
            own = Recorder()
            training = run(fit, watch=own.record)
            if training.outcome is Outcome.INTERRUPTED:
                raise KeyboardInterrupt
            at_parties(brief, few, finish(fit, training), own)


def run_candidate(
    candidate: Candidate,
    shards: Sequence[Shard],
    seed: int,
    watch: Watch = lambda done, row: None,
    interrupts: InterruptCounter | None = None,
    on_party_error: str = RAISE,
) -> MethodResult:
    """Run one method; return its error, cost, uploads, and results at each party.

    The pooled reference runs on all rows in one place and is evaluated at the parties. Seconds cover the rounds,
    without evaluation. The first Ctrl-C counted by `interrupts` ends the rounds, the second the comparison.
    """
    kinds = candidate.program.upload_spec(Layout.of(shards, seed))
    recorder = Recorder({name: spec.meaning for kind in kinds for name, spec in kind.items()})

    def follow(done: Round, row: HistoryRow) -> None:
        recorder.record(done, row)
        watch(done, row)

    at = [pooled(shards)] if candidate.is_oracle else shards
    began, schedule = time.perf_counter(), Schedule(candidate.rounds, seed, on_party_error=on_party_error)
    rule, engine = StoppingRule(tol=0.0), Parallel(record=True)
    fit = simulate_rounds(candidate.program, at, candidate.rounds, schedule, rule, engine)
    training = run(fit, began=began, watch=follow, interrupts=interrupts)
    if interrupts is not None and interrupts.count > 1:
        raise KeyboardInterrupt
    return result_of(candidate, training, finish_with_warnings(fit, training), shards, recorder)


def at_parties(
    program: Any, shards: Sequence[Shard], finished: FitResult, recorder: Recorder
) -> tuple[PartyResult, ...]:
    """Evaluate the model, and each party's own H_p, at every party."""
    found = []
    with runtime.limit_kernel_threads(runtime.available_threads()):
        for shard in shards:
            party = evaluate_party(shard, finished.H, program.solver, finished.weights.get(shard.name))
            if shard.name in recorder.own:
                models = program.components(recorder.server), finished.H
                party = add_local_model(party, shard, recorder.own[shard.name], models, program.solver)
            found.append(party)
    return tuple(found)


def result_of(
    candidate: Candidate, run: Training, finished: FitResult, shards: Sequence[Shard], recorder: Recorder
) -> MethodResult:
    """Return the result of a run: error, cost, uploads, and results at each party."""
    is_oracle, rows = candidate.is_oracle, run.history
    senders = 0 if is_oracle else len(shards)
    was_alone = candidate.init_mode == "local" and len(rows) > 1
    known = {name: H for name, H in recorder.after_first_round.items() if is_finite(H)} if was_alone else {}
    return MethodResult(
        name=candidate.name,
        description=candidate.description,
        relative_error=finished.relative_error,
        bytes_up_per_party=sum(row.bytes_up for row in rows) / senders if senders else 0.0,
        bytes_down_per_party=float(sum(row.bytes_down for row in rows)) if senders else 0.0,
        rounds=run.rounds,
        seconds=rows[-1].seconds if rows else 0.0,
        outcome=str(outcome_of(run, candidate.rounds)),
        curve=_curve(candidate.name, rows, senders),
        components=finished.H,
        shares=tuple(float(share) for share in finished.shares),
        sent=recorder.sent_by_each(senders) if senders else (),
        is_oracle=is_oracle,
        init_mode=candidate.init_mode,
        parties=at_parties(candidate.program, shards, finished, Recorder() if is_oracle else recorder),
        after_first_round={name: align_local_components(H, finished.H) for name, H in known.items()},
    )


def outcome_of(run: Training, rounds: int) -> Outcome:
    """Return how a run ended; if all rounds were made, Ctrl-C does not count."""
    is_whole = run.outcome is Outcome.INTERRUPTED and run.rounds >= rounds
    return Outcome.MAX_ROUNDS if is_whole else run.outcome


def _curve(label: str, rows: Sequence[HistoryRow], senders: int) -> Curve:
    """The error over a history, and the cumulative bytes per sender."""
    sent = itertools.accumulate(row.bytes_up for row in rows)
    known = [(row, total) for row, total in zip(rows, sent, strict=True) if not math.isnan(row.objective)]
    return Curve(
        label,
        tuple(row.iteration for row, _ in known),
        tuple(row.seconds for row, _ in known),
        tuple(row.relative_error for row, _ in known),
        tuple(total / senders for _, total in known) if senders else (),
    )


def run_locally(
    candidate: Candidate, shards: Sequence[Shard], seed: int, interrupts: InterruptCounter | None = None
) -> MethodResult:
    """Run the program at every party alone, on its own rows.

    The curve is as long as the shortest of the parties' histories; the outcome is the worst of theirs.
    """
    began, by_name = time.perf_counter(), {shard.name: shard for shard in shards}

    def work(name: str) -> tuple[FederatedFit, Training]:
        schedule, rule = Schedule(candidate.rounds, seed), StoppingRule(tol=0.0)
        fit = FederatedFit(candidate.program, [by_name[name]], schedule, rule)
        return fit, run(fit, began=began, interrupts=interrupts)

    runs = run_in_threads(work, list(by_name), runtime.available_threads())
    seconds, trainings = time.perf_counter() - began, [training for _, training in runs.values()]
    parties = tuple(_alone(by_name[name], *done) for name, done in runs.items())
    return MethodResult(
        name=candidate.name,
        description=candidate.description,
        relative_error=overall_error(parties),
        bytes_up_per_party=0.0,
        bytes_down_per_party=0.0,
        rounds=0,
        seconds=seconds,
        outcome=str(min((outcome_of(one, candidate.rounds) for one in trainings), key=WORST_FIRST.index)),
        curve=_local_curve(candidate.name, trainings, parties, seconds),
        components=np.zeros((0, shards[0].matrix.shape[1])),
        shares=(),
        sent=(),
        init_mode=candidate.init_mode,
        parties=parties,
    )


def _alone(shard: Shard, fit: FederatedFit, training: Training) -> PartyResult:
    finished = finish(fit, training)
    with runtime.limit_kernel_threads(runtime.available_threads()):
        party = evaluate_party(shard, finished.H, fit.program.solver, finished.W)
    own = LocalComponents(finished.H, tuple(range(len(finished.H))), (True,) * len(finished.H))
    return replace(party, own_error=party.relative_error, own=own)


def _local_curve(label: str, trainings: Sequence[Training], parties: Sequence[PartyResult], seconds: float) -> Curve:
    """The error over all rows by iteration; time is spread evenly, because parties share the cores."""
    norms = np.array([party.squared_norm for party in parties])
    count = min(len(one.history) for one in trainings)
    errors = np.array([[row.relative_error for row in one.history[:count]] for one in trainings])
    total = np.sqrt(np.maximum(0.0, norms @ errors**2) / (float(norms.sum()) or 1.0))
    times = tuple(seconds * (i + 1) / count for i in range(count))
    return Curve(label, tuple(range(1, count + 1)), times, tuple(map(float, total)))


def pooled(shards: Sequence[Shard]) -> Shard:
    """Return all rows in one place, in the order of the parties; sparse if one of them is."""
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


class IncompleteWarning(UserWarning):
    """A comparison was interrupted: methods are missing or incomplete."""


class ComparisonRow(NamedTuple):
    """Result of one method: error over all rows, cost, error at each party, and outcome.

    Rounds and steps are those actually made; for "local", the fewest of any party. `relative_error` is ‖X − W H‖ / ‖X‖
    over all rows; for "local", with every party's own H. Drifts are Σ_p ‖H_p − H‖² / ‖H‖², by position and after
    alignment; NaN if parties have no H_p, or no shared H.
    """

    method: str
    init_mode: str
    rounds: int
    local_steps: int
    relative_error: float
    explained_variance: float
    bytes_up_per_party: float
    bytes_down_per_party: float
    seconds: float
    drift: float
    aligned_drift: float
    party_errors: Mapping[str, float]
    outcome: Outcome


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Comparison:
    """Results of all methods, in the requested order; print it, or show it in a notebook.

    Attributes
    ----------
    findings : tuple of MethodResult
        The full result of each method.
    n_components, seed : int
        Rank of all models, and the seed used.
    local_steps : mapping of str to int
        Local steps of each method.
    feature_names : tuple of str or None
        Column names, if known.
    missing : tuple of str
        Methods not run because of Ctrl-C.
    was_interrupted : bool
        Whether Ctrl-C was pressed.
    left_out : mapping of str to str
        Parties with invalid data, and the reason.
    """

    findings: tuple[MethodResult, ...]
    n_components: int
    seed: int
    local_steps: Mapping[str, int]
    feature_names: tuple[str, ...] | None = None
    missing: tuple[str, ...] = ()
    was_interrupted: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> tuple[ComparisonRow, ...]:
        """One row per method."""
        return tuple(
            ComparisonRow(
                m.name, m.init_mode, m.rounds, self.local_steps[m.name], m.relative_error, m.explained_variance,
                m.bytes_up_per_party, m.bytes_down_per_party, m.seconds, m.drift, m.aligned_drift,
                {party.name: party.relative_error for party in m.parties}, Outcome(m.outcome),
            )
            for m in self.findings
        )  # fmt: skip

    @property
    def per_party(self) -> dict[str, dict[str, PartyResult]]:
        """By method and party: fit, drift, and component shares."""
        return {m.name: {party.name: party for party in m.parties} for m in self.findings}

    @property
    def components(self) -> dict[str, np.ndarray]:
        """The shared H (k × m) of each method that has one."""
        return {m.name: m.components for m in self.findings if len(m.components)}

    @property
    def is_complete(self) -> bool:
        """Whether all methods were run to their end."""
        return not self.missing and not self._interrupted

    @property
    def notice(self) -> str:
        """What is missing in an interrupted comparison; empty if complete."""
        said = [f"{name} was interrupted, and its numbers are intermediate" for name in self._interrupted]
        said += [f"not started: {', '.join(self.missing)}"] if self.missing else []
        return f"Incomplete (interrupted): {'; '.join(said)}." if said else ""

    @property
    def _interrupted(self) -> list[str]:
        return [m.name for m in self.findings if m.outcome == Outcome.INTERRUPTED]

    @property
    def caption(self) -> str:
        """What is missing, if anything, and how to read the table."""
        absent = f"Skipped because of invalid data: {', '.join(self.left_out)}. " if self.left_out else ""
        lacking = (f"{self.notice} " if self.notice else "") + absent
        return lacking + (
            f"Rank {self.n_components}, seed {self.seed}, {len(self.findings[0].parties)} parties, simulated. Errors "
            "are over all rows, with weights fitted to the model; “local” has one model per party. "
            "init_mode: parties start from one H for every method (shared), or each from its own H (local). Steps: "
            "local iterations or sweeps per round. Seconds cover the rounds, without compiling. Drift: distance of the "
            "parties' H_p from the shared H by position; aligned: after alignment."
            f"{self._unequal}"
        )

    @property
    def _unequal(self) -> str:
        """A note if "local", "exact" and "pooled" made different numbers of the same iteration."""
        made = {m.name: len(m.curve.rounds) for m in self.findings if m.name in ("local", "exact", "pooled")}
        if "exact" not in made or len(set(made.values())) == 1:
            return ""
        others = " and ".join(f"“{name}” {count}" for name, count in made.items() if name != "exact")
        same = "; after as many, “exact” equals “pooled”" if made.get("pooled", made["exact"]) != made["exact"] else ""
        return f" Number of iterations: “exact” {made['exact']}, {others}{same}."

    def to_table(self) -> str:
        """Return plain text with one line per method."""
        cells = [HEADINGS, *(_cells(row) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(
                text.ljust(width) if i < 2 else text.rjust(width)
                for i, (text, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in cells
        ]
        return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])

    def __str__(self) -> str:
        text = self.to_table()
        return f"{text}\n\n{textwrap.fill(self.caption, max(map(len, text.splitlines())))}"

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """The same table for notebooks."""
        columns = [Column(heading, i > 1) for i, heading in enumerate(HEADINGS)]
        heads = element("tr", *(element("th", column.label, scope="col") for column in columns))
        lines = [row(columns, _cells(line)) for line in self.rows]
        whole = element("table", element("thead", heads), element("tbody", *lines))
        return str(Markup(whole + element("p", self.caption)))

    def save_report(
        self, path: str | os.PathLike[str], *, image_shape: tuple[int, int] | None = None, title: str = "Comparison"
    ) -> Path:
        """Write one self-contained HTML page with curves and components, shown as images if `image_shape` is set."""
        parties = tuple(PartyHoldings(party.name, party.rows, {}) for party in self.findings[0].parties)
        settings = {"rank": str(self.n_components), "seed": str(self.seed), "threads": str(runtime.available_threads())}
        versions = {"partsong": package_version(), "python": platform.python_version(), "numpy": np.__version__}
        text = Report(
            title, self.caption, parties, self.findings, image_shape, self.feature_names, settings, versions, NEVER_SENT
        )
        return write_report(path, text)


def _cells(row: ComparisonRow) -> tuple[str, ...]:
    sent = {"pooled": "all rows", "local": "nothing"}.get(row.method, format_bytes(row.bytes_up_per_party))
    sent = sent.replace("\N{NO-BREAK SPACE}", " ")
    return (
        row.method, row.init_mode, str(row.rounds), str(row.local_steps), format_percent(row.relative_error),
        format_percent(row.explained_variance), format_percent(max(row.party_errors.values())), sent,
        format_number(row.seconds), format_number(row.drift), format_number(row.aligned_drift), str(row.outcome),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Numbers:
    """Rounds and local steps of methods, requested or default."""

    rounds: Mapping[str, int]
    local_steps: Mapping[str, int]

    def rounds_of(self, name: str) -> int:
        """Return the rounds of a method, or iterations if nothing is exchanged."""
        if name in (LOCAL, POOLED):
            return self.rounds.get(name) or max(BASELINE_ITERATIONS, self.rounds_of("exact"))
        method = registry.method(name)
        usual = method.rounds if method.compared_rounds is None else method.compared_rounds
        return 1 if method.is_one_shot else self.rounds.get(name, usual)

    def steps_of(self, name: str) -> int:
        """Return the sweeps or iterations between two exchanges."""
        iteration = "exact" if name in SAME_ITERATION else name
        usual = registry.method(iteration).value("local_steps", {})
        return self.local_steps.get(iteration, 1 if usual is None else int(usual))


@refuse_old_names
def compare(
    X: Any,
    n_components: int | None = None,
    methods: Sequence[str] = (LOCAL, "fedavg", "fnmf", "exact", POOLED),
    *,
    parties: Any = None,
    names: Sequence[str] | None = None,
    rounds: PerMethod = None,
    local_steps: PerMethod = None,
    init_mode: str | None = None,
    random_state: Any = None,
    dtype: Any = None,
    on_party_error: str = RAISE,
    verbose: int = 0,
) -> Comparison:
    """Compare what parties reach alone, together, and with pooled rows.

    All methods have the same rank and seed and run all their rounds, without early stopping. "local", "exact" and
    "pooled" are the same iteration on each party's own rows, on sums, and on stacked rows, from the same H: "exact"
    equals "pooled" after as many iterations. Methods with init_mode="shared" start from that H as well. With "local"
    initialization (the default of "fnmf" and "fnmf-local") every party draws its own start, the same for all such
    methods. Pooling needs memory for a second copy of all rows.

    The first Ctrl-C ends the current round and returns the results so far with an `IncompleteWarning`: `missing` lists
    methods that were not started, and an interrupted method has the outcome "interrupted". A second Ctrl-C, or one
    before the first method, raises KeyboardInterrupt.

    Parameters
    ----------
    X, parties, names :
        As in `FederatedNMF.fit`: a list with one matrix per party, a mapping of names to matrices, or one matrix and a
        label per row.
    n_components : int or None, default=None
        Rank of all models; None is min(n, m, 20) over all rows.
    methods : sequence of str, default=("local", "fedavg", "fnmf", "exact", "pooled")
        "local", "pooled", and methods of `FederatedNMF`.
    rounds : int, mapping of str to int, or None, default=None
        Rounds of all methods, or by method. None is 100 ("fnmf-local": 10). "local" and "pooled" are references: they
        make as many iterations as "exact", and at least 100 unless the mapping names them.
    local_steps : int, mapping of str to int, or None, default=None
        Local steps of the methods that average, or by method. None takes the defaults of the methods. "local" and
        "pooled" use those of "exact".
    init_mode : {"shared", "local"} or None, default=None
        For methods that average; None takes the default of the method.
    random_state, dtype, verbose :
        As in `FederatedNMF`.
    on_party_error : {"raise", "skip"}, default="raise"
        As in `FederatedNMF`. With "skip", a party with invalid data takes part in no method, and `left_out` has the
        reason.

    Returns
    -------
    Comparison
        A table of results, with models and curves.

    Examples
    --------
    >>> import numpy as np
    >>> import partsong
    >>> X = np.random.default_rng(0).random((60, 8))
    >>> result = partsong.compare([X[:25], X[25:]], 2, ["fedavg", "exact"], rounds=5, random_state=0)
    >>> [row.method for row in result.rows]
    ['fedavg', 'exact']
    """
    _require_methods(methods)
    numbers = Numbers(_each("rounds", rounds, methods), _each("local_steps", local_steps, methods))
    if init_mode is not None:
        one_of("init_mode", init_mode, INIT_MODES.names)
    require_verbosity(verbose)
    one_of("on_party_error", on_party_error, ON_PARTY_ERROR)
    seed = whole_seed(random_state)
    shards, columns, missing = read_parties(
        X, names, parties, seed, precision_of(dtype), skip_invalid=on_party_error == SKIP
    )
    exclusions = ExclusionLog(missing)
    rank = rank_of(n_components, (sum(s.matrix.shape[0] for s in shards), shards[0].matrix.shape[1]))
    entered = [_candidate(name, rank, numbers, init_mode) for name in methods]
    warm_up((candidate.program for candidate in entered), shards)
    with graceful_interrupt() as interrupts:
        found = _run_all(entered, shards, seed, verbose, interrupts, exclusions, on_party_error)
    named = columns.get("feature_names_in_")
    feature_names = None if named is None else tuple(map(str, named))
    steps = {m.name: len(m.curve.rounds) if m.name == LOCAL else numbers.steps_of(m.name) for m in found}
    was_interrupted = interrupts.count > 0 or found[-1].outcome == Outcome.INTERRUPTED
    not_begun = tuple(methods[len(found) :])
    result = Comparison(found, rank, seed, steps, feature_names, not_begun, was_interrupted, missing)
    if not result.is_complete:
        warnings.warn(result.notice, IncompleteWarning, stacklevel=2)
    return result


def _run_all(
    entered: Sequence[Candidate],
    shards: list[Shard],
    seed: int,
    verbose: int,
    interrupts: InterruptCounter,
    exclusions: ExclusionLog,
    on_party_error: str = RAISE,
) -> tuple[MethodResult, ...]:
    """Run the methods in order, until an interrupt."""
    found: list[MethodResult] = []
    for candidate in entered:
        if interrupts.count or (found and found[-1].outcome == Outcome.INTERRUPTED):
            break
        parties = 1 if candidate.is_oracle else len(shards)
        with progress(verbose, candidate.program.exchanges(candidate.rounds, parties), None, candidate.name) as bar:

            def watch(done: Round, row: HistoryRow, bar: Watch = bar) -> None:
                exclusions.note(done, row)
                bar(done, row)

            if candidate.name == LOCAL:
                found.append(run_locally(candidate, shards, seed, interrupts))
            else:
                found.append(run_candidate(candidate, shards, seed, watch, interrupts, on_party_error))
    if not found:
        raise KeyboardInterrupt
    return tuple(found)


def _candidate(name: str, rank: int, numbers: Numbers, init_mode: str | None) -> Candidate:
    steps, rounds = numbers.steps_of(name), numbers.rounds_of(name)
    if name in SAME_ITERATION:
        program: Any = registry.build("exact", rank, local_steps=steps)
        return Candidate(
            name, DESCRIPTIONS.get(name) or registry.TABLE[name].summary, program, rounds, is_oracle=name == POOLED
        )
    method = registry.method(name)
    options: dict[str, Any] = {"local_steps": steps} if "local_steps" in method.parameters else {}
    if init_mode in getattr(method.parameters.get("init_mode"), "names", ()):
        options["init_mode"] = init_mode
    program = method.build(Problem(rank, rounds=rounds), options)
    return Candidate(name, method.summary, program, rounds, method.value("init_mode", options) or "shared")


def _require_methods(methods: Any) -> None:
    if isinstance(methods, str) or not isinstance(methods, Sequence) or not methods:
        raise ParameterError(
            f"methods must be a list of names such as {COMPARABLE[:3]}; got {methods!r}.", parameter="methods"
        )
    for name in methods:
        one_of("method", name, COMPARABLE)
    if len(set(methods)) < len(methods):
        raise ParameterError(
            f"methods must be unique; got {tuple(methods)!r}. Remove the repeated names.", parameter="methods"
        )


def _each(setting: str, value: Any, methods: Sequence[str]) -> dict[str, int]:
    """Return a validated number for each method that has this setting."""
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
            '("exact" is for local and pooled as well).',
            parameter=setting,
        )
    return {name: whole_number(f"{setting}[{name!r}]", number) for name, number in value.items()}
