"""The registry of methods: `@method` registers a function that builds a program.

    @method("fedavg", privacy=("party",))
    def fedavg(
        problem: Problem, *, local_steps: Steps = 3, weighted: bool = True, init_mode: InitMode = SHARED_INIT
    ) -> Program:
        \"\"\"Parties iterate from the shared H, which is then averaged by position (McMahan et al., 2017).\"\"\"

The signature is the table of parameters (`core.parameters`), the docstring the summary, `upload_spec` of the program
what is sent. Estimators, command line, experiment.toml, site policies, the reference of methods and the tables of
laws follow.
`python -m partsong.methods.reference --write` writes the lazy table (`methods/table.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any, Literal, TypeVar

from partsong.core.interfaces import Program, Traits
from partsong.core.parameters import Parameter, parameters_of, parse_all, suggest_name
from partsong.errors import ParameterError
from partsong.methods.table import TABLE, Entry

Unit = Literal["row", "party"]
Builder = Callable[..., Program]
Built = TypeVar("Built", bound=Builder)


@dataclass(frozen=True, slots=True)
class Problem:
    """The problem a program is built for. Only the rank is always known before the data."""

    rank: int
    n_parties: int | None = None
    rounds: int | None = None
    n_rows: int | None = None


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """How topic models use a method: default rounds, its name on pooled texts, and its options."""

    rounds: int = 50
    pooled_name: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """A named method: its builder, its parameters, and where it can be used.

    `rounds`: default maximum, 1 for one-shot methods. `compared_rounds`: default in `compare`, where it differs.
    `privacy`: the units ("row", "party") that its noise can protect. `texts`: how topic models use it. `only_texts`: no
    other estimator uses it. `over_ranks`: it can fit one matrix over MPI or torch ranks. `counts_exchanges`: options
    set the number of exchanges per round, so site policies bound exchanges. `constant_sums`: some sum over an upload is
    the same in every round, so two rounds that differ by one party reveal that party's sum. `passes_to`: the parameter
    that names another method, which receives all further options.
    """

    name: str
    builder: Builder
    parameters: Mapping[str, Parameter]
    summary: str
    rounds: int = 100
    compared_rounds: int | None = None
    privacy: tuple[Unit, ...] = ()
    texts: TopicConfig | None = None
    only_texts: bool = False
    over_ranks: bool = False
    counts_exchanges: bool = False
    constant_sums: bool = False
    passes_to: str | None = None

    @property
    def is_one_shot(self) -> bool:
        """Whether it makes a single exchange, regardless of the requested rounds."""
        return self.rounds == 1

    def build(self, problem: Problem, options: Mapping[str, Any] | None = None) -> Program:
        """Build the program. Options are names or values; missing ones take the defaults of the signature."""
        return self.builder(problem, **self.parse(options or {}))

    def parse(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Parse options for the builder; an option that the method does not have is an error."""
        parameters = self.parameters_with(options)
        for name in options:
            if name not in parameters and (takers := [one for one, entry in TABLE.items() if name in entry.parameters]):
                where = self._with(options)
                raise ParameterError(
                    f"{name} is for {', '.join(takers)}; the method is {where}. Remove it.", parameter=name
                )
        return parse_all(parameters, options, f'method="{self.name}"')

    def _with(self, options: Mapping[str, Any]) -> str:
        """The name of the method, and of the method that an option names."""
        other = None if self.passes_to is None else options.get(self.passes_to)
        return f'"{self.name}" with {self.passes_to} = "{other}"' if other else repr(self.name)

    def parameters_with(self, options: Mapping[str, Any]) -> Mapping[str, Parameter]:
        """All parameters, including those of the method that an option names."""
        other = None if self.passes_to is None else options.get(self.passes_to)
        if self.passes_to is None or other is None:
            return self.parameters
        return {**find(self.parameters[self.passes_to].parse(other)).parameters, **self.parameters}

    def value(self, name: str, options: Mapping[str, Any]) -> Any:
        """The value of an option as plain data, given or default; None if the method does not have it."""
        parameter = self.parameters_with(options).get(name)
        if parameter is None:
            return None
        value = options[name] if options.get(name) is not None else parameter.default
        return parameter.plain(value)

    def settings(self, options: Mapping[str, Any], always: Collection[str] = ()) -> dict[str, Any]:
        """Return options as plain data for a file: those in `always` even at their defaults, others only if given."""
        parameters = self.parameters_with(options)
        settings = {name: self.value(name, options) for name in always if name in parameters}
        others = {name: self.value(name, options) for name in options if name not in always}
        return {**settings, "method_options": others} if others else settings

    @property
    def required(self) -> dict[str, Any]:
        """An example value for each parameter without a default."""
        return {name: one.kind.example for name, one in self.parameters.items() if one.is_required}

    @cached_property
    def example(self) -> Program:
        """The program with default options and rank 2."""
        return self.build(Problem(2), self.required)

    @property
    def traits(self) -> Traits:
        """The traits of its program with default options."""
        return self.example.traits


_REGISTERED: dict[str, Method] = {}


def method(
    name: str, *, extends: Builder | None = None, without: tuple[str, ...] = (), **about: Any
) -> Callable[[Built], Built]:
    """Register a function that builds a program; `about` holds fields of `Method`.

    A function that ends in `**options` also has the parameters of `extends`, except those in `without`.
    """

    def register(builder: Built) -> Built:
        own = parameters_of(builder)
        inherited = {} if extends is None else parameters_of(extends)
        parameters = {**{n: one for n, one in inherited.items() if n not in without}, **own}
        known = _REGISTERED.get(name)
        if known is not None and (known.builder.__module__, known.builder.__qualname__) != _place(builder):
            raise ValueError(
                f"The method {name!r} is registered twice, by {_place(known.builder)} and {_place(builder)}."
            )
        made = _REGISTERED[name] = Method(name, builder, parameters, _summary_of(builder), **about)
        if name not in TABLE:  # registered outside this package: from here on it is known everywhere
            tasks = (*(() if made.only_texts else ("parties",)), *(() if made.texts is None else ("texts",)))
            TABLE[name] = Entry(builder.__module__, made.summary, tuple(parameters), tuple(made.required), tasks)
        return builder

    return register


def find(name: str) -> Method:
    """Return a registered method; its module is imported if necessary."""
    if name in _REGISTERED:
        return _REGISTERED[name]
    if name not in TABLE:
        raise ParameterError(f"method is {str(name)[:60]!r}. {suggest_name(str(name), TABLE)}", parameter="method")
    return load(TABLE[name].module)[name]


def load(module: str) -> dict[str, Method]:
    """Return the methods of a module, by name, in the order of their definition."""
    import_module(module)
    return {name: one for name, one in _REGISTERED.items() if one.builder.__module__ == module}


def private_methods(unit: str) -> tuple[str, ...]:
    """Return the names of methods with differential privacy for this unit, "row" or "party"."""
    return tuple(one.name for one in every_method() if unit in one.privacy)


def every_method() -> list[Method]:
    """Return all methods in the order of the table; all their modules are imported."""
    for name in TABLE:
        find(name)
    places = {name: at for at, name in enumerate(TABLE)}
    return sorted(_REGISTERED.values(), key=lambda one: places.get(one.name, len(places)))


def _place(builder: Builder) -> tuple[str, str]:
    return builder.__module__, builder.__qualname__


def _summary_of(builder: Builder) -> str:
    """The first paragraph of the docstring, in one line."""
    return " ".join((inspect.getdoc(builder) or "").split("\n\n")[0].split())
