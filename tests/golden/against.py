"""Compare this tree with an earlier commit, on this machine: test names that are gone, results that differ in a bit.

    python tests/golden/against.py COMMIT [--moves OLD=NEW ...]

For commits that must not change behaviour. --moves renames parts of old test names, such as files that moved. Both
trees are run with this Python and its packages. The exit code is 1 if anything is gone or differs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python(tree: Path, *words: str) -> str:
    """What a command prints, with the package of that tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    done = subprocess.run(
        [sys.executable, *words], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed in {tree}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def test_names(tree: Path) -> set[str]:
    return {line for line in python(tree, "-m", "pytest", "tests", "--collect-only").splitlines() if "::" in line}


def results(tree: Path, folder: Path) -> dict[str, bytes]:
    python(tree, "tests/golden/golden.py", "--to", str(folder))
    return {path.stem: path.read_bytes() for path in folder.iterdir()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare test names and bits of results with an earlier commit.")
    parser.add_argument("commit")
    parser.add_argument("--moves", nargs="+", default=[], metavar="OLD=NEW", help="renamed parts of old test names")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder, "old")
        subprocess.run(["git", "worktree", "add", "-q", "--detach", str(old), given.commit], cwd=ROOT, check=True)
        try:
            before, now = test_names(old), test_names(ROOT)
            stored, made = results(old, Path(folder, "before")), results(ROOT, Path(folder, "now"))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(old)], cwd=ROOT, check=True)
    for move in given.moves:
        was, _, becomes = move.partition("=")
        before = {name.replace(was, becomes) for name in before}
    gone, other = sorted(before - now), sorted(name for name in stored if stored[name] != made.get(name))
    print(f"tests: {len(before)} before, {len(now)} now, {len(gone)} gone, {len(now - before)} new")
    print(*(f"  gone: {name}" for name in gone), sep="\n")
    print(f"results: {len(stored)} before, {len(made)} now, {len(other)} differ")
    print(*(f"  differs: {name}" for name in other), sep="\n")
    raise SystemExit(bool(gone or other))


if __name__ == "__main__":
    main()
