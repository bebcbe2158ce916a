"""What topic models tell of a fit that goes wrong: ways out that these models have."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from partsong.aggregate.server import Replace
from partsong.core import Checkpoint, Engine, Program, Reduction, Round, Schedule, Shard
from partsong.engines.company import WAYS_ON_WITH_ALL
from partsong.engines.rounds import WAYS_ON
from partsong.errors import DivergenceError, PartsongError, UploadError
from partsong.finished import Finished
from partsong.fitting import NOTHING, EmptyModelWarning, Task, warn_of_nothing
from partsong.mutual.information import MutualInformation
from partsong.mutual.smile import JensenShannon
from partsong.programs.topic_rounds import TopicRounds
from partsong.topic_words import COUNTS

OF_ENGINES = (WAYS_ON, WAYS_ON_WITH_ALL)
"""Leaving a party out, and checkpoints: a topic model has neither."""

BEYOND = 1e9
"""Rows of topics have no such numbers, unless by steps that are too large; it is what masks let pass by themselves."""


@dataclass(frozen=True, slots=True)
class Advising:
    """An engine whose errors end with what the caller of a topic model can do; all else is that of `engine`.

    `weighting` is what the rows of a descent are; tf-idf is not proposed to those that have it.
    """

    engine: Engine
    weighting: str = ""

    def run(
        self,
        program: Program,
        shards: Sequence[Shard],
        schedule: Schedule,
        *,
        reduction: Reduction,
        resume: Checkpoint | None = None,
    ) -> Iterator[Round]:
        """The engine's rounds."""
        try:
            yield from self.engine.run(program, shards, schedule, reduction=reduction, resume=resume)
        except PartsongError as error:
            notes = [note for note in getattr(error, "__notes__", ()) if note not in OF_ENGINES]
            if isinstance(program, TopicRounds) and _has_run_away(error, reduction):
                raise _with(DivergenceError(told_of_steps(program, self.weighting)), notes) from None
            _with(error, notes)
            raise


def _has_run_away(error: PartsongError, reduction: Reduction) -> bool:
    """Numbers that are not finite, all zero, or beyond what wide masks let pass."""
    is_beyond = isinstance(error, UploadError) and getattr(reduction, "bound", 0.0) >= BEYOND
    return is_beyond or isinstance(error, DivergenceError)


def told_of_steps(program: TopicRounds, weighting: str) -> str:
    """That the steps of a descent are too large, and what to do about it."""
    descent, rate = program.descent, getattr(program.descent.information, "rate", None)
    critic = "" if rate is None else f", critic_rate={rate:g}"
    return (
        "Numbers grew beyond all measure, or all topics have fallen to zero: the steps are too large for these texts "
        f"(rate={descent.rate:g}, batch={descent.batch}{critic}). {_smaller_steps(program, weighting)}"
    )


def warn_of_no_topics(task: Task, done: Finished, weighting: str) -> None:
    """Say so where W H is zero and X is not."""
    if not isinstance(task.program, TopicRounds):
        warn_of_nothing(task, done)
    elif done.squared_norm > 0 and done.squared_error >= (1 - NOTHING) * done.squared_norm:
        told = f"The topics are zero: they explain nothing of these texts. {_smaller_steps(task.program, weighting)}"
        warnings.warn(told, EmptyModelWarning, stacklevel=2)


def _smaller_steps(program: TopicRounds, weighting: str) -> str:
    """Settings that make them smaller. The largest eigenvalue of W_SᵀW_S/b, which bounds steps of H, is convex: over
    larger batches it is smaller on average.
    """
    information, ways = program.descent.information, ["a smaller rate", "a larger batch"]
    if isinstance(information, MutualInformation):
        ways.append("a smaller critic_rate")
        if not isinstance(information.bound, JensenShannon):
            ways.append("mi_gradient='js'")
    if not isinstance(program.server_update, Replace):
        ways.append("a smaller server_rate")
    if weighting == COUNTS:
        ways.append("weighting='tfidf', by which all rows have norm 1")
    return f"Take {', '.join(ways[:-1])} or {ways[-1]}."


def _with(error: PartsongError, notes: Sequence[str]) -> PartsongError:
    error.__notes__ = list(notes)
    return error
