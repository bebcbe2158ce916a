"""What Flower is told by variables: no telemetry, no look for updates, nothing installed while it runs."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from partsong.errors import CompositionError, FileError

# ---- environment ------------------------------------------------------------------------------------------------

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
}


def set_quiet(home: Path, variables: dict[str, str] | None = None) -> None:
    """For this process and its children, before Flower is imported; `home` is for Flower's own files.

    Flower starts its helpers by name, so that those of this Python come first.
    """
    own = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", "")
    if path.split(os.pathsep)[0] != own:
        os.environ["PATH"] = os.pathsep.join((own, path))
    os.environ.update(QUIET)
    os.environ["FLWR_HOME"] = str(home)
    os.environ.update(variables or {})


# ---- listening --------------------------------------------------------------------------------------------------
#
# Where the server listens: at the host that sites call, and always at 127.0.0.1, where its own machine calls it.
#
# Flower would listen at one host, and have its executor call that one; but the gate knows callers of the server's own
# machine by the address that they come from.

HERE = "127.0.0.1"
EVERYWHERE = "0.0.0.0"
NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
Place = tuple[Any, Any]
"""The family of a socket, and its address."""


def places_of(host: str, port: int) -> tuple[Place, ...]:
    """Of a name or a number; FileError where nobody knows it."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise FileError(
            f"This machine does not know {host[:100]!r} ({error}). Say where to listen, or listen everywhere: "
            f"partsong federation serve --host {EVERYWHERE}"
        ) from error
    return tuple(dict.fromkeys((family, address) for family, _, _, _, address in found))


def bound(host: str, port: int) -> list[socket.socket]:
    """Sockets for a host, and one for this machine unless it is among them; FileError where one cannot be had.

    Of a name with several addresses, those that this machine does not have are left out, if it has one of them. `::`
    is everywhere, of version 4 too.
    """
    places = places_of(host, port)
    with contextlib.ExitStack() as opened:
        made: list[socket.socket] = []
        for family, address in places:
            try:
                made.append(opened.enter_context(_bound(family, address)))
            except OSError as error:
                if error.errno not in NOT_HERE or (not made and (family, address) == places[-1]):
                    raise _refused(address, error) from error
        if not {HERE, EVERYWHERE} & set(hosts_of(made)):
            own = (EVERYWHERE if "::" in hosts_of(made) else HERE, port)
            try:
                made.append(opened.enter_context(_bound(socket.AF_INET, own)))
            except OSError as error:
                raise _refused(own, error) from error
        opened.pop_all()
    return made


def hosts_of(sockets: Sequence[socket.socket]) -> tuple[str, ...]:
    """Where they are bound."""
    return tuple(str(one.getsockname()[0]) for one in sockets)


def run_on(sockets: list[socket.socket]) -> None:
    """From now on Flower's server in this process listens there, whatever it is told."""
    server: Any = import_module("flwr.superlink.cli.flower_superlink")
    if not hasattr(server, "uvicorn"):
        raise CompositionError("Flower's server is not the one that this was written for. Install flwr 1.41.")
    server.uvicorn = Listening(sockets)


@dataclass(frozen=True, slots=True)
class Listening:
    """What Flower takes for uvicorn."""

    sockets: list[socket.socket]

    def run(self, app: Any, **settings: Any) -> None:
        """As uvicorn's own does, on sockets that are there."""
        uvicorn = import_module("uvicorn")
        server = uvicorn.Server(uvicorn.Config(app, **settings))
        with contextlib.suppress(KeyboardInterrupt):
            server.run(self.sockets)
        if not server.started:
            sys.exit(1)


def _bound(family: Any, address: Any) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


def _refused(address: Any, error: OSError) -> FileError:
    host, port, why = address[0], address[1], error.strerror or str(error)
    if error.errno in NOT_HERE:
        return FileError(
            f"{host} is not an address of this machine ({why}). Where sites come in through a router or a gateway, "
            f"listen everywhere: partsong federation serve --host {EVERYWHERE}"
        )
    return FileError(f"Nobody can listen on port {port} of {host}: {why}. End what listens there already.")
