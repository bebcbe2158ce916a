"""docs/guide/cli.md names every command on federations and audit logs, with all of its options and no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from partsong.cli.main import PLACES

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "cli.md"
ROW = re.compile(r"^\| `((?:federation|audit) [\w-]+)[^|]*\|([^|]*)\|", re.MULTILINE)
EVERYWHERE = {"--json", "--help"}


def commands():
    for group in ("federation", "audit"):
        for name, command in PLACES[group].load(group).commands.items():
            yield f"{group} {name}", command


def options_of(command):
    named = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return {option for option in named if option.startswith("--")} - EVERYWHERE


@pytest.mark.parametrize(("name", "command"), list(commands()), ids=[name for name, _ in commands()])
def test_the_page_has_all_options_of_a_command_and_no_others(name, command):
    rows = dict(ROW.findall(PAGE.read_text(encoding="utf-8")))
    of_run = {"--address"} if name == "federation serve" else set()
    assert set(re.findall(r"`(--[\w-]+)", rows[name])) - of_run == options_of(command)


def test_the_page_has_no_other_commands():
    assert set(dict(ROW.findall(PAGE.read_text(encoding="utf-8")))) == dict(commands()).keys()
