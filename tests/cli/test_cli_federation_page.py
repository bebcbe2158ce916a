"""Every command in the guides is one, with options that it has; every page that they name is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from partsong.cli.main import app
from partsong.federation.setup.credentials import README

DOCS = Path(__file__).parents[2] / "docs"
GUIDES = tuple(f"guide/{page.name}" for page in sorted((DOCS / "guide").glob("*.md")))
PAGES = (*GUIDES, "reference/security.md", "reference/protocol.md")


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
    assert named - {"--nproc-per-node"} <= {"--help", *options_of(get_command(app))}  # torchrun has the other one


def options_of(command):
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for name in getattr(command, "commands", {}):
        yield from options_of(command.resolve_command(None, [name])[1])


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
