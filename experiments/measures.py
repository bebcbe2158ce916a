"""How numbers of several seeds are told."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def spread(values: Sequence[float], digits: int = 3) -> str:
    """mean ± standard deviation over seeds."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{np.mean(values):.{digits}f} ± {np.std(values, ddof=1):.{digits}f}"
