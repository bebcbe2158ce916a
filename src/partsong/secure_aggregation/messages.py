"""What is agreed on before a masked sum, and who is let into it: the same checks at every party and at the server.

A set-up is for a batch of sums, those of the rounds from its own on. Each of them is over all of its parties, or some.
Every message is a body, signed by its party for one phase of one sum, so that it serves nowhere else:

    phase 0, keys           verifying key | share key | for each sum of the batch a mask key, then commitments to the
                            seeds
    phase 1, shares         for each sum and holder two commitments; for each other holder all shares, sealed
    phase 2, masked upload  numbers modulo 2⁶⁴; beside them the model's fingerprint and the contents
    phase 3, unmasking      the shares for one list of survivors, to be read when enough have answered it
                            (`secret_sharing`)
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong.core.interfaces import Array, Message, type_name
from partsong.core.states import state
from partsong.errors import PartyError, TooFewParties, UploadError
from partsong.secure_aggregation.crypto import (
    KEY_BYTES,
    PRIME,
    SHARE_BYTES,
    SIGNATURE_BYTES,
    fingerprint,
    is_valid_signature,
    sign,
)

LIBRARIES = ("numpy", *(f"torch {place}" for place in ("cpu", "cuda", "mps", "xpu")))
"""Where a sum can be returned."""

KINDS = {"bfloat16", *(f"float{width}" for width in (16, 32, 64))}
KINDS |= {f"{sign}int{width}" for sign in ("", "u") for width in (8, 16, 32, 64)}
"""Number types that a sum can be returned in."""

KEYS, SHARES, UPLOAD, UNMASKING = range(4)
PHASES = ("keys", "shares", "masked upload", "unmasking")
NO_WEIGHT = 0.0
"""The weight of every message: the real one is in the masked vector."""
Roster = Mapping[str, bytes]
"""The key by which each party's signatures are known."""


@state("secure.array")
@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """An array of a message without its numbers; `kind` is its number type, `library` is numpy, or torch and where."""

    name: str
    shape: tuple[int, ...]
    kind: str
    library: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.library not in LIBRARIES or any(size < 0 for size in self.shape):
            raise UploadError(
                f"The array {self.name!r} holds {self.kind} ({self.library}); only real numbers can be masked."
            )

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


Contents = tuple[ArrayInfo, ...]


def describe_contents(message: Message) -> Contents:
    """What is in a message, by name."""
    return tuple(
        ArrayInfo(name, tuple(map(int, array.shape)), _kind(array), library_of(array))
        for name, array in sorted(message.arrays.items())
    )


def contents_to_json(contents: Contents) -> bytes:
    """As text that can be sent."""
    return json.dumps([[info.name, info.shape, info.kind, info.library] for info in contents]).encode()


def contents_from_json(text: bytes) -> Contents:
    """From text; ValueError where it is none of ours."""
    try:
        entries = [
            (str(name), tuple(map(int, shape)), str(kind), str(place)) for name, shape, kind, place in json.loads(text)
        ]
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return tuple(ArrayInfo(*entry) for entry in entries)


