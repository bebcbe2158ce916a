"""Shares of a party's secrets: dealing them to holders, and the answers that reveal them after dropouts.

Shares are of a batch of sums, sealed for each holder, with commitments to all of them. The commitments are SHA-256 of
numbers of 256 random bits, which tell nothing that could be searched for. They say who is at fault: a holder that gives
away another share than it got, or a dealer whose shares do not give the secret back.

Answers to a list of survivors can be read once t parties have answered the same list, and not before. Party v seals its
shares with a fresh key k_v = f_v(0), a polynomial of degree t − 1, and sends beside them

    f_v(v),   and for each other survivor w   seal(c_vw, f_v(w))   and   c_wv

where c_vw = HKDF(secret of v and w; v, w, list) can be computed by v and w alone, and is sent by w alone. So k_v needs
the answers of t parties, v among them, that were shown this one list. Nobody answers two.
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
    agreed,
    combine,
    derived,
    fingerprint,
    joined,
    seal,
    split,
    unseal,
)
from partsong.secure_aggregation.messages import UNMASKING, Admitted, Gathering, Scene, chunks, share_bytes, share_of

PAIR_BYTES = SHARE_BYTES + SEAL_BYTES + KEY_BYTES
"""What an answer has for each other survivor."""

SEED, KEY = KINDS = ("seed", "key")
Route = tuple[str, str]
"""Dealer and holder."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A list of survivors of a sum, and the fingerprint of all that an answer to it is for."""

    gathering: Gathering
    survivors: tuple[str, ...]
    transcript: bytes

    @property
    def answer_bytes(self) -> int:
        """The size of an answer: 33·|P| + 16 + 33 + 81·(|U| − 1)."""
        shares = SHARE_BYTES * len(self.gathering.terms.participants) + SEAL_BYTES
        return shares + SHARE_BYTES + PAIR_BYTES * (len(self.survivors) - 1)


@dataclass(frozen=True, slots=True)
class Answer:
    """One party's answer, read as far as it can be by itself."""

    sealed: bytes = field(repr=False)
    own: bytes = field(repr=False)
    parts: Mapping[str, bytes] = field(repr=False)
    tokens: Mapping[str, bytes] = field(repr=False)


def token(secret: bytes, route: tuple[str, str], listed: Listed) -> bytes:
    """c_vw for the route (v, w): what w tells, so that a part of v's key can be read."""
    return derived(secret, "answer", listed.transcript, *route)


def answered(party: str, shares: bytes, pairs: Mapping[str, bytes], listed: Listed, source: Source) -> bytes:
    """An answer with one share for each party of the sum."""
    circle, others = listed.gathering.circle, [name for name in listed.survivors if name != party]
    key, numbers = source(KEY_BYTES), circle.admitted.numbers
    points = split(int.from_bytes(key, "big"), len(numbers), circle.terms.threshold, source)
    parts = {name: share_bytes(points[numbers[name] - 1]) for name in listed.survivors}
    pieces = [seal(key, shares), parts[party]]
    for name in others:
        pieces += [seal(token(pairs[name], (party, name), listed), parts[name])]
        pieces += [token(pairs[name], (name, party), listed)]
    return b"".join(pieces)


def shares_in(bodies: Mapping[str, bytes], listed: Listed, weights: Mapping[int, int]) -> dict[str, list[bytes]]:
    """The shares of all who have answered, each for all parties of the sum; whoever spoils them is named.

    `weights` are those of t who have answered, by their numbers.
    """
    scene, numbers = listed.gathering.scene(UNMASKING), listed.gathering.circle.admitted.numbers
    answers = {name: _read(name, body, listed) for name, body in bodies.items()}
    holders = [name for name in answers if numbers[name] in weights]
    points = _points(answers, holders, listed)
    found = {}
    for name, answer in answers.items():
        try:
            known = {numbers[holder]: share_of(points[name, holder]) for holder in holders}
            key = combine(known, weights).to_bytes(SHARE_BYTES, "big")
            text = unseal(key[-KEY_BYTES:], answer.sealed)
            if key[0] or text is None:
                raise ValueError("its key does not fit them")
        except ValueError as error:
            raise scene.trouble(name, f"its shares cannot be read ({error}). No upload was revealed.") from error
        found[name] = chunks(text, SHARE_BYTES)
    return found


def _points(answers: Mapping[str, Answer], holders: Sequence[str], listed: Listed) -> dict[tuple[str, str], bytes]:
    """f_v(w) for all v and the holders w; where two do not fit, the one with whom most do not is named."""
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
        raise listed.gathering.scene(UNMASKING).trouble(
            worst,
            f"its answer and that of {', '.join(map(repr, others[:5]))} do not fit each other: they were shown other "
            "lists of survivors, or one of them is spoiled. No upload was revealed.",
        )
    return found


def _read(name: str, body: bytes, listed: Listed) -> Answer:
    if len(body) != listed.answer_bytes:
        raise listed.gathering.scene(UNMASKING).trouble(
            name, f"its answer has {len(body)} bytes, not {listed.answer_bytes}. No upload was revealed."
        )
    others = [other for other in listed.survivors if other != name]
    cut = len(body) - PAIR_BYTES * len(others)
    sealed, own, pairs = body[: cut - SHARE_BYTES], body[cut - SHARE_BYTES : cut], chunks(body[cut:], PAIR_BYTES)
    parts = {other: pair[:-KEY_BYTES] for other, pair in zip(others, pairs, strict=True)}
    return Answer(sealed, own, parts, {other: pair[-KEY_BYTES:] for other, pair in zip(others, pairs, strict=True)})


