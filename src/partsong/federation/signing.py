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
# Ed25519 signatures under messages, by keys from the secret of a party, for statements that say what they are.
#
#     content | signature (64 bytes) | "PARTSONG"
#
# A statement is about one direction, party, request and content, so that a message serves nowhere else. The signature
# comes last: messages that begin alike stay alike where a transport sends equal pieces once.

MAGIC = b"PARTSONG"
SIGNATURE_OVERHEAD = SIGNATURE_BYTES + len(MAGIC)
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
    return lambda signature, text: is_valid_signature(public, signature, text)


@dataclass(frozen=True, slots=True)
class Envelope:
    """From whom to whom: "request" or "reply", the party, and, for a reply, which request it answers."""

    direction: str
    party: str
    request: str = ""

    def sign(self, sign: Sign, content: bytes) -> bytes:
        """The content with a signature for this way behind it."""
        return b"".join((content, sign(self._statement(content)), MAGIC))

    def verify(self, verify: Verify, data: bytes) -> bytes:
        """The content, if it was signed for this way by the one who is known for it; FormatError else."""
        content, signature = data[:-SIGNATURE_OVERHEAD], data[-SIGNATURE_OVERHEAD : -len(MAGIC)]
        if not data.endswith(MAGIC) or not verify(signature, self._statement(content)):
            raise FormatError(
                f"A {self.direction} has not the signature that is known for it: cut short, changed, from somebody "
                "else, or repeated from another place. It was not used."
            )
        return content

    def _statement(self, content: bytes) -> bytes:
        digest = hashlib.sha256(content).digest()
        return join_fields("partsong message", self.direction, self.party, self.request, digest)


# ---- sealed -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SignedTransport:
    """The coordinator's side: another transport, whose requests are signed and whose replies are looked at."""

    transport: Transport
    sign: Sign = field(repr=False)
    verifiers: Mapping[str, Verify] = field(repr=False)
    pending: dict[str, bytes] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.transport.names()) - set(self.verifiers))
        if unknown:
            raise ParameterError(f"No key is known of {', '.join(unknown)}. Admit their cards first.")

    def names(self) -> tuple[str, ...]:
        return self.transport.names()

    def ask(self, requests: Mapping[str, bytes], timeout: float) -> Mapping[str, bytes | NoReply]:
        """As the transport does; a reply without the site's signature for this very request is as good as none."""
        sent = self._sign_all(requests)
        replies = self.transport.ask(sent, timeout)
        return {name: self._verify_reply(name, sent[name], reply) for name, reply in replies.items() if name in sent}

    def push(self, requests: Mapping[str, bytes], timeout: float) -> None:
        sent = self._sign_all(requests)
        self.pending.update(sent)
        self.transport.push(sent, timeout)

    def next_reply(self, timeout: float) -> SiteReply | None:
        heard = self.transport.next_reply(timeout)
        if heard is None:
            return None
        name, reply = heard
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
            return NoReply("its reply was not signed by its key in the roster for this request, and was not used")


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
            request = Envelope("request", self.name).verify(self.coordinator, data)
        except FormatError as error:
            reply = self.refuse("unsigned", str(error))
        else:
            reply = self.answer(request)
        return Envelope("reply", self.name, request_digest(data)).sign(self.sign, reply)


def request_digest(request: bytes) -> str:
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


def run_context(experiment: Mapping[str, Any], columns: Any, layout: Layout) -> str:
    """64 hexadecimal digits, the same for those who were told the same."""
    told = [json.dumps(value, sort_keys=True) for value in (dict(experiment), asdict(layout))]
    return fingerprint("partsong start of a run", *told, np.ascontiguousarray(columns).tobytes()).hex()


def vocabulary_context(documents: Any, n_documents: Any) -> str:
    """64 hexadecimal digits, the same for those who were told the same document frequencies (m) of agreed words."""
    frequencies = np.ascontiguousarray(documents, "<i8").tobytes()
    return fingerprint("partsong frequencies of words", frequencies, str(int(n_documents))).hex()


def bind_context(context: str, reduction: Reduction) -> Reduction:
    """The same reduction; masks only among those of the same context, besides the one that it is bound to already."""
    if not isinstance(reduction, SecureSum):
        return reduction
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PredictableMasks)  # whoever made these masks was warned
        bound: Reduction = replace(reduction, context=reduction.context + context.encode())
    return bound
