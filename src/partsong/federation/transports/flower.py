"""Flower transport: push requests to nodes and pull replies. A site that does not reply in time is lost.

A request may be pushed more than once: a site answers the same request with the same bytes. Site names are bound to
nodes by the keys with which the nodes were registered.
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
from partsong.federation.transports.base import MAX_MESSAGE_BYTES, NoReply, SiteReply, ask_all

# ---- messages ---------------------------------------------------------------------------------------------------
#
#     message.content["about"]: number of bytes and SHA-256; for short messages also the bytes ("whole")
#                    ["arrays"]: for long messages, pieces of the bytes: "0", "1", …
#
# Flower cuts an array into objects of 5 MB and sends equal ones once, so that a model for all sites is stored once at
# the server. Every object costs Flower four calls, and an array is four objects, so short messages avoid arrays.

MESSAGE_TYPE = "query.partsong"
PIECE_BYTES = 1 << 26
SMALL_BYTES = 1 << 18


def request_message(data: bytes, node: int, patience: float) -> Any:
    """Build a message to a node."""
    return _flwr().Message(_content(data), node, MESSAGE_TYPE, ttl=patience)


def reply_message(message: Any, data: bytes) -> Any:
    """Build the reply to a message."""
    return _flwr().Message(_content(data), reply_to=message)


def message_bytes(message: Any, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """Return the bytes in a message; FormatError if they are incomplete or too many."""
    try:
        about = message.content["about"]
        size, digest = int(about["bytes"]), str(about["sha256"])
        if "whole" in about:
            pieces = [bytes(about["whole"])]
        else:
            arrays = message.content["arrays"]
            pieces = [arrays[str(number)].data for number in range(len(arrays))]
    except Exception as error:
        raise FormatError("a Flower message has unexpected content") from error
    if size > max_bytes or sum(map(len, pieces)) != size:
        raise FormatError("a Flower message is truncated, or longer than the limit")
    data = b"".join(pieces)
    if hashlib.sha256(data).hexdigest() != digest:
        raise FormatError("a Flower message was changed in transit")
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
class PullCall:
    """One call for replies, with its deadline and its result."""

    ids: frozenset[str]
    deadline: float
    is_over: threading.Event = field(default_factory=threading.Event)
    replies: list[Any] = field(default_factory=list)
    error: Exception | None = None

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self.deadline

    def run(self, grid: Any) -> None:
        """Make the call."""
        try:
            self.replies = list(grid.pull_messages(sorted(self.ids)))
        except Exception as error:
            self.error = error
        finally:
            self.is_over.set()


@dataclass(slots=True)
class PullCalls:
    """Calls for replies, none of which blocks the others.

    A site that is killed while it sends leaves an incomplete reply. A call of Flower 1.41 for such a reply blocks for
    three minutes, with all other replies it asks for. So each call has its own thread. It is abandoned after `patience`
    seconds plus the transfer time at `min_bytes_per_second`.
    """

    patience: float = 5.0
    min_bytes_per_second: float = 1e6
    calls: list[PullCall] = field(default_factory=list)

    def abandoned(self) -> frozenset[str]:
        """Return the messages of calls that take too long."""
        return frozenset(given for pull in self.calls if pull.is_late for given in pull.ids)

    def replies(self, grid: Any, sizes: Mapping[str, int], timeout: float) -> list[Any]:
        """Return replies that have arrived, to these messages (with expected bytes) and of earlier calls.

        Raises the error of a call if there is no reply.
        """
        current = next((pull for pull in self.calls if not pull.is_late), None)
        free = sizes.keys() - {given for pull in self.calls for given in pull.ids}
        if current is None and free:
            lasting = self.patience + sum(sizes[given] for given in free) / self.min_bytes_per_second
            current = PullCall(frozenset(free), time.monotonic() + lasting)
            self.calls.append(current)
            threading.Thread(target=current.run, args=(grid,), daemon=True).start()
        if current is not None:
            current.is_over.wait(min(timeout, max(0.0, current.deadline - time.monotonic())))
        over = [pull for pull in self.calls if pull.is_over.is_set()]
        self.calls = [pull for pull in self.calls if pull not in over]
        found = [reply for pull in over for reply in pull.replies]
        errors = [pull.error for pull in over if pull.error is not None]
        if errors and not found:
            raise errors[0]
        return found


# ---- transport --------------------------------------------------------------------------------------------------

APP_ERRORS = {1: "its app could not be loaded", 2: "its app failed", 7: "it refused the app"}
"""Flower's error codes that waiting does not resolve, and their meaning."""
MAX_APP_FAILURES = 3
MAX_TTL = 86400.0
"""The longest time in seconds for which Flower stores a message."""


@dataclass(slots=True)
class PendingRequest:
    """A pending request to one site: its deadline, the pushed messages, when, to which activation of its node, and its
    failures.
    """

    request: bytes = field(repr=False)
    deadline: float
    ids: list[str] = field(default_factory=list)
    pushed_at: float = -math.inf
    activation: str = ""
    failures: int = 0
    is_out: bool = False
    reason: str = "no reply in time"


