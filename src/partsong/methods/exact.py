"""Exact federated NMF: sum gram and cross, and the pooled factorization comes out whatever the split."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from partsong import kernels
from partsong.aggregation.linear import Sum
from partsong.core.interfaces import Array, Form, Layout, Message, Round, Shard, Traits
from partsong.core.streams import stream
from partsong.errors import ParameterError
from partsong.solvers.initialization import random_columns
from partsong.solvers.squared_error import ColumnState, RowState, SquaredError, Totals

KNOWN = (1e-13, 1e-8)
TRUSTED = (1e-11, 1e-5)
"""Squared errors as shares of ‖X‖², for float64 and float32: the least that sums can tell, and one they tell well."""


@dataclass(frozen=True, slots=True)
class SharedSums:
    """Parties update W_p from the shared H and send WᵀW and WᵀX; the server updates H from the sums.

        local:   W_p ← rule(W_p; H Hᵀ, X_p Hᵀ)          sent: W_pᵀW_p (k × k), W_pᵀX_p (k × m), totals (3)
        finish:  H   ← rule(H; Σ W_pᵀW_p, Σ W_pᵀX_p)    broadcast: H (k × m), pace (2)

    The pace is how far to extrapolate, and 0, or what to multiply W by before starting again from it: 1, or once, under
    penalties, the scale on which they are least.

    The same numbers as factorizing the stacked rows, to rounding. Never sent: X_p, W_p. The sums of one party reveal
    its rows when it has few of them; only a reduction that hides single uploads protects against that.
    """

    rank: int
    solver: SquaredError = field(default_factory=SquaredError)
    aggregation: Sum = Sum()

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ParameterError(f"The rank must be at least 1; got {self.rank}.")

    @property
    def traits(self) -> Traits:
        """H is fitted to the sums alone."""
        return Traits(full_participation=True)

    def start_party(self, shard: Shard, layout: Layout) -> RowState:
        """No W yet: it starts from H and each row alone, in the first round."""
        return RowState()

    def start_server(self, layout: Layout) -> tuple[ColumnState, Message]:
        """Random H from the shared seed; under penalties its scale is settled by the first sums."""
        Ht = random_columns(layout.n_features, self.rank, stream(layout.seed, "start"), layout.dtype)
        columns = replace(self.solver.begin(Ht), is_unscaled=self.solver.has_scale)
        return columns, _model(columns)

    def start_from(self, Ht: Array) -> tuple[ColumnState, Message]:
        """The server's start from a given Hᵀ."""
        columns = self.solver.begin(Ht)
        return columns, _model(columns)

    def local(self, shard: Shard, party: RowState, model: Message) -> tuple[RowState, Message]:
        """One pass over the party's rows."""
        matrix = shard.matrix
        H = matrix.native(model["H"])
        amount, restart = (float(value) for value in model["pace"])
        if restart not in (0.0, 1.0) and party.W is not None:
            party = RowState(party.W * kernels.of(party.W).like(np.array(restart), party.W))
        rows, totals = self.solver.row_step_at(matrix, party, kernels.of(H).rows_of(H), amount, restart > 0)
        scalars = np.array([totals.rows, totals.energy, totals.mass])
        return rows, Message({"gram": totals.gram, "cross": totals.cross.T, "totals": scalars})

    def finish(self, server: ColumnState, aggregate: Message) -> tuple[ColumnState, Message]:
        """The update of H from the sums."""
        totals = _totals(aggregate)
        columns = _in_the_type_of(totals.cross, server)
        if columns.is_unscaled:
            columns = self.solver.settle_scale(columns, totals)
            return columns, _model(columns)
        moved = self.solver.move_columns(columns, totals)
        del aggregate, totals  # as large as H, and not needed for its extrapolation
        columns = self.solver.settle(columns, moved)
        return columns, _model(columns)

    def components(self, server: ColumnState) -> Array:
        """H (k × m) as it stands."""
        return server.Ht.T

    def metrics(self, server: ColumnState) -> Mapping[str, float]:
        """‖X − W H‖ / ‖X‖ over the rows that took part, and the objective over ½‖X‖², known from the sums.

        For data in float32, squares are right to some 1e-9 of ‖X‖², to some 1e-8 where few numbers of WᵀX make up most
        of it, and to 1e-7 where sparse rows have fewer entries than there are components: an error of 1e-3 to about
        1e-5 (1e-4). What is below `KNOWN` cannot be told from sums, and is stated as that.
        """
        if server.squared_norm <= 0:
            return {"relative_error": 0.0, "objective": 0.0}
        squared = server.squared_error / server.squared_norm
        stated = max(squared, KNOWN[_is_single(server.Ht)])
        penalties = 2 * server.objective / server.squared_norm - squared
        return {"relative_error": math.sqrt(stated), "objective": stated + penalties}

    def directions(self, model: Message | None) -> int:
        """WᵀX is k combinations of rows."""
        return self.rank

    def expects(self, layout: Layout) -> tuple[Mapping[str, Form], ...]:
        """Products and totals of non-negative matrices."""
        k, m = self.rank, layout.n_features
        shapes = {"gram": (k, k), "cross": (k, m), "totals": (3,)}
        return ({name: Form(shape, non_negative=True) for name, shape in shapes.items()},)


def is_known(done: Round, dtype: Any) -> bool:
    """Whether the error that a round states is more than the rounding of its sums."""
    return done.metrics["relative_error"] ** 2 > TRUSTED["float32" in str(dtype)]


def _is_single(array: Array) -> bool:
    return "float32" in str(array.dtype)


def _totals(aggregate: Message) -> Totals:
    rows, energy, mass = (float(value) for value in aggregate["totals"])
    cross = kernels.of(aggregate["cross"]).rows_of(aggregate["cross"])
    return Totals(aggregate["gram"], cross, rows, energy, mass)


def _model(columns: ColumnState) -> Message:
    restart = columns.scale if columns.scale != 1.0 else float(columns.pace.must_restart)
    pace = np.array([columns.pace.amount, restart])
    return Message({"H": columns.point.T, "pace": pace})


def _in_the_type_of(example: Array, columns: ColumnState) -> ColumnState:
    """Before the first sums arrive the server cannot know where the parties compute; H follows them."""
    if type(columns.Ht) is type(example) and columns.Ht.dtype == example.dtype:
        return columns
    to, of = kernels.of(example), kernels.of(columns.Ht)
    Ht = to.like(of.to_numpy(columns.Ht), example)
    previous = columns.memory.previous
    memory = replace(columns.memory, previous=None if previous is None else to.like(of.to_numpy(previous), example))
    return replace(columns, Ht=Ht, point=to.like(of.to_numpy(columns.point), example), memory=memory)
