"""Secure sketched NMF (Qian et al., 2020): Syn-SD, Syn-SSD, Asyn-SD, Asyn-SSD and modified DSANLS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np

from partsong import kernels
from partsong.aggregation.linear import Mean, Sum, WeightedMean
from partsong.aggregation.server_update import Relaxation
from partsong.core.interfaces import Array, ArraySpec, Layout, Message, ProgramBase, Shard, Traits, Turn, UpdateRule
from partsong.core.parameters import SHARE, Above, Choice, Steps, Whole, whole_number
from partsong.core.states import state
from partsong.core.streams import stream
from partsong.data.conversion import transposed_factor
from partsong.errors import CompositionError, ParameterError, PartyError
from partsong.methods.averaging import OWN_COMPONENTS, LocalAveraging
from partsong.methods.init_modes import SHARED_INIT, SharedInit, SharedInitMode
from partsong.methods.registry import Problem, method
from partsong.sketch.crossing import Proportion
from partsong.sketch.kinds import SKETCHES, CountSketch, Gaussian, Hadamard, Subsampling
from partsong.sketch.operator import Operator, Sketch
from partsong.sketch.recovery import most_sketches
from partsong.solvers.initialization import random_columns
from partsong.solvers.normal_equations import NormalEquations, RuleState
from partsong.solvers.sketched import exact_columns, exact_rows, first_rows, sketched_columns, sketched_rows
from partsong.solvers.squared_error import SquaredError
from partsong.solvers.update_rules import RULES, NoExtrapolation, ProximalDescent, warn_if_noisy


@state("sketched-averaging.party")
@dataclass(frozen=True, slots=True)
class SketchedAveragingPartyState:
    """The shared seed, W, the party's own Hᵀ (m × k), the update rules' state for each, the last outer round."""

    seed: int
    W: Array | None = None
    Ht: Array | None = None
    rows: RuleState = RuleState()
    columns: RuleState = RuleState()
    outer: int = -1


@state("sketched-averaging.server")
@dataclass(frozen=True, slots=True)
class SketchedAveragingServerState:
    """The latest averaged H (k × m), and the next outer round and exchange."""

    H: Array
    outer: int = 0
    turn: int = 0


@dataclass(frozen=True, slots=True)
class SketchedAveraging(ProgramBase):
    """Syn-SSD (Qian et al., 2020, Alg. 5), with H for their U and W for their V: one round is one exchange.

        exchange 0:               H_p ← H;                                  H_p ← step_H
        exchange i = 1 … inner:   W_p ← rule(W_p; B Bᵀ, X_p S2 Bᵀ);         H_p ← step_H, but not after the last
        step_H:                   rule(H_p; S1ᵀW_p, S1ᵀX_p)
        sent:        H_p S2 (k × d2) in exchanges 0 … inner − 1, H_p (k × m) in exchange `inner`
        broadcast:   B = mean of H_p S2, or H = mean of H_p, and the outer round and exchange (2)

    So W always fits the mean of all H_p, and the H_p cannot drift apart between two outer means. S2 (m × d2) is shared
    and comes from the shared seed; S1 (n_p × d1) is private and comes from the party's secret. Both are redrawn in
    every iteration. Syn-SSD-U has `columns_sketch` only, -V `rows_sketch` only, -UV both. A step without a sketch is
    exact; without S2, all of H_p is sent in every exchange. The first W is one step of the rule from w = c·1, which the
    rule does not count.

    Never sent: X_p, W_p, or any array with one row per row of X_p. Without secure aggregation the server sees H_p S2
    and H_p; the other party of two, or all others together, can compute H_p from the mean.

    A party that missed exchange 0 of an outer round has no current H and is refused until the next one. A party that
    misses a later exchange continues from its own state.
    """

    rank: int
    solver: SquaredError = field(default_factory=lambda: SquaredError(ProximalDescent()))
    inner: int = 10
    rows_sketch: Proportion | None = Proportion()
    columns_sketch: Proportion | None = Proportion()
    aggregation: Mean | WeightedMean = Mean()
    init_mode: SharedInit = SharedInit()

    def __post_init__(self) -> None:
        for name in ("rank", "inner"):
            whole_number(f"SketchedAveraging: {name}", getattr(self, name))
        if self.rows_sketch is not None or self.columns_sketch is not None:
            warn_if_noisy(self.solver.rule)
        if not isinstance(self.solver.momentum, NoExtrapolation):
            raise CompositionError("Sketched steps cannot be extrapolated. Use a solver with NoExtrapolation.")
        if not isinstance(self.aggregation, (Mean, WeightedMean)):
            raise CompositionError(
                f"Sketches of H can be averaged but not aligned, so aggregation={self.aggregation} cannot be used. Use "
                "Mean or WeightedMean."
            )

    @property
    def traits(self) -> Traits:
        """W fits the mean of all H_p."""
        return Traits(full_participation=True)

    def exchanges(self, rounds: int, n_parties: int) -> int:
        return rounds * (self.inner + 1)

    def start_party(self, shard: Shard, layout: Layout) -> SketchedAveragingPartyState:
        return SketchedAveragingPartyState(layout.seed)

    def start_server(self, layout: Layout) -> tuple[SketchedAveragingServerState, Message]:
        Ht = self.init_mode.model(layout, self.rank, stream(layout.seed, "start"))
        assert Ht is not None
        return SketchedAveragingServerState(Ht.T), Message({"H": Ht.T, "turn": np.array([0, 0], np.int64)})

    def local(
        self, shard: Shard, party: SketchedAveragingPartyState, model: Message
    ) -> tuple[SketchedAveragingPartyState, Message]:
        outer, turn = (int(value) for value in model["turn"])
        step = outer * self.inner + turn
        if turn == 0:
            party = self._begin(shard, party, transposed_factor(shard.matrix, model["H"]), outer)
        else:
            _require_begun(shard, party, outer)
            party = self._row_step(shard, party, model, step - 1)
        S = None
        if turn < self.inner:
            party = self._column_step(shard, party, step)
            S = self._shared_sketch(party, shard.matrix.shape[1], step)
        Ht: Array = party.Ht
        sent = {"H": Ht.T} if S is None else {"sketch": S.sketch_transposed(Ht)}
        weight = float(shard.matrix.shape[0]) if isinstance(self.aggregation, WeightedMean) else 1.0
        return party, Message(sent, weight)

    def _begin(
        self, shard: Shard, party: SketchedAveragingPartyState, Ht: Array, outer: int
    ) -> SketchedAveragingPartyState:
        rule = self.solver.rule
        memory = replace(rule.init(Ht), count=party.columns.count, scale=party.columns.scale)
        party = replace(party, Ht=Ht, columns=memory, outer=outer)
        if party.W is not None:
            return party
        S = self._shared_sketch(party, shard.matrix.shape[1], "start")
        equations = _for_rows(shard, S, Ht.T if S is None else S.sketch_transposed(Ht))
        W = first_rows(equations)
        W, rows = rule.step(W, equations.penalized(self.solver.penalty_W, shard.matrix.shape[1]), rule.init(W))
        return replace(party, W=W, rows=replace(rows, count=0))

    def _row_step(
        self, shard: Shard, party: SketchedAveragingPartyState, model: Message, step: int
    ) -> SketchedAveragingPartyState:
        m = shard.matrix.shape[1]
        S = self._shared_sketch(party, m, step)
        equations = _for_rows(shard, S, model["H" if S is None else "sketch"]).penalized(self.solver.penalty_W, m)
        W, rows = self.solver.rule.step(party.W, equations, party.rows)
        return replace(party, W=W, rows=rows)

    def _column_step(self, shard: Shard, party: SketchedAveragingPartyState, step: int) -> SketchedAveragingPartyState:
        matrix, n = shard.matrix, shard.matrix.shape[0]
        if self.rows_sketch is None:
            equations = exact_columns(matrix, party.W)
        else:
            S = self.rows_sketch.draw(n, self.rank, shard.secret, "S1", shard.name, step)
            equations = sketched_columns(matrix, S, party.W)
        Ht, columns = self.solver.rule.step(party.Ht, equations.penalized(self.solver.penalty_H, n), party.columns)
        return replace(party, Ht=Ht, columns=columns)

    def _shared_sketch(self, party: SketchedAveragingPartyState, m: int, step: int | str) -> Operator | None:
        """S2 (m × d2) of an iteration, the same at all parties."""
        sketch = self.columns_sketch
        return None if sketch is None else sketch.draw(m, self.rank, party.seed, "S2", step)

    def finish(
        self, server: SketchedAveragingServerState, aggregate: Message
    ) -> tuple[SketchedAveragingServerState, Message]:
        if server.turn == self.inner:
            H = aggregate["H"].clip(min=0)  # rounding under masks
            after = SketchedAveragingServerState(H, server.outer + 1, 0)
            mean = {"H": H}
        else:
            after = replace(server, turn=server.turn + 1)
            mean = dict(aggregate.arrays)
        return after, Message({**mean, "turn": np.array([after.outer, after.turn], np.int64)})

    def components(self, server: SketchedAveragingServerState) -> Array:
        return server.H

    def upload_spec(self, layout: Layout) -> tuple[Mapping[str, ArraySpec], ...]:
        """H_p ≥ 0, and H_p S2, which is non-negative if S2 is a subsampling."""
        m = layout.n_features
        whole = {"H": ArraySpec((self.rank, m), non_negative=True, is_factor=True, meaning=OWN_COMPONENTS)}
        if self.columns_sketch is None:
            return (whole,)
        d = self.columns_sketch.dimension(m, self.rank)
        chooses = isinstance(self.columns_sketch.kind(d), Subsampling)
        meaning = "H_p S for an S that all parties know"
        return {"sketch": ArraySpec((self.rank, d), non_negative=chooses, is_factor=True, meaning=meaning)}, whole

    def turn(self, model: Message) -> Turn:
        """Under masks, the last two exchanges of an outer round must have the same cohort.

        H_p does not change between them: with different cohorts, the sums of H_p S2 and of H_p would reveal one party's
        H_p. Between all other exchanges every H_p takes a step, and S2 is redrawn.
        """
        turn = int(model["turn"][1])
        if turn < self.inner - 1:
            return Turn(ends_round=turn == 0)
        return Turn(max(0, turn - self.inner + 1), 2, ends_round=turn == 0)


def _for_rows(shard: Shard, S: Operator | None, B: Array) -> NormalEquations:
    """The normal equations for W from H S, or from H without a sketch."""
    if S is None:
        return exact_rows(shard.matrix, transposed_factor(shard.matrix, B))
    return sketched_rows(shard.matrix, S, shard.matrix.native(B))


def _require_begun(shard: Shard, party: SketchedAveragingPartyState, outer: int) -> None:
    if party.outer != outer:
        raise PartyError(
            f"Party {shard.name!r} missed the first exchange of outer round {outer} and has no current H. It can join "
            'in the next outer round. Keep it absent until then, or use on_party_error="skip" (--on-party-error skip).'
        )


BUDGETS = ("own", "total")
NOT_KNOWN_YET = 2**31
"""Stands for the number of exchanges until the rows are counted."""


@state("sketched-sums.party")
@dataclass(frozen=True, slots=True)
class SketchedSumsPartyState:
    """The shared seed, W (n × k), the update rule's state, and the number of sketches sent."""

    seed: int
    W: Array | None = None
    memory: RuleState = RuleState()
    sent: int = 0


