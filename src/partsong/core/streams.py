"""Named random streams: the same name gives the same numbers, whoever asks and in whatever order.

    stream(seed, "start", "hospital-3", 7)

is keyed by a hash of the seed and the names, so that nothing depends on the number of parties or on call order,
and no generator is ever stored in a state. `shared` streams are keyed by the public seed of a Layout; a party's
`private` ones by the secret in its Shard.
"""

from __future__ import annotations

import hashlib
import secrets

import numpy as np

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
