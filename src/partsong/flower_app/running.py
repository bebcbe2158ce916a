"""An experiment at the server, over Flower or over files: rounds, progress, and an end that is written down."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from partsong.consortium.run_files import settings_in
from partsong.consortium.run_place import TIMEOUT
from partsong.consortium.server_folder import RunPlace, ServerFolder
from partsong.consortium.toml_text import write
from partsong.engines.flower import Flower
from partsong.errors import FileError, ParameterError
from partsong.federation.arrivals_record import Ongoing
from partsong.federation.columns import labels_of
from partsong.federation.conducting import coordinator_of, record_in
from partsong.federation.early_checks import out_of_memory, require_room, require_together
from partsong.federation.experiment import Experiment
from partsong.federation.record import Record
from partsong.federation.site_plan import Plan, plan_of
from partsong.federation.transport import Transport
from partsong.federation.ways_on import NOT_IN
from partsong.federation.word_progress import FILE as STEPS
from partsong.flower_app.progress_file import Lines, ProgressFile
from partsong.flower_app.waiting import FILE as WAITING
from partsong.flower_app.waiting import Telling, WaitingLines
from partsong.io.model_file import Model, save_model
from partsong.io.provenance import now, package_versions

FEDERATION = "PARTSONG_FEDERATION"
"""The variable in which `serve` tells its children where the federation's folder is."""

Told = dict[str, Any]
Tell = Callable[[Mapping[str, Any]], None]


def _quiet(told: Mapping[str, Any]) -> None:
    """Rounds are in a file as well."""


def run_experiment(grid: Any, name: str) -> None:
    """The named run in the federation of this process; it goes on where it was left."""
    if FEDERATION not in os.environ:
        raise ParameterError("This is for the server of a federation: partsong federation serve.")
    server = ServerFolder.at(Path(os.environ[FEDERATION]))
    run_over(lambda: server.signed(Flower(grid, nodes_of(server))), server, server.known_run(name))


def run_over(opened: Callable[[], Transport], server: ServerFolder, place: RunPlace, tell: Tell = _quiet) -> Told:
    """A run over a transport, with an end that is written down; it goes on where it was left."""
    with _held(place):
        began = time.perf_counter()
        steps = Lines.to_come(place.state / "words" / STEPS)

        def tell_steps() -> None:
            for line in steps.new():
                tell(line)

        def tell_waiting(line: Mapping[str, Any]) -> None:
            with suppress(OSError):  # it is for people alone, and no reason to end a run
                WaitingLines(place.state / WAITING).note(line)
            tell(line)

        try:
            told = _within_memory(Telling(opened(), tell_waiting, tell_steps), server, place, tell)
        except Exception as error:
            tell_steps()
            failed = {"status": "failed", "type": type(error).__name__, "error": str(error)}
            _write_json(place.result, {**failed, "notes": list(getattr(error, "__notes__", ()))})
            raise
        told = {"status": "done", **told, "seconds": round(time.perf_counter() - began, 3)}
        _write_json(place.result, told)
        return told


def nodes_of(server: ServerFolder) -> dict[str, int]:
    """The node of every site; ParameterError where one was not registered."""
    nodes = {site: server.node_of(site) for site in server.cards()}
    lacking = sorted(site for site, node in nodes.items() if node is None)
    if lacking:
        raise ParameterError(
            f"No node is registered for {', '.join(lacking)}. Admit their cards while the server runs."
        )
    return {site: node for site, node in nodes.items() if node is not None}


def plan_for(experiment: Experiment, server: ServerFolder) -> Plan:
    """Program and reduction, with the federation's roster; ParameterError where they cannot be run here."""
    require_room(experiment.rank)
    roster = dict(server.roster().keys)
    plan = plan_of(experiment.told(), len(roster), roster)
    require_together(experiment, plan, tuple(sorted(roster)))
    return plan


def _within_memory(transport: Transport, server: ServerFolder, place: RunPlace, tell: Tell) -> Told:
    try:
        return _finished(transport, server, place, tell)
    except MemoryError as error:
        raise out_of_memory(Experiment.read(place.experiment)) from error


def _finished(transport: Transport, server: ServerFolder, place: RunPlace, tell: Tell) -> Told:
    experiment, settings = Experiment.read(place.experiment), settings_in(place)
    timeout = float(settings.get("timeout", TIMEOUT))
    coordinator = coordinator_of(
        experiment, transport, place.state, place.name, timeout=timeout, serials=server.serials
    )
    plan = plan_for(experiment, server)
    schedule = replace(experiment.schedule(len(transport.names())), rounds=plan.exchanges)
    progress = ProgressFile(place.progress, plan.exchanges)
    progress.catch_up(record_in(place.state))
    for done in coordinator.run(plan.program, (), schedule, reduction=plan.reduction):
        tell(progress.note(done))
    record = record_in(place.state)
    if record is None:
        raise FileError(f"{place.state} holds no run after its end. Check the disk.")
    save_model(place.model, model_of(experiment, plan, record, settings.get("names", ())))
    return told_of(record)


def model_of(experiment: Experiment, plan: Plan, record: Record, public: Sequence[str] = ()) -> Model:
    """H as the server knows it: columns by hashes, where their names are not public; errors and shares sites know."""
    program: Any = plan.program
    settings = {**experiment.told(), "privacy": dict(experiment.privacy), "parties": len(record.layout.parties)}
    settings = {name: value for name, value in settings.items() if value is not None}
    H = np.ascontiguousarray(np.asarray(program.components(record.server)))
    names = labels_of(record.columns, record.run, public)
    return Model(H, names, settings, experiment.seed, None, None, now(), package_versions())


def told_of(record: Record) -> dict[str, Any]:
    """How a run went: who missed which round, or in which order sites were heard, which is what it takes to repeat it
    in one process, and how often what came of whom could not be used; which sites have no result of it, and why.
    """
    heard: dict[str, Any] = {}
    if isinstance(record, Ongoing):
        faulty = Counter(record.order[at] for at in record.faults)
        heard = {"arrivals": list(record.order), "faulty": dict(sorted(faulty.items()))}
    never_started = {name: NOT_IN for name in record.layout.parties if name not in record.started}
    return {
        **heard,
        "run": record.run,
        "rounds": record.index,
        "parties": list(record.layout.parties),
        "absent": {str(index): sorted(names) for index, names in record.absent().items()},
        "silent": {str(index): dict(names) for index, names in record.silent().items()},
        "without_result": {**never_started, **record.without_result},
    }


@contextmanager
def _held(place: RunPlace) -> Iterator[None]:
    """One process at a time works on a run; the lock ends with the process, however it ends."""
    from partsong.consortium.locking import held

    with held(place.lock, f"Run {place.name!r} is being worked on by another process."):
        yield


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write(path, json.dumps(content, indent=2) + "\n")
