"""Laws of coherence and diversity: against gensim, against formulas by hand, and over parties as over all documents."""

from __future__ import annotations

import gzip
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Layout, Schedule, Shard
from partsong.data.conversion import as_matrix
from partsong.engines.local import Parallel, Sequential
from partsong.errors import (
    CompositionError,
    DataError,
    DataTypeError,
    FileError,
    FormatError,
    ParameterError,
    PartsongError,
    ShapeError,
)
from partsong.evaluation.topic_quality import (
    TopicPairs,
    count_pairs,
    cv_coherence,
    embedding_coherence,
    npmi_coherence,
    top_columns,
    top_words,
    topic_diversity,
    windows,
    word_vectors,
)
from partsong.methods.counts import CooccurrenceSums
from partsong.secure_aggregation.protocol import SecureSum

SHORT = [
    text.split()
    for text in (
        "cat dog pet", "cat dog food", "dog pet walk", "cat pet food dog", "code bug test", "code test run",
        "bug test code fix", "run walk food", "code run dog", "fix bug", "pet cat", "", "test test code",
    )
]  # fmt: skip
SHORT_TOPICS = [
    ["cat", "dog", "pet", "food"],
    ["code", "test", "bug", "fix"],
    ["cat", "code", "walk", "fix"],
    ["run", "walk", "pet"],
]
LONG_TOPICS = [["w0", "w1", "w2", "w3"], ["w4", "w5", "w6", "w7"], ["w0", "w2", "w5", "w7"], ["w7", "w1", "w4"]]


def long_texts():
    """Six texts, five of them longer than two windows, in which no word is twice within one."""
    texts = []
    for t in range(6):
        text = [f"filler{t}-{i}" for i in range(260 if t != 4 else 40)]
        for j in (j for j in range(8) if (t + j) % 3):
            place = (17 * j + 31 * t) % 110
            for at in (place, place + 130) if t % 2 == 0 else (place,):
                text[at : at + 1] = [f"w{j}"] if at < len(text) else []
        texts.append(text)
    return texts


# CoherenceModel(topics=…, texts=…, dictionary=Dictionary(texts), coherence=…, window_size=…) of gensim 4.4.0
GENSIM = {
    ("short", "c_npmi", 10): (0.3761062024972636, 0.4320945805905911, -0.7269774589982209, -0.1378481679491819),
    ("short", "c_v", 110): (0.8660477993360755, 0.8601662506684761, 0.3812498647103453, 0.456185816321722),
    ("long", "c_npmi", 10): (-0.7572373453640444, -0.7630964679012723, -0.6433289638906613, -0.39442166784981175),
    ("long", "c_npmi", 110): (0.13697337372353663, 0.07809447030788408, 0.1321611644561216, 0.5353760644344256),
    ("long", "c_v", 110): (0.6493862950519407, 0.5709969963401886, 0.6524593437560405, 0.9525228497891786),
}


def columns_of(topics):
    columns = {word: i for i, word in enumerate(sorted({word for topic in topics for word in topic}))}
    return columns, [[columns[word] for word in topic] for topic in topics]


@pytest.mark.parametrize("case", GENSIM, ids=str)
def test_counts_give_what_gensim_gives(case):
    texts, topics = (SHORT, SHORT_TOPICS) if case[0] == "short" else (long_texts(), LONG_TOPICS)
    columns, ids = columns_of(topics)
    counts = count_pairs(windows(texts, columns, case[2]), TopicPairs.of(ids))
    found = (npmi_coherence if case[1] == "c_npmi" else cv_coherence)(ids, counts)
    assert_allclose(found.topics, GENSIM[case], rtol=1e-12)
    assert found.mean == pytest.approx(np.mean(GENSIM[case]), rel=1e-12)
    assert (found.skipped, found.unknown_words) == (0, 0)


