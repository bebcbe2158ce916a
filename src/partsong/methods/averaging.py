"""Local averaging: parties iterate on their own rows, the server averages the H_p (FedAvg, FedProx, FNMF, Syn-SD)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np

from partsong import kernels
from partsong.aggregation.alignment import Assignment, Matching, PartialAssignment
from partsong.aggregation.linear import AlignedMean, Mean, WeightedMean
from partsong.aggregation.server_update import Replace
from partsong.core.interfaces import (
    Aggregation,
    Alignment,
    Array,
    ArraySpec,
    Layout,
    Message,
    ProgramBase,
    ServerUpdate,
    Shard,
    State,
    Traits,
    Turn,
)
from partsong.core.parameters import AtLeast, Steps, whole_number
from partsong.core.states import state
from partsong.core.streams import stream
from partsong.data.conversion import transposed_factor
from partsong.errors import CompositionError, DivergenceError, PartyError
from partsong.methods.init_modes import LOCAL_INIT, SHARED_INIT, InitMode, LocalInit, LocalInitMode, SharedInit
from partsong.methods.registry import Problem, method
from partsong.sketch.crossing import Proportion
from partsong.sketch.operator import Operator
from partsong.solvers.coupling import Coupling, NoCoupling, ProximalAnchor, ProximalTerm
from partsong.solvers.game import Game, GameState
from partsong.solvers.game_orders import distance
from partsong.solvers.initialization import random_columns
from partsong.solvers.local_steps import run_local_steps
from partsong.solvers.sketched import run_sketched_steps
from partsong.solvers.squared_error import RowState, SquaredError
from partsong.solvers.update_rules import (
    CoordinateDescent,
    InertialPalm,
    Multiplicative,
    NoExtrapolation,
    warn_if_noisy,
)


@dataclass(frozen=True, slots=True)
class AdoptModel:
    """H_p ← H. With `follow`, W is permuted along with the components.

    P = follow(H, H_p) puts the party's last H_p in the order of H, so W ← W Pᵀ. A soft plan is no permutation: W is
    refitted by sweeps instead. Without `follow`, W keeps its order, as printed in the FNMF paper.
    """

    follow: Alignment | None = None

    def begin(
        self, shard: Shard, W: Array, own_Ht: Array | None, model_Ht: Array | None, solver: SquaredError
    ) -> tuple[Array, Array]:
        """Hᵀ and W at the start of the round."""
        assert model_Ht is not None
        if self.follow is None or own_Ht is None:
            return model_Ht, W
        plan = self.follow.plan(model_Ht.T, own_Ht.T)
        if isinstance(plan, Matching) and plan.is_permutation:
            on = kernels.of(W)
            order = plan.partners
            is_same = (order == np.arange(len(order))).all()
            return model_Ht, W if is_same else on.rows_of(plan.apply(W.T))
        return model_Ht, solver.solve_rows(shard.matrix, model_Ht, exactly=False)


@dataclass(frozen=True, slots=True)
class PersonalComponents:
    """Components with a partner in the shared model take its values, in the party's order; the others are kept."""

    align: Alignment = PartialAssignment()

    def begin(
        self, shard: Shard, W: Array, own_Ht: Array | None, model_Ht: Array | None, solver: SquaredError
    ) -> tuple[Array, Array]:
        """Hᵀ and W at the start of the round; W is already in the party's order."""
        assert model_Ht is not None
        assert own_Ht is not None
        plan = self.align.plan(own_Ht.T, model_Ht.T)
        on = kernels.of(own_Ht)
        kept = on.cast(1.0 - plan.weights, own_Ht)
        return own_Ht * kept + on.rows_of(plan.apply(model_Ht.T)), W


OWN_COMPONENTS = "H_p: the party's own components"
SINGLE_PARTY_REASON = (
    "Use an alignment in which every row has a partner, P 1 = 1, and that declares is_partial = False (Assignment, "
    "Sinkhorn). To accept that such a row is visible, pass AlignedUpload(…, allow_single_party_rows=True)."
)


