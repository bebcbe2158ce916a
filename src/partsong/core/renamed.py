"""Names of version 0.1.0 that have changed: errors name the new ones, and model files are translated when they load."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

METHODS = MappingProxyType({"fnmf-alone": "fnmf-local", "ipalm-once": "one-shot-ipalm", "mur-once": "one-shot-mu"})
PARAMETERS = MappingProxyType(
    {
        "masked": "secure_aggregation",
        "masked_bound": "mask_bound",
        "faulty": "on_party_error",
        "start": "init_mode",
        "sums": "reduce",
        "max_share": "max_df",
        "longest_word": "max_word_bytes",
        "fits_first": "warm_start_weights",
    }
)
VALUES = MappingProxyType(
    {
        "method": METHODS,
        "first": METHODS,
        "on_party_error": {"stop": "raise", "leave out": "skip", "leave-out": "skip"},
        "init_mode": {"common": "shared", "independent": "local"},
        "outcome": {"time-spent": "time-limit", "budget-spent": "privacy-budget-exhausted"},
    }
)
"""Values by the present name of their parameter."""

OPTIONS = MappingProxyType(
    {
        "--masked": "--secure-aggregation",
        "--masked-bound": "--mask-bound",
        "--faulty": "--on-party-error",
        "--start": "--init-mode",
        "--sums": "--reduce",
        "--play": "--game-order",
        "--drop": "--exchange-folder",
        "--max-share": "--max-df",
        "--longest-word": "--max-word-bytes",
        "--fits-first": "--warm-start-weights",
    }
)
COMMANDS = MappingProxyType({"secret": "shared-key"})

_NAMES = {**METHODS, **PARAMETERS, **{old: new for values in VALUES.values() for old, new in values.items()}}


def hint(name: str, known: Any) -> str:
    """Return a sentence on what an old name is called now, if that is one of the known names; else an empty text."""
    new = _NAMES.get(name)
    return f"It is called {new!r} since version 0.2.0. " if new is not None and new in known else ""


def translate_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that version 0.1.0 may have written, with the present names of parameters and values."""
    renamed = {PARAMETERS.get(name, name): value for name, value in settings.items()}
    return {name: _translate(name, value) for name, value in renamed.items()}


def _translate(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):  # method_options
        return translate_settings(value)
    return VALUES[name].get(value, value) if name in VALUES and isinstance(value, str) else value
