"""How texts are written in files, and where they are not written so."""

from __future__ import annotations

import codecs
import io
from pathlib import Path

from partsong.errors import ParameterError
from partsong.io.opening import open_bytes

CHUNK = 1 << 20
OF_TEXTS = (
    "Save it as UTF-8, or say how it was written: encoding='cp1252' or 'latin-1' for files of Western Windows "
    "programs, 'utf-16' where that was chosen."
)
OF_LISTS = "Save it as UTF-8: lists of words are always read so, in whatever encoding the texts are."
"""Ways out."""


def codec_named(encoding: str) -> str:
    """The codec of a name, with a byte order mark taken off UTF-8."""
    try:
        io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        name = codecs.lookup(encoding).name
    except (LookupError, TypeError, ValueError):
        raise ParameterError(
            f"There is no text encoding {encoding!r}. Names are those of Python: utf-8, latin-1, cp1252, utf-16."
        ) from None
    return "utf-8-sig" if name == "utf-8" else name


def encoding_fault(place: Path, encoding: str, way_out: str) -> str:
    """Where the bytes of a file are first not those of the encoding, and the way out."""
    decoder, start = codecs.getincrementaldecoder(encoding)(), 0
    at, name = 0, "utf-8" if encoding == "utf-8-sig" else encoding
    with open_bytes(place) as stream:
        while True:
            chunk = stream.read(CHUNK)
            waiting = len(decoder.getstate()[0])
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeError as error:
                at = start - waiting + int(getattr(error, "start", 0))
                break
            if not chunk:
                break
            start += len(chunk)
    return f"{place}: its bytes are not {name} text, first at byte position {at}. {way_out}"
