"""Methods for topics by name: the program that each stands for, and what it takes to follow it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import sparse

from partsong import kernels
from partsong.aggregation.plaintext import InTheOpen
from partsong.core import runtime
from partsong.core.interfaces import Engine, Matrix, Outcome, Program, Reduction, Round, Schedule, Shard
from partsong.core.parameters import real_number
from partsong.core.runtime import held
from partsong.core.streams import key
from partsong.data.conversion import as_matrix
from partsong.engines.local import Parallel, Sequential
from partsong.errors import MissingExtra, ParameterError
from partsong.estimators.parameters import PROGRAM, alignment_of, program_of
from partsong.evaluation.topic_quality import Cooccurrence, count_pairs, top_columns
from partsong.methods.counts import CooccurrenceSums
from partsong.methods.fedlda import FederatedLDA
from partsong.methods.fednmf import SERVER_RATE, TopicRounds, fednmf, fednmf_mi
from partsong.methods.recipes import shared_statistics
from partsong.methods.registry import (
    ALONE,
    DESCENDING,
    DESCENTS,
    LOCAL_STEPS,
    SERVERS,
    TOGETHER,
    TOP,
    alignment_for,
    start_of,
)
from partsong.solvers.lda import TopicRows
from partsong.topics.shared_vocabulary import Advising, only_round, warn_of_no_topics
from partsong.topics.vocabulary import COUNTS, TFIDF, WEIGHTINGS, Counted, matrix_of
from partsong.training.loop import Task, conclude, pursue, warn_of_divergence
from partsong.training.simulation import simulation_by_name
from partsong.training.stopping import HistoryRow, Run, Stop

# ---- topic device -----------------------------------------------------------------------------------------------
#
# Where descents compute: by NumPy and compiled loops, or with torch on a device of its own.


def require_device(device: Any, program: Any) -> None:
    """Refuse a device that torch cannot use here, and programs that have nothing to do on one; None is NumPy."""
    if device is None:
        return
    if not isinstance(device, str):
        raise ParameterError(
            f'device must be the name of a device that torch knows, such as "cuda" or "cpu", or None; got {device!r}.'
        )
    if not isinstance(program, TopicRounds):
        raise ParameterError(
            f"device={device!r} is for descents, nmf-sgd, nmf-sgd-mi, fednmf and fednmf-mi: all other methods are "
            "computed by NumPy and compiled loops. Leave it out, or take one of these."
        )
    _require_usable(device)


def rows_on(device: str | None, rows: Any, dtype: Any = None) -> Matrix:
    """Sparse rows behind products, by NumPy, or as a tensor on a device."""
    side = sparse.csr_array(rows)
    if device is None:
        return as_matrix(side, dtype)
    import torch

    if dtype is not None:
        side = side.astype(dtype, copy=False)
    parts = [side.indptr.astype(np.int64), side.indices.astype(np.int64), side.data]
    on_device = (torch.from_numpy(np.ascontiguousarray(part)).to(device) for part in parts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its sparse tensors a beta
        return as_matrix(torch.sparse_csr_tensor(*on_device, side.shape))


def _require_usable(device: str) -> None:
    try:
        import torch
    except ImportError as error:
        raise MissingExtra(
            f'device={device!r} needs PyTorch, which is not installed: pip install "partsong[torch]". Without it, '
            "leave device out."
        ) from error
    try:
        is_here = float(torch.ones(2, device=device).sum()) == 2.0
    except (RuntimeError, AssertionError, NotImplementedError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[0].rstrip(".")
        raise ParameterError(
            f"device={device!r} cannot be used here: {reason}. Take another one, or none for NumPy."
        ) from None
    if not is_here:
        raise ParameterError(f"device={device!r} does not compute. Take another one, or none for NumPy.")


# ---- topic methods ----------------------------------------------------------------------------------------------

SAME_AS = {"nmf": "exact", "nmf-sgd": "fednmf", "nmf-sgd-mi": "fednmf-mi", "lda": "fedlda"}
"""What a method does with all documents in one place is what its federated counterpart does with one party."""

WEIGHT_STEP = "document"
"""Each document moves by its own error: better topics in as many epochs (docs/topics.md)."""

OF_DESCENTS = ("epochs", "batch", "rate", "strength", "critic", "mi_gradient", "critic_rate", "fits_first")
OF_A_CRITIC = ("critic", "mi_gradient", "critic_rate")
WITH_CRITIC = tuple(one for one in DESCENDING if one.endswith("-mi"))
TAKEN_BY = {"fits_first": DESCENDING, **dict.fromkeys(OF_A_CRITIC, WITH_CRITIC)}
"""Settings that others than these methods refuse."""

AS_PRINTED: Mapping[str, Any] = {"critic": "concat", "mi_gradient": "dv", "critic_rate": None, "fits_first": False}
"""What they are unless told otherwise: those of Si et al. (2022)."""


def topic_program(method: Any, n_topics: int | None, options: Mapping[str, Any], known: Any) -> Program:
    """The program of a name among `known`, or the one given; `options` are those of a descent and of its server."""
    require_method(method, known)
    _require_use(method, options, known)
    if not isinstance(method, str):
        return _given(method, n_topics)
    rank = require_topics(n_topics)
    for name in ("rate", "strength", "server_rate"):
        real_number(name, options.get(name, 0))
    if options.get("critic_rate") is not None:
        real_number("critic_rate", options["critic_rate"])
    match SAME_AS.get(method, method):
        case "exact":
            return shared_statistics(rank, accelerate=True)
        case "fnmf":
            align = alignment_of(alignment_for("fnmf", None))
            return program_of("fnmf", rank, steps=LOCAL_STEPS["fnmf"], align=align, start=start_of("fnmf", None))
        case "fednmf":
            settings = {name: value for name, value in options.items() if name not in ("strength", *OF_A_CRITIC)}
            return fednmf(rank, weight_step=WEIGHT_STEP, **settings)
        case "fednmf-mi":
            return fednmf_mi(rank, weight_step=WEIGHT_STEP, **options)
        case _:
            return FederatedLDA(rank)


def require_method(method: Any, known: tuple[str, ...]) -> None:
    """Refuse what is neither a name that is known here nor a Program."""
    if isinstance(method, str):
        if method not in known:
            elsewhere = "TopicModel" if method in ALONE else "FederatedTopicModel" if method in TOGETHER else ""
            hint = f" {method!r} is a method of {elsewhere}." if elsewhere else ""
            raise ParameterError(f"method is one of {', '.join(known)}, or a Program; got {method!r}.{hint}")
    elif not all(hasattr(method, part) for part in PROGRAM):
        raise ParameterError(f"method is one of {', '.join(known)}, or a Program; got {type(method).__name__}.")


def require_server(method: Any, server: str, server_rate: Any = SERVER_RATE) -> None:
    """Only averages can be moved adaptively, and only what moves so has a rate."""
    if server not in SERVERS:
        raise ParameterError(f"server is one of {', '.join(SERVERS)}; got {server!r}.")
    if server != SERVERS[0] and method not in DESCENTS:
        raise ParameterError(f"server={server!r} is for {', '.join(DESCENTS)}; the method is {_name(method)}.")
    if server == SERVERS[0] and server_rate != SERVER_RATE:
        raise ParameterError(
            f"server_rate={server_rate!r} is for servers that take steps, {', '.join(SERVERS[1:])}: an average has no "
            f"rate. Take server={SERVERS[-1]!r} or another of them, or leave server_rate out."
        )


def require_topics(n_topics: Any) -> int:
    """The number of topics."""
    if isinstance(n_topics, bool) or not hasattr(n_topics, "__index__") or int(n_topics) < 1:
        raise ParameterError(f"n_topics must be a whole number of at least 1; got {n_topics!r}.")
    return int(n_topics)


def require_words(program: Program, n_words: int) -> None:
    """Refuse more topics than words."""
    if program.rank > n_words:
        raise ParameterError(
            f"n_topics={program.rank}, but the vocabulary has {n_words} words: topics cannot be more than these. Ask "
            "for fewer topics, or prune the vocabulary less."
        )


def weighting_of(weighting: str | None, method: Any) -> str:
    """What the rows of a method are: tf-idf, and counts for LDA, which models these."""
    counts_words = SAME_AS.get(str(method), method) == "fedlda" or isinstance(method, FederatedLDA)
    if weighting is None:
        return COUNTS if counts_words else TFIDF
    if weighting not in WEIGHTINGS:
        raise ParameterError(f"weighting is one of {', '.join(WEIGHTINGS)}, or None; got {weighting!r}.")
    if counts_words and weighting != COUNTS:
        raise ParameterError(f"LDA is a model of counts; weighting={weighting!r} is for the other methods.")
    return weighting


def is_mixture(solver: Any) -> bool:
    """Whether weights are shares of topics that sum to one, and not a fit of least squares."""
    return isinstance(solver, TopicRows)


def followed(task: Task, is_sampled: bool) -> Task:
    """The task with what can be known of its rounds without asking more of parties than they send.

    Of LDA with everybody in each round it is the perplexity that falls; of other sums that the server cannot judge,
    and of rounds over other parties each time, nothing: all of them are run, and the last model is kept.
    """
    program = task.program
    if isinstance(program, FederatedLDA) and not is_sampled:
        return replace(task, error_of=_unknown, objective_of=_perplexity)
    if isinstance(program, FederatedLDA | TopicRounds):
        return replace(task, error_of=_unknown, objective_of=_level, stop=Stop(0.0, task.stop.time_budget))
    return task


def _require_use(method: Any, options: Mapping[str, Any], known: Any) -> None:
    """Refuse settings of critics and descents with a method that has none."""
    for name, methods in TAKEN_BY.items():
        value = options.get(name, AS_PRINTED[name])
        if value == AS_PRINTED[name] or (isinstance(method, str) and method in methods):
            continue
        those = [one for one in methods if one in known]
        raise ParameterError(
            f"{name}={value!r} is for {', '.join(those)}; the method is {_name(method)}. Take method={those[0]!r}, or "
            f"leave {name} out."
        )
    if not isinstance(options.get("fits_first", False), bool):
        raise ParameterError(f"fits_first is True or False; got {options['fits_first']!r}.")


def _given(program: Any, n_topics: int | None) -> Program:
    rank = require_topics(program.rank)
    if n_topics is not None and n_topics != rank:
        raise ParameterError(
            f"n_topics={n_topics!r}, but the program has {rank}. Leave n_topics out, or make both the same."
        )
    return program


def _name(method: Any) -> str:
    return repr(method) if isinstance(method, str) else type(method).__name__


def _unknown(done: Round) -> float:
    return math.nan


def _perplexity(done: Round, error: float) -> float:
    return float(done.metrics["perplexity"])


def _level(done: Round, error: float) -> float:
    return 0.0


# ---- topic fitting ----------------------------------------------------------------------------------------------
#
# From parties' rows to topics: run the program, put topics in order, and count which words occur together.

NEGLIGIBLE = 1e-6
"""A share of a topic's strongest word below which a word does not belong to it: iterations end with such traces."""

