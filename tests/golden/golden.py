"""Golden arrays: write those of named cases, or all of them elsewhere, to compare two commits on one machine.

    python tests/golden/golden.py --write "NMF hals" "exact"    results of these cases change on purpose
    python tests/golden/golden.py --new                         cases that have no array yet
    python tests/golden/golden.py --to FOLDER                   all, with every digit: `diff -r` compares two commits

An array is a line of JSON, so that the diff of a commit names the cases that it changes. Floats are written by `repr`,
which tells all their bits.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cases import CASES, GROUPS

HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-9
TOLERANCES = {"NMF hals, float32": 1e-5}
"""Of cases in single precision."""


def load(folder: Path = HERE) -> dict[str, np.ndarray]:
    """All golden arrays by name."""
    files = (folder / f"{group}.json" for group in GROUPS)
    stored = [json.loads(path.read_text()) for path in files if path.exists()]
    return {name: np.array(rows) for group in stored for name, rows in group.items()}


def save(arrays: dict[str, np.ndarray], folder: Path = HERE) -> None:
    """One file for each group, one line for each array."""
    groups = {name: group for (name, _), (group, _) in CASES.items()}
    for group in GROUPS:
        lines = [
            f"{json.dumps(name)}: {json.dumps(np.asarray(array).tolist())}"
            for name, array in sorted(arrays.items())
            if groups.get(name) == group
        ]
        (folder / f"{group}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def first_cases() -> dict[str, tuple[str, str]]:
    """Name -> the case that its array is made with."""
    found: dict[str, tuple[str, str]] = {}
    for name, engine in CASES:
        found.setdefault(name, (name, engine))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Write golden arrays.")
    parser.add_argument("--write", nargs="+", default=[], metavar="CASE", help="cases whose results change on purpose")
    parser.add_argument("--new", action="store_true", help="cases without an array; drops arrays without a case")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="write all engines' arrays there, none here")
    given = parser.parse_args()
    first = first_cases()
    if given.to:
        given.to.mkdir(parents=True, exist_ok=True)
        for (name, engine), (_, case) in CASES.items():
            path = given.to / f"{name.replace(' ', '-').replace(',', '')}@{engine.replace(' ', '-')}.json"
            path.write_text(json.dumps(np.asarray(case()).tolist()) + "\n")
        return
    if unknown := set(given.write) - set(first):
        parser.error(f"no such case: {', '.join(sorted(unknown))}. Names are the keys of tests/golden/*.json.")
    arrays = {name: array for name, array in load().items() if name in first or not given.new}
    wanted = {*given.write, *(set(first) - set(arrays) if given.new else ())}
    for name in sorted(wanted):
        arrays[name] = CASES[first[name]][1]()
    save(arrays)
    print(f"Wrote {len(wanted)} of {len(first)} arrays.")


if __name__ == "__main__":
    main()
