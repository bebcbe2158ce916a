"""Federated and distributed programs, by name.

    from partsong import methods

    program = methods.build("fedavg", 10, weighted=False)      # a Program of rank 10, for any engine
    methods.method("fedavg").parameters                        # what it takes
    methods.names()                                            # all federated methods

`python -m partsong.methods.reference` lists all of them. Importing this package imports names only: `methods/table.py`
says where they live.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from partsong.methods.table import CHOICES as CHOICES
from partsong.methods.table import TABLE as TABLE

if TYPE_CHECKING:
    from partsong.core.interfaces import Program
    from partsong.methods.registry import Method, Problem

PARTIES, TEXTS, RANKS = "parties", "texts", "ranks"
"""Tasks: parties of a federation, parties with texts, ranks of MPI or torch."""


RANK_SOLVERS = {"exact": "hals", "hals": "cd", "mu": "mu", "bpp": "bpp"}
"""Names of exact methods over ranks → the equivalent solver in one process."""


def names(task: str = PARTIES) -> tuple[str, ...]:
    """Return the names of the methods for a task, in the order of the table."""
    return tuple(name for name, entry in TABLE.items() if task in entry.tasks)


def distributed_names() -> tuple[str, ...]:
    """Return the names of all methods that fit one matrix over ranks."""
    return tuple(dict.fromkeys((*RANK_SOLVERS, *names(RANKS))))


def pooled_names() -> dict[str, str]:
    """Return the names that topic methods have on pooled texts → the federated method."""
    return {entry.pooled_name: name for name, entry in TABLE.items() if entry.pooled_name}


def names_with(parameter: str, among: Iterable[str] | None = None) -> tuple[str, ...]:
    """Return the names of the methods that have a parameter."""
    known = TABLE if among is None else among
    return tuple(name for name in known if parameter in TABLE[name].parameters)


def method(name: str) -> Method:
    """Return the method with this name; its module is imported."""
    from partsong.methods.registry import find

    return find(name)


def build(name: str, problem: int | Problem, **options: Any) -> Program:
    """The program of a method for a rank, or a Problem; options are names or values."""
    from partsong.methods.registry import Problem

    return method(name).build(problem if isinstance(problem, Problem) else Problem(int(problem)), options)
