"""What is agreed on before a masked sum, and who is let into it: the same checks at every party and at the server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass

from partsong.core import Message
from partsong.errors import TooFewParties
from partsong.privacy.contents import are_alike, form_of
from partsong.privacy.envelopes import KEYS, PHASES, UPLOAD, Advert, Scene, opened
from partsong.privacy.key_agreement import fingerprint

Roster = Mapping[str, bytes]
"""The key by which each party's signatures are known."""


@dataclass(frozen=True, slots=True)
class Terms:
    """One sum: its round, who was asked, t of them give a secret back, at least so many are in it, and the settings."""

    index: int
    participants: tuple[str, ...]
    threshold: int
    fewest: int
    settings: bytes

    def needed(self, phase: int) -> int:
        """So many have to be heard: until it is fixed whose sum this is, enough to hide each of them; later t."""
        return max(self.threshold, self.fewest) if phase <= UPLOAD else self.threshold

    def scene(self, phase: int, transcript: bytes = b"") -> Scene:
        """A phase; from the second on bound to everybody's fresh keys, and so to this one sum."""
        bound_to = transcript or fingerprint("before keys", self.settings, *self.participants)
        return Scene(phase, self.index, bound_to)

    def require_enough(self, phase: int, heard: Collection[str], asked: Collection[str]) -> None:
        """Stop before anything is revealed."""
        if len(heard) < self.needed(phase):
            missing = ", ".join(repr(name) for name in sorted(set(asked) - set(heard))[:5])
            raise TooFewParties(
                f"The masked sum of round {self.index} ends in phase {phase} ({PHASES[phase]}): {len(heard)} of "
                f"{len(self.participants)} parties were heard, and {self.needed(phase)} are needed to remove "
                f"the masks of a sum that hides each of them; missing: {missing or 'nobody else was asked'}. "
                "No upload was revealed. Repeat the round once they are back."
            )


@dataclass(frozen=True, slots=True)
class Admitted:
    """Those whose keys were heard, in name order, the keys by which they are known, and a fingerprint of all that.

    `numbers`, from 1: at which point of a polynomial a party's share is.
    """

    adverts: Mapping[str, Advert]
    roster: Roster
    transcript: bytes
    numbers: Mapping[str, int]


def admit(terms: Terms, known: Roster, messages: Mapping[str, Message], is_pinned: bool) -> Admitted:
    """Check everybody's keys; a party that is not known yet is known by its first message, unless all are pinned."""
    scene, adverts, bodies = terms.scene(KEYS), {}, []
    for name in sorted(messages):
        if name not in terms.participants:
            raise scene.trouble(name, "it was not asked to take part in this sum.")
        advert = _read(scene, name, messages[name])
        expected = known.get(name, b"" if is_pinned else advert.verifying)
        if advert.verifying != expected:
            raise scene.trouble(
                name,
                "its signing key is not the one that it is known by; either this is another party, or its secret "
                "was changed. Agree on a new roster outside this protocol.",
            )
        bodies.append(opened(scene, name, expected, messages[name]))
        adverts[name] = advert
    terms.require_enough(KEYS, adverts, terms.participants)
    _check_together(scene, adverts)
    transcript = fingerprint(
        scene.bound_to, terms.index, *(part for pair in zip(adverts, bodies, strict=True) for part in pair)
    )
    roster = {**known, **{name: one.verifying for name, one in adverts.items()}}
    return Admitted(adverts, roster, transcript, {name: number for number, name in enumerate(adverts, 1)})


def _read(scene: Scene, name: str, message: Message) -> Advert:
    try:
        return Advert.read(message["body"].tobytes())
    except (KeyError, ValueError) as error:
        raise scene.trouble(name, f"its keys cannot be read ({error}).") from error


def _check_together(scene: Scene, adverts: Mapping[str, Advert]) -> None:
    """No key twice, one model, arrays that can be added; who differs from the most is named."""
    owners: dict[bytes, str] = {}
    usual, like_most = (_usual(adverts, of) for of in (lambda one: one.model, lambda one: form_of(one.contents)))
    for name, advert in adverts.items():
        for key in (advert.share_key, advert.mask_key):
            if key in owners:
                raise scene.trouble(name, f"it has sent a key that {owners[key]!r} has sent as well.")
            owners[key] = name
        if advert.model != adverts[usual].model:
            raise scene.trouble(
                name,
                f"it was sent another model than {usual!r}, and a sum over different models can single out "
                "a party. Nothing was masked. Send one model to all.",
            )
        if not are_alike(advert.contents, adverts[like_most].contents):
            raise scene.trouble(
                name,
                f"it would add {_shown(advert)}, but {like_most!r} {_shown(adverts[like_most])}. Nothing was masked. "
                "All parties must run the same program on the same columns.",
            )


def _usual(adverts: Mapping[str, Advert], of: Callable[[Advert], Hashable]) -> str:
    """The first party that says what the most say."""
    said = {name: of(advert) for name, advert in adverts.items()}
    most = Counter(said.values()).most_common(1)[0][0]
    return next(name for name, what in said.items() if what == most)


def _shown(advert: Advert) -> str:
    return ", ".join(f"{piece.name} {'×'.join(map(str, piece.shape))}" for piece in advert.contents) or "nothing"
