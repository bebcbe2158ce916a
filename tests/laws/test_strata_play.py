"""Laws of the game between parties: what is sent, what waits, and that it is one game played in another order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from pairwise_masks import PairwiseMasks

from partsong.aggregation.linear import block_span, block_width
from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Message, Outcome, Schedule, Shard
from partsong.core.streams import key, stream
from partsong.data.conversion import as_matrix
from partsong.data.observed import observed
from partsong.engines.local import Parallel, Sequential
from partsong.errors import (
    CompositionError,
    DivergenceError,
    DivergenceWarning,
    ParameterError,
    PartyError,
    UploadError,
)
from partsong.evaluation.equilibrium import equilibrium
from partsong.methods.averaging import LocalAveraging
from partsong.methods.game import FederatedGame
from partsong.solvers.game import (
    ConstantStep,
    DecayingStep,
    Game,
    GameState,
    SafeStep,
    ShrinkOthers,
    ShrinkSmallest,
    initial_weights,
)
from partsong.solvers.game_orders import Alternating, Raster, Shuffled, Simultaneous, Stratified
from partsong.training.loop import StoppingRule, Training, measure, train
from partsong.training.loop import run as run_fit
from partsong.training.result import EmptyModelWarning
from partsong.training.simulation import FederatedFit, SimulationMeasures, finish_with_warnings

K, M = 4, 14
GAMES = {
    "stratified": Game(),
    "sequential": Game(Raster()),
    "random": Game(Shuffled()),
    "constant": Game(Stratified(blocks=3), ConstantStep(0.05)),
    "decaying": Game(Raster(), DecayingStep(0.05)),
    "shaped": Game(self_play=ShrinkOthers(0.9)),
    "led": Game(leader="rows"),
}


def data(rows=60, columns=M, seed=0):
    rng = np.random.default_rng(seed)
    return rng.gamma(0.5, size=(rows, K)) @ rng.gamma(0.5, size=(K, columns)) + 0.1 * rng.random((rows, columns))


def shards_of(X, parties=4, form=as_matrix):
    parts = np.array_split(X, parties)
    return [Shard(f"p{i:02d}", form(part), key(7, f"p{i:02d}")) for i, part in enumerate(parts)]


def run(program, shards, exchanges=8, engine=Sequential(), resume=None, reduction=PlainReduction(), **more):
    return list(engine.run(program, shards, Schedule(exchanges, 3, **more), reduction=reduction, resume=resume))


@pytest.mark.parametrize(("parties", "columns"), [(1, 14), (3, 14), (4, 14), (5, 14), (4, 3), (7, 2)])
def test_traffic_is_the_formula(parties, columns):
    program, shards = FederatedGame(K), shards_of(data(columns=columns), parties)
    width = block_width(parties, columns)
    for done in run(program, shards, 2 * parties, Sequential(record=True)):
        for _, _, message in done.traffic:
            assert message.signature == (
                ("H", (K, width), "float64"),
                ("place", (3,), "int64"),
                ("totals", (6,), "float64"),
            )
            assert message.nbytes == 8 * (K * width + 3 + 6) + 8
        assert set(done.bytes_up.values()) == {8 * (K * width + 9) + 8}
        assert done.bytes_down == 8 * (K * columns + 3 + 2) + 8
        assert {name: array.shape for name, array in done.model.arrays.items()} == {
            "H": (K, columns),
            "turn": (3,),
            "pace": (2,),
        }


def test_nothing_of_rows_or_weights_is_sent():
    shards = shards_of(data())
    rounds = run(FederatedGame(K), shards, 8, Sequential(record=True))
    private = np.concatenate(
        [shard.matrix.X.ravel() for shard in shards]
        + [done.checkpoint.parties[shard.name].W.ravel() for done in rounds for shard in shards]
    )
    for done in rounds:
        for _, _, message in done.traffic:
            sent = np.concatenate([np.asarray(array, np.float64).ravel() for array in message.arrays.values()])
            assert not np.isin(sent[sent != 0], private[private != 0]).any()
        assert not np.isin(done.model["H"], private[private != 0]).any()


@pytest.mark.parametrize("name", GAMES)
def test_engines_agree_to_the_bit_and_resumed_runs_are_uninterrupted(name):
    program, shards = FederatedGame(K, GAMES[name]), shards_of(data())
    whole = run(program, shards, 10)
    for engine in (Sequential(shuffle=5), Parallel(3)):
        for done, other in zip(whole, run(program, shards[::-1], 10, engine), strict=True):
            assert_array_equal(done.model["H"], other.model["H"])
    for middle in (1, 4, 6):
        rest = run(program, shards, 10, resume=whole[middle - 1].checkpoint)
        for done, other in zip(whole[middle:], rest, strict=True):
            assert_array_equal(done.model["H"], other.model["H"])


@pytest.mark.parametrize("form", [as_matrix, observed], ids=lambda f: f.__name__)
def test_a_sweep_between_parties_is_a_sequential_play_of_all_cells(form):
    """Party p plays block (p + s) mod N in exchange s: one after the other, by hand, from the same start."""
    X, parties = data(), 4
    shards, step = shards_of(X, parties, form), ConstantStep(0.05)
    program = FederatedGame(K, Game(Raster(), step))
    Ht = stream(3, "start").random((M, K))
    weights = [initial_weights(shard.matrix, Ht) for shard in shards]
    for done in run(program, shards, 8):
        stratum = done.index % parties
        for p, shard in enumerate(shards):
            span = block_span((p + stratum) % parties, parties, M)
            stood = Game(Raster(), step).sweep(shard.matrix, GameState(weights[p], Ht), 0, columns=span)
            weights[p], Ht = stood.W, stood.Ht
        assert_array_equal(done.model["H"], Ht.T)
        assert program.turn(done.model).ends_round == (stratum == parties - 1)


@pytest.mark.parametrize("order", [Stratified(), Raster(), Simultaneous(), Alternating()], ids=repr)
def test_one_party_plays_the_sweeps_of_a_game(order):
    matrix, game, step = as_matrix(data()), Game(order), SafeStep()
    rounds = run(FederatedGame(K, game), shards_of(data(), 1), 12)
    Ht = stream(3, "start").random((M, K))
    game_state, pace, before = GameState(initial_weights(matrix, Ht), Ht), 1.0, np.inf
    for done in rounds:
        error = matrix.squared_distance(game_state.W, game_state.Ht)
        game_state = game.sweep(matrix, game_state, done.index, pace=pace, residual_norm=np.sqrt(error))
        seen = game_state.squared_error if order.plays_cells else error
        pace, before = step.next_pace(pace, done.index, before, seen), seen
        assert_array_equal(done.model["H"], game_state.Ht.T)
        share = matrix.squared_distance(game_state.W, game_state.Ht) / matrix.squared_norm
        assert done.metrics["relative_error"] == pytest.approx(np.sqrt(share))
        assert done.metrics["objective"] == pytest.approx(share)


def test_repeats_play_a_block_several_times():
    shards = shards_of(data(), 1)
    game = Game(Raster(), ConstantStep(0.05))
    twice = run(FederatedGame(K, game, repeats=2), shards, 3)[-1]
    plain = run(FederatedGame(K, game), shards, 6)[-1]
    assert_array_equal(twice.model["H"], plain.model["H"])
    for bad in (0, 1.5, True):
        with pytest.raises(ParameterError, match="repeats"):
            FederatedGame(K, repeats=bad)


def test_unlike_parties_reach_an_equilibrium_of_all_rows():
    """Steps that were those of a party's own norms would give the rows of each another weight."""
    X = data(60)
    X[:15] *= 30
    shards, program = shards_of(X), FederatedGame(K)
    done = run(program, shards, 4 * 400)[-1]
    W = np.concatenate([done.checkpoint.parties[shard.name].W for shard in shards])
    assert equilibrium(X, W, done.model["H"]).relative_epsilon < 2e-6


