"""What is sent in a masked sum: a body, signed by its party for one phase of one sum, so that it serves nowhere else.

phase 0, keys              verifying key | two public keys | commitment to the seed | model's fingerprint | contents
phase 1, shares            for each holder two commitments; for each other holder the two shares, sealed
phase 2, masked upload     numbers modulo 2⁶⁴
phase 3, list of survivors its fingerprint
phase 4, unmasking         for each party of the sum one share: of the seed if it survived, else of the mask key
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong.core import Message
from partsong.errors import PartyError
from partsong.privacy.contents import Contents, told, understood
from partsong.privacy.key_agreement import KEY_BYTES, SEAL_BYTES, SIGNATURE_BYTES, fingerprint, is_signed, sign
from partsong.privacy.shamir import PRIME, SHARE_BYTES

KEYS, SHARES, UPLOAD, SURVIVORS, UNMASKING = range(5)
PHASES = ("keys", "shares", "masked upload", "list of survivors", "unmasking")

NO_WEIGHT = 0.0
"""The weight of every message: the real one is in the masked vector."""

SEALED_BYTES = 2 * SHARE_BYTES + SEAL_BYTES


@dataclass(frozen=True, slots=True)
class Scene:
    """Where something happens: a phase of a sum; `bound_to` is what signatures are for beside it."""

    phase: int
    index: int
    bound_to: bytes

    def trouble(self, party: str, what: str) -> PartyError:
        """The error of a party in this phase."""
        kind = PHASES[self.phase] if self.phase in range(len(PHASES)) else "which there is not"
        where = f"phase {self.phase} ({kind}) of the masked sum of round {self.index}"
        return PartyError(f"Party {party!r}, {where}: {what}")

    def statement(self, party: str, body: bytes) -> bytes:
        """What is signed."""
        return fingerprint("partsong masked sum", self.phase, self.index, self.bound_to, party, body)


@dataclass(frozen=True, slots=True)
class Advert:
    """A party's keys for one sum, what it knows to be the model, and what it is about to add."""

    verifying: bytes
    share_key: bytes
    mask_key: bytes
    seed: bytes
    model: bytes
    contents: Contents

    def written(self) -> bytes:
        """As a body."""
        return b"".join((self.verifying, self.share_key, self.mask_key, self.seed, self.model)) + told(self.contents)

    @classmethod
    def read(cls, body: bytes) -> Advert:
        """From a body; ValueError where it is none."""
        verifying, share_key, mask_key, seed, model = chunks(body[: 5 * KEY_BYTES], KEY_BYTES)
        return cls(verifying, share_key, mask_key, seed, model, understood(body[5 * KEY_BYTES :]))


def enclosed(scene: Scene, party: str, signing: bytes, body: Any) -> Message:
    """A body with its signature; numbers go as they are, bytes as bytes."""
    signature = np.frombuffer(sign(signing, scene.statement(party, _bytes(body))), np.uint8)
    return Message({"body": as_array(body), "signature": signature}, NO_WEIGHT)


def opened(scene: Scene, party: str, verifying: bytes, message: Message) -> bytes:
    """The body, if this party has signed it for this scene."""
    if set(message.arrays) != {"body", "signature"} or message.weight != NO_WEIGHT:
        raise scene.trouble(party, f"its message has {sorted(message.arrays)}, not a body and a signature.")
    body = _bytes(message["body"])
    if not is_signed(verifying, _bytes(message["signature"]), scene.statement(party, body)):
        raise scene.trouble(
            party,
            "the signature is not that of this party for this phase and sum: forged, changed on the way, repeated "
            "from another one, or made with other settings (bounds, majority, who takes part). Nothing of it was used.",
        )
    return body


def relayed(messages: Mapping[str, Message]) -> Message:
    """Everybody's bodies and signatures in one message, by name."""
    return Message(
        {name: as_array(_bytes(m["body"]) + _bytes(m["signature"])) for name, m in messages.items()}, NO_WEIGHT
    )


def delivered(heard: Message) -> dict[str, Message]:
    """What was relayed, in name order."""
    return {name: _split(_bytes(heard[name])) for name in sorted(heard.arrays)}


def as_array(body: Any) -> Any:
    """Bytes as an array that can be sent."""
    return np.frombuffer(body, np.uint8) if isinstance(body, bytes) else body


def names_as_array(names: Iterable[str]) -> Any:
    """A list of names, as an array that can be sent."""
    return as_array(json.dumps(list(names)).encode())


def names_of(array: Any) -> tuple[str, ...]:
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


def share_of(text: bytes) -> int:
    """A share again; ValueError where it is none."""
    share = int.from_bytes(text, "big")
    if len(text) != SHARE_BYTES or share >= PRIME:
        raise ValueError("not a share")
    return share


def list_fingerprint(entered: Sequence[str], survivors: Sequence[str]) -> bytes:
    """Of those whose shares were heard, and those of them whose masked uploads were."""
    return fingerprint("survivors", len(entered), *entered, *survivors)


def _split(text: bytes) -> Message:
    cut = max(0, len(text) - SIGNATURE_BYTES)
    return Message({"body": as_array(text[:cut]), "signature": as_array(text[cut:])}, NO_WEIGHT)


def _bytes(array: Any) -> bytes:
    return array if isinstance(array, bytes) else np.ascontiguousarray(array).tobytes()
