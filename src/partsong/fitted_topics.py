"""What a learned topic model can do, however it was learned."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from partsong import threads
from partsong.core import Outcome, RowSolver
from partsong.errors import DataError, ParameterError
from partsong.evaluate.coherence import Coherence, cv_coherence, embedding_coherence, npmi_coherence
from partsong.evaluate.cooccurrence import Cooccurrence
from partsong.evaluate.diversity import top_columns, topic_diversity
from partsong.evaluate.topic_page import TopicPage, facts_of, render_topics, write_topic_page
from partsong.running import HistoryRow
from partsong.saving import penalties_told
from partsong.settings import solver_told, whole_number
from partsong.text.documents import as_documents
from partsong.text.vocabulary import Vocabulary
from partsong.topic_fitting import Topics, counted_together, without_empty
from partsong.topic_methods import is_mixture
from partsong.topic_names import COHERENCES, TOP
from partsong.topic_saving import save_fitted_topics
from partsong.topic_vocabulary import Prepared
from partsong.topic_words import Weighing, matrix_of


class FittedTopics(ABC):
    """Topics of a model: their words, how coherent they are, weights of new texts, a file, a page."""

    weighing_: Weighing
    solver_: RowSolver
    components_: np.ndarray
    topic_shares_: np.ndarray | None
    coherence_: np.ndarray | None
    seed_: int
    n_iter_: int | None
    n_topics_: int

    def topics(self, n: int = TOP) -> list[list[str]]:
        """The n strongest words of each topic, strongest first; the largest topic first, where sizes are known.

        Words that a topic does not have at all are not listed. Of hashed words the numbers of columns are told.
        """
        check_is_fitted(self, "components_")
        names = self.weighing_.names
        return [[names[column] for column in topic] for topic in top_columns(self.components_, whole_number("n", n))]

    def diversity(self, n: int = TOP) -> float:
        """Distinct words over all words of the topics: 1/k where all are the same, 1 where none shares a word."""
        return topic_diversity(self.topics(n))

    def transform(self, texts: Any) -> np.ndarray:
        """Weights of texts (n × k): a non-negative least squares fit, or for LDA shares that add up to one.

        Of a text without a word of the vocabulary all weights are zero.
        """
        check_is_fitted(self, "components_")
        counted = self.weighing_.counted(as_documents(texts))
        matrix = matrix_of(self.weighing_.weighed(counted).rows, self.components_.dtype)
        with threads.kernels_on(threads.available()):
            W = self.solver_.solve_rows(matrix, np.ascontiguousarray(self.components_.T))
        return without_empty(W, counted)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """A page: a map of topics, their words, sizes and coherence; without documents, and it loads nothing.

        It is written to a path, or returned as text without one.
        """
        check_is_fitted(self, "components_")
        counted = {"documents": vars(self)["n_documents_"]} if "n_documents_" in vars(self) else {}
        facts = facts_of(self.settings_, words=self.components_.shape[1], **counted) | {"seed": str(self.seed_)}
        names = tuple(self.weighing_.names)
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

    @property
    def vocabulary_(self) -> list[str]:
        """The words of the columns of `components_`; hashed ones have none."""
        check_is_fitted(self, "components_")
        columns = self.weighing_.vocabulary
        if not isinstance(columns, Vocabulary):
            raise AttributeError("Words of a hashed vocabulary are not known: a column may stand for several.")
        return list(columns.words)

    @abstractmethod
    def _told(self) -> dict[str, Any]: ...

    @property
    def settings_(self) -> dict[str, Any]:
        """What there is to say of the fit, in plain values: that of the file, where the model comes from one."""
        check_is_fitted(self, "components_")
        origin = vars(self).get("_origin")
        return dict(self._told() if origin is None else origin.settings)

    def _judged(self, kind: str, rows: Mapping[str, Any] | None, n: int, vectors: Any) -> Coherence:
        """A coherence by rows of texts of each party, or without them by what was counted at the fit."""
        check_is_fitted(self, "components_")
        if kind not in COHERENCES:
            raise ParameterError(f"kind is one of {', '.join(COHERENCES)}; got {kind!r}.")
        if kind == "vectors":
            if vectors is None:
                raise ParameterError('kind="vectors" needs vectors=…, a table of word vectors: a path or a mapping.')
            return embedding_coherence(self.topics(n), vectors)
        counts: Cooccurrence | None = vars(self).get("_together")
        if rows is not None:
            counts = counted_together(self.components_, rows, self.seed_, whole_number("n", n))
        elif whole_number("n", n) > TOP:
            raise ParameterError(
                f"A fit counts the {TOP} strongest words of each topic; got n={n}. Give the texts: coherence(texts=…)."
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
        see = self.weighing_.windows if kind == "c_v" else lambda own: self.weighing_.counted(own).rows
        return {name: see(own) for name, own in texts.items()}

    def _keep(self, found: Topics, prepared: Prepared, solver: RowSolver, seed: int, counts_words: bool) -> None:
        vars(self).pop("_origin", None)
        self.weighing_ = prepared.weighing
        self.solver_ = solver if is_mixture(solver) else solver_told(penalties_told(solver))
        self.components_, self.topic_shares_ = found.H, np.asarray(found.shares, np.float64)
        self.n_topics_, self.seed_ = len(found.H), seed
        self.n_documents_ = sum(len(own.is_empty) for own in prepared.counted.values())
        self.relative_error_ = found.relative_error
        self.n_iter_, self.outcome_ = found.n_rounds, Outcome(found.outcome)
        self.history_: list[HistoryRow] = list(found.history)
        rows = {name: own.rows for name, own in prepared.counted.items()}
        self._together = counted_together(found.H, rows, seed) if counts_words else None
        self.coherence_ = self._npmi()

    def _npmi(self) -> np.ndarray | None:
        """NPMI of each topic, where words were counted and some of them are in two."""
        if self._together is None:
            return None
        try:
            return np.array(npmi_coherence(top_columns(self.components_, TOP), self._together).topics)
        except DataError:
            return None
