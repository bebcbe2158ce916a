"""Topic model files: topics, words and options; no texts, document weights or party names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from partsong.core.renamed import translate_settings
from partsong.errors import FileError, FormatError, PartsongError
from partsong.io.model_file import ENDING
from partsong.io.opening import parse_errors, resolve_path
from partsong.io.tensor_file import JSON, FileKind, read_tensors, require_json, write_tensors

_KIND = FileKind("partsong-topics", 1)
_FIELDS = ("words", "key", "options", "n_documents", "settings", "seed", "created", "versions")
_BY_TOPIC = ("shares", "coherence")
_ONCE_MORE = "Fit again, or copy the file from its source again."
LONGEST_KEY = 64


@dataclass(frozen=True, slots=True, eq=False)
class TopicFile:
    """Topics (k × V) with the `words` of their columns, or the `key` of hashed words; checked on creation.

    `options` are the word options as JSON. `frequencies` are document frequencies in `n_documents` for tf-idf; without
    them, words are counted. `shares` and `coherence` have one number per topic; NaN if the coherence is unknown.
    """

    components: np.ndarray
    words: tuple[str, ...] | None
    key: str
    options: str
    frequencies: np.ndarray | None
    n_documents: int
    shares: np.ndarray | None
    coherence: np.ndarray | None
    settings: Mapping[str, JSON]
    seed: int
    created: str
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fault = _fault_of_topics(self) or _fault_of_words(self) or _fault_of_facts(self)
        if fault:
            raise FormatError(f"{fault} {_ONCE_MORE}")
        require_json(self.settings, "settings")


def save_topics(path: str | os.PathLike[str], model: TopicFile) -> None:
    """Write a topic model atomically as one file."""
    place = resolve_path(path)
    if not place.name.lower().endswith(ENDING):
        raise FileError(f"{path}: the name of a model file must end in {ENDING}. Save it as {place.stem}{ENDING}.")
    optional = {name: getattr(model, name) for name in ("frequencies", *_BY_TOPIC)}
    tensors = {"components": model.components} | {name: kept for name, kept in optional.items() if kept is not None}
    write_tensors(path, _KIND, tensors, {name: getattr(model, name) for name in _FIELDS})


def load_topics(path: str | os.PathLike[str]) -> TopicFile:
    """Read and check a topic model; an invalid file is a FormatError. No code is run."""
    tensors, content = read_tensors(path, _KIND)
    place, optional = resolve_path(path), {"frequencies", *_BY_TOPIC}
    if not {"components"} <= tensors.keys() <= {"components", *optional}:
        raise FormatError(f"{place}: contains the arrays {sorted(tensors)[:5]}, not those of topics. {_ONCE_MORE}")
    if not isinstance(content, dict) or set(content) != set(_FIELDS):
        raise FormatError(f"{place}: its metadata must have exactly the fields {', '.join(_FIELDS)}. {_ONCE_MORE}")
    words = content.pop("words")
    if isinstance(content["settings"], dict):
        content["settings"] = translate_settings(content["settings"])
    with parse_errors(place, "topics"):
        if not (words is None or isinstance(words, list)):
            raise FormatError(f"{place}: words must be a list. {_ONCE_MORE}")
        arrays: dict[str, Any] = {name: tensors.get(name) for name in optional}
        try:
            listed = None if words is None else tuple(words)
            return TopicFile(components=tensors["components"], words=listed, **arrays, **content)
        except PartsongError as error:
            raise FormatError(f"{place}: {error}") from error


def _fault_of_topics(model: TopicFile) -> str:
    H = model.components
    if not isinstance(H, np.ndarray) or H.dtype not in (np.float32, np.float64) or H.ndim != 2 or 0 in H.shape:
        return "Topics must be k x V numbers in float32 or float64 with k, V ≥ 1."
    if not np.isfinite(H).all() or H.min() < 0:
        return "Topics contain NaN, infinite or negative values."
    for name in _BY_TOPIC:
        values = getattr(model, name)
        if values is not None and (values.dtype != np.float64 or values.shape != (len(H),)):
            return f"{name} must have one float64 for each of the {len(H)} topics."
    if model.shares is not None and not (np.isfinite(model.shares).all() and model.shares.min() >= 0):
        return "shares contain NaN, infinite or negative values."
    if model.coherence is not None and np.isinf(model.coherence).any():
        return "coherence contains infinite values."
    return ""


def _fault_of_words(model: TopicFile) -> str:
    V = model.components.shape[1]
    if model.words is not None:
        if not all(isinstance(word, str) and word for word in model.words):
            return "Words must be non-empty text."
        if len(model.words) != V or len(set(model.words)) != V:
            return f"There must be {V} unique words, one per column; got {len(model.words)}."
    is_hex = (
        isinstance(model.key, str)
        and len(model.key) <= 2 * LONGEST_KEY
        and not set(model.key) - set("0123456789abcdef")
    )
    if not is_hex or len(model.key) % 2 or (model.words is not None and model.key):
        return "The key of hashed words is invalid."
    if not _is_count(model.n_documents):
        return "The number of documents must be a whole number."
    known = model.frequencies
    if known is None:
        return ""
    if known.dtype != np.int64 or known.shape != (V,) or known.min() < 0 or known.max() > model.n_documents:
        return f"Document frequencies must be {V} whole numbers from 0 to {model.n_documents}."
    return ""


def _fault_of_facts(model: TopicFile) -> str:
    if not isinstance(model.options, str) or not isinstance(model.created, str):
        return "Word options and the time of the fit must be text."
    if not _is_count(model.seed):
        return "seed must be a whole number."
    texts = isinstance(model.versions, Mapping) and all(isinstance(one, str) for one in model.versions.values())
    if not isinstance(model.settings, Mapping) or not texts:
        return "settings and versions must be mappings; versions must map names to text."
    return ""


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
