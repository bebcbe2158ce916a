"""Vectors of words from any table: text as GloVe and word2vec write it, .npz, gensim's KeyedVectors, a mapping."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from partsong.errors import DataError, DataTypeError, FormatError, ShapeError
from partsong.io.opening import open_bytes, parsing, place_of

LONGEST_LINE = 1 << 20
"""Bytes; a longer line is no vector of a word."""
MOST_DIMENSIONS = 1 << 16

Vectors = dict[str, np.ndarray]


def word_vectors(table: Any, words: Iterable[str]) -> Vectors:
    """The vectors (float64, of one length) of those `words` that the table has.

    A table is the path of a text file (a word and its numbers on each line, with or without a first line of counts,
    packed or not), read as a stream up to the last word that is wanted; or of an .npz file with the words and a matrix;
    or an object with `key_to_index` and `vectors`, as gensim's KeyedVectors; or a mapping. Of a word that occurs twice
    in a file the first vector counts. Words are looked up as they are, letter by letter.
    """
    wanted = set(words)
    if isinstance(table, (str, os.PathLike)):
        path = place_of(table)
        found = _from_npz(path, wanted) if path.suffix.lower() == ".npz" else _from_text(path, wanted)
    elif hasattr(table, "key_to_index") and hasattr(table, "vectors"):
        found = {word: table.vectors[table.key_to_index[word]] for word in wanted if word in table.key_to_index}
    elif isinstance(table, Mapping):
        found = {word: table[word] for word in wanted if word in table}
    else:
        raise DataTypeError(
            f"Word vectors come from the path of a text or .npz file, gensim's KeyedVectors, or a mapping from words "
            f"to vectors; not from {type(table).__name__}."
        )
    return _checked(found)


def _checked(found: Mapping[str, Any]) -> Vectors:
    vectors = {word: _as_vector(word, found[word]) for word in sorted(found)}
    sizes = {len(vector) for vector in vectors.values()}
    if len(sizes) > 1:
        raise ShapeError(f"Vectors of words must be of one length; these have {min(sizes)} to {max(sizes)} numbers.")
    return vectors


def _as_vector(word: str, values: Any) -> np.ndarray:
    try:
        vector = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise DataTypeError(f"The vector of the word {word[:40]!r} does not consist of numbers.") from error
    if vector.ndim != 1 or not len(vector):
        raise ShapeError(f"The vector of the word {word[:40]!r} has the shape {vector.shape}, not one row of numbers.")
    if not np.isfinite(vector).all():
        raise DataError(f"The vector of the word {word[:40]!r} has NaN or infinite numbers. Repair or remove it.")
    return vector


def _from_npz(path: Path, wanted: Collection[str]) -> Mapping[str, Any]:
    with parsing(path, "word vectors"), path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    texts = [name for name, array in arrays.items() if array.ndim == 1 and array.dtype.kind in "US"]
    tables = [name for name, array in arrays.items() if array.ndim == 2 and array.dtype.kind in "fiu"]
    words = next((name for name in ("words", *texts) if name in texts), None)
    matrix = next((name for name in ("vectors", *tables) if name in tables), None)
    if words is None or matrix is None or len(arrays[words]) != len(arrays[matrix]):
        shown = ", ".join(f"{name} {array.shape} {array.dtype}" for name, array in arrays.items())
        raise FormatError(
            f"{path} holds no word vectors: it needs a list of words and a matrix with a row for each of them, and has "
            f"{shown or 'nothing'}. Save it with np.savez(path, words=…, vectors=…)."
        )
    names = arrays[words].tolist()
    keys = [name.decode("utf-8", "replace") for name in names] if arrays[words].dtype.kind == "S" else names
    rows = {word: row for row, word in reversed(list(enumerate(keys))) if word in wanted}
    return {word: arrays[matrix][row] for word, row in rows.items()}


def _from_text(path: Path, wanted: Collection[str]) -> Mapping[str, Any]:
    names = {word.encode("utf-8", "surrogatepass"): word for word in wanted}
    found: dict[str, Any] = {}
    with parsing(path, "word vectors"), open_bytes(path) as stream:
        size: int | None = None
        stated: int | None = None
        number = 0
        for number, line in _lines(path, stream):
            if size is None:
                stated, size = _first(path, line)
                if stated is not None:
                    continue
            word, values = _parts(path, number, line, size)
            if word in names and names[word] not in found:
                found[names[word]] = _numbers(path, number, values)
                if len(found) == len(names):
                    return found
        if size is None:
            raise FormatError(f"{path} is empty: it holds no word vectors. Copy it again.")
        if stated is not None and number - 1 < stated:
            raise FormatError(
                f"{path}: its first line announces {stated} words, but it ends at line {number}. It was cut short; "
                "copy it again."
            )
    return found


def _lines(path: Path, stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers from 1, without the line's end; a blank one at the end of the file is none."""
    number, blank = 0, 0
    while line := stream.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise FormatError(f"{path}, line {number}: longer than any vector of a word. It is no table of vectors.")
        if b"\0" in line:
            raise FormatError(f"{path}, line {number}: holds a null character. It is no text, or damaged.")
        stripped = line.rstrip()
        if blank and stripped:
            raise FormatError(f"{path}, line {blank}: blank, where a word and its vector belong.")
        blank = number if not stripped else 0
        if stripped:
            yield number, stripped


def _first(path: Path, line: bytes) -> tuple[int | None, int]:
    """How many words a first line of counts announces (None: it is a vector already), and the length of vectors."""
    line = line.removeprefix(b"\xef\xbb\xbf")
    fields = line.split()
    if len(fields) == 2 and fields[0].isdigit() and fields[1].isdigit():
        if not 0 < int(fields[1]) <= MOST_DIMENSIONS:
            raise FormatError(f"{path}, line 1: announces vectors of {fields[1].decode()[:20]} numbers.")
        return int(fields[0]), int(fields[1])
    if not 2 <= len(fields) <= MOST_DIMENSIONS + 1:
        raise FormatError(
            f"{path}, line 1: not a word and its vector, nor the numbers of words and dimensions ({len(fields)} parts)."
        )
    return None, len(fields) - 1


def _parts(path: Path, number: int, line: bytes, size: int) -> tuple[bytes, list[bytes]]:
    """A word and its numbers, not read yet; words may hold spaces, as a few of GloVe's do, but no numbers."""
    if number == 1:
        line = line.removeprefix(b"\xef\xbb\xbf")
    if line.count(b" ") == size and line[:1] != b" ":
        word, _, rest = line.partition(b" ")
        return word, [rest]
    fields = line.split()
    if len(fields) == size + 1:
        return fields[0], fields[1:]
    if len(fields) <= size or any(map(_is_number, fields[1:-size])):
        raise FormatError(
            f"{path}, line {number}: has {len(fields)} parts, not a word and {size} numbers. It was cut short or "
            "damaged there; copy it again."
        )
    return b" ".join(fields[:-size]), fields[-size:]


def _numbers(path: Path, number: int, values: list[bytes]) -> np.ndarray:
    fields = values[0].split(b" ") if len(values) == 1 else values
    try:
        vector = np.array([float(field) for field in fields])
    except ValueError as error:
        raise FormatError(f"{path}, line {number}: a part of the vector is no number. It is damaged there.") from error
    if not np.isfinite(vector).all():
        raise FormatError(f"{path}, line {number}: the vector has NaN or infinite numbers. It is damaged there.")
    return vector


def _is_number(field: bytes) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True
