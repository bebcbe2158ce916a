"""Cryptography of masked sums: key agreement, authenticated encryption, masks and Shamir's secret sharing.

Everything but the secret sharing comes from the package `cryptography`, which is imported on first use.

X25519 (RFC 7748) agrees on a secret. HKDF-SHA256 (RFC 5869) derives a key from it for one purpose. ChaCha20 (RFC 8439)
expands a key to a mask, ChaCha20-Poly1305 seals shares, and Ed25519 (RFC 8032) signs. Each key is used for a single
stream or a single sealed text, so nonces are zero.

Shamir's secret sharing (1979): t shares reconstruct the secret, and t − 1 reveal nothing. The secret is f(0) of a
polynomial of degree t − 1 modulo a prime, whose other coefficients are drawn uniformly. Share x is f(x) for x = 1 … n.
For any t − 1 shares and any secret there is exactly one such polynomial, so all secrets are equally likely.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from partsong.core.states import state
from partsong.errors import MissingExtra, ParameterError, PartyError
from partsong.privacy.randomness import Source

KEY_BYTES = 32
SIGNATURE_BYTES = 64
SEAL_BYTES = 16
CHUNK = 1 << 14

_PRIMITIVES = "cryptography.hazmat.primitives"

PRIME = 2**256 + 297
"""The smallest prime above 2²⁵⁶, so every 32-byte secret is a number below it."""
SHARE_BYTES = 33
"""Size of a number below PRIME."""


@state("secure.key-pair")
@dataclass(frozen=True, slots=True)
class KeyPair:
    """An X25519 key pair, used in one sum."""

    private: bytes = field(repr=False)
    public: bytes


def require_cryptography() -> None:
    """Raise MissingExtra now, rather than in the middle of a round, if the package is missing."""
    _module("hashes")


def join_fields(*parts: bytes | str | int) -> bytes:
    """Join several texts, each with its length, so that different lists never give the same result."""
    texts = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    return b"".join(len(text).to_bytes(8, "little") + text for text in texts)


def fingerprint(*parts: bytes | str | int) -> bytes:
    """Return SHA-256 of a list of strings."""
    return hashlib.sha256(join_fields(*parts)).digest()


def generate_key_pair(source: Source) -> KeyPair:
    """Draw a new key pair."""
    private = source(KEY_BYTES)
    return KeyPair(private, public_key(private))


def public_key(private: bytes) -> bytes:
    """Return the public key of a private key."""
    return _x25519().X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def shared_secrets(private: bytes, publics: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the secret shared with each party, from its public key; keys of small order are refused."""
    x25519 = _x25519()
    own, secrets = x25519.X25519PrivateKey.from_private_bytes(private), {}
    for name, key in publics.items():
        try:
            secrets[name] = own.exchange(x25519.X25519PublicKey.from_public_bytes(key))
        except ValueError as error:
            raise PartyError(
                f"Party {name!r} has sent a public key of small order, which cannot establish a shared secret (phase "
                "0, keys). Nothing was sent to it."
            ) from error
    return secrets


def derive_key(secret: bytes, *purpose: bytes | str | int) -> bytes:
    """Derive a 32-byte key for one purpose."""
    hashes, hkdf = _module("hashes"), _module("kdf.hkdf")
    return hkdf.HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=join_fields(*purpose)).derive(secret)


