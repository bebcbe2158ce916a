"""Every tutorial runs from its first block to its last, and prints what it shows."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from tutorials import MPIEXEC, Runner, blocks_of, is_shown

PAGES = Path(__file__).resolve().parents[2] / "docs" / "tutorials"
NEEDED = {
    "scikit-learn": ("cryptography",),
    "single-cell": ("anndata", "pandas"),
    "topics": ("cryptography",),
    "cluster": ("mpi4py",),
    "consortium": ("cryptography",),
}
MOST_WORDS = 1100


@pytest.mark.parametrize("name", NEEDED)
def test_a_tutorial_runs_and_prints_what_it_shows(name, tmp_path):
    for module in NEEDED[name]:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    if name == "cluster" and MPIEXEC is None:
        pytest.skip("mpiexec is not installed")
    runner = Runner(tmp_path)
    for block in blocks_of((PAGES / f"{name}.md").read_text(encoding="utf-8")):
        printed = runner.run(block)
        assert is_shown(printed, block.shown or ""), f"line {block.line} prints:\n{printed}"


def test_the_example_of_the_readme_runs(tmp_path):
    (block,) = blocks_of((PAGES.parents[1] / "README.md").read_text(encoding="utf-8"))
    assert "pooled 25.8%, federated 25.8%" in Runner(tmp_path).run(block)


def test_every_tutorial_is_run():
    assert {path.stem for path in PAGES.glob("*.md")} == set(NEEDED)


@pytest.mark.parametrize("name", NEEDED)
def test_a_tutorial_is_short(name):
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert len(prose.split()) <= MOST_WORDS


def test_what_is_shown_may_leave_out_parts_of_a_line():
    assert is_shown("in 4.2 s\nend\n", "in … s\nend\n")
    assert not is_shown("in 4.2 s\nmore\nend\n", "in … s\nend\n")
    assert not is_shown("more\n", "")
