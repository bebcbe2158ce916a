"""Names of columns that a site lacks, asked for and told between sites; the server cannot read them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from partsong.core import Message
from partsong.errors import PartsongError
from partsong.federation.consent import roster_among
from partsong.federation.naming import ASK, TELL, Correspondent
from partsong.federation.refusals import Denied
from partsong.federation.site_beginning import require_willing
from partsong.federation.site_files import Started
from partsong.federation.site_work import Answered
from partsong.federation.wire import Request

if TYPE_CHECKING:
    from partsong.federation.site import Site


def exchange_names(site: Site, request: Request) -> Answered:
    """Ask for the names of missing columns, tell them to another site, or read them; the server cannot."""
    nonce, note = request.nonce, request.note
    own = Correspondent(site.name, nonce.run, site.data.secret, site.roster, site.key)
    if nonce.phase == ASK:
        require_willing(site, request)
        return site.plain(request, own.asks())
    if nonce.phase == TELL:
        started = _told_in(site, request)
        own = replace(own, roster=roster_among(site.roster, started))
        names = site.policy.leaving(started.columns)
        with _reading():
            letter = own.tells(str(note.get("for")), request.body, names)
        return site.plain(request, letter)
    with _reading():
        missing = own.reads(str(note.get("from")), request.body)
    site.log(nonce, "columns", f"By {note.get('from')!r}, missing here are: {', '.join(missing) or 'none'}.")
    return site.plain(request, Message({}))


def _told_in(site: Site, request: Request) -> Started:
    """The run in which names may be told to other sites of it: under way here, and allowed now."""
    if not site.policy.tell_names:
        raise Denied("names", "site.toml does not let this site tell names (tell_names).")
    place = site.workplace(request)
    if place.tally.over is not None:
        raise Denied("over", "The run is over here.")
    place.require_taking_part()
    return place.started


@contextmanager
def _reading() -> Iterator[None]:
    """What cannot be a letter is refused as such."""
    try:
        yield
    except Denied:
        raise
    except (PartsongError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise Denied("protocol", f"What was sent is not a letter between sites ({type(error).__name__}).") from error
