"""Model files: H, feature names, settings and provenance, as safetensors."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from partsong.core.renamed import translate_settings
from partsong.core.runtime import package_version
from partsong.data.scan import require_names
from partsong.errors import (
    DataError,
    DataTypeError,
    FeatureError,
    FileError,
    FormatError,
    ParameterError,
    ShapeError,
    format_count,
)
from partsong.io.opening import parse_errors, resolve_path
from partsong.io.tensor_file import JSON, FileKind, read_tensors, require_json, write_tensors

ENDING = ".safetensors"
_KIND = FileKind("partsong-model", 1)
_FIELDS = ("feature_names", "settings", "seed", "relative_error", "created", "versions")
_ONCE_MORE = "Fit again, or copy the model from its source again."


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """Shared components (k x m) with their provenance; checked on creation.

    `shares` is the explained share of each component. `created` is an ISO 8601 time, by default `now()`, which
    SOURCE_DATE_EPOCH fixes so that equal fits give equal files. `versions` are package versions, by default installed
    ones.
    """

    components: npt.NDArray[Any]
    feature_names: tuple[str, ...] | None
    settings: Mapping[str, JSON]
    seed: int | None
    relative_error: float | None
    shares: npt.NDArray[Any] | None
    created: str = field(default_factory=lambda: now())
    versions: Mapping[str, str] = field(default_factory=lambda: package_versions())

    def __post_init__(self) -> None:
        _require_parts(self.components)
        _require_shares(self.shares, self.components.shape[0])
        _require_names(self.feature_names, self.components.shape[1])
        _require_numbers(self.seed, self.relative_error)
        _require_provenance(self.settings, self.created, self.versions)
        object.__setattr__(self, "settings", MappingProxyType(dict(self.settings)))
        object.__setattr__(self, "versions", MappingProxyType(dict(self.versions)))


def save_model(path: str | os.PathLike[str], model: Model) -> None:
    """Write a model atomically as one .safetensors file."""
    place = resolve_path(path)
    if not place.name.lower().endswith(ENDING):
        raise FileError(f"{path}: the name of a model file must end in {ENDING}. Save it as {place.stem}{ENDING}.")
    tensors = {"components": model.components}
    if model.shares is not None:
        tensors["shares"] = model.shares
    write_tensors(path, _KIND, tensors, {name: getattr(model, name) for name in _FIELDS})


def load_model(path: str | os.PathLike[str]) -> Model:
    """Read and check a model; an invalid file is a FormatError. No code is run."""
    tensors, content = read_tensors(path, _KIND)
    place = resolve_path(path)
    if not {"components"} <= tensors.keys() <= {"components", "shares"}:
        raise FormatError(f"{place}: contains the arrays {sorted(tensors)[:5]}, not those of a model. {_ONCE_MORE}")
    if not isinstance(content, dict) or set(content) != set(_FIELDS):
        raise FormatError(f"{place}: its metadata must have exactly the fields {', '.join(_FIELDS)}. {_ONCE_MORE}")
    names = content.pop("feature_names")
    if isinstance(content["settings"], dict):
        content["settings"] = translate_settings(content["settings"])
    with parse_errors(place, "a model"):
        try:
            return Model(
                components=tensors["components"],
                shares=tensors.get("shares"),
                feature_names=None if names is None else tuple(names),
                **content,
            )
        except (DataError, DataTypeError, FeatureError, ParameterError, ShapeError) as error:
            raise FormatError(f"{place}: {error}") from error


def _require_parts(components: npt.NDArray[Any]) -> None:
    if not isinstance(components, np.ndarray) or components.dtype not in (np.float32, np.float64):
        kind = getattr(components, "dtype", type(components).__name__)
        raise DataTypeError(f"components must be float32 or float64, not {kind}. Convert them with astype.")
    if components.ndim != 2 or 0 in components.shape:
        raise ShapeError(f"components must be k x m with k, m ≥ 1, but have shape {components.shape}. {_ONCE_MORE}")
    if not np.isfinite(components).all():
        raise DataError(f"components contain NaN or infinite values. {_ONCE_MORE}")
    if components.min() < 0:
        raise DataError(f"components contain negative values, down to {components.min()}. {_ONCE_MORE}")


def _require_shares(shares: npt.NDArray[Any] | None, n_components: int) -> None:
    if shares is None:
        return
    if not isinstance(shares, np.ndarray) or shares.dtype not in (np.float32, np.float64):
        raise DataTypeError("shares must be a float32 or float64 array. Convert them with np.asarray(shares, float).")
    if shares.shape != (n_components,):
        raise ShapeError(
            f"shares have shape {shares.shape} for {format_count(n_components, 'component')}. Pass one per component."
        )
    if not np.isfinite(shares).all():
        raise DataError(f"shares contain NaN or infinite values. {_ONCE_MORE}")


def _require_names(names: tuple[str, ...] | None, n_columns: int) -> None:
    if names is None:
        return
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise FeatureError("feature_names must be a tuple of text, or None. Convert them with tuple(map(str, names)).")
    if len(names) != n_columns:
        raise FeatureError(
            f"{format_count(len(names), 'feature name')} for {format_count(n_columns, 'column')} of the "
            "components. Pass one per column."
        )
    if len(set(names)) < len(names):
        require_names(names, "feature_names")


def _require_numbers(seed: int | None, relative_error: float | None) -> None:
    if seed is not None and type(seed) is not int:
        raise DataTypeError(f"seed must be a whole number or None, not {type(seed).__name__}. Convert it with int().")
    if relative_error is None:
        return
    if not isinstance(relative_error, (int, float)) or isinstance(relative_error, bool):
        raise DataTypeError(f"relative_error must be a number or None, not {type(relative_error).__name__}.")
    if not 0 <= relative_error < float("inf"):
        raise ParameterError(
            f"relative_error must be finite and not negative, not {relative_error}. Pass None instead."
        )


def _require_provenance(settings: Mapping[str, JSON], created: str, versions: Mapping[str, str]) -> None:
    for what, value in (("settings", settings), ("versions", versions)):
        if not isinstance(value, Mapping):
            raise DataTypeError(f"{what} must be a mapping, not {type(value).__name__}. Pass a dict.")
        require_json(value, what)
    if not all(isinstance(version, str) for version in versions.values()):
        raise DataTypeError("versions must map package names to text. Convert them with str().")
    try:
        datetime.fromisoformat(created)
    except (TypeError, ValueError) as error:
        raise ParameterError(
            f"created must be an ISO 8601 time, not {created!r}. Use datetime.now().isoformat()."
        ) from error


EPOCH = "SOURCE_DATE_EPOCH"

PACKAGES = {"numpy": "numpy", "scipy": "scipy", "numba": "numba", "sklearn": "scikit-learn"}
"""Import name to distribution name."""


def package_versions() -> dict[str, str]:
    """Return the software versions that a model file records."""
    versions = {"python": platform.python_version(), "partsong": package_version()}
    for name, distribution in PACKAGES.items():
        try:
            versions[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def machine_versions(threads: int) -> dict[str, Any]:
    """Return the versions that a run folder records: the same, and the machine."""
    return {**package_versions(), "platform": platform.platform(), "cpu_count": os.cpu_count() or 1, "threads": threads}


def now() -> str:
    """Return the time in UTC as ISO 8601, to the second; SOURCE_DATE_EPOCH (seconds since 1970) overrides it.

    With SOURCE_DATE_EPOCH, the files of two equal fits are equal byte for byte.
    """
    given = os.environ.get(EPOCH, "").strip()
    if not given:
        return datetime.now(UTC).isoformat(timespec="seconds")
    try:
        return datetime.fromtimestamp(int(given), UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError) as error:
        raise ParameterError(
            f"{EPOCH} must be a whole number of seconds since 1970; got {given!r}. Correct or unset it."
        ) from error
