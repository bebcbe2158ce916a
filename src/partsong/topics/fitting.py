"""Fit topics to the rows of parties: methods by name, devices, the run, and advice on step sizes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
from scipy import sparse

from partsong import kernels, methods
from partsong.aggregation.plaintext import PlainReduction
from partsong.aggregation.server_update import Replace
from partsong.core import runtime
from partsong.core.interfaces import Engine, Matrix, Outcome, Program, Reduction, Round, Schedule, Shard
from partsong.core.runtime import graceful_interrupt
from partsong.core.streams import key
from partsong.data.conversion import as_matrix
from partsong.engines.local import Parallel, Sequential
from partsong.engines.rounds import RECOVERY
from partsong.engines.upload_checks import FIXED_RECOVERY
from partsong.errors import DivergenceError, MissingExtra, ParameterError, PartsongError, UploadError
from partsong.estimators.parties import PROGRAM
from partsong.evaluation.topic_quality import Cooccurrence, count_pairs, top_columns
from partsong.methods.counts import CooccurrenceSums
from partsong.methods.fedlda import FederatedLDA
from partsong.methods.fednmf import SERVER_RATE, FederatedDescent
from partsong.methods.mutual_information.critics import JensenShannon, MutualInformation
from partsong.methods.registry import Problem, TopicConfig
from partsong.solvers.lda import TopicInference
from partsong.topics import TOP
from partsong.topics.shared_vocabulary import run_single_round
from partsong.topics.vocabulary import COUNTS, TFIDF, WEIGHTINGS, DocumentRows, rows_as_matrix
from partsong.training.loop import HistoryRow, Measures, StoppingRule, Training, Watch, run
from partsong.training.result import (
    EmptyModelWarning,
    FitResult,
    finish,
    is_zero,
    warn_about_divergence,
    warn_if_model_is_zero,
)
from partsong.training.simulation import FederatedFit, simulate_rounds

FEDERATED_METHODS = methods.names(methods.TEXTS)
"""Federated methods."""

FEDERATED_NAMES = methods.pooled_names()
"""Pooled methods and their federated counterparts with one party."""

POOLED_METHODS = tuple(FEDERATED_NAMES)
"""Methods for pooled texts."""

SGD_METHODS = methods.names_with("epochs", FEDERATED_METHODS)
"""Methods by stochastic gradient descent: with server updates and client sampling."""

SERVERS = methods.CHOICES["server"]

SGD_OPTIONS = ("epochs", "batch", "rate", "strength", "critic", "mi_gradient", "critic_rate", "warm_start_weights")
CRITIC_OPTIONS = ("critic", "mi_gradient", "critic_rate")


def methods_with(parameter: str) -> tuple[str, ...]:
    """Return all names of the methods with a parameter."""
    meant = methods.names_with(parameter, FEDERATED_METHODS)
    return (*(name for name, same in FEDERATED_NAMES.items() if same in meant), *meant)


def rounds_for(method: object) -> int:
    """Return the default maximum number of rounds."""
    if not isinstance(method, str):
        return TopicConfig().rounds
    texts = methods.method(FEDERATED_NAMES.get(method, method)).texts
    return TopicConfig().rounds if texts is None else texts.rounds


PAPER_DEFAULTS: Mapping[str, Any] = {
    "critic": "concat",
    "mi_gradient": "dv",
    "critic_rate": None,
    "warm_start_weights": False,
}
"""Defaults, as in Si et al. (2022)."""

NEGLIGIBLE = 1e-6
"""Words below this share of a topic's strongest word are set to zero; iterations leave such traces."""

ENGINE_ADVICE = (RECOVERY, FIXED_RECOVERY)
"""Advice of engines that does not apply to topic models: skipping a party, and checkpoints."""

WIDE_BOUND = 1e9
"""The default bound of secure sums; rows of topics exceed it only if steps are too large."""


