"""The whole architecture: the nouns and the protocols, and no algorithm.

X ≈ W H; rows are samples; parties own rows; W (n × k) is private, H (k × m) is shared.

    private rows ─► local ─► privacy ─► [ engine: Message ] ─► reduction ─► finish ─► model H
                      ▲───────────────────── broadcast ◄──────────────────────┘

What crosses a party's boundary is a Message that `Program.local` returned; there is no other way out.
A Program is a value (a frozen dataclass) with pure methods; an Engine interprets it and knows nothing of NMF.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from partsong.core.states import state
from partsong.errors import CompositionError, ParameterError, PartsongError

Array = Any  # a NumPy array or a torch tensor
State = Any  # a frozen dataclass of arrays, numbers and strings: checkpointable, movable between processes


@state("core.outcome")
class Outcome(enum.StrEnum):
    """Why a run ended; numerical trouble is a value, not an exception."""

    CONVERGED = "converged"
    MAX_ROUNDS = "max-rounds"
    TIME_LIMIT = "time-limit"
    INTERRUPTED = "interrupted"
    DIVERGED = "diverged"
    PRIVACY_BUDGET_EXHAUSTED = "privacy-budget-exhausted"


@state("core.message")
@dataclass(frozen=True, slots=True)
class Message:
    """Named arrays and a weight: the only thing that crosses a party's boundary."""

    arrays: Mapping[str, Array]
    weight: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "arrays", MappingProxyType(dict(self.arrays)))

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def __reduce__(self) -> tuple[type[Message], tuple[dict[str, Array], float]]:
        return Message, (dict(self.arrays), self.weight)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, and eight for the weight."""
        return sum(int(array.nbytes) for array in self.arrays.values()) + 8

    @property
    def signature(self) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """Name, shape and type of each array: what an auditor compares with what was declared."""
        return tuple((name, tuple(a.shape), str(a.dtype)) for name, a in sorted(self.arrays.items()))


Dim = int | str
"""A dimension: a number where uploads are checked, a name ("k", "m") where they are described."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """What one array of an upload looks like: a program states it, engines check uploads against it, docs describe it.

    `kind` is a number type's name without its width. `single_party_reason` is empty where every entry of a sum has an
    addend from each party; else it says why an entry may be one party's alone, and the way out. `is_factor`: the array
    is squared later, so entries must not exceed √finfo.max. `meaning`: the formula, for people.
    """

    shape: tuple[Dim, ...]
    kind: str = "float"
    non_negative: bool = False
    single_party_reason: str = ""
    is_factor: bool = False
    meaning: str = ""


Sums = tuple[Array, ...]
"""Addends of blocks of rows: arrays that whoever makes them gives away, summed in place and in the order of rows."""


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Some rows as they are stored: a dense tile (NumPy or torch), or CSR arrays whose `indptr` begins at 0."""

    rows: slice
    n_columns: int
    tile: Array = None
    indptr: Array = None
    indices: Array = None
    data: Array = None


class Matrix(Protocol):
    """Rows in whatever form they come (dense, sparse, on disk, on a device), seen through products and blocks.

    Passes go over blocks of rows, on several threads: a step touches its own rows alone, and what it returns is summed.
    Over no rows at all a pass is one step on an empty block.
    """

    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def stored(self) -> int: ...
    @property
    def mean(self) -> float: ...
    @property
    def row_weights(self) -> Array | None:
        """u (n): how much each row counts in norms, sums and losses; None where all count once. Products ignore it."""

    @property
    def total_weight(self) -> float:
        """Σ u_i; the number of rows without weights."""

    @property
    def squared_norm(self) -> float:
        """Σ u_i ‖x_i‖², over known cells."""

    def row_energies(self) -> Array:
        """‖x_i‖² of each row, in float64."""

    def gram_is_cheap(self, k: int) -> bool:
        """Whether products of k components over the rows are cheap in float64, beside a pass over X."""

    def visit(self, Ht: Array, A: Array, step: Callable[[slice, Array], Sums]) -> tuple[Array, Sums]:
        """Call step(rows, X[rows] Ht) for blocks of rows, which fills A[rows]; return XᵀA and Σ of what it returned."""

    def walk(self, Ht: Array, step: Callable[[slice, Array], Sums]) -> Sums:
        """The same pass without XᵀA."""

    def blocks(self, work: Callable[[RowBlock], Sums], per_cell: float = 1.0) -> Sums:
        """Σ work(block) over all rows; `per_cell`, in floating-point operations, decides how many threads share it."""

    def transposed(self) -> Matrix | None:
        """Xᵀ, where that needs no second copy of X; else None."""

    def times(self, B: Array) -> Array:
        """X B, for B (m × c)."""

    def transposed_times(self, A: Array) -> Array:
        """Xᵀ A, for A (n × c)."""

    def rows(self, indices: Array) -> Matrix:
        """Some of the rows, as a matrix in memory."""

    def columns(self, indices: Array) -> Array:
        """Some of the columns, as a dense array."""

    def column_energies(self) -> Any:
        """Σ_i X_ij² for each column j, as a NumPy array in float64."""

    def gram_column(self, j: int) -> Any:
        """Xᵀ x_j for column j, as a NumPy array in float64."""

    def native(self, values: Array) -> Array:
        """An array of any kind in the number type and place of this matrix."""

    def squared_distance(self, W: Array, Ht: Array) -> float:
        """‖X − W H‖² by the trace formula in float64; W H is never formed."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One party's private data, and the secret behind its private random streams."""

    name: str
    matrix: Matrix
    secret: int = 0


