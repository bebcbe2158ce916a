"""`partsong.TopicModel` and `partsong.FederatedTopicModel`: topics of texts, pooled or spread over parties."""

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
from partsong.core.renamed import refuse_old_names
from partsong.engines.rounds import sample_participants
from partsong.errors import DataError, ParameterError
from partsong.estimators.persistence import penalties_to_dict
from partsong.estimators.validation import precision_of, require_verbosity, solver_from_settings, stop_of, whole_seed
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
from partsong.reporting.topic_page import TopicPage, facts_of, render_topics, write_topic_page
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
    """What the parameters of a model ask for."""

    stop: StoppingRule
    words: Words
    rule: VocabularyConfig
    seed: int
    weighting: str
    program: Any
    dtype: Any


class TopicEstimator(BaseEstimator, ABC):  # type: ignore[misc]
    """What both models of topics share: parameters, the way they are fitted, and what a fitted model can do."""

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
        """Keep the arguments of the constructor under their own names, as scikit-learn expects."""
        for name in self._get_param_names():
            setattr(self, name, arguments[name])

    @abstractmethod
    def _texts(self, texts: Any) -> dict[str, list[str]]:
        """Documents by party, checked."""

    @abstractmethod
    def _most_rounds(self) -> int | None: ...

    def _source(self) -> Any:
        return self.vocabulary

    def check_settings(self) -> Plan:
        """Refuse all that can be refused without texts; return what is asked for."""
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
        """Who is absent from which round, and how uploads are summed."""
        return None, PlainReduction()

    def _fit(self, texts: Any) -> tuple[Program, Prepared]:
        """Check the settings, prepare words and rows, learn, and keep what was found."""
        plan = self.check_settings()
        program, seed = plan.program, plan.seed
        parties, most = self._texts(texts), self._most_rounds()
        rounds = rounds_for(self.method) if most is None else int(most)
        absent, reduction = self._schedule(program, list(parties), rounds, seed)
        with topic_errors():
            prepared = prepare(plan.rule, parties, plan.words, seed, plan.weighting)
        require_words(program, prepared.weighing.vocabulary.n_columns)
        course = TopicRun(rounds, seed, plan.stop, absent, reduction, device=self.device, weighting=plan.weighting)
        label = f"topics of {sum(map(len, parties.values()))} texts"
        with progress(self.verbose, rounds, self.time_budget, label) as bar:
            found = learn(program, prepared.rows, course, plan.dtype, bar)
        self._keep(found, prepared, program.solver, seed)
        return program, prepared

    def topics(self, n: int = TOP) -> list[list[str]]:
        """The n strongest words of each topic, strongest first; the largest topic first, where sizes are known.

        Words that a topic does not have at all are not listed. Of hashed words the numbers of columns are told.
        """
        check_is_fitted(self, "components_")
        names = self.vectorizer_.names
        return [[names[column] for column in topic] for topic in top_columns(self.components_, whole_number("n", n))]

    def diversity(self, n: int = TOP) -> float:
        """Distinct words over all words of the topics: 1/k where all are the same, 1 where none shares a word."""
        return topic_diversity(self.topics(n))

    def transform(self, texts: Any) -> np.ndarray:
        """Weights of texts (n × k): a non-negative least squares fit, or for LDA shares that add up to one.

        Of a text without a word of the vocabulary all weights are zero.
        """
        check_is_fitted(self, "components_")
        counted = self.vectorizer_.counted(as_documents(texts))
        matrix = rows_as_matrix(self.vectorizer_.weighed(counted).rows, self.components_.dtype)
        with runtime.limit_kernel_threads(runtime.available_threads()):
            W = self.solver_.solve_rows(matrix, np.ascontiguousarray(self.components_.T))
        return without_empty(W, counted)

    def coherence(self, kind: str = "npmi", texts: Any = None, *, n: int = TOP, vectors: Any = None) -> Coherence:
        """Do the n strongest words of each topic belong together: `.mean`, and `.topics` for each.

        "npmi" and "c_v" by how often they occur together in `texts`, given and summed as at the fit, or else in those
        of the fit (where C_v takes each for one window); "vectors" by the cosines of word vectors, a path or a mapping.
        """
        by_party = None if texts is None else self._texts(texts)
        return self._judged(kind, self._rows(kind, by_party), n, vectors)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """A page: a map of topics, their words, sizes and coherence; without documents, and it loads nothing.

        It is written to a path, or returned as text without one.
        """
        check_is_fitted(self, "components_")
        counted = {"documents": vars(self)["n_documents_"]} if "n_documents_" in vars(self) else {}
        facts = facts_of(self.settings_, words=self.components_.shape[1], **counted) | {"seed": str(self.seed_)}
        names = tuple(self.vectorizer_.names)
        page = TopicPage(self.components_, names, self.topic_shares_, self.coherence_, facts)
        if path is None:
            return str(render_topics(page))
        write_topic_page(path, page)
        return None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write topics, vocabulary, options of words, document frequencies, shares, coherence and settings; never a
        text, weights of documents, or names of parties.
        """
        check_is_fitted(self, "components_")
        save_fitted_topics(self, path, self.settings_)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, words: Words | None = None) -> Self:
        """A model from the file of either kind, ready to show and to transform.

        `words` is needed only where it was fitted with a pattern of its own.
        """
        model = cls()
        settings = fill_with_topics(model, path, words)
        told = {"method": settings.get("method")} if settings.get("method") in cls._methods else {}
        return model.set_params(n_topics=model.n_topics_, **told)

    @property
    def vocabulary_(self) -> list[str]:
        """The words of the columns of `components_`; hashed ones have none."""
        check_is_fitted(self, "components_")
        columns = self.vectorizer_.vocabulary
        if not isinstance(columns, Vocabulary):
            raise AttributeError("Words of a hashed vocabulary are not known: a column may stand for several.")
        return list(columns.words)

    @property
    def settings_(self) -> dict[str, Any]:
        """What there is to say of the fit, in plain values: that of the file, where the model comes from one."""
        check_is_fitted(self, "components_")
        origin = vars(self).get("_provenance")
        return dict(self._told() if origin is None else origin.settings)

    @abstractmethod
    def _told(self) -> dict[str, Any]: ...

    def _judged(self, kind: str, rows: Mapping[str, Any] | None, n: int, vectors: Any) -> Coherence:
        """A coherence by rows of texts of each party, or without them by what was counted at the fit."""
        check_is_fitted(self, "components_")
        if kind not in COHERENCES:
            raise ParameterError(f"kind is one of {', '.join(COHERENCES)}; got {kind!r}.", parameter="kind")
        if kind == "vectors":
            if vectors is None:
                raise ParameterError(
                    'kind="vectors" needs vectors=…, a table of word vectors: a path or a mapping.', parameter="vectors"
                )
            return embedding_coherence(self.topics(n), vectors)
        counts: Cooccurrence | None = vars(self).get("_together")
        if rows is not None:
            counts = count_cooccurrence(self.components_, rows, self.seed_, whole_number("n", n))
        elif whole_number("n", n) > TOP:
            raise ParameterError(
                f"A fit counts the {TOP} strongest words of each topic; got n={n}. Give the texts: coherence(texts=…).",
                parameter="n",
            )
        if counts is None:
            raise DataError(
                "Which words occur together is not known: models from files do not tell, nor fits with "
                "counts_words=False, nor topics of one word. Give the texts: coherence(texts=…)."
            )
        return (npmi_coherence if kind == "npmi" else cv_coherence)(top_columns(self.components_, n), counts)

    def _rows(self, kind: str, texts: Mapping[str, list[str]] | None) -> dict[str, Any] | None:
        """Documents to count in, or windows over them for C_v."""
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
        """NPMI of each topic, where words were counted and some of them are in two."""
        if self._together is None:
            return None
        try:
            return np.array(npmi_coherence(top_columns(self.components_, TOP), self._together).topics)
        except DataError:
            return None


class TopicModel(ClassNamePrefixFeaturesOutMixin, TransformerMixin, TopicEstimator):  # type: ignore[misc]
    """Topics of texts: X ≈ W H, with a row of X for each text and a row of H for each topic.

    method="nmf" factorizes tf-idf by alternating sweeps; it is fast, and was best on short titles
    (docs/guide/topics.md). "nmf-sgd" takes projected steps on batches of documents, "nmf-sgd-mi" as well while weights
    keep mutual information with the documents (Si et al., 2022), and "lda" is latent Dirichlet allocation by
    variational Bayes. Each is what its federated counterpart does with one party. A Program may be given instead of a
    name.

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
        None takes the words of the texts that are left by min_documents, max_df and max_words; a path has one word
        per line; "hash" gives words columns by hash, max_words of them (10 000).
    min_documents, max_df, max_words :
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
    warm_start_weights : bool
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
    vocabulary_, vectorizer_, n_topics_, n_documents_, relative_error_, history_, n_iter_, outcome_, seed_ :
        Words of the columns; texts to rows; sizes; how the fit went, with perplexity as the objective of LDA.
    empty_documents_ : array of bool
        Which texts have no word of the vocabulary; they are kept, and their weights are zero.
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
        """Learn topics from a list of texts; None and NaN are texts without words."""
        _, prepared = self._fit(texts)
        self.history_ = [row._replace(bytes_up=0, bytes_down=0) for row in self.history_]
        self.empty_documents_ = np.asarray(prepared.counted["all"].is_empty)
        return self

    def fit_transform(self, texts: Any, y: Any = None) -> np.ndarray:
        """Learn topics and return the weights of the texts, as `transform` gives them."""
        documents = as_documents(texts)
        self.fit(documents)
        return super().transform(documents)

    def transform(self, texts: Any) -> np.ndarray:
        """Weights of texts (n × k): a non-negative least squares fit, or for LDA shares that add up to one.

        Of a text without a word of the vocabulary all weights are zero. `set_output` chooses a data frame instead.
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
                'vocabulary="agree" is between parties. Texts of one place: leave it out.', parameter="vocabulary"
            )
        return AGREE if self.vocabulary is None else self.vocabulary

    def _told(self) -> dict[str, Any]:
        named = self.method if isinstance(self.method, str) else type(self.method).__name__
        return {"method": named, "weighting": self.vectorizer_.weighting, "tol": float(self.tol)}


class FederatedTopicModel(TopicEstimator):
    """Topics that parties p learn together, X_p ≈ W_p H, while texts and weights W_p stay where they are.

    First the parties agree on words: those in at least `min_documents` documents at each of at least `min_parties`
    parties. A word held by fewer never leaves them, but with a probability below 1e-6 (`agreement_`). Then they learn:
    method="exact" sums WᵀW and WᵀX, and gives what one place with all texts would; "fnmf" begins with local models that
    are matched; "fednmf" averages (or steps adaptively) after epochs at the parties, "fednmf-mi" as well while weights
    keep mutual information with the documents (Si et al., 2022); "fedlda" sums expected counts of LDA. A Program may be
    given instead of a name. At last they sum how often the strongest words of a topic occur together, for `coherence`.

    Counts of words (agreement, document frequencies, coherence) are masked from three parties on, which takes the extra
    "privacy". This is a simulation: all parties run in this process, and their keys come from random_state.

    Parameters
    ----------
    n_topics, weighting, max_df, max_words, language, stop_words, words, tol, time_budget, random_state, verbose, \
