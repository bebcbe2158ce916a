"""Keys of a file drop: Ed25519 from the secret of a party, as in masked sums, for statements that say what they are."""

from __future__ import annotations

from collections.abc import Callable

from partsong.privacy.key_agreement import is_signed, sign, signing_key, verifying_key


def public_key(secret: int, name: str) -> bytes:
    """What others pin."""
    return verifying_key(signing_key(secret, name))


def signer(secret: int, name: str) -> Callable[[bytes], bytes]:
    """Signs for a party, or for the server."""
    own = signing_key(secret, name)
    return lambda text: sign(own, text)


def verifier(public: bytes) -> Callable[[bytes, bytes], bool]:
    """Knows signatures by a key that was pinned."""
    return lambda signature, text: is_signed(public, signature, text)
