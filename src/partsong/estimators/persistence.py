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
from partsong.estimators.parameters import count_told, penalties_of
from partsong.io import model_file
from partsong.io.model_file import JSON, Model, load_model, save_model
from partsong.solvers.lda import TopicRows
from partsong.solvers.normal_equations import Penalty

LDA = "fedlda"
"""The method that a federation's server names in its model file of topics that are mixtures."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What the file of a loaded model says of its fit: `save` says the same, until the estimator is fitted again."""

    settings: dict[str, JSON]
    created: str
    versions: dict[str, str]

    def retold(self, settings: Mapping[str, JSON]) -> dict[str, JSON]:
        """The file's settings; of `settings`, those of the estimator now, only penalties that were changed since.

        They are part of the model: rows are transformed with them.
        """
        if all(map(math.isclose, penalties_of(self.settings), penalties_of(settings))):
            return self.settings
        others = {name: value for name, value in self.settings.items() if name != "l1_ratio_h"}
        return {**others, **{name: settings[name] for name in ("alpha_w", "alpha_h", "l1_ratio")}}


def save_fitted(estimator: Any, path: str | os.PathLike[str], settings: Mapping[str, JSON]) -> None:
    """Write what `partsong fit` would write for the same model; a loaded one keeps what its file says of its fit.

    Files of models are for least squares: topics of LDA, whose weights are shares, are not written as one.
    """
    if isinstance(vars(estimator).get("solver_"), TopicRows):
        raise ParameterError(
            "Weights of LDA are shares of topics and no fit of least squares, which is what a model file is read for. "
            'Fit texts by FederatedTopicModel(method="fedlda"), whose save and load know them, or keep components_.'
        )
    names, is_private = getattr(estimator, "feature_names_in_", None), bool(settings.get("privacy_spent"))
    origin: Origin | None = vars(estimator).get("_origin")
    if origin is None:
        told = {"n_components": len(estimator.components_), **settings, "iterations": estimator.n_iter_}
        origin = Origin(told, model_file.now(), model_file.package_versions())
    model = Model(
        components=estimator.components_,
        feature_names=None if names is None else tuple(str(name) for name in names),
        settings=origin.retold(settings),
        seed=estimator.seed_,
        relative_error=None if is_private else estimator.relative_error_,
        shares=None if is_private else estimator.component_shares_,
        created=origin.created,
        versions=origin.versions,
    )
    save_model(path, model)


def penalties_told(solver: RowSolver) -> dict[str, JSON]:
    """The penalties of a solver as `NMF.load` reads them: α = l1 + l2 and ρ = l1 / α; H's own ρ where it differs."""
    on_W, on_H = getattr(solver, "penalty_W", Penalty()), getattr(solver, "penalty_H", Penalty())
    (alpha_W, ratio_W), (alpha_H, ratio_H) = ((p.l1 + p.l2, p.l1 / (p.l1 + p.l2 or 1.0)) for p in (on_W, on_H))
    told: dict[str, JSON] = {"alpha_w": alpha_W, "alpha_h": alpha_H, "l1_ratio": ratio_W if on_W else ratio_H}
    return {**told, "l1_ratio_h": ratio_H} if on_W and on_H and ratio_H != ratio_W else told


def fill_from_file(estimator: Any, path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Give an estimator the fitted attributes that a model file holds; returns the file's settings.

    `n_iter_` and `n_samples_` are None where the file does not tell.
    """
    model = load_model(path)
    if model.settings.get("method") == LDA:
        raise FormatError(
            f"{path}: topics of LDA, whose weights are shares and no fit of least squares. Every site has them as "
            "topics.safetensors, for partsong topics transform and partsong.FederatedTopicModel.load."
        )
    estimator.components_ = model.components
    estimator.component_shares_ = model.shares
    estimator.n_components_ = len(model.components)
    estimator.n_features_in_ = model.components.shape[1]
    estimator.relative_error_ = model.relative_error
    estimator.seed_ = model.seed
    estimator.n_iter_ = count_told(model.settings, "iterations", least=0)
    estimator.n_samples_ = count_told(model.settings, "n_samples")
    estimator._origin = Origin(dict(model.settings), model.created, dict(model.versions))
    if model.feature_names is not None:
        estimator.feature_names_in_ = np.array(model.feature_names, dtype=object)
    return model.settings


def forget_origin(estimator: Any) -> None:
    """A new fit is told by its own settings."""
    vars(estimator).pop("_origin", None)