def brute_windows(texts, size):
    for text in texts:
        yield from (text[i : i + size] for i in range(max(1, len(text) - size + 1)))


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.lists(st.sampled_from("abcdxyz"), max_size=9), max_size=5), size=st.integers(1, 10))
def test_windows_are_all_stretches_of_their_length(texts, size):
    columns = {word: i for i, word in enumerate("abcd")}
    expected = [[float(word in window) for word in columns] for window in brute_windows(texts, size)]
    assert_array_equal(windows(texts, columns, size).toarray(), np.array(expected).reshape(-1, 4))


def test_texts_shorter_than_a_window_are_documents():
    columns, ids = columns_of(SHORT_TOPICS)
    X = np.array([[float(text.count(word)) for word in columns] for text in SHORT])
    for form in (X, sp.csr_array(X), sp.csc_array(X), X.astype(np.float32)):
        documents, asked = count_pairs(form, TopicPairs.of(ids)), TopicPairs.of(ids)
        slid = count_pairs(windows(SHORT, columns), asked)
        assert documents.documents == slid.documents == len(SHORT)
        assert_array_equal(documents.words, slid.words)
        assert_array_equal(documents.pairs, slid.pairs)


def test_counts_by_hand_and_only_pairs_within_topics():
    X = sp.csr_array(np.array([[2, 1, 0, 0, 1], [0, 3, 1, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], float))
    X.data[0] = 7
    asked = TopicPairs.of([[1, 0], [2, 1], [3, 3]])
    assert asked == TopicPairs((0, 1, 2, 3), ((0, 1), (1, 2)))
    counts = count_pairs(X, asked)
    assert (counts.documents, counts.words.tolist(), counts.pairs.tolist()) == (4, [2, 3, 1, 0], [2, 1])
    assert counts.words.dtype == counts.pairs.dtype == np.int64


def test_stored_zeros_are_no_occurrences():
    X = sp.csr_array(np.ones((3, 2)))
    X.data[0] = 0
    counts = count_pairs(X, TopicPairs.of([[0, 1]]))
    assert (counts.words.tolist(), counts.pairs.tolist()) == ([2, 3], [2])


def test_words_that_only_occur_together_have_npmi_one_and_those_that_never_do_minus_one():
    X = np.repeat(np.array([[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]], float), [3, 4, 5], axis=0)
    counts = count_pairs(X, TopicPairs.of([[0, 1], [0, 2]]))
    together, never = (npmi_coherence([topic], counts).topics[0] for topic in ([0, 1], [0, 2]))
    assert together == pytest.approx(1.0, abs=1e-9)
    gaps = [1 + npmi_coherence([[0, 2]], counts, epsilon).topics[0] for epsilon in (1e-12, 1e-100, 1e-300)]
    assert never < -0.9
    assert gaps[0] > gaps[1] > gaps[2] > 0
    assert gaps[2] < 5e-3


def test_words_that_are_everywhere_count_as_together():
    counts = count_pairs(np.ones((5, 3)), TopicPairs.of([[0, 1, 2]]))
    assert npmi_coherence([[0, 1, 2]], counts).mean == cv_coherence([[0, 1, 2]], counts).mean == pytest.approx(1.0)


def test_independent_words_have_npmi_zero():
    X = np.array([[1, 1], [1, 0], [0, 1], [0, 0]], float)
    assert npmi_coherence([[0, 1]], count_pairs(X, TopicPairs.of([[0, 1]]))).mean == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("measure", [npmi_coherence, cv_coherence])
def test_the_order_of_topics_and_of_their_words_does_not_matter(measure):
    columns, ids = columns_of(SHORT_TOPICS)
    counts = count_pairs(windows(SHORT, columns), TopicPairs.of(ids))
    plain = measure(ids, counts)
    turned = measure([topic[::-1] for topic in ids[::-1]], counts)
    assert_allclose(turned.topics[::-1], plain.topics, rtol=1e-12)
    assert turned.mean == pytest.approx(plain.mean)
    doubled = measure([[*topic, topic[0]] for topic in ids], counts)
    assert_allclose(doubled.topics, plain.topics, rtol=1e-12)


@pytest.mark.parametrize("measure", [npmi_coherence, cv_coherence])
def test_words_that_occur_nowhere_are_skipped(measure):
    X = np.array([[1, 1, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]], float)
    topics = [[0, 1, 2], [0, 2, 3], [0, 1]]
    found = measure(topics, count_pairs(X, TopicPairs.of(topics)))
    assert found.topics[0] == pytest.approx(found.topics[2])
    assert math.isnan(found.topics[1])
    assert (found.skipped, found.unknown_words) == (1, 3)
    assert found.mean == pytest.approx(found.topics[2])
    with pytest.raises(DataError, match="No topic has two words"):
        measure([[2, 3]], count_pairs(X, TopicPairs.of([[2, 3]])))
    with pytest.raises(ParameterError, match="not counted"):
        measure([[0, 2]], count_pairs(np.ones((2, 3)), TopicPairs.of([[0, 1], [1, 2]])))
    with pytest.raises(ParameterError, match="epsilon"):
        measure([[0, 1]], count_pairs(X, TopicPairs.of([[0, 1]])), 0.0)


def federation(seed=0, parties=4, width=12):
    rng = np.random.default_rng(seed)
    X = sp.csr_array((rng.random((60, width)) < 0.3) * rng.integers(1, 5, (60, width)).astype(float))
    cuts = np.linspace(0, 60, parties + 1).astype(int)
    return X, [Shard(f"p{i}", as_matrix(X[a:b]), 77 + i) for i, (a, b) in enumerate(itertools.pairwise(cuts))]


def counted(program, shards, engine=Sequential(), reduction=PlainReduction()):
    (done,) = engine.run(program, shards, Schedule(1), reduction=reduction)
    return program.counts(done.checkpoint.server), done


def assert_same_counts(some, other):
    assert (some.topic_pairs, some.documents) == (other.topic_pairs, other.documents)
    assert_array_equal(some.words, other.words)
    assert_array_equal(some.pairs, other.pairs)


@pytest.mark.parametrize("reduction", [PlainReduction(), SecureSum()], ids=["open", "masked"])
@pytest.mark.parametrize("engine", [Sequential(), Parallel(2)], ids=["sequential", "parallel"])
def test_counts_over_parties_are_those_of_all_documents_exactly(engine, reduction):
    X, shards = federation()
    topics = [[0, 1, 5], [7, 5, 2, 11], [3, 4]]
    program = CooccurrenceSums.of(topics)
    found, done = counted(program, shards, engine, reduction)
    pooled = count_pairs(X, TopicPairs.of(topics))
    assert_same_counts(found, pooled)
    assert found.words.dtype == np.int64
    assert npmi_coherence(topics, found) == npmi_coherence(topics, pooled)
    assert cv_coherence(topics, found) == cv_coherence(topics, pooled)
    assert done.metrics == {"documents": 60.0}


def test_counts_add_up():
    X, _ = federation()
    asked = TopicPairs.of([[0, 1, 5]])
    assert_same_counts(count_pairs(X[:13], asked) + count_pairs(X[13:], asked), count_pairs(X, asked))
    with pytest.raises(ShapeError, match="different words"):
        count_pairs(X, asked) + count_pairs(X, TopicPairs.of([[0, 1]]))


def test_masked_counts_are_sent_masked_and_of_topic_words_alone():
    _, shards = federation()
    program = CooccurrenceSums.of([[0, 1], [5, 2]])
    _, openly = counted(program, shards, Sequential(record=True))
    for _, _, sent in openly.traffic:
        assert {name: array.shape for name, array in sent.arrays.items()} == {
            "documents": (1,), "words": (4,), "pairs": (2,),
        }  # fmt: skip
    _, masked = counted(program, shards, Sequential(record=True), SecureSum())
    own = {name: sent["words"].tobytes() for name, _, sent in openly.traffic}
    assert not any(own[name] in array.tobytes() for name, _, sent in masked.traffic for array in sent.arrays.values())


@pytest.mark.parametrize("reduction", [PlainReduction(), SecureSum()], ids=["open", "masked"])
def test_counts_are_sent_once(reduction):
    """A second sum without a party would be the first less its counts."""
    _, shards = federation()
    schedule = Schedule(2, absent={1: frozenset({"p3"})})
    with pytest.raises(ParameterError, match="has already sent its counts"):
        list(Sequential().run(CooccurrenceSums.of([[0, 1]]), shards, schedule, reduction=reduction))


def test_windows_of_parties_are_counted_as_documents_are():
    columns, ids = columns_of(LONG_TOPICS)
    texts, program = long_texts(), CooccurrenceSums.of(ids)
    shards = [Shard(f"p{i}", as_matrix(windows(texts[i : i + 2], columns)), i) for i in (0, 2, 4)]
    found, _ = counted(program, shards)
    assert_allclose(cv_coherence(ids, found).topics, GENSIM["long", "c_v", 110], rtol=1e-12)


def test_counting_what_is_not_there_is_refused():
    _, shards = federation()
    with pytest.raises(ParameterError, match="column 12"):
        counted(CooccurrenceSums.of([[0, 12]]), shards)
    with pytest.raises(ParameterError, match="nothing to count"):
        CooccurrenceSums.of([[]])
    with pytest.raises(ParameterError, match="from 0"):
        TopicPairs.of([[-1, 2]])
    with pytest.raises(ShapeError, match="column 12"):
        count_pairs(np.ones((2, 3)), TopicPairs.of([[12, 0]]))
    program = CooccurrenceSums.of([[0, 1]])
    with pytest.raises(DataError, match="Nothing has been counted"):
        program.counts(program.start_server(Layout.of(shards, 0))[0])
    with pytest.raises(CompositionError, match="no model"):
        _ = program.solver
    with pytest.raises(DataError, match="list of words"):
        windows(["one two"], {"one": 0})
    with pytest.raises(ParameterError, match="at least one word"):
        windows([["one"]], {"one": 0}, 0)


# Word vectors

WORDS = ["king", "queen", "cat", "dog", "naïve"]
TABLE = dict(zip(WORDS, np.random.default_rng(5).normal(size=(5, 6)).round(4), strict=True))
LISTS = [["king", "queen", "cat"], ["dog", "cat", "unheard"], ["unheard", "king"]]


def lines(header=False, table=TABLE):
    first = [f"{len(table)} {len(next(iter(table.values())))}"] if header else []
    return [*first, *(f"{word} {' '.join(map(str, vector.tolist()))}" for word, vector in table.items())]


def written(path, content):
    data = content.encode("utf-8")
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def tables(folder):
    matrix = np.array(list(TABLE.values()))
    np.savez(folder / "a.npz", words=np.array(WORDS), vectors=matrix)
    np.savez_compressed(folder / "b.npz", matrix=matrix, names=np.array([word.encode() for word in WORDS]))
    yield folder / "a.npz"
    yield str(folder / "b.npz")
    yield written(folder / "glove.txt", "\n".join(lines()) + "\n")
    yield written(folder / "w2v.txt", " \n".join(lines(header=True)))
    yield written(folder / "tabs.vec.gz", "\ufeff" + "\r\n".join(line.replace(" ", "\t") for line in lines()))
    yield SimpleNamespace(key_to_index={word: i for i, word in enumerate(WORDS)}, vectors=matrix)
    yield TABLE
    yield {word: vector.tolist() for word, vector in TABLE.items()}


def by_hand(topic):
    vectors = [TABLE[word] for word in topic]
    pairs = itertools.combinations(vectors, 2)
    return np.mean([a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs])


def test_every_kind_of_table_gives_the_mean_cosine(tmp_path):
    for table in tables(tmp_path):
        found = embedding_coherence(LISTS, table)
        assert_allclose(found.topics[:2], [by_hand(["king", "queen", "cat"]), by_hand(["dog", "cat"])], rtol=1e-12)
        assert math.isnan(found.topics[2])
        assert (found.skipped, found.unknown_words) == (1, 2)
        assert found.mean == pytest.approx(np.mean(found.topics[:2]))
        assert set(word_vectors(table, ["naïve", "Naïve", "king"])) == {"naïve", "king"}


def test_vectors_of_unequal_length_do_not_matter_nor_does_order():
    plain = embedding_coherence(LISTS, TABLE)
    scaled = {word: vector * 10.0 ** (60 * i - 120) for i, (word, vector) in enumerate(TABLE.items())}
    assert_allclose(embedding_coherence(LISTS, scaled).topics, plain.topics, rtol=1e-9)
    turned = embedding_coherence([topic[::-1] for topic in LISTS[::-1]], TABLE)
    assert_allclose(turned.topics[::-1], plain.topics, rtol=1e-12)
    assert embedding_coherence([["cat", "dog", "cat"]], TABLE).mean == pytest.approx(by_hand(["cat", "dog"]))


def test_equal_vectors_are_coherent_and_opposite_ones_are_not():
    table = {"a": [1.0, 2.0], "b": [3.0, 6.0], "c": [-1.0, -2.0], "zero": [0.0, 0.0]}
    assert embedding_coherence([["a", "b"]], table).mean == pytest.approx(1.0)
    assert embedding_coherence([["a", "c"]], table).mean == pytest.approx(-1.0)
    found = embedding_coherence([["a", "b", "zero"]], table)
    assert (found.mean, found.unknown_words) == (pytest.approx(1.0), 1)


def test_no_topic_with_two_known_words_is_an_error():
    with pytest.raises(DataError, match="No topic has two words with a vector"):
        embedding_coherence([["king", "unheard"], []], TABLE)
    with pytest.raises(DataError, match="No topic has two words"):
        embedding_coherence([], TABLE)


@pytest.mark.parametrize(
    ("table", "kind"),
    [
        ({"king": [1.0, math.nan], "cat": [1.0, 2.0]}, DataError),
        ({"king": [1.0, math.inf], "cat": [1.0, 2.0]}, DataError),
        ({"king": [1.0, 2.0, 3.0], "cat": [1.0, 2.0]}, ShapeError),
        ({"king": [[1.0], [2.0]], "cat": [1.0, 2.0]}, ShapeError),
        ({"king": [], "cat": [1.0, 2.0]}, ShapeError),
        ({"king": ["x"], "cat": [1.0]}, DataTypeError),
        ([("king", [1.0])], DataTypeError),
        (None, DataTypeError),
    ],
    ids=str,
)
def test_tables_that_are_none_are_refused(table, kind):
    with pytest.raises(kind):
        embedding_coherence([["king", "cat"]], table)


def test_a_file_is_read_up_to_the_last_word_that_is_wanted(tmp_path):
    path = written(tmp_path / "glove.txt", "\n".join([*lines()[:2], "cut 0.1"]))
    assert set(word_vectors(path, ["king", "queen"])) == {"king", "queen"}
    with pytest.raises(FormatError, match="line 3"):
        word_vectors(path, ["king", "queen", "other"])


def test_words_with_spaces_are_no_damage_and_of_two_the_first_counts(tmp_path):
    content = ["king 1 2", ". . . 0.5 0.25", "at name@domain.com 3 4", "king 5 6", "cat 7 8"]
    found = word_vectors(written(tmp_path / "t", "\n".join(content)), ["king", ". . .", "at name@domain.com", "cat"])
    assert {word: vector.tolist() for word, vector in found.items()} == {
        "king": [1, 2], ". . .": [0.5, 0.25], "at name@domain.com": [3, 4], "cat": [7, 8],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "empty"),
        ("king 1 2\nqueen 1\ncat 3 4", "line 2"),
        ("king 1 2\nqueen 1 2 cat 3 4", "line 2"),
        ("king 1 2\n\ncat 1 2", "line 2"),
        ("king 1 2\ncat 1 x", "line 2"),
        ("king 1 2\ncat 1 nan", "line 2"),
        ("king 1 2\ncat 1 1e999", "line 2"),
        ("king 1 2\nq\0een 1 2", "line 2"),
        ("3 2\nking 1 2\nqueen 3 4", "announces 3 words"),
        ("3 0\nking\n", "line 1"),
        ("3 99999999\nking 1\n", "line 1"),
        ("word\n", "line 1"),
        ("king 1 2\n" + "x" * (1 << 20) + " 1 2\n", "line 2"),
    ],
    ids=range(13),
)
def test_damaged_text_is_refused_with_its_line(tmp_path, content, words):
    with pytest.raises(FormatError, match=words):
        word_vectors(written(tmp_path / "table.txt", content), ["cat", "nothing"])


