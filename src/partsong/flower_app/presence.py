"""Before a site's node begins: is the server the right one, are we known there, and is our last life over?

Flower lets no node in that it believes to be there still, which it does for a minute after a crash. A site that knows
the number of its node ends that life itself; and it learns the number whenever it is let in.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Any

from partsong.consortium.site_folder import SiteFolder
from partsong.consortium.toml_text import write
from partsong.flower_app.control import ServerError, distrust

PAUSE = 2.0
LAPSE = 120.0
"""Longer than a server takes to notice that a node is gone."""
AHEAD, BEHIND = 5, 300
"""Seconds by which the clock of a node may differ from the server's: Flower takes no signature of another time."""


def announce(site: SiteFolder, tell: Callable[[str], None]) -> int:
    """The number of the site's node, which can begin now; waits for a server that does not answer yet."""
    import httpx
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    key: Any = load_ssh_private_key((site.path / "node").read_bytes(), None)
    guards = [RuntimeVersionHttpInterceptor(component_name="SuperNode"), NodeAuthHttpInterceptor(key, key.public_key())]
    authority = (site.path / "ca.crt").read_bytes()
    told, until = False, time.monotonic() + LAPSE
    with FleetHttpClient.from_server_address(site.address, False, authority, interceptors=guards) as client:
        while True:
            try:
                return _let_in(client, key, site)
            except httpx.TransportError as error:
                _require_trust(error, site)
                if not told:
                    tell(f"No server answers at {site.address} yet; waiting for it.")
                told, until = True, time.monotonic() + LAPSE
            except httpx.HTTPStatusError as error:
                if error.response.status_code in (401, 403) or not (site.path / "node.number").exists():
                    raise ServerError(unknown(site, seconds_ahead(error.response.headers.get("date")))) from error
                if time.monotonic() > until:
                    raise ServerError(f"The server at {site.address} does not let this site in: {error}") from error
            time.sleep(PAUSE)


def unknown(site: SiteFolder, ahead: float | None) -> str:
    """Why a server may not know a site, the clock first; `ahead` is by how many seconds ours is, if that is known."""
    limits = f"it may be {AHEAD} seconds ahead, and {BEHIND} behind"
    admitted = f"Send the coordinator {site.path / 'card.toml'}, to be admitted; then join again."
    if ahead is None:
        return (
            f"The server at {site.address} does not let this site in. Compare the clock of this machine with the "
            f"server's: {limits}. If it is right, the server does not know the key of this site. {admitted}"
        )
    way = "ahead of" if ahead > 0 else "behind"
    if not -BEHIND < ahead < AHEAD:
        return (
            f"The clock of this machine is {abs(ahead):.0f} seconds {way} that of the server at {site.address}, and "
            f"{limits}. Set both by a time server (NTP), then join again."
        )
    return (
        f"The clock of this machine is right ({abs(ahead):.0f} seconds {way} the server's), but the server at "
        f"{site.address} does not know the key of this site. {admitted}"
    )


def seconds_ahead(date: str | None) -> float | None:
    """By how much the clock of this machine is ahead of that of whoever has dated a reply of now, in whole seconds."""
    try:
        return round(time.time() - parsedate_to_datetime(date or "").timestamp())
    except ValueError:
        return None


def _let_in(client: Any, key: Any, site: SiteFolder) -> int:
    """Begin, which tells our number, and end at once: Flower's own node begins after this."""
    import httpx
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    place = site.path / "node.number"
    if place.exists():
        try:
            client.DeactivateNode(DeactivateNodeRequest(node_id=int(place.read_text())))
        except httpx.HTTPStatusError as error:
            if error.response.status_code in (401, 403):
                raise
    public = public_key_to_bytes(key.public_key())
    number = int(client.ActivateNode(ActivateNodeRequest(public_key=public, heartbeat_interval=30)).node_id)
    write(place, str(number))
    client.DeactivateNode(DeactivateNodeRequest(node_id=number))
    return number


def _require_trust(error: BaseException, site: SiteFolder) -> None:
    """A server with the wrong certificate is not waited for."""
    if why := distrust(error):
        raise ServerError(
            f"Who answers at {site.address} has no certificate by the authority of this federation ({why}): it has "
            "expired, or this is somebody else. Nothing was sent; call the coordinator."
        ) from error
