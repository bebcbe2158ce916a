"""Famous names, spelled as compositions of parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from partsong.aggregation.alignment import (
    Assignment,
    Identity,
    Nearest,
    PartialAssignment,
    PartialSinkhorn,
    Sinkhorn,
    SoftMax,
)
from partsong.aggregation.barycenter import FixedPoint, FromMean, FromPrevious
from partsong.aggregation.linear import AlignedMean, Mean, WeightedMean
from partsong.aggregation.server_update import Relaxation
from partsong.core.interfaces import Alignment, Program, UpdateRule
from partsong.core.parameters import real_number
from partsong.errors import ParameterError
from partsong.methods.averaging import AlignedUpload, CommonStart, Consensus, IndependentStart, Overwrite
from partsong.methods.dsanls import SketchExchange
from partsong.methods.exact import SharedSums
from partsong.methods.game import PlayInStrata
from partsong.methods.private import PrivateConsensus, PrivateStatistics
from partsong.methods.registry import SAFE, STARTS
from partsong.methods.relay import Relay
from partsong.methods.secure_sketched import SketchedConsensus, SketchedStatistics
from partsong.privacy.accounting import multiplier_for
from partsong.privacy.mechanisms import ClippedGaussian, ClippedLaplace, Mechanism
from partsong.sketch.crossing import Proportion
from partsong.sketch.kinds import CountSketch, Gaussian, Hadamard, Subsampling
from partsong.sketch.operator import Sketch
from partsong.solvers.coupling import AlignedProximalTerm, ProximalTerm
from partsong.solvers.game import (
    ConstantStep,
    DecayingStep,
    Game,
    NoSelfPlay,
    SafeStep,
    SelfPlay,
    ShrinkOthers,
    ShrinkSmallest,
    StepSize,
)
from partsong.solvers.game_orders import Alternating, Order, Raster, Shuffled, Simultaneous, Stratified
from partsong.solvers.normal_equations import Penalty
from partsong.solvers.squared_error import Extrapolation, NoExtrapolation, SquaredError
from partsong.solvers.update_rules import (
    BlockPivoting,
    CoordinateDescent,
    InertialPalm,
    Multiplicative,
    ProjectedGradient,
    ProximalDescent,
)

# ---- recipes ----------------------------------------------------------------------------------------------------

COMMON, INDEPENDENT = STARTS

SWEEPS = 5
"""Sweeps per product; chosen together with the extrapolation on generated data (benchmarks/tuning.py)."""


def accelerated_hals(penalty_W: Penalty = Penalty(), penalty_H: Penalty = Penalty()) -> SquaredError:
    """HALS with several sweeps per product and extrapolation with restart: the default solver of `NMF`."""
    return SquaredError(CoordinateDescent(sweeps=SWEEPS), penalty_W, penalty_H, Extrapolation())


def plain(rule: UpdateRule, penalty_W: Penalty = Penalty(), penalty_H: Penalty = Penalty()) -> SquaredError:
    """One step of a rule per factor and iteration, nothing else."""
    return SquaredError(rule, penalty_W, penalty_H, NoExtrapolation())


def solver_rules() -> dict[str, UpdateRule]:
    """The rules behind `NMF(solver=…)`, one step per product unless its name says otherwise; that of "sanls" is for
    sketched products.
    """
    return {
        "hals": CoordinateDescent(sweeps=SWEEPS),
        "cd": CoordinateDescent(),
        "mu": Multiplicative(),
        "pg": ProjectedGradient(),
        "ipalm": InertialPalm(inertia=0.3),
        "bpp": BlockPivoting(),
        "sanls": ProximalDescent(),
    }


def solver_of(rule: Any, alpha_W: Any = 0.0, alpha_H: Any = "same", l1_ratio: Any = 0.0) -> SquaredError:
    """Both half-steps with their penalties; the rule named "hals" extrapolates, all others are plain."""
    chosen = _rule_of(rule)
    is_same = isinstance(alpha_H, str) and alpha_H == "same"
    if isinstance(alpha_H, str) and not is_same:
        raise ParameterError(f"alpha_H must be a number or 'same'; got {alpha_H!r}.")
    on_W = _penalty_weight("alpha_W", alpha_W)
    on_H = on_W if is_same else _penalty_weight("alpha_H", alpha_H)
    l1 = real_number("l1_ratio", l1_ratio)
    if not 0 <= l1 <= 1:
        raise ParameterError(f"l1_ratio must lie between 0 and 1; got {l1_ratio!r}.")
    momentum = Extrapolation() if isinstance(rule, str) and rule == "hals" else NoExtrapolation()
    return SquaredError(chosen, Penalty(on_W * l1, on_W * (1 - l1)), Penalty(on_H * l1, on_H * (1 - l1)), momentum)


def _rule_of(rule: Any) -> UpdateRule:
    rules = solver_rules()
    if isinstance(rule, str) and rule in rules:
        return rules[rule]
    if isinstance(rule, str):
        raise ParameterError(f"Unknown solver {rule!r}; choose one of {', '.join((*rules, 'game'))}.")
    if isinstance(rule, type) or not all(callable(getattr(rule, name, None)) for name in ("init", "step")):
        raise ParameterError(
            f"solver must be one of {', '.join((*rules, 'game'))}, or an update rule such as "
            "CoordinateDescent(sweeps=2), or a Game; "
            f"got {rule!r}."
        )
    return rule


def _penalty_weight(name: str, value: Any) -> float:
    weight = real_number(name, value)
    if not 0 <= weight < float("inf"):
        raise ParameterError(f"{name} must be zero or more, and finite; got {value!r}.")
    return weight


def alignments() -> dict[str, Alignment]:
    """The alignments behind `FederatedNMF(align=…)`."""
    return {
        "assignment": Assignment(),
        "partial-assignment": PartialAssignment(),
        "sinkhorn": Sinkhorn(),
        "partial-sinkhorn": PartialSinkhorn(),
        "nearest": Nearest(),
        "softmax": SoftMax(),
        "identity": Identity(),
    }


def sketches() -> dict[str, Callable[[int], Sketch]]:
    """The kinds of sketch behind `NMF(sketch=…)`."""
    return {"subsampling": Subsampling, "gaussian": Gaussian, "count": CountSketch, "hadamard": Hadamard}


def shared_statistics(rank: int, *, sweeps: int = SWEEPS, accelerate: bool = False) -> SharedSums:
    """Exactly the pooled factorization from sums of gram and cross; `accelerate` extrapolates both factors.

    Sent per round and party: WᵀW (k × k), WᵀX (k × m), three totals. Never sent: X_p, W_p.
    """
    solver = plain(CoordinateDescent(sweeps=sweeps))
    return SharedSums(rank, replace(solver, momentum=Extrapolation()) if accelerate else solver)


def row_private(
    rank: int, *, epsilon: float, row_bound: float, delta: float = 1e-5, rounds: int = 10, **settings: Any
) -> PrivateStatistics:
    """Shared statistics with noise on every sum: (ε, δ) for each row over `rounds` rounds, after which parties refuse.

    `row_bound` is the norm beyond which rows are scaled down; like everything else here it must come from no data.
    Sent per round and party: WᵀW (k × k) and WᵀX (k × m) with noise. Never sent: X_p, W_p, the number of rows.
    """
    multiplier = multiplier_for(epsilon, delta, rounds)
    return PrivateStatistics(rank, multiplier, row_bound, most=rounds, **settings)


def fedavg(rank: int, *, steps: int = 10, weighted: bool = True, start: str = COMMON) -> Consensus:
    """Local HALS, then the average of H by position (McMahan et al., 2017, applied to NMF).

    Sent per round and party: H_p (k × m) and the number of rows. Never sent: X_p, W_p.
    """
    return Consensus(
        rank,
        plain(CoordinateDescent()),
        steps,
        _started(start),
        WeightedMean() if weighted else Mean(),
    )


def fedprox(rank: int, *, strength: float = 0.1, steps: int = 10, start: str = COMMON) -> Consensus:
    """`fedavg` with iPALM and a pull towards the model by position (Li et al., 2020, applied to NMF).

    Sent per round and party: H_p (k × m) and the number of rows. Never sent: X_p, W_p.
    """
    plain_average = replace(fedavg(rank, steps=steps, start=start), solver=plain(InertialPalm()))
    return replace(plain_average, coupling=ProximalTerm(strength), free_rounds=1)


def fnmf(
    rank: int,
    *,
    variant: str = "robust",
    client_align: Alignment = Assignment(),
    server_align: Alignment = Assignment(),
    strength: float | None = None,
    every: int | None = None,
    steps: int = 100,
    start: str = INDEPENDENT,
) -> Consensus:
    """Federated NMF whose drift and averaging respect permutations (Dalleiger & Gionis, 2025, Alg. 2).

    Parties run iPALM, pulled to the model in their own order; the server takes the barycenter of the H_p.
    "paper" is the algorithm as printed. "robust" changes three things: a party's W follows its components to their new
    order, nothing is pulled in the first round, and the barycenter starts from the previous model. A party looks anew
    which component is which `every` steps (None: every step as printed, every 25 in the robust variant).
    Sent per round and party: H_p (k × m) and the number of rows. Never sent: X_p, W_p.
    """
    if variant not in ("paper", "robust"):
        raise ParameterError(f'The variants of fnmf are "paper" and "robust"; got {variant!r}.')
    is_paper = variant == "paper"
    pull = strength if strength is not None else (0.01 if is_paper else 0.1)
    pause = every if every is not None else (1 if is_paper else 25)
    return Consensus(
        rank,
        plain(InertialPalm()),
        steps,
        _started(start, announced=is_paper),
        FixedPoint(server_align, FromMean() if is_paper else FromPrevious()),
        coupling=AlignedProximalTerm(pull, client_align, every=pause),
        joining=Overwrite() if is_paper else Overwrite(follow=server_align),
        free_rounds=0 if is_paper else 1,
    )


def fnmf_by_sums(rank: int, *, align: Alignment = Assignment(), sweeps: int = 2, **settings: Any) -> Consensus:
    """`fnmf` whose barycenter is `sweeps` sums a round: parties align themselves, and no single H_p is seen by anybody.

    Sent per sweep and party: P_p H_p (k × m), P_p 1 (k), the number of rows. Never sent: X_p, W_p.
    """
    open_ = fnmf(rank, client_align=align, server_align=align, **settings)
    return replace(open_, aggregation=AlignedMean(), upload=AlignedUpload(align), sweeps=sweeps)


def then_exact(first: Program, rounds: int) -> Relay:
    """A program for a few rounds, then exact shared statistics from the model that it has reached.

    Sent per exact round and party: WᵀW (k × k), WᵀX (k × m), three totals. Never sent: X_p, W_p.
    """
    return Relay(first, shared_statistics(first.rank, accelerate=True), rounds)


def local_only(rank: int, *, steps: int = 100) -> Consensus:
    """Every party factorizes alone from its own start, and the H_p are averaged once: what not to do."""
    return fedavg(rank, steps=steps, start=INDEPENDENT)


def ipalm_once(rank: int, *, steps: int = 1000, start: str = INDEPENDENT) -> Consensus:
    """iPALM at every party alone, averaged once by position: a baseline of the FNMF paper. One round is all of it."""
    return replace(fedavg(rank, steps=steps, start=start), solver=plain(InertialPalm()))


def mur_once(rank: int, *, steps: int = 1000, start: str = INDEPENDENT) -> Consensus:
    """Multiplicative updates at every party alone, averaged once by position: a baseline of the FNMF paper."""
    return replace(fedavg(rank, steps=steps, start=start), solver=plain(Multiplicative()))


def dsanls(
    rank: int,
    *,
    sketch: Proportion = Proportion(),
    rule: UpdateRule = ProximalDescent(),
    iterations: int = 100,
    every: int = 10,
    n_rows: int | None = None,
) -> SketchExchange:
    """Distributed sketched NMF: both factors in blocks, of which only sketches are exchanged (Qian et al., 2020).

    Sent per iteration and node: W_rᵀ S' (k × d') and H_r S (k × d); H (k × m) after `every` iterations. Never sent: X.
    """
    return SketchExchange(rank, plain(rule), sketch, iterations, every, n_rows=n_rows)


def secure_dsanls(rank: int, *, sketch: Sketch | None = None, **settings: Any) -> SketchedStatistics:
    """DSANLS where each party has rows alone, for as long as its sketches do not give them away (Qian et al., 2020).

    The sketch is Gaussian with four dimensions for each component unless told otherwise: the smaller, the more rounds.

    Sent per round and party: X_pᵀ S_p (m × d), W_pᵀ S_p (k × d). Never sent: X_p, W_p.
    """
    return SketchedStatistics(
        rank, Gaussian(4 * rank) if sketch is None else sketch, plain(ProximalDescent()), **settings
    )


def syn_sd(rank: int, *, steps: int = 10, rule: UpdateRule = ProximalDescent()) -> Consensus:
    """Local steps that are held back, then the mean of H by position (Qian et al., 2020, Alg. 4).

    W steps first. The paper prints H first, which from a W of their own lets the copies part at once.
    Sent per round and party: H_p (k × m). Never sent: X_p, W_p.
    """
    return Consensus(rank, plain(rule), steps, CommonStart(), Mean())


def syn_ssd(
    rank: int,
    *,
    variant: str = "uv",
    steps: int = 10,
    sketch: Proportion = Proportion(),
    rule: UpdateRule = ProximalDescent(),
) -> SketchedConsensus:
    """`syn_sd` with sketched steps, in which W fits the mean of all H_p (Qian et al., 2020, Alg. 5).

    "u": W by a shared sketch, H exactly; "v": H by a sketch of the party's own, W exactly; "uv": both. A round takes
    `rounds_for(1)` exchanges. Sent in it by a party: `steps` times H_p S (k × d; k × m for "v"), and H_p (k × m).
    Never sent: X_p, W_p.
    """
    if variant not in ("u", "v", "uv"):
        raise ParameterError(f'The variants of syn_ssd are "u", "v" and "uv"; got {variant!r}.')
    of_rows = None if variant == "u" else sketch
    of_columns = None if variant == "v" else sketch
    return SketchedConsensus(rank, plain(rule), steps, of_rows, of_columns)


def asyn_sd(rank: int, *, steps: int = 10, rho: float = 3.0, rule: UpdateRule = ProximalDescent()) -> Consensus:
    """`syn_sd` whose server relaxes towards each H_p as it comes: for an asynchronous engine (Qian et al., 2020).

    Printed is Relaxation(1.0), published code has Relaxation(1.0, offset=2).
    Sent per arrival: H_p (k × m). Never sent: X_p, W_p.
    """
    return replace(syn_sd(rank, steps=steps, rule=rule), server_update=Relaxation(rho))


def asyn_ssd_v(
    rank: int,
    *,
    steps: int = 10,
    rho: float = 3.0,
    sketch: Proportion = Proportion(),
    rule: UpdateRule = ProximalDescent(),
) -> Consensus:
    """`asyn_sd` with the party's step of H sketched, by a sketch that nobody else knows (Qian et al., 2020).

    Sent per arrival: H_p (k × m). Never sent: X_p, W_p.
    """
    return replace(asyn_sd(rank, steps=steps, rho=rho, rule=rule), sketch=sketch)


def game(
    rank: int,
    *,
    order: Order = Stratified(),
    step: StepSize = SafeStep(),
    self_play: SelfPlay = NoSelfPlay(),
    leader: str | None = None,
    repeats: int = 1,
) -> PlayInStrata:
    """The NNMF game between parties (Singh, 2021): row players stay, column players travel from party to party.

    With a `leader` ("rows" or "columns") that side moves first wherever two meet. A round is an exchange for
    each party. Sent in one by a party: a block of columns of H (k × m/N). Never sent: X_p, W_p.
    """
    return PlayInStrata(rank, Game(order, step, self_play, leader), repeats=repeats)


def game_consensus(rank: int, *, game: Game = Game(), steps: int = 10, start: str = COMMON) -> Consensus:
    """FedAvg whose parties play `steps` sweeps of the game on their own rows. Sent: H_p (k × m). Never: X_p, W_p."""
    return Consensus(rank, steps=steps, start=_started(start), game=game)


def party_private(
    program: Consensus, *, epsilon: float, delta: float, rounds: int, clip: float = 1.0, kind: str = "gaussian"
) -> PrivateConsensus:
    """A consensus with (ε, δ)-differential privacy of each party's data over `rounds` uploads in all.

    Relation: all data of one party are exchanged for any other. `clip` is the most that an H_p with rows of norm 1 may
    lie from the model; choose it from what is public. "laplace" needs no δ, and clips and adds noise by the L1 norm.
    Sent: H_p with noise (k × m). Never: X_p, W_p, n_p.
    """

    made: dict[str, Callable[[float, float], Mechanism]] = {"gaussian": ClippedGaussian, "laplace": ClippedLaplace}
    if kind not in made:
        raise ParameterError(f"Noise is {' or '.join(made)}; got {kind!r}.")
    return PrivateConsensus(program, made[kind](clip, multiplier_for(epsilon, delta, rounds, kind)), rounds)


def orders() -> dict[str, Order]:
    """The orders of play behind `--play`."""
    return {
        "stratified": Stratified(),
        "sequential": Raster(),
        "random": Shuffled(),
        "simultaneous": Simultaneous(),
        "alternating": Alternating(),
    }


def self_plays() -> dict[str, SelfPlay]:
    """What columns may do alone, behind `--self-play`."""
    return {"none": NoSelfPlay(), "min": ShrinkSmallest(), "max": ShrinkOthers()}


def _started(start: str, *, announced: bool = False) -> CommonStart | IndependentStart:
    """One H for all parties, or one of its own for each."""
    if start not in STARTS:
        raise ParameterError(f"A start is {' or '.join(map(repr, STARTS))}; got {start!r}.")
    return CommonStart() if start == COMMON else IndependentStart(announced=announced)


# ---- game names -------------------------------------------------------------------------------------------------
#
# A game by the names that model files and the command line have for its parts.


def names_of(game: Game) -> dict[str, Any]:
    """What a file says of a game: its parts by name, or all of it as text where a part has none."""
    step, alone = game.step, game.self_play
    told = {
        "play": next((name for name, order in orders().items() if order == game.order), None),
        "step": getattr(step, "eta", SAFE),
        "step_decay": getattr(step, "decay", None),
        "self_play": next((name for name, one in self_plays().items() if type(one) is type(alone)), None),
        "shrink": getattr(alone, "factor", None),
        "leader": game.leader,
    }
    try:
        is_told = game_named(told) == game
    except (ParameterError, TypeError):
        is_told = False
    return told if is_told else {"game": repr(game)}


def game_named(told: Mapping[str, Any]) -> Game:
    """The game that a file tells of; parts that it leaves out are those of any game."""
    order, self_play = told.get("play") or "stratified", told.get("self_play") or "none"
    eta, decay, shrink = told.get("step"), told.get("step_decay"), told.get("shrink")
    if order not in orders() or self_play not in self_plays():
        raise ParameterError(f"There is no play {order!r} with self-play {self_play!r}.")
    step: StepSize = SafeStep()
    if eta not in (SAFE, None):
        step = ConstantStep(eta) if decay is None else DecayingStep(eta, decay)
    alone: Any = self_plays()[self_play]
    alone = alone if shrink is None else replace(alone, factor=shrink)
    return Game(orders()[order], step, alone, told.get("leader"))


def game_told(settings: Mapping[str, Any]) -> Game | str:
    """The solver of a model that was learned by a game: "game" for the usual one, and where it cannot be told."""
    try:
        game = game_named(settings)
    except (ParameterError, TypeError):
        return "game"
    return "game" if game == Game() else game
