"""Time of an epoch of FedNMF+MI against its products alone: `PARTSONG_DATA=… python -m experiments.topics.speed`.

Both run over the same batches of Stack Overflow titles, party by party, on one thread, in turns; medians are compared.
"Products alone": the five products with W and H, the sparse ones, and two forward and backward passes of the critic,
into preallocated arrays, without shuffling, projection or steps.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import resource
import time
from statistics import median

import numpy as np
from scipy.sparse import csr_array
from sklearn.feature_extraction.text import CountVectorizer

from experiments.shared.datasets import path_of
from partsong.core import runtime
from partsong.core.interfaces import Layout, Message, Shard
from partsong.core.streams import key
from partsong.data.conversion import as_matrix
from partsong.methods.fednmf import FederatedDescent
from partsong.methods.mutual_information.batches import Documents, to_documents
from partsong.methods.mutual_information.critics import JensenShannon, MutualInformation, NoInformation, Separable
from partsong.methods.mutual_information.descent import Descent
from partsong.methods.mutual_information.numpy_backend import add_transposed, times

CASES = {
    "FedNMF": NoInformation(),
    "FedNMF+MI, concat, dv": MutualInformation(),
    "FedNMF+MI, concat, js": MutualInformation(bound=JensenShannon()),
    "FedNMF+MI, separable, dv": MutualInformation(critic=Separable()),
}


def titles() -> csr_array:
    """Word counts of the titles, without English stop words."""
    with gzip.open(path_of("stack_overflow.csv.gz"), "rt", encoding="utf-8", newline="") as file:
        texts = [row["text"] for row in csv.DictReader(file)]
    return csr_array(CountVectorizer(stop_words="english", dtype=np.float32).fit_transform(texts))


def shards_of(X: csr_array, parties: int) -> list[Shard]:
    order = np.array_split(np.random.default_rng(0).permutation(X.shape[0]), parties)
    return [Shard(f"p{i:02d}", as_matrix(X[rows]), key(1, f"p{i:02d}")) for i, rows in enumerate(order)]


def products_alone(descent: Descent, documents: Documents, W: np.ndarray, model: Message) -> float:
    """Seconds for the products of an epoch with fixed W, H and critic."""
    Ht = np.ascontiguousarray(model["H"].T)
    theta = {name[6:]: array.copy() for name, array in model.arrays.items() if name != "H"}
    small, out, information = np.eye(W.shape[1], dtype=W.dtype), np.empty_like(Ht), descent.information
    began = time.perf_counter()
    for bag in documents.batches(descent.batch):
        W_S = W[bag.first : bag.last]
        W_S.T @ W_S
        np.matmul(Ht, small, out=out)
        add_transposed(bag, W_S, 0.0, out)
        times(bag, Ht)
        W_S @ (Ht.T @ Ht)
        if isinstance(information, MutualInformation):
            critic, slopes = information.critic, np.full((len(bag), len(bag)), 1e-3, W.dtype)
            reading = critic.read(theta, bag)
            critic.pull(theta, critic.scores(theta, reading, W_S)[1], slopes)
            critic.ascend(theta, bag, critic.scores(theta, reading, W_S)[1], slopes, 0.0)
    return time.perf_counter() - began


def epoch(program: FederatedDescent, shards: list[Shard], model: Message) -> tuple[float, float]:
    """Seconds of `local` at all parties, and of its products alone."""
    whole = bare = 0.0
    layout = Layout.of(shards, 0)
    for shard in shards:
        state = program.start_party(shard, layout)
        documents, W = to_documents(shard.matrix), program._weights(shard, state, model["H"].T)
        bare += products_alone(program.descent, documents, W, model)
        began = time.perf_counter()
        program.local(shard, state, model)
        whole += time.perf_counter() - began
    return whole, bare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parties", type=int, default=10)
    parser.add_argument("--topics", type=int, default=50)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    asked = parser.parse_args()
    X = titles()
    shards = shards_of(X, asked.parties)
    print(f"{X.shape[0]} titles, {X.shape[1]} words, {X.nnz} counts, {asked.parties} parties, k={asked.topics}")
    with runtime.limit_kernel_threads(1):
        for name, information in CASES.items():
            program = FederatedDescent(asked.topics, Descent(1, asked.batch, 0.05, information=information))
            _, model = program.start_server(Layout.of(shards, 0))
            epoch(program, shards[:1], model)
            taken = [epoch(program, shards, model) for _ in range(asked.turns)]
            whole, bare = (median(column) for column in zip(*taken, strict=True))
            ratio = median(a / b for a, b in taken)
            print(f"{name:26s} epoch {whole:6.2f} s, products alone {bare:6.2f} s, ratio {ratio:.2f}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory {peak:.2f} GiB")


if __name__ == "__main__":
    main()
