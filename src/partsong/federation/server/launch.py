"""Run an experiment at the server: over any transport, and as a run of a federation with progress and result."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from partsong import methods
from partsong.core.interfaces import Layout, Message, Reducible, Reduction, Round, Schedule
from partsong.core.runtime import physical_memory
from partsong.engines.upload_checks import check_compatibility
from partsong.errors import CompositionError, DataError, FileError, ParameterError
from partsong.federation.columns import labels_of
from partsong.federation.experiment import Experiment, TextRule
from partsong.federation.locks import held
from partsong.federation.server.coordinator import Coordinator
from partsong.federation.server.progress import (
    AGREEMENT,
    STEPS,
    WAITING,
    ProgressFile,
    Report,
    ReportingTransport,
    append_line,
    append_step,
)
from partsong.federation.server.state import ArrivalsJournal, AsyncRunState, Journal, RunState
from partsong.federation.setup.server_folder import RunPlace, ServerFolder, forget_failure, settings_in
from partsong.federation.signing import bind_context, vocabulary_context
from partsong.federation.site.plan import Plan, PlanBuilder, build_plan
from partsong.federation.texts import SUFFIX
from partsong.federation.transports.base import Transport
from partsong.federation.transports.flower import FlowerTransport
from partsong.federation.wire import NEVER_STARTED, RUN_NAME
from partsong.io.model_file import Model, now, package_versions, save_model
from partsong.io.write import write_text
from partsong.methods.moment import MomentProgram, bound_verdict, verdict
from partsong.secure_aggregation.messages import Roster
from partsong.topics.agreement.protocol import MOST_EXCHANGES, secure_sum_for_words
from partsong.topics.fitting import require_words
from partsong.topics.shared_vocabulary import FEWEST_MASKED

FEDERATION = "PARTSONG_FEDERATION"
"""Environment variable by which `serve` passes the federation's folder to its child processes."""

RunSummary = dict[str, Any]


def run_experiment(
    experiment: Experiment,
    transport: Transport,
    folder: Path,
    run: str,
    *,
    roster: Roster | None = None,
    timeout: float = 600.0,
    pause: float = 5.0,
    serials: Path | None = None,
    absent: Mapping[int, frozenset[str]] = MappingProxyType({}),
    build: PlanBuilder = build_plan,
    tell: Report = lambda line: None,
) -> Iterator[Round]:
    """Run an experiment on the sites of a transport. Each round is on disk before it is yielded.

    If `folder` holds a part of this run, it is resumed. A site that is lost or refuses stops the run with an error,
    after which it can be resumed, or misses the round, as `experiment.on_party_error` says. A round of an asynchronous
    method is one arrival; a site that refuses is asked again after `pause` seconds. `serials` is a file for all runs of
    a federation, by which a site that was restored from an older backup is detected in later runs too. `absent` names
    sites that are not asked in a round, `build` makes program and reduction as each site does, and `tell` receives a
    line for each step of an agreement on words.
    """
    n_parties, rule = len(transport.names()), experiment.text_rule
    experiment = decided(experiment, n_parties, folder)
    plan = build(experiment.to_dict(), n_parties, roster)
    schedule = replace(experiment.schedule(n_parties), rounds=plan.exchanges, absent=absent)
    coordinator = Coordinator(transport, folder, run, experiment.to_dict(), timeout, serials)
    if (Journal if experiment.is_asynchronous else ArrivalsJournal)(folder).path.exists():
        kind = "a synchronous" if experiment.is_asynchronous else "an asynchronous"
        raise ParameterError(f"{folder} holds another run: {kind} run. Choose another folder.")
    reduction = plan.reduction
    if rule is not None:
        reduction = agree_on_vocabulary(coordinator, rule, plan, schedule.seed, tell)
    if experiment.is_asynchronous:
        budget, tol = experiment.time_budget, experiment.tol
        yield from coordinator.arrivals(plan.program, schedule, reduction, pause=pause, time_budget=budget, tol=tol)
    else:
        yield from coordinator.rounds(plan.program, schedule, reduction)


def decided(experiment: Experiment, n_parties: int, folder: Path) -> Experiment:
    """The experiment with the mechanism of the run in this folder, or, before it has started, of public numbers."""
    if experiment.privacy.get("mechanism") != "auto":
        return experiment
    record = load_run_state(folder)
    return experiment.with_mechanism_for(n_parties, None if record is None else record.experiment)


def has_started(folder: Path) -> bool:
    """Whether a site has accepted the start of the run in this folder, or of its agreement on words."""
    found = [record for record in (load_run_state(folder), Journal(folder / AGREEMENT).load()) if record is not None]
    return any(record.started or record.restarted or record.index for record in found)


def load_run_state(folder: Path) -> RunState | None:
    """Load the state of a run, synchronous or asynchronous; None if none has started."""
    return ArrivalsJournal(folder).load() or Journal(folder).load()


