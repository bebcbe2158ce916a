"""Run the code of a tutorial, and compare what it prints with what the page shows.

A ```python block runs in one namespace per page, a ```bash block in a shell, both in one folder. A ```text block right
after it is what it prints; "…" there stands for anything within a line. To fill in what is printed:

    python tests/docs/tutorials.py docs/tutorials/topics.md --write
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(
    r"^```(?P<language>python|bash)\n(?P<code>.*?)^```\n(?:\n*^```text\n(?P<shown>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)


MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")


def oversubscribing():
    """Options of Open MPI for more ranks than cores."""
    version = subprocess.run([MPIEXEC, "--version"], capture_output=True, text=True, check=False).stdout
    return ["--oversubscribe"] if "Open MPI" in version or "PRRTE" in version else []


@dataclass
class Block:
    language: str
    code: str
    shown: str | None
    line: int
    end: int


def blocks_of(text):
    """The blocks that are run, in their order."""
    return [
        Block(found["language"], found["code"], found["shown"], text[: found.start()].count("\n") + 1, found.end())
        for found in BLOCK.finditer(text)
    ]


class Runner:
    """A folder, a namespace and a shell in which `partsong` is the one that is tested."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.namespace = {"__name__": "__tutorial__"}
        programs = self.folder / ".programs"
        programs.mkdir()
        scripts = {"partsong": f'"{sys.executable}" -m partsong', "python": f'"{sys.executable}"'}
        if MPIEXEC is not None:
            scripts["mpiexec"] = f'"{MPIEXEC}" {" ".join(oversubscribing())}'
        for name, command in scripts.items():
            script = programs / name
            script.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
            script.chmod(0o755)
        self.environment = {
            **os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "120", "NO_COLOR": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PYTHONPATH": os.pathsep.join(one for one in sys.path if one), "PYTHONIOENCODING": "utf-8",
        }  # fmt: skip

    def run(self, block):
        """What a block prints; a block that fails is an AssertionError."""
        if block.language == "bash":
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.code],
                cwd=self.folder, env=self.environment, capture_output=True, encoding="utf-8", check=False, timeout=300,
            )  # fmt: skip
            assert done.returncode == 0, f"line {block.line}:\n{block.code}\n{done.stdout}{done.stderr}"
            return done.stdout
        printed = io.StringIO()
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(printed):
            exec(compile(block.code, f"line {block.line}", "exec"), self.namespace)
        return printed.getvalue()


def is_shown(printed, shown):
    """Whether what was printed is what the page shows."""
    pattern = "[^\n]*".join(re.escape(part) for part in _stripped(shown).split("…"))
    return re.fullmatch(pattern, _stripped(printed)) is not None


def _stripped(text):
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def main(path, write):
    text = Path(path).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        runner, made, at = Runner(folder), [], 0
        for found, block in zip(BLOCK.finditer(text), blocks_of(text), strict=True):
            printed = runner.run(block)
            made.append(text[at : found.start()])
            at = found.end()
            if block.shown is None or is_shown(printed, block.shown):
                made.append(found[0])
                if block.shown is None and printed.strip():
                    print(f"line {block.line} prints, and the page does not show it:\n{printed}")
            else:
                print(f"line {block.line} prints:\n{_stripped(printed)}")
                made.append(f"```{block.language}\n{block.code}```\n\n```text\n{_stripped(printed)}\n```\n")
        made.append(text[at:])
    if write:
        Path(path).write_text("".join(made), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], "--write" in sys.argv)
