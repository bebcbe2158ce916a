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
from partsong.federation.transports.base import Heard, Lost, all_replies

# ---- flower messages --------------------------------------------------------------------------------------------
#
# Bytes in messages of Flower, and back.
#
#     message.content["about"]: number of bytes and SHA-256; "whole": the bytes, where they are few
#                    ["arrays"]: "0", "1", …, pieces of the bytes, where they are many
#
# Flower cuts an array into objects of 5 MB that travel once where they are equal, so that a model for all sites is sent
# to the server's store once. Every object costs Flower four calls on its way, and an array is four objects: so few
# bytes
# go without.

QUESTION = "query.partsong"
PIECE_BYTES = 1 << 26
SMALL_BYTES = 1 << 18
MOST_BYTES = 1 << 31


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
        pieces = [bytes(about["whole"])] if "whole" in about else _pieces(message.content["arrays"])
    except Exception as error:
        raise FormatError("a message of Flower does not hold what it should") from error
    if size > most or sum(map(len, pieces)) != size:
        raise FormatError("a message of Flower is cut short, or longer than is taken")
    data = b"".join(pieces)
    if hashlib.sha256(data).hexdigest() != digest:
        raise FormatError("a message of Flower was changed on its way")
    return data


def _pieces(arrays: Any) -> list[bytes]:
    return [arrays[str(number)].data for number in range(len(arrays))]


def _content(data: bytes) -> Any:
    flwr = _flwr()
    about: dict[str, Any] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    if len(data) <= SMALL_BYTES:
        return flwr.RecordDict({"about": flwr.ConfigRecord({**about, "whole": data})})
    starts = range(0, max(len(data), 1), PIECE_BYTES)
    pieces = {str(number): data[start : start + PIECE_BYTES] for number, start in enumerate(starts)}
    arrays = {
        name: flwr.Array(dtype="uint8", shape=(len(piece),), stype="partsong.bytes", data=piece)
        for name, piece in pieces.items()
    }
    return flwr.RecordDict({"arrays": flwr.ArrayRecord(arrays), "about": flwr.ConfigRecord(about)})


def _flwr() -> Any:
    try:
        from flwr import app
    except ImportError as error:
        raise MissingExtra("This needs Flower. Install it with: pip install 'partsong[flower]'") from error
    return app


# ---- flower pulling ---------------------------------------------------------------------------------------------
#
# Calls for replies that hold up nobody.
#
# A site that is killed while it sends a reply leaves one that is not whole, and Flower's call for it, with all replies
# that it was made for, waits for the rest: for three minutes, in 1.41. So each call has a thread of its own, and one
# that
# takes long is left behind; what was asked for with it is asked for anew.


@dataclass(slots=True)
class Pull:
    """One call, until when it may last, and what came of it."""

    ids: frozenset[str]
    until: float
    is_over: threading.Event = field(default_factory=threading.Event)
    replies: list[Any] = field(default_factory=list)
    error: Exception | None = None

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
    """Calls that are not over; one that has lasted `patience` seconds, and what `slowest` bytes a second need, is left
    behind.
    """

    patience: float = 5.0
    slowest: float = 1e6
    out: list[Pull] = field(default_factory=list)

    def left_behind(self) -> frozenset[str]:
        """The messages of calls that take too long."""
        return frozenset(given for pull in self.out if self._is_late(pull) for given in pull.ids)

    def replies(self, grid: Any, sizes: Mapping[str, int], timeout: float) -> list[Any]:
        """What has come, of these messages, whose replies have about so many bytes, and of calls from before; an error
        of a call is raised.
        """
        known = {given for pull in self.out for given in pull.ids}
        current = next((pull for pull in self.out if not self._is_late(pull)), None)
        if current is None and (free := sizes.keys() - known):
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

    def _is_late(self, pull: Pull) -> bool:
        return time.monotonic() >= pull.until