def shapes_of(contents: Contents) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Names and shapes."""
    return tuple((info.name, info.shape) for info in contents)


def have_same_shapes(one: Contents, other: Contents) -> bool:
    """Whether they can be added: names and shapes; number types may differ."""
    return shapes_of(one) == shapes_of(other)


def vector_length(contents: Contents) -> int:
    """The length of the vector: all numbers, and the weight."""
    return sum(info.count for info in contents) + 1


def _kind(array: Array) -> str:
    """The name of the number type, in whatever order its bytes are."""
    return str(getattr(array.dtype, "name", type_name(array.dtype)))


def library_of(array: Array) -> str:
    """NumPy, or torch and the kind of device."""
    if type(array).__module__.partition(".")[0] != "torch":
        return "numpy"
    return f"torch {array.device.type}"


@dataclass(frozen=True, slots=True)
class MessageContext:
    """Where something happens: a phase of a sum; `bound_to` is what signatures are for beside it."""

    phase: int
    index: int
    bound_to: bytes

    def party_error(self, party: str, what: str) -> PartyError:
        """The error of a party in this phase."""
        kind = PHASES[self.phase] if self.phase in range(len(PHASES)) else "which there is not"
        where = f"phase {self.phase} ({kind}) of the masked sum of round {self.index}"
        return PartyError(f"Party {party!r}, {where}: {what}")

    def digest_to_sign(self, party: str, header: bytes, body: bytes) -> bytes:
        """What is signed."""
        return fingerprint("partsong masked sum", self.phase, self.index, self.bound_to, party, header, body)


@state("secure.advert")
@dataclass(frozen=True, slots=True)
class AdvertisedKeys:
    """A party's keys for all sums of a batch: mask keys, and commitments to the seeds of its own masks, end to end."""

    verifying: bytes
    share_key: bytes
    mask_keys: bytes
    seeds: bytes

    def to_bytes(self) -> bytes:
        """As a body."""
        return self.verifying + self.share_key + self.mask_keys + self.seeds

    @classmethod
    def from_bytes(cls, body: bytes, batch: int) -> AdvertisedKeys:
        """From a body; ValueError where it is none for so many sums."""
        if len(body) != (2 + 2 * batch) * KEY_BYTES:
            raise ValueError(f"{len(body)} bytes are not the keys of {batch} sums")
        verifying, share_key, *others = chunks(body, KEY_BYTES)
        return cls(verifying, share_key, b"".join(others[:batch]), b"".join(others[batch:]))


@state("secure.context")
@dataclass(frozen=True, slots=True)
class UploadHeader:
    """What goes with an upload in the open: the fingerprint of the model that a party was sent, and its contents."""

    model: bytes
    contents: Contents

    def to_bytes(self) -> bytes:
        """As bytes."""
        return self.model + contents_to_json(self.contents)

    @classmethod
    def from_bytes(cls, text: bytes) -> UploadHeader:
        """From bytes; ValueError where they are none of ours."""
        if len(text) < KEY_BYTES:
            raise ValueError(f"{len(text)} bytes do not tell what an upload is about")
        return cls(text[:KEY_BYTES], contents_from_json(text[KEY_BYTES:]))

    @property
    def common(self) -> bytes:
        """A fingerprint of what has to be the same at all: the model, names and shapes."""
        return fingerprint("about", self.model, json.dumps(shapes_of(self.contents)))


def sign_message(context: MessageContext, party: str, signing: bytes, body: Any, header: bytes = b"") -> Message:
    """A body with its signature, and what is said about it; numbers go as they are, bytes as bytes."""
    signature = sign(signing, context.digest_to_sign(party, header, _bytes(body)))
    arrays = {"body": as_array(body), "signature": as_array(signature)}
    return Message({**arrays, "about": as_array(header)} if header else arrays, NO_WEIGHT)


def verify_message(context: MessageContext, party: str, verifying: bytes, message: Message) -> bytes:
    """The body, if this party has signed it for this scene."""
    parts = {"body", "signature", "about"} if context.phase == UPLOAD else {"body", "signature"}
    if set(message.arrays) != parts or message.weight != NO_WEIGHT:
        raise context.party_error(party, f"its message has {sorted(message.arrays)}, not {sorted(parts)}.")
    body, header = _bytes(message["body"]), header_bytes(message)
    if not is_valid_signature(verifying, _bytes(message["signature"]), context.digest_to_sign(party, header, body)):
        raise context.party_error(
            party,
            "the signature is not that of this party for this phase and sum: forged, changed on the way, repeated "
            "from another one, or made with other settings (bounds, majority, who takes part). Nothing of it was used.",
        )
    return body


def header_bytes(message: Message) -> bytes:
    """What is said about a body; b"" where nothing is."""
    return _bytes(message["about"]) if "about" in message.arrays else b""


def relay(messages: Mapping[str, Message]) -> Message:
    """Everybody's bodies and signatures in one message, by name."""
    return Message(
        {name: as_array(_bytes(m["body"]) + _bytes(m["signature"])) for name, m in messages.items()}, NO_WEIGHT
    )


