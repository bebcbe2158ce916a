"""Plain reduction: the server sees every upload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from partsong.core.interfaces import Aggregation, Layout, Message, ReductionContext
from partsong.errors import PartyError


@dataclass(frozen=True, slots=True)
class Inbox:
    """The uploads that the server has received, in name order."""

    names: tuple[str, ...]
    uploads: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class PlainReduction:
    """Reduction without secure aggregation: the server sees every upload; one phase, any aggregation.

    Engines have checked each upload individually. Uploads with different names or shapes are refused here.
    """

    phases: int = field(default=1, init=False)
    hides_uploads: bool = field(default=False, init=False)

    def check(self, aggregation: Aggregation) -> None:
        """Accept every aggregation."""

    def setup_party(self, party: str, secret: int, layout: Layout) -> None:
        return None

    def start(self, party_state: None, upload: Message, aggregation: Aggregation, context: ReductionContext) -> Message:
        return upload

    def client_step(self, phase: int, state: Message, reply: Message) -> tuple[Message, Message]:
        return state, state

    def finish_party(self, state: Message) -> None:
        return None

    def first_phase(self, state: None, context: ReductionContext) -> int:
        return 0

    def server_step(
        self, phase: int, inbox: Mapping[str, Message], state: Inbox | None, context: ReductionContext
    ) -> tuple[Inbox, Message]:
        """Keep the uploads in name order; the reply is empty."""
        names = sorted(inbox)
        if not names:
            raise PartyError(
                f"No upload arrived in round {context.index}: every party dropped out. Check the schedule, or resume "
                "from a checkpoint."
            )
        expected = _shapes(inbox[names[0]])
        for name in names:
            if _shapes(inbox[name]) != expected:
                raise PartyError(
                    f"Party {name!r} sent {_shapes(inbox[name])}, but {names[0]!r} sent {expected}. "
                    "All parties must run the same program on the same columns."
                )
        return Inbox(tuple(names), tuple(inbox[name] for name in names)), Message({})

    def result(
        self, state: Inbox, aggregation: Aggregation, context: ReductionContext
    ) -> tuple[None, Message, tuple[str, ...]]:
        """Aggregate in name order; no state is kept."""
        return None, aggregation(state.uploads, context.model), state.names


def _shapes(message: Message) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(array.shape)) for name, array in sorted(message.arrays.items()))
