"""A site without a network path to the server answers what it finds in a folder that both reach, or that is carried."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from partsong.consortium.locking import held
from partsong.consortium.site_folder import SiteFolder
from partsong.engines.files import Mailbox
from partsong.federation.signatures import signer, verifier

POLL = 0.5


def answer_in(drop: Path, site: SiteFolder, tell: Callable[[str], None]) -> None:
    """Until it is told to stop; tells a word on each file."""
    mailbox = Mailbox(drop, site.site, signer(site.secret(), site.site), verifier(site.coordinator))
    with held(site.path / "node.lock", "The node of this site runs already"):
        for word in mailbox.serve(site.answering(), math.inf, POLL):
            tell(word)
