"""Names of federated methods, and what each does unless told otherwise; light enough for a command line to import."""

from __future__ import annotations

from functools import cache
from typing import Any

from partsong.core.interfaces import Layout, Message

# ---- methods ----------------------------------------------------------------------------------------------------

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

GAME = "game"
"""A solver of one table, and a method between parties and over ranks."""

SAFE = "safe"
"""The step of a game that goes by norms and needs no number."""

DSANLS = "dsanls"
"""Over ranks alone: each needs columns beside its rows."""

RANK_SOLVERS = {"exact": "hals", "hals": "cd", "mu": "mu", "bpp": "bpp"}
"""Methods over ranks, and the solver that does the same to a table in one process."""

RANK_AVERAGES = ("syn-sd", *SKETCHED)
"""Methods over ranks in which a rank is a party."""

RANK_METHODS = (*RANK_SOLVERS, DSANLS, *RANK_AVERAGES, *ASYNCHRONOUS, GAME)

WITH_SKETCHES = (DSANLS, *SKETCHED, "asyn-ssd-v")

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


# ---- program states ---------------------------------------------------------------------------------------------
#
# What states of programs are made of: the classes that files of such states may name.


@cache
def program_states() -> tuple[type, ...]:
    """Of all programs that can be interrupted and go on; a class that is not among these is never made from a file."""
    from partsong.methods.averaging import ConsensusParty, ConsensusServer
    from partsong.methods.dsanls import SketchParty, SketchServer
    from partsong.methods.game import PlayParty, PlayServer
    from partsong.methods.private import PrivateModel, PrivateParty, PrivateRows
    from partsong.methods.relay import RelayParty, RelayServer
    from partsong.methods.secure_sketched import (
        MeanServer,
        SketchedStatisticsParty,
        SketchedStatisticsServer,
        SteppingParty,
    )
    from partsong.solvers.normal_equations import RuleState
    from partsong.solvers.squared_error import ColumnState, MomentumState, RowState, Trial

    plain = (
        RowState,
        ColumnState,
        RuleState,
        MomentumState,
        Trial,
        ConsensusParty,
        ConsensusServer,
        RelayParty,
        RelayServer,
    )
    private = (PrivateParty, PrivateRows, PrivateModel)
    sketched = (SketchParty, SketchServer, SteppingParty, MeanServer, SketchedStatisticsParty, SketchedStatisticsServer)
    return (Message, Layout, *plain, *private, *sketched, PlayParty, PlayServer, *_of_topics())


def _of_topics() -> tuple[type, ...]:
    from partsong.aggregation.server_update import Moments
    from partsong.methods.counts import Counted, Counter, Frequencies, Sender
    from partsong.methods.fedlda import DocumentTopics, TopicWords
    from partsong.methods.fednmf import TopicParty, TopicServer

    return (TopicParty, TopicServer, Moments, DocumentTopics, TopicWords, Counted, Counter, Frequencies, Sender)


def state_types() -> tuple[type, ...]:
    """All that a checkpoint file may hold: states of programs, and work under way in an asynchronous run."""
    from partsong.engines.asynchronous import Midway, Piece

    return (*program_states(), Midway, Piece)


# ---- topic names ------------------------------------------------------------------------------------------------
#
# Names around topic models; light enough for a command line to import.

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
