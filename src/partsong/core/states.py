"""Names of state classes, which files and messages carry instead of module paths: `@state("averaging.party")`.

Names and fields are part of the file format. A class may move or be renamed: its name here stays, and a new field has a
default. A field that is renamed in code keeps its stored name: add it to stored_names.json. A decoder finds the module
of a name in the table below, so that reading does not import every method.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from partsong.errors import FormatError, ParameterError

Class = TypeVar("Class", bound=type)

NAME = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)+")

STATES_BY_MODULE: dict[str, tuple[str, ...]] = {
    "core.interfaces": (
        "core.message",
        "core.layout",
        "core.checkpoint",
        "core.outcome",
        "asynchronous.checkpoint",
        "asynchronous.work-item",
    ),
    "aggregation.server_update": ("server-update.moments",),
    "solvers.normal_equations": ("update-rule.memory",),
    "solvers.update_rules": ("squared-error.momentum",),
    "solvers.revival": ("squared-error.trial",),
    "solvers.second_moment": ("moment.spectrum",),
    "solvers.squared_error": ("squared-error.rows", "squared-error.columns"),
    "secure_aggregation.client": (
        "secure.client",
        "secure.client-identity",
        "secure.client-setup",
        "secure.client-upload",
        "secure.client-keys",
    ),
    "secure_aggregation.crypto": ("secure.key-pair",),
    "secure_aggregation.messages": (
        "secure.parameters",
        "secure.admitted",
        "secure.setup-group",
        "secure.sum",
        "secure.advert",
        "secure.context",
        "secure.array",
    ),
    "secure_aggregation.secret_sharing": ("secure.secrets",),
    "secure_aggregation.server": ("secure.server", "secure.key-directory"),
    "privacy.accounting": ("privacy.release", "privacy.ledger", "privacy.accounts"),
    "methods.averaging": ("averaging.party", "averaging.server"),
    "methods.counts": ("pairs.sums", "pairs.party", "frequencies.sums", "frequencies.party"),
    "methods.dsanls": ("dsanls.party", "dsanls.server"),
    "methods.fedlda": ("fedlda.party", "fedlda.server"),
    "methods.fednmf": ("fednmf.party", "fednmf.server"),
    "methods.game": ("game.party", "game.server"),
    "methods.moment": ("moment.party", "moment.server"),
    "methods.private": ("private.averaging-party", "private.sums-party", "private.sums-server"),
    "methods.two_stage": ("two-stage.party", "two-stage.server"),
    "methods.secure_sketched": (
        "sketched-averaging.party",
        "sketched-averaging.server",
        "sketched-sums.party",
        "sketched-sums.server",
    ),
    "topics.vocabulary": ("words.vocabulary",),
    "topics.agreement.protocol": ("words.party", "words.remaining", "words.server", "words.step"),
    "topics.agreement.tables": ("words.agreed", "words.tables"),
    "training.checkpoint": ("training.run",),
    "training.asynchronous": ("reporting.party", "reporting.server"),
    "federation.server.state": ("federation.absence", "federation.run", "federation.arrivals"),
    "federation.site.state": (
        "federation.site-start",
        "federation.site-tally",
        "federation.site-work",
        "federation.site-reply",
        "federation.site-vocabulary",
    ),
}

MODULES = {name: module for module, names in STATES_BY_MODULE.items() for name in names}

FIELDS_AS_STORED: Mapping[str, Mapping[str, str]] = json.loads(
    Path(__file__).with_name("stored_names.json").read_text("utf-8")
)
"""State name → field in code → field in files, for fields whose two names differ."""

_classes: dict[str, type] = {}
_names: dict[type, str] = {}


def state(name: str) -> Callable[[Class], Class]:
    """Give a frozen dataclass or an enumeration its permanent name; write the decorator above `@dataclass`."""
    if not NAME.fullmatch(name):
        raise ParameterError(f'The name of a state must look like "averaging.party"; got {name!r}.')

    def register(cls: Class) -> Class:
        if not is_dataclass(cls) and not issubclass(cls, enum.Enum):
            raise ParameterError(
                f"{cls.__name__} is neither a dataclass nor an enumeration. Put @state above @dataclass."
            )
        known = _classes.get(name, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ParameterError(
                f"The name {name!r} already belongs to {known.__module__}.{known.__qualname__}. Choose another name."
            )
        _classes[name], _names[cls] = cls, name
        return cls

    return register


def name_of(cls: type) -> str | None:
    """Return the name of a state class; None if it has none."""
    return _names.get(cls)


def class_of(name: str) -> type:
    """Return the class with a name; its module is imported on first use."""
    if name not in _classes and name in MODULES:
        import_module(f"partsong.{MODULES[name]}")
    if name not in _classes:
        raise FormatError(
            f"This version of partsong has no state {str(name)[:60]!r}. Use the version that wrote it, or import the "
            "module of yours that defines it."
        )
    return _classes[name]
