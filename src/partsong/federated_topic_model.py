"""`partsong.FederatedTopicModel`: topics of texts that parties do not pool; simulated in one process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator

from partsong.aggregate.reduction import InTheOpen
from partsong.core import Program, Reduction
from partsong.errors import ParameterError
from partsong.evaluate.coherence import Coherence
from partsong.fitted_topics import FittedTopics
from partsong.participation import sampled
from partsong.programs.federated_lda import FederatedLDA
from partsong.progress import progress
from partsong.promises import masks_for
from partsong.settings import precision_of, real_number, require_verbosity, stop_of, whole_number
from partsong.text.agreed import Agreement
from partsong.text.words import Words
from partsong.topic_device import require_device
from partsong.topic_fitting import Course, learn
from partsong.topic_methods import (
    OF_DESCENTS,
    require_method,
    require_server,
    require_words,
    topic_program,
    weighting_of,
)
from partsong.topic_names import TOGETHER, TOP, rounds_for
from partsong.topic_recipes import SERVER_RATE
from partsong.topic_saving import fill_with_topics
from partsong.topic_vocabulary import AGREE, FEWEST_MASKED, HASH, LONGEST, Prepared, prepared_together
from partsong.topic_word_rule import word_rule
from partsong.topic_words import UnknownWordsWarning, texts_by_party, words_of
from partsong.validation import whole_seed

OF_WORDS = ("min_documents", "min_parties", "max_words", "max_share", "longest_word")


class FederatedTopicModel(FittedTopics, BaseEstimator):  # type: ignore[misc]
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
    n_topics, weighting, max_share, max_words, language, stop_words, words, tol, time_budget, random_state, verbose, \
dtype, epochs, batch, rate, strength, critic, mi_gradient, critic_rate, fits_first, counts_words, device :
        As in `TopicModel`, where "nmf-sgd-mi" is "fednmf-mi" here. "exact", "fnmf" and, with everybody in each round,
        "fedlda" stop by tol. A critic is sent as the topics are: in the open it tells each party's words to the letter
        (docs/what-leaves-a-party.md), and `masked` hides single ones.
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
    longest_word : int
        Of "agree": words of more bytes of UTF-8 than this stay at their parties, and are no words of the model. A
        letter that is not plain takes two bytes or more. More costs bytes for each word that is not of up to eleven
        plain letters.
    masked : bool or MaskedSum
        Whether uploads of the rounds are masked as well, so that nobody sees a single one (three parties or more in
        each round).

    Attributes
    ----------
    components_, topic_shares_, coherence_, vocabulary_, weighing_, n_topics_, n_documents_, relative_error_, \
history_, n_iter_, outcome_, seed_ :
        As in `TopicModel`, over all parties' texts; `history_` tells bytes_up (all parties) and bytes_down (each).
    agreement_ : Agreement or None
        How the words were found: rule, probability of a false pass, bytes.
    parties_ : list of str
    empty_documents_ : dict of arrays of bool
        By party, which texts have no word of the vocabulary. They are kept, with weights of zero; a party of which all
        are empty takes part with rows of zeros, and an UnknownWordsWarning names it.
    """

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
        longest_word: int = LONGEST,
        max_share: float = 1.0,
        max_words: int | None = None,
        weighting: str | None = None,
        masked: Any = False,
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
        fits_first: bool = False,
        counts_words: bool = True,
        device: str | None = None,
    ) -> None:
        self.n_topics = n_topics
        self.method = method
        self.server = server
        self.server_rate = server_rate
        self.participation = participation
        self.rounds = rounds
        self.vocabulary = vocabulary
        self.min_documents = min_documents
        self.min_parties = min_parties
        self.longest_word = longest_word
        self.max_share = max_share
        self.max_words = max_words
        self.weighting = weighting
        self.masked = masked
        self.language = language
        self.stop_words = stop_words
        self.words = words
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

    def fit(self, texts: Any, y: Any = None) -> FederatedTopicModel:
        """Learn topics from a list with one list of texts per party, or a mapping of names to such lists."""
        stop, options = self._check_settings(), words_of(self.words, self.language, self.stop_words)
        rule = word_rule(self.vocabulary, {name: getattr(self, name) for name in OF_WORDS}, least=1)
        seed, weighting = whole_seed(self.random_state), weighting_of(self.weighting, self.method)
        steps = {name: getattr(self, name) for name in (*OF_DESCENTS, "server", "server_rate")}
        program, dtype = topic_program(self.method, self.n_topics, steps, TOGETHER), precision_of(self.dtype)
        require_device(self.device, program)
        parties = texts_by_party(texts)
        rounds = rounds_for(self.method) if self.rounds is None else int(self.rounds)
        absent = sampled(list(parties), rounds, float(self.participation), seed)
        reduction = self._reduction(len(parties), absent)
        self._require_everyone(program, bool(absent))
        prepared = prepared_together(rule, parties, options, seed, weighting)
        require_words(program, prepared.weighing.vocabulary.n_columns)
        course = Course(rounds, seed, stop, absent, reduction, device=self.device, weighting=weighting)
        with progress(self.verbose, rounds, self.time_budget, f"topics, {len(parties)} parties") as bar:
            found = learn(program, prepared.rows, course, dtype, bar)
        self._keep(found, prepared, program.solver, seed, self.counts_words)
        self._keep_parties(prepared)
        return self

    def coherence(self, kind: str = "npmi", texts: Any = None, *, n: int = TOP, vectors: Any = None) -> Coherence:
        """Do the n strongest words of each topic belong together: `.mean`, and `.topics` for each.

        "npmi" and "c_v" by how often they occur together in `texts`, given by party and summed as at the fit, or else
        in those of the fit (where C_v takes each for one window); "vectors" by the cosines of word vectors.
        """
        by_party = None if texts is None else texts_by_party(texts)
        return self._judged(kind, self._rows(kind, by_party), n, vectors)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, words: Words | None = None) -> FederatedTopicModel:
        """A model from its file, ready to show and to transform at any party."""
        model = cls()
        settings = fill_with_topics(model, path, words)
        told = {"method": settings.get("method")} if settings.get("method") in TOGETHER else {}
        return model.set_params(n_topics=model.n_topics_, **told)

    def _check_settings(self) -> Any:
        require_method(self.method, TOGETHER)
        require_server(self.method, self.server, self.server_rate)
        require_verbosity(self.verbose)
        if self.rounds is not None:
            whole_number("rounds", self.rounds)
        if self.masked and isinstance(self.method, str) and self.method == "fnmf":
            raise ParameterError("fnmf compares single models of parties, which masks would hide. Take method='exact'.")
        if not 0 < real_number("participation", self.participation) <= 1:
            raise ParameterError(f"participation must be above 0 and at most 1; got {self.participation!r}.")
        return stop_of(self.tol, self.time_budget)

    def _reduction(self, n_parties: int, absent: Any) -> Reduction:
        if not self.masked:
            return InTheOpen()
        present = n_parties - max((len(away) for away in absent.values()), default=0)
        if present < FEWEST_MASKED:
            raise ParameterError(
                f"Masks take at least {FEWEST_MASKED} parties in every round, and there are {present}: each of two "
                "would know what the other has sent. Let more take part, or run without masks."
            )
        masks: Reduction = masks_for(None, n_parties) if self.masked is True else self.masked
        return masks

    def _require_everyone(self, program: Any, is_sampled: bool) -> None:
        """Refuse to draw parties where sums over some of them mean nothing, or tell each one's words."""
        if is_sampled and getattr(program, "needs_everyone", False):
            raise ParameterError(
                f"participation={self.participation} is for methods that can do with some of the parties in a round, "
                "fednmf, fednmf-mi and fedlda. Take one of these, or participation=1."
            )
        if is_sampled and self.masked and isinstance(program, FederatedLDA):
            raise ParameterError(
                "Sums of fedlda over other parties each time differ by the words of single parties, and masks would "
                "hide nothing. Take participation=1, or another method."
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
            "weighting": self.weighing_.weighting,
            "vocabulary": self.vocabulary if is_named else "given",
            "masked": bool(self.masked),
            "tol": float(self.tol),
        }
        return told | ({"server": self.server} if named in ("fednmf", "fednmf-mi") else {})
