"""Keyed hashes of words: random to whoever lacks the key, the same to all who have it.

A word has one name of 128 bits, its keyed BLAKE2b (RFC 7693); of the name AES-256 (FIPS 197), which is fast on many at
once, makes numbers for each purpose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from partsong.errors import MissingExtra, ParameterError
from partsong.privacy import key_agreement
from partsong.privacy.randomness import system_source
from partsong.streams import key as stream_key

KEY_BYTES = 32
NAME_BYTES = 16
LANES = 4
"""Numbers of 32 bits in a block."""


def fresh_key() -> bytes:
    """A key from the operating system; parties pass it on by a way that the server does not see."""
    return system_source(KEY_BYTES)


def key_from_seed(seed: int) -> bytes:
    """A key that whoever knows the seed knows too: for runs in one process that have to come out the same twice."""
    return b"".join(stream_key(seed, "words", half).to_bytes(16, "little") for half in range(2))


def require_key(key: bytes) -> bytes:
    """The key, if it is one."""
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise ParameterError(f"The key of the words has {KEY_BYTES} bytes, such as fresh_key() gives; this has not.")
    return key


def session_key(key: bytes, seed: int, parties: Sequence[str]) -> bytes:
    """The key of one agreement, by its public seed and its parties."""
    text = repr((int(seed), tuple(parties))).encode()
    return hashlib.blake2b(text, key=key, digest_size=KEY_BYTES, person=b"agreement").digest()


def names_of(key: bytes, texts: Sequence[bytes]) -> Any:
    """A name of 16 bytes for each text, as an array (n × 16)."""
    keyed = hashlib.blake2b(key=key, digest_size=NAME_BYTES, person=b"name")

    def name(text: bytes) -> bytes:
        one = keyed.copy()
        one.update(text)
        return one.digest()

    return np.frombuffer(b"".join(map(name, texts)), np.uint8).reshape(len(texts), NAME_BYTES)


def lanes(key: bytes, purpose: str, names: Any, count: int) -> Any:
    """`count` independent numbers below 2³² for each name, as an array (n × count); others for other purposes."""
    blocks = np.repeat(names[:, None, :], -(-count // LANES), axis=1)
    blocks[:, :, 0] ^= np.arange(blocks.shape[1], dtype=np.uint8)
    mixed = _encrypted(key, purpose, blocks.tobytes())
    return np.frombuffer(mixed, "<u4").reshape(len(names), LANES * blocks.shape[1])[:, :count]


def within(numbers: Any, size: int) -> Any:
    """Numbers below 2³² to numbers below `size`; none has a probability above (1/size)·(1 + size/2³²)."""
    return ((numbers.astype(np.uint64) * np.uint64(size)) >> np.uint64(32)).astype(np.int64)


def pad(key: bytes, purpose: str, count: int) -> Any:
    """A stream of bytes that is used for one purpose, once."""
    counters = np.zeros((-(-count // NAME_BYTES), 2), dtype="<u8")
    counters[:, 0] = np.arange(len(counters))
    return np.frombuffer(_encrypted(key, f"pad {purpose}", counters.tobytes()), np.uint8)[:count]


def _encrypted(key: bytes, purpose: str, blocks: bytes) -> bytes:
    """Each block of 16 bytes by itself, under a key for this purpose."""
    try:
        key_agreement.require()
    except MissingExtra as error:
        raise MissingExtra(
            'An agreement on words needs the package cryptography, which is not installed: pip install "partsong'
            '[privacy]". Without it, take a public list of words, or hashes.'
        ) from error
    ciphers = import_module("cryptography.hazmat.primitives.ciphers")
    own = hashlib.blake2b(purpose.encode(), key=key, digest_size=KEY_BYTES, person=b"purpose").digest()
    return bytes(ciphers.Cipher(ciphers.algorithms.AES(own), ciphers.modes.ECB()).encryptor().update(blocks))
