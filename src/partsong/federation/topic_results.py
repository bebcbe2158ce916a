"""The topics of a run that is over, as `partsong topics show`, `partsong topics transform` and `TopicModel.load` read
them: the same at every site, but for the time at which they were written; nothing of its rows is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from partsong.core import RowSolver
from partsong.io.provenance import now, package_versions
from partsong.io.topic_file import TopicFile, save_topics
from partsong.text.words import Words
from partsong.topic_saving import solver_as_told
from partsong.topic_words import COUNTS, Weighing

TOPICS = "topics.safetensors"

UNKNOWN = Words("none")
"""How texts are split where the words of counts were found elsewhere: runs of letters in lower case, no stop words."""


@dataclass(frozen=True, slots=True)
class TopicResult:
    """H (k × V), the words of its columns, the settings of the run, and how weights are found.

    `weighing`: what a text is to these topics. None, where sites held counts: how often it has the words by which
    columns are named; one whose name is no word of `UNKNOWN` stays zero.
    """

    H: Any = field(repr=False)
    words: tuple[str, ...] = field(repr=False)
    settings: Mapping[str, Any]
    solver: RowSolver
    weighing: Weighing | None = field(repr=False, default=None)

    def save(self, path: Path) -> None:
        """Write it, for its owner alone; sizes and coherence of topics are not known."""
        known = self.weighing
        weighting = COUNTS if known is None else known.weighting
        settings = {**self.settings, "n_topics": len(self.H), "weighting": weighting, **solver_as_told(self.solver)}
        model = TopicFile(
            components=self.H,
            words=self.words,
            key="",
            options=(UNKNOWN if known is None else known.words).to_json(),
            frequencies=self._frequencies(),
            n_documents=0 if known is None else known.n_documents,
            shares=None,
            coherence=None,
            settings=settings,
            seed=int(self.settings.get("seed", 0)),
            created=now(),
            versions=package_versions(),
        )
        save_topics(path, model)
        path.chmod(0o600)

    def _frequencies(self) -> np.ndarray | None:
        """In how many documents each word is, in the order of H; None where words are only counted."""
        if self.weighing is None or self.weighing.documents is None:
            return None
        places = [self.weighing.vocabulary.column(word) for word in self.words]
        return np.asarray(self.weighing.documents, np.int64)[places]
