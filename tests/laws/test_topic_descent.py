"""Laws of topics by descent: rounds against a loop of a few lines, and the bound of mutual information."""

from __future__ import annotations

import re
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from method_tables import fednmf, fednmf_mi
from numpy.testing import assert_allclose, assert_array_equal
from scipy import sparse

import partsong
from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Layout, Schedule, Shard
from partsong.core.streams import key, stream
from partsong.data.conversion import as_matrix
from partsong.engines.local import Parallel, Sequential
from partsong.engines.rounds import sample_participants
from partsong.errors import DataTypeError, DivergenceError, ParameterError
from partsong.federation import wire
from partsong.io.state_file import read_state, write_state
from partsong.methods.counts import CooccurrenceSums, FrequencySums
from partsong.methods.fedlda import FederatedLDA
from partsong.methods.fednmf import DescentPartyState, FederatedDescent
from partsong.methods.mutual_information import numpy_backend
from partsong.methods.mutual_information.batches import operations, to_documents
from partsong.methods.mutual_information.critics import (
    ClippedBound,
    Concat,
    JensenShannon,
    MutualInformation,
    NoInformation,
    Separable,
    draw_parameters,
)
from partsong.methods.mutual_information.descent import Descent, fit_gradient
from partsong.secure_aggregation.protocol import SecureSum

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")

V, K, NAMES = 31, 4, ("a", "b", "c")
SMALL = {"epochs": 2, "batch": 8}
JS = MutualInformation(0.1, Concat(6, 9), JensenShannon())
SEPARABLE = MutualInformation(0.5, Separable(hidden=12, embedding=5), rate=0.2)
PROGRAMS = {
    "fednmf": fednmf(K, **SMALL),
    "fednmf document": fednmf(K, weight_step="document", warm_start_weights=True, **SMALL),
    "adagrad": fednmf(K, server="adagrad", **SMALL),
    "yogi": fednmf(K, server="yogi", **SMALL),
    "adam": fednmf(K, server="adam", server_rate=0.5, **SMALL),
    "mi": fednmf_mi(K, **SMALL),
    "mi js adam": fednmf(K, server="adam", information=JS, **SMALL),
    "mi separable": fednmf(K, information=SEPARABLE, **SMALL),
}
every_program = pytest.mark.parametrize("name", PROGRAMS)


def counts(seed=0, rows=(21, 30, 17)):
    rng = np.random.default_rng(seed)
    X = rng.poisson(3 * rng.gamma(0.2, size=(sum(rows), K)) @ rng.dirichlet(np.full(V, 0.2), K)).astype(float)
    X[3] = 0
    return np.split(X, np.cumsum(rows)[:-1])


def shards_of(parts=None, form=sparse.csr_array):
    parts = counts() if parts is None else parts
    return [Shard(name, as_matrix(form(X)), key(5, name)) for name, X in zip(NAMES, parts, strict=False)]


def run(
    program, shards=None, rounds=3, engine=Sequential(record=True), reduction=PlainReduction(), resume=None, **more
):
    shards = shards_of() if shards is None else shards
    return list(engine.run(program, shards, Schedule(rounds, 11, **more), reduction=reduction, resume=resume))


def loss(X, W, H):
    return np.square(X - W @ H).sum() / len(X)


@pytest.mark.parametrize("rank", [3, 40])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_steps_of_both_factors_are_those_of_the_gradient(rank, kind):
    """Against differences of (1/b)‖X − W H‖²; rank 40 takes products in the other order."""
    rng = np.random.default_rng(0)
    X, W, H = counts()[0][:9], rng.random((9, rank)), rng.random((rank, V))
    native = np.ascontiguousarray
    if kind == "torch":
        torch = pytest.importorskip("torch")
        native = lambda array: torch.from_numpy(np.ascontiguousarray(array))  # noqa: E731
    (bag,) = to_documents(as_matrix(native(X))).batches(9)
    on, step, rate = operations(native(W)), 1e-6, 1e-5

    def slope(f, x):
        out = np.zeros_like(x)
        for place in np.ndindex(x.shape):
            e = np.zeros_like(x)
            e[place] = step
            out[place] = (f(x + e) - f(x - e)) / (2 * step)
        return out

    found = np.asarray(fit_gradient(on, bag, native(W), native(H.T)))
    assert_allclose(found, slope(lambda W: loss(X, W, H), W), rtol=1e-5, atol=1e-6)
    moved = Descent(rate=rate)._move_topics(on, bag, native(W), native(H.T), native(np.zeros((V, rank))))
    wanted = np.maximum(0, H - rate * slope(lambda H: loss(X, W, H), H))
    assert_allclose(np.asarray(moved).T, wanted, rtol=1e-6, atol=1e-9)