dtype, epochs, batch, rate, strength, critic, mi_gradient, critic_rate, warm_start_weights, counts_words, device :
        As in `TopicModel`, where "nmf-sgd-mi" is "fednmf-mi" here. "exact", "fnmf" and, with everybody in each round,
        "fedlda" stop by tol. A critic is sent as the topics are: in the open it tells each party's words to the letter
        (docs/reference/exposure.md), and `secure_aggregation` hides single ones.
    method : {"exact", "fnmf", "fednmf", "fednmf-mi", "fedlda"} or Program
        How the parties work together.
    server, server_rate : {"average", "adagrad", "yogi", "adam"}, float
        "fednmf", "fednmf-mi": how the average of the parties moves the model, and how far; "average" has no rate.
    participation : float in (0, 1]
        C, the share of parties that are drawn for each round; below 1 for "fednmf", "fednmf-mi" and "fedlda" only.
    rounds : int or None
        The most rounds: 200 for "exact" and "fnmf", 50 for all others.
    vocabulary : "agree", "hash", path, list of words or Vocabulary
        Where words come from. With hashes, columns have no words to show, and whoever has the model has their key.
    min_documents, min_parties : int, int or None
        The rule of "agree"; None is two parties. One party alone keeps its words in min_documents documents. Refused
        with a vocabulary, which is taken as it is.
    max_word_bytes : int
        Of "agree": words of more bytes of UTF-8 than this stay at their parties, and are no words of the model. A
        letter that is not plain takes two bytes or more. More costs bytes for each word that is not of up to eleven
        plain letters.
    secure_aggregation : bool or SecureSum
        Whether uploads of the rounds are masked as well, so that nobody sees a single one (three parties or more in
        each round).

    Attributes
    ----------
    components_, topic_shares_, coherence_, vocabulary_, vectorizer_, n_topics_, n_documents_, relative_error_, \
