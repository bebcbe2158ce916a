"""A run of arrivals that has ended before its last one, by `time_budget` or `tol`: its sites have closed it."""

from __future__ import annotations

from partsong.consortium.run_files import result_in
from partsong.consortium.run_place import RunPlace
from partsong.errors import ParameterError
from partsong.federation.arrivals_record import Ongoing
from partsong.federation.record import Record


def require_not_ended(place: RunPlace, record: Record, arrivals: int) -> None:
    """Refuse to go on with such a run of so many `arrivals`; one that was broken off may go on, with other ends too.

    Where sites have not heard the end, they are told again, and no more.
    """
    if not isinstance(record, Ongoing) or not place.result.exists():
        return
    arrived = record.index - len(record.faults)
    if arrived >= arrivals:
        return
    if record.without_result:
        return
    if result_in(place)["status"] == "done":
        raise ParameterError(
            f"Run {place.name!r} is over: it has ended by time_budget or tol after {arrived} of {arrivals} "
            f"arrivals, and its sites have its model and answer no more of it. The model is {place.model}. To go on "
            "for longer, begin a new run under another --name, with a larger time_budget or a smaller tol."
        )