@state("sketched-sums.server")
@dataclass(frozen=True, slots=True)
class SketchedSumsServerState:
    """Hᵀ (m × k), the update rule's state, the next exchange, and the number of rows (0: not counted yet)."""

    Ht: Array
    memory: RuleState
    turn: int = 0
    rows: int = 0


@dataclass(frozen=True, slots=True)
class SketchedSums(ProgramBase):
    """Modified DSANLS in the secure setting: parties own rows only (Qian et al., 2020, Sec. 4).

        exchange 0:     sent: n_p (1)
        exchange t:     W_p ← rule(W_p; (H S')(H S')ᵀ, X_p S'(H S')ᵀ)      or exactly, without `columns_sketch`
                        sent: X_pᵀ S_p (m × d), W_pᵀ S_p (k × d)
        finish:         H ← rule(H; B Bᵀ, A Bᵀ), A = Σ X_pᵀ S_p, B = Σ W_pᵀ S_p      broadcast: H (k × m), t and n (2)

    S_p (n_p × d) comes from the shared seed, the party's name and t, so no party needs the numbers of rows of others,
    and E[S Sᵀ] = I for all of them together. That needs entries of mean zero. Subsampling is refused: its entries do
    not have mean zero, and it would send rows of X_p unchanged. S' (m × d') is the same at all parties.

    Everyone who has the seed can compute S. After ⌈n/d⌉ exchanges the sum determines X (Thm. 3;
    `recover_from_sketches`); single uploads determine X_p after ⌈n_p/d⌉. Parties therefore refuse to send more than
    ⌊(n − 1)/d⌋ sketches:

        budget="own"     n = n_p; correct if the server sees single uploads
        budget="total"   n = Σ n_p; only with a reduction that hides uploads and the same parties in every sum, which
                         engines enforce; such a run cannot be resumed

    `is_guarded=False` removes this limit. The limit holds for one run; sketches from another seed add to these. It
    means that X is not determined, not that nothing is revealed.
    """

    rank: int
    rows_sketch: Sketch
    solver: SquaredError = field(default_factory=lambda: SquaredError(ProximalDescent()))
    columns_sketch: Proportion | None = None
    budget: str = "own"
    is_guarded: bool = True
    aggregation: Sum = Sum()

    def __post_init__(self) -> None:
        d = self.rows_sketch.dimension
        if not isinstance(self.rank, (int, np.integer)) or not 1 <= self.rank <= d:
            raise ParameterError(f"rank must be from 1 to d = {d}, the dimension of the sketch; got {self.rank!r}.")
        if self.budget not in BUDGETS:
            raise ParameterError(f'budget must be "own" or "total"; got {self.budget!r}.', parameter="budget")
        warn_if_noisy(self.solver.rule)
        if self.is_guarded and isinstance(self.rows_sketch, CountSketch):
            raise CompositionError(
                "A count sketch sends each row of X that is alone in its bucket unchanged, up to its sign. Use "
                "Gaussian or Hadamard. To accept the risk, pass is_guarded=False."
            )
        if isinstance(self.rows_sketch, Subsampling):
            raise CompositionError(
                "Subsampling would send rows of X unchanged, and rows chosen by each party do not give E[S Sᵀ] = I. "
                "Use Gaussian, CountSketch or another sketch whose entries have mean zero."
            )
        if not isinstance(self.solver.momentum, NoExtrapolation):
            raise CompositionError("Sketched steps cannot be extrapolated. Use a solver with NoExtrapolation.")

    @property
    def traits(self) -> Traits:
        """The sketches of all parties form one sketch of all rows. budget="total" does not limit what a single party
        reveals.
        """
        if self.budget == "own" or not self.is_guarded:
            return Traits(full_participation=True)
        reason = (
            'budget="total" counts sketches of all rows, but single uploads reveal the rows of a small party much '
            'earlier. Use budget="own", or a reduction that hides uploads.'
        )
        return Traits(full_participation=True, requires="secure", reason=reason)

    def operator(self, seed: int, party: str, n_rows: int, turn: int) -> Operator:
        """S_p of one exchange; only its first n_p rows are used, which may be fewer than its dimension."""
        return self.rows_sketch.draw(max(n_rows, self.rows_sketch.dimension), seed, "S", party, turn)

    def start_party(self, shard: Shard, layout: Layout) -> SketchedSumsPartyState:
        return SketchedSumsPartyState(layout.seed)

    def start_server(self, layout: Layout) -> tuple[SketchedSumsServerState, Message]:
        Ht = random_columns(layout.n_features, self.rank, stream(layout.seed, "start"), layout.dtype)
        server = SketchedSumsServerState(Ht, self.solver.rule.init(Ht))
        return server, _broadcast(server)

    def local(
        self, shard: Shard, party: SketchedSumsPartyState, model: Message
    ) -> tuple[SketchedSumsPartyState, Message]:
        turn, total_rows = (int(value) for value in model["turn"])
        matrix = shard.matrix
        if turn < 0:
            raise PartyError(
                f"Party {shard.name!r} received turn {turn}, but turns count from 0. Use one version of partsong "
                "everywhere."
            )
        if turn == 0:
            return party, Message({"rows": np.array([float(matrix.shape[0])])})
        self._require_budget(shard, party, turn, total_rows)
        W, memory = self._row_step(shard, party, model, turn)
        S = self.operator(party.seed, shard.name, matrix.shape[0], turn)
        sketches = {"data": S.sketch_transposed(matrix), "weights": S.sketch_transposed(W)}
        return SketchedSumsPartyState(party.seed, W, memory, party.sent + 1), Message(sketches)

    def _row_step(
        self, shard: Shard, party: SketchedSumsPartyState, model: Message, turn: int
    ) -> tuple[Array, RuleState]:
        matrix, m = shard.matrix, shard.matrix.shape[1]
        Ht = transposed_factor(matrix, model["H"])
        if self.columns_sketch is None:
            equations = exact_rows(matrix, Ht)
        else:
            S = self.columns_sketch.draw(m, self.rank, party.seed, "S'", turn)
            equations = sketched_rows(matrix, S, S.sketch_transposed(Ht))
        W, memory = party.W, party.memory
        if W is None:
            W = first_rows(equations)
            memory = self.solver.rule.init(W)
        return self.solver.rule.step(W, equations.penalized(self.solver.penalty_W, m), memory)

    def _require_budget(self, shard: Shard, party: SketchedSumsPartyState, turn: int, total_rows: int) -> None:
        """Check the limit before computing anything of this exchange.

        The limit is on the turn as well as on the party's count: a restored party state may have lost earlier counts,
        but a sketch depends on its turn only, so turns within the limit never give more sketches than the limit.
        """
        is_own = self.budget == "own"
        rows, sent = shard.matrix.shape[0] if is_own else total_rows, max(party.sent, turn - 1)
        d = self.rows_sketch.dimension
        most = most_sketches(rows, d)
        if not self.is_guarded or sent < most:
            return
        whose = f"its {rows} rows" if is_own else f"the {rows} rows of all parties"
        way = ' Or hide uploads by secure aggregation and use budget="total".' if is_own else ""
        raise PartyError(
            f"Party {shard.name!r} may have sent {sent} sketches of dimension {d} and sends no more: {most + 1} of "
            f"them, with the seed, determine {whose}; at most ⌊({rows} − 1)/{d}⌋ = {most} do not. Stop after "
            f"{most + 1} rounds (the first counts rows), or use a smaller sketch dimension.{way} To accept the risk, "
            "pass is_guarded=False."
        )

    def finish(self, server: SketchedSumsServerState, aggregate: Message) -> tuple[SketchedSumsServerState, Message]:
        if server.turn == 0:
            after = replace(server, turn=1, rows=round(float(aggregate["rows"][0])))
            return after, _broadcast(after)
        A, B = aggregate["data"], aggregate["weights"]
        Ht = kernels.of(A).cast(kernels.of(server.Ht).to_numpy(server.Ht), A)
        equations = NormalEquations.of(A, B).penalized(self.solver.penalty_H, server.rows)
        Ht, memory = self.solver.rule.step(Ht, equations, server.memory)
        after = replace(server, Ht=Ht, memory=memory, turn=server.turn + 1)
        return after, _broadcast(after)

    def components(self, server: SketchedSumsServerState) -> Array:
        return server.Ht.T

    def directions(self, model: Message | None) -> int:
        """A sketch of X is d combinations of rows; the first exchange only counts rows."""
        return 0 if model is not None and int(model["turn"][0]) == 0 else self.rows_sketch.dimension

    def directions_after(self, exchanges: int, parties: int) -> int:
        return max(0, exchanges - 1) * self.rows_sketch.dimension

    def upload_spec(self, layout: Layout) -> tuple[Mapping[str, ArraySpec], ...]:
        d = self.rows_sketch.dimension
        data = ArraySpec((layout.n_features, d), meaning="X_pᵀ S_p, S_p from the shared seed")
        weights = ArraySpec((self.rank, d), meaning="W_pᵀ S_p")
        return {"data": data, "weights": weights}, {"rows": ArraySpec((1,), non_negative=True, meaning="n_p, once")}

    def turn(self, model: Message) -> Turn:
        """With budget="total", the whole run is one round under masks, so that every sum has the same cohort.

        A sum over fewer parties has fewer unknown rows. With budget="own" the cohort may change. Counting rows does not
        move H and ends no round.
        """
        turn, rows = (int(value) for value in model["turn"])
        if self.budget == "own":
            return Turn(ends_round=turn > 1)
        most = most_sketches(rows, self.rows_sketch.dimension) + 1 if rows else NOT_KNOWN_YET
        return Turn(turn, max(most, turn + 1, 2), ends_round=turn > 1)


