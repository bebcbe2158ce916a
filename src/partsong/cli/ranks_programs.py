"""Settings of a fit over ranks to the program that they run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from partsong import recipes
from partsong.cli.choices import RANK_AVERAGES, RANK_SOLVERS, game_named
from partsong.cli.ranks_reports import Reporting
from partsong.cli.ranks_settings import RankSettings
from partsong.core import Program
from partsong.programs.shared_statistics import SharedStatistics
from partsong.programs.sketch_exchange import SketchExchange
from partsong.programs.strata_play import PlayInStrata
from partsong.settings import solver_of
from partsong.sketch.proportion import Proportion


def program_for(settings: RankSettings, n_rows: int) -> tuple[Program, int]:
    """The program, and its rounds for the iterations asked for."""
    if settings.method in RANK_AVERAGES:
        return _average(settings)
    if settings.is_game:
        made = PlayInStrata(settings.n_components, game_named(settings))
        return made, settings.max_iter * made.exchanges_among(settings.ranks)
    if settings.is_asynchronous:
        return _reported(settings), settings.max_iter
    if not settings.is_sketched:
        solver = solver_of(RANK_SOLVERS[settings.method], settings.alpha_w, settings.alpha_h, settings.l1_ratio)
        return SharedStatistics(settings.n_components, solver), settings.max_iter
    program = SketchExchange(
        settings.n_components,
        sketch=_sketch(settings),
        iterations=settings.max_iter,
        n_rows=n_rows,
    )
    return _penalised(program, settings), program.rounds_for()


def _average(settings: RankSettings) -> tuple[Program, int]:
    """A method in which each rank is a party; an iteration is one of its rounds."""
    made: Any
    if settings.method == "syn-sd":
        made = recipes.syn_sd(settings.n_components)
    else:
        variant = settings.method.removeprefix("syn-ssd-")
        made = recipes.syn_ssd(settings.n_components, variant=variant, sketch=_sketch(settings))
    counts: Any = getattr(made, "rounds_for", None)
    return _penalised(made, settings), settings.max_iter if counts is None else counts(settings.max_iter)


def _reported(settings: RankSettings) -> Reporting:
    """A method in which nobody waits; an iteration is one arrival."""
    if settings.method == "asyn-sd":
        made = recipes.asyn_sd(settings.n_components)
    else:
        made = recipes.asyn_ssd_v(settings.n_components, sketch=_sketch(settings))
    return Reporting(_penalised(made, settings))


def _sketch(settings: RankSettings) -> Proportion:
    return Proportion(recipes.sketches()[settings.sketch or ""], settings.sketch_ratio or 1.0)


def _penalised(program: Any, settings: RankSettings) -> Any:
    given = solver_of("cd", settings.alpha_w, settings.alpha_h, settings.l1_ratio)
    return replace(program, solver=replace(program.solver, penalty_W=given.penalty_W, penalty_H=given.penalty_H))
