"""Messages and parameters of masked sums, and the checks that every party and the server make alike.

A set-up serves a batch of sums: those of its own round and the rounds after it. Each sum is over all parties of the
set-up or some of them. Every message has a body, signed by its party for one phase of one sum, so it is not valid
anywhere else:

    phase 0, keys           verifying key | share key | for each sum of the batch a mask key, then commitments to the
                            seeds
    phase 1, shares         for each sum and holder two commitments; for each other holder all shares, sealed
    phase 2, masked upload  numbers modulo 2⁶⁴; beside them the model's fingerprint and the contents
    phase 3, unmasking      the shares for one list of survivors, readable once enough parties have answered that list
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
"""Libraries and devices that a sum can be returned on."""

KINDS = {"bfloat16", *(f"float{width}" for width in (16, 32, 64))}
KINDS |= {f"{sign}int{width}" for sign in ("", "u") for width in (8, 16, 32, 64)}
"""Number types that a sum can be returned in."""

KEYS, SHARES, UPLOAD, UNMASKING = range(4)
PHASES = ("keys", "shares", "masked upload", "unmasking")
NO_WEIGHT = 0.0
"""The weight of every message; the real weight is in the masked vector."""
Roster = Mapping[str, bytes]
"""The verifying key of each party."""


@state("secure.array")
@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """Metadata of an array in a message: `kind` is its number type, `library` is "numpy", or "torch" and the device."""

    name: str
    shape: tuple[int, ...]
    kind: str
    library: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.library not in LIBRARIES or any(size < 0 for size in self.shape):
            raise UploadError(
                f"The array {self.name!r} holds {self.kind} ({self.library}). Only real numbers can be masked."
            )

    @property
    def count(self) -> int:
        """The number of entries."""
        return math.prod(self.shape)


Contents = tuple[ArrayInfo, ...]


def describe_contents(message: Message) -> Contents:
    """Return the metadata of a message's arrays, by name."""
    return tuple(
        ArrayInfo(name, tuple(map(int, array.shape)), _kind(array), library_of(array))
        for name, array in sorted(message.arrays.items())
    )


def contents_to_json(contents: Contents) -> bytes:
    """Serialize to JSON."""
    return json.dumps([[info.name, info.shape, info.kind, info.library] for info in contents]).encode()


def contents_from_json(text: bytes) -> Contents:
    """Parse JSON; raise ValueError if it does not describe arrays."""
    try:
        entries = [
            (str(name), tuple(map(int, shape)), str(kind), str(place)) for name, shape, kind, place in json.loads(text)
        ]
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return tuple(ArrayInfo(*entry) for entry in entries)


