"""Replace generated tables in the result pages, and leave everything else as it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

BLOCK = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
"""A table between its two marks."""


def replace_tables(document: Path, tables: Mapping[str, str]) -> None:
    """Write every table between `<!-- table: NAME -->` and `<!-- end -->`; blocks of other names stay."""

    def replaced(block: re.Match[str]) -> str:
        table = tables.get(block["name"])
        return block[0] if table is None else f"{block[1]}{table}\n{block[4]}"

    document.write_text(BLOCK.sub(replaced, document.read_text("utf-8")), "utf-8")


def print_tables(tables: Mapping[str, str]) -> None:
    """Print every table under its name."""
    for name, table in tables.items():
        print(f"{name}\n\n{table}\n")
