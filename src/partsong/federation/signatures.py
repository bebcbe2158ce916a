"""Ed25519 signatures under messages, by keys from the secret of a party, for statements that say what they are.

    content | signature (64 bytes) | "PARTSONG"

A statement is about one direction, party, request and content, so that a message serves nowhere else. The signature
comes last: messages that begin alike stay alike where a transport sends equal pieces once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from partsong.errors import FormatError
from partsong.privacy.key_agreement import SIGNATURE_BYTES, is_signed, joined, sign, signing_key, verifying_key

MARK = b"PARTSONG"
ADDED_BYTES = SIGNATURE_BYTES + len(MARK)
COORDINATOR = "partsong coordinator"
"""The name under which a coordinator's key is derived; no site can have it."""

Sign = Callable[[bytes], bytes]
Verify = Callable[[bytes, bytes], bool]
"""Signature and text -> whether the holder of the key has signed it."""


def public_key(secret: int, name: str) -> bytes:
    """What others pin."""
    return verifying_key(signing_key(secret, name))


def signer(secret: int, name: str) -> Sign:
    """Signs for a party, or for the server."""
    own = signing_key(secret, name)
    return lambda text: sign(own, text)


def verifier(public: bytes) -> Verify:
    """Knows signatures by a key that was pinned."""
    return lambda signature, text: is_signed(public, signature, text)


@dataclass(frozen=True, slots=True)
class Way:
    """From whom to whom: "request" or "reply", the party, and, for a reply, which request it answers."""

    direction: str
    party: str
    request: str = ""

    def signed(self, sign: Sign, content: bytes) -> bytes:
        """The content with a signature for this way behind it."""
        return b"".join((content, sign(self._statement(content)), MARK))

    def opened(self, verify: Verify, data: bytes) -> bytes:
        """The content, if it was signed for this way by the one who is known for it; FormatError else."""
        content, signature = data[:-ADDED_BYTES], data[-ADDED_BYTES : -len(MARK)]
        if not data.endswith(MARK) or not verify(signature, self._statement(content)):
            raise FormatError(
                f"A {self.direction} has not the signature that is known for it: cut short, changed, from somebody "
                "else, or repeated from another place. It was not used."
            )
        return content

    def _statement(self, content: bytes) -> bytes:
        digest = hashlib.sha256(content).digest()
        return joined("partsong message", self.direction, self.party, self.request, digest)