def test_damaged_archives_and_missing_files_are_refused(tmp_path):
    path = tmp_path / "table.npz"
    with pytest.raises(FileError, match="no such file"):
        word_vectors(path, ["cat"])
    path.write_bytes(b"PK\x03\x04 no archive")
    with pytest.raises(FormatError):
        word_vectors(path, ["cat"])
    np.savez(path, words=np.array(["a", "b"]), vectors=np.ones((3, 2)))
    with pytest.raises(FormatError, match="a row for each"):
        word_vectors(path, ["a"])
    np.savez(path, words=np.array(["a", {}], dtype=object), vectors=np.ones((2, 2)))
    with pytest.raises(PartsongError):
        word_vectors(path, ["a"])
    whole = (tmp_path / "whole.npz", np.arange(5000.0).reshape(-1, 2))
    np.savez(whole[0], words=np.array([str(i) for i in range(2500)]), vectors=whole[1])
    path.write_bytes(whole[0].read_bytes()[:-3000])
    with pytest.raises(FormatError):
        word_vectors(path, ["7"])
    np.savez(path, words=np.array(["a", "b"]), vectors=np.array([[1.0, math.nan], [1.0, 2.0]]))
    with pytest.raises(DataError, match="NaN"):
        word_vectors(path, ["a"])
    assert_array_equal(word_vectors(path, ["b"])["b"], [1.0, 2.0])


