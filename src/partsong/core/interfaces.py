"""Core data types and protocols: messages, layouts, schedules, programs, reductions, networks. No algorithms.

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

from partsong.core.renamed import hint
from partsong.core.states import state
from partsong.errors import CompositionError, ParameterError, PartsongError

Array = Any  # a NumPy array or a torch tensor
State = Any  # a frozen dataclass of arrays, numbers and strings that can be saved and sent between processes


@state("core.outcome")
class Outcome(enum.StrEnum):
    """Why a run ended. Numerical trouble is a value, not an exception."""

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
        """Name, shape and type of each array, for comparison with the declared upload spec."""
        return tuple((name, tuple(a.shape), str(a.dtype)) for name, a in sorted(self.arrays.items()))


Dim = int | str
"""A dimension: a number to check uploads against, or a name ("k", "m") to describe them."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Specification of one array of an upload: declared by a program, checked by engines, shown in the docs.

    `kind` is the name of a number type without its width. `single_party_reason` is empty if every party contributes to
    each entry of a sum; otherwise it says why an entry may come from a single party, and what to do. `is_factor`: the
    array is squared later, so entries must not exceed √finfo.max. `meaning`: the formula, for the documentation.
    """

    shape: tuple[Dim, ...]
    kind: str = "float"
    non_negative: bool = False
    single_party_reason: str = ""
    is_factor: bool = False
    meaning: str = ""


Sums = tuple[Array, ...]
"""Addends of a block of rows. The caller owns these arrays: they are summed in place, in the order of the rows."""


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Some rows in their stored form: a dense tile (NumPy or torch), or CSR arrays whose `indptr` starts at 0."""

    rows: slice
    n_columns: int
    tile: Array = None
    indptr: Array = None
    indices: Array = None
    data: Array = None


class Matrix(Protocol):
    """Rows in any form (dense, sparse, on disk, on a device), accessed through products and blocks.

    A pass goes over blocks of rows on several threads. A step touches only its own rows, and its return values are
    summed. A pass over zero rows is one step on an empty block.
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
        """u (n): the weight of each row in norms, sums and losses; None: all 1. Products ignore it."""

    @property
    def total_weight(self) -> float:
        """Σ u_i, or the number of rows if there are no weights."""

    @property
    def squared_norm(self) -> float:
        """Σ u_i ‖x_i‖², over known cells."""

    def row_energies(self) -> Array:
        """‖x_i‖² of each row, in float64."""

    def gram_is_cheap(self, k: int) -> bool:
        """Whether k × k products over the rows in float64 are cheap compared with a pass over X."""

    def visit(self, Ht: Array, A: Array, step: Callable[[slice, Array], Sums]) -> tuple[Array, Sums]:
        """Call step(rows, X[rows] Ht), which fills A[rows], for blocks of rows; return XᵀA and the sum of results."""

    def walk(self, Ht: Array, step: Callable[[slice, Array], Sums]) -> Sums:
        """The same pass without XᵀA."""

    def blocks(self, work: Callable[[RowBlock], Sums], per_cell: float = 1.0) -> Sums:
        """Σ work(block) over all rows; `per_cell` (floating-point operations) determines the number of threads."""

    def transposed(self) -> Matrix | None:
        """Xᵀ if that needs no second copy of X; else None."""

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
        """An array of any kind, converted to the number type and device of this matrix."""

    def squared_distance(self, W: Array, Ht: Array) -> float:
        """‖X − W H‖² by the trace formula in float64; W H is never formed."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The private data of one party, and the secret that keys its private random streams."""

    name: str
    matrix: Matrix
    secret: int = 0


@state("core.layout")
@dataclass(frozen=True, slots=True)
class Layout:
    """Public facts of a run: party names, number of columns, number type, and the shared seed."""

    parties: tuple[str, ...]
    n_features: int
    seed: int
    dtype: str = "float64"

    @staticmethod
    def of(shards: Sequence[Shard], seed: int) -> Layout:
        """Return the layout of these shards; names must be unique and column counts equal."""
        names = tuple(sorted(shard.name for shard in shards))
        if not names:
            raise ParameterError("A federation needs at least one party; none was given.")
        twins = sorted({name for name in names if names.count(name) > 1})
        if twins:
            raise ParameterError(f"Party names must differ; used more than once: {', '.join(twins)}. Rename them.")
        widths = {shard.name: shard.matrix.shape[1] for shard in shards}
        if len(set(widths.values())) > 1:
            shown = ", ".join(f"{name}: {width}" for name, width in sorted(widths.items()))
            raise CompositionError(
                f"Parties must have the same columns, but the numbers of columns differ ({shown}). "
                "Use one list of features for all parties."
            )
        types = {type_name(shard.matrix.dtype) for shard in shards}
        dtype = "float64" if "float64" in types else types.pop()
        return Layout(names, next(iter(widths.values())), int(seed), dtype)