def test_columns_without_a_party_wait_and_nothing_runs_away():
    program, shards = FederatedGame(K), shards_of(data())
    absent = {index: frozenset({"p01"}) for index in (1, 2, 5)} | {7: frozenset({"p00", "p02", "p03"})}
    before = None
    for done in run(program, shards, 12, absent=absent):
        if before is not None:
            stratum, missing = done.index % 4, absent.get(done.index, frozenset())
            for p in range(4):
                first, last = block_span((p + stratum) % 4, 4, M)
                stays = f"p{p:02d}" in missing
                same = np.array_equal(done.model["H"][:, first:last], before.model["H"][:, first:last])
                assert same == (stays or first == last)
                if stays:
                    assert done.checkpoint.parties[f"p{p:02d}"] is before.checkpoint.parties[f"p{p:02d}"]
        before = done


def test_a_given_step_is_not_called_too_large_because_somebody_comes_late():
    """The error that the game began with is that of everybody, whenever they began."""
    absent = {index: frozenset({"p02", "p03"}) for index in range(6)}
    program, shards = FederatedGame(K, Game(Raster(), ConstantStep(0.01))), shards_of(data())
    rounds = run(program, shards, 80, absent=absent)
    server = rounds[-1].checkpoint.server
    assert server.squared_norm == pytest.approx(np.square(data()).sum())
    assert server.seen_before < server.first_error


