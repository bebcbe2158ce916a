"""Safetensors files with one JSON document: the base of model files and recorded traffic.

The document is under the metadata key "partsong" as {format, format_version, sha256, content}. The checksum covers the
content and every array, so that flipped bits are detected.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from partsong.errors import DataTypeError, FormatError
from partsong.io.opening import parse_errors, resolve_path
from partsong.io.write import atomic_write

JSON = Any  # None, bool, int, finite float, str, and lists and string-keyed mappings of these
METADATA_KEY = "partsong"
_KINDS = frozenset("?bhilqBHILQefd")


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file, and the newest format version that this release can read."""

    format: str
    version: int
    is_private: bool = False

    def __str__(self) -> str:
        return f"a {self.format.replace('-', ' ')} file"


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
    with atomic_write(path, private=kind.is_private) as draft:
        mode = draft.stat().st_mode
        try:
            save_file(whole, draft, metadata={METADATA_KEY: _canonical(document)})
        except SafetensorError as error:  # safetensors does not raise OSError for a full disk
            raise OSError(str(error)) from error
        draft.chmod(mode)  # safetensors makes files readable by their owner only


def read_tensors(path: str | os.PathLike[str], kind: FileKind) -> tuple[dict[str, npt.NDArray[Any]], JSON]:
    """Read a file of this kind that `write_tensors` wrote; anything else is a FormatError."""
    from safetensors import safe_open

    place = resolve_path(path)
    with parse_errors(place, str(kind)):
        with place.open("rb"):
            pass
        with safe_open(place, framework="np") as file:
            content, checksum = _opened(place, kind, (file.metadata() or {}).get(METADATA_KEY))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        if _checksum(tensors, content) != checksum:
            raise FormatError(
                f"{place}: its contents do not match its checksum, so it was damaged or edited. "
                "Copy it from its source again."
            )
        return tensors, content


def require_json(value: JSON, what: str) -> None:
    """Raise DataTypeError unless the value is unchanged after writing to JSON and reading back."""
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
            f"{path}: a safetensors file, but not written by partsong (no {METADATA_KEY!r} metadata). Pass {kind}."
        )
    document = json.loads(text, parse_constant=_refuse_constant)
    if not isinstance(document, dict) or set(document) != {"format", "format_version", "sha256", "content"}:
        raise FormatError(f"{path}: its metadata is not that of a partsong file. Copy it from its source again.")
    if document["format"] != kind.format:
        raise FormatError(f"{path}: this is a {str(document['format'])[:40]!r} file. Pass a {kind.format!r} file.")
    version = document["format_version"]
    if type(version) is not int or version < 1:
        raise FormatError(
            f"{path}: the format version {str(version)[:40]!r} is not a number. Copy the file from its source again."
        )
    if version > kind.version:
        raise FormatError(
            f"{path}: written in format version {version}; this release reads versions up to {kind.version}. "
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
    """Convert mappings and sequences of any type to dicts and lists, as read from JSON."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
