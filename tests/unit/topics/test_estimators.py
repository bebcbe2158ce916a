"""Topic models: planted topics are found, together as in one place, and no text leaves."""

import hashlib
import json
import struct
import sys

import numpy as np
import pytest
from method_tables import fednmf, fednmf_mi
from numpy.testing import assert_allclose
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.utils import get_tags

import partsong
from partsong.engines.local import Sequential
from partsong.errors import (
    DataError,
    DataTypeError,
    DivergenceError,
    FormatError,
    MissingExtra,
    ParameterError,
    PartsongError,
)
from partsong.evaluation.topic_quality import TopicPairs, count_pairs, cv_coherence, npmi_coherence, top_columns
from partsong.reporting.topic_page import positions, separate_discs
from partsong.secure_aggregation import crypto
from partsong.solvers.lda import TopicInference
from partsong.topics import fitting, shared_vocabulary
from partsong.topics.tokenizer import Words
from partsong.topics.vocabulary import UnknownWordsWarning, Vocabulary, count_words

PLANTED = (
    ("cat", "dog", "horse", "sheep", "goat", "hen"),
    ("piano", "violin", "cello", "flute", "oboe", "drum"),
    ("bread", "butter", "cheese", "milk", "honey", "wine"),
)
ALONE = ("nmf", "nmf-sgd", "nmf-sgd-mi", "lda")
TOGETHER = ("exact", "fnmf", "fednmf", "fednmf-mi", "fedlda")
QUICK = {"epochs": 3, "rate": 0.5}


def texts_about(seed, n=30, topics=(0, 1, 2)):
    """Five words of one topic in each text, and a name that no other text has."""
    draw = np.random.default_rng(seed)
    return [
        " ".join(draw.choice(PLANTED[draw.choice(topics)], 5)) + " " + "".join(draw.choice(list("qxzvjk"), 9))
        for _ in range(n)
    ]


PARTIES = {name: texts_about(seed) for seed, name in enumerate(("northern", "southern", "eastern", "western"))}
POOLED = [text for texts in PARTIES.values() for text in texts]
NAMES = sorted({text.split()[-1] for text in POOLED})


def found(model):
    """Which planted topic each topic is, if its six strongest words are those of one; else -1."""
    sets = [set(words) for words in PLANTED]
    return sorted(sets.index(set(words)) if set(words) in sets else -1 for words in model.topics(6))


@pytest.fixture(scope="module")
def together():
    return partsong.FederatedTopicModel(3, random_state=0).fit(PARTIES)


@pytest.fixture(scope="module")
def alone():
    return partsong.TopicModel(3, random_state=0).fit(POOLED)


@pytest.mark.parametrize("method", ["nmf", "lda"])
def test_planted_topics_are_found_in_one_place(method):
    model = partsong.TopicModel(3, method=method, random_state=1).fit(POOLED)
    assert found(model) == [0, 1, 2]
    assert np.isclose(model.topic_shares_.sum(), 1)
    assert (np.diff(model.topic_shares_) <= 0).all()
    assert len(model.history_) >= model.n_iter_ > 0


@pytest.mark.parametrize("method", ["exact", "fnmf", "fedlda"])
def test_planted_topics_are_found_together_where_each_party_lacks_one(method):
    parties = [texts_about(seed, 40, topics) for seed, topics in enumerate([(0, 1), (1, 2), (0, 2)])]
    model = partsong.FederatedTopicModel(3, method=method, random_state=1).fit(parties)
    assert found(model) == [0, 1, 2]


@pytest.mark.parametrize("method", ALONE)
def test_every_method_runs_alone_twice_the_same(method):
    def fitted():
        return partsong.TopicModel(3, method=method, random_state=3, max_iter=3, **QUICK).fit(POOLED)

    one, other = fitted(), fitted()
    assert one.components_.tobytes() == other.components_.tobytes()
    assert one.transform(POOLED).shape == (len(POOLED), 3)
    assert (one.components_ >= 0).all()


@pytest.mark.parametrize("method", TOGETHER)
def test_every_method_runs_together_twice_the_same_and_masked_too(method):
    def fitted(**more):
        settings = {"method": method, "random_state": 3, "rounds": 3, **QUICK, **more}
        return partsong.FederatedTopicModel(3, **settings).fit(PARTIES)

    one, other = fitted(), fitted()
    assert one.components_.tobytes() == other.components_.tobytes()
    assert one.vocabulary_ == other.vocabulary_
    assert all(row.bytes_up > 0 and row.bytes_down > 0 for row in one.history_)
    if method == "fnmf":
        with pytest.raises(ParameterError, match="cannot use secure aggregation"):
            fitted(secure_aggregation=True)
    else:
        assert np.allclose(fitted(secure_aggregation=True).components_, one.components_, atol=1e-5)