# ---- flower -----------------------------------------------------------------------------------------------------

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
class Watch:
    """All sites that are asked, replies that were pulled and not handed out, when each node was last started, who was
    not heard in time when all were waited for, and calls for replies.
    """

    asked: dict[str, Asking] = field(default_factory=dict)
    found: dict[str, bytes | Lost] = field(default_factory=dict)
    lives: Mapping[int, str] = field(default_factory=dict)
    looked: float = -math.inf
    missed: set[str] = field(default_factory=set)
    pulls: Pulls = field(default_factory=Pulls)


@dataclass(frozen=True, slots=True)
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
    watch: Watch = field(default_factory=Watch, repr=False, compare=False)

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
        watch = self.watch
        if watch.missed & requests.keys() or not watch.lives:
            self._look()
        away = {name for name in watch.missed & set(requests) if watch.lives and self.nodes[name] not in watch.lives}
        for name in requests:
            watch.found.pop(name, None)
        asked = {name: Asking(request, time.monotonic() + timeout) for name, request in requests.items()}
        watch.asked |= {name: one for name, one in asked.items() if name not in away}
        self._push_due()
        watch.asked |= {name: asked[name] for name in sorted(away)}
        watch.found |= {name: Lost("its node is still not there") for name in sorted(away)}

    def arrived(self, timeout: float) -> Heard | None:
        """Pull until there is a reply; nodes that were started anew are asked again meanwhile."""
        until, watch = time.monotonic() + timeout, self.watch
        while not watch.found:
            self._push_due()
            for name, reply in self._pulled(watch.asked, max(0.0, until - time.monotonic())).items():
                self._take(watch.asked[name], name, reply, watch.found)
            left = until - time.monotonic()
            if watch.found or left <= 0 or not watch.asked:
                break
            time.sleep(min(self.poll, left))
        for name, found in watch.found.items():
            del watch.asked[name], watch.found[name]
            watch.missed -= {name} if isinstance(found, bytes) else set()
            return name, found
        return None

    def recall(self) -> dict[str, Lost]:
        """Forget all that was not answered: what comes of it later is not looked at."""
        left = {name: Lost(one.why) for name, one in self.watch.asked.items()}
        self.watch.missed |= set(left)
        self.watch.asked.clear()
        self.watch.found.clear()
        return left

    def _push_due(self) -> None:
        """Push to all that have not been asked yet, whose node began anew, or that were silent for long."""
        now, watch = time.monotonic(), self.watch
        if not watch.lives or any(self.look < now - one.pushed < math.inf for one in watch.asked.values()):
            self._look()
        due, behind = [], watch.pulls.left_behind()
        for name, one in watch.asked.items():
            life, since = watch.lives.get(self.nodes[name], one.life), now - one.pushed
            is_out = one.is_out and not behind.issuperset(one.ids)
            if life != one.life or since > (self.again if is_out else self.look):
                due.append(name)
                one.life, one.pushed = life, now
        if not due:
            return
        waiting = watch.asked
        lasting = {name: min(max(1.0, waiting[name].until - now), LONGEST) for name in due}
        messages = [question(waiting[name].request, self.nodes[name], lasting[name]) for name in due]
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

    def _pulled(self, waiting: Mapping[str, Asking], timeout: float) -> dict[str, Any]:
        owners = {given: name for name, one in waiting.items() for given in one.ids}
        if not owners:
            return {}
        try:
            sizes = {given: len(waiting[name].request) for given, name in owners.items()}
            replies = self.watch.pulls.replies(self.grid, sizes, max(timeout, self.poll))
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

    def _look(self) -> None:
        """See which nodes are there, where that was not done just now."""
        if time.monotonic() - self.watch.looked > self.look:
            self.watch.lives, self.watch.looked = self._lives(), time.monotonic()

    def _lives(self) -> dict[int, str]:
        """When each node that is there was last started."""
        try:
            return {int(node.node_id): str(node.last_activated_at) for node in self.grid.get_nodes()}
        except Exception:
            return {}
