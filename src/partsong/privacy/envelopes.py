"""What is sent in a masked sum: a body, signed by its party for one phase of one sum, so that it serves nowhere else.

phase 0, keys           verifying key | share key | for each sum of the batch a mask key, then commitments to the seeds
phase 1, shares         for each sum and holder two commitments; for each other holder all shares, sealed
phase 2, masked upload  numbers modulo 2⁶⁴; beside them the model's fingerprint and the contents
phase 3, unmasking      the shares for one list of survivors, to be read when enough have answered it (`answers`)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong.core import Message
from partsong.errors import PartyError
from partsong.privacy.contents import Contents, form_of, told, understood
from partsong.privacy.key_agreement import KEY_BYTES, SIGNATURE_BYTES, fingerprint, is_signed, sign
from partsong.privacy.shamir import PRIME, SHARE_BYTES

KEYS, SHARES, UPLOAD, UNMASKING = range(4)
PHASES = ("keys", "shares", "masked upload", "unmasking")

NO_WEIGHT = 0.0
"""The weight of every message: the real one is in the masked vector."""


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

    def statement(self, party: str, about: bytes, body: bytes) -> bytes:
        """What is signed."""
        return fingerprint("partsong masked sum", self.phase, self.index, self.bound_to, party, about, body)


@dataclass(frozen=True, slots=True)
class Advert:
    """A party's keys for all sums of a batch: mask keys, and commitments to the seeds of its own masks, end to end."""

    verifying: bytes
    share_key: bytes
    mask_keys: bytes
    seeds: bytes

    def written(self) -> bytes:
        """As a body."""
        return self.verifying + self.share_key + self.mask_keys + self.seeds

    @classmethod
    def read(cls, body: bytes, batch: int) -> Advert:
        """From a body; ValueError where it is none for so many sums."""
        if len(body) != (2 + 2 * batch) * KEY_BYTES:
            raise ValueError(f"{len(body)} bytes are not the keys of {batch} sums")
        verifying, share_key, *others = chunks(body, KEY_BYTES)
        return cls(verifying, share_key, b"".join(others[:batch]), b"".join(others[batch:]))


@dataclass(frozen=True, slots=True)
class About:
    """What goes with an upload in the open: the fingerprint of the model that a party was sent, and its contents."""

    model: bytes
    contents: Contents

    def written(self) -> bytes:
        """As bytes."""
        return self.model + told(self.contents)

    @classmethod
    def read(cls, text: bytes) -> About:
        """From bytes; ValueError where they are none of ours."""
        if len(text) < KEY_BYTES:
            raise ValueError(f"{len(text)} bytes do not tell what an upload is about")
        return cls(text[:KEY_BYTES], understood(text[KEY_BYTES:]))

    @property
    def common(self) -> bytes:
        """A fingerprint of what has to be the same at all: the model, names and shapes."""
        return fingerprint("about", self.model, json.dumps(form_of(self.contents)))


def enclosed(scene: Scene, party: str, signing: bytes, body: Any, about: bytes = b"") -> Message:
    """A body with its signature, and what is said about it; numbers go as they are, bytes as bytes."""
    signature = sign(signing, scene.statement(party, about, _bytes(body)))
    arrays = {"body": as_array(body), "signature": as_array(signature)}
    return Message({**arrays, "about": as_array(about)} if about else arrays, NO_WEIGHT)


def opened(scene: Scene, party: str, verifying: bytes, message: Message) -> bytes:
    """The body, if this party has signed it for this scene."""
    parts = {"body", "signature", "about"} if scene.phase == UPLOAD else {"body", "signature"}
    if set(message.arrays) != parts or message.weight != NO_WEIGHT:
        raise scene.trouble(party, f"its message has {sorted(message.arrays)}, not {sorted(parts)}.")
    body, about = _bytes(message["body"]), about_in(message)
    if not is_signed(verifying, _bytes(message["signature"]), scene.statement(party, about, body)):
        raise scene.trouble(
            party,
            "the signature is not that of this party for this phase and sum: forged, changed on the way, repeated "
            "from another one, or made with other settings (bounds, majority, who takes part). Nothing of it was used.",
        )
    return body


def about_in(message: Message) -> bytes:
    """What is said about a body; b"" where nothing is."""
    return _bytes(message["about"]) if "about" in message.arrays else b""


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


def _split(text: bytes) -> Message:
    cut = max(0, len(text) - SIGNATURE_BYTES)
    return Message({"body": as_array(text[:cut]), "signature": as_array(text[cut:])}, NO_WEIGHT)


def _bytes(array: Any) -> bytes:
    return array if isinstance(array, bytes) else np.ascontiguousarray(array).tobytes()