def type_name(dtype: Any) -> str:
    """Return the name of a number type, the same for arrays and tensors."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a program is run: number of rounds, absences, dropouts, error handling, and kernel threads per party.

    `absent` maps a round to the names that miss it: their state does not change and they are not in that sum.
    `dropouts` maps a round to the names that drop out in it, each with the phase of the reduction from which it sends
    nothing. Such a party has done its work and keeps its new state.
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
            raise ParameterError(f"rounds must be at least 1; got {self.rounds}.", parameter="rounds")
        if self.kernel_threads < 1:
            raise ParameterError(
                f"kernel_threads must be at least 1; got {self.kernel_threads}.", parameter="kernel_threads"
            )
        if self.on_party_error not in ("raise", "skip"):
            raise ParameterError(
                f'on_party_error must be "raise" or "skip"; got {self.on_party_error!r}. '
                f"{hint(str(self.on_party_error), ('raise', 'skip'))}".rstrip(),
                parameter="on_party_error",
            )

    def check(self, names: Sequence[str]) -> None:
        """Refuse names of unknown parties."""
        named = {name for group in (*self.absent.values(), *self.dropouts.values()) for name in group}
        unknown = sorted(named - set(names))
        if unknown:
            raise ParameterError(
                f"The schedule names unknown parties: {', '.join(unknown[:5])}. "
                f"The parties are {', '.join(sorted(names)[:5])}{'…' if len(names) > 5 else ''}."
            )

    def participants(self, names: Sequence[str], index: int) -> tuple[str, ...]:
        """The names that take part in a round, in name order."""
        missing = self.absent.get(index, frozenset())
        present = tuple(name for name in sorted(names) if name not in missing)
        if not present:
            raise ParameterError(f"No party takes part in round {index}: all are marked absent. Leave at least one in.")
        return present


@state("core.checkpoint")
@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything needed to resume a run bit for bit: the index of the next round and all states."""

    index: int
    parties: Mapping[str, State]
    server: State
    model: Message


@dataclass(frozen=True, slots=True)
class Round:
    """The result of one round; `refused` says, by name, why a participating party was left out of the sum.

    `checkpoint` contains private states: of all parties if the engine runs in one process, else of the local parties.
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
    """One piece of work of a party in an asynchronous run, with the model that the party works on.

    `version` is the number of arrivals included in the model, `number` counts the items of this party, `due` is the
    arrival time on a virtual clock (None: unknown), and `fault` says why the previous item was refused (kind and
    message of the error). The staleness of an arrival is the round's index minus `version`. Work is a pure function of
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
    """A checkpoint of an asynchronous run: also the items in progress and the seconds since the run started.

    Synchronous engines use it like any Checkpoint.
    """

    items: Mapping[str, WorkItem] = field(default_factory=dict)
    clock: float = 0.0


class UpdateRule(Protocol):
    """One step of min_F ½‖A − F B‖² over F ≥ 0, from the normal equations alone; it never sees X or a seed."""

    @property
    def guarantees(self) -> frozenset[Guarantee]: ...
    def init(self, factor: Array) -> State: ...
    def step(self, factor: Array, equations: Any, state: State) -> tuple[Array, State]: ...


class Guarantee(enum.Enum):
    """A property that an update rule guarantees; the tests in tests/laws check every guarantee."""

    MONOTONE = "a step never raises the objective"
    SCALE_EQUIVARIANT = "rescaling data or the other factor rescales the step"
    ROW_SEPARABLE = "a row of the factor depends on its own row of the cross product alone"


class Aggregation(Protocol):
    """Combine uploads, in name order, into one aggregate; `model` is the one the parties worked on."""

    def __call__(self, uploads: Sequence[Message], model: Message) -> Message: ...