def shapes_of(contents: Contents) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return names and shapes."""
    return tuple((info.name, info.shape) for info in contents)


def have_same_shapes(one: Contents, other: Contents) -> bool:
    """Whether names and shapes agree, so that the arrays can be added; number types may differ."""
    return shapes_of(one) == shapes_of(other)


def vector_length(contents: Contents) -> int:
    """Return the length of the encoded vector: all entries, and the weight."""
    return sum(info.count for info in contents) + 1


def _kind(array: Array) -> str:
    """Return the name of the number type, without its byte order."""
    return str(getattr(array.dtype, "name", type_name(array.dtype)))


def library_of(array: Array) -> str:
    """Return "numpy", or "torch" and the device type."""
    if type(array).__module__.partition(".")[0] != "torch":
        return "numpy"
    return f"torch {array.device.type}"


@dataclass(frozen=True, slots=True)
class MessageContext:
    """The phase and sum that a message belongs to; signatures are also bound to `bound_to`."""

    phase: int
    index: int
    bound_to: bytes

    def party_error(self, party: str, what: str) -> PartyError:
        """Return the error of a party in this phase."""
        kind = PHASES[self.phase] if self.phase in range(len(PHASES)) else "unknown"
        where = f"phase {self.phase} ({kind}) of the masked sum of round {self.index}"
        return PartyError(f"Party {party!r}, {where}: {what}")

    def digest_to_sign(self, party: str, header: bytes, body: bytes) -> bytes:
        """Return the digest that is signed."""
        return fingerprint("partsong masked sum", self.phase, self.index, self.bound_to, party, header, body)


@state("secure.advert")
@dataclass(frozen=True, slots=True)
class AdvertisedKeys:
    """A party's keys for all sums of a batch: mask keys and commitments to its own masks' seeds, concatenated."""

    verifying: bytes
    share_key: bytes
    mask_keys: bytes
    seeds: bytes

    def to_bytes(self) -> bytes:
        """Serialize as a message body."""
        return self.verifying + self.share_key + self.mask_keys + self.seeds

    @classmethod
    def from_bytes(cls, body: bytes, batch: int) -> AdvertisedKeys:
        """Parse a body; raise ValueError if its size is not that of this many sums."""
        if len(body) != (2 + 2 * batch) * KEY_BYTES:
            raise ValueError(f"{len(body)} bytes are not the keys of {batch} sums")
        verifying, share_key, *others = chunks(body, KEY_BYTES)
        return cls(verifying, share_key, b"".join(others[:batch]), b"".join(others[batch:]))


@state("secure.context")
@dataclass(frozen=True, slots=True)
class UploadHeader:
    """What is sent unmasked with an upload: the fingerprint of the model that the party received, and the contents."""

    model: bytes
    contents: Contents

    def to_bytes(self) -> bytes:
        """Serialize."""
        return self.model + contents_to_json(self.contents)

    @classmethod
    def from_bytes(cls, text: bytes) -> UploadHeader:
        """Parse; raise ValueError if the bytes are not a header."""
        if len(text) < KEY_BYTES:
            raise ValueError(f"{len(text)} bytes are not the header of an upload")
        return cls(text[:KEY_BYTES], contents_from_json(text[KEY_BYTES:]))

    @property
    def common(self) -> bytes:
        """A fingerprint of what must be the same at all parties: the model, names and shapes."""
        return fingerprint("about", self.model, json.dumps(shapes_of(self.contents)))


def sign_message(context: MessageContext, party: str, signing: bytes, body: Any, header: bytes = b"") -> Message:
    """Return a message with the body, its signature and, if given, its header. Numeric bodies stay arrays."""
    signature = sign(signing, context.digest_to_sign(party, header, _bytes(body)))
    arrays = {"body": as_array(body), "signature": as_array(signature)}
    return Message({**arrays, "about": as_array(header)} if header else arrays, NO_WEIGHT)


def verify_message(context: MessageContext, party: str, verifying: bytes, message: Message) -> bytes:
    """Return the body if this party signed it for this phase and sum; else raise PartyError."""
    parts = {"body", "signature", "about"} if context.phase == UPLOAD else {"body", "signature"}
    if set(message.arrays) != parts or message.weight != NO_WEIGHT:
        raise context.party_error(party, f"its message has {sorted(message.arrays)}, not {sorted(parts)}.")
    body, header = _bytes(message["body"]), header_bytes(message)
    if not is_valid_signature(verifying, _bytes(message["signature"]), context.digest_to_sign(party, header, body)):
        raise context.party_error(
            party,
            "the signature is not that of this party for this phase and sum. It is forged, changed in transit, "
            "repeated from another message, or made with other settings (bounds, majority, who takes part). Nothing of "
            "it was used.",
        )
    return body


def header_bytes(message: Message) -> bytes:
    """Return the header of a message as bytes; b"" if it has none."""
    return _bytes(message["about"]) if "about" in message.arrays else b""


def relay(messages: Mapping[str, Message]) -> Message:
    """Return the bodies and signatures of all parties in one message, by name."""
    return Message(
        {name: as_array(_bytes(m["body"]) + _bytes(m["signature"])) for name, m in messages.items()}, NO_WEIGHT
    )


def split_relayed(present: Message) -> dict[str, Message]:
    """Split a relayed message into the parties' messages, in name order."""
    return {name: _split(_bytes(present[name])) for name in sorted(present.arrays)}


def as_array(body: Any) -> Any:
    """Return bytes as an array."""
    return np.frombuffer(body, np.uint8) if isinstance(body, bytes) else body


def names_as_array(names: Iterable[str]) -> Any:
    """Return a list of names as an array."""
    return as_array(json.dumps(list(names)).encode())


def parse_names(array: Any) -> tuple[str, ...]:
    """Parse a list of names; raise ValueError if it is not one."""
    try:
        names = json.loads(_bytes(array))
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError("not a list of names")
    return tuple(names)


def chunks(body: bytes, size: int) -> list[bytes]:
    """Split into pieces of one size; raise ValueError if the length is not a multiple."""
    if len(body) % size:
        raise ValueError(f"{len(body)} bytes are not a multiple of {size}")
    return [body[place : place + size] for place in range(0, len(body), size)]


def share_bytes(share: int) -> bytes:
    """Serialize a share."""
    return share.to_bytes(SHARE_BYTES, "big")


def parse_share(text: bytes) -> int:
    """Parse a share; raise ValueError if it is not one."""
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
    """Parameters of a set-up, or of one sum of it.

    `index`: the round. `participants`: the parties that are asked. `threshold`: t parties reconstruct a secret.
    `fewest`: the minimum of parties in a sum. `settings`: a hash of all other settings. `batch`: the number of sums, of
    this round and those after it, that keys and shares are made for.
    """

    index: int
    participants: tuple[str, ...]
    threshold: int
    fewest: int
    settings: bytes
    batch: int

    def required_parties(self, phase: int) -> int:
        """Return how many answers a phase needs: enough to hide each upload until the sum is fixed, then t."""
        return max(self.threshold, self.fewest) if phase <= UPLOAD else self.threshold

    def message_context(self, phase: int, transcript: bytes = b"") -> MessageContext:
        """Return the context of a phase; from phase 1 on it is bound to all fresh keys, and so to this set-up."""
        bound_to = transcript or fingerprint("before keys", self.settings, self.batch, *self.participants)
        return MessageContext(phase, self.index, bound_to)

    def require_enough(self, phase: int, present: Collection[str], expected: Collection[str]) -> None:
        """Raise TooFewParties before anything is revealed, if too few parties answered."""
        if len(present) < self.required_parties(phase):
            missing = ", ".join(repr(name) for name in sorted(set(expected) - set(present))[:5])
            raise TooFewParties(
                f"The masked sum of round {self.index} ends in phase {phase} ({PHASES[phase]}): {len(present)} of "
                f"{len(self.participants)} parties answered, and {self.required_parties(phase)} are needed to remove "
                f"the masks of a sum that hides each of them; missing: {missing or 'nobody else was asked'}. "
                "No upload was revealed. Repeat the round once they are back."
            )