@state("core.layout")
@dataclass(frozen=True, slots=True)
class Layout:
    """What everybody may know: who takes part, the number of columns, the number type, the shared seed."""

    parties: tuple[str, ...]
    n_features: int
    seed: int
    dtype: str = "float64"

    @staticmethod
    def of(shards: Sequence[Shard], seed: int) -> Layout:
        """The layout of these shards; parties are named once and agree on their columns."""
        names = tuple(sorted(shard.name for shard in shards))
        if not names:
            raise ParameterError("A federation needs at least one party; none was given.")
        twins = sorted({name for name in names if names.count(name) > 1})
        if twins:
            raise ParameterError(f"Party names must differ; used more than once: {', '.join(twins)}.")
        widths = {shard.name: shard.matrix.shape[1] for shard in shards}
        if len(set(widths.values())) > 1:
            shown = ", ".join(f"{name}: {width}" for name, width in sorted(widths.items()))
            raise CompositionError(
                f"Parties must hold the same columns, but their numbers differ ({shown}). "
                "Bring them to one list of features first."
            )
        types = {type_name(shard.matrix.dtype) for shard in shards}
        dtype = "float64" if "float64" in types else types.pop()
        return Layout(names, next(iter(widths.values())), int(seed), dtype)


def type_name(dtype: Any) -> str:
    """The name of a number type, the same for arrays and tensors."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a program is run: how many rounds, who misses which, what a fault leads to, and a party's kernel threads.

    `absent` maps a round to the names that miss it; their state stands still and they are left out of that sum.
    `silent` maps a round to the names that fall silent in it, each with the phase of the reduction from which on
    nothing is heard of it; such a party has done its work and keeps its state.
    `on_party_error` decides what happens when a party's work or upload fails with a PartsongError: "raise" raises it,
    and all earlier rounds stay valid; "skip" treats the party as absent from that round and records why.
    """

    rounds: int
    seed: int = 0
    absent: Mapping[int, frozenset[str]] = field(default_factory=dict)
    dropouts: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    kernel_threads: int = 1
    on_party_error: str = "raise"

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ParameterError(f"A schedule needs at least one round; rounds={self.rounds}.", parameter="rounds")
        if self.kernel_threads < 1:
            raise ParameterError(
                f"kernel_threads must be at least 1; got {self.kernel_threads}.", parameter="kernel_threads"
            )
        if self.on_party_error not in ("raise", "skip"):
            raise ParameterError(
                f'on_party_error must be "raise" or "skip"; got {self.on_party_error!r}.', parameter="on_party_error"
            )

    def check(self, names: Sequence[str]) -> None:
        """Refuse names that no party has."""
        named = {name for group in (*self.absent.values(), *self.dropouts.values()) for name in group}
        unknown = sorted(named - set(names))
        if unknown:
            raise ParameterError(
                f"The schedule names parties that are not there: {', '.join(unknown[:5])}. "
                f"The parties are {', '.join(sorted(names)[:5])}{'…' if len(names) > 5 else ''}."
            )

    def participants(self, names: Sequence[str], index: int) -> tuple[str, ...]:
        """The names that take part in a round, in name order."""
        missing = self.absent.get(index, frozenset())
        present = tuple(name for name in sorted(names) if name not in missing)
        if not present:
            raise ParameterError(f"Nobody takes part in round {index}: every party is marked absent.")
        return present


