"""Two-stage programs: a few rounds of any method, then exact sums from the components it has reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np

from partsong import kernels
from partsong.core.interfaces import (
    Aggregation,
    Array,
    ArraySpec,
    Layout,
    Message,
    Program,
    ProgramBase,
    Reducible,
    RowSolver,
    Shard,
    State,
    Traits,
    Turn,
)
from partsong.core.parameters import Choice, Whole
from partsong.core.states import state
from partsong.data.conversion import transposed_factor
from partsong.errors import CompositionError, ParameterError
from partsong.methods.averaging import LocalAveraging
from partsong.methods.exact import SharedSums, accelerated_sums
from partsong.methods.registry import Method, Problem, every_method, find, method
from partsong.privacy.exposure import directions_after, directions_of
from partsong.solvers.squared_error import RowState

STAGE = "leg"
"""The array that the server adds to each model: 0 in the first stage, 1 in the second."""


@state("two-stage.party")
@dataclass(frozen=True, slots=True)
class TwoStagePartyState:
    """The party's state in its current stage, and whether that is the second.

    `own` is the party's own Hᵀ (m × k) at the end of the first stage; the second stage has none.
    """

    inner: State
    is_second: bool = False
    own: Array | None = None

    @property
    def Ht(self) -> Array | None:
        """The party's own Hᵀ: the current one in the first stage, the last one of that stage in the second; or None."""
        return self.own if self.is_second else getattr(self.inner, "Ht", None)


@state("two-stage.server")
@dataclass(frozen=True, slots=True)
class TwoStageServerState:
    """The state of the current stage, and the number of rounds so far."""

    inner: State
    rounds: int = 0


@dataclass(frozen=True, slots=True)
class TwoStageAggregation:
    """The aggregation of the first or the second stage, as the broadcast model says."""

    first: Aggregation
    second: Aggregation

    def __call__(self, uploads: Sequence[Message], model: Message) -> Message:
        return (self.second if _is_second(model) else self.first)(uploads, model)


@dataclass(frozen=True, slots=True)
class TwoStageSum(TwoStageAggregation):
    """The same for two linear aggregations: uploads with the arrays `of_second` belong to the second stage."""

    of_second: frozenset[str] = frozenset()

    def lift(self, upload: Message) -> Message:
        return self._of(upload).lift(upload)

    def lower(self, total: Message) -> Message:
        return self._of(total).lower(total)

    def _of(self, message: Message) -> Any:
        return self.second if self.of_second <= message.arrays.keys() else self.first