def test_descents_learn_with_enough_rounds():
    model = partsong.TopicModel(3, method="nmf-sgd", random_state=0, max_iter=20, rate=0.5).fit(POOLED)
    assert found(model) == [0, 1, 2]


def test_exact_together_is_the_model_of_the_pooled_texts(together):
    pooled = partsong.TopicModel(3, random_state=0, vocabulary=together.vocabulary_).fit(POOLED)
    assert np.abs(pooled.components_ - together.components_).max() < 1e-6
    assert np.abs(pooled.topic_shares_ - together.topic_shares_).max() < 1e-6
    assert np.array_equal(pooled.vectorizer_.documents, together.vectorizer_.documents)
    assert np.abs(pooled.transform(POOLED) - together.transform(POOLED)).max() < 1e-6
    assert pooled.coherence().topics == pytest.approx(together.coherence().topics)


@pytest.mark.parametrize(
    ("name", "counterpart"), [("nmf", "exact"), ("nmf-sgd", "fednmf"), ("nmf-sgd-mi", "fednmf-mi"), ("lda", "fedlda")]
)
def test_one_party_alone_is_the_centralised_model(name, counterpart):
    settings = {"random_state": 5, "vocabulary": sorted({word for topic in PLANTED for word in topic}), **QUICK}
    alone = partsong.TopicModel(3, method=name, max_iter=2, **settings).fit(POOLED)
    party = partsong.FederatedTopicModel(3, method=counterpart, rounds=2, **settings).fit({"all": POOLED})
    assert np.allclose(alone.components_, party.components_, atol=1e-12)


def test_one_party_may_choose_its_own_words():
    model = partsong.FederatedTopicModel(3, random_state=0, min_documents=2).fit([POOLED])
    assert found(model) == [0, 1, 2]
    assert model.agreement_ is None
    assert not set(NAMES) & set(model.vocabulary_)


def test_words_of_enough_parties_only(together):
    assert set(together.vocabulary_) == {word for topic in PLANTED for word in topic}
    assert together.agreement_.false_pass < 1e-6
    parties = [*PARTIES.values(), ["zither zither piano", "zither cello"]]
    assert "zither" not in partsong.FederatedTopicModel(2, random_state=0, rounds=2).fit(parties).vocabulary_
    strict = partsong.FederatedTopicModel(2, random_state=0, rounds=2, min_parties=5).fit(parties)
    assert set(strict.vocabulary_) == {"piano", "cello"}


@pytest.mark.parametrize("source", ["list", "file", "hash"])
def test_other_vocabularies_have_the_frequencies_of_all_parties(source, tmp_path):
    words = sorted({word for topic in PLANTED for word in topic})
    (tmp_path / "words.txt").write_text("\n".join(words), encoding="utf-8")
    vocabulary = {"list": words, "file": tmp_path / "words.txt", "hash": "hash"}[source]
    columns = {"max_words": 5000} if source == "hash" else {}
    model = partsong.FederatedTopicModel(3, random_state=0, vocabulary=vocabulary, **columns).fit(PARTIES)
    counted = count_words(POOLED, Words(), model.vectorizer_.vocabulary)
    assert np.array_equal(model.vectorizer_.documents, np.asarray((counted.rows > 0).sum(axis=0)).ravel())
    assert model.vectorizer_.n_documents == len(POOLED)
    if source == "hash":
        assert model.topics(1)[0][0].startswith("#")
        with pytest.raises(AttributeError, match="hashed"):
            _ = model.vocabulary_
    else:
        assert model.vocabulary_ == words
        assert found(model) == [0, 1, 2]


def test_texts_without_a_known_word_are_kept_and_flagged():
    parties = {"a": [*texts_about(0), "", None, float("nan")], "b": texts_about(1), "c": ["xylograph", "unheard"]}
    with pytest.warns(UnknownWordsWarning, match="Party 'c': none of 2 documents"):
        model = partsong.FederatedTopicModel(3, random_state=0).fit(parties)
    assert {name: int(flags.sum()) for name, flags in model.empty_documents_.items()} == {"a": 3, "b": 0, "c": 2}
    assert not model.transform(["", "xylograph", None]).any()
    mixture = partsong.TopicModel(3, method="lda", random_state=0).fit([*POOLED, ""])
    assert mixture.empty_documents_.tolist() == [False] * len(POOLED) + [True]
    W = mixture.transform(["", "cat dog"])
    assert not W[0].any()
    assert np.isclose(W[1].sum(), 1)


