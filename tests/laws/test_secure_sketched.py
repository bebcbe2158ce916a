"""Laws of secure sketched methods: sketched steps, Syn-SSD, and statistics from sketches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import scipy.sparse as sp
from numpy.testing import assert_allclose, assert_array_equal
from pairwise_masks import PairwiseMasks

from partsong.aggregation.barycenter import FixedPoint
from partsong.aggregation.linear import Mean, WeightedMean
from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Layout, Message, Schedule, Shard
from partsong.core.streams import key, stream
from partsong.data.conversion import as_matrix
from partsong.engines.local import Parallel, Sequential
from partsong.errors import CompositionError, ParameterError, PartyError
from partsong.io.state_file import read_state, write_state
from partsong.methods.averaging import LocalAveraging
from partsong.methods.secure_sketched import SketchedAveraging, SketchedSums
from partsong.sketch.crossing import Proportion
from partsong.sketch.kinds import CountSketch, Gaussian, Hadamard, Subsampling
from partsong.sketch.recovery import most_sketches, recover_from_sketches
from partsong.solvers.coupling import ProximalTerm
from partsong.solvers.sketched import exact_columns, exact_rows, sketched_columns, sketched_rows
from partsong.solvers.squared_error import RowState, SquaredError, constant_rows
from partsong.solvers.update_rules import CoordinateDescent, Extrapolation, InertialPalm, ProximalDescent

KINDS = [Subsampling, CountSketch, Gaussian, Hadamard]
SOME = Proportion(ratio=0.5)
VARIANTS = {"U": (None, SOME), "V": (SOME, None), "UV": (SOME, SOME), "none": (None, None)}
K, M, SEED = 4, 24, 3


def data(rows=90, columns=M, rank=K, seed=0):
    rng = np.random.default_rng(seed)
    H = rng.gamma(0.3, size=(rank, columns))
    return rng.gamma(0.5, size=(rows, rank)) @ H + 0.02 * rng.random((rows, columns))


def shards_of(X, cuts=(20, 55)):
    parts = np.split(X, list(cuts))
    return [Shard(f"p{i:02d}", as_matrix(part), key(7, "secret", i)) for i, part in enumerate(parts)]


def program_of(variant, inner=3, rule=ProximalDescent(), **more):
    rows, columns = VARIANTS[variant]
    return SketchedAveraging(K, SquaredError(rule), inner, rows, columns, **more)


def run(program, shards, rounds, engine=Sequential(), reduction=PlainReduction(), **more):
    return list(engine.run(program, shards, Schedule(rounds, SEED, **more), reduction=reduction))


def stepped(F, gram, cross, weight):
    """One damped sweep of coordinate descent, in NumPy."""
    gram, cross, F = gram + weight * np.eye(len(gram)), cross + weight * F, F.copy()
    for j in range(F.shape[1]):
        F[:, j] = np.maximum(0, F[:, j] + (cross[:, j] - F @ gram[:, j]) / gram[j, j])
    return F


class Damped:
    """The weights (α + β t) s of one factor, with s from the first problem."""

    def __init__(self):
        self.scale, self.count = 0.0, 0

    def step(self, F, gram, cross, counts=True):
        self.scale = self.scale or float(np.trace(gram)) / len(gram)
        F = stepped(F, gram, cross, (ProximalDescent().alpha + ProximalDescent().beta * self.count) * self.scale)
        self.count += counts
        return F


def serial(X, variant, secret, outer, inner):
    """Sketched alternating least squares on all rows, with dense S1 and S2."""
    rows, columns = VARIANTS[variant]
    n = len(X)

    def S1(t):
        return np.eye(n) if rows is None else rows.draw(n, K, secret, "S1", "p00", t).rows(0, n)

    def S2(t):
        return np.eye(M) if columns is None else columns.draw(M, K, SEED, "S2", t).rows(0, M)

    Ht = stream(SEED, "start").random((M, K))
    of_W, of_H = Damped(), Damped()
    B = Ht.T @ S2("start")
    A = X @ S2("start")
    W = of_W.step(np.maximum(constant_rows(B @ B.T, A @ B.T), 0), B @ B.T, A @ B.T, counts=False)
    for t in range(outer * inner):
        B, A = W.T @ S1(t), X.T @ S1(t)
        Ht = of_H.step(Ht, B @ B.T, A @ B.T)
        B, A = Ht.T @ S2(t), X @ S2(t)
        W = of_W.step(W, B @ B.T, A @ B.T)
    return W, Ht.T


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_party_is_the_serial_method(variant):
    X, program = data(), program_of(variant)
    shards = shards_of(X, ())
    done = run(program, shards, program.exchanges(4, 1))[-1]
    W, H = serial(X, variant, shards[0].secret, 4, 3)
    assert_allclose(program.components(done.checkpoint.server), H, rtol=1e-7, atol=1e-9)
    assert_allclose(done.checkpoint.parties["p00"].W, W, rtol=1e-7, atol=1e-9)


def test_one_party_without_sketches_is_plain_alternation():
    X, solver = data(), SquaredError(CoordinateDescent())
    program = program_of("none", rule=CoordinateDescent())
    done = run(program, shards_of(X, ()), program.exchanges(3, 1))[-1]
    matrix, columns = as_matrix(X), solver.begin(stream(SEED, "start").random((M, K)))
    rows, totals = solver.row_step(matrix, RowState(), solver.broadcast(columns))
    for _ in range(9):
        columns = solver.column_step(columns, totals)
        rows, totals = solver.row_step(matrix, rows, solver.broadcast(columns))
    assert_allclose(program.components(done.checkpoint.server), columns.Ht.T, rtol=1e-8, atol=1e-10)
    assert_allclose(done.checkpoint.parties["p00"].W, rows.W, rtol=1e-8, atol=1e-10)


def test_sketches_that_keep_everything_change_nothing():
    whole, shards = Proportion(ratio=1.0), shards_of(data())
    exact, kept = program_of("none"), replace(program_of("UV"), rows_sketch=whole, columns_sketch=whole)
    one, other = (run(p, shards, p.exchanges(3, 1))[-1].checkpoint.server.H for p in (exact, kept))
    assert_allclose(one, other, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_engines_agree_in_any_order_and_runs_go_on_bit_for_bit(variant, kind):
    rows, columns = (None if part is None else Proportion(kind, 0.5) for part in VARIANTS[variant])
    program, shards = replace(program_of(variant), rows_sketch=rows, columns_sketch=columns), shards_of(data())
    whole = run(program, shards, 8)
    for other in (run(program, shards[::-1], 8), run(program, shards, 8, Parallel(3))):
        for one, two in zip(whole, other, strict=True):
            for name, array in one.model.arrays.items():
                assert_array_equal(array, two.model[name])
    for middle in (1, 4, 5):
        rest = list(
            Sequential().run(
                program, shards, Schedule(8, SEED), reduction=PlainReduction(), resume=whole[middle].checkpoint
            )
        )
        assert_array_equal(rest[-1].checkpoint.server.H, whole[-1].checkpoint.server.H)
        assert_array_equal(rest[-1].checkpoint.parties["p01"].W, whole[-1].checkpoint.parties["p01"].W)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_sent_is_a_sketch_per_iteration_and_all_of_h_per_outer_round(variant):
    X, program = data(), program_of(variant)
    shards, d = shards_of(X), 12
    rounds = run(program, shards, program.exchanges(2, 1), Sequential(record=True))
    assert [program.turn(done.model).ends_round for done in rounds] == [False, False, False, True] * 2
    for index, done in enumerate(rounds):
        is_sketched = VARIANTS[variant][1] is not None and index % 4 < 3
        name, shape = ("sketch", (K, d)) if is_sketched else ("H", (K, M))
        for party, _, message in done.traffic:
            assert {name: shape} == {array: size for array, size, _ in message.signature}
            assert done.bytes_up[party] == 8 * K * shape[1] + 8
        assert set(done.model.arrays) == {name, "turn"}
    sizes = {len(part.matrix.X) for part in shards}
    for done in rounds:
        for party, _, message in done.traffic:
            own = next(shard for shard in shards if shard.name == party)
            seen = [*own.matrix.X, *done.checkpoint.parties[party].W, *done.checkpoint.parties[party].W.T]
            for array in message.arrays.values():
                assert not sizes & set(array.shape)
                lines = [*array, *array.T]
                assert not any(a.shape == b.shape and np.allclose(a, b) for a in lines for b in seen)


def test_all_parties_sketch_with_one_s2_whatever_their_rows():
    program = program_of("UV")
    rounds = run(program, shards_of(data(), (7, 60)), 7, Sequential(record=True))
    for index, done in enumerate(rounds):
        outer, turn = divmod(index, 4)
        if turn < 3:
            S2 = SOME.draw(M, K, SEED, "S2", outer * 3 + turn).rows(0, M)
            for party, _, message in done.traffic:
                assert_allclose(message["sketch"], done.checkpoint.parties[party].Ht.T @ S2, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "make", [lambda: program_of("V"), lambda: LocalAveraging(K, SquaredError(ProximalDescent()), 3, sketch=SOME)]
)
def test_s1_is_the_partys_own(make):
    """Another secret is another run, and the shared seed alone does not tell S1."""
    program, shards = make(), shards_of(data(), ())
    sent = [
        run(program, [replace(shards[0], secret=secret)], 1, Sequential(record=True))[0].traffic[0][2]["H"]
        for secret in (1, 1, 2)
    ]
    assert_array_equal(sent[0], sent[1])
    assert not np.allclose(sent[0], sent[2])


def planted(seed=0):
    rng = np.random.default_rng(seed)
    W, H = (rng.random(shape) * (rng.random(shape) < 0.3) for shape in ((400, 10), (10, 300)))
    X = W @ H
    return np.maximum(X + 0.01 * np.linalg.norm(X) / X.size**0.5 * rng.standard_normal(X.shape), 0)


def test_agreeing_before_every_step_of_w_beats_agreeing_now_and_then():
    """Ten parties, small damping, three outer rounds of fifty iterations (Qian et al., 2020, Fig. 6).

    An example, not a law: setting and draw are chosen where the gap is wide. On others it is smaller, and V none ahead.
    """
    shards = shards_of(planted(), range(40, 400, 40))
    some, solver = Proportion(ratio=0.2), SquaredError(CoordinateDescent(1, 0.1, 0.1))
    programs = {
        "SD": LocalAveraging(10, solver, 50, aggregation=Mean()),
        "U": SketchedAveraging(10, solver, 50, None, some),
        "V": SketchedAveraging(10, solver, 50, some, None),
        "UV": SketchedAveraging(10, solver, 50, some, some),
    }
    errors = {}
    for name, program in programs.items():
        point = run(program, shards, 3 if name == "SD" else program.exchanges(3, 1))[-1].checkpoint
        H = program.components(point.server)
        left = sum(np.linalg.norm(s.matrix.X - point.parties[s.name].W @ H) ** 2 for s in shards)
        errors[name] = np.sqrt(left / sum(s.matrix.squared_norm for s in shards))
    assert errors["SD"] > 0.1
    assert errors["V"] < 0.05
    assert max(errors["U"], errors["UV"]) < 0.02


def test_a_party_that_missed_the_beginning_waits_for_the_next_outer_round():
    program, shards = program_of("UV"), shards_of(data())
    late = {0: frozenset({"p01"})}
    with pytest.raises(PartyError, match="'p01' missed the first exchange of outer round 0"):
        run(program, shards, 2, absent=late)
    rounds = run(program, shards, 8, absent=late, on_party_error="skip")
    assert [len(done.participants) for done in rounds] == [2, 2, 2, 2, 3, 3, 3, 3]
    gone = run(program, shards, 8, absent={i: frozenset({"p01"}) for i in range(4)})
    assert_array_equal(rounds[-1].model["H"], gone[-1].model["H"])


def test_a_party_that_missed_an_exchange_in_between_goes_on():
    program, shards = program_of("UV"), shards_of(data())
    rounds = run(program, shards, 4, absent={1: frozenset({"p01"})})
    assert [len(done.participants) for done in rounds] == [3, 2, 3, 3]
    assert rounds[-1].checkpoint.parties["p01"].columns.count == 2
    assert rounds[-1].checkpoint.parties["p00"].columns.count == 3


@pytest.mark.parametrize("variant", ["UV", "V"])
def test_sums_can_be_masked(variant):
    program, shards = program_of(variant), shards_of(data())
    masked = run(program, shards, 8, reduction=PairwiseMasks())[-1]
    assert_allclose(masked.model["H"], run(program, shards, 8)[-1].model["H"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("inner", [1, 3])
def test_the_last_two_exchanges_are_of_one_company_under_masks(inner):
    """H does not move between them: two sums of which one lacks a party would differ by what it sent."""
    program, shards = program_of("V", inner), shards_of(data())
    last = program.exchanges(1, 1) - 1
    absent = {last: frozenset({"p01"})}
    whole = run(program, shards, last + 1, Sequential(record=True))
    lacking = run(program, shards, last + 1, Sequential(record=True), absent=absent)
    sent = {party: message["H"] for party, _, message in whole[last - 1].traffic}
    difference = 3 * lacking[last - 1].checkpoint.model["H"] - 2 * lacking[last].model["H"]
    assert_allclose(difference, sent["p01"], rtol=1e-9, atol=1e-12)
    with pytest.raises(ParameterError, match="'p01'"):
        run(program, shards, last + 1, reduction=PairwiseMasks(), absent=absent)
    if inner > 1:
        run(program, shards, last + 1, reduction=PairwiseMasks(), absent={1: frozenset({"p01"})})


def test_checkpoints_can_be_written_and_read(tmp_path):
    point = run(program_of("UV"), shards_of(data()), 6)[-1].checkpoint
    write_state(tmp_path / "c.ckpt", point)
    again = read_state(tmp_path / "c.ckpt")
    assert again.parties["p01"].rows == point.parties["p01"].rows
    assert_array_equal(again.parties["p01"].Ht, point.parties["p01"].Ht)
    assert_array_equal(again.server.H, point.server.H)


@pytest.mark.parametrize("form", [np.asarray, sp.csr_array, sp.csc_array], ids=lambda form: form.__name__)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("d", [5, 14])
def test_sketched_equations_are_those_of_the_dense_products(form, kind, d):
    """In both orders of the products, which sparse and dense data call for."""
    rng = np.random.default_rng(0)
    X = data(40) * (rng.random((40, M)) < 0.3)
    W, H, matrix = rng.random((40, K)), rng.random((K, M)), as_matrix(form(X))
    S = kind(d).draw(M, 1, "columns")
    dense, B = S.rows(0, M), H @ S.rows(0, M)
    found = sketched_rows(matrix, S, B)
    assert_allclose(found.gram, B @ B.T, rtol=1e-9, atol=1e-12)
    assert_allclose(found.cross, X @ dense @ B.T, rtol=1e-9, atol=1e-10)
    S = kind(d).draw(40, 1, "rows")
    B = W.T @ S.rows(0, 40)
    found = sketched_columns(matrix, S, W)
    assert_allclose(found.gram, B @ B.T, rtol=1e-9, atol=1e-12)
    assert_allclose(found.cross, X.T @ S.rows(0, 40) @ B.T, rtol=1e-9, atol=1e-10)
    assert_allclose(exact_rows(matrix, H.T.copy()).cross, X @ H.T, rtol=1e-9, atol=1e-12)
    assert_allclose(exact_columns(matrix, W).cross, X.T @ W, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("form", [np.asarray, sp.csr_array], ids=lambda form: form.__name__)
def test_rows_that_a_subsample_leaves_out_are_not_read(form):
    X, S = data(40), Subsampling(6).draw(40, 1, "rows")
    left_out = ~S.rows(0, 40).any(axis=1)
    ruined = np.where(left_out[:, None], np.nan, X)
    W = np.random.default_rng(0).random((40, K))
    found, expected = (sketched_columns(as_matrix(form(A)), S, W) for A in (ruined, X))
    assert_array_equal(found.cross, expected.cross)


def test_a_sketched_consensus_step_is_the_serial_one():
    X = data()
    shards, rule = shards_of(X, ()), CoordinateDescent(1, 0.1, 0.1)
    program = LocalAveraging(K, SquaredError(rule), 3, aggregation=Mean(), sketch=SOME)
    done = run(program, shards, 2)[-1]
    Ht = stream(SEED, "start").random((M, K))
    W = program.solver.solve_rows(as_matrix(X), Ht)
    for t in range(6):
        W = stepped(W, Ht.T @ Ht, X @ Ht, 0.1 + 0.1 * t)
        S = SOME.draw(90, K, shards[0].secret, "S1", "p00", t).rows(0, 90)
        B = W.T @ S
        Ht = stepped(Ht, B @ B.T, X.T @ S @ B.T, 0.1 + 0.1 * t)
    assert_allclose(done.model["H"], Ht.T, rtol=1e-7, atol=1e-9)
    assert done.checkpoint.parties["p00"].count == 6


@pytest.mark.parametrize("coupling", [{}, {"coupling": ProximalTerm(0.3)}], ids=["alone", "pulled"])
def test_a_consensus_sketch_that_keeps_all_rows_changes_nothing(coupling):
    shards = shards_of(data())
    program = LocalAveraging(K, SquaredError(ProximalDescent()), 3, aggregation=Mean(), **coupling)
    plain, kept = (run(p, shards, 4)[-1].model["H"] for p in (program, replace(program, sketch=Proportion(ratio=1.0))))
    assert_allclose(plain, kept, rtol=1e-7, atol=1e-9)


def test_rules_that_look_back_do_so_across_exchanges():
    program = program_of("none", rule=InertialPalm(inertia=0.3))
    point = run(program, shards_of(data(), ()), 3)[-1].checkpoint
    party = point.parties["p00"]
    assert not np.array_equal(party.rows.previous, party.W)
    assert party.rows.count == 2


@pytest.mark.parametrize("variant", ["UV", "V"])
def test_float32_stays_and_tensors_run_the_same(variant):
    X, program = data().astype(np.float32), program_of(variant)
    rounds = run(program, shards_of(X), 8)
    assert rounds[-1].model["H"].dtype == np.float32
    assert rounds[-2].model["sketch" if variant == "UV" else "H"].dtype == np.float32
    torch = pytest.importorskip("torch")
    tensors = [replace(s, matrix=as_matrix(torch.from_numpy(s.matrix.X))) for s in shards_of(data())]
    H = run(program, tensors, 8)[-1].model["H"]
    assert isinstance(H, torch.Tensor)
    assert_allclose(H.numpy(), run(program, shards_of(data()), 8)[-1].model["H"], rtol=1e-7, atol=1e-9)


def test_weighted_means_follow_the_rows():
    program, shards = replace(program_of("UV"), aggregation=WeightedMean()), shards_of(data())
    done = run(program, shards, 1, Sequential(record=True))[0]
    sent = {party: message for party, _, message in done.traffic}
    expected = sum(len(s.matrix.X) * sent[s.name]["sketch"] for s in shards) / 90
    assert_allclose(done.model["sketch"], expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: SketchedAveraging(0), ParameterError),
        (lambda: SketchedAveraging(K, inner=0), ParameterError),
        (lambda: SketchedAveraging(K, SquaredError(ProximalDescent(), momentum=Extrapolation())), CompositionError),
        (lambda: SketchedAveraging(K, aggregation=FixedPoint()), CompositionError),
        (
            lambda: LocalAveraging(K, SquaredError(ProximalDescent(), momentum=Extrapolation()), sketch=SOME),
            CompositionError,
        ),
    ],
)
def test_what_does_not_go_together_is_refused_at_once(make, error):
    with pytest.raises(error):
        make()


RANK, COLUMNS, DRAW_SEED = 3, 12, 5


def statistics_data(rows=90, seed=0):
    rng = np.random.default_rng(seed)
    return rng.gamma(0.5, size=(rows, RANK)) @ rng.gamma(0.3, size=(RANK, COLUMNS)) + 0.01 * rng.random((rows, COLUMNS))


def run_recorded(program, shards, rounds, engine=Sequential(record=True), reduction=PlainReduction(), **more):
    return list(engine.run(program, shards, Schedule(rounds, DRAW_SEED, **more), reduction=reduction))


def all_rows(program, shards, turn):
    """S (n × d) of all parties, one above the other."""
    sizes = [(s.name, s.matrix.shape[0]) for s in shards]
    return np.vstack([program.operator(DRAW_SEED, name, n, turn).rows(0, n) for name, n in sizes])


@dataclass(frozen=True)
class Stacked:
    """An S that is known by its entries."""

    S: np.ndarray

    @property
    def size(self):
        return len(self.S)

    @property
    def dimension(self):
        return self.S.shape[1]

    def rows(self, start, stop):
        return self.S[start:stop]


@pytest.mark.parametrize("columns", [None, SOME], ids=["exact W", "sketched W"])
def test_any_split_is_the_serial_method_with_the_stacked_sketch(columns):
    X, rule = statistics_data(), CoordinateDescent(1, 0.1, 0.1)
    program = SketchedSums(RANK, Gaussian(4), SquaredError(rule), columns, is_guarded=False)
    shards = shards_of(X)
    done = run_recorded(program, shards, 8)[-1]
    Ht, W = stream(DRAW_SEED, "start").random((COLUMNS, RANK)), None
    for t in range(1, 8):
        S = np.eye(COLUMNS) if columns is None else columns.draw(COLUMNS, RANK, DRAW_SEED, "S'", t).rows(0, COLUMNS)
        B, A = Ht.T @ S, X @ S
        W = np.maximum(constant_rows(B @ B.T, A @ B.T), 0) if W is None else W
        W = stepped(W, B @ B.T, A @ B.T, 0.1 * t)
        S = all_rows(program, shards, t)
        B, A = W.T @ S, X.T @ S
        Ht = stepped(Ht, B @ B.T, A @ B.T, 0.1 * t)
    assert_allclose(done.model["H"], Ht.T, rtol=1e-7, atol=1e-9)
    assert_allclose(np.vstack([done.checkpoint.parties[s.name].W for s in shards]), W, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", [Gaussian, CountSketch, Hadamard], ids=lambda kind: kind.__name__)
def test_sketches_that_parties_draw_for_themselves_are_one_with_mean_identity(kind):
    """Also of a party with fewer rows than dimensions."""
    program, shards = SketchedSums(RANK, kind(4), is_guarded=False), shards_of(statistics_data(12), (2, 7))
    draws = 1000
    total = sum((S := all_rows(program, shards, t)) @ S.T for t in range(draws))
    assert_allclose(total / draws, np.eye(12), atol=0.12)
    assert not np.allclose(all_rows(program, shards, 1), all_rows(program, shards, 2))


def test_subsampling_is_refused_for_what_it_would_send():
    with pytest.raises(CompositionError, match="unchanged"):
        SketchedSums(RANK, Subsampling(4))


@pytest.mark.parametrize("kind", [Gaussian, CountSketch], ids=lambda kind: kind.__name__)
def test_engines_agree_on_sketched_statistics_in_any_order_and_runs_go_on_bit_for_bit(kind):
    program, shards = SketchedSums(RANK, kind(4), columns_sketch=SOME, is_guarded=False), shards_of(statistics_data())
    whole = run_recorded(program, shards, 6)
    for other in (run_recorded(program, shards[::-1], 6), run_recorded(program, shards, 6, Parallel(3))):
        for one, two in zip(whole, other, strict=True):
            assert_array_equal(one.model["H"], two.model["H"])
    for middle in (0, 2):
        rest = Sequential().run(
            program, shards, Schedule(6, DRAW_SEED), reduction=PlainReduction(), resume=whole[middle].checkpoint
        )
        assert_array_equal(list(rest)[-1].model["H"], whole[-1].model["H"])


def test_only_declared_arrays_are_sent():
    rounds = run_recorded(SketchedSums(RANK, Gaussian(4)), shards_of(statistics_data()), 4)
    for index, done in enumerate(rounds):
        expected = {"rows": (1,)} if index == 0 else {"data": (COLUMNS, 4), "weights": (RANK, 4)}
        for party, _, message in done.traffic:
            assert {name: shape for name, shape, _ in message.signature} == expected
            assert done.bytes_up[party] == 8 * sum(int(np.prod(shape)) for shape in expected.values()) + 8
        assert set(done.model.arrays) == {"H", "turn"}
    assert rounds[-1].checkpoint.server.rows == 90
    assert [SketchedSums(RANK, Gaussian(4)).turn(done.model).ends_round for done in rounds] == [
        False,
        True,
        True,
        True,
    ]


@pytest.mark.parametrize(("rows", "d"), [(25, 4), (24, 4)])
def test_rows_are_found_from_enough_sketches_and_not_one_before(rows, d):
    """Of a single party from its uploads, and of all from the sums; the guard stops in between."""
    X = statistics_data(rows)
    program, enough = SketchedSums(RANK, Gaussian(d), is_guarded=False), -(-rows // d)
    assert most_sketches(rows, d) == enough - 1
    alone = shards_of(X, ())
    uploads = [done.traffic[0][2]["data"] for done in run_recorded(program, alone, enough + 1)[1:]]
    operators = [program.operator(DRAW_SEED, "p00", rows, t) for t in range(1, enough + 1)]
    assert_allclose(recover_from_sketches(uploads, operators).T, X, atol=1e-8)
    before = recover_from_sketches(uploads[:-1], operators[:-1]).T
    assert np.linalg.norm(before - X) > 0.01 * np.linalg.norm(X)
    shards = shards_of(X, (4, 13))
    seen = run_recorded(replace(program, budget="total"), shards, enough + 1)[1:]
    sums = [sum(message["data"] for _, _, message in done.traffic) for done in seen]
    stacked = [Stacked(all_rows(program, shards, t)) for t in range(1, enough + 1)]
    assert_allclose(recover_from_sketches(sums, stacked).T, X, atol=1e-8)
    before = recover_from_sketches(sums[:-1], stacked[:-1]).T
    assert np.linalg.norm(before - X) > 0.01 * np.linalg.norm(X)


def test_a_party_stops_where_its_own_rows_would_be_found():
    program, shards = SketchedSums(RANK, Gaussian(4)), shards_of(statistics_data())
    most = most_sketches(20, 4)
    assert most == 4
    assert len(run_recorded(program, shards, 1 + most)) == 1 + most
    with pytest.raises(PartyError, match=r"'p00' may have sent 4 sketches of dim.* 4.*its 20 rows.*budget=\"total\""):
        run_recorded(program, shards, 2 + most)
    rounds = run_recorded(program, shards, 9, on_party_error="skip")
    assert [len(done.participants) for done in rounds] == [3] * 5 + [2] * 4
    assert most_sketches(35, 4) == 8
    with pytest.raises(PartyError, match="No party is left in round 9"):
        run_recorded(program, shards, 10, on_party_error="skip")
    unguarded = run_recorded(replace(program, is_guarded=False), shards, 3 + most)
    assert unguarded[-1].participants == ("p00", "p01", "p02")


def test_turns_count_whether_their_sketches_arrived_or_not():
    program, shards = SketchedSums(RANK, Gaussian(4)), shards_of(statistics_data())
    rounds = run_recorded(program, shards, 5, absent={2: frozenset({"p00"})})
    assert rounds[-1].checkpoint.parties["p00"].sent == 3
    with pytest.raises(PartyError, match="'p00' may have sent 4"):
        run_recorded(program, shards, 6, absent={2: frozenset({"p00"})})


def test_a_server_that_forgets_what_it_got_gets_no_more_sketches():
    program, shard = SketchedSums(RANK, Gaussian(4)), shards_of(statistics_data())[0]
    _, model = program.start_server(Layout.of([shard], 0))
    before = program.start_party(shard, Layout.of([shard], 0))
    told = set()
    for turn in range(-2, 9):
        asked = Message({**model.arrays, "turn": np.array([turn, 58])})
        try:
            _, sent = program.local(shard, before, asked)
        except PartyError:
            continue
        told |= {sent["data"].tobytes()} if "data" in sent.arrays else set()
    assert len(told) == most_sketches(20, 4)


def test_a_party_with_fewer_rows_than_dimensions_sends_nothing_openly():
    shards = shards_of(statistics_data(), (3, 55))
    with pytest.raises(PartyError, match="'p00' may have sent 0 sketches"):
        run_recorded(SketchedSums(RANK, Gaussian(4)), shards, 2)
    done = run_recorded(SketchedSums(RANK, Gaussian(4), budget="total"), shards, 4, reduction=PairwiseMasks())[-1]
    assert np.isfinite(done.model["H"]).all()


def test_under_masks_all_stop_where_all_rows_would_be_found():
    program, shards = SketchedSums(RANK, Gaussian(9), budget="total"), shards_of(statistics_data())
    most = most_sketches(90, 9)
    assert most == 9
    masked = run_recorded(program, shards, 1 + most, reduction=PairwiseMasks())
    with pytest.raises(CompositionError, match="shows what single parties send"):
        run_recorded(program, shards, 1 + most)
    known = run_recorded(replace(program, is_guarded=False), shards, 1 + most)[-1].model["H"]
    assert_allclose(masked[-1].model["H"], known, rtol=1e-5, atol=1e-7)
    with pytest.raises(PartyError, match="the 90 rows of all parties"):
        run_recorded(program, shards, 2 + most, reduction=PairwiseMasks())


def test_under_masks_every_sum_is_over_the_same_parties():
    program, shards = SketchedSums(RANK, Gaussian(4), budget="total"), shards_of(statistics_data())
    with pytest.raises(ParameterError, match="'p01'"):
        run_recorded(program, shards, 4, reduction=PairwiseMasks(), absent={2: frozenset({"p01"})})
    own = replace(program, budget="own")
    rounds = run_recorded(own, shards, 4, reduction=PairwiseMasks(), absent={2: frozenset({"p01"})})
    assert [len(done.participants) for done in rounds] == [3, 3, 2, 3]


@pytest.mark.parametrize("kind", [Gaussian, CountSketch], ids=lambda kind: kind.__name__)
def test_h_gets_good_within_the_budget(kind):
    X = statistics_data(900, 1)
    program = SketchedSums(RANK, kind(12), is_guarded=kind is Gaussian)
    shards = shards_of(X, (300, 600))
    most = most_sketches(300, 12)
    errors = []
    for done in run_recorded(program, shards, 1 + most, Sequential()):
        H = done.model["H"]
        W = program.solver.solve_rows(as_matrix(X), np.ascontiguousarray(H.T))
        errors.append(np.linalg.norm(X - W @ H) / np.linalg.norm(X))
    assert errors[-1] < 0.1
    assert errors[-1] < 0.3 * errors[0]


def test_sparse_rows_and_tensors_run_the_same():
    X = statistics_data() * (np.random.default_rng(1).random((90, COLUMNS)) < 0.5)
    program = SketchedSums(RANK, Gaussian(4), columns_sketch=SOME)
    expected = run_recorded(program, shards_of(X), 5)[-1].model["H"]
    sparse = [replace(s, matrix=as_matrix(sp.csr_array(s.matrix.X))) for s in shards_of(X)]
    assert_allclose(run_recorded(program, sparse, 5)[-1].model["H"], expected, rtol=1e-8, atol=1e-10)
    single = [replace(s, matrix=as_matrix(s.matrix.X.astype(np.float32))) for s in shards_of(X)]
    assert run_recorded(program, single, 5)[-1].model["H"].dtype == np.float32
    torch = pytest.importorskip("torch")
    tensors = [replace(s, matrix=as_matrix(torch.from_numpy(s.matrix.X))) for s in shards_of(X)]
    H = run_recorded(program, tensors, 5)[-1].model["H"]
    assert isinstance(H, torch.Tensor)
    assert_allclose(H.numpy(), expected, rtol=1e-7, atol=1e-9)


def test_checkpoints_of_sketched_statistics_can_be_written_and_read(tmp_path):
    point = run_recorded(SketchedSums(RANK, Gaussian(4)), shards_of(statistics_data()), 3)[-1].checkpoint
    write_state(tmp_path / "c.ckpt", point)
    again = read_state(tmp_path / "c.ckpt")
    assert again.parties["p01"].sent == 2
    assert_array_equal(again.server.Ht, point.server.Ht)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"rank": 5}, ParameterError),
        ({"rank": 0}, ParameterError),
        ({"budget": "mine"}, ParameterError),
        ({"solver": SquaredError(ProximalDescent(), momentum=Extrapolation())}, CompositionError),
        ({"rows_sketch": CountSketch(4)}, CompositionError),
    ],
)
def test_settings_of_sketched_statistics_that_do_not_go_together_are_refused_at_once(settings, error):
    with pytest.raises(error):
        SketchedSums(**{"rank": RANK, "rows_sketch": Gaussian(4), **settings})