class Plan(Protocol):
    """P (k × k) ≥ 0 with P·source ≈ target and `weights` = P·1 ≤ 1; a row of zeros is unmatched."""

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
    """Match the rows of two factors (k × m); `is_partial`: rows may remain unmatched."""

    @property
    def is_partial(self) -> bool: ...
    def plan(self, target: Array, source: Array) -> Plan: ...


@runtime_checkable
class Reducible(Protocol):
    """An aggregation that can be computed from a sum: lower(Σ lift(upload))."""

    def lift(self, upload: Message) -> Message: ...
    def lower(self, total: Message) -> Message: ...


class ServerUpdate(Protocol):
    """How the aggregate updates the model: replacement, relaxation, adaptive steps."""

    def init(self, model: Message) -> State: ...
    def step(self, model: Message, aggregate: Message, state: State) -> tuple[Message, State]: ...


@dataclass(frozen=True, slots=True)
class ReductionContext:
    """Context of one sum: the round, its participants, the layout, and the model that was sent to them."""

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
    """Compute W for a given H, row by row: how a party applies a finished model."""

    def solve_rows(self, matrix: Matrix, Ht: Array, *, exactly: bool = True) -> Array: ...


@dataclass(frozen=True, slots=True)
class Traits:
    """Requirements of a program on engines and on the sums of its uploads.

    `asynchronous`: no party waits for another, and each sum has one upload. `full_participation`: sums over a subset of
    the parties are meaningless. `needs_columns`: each party also needs columns of all rows. `requires`: "plain" if
    uploads must be visible to the server, "secure" if they must be hidden; `reason` says why. `min_in_sum` and
    `sum_bounds`: the minimum number of parties in a secure sum, and the bounds on entries that it must allow.
    `release`: the differential-privacy cost of one upload (None: no noise); `releases`: the costs by exchange, if they
    differ; `max_releases`: the maximum number of uploads. With noise, no quantity measured without noise may influence
    the number of rounds or leave with the model.
    `measured_every`: iterations between two evaluations of the error.
    """

    asynchronous: bool = False
    full_participation: bool = False
    needs_columns: bool = False
    requires: Literal["any", "plain", "secure"] = "any"
    reason: str = ""
    min_in_sum: int = 1
    sum_bounds: Mapping[str, float] = field(default_factory=dict)
    release: Any = None
    releases: tuple[Any, ...] = ()
    max_releases: int | None = None
    measured_every: int = 1

    def release_at(self, exchange: int) -> Any:
        """The cost of an upload in this exchange, counted from 0."""
        return self.releases[min(exchange, len(self.releases) - 1)] if self.releases else self.release

    def allows(self, made: int, exchange: int) -> bool:
        """Whether a party that has made so many uploads may make the one of this exchange.

        All its uploads together then cost what the first planned ones do, whatever was repeated or left out.
        """
        if self.max_releases is not None and made >= self.max_releases:
            return False
        return not self.releases or bool(self.release_at(exchange) == self.releases[made])


DEFAULT_TRAITS = Traits()


R = TypeVar("R")
C = TypeVar("C")