Watch = Callable[[Round, HistoryRow], None]


@dataclass(frozen=True, slots=True)
class Course:
    """How a program is run: how often, by whom, over what sums, on which device, and when it may stop.

    `weighting` is what the rows are, for advice.
    """

    rounds: int
    seed: int
    stop: Stop = Stop()
    absent: Mapping[int, frozenset[str]] | None = None
    reduction: Reduction = InTheOpen()
    engine: Engine | None = None
    device: str | None = None
    weighting: str = ""

    def engine_for(self, n_parties: int) -> Engine:
        """Parties take turns on a device, and run side by side without one."""
        takes_turns = n_parties == 1 or self.device is not None
        return Advising(self.engine or (Sequential() if takes_turns else Parallel()), self.weighting)


@dataclass(frozen=True, slots=True)
class Topics:
    """H (k × V) with its largest topics first, and how large they are; how the run ended.

    Shares are of what topics explain, or for mixtures of the documents; they add up to one.
    """

    H: np.ndarray
    shares: np.ndarray
    relative_error: float | None
    outcome: Outcome
    history: tuple[HistoryRow, ...]
    n_rounds: int


def learn(program: Any, rows: Mapping[str, Counted], course: Course, dtype: Any, watch: Watch) -> Topics:
    """Run to the end; the first Ctrl-C keeps the model so far."""
    shards = [
        Shard(name, rows_on(course.device, own.rows, dtype), key(course.seed, "secret", name))
        for name, own in rows.items()
    ]
    workers = runtime.available() if len(shards) == 1 else 1
    absent = course.absent or {}
    schedule = Schedule(course.rounds, course.seed, absent=absent, kernel_threads=workers)
    engine = course.engine_for(len(shards))
    named = (program, program, shards, course.rounds, schedule, course.stop, engine, course.reduction)
    task = followed(simulation_by_name(*named), is_sampled=bool(absent))
    with held() as interrupts:
        run = pursue(task, watch=watch, interrupts=interrupts)
        return _mixture(task, run, rows, dtype) if is_mixture(program.solver) else _factors(task, run, course)


