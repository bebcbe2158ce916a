"""Safetensors files of models, topic models and checkpoints."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from partsong.core.codec import Decoder, Encoder, Tensors
from partsong.core.interfaces import Checkpoint, Message
from partsong.core.runtime import package_version
from partsong.data.table import require_names
from partsong.errors import (
    DataError,
    DataTypeError,
    FeatureError,
    FileError,
    FormatError,
    ParameterError,
    PartsongError,
    ShapeError,
)
from partsong.io.opening import parsing, place_of
from partsong.io.write import replacing

# ---- tensor file ------------------------------------------------------------------------------------------------
#
# Safetensors files with one JSON document: the ground under model files and checkpoints.
#
# The document stands under the metadata key "partsong" as {format, format_version, sha256, content}; the checksum
# covers
# the content and every array, so that a flipped bit is told from a number.

JSON = Any  # None, bool, int, finite float, str, and lists and string-keyed mappings of these
METADATA_KEY = "partsong"
_KINDS = frozenset("?bhilqBHILQefd")


@dataclass(frozen=True, slots=True)
class FileKind:
    """What a file is for, and the newest version of its format that this release knows."""

    format: str
    version: int
    is_private: bool = False


def write_tensors(
    path: str | os.PathLike[str], kind: FileKind, tensors: Mapping[str, npt.NDArray[Any]], content: JSON
) -> None:
    """Write arrays and a document as one safetensors file, atomically."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    whole = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
    for name, tensor in whole.items():
        if tensor.dtype.char not in _KINDS or not tensor.dtype.isnative:
            raise DataTypeError(
                f"Array {name!r} is {tensor.dtype}, which cannot be stored. Convert it to a native number type."
            )
    document = {
        "format": kind.format,
        "format_version": kind.version,
        "sha256": _checksum(whole, content),
        "content": content,
    }
    with replacing(path, private=kind.is_private) as draft:
        mode = draft.stat().st_mode
        try:
            save_file(whole, draft, metadata={METADATA_KEY: _canonical(document)})
        except SafetensorError as error:  # a full disk, which safetensors does not call an OSError
            raise OSError(str(error)) from error
        draft.chmod(mode)  # safetensors leaves files to their owner alone


def read_tensors(path: str | os.PathLike[str], kind: FileKind) -> tuple[dict[str, npt.NDArray[Any]], JSON]:
    """Read what `write_tensors` wrote for this kind of file; anything else is a FormatError."""
    from safetensors import safe_open

    place = place_of(path)
    with parsing(place, f"a {kind.format} file"):
        with place.open("rb"):
            pass
        with safe_open(place, framework="np") as file:
            content, checksum = _opened(place, kind, (file.metadata() or {}).get(METADATA_KEY))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        if _checksum(tensors, content) != checksum:
            raise FormatError(
                f"{place}: its contents do not match its checksum, so it was damaged or edited. "
                "Take it from its source again."
            )
        return tensors, content