class HalfSteps(Protocol[R, C]):
    """A loss as two half-steps: rows of W at a party (state R), and H from sums over rows (state C).

    A value, equal at all parties. The parties' sums add up to the sums over the pooled rows, so one program
    (`methods.exact.SharedSums`) federates every loss, and `iterate` gives the same on pooled rows. Numbers in states,
    models and sums are 0-d arrays on the device of the factors; only `metrics` copies them to the host.
    """

    @property
    def traits(self) -> Traits:
        """Requirements of the sums on engines."""

    @property
    def scale(self) -> Literal["l2", "l1", "fixed"]:
        """How rows of H are rescaled at the end of a fit: to norm 1, to sum 1, or not at all."""

    def begin(self, Ht: Array, *, is_scaled: bool = True) -> C:
        """Start the shared half at Hᵀ (m × k); for a random start `is_scaled` is false: its scale has no meaning."""

    def begin_rows(self, shard: Shard, layout: Layout, W: Array | None = None) -> R:
        """Start a party's half, at W (n × k) if given."""

    def broadcast(self, columns: C) -> Mapping[str, Array]:
        """The model for row steps: H (k × m) and 0-d values."""

    def row_step(self, X: Matrix, rows: R, model: Mapping[str, Array]) -> tuple[R, Mapping[str, Array]]:
        """Update W from a broadcast model; return the sums over these rows."""

    def column_step(self, columns: C, sums: Mapping[str, Array]) -> C:
        """Update H from the sums over all rows, in their number type and on their device."""

    def sums_spec(self, k: Any, m: Any) -> Mapping[str, ArraySpec]:
        """The sums of a row step by name, for k components and m features."""

    def components(self, columns: C) -> Array:
        """H (k × m); if steps can be rejected, the last accepted one."""

    def metrics(self, columns: C) -> Mapping[str, float]:
        """Metrics of the fit from the latest sums."""

    def solve_rows(self, X: Matrix, Ht: Array, rows: R | None = None, *, exactly: bool = True) -> Array:
        """W for a given H, each row independently."""

    def loss(self, X: Matrix, W: Array, Ht: Array) -> Mapping[str, Array]:
        """The loss of W H as sums over rows, in 0-d arrays."""

    def iterate(self, X: Matrix, rows: R, columns: C, count: int) -> tuple[R, C]:
        """Run `count` row and column steps on all rows; all but the last may be fused."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Position of a model among the exchanges of a round; by default a round has one exchange.

    `step` (from 0) of `steps` counts exchanges that belong together; with a reduction that hides uploads they have the
    same participants. `works`: parties iterate on this model instead of only sending. `ends_round`: the exchange that
    produced this model ended a round, so the model can be evaluated.
    """

    step: int = 0
    steps: int = 1
    works: bool = True
    ends_round: bool = True


ONE_EXCHANGE = Turn()


class ProgramBase:
    """Defaults for programs: no requirements, one exchange per round, uploads of any form, an end by the schedule, no
    metrics.

    Programs derive from it and override what differs. `directions` is the number of linear combinations of rows in the
    upload that answers a model (None: any), `directions_after` the number in all uploads of one party; both are 0 if
    uploads are not linear combinations of rows. `exchange_of` is the exchange that a model asks for, where the model
    says so and the cost of an upload depends on it.
    """

    __slots__ = ()

    @property
    def traits(self) -> Traits:
        """Requirements of the program on engines."""
        return DEFAULT_TRAITS

    def turn(self, model: Message) -> Turn:
        """Position of a model among the exchanges of a round."""
        return ONE_EXCHANGE

    def exchange_of(self, model: Message) -> int | None:
        """Index of the exchange that a model asks for; None: models do not say."""
        return None

    def exchanges(self, rounds: int, n_parties: int) -> int:
        """Number of exchanges in this many rounds."""
        return rounds

    def is_over(self, server: State) -> bool:
        """Whether the program has ended before its schedule."""
        return False

    def metrics(self, server: State) -> Mapping[str, float]:
        """Metrics that the server knows without further sums."""
        return {}

    def upload_spec(self, layout: Layout) -> tuple[Mapping[str, ArraySpec], ...]:
        """The arrays of each kind of upload; empty: any finite numbers."""
        return ()

    def directions(self, model: Message | None) -> int:
        """Combinations of rows in one upload."""
        return 0

    def directions_after(self, exchanges: int, parties: int) -> int:
        """Combinations of rows in all uploads of a party."""
        return exchanges * self.directions(None)


class Program(Protocol):
    """A distributed algorithm as pure functions.

    `start_party` and `local` run at a party, `start_server` and `finish` at the server. `components` is the current
    shared factor H (k × m), `metrics` what the server knows without further sums, and `solver` fits new rows to the
    model. `upload_spec` declares the arrays of an upload by name, once for each kind of upload; if it is empty, engines
    only require finite numbers. `ProgramBase` has defaults for the rest.
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
    def exchange_of(self, model: Message) -> int | None: ...
    def exchanges(self, rounds: int, n_parties: int) -> int: ...
    def is_over(self, server: State) -> bool: ...
    def directions(self, model: Message | None) -> int: ...
    def directions_after(self, exchanges: int, parties: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Point:
    """State of the server of a synchronous run between two rounds.

    `sums` is the state of the reduction's server, `cohort` the parties in the last sum of this run (None: no sum yet).
    """

    index: int
    server: State
    model: Message
    sums: State = None
    cohort: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class RoundAttempt:
    """The parties asked for the sum of a round, and its first phase; fixed before any party is asked.

    `attempt` counts from 0; `refused` lists the parties that were left out, with the reasons.
    """

    index: int
    attempt: int
    asked: tuple[str, ...]
    first: int = 0
    refused: Mapping[str, PartsongError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request of the server: "work" (`local`, `start` and the first phase in one trip) or "reduce" (one phase).

    The same index, attempt and phase always get the same answer. `participants` are the parties of the sum, `names`
    those that are asked. `message` is the model ("work") or the server's last reply ("reduce"). `dropouts` do their
    work but send nothing: dropouts simulated by the schedule. If `error_note` is None, errors of parties are returned
    as values; otherwise they are raised where they occur, with `error_note` as a note unless it is empty.
    """

    kind: Literal["work", "reduce"]
    index: int
    attempt: int
    phase: int
    participants: tuple[str, ...]
    names: tuple[str, ...]
    message: Message
    dropouts: frozenset[str] = frozenset()
    error_note: str | None = None