def test_fit_transform_is_fit_and_transform(alone):
    W = partsong.TopicModel(3, random_state=0).fit_transform(POOLED)
    assert np.array_equal(W, alone.transform(POOLED))
    assert (W[[i for i, text in enumerate(POOLED) if "cello" in text]].argmax(axis=1) == np.argmax(
        alone.components_[:, alone.vocabulary_.index("cello")])).mean() > 0.95  # fmt: skip


def test_coherence_is_that_of_all_documents(together):
    vocabulary = Vocabulary(tuple(together.vocabulary_))
    rows, topics = count_words(POOLED, Words(), vocabulary).rows, top_columns(together.components_, 10)
    counts = count_pairs(rows, TopicPairs.of(topics))
    assert together.coherence().topics == pytest.approx(npmi_coherence(topics, counts).topics)
    assert together.coherence("c_v").topics == pytest.approx(cv_coherence(topics, counts).topics)
    assert together.coherence("npmi", PARTIES).topics == together.coherence().topics
    assert together.coherence("c_v", PARTIES).topics == pytest.approx(together.coherence("c_v").topics)
    assert together.coherence_.tolist() == list(together.coherence().topics)
    same = {word: np.eye(3)[number] for number, words in enumerate(PLANTED) for word in words}
    assert together.coherence("vectors", vectors=same, n=5).mean == pytest.approx(1)
    assert together.coherence(n=4).topics != together.coherence().topics
    silent = partsong.TopicModel(3, random_state=0, counts_words=False).fit(POOLED)
    assert silent.coherence_ is None
    assert silent.coherence("npmi", POOLED).mean > 0


@pytest.mark.parametrize("kind", [partsong.TopicModel, partsong.FederatedTopicModel])
@pytest.mark.parametrize("method", ["factors", "mixture"])
def test_a_loaded_model_is_the_model(kind, method, tmp_path):
    is_pooled = kind is partsong.TopicModel
    name = {"factors": ("nmf", "exact"), "mixture": ("lda", "fedlda")}[method][not is_pooled]
    texts = POOLED if is_pooled else PARTIES
    model = kind(3, method=name, random_state=0, stop_words=("honey",)).fit(texts)
    model.save(tmp_path / "one.safetensors")
    again = kind.load(tmp_path / "one.safetensors")
    assert again.components_.tobytes() == model.components_.tobytes()
    assert again.topics() == model.topics()
    assert again.method == name
    assert again.transform([*POOLED, ""]).tobytes() == model.transform([*POOLED, ""]).tobytes()
    assert np.array_equal(again.coherence_, model.coherence_)
    again.save(tmp_path / "two.safetensors")
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()
    assert partsong.TopicModel.load(tmp_path / "one.safetensors").topics() == model.topics()
    with pytest.raises(DataError, match="Pass texts="):
        again.coherence()
    assert again.coherence("npmi", texts).topics == model.coherence().topics


def test_hashed_models_are_saved_with_their_key(tmp_path):
    model = partsong.FederatedTopicModel(3, random_state=0, vocabulary="hash", max_words=300).fit(PARTIES)
    model.save(tmp_path / "m.safetensors")
    again = partsong.FederatedTopicModel.load(tmp_path / "m.safetensors")
    assert np.array_equal(again.transform(POOLED), model.transform(POOLED))


class Recorder:
    """An engine that keeps all that was sent."""

    sent: list = []  # noqa: RUF012

    def __init__(self, *args, **kwargs):
        pass

    def run(self, *args, **kwargs):
        for done in Sequential(record=True).run(*args, **kwargs):
            Recorder.sent += [array for _, _, message in done.traffic for array in message.arrays.values()]
            Recorder.sent += list(done.model.arrays.values())
            yield done


def traces_of(word):
    """A word in several encodings, and its plain hashes."""
    text = word.encode()
    hashes = [hashlib.new(name, text).digest()[:8] for name in ("md5", "sha1", "sha256", "blake2b", "blake2s")]
    return [text, word.encode("utf-16-le"), word.encode("utf-32-le"), *hashes]


@pytest.mark.parametrize("masked", [False, True])
def test_no_rare_word_and_no_text_leaves_a_party(masked, monkeypatch, tmp_path):
    for module in (shared_vocabulary, fitting):
        monkeypatch.setattr(module, "Parallel", Recorder)
    Recorder.sent = []
    model = partsong.FederatedTopicModel(3, random_state=0, secure_aggregation=masked).fit(PARTIES)
    model.save(tmp_path / "m.safetensors")
    model.to_html(tmp_path / "m.html")
    sent = b"|".join(np.ascontiguousarray(array).tobytes() for array in Recorder.sent)
    assert len(sent) > 10_000
    kept = b"|".join((tmp_path / name).read_bytes() for name in ("m.safetensors", "m.html"))
    for word in NAMES:
        assert not any(trace in sent or trace in kept for trace in traces_of(word))
    for name in PARTIES:
        assert name.encode() not in kept
    assert not any(text.encode() in kept for text in POOLED)
    assert b"cello" in kept


