"""The rules of the tree, checked on the syntax trees of src/partsong: who imports whom, names, sizes, no pickles."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"
PACKAGE = "partsong"

ONLY = {
    "errors": set(),
    "core": {"errors"},
    "streams": {"errors"},
    "threads": {"errors"},
    "engines": {"core", "errors", "streams", "threads", "engines"},
    "kernels": {"errors", "threads", "kernels"},
}
"""Top-level part -> the only parts of ours that it may import."""

PARTS = ("local", "sketch", "align", "privacy", "aggregate", "data", "evaluate", "io", "text", "mutual")
NEVER = {part: {"engines", "programs", "estimator", "federation", "cli"} for part in PARTS} | {
    "programs": {"engines", "estimator", "federation", "cli"},
    "federation": {"estimator", "federated", "cli"},
}
"""Top-level part -> the parts of ours that it may not import."""

PICKLES = {"pickle", "_pickle", "cPickle", "joblib", "cloudpickle", "dill", "marshal", "shelve"}
PICKLING_CALLS = {"read_pickle", "to_pickle"}
VAGUE_MODULES = {"utils", "util", "common", "misc", "helpers", "helper"}
VAGUE_CLASS = re.compile(r"^_*Base(?=[A-Z]|$)|(Manager|Helper)$")

LINES_TO_MENTION = 200
LINES_TO_REFUSE = 400


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    tree: ast.Module
    n_lines: int

    @property
    def part(self) -> str:
        """The first name below the package: 'engines' of partsong.engines.threaded; '' for the package itself."""
        return part_of(self.name)

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


def part_of(name: str) -> str:
    return [*name.split("."), ""][1]


def read(path: Path) -> Module:
    text = path.read_text(encoding="utf-8")
    names = path.relative_to(SOURCE).with_suffix("").parts
    name = ".".join(names[:-1] if names[-1] == "__init__" else names)
    return Module(name, path, ast.parse(text, filename=str(path)), len(text.splitlines()))


MODULES = {module.name: module for module in map(read, sorted((SOURCE / PACKAGE).rglob("*.py")))}
every_module = pytest.mark.parametrize("module", MODULES.values(), ids=MODULES.keys())


def imported_names(module: Module, nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Dotted names that these nodes import, by statement or by import_module("…"), absolute."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = absolute(module, node.module or "", node.level)
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and called_name(node) in {"import_module", "__import__"} and node.args:
            target = node.args[0]
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                bare = target.value.lstrip(".")
                yield absolute(module, bare, len(target.value) - len(bare))


def absolute(module: Module, name: str, level: int) -> str:
    if level == 0:
        return name
    up = level - 1 if module.is_package else level
    origin = module.name.split(".")
    return ".".join(origin[: len(origin) - up] + ([name] if name else []))


def called_name(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def resolve(name: str) -> str | None:
    """The longest prefix of a dotted name that is a module of ours: core.codec.pack -> core.codec."""
    parts = name.split(".")
    candidates = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((candidate for candidate in candidates if candidate in MODULES), None)


def own_imports(module: Module, *, at_run_time_only: bool = False) -> set[str]:
    nodes = run_time_nodes(module.tree) if at_run_time_only else ast.walk(module.tree)
    ours = (name for name in imported_names(module, nodes) if name.split(".")[0] == PACKAGE)
    return {found for name in ours if (found := resolve(name))} - {module.name}


def run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and getattr(node.test, "attr", getattr(node.test, "id", "")) == "TYPE_CHECKING":
            for other in node.orelse:
                yield other
                yield from run_time_nodes(other)
            continue
        yield node
        yield from run_time_nodes(node)


def test_there_is_something_to_check():
    assert f"{PACKAGE}.core" in MODULES


@every_module
def test_parts_import_only_what_they_may(module):
    if module.part not in ONLY:
        return
    foreign = {name for name in own_imports(module) if part_of(name) not in ONLY[module.part]}
    assert not foreign, f"{module.name} may import only {sorted(ONLY[module.part])} of ours, but imports {foreign}"


@every_module
def test_parts_stay_below_what_uses_them(module):
    forbidden = {name for name in own_imports(module) if part_of(name) in NEVER.get(module.part, set())}
    assert not forbidden, f"{module.name} must not import {forbidden}"


def test_no_cycles_among_modules():
    graph = {name: own_imports(module, at_run_time_only=True) for name, module in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("These modules import each other: " + " <- ".join(error.args[1]))


@every_module
def test_nothing_can_unpickle(module):
    roots = {name.split(".")[0] for name in imported_names(module, ast.walk(module.tree))}
    assert not roots & PICKLES, f"{module.name} imports {roots & PICKLES}; files must not be able to run code"
    for call in (node for node in ast.walk(module.tree) if isinstance(node, ast.Call)):
        where = f"{module.name}, line {call.lineno}"
        assert called_name(call) not in PICKLING_CALLS, f"{where}: {called_name(call)}"
        for keyword in call.keywords:
            refused = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            assert keyword.arg != "allow_pickle" or refused, f"{where}: allow_pickle must be False"


@every_module
def test_names_say_something(module):
    assert not VAGUE_MODULES & set(module.name.split(".")), f"{module.name}: name a module after what it holds"
    classes = {node.name for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)}
    vague = {name for name in classes if VAGUE_CLASS.search(name)}
    assert not vague, f"{module.name}: no Base…, …Manager, …Helper: {vague}"


def test_modules_are_short(capsys):
    long = sorted((m.n_lines, m.name) for m in MODULES.values() if m.n_lines > LINES_TO_MENTION)
    with capsys.disabled():
        for n_lines, name in reversed(long):
            print(f"\n{name}: {n_lines} lines (aim: {LINES_TO_MENTION}, limit: {LINES_TO_REFUSE})", end="")
    refused = [f"{name} ({n_lines} lines)" for n_lines, name in long if n_lines > LINES_TO_REFUSE]
    assert not refused, f"Split these: {', '.join(refused)}"
