"""Fill pages with source code: after `<!-- source: PATH NAME … -->` a block has these names of the file as they are.

python docs/quotes.py            # what has changed since; part of the tests
python docs/quotes.py --write    # fill in today's code
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("CONTRIBUTING.md",)
QUOTE = re.compile(r"(<!-- source: (\S+) ([^>]+?) -->\n```python\n)(.*?)(^```$)", re.MULTILINE | re.DOTALL)


def filled(text: str) -> str:
    """The page with today's code in each of its blocks."""
    return QUOTE.sub(lambda found: found[1] + _code(found[2], found[3].split()) + found[5], text)


def _code(path: str, names: list[str]) -> str:
    source = (ROOT / path).read_text(encoding="utf-8")
    tree = ast.parse(source)
    return "\n\n\n".join(_segment(source, tree, name) for name in names) + "\n"


def _segment(source: str, tree: ast.Module, name: str) -> str:
    """The lines of a class, a function, a method (Class.method) or an assignment, with their decorators."""
    node: ast.AST = tree
    for part in name.split("."):
        node = next(one for one in getattr(node, "body", ()) if part in _names(one))
    decorators = getattr(node, "decorator_list", ())
    first = min(one.lineno for one in (*decorators, node))  # type: ignore[attr-defined]
    lines = source.splitlines()[first - 1 : node.end_lineno]  # type: ignore[attr-defined]
    return textwrap.dedent("\n".join(lines))


def _names(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Assign):
        return {one.id for one in node.targets if isinstance(one, ast.Name)}
    return {getattr(node, "name", "")}


def main(write: bool) -> int:
    """Fill the pages, or say which of them are not as the code is."""
    old = []
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        if filled(text) != text:
            old.append(name)
            if write:
                (ROOT / name).write_text(filled(text), encoding="utf-8")
    for name in old:
        sys.stdout.write(f"{name}: {'filled' if write else 'run python docs/quotes.py --write'}\n")
    return 1 if old and not write else 0


if __name__ == "__main__":
    sys.exit(main("--write" in sys.argv))