def centralised(X, W, H, theta, information, draws, *, epochs, batch, rate):
    """FedNMF+MI at one place, dense: H, then W with the new H, then θ with the new W."""
    for draw in draws:
        for _ in range(epochs):
            order = draw.permutation(len(X))
            number = -(-len(X) // batch)
            for i in range(number):
                S = order[len(X) * i // number : len(X) * (i + 1) // number]
                b = len(S)
                H = np.maximum(0, H - rate * 2 / b * (W[S].T @ (W[S] @ H - X[S])))
                gradient = 2 / b * ((W[S] @ H - X[S]) @ H.T)
                if theta:
                    (bag,) = to_documents(as_matrix(sparse.csr_array(X[S]))).batches(b)
                    critic, bound = information.critic, information.bound
                    scores, trace = critic.scores(theta, critic.read(theta, bag), W[S])
                    gradient -= information.strength * critic.pull(theta, trace, bound.slopes(scores))
                W[S] = np.maximum(0, W[S] - rate * gradient)
                if theta:
                    scores, trace = critic.scores(theta, critic.read(theta, bag), W[S])
                    critic.ascend(theta, bag, trace, bound.slopes(scores), rate)
    return W, H


@pytest.mark.parametrize("strength", [0.0, 0.4])
def test_one_party_and_an_average_are_centralised_descent(strength):
    program = fednmf_mi(K, strength=strength, epochs=2, batch=8, rate=0.05)
    X = np.vstack(counts())
    shard = Shard("all", as_matrix(sparse.csr_array(X)), key(5, "all"))
    last = run(program, [shard], 3)[-1]
    _, model = program.start_server(Layout.of([shard], 11))
    theta = {name[6:]: a.copy() for name, a in model.arrays.items() if name != "H"}
    W = stream(shard.secret, "weights", "all").random((len(X), K)) * np.sqrt(3 / K)
    draws = [stream(shard.secret, "batches", "all", t) for t in range(3)]
    W, H = centralised(X, W, model["H"].copy(), theta, program.descent.information, draws, epochs=2, batch=8, rate=0.05)
    assert_allclose(last.model["H"], H, rtol=1e-9, atol=1e-12)
    assert_allclose(last.checkpoint.parties["all"].W, W, rtol=1e-9, atol=1e-12)
    for name, array in theta.items():
        assert_allclose(last.model[f"theta.{name}"], array, rtol=1e-9, atol=1e-12)
    assert bool(theta) == (strength > 0)


def test_without_strength_it_is_fednmf_and_no_critic_is_sent():
    plain, without = fednmf(K, **SMALL), fednmf_mi(K, strength=0, **SMALL)
    assert plain == without
    for one, other in zip(run(plain), run(without), strict=True):
        assert_array_equal(one.model["H"], other.model["H"])
        assert {tuple(message.arrays) for _, _, message in other.traffic} == {("H",)}
        assert set(other.model.arrays) == {"H"}


def test_a_whisper_of_information_moves_topics_next_to_nothing():
    plain = run(fednmf(K, **SMALL))[-1].model["H"]
    faint = run(fednmf_mi(K, strength=1e-9, **SMALL))[-1].model["H"]
    loud = run(fednmf_mi(K, strength=50.0, rate=0.05, **SMALL))[-1].model["H"]
    assert_allclose(faint, plain, rtol=1e-6, atol=1e-9)
    assert np.abs(loud - plain).max() > 1e-6


@every_program
def test_nothing_is_ever_negative(name, monkeypatch):
    seen, plain = [], numpy_backend.rectify
    monkeypatch.setattr(numpy_backend, "rectify", lambda Z: seen.append(plain(Z).min()) or Z)
    for done in run(PROGRAMS[name]):
        assert (done.model["H"] >= 0).all()
        assert done.model["H"].any()
        assert all((party.W >= 0).all() for party in done.checkpoint.parties.values())
        assert all((message["H"] >= 0).all() for _, _, message in done.traffic)
    assert len(seen) >= 2 * 3 * 2
    assert min(seen) >= 0


@pytest.mark.parametrize("weight_step", ["batch", "document"])
def test_descent_fits_documents_better_and_better(weight_step):
    program = fednmf(K, epochs=10, batch=8, rate=0.02, weight_step=weight_step)
    X = np.vstack(counts())

    def error(H):
        Ht = np.ascontiguousarray(H.T)
        return sum(s.matrix.squared_distance(program.solver.solve_rows(s.matrix, Ht), Ht) for s in shards_of())

    rounds = run(program, rounds=12)
    errors = [error(done.model["H"]) for done in rounds[::4]]
    assert errors[0] > errors[1] > errors[2]
    assert errors[-1] < np.square(X).sum()


def test_a_documents_own_step_does_not_shrink_with_the_batch():
    X, rng = counts()[0], np.random.default_rng(0)
    W, Ht = rng.random((len(X), K)), rng.random((V, K)) * 0.1
    moves = {}
    for weight_step in ("batch", "document"):
        descent = Descent(1, len(X), 1e-7, weight_step)
        moves[weight_step] = descent.run(to_documents(as_matrix(X)), W, Ht, {}, np.random.default_rng(1)).W - W
    assert_allclose(moves["document"], len(X) * moves["batch"], rtol=1e-3, atol=1e-12)


@every_program
def test_engines_agree_and_a_resumed_run_goes_on_as_if_it_had_not_stopped(name):
    program, absent = PROGRAMS[name], {1: frozenset({"b"}), 2: frozenset({"a", "c"})}
    rounds = run(program, absent=absent)
    others = run(program, shards_of()[::-1], engine=Parallel(3), absent=absent)
    resumed = run(program, resume=rounds[0].checkpoint, absent=absent)
    for one, other in [*zip(rounds, others, strict=True), *zip(rounds[1:], resumed, strict=True)]:
        assert one.participants == other.participants
        for array in one.model.arrays:
            assert_array_equal(one.model[array], other.model[array])


@every_program
def test_traffic_is_what_the_paper_counts_and_neither_documents_nor_weights(name):
    program, parts = PROGRAMS[name], dict(zip(NAMES, counts(), strict=True))
    sizes = program.descent.information.sizes(V, K)
    numbers = V * K + sum(int(np.prod(size.shape)) for size in sizes.values())
    if name == "mi":
        assert numbers == V * K + 32 * (V + K + 1) + 32 * 256 + 256 + 257
    for done in run(program, absent={1: frozenset({"b"})}):
        assert len(done.traffic) == len(done.participants)
        assert done.bytes_down == 8 * numbers + 8, "a weight goes with it, that says nothing"
        for party, _, message in done.traffic:
            assert message.nbytes == 8 * numbers + 8
            assert message.weight == len(parts[party])
            assert set(message.arrays) == {"H", *(f"theta.{one}" for one in sizes)}
            assert not any(len(parts[party]) in array.shape for array in message.arrays.values())


def test_the_page_on_what_leaves_lists_every_array_with_its_size_and_weight():
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "exposure.md").read_text("utf-8")
    lines = page.split("## Topic models\n", 1)[1].split("\n## ", 1)[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"][2:]
    size = r"(?:\d+|[a-zA-Z])(?: × (?:\d+|[a-zA-Z]))*"
    cells = [
        (name.strip("`"), array, shape, weight)
        for name, arrays, weight, *_ in rows
        for array, shape in re.findall(rf"`([\w.]+)` ({size})(?=,|$)", arrays)
    ]
    assert len(cells) == sum(row[1].count("`") for row in rows) / 2, "an array without a size"
    letters = {"k": K, "V": V, "c": 32, "d": 256}
    programs = {
        "fednmf": fednmf(K, epochs=1),
        "fednmf-mi": fednmf_mi(K, epochs=1),
        "fedlda": FederatedLDA(K),
    }
    for recipe, program in programs.items():
        listed = {
            array: tuple(letters.get(part) or int(part) for part in shape.split(" × "))
            for name, array, shape, weight in cells
            if (name, weight) == (recipe, "n_p")
        }
        sent = run(program, rounds=1)[0].traffic
        assert all({name: a.shape for name, a in message.arrays.items()} == listed for _, _, message in sent)
    assert {name for name, *_ in cells} == set(programs)


def test_the_critic_tells_which_words_a_party_has_to_the_letter():
    program, parts = PROGRAMS["mi"], dict(zip(NAMES, counts(), strict=True))
    _, before = program.start_server(Layout.of(shards_of(), 11))
    for party, _, message in run(program, rounds=1)[0].traffic:
        has_moved = (message["theta.words"] != before["theta.words"]).any(1)
        assert_array_equal(has_moved, parts[party].any(0))


def test_a_single_document_is_found_in_one_upload():
    """H_p = A H + u xᵀ where nothing was cut off, with one A (k × k) for all words, and most are not in x."""
    x = np.zeros((1, V))
    x[0, [2, 7, 11, 30]] = 3, 1, 2, 1
    program = fednmf(K, epochs=2, batch=8)
    shards = shards_of([x, *counts()[1:]])
    _, before = program.start_server(Layout.of(shards, 11))
    upload = next(m for party, _, m in run(program, shards, 1)[0].traffic if party == "a")
    H, H_p, weight = before["H"], upload["H"], np.ones(V)
    for _ in range(30):  # least absolute deviations
        A = np.linalg.lstsq((H * weight).T, (H_p * weight).T, rcond=None)[0].T
        weight = 1 / np.sqrt(np.linalg.norm(H_p - A @ H, axis=0) + 1e-12)
    found = np.linalg.norm(H_p - A @ H, axis=0)
    assert_allclose(found / np.linalg.norm(found), x[0] / np.linalg.norm(x), atol=0.01)


def test_a_run_goes_on_from_a_checkpoint_on_disk(tmp_path):
    program = PROGRAMS["mi js adam"]
    rounds = run(program)
    write_state(tmp_path / "point", rounds[0].checkpoint)
    point = read_state(tmp_path / "point")
    for one, other in zip(rounds[1:], run(program, resume=point), strict=True):
        for array in one.model.arrays:
            assert_array_equal(one.model[array], other.model[array])


def test_those_who_take_part_are_weighed_by_their_documents():
    program = PROGRAMS["mi"]
    done = run(program, rounds=1, absent={0: frozenset({"b"})})[0]
    uploads = {party: message for party, _, message in done.traffic}
    n = {party: message.weight for party, message in uploads.items()}
    for array in done.model.arrays:
        mean = sum(n[p] * uploads[p][array] for p in n) / sum(n.values())
        assert_allclose(done.model[array], mean, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["mi", "adam"])
def test_masks_change_nothing_but_rounding(name):
    shown, hidden = run(PROGRAMS[name]), run(PROGRAMS[name], reduction=SecureSum())
    assert_allclose(hidden[-1].model["H"], shown[-1].model["H"], rtol=1e-5, atol=1e-6)


@every_program
@pytest.mark.parametrize("form", ["dense", "torch", "torch csr"])
def test_whatever_holds_the_documents_topics_are_the_same(name, form):
    def held(X):
        if form == "dense":
            return X
        tensor = pytest.importorskip("torch").from_numpy(X.copy())
        return tensor.to_sparse_csr() if form == "torch csr" else tensor

    wanted, found = run(PROGRAMS[name])[-1].model, run(PROGRAMS[name], shards_of(form=held))[-1].model
    for array in wanted.arrays:
        assert_allclose(np.asarray(found[array]), wanted[array], rtol=1e-7, atol=1e-10)


@every_program
def test_torch_is_for_tensors_alone(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert run(PROGRAMS[name], rounds=1)


@every_program
def test_single_precision_stays_single(name):
    done = run(PROGRAMS[name], shards_of(form=lambda X: sparse.csr_array(X.astype(np.float32))))[-1]
    exact = run(PROGRAMS[name])[-1].model["H"]
    assert {array.dtype for array in done.model.arrays.values()} == {np.dtype(np.float32)}
    assert {party.W.dtype for party in done.checkpoint.parties.values()} == {np.dtype(np.float32)}
    assert_allclose(done.model["H"], exact, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("strength", [0.0, 0.1])
def test_no_batch_is_ever_dense(strength):
    wide, batch = 200_000, 64
    X = sparse.random(3 * batch, wide, 5 / wide, format="csr", random_state=0, dtype=np.float32)
    program, shard = fednmf_mi(4, strength=strength, epochs=1, batch=batch), Shard("a", as_matrix(X), 1)
    _, model = program.start_server(Layout.of([shard], 0))
    state, _ = program.local(shard, DescentPartyState(), model)
    tracemalloc.start()
    program.local(shard, state, model)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.8 * 4 * batch * wide


def test_arguments_are_left_alone():
    program, shard = PROGRAMS["mi"], shards_of()[0]
    _, model = program.start_server(Layout.of([shard], 11))
    party, _ = program.local(shard, program.start_party(shard, Layout.of([shard], 11)), model)
    held = {name: array.copy() for name, array in model.arrays.items()}
    W = party.W.copy()
    program.local(shard, party, model)
    assert_array_equal(party.W, W)
    for name, array in held.items():
        assert_array_equal(model[name], array)


def test_weights_stay_at_a_party_until_it_comes_again():
    rounds = run(PROGRAMS["fednmf"], rounds=4, absent={1: frozenset({"a"}), 2: frozenset({"a"})})
    states = [done.checkpoint.parties["a"] for done in rounds]
    assert states[0] is states[1] is states[2]
    assert [state.rounds for state in states] == [1, 1, 1, 2]


def total_loss(program, shard, W, model):
    """L over all documents of a party as one batch."""
    (bag,) = to_documents(shard.matrix).batches(len(W))
    information = program.descent.information
    theta = {name[6:]: array for name, array in model.arrays.items() if name != "H"}
    scores, _ = information.critic.scores(theta, information.critic.read(theta, bag), W)
    fit = shard.matrix.squared_distance(W, np.ascontiguousarray(model["H"].T)) / len(W)
    return fit - information.strength * float(information.bound.value(scores))


def test_refreshed_weights_are_the_fit_and_with_information_better_than_the_fit():
    program = fednmf_mi(K, strength=5.0, epochs=20, batch=64, rate=0.02, critic_rate=0.5)
    done, shard = run(program, rounds=4)[-1], shards_of()[1]
    fitted = program.solver.solve_rows(shard.matrix, np.ascontiguousarray(done.model["H"].T))
    settled = program.refreshed(shard, done.checkpoint.parties["b"], done.model)
    assert (settled >= 0).all()
    assert total_loss(program, shard, settled, done.model) < total_loss(program, shard, fitted, done.model) - 1e-6
    plain = run(PROGRAMS["fednmf"])[-1]
    refreshed = PROGRAMS["fednmf"].refreshed(shard, plain.checkpoint.parties["b"], plain.model)
    assert_array_equal(refreshed, program.solver.solve_rows(shard.matrix, np.ascontiguousarray(plain.model["H"].T)))


def test_weights_alone_descend_to_the_fit():
    X, rng = counts()[0], np.random.default_rng(0)
    matrix, Ht = as_matrix(sparse.csr_array(X)), rng.random((V, K))
    descent = Descent(4000, 8, 0.01, "document")
    W = descent.fit_weights(to_documents(matrix), np.ones((len(X), K)), Ht, {}, np.random.default_rng(1))
    assert_allclose(W, PROGRAMS["fednmf"].solver.solve_rows(matrix, Ht), atol=1e-6)


def test_the_estimate_of_information_is_the_partys_own_and_there_is_none_without_a_critic():
    assert np.isnan(run(PROGRAMS["fednmf"])[-1].checkpoint.parties["a"].information)
    done = run(PROGRAMS["mi"])[-1]
    assert np.isfinite(done.checkpoint.parties["a"].information)
    assert done.metrics == {}


@pytest.mark.parametrize("rows", [1, 2, 9])
@every_program
def test_a_party_with_few_documents_takes_part(name, rows):
    few = [counts()[0][4 : 4 + rows], *counts()[1:]]
    done = run(PROGRAMS[name], shards_of(few))[-1]
    assert np.isfinite(done.model["H"]).all()


@every_program
def test_a_party_without_documents_or_words_changes_nothing_much(name):
    nothing = [np.zeros((0, V)), np.zeros((5, V)), counts()[2]]
    done = run(PROGRAMS[name], shards_of(nothing))[-1]
    assert np.isfinite(done.model["H"]).all()


@pytest.mark.parametrize(("rate", "fate"), [(50.0, "collapsed to zero|descent diverged")])
@pytest.mark.parametrize("strength", [0.0, 0.5])
def test_steps_that_are_too_large_are_told(rate, fate, strength):
    program = fednmf_mi(K, strength=strength, rate=rate, epochs=30, batch=8, weight_step="document")
    with pytest.raises(DivergenceError, match=fate):
        run(program)


def test_known_cells_are_no_documents():
    from partsong.data.observed import ObservedMatrix

    matrix = ObservedMatrix.__new__(ObservedMatrix)
    with pytest.raises(DataTypeError, match="single rows"):
        to_documents(matrix)


@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 0},
        {"batch": 0},
        {"rate": 0.0},
        {"rate": "0.05"},
        {"rate": None},
        {"weight_step": "h"},
        {"server": "sgd"},
        {"server_rate": -1.0, "server": "adam"},
    ],
)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ParameterError):
        fednmf(K, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"strength": -0.1},
        {"strength": "0.1"},
        {"critic": "mlp"},
        {"mi_gradient": "kl"},
        {"critic_rate": 0.0},
        {"critic_rate": "0.1"},
    ],
)
def test_settings_of_information_out_of_range_are_refused(settings):
    with pytest.raises(ParameterError):
        fednmf_mi(K, **settings)