def test_pages_are_whole_escaped_and_load_nothing(together, tmp_path):
    together.to_html(tmp_path / "a.html")
    together.to_html(tmp_path / "b.html")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert page == (tmp_path / "b.html").read_text(encoding="utf-8")
    assert "http://" not in page
    assert "https://" not in page
    assert "<script" not in page
    assert all(word in page for words in together.topics() for word in words)
    hostile = partsong.TopicModel(1, random_state=0, words=Words(pattern=r"\S+", language="none"))
    hostile.fit(["<script>alert(1)</script> a&b", "<script>alert(1)</script> a&b"]).to_html(tmp_path / "c.html")
    page = (tmp_path / "c.html").read_text(encoding="utf-8")
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "a&amp;b" in page


def test_topics_lie_in_the_plane_as_they_differ():
    H = np.array([[1.0, 1, 0, 0], [1, 0.9, 0, 0], [0, 0, 1, 1]])
    at = positions(H)
    near, far = np.linalg.norm(at[0] - at[1]), np.linalg.norm(at[0] - at[2])
    assert near < 0.2 * far
    assert (at >= 0).all()
    assert (at <= 1).all()
    radii = np.full(5, 0.1)
    moved = separate_discs(np.zeros((5, 2)), radii)
    gaps = np.linalg.norm(moved[:, None] - moved[None], axis=2)[np.triu_indices(5, 1)]
    assert gaps.min() > 0.15
    assert positions(np.ones((1, 4))).shape == (1, 2)


def test_sampled_parties_and_adaptive_servers():
    settings = {"random_state": 0, "rounds": 4, "participation": 0.5, **QUICK}
    model = partsong.FederatedTopicModel(3, method="fednmf", server="adam", **settings).fit(PARTIES)
    assert [row.parties for row in model.history_] == [2] * 4
    assert model.n_iter_ == 4
    other = partsong.FederatedTopicModel(3, method="fednmf", server="yogi", **settings).fit(PARTIES)
    assert not np.allclose(model.components_, other.components_)
    assert partsong.FederatedTopicModel(3, method="fedlda", **settings).fit(PARTIES).n_iter_ == 4
    for more, told in [
        ({"method": "exact"}, "participation=0.5 is for fednmf"),
        ({"method": "fednmf", "secure_aggregation": True}, "at least 3 parties in every round"),
        ({"method": "fedlda", "secure_aggregation": True, "participation": 0.8}, "would hide nothing"),
    ]:
        with pytest.raises(ParameterError, match=told):
            partsong.FederatedTopicModel(3, **{**settings, **more}).fit(PARTIES)


def test_programs_are_methods():
    named = partsong.FederatedTopicModel(3, method="fednmf", random_state=0, rounds=2).fit(PARTIES)
    given = partsong.FederatedTopicModel(method=fednmf(3, weight_step="document"), random_state=0, rounds=2).fit(
        PARTIES
    )
    assert given.components_.tobytes() == named.components_.tobytes()
    with pytest.raises(ParameterError, match="the program has 3"):
        partsong.FederatedTopicModel(4, method=fednmf_mi(3)).fit(PARTIES)


CRITIC = {"critic": "separable", "mi_gradient": "js", "critic_rate": 0.7, "warm_start_weights": True}


@pytest.mark.parametrize("name", CRITIC)
def test_settings_of_the_critic_are_those_of_the_method(name):
    chosen = {name: CRITIC[name]}
    steps = {"epochs": 1, "batch": 16, "rate": 0.2, "strength": 0.5}
    words = [word for topic in PLANTED for word in topic]
    settings = {"random_state": 0, "vocabulary": words, "counts_words": False}
    program = fednmf_mi(3, weight_step="document", **steps, **chosen)
    for kind, named, texts, rounds in (
        (partsong.TopicModel, "nmf-sgd-mi", POOLED, {"max_iter": 2}),
        (partsong.FederatedTopicModel, "fednmf-mi", PARTIES, {"rounds": 2}),
    ):
        model = kind(3, method=named, **settings, **steps, **chosen, **rounds).fit(texts)
        given = kind(method=program, **settings, **rounds).fit(texts)
        printed = kind(3, method=named, **settings, **steps, **rounds).fit(texts)
        assert model.components_.tobytes() == given.components_.tobytes()
        assert model.components_.tobytes() != printed.components_.tobytes()


