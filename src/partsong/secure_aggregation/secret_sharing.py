"""Secret sharing among parties: dealing shares of a party's secrets, and the answers that reveal them after dropouts.

Shares are dealt for a batch of sums, sealed for each holder, with commitments to all of them. A commitment is the
SHA-256 of a number with 256 random bits, so it cannot be searched. Commitments show who is at fault: a holder that
reveals another share than it received, or a dealer whose shares do not reconstruct the secret.

Answers to a list of survivors can be read only once t parties have answered the same list. Party v seals its shares
with a fresh key k_v = f_v(0), where f_v is a polynomial of degree t − 1, and sends beside them

    f_v(v),   and for each other survivor w   seal(c_vw, f_v(w))   and   c_wv

Only v and w can compute c_vw = HKDF(secret of v and w; v, w, list), and only w sends it. So k_v needs the answers of t
parties, v among them, that were shown this list. Each party answers a single list.
Proof: docs/reference/secure-aggregation.md.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from partsong.core.states import state
from partsong.privacy.randomness import Source
from partsong.secure_aggregation.crypto import (
    KEY_BYTES,
    SEAL_BYTES,
    SHARE_BYTES,
    combine,
    derive_key,
    fingerprint,
    join_fields,
    seal,
    shared_secrets,
    split,
    unseal,
)
from partsong.secure_aggregation.messages import (
    UNMASKING,
    AdmittedParties,
    MessageContext,
    SumContext,
    chunks,
    parse_share,
    share_bytes,
)

PAIR_BYTES = SHARE_BYTES + SEAL_BYTES + KEY_BYTES
"""Size of an answer's part for each other survivor."""

SEED, KEY = KINDS = ("seed", "key")
Route = tuple[str, str]
"""Dealer and holder."""


@dataclass(frozen=True, slots=True)
class SurvivorList:
    """A list of survivors of a sum, and the fingerprint that an answer to it is bound to."""

    sum_context: SumContext
    survivors: tuple[str, ...]
    transcript: bytes

    @property
    def answer_bytes(self) -> int:
        """The size of an answer: 33·|P| + 16 + 33 + 81·(|U| − 1)."""
        shares = SHARE_BYTES * len(self.sum_context.params.participants) + SEAL_BYTES
        return shares + SHARE_BYTES + PAIR_BYTES * (len(self.survivors) - 1)


@dataclass(frozen=True, slots=True)
class Answer:
    """One party's answer, split into its parts."""

    sealed: bytes = field(repr=False)
    own: bytes = field(repr=False)
    parts: Mapping[str, bytes] = field(repr=False)
    tokens: Mapping[str, bytes] = field(repr=False)


def token(secret: bytes, route: tuple[str, str], survivor_list: SurvivorList) -> bytes:
    """Return c_vw for the route (v, w): w reveals it, so that its share of v's key can be opened."""
    return derive_key(secret, "answer", survivor_list.transcript, *route)


def build_answer(
    party: str, shares: bytes, pairs: Mapping[str, bytes], survivor_list: SurvivorList, source: Source
) -> bytes:
    """Return an answer with one share for each party of the sum."""
    group, others = survivor_list.sum_context.group, [name for name in survivor_list.survivors if name != party]
    key, numbers = source(KEY_BYTES), group.admitted.numbers
    points = split(int.from_bytes(key, "big"), len(numbers), group.params.threshold, source)
    parts = {name: share_bytes(points[numbers[name] - 1]) for name in survivor_list.survivors}
    pieces = [seal(key, shares), parts[party]]
    for name in others:
        pieces += [seal(token(pairs[name], (party, name), survivor_list), parts[name])]
        pieces += [token(pairs[name], (name, party), survivor_list)]
    return b"".join(pieces)


