"""Sums under masks are among parties that were told the same: an experiment, columns in their order, and a layout.

context = SHA-256(experiment, hashes of columns, layout), each as the start of a run tells it
over texts, before that: SHA-256(df, n), in how many documents of all sites each agreed word is, and how many there are,
                         as the end of the agreement on words has told; weights of words follow from it

It goes into the settings that parties sign in the set-up of masks. A server that tells one site another experiment,
other columns or other frequencies of words, so that its part of a sum stands out against those of others, gets no sum:
the signatures do not fit.
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


def words_context_of(documents: Any, n_documents: Any) -> str:
    """64 hexadecimal digits, the same for those who were told the same document frequencies (m) of agreed words."""
    frequencies = np.ascontiguousarray(documents, "<i8").tobytes()
    return fingerprint("partsong frequencies of words", frequencies, str(int(n_documents))).hex()


def bound_to(context: str, reduction: Reduction) -> Reduction:
    """The same reduction; masks only among those of the same context, besides the one that it is bound to already."""
    if not isinstance(reduction, MaskedSum):
        return reduction
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PredictableMasks)  # whoever made these masks was warned
        bound: Reduction = replace(reduction, context=reduction.context + context.encode())
    return bound
