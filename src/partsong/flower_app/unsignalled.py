"""Calls that Flower makes in a process for each request, made in the node's own process.

Where the node does not know a request any more (a server was killed while the request came in), such a call sends its
process a signal to end. Here that would end the node: the call fails instead, and the node goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def retrying() -> Any:
    """Flower's way to try calls again, but for a request that is refused as unknown (401): that is an error."""
    import httpx
    from flwr.supercore.retry import make_simple_http_retry_invoker

    invoker = make_simple_http_retry_invoker()
    original = invoker.should_giveup

    def is_given_up(error: Exception) -> bool:
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code == httpx.codes.UNAUTHORIZED:
            return True
        return bool(original(error)) if original is not None else False

    invoker.should_giveup = is_given_up
    return invoker


def heartbeat(client: Any) -> Callable[[], bool]:
    """Tells the node that a request is being worked on; whether the node was reached, whatever it thinks of that."""
    import httpx
    from flwr.supercore.heartbeat import SendTaskHeartbeatRequest

    def told() -> bool:
        try:
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        except httpx.TransportError:
            return False
        except httpx.HTTPStatusError:
            return True
        return True

    return told
