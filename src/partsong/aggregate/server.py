"""Server updates: how the aggregate moves the model."""

from __future__ import annotations

from dataclasses import dataclass

from partsong.core import Message


@dataclass(frozen=True, slots=True)
class Replace:
    """The aggregate is the new model."""

    def init(self, model: Message) -> tuple[()]:
        """Nothing is remembered."""
        return ()

    def step(self, model: Message, aggregate: Message, state: tuple[()]) -> tuple[Message, tuple[()]]:
        """The aggregate."""
        return Message(aggregate.arrays), state
