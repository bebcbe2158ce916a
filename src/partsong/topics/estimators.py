"""`partsong.TopicModel` and `partsong.FederatedTopicModel`: topic models of pooled or federated texts."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from partsong.aggregation.plaintext import PlainReduction
from partsong.core import runtime
from partsong.core.interfaces import Outcome, Program, Reduction, RowSolver
from partsong.core.parameters import real_number, whole_number
from partsong.engines.rounds import sample_participants
from partsong.errors import DataError, ParameterError, format_count
from partsong.estimators.persistence import penalties_to_dict
from partsong.estimators.validation import (
    precision_of,
    refuse_old_names,
    require_verbosity,
    solver_from_settings,
    stop_of,
    whole_seed,
)
from partsong.evaluation.topic_quality import (
    Coherence,
    Cooccurrence,
    cv_coherence,
    embedding_coherence,
    npmi_coherence,
    top_columns,
    topic_diversity,
)
from partsong.methods.fedlda import FederatedLDA
from partsong.methods.fednmf import SERVER_RATE
from partsong.methods.privacy_request import build_secure_sum
from partsong.privacy.exposure import PartyExposure, Support, worst_party
from partsong.reporting.topic_page import TopicPage, build_facts, render_topics, write_topic_page
from partsong.topics import COHERENCES, TOP
from partsong.topics.agreement.protocol import Agreement
from partsong.topics.documents import as_documents
from partsong.topics.fitting import (
    FEDERATED_METHODS,
    POOLED_METHODS,
    SGD_OPTIONS,
    TopicRun,
    Topics,
    count_cooccurrence,
    is_mixture,
    learn,
    require_device,
    require_method,
    require_server,
    require_words,
    rounds_for,
    topic_errors,
    topic_program,
    weighting_of,
    without_empty,
)
from partsong.topics.persistence import fill_with_topics, save_fitted_topics
from partsong.topics.shared_vocabulary import (
    AGREE,
    FEWEST_MASKED,
    HASH,
    LONGEST,
    Prepared,
    VocabularyConfig,
    prepare,
    vocabulary_config,
)
from partsong.topics.tokenizer import Words
from partsong.topics.vocabulary import (
    TextVectorizer,
    UnknownWordsWarning,
    Vocabulary,
    rows_as_matrix,
    texts_by_party,
    word_options,
)
from partsong.training.loop import HistoryRow, StoppingRule, progress


@dataclass(frozen=True, slots=True)
class Plan:
    """The checked parameters of a model."""

    stop: StoppingRule
    words: Words
    rule: VocabularyConfig
    seed: int
    weighting: str
    program: Any
    dtype: Any


class TopicEstimator(BaseEstimator, ABC):  # type: ignore[misc]
    """Base class of both topic models: parameters, fitting, and the methods of a fitted model."""

    _methods: ClassVar[tuple[str, ...]]
    _word_options: ClassVar[tuple[str, ...]]
    _least_documents: ClassVar[int]

    vectorizer_: TextVectorizer
    solver_: RowSolver
    components_: np.ndarray
    topic_shares_: np.ndarray | None
    coherence_: np.ndarray | None
    seed_: int
    n_iter_: int | None
    n_topics_: int

    def _store(self, arguments: Mapping[str, Any]) -> None:
        """Store constructor arguments under their own names, as scikit-learn expects."""
        for name in self._get_param_names():
            setattr(self, name, arguments[name])

    @abstractmethod
    def _texts(self, texts: Any) -> dict[str, list[str]]:
        """Return checked documents by party."""

    @abstractmethod
    def _most_rounds(self) -> int | None: ...

    def _source(self) -> Any:
        return self.vocabulary

    def check_settings(self) -> Plan:
        """Check all parameters that can be checked without texts."""
        require_method(self.method, self._methods)
        require_verbosity(self.verbose)
        asked = {name: getattr(self, name) for name in self._word_options}
        plan = Plan(
            stop=stop_of(self.tol, self.time_budget),
            words=word_options(self.words, self.language, self.stop_words),
            rule=vocabulary_config(self._source(), asked, self._least_documents),
            seed=whole_seed(self.random_state),
            weighting=weighting_of(self.weighting, self.method),
            program=topic_program(self.method, self.n_topics, self._descent(), self._methods),
            dtype=precision_of(self.dtype),
        )
        require_device(self.device, plan.program)
        return plan

    def _descent(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SGD_OPTIONS}

    def _schedule(self, program: Any, parties: list[str], rounds: int, seed: int) -> tuple[Any, Reduction]:
        """Return absences by round, and the reduction."""
        return None, PlainReduction()

    def _fit(self, texts: Any) -> tuple[Program, Prepared]:
        """Check parameters, prepare words and rows, fit, and store the results."""
        plan = self.check_settings()
        program, seed = plan.program, plan.seed
        parties, most = self._texts(texts), self._most_rounds()
        rounds = rounds_for(self.method) if most is None else int(most)
        absent, reduction = self._schedule(program, list(parties), rounds, seed)
        with topic_errors():
            prepared = prepare(plan.rule, parties, plan.words, seed, plan.weighting)
        require_words(program, prepared.weighing.vocabulary.n_columns)
        course = TopicRun(rounds, seed, plan.stop, absent, reduction, device=self.device, weighting=plan.weighting)
        label = f"topics of {format_count(sum(map(len, parties.values())), 'text')}"
        with progress(self.verbose, rounds, self.time_budget, label) as bar:
            found = learn(program, prepared.rows, course, plan.dtype, bar)
        self._keep(found, prepared, program.solver, seed)
        return program, prepared

    def topics(self, n: int = TOP) -> list[list[str]]:
        """Return the n strongest words of each topic, strongest first; the largest topic first, if sizes are known.

        Words with weight zero are not listed. For hashed words, column numbers are returned.
        """
        check_is_fitted(self, "components_")
        names = self.vectorizer_.names
        return [[names[column] for column in topic] for topic in top_columns(self.components_, whole_number("n", n))]

    def diversity(self, n: int = TOP) -> float:
        """Return distinct words over all words of the topics: 1/k if all topics are equal, 1 if no word is shared."""
        return topic_diversity(self.topics(n))

    def transform(self, texts: Any) -> np.ndarray:
        """Return weights of texts (n × k): a non-negative least squares fit, or for LDA shares that sum to one.

        All weights are zero for a text without a word of the vocabulary.
        """
        check_is_fitted(self, "components_")
        counted = self.vectorizer_.counted(as_documents(texts))
        matrix = rows_as_matrix(self.vectorizer_.weighed(counted).rows, self.components_.dtype)
        with runtime.limit_kernel_threads(runtime.available_threads()):
            W = self.solver_.solve_rows(matrix, np.ascontiguousarray(self.components_.T))
        return without_empty(W, counted)

    def coherence(self, kind: str = "npmi", texts: Any = None, *, n: int = TOP, vectors: Any = None) -> Coherence:
        """Return the coherence of the n strongest words of each topic: `.mean`, and `.topics` for each.

        "npmi" and "c_v" use co-occurrences in `texts` (in the same form as for `fit`), or by default in the texts of
        the fit (where C_v uses each text as one window). "vectors" uses cosines of word `vectors`, a path or a mapping.
        """
        by_party = None if texts is None else self._texts(texts)
        return self._judged(kind, self._rows(kind, by_party), n, vectors)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """Return an HTML page with a map of topics, their words, sizes and coherence, or write it to a path.

        The page contains no documents and loads nothing from the network.
        """
        check_is_fitted(self, "components_")
        counted = {"documents": vars(self)["n_documents_"]} if "n_documents_" in vars(self) else {}
        facts = build_facts(self.settings_, words=self.components_.shape[1], **counted) | {"seed": str(self.seed_)}
        names = tuple(self.vectorizer_.names)
        page = TopicPage(self.components_, names, self.topic_shares_, self.coherence_, facts)
        if path is None:
            return str(render_topics(page))
        write_topic_page(path, page)
        return None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save topics, vocabulary, word options, document frequencies, shares, coherence and settings.

        Texts, document weights and party names are not saved.
        """
        check_is_fitted(self, "components_")
        save_fitted_topics(self, path, self.settings_)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, words: Words | None = None) -> Self:
        """Load a topic model of either class, ready to show and to transform.

        `words` is needed only if the model was fitted with a custom pattern.
        """
        model = cls()
        settings = fill_with_topics(model, path, words)
        known = {"method": settings.get("method")} if settings.get("method") in cls._methods else {}
        return model.set_params(n_topics=model.n_topics_, **known)

    @property
    def vocabulary_(self) -> list[str]:
        """The words of the columns of `components_`; not available for hashed words."""
        check_is_fitted(self, "components_")
        columns = self.vectorizer_.vocabulary
        if not isinstance(columns, Vocabulary):
            raise AttributeError("Words of a hashed vocabulary are unknown: a column may represent several words.")
        return list(columns.words)

    @property
    def settings_(self) -> dict[str, Any]:
        """Settings of the fit as plain values; those of the file for a loaded model."""
        check_is_fitted(self, "components_")
        origin = vars(self).get("_provenance")
        return dict(self._fit_settings() if origin is None else origin.settings)

    @abstractmethod
    def _fit_settings(self) -> dict[str, Any]: ...

    def _judged(self, kind: str, rows: Mapping[str, Any] | None, n: int, vectors: Any) -> Coherence:
        """Compute a coherence from rows of texts by party, or from the counts of the fit."""
        check_is_fitted(self, "components_")
        if kind not in COHERENCES:
            raise ParameterError(f"kind must be one of {', '.join(COHERENCES)}; got {kind!r}.", parameter="kind")
        if kind == "vectors":
            if vectors is None:
                raise ParameterError(
                    'kind="vectors" needs word vectors. Pass vectors=, a path or a mapping.', parameter="vectors"
                )
            return embedding_coherence(self.topics(n), vectors)
        counts: Cooccurrence | None = vars(self).get("_together")
        if rows is not None:
            counts = count_cooccurrence(self.components_, rows, self.seed_, whole_number("n", n))
        elif whole_number("n", n) > TOP:
            raise ParameterError(
                f"A fit counts only the {TOP} strongest words of each topic; got n={n}. Pass texts=.",
                parameter="n",
            )
        if counts is None:
            raise DataError(
                "Co-occurrences are unknown: they are not in model files, and not counted with counts_words=False or "
                "for topics of one word. Pass texts=."
            )
        return (npmi_coherence if kind == "npmi" else cv_coherence)(top_columns(self.components_, n), counts)

    def _rows(self, kind: str, texts: Mapping[str, list[str]] | None) -> dict[str, Any] | None:
        """Rows of documents to count in, or windows over them for C_v."""
        check_is_fitted(self, "components_")
        if texts is None or kind == "vectors":
            return None
        see = self.vectorizer_.windows if kind == "c_v" else lambda own: self.vectorizer_.counted(own).rows
        return {name: see(own) for name, own in texts.items()}

    def _keep(self, found: Topics, prepared: Prepared, solver: RowSolver, seed: int) -> None:
        self.__dict__.pop("_provenance", None)
        self.vectorizer_ = prepared.weighing
        self.solver_ = solver if is_mixture(solver) else solver_from_settings(penalties_to_dict(solver))
        self.components_, self.topic_shares_ = found.H, np.asarray(found.shares, np.float64)
        self.n_topics_, self.seed_ = len(found.H), seed
        self.n_documents_ = sum(len(own.is_empty) for own in prepared.counted.values())
        self.relative_error_ = found.relative_error
        self.n_iter_, self.outcome_ = found.n_rounds, Outcome(found.outcome)
        self.history_: list[HistoryRow] = list(found.history)
        rows = {name: own.rows for name, own in prepared.counted.items()}
        self._together = count_cooccurrence(found.H, rows, seed) if self.counts_words else None
        self.coherence_ = self._npmi()

    def _npmi(self) -> np.ndarray | None:
        """NPMI of each topic, if words were counted and there are pairs."""
        if self._together is None:
            return None
        try:
            return np.array(npmi_coherence(top_columns(self.components_, TOP), self._together).topics)
        except DataError:
            return None