def test_names_are_those_of_parts():
    found = fednmf_mi(K, critic="separable", mi_gradient="js", strength=0.5, critic_rate=0.2)
    assert found.descent.information == MutualInformation(0.5, Separable(), JensenShannon(), 0.2)
    assert fednmf_mi(K).descent.information == MutualInformation(0.1, Concat(32, 256), ClippedBound(5.0))


def test_a_part_is_changed_by_replacing_it():
    program = FederatedDescent(K, Descent(information=MutualInformation(0.2, Separable())))
    assert replace(program, descent=replace(program.descent, information=NoInformation())) == FederatedDescent(K)


@pytest.mark.parametrize(("parties", "fraction", "count"), [(10, 0.2, 2), (10, 0.01, 1), (50, 0.2, 10), (3, 1.0, 3)])
def test_a_fraction_of_the_parties_is_drawn_for_each_round(parties, fraction, count):
    names = [f"p{i:02d}" for i in range(parties)]
    schedule = Schedule(40, 3, absent=sample_participants(names, 40, fraction, 3))
    rounds = [schedule.participants(names, t) for t in range(40)]
    assert {len(present) for present in rounds} == {count}
    assert sample_participants(names[::-1], 10, fraction, 3) == {t: a for t, a in schedule.absent.items() if t < 10}
    if count < parties:
        assert len(set(rounds)) > 5
        assert {name for present in rounds for name in present} == set(names) or parties > 40 * count / 5
        assert sample_participants(names, 40, fraction, 4) != schedule.absent


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.2, float("nan")])
def test_a_fraction_of_parties_is_above_nothing_and_at_most_all(fraction):
    with pytest.raises(ParameterError, match="fraction"):
        sample_participants(["a", "b"], 3, fraction, 0)