@pytest.mark.parametrize(("name", "value"), CRITIC.items())
def test_settings_of_a_critic_are_refused_by_methods_without_one(name, value):
    others = {"nmf": partsong.TopicModel, "lda": partsong.TopicModel}
    others |= dict.fromkeys(("exact", "fnmf", "fedlda"), partsong.FederatedTopicModel)
    if name != "warm_start_weights":
        others |= {"nmf-sgd": partsong.TopicModel, "fednmf": partsong.FederatedTopicModel}
    for method, kind in others.items():
        descent = "nmf-sgd" if kind is partsong.TopicModel else "fednmf"
        nearest = descent if name == "warm_start_weights" else f"{descent}-mi"
        with pytest.raises(ParameterError, match=f"^{name}=.*Remove it, or use {nearest}"):
            kind(3, method=method, **{name: value}).fit(object())
    with pytest.raises(ParameterError, match=f"^{name}=.*the method is FederatedDescent"):
        partsong.FederatedTopicModel(method=fednmf_mi(3), **{name: value}).fit(PARTIES)
    wrong = {"critic": ["concat"], "mi_gradient": "kl", "critic_rate": -1.0, "warm_start_weights": "yes"}[name]
    with pytest.raises(
        ParameterError, match="rate must be a number" if name == "critic_rate" else f"^{name} (is|must be) "
    ):
        partsong.FederatedTopicModel(3, method="fednmf-mi", **{name: wrong}).fit(PARTIES)


@pytest.mark.parametrize(
    ("source", "told"), [(["cat", "piano"], "used unchanged"), ("hash", "gives every word a column")]
)
def test_a_given_vocabulary_is_taken_as_it_is_or_refused(source, told):
    asked = {"min_documents": 2, "max_df": 0.5, "max_words": 3, "min_parties": 2, "max_word_bytes": 40}
    settings = {"vocabulary": source, "random_state": 0}
    for name, value in asked.items():
        if source == "hash" and name == "max_words":
            continue
        for kind in (partsong.TopicModel, partsong.FederatedTopicModel):
            if kind is partsong.FederatedTopicModel or name not in ("min_parties", "max_word_bytes"):
                with pytest.raises(ParameterError, match=rf"^{name}={value} .*{told}.*Remove {name}"):
                    kind(1, **settings, **{name: value}).fit(object())
    if source != "hash":
        assert partsong.TopicModel(1, **settings, max_iter=1, max_df=1.0).fit(POOLED).vocabulary_ == source


def test_longer_words_are_agreed_on_where_they_are_asked_for():
    long, longer = "x" * 33, "\u00e9" * 30  # of 33 and 60 bytes
    parties = [[*texts, f"cat {long}", f"dog {longer}"] for texts in PARTIES.values()]

    def known(**more):
        model = partsong.FederatedTopicModel(2, random_state=0, rounds=1, counts_words=False, **more).fit(parties)
        return {long, longer} & set(model.vocabulary_)

    with pytest.warns(UserWarning, match="larger max_word_bytes"):
        assert known() == set()
    with pytest.warns(UserWarning, match="larger max_word_bytes"):
        assert known(max_word_bytes=33) == {long}
    assert known(max_word_bytes=60) == {long, longer}
    for value in (0, 2.5, True, 2000):
        with pytest.raises(ParameterError, match="max_word_bytes"):
            known(max_word_bytes=value)


@pytest.mark.parametrize("weighting", ["tfidf", "counts"])
@pytest.mark.parametrize("masked", [False, True])
def test_steps_that_are_too_large_are_told_with_ways_out_that_a_model_has(weighting, masked):
    settings = {"method": "fednmf-mi", "weighting": weighting, "secure_aggregation": masked, "counts_words": False}
    settings |= {"vocabulary": [word for topic in PLANTED for word in topic], "random_state": 0, "epochs": 8}
    with pytest.raises(DivergenceError) as caught:
        partsong.FederatedTopicModel(3, rate=1e9, rounds=2, **settings).fit(PARTIES)
    told = " ".join([str(caught.value), *caught.value.__notes__])
    assert "rate=1e+09, batch=64" in told
    assert "a smaller rate, a larger batch, a smaller critic_rate" in told
    assert 'mi_gradient="js"' in told
    assert ('weighting="tfidf"' in told) == (weighting == "counts")
    assert "(party 'eastern', stage 'local', round 0)" in told
    assert not any(word in told for word in ("on_party_error", "checkpoint", "shards"))
    assert partsong.FederatedTopicModel(3, rate=1e-3, rounds=1, **settings).fit(PARTIES).n_iter_ == 1