def _broadcast(server: SketchedSumsServerState) -> Message:
    return Message({"H": server.Ht.T, "turn": np.array([server.turn, server.rows], np.int64)})


# Methods of Qian et al. (2020) for parties that own rows: our H is their U, our W their V.

Rule = Annotated[UpdateRule, RULES]
Kind = Annotated[Callable[[int], Sketch], SKETCHES]
Ratio = Annotated[float, SHARE]


@method("syn-sd", privacy=("party",), over_ranks=True)
def syn_sd(
    problem: Problem,
    *,
    local_steps: Steps = 10,
    rule: Rule = ProximalDescent(),
    init_mode: SharedInitMode = SHARED_INIT,
) -> LocalAveraging:
    """Like fedavg, with proximal steps that shrink over time.

    Qian et al. (2020), Alg. 4, but W steps first: with H first, as printed, the H_p drift apart at once. Sent per round
    and party: H_p (k × m) and n_p. Never sent: X_p, W_p.
    """
    return LocalAveraging(problem.rank, SquaredError(rule), local_steps, init_mode, Mean())


@method("syn-ssd-u", over_ranks=True)
def syn_ssd_u(
    problem: Problem,
    *,
    local_steps: Steps = 10,
    sketch: Kind = Subsampling,
    sketch_ratio: Ratio = 0.1,
    rule: Rule = ProximalDescent(),
    init_mode: SharedInitMode = SHARED_INIT,
) -> SketchedAveraging:
    """Like syn-sd, but in every step W fits a sketch of the mean H.

    Qian et al. (2020), Alg. 5. A round takes `local_steps` + 1 exchanges. Sent per exchange and party: H_p S2 (k × d);
    in the last exchange of a round H_p (k × m). Never sent: X_p, W_p.
    """
    columns = Proportion(sketch, sketch_ratio)
    return SketchedAveraging(problem.rank, SquaredError(rule), local_steps, None, columns, init_mode=init_mode)