QUICK = {"epochs": 2, "batch": 8, "rate": 0.1}
STORED_PROGRAMS = {
    "fednmf": fednmf(3, **QUICK),
    "fednmf adam": fednmf(3, server="adam", **QUICK),
    "fednmf-mi yogi": fednmf_mi(3, server="yogi", **QUICK),
    "fedlda": FederatedLDA(3, iterations=10, starts_over=False),
}
COUNTS = {"pairs": CooccurrenceSums.of([(0, 1, 2), (2, 3)]), "frequencies": FrequencySums()}


def shards():
    draw = np.random.default_rng(0)
    return [Shard(name, as_matrix(draw.poisson(0.7, (20, 9)) * 1.0), key(1, name)) for name in "abc"]


def run_stored(program, rounds, resume=None):
    return list(Sequential().run(program, shards(), Schedule(rounds, 3), reduction=PlainReduction(), resume=resume))


@pytest.mark.parametrize("name", STORED_PROGRAMS)
def test_a_run_from_a_file_is_the_uninterrupted_run(name, tmp_path):
    whole = run_stored(STORED_PROGRAMS[name], 4)
    write_state(tmp_path / "c.ckpt", whole[1].checkpoint)
    point = read_state(tmp_path / "c.ckpt")
    rest = run_stored(STORED_PROGRAMS[name], 4, point)
    assert [np.asarray(done.model["H"]).tobytes() for done in rest] == [
        np.asarray(done.model["H"]).tobytes() for done in whole[2:]
    ]


