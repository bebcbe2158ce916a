"""The end of a run at a site: its result is kept, and all that is not needed any more goes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from partsong import threads
from partsong.core import Message
from partsong.federation.data_state import require_same
from partsong.federation.finishing import Ending, is_kept
from partsong.federation.refusals import Denied
from partsong.federation.site_files import Agreed, Attempt
from partsong.federation.site_plan import attempt_in
from partsong.federation.site_work import Answered, Workplace
from partsong.federation.wire import Request
from partsong.federation.word_data import CountedData, HeldData
from partsong.federation.word_site import has_own_counts, keep_vocabulary, vocabulary_in
from partsong.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from partsong.federation.site import Site


def finish(site: Site, request: Request) -> Answered:
    """The run is over, once its result is kept: the last state that counted and the model stay, all else goes."""
    place, counted = site.workplace(request), attempt_in(request.note.get("counted"))
    if place.tally.over not in (None, request.digest):
        raise Denied("over", "The run has ended here before, with another model.")
    agreed = None
    if isinstance(site.data, HeldData):
        agreed = _agreed(site, place, counted, request.body)
    else:
        _keep_result(site, place, request)
    if place.tally.over is None:
        if counted != place.tally.counted and counted in place.files.attempts():
            place = place.counting(counted)
        place = place.ended(request.digest)
    place.files.save_model(request.body)
    if agreed is not None:
        place.files.save_agreed(Agreed(agreed, place.started.experiment, place.started.rows[0]))
    place.files.forget({place.tally.counted} if place.tally.counted else set())
    place.files.forget_replies()
    return site.plain(request, Message({}))


def _agreed(site: Site, place: Workplace, counted: Attempt | None, last: Message) -> Vocabulary:
    """The words, and everybody's counts of them. Whether these can have the site's own in them is a comparison with
    numbers that masks hide: one is answered in a run, which a refusal closes, and none where the run is not allowed any
    more.
    """
    if place.tally.closed is not None:
        raise Denied(place.tally.closed, "This agreement on words was closed here before.")
    place.require_taking_part()
    require_same(site.data, place.started)
    is_here = place.tally.over is None and counted in place.files.attempts()
    agreed = vocabulary_in(place.files, counted if is_here else place.tally.counted, last)
    if not has_own_counts(agreed, site.data.rows):
        place.files.save_tally(replace(place.tally, closed="protocol"), place.plan.source)
        raise Denied(
            "protocol",
            f"The server tells of {agreed.n_documents} documents in all, {site.data.n_rows} of which are here, and of "
            "words in fewer, or more, of them than can be: its counts are not the sums of those that sites have sent. "
            "Ask there. The agreement is closed here; words are agreed on again in a new run.",
        )
    return agreed


def _keep_result(site: Site, place: Workplace, request: Request) -> None:
    """What the people at the site wanted it for; it is theirs, and nothing of it leaves. It is written once."""
    run, started = request.nonce.run, place.started
    folder = (site.results or site.folder / "results") / run
    if place.tally.over is not None and is_kept(folder):
        return
    require_same(site.data, started)
    matrix, columns = site.data.matrix(site.data.order(started.columns)), started.columns
    parties = len(started.layout.parties)
    weighing = site.data.weighing if isinstance(site.data, CountedData) else None
    ending = Ending(run, started.experiment, place.plan.program, parties, matrix, columns, weighing)
    with threads.kernels_on(site.kernel_threads):
        told = ending.keep(folder, request.body)
    if told:
        site.log(request.nonce, "note", told)
    if weighing is not None:
        keep_vocabulary(folder, weighing)
