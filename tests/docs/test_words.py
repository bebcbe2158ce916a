"""Code, help texts, messages and pages keep to the words of the field: a private vocabulary does not come back."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORDS = {
    "told", "seat", "seats", "desk", "desks", "heard", "hears", "anew", "company", "companies", "bystander",
    "bystanders", "whoever",
}  # fmt: skip
PHRASES = re.compile(
    r"\b(of ours|ran away|falls? silent|is no number|beyond all measure|that is to be)\b", re.IGNORECASE
)
PART = re.compile(r"[A-Z]?[a-z]+")
"""A word of an identifier, too: CamelCase and snake_case are taken apart."""

SOURCES = sorted((ROOT / "src").rglob("*.py"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if "generated" not in page.parts),
]


def found_in(text, words=WORDS):
    return sorted({word.lower() for word in PART.findall(text)} & words) + PHRASES.findall(text)


@pytest.mark.parametrize("path", [*SOURCES, *PAGES], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_words_of_the_field(path):
    words = WORDS - {"desk", "desks"} if path in PAGES else WORDS  # a tutorial is about help desks
    assert not found_in(path.read_text(encoding="utf-8"), words)


def test_parts_of_names_are_words():
    assert found_in("class SeatHolder: def as_told(self): ...") == ["seat", "told"]
    assert found_in("It fell back to the seated companion.") == []