def test_a_fit_that_runs_away_later_is_told_in_the_same_words():
    settings = {"method": "fednmf", "server": "adam", "server_rate": 1e200, "random_state": 0, "epochs": 1}
    model = partsong.FederatedTopicModel(3, rounds=3, counts_words=False, **settings)
    with pytest.warns(UserWarning) as caught:  # noqa: PT030
        model.fit(PARTIES)
    assert str(model.outcome_) == "diverged"
    told = [str(warning.message) for warning in caught]
    assert len(told) == 2
    assert all("a smaller rate, a larger batch or a smaller server_rate" in one for one in told)
    assert not any(word in one for one in told for word in ("on_party_error", "checkpoint", "solver"))


def test_settings_that_make_no_sense_are_refused_by_name():
    for settings, told in [
        ({"method": "nope"}, "method must be one of exact"),
        ({"method": "nmf"}, "a method of TopicModel"),
        ({"server": "adam"}, "server='adam' is for fednmf"),
        ({"server": "sgd"}, "server must be one of"),
        ({"method": "fednmf", "server_rate": 0.1}, "server_rate=0.1 is for adaptive servers.*yogi"),
        ({"participation": 0}, "participation must be"),
        ({"rounds": 0}, "rounds must be"),
        ({"weighting": "bm25"}, "weighting must be one of"),
        ({"method": "fedlda", "weighting": "tfidf"}, "not for LDA, which models counts"),
        ({"n_topics": 0}, "n_topics must be"),
        ({"n_topics": 20}, "n_topics must be at most 18, the number of words in the vocabulary; got 20"),
        ({"min_parties": 5}, "min_parties must be at most 4"),
        ({"vocabulary": []}, "vocabulary is empty"),
        ({"language": "klingon"}, "no list of stop words"),
        ({"max_df": 0}, "max_df must be"),
        ({"verbose": -1}, "verbose must be"),
    ]:
        with pytest.raises(PartsongError, match=told):
            partsong.FederatedTopicModel(**{"n_topics": 3, "random_state": 0, **settings}).fit(PARTIES)
    with pytest.raises(DataTypeError, match="vocabulary must be"):
        partsong.FederatedTopicModel(3, vocabulary=7).fit(PARTIES)
    with pytest.raises(ParameterError, match="needs several parties"):
        partsong.TopicModel(3, vocabulary="agree").fit(POOLED)
    with pytest.raises(ParameterError, match="Pass vectors="):
        partsong.TopicModel(3, random_state=0, max_iter=1).fit(POOLED).coherence("vectors")


def test_bad_texts_are_refused_without_telling_them():
    secret = "zanzibarquux"
    cases = [
        (partsong.TopicModel(2), []),
        (partsong.TopicModel(2), secret),
        (partsong.TopicModel(2), [secret, 3]),
        (partsong.TopicModel(2), [secret]),
        (partsong.TopicModel(2), ["the of", "and"]),
        (partsong.TopicModel(5), [secret, secret]),
        (partsong.TopicModel(2, vocabulary=["cat", "dog"]), [secret]),
        (partsong.FederatedTopicModel(2), []),
        (partsong.FederatedTopicModel(2), {}),
        (partsong.FederatedTopicModel(2), [[secret], []]),
        (partsong.FederatedTopicModel(2), [secret, secret]),
        (partsong.FederatedTopicModel(2), [[secret], [secret.encode()]]),
        (partsong.FederatedTopicModel(2), {"a": [secret], "b": ["other"]}),
        (partsong.FederatedTopicModel(2, vocabulary=["cat", "dog"]), {"a": [secret], "b": [secret]}),
    ]
    for model, texts in cases:
        with pytest.raises(PartsongError) as caught:
            model.fit(texts)
        error = caught.value
        while error is not None:
            assert secret not in repr(error)
            assert secret not in str(getattr(error, "__notes__", ""))
            error = error.__cause__ or error.__context__
    with pytest.raises(DataTypeError, match="Party 'b': Document 0"):
        partsong.FederatedTopicModel(2).fit({"a": ["cat dog"], "b": [3.5]})


