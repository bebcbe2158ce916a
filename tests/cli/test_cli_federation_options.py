"""The generated reference names every command on federations and audit logs, with all of its options and no others."""

from __future__ import annotations

import re

import pytest

from partsong.cli.main import PLACES

SECTION = re.compile(r"^#+ partsong ((?:federation|audit) [\w-]+)\n(.*?)(?=^#|\Z)", re.MULTILINE | re.DOTALL)
OPTIONS = re.compile(r"^\| ((?:`-[\w-]+`(?:, )?)+)", re.MULTILINE)


def commands():
    for group in ("federation", "audit"):
        for name, command in PLACES[group].load(group).commands.items():
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