@method("syn-ssd-v", extends=syn_ssd_u, over_ranks=True)
def syn_ssd_v(problem: Problem, **options: Any) -> SketchedAveraging:
    """Like syn-sd, but in every step W fits the mean H, and steps of H are sketched with a private sketch.

    Qian et al. (2020), Alg. 5. A round takes `local_steps` + 1 exchanges. Sent per exchange and party: H_p (k × m).
    Never sent: X_p, W_p.
    """
    sketched = syn_ssd_u(problem, **options)
    return replace(sketched, rows_sketch=sketched.columns_sketch, columns_sketch=None)


@method("syn-ssd-uv", extends=syn_ssd_u, over_ranks=True)
def syn_ssd_uv(problem: Problem, **options: Any) -> SketchedAveraging:
    """Like syn-sd, but in every step W fits a sketch of the mean H, and steps of H are sketched with a private sketch.

    Qian et al. (2020), Alg. 5. A round takes `local_steps` + 1 exchanges. Sent per exchange and party: H_p S2 (k × d);
    in the last exchange of a round H_p (k × m). Never sent: X_p, W_p.
    """
    sketched = syn_ssd_u(problem, **options)
    return replace(sketched, rows_sketch=sketched.columns_sketch)


@method("asyn-sd", over_ranks=True)
def asyn_sd(
    problem: Problem,
    *,
    local_steps: Steps = 10,
    rho: Annotated[float, Above(0)] = 3.0,
    rule: Rule = ProximalDescent(),
    init_mode: SharedInitMode = SHARED_INIT,
) -> LocalAveraging:
    """Asynchronous syn-sd: the server moves towards each H_p when it arrives, and no party waits.

    Qian et al. (2020), Alg. 6, with relaxation ω_t = ρ / (ρ + t); the paper prints ρ = 1. Sent per arrival: H_p (k × m)
    and n_p. Never sent: X_p, W_p.
    """
    steady = syn_sd(problem, local_steps=local_steps, rule=rule, init_mode=init_mode)
    return replace(steady, server_update=Relaxation(rho), asynchronous=True)


