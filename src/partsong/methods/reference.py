"""Generate the table of methods and their reference page from the registry.

python -m partsong.methods.reference            # print the page, as the documentation site has it
python -m partsong.methods.reference --write    # write methods/table.py
"""

from __future__ import annotations

import inspect
import json
import pkgutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from partsong import methods
from partsong.core.interfaces import ArraySpec, Dim, Layout, Reducible
from partsong.core.parameters import Parameter
from partsong.methods import PARTIES, RANKS, TABLE, TEXTS
from partsong.methods.registry import Method, Problem, load
from partsong.methods.table import Entry

TABLE_FILE = Path(__file__).with_name("table.py")

FIRST = ("exact", "moment", "fnmf", "averaging", "secure_sketched", "dsanls", "game", "two_stage", "fednmf", "fedlda")
"""Order of modules on the page."""

K, M, N, PARTICIPANTS = 7, 1009, 5003, 3
"""Sizes from which names of dimensions are recovered: k components, m columns, n rows of all parties."""

DIMENSIONS: Mapping[int, Dim] = {
    K: "k",
    M: "m",
    4 * K: "4k",
    -(-M // 10): "⌈m/10⌉",
    -(-N // 10): "⌈n/10⌉",
    -(-M // PARTICIPANTS): "⌈m/N⌉",
    M + K + 1: "m + k + 1",
    M * (M + 1) // 2: "m (m + 1) / 2",
}

BEFORE_THE_TABLE = "TABLE: dict[str, Entry] = {"

INTRODUCTION = """# Methods

Generated from the registrations in `src/partsong/methods/`. `python -m partsong.methods.reference` prints this page.

Names, parameters and their values are the same everywhere:

| where | how |
|---|---|
| an estimator | `FederatedNMF(20, method="fedavg", method_options={"weighted": False})` |
| a program | `partsong.methods.build("fedavg", 20, weighted=False)` |
| the command line | `partsong fit parts/ -k 20 --method fedavg --weighted false` |
| experiment.toml | `method = "fedavg"`, and `weighted = false` beside it |

**Sent** lists what a party may send in an exchange. The program states it, and engines check every upload against it. A
program with several kinds of uploads sends one of them at a time. k is the number of components, m of columns, N of
parties, and n of rows of all parties. Rows X_p and weights W_p are never sent; [exposure](../exposure.md) says what can
be inferred from the arrays that are.
"""


def all_methods() -> list[Method]:
    """Return all methods of this package, and methods in the table that other packages registered."""
    modules = [one.name for one in pkgutil.iter_modules(methods.__path__) if one.name not in ("reference", "table")]
    ordered = sorted(modules, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))
    places = [f"{methods.__name__}.{name}" for name in ordered]
    places += [entry.module for entry in TABLE.values() if entry.module not in places]
    return [one for place in dict.fromkeys(places) for one in load(place).values()]


def tasks_of(one: Method) -> tuple[str, ...]:
    """Return the tasks a method can run."""
    between = not one.only_texts and not one.traits.needs_columns
    by_task = {PARTIES: between, TEXTS: one.texts is not None, RANKS: one.over_ranks}
    return tuple(task for task, is_one in by_task.items() if is_one)


def entry_of(one: Method) -> Entry:
    """Return the table entry of a method."""
    pooled = "" if one.texts is None else one.texts.pooled_name or ""
    module, parameters, required = one.builder.__module__, tuple(one.parameters), tuple(one.required)
    return Entry(module, one.summary, parameters, required, tasks_of(one), pooled)


def table() -> str:
    """Return the text of methods/table.py."""
    known = all_methods()
    head, _, _ = TABLE_FILE.read_text(encoding="utf-8").partition(BEFORE_THE_TABLE)
    lines = [head + BEFORE_THE_TABLE]
    for one in known:
        entry = entry_of(one)
        shown = [_text(entry.module), _text(entry.summary), _tuple(entry.parameters)]
        others = {name: getattr(entry, name) for name in Entry._fields[3:]}
        for name, part in others.items():
            if part != Entry._field_defaults[name]:
                shown.append(f"{name}={_text(part) if isinstance(part, str) else _tuple(part)}")
        lines += [f'    "{one.name}": Entry(', *(f"        {part}," for part in shown), "    ),"]
    lines += ["}  # fmt: skip", "", "CHOICES: dict[str, tuple[str, ...]] = {"]
    for name, names in choices(known).items():
        lines.append(f'    "{name}": {_tuple(names)},')
    lines += ["}  # fmt: skip", '"""Parameters with named values → all names, over all methods."""', ""]
    return "\n".join(lines)


def choices(known: list[Method]) -> dict[str, tuple[str, ...]]:
    """Map parameters to their named values over all methods, longest list first."""
    found: dict[str, tuple[str, ...]] = {}
    for one in known:
        for name, parameter in one.parameters.items():
            names = parameter.names
            if names and one.passes_to != name:
                longer, shorter = sorted((found.get(name, ()), names), key=len, reverse=True)
                found[name] = tuple(dict.fromkeys((*longer, *shorter)))
    return found


def page() -> str:
    """The text of the page."""
    known = all_methods()
    parts = [INTRODUCTION, *_overview(known)]
    for one in known:
        parts.append("\n".join(_section(one)))
    return "\n".join(parts)


def _section(one: Method) -> Iterator[str]:
    yield f"## {one.name}\n"
    yield one.summary + "\n"
    if further := _further(one):
        yield further + "\n"
    yield " · ".join(_facts(one)) + "\n"
    if one.parameters:
        yield "| parameter | values | default |\n|---|---|---|"
        yield from (_row(parameter) for parameter in one.parameters.values())
        yield ""
    yield "| sent | size | type | meaning |\n|---|---|---|---|"
    yield from dict.fromkeys(_sent(one))
    yield ""


def _further(one: Method) -> str:
    """The docstring after its summary."""
    return "\n\n".join((inspect.getdoc(one.builder) or "").split("\n\n")[1:])


def _facts(one: Method) -> Iterator[str]:
    """Where the method runs, whether its sums can be masked, and its units of differential privacy."""
    traits = one.traits
    names = {PARTIES: "parties", TEXTS: "texts", RANKS: "ranks of MPI or torch"}
    yield "for " + ", ".join(names[task] for task in tasks_of(one))
    yield "one round" if one.is_one_shot else f"up to {one.rounds} rounds"
    if traits.asynchronous:
        yield "asynchronous: no party waits for another"
    if traits.needs_columns:
        yield "needs columns of all rows at every party"
    hidden = "sums can be masked" if can_be_masked(one) else "cannot be masked"
    yield hidden if one.passes_to is None else f"sums can be masked where those of `{one.passes_to}` can"
    if one.privacy:
        yield f"differential privacy of {' or '.join('rows' if unit == 'row' else 'parties' for unit in one.privacy)}"


def can_be_masked(one: Method) -> bool:
    """Whether the server needs sums only, in which every entry has an addend from each party."""
    stated = [spec for kind in specs_of(one) for spec in kind.values()]
    is_sum = isinstance(one.example.aggregation, Reducible) and not one.traits.asynchronous
    return is_sum and one.traits.requires != "plain" and not any(spec.single_party_reason for spec in stated)


def _overview(known: list[Method]) -> Iterator[str]:
    """One line for each method: what an exchange sends, and what can protect it."""
    yield "| method | sent in an exchange | secure aggregation | differential privacy |\n|---|---|---|---|"
    for one in known:
        sizes = {name: " × ".join(map(str, spec.shape)) for kind in specs_of(one) for name, spec in kind.items()}
        sent = ", ".join(f"`{name}` {size}".strip() for name, size in sizes.items())
        masked = "yes" if can_be_masked(one) else "no"
        masked = masked if one.passes_to is None else f"as `{one.passes_to}`"
        units = ", ".join("rows" if unit == "row" else "parties" for unit in one.privacy)
        yield f"| [{one.name}](#{one.name}) | {sent} | {masked} | {units or 'no'} |"
    yield ""


def _row(parameter: Parameter) -> str:
    default: Any = "required" if parameter.is_required else parameter.plain(parameter.default)
    words = {None: "–", True: "true", False: "false"}
    shown = default if isinstance(default, float) else words.get(default, default)
    return f"| `{parameter.name}` | {parameter.kind} | {shown} |"


def specs_of(one: Method) -> tuple[Mapping[str, ArraySpec], ...]:
    """Return the upload specification of the program, with names for dimensions."""
    program = one.build(Problem(K, PARTICIPANTS, n_rows=N), one.required)
    layout = Layout(tuple(f"p{i}" for i in range(PARTICIPANTS)), M, 0)
    stated = program.upload_spec(layout)
    return tuple({name: replace(spec, shape=_named(spec.shape)) for name, spec in kind.items()} for kind in stated)


def _named(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    return tuple(DIMENSIONS.get(size, size) if isinstance(size, int) else size for size in shape)


def _sent(one: Method) -> Iterator[str]:
    for kind in specs_of(one):
        for name, spec in kind.items():
            size = " × ".join(map(str, spec.shape))
            yield f"| `{name}` | {size} | {spec.kind}{' ≥ 0' if spec.non_negative else ''} | {spec.meaning} |"


def _text(text: str) -> str:
    """Format a string literal, over several lines if necessary."""
    lines = textwrap.wrap(text, 96, drop_whitespace=False)
    return ("\n" + " " * 8).join(json.dumps(line, ensure_ascii=False) for line in lines or [""])


def _tuple(names: tuple[str, ...]) -> str:
    shown = ", ".join(f'"{name}"' for name in names)
    line = f"({shown},)" if len(names) == 1 else f"({shown})"
    if len(line) < 100:
        return line
    return "(\n" + textwrap.fill(shown + ",", 104, initial_indent=" " * 12, subsequent_indent=" " * 12) + "\n        )"


def main(arguments: list[str]) -> None:
    """Print the page, or write the table."""
    if "--write" not in arguments:
        sys.stdout.write(page())
        return
    TABLE_FILE.write_text(table(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
