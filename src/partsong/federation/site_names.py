"""Names of columns that a site lacks, asked for and told between sites; the server cannot read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from partsong.core import Message
from partsong.federation.naming import ASK, TELL, Correspondent
from partsong.federation.refusals import Denied
from partsong.federation.site_work import Answered
from partsong.federation.wire import Request

if TYPE_CHECKING:
    from partsong.federation.site import Site


def exchange_names(site: Site, request: Request) -> Answered:
    """Ask for the names of missing columns, tell them to another site, or read them; the server cannot."""
    nonce, note = request.nonce, request.note
    own = Correspondent(site.name, nonce.run, site.data.secret, site.roster, site.key)
    if nonce.phase == ASK:
        return site.plain(request, own.asks())
    if nonce.phase == TELL:
        return site.plain(request, own.tells(str(note.get("for")), request.body, _told(site, request)))
    missing = own.reads(str(note.get("from")), request.body)
    site.log(nonce, "columns", f"By {note.get('from')!r}, missing here are: {', '.join(missing) or 'none'}.")
    return site.plain(request, Message({}))


def _told(site: Site, request: Request) -> tuple[str, ...]:
    """Names that may be told to other sites: of agreed columns that may leave, in a run under way here that is allowed
    now.
    """
    if not site.policy.tell_names:
        raise Denied("names", "site.toml does not let this site tell names (tell_names).")
    place = site.workplace(request)
    if place.tally.over is not None:
        raise Denied("over", "The run is over here.")
    place.require_taking_part()
    return site.policy.leaving(place.started.columns)
