"""Names of federated methods, and what each does unless told otherwise; light enough for a command line to import."""

from __future__ import annotations

from typing import Any

SKETCHED = ("syn-ssd-u", "syn-ssd-v", "syn-ssd-uv")
"""Methods whose rounds take several exchanges, of sketches of H and at last of H."""

ASYNCHRONOUS = ("asyn-sd", "asyn-ssd-v")
"""Methods in which no party waits for another; a round is as many arrivals as there are parties."""

METHODS = (
    "exact", "fnmf", "fnmf-alone", "fedavg", "fedprox", "ipalm-once", "mur-once", "syn-sd", *SKETCHED, *ASYNCHRONOUS,
    "game",
)  # fmt: skip
ALIGNMENTS = ("assignment", "partial-assignment", "sinkhorn", "partial-sinkhorn", "nearest", "softmax", "identity")
STARTS = ("common", "independent")

ALIGNED = ("fnmf", "fnmf-alone")
"""Methods that find out which component is which."""

ALIGNMENT = {"fnmf": "assignment", "fnmf-alone": "sinkhorn"}
"""How they do so unless told otherwise: on the worst of eight sets nearest to pooling, with strengths tuned for each
(docs/results/fnmf.md)."""

LONG_ROUNDS = 1
"""Rounds with which "fnmf" begins; all others are exact (docs/results/fnmf.md, decision 11)."""

LOCAL_ONLY = "local-only"
"""A baseline of the command line and the demo: local models, averaged once."""

ONE_ROUND = ("ipalm-once", "mur-once", LOCAL_ONLY)
"""Methods that exchange once, whatever number of rounds is asked for."""

INDEPENDENT = (*ALIGNED, *ONE_ROUND)
"""Methods whose parties begin with an H of their own unless told otherwise."""

COMMON_ONLY = ("exact", "syn-sd", *SKETCHED, *ASYNCHRONOUS, "game")
"""Methods whose parties must begin with one H."""

SENDS_H = ("fnmf-alone", "fedavg", "fedprox", "ipalm-once", "mur-once", "syn-sd")
"""Methods in which all that a party sends is its own H."""

MOST_ROUNDS, PRIVATE_ROUNDS = 100, 10
"""Rounds unless told otherwise; noise for privacy grows with the root of their number."""

LOCAL_STEPS = {
    "exact": 3,
    "fnmf": 100,
    "fnmf-alone": 100,
    "fedavg": 3,
    "fedprox": 10,
    "ipalm-once": 1000,
    "mur-once": 1000,
    **dict.fromkeys(("syn-sd", *SKETCHED, *ASYNCHRONOUS), 10),
    "game": 1,
    LOCAL_ONLY: 100,
}
"""What a party does between two exchanges unless told otherwise."""


def alignment_for(method: str, wanted: Any = None) -> Any:
    """The alignment asked for, or the method's own; a name for any method, since not all of them align."""
    return wanted if wanted is not None else ALIGNMENT.get(method, "assignment")


def start_of(method: str, wanted: str | None) -> str:
    """The start asked for, or the method's own."""
    return wanted if wanted is not None else ("independent" if method in INDEPENDENT else "common")
