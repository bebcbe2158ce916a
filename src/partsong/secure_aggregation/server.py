"""A masked sum at the server: it passes on what it cannot read, adds up what it cannot see, and removes the masks.

Σ_u x_u  =  Σ_u y_u − Σ_u PRG(b_u) − Σ_u Σ_v ± PRG(s_uv)   mod 2⁶⁴,   u over the survivors, v over the dropped
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from partsong.core.interfaces import Message
from partsong.core.states import state
from partsong.errors import UploadError
from partsong.secure_aggregation.crypto import (
    KEY_BYTES,
    SHARE_BYTES,
    add_mask,
    agreed,
    combine,
    pair_stream,
    public_key,
    seed_stream,
    weights_at_zero,
)
from partsong.secure_aggregation.messages import (
    NO_WEIGHT,
    SHARES,
    UNMASKING,
    UPLOAD,
    About,
    Admitted,
    Circle,
    Gathering,
    Roster,
    Scene,
    Terms,
    about_in,
    admit,
    are_alike,
    form_of,
    list_of,
    masks_of,
    names_as_array,
    opened,
    relayed,
    share_of,
    size_of,
)
from partsong.secure_aggregation.secret_sharing import (
    KEY,
    KINDS,
    SEED,
    Listed,
    seed_commitment,
    share_commitment,
    shares_in,
    vows_in,
)


@state("secure.key-directory")
@dataclass(frozen=True, slots=True)
class Register:
    """What the server keeps from sum to sum: known keys; and of the last set-up its circle, who has all shares of it,
    and all commitments, by dealer.
    """

    roster: Roster
    circle: Circle | None = None
    present: tuple[str, ...] = ()
    vows: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def serves(self, terms: Terms) -> bool:
        """Whether the last set-up does for a sum."""
        circle = self.circle
        if circle is None or terms.index not in circle.rounds[1:] or terms.settings != circle.terms.settings:
            return False
        is_enough = len(terms.participants) >= circle.terms.needed(UPLOAD)
        return is_enough and set(terms.participants) <= set(self.present)


@state("secure.server")
@dataclass(frozen=True, slots=True)
class Desk:
    """The server in the middle of a sum: who survived, what their uploads are about, and the sum as far as known."""

    register: Register
    terms: Terms
    is_pinned: bool
    admitted: Admitted | None = None
    gathering: Gathering | None = None
    abouts: Mapping[str, About] = field(default_factory=dict)
    total: Any = field(default=None, repr=False)

    @property
    def sum(self) -> Gathering:
        """Who takes part, which is known from the third phase on."""
        assert self.gathering is not None
        return self.gathering

    @property
    def survivors(self) -> tuple[str, ...]:
        """Those whose uploads are in the sum."""
        return tuple(self.abouts)


def serve(phase: int, inbox: Mapping[str, Message], desk: Desk) -> tuple[Desk, Message]:
    """What the server makes of a phase, and its answer to all."""
    return (_introduce, _pass_on, _add_up, _unmask)[phase](inbox, desk)


def _introduce(inbox: Mapping[str, Message], desk: Desk) -> tuple[Desk, Message]:
    admitted = admit(desk.terms, desk.register.roster, inbox, desk.is_pinned)
    return replace(desk, admitted=admitted), relayed(inbox)


def _pass_on(inbox: Mapping[str, Message], desk: Desk) -> tuple[Desk, Message]:
    terms, admitted = desk.terms, desk.admitted
    assert admitted is not None
    scene = terms.scene(SHARES, admitted.transcript)
    terms.require_enough(SHARES, inbox, admitted.adverts)
    vows = {}
    for name, body in _opened(scene, inbox, tuple(admitted.adverts), admitted.roster).items():
        try:
            vows[name] = vows_in(body, admitted, terms.batch).copy()
        except ValueError as error:
            raise scene.trouble(name, f"its shares cannot be read: {error}.") from error
    circle = Circle(terms, admitted, tuple(vows))
    register = Register({**desk.register.roster, **admitted.roster}, circle, (), vows)
    return replace(desk, register=register, gathering=circle.gathering(terms.index, circle.dealers)), relayed(inbox)


def _add_up(inbox: Mapping[str, Message], desk: Desk) -> tuple[Desk, Message]:
    gathering = desk.sum
    scene, asked = gathering.scene(UPLOAD), gathering.terms.participants
    gathering.terms.require_enough(UPLOAD, inbox, asked)
    bodies = _opened(scene, inbox, asked, gathering.circle.admitted.roster)
    abouts = {name: _about(scene, name, inbox[name]) for name in bodies}
    _check_together(scene, abouts)
    total = np.zeros(size_of(next(iter(abouts.values())).contents), np.uint64)
    for name, body in bodies.items():
        if len(body) != total.nbytes:
            raise scene.trouble(name, f"its upload has {len(body)} bytes, not {total.nbytes}.")
        total += np.frombuffer(body, "<u8")
    register = desk.register
    if gathering.slot == 0:
        register = replace(register, present=tuple(bodies))
    desk = replace(desk, register=register, abouts=abouts, total=total)
    return desk, Message({"survivors": names_as_array(desk.survivors)}, NO_WEIGHT)


def _unmask(inbox: Mapping[str, Message], desk: Desk) -> tuple[Desk, Message]:
    gathering, survivors = desk.sum, desk.survivors
    scene, admitted = gathering.scene(UNMASKING), gathering.circle.admitted
    gathering.terms.require_enough(UNMASKING, inbox, survivors)
    bodies = _opened(scene, inbox, survivors, admitted.roster)
    masks = masks_of(gathering, next(iter(desk.abouts.values())).common)
    holders = list(bodies)[: gathering.terms.threshold]
    numbers = admitted.numbers
    weights = weights_at_zero([numbers[name] for name in holders])
    answers = shares_in(bodies, Listed(gathering, survivors, list_of(masks, survivors)), weights)
    revealed = {name: _checked(desk, name, shares) for name, shares in answers.items()}
    total = desk.total.copy()
    for dealer in gathering.terms.participants:
        shares = {numbers[name]: revealed[name][dealer] for name in holders}
        secret = combine(shares, weights).to_bytes(SHARE_BYTES, "big")[-KEY_BYTES:]
        _check_secret(desk, dealer, secret)
        if dealer in survivors:
            add_mask(total, seed_stream(secret, masks), negated=True)
        else:
            _remove_pairs(desk, (dealer, secret), masks, total)
    return replace(desk, total=total), Message({}, NO_WEIGHT)


def _remove_pairs(desk: Desk, dropped: tuple[str, bytes], masks: bytes, total: Any) -> None:
    """Take away what the survivors' masks with a dropped party have left in the sum."""
    party, private = dropped
    for name, secret in agreed(private, {name: desk.sum.mask_key(name) for name in desk.survivors}).items():
        add_mask(total, pair_stream(secret, name, party, masks), negated=name < party)