def run_over_flower(grid: Any, name: str) -> None:
    """Start or resume a run over Flower, of the federation that this process serves."""
    if FEDERATION not in os.environ:
        raise ParameterError("This app runs at the server of a federation. Start it with: partsong federation serve")
    server = ServerFolder.at(Path(os.environ[FEDERATION]))
    run_on_transport(lambda: server.signed(FlowerTransport(grid, site_nodes(server))), server, server.known_run(name))


def run_on_transport(
    opened: Callable[[], Transport], server: ServerFolder, place: RunPlace, tell: Report = lambda line: None
) -> RunSummary:
    """Start or resume a run by `run_experiment`, and write progress, model and result into its folder."""
    with held(place.lock, f"Run {place.name!r} is in use by another process"):
        forget_failure(place)
        began = time.perf_counter()

        def tell_waiting(line: Mapping[str, Any]) -> None:
            with suppress(OSError):  # information for people, and no reason to end a run
                append_line(place.state / WAITING, line)
            tell(line)

        try:
            result = _run_to_end(ReportingTransport(opened(), tell_waiting), server, place, tell)
        except Exception as error:
            if isinstance(error, MemoryError):
                error = ParameterError(
                    f"The server has too little memory for rank = {Experiment.read(place.experiment).rank} and the "
                    "agreed columns: it keeps several matrices of rank × columns. Start a run with a smaller rank, or "
                    "use a machine with more memory."
                )
            failed = {"status": "failed", "type": type(error).__name__, "error": str(error)}
            _write_json(place.result, {**failed, "notes": list(getattr(error, "__notes__", ()))})
            raise error
        result = {"status": "done", **result, "seconds": round(time.perf_counter() - began, 3)}
        _write_json(place.result, result)
        return result


def site_nodes(server: ServerFolder) -> dict[str, int]:
    """Return the node of every site; ParameterError if one is not registered."""
    nodes = {site: server.node_of(site) for site in server.cards()}
    lacking = sorted(site for site, node in nodes.items() if node is None)
    if lacking:
        raise ParameterError(
            f"No node is registered for {', '.join(lacking)}. Admit their cards while the server runs."
        )
    return {site: node for site, node in nodes.items() if node is not None}


