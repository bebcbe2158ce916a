"""Time to agree on a vocabulary with secure aggregation: `python -m experiments.topics.vocabulary`.

Every party holds `--terms` words. "alike": all hold the same words. "zipf": sampled without replacement from three
times as many words by Zipf's law, so that parties share frequent words and each has rare ones. "apart": parties share
only a handful of words, which is the largest number of distinct words.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from typing import cast

import numpy as np

from partsong.core.interfaces import Matrix, Shard
from partsong.core.streams import stream
from partsong.engines.local import Parallel
from partsong.topics.agreement.encoding import fresh_key
from partsong.topics.agreement.protocol import VocabularyAgreement, agree
from partsong.topics.agreement.tables import PartyWords

MEAN_LETTERS = 7.5


def made_up_words(count: int) -> list[str]:
    """Generate distinct words with lengths as in English: one in ten has more than eleven letters."""
    draws = stream(0, "made-up words")
    found: dict[str, None] = {}
    while len(found) < count:
        for length in np.maximum(2, draws.poisson(MEAN_LETTERS, 4096)).tolist():
            found["".join(map(chr, draws.integers(97, 123, length)))] = None
    return list(found)[:count]


def holdings(how: str, parties: int, terms: int) -> list[tuple[str, ...]]:
    """The words of each party."""
    if how == "alike":
        return [tuple(made_up_words(terms))] * parties
    if how == "apart":
        words = made_up_words(parties * terms)
        shared = words[:10]
        return [tuple({*shared, *words[p * terms : (p + 1) * terms - 10]}) for p in range(parties)]
    words = np.array(made_up_words(3 * terms))
    chances = 1 / np.arange(10, len(words) + 10)
    chances /= chances.sum()
    draws = [stream(p, "words of a party").choice(len(words), terms, replace=False, p=chances) for p in range(parties)]
    return [tuple(words[chosen].tolist()) for chosen in draws]


def measured(how: str, parties: int, terms: int, min_parties: int) -> dict[str, object]:
    key = fresh_key()
    held = holdings(how, parties, terms)
    shards = [
        Shard(f"party{number:03d}", cast(Matrix, PartyWords(tuple(sorted(words)), np.ones(len(words), int), 1, key)))
        for number, words in enumerate(held)
    ]
    began, began_computing = time.perf_counter(), time.process_time()
    agreement = agree(shards, Parallel(), VocabularyAgreement(1, min_parties, words_expected=terms))
    seconds, computing = time.perf_counter() - began, time.process_time() - began_computing
    holders = Counter(word for words in held for word in words)
    pooled = {word for word, count in holders.items() if count >= min_parties}
    return {
        "how": how,
        "parties": parties,
        "terms": terms,
        "min_parties": min_parties,
        "different words": len(holders),
        "agreed": agreement.vocabulary.n_columns,
        "equals the pooled rule": set(agreement.vocabulary.words) == pooled,
        "false pass": agreement.false_pass,
        "exchanges": agreement.exchanges,
        "MB up per party": round(sum(agreement.bytes_up.values()) / parties / 1e6, 2),
        "MB down": round(agreement.bytes_down / 1e6, 2),
        "seconds": round(seconds, 1),
        "processor seconds": round(computing, 1),
        "seconds by exchange": [round(one, 1) for one in agreement.seconds],
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--how", nargs="+", default=["alike", "zipf", "apart"], choices=("alike", "zipf", "apart"))
    options.add_argument("--parties", type=int, default=50)
    options.add_argument("--terms", type=int, default=20_000)
    options.add_argument("--min-parties", type=int, default=3)
    chosen = options.parse_args()
    for how in chosen.how:
        print(json.dumps(measured(how, chosen.parties, chosen.terms, chosen.min_parties)), flush=True)


if __name__ == "__main__":
    main()
