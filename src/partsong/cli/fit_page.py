"""`partsong fit --report`: a page on one fit between parties, for whoever holds all parts."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from partsong import __version__, comparison
from partsong.comparison import Contestant, at_parties, findings_of
from partsong.core import Layout, Message, Round
from partsong.data.observed import ObservedMatrix
from partsong.engines.asynchronous import Asynchronous
from partsong.evaluate.findings import Party, Report
from partsong.evaluate.page import percent
from partsong.evaluate.report import write_report
from partsong.fitting import Task
from partsong.running import HistoryRow

if TYPE_CHECKING:
    from partsong.cli.fit_report import Result

MOST_BYTES = 2**30
"""Traffic beyond this is not kept for attacks."""
TOO_MUCH = "More was sent than is kept for attacks. Record it with --record, and run `partsong attack`."
MOST_NUMBERS = 2**22
"""Rows of more numbers than these are not written out to be compared with what attacks find."""
RESUMED = (
    "Attacks take all rounds, and this run went on from a checkpoint. Record all of it with --record, and run "
    "`partsong attack`."
)
NEVER_SENT = "The rows X_p and the weights W_p never left a party."
OPEN = " What was sent in the open can tell of its rows, the more the fewer rows a party has."


@dataclass(slots=True)
class Witness(comparison.Witness):
    """What a run lets be seen on its way, and its messages, as far as they fit into memory."""

    traffic: list[tuple[tuple[str, int, Message], ...]] = field(default_factory=list)
    size: int = 0

    def see(self, done: Round, row: HistoryRow) -> None:
        """Note a round."""
        comparison.Witness.see(self, done, row)
        self.size += sum(message.nbytes for _, _, message in done.traffic)
        if self.size <= MOST_BYTES:
            self.traffic.append(done.traffic)
        else:
            self.traffic.clear()


def write_fit_report(path: Path, task: Task, result: Result, witness: Witness) -> None:
    """What the fit came to, what left each party and what it cost, and what attacks make of it."""
    settings, layout = result.settings, Layout.of(task.shards, task.schedule.seed)
    contestant = Contestant(
        settings.method, "", task.program, task.schedule.rounds, getattr(settings, "start", "common")
    )
    parties = at_parties(task.program, task.shards, result.done, witness)
    found = findings_of(contestant, result.run, result.done, parties, witness)
    is_open = not task.reduction.hides_uploads and task.spending is None
    report = Report(
        title=f"{len(task.shards)} parties, {settings.method}",
        lead=f"A relative error of {percent(found.relative_error)} with {settings.n_components} components: "
        f"{result.ending}.",
        parties=tuple(Party(shard.name, shard.matrix.shape[0], {}) for shard in task.shards),
        methods=(found,),
        image_shape=None,
        feature_names=result.holdings.feature_names,
        settings={name: str(value) for name, value in asdict(settings).items() if value is not None},
        versions={"partsong": __version__, "python": platform.python_version(), "numpy": np.__version__},
        never_sent=NEVER_SENT + (OPEN if is_open else ""),
        privacy=None if task.spending is None else task.spending.told(),
        is_masked=task.reduction.hides_uploads,
        attacks=RESUMED if result.options.resume is not None else _attacks(task, layout, witness),
    )
    write_report(path, report)


def _attacks(task: Task, layout: Layout, witness: Witness) -> Any:
    """What a curious server makes of the traffic; the rows are at hand to say how near it comes."""
    from partsong.evaluate.leakage_parties import RecordedRun, findings

    if witness.size > MOST_BYTES:
        return TOO_MUCH
    is_asynchronous = isinstance(task.engine, Asynchronous)
    run = RecordedRun(witness.traffic, task.program, layout, task.reduction, is_asynchronous)
    truth = {shard.name: _rows(shard.matrix) for shard in task.shards if _is_small(shard.matrix)}
    return tuple(findings(run, truth=truth))


def _is_small(matrix: Any) -> bool:
    """Whether a party's rows may be written out to be compared; of one that has gaps nobody knows them."""
    return matrix.shape[0] * matrix.shape[1] <= MOST_NUMBERS and not isinstance(matrix, ObservedMatrix)


def _rows(matrix: Any) -> Any:
    return matrix.columns(np.arange(matrix.shape[1]))