def build_server_plan(experiment: Experiment, server: ServerFolder) -> Plan:
    """Build program and reduction with the federation's roster.

    ParameterError if k × k numbers, as in W_pᵀW_p or H Hᵀ, exceed this machine's memory, or if the experiment's
    settings are incompatible.
    """
    memory = physical_memory()
    if memory is not None and experiment.rank > (limit := math.isqrt(memory // 8)):
        raise ParameterError(
            f"rank = {str(experiment.rank)[:40]} is too large: rank × rank numbers do not fit into the "
            f"{memory / 2**30:.3g} GiB of memory of this machine, which allow at most {limit}. Use a much smaller "
            "rank, at most the number of columns."
        )
    roster = dict(server.roster().keys)
    plan = build_plan(experiment.to_dict(), len(roster), roster)
    first = methods.method(experiment.method).passes_to
    key, method = ("method", experiment.method) if first is None else (first, str(experiment.options[first]))
    if plan.reduction.hides_uploads and not isinstance(plan.program.aggregation, Reducible):
        is_aligned = "align" in methods.TABLE[method].parameters
        instead = f'{key} = "fnmf-by-sums", which can be masked' if is_aligned else "another method"
        raise ParameterError(
            f'{key} = "{method}" cannot be masked: the server has to see what each site sends. Use {instead}, or '
            "set secure_aggregation = false if every site allows that in its site.toml."
        )
    try:
        # The number of columns is not known yet; whether program and reduction are compatible does not depend on it.
        expected = plan.program.upload_spec(Layout(tuple(sorted(roster)), 1, experiment.seed))
        check_compatibility(plan.program, plan.reduction, expected)
    except CompositionError as error:
        value = "true" if experiment.secure_aggregation else "false"
        raise ParameterError(f'{key} = "{method}" with secure_aggregation = {value}: {error}') from error
    return plan


def _run_to_end(transport: Transport, server: ServerFolder, place: RunPlace, tell: Report) -> RunSummary:
    n_parties, settings = len(server.roster().keys), settings_in(place)
    experiment = decided(Experiment.read(place.experiment), n_parties, place.state)
    plan = build_server_plan(experiment, server)
    progress = ProgressFile(place.progress, plan.exchanges)
    progress.catch_up(load_run_state(place.state))
    own = (experiment, transport, place.state, place.name)
    known: dict[str, Any] = {"roster": server.roster().keys, "timeout": settings.timeout, "serials": server.serials}
    for done in run_experiment(*own, tell=tell, **known):
        tell(progress.append_round(done))
    record = load_run_state(place.state)
    assert record is not None, "a run that has ended is on the disk"
    save_model(place.model, build_model(experiment, plan, record, settings.names))
    return {**summarize_run(record), **describe_release(experiment, plan, record)}


def describe_release(experiment: Experiment, plan: Plan, record: RunState) -> dict[str, Any]:
    """Describe what a private moment was expected to show, and what it has shown; nothing for other runs."""
    program, server = plan.program, record.server
    if not isinstance(program, MomentProgram) or program.traits.release is None or server.spectrum is None:
        return {}
    planned, shown = experiment.privacy_plan(len(record.layout.parties)), program.report(server)
    forecast = None if planned is None or planned.forecast is None else planned.forecast.to_dict()
    of_bound = "" if planned is None else bound_verdict(shown, experiment.privacy.get("n_rows"))
    found = f"{verdict(shown['visible_directions'], program.rank)} {of_bound}".rstrip()
    return {"privacy": {"forecast": forecast, **shown, "verdict": found}}


def build_model(experiment: Experiment, plan: Plan, record: RunState, public: Sequence[str] = ()) -> Model:
    """Build the server's model: H, with hashes for columns whose names are not public. Only sites know errors
    and shares.
    """
    program: Any = plan.program
    settings = {**experiment.to_dict(), "parties": len(record.layout.parties)}
    settings = {name: value for name, value in settings.items() if value is not None}
    H = np.ascontiguousarray(np.asarray(program.components(record.server)))
    names = labels_of(record.columns, record.run, public)
    return Model(H, names, settings, experiment.seed, None, None, now(), package_versions())


def summarize_run(record: RunState) -> dict[str, Any]:
    """Summarize a run: what is needed to repeat it in one process, and which sites have no result, and why.

    To repeat it takes who missed which round, or the order of arrivals with the number of failed works of each site.
    """
    arrivals: dict[str, Any] = {}
    if isinstance(record, AsyncRunState):
        faults = Counter(record.order[at] for at in record.faults)
        arrivals = {"arrivals": list(record.order), "faults": dict(sorted(faults.items()))}
    never_started = {name: NEVER_STARTED for name in record.layout.parties if name not in record.started}
    return {
        **arrivals,
        "run": record.run,
        "rounds": record.index,
        "parties": list(record.layout.parties),
        "absent": {str(index): sorted(names) for index, names in record.absent().items()},
        "dropouts": {str(index): dict(names) for index, names in record.dropouts().items()},
        "without_result": {**never_started, **record.without_result},
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


# ---- words of texts -------------------------------------------------------------------------------------------------
#
# In a run over texts, the sites first agree on words, in a run of its own.
#
# FOLDER          the run itself; its columns are the agreed words
# FOLDER/words    the agreement, which can be killed and resumed like any run


def agree_on_vocabulary(coordinator: Coordinator, rule: TextRule, plan: Plan, seed: int, tell: Report) -> Reduction:
    """Let the sites agree on words unless the run has already started; return the run's reduction.

    Sums of the agreement are always masked, over all sites. Masks of the run itself require that all sites received the
    same end of the agreement. `tell` receives the line of each step.
    """
    folder, reduction = coordinator.folder / AGREEMENT, plan.reduction
    if not any(journal(coordinator.folder).path.exists() for journal in (Journal, ArrivalsJournal)):
        _agree(coordinator, folder, rule, plan, seed, tell)
    if not reduction.hides_uploads:
        return reduction
    agreed = Journal(folder).load()
    if agreed is None:
        raise FileError(
            f"{folder} has no record of the agreement on words, which is needed to verify signatures of masked sums. "
            "Restore it from a backup, or start a new run."
        )
    return bind_context(vocabulary_context(agreed.model["documents"], agreed.model["n_documents"][0]), reduction)


def _agree(coordinator: Coordinator, folder: Path, rule: TextRule, plan: Plan, seed: int, tell: Report) -> None:
    parties, run = len(coordinator.transport.names()), coordinator.name
    if run.endswith(SUFFIX) or not RUN_NAME.fullmatch(f"{run}{SUFFIX}"):
        raise ParameterError(
            f"The name of a run over texts has at most {64 - len(SUFFIX)} letters and does not end in {SUFFIX!r}; "
            f"got {run!r}. Choose another name."
        )
    if parties < FEWEST_MASKED:
        raise ParameterError(
            f"An agreement on words needs masked sums over at least {FEWEST_MASKED} sites, but there are {parties}: "
            "each of two sites would learn the other's counts. Admit more sites, or run over tables."
        )

    def require_enough(last: Message) -> None:
        documents = last["documents"]
        kept = rule.n_kept(documents, int(last["n_documents"][0]))
        if not kept:
            raise DataError(
                f"No word meets the rule: {len(documents)} words are in at least {rule.min_documents} documents at "
                f"each of at least {rule.min_parties} sites, and none of them is in at most {rule.max_df:.0%} of all "
                "documents. Relax the limits in the table words, then start a new run; or check that all sites have "
                "texts of one language."
            )
        require_words(plan.program, kept)

    masks = secure_sum_for_words(parties, getattr(plan.reduction, "roster", None))
    agreement: Any = rule.rounds
    words = replace(coordinator, folder=folder, name=f"{run}{SUFFIX}")
    for done in words.rounds(agreement, Schedule(MOST_EXCHANGES, seed), masks, require_enough):
        tell(append_step(folder / STEPS, done))
