"""What is agreed on before a masked sum, and who is let into it: the same checks at every party and at the server.

A set-up is for a batch of sums, those of the rounds from its own on. Each of them is over all of its parties, or some.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from partsong.core import Message
from partsong.errors import TooFewParties
from partsong.privacy.envelopes import KEYS, PHASES, UPLOAD, Advert, Scene, chunks, opened
from partsong.privacy.key_agreement import KEY_BYTES, fingerprint

Roster = Mapping[str, bytes]
"""The key by which each party's signatures are known."""


@dataclass(frozen=True, slots=True)
class Terms:
    """A set-up, or one sum of it: its round, who was asked, t of them give a secret back, at least so many are in it,
    and the settings; `batch`: for how many sums, of this round and those after it, keys and shares are made.
    """

    index: int
    participants: tuple[str, ...]
    threshold: int
    fewest: int
    settings: bytes
    batch: int

    def needed(self, phase: int) -> int:
        """So many have to be heard: until it is fixed whose sum this is, enough to hide each of them; later t."""
        return max(self.threshold, self.fewest) if phase <= UPLOAD else self.threshold

    def scene(self, phase: int, transcript: bytes = b"") -> Scene:
        """A phase; from the second on bound to everybody's fresh keys, and so to this one set-up."""
        bound_to = transcript or fingerprint("before keys", self.settings, self.batch, *self.participants)
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
    """Those whose keys were heard, in name order, and a fingerprint of all that they have sent."""

    adverts: Mapping[str, Advert]
    transcript: bytes

    @property
    def roster(self) -> Roster:
        """The keys by which they are known."""
        return {name: advert.verifying for name, advert in self.adverts.items()}

    @property
    def numbers(self) -> dict[str, int]:
        """From 1: at which point of a polynomial a party's share is."""
        return {name: number for number, name in enumerate(self.adverts, 1)}


@dataclass(frozen=True, slots=True)
class Circle:
    """The parties of a set-up: its terms, whose keys were heard, and who of them has dealt shares to the others."""

    terms: Terms
    admitted: Admitted
    dealers: tuple[str, ...]

    @property
    def rounds(self) -> range:
        """Whose sums it is for."""
        return range(self.terms.index, self.terms.index + self.terms.batch)

    def gathering(self, index: int, participants: Sequence[str]) -> Gathering:
        """One of its sums, over these parties."""
        terms = self.terms
        names = tuple(sorted(participants))
        return Gathering(self, Terms(index, names, terms.threshold, terms.fewest, terms.settings, terms.batch))


@dataclass(frozen=True, slots=True)
class Gathering:
    """One sum of a circle; signatures of its phases are bound to who is in the circle, and who takes part."""

    circle: Circle
    terms: Terms

    @property
    def slot(self) -> int:
        """Which keys of its batch are for it."""
        return self.terms.index - self.circle.terms.index

    @property
    def transcript(self) -> bytes:
        """A fingerprint of the set-up, of who has dealt in it, of the round, and of who takes part."""
        circle, terms = self.circle, self.terms
        count, setup = len(circle.dealers), circle.admitted.transcript
        return fingerprint("sum", setup, terms.index, count, *circle.dealers, *terms.participants)

    def scene(self, phase: int) -> Scene:
        """A phase of this sum."""
        return self.terms.scene(phase, self.transcript)

    def mask_key(self, party: str) -> bytes:
        """A party's public key for the masks of this sum."""
        return _piece(self.circle.admitted.adverts[party].mask_keys, self.slot)

    def seed(self, party: str) -> bytes:
        """A party's commitment to the seed of its own mask in this sum."""
        return _piece(self.circle.admitted.adverts[party].seeds, self.slot)


def masks_of(gathering: Gathering, common: bytes) -> bytes:
    """What the masks of a sum are drawn for: with another model, or arrays of another form, they do not cancel."""
    return fingerprint("masks", gathering.transcript, common)


def list_of(masks: bytes, survivors: Sequence[str]) -> bytes:
    """What an answer to a list of survivors is for."""
    return fingerprint("survivors", masks, *survivors)


def admit(terms: Terms, known: Roster, messages: Mapping[str, Message], is_pinned: bool) -> Admitted:
    """Check everybody's keys; a party that is not known yet is known by its first message, unless all are pinned."""
    scene, adverts, bodies = terms.scene(KEYS), {}, []
    for name in sorted(messages):
        if name not in terms.participants:
            raise scene.trouble(name, "it was not asked to take part in this sum.")
        advert = _read(scene, name, messages[name], terms.batch)
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
    _check_keys(scene, adverts)
    transcript = fingerprint(
        scene.bound_to, terms.index, *(part for pair in zip(adverts, bodies, strict=True) for part in pair)
    )
    return Admitted(adverts, transcript)


def _piece(keys: bytes, slot: int) -> bytes:
    return keys[KEY_BYTES * slot : KEY_BYTES * (slot + 1)]


def _read(scene: Scene, name: str, message: Message, batch: int) -> Advert:
    try:
        return Advert.read(message["body"].tobytes(), batch)
    except (KeyError, ValueError) as error:
        raise scene.trouble(name, f"its keys cannot be read ({error}).") from error


def _check_keys(scene: Scene, adverts: Mapping[str, Advert]) -> None:
    """No key twice: neither of two parties, nor in two sums."""
    owners: dict[bytes, str] = {}
    for name, advert in adverts.items():
        for key in (advert.share_key, *chunks(advert.mask_keys, KEY_BYTES)):
            if key in owners:
                raise scene.trouble(name, f"it has sent a key that {owners[key]!r} has sent as well.")
            owners[key] = name