@state("secure.admitted")
@dataclass(frozen=True, slots=True)
class AdmittedParties:
    """The parties whose keys arrived, in name order, and a fingerprint of everything they sent."""

    adverts: Mapping[str, AdvertisedKeys]
    transcript: bytes

    @property
    def roster(self) -> Roster:
        """Their verifying keys."""
        return {name: advert.verifying for name, advert in self.adverts.items()}

    @property
    def numbers(self) -> dict[str, int]:
        """The point of the polynomial that is each party's share, from 1."""
        return {name: number for number, name in enumerate(self.adverts, 1)}


@state("secure.setup-group")
@dataclass(frozen=True, slots=True)
class SetupGroup:
    """The parties of a set-up: its parameters, the parties whose keys arrived, and those that dealt shares."""

    params: ProtocolParams
    admitted: AdmittedParties
    dealers: tuple[str, ...]

    @property
    def rounds(self) -> range:
        """The rounds whose sums the set-up serves."""
        return range(self.params.index, self.params.index + self.params.batch)

    def sum_context(self, index: int, participants: Sequence[str]) -> SumContext:
        """Return one of its sums, over these parties."""
        params = self.params
        names = tuple(sorted(participants))
        return SumContext(
            self, ProtocolParams(index, names, params.threshold, params.fewest, params.settings, params.batch)
        )


@state("secure.sum")
@dataclass(frozen=True, slots=True)
class SumContext:
    """One sum of a set-up; signatures are bound to the parties of the set-up and to those of the sum."""

    group: SetupGroup
    params: ProtocolParams

    @property
    def slot(self) -> int:
        """Its position in the batch, which selects its keys."""
        return self.params.index - self.group.params.index

    @property
    def transcript(self) -> bytes:
        """A fingerprint of the set-up, its dealers, the round and the parties of the sum."""
        group, params = self.group, self.params
        count, setup = len(group.dealers), group.admitted.transcript
        return fingerprint("sum", setup, params.index, count, *group.dealers, *params.participants)

    def message_context(self, phase: int) -> MessageContext:
        """Return the context of a phase of this sum."""
        return self.params.message_context(phase, self.transcript)

    def mask_key(self, party: str) -> bytes:
        """Return a party's public key for the masks of this sum."""
        return _key_at(self.group.admitted.adverts[party].mask_keys, self.slot)

    def seed(self, party: str) -> bytes:
        """Return a party's commitment to the seed of its own mask in this sum."""
        return _key_at(self.group.admitted.adverts[party].seeds, self.slot)


def mask_transcript(sum_context: SumContext, common: bytes) -> bytes:
    """Return what the masks of a sum are derived from; with another model or other array shapes they do not cancel."""
    return fingerprint("masks", sum_context.transcript, common)


def survivors_transcript(masks: bytes, survivors: Sequence[str]) -> bytes:
    """Return what an answer to a list of survivors is bound to."""
    return fingerprint("survivors", masks, *survivors)


def admit(params: ProtocolParams, known: Roster, messages: Mapping[str, Message], is_pinned: bool) -> AdmittedParties:
    """Check the keys of all parties. Unless keys are pinned, an unknown party is trusted on first use."""
    context, adverts, bodies = params.message_context(KEYS), {}, []
    for name in sorted(messages):
        if name not in params.participants:
            raise context.party_error(name, "it was not asked to take part in this sum.")
        advert = _read(context, name, messages[name], params.batch)
        expected = known.get(name, b"" if is_pinned else advert.verifying)
        if advert.verifying != expected:
            raise context.party_error(
                name,
                "its signing key is not the one that it is known by. Either this is another party, or its secret was "
                "changed. Agree on a new roster out-of-band.",
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
    """Refuse a key that occurs twice, at two parties or in two sums."""
    owners: dict[bytes, str] = {}
    for name, advert in adverts.items():
        for key in (advert.share_key, *chunks(advert.mask_keys, KEY_BYTES)):
            if key in owners:
                raise context.party_error(name, f"it has sent a key that {owners[key]!r} has sent as well.")
            owners[key] = name
