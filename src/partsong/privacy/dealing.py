"""Shares of a party's two secrets of a sum, sealed for each holder, with commitments to all of them.

The commitments are SHA-256 of numbers of 256 random bits, which tell nothing that could be searched for. They say who
is at fault: a holder that gives away another share than it got, or a dealer whose shares do not give the secret back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from partsong.privacy.admission import Admitted
from partsong.privacy.envelopes import SEALED_BYTES, Scene, chunks, share_bytes, share_of
from partsong.privacy.key_agreement import KEY_BYTES, agreed, derived, fingerprint, seal, unseal
from partsong.privacy.randomness import Source
from partsong.privacy.shamir import SHARE_BYTES, split

COMMITTED_BYTES = 2 * KEY_BYTES

Route = tuple[str, str]
"""Dealer and holder."""


@dataclass(frozen=True, slots=True)
class Holding:
    """One share of each of a party's secrets: the seed of its own mask, and its mask key."""

    seed: bytes = field(repr=False)
    key: bytes = field(repr=False)


def split_for(circle: Admitted, threshold: int, source: Source, secrets: tuple[bytes, bytes]) -> dict[str, Holding]:
    """Shares of a seed and of a mask key for everybody, the dealer as well."""
    seeds, keys = (split(int.from_bytes(one, "big"), len(circle.adverts), threshold, source) for one in secrets)
    return {
        name: Holding(share_bytes(seed), share_bytes(key))
        for name, seed, key in zip(circle.adverts, seeds, keys, strict=True)
    }


def sealing_keys(own: str, private: bytes, circle: Admitted) -> dict[Route, bytes]:
    """The key of what is sent from and to each other party, by route."""
    publics = {name: advert.share_key for name, advert in circle.adverts.items() if name != own}
    keys = {}
    for name, secret in agreed(private, publics).items():
        for route in ((own, name), (name, own)):
            keys[route] = derived(secret, "shares", circle.transcript, *route)
    return keys


def dealt(dealer: str, holdings: Mapping[str, Holding], keys: Mapping[Route, bytes]) -> bytes:
    """A dealer's body: commitments for everybody, then what is sealed for each but itself, in name order."""
    committed = [commitments((dealer, name), holding) for name, holding in holdings.items()]
    sealed = [seal(keys[dealer, n], h.seed + h.key) for n, h in holdings.items() if n != dealer]
    return b"".join(committed + sealed)


def received(scene: Scene, route: Route, body: bytes, circle: Admitted, keys: Mapping[Route, bytes]) -> Holding:
    """What a dealer has sealed for a holder, if it did so for this sum and stands by it."""
    dealer, holder = route
    try:
        committed, sealed = parts_for(route, body, circle)
        holding = Holding(*chunks(unseal(keys[route], sealed) or b"", SHARE_BYTES))
        share_of(holding.seed), share_of(holding.key)
    except (TypeError, ValueError) as error:
        raise scene.trouble(
            dealer,
            f"its shares for {holder!r} cannot be opened: not made by it for this sum, or changed on the way. Nothing "
            "was uploaded.",
        ) from error
    if commitments(route, holding) != committed:
        raise scene.trouble(dealer, f"its shares for {holder!r} are not those that it has committed itself to.")
    return holding


def parts_for(route: Route, body: bytes, circle: Admitted) -> tuple[bytes, bytes]:
    """Commitments and sealed shares for one holder (b"" for the dealer itself); ValueError where a body is none."""
    dealer, holder = (circle.numbers[name] - 1 for name in route)
    count = len(circle.adverts)
    begin = COMMITTED_BYTES * count
    if len(body) != begin + SEALED_BYTES * (count - 1):
        raise ValueError(f"{len(body)} bytes are not shares for {count} parties")
    committed = body[COMMITTED_BYTES * holder : COMMITTED_BYTES * (holder + 1)]
    if holder == dealer:
        return committed, b""
    place = begin + SEALED_BYTES * (holder - (dealer < holder))
    return committed, body[place : place + SEALED_BYTES]


def seed_commitment(seed: bytes) -> bytes:
    """What is told of a seed before it may be known."""
    return fingerprint("seed", seed)


def share_commitment(kind: str, route: Route, share: bytes) -> bytes:
    """What is told of one share."""
    return fingerprint("share", kind, *route, share)


def commitments(route: Route, holding: Holding) -> bytes:
    """Of both shares."""
    return share_commitment("seed", route, holding.seed) + share_commitment("key", route, holding.key)