@method("asyn-ssd-v", extends=asyn_sd, over_ranks=True)
def asyn_ssd_v(
    problem: Problem, *, sketch: Kind = Subsampling, sketch_ratio: Ratio = 0.1, **options: Any
) -> LocalAveraging:
    """Like asyn-sd, with steps of H sketched by a private sketch.

    Qian et al. (2020), Alg. 7. Sent per arrival: H_p (k × m) and n_p. Never sent: X_p, W_p.
    """
    return replace(asyn_sd(problem, **options), sketch=Proportion(sketch, sketch_ratio))


PRIVATE_SKETCHES = Choice(
    {"gaussian": Gaussian, "hadamard": Hadamard}, reason="Other sketches would send rows unchanged."
)


@method("secure-dsanls")
def secure_dsanls(
    problem: Problem,
    *,
    sketch: Annotated[Callable[[int], Sketch], PRIVATE_SKETCHES] = Gaussian,
    sketch_dimension: Annotated[int | None, Whole()] = None,
    columns_sketch: Annotated[Callable[[int], Sketch] | None, SKETCHES] = None,
    columns_ratio: Annotated[float | None, SHARE] = None,
) -> SketchedSums:
    """Modified DSANLS: parties send sketches of their X and W, and stop before these determine X.

    Qian et al. (2020), Sec. 4. The sketch dimension d is 4k by default; a smaller d allows more rounds. With
    `columns_sketch`, steps of W are sketched as well. Sent per party: n_p once; then, per round, X_pᵀS_p (m × d) and
    W_pᵀS_p (k × d), at most ⌊(n_p − 1)/d⌋ times. Never sent: X_p, W_p.
    """
    if columns_ratio is not None and columns_sketch is None:
        raise ParameterError(
            "columns_ratio needs columns_sketch; without it, steps of W are exact. Set columns_sketch, or remove "
            "columns_ratio.",
            parameter="columns_ratio",
        )
    columns = None if columns_sketch is None else Proportion(columns_sketch, columns_ratio or 0.1)
    dimension = 4 * problem.rank if sketch_dimension is None else sketch_dimension
    return SketchedSums(problem.rank, sketch(dimension), columns_sketch=columns)
