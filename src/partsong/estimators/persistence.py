"""A fitted estimator to a model file and back: H, names and settings, never W or rows."""

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
"""The method that a federation's server names in its model file of topics that are mixtures."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """What the file of a loaded model says of its fit: `save` says the same, until the estimator is fitted again."""

    settings: dict[str, Any]
    created: str
    versions: dict[str, str]

    def merge_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The file's settings; of `settings`, those of the estimator now, only penalties that were changed since.

        They are part of the model: rows are transformed with them.
        """
        if all(map(math.isclose, penalties_of(self.settings), penalties_of(settings))):
            return self.settings
        others = {name: value for name, value in self.settings.items() if name != "l1_ratio_h"}
        return {**others, **{name: settings[name] for name in ("alpha_w", "alpha_h", "l1_ratio")}}


def save_fitted(estimator: Any, path: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
    """Write what `partsong fit` would write for the same model; a loaded one keeps what its file says of its fit.

    Files of models are for least squares: topics of LDA, whose weights are shares, are not written as one.
    """
    if getattr(vars(estimator).get("solver_"), "is_mixture", False):
        raise ParameterError(
            "Weights of LDA are shares of topics and no fit of least squares, which is what a model file is read for. "
            'Fit texts by FederatedTopicModel(method="fedlda"), whose save and load know them, or keep components_.'
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
    """The penalties of a solver as `NMF.load` reads them: α = l1 + l2 and ρ = l1 / α; H's own ρ where it differs."""
    on_W, on_H = getattr(solver, "penalty_W", Penalty()), getattr(solver, "penalty_H", Penalty())
    (alpha_W, ratio_W), (alpha_H, ratio_H) = ((p.l1 + p.l2, p.l1 / (p.l1 + p.l2 or 1.0)) for p in (on_W, on_H))
    told: dict[str, Any] = {"alpha_w": alpha_W, "alpha_h": alpha_H, "l1_ratio": ratio_W if on_W else ratio_H}
    return {**told, "l1_ratio_h": ratio_H} if on_W and on_H and ratio_H != ratio_W else told


def fitted_attributes(model: Model) -> dict[str, Any]:
    """Fitted attributes of an estimator; iterations and rows are None where the file does not state them."""
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
    """Read a model file for an estimator; topics of LDA have a file of their own kind."""
    model = load_model(path)
    if model.settings.get("method") == LDA:
        raise FormatError(
            f"{path}: topics of LDA, whose weights are shares and no fit of least squares. Every site has them as "
            "topics.safetensors, for partsong topics transform and partsong.FederatedTopicModel.load."
        )
    return model
