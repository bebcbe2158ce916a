"""The checks of words and links in `make docs`: they find what is wrong, and nothing else."""

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # spylls leaves a file open
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("check", ROOT / "docs" / "check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGE = """# A page about `fit`, *twice*

[here](#a-page-about-fit-twice) [there](other.md#one) [again](other.md#one-1) ![picture](picture.png)
[web](https://example.org/nowhere) `[code](nowhere.md)`

```
[code](nowhere.md)
```
"""
OTHER = "## One\n\ntext\n\n## One\n"


def test_links_that_lead_somewhere_pass(check, tmp_path):
    (tmp_path / "picture.png").touch()
    texts = {"page.md": PAGE, "other.md": OTHER}
    assert list(check.broken_links(texts, tmp_path, texts)) == []


@pytest.mark.parametrize(
    "link", ["[x](third.md)", "[x](other.md#two)", "[x](#nothing)", "[x](other.md#one-2)", "![x](none.png)"]
)
def test_links_that_lead_nowhere_are_found(check, tmp_path, link):
    texts = {"page.md": f"# Page\n\n{link}\n", "other.md": OTHER}
    (found,) = check.broken_links(texts, tmp_path, texts)
    assert found.startswith("page.md: ")


def test_links_of_a_page_in_a_folder_are_relative_to_it(check, tmp_path):
    texts = {"docs/guide/page.md": "[up](../other.md#one)\n", "docs/other.md": OTHER}
    assert list(check.broken_links(texts, tmp_path, texts)) == []


def test_words_in_prose_are_checked_and_code_is_not(check):
    pytest.importorskip("spylls")
    text = (
        "Rows stay at home. They're X_p, n_iter_, `wrogn`, a.wrogn, wrogn(x), NMF, α‖wrogn‖, [text](wrogn.md).\n\n"
        "```\nwrogn\n```\n\nPartsong's rows are wrogn.\n"
    )
    assert list(check.unknown_words({"page.md": text}, frozenset({"partsong"}))) == ["page.md:7: wrogn"]


def test_words_are_american_and_those_of_the_project(check):
    pytest.importorskip("spylls")
    found = check.unknown_words({"page.md": "behaviour\nbehavior\nfnmf\n"}, frozenset({"fnmf"}))
    assert list(found) == ["page.md:1: behaviour"]


def test_the_list_of_words_is_sorted_and_says_nothing_twice():
    words = (ROOT / "docs" / "spelling.txt").read_text(encoding="utf-8").split()
    assert words == sorted({word.lower() for word in words})
