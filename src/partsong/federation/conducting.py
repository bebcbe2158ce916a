"""From an experiment to a model: what a command or an app of a transport calls at the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from partsong.core import Round
from partsong.federation.coordinator import Coordinator
from partsong.federation.experiment import Experiment
from partsong.federation.transport import Transport
from partsong.privacy.admission import Roster


def conduct(
    experiment: Experiment,
    transport: Transport,
    folder: Path,
    run: str,
    *,
    roster: Roster | None = None,
    timeout: float = 600.0,
) -> Iterator[Round]:
    """All rounds of an experiment among the sites of a transport, each on the disk before it is handed out.

    Where `folder` holds a part of this run, it goes on from there. A site that is lost or refuses stops it with an
    error, after which it can be resumed, or is left out of the round, as the experiment says.
    """
    n_parties = len(transport.names())
    coordinator = Coordinator(transport, folder, run, experiment.told(), experiment.columns, timeout)
    reduction = experiment.reduction(n_parties, roster)
    return coordinator.run(experiment.program(n_parties), (), experiment.schedule(n_parties), reduction=reduction)
