"""An agreement on words as a program of a federation, which is over when it says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong.text.agreement import VocabularyAgreement
from partsong.text.agreement_steps import DONE, Count


@dataclass(frozen=True, slots=True)
class WordRounds(VocabularyAgreement):
    """The same exchanges; it has no factor, and none is shared."""

    @property
    def rank(self) -> int:
        """None."""
        return 0

    def components(self, server: Count) -> Any:
        """None."""
        return np.zeros((0, 0))

    @staticmethod
    def is_over(server: Count) -> bool:
        """Whether all words are agreed on, and counted."""
        return server.step.stage == DONE