@dataclass(frozen=True, slots=True)
class WholeUpload:
    """Upload H_p (k × m) and the number of rows; the aggregation matches components."""

    def check(self, aggregation: Aggregation, sweeps: int) -> None:
        if sweeps > 1:
            raise CompositionError(
                "sweeps > 1 needs AlignedUpload: otherwise further sweeps send nothing new. Use AlignedUpload()."
            )

    def message(self, shard: Shard, Ht: Array | None, model_Ht: Array | None, is_late: bool, rank: int) -> Message:
        if Ht is None or is_late:
            raise PartyError(f"Party {shard.name!r} has nothing to send: it missed the start of this round.")
        return Message({"H": Ht.T}, weight=float(shard.matrix.shape[0]))

    def upload_spec(self, rank: int, layout: Layout) -> Mapping[str, ArraySpec]:
        return {
            "H": ArraySpec(
                (rank, layout.n_features), non_negative=True, is_factor=True, meaning="H_p: the party's own components"
            )
        }

    def fill_unmatched(self, aggregate: Message, model: Message) -> Message:
        return aggregate


@dataclass(frozen=True, slots=True)
class AlignedUpload:
    """Upload P_p H_p (k × m) and the counts P_p 1 (k), with P_p = align(H, H_p): each barycenter sweep is one sum.

    Nobody needs a single H_p, so the sum can be masked. Sweep by sweep this equals `aggregation.barycenter.FixedPoint`
    from the same start. Without a model, the first sum is by position.

    If the count of a row is 1, its sum is one party's row. Partial plans can lead to that, so masked reductions refuse
    an alignment unless it declares `is_partial = False`, or `allow_single_party_rows` accepts the risk.
    """

    align: Alignment = Assignment()
    allow_single_party_rows: bool = False

    def check(self, aggregation: Aggregation, sweeps: int) -> None:
        """Require the aggregation that divides by the counts."""
        if not isinstance(aggregation, AlignedMean):
            raise CompositionError(
                f"AlignedUpload sends sums and counts, which {aggregation} cannot read. Use aggregation=AlignedMean()."
            )

    def message(self, shard: Shard, Ht: Array | None, model_Ht: Array | None, is_late: bool, rank: int) -> Message:
        """P_p H_p and P_p 1; zeros if the party did not iterate in this round."""
        rows = float(shard.matrix.shape[0])
        if Ht is None or is_late:
            zeros = shard.matrix.native(np.zeros((rank, shard.matrix.shape[1])))
            return Message({"H": zeros, "counts": np.zeros(rank)}, 0.0)
        if model_Ht is None:
            return Message({"H": kernels.of(Ht).rows_of(Ht), "counts": np.ones(rank)}, rows)
        plan = self.align.plan(model_Ht.T, Ht.T)
        if not hasattr(plan, "apply") or not hasattr(plan, "weights"):
            raise CompositionError(
                f"{type(self.align).__name__}.plan returned {type(plan).__name__}, not a plan: a plan has matrix "
                "(k × k), weights = P 1 and apply (core.interfaces.Plan). Wrap P in aggregation.alignment.SoftPlan(P)."
            )
        return Message({"H": plan.apply(Ht.T), "counts": plan.weights}, rows)

    def upload_spec(self, rank: int, layout: Layout) -> Mapping[str, ArraySpec]:
        """P_p H_p ≥ 0 and P_p 1 ≥ 0."""
        H = ArraySpec(
            (rank, layout.n_features), non_negative=True, is_factor=True, meaning="P_p H_p, in order of the model"
        )
        counts = ArraySpec((rank,), non_negative=True, meaning="P_p 1: which components have a partner at the party")
        if self.allow_single_party_rows or not getattr(self.align, "is_partial", True):
            return {"H": H, "counts": counts}
        reason = f"{type(self.align).__name__} may find a partner for a row at one party only. {SINGLE_PARTY_REASON}"
        return {"H": replace(H, single_party_reason=reason), "counts": counts}

    def fill_unmatched(self, aggregate: Message, model: Message) -> Message:
        """The mean; rows that no party has matched keep their previous values."""
        empty = np.flatnonzero(aggregate["counts"] <= 0)
        H = aggregate["H"]
        if len(empty):
            H = H + 0
            before = kernels.of(H).cast(kernels.of(model["H"]).to_numpy(model["H"]), H)
            for row in empty.tolist():
                H[row] = before[row]
        return Message({"H": H}, aggregate.weight)


