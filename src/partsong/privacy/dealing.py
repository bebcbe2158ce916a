"""Shares of a party's secrets of a batch of sums, sealed for each holder, with commitments to all of them.

The commitments are SHA-256 of numbers of 256 random bits, which tell nothing that could be searched for. They say who
is at fault: a holder that gives away another share than it got, or a dealer whose shares do not give the secret back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from partsong.privacy.admission import Admitted
from partsong.privacy.envelopes import Scene, chunks, share_bytes, share_of
from partsong.privacy.key_agreement import KEY_BYTES, SEAL_BYTES, agreed, derived, fingerprint, joined, seal, unseal
from partsong.privacy.randomness import Source
from partsong.privacy.shamir import SHARE_BYTES, split

SEED, KEY = KINDS = ("seed", "key")

Route = tuple[str, str]
"""Dealer and holder."""


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
