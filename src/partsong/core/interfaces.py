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
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol, runtime_checkable

from partsong.errors import CompositionError, ParameterError

Array = Any  # a NumPy array or a torch tensor
State = Any  # a frozen dataclass of arrays, numbers and strings: checkpointable, movable between processes


class Outcome(enum.StrEnum):
    """Why a run ended; numerical trouble is a value, not an exception."""

    CONVERGED = "converged"
    MAX_ROUNDS = "max-rounds"
    TIME_SPENT = "time-spent"
    INTERRUPTED = "interrupted"
    DIVERGED = "diverged"
    BUDGET_SPENT = "budget-spent"


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


@dataclass(frozen=True, slots=True)
class Form:
    """What one array of an upload has to look like; a program states it, and engines hold uploads to it.

    `kind` is a number type's name without its width. `lone` is empty where every entry of a sum has an
    addend from each party; else it says why an entry may be one party's alone, and the way out. A factor is multiplied
    with itself later (norms, distances): its entries may be as large as their squares can be told, and no larger.
    """

    shape: tuple[int, ...]
    kind: str = "float"
    non_negative: bool = False
    lone: str = ""
    is_factor: bool = False


class Matrix(Protocol):
    """Rows in whatever form they come (dense, sparse, on disk, on a device), seen only through products."""

    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def squared_norm(self) -> float: ...
    @property
    def stored(self) -> int: ...
    @property
    def mean(self) -> float: ...
    def visit(self, Ht: Array, update: Callable[[int, int, Array], None], F: Array) -> tuple[Array, Array]:
        """For blocks of rows call update(start, stop, X Hᵀ of the block), which fills F; return FᵀF and XᵀF."""

    def walk(self, Ht: Array, update: Callable[[int, int, Array], None]) -> None:
        """The same pass without the sums."""

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
    `faulty` is about a party whose upload is refused, or whose work ends in an error of ours: "stop" raises that error,
    and all rounds before stay valid; "leave out" treats the party as absent from that round, which says why.
    """

    rounds: int
    seed: int = 0
    absent: Mapping[int, frozenset[str]] = field(default_factory=dict)
    silent: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    kernel_threads: int = 1
    faulty: str = "stop"

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ParameterError(f"A schedule needs at least one round; rounds={self.rounds}.")
        if self.kernel_threads < 1:
            raise ParameterError(f"kernel_threads must be at least 1; got {self.kernel_threads}.")
        if self.faulty not in ("stop", "leave out"):
            raise ParameterError(f'faulty must be "stop" or "leave out"; got {self.faulty!r}.')

    def check(self, names: Sequence[str]) -> None:
        """Refuse names that no party has."""
        named = {name for group in (*self.absent.values(), *self.silent.values()) for name in group}
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


class UpdateRule(Protocol):
    """min_F ½‖A − F B‖² over F ≥ 0, one step, from the normal equations alone. Never sees X, a seed or a network."""

    @property
    def claims(self) -> frozenset[Claim]: ...
    def init(self, factor: Array) -> State: ...
    def step(self, factor: Array, equations: Any, state: State) -> tuple[Array, State]: ...


class Claim(enum.Enum):
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
class Occasion:
    """Which sum this is: the round, who takes part in it, what everybody may know, and the model they were sent."""

    index: int
    participants: tuple[str, ...]
    layout: Layout
    model: Message


class Reduction(Protocol):
    """How uploads become one aggregate: in one exchange or several, in the open or masked.

    At a party: `enrol` makes what lasts from sum to sum (keys, from the party's own secret), `begin` takes its upload,
    `send` answers the server in each phase, `rest` says what is kept for the next sum. At the server: `first` says with
    which phase a sum begins, by what was kept of earlier ones: phases before it serve several sums and were had then;
    `hear` gets a phase's messages by name and broadcasts one reply; `total` closes, with the names that are in the sum.
    A party that falls silent is missing from the inbox of that phase and all later ones; the reduction goes on with the
    rest or says why it cannot. What lasts is not part of a checkpoint: a resumed run enrols anew. Programs do not know
    which reduction is in use. `hides_uploads`: the server sees sums alone, so that only the party itself can check an
    upload, and engines keep to one set of parties in all exchanges of a round.
    """

    @property
    def phases(self) -> int: ...
    @property
    def hides_uploads(self) -> bool: ...
    def check(self, aggregation: Aggregation) -> None: ...
    def enrol(self, party: str, secret: int, layout: Layout) -> State: ...
    def begin(self, standing: State, upload: Message, aggregation: Aggregation, occasion: Occasion) -> State: ...
    def send(self, phase: int, state: State, heard: Message) -> tuple[State, Message]: ...
    def rest(self, state: State) -> State: ...
    def first(self, state: State, occasion: Occasion) -> int: ...
    def hear(
        self, phase: int, inbox: Mapping[str, Message], state: State, occasion: Occasion
    ) -> tuple[State, Message]: ...
    def total(
        self, state: State, aggregation: Aggregation, occasion: Occasion
    ) -> tuple[State, Message, tuple[str, ...]]: ...


class RowSolver(Protocol):
    """W for given H, each row from itself and H alone: what a party does with a finished model."""

    def solve_rows(self, matrix: Matrix, Ht: Array, *, exactly: bool = True) -> Array: ...


@dataclass(frozen=True, slots=True)
class Traits:
    """What a program asks of engines, and of the sums that its uploads go into.

    `full_participation`: a sum over some of the parties means nothing to it. `requires`: "plain" where its uploads must
    not be hidden, "secure" where they must; `reason` says why. `min_in_sum` and `sum_bounds`: over how many parties a
    sum that hides uploads must be, and which numbers it must let pass. `release`: what one upload costs in differential
    privacy (None: it has no noise), and `max_releases` how many there may be; nothing that is measured without noise
    may then choose the rounds, or leave with the model.
    """

    full_participation: bool = False
    requires: Literal["any", "plain", "secure"] = "any"
    reason: str = ""
    min_in_sum: int = 1
    sum_bounds: Mapping[str, float] = field(default_factory=dict)
    release: Any = None
    max_releases: int | None = None


NO_DEMANDS = Traits()


def traits_of(program: Any) -> Traits:
    """Return what a program asks for; nothing where it has no traits."""
    found: Traits = getattr(program, "traits", NO_DEMANDS)
    return found


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


def turn_of(program: Any, model: Message) -> Turn:
    """Return where a model stands; the only exchange of its round, if the program says nothing."""
    tells = getattr(program, "turn", None)
    return ONE_EXCHANGE if tells is None else tells(model)


class Program(Protocol):
    """A distributed algorithm, as pure functions.

    `start_party` and `local` run at a party, `start_server` and `finish` at the server; `components` is the shared
    factor H (k × m) as it stands, `metrics` what the server knows anyway, and `solver` fits new rows to the model.
    `expects` states the arrays of an upload by name, once for each kind of upload that it has; of a program without it,
    engines ask for finite numbers only. A program whose rounds take several exchanges has
    `turn(model) -> Turn` as well: where a model stands among them. What a program asks of engines and sums is in its
    `traits`; one without demands need not have any.
    """

    @property
    def rank(self) -> int: ...
    @property
    def solver(self) -> RowSolver: ...
    @property
    def aggregation(self) -> Aggregation: ...
    def start_party(self, shard: Shard, layout: Layout) -> State: ...
    def start_server(self, layout: Layout) -> tuple[State, Message]: ...
    def local(self, shard: Shard, party: State, model: Message) -> tuple[State, Message]: ...
    def finish(self, server: State, aggregate: Message) -> tuple[State, Message]: ...
    def components(self, server: State) -> Array: ...
    def metrics(self, server: State) -> Mapping[str, float]: ...
    def expects(self, layout: Layout) -> tuple[Mapping[str, Form], ...]: ...


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