@state("averaging.party")
@dataclass(frozen=True, slots=True)
class AveragingPartyState:
    """W, the party's own Hᵀ (m × k), the number of update steps so far, and the last round it worked in.

    W and Ht are None before the first round. Scales are what update rules have measured, if they need any.
    """

    W: Array | None = None
    Ht: Array | None = None
    count: int = 0
    round: int = -1
    scale_W: float = 0.0
    scale_H: float = 0.0


@state("averaging.server")
@dataclass(frozen=True, slots=True)
class AveragingServerState:
    """The current model, the round and sweep it is for, and the state of the server update."""

    model: Message
    memory: State
    round: int = 0
    sweep: int = 0


@dataclass(frozen=True, slots=True)
class LocalAveraging(ProgramBase):
    """Each party runs `steps` local iterations from the broadcast H and sends its H_p; the server aggregates them.

        local:   (W_p, H_p) ← solver(X_p; W_p, H)^steps, coupled to H     sent: H_p (k × m), weight n_p
        finish:  H ← server_update(H, aggregation(H_p))                   broadcast: H (k × m), round and sweep (2)

    FedAvg-NMF and Syn-SD use a mean, FedProx adds a proximal term, FNMF an aligned proximal term and a barycenter. The
    proximal term is off in the first `uncoupled_rounds` rounds, when there is no useful model yet. With an aligned
    upload each round takes `sweeps` exchanges; parties iterate in the first only. Never sent: X_p, W_p.

    With a `sketch`, each local step of H minimizes ½‖SᵀX_p − SᵀW_p H‖² for a fresh S (n_p × d), drawn from the party's
    own secret, so nobody else can draw it; steps of W stay exact. With one participant per round and a `Relaxation`
    this is Asyn-SD and, sketched, Asyn-SSD-V (Qian et al., 2020, Alg. 6 and 7), where U is H and V is W.

    With a `game`, a local iteration is one sweep of the game over the party's cells, in place of the solver's steps. If
    `asynchronous`, a round is one arrival, and no party waits for another.
    """

    rank: int
    solver: SquaredError = field(default_factory=SquaredError)
    steps: int = 10
    init_mode: SharedInit | LocalInit = SharedInit()
    aggregation: Aggregation = WeightedMean()
    server_update: ServerUpdate = Replace()
    coupling: Coupling = NoCoupling()
    synchronization: AdoptModel | PersonalComponents = AdoptModel()
    upload: WholeUpload | AlignedUpload = WholeUpload()
    uncoupled_rounds: int = 0
    sweeps: int = 1
    sketch: Proportion | None = None
    game: Game | None = None
    asynchronous: bool = False

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("steps", 1), ("sweeps", 1), ("uncoupled_rounds", 0)):
            whole_number(f"LocalAveraging: {name}", getattr(self, name), least=least)
        self.coupling.check(self.solver.rule)
        self.upload.check(self.aggregation, self.sweeps)
        if not isinstance(self.coupling, NoCoupling) and not isinstance(self.solver.momentum, NoExtrapolation):
            raise CompositionError(
                "A proximal term and extrapolation cannot be combined. Use a solver with NoExtrapolation."
            )
        if self.game is not None and (self.sketch is not None or not isinstance(self.coupling, NoCoupling)):
            raise CompositionError("A game plays all cells and has no proximal term. Remove sketch and coupling.")
        if self.sketch is not None:
            warn_if_noisy(self.solver.rule)
        if self.sketch is not None and not isinstance(self.solver.momentum, NoExtrapolation):
            raise CompositionError(
                "Extrapolation needs the objective after each step, which sketched steps do not compute. Use a solver "
                "with NoExtrapolation, or remove sketch."
            )

    @property
    def traits(self) -> Traits:
        return Traits(asynchronous=self.asynchronous)

    def exchanges(self, rounds: int, n_parties: int) -> int:
        """A round takes one exchange per sweep or, if asynchronous, one arrival per party."""
        return rounds * (n_parties if self.asynchronous else self.sweeps)

    def start_party(self, shard: Shard, layout: Layout) -> AveragingPartyState:
        return AveragingPartyState()

    def start_server(self, layout: Layout) -> tuple[AveragingServerState, Message]:
        draw = stream(layout.seed, "start")
        Ht = self.init_mode.model(layout, self.rank, draw)
        is_sent = Ht is not None
        if Ht is None:
            Ht = random_columns(layout.n_features, self.rank, draw, layout.dtype)
        server = AveragingServerState(Message({"H": Ht.T}), self.server_update.init(Message({"H": Ht.T})))
        return server, _broadcast(server, is_sent)

    def local(self, shard: Shard, party: AveragingPartyState, model: Message) -> tuple[AveragingPartyState, Message]:
        number, sweep = (int(value) for value in model["turn"])
        Ht = _model_columns(shard, model)
        if sweep == 0:
            party = self._iterate(shard, party, Ht, number)
        is_late = party.round != number  # it missed the first sweep and adds nothing to this round
        return party, self.upload.message(shard, party.Ht, Ht, is_late, self.rank)

    def _iterate(
        self, shard: Shard, party: AveragingPartyState, model_Ht: Array | None, number: int
    ) -> AveragingPartyState:
        rule = self.solver.rule
        if party.W is None:
            is_late = number > 0 and model_Ht is not None  # it joins late and starts from the model
            start = SharedInit() if is_late else self.init_mode
            Ht = start.columns(shard, model_Ht, self.rank)
            W = start.weights(shard, Ht, self.solver)
        else:
            Ht, W = self.synchronization.begin(shard, party.W, party.Ht, model_Ht, self.solver)
        if self.game is not None:
            return self._play_game(shard, party, W, Ht, number)
        rows = RowState(W, None, replace(rule.init(W), count=party.count, scale=party.scale_W))
        columns = self.solver.begin(Ht)
        columns = replace(columns, memory=replace(columns.memory, count=party.count, scale=party.scale_H))
        is_free = model_Ht is None or number < self.uncoupled_rounds
        pulls: Coupling = NoCoupling() if is_free else self.coupling
        anchor = ProximalAnchor(Ht if model_Ht is None else model_Ht)
        if self.sketch is None:
            rows, columns = run_local_steps(self.solver, shard.matrix, rows, columns, pulls, anchor, self.steps)
        else:
            draws = (self._private_sketch(shard, party.count + i) for i in range(self.steps))
            rows, columns = run_sketched_steps(self.solver, shard.matrix, rows, columns, pulls, anchor, draws)
        scales = (0.0 if rows.memory is None else rows.memory.scale, columns.memory.scale)
        return AveragingPartyState(rows.W, columns.Ht, party.count + self.steps, number, *scales)

    def _play_game(
        self, shard: Shard, party: AveragingPartyState, W: Array, Ht: Array, number: int
    ) -> AveragingPartyState:
        """`steps` sweeps of the game. Its pace is stored as the scale of W and restarts at 1 if there is none."""
        assert self.game is not None
        game, matrix, meets = self.game, shard.matrix, self.game.order.plays_cells
        game_state, pace, seen = GameState(W, Ht), party.scale_W or 1.0, float("inf")
        for count in range(party.count, party.count + self.steps):
            residual_norm = float("nan") if meets else distance(matrix, game_state.W, game_state.Ht)
            draw = stream(shard.secret, "play", shard.name, count)
            game_state = game.sweep(matrix, game_state, count, pace=pace, residual_norm=residual_norm, generator=draw)
            latest = game_state.squared_error if meets else residual_norm**2
            if not np.isfinite(latest):
                raise DivergenceError(
                    f"The game diverged at party {shard.name!r} in sweep {count + 1} (overflow). "
                    f"{game.divergence_advice}"
                )
            pace, seen = game.step.next_pace(pace, count, seen, latest), latest
        return AveragingPartyState(game_state.W, game_state.Ht, party.count + self.steps, number, pace)

    def _private_sketch(self, shard: Shard, step: int) -> Operator:
        """S (n × d) of one step, which only this party can draw."""
        assert self.sketch is not None
        return self.sketch.draw(shard.matrix.shape[0], self.rank, shard.secret, "S1", shard.name, step)

    def finish(self, server: AveragingServerState, aggregate: Message) -> tuple[AveragingServerState, Message]:
        """Move the model by the aggregate; entries that rounding under masks leaves negative become zero."""
        fill_unmatched = self.upload.fill_unmatched(aggregate, server.model)
        moved, memory = self.server_update.step(server.model, fill_unmatched, server.memory)
        model = Message({"H": moved["H"].clip(min=0)}, moved.weight)
        is_last = server.sweep + 1 >= self.sweeps
        number, sweep = (server.round + 1, 0) if is_last else (server.round, server.sweep + 1)
        after = AveragingServerState(model, memory, number, sweep)
        return after, _broadcast(after, True)

    def components(self, server: AveragingServerState) -> Array:
        return server.model["H"]

    def upload_spec(self, layout: Layout) -> tuple[Mapping[str, ArraySpec], ...]:
        return (self.upload.upload_spec(self.rank, layout),)

    def turn(self, model: Message) -> Turn:
        sweep = int(model["turn"][1])
        return Turn(sweep, self.sweeps, works=sweep == 0, ends_round=sweep == 0)


