"""Secure sketched methods (Qian et al., 2020): sketched averaging (Syn-SSD), and sketches of all rows."""

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
    """The shared seed, W, the party's own Hᵀ (m × k), what the rule remembers of each, the last outer round begun."""

    seed: int
    W: Array | None = None
    Ht: Array | None = None
    rows: RuleState = RuleState()
    columns: RuleState = RuleState()
    outer: int = -1


@state("sketched-averaging.server")
@dataclass(frozen=True, slots=True)
class SketchedAveragingServerState:
    """H (k × m) as last agreed on, and the outer round and exchange that come next."""

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

    So W always fits the mean of all H_p, and copies cannot turn away from each other between two outer means. S2
    (m × d2) is everybody's, from the shared seed; S1 (n_p × d1) the party's own, from its secret; both are drawn anew
    in every iteration. Syn-SSD-U has `columns_sketch` alone, -V `rows_sketch` alone, -UV both; where one is None that
    step is exact, and without S2 all of H_p is sent in every exchange. The first W is one step of the rule from
    w = c·1, which the rule does not count.

    Never sent: X_p, W_p, or anything with a row per row of X_p. What the server sees of H_p without masks are H_p S2
    and H_p themselves; the other party of two, or all others together, know H_p from the mean.

    A party that was not in exchange 0 of an outer round has no H to go on from: it is refused until the next one. One
    that misses a later exchange goes on from where it was.
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
            raise CompositionError("Sketched steps and extrapolation do not go together; use NoExtrapolation.")
        if not isinstance(self.aggregation, (Mean, WeightedMean)):
            raise CompositionError(
                f"A sketch of H can be averaged and not aligned, so {self.aggregation} cannot be used: take Mean or "
                "WeightedMean."
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
        W, rows = rule.step(W, equations.penalised(self.solver.penalty_W, shard.matrix.shape[1]), rule.init(W))
        return replace(party, W=W, rows=replace(rows, count=0))

    def _row_step(
        self, shard: Shard, party: SketchedAveragingPartyState, model: Message, step: int
    ) -> SketchedAveragingPartyState:
        m = shard.matrix.shape[1]
        S = self._shared_sketch(party, m, step)
        equations = _for_rows(shard, S, model["H" if S is None else "sketch"]).penalised(self.solver.penalty_W, m)
        W, rows = self.solver.rule.step(party.W, equations, party.rows)
        return replace(party, W=W, rows=rows)

    def _column_step(self, shard: Shard, party: SketchedAveragingPartyState, step: int) -> SketchedAveragingPartyState:
        matrix, n = shard.matrix, shard.matrix.shape[0]
        if self.rows_sketch is None:
            equations = exact_columns(matrix, party.W)
        else:
            S = self.rows_sketch.draw(n, self.rank, shard.secret, "S1", shard.name, step)
            equations = sketched_columns(matrix, S, party.W)
        Ht, columns = self.solver.rule.step(party.Ht, equations.penalised(self.solver.penalty_H, n), party.columns)
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
        """H_p ≥ 0, and H_p S2, which is non-negative where S2 only chooses columns."""
        m = layout.n_features
        whole = {"H": ArraySpec((self.rank, m), non_negative=True, is_factor=True, meaning=OWN_COMPONENTS)}
        if self.columns_sketch is None:
            return (whole,)
        d = self.columns_sketch.dimension(m, self.rank)
        chooses = isinstance(self.columns_sketch.kind(d), Subsampling)
        meaning = "H_p S for an S that all parties know"
        return {"sketch": ArraySpec((self.rank, d), non_negative=chooses, is_factor=True, meaning=meaning)}, whole

    def turn(self, model: Message) -> Turn:
        """The last two exchanges of an outer round belong together under masks, and no others do.

        Between them H_p does not move: with another company the sums of H_p S2 and of H_p would differ by one party's.
        Between all others every H_p takes a step, and S2 is another one.
        """
        turn = int(model["turn"][1])
        if turn < self.inner - 1:
            return Turn(ends_round=turn == 0)
        return Turn(max(0, turn - self.inner + 1), 2, ends_round=turn == 0)


def _for_rows(shard: Shard, S: Operator | None, B: Array) -> NormalEquations:
    """The equations for W from H S, or from H where there is no S."""
    if S is None:
        return exact_rows(shard.matrix, transposed_factor(shard.matrix, B))
    return sketched_rows(shard.matrix, S, shard.matrix.native(B))


def _require_begun(shard: Shard, party: SketchedAveragingPartyState, outer: int) -> None:
    if party.outer != outer:
        raise PartyError(
            f"Party {shard.name!r} missed the first exchange of outer round {outer} and has no H to go on from. It can "
            'join in the next outer round: keep it absent until then, or leave it out: on_party_error="skip", or '
            "--on-party-error skip."
        )


BUDGETS = ("own", "total")
NOT_KNOWN_YET = 2**31
"""Exchanges of a run whose rows have not been counted yet."""


@state("sketched-sums.party")
@dataclass(frozen=True, slots=True)
class SketchedSumsPartyState:
    """The shared seed, W (n × k), the rule's memory of it, and how many sketches of its rows have been sent."""

    seed: int
    W: Array | None = None
    memory: RuleState = RuleState()
    sent: int = 0


@state("sketched-sums.server")
@dataclass(frozen=True, slots=True)
class SketchedSumsServerState:
    """Hᵀ (m × k), the rule's memory of it, the exchange that comes next, and the number of rows (0: not counted)."""

    Ht: Array
    memory: RuleState
    turn: int = 0
    rows: int = 0


@dataclass(frozen=True, slots=True)
class SketchedSums(ProgramBase):
    """DSANLS where parties own rows only ("modified DSANLS in the secure setting", Qian et al., 2020, Sec. 4).

        exchange 0:     sent: n_p (1)
        exchange t:     W_p ← rule(W_p; (H S')(H S')ᵀ, X_p S'(H S')ᵀ)      or exactly, without `columns_sketch`
                        sent: X_pᵀ S_p (m × d), W_pᵀ S_p (k × d)
        finish:         H ← rule(H; B Bᵀ, A Bᵀ), A = Σ X_pᵀ S_p, B = Σ W_pᵀ S_p      broadcast: H (k × m), t and n (2)

    S_p (n_p × d) comes from the shared seed, the party's name and t, so that no party needs to know how many rows the
    others have, and E[S Sᵀ] = I for all of them together. That needs entries of mean zero: Subsampling is refused,
    which would also send rows of X_p as they are. S' (m × d') is the same at all parties.

    Whoever knows the seed knows S. After ⌈n/d⌉ exchanges the sum is as good as X (Thm. 3; `recover_from_sketches`); a
    single upload is as good as X_p after ⌈n_p/d⌉. Parties therefore refuse to send more than ⌊(n − 1)/d⌋ sketches:

        budget="own"     n = n_p, as is right where the server sees single uploads
        budget="total"   n = Σ n_p, only under a reduction that hides uploads and with the same parties in every sum, on
                         which engines insist; such a run cannot be resumed

    `is_guarded=False` sends on regardless. The bound is for one run: another seed's sketches come on top of these. It
    says that X is not determined, not that nothing is known of it.
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
            raise ParameterError(
                f"A sketch of d = {d} dimensions gives d equations: the rank must be from 1 to {d}; got {self.rank!r}."
            )
        if self.budget not in BUDGETS:
            raise ParameterError(f'budget must be "own" or "total"; got {self.budget!r}.', parameter="budget")
        warn_if_noisy(self.solver.rule)
        if self.is_guarded and isinstance(self.rows_sketch, CountSketch):
            raise CompositionError(
                "A count sketch sends every row of X that is alone in its place as it is, up to its sign. Use Gaussian "
                "or Hadamard, or accept it: is_guarded=False."
            )
        if isinstance(self.rows_sketch, Subsampling):
            raise CompositionError(
                "Subsampling would send rows of X as they are, and parties that choose rows for themselves do not make "
                "up an S with E[S Sᵀ] = I. Use Gaussian, CountSketch or another sketch whose entries have mean zero."
            )
        if not isinstance(self.solver.momentum, NoExtrapolation):
            raise CompositionError("Sketched steps and extrapolation do not go together; use NoExtrapolation.")

    @property
    def traits(self) -> Traits:
        """The sketches of all parties are one sketch of all rows. A budget for all rows together says nothing of what a
        single party may show.
        """
        if self.budget == "own" or not self.is_guarded:
            return Traits(full_participation=True)
        reason = (
            'budget="total" counts sketches of all rows, and single uploads give the rows of a small party away long '
            'before. Take budget="own", or a reduction that hides uploads.'
        )
        return Traits(full_participation=True, requires="secure", reason=reason)

    def operator(self, seed: int, party: str, n_rows: int, turn: int) -> Operator:
        """S_p of one exchange; its first n_p rows are used, of which there may be fewer than dimensions."""
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
            raise PartyError(f"Party {shard.name!r} was asked for turn {turn}; turns count from 0.")
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
        return self.solver.rule.step(W, equations.penalised(self.solver.penalty_W, m), memory)

    def _require_budget(self, shard: Shard, party: SketchedSumsPartyState, turn: int, total_rows: int) -> None:
        """Before anything of this exchange is made.

        A sketch is of its turn, whatever became of earlier ones: with no turn beyond the bound there are never more
        sketches than it, also where replies were lost and the party's own count went back with them.
        """
        is_own = self.budget == "own"
        rows, sent = shard.matrix.shape[0] if is_own else total_rows, max(party.sent, turn - 1)
        d = self.rows_sketch.dimension
        most = most_sketches(rows, d)
        if not self.is_guarded or sent < most:
            return
        whose = f"its {rows} rows" if is_own else f"the {rows} rows of all parties"
        way = ' hide uploads by a reduction and take budget="total";' if is_own else ""
        raise PartyError(
            f"Party {shard.name!r} may have sent {sent} sketches of dimension {d} and sends no more: from {most + 1} "
            f"of them whoever knows the seed can solve for {whose}; ⌊({rows} − 1)/{d}⌋ = {most} leave them open. Stop "
            f"after {most + 1} rounds, of which the first counts rows; or take a smaller sketch;{way} or accept it: "
            "is_guarded=False."
        )

    def finish(self, server: SketchedSumsServerState, aggregate: Message) -> tuple[SketchedSumsServerState, Message]:
        if server.turn == 0:
            after = replace(server, turn=1, rows=round(float(aggregate["rows"][0])))
            return after, _broadcast(after)
        A, B = aggregate["data"], aggregate["weights"]
        Ht = kernels.of(A).cast(kernels.of(server.Ht).to_numpy(server.Ht), A)
        equations = NormalEquations.of(A, B).penalised(self.solver.penalty_H, server.rows)
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
        """With a budget of all rows together the whole run is one round under masks, so that every sum is over them.

        A sum of fewer parties has fewer unknown rows. With own budgets any parties will do. Counting rows, which does
        not move H, is not worth a look.
        """
        turn, rows = (int(value) for value in model["turn"])
        if self.budget == "own":
            return Turn(ends_round=turn > 1)
        most = most_sketches(rows, self.rows_sketch.dimension) + 1 if rows else NOT_KNOWN_YET
        return Turn(turn, max(most, turn + 1, 2), ends_round=turn > 1)


def _broadcast(server: SketchedSumsServerState) -> Message:
    return Message({"H": server.Ht.T, "turn": np.array([server.turn, server.rows], np.int64)})


# Methods of Qian et al. (2020) between parties who own rows: H is their U, W their V.

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
    """As fedavg, with steps that are held back more and more.

    Qian et al. (2020), Alg. 4; W steps first. The paper prints H first, which from a W of their own lets the copies
    part at once.
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
    """As syn-sd, while W fits a sketch of the mean of all H in every step.

    Qian et al. (2020), Alg. 5. A round takes `local_steps` + 1 exchanges.
    """
    columns = Proportion(sketch, sketch_ratio)
    return SketchedAveraging(problem.rank, SquaredError(rule), local_steps, None, columns, init_mode=init_mode)


@method("syn-ssd-v", extends=syn_ssd_u, over_ranks=True)
def syn_ssd_v(problem: Problem, **options: Any) -> SketchedAveraging:
    """As syn-sd, while W fits the mean of all H in every step, and steps of H are sketched."""
    sketched = syn_ssd_u(problem, **options)
    return replace(sketched, rows_sketch=sketched.columns_sketch, columns_sketch=None)


@method("syn-ssd-uv", extends=syn_ssd_u, over_ranks=True)
def syn_ssd_uv(problem: Problem, **options: Any) -> SketchedAveraging:
    """As syn-sd, while W fits a sketch of the mean of all H in every step, and steps of H are sketched."""
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
    """As syn-sd, but no party waits for another: the server moves towards each H as it comes.

    Qian et al. (2020), Alg. 6: by ω_t = ρ / (ρ + t). Printed is ρ = 1.
    """
    steady = syn_sd(problem, local_steps=local_steps, rule=rule, init_mode=init_mode)
    return replace(steady, server_update=Relaxation(rho), asynchronous=True)


@method("asyn-ssd-v", extends=asyn_sd, over_ranks=True)
def asyn_ssd_v(
    problem: Problem, *, sketch: Kind = Subsampling, sketch_ratio: Ratio = 0.1, **options: Any
) -> LocalAveraging:
    """As asyn-sd, with steps of H that are sketched, by a sketch that nobody else knows (Alg. 7)."""
    return replace(asyn_sd(problem, **options), sketch=Proportion(sketch, sketch_ratio))


PRIVATE_SKETCHES = Choice(
    {"gaussian": Gaussian, "hadamard": Hadamard}, reason="Others would send rows of a site as they are."
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
    """Modified DSANLS: parties with rows alone send sketches of X and W, for as long as these do not give X away.

    Qian et al. (2020), Sec. 4. The sketch has four dimensions for each component by default: the fewer, the more
    rounds. With `columns_sketch`, steps of W are sketched as well.
    """
    if columns_ratio is not None and columns_sketch is None:
        raise ParameterError(
            "columns_ratio needs columns_sketch: without one, steps of W are exact.", parameter="columns_ratio"
        )
    columns = None if columns_sketch is None else Proportion(columns_sketch, columns_ratio or 0.1)
    dimension = 4 * problem.rank if sketch_dimension is None else sketch_dimension
    return SketchedSums(problem.rank, sketch(dimension), columns_sketch=columns)
