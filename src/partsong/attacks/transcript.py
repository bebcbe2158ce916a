"""Transcripts of recorded runs: uploads and the models they answer, as an observer has them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy import sparse

from partsong.attacks.findings import Finding
from partsong.attacks.moment import unit_of
from partsong.core.interfaces import Array, Layout, Message, Program, Shard
from partsong.data.conversion import as_matrix
from partsong.errors import ParameterError
from partsong.training.traffic import Traffic

ROUNDS = 2
"""Number of rounds replayed."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """The uploads of one round, and the model each party had received before.

    `total`: the sum, if only that is known; `uploads` then lacks the hidden ones.
    `dropouts`: parties that worked on the same model but dropped out before their upload arrived.
    """

    models: Mapping[str, Message]
    uploads: Mapping[str, Message]
    total: Message | None = None
    dropouts: tuple[str, ...] = ()


def transcript(traffic: Iterable[Traffic], program: Program, layout: Layout, *, asynchronous: bool) -> list[Exchange]:
    """Return the exchanges of a run from its first round on; the server's steps are replayed from the uploads.

    Every server can do that: its start comes from the shared seed. In an asynchronous run, a party's model is the reply
    to its own last upload, otherwise the latest one. Empty if uploads are masked.
    """
    server, model = program.start_server(layout)
    answered = dict.fromkeys(layout.parties, model)
    exchanges: list[Exchange] = []
    for number, sent in enumerate(traffic):
        uploads = {party: message for party, phase, message in sent if phase == 0}
        if not uploads:
            continue
        if unknown := sorted(uploads.keys() - set(layout.parties)):
            raise ParameterError(
                f"The traffic has parties that the layout lacks: {', '.join(unknown[:5])}. Pass the layout of the run."
            )
        expected = program.upload_spec(layout)
        forms = [sent.arrays.keys() for sent in uploads.values()]
        if expected and not all(any(form == kind.keys() for kind in expected) for form in forms):
            return []  # masked
        models = {party: answered[party] if asynchronous else model for party in uploads}
        exchanges.append(Exchange(models, uploads))
        before = models[min(uploads)] if asynchronous else model
        try:
            aggregate = program.aggregation([uploads[party] for party in sorted(uploads)], before)
            server, model = program.finish(server, aggregate)
        except (ArithmeticError, KeyError, IndexError, ValueError, RuntimeError) as error:
            raise ParameterError(
                f"The uploads of round {number} do not match this program: {error} Pass all rounds of one run from the "
                "first on, with its program and layout."
            ) from error
        answered.update(dict.fromkeys(uploads, model))
    return exchanges


def of_party(exchanges: Sequence[Exchange], party: str, *names: str) -> list[tuple[Message, Message]]:
    """Return (model, upload) of the exchanges in which a party sent all of these arrays."""
    return [
        (exchange.models[party], exchange.uploads[party])
        for exchange in exchanges
        if party in exchange.uploads and set(names) <= exchange.uploads[party].arrays.keys()
    ]


def to_float64(array: Array) -> np.ndarray:
    """Convert any array to a dense NumPy array in float64."""
    array = array.toarray() if sparse.issparse(array) else array
    return np.asarray(array.detach().cpu() if hasattr(array, "detach") else array, np.float64)


def replay_party(
    program: Program, layout: Layout, party: str, models: Sequence[Message], rows: np.ndarray, secret: int = 0
) -> list[Message]:
    """Return the uploads of a party with these rows (n × m) in response to these models."""
    shard = Shard(party, as_matrix(np.ascontiguousarray(rows, layout.dtype)), secret)
    state, uploads = program.start_party(shard, layout), []
    for model in models:
        state, upload = program.local(shard, state, model)
        uploads.append(upload)
    return uploads


def misfit(
    program: Program, layout: Layout, party: str, seen: Sequence[tuple[Message, Message]], rows: np.ndarray
) -> np.ndarray:
    """Return the relative differences between the uploads of these rows and the recorded ones, array by array."""
    models = [model for model, _ in seen[:ROUNDS]]
    again = replay_party(program, layout, party, models, rows)
    parts = []
    for (_, upload), answer in zip(seen[:ROUNDS], again, strict=True):
        for name, array in sorted(upload.arrays.items()):
            wanted = to_float64(array)
            parts.append((to_float64(answer[name]) - wanted).ravel() / max(float(np.linalg.norm(wanted)), 1e-300))
    return np.concatenate(parts)


@dataclass(slots=True)
class Clock:
    """A deadline (`time.monotonic`; None: none), and whether a search was cut off."""

    deadline: float | None = None
    was_over: bool = False

    def is_over(self) -> bool:
        """Return whether the deadline has passed, and remember it."""
        self.was_over = self.was_over or (self.deadline is not None and time.monotonic() >= self.deadline)
        return self.was_over

    def has(self, seconds: float) -> bool:
        """Return whether this much time is left; if not, the time counts as up."""
        if self.deadline is not None and time.monotonic() + seconds > self.deadline:
            self.was_over = True
        return not self.is_over()


@dataclass(frozen=True, slots=True)
class AttackContext:
    """A run as an attacker sees it and, for audits, the true rows.

    `others`: further recorded runs of the same parties. `mask_error`: largest error of masked sums.
    """

    exchanges: Sequence[Exchange]
    program: Any
    layout: Layout
    truth: Mapping[str, np.ndarray]
    others: tuple[AttackContext, ...] = ()
    clock: Clock = field(default_factory=Clock)
    mask_error: float | None = None

    def unit(self, cross: np.ndarray) -> float:
        """Return the relative rounding of uploads: of the number type, or of the masks if coarser."""
        rms = float(np.sqrt(np.mean(np.square(cross)))) or 1.0
        return unit_of(str(self.layout.dtype), None if self.mask_error is None else self.mask_error / rms)

    def seen(self, party: str, *names: str) -> list[tuple[Message, Message]]:
        """Return (model, upload) of the exchanges in which a party sent these arrays."""
        return of_party(self.exchanges, party, *names)


def with_error(
    context: AttackContext, finding: Finding, measure: Callable[[np.ndarray, np.ndarray], float]
) -> list[Finding]:
    """Add the error of a finding, if the truth is known."""
    if finding.party not in context.truth or finding.recovered is None:
        return [finding]
    return [replace(finding, error=measure(finding.recovered, context.truth[finding.party]))]