@dataclass(frozen=True, slots=True)
class TwoStageProgram(ProgramBase):
    """`rounds` exchanges of `first`, then SharedSums from its H: a few long rounds, then exact ones.

        rounds 0 … r−1:  as in `first`
        from round r on: W_p ← argmin ‖X_p − W H‖ once, then gram and cross as in `second`

    The first stage gets close with little traffic. The second descends on the pooled objective, so the model ends where
    pooled NMF from that H would. Sent: what each program sends. Broadcast: also the stage. In the second stage parties
    keep, but do not send, their own H_p of the first, to compare it with the model.
    """

    first: Program
    second: SharedSums
    rounds: int

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ParameterError(f"A TwoStageProgram needs rounds ≥ 1 in its first stage; got {self.rounds}.")
        if self.first.rank != self.second.rank:
            raise ParameterError(
                f"Both stages of a TwoStageProgram need the same rank; got {self.first.rank} and {self.second.rank}."
            )
        noisy = [stage for stage in (self.first, self.second) if stage.traits.release is not None]
        if noisy:
            raise CompositionError(
                f"{type(noisy[0]).__name__} is differentially private, and a TwoStageProgram cannot account for it: "
                "the other stage sends without noise, or with another mechanism. Run the private program by itself."
            )

    @property
    def rank(self) -> int:
        return self.second.rank

    @property
    def traits(self) -> Traits:
        return self.second.traits

    @property
    def solver(self) -> RowSolver:
        return self.second.solver

    @property
    def aggregation(self) -> Aggregation:
        first, second = self.first.aggregation, self.second.aggregation
        if isinstance(first, Reducible) and isinstance(second, Reducible):
            return TwoStageSum(first, second, frozenset({"gram"}))
        return TwoStageAggregation(first, second)

    def start_party(self, shard: Shard, layout: Layout) -> TwoStagePartyState:
        return TwoStagePartyState(self.first.start_party(shard, layout))

    def start_server(self, layout: Layout) -> tuple[TwoStageServerState, Message]:
        inner, model = self.first.start_server(layout)
        return TwoStageServerState(inner), _marked(model, 0)

    def local(self, shard: Shard, party: TwoStagePartyState, model: Message) -> tuple[TwoStagePartyState, Message]:
        """The work of the stage that the model names; W is fitted to the model when the second stage starts."""
        plain = _unmarked(model)
        if not _is_second(model):
            inner, upload = self.first.local(shard, party.inner, plain)
            return replace(party, inner=inner), upload
        rows = party.inner if party.is_second else self._fitted(shard, plain)
        inner, upload = self.second.local(shard, rows, plain)
        return TwoStagePartyState(inner, True, party.Ht), upload

    def _fitted(self, shard: Shard, model: Message) -> RowState:
        return RowState(self.solver.solve_rows(shard.matrix, transposed_factor(shard.matrix, model["H"])))

    def finish(self, server: TwoStageServerState, aggregate: Message) -> tuple[TwoStageServerState, Message]:
        stage: Any = self.second if server.rounds >= self.rounds else self.first
        inner, model = stage.finish(server.inner, aggregate)
        done = server.rounds + 1
        if done == self.rounds:
            H = self.first.components(inner)
            inner, model = self.second.start_from(kernels.of(H).rows_of(H))
        return TwoStageServerState(inner, done), _marked(model, int(done >= self.rounds))

    def components(self, server: TwoStageServerState) -> Array:
        return (self.second if server.rounds >= self.rounds else self.first).components(server.inner)

    def metrics(self, server: TwoStageServerState) -> Mapping[str, float]:
        if server.rounds == self.rounds:
            return {}
        return (self.second if server.rounds > self.rounds else self.first).metrics(server.inner)

    def directions(self, model: Message | None) -> int:
        is_first = model is not None and not _is_second(model)
        return directions_of(self.first if is_first else self.second, model)

    def directions_after(self, exchanges: int, parties: int) -> int:
        first = min(exchanges, self.rounds)
        return directions_after(self.first, first, parties) + directions_after(self.second, exchanges - first, parties)

    def upload_spec(self, layout: Layout) -> tuple[Mapping[str, ArraySpec], ...]:
        return (*self.first.upload_spec(layout), *self.second.upload_spec(layout))

    def exchanges(self, rounds: int, n_parties: int) -> int:
        return self.rounds + rounds - self.rounds // self.first.exchanges(1, n_parties)

    def turn(self, model: Message) -> Turn:
        return Turn() if _is_second(model) else self.first.turn(_unmarked(model))


def _marked(model: Message, stage: int) -> Message:
    return Message({**model.arrays, STAGE: np.array([stage], np.int8)}, model.weight)


def _unmarked(model: Message) -> Message:
    return Message({name: array for name, array in model.arrays.items() if name != STAGE}, model.weight)


def _is_second(model: Message) -> bool:
    return bool(model[STAGE][0])


def exact_after(first: Program, exchanges: int) -> TwoStageProgram:
    """Return a program of so many exchanges of `first`, then exact sums from the model it has reached."""
    return TwoStageProgram(first, accelerated_sums(first.rank), exchanges)


@dataclass(frozen=True, slots=True)
class FirstStage:
    """A parameter type: names of methods that can be the first stage, i.e. synchronous averaging methods."""

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(one.name for one in every_method() if self._can_begin(one))

    def _can_begin(self, one: Method) -> bool:
        if one.passes_to is not None or one.only_texts:
            return False
        return isinstance(one.example, LocalAveraging) and not one.traits.asynchronous

    @property
    def example(self) -> str:
        return self.names[0]

    def __str__(self) -> str:
        return ", ".join(f'"{name}"' for name in self.names)

    def parse(self, name: str, value: Any) -> str:
        return str(Choice.of(*self.names).parse(name, value))

    def read(self, text: str) -> str:
        return text

    def plain(self, value: Any) -> Any:
        return value


@method("then-exact", passes_to="first", counts_exchanges=True)
def then_exact(
    problem: Problem, *, first: Annotated[str, FirstStage()], first_rounds: Annotated[int, Whole()], **options: Any
) -> TwoStageProgram:
    """A few rounds of another method, then exact rounds from the model it has reached.

    `first` names that method, which runs for `first_rounds` rounds; all further options go to it. Sent per round and
    party: first what that method sends, then WᵀW (k × k), WᵀX (k × m), n_p and ‖X_p‖². Never sent: X_p, W_p.
    """
    if problem.rounds is not None and first_rounds >= problem.rounds:
        raise ParameterError(
            f"first_rounds = {first_rounds} leaves no exact round among {problem.rounds} rounds. Use a smaller "
            f'first_rounds, or method = "{first}".',
            parameter="first_rounds",
        )
    stage = find(first).builder(problem, **options)
    return exact_after(stage, stage.exchanges(first_rounds, problem.n_parties or 1))
