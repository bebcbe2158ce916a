"""The experiments with topics run on small corpora; what they find is in docs/results/topics.md."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from experiments.shared import datasets
from experiments.topics import corpora as topics_corpora
from experiments.topics import figures as topics_figures
from experiments.topics import report as topics_report
from experiments.topics import results as topics_results
from experiments.topics import table as topics_table
from experiments.topics import tables as topics_tables
from experiments.topics.corpora import Corpus, corpus, prepare, shares
from experiments.topics.methods import DESCENTS, FEDERATED, METHODS, MI, Settings, learn
from experiments.topics.results import result_of
from experiments.topics.runs import known, run_all
from experiments.topics.settings import build_run
from experiments.topics.table import GRIDS, TUNING_RANK, TUNING_SEED, draws, tuned

SHORT = Settings(rounds=2, epochs=1, batch=16, strength=0.1, mi_gradient="js")


def planted(name, n=120, classes=3, seed=0):
    """Documents of six words, most of them of the class's own ten."""
    draw = np.random.default_rng(seed)
    labels = np.arange(n) % classes
    words = np.where(draw.random((n, 6)) < 0.8, labels[:, None] * 10 + draw.integers(0, 10, (n, 6)), 30)
    counts = csr_matrix((np.ones(6 * n, np.float32), (np.repeat(np.arange(n), 6), words.ravel())), shape=(n, 40))
    names = tuple(f"w{column:02d}" for column in range(40))
    vectors = dict(zip(names[:35], draw.standard_normal((35, 5)).astype(np.float16).astype(np.float32), strict=True))
    return Corpus(name, counts, labels, names, vectors)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """All four corpora, replaced by generated ones."""
    monkeypatch.setattr(topics_corpora, "PREPARED", tmp_path)
    topics_results._corpus.cache_clear()
    for number, name in enumerate(topics_corpora.SOURCES):
        prepare(planted(name, seed=number), tmp_path)
    yield tmp_path
    topics_results._corpus.cache_clear()


def test_a_prepared_corpus_is_read_as_it_was_written(tmp_path):
    one = planted("spam")
    prepare(one, tmp_path)
    back = corpus("spam", tmp_path)
    assert (back.counts != one.counts).nnz == 0
    assert back.words == one.words
    np.testing.assert_array_equal(back.labels, one.labels)
    assert back.vectors.keys() == one.vectors.keys()
    for word, vector in one.vectors.items():
        np.testing.assert_array_equal(back.vectors[word], vector)


def test_texts_become_counts_of_words_with_vectors_of_those_alone(tmp_path, monkeypatch):
    with gzip.open(tmp_path / "spam_ham.csv.gz", "wt", encoding="utf-8") as file:
        file.write("label,text\nham,The cat sat on a cat\nspam,win WIN money\nham,of the\n")
    np.savez(tmp_path / "glove_subset.npz", words=np.array(["cat", "dog"]), vectors=np.eye(2, dtype=np.float16))
    monkeypatch.setenv(datasets.FOLDER, str(tmp_path))
    one = topics_corpora.from_texts("spam")
    counted = {word: one.counts[:, column].toarray().ravel().tolist() for column, word in enumerate(one.words)}
    assert counted == {"cat": [2, 0, 0], "money": [0, 1, 0], "sat": [1, 0, 0], "win": [0, 2, 0]}
    assert list(one.vectors) == ["cat"]
    assert one.statistics == (3, 4, 2.0, 2)


def test_tf_idf_weighs_words_by_the_documents_that_are_known():
    one = planted("spam")
    known_rows = np.arange(0, 120, 2)
    changed = replace(one, counts=one.counts.copy())
    changed.counts.data[changed.counts.indptr[1] : changed.counts.indptr[2]] += 3  # document 1 is not among them
    first, second = (given.weighted("tf-idf", known_rows)[known_rows] for given in (one, changed))
    assert (first != second).nnz == 0
    np.testing.assert_allclose(first.multiply(first).sum(axis=1), 1.0, atol=1e-6)


def test_shares_are_equal_and_the_more_alike_the_larger_alpha():
    labels = np.arange(3000) % 5
    spreads = []
    for alpha in (0.1, 1.0, 1000.0):
        held = shares(labels, 10, alpha, 0)
        assert sorted(np.concatenate(list(held.values())).tolist()) == list(range(3000))
        assert {len(rows) for rows in held.values()} == {300}
        spreads.append(np.mean([np.bincount(labels[rows], minlength=5).std() for rows in held.values()]))
    assert spreads[0] > spreads[1] > spreads[2]


