"""A masked sum at a party: what it draws, checks and answers, phase by phase.

    y_u = x_u + PRG(b_u) + Σ_{v>u} PRG(s_uv) − Σ_{v<u} PRG(s_uv)   mod 2⁶⁴

with the seed b_u of its own and a secret s_uv that u and v alone can compute, both drawn for this one sum. Of every
other party it holds one share of b_v and one of v's mask key, and gives away one of the two: which one follows from the
one list of survivors that it answers, and its answer can be read when t parties have answered that list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from partsong.core.interfaces import Message
from partsong.core.states import state
from partsong.privacy.randomness import Source
from partsong.secure_aggregation.crypto import (
    KEY_BYTES,
    SHARE_BYTES,
    KeyPair,
    add_mask,
    agreed,
    derived,
    key_pair,
    pair_stream,
    public_key,
    seed_stream,
    verifying_key,
)
from partsong.secure_aggregation.messages import (
    KEYS,
    SHARES,
    UNMASKING,
    UPLOAD,
    About,
    Admitted,
    Advert,
    Circle,
    Gathering,
    Roster,
    Terms,
    admit,
    chunks,
    delivered,
    enclosed,
    list_of,
    masks_of,
    names_of,
)
from partsong.secure_aggregation.secret_sharing import (
    KINDS,
    Listed,
    Route,
    Secrets,
    answered,
    dealt,
    pair_secrets,
    received,
    sealing_keys,
    seed_commitment,
    split_for,
)


@state("secure.client-setup")
@dataclass(frozen=True, slots=True)
class Place:
    """What a party keeps of a set-up: secrets in common with each other party; and for each sum that is to come, by
    its round, secrets of its own and shares of everybody's, end to end (of the seed, of the key; dealer by dealer).
    """

    circle: Circle
    pairs: Mapping[str, bytes] = field(repr=False)
    own: Mapping[int, Secrets] = field(repr=False)
    held: Mapping[int, bytes] = field(repr=False)

    def shares(self, gathering: Gathering, survivors: Sequence[str]) -> bytes:
        """For each party of a sum one share: of its seed if it survived, else of its key."""
        both = chunks(self.held[gathering.terms.index], len(KINDS) * SHARE_BYTES)
        held = dict(zip(self.circle.dealers, both, strict=True))
        parts = {True: slice(0, SHARE_BYTES), False: slice(SHARE_BYTES, None)}
        return b"".join(held[name][parts[name in survivors]] for name in gathering.terms.participants)

    def after(self, index: int) -> Place | None:
        """Without all that was for sums up to this one."""
        own = {at: secrets for at, secrets in self.own.items() if at > index}
        return Place(self.circle, self.pairs, own, {at: self.held[at] for at in own}) if own else None


@state("secure.client-identity")
@dataclass(frozen=True, slots=True)
class Member:
    """What a party keeps from sum to sum: its signing key, the others' verifying keys, the last round it was in."""

    party: str
    signing: bytes = field(repr=False)
    roster: Roster
    is_pinned: bool
    last: int = -1
    place: Place | None = None


@state("secure.client-upload")
@dataclass(frozen=True, slots=True)
class Draft:
    """What a party is about to add, and on which terms it was asked to."""

    terms: Terms
    about: About
    vector: Any = field(repr=False)


@state("secure.client-keys")
@dataclass(frozen=True, slots=True)
class Dealer:
    """A party in the middle of a set-up: what it has drawn, and what it keeps of it until shares of all have come."""

    share_key: KeyPair
    secrets: tuple[Secrets, ...] = field(repr=False)
    admitted: Admitted | None = None
    pairs: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    keys: Mapping[Route, bytes] = field(default_factory=dict, repr=False)
    held: bytes = field(default=b"", repr=False)


@state("secure.client")
@dataclass(frozen=True, slots=True)
class Seat:
    """A party in the middle of a sum; `phases` are those that it may be asked for next, and it answers each once.

    `asked`: with whom it has masked.
    """

    member: Member
    draft: Draft
    source: Source
    phases: tuple[int, ...] = (KEYS, UPLOAD)
    dealer: Dealer | None = None
    asked: tuple[str, ...] = ()
    survivors: tuple[str, ...] = ()

    @property
    def place(self) -> Place:
        """In the set-up that the sum is part of."""
        assert self.member.place is not None
        return self.member.place

    @property
    def gathering(self) -> Gathering:
        """The sum, once it has masked."""
        return self.place.circle.gathering(self.draft.terms.index, self.asked)