def _broadcast(server: AveragingServerState, is_sent: bool) -> Message:
    turn = np.array([server.round, server.sweep], np.int64)
    return Message({"H": server.model["H"], "turn": turn} if is_sent else {"turn": turn})


def _model_columns(shard: Shard, model: Message) -> Array | None:
    return transposed_factor(shard.matrix, model["H"]) if "H" in model.arrays else None


@method("fedavg", privacy=("party",))
def fedavg(
    problem: Problem, *, local_steps: Steps = 3, weighted: bool = True, init_mode: InitMode = SHARED_INIT
) -> LocalAveraging:
    """Parties iterate from the shared H; the server averages the results by position.

    FedAvg (McMahan et al., 2017) for NMF, with coordinate descent as the local solver. `weighted`: average by numbers
    of rows. Sent per round and party: H_p (k × m) and n_p. Never sent: X_p, W_p.
    """
    aggregation = WeightedMean() if weighted else Mean()
    return LocalAveraging(problem.rank, SquaredError(CoordinateDescent()), local_steps, init_mode, aggregation)


@method("fedprox", privacy=("party",))
def fedprox(
    problem: Problem,
    *,
    strength: Annotated[float, AtLeast(0)] = 0.1,
    local_steps: Steps = 10,
    init_mode: InitMode = SHARED_INIT,
) -> LocalAveraging:
    """Like fedavg, with a proximal term that keeps each H_p near the shared H.

    FedProx (Li et al., 2020) for NMF, with iPALM as the local solver. `strength` is the weight of the proximal term.
    Sent per round and party: H_p (k × m) and n_p. Never sent: X_p, W_p.
    """
    solver = SquaredError(InertialPalm())
    return LocalAveraging(
        problem.rank, solver, local_steps, init_mode, coupling=ProximalTerm(strength), uncoupled_rounds=1
    )


