"""How a run ends before its time: at which rank a caller has left its loop, and whether it raised there.

Python closes a generator in the same way for both. There are two signs of an exception: where the generator is closed
by hand, as `contextlib.closing` does, it is being handled; where a loop lets go of the generator, its traceback holds
the caller's frame, at the instruction where that stands. A caller that keeps the generator in a variable, and closes it
later or never, shows neither and has broken out.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass, field
from dis import opmap
from inspect import CO_GENERATOR
from pathlib import Path
from types import FrameType, TracebackType

from partsong.core import Round
from partsong.errors import PartyError

RAISING = {opmap["RAISE_VARARGS"], opmap["RERAISE"]}
"""Instructions of `raise`, and of the end of `finally`: an exception that is raised again keeps its traceback."""


@dataclass(frozen=True, slots=True)
class Ending(Round):
    """The end of an asynchronous run at a worker, in which nobody takes part.

    `left_at` is the rank where a caller has broken out of its loop (None: the run has come to its last arrival).
    """

    left_at: int | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """Who iterates over the rounds at this rank; made in the generator, where it begins."""

    rank: int
    handled: BaseException | None = field(default_factory=sys.exception)

    def error(self, leaving: GeneratorExit) -> PartyError | None:
        """What to tell others of a caller that has raised; None if it broke out. Called by the generator itself."""
        raised = leaving.__context__
        if raised is not None and raised is not self.handled:
            return self._told(f"{type(raised).__name__}: {raised}")
        trace = _under_way(sys._getframe(1).f_back)
        return None if trace is None else self._told(f"an exception at {_place(trace)}")

    def _told(self, what: str) -> PartyError:
        return PartyError(
            f"The caller at rank {self.rank} ended the run: its own loop over the rounds raised {what}. Mend it there; "
            "to go on, resume every rank from its last checkpoint."
        )


def _under_way(frame: FrameType | None) -> TracebackType | None:
    """The traceback of an exception that is leaving this frame.

    A frame may also be held by tracebacks of exceptions that it has caught; they tell of other instructions. Generators
    that pass rounds on are closed by an exception too: it is about whoever iterates over them.
    """
    while frame is not None and frame.f_code.co_flags & CO_GENERATOR:
        frame = frame.f_back
    if frame is None:
        return None
    is_raising = frame.f_code.co_code[frame.f_lasti] in RAISING
    traces = (one for one in gc.get_referrers(frame) if isinstance(one, TracebackType))
    return next((one for one in traces if is_raising or one.tb_lasti == frame.f_lasti), None)


def _place(trace: TracebackType) -> str:
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"line {trace.tb_lineno} of {Path(trace.tb_frame.f_code.co_filename).name}"