def split_relayed(present: Message) -> dict[str, Message]:
    """What was relayed, in name order."""
    return {name: _split(_bytes(present[name])) for name in sorted(present.arrays)}


def as_array(body: Any) -> Any:
    """Bytes as an array that can be sent."""
    return np.frombuffer(body, np.uint8) if isinstance(body, bytes) else body


def names_as_array(names: Iterable[str]) -> Any:
    """A list of names, as an array that can be sent."""
    return as_array(json.dumps(list(names)).encode())


def parse_names(array: Any) -> tuple[str, ...]:
    """The names again; ValueError where they are none."""
    try:
        names = json.loads(_bytes(array))
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError("not a list of names")
    return tuple(names)


def chunks(body: bytes, size: int) -> list[bytes]:
    """Pieces of one size; ValueError where they do not come out even."""
    if len(body) % size:
        raise ValueError(f"{len(body)} bytes are not pieces of {size}")
    return [body[place : place + size] for place in range(0, len(body), size)]


def share_bytes(share: int) -> bytes:
    """A share as it is sent."""
    return share.to_bytes(SHARE_BYTES, "big")


def parse_share(text: bytes) -> int:
    """A share again; ValueError where it is none."""
    share = int.from_bytes(text, "big")
    if len(text) != SHARE_BYTES or share >= PRIME:
        raise ValueError("not a share")
    return share


def _split(text: bytes) -> Message:
    cut = max(0, len(text) - SIGNATURE_BYTES)
    return Message({"body": as_array(text[:cut]), "signature": as_array(text[cut:])}, NO_WEIGHT)


def _bytes(array: Any) -> bytes:
    return array if isinstance(array, bytes) else np.ascontiguousarray(array).tobytes()


@state("secure.parameters")
@dataclass(frozen=True, slots=True)
class ProtocolParams:
    """A set-up, or one sum of it: its round, who was asked, t of them give a secret back, at least so many are in it,
    and the settings; `batch`: for how many sums, of this round and those after it, keys and shares are made.
    """

    index: int
    participants: tuple[str, ...]
    threshold: int
    fewest: int
    settings: bytes
    batch: int

    def required_parties(self, phase: int) -> int:
        """So many have to be heard: until it is fixed whose sum this is, enough to hide each of them; later t."""
        return max(self.threshold, self.fewest) if phase <= UPLOAD else self.threshold

    def message_context(self, phase: int, transcript: bytes = b"") -> MessageContext:
        """A phase; from the second on bound to everybody's fresh keys, and so to this one set-up."""
        bound_to = transcript or fingerprint("before keys", self.settings, self.batch, *self.participants)
        return MessageContext(phase, self.index, bound_to)

    def require_enough(self, phase: int, present: Collection[str], expected: Collection[str]) -> None:
        """Stop before anything is revealed."""
        if len(present) < self.required_parties(phase):
            missing = ", ".join(repr(name) for name in sorted(set(expected) - set(present))[:5])
            raise TooFewParties(
                f"The masked sum of round {self.index} ends in phase {phase} ({PHASES[phase]}): {len(present)} of "
                f"{len(self.participants)} parties were heard, and {self.required_parties(phase)} are needed to remove "
                f"the masks of a sum that hides each of them; missing: {missing or 'nobody else was asked'}. "
                "No upload was revealed. Repeat the round once they are back."
            )


@state("secure.admitted")
@dataclass(frozen=True, slots=True)
class AdmittedParties:
    """Those whose keys were heard, in name order, and a fingerprint of all that they have sent."""

    adverts: Mapping[str, AdvertisedKeys]
    transcript: bytes

    @property
    def roster(self) -> Roster:
        """The keys by which they are known."""
        return {name: advert.verifying for name, advert in self.adverts.items()}

    @property
    def numbers(self) -> dict[str, int]:
        """From 1: at which point of a polynomial a party's share is."""
        return {name: number for number, name in enumerate(self.adverts, 1)}