def test_more_parties_than_columns():
    rounds = run(FederatedGame(K), shards_of(data(30, 3), 6), 30)
    first, last = rounds[0].model["H"], rounds[-1].model["H"]
    assert last.shape == (K, 3)
    assert (last >= 0).all()
    assert not np.array_equal(first, last)


@pytest.mark.parametrize("name", ["stratified", "random", "constant", "shaped"])
def test_who_has_no_columns_in_an_exchange_does_not_play(name):
    shards, before = shards_of(data(30, 3), 6), None
    for done in run(FederatedGame(K, GAMES[name]), shards, 18, Sequential(record=True)):
        for sender, _, message in done.traffic:
            first, last = block_span(int(message["place"][0]), 6, 3)
            if first == last:
                assert message["totals"][0] == 0
                if before is not None:
                    assert done.checkpoint.parties[sender].W is before.parties[sender].W
        before = done.checkpoint


def test_masks_would_hide_nothing_and_say_so():
    with pytest.raises(CompositionError, match=r"one party alone.*method='exact'"):
        run(FederatedGame(K), shards_of(data()), reduction=PairwiseMasks())


@pytest.mark.parametrize("order", [Simultaneous(), Alternating()], ids=repr)
def test_all_at_once_takes_all_rows(order):
    with pytest.raises(CompositionError, match=r"needs all rows.*ProjectedGradient"):
        run(FederatedGame(K, Game(order)), shards_of(data()))


def test_nobody_joins_a_game_that_has_begun():
    shards = shards_of(data())
    begun = run(FederatedGame(K), shards[:3], 3)[-1].checkpoint
    with pytest.raises(PartyError, match=r"has 3 blocks of columns, but party 'p03' started with 4|not 4 ×"):
        run(FederatedGame(K), shards, 5, resume=begun)


@dataclass(frozen=True)
class Hostile:
    """A program one of whose parties sends something else."""

    inner: Any
    change: Any

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def local(self, shard, party, model):
        party, message = self.inner.local(shard, party, model)
        arrays = {name: np.array(array) for name, array in message.arrays.items()}
        if shard.name == "p01":
            self.change(arrays)
        return party, Message(arrays, message.weight)


def put(name, place, value):
    def change(arrays):
        arrays[name][place] = value

    return change


HOSTILE = {
    "another's block": (put("place", 0, 0), PartyError, "same block"),
    "no block": (put("place", 0, 4), PartyError, "does not fit"),
    "a negative block": (put("place", 0, -1), UploadError, "negative"),
    "more blocks": (put("place", 1, 10**15), PartyError, "in 4 blocks. Restart"),
    "more columns": (put("place", 2, 10**15), PartyError, "the model has 14 columns in 4 blocks"),
    "other columns": (put("place", 2, 16), PartyError, "the model has 14 columns in 4 blocks"),
    "NaN": (put("H", (0, 1), np.nan), DivergenceError, "NaN"),
    "infinite totals": (put("totals", 0, np.inf), DivergenceError, "infinite"),
    "negative": (put("H", (0, 1), -1.0), UploadError, "negative"),
    "negative totals": (put("totals", 2, -1.0), UploadError, "negative"),
}


