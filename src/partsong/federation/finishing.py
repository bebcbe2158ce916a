"""What a site keeps of a run that is over: a model file with its own names of columns, and W of its rows.

    model.safetensors   H, as `partsong info`, `partsong transform` and `partsong.load_model` read it
    weights.npy         W, one row for each row of the site's data, in their order
    result.json         how well the model fits these rows

All of it stays: for its owner alone, and nothing of it is ever sent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from partsong.core import Matrix, Message, Program
from partsong.federation.refusals import Denied
from partsong.federation.site_files import make_folder
from partsong.io.atomic import replacing
from partsong.io.model_file import Model, save_model
from partsong.io.provenance import now, package_versions

MODEL, WEIGHTS, RESULT = "model.safetensors", "weights.npy", "result.json"


@dataclass(frozen=True, slots=True)
class Ending:
    """A run at a site as it ends: the agreed columns of its rows, by name, and what was run."""

    run: str
    experiment: Mapping[str, Any]
    program: Program
    parties: int
    matrix: Matrix = field(repr=False)
    columns: tuple[str, ...] = field(repr=False)

    def keep(self, folder: Path, last: Message) -> None:
        """Write the result of the run into a folder of its own."""
        H = components_in(last, (self.program.rank, len(self.columns)))
        Ht = self.matrix.native(np.ascontiguousarray(H.T))
        W = self.program.solver.solve_rows(self.matrix, Ht)
        norm = float(self.matrix.squared_norm)
        error = math.sqrt(max(0.0, float(self.matrix.squared_distance(W, Ht))) / norm) if norm > 0 else 0.0
        make_folder(folder)
        told = settings_told(self.experiment, self.parties)
        seed = int(self.experiment.get("seed", 0))
        save_model(folder / MODEL, Model(H, self.columns, told, seed, None, None, now(), package_versions()))
        (folder / MODEL).chmod(0o600)
        with replacing(folder / WEIGHTS, private=True) as draft, draft.open("wb") as file:
            np.save(file, np.asarray(W), allow_pickle=False)
        result = {"run": self.run, "rows": int(W.shape[0]), "components": int(W.shape[1]), "relative_error": error}
        with replacing(folder / RESULT, private=True) as draft:
            draft.write_text(json.dumps(result) + "\n", encoding="utf-8")


def components_in(last: Message, shape: tuple[int, int]) -> Any:
    """H in the message with which a run ends: the server's own, or else that of the last model."""
    found = last.arrays.get("components", last.arrays.get("H"))
    H = None if found is None else np.asarray(found)
    if H is None or H.shape != shape or H.dtype.kind != "f":
        raise Denied("layout", f"The run has ended with a model that is not {shape[0]} × {shape[1]}.")
    return np.ascontiguousarray(H)


def settings_told(experiment: Mapping[str, Any], parties: int) -> dict[str, Any]:
    """The settings of an experiment as model files have them."""
    told = {**experiment, "n_components": experiment.get("rank"), "parties": parties}
    return {name: value for name, value in told.items() if value not in (None, {})}