class TopicModel(ClassNamePrefixFeaturesOutMixin, TransformerMixin, TopicEstimator):  # type: ignore[misc]
    """Topic model of texts: X ≈ W H, with a row of X for each text and a row of H for each topic.

    method="nmf" factorizes tf-idf by alternating sweeps; it is fast, and was best on short titles
    (docs/guide/topics.md). "nmf-sgd" takes projected gradient steps on batches of documents; "nmf-sgd-mi" also
    maximizes the mutual information of weights and documents (Si et al., 2022); "lda" is latent Dirichlet allocation by
    variational Bayes. Each equals its federated counterpart with one party. A Program can be passed instead of a name.

    Parameters
    ----------
    n_topics : int
        Number of topics k, at most the number of words. None: that of a Program.
    method : {"nmf", "nmf-sgd", "nmf-sgd-mi", "lda"} or Program
        How topics are fitted.
    weighting : {"tfidf", "counts"} or None
        Weight of a word in a text: tf-idf with rows of norm 1, or counts. None: tf-idf, and counts for LDA.
    vocabulary : None, "hash", path, list of words or Vocabulary
        None: words of the texts, pruned by min_documents, max_df and max_words. A path: a file with one word per line.
        "hash": max_words columns (10 000 by default) by hash.
    min_documents, max_df, max_words : int or None, float, int or None
        Keep words in at least min_documents documents (None: 2) and at most a share max_df of them, then the max_words
        most frequent. Refused with a given vocabulary, which is used unchanged.
    language, stop_words, words : str, collection of str, Words or None
        Language of the stop word list ("none": no list) and further stop words; or all word options as a Words value.
    max_iter : int or None
        Maximum number of iterations. None: 200 for "nmf", 50 for all others (rounds of `epochs` for SGD methods).
    tol, time_budget, random_state, verbose, dtype :
        As in `NMF`. "nmf" and "lda" stop by tol; SGD methods run all iterations. dtype is float64 by default.
    epochs, batch, rate, strength : int, int, float, float
        For SGD methods: passes over the documents per iteration, documents per step, step size, and λ of "nmf-sgd-mi".
    critic, mi_gradient, critic_rate : {"concat", "separable"}, {"dv", "js"}, float or None
        For "nmf-sgd-mi": the critic that distinguishes weights of documents, its gradient estimator, and its step size
        (None: `rate`). With the defaults, which follow the paper, it hardly learns; with "js" and 0.2 to 0.5 it does.
    warm_start_weights : bool
        For SGD methods: fit the weights to the topics before each iteration but the first.
    counts_words : bool
        Whether the fit also counts co-occurrences of the strongest words, for `coherence`.
    device : str or None
        For SGD methods: compute with torch on this device, for example "cuda" or "cpu". None: NumPy and compiled loops
        without torch; the topics are the same up to rounding.

    Attributes
    ----------
    components_ : array (k, V)
        H, the largest topic first; rows have norm 1, or for LDA are word probabilities.
    topic_shares_ : array (k,) or None
        Shares of the explained data, for LDA of the documents. None: unknown, as in results of a federation.
    coherence_ : array (k,) or None
        NPMI of each topic's ten strongest words.
    vocabulary_, vectorizer_, n_topics_, n_documents_, relative_error_, history_, n_iter_, outcome_, seed_ :
        Words of the columns; the conversion of texts to rows; sizes; the course of the fit, with the perplexity as the
        objective of LDA.
    empty_documents_ : array of bool
        Texts without a word of the vocabulary; they are kept with weights of zero.
    """

    _methods = POOLED_METHODS
    _word_options = ("min_documents", "max_words", "max_df")
    _least_documents = 2

    @refuse_old_names
    def __init__(
        self,
        n_topics: int | None = None,
        *,
        method: str | Program = "nmf",
        weighting: str | None = None,
        vocabulary: Any = None,
        min_documents: int | None = None,
        max_df: float = 1.0,
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
        warm_start_weights: bool = False,
        counts_words: bool = True,
        device: str | None = None,
    ) -> None:
        self._store(locals())

    def fit(self, texts: Any, y: Any = None) -> TopicModel:
        """Fit topics to a list of texts; None and NaN are empty texts."""
        _, prepared = self._fit(texts)
        self.history_ = [row._replace(bytes_up=0, bytes_down=0) for row in self.history_]
        self.empty_documents_ = np.asarray(prepared.counted["all"].is_empty)
        return self

    def fit_transform(self, texts: Any, y: Any = None) -> np.ndarray:
        """Fit topics and return the weights of the texts, as from `transform`."""
        documents = as_documents(texts)
        self.fit(documents)
        return super().transform(documents)

    def transform(self, texts: Any) -> np.ndarray:
        """Return weights of texts (n × k): a non-negative least squares fit, or for LDA shares that sum to one.

        All weights are zero for a text without a word of the vocabulary. `set_output` selects a data frame instead.
        """
        return super().transform(texts)

    @property
    def _n_features_out(self) -> int:
        return int(self.components_.shape[0])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string, tags.input_tags.one_d_array, tags.input_tags.two_d_array = True, True, False
        tags.transformer_tags.preserves_dtype = []
        return tags

    def check_settings(self) -> Plan:
        if self.max_iter is not None:
            whole_number("max_iter", self.max_iter)
        return super().check_settings()

    def _texts(self, texts: Any) -> dict[str, list[str]]:
        return {"all": as_documents(texts)}

    def _most_rounds(self) -> int | None:
        return self.max_iter

    def _source(self) -> Any:
        if isinstance(self.vocabulary, str) and self.vocabulary == AGREE:
            raise ParameterError(
                'vocabulary="agree" needs several parties. Use another vocabulary for pooled texts.',
                parameter="vocabulary",
            )
        return AGREE if self.vocabulary is None else self.vocabulary

    def _fit_settings(self) -> dict[str, Any]:
        named = self.method if isinstance(self.method, str) else type(self.method).__name__
        return {"method": named, "weighting": self.vectorizer_.weighting, "tol": float(self.tol)}