def topic_program(method: Any, n_topics: int | None, options: Mapping[str, Any], known: Any) -> Program:
    """Return the program with a name in `known`, or the given one; `options` are those of SGD and of the server."""
    require_method(method, known)
    _require_use(method, options, known)
    if not isinstance(method, str):
        return _given(method, n_topics)
    rank = require_topics(n_topics)
    chosen = methods.method(FEDERATED_NAMES.get(method, method))
    own = {} if chosen.texts is None else chosen.texts.options
    given = {name: value for name, value in options.items() if name in chosen.parameters}
    if given.get("server", SERVERS[0]) == SERVERS[0]:
        given.pop("server_rate", None)
    return chosen.build(Problem(rank), {**own, **given})


def require_method(method: Any, known: tuple[str, ...]) -> None:
    """Refuse anything but a known name or a Program."""
    if isinstance(method, str):
        if method not in known:
            elsewhere = (
                "TopicModel"
                if method in POOLED_METHODS
                else "FederatedTopicModel"
                if method in FEDERATED_METHODS
                else ""
            )
            hint = f" {method!r} is a method of {elsewhere}." if elsewhere else ""
            raise ParameterError(
                f"method must be one of {', '.join(known)}, or a Program; got {method!r}.{hint}", parameter="method"
            )
    elif not all(hasattr(method, part) for part in PROGRAM):
        raise ParameterError(
            f"method must be one of {', '.join(known)}, or a Program; got {type(method).__name__}.", parameter="method"
        )


def require_server(method: Any, server: str, server_rate: Any = SERVER_RATE) -> None:
    """Refuse adaptive servers for methods without averages, and a rate for plain averages."""
    if server not in SERVERS:
        raise ParameterError(f"server must be one of {', '.join(SERVERS)}; got {server!r}.", parameter="server")
    if server != SERVERS[0] and method not in SGD_METHODS:
        raise ParameterError(
            f"server={server!r} is for {', '.join(SGD_METHODS)}; the method is {_name(method)}.", parameter="server"
        )
    if server == SERVERS[0] and server_rate != SERVER_RATE:
        raise ParameterError(
            f"server_rate={server_rate!r} is for adaptive servers: {', '.join(SERVERS[1:])}. Use one of these, or "
            "remove server_rate.",
            parameter="server_rate",
        )


def require_topics(n_topics: Any) -> int:
    """Return the checked number of topics."""
    if isinstance(n_topics, bool) or not hasattr(n_topics, "__index__") or int(n_topics) < 1:
        raise ParameterError(f"n_topics must be a whole number of at least 1; got {n_topics!r}.", parameter="n_topics")
    return int(n_topics)


def require_words(program: Program, n_words: int) -> None:
    """Refuse more topics than words."""
    if program.rank > n_words:
        raise ParameterError(
            f"n_topics must be at most {n_words}, the number of words in the vocabulary; got {program.rank}. Use fewer "
            "topics, or prune the vocabulary less.",
            parameter="n_topics",
        )


def weighting_of(weighting: str | None, method: Any) -> str:
    """Return the weighting of rows for a method: tf-idf by default, counts for LDA."""
    counts_words = FEDERATED_NAMES.get(str(method), method) == "fedlda" or isinstance(method, FederatedLDA)
    if weighting is None:
        return COUNTS if counts_words else TFIDF
    if weighting not in WEIGHTINGS:
        raise ParameterError(
            f"weighting must be one of {', '.join(WEIGHTINGS)}; got {weighting!r}.", parameter="weighting"
        )
    if counts_words and weighting != COUNTS:
        raise ParameterError(
            f"weighting={weighting!r} is not for LDA, which models counts. Remove weighting.", parameter="weighting"
        )
    return weighting


def is_mixture(solver: Any) -> bool:
    """Whether weights are topic shares that sum to one, instead of a least-squares fit."""
    return isinstance(solver, TopicInference)