@state("secure.secrets")
@dataclass(frozen=True, slots=True)
class Secrets:
    """What a party has drawn for one sum: the seed of its own mask, and its (private) mask key."""

    seed: bytes = field(repr=False)
    key: bytes = field(repr=False)


def split_for(admitted: Admitted, threshold: int, source: Source, secrets: Sequence[Secrets]) -> dict[str, bytes]:
    """For everybody, the dealer as well: a share of the seed and one of the key of each sum, end to end."""

    def shares(secret: bytes) -> list[bytes]:
        points = split(int.from_bytes(secret, "big"), len(admitted.adverts), threshold, source)
        return [share_bytes(point) for point in points]

    columns = [shares(secret) for one in secrets for secret in (one.seed, one.key)]
    return {name: b"".join(held) for name, held in zip(admitted.adverts, zip(*columns, strict=True), strict=True)}


def sealing_keys(own: str, secrets: Mapping[str, bytes], transcript: bytes) -> dict[Route, bytes]:
    """The key of what is sent from and to each other party, by route."""
    routes = [route for name in secrets for route in ((own, name), (name, own))]
    return {route: derived(secrets[_other(route, own)], "shares", transcript, *route) for route in routes}


def pair_secrets(own: str, private: bytes, admitted: Admitted) -> dict[str, bytes]:
    """What a party has in common with each other one, and with nobody else."""
    return agreed(private, {name: one.share_key for name, one in admitted.adverts.items() if name != own})


def dealt(dealer: str, holdings: Mapping[str, bytes], keys: Mapping[Route, bytes]) -> bytes:
    """A dealer's body: commitments for all sums and everybody, then what is sealed for each but itself."""
    vows = [chunks(commitments((dealer, name), held), len(KINDS) * KEY_BYTES) for name, held in holdings.items()]
    committed = [vow for of_a_sum in zip(*vows, strict=True) for vow in of_a_sum]
    sealed = [seal(keys[dealer, name], held) for name, held in holdings.items() if name != dealer]
    return b"".join(committed + sealed)


def received(scene: Scene, route: Route, body: bytes, admitted: Admitted, key: bytes) -> bytes:
    """What a dealer has sealed for a holder, if it did so in this set-up and stands by it."""
    dealer, holder = route
    batch = len(admitted.adverts[dealer].seeds) // KEY_BYTES
    try:
        vows, sealed = vows_in(body, admitted, batch), sealed_in(route, body, admitted, batch)
        held = unseal(key, sealed) or b""
        if len([share_of(share) for share in chunks(held, SHARE_BYTES)]) != len(KINDS) * batch:
            raise ValueError("not as many shares as there are sums")
    except ValueError as error:
        raise scene.trouble(
            dealer,
            f"its shares for {holder!r} cannot be opened: not made by it for this set-up, or changed on the way. "
            "Nothing was uploaded.",
        ) from error
    place = admitted.numbers[holder] - 1
    if commitments(route, held) != vows[:, place].tobytes():
        raise scene.trouble(dealer, f"its shares for {holder!r} are not those that it has committed itself to.")
    return held


def vows_in(body: bytes, admitted: Admitted, batch: int) -> Any:
    """A dealer's commitments by sum, holder and kind, each of 32 bytes; ValueError where a body has another size."""
    count = len(admitted.adverts)
    if len(body) != dealt_bytes(count, batch):
        raise ValueError(f"{len(body)} bytes are not shares for {count} parties and {batch} sums")
    shape = (batch, count, len(KINDS), KEY_BYTES)
    return np.frombuffer(body, np.uint8, int(np.prod(shape))).reshape(shape)


def sealed_in(route: Route, body: bytes, admitted: Admitted, batch: int) -> bytes:
    """What is sealed for one holder."""
    dealer, holder = (admitted.numbers[name] - 1 for name in route)
    size = sealed_bytes(batch)
    place = len(body) - size * (len(admitted.adverts) - 1 - holder + (dealer < holder))
    return body[place : place + size]


def dealt_bytes(count: int, batch: int) -> int:
    """The size of a dealer's body: 64·R·n + (n − 1)·(66·R + 16)."""
    return len(KINDS) * KEY_BYTES * batch * count + sealed_bytes(batch) * (count - 1)


def sealed_bytes(batch: int) -> int:
    """Of the shares for one holder: 66·R + 16."""
    return len(KINDS) * SHARE_BYTES * batch + SEAL_BYTES


def seed_commitment(seed: bytes) -> bytes:
    """What is told of a seed before it may be known."""
    return fingerprint("seed", seed)


def share_commitment(kind: str, slot: int, route: Route, share: bytes) -> bytes:
    """What is told of one share."""
    return _committed(joined("share", *route), kind, slot, share)


def commitments(route: Route, held: bytes) -> bytes:
    """Of all shares, end to end."""
    start, kinds = joined("share", *route), len(KINDS)
    shares = enumerate(chunks(held, SHARE_BYTES))
    return b"".join(_committed(start, KINDS[at % kinds], at // kinds, share) for at, share in shares)


def _committed(start: bytes, kind: str, slot: int, share: bytes) -> bytes:
    return hashlib.sha256(b"".join((start, kind.encode(), slot.to_bytes(2, "big"), share))).digest()


def _other(route: Route, own: str) -> str:
    return route[0] if route[1] == own else route[1]
