"""Save and load fitted topic models: topics, words and settings; no texts, no document weights."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from partsong.core.interfaces import RowSolver
from partsong.errors import DataError, FormatError, ParameterError, PartsongError
from partsong.estimators.persistence import penalties_to_dict
from partsong.estimators.validation import count_from_settings, solver_from_settings
from partsong.io import model_file
from partsong.io.tensor_file import JSON
from partsong.io.topic_file import TopicFile, load_topics, save_topics
from partsong.solvers.lda import TopicInference
from partsong.topics.tokenizer import LETTERS, Words
from partsong.topics.vocabulary import HashedVocabulary, TextVectorizer, Vocabulary

MIXTURE, LEAST_SQUARES = "mixture", "least-squares"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Settings, time and versions of a loaded model; they are saved again unchanged."""

    settings: Mapping[str, JSON]
    created: str
    versions: Mapping[str, str]


def save_fitted_topics(model: Any, path: str | os.PathLike[str], settings: Mapping[str, JSON]) -> None:
    """Write a fitted model to a file."""
    weighing: TextVectorizer = model.vectorizer_
    columns = weighing.vocabulary
    origin: Provenance | None = vars(model).get("_provenance")
    if origin is None:
        sizes = {"n_topics": len(model.components_), "rounds": model.n_iter_}
        complete = {**settings, **solver_to_dict(model.solver_), **sizes}
        origin = Provenance(complete, model_file.now(), model_file.package_versions())
    save_topics(
        path,
        TopicFile(
            components=model.components_,
            words=None if isinstance(columns, HashedVocabulary) else columns.words,
            key=columns.key.hex() if isinstance(columns, HashedVocabulary) else "",
            options=weighing.words.to_json(),
            frequencies=weighing.documents,
            n_documents=weighing.n_documents,
            shares=model.topic_shares_,
            coherence=model.coherence_,
            settings=origin.settings,
            seed=model.seed_,
            created=origin.created,
            versions=origin.versions,
        ),
    )


def fill_with_topics(model: Any, path: str | os.PathLike[str], words: Words | None) -> Mapping[str, JSON]:
    """Fill a model from its file; return the settings of the file."""
    file = load_topics(path)
    try:
        options = _options(file, words)
        model.vectorizer_ = TextVectorizer(options, _columns(file), file.frequencies, file.n_documents)
        model.solver_ = _solver_from(file.settings)
        model.n_iter_ = count_from_settings(file.settings, "rounds", least=0)
    except PartsongError as error:
        raise FormatError(f"{path}: {error}") from error
    model.components_, model.n_topics_ = file.components, len(file.components)
    model.topic_shares_, model.coherence_, model.seed_ = file.shares, file.coherence, file.seed
    model._provenance = Provenance(dict(file.settings), file.created, dict(file.versions))
    return file.settings


def _options(file: TopicFile, words: Words | None) -> Words:
    """Custom patterns must be passed by the caller: one from a malicious file could run forever."""
    if words is not None:
        if words.to_json() != file.options:
            raise ParameterError("words differ from the word options of this model's fit. Pass the same options.")
        return words
    if _pattern(file.options) != LETTERS:
        raise ParameterError(
            "This model splits texts by a custom pattern, which is not loaded from a file. Pass the word options of "
            "its fit: load(path, words=Words(…))."
        )
    return Words.from_json(file.options)


def _pattern(options: str) -> Any:
    try:
        found = json.loads(options)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise DataError("The word options cannot be read. Save the model again.")
    return found.get("pattern", LETTERS)


def _columns(file: TopicFile) -> Vocabulary | HashedVocabulary:
    if file.words is not None:
        return Vocabulary(file.words)
    return HashedVocabulary(file.components.shape[1], bytes.fromhex(file.key))


def solver_to_dict(solver: RowSolver) -> dict[str, JSON]:
    """Return the settings of the solver for document weights: shares of a mixture, or penalties of a fit."""
    if isinstance(solver, TopicInference):
        return {"weights": MIXTURE, "alpha": solver.alpha, "iterations": solver.iterations, "e_tol": solver.tolerance}
    return {"weights": LEAST_SQUARES, **penalties_to_dict(solver)}


def _solver_from(settings: Mapping[str, Any]) -> RowSolver:
    if settings.get("weights") != MIXTURE:
        return solver_from_settings(settings)
    try:
        found = [float(settings[name]) for name in ("alpha", "iterations", "e_tol")]
        return TopicInference(found[0], int(found[1]), found[2])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise DataError("The settings of a mixture of topics cannot be read. Fit the model again.") from None