class FederatedTopicModel(TopicEstimator):
    """Federated topic model: X_p ≈ W_p H for parties p; texts and weights W_p stay at the parties.

    First the parties agree on words: those in at least `min_documents` documents at each of at least `min_parties`
    parties. A word at fewer parties is revealed with a probability below 1e-6 (`agreement_`). Then they fit topics:
    method="exact" sums WᵀW and WᵀX, and gives the result of pooled texts; "fnmf" aligns local models; "fednmf" averages
    (or takes adaptive steps) after local epochs; "fednmf-mi" also maximizes the mutual information of weights and
    documents (Si et al., 2022); "fedlda" sums the expected counts of LDA. A Program can be passed instead of a name.
    Finally they sum co-occurrences of the strongest words of each topic, for `coherence`.

    Counts of words (agreement, document frequencies, coherence) use secure sums for three or more parties, which needs
    the extra "privacy". This is a simulation: all parties run in this process, and their keys come from random_state.

    Parameters
    ----------
    n_topics, weighting, max_df, max_words, language, stop_words, words, tol, time_budget, random_state, verbose, \
dtype, epochs, batch, rate, strength, critic, mi_gradient, critic_rate, warm_start_weights, counts_words, device :
        As in `TopicModel`, with "fednmf-mi" instead of "nmf-sgd-mi". "exact", "fnmf" and, with full participation,
        "fedlda" stop by tol. A critic is sent like the topics; without `secure_aggregation` it reveals exactly which
        words a party has (docs/reference/exposure.md).
    method : {"exact", "fnmf", "fednmf", "fednmf-mi", "fedlda"} or Program
        The federated method.
    server, server_rate : {"average", "adagrad", "yogi", "adam"}, float
        For "fednmf" and "fednmf-mi": the server update and its rate; "average" has no rate.
    participation : float in (0, 1]
        Share C of parties drawn for each round; below 1 only for "fednmf", "fednmf-mi" and "fedlda".
    rounds : int or None
        Maximum number of rounds. None: 200 for "exact" and "fnmf", 50 for all others.
    vocabulary : "agree", "hash", path, list of words or Vocabulary
        Source of the words. Hashed columns have no words to show, and the model contains their key.
    min_documents, min_parties : int, int or None
        The rule of "agree"; None: two parties. A single party uses its words in min_documents documents. Refused with a
        given vocabulary, which is used unchanged.
    max_word_bytes : int
        For "agree": words with more UTF-8 bytes are not sent and not part of the model. A letter outside a to z takes
        two bytes or more. A larger value costs bytes for each word that is not of up to eleven letters from a to z.
    secure_aggregation : bool or SecureSum
        Whether the uploads of the rounds use secure aggregation, so that only their sums are visible (three or more
        parties in each round).

    Attributes
    ----------
    components_, topic_shares_, coherence_, vocabulary_, vectorizer_, n_topics_, n_documents_, relative_error_, \
history_, n_iter_, outcome_, seed_ :
        As in `TopicModel`, over the texts of all parties; `history_` has bytes_up (all parties) and bytes_down (each).
    agreement_ : Agreement or None
        The agreement on words: rule, probability of a false pass, bytes.
    exposure_, exposures_ :
        As in `FederatedNMF`. Most words are in few documents, so exact sums of texts have exposure "rows".
    parties_ : list of str
    empty_documents_ : dict of arrays of bool
        Texts without a word of the vocabulary, by party. They are kept with weights of zero. A party with only empty
        texts takes part with rows of zeros, and an UnknownWordsWarning names it.
    """

    _methods = FEDERATED_METHODS
    _word_options = ("min_documents", "min_parties", "max_words", "max_df", "max_word_bytes")
    _least_documents = 1

    @refuse_old_names
    def __init__(
        self,
        n_topics: int | None = None,
        *,
        method: str | Program = "exact",
        server: str = "average",
        server_rate: float = SERVER_RATE,
        participation: float = 1.0,
        rounds: int | None = None,
        vocabulary: Any = AGREE,
        min_documents: int = 1,
        min_parties: int | None = None,
        max_word_bytes: int = LONGEST,
        max_df: float = 1.0,
        max_words: int | None = None,
        weighting: str | None = None,
        secure_aggregation: Any = False,
        language: str = "english",
        stop_words: Iterable[str] = (),
        words: Words | None = None,
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
        warm_start_weights: bool = False,
        counts_words: bool = True,
        device: str | None = None,
    ) -> None:
        self._store(locals())

    def fit(self, texts: Any, y: Any = None) -> FederatedTopicModel:
        """Fit topics to a list with one list of texts per party, or a mapping of names to such lists."""
        program, prepared = self._fit(texts)
        self._keep_parties(prepared)
        rows = prepared.rows
        self.exposures_ = {
            name: PartyExposure.of(name, program, len(self.history_), Support.of(own.rows), len(rows))
            for name, own in rows.items()
        }
        self.exposure_ = worst_party(self.exposures_.values()).level
        return self

    def check_settings(self) -> Plan:
        require_server(self.method, self.server, self.server_rate)
        if self.rounds is not None:
            whole_number("rounds", self.rounds)
        if self.secure_aggregation and isinstance(self.method, str) and self.method == "fnmf":
            raise ParameterError(
                'method="fnmf" compares single models and cannot use secure aggregation. Use method="exact".',
                parameter="secure_aggregation",
            )
        if not 0 < real_number("participation", self.participation) <= 1:
            raise ParameterError(
                f"participation must be above 0 and at most 1; got {self.participation!r}.", parameter="participation"
            )
        return super().check_settings()

    def _texts(self, texts: Any) -> dict[str, list[str]]:
        return texts_by_party(texts)

    def _most_rounds(self) -> int | None:
        return self.rounds

    def _descent(self) -> dict[str, Any]:
        return super()._descent() | {"server": self.server, "server_rate": self.server_rate}

    def _schedule(self, program: Any, parties: list[str], rounds: int, seed: int) -> tuple[Any, Reduction]:
        absent = sample_participants(parties, rounds, float(self.participation), seed)
        reduction = self._reduction(len(parties), absent)
        self._require_everyone(program, bool(absent))
        return absent, reduction

    def _reduction(self, n_parties: int, absent: Any) -> Reduction:
        if not self.secure_aggregation:
            return PlainReduction()
        present = n_parties - max((len(away) for away in absent.values()), default=0)
        if present < FEWEST_MASKED:
            raise ParameterError(
                f"Secure aggregation needs at least {FEWEST_MASKED} parties in every round; there are {present}. With "
                "two, each would know the other's upload. Raise participation, or use secure_aggregation=False.",
                parameter="secure_aggregation",
            )
        masks: Reduction = (
            build_secure_sum(None, n_parties) if self.secure_aggregation is True else self.secure_aggregation
        )
        return masks

    def _require_everyone(self, program: Any, is_sampled: bool) -> None:
        """Refuse sampling of parties if partial sums are meaningless or reveal the words of single parties."""
        if is_sampled and program.traits.full_participation:
            raise ParameterError(
                f"participation={self.participation} is for fednmf, fednmf-mi and fedlda. Use one of these, or "
                "participation=1.",
                parameter="participation",
            )
        if is_sampled and self.secure_aggregation and isinstance(program, FederatedLDA):
            raise ParameterError(
                "Sums of fedlda over different parties differ by the words of single parties, so secure aggregation "
                "would hide nothing. Use participation=1, or another method.",
                parameter="participation",
            )

    def _keep_parties(self, prepared: Prepared) -> None:
        self.agreement_: Agreement | None = prepared.agreement
        self.parties_ = list(prepared.counted)
        self.n_parties_ = len(self.parties_)
        self.empty_documents_ = {name: np.asarray(own.is_empty) for name, own in prepared.counted.items()}
        for name, is_empty in self.empty_documents_.items():
            if is_empty.all():
                warnings.warn(
                    f"Party {name!r}: none of {format_count(len(is_empty), 'document')} has a word of the "
                    "vocabulary. It took part "
                    "with rows of zeros. Check its language and the word options.",
                    UnknownWordsWarning,
                    stacklevel=3,
                )

    def _fit_settings(self) -> dict[str, Any]:
        named = self.method if isinstance(self.method, str) else type(self.method).__name__
        is_named = isinstance(self.vocabulary, str) and self.vocabulary in (AGREE, HASH)
        settings: dict[str, Any] = {
            "method": named,
            "parties": self.n_parties_,
            "participation": float(self.participation),
            "weighting": self.vectorizer_.weighting,
            "vocabulary": self.vocabulary if is_named else "given",
            "secure_aggregation": bool(self.secure_aggregation),
            "tol": float(self.tol),
        }
        return settings | ({"server": self.server} if named in ("fednmf", "fednmf-mi") else {})
