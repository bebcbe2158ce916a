"""Tables and pictures of docs/results/game.md from the runs that the other experiments have written down.

    python -m experiments.game.report FOLDER

FOLDER holds game-convergence.jsonl, game-datasets.jsonl, game-trajectories.jsonl, game-workers.jsonl,
game-ratings.jsonl, game-parties.jsonl and game-leak.jsonl, or some of them. Text between `<!-- table: NAME -->` and
`<!-- end -->` is replaced; everything else in the document is left as it is.
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
    leaks,
    maps,
    measured,
    parties,
    trajectories,
)
from experiments.shared.document import replace_tables

TABLES: dict[str, tuple[str, Callable[[Runs], str]]] = {
    "convergence": ("game-convergence", convergence),
    "bases": ("game-convergence", bases),
    "datasets": ("game-datasets", datasets),
    "trajectories": ("game-trajectories", trajectories),
    "measured": ("game-workers", measured),
    "counted": ("game-workers", counted),
    "maps": ("game-workers", maps),
    "ratings": ("game-ratings", held_out),
    "parties": ("game-parties", parties),
    "leak": ("game-leak", leaks),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Renew the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--document", type=Path, default=Path("docs/results/game.md"))
    chosen = parser.parse_args(arguments)
    found = {file: read_lines(chosen.folder / f"{file}.jsonl") for file, _ in TABLES.values()}
    tables = {name: table(found[file]) for name, (file, table) in TABLES.items() if found[file]}
    replace_tables(chosen.document, tables)
    for name, picture in drawn_from(found).items():
        chosen.document.with_name(f"{name}.svg").write_text(picture, "utf-8")


if __name__ == "__main__":
    main()
