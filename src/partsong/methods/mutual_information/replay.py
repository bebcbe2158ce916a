"""Descent on a GPU with CUDA graphs: a step is recorded once and replayed for every later batch.

A step is about a hundred small operations, and launching each takes the host longer than the GPU needs to run it. All
inputs and outputs of a step keep their addresses, and the batch counter is on the device, so one recording (a CUDA
graph) serves every batch of its size. Batches are padded with zero counts to the largest size they can have
(`PaddedBatch`).
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
"""Updates W_S and the buffers in place; returns an estimate to be summed, or None."""

WORTH = 64
"""Minimum number of batches for which recording pays off."""
KEPT = 4
"""Number of buffer sets that a thread keeps on the device."""
LARGEST = 8
"""Largest ratio of padded to actual entries: one long document makes all batches as long."""
_kept = threading.local()
_one_at_a_time = threading.Lock()


class ReplayBuffers:
    """Arrays with fixed addresses: Hᵀ (V × k), a second Hᵀ, HHᵀ, θ, and the documents of an epoch by batch."""

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
        """Copy the start values into the buffers."""
        self.Ht.copy_(Ht)
        torch.matmul(self.Ht.T, self.Ht, out=self.gram)
        for name, array in theta.items():
            self.theta[name].copy_(array)

    def epoch(self, documents: Documents, W: Tensor, order: np.ndarray) -> tuple[Tensor, Tensor]:
        """Run one epoch in this order; return the weights and the sum of all estimates."""
        places = torch.from_numpy(order).to(W.device)
        self._lay(documents, order)
        torch.index_select(W, 0, places, out=self.moving)
        self.counter.zero_()
        self.total.zero_()
        for first, last in pairwise(self.cuts):
            self._next(last - first)
        if int(self.counter) != len(self.cuts) - 1:
            taken = f"{int(self.counter)} of {len(self.cuts) - 1} recorded steps"
            raise PartsongError(f"The GPU took {taken}. This is a bug in partsong. Use the CPU, and report it.")
        settled = torch.empty_like(W)
        settled[places] = self.moving
        return settled, self.total

    def _lay(self, documents: Documents, order: np.ndarray) -> None:
        """Lay out documents in their new order, one batch per row."""
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
        """Process the next batch: run directly the first time, recorded the second, replayed from then on."""
        if self.Ht.device.type != "cuda" or size not in self.recordings:
            self.recordings[size] = None
            return self._work(size)
        with torch.cuda.device(self.Ht.device):
            if self.recordings[size] is None:
                self.recordings[size] = self._recorded(size)
            self.recordings[size].replay()

    def _recorded(self, size: int) -> Any:
        """Record a step without running it; one thread at a time."""
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
    """Whether replay pays off: on a GPU, with enough batches, and no document much longer than the others."""
    number = -(-len(documents) // batch)
    is_even = number * _capacity(documents, batch) <= LARGEST * max(1, int(documents.starts[-1]))
    return bool(Ht.is_cuda) and epochs * number >= WORTH and is_even


def replay_buffers(
    kind: str, batch: int, maker: Any, step: Step, documents: Documents, Ht: Tensor, theta: Mapping[str, Tensor]
) -> ReplayBuffers:
    """Return this thread's buffers for such documents and steps, cached or new, loaded with Hᵀ and θ.

    `maker` is the object that owns the step; equal objects have equal steps.
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
    """Entries of the longest documents that can meet in a batch, rounded up to limit the number of sizes."""
    most = int(np.sort(np.diff(documents.starts))[-batch:].sum())
    grain = max(1, (1 << most.bit_length()) // 16)
    return max(1, -(-most // grain) * grain)
