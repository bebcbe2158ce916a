"""A masked reduction for tests of the slot it fits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partsong.aggregation.linear import add
from partsong.core.interfaces import Message, Reducible
from partsong.core.streams import key, stream
from partsong.errors import CompositionError

PRIME = 2**127 - 1


@dataclass(frozen=True)
class PairwiseMasks:
    """A reduction in three phases, for these tests: public keys, sums with masks that cancel, masks of the silent.

    Keys come from each party's own secret and last for all rounds; the server sees only public keys and masked sums.
    (It has no self masks and no shares, so it is a test of the slot and not of secrecy.)
    """

    phases: int = 3
    hides_uploads: bool = True

    def check(self, aggregation):
        if not isinstance(aggregation, Reducible):
            raise CompositionError("needs a sum")

    def setup_party(self, party, secret, layout):
        return {"party": party, "secret": key(secret, "mask") % PRIME, "sums": 0}

    def start(self, standing, upload, aggregation, context):
        return {**standing, "lifted": aggregation.lift(upload), "round": context.index}

    def client_step(self, phase, state, heard):
        if phase == 0:
            public = pow(3, state["secret"], PRIME)
            return state, Message({"key": np.frombuffer(public.to_bytes(16, "little"), np.uint8)})
        if phase == 1:
            keys = {name: int.from_bytes(array.tobytes(), "little") for name, array in heard.arrays.items()}
            state = {**state, "keys": keys}
            masked = dict(state["lifted"].arrays)
            for other in keys:
                for name, mask in self.masks(state, other).items():
                    masked[name] = masked[name] + mask
            return state, Message(masked, state["lifted"].weight)
        lost = [name for name in state["keys"] if name not in heard.arrays]
        totals = {name: sum(self.masks(state, other)[name] for other in lost) for name in state["lifted"].arrays}
        return state, Message({name: np.asarray(total) for name, total in totals.items()}, 0.0)

    def masks(self, state, other):
        party = state["party"]
        if other == party:
            return {name: np.zeros(array.shape) for name, array in state["lifted"].arrays.items()}
        draw = stream(pow(state["keys"][other], state["secret"], PRIME), "mask", state["round"])
        sign = 1.0 if party < other else -1.0
        return {name: sign * draw.standard_normal(array.shape) for name, array in state["lifted"].arrays.items()}

    def finish_party(self, state):
        return {"party": state["party"], "secret": state["secret"], "sums": state["sums"] + 1}

    def first_phase(self, state, context):
        return 0

    def server_step(self, phase, inbox, state, context):
        if phase == 0:
            return None, Message({name: message["key"] for name, message in inbox.items()})
        total = inbox[min(inbox)]
        for name in sorted(inbox)[1:]:
            total = add(total, inbox[name])
        if phase == 1:
            return (total, tuple(sorted(inbox))), Message({name: np.ones(1) for name in inbox})
        arrays = {name: array - total[name] for name, array in state[0].arrays.items()}
        return (Message(arrays, state[0].weight), state[1]), Message({})

    def result(self, state, aggregation, context):
        return None, aggregation.lower(state[0]), state[1]