def test_draws_have_each_value_once_in_four_and_more_of_them_begin_alike():
    nine = draws(9)
    assert draws(5) == nine[:5]
    for four in (nine[1:5], nine[5:9]):
        taken = {name: [getattr(one, name) for one in four] for name in GRIDS if name != "learning"}
        taken["learning"] = [(one.mi_gradient, one.critic_rate) for one in four]
        for name, grid in GRIDS.items():
            assert sorted(taken[name]) == sorted(grid)
    assert all(one.rounds == 200 // one.epochs for one in nine)


@pytest.mark.parametrize("base", [name for name in DESCENTS if not name.endswith(MI)])
def test_with_and_without_information_are_tried_with_the_same_steps(base):
    pairs = zip(*(topics_table.tuning_runs("spam", [name], "counts", 9) for name in (base, base + MI)), strict=True)
    for without, with_mi in pairs:
        for name in ("rounds", "epochs", "batch", "rate", "server_rate", "weight_step"):
            assert getattr(without.settings, name) == getattr(with_mi.settings, name)


@pytest.mark.parametrize("method", ["LDA", "FedLDA"])
def test_lda_has_two_priors_to_choose_from(method):
    usual, short = topics_table.tuning_runs("spam", [method], "counts", 9)
    assert usual == build_run("spam", method, TUNING_RANK, TUNING_SEED, tuned({}, "spam", method))
    assert (short.settings.topic_prior, short.settings.word_prior) == (0.1, 0.01)
    records = {one.key: {**json.loads(one.key), "f1": f1} for one, f1 in ((usual, 0.4), (short, 0.6))}
    assert topics_table.settings_of(records, "spam", method) == [short.settings]
    rows = {"one": csr_matrix(np.arange(40).reshape(10, 4) % 3, dtype=np.float64)}
    both = [learn(method, rows, 2, one.settings).H for one in (usual, short)]
    assert np.abs(both[0] / both[0].sum() - both[1] / both[1].sum()).max() > 1e-6


def test_the_best_draw_is_taken_and_the_first_where_none_was_tried():
    first, second = (topics_table.tuning_runs("spam", ["FedAdam"], "counts", 2)[i] for i in (0, 1))
    records = {one.key: {**json.loads(one.key), "f1": f1} for one, f1 in ((first, 0.4), (second, 0.6))}
    other = build_run("spam", "FedAdam", TUNING_RANK, 0, first.settings)
    records[other.key] = {**json.loads(other.key), "f1": 0.9}
    assert other.seed != TUNING_SEED
    assert tuned(records, "spam", "FedAdam") == second.settings
    assert tuned(records, "news", "FedAdam") == first.settings


def test_draws_are_compared_by_their_means_over_the_seeds_for_tuning():
    plays = topics_table.tuning_runs("spam", ["FedAdam"], "counts", 3, 2)
    assert [one.seed for one in plays] == [TUNING_SEED] * 3 + [TUNING_SEED + 1] * 3
    scores = zip(plays, (0.9, 0.6, 1.0, 0.1, 0.6), strict=False)
    records = {one.key: {**json.loads(one.key), "f1": f1} for one, f1 in scores}
    assert tuned(records, "spam", "FedAdam") == plays[1].settings, "the third was run on one seed alone"


def test_the_same_run_is_written_one_way():
    assert build_run("spam", "FedAvg", 5, 0, replace(SHORT, strength=0.5, server_rate=0.1)) == build_run(
        "spam", "FedAvg", 5, 0, SHORT
    )
    assert build_run("spam", "NMF", 5, 0, SHORT, alpha=9.0) == build_run("spam", "NMF", 5, 0)
    for change in ({"strength": 0.5}, {"server_rate": 0.1}, {"mi_gradient": "dv"}):
        assert build_run("spam", "FedAdam+MI", 5, 0, replace(SHORT, **change)) != build_run(
            "spam", "FedAdam+MI", 5, 0, SHORT
        )
    assert build_run("spam", "FedLDA", 5, 0, weighting="tf-idf").weighting == "counts"


@pytest.mark.parametrize("method", ["FedAvg", "FedAdam+MI", "exact", "FedLDA"])
def test_bytes_are_those_of_the_formula(method):
    one, k, V = planted("spam"), 4, 40
    rows = {name: one.counts[own] for name, own in shares(one.labels, 10, 1.0, 0).items()}
    learned = learn(method, rows, k, SHORT, seed=0, fraction=0.2)
    critic = 32 * (V + k + 1) + 32 * 256 + 256 + 257
    expected = {
        "FedAvg": 2 * 2 * 2 * (4 * k * V + 8),
        "FedAdam+MI": 2 * 2 * 2 * (4 * (k * V + critic) + 8),
        "exact": 2 * 10 * ((4 * k * V + 8 * k * k + 2 * 8 + 8) + (4 * k * V + 2 * 8 + 8)),
        "FedLDA": 2 * 2 * ((8 * k * V + 4 * 8 + 8) + (8 * k * V + 8)),
    }
    first_models = {"exact": 10 * 4 * k * V}  # the first H is in float64: the server has seen no data yet
    assert learned.rounds == 2
    assert expected[method] <= learned.bytes <= expected[method] + first_models.get(method, 0)


def test_tensors_give_what_arrays_give(small):
    pytest.importorskip("torch")
    asked = build_run("spam", "FedAvg+MI", 4, 0, replace(SHORT, epochs=2, critic_rate=0.5))
    on_numpy, on_torch = result_of(asked), result_of(asked, "cpu")
    assert on_torch["device"] == "cpu"
    for name in ("f1", "accuracy", "coherence", "information"):
        assert on_torch[name] == pytest.approx(on_numpy[name], rel=1e-3)


def test_topics_see_no_document_that_was_set_apart_before(small):
    asked = build_run("spam", "exact", 4, 0, Settings(rounds=2), reading="before", shown=4)
    first = result_of(asked)
    one = planted("spam")
    _, test = topics_results.split(120, 0)
    counts = one.counts.tolil()
    counts[test, 39] = 50.0
    prepare(replace(one, counts=csr_matrix(counts)), small)
    topics_results._corpus.cache_clear()
    assert result_of(asked)["topics"] == first["topics"]
    after = replace(asked, reading="after")
    assert any("w39" in topic for topic in result_of(after)["topics"])


def test_tables_find_every_run_that_was_asked_for():
    sizes = {"ranks": (50,), "seeds": (0,), "readings": ("after",)}
    for weighting in ("counts", "tf-idf"):
        rows = [row for row in topics_tables.ALL if row.weighting == weighting]
        plays = topics_table.table_runs({}, "spam", {row.method for row in rows}, weighting, **sizes)
        records = {one.key: json.loads(one.key) for one in plays}
        for row in rows:
            assert len(topics_tables.runs(records, row, "spam", 50)) == 1, row


def test_diverging_runs_are_told_and_do_not_end_the_others(small, tmp_path):
    path = tmp_path / "runs.jsonl"
    wild = build_run("spam", "FedAvg", 4, 0, Settings(rounds=2, epochs=2, rate=1e6))
    tame = build_run("spam", "exact", 4, 0, Settings(rounds=2))
    found = run_all([wild, tame], path)
    assert found[wild.key]["diverged"]
    assert found[wild.key]["f1"] == 0
    assert found[tame.key]["f1"] > 0.5


def test_every_method_runs_once_and_the_report_shows_it(small, tmp_path, capsys):
    path = tmp_path / "runs.jsonl"
    small_table = ["--sets", "spam", "--ranks", "4", "--quick", "--output", str(path)]
    topics_table.main([*small_table, "--readings", "after"])
    first = known(path)
    assert {record["method"] for record in first.values()} == {"words", *METHODS}
    assert all(0 <= record["f1"] <= 1 for record in first.values())
    assert all(record["bytes"] > 0 for record in first.values() if record["method"] in FEDERATED)
    length = path.stat().st_size
    topics_table.main([*small_table, "--readings", "after"])
    assert path.stat().st_size == length
    topics_figures.main(["--sets", "spam", "--figures", "3", "--quick", "--output", str(path)])
    assert any(len(record["curve"]) == 2 for record in known(path).values())

    full = [
        build_run("spam", name, rank, 0, tuned({}, "spam", name))
        for name in ("FedAvg", "FedAvg+MI")
        for rank in (50, 100, 200)
    ]
    lines = [
        {**json.loads(one.key), "f1": 0.5 + one.rank / 1000, "accuracy": 0.7, "coherence": 0.25, "diversity": 1.0,
         "f1_fitted": 0.5, "information": 1.0, "bytes": 2e6, "rounds": 20, "seconds": 1.0, "curve": [], "topics": []}
        for one in full
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    document = tmp_path / "topics.md"
    names = [*topics_report.TABLES, "corpora"]
    document.write_text("".join(f"<!-- table: {name} -->\n<!-- end -->\n" for name in names), "utf-8")
    topics_report.main([str(path), "--document", str(document)])
    text = document.read_text("utf-8")
    assert "| FedAvg | 0.617 [1] (0.652) | – (0.663)" in text
    assert "| FedAvg+MI | 0.550 [1] | –" in text
    assert "| Spam Ham | FedAvg | 50 | 0.550 | 0.550 | +0.000" in text
