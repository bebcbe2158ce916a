"""What Flower runs at a site: bytes in, bytes out. Which site it is, is in the node's own configuration."""

from __future__ import annotations

import traceback
from functools import cache
from pathlib import Path
from typing import Any

from flwr.clientapp import ClientApp

from partsong.federation.setup.site_folder import SiteFolder
from partsong.federation.signing import SignedSite
from partsong.federation.site.state import write_down
from partsong.federation.transports.flower import answer_to, content_of

app = ClientApp()


@cache
def party_in(folder: Path) -> SignedSite:
    """The party in a site's folder, with the data and keys that it had when this process first asked for it."""
    return SiteFolder.at(folder).answering()


@app.query("partsong")
def answer(message: Any, context: Any) -> Any:
    """Ask the party in the site's folder. Flower would send the text of an error to the server, so it stays here."""
    folder = Path(str(context.node_config["site"]))
    try:
        return answer_to(message, party_in(folder)(content_of(message)))
    except Exception:
        write_down(folder / "state", "failed", traceback.format_exc())
    raise RuntimeError("see the log of the site")
