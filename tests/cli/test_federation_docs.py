"""Commands in messages and pages: each can be given as printed, and each option is documented."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

import partsong
from partsong.cli.main import COMMANDS as TABLE
from partsong.cli.main import app
from partsong.federation.experiment import Experiment
from partsong.federation.policy import Policy
from partsong.federation.setup.credentials import README

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


SECTION = re.compile(r"^#+ partsong ((?:federation|audit) [\w-]+)\n(.*?)(?=^#|\Z)", re.MULTILINE | re.DOTALL)
OPTIONS = re.compile(r"^\| ((?:`-[\w-]+`(?:, )?)+)", re.MULTILINE)


def commands():
    for group in ("federation", "audit"):
        for name, command in TABLE[group].load(group).commands.items():
            yield f"{group} {name}", command


def options_of(command):
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


@pytest.fixture(scope="module")
def sections(generated):
    return dict(SECTION.findall((generated / "cli.md").read_text(encoding="utf-8")))


@pytest.mark.parametrize(("name", "command"), list(commands()), ids=[name for name, _ in commands()])
def test_the_page_has_all_options_of_a_command_and_no_others(name, command, sections):
    named = {option for row in OPTIONS.findall(sections[name]) for option in re.findall(r"`(-[\w-]+)`", row)}
    assert named == {option for option in options_of(command) if option.startswith("-")}


def test_the_page_has_no_other_commands(sections):
    assert set(sections) == dict(commands()).keys()


DOCS = Path(__file__).parents[2] / "docs"
GUIDES = tuple(f"guide/{page.name}" for page in sorted((DOCS / "guide").glob("*.md")))
TUTORIALS = tuple(f"tutorials/{page.name}" for page in sorted((DOCS / "tutorials").glob("*.md")))
PAGES = (*GUIDES, *TUTORIALS, "reference/security.md", "reference/protocol.md")


def command_lines():
    for page in PAGES:
        text = (DOCS / page).read_text(encoding="utf-8")
        blocks = "\n".join(re.findall(r"```\n(.*?)```", text, re.DOTALL))
        yield from ((page, line) for line in blocks.splitlines() if line.startswith("partsong "))
        quoted = re.findall(r"`(partsong (?:federation|audit|info|check|transform)[^`]*)`", text)
        yield from ((page, line) for line in quoted)
    yield from (("README of a kit", line.strip()) for line in re.findall(r"partsong federation .*", README))


@pytest.mark.parametrize(("page", "line"), sorted(set(command_lines())))
def test_a_command_in_a_page_is_one(page, line):
    words = shlex.split(line, comments=True)[1:]
    command = get_command(app)
    while words and hasattr(command, "commands"):
        name = words.pop(0).rstrip(".,")
        assert name in command.commands, f"{page}: {line}"
        _, command, _ = command.resolve_command(None, [name])
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    used = {word for word in words if word.startswith("-") and word != "-"}
    assert used <= known, f"{page}: {line}"


@pytest.mark.parametrize("page", GUIDES)
def test_an_option_in_a_guide_is_one(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", re.sub(r"`python -m experiments[^`]*`", "", text)))
    assert named - {"--nproc-per-node"} <= {"--help", *options_of_page(get_command(app))}  # torchrun has the other one


def options_of_page(command):
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for name in getattr(command, "commands", {}):
        yield from options_of_page(command.resolve_command(None, [name])[1])


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page, generated):
    text = (DOCS / page).read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", text):
        other = (DOCS / page).parent / target if target else DOCS / page
        other = generated / other.name if other.parent.name == "generated" else other
        assert other.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", other.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{target}#{anchor}"


def test_every_table_in_the_guide_is_an_experiment_or_a_policy():
    text = (DOCS / "guide" / "federation.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    experiments = [block for block in blocks if block.startswith("# experiment.toml")]
    assert len(experiments) == 4
    for block in blocks:
        (Experiment if block in experiments else Policy).from_table(tomllib.loads(block))
        if block not in experiments:
            keys = tomllib.loads(re.sub(r"^# (?=\w+ = |\[)", "", block, flags=re.MULTILINE))
            Policy.from_table(keys)
