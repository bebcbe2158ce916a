"""Descent on a GPU without its host: a step on a batch is recorded once, and replayed for every batch after it.

A step is some hundred small operations, each of which takes a host longer to ask for than a GPU to do. All that a step
reads and writes stays in place here, and which batch is next is counted on the device, so that a recording of it
(a CUDA graph) is right for every batch of its size. Batches are padded with words that occur zero times to the most
that a batch of that size can have (`PaddedBatch`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partsong.errors import PartsongError
from partsong.methods.mutual_information.batches import Documents, batch_bounds
from partsong.methods.mutual_information.padded_batch import PaddedBatch

Step = Callable[[PaddedBatch, Tensor, "ReplayBuffers"], Tensor | None]
"""Moves W_S in place, and what is on the workbench; returns an estimate that is summed up, or none."""

WORTH = 64
"""Fewer batches than this are not worth a recording."""
KEPT = 4
"""Workbenches of a thread, which stay on the device until others take their place or the thread ends."""
LARGEST = 8
"""Times as many entries as there are, and no more, may be padded: one long document makes all batches as long."""
_kept = threading.local()
_one_at_a_time = threading.Lock()


class ReplayBuffers:
    """Arrays that stay where they are: Hᵀ (V × k), its double, HHᵀ, θ, and the documents of an epoch batch by batch."""

    def __init__(self, key: Any, step: Step, documents: Documents, Ht: Tensor, theta: Mapping[str, Tensor]) -> None:
        n, capacity, batch = len(documents), _capacity(documents, key[1]), key[1]
        self.step, self.cuts = step, batch_bounds(n, batch)
        sizes = [last - first for first, last in pairwise(self.cuts)]
        number, largest = len(sizes), max(sizes)
        self.Ht, self.spare = Ht.clone(), torch.empty_like(Ht)
        self.gram = Ht.new_empty(Ht.shape[1], Ht.shape[1])
        self.theta = {name: array.clone() for name, array in theta.items()}
        self.moving = Ht.new_zeros(n, Ht.shape[1])
        self.total = Ht.new_zeros(())
        whole = {"dtype": torch.int64, "device": Ht.device}
        self.counter = torch.zeros(1, **whole)
        self.firsts = torch.tensor(self.cuts[:-1], **whole)
        self.places = torch.arange(largest, **whole)
        self.words, self.owners = (torch.empty(number, capacity, **whole) for _ in range(2))
        self.counts = documents.counts.new_empty(number, capacity)
        self.starts = torch.zeros(number, 2 * largest, **whole)
        beyond = torch.arange(capacity, **whole)
        self.padding = beyond % len(Ht), beyond.new_zeros(()), beyond % min(sizes)
        self.recordings: dict[int, Any] = {}

    def load(self, Ht: Tensor, theta: Mapping[str, Tensor]) -> None:
        """Begin from these."""
        self.Ht.copy_(Ht)
        torch.matmul(self.Ht.T, self.Ht, out=self.gram)
        for name, array in theta.items():
            self.theta[name].copy_(array)

    def epoch(self, documents: Documents, W: Tensor, order: np.ndarray) -> tuple[Tensor, Tensor]:
        """One pass in this order: weights after it, and the sum of all estimates."""
        places = torch.from_numpy(order).to(W.device)
        self._lay(documents, order)
        torch.index_select(W, 0, places, out=self.moving)
        self.counter.zero_()
        self.total.zero_()
        for first, last in pairwise(self.cuts):
            self._next(last - first)
        if int(self.counter) != len(self.cuts) - 1:
            taken = f"{int(self.counter)} of {len(self.cuts) - 1} recorded steps"
            raise PartsongError(f"The GPU took {taken}: a fault of ours. Learn on the CPU, and tell us.")
        settled = torch.empty_like(W)
        settled[places] = self.moving
        return settled, self.total

    def _lay(self, documents: Documents, order: np.ndarray) -> None:
        """Documents in their new order, each batch in a row of its own."""
        lengths, cuts = np.diff(documents.starts)[order], np.asarray(self.cuts)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        batch = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))
        column, in_batch = np.arange(len(order)) - cuts[batch], starts[:-1] - starts[cuts[batch]]
        moves = batch * self.words.shape[1] + in_batch - starts[:-1], documents.starts[:-1][order] - starts[:-1]
        entry = np.arange(starts[-1])
        entries_by_place = [*(entry + np.repeat(move, lengths) for move in moves), np.repeat(column, lengths)]
        target, source, owner = torch.from_numpy(np.stack(entries_by_place)).to(self.words.device)
        entries = documents.words[source], documents.counts[source], owner
        for held, padding, values in zip((self.words, self.counts, self.owners), self.padding, entries, strict=True):
            held.copy_(padding.expand_as(held)).view(-1)[target] = values.to(held.dtype)
        size, end = np.diff(cuts)[batch], np.diff(starts[cuts])[batch]
        laid = np.zeros(tuple(self.starts.shape), np.int64)
        laid[batch, column] = in_batch
        laid[batch, size + column] = end + (self.words.shape[1] - end) * column // size
        self.starts.copy_(torch.from_numpy(laid))

    def _next(self, size: int) -> None:
        """The next batch: done step by step the first time, recorded the second, replayed from then on."""
        if self.Ht.device.type != "cuda" or size not in self.recordings:
            self.recordings[size] = None
            return self._work(size)
        with torch.cuda.device(self.Ht.device):
            if self.recordings[size] is None:
                self.recordings[size] = self._recorded(size)
            self.recordings[size].replay()

    def _recorded(self, size: int) -> Any:
        """A step that was not taken, only written down; by one thread at a time."""
        recording, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.Ht.device)
        with _one_at_a_time, torch.cuda.graph(recording, stream=stream, capture_error_mode="thread_local"):
            self._work(size)
        return recording

    def _work(self, size: int) -> None:
        now = self.counter
        words, counts, owners, starts = (
            held.index_select(0, now)[0] for held in (self.words, self.counts, self.owners, self.starts)
        )
        places = self.firsts.index_select(0, now) + self.places[:size]
        W_S = self.moving.index_select(0, places)
        estimate = self.step(PaddedBatch(words, counts, owners, starts[: 2 * size]), W_S, self)
        self.moving.index_copy_(0, places, W_S)
        if estimate is not None:
            self.total.add_(estimate)
        self.counter.add_(1)


def is_worth_it(documents: Documents, Ht: Any, batch: int, epochs: int) -> bool:
    """On a GPU, often enough, and without a document that is much longer than others."""
    number = -(-len(documents) // batch)
    is_even = number * _capacity(documents, batch) <= LARGEST * max(1, int(documents.starts[-1]))
    return bool(Ht.is_cuda) and epochs * number >= WORTH and is_even


def replay_buffers(
    kind: str, batch: int, maker: Any, step: Step, documents: Documents, Ht: Tensor, theta: Mapping[str, Tensor]
) -> ReplayBuffers:
    """The one that this thread used for such documents and steps before, or a new one; ready to begin from Hᵀ and θ.

    `maker` is what the step belongs to: equal ones have equal steps.
    """
    sizes = (len(documents), _capacity(documents, batch), tuple(Ht.shape), Ht.dtype, str(Ht.device))
    key = (kind, batch, maker, *sizes)
    kept: OrderedDict[Any, ReplayBuffers] = _kept.__dict__.setdefault("benches", OrderedDict())
    if key not in kept:
        kept[key] = ReplayBuffers(key, step, documents, Ht, theta)
        if len(kept) > KEPT:
            kept.popitem(last=False)
            torch.cuda.empty_cache()
    kept.move_to_end(key)
    kept[key].load(Ht, theta)
    return kept[key]


def _capacity(documents: Documents, batch: int) -> int:
    """Words in the longest documents that could meet in a batch, up to an eighth of a power of two."""
    most = int(np.sort(np.diff(documents.starts))[-batch:].sum())
    grain = max(1, (1 << most.bit_length()) // 16)
    return max(1, -(-most // grain) * grain)