@dataclass(slots=True)
class FlowerTransport:
    """Sites behind a Flower grid; `nodes` says which node is which site.

    A request is pushed again when its node has restarted, and after `retry_after` seconds without a reply. Replies to
    replaced requests are ignored. A site that did not reply in time is not waited for again until its node is back.
    """

    grid: Any = field(repr=False)
    nodes: Mapping[str, int]
    poll: float = 0.5
    retry_after: float = 120.0
    refresh_after: float = 3.0
    max_bytes: int = MAX_MESSAGE_BYTES
    pulls: PullCalls = field(default_factory=PullCalls, repr=False)
    pending: dict[str, PendingRequest] = field(default_factory=dict, repr=False)
    replies: dict[str, bytes | NoReply] = field(default_factory=dict, repr=False)
    """Replies that were pulled but not returned yet."""
    unresponsive: set[str] = field(default_factory=set, repr=False)
    """Sites that did not reply in time."""
    activations: Mapping[int, str] = field(default_factory=dict, repr=False)
    """When each present node was last activated, as of `refreshed_at`."""
    refreshed_at: float = -math.inf

    def __post_init__(self) -> None:
        if len(set(self.nodes.values())) < len(self.nodes):
            raise ParameterError("Two sites have the same node. Register a separate key for each site.")

    def names(self) -> tuple[str, ...]:
        """Return the sites whose nodes are registered."""
        return tuple(sorted(self.nodes))

    def ask(self, requests: Mapping[str, bytes], timeout: float) -> dict[str, bytes | NoReply]:
        """Push all requests and pull until all are answered or time is up. Late replies are ignored."""
        return ask_all(self, requests, timeout)

    def push(self, requests: Mapping[str, bytes], timeout: float) -> None:
        """Push requests. Those that fail are retried while waiting for replies."""
        if self.unresponsive & requests.keys() or not self.activations:
            self._refresh_nodes()
        until = time.monotonic() + timeout
        for name, request in requests.items():
            self.pending[name] = PendingRequest(request, until)
            self.replies.pop(name, None)
            if name in self.unresponsive and self.activations and self.nodes[name] not in self.activations:
                self.replies[name] = NoReply("its node is still absent")
        self._push_due()

    def next_reply(self, timeout: float) -> SiteReply | None:
        """Pull until there is a reply. Restarted nodes are asked again meanwhile."""
        until = time.monotonic() + timeout
        while not self.replies:
            self._push_due()
            for reply in self._pull(max(0.0, until - time.monotonic())):
                self._record_reply(reply)
            left = until - time.monotonic()
            if self.replies or left <= 0 or not self.pending:
                break
            time.sleep(min(self.poll, left))
        if not self.replies:
            return None
        name = next(iter(self.replies))
        reply = self.replies.pop(name)
        del self.pending[name]
        if isinstance(reply, bytes):
            self.unresponsive.discard(name)
        return name, reply

    def cancel(self) -> dict[str, NoReply]:
        """Drop all pending requests; later replies to them are ignored."""
        left = {name: NoReply(one.reason) for name, one in self.pending.items()}
        self.unresponsive |= set(left)
        self.pending.clear()
        self.replies.clear()
        return left

    def _push_due(self) -> None:
        """Push the requests that were not pushed yet, whose node has restarted, or whose reply is overdue."""
        now, behind = time.monotonic(), self.pulls.abandoned()
        waiting = {name: one for name, one in self.pending.items() if name not in self.replies}
        if not self.activations or any(self.refresh_after < now - one.pushed_at < math.inf for one in waiting.values()):
            self._refresh_nodes()
        due = {}
        for name, one in waiting.items():
            life = self.activations.get(self.nodes[name], one.activation)
            is_out = one.is_out and not behind.issuperset(one.ids)
            if life != one.activation or now - one.pushed_at > (self.retry_after if is_out else self.refresh_after):
                due[name], one.activation, one.pushed_at = one, life, now
        if not due:
            return
        messages = [
            request_message(one.request, self.nodes[name], min(max(1.0, one.deadline - now), MAX_TTL))
            for name, one in due.items()
        ]
        ids: list[str | None] = [None] * len(due)
        try:
            ids = list(self.grid.push_messages(messages)) or ids
        except Exception as error:
            for one in due.values():
                one.reason = f"the request could not be sent ({type(error).__name__})"
        for one, given in zip(due.values(), ids, strict=True):
            one.is_out = given is not None
            if given is not None:
                one.ids.append(given)

    def _pull(self, timeout: float) -> list[Any]:
        """Pull replies to pending requests."""
        sizes = {given: len(one.request) for one in self.pending.values() for given in one.ids}
        if not sizes:
            return []
        try:
            return self.pulls.replies(self.grid, sizes, max(timeout, self.poll))
        except Exception as error:
            for one in self.pending.values():
                one.reason = f"replies could not be fetched ({type(error).__name__})"
            return []

    def _record_reply(self, reply: Any) -> None:
        """Record a reply, unless its request is no longer pending or has a valid reply."""
        given = reply.metadata.reply_to_message_id
        name = next((name for name, one in self.pending.items() if given in one.ids), None)
        if name is None:
            return
        one = self.pending[name]
        one.ids.remove(given)
        if isinstance(self.replies.get(name), bytes):
            return
        if not reply.has_error():
            self.replies[name] = self._content_from(name, reply)
            return
        code = reply.error.code
        one.reason = APP_ERRORS.get(code, f"its node was absent (Flower's code {code})")
        one.failures += code in APP_ERRORS
        if one.failures >= MAX_APP_FAILURES:
            self.replies[name] = NoReply(one.reason)
        elif not one.ids:
            one.is_out = False

    def _content_from(self, name: str, reply: Any) -> bytes | NoReply:
        if reply.metadata.src_node_id != self.nodes[name]:
            return NoReply("the reply is from another node")
        try:
            return message_bytes(reply, self.max_bytes)
        except FormatError as error:
            return NoReply(str(error))

    def _refresh_nodes(self) -> None:
        """Read when each present node was last activated, at most every `refresh_after` seconds."""
        if time.monotonic() - self.refreshed_at > self.refresh_after:
            self.activations, self.refreshed_at = self._read_activations(), time.monotonic()

    def _read_activations(self) -> dict[int, str]:
        try:
            return {int(node.node_id): str(node.last_activated_at) for node in self.grid.get_nodes()}
        except Exception:
            return {}
