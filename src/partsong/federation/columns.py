"""Agreement on columns by hashes: the server compares hashes, and names stay at the sites.

    hash = BLAKE2b-128(NFC(name); key, run)

Names are in Unicode normal form C, because a letter with a mark can be encoded in two ways. The salt is the run, so
that two runs cannot be compared. A server with a list of likely names can still test them, unless all sites share a
`key` that it does not know. Sites check that they have the same key by a hash of it, which reveals nothing about a
random key.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from partsong.core.interfaces import Message
from partsong.errors import FeatureError, ParameterError
from partsong.federation.wire import RequestRefused
from partsong.secure_aggregation.crypto import (
    KEY_BYTES,
    derive_key,
    fingerprint,
    is_valid_signature,
    public_key,
    seal,
    shared_secrets,
    sign,
    signing_key,
    unseal,
)
from partsong.secure_aggregation.messages import Roster, as_array

# ---- columns ----------------------------------------------------------------------------------------------------

HASH_BYTES = 16
SAME = "same"
"""All sites need the same columns; under any other rule, the common columns are used."""
ONE_NAME = "have the same name in Unicode normal form C. Rename one of them."


def hashed(names: Sequence[str], run: str, key: bytes = b"") -> Any:
    """Hash each name to 16 bytes; RequestRefused if two names differ only in their Unicode encoding."""
    salt = hashlib.sha256(run.encode()).digest()[:16]
    if (same := twins(names)) is not None:
        raise RequestRefused("data", f"Columns {same[0] + 1} and {same[1] + 1} of those that may leave {ONE_NAME}")
    written = [unicodedata.normalize("NFC", name).encode("utf-8", "surrogatepass") for name in names]
    rows = [hashlib.blake2b(name, digest_size=HASH_BYTES, key=key, salt=salt).digest() for name in written]
    return _as_rows(rows)


def _as_rows(hashes: Sequence[bytes]) -> Any:
    return np.frombuffer(b"".join(hashes), np.uint8).reshape(len(hashes), HASH_BYTES)


def twins(names: Sequence[str]) -> tuple[int, int] | None:
    """Return the positions of two names that are equal in normal form C, or None.

    Positions, because names may be words that must not appear in messages.
    """
    first: dict[str, int] = {}
    for at, name in enumerate(names):
        before = first.setdefault(unicodedata.normalize("NFC", name), at)
        if before != at:
            return before, at
    return None


def key_mark(key: bytes, run: str) -> str:
    """Return a hash by which sites check that they have the same key; empty without a key."""
    return fingerprint("partsong mark of a shared key", run, key).hex()[:32] if key else ""


def require_key_mark(own: str, usual: str) -> None:
    """Refuse if most sites have another key."""
    if own == usual:
        return
    here = "has a different key" if own and usual else "has a key and they have none" if own else "has no key"
    raise RequestRefused(
        "shared-key",
        f"Shared keys differ between most sites and this one, which {here}. Compare with another site (not with the "
        "coordinator) and join again with --shared-key.",
    )


def strangers_in(marks: Mapping[str, str]) -> tuple[tuple[str, ...], str]:
    """Return the sites whose key differs from that of most sites, and the hash of that key."""
    usual = Counter(mark for _, mark in sorted(marks.items())).most_common(1)[0][0] if marks else ""
    return tuple(name for name, mark in sorted(marks.items()) if mark != usual), usual


def listed(hashes: Any) -> list[bytes]:
    """Return the hashes as bytes; ParameterError if they are invalid or repeated."""
    array = np.asarray(hashes)
    if array.ndim != 2 or array.shape[1] != HASH_BYTES or array.dtype != np.uint8:
        raise ParameterError(
            "Columns must be hashes of 16 bytes each. Update partsong at all sites to the same version."
        )
    rows = [row.tobytes() for row in array]
    if len(set(rows)) < len(rows):
        raise ParameterError("A column is listed more than once. List each once.")
    return rows


def labels_of(hashes: Any, run: str, public: Sequence[str] = ()) -> tuple[str, ...]:
    """Label columns at the server: `public` names if no key was used, else "#" and the hash."""
    if (same := twins(public)) is not None:
        raise ParameterError(f"Lines {same[0] + 1} and {same[1] + 1} of the public names {ONE_NAME}")
    known = dict(zip(listed(hashed(public, run)), public, strict=True)) if public else {}
    return tuple(known.get(row, f"#{row.hex()}") for row in listed(hashes))


def agreed(offers: Mapping[str, Any], rule: str, *, leaves_out: bool = False) -> Any:
    """Return the hashes of the columns of the run: those of most sites, or those that all sites have.

    They are in the order of the first site that has them. Sites that do not fit find out at the start. A single site
    that leaves the others without a common column can be left out.
    """
    by_site = {name: listed(hashes) for name, hashes in sorted(offers.items())}
    if rule == SAME:
        usual = Counter(frozenset(rows) for rows in by_site.values()).most_common(1)[0][0]
        wanted = next(rows for rows in by_site.values() if frozenset(rows) == usual)
    else:
        everybody = _common(by_site.values())
        wanted = [row for row in next(iter(by_site.values())) if row in everybody]
    if not wanted:
        others = {name: [rows for other, rows in by_site.items() if other != name] for name in by_site}
        odd = [name for name, rest in others.items() if len(rest) > 1 and _common(rest)]
        if leaves_out and len(odd) == 1:
            return agreed({name: hashes for name, hashes in offers.items() if name not in odd}, rule)
        hint = f" Without {' or '.join(map(repr, odd))}, the others have common columns." if odd else ""
        raise FeatureError(
            f"No column is common to all of {', '.join(by_site)}.{hint} Compare the names at two of them."
        )
    return _as_rows(wanted)


def _common(listings: Iterable[Sequence[bytes]]) -> set[bytes]:
    return set.intersection(*map(set, listings))


def find_columns(
    wanted: Any, own: Sequence[str], run: str, key: bytes = b"", *, rule: str = SAME, are_secret: bool = False
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the positions of the agreed columns among a site's own, and the names of its other columns.

    A site that lacks columns logs the beginnings of their hashes, and then their names if another site sends them (see
    below). Only their number leaves. `are_secret`: names are words of texts and must not appear in a reason.
    """
    rows = listed(wanted)
    taken = set(rows)
    places = {row: at for at, row in enumerate(listed(hashed(own, run, key)))}
    missing = [row for row in rows if row not in places]
    unused = tuple(own[at] for row, at in places.items() if row not in taken)
    extra = unused if rule == SAME else ()
    if not missing and not extra:
        return tuple(places[row] for row in rows), unused
    if are_secret:
        reasons = [f"columns that are missing here: {len(missing)}; here but not at most other sites: {len(extra)}"]
    else:
        reasons = [f"{name} is here but not at most other sites" for name in extra]
        if missing:
            hashes = ", ".join(f"#{row.hex()[:8]}" for row in missing)
            reasons.insert(
                0, f"{hashes}: missing here, or not released. Names follow if another site sends them (tell_names)"
            )
    raise RequestRefused("columns", f"{'; '.join(reasons)}.", {"missing": len(missing), "extra": len(extra)})