@dataclass(frozen=True, slots=True)
class Answers:
    """The messages of the parties, and the errors of those that failed; both in name order."""

    messages: Mapping[str, Message]
    faults: Mapping[str, PartsongError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Served:
    """Result of one phase at the server.

    `message` is the reply; after the last phase it is the aggregate. `included` are the parties to ask next, or whose
    uploads are in the sum; `worked` those whose new state counts; `sizes` the bytes sent by each party. `must_restart`:
    the sum starts again with the parties in `included`.
    """

    message: Message = Message({})
    included: tuple[str, ...] = ()
    worked: tuple[str, ...] = ()
    faults: Mapping[str, PartsongError] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    reply_bytes: int = 0
    must_restart: bool = False


class Network(Protocol):
    """Connection to the parties of a synchronous run: in this process, on ranks, or at other institutions."""

    @property
    def layout(self) -> Layout:
        """Known once the network is running."""

    def running(self) -> AbstractContextManager[Any]:
        """Agree on the run; an error or an early exit within this block ends the run everywhere."""

    def open(self, attempt: RoundAttempt, first: Callable[[tuple[str, ...]], int]) -> RoundAttempt:
        """Return the attempt with its first phase, or another attempt that is already in progress.

        `first` returns the first phase of a sum over some parties; it works only at the server.
        """

    def exchange(self, ask: Ask, serve: Callable[[Answers], Served]) -> Served:
        """Send the request to the parties, pass their answers to `serve` at the server, and share its result with all.

        `serve` changes nothing unless it returns, and may be called again with the same answers after a restart.
        """

    def sum(self, ask: Ask, aggregation: Aggregation) -> Served | None:
        """Work and sum in one collective operation if available; None: use `exchange`."""

    def seen(self) -> Mapping[str, Message]:
        """Return the messages of the last exchange that were visible here; each is returned once."""

    def commit(self, after: Point, worked: tuple[str, ...], is_last: bool) -> Mapping[str, State]:
        """Accept the work of these parties; return the states of the local parties."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message of a party, or its error, with the time in seconds since the run started.

    `item` is the work item behind it, if the network may have replaced the one in the checkpoint.
    """

    name: str
    sent: Message | PartsongError
    clock: float
    item: WorkItem | None = None


class Arrivals(Protocol):
    """The network of an asynchronous run, in which no party waits for another."""

    @property
    def layout(self) -> Layout:
        """Known once the network is running."""

    @property
    def has_ended(self) -> bool:
        """Whether the run was ended elsewhere, so that nothing more arrives."""

    def running(self) -> AbstractContextManager[Any]:
        """Agree on the run; an error or an early exit within this block ends the run everywhere."""

    def begin(self, point: AsyncCheckpoint) -> AsyncCheckpoint:
        """Start the parties; return the checkpoint as this network keeps it, with states and due times if known."""

    def send(self, items: Mapping[str, WorkItem]) -> None:
        """Send these parties their next work items."""

    def next(self) -> Arrival | None:
        """Return the next arrival; None if there is none yet."""

    def commit(self, done: Round, arrival: Arrival, sums: State) -> Round:
        """Store the round before its sender is answered; return it as this network keeps it."""

    def close(self) -> None:
        """End the run for all parties. Called before the last round is yielded."""


class Engine(Protocol):
    """Runs programs. Early stopping, progress and checkpoints belong in the caller's loop over the rounds."""

    def run(
        self,
        program: Program,
        shards: Sequence[Shard],
        schedule: Schedule,
        *,
        reduction: Reduction,
        resume: Checkpoint | None = None,
    ) -> Iterator[Round]: ...