@state("secure.setup-group")
@dataclass(frozen=True, slots=True)
class SetupGroup:
    """The parties of a set-up: its terms, whose keys were heard, and who of them has dealt shares to the others."""

    params: ProtocolParams
    admitted: AdmittedParties
    dealers: tuple[str, ...]

    @property
    def rounds(self) -> range:
        """Whose sums it is for."""
        return range(self.params.index, self.params.index + self.params.batch)

    def sum_context(self, index: int, participants: Sequence[str]) -> SumContext:
        """One of its sums, over these parties."""
        params = self.params
        names = tuple(sorted(participants))
        return SumContext(
            self, ProtocolParams(index, names, params.threshold, params.fewest, params.settings, params.batch)
        )


@state("secure.sum")
@dataclass(frozen=True, slots=True)
class SumContext:
    """One sum of a circle; signatures of its phases are bound to who is in the circle, and who takes part."""

    group: SetupGroup
    params: ProtocolParams

    @property
    def slot(self) -> int:
        """Which keys of its batch are for it."""
        return self.params.index - self.group.params.index

    @property
    def transcript(self) -> bytes:
        """A fingerprint of the set-up, of who has dealt in it, of the round, and of who takes part."""
        group, params = self.group, self.params
        count, setup = len(group.dealers), group.admitted.transcript
        return fingerprint("sum", setup, params.index, count, *group.dealers, *params.participants)

    def message_context(self, phase: int) -> MessageContext:
        """A phase of this sum."""
        return self.params.message_context(phase, self.transcript)

    def mask_key(self, party: str) -> bytes:
        """A party's public key for the masks of this sum."""
        return _key_at(self.group.admitted.adverts[party].mask_keys, self.slot)

    def seed(self, party: str) -> bytes:
        """A party's commitment to the seed of its own mask in this sum."""
        return _key_at(self.group.admitted.adverts[party].seeds, self.slot)


def mask_transcript(sum_context: SumContext, common: bytes) -> bytes:
    """What the masks of a sum are drawn for: with another model, or arrays of another form, they do not cancel."""
    return fingerprint("masks", sum_context.transcript, common)


def survivors_transcript(masks: bytes, survivors: Sequence[str]) -> bytes:
    """What an answer to a list of survivors is for."""
    return fingerprint("survivors", masks, *survivors)


def admit(params: ProtocolParams, known: Roster, messages: Mapping[str, Message], is_pinned: bool) -> AdmittedParties:
    """Check everybody's keys; a party that is not known yet is known by its first message, unless all are pinned."""
    context, adverts, bodies = params.message_context(KEYS), {}, []
    for name in sorted(messages):
        if name not in params.participants:
            raise context.party_error(name, "it was not asked to take part in this sum.")
        advert = _read(context, name, messages[name], params.batch)
        expected = known.get(name, b"" if is_pinned else advert.verifying)
        if advert.verifying != expected:
            raise context.party_error(
                name,
                "its signing key is not the one that it is known by; either this is another party, or its secret "
                "was changed. Agree on a new roster outside this protocol.",
            )
        bodies.append(verify_message(context, name, expected, messages[name]))
        adverts[name] = advert
    params.require_enough(KEYS, adverts, params.participants)
    _check_keys(context, adverts)
    transcript = fingerprint(
        context.bound_to, params.index, *(part for pair in zip(adverts, bodies, strict=True) for part in pair)
    )
    return AdmittedParties(adverts, transcript)


def _key_at(keys: bytes, slot: int) -> bytes:
    return keys[KEY_BYTES * slot : KEY_BYTES * (slot + 1)]


def _read(context: MessageContext, name: str, message: Message, batch: int) -> AdvertisedKeys:
    try:
        return AdvertisedKeys.from_bytes(message["body"].tobytes(), batch)
    except (KeyError, ValueError) as error:
        raise context.party_error(name, f"its keys cannot be read ({error}).") from error


def _check_keys(context: MessageContext, adverts: Mapping[str, AdvertisedKeys]) -> None:
    """No key twice: neither of two parties, nor in two sums."""
    owners: dict[bytes, str] = {}
    for name, advert in adverts.items():
        for key in (advert.share_key, *chunks(advert.mask_keys, KEY_BYTES)):
            if key in owners:
                raise context.party_error(name, f"it has sent a key that {owners[key]!r} has sent as well.")
            owners[key] = name
