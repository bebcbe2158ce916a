"""`partsong.TopicModel`: topics of texts that you hold."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator

from partsong.core import Program
from partsong.errors import ParameterError
from partsong.evaluate.coherence import Coherence
from partsong.fitted_topics import FittedTopics
from partsong.progress import progress
from partsong.settings import precision_of, require_verbosity, stop_of, whole_number
from partsong.text.documents import as_documents
from partsong.text.words import Words
from partsong.topic_device import require_device
from partsong.topic_fitting import Course, learn
from partsong.topic_methods import OF_DESCENTS, require_method, require_words, topic_program, weighting_of
from partsong.topic_names import ALONE, TOP, rounds_for
from partsong.topic_saving import fill_with_topics
from partsong.topic_vocabulary import AGREE, prepared_alone
from partsong.topic_word_rule import word_rule
from partsong.topic_words import words_of
from partsong.validation import whole_seed


class TopicModel(FittedTopics, BaseEstimator):  # type: ignore[misc]
    """Topics of texts: X ≈ W H, with a row of X for each text and a row of H for each topic.

    method="nmf" factorizes tf-idf by alternating sweeps; it is fast, and was best on short titles (docs/topics.md).
    "nmf-sgd" takes projected steps on batches of documents, "nmf-sgd-mi" as well while weights keep mutual information
    with the documents (Si et al., 2022), and "lda" is latent Dirichlet allocation by variational Bayes. Each is what
    its federated counterpart does with one party. A Program may be given instead of a name.

    Parameters
    ----------
    n_topics : int
        k; at most as many as there are words. None takes that of a Program.
    method : {"nmf", "nmf-sgd", "nmf-sgd-mi", "lda"} or Program
        How topics are learned.
    weighting : {"tfidf", "counts"} or None
        What a word weighs in a text: tf-idf with rows of norm 1, or how often it occurs. None is tf-idf, and counts
        for LDA.
    vocabulary : None, "hash", path, list of words or Vocabulary
        None takes the words of the texts that are left by min_documents, max_share and max_words; a path has one word
        per line; "hash" gives words columns by hash, max_words of them (10 000).
    min_documents, max_share, max_words :
        A word is in at least so many documents (None: 2) and at most in such a share of them; of these, the most
        frequent. Refused with a vocabulary, which is taken as it is.
    language, stop_words, words :
        A list of stop words by language ("none": no list) and further ones; or all options, as a Words value.
    max_iter : int or None
        The most iterations: 200 for "nmf", 50 for all others (rounds of `epochs` for the descents).
    tol, time_budget, random_state, verbose, dtype :
        As in `NMF`. "nmf" and "lda" stop by tol; the descents make all iterations. dtype is float64 unless given.
    epochs, batch, rate, strength :
        Of the descents: passes over the documents per iteration, documents per step, step, and λ of "nmf-sgd-mi".
    critic, mi_gradient, critic_rate : {"concat", "separable"}, {"dv", "js"}, float or None
        Of "nmf-sgd-mi": who tells weights of documents apart, by which slopes it learns, and its step (None: `rate`).
        As printed, which is the default, it hardly learns by plain steps; "js" with 0.2 to 0.5 does.
    fits_first : bool
        Of the descents: whether weights are fitted to the topics anew before each iteration but the first.
    counts_words : bool
        Whether the fit also counts which of the strongest words occur together, for `coherence`.
    device : str or None
        Of the descents: compute with torch on this device, "cuda" or "cpu", say. None is NumPy and compiled loops,
        which need no torch; the topics are the same to rounding.

    Attributes
    ----------
    components_ : array (k, V)
        H, the largest topic first; of norm 1, or for LDA the probabilities of words.
    topic_shares_ : array (k,) or None
        Sizes: shares of what topics explain, for LDA of the documents. None: not known, as in results of a federation.
    coherence_ : array (k,) or None
        NPMI of each topic's ten strongest words.
    vocabulary_, weighing_, n_topics_, n_documents_, relative_error_, history_, n_iter_, outcome_, seed_ :
        Words of the columns; texts to rows; sizes; how the fit went, with perplexity as the objective of LDA.
    empty_documents_ : array of bool
        Which texts have no word of the vocabulary; they are kept, and their weights are zero.
    """

    def __init__(
        self,
        n_topics: int | None = None,
        *,
        method: str | Program = "nmf",
        weighting: str | None = None,
        vocabulary: Any = None,
        min_documents: int | None = None,
        max_share: float = 1.0,
        max_words: int | None = None,
        language: str = "english",
        stop_words: Iterable[str] = (),
        words: Words | None = None,
        max_iter: int | None = None,
        tol: float = 1e-6,
        time_budget: float | None = None,
        random_state: Any = None,
        verbose: int = 0,
        dtype: Any = "float64",
        epochs: int = 10,
        batch: int = 64,
        rate: float = 0.05,
        strength: float = 0.1,
        critic: str = "concat",
        mi_gradient: str = "dv",
        critic_rate: float | None = None,
        fits_first: bool = False,
        counts_words: bool = True,
        device: str | None = None,
    ) -> None:
        self.n_topics = n_topics
        self.method = method
        self.weighting = weighting
        self.vocabulary = vocabulary
        self.min_documents = min_documents
        self.max_share = max_share
        self.max_words = max_words
        self.language = language
        self.stop_words = stop_words
        self.words = words
        self.max_iter = max_iter
        self.tol = tol
        self.time_budget = time_budget
        self.random_state = random_state
        self.verbose = verbose
        self.dtype = dtype
        self.epochs = epochs
        self.batch = batch
        self.rate = rate
        self.strength = strength
        self.critic = critic
        self.mi_gradient = mi_gradient
        self.critic_rate = critic_rate
        self.fits_first = fits_first
        self.counts_words = counts_words
        self.device = device

    def fit(self, texts: Any, y: Any = None) -> TopicModel:
        """Learn topics from a list of texts; None and NaN are texts without words."""
        self._fit(texts)
        return self

    def fit_transform(self, texts: Any, y: Any = None) -> np.ndarray:
        """Learn topics and return the weights of the texts, as `transform` gives them."""
        documents = as_documents(texts)
        self._fit(documents)
        return self.transform(documents)

    def coherence(self, kind: str = "npmi", texts: Any = None, *, n: int = TOP, vectors: Any = None) -> Coherence:
        """Do the n strongest words of each topic belong together: `.mean`, and `.topics` for each.

        "npmi" and "c_v" by how often they occur together, in `texts` or else in those of the fit (where C_v takes each
        for one window); "vectors" by the cosines of word vectors, a path or a mapping.
        """
        by_party = None if texts is None else {"all": as_documents(texts)}
        return self._judged(kind, self._rows(kind, by_party), n, vectors)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, words: Words | None = None) -> TopicModel:
        """A model from the file of this or a federated one, ready to show and to transform.

        `words` is needed only where it was fitted with a pattern of its own.
        """
        model = cls()
        settings = fill_with_topics(model, path, words)
        told = {"method": settings.get("method")} if settings.get("method") in ALONE else {}
        return model.set_params(n_topics=model.n_topics_, **told)

    def _fit(self, texts: Any) -> None:
        stop, options = self._check_settings(), words_of(self.words, self.language, self.stop_words)
        asked = {name: getattr(self, name) for name in ("min_documents", "max_words", "max_share")}
        rule = word_rule(self._source(), asked, least=2)
        seed, weighting = whole_seed(self.random_state), weighting_of(self.weighting, self.method)
        steps = {name: getattr(self, name) for name in OF_DESCENTS}
        program, dtype = topic_program(self.method, self.n_topics, steps, ALONE), precision_of(self.dtype)
        require_device(self.device, program)
        documents = as_documents(texts)
        prepared = prepared_alone(rule, documents, options, seed, weighting)
        require_words(program, prepared.weighing.vocabulary.n_columns)
        rounds = rounds_for(self.method) if self.max_iter is None else int(self.max_iter)
        course = Course(rounds, seed, stop, device=self.device, weighting=weighting)
        with progress(self.verbose, rounds, self.time_budget, f"topics of {len(documents)} texts") as bar:
            found = learn(program, prepared.rows, course, dtype, bar)
        self._keep(found, prepared, program.solver, seed, self.counts_words)
        self.history_ = [row._replace(bytes_up=0, bytes_down=0) for row in self.history_]
        self.empty_documents_ = np.asarray(prepared.counted["all"].is_empty)

    def _check_settings(self) -> Any:
        require_method(self.method, ALONE)
        require_verbosity(self.verbose)
        if self.max_iter is not None:
            whole_number("max_iter", self.max_iter)
        return stop_of(self.tol, self.time_budget)

    def _source(self) -> Any:
        if isinstance(self.vocabulary, str) and self.vocabulary == AGREE:
            raise ParameterError('vocabulary="agree" is between parties. Texts of one place: leave it out.')
        return AGREE if self.vocabulary is None else self.vocabulary

    def _told(self) -> dict[str, Any]:
        named = self.method if isinstance(self.method, str) else type(self.method).__name__
        return {"method": named, "weighting": self.weighing_.weighting, "tol": float(self.tol)}