@pytest.mark.parametrize("name", [*STORED_PROGRAMS, *COUNTS])
def test_sites_and_servers_can_keep_their_states(name, tmp_path):
    program = (STORED_PROGRAMS | COUNTS)[name]
    point = run_stored(program, 1)[-1].checkpoint
    for number, state in enumerate((point.server, *point.parties.values())):
        wire.save_state(tmp_path / f"{number}.state", state)
        again = wire.load_state(tmp_path / f"{number}.state", type(state))
        assert type(again) is type(state)
        assert repr(again) == repr(state)


def test_a_mixture_is_completed_without_penalties_of_least_squares():
    rows = [shard.matrix.X for shard in shards()]
    model = partsong.FederatedNMF(method=FederatedLDA(3), random_state=0, rounds=5).fit(rows)
    assert np.allclose(model.components_.sum(axis=1), 1)
    assert np.allclose(model.transform(np.vstack(rows)).sum(axis=1), 1)


CRITIC_V, CRITIC_K, B = 13, 4, 7
CRITICS = [Concat(5, 6), Separable(hidden=6, embedding=3, layers=2), Separable(hidden=4, embedding=2, layers=1)]
BOUNDS = [ClippedBound(), ClippedBound(0.4), JensenShannon()]
both = pytest.mark.parametrize("kind", ["numpy", "torch"])


