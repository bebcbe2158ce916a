"""Names around topic models; light enough for a command line to import."""

from __future__ import annotations

ALONE = ("nmf", "nmf-sgd", "nmf-sgd-mi", "lda")
"""Methods for texts that are in one place."""

TOGETHER = ("exact", "fnmf", "fednmf", "fednmf-mi", "fedlda")
"""Methods between parties."""

DESCENTS = ("fednmf", "fednmf-mi")
"""Those whose server takes steps of its own, and that can do with some of the parties in a round."""

DESCENDING = ("nmf-sgd", "nmf-sgd-mi", *DESCENTS)
"""All that take steps on batches of documents, and can take them on a device."""

LANGUAGES = ("english", "german", "french", "spanish", "italian", "none")
"""Lists of stop words."""

SERVERS = ("average", "adagrad", "yogi", "adam")
COHERENCES = ("npmi", "c_v", "vectors")

ROUNDS = {"nmf": 200, "exact": 200, "fnmf": 200}
OTHER_ROUNDS = 50
"""The most rounds of all others."""

TOP = 10
"""Words that stand for a topic."""


def rounds_for(method: object) -> int:
    """The most rounds unless told otherwise."""
    return ROUNDS.get(method, OTHER_ROUNDS) if isinstance(method, str) else OTHER_ROUNDS