@dataclass(frozen=True, slots=True)
class TopicMeasures(Measures):
    """Measures of a round without further messages: no error; for LDA with full participation, the perplexity.

    Without an objective, or with sampled parties, the run does not stop early: all rounds are run.
    """

    has_perplexity: bool

    def error(self, done: Round) -> float:
        return math.nan

    def objective(self, done: Round, error: float) -> float:
        return float(done.metrics["perplexity"]) if self.has_perplexity else 0.0


def with_topic_measures(fit: FederatedFit, is_sampled: bool) -> FederatedFit:
    """Return the fit with its measures; without an objective the last model is kept."""
    if isinstance(fit.program, FederatedLDA) and not is_sampled:
        return replace(fit, measures=TopicMeasures(True))
    if isinstance(fit.program, FederatedLDA | FederatedDescent):
        return replace(fit, measures=TopicMeasures(False), stop=StoppingRule(0.0, fit.stop.time_budget))
    return fit


def _require_use(method: Any, options: Mapping[str, Any], known: Any) -> None:
    """Refuse options of critics and SGD for methods without them."""
    for name in ("warm_start_weights", *CRITIC_OPTIONS):
        value = options.get(name, PAPER_DEFAULTS[name])
        takers = methods_with(name)
        if value == PAPER_DEFAULTS[name] or (isinstance(method, str) and method in takers):
            continue
        those = [one for one in takers if one in known]
        raise ParameterError(
            f"{name}={value!r} is for {', '.join(those)}; the method is {_name(method)}. Remove it, or use {those[0]}.",
            parameter=name,
        )
    if not isinstance(options.get("warm_start_weights", False), bool):
        raise ParameterError(
            f"warm_start_weights must be True or False; got {options['warm_start_weights']!r}.",
            parameter="warm_start_weights",
        )


def _given(program: Any, n_topics: int | None) -> Program:
    rank = require_topics(program.rank)
    if n_topics is not None and n_topics != rank:
        raise ParameterError(
            f"n_topics={n_topics!r}, but the program has {rank}. Remove n_topics, or make both equal.",
            parameter="n_topics",
        )
    return program


def _name(method: Any) -> str:
    return repr(method) if isinstance(method, str) else type(method).__name__


def require_device(device: Any, program: Any) -> None:
    """Refuse a device that torch cannot use, and methods that do not use a device; None is NumPy."""
    if device is None:
        return
    if not isinstance(device, str):
        raise ParameterError(
            f'device must be the name of a device that torch knows, such as "cuda" or "cpu"; got {device!r}.',
            parameter="device",
        )
    if not isinstance(program, FederatedDescent):
        raise ParameterError(
            f"device={device!r} is for nmf-sgd, nmf-sgd-mi, fednmf and fednmf-mi; other methods use NumPy and compiled "
            "loops. Remove it, or use one of these.",
            parameter="device",
        )
    _require_usable(device)


