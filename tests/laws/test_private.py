"""Laws of private programs: only clipped, noisy, counted releases leave a party; what noisy sums over rows cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import dp_accounting
import numpy as np
import pytest
import scipy.sparse as sp
from dp_accounting import pld
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Layout, Message, Schedule, Shard
from partsong.data.conversion import as_matrix
from partsong.data.observed import ObservedMatrix
from partsong.engines.local import Parallel, Sequential
from partsong.errors import (
    BudgetSpent,
    CompositionError,
    DataError,
    DivergenceError,
    ParameterError,
    PartyError,
    ShapeError,
)
from partsong.evaluation.metrics import relative_error
from partsong.io.state_file import read_state, write_state
from partsong.methods import build
from partsong.methods.averaging import LocalAveraging
from partsong.methods.private import (
    EXACT_SUM_BOUND,
    PrivateAveraging,
    PrivateSums,
    PrivateSumsPartyState,
    _row_norms,
    party_private,
    row_private,
    system_noise,
)
from partsong.privacy.accounting import Budget, Ledger
from partsong.privacy.mechanisms import ClippedGaussian, ClippedLaplace, NoNoise
from partsong.privacy.randomness import InsecureSource
from partsong.privacy.row_level import quantize_model, row_weights
from partsong.secure_aggregation.protocol import SecureSum
from partsong.solvers.game import ConstantStep, Game
from partsong.solvers.squared_error import SquaredError
from partsong.solvers.update_rules import CoordinateDescent

RANK, COLUMNS, ROUNDS = 3, 12, 4
RECIPES = {
    "fedavg": build("fedavg", RANK, local_steps=10),
    "fedprox": build("fedprox", RANK),
    "fnmf": build("fnmf-local", RANK, local_steps=5, align="assignment"),
    "fnmf, common start": build("fnmf-local", RANK, local_steps=5, init_mode="shared", align="assignment"),
    "ipalm once": build("one-shot-ipalm", RANK, local_steps=20),
    "mur once": build("one-shot-mu", RANK, local_steps=20),
    "syn-sd": build("syn-sd", RANK),
    "game": build("game-consensus", RANK),
}


def insecure(party, release):
    return InsecureSource(7, party, release)


def shards(factor=1.0, parties=4, seed=0):
    draw = np.random.default_rng(seed)
    H = draw.random((RANK, COLUMNS)) * (draw.random((RANK, COLUMNS)) < 0.6) + 0.01
    held = [factor * draw.random((10 * (p + 1), RANK)) @ H for p in range(parties)]
    return [Shard(f"p{p}", as_matrix(X), p) for p, X in enumerate(held)]


def private(name, multiplier=1.0, clip=0.5, most=ROUNDS, kind=ClippedGaussian):
    return PrivateAveraging(RECIPES[name], kind(clip, multiplier), most, insecure)


def rounds_of(program, engine=None, rounds=ROUNDS, of=None):
    engine = engine or Sequential(record=True)
    return list(engine.run(program, of or shards(), Schedule(rounds, 1), reduction=PlainReduction()))


@pytest.mark.parametrize("kind", [ClippedGaussian, ClippedLaplace])
@pytest.mark.parametrize("name", RECIPES)
def test_nothing_but_a_noisy_H_leaves_and_the_weight_says_nothing(name, kind):
    for done in rounds_of(private(name, kind=kind)):
        assert done.metrics == {}
        for _, _, message in done.traffic:
            assert set(message.arrays) == {"H"}
            assert message.weight == 1.0
            assert message["H"].shape == (RANK, COLUMNS)
        assert (done.model["H"] >= 0).all()


def test_noise_averages_out_over_parties():
    """Cut off at the party it would not: of many parties with nothing to say the mean is the model they were sent."""
    program = replace(private("fedavg"), mechanism=ClippedGaussian(1e-3, 300.0), source=system_noise)
    shard, layout = shards()[0], Layout.of(shards(), 1)
    _, model = program.start_server(layout)
    party = program.start_party(shard, layout)
    sent = np.mean([program.local(shard, party, model)[1]["H"] for _ in range(200)], axis=0)
    error = float(np.abs(sent - model["H"]).mean())
    assert error < 3 * program.mechanism.sigma / math.sqrt(200)


@pytest.mark.parametrize("name", RECIPES)
def test_models_have_rows_of_norm_one(name):
    for done in rounds_of(private(name)):
        assert_allclose(np.linalg.norm(done.model["H"], axis=1), 1.0, rtol=1e-12)


@pytest.mark.parametrize("name", ["fedavg", "fnmf", "game"])
def test_sequential_and_parallel_agree_to_the_bit(name):
    one, other = rounds_of(private(name)), rounds_of(private(name), Parallel(2))
    assert_array_equal(one[-1].model["H"], other[-1].model["H"])


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_before_the_noise_uploads_are_within_the_radius_whatever_the_data(factor):
    clip = 0.01
    faint = PrivateAveraging(RECIPES["fedavg"], ClippedGaussian(clip, 1e-4), ROUNDS, insecure)
    before = None
    for done in rounds_of(faint, of=shards(factor)):
        if before is not None:
            for _, _, message in done.traffic:
                assert np.linalg.norm(message["H"] - before) <= clip * 1.05
        before = done.model["H"]


def test_two_releases_of_a_party_have_their_own_noise():
    uploads = [m["H"] for done in rounds_of(private("fedavg", 50.0)) for name, _, m in done.traffic if name == "p0"]
    assert len(uploads) == ROUNDS
    assert all(not np.array_equal(a, b) for i, a in enumerate(uploads) for b in uploads[:i])
    again = PrivateAveraging(RECIPES["fedavg"], ClippedGaussian(0.5, 50.0), ROUNDS)
    first, second = (rounds_of(again, rounds=1)[0].traffic[0][2]["H"] for _ in range(2))
    assert not np.array_equal(first, second), "noise from the system is never the same twice, whatever the seed"


def test_a_spent_budget_stops_before_anything_is_computed():
    run = Sequential().run(private("fedavg", most=2), shards(), Schedule(3, 1), reduction=PlainReduction())
    next(run)
    done = next(run)
    assert [party.releases for party in done.checkpoint.parties.values()] == [2] * 4
    with pytest.raises(BudgetSpent, match=r"p0.*budget"):
        next(run)


def test_absent_parties_are_not_charged():
    schedule = Schedule(3, 1, absent={1: frozenset({"p2"})})
    *_, done = Sequential().run(private("fedavg"), shards(), schedule, reduction=PlainReduction())
    assert {name: party.releases for name, party in done.checkpoint.parties.items()} == {
        "p0": 3,
        "p1": 3,
        "p2": 2,
        "p3": 3,
    }


def test_the_ledger_of_a_run_is_that_of_its_releases():
    program = private("fedavg", 4.0)
    assert not program.release.is_secure, "its noise comes from a seed"
    assert party_private(RECIPES["fedavg"], epsilon=1.0, delta=1e-5, rounds=2).release.is_secure
    assert program.release.unit == "party"
    assert program.release.relation == "replace"
    assert Ledger().after(program.release, 10).epsilon(1e-5) == pytest.approx(3.3414, rel=1e-3)


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_the_recipe_spends_its_budget_and_no_more(kind):
    program = party_private(RECIPES["fedavg"], epsilon=2.0, delta=1e-5, rounds=5, kind=kind)
    spent = Ledger().after(program.release, program.max_releases).epsilon(1e-5)
    assert 0.99 * 2.0 <= spent <= 2.0


def test_with_hardly_any_noise_it_is_the_method_itself():
    faint = PrivateAveraging(RECIPES["fedavg"], ClippedGaussian(10.0, 1e-4), 30, insecure)
    found, held = rounds_of(faint, rounds=30), shards()
    error = relative_error(faint.solver, held, faint.components(found[-1].checkpoint.server))
    openly = rounds_of(RECIPES["fedavg"], rounds=30)
    plain = relative_error(faint.solver, held, RECIPES["fedavg"].components(openly[-1].checkpoint.server))
    assert error <= plain + 0.02


def test_a_run_that_goes_on_is_the_run_that_was_not_stopped():
    program, held = private("fnmf"), shards()
    whole = rounds_of(program)
    rest = Sequential().run(program, held, Schedule(ROUNDS, 1), reduction=PlainReduction(), resume=whole[1].checkpoint)
    assert_array_equal(list(rest)[-1].model["H"], whole[-1].model["H"])


def test_what_would_leave_without_noise_is_refused():
    with pytest.raises(CompositionError, match="counts"):
        PrivateAveraging(build("fnmf-by-sums", RANK), ClippedGaussian(1.0, 1.0), 3)
    with pytest.raises(CompositionError, match="no noise"):
        PrivateAveraging(RECIPES["fedavg"], NoNoise(), 3)
    with pytest.raises(ParameterError, match="max_releases must be"):
        PrivateAveraging(RECIPES["fedavg"], ClippedGaussian(1.0, 1.0), 0)


@pytest.mark.parametrize(
    "program", [build("syn-ssd-uv", RANK), build("exact", RANK, local_steps=5), build("game", RANK)]
)
def test_what_is_no_consensus_is_refused(program):
    with pytest.raises(CompositionError, match="not a LocalAveraging program"):
        party_private(program, epsilon=1.0, delta=1e-5, rounds=2)


@pytest.mark.parametrize("spoil", [np.nan, np.inf, -0.1, 1e200, 3.0])
def test_a_model_that_could_make_some_data_fail_is_refused_before_data_are_looked_at(spoil):
    """A server that sends numbers of its choice would learn from who fails, without noise and without being counted."""
    program, held = private("fnmf"), shards()
    _, model = program.start_server(Layout.of(held, 1))
    H = np.array(model["H"])
    H[1, 2] = spoil
    with pytest.raises(PartyError, match="unit norm"):
        program.local(held[0], program.start_party(held[0], Layout.of(held, 1)), Message({**model.arrays, "H": H}))
    with pytest.raises(ShapeError, match="shape"):
        program.local(held[0], program.start_party(held[0], Layout.of(held, 1)), Message({**model.arrays, "H": H[:2]}))


def test_an_error_that_leaves_a_party_holds_no_number_from_its_data():
    """Engines tell everybody why a party is left out; the reason of a game says in which sweep it diverged."""
    bare = LocalAveraging(RANK, game=Game(step=ConstantStep(10.0)))
    held, schedule = [*shards(1e-3)[:2], Shard("tall", as_matrix(1234.5 * shards()[2].matrix.X))], Schedule(1, 1)
    with pytest.raises(DivergenceError, match=r"diverged .*overflow"):
        list(Sequential().run(bare, held, schedule, reduction=PlainReduction()))
    told = set()
    for factor in (1.0, 7.0):
        grown = [*held[:2], Shard("tall", as_matrix(factor * held[2].matrix.X))]
        program = PrivateAveraging(bare, ClippedGaussian(1.0, 1.0), 3, insecure)
        with pytest.raises(DivergenceError, match="only shown at the party") as caught:
            program.local(
                grown[2],
                program.start_party(grown[2], Layout.of(grown, 1)),
                program.start_server(Layout.of(grown, 1))[1],
            )
        assert caught.value.__cause__ is not None
        told.add(str(caught.value))
    assert len(told) == 1


@pytest.mark.parametrize("factor", [1e-250, 1e-160, 1e160, 1e250])
def test_norms_are_right_where_no_float_holds_their_squares(factor):
    H = np.array([[3.0, 4.0], [0.0, 0.0]])
    assert_allclose(_row_norms(factor * H), [5 * factor, 1.0], rtol=1e-12)


K, M, SEED, DELTA = 3, 20, 5, 1e-5


@dataclass(frozen=True)
class Seeded:
    """Noise that comes out the same twice."""

    seed: int = 0

    def __call__(self, party, release):
        return InsecureSource(self.seed, party, release)


class ZeroNoise:
    """A source that must not be asked."""

    def __call__(self, count):
        raise AssertionError("noise was drawn")


def data(rows=300, seed=0):
    rng = np.random.default_rng(seed)
    return rng.gamma(0.5, size=(rows, K)) @ rng.gamma(0.5, size=(K, M))


def longest(X):
    return float(np.linalg.norm(X, axis=1).max())


def shards_of(X, parties=3, form=lambda part: part):
    return [Shard(f"p{i}", as_matrix(form(part))) for i, part in enumerate(np.array_split(X, parties))]


def run(program, shards, rounds, engine=Sequential(record=True), reduction=PlainReduction(), **more):
    return list(engine.run(program, shards, Schedule(rounds, SEED), reduction=reduction, **more))


def error(X, H):
    matrix = as_matrix(X)
    W = SquaredError(CoordinateDescent()).solve_rows(matrix, H.T.copy())
    return math.sqrt(max(0.0, matrix.squared_distance(W, H.T.copy())) / matrix.squared_norm)


def whole_sums(program, X, H):
    """What the noise is added to, in whole units."""
    bounds = program.noise(X.shape[1]).bounds
    rows = bounds.quantize_rows(X)
    W = row_weights(rows, quantize_model("p", H, H.shape), bounds.row_unit, program.row_sweeps)
    return bounds.sums(W, rows)


def distance(program, one, two, n_features=M):
    bounds = program.noise(n_features).bounds
    gram = bounds.gram_scale * bounds.weight_unit**2 * (one.gram - two.gram)
    cross = bounds.weight_unit * bounds.row_unit * (one.cross - two.cross)
    return math.hypot(float(np.linalg.norm(gram)), float(np.linalg.norm(cross)))


def unit_rows(seed, k=K, m=M):
    H = np.random.default_rng(seed).gamma(0.5, size=(k, m)) + 1e-3
    return H / np.linalg.norm(H, axis=1, keepdims=True)


@pytest.mark.parametrize("parties", [1, 4])
def test_with_little_noise_it_is_as_good_as_the_pooled_factorization(parties):
    X = data(2000)
    X = X / np.linalg.norm(X, axis=1, keepdims=True) + 0.05 * np.random.default_rng(1).random(X.shape)
    program = row_private(K, epsilon=1000.0, row_bound=1.5, rounds=40, source=Seeded())
    H = run(program, shards_of(X, parties), 40)[-1].model["H"]
    pooled = run(build("exact", K, local_steps=5), shards_of(X, 1), 60)[-1].model["H"]
    assert longest(X) < 1.5
    assert error(X, H) <= 1.02 * error(X, pooled)


@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 30),
    row_bound=st.sampled_from([0.05, 1.0, 7.3, 100.0]),
    weight_bound=st.sampled_from([None, 0.1]),
)
def test_taking_a_row_away_moves_the_sums_by_no_more_than_the_radius(seed, rows, row_bound, weight_bound):
    rng = np.random.default_rng(seed)
    X = rng.gamma(0.3, size=(rows, M)) * 10.0 ** rng.integers(-3, 3, size=(rows, 1))
    program = PrivateSums(K, 1.0, row_bound, weight_bound)
    H, gone = unit_rows(seed), int(rng.integers(rows))
    moved = distance(program, whole_sums(program, X, H), whole_sums(program, np.delete(X, gone, axis=0), H))
    assert moved <= program.noise(M).bounds.radius


@given(seed=st.integers(0, 10**6), rows=st.integers(2, 40))
def test_weights_of_a_row_do_not_change_by_a_bit_with_the_rows_beside_it(seed, rows):
    rng = np.random.default_rng(seed)
    bounds = PrivateSums(K, 1.0, 2.0).noise(M).bounds
    whole, H = bounds.quantize_rows(rng.gamma(0.3, size=(rows, M))), quantize_model("p", unit_rows(seed), (K, M))
    together = row_weights(whole, H, bounds.row_unit, 5)
    apart = [row_weights(whole[i : i + 1], H, bounds.row_unit, 5) for i in range(rows)]
    assert_array_equal(together, np.vstack(apart))
    order = rng.permutation(rows)
    assert_array_equal(together[order], row_weights(whole[order], H, bounds.row_unit, 5))


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 40), form=st.sampled_from([np.asarray, sp.csr_array]))
def test_sums_are_exactly_what_the_rows_add_one_by_one(seed, rows, form):
    """So that what one row changes is what it adds: of other rows not even the last unit moves."""
    rng = np.random.default_rng(seed)
    X = rng.gamma(0.3, size=(rows, M)) * (rng.random((rows, M)) < 0.6) * 3.0 ** rng.integers(-2, 3, size=(rows, 1))
    program, H = PrivateSums(K, 1.0, 1.0, 0.4), unit_rows(seed)
    whole = whole_sums(program, form(X), H)
    single = [whole_sums(program, form(X[i : i + 1]), H) for i in range(rows)]
    assert_array_equal(whole.gram, sum(one.gram for one in single))
    assert_array_equal(whole.cross, sum(one.cross for one in single))


def test_enough_sweeps_find_the_least_squares_weights():
    X, H = data(50), unit_rows(3)
    bounds = PrivateSums(K, 1.0, 2 * longest(X)).noise(M).bounds
    W = row_weights(bounds.quantize_rows(X), quantize_model("p", H, H.shape), bounds.row_unit, 300)
    exact = SquaredError(CoordinateDescent()).solve_rows(as_matrix(X), H.T.copy())
    np.testing.assert_allclose(W, exact, atol=1e-4 * longest(X))


def test_a_row_far_beyond_the_bound_moves_the_sums_as_little_as_one_at_the_bound():
    X, H = data(40), unit_rows(0)
    program = PrivateSums(K, 1.0, longest(X))
    at, beyond = X.copy(), X.copy()
    at[7] *= longest(X) / np.linalg.norm(X[7])
    beyond[7] = 1000 * at[7]
    without = whole_sums(program, np.delete(X, 7, axis=0), H)
    assert distance(program, whole_sums(program, beyond, H), without) <= program.noise(M).bounds.radius
    # to the last unit of a row that is scaled down by another factor
    assert distance(program, whole_sums(program, beyond, H), whole_sums(program, at, H)) < 1e-3 * longest(X) ** 2


def test_what_leaves_is_the_whole_sums_and_the_noise_of_this_release_and_nothing_else():
    X = data(90)
    program = row_private(K, epsilon=1.0, row_bound=longest(X), rounds=4, source=Seeded())
    shards = shards_of(X)
    rounds = run(program, shards, 4)
    H = program.start_server(Layout.of(shards, SEED))[1]["H"]
    for index, done in enumerate(rounds):
        assert {name for name, _, _ in done.traffic} == {"p0", "p1", "p2"}
        for name, _, sent in done.traffic:
            assert sent.signature == (("cross", (K, M), "int64"), ("gram", (K, K), "int64"))
            assert sent.weight == 1.0
            bare = whole_sums(program, shards[int(name[1])].matrix.X, H)
            noisy = program.noise(M).add_noise(bare, Seeded()(name, index))
            assert_array_equal(sent["gram"], noisy.gram)
            assert_array_equal(sent["cross"], noisy.cross)
            changed = np.concatenate([(sent["gram"] != bare.gram).ravel(), (sent["cross"] != bare.cross).ravel()])
            assert changed.all()
        assert dict(done.metrics).keys() == {"movement"}
        assert set(done.model.arrays) == {"H"}
        H = done.model["H"]


def test_noise_is_fresh_in_every_release_and_has_the_stated_size():
    X = data(30)
    program = PrivateSums(K, 2.0, longest(X))
    shard, H = Shard("p", as_matrix(X)), unit_rows(0)
    noise, bare = program.noise(M), whole_sums(program, X, H)
    state, unit = program.start_party(shard, Layout(("p",), M, SEED)), noise.bounds.weight_unit * noise.bounds.row_unit
    drawn = []
    for _ in range(60):
        state, sent = program.local(shard, state, Message({"H": H}))
        drawn.append((sent["cross"] - bare.cross) * unit)
    assert len({values.tobytes() for values in drawn}) == 60
    assert np.std(drawn) == pytest.approx(noise.sigma, rel=0.06)  # 3600 numbers: five standard deviations
    assert noise.sigma >= 2.0 * noise.bounds.radius


@pytest.mark.parametrize(("epsilon", "rounds"), [(0.5, 3), (3.0, 20)])
def test_the_rounds_cost_what_dp_accounting_says_and_what_was_asked_for(epsilon, rounds):
    program = row_private(K, epsilon=epsilon, delta=DELTA, rounds=rounds, row_bound=1.0)
    ledger = Ledger().after(program.release, rounds)
    accountant = pld.PLDAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(program.noise_multiplier), rounds)
    assert ledger.epsilon(DELTA) == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-3)
    assert 0.999 * epsilon < ledger.epsilon(DELTA) <= epsilon
    assert Budget(epsilon, DELTA).rounds(program.release) == rounds == program.max_releases
    assert (program.release.unit, program.release.relation) == ("row", "add-or-remove")
    assert ledger.is_secure
    assert not Ledger().after(replace(program, source=Seeded()).release).is_secure


@pytest.mark.parametrize("engine", [Sequential(), Parallel(2)])
def test_a_spent_budget_stops_before_the_round_that_would_exceed_it(engine):
    X = data(60)
    program = row_private(K, epsilon=1.0, row_bound=longest(X), rounds=2)
    done = []
    with pytest.raises(BudgetSpent, match="allows 2"):
        done.extend(engine.run(program, shards_of(X), Schedule(5, SEED), reduction=PlainReduction()))
    shard = shards_of(X)[0]
    spent = replace(program, source=lambda party, release: ZeroNoise())
    with pytest.raises(BudgetSpent, match="p0"):
        spent.local(shard, PrivateSumsPartyState(2), Message({"H": np.full((1, 1), np.nan)}))
    with pytest.raises(AssertionError, match="noise was drawn"):
        spent.local(shard, PrivateSumsPartyState(1), Message({"H": unit_rows(0)}))


def test_a_checkpoint_keeps_the_count_and_not_the_rows(tmp_path):
    X = data(60)
    program = row_private(K, epsilon=2.0, row_bound=longest(X), rounds=4, source=Seeded())
    whole = run(program, shards_of(X), 4)
    write_state(tmp_path / "c.psg", whole[1].checkpoint)
    assert (tmp_path / "c.psg").stat().st_size < 30_000
    loaded = read_state(tmp_path / "c.psg")
    assert {name: state.releases for name, state in loaded.parties.items()} == {"p0": 2, "p1": 2, "p2": 2}
    assert all(state.rows is None for state in loaded.parties.values())
    resumed = run(program, shards_of(X), 4, resume=loaded)
    assert_array_equal(resumed[-1].model["H"], whole[-1].model["H"])
    with pytest.raises(BudgetSpent):
        run(program, shards_of(X), 5, resume=whole[-1].checkpoint)


def test_rows_are_brought_to_whole_units_once():
    X = data(20)
    program, shard = PrivateSums(K, 1.0, 1.0), Shard("p", as_matrix(X))
    state = program.start_party(shard, Layout(("p",), M, SEED))
    later, _ = program.local(shard, state, Message({"H": unit_rows(0)}))
    assert later.rows is state.rows
    assert later.releases == 1


def test_engines_and_forms_of_data_give_the_same_bits():
    X = data(120)
    X *= np.random.default_rng(2).random(X.shape) < 0.5
    program = row_private(K, epsilon=3.0, row_bound=longest(X), rounds=5, source=Seeded())
    expected = run(program, shards_of(X), 5)
    for engine, form in [(Parallel(2), np.asarray), (Sequential(), sp.csr_array), (Parallel(2), np.asfortranarray)]:
        others = run(program, shards_of(X, form=form), 5, engine)
        for one, two in zip(expected, others, strict=True):
            assert_array_equal(one.model["H"], two.model["H"])


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_tensors_are_rows_too():
    torch = pytest.importorskip("torch")
    X = data(60)
    program = row_private(K, epsilon=3.0, row_bound=longest(X), rounds=2, source=Seeded())
    expected = run(program, shards_of(X), 2)[-1].model["H"]
    assert_array_equal(run(program, shards_of(X, form=torch.from_numpy), 2)[-1].model["H"], expected)
    sparse = run(program, shards_of(X, form=lambda part: torch.from_numpy(part).to_sparse_csr()), 2)
    assert_array_equal(sparse[-1].model["H"], expected)


@pytest.mark.parametrize("relation", ["add-or-remove", "replace"])
def test_under_much_noise_the_model_stays_finite_and_of_unit_rows(relation):
    X = data(50)
    program = row_private(K, epsilon=0.1, row_bound=longest(X), rounds=15, relation=relation)
    for done in run(program, shards_of(X), 15):
        H = done.model["H"]
        assert np.isfinite(H).all()
        assert (H >= 0).all()
        np.testing.assert_allclose(np.linalg.norm(H, axis=1), 1.0, rtol=1e-12)


def test_a_component_that_the_sums_kill_keeps_its_direction():
    program = PrivateSums(K, 1.0, 1.0, ridge=0.0)
    server, _ = program.start_server(Layout(("p",), M, SEED))
    gram, cross = np.eye(K, dtype=np.int64) << 40, np.full((K, M), 1 << 40)
    cross[1] = -5
    after, model = program.finish(server, Message({"gram": gram, "cross": cross}))
    assert_array_equal(after.Ht[:, 1], server.Ht[:, 1])
    np.testing.assert_allclose(model["H"][0], 1 / math.sqrt(M))
    nothing, _ = program.finish(server, Message({"gram": 0 * gram, "cross": 0 * cross}))
    np.testing.assert_allclose(nothing.Ht, server.Ht)


def test_noise_in_shares_needs_hidden_uploads_and_enough_parties():
    X = data(90)
    program = row_private(K, epsilon=3.0, row_bound=longest(X), rounds=2, shares=3, source=Seeded())
    with pytest.raises(CompositionError, match="1/3 of the noise"):
        run(program, shards_of(X), 1)
    with pytest.raises(CompositionError, match="shares=3"):
        program.start_party(Shard("a", as_matrix(X)), Layout(("a", "b"), M, SEED))
    masks = SecureSum(bounds={"gram": EXACT_SUM_BOUND, "cross": EXACT_SUM_BOUND})
    masked = run(program, shards_of(X), 2, reduction=masks)
    state, model = program.start_server(Layout.of(shards_of(X), SEED))
    uploads = [
        program.local(shard, program.start_party(shard, Layout.of(shards_of(X), SEED)), model)[1]
        for shard in shards_of(X)
    ]
    assert_array_equal(masked[0].model["H"], program.finish(state, program.aggregation(uploads))[1]["H"])
    assert program.release.noise_multiplier == replace(program, shares=1).release.noise_multiplier


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
@pytest.mark.parametrize("form", [np.asarray, sp.csr_array])
def test_rows_that_cannot_be_bounded_are_refused_by_name(bad, form):
    X = data(30)
    X[20, 3] = bad
    with pytest.raises(DataError, match="p2"):
        run(PrivateSums(K, 1.0, 1.0), shards_of(X, form=form), 1)


def test_a_model_that_is_not_one_is_refused_before_anything_is_computed():
    X = data(10)
    program = PrivateSums(K, 1.0, 1.0, source=lambda party, release: ZeroNoise())
    shard = Shard("p", as_matrix(X))
    state = program.start_party(shard, Layout(("p",), M, SEED))
    for spoil in (np.nan, np.inf, -0.1, 1e200, 1.5):
        H = unit_rows(0)
        H[1, 2] = spoil
        with pytest.raises(PartyError, match="unit norm"):
            program.local(shard, state, Message({"H": H}))
    with pytest.raises(ShapeError, match="shape"):
        program.local(shard, state, Message({"H": unit_rows(0)[:2]}))


def test_a_party_without_rows_sends_noise_like_any_other():
    """Or else its refusal would tell that the one row it may have had is gone."""
    program = row_private(K, epsilon=1.0, row_bound=1.0, rounds=1, source=Seeded())
    shard, H = Shard("p", as_matrix(np.empty((0, M)))), unit_rows(0)
    _, sent = program.local(shard, program.start_party(shard, Layout(("p",), M, SEED)), Message({"H": H}))
    assert sent["gram"].all()
    assert sent["cross"].all()


def test_rows_with_unknown_cells_are_refused():
    program = PrivateSums(K, 1.0, 1.0)
    X = sp.csr_array(data(10))
    with pytest.raises(CompositionError, match="ObservedMatrix"):
        program.start_party(Shard("p", ObservedMatrix.of_rows(X)), Layout(("p",), M, SEED))


@pytest.mark.parametrize(
    "setting",
    [
        {"rank": 0},
        {"rank": 2.5},
        {"noise_multiplier": 0.0},
        {"noise_multiplier": math.nan},
        {"row_bound": 0.0},
        {"row_bound": math.inf},
        {"row_bound": math.nan},
        {"weight_bound": -1.0},
        {"relation": "zero-out"},
        {"shares": 0},
        {"max_releases": -1},
        {"max_releases": 0},
        {"sweeps": 0},
        {"row_sweeps": 0},
        {"ridge": -1.0},
        {"ridge": math.nan},
    ],
)
def test_settings_outside_their_range_are_refused(setting):
    with pytest.raises(ParameterError):
        PrivateSums(**{"rank": K, "noise_multiplier": 1.0, "row_bound": 1.0, **setting})


@pytest.mark.parametrize("budget", [{"epsilon": 0.0}, {"epsilon": 1.0, "delta": 1.0}, {"epsilon": 1.0, "rounds": 0}])
def test_budgets_that_are_none_are_refused(budget):
    with pytest.raises(ParameterError):
        row_private(K, row_bound=1.0, **budget)