history_, n_iter_, outcome_, seed_ :
        As in `TopicModel`, over all parties' texts; `history_` tells bytes_up (all parties) and bytes_down (each).
    agreement_ : Agreement or None
        How the words were found: rule, probability of a false pass, bytes.
    exposure_, exposures_ :
        As in `FederatedNMF`. Most words are in few documents, so that exact sums of texts give "rows".
    parties_ : list of str
    empty_documents_ : dict of arrays of bool
        By party, which texts have no word of the vocabulary. They are kept, with weights of zero; a party of which all
        are empty takes part with rows of zeros, and an UnknownWordsWarning names it.
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
        """Learn topics from a list with one list of texts per party, or a mapping of names to such lists."""
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
                "fnmf compares single models of parties, which masks would hide. Take the method exact.",
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
                f"Masks take at least {FEWEST_MASKED} parties in every round, and there are {present}: each of two "
                "would know what the other has sent. Let more take part, or run without masks.",
                parameter="secure_aggregation",
            )
        masks: Reduction = (
            build_secure_sum(None, n_parties) if self.secure_aggregation is True else self.secure_aggregation
        )
        return masks

    def _require_everyone(self, program: Any, is_sampled: bool) -> None:
        """Refuse to draw parties where sums over some of them mean nothing, or tell each one's words."""
        if is_sampled and program.traits.full_participation:
            raise ParameterError(
                f"participation={self.participation} is for methods that can do with some of the parties in a round, "
                "fednmf, fednmf-mi and fedlda. Take one of these, or let all parties take part.",
                parameter="participation",
            )
        if is_sampled and self.secure_aggregation and isinstance(program, FederatedLDA):
            raise ParameterError(
                "Sums of fedlda over other parties each time differ by the words of single parties, and masks would "
                "hide nothing. Let all parties take part, or take another method.",
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
                    f"Party {name!r}: none of its {len(is_empty)} documents has a word of the vocabulary. It took part "
                    "with rows of zeros. Check its language and the options of words.",
                    UnknownWordsWarning,
                    stacklevel=3,
                )

    def _told(self) -> dict[str, Any]:
        named = self.method if isinstance(self.method, str) else type(self.method).__name__
        is_named = isinstance(self.vocabulary, str) and self.vocabulary in (AGREE, HASH)
        told: dict[str, Any] = {
            "method": named,
            "parties": self.n_parties_,
            "participation": float(self.participation),
            "weighting": self.vectorizer_.weighting,
            "vocabulary": self.vocabulary if is_named else "given",
            "secure_aggregation": bool(self.secure_aggregation),
            "tol": float(self.tol),
        }
        return told | ({"server": self.server} if named in ("fednmf", "fednmf-mi") else {})