def read_answers(
    bodies: Mapping[str, bytes], survivor_list: SurvivorList, weights: Mapping[int, int]
) -> dict[str, list[bytes]]:
    """Return the shares of all parties that answered, each for all parties of the sum; an error names a party at fault.

    `weights` are the Lagrange weights of t parties that answered, by their numbers.
    """
    context, numbers = (
        survivor_list.sum_context.message_context(UNMASKING),
        survivor_list.sum_context.group.admitted.numbers,
    )
    answers = {name: _read(name, body, survivor_list) for name, body in bodies.items()}
    holders = [name for name in answers if numbers[name] in weights]
    points = _points(answers, holders, survivor_list)
    found = {}
    for name, answer in answers.items():
        try:
            known = {numbers[holder]: parse_share(points[name, holder]) for holder in holders}
            key = combine(known, weights).to_bytes(SHARE_BYTES, "big")
            text = unseal(key[-KEY_BYTES:], answer.sealed)
            # PRIME is above 2²⁵⁶, so a combined number may have a 33rd byte, and is not a key then.
            if key[0] or text is None:
                raise ValueError("its key does not match them")
        except ValueError as error:
            raise context.party_error(name, f"its shares are unreadable ({error}). No upload was revealed.") from error
        found[name] = chunks(text, SHARE_BYTES)
    return found


def _points(
    answers: Mapping[str, Answer], holders: Sequence[str], survivor_list: SurvivorList
) -> dict[tuple[str, str], bytes]:
    """Return f_v(w) for all v and the holders w. If answers conflict, the party with the most conflicts is named."""
    found: dict[tuple[str, str], bytes] = {}
    apart: list[tuple[str, str]] = []
    for name, answer in answers.items():
        for holder in holders:
            part = answer.own if holder == name else unseal(answers[holder].tokens[name], answer.parts[holder])
            if part is None:
                apart.append((name, holder))
            else:
                found[name, holder] = part
    if apart:
        counts = Counter(name for pair in apart for name in set(pair))
        worst = max(counts, key=lambda name: (counts[name], name in dict(apart)))
        others = sorted({name for pair in apart if worst in pair for name in pair} - {worst})
        raise survivor_list.sum_context.message_context(UNMASKING).party_error(
            worst,
            f"its answer and that of {', '.join(map(repr, others[:5]))} do not match: they were shown different lists "
            "of survivors, or one of them is corrupt. No upload was revealed.",
        )
    return found


def _read(name: str, body: bytes, survivor_list: SurvivorList) -> Answer:
    if len(body) != survivor_list.answer_bytes:
        raise survivor_list.sum_context.message_context(UNMASKING).party_error(
            name, f"its answer has {len(body)} bytes, not {survivor_list.answer_bytes}. No upload was revealed."
        )
    others = [other for other in survivor_list.survivors if other != name]
    cut = len(body) - PAIR_BYTES * len(others)
    sealed, own, pairs = body[: cut - SHARE_BYTES], body[cut - SHARE_BYTES : cut], chunks(body[cut:], PAIR_BYTES)
    parts = {other: pair[:-KEY_BYTES] for other, pair in zip(others, pairs, strict=True)}
    return Answer(sealed, own, parts, {other: pair[-KEY_BYTES:] for other, pair in zip(others, pairs, strict=True)})


@state("secure.secrets")
@dataclass(frozen=True, slots=True)
class Secrets:
    """What a party draws for one sum: the seed of its own mask, and its private mask key."""

    seed: bytes = field(repr=False)
    key: bytes = field(repr=False)


def split_among(
    admitted: AdmittedParties, threshold: int, source: Source, secrets: Sequence[Secrets]
) -> dict[str, bytes]:
    """Return for every party, the dealer included, a share of the seed and one of the key of each sum, concatenated."""

    def shares(secret: bytes) -> list[bytes]:
        points = split(int.from_bytes(secret, "big"), len(admitted.adverts), threshold, source)
        return [share_bytes(point) for point in points]

    columns = [shares(secret) for one in secrets for secret in (one.seed, one.key)]
    return {name: b"".join(held) for name, held in zip(admitted.adverts, zip(*columns, strict=True), strict=True)}


def sealing_keys(own: str, secrets: Mapping[str, bytes], transcript: bytes) -> dict[Route, bytes]:
    """Return the sealing key for each direction between this party and each other one, by route."""
    routes = [route for name in secrets for route in ((own, name), (name, own))]
    return {route: derive_key(secrets[_other(route, own)], "shares", transcript, *route) for route in routes}


