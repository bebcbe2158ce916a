"""Sums under masks are among parties that were told the same: an experiment, columns in their order, and a layout.

context = SHA-256(experiment, hashes of columns, layout), each as the start of a run tells it

It goes into the settings that parties sign in the set-up of masks. A server that tells one site another experiment, or
other columns, so that its part of a sum stands out against those of others, gets no sum: the signatures do not fit.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from partsong.core import Layout, Reduction
from partsong.errors import PredictableMasks
from partsong.privacy.key_agreement import fingerprint
from partsong.privacy.masking import MaskedSum


def context_of(experiment: Mapping[str, Any], columns: Any, layout: Layout) -> str:
    """64 hexadecimal digits, the same for those who were told the same."""
    told = [json.dumps(value, sort_keys=True) for value in (dict(experiment), asdict(layout))]
    return fingerprint("partsong start of a run", *told, np.ascontiguousarray(columns).tobytes()).hex()


def bound_to(context: str, reduction: Reduction) -> Reduction:
    """The same reduction; masks only among those of the same context."""
    if not isinstance(reduction, MaskedSum):
        return reduction
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PredictableMasks)  # whoever made these masks was warned
        bound: Reduction = replace(reduction, context=context.encode())
    return bound
