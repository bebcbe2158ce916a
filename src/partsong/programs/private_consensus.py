"""A consensus whose uploads are clipped around the public model and noised before they leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from partsong import kernels
from partsong.align.assignment import Assignment
from partsong.core import Aggregation, Array, Form, Layout, Message, RowSolver, Shard
from partsong.errors import (
    BudgetSpent,
    CompositionError,
    DivergenceError,
    ParameterError,
    PartsongError,
    PartyError,
    StepTooLarge,
)
from partsong.privacy.mechanisms import KeepAll, Mechanism
from partsong.privacy.randomness import Source, system_source
from partsong.privacy.release import Release
from partsong.privacy.row_weights import sound_model
from partsong.programs.consensus import Consensus, ConsensusParty, ConsensusServer
from partsong.programs.uploading import WholeUpload


def from_the_system(party: str, release: int) -> Source:
    """The operating system's generator, for every release of every party."""
    return system_source


@dataclass(frozen=True, slots=True)
class PrivateParty:
    """A party of the consensus within, and how many noisy messages it has sent."""

    own: ConsensusParty
    releases: int = 0


@dataclass(frozen=True, slots=True)
class PrivateConsensus:
    """`program` with differential privacy for parties: each H_p is seen only clipped around the model, and noisy.

        at a party:    (W_p, H_p) as in `program`; rows of H_p of norm 1, in the order of the model's
        sent:          mechanism(H_p; H) (k × m), weight 1                 broadcast: H (k × m) with rows of norm 1
        at the server: aggregation as in `program`, max(0, ·), rows of norm 1: post-processing, which costs nothing

    **Theorem.** Let T be the number of rounds that a party sends in, at most `most`. All that it ever sends is T
    adaptive uses of the mechanism, each on a vector that depends on its data and on what was public before. Its data
    are therefore protected, in the mechanism's relation, by the composition of T releases (`accounting.Ledger`).
    Weights, numbers of rows, errors and drifts are not sent: the weight is 1. A party that has sent `most` times
    refuses to work. What is not protected: that a party takes part and when, the time it takes, its number type, and
    that it fails; not why it does: the error that leaves it has no number from its data.

    What a simulation knows beside this (errors in a history, weights of all parties) is not released by it; stopping or
    choosing rounds by such numbers would be.
    """

    program: Consensus
    mechanism: Mechanism
    most: int
    source: Callable[[str, int], Source] = from_the_system

    def __post_init__(self) -> None:
        if not isinstance(self.most, (int, np.integer)) or isinstance(self.most, bool) or self.most < 1:
            raise ParameterError(f"A budget that allows no round: most must be a whole number ≥ 1; got {self.most!r}.")
        if isinstance(self.mechanism, KeepAll):
            raise CompositionError("KeepAll adds no noise: run the program itself, or give a mechanism that protects.")
        if not isinstance(self.program, Consensus):
            raise CompositionError(
                f"{type(self.program).__name__} is no consensus: what its parties send is not one H each, which is all "
                "that is clipped and noised here. Take a recipe that is one, or row_private for privacy of rows."
            )
        if not isinstance(self.program.upload, WholeUpload):
            raise CompositionError(
                f"{type(self.program.upload).__name__} sends counts beside H, which would leave without noise. "
                "Use a recipe whose parties send H alone (fedavg, fedprox, fnmf, ipalm_once, mur_once, syn_sd)."
            )

    @property
    def rank(self) -> int:
        """k."""
        return self.program.rank

    @property
    def solver(self) -> RowSolver:
        """As within."""
        return self.program.solver

    @property
    def aggregation(self) -> Aggregation:
        """As within; all weights are 1."""
        return self.program.aggregation

    @property
    def release(self) -> Release:
        """What one upload costs the party that sends it; not secure where somebody has given another source."""
        found = self.mechanism.release
        return found if self.source is from_the_system else replace(found, is_secure=False)

    def start_party(self, shard: Shard, layout: Layout) -> PrivateParty:
        """Nothing sent yet."""
        return PrivateParty(self.program.start_party(shard, layout))

    def start_server(self, layout: Layout) -> tuple[ConsensusServer, Message]:
        """H from the shared seed with rows of norm 1; always sent, as uploads are clipped around it."""
        server, model = self.program.start_server(layout)
        server = _on_unit_rows(server, server.model["H"])
        return server, Message({**model.arrays, "H": server.model["H"]})

    def local(self, shard: Shard, party: PrivateParty, model: Message) -> tuple[PrivateParty, Message]:
        """As within; what leaves is what the mechanism makes of it."""
        if party.releases >= self.most:
            raise BudgetSpent(
                f"Party {shard.name!r} has sent {party.releases} noisy messages, which is all that its budget allows. "
                "Nothing was computed or sent. End the run with the model there is; more rounds cost more ε."
            )
        sound_model(shard.name, model["H"], (self.rank, shard.matrix.shape[1]))
        try:
            own, H = self._worked(shard, party.own, model)
            reference = np.asarray(kernels.of(H).to_numpy(shard.matrix.native(model["H"])))
            ordered = Assignment().plan(reference, kernels.of(H).to_numpy(H)).apply(H)
            noisy = self.mechanism.protect({"H": ordered}, {"H": reference}, self.source(shard.name, party.releases))
        except PartsongError as error:
            raise _without_numbers(shard.name, error) from error
        return PrivateParty(own, party.releases + 1), Message(noisy, 1.0)

    def _worked(self, shard: Shard, party: ConsensusParty, model: Message) -> tuple[ConsensusParty, Array]:
        """The program's own iterations, and H_p (k × m) with rows of norm 1."""
        own, upload = self.program.local(shard, party, model)
        H = upload["H"]
        if not np.isfinite(np.asarray(kernels.of(H).to_numpy(H))).all():
            raise DivergenceError("The iteration has run away.")
        return _scaled(own, H)

    def finish(self, server: ConsensusServer, aggregate: Message) -> tuple[ConsensusServer, Message]:
        """As within, from what is not below zero; then rows of norm 1, and a row of zeros keeps the direction it had.

        Cut off at the party, noise would leave a bias that no number of parties averages out.
        """
        H = aggregate["H"]
        positive = kernels.of(H).like(np.maximum(kernels.of(H).to_numpy(H), 0), H)
        after, model = self.program.finish(server, Message({**aggregate.arrays, "H": positive}, aggregate.weight))
        after = _on_unit_rows(after, server.model["H"])
        return after, Message({**model.arrays, "H": after.model["H"]})

    def components(self, server: ConsensusServer) -> Array:
        """H (k × m) as it stands."""
        return self.program.components(server)

    def metrics(self, server: ConsensusServer) -> Mapping[str, float]:
        """Nothing: no error leaves a party."""
        return {}

    def expects(self, layout: Layout) -> tuple[Mapping[str, Form], ...]:
        """As within, of any sign: noise goes both ways."""
        stated = self.program.expects(layout)
        return tuple({name: replace(form, non_negative=False) for name, form in kind.items()} for kind in stated)

    def works(self, model: Message) -> bool:
        """As within."""
        return self.program.works(model)

    def exchange(self, model: Message) -> tuple[int, int]:
        """As within."""
        return self.program.exchange(model)