def rewritten(path, change):
    """The file with another document, and a checksum that fits."""
    from partsong.io.tensor_file import read_tensors, write_tensors
    from partsong.io.topic_file import _KIND

    tensors, content = read_tensors(path, _KIND)
    change(tensors, content)
    write_tensors(path, _KIND, tensors, content)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, content: content.pop("words"),
        lambda tensors, content: content.update(words=content["words"][:-1]),
        lambda tensors, content: content.update(words=[content["words"][0]] * len(content["words"])),
        lambda tensors, content: content.update(words=[{}] * len(content["words"])),
        lambda tensors, content: content.update(words="cat"),
        lambda tensors, content: content.update(key="zz"),
        lambda tensors, content: content.update(options="[" * 100_000),
        lambda tensors, content: content.update(options='{"pattern": "(a+)+$"}'),
        lambda tensors, content: content.update(options='{"language": "klingon"}'),
        lambda tensors, content: content.update(n_documents=-1),
        lambda tensors, content: content.update(n_documents=True),
        lambda tensors, content: content.update(settings=[]),
        lambda tensors, content: content.update(settings={"weights": "mixture", "alpha": -1}),
        lambda tensors, content: content.update(seed="0"),
        lambda tensors, content: tensors.update(components=-tensors["components"]),
        lambda tensors, content: tensors.update(components=tensors["components"][:, :-1]),
        lambda tensors, content: tensors.update(components=tensors["components"] * np.nan),
        lambda tensors, content: tensors.update(frequencies=tensors["frequencies"] * 10**6),
        lambda tensors, content: tensors.update(shares=tensors["shares"][:-1]),
        lambda tensors, content: tensors.update(W=np.ones(3)),
        lambda tensors, content: tensors.pop("components"),
    ],
)
def test_files_that_are_not_sound_are_refused(change, together, tmp_path):
    path = tmp_path / "m.safetensors"
    together.save(path)
    rewritten(path, change)
    with pytest.raises(FormatError):
        partsong.FederatedTopicModel.load(path)