def counted_together(H: np.ndarray, rows: Mapping[str, Any], seed: int, n: int = TOP) -> Cooccurrence | None:
    """In how many rows (n × V by party) the n strongest words of each topic occur together; None without any pair."""
    topics = top_columns(H, n)
    if not any(len(topic) > 1 for topic in topics):
        return None
    program = CooccurrenceSums.of(topics)
    if len(rows) == 1:
        return count_pairs(next(iter(rows.values())), program.asked)
    shards = [Shard(name, matrix_of(own), key(seed, "secret", name)) for name, own in rows.items()]
    return program.counts(only_round(Advising(Parallel()), program, shards, seed).checkpoint.server)


def _factors(task: Task, run: Run, course: Course) -> Topics:
    warn_of_divergence(run)
    done = conclude(task, run)
    warn_of_no_topics(task, done, course.weighting)
    least = NEGLIGIBLE * done.H.max(axis=1, keepdims=True)
    H = np.where(least < done.H, done.H, np.zeros((), done.H.dtype))
    return Topics(H, done.shares, done.relative_error, run.outcome, run.history, run.rounds)


def _mixture(task: Task, run: Run, rows: Mapping[str, Counted], dtype: Any) -> Topics:
    """Topics as probabilities of words, by the documents that they make up; without a word there is no topic."""
    warn_of_divergence(run)
    program = task.program
    topics = program.components(run.best)
    H = np.asarray(kernels.of(topics).to_numpy(topics))
    Ht = np.ascontiguousarray(H.T)
    with runtime.kernels_on(task.threads):
        found = {shard.name: program.solver.solve_rows(shard.matrix, Ht) for shard in task.shards}
    weights = [without_empty(own, rows[name]) for name, own in found.items()]
    totals = np.sum([W.sum(axis=0, dtype=np.float64) for W in weights], axis=0)
    order = np.argsort(-totals, kind="stable")
    kept = H[order].astype(H.dtype if dtype is None else dtype, copy=False)
    return Topics(kept, totals[order] / totals.sum(), None, run.outcome, run.history, run.rounds)


def without_empty(W: Any, counted: Counted) -> Any:
    """W with zeros for documents without a known word."""
    return np.where(np.asarray(counted.is_empty)[:, None], np.zeros((), W.dtype), W)
