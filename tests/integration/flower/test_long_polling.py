"""The bell at the server: a look lasts until there is something to find, and never finds half a message."""

from __future__ import annotations

import asyncio
import time

import pytest

from partsong.federation.flower import server_process
from partsong.federation.flower.server_process import LongPolling


class Server:
    """Messages that were handed over, and how often somebody looked."""

    def __init__(self, status=200):
        self.status, self.found, self.looks, self.pieces, self.bodies = status, b"", 0, 0, []

    async def __call__(self, scope, receive, send):
        body = (await receive())["body"]
        answer = b""
        if scope["path"] == server_process.PULL_PATH:
            assert "mark" not in scope["state"]
            scope["state"]["mark"] = True
            self.looks, answer = self.looks + 1, self.found
            self.bodies.append(body)
            assert self.pieces != 1, "half a message was seen"
        else:
            self.pieces += 1
            await asyncio.sleep(0.02)
            self.found = b"message"
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": answer})


class Caller:
    """One call; `leaves`: after so many seconds the caller is gone."""

    def __init__(self, path, leaves=60.0):
        self.scope = {"type": "http", "path": path, "state": {}}
        self.leaves, self.is_asked, self.sent = leaves, False, []

    async def receive(self):
        if not self.is_asked:
            self.is_asked = True
            return {"type": "http.request", "body": b"node 7", "more_body": False}
        await asyncio.sleep(self.leaves)
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)

    async def call(self, app):
        began = time.monotonic()
        await app(self.scope, self.receive, self.send)
        self.seconds = time.monotonic() - began
        return self.sent[-1]["body"] if self.sent else None


def look_at(app, patience=5.0, leaves=60.0, handing_over=(), ending=lambda: False):
    """A look, and what the server hands over at given times; the answer, and the seconds it took."""

    async def all_of_it():
        bell = LongPolling(app, patience, ending)
        caller = Caller(server_process.PULL_PATH, leaves)
        looking = asyncio.ensure_future(caller.call(bell))
        for delay, path in handing_over:
            await asyncio.sleep(delay)
            await Caller(path).call(bell)
        answer = await looking
        return answer, caller.seconds

    return asyncio.run(all_of_it())


@pytest.mark.parametrize("path", sorted(server_process.PUSH_PATHS))
def test_a_look_that_finds_nothing_lasts_until_something_is_handed_over(path):
    server = Server()
    server.pieces = 5
    answer, seconds = look_at(server, handing_over=[(0.1, path)])
    assert answer == b"message"
    assert seconds < 1.5
    assert server.looks == 2
    assert server.bodies == [b"node 7"] * 2


def test_what_is_there_is_found_at_once():
    server = Server()
    server.found = b"message"
    answer, seconds = look_at(server)
    assert (answer, server.looks) == (b"message", 1)
    assert seconds < 0.5


def test_nobody_looks_while_a_message_is_handed_over_piece_by_piece():
    server = Server()
    pieces = sorted(server_process.PUSH_PATHS)
    answer, _ = look_at(server, handing_over=[(0.05, pieces[0]), (0.04, pieces[1])])
    assert (answer, server.pieces) == (b"message", 2)


def test_a_look_ends_as_it_is_after_a_while():
    server = Server()
    answer, seconds = look_at(server, patience=0.2)
    assert answer == b""
    assert 0.2 <= seconds < 1.5


def test_a_refusal_is_not_waited_with():
    server = Server(status=401)
    answer, seconds = look_at(server)
    assert (answer, server.looks) == (b"", 1)
    assert seconds < 0.5


def test_a_node_that_has_gone_takes_no_message_with_it():
    server = Server()
    server.pieces = 5
    look_at(server, leaves=0.1, handing_over=[(0.4, sorted(server_process.PUSH_PATHS)[0])])
    assert server.looks == 1
    assert server.found == b"message"


def test_a_server_that_was_told_to_stop_keeps_nobody_waiting():
    answer, seconds = look_at(Server(), ending=lambda: True)
    assert answer == b""
    assert seconds < 0.5


def test_other_calls_pass_as_they_are():
    async def call():
        return await Caller("/v1/fleet/push-messages").call(LongPolling(Server()))

    assert asyncio.run(call()) == b""
