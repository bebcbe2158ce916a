"""Files of principal components: vectors, mean and variances, and where they come from; never scores or rows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from partsong.core import Outcome
from partsong.data.names import require_names
from partsong.errors import FileError, FormatError, PartsongError
from partsong.io import provenance
from partsong.io.opening import parsing, place_of
from partsong.io.tensor_file import FileKind, read_tensors, write_tensors

ENDING = ".safetensors"
_KIND = FileKind("partsong-principal-components", 1)
_BY_COMPONENT = ("explained_variance_", "explained_variance_ratio_", "singular_values_", "utilities_")
_ARRAYS = ("components_", "mean_", *_BY_COMPONENT)
_NUMBERS = ("seed_", "n_samples_", "n_iter_")
_SETTINGS = ("n_components", "play", "step", "decay", "batch_size", "max_iter", "tol", "center")
_FIELDS = {"feature_names", "settings", "outcome_", "created", "versions", *_NUMBERS}
_ONCE_MORE = "Fit again, or take the file from its source again."


def save_principal(estimator: Any, path: str | os.PathLike[str]) -> None:
    """Write a fitted `PCAGame` as one file, whole or not at all."""
    place = place_of(path)
    if not place.name.lower().endswith(ENDING):
        raise FileError(f"{path}: the name of a model file ends in {ENDING}. Save it as {place.stem}{ENDING}, say.")
    names = getattr(estimator, "feature_names_in_", None)
    settings = {name: _plain(getattr(estimator, name)) for name in _SETTINGS}
    content = {
        "feature_names": None if names is None else [str(name) for name in names],
        "settings": settings,
        "outcome_": str(estimator.outcome_),
        "created": provenance.now(),
        "versions": provenance.package_versions(),
        **{name: _plain(getattr(estimator, name)) for name in _NUMBERS},
    }
    write_tensors(path, _KIND, {name.rstrip("_"): getattr(estimator, name) for name in _ARRAYS}, content)


def fill_principal(estimator: Any, path: str | os.PathLike[str]) -> None:
    """Give an estimator what such a file holds; whatever is not sound is a FormatError, and no code is run."""
    tensors, content = read_tensors(path, _KIND)
    place = place_of(path)
    with parsing(place, "principal components"):
        fault = _fault(tensors, content)
        if fault:
            raise FormatError(f"{place}: {fault} {_ONCE_MORE}")
        try:
            estimator.set_params(**content["settings"])
            estimator.outcome_ = Outcome(content["outcome_"])
            names = content["feature_names"]
            if names is not None:
                require_names(names, "feature_names")
                estimator.feature_names_in_ = np.array(names, dtype=object)
        except (PartsongError, ValueError) as error:
            raise FormatError(f"{place}: {error} {_ONCE_MORE}") from error
    for name in _ARRAYS:
        setattr(estimator, name, tensors[name.rstrip("_")])
    for name in _NUMBERS:
        setattr(estimator, name, content[name])
    estimator.n_components_, estimator.n_features_in_ = estimator.components_.shape
    estimator.history_ = []


def _fault(tensors: Mapping[str, np.ndarray], content: Any) -> str:
    """What is wrong with the parts of a file; nothing if it is empty."""
    if tensors.keys() != {name.rstrip("_") for name in _ARRAYS}:
        return f"holds the arrays {sorted(tensors)[:8]}, not those of principal components."
    if not isinstance(content, dict) or content.keys() != _FIELDS:
        return f"its description lacks, or has more than, {', '.join(sorted(_FIELDS))}."
    if not isinstance(content["settings"], dict) or content["settings"].keys() != set(_SETTINGS):
        return f"its settings lack, or have more than, {', '.join(_SETTINGS)}."
    if not all(type(content[name]) is int and content[name] >= 0 for name in _NUMBERS):
        return f"{', '.join(_NUMBERS)} must be whole numbers."
    components = tensors["components"]
    if any(tensor.dtype not in (np.float32, np.float64) for tensor in tensors.values()):
        return "arrays must be float32 or float64."
    if components.ndim != 2 or 0 in components.shape:
        return f"components must be k x d with k, d ≥ 1, but have shape {components.shape}."
    k, d = components.shape
    expected = {"components": (k, d), "mean": (d,)} | {name.rstrip("_"): (k,) for name in _BY_COMPONENT}
    wrong = [name for name, shape in expected.items() if tensors[name].shape != shape]
    if wrong:
        return f"shapes do not fit {k} components of {d} features: {', '.join(wrong)}."
    if not all(np.isfinite(tensor).all() for tensor in tensors.values()):
        return "arrays hold NaN or infinite values."
    names = content["feature_names"]
    if names is not None and not (isinstance(names, list) and len(names) == d):
        return f"feature_names must be {d} names, or none."
    return ""


def _plain(value: Any) -> Any:
    """Numbers of NumPy as those of Python."""
    return value.item() if isinstance(value, np.generic) else value
