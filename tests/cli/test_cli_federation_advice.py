"""A command that an error, a log or a note of federations names can be given as it is printed."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

import partsong
from partsong.cli.main import app

SOURCE = Path(partsong.__file__).parent
PATTERNS = ("federation/**/*.py", "cli/federation*.py", "cli/audit.py")
NO_ADVICE = ("credentials.py",)
"""Names of certificates look like commands."""
MODULES = sorted(path for pattern in PATTERNS for path in SOURCE.glob(pattern) if path.name not in NO_ADVICE)
COMMANDS = get_command(app)
NAMED = re.compile(
    rf"partsong (?:{'|'.join(COMMANDS.commands)})\b" + r"""(?:"[^"]*"|[^`)\n"])*?(?=[`)\n]|[.,;:](?:\s|$)|$)"""
)
"""Up to the end of a sentence, a part of one, or what stands in brackets; texts in quotes may have all that in them."""


def texts_in(tree):
    """All texts but docstrings; a value that is only known later is a 1, which can be a number, a name or a path."""
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "1" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare | parts:
            yield node.value


def named_commands():
    for path in MODULES:
        for text in texts_in(ast.parse(path.read_text(encoding="utf-8"))):
            yield from ((path.name, found) for found in NAMED.findall(text))


def require_usable(line):
    """Read by the command line's own parser, without being run."""
    command, words = COMMANDS, shlex.split(line)[1:]
    assert "…" not in words
    while hasattr(command, "commands"):
        _, command, words = command.resolve_command(None, words)
    command.make_context("partsong", words)


@pytest.mark.parametrize(("module", "line"), sorted(set(named_commands())))
def test_a_command_that_a_text_names_can_be_given_as_it_is_printed(module, line):
    require_usable(line)


def test_there_are_such_commands():
    found = {module for module, _ in named_commands()}
    assert {"consistency.py", "site_folder.py", "texts.py", "server.py"} <= found


@pytest.mark.parametrize(
    "line", ["partsong audit opening FOLDER --releases 2", "partsong audit verify", "partsong federation join"]
)
def test_a_command_without_what_it_needs_cannot(line):
    with pytest.raises(Exception, match="Missing"):
        require_usable(line)
