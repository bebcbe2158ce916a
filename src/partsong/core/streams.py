"""Named random streams: the same name gives the same numbers, whoever asks and in whatever order.

    stream(seed, "start", "hospital-3", 7)

is keyed by a hash of the seed and the names, so that nothing depends on the number of parties or on call order,
and no generator is ever stored in a state. `shared` streams are keyed by the public seed of a Layout; a party's
`private` ones by the secret in its Shard.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

import numpy as np

from partsong.errors import ParameterError

Name = str | int


def key(seed: int, *names: Name) -> int:
    """A 128-bit key of seed and names; distinct name lists never collide by concatenation."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (seed, *names):
        text = f"{type(part).__name__}:{part}".encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return int.from_bytes(digest.digest(), "little")


def stream(seed: int, *names: Name) -> np.random.Generator:
    """A counter-based generator (Philox) for one purpose."""
    return np.random.Generator(np.random.Philox(key=key(seed, *names)))


def fresh_seed() -> int:
    """A seed nobody knows, from the operating system."""
    return secrets.randbits(63)


def sampled(parties: Sequence[str], rounds: int, fraction: float, seed: int) -> dict[int, frozenset[str]]:
    """Schedule(absent=…) for rounds in which m = max(1, round(fraction · N)) parties take part, without replacement.

    Round t depends on the seed, the names and t alone: a longer run begins with the same rounds, and a resumed one
    goes on as if it had not stopped.
    """
    if not 0 < fraction <= 1:
        raise ParameterError(f"The fraction of parties in a round must be above 0 and at most 1; got {fraction!r}.")
    names = sorted(parties)
    count = max(1, round(fraction * len(names)))
    if count == len(names):
        return {}

    def missing(index: int) -> frozenset[str]:
        chosen = stream(seed, "participants", index).choice(len(names), count, replace=False)
        return frozenset(names) - {names[i] for i in chosen.tolist()}

    return {index: missing(index) for index in range(rounds)}
