"""Replace generated tables in the result pages, and leave everything else as it is."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
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


def select(
    table: str, rows: Callable[[list[str]], bool] = lambda cells: True, columns: Sequence[int] | None = None
) -> str:
    """A Markdown table with the rows for which `rows` is true of their cells, and with these columns."""
    if not table.startswith("|"):
        return table
    title, _, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    kept = [column for column in (range(len(title)) if columns is None else columns) if column < len(title)]
    lines = [title, *(cells for cells in body if rows(cells))]
    found = [f"| {' | '.join(cells[column] for column in kept)} |" for cells in lines]
    return "\n".join([found[0], "|" + "---|" * len(kept), *found[1:]])
