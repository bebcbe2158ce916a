"""Options to settings: what a fit needs to know, all of it, and nothing that does not matter."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import typer

from partsong.cli.choices import CENTRALISED, GAME, METHODS, RANKED
from partsong.cli.game_settings import GameSettings, complete_game
from partsong.cli.holdings import ALONE, Holdings
from partsong.cli.privacy_settings import FOR_PRIVACY, complete_privacy
from partsong.cli.wording import option
from partsong.errors import ParameterError
from partsong.methods import (
    ALIGNED,
    COMMON_ONLY,
    LOCAL_STEPS,
    MOST_ROUNDS,
    ONE_ROUND,
    PRIVATE_ROUNDS,
    alignment_for,
    start_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """The command line of `partsong fit`, as it was given."""

    data: Path
    output: Path | None
    n_components: int | None
    solver: str
    init: str
    alpha_w: float
    alpha_h: float | None
    l1_ratio: float
    tol: float
    max_iter: int
    time_budget: float | None
    method: str
    align: str | None
    start: str | None
    rounds: int | None
    local_steps: int | None
    faulty: str
    epsilon: float | None
    delta: float | None
    unit: str | None
    row_bound: float | None
    clip: float | None
    noise: str | None
    relation: str | None
    masked: bool
    masked_bound: float | None
    report: Path | None
    engine: str
    sums: str
    sketch: str
    sketch_ratio: float
    play: str
    step: str | float
    step_decay: float | None
    self_play: str
    shrink: float | None
    leader: str | None
    missing: str
    seed: int | None
    dtype: str | None
    threads: int | None
    label: str | None
    transpose: bool
    key: str | None
    header: bool | None
    weights: Path | None
    run_folder: Path | None
    overwrite: bool
    record: bool
    checkpoint: Path | None
    checkpoint_every: float
    resume: Path | None
    as_json: bool
    quiet: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSettings(GameSettings):
    """What decides the numbers of a centralised fit."""

    method: str
    n_components: int
    solver: str
    init: str
    alpha_w: float
    alpha_h: float
    l1_ratio: float
    sketch: str
    sketch_ratio: float
    seed: int
    dtype: str
    tol: float
    max_iter: int
    time_budget: float | None
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FederationSettings(GameSettings):
    """What decides the numbers of a simulated federation."""

    method: str
    n_components: int
    align: str
    start: str
    local_steps: int
    faulty: str
    seed: int
    dtype: str
    tol: float
    rounds: int
    time_budget: float | None
    threads: int
    engine: str
    epsilon: float | None = None
    delta: float | None = None
    unit: str | None = None
    row_bound: float | None = None
    clip: float | None = None
    noise: str | None = None
    relation: str | None = None
    masked: float | None = None

    @property
    def keeps_rounds(self) -> bool:
        """Whether noise was planned for their number."""
        return self.epsilon is not None


Settings = RowSettings | FederationSettings

FOR_FILES = {
    "solver", "init", "alpha_w", "alpha_h", "l1_ratio", "max_iter", "label", "transpose", "key", "header", "weights",
}  # fmt: skip
FOR_PARTS = {"method", "align", "start", "rounds", "local_steps", "faulty", "engine", "record", "report", *FOR_PRIVACY}
FOR_RANKS = {"sums"}
FOR_SKETCHES = {"sketch", "sketch_ratio"}
MAY_CHANGE = {"tol", "max_iter", "rounds", "time_budget", "threads", "engine", "faulty"}
"""What a run that goes on may do otherwise: when to stop, what a fault leads to, and who computes."""


def require_one_process(method: str, solver: str, given: Collection[str]) -> None:
    """Refuse what is for ranks alone, and sketches where nothing is sketched."""
    engines = " or ".join(f"--engine {name}" for name in RANKED)
    if method not in METHODS:
        raise typer.BadParameter(
            f"{method} is for {engines}; a file in one process has --solver.", param_hint="--method"
        )
    foreign = sorted(FOR_RANKS.intersection(given))
    if foreign:
        raise typer.BadParameter(f"only for {engines}.", param_hint=", ".join(map(option, foreign)))
    idle = sorted(FOR_SKETCHES.intersection(given)) if solver != "sanls" else []
    if idle:
        raise typer.BadParameter(f"only for --solver sanls, or {engines}.", param_hint=", ".join(map(option, idle)))


def require_fitting_options(given: Collection[str], is_federation: bool, *, method: str = "", solver: str = "") -> None:
    """Refuse options that mean nothing for this kind of DATA."""
    foreign = sorted((FOR_FILES if is_federation else FOR_PARTS).intersection(given))
    if not foreign:
        return
    flags = ", ".join(map(option, foreign))
    if not is_federation:
        told = "only for a folder that `partsong split` wrote; DATA is a file, another folder, or not there."
        hint = f" Play it by --solver {GAME} if it is a file." if method == GAME else ""
        raise typer.BadParameter(f"{told}{hint}", param_hint=flags)
    hint = ""
    if solver == GAME:
        hint = f" Use --method {GAME} instead."
    elif "max_iter" in foreign:
        hint = " Use --rounds instead."
    elif "weights" in foreign:
        hint = " Weights stay with their party: use `partsong transform` on its file."
    raise typer.BadParameter(f"only for a single file; DATA is a folder of parts.{hint}", param_hint=flags)


def settle(
    options: FitOptions, given: Collection[str], holdings: Holdings, stored: Mapping[str, Any] | None
) -> Settings:
    """All settings: as given, else as `stored` by the run that is resumed, else by default."""
    kind = FederationSettings if holdings.is_federation else RowSettings
    known: dict[str, Any] = {entry.name: getattr(options, entry.name) for entry in fields(kind)}
    known["method"] = options.method if holdings.is_federation else CENTRALISED
    if holdings.is_federation:
        known["masked_bound"] = options.masked_bound
    if stored is not None:
        if (stored["method"] == CENTRALISED) is holdings.is_federation:
            raise _another_run(options.resume, [f"method ({stored['method']} there, {known['method']} here)"])
        inherited = known.keys() & stored.keys() - set(given) - {"time_budget"}
        known |= {name: stored[name] for name in inherited}
    return kind(**_completed(known, given, holdings))


def _completed(known: dict[str, Any], given: Collection[str], holdings: Holdings) -> dict[str, Any]:
    from partsong import threads
    from partsong.settings import rank_of
    from partsong.streams import fresh_seed

    rows, columns = holdings.shape
    is_private = known.get("epsilon") is not None
    known["n_components"] = rank_of(known["n_components"], (columns if is_private else rows, columns))
    known["seed"] = fresh_seed() >> 32 if known["seed"] is None else known["seed"]
    known["dtype"] = known["dtype"] or holdings.dtype
    known["threads"] = known["threads"] or threads.available()
    if "alpha_h" in known and known["alpha_h"] is None:
        known["alpha_h"] = known["alpha_w"]
    complete_game(known, given, is_between_parties=holdings.is_federation)
    if holdings.is_federation:
        _complete_federation(known, given)
    return known


def _complete_federation(known: dict[str, Any], given: Collection[str]) -> None:
    method = known["method"]
    complete_privacy(known, given)
    if known["rounds"] is None:
        known["rounds"] = MOST_ROUNDS if known["epsilon"] is None else PRIVATE_ROUNDS
    known["local_steps"] = known["local_steps"] or LOCAL_STEPS[method]
    if known["start"] == "independent" and method in COMMON_ONLY:
        raise typer.BadParameter(f"{method} has one start for all parties.", param_hint="--start")
    known["start"] = start_of(method, known["start"])
    known["align"] = alignment_for(method, known["align"])
    if "align" in given and method not in ALIGNED:
        only = " and ".join(ALIGNED)
        raise typer.BadParameter(f"only {only} match components; the method is {method}.", param_hint="--align")
    if method in ONE_ROUND:
        if "rounds" in given and known["rounds"] != 1:
            raise typer.BadParameter(f"{method} averages once, so it has one round.", param_hint="--rounds")
        known["rounds"] = 1


def require_same_run(path: Path, context: Mapping[str, Any], settings: Settings, data: Mapping[str, Any]) -> None:
    """Refuse to go on with a checkpoint of other data or settings; all that differs is named."""
    there = context["settings"]
    differences = [
        f"{option(name)} ({there.get(name)} there, {value} here)"
        for name, value in asdict(settings).items()
        if name not in _may_change(settings) and there.get(name) != value
    ]
    differences += _different_data(context["data"], data)
    if differences:
        raise _another_run(path, differences)


def _may_change(settings: Settings) -> set[str]:
    keeps_rounds = isinstance(settings, FederationSettings) and settings.keeps_rounds
    return MAY_CHANGE - {"rounds"} if keeps_rounds else MAY_CHANGE


def run_of(settings: Settings, data: Mapping[str, Any]) -> str:
    """What tells a run from others: a hash of its data and of all settings that it keeps when it goes on."""
    fixed = {name: value for name, value in asdict(settings).items() if name not in MAY_CHANGE}
    return hashlib.sha256(json.dumps([fixed, data], sort_keys=True).encode()).hexdigest()


def _another_run(path: Path | None, differences: list[str]) -> ParameterError:
    return ParameterError(
        f"{path}: this checkpoint belongs to another run; these differ: {', '.join(differences)}. "
        "Give the same data and settings, or start anew without --resume."
    )


def _different_data(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    if set(there) != set(here):
        return [f"parties ({', '.join(there)} there, {', '.join(here)} here)"]
    return [
        f"data ({'' if party == ALONE else f'{party}: '}other {name.replace('_', ' ')})"
        for party, print_of in here.items()
        for name, value in print_of.items()
        if there[party].get(name) != value
    ]
