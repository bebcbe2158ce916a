"""The delimiter of a text file: what its name says, what its lines say, and what to do where the two differ."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from partsong.errors import FormatError
from partsong.io.opening import is_gzipped

DELIMITER_NAMES = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars", " ": "blanks"}
ENDINGS = {",": ".csv", "\t": ".tsv"}
DECIMAL_COMMA = re.compile(r"(?<![\w.])[+-]?\d+,\d+(?![\w.])")


def delimiter_of(path: Path) -> str:
    """What the name says."""
    return "\t" if path.name.lower().removesuffix(".gz").endswith(".tsv") else ","


def require_right_delimiter(path: Path, delimiter: str, first: Sequence[str], second: Sequence[str]) -> None:
    """Refuse a file whose first two lines have one field each and share another delimiter, with the way out."""
    if len(first) > 1:
        return
    for other, name in DELIMITER_NAMES.items():
        if other != delimiter and other in first[0].strip() and other in delimiter.join(second).strip():
            has_decimal_commas = other != "," and DECIMAL_COMMA.search(delimiter.join(second)) is not None
            raise FormatError(
                f"{path}: fields seem to be separated by {name}, but the name says {DELIMITER_NAMES[delimiter]}. "
                f"{way_to(path, other, has_decimal_commas)}"
            )


def way_to(path: Path, delimiter: str, has_decimal_commas: bool = False) -> str:
    """What to do about a file with this delimiter: rename it, or write it anew with commas."""
    stem, gz = (path.name[:-3], path.name[-3:]) if is_gzipped(path) else (path.name, "")
    if delimiter in ENDINGS and not has_decimal_commas:
        return f"Rename it to {stem[:-4]}{ENDINGS[delimiter]}{gz}."
    how = f"{path.name!r}, sep={delimiter!r}" + (", decimal=','" if has_decimal_commas else "")
    return (
        "Export it again with commas between fields and points in numbers, or convert it: "
        f"pandas.read_csv({how}).to_csv('{stem[:-4]}-commas.csv{gz}', index=False)."
    )