def rows_on(device: str | None, rows: Any, dtype: Any = None) -> Matrix:
    """Return sparse rows as a Matrix, with NumPy or as a tensor on a device."""
    side = sparse.csr_array(rows)
    if device is None:
        return as_matrix(side, dtype)
    import torch

    if dtype is not None:
        side = side.astype(dtype, copy=False)
    parts = [side.indptr.astype(np.int64), side.indices.astype(np.int64), side.data]
    on_device = (torch.from_numpy(np.ascontiguousarray(part)).to(device) for part in parts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that its sparse tensors are in beta
        return as_matrix(torch.sparse_csr_tensor(*on_device, side.shape))


def _require_usable(device: str) -> None:
    try:
        import torch
    except ImportError as error:
        raise MissingExtra(
            f'device={device!r} needs PyTorch. Install it: pip install "partsong[torch]", or remove device.',
            parameter="device",
        ) from error
    try:
        is_here = float(torch.ones(2, device=device).sum()) == 2.0
    except (RuntimeError, AssertionError, NotImplementedError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[0].rstrip(".")
        raise ParameterError(
            f"device={device!r} cannot be used: {reason}. Use another one, or None for NumPy.", parameter="device"
        ) from None
    if not is_here:
        raise ParameterError(
            f"device={device!r} computes wrong results. Use another one, or None for NumPy.", parameter="device"
        )


@dataclass(frozen=True, slots=True)
class TopicRun:
    """Settings of a run: rounds, absences, reduction, engine, device, and stopping rule.

    `weighting` is that of the rows, for advice in messages.
    """

    rounds: int
    seed: int
    stop: StoppingRule = StoppingRule()
    absent: Mapping[int, frozenset[str]] | None = None
    reduction: Reduction = PlainReduction()
    engine: Engine | None = None
    device: str | None = None
    weighting: str = ""

    def engine_for(self, n_parties: int) -> Engine:
        """Return the engine: sequential for one party or a device, else parallel."""
        takes_turns = n_parties == 1 or self.device is not None
        return self.engine or (Sequential() if takes_turns else Parallel())


@dataclass(frozen=True, slots=True)
class Topics:
    """H (k × V) with the largest topics first, their shares, and how the run ended.

    Shares are of the explained data, or for mixtures of the documents; they sum to one.
    """

    H: np.ndarray
    shares: np.ndarray
    relative_error: float | None
    outcome: Outcome
    history: tuple[HistoryRow, ...]
    n_rounds: int


def learn(program: Any, rows: Mapping[str, DocumentRows], course: TopicRun, dtype: Any, watch: Watch) -> Topics:
    """Fit topics; the first Ctrl-C stops the fit and keeps the model."""
    shards = [
        Shard(name, rows_on(course.device, own.rows, dtype), key(course.seed, "secret", name))
        for name, own in rows.items()
    ]
    workers = runtime.available_threads() if len(shards) == 1 else 1
    absent = course.absent or {}
    schedule = Schedule(course.rounds, course.seed, absent=absent, kernel_threads=workers)
    engine = course.engine_for(len(shards))
    named = (program, shards, course.rounds, schedule, course.stop, engine, course.reduction)
    fit = with_topic_measures(simulate_rounds(*named), is_sampled=bool(absent))
    with graceful_interrupt() as interrupts:
        with topic_errors(program, course):
            training = run(fit, watch=watch, interrupts=interrupts)
        training.error_text = _topic_trouble(training, program, course)
        if is_mixture(program.solver):
            return _mixture(fit, training, rows, dtype)
        return _factors(fit, training, course)


def count_cooccurrence(H: np.ndarray, rows: Mapping[str, Any], seed: int, n: int = TOP) -> Cooccurrence | None:
    """Count the rows (n × V by party) with pairs of each topic's n strongest words; None if there are no pairs."""
    topics = top_columns(H, n)
    if not any(len(topic) > 1 for topic in topics):
        return None
    program = CooccurrenceSums.of(topics)
    if len(rows) == 1:
        return count_pairs(next(iter(rows.values())), program.topic_pairs)
    shards = [Shard(name, rows_as_matrix(own), key(seed, "secret", name)) for name, own in rows.items()]
    with topic_errors():
        return program.counts(run_single_round(program, shards, seed).checkpoint.server)


def _factors(fit: FederatedFit, training: Training, course: TopicRun) -> Topics:
    warn_about_divergence(training)
    done = finish(fit, training)
    warn_of_no_topics(fit.program, done, course.weighting)
    least = NEGLIGIBLE * done.H.max(axis=1, keepdims=True)
    H = np.where(least < done.H, done.H, np.zeros((), done.H.dtype))
    return Topics(H, done.shares, done.relative_error, training.outcome, tuple(training.history), training.rounds)


def _mixture(fit: FederatedFit, training: Training, rows: Mapping[str, DocumentRows], dtype: Any) -> Topics:
    """Topics as word probabilities, ordered by their share of the documents."""
    warn_about_divergence(training)
    program = fit.program
    topics = program.components(training.best)
    H = np.asarray(kernels.of(topics).to_numpy(topics))
    Ht = np.ascontiguousarray(H.T)
    with runtime.limit_kernel_threads(fit.threads):
        found = {shard.name: program.solver.solve_rows(shard.matrix, Ht) for shard in fit.shards}
    weights = [without_empty(own, rows[name]) for name, own in found.items()]
    totals = np.sum([W.sum(axis=0, dtype=np.float64) for W in weights], axis=0)
    order = np.argsort(-totals, kind="stable")
    kept = H[order].astype(H.dtype if dtype is None else dtype, copy=False)
    return Topics(kept, totals[order] / totals.sum(), None, training.outcome, tuple(training.history), training.rounds)


def without_empty(W: Any, counted: DocumentRows) -> Any:
    """Return W with zeros for documents without a known word."""
    return np.where(np.asarray(counted.is_empty)[:, None], np.zeros((), W.dtype), W)


@contextmanager
def topic_errors(program: Any = None, course: TopicRun | None = None) -> Iterator[None]:
    """Within this block errors of engines get advice for topic models."""
    try:
        yield
    except PartsongError as error:
        notes = [note for note in getattr(error, "__notes__", ()) if note not in ENGINE_ADVICE]
        if course is not None and isinstance(program, FederatedDescent) and _has_diverged(error, course.reduction):
            diverged = DivergenceError(step_size_advice(program, course.weighting))
            diverged.__notes__ = notes
            raise diverged from None
        error.__notes__ = notes
        raise


def _topic_trouble(training: Training, program: Any, course: TopicRun) -> str:
    """The trouble of a run that diverged after its first round, with advice for topic models."""
    if training.outcome is Outcome.DIVERGED and isinstance(program, FederatedDescent):
        return step_size_advice(program, course.weighting)
    return reduce(lambda trouble, note: trouble.replace(note, ""), ENGINE_ADVICE, training.error_text).strip()


def _has_diverged(error: PartsongError, reduction: Reduction) -> bool:
    """Whether the error means divergence: values that are not finite, all zero, or beyond the bound of secure sums."""
    is_beyond = isinstance(error, UploadError) and getattr(reduction, "bound", 0.0) >= WIDE_BOUND
    return is_beyond or isinstance(error, DivergenceError)


def step_size_advice(program: FederatedDescent, weighting: str) -> str:
    """Return the message for steps that are too large, with advice."""
    descent, rate = program.descent, getattr(program.descent.information, "rate", None)
    critic = "" if rate is None else f", critic_rate={rate:g}"
    return (
        "The fit diverged, or all topics became zero: the steps are too large for these texts "
        f"(rate={descent.rate:g}, batch={descent.batch}{critic}). {_smaller_steps(program, weighting)}"
    )


def warn_of_no_topics(program: Any, done: FitResult, weighting: str) -> None:
    """Warn if W H is zero and X is not."""
    if not isinstance(program, FederatedDescent):
        warn_if_model_is_zero(program.solver, done)
    elif is_zero(done):
        message = f"All topics are zero. {_smaller_steps(program, weighting)}"
        warnings.warn(message, EmptyModelWarning, stacklevel=2)


def _smaller_steps(program: FederatedDescent, weighting: str) -> str:
    """Advice for smaller steps. The largest eigenvalue of W_SᵀW_S/b, which bounds steps of H, is convex: it is smaller
    on average for larger batches.
    """
    information, ways = program.descent.information, ["a smaller rate", "a larger batch"]
    if isinstance(information, MutualInformation):
        ways.append("a smaller critic_rate")
        if not isinstance(information.bound, JensenShannon):
            ways.append('mi_gradient="js"')
    if not isinstance(program.server_update, Replace):
        ways.append("a smaller server_rate")
    if weighting == COUNTS:
        ways.append('weighting="tfidf", with rows of norm 1')
    return f"Use {', '.join(ways[:-1])} or {ways[-1]}."