def by_hand(s, clip):
    """Pair by pair, as printed in the paper with its clip put right."""
    b = len(s)
    apart = [np.exp(min(max(s[i, j], -clip), clip)) for i in range(b) for j in range(b) if i != j]
    return sum(s[i, i] for i in range(b)) / b - np.log(sum(apart) / (b * (b - 1)))


def jensen_shannon(s):
    b = len(s)
    together = sum(-np.log1p(np.exp(-s[i, i])) for i in range(b)) / b
    apart = sum(np.log1p(np.exp(s[i, j])) for i in range(b) for j in range(b) if i != j)
    return together - apart / (b * (b - 1))


def objective(bound):
    return (lambda s: by_hand(s, bound.clip)) if isinstance(bound, ClippedBound) else jensen_shannon


def differences(f, x, step=1e-6):
    out = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        above, below = x.copy(), x.copy()
        above[place] += step
        below[place] -= step
        out[place] = (f(above) - f(below)) / (2 * step)
    return out


def batch(kind="numpy", seed=0):
    """Sparse documents, one of which is empty, weights, and a way to this kind of array."""
    rng = np.random.default_rng(seed)
    X = np.where(rng.random((B, CRITIC_V)) < 0.4, rng.integers(1, 4, (B, CRITIC_V)), 0).astype(float)
    X[2], X[:, 5] = 0, 0
    W = rng.random((B, CRITIC_K))
    if kind == "torch":
        torch = pytest.importorskip("torch")
        (bag,) = to_documents(as_matrix(torch.from_numpy(X).to_sparse_csr())).batches(B)
        return X, bag, W, lambda array: torch.from_numpy(array.copy())
    (bag,) = to_documents(as_matrix(sparse.csr_array(X))).batches(B)
    return X, bag, W, np.copy


