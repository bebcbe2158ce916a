"""Flower as a transport: requests are pushed to nodes, replies are pulled, whatever does not come in time is lost.

    message.content["arrays"]: "0", "1", …, pieces of the bytes        ["about"]: their number of bytes and SHA-256

Flower cuts an array into objects of 5 MB that travel once where they are equal, so that a model for all sites is sent
to the server's store once. Requests may be pushed more than once: a site answers the same request with the same bytes.
Names are bound to nodes by the keys under which the nodes were registered.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from partsong.engines.files import MOST_BYTES, Lost
from partsong.errors import FormatError, MissingExtra, ParameterError

QUESTION = "query.partsong"
PIECE_BYTES = 1 << 26
UNUSABLE = {1: "its app could not be loaded", 2: "its app failed", 7: "it refused the app"}
"""Flower's error codes that do not go away by waiting, and what they mean."""
TRIES = 3


@dataclass(slots=True)
class Asking:
    """One site while it is asked: messages that were pushed, when, to which life of its node, and how it goes."""

    request: bytes = field(repr=False)
    ids: list[str] = field(default_factory=list)
    pushed: float = -math.inf
    life: str = ""
    failures: int = 0
    is_out: bool = False
    why: str = "nothing was heard in time"


@dataclass(frozen=True, slots=True)
class Flower:
    """Sites behind a Flower grid; `nodes` says which node is which site.

    A request is pushed again when its node was started anew since, and after `again` seconds without a reply.
    """

    grid: Any = field(repr=False)
    nodes: Mapping[str, int]
    poll: float = 0.5
    again: float = 120.0
    look: float = 3.0
    most: int = MOST_BYTES

    def __post_init__(self) -> None:
        if len(set(self.nodes.values())) < len(self.nodes):
            raise ParameterError("Two sites have the same node. Register a key of its own for each.")

    def names(self) -> tuple[str, ...]:
        """All whose nodes are registered."""
        return tuple(sorted(self.nodes))

    def ask(self, requests: Mapping[str, bytes], timeout: float) -> dict[str, bytes | Lost]:
        """Push all requests, then pull until all are answered or time is up; late replies are never looked at."""
        until = time.monotonic() + timeout
        waiting = {name: Asking(request) for name, request in requests.items()}
        found: dict[str, bytes | Lost] = {}
        lives, looked = self._lives(), time.monotonic()
        while waiting and time.monotonic() < until:
            if time.monotonic() - looked > self.look:
                lives, looked = self._lives(), time.monotonic()
            self._push(waiting, lives, until)
            for name, reply in self._pulled(waiting).items():
                self._take(waiting[name], name, reply, found)
            waiting = {name: one for name, one in waiting.items() if name not in found}
            if waiting:
                time.sleep(min(self.poll, max(0.0, until - time.monotonic())))
        return found | {name: Lost(one.why) for name, one in waiting.items()}

    def _push(self, waiting: Mapping[str, Asking], lives: Mapping[int, str], until: float) -> None:
        """Push to all that have not been asked yet, whose node began anew, or that were silent for long."""
        now = time.monotonic()
        due = []
        for name, one in waiting.items():
            life, since = lives.get(self.nodes[name], one.life), now - one.pushed
            if life != one.life or since > (self.again if one.is_out else self.look):
                due.append(name)
                one.life, one.pushed = life, now
        if not due:
            return
        messages = [question(waiting[name].request, self.nodes[name], max(1.0, until - now)) for name in due]
        try:
            ids = list(self.grid.push_messages(messages))
        except Exception as error:
            ids = []
            for name in due:
                waiting[name].why = f"the request could not be handed over ({type(error).__name__})"
        for name, given in zip(due, ids or [None] * len(due), strict=False):
            waiting[name].is_out = given is not None
            if given is not None:
                waiting[name].ids.append(given)

    def _pulled(self, waiting: Mapping[str, Asking]) -> dict[str, Any]:
        owners = {given: name for name, one in waiting.items() for given in one.ids}
        if not owners:
            return {}
        try:
            replies: Iterable[Any] = self.grid.pull_messages(list(owners))
        except Exception as error:
            for one in waiting.values():
                one.why = f"replies could not be fetched ({type(error).__name__})"
            return {}
        by_name: dict[str, Any] = {}
        for reply in replies:
            name = owners.get(reply.metadata.reply_to_message_id)
            if name is not None:
                waiting[name].ids.remove(reply.metadata.reply_to_message_id)
                if name not in by_name or by_name[name].has_error():
                    by_name[name] = reply
        return by_name

    def _take(self, one: Asking, name: str, reply: Any, found: dict[str, bytes | Lost]) -> None:
        if not reply.has_error():
            if reply.metadata.src_node_id != self.nodes[name]:
                found[name] = Lost("the reply is from another node")
                return
            try:
                found[name] = content_of(reply, self.most)
            except FormatError as error:
                found[name] = Lost(str(error))
            return
        code = reply.error.code
        one.why = UNUSABLE.get(code, f"its node was not there (Flower's code {code})")
        one.failures += code in UNUSABLE
        if one.failures >= TRIES:
            found[name] = Lost(one.why)
        elif not one.ids:
            one.is_out = False

    def _lives(self) -> dict[int, str]:
        """When each node that is there was last started."""
        try:
            return {int(node.node_id): str(node.last_activated_at) for node in self.grid.get_nodes()}
        except Exception:
            return {}


def question(data: bytes, node: int, patience: float) -> Any:
    """A message to a node."""
    return _flwr().Message(_content(data), node, QUESTION, ttl=patience)


def answer_to(message: Any, data: bytes) -> Any:
    """A message back."""
    return _flwr().Message(_content(data), reply_to=message)


def content_of(message: Any, most: int = MOST_BYTES) -> bytes:
    """The bytes in a message; FormatError where they are not whole, or too many."""
    try:
        about, arrays = message.content["about"], message.content["arrays"]
        size, digest = int(about["bytes"]), str(about["sha256"])
        pieces = [arrays[str(number)].data for number in range(len(arrays))]
    except Exception as error:
        raise FormatError("a message of Flower does not hold what it should") from error
    if size > most or sum(map(len, pieces)) != size:
        raise FormatError("a message of Flower is cut short, or longer than is taken")
    data = b"".join(pieces)
    if hashlib.sha256(data).hexdigest() != digest:
        raise FormatError("a message of Flower was changed on its way")
    return data


def _content(data: bytes) -> Any:
    flwr = _flwr()
    starts = range(0, max(len(data), 1), PIECE_BYTES)
    pieces = {str(number): data[start : start + PIECE_BYTES] for number, start in enumerate(starts)}
    arrays = {
        name: flwr.Array(dtype="uint8", shape=(len(piece),), stype="partsong.bytes", data=piece)
        for name, piece in pieces.items()
    }
    about = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return flwr.RecordDict({"arrays": flwr.ArrayRecord(arrays), "about": flwr.ConfigRecord(about)})


def _flwr() -> Any:
    try:
        from flwr import app
    except ImportError as error:
        raise MissingExtra("This needs Flower. Install it with: pip install 'partsong[flower]'") from error
    return app