@state("core.checkpoint")
@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All that a run needs to go on as if it had not stopped: the next round and every state."""

    index: int
    parties: Mapping[str, State]
    server: State
    model: Message


@dataclass(frozen=True, slots=True)
class Round:
    """What one round did; `refused` says, by name, why a party was left out although it was there.

    `checkpoint` holds private states, of all parties where the engine is in-process and else of those that are here.
    """

    index: int
    model: Message
    metrics: Mapping[str, float]
    participants: tuple[str, ...]
    bytes_up: Mapping[str, int]
    bytes_down: int
    seconds: float
    checkpoint: Checkpoint
    traffic: tuple[tuple[str, int, Message], ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)


@state("asynchronous.work-item")
@dataclass(frozen=True, slots=True)
class WorkItem:
    """A party's piece of work in an asynchronous run, with the model that the party was last sent.

    `version` is the number of arrivals that the model had seen, `number` the piece's number at this party, `due` when
    it arrives on a virtual clock (None: nobody knows), and `fault` why the piece before it was refused (kind and
    message of the error). The staleness of its arrival is the round's index less `version`. Work is a pure function of
    the party's state and the model, so it does not matter when it is computed.
    """

    model: Message
    version: int
    number: int = 0
    due: float | None = None
    fault: tuple[str, ...] = ()


@state("asynchronous.checkpoint")
@dataclass(frozen=True, slots=True)
class AsyncCheckpoint(Checkpoint):
    """A checkpoint of an asynchronous run: also what is under way, and the seconds since the run began.

    To synchronous engines it is a Checkpoint like any other.
    """

    items: Mapping[str, WorkItem] = field(default_factory=dict)
    clock: float = 0.0


class UpdateRule(Protocol):
    """min_F ½‖A − F B‖² over F ≥ 0, one step, from the normal equations alone. Never sees X, a seed or a network."""

    @property
    def guarantees(self) -> frozenset[Guarantee]: ...
    def init(self, factor: Array) -> State: ...
    def step(self, factor: Array, equations: Any, state: State) -> tuple[Array, State]: ...


class Guarantee(enum.Enum):
    """What a rule promises; each promise is a law that the tests hold it to."""

    MONOTONE = "a step never raises the objective"
    SCALE_EQUIVARIANT = "rescaling data or the other factor rescales the step"
    ROW_SEPARABLE = "a row of the factor depends on its own row of the cross product alone"


class Aggregation(Protocol):
    """Many uploads, in name order, to one aggregate; `model` is what the parties were sent before."""

    def __call__(self, uploads: Sequence[Message], model: Message) -> Message: ...


class Plan(Protocol):
    """P (k × k) with P·source ≈ target: non-negative, and `weights` = P·1 ≤ 1; a row of zeros has no partner."""

    @property
    def matrix(self) -> Any: ...
    @property
    def weights(self) -> Any: ...
    @property
    def is_permutation(self) -> bool: ...
    def apply(self, source: Array) -> Array: ...
    def transposed(self) -> Plan: ...
    def after(self, first: Plan) -> Plan: ...


class Alignment(Protocol):
    """Which row of one factor (k × m) is which row of another; `is_partial`: a row of a plan may lack a partner."""

    @property
    def is_partial(self) -> bool: ...
    def plan(self, target: Array, source: Array) -> Plan: ...


@runtime_checkable
class Reducible(Protocol):
    """An aggregation that is a sum in disguise: lower(Σ lift(upload))."""

    def lift(self, upload: Message) -> Message: ...
    def lower(self, total: Message) -> Message: ...


class ServerUpdate(Protocol):
    """How the aggregate moves the model: replacement, relaxation, adaptive steps."""

    def init(self, model: Message) -> State: ...
    def step(self, model: Message, aggregate: Message, state: State) -> tuple[Message, State]: ...


@dataclass(frozen=True, slots=True)
class ReductionContext:
    """Which sum this is: the round, who takes part in it, what everybody may know, and the model they were sent."""

    index: int
    participants: tuple[str, ...]
    layout: Layout
    model: Message


class Reduction(Protocol):
    """How uploads become one aggregate: in one exchange or several phases, in plain or masked.

    At a party: `setup_party` makes the state that lasts from sum to sum (keys, from the party's own secret), `start`
    takes the upload, `client_step` answers the server in each phase, and `finish_party` returns what is kept for the
    next sum. At the server: `first_phase` is the phase where this sum starts (set-up phases shared with earlier sums
    are skipped); `server_step` takes the messages of a phase by name and broadcasts one reply; `result` returns the
    aggregate and the names that are in the sum.

    A party that drops out is missing from the inbox of that phase and of all later ones. The reduction continues with
    the others, or raises an error. The state of `setup_party` is not part of a checkpoint: a resumed run sets up its
    parties again. Programs do not know which reduction is in use. `hides_uploads`: the server sees only sums, so that
    each party checks its own upload, and engines keep one set of parties in all exchanges of a round.
    """

    @property
    def phases(self) -> int: ...
    @property
    def hides_uploads(self) -> bool: ...
    def check(self, aggregation: Aggregation) -> None: ...
    def setup_party(self, party: str, secret: int, layout: Layout) -> State: ...
    def start(
        self, party_state: State, upload: Message, aggregation: Aggregation, context: ReductionContext
    ) -> State: ...
    def client_step(self, phase: int, state: State, reply: Message) -> tuple[State, Message]: ...
    def finish_party(self, state: State) -> State: ...
    def first_phase(self, state: State, context: ReductionContext) -> int: ...
    def server_step(
        self, phase: int, inbox: Mapping[str, Message], state: State, context: ReductionContext
    ) -> tuple[State, Message]: ...
    def result(
        self, state: State, aggregation: Aggregation, context: ReductionContext
    ) -> tuple[State, Message, tuple[str, ...]]: ...


class RowSolver(Protocol):
    """W for given H, each row from itself and H alone: what a party does with a finished model."""

    def solve_rows(self, matrix: Matrix, Ht: Array, *, exactly: bool = True) -> Array: ...


@dataclass(frozen=True, slots=True)
class Traits:
    """What a program asks of engines, and of the sums that its uploads go into.

    `asynchronous`: no party waits for another, and a sum is over one upload. `full_participation`: a sum over some of
    the parties means nothing to it. `needs_columns`: every party needs columns of all rows beside its own rows.
    `requires`: "plain" where its uploads must not be hidden, "secure" where they must; `reason` says why. `min_in_sum`
    and `sum_bounds`: over how many parties a sum that hides uploads must be, and which numbers it must let pass.
    `release`: what one upload costs in differential privacy (None: it has no noise), and `max_releases` how many there
    may be; nothing that is measured without noise may then choose the rounds, or leave with the model.
    `measured_every`: how many iterations lie between two errors.
    """

    asynchronous: bool = False
    full_participation: bool = False
    needs_columns: bool = False
    requires: Literal["any", "plain", "secure"] = "any"
    reason: str = ""
    min_in_sum: int = 1
    sum_bounds: Mapping[str, float] = field(default_factory=dict)
    release: Any = None
    max_releases: int | None = None
    measured_every: int = 1


DEFAULT_TRAITS = Traits()


R = TypeVar("R")
C = TypeVar("C")


class HalfSteps(Protocol[R, C]):
    """A loss, as the two half-steps that minimise it: rows of W at a party (state R), H from sums over rows (state C).

    A value, equal at all parties. Sums of all parties add up to those of the pooled rows, so that one program
    (`methods.exact.SharedSums`) federates every loss, and `iterate` is the same on pooled rows. Numbers in states,
    models and sums are 0-d arrays beside the factors; nothing but `metrics` copies them to the host.
    """

    @property
    def traits(self) -> Traits:
        """What the sums ask of engines."""

    @property
    def scale(self) -> Literal["l2", "l1", "fixed"]:
        """How rows of H may be rescaled at the end of a fit: to norm 1, to sum 1, or not at all."""

    def begin(self, Ht: Array, *, is_scaled: bool = True) -> C:
        """The shared half at Hᵀ (m × k); a random start is not `is_scaled`: nothing can be told from its size."""

    def begin_rows(self, shard: Shard, layout: Layout, W: Array | None = None) -> R:
        """A party's half, at W (n × k) where one is given."""

    def broadcast(self, columns: C) -> Mapping[str, Array]:
        """What row steps need: H (k × m), and 0-d values."""

    def row_step(self, X: Matrix, rows: R, model: Mapping[str, Array]) -> tuple[R, Mapping[str, Array]]:
        """The next W from a broadcast model, and sums over these rows."""

    def column_step(self, columns: C, sums: Mapping[str, Array]) -> C:
        """The next H from the sums over all rows, in their number type and place."""

    def sums_spec(self, k: Any, m: Any) -> Mapping[str, ArraySpec]:
        """The sums of a row step by name, for k components and m features."""

    def components(self, columns: C) -> Array:
        """H (k × m): the last one accepted, where steps can be taken back."""

    def metrics(self, columns: C) -> Mapping[str, float]:
        """What the latest sums tell of the fit."""

    def solve_rows(self, X: Matrix, Ht: Array, rows: R | None = None, *, exactly: bool = True) -> Array:
        """W for given H, each row from itself and H alone."""

    def loss(self, X: Matrix, W: Array, Ht: Array) -> Mapping[str, Array]:
        """Sums over rows that say how well W H fits, as 0-d arrays."""

    def iterate(self, X: Matrix, rows: R, columns: C, count: int) -> tuple[R, C]:
        """`count` times a row step and a column step on all rows; all but the last may be fused."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Where a model stands among the exchanges of a round; by default a round is one exchange.

    `step`, from 0, of `steps`: exchanges that belong together. Under a reduction that hides uploads they are over the
    same parties. `works`: parties iterate on this model, and do not only send. `ends_round`: a round ended with the
    exchange that led to this model, which is worth a look.
    """

    step: int = 0
    steps: int = 1
    works: bool = True
    ends_round: bool = True


ONE_EXCHANGE = Turn()


class ProgramBase:
    """What most programs answer: no demands, rounds of one exchange, uploads of any form, an end by the schedule, no
    metrics.

    Programs derive from it and say what is otherwise. `directions` are the combinations of rows in the upload that
    answers a model (None: any), `directions_after` those in all uploads of one of so many parties; 0 where an upload is
    no combination of rows, for which no law is known.
    """

    __slots__ = ()

    @property
    def traits(self) -> Traits:
        """What the program asks of engines."""
        return DEFAULT_TRAITS

    def turn(self, model: Message) -> Turn:
        """Where a model stands among the exchanges of a round."""
        return ONE_EXCHANGE

    def exchanges(self, rounds: int, n_parties: int) -> int:
        """Exchanges that so many rounds take."""
        return rounds

    def is_over(self, server: State) -> bool:
        """Whether the program has come to an end before its schedule has."""
        return False

    def metrics(self, server: State) -> Mapping[str, float]:
        """What the server knows anyway: no error, unless a program sums one."""
        return {}

    def upload_spec(self, layout: Layout) -> tuple[Mapping[str, ArraySpec], ...]:
        """The arrays of each kind of upload; none: any numbers, if they are finite."""
        return ()

    def directions(self, model: Message | None) -> int:
        """Combinations of rows in one upload."""
        return 0

    def directions_after(self, exchanges: int, parties: int) -> int:
        """Combinations of rows in all uploads of a party."""
        return exchanges * self.directions(None)


class Program(Protocol):
    """A distributed algorithm, as pure functions.

    `start_party` and `local` run at a party, `start_server` and `finish` at the server; `components` is the shared
    factor H (k × m) as it stands, `metrics` what the server knows anyway, and `solver` fits new rows to the model.
    `upload_spec` states the arrays of an upload by name, once for each kind of upload; where it states none,
    engines ask for finite numbers only. `ProgramBase` has the rest, as most programs need it.
    """

    @property
    def rank(self) -> int: ...
    @property
    def solver(self) -> RowSolver: ...
    @property
    def aggregation(self) -> Aggregation: ...
    @property
    def traits(self) -> Traits: ...
    def start_party(self, shard: Shard, layout: Layout) -> State: ...
    def start_server(self, layout: Layout) -> tuple[State, Message]: ...
    def local(self, shard: Shard, party: State, model: Message) -> tuple[State, Message]: ...
    def finish(self, server: State, aggregate: Message) -> tuple[State, Message]: ...
    def components(self, server: State) -> Array: ...
    def metrics(self, server: State) -> Mapping[str, float]: ...
    def upload_spec(self, layout: Layout) -> tuple[Mapping[str, ArraySpec], ...]: ...
    def turn(self, model: Message) -> Turn: ...
    def exchanges(self, rounds: int, n_parties: int) -> int: ...
    def is_over(self, server: State) -> bool: ...
    def directions(self, model: Message | None) -> int: ...
    def directions_after(self, exchanges: int, parties: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Point:
    """Where the server of a synchronous run stands between two rounds.

    `sums` is what the reduction's server keeps from sum to sum, `cohort` whose uploads were in the last sum of this run
    (None: there was none).
    """

    index: int
    server: State
    model: Message
    sums: State = None
    cohort: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class RoundAttempt:
    """Who is asked for the sum of a round, and the phase that it begins with: fixed before anybody is asked.

    `attempt` counts from 0; `refused` are the parties that were left out of it, and why.
    """

    index: int
    attempt: int
    asked: tuple[str, ...]
    first: int = 0
    refused: Mapping[str, PartsongError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ask:
    """What the server asks of parties: "work" (`local`, `begin` and a first phase, in one trip) or "reduce" (a phase).

    The same index, attempt and phase always get the same answer. `participants` are those of the sum, `names` those who
    are asked. `message` is the model ("work") or the server's last reply ("reduce"). `silent` parties do their work and
    send nothing: a dropout that the schedule simulates. With `stops` a fault is raised where it happens, with these
    words as a note if there are any; where it is None, faults are values.
    """

    kind: Literal["work", "reduce"]
    index: int
    attempt: int
    phase: int
    participants: tuple[str, ...]
    names: tuple[str, ...]
    message: Message
    dropouts: frozenset[str] = frozenset()
    stops: str | None = None


@dataclass(frozen=True, slots=True)
class Answers:
    """What parties sent, and the errors of those who could not; both in name order."""

    messages: Mapping[str, Message]
    faults: Mapping[str, PartsongError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Served:
    """What the server makes of the answers in one phase.

    `message` is its reply; after the last phase it is the aggregate. `included` are those who are asked next, or whose
    uploads are in the sum, `worked` those whose new state counts, and `sizes` the bytes that each party sent.
    `must_restart`: the sum begins again, among those `included`.
    """

    message: Message = Message({})
    included: tuple[str, ...] = ()
    worked: tuple[str, ...] = ()
    faults: Mapping[str, PartsongError] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    reply_bytes: int = 0
    must_restart: bool = False


class Network(Protocol):
    """Where the parties of a synchronous run are: in this process, at ranks, or at other institutions."""

    @property
    def layout(self) -> Layout:
        """Agreed on once the network is running."""

    def running(self) -> AbstractContextManager[Any]:
        """Agree on the run; an error or an early end within this block ends the run everywhere."""

    def open(self, attempt: RoundAttempt, first: Callable[[tuple[str, ...]], int]) -> RoundAttempt:
        """The attempt with its first phase, or another one that is under way already.

        `first` says with which phase a sum over some parties begins, and works at the server only.
        """

    def exchange(self, ask: Ask, serve: Callable[[Answers], Served]) -> Served:
        """Bring the ask to the parties, their answers to `serve` at the server, and the outcome to everybody.

        `serve` changes nothing unless it returns, and may be called again with the same answers after a restart.
        """

    def sum(self, ask: Ask, aggregation: Aggregation) -> Served | None:
        """Work and sum in one collective operation, where there is one; None: use `exchange`."""

    def seen(self) -> Mapping[str, Message]:
        """What the parties sent in the last exchange, as far as it was seen here; handed over once."""

    def commit(self, after: Point, worked: tuple[str, ...], is_last: bool) -> Mapping[str, State]:
        """The work of these parties counts from here. Returns the states of the parties that are here."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Who sent what, or the error instead, and at which second of the run.

    `item` is the piece that was worked on, where the network may have replaced the one in the checkpoint.
    """

    name: str
    sent: Message | PartsongError
    clock: float
    item: WorkItem | None = None


class Arrivals(Protocol):
    """The network of an asynchronous run, in which no party waits for another."""

    @property
    def layout(self) -> Layout:
        """Agreed on once the network is running."""

    @property
    def has_ended(self) -> bool:
        """Whether the run was ended from elsewhere, so that nothing more arrives."""

    def running(self) -> AbstractContextManager[Any]:
        """Agree on the run; an error or an early end within this block ends the run everywhere."""

    def begin(self, point: AsyncCheckpoint) -> AsyncCheckpoint:
        """Start the parties. Returns the point as this network keeps it: with states and due times, if it knows any."""

    def send(self, items: Mapping[str, WorkItem]) -> None:
        """Give these parties their next piece of work."""

    def next(self) -> Arrival | None:
        """The next arrival; None where there is none for now."""

    def commit(self, done: Round, arrival: Arrival, sums: State) -> Round:
        """Keep the round, before its sender is answered. Returns it as this network keeps it."""

    def close(self) -> None:
        """The run is over, for everybody. Called before the last round is yielded."""


class Engine(Protocol):
    """An interpreter of programs; stopping early, progress and checkpoints are the caller's `for` body."""

    def run(
        self,
        program: Program,
        shards: Sequence[Shard],
        schedule: Schedule,
        *,
        reduction: Reduction,
        resume: Checkpoint | None = None,
    ) -> Iterator[Round]: ...