@method("one-shot-ipalm", rounds=1, privacy=("party",))
def one_shot_ipalm(problem: Problem, *, local_steps: Steps = 1000, init_mode: InitMode = LOCAL_INIT) -> LocalAveraging:
    """Every party factorizes its own rows; the components are averaged once, by position.

    By iPALM: a baseline of the FNMF paper. Sent once by each party: H_p (k × m) and n_p. Never sent: X_p, W_p.
    """
    return LocalAveraging(problem.rank, SquaredError(InertialPalm()), local_steps, init_mode)


@method("one-shot-mu", rounds=1, privacy=("party",))
def one_shot_mu(problem: Problem, *, local_steps: Steps = 1000, init_mode: InitMode = LOCAL_INIT) -> LocalAveraging:
    """Like one-shot-ipalm, with multiplicative updates.

    Sent once by each party: H_p (k × m) and n_p. Never sent: X_p, W_p.
    """
    return LocalAveraging(problem.rank, SquaredError(Multiplicative()), local_steps, init_mode)


@method("local-only", rounds=1)
def local_only(problem: Problem, *, local_steps: Steps = 100, init_mode: LocalInitMode = LOCAL_INIT) -> LocalAveraging:
    """Every party factorizes its own rows from its own start, and unmatched H_p are averaged once: a negative control.

    Sent once by each party: H_p (k × m) and n_p. Never sent: X_p, W_p.
    """
    return LocalAveraging(problem.rank, SquaredError(CoordinateDescent()), local_steps, init_mode)
