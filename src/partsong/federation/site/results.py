"""Results of a finished run at a site: a model file with the site's column names, and W of its rows.

    model.safetensors   H, as `partsong info`, `partsong transform` and `partsong.load_model` read it
    topics.safetensors  for topic methods and texts: H, as `partsong topics show` and `transform` read it
    weights.npy         W, one row for each row of the site's data, in the same order
    result.json         how well the model fits these rows

Weights of fedlda are topic shares, not a least-squares fit: its model.safetensors is a topic file too. All files stay
at the site, readable by their owner only, and are never sent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from partsong.core.interfaces import Matrix, Message, Program, RowSolver
from partsong.errors import DivergenceError
from partsong.federation.experiment import ONLY_TEXTS
from partsong.federation.site.state import make_folder
from partsong.federation.wire import RequestRefused
from partsong.io.model_file import Model, now, package_versions, save_model
from partsong.io.topic_file import TopicFile, save_topics
from partsong.io.write import atomic_write, write_text
from partsong.topics.fitting import is_mixture
from partsong.topics.persistence import solver_to_dict
from partsong.topics.tokenizer import Words
from partsong.topics.vocabulary import COUNTS, TextVectorizer

TOPICS_FILE = "topics.safetensors"

UNKNOWN_TOKENIZER = Words("none")
"""Tokenizer for word counts that were computed elsewhere: lower-case runs of letters, no stop words."""


def save_topic_result(
    path: Path,
    H: Any,
    words: tuple[str, ...],
    settings: Mapping[str, Any],
    solver: RowSolver,
    weighing: TextVectorizer | None = None,
) -> None:
    """Write H (k × V) with the words of its columns, readable by its owner only.

    The file is the same at every site except for the time of writing. It has nothing of the rows; sizes and coherence
    of topics are unknown.

    `weighing`: what a text is to these topics. None, where sites held counts: how often it has the words by which
    columns are named; one whose name is no word of `UNKNOWN_TOKENIZER` stays zero.
    """
    frequencies = None
    if weighing is not None and weighing.documents is not None:
        places = [weighing.vocabulary.column(word) for word in words]
        frequencies = np.asarray(weighing.documents, np.int64)[places]
    weighting = COUNTS if weighing is None else weighing.weighting
    model = TopicFile(
        components=H,
        words=words,
        key="",
        options=(UNKNOWN_TOKENIZER if weighing is None else weighing.words).to_json(),
        frequencies=frequencies,
        n_documents=0 if weighing is None else weighing.n_documents,
        shares=None,
        coherence=None,
        settings={**settings, "n_topics": len(H), "weighting": weighting, **solver_to_dict(solver)},
        seed=int(settings.get("seed", 0)),
        created=now(),
        versions=package_versions(),
    )
    save_topics(path, model)
    path.chmod(0o600)


MODEL_FILE, WEIGHTS_FILE, RESULT_FILE = "model.safetensors", "weights.npy", "result.json"
MAX_ENTRY = {"float64": 1e140, "float32": 1e15}
"""Largest entry of H. Sums of squares beyond it overflow; data have the same limit."""
NO_WEIGHTS = (
    "The weights of this site's rows are not finite with this model: weights.npy was not written, and there is no "
    "relative error. The model is the one that the server sent; ask the coordinator."
)


@dataclass(frozen=True, slots=True)
class ResultWriter:
    """Writes the result of a run at a site, given the experiment and the agreed columns of its rows.

    `weighing`: what a text is to the model, where the rows were made of texts.
    """

    run: str
    experiment: Mapping[str, Any]
    program: Program
    parties: int
    matrix: Matrix = field(repr=False)
    columns: tuple[str, ...] = field(repr=False)
    weighing: TextVectorizer | None = field(repr=False, default=None)

    def save(self, folder: Path, last: Message) -> str:
        """Write the result into a folder; return a note for the site's log if W is missing, else an empty text.

        Whether W is finite depends on the rows, so the site must not refuse the model: a refusal would reveal it.
        """
        H = final_components(last, (self.program.rank, len(self.columns)))
        Ht = self.matrix.native(np.ascontiguousarray(H.T))
        W = self._weights(Ht)
        make_folder(folder)
        self._save_models(folder, H)
        if W is not None:
            with atomic_write(folder / WEIGHTS_FILE, private=True) as draft, draft.open("wb") as file:
                np.save(file, np.asarray(W), allow_pickle=False)
        rows, fit = int(self.matrix.shape[0]), {"relative_error": None} if W is None else self._fit(W, Ht)
        result = {"run": self.run, "rows": rows, "components": len(H), **fit}
        write_text(folder / RESULT_FILE, json.dumps(result) + "\n", private=True)
        return "" if W is not None else NO_WEIGHTS

    def _weights(self, Ht: Any) -> Any:
        """Return W of the site's rows; None if it is not finite with this model."""
        with np.errstate(all="ignore"):
            try:
                W = self.program.solver.solve_rows(self.matrix, Ht)
            except (DivergenceError, ArithmeticError, np.linalg.LinAlgError):
                return None
            return W if np.isfinite(np.asarray(W)).all() else None

    def _save_models(self, folder: Path, H: Any) -> None:
        settings = {**self.experiment, "n_components": self.experiment.get("rank"), "parties": self.parties}
        settings = {name: value for name, value in settings.items() if value not in (None, {})}
        solver = self.program.solver
        if self.weighing is not None or self.experiment.get("method") in ONLY_TEXTS:
            for place in (TOPICS_FILE, MODEL_FILE) if is_mixture(solver) else (TOPICS_FILE,):
                save_topic_result(folder / place, H, self.columns, settings, solver, self.weighing)
        if not is_mixture(solver):
            seed = int(self.experiment.get("seed", 0))
            save_model(
                folder / MODEL_FILE, Model(H, self.columns, settings, seed, None, None, now(), package_versions())
            )
            (folder / MODEL_FILE).chmod(0o600)

    def _fit(self, W: Any, Ht: Any) -> dict[str, float | None]:
        """Return ‖X − W H‖ / ‖X‖, None if it is not finite; nothing if weights are shares."""
        if is_mixture(self.program.solver):
            return {}
        with np.errstate(all="ignore"):
            norm, distance = float(self.matrix.squared_norm), float(self.matrix.squared_distance(W, Ht))
        if not math.isfinite(distance):
            return {"relative_error": None}
        return {"relative_error": math.sqrt(max(0.0, distance) / norm) if norm > 0 else 0.0}


def is_complete(folder: Path) -> bool:
    """Whether the result of a run is complete, by the files that are written last."""
    return (folder / RESULT_FILE).exists() and (folder / MODEL_FILE).exists()


def final_components(last: Message, shape: tuple[int, int]) -> Any:
    """Return H of the message with which a run ends: its "components", or else H of the last model.

    Refused, regardless of the rows, if it is not k × m, not finite, negative, or too large to be squared.
    """
    found = last.arrays.get("components", last.arrays.get("H"))
    H = None if found is None else np.asarray(found)
    if H is None or H.shape != shape or H.dtype.kind != "f":
        raise RequestRefused("layout", f"The final model is not {shape[0]} × {shape[1]}.")
    spoiled = [name for name, array in last.arrays.items() if not np.isfinite(np.asarray(array)).all()]
    if spoiled or H.min(initial=0.0) < 0 or H.max(initial=0.0) > MAX_ENTRY.get(H.dtype.name, 0.0):
        names = ", ".join(spoiled) or "components"
        raise RequestRefused(
            "model", f"The final model has entries that are not finite, negative or too large, in {names}."
        )
    return np.ascontiguousarray(H)
