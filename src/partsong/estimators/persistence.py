"""Save and load fitted estimators as model files: H, names and settings, never W or rows."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong.core.interfaces import RowSolver
from partsong.errors import FormatError, ParameterError
from partsong.estimators.validation import count_from_settings, penalties_of
from partsong.io.model_file import Model, load_model, save_model
from partsong.solvers.normal_equations import Penalty

LDA = "fedlda"
"""Method in model files of federated LDA, whose topics are mixtures."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a loaded model comes from; `save` keeps this until the estimator is refitted."""

    settings: dict[str, Any]
    created: str
    versions: dict[str, str]

    def merge_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the file's settings, with penalties from `settings` if they were changed since.

        Penalties are part of the model: `transform` uses them.
        """
        if all(map(math.isclose, penalties_of(self.settings), penalties_of(settings))):
            return self.settings
        others = {name: value for name, value in self.settings.items() if name != "l1_ratio_h"}
        return {**others, **{name: settings[name] for name in ("alpha_w", "alpha_h", "l1_ratio")}}


def save_fitted(estimator: Any, path: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
    """Write a model file as `partsong fit` would; a loaded model keeps the settings of its file.

    Model files are for least squares models. LDA models, whose weights are topic shares, are refused.
    """
    if getattr(vars(estimator).get("solver_"), "is_mixture", False):
        raise ParameterError(
            "A model file holds a least squares model, but LDA weights are topic shares. Use "
            'FederatedTopicModel(method="fedlda") and its save and load, or store components_ yourself.'
        )
    names, is_private = getattr(estimator, "feature_names_in_", None), bool(settings.get("privacy_spent"))
    origin: Provenance | None = vars(estimator).get("_origin")
    if origin is None:
        written = {"n_components": len(estimator.components_), **settings, "iterations": estimator.n_iter_}
        about: dict[str, Any] = {"settings": written}
    else:
        about = {"settings": origin.merge_settings(settings), "created": origin.created, "versions": origin.versions}
    model = Model(
        components=estimator.components_,
        feature_names=None if names is None else tuple(str(name) for name in names),
        seed=estimator.seed_,
        relative_error=None if is_private else estimator.relative_error_,
        shares=None if is_private else estimator.component_shares_,
        **about,
    )
    save_model(path, model)


def penalties_to_dict(solver: RowSolver) -> dict[str, Any]:
    """Return penalties of a solver in the form of `NMF.load`: α = l1 + l2, ρ = l1 / α, and H's ρ if it differs."""
    on_W, on_H = getattr(solver, "penalty_W", Penalty()), getattr(solver, "penalty_H", Penalty())
    (alpha_W, ratio_W), (alpha_H, ratio_H) = ((p.l1 + p.l2, p.l1 / (p.l1 + p.l2 or 1.0)) for p in (on_W, on_H))
    plain: dict[str, Any] = {"alpha_w": alpha_W, "alpha_h": alpha_H, "l1_ratio": ratio_W if on_W else ratio_H}
    return {**plain, "l1_ratio_h": ratio_H} if on_W and on_H and ratio_H != ratio_W else plain


def fitted_attributes(model: Model) -> dict[str, Any]:
    """Return fitted attributes from a model; iterations and rows are None if the file lacks them."""
    names, settings = model.feature_names, model.settings
    return {
        "components_": model.components,
        "component_shares_": model.shares,
        "n_components_": len(model.components),
        "n_features_in_": model.components.shape[1],
        "relative_error_": model.relative_error,
        "seed_": model.seed,
        "n_iter_": count_from_settings(settings, "iterations", least=0),
        "n_samples_": count_from_settings(settings, "n_samples"),
        "_origin": Provenance(dict(settings), model.created, dict(model.versions)),
        **({} if names is None else {"feature_names_in_": np.array(names, dtype=object)}),
    }


def load_fitted(path: str | os.PathLike[str]) -> Model:
    """Read a model file for an estimator; LDA topics are refused, because they have their own kind of file."""
    model = load_model(path)
    if model.settings.get("method") == LDA:
        raise FormatError(
            f"{path}: the file holds LDA topics, not a least squares model. Use topics.safetensors, which every site "
            "has, with partsong topics transform or partsong.FederatedTopicModel.load."
        )
    return model
