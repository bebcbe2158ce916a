"""Names of columns from one site to another, past the server: sealed for the one that lacks them.

    the lacking site:  an X25519 key from its secret and the run, signed, and a    → a site that has the names
                       proof that it knows the key that sites share
    that site:         a key of this letter, names sealed with the agreed secret,  → the lacking site, for its log
                       signed

Only where a roster is pinned: the server could otherwise put a key of its own in place of a site's. The length
of a letter follows from how many of the names asked for were found at the telling site, which the server so learns (256
bytes for each, and for one more); it is doubled until longer names fit, and tells nothing else of them.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from partsong.core import Message
from partsong.errors import PartyError
from partsong.federation.columns import hashed, listed
from partsong.federation.refusals import Denied
from partsong.privacy.admission import Roster
from partsong.privacy.envelopes import as_array
from partsong.privacy.key_agreement import (
    KEY_BYTES,
    KeyPair,
    agreed,
    derived,
    fingerprint,
    is_signed,
    public_key,
    seal,
    sign,
    signing_key,
    unseal,
)

ASK, TELL, READ = range(3)
"""Phases."""

SLOT = 256
"""Bytes of a letter for each name."""


@dataclass(frozen=True, slots=True)
class Correspondent:
    """A site that asks for names, or tells them, in one run."""

    name: str
    run: str
    secret: int = field(repr=False)
    roster: Roster | None
    shared: bytes = field(repr=False, default=b"")

    def asks(self) -> Message:
        """Its key, signed, with a proof that it knows the shared key."""
        self._require_roster()
        public = public_key(self._private())
        signed = {"key": as_array(public), "signature": as_array(self._signed("key", public))}
        return Message({**signed, "proof": as_array(self._proof(self.name, public))})

    def tells(self, other: str, letter: Message, own: Sequence[str]) -> Message:
        """The names behind some hashes, as far as they may leave, so that the other alone can read them."""
        self._require_roster()
        theirs = self._verified("key", other, letter, "key")
        proof = np.asarray(letter.arrays.get("proof", np.zeros(1))).tobytes()
        if not hmac.compare_digest(proof, self._proof(other, theirs)):
            raise Denied("shared-key", f"{other!r} asks for names, and does not know the shared key of this site.")
        known = dict(zip(listed(hashed(own, self.run, self.shared)), own, strict=True))
        names = [known[row] for row in listed(letter["columns"]) if row in known]
        text = _padded(names)
        fresh = self._own_key(other, theirs, text)
        try:
            secret = agreed(fresh.private, {other: theirs})[other]
        except PartyError as error:
            raise Denied("protocol", str(error)) from error
        sealed = seal(self._sealing(secret, self.name, other, fresh.public), text)
        body = fresh.public + sealed
        return Message({"letter": as_array(body), "signature": as_array(self._signed("letter", body))})

    def reads(self, other: str, letter: Message) -> list[str]:
        """What another site has told."""
        self._require_roster()
        body = self._verified("letter", other, letter, "letter")
        fresh, sealed = body[:KEY_BYTES], body[KEY_BYTES:]
        secret = agreed(self._private(), {other: fresh})[other]
        text = unseal(self._sealing(secret, other, self.name, fresh), sealed)
        if text is None:
            raise Denied("protocol", f"What {other!r} has told cannot be opened.")
        return [str(name) for name in json.loads(text)]

    def _own_key(self, other: str, theirs: bytes, text: bytes) -> KeyPair:
        """A key for one letter: another for each text and reader, and the same for the same one, so that the same
        request gets the same bytes.
        """
        own = signing_key(self.secret, self.name)
        private = derived(own, "partsong column names", "letter", self.run, other, theirs, fingerprint(text))
        return KeyPair(private, public_key(private))

    def _private(self) -> bytes:
        return derived(signing_key(self.secret, self.name), "partsong column names", self.run)

    def _proof(self, party: str, public: bytes) -> bytes:
        """That a party knows the shared key, which the mark of the key does not show: the server has seen that."""
        if not self.shared:
            return b""
        said = fingerprint("partsong column names", "proof", self.run, party, public)
        return hmac.digest(self.shared, said, "sha256")

    def _sealing(self, secret: bytes, teller: str, reader: str, fresh: bytes) -> bytes:
        return derived(secret, "partsong column names", self.run, teller, reader, fresh)

    def _signed(self, what: str, body: bytes) -> bytes:
        return sign(signing_key(self.secret, self.name), self._statement(what, self.name, body))

    def _verified(self, what: str, other: str, letter: Message, array: str) -> bytes:
        roster = self.roster or {}
        body, signature = (np.asarray(letter[one]).tobytes() for one in (array, "signature"))
        if other not in roster or not is_signed(roster[other], signature, self._statement(what, other, body)):
            raise Denied("protocol", f"The {what} of {other!r} has not the signature that the roster knows.")
        return body

    def _statement(self, what: str, party: str, body: bytes) -> bytes:
        return fingerprint("partsong column names", what, self.run, party, body)

    def _require_roster(self) -> None:
        if self.roster is None:
            raise Denied("roster", "Names of columns are told only among parties of a pinned roster.")


def _padded(names: Sequence[str]) -> bytes:
    """As JSON, which blanks follow: up to 256 bytes for each name, or else to the next power of two of that."""
    text, length = json.dumps(names).encode(), SLOT * (len(names) + 1)
    while length < len(text):
        length *= 2
    return text.ljust(length)


def missing_at(offered: Any, wanted: Any) -> Any:
    """The hashes of the agreed columns that a site has not offered."""
    own = set(listed(offered))
    rows = [row for row in listed(wanted) if row not in own]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1) if rows else np.empty((0, 16), np.uint8)
