"""Check the words and the links of README, CONTRIBUTING, CHANGELOG and all pages; part of `make docs`.

Words are American English by Hunspell's dictionary (spylls, which needs no network), or in docs/spelling.txt. A
relative link names a file of the repository or a generated page; an anchor is a heading as code hosts number them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from posixpath import normpath

ROOT = Path(__file__).resolve().parents[1]
AT_ROOT = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
FENCE = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2[`~]*\s*?$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"!?\[(?:[^][]|\[[^]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
TARGET = re.compile(r"\]\([^)]*\)|<[^>\s]+>|https?://\S+|&\w+;|<!--.*?-->", re.DOTALL)
WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
NOT_A_WORD = re.compile(
    r"[\w./:@*=]*[\d²³_/@=*][\w./:@*=]*"  # paths, assignments, products
    r"|\b\w+\.\w[\w.]*"  # names with dots
    r"|\b\w+\([^)]*\)"  # calls
    r"|\w*[^\x00-\u024f\s‘’“”–—…•→]+\w*"  # formulas
)
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


def pages(root: Path) -> dict[str, str]:
    """Paths from the root, as text with slashes -> texts; without what is generated."""
    paths = [root / name for name in AT_ROOT] + sorted((root / "docs").rglob("*.md"))
    found = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths if path.exists()}
    return {name: text for name, text in found.items() if "/generated/" not in name}


# ---- links --------------------------------------------------------------------------------------------------------


def broken_links(texts: Mapping[str, str], root: Path, checked: Mapping[str, str]) -> Iterator[str]:
    """What each link of `checked` that leads nowhere says; `texts` are all pages that have headings."""
    for name, text in checked.items():
        for target in LINK.findall(CODE.sub("", FENCE.sub("", text))):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            place = normpath(str(PurePosixPath(name).parent / path)) if path else name
            if place not in texts and not (root / place).exists():
                yield f"{name}: {target} leads nowhere"
            elif anchor and place in texts and anchor not in anchors(texts[place]):
                yield f"{name}: {target} names no heading of {place}"


@cache
def anchors(text: str) -> frozenset[str]:
    """The anchors of a page's headings; of equal ones the second has -1 at its end, and so on."""
    found: dict[str, int] = {}
    for heading in HEADING.findall(FENCE.sub("", text)):
        shown = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"(?<!\w)[*_]+|[*_]+(?!\w)", "", shown).strip().lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return frozenset(slug if not more else f"{slug}-{more}" for slug, last in found.items() for more in range(last + 1))


# ---- words --------------------------------------------------------------------------------------------------------


def unknown_words(texts: Mapping[str, str], known: frozenset[str]) -> Iterator[str]:
    """Where a word is that neither the dictionary nor the project has."""
    from spylls.hunspell import Dictionary

    lookup = cache(Dictionary.from_files("en_US").lookup)
    for name, text in texts.items():
        for number, line in enumerate(prose(text).splitlines(), 1):
            for word in WORD.findall(NOT_A_WORD.sub(" ", line)):
                plain = word.replace("’", "'")
                stem = plain.removesuffix("'s").removesuffix("'")
                if len(stem) < 3 or any(letter.isupper() for letter in stem[1:]):
                    continue
                if stem.lower() not in known and not lookup(stem):
                    yield f"{name}:{number}: {word}"


def prose(text: str) -> str:
    """The text without code, targets of links and comments; lines keep their numbers."""
    for pattern in (FENCE, re.compile(r"<!--.*?-->", re.DOTALL), CODE, TARGET):
        text = pattern.sub(lambda found: " \n" * found[0].count("\n") or " ", text)
    return text


def main() -> int:
    """Print what is wrong; 1 if anything is."""
    import generate

    texts = pages(ROOT)
    made = {f"docs/reference/generated/{name}": text for name, text in generate.pages().items()}
    own = {name: text for name, text in made.items() if Path(name).stem not in ("contributing", "changelog")}
    known = frozenset((ROOT / "docs" / "spelling.txt").read_text(encoding="utf-8").split())
    found = [*broken_links(texts | made, ROOT, texts), *unknown_words(texts | own, known)]
    sys.stdout.writelines(f"{line}\n" for line in found)
    sys.stdout.write(f"{len(texts)} pages: {len(found)} links or words to mend\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