def lively(critic, seed=0):
    """Parameters several times larger than a start, so that scores differ and some are clipped."""
    theta = draw_parameters(critic, CRITIC_V, CRITIC_K, np.random.default_rng(seed), "float64")
    return {name: 2.5 * array for name, array in theta.items()}


def scores_by_hand(critic, theta, X, W):
    """T(x_i, w_j) on dense vectors: for each pair on its own where they meet in the first layer."""
    if isinstance(critic, Concat):
        return np.array([[concatenated(theta, np.concatenate([x, w])) for w in W] for x in X])
    ends = []
    for side, rows in (("document", X), ("weights", W)):
        for i in range(critic.depth):
            rows = rows @ theta[f"{side}.{i}"] + theta[f"{side}.{i}.shift"]
            rows = np.maximum(0, rows) if i + 1 < critic.depth else rows
        ends.append(rows)
    return ends[0] @ ends[1].T


def concatenated(theta, pair):
    first = np.maximum(0, pair @ np.vstack([theta["words"], theta["weights"]]) + theta["shift"])
    second = np.maximum(0, first @ theta["middle"] + theta["middle_shift"])
    return second @ theta["last"] + theta["last_shift"][0]


@both
@pytest.mark.parametrize("bound", BOUNDS, ids=repr)
def test_the_value_is_that_of_the_printed_sum_with_its_clip_put_right(bound, kind):
    scores = 4 * np.random.default_rng(1).standard_normal((B, B))
    assert np.abs(scores).max() > 5
    _, _, _, native = batch(kind)
    assert_allclose(float(bound.value(native(scores))), by_hand(scores, bound.clip), rtol=1e-12)


def test_scores_of_pairs_that_belong_together_are_not_clipped():
    scores = np.zeros((4, 4))
    np.fill_diagonal(scores, 40.0)
    assert_allclose(ClippedBound(5.0).value(scores), 40.0)


def test_the_other_scores_are_clipped_on_both_sides_and_the_printed_clip_would_make_them_all_the_same():
    low, high = np.full((3, 3), -50.0), np.full((3, 3), 50.0)
    np.fill_diagonal(low, 0)
    np.fill_diagonal(high, 0)
    assert_allclose(ClippedBound(5.0).value(low), 5.0)
    assert_allclose(ClippedBound(5.0).value(high), -5.0)


@pytest.mark.parametrize("clip", [0.0, -1.0, float("nan"), float("inf")])
def test_a_clip_is_a_number_above_zero(clip):
    with pytest.raises(ParameterError, match="clip"):
        ClippedBound(clip)


@both
@pytest.mark.parametrize("bound", BOUNDS, ids=repr)
def test_slopes_are_those_of_the_objective(bound, kind):
    scores = 2 * np.random.default_rng(2).standard_normal((B, B))
    _, _, _, native = batch(kind)
    found = np.asarray(bound.slopes(native(scores)))
    assert_allclose(found, differences(objective(bound), scores), atol=1e-7)


@pytest.mark.parametrize("bound", [ClippedBound(), JensenShannon()], ids=repr)
def test_scores_far_out_have_finite_slopes(bound):
    scores = 1e4 * np.random.default_rng(2).standard_normal((B, B)).astype(np.float32)
    assert np.isfinite(bound.slopes(scores)).all()
    assert bound.slopes(scores).dtype == np.float32


@both
@pytest.mark.parametrize("critic", CRITICS, ids=repr)
def test_scores_of_a_batch_are_those_of_each_pair(critic, kind):
    X, bag, W, native = batch(kind)
    theta = lively(critic)
    here = {name: native(array) for name, array in theta.items()}
    scores, _ = critic.scores(here, critic.read(here, bag), native(W))
    assert_allclose(np.asarray(scores), scores_by_hand(critic, theta, X, W), rtol=1e-10, atol=1e-12)


@both
@pytest.mark.parametrize("bound", BOUNDS, ids=repr)
@pytest.mark.parametrize("critic", CRITICS, ids=repr)
def test_the_pull_on_weights_is_the_gradient_of_the_objective(critic, bound, kind):
    X, bag, W, native = batch(kind)
    theta = lively(critic)
    here = {name: native(array) for name, array in theta.items()}
    information = MutualInformation(0.3, critic, bound)
    found = information.pull(here, information.read(here, bag), native(W))
    J = objective(bound)
    wanted = differences(lambda W: 0.3 * J(scores_by_hand(critic, theta, X, W)), W)
    assert np.abs(wanted).max() > 1e-4
    assert_allclose(np.asarray(found), wanted, atol=1e-7)


