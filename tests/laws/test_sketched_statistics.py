"""Laws of statistics from sketches: what they add up to, what they give away, and where parties stop."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import scipy.sparse as sp
from numpy.testing import assert_allclose, assert_array_equal
from pairwise_masks import PairwiseMasks

from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Layout, Message, Schedule, Shard
from partsong.core.streams import key, stream
from partsong.data.conversion import as_matrix
from partsong.engines.local import Parallel, Sequential
from partsong.errors import CompositionError, ParameterError, PartyError
from partsong.io.state_file import read_state, write_state
from partsong.methods.secure_sketched import SketchedSums
from partsong.sketch.crossing import Proportion
from partsong.sketch.kinds import CountSketch, Gaussian, Hadamard, Subsampling
from partsong.sketch.recovery import most_sketches, recover_from_sketches
from partsong.solvers.squared_error import SquaredError, start_rows
from partsong.solvers.update_rules import CoordinateDescent, Extrapolation, ProximalDescent

K, M, SEED = 3, 12, 5
SOME = Proportion(ratio=0.5)


def data(rows=90, seed=0):
    rng = np.random.default_rng(seed)
    return rng.gamma(0.5, size=(rows, K)) @ rng.gamma(0.3, size=(K, M)) + 0.01 * rng.random((rows, M))


def shards_of(X, cuts=(20, 55)):
    parts = np.split(X, list(cuts))
    return [Shard(f"p{i:02d}", as_matrix(part), key(7, "secret", i)) for i, part in enumerate(parts)]


def run(program, shards, rounds, engine=Sequential(record=True), reduction=PlainReduction(), **more):
    return list(engine.run(program, shards, Schedule(rounds, SEED, **more), reduction=reduction))


def stepped(F, gram, cross, weight):
    gram, cross, F = gram + weight * np.eye(len(gram)), cross + weight * F, F.copy()
    for j in range(F.shape[1]):
        F[:, j] = np.maximum(0, F[:, j] + (cross[:, j] - F @ gram[:, j]) / gram[j, j])
    return F


def all_rows(program, shards, turn):
    """S (n × d) of all parties, one above the other."""
    sizes = [(s.name, s.matrix.shape[0]) for s in shards]
    return np.vstack([program.operator(SEED, name, n, turn).rows(0, n) for name, n in sizes])


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
    X, rule = data(), CoordinateDescent(1, 0.1, 0.1)
    program = SketchedSums(K, Gaussian(4), SquaredError(rule), columns, is_guarded=False)
    shards = shards_of(X)
    done = run(program, shards, 8)[-1]
    Ht, W = stream(SEED, "start").random((M, K)), None
    for t in range(1, 8):
        S = np.eye(M) if columns is None else columns.draw(M, K, SEED, "S'", t).rows(0, M)
        B, A = Ht.T @ S, X @ S
        W = np.maximum(start_rows(B @ B.T, A @ B.T), 0) if W is None else W
        W = stepped(W, B @ B.T, A @ B.T, 0.1 * t)
        S = all_rows(program, shards, t)
        B, A = W.T @ S, X.T @ S
        Ht = stepped(Ht, B @ B.T, A @ B.T, 0.1 * t)
    assert_allclose(done.model["H"], Ht.T, rtol=1e-7, atol=1e-9)
    assert_allclose(np.vstack([done.checkpoint.parties[s.name].W for s in shards]), W, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", [Gaussian, CountSketch, Hadamard], ids=lambda kind: kind.__name__)
def test_sketches_that_parties_draw_for_themselves_are_one_with_mean_identity(kind):
    """Also of a party with fewer rows than dimensions."""
    program, shards = SketchedSums(K, kind(4), is_guarded=False), shards_of(data(12), (2, 7))
    draws = 1000
    total = sum((S := all_rows(program, shards, t)) @ S.T for t in range(draws))
    assert_allclose(total / draws, np.eye(12), atol=0.12)
    assert not np.allclose(all_rows(program, shards, 1), all_rows(program, shards, 2))


def test_subsampling_is_refused_for_what_it_would_send():
    with pytest.raises(CompositionError, match="unchanged"):
        SketchedSums(K, Subsampling(4))


@pytest.mark.parametrize("kind", [Gaussian, CountSketch], ids=lambda kind: kind.__name__)
def test_engines_agree_in_any_order_and_runs_go_on_bit_for_bit(kind):
    program, shards = SketchedSums(K, kind(4), columns_sketch=SOME, is_guarded=False), shards_of(data())
    whole = run(program, shards, 6)
    for other in (run(program, shards[::-1], 6), run(program, shards, 6, Parallel(3))):
        for one, two in zip(whole, other, strict=True):
            assert_array_equal(one.model["H"], two.model["H"])
    for middle in (0, 2):
        rest = Sequential().run(
            program, shards, Schedule(6, SEED), reduction=PlainReduction(), resume=whole[middle].checkpoint
        )
        assert_array_equal(list(rest)[-1].model["H"], whole[-1].model["H"])


def test_only_declared_arrays_are_sent():
    rounds = run(SketchedSums(K, Gaussian(4)), shards_of(data()), 4)
    for index, done in enumerate(rounds):
        expected = {"rows": (1,)} if index == 0 else {"data": (M, 4), "weights": (K, 4)}
        for party, _, message in done.traffic:
            assert {name: shape for name, shape, _ in message.signature} == expected
            assert done.bytes_up[party] == 8 * sum(int(np.prod(shape)) for shape in expected.values()) + 8
        assert set(done.model.arrays) == {"H", "turn"}
    assert rounds[-1].checkpoint.server.rows == 90
    assert [SketchedSums(K, Gaussian(4)).turn(done.model).ends_round for done in rounds] == [
        False,
        True,
        True,
        True,
    ]


@pytest.mark.parametrize(("rows", "d"), [(25, 4), (24, 4)])
def test_rows_are_found_from_enough_sketches_and_not_one_before(rows, d):
    """Of a single party from its uploads, and of all from the sums; the guard stops in between."""
    X = data(rows)
    program, enough = SketchedSums(K, Gaussian(d), is_guarded=False), -(-rows // d)
    assert most_sketches(rows, d) == enough - 1
    alone = shards_of(X, ())
    uploads = [done.traffic[0][2]["data"] for done in run(program, alone, enough + 1)[1:]]
    operators = [program.operator(SEED, "p00", rows, t) for t in range(1, enough + 1)]
    assert_allclose(recover_from_sketches(uploads, operators).T, X, atol=1e-8)
    before = recover_from_sketches(uploads[:-1], operators[:-1]).T
    assert np.linalg.norm(before - X) > 0.01 * np.linalg.norm(X)
    shards = shards_of(X, (4, 13))
    seen = run(replace(program, budget="total"), shards, enough + 1)[1:]
    sums = [sum(message["data"] for _, _, message in done.traffic) for done in seen]
    stacked = [Stacked(all_rows(program, shards, t)) for t in range(1, enough + 1)]
    assert_allclose(recover_from_sketches(sums, stacked).T, X, atol=1e-8)
    before = recover_from_sketches(sums[:-1], stacked[:-1]).T
    assert np.linalg.norm(before - X) > 0.01 * np.linalg.norm(X)


def test_a_party_stops_where_its_own_rows_would_be_found():
    program, shards = SketchedSums(K, Gaussian(4)), shards_of(data())
    most = most_sketches(20, 4)
    assert most == 4
    assert len(run(program, shards, 1 + most)) == 1 + most
    with pytest.raises(PartyError, match=r"'p00' may have sent 4 sketches of dim.* 4.*its 20 rows.*budget=\"total\""):
        run(program, shards, 2 + most)
    rounds = run(program, shards, 9, on_party_error="skip")
    assert [len(done.participants) for done in rounds] == [3] * 5 + [2] * 4
    assert most_sketches(35, 4) == 8
    with pytest.raises(PartyError, match="No party is left in round 9"):
        run(program, shards, 10, on_party_error="skip")
    unguarded = run(replace(program, is_guarded=False), shards, 3 + most)
    assert unguarded[-1].participants == ("p00", "p01", "p02")


def test_turns_count_whether_their_sketches_arrived_or_not():
    program, shards = SketchedSums(K, Gaussian(4)), shards_of(data())
    rounds = run(program, shards, 5, absent={2: frozenset({"p00"})})
    assert rounds[-1].checkpoint.parties["p00"].sent == 3
    with pytest.raises(PartyError, match="'p00' may have sent 4"):
        run(program, shards, 6, absent={2: frozenset({"p00"})})


def test_a_server_that_forgets_what_it_got_gets_no_more_sketches():
    program, shard = SketchedSums(K, Gaussian(4)), shards_of(data())[0]
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
    shards = shards_of(data(), (3, 55))
    with pytest.raises(PartyError, match="'p00' may have sent 0 sketches"):
        run(SketchedSums(K, Gaussian(4)), shards, 2)
    done = run(SketchedSums(K, Gaussian(4), budget="total"), shards, 4, reduction=PairwiseMasks())[-1]
    assert np.isfinite(done.model["H"]).all()


def test_under_masks_all_stop_where_all_rows_would_be_found():
    program, shards = SketchedSums(K, Gaussian(9), budget="total"), shards_of(data())
    most = most_sketches(90, 9)
    assert most == 9
    masked = run(program, shards, 1 + most, reduction=PairwiseMasks())
    with pytest.raises(CompositionError, match="shows what single parties send"):
        run(program, shards, 1 + most)
    known = run(replace(program, is_guarded=False), shards, 1 + most)[-1].model["H"]
    assert_allclose(masked[-1].model["H"], known, rtol=1e-5, atol=1e-7)
    with pytest.raises(PartyError, match="the 90 rows of all parties"):
        run(program, shards, 2 + most, reduction=PairwiseMasks())


def test_under_masks_every_sum_is_over_the_same_parties():
    program, shards = SketchedSums(K, Gaussian(4), budget="total"), shards_of(data())
    with pytest.raises(ParameterError, match="'p01'"):
        run(program, shards, 4, reduction=PairwiseMasks(), absent={2: frozenset({"p01"})})
    own = replace(program, budget="own")
    rounds = run(own, shards, 4, reduction=PairwiseMasks(), absent={2: frozenset({"p01"})})
    assert [len(done.participants) for done in rounds] == [3, 3, 2, 3]


@pytest.mark.parametrize("kind", [Gaussian, CountSketch], ids=lambda kind: kind.__name__)
def test_h_gets_good_within_the_budget(kind):
    X = data(900, 1)
    program = SketchedSums(K, kind(12), is_guarded=kind is Gaussian)
    shards = shards_of(X, (300, 600))
    most = most_sketches(300, 12)
    errors = []
    for done in run(program, shards, 1 + most, Sequential()):
        H = done.model["H"]
        W = program.solver.solve_rows(as_matrix(X), np.ascontiguousarray(H.T))
        errors.append(np.linalg.norm(X - W @ H) / np.linalg.norm(X))
    assert errors[-1] < 0.1
    assert errors[-1] < 0.3 * errors[0]


def test_sparse_rows_and_tensors_run_the_same():
    X = data() * (np.random.default_rng(1).random((90, M)) < 0.5)
    program = SketchedSums(K, Gaussian(4), columns_sketch=SOME)
    expected = run(program, shards_of(X), 5)[-1].model["H"]
    sparse = [replace(s, matrix=as_matrix(sp.csr_array(s.matrix.X))) for s in shards_of(X)]
    assert_allclose(run(program, sparse, 5)[-1].model["H"], expected, rtol=1e-8, atol=1e-10)
    single = [replace(s, matrix=as_matrix(s.matrix.X.astype(np.float32))) for s in shards_of(X)]
    assert run(program, single, 5)[-1].model["H"].dtype == np.float32
    torch = pytest.importorskip("torch")
    tensors = [replace(s, matrix=as_matrix(torch.from_numpy(s.matrix.X))) for s in shards_of(X)]
    H = run(program, tensors, 5)[-1].model["H"]
    assert isinstance(H, torch.Tensor)
    assert_allclose(H.numpy(), expected, rtol=1e-7, atol=1e-9)


def test_checkpoints_can_be_written_and_read(tmp_path):
    point = run(SketchedSums(K, Gaussian(4)), shards_of(data()), 3)[-1].checkpoint
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
def test_what_does_not_go_together_is_refused_at_once(settings, error):
    with pytest.raises(error):
        SketchedSums(**{"rank": K, "rows_sketch": Gaussian(4), **settings})
