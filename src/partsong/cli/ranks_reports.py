"""An asynchronous program whose parties also say how well the model fits: else no rank could tell when to stop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong import kernels
from partsong.core import Aggregation, Array, Form, Layout, Message, RowSolver, Shard, State
from partsong.programs.consensus import Consensus, ConsensusParty

ERROR = "reported_error"
"""The metric that the server makes of reports; it is not the error of one moment."""


@dataclass(frozen=True, slots=True)
class ReportingParty:
    """A party, which place it has in the list of all, and how many there are."""

    party: ConsensusParty
    place: int
    parties: int


@dataclass(frozen=True, slots=True)
class ReportedServer:
    """A server, and the latest report of each party (2 × parties): ‖X_p − W_p H‖², ‖X_p‖²; zero before the first."""

    server: State
    reports: np.ndarray


@dataclass(frozen=True, slots=True)
class Reporting:
    """A `Consensus` with two more numbers in each upload: ‖X_p − W_p H‖² for the H that was sent, and ‖X_p‖².

    W_p is that of the party's work before, so that a first report is of an empty model. Who reports is told by the
    place of these numbers among zeros (2 × parties). The error is that of everybody's latest report together: each is
    of the moment at which that party was last answered. Never sent: X_p, W_p.
    """

    program: Consensus

    @property
    def rank(self) -> int:
        """Of the program."""
        return self.program.rank

    @property
    def solver(self) -> RowSolver:
        """Of the program."""
        return self.program.solver

    @property
    def aggregation(self) -> Aggregation:
        """Of the program; with one upload at a time it is that upload."""
        return self.program.aggregation

    def start_party(self, shard: Shard, layout: Layout) -> ReportingParty:
        """The program's, with its place."""
        place = layout.parties.index(shard.name)
        return ReportingParty(self.program.start_party(shard, layout), place, len(layout.parties))

    def start_server(self, layout: Layout) -> tuple[ReportedServer, Message]:
        """The program's, without reports."""
        server, model = self.program.start_server(layout)
        return ReportedServer(server, np.zeros((2, len(layout.parties)))), model

    def local(self, shard: Shard, party: ReportingParty, model: Message) -> tuple[ReportingParty, Message]:
        """A look at the model, then the program's work."""
        reports = np.zeros((2, party.parties))
        reports[:, party.place] = _squares(shard, party.party.W, model)
        after, upload = self.program.local(shard, party.party, model)
        sent = Message({**upload.arrays, "reports": reports}, upload.weight)
        return ReportingParty(after, party.place, party.parties), sent

    def finish(self, server: ReportedServer, aggregate: Message) -> tuple[ReportedServer, Message]:
        """The program's, and the report of the one who has come."""
        arrays = dict(aggregate.arrays)
        new = np.asarray(arrays.pop("reports"))
        after, model = self.program.finish(server.server, Message(arrays, aggregate.weight))
        return ReportedServer(after, np.where(new.any(axis=0), new, server.reports)), model

    def components(self, server: ReportedServer) -> Array:
        """H (k × m) as it stands."""
        return self.program.components(server.server)

    def metrics(self, server: ReportedServer) -> Mapping[str, float]:
        """√(Σ_p ‖X_p − W_p H‖² / Σ_p ‖X_p‖²) over those who have reported."""
        distance, energy = server.reports.sum(axis=1)
        return {ERROR: math.sqrt(max(0.0, distance) / energy) if energy > 0 else 0.0}

    def expects(self, layout: Layout) -> tuple[Mapping[str, Form], ...]:
        """What the program expects, and reports."""
        reports = Form((2, len(layout.parties)), non_negative=True)
        return tuple({**kind, "reports": reports} for kind in self.program.expects(layout))

    def exchange(self, model: Message) -> tuple[int, int]:
        """Of the program."""
        return self.program.exchange(model)


def _squares(shard: Shard, W: Array | None, model: Message) -> tuple[float, float]:
    matrix: Any = shard.matrix
    if W is None:
        return matrix.squared_norm, matrix.squared_norm
    H = matrix.native(model["H"])
    return max(0.0, matrix.squared_distance(W, kernels.of(H).rows_of(H))), matrix.squared_norm
