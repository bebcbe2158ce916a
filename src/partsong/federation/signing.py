"""End-to-end signatures of requests and replies, over any transport: an intermediary cannot change them.

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
from partsong.federation.transports.base import NoReply, SiteReply, Transport
from partsong.secure_aggregation.crypto import (
    SIGNATURE_BYTES,
    fingerprint,
    is_valid_signature,
    join_fields,
    sign,
    signing_key,
    verifying_key,
)
from partsong.secure_aggregation.protocol import SecureSum

# ---- signatures -------------------------------------------------------------------------------------------------
#
# Ed25519 signatures, with keys derived from the secret of a party:
#
#     content | signature (64 bytes) | "PARTSONG"
#
# What is signed includes the direction, the party, the request and the content, so that a message cannot be reused
# elsewhere. The signature comes last, so that messages with a common prefix keep it: a transport may send equal pieces
# once.

MAGIC = b"PARTSONG"
SIGNATURE_OVERHEAD = SIGNATURE_BYTES + len(MAGIC)
COORDINATOR = "partsong coordinator"
"""The name from which a coordinator's key is derived. No site can have this name."""

Sign = Callable[[bytes], bytes]
Verify = Callable[[bytes, bytes], bool]
"""(signature, text) -> whether the signature is valid for a pinned key."""


def public_key(secret: int, name: str) -> bytes:
    """Return the public key, which others pin."""
    return verifying_key(signing_key(secret, name))


def signer(secret: int, name: str) -> Sign:
    """Return a function that signs for a party or for the server."""
    own = signing_key(secret, name)
    return lambda text: sign(own, text)


def verifier(public: bytes) -> Verify:
    """Return a function that verifies signatures with a pinned key."""
    return lambda signature, text: is_valid_signature(public, signature, text)


@dataclass(frozen=True, slots=True)
class Envelope:
    """What a signature covers beside the content: direction ("request" or "reply"), party and, for a reply, the
    request.
    """

    direction: str
    party: str
    request: str = ""

    def sign(self, sign: Sign, content: bytes) -> bytes:
        """Append a signature for this envelope to the content."""
        return b"".join((content, sign(self._statement(content)), MAGIC))

    def verify(self, verify: Verify, data: bytes) -> bytes:
        """Return the content if its signature is valid for this envelope; else raise FormatError."""
        content, signature = data[:-SIGNATURE_OVERHEAD], data[-SIGNATURE_OVERHEAD : -len(MAGIC)]
        if not data.endswith(MAGIC) or not verify(signature, self._statement(content)):
            raise FormatError(
                f"A {self.direction} has no valid signature: it was truncated, changed, replayed from elsewhere or "
                "signed with another key. It was not used."
            )
        return content

    def _statement(self, content: bytes) -> bytes:
        digest = hashlib.sha256(content).digest()
        return join_fields("partsong message", self.direction, self.party, self.request, digest)


# ---- signed transport -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SignedTransport:
    """The coordinator's side: wraps a transport, signs its requests and verifies its replies."""

    transport: Transport
    sign: Sign = field(repr=False)
    verifiers: Mapping[str, Verify] = field(repr=False)
    pending: dict[str, bytes] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.transport.names()) - set(self.verifiers))
        if unknown:
            raise ParameterError(f"There is no key for {', '.join(unknown)}. Admit their cards first.")

    def names(self) -> tuple[str, ...]:
        return self.transport.names()

    def ask(self, requests: Mapping[str, bytes], timeout: float) -> Mapping[str, bytes | NoReply]:
        """Send requests and wait for replies. A reply without the site's signature for this request counts as
        no reply.
        """
        sent = self._sign_all(requests)
        replies = self.transport.ask(sent, timeout)
        return {name: self._verify_reply(name, sent[name], reply) for name, reply in replies.items() if name in sent}

    def push(self, requests: Mapping[str, bytes], timeout: float) -> None:
        sent = self._sign_all(requests)
        self.pending.update(sent)
        self.transport.push(sent, timeout)

    def next_reply(self, timeout: float) -> SiteReply | None:
        arrival = self.transport.next_reply(timeout)
        if arrival is None:
            return None
        name, reply = arrival
        return name, self._verify_reply(name, self.pending.pop(name, b""), reply)

    def cancel(self) -> Mapping[str, NoReply]:
        self.pending.clear()
        return self.transport.cancel()

    def _sign_all(self, requests: Mapping[str, bytes]) -> dict[str, bytes]:
        return {name: Envelope("request", name).sign(self.sign, request) for name, request in requests.items()}

    def _verify_reply(self, name: str, request: bytes, reply: bytes | NoReply) -> bytes | NoReply:
        if isinstance(reply, NoReply):
            return reply
        try:
            return Envelope("reply", name, request_digest(request)).verify(self.verifiers[name], reply)
        except FormatError:
            return NoReply("its reply is not signed by its key in the roster for this request")


@dataclass(frozen=True, slots=True)
class SignedSite:
    """A site's side: `answer` receives only requests that the pinned coordinator has signed for this site.

    `refuse` turns a code and a reason into the bytes of a refusal.
    """

    name: str
    answer: Callable[[bytes], bytes] = field(repr=False)
    refuse: Callable[[str, str], bytes] = field(repr=False)
    sign: Sign = field(repr=False)
    coordinator: Verify = field(repr=False)

    def __call__(self, data: bytes) -> bytes:
        """Return the signed reply, which may be a refusal."""
        try:
            request = Envelope("request", self.name).verify(self.coordinator, data)
        except FormatError as error:
            reply = self.refuse("unsigned", str(error))
        else:
            reply = self.answer(request)
        return Envelope("reply", self.name, request_digest(data)).sign(self.sign, reply)


def request_digest(request: bytes) -> str:
    """SHA-256 of a request's bytes, by which a reply names the request that it answers."""
    return hashlib.sha256(request).hexdigest()


# ---- run context ------------------------------------------------------------------------------------------------
#
# Masked sums need parties that received the same experiment, columns (in order) and layout.
#
# context = SHA-256(experiment, hashes of columns, layout), as in the start request of the run
# over texts, before that: SHA-256(df, n), the document frequency of each agreed word and the number of documents over
# all sites, as in the last message of the agreement on words; the weights of words follow from it
#
# Parties sign the context in the set-up of masks. A server that sends one site another experiment, other columns or
# other word frequencies, so that this site's part of a sum stands out, gets no sum: the signatures do not match.


def run_context(experiment: Mapping[str, Any], columns: Any, layout: Layout) -> str:
    """Return 64 hexadecimal digits, equal for sites that received the same start of the run."""
    parts = [json.dumps(value, sort_keys=True) for value in (dict(experiment), asdict(layout))]
    return fingerprint("partsong start of a run", *parts, np.ascontiguousarray(columns).tobytes()).hex()


def vocabulary_context(documents: Any, n_documents: Any) -> str:
    """Return 64 hexadecimal digits, equal for sites that received the same document frequencies (m) of agreed words."""
    frequencies = np.ascontiguousarray(documents, "<i8").tobytes()
    return fingerprint("partsong frequencies of words", frequencies, str(int(n_documents))).hex()


def bind_context(context: str, reduction: Reduction) -> Reduction:
    """Return the reduction, with masks that also require this context. Plain sums are returned unchanged."""
    if not isinstance(reduction, SecureSum):
        return reduction
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PredictableMasks)  # already warned when the masks were made
        bound: Reduction = replace(reduction, context=reduction.context + context.encode())
    return bound
