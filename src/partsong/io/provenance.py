"""Where a result comes from: versions of what computed it, and when."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import UTC, datetime
from typing import Any

import partsong
from partsong.errors import ParameterError

EPOCH = "SOURCE_DATE_EPOCH"

PACKAGES = {"numpy": "numpy", "scipy": "scipy", "numba": "numba", "sklearn": "scikit-learn"}
"""Import name to distribution name."""


def package_versions() -> dict[str, str]:
    """What a model file says about the software behind it."""
    versions = {"python": platform.python_version(), "partsong": partsong.__version__}
    for name, distribution in PACKAGES.items():
        try:
            versions[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def machine_versions(threads: int) -> dict[str, Any]:
    """What a run folder says: the same, and the machine."""
    return {
        **package_versions(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count() or 1,
        "threads": threads,
    }


def now() -> str:
    """The time, to the second, as ISO 8601 in UTC; SOURCE_DATE_EPOCH (seconds since 1970) stands in where it is set.

    It is all that tells the files of two equal fits apart, so with it they are the same byte for byte.
    """
    given = os.environ.get(EPOCH, "").strip()
    if not given:
        return datetime.now(UTC).isoformat(timespec="seconds")
    try:
        return datetime.fromtimestamp(int(given), UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError) as error:
        raise ParameterError(
            f"{EPOCH} must be a whole number of seconds since 1970; it is {given!r}. Correct it, or unset it."
        ) from error
