"""Requests and replies that are signed from end to end, over any transport: who hands them on can change nothing.

coordinator, its key pinned at the sites  ── request, signed ──►  site
coordinator  ◄── reply, signed for that request ──  site, its key known from the roster
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from partsong.core.interfaces import Layout, Reduction
from partsong.errors import FormatError, ParameterError, PredictableMasks
from partsong.federation.transports.base import Heard, Lost, Transport
from partsong.secure_aggregation.crypto import (
    SIGNATURE_BYTES,
    fingerprint,
    is_signed,
    joined,
    sign,
    signing_key,
    verifying_key,
)
from partsong.secure_aggregation.protocol import SecureSum

# ---- signatures -------------------------------------------------------------------------------------------------
#
# Ed25519 signatures under messages, by keys from the secret of a party, for statements that say what they are.
#
#     content | signature (64 bytes) | "PARTSONG"
#
# A statement is about one direction, party, request and content, so that a message serves nowhere else. The signature
# comes last: messages that begin alike stay alike where a transport sends equal pieces once.

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


# ---- sealed -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Signed:
    """The coordinator's side: another transport, whose requests are signed and whose replies are looked at."""

    transport: Transport
    sign: Sign = field(repr=False)
    known: Mapping[str, Verify] = field(repr=False)
    out: dict[str, bytes] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.transport.names()) - set(self.known))
        if unknown:
            raise ParameterError(f"No key is known of {', '.join(unknown)}. Admit their cards first.")

    def names(self) -> tuple[str, ...]:
        return self.transport.names()

    def ask(self, requests: Mapping[str, bytes], timeout: float) -> Mapping[str, bytes | Lost]:
        """As the transport does; a reply without the site's signature for this very request is as good as none."""
        sent = self._signed(requests)
        replies = self.transport.ask(sent, timeout)
        return {name: self._opened(name, sent[name], reply) for name, reply in replies.items() if name in sent}

    def push(self, requests: Mapping[str, bytes], timeout: float) -> None:
        sent = self._signed(requests)
        self.out.update(sent)
        self.transport.push(sent, timeout)

    def arrived(self, timeout: float) -> Heard | None:
        heard = self.transport.arrived(timeout)
        if heard is None:
            return None
        name, reply = heard
        return name, self._opened(name, self.out.pop(name, b""), reply)

    def recall(self) -> Mapping[str, Lost]:
        self.out.clear()
        return self.transport.recall()

    def _signed(self, requests: Mapping[str, bytes]) -> dict[str, bytes]:
        return {name: Way("request", name).signed(self.sign, request) for name, request in requests.items()}

    def _opened(self, name: str, request: bytes, reply: bytes | Lost) -> bytes | Lost:
        if isinstance(reply, Lost):
            return reply
        try:
            return Way("reply", name, identity(request)).opened(self.known[name], reply)
        except FormatError:
            return Lost("its reply was not signed by its key in the roster for this request, and was not used")


@dataclass(frozen=True, slots=True)
class SignedSite:
    """A site's side: `answer` sees what the pinned coordinator has signed for this site, and nothing else.

    `refuse` takes a code and a reason, and gives the bytes that say no.
    """

    name: str
    answer: Callable[[bytes], bytes] = field(repr=False)
    refuse: Callable[[str, str], bytes] = field(repr=False)
    sign: Sign = field(repr=False)
    coordinator: Verify = field(repr=False)

    def __call__(self, data: bytes) -> bytes:
        """The reply, signed; also where it is a refusal."""
        try:
            request = Way("request", self.name).opened(self.coordinator, data)
        except FormatError as error:
            reply = self.refuse("unsigned", str(error))
        else:
            reply = self.answer(request)
        return Way("reply", self.name, identity(data)).signed(self.sign, reply)


def identity(request: bytes) -> str:
    """By which a reply names the request that it answers: SHA-256 of all its bytes."""
    return hashlib.sha256(request).hexdigest()


# ---- told alike -------------------------------------------------------------------------------------------------
#
# Sums under masks are among parties that were told the same: an experiment, columns in their order, and a layout.
#
# context = SHA-256(experiment, hashes of columns, layout), each as the start of a run tells it
# over texts, before that: SHA-256(df, n), in how many documents of all sites each agreed word is, and how many there
# are, as the end of the agreement on words has told; weights of words follow from it
#
# It goes into the settings that parties sign in the set-up of masks. A server that tells one site another experiment,
# other columns or other frequencies of words, so that its part of a sum stands out against those of others, gets no
# sum: the signatures do not fit.


def context_of(experiment: Mapping[str, Any], columns: Any, layout: Layout) -> str:
    """64 hexadecimal digits, the same for those who were told the same."""
    told = [json.dumps(value, sort_keys=True) for value in (dict(experiment), asdict(layout))]
    return fingerprint("partsong start of a run", *told, np.ascontiguousarray(columns).tobytes()).hex()


def words_context_of(documents: Any, n_documents: Any) -> str:
    """64 hexadecimal digits, the same for those who were told the same document frequencies (m) of agreed words."""
    frequencies = np.ascontiguousarray(documents, "<i8").tobytes()
    return fingerprint("partsong frequencies of words", frequencies, str(int(n_documents))).hex()


def bound_to(context: str, reduction: Reduction) -> Reduction:
    """The same reduction; masks only among those of the same context, besides the one that it is bound to already."""
    if not isinstance(reduction, SecureSum):
        return reduction
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PredictableMasks)  # whoever made these masks was warned
        bound: Reduction = replace(reduction, context=reduction.context + context.encode())
    return bound
