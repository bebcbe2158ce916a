"""A masked sum at the server: it passes on what it cannot read, adds up what it cannot see, and removes the masks.

Σ_u x_u  =  Σ_u y_u − Σ_u PRG(b_u) − Σ_u Σ_v ± PRG(s_uv)   mod 2⁶⁴,   u over the survivors, v over the dropped
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from partsong.core import Message
from partsong.privacy.admission import Admitted, Roster, Terms, admit
from partsong.privacy.contents import size_of
from partsong.privacy.dealing import parts_for, seed_commitment, share_commitment
from partsong.privacy.envelopes import (
    NO_WEIGHT,
    SHARES,
    SURVIVORS,
    UNMASKING,
    UPLOAD,
    chunks,
    list_fingerprint,
    names_as_array,
    opened,
    relayed,
    share_of,
)
from partsong.privacy.key_agreement import KEY_BYTES, agreed, mask, pair_stream, public_key, seed_stream
from partsong.privacy.shamir import SHARE_BYTES, combine, weights_at_zero


@dataclass(frozen=True, slots=True)
class Desk:
    """The server in the middle of a sum: keys, dealers' bodies, who survived, and the sum as far as it is known."""

    terms: Terms
    roster: Roster
    is_pinned: bool
    admitted: Admitted | None = None
    dealt: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    survivors: tuple[str, ...] = ()
    total: Any = field(default=None, repr=False)

    @property
    def circle(self) -> Admitted:
        """Everybody's keys, which are known from the second phase on."""
        assert self.admitted is not None
        return self.admitted

    def opened(
        self, phase: int, inbox: Mapping[str, Message], asked: Mapping[str, Any] | Sequence[str]
    ) -> dict[str, bytes]:
        """The bodies of a phase, in name order, from those that are in the sum and signed by them."""
        scene = self.terms.scene(phase, self.circle.transcript)
        for name in inbox:
            if name not in asked:
                raise scene.trouble(name, "it has dropped out of this sum before; what it sends now stays masked.")
        self.terms.require_enough(phase, inbox, asked)
        return {name: opened(scene, name, self.circle.roster[name], inbox[name]) for name in sorted(inbox)}


def serve(phase: int, inbox: Mapping[str, Message], desk: Desk) -> tuple[Desk, Message]:
    """What the server makes of a phase, and its answer to all."""
    return (_introduce, _pass_on, _add_up, _collect, _unmask)[phase](inbox, desk)


def _introduce(inbox: Mapping[str, Message], desk: Desk) -> tuple[Desk, Message]:
    return replace(desk, admitted=admit(desk.terms, desk.roster, inbox, desk.is_pinned)), relayed(inbox)


def _pass_on(inbox: Mapping[str, Message], desk: Desk) -> tuple[Desk, Message]:
    bodies = desk.opened(SHARES, inbox, desk.circle.adverts)
    scene = desk.terms.scene(SHARES, desk.circle.transcript)
    for name, body in bodies.items():
        try:
            parts_for((name, name), body, desk.circle)
        except ValueError as error:
            raise scene.trouble(name, f"its shares cannot be read: {error}.") from error
    return replace(desk, dealt=bodies), relayed(inbox)


def _add_up(inbox: Mapping[str, Message], desk: Desk) -> tuple[Desk, Message]:
    bodies = desk.opened(UPLOAD, inbox, desk.dealt)
    size = size_of(next(iter(desk.circle.adverts.values())).contents)
    total = np.zeros(size, np.uint64)
    for name, body in bodies.items():
        if len(body) != total.nbytes:
            raise desk.terms.scene(UPLOAD).trouble(name, f"its upload has {len(body)} bytes, not {total.nbytes}.")
        total += np.frombuffer(body, "<u8")
    survivors = tuple(bodies)
    answer = Message({"survivors": names_as_array(survivors)}, NO_WEIGHT)
    return replace(desk, survivors=survivors, total=total), answer


def _collect(inbox: Mapping[str, Message], desk: Desk) -> tuple[Desk, Message]:
    expected = list_fingerprint(tuple(desk.dealt), desk.survivors)
    for name, body in desk.opened(SURVIVORS, inbox, desk.survivors).items():
        if body != expected:
            raise desk.terms.scene(SURVIVORS).trouble(name, "it has signed another list of survivors than was sent.")
    return desk, relayed(inbox)


def _unmask(inbox: Mapping[str, Message], desk: Desk) -> tuple[Desk, Message]:
    bodies = desk.opened(UNMASKING, inbox, desk.survivors)
    revealed = {name: _checked(desk, name, body) for name, body in bodies.items()}
    holders = list(revealed)[: desk.terms.threshold]
    weights = weights_at_zero([desk.circle.numbers[name] for name in holders])
    total = desk.total.copy()
    for dealer in desk.dealt:
        shares = {desk.circle.numbers[name]: revealed[name][dealer] for name in holders}
        secret = combine(shares, weights).to_bytes(SHARE_BYTES, "big")[-KEY_BYTES:]
        _check_secret(desk, dealer, secret)
        if dealer in desk.survivors:
            total -= mask(seed_stream(secret, desk.circle.transcript), len(total))
        else:
            _remove_pairs(desk, dealer, secret, total)
    return replace(desk, total=total), Message({}, NO_WEIGHT)


def _remove_pairs(desk: Desk, dropped: str, private: bytes, total: Any) -> None:
    """Take away what the survivors' masks with a dropped party have left in the sum."""
    publics = {name: desk.circle.adverts[name].mask_key for name in desk.survivors}
    for name, secret in agreed(private, publics).items():
        stream = mask(pair_stream(secret, name, dropped, desk.circle.transcript), len(total))
        if name < dropped:
            total -= stream
        else:
            total += stream


def _checked(desk: Desk, holder: str, body: bytes) -> dict[str, int]:
    """A holder's shares by dealer, if they are the ones that it got."""
    scene = desk.terms.scene(UNMASKING)
    try:
        texts = dict(zip(desk.dealt, chunks(body, SHARE_BYTES), strict=True))
        shares = {dealer: share_of(text) for dealer, text in texts.items()}
    except ValueError as error:
        raise scene.trouble(holder, f"its shares cannot be read: {error}.") from error
    for dealer, text in texts.items():
        survived, route = dealer in desk.survivors, (dealer, holder)
        both, _ = parts_for(route, desk.dealt[dealer], desk.circle)
        committed = both[:KEY_BYTES] if survived else both[KEY_BYTES:]
        if share_commitment("seed" if survived else "key", route, text) != committed:
            raise scene.trouble(holder, f"its share of a secret of {dealer!r} is not the one that it was given.")
    return shares


def _check_secret(desk: Desk, dealer: str, secret: bytes) -> None:
    advert, scene = desk.circle.adverts[dealer], desk.terms.scene(UNMASKING)
    survived = dealer in desk.survivors
    if (seed_commitment(secret) if survived else public_key(secret)) != (advert.seed if survived else advert.mask_key):
        raise scene.trouble(
            dealer,
            "the shares that it has dealt do not give back the secret that it has committed itself to, so that "
            "its masks cannot be removed. The sum is lost, and no upload was revealed. Leave this party out.",
        )