# ---- naming -----------------------------------------------------------------------------------------------------
#
# Column names from one site to another, encrypted so that the server cannot read them.
#
#     the lacking site:  an X25519 key derived from its secret and the run, signed,  → a site that has the names
#                        and a proof that it knows the shared key
#     that site:         an ephemeral key, names encrypted under the agreed secret,  → the lacking site, for its log
#                        signed
#
# Only with a pinned roster; otherwise the server could substitute its own key for that of a site. The length of a
# message depends on the number of requested names found at the sending site, which the server learns (256 bytes for
# each and one more). It is doubled until longer names fit, and reveals nothing else.

ASK, TELL, READ = range(3)
"""Phases."""

SLOT = 256
"""Bytes of a message per name."""


@dataclass(frozen=True, slots=True)
class Correspondent:
    """A site that requests or sends column names in one run."""

    name: str
    run: str
    secret: int = field(repr=False)
    roster: Roster | None
    shared: bytes = field(repr=False, default=b"")

    def request_names(self) -> Message:
        """Request names: a signed key, with a proof of knowing the shared key."""
        self._pinned()
        public = public_key(self._private())
        signed = {"key": as_array(public), "signature": as_array(self._signed("key", public))}
        return Message({**signed, "proof": as_array(self._proof(self.name, public))})

    def send_names(self, other: str, letter: Message, own: Sequence[str]) -> Message:
        """Send the names behind hashes, as far as they may leave, encrypted for the other site."""
        theirs = self._verified("key", other, letter)
        proof = np.asarray(letter.arrays.get("proof", np.zeros(1))).tobytes()
        if not hmac.compare_digest(proof, self._proof(other, theirs)):
            raise RequestRefused(
                "shared-key", f"{other!r} requests names but does not know the shared key of this site."
            )
        known = dict(zip(listed(hashed(own, self.run, self.shared)), own, strict=True))
        names = [known[row] for row in listed(letter["columns"]) if row in known]
        text = _padded(names)
        # Another key for each text and reader, and the same for the same one, so that a request gets the same bytes.
        own_key = signing_key(self.secret, self.name)
        private = derive_key(own_key, "partsong column names", "letter", self.run, other, theirs, fingerprint(text))
        fresh, secret = public_key(private), shared_secrets(private, {other: theirs})[other]
        body = fresh + seal(self._sealing(secret, self.name, other, fresh), text)
        return Message({"letter": as_array(body), "signature": as_array(self._signed("letter", body))})

    def read_names(self, other: str, letter: Message) -> list[str]:
        """Decrypt the names that another site sent."""
        body = self._verified("letter", other, letter)
        fresh, sealed = body[:KEY_BYTES], body[KEY_BYTES:]
        secret = shared_secrets(self._private(), {other: fresh})[other]
        text = unseal(self._sealing(secret, other, self.name, fresh), sealed)
        if text is None:
            raise RequestRefused("protocol", f"The names from {other!r} cannot be decrypted.")
        return [str(name) for name in json.loads(text)]

    def _private(self) -> bytes:
        return derive_key(signing_key(self.secret, self.name), "partsong column names", self.run)

    def _proof(self, party: str, public: bytes) -> bytes:
        """Prove knowledge of the shared key; the hash of the key is no proof, because the server has seen it."""
        if not self.shared:
            return b""
        said = fingerprint("partsong column names", "proof", self.run, party, public)
        return hmac.digest(self.shared, said, "sha256")

    def _sealing(self, secret: bytes, teller: str, reader: str, fresh: bytes) -> bytes:
        return derive_key(secret, "partsong column names", self.run, teller, reader, fresh)

    def _signed(self, what: str, body: bytes) -> bytes:
        return sign(signing_key(self.secret, self.name), self._statement(what, self.name, body))

    def _verified(self, what: str, other: str, letter: Message) -> bytes:
        roster = self._pinned()
        body, signature = (np.asarray(letter[array]).tobytes() for array in (what, "signature"))
        if other not in roster or not is_valid_signature(roster[other], signature, self._statement(what, other, body)):
            raise RequestRefused("protocol", f"The {what} of {other!r} has an invalid signature.")
        return body

    def _statement(self, what: str, party: str, body: bytes) -> bytes:
        return fingerprint("partsong column names", what, self.run, party, body)

    def _pinned(self) -> Roster:
        if self.roster is None:
            raise RequestRefused("roster", "Column names are sent only among parties of a pinned roster.")
        return self.roster


def _padded(names: Sequence[str]) -> bytes:
    """Encode as JSON, padded with blanks to 256 bytes per name, doubled until the names fit."""
    text, length = json.dumps(names).encode(), SLOT * (len(names) + 1)
    while length < len(text):
        length *= 2
    return text.ljust(length)


def missing_at(offered: Any, wanted: Any) -> Any:
    """Return the hashes of the agreed columns that a site does not have."""
    own = set(listed(offered))
    return _as_rows([row for row in listed(wanted) if row not in own])
