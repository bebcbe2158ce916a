"""A masked sum at a party: what it draws, checks and answers, phase by phase.

    y_u = x_u + PRG(b_u) + Σ_{v>u} PRG(s_uv) − Σ_{v<u} PRG(s_uv)   mod 2⁶⁴

with the seed b_u of its own and a secret s_uv that u and v alone can compute. Of every other party it holds one share
of b_v and one of v's mask key, and gives away one of the two: which one follows from the list of survivors that it has
signed, once, and that at least t parties have signed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from partsong.core import Message
from partsong.privacy.admission import Admitted, Roster, Terms, admit
from partsong.privacy.contents import Contents
from partsong.privacy.dealing import Holding, Route, dealt, received, sealing_keys, seed_commitment, split_for
from partsong.privacy.envelopes import (
    KEYS,
    PHASES,
    SHARES,
    SURVIVORS,
    UPLOAD,
    Advert,
    Scene,
    delivered,
    enclosed,
    list_fingerprint,
    names_of,
    opened,
)
from partsong.privacy.key_agreement import KeyPair, agreed, mask, pair_stream, seed_stream, verifying_key
from partsong.privacy.randomness import Source


@dataclass(frozen=True, slots=True)
class Member:
    """What a party keeps from sum to sum: its signing key, the others' verifying keys, the last round it was in."""

    party: str
    signing: bytes = field(repr=False)
    roster: Roster
    is_pinned: bool
    last: int = -1


@dataclass(frozen=True, slots=True)
class Draft:
    """What a party is about to add, and the secrets that it has drawn for this one sum."""

    terms: Terms
    model: bytes
    contents: Contents
    vector: Any = field(repr=False)
    share_key: KeyPair
    mask_key: KeyPair
    seed: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Seat:
    """A party in the middle of a sum; `phase` is the one that it answers next, and it answers each once."""

    member: Member
    draft: Draft
    source: Source
    phase: int = KEYS
    admitted: Admitted | None = None
    keys: Mapping[Route, bytes] = field(default_factory=dict, repr=False)
    held: Mapping[str, Holding] = field(default_factory=dict, repr=False)
    survivors: tuple[str, ...] = ()

    @property
    def scene(self) -> Scene:
        """The phase that it answers next."""
        return self.draft.terms.scene(self.phase, b"" if self.admitted is None else self.admitted.transcript)

    @property
    def circle(self) -> Admitted:
        """Everybody's keys, which are known from the second phase on."""
        assert self.admitted is not None
        return self.admitted


def answer(phase: int, seat: Seat, heard: Message) -> tuple[Seat, Message]:
    """What a party sends in a phase; a phase that was answered, or left out, is refused."""
    if phase != seat.phase or phase >= len(PHASES):
        raise seat.draft.terms.scene(phase).trouble(
            seat.member.party,
            f"it was asked for phase {phase} out of turn. A phase is answered once, in order: two answers could reveal "
            "both secrets of a party.",
        )
    seat, body = (_advertise, _share, _mask, _sign, _reveal)[phase](seat, heard)
    message = enclosed(seat.scene, seat.member.party, seat.member.signing, body)
    return replace(seat, phase=phase + 1), message


def _advertise(seat: Seat, heard: Message) -> tuple[Seat, bytes]:
    draft = seat.draft
    return seat, Advert(
        verifying_key(seat.member.signing),
        draft.share_key.public,
        draft.mask_key.public,
        seed_commitment(draft.seed),
        draft.model,
        draft.contents,
    ).written()


