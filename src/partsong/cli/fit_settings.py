"""Options to settings: what a fit needs to know, all of it, and nothing that does not matter."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from partsong import methods
from partsong.cli.choices import (
    AT_ONCE,
    CENTRALISED,
    GAME,
    MASKED_BOUND,
    METHODS,
    MISSING,
    NOISES,
    PLAYS,
    RANKED,
    RELATIONS_OF,
    SELF_PLAYS,
    SHRINK,
    UNITS,
    is_game,
)
from partsong.cli.inputs import Holdings
from partsong.console.output import option
from partsong.core import runtime as threads
from partsong.core.parameters import read_settings
from partsong.errors import ParameterError
from partsong.training.distributed_settings import GAME_DEFAULTS, IGNORE, SAFE, GameSettings

if TYPE_CHECKING:
    from partsong.methods.privacy_request import Privacy
    from partsong.methods.registry import Method


# ---- game settings ----------------------------------------------------------------------------------------------
#
# A game from the command line: which of its options need each other, and what is said of it afterwards.

FOR_GAMES = {"play", "step", "step_decay", "self_play", "shrink", "leader", "missing"}
PENALTIES = ("alpha_w", "alpha_h", "l1_ratio")
DEFAULTS = {**GAME_DEFAULTS, "missing": MISSING[0]}


def complete_game(known: dict[str, Any], given: Collection[str], *, is_between_parties: bool) -> None:
    """Settings of the game that was asked for, or None for each; refuses those that make no sense."""
    is_played = known.get("solver") == GAME or is_game(known["method"])
    require_game(known, given, is_game=is_played, is_between_parties=is_between_parties)
    if not is_played:
        known |= dict.fromkeys(FOR_GAMES)
        return
    known |= {name: default for name, default in DEFAULTS.items() if known[name] is None}
    known["shrink"] = shrink_of(known)


def shrink_of(known: Mapping[str, Any]) -> float | None:
    """The factor of self-play, where there is any."""
    if known["self_play"] == SELF_PLAYS[0]:
        return None
    return SHRINK if known["shrink"] is None else float(known["shrink"])


def require_game(known: Mapping[str, Any], given: Collection[str], *, is_game: bool, is_between_parties: bool) -> None:
    """Refuse options of games where nobody plays, and those that make no sense together."""
    if not is_game:
        idle = sorted(FOR_GAMES.intersection(given))
        if idle:
            flags = ", ".join(map(option, idle))
            raise typer.BadParameter(
                f"only for games: --solver {GAME} for a file, --method {GAME} for a folder of parts or over ranks.",
                param_hint=flags,
            )
        return
    for name, is_wrong, why in _conflicts(known, given, is_between_parties):
        if is_wrong:
            raise typer.BadParameter(why, param_hint=option(name))


def _conflicts(
    known: Mapping[str, Any], given: Collection[str], is_between_parties: bool
) -> list[tuple[str, bool, str]]:
    """Option, whether it is wrong here, and why."""
    play, missing = known["play"], known["missing"]
    cells = ", ".join(name for name in PLAYS if name not in AT_ONCE)
    penalty = next((name for name in PENALTIES if known.get(name)), PENALTIES[0])
    is_decay_idle = known["step_decay"] is not None and known["step"] in (SAFE, None)
    is_shrink_idle = "shrink" in given and known["self_play"] in (SELF_PLAYS[0], None)
    is_partial = missing == IGNORE and known.get("init") not in (None, "auto", "random")
    return [
        ("step_decay", is_decay_idle, f"needs a number as --step: steps by norms ({SAFE}) set their own pace."),
        ("shrink", is_shrink_idle, f"needs --self-play {' or '.join(SELF_PLAYS[1:])}."),
        (
            "leader",
            known["leader"] is not None and play in AT_ONCE,
            f"for players who meet in pairs; with --play {play} all players of a side move at once.",
        ),
        (
            "play",
            is_between_parties and known["method"] == GAME and play in AT_ONCE,
            f"{play} moves all players at once, which takes all rows in one place. Between parties: {cells}.",
        ),
        (
            "missing",
            is_between_parties and known["method"] != GAME and missing == IGNORE,
            f"only for --method {GAME}.",
        ),
        (penalty, bool(known.get(penalty)), "a game has no penalties. Leave it out; --self-play shapes H instead."),
        ("init", is_partial, "needs all cells, and --missing ignore leaves some out. Say random, or nothing."),
    ]


# ---- privacy settings -------------------------------------------------------------------------------------------
#
# Privacy from the command line: which of its options need each other, and the promise that they make.

ROW, PARTY = UNITS
FOR_NOISE = {"epsilon", "delta", "unit", "row_bound", "clip", "noise", "relation"}
FOR_ROWS, FOR_UPLOADS = {"row_bound"}, {"clip", "noise"}
FOR_PRIVACY = FOR_NOISE | {"masked", "masked_bound"}


def require_privacy(known: Mapping[str, Any], given: Collection[str]) -> None:
    """Refuse options that mean nothing together, before any data are read."""
    for name, is_wrong, why in _privacy_conflicts(known, given):
        if is_wrong:
            raise typer.BadParameter(why, param_hint=option(name))


def complete_privacy(known: dict[str, Any], given: Collection[str]) -> None:
    """Defaults of the promise that is asked for; None for each setting where there is none.

    `masked` becomes the public bound of masked numbers, None where there are no masks.
    """
    require_privacy(known, given)
    bound = MASKED_BOUND if known["masked_bound"] is None else known["masked_bound"]
    is_kept = isinstance(known["masked"], float) and "masked_bound" not in given
    known["masked"] = known["masked"] if is_kept else bound if known["masked"] else None
    del known["masked_bound"]
    if known["epsilon"] is None:
        known |= dict.fromkeys(FOR_NOISE)
        return
    known["tol"] = 0.0
    known["delta"] = 1e-5 if known["delta"] is None else known["delta"]
    known["relation"] = known["relation"] or RELATIONS_OF[known["unit"]][0]
    if known["unit"] == PARTY:
        known["clip"] = 1.0 if known["clip"] is None else known["clip"]
        known["noise"] = known["noise"] or NOISES[0]


def promise_of(settings: FederationSettings) -> Privacy | None:
    """The promise as a value."""
    from partsong.methods.privacy_request import PartyPrivacy, RowPrivacy

    if settings.epsilon is None or settings.delta is None or settings.relation is None:
        return None
    if settings.unit == PARTY:
        clip, kind = settings.clip or 1.0, settings.noise or NOISES[0]
        return PartyPrivacy(settings.epsilon, settings.delta, clip, kind, settings.relation)
    assert settings.row_bound is not None
    return RowPrivacy(settings.epsilon, settings.row_bound, settings.delta, settings.relation)


def _privacy_conflicts(known: Mapping[str, Any], given: Collection[str]) -> list[tuple[str, bool, str]]:
    """Option, whether it is wrong here, and why."""
    method, unit = known["method"], known["unit"]
    if known["epsilon"] is None:
        idle = next(iter(sorted(FOR_NOISE.intersection(given))), "")
        return [(idle, bool(idle), "needs --epsilon: there is no noise without it."), *_masks(known, given)]
    foreign = next(iter(sorted((FOR_UPLOADS if unit == ROW else FOR_ROWS).intersection(given))), "")
    others = ", ".join(RELATIONS_OF.get(unit, ()))
    is_unit_wrong = unit is not None and unit not in methods.method(method).privacy
    is_relation_wrong = known["relation"] is not None and known["relation"] not in RELATIONS_OF.get(unit, ())
    measured = next((name for name in ("time_budget", "tol") if name in given and known[name]), "")
    return [
        ("unit", unit is None, f"about whom is ε? {ROW}: any single row; {PARTY}: all data of a party."),
        ("delta", known["delta"] is not None and known["delta"] >= 1, "δ must be below 1."),
        (foreign, bool(foreign), f"not for --unit {unit}."),
        ("relation", is_relation_wrong, f"--unit {unit} has {others}."),
        ("method", is_unit_wrong, f"--unit {unit} is for {_with_privacy(unit)}, {SENT_BY_UNIT.get(unit, '')}."),
        ("row_bound", unit == ROW and known["row_bound"] is None, "--unit row needs one: the norm of a large row."),
        ("local_steps", unit == ROW and "local_steps" in given, "not for --unit row."),
        (measured, bool(measured), "with --epsilon nothing measured may end a run; give --rounds."),
        *_masks(known, given),
    ]


SENT_BY_UNIT = {ROW: "whose messages are sums over rows", PARTY: "in which each party sends its own H"}


def _with_privacy(unit: str | None) -> str:
    """The methods about which noise can promise something."""
    from partsong.methods.registry import private_methods

    return ", ".join(private_methods(unit or ""))


def _masks(known: Mapping[str, Any], given: Collection[str]) -> list[tuple[str, bool, str]]:
    is_bounded = "masked_bound" in given
    is_alone = known["masked"] and methods.method(known["method"]).traits.asynchronous
    return [
        ("masked_bound", is_bounded and not known["masked"], "needs --masked."),
        ("masked_bound", is_bounded and known["epsilon"] is not None, "not with --epsilon: it follows from it."),
        ("masked", bool(is_alone), f"{known['method']} hears one party at a time, and masks need several."),
    ]


# ---- fit settings -----------------------------------------------------------------------------------------------


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
    method_options: list[str]
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
    align: str | None
    start: str | None
    local_steps: int | None
    method_options: dict[str, Any]
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
FOR_PARTS = {
    "method", "align", "start", "rounds", "local_steps", "method_options", "faulty", "engine", "record", "report",
    *FOR_PRIVACY,
}  # fmt: skip
FOR_RANKS = {"sums"}
FOR_SKETCHES = {"sketch", "sketch_ratio"}
PRIVATE_ROUNDS = 10
"""Rounds by default with --epsilon; noise grows with the root of their number."""
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
            from partsong.training.checkpoint import another_run  # a fit is not imported for its help

            raise another_run(options.resume, [f"method ({stored['method']} there, {known['method']} here)"])
        inherited = known.keys() & stored.keys() - set(given) - {"time_budget"}
        known |= {name: stored[name] for name in inherited}
    return kind(**_completed(known, given, holdings))


def _completed(known: dict[str, Any], given: Collection[str], holdings: Holdings) -> dict[str, Any]:
    from partsong.core.streams import fresh_seed
    from partsong.estimators.validation import rank_of

    rows, columns = holdings.shape
    is_private = known.get("epsilon") is not None
    known["n_components"] = rank_of(known["n_components"], (columns if is_private else rows, columns))
    known["seed"] = fresh_seed() >> 32 if known["seed"] is None else known["seed"]
    known["dtype"] = known["dtype"] or holdings.dtype
    known["threads"] = known["threads"] or threads.available()
    if "alpha_h" in known and known["alpha_h"] is None:
        known["alpha_h"] = known["alpha_w"]
    if holdings.is_federation:
        _spread_options(known, given)
    complete_game(known, given, is_between_parties=holdings.is_federation)
    if holdings.is_federation:
        _complete_federation(known, given)
    return known


NAMED = {"order": "play", "align": "align", "start": "start", "local_steps": "local_steps"}
NAMED |= {name: name for name in ("step", "step_decay", "self_play", "shrink", "leader")}
"""Options of methods that have an option of the command line -> its name."""


def _spread_options(known: dict[str, Any], given: Collection[str]) -> None:
    """Options of the method by name, as plain data; those with an option of their own are as if that were given."""
    told = known["method_options"]
    with refusing("method_options"):
        texts = told if isinstance(told, Mapping) else read_settings(told, option("method_options"))
        parameters = methods.method(known["method"]).parameters_with(texts)
        read = {
            name: parameters[name].read(value) if isinstance(value, str) and name in parameters else value
            for name, value in texts.items()
        }
        if twice := [name for name in read if NAMED.get(name) in given]:
            raise ParameterError(f"{' and '.join(twice)}: there is an option for it, which was given as well.")
        methods.method(known["method"]).parse({**methods.method(known["method"]).required, **read})
    for name in NAMED.keys() & read.keys():
        known[NAMED[name]] = read.pop(name)
    known["method_options"] = read


def _complete_federation(known: dict[str, Any], given: Collection[str]) -> None:
    method = methods.method(known["method"])
    complete_privacy(known, given)
    if known["rounds"] is None:
        known["rounds"] = method.rounds if known["epsilon"] is None else PRIVATE_ROUNDS
    for name in ("local_steps", "start", "align"):
        _complete_option(method, known, name)
    if method.is_one_shot:
        if "rounds" in given and known["rounds"] != 1:
            raise typer.BadParameter(f"{method.name} averages once, so it has one round.", param_hint="--rounds")
        known["rounds"] = 1
    with refusing("method_options"):
        if missing := [name for name in method.required if name not in known["method_options"]]:
            raise ParameterError(f"{method.name} needs {' and '.join(f'{name}=…' for name in missing)}.")


def _complete_option(method: Method, known: dict[str, Any], name: str) -> None:
    """An option of the method: as given, or by default; None where the method does not take it."""
    parameter, value = method.parameters.get(name), known[name]
    if parameter is None and value is not None:
        takers = ", ".join(methods.taking(name, METHODS))
        raise typer.BadParameter(f"only for {takers}; the method is {method.name}.", param_hint=option(name))
    if parameter is not None:
        with refusing(name):
            parameter.parse(parameter.default if value is None else value)
        known[name] = method.value(name, {name: value, **known["method_options"]})


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """Errors of parameters as errors of this option."""
    try:
        yield
    except ParameterError as error:
        raise typer.BadParameter(str(error), param_hint=option(name)) from error


def may_change(settings: Settings) -> set[str]:
    """Settings that a run may be resumed with other values of."""
    keeps_rounds = isinstance(settings, FederationSettings) and settings.keeps_rounds
    return MAY_CHANGE - {"rounds"} if keeps_rounds else MAY_CHANGE


def run_of(settings: Settings, data: Mapping[str, Any]) -> str:
    """What tells a run from others: a hash of its data and of all settings that it keeps when it goes on."""
    fixed = {name: value for name, value in asdict(settings).items() if name not in MAY_CHANGE}
    return hashlib.sha256(json.dumps([fixed, data], sort_keys=True).encode()).hexdigest()