@pytest.mark.parametrize("engine", [Sequential(), Parallel(2)], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_uploads_are_refused(name, engine):
    change, error, words = HOSTILE[name]
    with pytest.raises(error, match=words):
        run(Hostile(FederatedGame(K), change), shards_of(data()), engine=engine)


@pytest.mark.parametrize("name", ["NaN", "negative"])
def test_a_party_that_is_left_out_is_absent(name):
    program, shards = FederatedGame(K), shards_of(data())
    before = run(program, shards, 3)[-1].checkpoint
    spoiled = run(Hostile(program, HOSTILE[name][0]), shards, 6, resume=before, on_party_error="skip")
    absent = run(program, shards, 6, resume=before, absent={i: frozenset({"p01"}) for i in (3, 4, 5)})
    for done, other in zip(spoiled, absent, strict=True):
        assert_array_equal(done.model["H"], other.model["H"])
        assert set(done.refused) == {"p01"}


@pytest.mark.parametrize("parties", [1, 3])
@pytest.mark.parametrize("step", [ConstantStep, DecayingStep], ids=lambda s: s.__name__)
@pytest.mark.parametrize("order", [Raster(), Shuffled(), Stratified()], ids=repr)
@pytest.mark.parametrize("eta", [300.0, 1e30])
def test_a_step_too_large_ends_a_run(order, step, parties, eta):
    with pytest.raises(DivergenceError, match="Use a smaller step, or a safe step"):
        run(FederatedGame(K, Game(order, step(eta))), shards_of(100 * data(), parties), 50 * parties)


def test_a_run_away_is_an_outcome():
    """After the first sweep there is a model to keep."""
    task = FederatedGame(K, Game(Shuffled(), ConstantStep(0.1)))
    shards = shards_of(20 * data(), 1)
    rounds = Sequential().run(task, shards, Schedule(20, 3), reduction=PlainReduction())
    training = Training()
    steps = measure(rounds, ends_round=lambda done: task.turn(done.model).ends_round)
    list(train(steps, StoppingRule(0.0), training))
    assert training.outcome is Outcome.DIVERGED
    fit = FederatedFit(task, shards, Schedule(20, 3), StoppingRule(0.0))
    with pytest.warns(DivergenceWarning):
        finish_with_warnings(fit, run_fit(fit))


@pytest.mark.parametrize("order", [Raster(), Shuffled(), Stratified()], ids=repr)
def test_meetings_that_settle_in_noise_are_no_run_away(order):
    """With a constant step the error wanders about where it settles, for as long as one likes, even from a solution."""
    X = data() * (np.random.default_rng(1).random((60, M)) < 0.7)
    shards = shards_of(X, 1)
    for eta in (0.02, 0.1):
        program = FederatedGame(K, Game(order, ConstantStep(eta)))
        done = run(program, shards, 400)[-1]
        settled = done.checkpoint
        again = FederatedGame(K, Game(order, ConstantStep(eta)))
        server, model = again.start_from(done.model["H"].T)
        weights = type(settled.parties["p00"])(0, 1, 5, settled.parties["p00"].W)
        resume = type(settled)(0, {"p00": weights}, server, model)
        assert len(run(again, shards, 100, resume=resume)) == 100


@pytest.mark.parametrize("parties", [1, 3])
@pytest.mark.parametrize("step", [SafeStep(), ConstantStep(1e-3)], ids=repr)
def test_a_collapse_by_self_play_leaves_an_empty_model_and_says_so(step, parties):
    game = Game(step=step, self_play=ShrinkSmallest(0))
    for program in (FederatedGame(1, game), LocalAveraging(1, game=game)):
        shards = shards_of(data(), parties)
        measures = SimulationMeasures(program, shards)
        fit = FederatedFit(program, shards, Schedule(10, 3), StoppingRule(0.0), measures=measures)
        with pytest.warns(EmptyModelWarning):
            finish_with_warnings(fit, run_fit(fit))


def test_nothing_at_all_is_no_collapse():
    rounds = run(FederatedGame(K), [Shard("p00", as_matrix(np.zeros((5, 4))))], 5)
    assert not np.isnan(rounds[-1].model["H"]).any()


@pytest.mark.parametrize("name", ["stratified", "random", "constant", "shaped"])
def test_consensus_of_a_game_is_play_and_the_mean(name):
    shards, game, steps = shards_of(data(), 3), GAMES[name], 3
    program = LocalAveraging(K, game=game, steps=steps)
    assert isinstance(program, LocalAveraging)
    Ht, own, paces = stream(3, "start").random((M, K)), {}, {}
    for done in run(program, shards, 3):
        mean = np.zeros((K, M))
        for shard in shards:
            W = own.get(shard.name)
            W = program.solver.solve_rows(shard.matrix, Ht) if W is None else W
            game_state, pace, before = GameState(W, Ht), paces.get(shard.name, 1.0), np.inf
            for i in range(done.index * steps, done.index * steps + steps):
                draw = stream(shard.secret, "play", shard.name, i)
                game_state = game.sweep(shard.matrix, game_state, i, pace=pace, generator=draw)
                pace, before = game.step.next_pace(pace, i, before, game_state.squared_error), game_state.squared_error
            own[shard.name], paces[shard.name] = game_state.W, pace
            mean += shard.matrix.shape[0] * game_state.Ht.T / len(data())
        Ht = np.ascontiguousarray(mean.T)
        assert_allclose(done.model["H"], mean, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("order", [Raster(), Stratified(), Simultaneous()], ids=repr)
def test_consensus_of_a_game_with_too_large_a_step_ends(order):
    with pytest.raises(DivergenceError, match="Use a smaller step"):
        run(LocalAveraging(K, game=Game(order, ConstantStep(1e9)), steps=60), shards_of(data(), 3))


def test_a_game_has_neither_sketch_nor_pull():
    from partsong.solvers.coupling import ProximalTerm

    with pytest.raises(CompositionError, match="no proximal term"):
        LocalAveraging(K, game=Game(), coupling=ProximalTerm(0.1))
