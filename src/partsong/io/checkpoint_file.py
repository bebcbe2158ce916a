"""Checkpoints: any tree of dataclasses, tuples, mappings, arrays and plain values, as safetensors and JSON, exactly.

Private states are inside (W among them), so the file is readable by its owner alone and stays where it was written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from partsong.core import Checkpoint, Message
from partsong.errors import FormatError, PartsongError
from partsong.io.opening import parsing, place_of
from partsong.io.state_tree import Decoder, Encoder, Tensors
from partsong.io.tensor_file import JSON, FileKind, read_tensors, require_json, write_tensors

_KIND = FileKind("partsong-checkpoint", 1, is_private=True)


def save_checkpoint(path: str | os.PathLike[str], checkpoint: Checkpoint, *, context: Mapping[str, JSON]) -> None:
    """Write a checkpoint atomically; `context` (settings, method, fingerprint of the data) is given back on loading."""
    require_json(context, "context")
    encoder = Encoder()
    tree = encoder.encode(checkpoint, "checkpoint")
    write_tensors(path, _KIND, encoder.tensors, {"context": context, "tree": tree})


def load_checkpoint(path: str | os.PathLike[str], state_types: Sequence[type]) -> tuple[Checkpoint, Mapping[str, JSON]]:
    """Read a checkpoint; only classes in `state_types`, Message and Checkpoint are ever made, by their names."""
    decoder = Decoder.knowing((*state_types, Message, Checkpoint))
    tensors, content = read_tensors(path, _KIND)
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
