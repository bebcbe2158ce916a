"""States of programs and reductions as files, exactly: what a site or a server needs to go on after it was killed.

Beside what checkpoints hold, states of a masked sum have keys (bytes) and mappings by pairs of names, and those of an
agreement on words many short pieces of bytes, which are joined. A source of randomness is not written: whoever reads
says which one is meant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from partsong.errors import DamagedState, PartsongError
from partsong.io import state_tree
from partsong.io.opening import parsing
from partsong.io.tensor_file import JSON, FileKind, read_tensors, write_tensors
from partsong.program_states import program_states

KIND = FileKind("partsong-federation", 1, is_private=True)


@dataclass(frozen=True, slots=True)
class Encoder(state_tree.Encoder):
    """Also bytes, mappings with tuples as keys, and objects that are `given` by name."""

    given: Mapping[str, Any] = field(default_factory=dict)

    def encode(self, value: Any, where: str) -> Any:
        """The node for a value."""
        for name, known in self.given.items():
            if value is known:
                return {"given": name}
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        if type(value) is tuple and value and all(type(item) is bytes for item in value):
            joined, lengths = np.frombuffer(b"".join(value), np.uint8), np.array([len(item) for item in value])
            return {"pieces": [self.encode(joined, where), self.encode(lengths, where)]}
        if type(value) is frozenset:
            return {"set": [self.encode(item, where) for item in sorted(value)]}
        if isinstance(value, Mapping) and any(type(key) is tuple for key in value):
            return {"pairs": [[self.encode(key, where), self.encode(item, where)] for key, item in value.items()]}
        return state_tree.Encoder.encode(self, value, where)


@dataclass(frozen=True, slots=True)
class Decoder(state_tree.Decoder):
    """The way back."""

    given: Mapping[str, Any] = field(default_factory=dict)

    def decode(self, node: Any, tensors: state_tree.Tensors) -> Any:
        """The value of a node."""
        tags = set(node) if isinstance(node, dict) else set()
        if tags == {"given"}:
            return self.given[node["given"]]
        if tags == {"bytes"}:
            return bytes.fromhex(node["bytes"])
        if tags == {"pieces"}:
            joined, lengths = (self.decode(item, tensors) for item in node["pieces"])
            ends, whole = np.cumsum(lengths).tolist(), joined.tobytes()
            return tuple(whole[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True))
        if tags == {"set"}:
            return frozenset(self.decode(item, tensors) for item in node["set"])
        if tags == {"pairs"}:
            return {self.decode(key, tensors): self.decode(item, tensors) for key, item in node["pairs"]}
        return state_tree.Decoder.decode(self, node, tensors)


def save_state(path: Path, state: Any, note: JSON = None, given: Mapping[str, Any] | None = None) -> None:
    """Write a state atomically, for its owner alone; `note` is plain values beside it."""
    encoder = Encoder(given=dict(given or {}))
    tree = encoder.encode(state, path.name)
    write_tensors(path, KIND, encoder.tensors, {"note": note, "tree": tree})


def load_state(path: Path, given: Mapping[str, Any] | None = None, types: Sequence[type] = ()) -> tuple[Any, JSON]:
    """Read a state and its note; only classes that are known here, and `types`, are ever made."""
    try:
        tensors, content = read_tensors(path, KIND)
        with parsing(path, "a state"):
            decoder = Decoder(state_tree.Decoder.knowing((*state_types(), *types)).known, dict(given or {}))
            return decoder.decode(content["tree"], tensors), content["note"]
    except PartsongError as error:
        raise DamagedState(f"{path}: {error}") from error


def state_types() -> tuple[type, ...]:
    """All that states of synchronous programs and of reductions are made of."""
    return (*program_states(), *_masked_types(), *_word_types())


@cache
def _masked_types() -> tuple[type, ...]:
    from partsong.privacy.admission import Admitted, Circle, Gathering, Terms
    from partsong.privacy.contents import Piece
    from partsong.privacy.dealing import Secrets
    from partsong.privacy.envelopes import About, Advert
    from partsong.privacy.key_agreement import KeyPair
    from partsong.privacy.masked_party import Dealer, Draft, Member, Place, Seat
    from partsong.privacy.masked_server import Desk, Register

    party = (Member, Place, Draft, Dealer, Seat, Secrets, KeyPair)
    return (*party, Desk, Register, Terms, Admitted, Circle, Gathering, Advert, About, Piece)


@cache
def _word_types() -> tuple[type, ...]:
    from partsong.text.agreed_words import AgreedWords
    from partsong.text.agreement_steps import Candidate, Count, Left, Step
    from partsong.text.tables import Tables

    return (Candidate, Left, AgreedWords, Tables, Count, Step)
