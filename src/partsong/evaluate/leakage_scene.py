"""What an attack begins with: a run as an attacker has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from partsong.core import Layout, Message
from partsong.evaluate.leakage_findings import Finding
from partsong.evaluate.leakage_transcript import Exchange, of_party


@dataclass(frozen=True, slots=True)
class Scene:
    """A run as an attacker has it, and, for an audit of one's own, the rows that were hidden."""

    exchanges: Sequence[Exchange]
    program: Any
    layout: Layout
    truth: Mapping[str, np.ndarray]

    def seen(self, party: str, *names: str) -> list[tuple[Message, Message]]:
        """(model, upload) where a party sent these arrays."""
        return of_party(self.exchanges, party, *names)


def judged(scene: Scene, finding: Finding, measure: Callable[[np.ndarray, np.ndarray], float]) -> list[Finding]:
    """With its error, where the truth is known."""
    if finding.party not in scene.truth or finding.recovered is None:
        return [finding]
    return [replace(finding, error=measure(finding.recovered, scene.truth[finding.party]))]