def pair_secrets(own: str, private: bytes, admitted: AdmittedParties) -> dict[str, bytes]:
    """Return the secret that a party shares with each other party."""
    return shared_secrets(private, {name: one.share_key for name, one in admitted.adverts.items() if name != own})


def build_shares_body(dealer: str, holdings: Mapping[str, bytes], keys: Mapping[Route, bytes]) -> bytes:
    """Return a dealer's body: commitments for all sums and holders, then the sealed shares of each other holder."""
    commitments = [
        chunks(share_commitments((dealer, name), held), len(KINDS) * KEY_BYTES) for name, held in holdings.items()
    ]
    committed = [commitment for of_a_sum in zip(*commitments, strict=True) for commitment in of_a_sum]
    sealed = [seal(keys[dealer, name], held) for name, held in holdings.items() if name != dealer]
    return b"".join(committed + sealed)


def open_shares(context: MessageContext, route: Route, body: bytes, admitted: AdmittedParties, key: bytes) -> bytes:
    """Open what a dealer sealed for a holder in this set-up, and check it against the commitments."""
    dealer, holder = route
    batch = len(admitted.adverts[dealer].seeds) // KEY_BYTES
    try:
        commitments, sealed = commitments_in(body, admitted, batch), sealed_part(route, body, admitted, batch)
        held = unseal(key, sealed) or b""
        if len([parse_share(share) for share in chunks(held, SHARE_BYTES)]) != len(KINDS) * batch:
            raise ValueError("not as many shares as there are sums")
    except ValueError as error:
        raise context.party_error(
            dealer,
            f"its shares for {holder!r} cannot be opened: they were not made for this set-up, or were changed in "
            "transit. Nothing was uploaded.",
        ) from error
    place = admitted.numbers[holder] - 1
    if share_commitments(route, held) != commitments[:, place].tobytes():
        raise context.party_error(dealer, f"its shares for {holder!r} do not match its commitments.")
    return held


def commitments_in(body: bytes, admitted: AdmittedParties, batch: int) -> Any:
    """Return a dealer's commitments (32 bytes) by sum, holder and kind; raise ValueError if the size is wrong."""
    count = len(admitted.adverts)
    if len(body) != shares_body_size(count, batch):
        raise ValueError(f"{len(body)} bytes are not shares for {count} parties and {batch} sums")
    shape = (batch, count, len(KINDS), KEY_BYTES)
    return np.frombuffer(body, np.uint8, int(np.prod(shape))).reshape(shape)


def sealed_part(route: Route, body: bytes, admitted: AdmittedParties, batch: int) -> bytes:
    """Return the sealed shares for one holder."""
    dealer, holder = (admitted.numbers[name] - 1 for name in route)
    size = sealed_part_size(batch)
    place = len(body) - size * (len(admitted.adverts) - 1 - holder + (dealer < holder))
    return body[place : place + size]


def shares_body_size(count: int, batch: int) -> int:
    """Return the size of a dealer's body: 64·R·n + (n − 1)·(66·R + 16)."""
    return len(KINDS) * KEY_BYTES * batch * count + sealed_part_size(batch) * (count - 1)


def sealed_part_size(batch: int) -> int:
    """Return the size of the sealed shares for one holder: 66·R + 16."""
    return len(KINDS) * SHARE_BYTES * batch + SEAL_BYTES


def seed_commitment(seed: bytes) -> bytes:
    """Return the commitment to a seed."""
    return fingerprint("seed", seed)


def share_commitment(kind: str, slot: int, route: Route, share: bytes) -> bytes:
    """Return the commitment to one share."""
    return _committed(join_fields("share", *route), kind, slot, share)


def share_commitments(route: Route, held: bytes) -> bytes:
    """Return the commitments to all shares, concatenated."""
    start, kinds = join_fields("share", *route), len(KINDS)
    shares = enumerate(chunks(held, SHARE_BYTES))
    return b"".join(_committed(start, KINDS[at % kinds], at // kinds, share) for at, share in shares)


def _committed(start: bytes, kind: str, slot: int, share: bytes) -> bytes:
    return hashlib.sha256(b"".join((start, kind.encode(), slot.to_bytes(2, "big"), share))).digest()


def _other(route: Route, own: str) -> str:
    return route[0] if route[1] == own else route[1]