def add_mask(total: Any, key: bytes, *, negated: bool = False) -> None:
    """Add the key's stream to `total`, or subtract it, modulo 2⁶⁴ and in place; in chunks that fit the CPU cache."""
    ciphers = _module("ciphers")
    encryptor = ciphers.Cipher(ciphers.algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    # The encryption of zeros is the key stream itself.
    zeros, drawn = memoryview(bytes(8 * min(CHUNK, len(total)))), bytearray(8 * min(CHUNK, len(total)))
    numbers, combine = np.frombuffer(drawn, "<u8"), np.subtract if negated else np.add
    for start in range(0, len(total), CHUNK):
        piece = total[start : start + CHUNK]
        encryptor.update_into(zeros[: 8 * len(piece)], drawn)
        combine(piece, numbers[: len(piece)], out=piece)


def seed_stream(seed: bytes, transcript: bytes) -> bytes:
    """Return the stream key of a party's own mask in one sum."""
    return derive_key(seed, "own mask", transcript)


def pair_stream(secret: bytes, one: str, other: str, transcript: bytes) -> bytes:
    """Return the stream key of the mask of two parties in one sum, the same for both."""
    return derive_key(secret, "mask of two", transcript, *sorted((one, other)))


def seal(key: bytes, text: bytes) -> bytes:
    """Encrypt and authenticate a text. The key is derived for its purpose, so no associated data are needed."""
    return _module("ciphers.aead").ChaCha20Poly1305(key).encrypt(bytes(12), text, None)


def unseal(key: bytes, sealed: bytes) -> bytes | None:
    """Return the text, or None if it was not sealed with this key."""
    try:
        return _module("ciphers.aead").ChaCha20Poly1305(key).decrypt(bytes(12), sealed, None)
    except import_module("cryptography.exceptions").InvalidTag:
        return None


def signing_key(secret: int, party: str) -> bytes:
    """Derive the Ed25519 key that a party uses in all sums from the secret of its shard."""
    width = max(KEY_BYTES, -(-secret.bit_length() // 8))
    return derive_key(secret.to_bytes(width, "little"), "partsong signing key", party)


def verifying_key(signing: bytes) -> bytes:
    """Return the public key that verifies signatures of a signing key."""
    return _ed25519().Ed25519PrivateKey.from_private_bytes(signing).public_key().public_bytes_raw()


def sign(signing: bytes, text: bytes) -> bytes:
    """Return the signature (64 bytes) of a text."""
    return _ed25519().Ed25519PrivateKey.from_private_bytes(signing).sign(text)


def is_valid_signature(verifying: bytes, signature: bytes, text: bytes) -> bool:
    """Whether the holder of the key signed this text."""
    try:
        _ed25519().Ed25519PublicKey.from_public_bytes(verifying).verify(signature, text)
    except (ValueError, import_module("cryptography.exceptions").InvalidSignature):
        return False
    return True


def _x25519() -> Any:
    return _module("asymmetric.x25519")


def _ed25519() -> Any:
    return _module("asymmetric.ed25519")


@cache
def _module(name: str) -> Any:
    try:
        return import_module(f"{_PRIMITIVES}.{name}")
    except ImportError as error:
        raise MissingExtra(
            'Secure aggregation needs the package cryptography. Install it: pip install "partsong[privacy]".'
        ) from error


def split(secret: int, holders: int, threshold: int, source: Source, prime: int = PRIME) -> list[int]:
    """Return the shares f(1) … f(n) of a secret."""
    if not 1 <= threshold <= holders < prime:
        raise ParameterError(
            f"Shares need 1 ≤ threshold ≤ holders < prime; got threshold={threshold}, holders={holders}."
        )
    if not 0 <= secret < prime:
        raise ParameterError("A secret must be at least zero and below the prime of its field.")
    coefficients = [secret, *(random_below(prime, source) for _ in range(threshold - 1))]
    return [_value(coefficients, x, prime) for x in range(1, holders + 1)]


def random_below(limit: int, source: Source) -> int:
    """Draw a number from 0 to limit − 1 uniformly, by rejection sampling."""
    bits = (limit - 1).bit_length()
    size = max(1, -(-bits // 8))
    while True:
        number = int.from_bytes(source(size), "big") >> (8 * size - bits)
        if number < limit:
            return number


def weights_at_zero(points: Sequence[int], prime: int = PRIME) -> dict[int, int]:
    """Lagrange weights λ_x = Π_{y≠x} y / (y − x): f(0) = Σ_x λ_x f(x) if f has a lower degree than there are points.

    Many secrets that were shared with the same holders need these weights once.
    """
    if not points or len({point % prime for point in points} - {0}) != len(points):
        raise ParameterError(
            f"Shares must come from at least one holder, different holders, numbered from 1; got {sorted(points)[:10]}."
        )
    weights = {}
    for x in points:
        above = below_it = 1
        for y in points:
            if y != x:
                above, below_it = above * y % prime, below_it * (y - x) % prime
        weights[x] = above * pow(below_it, -1, prime) % prime
    return weights


def combine(shares: Mapping[int, int], weights: Mapping[int, int], prime: int = PRIME) -> int:
    """Return f(0) = Σ_x λ_x f(x) from the shares by holder; shares of holders without a weight are ignored."""
    return sum(weight * shares[x] for x, weight in weights.items()) % prime


def _value(coefficients: Sequence[int], x: int, prime: int) -> int:
    """Evaluate by Horner's rule. x is small, so one division at the end is cheaper than one per coefficient."""
    value = 0
    for coefficient in reversed(coefficients):
        value = value * x + coefficient
    return value % prime
