"""Projected stochastic gradient descent on W and H by mini-batches of documents."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Real
from types import ModuleType
from typing import NamedTuple

import numpy as np

from partsong.core import Array
from partsong.errors import DivergenceError, ParameterError
from partsong.mutual.critics import Theta
from partsong.mutual.documents import Bag, Documents, operations
from partsong.mutual.information import MutualInformation, NoInformation

WEIGHT_STEPS = ("batch", "document")


class Learned(NamedTuple):
    """W (n × k), Hᵀ (V × k), θ, and the mean of Î over the batches of the last epoch (NaN without a critic)."""

    W: Array
    Ht: Array
    theta: Theta
    information: float


@dataclass(frozen=True, slots=True)
class Descent:
    """`epochs` passes over documents in new order, by batches S of nearly `batch` of them (FedNMF+MI, Alg. 1):

        L = (1/b) ‖X_S − W_S H‖² − λ Î(θ; X_S, W_S)
        1.  H   ← [H − rate ∂L/∂H]₊        ∂L/∂H   = (2/b) (W_SᵀW_S H − W_SᵀX_S)
        2.  W_S ← [W_S − rate ∂L/∂W_S]₊    ∂L/∂W_S = (2/b) (W_S HHᵀ − X_SHᵀ) − λ ∂Î/∂W_S, with the new H
        3.  θ   ← θ + rate ∂Î/∂θ           with the new W_S

    [·]₊ is the projection on what is not negative, which the paper leaves out. A document is in one batch of an epoch,
    so its step shrinks with b, while H takes n/b of them: `weight_step="document"` moves W_S by b times the gradient,
    each document by that of its own error. Products with X are sparse; those with WᵀW and HHᵀ take the cheaper order.
    """

    epochs: int = 10
    batch: int = 64
    rate: float = 0.05
    weight_step: str = "batch"
    information: NoInformation | MutualInformation = field(default_factory=NoInformation)

    def __post_init__(self) -> None:
        for name in ("epochs", "batch"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise ParameterError(f"Descent needs a whole number {name} ≥ 1; got {value!r}.")
        if not isinstance(self.rate, Real) or not 0 < self.rate < float("inf"):
            raise ParameterError(f"The rate of descent must be a number above 0; got {self.rate!r}.")
        if self.weight_step not in WEIGHT_STEPS:
            raise ParameterError(f'weight_step is "batch" or "document"; got {self.weight_step!r}.')

    def run(self, documents: Documents, W: Array, Ht: Array, theta: Theta, draw: np.random.Generator) -> Learned:
        """All epochs; arguments stay as they are."""
        Ht, theta, seen = Ht + 0, {name: array + 0 for name, array in theta.items()}, float("nan")
        must_have_topics = bool((Ht > 0).any()) and float(documents.counts.sum()) > 0
        for epoch in range(self.epochs):
            order = draw.permutation(len(documents))
            W, Ht, seen = self._epoch(documents, W, Ht, theta, order)
            self._require_sound(epoch, Ht, theta, must_have_topics)
        return Learned(W, Ht, theta, seen)

    def settle(self, documents: Documents, W: Array, Ht: Array, theta: Theta, draw: np.random.Generator) -> Array:
        """Epochs of step 2 alone: weights for topics and a critic that stay as they are, information included."""
        on, gram = operations(Ht), Ht.T @ Ht
        for _ in range(self.epochs):
            order = draw.permutation(len(documents))
            places = on.places(order, W)
            moving, W = W[places], W + 0
            for bag in documents.reordered(order).batches(self.batch):
                W_S = moving[bag.first : bag.last]
                fit = (2.0 / len(bag)) * (W_S @ gram - on.times(bag, Ht))
                pull = self.information.pull(theta, self.information.read(theta, bag), W_S)
                self._move_weights(on, W_S, fit - pull)
            W[places] = moving
        return W

    def _epoch(
        self, documents: Documents, W: Array, Ht: Array, theta: Theta, order: np.ndarray
    ) -> tuple[Array, Array, float]:
        on = operations(Ht)
        places = on.places(order, W)
        shuffled, moving, spare = documents.reordered(order), W[places], Ht + 0
        total, count = 0.0, 0
        for bag in shuffled.batches(self.batch):
            W_S = moving[bag.first : bag.last]
            Ht, spare = self._move_topics(on, bag, W_S, Ht, spare), Ht
            reading = self.information.read(theta, bag)
            self._move_weights(on, W_S, fit_gradient(on, bag, W_S, Ht) - self.information.pull(theta, reading, W_S))
            estimate = self.information.learn(theta, bag, reading, W_S, self.rate)
            if len(bag) > 1:
                total, count = total + estimate, count + 1
        settled = W + 0
        settled[places] = moving
        return settled, Ht, float(total) / count if count else float("nan")

    def _move_topics(self, on: ModuleType, bag: Bag, W_S: Array, Ht: Array, out: Array) -> Array:
        """[Hᵀ (I − c W_SᵀW_S) + c X_SᵀW_S]₊ with c = 2 rate/b, in `out`."""
        b, k = W_S.shape
        step = 2.0 * self.rate / b
        if 2 * b < k:
            on.product(Ht @ W_S.T, -step * W_S, out)
            out += Ht
        else:
            on.product(Ht, on.unit(k, Ht) - step * (W_S.T @ W_S), out)
        on.add_transposed(bag, W_S, step, out)
        return on.rectify(out)

    def _move_weights(self, on: ModuleType, W_S: Array, gradient: Array) -> None:
        """[W_S − rate · gradient]₊ in place; with b times the gradient where documents count for themselves."""
        W_S -= self.rate * (len(W_S) if self.weight_step == "document" else 1) * gradient
        on.rectify(W_S)

    def _require_sound(self, epoch: int, Ht: Array, theta: Theta, must_have_topics: bool) -> None:
        """Refuse numbers that have run away, or topics that have all fallen to zero."""
        is_finite = all(np.isfinite(float(array.sum())) for array in (Ht, *theta.values()))
        has_collapsed = is_finite and must_have_topics and not bool((Ht > 0).any())
        if is_finite and not has_collapsed:
            return
        fate = "all topics have fallen to zero" if has_collapsed else "numbers grew beyond all measure"
        critic = "" if isinstance(self.information, NoInformation) else ", or a smaller rate for the critic"
        raise DivergenceError(
            f"In epoch {epoch + 1} of {self.epochs} {fate}: the steps are too large for these counts "
            f"(rate={self.rate:g}, batch={self.batch}, weight_step={self.weight_step!r}). Take a smaller rate{critic}, "
            "or tf-idf with rows of norm 1 in place of counts."
        )


def fit_gradient(on: ModuleType, bag: Bag, W_S: Array, Ht: Array) -> Array:
    """(2/b) (W_S HHᵀ − X_SHᵀ) (b × k)."""
    b, k = W_S.shape
    fitted = (Ht @ W_S.T).T @ Ht if 2 * b < k else W_S @ (Ht.T @ Ht)
    return (2.0 / b) * (fitted - on.times(bag, Ht))
