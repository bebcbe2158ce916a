"""Flower as a transport: requests are pushed to nodes, replies are pulled, whatever does not come in time is lost.

Requests may be pushed more than once: a site answers the same request with the same bytes. Names are bound to nodes by
the keys under which the nodes were registered.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from partsong.errors import FormatError, MissingExtra, ParameterError
from partsong.federation.transports.base import MOST_BYTES, Heard, Lost, all_replies

# ---- messages ---------------------------------------------------------------------------------------------------
#
#     message.content["about"]: number of bytes and SHA-256; "whole": the bytes, where they are few
#                    ["arrays"]: "0", "1", …, pieces of the bytes, where they are many
#
# Flower cuts an array into objects of 5 MB that travel once where they are equal, so that a model for all sites is sent
# to the server's store once. Every object costs Flower four calls on its way, and an array is four objects: few bytes
# go without.

QUESTION = "query.partsong"
PIECE_BYTES = 1 << 26
SMALL_BYTES = 1 << 18


def question(data: bytes, node: int, patience: float) -> Any:
    """A message to a node."""
    return _flwr().Message(_content(data), node, QUESTION, ttl=patience)


def answer_to(message: Any, data: bytes) -> Any:
    """A message back."""
    return _flwr().Message(_content(data), reply_to=message)


def content_of(message: Any, most: int = MOST_BYTES) -> bytes:
    """The bytes in a message; FormatError where they are not whole, or too many."""
    try:
        about = message.content["about"]
        size, digest = int(about["bytes"]), str(about["sha256"])
        if "whole" in about:
            pieces = [bytes(about["whole"])]
        else:
            arrays = message.content["arrays"]
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
    about: dict[str, Any] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    if len(data) <= SMALL_BYTES:
        return flwr.RecordDict({"about": flwr.ConfigRecord({**about, "whole": data})})
    arrays = {}
    for number, start in enumerate(range(0, max(len(data), 1), PIECE_BYTES)):
        piece = data[start : start + PIECE_BYTES]
        arrays[str(number)] = flwr.Array(dtype="uint8", shape=(len(piece),), stype="partsong.bytes", data=piece)
    return flwr.RecordDict({"arrays": flwr.ArrayRecord(arrays), "about": flwr.ConfigRecord(about)})


def _flwr() -> Any:
    try:
        from flwr import app
    except ImportError as error:
        raise MissingExtra("This needs Flower. Install it with: pip install 'partsong[flower]'") from error
    return app


# ---- pulling ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Pull:
    """One call for replies, until when it may last, and what came of it."""

    ids: frozenset[str]
    until: float
    is_over: threading.Event = field(default_factory=threading.Event)
    replies: list[Any] = field(default_factory=list)
    error: Exception | None = None

    @property
    def is_late(self) -> bool:
        """Whether it has lasted for too long."""
        return time.monotonic() >= self.until

    def make(self, grid: Any) -> None:
        """The call itself."""
        try:
            self.replies = list(grid.pull_messages(sorted(self.ids)))
        except Exception as error:
            self.error = error
        finally:
            self.is_over.set()


@dataclass(slots=True)
class Pulls:
    """Calls for replies, of which none holds up the others.

    A site that is killed while it sends a reply leaves one that is not whole, and Flower 1.41's call for it, with all
    replies that it was made for, waits for the rest for three minutes. So each call has a thread of its own, and one
    that has lasted `patience` seconds, and what `slowest` bytes a second need, is left behind.
    """

    patience: float = 5.0
    slowest: float = 1e6
    out: list[Pull] = field(default_factory=list)

    def left_behind(self) -> frozenset[str]:
        """The messages of calls that take too long."""
        return frozenset(given for pull in self.out if pull.is_late for given in pull.ids)

    def replies(self, grid: Any, sizes: Mapping[str, int], timeout: float) -> list[Any]:
        """What has come, of these messages, whose replies have about so many bytes, and of calls from before; an error
        of a call is raised.
        """
        current = next((pull for pull in self.out if not pull.is_late), None)
        free = sizes.keys() - {given for pull in self.out for given in pull.ids}
        if current is None and free:
            lasting = self.patience + sum(sizes[given] for given in free) / self.slowest
            current = Pull(frozenset(free), time.monotonic() + lasting)
            self.out.append(current)
            threading.Thread(target=current.make, args=(grid,), daemon=True).start()
        if current is not None:
            current.is_over.wait(min(timeout, max(0.0, current.until - time.monotonic())))
        over = [pull for pull in self.out if pull.is_over.is_set()]
        self.out = [pull for pull in self.out if pull not in over]
        found = [reply for pull in over for reply in pull.replies]
        errors = [pull.error for pull in over if pull.error is not None]
        if errors and not found:
            raise errors[0]
        return found


# ---- transport --------------------------------------------------------------------------------------------------

UNUSABLE = {1: "its app could not be loaded", 2: "its app failed", 7: "it refused the app"}
"""Flower's error codes that do not go away by waiting, and what they mean."""
TRIES = 3
LONGEST = 86400.0
"""Seconds after which Flower forgets a message, at most."""


@dataclass(slots=True)
class Asking:
    """One site while it is asked: until when, messages that were pushed, when, to which life of its node, and how it is
    going.
    """

    request: bytes = field(repr=False)
    until: float
    ids: list[str] = field(default_factory=list)
    pushed: float = -math.inf
    life: str = ""
    failures: int = 0
    is_out: bool = False
    why: str = "nothing was heard in time"