def answer(phase: int, seat: Seat, heard: Message) -> tuple[Seat, Message]:
    """What a party sends in a phase; a phase that was answered, or left out, is refused."""
    if phase not in seat.phases:
        raise seat.draft.terms.scene(phase).trouble(
            seat.member.party,
            f"it was asked for phase {phase} out of turn. A phase is answered once, in order: two answers could reveal "
            "both secrets of a party.",
        )
    seat, message = (_advertise, _share, _mask, _reveal)[phase](seat, heard)
    return replace(seat, phases=(phase + 1,) if phase < UNMASKING else ()), message


def _advertise(seat: Seat, heard: Message) -> tuple[Seat, Message]:
    """Draw the keys and seeds of all sums of a batch."""
    draw, terms = seat.source, seat.draft.terms
    share_key = key_pair(draw)
    secrets = tuple(Secrets(draw(KEY_BYTES), draw(KEY_BYTES)) for _ in range(terms.batch))
    seat = replace(seat, dealer=Dealer(share_key, secrets))
    body = _advert(seat.member, share_key, secrets).written()
    return seat, enclosed(terms.scene(KEYS), seat.member.party, seat.member.signing, body)


def _share(seat: Seat, heard: Message) -> tuple[Seat, Message]:
    """Shares of all secrets for all whose keys were heard, sealed for each."""
    terms, member, dealer = seat.draft.terms, seat.member, _dealer(seat)
    admitted = admit(terms, member.roster, delivered(heard), member.is_pinned)
    own = admitted.adverts.get(member.party)
    if own != _advert(member, dealer.share_key, dealer.secrets):
        raise terms.scene(SHARES).trouble(member.party, "the server passes on other keys as those of this party.")
    holdings = split_for(admitted, terms.threshold, seat.source, dealer.secrets)
    secrets = pair_secrets(member.party, dealer.share_key.private, admitted)
    keys = sealing_keys(member.party, secrets, admitted.transcript)
    pairs = {name: derived(secret, "answers", admitted.transcript) for name, secret in secrets.items()}
    body = dealt(member.party, holdings, keys)
    message = enclosed(terms.scene(SHARES, admitted.transcript), member.party, member.signing, body)
    dealer = Dealer(KeyPair(b"", b""), dealer.secrets, admitted, pairs, keys, holdings[member.party])
    return replace(seat, dealer=dealer, member=replace(member, roster={**member.roster, **admitted.roster})), message


def _mask(seat: Seat, heard: Message) -> tuple[Seat, Message]:
    """The vector under its masks, once the shares of all parties in the sum are held."""
    draft = seat.draft
    if seat.dealer is None:
        place, asked = _place(seat), draft.terms.participants
    else:
        place = _placed(seat, heard)
        asked = place.circle.dealers
    gathering, member = place.circle.gathering(draft.terms.index, asked), seat.member
    gathering.terms.require_enough(UPLOAD, asked, place.circle.dealers)
    own, transcript = place.own[draft.terms.index], masks_of(gathering, draft.about.common)
    masked = draft.vector.copy()
    add_mask(masked, seed_stream(own.seed, transcript))
    publics = {name: gathering.mask_key(name) for name in asked if name != member.party}
    for other, secret in agreed(own.key, publics).items():
        add_mask(masked, pair_stream(secret, member.party, other, transcript), negated=other < member.party)
    message = enclosed(gathering.scene(UPLOAD), member.party, member.signing, masked, draft.about.written())
    kept = {index: one for index, one in place.own.items() if index != draft.terms.index}
    member = replace(member, place=replace(place, own=kept))
    emptied = replace(draft, vector=np.empty(0, np.uint64))
    return replace(seat, member=member, draft=emptied, dealer=None, asked=gathering.terms.participants), message


