"""The code in CONTRIBUTING.md is that of the library."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def quotes():
    spec = importlib.util.spec_from_file_location("quotes", ROOT / "docs" / "quotes.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_code_on_the_pages_is_that_of_the_library():
    module = quotes()
    for name in module.PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert module.filled(text) == text, "python docs/quotes.py --write"


def test_each_way_to_extend_the_library_is_shown():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for part in ("update rule", "loss", "sketch", "aggregation", "method", "engine", "transport", "file format"):
        section = (
            text.split(f"\n### A{'n' if part[0] in 'aeiou' else ''} {part}\n")[1].split("\n### ")[0].split("\n## ")[0]
        )
        assert "<!-- source: " in section, part
