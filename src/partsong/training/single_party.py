"""Centralized fits that run a federated program with a single party: sketched steps ("sanls") and games over cells."""

from __future__ import annotations

from dataclasses import replace

from partsong.core import runtime
from partsong.core.interfaces import Checkpoint, Matrix, Schedule, Shard
from partsong.data.observed import ObservedMatrix
from partsong.engines.local import Sequential
from partsong.methods.dsanls import DsanlsPartyState, SketchExchange
from partsong.methods.game import FederatedGame, GamePartyState
from partsong.sketch.crossing import Proportion
from partsong.sketch.kinds import SKETCHES
from partsong.solvers.game import Game, balance, initial_weights
from partsong.solvers.initialization import InitialFactors
from partsong.solvers.observed import ObservedRowSolver
from partsong.solvers.squared_error import SquaredError
from partsong.training.centralized import PARTY, CentralizedConfig, initial_factors
from partsong.training.simulation import FederatedFit

MEASURE_EVERY = 10
"""Sketched iterations between two error measurements, each of which costs a pass over the data."""


def game_fit(matrix: Matrix, config: CentralizedConfig, init: InitialFactors | None) -> FederatedFit:
    """Return the fit of a game; an iteration is a sweep over all cells. Columns without known cells stay zero."""
    assert isinstance(config.solver, ObservedRowSolver)
    assert config.game is not None
    game = Game() if config.game == "game" else config.game
    program = FederatedGame(config.rank, game, config.solver)

    def begin() -> Checkpoint:
        with runtime.limit_kernel_threads(config.threads):
            chosen = init if init is not None else initial_factors(matrix, config)
            Ht = chosen.Ht + 0
            if isinstance(matrix, ObservedMatrix):
                Ht[matrix.empty_columns] = 0
            W = initial_weights(matrix, Ht) if chosen.W is None else chosen.W
            scale = balance(W, Ht) if init is None else 1.0
        server, model = program.start_from(Ht / scale)
        return Checkpoint(0, {PARTY: GamePartyState(0, 1, config.seed, W * scale)}, server, model)

    schedule = Schedule(config.max_iter, config.seed, kernel_threads=config.threads)
    shards = [Shard(PARTY, matrix)]
    return FederatedFit(program, shards, schedule, config.stop, Sequential(), begin=begin, threads=config.threads)


def sketched_fit(matrix: Matrix, config: CentralizedConfig, init: InitialFactors | None) -> FederatedFit:
    """Return the fit of sketched steps; an iteration is two exchanges, and the error is measured every few of them."""
    assert isinstance(config.solver, SquaredError)
    assert config.sketch is not None
    most, rows = config.max_iter, matrix.shape[0]
    sketch = Proportion(SKETCHES[config.sketch], config.sketch_ratio)
    program = SketchExchange(config.rank, config.solver, sketch, most, min(MEASURE_EVERY, most), n_rows=rows)

    def begin() -> Checkpoint:
        with runtime.limit_kernel_threads(config.threads):
            chosen = init if init is not None else initial_factors(matrix, config)
        server, model = program.start_from(chosen.Ht)
        return Checkpoint(0, {PARTY: DsanlsPartyState(config.seed, 1, chosen.W)}, server, model)

    schedule = Schedule(program.exchanges(most, 1), config.seed, kernel_threads=config.threads)
    stop, shards = replace(config.stop, tol=config.stop.tol * program.traits.measured_every), [Shard(PARTY, matrix)]
    return FederatedFit(program, shards, schedule, stop, Sequential(), begin=begin, threads=config.threads)