# Diversity


def test_diversity_is_one_for_disjoint_topics_and_one_over_k_for_copies():
    assert topic_diversity([["a", "b"], ["c", "d"], ["e", "f"]]) == 1.0
    for k in (1, 2, 7):
        assert topic_diversity([["a", "b", "c"]] * k) == pytest.approx(1 / k)
    assert topic_diversity([["a", "b"], ["b", "c"]]) == 0.75
    with pytest.raises(DataError, match="at least one word"):
        topic_diversity([[], []])


def test_top_words_are_the_largest_entries():
    H = np.array([[0.1, 3.0, 2.0, 3.0], [0.0, 0.0, 5.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert top_columns(H, 3) == ((1, 3, 2), (2,), ())
    assert top_columns(H, 99) == ((1, 3, 2, 0), (2,), ())
    assert top_words(H, ["a", "b", "c", "d"], 2) == (("b", "d"), ("c",), ())
    order = [2, 0, 1]
    assert top_columns(H[order], 3) == tuple(top_columns(H, 3)[i] for i in order)
    assert topic_diversity(top_words(H[order], ["a", "b", "c", "d"], 3)) == topic_diversity(top_columns(H, 3))
    assert len(top_columns(np.ones((9, 2)))) == 9  # more topics than words
    with pytest.raises(ShapeError, match="3 words"):
        top_words(H, ["a", "b", "c"])
    with pytest.raises(ShapeError, match="1 dimension"):
        top_columns(H[0])
    with pytest.raises(ParameterError, match="n=0"):
        top_columns(H, 0)
    with pytest.raises(DataError, match="NaN"):
        top_columns(H * np.nan)
