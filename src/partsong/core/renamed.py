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
        "synchronisation": "synchronization",
    }
)
SITE_SETTINGS = MappingProxyType({"recipes": "methods"})
"""Keys of site.toml."""
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
STORED_VALUES = MappingProxyType({**VALUES, "method": {**METHODS, "centralised": "centralized"}})
"""The same in files, with a value that only partsong writes."""

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
        "--synchronisation": "--synchronization",
    }
)
COMMANDS = MappingProxyType({"secret": "shared-key"})

_NAMES = {
    **METHODS,
    **PARAMETERS,
    **SITE_SETTINGS,
    **{old: new for values in VALUES.values() for old, new in values.items()},
}


def hint(name: str, known: Any, parameter: str = "") -> str:
    """Return a sentence on what an old name is called now, if that is one of the known names; else an empty text.

    An old value of a `parameter` has its new name even where that is not among the known ones.
    """
    new = VALUES.get(parameter, {}).get(name)
    if new is None and _NAMES.get(name) in known:
        new = _NAMES[name]
    return "" if new is None else f"It is called {new!r} since version 0.2.0. "


def translate_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that version 0.1.0 may have written, with the present names of parameters and values."""
    renamed = {PARAMETERS.get(name, name): value for name, value in settings.items()}
    return {name: _translate(name, value) for name, value in renamed.items()}


def with_mechanism(privacy: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored request for privacy; those of versions without a choice of mechanism were for "rounds"."""
    older = {"mechanism": "rounds", "centre_radius": 0.1} if privacy.get("unit") == "row" else {}
    return {**older, **privacy}


def _translate(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):  # method_options, privacy
        return with_mechanism(translate_settings(value)) if name == "privacy" else translate_settings(value)
    return STORED_VALUES[name].get(value, value) if name in STORED_VALUES and isinstance(value, str) else value
