"""From an experiment to a model: what a command or an app of a transport calls at the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from partsong.core import Round
from partsong.errors import ParameterError
from partsong.federation.arrivals_record import ArrivalsJournal
from partsong.federation.asynchronous import AsynchronousCoordinator
from partsong.federation.coordinator import Coordinator
from partsong.federation.experiment import Experiment
from partsong.federation.record import Journal, Record
from partsong.federation.transport import Transport
from partsong.federation.word_agreement import AgreeingFirst
from partsong.privacy.admission import Roster


def conduct(
    experiment: Experiment,
    transport: Transport,
    folder: Path,
    run: str,
    *,
    roster: Roster | None = None,
    timeout: float = 600.0,
    serials: Path | None = None,
) -> Iterator[Round]:
    """All rounds of an experiment among the sites of a transport, each on the disk before it is handed out.

    Where `folder` holds a part of this run, it goes on from there. A site that is lost or refuses stops it with an
    error, after which it can be resumed, or is left out of the round, as the experiment says. A round of an
    asynchronous method is one arrival. `serials`: a file for all runs of a federation, by which a site that was
    restored from an older copy is noticed in a new run as well.
    """
    n_parties = len(transport.names())
    coordinator = coordinator_of(experiment, transport, folder, run, timeout=timeout, serials=serials)
    reduction = experiment.reduction(n_parties, roster)
    return coordinator.run(experiment.program(n_parties), (), experiment.schedule(n_parties), reduction=reduction)


def coordinator_of(
    experiment: Experiment,
    transport: Transport,
    folder: Path,
    run: str,
    *,
    timeout: float,
    serials: Path | None = None,
) -> Coordinator | AsynchronousCoordinator | AgreeingFirst:
    """The engine for an experiment: with rounds that all sites share, or with arrivals; over texts, after words."""
    own, rule = (transport, folder, run, experiment.told(), experiment.columns, timeout), experiment.text_rule
    if experiment.is_asynchronous:
        budget, tol = experiment.time_budget, experiment.tol
        arrivals = AsynchronousCoordinator(*own, time_budget=budget, tol=tol, serials=serials)
        return arrivals if rule is None else AgreeingFirst(arrivals, rule)
    if ArrivalsJournal(folder).path.exists():
        raise ParameterError(f"{folder} holds an asynchronous run. Take another folder.")
    rounds = Coordinator(*own, serials=serials)
    return rounds if rule is None else AgreeingFirst(rounds, rule)


def has_begun(folder: Path) -> bool:
    """Whether a site has answered the start of the run in the server's folder, or that of its agreement on words."""
    found = [record for record in (record_in(folder), Journal(folder / "words").load()) if record is not None]
    return any(record.started or record.outside or record.index for record in found)


def record_in(folder: Path) -> Record | None:
    """A run as it stands in the server's folder, of either kind; None where none has begun."""
    return ArrivalsJournal(folder).load() or Journal(folder).load()
