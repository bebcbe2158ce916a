"""Named random streams: the same seed and names always give the same numbers, in any call order.

    stream(seed, "start", "hospital-3", 7)

A stream is keyed by a hash of the seed and the names. Nothing depends on the number of parties or on call order, and no
generator is stored in a state. Shared streams are keyed by the public seed of a Layout, private streams of a party by
the secret in its Shard.
"""

from __future__ import annotations

import hashlib
import secrets

import numpy as np

Name = str | int


def key(seed: int, *names: Name) -> int:
    """Return a 128-bit key of a seed and names; distinct name lists never collide by concatenation."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (seed, *names):
        text = f"{type(part).__name__}:{part}".encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return int.from_bytes(digest.digest(), "little")


def stream(seed: int, *names: Name) -> np.random.Generator:
    """Return a counter-based generator (Philox) for one purpose."""
    return np.random.Generator(np.random.Philox(key=key(seed, *names)))


def fresh_seed() -> int:
    """Return an unpredictable seed from the operating system."""
    return secrets.randbits(63)