@both
@pytest.mark.parametrize("bound", BOUNDS, ids=repr)
@pytest.mark.parametrize("critic", CRITICS, ids=repr)
def test_the_critic_climbs_along_the_gradient_of_the_objective(critic, bound, kind):
    X, bag, W, native = batch(kind)
    theta = lively(critic)
    here = {name: native(array) for name, array in theta.items()}
    information = MutualInformation(0.3, critic, bound)
    estimate = information.learn(here, bag, information.read(here, bag), native(W), 1.0)
    J = objective(bound)
    assert_allclose(float(estimate), by_hand(scores_by_hand(critic, theta, X, W), bound.clip), rtol=1e-9)
    for name, array in theta.items():
        wanted = differences(lambda a, name=name: J(scores_by_hand(critic, {**theta, name: a}, X, W)), array)
        assert_allclose(np.asarray(here[name]) - array, wanted, atol=2e-7, err_msg=name)


@pytest.mark.parametrize("critic", CRITICS, ids=repr)
def test_words_that_no_document_has_do_not_move(critic):
    X, bag, W, _ = batch()
    theta = lively(critic)
    here = {name: array.copy() for name, array in theta.items()}
    information = MutualInformation(0.3, critic)
    information.learn(here, bag, information.read(here, bag), W, 1.0)
    name = "words" if isinstance(critic, Concat) else "document.0"
    is_new = ~X.any(0)
    assert is_new.any()
    assert_array_equal(here[name][is_new], theta[name][is_new])


@pytest.mark.parametrize("critic", [Concat(), Separable()], ids=repr)
def test_sizes_and_start_are_those_of_linear_layers(critic):
    sizes = critic.sizes(CRITIC_V, CRITIC_K)
    theta = draw_parameters(critic, CRITIC_V, CRITIC_K, np.random.default_rng(0), "float32")
    assert {name: array.shape for name, array in theta.items()} == {name: size.shape for name, size in sizes.items()}
    for name, array in theta.items():
        assert array.dtype == np.float32
        assert np.abs(array).max() <= sizes[name].inputs ** -0.5
    if isinstance(critic, Concat):
        assert sum(a.size for a in theta.values()) == 32 * (CRITIC_V + CRITIC_K + 1) + 32 * 256 + 256 + 257


def test_a_learned_critic_tells_documents_that_share_no_word():
    """Weights that say which document it is have more information than weights that say nothing."""
    X = np.kron(np.eye(4), np.ones((4, 3)))
    W_telling, W_dull = np.kron(np.eye(4), np.ones((4, 1))), np.ones((16, 4)) / 4
    (bag,) = to_documents(as_matrix(sparse.csr_array(X))).batches(16)
    critic = Concat(8, 16)
    information, seen = MutualInformation(1.0, critic, JensenShannon()), {}
    for name, W in (("telling", W_telling), ("dull", W_dull)):
        theta = draw_parameters(critic, 12, 4, np.random.default_rng(0), "float64")
        for _ in range(300):
            seen[name] = float(information.learn(theta, bag, information.read(theta, bag), W, 0.5))
    assert seen["telling"] > 0.8, "at most log 4 = 1.39"
    assert abs(seen["dull"]) < 0.1


def test_products_with_a_bag_are_those_with_its_rows():
    rng = np.random.default_rng(3)
    for kind in ("numpy", "torch"):
        X, _, _, native = batch(kind)
        source = as_matrix(sparse.csr_array(X)) if kind == "numpy" else as_matrix(native(X))
        order = rng.permutation(B)
        shuffled, F, out = to_documents(source).reordered(order), rng.random((CRITIC_V, 3)), rng.random((CRITIC_V, 2))
        for bag in shuffled.batches(3):
            rows, G = X[order][bag.first : bag.last], rng.random((len(bag), 2))
            on, before = operations(native(F)), native(out)
            assert_allclose(np.asarray(on.times(bag, native(F))), rows @ F, rtol=1e-12)
            on.add_transposed(bag, native(G), 0.7, before)
            assert_allclose(np.asarray(before), out + 0.7 * rows.T @ G, rtol=1e-12)


def test_batches_are_nearly_equal_and_hold_every_document_once():
    for n in (1, 5, 64, 65, 130):
        bags = list(to_documents(as_matrix(sparse.csr_array(np.eye(n)))).batches(64))
        assert [bag.first for bag in bags[1:]] == [bag.last for bag in bags[:-1]]
        assert (bags[0].first, bags[-1].last) == (0, n)
        sizes = [len(bag) for bag in bags]
        assert max(sizes) <= 64
        assert max(sizes) - min(sizes) <= 1
