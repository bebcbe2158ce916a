"""Methods for topics by name: the program that each stands for, and what it takes to follow it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from partsong.core import Program, Round
from partsong.errors import ParameterError
from partsong.fitting import Task
from partsong.local.lda_rows import TopicRows
from partsong.methods import LOCAL_STEPS, alignment_for, start_of
from partsong.programs.federated_lda import FederatedLDA
from partsong.programs.topic_rounds import TopicRounds
from partsong.recipes import shared_statistics
from partsong.running import Stop
from partsong.settings import PROGRAM, alignment_of, program_of, real_number
from partsong.topic_names import ALONE, DESCENDING, DESCENTS, SERVERS, TOGETHER
from partsong.topic_recipes import SERVER_RATE, fednmf, fednmf_mi
from partsong.topic_words import COUNTS, TFIDF, WEIGHTINGS

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
