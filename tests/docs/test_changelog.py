"""CHANGELOG.md names what was renamed, and the version that it is about."""

import re
from pathlib import Path

import pytest

import partsong
from partsong.core import renamed

ROOT = Path(__file__).resolve().parents[2]
SECTION = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1]
VALUES = {old: new for values in renamed.VALUES.values() for old, new in values.items()}
PAIRS = {**renamed.PARAMETERS, **renamed.METHODS, **VALUES, **renamed.OPTIONS, **renamed.COMMANDS}


def test_the_first_section_is_that_of_this_version():
    assert SECTION.startswith(f"{partsong.__version__}\n")
    assert f'\nversion = "{partsong.__version__}"\n' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("old", PAIRS)
def test_a_name_that_has_changed_is_in_the_table(old):
    rows = [line.split(" | ") for line in SECTION.splitlines() if line.startswith("| ")]
    assert any(_has(row[1], old) and _has(row[2], PAIRS[old]) for row in rows if len(row) == 3), f"{old} → {PAIRS[old]}"


def _has(cell, name):
    return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", cell) is not None
