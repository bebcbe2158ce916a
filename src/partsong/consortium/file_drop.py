"""Requests and replies through a folder that server and sites both reach, or that is carried between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from partsong.consortium.locking import held
from partsong.consortium.run_place import RunPlace
from partsong.consortium.server_folder import ServerFolder
from partsong.consortium.site_folder import SiteFolder
from partsong.engines.files import Mailbox
from partsong.federation.sealed import Signed
from partsong.federation.signatures import signer, verifier

POLL = 0.5


def requests_in(drop: Path, server: ServerFolder, place: RunPlace) -> Signed:
    """The server's side, for the process that works on a run: if Flower gave it a number, it is Flower's no more."""
    place.number.unlink(missing_ok=True)
    return server.over_files(drop, place.name)


def answer_in(drop: Path, site: SiteFolder, tell: Callable[[str], None]) -> None:
    """A site's side, until it is told to stop; tells a word on each file."""
    mailbox = Mailbox(drop, site.site, signer(site.secret(), site.site), verifier(site.coordinator))
    inbox = drop / site.site / "in"
    if not inbox.is_dir():
        missing = inbox if drop.is_dir() else drop
        tell(f"Waiting for requests in {inbox}; {missing} does not exist yet. Check the path if a run has begun.")
    with held(site.path / "node.lock", "The node of this site runs already"):
        for word in mailbox.serve(site.answering(), math.inf, POLL):
            tell(word)