def _opened(scene: Scene, inbox: Mapping[str, Message], asked: Sequence[str], roster: Roster) -> dict[str, bytes]:
    """The bodies of a phase, in name order, from those that are in the sum and signed by them."""
    for name in inbox:
        if name not in asked:
            raise scene.trouble(name, "it has dropped out of this sum before; what it sends now stays masked.")
    return {name: opened(scene, name, roster[name], inbox[name]) for name in sorted(inbox)}


def _checked(desk: Desk, holder: str, texts: Sequence[bytes]) -> dict[str, int]:
    """A holder's shares by dealer, if they are the ones that it got."""
    gathering = desk.sum
    scene, slot, place = gathering.scene(UNMASKING), gathering.slot, gathering.circle.admitted.numbers[holder] - 1
    shares = {}
    for dealer, text in zip(gathering.terms.participants, texts, strict=True):
        kind = SEED if dealer in desk.survivors else KEY
        vow = desk.register.vows[dealer][slot, place, KINDS.index(kind)].tobytes()
        if share_commitment(kind, slot, (dealer, holder), text) != vow:
            raise scene.trouble(holder, f"its share of a secret of {dealer!r} is not the one that it was given.")
        try:
            shares[dealer] = share_of(text)
        except ValueError as error:
            raise scene.trouble(dealer, f"it has dealt what is no share to {holder!r}, who did not say so.") from error
    return shares


def _check_secret(desk: Desk, dealer: str, secret: bytes) -> None:
    gathering, has_survived = desk.sum, dealer in desk.survivors
    announced = gathering.seed(dealer) if has_survived else gathering.mask_key(dealer)
    if (seed_commitment(secret) if has_survived else public_key(secret)) != announced:
        raise gathering.scene(UNMASKING).trouble(
            dealer,
            "the shares that it has dealt do not give back the secret that it has committed itself to, so that "
            "its masks cannot be removed. The sum is lost, and no upload was revealed. Leave this party out.",
        )


def _about(scene: Scene, name: str, message: Message) -> About:
    try:
        return About.read(about_in(message))
    except (ValueError, UploadError) as error:
        raise scene.trouble(name, f"what it says about its upload cannot be read ({error}).") from error


def _check_together(scene: Scene, abouts: Mapping[str, About]) -> None:
    """One model, arrays that can be added; who differs from the most is named."""
    usual, like_most = (_usual(abouts, of) for of in (lambda one: one.model, lambda one: form_of(one.contents)))
    for name, about in abouts.items():
        if about.model != abouts[usual].model:
            raise scene.trouble(
                name,
                f"it was sent another model than {usual!r}, and a sum over different models can single out "
                "a party. Its masks do not cancel, and all uploads stay masked. Send one model to all.",
            )
        if not are_alike(about.contents, abouts[like_most].contents):
            raise scene.trouble(
                name,
                f"it would add {_shown(about)}, but {like_most!r} {_shown(abouts[like_most])}. All uploads stay "
                "masked. All parties must run the same program on the same columns.",
            )


def _usual(abouts: Mapping[str, About], of: Callable[[About], Hashable]) -> str:
    """The first party that says what the most say."""
    said = {name: of(about) for name, about in abouts.items()}
    most = Counter(said.values()).most_common(1)[0][0]
    return next(name for name, what in said.items() if what == most)


def _shown(about: About) -> str:
    return ", ".join(f"{piece.name} {'×'.join(map(str, piece.shape))}" for piece in about.contents) or "nothing"
