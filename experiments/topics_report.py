"""Tables and pictures of docs/results/topics.md from the runs that the other experiments have written down.

    python -m experiments.topics_report docs/results/topics.jsonl

Text between `<!-- table: NAME -->` and `<!-- end -->` is replaced; everything else in the document is left as it is.
What has not been run is a dash.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from experiments.fnmf_report import BLOCK, renewed
from experiments.topics_corpora import PREPARED, SOURCES, table_two
from experiments.topics_drawings import drawn_from
from experiments.topics_figure_tables import ablation, longer, over_parties, over_ranks, topics
from experiments.topics_runs import known
from experiments.topics_table import OUTPUT
from experiments.topics_tables import beyond, costs, information, information_in_short, missing, quality, tuning

RANKS = (50, 100, 200)
TABLES = {
    "f1": partial(quality, field="f1", ranks=RANKS),
    "f1-50": partial(quality, field="f1", ranks=(50,)),
    "accuracy": partial(quality, field="accuracy", ranks=RANKS),
    "accuracy-50": partial(quality, field="accuracy", ranks=(50,)),
    "coherence": partial(quality, field="coherence", ranks=RANKS),
    "coherence-50": partial(quality, field="coherence", ranks=(50,)),
    "before": partial(quality, field="f1", ranks=RANKS, reading="before"),
    "before-50": partial(quality, field="f1", ranks=(50,), reading="before"),
    "information": information,
    "information-in-short": information_in_short,
    "costs": costs,
    "beyond": beyond,
    "tuning": tuning,
    "ranks": over_ranks,
    "parties": over_parties,
    "topics": topics,
    "ablation": ablation,
    "longer": longer,
    "missing": missing,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Renew the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=OUTPUT)
    parser.add_argument("--document", type=Path, default=Path("docs/results/topics.md"))
    chosen = parser.parse_args(arguments)
    found = known(chosen.file)
    tables = {name: table(found) for name, table in TABLES.items()}
    if all((PREPARED / f"{name}.npz").exists() for name in SOURCES):
        tables["corpora"] = table_two()
    text = chosen.document.read_text("utf-8")
    text = BLOCK.sub(lambda block: renewed(block, tables.get(block["name"])), text)
    chosen.document.write_text(text, "utf-8")
    for name, picture in drawn_from(found).items():
        chosen.document.with_name(f"{name}.svg").write_text(picture, "utf-8")


if __name__ == "__main__":
    main()
