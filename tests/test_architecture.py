"""The rules of the tree, checked on the syntax trees of src/partsong: rooms, names, no pickles, long modules."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"
PACKAGE = "partsong"

ROOMS = (
    "errors", "core", "kernels", "data", "io", "aggregation", "sketch", "solvers", "privacy", "secure_aggregation",
    "evaluation", "engines", "methods", "training", "attacks", "selection", "reporting", "estimators", "topics",
    "console", "federation", "cli",
)  # fmt: skip
"""A room imports those before it, never one after it. `selection` is not built yet."""

AT_THE_TOP = {"__init__", "__main__", "errors"}
"""All modules that are in no room."""

ENGINES_IMPORT = {"errors", "core", "engines"}
"""Engines know nothing of NMF."""


PROGRAM = {"start_server", "start_party", "local", "finish"}
"""Methods by which a class is a program."""

OPTIONAL = {
    "anndata": {"io.columnar", "io.weights"},
    "cryptography": {
        "secure_aggregation.crypto", "topics.agreement.encoding", "federation.setup.credentials",
        "federation.flower.control", "federation.flower.site_process",
    },
    "dp_accounting": {"privacy.accounting"},
    "flwr": {"federation.flower", "federation.transports.flower"},
    "h5py": {"io.columnar"},
    "httpx": {"federation.flower"},
    "matplotlib": set(),
    "mpi4py": {"engines.mpi"},
    "msgspec": {"federation"},
    "pandas": {"io.weights"},
    "polars": set(),
    "pyarrow": {"io.columnar", "io.weights"},
    "tomli_w": {"federation.toml_files"},
    "torch": {
        "aggregation.alignment", "cli.ranks", "core.codec", "data.conversion", "data.tensor",
        "engines.torch_distributed", "estimators.compare", "kernels.torch_backend", "methods.mutual_information",
        "secure_aggregation.fixed_point", "sketch.placed", "topics.fitting",
    },
    "triton": set(),
    "uvicorn": {"federation.flower"},
}  # fmt: skip
"""Package that is optional, or that not every import should pay for -> the modules, or packages of ours, that may
import it."""

LAZY = {
    "partsong", "partsong.core.states", "partsong.kernels", "partsong.methods", "partsong.methods.registry",
    "partsong.cli.main",
}  # fmt: skip
"""Where imports of our own modules inside functions are the purpose."""

INSIDE_FUNCTIONS = 15
UPWARD = 0
"""How many imports of our own modules there are inside functions elsewhere, and from a room to a later one. These
numbers may only fall: lower them when you remove one."""

PICKLES = {"pickle", "_pickle", "cPickle", "joblib", "cloudpickle", "dill", "marshal", "shelve"}
PICKLING_CALLS = {"read_pickle", "to_pickle"}
VAGUE_MODULES = {"utils", "util", "common", "misc", "helpers", "helper"}
VAGUE_CLASS = re.compile(r"^_*Base(?=[A-Z]|$)|(Manager|Helper)$")

LINES_TO_MENTION = 500
LINES_TO_EXPLAIN = 700
LONG_FOR_A_REASON = {
    "partsong.core.interfaces": "all nouns and protocols of the architecture, to be read in one go",
    "partsong.estimators.federated_nmf": "one estimator, whose docstring is its reference page",
}
"""Module -> why it is longer than `LINES_TO_EXPLAIN`. A file is never split to pass."""


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    tree: ast.Module
    n_lines: int

    @property
    def room(self) -> str:
        """The first name below the package: 'engines' of partsong.engines.local; '' for the package itself."""
        return room_of(self.name)

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


def room_of(name: str) -> str:
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
    """The longest prefix of a dotted name that is a module of ours: partsong.core.codec.pack -> partsong.core.codec."""
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
    assert f"{PACKAGE}.core.interfaces" in MODULES


def test_every_module_is_in_a_room():
    at_the_top = {path.stem for path in (SOURCE / PACKAGE).glob("*.py")}
    assert at_the_top <= AT_THE_TOP, f"Nothing else stands at the top: {sorted(at_the_top - AT_THE_TOP)}"
    rooms = {module.room for module in MODULES.values()} - {"", "__main__"}
    assert rooms <= set(ROOMS), f"Unknown rooms: {sorted(rooms - set(ROOMS))}. Rooms and their order are in ROOMS."


def upward_imports(module: Module) -> set[str]:
    """Modules of ours that this one imports from later rooms, or from the package itself, in whatever way."""
    if module.room not in ROOMS:
        return set()
    allowed = ROOMS[: ROOMS.index(module.room) + 1]
    return {name for name in own_imports(module) if room_of(name) not in allowed}


@every_module
def test_rooms_import_only_rooms_before_them(module):
    found = upward_imports(module)
    assert not found, f"{module.name} is in {module.room} and must not import {sorted(found)}; the order is in ROOMS"


@every_module
def test_engines_know_nothing_of_nmf(module):
    if module.room != "engines":
        return
    foreign = {name for name in own_imports(module) if room_of(name) not in ENGINES_IMPORT}
    assert not foreign, f"{module.name} may import core and errors only, but imports {sorted(foreign)}"


@every_module
def test_the_command_line_is_a_thin_layer(module):
    if module.room != "cli":
        return
    federation = {name for name in own_imports(module) if room_of(name) == "federation"}
    assert not federation, f"{module.name} must not import {sorted(federation)}; cli/main.py names commands"
    for found in (node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)):
        methods = {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}
        is_engine = "run" in methods and "program" in {each.arg for each in methods["run"].args.args}
        is_alien = is_engine or methods.keys() >= PROGRAM or "outcome" in methods
        assert not is_alien, f"{module.name}: {found.name} belongs into the library, not into the command line"


@every_module
def test_optional_packages_are_imported_where_they_are_needed(module):
    imported = {name.split(".")[0] for name in imported_names(module, ast.walk(module.tree))}
    inside = module.name.removeprefix(f"{PACKAGE}.")
    for package in imported & OPTIONAL.keys():
        places = OPTIONAL[package]
        is_allowed = any(inside == place or inside.startswith(f"{place}.") for place in places)
        assert is_allowed, f"{module.name} imports {package}, which is for {sorted(places)}"


@every_module
def test_names_of_imported_modules_can_be_read(module):
    """So that the rules above see them; `optional` takes packages by name, and the others are lazy by purpose."""
    if module.name in {*LAZY, f"{PACKAGE}.io.opening", f"{PACKAGE}.secure_aggregation.crypto"}:
        return
    for call in (node for node in ast.walk(module.tree) if isinstance(node, ast.Call)):
        if called_name(call) in {"import_module", "__import__"}:
            is_plain = bool(call.args) and isinstance(call.args[0], ast.Constant)
            assert is_plain, f"{module.name}, line {call.lineno}: import_module takes a name in quotes"
    renamed = [node for node in ast.walk(module.tree) if isinstance(node, ast.alias) and node.name == "import_module"]
    assert all(node.asname is None for node in renamed), f"{module.name}: import_module under another name"


def imports_inside_functions(module: Module) -> int:
    """How many times our own modules are imported inside functions, by statement or by import_module."""
    functions = (node for node in ast.walk(module.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    inside = {id(node): node for function in functions for node in ast.walk(function)}.values()
    statements = [node for node in inside if isinstance(node, ast.Import | ast.ImportFrom | ast.Call)]
    ours = (list(imported_names(module, iter([node]))) for node in statements)
    return sum(any(name.split(".")[0] == PACKAGE for name in names) for names in ours)


def test_imports_that_should_not_be_there_only_become_fewer():
    inside = sum(imports_inside_functions(m) for m in MODULES.values() if m.name not in LAZY)
    upward = sum(len(upward_imports(module)) for module in MODULES.values())
    assert (inside, upward) <= (INSIDE_FUNCTIONS, UPWARD), "Import at the top of the module, and from earlier rooms."
    assert (inside, upward) == (INSIDE_FUNCTIONS, UPWARD), f"Fewer than before: write {inside} and {upward} here."


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


def test_long_modules_have_a_reason(capsys):
    long = sorted((m.n_lines, m.name) for m in MODULES.values() if m.n_lines > LINES_TO_MENTION)
    n_lines = sum(module.n_lines for module in MODULES.values())
    with capsys.disabled():
        print(f"\n{len(MODULES)} modules, {n_lines} lines", end="")
        for n_lines, name in reversed(long):
            print(f"\n{name}: {n_lines} lines", end="")
    unexplained = [name for n, name in long if n > LINES_TO_EXPLAIN and name not in LONG_FOR_A_REASON]
    assert not unexplained, f"Say in LONG_FOR_A_REASON why these are one idea: {', '.join(unexplained)}"