def test_other_files_are_refused(together, tmp_path):
    path = tmp_path / "m.safetensors"
    together.save(path)
    whole = path.read_bytes()
    for bad in (b"", whole[: len(whole) // 2], struct.pack("<Q", 1 << 60) + b"{}", b"\x80\x04cos\nsystem\n"):
        path.write_bytes(bad)
        with pytest.raises(FormatError):
            partsong.TopicModel.load(path)
    nmf = partsong.NMF(2, random_state=0, max_iter=2).fit(np.eye(4))
    nmf.save(path)
    with pytest.raises(FormatError, match="partsong-topics"):
        partsong.TopicModel.load(path)
    with pytest.raises(OSError, match="must end in"):
        together.save(tmp_path / "m.pkl")


def test_patterns_come_from_the_caller(tmp_path):
    words = Words(pattern=r"\w+")
    model = partsong.TopicModel(2, random_state=0, words=words, max_iter=2).fit(["a1 b2 c3", "a1 b2", "c3 a1"])
    model.save(tmp_path / "m.safetensors")
    with pytest.raises(FormatError, match="custom pattern"):
        partsong.TopicModel.load(tmp_path / "m.safetensors")
    assert partsong.TopicModel.load(tmp_path / "m.safetensors", words=words).topics() == model.topics()
    with pytest.raises(FormatError, match="differ from the word options of this model"):
        partsong.TopicModel.load(tmp_path / "m.safetensors", words=Words(pattern=r"\S+"))


def test_estimators_can_be_cloned_and_tell_their_settings():
    for kind in (partsong.TopicModel, partsong.FederatedTopicModel):
        model = kind(7, language="none", min_documents=3)
        assert clone(model).get_params() == model.get_params()
        json.dumps(model.get_params(), default=str)


def test_everything_works_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for method in TOGETHER:
        model = partsong.FederatedTopicModel(3, method=method, rounds=1, epochs=1, random_state=0).fit(PARTIES)
        assert model.transform(["cat dog"]).shape == (1, 3)


def test_solvers_come_back_as_they_were(tmp_path):
    model = partsong.TopicModel(2, method="lda", random_state=0, max_iter=2).fit(POOLED)
    model.save(tmp_path / "m.safetensors")
    assert partsong.TopicModel.load(tmp_path / "m.safetensors").solver_ == TopicInference(0.5)


@pytest.mark.parametrize("kind", [partsong.TopicModel, partsong.FederatedTopicModel])
def test_settings_are_refused_before_any_text_is_looked_at(kind):
    descent = "nmf-sgd-mi" if kind is partsong.TopicModel else "fednmf-mi"
    cases = [{"n_topics": value} for value in (2.0, "2", None, True, 0, float("nan"))]
    cases += [{"method": descent, name: value} for name in ("rate", "strength") for value in ("0.1", None, -1.0)]
    cases += [{"method": descent, "epochs": 1.5}, {"method": descent, "batch": 0}, {"dtype": int}]
    cases += [{"stop_words": iter(["the"])}, {"stop_words": 3}]
    for settings in cases:
        with pytest.raises((ParameterError, DataTypeError)) as caught:
            kind(**{"n_topics": 2, **settings}).fit(object())
        assert "text" not in str(caught.value).replace("in place of", "")


def test_mappings_and_tables_are_not_taken_for_lists_of_texts():
    for texts in (PARTIES, set(POOLED), np.array([POOLED])):
        with pytest.raises(DataTypeError, match="list of texts"):
            partsong.TopicModel(2).fit(texts)


def test_nothing_is_told_before_a_fit():
    for model in (partsong.TopicModel(2), partsong.FederatedTopicModel(2)):
        for ask in ("topics", "diversity", "coherence", "to_html"):
            with pytest.raises(NotFittedError):
                getattr(model, ask)()
        for name in ("settings_", "vocabulary_"):
            with pytest.raises(NotFittedError):
                getattr(model, name)


@pytest.mark.parametrize("method", ["nmf", "lda"])
def test_models_have_the_precision_that_was_asked_for(method):
    model = partsong.TopicModel(3, method=method, dtype="float32", random_state=0, max_iter=3).fit(POOLED)
    assert model.components_.dtype == model.transform(POOLED).dtype == np.float32


def test_more_words_than_a_fit_counts_are_judged_by_texts(together):
    with pytest.raises(ParameterError, match="Pass texts="):
        together.coherence(n=12)
    topics = top_columns(together.components_, 12)
    counts = count_pairs(
        count_words(POOLED, Words(), Vocabulary(tuple(together.vocabulary_))).rows, TopicPairs.of(topics)
    )
    assert together.coherence(texts=PARTIES, n=12).topics == pytest.approx(npmi_coherence(topics, counts).topics)
    assert all(len(topic) <= 18 for topic in together.topics(1000))


HOSTILE = (
    "</script><script>x",
    "\u202egnp.exe",
    "a\x00b",
    "\x1b[31mred",
    "--><img/src=x>",
    "\ud800lone",
    "x" * 5000,
    "न\u200dम",
)


def test_no_word_can_disturb_a_page_or_a_file(tmp_path):
    words = Words(pattern=r"\S+", language="none", shortest=1)
    model = partsong.TopicModel(1, random_state=0, words=words).fit([" ".join(HOSTILE)] * 2)
    page = model.to_html()
    model.to_html(tmp_path / "m.html")
    assert (tmp_path / "m.html").read_text(encoding="utf-8") == page
    assert not any(bad in page for bad in ("<script", "<img", "\x00", "\x1b", "\u202e", "\ud800", "x" * 100))
    assert all(good in page for good in ("\\u202egnp.exe", "a\\x00b", "\\ud800lone", "न\u200dम", "xxx…"))
    model.save(tmp_path / "m.safetensors")
    again = partsong.TopicModel.load(tmp_path / "m.safetensors", words=words)
    assert again.vocabulary_ == model.vocabulary_
    assert set(again.vocabulary_) == set(HOSTILE)


def test_words_are_agreed_on_with_the_extra_alone(monkeypatch):
    def missing():
        raise MissingExtra("no cryptography")

    monkeypatch.setattr(crypto, "require_cryptography", missing)
    two = {name: PARTIES[name] for name in ("northern", "southern")}
    with pytest.raises(MissingExtra, match="public list of words"):
        partsong.FederatedTopicModel(2, random_state=0).fit(two)
    listed = partsong.FederatedTopicModel(2, random_state=0, vocabulary=["cat", "dog", "piano", "oboe"], rounds=2)
    assert listed.fit(two).n_topics_ == 2


def test_a_topic_model_is_a_transformer_of_scikit_learn():
    pandas = pytest.importorskip("pandas")
    words = ["apple tree fruit", "apple pie fruit", "car road wheel", "truck road wheel"] * 6
    texts, labels = pandas.Series(words, index=range(5, 29)), [0, 0, 1, 1] * 6
    model = partsong.TopicModel(2, random_state=0).set_output(transform="pandas")
    weights = model.fit_transform(texts)
    assert list(weights.columns) == ["topicmodel0", "topicmodel1"] == list(model.get_feature_names_out())
    assert list(weights.index) == list(texts.index)
    assert_allclose(model.transform(texts).to_numpy(), weights.to_numpy())
    tags = get_tags(model)
    assert tags.input_tags.string
    assert not tags.input_tags.two_d_array
    assert tags.transformer_tags is not None
    chained = make_pipeline(partsong.TopicModel(2, random_state=0), LogisticRegression(C=100)).fit(words, labels)
    assert chained.score(words, labels) == 1
