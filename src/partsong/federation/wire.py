"""What is asked of a site and what it answers, as bytes: safetensors with one JSON document, and no pickles.

    "document": {format, head, body: {weight, arrays: [[name, order], …]}}        "0", "1", …: the arrays in that order

Whatever is not exactly that is a FormatError; nothing is allocated beyond the bytes that were given.
"""

from __future__ import annotations

import enum
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from partsong.core import Message
from partsong.errors import FormatError

MOST_BYTES = 1 << 31
"""A longer message is refused before it is looked at."""
MOST_HEADER_BYTES = 1 << 22
MOST_NUMBER = 1 << 53
RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""What the name of a run looks like; it is also the name of a folder."""
CODE = re.compile(r"[a-z][a-z-]{0,39}")
"""What codes, and names of counts beside them, look like: they are told to people at the server."""
MOST_COUNTS = 8
NUMBERS = frozenset("?bhilqBHILQefd")

Text = TypeVar("Text")


class Kind(enum.StrEnum):
    """What a site is asked for."""

    HELLO = "hello"
    START = "start"
    NAMES = "names"
    WORK = "work"
    REDUCE = "reduce"
    FINISH = "finish"


@dataclass(frozen=True, slots=True)
class Nonce:
    """Which message this is: of work, and of phases of a sum, a site sends one payload under one of these."""

    run: str
    round: int = 0
    attempt: int = 0
    kind: Kind = Kind.HELLO
    phase: int = 0

    def __post_init__(self) -> None:
        counts = (self.round, self.attempt, self.phase)
        if not RUN.fullmatch(self.run) or not all(type(n) is int and 0 <= n < MOST_NUMBER for n in counts):
            raise FormatError(
                f"A message is known by the name of its run (letters, digits, dots and dashes, at most 64) and whole "
                f"numbers; got {str(self.run)[:64]!r}, {counts}."
            )

    def told(self) -> dict[str, Any]:
        """Plain values."""
        numbers = {"round": self.round, "attempt": self.attempt, "phase": self.phase}
        return {"run": self.run, "kind": str(self.kind), **numbers}


@dataclass(frozen=True, slots=True)
class Request:
    """To one party: the model (work) or what the server has answered in the phase before (reduce), and plain values.

    `seen` is the largest serial number that the server has had from this party.
    """

    party: str
    nonce: Nonce
    body: Message = Message({})
    note: Mapping[str, Any] = field(default_factory=dict)
    seen: int = 0

    def written(self) -> bytes:
        """As bytes."""
        head = {"party": self.party, "seen": self.seen, "note": dict(self.note), **self.nonce.told()}
        return _packed("partsong-request", head, self.body)

    @staticmethod
    def read(data: bytes, most: int = MOST_BYTES) -> Request:
        """From bytes."""
        head, body = _unpacked("partsong-request", data, most, {"party", "seen", "note", *_NONCE})
        _require(type(head["seen"]) is int and 0 <= head["seen"] < MOST_NUMBER, "seen is no whole number")
        _require(isinstance(head["note"], dict), "its note is none")
        return Request(_name(head["party"]), _nonce(head), body, head["note"], head["seen"])

    @property
    def digest(self) -> str:
        """SHA-256 of all but `seen`: two requests under one nonce are the same request if this is the same."""
        return _digest([self.party, self.nonce.told(), dict(self.note)], self.body)

    @property
    def about(self) -> str:
        """SHA-256 of the model and the history that work begins from: the same in all attempts of a round."""
        return _digest([self.note.get("counted")], self.body)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a site does not answer: a code, and at most some counts; the reason itself stays in the site's log."""

    code: str
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """From one party, to one request; `serial` counts the releases in its ledger, over all runs."""

    party: str
    nonce: Nonce
    answer: Message | Refusal
    serial: int = 0
    note: Mapping[str, Any] = field(default_factory=dict)

    def written(self) -> bytes:
        """As bytes."""
        refusal = self.answer if isinstance(self.answer, Refusal) else Refusal("")
        head = {"party": self.party, "serial": self.serial, "note": dict(self.note), **self.nonce.told()}
        head |= {"code": refusal.code, "counts": dict(refusal.counts)}
        return _packed("partsong-reply", head, self.answer if isinstance(self.answer, Message) else Message({}))

    @staticmethod
    def read(data: bytes, most: int = MOST_BYTES) -> Reply:
        """From bytes."""
        keys = {"party", "serial", "note", "code", "counts", *_NONCE}
        head, body = _unpacked("partsong-reply", data, most, keys)
        code, counts, note = head["code"], head["counts"], head["note"]
        _require(type(head["serial"]) is int and 0 <= head["serial"] < MOST_NUMBER, "serial is no whole number")
        _require(isinstance(note, dict) and isinstance(counts, dict), "its note or counts are none")
        _require(all(type(n) is int and abs(n) < MOST_NUMBER for n in counts.values()), "its counts are none")
        _require(len(counts) <= MOST_COUNTS and all(map(CODE.fullmatch, counts)), "its counts have no names")
        _require(code == "" or (isinstance(code, str) and CODE.fullmatch(code) is not None), "its code is none")
        answer = Refusal(code, counts) if code else body
        return Reply(_name(head["party"]), _nonce(head), answer, head["serial"], note)


