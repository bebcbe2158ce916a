"""What states of programs are made of: the classes that files of such states may name."""

from __future__ import annotations

from functools import cache

from partsong.core import Layout, Message


@cache
def program_states() -> tuple[type, ...]:
    """Of all programs that can be interrupted and go on; a class that is not among these is never made from a file."""
    from partsong.local.alternate import Columns, Rows
    from partsong.local.momentum import Pace
    from partsong.local.rules import RuleState
    from partsong.programs.consensus import ConsensusParty, ConsensusServer
    from partsong.programs.private_consensus import PrivateParty
    from partsong.programs.private_statistics import PrivateModel, PrivateRows
    from partsong.programs.relay import RelayParty, RelayServer
    from partsong.programs.sketch_exchange import SketchServer
    from partsong.programs.sketch_turns import SketchParty
    from partsong.programs.sketched_consensus import MeanServer, SteppingParty
    from partsong.programs.sketched_statistics import SketchedStatisticsParty, SketchedStatisticsServer
    from partsong.programs.strata_play import PlayParty, PlayServer

    plain = (Rows, Columns, RuleState, Pace, ConsensusParty, ConsensusServer, RelayParty, RelayServer)
    private = (PrivateParty, PrivateRows, PrivateModel)
    sketched = (SketchParty, SketchServer, SteppingParty, MeanServer, SketchedStatisticsParty, SketchedStatisticsServer)
    return (Message, Layout, *plain, *private, *sketched, PlayParty, PlayServer, *_of_topics())


def _of_topics() -> tuple[type, ...]:
    from partsong.aggregate.adaptive import Moments
    from partsong.programs.cooccurrence_sums import Counted, Counter
    from partsong.programs.federated_lda import DocumentTopics, TopicWords
    from partsong.programs.frequency_sums import Frequencies, Sender
    from partsong.programs.topic_rounds import TopicParty, TopicServer

    return (TopicParty, TopicServer, Moments, DocumentTopics, TopicWords, Counted, Counter, Frequencies, Sender)