def _without_numbers(party: str, error: PartsongError) -> PartyError:
    """The error as it may leave: engines tell everybody its text, and numbers in it would be sent without noise."""
    kind = next((one for one in (StepTooLarge, DivergenceError) if isinstance(error, one)), PartyError)
    return kind(
        f"Party {party!r} failed in its own iterations ({type(error).__name__}); nothing was sent. The reason may hold "
        "numbers from its data and is not told: it is the cause of this error, at the party. Try other steps or data "
        "on another scale there."
    )


def _sizes(H: Array) -> Any:
    """Norms of the rows of H (k), 1 for a row of zeros; of numbers whose squares no float holds, too."""
    values = np.asarray(kernels.of(H).to_numpy(H), np.float64)
    peaks = np.abs(values).max(axis=1, initial=0.0)
    peaks = np.where(peaks > 0, peaks, 1.0)
    found = peaks * np.sqrt(np.square(values / peaks[:, None]).sum(axis=1))
    return np.where(found > 0, found, 1.0)


def _scaled(own: ConsensusParty, H: Array) -> tuple[ConsensusParty, Array]:
    """The party's factors with rows of H of norm 1, and W in their units."""
    on = kernels.of(H)
    sizes = on.like(_sizes(H), H)
    return replace(own, W=own.W * sizes, Ht=own.Ht / sizes), H / sizes[:, None]


def _on_unit_rows(server: ConsensusServer, before: Array) -> ConsensusServer:
    H = server.model["H"]
    on = kernels.of(H)
    values = np.array(on.to_numpy(H), np.float64)
    lost = ~values.any(axis=1)
    values[lost] = np.asarray(kernels.of(before).to_numpy(before), np.float64)[lost]
    values /= _sizes(values)[:, None]
    return replace(server, model=Message({"H": on.like(values, H)}, server.model.weight))
