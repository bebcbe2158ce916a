"""Counts and tf-idf equal scikit-learn's, documents without words stay, and pruning says what it would leave."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.feature_extraction.text import CountVectorizer, TfidfTransformer, TfidfVectorizer

from partsong.errors import DataError, FeatureError, ParameterError, ShapeError
from partsong.topics.agreement.encoding import fresh_key
from partsong.topics.tokenizer import LETTERS, Words
from partsong.topics.vocabulary import HashedVocabulary, Vocabulary, count_words, tf_idf

texts = st.lists(st.text(alphabet="ab cdé'X1-_ß", max_size=25), min_size=1, max_size=12)
some_texts = texts.filter(lambda listed: any(Words("none").of(text) for text in listed))


@given(some_texts, st.booleans())
def test_counts_are_those_of_scikit_learn(documents, strip_accents):
    words = Words("none", strip_accents=strip_accents)
    vocabulary = Vocabulary.of_documents(documents, words)
    theirs = CountVectorizer(
        token_pattern=LETTERS.replace("+", "{2,}"), strip_accents="unicode" if strip_accents else None
    )
    expected = theirs.fit_transform(documents)
    assert vocabulary.words == tuple(theirs.get_feature_names_out())
    assert_array_equal(vocabulary.documents, np.asarray((expected > 0).sum(axis=0)).ravel())
    counted = count_words(documents, words, vocabulary)
    assert counted.rows.dtype == np.float32
    assert_array_equal(counted.rows.toarray(), expected.toarray())
    assert_array_equal(counted.is_empty, np.asarray(expected.sum(axis=1)).ravel() == 0)


@given(some_texts, st.booleans(), st.sampled_from(["l2", "none"]))
def test_weights_are_those_of_scikit_learn(documents, is_sublinear, norm):
    words = Words("none")
    vocabulary = Vocabulary.of_documents(documents, words)
    theirs = TfidfVectorizer(
        token_pattern=LETTERS.replace("+", "{2,}"),
        vocabulary=list(vocabulary.words),
        sublinear_tf=is_sublinear,
        norm=None if norm == "none" else norm,
    )
    counted = count_words(documents, words, vocabulary)
    ours = tf_idf(counted, vocabulary.documents, vocabulary.n_documents, is_sublinear=is_sublinear, norm=norm)
    assert_allclose(ours.rows.toarray(), theirs.fit_transform(documents).toarray(), rtol=2e-6, atol=1e-7)
    assert_array_equal(ours.is_empty, counted.is_empty)
    assert ours.rows.dtype == np.float32


def test_frequencies_of_all_parties_give_the_weights_of_the_pooled_documents():
    parts = [["ab ab cd", "cd"], ["", "ab ef ef"], ["gh cd"]]
    pooled, words = [text for part in parts for text in part], Words("none")
    vocabulary = Vocabulary.of_documents(pooled, words)
    own = [
        tf_idf(count_words(part, words, vocabulary), vocabulary.documents, vocabulary.n_documents).rows.toarray()
        for part in parts
    ]
    expected = TfidfTransformer().fit_transform(count_words(pooled, words, vocabulary).rows.astype(np.float64))
    assert_allclose(np.vstack(own), expected.toarray(), rtol=1e-6)


def test_documents_without_words_are_kept_and_flagged():
    vocabulary = Vocabulary(("cat", "dog"))
    counted = count_words(["dog cat dog", "", "horse", "cat"], Words(), vocabulary)
    assert_array_equal(counted.rows.toarray(), [[1, 2], [0, 0], [0, 0], [1, 0]])
    assert_array_equal(counted.is_empty, [False, True, True, False])
    assert counted.n_empty == 2
    assert counted.require_words() is counted


def test_a_party_that_misses_every_shared_word_has_empty_documents():
    counted = count_words(["secretword", "another"], Words(), Vocabulary(("cat", "dog")))
    assert counted.is_empty.all()
    with pytest.raises(DataError, match=r"every document \(of 2\) is empty") as caught:
        counted.require_words("Party 'a'")
    assert "secretword" not in str(caught.value)


def test_all_documents_empty_after_pruning():
    with pytest.raises(DataError, match=r"Every document \(of 3\) is empty after"):
        Vocabulary.of_documents(["the", "of 12", ""])
    vocabulary = Vocabulary.of_documents(["secretword cat", "cat"])
    assert vocabulary.pruned(min_documents=2).words == ("cat",)
    with pytest.raises(DataError, match="Use a smaller min_documents or a larger max_df") as caught:
        vocabulary.pruned(min_documents=3)
    assert "secretword" not in str(caught.value)
    assert "secretword" not in repr(vocabulary)


@given(some_texts, st.integers(1, 3), st.sampled_from([0.3, 0.5, 1.0]), st.integers(1, 5))
def test_pruning_keeps_the_most_frequent_of_those_in_range(documents, least, share, most):
    vocabulary = Vocabulary.of_documents(documents, Words("none"))
    frequency = dict(zip(vocabulary.words, vocabulary.documents.tolist(), strict=True))
    allowed = [word for word, df in frequency.items() if least <= df <= share * len(documents)]
    if not allowed:
        with pytest.raises(DataError):
            vocabulary.pruned(least, share, most)
        return
    pruned = vocabulary.pruned(least, share, most)
    assert list(pruned.words) == sorted(sorted(allowed, key=lambda word: (-frequency[word], word))[:most])
    assert pruned.documents.tolist() == [frequency[word] for word in pruned.words]


def test_a_public_list_keeps_its_order(tmp_path):
    (tmp_path / "words.txt").write_text("Zebra\nape\n\nzebra\nThe\n", encoding="utf-8")
    assert Vocabulary.of_file(tmp_path / "words.txt").words == ("Zebra", "ape", "zebra", "The")
    assert Vocabulary.of_file(tmp_path / "words.txt", Words()).words == ("zebra", "ape")


@given(some_texts)
def test_hashed_columns_hold_every_word(documents):
    words, key = Words("none"), fresh_key()
    for vocabulary in (HashedVocabulary(7), HashedVocabulary(7, key)):
        counted = count_words(documents, words, vocabulary)
        assert counted.rows.shape == (len(documents), 7)
        assert_array_equal(counted.rows.sum(axis=1).A1, [len(words.of(text)) for text in documents])
    assert repr(key) not in repr(HashedVocabulary(7, key))


def test_a_key_changes_the_columns_and_anybody_can_compute_those_without():
    listed = [f"word{number}" for number in range(200)]
    columns = [[HashedVocabulary(1000, key).column(word) for word in listed] for key in (b"", b"", fresh_key())]
    assert columns[0] == columns[1]
    assert sum(a == b for a, b in zip(columns[0], columns[2], strict=True)) < 10
    assert len(set(columns[0])) > 150


def test_what_does_not_fit():
    with pytest.raises(FeatureError):
        Vocabulary(("a", "b", "a"))
    with pytest.raises(DataError):
        Vocabulary(())
    with pytest.raises(ShapeError):
        Vocabulary(("a", "b"), [1])
    counted = count_words(["ab"], Words("none"), Vocabulary(("ab", "cd")))
    with pytest.raises(ShapeError):
        tf_idf(counted, [1], 1)
    with pytest.raises(ParameterError):
        tf_idf(counted, [1, 5], 2)
    with pytest.raises(ParameterError):
        tf_idf(counted, [1, 1], 2, norm="l1")
    with pytest.raises(ParameterError):
        Vocabulary(("ab",)).pruned(2)
    for options in (0, True, 1.5):
        with pytest.raises(ParameterError):
            HashedVocabulary(options)
