"""Write the tables and figures of docs/results/game.md from recorded runs.

    python -m experiments.game.report docs/results

The folder holds game-convergence.jsonl, game-datasets.jsonl, game-trajectories.jsonl, game-workers.jsonl,
game-ratings.jsonl, game-parties.jsonl and game-leak.jsonl, or some of them. Replaces the text between
`<!-- table: NAME -->` and `<!-- end -->`, and nothing else. `--print` prints every table in full.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.game.figures import drawn_from
from experiments.game.runs import read_lines
from experiments.game.tables import (
    Runs,
    bases,
    convergence,
    counted,
    datasets,
    held_out,
    held_out_in_short,
    leaks,
    maps,
    measured,
    parties,
    trajectories,
)
from experiments.shared.document import print_tables, replace_tables, select

FEW = (
    "MU", "game, sequential, η = 0.001", "game, stratified, η = 0.001", "game, simultaneous, η = 0.001",
    "J-min, sequential, η = 0.001", "J-max, sequential, η = 0.001", "game, sequential, η = 0.1",
    "J-min, sequential, η = 0.1", "J-max, sequential, η = 0.1", "game, sequential, η = 0.3",
    "game, sequential, safe step", "game, simultaneous, safe step",
)  # fmt: skip
"""Methods that the page shows."""


def _among_few(cells: list[str]) -> bool:
    return cells[0] in FEW


def _game_alone(cells: list[str]) -> bool:
    return _among_few(cells) and not cells[0].startswith(("J", "game, stratified"))


def _few_datasets(cells: list[str]) -> bool:
    is_sequential = cells[0] == "MU" or cells[0].startswith("game, sequential")
    return _among_few(cells) and (is_sequential or (cells[1] != "500" and cells[0].startswith("J")))


TABLES: dict[str, tuple[str, Callable[[Runs], str]]] = {
    "convergence": ("game-convergence", convergence),
    "bases": ("game-convergence", bases),
    "datasets": ("game-datasets", datasets),
    "trajectories": ("game-trajectories", trajectories),
    "measured": ("game-workers", measured),
    "counted": ("game-workers", counted),
    "maps": ("game-workers", maps),
    "ratings": ("game-ratings", held_out),
    "ratings-in-short": ("game-ratings", held_out_in_short),
    "parties": ("game-parties", parties),
    "leak": ("game-leak", leaks),
}
SHORT: dict[str, tuple[str, Callable[[str], str]]] = {
    "convergence-in-short": ("convergence", lambda table: select(table, _game_alone)),
    "bases-in-short": ("bases", lambda table: select(table, _among_few)),
    "datasets-in-short": ("datasets", lambda table: select(table, _few_datasets, (0, 1, 2, 5, 6))),
}
"""Excerpts that the page shows: the table, and what of it."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Update the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--print", action="store_true", help="print every table, also those that the page leaves out")
    parser.add_argument("--document", type=Path, default=Path("docs/results/game.md"))
    chosen = parser.parse_args(arguments)
    found = {file: read_lines(chosen.folder / f"{file}.jsonl") for file, _ in TABLES.values()}
    tables = {name: table(found[file]) for name, (file, table) in TABLES.items() if found[file]}
    if chosen.print:
        print_tables(tables)
    tables |= {name: shortened(tables[table]) for name, (table, shortened) in SHORT.items() if table in tables}
    replace_tables(chosen.document, tables)
    for name, picture in drawn_from(found).items():
        chosen.document.with_name(f"{name}.svg").write_text(picture, "utf-8")


if __name__ == "__main__":
    main()