_NONCE = frozenset({"run", "round", "attempt", "kind", "phase"})


def _digest(head: list[Any], body: Message) -> str:
    arrays = sorted(body.arrays.items())
    forms = [[name, array.dtype.str, array.shape, array.flags.c_contiguous] for name, array in arrays]
    found = hashlib.sha256(json.dumps([*head, float(body.weight), forms], sort_keys=True).encode())
    for _, array in arrays:
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def _packed(format_: str, head: Mapping[str, Any], body: Message) -> bytes:
    from safetensors.numpy import save

    listed, tensors = [], {}
    for number, (name, array) in enumerate(sorted(body.arrays.items())):
        values = array if isinstance(array, np.ndarray) else _as_numpy(name, array)
        if values.dtype.char not in NUMBERS or not values.dtype.isnative:
            raise FormatError(f"Array {name!r} is {values.dtype}, which cannot be sent. Use native numbers.")
        is_fortran = values.flags.f_contiguous and not values.flags.c_contiguous
        listed.append([name, "F" if is_fortran else "C"])
        tensors[str(number)] = np.asarray(values.T if is_fortran else values, order="C")
    document = {"format": format_, "head": head, "body": {"weight": float(body.weight), "arrays": listed}}
    text = json.dumps(document, sort_keys=True, allow_nan=False).encode()
    return save({**tensors, "document": np.frombuffer(text, np.uint8)})


def _as_numpy(name: str, array: Any) -> Any:
    try:
        return np.asarray(array.detach().cpu() if hasattr(array, "detach") else array)
    except Exception as error:
        raise FormatError(f"Array {name!r} is {type(array).__name__}, which cannot be sent.") from error


def _unpacked(format_: str, data: bytes, most: int, keys: set[str]) -> tuple[dict[str, Any], Message]:
    from safetensors.numpy import load

    if len(data) > most:
        raise FormatError(f"A message of {len(data)} bytes was refused unread: at most {most} are taken.")
    _require(len(data) >= 8 and int.from_bytes(data[:8], "little") <= MOST_HEADER_BYTES, "it has no header")
    return _guarded(lambda: _parsed(load(bytes(data)), format_, keys))


def _parsed(tensors: dict[str, Any], format_: str, keys: set[str]) -> tuple[dict[str, Any], Message]:
    text = tensors.pop("document").tobytes()
    _require(len(text) <= MOST_HEADER_BYTES, "its document is too long")
    document = json.loads(text, parse_constant=_refuse)
    _require(set(document) == {"format", "head", "body"} and document["format"] == format_, f"not a {format_}")
    head, body = document["head"], document["body"]
    _require(isinstance(head, dict) and set(head) == keys, "its head has other fields")
    _require(set(body) == {"weight", "arrays"} and type(body["weight"]) is float, "its body has other fields")
    listed = [(str(name), order) for name, order in body["arrays"]]
    _require(set(tensors) == {str(number) for number in range(len(listed))}, "its arrays are not those it lists")
    _require(len({name for name, _ in listed}) == len(listed), "it lists an array twice")
    _require(all(order in ("C", "F") for _, order in listed), "an array has no memory order")
    _require(all(array.dtype.char in NUMBERS for array in tensors.values()), "an array holds no numbers")
    arrays = {name: _turned(tensors[str(number)], order) for number, (name, order) in enumerate(listed)}
    return head, Message(arrays, body["weight"])


def _turned(array: Any, order: str) -> Any:
    return array.T if order == "F" else array


def _nonce(head: Mapping[str, Any]) -> Nonce:
    _require(isinstance(head["run"], str), "its run is no name")
    kind = _guarded(lambda: Kind(head["kind"]))
    return Nonce(head["run"], head["round"], head["attempt"], kind, head["phase"])


def _name(name: Any) -> str:
    _require(isinstance(name, str) and 0 < len(name) <= 200, "its party is no name")
    return str(name)


def _require(is_so: bool, what: str) -> None:
    if not is_so:
        raise FormatError(f"A message cannot be read: {what}. It is damaged, or from another version; ask for it anew.")


def _guarded(parse: Callable[[], Text]) -> Text:
    """Parsers of binary formats fail in every way there is on hostile bytes, so this catches all exceptions."""
    try:
        return parse()
    except FormatError:
        raise
    except Exception as error:
        raise FormatError(
            f"A message cannot be read ({type(error).__name__}). It is damaged, or from another version; ask for it "
            "anew."
        ) from error


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")
