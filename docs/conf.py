"""Settings of the documentation site. `make docs` builds it into build/docs without a network; warnings are errors."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent / "src")]

import generate  # noqa: E402

import partsong  # noqa: E402

generate.write(DOCS / "reference" / "generated")

project = "partsong"
author = "The partsong authors"
version = release = partsong.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["pictures"]
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # types in signatures: most are of NumPy, or of modules without a page
suppress_warnings = ["misc.highlighting_failure", "toc.empty_glob"]  # examples of JSON with "…" in them
highlight_language = "text"
default_role = "code"
smartquotes = False

myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_google_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"partsong {release}"
html_show_sphinx = False
html_copy_source = False
html_show_copyright = False

MARKUP = re.compile(r"(``?[^`]+``?)|(\w)_(?=[^\w`]|$)|(\||\*)")
"""Quoted code, which stays; and what is plain text in docstrings but markup to Sphinx."""

FIELD = re.compile(r"[\w, *]+ :")


def as_plain_text(app: Any, what: str, name: str, held: Any, options: Any, lines: list[str]) -> None:
    """Keep docstrings as they are written: indented blocks are formulas or code, and single characters no markup."""
    shown: list[str] = []
    in_sections = in_block = False
    for at, line in enumerate(lines):
        in_sections = in_sections or (lines[at + 1 : at + 2] != [] and lines[at + 1].startswith("---"))
        is_indented = line.startswith("    ") and not in_sections
        if is_indented and not in_block:
            in_block = not re.match(r"\s*[-\d]", next((one for one in reversed(shown) if one), ""))
            shown += ["", "::", ""] if in_block else []
        elif in_block and line and not is_indented:
            in_block = False
            shown.append("")
        is_field = FIELD.match(line) and any(one.startswith("---") for one in lines[:at])
        shown.append(line if in_block or is_field else MARKUP.sub(_escaped, line))
    lines[:] = shown


def _escaped(found: re.Match[str]) -> str:
    return found[1] or (f"{found[2]}\\_" if found[2] else f"\\{found[3]}")


def without_routing(app: Any, what: str, name: str, held: Any, skip: bool, options: Any) -> bool | None:
    """Leave out what scikit-learn gives every estimator for the routing of metadata."""
    return True if name.startswith("set_") and name.endswith("_request") else None


def links_on_the_site(app: Any, page: str, text: list[str]) -> None:
    """Files at the root of the repository have a page here; other files of it have none, and keep their names."""
    up = "../" * page.count("/")
    for name in generate.ROOT_PAGES:
        text[0] = text[0].replace(f"]({up}../{name}", f"]({up}reference/generated/{name.lower()}")
    text[0] = re.sub(rf"\[([^]]+)\]\({re.escape(up)}\.\./[^)]*\)", r"\1", text[0])


def setup(app: Any) -> None:
    """Connect to the events of a build; the first before napoleon, which turns sections into directives."""
    app.connect("autodoc-process-docstring", as_plain_text, priority=400)
    app.connect("autodoc-skip-member", without_routing)
    app.connect("source-read", links_on_the_site)