def _reveal(seat: Seat, heard: Message) -> tuple[Seat, Message]:
    """For each party of the sum one share, for the one list of survivors that this party answers."""
    gathering, member, place = seat.gathering, seat.member, seat.place
    scene, index = gathering.scene(UNMASKING), gathering.terms.index
    survivors = _survivors(seat, gathering, heard)
    masks = masks_of(gathering, seat.draft.about.common)
    listed = Listed(gathering, survivors, list_of(masks, survivors))
    body = answered(member.party, place.shares(gathering, survivors), place.pairs, listed, seat.source)
    member = replace(member, place=place.after(index))
    return replace(seat, member=member, survivors=survivors), enclosed(scene, member.party, member.signing, body)


def _advert(member: Member, share_key: KeyPair, secrets: tuple[Secrets, ...]) -> Advert:
    keys, seeds = (public_key(one.key) for one in secrets), (seed_commitment(one.seed) for one in secrets)
    return Advert(verifying_key(member.signing), share_key.public, b"".join(keys), b"".join(seeds))


def _dealer(seat: Seat) -> Dealer:
    assert seat.dealer is not None
    return seat.dealer


def _place(seat: Seat) -> Place:
    """The set-up that a sum without one of its own is part of, if there is one here."""
    terms, member = seat.draft.terms, seat.member
    place, scene = member.place, terms.scene(UPLOAD)
    if place is None or terms.index not in place.own or terms.settings != place.circle.terms.settings:
        raise scene.trouble(
            member.party,
            "it was asked for a masked upload, but has no keys for this sum: it was in no set-up for this round, or "
            "this sum was before. Nothing was sent. Begin with keys (phase 0).",
        )
    strangers = sorted(set(terms.participants) - set(place.circle.dealers))
    if strangers or member.party not in terms.participants:
        raise scene.trouble(
            (strangers or [member.party])[0],
            f"it cannot be in a sum with {member.party!r} without a set-up that both were in. Nothing was sent.",
        )
    return place


def _placed(seat: Seat, heard: Message) -> Place:
    """The end of a set-up: all shares that were passed on are for this party, and those that were promised."""
    terms, dealer, party = seat.draft.terms, _dealer(seat), seat.member.party
    admitted = dealer.admitted
    assert admitted is not None
    bodies = {name: message["body"].tobytes() for name, message in delivered(heard).items()}
    strangers = sorted(bodies.keys() - admitted.adverts.keys())
    if strangers or party not in bodies:
        raise terms.scene(UPLOAD).trouble(
            (strangers or [party])[0], "shares are passed on for others than those whose keys were."
        )
    terms.require_enough(SHARES, bodies, admitted.adverts)
    scene = terms.scene(SHARES, admitted.transcript)
    held = {
        name: dealer.held if name == party else received(scene, (name, party), body, admitted, dealer.keys[name, party])
        for name, body in bodies.items()
    }
    circle = Circle(terms, admitted, tuple(bodies))
    by_sum = zip(*(chunks(shares, len(KINDS) * SHARE_BYTES) for shares in held.values()), strict=True)
    own = dict(zip(circle.rounds, dealer.secrets, strict=True))
    return Place(circle, dealer.pairs, own, dict(zip(circle.rounds, map(b"".join, by_sum), strict=True)))


def _survivors(seat: Seat, gathering: Gathering, heard: Message) -> tuple[str, ...]:
    """The server's list, if it would single out nobody."""
    party, asked, scene = seat.member.party, gathering.terms.participants, gathering.scene(UNMASKING)
    try:
        survivors = tuple(sorted(names_of(heard["survivors"])))
    except (KeyError, ValueError) as error:
        raise scene.trouble(party, "the server's list of survivors cannot be read.") from error
    odd = sorted(set(survivors) - set(asked))
    if odd or len(set(survivors)) != len(survivors):
        raise scene.trouble((odd or survivors)[0], "it is listed as a survivor, but is not in this sum once.")
    if party not in survivors:
        raise scene.trouble(
            party,
            "the server lists this party as dropped, although it has sent its masked upload, which "
            "stays masked. It takes no further part in this sum.",
        )
    gathering.terms.require_enough(UPLOAD, survivors, asked)
    return survivors
