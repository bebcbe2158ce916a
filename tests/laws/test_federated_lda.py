"""Laws of LDA between parties: with everybody it is batch variational Bayes, with some of them online; sums suffice."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import scipy.sparse as sp
from numpy.testing import assert_allclose, assert_array_equal
from scipy.optimize import linear_sum_assignment
from scipy.special import psi
from sklearn.decomposition import LatentDirichletAllocation

from partsong.aggregation.plaintext import PlainReduction
from partsong.core import runtime
from partsong.core.interfaces import Layout, Message, Schedule, Shard
from partsong.data.conversion import as_matrix
from partsong.data.observed import ObservedMatrix
from partsong.engines.local import Parallel, Sequential
from partsong.engines.virtual_clock import Asynchronous
from partsong.errors import CompositionError, DataError, ParameterError, ShapeError
from partsong.io.state_file import read_state, write_state
from partsong.kernels import lda as compiled_lda
from partsong.methods.fedlda import FederatedLDA, LDAPartyState
from partsong.secure_aggregation.protocol import SecureSum
from partsong.solvers.lda import TopicInference, expectations
from tests.laws.test_programs import shards_of

TOPICS, WORDS, DOCUMENTS = 4, 30, 90
CUTS = [20, 21, 60]


def corpus(documents=DOCUMENTS, words=WORDS, seed=0, length=9):
    """Counts of words that four planted topics have drawn; and the topics."""
    rng = np.random.default_rng(seed)
    topics = rng.dirichlet(np.full(words, 0.05), TOPICS)
    shares = rng.dirichlet(np.full(TOPICS, 0.2), documents)
    return sp.csr_array(rng.multinomial(rng.poisson(length, documents), shares @ topics).astype(float)), topics


def split(X, cuts=CUTS):
    ends = [0, *cuts, X.shape[0]]
    parts = [X[a:b] for a, b in pairwise(ends)]
    return [Shard(f"p{i:02d}", as_matrix(part), 1000 + i) for i, part in enumerate(parts)]


def run(program, shards, rounds=5, engine=Sequential(), reduction=PlainReduction(), **kwargs):
    return list(engine.run(program, shards, Schedule(rounds, 3, **kwargs), reduction=reduction))


def totals(rounds):
    return rounds[-1].checkpoint.server.totals.T


def start_of(program, shards):
    return program.start_server(Layout.of(shards, 3))[0].totals.T


class Given(np.random.RandomState):
    """Makes scikit-learn start from a given λ, and every E-step from γ = 1."""

    def __init__(self, start):
        super().__init__(0)
        self.start = start

    def gamma(self, shape, scale=1.0, size=None):
        start, self.start = self.start, None
        return np.ones(size) if start is None else start.copy()


def reference(X, topics, alpha, eta, start, rounds, steps=400):
    """Batch variational Bayes in plain NumPy, all documents together and each E-step of many iterations."""
    X, totals = X.toarray(), start.copy()
    for _ in range(rounds):
        B = np.exp(psi(totals) - psi(totals.sum(axis=1, keepdims=True)))
        gamma = np.ones((X.shape[0], topics))
        for _ in range(steps):
            e = np.exp(psi(gamma) - psi(gamma.sum(axis=1, keepdims=True)))
            gamma = alpha + e * ((X / (e @ B + 1e-100)) @ B.T)
        e = np.exp(psi(gamma) - psi(gamma.sum(axis=1, keepdims=True)))
        totals = eta + B * (e.T @ (X / (e @ B + 1e-100)))
    return totals


def test_exp_digamma_is_right_to_1e_11():
    x = np.logspace(-2.5, 6, 2000)
    out = np.empty_like(x)
    compiled_lda.exp_digamma(x, 1.0, out)
    assert_allclose(np.log(out), psi(x), rtol=2e-11, atol=2e-11)
    tiny = np.array([1e-300, 1e-12, 1e-5])
    compiled_lda.exp_digamma(tiny, 1.0, out[:3])
    assert_array_equal(out[:3], 0.0)


@pytest.mark.parametrize("rounds", [1, 3, 12])
@pytest.mark.parametrize("priors", [(None, None), (0.5, 0.01), (0.02, 1.0)], ids=str)
def test_with_everybody_it_is_batch_vb_of_scikit_learn(rounds, priors):
    X, _ = corpus()
    program, shards = FederatedLDA(TOPICS, *priors), split(X)
    theirs = LatentDirichletAllocation(
        TOPICS,
        doc_topic_prior=priors[0],
        topic_word_prior=priors[1],
        max_iter=rounds,
        learning_method="batch",
        random_state=Given(start_of(program, shards)),
    ).fit(X)
    done = run(program, shards, rounds)
    assert_allclose(totals(done), theirs.components_, rtol=1e-6, atol=1e-9)
    H = theirs.components_ / theirs.components_.sum(axis=1, keepdims=True)
    assert_allclose(program.components(done[-1].checkpoint.server), H, rtol=1e-6)
    assert_allclose(program.weights(done[-1].checkpoint.server, as_matrix(X)), theirs.transform(X), rtol=1e-5)


def test_the_perplexity_told_is_scikit_learns_of_the_model_sent():
    X, _ = corpus()
    program, shards = FederatedLDA(TOPICS), split(X)
    before, after = run(program, shards, 4)[-2:]
    theirs = LatentDirichletAllocation(TOPICS, max_iter=3, random_state=Given(start_of(program, shards))).fit(X)
    assert_allclose(totals([before]), theirs.components_, rtol=1e-6)
    assert after.metrics["perplexity"] == pytest.approx(theirs.perplexity(X), rel=1e-7)


def test_with_everybody_it_is_batch_vb_written_out():
    X, _ = corpus(40, 12)
    program, shards = FederatedLDA(TOPICS, 0.4, 0.2, iterations=400, tolerance=0.0), split(X, [7, 30])
    expected = reference(X, TOPICS, 0.4, 0.2, start_of(program, shards), 5)
    assert_allclose(totals(run(program, shards)), expected, rtol=1e-8)


@pytest.mark.parametrize("cuts", [[45], [1, 2, 3], [10, 20, 30, 31, 80]])
def test_any_split_is_the_pooled_model(cuts):
    X, _ = corpus()
    program = FederatedLDA(TOPICS)
    assert_allclose(totals(run(program, split(X, cuts), 8)), totals(run(program, split(X, []), 8)), rtol=1e-9)


@pytest.mark.parametrize("form", [sp.csc_array, lambda X: X.toarray(), lambda X: np.asfortranarray(X.toarray())])
def test_every_form_of_the_counts_gives_the_same(form):
    X, _ = corpus()
    shards = [Shard(shard.name, as_matrix(form(shard.matrix.by_row)), shard.secret) for shard in split(X)]
    assert_allclose(totals(run(FederatedLDA(TOPICS), shards)), totals(run(FederatedLDA(TOPICS), split(X))), rtol=1e-12)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("is_sparse", [False, True])
def test_tensors_give_the_same(is_sparse):
    torch = pytest.importorskip("torch")
    X, _ = corpus()

    def tensor(part):
        dense = torch.from_numpy(part.toarray())
        return dense.to_sparse_csr() if is_sparse else dense

    shards = [Shard(shard.name, as_matrix(tensor(shard.matrix.by_row)), shard.secret) for shard in split(X)]
    assert_allclose(totals(run(FederatedLDA(TOPICS), shards)), totals(run(FederatedLDA(TOPICS), split(X))), rtol=1e-12)
    theta = FederatedLDA(TOPICS).solver.solve_rows(shards[0].matrix, torch.rand(WORDS, TOPICS, dtype=torch.float64))
    assert type(theta) is torch.Tensor


def test_with_some_of_them_it_is_online_vb_of_scikit_learn():
    """One party in each round is partial_fit on its documents; N is known or was given."""
    X, _ = corpus()
    program, shards = FederatedLDA(TOPICS, documents=DOCUMENTS, offset=10.0, decay=0.7), split(X)
    names = [shard.name for shard in shards]
    order = ["p02", "p00", "p03", "p00", "p02", "p01"]
    absent = {i: frozenset(names) - {name} for i, name in enumerate(order)}
    theirs = LatentDirichletAllocation(
        TOPICS,
        learning_offset=10.0,
        learning_decay=0.7,
        total_samples=DOCUMENTS,
        batch_size=DOCUMENTS,
        random_state=Given(start_of(program, shards)),
    )
    for name in order:
        theirs.partial_fit(shards[names.index(name)].matrix.by_row)
    assert_allclose(totals(run(program, shards, len(order), absent=absent)), theirs.components_, rtol=1e-6)


def test_the_number_of_documents_is_taken_from_a_round_of_all_parties():
    X, _ = corpus()
    absent = {1: frozenset({"p00", "p03"})}
    counted = run(FederatedLDA(TOPICS), split(X), 2, absent=absent)
    told = run(FederatedLDA(TOPICS, documents=DOCUMENTS), split(X), 2, absent=absent)
    assert_array_equal(totals(counted), totals(told))
    assert counted[-1].checkpoint.server.documents == DOCUMENTS


def test_while_it_is_not_known_parties_stand_for_it():
    """Parties of one size: N/N_G is then the number of parties over those that took part."""
    X, _ = corpus()
    cuts, absent = [30, 60], {0: frozenset({"p01"}), 1: frozenset({"p02", "p00"})}
    unknown = run(FederatedLDA(TOPICS), split(X, cuts), 2, absent=absent)
    known = run(FederatedLDA(TOPICS, documents=DOCUMENTS), split(X, cuts), 2, absent=absent)
    assert_allclose(totals(unknown), totals(known), rtol=1e-12)


def test_masked_is_plain():
    X, _ = corpus()
    absent = {1: frozenset({"p01"})}
    plain = run(FederatedLDA(TOPICS), split(X), 3, absent=absent)
    masked = run(FederatedLDA(TOPICS), split(X), 3, absent=absent, reduction=SecureSum(bound=1e6))
    assert_allclose(totals(masked), totals(plain), rtol=1e-8, atol=1e-9)
    assert masked[-1].metrics["perplexity"] == pytest.approx(plain[-1].metrics["perplexity"], rel=1e-8)


def test_engines_agree_and_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    X, _ = corpus()
    program = FederatedLDA(TOPICS, starts_over=False)
    whole = run(program, split(X), 4)
    assert_array_equal(totals(run(program, split(X), 4, Parallel(2))), totals(whole))
    write_state(tmp_path / "point", whole[1].checkpoint)
    point = read_state(tmp_path / "point")
    rest = list(Sequential().run(program, split(X), Schedule(4, 3), reduction=PlainReduction(), resume=point))
    assert_array_equal(totals(rest), totals(whole))


def test_it_runs_without_rounds():
    """Asynchronously each arrival is a round of one party; the model improves."""
    X, _ = corpus()
    rounds = run(FederatedLDA(TOPICS, documents=DOCUMENTS, offset=1.0), split(X, [30, 60]), 24, Asynchronous())
    told = [done.metrics["perplexity"] for done in rounds]
    assert np.mean(told[-3:]) < 0.8 * np.mean(told[:3])


def test_from_its_last_topics_the_bound_never_falls():
    X, _ = corpus()
    program = FederatedLDA(TOPICS, iterations=300, tolerance=1e-10, starts_over=False)
    told = [done.metrics["perplexity"] for done in run(program, split(X), 25)]
    assert all(after <= before * (1 + 1e-10) for before, after in pairwise(told))
    assert told[-1] < 0.7 * told[0]


def test_planted_topics_are_found():
    X, topics = corpus(600, seed=3, length=25)
    program = FederatedLDA(TOPICS, alpha=0.2, eta=0.05)
    done = run(program, split(X, [100, 350]), 40)[-1]
    found = program.components(done.checkpoint.server)
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (topics, np.asarray(found))]
    cosines = unit[0] @ unit[1].T
    assert cosines[linear_sum_assignment(cosines, maximize=True)].mean() > 0.95


def test_threads_give_the_same(monkeypatch):
    X, _ = corpus()
    one = run(FederatedLDA(TOPICS), split(X), 4)
    monkeypatch.setattr(runtime, "SMALL_WORK", 0)
    assert_allclose(totals(run(FederatedLDA(TOPICS), split(X), 4, kernel_threads=2)), totals(one), rtol=1e-10)


def test_what_leaves_a_party_sums_over_topics_to_its_words_and_nothing_else():
    X, _ = corpus()
    shards = split(X)
    done = run(FederatedLDA(TOPICS), shards, 2, Sequential(record=True))[-1]
    for (party, _, sent), shard in zip(done.traffic, shards, strict=True):
        assert party == shard.name
        assert {name: array.shape for name, array in sent.arrays.items()} == {
            "counts": (TOPICS, WORDS),
            "totals": (3,),
            "bound": (1,),
        }
        words = shard.matrix.by_row.sum(axis=0)
        assert_allclose(sent["counts"].sum(axis=0), words, rtol=1e-9, atol=1e-9)
        assert_allclose(sent["totals"], [1, shard.matrix.shape[0], words.sum()], rtol=1e-9)


def test_rows_of_new_documents_come_from_each_alone_and_sum_to_one():
    X, _ = corpus()
    X = sp.vstack([X, sp.csr_array((1, WORDS))]).tocsr()
    Ht = np.random.default_rng(1).random((WORDS, TOPICS))
    solver = FederatedLDA(TOPICS).solver
    theta = solver.solve_rows(as_matrix(X), Ht)
    assert_allclose(theta.sum(axis=1), 1.0, rtol=1e-12)
    assert_allclose(theta[-1], 1 / TOPICS, rtol=1e-12)
    assert_allclose(solver.solve_rows(as_matrix(X[5:9]), Ht), theta[5:9], rtol=1e-12)
    assert_allclose(solver.solve_rows(as_matrix(X), Ht * [1.0, 7.0, 0.1, 1e6]), theta, rtol=1e-6)
    assert_allclose(solver.solve_rows(as_matrix(X), Ht[:, ::-1])[:, ::-1], theta, rtol=1e-9)
    assert np.isfinite(solver.solve_rows(as_matrix(X), Ht * [1, 1, 0, 1])).all()


def test_words_that_no_topic_has_change_nothing():
    X, _ = corpus()
    H = np.random.default_rng(1).random((WORDS, TOPICS))
    H[3] = 0
    without = X.toarray()
    without[:, 3] = 0
    solver = TopicInference(0.25)
    assert_allclose(solver.solve_rows(as_matrix(X), H), solver.solve_rows(as_matrix(without), H), rtol=1e-12)


def test_more_topics_than_words_is_defined():
    X, _ = corpus(words=6)
    done = run(FederatedLDA(9), split(X), 3)[-1]
    H = FederatedLDA(9).components(done.checkpoint.server)
    assert H.shape == (9, 6)
    assert_allclose(H.sum(axis=1), 1.0)


def test_parties_without_words_take_no_part():
    X, _ = corpus()
    silent = [*split(X), Shard("p99", as_matrix(sp.csr_array((5, WORDS))))]
    assert_allclose(totals(run(FederatedLDA(TOPICS), silent, 3)), totals(run(FederatedLDA(TOPICS), split(X), 3)))
    nothing = run(FederatedLDA(TOPICS), [Shard("p0", as_matrix(np.zeros((2, 3))))], 1)[-1]
    assert_allclose(totals([nothing]), 1 / TOPICS)


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf])
def test_what_is_no_count_is_refused_at_the_party(value):
    X = corpus()[0].toarray()
    X[25, 3] = value
    with pytest.raises(DataError, match="finite and zero or more") as caught:
        run(FederatedLDA(TOPICS), shards_of(X, CUTS))
    assert "p02" in str(caught.value.__notes__)


def test_rows_with_gaps_are_refused():
    shard = Shard("p0", ObservedMatrix.of_rows(corpus()[0]))
    with pytest.raises(CompositionError, match="ObservedMatrix"):
        run(FederatedLDA(TOPICS), [shard])


@pytest.mark.parametrize(
    "settings",
    [
        {"rank": 0},
        {"alpha": 0.0},
        {"alpha": np.nan},
        {"eta": -1.0},
        {"iterations": 0},
        {"tolerance": -1e-3},
        {"offset": -1.0},
        {"decay": 0.0},
        {"decay": 1.5},
        {"documents": 0},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ParameterError):
        FederatedLDA(**{"rank": 3, **settings})


def test_a_party_does_not_take_the_servers_word_for_sizes():
    X, _ = corpus()
    program, (shard, *_) = FederatedLDA(TOPICS), split(X)
    for shape in [(TOPICS, WORDS - 1), (TOPICS, WORDS + 1), (WORDS,)]:
        with pytest.raises(ShapeError, match="words"):
            program.local(shard, LDAPartyState(), Message({"H": np.ones(shape)}))
    program = FederatedLDA(TOPICS, starts_over=False)
    with pytest.raises(ShapeError, match="gamma=None"):
        program.local(shard, LDAPartyState(np.ones((99, TOPICS))), Message({"H": np.ones((TOPICS, WORDS))}))
    with pytest.raises(ShapeError, match="words"):
        program.solver.solve_rows(shard.matrix, np.ones((WORDS + 1, TOPICS)))


def test_a_start_of_another_size_is_refused():
    with pytest.raises(ShapeError):
        FederatedLDA(3).start_from(np.ones((5, 2)), 3)
    server, model = FederatedLDA(3).start_from(np.full((5, 3), 2.0), 3)
    assert_allclose(model["H"], expectations(server.totals).T)
