"""Projected stochastic gradient descent on W and H over mini-batches of documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Real
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from partsong.core.interfaces import Array
from partsong.core.parameters import whole_number
from partsong.errors import DivergenceError, ParameterError
from partsong.methods.mutual_information.batches import Batch, Documents, batch_bounds, operations
from partsong.methods.mutual_information.critics import MutualInformation, NoInformation, Theta

WEIGHT_STEPS = ("batch", "document")


class DescentResult(NamedTuple):
    """W (n × k), Hᵀ (V × k), θ, and the mean of Î over the batches of the last epoch (NaN without a critic)."""

    W: Array
    Ht: Array
    theta: Theta
    information: float


@dataclass(frozen=True, slots=True)
class Descent:
    """`epochs` passes over shuffled documents, in batches S of about `batch` documents (FedNMF+MI, Alg. 1):

        L = (1/b) ‖X_S − W_S H‖² − λ Î(θ; X_S, W_S)
        1.  H   ← [H − rate ∂L/∂H]₊        ∂L/∂H   = (2/b) (W_SᵀW_S H − W_SᵀX_S)
        2.  W_S ← [W_S − rate ∂L/∂W_S]₊    ∂L/∂W_S = (2/b) (W_S HHᵀ − X_SHᵀ) − λ ∂Î/∂W_S, with the new H
        3.  θ   ← θ + rate ∂Î/∂θ           with the new W_S

    [·]₊ is the projection onto non-negative numbers, which the paper omits. A document is in one batch per epoch, so
    its step shrinks with b, while H takes n/b steps. `weight_step="document"` moves W_S by b times the gradient, i.e.
    each document by the gradient of its own error. Products with X are sparse; those with WᵀW and HHᵀ use the cheaper
    order.
    """

    epochs: int = 10
    batch: int = 64
    rate: float = 0.05
    weight_step: str = "batch"
    information: NoInformation | MutualInformation = field(default_factory=NoInformation)

    def __post_init__(self) -> None:
        for name in ("epochs", "batch"):
            whole_number(f"Descent: {name}", getattr(self, name))
        if not isinstance(self.rate, Real) or not 0 < self.rate < float("inf"):
            raise ParameterError(f"rate must be a number above 0; got {self.rate!r}.")
        if self.weight_step not in WEIGHT_STEPS:
            raise ParameterError(f'weight_step must be "batch" or "document"; got {self.weight_step!r}.')

    def run(self, documents: Documents, W: Array, Ht: Array, theta: Theta, draw: np.random.Generator) -> DescentResult:
        """Run all epochs; arguments are not modified."""
        Ht, theta, seen = Ht + 0, {name: array + 0 for name, array in theta.items()}, float("nan")
        must_have_topics = bool((Ht > 0).any()) and float(documents.counts.sum()) > 0
        buffers = self._replay_buffers("learn", self._learn_on, documents, Ht, theta)
        for epoch in range(self.epochs):
            order = draw.permutation(len(documents))
            if buffers is None:
                W, Ht, seen = self._epoch(documents, W, Ht, theta, order)
            else:
                W, total = buffers.epoch(documents, W, order)
                Ht, theta, seen = buffers.Ht, buffers.theta, self._mean(total, buffers.cuts)
            self._require_sound(epoch, Ht, theta, must_have_topics)
        if buffers is not None:
            Ht, theta = Ht + 0, {name: array + 0 for name, array in theta.items()}
        return DescentResult(W, Ht, theta, float(seen))

    def fit_weights(self, documents: Documents, W: Array, Ht: Array, theta: Theta, draw: np.random.Generator) -> Array:
        """Run step 2 only: fit weights, with mutual information, while topics and critic stay fixed."""
        on, gram = operations(Ht), Ht.T @ Ht
        buffers = self._replay_buffers("settle", self._fit_weights_on, documents, Ht, theta)
        for _ in range(self.epochs):
            order = draw.permutation(len(documents))
            if buffers is not None:
                W, _total = buffers.epoch(documents, W, order)
                continue
            places = on.places(order, W)
            moving, W = W[places], W + 0
            for batch in documents.reordered(order).batches(self.batch):
                self._fit_weights(on, batch, moving[batch.first : batch.last], Ht, gram, theta)
            W[places] = moving
        return W

    def _epoch(
        self, documents: Documents, W: Array, Ht: Array, theta: Theta, order: np.ndarray
    ) -> tuple[Array, Array, Array | float]:
        on = operations(Ht)
        places = on.places(order, W)
        shuffled, moving, spare = documents.reordered(order), W[places], Ht + 0
        total: Array | float = 0.0
        for batch in shuffled.batches(self.batch):
            W_S = moving[batch.first : batch.last]
            estimate = self._learn(on, batch, W_S, Ht, spare, theta)
            Ht, spare = spare, Ht
            if len(batch) > 1:
                total = total + estimate
        settled = W + 0
        settled[places] = moving
        return settled, Ht, self._mean(total, batch_bounds(len(documents), self.batch))

    def _learn(self, on: ModuleType, batch: Batch, W_S: Array, Ht: Array, spare: Array, theta: Theta) -> Array | float:
        """Take steps 1 to 3; the new Hᵀ is in `spare`. Return Î."""
        moved = self._move_topics(on, batch, W_S, Ht, spare)
        reading = self.information.read(theta, batch)
        self._move_weights(on, W_S, fit_gradient(on, batch, W_S, moved) - self.information.pull(theta, reading, W_S))
        return self.information.learn(theta, batch, reading, W_S, self.rate)

    def _fit_weights(self, on: ModuleType, batch: Batch, W_S: Array, Ht: Array, gram: Array, theta: Theta) -> None:
        """Take step 2 with fixed Hᵀ and θ."""
        fit = (2.0 / len(batch)) * (W_S @ gram - on.times(batch, Ht))
        pull = self.information.pull(theta, self.information.read(theta, batch), W_S)
        self._move_weights(on, W_S, fit - pull)

    def _learn_on(self, batch: Any, W_S: Array, buffers: Any) -> Array | None:
        estimate = self._learn(operations(W_S), batch, W_S, buffers.Ht, buffers.spare, buffers.theta)
        buffers.Ht.copy_(buffers.spare)
        return None if isinstance(estimate, float) else estimate

    def _fit_weights_on(self, batch: Any, W_S: Array, buffers: Any) -> None:
        self._fit_weights(operations(W_S), batch, W_S, buffers.Ht, buffers.gram, buffers.theta)

    def _replay_buffers(self, kind: str, step: Any, documents: Documents, Ht: Array, theta: Theta) -> Any:
        """Buffers for replaying recorded steps on a GPU; None if steps are launched one by one."""
        if isinstance(Ht, np.ndarray):
            return None
        from partsong.methods.mutual_information import replay as replayed

        if not replayed.is_worth_it(documents, Ht, self.batch, self.epochs):
            return None
        return replayed.replay_buffers(kind, self.batch, self, step, documents, Ht, theta)

    def _mean(self, total: Array | float, cuts: Sequence[int]) -> Array | float:
        """The mean of estimates over the batches that have one."""
        count = sum(last - first > 1 for first, last in pairwise(cuts))
        return total / count if count and self.information.strength else float("nan")

    def _move_topics(self, on: ModuleType, batch: Batch, W_S: Array, Ht: Array, out: Array) -> Array:
        """[Hᵀ (I − c W_SᵀW_S) + c X_SᵀW_S]₊ with c = 2 rate/b, in `out`."""
        b, k = W_S.shape
        step = 2.0 * self.rate / b
        if 2 * b < k:
            on.product(Ht @ W_S.T, -step * W_S, out)
            out += Ht
        else:
            on.product(Ht, on.unit(k, Ht) - step * (W_S.T @ W_S), out)
        on.add_transposed(batch, W_S, step, out)
        return on.rectify(out)

    def _move_weights(self, on: ModuleType, W_S: Array, gradient: Array) -> None:
        """[W_S − rate · gradient]₊ in place; with b times the gradient for weight_step "document"."""
        W_S -= self.rate * (len(W_S) if self.weight_step == "document" else 1) * gradient
        on.rectify(W_S)

    def _require_sound(self, epoch: int, Ht: Array, theta: Theta, must_have_topics: bool) -> None:
        """Raise if numbers diverged or all topics collapsed to zero."""
        is_finite = all(np.isfinite(float(array.sum())) for array in (Ht, *theta.values()))
        has_collapsed = is_finite and must_have_topics and not bool((Ht > 0).any())
        if is_finite and not has_collapsed:
            return
        fate = "all topics collapsed to zero" if has_collapsed else "the descent diverged"
        critic = "" if isinstance(self.information, NoInformation) else ", a smaller critic_rate"
        raise DivergenceError(
            f"In epoch {epoch + 1} of {self.epochs} {fate}: the steps are too large for these counts "
            f"(rate={self.rate:g}, batch={self.batch}, weight_step={self.weight_step!r}). Use a smaller rate{critic}, "
            "or tf-idf rows of norm 1 instead of counts."
        )


def fit_gradient(on: ModuleType, batch: Batch, W_S: Array, Ht: Array) -> Array:
    """(2/b) (W_S HHᵀ − X_SHᵀ) (b × k)."""
    b, k = W_S.shape
    fitted = (Ht @ W_S.T).T @ Ht if 2 * b < k else W_S @ (Ht.T @ Ht)
    return (2.0 / b) * (fitted - on.times(batch, Ht))