def _share(seat: Seat, heard: Message) -> tuple[Seat, bytes]:
    """Shares of both secrets for all whose keys were heard, sealed for each."""
    draft, member, messages = seat.draft, seat.member, delivered(heard)
    admitted = admit(draft.terms, member.roster, messages, member.is_pinned)
    own = admitted.adverts.get(member.party)
    if own is None or own.written() != _advertise(seat, heard)[1]:
        raise seat.scene.trouble(member.party, "the server passes on other keys as those of this party.")
    seat = replace(seat, admitted=admitted, member=replace(member, roster=admitted.roster))
    holdings = split_for(admitted, draft.terms.threshold, seat.source, (draft.seed, draft.mask_key.private))
    keys = sealing_keys(member.party, draft.share_key.private, admitted)
    return replace(seat, keys=keys, held={member.party: holdings[member.party]}), dealt(member.party, holdings, keys)


def _mask(seat: Seat, heard: Message) -> tuple[Seat, Any]:
    """The vector under its masks, once the shares of all parties in the sum are held."""
    draft, member = seat.draft, seat.member
    bodies = {name: message["body"].tobytes() for name, message in delivered(heard).items()}
    strangers = sorted(bodies.keys() - seat.circle.adverts.keys())
    if strangers or member.party not in bodies:
        raise seat.scene.trouble(
            (strangers or [member.party])[0], "shares are passed on for others than those whose keys were."
        )
    draft.terms.require_enough(SHARES, bodies, seat.circle.adverts)
    scene = draft.terms.scene(SHARES, seat.circle.transcript)
    held = {
        name: seat.held[name]
        if name == member.party
        else received(scene, (name, member.party), body, seat.circle, seat.keys)
        for name, body in bodies.items()
    }
    masked = draft.vector + mask(seed_stream(draft.seed, seat.circle.transcript), len(draft.vector))
    publics = {name: seat.circle.adverts[name].mask_key for name in held if name != member.party}
    for other, secret in agreed(draft.mask_key.private, publics).items():
        stream = mask(pair_stream(secret, member.party, other, seat.circle.transcript), len(masked))
        masked = masked + stream if member.party < other else masked - stream
    nothing = KeyPair(b"", b"")
    emptied = replace(draft, vector=np.empty(0, np.uint64), seed=b"", mask_key=nothing, share_key=nothing)
    return replace(seat, held=held, keys={}, draft=emptied), masked


def _sign(seat: Seat, heard: Message) -> tuple[Seat, bytes]:
    """A signature under who has survived: the only list that this party will act on."""
    try:
        survivors = tuple(sorted(names_of(heard["survivors"])))
    except (KeyError, ValueError) as error:
        raise seat.scene.trouble(seat.member.party, "the server's list of survivors cannot be read.") from error
    odd = sorted(set(survivors) - seat.held.keys())
    if odd or len(set(survivors)) != len(survivors):
        raise seat.scene.trouble((odd or survivors)[0], "it is listed as a survivor, but is not in this sum once.")
    if seat.member.party not in survivors:
        raise seat.scene.trouble(
            seat.member.party,
            "the server lists this party as dropped, although it has sent its masked upload, which "
            "stays masked. It takes no further part in this sum.",
        )
    seat.draft.terms.require_enough(UPLOAD, survivors, seat.held)
    return replace(seat, survivors=survivors), list_fingerprint(tuple(seat.held), survivors)


def _reveal(seat: Seat, heard: Message) -> tuple[Seat, bytes]:
    """For each party of the sum one share, if enough others act on the same list."""
    scene = seat.draft.terms.scene(SURVIVORS, seat.circle.transcript)
    expected = list_fingerprint(tuple(seat.held), seat.survivors)
    signers = delivered(heard)
    for name, message in signers.items():
        if name not in seat.survivors:
            raise scene.trouble(name, "it has signed the list of survivors, and is not in it.")
        if opened(scene, name, seat.circle.roster[name], message) != expected:
            raise scene.trouble(
                name,
                f"it has signed another list of survivors than {seat.member.party!r}. Nothing is revealed: two "
                "lists could give away both secrets of a party.",
            )
    seat.draft.terms.require_enough(SURVIVORS, signers, seat.survivors)
    shares = [h.seed if name in seat.survivors else h.key for name, h in seat.held.items()]
    return replace(seat, held={}), b"".join(shares)