@dataclass(slots=True)
class Flower:
    """Sites behind a Flower grid; `nodes` says which node is which site.

    A request is pushed again when its node was started anew since, and after `again` seconds without a reply. Replies
    to requests that others took the place of are never looked at. A site that was waited for in vain is not waited for
    again before its node is back.
    """

    grid: Any = field(repr=False)
    nodes: Mapping[str, int]
    poll: float = 0.5
    again: float = 120.0
    look: float = 3.0
    most: int = MOST_BYTES
    pulls: Pulls = field(default_factory=Pulls, repr=False)
    asked: dict[str, Asking] = field(default_factory=dict, repr=False)
    found: dict[str, bytes | Lost] = field(default_factory=dict, repr=False)
    """Replies that were pulled and not handed out yet."""
    missed: set[str] = field(default_factory=set, repr=False)
    """Sites that were waited for in vain."""
    lives: Mapping[int, str] = field(default_factory=dict, repr=False)
    """When each node that is there was last started, `looked` at then."""
    looked: float = -math.inf

    def __post_init__(self) -> None:
        if len(set(self.nodes.values())) < len(self.nodes):
            raise ParameterError("Two sites have the same node. Register a key of its own for each.")

    def names(self) -> tuple[str, ...]:
        """All whose nodes are registered."""
        return tuple(sorted(self.nodes))

    def ask(self, requests: Mapping[str, bytes], timeout: float) -> dict[str, bytes | Lost]:
        """Push all requests, then pull until all are answered or time is up; late replies are never looked at."""
        return all_replies(self, requests, timeout)

    def push(self, requests: Mapping[str, bytes], timeout: float) -> None:
        """Hand requests over; who cannot be reached now is tried again when replies are waited for."""
        if self.missed & requests.keys() or not self.lives:
            self._look()
        until = time.monotonic() + timeout
        for name, request in requests.items():
            self.asked[name] = Asking(request, until)
            self.found.pop(name, None)
            if name in self.missed and self.lives and self.nodes[name] not in self.lives:
                self.found[name] = Lost("its node is still not there")
        self._push_due()

    def arrived(self, timeout: float) -> Heard | None:
        """Pull until there is a reply; nodes that were started anew are asked again meanwhile."""
        until = time.monotonic() + timeout
        while not self.found:
            self._push_due()
            for reply in self._pulled(max(0.0, until - time.monotonic())):
                self._take(reply)
            left = until - time.monotonic()
            if self.found or left <= 0 or not self.asked:
                break
            time.sleep(min(self.poll, left))
        if not self.found:
            return None
        name = next(iter(self.found))
        reply = self.found.pop(name)
        del self.asked[name]
        if isinstance(reply, bytes):
            self.missed.discard(name)
        return name, reply

    def recall(self) -> dict[str, Lost]:
        """Forget all that was not answered: what comes of it later is not looked at."""
        left = {name: Lost(one.why) for name, one in self.asked.items()}
        self.missed |= set(left)
        self.asked.clear()
        self.found.clear()
        return left

    def _push_due(self) -> None:
        """Push to all that have not been asked yet, whose node began anew, or that were silent for long."""
        now, behind = time.monotonic(), self.pulls.left_behind()
        waiting = {name: one for name, one in self.asked.items() if name not in self.found}
        if not self.lives or any(self.look < now - one.pushed < math.inf for one in waiting.values()):
            self._look()
        due = {}
        for name, one in waiting.items():
            life = self.lives.get(self.nodes[name], one.life)
            is_out = one.is_out and not behind.issuperset(one.ids)
            if life != one.life or now - one.pushed > (self.again if is_out else self.look):
                due[name], one.life, one.pushed = one, life, now
        if not due:
            return
        messages = [
            question(one.request, self.nodes[name], min(max(1.0, one.until - now), LONGEST))
            for name, one in due.items()
        ]
        ids: list[str | None] = [None] * len(due)
        try:
            ids = list(self.grid.push_messages(messages)) or ids
        except Exception as error:
            for one in due.values():
                one.why = f"the request could not be handed over ({type(error).__name__})"
        for one, given in zip(due.values(), ids, strict=True):
            one.is_out = given is not None
            if given is not None:
                one.ids.append(given)

    def _pulled(self, timeout: float) -> list[Any]:
        """Replies to requests that are out."""
        sizes = {given: len(one.request) for one in self.asked.values() for given in one.ids}
        if not sizes:
            return []
        try:
            return self.pulls.replies(self.grid, sizes, max(timeout, self.poll))
        except Exception as error:
            for one in self.asked.values():
                one.why = f"replies could not be fetched ({type(error).__name__})"
            return []

    def _take(self, reply: Any) -> None:
        """Note what a reply says, unless its request is not out any more or was answered well already."""
        given = reply.metadata.reply_to_message_id
        name = next((name for name, one in self.asked.items() if given in one.ids), None)
        if name is None:
            return
        one = self.asked[name]
        one.ids.remove(given)
        if isinstance(self.found.get(name), bytes):
            return
        if not reply.has_error():
            self.found[name] = self._content_from(name, reply)
            return
        code = reply.error.code
        one.why = UNUSABLE.get(code, f"its node was not there (Flower's code {code})")
        one.failures += code in UNUSABLE
        if one.failures >= TRIES:
            self.found[name] = Lost(one.why)
        elif not one.ids:
            one.is_out = False

    def _content_from(self, name: str, reply: Any) -> bytes | Lost:
        if reply.metadata.src_node_id != self.nodes[name]:
            return Lost("the reply is from another node")
        try:
            return content_of(reply, self.most)
        except FormatError as error:
            return Lost(str(error))

    def _look(self) -> None:
        """See when each node that is there was last started, where that was not done just now."""
        if time.monotonic() - self.looked > self.look:
            self.lives, self.looked = self._lives(), time.monotonic()

    def _lives(self) -> dict[int, str]:
        try:
            return {int(node.node_id): str(node.last_activated_at) for node in self.grid.get_nodes()}
        except Exception:
            return {}