def require_json(value: JSON, what: str) -> None:
    """Raise DataTypeError unless the value survives being written as JSON and read back."""
    try:
        survives = bool(json.loads(_canonical(value)) == _plain(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise DataTypeError(
            f"{what} cannot be written as JSON: {error}. Use numbers, text, lists and mappings."
        ) from error
    if not survives:
        raise DataTypeError(f"{what} changes when written as JSON. Use text for the keys of mappings.")


def _opened(path: Path, kind: FileKind, text: str | None) -> tuple[JSON, str]:
    if text is None:
        raise FormatError(
            f"{path}: a safetensors file, but not one that partsong wrote (no {METADATA_KEY!r} metadata). "
            f"Pass a {kind.format} file."
        )
    document = json.loads(text, parse_constant=_refuse_constant)
    if not isinstance(document, dict) or set(document) != {"format", "format_version", "sha256", "content"}:
        raise FormatError(f"{path}: its metadata is not that of a partsong file. Take it from its source again.")
    if document["format"] != kind.format:
        raise FormatError(f"{path}: this is a {str(document['format'])[:40]!r} file. Pass a {kind.format!r} file.")
    version = document["format_version"]
    if type(version) is not int or version < 1:
        raise FormatError(f"{path}: the format version {str(version)[:40]!r} is not a number. Take the file anew.")
    if version > kind.version:
        raise FormatError(
            f"{path}: written in format version {version}; this release reads up to {kind.version}. "
            "Upgrade partsong to read it."
        )
    return document["content"], str(document["sha256"])


def _checksum(tensors: Mapping[str, npt.NDArray[Any]], content: JSON) -> str:
    digest = hashlib.sha256(_canonical(content).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, tensor.dtype.str, tensor.shape]).encode())
        digest.update(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _canonical(value: JSON) -> str:
    return json.dumps(_plain(value), sort_keys=True, allow_nan=False, ensure_ascii=True)


def _plain(value: JSON) -> JSON:
    """Mappings and sequences of any kind as the dicts and lists that JSON gives back."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


# ---- checkpoint file --------------------------------------------------------------------------------------------
#
# Checkpoints: any tree of dataclasses, tuples, mappings, arrays and plain values, as safetensors and JSON, exactly.
#
# Private states are inside (W among them), so the file is readable by its owner alone and stays where it was written.

_CHECKPOINT_KIND = FileKind("partsong-checkpoint", 1, is_private=True)


def save_checkpoint(path: str | os.PathLike[str], checkpoint: Checkpoint, *, context: Mapping[str, JSON]) -> None:
    """Write a checkpoint atomically; `context` (settings, method, fingerprint of the data) is given back on loading."""
    require_json(context, "context")
    encoder = Encoder()
    tree = encoder.encode(checkpoint, "checkpoint")
    write_tensors(path, _CHECKPOINT_KIND, encoder.tensors, {"context": context, "tree": tree})


def load_checkpoint(path: str | os.PathLike[str], state_types: Sequence[type]) -> tuple[Checkpoint, Mapping[str, JSON]]:
    """Read a checkpoint; only classes in `state_types`, Message and Checkpoint are ever made, by their names."""
    decoder = Decoder.knowing((*state_types, Message, Checkpoint))
    tensors, content = read_tensors(path, _CHECKPOINT_KIND)
    place = place_of(path)
    with parsing(place, "a checkpoint"):
        try:
            return _decoded(content, tensors, decoder)
        except PartsongError as error:  # also of a class that refuses its fields
            raise FormatError(f"{place}: {error}") from error


def _decoded(content: JSON, tensors: Tensors, decoder: Decoder) -> tuple[Checkpoint, Mapping[str, JSON]]:
    if not isinstance(content, dict) or set(content) != {"context", "tree"} or not isinstance(content["context"], dict):
        raise FormatError("it does not hold a context and a tree of states. Start the run anew.")
    checkpoint = decoder.decode(content["tree"], tensors)
    if not isinstance(checkpoint, Checkpoint) or not _is_sound(checkpoint):
        raise FormatError("it holds states, but they do not make a checkpoint. Start the run anew.")
    return checkpoint, content["context"]


def _is_sound(checkpoint: Checkpoint) -> bool:
    parties: Any = checkpoint.parties
    is_index = type(checkpoint.index) is int and checkpoint.index >= 0
    return is_index and isinstance(parties, Mapping) and isinstance(checkpoint.model, Message)


# ---- model file -------------------------------------------------------------------------------------------------

ENDING = ".safetensors"
_KIND = FileKind("partsong-model", 1)
_FIELDS = ("feature_names", "settings", "seed", "relative_error", "created", "versions")
_ONCE_MORE = "Fit again, or take the model from its source again."


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """The shared parts (components, k x m) and where they come from; checked when it is made.

    `shares` is the explained share of each component; `created` is an ISO 8601 time (`provenance.now`, which
    SOURCE_DATE_EPOCH fixes, so that equal fits give equal files); `versions` are of packages.
    """

    components: npt.NDArray[Any]
    feature_names: tuple[str, ...] | None
    settings: Mapping[str, JSON]
    seed: int | None
    relative_error: float | None
    shares: npt.NDArray[Any] | None
    created: str
    versions: Mapping[str, str]

    def __post_init__(self) -> None:
        _require_parts(self.components)
        _require_shares(self.shares, self.components.shape[0])
        _require_names(self.feature_names, self.components.shape[1])
        _require_numbers(self.seed, self.relative_error)
        _require_provenance(self.settings, self.created, self.versions)
        object.__setattr__(self, "settings", MappingProxyType(dict(self.settings)))
        object.__setattr__(self, "versions", MappingProxyType(dict(self.versions)))


def save_model(path: str | os.PathLike[str], model: Model) -> None:
    """Write a model as one safetensors file, which its name has to say; it appears whole or not at all."""
    place = place_of(path)
    if not place.name.lower().endswith(ENDING):
        raise FileError(f"{path}: the name of a model file ends in {ENDING}. Save it as {place.stem}{ENDING}, say.")
    tensors = {"components": model.components}
    if model.shares is not None:
        tensors["shares"] = model.shares
    write_tensors(path, _KIND, tensors, {name: getattr(model, name) for name in _FIELDS})


def load_model(path: str | os.PathLike[str]) -> Model:
    """Read a model and check all of it; whatever is not a sound model file is a FormatError, and no code is run."""
    tensors, content = read_tensors(path, _KIND)
    place = place_of(path)
    if not {"components"} <= tensors.keys() <= {"components", "shares"}:
        raise FormatError(f"{place}: holds the arrays {sorted(tensors)[:5]}, not those of a model. {_ONCE_MORE}")
    if not isinstance(content, dict) or set(content) != set(_FIELDS):
        raise FormatError(f"{place}: its description lacks, or has more than, {', '.join(_FIELDS)}. {_ONCE_MORE}")
    names = content.pop("feature_names")
    with parsing(place, "a model"):
        try:
            return Model(
                components=tensors["components"],
                shares=tensors.get("shares"),
                feature_names=None if names is None else tuple(names),
                **content,
            )
        except (DataError, DataTypeError, FeatureError, ParameterError, ShapeError) as error:
            raise FormatError(f"{place}: {error}") from error


def _require_parts(components: npt.NDArray[Any]) -> None:
    if not isinstance(components, np.ndarray) or components.dtype not in (np.float32, np.float64):
        kind = getattr(components, "dtype", type(components).__name__)
        raise DataTypeError(f"components must be float32 or float64, not {kind}. Convert them with astype.")
    if components.ndim != 2 or 0 in components.shape:
        raise ShapeError(f"components must be k x m with k, m ≥ 1, but have shape {components.shape}. {_ONCE_MORE}")
    if not np.isfinite(components).all():
        raise DataError(f"components hold NaN or infinite values. {_ONCE_MORE}")
    if components.min() < 0:
        raise DataError(f"components hold negative values, down to {components.min()}. {_ONCE_MORE}")


def _require_shares(shares: npt.NDArray[Any] | None, n_components: int) -> None:
    if shares is None:
        return
    if not isinstance(shares, np.ndarray) or shares.dtype not in (np.float32, np.float64):
        raise DataTypeError("shares must be a float32 or float64 array. Convert them with np.asarray(shares, float).")
    if shares.shape != (n_components,):
        raise ShapeError(f"shares have shape {shares.shape} for {n_components} components. Give one per component.")
    if not np.isfinite(shares).all():
        raise DataError(f"shares hold NaN or infinite values. {_ONCE_MORE}")


def _require_names(names: tuple[str, ...] | None, n_columns: int) -> None:
    if names is None:
        return
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise FeatureError("feature_names must be a tuple of text, or None. Convert them with tuple(map(str, names)).")
    if len(names) != n_columns:
        raise FeatureError(
            f"{len(names)} feature names for {n_columns} columns of the components. Give one per column."
        )
    if len(set(names)) < len(names):
        require_names(names, "feature_names")


def _require_numbers(seed: int | None, relative_error: float | None) -> None:
    if seed is not None and type(seed) is not int:
        raise DataTypeError(f"seed must be a whole number or None, not {type(seed).__name__}. Convert it with int().")
    if relative_error is None:
        return
    if not isinstance(relative_error, (int, float)) or isinstance(relative_error, bool):
        raise DataTypeError(f"relative_error must be a number or None, not {type(relative_error).__name__}.")
    if not 0 <= relative_error < float("inf"):
        raise ParameterError(
            f"relative_error must be finite and not negative, not {relative_error}. Pass None instead."
        )


def _require_provenance(settings: Mapping[str, JSON], created: str, versions: Mapping[str, str]) -> None:
    for what, value in (("settings", settings), ("versions", versions)):
        if not isinstance(value, Mapping):
            raise DataTypeError(f"{what} must be a mapping, not {type(value).__name__}. Pass a dict.")
        require_json(value, what)
    if not all(isinstance(version, str) for version in versions.values()):
        raise DataTypeError("versions must map names of packages to text. Convert them with str().")
    try:
        datetime.fromisoformat(created)
    except (TypeError, ValueError) as error:
        raise ParameterError(
            f"created must be an ISO 8601 time, not {created!r}. Use datetime.now().isoformat()."
        ) from error


# ---- provenance -------------------------------------------------------------------------------------------------
#
# Where a result comes from: versions of what computed it, and when.

EPOCH = "SOURCE_DATE_EPOCH"

PACKAGES = {"numpy": "numpy", "scipy": "scipy", "numba": "numba", "sklearn": "scikit-learn"}
"""Import name to distribution name."""


def package_versions() -> dict[str, str]:
    """What a model file says about the software behind it."""
    versions = {"python": platform.python_version(), "partsong": package_version()}
    for name, distribution in PACKAGES.items():
        try:
            versions[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def machine_versions(threads: int) -> dict[str, Any]:
    """What a run folder says: the same, and the machine."""
    return {
        **package_versions(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count() or 1,
        "threads": threads,
    }


def now() -> str:
    """The time, to the second, as ISO 8601 in UTC; SOURCE_DATE_EPOCH (seconds since 1970) stands in where it is set.

    It is all that tells the files of two equal fits apart, so with it they are the same byte for byte.
    """
    given = os.environ.get(EPOCH, "").strip()
    if not given:
        return datetime.now(UTC).isoformat(timespec="seconds")
    try:
        return datetime.fromtimestamp(int(given), UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError) as error:
        raise ParameterError(
            f"{EPOCH} must be a whole number of seconds since 1970; it is {given!r}. Correct it, or unset it."
        ) from error


# ---- topic file -------------------------------------------------------------------------------------------------
#
# Files of topic models: topics, words and what it takes to use them again; never a text, a weight or a party.

_TOPIC_KIND = FileKind("partsong-topics", 1)
_TOPIC_FIELDS = ("words", "key", "options", "n_documents", "settings", "seed", "created", "versions")
_BY_TOPIC = ("shares", "coherence")
_FILE_ONCE_MORE = "Fit again, or take the file from its source again."
LONGEST_KEY = 64


@dataclass(frozen=True, slots=True, eq=False)
class TopicFile:
    """Topics (k × V) with `words` for their columns, or the `key` of hashes; checked when it is made.

    `options` are those of the words, as JSON. `frequencies` of words in `n_documents`, for tf-idf; without, counts.
    `shares` and `coherence` have a number for each topic, NaN for a coherence that there is none of.
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
            raise FormatError(f"{fault} {_FILE_ONCE_MORE}")
        require_json(self.settings, "settings")


def save_topics(path: str | os.PathLike[str], model: TopicFile) -> None:
    """Write a topic model as one file, whole or not at all."""
    place = place_of(path)
    if not place.name.lower().endswith(ENDING):
        raise FileError(f"{path}: the name of a model file ends in {ENDING}. Save it as {place.stem}{ENDING}, say.")
    optional = {name: getattr(model, name) for name in ("frequencies", *_BY_TOPIC)}
    tensors = {"components": model.components} | {name: kept for name, kept in optional.items() if kept is not None}
    write_tensors(path, _TOPIC_KIND, tensors, {name: getattr(model, name) for name in _TOPIC_FIELDS})


def load_topics(path: str | os.PathLike[str]) -> TopicFile:
    """Read a topic model and check all of it; whatever is not sound is a FormatError, and no code is run."""
    tensors, content = read_tensors(path, _TOPIC_KIND)
    place, optional = place_of(path), {"frequencies", *_BY_TOPIC}
    if not {"components"} <= tensors.keys() <= {"components", *optional}:
        raise FormatError(f"{place}: holds the arrays {sorted(tensors)[:5]}, not those of topics. {_FILE_ONCE_MORE}")
    if not isinstance(content, dict) or set(content) != set(_TOPIC_FIELDS):
        raise FormatError(
            f"{place}: its description lacks, or has more than, {', '.join(_TOPIC_FIELDS)}. {_FILE_ONCE_MORE}"
        )
    words = content.pop("words")
    with parsing(place, "topics"):
        if not (words is None or isinstance(words, list)):
            raise FormatError(f"{place}: words are no list. {_FILE_ONCE_MORE}")
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
        return "Topics hold NaN, infinite or negative values."
    for name in _BY_TOPIC:
        values = getattr(model, name)
        if values is not None and (values.dtype != np.float64 or values.shape != (len(H),)):
            return f"{name} must have one float64 for each of the {len(H)} topics."
    if model.shares is not None and not (np.isfinite(model.shares).all() and model.shares.min() >= 0):
        return "shares hold NaN, infinite or negative values."
    if model.coherence is not None and np.isinf(model.coherence).any():
        return "coherence holds infinite values."
    return ""


def _fault_of_words(model: TopicFile) -> str:
    V = model.components.shape[1]
    if model.words is not None:
        if not all(isinstance(word, str) and word for word in model.words):
            return "Words must be text, and not empty."
        if len(model.words) != V or len(set(model.words)) != V:
            return f"There are {len(model.words)} words for {V} columns, or some of them twice."
    is_hex = (
        isinstance(model.key, str)
        and len(model.key) <= 2 * LONGEST_KEY
        and not set(model.key) - set("0123456789abcdef")
    )
    if not is_hex or len(model.key) % 2 or (model.words is not None and model.key):
        return "The key of hashed words is no key."
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
        return "Options of words and the time of the fit must be text."
    if not _is_count(model.seed):
        return "seed must be a whole number."
    texts = isinstance(model.versions, Mapping) and all(isinstance(one, str) for one in model.versions.values())
    if not isinstance(model.settings, Mapping) or not texts:
        return "settings and versions must be mappings, versions of names to text."
    return ""


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
